"""torchtitan's ``pipelining_fn``: this project's schedule, or torchtitan's own with its gradient scale corrected."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.pipeline_parallel import (
    generate_llm_fqn_per_model_part,
    pipeline_llm,
    pipeline_module_split,
)
from torchtitan.tools.logging import logger

from stateflow.documents import COLUMNS
from stateflow.pipeline.policies import loop_placement
from stateflow.pipeline.runtime import ScheduleStateFlow, StateFlowStage
from stateflow.pipeline.trace import ActionTrace
from stateflow.pipeline.watchdog import report_termination
from stateflow.titan.config import make_plan, mixed_precision_alone, num_stages, weight_lag
from stateflow.titan.config import policy as policy_of
from stateflow.titan.data import TokenCounter, valid_tokens
from stateflow.titan.order import V_SCHEDULE, placement, read_schedule_file, recomputes


class GlobalMean:
    """The factor 1 / (valid tokens of the whole optimizer step, over all data-parallel ranks), known before its first
    backward.

    torchtitan 0.2.2 divides by that count after the backward, so the gradients of its own pipeline schedules are as
    many times too large.  The Trainer has pulled all batches of the step from the data loader before the first
    schedule call, and the loader counts what it hands out.
    """

    def __init__(self, counter: TokenCounter, accumulation_steps: int, group: dist.ProcessGroup | None, device):
        self.counter, self.accumulation_steps, self.group, self.device = counter, accumulation_steps, group, device
        self._calls = 0
        self._scale: Tensor | None = None
        counter.take()  # what an earlier run of this process left, e.g. one without a pipeline

    def next(self) -> Tensor:
        """Called once by each schedule call of a step, on every rank."""
        if self._calls % self.accumulation_steps == 0:
            count = torch.tensor(self.counter.take(), dtype=torch.float64)
            if self.device.type != "mps":
                count = count.to(self.device)
            if self.group is not None:
                dist.all_reduce(count, group=self.group)
            self._scale = 1.0 / count.clamp(min=1.0)
        self._calls += 1
        return self._scale


class TitanSchedule(ScheduleStateFlow):
    """``ScheduleStateFlow`` called the way torchtitan's Trainer and Validator call a schedule.

    With ``trace_folder`` the steps ``trace_steps`` (first, last; from 1) are traced and written there after the last.
    """

    def __init__(
        self, *args, global_mean: GlobalMean, trace_folder: Path | None = None, trace_steps=(1, 1), **kwargs
    ):
        super().__init__(*args, **kwargs)
        self.global_mean = global_mean
        self.trace_folder, self.trace_steps = trace_folder, trace_steps
        self._num_steps = 0
        self._trace = ActionTrace(self._stages[0].device)

    def step(self, *args, **kwargs):
        kwargs = _without_columns(kwargs)
        if not self._has_backward:
            return super().step(*args, **kwargs)
        kwargs["loss_scale"] = self.global_mean.next()
        self._num_steps += 1
        first, last = self.trace_steps
        if self.trace_folder is None or not first <= self._num_steps <= last:
            return super().step(*args, **kwargs)
        with self._traced():
            result = super().step(*args, **kwargs)
        if self._num_steps == last:
            path = self._trace.write(self.trace_folder, self.rank, self.schedule, self.plan.lengths)
            logger.info(f"StateFlow: traced steps {first} to {last} of this rank in {path}")
        return result

    @contextmanager
    def _traced(self):
        for stage in self._stages:
            stage.action_hook = self._trace
        self._trace.begin()
        try:
            yield
        finally:
            for stage in self._stages:
                stage.action_hook = None
        self._trace.end(self._num_steps)


def _without_columns(kwargs: dict) -> dict:
    """The Trainer passes every column of a batch to the first stage; documents have become ``attention_masks``."""
    return {name: value for name, value in kwargs.items() if name not in COLUMNS}


def corrected(schedule, global_mean: GlobalMean):
    """The given torchtitan schedule, from now on with gradients of the global mean, as an unpipelined run has them.

    Losses are reported as sums still, and evaluation keeps no outputs.
    """
    step, evaluate, get_loss = schedule.step, schedule.eval, schedule._maybe_get_loss
    scale = None

    def corrected_step(*args, **kwargs):
        nonlocal scale
        if schedule._has_backward:
            scale = global_mean.next()
        return step(*args, **_without_columns(kwargs))

    def scaled_loss(stage, mb_index):
        loss = get_loss(stage, mb_index)
        return None if loss is None else loss * scale.to(loss.dtype)

    def evaluate_only(*args, **kwargs):
        return evaluate(*args, **{**_without_columns(kwargs), "return_outputs": False})

    schedule.step, schedule.eval, schedule._maybe_get_loss = corrected_step, evaluate_only, scaled_loss
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        _forget_gradients_of_inference(stage)
    return schedule


def _forget_gradients_of_inference(stage) -> None:
    """From torch 2.12 on a stage finds out shapes by a real forward and backward of garbage, once, before the first
    unit. It asks for the inputs' gradients only, but a recomputed layer adds to its parameters' all the same.
    """
    prepare = stage._prepare_backward_infra

    def prepare_backward(*args, **kwargs):
        result = prepare(*args, **kwargs)
        for parameter in stage.submod.parameters():
            parameter.grad = None
        return result

    stage._prepare_backward_infra = prepare_backward


def make_global_mean(parallel_dims, job_config, device) -> GlobalMean:
    training = job_config.training
    batch = parallel_dims.get_optional_mesh("batch")
    degree = batch.size() if batch is not None else 1
    per_call = training.local_batch_size * degree
    accumulation = max(1, training.global_batch_size // per_call) if training.global_batch_size > 0 else 1
    group = batch.get_group() if batch is not None and degree > 1 else None
    return GlobalMean(valid_tokens, accumulation, group, device)


def trace_folder(job_config, mesh) -> Path | None:
    """Where this rank writes its trace; None on all but the first pipeline of a data- and tensor-parallel run."""
    if not job_config.stateflow.trace:
        return None
    ranks = dist.get_process_group_ranks(mesh.get_group("pp"))
    return Path(job_config.job.dump_folder) / "trace" if min(ranks) == 0 else None


def pipeline(model: nn.Module, parallel_dims, job_config, device, model_args, parallelize_fn, loss_fn):
    """Splits the model into stages and builds the schedule that ``[stateflow]`` asks for."""
    global_mean = make_global_mean(parallel_dims, job_config, device)
    if not job_config.stateflow.enable:
        schedule, parts, has_first, has_last = pipeline_llm(
            model, parallel_dims, job_config, device, model_args, parallelize_fn, loss_fn
        )
        return corrected(schedule, global_mean), parts, has_first, has_last

    plan = make_plan(job_config)
    p, training = job_config.parallelism, job_config.training
    count = num_stages(job_config)
    names = p.module_fqns_per_model_part or generate_llm_fqn_per_model_part(
        count,
        model_args.num_layers,
        p.pipeline_parallel_first_stage_less_layers,
        p.pipeline_parallel_last_stage_less_layers,
    )
    mesh = parallel_dims.get_mesh("pp")
    # torchtitan places stages by the schedule's name: in a loop, or down the ranks and up again.
    looped = placement(job_config) == loop_placement(mesh.size(), count)
    torch_stages, parts = pipeline_module_split(
        model, mesh, "Interleaved1F1B" if looped else V_SCHEDULE, device, names
    )
    # Only FSDP2 computes in another dtype than the parameters': torchtitan has no autocast beside pipelining.
    mixed = parallel_dims.fsdp_enabled or mixed_precision_alone(job_config)
    dtype = training.mixed_precision_param if mixed else training.dtype
    stages = []
    for i, (torch_stage, part) in enumerate(zip(torch_stages, parts, strict=True)):
        parts[i] = parallelize_fn(part, parallel_dims, job_config)
        stages.append(
            StateFlowStage(
                parts[i],
                torch_stage.stage_index,
                count,
                device,
                plan,
                microbatch_size=p.pipeline_parallel_microbatch_size,
                hidden_size=model_args.dim,
                activation_dtype=TORCH_DTYPE_MAP[dtype],
                group=mesh.get_group("pp"),
            )
        )
    schedule = TitanSchedule(
        stages,
        training.local_batch_size // p.pipeline_parallel_microbatch_size,
        policy=policy_of(job_config),
        weight_lag=weight_lag(job_config),
        recomputed=recomputes(job_config),
        schedule=None if job_config.stateflow.schedule_file is None else read_schedule_file(job_config),
        loss_fn=loss_fn,
        global_mean=global_mean,
        trace_folder=trace_folder(job_config, mesh),
        trace_steps=job_config.stateflow.trace_steps,
    )
    report_termination(schedule.progress)
    logger.info(
        f"StateFlow: policy {schedule.schedule.policy}, {schedule.num_microbatches} microbatches x "
        f"{plan.num_chunks} chunks {list(plan.lengths)} over {count} stages on {mesh.size()} ranks"
    )
    return schedule, parts, any(s.is_first for s in stages), any(s.is_last for s in stages)
