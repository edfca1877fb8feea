"""The activation of a SwiGLU feed-forward part: y = silu(gate) x."""

import torch.nn.functional as F
from torch import Tensor

from .backends import choose
from .operation import Operation


@Operation("stateflow::swiglu")
def _swiglu(gate: Tensor, x: Tensor) -> Tensor:
    from stateflow_kernels import swiglu as kernels

    return kernels.forward(gate, x)


@_swiglu.register_fake
def _(gate, x):
    return x.new_empty(x.shape)


@Operation("stateflow::swiglu_backward")
def _swiglu_backward(grad_y: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    from stateflow_kernels import swiglu as kernels

    return kernels.backward(grad_y, gate, x)


@_swiglu_backward.register_fake
def _(grad_y, gate, x):
    return gate.new_empty(gate.shape), x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_y):
    return _swiglu_backward(grad_y, *ctx.saved_tensors)


_swiglu.register_autograd(_backward, setup_context=_setup_context)


def swiglu(gate: Tensor, x: Tensor, *, backend: str = "chunk") -> Tensor:
    """silu(gate) x, number by number.

    Args:
        gate, x: of one shape.
        backend: see `backends`; "chunk" and "reference" are the same here: PyTorch's operations, which round
            silu(gate) to its type. The kernels round the result only.

    Returns:
        y in x's shape and dtype, differentiable in both. The kernels save their inputs only.

    Raises:
        ValueError: shapes that differ, an unknown backend, "triton" where the kernels cannot run.
    """
    if gate.shape != x.shape:
        raise ValueError(f"gate {list(gate.shape)} must have the shape of x, {list(x.shape)}")
    if choose("swiglu", backend, gate, x) == "triton":
        return _swiglu(gate, x)
    return (F.silu(gate) * x).to(x.dtype)
