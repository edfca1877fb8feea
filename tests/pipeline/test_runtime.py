"""ScheduleStateFlow on torch.distributed.pipelining, in real gloo processes, against the unchunked reference."""

from __future__ import annotations

import contextlib

import pytest
import torch

from stateflow.chunks import ChunkPlan
from stateflow.faults import FAULTS
from stateflow.loss import cross_entropy_sum
from stateflow.pipeline.accounting import predict
from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.runtime import ScheduleStateFlow, StateFlowStage
from stateflow.pipeline.split import split_model
from tests import cases
from tests.pipeline.test_checker import random_schedule
from tests.workers import WorkerError

pytestmark = pytest.mark.processes
DIM = 12


def build(rank, group, *, kinds, lengths, microbatches, batch=1, per_rank=1, policy="1f1b", recompute=False,
          dtype=torch.float64, hook=None, fsdp=False, weight_lag=None, table=None):
    ranks = torch.distributed.get_world_size(group)
    plan = ChunkPlan.explicit(sum(lengths), lengths)
    model = cases.make_model(kinds, dtype)
    if table is None:
        schedule = build_schedule(policy, ranks, microbatches, len(lengths), per_rank, weight_lag)
    else:
        schedule = random_schedule(table, ranks, len(kinds) - ranks, microbatches, len(lengths), split=0.5)
    num_stages = schedule.num_stages
    stages = []
    for index, part in enumerate(split_model(model, num_stages)):
        if schedule.stage_to_rank[index] != rank:
            continue
        if recompute:
            cases.checkpoint_blocks(part)
        stages.append(
            StateFlowStage(
                part, index, num_stages, torch.device("cpu"), plan, microbatch_size=batch, hidden_size=DIM,
                activation_dtype=dtype, group=group, track_usage=True,
            )
        )  # fmt: skip
    given = dict(policy=policy, weight_lag=weight_lag) if table is None else dict(schedule=schedule)
    runtime = ScheduleStateFlow(stages, microbatches, loss_fn=cross_entropy_sum, action_hook=hook, **given)
    return runtime, stages, model, plan


def gradients(stages):
    return {
        name.replace("_checkpoint_wrapped_module.", ""): p.grad
        for stage in stages
        for name, p in stage.submod.named_parameters()
    }


def compare_with_reference(rank, group, *, microbatches, batch=1, seed=0, documents=False, fault=None, steps=1, **case):
    """One training step in every rank; returns the largest relative gradient difference and the loss error."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        schedule, stages, model, plan = build(rank, group, microbatches=microbatches, batch=batch, **case)
        for step in range(steps):
            tokens, labels = cases.make_batch(microbatches * batch, plan.seq_len, seed + step, ignore=0.3)
            docs = cases.make_documents(microbatches * batch, plan.seq_len, seed) if documents else None
            count = (labels != -100).sum().item()
            losses = []
            for stage in stages:
                stage.submod.zero_grad()
            schedule.step(
                *((tokens,) if stages[0].is_first else ()), target=labels if stages[-1].is_last else None,
                losses=losses, attention_masks=docs, loss_scale=1.0 / count,
            )  # fmt: skip
    ref_loss, ref_grads = cases.reference_gradients(model, tokens, labels, docs)
    mine = gradients(stages)
    worst, name = cases.largest_difference(mine, {k: ref_grads[k] for k in mine})
    loss_error = abs(float(sum(losses)) / count - ref_loss) if losses else 0.0
    return worst, name, loss_error


CASES = [
    dict(num_ranks=2, kinds=["gdn", "attention"], lengths=[4, 1, 3], microbatches=2),
    dict(num_ranks=2, kinds=["gdn", "gdn"], lengths=[2, 5], microbatches=1, recompute=True),
    dict(num_ranks=2, kinds=["mamba3", "attention"], lengths=[4, 1, 3], microbatches=2, recompute=True),
    dict(num_ranks=4, kinds=["mamba3"] * 3 + ["attention"], lengths=[2, 5, 1], microbatches=2, documents=True),
    dict(num_ranks=2, kinds=["attention", "gdn"], lengths=[6], microbatches=3, policy="gpipe", batch=2),
    dict(num_ranks=2, kinds=["gdn", "attention"] * 2, lengths=[3, 3, 1], microbatches=3, per_rank=2, documents=True),
    dict(num_ranks=2, kinds=["gdn"] * 4, lengths=[1, 1, 2], microbatches=2, per_rank=2, policy="gpipe"),
    dict(num_ranks=4, kinds=["gdn", "attention"] * 2, lengths=[5, 4, 3, 2, 1], microbatches=2, recompute=True),
    dict(num_ranks=4, kinds=["gdn", "gdn", "gdn", "attention"], lengths=[4, 4], microbatches=1, documents=True),
    dict(num_ranks=4, kinds=["attention"] * 4, lengths=[2, 2, 2], microbatches=5, policy="gpipe"),
    dict(num_ranks=3, kinds=["gdn", "attention", "gdn"], lengths=[7, 2], microbatches=4, batch=2, steps=3),
    dict(num_ranks=1, kinds=["gdn", "attention"], lengths=[3, 4], microbatches=2, per_rank=2),
    dict(num_ranks=2, kinds=["gdn", "attention"] * 2, lengths=[2, 3], microbatches=3, per_rank=2, policy="interleaved"),
    dict(num_ranks=2, kinds=["gdn", "attention"], lengths=[3, 3, 1], microbatches=2, policy="zero_bubble", steps=2),
    dict(num_ranks=4, kinds=["gdn", "attention"] * 2, lengths=[2, 3], microbatches=3, policy="zero_bubble",
         weight_lag=2, recompute=True, documents=True),
    dict(num_ranks=2, kinds=["attention", "gdn"] * 2, lengths=[3, 2, 2], microbatches=2, per_rank=2, policy="v_shape",
         recompute=True, steps=2),
    dict(num_ranks=3, kinds=["gdn", "attention"] * 3, lengths=[2, 2], microbatches=4, per_rank=2, policy="v_shape"),
    dict(num_ranks=2, kinds=["gdn"] * 4, lengths=[2, 2], microbatches=2, per_rank=2, policy="mepipe", batch=2),
    dict(
        num_ranks=3, kinds=["gdn", "attention", "gdn", "gdn", "attention"], lengths=[2, 1, 3], microbatches=2, table=1
    ),
    dict(
        num_ranks=2, kinds=["attention", "gdn", "gdn", "gdn"], lengths=[3, 2], microbatches=3, table=2, recompute=True
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"P{c['num_ranks']}-{c.get('policy', '')}{len(c['lengths'])}")
def test_gradients_equal_the_unchunked_reference(workers, case):
    for worst, name, loss_error in workers.run(compare_with_reference, **case):
        assert worst <= 1e-10, (name, worst)
        assert loss_error <= 1e-12


@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "ascending-backward"])
def test_a_planted_fault_turns_the_comparison_red(workers, fault):
    results = workers.run(
        compare_with_reference, 2, kinds=["gdn", "mamba3", "attention"], lengths=[4, 1, 3], microbatches=2, fault=fault,
        policy="zero_bubble" if fault == "drop-weight-grad" else "1f1b",
    )  # fmt: skip
    assert max(worst for worst, *_ in results) > 1e-4


def test_an_ascending_backward_is_refused_before_anything_runs(workers):
    with pytest.raises(WorkerError, match="descend"):
        workers.run(
            compare_with_reference, 2, kinds=["gdn", "gdn"], lengths=[4, 3], microbatches=1, fault="ascending-backward"
        )


def other_plan(rank, group):
    try:
        build(rank, group, kinds=["gdn"] * 2, lengths=[4, 4] if rank == 0 else [5, 3], microbatches=2)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_different_plans_all_stop_with_one_message(workers):
    messages = workers.run(other_plan, 2)
    assert messages[0] == messages[1]
    assert "disagree" in messages[0] and "[4, 4]" in messages[0] and "[5, 3]" in messages[0]


def evaluate(rank, group, *, microbatches, **case):
    schedule, stages, model, plan = build(rank, group, microbatches=microbatches, **case)
    tokens, labels = cases.make_batch(microbatches, plan.seq_len, seed=2)
    losses = []
    args = (tokens,) if stages[0].is_first else ()
    with pytest.raises(ValueError, match="tokens a sequence"):  # which leaves no trace
        schedule.eval(tokens[:, 1:], target=labels[:, 1:])
    for _ in range(2):  # evaluation, training, evaluation
        schedule.eval(*args, target=labels if stages[-1].is_last else None, losses=losses)
        schedule.step(*args, target=labels if stages[-1].is_last else None)
    assert all(p.grad is not None for stage in stages for p in stage.submod.parameters())
    outputs = schedule.eval(*args)
    kept = dict(outputs or {})
    schedule.eval(*args, target=labels if stages[-1].is_last else None, losses=[])
    assert (outputs or {}) == kept, "a later pass changed an earlier result"
    with torch.no_grad():
        hidden, weight = cases.as_reference(model)(tokens)
    expected = cases.reference_cross_entropy((hidden, weight), labels).item()
    if not losses:
        return 0.0, 0.0
    got = torch.stack([outputs[u][0] for u in range(plan.num_chunks)])  # microbatch 0
    want = torch.stack(plan.split(hidden[:1]))
    return abs(float(sum(losses)) - expected), (got - want).abs().max().item()


@pytest.mark.parametrize(
    "case",
    [
        dict(kinds=["gdn", "attention"], lengths=[3, 3, 3], microbatches=2),
        # Long enough for the sends of both ranks to wait for each other, were receives posted as late as in training.
        dict(kinds=["gdn", "attention"] * 2, lengths=[1] * 8, microbatches=1, per_rank=2),
    ],
    ids=["chain", "loop"],
)
def test_evaluation_between_training_steps(workers, case):
    for loss_error, output_error in workers.run(evaluate, 2, **case):
        assert loss_error <= 1e-10 and output_error <= 1e-10


def count_memory(rank, group, *, microbatches, steps, **case):
    schedule, stages, _, plan = build(rank, group, microbatches=microbatches, dtype=torch.float32, **case)
    tokens, labels = cases.make_batch(microbatches, plan.seq_len, seed=2)
    history = []
    for _ in range(steps):
        schedule.step(
            *((tokens,) if stages[0].is_first else ()), target=labels if stages[-1].is_last else None
        )
        history.append((schedule.pool.num_allocated, schedule.pool.allocated_bytes, schedule.ledger.peak_pending))
    return [vars(stage.units.usage_peak) for stage in stages], history, schedule.pool.peak_live, schedule.pool.num_live


@pytest.mark.parametrize("per_rank", [1, 2])
def test_buffers_are_flat_over_steps_and_do_not_grow_with_the_microbatches(workers, per_rank):
    case = dict(kinds=["gdn", "attention"] * per_rank, lengths=[3, 3, 3], per_rank=per_rank)
    case["policy"] = "1f1b" if per_rank == 1 else "v_shape"  # with two stages that hand over to each other
    few = workers.run(count_memory, 2, microbatches=3, steps=20, **case)
    many = workers.run(count_memory, 2, microbatches=12, steps=2, **case)
    for (usage_few, history_few, live_few, _), (usage_many, history_many, live_many, left) in zip(
        few, many, strict=True
    ):
        assert usage_few == usage_many
        assert live_few == live_many and left == 0
        assert set(history_few) | set(history_many) == {history_few[0]}
        # torch's own schedules allocate one buffer a unit and keep every send's Work to the end of the step: 36 here.
        buffers, _, pending_sends = history_many[0]
        assert buffers <= 5 * per_rank and pending_sends <= 5 * per_rank


def measured_and_predicted(rank, group, *, microbatches, batch, **case):
    schedule, stages, _, plan = build(
        rank, group, microbatches=microbatches, batch=batch, dtype=torch.float32, **case
    )
    tokens, labels = cases.make_batch(microbatches * batch, plan.seq_len, seed=2)
    schedule.step(*((tokens,) if stages[0].is_first else ()), target=labels if stages[-1].is_last else None)
    footprints = {stage.stage_index: stage.units.footprint(batch, DIM) for stage in stages}
    pool = schedule.pool
    return {s.stage_index: s.units.usage_peak for s in stages}, footprints, schedule.lowered, (
        pool.peak_live, pool.num_allocated, pool.allocated_bytes
    )  # fmt: skip


@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize(
    "case",
    [
        dict(num_ranks=2, kinds=["gdn", "attention"], lengths=[4, 3, 2], microbatches=3, batch=2),
        dict(num_ranks=4, kinds=["attention", "gdn"] * 2, lengths=[2, 2], microbatches=4, batch=1),
        dict(num_ranks=2, kinds=["gdn", "attention"] * 2, lengths=[3, 3, 1], microbatches=2, batch=1, per_rank=2),
    ],
    ids=["P2", "P4", "P2V2"],
)
def test_live_memory_equals_the_prediction_from_the_table(workers, case, policy):
    plan = ChunkPlan.explicit(sum(case["lengths"]), case["lengths"])
    results = workers.run(measured_and_predicted, policy=policy, **case)
    footprints = {s: f for _, fs, *_ in results for s, f in fs.items()}
    prediction = predict(results[0][2], plan, [footprints[s] for s in sorted(footprints)])
    for rank, (usage, _, _, pool) in enumerate(results):
        expected_pool = prediction.ranks[rank].shared_pool
        assert pool == (expected_pool.live, expected_pool.buffers, expected_pool.bytes)
        for stage, measured in usage.items():
            expected = prediction.stages[stage]
            for name, value in vars(measured).items():
                assert value == getattr(expected, name), (rank, stage, name)


def record_actions(rank, group, policy):
    seen = []

    @contextlib.contextmanager
    def hook(action):
        seen.append(str(action))
        yield

    schedule, stages, _, plan = build(
        rank, group, kinds=["gdn", "gdn"], lengths=[3, 2], microbatches=2, hook=hook, policy=policy
    )
    tokens, labels = cases.make_batch(2, plan.seq_len, seed=2)
    schedule.step(*((tokens,) if stages[0].is_first else ()), target=labels if stages[-1].is_last else None)
    return seen, [str(a) for a in schedule.schedule.table[rank]]


@pytest.mark.parametrize("policy", ["1f1b", "zero_bubble"])
def test_the_hook_sees_every_action_in_the_order_of_the_table(workers, policy):
    for seen, table in workers.run(record_actions, 2, policy=policy):
        assert seen == table


def wrong_batches(rank, group):
    schedule, stages, _, plan = build(rank, group, kinds=["gdn", "gdn"], lengths=[3, 2], microbatches=2)
    messages = []
    for shape in ((3, 5), (2, 6)):
        tokens = torch.zeros(shape, dtype=torch.long)
        try:
            schedule.step(tokens, target=tokens)
        except ValueError as error:
            messages.append(str(error))
    try:
        schedule.step(torch.zeros(2, 5, dtype=torch.long), target=torch.zeros(2, 5, dtype=torch.long), image=None)
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_batches_that_do_not_fit_the_plan_are_refused(workers):
    for messages in workers.run(wrong_batches, 2):
        assert "3 sequences, the schedule takes 2 microbatches of 1" in messages[0]
        assert "6 tokens a sequence, the chunk plan cuts 5" in messages[1]
        assert "unknown inputs ['image']" in messages[2]
