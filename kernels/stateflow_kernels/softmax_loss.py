"""The cross entropy of rows of V logits z with labels y, and its gradient, in at most two passes over a row:

    lse = log sum exp(z),   loss = lse - z[y],   dz = (softmax(z) - onehot(y)) scale

A program takes a row. The first pass keeps maximum and sum of exponentials in every lane, the second writes dz, in
another dtype or over the logits. Rows whose label is `ignore_index` have loss and gradient 0, whatever they hold. The
loss of a label outside of the vocabulary is NaN.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .aot import AotCase
from .primitives import rounded

ROW_NUMBERS = 4096  # of a row at a time: 16 a thread
NUM_WARPS = 8


@triton.jit(do_not_specialize=["ignore_index"])
def _rows_kernel(
    logits,  # [N, V]
    labels,  # [N] int64
    lse,  # [N] float32; given with GIVEN_LSE, else written
    loss,  # [N] float32, or None with GIVEN_LSE
    scale,  # [1] float32, or None without GRADIENT
    grad,  # [N, V], may be the logits, or None without GRADIENT
    ignore_index,
    V: tl.constexpr,
    BV: tl.constexpr,
    GIVEN_LSE: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BV)
    label = tl.load(labels + row)
    counts = label != ignore_index
    logits += row * V
    if GIVEN_LSE:
        total = tl.load(lse + row)
    else:
        target = tl.load(logits + label, mask=(label >= 0) & (label < V), other=float("nan")).to(tl.float32)
        largest = tl.full([BV], -1e38, tl.float32)
        sums = tl.zeros([BV], tl.float32)
        for first in range(0, V, BV):
            z = tl.load(logits + first + column, mask=first + column < V, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(largest, z)
            sums = sums * tl.exp(largest - larger) + tl.exp(z - larger)
            largest = larger
        maximum = tl.max(largest, axis=0)
        total = maximum + tl.log(tl.sum(sums * tl.exp(largest - maximum), axis=0))
        tl.store(lse + row, total)
        tl.store(loss + row, tl.where(counts, total - target, 0.0))
    if GRADIENT:
        grad += row * V
        factor = tl.load(scale)
        for first in range(0, V, BV):
            mask = first + column < V
            z = tl.load(logits + first + column, mask=mask, other=float("-inf")).to(tl.float32)
            out = (tl.exp(z - total) - tl.where(first + column == label, 1.0, 0.0)) * factor
            out = tl.where(counts, out, 0.0)
            tl.store(grad + first + column, rounded(out, grad.dtype.element_ty), mask=mask)


def _launch(logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor, ignore_index: int, **tensors: Tensor | None) -> None:
    assert logits_NV.is_contiguous() and labels_N.dtype == torch.int64
    num_rows, row_len = logits_NV.shape
    if num_rows:
        _rows_kernel[(num_rows,)](
            logits_NV, labels_N.contiguous(), lse_N, ignore_index=ignore_index, V=row_len, BV=_width(row_len),
            GIVEN_LSE=tensors["loss"] is None, GRADIENT=tensors["grad"] is not None, num_warps=NUM_WARPS, **tensors,
        )  # fmt: skip


def _width(row_len: int) -> int:
    return min(ROW_NUMBERS, triton.next_power_of_2(row_len))


def losses(logits_NV: Tensor, labels_N: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Loss and lse of every row, float32. Logits of float32, bfloat16 or float16, contiguous."""
    loss_N, lse_N = (torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device) for _ in range(2))
    _launch(logits_NV, labels_N, lse_N, ignore_index, loss=loss_N, scale=None, grad=None)
    return loss_N, lse_N


def gradients(
    logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor, scale: Tensor, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """dz in `dtype` for the lse that `losses` gave; it takes the place of the logits where they have that dtype."""
    grad_NV = _place_of_gradients(logits_NV, dtype)
    scale = scale.to(torch.float32).contiguous()
    _launch(logits_NV, labels_N, lse_N.contiguous(), ignore_index, loss=None, scale=scale, grad=grad_NV)
    return grad_NV


def losses_with_gradients(
    logits_NV: Tensor, labels_N: Tensor, scale: Tensor, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Loss of every row, and `gradients`, from one launch."""
    loss_N, lse_N = (torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device) for _ in range(2))
    grad_NV = _place_of_gradients(logits_NV, dtype)
    scale = scale.to(torch.float32).contiguous()
    _launch(logits_NV, labels_N, lse_N, ignore_index, loss=loss_N, scale=scale, grad=grad_NV)
    return loss_N, grad_NV


def _place_of_gradients(logits_NV: Tensor, dtype: torch.dtype) -> Tensor:
    return logits_NV if logits_NV.dtype == dtype else torch.empty_like(logits_NV, dtype=dtype)


def aot_cases() -> Iterator[AotCase]:
    for dtype, row_len in (("fp32", 50304), ("bf16", 50257)):
        types = {"logits": f"*{dtype}", "labels": "*i64", "lse": "*fp32", "ignore_index": "i32"}
        loss, grad = {"loss": "*fp32"}, {"scale": "*fp32", "grad": "*bf16"}
        for name, given in (("losses", loss), ("gradients", grad), ("losses_with_gradients", loss | grad)):
            constexprs = dict(V=row_len, BV=_width(row_len), GIVEN_LSE="loss" not in given, GRADIENT="grad" in given)
            constexprs |= {pointer: None for pointer in ("loss", "scale", "grad") if pointer not in given}
            yield AotCase(f"{name} {dtype} V={row_len}", _rows_kernel, types | given, constexprs, NUM_WARPS)
