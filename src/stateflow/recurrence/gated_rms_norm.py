"""The gated RMSNorm behind a recurrence: y = rmsnorm(x) weight silu(gate) over the last dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends import choose
from .numerics import at_least_float32
from .operation import Operation


@Operation("stateflow::gated_rms_norm")
def _gated_rms_norm(x_NV: Tensor, gate_NV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    from stateflow_kernels import gated_norm

    return gated_norm.forward(x_NV, gate_NV, weight_V, eps)


@_gated_rms_norm.register_fake
def _(x_NV, gate_NV, weight_V, eps):
    return x_NV.new_empty(x_NV.shape)


@Operation("stateflow::gated_rms_norm_backward")
def _gated_rms_norm_backward(
    grad_y_NV: Tensor, x_NV: Tensor, gate_NV: Tensor, weight_V: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    from stateflow_kernels import gated_norm

    grad_x, grad_gate, grad_weight = gated_norm.backward(grad_y_NV, x_NV, gate_NV, weight_V, eps)
    return grad_x, grad_gate, grad_weight.to(weight_V.dtype)


@_gated_rms_norm_backward.register_fake
def _(grad_y_NV, x_NV, gate_NV, weight_V, eps):
    grad_x, grad_gate, grad_weight = (x.new_empty(x.shape) for x in (x_NV, gate_NV, weight_V))
    return grad_x, grad_gate, grad_weight


def _setup_context(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_y_NV):
    return *_gated_rms_norm_backward(grad_y_NV, *ctx.saved_tensors, ctx.eps), None


_gated_rms_norm.register_autograd(_backward, setup_context=_setup_context)


def _plain(x: Tensor, gate: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    dtype = at_least_float32(x)
    y = x.to(dtype)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight_V.to(dtype) * F.silu(gate.to(dtype))).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight_V: Tensor, eps: float, *, backend: str = "chunk") -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension, computed in at least float32.

    Args:
        x, gate: of one shape [..., V].
        weight_V: one factor a column.
        backend: see `backends`; "chunk" and "reference" are the same here.

    Returns:
        y in x's shape and dtype, differentiable in x, gate and weight. The kernels save their inputs only.

    Raises:
        ValueError: shapes that do not fit, an unknown backend, "triton" where the kernels cannot run.
    """
    if gate.shape != x.shape or weight_V.shape != x.shape[-1:]:
        raise ValueError(
            f"gate {list(gate.shape)} must have the shape of x, {list(x.shape)}, and weight "
            f"{list(weight_V.shape)} that of its last dimension"
        )
    if choose("gated_rms_norm", backend, x, gate, weight_V) == "triton":
        return _gated_rms_norm(x.flatten(0, -2), gate.flatten(0, -2), weight_V, float(eps)).view(x.shape)
    return _plain(x, gate, weight_V, eps)
