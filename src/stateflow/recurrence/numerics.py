"""Accumulation types, and what honours them: the matrix product, the L2 norm."""

import functools

import torch
from torch import Tensor

HALF_DTYPES = (torch.bfloat16, torch.float16)


def at_least_float32(*values: Tensor | torch.dtype) -> torch.dtype:
    """The type to compute in: float32, or float64 as soon as one of `values` is float64."""
    dtype = torch.float32
    for value in values:
        dtype = torch.promote_types(dtype, value.dtype if isinstance(value, Tensor) else value)
    return dtype


def product(left: Tensor, right: Tensor, operand_dtype: torch.dtype) -> Tensor:
    """left @ right for two matrices or two batches of them, accumulated and returned in at least float32.

    `operand_dtype` is the type of the model's activations. Where it has 16 bits and the device is a GPU, the
    operands are rounded to it, so that tensor cores run at full rate (what flash attention does with its
    probabilities); everywhere else the product is taken in at least float32.
    """
    if left.is_cuda and operand_dtype in HALF_DTYPES:
        multiply = torch.mm if left.dim() == 2 else torch.bmm
        return multiply(left.to(operand_dtype), right.to(operand_dtype), out_dtype=torch.float32)
    dtype = at_least_float32(operand_dtype)
    return left.to(dtype) @ right.to(dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor, operand_dtype: torch.dtype) -> None:
    """total += product(left, right, operand_dtype) for matrices, by the product itself where the device can."""
    if left.is_cuda and operand_dtype in HALF_DTYPES:
        if _adds_to_float32(left.device, operand_dtype):
            factors = left.to(operand_dtype), right.to(operand_dtype)
            torch.addmm(total, *factors, out_dtype=torch.float32, out=total)
        else:
            total += product(left, right, operand_dtype)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


@functools.cache
def _adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of 16-bit matrices adds to a float32 one in place: some releases of torch refuse."""
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in x's dtype."""
    y = x.to(at_least_float32(x))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """torch.sigmoid with the same bits wherever in a tensor a number lies.

    On the CPU torch computes the last few numbers of a tensor by another formula, so a cut may change a bit.
    """
    return 1 / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) with the same bits wherever in a tensor a number lies, see `sigmoid`."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
