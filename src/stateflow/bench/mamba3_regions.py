"""Mamba-3's overlapped regions, beside the paper's table 4b: a layer's projections beside its kernels.

    forward     eq. 17: from x to y, input projections, kernels, output projection
    backward    eq. 19: the gradient of the output projection's input, the kernels, the gradient of its weight
    layer       of everything from dy to dx: eq. 19 and the backward of the input projections

Each with products beside kernels against the same in turn on one stream. Weights have gradients in float32,
to which the products add. The kernel that is to be hidden, one for the paper, is here all kernels of the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from stateflow.bench.contestants import Region
from stateflow.layers import Mamba3, Mamba3Dynamics
from stateflow.recurrence import mamba3_kernels
from stateflow.recurrence.mamba3 import Inputs
from stateflow.recurrence.numerics import add_product
from stateflow.working_weights import WorkingWeights
from stateflow_kernels.mamba3_rule import Beside
from stateflow_kernels.plan_table import Shape

# By heads: of the paper's 3B, 15B at TP4 and 32B at TP8, whose ranks have a part of the heads and the whole width.
DIMS = {80: 2560, 40: 5120, 24: 6144}
FORWARD, BACKWARD, LAYER = "forward, eq. 17", "backward, eq. 19", "the layer's backward"
# Speed-ups of forward and backward by heads and tokens, and the most of the fused kernel that is hidden, by heads.
PAPER = {
    80: {8192: (1.08, 1.19), 16384: (1.10, 1.17), 32768: (1.12, 1.24), 65536: (1.13, 1.17)},
    40: {8192: (1.30, 1.52), 16384: (1.30, 1.54), 32768: (1.27, 1.64), 65536: (1.21, 1.53)},
    24: {8192: (1.27, 1.73), 16384: (1.40, 1.72), 32768: (1.35, 1.72), 65536: (1.29, 1.57)},
}
PAPER_HIDDEN = {80: 0.357, 40: 0.713, 24: 0.848}


def dim_of(heads: int, p_dim: int) -> int:
    """Of the model; for heads that the paper does not have, that of an official module with so many."""
    return DIMS.get(heads, heads * p_dim // 2)


class Layer:
    """One layer with working weights on random inputs. Its calls take `overlap_projections`."""

    def __init__(self, shape: Shape, device: torch.device, dim: int):
        dtype = getattr(torch, shape.dtype)
        sizes = dict(head_dim=shape.v_dim, state_dim=shape.k_dim, num_angles=shape.num_angles)
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device)

        with torch.device(device):
            self.module = Mamba3(dim, shape.num_heads, backend="triton", **sizes)
        WorkingWeights(self.module, dtype, lambda module: isinstance(module, Mamba3Dynamics)).prepare()
        tokens = (shape.batch, shape.tokens)
        self.x = normal(*tokens, dim).to(dtype).requires_grad_()
        specs = self.module.state_spec(dtype)
        self.state = tuple((0.3 * normal(shape.batch, *spec.shape)).requires_grad_() for spec in specs)
        self.grads = [normal(*tokens, dim).to(dtype), *(normal(*x.shape) for x in self.state)]
        self.inputs = [self.x, *self.state, *self.module.dynamics.parameters()]

    def forward(self, overlap: str) -> tuple[Tensor, ...]:
        self.module.overlap_projections = overlap
        y, state = self.module.update(self.x, self.state, None)
        return y, *state

    def forward_alone(self, overlap: str) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.forward(overlap)

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, self.inputs, self.grads, retain_graph=True)


def regions(shape: Shape, device: torch.device) -> list[Region]:
    layer = Layer(shape, device, dim_of(shape.num_heads, shape.v_dim))
    module = layer.module
    with torch.no_grad():
        operands, _, _ = module.pre(layer.x, layer.state, None)
        inputs = Inputs(*operands, *module.parameters_of_core(), *layer.state)
        options = (None, module.norm_eps, module.A_floor, module.chunk_size)
        mixed, *_ = mamba3_kernels.forward(inputs, *options)
    outputs = {overlap: layer.forward(overlap) for overlap in ("off", "on")}
    grad_mixed = torch.empty_like(mixed)
    kernels_back = partial(mamba3_kernels.backward, (grad_mixed, *layer.grads[1:]), inputs, *options)
    grad_NO = layer.grads[0].flatten(0, 1)
    weight, total = module.out_proj.weight.detach(), module.out_proj._parameters["weight"].grad

    def to_mixed() -> None:
        torch.mm(grad_NO, weight, out=grad_mixed.view(len(grad_NO), -1))

    def to_weight() -> None:
        add_product(total, grad_NO.t(), mixed.view(len(grad_NO), -1))

    def serial() -> Inputs:
        to_mixed()
        found = kernels_back()
        to_weight()
        return found

    beside = Beside(gates=to_mixed, meanwhile=to_weight)
    to_mixed()
    return [
        Region(
            FORWARD,
            partial(layer.forward_alone, "off"),
            partial(layer.forward_alone, "on"),
            _without_grad(partial(mamba3_kernels.forward, inputs, *options)),
        ),
        Region(
            BACKWARD,
            _without_grad(serial),
            _without_grad(partial(kernels_back, beside=beside)),
            _without_grad(kernels_back),
        ),
        Region(
            LAYER,
            partial(layer.backward, outputs["off"]),
            partial(layer.backward, outputs["on"]),
            _without_grad(kernels_back),
        ),
    ]


def _without_grad(call: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(call)
