"""The fastest plan that fits: every (policy, N, alpha) simulated on measured costs, and a dynamic program beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stateflow.chunks import ChunkPlan, default_multiple
from stateflow.pipeline.schedule import Kind
from stateflow.planning.analytic import NUM_CHUNKS, SKEWS, Analytic
from stateflow.planning.devices import GIB
from stateflow.planning.profile import ACTION_SHARE, CostSurface, StageProfile

GRID = 64  # boundaries that the dynamic program may choose from


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted figures; ``skew`` is None for one of the dynamic program."""

    policy: str
    recompute: str
    plan: ChunkPlan
    skew: float | None
    step_time: float
    bubble: float
    peak_bytes: tuple[int, ...]
    fits: bool

    @property
    def name(self) -> str:
        how = "dynamic program" if self.skew is None else f"skew {self.skew:g}"
        return f"{self.policy}, {self.plan.num_chunks} chunks, {how}, recomputation {self.recompute}"


class Measured(Analytic):
    """``Analytic`` with measured costs in the place of counted ones, and measured memory of units where there is some.

    ``profiles[stage]`` is the profile of each stage.
    """

    def use(self, profiles: Sequence[StageProfile]) -> Measured:
        distinct = {id(profile): {Kind.F: profile.forward, Kind.B: profile.backward} for profile in profiles}
        self.surfaces: list[dict[Kind, CostSurface]] = [distinct[id(profile)] for profile in profiles]
        self.stages = [_with_measured_memory(s, p) for s, p in zip(self.stages, profiles, strict=True)]
        return self

    def _seconds(self, plan: ChunkPlan, kind: Kind, stage_index: int, chunk: int) -> float:
        start, stop = plan.span(chunk)
        surface = self.surfaces[stage_index][Kind.F if kind is Kind.F else Kind.B]
        return ACTION_SHARE.get(kind, 1.0) * surface.seconds(start, stop - start)

    def candidate(self, plan: ChunkPlan, policy: str, skew: float | None) -> Candidate:
        simulation = self.simulate(plan, policy)
        peaks = self.peak_bytes(simulation.schedule, plan)
        return Candidate(
            policy, self.job.recompute, plan, skew, simulation.step_time, simulation.bubble, peaks,
            max(peaks) <= self.limit,
        )  # fmt: skip


def _with_measured_memory(stage, profile: StageProfile):
    """The stage with what its largest measured chunk saved and needed, where a GPU has counted it."""
    seen = [p for p in profile.points if not p.failed and p.saved_bytes is not None]
    # A chunk at 0 allocates the K/V window, too: look at others where there are some.
    seen = [p for p in seen if p.start] or seen
    if not seen:
        return stage
    largest = max(seen, key=lambda p: p.length)
    footprint = stage.footprint
    saved = max(0, largest.saved_bytes - footprint.carry_bytes)
    return replace(
        stage,
        footprint=replace(
            footprint,
            saved_bytes_per_token=-(-saved // largest.length),
            forward_bytes_per_token=-(-max(0, largest.forward_bytes) // largest.length),
            backward_bytes_per_token=-(-max(0, largest.backward_bytes) // largest.length),
            working_bytes=0,  # is in the measured figures
        ),
    )


def search(
    measured: Measured, policies: Sequence[str], num_chunks: Sequence[int] = NUM_CHUNKS, skews: Sequence[float] = SKEWS
) -> list[Candidate]:
    """All candidates, fastest first, those that do not fit last; the same cut is listed once a policy."""
    found: dict[tuple, Candidate] = {}

    def add(plan: ChunkPlan, policy: str, skew: float | None) -> None:
        key = (policy, plan.boundaries)
        if key not in found:
            found[key] = measured.candidate(plan, policy, skew)

    job = measured.job
    for policy in policies:
        for n in num_chunks:
            for skew in skews if n > 1 else (0.0,):
                try:
                    plan = job.plan(n, skew)
                except ValueError:
                    continue  # the rounding leaves a chunk empty
                add(plan, policy, skew)
        for plan in dynamic_plans(measured, max(num_chunks)):
            add(plan, policy, None)
    # Of equally fast ones the fewer chunks, and a member of the alpha family before the dynamic program.
    return sorted(
        found.values(), key=lambda c: (not c.fits, c.step_time, c.plan.num_chunks, c.skew is None, c.skew or 0.0)
    )


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
        """Of all stages, forward and backward of the chunk: what the steady state is bound by."""
        length = stop - start
        return max(s[Kind.F].seconds(start, length) + s[Kind.B].seconds(start, length) for s in distinct)

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
    costs = {(i, j): cost(cuts[i], cuts[j]) for i in range(last) for j in range(i + 1, last + 1)}
    limits = sorted(set(costs.values()))
    if len(limits) > num_limits:
        limits = [limits[round(k * (len(limits) - 1) / (num_limits - 1))] for k in range(num_limits)]
    found: dict[tuple[int, ...], float] = {}
    for limit in limits:
        # best[j]: by number of chunks, the least sum of costs of a cut of [0, cuts[j]) and where its last chunk begins
        best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}] + [{} for _ in range(last)]
        for j in range(1, last + 1):
            for i in range(j):
                if costs[i, j] > limit:
                    continue
                for count, (total, _) in best[i].items():
                    value = total + costs[i, j]
                    if count < most_chunks and value < best[j].get(count + 1, (float("inf"), 0))[0]:
                        best[j][count + 1] = (value, i)
        for count in best[last]:
            indices, at = [last], last
            for remaining in range(count, 0, -1):
                at = best[at][remaining][1]
                indices.append(at)
            boundaries = tuple(cuts[i] for i in reversed(indices))
            pieces = [costs[a, b] for a, b in zip(indices[1:], indices, strict=False)]
            found[boundaries] = num_microbatches * sum(pieces) + (num_stages - 1) * max(pieces)
    return sorted(((list(b), value) for b, value in found.items()), key=lambda entry: (entry[1], len(entry[0])))


def describe(candidate: Candidate) -> str:
    """One line of the list of candidates."""
    mark = "" if candidate.fits else "  does not fit"
    peak = max(candidate.peak_bytes) / GIB
    return f"{candidate.step_time:9.4g} s  {candidate.bubble:5.1%} idle  {peak:6.2f} GiB  {candidate.name}{mark}"
