"""The output norm of a recurrence, which a plain nn.RMSNorm does not cover; in at least float32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..recurrence.numerics import at_least_float32


class GatedRMSNorm(nn.Module):
    """rmsnorm(x) * weight * silu(gate) over the last dimension, in x's dtype; `weight` is [dim]."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype = at_least_float32(x)
        y = x.to(dtype)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.to(dtype) * F.silu(gate.to(dtype))).to(x.dtype)
