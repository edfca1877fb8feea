"""One process of the benchmark of the gated delta rule, with the libraries of one group of contestants.

It checks its contestants against float64 and warms them up, beside other such processes. Each shape is timed while
all others wait. A contestant that is wrong is not timed, nor one that disagrees with ours at the
shape that is timed.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stateflow.bench.gdn_contestants import OURS, Absent, Contestant, contestants, versions
from stateflow.bench.measure import Rows, Turns, measure_memory, misses, relative_l2, time_call
from stateflow.planning.kernel_launches import EPS, Launches, random_inputs
from stateflow.recurrence.self_check import BOUNDS_16_BITS, NAMES
from stateflow_kernels import plans
from stateflow_kernels.gated_delta_rule import Tile
from stateflow_kernels.plan_table import Shape, to_json

PARITY_TOKENS = 1000
# Against float64, three times what our own kernels must keep: others round elsewhere. Two results may differ by both.
PARITY = {name: 3 * bound for name, bound in BOUNDS_16_BITS.items()}
AGREEMENT = {name: 2 * bound for name, bound in PARITY.items()}
SAMPLE_STRIDE = 61  # tokens; no multiple of what kernels are cut into
BLOCKS_V = (16, 32, 64)
COMPILE_SECONDS = 150.0


@dataclass(frozen=True)
class Spec:
    """What a worker is to do; a JSON file."""

    group: str
    shapes: tuple[Shape, ...]
    rows: str
    work: str  # a folder that the workers share
    runs: int


def outputs_and_grads(contestant: Contestant, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """As `NAMES` has them."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    with contestant.running():
        outputs = contestant.call(*inputs)
        results = torch.autograd.grad(outputs, inputs, grads)
    return [*(x.detach() for x in outputs), *results]


def exact_results(inputs: list[Tensor], grads: list[Tensor], scale: float) -> list[Tensor]:
    """The chunk form in float64, on the CPU."""
    from stateflow.recurrence.gated_delta_kernels import chunk_form, chunk_form_backward

    inputs, grads = ([x.detach().cpu().double() for x in xs] for xs in (inputs, grads))
    return [*chunk_form(*inputs, None, scale, EPS), *chunk_form_backward(*grads, *inputs, None, scale, EPS)]


class Parity:
    """Relative L2 errors on a short sequence with the heads that are timed: the same compiled kernels, so."""

    def __init__(self, device: torch.device, num_tokens: int = PARITY_TOKENS):
        self.device, self.num_tokens = device, num_tokens
        self._expected: dict[Shape, list[Tensor]] = {}
        self._errors: dict[tuple, dict[str, float]] = {}

    def errors(self, contestant: Contestant, shape: Shape) -> dict[str, float]:
        heads = replace(shape, tokens=1)
        key = (heads, contestant.name, contestant.plan)
        if key not in self._errors:
            inputs, grads = random_inputs(shape, self.num_tokens, self.device, seed=1)
            if heads not in self._expected:
                self._expected[heads] = exact_results(inputs, grads, shape.k_dim**-0.5)
            results = outputs_and_grads(contestant, inputs, grads)
            self._errors[key] = {
                name: relative_l2(x.cpu(), y) for name, x, y in zip(NAMES, results, self._expected[heads], strict=True)
            }
        return self._errors[key]


def sample(results: list[Tensor]) -> dict[str, Tensor]:
    """Some tokens of each result, and the states whole, on the CPU."""
    whole = ("state", "dstate")
    return {
        name: (x if name in whole else x[:, ::SAMPLE_STRIDE]).detach().cpu().clone()
        for name, x in zip(NAMES, results, strict=True)
    }


def sample_path(work: Path, shape: Shape) -> Path:
    heads = f"{shape.num_heads}of{shape.num_key_heads}"
    return work / f"ours-{heads}-{shape.k_dim}x{shape.v_dim}-{shape.batch}x{shape.tokens}.pt"


def done_path(work: Path) -> Path:
    """Exists once no sample of ours will come any more."""
    return work / "ours.done"


def row_of(contestant: Contestant, shape: Shape) -> dict:
    row = dict(kind="time", contestant=contestant.name, heads=shape.num_heads, tokens=shape.tokens)
    row |= dict(k_dim=shape.k_dim, v_dim=shape.v_dim, dtype=shape.dtype, batch=shape.batch)
    if contestant.plan is not None:
        row |= dict(plan=to_json(contestant.plan), plan_source=contestant.plan_source, tuned=contestant.tuned)
    return row


class Worker:
    def __init__(self, spec: Spec, device: torch.device):
        self.spec, self.device, self.work = spec, device, Path(spec.work)
        self.turns, self.parity = Turns(self.work), Parity(device)
        self.rows = Rows(Path(spec.rows), versions=environment_versions(device) | versions(spec.group))

    def run(self) -> None:
        self.turns.for_autotuning()
        if self.spec.group == OURS:
            self.compile()
        cold = list(self.spec.shapes)
        ready: list[tuple[Contestant, Shape, dict]] = []
        # What can be timed comes first, so that figures are there early; else the next shape is warmed up.
        while cold or ready:
            first = next((item for item in ready if self.has_reference(item[1])), None)
            if first is not None:
                ready.remove(first)
                self.attempt(*first[:2], partial(self.measure, *first))
            elif cold:
                ready += self.warm_up(cold.pop(0))
            else:
                time.sleep(0.2)
        if self.spec.group == OURS:
            for shape in self.spec.shapes:
                with self.turns.measuring():
                    self.walks(shape)

    def has_reference(self, shape: Shape) -> bool:
        """Whether ours is there to be compared with, or will never be."""
        return self.spec.group == OURS or sample_path(self.work, shape).exists() or done_path(self.work).exists()

    def attempt(self, contestant: Contestant, shape: Shape, action) -> bool:
        """Runs it; what goes wrong becomes a row."""
        try:
            action()
            return True
        except torch.OutOfMemoryError:
            reason = "out of memory"
        except Exception as error:  # of whatever library
            traceback.print_exc()
            reason = f"{type(error).__name__}: {str(error).strip()[-300:]}"
        gc.collect()
        torch.cuda.empty_cache()
        self.fail(contestant, shape, reason)
        return False

    def fail(self, contestant: Contestant, shape: Shape, reason: str, **more) -> None:
        print(f"{contestant.name}, {shape}: {reason}", flush=True)
        self.rows.write(**row_of(contestant, shape), failed=reason, **more)

    def warm_up(self, shape: Shape) -> list[tuple[Contestant, Shape, dict]]:
        """Checks the contestants for these heads, and runs them once at the full length."""
        try:
            present = contestants(self.spec.group, shape, self.device)
        except Absent as absent:
            self.rows.write(**row_of(Contestant(self.spec.group, None), shape), skipped=str(absent))
            return []
        ready = []
        for contestant in present:
            errors: dict = {}

            def check(contestant=contestant, errors=errors):
                if contestant.plan is not None:
                    self.expect_kernels(contestant, shape)
                else:
                    self.first_run(contestant, shape)  # first: others may tune themselves for the length that they see
                errors |= self.parity.errors(contestant, shape)
                missed = misses(errors, PARITY)
                if missed:
                    raise ValueError(f"differs from float64: {', '.join(missed)}")

            if self.attempt(contestant, shape, check):
                ready.append((contestant, shape, errors))
        return ready

    def compile(self) -> None:
        """What a table's tuning has not compiled, for all shapes at once."""
        from stateflow.planning.kernel_bench import all_tiles, compile_jobs, default_workers

        jobs: dict = {}
        for shape in self.spec.shapes:
            present = contestants(OURS, shape, self.device)
            pairs = [*all_tiles([contestant.plan for contestant in present]), *walk_tiles(present[0].plan)]
            jobs |= {(replace(shape, tokens=1), name, tile): None for name, tile in pairs}
        compile_jobs(list(jobs), self.device, default_workers(), COMPILE_SECONDS)

    def expect_kernels(self, contestant: Contestant, shape: Shape) -> None:
        """Raises if the self-check would put anything else in this plan's place."""
        from stateflow.recurrence.self_check import Problem, checked_plan

        dtype = getattr(torch, shape.dtype)
        sizes = (shape.num_heads, shape.num_key_heads, shape.k_dim, shape.v_dim)
        problem = Problem(self.device, dtype, *sizes, normalize=True, has_docs=False, batch=shape.batch)
        if checked_plan(problem, contestant.plan) != contestant.plan:
            raise ValueError("the kernels' self-check failed with this plan")

    def first_run(self, contestant: Contestant, shape: Shape) -> None:
        inputs, grads = random_inputs(shape, shape.tokens, self.device)
        outputs_and_grads(contestant, inputs, grads)
        torch.cuda.synchronize()

    def measure(self, contestant: Contestant, shape: Shape, errors: dict) -> None:
        with self.turns.measuring():
            inputs, grads = random_inputs(shape, shape.tokens, self.device)
            found = sample(outputs_and_grads(contestant, inputs, grads))
            agreement, path = None, sample_path(self.work, shape)
            if contestant.name == OURS:
                torch.save(found, path.with_suffix(".tmp"))
                path.with_suffix(".tmp").rename(path)
            elif path.exists():
                ours = torch.load(path)
                agreement = {name: relative_l2(found[name], ours[name]) for name in NAMES}
                missed = misses(agreement, AGREEMENT)
                if missed:
                    self.fail(contestant, shape, f"disagrees with ours: {', '.join(missed)}", errors=errors)
                    return
            figures = measure(contestant, inputs, grads, self.spec.runs)
        row = self.rows.write(**row_of(contestant, shape), errors=errors, agreement=agreement, **figures)
        times = " / ".join(f"{row[name]['median']:.3f}" for name in ("forward", "backward"))
        print(f"{contestant.name}, {shape}: {times} ms", flush=True)

    def walks(self, shape: Shape) -> None:
        """ST and STB alone, by the columns of V that a program takes."""
        plan = plans.choice_for(shape, self.device).plan
        sizes = dict(heads=shape.num_heads, tokens=shape.tokens, k_dim=shape.k_dim, v_dim=shape.v_dim)
        launches = Launches(shape, shape.tokens, self.device, fill=plan)
        for name, tile in walk_tiles(plan):
            row = dict(kind="walk", kernel=name, tile=to_json(tile), **sizes)
            try:
                timing = time_call(lambda n=name, t=tile: launches.by_name[n](t), self.spec.runs, ahead_ms=0.4)
                self.rows.write(**row, time=timing.json())
            except torch.AcceleratorError:
                raise
            except Exception as error:  # more shared memory than there is, for one
                self.rows.write(**row, failed=f"{type(error).__name__}: {str(error).strip()[-200:]}")


def walk_tiles(plan) -> list[tuple[str, Tile]]:
    """ST's and STB's tiles at each width, otherwise the plan's; at most two stages where wider tiles need the room."""
    return [
        (name, replace(tile, block_v=block_v, num_stages=min(tile.num_stages, 3 if block_v <= 32 else 2)))
        for name, tile in (("transition", plan.transition), ("transition_backward", plan.transition_backward))
        for block_v in BLOCKS_V
    ]


def measure(contestant: Contestant, inputs: list[Tensor], grads: list[Tensor], runs: int) -> dict:
    """Times of forward and backward as a caller sees them and on the device alone, and memory."""
    inputs = [x.detach().requires_grad_() for x in inputs]

    def forward() -> tuple[Tensor, ...]:
        return contestant.call(*inputs)

    def backward(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

    with contestant.running():
        memory = measure_memory(forward, backward)
        outputs = forward()
        calls = dict(forward=forward, backward=lambda: backward(outputs))
        timings = {name: time_call(call, runs).json() for name, call in calls.items()}
        alone = {f"{name}_device": time_call(call, runs, ahead_ms=4.0).json() for name, call in calls.items()}
    return timings | alone | {"memory_mb": vars(memory)}


def environment_versions(device: torch.device) -> dict[str, str]:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = dict(gpu=name, torch=torch.__version__, triton=triton.__version__, ptxas=plans.ptxas_version())
    return found


def main(path: str) -> None:
    from stateflow_kernels.plan_table import from_json

    spec = from_json(Spec, json.loads(Path(path).read_text()))
    Worker(spec, torch.device("cuda", torch.cuda.current_device())).run()


if __name__ == "__main__":
    main(sys.argv[1])
