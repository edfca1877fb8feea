"""Measuring on a GPU: times, memory, agreement, whose turn it is, and rows that are written as they come."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of some runs, in ms."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        if len(times) < 2:
            return cls(times[0], times[0], times[0], len(times))
        low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(statistics.median(times), low, high, len(times))

    @property
    def spread(self) -> float:
        return self.high - self.low

    def beats(self, other: Timing, margin: float = 0.01) -> bool:
        """Faster by more than the noise: both spreads of the median, and a share of it at the least."""
        return other.median - self.median > max((self.spread + other.spread) / 2, margin * other.median)

    def json(self) -> dict:
        return {name: round(value, 4) for name, value in asdict(self).items()}


Call = Callable[[], object]

AUTOTUNING_MS = dict(warmup=10, rep=40)  # Triton's defaults are 25 and 100


def require_cuda(what: str) -> None:
    """Raises ValueError if there is no CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError(f"{what} measures on a CUDA device and there is none here: run it on a machine with a GPU")


def end_without_cuda(parser: argparse.ArgumentParser) -> None:
    """Of a program of its own: one line and status 2 if there is no CUDA device."""
    try:
        require_cuda(parser.prog)
    except ValueError as error:
        parser.exit(2, f"{error}\n")


def time_call(call: Call, runs: int = 15, warm_up: int = 3, ahead_ms: float = 0.0) -> Timing:
    """CUDA events around each run.

    Args:
        ahead_ms: the device is kept waiting for about so long ahead of each run, so that the launches are all
            there when it starts: its own time, without the host's. With 0, what a caller sees who is not ahead.
    """
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if ahead_ms:
            torch.cuda._sleep(int(ahead_ms * 1.8e6))  # in cycles
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return Timing.of(times)


class Turns:
    """Processes that share a GPU measure one at a time; compiling and trying out need no turn.

    Who has a turn may take it again within. The turn of a process that dies is over. `folder` None: no others.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._held = False

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        if self.folder is None or self._held:
            yield
            return
        with open(self.folder / "turn.lock", "a") as file:  # closing it ends the turn
            fcntl.flock(file, fcntl.LOCK_EX)
            self._held = True
            try:
                yield
            finally:
                self._held = False
        time.sleep(0.002)  # a lock is not fair: let a waiting process have it

    def for_autotuning(self) -> None:
        """From here on Triton's autotuner takes a turn, too, for each configuration that it times.

        It times each for less long than by default: there are hundreds of them.
        """
        import triton.testing

        do_bench = triton.testing.do_bench

        def in_turn(fn, *args, **kwargs):
            fn()  # compiles, which takes long and needs no turn
            with self.measuring():
                return do_bench(fn, *args, **({} if args else AUTOTUNING_MS) | kwargs)

        triton.testing.do_bench = in_turn


def relative_l2(result: Tensor, reference: Tensor) -> float:
    """|result - reference| / |reference|, in float64 where the reference is; NaN and inf stay what they are."""
    difference = result.detach().to(reference.device, torch.float64) - reference.detach().double()
    norm = reference.detach().double().norm()
    return (difference.norm() / norm).item() if norm > 0 else difference.norm().item()


def misses(errors: Mapping[str, float], bounds: Mapping[str, float]) -> list[str]:
    """What is above its bound, or no number."""
    return [
        f"{name} {error:.1e} (bound {bounds[name]:.1e})" for name, error in errors.items() if not error <= bounds[name]
    ]


@dataclass(frozen=True)
class Memory:
    """In MB of 10^6 bytes, beyond what was there before: the most during forward and during both passes, and what
    stays between them besides the outputs."""

    peak_forward: float
    peak_both: float
    saved: float


def measure_memory(
    forward: Callable[[], tuple[Tensor, ...]], backward: Callable[[tuple[Tensor, ...]], object]
) -> Memory:
    """Of torch's allocator, for one forward and the backward of its outputs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = forward()
    torch.cuda.synchronize()
    peak_forward = torch.cuda.max_memory_allocated() - before
    own = sum(x.untyped_storage().nbytes() for x in outputs)
    saved = torch.cuda.memory_allocated() - before - own
    grads = backward(outputs)
    torch.cuda.synchronize()
    peak_both = torch.cuda.max_memory_allocated() - before
    del outputs, grads
    return Memory(*(round(n / 1e6, 1) for n in (peak_forward, peak_both, saved)))


class Rows:
    """Rows of a benchmark as JSON lines, each written at once, by several processes into one file."""

    def __init__(self, path: Path, **common):
        self.path, self.common = path, common

    def write(self, **row) -> dict:
        row = {**self.common, **row}
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")  # one short write in append mode is not torn
        return row


def read_rows(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(map(str, row)) for row in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(f"| {line} |" for line in lines)
