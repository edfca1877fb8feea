"""The output norm of a recurrence, which a plain nn.RMSNorm does not cover; in at least float32."""

import torch
from torch import Tensor, nn

from ..recurrence import gated_rms_norm


class GatedRMSNorm(nn.Module):
    """rmsnorm(x) * weight * silu(gate) over the last dimension, in x's dtype; `weight` is [dim]."""

    def __init__(self, dim: int, eps: float, backend: str = "chunk"):
        super().__init__()
        self.eps, self.backend = eps, backend
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps, backend=self.backend)
