"""A schedule as lines of text: one a rank, one character for each unit of time, with equal stages and chunks."""

from __future__ import annotations

from stateflow.pipeline.list_scheduling import TIMES
from stateflow.pipeline.schedule import Kind, Schedule
from stateflow.pipeline.simulator import simulate

LEGEND = "digit: forward of that microbatch, letter: its backward (a is 0), -: weight gradients, .: idle"


def timeline(schedule: Schedule, recomputed: bool = False) -> str:
    """The step of a legal schedule if F = W = 1 and I = 1 (2 if it recomputes); see ``LEGEND``."""
    simulation = simulate(schedule, lambda action: TIMES[recomputed][action.kind])
    lines = []
    for rank, row in enumerate(simulation.spans):
        line = ["."] * simulation.step_time
        for span in row:
            kind, microbatch = span.action.kind, span.action.microbatch
            mark = {Kind.F: str(microbatch % 10), Kind.W: "-"}.get(kind, chr(ord("a") + microbatch % 26))
            line[span.start : span.end] = mark * (span.end - span.start)
        lines.append(f"rank {rank} {''.join(line)}")
    return "\n".join(lines)
