"""What Mamba-3's kernels share: rows of q and k, their rotation, sums over the tokens of a document.

B, C and the angles are shared by all heads and lie in the cache, so every kernel computes its head's rotated rows
again: stored, they would be most of what moves. A row has two parts, the first 2R columns, which turn, and the rest.
Widths of tiles: BR >= R angles, 2 BR turned columns, BX >= N - 2R others.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .decays import visible
from .primitives import _INTERPRETED, dot, rounded


@triton.jit
def softplus(x):
    """log(1 + e^x), right to rounding for very negative x, too."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    return tl.maximum(x, 0.0) + tl.log(total) + (small - (total - 1.0)) / total


@triton.jit
def sigmoid(x):
    """To two units in the last place, with a third of the instructions that exact rounding takes."""
    if _INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-x))


@triton.jit
def revolutions_off(angle, turns):
    """angle - 2 pi turns. In two steps: the first product is exact, float32's 2 pi alone would lose digits."""
    return angle - turns * 6.28125 - turns * 0.0019353071795864769


@triton.jit
def sine_cosine(angle):
    angle = revolutions_off(angle, tl.floor(angle * 0.15915494309189535 + 0.5))
    if _INTERPRETED:
        return tl.sin(angle), tl.cos(angle)
    else:
        # The hardware's, off by 5e-7 at most between -pi and pi.
        return libdevice.fast_sinf(angle), libdevice.fast_cosf(angle)


@triton.jit
def masked_sum(seen, x):
    """The rows of x that each row of `seen` has, added up: as exact as float32, on 16-bit tensor cores.

    Zeros and ones are exact in bfloat16, and three bfloat16 numbers hold all digits of a float32.
    """
    ones = tl.where(seen, 1.0, 0.0)
    high = rounded(x, tl.bfloat16).to(tl.float32)
    middle = rounded(x - high, tl.bfloat16).to(tl.float32)
    total = dot(ones, x - high - middle, tl.zeros_like(x), tl.bfloat16, "tf32")
    total = dot(ones, middle, total, tl.bfloat16, "tf32")
    return dot(ones, high, total, tl.bfloat16, "tf32")


@triton.jit
def rotation(speed, dt, theta_ptr, start, C: tl.constexpr, R: tl.constexpr, BR: tl.constexpr):
    """Cosine and sine [C, BR] of every token's angle. `theta_ptr`: the angle [R] that comes into the chunk."""
    angles = tl.arange(0, BR)
    theta = tl.load(theta_ptr + angles, mask=angles < R, other=0.0)
    turned = masked_sum(visible(start, C), speed * dt[:, None])
    sin, cos = sine_cosine(turned + tl.where(start[:, None] < 0, theta[None, :], 0.0))
    return cos, sin


@triton.jit
def turn(x, cos, sin, C: tl.constexpr, BR: tl.constexpr):
    """R(theta) x of turned columns [C, 2 BR]; with -sin its inverse."""
    even, odd = tl.split(tl.reshape(x, [C, BR, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [C, 2 * BR])


@triton.jit
def angle_gradient(grad, x, C: tl.constexpr, BR: tl.constexpr):
    """That of theta [C, BR], from the gradient of the rotated x = R(theta) .."""
    grad_even, grad_odd = tl.split(tl.reshape(grad, [C, BR, 2]))
    even, odd = tl.split(tl.reshape(x, [C, BR, 2]))
    return grad_odd * even - grad_even * odd


@triton.jit
def _unturned(
    row_ptr, factor, norm_ptr, bias_ptr, in_chunk, columns, END: tl.constexpr, N: tl.constexpr, C: tl.constexpr
):
    """row factor norm + bias for the columns below END."""
    valid = columns < END
    row = tl.load(
        row_ptr + tl.arange(0, C)[:, None] * N + columns[None, :], mask=in_chunk[:, None] & valid[None, :], other=0.0
    ).to(tl.float32)
    norm = tl.load(norm_ptr + columns, mask=valid, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=valid, other=0.0).to(tl.float32)
    return row * factor[:, None] * norm[None, :] + bias[None, :]


@triton.jit
def turned_columns(
    row_ptr, factor_ptr, norm_ptr, bias_ptr, in_chunk, cos, sin,
    N: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The columns [C, 2 BR] of q or k that turn, of one head and chunk, in float32.

    `row_ptr`, `factor_ptr`: the chunk's first token in B or C and in its inverse norms; `bias_ptr`: the head's.
    """
    factor = tl.load(factor_ptr + tl.arange(0, C), mask=in_chunk, other=0.0)
    columns = tl.arange(0, 2 * BR)
    return turn(_unturned(row_ptr, factor, norm_ptr, bias_ptr, in_chunk, columns, 2 * R, N, C), cos, sin, C, BR)


@triton.jit
def other_columns(
    row_ptr, factor_ptr, norm_ptr, bias_ptr, in_chunk,
    N: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """The columns [C, BX] behind them, see `turned_columns`."""
    factor = tl.load(factor_ptr + tl.arange(0, C), mask=in_chunk, other=0.0)
    return _unturned(row_ptr, factor, norm_ptr, bias_ptr, in_chunk, 2 * R + tl.arange(0, BX), N, N, C)


@triton.jit
def load_speed(speed_ptr, in_chunk, C: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, AGAIN: tl.constexpr = False):
    """pi tanh(angle) [C, BR], from the chunk's first token on. AGAIN: not the tile of an earlier load."""
    angles = tl.arange(0, BR)
    offset = tl.arange(0, C)[:, None] * R + angles[None, :]
    mask = in_chunk[:, None] & (angles < R)[None, :]
    return tl.load(speed_ptr + offset, mask=mask, other=0.0, volatile=AGAIN)


@triton.jit
def element(x, index, C: tl.constexpr):
    """x[index] of a vector [C]; the others count as zeros."""
    return tl.sum(tl.where(tl.arange(0, C) == index, x, tl.zeros_like(x)), axis=0)


@triton.jit
def end_decay(gate_sum, start, C: tl.constexpr):
    """e: the decay from each token to the chunk's end, 0 for those of earlier documents."""
    log = (element(gate_sum, C - 1, C) - gate_sum).to(tl.float32)
    return tl.exp(tl.where(tl.arange(0, C) >= element(start, C - 1, C), log, float("-inf")))
