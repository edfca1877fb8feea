"""Guards and house-keeping of one stage's units."""

from __future__ import annotations

import gc
import math
import weakref
from unittest import mock

import pytest
import torch

from stateflow import loss as loss_module
from stateflow.boundary import SequenceWindow, own_storage
from stateflow.chunks import ChunkPlan
from stateflow.loss import CrossEntropySum, cross_entropy_sum
from stateflow.pipeline.local import run_local
from stateflow.pipeline.split import split_model
from stateflow.pipeline.stage import UnitOrderError, run_autograd
from tests import cases


def one_stage(kinds=("gdn", "attention"), lengths=(4, 3, 2)):
    plan = ChunkPlan.explicit(sum(lengths), list(lengths))
    (stage,) = cases.make_stages(cases.make_model(kinds), 1, plan)
    tokens, labels = cases.make_batch(1, plan.seq_len, seed=0)
    return stage, plan, list(plan.split(tokens)), list(plan.split(labels))


def test_forward_chunks_must_ascend():
    stage, _, tokens, labels = one_stage()
    with pytest.raises(UnitOrderError, match=r"chunk 1\), but chunk 0 is next"):
        stage.forward(0, 1, tokens[1], target=labels[1])


def test_backward_chunks_must_descend():
    stage, _, tokens, labels = one_stage()
    for i in range(3):
        stage.forward(0, i, tokens[i], target=labels[i])
    with pytest.raises(UnitOrderError, match="before chunk 1: backward chunks must descend"):
        stage.backward(0, 0)


def test_backward_needs_its_forward():
    stage, *_ = one_stage()
    with pytest.raises(UnitOrderError, match="before its forward"):
        stage.backward(0, 2)


def test_what_is_left_behind_is_reported_and_forgotten_by_a_reset():
    stage, _, tokens, labels = one_stage()
    stage.split_backward()
    for i in range(3):
        stage.forward(0, i, tokens[i], target=labels[i])
    stage.backward(0, 2, input_only=True)
    stage.forward(1, 0, tokens[0], target=labels[0])
    with pytest.raises(UnitOrderError, match="left after the step") as caught:
        stage.assert_drained()
    for what in ("units", "carries", "windows", "state gradients", "units without W"):
        assert f"'{what}'" in str(caught.value)
    stage.reset()
    stage.assert_drained()
    stage.forward(1, 0, tokens[0], target=labels[0])  # from the first chunk again


def test_wrong_chunk_length_is_refused():
    stage, _, tokens, labels = one_stage()
    with pytest.raises(ValueError, match="chunk 0 of the plan has 4 tokens, its input has 3"):
        stage.forward(0, 0, tokens[1], target=labels[1])


def test_the_output_of_a_unit_is_not_kept():
    """What was sent can be freed: the unit's record holds the graph, not the tensor."""
    plan = ChunkPlan.explicit(6, [3, 3])
    first, _ = cases.make_stages(cases.make_model(["gdn", "gdn"]), 2, plan)
    tokens, _ = cases.make_batch(1, 6, seed=0)
    output = first.forward(0, 0, tokens[:, :3])
    storage = weakref.ref(output.untyped_storage())
    del output
    gc.collect()
    assert storage() is None


def run(stage, tokens, labels, *, split=False):
    """All units; returns the losses and how many products of the head all forwards and all backwards took."""
    with mock.patch.object(loss_module, "product", wraps=loss_module.product) as product:
        losses = [stage.forward(0, i, tokens[i], target=labels[i]) for i in range(3)]
        early, in_forward = [loss.item() for loss in losses], product.call_count
        for i in reversed(range(3)):
            stage.backward(0, i, loss_scale=0.1, input_only=split)
            if split:
                stage.weight_backward(0, i)
    return early, losses, in_forward, product.call_count - in_forward


@pytest.mark.parametrize("split", [False, True], ids=["B", "I W"])
def test_head_and_loss_run_once_in_the_backward(split):
    results = []
    for loss_fn in (cross_entropy_sum, lambda output, target: cross_entropy_sum(output, target)):
        stage, _, tokens, labels = one_stage()
        stage.loss_fn = loss_fn
        if split:
            stage.split_backward()
        early, losses, *products = run(stage, tokens, labels, split=split)
        stage.assert_drained()
        results.append((early, losses, products, cases.gradients_of([stage])))
    (early, losses, products, grads), (their_early, their_losses, their_products, their_grads) = results
    assert all(math.isnan(value) for value in early) and products == [0, 3 * 3]
    # A loss that does not say how to be put off is computed in the forward, under autograd.
    assert their_early == [loss.item() for loss in their_losses] and their_products == [3, 3 * 3]
    torch.testing.assert_close(losses, their_losses, rtol=1e-14, atol=0)
    assert all(not loss.requires_grad for loss in losses)
    worst, name = cases.largest_difference(grads, their_grads)
    assert worst <= 1e-12, name


@pytest.mark.parametrize("dropped", [0, 1], ids=["hidden", "weight"])
def test_a_gradient_that_the_loss_leaves_out_shows(dropped, monkeypatch):
    plan = ChunkPlan.explicit(6, [3, 3])
    model = cases.make_model(["gdn", "attention"])
    stages = cases.make_stages(model, 2, plan)
    tokens, labels = cases.make_batch(1, 6, seed=0)

    def error():
        model.zero_grad()
        scale = 1 / (labels != -100).sum().item()
        run_local(cases.schedule_of("1f1b", 2, 1, plan), stages, plan, tokens, labels, loss_scale=scale)
        _, expected = cases.reference_gradients(model, tokens, labels)
        for stage in stages:
            for parameter in stage.module.parameters():
                assert parameter.grad is not None
        return cases.largest_difference(cases.gradients_of(stages), expected)[0]

    assert error() <= 1e-10
    with_gradient = CrossEntropySum.with_gradient

    def faulty(*args):
        loss, grads = with_gradient(*args)
        return loss, tuple(torch.zeros_like(g) if i == dropped else g for i, g in enumerate(grads))

    monkeypatch.setattr(CrossEntropySum, "with_gradient", faulty)
    for stage in stages:
        stage.module.zero_grad()
    assert error() > 0.5


def test_what_the_loss_needs_is_let_go_in_the_backward():
    """Between forward and backward the unit holds the head's inputs and the labels, and nothing as wide as logits."""
    stage, _, tokens, labels = one_stage()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        stage.forward(0, 0, tokens[0], target=labels[0])
    assert not [t for t in kept if cases.VOCAB in t.shape and t.dim() == 2 and t.shape != (cases.VOCAB, 12)]
    put_off = stage._units[0, 0].put_off
    assert [tuple(t.shape) for t in (*put_off.output, put_off.target)] == [(1, 4, 12), (cases.VOCAB, 12), (1, 4)]
    hidden, grads = weakref.ref(put_off.output[0].untyped_storage()), []
    for i in (1, 2):
        stage.forward(0, i, tokens[i], target=labels[i])
    del put_off

    def engine(root, leaves, last_backward):
        (unit,) = (unit for unit in stage._units.values() if unit.root is root)
        grads.append(weakref.ref(unit.grad_slot[0].untyped_storage()))
        gc.collect()
        assert unit.put_off is None and (unit is not stage._units[0, 0] or hidden() is None)
        del unit
        found = run_autograd(root, leaves, last_backward)
        gc.collect()
        assert grads[-1]() is None  # let go of as soon as it is used
        return found

    for i in (2, 1, 0):
        stage.backward(0, i, engine=engine)
    assert len(grads) == 3


def test_evaluation_keeps_nothing():
    stage, plan, tokens, labels = one_stage()
    with torch.no_grad():
        for i in range(3):
            stage.forward(0, i, tokens[i], target=labels[i], training=False)
    stage.assert_drained()


def test_a_given_initial_state_serves_one_pass():
    stage, _, tokens, labels = one_stage()
    state = stage.module.initial_state(1, "cpu", torch.float64)
    carries = stage.spec.carries_of(state, 1).apply(torch.ones_like)

    def losses(training):
        values = [stage.forward(0, i, tokens[i], target=labels[i], training=training) for i in range(3)]
        for i in reversed(range(3)) if training else ():
            stage.backward(0, i)  # which computes the losses
        return values

    stage.start(0, carries)
    given = losses(training=False)
    plain = losses(training=False)
    assert not torch.equal(given[0], plain[0])
    assert all(torch.equal(a, b) for a, b in zip(losses(training=True), plain, strict=True))

    stage.start(0, carries)
    for expected in (given, plain):
        assert all(torch.equal(a, b) for a, b in zip(losses(training=True), expected, strict=True))
    assert not any(t.requires_grad for t in carries.values(True, True)), "the caller's own tensors stay as they are"
    assert stage.initial_state_grads.keys() == {0}
    stage.reset()
    assert not stage.initial_state_grads


def test_a_view_is_copied_out_of_its_chunk():
    chunk = torch.randn(1, 1000, 4)
    tail = own_storage(chunk[:, -3:])
    assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()
    assert torch.equal(tail, chunk[:, -3:])


def test_window_gradients_accumulate_in_float32():
    window = SequenceWindow(torch.zeros(1, 2, 1, dtype=torch.bfloat16), 4)
    for _ in range(256):
        window.add_prefix_grad(torch.full((1, 4, 1), 2.0**-8, dtype=torch.bfloat16))
    window.add_prefix_grad(torch.full((1, 2, 1), 1.0, dtype=torch.bfloat16))
    assert window.grads.dtype == torch.float32
    assert window.chunk_grad(0, 4).flatten().tolist() == [2.0, 2.0, 1.0, 1.0]


def test_the_footprint_of_16_bit_windows_is_what_they_and_their_gradients_take():
    plan = ChunkPlan.explicit(7, [4, 3])
    (stage,) = cases.make_stages(cases.make_model(["attention"], torch.bfloat16), 1, plan)
    tokens, labels = (plan.split(x) for x in cases.make_batch(1, 7, seed=0))
    for i in range(2):
        stage.forward(0, i, tokens[i], target=labels[i])
    stage.backward(0, 1)
    usage, footprint = stage.usage(), stage.footprint(1, 12)
    assert usage.window_bytes == 7 * footprint.window_bytes_per_token > 0
    assert usage.window_grad_bytes == 7 * footprint.window_grad_bytes_per_token == 2 * usage.window_bytes


def test_repeated_runs_give_the_same_bits():
    plan = ChunkPlan.explicit(130, [64, 64, 2])
    results = []
    for _ in range(2):
        model = cases.make_model(["gdn", "attention"], torch.float32)
        tokens, labels = cases.make_batch(2, plan.seq_len, seed=5)
        stages = cases.make_stages(model, 2, plan)
        losses = run_local(cases.schedule_of("1f1b", 2, 2, plan), stages, plan, tokens, labels)
        results.append((losses, cases.gradients_of(stages)))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(g, results[1][1][name]) for name, g in results[0][1].items())


@pytest.mark.parametrize("tied", ["embedding and head", "a layer"])
def test_parts_cannot_share_weights(tied):
    """Each part would train a copy of its own, silently; in one part they may be tied."""
    model = cases.make_model(["gdn", "gdn"])
    if tied == "a layer":
        model.layers["1"] = model.layers["0"]
    else:
        model.output.weight = model.tok_embeddings.weight
    with pytest.raises(ValueError, match="are one parameter, and parts cannot share weights"):
        split_model(model, 2)
    plan = ChunkPlan.explicit(6, [4, 2])
    tokens, labels = cases.make_batch(1, 6, seed=3)
    (stage,) = cases.make_stages(model, 1, plan)
    run_local(cases.schedule_of("1f1b", 1, 1, plan), [stage], plan, tokens, labels)
    cases.reference_cross_entropy(model(tokens), labels).backward()
    assert cases.largest_difference(
        cases.gradients_of([stage]), {name: p.grad for name, p in model.named_parameters()}
    )[0] < 1e-10
