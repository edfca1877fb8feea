"""The gates of Gated DeltaNet in one pass: g = -exp(A_log) softplus(a + dt_bias), beta = scale sigmoid(b).

Backward, with z = a + dt_bias:

    da = -dg exp(A_log) sigmoid(z),   dA_log = sum dg g,   ddt_bias = sum da
    db = dbeta scale s (1 - s)   with s = sigmoid(b)

A program takes BM tokens of all heads. It writes its parts of dA_log and ddt_bias; a second pass adds up.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activations import sigmoid
from .aot import AotCase
from .primitives import rounded


class Tile(NamedTuple):
    """Numbers of whole tokens that a program takes, and its warps."""

    numbers: int
    warps: int


# Few numbers: 16,384 tokens of 20 heads are 4 MB in all, and only many programs fill the device.
FORWARD, BACKWARD = Tile(1024, 4), Tile(2048, 4)


@triton.jit
def _softplus(x):
    """log(1 + e^x), right to rounding for very negative x, too."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    # What the rounding of `total` lost, to first order: log(total) + (small - (total - 1)) / total.
    return tl.maximum(x, 0.0) + tl.log(total) + (small - (total - 1.0)) / total


@triton.jit
def _mask(num_tokens, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr):
    """Which of the program's numbers [BM, BH] exist."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    return (row < num_tokens)[:, None] & (tl.arange(0, BH) < H)[None, :]


@triton.jit
def _tile(values, STEP: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr):
    """Pointers [BM, BH] of the program's tokens, whose rows are STEP numbers apart."""
    values += tl.program_id(0).to(tl.int64) * BM * STEP
    return values + tl.arange(0, BM)[:, None] * STEP + tl.arange(0, BH)[None, :]


@triton.jit
def _of_heads(values, H: tl.constexpr, BH: tl.constexpr):
    head = tl.arange(0, BH)
    return tl.load(values + head, mask=head < H, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_tokens", "scale"])
def delta_gates_kernel(
    a,  # [M, H], rows A_STEP apart
    b,  # [M, H], rows B_STEP apart
    A_log,  # [H]
    dt_bias,  # [H]
    g,  # [M, H] float32
    beta,  # [M, H] float32
    num_tokens,
    scale,
    A_STEP: tl.constexpr,
    B_STEP: tl.constexpr,
    H: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
):
    mask = _mask(num_tokens, H, BM, BH)
    z = tl.load(_tile(a, A_STEP, BM, BH), mask=mask, other=0.0).to(tl.float32) + _of_heads(dt_bias, H, BH)
    b_MH = tl.load(_tile(b, B_STEP, BM, BH), mask=mask, other=0.0).to(tl.float32)
    tl.store(_tile(g, H, BM, BH), -tl.exp(_of_heads(A_log, H, BH)) * _softplus(z), mask=mask)
    tl.store(_tile(beta, H, BM, BH), scale * sigmoid(b_MH), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "scale"])
def delta_gates_backward_kernel(
    grad_g,  # [M, H] float32
    grad_beta,  # [M, H] float32
    a,  # [M, H], rows A_STEP apart
    b,  # [M, H], rows B_STEP apart
    A_log,  # [H]
    dt_bias,  # [H]
    grad_a,  # [M, H]
    grad_b,  # [M, H]
    parts,  # [programs, 2, H] float32: of A_log, of dt_bias
    num_tokens,
    scale,
    A_STEP: tl.constexpr,
    B_STEP: tl.constexpr,
    H: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
):
    mask = _mask(num_tokens, H, BM, BH)
    dg = tl.load(_tile(grad_g, H, BM, BH), mask=mask, other=0.0)
    dbeta = tl.load(_tile(grad_beta, H, BM, BH), mask=mask, other=0.0)
    z = tl.load(_tile(a, A_STEP, BM, BH), mask=mask, other=0.0).to(tl.float32) + _of_heads(dt_bias, H, BH)
    b_MH = tl.load(_tile(b, B_STEP, BM, BH), mask=mask, other=0.0).to(tl.float32)

    share = sigmoid(b_MH)
    out = dbeta * scale * share * (1.0 - share)
    tl.store(_tile(grad_b, H, BM, BH), rounded(out, grad_b.dtype.element_ty), mask=mask)

    grad_softplus = -dg * tl.exp(_of_heads(A_log, H, BH))
    grad_z = grad_softplus * sigmoid(z)
    tl.store(_tile(grad_a, H, BM, BH), rounded(grad_z, grad_a.dtype.element_ty), mask=mask)

    head = tl.arange(0, BH)
    parts += tl.program_id(0).to(tl.int64) * 2 * H
    tl.store(parts + head, tl.sum(grad_softplus * _softplus(z), axis=0), mask=head < H)
    tl.store(parts + H + head, tl.sum(grad_z, axis=0), mask=head < H)


def _constexprs(num_heads: int, tile: Tile, steps: tuple[int, int]) -> dict[str, int]:
    heads = triton.next_power_of_2(num_heads)
    return dict(A_STEP=steps[0], B_STEP=steps[1], H=num_heads, BM=max(1, tile.numbers // heads), BH=heads)


def _whole_rows(x: Tensor) -> Tensor:
    """x, or a copy where the numbers of a row are not neighbours."""
    return x if x.stride(1) == 1 else x.contiguous()


def forward(
    a_MH: Tensor, b_MH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor, scale: float, tile: Tile = FORWARD
) -> tuple[Tensor, Tensor]:
    """g and beta, float32 [M, H]. Arguments of bfloat16, float16 or float32; rows of a and b may be apart."""
    a, b, A_log, dt_bias = _whole_rows(a_MH), _whole_rows(b_MH), A_log_H.contiguous(), dt_bias_H.contiguous()
    num_tokens, num_heads = a.shape
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    shape = _constexprs(num_heads, tile, (a.stride(0), b.stride(0)))
    delta_gates_kernel[(triton.cdiv(num_tokens, shape["BM"]),)](
        a, b, A_log, dt_bias, g, beta, num_tokens, float(scale), **shape, num_warps=tile.warps
    )
    return g, beta


def backward(
    grad_g_MH: Tensor,
    grad_beta_MH: Tensor,
    a_MH: Tensor,
    b_MH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    scale: float,
    tile: Tile = BACKWARD,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a and b in their dtypes, of A_log and dt_bias in float32."""
    grad_g, grad_beta = grad_g_MH.contiguous(), grad_beta_MH.contiguous()
    a, b, A_log, dt_bias = _whole_rows(a_MH), _whole_rows(b_MH), A_log_H.contiguous(), dt_bias_H.contiguous()
    num_tokens, num_heads = a.shape
    shape = _constexprs(num_heads, tile, (a.stride(0), b.stride(0)))
    num_programs = triton.cdiv(num_tokens, shape["BM"])
    grad_a, grad_b = (x.new_empty(x.shape) for x in (a, b))
    parts = torch.empty(num_programs, 2, num_heads, dtype=torch.float32, device=a.device)
    delta_gates_backward_kernel[(num_programs,)](
        grad_g, grad_beta, a, b, A_log, dt_bias, grad_a, grad_b, parts, num_tokens, float(scale), **shape,
        num_warps=tile.warps,
    )  # fmt: skip
    sums = parts.sum(0)
    return grad_a, grad_b, sums[0], sums[1]


def aot_cases() -> Iterator[AotCase]:
    forward = delta_gates_kernel, FORWARD, ("a", "b"), ("g", "beta")
    backward = delta_gates_backward_kernel, BACKWARD, ("a", "b", "grad_a", "grad_b"), ("grad_g", "grad_beta", "parts")
    for kernel, tile, in_dtype, in_float32 in (forward, backward):
        types = {name: "*bf16" for name in in_dtype}
        types |= {name: "*fp32" for name in (*in_float32, "A_log", "dt_bias")}
        types |= dict(num_tokens="i32", scale="fp32")
        name = f"{kernel.__name__} bf16 H=16"
        yield AotCase(name, kernel, types, _constexprs(16, tile, (32, 32)), tile.warps)
