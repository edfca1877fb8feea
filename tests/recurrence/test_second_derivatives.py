"""Second and forward-mode derivatives: those of the definition are right; other forms refuse them, not give zeros."""

import pytest
import torch

from stateflow.recurrence import short_conv, swiglu
from stateflow_kernels.primitives import INTERPRETED


def penalty(function, *inputs: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(function(*inputs).square().sum(), inputs[0], create_graph=True)
    return grad.square().sum()


def convolution(backend: str):
    return lambda x, weight, tail: short_conv(x, weight, None, tail, backend=backend)[0]


def activation(backend: str):
    return lambda gate, x: swiglu(gate, x, backend=backend)


CASES = {convolution: ((1, 5, 3), (3, 4), (1, 3, 3)), activation: ((2, 6), (2, 6))}


def make_inputs(make, dtype):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in CASES[make]]


@pytest.mark.parametrize("make", CASES)
def test_the_definition_has_them(make):
    inputs = make_inputs(make, torch.float64)
    assert torch.autograd.gradcheck(lambda *x: penalty(make("reference"), *x), inputs)


OTHERS = [(convolution, "chunk"), (convolution, "triton"), (activation, "triton")]


@pytest.mark.parametrize("make, backend", OTHERS)
def test_other_forms_refuse_them(make, backend):
    if backend == "triton" and not INTERPRETED:
        pytest.skip("the kernels must run on the CPU")
    with pytest.raises(RuntimeError, match="differentiate twice"):
        penalty(make(backend), *make_inputs(make, torch.float32)).backward()


@pytest.mark.parametrize("make", CASES)
def test_the_definition_has_forward_mode(make):
    torch.autograd.gradcheck(make("reference"), make_inputs(make, torch.float64), check_forward_ad=True)


@pytest.mark.parametrize("make, backend", OTHERS)
@pytest.mark.parametrize("needs_grad", [True, False])
def test_other_forms_refuse_forward_mode(make, backend, needs_grad):
    if backend == "triton" and not INTERPRETED:
        pytest.skip("the kernels must run on the CPU")
    inputs = tuple(x.requires_grad_(needs_grad) for x in make_inputs(make, torch.float32))
    tangents = tuple(map(torch.ones_like, inputs))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(make(backend), inputs, tangents)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        make(backend)(torch.autograd.forward_ad.make_dual(inputs[0], tangents[0]), *inputs[1:])
