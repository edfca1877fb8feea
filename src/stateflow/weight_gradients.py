"""Weight gradients that what computes them adds to their sums: of projections, the product dW = dy^T x itself.

Autograd makes dW in the compute dtype and then adds it to what is there: with weights of 16 bits and sums in float32,
12 bytes of memory traffic a weight and unit, and one rounding more. A product that accumulates into its output reads
and writes the sum, 8 bytes, while it computes. Where the sum is, a weight itself knows: `accumulates_in`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stateflow.autocast import Autocast
from stateflow.recurrence.numerics import add_product


def accumulates_in(weight: Tensor, total: Tensor) -> None:
    """Tells that gradients of the leaf `weight` may be added to `total`, whatever its dtype, instead of its .grad."""
    weight.gradient_total = total


def total_of(weight: Tensor) -> Tensor | None:
    """Where gradients of `weight` are added up; None: autograd has to be asked."""
    return getattr(weight, "gradient_total", None)


@torch.no_grad()
def add_weight_gradients(weight_OI: Tensor, bias_O: Tensor | None, x: Tensor, grad: Tensor) -> None:
    """Adds to the gradients of a projection's weight and bias, where they need one.

    Either may be a view of a parameter, with a graph of its own: then the gradient goes backward through that.
    x [..., I] is the input, grad [..., O] the gradient of the output.
    """
    grad_NO = grad.reshape(-1, grad.shape[-1])
    if weight_OI.requires_grad:
        x_NI, total_OI = x.reshape(-1, x.shape[-1]), total_of(weight_OI)
        if total_OI is None:
            torch.autograd.backward(weight_OI, grad_NO.t() @ x_NI)
        else:
            add_product(total_OI, grad_NO.t(), x_NI)
    if bias_O is not None and bias_O.requires_grad:
        total_O = total_of(bias_O)
        if total_O is None:
            torch.autograd.backward(bias_O, grad_NO.sum(0))
        else:
            total_O.add_(grad_NO.sum(0, dtype=total_O.dtype))


def input_gradient(weight_OI: Tensor, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the input x [..., I] of a projection from that of its output, grad [..., O]."""
    return (grad.reshape(-1, grad.shape[-1]) @ weight_OI).reshape(x.shape)


def adding_linear(self, x: Tensor) -> Tensor:
    """A forward for ``nn.Linear`` whose backward adds to the totals of weight and bias, where these have some.

    It adds in every backward that passes, even one of ``torch.autograd.grad`` that asks for other gradients only.
    """
    weight, bias = self.weight, self.bias
    # A compiled graph must not have such side effects: there autograd hands out the gradient.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or total_of(weight) is None:
        return F.linear(x, weight, bias)
    return _AddingLinear.apply(x, weight, bias)


class _AddingLinear(torch.autograd.Function):
    """A linear map. For autograd the weights are inputs without a gradient: their backward is the addition."""

    @staticmethod
    def forward(ctx, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None):
        ctx.bias, ctx.autocast = bias_O, Autocast.at(x)
        ctx.weight = weight_OI  # as it is: what autograd unpacks need not be the tensor that knows its total
        ctx.save_for_backward(x, weight_OI)
        return F.linear(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight_OI = ctx.saved_tensors
        with ctx.autocast.again():
            add_weight_gradients(ctx.weight, ctx.bias, x, grad)
            return input_gradient(weight_OI, x, grad) if ctx.needs_input_grad[0] else None, None, None
