"""The shapes that the recurrent kernels get in a run of a config, on one rank."""

from __future__ import annotations

from collections.abc import Sequence

from stateflow_kernels.gated_delta_rule import CHUNK
from stateflow_kernels.plan_table import Shape, bucket_of
from stateflow_kernels.waves import walk_segments

FAMILY, MAMBA3 = "gated_delta_rule", "mamba3"
DTYPES = ("bfloat16", "float16", "float32")


def explicit_shapes(
    heads: Sequence[int],
    tokens: Sequence[int],
    k_dim: int,
    v_dim: int,
    dtype: str,
    batch: int = 1,
    key_heads: int | None = None,
    num_angles: int | None = None,
    exact_order: bool = True,
) -> list[Shape]:
    """Every count of heads with every bucket of tokens.

    With `num_angles` those of Mamba-3, with N = k_dim and P = v_dim; else of the gated delta rule, and without
    `exact_order` in segments where that is faster.

    Raises:
        ValueError: a size that the kernels do not take.
    """
    from stateflow.recurrence import gated_delta
    from stateflow.recurrence.mamba3 import kernel_size_misfit as mamba3_misfit

    for name, values in (("heads", heads), ("tokens", tokens), ("batch", [batch])):
        if not values or min(values) < 1:
            raise ValueError(f"{name} {list(values)}: give at least one number, and none below 1")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: the kernels take {', '.join(DTYPES)}")
    if num_angles is None:
        misfit = gated_delta.kernel_size_misfit(k_dim, v_dim)
    elif key_heads is not None:
        misfit = "Mamba-3's heads share B and C: leave --key-heads out"
    elif not 1 <= num_angles <= k_dim // 2:
        misfit = f"--angles {num_angles}: they turn pairs of the N = {k_dim} dimensions, 1 to {k_dim // 2} of them"
    else:
        misfit = mamba3_misfit(k_dim, v_dim)
    if misfit is not None:
        raise ValueError(misfit)
    buckets = sorted({bucket_of(n) for n in tokens})
    shapes = []
    for count in dict.fromkeys(heads):
        if num_angles is not None:
            shapes += [Shape(MAMBA3, count, 1, k_dim, v_dim, dtype, batch, n, num_angles) for n in buckets]
            continue
        shared = count if key_heads is None else key_heads
        if shared < 1 or count % shared:
            raise ValueError(f"{count} heads are no multiple of {shared} key heads; leave --key-heads out")
        # Of the length itself: its bucket may have another number of segments.
        segments = [1 if exact_order else walk_segments(-(-n // CHUNK), batch * count, k_dim, v_dim) for n in tokens]
        for n, parts in sorted(set(zip(map(bucket_of, tokens), segments, strict=True))):
            shapes.append(Shape(FAMILY, count, shared, k_dim, v_dim, dtype, batch, n, segments=parts))
    return shapes


def config_shapes(config) -> list[Shape]:
    """From a torchtitan config: heads after tensor parallelism, chunk lengths of the plan, the compute dtype.

    Raises:
        ValueError: the model has no layer that uses these kernels, or sizes that they do not take.
    """
    from stateflow.layers import HeadGroups
    from stateflow.titan.config import make_plan
    from stateflow.titan.flavors import resolve_model

    model, p, training = resolve_model(config), config.parallelism, config.training
    kinds = model.layer_kinds()
    if not {"gdn", "mamba3"} & set(kinds):
        raise ValueError(
            f"[model] flavor = {config.model.flavor!r} has no gdn or mamba3 layer: there is nothing to tune"
        )
    if config.stateflow.kernels == "reference":
        raise ValueError('[stateflow] kernels = "reference" uses no kernels: there is nothing to tune')
    pipelined = p.pipeline_parallel_degree > 1
    lengths = make_plan(config).lengths if pipelined and config.stateflow.enable else (training.seq_len,)
    batch = p.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size
    dtype, shapes = compute_dtype(config), []
    if "gdn" in kinds:
        num_v_heads = model.num_heads if model.num_v_heads is None else model.num_v_heads
        local = HeadGroups.whole(num_v_heads, model.num_heads).part(0, p.tensor_parallel_degree)
        heads = sum(local.sizes)
        # Where ranks share a key head unevenly, each expands its part to its own heads.
        key_heads = len(local.sizes) if local.are_equal() else heads
        sizes = (model.head_k_dim, model.head_v_dim)
        shapes += explicit_shapes(
            [heads], lengths, *sizes, dtype, batch, key_heads, exact_order=config.stateflow.exact_order
        )
    if "mamba3" in kinds:
        heads = model.num_mamba_heads // p.tensor_parallel_degree
        sizes = (model.mamba_state_dim, model.mamba_head_dim)
        shapes += explicit_shapes(
            [heads], lengths, *sizes, dtype, batch, num_angles=model.mamba_num_angles
        )
    return shapes


def compute_dtype(config) -> str:
    """What activations are computed in. FSDP casts to mixed_precision_param; without it TP and PP cast nothing."""
    p, training = config.parallelism, config.training
    casts = p.data_parallel_shard_degree != 1 or (
        p.tensor_parallel_degree == 1 and p.pipeline_parallel_degree == 1
    )
    return training.mixed_precision_param if casts else training.dtype
