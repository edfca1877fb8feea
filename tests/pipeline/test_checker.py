"""The checker against an oracle on random tables, each refusal on a broken one, and the lowering.

The oracle writes the relations of eq. 8 as the edges of a graph: a table is legal if and only if that graph
and the program order of the ranks together have no cycle.
"""

import dataclasses
import random
from graphlib import CycleError, TopologicalSorter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

from stateflow.pipeline.checker import ScheduleError, check_communication, check_schedule
from stateflow.pipeline.lowering import add_messages, lower, lower_forward_only
from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.schedule import Action, Kind, Schedule, in_flight_peaks

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W


# ---- oracle and random tables


def data_edges(schedule):
    """Pairs (earlier, later) of eq. 8, with I and W in the place of B where the backward is split."""
    present = {action for row in schedule.table for action in row}

    def first(s, a, i):  # the action that gives the input gradient
        return Action(s, B, a, i) if Action(s, B, a, i) in present else Action(s, I, a, i)

    def last(s, a, i):  # the action that ends the unit
        return Action(s, B, a, i) if Action(s, B, a, i) in present else Action(s, W, a, i)

    for s in range(schedule.num_stages):
        for a in range(schedule.num_microbatches):
            for i in range(schedule.num_chunks):
                yield Action(s, F, a, i), first(s, a, i)
                if first(s, a, i) != last(s, a, i):
                    yield first(s, a, i), last(s, a, i)
                if s > 0:
                    yield Action(s - 1, F, a, i), Action(s, F, a, i)
                    yield first(s, a, i), first(s - 1, a, i)
                if i > 0:
                    yield Action(s, F, a, i - 1), Action(s, F, a, i)
                    yield first(s, a, i), first(s, a, i - 1)


def program_edges(table):
    return [pair for row in table for pair in zip(row, row[1:], strict=False)]


def acyclic(edges):
    graph = TopologicalSorter()
    for earlier, later in edges:
        graph.add(later, earlier)
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


def random_schedule(seed, num_ranks, extra_stages, num_microbatches, num_chunks, split):
    """A legal schedule with random placement and split backwards, by random choices of a ready action."""
    rng = random.Random(seed)
    placement = [*range(num_ranks), *(rng.randrange(num_ranks) for _ in range(extra_stages))]
    rng.shuffle(placement)
    kinds_of_unit = {
        (s, a, i): (F, I, W) if rng.random() < split else (F, B)
        for s in range(len(placement))
        for a in range(num_microbatches)
        for i in range(num_chunks)
    }
    everything = tuple(Action(s, kind, a, i) for (s, a, i), kinds in kinds_of_unit.items() for kind in kinds)
    schedule = Schedule(
        policy="random",
        num_ranks=num_ranks,
        num_stages=len(placement),
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        stage_to_rank=tuple(placement),
        table=(everything,) + ((),) * (num_ranks - 1),
        peak_in_flight=(0,) * len(placement),
    )
    graph = TopologicalSorter({action: () for action in everything})
    for earlier, later in data_edges(schedule):
        graph.add(later, earlier)
    graph.prepare()
    rows, ready = [[] for _ in range(num_ranks)], []
    while graph.is_active():
        ready += graph.get_ready()
        action = ready.pop(rng.randrange(len(ready)))
        rows[placement[action.stage]].append(action)
        graph.done(action)
    return with_rows(schedule, rows)


def with_rows(schedule, rows):
    """The schedule with another table and the peak that belongs to it."""
    table = tuple(map(tuple, rows))
    return dataclasses.replace(
        schedule, table=table, peak_in_flight=in_flight_peaks(table, schedule.num_stages)
    )


random_schedules = st.builds(
    random_schedule,
    seed=st.integers(0, 2**32),
    num_ranks=st.integers(1, 4),
    extra_stages=st.integers(0, 4),
    num_microbatches=st.integers(1, 3),
    num_chunks=st.integers(1, 4),
    split=st.sampled_from([0.0, 0.5, 1.0]),
)


def shuffled(table, seed, num_moves):
    """The table with a few actions moved within their rank's list."""
    rng = random.Random(seed)
    rows = [list(row) for row in table]
    for _ in range(num_moves):
        row = rng.choice([row for row in rows if row])
        start = rng.randrange(len(row))
        row.insert(max(0, start + rng.choice([-3, -2, -1, 1, 2, 3])), row.pop(start))
    return rows


def is_refused(check, *args):
    try:
        check(*args)
    except ScheduleError:
        return True
    return False


# ---- properties


@given(random_schedules)
def test_legal_tables_pass(schedule):
    check_schedule(schedule)
    check_communication(lower(schedule), schedule.stage_to_rank)


@given(random_schedules, st.integers(0, 2**32), st.integers(1, 4))
def test_verdict_equals_the_oracle(schedule, seed, num_moves):
    moved = with_rows(schedule, shuffled(schedule.table, seed, num_moves))
    legal = acyclic([*data_edges(moved), *program_edges(moved.table)])
    assert is_refused(check_schedule, moved) != legal
    if legal:
        check_communication(lower(moved), moved.stage_to_rank)


@given(random_schedules, st.integers(0, 2**32))
def test_any_lost_doubled_or_foreign_action_is_refused(schedule, seed):
    rng = random.Random(seed)
    rank = rng.choice([rank for rank, row in enumerate(schedule.table) if row])
    step = rng.randrange(len(schedule.table[rank]))
    action = schedule.table[rank][step]
    for change in ("lose", "double", "foreign stage", "foreign chunk"):
        rows = [list(row) for row in schedule.table]
        if change == "lose":
            del rows[rank][step]
        elif change == "double":
            rows[rank].append(action)
        elif change == "foreign stage":
            rows[rank][step] = dataclasses.replace(action, stage=schedule.num_stages)
        else:
            rows[rank][step] = dataclasses.replace(action, chunk=schedule.num_chunks)
        assert is_refused(check_schedule, dataclasses.replace(schedule, table=tuple(map(tuple, rows)))), (
            change
        )


def communication_is_sound(lowered, stage_to_rank):
    """Oracle for ``check_communication`` on a table that holds the right actions in some order."""
    partner = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}
    place = {action: (rank, step) for rank, row in enumerate(lowered) for step, action in enumerate(row)}
    pair, edges, channels = {}, [], {}
    for send, (rank, _) in place.items():
        if send.kind in partner:
            kind, offset = partner[send.kind]
            receive = dataclasses.replace(send, kind=kind, stage=send.stage + offset)
            pair[send] = pair[receive] = (send, receive)
            channels.setdefault((rank, stage_to_rank[receive.stage]), []).append(
                (place[send], place[receive])
            )
    for pairs in channels.values():  # first in, first out
        if [receive for _, receive in sorted(pairs)] != sorted(receive for _, receive in pairs):
            return False
    for row in lowered:
        last_compute, last_pair = None, {}  # the latter by edge: messages of other edges do not wait
        for action in row:
            if action in pair:
                edge = tuple(place[end][0] for end in pair[action])
                edges += [(x, pair[action]) for x in (last_compute, last_pair.get(edge)) if x is not None]
                last_pair[edge] = pair[action]
            else:
                edges += [(last_compute, action)] if last_compute is not None else []
                last_compute = action
        for action in row:
            unit = {"stage": action.stage, "microbatch": action.microbatch, "chunk": action.chunk}
            if action.kind in (F, B, I):
                send, receive = (Kind.SEND_F, Kind.RECV_F) if action.kind is F else (Kind.SEND_B, Kind.RECV_B)
                send, receive = Action(kind=send, **unit), Action(kind=receive, **unit)
                if send in place and place[send] < place[action]:
                    return False
                if receive in place:
                    if place[receive] > place[action]:
                        return False
                    edges.append((pair[receive], action))
    return acyclic(edges)


@given(random_schedules, st.integers(0, 2**32), st.integers(1, 3))
def test_verdict_on_communication_equals_the_oracle(schedule, seed, num_moves):
    moved = shuffled(lower(schedule), seed, num_moves)
    sound = communication_is_sound(moved, schedule.stage_to_rank)
    assert is_refused(check_communication, moved, schedule.stage_to_rank) != sound


@given(random_schedules)
def test_lowering_equals_torch(schedule):
    torchs = {
        rank: [_Action(a.stage, _ComputationType(a.kind), schedule.unit(a.microbatch, a.chunk)) for a in row]
        for rank, row in enumerate(schedule.table)
    }
    expected = _add_send_recv(torchs, lambda stage: schedule.stage_to_rank[stage], schedule.num_stages)
    ours = [
        [f"{a.stage}{a.kind}{schedule.unit(a.microbatch, a.chunk)}" for a in row] for row in add_messages(schedule)
    ]
    assert ours == [[str(action) for action in expected[rank]] for rank in range(schedule.num_ranks)]


def test_lowering_a_table_that_waits_in_a_cycle_is_refused():
    with pytest.raises(ScheduleError, match=r"no rank can go on \(rank 0 at 0B0.0, rank 1 at 1F1.0\)"):
        lower(table("0F0.0 0B0.0 0F1.0 0B1.0", "1F0.0 1F1.0 1B0.0 1B1.0", num_microbatches=2))


# ---- each refusal and its message


def table(*rows, num_microbatches=1, num_chunks=1, placement=None):
    """A schedule from one line of text a rank."""
    placement = tuple(range(len(rows))) if placement is None else placement
    schedule = Schedule(
        "test", len(rows), len(placement), num_microbatches, num_chunks, placement, (), (0,) * len(placement)
    )
    return with_rows(schedule, [[Action.parse(word) for word in row.split()] for row in rows])


LEGAL = table(
    "0F0.0 0F0.1 0B0.1 0B0.0",
    "1F0.0 1F0.1 1B0.1 1B0.0",
    num_chunks=2,
)


@pytest.mark.parametrize(
    ("rank", "row", "message"),
    [
        (0, "0F0.0 0F0.1 0B0.1", "rank 0: 0B0.0 is missing; add 0B0.0 to its list"),
        (1, "1F0.0 1B0.1 1B0.0", "rank 1: 1F0.1 is missing; add"),
        (1, "1F0.0 1F0.1 1I0.1 1B0.0", "rank 1: 1W0.1 is missing; add"),
        (1, "1F0.0 1F0.1 1W0.1 1B0.0", "rank 1: 1I0.1 is missing; add"),
        (0, "0F0.0 0F0.1 0B0.1 0B0.0 0F0.1", "rank 0, step 4: 0F0.1 is a duplicate of step 1; remove one"),
        (
            1,
            "1F0.0 1F0.1 1B0.1 1I0.1 1W0.1 1B0.0",
            "rank 1, step 3: 1I0.1 repeats the backward 1B0.1 of step 2",
        ),
        (1, "1F0.0 1F0.1 1B0.1 1W0.1 1B0.0", "rank 1, step 3: 1W0.1 repeats the backward 1B0.1 of step 2"),
        (
            1,
            "1F0.0 1F0.1 1I0.1 1W0.1 1B0.1 1B0.0",
            "rank 1, step 4: 1B0.1 repeats the backward 1I0.1 of step 2",
        ),
        (
            0,
            "0F0.0 1F0.1 0B0.1 0B0.0",
            "rank 0, step 1: 1F0.1 runs on the wrong rank: stage 1 is on rank 1, move",
        ),
        (0, "0F0.0 2F0.1 0B0.1 0B0.0", "rank 0, step 1: 2F0.1 names stage 2; the last stage is 1"),
        (
            0,
            "0F1.0 0F0.1 0B0.1 0B0.0",
            "rank 0, step 0: 0F1.0 names microbatch 1; the last microbatch is 0",
        ),
        (0, "0F0.0 0F0.2 0B0.1 0B0.0", "rank 0, step 1: 0F0.2 names chunk 2; the last chunk is 1"),
        (
            0,
            "0F0.0 0SEND_F0.0 0F0.1 0B0.1 0B0.0",
            "rank 0, step 1: 0SEND_F0.0 communicates; a schedule holds F",
        ),
        (
            0,
            "0F0.0 0F0.1 0B0.0 0B0.1",
            r"rank 0, step 2: B of \(microbatch 0, chunk 0\) on stage 0 runs before B "
            r"of \(microbatch 0, chunk 1\) on stage 0 at step 3: "
            "backward chunks must descend, so move it after step 3",
        ),
        (
            1,
            "1F0.0 1F0.1 1I0.0 1I0.1 1W0.0 1W0.1",
            "I of .*chunk 0.* runs before I of .*chunk 1.* must descend",
        ),
        (0, "0F0.1 0F0.0 0B0.1 0B0.0", "rank 0, step 0: F .*chunk 1.* at step 1: forward chunks must ascend"),
        (
            0,
            "0F0.0 0B0.1 0F0.1 0B0.0",
            "step 1: B .*chunk 1.* at step 2: a unit's forward must come before its back",
        ),
        (1, "1F0.0 1F0.1 1W0.1 1I0.1 1B0.0", "rank 1, step 2: W .*at step 3: W must come after I"),
    ],
)
def test_broken_table_is_refused(rank, row, message):
    check_schedule(LEGAL)
    rows = list(LEGAL.table)
    rows[rank] = tuple(Action.parse(word) for word in row.split())
    with pytest.raises(ScheduleError, match=message):
        check_schedule(dataclasses.replace(LEGAL, table=tuple(rows)))


def test_w_may_come_in_any_order_after_its_i():
    check_schedule(
        table("0F0.0 0F0.1 0I0.1 0B0.0 0W0.1", "1F0.0 1F0.1 1I0.1 1I0.0 1W0.0 1W0.1", num_chunks=2),
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["1F0.0 0F0.0 1B0.0 0B0.0"],
            "F .* on stage 1 runs before F .* on stage 0 .*: a forward needs the previous",
        ),
        (
            ["0F0.0 1F0.0 0B0.0 1B0.0"],
            "B .* on stage 0 runs before B .* on stage 1 .*: a backward needs the next",
        ),
    ],
)
def test_order_of_two_stages_on_one_rank(rows, message):
    check_schedule(table("0F0.0 1F0.0 1B0.0 0B0.0", placement=(0, 0)))
    with pytest.raises(ScheduleError, match=message):
        check_schedule(table(*rows, placement=(0, 0)))


def test_wait_cycle_between_ranks_is_named():
    cyclic = table("0F0.0 0B0.0 0F1.0 0B1.0", "1F0.0 1F1.0 1B0.0 1B1.0", num_microbatches=2)
    message = (
        r"wait cycle: rank 0, step 1: 0B0.0 waits for 1B0.0 \(rank 1, step 2\); "
        r"rank 1, step 1: 1F1.0 waits for 0F1.0 \(rank 0, step 2\); move one of the awaited actions before"
    )
    with pytest.raises(ScheduleError, match=message):
        check_schedule(cyclic)


def test_wait_cycle_leaves_out_ranks_that_only_follow():
    cyclic = table(
        "0F0.0 0F1.0 0B0.0 0B1.0",
        "1F0.0 1B0.0 1F1.0 1B1.0",
        "2F0.0 2F1.0 2B0.0 2B1.0",
        num_microbatches=2,
    )
    with pytest.raises(ScheduleError, match="wait cycle: rank 1, step 1: .*; rank 2, step 1: ") as caught:
        check_schedule(cyclic)
    assert "rank 0" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_chunks": 0}, "num_chunks 0 must be at least 1"),
        ({"num_ranks": 3}, "table has 2 lists; give one a rank, 3 in all"),
        ({"stage_to_rank": (0,)}, "stage_to_rank has 1 entries; give one a stage, 2 in all"),
        ({"peak_in_flight": (2, 2, 2)}, "peak_in_flight has 3 entries; give one a stage, 2 in all"),
        ({"stage_to_rank": (0, 2)}, "stage 1 is placed on rank 2; ranks are 0 .. 1"),
        ({"stage_to_rank": (0, 0)}, "rank 1 has no stage; use fewer ranks or place a stage on it"),
        (
            {"peak_in_flight": (2, 1)},
            "rank 1: stage 1 holds up to 2 units in flight, more than the declared 1",
        ),
        ({"peak_in_flight": (3, 2)}, "rank 0: stage 0 holds up to 2 .* less than the declared 3; declare 2$"),
    ],
)
def test_wrong_sizes_and_peaks_are_refused(changes, message):
    with pytest.raises(ScheduleError, match=message):
        check_schedule(dataclasses.replace(LEGAL, **changes))


# Two microbatches on two ranks, as lowered.
LOWERED = (
    "0F0.0 0SEND_F0.0 0F1.0 0SEND_F1.0 0RECV_B0.0 0B0.0 0RECV_B1.0 0B1.0",
    "1RECV_F0.0 1F0.0 1RECV_F1.0 1B0.0 1SEND_B0.0 1F1.0 1B1.0 1SEND_B1.0",
)


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (
            0,
            "0F0.0 0SEND_F0.0 0F1.0 0SEND_F1.0",
            "0F0.0 0F1.0 0SEND_F1.0 0SEND_F0.0",
            "rank 1, step 0: 1RECV_F0.0 meets 0SEND_F1.0, which rank 0 sends before 0SEND_F0.0: "
            "post the receives in the order of the sends, 1RECV_F1.0 first",
        ),
        (0, "0SEND_F1.0 ", "", "rank 1, step 2: 1RECV_F1.0 has no partner; add 0SEND_F1.0 on rank 0"),
        (0, "0RECV_B1.0 ", "", "rank 1, step 7: 1SEND_B1.0 has no partner; add 0RECV_B1.0 on rank 0"),
        (0, "0SEND_F1.0", "0SEND_F1.0 0SEND_F1.0", "rank 0, step 4: 0SEND_F1.0 is a duplicate of step 3"),
        (
            0,
            "0F0.0 0SEND_F0.0",
            "0SEND_F0.0 0F0.0",
            "step 1: 0F0.0 needs 0SEND_F0.0 after it; move .* from step 0",
        ),
        (
            0,
            "0RECV_B1.0 0B1.0",
            "0B1.0 0RECV_B1.0",
            "step 6: 0B1.0 needs 0RECV_B1.0 before it; move .* from step 7",
        ),
        (1, "1RECV_F0.0 1F0.0", "1F0.0 1RECV_F0.0", "rank 1, step 0: 1F0.0 needs 1RECV_F0.0 before it"),
        (1, "1B0.0 1SEND_B0.0", "1SEND_B0.0 1B0.0", "rank 1, step 4: 1B0.0 needs 1SEND_B0.0 after it"),
        (
            0,
            "0F0.0 0SEND_F0.0 ",
            "0SEND_F0.0 ",
            "rank 0, step 0: 0SEND_F0.0 belongs to no 0F0.0; remove it or",
        ),
        (
            0,
            "0F0.0",
            "1F0.0",
            "rank 0, step 0: 1F0.0 runs on the wrong rank: stage 1 is on rank 1, move it there",
        ),
        (0, "0F0.0", "7F0.0", "rank 0, step 0: 7F0.0 names stage 7; the last stage is 1"),
        (0, "0B1.0", "0B1.0 0SEND_B1.0", "rank 0, step 8: 0SEND_B1.0 has no stage -1 to talk to; remove it"),
        (
            0,
            "0SEND_F0.0 0F1.0 0SEND_F1.0 0RECV_B0.0 0B0.0",
            "0F1.0 0RECV_B0.0 0B0.0 0SEND_F0.0 0SEND_F1.0",
            "deadlock: rank 0, step 3: 0B0.0 waits for 1SEND_B0.0 of rank 1; "
            "rank 1, step 1: 1F0.0 waits for 0SEND_F0.0 of rank 0; move",
        ),
    ],
)
def test_broken_communication_is_refused(rank, old, new, message):
    def parse(rows):
        return [[Action.parse(word) for word in row.split()] for row in rows]

    check_communication(parse(LOWERED), (0, 1))
    rows = list(LOWERED)
    assert old in rows[rank]
    rows[rank] = rows[rank].replace(old, new)
    with pytest.raises(ScheduleError, match=message):
        check_communication(parse(rows), (0, 1))


def test_messages_that_cross_pass_on_edges_of_their_own():
    """Both ranks send before they receive: on one stream each would wait for the other."""
    rows = LOWERED[0], LOWERED[1].replace("1RECV_F1.0 1B0.0 1SEND_B0.0", "1B0.0 1SEND_B0.0 1RECV_F1.0")
    check_communication([[Action.parse(word) for word in row.split()] for row in rows], (0, 1))


@given(random_schedules)
def test_receives_are_posted_when_they_are_needed(schedule):
    """Each directly before the action that needs it, unless an older message of its edge needs to go first."""
    early = add_messages(schedule)
    for rank, row in enumerate(lower(schedule)):
        assert set(row) == set(early[rank]) and len(row) == len(early[rank])
        for receive, following in zip(row, row[1:], strict=False):
            if receive.kind in (Kind.RECV_F, Kind.RECV_B):
                kinds = (F,) if receive.kind is Kind.RECV_F else (B, I)
                own = following.kind in kinds and following.chunk == receive.chunk and (
                    (following.stage, following.microbatch) == (receive.stage, receive.microbatch)
                )
                assert own or following.kind in (Kind.RECV_F, Kind.RECV_B)


def test_missing_send_and_receive_are_refused_together():
    rows = [
        [Action.parse(w) for w in row.split() if w not in ("0SEND_F1.0", "1RECV_F1.0")] for row in LOWERED
    ]
    with pytest.raises(ScheduleError, match="rank 0, step 2: 0F1.0 has no 0SEND_F1.0; add it after step 2"):
        check_communication(rows, (0, 1))


def test_stages_of_one_rank_exchange_no_messages():
    rows = [[Action.parse(w) for w in ("0F0.0", "0SEND_F0.0", "1RECV_F0.0", "1F0.0", "1B0.0", "0B0.0")]]
    with pytest.raises(ScheduleError, match="0SEND_F0.0 talks to stage 1 on the same rank; remove it"):
        check_communication(rows, (0, 0))


def test_forward_only_tables_pass():
    schedule = build_schedule("1f1b", 3, 2, 2, 2)
    forward = [[a for a in row if a.kind in (F, Kind.SEND_F, Kind.RECV_F)] for row in lower(schedule)]
    check_communication(forward, schedule.stage_to_rank)
    assert sum(a.kind is F for row in forward for a in row) == 6 * 2 * 2


def end_of_forward_pass(rows, most_pending=2):
    """Runs lists in which a rank waits for its sends beyond the latest ones; at what the ranks that wait stand."""
    step, pending, posted = [0] * len(rows), [[] for _ in rows], set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while step[rank] < len(row):
                while pending[rank] and pending[rank][0] in posted:
                    pending[rank].pop(0)
                a = row[step[rank]]
                unit = (a.microbatch, a.chunk)
                needs, comes = Action(a.stage, Kind.RECV_F, *unit), Action(a.stage - 1, Kind.SEND_F, *unit)
                if len(pending[rank]) > most_pending or (a.kind is F and needs in row and comes not in posted):
                    break
                posted.add(a)
                if a.kind is Kind.SEND_F:
                    pending[rank].append(Action(a.stage + 1, Kind.RECV_F, *unit))
                step[rank] += 1
                moved = True
    return [str(row[i]) for row, i in zip(rows, step, strict=True) if i < len(row)]


def test_forward_only_passes_come_to_their_end_though_ranks_wait_for_sends():
    looped = build_schedule("1f1b", 2, 1, 8, 2)
    late = [[a for a in row if a.kind in (F, Kind.SEND_F, Kind.RECV_F)] for row in lower(looped)]
    assert end_of_forward_pass(late), "late receives end in a circle here, so this test can fail"
    for schedule in (
        looped,
        build_schedule("interleaved", 2, 4, 4, 2),
        build_schedule("v_shape", 3, 4, 4, 2),
        *(random_schedule(seed, 3, 3 * (seed % 2), 3, 3, split=0.5) for seed in range(20)),
    ):
        assert not end_of_forward_pass(lower_forward_only(schedule)), schedule.to_text()
