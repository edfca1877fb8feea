"""How long a schedule takes, and why: an event-driven simulation of its table.

The model: a rank runs the actions of its list in order, one at a time, each for ``cost(action)`` seconds. A forward
needs the activation of the previous stage, a backward (B or I) the gradient of the next one; W needs nothing from
outside. A result is sent when its action ends. Between two ranks, in each direction, messages go one after another:
each occupies the link for bytes / bandwidth and arrives ``latency`` later. Sending costs the ranks no time, receives
are posted early enough, and stages of one rank hand over at once. Numbers may be float, int or Fraction; with the
latter two the result is exact.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from stateflow.chunks import ChunkPlan
from stateflow.pipeline.accounting import StageFootprint, held_bytes
from stateflow.pipeline.lowering import lower
from stateflow.pipeline.schedule import Action, Kind, Schedule, ScheduleError

Cost = Callable[[Action], float]
MessageBytes = Callable[[Action], float]


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: ``latency`` in seconds a message, ``bandwidth`` in bytes a second.

    Raises:
        ValueError: for a negative latency or a bandwidth that is not positive.
    """

    latency: float = 0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency {self.latency} s must be finite and at least 0")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth {self.bandwidth} bytes/s must be above 0; leave it out for no limit")

    def occupied(self, num_bytes: float) -> float:
        """Seconds for which a message occupies the link."""
        return 0 if self.bandwidth == math.inf else num_bytes / self.bandwidth


INSTANT = Link()


@dataclass(frozen=True, slots=True)
class Span:
    """One action in time, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step: ``spans[rank]`` in program order."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def step_time(self) -> float:
        return max(row[-1].end for row in self.spans if row)

    def busy(self, rank: int) -> float:
        """Seconds for which a rank computes."""
        return sum(span.end - span.start for span in self.spans[rank])

    @property
    def idle(self) -> float:
        """Seconds of idle time of all ranks together."""
        ranks = range(self.schedule.num_ranks)
        return self.schedule.num_ranks * self.step_time - sum(self.busy(rank) for rank in ranks)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, 0 to 1."""
        whole = self.schedule.num_ranks * self.step_time
        return self.idle / whole if whole else 0.0


def simulate(
    schedule: Schedule, cost: Cost, link: Link = INSTANT, message_bytes: MessageBytes | None = None
) -> Simulation:
    """The step that a legal schedule makes when ``cost(action)`` is the time of each action.

    Args:
        schedule: of any policy, kinds F, B, I, W, any number of stages a rank.
        cost: seconds of an action, finite and at least 0.
        link: between any two ranks.
        message_bytes: size of what an action (F, B or I) sends to another rank; none are 0 bytes.

    Raises:
        ValueError: for a cost that is negative or not finite.
        ScheduleError: if the ranks wait for each other (``check_schedule`` names the cause).
    """
    table, owner = schedule.table, schedule.stage_to_rank
    num_stages = schedule.num_stages
    position = [0] * len(table)
    computing = [False] * len(table)
    spans: list[list[Span]] = [[] for _ in table]
    arrived: set[tuple] = set()
    link_free: dict[tuple[int, int], float] = {}
    events: list[tuple] = []  # (time, order of creation, rank whose action ended or None, key that arrived or None)
    created = 0

    def add_event(time, ended: int | None, key: tuple | None) -> None:
        nonlocal created
        heapq.heappush(events, (time, created, ended, key))
        created += 1

    def start(rank: int, now) -> None:
        """Starts the rank's next action if it is free and the action's input is there."""
        if computing[rank] or position[rank] == len(table[rank]):
            return
        action = table[rank][position[rank]]
        needed = _input_key(action, num_stages)
        if needed is not None and needed not in arrived:
            return
        seconds = cost(action)
        if not 0 <= seconds < math.inf:
            raise ValueError(f"cost of {action} is {seconds}; it must be finite and at least 0")
        computing[rank] = True
        position[rank] += 1
        spans[rank].append(Span(action, now, now + seconds))
        add_event(now + seconds, rank, None)

    def send(action: Action, rank: int, now) -> None:
        key = _output_key(action, num_stages)
        if key is None:
            return
        receiver = owner[key[1]]
        if receiver == rank:
            arrived.add(key)
            return
        pair = (rank, receiver)
        begin = max(now, link_free.get(pair, 0))
        link_free[pair] = begin + link.occupied(0 if message_bytes is None else message_bytes(action))
        add_event(link_free[pair] + link.latency, None, key)

    for rank in range(len(table)):
        start(rank, 0)
    while events:
        now, _, ended, key = heapq.heappop(events)
        if ended is not None:
            computing[ended] = False
            send(spans[ended][-1].action, ended, now)
            start(ended, now)
        else:
            arrived.add(key)
            start(owner[key[1]], now)
    stuck = [f"rank {r} at {row[position[r]]}" for r, row in enumerate(table) if position[r] < len(row)]
    if stuck:
        raise ScheduleError(f"no rank can go on ({', '.join(stuck)}); check_schedule names the relation to repair")
    return Simulation(schedule, tuple(map(tuple, spans)))


def _input_key(action: Action, num_stages: int) -> tuple | None:
    """What must have arrived before an action: (forward or not, stage that needs it, microbatch, chunk)."""
    forward = action.kind is Kind.F
    if action.kind is Kind.W or action.stage == (0 if forward else num_stages - 1):
        return None
    return forward, action.stage, action.microbatch, action.chunk


def _output_key(action: Action, num_stages: int) -> tuple | None:
    """The same key of what an action hands over, None if it goes nowhere."""
    forward = action.kind is Kind.F
    receiver = action.stage + (1 if forward else -1)
    if action.kind is Kind.W or not 0 <= receiver < num_stages:
        return None
    return forward, receiver, action.microbatch, action.chunk


# ---- why time is lost


@dataclass(frozen=True)
class LostTime:
    """Seconds of all ranks together that are not useful work, by cause; they add up to ``total``.

    Each cause is what its removal would save, one after another, so that nothing is counted twice:

    Attributes:
        communication: idle time that is gone when messages take no time.
        imbalance: idle time that is then gone when every action of a kind costs the mean of that kind.
        warm_up_and_drain: idle time that is left then, of the schedule itself. May be all there is.
        chunk_overhead: not idle but busy: the part of the costs that exists only because sequences are cut.
        rank_time: ranks times step time, for shares.
    """

    warm_up_and_drain: float
    imbalance: float
    communication: float
    chunk_overhead: float
    rank_time: float

    @property
    def total(self) -> float:
        return self.warm_up_and_drain + self.imbalance + self.communication + self.chunk_overhead

    def shares(self) -> dict[str, float]:
        """Cause -> share of the ranks' time."""
        causes = ("warm_up_and_drain", "imbalance", "communication", "chunk_overhead")
        return {cause: getattr(self, cause) / self.rank_time if self.rank_time else 0.0 for cause in causes}


def lost_time(
    simulation: Simulation, cost: Cost, *, instant: Simulation | None = None, overhead: Cost | None = None
) -> LostTime:
    """Splits the lost time of ``simulation`` by cause, with two more simulations.

    Args:
        simulation: of ``simulate(schedule, cost, ...)``.
        cost: the same cost.
        instant: the same simulation with messages that take no time, if it is at hand.
        overhead: the part of ``cost`` that whole sequences would not have; none if left out.
    """
    schedule = simulation.schedule
    if instant is None:
        instant = simulate(schedule, cost)
    totals: dict[Kind, float] = {}
    counts: dict[Kind, int] = {}
    extra = 0
    for row in schedule.table:
        for action in row:
            totals[action.kind] = totals.get(action.kind, 0) + cost(action)
            counts[action.kind] = counts.get(action.kind, 0) + 1
            extra += overhead(action) if overhead is not None else 0
    mean = {kind: totals[kind] / counts[kind] for kind in totals}
    uniform = simulate(schedule, lambda action: mean[action.kind])
    return LostTime(
        warm_up_and_drain=uniform.idle,
        imbalance=instant.idle - uniform.idle,
        communication=simulation.idle - instant.idle,
        chunk_overhead=extra,
        rank_time=schedule.num_ranks * simulation.step_time,
    )


# ---- memory over time


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """From ``time`` on a rank holds ``num_bytes``."""

    time: float
    num_bytes: float


def memory_over_time(
    simulation: Simulation, plan: ChunkPlan, footprints: StageFootprint | list[StageFootprint]
) -> tuple[tuple[MemoryPoint, ...], ...]:
    """For each rank what its units hold, as a step function, by the life times of ``accounting``.

    What an action begins is there from its start on, what it ends is gone after its end. A receive buffer appears when
    the receive is posted: when the action before it in the lowered list ends. Parameters, gradients and optimizer are
    not part of it.
    """
    lowered = lower(simulation.schedule)
    held = held_bytes(lowered, plan, footprints)
    rows = []
    for rank, row in enumerate(lowered):
        spans = deque(simulation.spans[rank])
        points = [MemoryPoint(0, 0)]
        for action, (during, after) in zip(row, held[rank], strict=True):
            if not action.is_compute:
                points.append(MemoryPoint(points[-1].time, after))
                continue
            span = spans.popleft()
            assert span.action == action, f"{span.action} in the place of {action}"
            points += [MemoryPoint(span.start, during), MemoryPoint(span.end, after)]
        rows.append(tuple(points))
    return tuple(rows)
