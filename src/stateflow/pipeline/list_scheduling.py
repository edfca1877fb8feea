"""List scheduling: from ordered streams of actions on each rank to one list a rank.

Policies say which orders have to be kept and which limits hold; what is free is decided here, in simulated time with
F = W = 1, I = 1, or 2 where it recomputes a forward, and B = I + W for every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stateflow.pipeline.schedule import Action, Kind, Table

TIMES = {
    False: {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1},
    True: {Kind.F: 1, Kind.B: 3, Kind.I: 2, Kind.W: 1},  # with full recomputation
}
Stream = Sequence[Action]


def list_schedule(
    streams: Sequence[Sequence[Stream]],
    stage_to_rank: Sequence[int],
    *,
    prefer: Callable[[Action], tuple | int],
    recomputed: bool = False,
    max_per_stage: Sequence[int] | None = None,
    max_per_rank: int | None = None,
    max_waiting: int | None = None,
) -> Table | None:
    """One list a rank from ``streams[rank]``, each of them kept in its order.

    Again and again the action that can start first is run: a head of a stream of a free rank whose inputs are there.
    Of several on a rank that could start at once, the one with the least ``prefer(action)`` is run. What has been
    run in the simulation can be run in that order, so the result has no wait cycle.

    Args:
        recomputed: which of the module's times hold.
        max_per_stage: a stage begins no forward while it has so many units between F and B (or I).
        max_per_rank: a rank begins no forward while it has so many units between F and B (or W).
        max_waiting: a rank begins no F and no I while more units than this wait for their W.

    Returns:
        The table, or None if the limits leave no rank anything to run.
    """
    num_ranks, num_stages = len(streams), len(stage_to_rank)
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    position = [[0] * len(row) for row in streams]
    rank_free = [0] * num_ranks
    of_stage, of_rank, waiting = [0] * num_stages, [0] * num_ranks, [0] * num_ranks
    finish: dict[tuple, int] = {}  # (is forward, stage, microbatch, chunk) -> when F or B or I ended

    def input_time(action: Action) -> int | None:
        """When the inputs of an action are there, None if that is not known yet."""
        forward, unit = action.kind is Kind.F, (action.microbatch, action.chunk)
        if action.kind is Kind.W:
            return finish.get((False, action.stage, *unit))
        if not forward and (True, action.stage, *unit) not in finish:
            return None
        source = action.stage + (-1 if forward else 1)
        return finish.get((forward, source, *unit)) if 0 <= source < num_stages else 0

    def is_blocked(action: Action, rank: int) -> bool:
        if action.kind in (Kind.F, Kind.I) and max_waiting is not None and waiting[rank] > max_waiting:
            return True
        if action.kind is not Kind.F:
            return False
        full_stage = max_per_stage is not None and of_stage[action.stage] >= max_per_stage[action.stage]
        return full_stage or (max_per_rank is not None and of_rank[rank] >= max_per_rank)

    def next_of(rank: int) -> tuple | None:
        """(start, preference, stream) of what the rank would run next."""
        best = None
        for number, stream in enumerate(streams[rank]):
            if position[rank][number] == len(stream):
                continue
            action = stream[position[rank][number]]
            ready = None if is_blocked(action, rank) else input_time(action)
            if ready is not None:
                candidate = max(rank_free[rank], ready), prefer(action), number
                best = candidate if best is None else min(best, candidate)
        return best

    following = [next_of(rank) for rank in range(num_ranks)]
    for _ in range(sum(len(stream) for row in streams for stream in row)):
        starts = [(entry[0], rank) for rank, entry in enumerate(following) if entry is not None]
        if not starts:
            return None
        start, rank = min(starts)
        number = following[rank][2]
        action = streams[rank][number][position[rank][number]]
        position[rank][number] += 1
        rows[rank].append(action)
        rank_free[rank] = start + TIMES[recomputed][action.kind]
        forward, retires = action.kind is Kind.F, action.kind in (Kind.B, Kind.W)
        if action.kind is not Kind.W:
            finish[forward, action.stage, action.microbatch, action.chunk] = rank_free[rank]
            of_stage[action.stage] += 1 if forward else -1
        of_rank[rank] += forward - retires
        waiting[rank] += (action.kind is Kind.I) - (action.kind is Kind.W)
        # Only these can have changed: the rank, and those that its result was for.
        for changed in {rank, *(stage_to_rank[s] for s in (action.stage - 1, action.stage + 1) if 0 <= s < num_stages)}:
            following[changed] = next_of(changed)
    return tuple(map(tuple, rows))


def merge_by_list_scheduling(
    orders: Sequence[Stream], stage_to_rank: Sequence[int], num_ranks: int, recomputed: bool = False
) -> Table:
    """One list a rank from one list a stage, each kept in its order.

    The latest stage's backward comes first, else the earliest stage's forward, then W. If the stages' lists are free
    of wait cycles on a rank of their own each, the merged ones are, too.
    """
    num_stages = len(orders)
    streams = [[orders[s] for s in range(num_stages) if stage_to_rank[s] == rank] for rank in range(num_ranks)]

    def prefer(action: Action) -> int:
        return {Kind.F: action.stage, Kind.W: num_stages + action.stage}.get(action.kind, -num_stages - action.stage)

    table = list_schedule(streams, stage_to_rank, prefer=prefer, recomputed=recomputed)
    assert table is not None, "the stages' own orders hold a wait cycle"
    return table
