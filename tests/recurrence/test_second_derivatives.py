"""Second derivatives: those of the definition are right; the other forms refuse them, rather than give zeros."""

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
