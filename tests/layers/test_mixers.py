import copy
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from stateflow.chunks import document_starts
from stateflow.layers import Attention, GatedDeltaNet, HeadGroups, Mamba3, Mixer
from tests.recurrence.op_testing import assert_close, assert_same_bits, documents, with_grads

DIM = 10
KINDS = ("gdn", "gdn with more value heads", "mamba3", "attention", "attention with reset positions")


def make_mixer(kind: str, dtype: torch.dtype = torch.float64, backend: str = "chunk") -> Mixer:
    torch.manual_seed(11)
    if kind == "gdn":
        mixer = GatedDeltaNet(DIM, 2, head_k_dim=4, head_v_dim=4, chunk_size=8, backend=backend)
    elif kind == "gdn with more value heads":
        mixer = GatedDeltaNet(
            DIM, 1, 3, head_k_dim=3, head_v_dim=5, conv_size=3, allow_neg_eigval=True, backend=backend
        )
    elif kind == "mamba3":
        mixer = Mamba3(DIM, 3, head_dim=4, state_dim=6, num_angles=2, chunk_size=8, backend=backend)
    else:
        reset = kind == "attention with reset positions"
        mixer = Attention(DIM, 4, 2, head_dim=6, rope_theta=50.0, rope_reset=reset, backend=backend)
    for parameter in mixer.parameters():  # larger than at initialisation, so that nothing stays linear
        parameter.data = parameter.data * (20.0 if parameter.dim() == 2 else 1.0)
    return mixer.to(dtype)


def initial_state(mixer: Mixer, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random where a state is carried from before the sequence, empty windows otherwise."""
    return [torch.randn_like(s).requires_grad_() for s in mixer.initial_state(2, "cpu", dtype)]


def run_in_pieces(mixer: Mixer, x: Tensor, state, docs: Tensor | None, bounds: list[int]) -> list[Tensor]:
    outputs = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        piece_docs = None if docs is None else docs[:, start:stop] - start
        y, state = mixer(x[:, start:stop], tuple(state), piece_docs)
        outputs.append(y)
    return [torch.cat(outputs, dim=1), *state]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**20),
    num_tokens=st.integers(1, 24),
    cuts=st.sets(st.integers(1, 23), min_size=1, max_size=4),
    with_docs=st.booleans(),
)
def test_chunks_equal_the_whole_and_the_reference(kind, seed, num_tokens, cuts, with_docs):
    """Outputs, final state, and gradients of the input, the initial state and every parameter."""
    torch.manual_seed(seed)
    x = torch.randn(2, num_tokens, DIM, dtype=torch.float64).requires_grad_()
    # A document that began before the sequence would need a prefix with it: the sequence begins one.
    docs = documents(2, num_tokens).clamp(min=0) if with_docs else None
    bounds = [0, *sorted(c for c in cuts if c < num_tokens), num_tokens]
    results = []
    for backend, pieces in (("chunk", bounds), ("chunk", [0, num_tokens]), ("reference", [0, num_tokens])):
        mixer = make_mixer(kind, backend=backend)
        torch.manual_seed(seed)
        state = initial_state(mixer)
        outputs = run_in_pieces(mixer, x, state, docs, pieces)
        carried = [s for s in state if s.numel()]
        results.append(with_grads(outputs, [x, *carried, *mixer.parameters()]))
    assert_close(results[0], results[2])
    assert_close(results[1], results[2])


@pytest.mark.parametrize("kind", KINDS)
def test_documents_that_count_from_the_sequence_are_refused(kind):
    mixer, x = make_mixer(kind), torch.randn(1, 12, DIM, dtype=torch.float64)
    doc_start = torch.tensor([[0] * 3 + [3] * 9])
    _, state = mixer(x[:, :6], None, doc_start[:, :6])
    with pytest.raises(ValueError, match=re.escape("docs[0, 0] = 3: this token's document starts at the token (0)")):
        mixer(x[:, 6:], state, doc_start[:, 6:])
    for docs in (doc_start.double(), doc_start > 0, doc_start[:, 1:]):
        with pytest.raises(ValueError, match=r"must be int64 \(1, 12\)"):
            mixer(x, None, docs)


@pytest.mark.parametrize(("always_docs", "count"), [(False, 6), (True, 3)])
@pytest.mark.parametrize("kind", ["gdn", "mamba3"])
def test_as_few_variants_are_compiled_as_the_docs_say(kind, always_docs, count):
    torch._dynamo.reset()
    counter = CompileCounter()
    mixer = torch.compile(make_mixer(kind), fullgraph=True, backend=counter)
    x = torch.randn(2, 40, DIM, dtype=torch.float64)
    for density in (0, 0.2):
        docs = document_starts(torch.rand(2, 40) < density) if density or always_docs else None
        for lengths in ([40], [8] * 5, [13, 1, 2, 24], [12, 16, 12]):
            state = [s.requires_grad_() for s in mixer.initial_state(2, "cpu", x.dtype)]
            bounds = [0, *itertools.accumulate(lengths)]
            run_in_pieces(mixer, x, state, docs, bounds)[0].sum().backward()
    assert counter.frame_count == count
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_isolated_exactly(kind):
    mixer = make_mixer(kind)
    torch.manual_seed(0)
    x = torch.randn(2, 12, DIM, dtype=torch.float64).requires_grad_()
    docs = torch.tensor([[0] * 5 + [5] * 7, [0] * 9 + [9] * 3])
    y, _ = mixer(x, None, docs)
    (grad,) = torch.autograd.grad(y[0, 5:].sum() + y[1, 9:].sum(), x)
    assert (grad[0, :5] == 0).all() and (grad[1, :9] == 0).all() and (grad[0, 5:] != 0).all()


def test_a_document_behaves_as_if_alone():
    torch.manual_seed(0)
    x = torch.randn(1, 12, DIM, dtype=torch.float64)
    docs = torch.tensor([[0] * 5 + [5] * 7])
    for kind in KINDS:
        mixer = make_mixer(kind)
        packed, alone = mixer(x, None, docs)[0][:, 5:], mixer(x[:, 5:])[0]
        # Rotary scores depend on distances only, so that restarting positions or not is the same function.
        assert_close([packed], [alone], tolerance=1e-12)


def test_positions_restart_only_when_asked():
    torch.manual_seed(0)
    x = torch.randn(1, 6, DIM, dtype=torch.float64)
    docs = torch.tensor([[-4, -4, 2, 2, 2, 2]])
    for kind, restarts in (("attention", False), ("attention with reset positions", True)):
        mixer = make_mixer(kind)
        state = tuple(torch.zeros(1, 4, 2, 6, dtype=torch.float64) for _ in range(2))
        keys = mixer.update(x, state, docs)[1][0]
        unrotated = mixer.wk(x).unflatten(-1, (-1, 6))
        assert torch.equal(keys[:, 2], unrotated[:, 2]) == restarts
        first = mixer.update(x[:, :1], tuple(s[:, :0] for s in state), None)[1][0]
        assert_close([first], [unrotated[:, :1]])
        assert_close([keys[:, :1].norm()], [unrotated[:, :1].norm()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_states_are_as_their_spec_says(kind, dtype):
    mixer = make_mixer(kind, dtype)
    specs = mixer.state_spec(dtype)
    assert len({spec.name for spec in specs}) == len(specs)
    carried = torch.promote_types(dtype, torch.float32)
    x = torch.randn(2, 7, DIM, dtype=dtype)
    state = mixer.initial_state(2, "cpu", dtype)
    for num_seen in (0, 7):
        y, update = mixer.update(x, state, None)
        assert y.dtype == dtype and y.shape == x.shape
        for spec, tensor, new in zip(specs, state, update, strict=True):
            is_window = spec.kind == "window"
            tokens, new_tokens = ((num_seen,), (7,)) if is_window else ((), ())
            assert tensor.shape == (2, *tokens, *spec.shape) and new.shape == (2, *new_tokens, *spec.shape)
            assert tensor.dtype == new.dtype == spec.dtype == (dtype if is_window else carried)
        previous, state = state, mixer.advance(state, update)
    assert_same_bits(mixer(x, previous)[1], state)


@pytest.mark.parametrize("kind", KINDS)
def test_update_is_pre_core_out_and_replays_to_the_same_bits(kind):
    mixer = make_mixer(kind, torch.float32)
    x, state = torch.randn(2, 9, DIM), mixer.initial_state(2, "cpu", torch.float32)
    operands, side, first = mixer.pre(x, state, None)
    mixed, rest = mixer.core(operands, state, None)
    y, update = mixer.update(x, state, None)
    assert_same_bits([mixer.out(mixed, side), *first, *rest], [y, *update])
    assert_same_bits(mixer.update(x, state, None)[1], update)


@pytest.mark.parametrize("kind", KINDS)
def test_a_detached_state_truncates_the_gradient(kind):
    mixer = make_mixer(kind)
    torch.manual_seed(0)
    x = torch.randn(1, 10, DIM, dtype=torch.float64).requires_grad_()
    _, state = mixer(x[:, :6])
    (through,) = torch.autograd.grad(mixer(x[:, 6:], state)[0].sum(), x, retain_graph=True)
    (cut,) = torch.autograd.grad(mixer(x[:, 6:], tuple(s.detach() for s in state))[0].sum(), x)
    assert (through[:, :6] != 0).any() and (cut[:, :6] == 0).all()
    assert_close([cut[:, 6:]], [through[:, 6:]])


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_declares_its_sharding(kind):
    mixer = make_mixer(kind)
    parameters = dict(mixer.named_parameters())
    assert mixer.sharding.keys() == parameters.keys()
    degree_divides = mixer.sharded_head_counts().values()
    assert all(count >= 1 for count in degree_divides)
    for name, how in mixer.sharding.items():
        if how == "groups":
            assert len(parameters[name]) % len(mixer.groups.sizes) == 0
        elif how != "replicate":
            size = parameters[name].shape[0 if how == "heads" else 1]
            assert any(size % count == 0 for count in degree_divides)


def test_groups_of_a_rank_that_begins_or_ends_within_one():
    whole = HeadGroups.whole(20, 5)
    assert whole == HeadGroups(0, (4, 4, 4, 4, 4)) and whole.are_equal()
    first, second = (whole.part(rank, 2) for rank in range(2))
    assert (first, second) == (HeadGroups(0, (4, 4, 2)), HeadGroups(2, (2, 4, 4)))
    assert [whole.part(rank, 4).first for rank in range(4)] == [0, 1, 2, 3]
    assert [whole.part(rank, 4).sizes for rank in range(4)] == [(4, 1), (3, 2), (2, 3), (1, 4)]
    assert [HeadGroups.whole(8, 2).part(rank, 4) for rank in range(4)] == [
        HeadGroups(group, (2,)) for group in (0, 0, 1, 1)
    ]
    assert list(second.runs()) == [(slice(0, 2), slice(0, 1)), (slice(2, 10), slice(1, 3))]


def parts_of(whole: Mixer, num_ranks: int):
    """For each rank its part of the mixer, and where its heads and groups lie in the whole."""
    share = sum(whole.groups.sizes) // num_ranks
    for rank in range(num_ranks):
        part = copy.copy(whole)
        part.groups = whole.groups.part(rank, num_ranks)
        first = part.groups.first
        yield part, slice(rank * share, (rank + 1) * share), slice(first, first + len(part.groups.sizes))


def whole_core(mixer: Mixer):
    """Operands, state and mixed values of a second chunk."""
    torch.manual_seed(0)
    _, state = mixer(torch.randn(2, 5, DIM, dtype=torch.float64))
    operands, _, _ = mixer.pre(torch.randn(2, 9, DIM, dtype=torch.float64), state, None)
    return operands, state, mixer.core(operands, state, None)[0]


def test_attention_of_heads_that_share_a_key_head_with_another_rank():
    whole = Attention(DIM, 6, 3, head_dim=4).double()
    (q, k, v), (k_prefix, v_prefix), mixed = whole_core(whole)
    for part, heads, groups in parts_of(whole, 2):
        assert not part.groups.are_equal()
        operands = q[:, :, heads], k[:, :, groups], v[:, :, groups]
        y, _ = part.core(operands, (k_prefix[:, :, groups], v_prefix[:, :, groups]), None)
        assert_close([y], [mixed[:, :, heads]])


def test_recurrence_of_heads_that_share_a_key_head_with_another_rank():
    whole = GatedDeltaNet(DIM, 3, 6, head_k_dim=4, head_v_dim=5).double()
    (q, k, *by_value_head), (*tails, recurrent), mixed = whole_core(whole)
    for part, heads, groups in parts_of(whole, 2):
        assert not part.groups.are_equal()
        operands = q[:, :, groups], k[:, :, groups], *(x[:, :, heads] for x in by_value_head)
        y, _ = part.core(operands, (*tails, recurrent[:, heads]), None)
        assert_close([y], [mixed[:, :, heads]])


def test_gated_delta_net_is_its_published_equations():
    mixer = make_mixer("gdn with more value heads")
    torch.manual_seed(0)
    x = torch.randn(1, 6, DIM, dtype=torch.float64)

    def conv(name: str) -> Tensor:
        weight = getattr(mixer, f"{name}_conv1d").weight
        inputs = F.pad(F.linear(x, getattr(mixer, f"{name}_proj").weight).mT, (2, 0))
        return F.silu(F.conv1d(inputs, weight, groups=len(weight))).mT

    q, k = (conv(name) / (conv(name).square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in "qk")
    v = conv("v").unflatten(-1, (3, 5))
    g = -mixer.decay.A_log.exp() * F.softplus(mixer.a_proj(x) + mixer.decay.dt_bias)
    beta = 2 * mixer.b_proj(x).sigmoid()
    gate = mixer.g_proj(x).unflatten(-1, (3, 5))
    heads = []
    for h in range(3):
        state, outputs = torch.zeros(3, 5, dtype=torch.float64), []
        for t in range(6):
            state = g[0, t, h].exp() * state
            state = state + beta[0, t, h] * torch.outer(k[0, t], v[0, t, h] - state.T @ k[0, t])
            o = 3**-0.5 * state.T @ q[0, t]
            o = o * torch.rsqrt(o.square().mean() + 1e-6) * mixer.o_norm.weight
            outputs.append(o * F.silu(gate[0, t, h]))
        heads.append(torch.stack(outputs))
    expected = mixer.o_proj(torch.cat(heads, dim=-1))[None]
    assert_close([mixer(x)[0]], [expected])


def test_attention_is_torch_attention_on_rotated_heads():
    mixer = make_mixer("attention")
    torch.manual_seed(0)
    x = torch.randn(2, 8, DIM, dtype=torch.float64)
    angle = torch.arange(8.0, dtype=torch.float64)[:, None] * 50.0 ** (-torch.arange(3.0).double() / 3)
    turn = torch.polar(torch.ones_like(angle), angle)

    def heads(linear: torch.nn.Linear, rotated: bool) -> Tensor:
        y = linear(x).unflatten(-1, (-1, 6)).transpose(1, 2)
        if not rotated:
            return y
        z = torch.complex(y[..., :3], y[..., 3:]) * turn
        return torch.cat([z.real, z.imag], dim=-1)

    q, k, v = heads(mixer.wq, True), heads(mixer.wk, True), heads(mixer.wv, False)
    k, v = (y.repeat_interleave(2, dim=1) for y in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close([mixer(x)[0]], [mixer.wo(mixed.transpose(1, 2).flatten(2))])


def test_decay_gate_is_float32_whatever_the_activations():
    mixer = make_mixer("gdn", torch.bfloat16)
    a, b = torch.randn(2, 1, 20, 2, dtype=torch.bfloat16)
    g, beta = mixer.decay(a, b, True, "chunk")
    assert g.dtype == beta.dtype == torch.float32
    assert (g < 0).all() and (beta > 0).all() and beta.amax() > 1


def test_refusals():
    with pytest.raises(ValueError, match="num_angles = 4 must be from 1 to half of state_dim = 6: use 3"):
        Mamba3(DIM, 2, state_dim=6, num_angles=4)
    with pytest.raises(ValueError, match="num_v_heads = 5 is no multiple of num_heads = 2: use 4"):
        GatedDeltaNet(DIM, 2, 5, head_k_dim=4, head_v_dim=4)
    with pytest.raises(ValueError, match="num_kv_heads = 3 does not divide num_heads = 4: use 2"):
        Attention(DIM, 4, 3, head_dim=4)
    with pytest.raises(ValueError, match="head_dim = 5 must be even"):
        Attention(DIM, 4, head_dim=5)
    mixer = make_mixer("gdn", torch.float32)
    state = tuple(s.to(torch.bfloat16) for s in mixer.initial_state(1, "cpu", torch.float32))
    with pytest.raises(ValueError, match="cast_forward_inputs=False"):
        mixer(torch.randn(1, 3, DIM), state)
