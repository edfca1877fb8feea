"""The activation of SwiGLU, y = silu(gate) x, number by number, and its backward, which needs the inputs only.

    dgate = dy x silu'(gate),   dx = dy silu(gate)

Bound by memory: in one pass forward and one backward, where PyTorch's operations take two and three.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activations import sigmoid, silu
from .aot import AotCase
from .primitives import rounded


class Tile(NamedTuple):
    """Numbers of a program, and its warps."""

    numbers: int
    warps: int


# 16 numbers of each tensor a thread forward, 8 backward, where five tensors are held.
FORWARD, BACKWARD = Tile(2048, 4), Tile(1024, 4)


@triton.jit
def _numbers(num_rows, F: tl.constexpr, BLOCK: tl.constexpr):
    """Offset of the program's first number, offsets from there and which of them exist.

    A count that is a multiple of F lets the compiler see that neighbours exist together: wide loads need that.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    return first, index, index < num_rows.to(tl.int64) * F - first


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_kernel(gate, x, y, num_rows, F: tl.constexpr, BLOCK: tl.constexpr):
    first, index, mask = _numbers(num_rows, F, BLOCK)
    gates = tl.load(gate + first + index, mask=mask, other=0.0).to(tl.float32)
    xs = tl.load(x + first + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + first + index, rounded(xs * silu(gates), y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_backward_kernel(grad_y, gate, x, grad_gate, grad_x, num_rows, F: tl.constexpr, BLOCK: tl.constexpr):
    first, index, mask = _numbers(num_rows, F, BLOCK)
    dy = tl.load(grad_y + first + index, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate + first + index, mask=mask, other=0.0).to(tl.float32)
    xs = tl.load(x + first + index, mask=mask, other=0.0).to(tl.float32)
    share = sigmoid(gates)
    out = dy * xs * (share * (1.0 + gates * (1.0 - share)))
    tl.store(grad_gate + first + index, rounded(out, grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_x + first + index, rounded(dy * gates * share, grad_x.dtype.element_ty), mask=mask)


def _launch(kernel, tile: Tile, *tensors: Tensor) -> None:
    last = tensors[0]
    row_len = last.shape[-1] if last.dim() else 1
    grid = (triton.cdiv(last.numel(), tile.numbers),)
    num_rows = last.numel() // max(1, row_len)
    kernel[grid](*tensors, num_rows, F=row_len, BLOCK=tile.numbers, num_warps=tile.warps)


def forward(gate: Tensor, x: Tensor, tile: Tile = FORWARD) -> Tensor:
    """y in x's dtype. Of one shape, each of bfloat16, float16 or float32."""
    gate, x = gate.contiguous(), x.contiguous()
    y = torch.empty_like(x)
    _launch(swiglu_kernel, tile, gate, x, y)
    return y


def backward(grad_y: Tensor, gate: Tensor, x: Tensor, tile: Tile = BACKWARD) -> tuple[Tensor, Tensor]:
    """Gradients of gate and x in their dtypes."""
    grad_y, gate, x = grad_y.contiguous(), gate.contiguous(), x.contiguous()
    grad_gate, grad_x = torch.empty_like(gate), torch.empty_like(x)
    _launch(swiglu_backward_kernel, tile, grad_y, gate, x, grad_gate, grad_x)
    return grad_gate, grad_x


def aot_cases() -> Iterator[AotCase]:
    forward = swiglu_kernel, FORWARD, ("gate", "x", "y")
    backward = swiglu_backward_kernel, BACKWARD, ("grad_y", "gate", "x", "grad_gate", "grad_x")
    for kernel, tile, pointers in (forward, backward):
        for dtype in ("bf16", "fp32"):
            types = {name: f"*{dtype}" for name in pointers} | dict(num_rows="i32")
            constexprs = dict(F=6912, BLOCK=tile.numbers)
            yield AotCase(f"{kernel.__name__} {dtype}", kernel, types, constexprs, tile.warps)
