import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateflow import loss
from stateflow.loss import (
    cross_entropy_sum,
    linear_cross_entropy,
    linear_cross_entropy_with_gradients,
    reference_cross_entropy,
)
from tests.recurrence.op_testing import LargestTensor, assert_close, poisoned_memory, saved_tensors


def make_inputs(
    batch: int, num_tokens: int, dim: int, vocab: int, ignored: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(batch, num_tokens, dim, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, dim, dtype=dtype).requires_grad_()
    labels = torch.randint(vocab, (batch, num_tokens))
    return hidden, weight, labels.masked_fill(torch.rand(batch, num_tokens) < ignored, -100)


def with_grads(value: Tensor, *inputs: Tensor, scale: float = 0.7) -> list[Tensor]:
    return [value, *torch.autograd.grad(value * scale, inputs)]


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 3),
    num_tokens=st.integers(1, 12),
    dim=st.integers(1, 6),
    vocab=st.integers(1, 9),
    block_tokens=st.sampled_from([1, 2, 5, 1024]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_loss_and_gradients_equal_those_of_full_logits(
    seed, batch, num_tokens, dim, vocab, block_tokens, ignored
):
    torch.manual_seed(seed)
    hidden, weight, labels = make_inputs(batch, num_tokens, dim, vocab, ignored)
    blocks = linear_cross_entropy(hidden, weight, labels, block_tokens=block_tokens)
    full = reference_cross_entropy((hidden, weight), labels)
    assert blocks.shape == ()
    expected = with_grads(full, hidden, weight)
    assert_close(with_grads(blocks, hidden, weight), expected)
    value, grads = linear_cross_entropy_with_gradients(hidden, weight, labels, 0.7, block_tokens=block_tokens)
    assert_close([value, *grads], expected)


def test_a_chunk_without_labels_is_exactly_zero():
    hidden, weight, labels = make_inputs(2, 5, 3, 7, ignored=1.0, dtype=torch.float32)
    value, grad_hidden, grad_weight = with_grads(cross_entropy_sum((hidden, weight), labels), hidden, weight)
    assert value.item() == 0.0 and (grad_hidden == 0).all() and (grad_weight == 0).all()


def test_ignored_tokens_may_hold_anything():
    torch.manual_seed(0)
    hidden, weight, labels = make_inputs(1, 4, 3, 7, ignored=0.0)
    labels[0, 1] = -100
    clean = with_grads(linear_cross_entropy(hidden, weight, labels), hidden, weight)
    with torch.no_grad():
        hidden[0, 1] = torch.inf
    value, grad_hidden, _ = with_grads(linear_cross_entropy(hidden, weight, labels), hidden, weight)
    assert torch.equal(value, clean[0])
    assert torch.equal(grad_hidden[0, [0, 2, 3]], clean[1][0, [0, 2, 3]])


def test_another_ignore_index():
    torch.manual_seed(0)
    hidden, weight, labels = make_inputs(1, 6, 3, 4, ignored=0.0)
    expected = reference_cross_entropy((hidden, weight), labels.masked_fill(labels == 2, -100))
    expected = with_grads(expected, hidden, weight)
    found = linear_cross_entropy(hidden, weight, labels, ignore_index=2)
    assert_close(with_grads(found, hidden, weight), expected)
    value, grads = linear_cross_entropy_with_gradients(hidden, weight, labels, 0.7, ignore_index=2)
    assert_close([value, *grads], expected)


def test_chunks_add_up_to_the_whole():
    torch.manual_seed(0)
    hidden, weight, labels = make_inputs(2, 9, 3, 7, ignored=0.4)
    pieces = [
        cross_entropy_sum((hidden[:, a:b], weight), labels[:, a:b]) for a, b in ((0, 1), (1, 5), (5, 9))
    ]
    whole = reference_cross_entropy((hidden, weight), labels)
    assert_close(with_grads(sum(pieces), hidden, weight), with_grads(whole, hidden, weight))


@pytest.mark.parametrize("block_tokens", [None, 1])  # the gradient of the weight is rounded once, not by block
def test_16_bit_inputs_give_a_float32_loss(block_tokens):
    torch.manual_seed(0)
    hidden, weight, labels = make_inputs(2, 40, 16, 50, 0.2, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    low = with_grads(linear_cross_entropy(hidden, weight, labels, block_tokens=block_tokens), hidden, weight)
    high = with_grads(reference_cross_entropy(tuple(exact), labels), *exact)
    assert low[0].dtype == torch.float32 and low[1].dtype == low[2].dtype == torch.bfloat16
    assert_close(low[:1], high[:1], tolerance=1e-6)
    assert_close(low[1:], high[1:], tolerance=2.5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pass_equals_forward_and_backward(dtype):
    torch.manual_seed(0)
    hidden, weight, labels = make_inputs(2, 40, 16, 50, 0.2, dtype)
    expected = with_grads(linear_cross_entropy(hidden, weight, labels, block_tokens=32), hidden, weight)
    scale = torch.tensor(0.7, dtype=torch.float64)
    value, grads = linear_cross_entropy_with_gradients(hidden, weight, labels, scale, block_tokens=32)
    assert not value.requires_grad and not grads[0].requires_grad
    for mine, theirs in zip((value, *grads), expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)


def test_no_tokens():
    hidden, weight, labels = make_inputs(1, 0, 3, 7, ignored=0.0)
    expected = with_grads(reference_cross_entropy((hidden, weight), labels), hidden, weight)
    assert_close(with_grads(linear_cross_entropy(hidden, weight, labels), hidden, weight), expected)
    value, grads = linear_cross_entropy_with_gradients(hidden, weight, labels)
    assert_close([value, *grads], expected)


def test_blocks_of_logits_stay_below_a_gibibyte():
    assert 4096 <= loss.tokens_in_block(50304) == 2**28 // 50304
    assert loss.tokens_in_block(2**30) == 1


def test_large_logits_stay_finite():
    hidden = torch.tensor([[[1e4, -1e4]]], dtype=torch.float32, requires_grad=True)
    weight, labels = torch.eye(2, requires_grad=True), torch.tensor([[1]])
    total = linear_cross_entropy(hidden, weight, labels)
    value, grad_hidden, _ = with_grads(total, hidden, weight, scale=1.0)
    assert value.item() == 2e4 and grad_hidden.flatten().tolist() == [1.0, -1.0]


def test_logits_exist_for_one_block_only_and_nothing_wide_is_saved():
    torch.manual_seed(0)
    hidden, weight, labels = make_inputs(1, 64, 2, 50, ignored=0.0)
    flat = (hidden.detach()[0], weight.detach(), labels[0])
    with LargestTensor() as forward:
        _, lse = loss._linear_cross_entropy.implementation(*flat, -100, 4, False)
    with LargestTensor() as backward:
        loss._linear_cross_entropy_backward.implementation(torch.ones(()), *flat, lse, -100, 4, False)
    with LargestTensor() as once:
        linear_cross_entropy_with_gradients(*flat, block_tokens=4)
    assert max(forward.numel, backward.numel, once.numel) <= 4 * 50
    with saved_tensors() as saved:
        linear_cross_entropy(hidden, weight, labels, block_tokens=4)
    assert {tuple(x.shape) for x in saved} == {(64, 2), (50, 2), (64,)}


def test_no_uninitialised_memory_is_read():
    torch.manual_seed(0)
    hidden, weight, labels = make_inputs(2, 7, 3, 5, ignored=0.3)
    with poisoned_memory():
        poisoned = with_grads(linear_cross_entropy(hidden, weight, labels, block_tokens=4), hidden, weight)
        value, grads = linear_cross_entropy_with_gradients(hidden, weight, labels, 0.7, block_tokens=4)
    expected = with_grads(reference_cross_entropy((hidden, weight), labels), hidden, weight)
    assert_close(poisoned, expected)
    assert_close([value, *grads], expected)


def test_gradcheck_and_operation_is_well_formed():
    torch.manual_seed(0)
    hidden, weight, labels = make_inputs(1, 4, 2, 3, ignored=0.3)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels), (hidden, weight))
    flat = (hidden.detach()[0].requires_grad_(), weight, labels[0], -100, 2, False)
    torch.library.opcheck(torch.ops.stateflow.linear_cross_entropy, flat)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(labels_BT=torch.zeros(1, 3, dtype=torch.int64)), r"needs labels \[1, 4\]"),
        (dict(weight_VD=torch.zeros(5, 3)), r"a weight \[V, 2\]"),
        (dict(block_tokens=0), "block_tokens must be at least 1, got 0"),
        (dict(backend="fast"), "unknown backend 'fast'"),
    ],
)
def test_refusals(change, message):
    arguments = dict(
        hidden_BTD=torch.zeros(1, 4, 2),
        weight_VD=torch.zeros(5, 2),
        labels_BT=torch.zeros(1, 4, dtype=torch.int64),
    )
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(arguments | change))
