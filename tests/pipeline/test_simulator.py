"""The simulator against an independent implementation, the paper's formulas, and hand counts."""

import dataclasses
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow.chunks import ChunkPlan
from stateflow.pipeline.accounting import StageFootprint, predict
from stateflow.pipeline.policies import POLICIES, build_schedule
from stateflow.pipeline.schedule import Action, Kind, ScheduleError
from stateflow.pipeline.simulator import Link, lost_time, memory_over_time, simulate

from .test_checker import random_schedules

HALF = Fraction(1, 2)


def longest_path(schedule, cost, link, message_bytes):
    """End of every action: the longest path to it through program order, messages and their order on each link.

    Nothing is shared with the simulator: no events, no clock, only a recursion over what an action waits for.
    """
    owner, place = schedule.stage_to_rank, {}
    for rank, row in enumerate(schedule.table):
        for step, action in enumerate(row):
            place[action] = (rank, step)
    ends, sent = {}, {}

    def sender_of(action):
        step = {Kind.F: -1, Kind.B: 1, Kind.I: 1}.get(action.kind)
        if step is None or not 0 <= action.stage + step < schedule.num_stages:
            return None
        kinds = (Kind.F,) if action.kind is Kind.F else (Kind.B, Kind.I)
        twins = [dataclasses.replace(action, stage=action.stage + step, kind=kind) for kind in kinds]
        return next(twin for twin in twins if twin in place)

    def receiver_of(action):
        step = {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(action.kind)
        return None if step is None or not 0 <= action.stage + step < schedule.num_stages else action.stage + step

    def end(action):
        if action not in ends:
            rank, step = place[action]
            begin = end(schedule.table[rank][step - 1]) if step else 0
            sender = sender_of(action)
            if sender is not None:
                local = owner[sender.stage] == rank
                begin = max(begin, end(sender) if local else link_left(sender) + link.latency)
            ends[action] = begin + cost(action)
        return ends[action]

    def link_left(action):
        """When the message of ``action`` has left: behind its computation and the message before it on the link."""
        if action not in sent:
            rank, step = place[action]
            target = owner[receiver_of(action)]
            begin = end(action)
            for earlier in reversed(schedule.table[rank][:step]):
                stage = receiver_of(earlier)
                if stage is not None and owner[stage] == target:
                    begin = max(begin, link_left(earlier))
                    break
            sent[action] = begin + message_bytes(action) / link.bandwidth
        return sent[action]

    return {action: end(action) for action in place}


def random_numbers(seed, zeros=0.2):
    rng, known = random.Random(seed), {}

    def number(action):
        if action not in known:
            known[action] = Fraction(0 if rng.random() < zeros else rng.randint(1, 12), rng.randint(1, 5))
        return known[action]

    return number


@settings(max_examples=150)
@given(random_schedules, st.integers(0, 2**32), st.fractions(0, 3), st.fractions(HALF, 4))
def test_equals_the_longest_path(schedule, seed, latency, bandwidth):
    cost, num_bytes = random_numbers(seed), random_numbers(seed + 1)
    link = Link(latency, bandwidth)
    simulation = simulate(schedule, cost, link, num_bytes)
    expected = longest_path(schedule, cost, link, num_bytes)
    for row, spans in zip(schedule.table, simulation.spans, strict=True):
        assert [span.action for span in spans] == list(row)
        for span in spans:
            assert span.end - span.start == cost(span.action)
            assert span.end == expected[span.action], str(span.action)
    assert simulation.step_time == max(expected.values())


@settings(max_examples=100)
@given(random_schedules, st.integers(0, 2**32), st.fractions(0, 3))
def test_lost_time_adds_up(schedule, seed, latency):
    cost = random_numbers(seed)
    simulation = simulate(schedule, cost, Link(latency))
    lost = lost_time(simulation, cost, overhead=lambda action: cost(action) / 4)
    busy = sum(simulation.busy(rank) for rank in range(schedule.num_ranks))
    assert lost.chunk_overhead == busy / 4
    assert lost.total == schedule.num_ranks * simulation.step_time - busy * Fraction(3, 4)
    assert lost.communication >= 0 and lost.warm_up_and_drain >= 0
    assert sum(lost.shares().values()) == pytest.approx(float(lost.total / lost.rank_time) if lost.rank_time else 0)


few = st.integers(1, 6)


@settings(max_examples=60)
@given(few, few, few)
def test_eq_15_and_eq_13_exactly(num_ranks, num_microbatches, num_chunks):
    """Uniform cost, t = F + B of a whole sequence: (M + (P-1)/N) t, and min(MN, N + P - r - 1) units of T/N tokens."""
    t = Fraction(7)
    share = {Kind.F: t / 3 / num_chunks, Kind.B: 2 * t / 3 / num_chunks}
    schedule = build_schedule("1f1b", num_ranks, num_microbatches, num_chunks)
    simulation = simulate(schedule, lambda action: share[action.kind])
    assert simulation.step_time == (num_microbatches + Fraction(num_ranks - 1, num_chunks)) * t
    plan = ChunkPlan.build(4 * num_chunks, num_chunks, multiple=1)
    memory = memory_over_time(simulation, plan, StageFootprint(saved_bytes_per_token=1))
    for rank, points in enumerate(memory):
        units = min(num_microbatches * num_chunks, num_chunks + num_ranks - rank - 1)
        assert max(point.num_bytes for point in points) == 4 * units
        assert points[-1].num_bytes == 0
    lost = lost_time(simulation, lambda action: share[action.kind])
    assert lost.warm_up_and_drain == num_ranks * (num_ranks - 1) * t / num_chunks
    assert lost.imbalance == lost.communication == lost.chunk_overhead == 0


def test_the_known_worth_of_orders():
    """P = 4, M = 8, F = 1 and B = 2 a sequence."""
    known = ((1, "1f1b", 33), (4, "1f1b", 26.25), (16, "1f1b", 24.5625), (4, "gpipe", 26.25))
    for num_chunks, policy, expected in known:
        cost = {Kind.F: 1 / num_chunks, Kind.B: 2 / num_chunks}
        simulation = simulate(build_schedule(policy, 4, 8, num_chunks), lambda a, cost=cost: cost[a.kind])
        assert simulation.step_time == expected
        assert simulation.bubble == pytest.approx(1 - 24 / expected)


@settings(max_examples=60)
@given(random_schedules, st.integers(0, 2**32))
def test_memory_over_time_peaks_where_the_accounting_says(schedule, seed):
    rng = random.Random(seed)
    plan = ChunkPlan.explicit(20, [20 - schedule.num_chunks + 1] + [1] * (schedule.num_chunks - 1))
    footprints = [
        StageFootprint(window_bytes_per_token=rng.randint(0, 9), window_grad_bytes_per_token=rng.randint(0, 9))
        for _ in range(schedule.num_stages)
    ]
    memory = memory_over_time(simulate(schedule, random_numbers(seed)), plan, footprints)
    peaks = predict(schedule, plan, footprints).ranks
    for points, peak in zip(memory, peaks, strict=True):
        assert max(point.num_bytes for point in points) == peak.window_total_bytes
        assert all(a.time <= b.time for a, b in zip(points, points[1:], strict=False))
        assert points[-1].num_bytes == 0


def test_working_memory_counts_while_an_action_runs():
    schedule = build_schedule("1f1b", 1, 1, 2)
    footprint = StageFootprint(
        saved_bytes_per_token=1, forward_bytes_per_token=10, backward_bytes_per_token=100, working_bytes=1000
    )
    simulation = simulate(schedule, lambda action: 1)
    (points,) = memory_over_time(simulation, ChunkPlan.explicit(5, [3, 2]), footprint)
    assert [(p.time, p.num_bytes) for p in points] == [
        (0, 0), (0, 1033), (1, 3), (1, 1025), (2, 5), (2, 1205), (3, 3), (3, 1303), (4, 0),
    ]  # fmt: skip


def test_a_buffer_is_there_from_the_end_of_the_action_before_its_receive():
    schedule = build_schedule("1f1b", 2, 1, 1)  # F0, F1, B1, B0, one second each
    simulation = simulate(schedule, lambda action: 1)
    first, last = memory_over_time(simulation, ChunkPlan((0, 3)), StageFootprint(activation_bytes_per_token=10))
    points = [[(p.time, p.num_bytes) for p in row] for row in (first, last)]
    assert points[0] == [(0, 0), (0, 0), (1, 0), (1, 0), (1, 30), (3, 30), (4, 0)]
    assert points[1] == [(0, 0), (0, 30), (1, 30), (2, 30), (2, 30), (3, 0), (3, 0)]


def test_latency_and_bandwidth_by_hand():
    schedule = build_schedule("1f1b", 2, 1, 2)  # rank 0: F0 F1 B1 B0, rank 1 the same
    simulation = simulate(schedule, lambda action: 1, Link(latency=3, bandwidth=0.5), lambda action: 1)
    spans = {str(span.action): (span.start, span.end) for row in simulation.spans for span in row}
    # The first message leaves at 1, occupies the link until 3, arrives at 6; the second waits for it: 3 to 5, then 8.
    assert spans["1F0.0"] == (6, 7) and spans["1F0.1"] == (8, 9)
    assert spans["1B0.1"] == (9, 10) and spans["0B0.1"] == (15, 16)
    assert spans["0B0.0"] == (17, 18) == (simulation.step_time - 1, simulation.step_time)


def test_refusals():
    with pytest.raises(ValueError, match="latency -1 s must be finite and at least 0"):
        Link(-1)
    with pytest.raises(ValueError, match="bandwidth 0 bytes/s must be above 0"):
        Link(0, 0)
    schedule = build_schedule("1f1b", 2, 1, 1)
    with pytest.raises(ValueError, match="cost of 0F0.0 is -1; it must be finite"):
        simulate(schedule, lambda action: -1)
    crossed = dataclasses.replace(schedule, table=(schedule.table[0][::-1], schedule.table[1]))
    with pytest.raises(ScheduleError, match=r"no rank can go on \(rank 0 at 0B0.0, rank 1 at 1F0.0\)"):
        simulate(crossed, lambda action: 1)


def test_every_policy_can_be_simulated():
    for policy, traits in POLICIES.items():
        schedule = build_schedule(policy, 2, 2, 3, traits.stages_per_rank or 1)
        simulation = simulate(schedule, lambda action: 2 if action.kind is Kind.B else 1)
        assert simulation.step_time >= 2 * 3 * 3, policy
        assert isinstance(simulation.spans[0][0].action, Action)
