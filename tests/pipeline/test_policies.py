"""The policies: whole printed schedules for small cases, and the paper's formulas for all."""

from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow.pipeline.checker import ScheduleError, check_communication, check_schedule
from stateflow.pipeline.lowering import lower
from stateflow.pipeline.policies import POLICIES, build_schedule, register_policy
from stateflow.pipeline.schedule import Action, Kind, Schedule, in_flight_peaks, table_to_text

policies = st.sampled_from(["1f1b", "gpipe"])
few = st.integers(1, 4)

EXPECTED = {
    ("1f1b", 2, 2, 1, 1): """\
    rank 0: 0F0.0 0F1.0 0B0.0 0B1.0
    rank 1: 1F0.0 1B0.0 1F1.0 1B1.0
""",
    ("1f1b", 2, 2, 2, 1): """\
    rank 0: 0F0.0 0F0.1 0F1.0 0B0.1 0F1.1 0B0.0 0B1.1 0B1.0
    rank 1: 1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0
""",
    ("1f1b", 2, 1, 4, 1): """\
    rank 0: 0F0.0 0F0.1 0F0.2 0F0.3 0B0.3 0B0.2 0B0.1 0B0.0
    rank 1: 1F0.0 1F0.1 1F0.2 1F0.3 1B0.3 1B0.2 1B0.1 1B0.0
""",
    ("1f1b", 4, 4, 1, 1): """\
    rank 0: 0F0.0 0F1.0 0F2.0 0F3.0 0B0.0 0B1.0 0B2.0 0B3.0
    rank 1: 1F0.0 1F1.0 1F2.0 1B0.0 1F3.0 1B1.0 1B2.0 1B3.0
    rank 2: 2F0.0 2F1.0 2B0.0 2F2.0 2B1.0 2F3.0 2B2.0 2B3.0
    rank 3: 3F0.0 3B0.0 3F1.0 3B1.0 3F2.0 3B2.0 3F3.0 3B3.0
""",
    ("1f1b", 4, 2, 2, 1): """\
    rank 0: 0F0.0 0F0.1 0F1.0 0F1.1 0B0.1 0B0.0 0B1.1 0B1.0
    rank 1: 1F0.0 1F0.1 1F1.0 1F1.1 1B0.1 1B0.0 1B1.1 1B1.0
    rank 2: 2F0.0 2F0.1 2F1.0 2B0.1 2F1.1 2B0.0 2B1.1 2B1.0
    rank 3: 3F0.0 3F0.1 3B0.1 3F1.0 3B0.0 3F1.1 3B1.1 3B1.0
""",
    ("1f1b", 4, 2, 4, 1): """\
    rank 0: 0F0.0 0F0.1 0F0.2 0F0.3 0F1.0 0F1.1 0F1.2 0B0.3 0F1.3 0B0.2 0B0.1 0B0.0 0B1.3 0B1.2 0B1.1 0B1.0
    rank 1: 1F0.0 1F0.1 1F0.2 1F0.3 1F1.0 1F1.1 1B0.3 1F1.2 1B0.2 1F1.3 1B0.1 1B0.0 1B1.3 1B1.2 1B1.1 1B1.0
    rank 2: 2F0.0 2F0.1 2F0.2 2F0.3 2F1.0 2B0.3 2F1.1 2B0.2 2F1.2 2B0.1 2F1.3 2B0.0 2B1.3 2B1.2 2B1.1 2B1.0
    rank 3: 3F0.0 3F0.1 3F0.2 3F0.3 3B0.3 3F1.0 3B0.2 3F1.1 3B0.1 3F1.2 3B0.0 3F1.3 3B1.3 3B1.2 3B1.1 3B1.0
""",
    ("1f1b", 2, 2, 2, 2): """\
    rank 0: 0F0.0 0F0.1 0F1.0 0F1.1 2F0.0 2F0.1 2F1.0 2B0.1 2F1.1 2B0.0 0B0.1 0B0.0 2B1.1 2B1.0 0B1.1 0B1.0
    rank 1: 1F0.0 1F0.1 1F1.0 1F1.1 3F0.0 3F0.1 3B0.1 3F1.0 3B0.0 1B0.1 1B0.0 3F1.1 3B1.1 3B1.0 1B1.1 1B1.0
""",
    ("gpipe", 2, 2, 1, 1): """\
    rank 0: 0F0.0 0F1.0 0B1.0 0B0.0
    rank 1: 1F0.0 1F1.0 1B1.0 1B0.0
""",
    ("gpipe", 2, 1, 4, 1): """\
    rank 0: 0F0.0 0F0.1 0F0.2 0F0.3 0B0.3 0B0.2 0B0.1 0B0.0
    rank 1: 1F0.0 1F0.1 1F0.2 1F0.3 1B0.3 1B0.2 1B0.1 1B0.0
""",
    ("gpipe", 4, 2, 2, 1): """\
    rank 0: 0F0.0 0F0.1 0F1.0 0F1.1 0B1.1 0B1.0 0B0.1 0B0.0
    rank 1: 1F0.0 1F0.1 1F1.0 1F1.1 1B1.1 1B1.0 1B0.1 1B0.0
    rank 2: 2F0.0 2F0.1 2F1.0 2F1.1 2B1.1 2B1.0 2B0.1 2B0.0
    rank 3: 3F0.0 3F0.1 3F1.0 3F1.1 3B1.1 3B1.0 3B0.1 3B0.0
""",
    ("gpipe", 2, 1, 2, 2): """\
    rank 0: 0F0.0 0F0.1 2F0.0 2F0.1 2B0.1 2B0.0 0B0.1 0B0.0
    rank 1: 1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 3B0.0 1B0.1 1B0.0
""",
}


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: "-".join(map(str, case)))
def test_printed_schedule(case):
    policy, num_ranks, num_microbatches, num_chunks, stages_per_rank = case
    schedule = build_schedule(policy, num_ranks, num_microbatches, num_chunks, stages_per_rank)
    assert table_to_text(schedule.table) == dedent(EXPECTED[case])


@settings(max_examples=50)
@given(policies, few, few, few, st.integers(1, 3))
def test_every_policy_is_legal_and_free_of_deadlock(
    policy, num_ranks, num_microbatches, num_chunks, per_rank
):
    schedule = build_schedule(policy, num_ranks, num_microbatches, num_chunks, per_rank)
    check_schedule(schedule)
    check_communication(lower(schedule), schedule.stage_to_rank)
    assert schedule.num_stages == num_ranks * per_rank
    assert schedule.stage_to_rank == tuple(s % num_ranks for s in range(schedule.num_stages))
    num_actions = sum(map(len, schedule.table))
    assert num_actions == 2 * schedule.num_stages * num_microbatches * num_chunks
    assert in_flight_peaks(schedule.table, schedule.num_stages) == schedule.peak_in_flight


@settings(max_examples=50)
@given(few, few, few, st.integers(1, 3))
def test_peaks_are_those_of_the_paper(num_ranks, num_microbatches, num_chunks, per_rank):
    num_stages, num_units = num_ranks * per_rank, num_microbatches * num_chunks
    sizes = (num_ranks, num_microbatches, num_chunks, per_rank)
    eq_13 = tuple(min(num_units, num_chunks + num_stages - s - 1) for s in range(num_stages))
    assert build_schedule("1f1b", *sizes).peak_in_flight == eq_13
    assert build_schedule("gpipe", *sizes).peak_in_flight == (num_units,) * num_stages


@given(st.integers(1, 6), st.integers(1, 8))
def test_one_chunk_is_plain_1f1b(num_ranks, num_microbatches):
    """1F1B in other words: P - r + k forwards, if there are, stand before the k-th backward of rank r."""
    for rank, row in enumerate(build_schedule("1f1b", num_ranks, num_microbatches, 1).table):
        kinds = [action.kind for action in row]
        backwards = [step for step, kind in enumerate(kinds) if kind is Kind.B]
        forwards_before = [kinds[:step].count(Kind.F) for step in backwards]
        assert forwards_before == [
            min(num_microbatches, num_ranks - rank + k) for k in range(num_microbatches)
        ]
        for kind in (Kind.F, Kind.B):
            assert [a.microbatch for a in row if a.kind is kind] == list(range(num_microbatches))


def makespan(schedule: Schedule) -> float:
    """Time of a step where a rank's whole forward of a microbatch takes 1 and its backward 2."""
    per_rank = schedule.num_stages // schedule.num_ranks
    finish: dict[Action, float] = {}
    clock = [0.0] * schedule.num_ranks
    todo = [list(reversed(row)) for row in schedule.table]
    while any(todo):
        for rank, rest in enumerate(todo):
            while rest:
                action = rest[-1]
                source = action.stage + (-1 if action.kind is Kind.F else 1)
                ready = 0.0
                if 0 <= source < schedule.num_stages:
                    needed = Action(source, action.kind, action.microbatch, action.chunk)
                    if needed not in finish:
                        break
                    ready = finish[needed]
                length = (1 if action.kind is Kind.F else 2) / schedule.num_chunks / per_rank
                clock[rank] = finish[action] = max(clock[rank], ready) + length
                rest.pop()
    return max(clock)


@settings(max_examples=50)
@given(policies, few, few, few)
def test_time_of_a_step_is_that_of_the_paper(policy, num_ranks, num_microbatches, num_chunks):
    schedule = build_schedule(policy, num_ranks, num_microbatches, num_chunks)
    eq_15 = 3 * (num_microbatches + (num_ranks - 1) / num_chunks)
    assert makespan(schedule) == pytest.approx(eq_15)


def test_two_stages_a_rank_shorten_the_step():
    assert makespan(build_schedule("1f1b", 4, 8, 4, 1)) == pytest.approx(26.25)
    assert makespan(build_schedule("1f1b", 4, 8, 4, 2)) == pytest.approx(25.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_schedule("1F1b ", 2, 2, 2), "unknown policy '1F1b '; did you mean '1f1b'"),
        (lambda: build_schedule("GPipe", 2, 2, 2), "did you mean 'gpipe'[?] Known: 1f1b, gpipe"),
        (lambda: build_schedule("1f1b", 0, 2, 2), "num_ranks 0 must be at least 1"),
        (lambda: build_schedule("1f1b", 2, 0, 2), "num_microbatches 0 must be at least 1"),
        (lambda: build_schedule("1f1b", 2, 2, -1), "num_chunks -1 must be at least 1"),
        (lambda: build_schedule("1f1b", 2, 2, 2, 0), "stages_per_rank 0 must be at least 1"),
        (lambda: register_policy("gpipe"), "a policy named 'gpipe' exists already"),
        (lambda: register_policy("my policy"), "'my policy' must be a single word"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_registered_policy_is_checked(monkeypatch):
    monkeypatch.setattr("stateflow.pipeline.policies.POLICIES", dict(POLICIES))

    @register_policy("ascending")
    def ascending(num_ranks, num_stages, num_microbatches, num_chunks):
        text = build_schedule("1f1b", num_ranks, num_microbatches, num_chunks).to_text()
        return Schedule.from_text(text.replace("0B0.1 0B0.0", "0B0.0 0B0.1").replace("1f1b", "ascending"))

    with pytest.raises(ScheduleError, match="backward chunks must descend"):
        build_schedule("ascending", 2, 1, 2)
    assert build_schedule("ascending", 2, 1, 1).policy == "ascending"
    assert "ascending" not in POLICIES
