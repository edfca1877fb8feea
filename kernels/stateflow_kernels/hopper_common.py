"""What several of the kernels in Gluon need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def unknown_zero(num_tokens, i):
    """0, which the compiler does not know, and not that it is the same in every round of the loop.

    With it as a tile's index, addresses and descriptors of tiles are computed anew in each round. Else they would all
    be computed ahead: there are not enough registers to keep them, and the load of a spilled one takes 450 cycles.
    """
    return (num_tokens + i) >> 31


@gluon.jit
def in_float32(x):
    """To float32: from bfloat16 one instruction a number, not one and a half."""
    if x.dtype == gl.bfloat16:
        code: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(code, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)
