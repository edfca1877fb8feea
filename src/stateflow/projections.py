"""Several projections of one tensor: what they share, its gradient, is added up by the products themselves.

Called one by one, each projection's backward makes a gradient of x, and autograd adds them: another pass over three
tensors of the size of x for each.  A product that accumulates reads and writes the sum while it computes.

Projections to a few numbers, those of gates, go together: the library's products are slow where a row of the output is
no multiple of 16 bytes, and each reads x again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stateflow.weight_gradients import add_weight_gradients, adding_linear, total_of

# Takes x and the gradient of a projection's output, for its weight.
Taker = Callable[[Tensor, Tensor], None]


def project(x: Tensor, *linears: nn.Linear | tuple[nn.Linear, ...]) -> list[Tensor]:
    """[linear(x) for linear in linears], those in a tuple by one product, whose outputs are views of one tensor."""
    groups = [linear if isinstance(linear, tuple) else (linear,) for linear in linears]
    flat = [linear for group in groups for linear in group]
    # A compiled graph must not have side effects, and fuses by itself; hooks belong to calls.
    if torch.compiler.is_compiling() or not all(_only_multiplies(linear) for linear in flat):
        return [linear(x) for linear in flat]
    sizes = [len(group) for group in groups]
    if not torch.is_grad_enabled():
        return _products(x, sizes, [linear.weight for linear in flat])
    if not x.requires_grad:
        return [linear(x) for linear in flat]
    takers = [_taker(linear) for linear in flat]
    weights = [
        linear.weight if taker is None else linear.weight.detach() for linear, taker in zip(flat, takers, strict=True)
    ]
    return list(_Projections.apply(x, sizes, takers, *weights))


def _only_multiplies(linear: nn.Linear) -> bool:
    known = type(linear).forward in (nn.Linear.forward, adding_linear) or "put_off_by" in vars(linear)
    return known and linear.bias is None and not linear._forward_hooks and not linear._forward_pre_hooks


def _taker(linear: nn.Linear) -> Taker | None:
    """None: autograd takes the gradient."""
    weight = linear.weight
    if not weight.requires_grad:
        return None
    if "put_off_by" in vars(linear):  # see `pipeline.deferred`
        return functools.partial(linear.put_off_by.note, linear)
    return None if total_of(weight) is None else functools.partial(add_weight_gradients, weight, None)


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def _grouped(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[Tensor]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [tensors[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _products(x: Tensor, sizes: Sequence[int], weights: Sequence[Tensor]) -> list[Tensor]:
    outputs: list[Tensor] = []
    for group in _grouped(weights, sizes):
        y = F.linear(x, _joined(group, 0))
        outputs += [y] if len(group) == 1 else y.split([len(weight) for weight in group], dim=-1)
    return outputs


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, sizes: Sequence[int], takers: Sequence[Taker | None], *weights: Tensor):
        ctx.sizes, ctx.takers = sizes, takers
        ctx.save_for_backward(x, *weights)
        return tuple(_products(x, sizes, weights))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        x_NI, grad_NI, weight_grads = x.reshape(-1, x.shape[-1]), None, []
        takers, needed = iter(ctx.takers), iter(ctx.needs_input_grad[3:])
        for group, group_grads in zip(_grouped(weights, ctx.sizes), _grouped(grads, ctx.sizes), strict=True):
            grad_NO = _joined([grad.reshape(-1, grad.shape[-1]) for grad in group_grads], 1)
            if grad_NI is None:
                grad_NI = grad_NO @ _joined(group, 0)
            else:
                grad_NI.addmm_(grad_NO, _joined(group, 0))
            for own_NO in grad_NO.split([len(weight) for weight in group], dim=1):
                taker, needs_grad = next(takers), next(needed)
                if taker is not None:
                    taker(x_NI, own_NO)
                weight_grads.append(own_NO.t() @ x_NI if taker is None and needs_grad else None)
        return grad_NI.view(x.shape), None, None, *weight_grads
