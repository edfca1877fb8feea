"""The ``[stateflow]`` section of a train.toml, and the checks that run before any process group exists."""

# No `from __future__ import annotations` here: torchtitan's ConfigManager needs real types.
import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path

from stateflow.chunks import ChunkCost, ChunkPlan
from stateflow.pipeline.policies import POLICIES
from stateflow.planning.plan_file import PlanFile, Target, misfit, model_digest, read_plan
from stateflow.titan.toml_types import check_ranges, check_types

MODEL_NAME = "stateflow"  # under which the models are registered
DEFAULT_NUM_CHUNKS = 4
DEFAULT_POLICY = "1f1b"


@dataclass
class ModelOverrides:
    """The sizes and constants of the flavor's model, see `ModelConfig`; unset keeps the flavor's value."""

    dim: int | None = None
    num_layers: int | None = None
    pattern: str | None = None
    """Mixers tiled over the layers, e.g. "gdn gdn gdn attention" """
    vocab_size: int | None = None
    num_heads: int | None = None
    num_v_heads: int | None = None
    head_k_dim: int | None = None
    head_v_dim: int | None = None
    conv_size: int | None = None
    allow_neg_eigval: bool | None = None
    num_mamba_heads: int | None = None
    mamba_head_dim: int | None = None
    mamba_state_dim: int | None = None
    mamba_num_angles: int | None = None
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    attention_head_dim: int | None = None
    rope_theta: float | None = None
    ffn_dim: int | None = None
    norm_eps: float | None = None
    init_std: float | None = None


@dataclass
class StateFlow:
    enable: bool = False
    """Pipeline chunks of a sequence; false runs torchtitan's own schedule of whole sequences on the same model"""
    num_chunks: int | None = None
    """Chunks a sequence is cut into (N); 4 if neither this nor chunk_lengths is given"""
    skew: float | None = None
    """alpha of eq. 11: 0 cuts equal chunks, 1 cuts chunks of equal cost, up to 1.25 is searched in the paper"""
    chunk_lengths: list[int] = field(default_factory=list)
    """Explicit chunk lengths, e.g. [768, 512, 512, 256]; excludes num_chunks and skew"""
    plan: str | None = None
    """A plan file of `stateflow plan`: chunk lengths, policy, stages; excludes num_chunks, skew and chunk_lengths"""
    chunk_multiple: int | None = None
    """Boundaries are rounded to multiples of this many tokens; 128, and less for short sequences, if unset"""
    policy: str | None = None
    """Order: "1f1b" (the paper's; if unset), "gpipe", "interleaved", "zero_bubble", "mepipe" or "v_shape" """
    weight_lag: int | None = None
    """Most units whose weight gradients may trail their input gradients, for policies that split the backward"""
    schedule_file: str | None = None
    """A table of your own instead of a policy: CSV, one line a rank, see `stateflow schedule`; excludes policy"""
    reset_at_documents: bool = True
    """State, convolution and attention start afresh at each document of a packed sequence, and only there"""
    rope_reset: bool = False
    """Rotary positions count from the start of each document; equal but for rounding, as rotations are relative"""
    sequence_parallel_norms: bool = False
    """Under tensor parallelism each rank holds residual stream and norms of its part of a chunk's tokens only"""
    kernels: str = "auto"
    """"auto" uses the Triton kernels where they fit, else PyTorch; "triton" insists on them; "reference" is PyTorch"""
    overlap_projections: str = "auto"
    """Products of a Mamba-3 layer beside its kernels: "auto" where the kernels' plan says so, "on" or "off" """
    exact_order: bool = True
    """False lets the kernels of few heads walk through segments of a sequence at once: other bits, to rounding only"""
    trace: bool = False
    """Record when each action of the steps trace_steps begins and ends, in dump_folder/trace; see `stateflow draw`"""
    trace_steps: list[int] = field(default_factory=lambda: [3, 5])
    """First and last pipeline step to trace, counted from 1"""
    mixed_precision_alone: bool = False
    """Under a pipeline without FSDP, too, compute in mixed_precision_param, with parameters in training.dtype"""
    cuda_graphs: bool = False
    """Launch each recurrent layer's forward and backward as one CUDA graph, recorded once for each chunk length"""
    tokenizer: str = "bytes"
    """"bytes", or the path of a Hugging Face tokenizer.json or of the folder that holds one"""
    model: ModelOverrides = field(default_factory=ModelOverrides)
    """Overrides of the flavor's model"""


@dataclass
class JobConfig:
    stateflow: StateFlow = field(default_factory=StateFlow)


def _expect(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_types(options: StateFlow) -> None:
    """torchtitan only warns about a wrong TOML type, so each key is checked here."""
    flags = ("enable", "reset_at_documents", "rope_reset", "sequence_parallel_norms", "mixed_precision_alone")
    for name in (*flags, "cuda_graphs", "exact_order", "trace"):
        value = getattr(options, name)
        _expect(isinstance(value, bool), f"[stateflow] {name} = {value!r} must be true or false")
    for name, least in (("num_chunks", 1), ("chunk_multiple", 1), ("weight_lag", 0)):
        value = getattr(options, name)
        _expect(value is None or _is_int(value), f"[stateflow] {name} = {value!r} must be a whole number, e.g. 8")
        _expect(value is None or value >= least, f"[stateflow] {name} = {value} is too small; the least is {least}")
    _expect(
        options.schedule_file is None or isinstance(options.schedule_file, str),
        f"[stateflow] schedule_file = {options.schedule_file!r} must be the path of a table",
    )
    _expect(
        options.plan is None or isinstance(options.plan, str),
        f"[stateflow] plan = {options.plan!r} must be the path of a plan file",
    )
    skew = options.skew
    _expect(
        skew is None or _is_int(skew) or isinstance(skew, float),
        f"[stateflow] skew = {skew!r} must be a number, e.g. skew = 0.75",
    )
    lengths = options.chunk_lengths
    _expect(
        isinstance(lengths, list) and all(_is_int(n) for n in lengths),
        f"[stateflow] chunk_lengths = {lengths!r} must be a list of whole numbers, e.g. [768, 512, 512, 256]",
    )
    steps = options.trace_steps
    _expect(
        isinstance(steps, list) and len(steps) == 2 and all(map(_is_int, steps)) and 1 <= steps[0] <= steps[1],
        f"[stateflow] trace_steps = {steps!r} must be the first and the last step, counted from 1, e.g. [3, 5]",
    )
    _expect(
        options.policy is None or isinstance(options.policy, str),
        f"[stateflow] policy = {options.policy!r} must be a string, e.g. \"1f1b\"",
    )
    if options.policy is not None and options.policy not in POLICIES:
        near = difflib.get_close_matches(options.policy.lower(), POLICIES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"[stateflow] policy = {options.policy!r} is unknown; {hint}known: {', '.join(POLICIES)}")
    _expect(
        options.reset_at_documents or not options.rope_reset,
        "[stateflow] rope_reset = true has no documents to reset at with reset_at_documents = false; set that to true, "
        "or rope_reset to false",
    )
    from stateflow.layers.mamba3_overlap import MODES as OVERLAP_MODES
    from stateflow.titan.flavors import KERNEL_BACKENDS

    if not isinstance(options.kernels, str) or options.kernels not in KERNEL_BACKENDS:
        known = ", ".join(f'"{name}"' for name in KERNEL_BACKENDS)
        raise ValueError(f"[stateflow] kernels = {options.kernels!r} is unknown; use one of {known}")
    if options.overlap_projections not in OVERLAP_MODES:
        known = ", ".join(f'"{name}"' for name in OVERLAP_MODES)
        raise ValueError(
            f"[stateflow] overlap_projections = {options.overlap_projections!r} is unknown; use one of {known}"
        )
    _expect(
        isinstance(options.tokenizer, str),
        f"[stateflow] tokenizer = {options.tokenizer!r} must be \"bytes\" or a path",
    )
    check_types(ModelOverrides, vars(options.model), "stateflow.model")


def chunk_cost(model_args, seq_len: int) -> ChunkCost:
    """Coefficients of eq. 9 for a model: FLOPs a token (linear) and FLOPs a token of prefix (quadratic)."""
    from stateflow.model import flops_per_token

    kinds = model_args.layer_kinds()
    # Two products of 2 * heads * head_dim FLOPs for each pair of tokens, three times with the backward.
    quadratic = 12.0 * kinds.count("attention") * model_args.num_attention_heads * model_args.attention_head_dim
    total = flops_per_token(model_args, seq_len)
    return ChunkCost(linear=float(total) - quadratic * seq_len / 2, quadratic=quadratic)


def make_plan(job_config) -> ChunkPlan:
    """The chunk plan of a config; ValueError names the key of ``[stateflow]`` that does not fit."""
    from stateflow.titan.flavors import resolve_model

    options, seq_len = job_config.stateflow, job_config.training.seq_len
    if options.plan is not None:
        return _plan_file(job_config).plan()
    if options.chunk_lengths:
        for name in ("num_chunks", "skew"):
            value = getattr(options, name)
            _expect(
                value is None,
                f"[stateflow] chunk_lengths = {options.chunk_lengths} already says where to cut: drop {name} = {value} "
                f"(on the command line: --stateflow.{name.replace('_', '-')} None)",
            )
        try:
            return ChunkPlan.explicit(seq_len, options.chunk_lengths)
        except ValueError as error:
            raise ValueError(f"[stateflow] chunk_lengths with [training] seq_len = {seq_len}: {error}") from error
    num_chunks = DEFAULT_NUM_CHUNKS if options.num_chunks is None else options.num_chunks
    skew = 0.0 if options.skew is None else float(options.skew)
    cost = chunk_cost(resolve_model(job_config), seq_len)
    try:
        return ChunkPlan.build(seq_len, num_chunks, skew, cost=cost, multiple=options.chunk_multiple)
    except ValueError as error:
        raise ValueError(
            f"[stateflow] num_chunks = {num_chunks}, skew = {skew} with [training] seq_len = {seq_len}: {error}"
        ) from error


def policy(job_config) -> str:
    """The order of the units: the plan file's, or that of ``[stateflow] policy``."""
    if job_config.stateflow.plan is not None:
        return _plan_file(job_config).policy
    return job_config.stateflow.policy or DEFAULT_POLICY


def weight_lag(job_config) -> int | None:
    """Units whose W may trail: the plan file's, or ``[stateflow] weight_lag``."""
    if job_config.stateflow.plan is not None:
        return _plan_file(job_config).weight_lag
    return job_config.stateflow.weight_lag


def plan_target(job_config) -> Target:
    """What a plan file must have been made for to fit this run."""
    from stateflow.titan.flavors import resolve_model

    p, training = job_config.parallelism, job_config.training
    return Target(
        model=model_digest(resolve_model(job_config)),
        seq_len=training.seq_len,
        ranks=p.pipeline_parallel_degree,
        stages=num_stages(job_config),
        microbatches=training.local_batch_size // p.pipeline_parallel_microbatch_size,
        recompute=job_config.activation_checkpoint.mode,
    )


def _plan_file(job_config) -> PlanFile:
    """The plan of a config.  Raises ValueError, with the key to change, where it does not fit the rest."""
    options, size = job_config.stateflow, job_config.parallelism.pipeline_parallel_microbatch_size
    where = f"[stateflow] plan = {options.plan!r}"
    for name, unset in (("num_chunks", None), ("skew", None), ("chunk_lengths", [])):
        value = getattr(options, name)
        _expect(
            value == unset,
            f"{where} already says where to cut: drop {name} = {value}, or the plan (on the command line: "
            f"--stateflow.{name.replace('_', '-')}{' None' if unset is None else ''})",
        )
    found = read_plan(Path(options.plan))
    target = plan_target(job_config)
    if not options.enable:
        target = dataclasses.replace(target, stages=found.target.stages)  # torchtitan's schedule has its own
    planned = found.target
    change = {
        "seq_len": f"[training] seq_len = {planned.seq_len}",
        "ranks": f"[parallelism] pipeline_parallel_degree = {planned.ranks}",
        "stages": "leave out [parallelism] pipeline_parallel_layers_per_stage and module_fqns_per_model_part",
        "microbatches": f"[training] local_batch_size = {planned.microbatches * size}",
        "recompute": f'[activation_checkpoint] mode = "{planned.recompute}"',
    }
    reason = misfit(found, target, change, found.policy in POLICIES)
    _expect(reason is None, f"{where} {reason}; or make one for this run with stateflow plan, or drop the key")
    for name in ("policy", "weight_lag"):
        value, planned_value = getattr(options, name), getattr(found, name)
        _expect(
            value in (None, planned_value),
            f"{where} brings {name} = {planned_value!r}; drop {name} = {value!r}, or the plan (on the command line: "
            f"--stateflow.{name.replace('_', '-')} None)",
        )
    return found


def _check_sequence_parallel(job_config, plan: ChunkPlan) -> None:
    """Each rank of tensor parallelism keeps equally many tokens of what the model is called with."""
    options, degree = job_config.stateflow, job_config.parallelism.tensor_parallel_degree
    if not options.sequence_parallel_norms:
        return
    asked = f"[stateflow] sequence_parallel_norms = true with tensor_parallel_degree = {degree} needs"
    for section in ("training", "validation") if job_config.validation.enable else ("training",):
        seq_len = getattr(job_config, section).seq_len
        _expect(
            seq_len % degree == 0,
            f"{asked} a multiple of {degree} tokens in a sequence, [{section}] seq_len = {seq_len}; set it to "
            f"{-(-seq_len // degree) * degree}, or sequence_parallel_norms = false",
        )
    pipelined = options.enable and job_config.parallelism.pipeline_parallel_degree > 1
    uneven = [n for n in plan.lengths if n % degree]
    if pipelined and uneven:
        multiple = math.lcm(options.chunk_multiple or 1, degree)
        change = "change chunk_lengths" if options.chunk_lengths else f"set chunk_multiple = {multiple}"
        if plan.num_chunks * multiple > plan.seq_len and not options.chunk_lengths:
            change += f" and num_chunks = {plan.seq_len // multiple}"
        raise ValueError(
            f"{asked} a multiple of {degree} tokens in every chunk, the plan has a chunk of {uneven[0]}; {change}, or "
            "sequence_parallel_norms = false"
        )


def num_stages(job_config) -> int:
    """Stages of the pipeline: as many as ``pipeline_parallel_layers_per_stage`` asks for, else those of the schedule
    file, the plan or the policy: one a rank, or two where stages are interleaved, as torchtitan has it.
    """
    from stateflow.titan.flavors import resolve_model

    p, options = job_config.parallelism, job_config.stateflow
    degree, per_stage = p.pipeline_parallel_degree, p.pipeline_parallel_layers_per_stage
    if p.module_fqns_per_model_part is not None:
        return len(p.module_fqns_per_model_part)
    if per_stage is None:
        if not options.enable or degree == 1:
            return degree
        if options.schedule_file is not None:
            from stateflow.titan.order import read_schedule_file

            return read_schedule_file(job_config).num_stages
        if options.plan is not None:
            return read_plan(Path(options.plan)).target.stages
        return degree * POLICIES[options.policy or DEFAULT_POLICY].default_stages_per_rank
    layers = resolve_model(job_config).num_layers
    weights = p.pipeline_parallel_first_stage_less_layers + p.pipeline_parallel_last_stage_less_layers
    return -(-(layers + weights) // per_stage)


def _check_parts(names: list[list[str]], num_layers: int) -> None:
    """``module_fqns_per_model_part`` must hold the whole model, once and in order; a layer left out trains nothing."""
    whole = ["tok_embeddings", *(f"layers.{i}" for i in range(num_layers)), "norm", "output"]
    given = [name for part in names for name in part]
    for name in given:
        _expect(
            name in whole,
            f"[parallelism] module_fqns_per_model_part names {name!r}, which the model does not have; it has "
            f"tok_embeddings, layers.0 to layers.{num_layers - 1}, norm and output",
        )
    missing = [name for name in whole if name not in given]
    _expect(not missing, f"[parallelism] module_fqns_per_model_part leaves out {', '.join(missing)}; add them")
    _expect(
        given == whole,
        f"[parallelism] module_fqns_per_model_part = {names} must name each module once and in the model's order",
    )


def _check_data(job_config, model) -> None:
    """Tokenizer and data sets exist (nothing is downloaded for this), and the model has a row for each token."""
    from stateflow.titan.data import resolve_dataset
    from stateflow.titan.tokenizer import build_tokenizer

    resolve_dataset(job_config.training.dataset, job_config.training.dataset_path)
    if job_config.validation.enable:
        resolve_dataset(job_config.validation.dataset, job_config.validation.dataset_path)
    tokens = build_tokenizer(job_config).get_vocab_size()
    _expect(
        tokens <= model.vocab_size,
        f"[stateflow] tokenizer = {job_config.stateflow.tokenizer!r} has {tokens} tokens, the model's vocab_size is "
        f"{model.vocab_size}; set [stateflow.model] vocab_size = {tokens} or more",
    )


def _check_kernels(options: StateFlow, model) -> None:
    """`kernels = "triton"` with layers or sizes that the kernels do not take."""
    from stateflow.recurrence.gated_delta import kernel_size_misfit
    from stateflow.recurrence.mamba3 import kernel_size_misfit as mamba3_misfit

    if options.kernels == "triton" and "mamba3" in model.layer_kinds():
        misfit = mamba3_misfit(model.mamba_state_dim, model.mamba_head_dim)
        _expect(
            misfit is None,
            '[stateflow] kernels = "triton" does not fit the mamba3 layers, with N = mamba_state_dim and P = '
            f'mamba_head_dim: {misfit}; change it, or set kernels = "auto"',
        )

    if options.kernels == "triton" and "gdn" in model.layer_kinds():
        misfit = kernel_size_misfit(model.head_k_dim, model.head_v_dim)
        _expect(
            misfit is None,
            f'[stateflow] kernels = "triton" does not fit the model, with K = head_k_dim and V = head_v_dim: {misfit}; '
            'change it, or set kernels = "auto"',
        )


def mixed_precision_alone(job_config) -> bool:
    """Whether a rank computes in mixed precision with nothing that shards: by working weights, or FSDP2 on one rank."""
    return job_config.stateflow.mixed_precision_alone and job_config.parallelism.data_parallel_shard_degree in (-1, 1)


def has_working_weights(job_config) -> bool:
    """Whether mixed precision on one rank comes from `WorkingWeights`; from FSDP2 where these do not reach."""
    training = job_config.training
    return (
        mixed_precision_alone(job_config)
        and job_config.parallelism.tensor_parallel_degree == 1
        and training.mixed_precision_reduce == training.dtype
        and not training.enable_cpu_offload
    )


TORCH_SPLIT_SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def _check_mixed_precision_alone(job_config) -> None:
    p = job_config.parallelism
    if not mixed_precision_alone(job_config):
        return
    _expect(
        p.pipeline_parallel_degree > 1,
        "[stateflow] mixed_precision_alone = true is for pipelines; with pipeline_parallel_degree = 1 torchtitan "
        "computes in mixed_precision_param anyway: set it to false",
    )
    replicas = p.data_parallel_replicate_degree
    _expect(
        replicas == 1,
        f"[stateflow] mixed_precision_alone = true does not go with data_parallel_replicate_degree = {replicas}: "
        "set that to 1, or data_parallel_shard_degree to 2 or more, which brings mixed precision with it",
    )
    _expect(
        job_config.stateflow.enable or p.pipeline_parallel_schedule not in TORCH_SPLIT_SCHEDULES,
        f"[stateflow] mixed_precision_alone = true does not go with torchtitan's {p.pipeline_parallel_schedule}, whose "
        'own split of the backward does not find the working weights: use pipeline_parallel_schedule = "1F1B", or '
        "mixed_precision_alone = false",
    )


def _check_cuda_graphs(job_config) -> None:
    """What a recorded layer needs: gradients that stay in place, and nothing in it that Python does in each unit."""
    options = job_config.stateflow
    if not options.cuda_graphs:
        return
    start = "[stateflow] cuda_graphs = true"
    _expect(
        has_working_weights(job_config),
        f"{start} needs mixed_precision_alone = true in a pipeline without data or tensor parallelism, with [training] "
        "dtype = mixed_precision_reduce and no CPU offload; set these, or cuda_graphs = false",
    )
    mode = job_config.activation_checkpoint.mode
    _expect(
        mode == "full",
        f'{start} records recomputed layers, [activation_checkpoint] mode = "{mode}"; set mode = "full", or '
        "cuda_graphs = false",
    )
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    _expect(not compiled, f"{start} does not go with compiled blocks; drop [compile] enable, or cuda_graphs")


def validate(job_config) -> None:
    """Checks everything about a config that can be known without a process group.  Raises ValueError."""
    from stateflow.titan.flavors import resolve_model
    from stateflow.titan.order import check_order
    from stateflow.titan.resume import check_resume
    from stateflow.titan.tensor_parallel import check_degree

    options = job_config.stateflow
    _expect(
        isinstance(options, StateFlow) and isinstance(options.model, ModelOverrides),
        "stateflow and stateflow.model must be tables: write [stateflow] and [stateflow.model] with keys below",
    )
    _check_types(options)
    _expect(
        job_config.model.name == MODEL_NAME,
        f"[model] name = {job_config.model.name!r} is none of these models; set [model] name = \"{MODEL_NAME}\", and "
        "flavor to one of its flavors",
    )
    check_ranges(job_config)
    model = resolve_model(job_config)
    p, training, validation = job_config.parallelism, job_config.training, job_config.validation
    _expect(
        not options.trace or (options.enable and p.pipeline_parallel_degree > 1),
        "[stateflow] trace = true records the schedule of chunks, which needs enable = true and [parallelism] "
        "pipeline_parallel_degree > 1; set them, or trace to false",
    )
    _expect(
        not options.trace or options.trace_steps[1] <= training.steps,
        f"[stateflow] trace_steps = {options.trace_steps} is beyond [training] steps = {training.steps}; trace earlier",
    )
    _check_kernels(options, model)
    # Also with enable = false: a plan that cannot be is an error, not a surprise for later.
    plan = make_plan(job_config)
    _check_data(job_config, model)

    check_degree(model, p.tensor_parallel_degree)
    _expect(
        not p.enable_async_tensor_parallel,
        "[parallelism] enable_async_tensor_parallel = true rewrites the collectives of torch's own parallel layers, "
        "which these models do not use; set it to false",
    )
    _check_sequence_parallel(job_config, plan)
    _check_mixed_precision_alone(job_config)
    _check_cuda_graphs(job_config)
    for name in ("context_parallel_degree", "expert_parallel_degree"):
        value = getattr(p, name)
        _expect(value == 1, f"[parallelism] {name} = {value} does not apply to these models; set it to 1")
    check_resume(job_config)
    degree = p.pipeline_parallel_degree
    if degree == 1:
        return
    _expect(
        degree <= model.num_layers,
        f"[parallelism] pipeline_parallel_degree = {degree} is above the model's {model.num_layers} layers; "
        f"use at most {model.num_layers}",
    )
    if p.module_fqns_per_model_part is not None:
        _check_parts(p.module_fqns_per_model_part, model.num_layers)
    stages = num_stages(job_config)
    check_order(job_config, plan, stages)
    _expect(
        stages % degree == 0,
        f"[parallelism] pipeline_parallel_layers_per_stage = {p.pipeline_parallel_layers_per_stage} gives {stages} "
        f"stages, not a multiple of pipeline_parallel_degree = {degree}; choose another number of layers a stage",
    )
    _expect(
        p.data_parallel_replicate_degree == 1 or p.data_parallel_shard_degree > 1,
        f"[parallelism] data_parallel_replicate_degree = {p.data_parallel_replicate_degree} with pipelining needs "
        "data_parallel_shard_degree > 1 (HSDP): torchtitan has no DDP beside pipelining",
    )
    size = p.pipeline_parallel_microbatch_size
    _expect(
        size >= 1 and training.local_batch_size % size == 0,
        f"[parallelism] pipeline_parallel_microbatch_size = {size} does not divide [training] local_batch_size = "
        f"{training.local_batch_size}; use a divisor, e.g. 1",
    )
    if validation.enable:
        _expect(
            validation.steps > 0,
            f"[validation] steps = {validation.steps} reads to the end of the data, where a batch may be short; a "
            "pipeline needs whole batches: set [validation] steps, e.g. 8",
        )
        for name in ("local_batch_size", "seq_len"):
            have, need = getattr(validation, name), getattr(training, name)
            _expect(
                have == need,
                f"[validation] {name} = {have} differs from [training] {name} = {need}; a pipeline has one shape of "
                f"batch: set [validation] {name} = {need}",
            )


def install() -> None:
    """Makes torchtitan's ConfigManager run ``check_types`` and ``validate``, on every way to start a run."""
    from torchtitan.config.manager import ConfigManager

    if getattr(ConfigManager._validate_config, "checks_stateflow", False):
        return
    original, load = ConfigManager._validate_config, ConfigManager._dict_to_dataclass

    def _validate_config(self) -> None:
        original(self)
        if hasattr(self.config, "stateflow"):
            validate(self.config)

    def _dict_to_dataclass(self, cls, data):
        if hasattr(cls, "__dataclass_fields__") and "stateflow" in cls.__dataclass_fields__:  # the whole config
            check_types(cls, data)
        return load(self, cls, data)

    _validate_config.checks_stateflow = True
    ConfigManager._validate_config, ConfigManager._dict_to_dataclass = _validate_config, _dict_to_dataclass
