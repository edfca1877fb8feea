"""Operations of `torch.library` with little Python around them.

`torch.library.custom_op` does the same with more checks. Per call of a differentiable operation, forward and
backward, it takes about 0.2 ms more, and a layer has half a dozen of them: with chunks of a few thousand tokens the
GPU would wait for the host. What is left out: the check that no output shares memory with an input. Do not return
an input or a view of one.

An operation computes in the types of its own contract, whatever autocast is on: products within it are not autocast's
to round. Forward-mode derivatives are refused: nobody has written them, and left alone they would be 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ..autocast import Autocast

_LIBRARY = torch.library.Library("stateflow", "FRAGMENT")


class Operation:
    """One operation; a decorator of its implementation, or called with the implementation and a schema.

    Args:
        name: "stateflow::name"; the operation is `torch.ops.stateflow.name.default` then.
        schema: the signature as text where annotations cannot say it.
    """

    def __init__(self, name: str, implementation: Callable | None = None, schema: str | None = None):
        self._name = name
        if implementation is not None:
            self(implementation, schema)

    def __call__(self, implementation: Callable, schema: str | None = None) -> "Operation":
        schema = schema or torch.library.infer_schema(implementation, mutates_args=())
        short = self._name.removeprefix("stateflow::")
        _LIBRARY.define(short + schema)
        _LIBRARY.impl(short, implementation, "CompositeExplicitAutograd")
        self.implementation = implementation
        overload = self.overload = getattr(torch.ops.stateflow, short).default

        def without_autocast(*inputs):
            with torch._C._DisableAutocast():
                return overload(*inputs)

        for kind in ("AutocastCPU", "AutocastCUDA"):
            _LIBRARY.impl(short, without_autocast, kind)
        # From here on a call is the operation's.
        self.__class__ = _Defined
        return self

    def register_fake(self, function: Callable) -> Callable:
        """Shapes, dtypes and devices of the outputs, for tracing."""
        torch.library.register_fake(self._name, function, lib=_LIBRARY)
        return function

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """As `torch.library.register_autograd`: `setup_context(ctx, inputs, output)`, `backward(ctx, *grads)`."""
        overload = self.overload

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                with torch._C._AutoDispatchBelowAutograd():
                    output = overload(*inputs)
                ctx.autocast = Autocast.at(next(x for x in inputs if isinstance(x, Tensor)))
                setup_context(ctx, inputs, output)
                return output

            @staticmethod
            @once_differentiable  # else second derivatives are 0: backwards are operations without one
            def backward(ctx, *grads):
                with ctx.autocast.again():
                    return backward(ctx, *grads)

        def with_autograd(*inputs):
            if forward_ad._current_level >= 0 and any(map(_has_tangent, inputs)):
                raise NotImplementedError(
                    f"{self._name} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad): use "
                    'reverse mode, or backend="reference", which is plain PyTorch'
                )
            if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
                return Differentiable.apply(*inputs)
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*inputs)

        _LIBRARY.impl(self._name.removeprefix("stateflow::"), with_autograd, "Autograd")


def _has_tangent(x: object) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


class _Defined(Operation):
    def __call__(self, *args):
        return self.overload(*args)
