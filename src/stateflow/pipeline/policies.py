"""Policies: in what order the units are issued. Each is one short function that returns a ``Schedule``.

All obey eq. 8; they differ in memory and in the idle time of the ranks. A new one is a function with the
signature of ``Policy`` under ``@register_policy("name")``; ``build_schedule`` checks what it returns.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from stateflow.pipeline.checker import check_schedule
from stateflow.pipeline.schedule import Action, Kind, Schedule, Table

# (num_ranks, num_stages, num_microbatches, num_chunks) -> Schedule
Policy = Callable[[int, int, int, int], Schedule]

POLICIES: dict[str, Policy] = {}


def register_policy(name: str) -> Callable[[Policy], Policy]:
    """Decorator that makes a policy known under ``name``.

    Raises:
        ValueError: if the name is taken, or is not a single word.
    """
    if name in POLICIES:
        raise ValueError(f"a policy named {name!r} exists already; choose another name")
    if len(name.split()) != 1:
        raise ValueError(f"policy name {name!r} must be a single word")

    def register(policy: Policy) -> Policy:
        POLICIES[name] = policy
        return policy

    return register


def build_schedule(
    policy: str, num_ranks: int, num_microbatches: int, num_chunks: int, stages_per_rank: int = 1
) -> Schedule:
    """The checked schedule of a policy for P ranks, M microbatches and N chunks.

    Raises:
        ValueError: for an unknown policy or a size below 1.
        ScheduleError: if the policy returns an illegal table.
    """
    if policy not in POLICIES:
        nearest = difflib.get_close_matches(policy.lower(), POLICIES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown policy {policy!r}; did you mean {nearest!r}? Known: {', '.join(sorted(POLICIES))}"
        )
    sizes = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_chunks": num_chunks,
        "stages_per_rank": stages_per_rank,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} {size} must be at least 1")
    schedule = POLICIES[policy](num_ranks, num_ranks * stages_per_rank, num_microbatches, num_chunks)
    check_schedule(schedule)
    return schedule


def loop_placement(num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Stage s on rank s mod P."""
    return tuple(stage % num_ranks for stage in range(num_stages))


@register_policy("1f1b")
def one_forward_one_backward(
    num_ranks: int, num_stages: int, num_microbatches: int, num_chunks: int
) -> Schedule:
    """The paper's and Seq1F1B's order: warm-up forwards, one forward and one backward in turn, the rest.

    Microbatches ascend; within one, forward chunks ascend and backward chunks descend. The first backward on
    the last stage needs all N chunks of a microbatch, so stage s of S warms up with min(M*N, N + S - s - 2)
    units and holds at most min(M*N, N + S - s - 1) in flight (eq. 13). With N = 1 this is plain 1F1B. With
    several stages a rank each stage keeps its own 1F1B order and the rank merges them as they become ready.
    """
    num_units = num_microbatches * num_chunks
    stage_to_rank = loop_placement(num_ranks, num_stages)
    orders = []
    for stage in range(num_stages):
        forwards = [Action(stage, Kind.F, a, i) for a in range(num_microbatches) for i in range(num_chunks)]
        backwards = [
            Action(stage, Kind.B, a, i) for a in range(num_microbatches) for i in reversed(range(num_chunks))
        ]
        num_warmup = min(num_units, num_chunks + num_stages - stage - 2)
        steady = [action for pair in zip(forwards[num_warmup:], backwards, strict=False) for action in pair]
        orders.append(forwards[:num_warmup] + steady + backwards[num_units - num_warmup :])
    return Schedule(
        policy="1f1b",
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        stage_to_rank=stage_to_rank,
        table=merge_by_list_scheduling(orders, stage_to_rank, num_ranks),
        peak_in_flight=tuple(min(num_units, num_chunks + num_stages - s - 1) for s in range(num_stages)),
    )


@register_policy("gpipe")
def all_forward_all_backward(
    num_ranks: int, num_stages: int, num_microbatches: int, num_chunks: int
) -> Schedule:
    """TeraPipe's order: all forwards, one local stage after the other, then all backwards in reverse.

    Every stage holds all M*N units in flight.
    """
    stage_to_rank = loop_placement(num_ranks, num_stages)
    units = [(a, i) for a in range(num_microbatches) for i in range(num_chunks)]
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        forwards = [Action(stage, Kind.F, a, i) for stage in stages for a, i in units]
        backwards = [Action(f.stage, Kind.B, f.microbatch, f.chunk) for f in reversed(forwards)]
        rows.append((*forwards, *backwards))
    return Schedule(
        policy="gpipe",
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        stage_to_rank=stage_to_rank,
        table=tuple(rows),
        peak_in_flight=(len(units),) * num_stages,
    )


def merge_by_list_scheduling(
    orders: Sequence[Sequence[Action]], stage_to_rank: Sequence[int], num_ranks: int
) -> Table:
    """One list a rank from one list a stage (of F and B), each kept in its order.

    Time is simulated with F = 1 and B = 2: a free rank runs the head of one of its stages' lists whose input
    is there, the latest stage's backward first, else the earliest stage's forward. What is merged has been
    run in the simulation, so if the stages' lists are free of wait cycles on a rank of their own each, the
    merged ones are, too.
    """
    num_stages = len(orders)
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    rank_free = [0] * num_ranks
    finish: dict[Action, int] = {}
    step = [0] * num_stages

    def earliest_start(stage: int) -> tuple[int, int, int] | None:
        """(time, preference, stage) of the head of the stage's list; None if its input is not there yet."""
        if step[stage] == len(orders[stage]):
            return None
        head = orders[stage][step[stage]]
        source = stage - 1 if head.kind is Kind.F else stage + 1
        ready = 0
        if 0 <= source < num_stages:
            ready = finish.get(Action(source, head.kind, head.microbatch, head.chunk), -1)
            if ready < 0:
                return None
        preference = stage if head.kind is Kind.F else -num_stages - stage
        return max(rank_free[stage_to_rank[stage]], ready), preference, stage

    starts = [earliest_start(stage) for stage in range(num_stages)]
    for _ in range(sum(map(len, orders))):
        candidates = [start for start in starts if start is not None]
        assert candidates, "the stages' own orders hold a wait cycle"
        time, _, stage = min(candidates)
        rank, action = stage_to_rank[stage], orders[stage][step[stage]]
        rows[rank].append(action)
        step[stage] += 1
        rank_free[rank] = finish[action] = time + (1 if action.kind is Kind.F else 2)
        for other in range(num_stages):  # only these can have changed: the rank's stages and the neighbours
            if stage_to_rank[other] == rank or abs(other - stage) == 1:
                starts[other] = earliest_start(other)
    return tuple(map(tuple, rows))
