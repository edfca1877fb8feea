"""One process of a benchmark, with the libraries of one group of contestants.

It checks its contestants against float64 and warms them up, beside other such processes. Once all are warm, or have
taken too long, each shape is timed while all others wait. A contestant that is wrong is not timed, nor one that
disagrees with ours at the shape that is timed.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stateflow.bench.contestants import OURS, Absent, Contestant, Region, Spec, Subject, subject_named
from stateflow.bench.measure import Rows, Turns, measure_memory, misses, relative_l2, time_call
from stateflow_kernels import plans
from stateflow_kernels.plan_table import Shape

SAMPLE_STRIDE = 61  # tokens; no multiple of what kernels are cut into
AHEAD_MS = 4.0


class Parity:
    """Relative L2 errors on a short sequence with the heads that are timed: the same compiled kernels, so."""

    def __init__(self, subject: Subject, device: torch.device):
        self.subject, self.device = subject, device
        self._expected: dict[Shape, list[Tensor]] = {}
        self._errors: dict[tuple, dict[str, float]] = {}

    def errors(self, contestant: Contestant, shape: Shape) -> dict[str, float]:
        subject, heads = self.subject, replace(shape, tokens=1)
        key = (heads, contestant.name, contestant.plan)
        if key not in self._errors:
            inputs, grads = subject.random_inputs(shape, subject.parity_tokens, self.device, seed=1)
            if heads not in self._expected:
                self._expected[heads] = subject.comparable(subject.exact_results(shape, inputs, grads))
            results = subject.comparable(contestant.results(inputs, grads))
            self._errors[key] = {
                name: relative_l2(x.cpu(), y)
                for name, x, y in zip(subject.names, results, self._expected[heads], strict=True)
            }
        return self._errors[key]


def sample(subject: Subject, results: list[Tensor]) -> dict[str, Tensor]:
    """Some tokens of each result, and the whole of those that have none, on the CPU."""
    return {
        name: (x[:, ::SAMPLE_STRIDE] if name in subject.by_token else x).detach().cpu().clone()
        for name, x in zip(subject.names, subject.comparable(results), strict=True)
    }


def sample_path(work: Path, shape: Shape) -> Path:
    heads = f"{shape.num_heads}of{shape.num_key_heads}"
    return work / f"ours-{heads}-{shape.k_dim}x{shape.v_dim}-{shape.batch}x{shape.tokens}.pt"


def warm_path(work: Path, name: str) -> Path:
    """Exists once a process has nothing left to compile."""
    return work / f"{name}.warm"


def go_path(work: Path) -> Path:
    """Exists once there may be timed."""
    return work / "go"


def done_path(work: Path) -> Path:
    """Exists once no sample of ours will come any more."""
    return work / "ours.done"


def sizes_of(shape: Shape) -> dict:
    return dict(heads=shape.num_heads, tokens=shape.tokens, k_dim=shape.k_dim, v_dim=shape.v_dim)


def shortened(text: str, most: int = 400) -> str:
    """Its begin and its end: messages of compilers are long, and either may be what matters."""
    text = text.strip()
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def row_of(contestant: Contestant, shape: Shape) -> dict:
    more = dict(dtype=shape.dtype, batch=shape.batch)
    return dict(kind="time", **sizes_of(shape), **more, **contestant.row())


class Worker:
    def __init__(self, spec: Spec, device: torch.device):
        self.spec, self.device, self.work = spec, device, Path(spec.work)
        self.subject = subject_named(spec.benchmark)
        self.turns, self.parity = Turns(self.work), Parity(self.subject, device)
        self.rows = Rows(Path(spec.rows), versions=environment_versions(device) | self.subject.versions(spec.group))

    def run(self) -> None:
        self.turns.for_autotuning()
        self.subject.get_ready(self.spec, self.device)
        cold = list(self.spec.shapes)
        ready: list[tuple[Contestant, Shape, dict]] = []
        # What can be timed comes first, so that figures are there early; else the next shape is warmed up.
        while cold or ready:
            if not cold:
                warm_path(self.work, self.spec.name).touch()
            may_time = go_path(self.work).exists()
            first = next((item for item in ready if may_time and self.has_reference(item[1])), None)
            if first is not None:
                ready.remove(first)
                self.attempt(*first, partial(self.measure, *first))
            elif cold:
                ready += self.warm_up(cold.pop(0))
            else:
                time.sleep(0.2)
        if self.spec.group == OURS:
            for shape in self.spec.shapes:
                with self.turns.measuring():
                    if self.wants("parts"):
                        self.parts(shape)
                    if self.wants("regions"):
                        self.regions(shape)

    def wants(self, name: str) -> bool:
        return any(self.subject.choices.get(word) == name for word in self.spec.choices)

    def has_reference(self, shape: Shape) -> bool:
        """Whether ours is there to be compared with, or will never be."""
        return self.spec.group == OURS or sample_path(self.work, shape).exists() or done_path(self.work).exists()

    def attempt(self, contestant: Contestant, shape: Shape, errors: dict, action) -> bool:
        """Runs it; what goes wrong becomes a row, with the `errors` that were found till then."""
        try:
            action()
            return True
        except torch.OutOfMemoryError:
            reason = "out of memory"
        except Exception as error:  # of whatever library
            traceback.print_exc()
            reason = f"{type(error).__name__}: {shortened(str(error))}"
        gc.collect()
        torch.cuda.empty_cache()
        self.fail(contestant, shape, reason, errors=errors)
        return False

    def fail(self, contestant: Contestant, shape: Shape, reason: str, **more) -> None:
        print(f"{contestant.name}, {shape}: {reason}", flush=True)
        self.rows.write(**row_of(contestant, shape), failed=reason, **more)

    def warm_up(self, shape: Shape) -> list[tuple[Contestant, Shape, dict]]:
        """Checks the contestants for these heads, and runs them once at the full length."""
        try:
            present = self.subject.chosen(self.spec.group, shape, self.device, self.spec.choices)
        except Absent as absent:
            self.rows.write(**row_of(Contestant(self.spec.group, None), shape), skipped=str(absent))
            return []
        ready = []
        for contestant in present:
            errors: dict = {}

            def check(contestant=contestant, errors=errors):
                if contestant.plan is not None:
                    self.subject.check_plan(contestant, shape, self.device)
                else:
                    self.first_run(contestant, shape)  # first: others may tune themselves for the length that they see
                errors |= self.parity.errors(contestant, shape)
                missed = misses(errors, self.subject.parity)
                if missed:
                    raise ValueError(f"differs from float64: {', '.join(missed)}")

            if self.attempt(contestant, shape, errors, check):
                ready.append((contestant, shape, errors))
        return ready

    def first_run(self, contestant: Contestant, shape: Shape) -> None:
        contestant.results(*self.subject.random_inputs(shape, shape.tokens, self.device))
        torch.cuda.synchronize()

    def measure(self, contestant: Contestant, shape: Shape, errors: dict) -> None:
        with self.turns.measuring():
            inputs, grads = self.subject.random_inputs(shape, shape.tokens, self.device)
            found = sample(self.subject, contestant.results(inputs, grads))
            agreement, path = None, sample_path(self.work, shape)
            if contestant.name == OURS:
                torch.save(found, path.with_suffix(".tmp"))
                path.with_suffix(".tmp").rename(path)
            elif path.exists():
                ours = torch.load(path)
                agreement = {name: relative_l2(found[name], ours[name]) for name in self.subject.names}
                missed = misses(agreement, self.subject.agreement)
                if missed:
                    self.fail(contestant, shape, f"disagrees with ours: {', '.join(missed)}", errors=errors)
                    return
            figures = measure(contestant, inputs, grads, self.spec.runs)
        row = self.rows.write(**row_of(contestant, shape), errors=errors, agreement=agreement, **figures)
        times = " / ".join(f"{row[name]['median']:.3f}" for name in ("forward", "backward"))
        print(f"{contestant.name}, {shape}: {times} ms", flush=True)

    def parts(self, shape: Shape) -> None:
        for fields, call in self.subject.parts(shape, self.device):
            row = dict(kind="walk", **fields, **sizes_of(shape))
            try:
                self.rows.write(**row, time=time_call(call, self.spec.runs, ahead_ms=0.4).json())
            except torch.AcceleratorError:
                raise
            except Exception as error:  # more shared memory than there is, for one
                self.rows.write(**row, failed=f"{type(error).__name__}: {shortened(str(error))}")

    def regions(self, shape: Shape) -> None:
        for region in self.subject.regions(shape, self.device):
            times = measure_region(region, self.spec.runs)
            self.rows.write(kind="region", region=region.name, **sizes_of(shape), dtype=shape.dtype, **times)


def measure(contestant: Contestant, inputs: list[Tensor], grads: list[Tensor], runs: int) -> dict:
    """Times of forward and backward as a caller sees them and on the device alone, and memory."""
    forward, backward = contestant.passes(inputs, grads)
    with contestant.running():
        memory = measure_memory(forward, backward)
        outputs = forward()
        calls = dict(forward=forward, backward=lambda: backward(outputs))
        timings = {name: time_call(call, runs).json() for name, call in calls.items()}
        alone = {f"{name}_device": time_call(call, runs, ahead_ms=AHEAD_MS).json() for name, call in calls.items()}
    return timings | alone | {"memory_mb": vars(memory)}


def measure_region(region: Region, runs: int) -> dict:
    """On the device, without the host's launches."""
    calls = dict(serial=region.serial, overlapped=region.overlapped, kernel=region.kernel)
    return {name: time_call(call, runs, ahead_ms=AHEAD_MS).json() for name, call in calls.items()}


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
