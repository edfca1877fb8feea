from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateflow.recurrence import attention, prefix_attention
from tests.recurrence.op_testing import (
    LargestTensor,
    assert_close,
    assert_same_bits,
    documents,
    poisoned_memory,
    saved_tensors,
    with_grads,
)


def make_inputs(
    batch: int,
    num_tokens: int,
    prefix_len: int,
    groups: int,
    repeats: int,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """q, k, v, and the buffers of which the first `prefix_len` tokens are the prefix."""
    return [
        torch.randn(batch, num_tokens, groups * repeats, k_dim, dtype=dtype).requires_grad_(),
        torch.randn(batch, num_tokens, groups, k_dim, dtype=dtype).requires_grad_(),
        torch.randn(batch, num_tokens, groups, v_dim, dtype=dtype).requires_grad_(),
        torch.randn(batch, prefix_len + 3, groups, k_dim, dtype=dtype).requires_grad_(),
        torch.randn(batch, prefix_len + 3, groups, v_dim, dtype=dtype).requires_grad_(),
    ]


def run(inputs: list[Tensor], prefix_len: int, docs: Tensor | None, **options) -> list[Tensor]:
    q, k, v, k_buffer, v_buffer = inputs
    return [prefix_attention(q, k, v, k_buffer[:, :prefix_len], v_buffer[:, :prefix_len], docs, **options)]


def small_blocks(queries: int, keys: int):
    return mock.patch.dict(attention.BLOCK_SIZES, cpu=(queries, keys))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 2),
    num_tokens=st.integers(1, 20),
    prefix_len=st.integers(0, 20),
    groups=st.integers(1, 2),
    repeats=st.integers(1, 3),
    k_dim=st.integers(1, 5),
    v_dim=st.integers(1, 5),
    blocks=st.sampled_from([(1, 1), (2, 4), (4, 8), (8, 8), (128, 512)]),
    with_docs=st.booleans(),
    scale=st.sampled_from([None, 2.0]),
)
def test_blocks_and_all_gradients_equal_the_full_softmax(
    seed, batch, num_tokens, prefix_len, groups, repeats, k_dim, v_dim, blocks, with_docs, scale
):
    torch.manual_seed(seed)
    inputs = make_inputs(batch, num_tokens, prefix_len, groups, repeats, k_dim, v_dim)
    docs = documents(batch, num_tokens) if with_docs else None
    with small_blocks(*blocks):
        chunk = with_grads(run(inputs, prefix_len, docs, scale=scale), inputs)
    assert_close(chunk, with_grads(run(inputs, prefix_len, docs, scale=scale, backend="reference"), inputs))


def test_the_default_scale():
    torch.manual_seed(0)
    inputs = make_inputs(1, 5, 3, 1, 2, 4, 2)
    for backend in ("chunk", "reference"):
        found, expected = (run(inputs, 3, None, scale=scale, backend=backend) for scale in (None, 0.5))
        assert_close(found, expected)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    num_tokens=st.integers(2, 20),
    cuts=st.sets(st.integers(1, 19), min_size=1, max_size=4),
    with_docs=st.booleans(),
)
def test_cuts_anywhere_change_nothing(seed, num_tokens, cuts, with_docs):
    torch.manual_seed(seed)
    inputs = make_inputs(2, num_tokens, 0, 2, 2, 4, 3)[:3]
    q, k, v = inputs
    docs = documents(2, num_tokens) if with_docs else None
    bounds = [0, *sorted(cut for cut in cuts if cut < num_tokens), num_tokens]
    pieces = [
        prefix_attention(
            *(x[:, start:stop] for x in inputs),
            k[:, :start],
            v[:, :start],
            None if docs is None else docs[:, start:stop] - start,
        )
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    whole = prefix_attention(q, k, v, k[:, :0], v[:, :0], docs, backend="reference")
    assert_close(with_grads([torch.cat(pieces, dim=1)], inputs), with_grads([whole], inputs))


@pytest.mark.parametrize("backend", ["chunk", "reference"])
def test_documents_are_isolated_exactly(backend):
    torch.manual_seed(0)
    inputs = make_inputs(1, 12, 6, 1, 2, 4, 3, torch.float32)
    docs = torch.tensor([[-3] * 5 + [5] * 7])
    (output,) = run(inputs, 6, docs, backend=backend)
    grad_q, grad_k, grad_v, grad_k_buffer, grad_v_buffer = torch.autograd.grad(output[:, 5:].sum(), inputs)
    for grad in (grad_q, grad_k, grad_v):
        assert (grad[:, :5] == 0).all() and (grad[:, 5:] != 0).any()
    assert (grad_k_buffer == 0).all() and (grad_v_buffer == 0).all()
    # The earlier document began 3 tokens before the chunk: only those of the prefix take part.
    for grad in torch.autograd.grad(run(inputs, 6, docs, backend=backend)[0][:, :5].sum(), inputs[3:]):
        assert (grad[:, :3] == 0).all() and (grad[:, 3:6] != 0).all() and (grad[:, 6:] == 0).all()

    others = make_inputs(1, 12, 6, 1, 2, 4, 3, torch.float32)
    mixed = [torch.cat([o[:, :5], x[:, 5:]], 1) for x, o in zip(inputs[:3], others[:3], strict=True)]
    assert_same_bits([run([*mixed, *others[3:]], 6, docs, backend=backend)[0][:, 5:]], [output[:, 5:]])


def test_large_scores_stay_finite():
    torch.manual_seed(0)
    inputs = make_inputs(1, 9, 7, 1, 1, 4, 4)
    with small_blocks(2, 4):
        chunk = with_grads(run(inputs, 7, None, scale=1e4), inputs)
    assert_close(chunk, with_grads(run(inputs, 7, None, scale=1e4, backend="reference"), inputs))


@pytest.mark.parametrize("blocks", [(16, 32), (1, 1)])
def test_16_bit_inputs(blocks):
    torch.manual_seed(0)
    low = make_inputs(1, 50, 30, 2, 2, 16, 16, torch.bfloat16)
    high = [x.detach().double().requires_grad_() for x in low]
    with small_blocks(*blocks):  # the smallest: what sums up over many blocks is rounded once
        result = with_grads(run(low, 30, None), low)
    assert all(x.dtype == torch.bfloat16 for x in result)
    assert_close(result, with_grads(run(high, 30, None, backend="reference"), high), tolerance=8e-3)


def test_no_more_scores_than_one_block_exist():
    torch.manual_seed(0)
    inputs = [x.detach() for x in make_inputs(1, 64, 64, 1, 2, 2, 2)]
    inputs[3:] = [x[:, :64] for x in inputs[3:]]
    with small_blocks(4, 16):
        with LargestTensor() as forward:
            output, lse = attention._prefix_attention.implementation(*inputs, None, 1.0)
        with LargestTensor() as backward:
            attention._prefix_attention_backward.implementation(output, *inputs, None, output, lse, 1.0)
    largest_argument = 2 * 64 * 2
    assert max(forward.numel, backward.numel) <= max(largest_argument, 2 * 4 * 16)


def test_the_prefix_is_saved_as_the_view_that_it_is():
    torch.manual_seed(0)
    inputs = make_inputs(2, 5, 40, 2, 2, 4, 3)
    with saved_tensors() as saved:
        run(inputs, 40, None)
    storages = {x.untyped_storage().data_ptr() for x in inputs}
    own = [x for x in saved if x.untyped_storage().data_ptr() not in storages]
    assert sorted(tuple(x.shape) for x in own) == [(2, 4, 5), (2, 5, 4, 3)]  # logsumexp and output


def test_a_buffer_may_grow_behind_the_prefix_between_forward_and_backward():
    torch.manual_seed(0)
    inputs = make_inputs(1, 4, 6, 1, 1, 2, 2)
    expected = with_grads(run(inputs, 6, None), inputs)
    (output,) = run(inputs, 6, None)
    for buffer in inputs[3:]:
        buffer.data[:, 6:] = torch.nan
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    assert_same_bits(torch.autograd.grad(output, inputs, grad), expected[1:])


def test_no_uninitialised_memory_is_read():
    torch.manual_seed(0)
    inputs = make_inputs(2, 9, 7, 2, 2, 4, 3)
    docs = documents(2, 9)
    with poisoned_memory(), small_blocks(2, 4):
        poisoned = with_grads(run(inputs, 7, docs), inputs)
    assert_close(poisoned, with_grads(run(inputs, 7, docs, backend="reference"), inputs))


def test_gradcheck():
    torch.manual_seed(0)
    inputs = make_inputs(1, 3, 2, 1, 2, 2, 2)
    docs = torch.tensor([[-1, -1, 2]])
    assert torch.autograd.gradcheck(lambda *x: run(list(x), 2, docs)[0], inputs)


@pytest.mark.parametrize("prefix_len", [0, 3])
def test_operation_is_well_formed(prefix_len):
    torch.manual_seed(0)
    inputs = make_inputs(1, 5, prefix_len, 1, 2, 2, 2)
    inputs[3:] = [x.detach()[:, :prefix_len].requires_grad_() for x in inputs[3:]]
    torch.library.opcheck(torch.ops.stateflow.prefix_attention, (*inputs, documents(1, 5), 1.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q_BTHK=torch.zeros(1, 0, 4, 2)), "at least 1 token"),
        (dict(q_BTHK=torch.zeros(1, 5, 3, 2)), "3 query heads are no multiple of the 2 key heads"),
        (dict(k_BTGK=torch.zeros(1, 5, 2, 3)), r"k .* must be \[1, 5, 2, 2\]"),
        (dict(v_prefix_BSGV=torch.zeros(1, 3, 2, 2)), r"v_prefix .* must be \[1, 4, 2, 2\]"),
        (dict(backend="kernel"), "unknown backend 'kernel'"),
    ],
)
def test_refusals(change, message):
    arguments = dict(
        q_BTHK=torch.zeros(1, 5, 4, 2),
        k_BTGK=torch.zeros(1, 5, 2, 2),
        v_BTGV=torch.zeros(1, 5, 2, 2),
        k_prefix_BSGK=torch.zeros(1, 4, 2, 2),
        v_prefix_BSGV=torch.zeros(1, 4, 2, 2),
    )
    with pytest.raises(ValueError, match=message):
        prefix_attention(**(arguments | change))
