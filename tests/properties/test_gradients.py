"""Chunked pipelines against the unchunked reference: every gradient, float64, hundreds of cases in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow.chunks import ChunkPlan
from stateflow.faults import FAULTS
from stateflow.pipeline.local import run_local
from stateflow.pipeline.policies import POLICIES
from stateflow.recompute import Recomputed
from tests import cases
from tests.pipeline.test_checker import random_schedule

TOLERANCE = 1e-10

layer_kinds = st.lists(st.sampled_from(["gdn", "mamba3", "attention"]), min_size=1, max_size=4)
recomputations = st.sampled_from([None, cases.checkpoint_wrapper, Recomputed])
chunk_lengths = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def run_pipeline(model, plan, tokens, labels, *, policy="1f1b", ranks=1, per_rank=1, microbatches=1, docs=None,
                 recompute=None, initial=None, weight_lag=None, schedule=None):
    """Gradients and mean loss of the chunked pipeline, all ranks in this process."""
    schedule = schedule or cases.schedule_of(policy, ranks, microbatches, plan, per_rank, weight_lag)
    stages = cases.make_stages(model, schedule.num_stages, plan)
    if recompute is not None:
        for stage in stages:
            cases.checkpoint_blocks(stage.module, recompute)
    for stage, states in zip(stages, initial or [{}] * len(stages), strict=True):
        for microbatch, carries in states.items():
            stage.start(microbatch, carries)
    scale = 1.0 / (labels != -100).sum().item()
    losses = run_local(schedule, stages, plan, tokens, labels, docs=docs, loss_scale=scale)
    grads = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in cases.gradients_of(stages).items()}
    return sum(float(x) for x in losses) * scale, grads, stages


@pytest.mark.slow
@settings(max_examples=300)
@given(
    kinds=layer_kinds, lengths=chunk_lengths, microbatches=st.integers(1, 3), ranks=st.integers(1, 3),
    policy=st.sampled_from(sorted(POLICIES)), ignore=st.sampled_from([0.0, 0.5, 0.95]), recompute=recomputations,
    documents=st.booleans(), seed=st.integers(0, 10_000), per_rank=st.integers(1, 2), batch=st.integers(1, 2),
    weight_lag=st.sampled_from([None, 0, 1, 3]),
)  # fmt: skip
def test_every_gradient_equals_the_unchunked_reference(
    kinds, lengths, microbatches, ranks, policy, ignore, recompute, documents, seed, per_rank, batch, weight_lag
):
    traits = POLICIES[policy]
    weight_lag = weight_lag if traits.splits_backward else None
    if traits.stages_per_rank:
        kinds, per_rank = (kinds * 2)[: max(2, len(kinds))], traits.stages_per_rank
        ranks = min(ranks, len(kinds) // per_rank)
    ranks = min(ranks, len(kinds))
    per_rank = per_rank if ranks * per_rank <= len(kinds) else 1
    plan = ChunkPlan.explicit(sum(lengths), lengths)
    model = cases.make_model(kinds)
    tokens, labels = cases.make_batch(microbatches * batch, plan.seq_len, seed, ignore)
    docs = cases.make_documents(microbatches * batch, plan.seq_len, seed) if documents else None

    loss, grads, _ = run_pipeline(
        model, plan, tokens, labels, policy=policy, ranks=ranks, per_rank=per_rank, microbatches=microbatches,
        docs=docs, recompute=recompute, weight_lag=weight_lag,
    )  # fmt: skip

    ref_loss, ref_grads = cases.reference_gradients(model, tokens, labels, docs)
    assert loss == pytest.approx(ref_loss, rel=TOLERANCE)
    worst, name = cases.largest_difference(grads, ref_grads)
    assert worst <= TOLERANCE, (name, worst)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(["gdn", "mamba3", "attention"]), min_size=5, max_size=5), lengths=chunk_lengths,
    seed=st.integers(0, 10_000), ranks=st.integers(1, 3),
    extra_stages=st.integers(0, 2), microbatches=st.integers(1, 3),
    split=st.sampled_from([0.0, 0.5, 1.0]), recompute=recomputations,
)  # fmt: skip
def test_any_legal_table_gives_the_gradients_of_the_reference(
    kinds, seed, lengths, ranks, extra_stages, microbatches, split, recompute
):
    """Random topological orders, random placement of the stages, B and I with W mixed: legality is all it takes."""
    schedule = random_schedule(seed, ranks, extra_stages, microbatches, len(lengths), split)
    plan = ChunkPlan.explicit(sum(lengths), lengths)
    model = cases.make_model(kinds)
    tokens, labels = cases.make_batch(microbatches, plan.seq_len, seed, ignore=0.3)

    loss, grads, _ = run_pipeline(model, plan, tokens, labels, schedule=schedule, recompute=recompute)

    ref_loss, ref_grads = cases.reference_gradients(model, tokens, labels)
    assert loss == pytest.approx(ref_loss, rel=TOLERANCE)
    worst, name = cases.largest_difference(grads, ref_grads)
    assert worst <= TOLERANCE, (name, worst)


@settings(max_examples=25)
@given(kinds=layer_kinds, lengths=chunk_lengths, seed=st.integers(0, 10_000))
def test_initial_state_gradients(kinds, lengths, seed):
    plan = ChunkPlan.explicit(sum(lengths), lengths)
    model = cases.make_model(kinds)
    tokens, labels = cases.make_batch(1, plan.seq_len, seed)
    count = (labels != -100).sum().item()
    (stage,) = cases.make_stages(model, 1, plan)
    generator = torch.Generator().manual_seed(seed)
    zeros = model.initial_state(1, torch.device("cpu"), torch.float64)
    state = tuple(tuple(torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in layer) for layer in zeros)
    carries = stage.spec.carries_of(state, 1)

    _, grads, (stage,) = run_pipeline(model, plan, tokens, labels, initial=[{0: carries}])

    reference = cases.as_reference(model)
    leaves = tuple(tuple(t.clone().requires_grad_() for t in layer) for layer in state)
    output, _ = reference(tokens, state=leaves)
    (cases.reference_cross_entropy(output, labels) / count).backward()
    expected = dict(zip(stage.spec.carries, stage.spec.carry_list(stage.spec.carries_of(leaves, 1)), strict=True))
    worst, name = cases.largest_difference(
        {str(k): g for k, g in stage.initial_state_grads[0].items()}, {str(k): t.grad for k, t in expected.items()}
    )
    assert worst <= TOLERANCE, (name, worst)
    ref_grads = {name: p.grad for name, p in reference.named_parameters()}
    worst, name = cases.largest_difference(grads, ref_grads)
    assert worst <= TOLERANCE, (name, worst)


@pytest.mark.parametrize("kind", ["gdn", "mamba3"])
def test_a_chunk_without_any_valid_label(kind):
    plan = ChunkPlan.explicit(12, [5, 4, 3])
    model = cases.make_model([kind, "attention"])
    tokens, labels = cases.make_batch(2, 12, seed=3)
    labels[:, 5:9] = -100
    loss, grads, _ = run_pipeline(model, plan, tokens, labels, ranks=2, microbatches=2)
    ref_loss, ref_grads = cases.reference_gradients(model, tokens, labels)
    assert loss == pytest.approx(ref_loss, rel=TOLERANCE)
    assert cases.largest_difference(grads, ref_grads)[0] <= TOLERANCE


def policy_that_shows(fault):
    return "zero_bubble" if fault == "drop-weight-grad" else "1f1b"


@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "ascending-backward"])
def test_each_planted_fault_is_noticed(fault):
    """The comparison above would be worth nothing if a broken pipeline passed it."""
    plan = ChunkPlan.explicit(12, [5, 4, 3])
    model = cases.make_model(["gdn", "mamba3", "attention"])
    tokens, labels = cases.make_batch(2, 12, seed=3)
    _, ref_grads = cases.reference_gradients(model, tokens, labels)
    with FAULTS[fault]():
        _, grads, _ = run_pipeline(
            model, plan, tokens, labels, ranks=2, microbatches=2, policy=policy_that_shows(fault)
        )
    assert cases.largest_difference(grads, ref_grads)[0] > 1e-4, fault


@pytest.mark.parametrize("kind", ["gdn", "mamba3"])
def test_a_lost_state_gradient_does_not_show_in_the_loss(kind):
    plan = ChunkPlan.explicit(12, [5, 4, 3])
    model = cases.make_model([kind])
    tokens, labels = cases.make_batch(1, 12, seed=3)
    ref_loss, ref_grads = cases.reference_gradients(model, tokens, labels)
    with FAULTS["drop-state-grad"]():
        loss, grads, _ = run_pipeline(model, plan, tokens, labels)
    assert loss == pytest.approx(ref_loss, rel=1e-12)
    assert cases.largest_difference(grads, ref_grads)[0] > 1e-2
