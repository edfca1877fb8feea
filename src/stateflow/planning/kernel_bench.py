"""What the search for plans asks of a device, done on one."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Sequence
from functools import cached_property

import torch

from stateflow.bench import mamba3_regions
from stateflow.bench.measure import Call, Timing, Turns, misses, relative_l2, time_call
from stateflow.planning import kernel_launches, mamba3_launches
from stateflow_kernels import plans
from stateflow_kernels.gated_delta_rule import CHUNK, Tile
from stateflow_kernels.plan_table import Shape

# By family: `Call` is the whole operation, `Launches` its kernels one at a time.
MODULES = {"gated_delta_rule": kernel_launches, "mamba3": mamba3_launches}

Job = tuple[Shape, str, Tile | int]

CHECK_TOKENS = 460  # more chunks than any load pipeline is deep, and a ragged one
COMPILE_TOKENS = 130
MOST_WORKERS = 32
RUNS = 11
AHEAD_MS = 2.0  # longer than the launches of a call take: which plan is better must not depend on the host
LAYER_AHEAD_MS = 5.0


def default_workers() -> int:
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


class KernelBench:
    """Compiles, checks and times plans for shapes that differ in `tokens` only."""

    def __init__(self, shape: Shape, device: torch.device, turns: Turns, workers: int | None = None):
        self.shape, self.device, self.turns = shape, device, turns
        self.workers = workers or default_workers()
        self.module = MODULES[shape.family]

    def compile(self, jobs: Sequence[Job], seconds: float) -> dict[Job, str]:
        """In processes of their own: what Triton caches on disk is there for this one, too."""
        return compile_jobs(jobs, self.device, self.workers, seconds)

    @cached_property
    def _checked(self):
        tokens = max(CHECK_TOKENS, 2 * CHUNK * self.shape.segments + 12)  # two chunks of a segment at least
        call = self.module.Call(self.shape, tokens, self.device)
        return call, [x.to(self.device) for x in call.expected()]

    def check(self, plan) -> str | None:
        call, expected = self._checked
        try:
            results = call.results(plan)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # not the plan's fault, and after the second nothing runs any more
        except Exception as error:  # the compiler's errors have no common type
            return _last_line(error)
        errors = {n: relative_l2(x, y) for n, x, y in zip(call.bounds, results, expected, strict=True)}
        missed = misses(errors, call.bounds)
        return f"wrong: {', '.join(missed)}" if missed else None

    def prepare(self, shape: Shape, plan) -> None:
        self._launches = self._call = None  # frees the last shape's buffers first
        torch.cuda.empty_cache()
        self._shape = shape
        self._launches = self.module.Launches(shape, shape.tokens, self.device, fill=plan)
        self._call = self.module.Call(shape, shape.tokens, self.device)

    def _time(self, call: Call, ahead_ms: float = 0.0) -> Timing:
        with self.turns.measuring():
            return time_call(call, runs=RUNS, warm_up=2, ahead_ms=ahead_ms)

    def time_kernel(self, kernel: str, tile: Tile) -> Timing:
        launch = self._launches.by_name[kernel]
        return self._time(lambda: launch(tile), ahead_ms=0.4)

    def time_forward(self, plan) -> Timing:
        return self._time(lambda: self._call.forward(plan), AHEAD_MS)

    def time_backward(self, plan) -> Timing:
        outputs = self._call.forward(plan)
        return self._time(lambda: self._call.backward(plan, outputs), AHEAD_MS)

    def time_layer(self, plan, dim: int) -> tuple[Timing, Timing]:
        self._launches = self._call = None
        layer = mamba3_regions.Layer(self._shape, self.device, dim)
        with plans.using(plan):
            forward = self._time(lambda: layer.forward_alone("auto"), LAYER_AHEAD_MS)
            outputs = layer.forward("auto")
            return forward, self._time(lambda: layer.backward(outputs), LAYER_AHEAD_MS)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"


def compile_jobs(jobs: Sequence[Job], device: torch.device, workers: int, seconds: float) -> dict[Job, str]:
    """Launches each kernel with its tile once on a short sequence, shared out among processes.

    Returns:
        Those that cannot be used, and why. What breaks a process, or is not done after `seconds`, cannot, either.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    reports, following = context.Queue(), context.Value("i", 0)
    args = (list(jobs), str(device), following, reports)
    processes = [context.Process(target=_compile, args=args, daemon=True) for _ in range(min(workers, len(jobs)))]
    for process in processes:
        process.start()
    started: set[int] = set()
    done: dict[int, str | None] = {}
    end = time.monotonic() + seconds
    while len(done) < len(jobs) and time.monotonic() < end:
        alive = any(process.is_alive() for process in processes)  # asked first: nothing comes after the last one's end
        try:
            what, index, reason = reports.get(timeout=0.2)
        except queue.Empty:
            if not alive:
                break
            continue
        if what == "start":
            started.add(index)
        else:
            done[index] = reason
    in_time = time.monotonic() < end
    for process in processes:
        if len(done) == len(jobs):
            process.join(10)
        if process.is_alive():
            process.terminate()
    failures = {jobs[i]: reason for i, reason in done.items() if reason is not None}
    for i in set(range(len(jobs))) - done.keys():
        failures[jobs[i]] = "it broke its process" if i in started and in_time else "it was not compiled in time"
    return failures


def _compile(jobs: Sequence[Job], device: str, following, reports) -> None:
    torch.set_num_threads(1)
    launches: dict[Shape, object] = {}
    while True:
        with following.get_lock():
            index = following.value
            following.value += 1
        if index >= len(jobs):
            return
        shape, kernel, tile = jobs[index]
        reports.put(("start", index, None))
        try:
            if shape not in launches:
                launches[shape] = MODULES[shape.family].Launches(shape, COMPILE_TOKENS, torch.device(device))
            launches[shape].by_name[kernel](tile)
            if device.startswith("cuda"):
                torch.cuda.synchronize()
        except Exception as error:
            reports.put(("end", index, _last_line(error)))
            if isinstance(error, torch.AcceleratorError):
                return  # this process cannot use the device any more
        else:
            reports.put(("end", index, None))
