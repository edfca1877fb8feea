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
    if not are_products(x, *flat):
        return [linear(x) for linear in flat]
    sizes = [len(group) for group in groups]
    weights = [linear.weight for linear in flat]  # once: a parametrization computes it
    if not torch.is_grad_enabled():
        return _products(x, sizes, weights)
    leaves, takers = leaves_and_takers(flat, weights)
    return list(_Projections.apply(x, sizes, takers, *leaves))


def are_products(x: Tensor, *linears: nn.Linear) -> bool:
    """Whether an operation of our own may take the place of the calls linear(x)."""
    if _want_calls() or (torch.is_grad_enabled() and not x.requires_grad):
        return False
    return all(only_multiplies(linear) for linear in linears)


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


def leaves_and_takers(
    linears: Sequence[nn.Linear], weights: Sequence[Tensor]
) -> tuple[list[Tensor], list[Taker | None]]:
    """The weights as autograd is to see them, and who takes the gradients that it does not."""
    takers = [_taker(linear, weight) for linear, weight in zip(linears, weights, strict=True)]
    leaves = [weight if taker is None else weight.detach() for weight, taker in zip(weights, takers, strict=True)]
    return leaves, takers


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
        backward, weight_grads = ProjectionsBackward(x), []
        parts = (weights, grads, ctx.takers, ctx.needs_input_grad[3:])
        for group in zip(*(_grouped(part, ctx.sizes) for part in parts), strict=True):
            weight_grads += backward.add(*group)
        return backward.input_gradient(), None, None, *weight_grads


class ProjectionsBackward:
    """The backward of projections of x, product by product; their gradients of x add up."""

    def __init__(self, x: Tensor):
        self._x = x
        self._x_NI, self._grad_NI = x.reshape(-1, x.shape[-1]), None

    def add(
        self,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        takers: Sequence[Taker | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Of those that one product made, from the gradients of its parts; returns the weights' that autograd takes."""
        used = [(weight, grad) for weight, grad in zip(weights, grads, strict=True) if grad is not None]
        parts = iter(())
        if used:
            grad_NO = _joined([grad.reshape(-1, grad.shape[-1]) for _, grad in used], 1)
            weight_OI = _joined([weight for weight, _ in used], 0)
            if self._grad_NI is None:
                self._grad_NI = grad_NO @ weight_OI
            else:
                self._grad_NI.addmm_(grad_NO, weight_OI)
            parts = iter(grad_NO.split([len(weight) for weight, _ in used], dim=1))
        own = [None if grad is None else next(parts) for grad in grads]
        return [weight_gradient(self._x_NI, *each) for each in zip(own, takers, needed, strict=True)]

    def input_gradient(self) -> Tensor | None:
        return None if self._grad_NI is None else self._grad_NI.view(self._x.shape)


def weight_gradient(x_NI: Tensor, grad_NO: Tensor | None, taker: Taker | None, needed: bool) -> Tensor | None:
    """What autograd takes: the gradient where it is `needed`, None where it goes to the taker."""
    if grad_NO is None:
        return None
    if taker is not None:
        taker(x_NI, grad_NO)
        return None
    return grad_NO.t() @ x_NI if needed else None
