"""The order of the units as a config asks for it: a policy or a table of one's own, and where the stages are."""

from __future__ import annotations

from pathlib import Path

import torch

from stateflow.chunks import ChunkPlan
from stateflow.pipeline.checker import check_schedule
from stateflow.pipeline.policies import POLICIES, build_schedule, check_options, loop_placement, v_placement
from stateflow.pipeline.schedule import Schedule, ScheduleError
from stateflow.titan.config import DEFAULT_POLICY, make_plan, num_stages, policy, weight_lag
from stateflow.titan.config import _expect as expect
from stateflow.titan.flavors import resolve_model

V_SCHEDULE = "ZBVZeroBubble"  # torchtitan's name for down the ranks and up again


def loss_rank(job_config, world_size: int) -> int:
    """The rank that logs losses: the first one of the rank of the last stage, as torchtitan has it."""
    p = job_config.parallelism
    degree = p.pipeline_parallel_degree
    return 0 if p.pipeline_parallel_schedule == V_SCHEDULE else world_size // degree * (degree - 1)


def read_schedule_file(job_config) -> Schedule:
    """The table of ``[stateflow] schedule_file``, not checked yet.  ValueError if it cannot be read."""
    where = f"[stateflow] schedule_file = {job_config.stateflow.schedule_file!r}"
    try:
        text = Path(job_config.stateflow.schedule_file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: {error}; write one with stateflow schedule CONFIG --out FILE") from error
    try:
        if text.lstrip().startswith("policy "):
            return Schedule.from_text(text)
        return Schedule.from_csv(text, make_plan(job_config).num_chunks)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def recomputes(job_config) -> bool:
    """Whether a backward begins by a whole forward."""
    return job_config.activation_checkpoint.mode == "full"


def make_schedule(job_config, num_chunks: int, num_microbatches: int | None = None) -> Schedule:
    """The checked schedule that a config runs: its schedule file's, or its policy's.  Raises ValueError."""
    p, options = job_config.parallelism, job_config.stateflow
    if options.schedule_file is not None:
        schedule = read_schedule_file(job_config)
        check_schedule(schedule)
        return schedule
    degree = p.pipeline_parallel_degree
    count = job_config.training.local_batch_size // p.pipeline_parallel_microbatch_size
    return build_schedule(
        policy(job_config), degree, num_microbatches or count, num_chunks, num_stages(job_config) // degree,
        weight_lag(job_config), recomputes(job_config),
    )  # fmt: skip


def placement(job_config) -> tuple[int, ...]:
    """The rank of each stage."""
    degree, count = job_config.parallelism.pipeline_parallel_degree, num_stages(job_config)
    if not job_config.stateflow.enable:
        return loop_placement(degree, count)
    if job_config.stateflow.schedule_file is not None:
        return read_schedule_file(job_config).stage_to_rank
    return POLICIES[policy(job_config)].placement(degree, count)


def check_order(job_config, plan: ChunkPlan, stages: int) -> None:
    """Policy or schedule file against the rest of a config that pipelines.  Raises ValueError.

    Also tells torchtitan which rank knows the loss, which it takes from the name of its own schedule.
    """
    options, p = job_config.stateflow, job_config.parallelism
    if not options.enable:
        _check_ends(job_config, stages)
        return
    degree = p.pipeline_parallel_degree
    if options.schedule_file is not None:
        splits = _check_schedule_file(job_config, plan, stages)
        what = f"schedule_file = {options.schedule_file!r} has I and W"
    else:
        name = policy(job_config)
        what, splits = f"policy = {name!r} splits the backward", POLICIES[name].splits_backward
        per_rank = POLICIES[name].stages_per_rank
        _check_stages_a_rank(job_config, name, stages)
        expect(
            per_rank is None or stages == per_rank * degree,
            f"[stateflow] policy = {name!r} takes {per_rank} stages a rank, which is {degree * (per_rank or 1)} in "
            f"all, and the config cuts the model into {stages}; leave out [parallelism] "
            "pipeline_parallel_layers_per_stage and module_fqns_per_model_part",
        )
        if stages % degree == 0:
            try:
                check_options(name, stages // degree, weight_lag(job_config))
            except ValueError as error:
                raise ValueError(f"[stateflow] {error}") from error
    _check_ends(job_config, stages)
    if splits:
        reason = backward_misfit(job_config, splits, job_config.activation_checkpoint.mode)
        expect(reason is None, f"[stateflow] {what}, {reason}")
    if placement(job_config)[-1] == 0:
        p.pipeline_parallel_schedule = V_SCHEDULE
    elif p.pipeline_parallel_schedule == V_SCHEDULE:
        p.pipeline_parallel_schedule = "1F1B"


def backward_misfit(job_config, splits: bool, mode: str) -> str | None:
    """Why a config cannot split its backward (if it ``splits``) or recompute by ``mode``, and what to change.

    None where it can.
    """
    options = job_config.stateflow
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if options.cuda_graphs and mode != "full":
        return 'and [stateflow] cuda_graphs = true records layers recomputed by mode = "full"; set cuda_graphs = false'
    if not splits:
        return None
    if options.cuda_graphs:
        return (
            "which a recorded layer cannot do: set [stateflow] cuda_graphs = false, or a policy without W, e.g. "
            '"interleaved"'
        )
    if compiled and options.sequence_parallel_norms:
        return (
            "which compiled blocks can do only where they get all tokens of a chunk: set [stateflow] "
            'sequence_parallel_norms = false, [compile] enable = false, or a policy without W, e.g. "interleaved"'
        )
    if compiled and mode != "none" and torch.__version__ < (2, 13):
        return (
            f"and before torch 2.13 (here {torch.__version__}) compiled blocks then keep what [activation_checkpoint] "
            f'mode = {mode!r} should recompute; set [compile] enable = false, mode = "none", or a policy without W, '
            'e.g. "interleaved"'
        )
    return None


def _check_ends(job_config, stages: int) -> None:
    """torchtitan's own refusal to take more layers from the first or last stage than a stage has."""
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    p, layers = job_config.parallelism, resolve_model(job_config).num_layers
    first, last = p.pipeline_parallel_first_stage_less_layers, p.pipeline_parallel_last_stage_less_layers
    if p.module_fqns_per_model_part is None:
        try:
            generate_llm_fqn_per_model_part(stages, layers, first, last)
        except ValueError as error:
            raise ValueError(
                f"[parallelism] pipeline_parallel_first_stage_less_layers = {first} and pipeline_parallel_last_stage_"
                f"less_layers = {last} do not fit {layers} layers in {stages} stages, use smaller ones: {error}"
            ) from error


def _check_stages_a_rank(job_config, name: str, stages: int) -> None:
    """``interleaved`` with one stage a rank is 1f1b, and more stages than layers cannot be."""
    p = job_config.parallelism
    degree, layers = p.pipeline_parallel_degree, resolve_model(job_config).num_layers
    ends = p.pipeline_parallel_first_stage_less_layers + p.pipeline_parallel_last_stage_less_layers
    if p.module_fqns_per_model_part is not None:
        return
    expect(
        p.pipeline_parallel_layers_per_stage is not None or stages <= layers + ends,
        f"[stateflow] policy = {name!r} cuts the model into {stages} stages, {stages // degree} a rank, and it has "
        f"{layers} layers ({layers + ends} with the weights of embedding and head); use [parallelism] "
        f"pipeline_parallel_degree = {max(1, (layers + ends) * degree // stages)}, or a policy of one stage a rank, "
        "e.g. 1f1b",
    )
    best = -(-(layers + ends) // (2 * degree))
    works = -(-(layers + ends) // best) == 2 * degree
    expect(
        name != "interleaved" or stages > degree,
        f"[stateflow] policy = 'interleaved' needs at least 2 stages a rank, and [parallelism] "
        f"pipeline_parallel_layers_per_stage = {p.pipeline_parallel_layers_per_stage} gives one; "
        + (f"set it to {best}, or " if works else "")
        + "leave it out, which gives 2, or use policy = '1f1b'",
    )


def _check_schedule_file(job_config, plan: ChunkPlan, stages: int) -> bool:
    """Whether the table splits the backward, after it has been found legal and of this run's sizes."""
    options, p, training = job_config.stateflow, job_config.parallelism, job_config.training
    where = f"[stateflow] schedule_file = {options.schedule_file!r}"
    expect(
        options.policy in (None, DEFAULT_POLICY) and options.weight_lag is None and options.plan is None,
        f"{where} is the order of the units: drop policy, weight_lag and plan",
    )
    schedule = read_schedule_file(job_config)
    degree = p.pipeline_parallel_degree
    key = "chunk_lengths" if options.chunk_lengths else "num_chunks"
    microbatches = training.local_batch_size // p.pipeline_parallel_microbatch_size
    expect(
        schedule.num_chunks == plan.num_chunks,
        f"{where} is of {schedule.num_chunks} chunks a sequence, this run of {plan.num_chunks}; set [stateflow] "
        + (f"num_chunks = {schedule.num_chunks}" if key == "num_chunks" else f"{key} to {schedule.num_chunks} lengths")
        + ", or make the table anew with stateflow schedule",
    )
    for name, has, wants, key in (
        ("ranks", schedule.num_ranks, degree, "[parallelism] pipeline_parallel_degree"),
        ("stages", schedule.num_stages, stages, "[parallelism] pipeline_parallel_layers_per_stage"),
        ("microbatches", schedule.num_microbatches, microbatches, "[training] local_batch_size"),
    ):
        expect(has == wants, f"{where} is of {has} {name}, this run of {wants}; change it, or {key}")
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        raise ValueError(f"{where} is refused: {error}") from error
    known = [loop_placement(degree, stages)]
    if stages == 2 * degree:
        known.append(v_placement(degree, stages))
    expect(
        schedule.stage_to_rank in known,
        f"{where} places stages on the ranks {list(schedule.stage_to_rank)}; the model can be cut for "
        f"{' or '.join(str(list(p)) for p in known)}",
    )
    return bool(schedule.split_stages())
