"""The simulator and the trace against the real runtime in gloo processes, with costs that the test sets by sleeping."""

from __future__ import annotations

import json
import time

import pytest
import torch

from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.schedule import Kind
from stateflow.pipeline.simulator import simulate
from stateflow.pipeline.trace import ActionTrace, read_trace
from tests import cases

from .test_runtime import build

pytestmark = pytest.mark.processes

LENGTHS = [3, 2, 1]
MILLISECONDS = {  # by stage, then chunk
    Kind.F: [[20, 35, 50], [30, 30, 30]],
    Kind.B: [[40, 60, 90], [50, 70, 55]],
}


def cost(action) -> float:
    return MILLISECONDS[action.kind][action.stage][action.chunk] / 1e3


def slowed(function, stage: int, kind: Kind, scale: float):
    """``function`` (microbatch, chunk, ...) that takes exactly ``scale`` times its time in MILLISECONDS."""

    def slow(microbatch, chunk, *args, **kwargs):
        stop = time.perf_counter() + scale * MILLISECONDS[kind][stage][chunk] / 1e3
        result = function(microbatch, chunk, *args, **kwargs)
        time.sleep(max(0.0, stop - time.perf_counter()))
        return result

    return slow


def traced_steps(rank, group, *, folder, policy, microbatches, steps, scale):
    schedule, (stage,), _, plan = build(
        rank, group, kinds=["gdn", "attention"], lengths=LENGTHS, microbatches=microbatches, policy=policy
    )
    stage.units.forward = slowed(stage.units.forward, rank, Kind.F, scale)
    stage.units.backward = slowed(stage.units.backward, rank, Kind.B, scale)
    trace = ActionTrace("cpu")
    stage.action_hook = trace
    tokens, labels = cases.make_batch(microbatches, plan.seq_len, 0)
    for step in range(steps):
        torch.distributed.barrier(group)
        trace.begin()
        schedule.step(*((tokens,) if stage.is_first else ()), target=labels if stage.is_last else None)
        trace.end(step)
    trace.write(folder, rank, schedule.schedule, plan.lengths)


@pytest.mark.parametrize("policy", ["1f1b", "gpipe"])
def test_predicted_step_time_is_within_a_tenth_of_the_measured_one(workers, tmp_path, policy):
    schedule = build_schedule(policy, 2, 2, len(LENGTHS))
    # Other programs make steps longer by what does not depend on our times, which double until that is too little.
    for scale in (1, 2, 4, 8, 16):
        folder = tmp_path / str(scale)
        workers.run(traced_steps, 2, folder=folder, policy=policy, microbatches=2, steps=4, scale=scale)
        trace = read_trace(folder)
        measured, predicted = min(step.step_time for step in trace.steps), scale * simulate(schedule, cost).step_time
        costs = trace.mean_costs()
        own, median = simulate(schedule, costs.__getitem__).step_time, trace.median_step().step_time
        if measured == pytest.approx(predicted, rel=0.05) and own == pytest.approx(median, rel=0.1):
            break
    assert trace.schedule == schedule and trace.lengths == tuple(LENGTHS) and len(trace.steps) == 4
    for step in trace.steps:
        for row, spans in zip(schedule.table, step.spans, strict=True):
            assert [span.action for span in spans] == list(row)  # the runtime's order is the table's
            assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))
    assert predicted == pytest.approx(measured, rel=0.1)
    assert all(costs[action] >= scale * cost(action) for row in schedule.table for action in row)
    assert own == pytest.approx(median, rel=0.1)


def test_ranks_are_put_together_by_the_wall_clock(tmp_path):
    schedule = build_schedule("1f1b", 2, 1, 1)
    for rank, (wall, peak) in enumerate([(100.0, 7), (99.5, 5)]):  # the second rank's clock begins earlier
        trace = ActionTrace("cpu")
        for step, length in enumerate((4.0, 2.0, 8.0)):
            times = [(0.5, 1.0), (3.0, 3.0 + length)] if rank == 0 else [(1.75, 2.0), (2.25, 3.0)]
            actions = [[str(a), *span] for a, span in zip(schedule.table[rank], times, strict=True)]
            trace.steps.append({"step": step, "wall": wall, "actions": actions})
        path = trace.write(tmp_path, rank, schedule, [4])
        path.write_text(json.dumps({**json.loads(path.read_text()), "peak_bytes": peak}))
    trace = read_trace(tmp_path)
    assert trace.peak_bytes == 7 and [step.step_time for step in trace.steps] == [6.5, 4.5, 10.5]
    assert trace.median_step() is trace.steps[0]
    spans = {str(span.action): (span.start, span.end) for row in trace.steps[0].spans for span in row}
    assert spans == {"0F0.0": (0.0, 0.5), "0B0.0": (2.5, 6.5), "1F0.0": (0.75, 1.0), "1B0.0": (1.25, 2.0)}
    costs = {str(action): seconds for action, seconds in trace.mean_costs().items()}
    assert costs == pytest.approx({"0F0.0": 0.5, "0B0.0": 14 / 3, "1F0.0": 0.25, "1B0.0": 0.75})


def test_events_of_a_gpu_count_milliseconds():
    class Event:
        def elapsed_time(self, other):
            return 1500.0

    trace = ActionTrace("cuda")
    trace._base = Event()
    assert trace._seconds(Event()) == 1.5


def test_traces_that_do_not_belong_together_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no rank_\*.json there; train with \[stateflow\] trace = true"):
        read_trace(tmp_path)
    schedule = build_schedule("1f1b", 2, 1, 2)
    ActionTrace("cpu").write(tmp_path, 0, schedule, [4, 4])
    with pytest.raises(ValueError, match="rank_1.json is missing; there are rank_0.json"):
        read_trace(tmp_path)
    ActionTrace("cpu").write(tmp_path, 1, schedule, [5, 3])
    with pytest.raises(ValueError, match="rank_1.json is of another run: its lengths differs"):
        read_trace(tmp_path)
    old = json.loads((tmp_path / "rank_0.json").read_text())
    (tmp_path / "rank_0.json").write_text(json.dumps({**old, "version": 0}))
    with pytest.raises(ValueError, match="version 0 of the files, this program reads 1"):
        read_trace(tmp_path)
