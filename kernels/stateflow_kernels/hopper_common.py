"""What several of the kernels in Gluon need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


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


@gluon.jit
def tiles_at(slots, i):
    """What was fetched."""
    return (
        slots[0].index(i),
        slots[1].index(i),
        slots[2].index(i),
        slots[3].index(i),
        slots[4].index(i),
        slots[5].index(i),
        slots[6].index(i),
        slots[7].index(i),
    )


@gluon.jit
def release(barrier):
    """Of a place: only when all warps of the group are done with it.

    That is: products with it are waited for, and what all values that were loaded from it went into is stored. Else the
    loads may be under way when their thread comes to the barrier, and the copy engine, which does not wait for them,
    writes the next tile there.
    """
    gl.thread_barrier()
    mbarrier.arrive(barrier)
