"""Weight gradients put off: what splits a backward B into I and W.

torch's own split walks the graph twice, which it does wrongly for several of these layers before 2.13, and which
recomputes a checkpointed layer once for each group of parameters. Here the backward runs once, as I, and only the
products dW = dy^T x of the projections (every ``nn.Linear``, most of a layer's weight gradients) are left out: each
projection notes (x, dy) instead, and W computes the products later. All other gradients, those of norms,
convolutions, gates, embedding and head, are computed in I. So boundary states never wait for W, a recomputed layer
is recomputed once, and nothing of torch is needed but an autograd function.

Between I and W a unit holds x and dy of its projections, and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class WeightWork:
    """One projection's share of W. The parameters may be views of parameters, with a graph of their own."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    grad: Tensor

    def run(self) -> None:
        """Adds the gradients to the parameters'."""
        grad_NO = self.grad.reshape(-1, self.grad.shape[-1])
        with torch.no_grad():
            grad_OI = grad_NO.t() @ self.x.reshape(-1, self.x.shape[-1])
        if self.weight.requires_grad:
            torch.autograd.backward(self.weight, grad_OI)
        if self.bias is not None and self.bias.requires_grad:
            torch.autograd.backward(self.bias, grad_NO.sum(0))


class DeferredWeights:
    """Collects the weight gradients of the projections in ``module``, whose forward it replaces.

    Raises:
        ValueError: if the module holds compiled parts: what a projection notes in the backward is no tensor, and a
            compiled graph keeps tensors only.
    """

    def __init__(self, module: nn.Module):
        for name, child in module.named_modules():
            if isinstance(child, torch._dynamo.OptimizedModule) or child._compiled_call_impl is not None:
                raise ValueError(
                    f"a backward split into I and W cannot run compiled modules, and {name or 'the module'} is one: a "
                    "compiled graph cannot put off a weight gradient; leave it uncompiled, or use a policy without W"
                )
        self._work: list[WeightWork] | None = None
        self._anchors: dict[torch.device, Tensor] = {}
        for child in module.modules():
            if isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward:
                child.forward = functools.partial(self._project, child)

    @contextmanager
    def collecting(self) -> Iterator[list[WeightWork]]:
        """Within it backwards of the module add to the list that it gives, and not to the gradients of weights."""
        assert self._work is None, "a backward within a backward"
        self._work = []
        try:
            yield self._work
        finally:
            self._work = None

    def note(self, work: WeightWork) -> None:
        assert self._work is not None, "backward of a projection outside of collecting()"
        self._work.append(work)

    def _project(self, linear: nn.Linear, x: Tensor) -> Tensor:
        weight, bias = linear.weight, linear.bias  # under tensor parallelism properties that give local parts
        if not torch.is_grad_enabled() or not weight.requires_grad:
            return F.linear(x, weight, bias)
        anchor = self._anchors.get(x.device)
        if anchor is None:
            anchor = self._anchors[x.device] = torch.zeros((), device=x.device, requires_grad=True)
        return _Project.apply(x, anchor, weight.detach(), None if bias is None else bias.detach(), weight, bias, self)


class _Project(torch.autograd.Function):
    """A linear map with the gradient of x only.

    ``anchor`` has autograd record the node even where x needs no gradient. The weights come detached, so that
    nothing runs backward through what made them.
    """

    @staticmethod
    def forward(ctx, x, anchor, weight_OI, bias_O, weight, bias, owner: DeferredWeights):
        ctx.save_for_backward(x, weight_OI)
        ctx.parameters, ctx.owner = (weight, bias), owner
        return F.linear(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight_OI = ctx.saved_tensors
        ctx.owner.note(WeightWork(*ctx.parameters, x, grad))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad.reshape(-1, grad.shape[-1]) @ weight_OI).reshape(x.shape)
        return grad_x, None, None, None, None, None, None


def project_backward(linear: nn.Linear, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x from that of linear(x), which has not been computed; the weight's is added up, or put off."""
    work = WeightWork(linear.weight, linear.bias, x, grad)
    forward = linear.forward
    if isinstance(forward, functools.partial):
        forward.func.__self__.note(work)
    elif linear.weight.requires_grad:
        work.run()
    return (grad.reshape(-1, grad.shape[-1]) @ linear.weight.detach()).reshape(x.shape)


def run_all(work: list[WeightWork]) -> None:
    """W: each projection's operands are let go as soon as they are used."""
    while work:
        work.pop().run()


def held_bytes(work: list[WeightWork]) -> int:
    """Bytes of what waits for W, each storage once."""
    storages = {}
    for entry in work:
        for tensor in (entry.x, entry.grad):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())
