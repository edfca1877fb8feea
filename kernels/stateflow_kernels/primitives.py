"""What all kernels share: the matrix product, and how 16-bit values are treated in it.

Rules for every kernel of this package:

- A loaded 16-bit tile is an operand of `dot`, or it is cast to float32 at once. All other arithmetic is float32:
  the interpreter gets bfloat16 arithmetic silently wrong.
- A float32 tile is stored in 16 bits through `rounded`.
- No `dot(trans(accumulator), x)`: Triton 3.4.0 up to 3.7.0 miscompiles it. A transposed product is computed from
  transposed loads, or the accumulator becomes the right operand.
- A loop's products that only add to accumulators stay in flight until the next round's. A tile that such a product
  reads must not be used in another way in the loop: Triton 3.6.0 then gives it a single buffer and overwrites it under
  the product. `aot` finds such loops.
- Lengths (tokens, chunk numbers) are never specialised on: another length of a chunk must not compile anything.
- Offsets that grow with the sequence are 64 bits wide, grids have one dimension.
"""

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x in DTYPE, to the nearest value and ties to even. (The interpreter's own cast to bfloat16 truncates.)"""
    if _INTERPRETED and DTYPE == tl.bfloat16 and x.dtype == tl.float32:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a @ b in float32, with a and b rounded to DTYPE.

    PRECISION ("ieee", "tf32x3" or "tf32") counts where DTYPE is float32. The interpreter rounds to DTYPE, then
    multiplies in float32.
    """
    a = rounded(a, DTYPE)
    b = rounded(b, DTYPE)
    if _INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def diagonal(x, SIZE: tl.constexpr):
    ts = tl.arange(0, SIZE)
    return tl.sum(tl.where(ts[:, None] == ts[None, :], x, 0.0), axis=1)


@triton.jit
def row_dots(a, b, C: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """<a_t, b_t> of the rows of [C, X] tiles, a rounded to DTYPE: the diagonal of a product.

    The matrix unit has it faster than the others: a tile as wide as a head, multiplied element by element, takes more
    registers than there are, in another layout than the products' beside.
    """
    return diagonal(dot(a, tl.trans(b), tl.zeros([C, C], tl.float32), DTYPE, PRECISION), C)


@triton.jit
def scaled_rows(scale, x, acc, C: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """acc + scale_t x_t, by the matrix unit, for the same reason; scale rounded to DTYPE."""
    ts = tl.arange(0, C)
    return dot(tl.where(ts[:, None] == ts[None, :], scale[:, None], 0.0), x, acc, DTYPE, PRECISION)
