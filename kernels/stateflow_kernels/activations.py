"""Exponentials of the activations: the hardware's, which cost a fifth of the instructions of those that round exactly.

Kernels that only pass over memory are bound by their instructions otherwise. Errors are a few units in the last place
of float32, and grow with |x| like those of any e^x = 2^(x / ln 2) in one product: 1e-6 at |x| = 20.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .primitives import _INTERPRETED

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def quotient(a, b):
    """a / b; 0 where b is above 2^126, infinity included."""
    if _INTERPRETED:
        return a / b
    else:
        return libdevice.fast_dividef(a, b)


@triton.jit
def _one_and_exp(x):
    """1 + e^-x."""
    return 1.0 + tl.exp2(x * -_LOG2_E)


@triton.jit
def sigmoid(x):
    return quotient(1.0, _one_and_exp(x))


@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return quotient(x, _one_and_exp(x))
