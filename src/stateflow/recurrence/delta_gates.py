"""The gates of the gated delta rule: its log decay g and its write strength beta."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends import choose
from .numerics import at_least_float32
from .operation import Operation


@Operation("stateflow::delta_gates")
def _delta_gates(
    a_MH: Tensor, b_MH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    from stateflow_kernels import gates

    return gates.forward(a_MH, b_MH, A_log_H, dt_bias_H, scale)


@_delta_gates.register_fake
def _(a_MH, b_MH, A_log_H, dt_bias_H, scale):
    return tuple(a_MH.new_empty(a_MH.shape, dtype=torch.float32) for _ in range(2))


@Operation("stateflow::delta_gates_backward")
def _delta_gates_backward(
    grad_g_MH: Tensor,
    grad_beta_MH: Tensor,
    a_MH: Tensor,
    b_MH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from stateflow_kernels import gates

    inputs = (a_MH, b_MH, A_log_H, dt_bias_H)
    grad_a, grad_b, grad_A_log, grad_dt_bias = gates.backward(grad_g_MH, grad_beta_MH, *inputs, scale)
    # Copies: an operation must not return two views of one tensor.
    return grad_a, grad_b, grad_A_log.to(A_log_H.dtype, copy=True), grad_dt_bias.to(dt_bias_H.dtype, copy=True)


@_delta_gates_backward.register_fake
def _(grad_g_MH, grad_beta_MH, a_MH, b_MH, A_log_H, dt_bias_H, scale):
    return tuple(x.new_empty(x.shape) for x in (a_MH, b_MH, A_log_H, dt_bias_H))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_g_MH, grad_beta_MH):
    return *_delta_gates_backward(grad_g_MH, grad_beta_MH, *ctx.saved_tensors, ctx.scale), None


_delta_gates.register_autograd(_backward, setup_context=_setup_context)


def _plain(a: Tensor, b: Tensor, A_log_H: Tensor, dt_bias_H: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    dtype = at_least_float32(a, b, A_log_H)
    g = -A_log_H.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias_H.to(dtype))
    beta = b.to(dtype).sigmoid()
    return g, beta if scale == 1 else scale * beta


def delta_gates(
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    *,
    allow_neg_eigval: bool = False,
    backend: str = "chunk",
) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), or 2 sigmoid(b) with `allow_neg_eigval`.

    Args:
        a_BTH, b_BTH: of one shape, also of 16 bits.
        A_log_H, dt_bias_H: one number a head.
        backend: see `backends`; "chunk" and "reference" are the same here.

    Returns:
        g_BTH and beta_BTH in at least float32, differentiable in all four inputs. The kernels save their inputs only.

    Raises:
        ValueError: shapes that do not fit, an unknown backend, "triton" where the kernels cannot run.
    """
    if b_BTH.shape != a_BTH.shape or not A_log_H.shape == dt_bias_H.shape == a_BTH.shape[-1:]:
        raise ValueError(
            f"b {list(b_BTH.shape)} must have the shape of a, {list(a_BTH.shape)}, and A_log {list(A_log_H.shape)} "
            f"and dt_bias {list(dt_bias_H.shape)} that of its last dimension"
        )
    scale = 2.0 if allow_neg_eigval else 1.0
    if choose("delta_gates", backend, a_BTH, b_BTH, A_log_H, dt_bias_H) == "triton":
        g, beta = _delta_gates(a_BTH.flatten(0, -2), b_BTH.flatten(0, -2), A_log_H, dt_bias_H, scale)
        return g.view(a_BTH.shape), beta.view(a_BTH.shape)
    return _plain(a_BTH, b_BTH, A_log_H, dt_bias_H, scale)
