"""Weight gradients put off: what splits a backward B into I and W.

torch's own split walks the graph twice, which it does wrongly for several of these layers before 2.13, and which
recomputes a checkpointed layer once for each group of parameters. Here the backward runs once, as I, and only the
products dW = dy^T x of the projections (every ``nn.Linear``, most of a layer's weight gradients) are left out: each
projection hands out (x, dy) instead, and W computes the products later. All other gradients, those of norms,
convolutions, gates, embedding and head, are computed in I. So boundary states never wait for W, a recomputed layer
is recomputed once, and nothing of torch is needed but autograd functions.

How a projection hands out x and dy: it takes two more inputs, its *taps*, of the shapes of x and y. They hold nothing,
and the gradients that its backward gives them are x and dy themselves. A compiled graph may have such inputs and such
gradients like any others, where a note taken on the way would be a side effect that it must not have.

Between I and W a unit holds x and dy of its projections, and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stateflow.autocast import Autocast
from stateflow.weight_gradients import add_weight_gradients, adding_linear, input_gradient


@dataclass
class WeightWork:
    """One projection's share of W. The parameters may be views of parameters, with a graph of their own."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    grad: Tensor
    autocast: Autocast  # of the forward

    def run(self) -> None:
        """Adds the gradients to the parameters'."""
        with self.autocast.again():
            add_weight_gradients(self.weight, self.bias, self.x, self.grad)


class DeferredWeights:
    """Collects the weight gradients of the projections in ``module``, whose forward it replaces.

    Of several for one module the last one collects.

    Parts may be compiled by ``torch.compile(part)``. Such a part is called as a block is: first with x [B, s, D], and
    it calls each of its projections once, with tensors [B, s, ...] of the dtype of x.

    Raises:
        ValueError: for parts compiled in place, whose calls cannot be given anything more.
    """

    def __init__(self, module: nn.Module):
        for name, child in module.named_modules():
            if child._compiled_call_impl is not None:
                raise ValueError(
                    f"a backward split into I and W cannot run modules compiled in place, and {name or 'the module'} "
                    "is one: use torch.compile(module) instead of module.compile(), or a policy without W"
                )
        self._work: list[WeightWork] | None = None
        self._anchors: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        for child in module.modules():
            if isinstance(child, nn.Linear) and type(child).forward in (nn.Linear.forward, adding_linear):
                child.number = 0
                child.__class__ = _put_off(type(child))
            if isinstance(child, _PutOff):
                child.put_off_by = self
        compiled: list[str] = []
        for name, child in module.named_modules():
            inside = any(name.startswith(f"{other}.") or not other for other in compiled)
            if isinstance(child, torch._dynamo.OptimizedModule) and not inside:
                compiled.append(name)
                _give_taps(child)

    @contextmanager
    def collecting(self) -> Iterator[list[WeightWork]]:
        """Within it backwards of the module add to the list that it gives, and not to the gradients of weights."""
        assert self._work is None, "a backward within a backward"
        self._work = []
        try:
            yield self._work
        finally:
            self._work = None

    def note(self, linear: nn.Linear, x: Tensor, grad: Tensor) -> None:
        assert self._work is not None, "backward of a projection outside of collecting()"
        with torch.enable_grad():  # under tensor parallelism these are properties that give local parts
            self._work.append(WeightWork(linear.weight, linear.bias, x, grad, Autocast.at(x)))

    def taps(self, linears: Sequence[nn.Linear], shape: Sequence[int], like: Tensor) -> tuple[Tensor, ...]:
        """Two tensors for each projection, for its inputs [*shape, in] and its outputs [*shape, out]."""
        key = (like.device, like.dtype)
        if key not in self._anchors:
            zero = torch.zeros((), device=like.device, dtype=like.dtype)
            # The anchor has autograd record the taps, even where x needs no gradient.
            self._anchors[key] = zero, zero.clone().requires_grad_()
        zero, anchor = self._anchors[key]
        return _Taps.apply(anchor, zero, self, linears, tuple(shape))


def _give_taps(compiled: nn.Module) -> None:
    """A compiled part gets the taps of all its projections from outside: they are inputs of its graph.

    As globals, not as attributes of its modules: whatever hangs on a module has one shape for dynamo, and the chunks
    have many.
    """
    linears = [child for child in compiled.modules() if isinstance(child, _PutOff)]
    call = compiled.forward
    if not linears or getattr(call, "gives_taps", False):
        return
    for number, linear in enumerate(linears):
        linear.number = number

    @functools.wraps(call)
    def with_taps(x: Tensor, *args, **kwargs):
        if not torch.is_grad_enabled():
            return call(x, *args, **kwargs)
        _given[:] = linears[0].put_off_by.taps(linears, x.shape[:-1], x)
        try:
            return call(x, *args, **kwargs)
        finally:
            _given.clear()

    with_taps.gives_taps = True
    compiled.forward = with_taps


_given: list[Tensor] = []  # the taps of the compiled part that is being called


class _PutOff:
    """What a projection becomes, beside what it was.

    Attributes:
        put_off_by: the ``DeferredWeights``.
        number: among the projections of its compiled part.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or not self.weight.requires_grad:
            return F.linear(x, self.weight, self.bias)
        if _given:
            tap_x, tap_y = _given[2 * self.number], _given[2 * self.number + 1]
        else:
            tap_x, tap_y = self.put_off_by.taps([self], x.shape[:-1], x)
        # The weights come detached, so that nothing runs backward through what made them.
        bias = None if self.bias is None else self.bias.detach()
        return _Project.apply(x, self.weight.detach(), bias, tap_x, tap_y)


@functools.cache
def _put_off(kind: type) -> type:
    """One class for each: with a class a module dynamo would compile every module anew."""
    return type(f"PutOff{kind.__name__}", (_PutOff, kind), {})


class _Taps(torch.autograd.Function):
    """Makes taps, which take no memory; what arrives as their gradients is noted as work for W."""

    @staticmethod
    def forward(ctx, anchor, zero, owner: DeferredWeights, linears: Sequence[nn.Linear], shape: tuple[int, ...]):
        ctx.owner, ctx.linears, ctx.autocast = owner, linears, Autocast.at(zero)
        ctx.set_materialize_grads(False)
        taps: list[Tensor] = []
        for linear in linears:
            num_out, num_in = linear.weight.shape
            taps += (zero.expand(*shape, num_in), zero.expand(*shape, num_out))
        return tuple(taps)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        with ctx.autocast.again():
            for linear, x, grad in zip(ctx.linears, grads[::2], grads[1::2], strict=True):
                if x is not None:
                    ctx.owner.note(linear, x, grad)
        return None, None, None, None, None


class _Project(torch.autograd.Function):
    """A linear map. x and the taps have gradients, the weights none."""

    @staticmethod
    def forward(ctx, x, weight_OI, bias_O, tap_x, tap_y):
        # A compiled graph keeps its own.
        ctx.autocast = None if torch.compiler.is_compiling() else Autocast.at(x)
        ctx.save_for_backward(x, weight_OI)
        return F.linear(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight_OI = ctx.saved_tensors
        with nullcontext() if ctx.autocast is None else ctx.autocast.again():
            grad_x = input_gradient(weight_OI, x, grad) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, x, grad


def project_backward(linear: nn.Linear, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x from that of linear(x), which has not been computed; the weight's is added up, or put off."""
    weight = linear.weight
    if weight.requires_grad:
        if isinstance(linear, _PutOff):
            linear.put_off_by.note(linear, x, grad)
        else:
            add_weight_gradients(weight, linear.bias, x, grad)
    return input_gradient(weight.detach(), x, grad)


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
