"""Predicted memory against hand counts and against an oracle that lists life times as intervals."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.chunks import ChunkPlan
from stateflow.pipeline.accounting import PoolPeak, StageFootprint, held_bytes, in_flight_profile, predict
from stateflow.pipeline.lowering import lower
from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.schedule import Action, Kind

from .test_checker import random_schedules, table

FOOTPRINT = StageFootprint(
    activation_bytes_per_token=10, carry_bytes=7, window_bytes_per_token=2, window_grad_bytes_per_token=4
)


def test_hand_counted_1f1b():
    """P = M = N = 2 with chunks of 3 and 1 tokens; the tables are those of test_policies."""
    prediction = predict(build_schedule("1f1b", 2, 2, 2), ChunkPlan.explicit(4, [3, 1]), FOOTPRINT)
    first, last = prediction.stages
    # Stage 0 holds (0,0), (0,1), (1,0), and its two boundary states; in B(0,1) a state gradient appears too.
    assert (first.units, first.tokens) == (3, 7)
    assert first.activation_pool == PoolPeak(0, 0, 0)
    assert first.gradient_pool == first.shared_pool == PoolPeak(live=1, buffers=2, bytes=30 + 10)
    assert (first.carry_bytes, first.carry_grad_bytes, first.boundary_bytes) == (14, 7, 21)
    # Both microbatches are in flight at once, but only one is in its backward.
    assert (first.window_bytes, first.window_grad_bytes, first.window_total_bytes) == (16, 16, 32)
    # Stage 1 holds (0,0) and (1,0) before B(0,0), and what they were received into; (0,1) had a buffer of its own size.
    assert (last.units, last.tokens) == (2, 6)
    assert last.activation_pool == last.shared_pool == PoolPeak(live=2, buffers=3, bytes=30 + 10 + 30)
    assert last.gradient_pool == PoolPeak(0, 0, 0)
    assert (last.carry_bytes, last.carry_grad_bytes, last.boundary_bytes) == (7, 7, 14)
    assert (last.window_bytes, last.window_grad_bytes, last.window_total_bytes) == (16, 16, 32)
    assert prediction.ranks == prediction.stages


def test_a_middle_backward_holds_two_state_gradients():
    schedule = build_schedule("1f1b", 1, 1, 3)
    peaks = predict(
        schedule, ChunkPlan.build(6, 3), StageFootprint(carry_bytes=7, carry_grad_bytes=5)
    ).stages[0]
    # B(0,1) consumes one state gradient and makes another; B(0,2) makes the first beside both states.
    assert (peaks.carry_bytes, peaks.carry_grad_bytes, peaks.boundary_bytes) == (14, 10, 14 + 5)
    whole = predict(build_schedule("1f1b", 1, 2, 1), ChunkPlan.build(6, 1), FOOTPRINT).stages[0]
    # One chunk has no neighbour: K/V are written, but nothing reads a prefix.
    assert (whole.boundary_bytes, whole.window_bytes, whole.window_grad_bytes) == (0, 12, 0)


def test_boundary_peak_is_a_peak_of_the_sum():
    schedule = build_schedule("1f1b", 1, 1, 3)
    peaks = predict(schedule, ChunkPlan.build(6, 3), StageFootprint(carry_bytes=7)).stages[0]
    # The states peak at 14 before the first backward, the gradients at 14 in B(0,1) beside one state only.
    assert (peaks.carry_bytes, peaks.carry_grad_bytes) == (14, 14)
    assert peaks.boundary_bytes == 21


def test_split_backward_holds_buffers_and_operands_until_w():
    schedule = table(
        "0F0.0 0F0.1 0I0.1 0W0.1 0I0.0 0W0.0", "1F0.0 1F0.1 1I0.1 1I0.0 1W0.1 1W0.0", num_chunks=2
    )
    full = build_schedule("1f1b", 2, 1, 2)
    plan = ChunkPlan.build(2, 2)
    footprint = dataclasses.replace(FOOTPRINT, weight_bytes_per_token=20)
    split, whole = predict(schedule, plan, footprint), predict(full, plan, footprint)
    assert (
        [p.activation_pool.live for p in split.stages]
        == [p.activation_pool.live for p in whole.stages]
        == [0, 2]
    )
    assert in_flight_profile(schedule) == ((1, 2, 2, 1, 1, 0), (1, 2, 2, 2, 1, 0))
    # Stage 1 puts off both W, stage 0 runs each at once.
    assert [p.weight_work_bytes for p in split.stages] == [20, 40]
    assert [p.weight_work_bytes for p in whole.stages] == [0, 0]
    # Nothing that crosses a cut waits for W.
    assert [p.boundary_bytes for p in split.stages] == [p.boundary_bytes for p in whole.stages] == [14, 14]


# ---- oracle: each thing as (name, first step, last step, amount), alive at both ends


def intervals(row, stage, plan, footprint, num_microbatches):
    step = {action: k for k, action in enumerate(row)}
    num_chunks, seq_len = plan.num_chunks, plan.seq_len
    grad_bytes = footprint.carry_bytes if footprint.carry_grad_bytes is None else footprint.carry_grad_bytes
    for a in range(num_microbatches):
        forward, backward, retired = [], [], []
        for i, length in enumerate(plan.lengths):
            at = {kind: step.get(Action(stage, kind, a, i)) for kind in Kind}
            forward.append(at[Kind.F])
            retired.append(at[Kind.B] if at[Kind.B] is not None else at[Kind.W])
            backward.append(at[Kind.B] if at[Kind.B] is not None else at[Kind.I])
            if at[Kind.I] is not None:
                yield "weight_work", at[Kind.I], at[Kind.W], length * footprint.weight_bytes_per_token
            yield "saved", forward[i], backward[i], length * footprint.saved_bytes_per_token
            yield "units", forward[i], retired[i], 1
            yield "tokens", forward[i], retired[i], length
            num_bytes = length * footprint.activation_bytes_per_token
            if at[Kind.RECV_F] is not None:
                yield ("activation", length, num_bytes), at[Kind.RECV_F], retired[i], 1
            if at[Kind.RECV_B] is not None:
                yield ("gradient", length, num_bytes), at[Kind.RECV_B], retired[i], 1
        for i in range(num_chunks - 1):
            yield "carry", forward[i], backward[i + 1], footprint.carry_bytes
            yield "carry_grad", backward[i + 1], backward[i], grad_bytes
        yield "window", forward[0], backward[0], seq_len * footprint.window_bytes_per_token
        if num_chunks > 1:
            grads = seq_len * footprint.window_grad_bytes_per_token
            yield "window_grad", backward[-1], backward[0], grads


def peak_of(things, *names):
    """Largest sum over the steps of all things whose name, or pool and shape, is asked for."""
    alive = [thing for thing in things if thing[0] in names or thing[0][0] in names]
    edges = {start for _, start, _, _ in alive}
    return max(
        (sum(amount for _, start, stop, amount in alive if start <= now <= stop) for now in edges), default=0
    )


def pool_of(things, *pools):
    owned = {}
    for shape in {thing[0][1:] for thing in things if thing[0][0] in pools}:
        owned[shape] = peak_of(things, *((pool, *shape) for pool in pools))
    num_bytes = sum(shape[1] * count for shape, count in owned.items())
    return PoolPeak(peak_of(things, *pools), sum(owned.values()), num_bytes)


def bytes_of(things, now, *, after):
    """Of all things that are there while the action at step ``now`` runs, or ``after`` it."""
    total = 0
    for name, start, stop, amount in things:
        if name not in ("units", "tokens") and start <= now and (now < stop if after else now <= stop):
            total += amount * name[2] if isinstance(name, tuple) else amount
    return total


def check_against_oracle(peaks, things):
    assert peaks.units == peak_of(things, "units")
    assert peaks.tokens == peak_of(things, "tokens")
    assert peaks.activation_pool == pool_of(things, "activation")
    assert peaks.gradient_pool == pool_of(things, "gradient")
    assert peaks.shared_pool == pool_of(things, "activation", "gradient")
    assert peaks.carry_bytes == peak_of(things, "carry")
    assert peaks.carry_grad_bytes == peak_of(things, "carry_grad")
    assert peaks.boundary_bytes == peak_of(things, "carry", "carry_grad")
    assert peaks.window_bytes == peak_of(things, "window")
    assert peaks.window_grad_bytes == peak_of(things, "window_grad")
    assert peaks.window_total_bytes == peak_of(things, "window", "window_grad")
    assert peaks.weight_work_bytes == peak_of(things, "weight_work")


policy_schedules = st.builds(
    build_schedule,
    st.sampled_from(["1f1b", "gpipe", "interleaved", "zero_bubble", "mepipe"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 2),
)


@given(st.one_of(policy_schedules, random_schedules), st.integers(0, 2**32))
def test_prediction_equals_the_oracle(schedule, seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 3) for _ in range(schedule.num_chunks)]
    plan = ChunkPlan.explicit(sum(lengths), lengths)
    footprints = [StageFootprint(*(rng.randint(0, 9) for _ in range(10))) for _ in range(schedule.num_stages)]
    footprints[0] = dataclasses.replace(footprints[0], carry_grad_bytes=None)
    lowered = lower(schedule)
    prediction = predict(schedule, plan, footprints)
    assert prediction == predict(lowered, plan, footprints)
    assert tuple(peaks.units for peaks in prediction.stages) == schedule.peak_in_flight
    for rank, row in enumerate(lowered):
        all_things = []
        for stage in schedule.stages_of(rank):
            things = list(intervals(row, stage, plan, footprints[stage], schedule.num_microbatches))
            check_against_oracle(prediction.stages[stage], things)
            all_things += things
        check_against_oracle(prediction.ranks[rank], all_things)
        assert max(in_flight_profile(schedule)[rank]) == prediction.ranks[rank].units
        held = held_bytes(lowered, plan, footprints)[rank]
        for step, (action, (during, after)) in enumerate(zip(row, held, strict=True)):
            one, length, working = footprints[action.stage], lengths[action.chunk], 0
            if action.is_compute:
                each = one.forward_bytes_per_token if action.kind is Kind.F else one.backward_bytes_per_token
                working = one.working_bytes + length * each
            assert during == bytes_of(all_things, step, after=False) + working
            assert after == bytes_of(all_things, step, after=True)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_equal_chunks_weigh_the_peak_of_the_paper_evenly(num_ranks, num_microbatches, num_chunks, length):
    plan = ChunkPlan.build(num_chunks * length, num_chunks, multiple=length)
    prediction = predict(build_schedule("1f1b", num_ranks, num_microbatches, num_chunks), plan, FOOTPRINT)
    for rank, peaks in enumerate(prediction.ranks):
        eq_13 = min(num_microbatches * num_chunks, num_chunks + num_ranks - rank - 1)
        assert (peaks.units, peaks.tokens) == (eq_13, eq_13 * length)


def test_skewed_chunks_weigh_more_than_their_share():
    """The long early chunks of a microbatch are still there when those of the next one come."""
    schedule = build_schedule("1f1b", 1, 2, 4)
    assert (
        predict(schedule, ChunkPlan.explicit(10, [4, 3, 2, 1]), FOOTPRINT).stages[0].tokens == 4 + 3 + 4 + 3
    )
    assert predict(schedule, ChunkPlan.explicit(8, [2, 2, 2, 2]), FOOTPRINT).stages[0].tokens == 8


def test_buffers_are_as_deep_as_the_window_and_not_as_the_step():
    """Of 32 units a rank has buffers for those in flight: no receive is posted ahead."""
    prediction = predict(build_schedule("1f1b", 4, 8, 4), ChunkPlan.build(4096, 4), FOOTPRINT)
    assert [p.units for p in prediction.ranks] == [7, 6, 5, 4]
    assert [p.activation_pool.buffers for p in prediction.ranks] == [0, 6, 5, 4]
    assert all(p.gradient_pool.buffers <= 4 for p in prediction.ranks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[]], ChunkPlan((0, 4)), FOOTPRINT), "the table holds no action"),
        (
            (build_schedule("1f1b", 2, 1, 2), ChunkPlan((0, 4)), FOOTPRINT),
            "the plan has 1 chunks, the table 2; give a plan of 2",
        ),
        ((build_schedule("1f1b", 2, 1, 1), ChunkPlan((0, 4)), [FOOTPRINT]), "1 footprints for 2 stages"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        predict(*arguments)
