"""The math of the mixers: each operation in a fast form with a hand-derived backward, beside its reference.

All three are `torch.library` operations with fake implementations, so that torch.compile keeps one graph and
op-level activation checkpointing sees them.
"""

from . import gated_delta_kernels as _gated_delta_kernels  # registers its operations
from .attention import prefix_attention
from .gated_delta import gated_delta_rule
from .short_conv import short_conv

__all__ = ["gated_delta_rule", "prefix_attention", "short_conv"]
