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
from torch.nn.modules.module import _has_any_global_hook

from stateflow.autocast import Autocast
from stateflow.weight_gradients import add_weight_gradients, adding_linear, total_of

# Takes x and the gradient of a projection's output, for its weight.
Taker = Callable[[Tensor, Tensor], None]


def project(x: Tensor, *linears: nn.Linear | tuple[nn.Linear, ...]) -> list[Tensor]:
    """[linear(x) for linear in linears], those in a tuple by one product, whose outputs are views of one tensor."""
    groups = [linear if isinstance(linear, tuple) else (linear,) for linear in linears]
    flat = [linear for group in groups for linear in group]
    if _want_calls() or not all(only_multiplies(linear) for linear in flat):
        return [linear(x) for linear in flat]
    sizes = [len(group) for group in groups]
    if torch.is_grad_enabled() and not x.requires_grad:
        return [linear(x) for linear in flat]
    weights = [linear.weight for linear in flat]  # once: a parametrization computes it
    if not torch.is_grad_enabled():
        return _products(x, sizes, weights)
    takers = [_taker(linear, weight) for linear, weight in zip(flat, weights, strict=True)]
    leaves = [weight if taker is None else weight.detach() for weight, taker in zip(weights, takers, strict=True)]
    return list(_Projections.apply(x, sizes, takers, *leaves))


def _want_calls() -> bool:
    # A compiled graph must not have side effects, and fuses by itself. Under autocast dtypes are each operation's own.
    # Transforms, as torch.func.grad, go through operations.
    return (
        torch.compiler.is_compiling()
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
    )


def only_multiplies(linear: nn.Module) -> bool:
    """Whether calling `linear` is a product with its weight, and nothing else: hooks belong to calls."""
    own = vars(linear)
    known = type(linear).forward in (nn.Linear.forward, adding_linear) or "put_off_by" in own
    return (
        known
        and "forward" not in own
        and linear.bias is None
        and not (linear._forward_hooks or linear._forward_pre_hooks)
        and not (linear._backward_hooks or linear._backward_pre_hooks)
        and not _has_any_global_hook()
    )


def _taker(linear: nn.Linear, weight: Tensor) -> Taker | None:
    """None: autograd takes the gradient."""
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
        ctx.sizes, ctx.takers, ctx.autocast = sizes, takers, Autocast.at(x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        return tuple(_products(x, sizes, weights))

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        if torch.is_grad_enabled() and any(ctx.takers):
            raise RuntimeError(
                "create_graph=True: projections that add up the gradients of their weights themselves cannot be "
                "differentiated again; use a model without working weights, and a policy without W"
            )
        with ctx.autocast.again():
            return _Projections._gradients(ctx, grads)

    @staticmethod
    def _gradients(ctx, grads: Sequence[Tensor | None]):
        x, *weights = ctx.saved_tensors
        x_NI, grad_NI, weight_grads = x.reshape(-1, x.shape[-1]), None, []
        takers, needed = iter(ctx.takers), iter(ctx.needs_input_grad[3:])
        for group, group_grads in zip(_grouped(weights, ctx.sizes), _grouped(grads, ctx.sizes), strict=True):
            used = [(weight, grad) for weight, grad in zip(group, group_grads, strict=True) if grad is not None]
            if used:
                grad_NO = _joined([grad.reshape(-1, grad.shape[-1]) for _, grad in used], 1)
                weight_OI = _joined([weight for weight, _ in used], 0)
                grad_NI = grad_NO @ weight_OI if grad_NI is None else grad_NI.addmm_(grad_NO, weight_OI)
                parts = iter(grad_NO.split([len(weight) for weight, _ in used], dim=1))
            for grad in group_grads:
                taker, needs_grad = next(takers), next(needed)
                own_NO = None if grad is None else next(parts)
                if taker is not None and own_NO is not None:
                    taker(x_NI, own_NO)
                product = taker is None and needs_grad and own_NO is not None
                weight_grads.append(own_NO.t() @ x_NI if product else None)
        return None if grad_NI is None else grad_NI.view(x.shape), None, None, *weight_grads
