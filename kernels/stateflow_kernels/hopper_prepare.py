"""Pre for Hopper, in Gluon: the tile's layouts are chosen so that hardly a number moves between threads.

Pre is bound by the instructions that it issues. Here the copy engine moves the tiles, each warp has 16 of the chunk's
64 rows from the first product to the last, and the inverses of the blocks of 16 stay in registers: where a product
needs what another one made as its right operand, that one makes the transpose, whose registers already lie as that
operand's. Norms are the diagonals of a warp's products of its 16 rows with themselves.

The formulas are `gated_delta.pre_kernel`'s; the results are not the same bits: sums have another order, and inverse
norms of the keys go into the exponents of the decays. For B = 1, 16-bit inputs and K a multiple of 64, with P always.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .decays import FACTORS

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk"]
LOG2_E = gl.constexpr(1.4426950408889634)
BLOCK = gl.constexpr(16)  # rows of a warp
BLOCKS = gl.constexpr(4)
# [BLOCKS, BLOCK, BLOCK], a warp each.
SMALL = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SMALL, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SMALL, 2))
# Of numbers a token: each warp has them all.
TOKEN = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def _add_within(left, left_starts, right, right_starts):
    return gl.where(right_starts, right, left + right), left_starts | right_starts


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _log2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _square_norms(tile):
    """[C], of its rows."""
    C: gl.constexpr = tile.shape[0]
    K: gl.constexpr = tile.shape[1]
    rows = tile.load(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16]), 2))
    rows = rows.reshape([BLOCKS, BLOCK, K])
    left = gl.convert_layout(rows, LEFT)
    right = gl.convert_layout(rows.permute((0, 2, 1)), RIGHT)
    products = mma_v2(left, right, gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, SMALL))
    row, column = _small_indices()
    return gl.sum(gl.where(row == column, products, 0.0), axis=2).reshape([C])


@gluon.jit
def _small_indices():
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, SMALL)))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, SMALL)))
    return row[None, :, None], column[None, None, :]


@gluon.jit
def _small_product(left, right_transposed, acc):
    """acc + left right, of tiles in SMALL: no number leaves its thread."""
    right = right_transposed.permute((0, 2, 1))
    return mma_v2(gl.convert_layout(left, LEFT), gl.convert_layout(right, RIGHT), acc)


@gluon.jit
def _small_zeros():
    return gl.zeros([BLOCKS, BLOCK, BLOCK], gl.float32, SMALL)


@gluon.jit
def _between(system, WIDTH: gl.constexpr):
    """What of the system lies between the diagonal blocks of WIDTH that are neighbours.

    By a factor where the compiler does not know it: a choice it would make after the rounding, number by number.
    """
    row, column = _small_indices()
    different = row ^ column
    if WIDTH == 8:
        return gl.where((different // 8 == 1) & (row // 8 == 1), system, 0.0)
    chosen = gl.where((different // WIDTH == 1) & (row // WIDTH % 2 == 1), 1.0, 0.0)
    return gl.where(different // 8 == 0, system * chosen, 0.0)


@gluon.jit
def _join(system, inverse, transpose, WIDTH: gl.constexpr):
    """The inverses of the diagonal blocks of 2 WIDTH from those of WIDTH, and their transposes.

    [[X, 0], [Y A' X, Y]] inverts [[X^-1, 0], [-A', Y^-1]]: substitution by blocks, so nothing cancels.
    """
    rounded = inverse.to(gl.float16)
    step = _small_product(transpose.to(gl.float16), _between(system, WIDTH).to(gl.float16), _small_zeros())
    step = step.to(gl.float16)  # (A' X)^T
    return _small_product(rounded, step, inverse), _small_product(step, rounded, transpose)


@gluon.jit
def _halves(x):
    """The left and the right half of a tile's columns."""
    rows: gl.constexpr = x.shape[0]
    half: gl.constexpr = x.shape[1] // 2
    return x.reshape([rows, 2, half]).permute((0, 2, 1)).split()


@gluon.jit
def _beside(left, right):
    rows: gl.constexpr = left.shape[0]
    columns: gl.constexpr = left.shape[1]
    return gl.join(left, right).permute((0, 2, 1)).reshape([rows, 2 * columns])


@gluon.jit
def _left_operand(x, columns: gl.constexpr):
    """x [C, k] for a product with [k, columns]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    return gl.convert_layout(x.to(gl.float16), gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _product(left, right, acc):
    acc = warpgroup_mma(left, right, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def _scaled(x, scale):
    """x times a number a row, in x's layout."""
    return x * gl.convert_layout(scale, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def _solve(system, scale, tiles):
    """(I - A)^-1 [C, C] of the part below the diagonal of A, the system with its rows scaled.

    Where only some blocks of A count, the scale of the others is 0.
    """
    block_tile, half_tile, step_tile = tiles
    C: gl.constexpr = system.shape[0]
    HALF: gl.constexpr = 2 * BLOCK
    shape: gl.constexpr = [BLOCKS, BLOCK, BLOCK]
    warp = gl.arange(0, C, layout=scale.type.layout) // BLOCK
    left, right = _halves(system)
    first, second = _halves(left)
    third, fourth = _halves(right)

    # The diagonal blocks, from those of two columns and rows on.
    small = _scaled(first, gl.where(warp == 0, scale, 0.0)) + _scaled(second, gl.where(warp == 1, scale, 0.0))
    small += _scaled(third, gl.where(warp == 2, scale, 0.0)) + _scaled(fourth, gl.where(warp == 3, scale, 0.0))
    small = gl.convert_layout(small.reshape(shape), SMALL)
    row, column = _small_indices()
    ones = gl.where(row == column, 1.0, 0.0) + _small_zeros()
    inverse = ones + _between(small, 1)
    ones = ones.to(gl.float16)
    transpose = _small_product(ones, inverse.to(gl.float16), _small_zeros())
    inverse, transpose = _join(small, inverse, transpose, 2)
    inverse, transpose = _join(small, inverse, transpose, 4)
    inverse, _ = _join(small, inverse, transpose, 8)

    # Blocks of 32: of two warps, the second has all the work.
    rounded = inverse.to(gl.float16)
    block_tile.store(rounded.reshape([C, BLOCK]))
    fence_async_shared()
    step = gl.zeros([C, BLOCK], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16]))
    first = _left_operand(_scaled(first, gl.where(warp == 1, scale, 0.0)), BLOCK)
    third = _left_operand(_scaled(third, gl.where(warp == 3, scale, 0.0)), BLOCK)
    step = _product(first, block_tile.slice(0, BLOCK), step)
    step = _product(third, block_tile.slice(HALF, BLOCK), step)
    step = gl.convert_layout(step.to(gl.float16).reshape(shape), SMALL)
    step = _small_product(ones, step, _small_zeros()).to(gl.float16)
    small_warp = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, SMALL)))[:, None, None]
    odd = gl.where(small_warp % 2 == 1, 1.0, 0.0)
    joined = _small_product(rounded, step, inverse * (1.0 - odd))
    half = _beside(joined.reshape([C, BLOCK]), (inverse * odd).reshape([C, BLOCK]))

    # The whole.
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    half = gl.convert_layout(half, wide)
    half_tile.store(half.to(gl.float16))
    fence_async_shared()
    below = _scaled(half, gl.where(warp >= 2, 1.0, 0.0))
    left = _left_operand(_scaled(left, gl.where(warp >= 2, scale, 0.0)), HALF)
    step = _product(left, half_tile.slice(0, HALF), gl.zeros([C, HALF], gl.float32, wide))
    step_tile.store(step.to(gl.float16))
    fence_async_shared()
    joined = _product(_left_operand(below, HALF), step_tile.slice(HALF, HALF), half - below)
    return _beside(joined, below)


@gluon.jit
def _numbers(C: gl.constexpr):
    """Room for a number a token."""
    return gl.allocate_shared_memory(gl.float32, [C], PLAIN)


@gluon.jit(do_not_specialize=_LENGTHS)
def pre_kernel(
    q_desc,
    k_desc,
    solve_desc,
    scores_desc,
    g_ptr,
    beta_ptr,
    doc_start_ptr,
    gate_sum_ptr,
    k_norm_ptr,
    factors_ptr,
    scale,
    eps,
    num_tokens,
    num_chunks,
    first_chunk,
    H: gl.constexpr,
    HK: gl.constexpr,
    K: gl.constexpr,
    C: gl.constexpr,
    HAS_DOCS: gl.constexpr,
    NORMALIZE: gl.constexpr,
    SOLVE: gl.constexpr,
):
    """Pre of one chunk and head."""
    dtype: gl.constexpr = k_desc.dtype
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    row: gl.constexpr = gl.SliceLayout(1, square)
    column: gl.constexpr = gl.SliceLayout(0, square)
    pid = gl.program_id(0)
    n = first_chunk + pid // H
    head = pid % H
    chunk = head * num_chunks + n

    k_tile = gl.allocate_shared_memory(dtype, [C, K], k_desc.layout)
    q_tile = gl.allocate_shared_memory(dtype, [C, K], q_desc.layout)
    scores_tile = gl.allocate_shared_memory(dtype, [C, C], scores_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(ready, count=1)
    fence_async_shared()
    key_column = (head // (H // HK)) * K
    mbarrier.expect(ready, k_desc.block_type.nbytes + q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [n * C, key_column], ready, k_tile)
    tma.async_copy_global_to_shared(q_desc, [n * C, key_column], ready, q_tile)
    gl.thread_barrier()  # else the compiler has the second copy wait for the gates

    # The gates, while the tiles come.
    ts = gl.arange(0, C, layout=TOKEN)
    in_chunk = ts < num_tokens - n * C
    token = (n.to(gl.int64) * C + ts) * H + head
    g = gl.load(g_ptr + token, mask=in_chunk, other=0.0)
    beta = gl.load(beta_ptr + token, mask=in_chunk, other=0.0).to(gl.float32)
    g = gl.maximum(g.to(gl.float32), -100.0)
    if HAS_DOCS:
        position = gl.minimum(n * C + ts, num_tokens - 1)
        start = gl.maximum(gl.load(doc_start_ptr + position) - n.to(gl.int64) * C, -1).to(gl.int32)
        starts = ts == start
        gates = gl.expand_dims(gl.where(starts, 0.0, g), 0), gl.expand_dims(starts, 0)
        gate_sums, _ = gl.associative_scan(gates, 1, _add_within)
        end_start = gl.max(start, axis=0)
        carried = start < 0
    else:
        gate_sums = gl.associative_scan(gl.expand_dims(g, 0), 1, _add)
    gate_sum = gl.sum(gate_sums, axis=0)  # of one row
    end_sum = gl.sum(gl.where(ts == C - 1, gate_sum, 0.0), axis=0)
    log = gate_sum * LOG2_E
    from_start, to_end, whole = _exp2(log), _exp2(end_sum * LOG2_E - log), _exp2(gl.zeros_like(log) + end_sum * LOG2_E)
    if HAS_DOCS:
        from_start = gl.where(carried, from_start, 0.0)
        to_end = gl.where(ts >= end_start, to_end, 0.0)
        whole = gl.where(end_start < 0, whole, 0.0)
    at = chunk.to(gl.int64) * C + ts
    factors = factors_ptr + chunk.to(gl.int64) * (FACTORS * C) + ts
    gl.store(gate_sum_ptr + at, gate_sum)
    gl.store(factors, beta)
    gl.store(factors + 3 * C, whole)
    gl.store(factors + 5 * C, gate_sum)
    log_numbers, key_log_numbers = _numbers(C), _numbers(C)
    log_numbers.store(log)
    if HAS_DOCS:
        gl.store(factors + 8 * C, start.to(gl.float32))
        start_numbers = _numbers(C)
        start_numbers.store(start.to(gl.float32))
    else:
        gl.store(factors + 8 * C, gl.zeros_like(log) - 1.0)

    mbarrier.wait(ready, 0)
    zeros = gl.zeros([C, C], gl.float32, square)
    scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if SOLVE:
        products = warpgroup_mma(k_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if NORMALIZE:
        k_square_numbers, q_square_numbers = _numbers(C), _numbers(C)
        k_square_numbers.store(_square_norms(k_tile))
        q_square_numbers.store(_square_norms(q_tile))
        k_square, q_square = k_square_numbers.load(TOKEN) + eps, q_square_numbers.load(TOKEN) + eps
        k_norm, q_norm = gl.rsqrt(k_square), gl.rsqrt(q_square)
        key_log = log + 0.5 * _log2(k_square)
    else:
        k_norm, q_norm, key_log = gl.zeros_like(log) + 1.0, gl.zeros_like(log) + 1.0, log
    key_log_numbers.store(key_log)
    gl.store(k_norm_ptr + at, k_norm)
    gl.store(factors + 1 * C, gl.where(in_chunk, to_end * k_norm, 0.0))
    gl.store(factors + 2 * C, beta * from_start * k_norm)
    gl.store(factors + 4 * C, gl.where(in_chunk, scale * q_norm * from_start, 0.0))
    gl.store(factors + 6 * C, k_norm)
    gl.store(factors + 7 * C, q_norm)
    q_numbers, system_numbers = _numbers(C), _numbers(C)
    q_numbers.store(scale * q_norm)
    system_numbers.store(-beta * k_norm)

    # D and the keys' norms. Masked before the exponential: what is masked may be above 0.
    t = gl.arange(0, C, layout=row)[:, None]
    s = gl.arange(0, C, layout=column)[None, :]
    seen = t >= s
    if HAS_DOCS:
        seen = seen & (s.to(gl.float32) >= start_numbers.load(row)[:, None])
    pairs = log_numbers.load(row)[:, None] - key_log_numbers.load(column)[None, :]
    pairs = _exp2(gl.where(seen, pairs, float("-inf")))
    if SOLVE:
        scores, products = warpgroup_mma_wait(0, deps=(scores, products))
    else:
        scores = warpgroup_mma_wait(0, deps=(scores,))
    # The places of tiles are given to others after the last instruction that names them, products under way or not.
    q_tile._keep_alive()
    k_tile._keep_alive()
    scores_tile.store((scores * (pairs * q_numbers.load(row)[:, None])).to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(scores_desc, [chunk * C, 0], scores_tile)
    if SOLVE:
        solve_tile = gl.allocate_shared_memory(dtype, [C, C], solve_desc.layout)
        narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BLOCK], gl.float16)
        wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 2 * BLOCK], gl.float16)
        tiles = (
            gl.allocate_shared_memory(gl.float16, [C, BLOCK], narrow),
            gl.allocate_shared_memory(gl.float16, [C, 2 * BLOCK], wide),
            gl.allocate_shared_memory(gl.float16, [C, 2 * BLOCK], wide),
        )
        solve = _solve(products * pairs, system_numbers.load(row), tiles)
        solve_tile.store(solve.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(solve_desc, [chunk * C, 0], solve_tile)
        tma.store_wait(pendings=0)
        solve_tile._keep_alive()
    else:
        tma.store_wait(pendings=0)
    scores_tile._keep_alive()
