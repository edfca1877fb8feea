import sys

import pytest
import torch

import stateflow.recurrence.backends
from stateflow.layers import GatedDeltaNet
from stateflow.recurrence import delta_gates, gated_rms_norm, short_conv
from stateflow.recurrence.backends import choose
from tests.cases import make_model
from tests.kernels.kernel_testing import on_devices
from tests.recurrence.op_testing import assert_close, assert_same_bits, with_grads


def run(name: str, backend: str, dtype: torch.dtype = torch.float32):
    x = torch.zeros(1, 5, 2, dtype=dtype)
    if name == "short_conv":
        tail = torch.zeros(1, 3, 2, dtype=torch.promote_types(dtype, torch.float32))
        return short_conv(x, torch.zeros(2, 4, dtype=dtype), None, tail, backend=backend)
    if name == "gated_rms_norm":
        return gated_rms_norm(x, x, x[0, 0], 1e-6, backend=backend)
    return delta_gates(x, x, x[0, 0], x[0, 0], backend=backend)


OPERATIONS = ["short_conv", "gated_rms_norm", "delta_gates"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_refusals(name, monkeypatch):
    with pytest.raises(ValueError, match="unknown backend 'kernel'"):
        run(name, "kernel")
    with pytest.raises(ValueError, match=f"{name} cannot .* has torch.float64; use backend 'chunk'"):
        run(name, "triton", torch.float64)
    monkeypatch.setattr(stateflow.recurrence.backends, "_interpreted", lambda: False)
    with pytest.raises(ValueError, match="need a CUDA device, the tensors are on cpu .*TRITON_INTERPRET"):
        run(name, "triton")


def test_a_filter_of_another_width_is_refused_and_under_auto_takes_the_other_form():
    x, tail = torch.zeros(1, 5, 2), torch.zeros(1, 8, 2)
    with pytest.raises(ValueError, match="2 to 8 inputs, this one has 9"):
        short_conv(x, torch.zeros(2, 9), None, tail, backend="triton")
    short_conv(x, torch.zeros(2, 9), None, tail, backend="auto")


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_auto_on_the_cpu_is_pytorch(name, dtype, monkeypatch):
    import stateflow_kernels.gated_norm
    import stateflow_kernels.gates
    import stateflow_kernels.short_conv

    for module in ("gated_norm", "gates", "short_conv"):
        monkeypatch.delattr(getattr(stateflow_kernels, module), "forward")
    run(name, "auto", dtype)


@pytest.mark.gpu
def test_auto_on_a_gpu_is_triton_but_for_float64():
    x = torch.zeros(1, device="cuda")
    assert choose("x", "auto", x, x.bfloat16(), None) == "triton"
    assert choose("x", "auto", x, x.double()) == "chunk"
    assert choose("x", "auto", x, misfit="too long") == "chunk"


def test_a_layer_runs_on_the_kernels(monkeypatch):
    """Convolution, gates and norm; the recurrence itself in PyTorch."""
    if not stateflow.recurrence.backends._interpreted():
        pytest.skip("needs TRITON_INTERPRET=1")
    used = []
    # The modules, which the functions of the same names hide.
    modules = [sys.modules[f"stateflow.recurrence.{name}"] for name in OPERATIONS]
    results = []
    for form in ("triton", "chunk"):
        for module in modules:
            monkeypatch.setattr(module, "choose", lambda name, *_, form=form, **__: used.append(name) or form)
        torch.manual_seed(0)
        mixer = GatedDeltaNet(8, 2, 4, head_k_dim=4, head_v_dim=4, allow_neg_eigval=True, backend="auto")
        x = torch.randn(1, 6, 8, requires_grad=True)
        y, state = mixer(x, docs=torch.tensor([[0, 0, 2, 2, 2, 2]]))
        results.append(with_grads([y, *state], [x, *mixer.parameters()]))
        assert sorted(used) == ["delta_gates", "gated_rms_norm", *["short_conv"] * 3]
        used.clear()
    assert_close(*results, 1e-5)


@on_devices
def test_compiles_into_one_graph(device):
    def gates_and_norm(a, b, heads, weight):
        g, beta = delta_gates(a, b, heads, heads, backend="triton")
        y, tail = short_conv(g, weight, None, torch.zeros_like(g[:, :2]), backend="triton")
        return gated_rms_norm(y, beta, heads, 1e-6, backend="triton"), tail

    torch.manual_seed(0)
    shapes = (1, 5, 4), (1, 5, 4), (4,), (4, 3)
    inputs = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
    compiled = torch.compile(gates_and_norm, backend="aot_eager", fullgraph=True)
    assert_same_bits(with_grads(compiled(*inputs), inputs), with_grads(gates_and_norm(*inputs), inputs))


def test_a_whole_model_takes_auto():
    results = []
    for backend in ("auto", "chunk"):
        torch.manual_seed(0)
        model = make_model(["gdn", "attention"], torch.float32, backend)
        hidden, weight = model(torch.arange(6)[None])
        results.append(with_grads([hidden, weight], list(model.parameters())))
    assert_same_bits(*results)
