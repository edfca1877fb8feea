"""Lowering: from a table of compute actions to one with sends and receives, by torch's rule.

The ranks are visited in order, again and again; each appends its next compute action if that action's input
is there. An action whose result another rank needs is followed at once by its send, and the receive goes to
the end of the receiver's list at the same moment. So all pairs (send, receive) stand in one global order of
which each rank sees a part, which is why ranks that execute their operations in list order cannot deadlock.
"""

from __future__ import annotations

from stateflow.pipeline.schedule import Action, Kind, Schedule, ScheduleError


def lower(schedule: Schedule) -> list[list[Action]]:
    """The table of ``schedule`` with its sends and receives; equals torch's ``_add_send_recv``.

    Between stages of one rank nothing is sent.

    Raises:
        ScheduleError: if no rank can go on (``check_schedule`` names the cause).
    """
    lowered: list[list[Action]] = [[] for _ in schedule.table]
    step = [0] * len(schedule.table)
    arrived: set[Action] = set()  # forwards and backwards whose input from the neighbouring stage is there
    unfinished = [rank for rank, actions in enumerate(schedule.table) if actions]
    while unfinished:
        progress = False
        for rank in unfinished:
            action = schedule.table[rank][step[rank]]
            if _needs_input(action, schedule.num_stages) and _consumer(action) not in arrived:
                continue
            lowered[rank].append(action)
            step[rank] += 1
            progress = True
            _hand_over(action, schedule, lowered, arrived)
        if not progress:
            stuck = ", ".join(f"rank {rank} at {schedule.table[rank][step[rank]]}" for rank in unfinished)
            raise ScheduleError(f"no rank can go on ({stuck}); check_schedule names the relation to repair")
        unfinished = [rank for rank in unfinished if step[rank] < len(schedule.table[rank])]
    return lowered


def _needs_input(action: Action, num_stages: int) -> bool:
    if action.kind is Kind.F:
        return action.stage > 0
    return action.kind in (Kind.B, Kind.I) and action.stage < num_stages - 1


def _consumer(action: Action) -> Action:
    """The key of an arrived input: B stands for I, too, as both consume the same gradient."""
    kind = Kind.F if action.kind is Kind.F else Kind.B
    return Action(action.stage, kind, action.microbatch, action.chunk)


def _hand_over(action: Action, schedule: Schedule, lowered: list[list[Action]], arrived: set[Action]) -> None:
    """Mark the neighbour's input as arrived; append send and receive if it is on another rank."""
    if action.kind is Kind.W:
        return
    forward = action.kind is Kind.F
    stage, neighbour = action.stage, action.stage + (1 if forward else -1)
    if not 0 <= neighbour < schedule.num_stages:
        return
    unit = (action.microbatch, action.chunk)
    arrived.add(Action(neighbour, Kind.F if forward else Kind.B, *unit))
    sender, receiver = schedule.stage_to_rank[stage], schedule.stage_to_rank[neighbour]
    if sender != receiver:
        lowered[sender].append(Action(stage, Kind.SEND_F if forward else Kind.SEND_B, *unit))
        lowered[receiver].append(Action(neighbour, Kind.RECV_F if forward else Kind.RECV_B, *unit))
