"""The three warpgroups of `hopper_mamba3_gradients`, and what all its warps must agree upon: barriers and numbers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_common import in_float32, release, tiles_at, unknown_zero

# What is fetched, and how many warpgroups read it: q, k and their turns; x and dY; z and dy; S~; E; the numbers, which
# have two places.
ROWS, VALUES, GATE, STATE, GRAD_STATE, NUMBERS = map(gl.constexpr, range(6))
READERS = gl.constexpr((3, 3, 1, 2, 2, 3))
# The numbers: of tokens up to D (WRITTEN: the gate sum less the logarithm of s), both logarithms of base 2; then what
# the last token's v, k and angles are owed.
DT, OWN, WRITTEN, GATE_SUM, FROM_START, TO_END, SKIP, OWED_V, OWED_K, OWED_TURN, COUNT = map(
    gl.constexpr, (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11)
)
# Numbers a token from which the gates' gradients come: two places of each.
FROM_STATE, AT_END, TRACE, GRAD_BOTH, LOG_ROW, LOG_COLUMN, BOTH = map(gl.constexpr, range(7))
# Barriers of what the warpgroups make for each other; PAIRS: scores, their gradients, the products of both and the last
# of the sums; GRADS: dz and dx.
PAIRS, THETA, GRADS, SUMS = map(gl.constexpr, range(4))
TAKERS = gl.constexpr((2, 1, 1, 1))


@gluon.jit
def _row(numbers, j, layout: gl.constexpr):
    """[C, 1]: one for each row of a tile of this layout."""
    return gl.expand_dims(numbers.index(j).load(gl.SliceLayout(1, layout)), 1)


@gluon.jit
def _column(numbers, j, layout: gl.constexpr):
    """[1, C]"""
    return gl.expand_dims(numbers.index(j).load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _halves(x):
    """The left and the right half of a product: no number leaves its thread."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _joined(left, right, layout: gl.constexpr):
    """The opposite of `_halves`."""
    shape: gl.constexpr = (left.shape[0], 2 * left.shape[1])
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), shape), layout)


@gluon.jit
def _power(x):
    """2^x, 0 below the normal numbers: one instruction."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _high_bits(x):
    """Of a float32 what fits into a bfloat16, cut off."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0xffff0000;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def starts(doc_start_ptr, n, num_tokens, C: gl.constexpr, layout: gl.constexpr):
    """[C] where each token's document starts, relative to the chunk; -1: before it. See `document_starts`."""
    position = gl.minimum(n * C + gl.arange(0, C, layout=layout), num_tokens - 1)
    start = gl.load(doc_start_ptr + position) - n.to(gl.int64) * C
    return gl.maximum(start, -1).to(gl.int32)


@gluon.jit
def _turned_gradient(grad, rows_tile, layout: gl.constexpr):
    """Of the angles [C, C / 2], from that of turned columns [C, C] and the turned rows; and its halves."""
    first, second = _halves(grad)
    rows_first, rows_second = _halves(in_float32(rows_tile.load(layout)))
    theta = second * rows_first - first * rows_second
    return theta, first, second


@gluon.jit
def _turned_back(first, second, turns_tile, layout: gl.constexpr):
    cos, sin = _halves(turns_tile.load(layout).to(gl.float32))
    return _joined(first * cos + second * sin, second * cos - first * sin, layout)


@gluon.jit
def _row_sums(x):
    """Of a product [C, 16] with ones, whose columns are all alike: [C, 4], of each thread its first one."""
    left, _ = _halves(x)
    even, _ = gl.split(gl.reshape(left, [x.shape[0], 4, 2]))
    return even


@gluon.jit
def _start_bias(tile, turned, rest, ones, layout: gl.constexpr):
    """Leaves a head's rows in a tile, and starts its product with ones [N, W]: their sums over tokens."""
    N: gl.constexpr = tile.shape[1]
    W: gl.constexpr = ones.shape[1]
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    tile.store(_joined(turned.to(tile.dtype), rest, layout))
    fence_async_shared()
    gl.thread_barrier()
    return warpgroup_mma(tile.permute((1, 0)), ones, gl.zeros([N, W], gl.float32, narrow), use_acc=False, is_async=True)


@gluon.jit
def _store_bias(bias_ptr, sums, R: gl.constexpr):
    """Sums over tokens, four times each, in the columns' true places."""
    columns = gl.expand_dims(gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, sums.type.layout)), 1)
    in_pair = gl.where(columns < R, 2 * columns, 2 * (columns - R) + 1)
    alike = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, sums.type.layout)), 0) * 0
    gl.store(bias_ptr + (gl.where(columns < 2 * R, in_pair, columns) + alike), sums)


@gluon.jit
def _store_sum(rows_ptr, turned, rest, dtype: gl.constexpr, layout: gl.constexpr):
    """Rows [C, 2C] of a matrix, summed over heads."""
    C: gl.constexpr = turned.shape[0]
    ts = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, layout)), 1)
    ptr = rows_ptr + ts * (2 * C) + gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, layout)), 0)
    gl.store(ptr, turned.to(dtype))
    gl.store(ptr + C, rest.to(dtype))


@gluon.jit
def queries(
    tiles, all_turns, numbers, made_tiles, theta, all_rows, sum_rest, all_ones, sums, barriers, rows_ptr,
    bias_ptr, doc_start_ptr, head, n, num_tokens, num_chunks, steps, HAS_DOCS: gl.constexpr,
):  # fmt: skip
    """The scores, their gradients, and what C and its parameters get."""
    full, empty, made, taken = barriers
    dtype: gl.constexpr = tiles[0].dtype
    C: gl.constexpr = tiles[0].shape[1]
    N: gl.constexpr = all_rows.shape[2]
    square: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    of_row: gl.constexpr = gl.SliceLayout(1, square)
    ts = gl.arange(0, C, layout=of_row)
    t = gl.expand_dims(ts, 1)
    s = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, square)), 0)
    start = t * 0 - 1
    if HAS_DOCS:
        start = gl.expand_dims(starts(doc_start_ptr, n, num_tokens, C, of_row), 1)
    sum_turned = gl.zeros([C, C], gl.float32, square)
    sum_rest.store(sum_turned)
    for i in range(0, steps):
        zero = unknown_zero(num_tokens, i)
        x, grad_read, _, _, state, _, k, q = tiles_at(tiles, zero)
        scores_tile, pairs_tile = made_tiles[0].index(zero), made_tiles[1].index(zero)
        log_tile = made_tiles[2].index(zero)
        rows, turns, ones = all_rows.index(zero), all_turns.index(zero), all_ones.index(zero)
        phase = i & 1
        place = i & 1
        place_phase = i >> 1 & 1
        first = COUNT * place
        mbarrier.wait(full[NUMBERS].index(place), place_phase)
        # Masked before the exponential: what is masked may be above 0.
        log = _row(numbers, first + GATE_SUM, square) - _column(numbers, first + WRITTEN, square)
        seen = t > s
        if HAS_DOCS:
            seen = seen & (s >= start)
        decay = _power(gl.where(seen, log, float("-inf")))
        own = _row(numbers, first + OWN, square)
        skip = _row(numbers, first + SKIP, square)
        mbarrier.wait(full[VALUES], phase)
        mbarrier.wait(full[ROWS], phase)
        pairs = gl.zeros([C, C], gl.float32, square)
        grad_scores = gl.zeros([C, C], gl.float32, square)
        grad_scores = warpgroup_mma(grad_read, x.permute((1, 0)), grad_scores, use_acc=False, is_async=True)
        pairs = warpgroup_mma(q, k.permute((1, 0)), pairs, use_acc=False, is_async=True)
        pairs, grad_scores = warpgroup_mma_wait(0, deps=(pairs, grad_scores))
        scores = pairs * decay
        log_pair = (grad_scores * scores).to(gl.bfloat16)
        scores = gl.where(t == s, own * pairs + skip, scores).to(dtype)
        grad_pairs = (grad_scores * gl.where(t == s, own, decay)).to(dtype)
        both = gl.sum(gl.where(t == s, pairs, 0.0), axis=1)
        mbarrier.wait(taken[PAIRS], phase ^ 1)
        mbarrier.wait(taken[SUMS].index(place), place_phase ^ 1)
        sums[BOTH].index(place).store(both)
        scores_tile.store(scores)
        pairs_tile.store(grad_pairs)
        log_tile.store(log_pair)
        fence_async_shared()
        release(made[PAIRS])
        mbarrier.wait(taken[THETA], phase ^ 1)
        mbarrier.wait(full[STATE], phase)
        grad = gl.zeros([C, N], gl.float32, wide)
        grad = warpgroup_mma(grad_read, state, grad, use_acc=False, is_async=True)
        from_start = _row(numbers, first + FROM_START, wide)
        grad = warpgroup_mma_wait(0, deps=(grad,))
        grad = warpgroup_mma(pairs_tile, k, grad * from_start, is_async=True)
        grad = warpgroup_mma_wait(0, deps=(grad,))
        release(empty[NUMBERS].index(place))
        mbarrier.arrive(empty[STATE])
        mbarrier.arrive(empty[VALUES])
        grad, grad_rest = _halves(grad)
        grad, grad_rest = gl.convert_layout(grad, square), gl.convert_layout(grad_rest, square)
        part, grad_first, grad_second = _turned_gradient(grad, q.slice(0, C, dim=1), square)
        theta.store(part)
        grad = _turned_back(grad_first, grad_second, turns, square)
        bias = _start_bias(rows, grad, grad_rest.to(dtype), ones, wide)
        mbarrier.arrive(empty[ROWS])
        mbarrier.arrive(made[THETA])
        sum_turned += grad
        sum_rest.store(sum_rest.load(square) + grad_rest)
        bias = warpgroup_mma_wait(0, deps=(bias,))
        chunk = (head + i).to(gl.int64) * num_chunks + n
        _store_bias(bias_ptr + chunk * N, _row_sums(bias), C // 2)
    _store_sum(rows_ptr, sum_turned, sum_rest.load(square), dtype, square)


@gluon.jit
def keys(
    tiles, all_turns, numbers, made_tiles, theta, all_rows, sum_rest, all_ones, all_seen, spent, barriers, rows_ptr,
    bias_ptr, speed_ptr, speed_rows_ptr, grad_turn_ptr, turn_total_ptr, doc_start_ptr, head, n, num_tokens, num_chunks,
    steps, R: gl.constexpr, HAS_DOCS: gl.constexpr,
):  # fmt: skip
    """What B, its parameters and the angles get."""
    full, empty, made, taken = barriers
    dtype: gl.constexpr = tiles[0].dtype
    C: gl.constexpr = tiles[0].shape[1]
    N: gl.constexpr = all_rows.shape[2]
    square: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    of_row: gl.constexpr = gl.SliceLayout(1, square)
    ts = gl.arange(0, C, layout=of_row)
    t = gl.expand_dims(ts, 1)
    s = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, square)), 0)
    # [t, s]: whether the angle of s has the turn of t in it.
    later = s >= t
    if HAS_DOCS:
        start = starts(doc_start_ptr, n, num_tokens, C, gl.SliceLayout(0, square))
        later = later & (t >= gl.expand_dims(start, 0))
    all_seen.index(0).store(gl.where(later, 1.0, 0.0).to(gl.bfloat16))
    # Whether the turns of the first token are also those of what comes before the chunk.
    from_before = 1.0
    if HAS_DOCS:
        from_before = gl.where(gl.load(doc_start_ptr + n * C) < n.to(gl.int64) * C, 1.0, 0.0)
    last = gl.minimum(num_tokens - n * C, C) - 1
    is_last = gl.where(t == last, 1.0, 0.0)
    sum_turned = gl.zeros([C, C], gl.float32, square)
    sum_rest.store(sum_turned)
    sum_speed, _ = _halves(sum_turned)
    half: gl.constexpr = sum_speed.type.layout
    half_ts = gl.arange(0, C, layout=gl.SliceLayout(1, half))
    half_t = gl.expand_dims(half_ts, 1)
    angles = gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, half)), 0)
    in_chunk = half_t + 0 * angles < num_tokens - n * C
    for i in range(0, steps):
        zero = unknown_zero(num_tokens, i)
        x, _, _, _, _, grad_state, k, q = tiles_at(tiles, zero)
        pairs_tile, rows = made_tiles[1].index(zero), all_rows.index(zero)
        turns, ones, seen = all_turns.index(zero), all_ones.index(zero), all_seen.index(zero)
        theta_tile = rows._reinterpret(gl.bfloat16, [2, C, C], seen.type.layout).index(0)  # later in the same place
        phase = i & 1
        place = i & 1
        place_phase = i >> 1 & 1
        first = COUNT * place
        mbarrier.wait(full[NUMBERS].index(place), place_phase)
        mbarrier.wait(full[VALUES], phase)
        mbarrier.wait(full[GRAD_STATE], phase)
        grad = gl.zeros([C, N], gl.float32, wide)
        grad = warpgroup_mma(x, grad_state, grad, use_acc=False, is_async=True)
        to_end = _row(numbers, first + TO_END, wide)
        owed = _column(numbers, first + OWED_K + 1, square)
        grad = warpgroup_mma_wait(0, deps=(grad,))
        release(empty[GRAD_STATE])
        mbarrier.arrive(empty[VALUES])
        grad = grad * to_end
        mbarrier.wait(full[ROWS], phase)
        mbarrier.wait(made[PAIRS], phase)
        grad = warpgroup_mma(pairs_tile.permute((1, 0)), q, grad, is_async=True)
        grad = warpgroup_mma_wait(0, deps=(grad,))
        release(taken[PAIRS])
        grad, grad_rest = _halves(grad)
        grad, grad_rest = gl.convert_layout(grad, square), gl.convert_layout(grad_rest, square)
        grad_rest += is_last * owed
        sum_rest.store(sum_rest.load(square) + grad_rest)
        grad_rest = grad_rest.to(dtype)
        grad_theta, _, _ = _turned_gradient(grad, k.slice(0, C, dim=1), square)
        # With k of the last token as it was handed on.
        owed = gl.expand_dims(numbers.index(first + OWED_TURN).slice(0, R).load(gl.SliceLayout(0, half)), 0)
        grad_theta += gl.where(half_t == last, 1.0, 0.0) * owed
        # Nobody reads it: a place may only be released behind a store of what all values loaded from it went into, or
        # the loads may still be under way when the copy engine overwrites it.
        spent.store(gl.sum(grad_theta, axis=1))
        grad += is_last * _column(numbers, first + OWED_K, square)
        grad_first, grad_second = _halves(grad)
        grad = _turned_back(grad_first, grad_second, turns, square)
        dt = _row(numbers, first + DT, half)
        bias = _start_bias(rows, grad, grad_rest, ones, wide)
        mbarrier.arrive(empty[ROWS])
        sum_turned += grad
        bias = warpgroup_mma_wait(0, deps=(bias,))
        bias_sums = _row_sums(bias)
        # Far ahead of its use: it comes from far away.
        speed = gl.load(speed_ptr + half_t * R + angles, mask=in_chunk, other=0.0)
        mbarrier.wait(made[THETA], phase)
        grad_theta += theta.load(half)
        gl.thread_barrier()  # the products above are done in all warps
        # Two bfloat16 numbers hold 16 digits of a float32, and far more than q and k have.
        high = _high_bits(grad_theta)
        theta_tile.store(_joined(high, grad_theta - high, square).to(gl.bfloat16))
        fence_async_shared()
        release(taken[THETA])
        turn = gl.zeros([C, C], gl.float32, square)
        turn = warpgroup_mma(seen, theta_tile, turn, use_acc=False, is_async=True)
        turn = warpgroup_mma_wait(0, deps=(turn,))
        left, right = _halves(turn)
        grad_turn = left + right
        # Stores to global memory only here: the fences above would wait for them.
        chunk = (head + i).to(gl.int64) * num_chunks + n
        _store_bias(bias_ptr + chunk * N, bias_sums, R)
        gl.store(grad_turn_ptr + chunk * C + half_ts, gl.sum(grad_turn * speed, axis=1))
        total_ptr = turn_total_ptr + chunk * R + (angles + 0 * half_t)
        gl.store(total_ptr, grad_turn * from_before, mask=half_t + 0 * angles == 0)
        sum_speed += grad_turn * dt
        release(empty[NUMBERS].index(place))
    _store_sum(rows_ptr, sum_turned, sum_rest.load(square), dtype, square)
    gl.store(speed_rows_ptr + half_t * R + angles, sum_speed.to(dtype))


@gluon.jit
def values(tiles, numbers, made_tiles, all_ones, sums, barriers, n, num_tokens, steps):
    """dz and dx, in the places of z and dy, and what reads and writes tell of the gates."""
    full, empty, made, taken = barriers
    dtype: gl.constexpr = tiles[0].dtype
    C: gl.constexpr = tiles[0].shape[1]
    W: gl.constexpr = all_ones.shape[2]
    square: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    t = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, square)), 1)
    s = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, square)), 0)
    last = gl.minimum(num_tokens - n * C, C) - 1
    is_last = gl.where(t == last, 1.0, 0.0)
    for i in range(0, steps):
        zero = unknown_zero(num_tokens, i)
        x, grad_read, z, grad_y, state, grad_state, k, q = tiles_at(tiles, zero)
        scores_tile, log_tile, log_ones = made_tiles[0].index(zero), made_tiles[2].index(zero), all_ones.index(zero)
        phase = i & 1
        place = i & 1
        place_phase = i >> 1 & 1
        first = COUNT * place
        mbarrier.wait(full[NUMBERS].index(place), place_phase)
        mbarrier.wait(full[STATE], phase)
        mbarrier.wait(full[GRAD_STATE], phase)
        # <S~, E>, as the trace of a product.
        states = gl.zeros([C, C], gl.float32, square)
        states = warpgroup_mma(state, grad_state.permute((1, 0)), states, use_acc=False, is_async=True)
        to_end = _row(numbers, first + TO_END, square)
        from_start = _row(numbers, first + FROM_START, square)
        states = warpgroup_mma_wait(0, deps=(states,))
        trace = gl.sum(gl.where(t == s, states, 0.0), axis=1)
        mbarrier.wait(full[VALUES], phase)
        mbarrier.wait(full[ROWS], phase)
        read = gl.zeros([C, C], gl.float32, square)
        read = warpgroup_mma(q, state.permute((1, 0)), read, use_acc=False, is_async=True)
        grad_v = gl.zeros([C, C], gl.float32, square)
        grad_v = warpgroup_mma(k, grad_state.permute((1, 0)), grad_v, use_acc=False, is_async=True)
        read, grad_v = warpgroup_mma_wait(0, deps=(read, grad_v))
        release(empty[GRAD_STATE])
        mbarrier.arrive(empty[STATE])
        mbarrier.arrive(empty[ROWS])
        read = read * from_start
        grad_v = grad_v * to_end
        values = in_float32(x.load(square))
        grads = in_float32(grad_read.load(square))
        grad_both = gl.sum(values * grads, axis=1)
        from_state = gl.sum(read * grads, axis=1)
        at_end = gl.sum(grad_v * values, axis=1)
        grad_v += is_last * _column(numbers, first + OWED_V, square)
        mbarrier.wait(made[PAIRS], phase)
        read = warpgroup_mma(scores_tile, x, read, is_async=True)
        grad_v = warpgroup_mma(scores_tile.permute((1, 0)), grad_read, grad_v, is_async=True)
        log_row = gl.zeros([C, W], gl.float32, narrow)
        log_column = gl.zeros([C, W], gl.float32, narrow)
        # Both sums of one tile: where a gate is large, they must cancel.
        log_row = warpgroup_mma(log_tile, log_ones, log_row, use_acc=False, is_async=True)
        log_column = warpgroup_mma(log_tile.permute((1, 0)), log_ones, log_column, use_acc=False, is_async=True)
        mbarrier.wait(taken[SUMS].index(place), place_phase ^ 1)
        sums[FROM_STATE].index(place).store(from_state)
        sums[AT_END].index(place).store(at_end)
        sums[TRACE].index(place).store(trace)
        sums[GRAD_BOTH].index(place).store(grad_both)
        read, grad_v, log_row, log_column = warpgroup_mma_wait(0, deps=(read, grad_v, log_row, log_column))
        sums[LOG_ROW].index(place).store(_row_sums(log_row))
        sums[LOG_COLUMN].index(place).store(_row_sums(log_column))
        release(made[SUMS].index(place))
        mbarrier.arrive(empty[VALUES])
        mbarrier.arrive(empty[NUMBERS].index(place))
        mbarrier.arrive(taken[PAIRS])
        grad_v = grad_v.to(dtype)
        mbarrier.wait(full[GATE], phase)
        gate = in_float32(z.load(square))
        share = reciprocal(1.0 + _power(gate * -1.4426950408889634))
        read = read * (share * (1.0 + gate * (1.0 - share)))
        read = read * in_float32(grad_y.load(square))
        gl.thread_barrier()
        z.store(read.to(dtype))
        grad_y.store(grad_v)
        fence_async_shared()
        release(made[GRADS])
