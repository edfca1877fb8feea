import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateflow.recurrence import short_conv
from tests.recurrence.op_testing import (
    assert_close,
    assert_same_bits,
    documents,
    poisoned_memory,
    saved_tensors,
    with_grads,
)


def make_inputs(
    batch: int, num_tokens: int, channels: int, width: int, with_bias: bool, dtype=torch.float64
) -> list[Tensor | None]:
    """x, weight, bias, tail; the tail in at least float32."""
    carried = torch.promote_types(dtype, torch.float32)
    return [
        torch.randn(batch, num_tokens, channels, dtype=dtype).requires_grad_(),
        torch.randn(channels, width, dtype=dtype).requires_grad_(),
        torch.randn(channels, dtype=dtype).requires_grad_() if with_bias else None,
        torch.randn(batch, width - 1, channels, dtype=carried).requires_grad_(),
    ]


def given_tensors(inputs: list[Tensor | None]) -> list[Tensor]:
    return [x for x in inputs if x is not None]


def run_in_pieces(inputs: list[Tensor | None], docs: Tensor | None, cuts: list[int]) -> tuple[Tensor, Tensor]:
    x, weight, bias, tail = inputs
    bounds = [0, *cuts, x.shape[1]]
    outputs = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        piece_docs = None if docs is None else docs[:, start:stop] - start
        y, tail = short_conv(x[:, start:stop], weight, bias, tail, piece_docs)
        outputs.append(y)
    return torch.cat(outputs, dim=1), tail


SHAPES = dict(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 2),
    num_tokens=st.integers(1, 12),
    channels=st.integers(1, 9),
    width=st.integers(1, 5),
    with_bias=st.booleans(),
    with_docs=st.booleans(),
)


@settings(max_examples=60)
@given(**SHAPES)
def test_output_tail_and_all_gradients_equal_the_definition(
    seed, batch, num_tokens, channels, width, with_bias, with_docs
):
    torch.manual_seed(seed)
    inputs = make_inputs(batch, num_tokens, channels, width, with_bias)
    docs = documents(batch, num_tokens) if with_docs else None
    results = [
        with_grads(short_conv(*inputs, docs, backend=backend), given_tensors(inputs))
        for backend in ("chunk", "reference")
    ]
    assert_close(*results)


@settings(max_examples=40)
@given(**SHAPES, cuts=st.sets(st.integers(1, 11), min_size=1), dtype=st.sampled_from(["bfloat16", "float32"]))
def test_cuts_anywhere_give_the_same_bits(
    seed, batch, num_tokens, channels, width, with_bias, with_docs, cuts, dtype
):
    """Of y, the tail, dx and the tail's gradient: also in pieces of 1 and 2 tokens, shorter than the tail."""
    torch.manual_seed(seed)
    inputs = make_inputs(batch, num_tokens, channels, width, with_bias, getattr(torch, dtype))
    docs = documents(batch, num_tokens) if with_docs else None
    cuts = sorted(cut for cut in cuts if cut < num_tokens)
    token_inputs = [inputs[0], inputs[3]]
    whole = with_grads(short_conv(*inputs, docs), token_inputs)
    assert_same_bits(with_grads(run_in_pieces(inputs, docs, cuts), token_inputs), whole)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_a_short_chunk_keeps_the_rest_of_the_incoming_tail(num_tokens):
    torch.manual_seed(0)
    x, weight, _, tail = make_inputs(1, num_tokens, 2, 4, False)
    _, new_tail = short_conv(x, weight, None, tail)
    assert torch.equal(new_tail, torch.cat([tail, x], dim=1)[:, -3:])
    (grad,) = torch.autograd.grad(new_tail.sum(), tail)
    assert grad[0, :, 0].tolist() == [0.0] * min(num_tokens, 3) + [1.0] * max(0, 3 - num_tokens)


def test_the_tail_of_16_bit_inputs_is_lossless_and_owns_its_memory():
    torch.manual_seed(0)
    x, weight, _, tail = make_inputs(2, 9, 3, 4, False, torch.bfloat16)
    y, new_tail = short_conv(x, weight, None, tail)
    assert y.dtype == torch.bfloat16 and new_tail.dtype == torch.float32
    assert torch.equal(new_tail, x[:, -3:].float())
    assert new_tail.untyped_storage().nbytes() == new_tail.numel() * new_tail.element_size()


def test_documents_are_isolated_exactly():
    torch.manual_seed(0)
    inputs = make_inputs(1, 8, 3, 4, True, torch.float32)
    docs = torch.tensor([[-2, -2, 2, 2, 2, 5, 5, 5]])
    y, tail = short_conv(*inputs, docs)
    grad_x, grad_tail = torch.autograd.grad(y[:, 2:5].square().sum(), [inputs[0], inputs[3]])
    assert (grad_x[:, 2:5] != 0).all()
    assert (grad_x[:, :2] == 0).all() and (grad_x[:, 5:] == 0).all() and (grad_tail == 0).all()
    # The outgoing tail is raw: whether the next token may see it is that chunk's `docs` to say.
    assert torch.equal(tail, inputs[0][:, -3:])


def test_gradcheck():
    torch.manual_seed(0)
    inputs = make_inputs(1, 4, 2, 3, True)
    docs = torch.tensor([[-1, -1, 2, 2]])
    assert torch.autograd.gradcheck(lambda *x: short_conv(*x, docs), inputs)


def test_very_negative_and_very_large_inputs_stay_finite():
    x = torch.tensor([[[-1e4], [1e4], [-200.0], [0.0]]], requires_grad=True)
    weight, tail = torch.ones(1, 1, requires_grad=True), torch.zeros(1, 0, 1)
    y, _ = short_conv(x, weight, None, tail)
    assert torch.equal(y, torch.nn.functional.silu(x))
    assert torch.autograd.grad(y.sum(), x)[0].flatten().tolist() == pytest.approx([0.0, 1.0, 0.0, 0.5])


def test_no_uninitialised_memory_is_read():
    torch.manual_seed(0)
    inputs = make_inputs(2, 7, 3, 4, True)
    docs = documents(2, 7)
    with poisoned_memory():
        poisoned = with_grads(short_conv(*inputs, docs), given_tensors(inputs))
    assert_close(poisoned, with_grads(short_conv(*inputs, docs, backend="reference"), given_tensors(inputs)))


def test_only_the_inputs_are_saved():
    inputs = make_inputs(2, 7, 3, 4, True)
    with saved_tensors() as saved:
        short_conv(*inputs)
    assert {x.data_ptr() for x in saved} <= {x.data_ptr() for x in given_tensors(inputs)}


@pytest.mark.parametrize("with_bias", [False, True])
def test_operation_is_well_formed(with_bias):
    inputs = make_inputs(1, 5, 2, 3, with_bias)
    torch.library.opcheck(torch.ops.stateflow.short_conv, (*inputs, documents(1, 5), False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x_BTC=torch.zeros(1, 0, 2)), "at least 1 token"),
        (dict(weight_CW=torch.zeros(3, 4)), "must have 2 channels"),
        (dict(tail_BWC=torch.zeros(1, 4, 2)), r"must be \[1, 3, 2\]"),
        (dict(tail_BWC=torch.zeros(1, 3, 2, dtype=torch.bfloat16)), "the tail has torch.bfloat16"),
        (dict(backend="kernel"), "unknown backend 'kernel'"),
    ],
)
def test_refusals(change, message):
    arguments = dict(
        x_BTC=torch.zeros(1, 5, 2), weight_CW=torch.zeros(2, 4), bias_C=None, tail_BWC=torch.zeros(1, 3, 2)
    )
    with pytest.raises(ValueError, match=message):
        short_conv(**(arguments | change))
