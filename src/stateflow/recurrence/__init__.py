"""The math of the mixers: each operation in a fast form with a hand-derived backward, beside its reference.

All are `torch.library` operations with fake implementations, so that torch.compile keeps one graph and op-level
activation checkpointing sees them. `backends` says which forms there are and which one runs.
"""

from . import gated_delta_kernels, mamba3_kernels  # noqa: F401  register their operations
from .attention import prefix_attention
from .delta_gates import delta_gates
from .gated_delta import gated_delta_rule
from .gated_rms_norm import gated_rms_norm
from .mamba3 import mamba3
from .short_conv import short_conv
from .swiglu import swiglu

__all__ = ["delta_gates", "gated_delta_rule", "gated_rms_norm", "mamba3", "prefix_attention", "short_conv", "swiglu"]
