"""Mamba-3 on the Triton kernels, against the recurrence token by token in float64.

Interpreted where there is no GPU, which is slow: few and small examples. The GPU's own are in test_mamba3_on_gpu.
"""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import stateflow_kernels.mamba3_rule as kernels
import stateflow_kernels.plans
from stateflow.layers import Mamba3
from stateflow.recurrence import mamba3, mamba3_kernels, self_check
from stateflow.recurrence.mamba3 import Inputs
from stateflow.recurrence.mamba3_kernels import BOUNDS_16_BITS, BOUNDS_FLOAT32, Problem, random_inputs
from stateflow_kernels.gated_delta_rule import Tile
from stateflow_kernels.mamba3_rule import Mamba3Plan
from tests.kernels.kernel_testing import on_devices, only_own_memory
from tests.recurrence.op_testing import (
    assert_close,
    assert_same_bits,
    documents,
    poisoned_memory,
    saved_tensors,
)
from tests.recurrence.recurrences import RECURRENCES

BOUNDS = {torch.float32: BOUNDS_FLOAT32, torch.bfloat16: BOUNDS_16_BITS, torch.float16: BOUNDS_16_BITS}
TRITON = dict(backend="triton")
BY_TOKEN, BY_HEAD = slice(0, 8), slice(14, 18)  # inputs whose gradients are no sums over tokens


def make_inputs(
    batch: int,
    num_tokens: int,
    heads: int,
    n_dim: int,
    p_dim: int,
    angles: int,
    *,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> list[Tensor]:
    """As the operation takes them, requiring grad; some gates lie below the floor."""
    options = (torch.device(device), dtype, gate_dtype or dtype, heads, n_dim, p_dim, angles, False)
    inputs, _ = random_inputs(Problem(*options), batch, num_tokens, torch.randn, torch.rand)
    inputs = Inputs(*inputs)
    inputs.dd_A[:, ::5] -= 12
    return [x.to(device).requires_grad_() for x in inputs]


def exact(inputs: list[Tensor]) -> list[Tensor]:
    return [x.detach().cpu().double().requires_grad_() for x in inputs]


def grads_like(outputs) -> list[Tensor]:
    """The same random gradients for outputs of any device and type, exact in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float32).bfloat16() for o in outputs]
    return [grad.to(o.device, o.dtype) for grad, o in zip(grads, outputs, strict=True)]


def run(inputs: list[Tensor], docs: Tensor | None, **options) -> list[Tensor]:
    """All outputs and gradients."""
    docs = None if docs is None else docs.to(inputs[0].device)
    outputs = mamba3(*inputs, docs, **options)
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads_like(outputs))]


def run_in_pieces(inputs: list[Tensor], docs: Tensor | None, cuts: list[int], **options) -> list[Tensor]:
    docs = None if docs is None else docs.to(inputs[0].device)
    outputs = RECURRENCES["mamba3"].run_in_pieces(inputs, docs, cuts, **options)
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads_like(outputs))]


def without_sums(results: list[Tensor]) -> list[Tensor]:
    """The outputs and the gradients of tokens and states: parameters' are sums over tokens."""
    grads = results[5:]
    return [*results[:5], *grads[BY_TOKEN], *grads[BY_HEAD]]


def compare(results: list[Tensor], expected: list[Tensor], bounds: dict[str, float]) -> None:
    for (name, bound), result, reference in zip(bounds.items(), results, expected, strict=True):
        result, reference = result.detach().cpu().double(), reference.detach()
        if name == "theta":
            result, reference = result.cos(), reference.cos()  # angles are equal modulo 2 pi
        assert result.isfinite().all(), name
        # What is exactly or nearly zero cannot be compared relatively.
        error, norm = (result - reference).norm().item(), reference.norm().item()
        assert error <= bound * norm + 1e-6, f"{name}: error {error}, norm {norm}"


def check(inputs: list[Tensor], docs: Tensor | None, bounds: dict[str, float] | None = None, **options) -> list[Tensor]:
    """Compares the kernels with the reference in float64; returns what the kernels gave."""
    results = run(inputs, docs, **TRITON, **options)
    assert [x.dtype for x in results[5:]] == [x.dtype for x in inputs]
    compare(results, run(exact(inputs), docs, backend="reference", **options), bounds or BOUNDS[inputs[0].dtype])
    return results


def use_plans(monkeypatch, plan_for) -> None:
    monkeypatch.setattr(stateflow_kernels.plans, "plan_for", plan_for)
    monkeypatch.setattr(mamba3_kernels, "_chosen", {})


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch):
    """On a GPU a plan that was replaced would make these tests say nothing."""
    monkeypatch.setattr(self_check, "_outcomes", {})
    monkeypatch.setattr(mamba3_kernels, "_chosen", {})
    yield
    assert all(outcome.plan == plan for (_, plan), outcome in self_check._outcomes.items())


@pytest.mark.timeout(1200)  # a GPU compiles anew for each example
@on_devices
@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 2),
    num_tokens=st.integers(1, 100),
    heads=st.integers(1, 2),
    n_dim=st.sampled_from([16, 40]),
    p_dim=st.sampled_from([16, 40]),
    angles=st.sampled_from([1, 4, 7, 8]),
    with_docs=st.booleans(),
    norm_eps=st.sampled_from([1e-5, 0.1]),
    A_floor=st.sampled_from([1e-4, 0.9]),
)
def test_outputs_and_all_gradients_equal_the_recurrence(
    device, seed, batch, num_tokens, heads, n_dim, p_dim, angles, with_docs, norm_eps, A_floor
):
    torch.manual_seed(seed)
    inputs = make_inputs(batch, num_tokens, heads, n_dim, p_dim, angles, device=device)
    docs = documents(batch, num_tokens, rate=0.03) if with_docs else None
    check(inputs, docs, norm_eps=norm_eps, A_floor=A_floor)


@on_devices
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.other_triton), torch.float16])
def test_16_bits(device, dtype):
    torch.manual_seed(0)
    inputs = make_inputs(1, 90, 1, 32, 32, 8, dtype=dtype, device=device)
    check(inputs, documents(1, 90, rate=0.03))


@on_devices
def test_gates_and_parameters_of_other_types(device):
    torch.manual_seed(0)
    inputs = make_inputs(1, 20, 1, 32, 32, 16, device=device, dtype=torch.bfloat16, gate_dtype=torch.float32)
    inputs = [x.detach().bfloat16().requires_grad_() if 8 <= i < 14 else x for i, x in enumerate(inputs)]
    check(inputs, None)


@on_devices
@pytest.mark.parametrize("name", ["dd_dt", "dd_A", "trap"])
def test_extreme_gates(device, name):
    torch.manual_seed(0)
    inputs = Inputs(*make_inputs(1, 50, 1, 16, 16, 4, device=device))
    with torch.no_grad():
        getattr(inputs, name)[:, ::7] = -1e4
        if name != "dd_dt":  # a step of 1e4 turns by thousands of revolutions: no digits are left in float32
            getattr(inputs, name)[:, 3::7] = 1e4
    check(list(inputs), None, {key: 10 * bound for key, bound in BOUNDS_FLOAT32.items()})


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuts_at_chunks_give_the_same_bits(device, dtype):
    torch.manual_seed(0)
    inputs = make_inputs(1, 140, 1, 16, 16, 4, dtype=dtype, device=device)
    docs = documents(1, 140, rate=0.02)
    pieces = run_in_pieces(inputs, docs, [64, 128], **TRITON)
    assert_same_bits(without_sums(pieces), without_sums(run(inputs, docs, **TRITON)))


@on_devices
def test_cuts_anywhere_change_nothing_but_rounding(device):
    torch.manual_seed(0)
    inputs = make_inputs(1, 60, 1, 16, 16, 4, device=device)
    pieces = run_in_pieces(inputs, None, [1, 37], **TRITON)
    compare(pieces, [x.cpu().double() for x in run(inputs, None, **TRITON)], BOUNDS_FLOAT32)


@on_devices
def test_any_plan_gives_the_values_of_the_default(device, monkeypatch):
    """Cuts change no bit; other tiles change the order of sums."""
    torch.manual_seed(0)
    inputs = make_inputs(1, 130, 1, 32, 48, 8, device=device)
    docs = documents(1, 130, rate=0.02)
    default = run(inputs, docs, **TRITON)
    plan = stateflow_kernels.plans.fallback_plan(torch.device(device), torch.float32, 32, 48, "mamba3")
    overlap = dict(cuts=(0.4, 0.7), overlap_backward=True)
    tiles = {f.name: Tile(16, 4, 2) for f in dataclasses.fields(plan) if isinstance(getattr(plan, f.name), Tile)}
    for other, same_bits in ((dataclasses.replace(plan, **overlap), True), (Mamba3Plan(**tiles, **overlap), False)):
        use_plans(monkeypatch, lambda *_, other=other, **__: other)
        results = run(inputs, docs, **TRITON)
        if same_bits:
            assert_same_bits(results, default)
        compare(results, [x.cpu().double() for x in default], BOUNDS_FLOAT32)


@pytest.mark.other_triton
@on_devices
def test_strided_and_expanded_tensors(device):
    torch.manual_seed(0)
    inputs = Inputs(*(x.detach() for x in make_inputs(2, 66, 2, 32, 32, 8, device=device)))
    inputs = inputs._replace(
        x=inputs.x.transpose(1, 3).contiguous().transpose(1, 3),
        z=torch.stack([inputs.z, inputs.z], dim=-1)[..., 0],
        B=inputs.B[:1].expand(2, -1, -1),
        trap=inputs.trap[..., :1].expand(-1, -1, 2),
        B_bias=inputs.B_bias[:1].expand(2, -1),
        state=inputs.state.mT.contiguous().mT,
    )
    docs = torch.tensor([[0] * 30 + [30] * 36], device=device).expand(2, -1)

    def results(inputs, backend: str) -> list[Tensor]:
        inputs = [x.requires_grad_() for x in inputs]
        outputs = mamba3(*inputs, docs.to(inputs[0].device), backend=backend)
        # Sums hand expanded gradients to the operation, the transpose one with other strides.
        loss = outputs[0].sum() + (outputs[2].mT * inputs[15].detach().mT).sum() + outputs[3].sum()
        return [*outputs, *torch.autograd.grad(loss, inputs)]

    compare(results(inputs, "triton"), results([x.cpu().double() for x in inputs], "reference"), BOUNDS_FLOAT32)


@on_devices
@pytest.mark.parametrize("used", [0, 1, 3])
def test_any_output_may_be_unused(device, used):
    torch.manual_seed(0)
    inputs = make_inputs(1, 11, 1, 32, 32, 8, device=device)

    def grads(inputs: list[Tensor], backend: str) -> tuple[Tensor, ...]:
        output = mamba3(*inputs, backend=backend)[used]
        return torch.autograd.grad(output.sum(), inputs, allow_unused=True, materialize_grads=True)

    bounds = dict(list(BOUNDS_FLOAT32.items())[5:])
    compare(grads(inputs, "triton"), grads(exact(inputs), "reference"), bounds)


@on_devices
def test_documents_are_isolated_exactly(device):
    """Other tokens and another state before a document's start: the same bits after it, and no gradient at all."""
    torch.manual_seed(0)
    inputs = make_inputs(1, 110, 1, 16, 16, 4, device=device)
    other = make_inputs(1, 110, 1, 16, 16, 4, device=device)
    boundary = 70
    docs = torch.tensor([[-1] * boundary + [boundary] * (110 - boundary)], device=device)
    y, *states = mamba3(*inputs, docs, **TRITON)
    with torch.no_grad():
        tokens = zip(inputs[BY_TOKEN], other[BY_TOKEN], strict=True)
        mixed = [torch.cat([b[:, :boundary], a[:, boundary:]], 1) for a, b in tokens]
        mixed_y, *mixed_states = mamba3(*mixed, *inputs[8:14], *other[BY_HEAD], docs, **TRITON)
    assert_same_bits([mixed_y[:, boundary:], *mixed_states], [y[:, boundary:], *states])
    outputs = [y[:, boundary:], *states]
    later = torch.autograd.grad(outputs, inputs, grads_like(outputs), retain_graph=True)
    for grad in (*(x[:, :boundary] for x in later[BY_TOKEN]), *later[BY_HEAD]):
        assert torch.equal(grad, torch.zeros_like(grad))
    assert torch.equal(later[5][:, boundary], torch.zeros_like(later[5][:, boundary])), "a first token has no decay"
    for grad in torch.autograd.grad([y[:, :boundary].sum()], inputs)[BY_TOKEN]:
        assert torch.equal(grad[:, boundary:], torch.zeros_like(grad[:, boundary:]))


@on_devices
def test_no_uninitialised_memory_is_read(device):
    torch.manual_seed(0)
    inputs = make_inputs(1, 66, 1, 24, 24, 5, device=device)
    docs = documents(1, 66, rate=0.03)
    with poisoned_memory():
        poisoned = run(inputs, docs, **TRITON)
    assert_same_bits(poisoned, run(inputs, docs, **TRITON))
    assert all(x.isfinite().all() for x in poisoned)


@pytest.mark.skipif(not stateflow_kernels.primitives.INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_no_other_memory_is_touched():
    torch.manual_seed(0)
    inputs = make_inputs(1, 66, 1, 24, 24, 5)
    with only_own_memory():
        run(inputs, documents(1, 66, rate=0.03), **TRITON)


@on_devices
def test_only_the_inputs_are_saved(device):
    torch.manual_seed(0)
    inputs = make_inputs(1, 66, 1, 32, 32, 8, device=device)
    docs = documents(1, 66).to(device)
    with saved_tensors() as saved:
        mamba3(*inputs, docs, **TRITON)
    assert {x.data_ptr() for x in saved} <= {x.data_ptr() for x in (*inputs, docs)}


@on_devices
@pytest.mark.parametrize(("dtype", "with_docs"), [(torch.float32, True), (torch.bfloat16, False)])
def test_operation_is_well_formed(device, dtype, with_docs):
    torch.manual_seed(0)
    inputs = make_inputs(1, 3, 1, 16, 16, 4, device=device, dtype=dtype)
    docs = documents(1, 3).to(device) if with_docs else None
    torch.library.opcheck(torch.ops.stateflow.mamba3_triton, (*inputs, docs, 1e-5, 1e-4, 64))


def make_layer(device: str, backend: str) -> Mamba3:
    torch.manual_seed(0)
    return Mamba3(16, 1, head_dim=32, state_dim=32, num_angles=8, backend=backend).to(device)


def layer_results(layer: torch.nn.Module, num_tokens: int, device: str) -> list[Tensor]:
    x = torch.randn(1, num_tokens, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    docs = torch.tensor([[-1] * 5 + [5] * (num_tokens - 5)], device=device)
    y, state = layer(x, None, docs)
    outputs = [y, *state]
    return [*outputs, *torch.autograd.grad(outputs, [x, *layer.parameters()], grads_like(outputs))]


@on_devices
def test_a_layer_on_the_kernels_is_the_layer_in_pytorch(device):
    layers = (make_layer(device, backend) for backend in ("triton", "chunk"))
    assert_close(*(layer_results(layer, 66, device) for layer in layers), 2e-5)


@on_devices
def test_compiled_without_graph_breaks(device):
    layer = make_layer(device, "triton")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close(*(layer_results(form, 8, device) for form in (compiled, layer)), 1e-6)


def test_where_no_plan_is_right_the_chunk_form_runs(monkeypatch):
    """Inside the operation, with the gradients' types as they must be."""
    monkeypatch.setattr(self_check, "checked_plan", lambda *_: None)
    monkeypatch.setattr(stateflow_kernels.plans, "plan_for", lambda *_, **__: None)
    monkeypatch.delattr(kernels, "forward")
    torch.manual_seed(0)
    inputs = make_inputs(1, 30, 2, 32, 32, 8, dtype=torch.bfloat16)
    monkeypatch.setattr("stateflow.recurrence.backends._interpreted", lambda: True)
    assert_same_bits(run(inputs, None, **TRITON), run(inputs, None, backend="chunk"))


@pytest.mark.parametrize("wrong", [None, "forward", "backward"])
def test_the_self_check(wrong, monkeypatch, caplog):
    if not stateflow_kernels.primitives.INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setattr(self_check, "CHECKED_DEVICES", ("cpu",))
    monkeypatch.setattr(self_check, "NUM_TOKENS", 110)
    problem = Problem(torch.device("cpu"), torch.float32, torch.float32, 1, 32, 32, 8, has_docs=True)
    plan = problem.fallback_plan()
    if wrong is not None:
        right = getattr(kernels, wrong)

        def faulty(*args):
            results = [x.clone() for x in right(*args)]
            results[0] *= 1.001
            return tuple(results) if wrong == "forward" else kernels.Inputs(*results)

        monkeypatch.setattr(kernels, wrong, faulty)
        monkeypatch.setattr(self_check, "safe_plans", lambda problem, plan: [plan])
    assert self_check.checked_plan(problem, plan) == (plan if wrong is None else None)
    name = {None: "", "forward": "y 1.0e-03 (bound 1e-05)", "backward": "dx 1.0e-03 (bound 2e-05)"}[wrong]
    assert name in caplog.text and bool(caplog.text) == (wrong is not None)
    assert wrong is None or "Triton kernels of Mamba-3 (1 heads, N = 32, P = 32, R = 8, float32, docum" in caplog.text
    self_check._outcomes.clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(chunk_size=32), "they take 64 tokens at once, chunk_size is 32"),
        (dict(dtype=torch.bfloat16), "x, z, B and C must have one type, not torch.bfloat16, torch.float32"),
        (dict(n_dim=36), r"N must be a multiple of 8 from 16 to 256, it is 36 \(the nearest is 40\)"),
        (dict(p_dim=8), r"P must be .* it is 8 \(the nearest is 16\)"),
        (dict(n_dim=144), "N must be at most 128 in float32, whose tiles need more shared memory; it is 144"),
    ],
)
def test_what_does_not_fit_is_refused_and_under_auto_runs_in_pytorch(change, message, monkeypatch):
    torch.manual_seed(0)
    sizes = dict(n_dim=32, p_dim=32) | {k: v for k, v in change.items() if k in ("n_dim", "p_dim")}
    inputs = Inputs(*make_inputs(1, 4, 1, sizes["n_dim"], sizes["p_dim"], 8))
    inputs = inputs._replace(x=inputs.x.to(change.get("dtype", torch.float32)))
    options = {k: v for k, v in change.items() if k == "chunk_size"}
    with pytest.raises(ValueError, match=f"mamba3 cannot use the Triton kernels: .*{message}"):
        mamba3(*inputs, **TRITON, **options)
    monkeypatch.delattr(kernels, "forward")
    for backend in ("auto", "chunk"):
        assert mamba3(*inputs, backend=backend, **options)[0].shape == inputs.x.shape
