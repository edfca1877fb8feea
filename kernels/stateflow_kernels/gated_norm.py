"""The gated RMSNorm y = x rstd weight silu(gate) over rows of V numbers, and its backward.

A program takes BR whole rows, so the backward recomputes rstd from the row that it holds anyway, and nothing but the
inputs is saved. With n = x rstd and dn = dy weight silu(gate):

    dx = rstd (dn - n mean(dn n)),   dgate = dy n weight silu'(gate),   dweight = sum over rows of dy n silu(gate)

Each program writes its part of dweight; a second pass adds up.
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
from .waves import multiprocessors, units_of_a_program


class Tile(NamedTuple):
    """How the work is shared out.

    Attributes:
        numbers: of whole rows that a program holds at once.
        warps: of a program.
        resident: of the backward, programs that a multiprocessor holds at once, by their registers.
        most: of the backward, how often a program takes as many rows, at the most. It does not change a row's bits.
    """

    numbers: int
    warps: int
    resident: int = 0
    most: int = 0


# 16 numbers of each tensor a thread forward, 8 backward, where three tensors are held and the weight's gradient.
FORWARD, BACKWARD = Tile(2048, 4), Tile(1024, 4, 8, 64)


@triton.jit
def _tile(step, num_rows, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr):
    """Offset of the first row of BR, offsets from there [BR, BV] and which of them exist."""
    first = step * BR
    row = tl.arange(0, BR)
    column = tl.arange(0, BV)
    mask = (first + row < num_rows)[:, None] & (column < V)[None, :]
    return first * V, row[:, None] * V + column[None, :], mask


@triton.jit
def _weight(weight, V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr):
    """[BR, BV], each row from memory: a row that is loaded once is spread by way of shared memory and a barrier."""
    column = tl.arange(0, BV)[None, :] + tl.zeros([BR, 1], tl.int32)
    return tl.load(weight + column, mask=column < V, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "eps"])
def gated_norm_kernel(
    x,  # [N, V]
    gate,  # [N, V]
    weight,  # [V]
    y,  # [N, V]
    num_rows,
    eps,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    start, offset, mask = _tile(tl.program_id(0).to(tl.int64), num_rows, V, BR, BV)
    x_RV = tl.load(x + start + offset, mask=mask, other=0.0).to(tl.float32)
    gate_RV = tl.load(gate + start + offset, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x_RV * x_RV, axis=1) / V + eps)
    out = x_RV * rstd[:, None] * _weight(weight, V, BR, BV) * silu(gate_RV)
    tl.store(y + start + offset, rounded(out, y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "rounds", "eps"])
def gated_norm_backward_kernel(
    grad_y,  # [N, V]
    x,  # [N, V]
    gate,  # [N, V]
    weight,  # [V]
    grad_x,  # [N, V]
    grad_gate,  # [N, V]
    parts,  # [programs, V] float32: of the weight's gradient
    num_rows,
    rounds,
    eps,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    weight_RV = _weight(weight, V, BR, BV)
    part_RV = tl.zeros([BR, BV], tl.float32)
    for turn in range(rounds):
        start, offset, mask = _tile(tl.program_id(0).to(tl.int64) * rounds + turn, num_rows, V, BR, BV)
        dy = tl.load(grad_y + start + offset, mask=mask, other=0.0).to(tl.float32)
        x_RV = tl.load(x + start + offset, mask=mask, other=0.0).to(tl.float32)
        gate_RV = tl.load(gate + start + offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x_RV * x_RV, axis=1) / V + eps)[:, None]
        share = sigmoid(gate_RV)
        normed = x_RV * rstd

        grad_gated = dy * normed
        out = grad_gated * weight_RV * (share * (1.0 + gate_RV * (1.0 - share)))
        tl.store(grad_gate + start + offset, rounded(out, grad_gate.dtype.element_ty), mask=mask)

        grad_weighted = dy * (gate_RV * share)
        part_RV += grad_weighted * normed
        grad_normed = grad_weighted * weight_RV
        mean = tl.sum(grad_normed * normed, axis=1)[:, None] / V
        out = rstd * (grad_normed - normed * mean)
        tl.store(grad_x + start + offset, rounded(out, grad_x.dtype.element_ty), mask=mask)

    column = tl.arange(0, BV)
    parts += tl.program_id(0).to(tl.int64) * V + column
    tl.store(parts, tl.sum(part_RV, axis=0), mask=column < V)


def _constexprs(row_len: int, tile: Tile) -> dict[str, int]:
    columns = triton.next_power_of_2(row_len)
    return dict(V=row_len, BR=max(1, tile.numbers // columns), BV=columns)


def _share_out(x_NV: Tensor, rows: int, tile: Tile) -> tuple[int, int]:
    """The number of programs, and how often each takes `rows`."""
    steps = triton.cdiv(len(x_NV), rows)
    rounds = units_of_a_program(steps, 1, tile.resident * multiprocessors(x_NV.device), tile.most)
    return triton.cdiv(steps, rounds), rounds


def forward(x_NV: Tensor, gate_NV: Tensor, weight_V: Tensor, eps: float, tile: Tile = FORWARD) -> Tensor:
    """y [N, V] in x's dtype. All of bfloat16, float16 or float32; rows are meant to be short (32 to 256 numbers)."""
    x, gate, weight = x_NV.contiguous(), gate_NV.contiguous(), weight_V.contiguous()
    num_rows, row_len = x.shape
    y = torch.empty_like(x)
    shape = _constexprs(row_len, tile)
    grid = (triton.cdiv(num_rows, shape["BR"]),)
    gated_norm_kernel[grid](x, gate, weight, y, num_rows, eps, **shape, num_warps=tile.warps)
    return y


def backward(
    grad_y_NV: Tensor, x_NV: Tensor, gate_NV: Tensor, weight_V: Tensor, eps: float, tile: Tile = BACKWARD
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and gate in their dtypes, and of weight in float32."""
    grad_y, x = grad_y_NV.contiguous(), x_NV.contiguous()
    gate, weight = gate_NV.contiguous(), weight_V.contiguous()
    num_rows, row_len = x.shape
    shape = _constexprs(row_len, tile)
    num_programs, rounds = _share_out(x, shape["BR"], tile)
    grad_x, grad_gate = torch.empty_like(x), torch.empty_like(gate)
    parts = torch.empty(num_programs, row_len, dtype=torch.float32, device=x.device)
    gated_norm_backward_kernel[(num_programs,)](
        grad_y, x, gate, weight, grad_x, grad_gate, parts, num_rows, rounds, eps, **shape, num_warps=tile.warps
    )
    return grad_x, grad_gate, parts.sum(0)


def aot_cases() -> Iterator[AotCase]:
    forward = gated_norm_kernel, FORWARD, ("x", "gate", "weight", "y"), {}
    names = ("grad_y", "x", "gate", "weight", "grad_x", "grad_gate")
    backward = gated_norm_backward_kernel, BACKWARD, names, {"parts": "*fp32", "rounds": "i32"}
    for kernel, tile, pointers, more in (forward, backward):
        for dtype, row_len in (("bf16", 128), ("fp32", 72)):
            types = {name: f"*{dtype}" for name in pointers} | more | dict(num_rows="i32", eps="fp32")
            name = f"{kernel.__name__} {dtype} V={row_len}"
            yield AotCase(name, kernel, types, _constexprs(row_len, tile), tile.warps)
