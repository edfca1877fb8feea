"""A Mamba-3 layer as one operation, whose projections run beside its kernels (eq. 17 and 19).

A walk through the chunks is few programs that wait for memory, a product keeps the tensor cores busy. No token needs
to be cut off for that, because not all of a layer is one chain: before z comes Out, the states do not need it, and of
the backward's products only dX of the output projection is on the way to them. With L a projection, dL and wL the
gradients of its input and of its weight, and in brackets what runs at once:

    forward     B, C, dt, A, trap, angle -> (Gates || x) -> Local -> (Scan || z) -> Out -> out_proj
    backward    (Gates || d out_proj) -> (Local, Local back -> Scan, Scan back -> Queries, Keys || w out_proj)
                -> (Carry, Gates back, Shared back || d and w of z, x) -> d and w of B, C, dt, A, trap, angle

These are the products and kernels of the layer that is called part by part, so its bits are the same. Which stream has
what is the kernels' business, see `stateflow_kernels.mamba3_rule.Beside`: a product that is not on the current stream
uses nothing but what lives until the operation ends, and what it allocates itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..autocast import Autocast
from ..chunks import check_documents
from ..projections import (
    ProjectionsBackward,
    Taker,
    are_products,
    leaves_and_takers,
    only_multiplies,
    weight_gradient,
)
from ..recurrence import mamba3_kernels
from ..recurrence.backends import choose
from ..recurrence.mamba3 import Inputs, _check, _kernel_misfit
from .mixer import State

if TYPE_CHECKING:
    from .mamba3 import Mamba3

MODES = ("auto", "on", "off")
NUM_IN, NUM_PARAMETERS, NUM_STATES = 8, 6, 4


class AtOnce(NamedTuple):
    """Whether kernels and products really run at once, or in the same order on one stream."""

    forward: bool
    backward: bool


def wanted(layer: Mamba3, x_BTD: Tensor) -> AtOnce | None:
    """None: the layer is called part by part, for the setting, the plan, or what its parts want.

    Hooks, biases, autocasts and the like belong to calls of modules, and what watches each operation, as op-level
    activation checkpointing, to operations.
    """
    if layer.overlap_projections == "off" or layer.backend == "reference":
        return None
    if not are_products(x_BTD, *layer.projections()) or is_in_torch_dispatch_mode():
        return None
    if layer.overlap_projections == "on":
        return AtOnce(True, True)
    if not x_BTD.is_cuda or layer.backend == "chunk":
        return None
    x_shape = (*x_BTD.shape[:2], layer.num_heads, layer.head_dim)
    plan = mamba3_kernels.planned(x_shape, layer.state_dim, layer.num_angles, x_BTD.dtype, x_BTD.device)
    at_once = AtOnce(plan.overlap_projections, plan.overlap_projections_backward)
    return at_once if any(at_once) else None


def update(
    layer: Mamba3, x_BTD: Tensor, state: State, docs: Tensor | None, at_once: AtOnce
) -> tuple[Tensor, State]:
    """`Mixer.update` of the layer."""
    check_documents(docs, *x_BTD.shape[:2])  # as the recurrence does, which is passed by here
    linears, out = layer.projections(), layer.out_proj
    # Whose output is summed over ranks, for one, is called.
    called = not only_multiplies(out)
    every = linears if called else [*linears, out]
    weights = [linear.weight for linear in every]
    takers: Sequence[Taker | None] = [None] * len(every)
    if torch.is_grad_enabled():
        weights, takers = leaves_and_takers(every, weights)
    options = (layer.norm_eps, layer.A_floor, layer.chunk_size)
    call = _Call(layer.head_dim, layer.backend, options, tuple(takers), at_once)
    y_BTD, *carried = _Layer.apply(call, x_BTD, docs, *layer.parameters_of_core(), *state, *weights)
    return layer.out(y_BTD, ()) if called else y_BTD, tuple(carried)


@dataclass(frozen=True)
class _Call:
    head_dim: int
    backend: str
    options: tuple[float, float, int]
    takers: tuple[Taker | None, ...]  # of the projections, the last one perhaps that of the output
    at_once: AtOnce

    def form(self, inputs: Inputs) -> str:
        return choose("mamba3", self.backend, *inputs, misfit=_kernel_misfit(inputs, self.options[-1]))

    def beside(self, at_once: bool, **work: Callable):
        from stateflow_kernels.mamba3_rule import Beside

        return Beside(**work, at_once=at_once)

    def forward(
        self, x_BTD: Tensor, docs: Tensor | None, others: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Inputs, tuple[Tensor, ...]]:
        """The operands of the recurrence, and what it returns. `others`: its parameters and its state."""
        z_weight, x_weight, *small = weights[:NUM_IN]
        x_NI = x_BTD.flatten(0, -2)
        z_BTHP, x_BTHP = (
            x_BTD.new_empty(*x_BTD.shape[:2], len(weight) // self.head_dim, self.head_dim)
            for weight in (z_weight, x_weight)
        )
        inputs = Inputs(x_BTHP, z_BTHP, *(F.linear(x_BTD, weight) for weight in small), *others)
        _check(*inputs, self.options[-1])

        def write(weight_OI: Tensor, to_BTHP: Tensor) -> None:
            torch.mm(x_NI, weight_OI.t(), out=to_BTHP.view(len(x_NI), len(weight_OI)))

        gates, scan = (lambda: write(x_weight, x_BTHP)), (lambda: write(z_weight, z_BTHP))
        beside = self.beside(self.at_once.forward, gates=gates, scan=scan)
        run = mamba3_kernels.forward if self.form(inputs) == "triton" else mamba3_kernels.chunk_form
        return inputs, run(inputs, docs, *self.options, beside=beside)

    def backward(
        self,
        grads: Sequence[Tensor],
        x_BTD: Tensor,
        docs: Tensor | None,
        mixed_BTHP: Tensor | None,
        inputs: Inputs,
        weights: Sequence[Tensor],
        needed: Sequence[bool],
    ) -> tuple[Tensor, Inputs, list[Tensor | None]]:
        """The gradients of x, of the recurrence's inputs, and of those weights whose gradient nobody takes.

        mixed_BTHP: what the output projection got, where that is ours.
        """
        projections, weight_grads = ProjectionsBackward(x_BTD), [None] * len(weights)

        def project_backward(number: int, grad: Tensor) -> None:
            each = slice(number, number + 1)
            parts = (weights[each], [grad.flatten(2)], self.takers[each], needed[each])
            weight_grads[each] = projections.add(*parts)

        def through_z_and_x(grad_x: Tensor, grad_z: Tensor) -> None:
            project_backward(0, grad_z)
            project_backward(1, grad_x)

        work: dict[str, Callable] = dict(finish=through_z_and_x)
        grad_mixed_BTHP, *grads_of_state = grads
        if mixed_BTHP is not None:
            grad_NO, mixed_NI = grad_mixed_BTHP.flatten(0, -2), mixed_BTHP.flatten(2).flatten(0, -2)
            grad_mixed_BTHP = torch.empty_like(mixed_BTHP)

            def to_mixed() -> None:
                torch.mm(grad_NO, weights[-1], out=grad_mixed_BTHP.view(mixed_NI.shape))

            def to_weight() -> None:
                weight_grads[-1] = weight_gradient(mixed_NI, grad_NO, self.takers[-1], needed[-1])

            work |= dict(gates=to_mixed, meanwhile=to_weight)
        run = mamba3_kernels.backward if self.form(inputs) == "triton" else mamba3_kernels.chunk_form_backward
        beside = self.beside(self.at_once.backward, **work)
        found = run((grad_mixed_BTHP, *grads_of_state), inputs, docs, *self.options, beside=beside)
        for number, grad in enumerate(found[2:NUM_IN], start=2):
            project_backward(number, grad)
        return projections.input_gradient(), found, weight_grads


class _Layer(torch.autograd.Function):
    """(x, docs, parameters, state, weights of the projections) -> (y, state); y is [B, T, H, P] without the last."""

    @staticmethod
    def forward(ctx, call: _Call, x_BTD: Tensor, docs: Tensor | None, *tensors: Tensor):
        count = NUM_PARAMETERS + NUM_STATES
        others, weights = tensors[:count], tensors[count:]
        inputs, (mixed_BTHP, *carried) = call.forward(x_BTD, docs, others, weights)
        has_out = len(weights) > NUM_IN
        ctx.call, ctx.autocast = call, Autocast.at(x_BTD)
        ctx.save_for_backward(x_BTD, docs, mixed_BTHP if has_out else None, *inputs, *weights)
        y = F.linear(mixed_BTHP.flatten(2), weights[-1]) if has_out else mixed_BTHP
        return y, *carried

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x_BTD, docs, mixed_BTHP, *tensors = ctx.saved_tensors
        count = len(Inputs._fields)
        inputs, weights = Inputs(*tensors[:count]), tensors[count:]
        needed = ctx.needs_input_grad[-len(weights) :]
        with ctx.autocast.again():
            grad_x, found, weight_grads = ctx.call.backward(grads, x_BTD, docs, mixed_BTHP, inputs, weights, needed)
        return None, grad_x, None, *found[NUM_IN:], *weight_grads
