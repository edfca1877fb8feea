"""The gated delta rule on the Triton kernels, against the recurrence token by token in float64.

Interpreted where there is no GPU, which is slow: few and small examples. The GPU's own are in test_gated_delta_on_gpu.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import stateflow_kernels.gated_delta_rule as kernels
import stateflow_kernels.plans
from stateflow.layers import GatedDeltaNet
from stateflow.recurrence import gated_delta_kernels, gated_delta_rule, self_check
from stateflow_kernels.gated_delta_rule import Plan, Tile
from tests.kernels.kernel_testing import on_devices, only_own_memory
from tests.recurrence.op_testing import (
    assert_close,
    assert_same_bits,
    documents,
    poisoned_memory,
    saved_tensors,
)

# o, state, then the gradients of q, k, v, g, beta, state: relative L2 errors.
BOUNDS = {
    torch.float32: [1e-5] * 8,
    torch.bfloat16: [5e-3, 5e-3, 8e-3, 8e-3, 8e-3, 2e-2, 2e-2, 8e-3],
    torch.float16: [1e-3, 1e-3, 2e-3, 2e-3, 2e-3, 5e-3, 5e-3, 2e-3],
}
TOKEN_INPUTS = 5  # q, k, v, g, beta; then the state


def make_inputs(
    batch: int,
    num_tokens: int,
    key_heads: int,
    repeats: int,
    k_dim: int,
    v_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    normalize: bool = False,
    max_beta: float = 1.0,
    max_decay: float = 1.0,
) -> list[Tensor]:
    """q, k (normalised here unless `normalize` leaves it to the operation), v, g, beta, state; requiring grad."""
    heads = key_heads * repeats
    q, k = (torch.randn(batch, num_tokens, key_heads, k_dim) for _ in range(2))
    if not normalize:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    inputs = [q.to(dtype), k.to(dtype), torch.randn(batch, num_tokens, heads, v_dim).to(dtype)]
    inputs += [-max_decay * torch.rand(batch, num_tokens, heads), max_beta * torch.rand(batch, num_tokens, heads)]
    inputs += [torch.randn(batch, heads, k_dim, v_dim)]
    return [x.to(device).requires_grad_() for x in inputs]


def exact(inputs: list[Tensor]) -> list[Tensor]:
    return [x.detach().cpu().double().requires_grad_() for x in inputs]


def grads_like(outputs) -> list[Tensor]:
    """The same random gradients for outputs of any device and type, exact in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float32).bfloat16() for o in outputs]
    return [grad.to(o.device, o.dtype) for grad, o in zip(grads, outputs, strict=True)]


def run(inputs: list[Tensor], docs: Tensor | None, **options) -> list[Tensor]:
    """Both outputs and all gradients."""
    docs = None if docs is None else docs.to(inputs[0].device)
    outputs = gated_delta_rule(*inputs, docs, **options)
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads_like(outputs))]


def check(inputs: list[Tensor], docs: Tensor | None, bounds: list[float] | None = None, **options) -> list[Tensor]:
    """Compares the kernels with the reference in float64; returns what the kernels gave."""
    results = run(inputs, docs, backend="triton", **options)
    expected = run(exact(inputs), docs, backend="reference", **options)
    assert [x.dtype for x in results[2:]] == [x.dtype for x in inputs]
    bounds = BOUNDS[inputs[0].dtype] if bounds is None else bounds
    for index, (result, reference, bound) in enumerate(zip(results, expected, bounds, strict=True)):
        result, largest = result.detach().cpu().double(), reference.abs().max().item()
        assert result.isfinite().all(), index
        # What is exactly or nearly zero cannot be compared relatively.
        error, norm = (result - reference).norm().item(), reference.norm().item()
        assert error <= bound * norm + 1e-6, f"tensor {index}: error {error}, norm {norm}, largest {largest}"
    return results


def plan_for_heads(k_dim: int, v_dim: int, dtype: torch.dtype, device: str) -> Plan:
    return stateflow_kernels.plans.fallback_plan(torch.device(device), dtype, k_dim, v_dim)


def use_plans(monkeypatch, plan_for) -> None:
    monkeypatch.setattr(stateflow_kernels.plans, "plan_for", plan_for)
    monkeypatch.setattr(gated_delta_kernels, "_chosen", {})


def run_in_pieces(inputs: list[Tensor], docs: Tensor | None, cuts: list[int], **options) -> list[Tensor]:
    """`run` with the sequence cut and the state handed on."""
    *tokens, state = inputs
    docs = None if docs is None else docs.to(state.device)
    outputs = []
    for start, stop in zip([0, *cuts], [*cuts, tokens[0].shape[1]], strict=True):
        piece_docs = None if docs is None else docs[:, start:stop] - start
        output, state = gated_delta_rule(*(x[:, start:stop] for x in tokens), state, piece_docs, **options)
        outputs.append(output)
    outputs = (torch.cat(outputs, dim=1), state)
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads_like(outputs))]


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch):
    """On a GPU a plan that was replaced would make these tests say nothing."""
    monkeypatch.setattr(self_check, "_outcomes", {})
    monkeypatch.setattr(gated_delta_kernels, "_chosen", {})
    yield
    assert all(outcome.plan == plan for (_, plan), outcome in self_check._outcomes.items())


@pytest.mark.timeout(1200)  # a GPU compiles anew for each example
@on_devices
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 2),
    num_tokens=st.integers(1, 200),
    heads=st.sampled_from([(1, 1), (1, 2), (2, 1)]),
    k_dim=st.sampled_from([16, 32, 40, 72]),
    v_dim=st.sampled_from([16, 32, 40, 72]),
    with_docs=st.booleans(),
    normalize=st.booleans(),
    # At -1e4 in the interpreter as on a GPU: nothing is left, and nothing overflows.
    max_decay=st.sampled_from([0.0, 1.0, 1e4]),
    max_beta=st.sampled_from([1.0, 2.0]),
)
def test_outputs_and_all_gradients_equal_the_recurrence(
    device, seed, batch, num_tokens, heads, k_dim, v_dim, with_docs, normalize, max_decay, max_beta
):
    torch.manual_seed(seed)
    inputs = make_inputs(
        *(batch, num_tokens, *heads, k_dim, v_dim),
        device=device,
        normalize=normalize,
        max_decay=max_decay,
        max_beta=max_beta,
    )
    docs = documents(batch, num_tokens, rate=0.03) if with_docs else None
    # Sums over up to 64 tokens of beta up to 2 grow before they cancel.
    bounds = [3e-5 if max_beta > 1 else 1e-5] * 8
    check(inputs, docs, bounds, use_qk_l2norm_in_kernel=normalize)


@on_devices
@pytest.mark.parametrize("normalize", [False, pytest.param(True, marks=pytest.mark.other_triton)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(device, dtype, normalize):
    torch.manual_seed(0)
    inputs = make_inputs(1, 130, 1, 2, 40, 32, dtype=dtype, device=device, normalize=normalize)
    check(inputs, documents(1, 130, rate=0.03), use_qk_l2norm_in_kernel=normalize)


@on_devices
def test_gates_of_16_bits_get_gradients_of_16_bits(device):
    torch.manual_seed(0)
    inputs = make_inputs(1, 20, 1, 1, 16, 16, device=device, dtype=torch.bfloat16)
    inputs[4] = inputs[4].detach().bfloat16().requires_grad_()
    check(inputs, None, scale=0.7)
    arguments = (*inputs, None, 1.0, None, 1)  # the operation itself takes them, too
    outputs = torch.ops.stateflow.gated_delta_rule_triton(*arguments)[:2]
    grads = torch.autograd.grad(outputs, inputs, grads_like(outputs))
    assert [x.dtype for x in grads] == [x.dtype for x in inputs]


@on_devices
@pytest.mark.parametrize(("decay", "beta"), [(0.0, 0.0), (1e4, 2.0), (1e4, 1.0)])
def test_constant_gates(device, decay, beta):
    torch.manual_seed(0)
    inputs = make_inputs(1, 70, 1, 1, 16, 16, device=device)
    with torch.no_grad():
        inputs[3].fill_(-decay)
        inputs[4].fill_(beta)
    check(inputs, None)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuts_at_chunks_give_the_same_bits(device, dtype):
    """Of the outputs and every gradient, whatever the documents."""
    torch.manual_seed(0)
    inputs = make_inputs(1, 150, 1, 1, 16, 24, dtype=dtype, device=device, normalize=True)
    docs = documents(1, 150, rate=0.02)
    options = dict(backend="triton", use_qk_l2norm_in_kernel=True)
    assert_same_bits(run_in_pieces(inputs, docs, [64, 128], **options), run(inputs, docs, **options))


@on_devices
def test_cuts_anywhere_change_nothing_but_rounding(device):
    torch.manual_seed(0)
    inputs = make_inputs(1, 100, 1, 1, 16, 16, device=device)
    pieces = run_in_pieces(inputs, None, [1, 37], backend="triton")
    assert_close(pieces, run(inputs, None, backend="triton"), 1e-5)


@on_devices
def test_any_plan_gives_the_values_of_the_default(device, monkeypatch):
    """Cuts change no bit; other tiles change the order of sums."""
    torch.manual_seed(0)
    inputs = make_inputs(1, 130, 1, 1, 16, 40, device=device)
    docs = documents(1, 130, rate=0.02)
    default = run(inputs, docs, backend="triton")
    plan = plan_for_heads(16, 40, torch.float32, device)
    overlap = dict(cuts=(0.4, 0.7), backward_cuts=(0.6,), overlap_backward=True)
    tiles = {f.name: Tile(16, 4, 1) for f in dataclasses.fields(plan) if isinstance(getattr(plan, f.name), Tile)}
    for other, same_bits in ((dataclasses.replace(plan, **overlap), True), (Plan(**tiles, **overlap), False)):
        use_plans(monkeypatch, lambda *_, other=other, **__: other)
        results = run(inputs, docs, backend="triton")
        if same_bits:
            assert_same_bits(results, default)
        assert_close(results, default, 1e-5)


@pytest.mark.other_triton
@on_devices
def test_strided_and_expanded_tensors(device):
    torch.manual_seed(0)
    q, k, v, g, beta, state = (x.detach() for x in make_inputs(2, 66, 1, 2, 16, 24, device=device))
    inputs = [
        q.transpose(1, 3).contiguous().transpose(1, 3),
        k[:1].expand(2, -1, -1, -1),
        torch.stack([v, v], dim=-1)[..., 0],
        g.transpose(0, 2).contiguous().transpose(0, 2),
        beta[..., :1].expand(-1, -1, 2),
        state.mT.contiguous().mT,
    ]
    assert not any(x.is_contiguous() for x in inputs)
    docs = torch.tensor([[0] * 30 + [30] * 36], device=device).expand(2, -1)

    def grads(inputs: list[Tensor], backend: str) -> list[Tensor]:
        inputs = [x.requires_grad_() for x in inputs]
        o, new_state = gated_delta_rule(*inputs, docs.to(inputs[0].device), backend=backend)
        # Sums hand expanded gradients to the operation, the transpose one with other strides.
        return [o, new_state, *torch.autograd.grad(o.sum() + (new_state.mT * state.mT.to(o)).sum(), inputs)]

    expected = grads([x.cpu().double() for x in inputs], "reference")
    assert_close([x.cpu() for x in grads(inputs, "triton")], expected, 1e-5)


@on_devices
@pytest.mark.parametrize("used", [0, 1])
def test_either_output_may_be_unused(device, used):
    torch.manual_seed(0)
    inputs = make_inputs(1, 11, 1, 1, 16, 16, device=device)

    def grads(inputs: list[Tensor], backend: str) -> tuple[Tensor, ...]:
        output = gated_delta_rule(*inputs, backend=backend)[used]
        return torch.autograd.grad(output.sum(), inputs, allow_unused=True, materialize_grads=True)

    assert_close([x.cpu() for x in grads(inputs, "triton")], grads(exact(inputs), "reference"), 1e-5)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_are_isolated_exactly(device, dtype):
    """Other tokens and another state before a document's start: the same bits after it, and no gradient at all.

    The other tokens forget all: sums of gates that went on behind them would have lost digits.
    """
    torch.manual_seed(0)
    options = dict(dtype=dtype, device=device, normalize=True)
    inputs = make_inputs(1, 140, 1, 1, 16, 16, **options)
    other = make_inputs(1, 140, 1, 1, 16, 16, **options, max_decay=100.0)
    boundary = 90
    docs = torch.tensor([[-1] * boundary + [boundary] * (140 - boundary)], device=device)
    options = dict(backend="triton", use_qk_l2norm_in_kernel=True)
    o, state = gated_delta_rule(*inputs, docs, **options)
    with torch.no_grad():
        mixed = [torch.cat([b[:, :boundary], a[:, boundary:]], 1) for a, b in zip(inputs[:5], other[:5], strict=True)]
        mixed_o, mixed_state = gated_delta_rule(*mixed, other[5], docs, **options)
    assert_same_bits([mixed_o[:, boundary:], mixed_state], [o[:, boundary:], state])
    later = torch.autograd.grad([o[:, boundary:].sum() + state.sum()], inputs, retain_graph=True)
    for grad in (*(x[:, :boundary] for x in later[:5]), later[5]):
        assert torch.equal(grad, torch.zeros_like(grad))
    for grad in torch.autograd.grad([o[:, :boundary].sum()], inputs)[:5]:
        assert torch.equal(grad[:, boundary:], torch.zeros_like(grad[:, boundary:]))


@on_devices
def test_no_uninitialised_memory_is_read(device):
    torch.manual_seed(0)
    inputs = make_inputs(1, 66, 1, 2, 24, 40, device=device, normalize=True)
    docs = documents(1, 66, rate=0.03)
    with poisoned_memory():
        poisoned = run(inputs, docs, backend="triton", use_qk_l2norm_in_kernel=True)
    assert_same_bits(poisoned, run(inputs, docs, backend="triton", use_qk_l2norm_in_kernel=True))
    assert all(x.isfinite().all() for x in poisoned)


@pytest.mark.skipif(not stateflow_kernels.primitives.INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_no_other_memory_is_touched():
    torch.manual_seed(0)
    inputs = make_inputs(1, 66, 1, 2, 24, 40, normalize=True)
    with only_own_memory():
        run(inputs, documents(1, 66, rate=0.03), backend="triton", use_qk_l2norm_in_kernel=True)


@on_devices
def test_only_inputs_and_the_solve_are_saved(device):
    torch.manual_seed(0)
    inputs = make_inputs(1, 66, 1, 1, 16, 16, device=device)
    docs = documents(1, 66).to(device)
    with saved_tensors() as saved:
        gated_delta_rule(*inputs, docs, backend="triton")
    given = {x.data_ptr() for x in (*inputs, docs)}
    (solve,) = (x for x in saved if x.numel() and x.data_ptr() not in given)
    assert solve.shape == (1, 1, 2, 64, 64) and solve.dtype == torch.float32 and not solve.requires_grad


@on_devices
@pytest.mark.parametrize(
    ("dtype", "with_docs", "num_segments"), [(torch.float32, True, 1), (torch.bfloat16, False, 2)]
)
def test_operation_is_well_formed(device, dtype, with_docs, num_segments):
    torch.manual_seed(0)
    inputs = make_inputs(1, 3, 1, 1, 16, 16, device=device, dtype=dtype)
    docs = documents(1, 3).to(device) if with_docs else None
    torch.library.opcheck(torch.ops.stateflow.gated_delta_rule_triton, (*inputs, docs, 1.0, 1e-6, num_segments))


def make_layer(device: str, backend: str) -> GatedDeltaNet:
    torch.manual_seed(0)
    return GatedDeltaNet(16, 1, 2, head_k_dim=16, head_v_dim=16, allow_neg_eigval=True, backend=backend).to(device)


def layer_results(layer: torch.nn.Module, num_tokens: int, device: str) -> list[Tensor]:
    x = torch.randn(1, num_tokens, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    docs = torch.tensor([[-1] * 5 + [5] * (num_tokens - 5)], device=device)
    y, state = layer(x, None, docs)
    outputs = [y, *state]
    return [*outputs, *torch.autograd.grad(outputs, [x, *layer.parameters()], grads_like(outputs))]


@on_devices
def test_a_layer_on_the_kernels_is_the_layer_in_pytorch(device):
    kernels, chunk = (make_layer(device, backend) for backend in ("triton", "chunk"))
    results = [layer_results(layer, 66, device) for layer in (kernels, chunk)]
    assert_close(*results, 1e-5)


@on_devices
def test_compiled_without_graph_breaks(device):
    layer = make_layer(device, "triton")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = [layer_results(form, 8, device) for form in (compiled, layer)]
    assert_close(*results, 1e-6)


@on_devices
def test_op_level_recomputation_may_keep_the_result(device, monkeypatch):
    """What torchtitan's selective checkpointing does with the operations in OPS_TO_SAVE."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    torch.manual_seed(0)
    inputs = make_inputs(1, 10, 1, 1, 16, 16, device=device)
    runs, forward = [], kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *args: runs.append(1) or forward(*args))
    expected = run(inputs, None, backend="triton")
    for kept, num_runs in ([], 2), ([torch.ops.stateflow.gated_delta_rule_triton.default], 1):
        runs.clear()
        outputs = checkpoint(
            lambda *x: gated_delta_rule(*x, backend="triton"),
            *inputs,
            use_reentrant=False,
            context_fn=lambda kept=kept: create_selective_checkpoint_contexts(kept),
        )
        grads = torch.autograd.grad(outputs, inputs, grads_like(outputs))
        assert_same_bits([*outputs, *grads], expected)
        assert len(runs) == num_runs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(chunk_size=32), "they solve 64 tokens at once, chunk_size is 32"),
        (dict(q_BTHK=torch.zeros(1, 4, 2, 16).bfloat16()), "one type, not torch.bfloat16, torch.float32 .*: cast them"),
        (dict(state_BHKV=torch.zeros(1, 2, 16, 16).double()), "one of its tensors has torch.float64"),
        (
            dict(v_BTHV=torch.zeros(1, 4, 2, 12), state_BHKV=torch.zeros(1, 2, 16, 12)),
            r"V must be a multiple of 8 from 16 to 256, it is 12 \(the nearest is 16\)",
        ),
        (
            dict(v_BTHV=torch.zeros(1, 4, 2, 300), state_BHKV=torch.zeros(1, 2, 16, 300)),
            r"it is 300 \(the nearest is 256\)",
        ),
        (
            dict(
                q_BTHK=torch.zeros(1, 4, 2, 136),
                k_BTHK=torch.zeros(1, 4, 2, 136),
                state_BHKV=torch.zeros(1, 2, 136, 16),
            ),
            "K must be at most 128 in float32, whose tiles need more shared memory; it is 136",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_under_auto_runs_in_pytorch(change, message, monkeypatch):
    arguments = dict(
        q_BTHK=torch.zeros(1, 4, 2, 16),
        k_BTHK=torch.zeros(1, 4, 2, 16),
        v_BTHV=torch.zeros(1, 4, 2, 16),
        g_BTH=torch.zeros(1, 4, 2),
        beta_BTH=torch.zeros(1, 4, 2),
        state_BHKV=torch.zeros(1, 2, 16, 16),
    )
    arguments |= change
    with pytest.raises(ValueError, match=f"gated_delta_rule cannot use the Triton kernels: .*{message}"):
        gated_delta_rule(**arguments, backend="triton")
    monkeypatch.delattr("stateflow_kernels.gated_delta_rule.forward")
    for backend in ("auto", "chunk"):
        o, _ = gated_delta_rule(**arguments, backend=backend)
        assert o.shape == arguments["v_BTHV"].shape
