"""Lowering: from a table of compute actions to one with sends and receives.

First by torch's rule. The ranks are visited in order, again and again; each appends its next compute action if that
action's input is there. An action whose result another rank needs is followed at once by its send, and the receive
goes to the end of the receiver's list at the same moment. So between two ranks receives have the order of the sends.

Then every receive moves down to the action that needs it: one that is posted while its message is not yet there keeps
multiprocessors busy with waiting (see ``edges``). Messages of one edge stay in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stateflow.pipeline.schedule import Action, Kind, Schedule, ScheduleError


def lower(schedule: Schedule) -> list[list[Action]]:
    """The table of ``schedule`` with its sends and receives, these as late as they are needed.

    Between stages of one rank nothing is sent.

    Raises:
        ScheduleError: if no rank can go on (``check_schedule`` names the cause).
    """
    return [_receive_late(row, schedule) for row in add_messages(schedule)]


def lower_forward_only(schedule: Schedule) -> list[list[Action]]:
    """The forwards of the table with their messages, for a pass in which a rank waits for all but its latest sends.

    Late receives suit a chain of ranks. Where a rank has several stages, two may wait for each other to take a message
    that neither asks for yet. With receives at the moment of their sends there is one order of all lists together, in
    which no wait for a send stands before its receive.
    """
    rows = lower(schedule) if schedule.num_stages == schedule.num_ranks else add_messages(schedule)
    forward = (Kind.F, Kind.SEND_F, Kind.RECV_F)
    return [[action for action in row if action.kind in forward] for row in rows]


def add_messages(schedule: Schedule) -> list[list[Action]]:
    """The table with its sends and receives, these as early as possible; equals torch's ``_add_send_recv``.

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


def edges_of(schedule: Schedule) -> set[tuple[int, int]]:
    """Which rank sends to which."""
    ranks = schedule.stage_to_rank
    forward = {(a, b) for a, b in zip(ranks, ranks[1:], strict=False) if a != b}
    return forward | {(b, a) for a, b in forward}


def _receive_late(row: Sequence[Action], schedule: Schedule) -> list[Action]:
    """Every receive directly before the action that needs it, or that needs a later message from the same rank."""
    waiting: dict[int, deque[Action]] = {}  # by sender: the receives that are still to be posted, oldest first
    late: list[Action] = []
    for action in row:
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            sender = schedule.stage_to_rank[action.stage + (-1 if action.kind is Kind.RECV_F else 1)]
            waiting.setdefault(sender, deque()).append(action)
            continue
        if action.is_compute:
            kind = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
            needed = Action(action.stage, kind, action.microbatch, action.chunk)
            for receives in waiting.values():
                if action.kind is not Kind.W and needed in receives:
                    while late[-1:] != [needed]:
                        late.append(receives.popleft())
        late.append(action)
    assert not any(waiting.values()), "every receive has an action that needs it"
    return late


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
