"""When each action of a step really began and ended.

``ActionTrace`` is an ``action_hook`` of the runtime. On a GPU it records a pair of CUDA events an action, on the
compute stream, and reads them after the step; on a CPU it takes the clock. A begin lies behind the wait for the
action's receive, so a gap between two actions is idle time. Outside a traced step nothing is hooked and nothing costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from stateflow.pipeline.schedule import Action, Schedule
from stateflow.pipeline.simulator import Simulation, Span

VERSION = 1


class ActionTrace:
    """Records the steps between ``begin`` and ``end``; ``steps`` holds them as JSON-able data."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.steps: list[dict] = []
        self._marks: list[tuple[Action, object, object]] = []
        self._base: object = None
        self._wall = 0.0

    def _now(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark) -> float:
        if self.device.type != "cuda":
            return mark - self._base
        return self._base.elapsed_time(mark) / 1e3

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def begin(self) -> None:
        """Start of a step: from here on times count."""
        self._synchronize()
        self._marks.clear()
        self._wall, self._base = time.time(), self._now()

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        begin = self._now()
        yield
        self._marks.append((action, begin, self._now()))

    def end(self, step: int) -> None:
        """End of a step, which is kept under its number."""
        self._synchronize()
        actions = [[str(action), self._seconds(begin), self._seconds(end)] for action, begin, end in self._marks]
        self.steps.append({"step": step, "wall": self._wall, "actions": actions})
        self._marks.clear()

    def write(self, folder: Path, rank: int, schedule: Schedule, lengths: Sequence[int]) -> Path:
        """Writes ``rank_R.json``, from which ``read_trace`` puts the ranks together."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{rank}.json"
        figures = {
            "version": VERSION,
            "rank": rank,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU",
            "lengths": list(lengths),
            "schedule": schedule.to_text(),
            "peak_bytes": torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
            "steps": self.steps,
        }
        path.write_text(json.dumps(figures) + "\n")
        return path


@dataclass(frozen=True)
class Trace:
    """The traced steps of all ranks of a pipeline; ``peak_bytes`` of the fullest GPU so far, None on a CPU."""

    schedule: Schedule
    lengths: tuple[int, ...]
    device: str
    steps: tuple[Simulation, ...]
    peak_bytes: int | None

    def median_step(self) -> Simulation:
        return sorted(self.steps, key=lambda step: step.step_time)[len(self.steps) // 2]

    def mean_costs(self) -> dict[Action, float]:
        """Seconds of each action, averaged over the microbatches and steps: what chunk and stage make of it."""
        totals: dict[tuple, list[float]] = {}
        for step in self.steps:
            for span in (span for row in step.spans for span in row):
                action = span.action
                totals.setdefault((action.stage, action.kind, action.chunk), []).append(span.end - span.start)
        mean = {key: sum(values) / len(values) for key, values in totals.items()}
        return {a: mean[a.stage, a.kind, a.chunk] for row in self.schedule.table for a in row}


def read_trace(folder: Path) -> Trace:
    """Puts the ranks' files of a folder together; the clocks of several machines must agree.

    Raises:
        ValueError: if a rank's file is missing, or files do not belong together.
    """
    files = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))}
    if not files:
        raise ValueError(f"--trace {folder}: no rank_*.json there; train with [stateflow] trace = true")
    first = next(iter(files.values()))
    if first.get("version") != VERSION:
        raise ValueError(f"--trace {folder}: version {first.get('version')} of the files, this program reads {VERSION}")
    schedule = Schedule.from_text(first["schedule"])
    by_rank = {entry["rank"]: entry for entry in files.values()}
    missing = [rank for rank in range(schedule.num_ranks) if rank not in by_rank]
    if missing:
        raise ValueError(f"--trace {folder}: rank_{missing[0]}.json is missing; there are {', '.join(files)}")
    for name, entry in files.items():
        for key in ("schedule", "lengths"):
            if entry[key] != first[key]:
                raise ValueError(f"--trace {folder}: {name} is of another run: its {key} differs; empty the folder")
    ranks = [by_rank[rank]["steps"] for rank in range(schedule.num_ranks)]
    steps = tuple(_joined(schedule, entries) for entries in zip(*ranks, strict=True))
    peaks = [entry["peak_bytes"] for entry in files.values() if entry["peak_bytes"] is not None]
    return Trace(schedule, tuple(first["lengths"]), first["device"], steps, max(peaks, default=None))


def _joined(schedule: Schedule, ranks: Sequence[dict]) -> Simulation:
    """One step of all ranks; its time starts with the first action of any."""
    starts = [entry["wall"] + entry["actions"][0][1] for entry in ranks]
    origin = min(starts)
    rows = []
    for entry in ranks:
        shift = entry["wall"] - origin
        rows.append(tuple(Span(Action.parse(text), a + shift, b + shift) for text, a, b in entry["actions"]))
    return Simulation(schedule, tuple(rows))
