"""The short convolution in front of a recurrence: depthwise, causal, width W, then silu; with its tail.

    y_t = silu(bias + sum_{j < W} w_j x_{t-j}),   w_j = weight[:, W-1-j]

The inputs before the first token are the tail, the last W-1 inputs so far. Backward, with p = dy silu'(pre):

    dx_s = d_tail' where s is in the outgoing tail, then + w_j p_{s+j} for j = W-1 .. 0
    dw_j = sum_t p_t x_{t-j},   dbias = sum_t p_t

That order of the sum, and a tail and tail gradient of at least float32, make a cut invisible to the last bit:
what the next chunk sends back is exactly the terms that an uncut sequence would have added first. A chunk
shorter than W-1 keeps a part of the incoming tail in the outgoing one, and d_tail' passes through.
"""

import torch
from torch import Tensor

from ..chunks import check_documents
from . import reference
from .backends import choose
from .numerics import at_least_float32
from .operation import Operation


def _visible(doc_start_BT: Tensor | None, distance: int) -> Tensor | None:
    """[B, T, 1]: whether the input `distance` tokens back is in the token's own document. None: always."""
    if doc_start_BT is None:
        return None
    position_T = torch.arange(doc_start_BT.shape[1], device=doc_start_BT.device)
    return (position_T - distance >= doc_start_BT)[..., None]


def _masked(values: Tensor, visible: Tensor | None) -> Tensor:
    return values if visible is None else values.masked_fill(~visible, 0)


def _taps(
    x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, tail_BWC: Tensor, doc_start_BT: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The inputs [tail; x] and the sum before the silu, in at least float32."""
    dtype = at_least_float32(x_BTC, weight_CW, tail_BWC)
    num_tokens, width = x_BTC.shape[1], weight_CW.shape[1]
    inputs = torch.cat([tail_BWC.to(dtype), x_BTC.to(dtype)], dim=1)
    weight = weight_CW.to(dtype)
    pre = torch.zeros_like(inputs[:, width - 1 :])
    if bias_C is not None:
        pre += bias_C.to(dtype)
    for column in range(width):
        seen = _masked(inputs[:, column : column + num_tokens], _visible(doc_start_BT, width - 1 - column))
        pre.addcmul_(seen, weight[:, column])
    return inputs, pre


def _sigmoid(x: Tensor) -> Tensor:
    # torch.sigmoid and silu take another formula for the last few elements of a tensor than for the others,
    # so that their last bit depends on where the sequence is cut. exp does not.
    return x.neg().exp().add_(1).reciprocal_()


@Operation("stateflow::short_conv")
def _short_conv(
    x_BTC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BWC: Tensor,
    doc_start_BT: Tensor | None,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    if triton:
        from stateflow_kernels import short_conv as kernels

        return kernels.forward(x_BTC, weight_CW, bias_C, tail_BWC, doc_start_BT)
    inputs, pre = _taps(x_BTC, weight_CW, bias_C, tail_BWC, doc_start_BT)
    # A copy: a view would keep the whole chunk's inputs alive for as long as the state lives.
    tail = inputs[:, x_BTC.shape[1] :].to(tail_BWC.dtype).clone(memory_format=torch.contiguous_format)
    return (pre * _sigmoid(pre)).to(x_BTC.dtype), tail


@_short_conv.register_fake
def _(x_BTC, weight_CW, bias_C, tail_BWC, doc_start_BT, triton):
    return x_BTC.new_empty(x_BTC.shape), tail_BWC.new_empty(tail_BWC.shape)


@Operation("stateflow::short_conv_backward")
def _short_conv_backward(
    grad_y_BTC: Tensor,
    grad_tail_BWC: Tensor,
    x_BTC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BWC: Tensor,
    doc_start_BT: Tensor | None,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias (anything where there is none) and tail."""
    bias_dtype = weight_CW.dtype if bias_C is None else bias_C.dtype
    if triton:
        from stateflow_kernels import short_conv as kernels

        grad_x, grad_weight, grad_bias, grad_tail = kernels.backward(
            grad_y_BTC, grad_tail_BWC, x_BTC, weight_CW, bias_C, tail_BWC, doc_start_BT
        )
        # Copies: an operation must not return two views of one tensor.
        grad_weight = torch.empty_like(weight_CW, memory_format=torch.contiguous_format).copy_(grad_weight)
        if grad_bias is None:  # an operation has to return something
            grad_bias = torch.empty(weight_CW.shape[0], dtype=bias_dtype, device=x_BTC.device)
        else:
            grad_bias = grad_bias.to(bias_dtype, copy=True)
        return grad_x, grad_weight, grad_bias, grad_tail
    inputs, pre = _taps(x_BTC, weight_CW, bias_C, tail_BWC, doc_start_BT)
    num_tokens, width = x_BTC.shape[1], weight_CW.shape[1]
    sigmoid = _sigmoid(pre)
    grad_pre = grad_y_BTC.to(pre.dtype) * sigmoid * (1 + pre * (1 - sigmoid))
    weight = weight_CW.to(pre.dtype)
    grad_weight = torch.empty_like(weight)
    grad_inputs = torch.zeros_like(inputs)
    grad_inputs[:, num_tokens:] = grad_tail_BWC.to(pre.dtype)
    for column in range(width):  # j = W-1 .. 0
        tokens = slice(column, column + num_tokens)
        grad_seen = _masked(grad_pre, _visible(doc_start_BT, width - 1 - column))
        grad_inputs[:, tokens] += grad_seen * weight[:, column]
        grad_weight[:, column] = (grad_seen * inputs[:, tokens]).sum((0, 1))
    return (
        grad_inputs[:, width - 1 :].to(x_BTC.dtype).clone(memory_format=torch.contiguous_format),
        grad_weight.to(weight_CW.dtype),
        grad_pre.sum((0, 1)).to(bias_dtype),
        grad_inputs[:, : width - 1].to(tail_BWC.dtype).clone(memory_format=torch.contiguous_format),
    )


@_short_conv_backward.register_fake
def _(grad_y, grad_tail, x_BTC, weight_CW, bias_C, tail_BWC, doc_start_BT, triton):
    grad_bias = weight_CW.new_empty(weight_CW.shape[0]) if bias_C is None else bias_C.new_empty(bias_C.shape)
    others = (x.new_empty(x.shape) for x in (x_BTC, weight_CW, tail_BWC))
    grad_x, grad_weight, grad_tail = others
    return grad_x, grad_weight, grad_bias, grad_tail


def _setup_context(ctx, inputs, output):
    *tensors, ctx.triton = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_y_BTC, grad_tail_BWC):
    saved = ctx.saved_tensors  # once only: activation checkpointing unpacks each tensor a single time
    has_bias = saved[2] is not None
    grad_x, grad_weight, grad_bias, grad_tail = _short_conv_backward(
        grad_y_BTC, grad_tail_BWC, *saved, ctx.triton
    )
    return grad_x, grad_weight, grad_bias if has_bias else None, grad_tail, None, None


_short_conv.register_autograd(_backward, setup_context=_setup_context)


def short_conv(
    x_BTC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BWC: Tensor,
    doc_start_BT: Tensor | None = None,
    *,
    backend: str = "chunk",
) -> tuple[Tensor, Tensor]:
    """y_t = silu(bias + sum_{j < W} weight[:, W-1-j] x_{t-j}), inputs before the first token from the tail.

    Args:
        x_BTC: inputs, T >= 1.
        weight_CW: one filter of width W a channel, laid out as in nn.Conv1d.
        bias_C: None or one number a channel.
        tail_BWC: the W-1 inputs before the first token, at least float32; zeros at the start of a sequence.
        doc_start_BT: None, or int64: the position, relative to this call's first token, of the first token of
            each token's document. A token sees only inputs at or after it.
        backend: see `backends`. The kernels take 2 <= W <= 8 and a float32 tail.

    Returns:
        y_BTC in x's dtype and the last W-1 inputs in the dtype of `tail_BWC`; of a chunk shorter than W-1 the
        oldest of them come from the incoming tail. Both are differentiable in x, weight, bias and tail.

    Raises:
        ValueError: shapes that do not fit, documents that cannot be (`chunks.check_documents`), a tail of 16 bits,
            an unknown backend, "triton" where the kernels cannot run.
    """
    batch, num_tokens, num_channels = x_BTC.shape
    if num_tokens < 1:
        raise ValueError("short_conv needs at least 1 token, got 0: leave empty chunks out")
    if weight_CW.shape[0] != num_channels or (bias_C is not None and bias_C.shape != (num_channels,)):
        raise ValueError(
            f"weight {list(weight_CW.shape)} and bias must have {num_channels} channels, as x has"
        )
    if tail_BWC.shape != (batch, weight_CW.shape[1] - 1, num_channels):
        raise ValueError(
            f"tail {list(tail_BWC.shape)} must be {[batch, weight_CW.shape[1] - 1, num_channels]}"
        )
    if tail_BWC.dtype != at_least_float32(tail_BWC):
        raise ValueError(
            f"the tail has {tail_BWC.dtype} but must be at least float32: keep states out of autocasts "
            "(under FSDP2: MixedPrecisionPolicy(cast_forward_inputs=False))"
        )
    check_documents(doc_start_BT, batch, num_tokens)
    width = weight_CW.shape[1]
    misfit = None if 2 <= width <= 8 else f"they take filters of 2 to 8 inputs, this one has {width}"
    form = choose("short_conv", backend, x_BTC, weight_CW, bias_C, tail_BWC, misfit=misfit)
    if form == "reference":
        return reference.short_conv(x_BTC, weight_CW, bias_C, tail_BWC, doc_start_BT)
    return _short_conv(x_BTC, weight_CW, bias_C, tail_BWC, doc_start_BT, form == "triton")
