"""Policies side by side: what each is predicted to cost in time and memory on one job, and what it measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from stateflow.chunks import ChunkPlan
from stateflow.pipeline.accounting import in_flight_profile
from stateflow.pipeline.policies import POLICIES, Policy
from stateflow.pipeline.simulator import Simulation
from stateflow.planning.analytic import Analytic
from stateflow.planning.devices import GIB, gib_text


@dataclass
class Row:
    """One policy. Times in seconds, memory in bytes a rank, shares of the ranks' time; None where it cannot be."""

    policy: str
    num_chunks: int
    stages_per_rank: int
    step_time: float | None = None
    bubble: float | None = None
    lost: dict[str, float] = field(default_factory=dict)
    peak_bytes: tuple[int, ...] = ()
    in_flight: tuple[float, ...] = ()  # each rank's peak, in full sequences through all of the rank's layers
    fits: bool = False
    why_not: str | None = None
    measured_time: float | None = None
    measured_bubble: float | None = None
    measured_peak_bytes: int | None = None  # of the fullest GPU; unknown on a CPU
    measured_why_not: str | None = None
    simulation: Simulation | None = None
    measurement: Simulation | None = None

    @property
    def name(self) -> str:
        return f"{self.policy}, N = {self.num_chunks}, V = {self.stages_per_rank}"

    def to_json(self) -> dict:
        steps = ("simulation", "measurement")
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in steps}


def candidates(names: Sequence[str], stages_per_rank: int, whole: bool) -> list[tuple[str, bool, int]]:
    """(policy, whether on whole sequences, stages a rank) of each row, whole sequences first."""
    rows = []
    for on_whole in (True, False) if whole else (False,):
        for name in names:
            traits: Policy = POLICIES[name]
            per_rank = traits.stages_per_rank or max(stages_per_rank, traits.default_stages_per_rank)
            rows.append((name, on_whole, per_rank))
            if name == "zero_bubble" and not on_whole and per_rank == 1:
                rows.append((name, on_whole, 2))
    return rows


def compare(analytic: Analytic, plan: ChunkPlan, policy: str, stages_per_rank: int) -> Row:
    """The row of one policy; ``analytic`` is of a job with that many stages a rank, placed as the policy does."""
    row = Row(policy, plan.num_chunks, stages_per_rank)
    simulation = analytic.simulate(plan, policy)
    schedule = simulation.schedule
    share = plan.num_chunks * stages_per_rank
    row.step_time, row.bubble = float(simulation.step_time), float(simulation.bubble)
    row.lost = analytic.lost_time(plan, simulation).shares()
    row.peak_bytes = analytic.peak_bytes(schedule, plan)
    row.in_flight = tuple(max(profile) / share for profile in in_flight_profile(schedule))
    row.fits = max(row.peak_bytes) <= analytic.limit
    row.simulation = simulation
    if not row.fits:
        row.why_not = f"needs {gib_text(max(row.peak_bytes))} GiB of {gib_text(analytic.limit)} GiB"
    return row


def table(rows: Sequence[Row]) -> str:
    """The rows as text; times relative to the first row that can be."""
    base = next((row.step_time for row in rows if row.step_time is not None), None)
    width = max([12, *(len(row.policy) for row in rows)])
    lines = [
        f"{'policy':{width}} {'N':>3} {'V':>2} {'step s':>9} {'speed':>6} {'idle':>6} {'= warm-up':>9} "
        f"{'imbalance':>9} {'messages':>8} {'peak GiB':>9} {'in flight':>13}"
    ]
    for row in rows:
        start = f"{row.policy:{width}} {row.num_chunks:3d} {row.stages_per_rank:2d} "
        if row.step_time is None:
            lines.append(f"{start}{row.why_not}")
            continue
        held = f"{max(row.in_flight):.2f} .. {min(row.in_flight):.2f}"
        lines.append(
            f"{start}{row.step_time:9.4g} {base / row.step_time:5.2f}x {row.bubble:6.1%} "
            f"{row.lost['warm_up_and_drain']:9.1%} {row.lost['imbalance']:9.1%} {row.lost['communication']:8.1%} "
            f"{max(row.peak_bytes) / GIB:9.2f} {held:>13}" + ("" if row.fits else "  does not fit")
        )
    return "\n".join(lines)


def measured_table(rows: Sequence[Row]) -> str:
    """What was measured beside what was predicted, as text; a row that failed says why."""
    base = next((row.measured_time for row in rows if row.measured_time is not None), None)
    width = max([12, *(len(row.policy) for row in rows)])
    lines = [
        f"{'policy':{width}} {'N':>3} {'V':>2} {'step s':>9} {'speed':>6} {'idle':>6} {'peak GiB':>9} "
        f"{'predicted s':>16}"
    ]
    for row in rows:
        start = f"{row.policy:{width}} {row.num_chunks:3d} {row.stages_per_rank:2d} "
        if row.measured_time is None:
            lines.append(f"{start}{row.measured_why_not}")
            continue
        peak = "-" if row.measured_peak_bytes is None else f"{row.measured_peak_bytes / GIB:.2f}"
        step, predicted = row.measured_time, "-"
        if row.step_time is not None:
            predicted = f"{row.step_time:.4g} ({row.step_time / step - 1:+.0%})"
        lines.append(f"{start}{step:9.4g} {base / step:5.2f}x {row.measured_bubble:6.1%} {peak:>9} {predicted:>16}")
    return "\n".join(lines)
