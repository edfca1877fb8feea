"""The activation of SwiGLU, y = silu(gate) x, number by number, and its backward, which needs the inputs only.

    dgate = dy x silu'(gate),   dx = dy silu(gate)

Bound by memory: in one pass forward and one backward, where PyTorch's operations take two and three.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .aot import AotCase
from .primitives import rounded

# Of a program: 16 of each tensor a thread forward, 8 backward, where five tensors are held.
FORWARD_NUMBERS, BACKWARD_NUMBERS = 2048, 1024
NUM_WARPS = 4


@triton.jit
def _numbers(count, BLOCK: tl.constexpr):
    """Offset of the program's first number, offsets from there and which of them exist."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    return first, index, index < count - first


@triton.jit(do_not_specialize=["count"])
def swiglu_kernel(gate, x, y, count, BLOCK: tl.constexpr):
    first, index, mask = _numbers(count, BLOCK)
    gates = tl.load(gate + first + index, mask=mask, other=0.0).to(tl.float32)
    xs = tl.load(x + first + index, mask=mask, other=0.0).to(tl.float32)
    out = xs * gates / (1.0 + tl.exp(-gates))
    tl.store(y + first + index, rounded(out, y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def swiglu_backward_kernel(grad_y, gate, x, grad_gate, grad_x, count, BLOCK: tl.constexpr):
    first, index, mask = _numbers(count, BLOCK)
    dy = tl.load(grad_y + first + index, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate + first + index, mask=mask, other=0.0).to(tl.float32)
    xs = tl.load(x + first + index, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gates))
    out = dy * xs * (sigmoid * (1.0 + gates * (1.0 - sigmoid)))
    tl.store(grad_gate + first + index, rounded(out, grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_x + first + index, rounded(dy * gates * sigmoid, grad_x.dtype.element_ty), mask=mask)


def forward(gate: Tensor, x: Tensor) -> Tensor:
    """y in x's dtype. Of one shape, each of bfloat16, float16 or float32."""
    gate, x = gate.contiguous(), x.contiguous()
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), FORWARD_NUMBERS),)
    swiglu_kernel[grid](gate, x, y, x.numel(), BLOCK=FORWARD_NUMBERS, num_warps=NUM_WARPS)
    return y


def backward(grad_y: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and x in their dtypes."""
    grad_y, gate, x = grad_y.contiguous(), gate.contiguous(), x.contiguous()
    grad_gate, grad_x = torch.empty_like(gate), torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), BACKWARD_NUMBERS),)
    swiglu_backward_kernel[grid](grad_y, gate, x, grad_gate, grad_x, x.numel(), BLOCK=BACKWARD_NUMBERS, num_warps=NUM_WARPS)
    return grad_gate, grad_x


def aot_cases() -> Iterator[AotCase]:
    forward = swiglu_kernel, FORWARD_NUMBERS, ("gate", "x", "y")
    backward = swiglu_backward_kernel, BACKWARD_NUMBERS, ("grad_y", "gate", "x", "grad_gate", "grad_x")
    for kernel, numbers, pointers in (forward, backward):
        for dtype in ("bf16", "fp32"):
            types = {name: f"*{dtype}" for name in pointers} | dict(count="i64")
            yield AotCase(f"{kernel.__name__} {dtype}", kernel, types, dict(BLOCK=numbers), NUM_WARPS)
