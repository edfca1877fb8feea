"""What every recurrence must keep: the chunk form is the definition, and neither cuts nor documents leave a trace."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recurrence.op_testing import (
    assert_close,
    assert_same_bits,
    documents,
    poisoned_memory,
    saved_tensors,
    with_grads,
)
from tests.recurrence.recurrences import RECURRENCES

every_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES.values(), ids=RECURRENCES)

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


def check_chunk_form(recurrence, inputs, docs, chunk_size, **options):
    chunk = recurrence.function(*inputs, docs, chunk_size=chunk_size, backend="chunk", **options)
    reference = recurrence.function(*inputs, docs, backend="reference", **options)
    assert_close(with_grads(chunk, inputs), with_grads(reference, inputs))


@settings(max_examples=40)
@given(**SHAPES, max_beta=st.sampled_from([1.0, 2.0]), scale=st.sampled_from([None, 0.3]))
def test_gated_delta_chunk_form_and_all_gradients_equal_the_recurrence(
    seed, batch, num_tokens, key_heads, repeats, k_dim, v_dim, chunk_size, with_docs, max_decay, max_beta, scale
):
    torch.manual_seed(seed)
    inputs = RECURRENCES["gdn"].make_inputs(
        batch, num_tokens, key_heads, repeats, k_dim, v_dim, max_beta=max_beta, max_decay=max_decay
    )
    docs = documents(batch, num_tokens) if with_docs else None
    check_chunk_form(RECURRENCES["gdn"], inputs, docs, chunk_size, scale=scale)


@settings(max_examples=40)
@given(**SHAPES, norm_eps=st.sampled_from([1e-5, 0.1]), A_floor=st.sampled_from([1e-4, 0.9]))
def test_mamba3_chunk_form_and_all_gradients_equal_the_recurrence(
    seed, batch, num_tokens, key_heads, repeats, k_dim, v_dim, chunk_size, with_docs, max_decay, norm_eps, A_floor
):
    torch.manual_seed(seed)
    inputs = RECURRENCES["mamba3"].make_inputs(
        batch, num_tokens, key_heads, repeats, k_dim, v_dim, max_decay=max_decay
    )
    docs = documents(batch, num_tokens) if with_docs else None
    check_chunk_form(RECURRENCES["mamba3"], inputs, docs, chunk_size, norm_eps=norm_eps, A_floor=A_floor)


@every_recurrence
@settings(max_examples=20)
@given(**SHAPES, data=st.data())
def test_cuts_anywhere_change_nothing(
    recurrence, seed, batch, num_tokens, key_heads, repeats, k_dim, v_dim, chunk_size, with_docs, max_decay, data
):
    torch.manual_seed(seed)
    inputs = recurrence.make_inputs(batch, num_tokens, key_heads, repeats, k_dim, v_dim, max_decay=max_decay)
    docs = documents(batch, num_tokens) if with_docs else None
    cuts = data.draw(st.lists(st.integers(1, max(1, num_tokens - 1)), unique=True, max_size=4).map(sorted))
    cuts = [cut for cut in cuts if cut < num_tokens]
    whole = with_grads(recurrence.function(*inputs, docs, chunk_size=chunk_size), inputs)
    pieces = recurrence.run_in_pieces(inputs, docs, cuts, chunk_size=chunk_size)
    assert_close(with_grads(pieces, inputs), whole)


@every_recurrence
@settings(max_examples=20)
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
    recurrence, seed, batch, key_heads, repeats, k_dim, v_dim, chunk_size, last, with_docs, cut_chunks
):
    torch.manual_seed(seed)
    num_tokens = 4 * chunk_size + min(last, chunk_size)
    inputs = recurrence.make_inputs(batch, num_tokens, key_heads, repeats, k_dim, v_dim, dtype=torch.float32)
    docs = documents(batch, num_tokens, rate=0.02) if with_docs else None
    cuts = [chunk_size * c for c in sorted(cut_chunks)]
    check_same_bits(recurrence, inputs, docs, cuts, chunk_size)


def check_same_bits(recurrence, inputs, docs, cuts, chunk_size):
    by_token, _, states = recurrence.parts(inputs)  # parameters' gradients are sums over all tokens
    whole = with_grads(recurrence.function(*inputs, docs, chunk_size=chunk_size), [*by_token, *states])
    pieces = recurrence.run_in_pieces(inputs, docs, cuts, chunk_size=chunk_size)
    assert_same_bits(with_grads(pieces, [*by_token, *states]), whole)


@every_recurrence
@pytest.mark.parametrize("num_threads", [1, 2])
def test_same_bits_with_one_head_and_several_threads(recurrence, num_threads):
    # One matrix a product: the case where the library shares a single product among threads.
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    try:
        inputs = recurrence.make_inputs(1, 211, 1, 1, 5, 48, dtype=torch.float32)
        check_same_bits(recurrence, inputs, None, [64, 128, 192], 64)
    finally:
        torch.set_num_threads(1)


@every_recurrence
@pytest.mark.parametrize("backend", ["chunk", "reference"])
@pytest.mark.parametrize("boundary", [1, 8, 13, 16])
def test_documents_are_isolated_exactly(recurrence, backend, boundary):
    torch.manual_seed(boundary)
    inputs = recurrence.make_inputs(2, 29, 2, 1, 4, 3, dtype=torch.float32)
    docs = torch.zeros(2, 29, dtype=torch.int64)
    docs[:, :boundary] = -3
    docs[:, boundary:] = boundary
    output, *states = recurrence.function(*inputs, docs, chunk_size=8, backend=backend)

    by_token, parameters, incoming = recurrence.parts(inputs)
    grads = with_grads([output[:, boundary:], *states], [*by_token, *incoming])[1 + len(states) :]
    for grad in grads[: len(by_token)]:
        assert (grad[:, :boundary] == 0).all() and (grad[:, boundary + 1 :] != 0).any()
    decay = grads[recurrence.own_decay]
    assert (decay[:, boundary] == 0).all(), "a first token's own decay must have no effect"
    assert all((grad == 0).all() for grad in grads[len(by_token) :])

    others = recurrence.make_inputs(2, 29, 2, 1, 4, 3, dtype=torch.float32, max_decay=30.0)
    other_tokens, _, other_incoming = recurrence.parts(others)
    mixed = [torch.cat([o[:, :boundary], x[:, boundary:]], 1) for x, o in zip(by_token, other_tokens, strict=True)]
    other_output, *other_states = recurrence.function(
        *mixed, *parameters, *other_incoming, docs, chunk_size=8, backend=backend
    )
    assert_same_bits([other_output[:, boundary:], *other_states], [output[:, boundary:], *states])
    assert not torch.equal(other_output[:, :boundary], output[:, :boundary])


@every_recurrence
def test_a_document_that_began_earlier_continues_from_the_state(recurrence):
    torch.manual_seed(0)
    inputs = recurrence.make_inputs(1, 9, 1, 1, 4, 3)
    docs = torch.full((1, 9), -4)
    assert_same_bits(
        recurrence.function(*inputs, docs, chunk_size=4), recurrence.function(*inputs, None, chunk_size=4)
    )


@every_recurrence
@pytest.mark.parametrize("wide", ["tokens", "states"])
def test_all_is_computed_in_the_widest_type(recurrence, wide):
    torch.manual_seed(0)
    inputs = recurrence.make_inputs(2, 11, 1, 2, 4, 3)
    by_token, parameters, states = recurrence.parts([x.detach().float() for x in inputs])
    gates = by_token[recurrence.own_decay :] if wide == "states" else by_token
    by_token = [x.double() if any(x is gate for gate in gates) else x for x in by_token]
    states = [x.double() for x in states] if wide == "states" else states
    inputs = [x.requires_grad_() for x in (*by_token, *parameters, *states)]
    chunk, reference = (
        with_grads(recurrence.function(*inputs, chunk_size=4, backend=b), inputs) for b in ("chunk", "reference")
    )
    assert [x.dtype for x in chunk[1 + recurrence.num_states :]] == [x.dtype for x in inputs]
    for found, expected in zip(chunk, reference, strict=True):
        assert_close([found], [expected], tolerance=1e-12 if found.dtype == expected.dtype == torch.float64 else 1e-6)


@every_recurrence
def test_gradcheck(recurrence):
    torch.manual_seed(0)
    inputs = recurrence.make_inputs(1, 5, 1, 2, 2, 3)
    docs = torch.tensor([[-1, -1, 2, 2, 2]])
    assert torch.autograd.gradcheck(
        lambda *x: recurrence.function(*x, docs, chunk_size=2), inputs, fast_mode=len(inputs) > 6
    )


@every_recurrence
def test_any_output_may_be_unused(recurrence):
    torch.manual_seed(0)
    inputs = recurrence.make_inputs(1, 11, 1, 1, 3, 2)
    for used in range(1 + recurrence.num_states):
        chunk, reference = (
            torch.autograd.grad(
                recurrence.function(*inputs, chunk_size=4, backend=backend)[used].sum(),
                inputs,
                allow_unused=True,
                materialize_grads=True,
            )
            for backend in ("chunk", "reference")
        )
        assert_close(chunk, reference)


@every_recurrence
def test_no_uninitialised_memory_is_read(recurrence):
    torch.manual_seed(0)
    inputs = recurrence.make_inputs(2, 37, 2, 2, 4, 3)
    docs = documents(2, 37)
    with poisoned_memory():
        poisoned = with_grads(recurrence.function(*inputs, docs, chunk_size=8), inputs)
    assert_close(poisoned, with_grads(recurrence.function(*inputs, docs, backend="reference"), inputs))


@every_recurrence
def test_only_the_inputs_are_saved(recurrence):
    torch.manual_seed(0)
    inputs = recurrence.make_inputs(2, 37, 2, 2, 4, 3)
    with saved_tensors() as saved:
        recurrence.function(*inputs)
    assert {x.data_ptr() for x in saved} <= {x.data_ptr() for x in inputs}


@every_recurrence
@pytest.mark.parametrize("with_docs", [False, True])
def test_operation_is_well_formed(recurrence, with_docs):
    torch.manual_seed(0)
    inputs = recurrence.make_inputs(1, 5, 1, 2, 2, 3)
    docs = documents(1, 5) if with_docs else None
    torch.library.opcheck(recurrence.operation, (*inputs, docs, *recurrence.constants))
