"""The policies: whole printed schedules for small cases, and the paper's formulas for all."""

from dataclasses import replace
from fractions import Fraction
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow.pipeline.accounting import in_flight_profile
from stateflow.pipeline.checker import ScheduleError, check_communication, check_schedule
from stateflow.pipeline.list_scheduling import TIMES
from stateflow.pipeline.lowering import lower
from stateflow.pipeline.policies import POLICIES, build_schedule, register_policy
from stateflow.pipeline.schedule import Kind, Schedule, in_flight_peaks, table_to_text
from stateflow.pipeline.simulator import simulate

policies = st.sampled_from(["1f1b", "gpipe"])
few = st.integers(1, 4)


@st.composite
def cases(draw):
    """(policy, P, M, N, V, weight_lag, recomputed) of any policy."""
    policy = draw(st.sampled_from(sorted(POLICIES)))
    traits = POLICIES[policy]
    lag = draw(st.one_of(st.none(), st.integers(0, 3))) if traits.splits_backward else None
    per_rank = traits.stages_per_rank or draw(st.integers(1, 3))
    return policy, draw(few), draw(few), draw(few), per_rank, lag, draw(st.booleans())


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
    ("interleaved", 2, 2, 2, 2): """\
    rank 0: 0F0.0 0F0.1 2F0.0 2F0.1 0F1.0 2B0.1 0F1.1 2B0.0 2F1.0 0B0.1 2F1.1 0B0.0 2B1.1 2B1.0 0B1.1 0B1.0
    rank 1: 1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 1F1.0 3B0.0 1F1.1 1B0.1 3F1.0 1B0.0 3F1.1 3B1.1 3B1.0 1B1.1 1B1.0
""",
    ("zero_bubble", 2, 2, 2, 1): """\
    rank 0: 0F0.0 0F0.1 0F1.0 0I0.1 0W0.1 0F1.1 0I0.0 0W0.0 0I1.1 0W1.1 0I1.0 0W1.0
    rank 1: 1F0.0 1F0.1 1I0.1 1F1.0 1I0.0 1W0.1 1F1.1 1I1.1 1W0.0 1I1.0 1W1.1 1W1.0
""",
    ("v_shape", 2, 1, 2, 2): """\
    rank 0: 0F0.0 0F0.1 3F0.0 3F0.1 3I0.1 3I0.0 3W0.1 3W0.0 0I0.1 0I0.0 0W0.1 0W0.0
    rank 1: 1F0.0 2F0.0 1F0.1 2F0.1 2I0.1 2I0.0 1I0.1 1I0.0 2W0.1 2W0.0 1W0.1 1W0.0
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


@settings(max_examples=120)
@given(cases())
def test_every_policy_is_legal_and_free_of_deadlock(case):
    policy, num_ranks, num_microbatches, num_chunks, per_rank, *_ = case
    schedule = build_schedule(*case)
    check_schedule(schedule)
    check_communication(lower(schedule), schedule.stage_to_rank)
    assert (schedule.policy, schedule.num_stages) == (policy, num_ranks * per_rank)
    assert schedule.stage_to_rank == POLICIES[policy].placement(num_ranks, schedule.num_stages)
    split = POLICIES[policy].splits_backward
    assert {a.kind for row in schedule.table for a in row} == set("FIW" if split else "FB")
    num_actions = sum(map(len, schedule.table))
    assert num_actions == (3 if split else 2) * schedule.num_stages * num_microbatches * num_chunks
    assert in_flight_peaks(schedule.table, schedule.num_stages) == schedule.peak_in_flight


@settings(max_examples=60)
@given(cases())
def test_fsdp_gathers_and_reduces_each_stage_once_a_step(case):
    """Whatever the number of units: before the stage's first action, after its last gradient, at the end."""
    from stateflow.pipeline.runtime import _with_shard_actions

    schedule = build_schedule(*case)
    for rank, row in enumerate(lower(schedule)):
        actions = _with_shard_actions(row, schedule)
        for stage in schedule.stages_of(rank):
            steps = {}
            for step, action in enumerate(actions):
                if action.stage_index == stage:
                    steps.setdefault(action.computation_type.name, []).append(step)
            gradients = steps.get("FULL_BACKWARD", []) + steps.get("BACKWARD_WEIGHT", [])
            (gather,), (reduction,), (release,) = (steps[name] for name in ("UNSHARD", "REDUCE_GRAD", "RESHARD"))
            assert gather < steps["FORWARD"][0] and max(gradients) < reduction < release
        assert len(actions) == len(row) + 3 * len(schedule.stages_of(rank))


def peaks_of_ranks(schedule):
    return [max(profile) for profile in in_flight_profile(schedule)]


@settings(max_examples=120)
@given(cases())
def test_ranks_hold_what_docs_and_docstrings_say(case):
    policy, num_ranks, num_microbatches, num_chunks, per_rank, lag, _ = case
    schedule = build_schedule(*case)
    peaks, all_units = peaks_of_ranks(schedule), num_microbatches * num_chunks * per_rank
    group = num_chunks * min(num_microbatches, -(-num_ranks // num_chunks))
    warm = [(per_rank - 1) * group + num_chunks + num_ranks - 1 - r for r in range(num_ranks)]
    lags = [r if lag is None else min(r, lag) for r in range(num_ranks)]
    if policy == "interleaved":
        assert peaks == [min(all_units, w) for w in warm]
    elif policy == "zero_bubble":
        assert peaks == [min(all_units, w + n) for w, n in zip(warm, lags, strict=True)]
    elif policy == "mepipe":
        assert max(peaks) <= min(all_units, warm[0])
    elif policy == "v_shape":
        assert max(peaks) <= min(all_units, 2 * num_chunks + 2 * num_ranks - 1)
        whole = {Kind.F: Kind.F, Kind.I: Kind.B}  # in flight until I
        rows = [[replace(a, kind=whole[a.kind]) for a in row if a.kind in whole] for row in schedule.table]
        until_i = in_flight_peaks(rows, schedule.num_stages)
        assert all(n <= num_chunks + 2 * num_ranks - stage - 1 for stage, n in enumerate(until_i))


@settings(max_examples=60)
@given(cases(), st.integers(0, 3))
def test_no_more_units_than_the_lag_wait_for_their_weight_gradient(case, lag):
    policy, *sizes, _, _ = case
    if not POLICIES[policy].splits_backward:
        return
    for row in build_schedule(policy, *sizes, lag).table:
        waiting = 0
        for action in row:
            if action.kind is not Kind.W:
                assert waiting <= lag + (action.kind is Kind.F and policy == "zero_bubble")
            waiting += (action.kind is Kind.I) - (action.kind is Kind.W)


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


def makespan(schedule: Schedule) -> Fraction:
    """Time of a step where a rank's whole forward of a microbatch takes 1 and its backward 2."""
    share = schedule.num_chunks * schedule.num_stages // schedule.num_ranks
    return simulate(schedule, lambda action: Fraction(2 if action.kind is Kind.B else 1, share)).step_time


@settings(max_examples=50)
@given(policies, few, few, few)
def test_time_of_a_step_is_that_of_the_paper(policy, num_ranks, num_microbatches, num_chunks):
    schedule = build_schedule(policy, num_ranks, num_microbatches, num_chunks)
    eq_15 = 3 * (num_microbatches + (num_ranks - 1) / num_chunks)
    assert makespan(schedule) == pytest.approx(eq_15)


def test_two_stages_a_rank_shorten_the_step():
    assert makespan(build_schedule("1f1b", 4, 8, 4, 1)) == pytest.approx(26.25)
    assert makespan(build_schedule("1f1b", 4, 8, 4, 2)) == pytest.approx(25.5)


# P = 4, M = 8: (policy, N, V) -> time of a step (24 is busy time), peak of each rank in full sequences
WORTH = {
    ("interleaved", 1, 2): (28.5, [4.0, 3.5, 3.0, 2.5]),
    ("interleaved", 4, 2): (25.125, [1.375, 1.25, 1.125, 1.0]),
    ("zero_bubble", 1, 1): (27.0, [4.0] * 4),
    ("zero_bubble", 4, 1): (24.75, [1.75] * 4),
    ("zero_bubble", 4, 2): (24.375, [1.375] * 4),
    ("mepipe", 4, 2): (24.375, [1.375] * 4),
    ("v_shape", 1, 2): (25.5, [4.5] * 4),
    ("v_shape", 4, 2): (24.375, [1.875] * 4),
}


@pytest.mark.parametrize("case", WORTH, ids=lambda case: "-".join(map(str, case)))
def test_what_a_policy_is_worth(case):
    policy, num_chunks, per_rank = case
    schedule = build_schedule(policy, 4, 8, num_chunks, per_rank)
    step, peaks = WORTH[case]
    assert makespan(schedule) == step
    assert [peak / num_chunks / per_rank for peak in peaks_of_ranks(schedule)] == peaks


@pytest.mark.parametrize(
    ("case", "least", "most"),
    [(("v_shape", 8, 8, 8, 2), 0.06, 0.15), (("1f1b", 4, 8, 8, 3), 0.04, 0.06), (("mepipe", 3, 4, 1, 2), 0.14, 0.15)],
)
def test_an_order_is_made_for_the_times_that_it_runs_in(case, least, most):
    """Where I recomputes the forward it takes 2; a V made for 1 would leave three times as much idle."""
    bubbles = [
        simulate(build_schedule(*case, None, recomputed), lambda a: TIMES[True][a.kind]).bubble
        for recomputed in (True, False)
    ]
    assert bubbles[0] < least < most < bubbles[1], bubbles


@settings(max_examples=40)
@given(few, st.integers(1, 6), few, st.integers(1, 2), st.sampled_from(["interleaved", "zero_bubble"]))
def test_idle_time_is_the_residue_of_eq_15_divided(num_ranks, groups, num_chunks, per_rank, policy):
    """Full groups only: (P - 1) / N of eq. 15 divided by V, and by 3 where W fills what B would leave idle."""
    num_microbatches = groups * -(-num_ranks // num_chunks)
    schedule = build_schedule(policy, num_ranks, num_microbatches, num_chunks, per_rank)
    residue = Fraction(num_ranks - 1, num_chunks * per_rank)
    if policy == "interleaved":
        assert makespan(schedule) == 3 * num_microbatches + 3 * residue
    elif num_microbatches * num_chunks >= 2 * num_ranks:  # else there is not enough W to fill with
        assert makespan(schedule) == 3 * num_microbatches + residue


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_schedule("1F1b ", 2, 2, 2), "unknown policy '1F1b '; did you mean '1f1b'"),
        (lambda: build_schedule("GPipe", 2, 2, 2), "did you mean 'gpipe'[?] Known: 1f1b, gpipe, inter"),
        (lambda: build_schedule("v_shape", 2, 2, 2), "v_shape places 2 stages on each rank, not 1; cut"),
        (lambda: build_schedule("1f1b", 2, 2, 2, 1, 0), "1f1b has no separate W.* use one of zero_bubble, mepipe"),
        (lambda: build_schedule("mepipe", 2, 2, 2, 1, -1), "weight_lag -1 must be at least 0"),
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
    def ascending(sizes):
        text = build_schedule("1f1b", sizes.num_ranks, sizes.num_microbatches, sizes.num_chunks).to_text()
        return Schedule.from_text(text.replace("0B0.1 0B0.0", "0B0.0 0B0.1").replace("1f1b", "ascending"))

    with pytest.raises(ScheduleError, match="backward chunks must descend"):
        build_schedule("ascending", 2, 1, 2)
    assert build_schedule("ascending", 2, 1, 1).policy == "ascending"
    assert "ascending" not in POLICIES
