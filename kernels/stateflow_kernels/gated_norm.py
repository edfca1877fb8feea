"""The gated RMSNorm y = x rstd weight silu(gate) over rows of V numbers, and its backward.

A program takes BR whole rows, so the backward recomputes rstd from the row that it holds anyway, and nothing but the
inputs is saved. With n = x rstd and dn = dy weight silu(gate):

    dx = rstd (dn - n mean(dn n)),   dgate = dy n weight silu'(gate),   dweight = sum over rows of dy n silu(gate)

Each program writes its part of dweight; a second pass adds up.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .aot import AotCase
from .primitives import rounded

# Of a program: 32 of each tensor a thread forward, half as many backward, where three tensors are held.
FORWARD_NUMBERS, BACKWARD_NUMBERS = 4096, 2048
NUM_WARPS = 4


@triton.jit
def _tile(num_rows, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr):
    """Offset of the program's first row, offsets from there [BR, BV] and which of them exist."""
    first = tl.program_id(0).to(tl.int64) * BR
    row = tl.arange(0, BR)
    column = tl.arange(0, BV)
    mask = (first + row < num_rows)[:, None] & (column < V)[None, :]
    return first * V, row[:, None] * V + column[None, :], mask


@triton.jit
def _weight(weight, V: tl.constexpr, BV: tl.constexpr):
    column = tl.arange(0, BV)
    return tl.load(weight + column, mask=column < V, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_rows", "eps"])
def gated_norm_kernel(
    x, gate, weight, y, num_rows, eps, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr
):  # [N, V], [N, V], [V], [N, V]
    start, offset, mask = _tile(num_rows, V, BR, BV)
    x_RV = tl.load(x + start + offset, mask=mask, other=0.0).to(tl.float32)
    gate_RV = tl.load(gate + start + offset, mask=mask, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x_RV * x_RV, axis=1) / V + eps)
    silu = gate_RV / (1.0 + tl.exp(-gate_RV))
    out = x_RV * rstd[:, None] * _weight(weight, V, BV) * silu
    tl.store(y + start + offset, rounded(out, y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "eps"])
def gated_norm_backward_kernel(
    grad_y,  # [N, V]
    x,  # [N, V]
    gate,  # [N, V]
    weight,  # [V]
    grad_x,  # [N, V]
    grad_gate,  # [N, V]
    parts,  # [programs, V] float32: of the weight's gradient
    num_rows,
    eps,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    start, offset, mask = _tile(num_rows, V, BR, BV)
    dy = tl.load(grad_y + start + offset, mask=mask, other=0.0).to(tl.float32)
    x_RV = tl.load(x + start + offset, mask=mask, other=0.0).to(tl.float32)
    gate_RV = tl.load(gate + start + offset, mask=mask, other=0.0).to(tl.float32)
    weight_V = _weight(weight, V, BV)
    rstd = (1.0 / tl.sqrt(tl.sum(x_RV * x_RV, axis=1) / V + eps))[:, None]
    sigmoid = 1.0 / (1.0 + tl.exp(-gate_RV))
    silu = gate_RV * sigmoid
    normed = x_RV * rstd

    grad_gated = dy * normed
    out = grad_gated * weight_V * (sigmoid * (1.0 + gate_RV * (1.0 - sigmoid)))
    tl.store(grad_gate + start + offset, rounded(out, grad_gate.dtype.element_ty), mask=mask)

    grad_normed = dy * weight_V * silu
    mean = tl.sum(grad_normed * normed, axis=1)[:, None] / V
    out = rstd * (grad_normed - normed * mean)
    tl.store(grad_x + start + offset, rounded(out, grad_x.dtype.element_ty), mask=mask)

    column = tl.arange(0, BV)
    part = tl.sum(grad_gated * silu, axis=0)
    tl.store(parts + tl.program_id(0).to(tl.int64) * V + column, part, mask=column < V)


def _tile_shape(row_len: int, numbers: int) -> tuple[int, int]:
    """BR and BV. Neither depends on the number of rows, so that a row's bits do not."""
    columns = triton.next_power_of_2(row_len)
    return max(1, numbers // columns), columns


def forward(x_NV: Tensor, gate_NV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """y [N, V] in x's dtype. All of bfloat16, float16 or float32; rows are meant to be short (32 to 256 numbers)."""
    x, gate, weight = x_NV.contiguous(), gate_NV.contiguous(), weight_V.contiguous()
    num_rows, row_len = x.shape
    y = torch.empty_like(x)
    rows, columns = _tile_shape(row_len, FORWARD_NUMBERS)
    gated_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, gate, weight, y, num_rows, eps, V=row_len, BR=rows, BV=columns, num_warps=NUM_WARPS
    )
    return y


def backward(
    grad_y_NV: Tensor, x_NV: Tensor, gate_NV: Tensor, weight_V: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and gate in their dtypes, and of weight in float32."""
    grad_y, x = grad_y_NV.contiguous(), x_NV.contiguous()
    gate, weight = gate_NV.contiguous(), weight_V.contiguous()
    num_rows, row_len = x.shape
    rows, columns = _tile_shape(row_len, BACKWARD_NUMBERS)
    num_programs = triton.cdiv(num_rows, rows)
    grad_x, grad_gate = torch.empty_like(x), torch.empty_like(gate)
    parts = torch.empty(num_programs, row_len, dtype=torch.float32, device=x.device)
    gated_norm_backward_kernel[(num_programs,)](
        grad_y, x, gate, weight, grad_x, grad_gate, parts, num_rows, eps,
        V=row_len, BR=rows, BV=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    return grad_x, grad_gate, parts.sum(0)


def aot_cases() -> Iterator[AotCase]:
    forward = gated_norm_kernel, FORWARD_NUMBERS, ("x", "gate", "weight", "y"), {}
    names = ("grad_y", "x", "gate", "weight", "grad_x", "grad_gate")
    backward = gated_norm_backward_kernel, BACKWARD_NUMBERS, names, {"parts": "*fp32"}
    for kernel, numbers, pointers, more in (forward, backward):
        for dtype, row_len in (("bf16", 128), ("fp32", 72)):
            rows, columns = _tile_shape(row_len, numbers)
            types = {name: f"*{dtype}" for name in pointers} | more | dict(num_rows="i32", eps="fp32")
            name = f"{kernel.__name__} {dtype} V={row_len}"
            yield AotCase(name, kernel, types, dict(V=row_len, BR=rows, BV=columns), NUM_WARPS)
