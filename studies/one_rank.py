"""What one rank of a pipeline does in a step, on one GPU: does it fit, and how long is the rank busy?

    python studies/one_rank.py titan_configs/gdn_3b_2gpu.toml --rank 0 --training.seq-len 262144 \
        --stateflow.num-chunks 16 --training.local-batch-size 1

Runs the rank's stage over all its units in the order of the schedule, random activations and gradients in the place of
messages, then the optimizer. Prints the seconds from first to last unit, the peak of allocated and reserved memory,
what is predicted by counts, or by the stages that `stateflow plan` has measured in `--cache`, and the MFU that the
whole pipeline had if each rank took as long and none ever waited. Neither waiting nor the memory and time of messages
is in it. Other arguments are keys of the config; `--ranks` replaces its degree. Lack of memory is a result: it says how
far the step came.
"""

import argparse
import time
from pathlib import Path

import torch

import stateflow.titan  # noqa: F401
from stateflow.chunks import ChunkPlan
from stateflow.commands import read_config
from stateflow.commands.plan_measured import key_facts
from stateflow.loss import cross_entropy_sum
from stateflow.model import flops_per_token
from stateflow.pipeline.schedule import Action, Kind
from stateflow.pipeline.stage import ChunkStage
from stateflow.planning.analytic import Analytic
from stateflow.planning.devices import GIB, device_named
from stateflow.planning.job import Job
from stateflow.planning.profile import Cache
from stateflow.planning.scaling import Scaled, measured_stages, without_graphs
from stateflow.titan.config import make_plan
from stateflow.titan.cpu_host import refuse_large
from stateflow.titan.planning import job_of, stage_module


class Rank:
    """The one stage of a rank, without neighbours."""

    def __init__(self, config, job: Job, rank: int, device: torch.device):
        self.job, self.device, self.part = job, device, job.parts[rank]
        self.is_first, self.is_last = rank == 0, rank == job.num_ranks - 1
        self.module = stage_module(config, job, self.part, device)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=fused, foreach=not fused)

    def stage(self, plan: ChunkPlan) -> ChunkStage:
        loss_fn = cross_entropy_sum if self.is_last else None
        return ChunkStage(self.module, plan, self.job.compute_dtype, is_last=self.is_last, loss_fn=loss_fn)

    def run(self, stage: ChunkStage, action: Action) -> None:
        """One action; what it would receive is random."""
        length, unit = stage.plan.lengths[action.chunk], (action.microbatch, action.chunk)
        if action.kind is Kind.F:
            x = self._tokens(length) if self.is_first else self._activation(length)
            stage.forward(*unit, x, target=self._tokens(length) if self.is_last else None)
        elif action.kind is Kind.W:
            stage.weight_backward(*unit)
        else:
            grad = None if self.is_last else 1e-3 * self._activation(length)
            stage.backward(*unit, grad, loss_scale=1e-3, input_only=action.kind is Kind.I)

    def _tokens(self, length: int) -> torch.Tensor:
        return torch.randint(self.job.model.vocab_size, (self.job.microbatch_size, length), device=self.device)

    def _activation(self, length: int) -> torch.Tensor:
        shape = self.job.microbatch_size, length, self.job.model.dim
        return torch.randn(shape, device=self.device, dtype=self.job.compute_dtype)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def warm_up(rank: Rank, plan: ChunkPlan, splits: bool) -> None:
    """Two chunks as long as the plan's first ones, and the optimizer, which makes its states."""
    lengths = list(plan.lengths[:2])
    stage = rank.stage(ChunkPlan.explicit(sum(lengths), lengths))
    if splits:
        stage.split_backward()
    backward = [Kind.I, Kind.W] if splits else [Kind.B]
    for chunk in range(len(lengths)):
        rank.run(stage, Action(0, Kind.F, 0, chunk))
    for chunk in reversed(range(len(lengths))):
        for kind in backward:
            rank.run(stage, Action(0, kind, 0, chunk))
    rank.update()


def predictor(config, job: Job, cache: Path | None) -> Analytic:
    device = device_named(None)
    if cache is None:
        return Analytic(job, device)
    points, facts = Cache(cache), key_facts(config, job, None, False)
    profiles, where = measured_stages(points, facts)
    return Scaled(job, device).use(profiles, without_graphs(points, facts, where), facts["cuda_graphs"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--cache", type=Path)
    options, keys = parser.parse_known_args(arguments)
    try:
        config = read_config(options.config, keys, options.ranks)
        refuse_large(config)
    except ValueError as error:
        parser.error(str(error))
    job, plan = job_of(config), make_plan(config)
    if job.stages_per_rank != 1 or job.tensor_parallel != 1 or not 0 <= options.rank < job.num_ranks:
        parser.error(f"one stage a rank, no tensor parallelism, and a rank below {job.num_ranks}")
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: the least is 1")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    costs = predictor(config, job, options.cache)
    schedule = costs.schedule(job.policy, plan.num_chunks)
    actions = schedule.table[options.rank]
    predicted = sum(map(costs.cost(plan), actions))
    gib = costs.peak_bytes(schedule, plan)[options.rank] / GIB
    print(f"{job.describe()}\nrank {options.rank}, {job.policy}, {plan}, {len(actions)} actions")
    print(f"predicted by {'counts' if options.cache is None else options.cache}: {predicted:.3f} s of units, peak "
          f"{gib:.1f} GiB", flush=True)  # fmt: skip

    torch.manual_seed(0)
    done = 0
    try:
        rank = Rank(config, job, options.rank, device)
        begin = rank.now()
        warm_up(rank, plan, bool(schedule.split_stages()))
        held = torch.cuda.memory_allocated() / GIB if on_gpu else 0.0
        print(f"warm-up {rank.now() - begin:.1f} s; {held:.1f} GiB stay between steps", flush=True)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        stage = rank.stage(plan)
        if schedule.split_stages():
            stage.split_backward()
        for step in range(options.steps):
            begin, done = rank.now(), 0
            for action in actions:
                rank.run(stage, action)
                done += 1
            seconds = rank.now() - begin
            stage.assert_drained()
            rank.update()
            updated = rank.now() - begin - seconds
            tokens = job.seq_len * job.num_microbatches * job.microbatch_size
            mfu = flops_per_token(job.model, job.seq_len) * tokens / job.num_ranks / seconds / costs.device.flops
            print(f"step {step}: {seconds:.3f} s of units, {updated:.3f} s of optimizer, {tokens / seconds:,.0f} "
                  f"tokens/s through this rank, MFU {mfu:.1%} if no rank ever waited", flush=True)  # fmt: skip
    except torch.OutOfMemoryError as error:
        print(f"out of memory after {done} of {len(actions)} actions: {str(error)[:200]}")
    if on_gpu:
        peak, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        print(f"peak {peak:.1f} GiB allocated, {reserved:.1f} reserved")
    return 0 if done == len(actions) else 1


if __name__ == "__main__":
    raise SystemExit(main())
