"""Mixed precision on one rank: parameters and gradients in full precision, computing with a copy in 16 bits.

A module's attribute gives the *working weight*, a leaf in the compute dtype; the parameter itself, which optimizer,
clipping and checkpoints see, stays as it is.  Working weights are cast once a step.  Gradients add up in one buffer a
parameter, in the parameter's dtype and with an address that never changes, so that a recorded CUDA graph can add to it.
Projections that are not compiled add theirs by the product that makes it (`weight_gradients.py`); other operations hand
a gradient in the compute dtype to the leaf, which a hook adds.

FSDP2 on one rank computes the same numbers, but runs Python for every parameter in every unit, and moves its weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stateflow.recurrence.numerics import adds_products
from stateflow.weight_gradients import accumulates_in, adding_linear


class Weight(NamedTuple):
    """A parameter, the leaf that is computed with, and the buffer in which gradients add up (the parameter's .grad)."""

    parameter: nn.Parameter
    working: Tensor
    grad: Tensor


@functools.cache  # one class for all modules of a kind, so that compiled blocks share their graphs
def _with_working_weights(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass whose attributes `names` are the working weights, once there are any.

    A projection adds up its gradients by itself.
    """

    def make(name: str) -> property:
        return property(lambda self: self.working_weights.get(name, self._parameters[name]))

    members = {name: make(name) for name in names}
    if issubclass(cls, nn.Linear) and cls.forward is nn.Linear.forward:
        members["forward"] = adding_linear
    return type(cls.__name__, (cls,), members)


class WorkingWeights:
    """Gives every module of `model` working weights of `dtype`.

    Args:
        model: what is called; its forward prepares the weights.  It may be on the meta device still.
        dtype: what is computed in.
        keep: whether a module's own parameters are computed with as they are.  They get a gradient buffer too.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, keep: Callable[[nn.Module], bool] = lambda module: False):
        self._dtype, self._model, self._keep = dtype, model, keep
        self._of_module: dict[nn.Module, list[Weight]] = {}
        self._weights: list[Weight] = []
        self._versions: list[int] = []
        for module in model.modules():
            names = tuple(name for name, _ in module.named_parameters(recurse=False))
            if names and not keep(module):
                module.working_weights = {}
                module.__class__ = _with_working_weights(type(module), names)
        model.register_forward_pre_hook(lambda *_: self.prepare())

    def of(self, module: nn.Module) -> list[Weight]:
        """Those of all parameters within `module`; empty before the first forward."""
        return [weight for child in module.modules() for weight in self._of_module.get(child, ())]

    def prepare(self) -> None:
        """Casts the weights where a parameter has changed, and attaches the gradient buffers where there is none.

        To be called before a forward; the model's own forward does.
        """
        if not self._weights:
            self._create()
        if torch.is_grad_enabled():
            self._attach_gradients()
        versions = [weight.parameter._version for weight in self._weights]
        if versions != self._versions:
            cast = [weight for weight in self._weights if weight.working is not weight.parameter]
            with torch.no_grad():
                torch._foreach_copy_([w.working for w in cast], [w.parameter for w in cast])
            self._versions = versions

    def _attach_gradients(self) -> None:
        fresh = []
        for parameter, _, grad in self._weights:
            if parameter.grad is None:
                fresh.append(grad)
                parameter.grad = grad
            elif parameter.grad is not grad:  # someone has put another tensor there
                grad.copy_(parameter.grad)
                parameter.grad = grad
        if fresh:
            torch._foreach_zero_(fresh)
            self._versions = []  # a new step: cast again whatever the version counters say

    def _create(self) -> None:
        seen: dict[nn.Parameter, Weight] = {}
        for module in self._model.modules():
            own = dict(module.named_parameters(recurse=False))
            for name, parameter in own.items():
                if parameter not in seen:
                    seen[parameter] = self._make(parameter, self._keep(module))
                if not self._keep(module):
                    module.working_weights[name] = seen[parameter].working
            self._of_module[module] = [seen[parameter] for parameter in own.values() if parameter.requires_grad]
        self._weights = [weight for weight in seen.values() if weight.parameter.requires_grad]
        for parameter, working, _ in seen.values():
            if not parameter.requires_grad:
                working.copy_(parameter)

    def _make(self, parameter: nn.Parameter, keep: bool) -> Weight:
        assert not parameter.is_meta, "weights are made by the first forward: materialise the model before"
        grad = torch.empty_like(parameter, requires_grad=False)
        if keep:
            return Weight(parameter, parameter, grad)
        working = torch.empty_like(parameter, dtype=self._dtype, requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            working.register_post_accumulate_grad_hook(functools.partial(_hand_over, total=grad))
            accumulates_in(working, grad)
            adds_products(grad.device, working.dtype, grad.dtype)  # now: not while a CUDA graph is recorded
        return Weight(parameter, working, grad)


def _hand_over(working: Tensor, total: Tensor) -> None:
    if working.grad is not None:  # an operation may hand a weight no gradient
        total.add_(working.grad)
        working.grad = None
