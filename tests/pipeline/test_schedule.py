"""Actions and schedules as data and as text."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.schedule import Action, Kind, Schedule, in_flight_peaks, table_to_text

counts = st.integers(0, 1000)
actions = st.builds(Action, counts, st.sampled_from(Kind), counts, counts)


@given(actions)
def test_action_text_round_trip(action):
    assert Action.parse(str(action)) == action


def test_action_text_is_readable():
    assert str(Action(2, Kind.F, 1, 3)) == "2F1.3"
    assert str(Action(0, Kind.SEND_F, 1, 3)) == "0SEND_F1.3"
    assert Action.parse("10RECV_B12.0") == Action(10, Kind.RECV_B, 12, 0)
    assert len({Action(0, Kind.I, 1, 2), Action.parse("0I1.2"), Action.parse("0W1.2")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Action(0, Kind.F, 0, 0).stage = 1
    assert Action.parse("0W1.2").is_compute and not Action.parse("0SEND_B1.2").is_compute


@pytest.mark.parametrize(
    "text", ["", "2F1", "F1.3", "2G1.3", "2F1.3 ", "2F-1.3", "2F1.3x", "2SENDF1.3", "2F٣.1"]
)
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is no action; write stage, kind, microbatch.chunk"):
        Action.parse(text)


tables = st.lists(st.lists(actions, max_size=5).map(tuple), max_size=4).map(tuple)
numbers = st.lists(counts, max_size=4).map(tuple)
# Any data, legal or not: the text form must not depend on legality.
schedules = st.builds(
    Schedule, st.sampled_from(["1f1b", "my-policy"]), counts, counts, counts, counts, numbers, tables, numbers
)


@given(schedules)
def test_schedule_text_round_trip(schedule):
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_text("# saved\n\n" + schedule.to_text()).digest() == schedule.digest()


@given(schedules, st.integers(1, 50), counts, st.data())
def test_units_enumerate_microbatch_major(schedule, num_chunks, microbatch, data):
    schedule = dataclasses.replace(schedule, num_chunks=num_chunks)
    chunk = data.draw(st.integers(0, num_chunks - 1))
    unit = schedule.unit(microbatch, chunk)
    assert unit == microbatch * num_chunks + chunk
    assert schedule.unit_of(unit) == (microbatch, chunk)


def test_text_of_a_whole_schedule():
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=1, num_chunks=2)
    assert schedule.to_text() == (
        "policy 1f1b\n"
        "sizes 2 ranks, 2 stages, 1 microbatches, 2 chunks\n"
        "stage_to_rank 0 1\n"
        "peak_in_flight 2 2\n"
        "rank 0: 0F0.0 0F0.1 0B0.1 0B0.0\n"
        "rank 1: 1F0.0 1F0.1 1B0.1 1B0.0\n"
    )
    assert table_to_text([[Action.parse("0F0.0"), Action.parse("0SEND_F0.0")], []]) == (
        "rank 0: 0F0.0 0SEND_F0.0\nrank 1:\n"
    )


def test_digest_is_stable_and_sees_every_field():
    schedule = build_schedule("1f1b", 2, 1, 2)
    # A change of this value means that ranks of different versions refuse each other; make it on purpose.
    assert schedule.digest() == "621aa4c53ce13fcfcc9aa677464ff8e4ed540aafdafece06312d86ba81e38c0c"
    changes = {
        "policy": "other",
        "num_ranks": 3,
        "num_stages": 3,
        "num_microbatches": 3,
        "num_chunks": 3,
        "stage_to_rank": (1, 0),
        "table": schedule.table[::-1],
        "peak_in_flight": (2, 1),
    }
    assert set(changes) == {field.name for field in dataclasses.fields(Schedule)}
    digests = {dataclasses.replace(schedule, **{name: value}).digest() for name, value in changes.items()}
    assert len(digests | {schedule.digest()}) == len(changes) + 1


def test_stages_of_any_placement():
    schedule = dataclasses.replace(build_schedule("1f1b", 2, 1, 1, 2), stage_to_rank=(0, 1, 1, 0))
    assert schedule.stages_of(0) == (0, 3)
    assert schedule.stages_of(1) == (1, 2)
    assert schedule.stages_of(2) == ()


def test_in_flight_counts_from_forward_to_backward_or_weight_gradient():
    row = [Action.parse(f"0{word}") for word in ("F0.0", "F0.1", "I0.1", "F1.0", "W0.1", "B0.0")]
    assert in_flight_peaks([row], 2) == (3, 0)


TEXT = build_schedule("1f1b", 2, 1, 2).to_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT.replace("0F0.1", "0X0.1"), "line 5 of the schedule: '0X0.1' is no action"),
        (TEXT.replace("rank 1", "rank 2"), "line 6 of the schedule: .* should start with 'rank 1:'"),
        (TEXT.replace("rank 1:", "rank 1"), "line 6 of the schedule: .* should start with 'rank 1:'"),
        (TEXT.replace("policy", "name"), "line 1 of the schedule: 'name' is repeated or unknown"),
        (TEXT + "policy 1f1b\n", "line 7 of the schedule: 'policy' is repeated or unknown"),
        (TEXT.replace("stage_to_rank 0 1\n", ""), "no line that starts with 'stage_to_rank'; add it"),
        (TEXT.replace("2 chunks", "two chunks"), "sizes '.*two chunks' cannot be read"),
        (TEXT.replace("flight 2 2", "flight 2 x"), "peak_in_flight '2 x' cannot be read"),
        ("", "no line that starts with 'policy'"),
    ],
)
def test_text_that_is_no_schedule_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_text(text)


@pytest.mark.parametrize("policy", ["1f1b", "zero_bubble", "v_shape"])
def test_a_table_says_everything_else_itself(policy):
    schedule = build_schedule(policy, 2, 3, 4, 2)
    expected = dataclasses.replace(schedule, policy="imported")
    assert Schedule.from_csv(schedule.to_csv()) == expected == Schedule.from_csv(schedule.to_csv(), num_chunks=7)
    # As torch writes actions, with idle time between them and a remark.
    rows = [[f"{a.stage}{a.kind}{schedule.unit(a.microbatch, a.chunk)}" for a in row] for row in schedule.table]
    text = "# ours\n\n" + "\n".join(", ,".join(row) + "," for row in rows)
    assert Schedule.from_csv(text, num_chunks=4) == expected


@pytest.mark.parametrize(
    ("text", "num_chunks", "message"),
    [
        ("0F0.0,0B0.0\n1F0.0,,1X0.0", None, "line 2, cell 3 of the schedule: '1X0.0' is no action"),
        ("0F0,0B0", None, "line 1, cell 1 of the schedule: '0F0' counts units, which need a number of chunks"),
        ("\n# nothing\n", 2, "the schedule holds no action; write one line a rank"),
        ("0F0.0,0B0.0\n2F0.0,2B0.0", None, "no rank of the schedule runs stage 1, but one runs stage 2"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(text, num_chunks, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_csv(text, num_chunks)
