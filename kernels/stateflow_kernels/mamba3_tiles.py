"""What Mamba-3's kernels share: rows of q and k, their rotation, sums over the tokens of a document.

Products of q, k and states do not care in which order their N columns lie. So between the kernels the columns that turn
come apart: the first of each pair, then the second, then the N - 2R that stay. A rotation is then one of whole tiles,
in the layout that products leave. `true_columns` says where a column lies outside. Widths: BR >= R, BX >= N - 2R.
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
def _first_digits(x):
    """x in float32, cut off to what bfloat16 holds."""
    return (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def masked_sum(seen, x):
    """The rows of x that each row of `seen` has, added up: as exact as float32, on 16-bit tensor cores.

    Zeros and ones are exact in bfloat16, and three bfloat16 numbers hold all digits of a float32: its first eight, the
    next eight, and the rest. Cut off, which takes one instruction; to round takes more.
    """
    ones = tl.where(seen, 1.0, 0.0)
    high = _first_digits(x)
    middle = _first_digits(x - high)
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
def true_columns(columns, R: tl.constexpr):
    """Where these columns of a stored row lie in B, C, a parameter or a state outside of the kernels."""
    turned = tl.where(columns < R, 2 * columns, 2 * (columns - R) + 1)
    return tl.where(columns < 2 * R, turned, columns)


@triton.jit
def load_group(
    ptr, rows, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    END: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """COUNT columns from FIRST on, as [rows, WIDTH], of a matrix with N; EXACT: all `rows` are below END."""
    columns = tl.arange(0, WIDTH)
    offset = rows[:, None] * N + (FIRST + columns)[None, :]
    if EXACT and COUNT == WIDTH:
        return tl.load(ptr + offset)
    else:
        return tl.load(ptr + offset, mask=(rows < END)[:, None] & (columns < COUNT)[None, :], other=0.0)


@triton.jit
def store_group(
    ptr, rows, x, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
    END: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The opposite of `load_group`, in the type of what `ptr` points to."""
    columns = tl.arange(0, WIDTH)
    offset = rows[:, None] * N + (FIRST + columns)[None, :]
    x = rounded(x, ptr.dtype.element_ty)
    if EXACT and COUNT == WIDTH:
        tl.store(ptr + offset, x)
    else:
        tl.store(ptr + offset, x, mask=(rows < END)[:, None] & (columns < COUNT)[None, :])


@triton.jit
def store_groups(
    ptr, rows, first, second, rest, N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr,
    END: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The three groups of columns: of each pair the first, the second, and what does not turn."""
    store_group(ptr, rows, first, 0, R, BR, N, END, EXACT)
    store_group(ptr, rows, second, R, R, BR, N, END, EXACT)
    store_group(ptr, rows, rest, 2 * R, N - 2 * R, BX, N, END, EXACT)


@triton.jit
def turn(first, second, cos, sin):
    """R(theta) of the pairs; with -sin its inverse."""
    return first * cos - second * sin, first * sin + second * cos


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
def turned_rows(
    row_ptr, factor_ptr, norm_ptr, bias_ptr, in_chunk, cos, sin,
    N: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """q or k of one head and chunk in float32, in three groups of columns.

    `row_ptr`, `factor_ptr`: the chunk's first token in B or C and in its inverse norms; `bias_ptr`: the head's.
    """
    factor = tl.load(factor_ptr + tl.arange(0, C), mask=in_chunk, other=0.0)
    pairs = _unturned(row_ptr, factor, norm_ptr, bias_ptr, in_chunk, tl.arange(0, 2 * BR), 2 * R, N, C)
    first, second = tl.split(tl.reshape(pairs, [C, BR, 2]))
    first, second = turn(first, second, cos, sin)
    others = 2 * R + tl.arange(0, BX)
    return first, second, _unturned(row_ptr, factor, norm_ptr, bias_ptr, in_chunk, others, N, N, C)


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
def exponential(x):
    """e^x to two units in the last place; 0 where x is below -87."""
    if _INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.fast_expf(x)


@triton.jit
def earlier_decay(scale_ptr, gate_sum_ptr, start, C: tl.constexpr):
    """L with s: [t, s], how much of k_s v_s the token t finds; 0 unless s is earlier and of t's document."""
    ts = tl.arange(0, C)
    gate_sum, scale = tl.load(gate_sum_ptr + ts), tl.load(scale_ptr + ts)
    # Masked before the exponential: what is masked may be above 0.
    seen = (ts[:, None] > ts[None, :]) & (ts[None, :] >= start[:, None])
    log = (gate_sum[:, None] - gate_sum[None, :]).to(tl.float32)
    return exponential(tl.where(seen, log, float("-inf"))) * scale[None, :]


@triton.jit
def later_decay(scale_ptr, gate_sum_ptr, start, C: tl.constexpr):
    """The same, [s, t]."""
    ts = tl.arange(0, C)
    gate_sum, scale = tl.load(gate_sum_ptr + ts), tl.load(scale_ptr + ts)
    seen = (ts[None, :] > ts[:, None]) & (ts[:, None] >= start[None, :])
    log = (gate_sum[None, :] - gate_sum[:, None]).to(tl.float32)
    return exponential(tl.where(seen, log, float("-inf"))) * scale[:, None]


@triton.jit
def end_decay(gate_sum, gate_sum_ptr, start, C: tl.constexpr, HAS_DOCS: tl.constexpr):
    """e: the decay from each token to the chunk's end, 0 for those of earlier documents."""
    log = (tl.load(gate_sum_ptr + C - 1) - gate_sum).to(tl.float32)
    if HAS_DOCS:
        log = tl.where(tl.arange(0, C) >= element(start, C - 1, C), log, float("-inf"))
    return exponential(log)
