"""The fastest plan that fits: every (policy, N, alpha) simulated on measured costs, and a dynamic program beside it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stateflow.chunks import ChunkPlan, default_multiple
from stateflow.pipeline.policies import find_policy
from stateflow.pipeline.schedule import Kind
from stateflow.planning.analytic import NUM_CHUNKS, SKEWS, Analytic
from stateflow.planning.devices import GIB
from stateflow.planning.profile import Budget, CostSurface, StageProfile

GRID = 64  # boundaries that the dynamic program may choose from
KEPT = 8  # the fastest so many are known exactly


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted figures; ``skew`` is None for one of the dynamic program."""

    policy: str
    recompute: str
    stages_per_rank: int
    weight_lag: int | None
    plan: ChunkPlan
    skew: float | None
    step_time: float
    bubble: float
    peak_bytes: tuple[int, ...]
    fits: bool

    @property
    def name(self) -> str:
        how = "dynamic program" if self.skew is None else f"skew {self.skew:g}"
        cut = "whole sequences" if self.plan.num_chunks == 1 else f"{self.plan.num_chunks} chunks, {how}"
        stages = "" if self.stages_per_rank == 1 else f" on {self.stages_per_rank} stages a rank"
        return f"{self.policy}{stages}, {cut}, recomputation {self.recompute}"


class Measured(Analytic):
    """``Analytic`` with measured costs in the place of counted ones, and measured memory of units where there is some.

    ``profiles[stage]`` is the profile of each stage; all with a whole backward, or all with a split one.
    """

    def use(self, profiles: Sequence[StageProfile], recorded: bool = False) -> Measured:
        """``recorded``: the layers of the profiles ran in CUDA graphs."""
        distinct = {id(profile): profile.surfaces() for profile in profiles}
        self.surfaces: list[dict[Kind, CostSurface]] = [distinct[id(profile)] for profile in profiles]
        self.stages = [with_measured_memory(s, p, recorded) for s, p in zip(self.stages, profiles, strict=True)]
        return self

    def _seconds(self, plan: ChunkPlan, kind: Kind, stage_index: int, chunk: int) -> float:
        start, stop = plan.span(chunk)
        return self.surfaces[stage_index][kind].seconds(start, stop - start)

    def candidate(self, plan: ChunkPlan, policy: str, skew: float | None) -> Candidate:
        simulation = self.simulate(plan, policy)
        peaks = self.peak_bytes(simulation.schedule, plan)
        return Candidate(
            policy, self.job.recompute, self.job.stages_per_rank, self.job.weight_lag, plan, skew, simulation.step_time,
            simulation.bubble, peaks, max(peaks) <= self.limit,
        )  # fmt: skip

    def least_time(self, plan: ChunkPlan, stage_to_rank: Sequence[int]) -> float:
        """No schedule of the plan is faster: the work of a rank and the way to it, and with one whole backward a stage
        the way back, too.
        """
        chunks = range(plan.num_chunks)
        first = [self._seconds(plan, Kind.F, stage, 0) for stage in range(len(self.surfaces))]
        work = [0.0] * self.job.num_ranks
        way: list[float | None] = [None] * self.job.num_ranks
        back_to = [0.0]
        for stage, surfaces in enumerate(self.surfaces):
            rank = stage_to_rank[stage]
            way[rank] = sum(first[:stage]) + back_to[-1] if way[rank] is None else way[rank]
            work[rank] += sum(self._seconds(plan, kind, stage, chunk) for kind in surfaces for chunk in chunks)
            whole = Kind.B in surfaces and self.job.stages_per_rank == 1
            back_to.append(back_to[-1] + self._seconds(plan, Kind.B, stage, 0) if whole else 0.0)
        return max(w + self.job.num_microbatches * t for w, t in zip(way, work, strict=True))


def with_measured_memory(stage, profile: StageProfile, recorded: bool = False):
    """The stage with what its largest measured chunks saved and needed, where a GPU has counted it.

    What a backward needs is a line through the two longest: the head's and the embedding's gradients do not grow. What
    layers need that were ``recorded`` in a CUDA graph is the graph's, and seen by nobody: it is at least what is
    counted.
    """
    seen = [p for p in profile.points if not p.failed and p.saved_bytes is not None]
    # A chunk at 0 allocates the K/V window, too: look at others where there are some.
    seen = [p for p in seen if p.start] or seen
    if not seen:
        return stage
    by_length = {p.length: p for p in seen}
    *shorter, largest = (by_length[n] for n in sorted(by_length))
    constant = 0
    if shorter:
        slope = (largest.backward_bytes - shorter[-1].backward_bytes) / (largest.length - shorter[-1].length)
        constant = round(largest.backward_bytes - max(0.0, slope) * largest.length)
        constant = max(0, constant)
    footprint = stage.footprint
    saved = max(0, largest.saved_bytes - footprint.carry_bytes)
    forward = -(-max(0, largest.forward_bytes - constant) // largest.length)
    backward = -(-max(0, largest.backward_bytes - constant) // largest.length)
    if recorded:
        forward = max(forward, footprint.forward_bytes_per_token)
        backward = max(backward, footprint.backward_bytes_per_token)
    return replace(
        stage,
        footprint=replace(
            footprint, saved_bytes_per_token=-(-saved // largest.length), forward_bytes_per_token=forward,
            backward_bytes_per_token=backward, working_bytes=constant,
        ),
    )  # fmt: skip


@dataclass
class Found:
    """Candidates, fastest first and those that do not fit last, and what became of the others."""

    candidates: list[Candidate] = field(default_factory=list)
    too_slow: int = 0  # not simulated: more work than the KEPT-th fastest takes in all
    left_out: int = 0  # not simulated: the time was over


def search(
    entries: Sequence[tuple[Measured, Sequence[str]]], num_chunks: Sequence[int] = NUM_CHUNKS,
    skews: Sequence[float] = SKEWS, budget: Budget | None = None,
) -> Found:
    """The fastest of all (policy, N, alpha) and of the dynamic program, for each ``Measured`` with its policies.

    Plans are simulated in the order of a lower bound of their time, until no other can be among the ``KEPT`` fastest
    that fit: as if all had been simulated. Whole sequences in the first policy are always among them. The same cut is
    listed once a policy.
    """
    budget = budget or Budget(None)
    waiting: list[tuple[float, int, Measured, str, ChunkPlan, float | None]] = []
    for measured, policies in entries:
        cuts: dict[tuple[int, ...], tuple[ChunkPlan, float | None]] = {}
        for n in num_chunks:
            for skew in skews if n > 1 else (0.0,):
                try:
                    plan = measured.job.plan(n, skew)
                except ValueError:
                    continue  # the rounding leaves a chunk empty
                cuts.setdefault(plan.boundaries, (plan, skew))
        if not budget.spent:
            for plan in dynamic_plans(measured, max(num_chunks)):
                cuts.setdefault(plan.boundaries, (plan, None))
        for policy in policies:
            placed = find_policy(policy).placement(measured.job.num_ranks, len(measured.stages))
            for plan, skew in cuts.values():
                waiting.append((measured.least_time(plan, placed), len(waiting), measured, policy, plan, skew))
    whole = next((entry for entry in waiting if entry[4].num_chunks == 1), None)
    if whole is not None:
        waiting.remove(whole)
    waiting.sort(key=lambda entry: entry[:2])
    found, times = Found(), []
    for at, (least, _, measured, policy, plan, skew) in enumerate(waiting if whole is None else [whole, *waiting]):
        if len(times) >= KEPT and least > times[KEPT - 1]:
            found.too_slow += 1
            continue
        if budget.spent and at > 1:
            found.left_out += 1
            continue
        one = measured.candidate(plan, policy, skew)
        found.candidates.append(one)
        if one.fits:
            bisect.insort(times, one.step_time)
    found.candidates.sort(key=order)
    return found


def order(candidate: Candidate) -> tuple:
    """Of equally fast ones the fewer chunks and stages, and a member of the alpha family before the dynamic program."""
    c = candidate
    return (not c.fits, c.step_time, c.plan.num_chunks, c.stages_per_rank, c.skew is None, c.skew or 0.0)


def dynamic_plans(measured: Measured, most_chunks: int) -> list[ChunkPlan]:
    """Cuts that the dynamic program finds on the measured cost, the best first; at most three."""
    job = measured.job
    multiple = job.multiple or default_multiple(job.seq_len, most_chunks)
    step = multiple * max(1, -(-job.seq_len // (GRID * multiple)))
    cuts = [*range(0, job.seq_len, step), job.seq_len]
    if len(cuts) > 2 and cuts[-1] - cuts[-2] < step // 2:
        del cuts[-2]
    distinct = {id(surfaces): surfaces for surfaces in measured.surfaces}.values()

    def slowest(start: int, stop: int) -> float:
        """Of all stages, all actions of the chunk: what the steady state is bound by."""
        return max(sum(surface.seconds(start, stop - start) for surface in s.values()) for s in distinct)

    ranked = best_cuts(cuts, slowest, job.num_microbatches, len(measured.stages), most_chunks)
    return [ChunkPlan(tuple(boundaries)) for boundaries, _ in ranked[:3]]


def best_cuts(
    cuts: Sequence[int], cost: Callable[[int, int], float], num_microbatches: int, num_stages: int, most_chunks: int,
    num_limits: int = 40,
) -> list[tuple[list[int], float]]:
    """TeraPipe's program: boundaries among ``cuts`` that minimise M * sum(cost) + (S - 1) * max(cost).

    For each of some limits on the largest chunk's cost the least sum is found by a dynamic program over the cuts, so
    the result is exact if ``num_limits`` is at least the number of pairs of cuts.

    Returns:
        Distinct (boundaries, value), best first.
    """
    last = len(cuts) - 1
    most_chunks = min(most_chunks, last)
    costs = np.full((last + 1, last + 1), np.inf)
    for i in range(last):
        for j in range(i + 1, last + 1):
            costs[i, j] = cost(cuts[i], cuts[j])
    limits = np.unique(costs[np.isfinite(costs)])
    if len(limits) > num_limits:
        limits = limits[np.linspace(0, len(limits) - 1, num_limits).round().astype(int)]
    found: dict[tuple[int, ...], float] = {}
    for limit in limits:
        allowed = np.where(costs <= limit, costs, np.inf)
        # best[j, n]: the least sum of costs of n chunks that cover [0, cuts[j]); came[j, n]: where the last one begins
        best = np.full((last + 1, most_chunks + 1), np.inf)
        came = np.zeros((last + 1, most_chunks + 1), dtype=int)
        best[0, 0] = 0.0
        for j in range(1, last + 1):
            totals = best[:j, :-1] + allowed[:j, j, None]
            came[j, 1:] = totals.argmin(0)
            best[j, 1:] = totals.min(0)
        for count in np.flatnonzero(np.isfinite(best[last])):
            indices = [last]
            for remaining in range(count, 0, -1):
                indices.append(int(came[indices[-1], remaining]))
            boundaries = tuple(cuts[i] for i in reversed(indices))
            pieces = [float(costs[a, b]) for a, b in zip(indices[1:], indices, strict=False)]
            found[boundaries] = num_microbatches * sum(pieces) + (num_stages - 1) * max(pieces)
    return sorted(((list(b), value) for b, value in found.items()), key=lambda entry: (entry[1], len(entry[0])))


def describe(candidate: Candidate) -> str:
    """One line of the list of candidates."""
    mark = "" if candidate.fits else "  does not fit"
    peak = max(candidate.peak_bytes) / GIB
    return f"{candidate.step_time:9.4g} s  {candidate.bubble:5.1%} idle  {peak:6.2f} GiB  {candidate.name}{mark}"
