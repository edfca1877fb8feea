"""The facts of a train.toml that planning needs: a ``planning.job.Job`` from torchtitan's merged config."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

from stateflow.planning.job import Job
from stateflow.titan.config import chunk_cost, mixed_precision_alone, num_stages, weight_lag
from stateflow.titan.config import policy as policy_of
from stateflow.titan.flavors import resolve_model


def job_of(job_config) -> Job:
    """The job of a validated config.

    Raises:
        ValueError: where stages or microbatches do not come out even (the config's own checks only look at runs that
            it pipelines).
    """
    p, training, ac = job_config.parallelism, job_config.training, job_config.activation_checkpoint
    model = resolve_model(job_config)
    size = p.pipeline_parallel_microbatch_size
    if training.local_batch_size % size:
        raise ValueError(
            f"[parallelism] pipeline_parallel_microbatch_size = {size} does not divide [training] local_batch_size = "
            f"{training.local_batch_size}; use a divisor, e.g. 1"
        )
    shard = max(1, p.data_parallel_shard_degree)
    wrapped = shard > 1 or mixed_precision_alone(job_config)
    mode = {"none": "none", "full": "full", "selective": "selective"}.get(ac.mode, "none")
    every = int(ac.selective_ac_option) if str(ac.selective_ac_option).isdigit() else 0
    return Job(
        model=model,
        parts=tuple(map(tuple, part_names(job_config))),
        seq_len=training.seq_len,
        num_ranks=p.pipeline_parallel_degree,
        num_microbatches=training.local_batch_size // size,
        microbatch_size=size,
        skew_cost=chunk_cost(model, training.seq_len),
        tensor_parallel=p.tensor_parallel_degree,
        fsdp=shard,
        wrapped_by_fsdp=wrapped,
        parameter_dtype=TORCH_DTYPE_MAP[training.dtype],
        compute_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param if wrapped else training.dtype],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        recompute=mode,
        recompute_every=every,
        optimizer_states=2,
        multiple=job_config.stateflow.chunk_multiple,
        policy=policy_of(job_config),
        weight_lag=weight_lag(job_config),
    )


def part_names(job_config, count: int | None = None) -> list[list[str]]:
    """The modules of every stage, as ``titan.pipeline`` cuts the model, or cut into ``count`` stages."""
    p = job_config.parallelism
    if p.module_fqns_per_model_part and count is None:
        return p.module_fqns_per_model_part
    layers = resolve_model(job_config).num_layers
    count = count or num_stages(job_config)
    if count == 1:
        return [["tok_embeddings", *(f"layers.{i}" for i in range(layers)), "norm", "output"]]
    return generate_llm_fqn_per_model_part(
        count, layers, p.pipeline_parallel_first_stage_less_layers, p.pipeline_parallel_last_stage_less_layers
    )


def parts_without_layers(job: Job) -> str | None:
    """A remark on stages that hold no layer, whose ranks are all but idle, with what gives them one; else None."""
    bare = [stage for stage, part in enumerate(job.parts) if not any(name.startswith("layers.") for name in part)]
    if not bare:
        return None
    names = {stage: " and ".join(job.parts[stage]) or "nothing" for stage in bare}
    held = "; ".join(f"stage {stage} holds no layer but {name}" for stage, name in names.items())
    if len(job.parts) > job.model.num_layers:
        return f"{held}: there are {job.model.num_layers} layers for {len(job.parts)} stages, take fewer"
    return (
        f"{held}: [parallelism] pipeline_parallel_first_stage_less_layers = 0 and "
        "pipeline_parallel_last_stage_less_layers = 0 would share out the layers alone"
    )


def stage_module(
    job_config, job: Job, part: Sequence[str], device: torch.device, tp_mesh: DeviceMesh | None = None
) -> nn.Module:
    """One stage's part of the model on ``device``, recomputed and compiled as the config asks, cut over ``tp_mesh``."""
    from stateflow.titan.model import TitanModel
    from stateflow.titan.parallelize import parallelize

    config = replace(job.model, init_seed=0 if job.model.init_seed is None else job.model.init_seed)
    with torch.device("meta"):
        model = TitanModel(config)
    model.layers = nn.ModuleDict({n: block for n, block in model.layers.items() if f"layers.{n}" in part})
    for name in ("tok_embeddings", "norm", "output"):
        if name not in part:
            setattr(model, name, None)
    job_config = copy.deepcopy(job_config)
    job_config.activation_checkpoint.mode = job.recompute
    job_config.stateflow.mixed_precision_alone = False  # the whole part is cast below instead
    dims = SimpleNamespace(
        tp_enabled=tp_mesh is not None, fsdp_enabled=False, dp_replicate_enabled=False, get_mesh=lambda _name: tp_mesh
    )
    parallelize(model, dims, job_config)
    model.to_empty(device=device)
    model.to(job.compute_dtype)
    with torch.no_grad():
        model.init_weights()
    return model
