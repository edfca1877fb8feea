"""What the kernels' tests share. They run on a CUDA device, or on the CPU where Triton interprets (tests/conftest.py).

Float32 is compared with the float64 reference. So are 16-bit types, after the inputs are rounded to them.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from stateflow_kernels.primitives import INTERPRETED
from tests.recurrence.op_testing import assert_close

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
on_devices = pytest.mark.parametrize("device", DEVICES)

# Forward, gradients.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (5e-3, 8e-3), torch.bfloat16: (5e-3, 8e-3)}


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def check(
    triton: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Compares outputs and gradients of `triton(*inputs)` with `reference` in float64; returns the former's."""
    exact = [None if x is None else leaf(x.double().cpu()) for x in inputs]
    given = [None if x is None else leaf(x) for x in inputs]
    outputs, expected = triton(*given), reference(*exact)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs]
    results = torch.autograd.grad(outputs, [x for x in given if x is not None], grads)
    for x, grad in zip([x for x in given if x is not None], results, strict=True):
        assert grad.dtype == x.dtype
    exact_results = torch.autograd.grad(
        expected, [x for x in exact if x is not None], [g.double().cpu() for g in grads]
    )
    forward, backward = TOLERANCES[dtype]
    assert_close([o.cpu() for o in outputs], expected, forward)
    assert_close([g.cpu() for g in results], exact_results, backward)
    return [*outputs, *results]
