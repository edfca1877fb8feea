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


def as_scalar(value: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`value` as a tensor of no dimension. A number is written by the device: the host does not wait for a copy."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype)
    return torch.full((), value, dtype=dtype, device=device)


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


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right for matrices, in place and not seen by autograd.

    Where the product can accumulate into `total` it does, and the product itself is never in memory: operands of the
    dtype of `total`, and on a GPU 16 bits added to float32. Elsewhere `product` makes it, and it is added.
    """
    with torch.no_grad():
        if left.dtype == right.dtype == total.dtype:
            total.addmm_(left, right)
        elif left.dtype == right.dtype and adds_products(total.device, left.dtype, total.dtype):
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        else:
            total.add_(product(left, right, left.dtype))


@functools.cache
def adds_products(device: torch.device, operands: torch.dtype, total: torch.dtype) -> bool:
    """Whether matrix products of `operands` can accumulate into a `total` of another dtype on `device`.

    Found out by trying once: the first call waits for the device, and must not come while a CUDA graph is recorded.
    """
    if device.type != "cuda" or operands not in HALF_DTYPES or total != torch.float32:
        return False
    ones = torch.ones(16, 16, dtype=operands, device=device)
    # 16 bits cannot hold the last term beside 1: whether anything is rounded on the way shows.
    result = torch.full((16, 16), 1 + 2**-12, dtype=total, device=device)
    try:
        torch.addmm(result, ones, ones, out_dtype=total, out=result)
    except (RuntimeError, TypeError):  # no such overload, or one that insists on a `total` of the operands' dtype
        return False
    return bool((result == 17 + 2**-12).all())


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
