"""Legality of any schedule: ``check_schedule`` for compute tables, ``check_communication`` for lowered ones.

torch checks that every action is there, but neither the order of the chunks nor whether the ranks wait for
each other; a wrong order there ends in wrong gradients or a hang. Here every table passes the same relations
(eq. 8), for stage s, microbatch a, chunk i:

    F(s-1,a,i) < F(s,a,i)     F(s,a,i-1) < F(s,a,i)     F(s,a,i) < B(s,a,i)
    B(s+1,a,i) < B(s,a,i)     B(s,a,i+1) < B(s,a,i)

With a split backward I stands for B in them, and F < I < W: the runtime computes everything but the weight
gradients of projections in I, on every stage, so nothing waits for W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stateflow.pipeline.schedule import Action, Kind, Schedule, ScheduleError, in_flight_peaks

__all__ = ["ScheduleError", "check_communication", "check_schedule"]

Place = tuple[int, int]  # rank, and index in the rank's list (the step)


def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule that is incomplete, breaks eq. 8, waits in a cycle, or misstates its peak.

    Raises:
        ScheduleError: naming the first thing that is wrong, its rank and step, and what to change.
    """
    _check_sizes(schedule)
    places = _check_complete(schedule)
    _check_order_on_each_rank(schedule, places)
    _check_waits_between_ranks(schedule, places)
    _check_peaks(schedule)


def check_communication(lowered: Sequence[Sequence[Action]], stage_to_rank: Sequence[int]) -> None:
    """Refuse a lowered table whose sends and receives do not pair up, in order, without a deadlock.

    SEND_F of stage s pairs with RECV_F of stage s+1, SEND_B of stage s with RECV_B of stage s-1. Between two
    ranks the k-th send meets the k-th receive (messages carry no tag). The deadlock model has no buffers: a
    message passes when both ends have posted it and all earlier ones of the same edge, from one rank to another, have
    passed; posting does not block, but an action of computation waits for its own receive.

    Raises:
        ScheduleError: naming the first thing that is wrong, its rank and step, and what to change.
    """
    places = _check_pairs(lowered, stage_to_rank)
    _check_around_computation(lowered, stage_to_rank, places)
    _check_message_order(lowered, stage_to_rank)
    _check_rendezvous(lowered, stage_to_rank)


# ---- compute tables


def _check_sizes(schedule: Schedule) -> None:
    for name in ("num_ranks", "num_stages", "num_microbatches", "num_chunks"):
        if getattr(schedule, name) < 1:
            raise ScheduleError(f"{name} {getattr(schedule, name)} must be at least 1")
    expected = {
        "table": ("lists", schedule.num_ranks, "rank"),
        "stage_to_rank": ("entries", schedule.num_stages, "stage"),
        "peak_in_flight": ("entries", schedule.num_stages, "stage"),
    }
    for name, (items, count, owner) in expected.items():
        if len(getattr(schedule, name)) != count:
            raise ScheduleError(
                f"{name} has {len(getattr(schedule, name))} {items}; give one a {owner}, {count} in all"
            )
    for stage, rank in enumerate(schedule.stage_to_rank):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(
                f"stage {stage} is placed on rank {rank}; ranks are 0 .. {schedule.num_ranks - 1}"
            )
    for rank in range(schedule.num_ranks):
        if not schedule.stages_of(rank):
            raise ScheduleError(f"rank {rank} has no stage; use fewer ranks or place a stage on it")


def _check_complete(schedule: Schedule) -> dict[Action, Place]:
    """Each unit runs F once, and either B once or I and W once each, on the rank of its stage."""
    places: dict[Action, Place] = {}
    for rank, step, action in _steps(schedule.table):
        here = f"rank {rank}, step {step}: {action}"
        if not action.is_compute:
            raise ScheduleError(
                f"{here} communicates; a schedule holds F, B, I and W only, lowering adds the rest"
            )
        for name, value, count in (
            ("stage", action.stage, schedule.num_stages),
            ("microbatch", action.microbatch, schedule.num_microbatches),
            ("chunk", action.chunk, schedule.num_chunks),
        ):
            if not 0 <= value < count:
                raise ScheduleError(f"{here} names {name} {value}; the last {name} is {count - 1}")
        owner = schedule.stage_to_rank[action.stage]
        if owner != rank:
            raise ScheduleError(
                f"{here} runs on the wrong rank: stage {action.stage} is on rank {owner}, move it there"
            )
        if action in places:
            raise ScheduleError(f"{here} is a duplicate of step {places[action][1]}; remove one of them")
        for other in _excluded_by(action):
            if other in places:
                raise ScheduleError(
                    f"{here} repeats the backward {other} of step {places[other][1]}; "
                    "keep either B, or I and W"
                )
        places[action] = (rank, step)
    for stage, rank in enumerate(schedule.stage_to_rank):
        for microbatch in range(schedule.num_microbatches):
            for chunk in range(schedule.num_chunks):
                missing = _missing_of_unit(stage, microbatch, chunk, places)
                if missing is not None:
                    raise ScheduleError(f"rank {rank}: {missing} is missing; add {missing} to its list")
    return places


def _excluded_by(action: Action) -> list[Action]:
    kinds = {Kind.B: (Kind.I, Kind.W), Kind.I: (Kind.B,), Kind.W: (Kind.B,)}.get(action.kind, ())
    return [Action(action.stage, kind, action.microbatch, action.chunk) for kind in kinds]


def _missing_of_unit(stage: int, microbatch: int, chunk: int, places: dict[Action, Place]) -> Action | None:
    f, b, i, w = (Action(stage, kind, microbatch, chunk) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    if f not in places:
        return f
    if b in places or (i in places and w in places):
        return None
    if i in places or w in places:
        return w if i in places else i
    return b


def _predecessors(
    action: Action, schedule: Schedule, places: dict[Action, Place]
) -> list[tuple[Action, str]]:
    """What must have run before ``action`` (eq. 8), each with the rule that says so."""
    stage, microbatch, chunk = action.stage, action.microbatch, action.chunk

    def backward(stage: int, chunk: int) -> Action:
        full = Action(stage, Kind.B, microbatch, chunk)
        return full if full in places else Action(stage, Kind.I, microbatch, chunk)

    before: list[tuple[Action, str]] = []
    last_chunk = chunk == schedule.num_chunks - 1
    if action.kind is Kind.F:
        if chunk > 0:
            before.append((Action(stage, Kind.F, microbatch, chunk - 1), "forward chunks must ascend"))
        if stage > 0:
            rule = "a forward needs the previous stage's output"
            before.append((Action(stage - 1, Kind.F, microbatch, chunk), rule))
    elif action.kind in (Kind.B, Kind.I):
        rule = "a unit's forward must come before its backward"
        before.append((Action(stage, Kind.F, microbatch, chunk), rule))
        if not last_chunk:
            before.append((backward(stage, chunk + 1), "backward chunks must descend"))
        if stage < schedule.num_stages - 1:
            before.append((backward(stage + 1, chunk), "a backward needs the next stage's input gradient"))
    else:
        before.append((Action(stage, Kind.I, microbatch, chunk), "W must come after I"))
    return before


def _check_order_on_each_rank(schedule: Schedule, places: dict[Action, Place]) -> None:
    for rank, step, action in _steps(schedule.table):
        for before, rule in _predecessors(action, schedule, places):
            other_rank, other_step = places[before]
            if other_rank == rank and other_step > step:
                raise ScheduleError(
                    f"rank {rank}, step {step}: {_describe(action)} runs before {_describe(before)} "
                    f"at step {other_step}: {rule}, so move it after step {other_step}"
                )


def _check_waits_between_ranks(schedule: Schedule, places: dict[Action, Place]) -> None:
    """Run the ranks as far as they go; where all that are left wait for each other, name the cycle."""
    done = [0] * schedule.num_ranks  # steps that each rank has run

    def waits_for(rank: int) -> Action | None:
        action = schedule.table[rank][done[rank]]
        for before, _ in _predecessors(action, schedule, places):
            other_rank, other_step = places[before]
            if other_step >= done[other_rank]:
                return before
        return None

    unfinished = [rank for rank in range(schedule.num_ranks) if schedule.table[rank]]
    while unfinished:
        progress = False
        for rank in unfinished:
            while done[rank] < len(schedule.table[rank]) and waits_for(rank) is None:
                done[rank] += 1
                progress = True
        unfinished = [rank for rank in unfinished if done[rank] < len(schedule.table[rank])]
        if unfinished and not progress:
            wanted = {rank: waits_for(rank) for rank in unfinished}
            cycle = _cycle({rank: places[action][0] for rank, action in wanted.items()})
            waits = "; ".join(
                f"rank {rank}, step {done[rank]}: {schedule.table[rank][done[rank]]} waits for "
                f"{wanted[rank]} (rank {places[wanted[rank]][0]}, step {places[wanted[rank]][1]})"
                for rank in cycle
            )
            raise ScheduleError(
                f"wait cycle: {waits}; move one of the awaited actions before the step its rank waits at"
            )


def _check_peaks(schedule: Schedule) -> None:
    peaks = in_flight_peaks(schedule.table, schedule.num_stages)
    for stage, (peak, declared) in enumerate(zip(peaks, schedule.peak_in_flight, strict=True)):
        if peak != declared:
            rank = schedule.stage_to_rank[stage]
            than, fix = "less", f"declare {peak}"
            if peak > declared:
                than, fix = "more", f"declare {peak} or run backwards earlier"
            raise ScheduleError(
                f"rank {rank}: stage {stage} holds up to {peak} units in flight, {than} than "
                f"the declared {declared}; {fix}"
            )


# ---- lowered tables

_PARTNER = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
_SENDS = (Kind.SEND_F, Kind.SEND_B)


def _partner(action: Action) -> Action:
    """The receive of a send, the send of a receive."""
    kind, offset = _PARTNER[action.kind]
    return Action(action.stage + offset, kind, action.microbatch, action.chunk)


def _check_pairs(lowered: Sequence[Sequence[Action]], stage_to_rank: Sequence[int]) -> dict[Action, Place]:
    places: dict[Action, Place] = {}
    for rank, step, action in _steps(lowered):
        here = f"rank {rank}, step {step}: {action}"
        if not 0 <= action.stage < len(stage_to_rank):
            raise ScheduleError(
                f"{here} names stage {action.stage}; the last stage is {len(stage_to_rank) - 1}"
            )
        owner = stage_to_rank[action.stage]
        if owner != rank:
            raise ScheduleError(
                f"{here} runs on the wrong rank: stage {action.stage} is on rank {owner}, move it there"
            )
        if action in places:
            raise ScheduleError(f"{here} is a duplicate of step {places[action][1]}; remove one of them")
        places[action] = (rank, step)
    for action, (rank, step) in places.items():
        if action.is_compute:
            continue
        here, partner = f"rank {rank}, step {step}: {action}", _partner(action)
        if not 0 <= partner.stage < len(stage_to_rank):
            raise ScheduleError(f"{here} has no stage {partner.stage} to talk to; remove it")
        if stage_to_rank[partner.stage] == rank:
            raise ScheduleError(
                f"{here} talks to stage {partner.stage} on the same rank; remove it and its partner"
            )
        if partner not in places:
            raise ScheduleError(
                f"{here} has no partner; add {partner} on rank {stage_to_rank[partner.stage]}"
            )
    return places


def _check_around_computation(
    lowered: Sequence[Sequence[Action]], stage_to_rank: Sequence[int], places: dict[Action, Place]
) -> None:
    """Each computation stands between its own receive and its own send, where it needs one."""

    def require(action: Action, kind: Kind, earlier: bool, rank: int, step: int) -> None:
        other = Action(action.stage, kind, action.microbatch, action.chunk)
        here, word = f"rank {rank}, step {step}: {action}", "before" if earlier else "after"
        if other not in places:
            raise ScheduleError(f"{here} has no {other}; add it {word} step {step}")
        if (places[other][1] < step) != earlier:
            raise ScheduleError(f"{here} needs {other} {word} it; move {other} from step {places[other][1]}")

    def crosses_rank(stage: int, neighbour: int) -> bool:
        return 0 <= neighbour < len(stage_to_rank) and stage_to_rank[neighbour] != stage_to_rank[stage]

    for rank, step, action in _steps(lowered):
        stage = action.stage
        if action.kind is Kind.F:
            if crosses_rank(stage, stage - 1):
                require(action, Kind.RECV_F, True, rank, step)
            if crosses_rank(stage, stage + 1):
                require(action, Kind.SEND_F, False, rank, step)
        elif action.kind in (Kind.B, Kind.I):
            if crosses_rank(stage, stage + 1):
                require(action, Kind.RECV_B, True, rank, step)
            if crosses_rank(stage, stage - 1):
                require(action, Kind.SEND_B, False, rank, step)
        elif not action.is_compute:
            kinds = (Kind.F,) if action.kind in (Kind.SEND_F, Kind.RECV_F) else (Kind.B, Kind.I)
            computation = [Action(stage, kind, action.microbatch, action.chunk) for kind in kinds]
            if not any(candidate in places for candidate in computation):
                raise ScheduleError(
                    f"rank {rank}, step {step}: {action} belongs to no {computation[0]}; "
                    "remove it or add that"
                )


def _check_message_order(lowered: Sequence[Sequence[Action]], stage_to_rank: Sequence[int]) -> None:
    sends: dict[Place, list[Action]] = {}
    receives: dict[Place, list[tuple[int, Action]]] = {}
    for rank, step, action in _steps(lowered):
        if action.is_compute:
            continue
        peer = stage_to_rank[_partner(action).stage]
        if action.kind in _SENDS:
            sends.setdefault((rank, peer), []).append(action)
        else:
            receives.setdefault((peer, rank), []).append((step, action))
    for (sender, receiver), sent in sends.items():
        for send, (step, receive) in zip(sent, receives[sender, receiver], strict=True):
            if _partner(send) != receive:
                raise ScheduleError(
                    f"rank {receiver}, step {step}: {receive} meets {send}, which rank {sender} sends before "
                    f"{_partner(receive)}: post the receives in the order of the sends, "
                    f"{_partner(send)} first"
                )


def _check_rendezvous(lowered: Sequence[Sequence[Action]], stage_to_rank: Sequence[int]) -> None:
    """Execute the lists in the model of ``check_communication``.

    A computation can go on when the send of its message has been posted: the receive stands before it in its rank's
    list, and so do, on both sides, all earlier messages of the edge. Nothing that one rank does can spoil another's
    progress, so one run in any order decides.
    """
    step = [0] * len(lowered)
    posted: set[Action] = set()

    def awaited(rank: int) -> Action | None:
        """The send that the next action of ``rank`` waits for."""
        action = lowered[rank][step[rank]]
        kind = Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B
        receive = Action(action.stage, kind, action.microbatch, action.chunk)
        needs = action.is_compute and action.kind is not Kind.W and receive in receives
        return _partner(receive) if needs and _partner(receive) not in posted else None

    receives = {action for row in lowered for action in row if action.kind in (Kind.RECV_F, Kind.RECV_B)}
    unfinished = [rank for rank, row in enumerate(lowered) if row]
    while unfinished:
        before = list(step)
        for rank in unfinished:
            while step[rank] < len(lowered[rank]) and awaited(rank) is None:
                posted.add(lowered[rank][step[rank]])
                step[rank] += 1
        unfinished = [rank for rank in unfinished if step[rank] < len(lowered[rank])]
        if step == before:
            waits = []
            for rank in _cycle({rank: stage_to_rank[awaited(rank).stage] for rank in unfinished}):
                send = awaited(rank)
                waits.append(
                    f"rank {rank}, step {step[rank]}: {lowered[rank][step[rank]]} waits for {send} of rank "
                    f"{stage_to_rank[send.stage]}"
                )
            raise ScheduleError(f"deadlock: {'; '.join(waits)}; move the sends that are waited for up")


# ---- shared


def _steps(table: Sequence[Sequence[Action]]) -> Iterator[tuple[int, int, Action]]:
    for rank, actions in enumerate(table):
        for step, action in enumerate(actions):
            yield rank, step, action


def _describe(action: Action) -> str:
    return f"{action.kind} of (microbatch {action.microbatch}, chunk {action.chunk}) on stage {action.stage}"


def _cycle(waits_on: dict[int, int]) -> list[int]:
    """The ranks of one cycle, where each waiting rank waits on another waiting one."""
    path = [next(iter(waits_on))]
    while waits_on[path[-1]] not in path:
        path.append(waits_on[path[-1]])
    return path[path.index(waits_on[path[-1]]) :]
