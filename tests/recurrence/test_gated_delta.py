import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateflow.recurrence import gated_delta_rule
from tests.recurrence.op_testing import (
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
    key_heads: int,
    repeats: int,
    k_dim: int,
    v_dim: int,
    *,
    dtype: torch.dtype = torch.float64,
    max_beta: float = 1.0,
    max_decay: float = 1.0,
) -> list[Tensor]:
    """q, k, v, g, beta, state, all requiring grad."""
    heads = key_heads * repeats
    q, k = (
        F.normalize(torch.randn(batch, num_tokens, key_heads, k_dim, dtype=dtype), dim=-1) for _ in range(2)
    )
    gate_shape = (batch, num_tokens, heads)
    inputs = [
        q,
        k,
        torch.randn(*gate_shape, v_dim, dtype=dtype),
        -max_decay * torch.rand(gate_shape, dtype=dtype),
        max_beta * torch.rand(gate_shape, dtype=dtype),
        torch.randn(batch, heads, k_dim, v_dim, dtype=dtype),
    ]
    return [x.requires_grad_() for x in inputs]


def run_in_pieces(
    inputs: list[Tensor], docs: Tensor | None, cuts: list[int], **options
) -> tuple[Tensor, Tensor]:
    """Outputs and final state with the sequence cut, differentiable through the passed states."""
    *tokens, state = inputs
    bounds = [0, *cuts, tokens[0].shape[1]]
    outputs = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        piece_docs = None if docs is None else docs[:, start:stop] - start
        output, state = gated_delta_rule(*(x[:, start:stop] for x in tokens), state, piece_docs, **options)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


SHAPES = dict(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 2),
    num_tokens=st.integers(1, 40),
    key_heads=st.integers(1, 2),
    repeats=st.integers(1, 2),
    k_dim=st.integers(1, 6),
    v_dim=st.integers(1, 6),
    chunk_size=st.sampled_from([1, 2, 3, 8, 16]),
    with_docs=st.booleans(),
    max_decay=st.sampled_from([0.0, 1.0, 1e4]),
)


@settings(max_examples=40)
@given(**SHAPES, max_beta=st.sampled_from([1.0, 2.0]), scale=st.sampled_from([None, 0.3]))
def test_chunk_form_and_all_gradients_equal_the_recurrence(
    seed,
    batch,
    num_tokens,
    key_heads,
    repeats,
    k_dim,
    v_dim,
    chunk_size,
    with_docs,
    max_decay,
    max_beta,
    scale,
):
    torch.manual_seed(seed)
    inputs = make_inputs(
        batch, num_tokens, key_heads, repeats, k_dim, v_dim, max_beta=max_beta, max_decay=max_decay
    )
    docs = documents(batch, num_tokens) if with_docs else None
    results = [
        with_grads(
            gated_delta_rule(*inputs, docs, scale=scale, chunk_size=chunk_size, backend=backend), inputs
        )
        for backend in ("chunk", "reference")
    ]
    assert_close(*results)


@settings(max_examples=25)
@given(**SHAPES, data=st.data())
def test_cuts_anywhere_change_nothing(
    seed, batch, num_tokens, key_heads, repeats, k_dim, v_dim, chunk_size, with_docs, max_decay, data
):
    torch.manual_seed(seed)
    inputs = make_inputs(batch, num_tokens, key_heads, repeats, k_dim, v_dim, max_decay=max_decay)
    docs = documents(batch, num_tokens) if with_docs else None
    cuts = data.draw(st.lists(st.integers(1, max(1, num_tokens - 1)), unique=True, max_size=4).map(sorted))
    cuts = [cut for cut in cuts if cut < num_tokens]
    whole = with_grads(gated_delta_rule(*inputs, docs, chunk_size=chunk_size), inputs)
    assert_close(with_grads(run_in_pieces(inputs, docs, cuts, chunk_size=chunk_size), inputs), whole)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 2),
    key_heads=st.integers(1, 3),
    repeats=st.integers(1, 2),
    k_dim=st.sampled_from([4, 5, 16, 48]),
    v_dim=st.sampled_from([3, 8, 12, 48]),
    chunk_size=st.sampled_from([4, 8, 64]),
    last=st.integers(1, 64),
    with_docs=st.booleans(),
    cut_chunks=st.sets(st.integers(1, 4), min_size=1),
)
def test_cuts_at_multiples_of_the_chunk_size_give_the_same_bits(
    seed, batch, key_heads, repeats, k_dim, v_dim, chunk_size, last, with_docs, cut_chunks
):
    torch.manual_seed(seed)
    num_tokens = 4 * chunk_size + min(last, chunk_size)
    inputs = make_inputs(batch, num_tokens, key_heads, repeats, k_dim, v_dim, dtype=torch.float32)
    docs = documents(batch, num_tokens, rate=0.02) if with_docs else None
    cuts = [chunk_size * c for c in sorted(cut_chunks)]
    whole = with_grads(gated_delta_rule(*inputs, docs, chunk_size=chunk_size), inputs)
    assert_same_bits(with_grads(run_in_pieces(inputs, docs, cuts, chunk_size=chunk_size), inputs), whole)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_same_bits_with_one_head_and_several_threads(num_threads):
    # One matrix a product: the case where the library shares a single product among threads.
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    try:
        inputs = make_inputs(1, 211, 1, 1, 5, 48, dtype=torch.float32)
        whole = with_grads(gated_delta_rule(*inputs), inputs)
        assert_same_bits(with_grads(run_in_pieces(inputs, None, [64, 128, 192]), inputs), whole)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("backend", ["chunk", "reference"])
@pytest.mark.parametrize("boundary", [1, 8, 13, 16])
def test_documents_are_isolated_exactly(backend, boundary):
    torch.manual_seed(boundary)
    inputs = make_inputs(2, 29, 2, 1, 4, 3, dtype=torch.float32)
    docs = torch.zeros(2, 29, dtype=torch.int64)
    docs[:, :boundary] = -3
    docs[:, boundary:] = boundary
    output, state = gated_delta_rule(*inputs, docs, chunk_size=8, backend=backend)

    grads = torch.autograd.grad(
        [output[:, boundary:], state], inputs, [torch.randn(2, 29 - boundary, 2, 3), torch.randn_like(state)]
    )
    for grad in grads[:5]:
        assert (grad[:, :boundary] == 0).all() and (grad[:, boundary + 1 :] != 0).any()
    assert (grads[3][:, boundary] == 0).all(), "a first token's own decay must have no effect"
    assert (grads[5] == 0).all()

    others = make_inputs(2, 29, 2, 1, 4, 3, dtype=torch.float32, max_decay=30.0)
    mixed = [torch.cat([o[:, :boundary], x[:, boundary:]], 1) for x, o in zip(inputs, others, strict=True)][
        :5
    ]
    mixed.append(others[5])
    other_output, other_state = gated_delta_rule(*mixed, docs, chunk_size=8, backend=backend)
    assert_same_bits([other_output[:, boundary:], other_state], [output[:, boundary:], state])
    assert not torch.equal(other_output[:, :boundary], output[:, :boundary])


def test_a_document_that_began_earlier_continues_from_the_state():
    torch.manual_seed(0)
    inputs = make_inputs(1, 9, 1, 1, 4, 3)
    docs = torch.full((1, 9), -4)
    assert_same_bits(
        gated_delta_rule(*inputs, docs, chunk_size=4), gated_delta_rule(*inputs, None, chunk_size=4)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate", [0.0, -1e4, -torch.inf])
def test_extreme_gates_and_strengths(dtype, gate):
    torch.manual_seed(1)
    inputs = make_inputs(1, 150, 2, 1, 8, 8, dtype=dtype, max_beta=2.0)
    with torch.no_grad():
        inputs[3][:, ::7] = gate
        inputs[4][:, ::3] = 2.0
    chunk, reference = (
        with_grads(gated_delta_rule(*inputs, backend=backend), inputs) for backend in ("chunk", "reference")
    )
    if gate == -torch.inf:  # autograd of the reference has no gradient of exp at -inf times 0
        reference[5] = reference[5].nan_to_num(0.0)
    assert_close(chunk, reference, tolerance=2e-5 if dtype == torch.float32 else 1e-10)


def test_gradcheck():
    torch.manual_seed(0)
    inputs = make_inputs(1, 5, 1, 2, 2, 3)
    docs = torch.tensor([[-1, -1, 2, 2, 2]])
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x, docs, chunk_size=2), inputs)


def test_bf16_inputs_stay_within_the_bounds_of_the_design():
    torch.manual_seed(0)
    exact = make_inputs(2, 200, 2, 2, 32, 32)
    rounded = [x.detach().to(torch.bfloat16).requires_grad_() for x in exact[:3]]
    rounded += [exact[3].detach().float().requires_grad_()]
    rounded += [
        exact[4].detach().to(torch.bfloat16).requires_grad_(),
        exact[5].detach().float().requires_grad_(),
    ]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    low = with_grads(gated_delta_rule(*rounded), rounded)
    assert [x.dtype for x in low] == [torch.bfloat16, torch.float32, *(x.dtype for x in rounded)]
    high = with_grads(gated_delta_rule(*exact, backend="reference"), exact)
    assert_close(low[:2], high[:2], tolerance=5e-3)
    assert_close(low[2:], high[2:], tolerance=8e-3)


@pytest.mark.parametrize("used", [0, 1])
def test_either_output_may_be_unused(used):
    torch.manual_seed(0)
    inputs = make_inputs(1, 11, 1, 1, 3, 2)
    chunk, reference = (
        torch.autograd.grad(
            gated_delta_rule(*inputs, chunk_size=4, backend=backend)[used].sum(),
            inputs,
            allow_unused=True,
            materialize_grads=True,
        )
        for backend in ("chunk", "reference")
    )
    assert_close(chunk, reference)


def test_no_uninitialised_memory_is_read():
    torch.manual_seed(0)
    inputs = make_inputs(2, 37, 2, 2, 4, 3)
    docs = documents(2, 37)
    with poisoned_memory():
        poisoned = with_grads(gated_delta_rule(*inputs, docs, chunk_size=8), inputs)
    assert_close(poisoned, with_grads(gated_delta_rule(*inputs, docs, backend="reference"), inputs))


def test_only_the_inputs_are_saved():
    torch.manual_seed(0)
    inputs = make_inputs(2, 37, 2, 2, 4, 3)
    with saved_tensors() as saved:
        gated_delta_rule(*inputs)
    assert {x.data_ptr() for x in saved} <= {x.data_ptr() for x in inputs}


@pytest.mark.parametrize("with_docs", [False, True])
def test_operation_is_well_formed(with_docs):
    torch.manual_seed(0)
    inputs = make_inputs(1, 5, 1, 2, 2, 3)
    docs = documents(1, 5) if with_docs else None
    torch.library.opcheck(torch.ops.stateflow.gated_delta_rule, (*inputs, docs, 1.0, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(v_BTHV=torch.zeros(1, 4, 3, 2)), "3 value heads are no multiple of the 2 key heads"),
        (dict(g_BTH=torch.zeros(1, 4, 3)), r"g \[1, 4, 3\]"),
        (dict(g_BTH=torch.zeros(1, 4, 2, dtype=torch.bfloat16)), "g has torch.bfloat16"),
        (dict(state_BHKV=torch.zeros(1, 2, 3, 2, dtype=torch.bfloat16)), "state has torch.bfloat16"),
        (dict(state_BHKV=torch.zeros(1, 2, 2, 3)), r"must be \[1, 2, 3, 2\]"),
        (dict(q_BTHK=torch.zeros(1, 4, 1, 3)), "q .* and k .* must be"),
        (dict(chunk_size=0), "chunk_size must be at least 1, got 0"),
        (dict(backend="kernel"), "unknown backend 'kernel'"),
    ],
)
def test_refusals(change, message):
    arguments = dict(
        q_BTHK=torch.zeros(1, 4, 2, 3),
        k_BTHK=torch.zeros(1, 4, 2, 3),
        v_BTHV=torch.zeros(1, 4, 2, 2),
        g_BTH=torch.zeros(1, 4, 2),
        beta_BTH=torch.zeros(1, 4, 2),
        state_BHKV=torch.zeros(1, 2, 3, 2),
    )
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**(arguments | change))
