"""All gradients of the gated delta rule in one kernel for Hopper, in Gluon: PG, where each tile is read once.

The three kernels of `gated_delta_backward` read q, k, dO, Vn and S up to three times, since one program has not the
registers for all of their sums; their bytes are what they cost. Here three warpgroups share the tiles of one chunk and
head in shared memory: one has the gradients of the queries, one those of the keys, one those of the values and, from
what the other two leave it, of the gates. A warp has the copy engine fetch the next chunk's tiles, each as soon as all
that read its place are done; another one has it write. A program walks through a few neighbouring chunks of one head.

The notation is `gated_delta`'s. With x' for the gradient of a normalised query or key, times its inverse norm,

    M = s rq_t rk_s (dO Vn^T) . D     X = -b_t rk_t rk_s tril(a Vn^T, -1) . D     both rounded once, for all their uses
    q' = rho dO S^T + M k             k' = kappa Vn E^T - r a S^T + X k + X^T k + M^T q
    dq = q' - <q', q> rq^2 q          dk = k' - <k', k> rk^2 k                    dv = b a
    db = <a, v> + <row of X / b, k k^T> - gam rk <a S^T, k>

The gate sums' gradient needs no product of its own: a token's decay counts up in what its query reads and its own
system's row, down in what others read of its key, so it is <q', q> + 2 <X k - r a S^T, k> - <k', k>, and the chunk's
last token has kappa <Vn E^T, k> of all tokens and Gam <S, E> more.

For B = 1, as many key heads as heads, 16-bit inputs, and K and V of 64 or 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .decays import FACTORS
from .hopper_common import in_float32, release, tiles_at, unknown_zero

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk", "end_chunk"]

# The tiles, and how many warpgroups read each. NUMBERS, the factors, have two places: the gates read them late.
GRAD_O, SOLVED, STATE, V_NEW, GRAD_STATE, VALUES, KEYS, QUERIES, NUMBERS = map(gl.constexpr, range(9))
READERS = gl.constexpr((1, 2, 3, 2, 2, 1, 2, 2, 3, 3))
# Rows of the factors, see `gated_delta.pre_kernel`.
BETA, KAPPA, READ, DECAY, RHO, GATE_SUM, K_NORM, Q_NORM, START = map(gl.constexpr, range(9))
# What the warpgroups tell the one of the gates, numbers a token.
FROM_QUERY, FROM_KEY, AT_END, FROM_SYSTEM, FROM_VALUE, SUMS = map(gl.constexpr, range(6))
# Barriers of the tiles that they write; PAIRS is M. The sums have two places: the gates take them a chunk later.
PAIRS, GRAD_Q, GRAD_K, QUERY_SUMS, KEY_SUMS = map(gl.constexpr, (0, 1, 2, 3, 5))


@gluon.jit
def _numbers(factors, j: gl.constexpr, layout: gl.constexpr, first: gl.constexpr, count: gl.constexpr):
    """[count], the j-th factor of these tokens. As one dimension: the tile's rows follow one another."""
    rows: gl.constexpr = factors.shape[0]
    C: gl.constexpr = factors.shape[1]
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    return factors._reinterpret(gl.float32, [rows * C], plain).slice(j * C + first, count).load(layout)


@gluon.jit
def _row(factors, j: gl.constexpr, layout: gl.constexpr):
    """[C, 1]: one for each row of a tile of this layout."""
    return gl.expand_dims(_numbers(factors, j, gl.SliceLayout(1, layout), 0, factors.shape[1]), 1)


@gluon.jit
def _column(factors, j: gl.constexpr, layout: gl.constexpr):
    """[1, C]"""
    return gl.expand_dims(_numbers(factors, j, gl.SliceLayout(0, layout), 0, factors.shape[1]), 0)


@gluon.jit
def _pair_decay(factors, layout: gl.constexpr, WITH_ITSELF: gl.constexpr):
    """D [t, s], without the diagonal or with it. Masked before the exponential: what is masked may be above 0."""
    C: gl.constexpr = factors.shape[1]
    t = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, layout)), 1)
    s = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, layout)), 0)
    log = _row(factors, GATE_SUM, layout) - _column(factors, GATE_SUM, layout)
    seen = s.to(gl.float32) >= _row(factors, START, layout)
    if WITH_ITSELF:
        seen = seen & (t >= s)
    else:
        seen = seen & (t > s)
    return gl.exp(gl.where(seen, log, float("-inf")))


@gluon.jit
def _queries(
    slots, all_factors, all_pairs, grad_q_tiles, sums, barriers, scale, num_tokens, steps, NORMALIZE: gl.constexpr
):
    """M, dq and <q', q> of each chunk."""
    full, empty, made, taken = barriers
    dtype: gl.constexpr = slots[0].dtype
    C: gl.constexpr = all_factors.shape[2]
    K: gl.constexpr = slots[-1].shape[2]
    square: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K, 16])
    for i in range(0, steps):
        phase = i & 1
        zero = unknown_zero(num_tokens, i)
        grad_o, _, state, v_new, _, _, k, q = tiles_at(slots, zero)
        pairs, grad_q_tile = all_pairs.index(zero), grad_q_tiles.index(zero)
        factors = all_factors.index(i & 1)
        mbarrier.wait(full.index(GRAD_O), phase)
        mbarrier.wait(full.index(V_NEW), phase)
        mbarrier.wait(full.index(STATE), phase)
        grad_pair = gl.zeros([C, C], gl.float32, square)
        grad_pair = warpgroup_mma(grad_o, v_new.permute((1, 0)), grad_pair, use_acc=False, is_async=True)
        grad_q = gl.zeros([C, K], gl.float32, wide)
        grad_q = warpgroup_mma(grad_o, state.permute((1, 0)), grad_q, use_acc=False, is_async=True)
        mbarrier.wait(full.index(NUMBERS + (i & 1)), i >> 1 & 1)
        decay = _pair_decay(factors, square, True)
        decay = decay * (scale * _row(factors, Q_NORM, square)) * _column(factors, K_NORM, square)
        mbarrier.wait(taken.index(PAIRS), phase ^ 1)
        grad_pair = warpgroup_mma_wait(1, deps=(grad_pair,))
        pairs.store((grad_pair * decay).to(dtype))
        fence_async_shared()
        release(made.index(PAIRS))
        grad_q = warpgroup_mma_wait(0, deps=(grad_q,))
        release(empty.index(GRAD_O))
        mbarrier.arrive(empty.index(STATE))
        mbarrier.arrive(empty.index(V_NEW))
        grad_q = grad_q * _row(factors, RHO, wide)
        q_norm = _row(factors, Q_NORM, wide)
        mbarrier.wait(full.index(KEYS), phase)
        grad_q = warpgroup_mma(pairs, k, grad_q, is_async=True)
        mbarrier.wait(full.index(QUERIES), phase)
        grad_q = warpgroup_mma_wait(0, deps=(grad_q,))
        release(empty.index(KEYS))
        mbarrier.arrive(taken.index(PAIRS))
        rows = in_float32(q.load(wide))
        along = gl.sum(grad_q * rows, axis=1)
        if NORMALIZE:
            grad_q = grad_q - gl.expand_dims(along, 1) * (q_norm * q_norm) * rows
        mbarrier.wait(taken.index(GRAD_Q), phase ^ 1)
        grad_q_tile.store(grad_q.to(dtype))
        fence_async_shared()
        release(made.index(GRAD_Q))
        mbarrier.arrive(empty.index(QUERIES))
        mbarrier.arrive(empty.index(NUMBERS + (i & 1)))
        mbarrier.wait(taken.index(QUERY_SUMS + (i & 1)), (i >> 1 & 1) ^ 1)
        sums.index(FROM_QUERY + SUMS * (i & 1)).store(along)
        release(made.index(QUERY_SUMS + (i & 1)))


@gluon.jit
def _keys(
    slots, all_factors, all_pairs, systems, grad_k_tiles, sums, barriers, num_tokens, steps, NORMALIZE: gl.constexpr
):
    """dk, and what it tells of the gates, of each chunk."""
    full, empty, made, taken = barriers
    dtype: gl.constexpr = slots[0].dtype
    C: gl.constexpr = all_factors.shape[2]
    K: gl.constexpr = slots[-1].shape[2]
    square: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K, 16])
    for i in range(0, steps):
        phase = i & 1
        zero = unknown_zero(num_tokens, i)
        _, solved, state, v_new, grad_state, _, k, q = tiles_at(slots, zero)
        pairs, system, grad_k_tile = all_pairs.index(zero), systems.index(zero), grad_k_tiles.index(zero)
        factors = all_factors.index(i & 1)
        mbarrier.wait(full.index(SOLVED), phase)
        mbarrier.wait(full.index(V_NEW), phase)
        rows = gl.zeros([C, C], gl.float32, square)
        rows = warpgroup_mma(solved, v_new.permute((1, 0)), rows, use_acc=False, is_async=True)
        mbarrier.wait(full.index(STATE), phase)
        read = gl.zeros([C, K], gl.float32, wide)
        read = warpgroup_mma(solved, state.permute((1, 0)), read, use_acc=False, is_async=True)
        mbarrier.wait(full.index(NUMBERS + (i & 1)), i >> 1 & 1)
        rows = warpgroup_mma_wait(1, deps=(rows,))
        rows = rows * _pair_decay(factors, square, False) * _row(factors, K_NORM, square)
        rows = -rows * _column(factors, K_NORM, square)
        system.store((rows * _row(factors, BETA, square)).to(dtype))
        fence_async_shared()
        # Only now: before, its sums would make others spill, whose loads take longer than this product.
        mbarrier.wait(full.index(GRAD_STATE), phase)
        from_end = gl.zeros([C, K], gl.float32, wide)
        from_end = warpgroup_mma(v_new, grad_state.permute((1, 0)), from_end, use_acc=False, is_async=True)
        read = warpgroup_mma_wait(1, deps=(read,))
        release(empty.index(SOLVED))
        mbarrier.arrive(empty.index(STATE))
        from_end = warpgroup_mma_wait(0, deps=(from_end,))
        release(empty.index(V_NEW))
        mbarrier.arrive(empty.index(GRAD_STATE))

        mbarrier.wait(full.index(KEYS), phase)
        keys = in_float32(k.load(wide))
        read_dots = gl.sum(read * keys, axis=1)
        end_dots = gl.sum(from_end * keys, axis=1)
        grad_k = from_end * _row(factors, KAPPA, wide) - read * _row(factors, READ, wide)
        products = gl.zeros([C, C], gl.float32, square)
        products = warpgroup_mma(k, k.permute((1, 0)), products, use_acc=False, is_async=True)
        grad_k = warpgroup_mma(system, k, grad_k, is_async=True)
        grad_k = warpgroup_mma(system.permute((1, 0)), k, grad_k, is_async=True)
        products = warpgroup_mma_wait(2, deps=(products,))
        vector: gl.constexpr = gl.SliceLayout(1, wide)
        system_dots = gl.convert_layout(gl.sum(rows * products, axis=1), vector)
        below = system.load(square)  # kept in registers it would make others spill
        below_dots = gl.convert_layout(gl.sum(in_float32(below) * products, axis=1), vector)
        mbarrier.wait(made.index(PAIRS), phase)
        mbarrier.wait(full.index(QUERIES), phase)
        grad_k = warpgroup_mma(pairs.permute((1, 0)), q, grad_k, is_async=True)
        k_norm = _numbers(factors, K_NORM, vector, 0, C)
        from_start = gl.exp(_numbers(factors, GATE_SUM, vector, 0, C)) * k_norm
        from_start = gl.where(_numbers(factors, START, vector, 0, C) < 0, from_start, 0.0)
        end_dots = end_dots * _numbers(factors, KAPPA, vector, 0, C)
        below_dots = below_dots - read_dots * _numbers(factors, READ, vector, 0, C)
        grad_k = warpgroup_mma_wait(0, deps=(grad_k,))
        release(empty.index(QUERIES))
        mbarrier.arrive(taken.index(PAIRS))
        keys = in_float32(k.load(wide))
        along = gl.sum(grad_k * keys, axis=1)
        if NORMALIZE:
            grad_k = grad_k - gl.expand_dims(along * k_norm * k_norm, 1) * keys
        mbarrier.wait(taken.index(GRAD_K), phase ^ 1)
        grad_k_tile.store(grad_k.to(dtype))
        fence_async_shared()
        release(made.index(GRAD_K))
        mbarrier.arrive(empty.index(KEYS))
        mbarrier.wait(taken.index(KEY_SUMS + (i & 1)), (i >> 1 & 1) ^ 1)
        place = SUMS * (i & 1)
        sums.index(FROM_KEY + place).store(2 * below_dots - along)
        sums.index(AT_END + place).store(end_dots)
        sums.index(FROM_SYSTEM + place).store(system_dots - read_dots * from_start)
        release(made.index(KEY_SUMS + (i & 1)))
        mbarrier.arrive(empty.index(NUMBERS + (i & 1)))


@gluon.jit
def _gates(
    i, all_factors, sums, all_state_dots, barriers, grad_g_ptr, grad_beta_ptr, first, num_tokens, H: gl.constexpr
):
    """dg and dbeta of the i-th chunk."""
    _, empty, made, taken = barriers
    C: gl.constexpr = sums.shape[1]
    K: gl.constexpr = all_state_dots.shape[1]
    square: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0])
    of_row: gl.constexpr = gl.SliceLayout(1, square)
    of_column: gl.constexpr = gl.SliceLayout(0, square)
    place = i & 1
    phase = i >> 1 & 1
    factors = all_factors.index(place)
    this = SUMS * place
    state_dots = all_state_dots.index(place)
    tokens_in = gl.arange(0, C, layout=of_column)
    later = gl.expand_dims(gl.arange(0, C, layout=of_row), 1) >= gl.expand_dims(tokens_in, 0)
    mbarrier.wait(made.index(QUERY_SUMS + place), phase)
    mbarrier.wait(made.index(KEY_SUMS + place), phase)
    grad_sum = sums.index(FROM_QUERY + this).load(of_row) + sums.index(FROM_KEY + this).load(of_row)
    at_end = state_dots.slice(0, C).load(of_row)
    for row in gl.static_range(C, K, C):
        at_end = at_end + state_dots.slice(row, C).load(of_row)
    at_end = at_end * _numbers(factors, DECAY, of_row, 0, C) + sums.index(AT_END + this).load(of_row)
    # Each gate is in the sums of its document's later tokens, and decays to the end what is before it.
    column = gl.expand_dims(tokens_in, 0).to(gl.float32)
    grad = gl.where(later & (column > _row(factors, START, square)), gl.expand_dims(grad_sum, 1), 0.0)
    last = _numbers(factors, START, of_column, C - 1, 1)
    grad = grad + gl.where(column > gl.expand_dims(last, 0), gl.expand_dims(at_end, 1), 0.0)
    grad_g = gl.sum(grad, axis=0)
    grad_beta = sums.index(FROM_VALUE + this).load(of_column) + sums.index(FROM_SYSTEM + this).load(of_column)
    token = (first + i) * C
    where = token.to(gl.int64) * H + tokens_in * H
    gl.store(grad_g_ptr + where, grad_g, mask=tokens_in < num_tokens - token)
    gl.store(grad_beta_ptr + where, grad_beta, mask=tokens_in < num_tokens - token)
    release(empty.index(NUMBERS + place))
    mbarrier.arrive(taken.index(QUERY_SUMS + place))
    mbarrier.arrive(taken.index(KEY_SUMS + place))


@gluon.jit
def _values(
    slots, all_factors, sums, state_dots, barriers, grad_v_ptr, grad_g_ptr, grad_beta_ptr, first, steps, num_tokens,
    H: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """dv of each chunk, and then the gates of the chunk before: the tiles must not wait for what those wait for.

    The pointers are at this head's first number.
    """
    full, empty = barriers[0], barriers[1]
    dtype: gl.constexpr = slots[0].dtype
    C: gl.constexpr = all_factors.shape[2]
    K: gl.constexpr = slots[-1].shape[2]
    PIECE: gl.constexpr = 32  # rows at a time, for the registers
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    piece_rows: gl.constexpr = gl.SliceLayout(1, tile)
    ts = gl.arange(0, PIECE, layout=piece_rows)
    vs = gl.arange(0, V, layout=gl.SliceLayout(0, tile))
    offset = gl.expand_dims(ts, 1) * (H * V) + gl.expand_dims(vs, 0)
    for i in range(0, steps):
        phase = i & 1
        _, solved, state, _, grad_state, v, _, _ = tiles_at(slots, unknown_zero(num_tokens, i))
        factors = all_factors.index(i & 1)
        dots = state_dots.index(i & 1)
        value_sums = sums.index(FROM_VALUE + SUMS * (i & 1))
        token = (first + i) * C
        mbarrier.wait(full.index(NUMBERS + (i & 1)), i >> 1 & 1)
        mbarrier.wait(full.index(SOLVED), phase)
        mbarrier.wait(full.index(VALUES), phase)
        for row in gl.static_range(0, C, PIECE):
            a = in_float32(solved.slice(row, PIECE).load(tile))
            x = in_float32(v.slice(row, PIECE).load(tile))
            value_sums.slice(row, PIECE).store(gl.sum(a * x, axis=1))
            grad_v = a * gl.expand_dims(_numbers(factors, BETA, piece_rows, row, PIECE), 1)
            start = (token + row).to(gl.int64) * (H * V)
            inside = gl.expand_dims(ts < num_tokens - token - row, 1)
            gl.store(grad_v_ptr + start + offset, grad_v.to(dtype), mask=inside & (gl.expand_dims(vs, 0) < V))
        release(empty.index(SOLVED))
        mbarrier.arrive(empty.index(VALUES))
        mbarrier.wait(full.index(STATE), phase)
        mbarrier.wait(full.index(GRAD_STATE), phase)
        for row in gl.static_range(0, K, PIECE):
            before = in_float32(state.slice(row, PIECE).load(tile))
            grad_after = in_float32(grad_state.slice(row, PIECE).load(tile))
            dots.slice(row, PIECE).store(gl.sum(before * grad_after, axis=1))
        release(empty.index(STATE))
        mbarrier.arrive(empty.index(GRAD_STATE))
        if i > 0:
            _gates(i - 1, all_factors, sums, state_dots, barriers, grad_g_ptr, grad_beta_ptr, first, num_tokens, H)
    _gates(steps - 1, all_factors, sums, state_dots, barriers, grad_g_ptr, grad_beta_ptr, first, num_tokens, H)


@gluon.jit
def _load(desc, row, column, slot, full, empty, tile, phase):
    mbarrier.wait(empty.index(tile), phase ^ 1)
    mbarrier.expect(full.index(tile), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [row, column], full.index(tile), slot)


@gluon.jit
def _fetch(descs, slots, all_factors, barriers, key_column, v_column, row, first, steps):
    """All loads, of each chunk in the order in which the places become free."""
    grad_o_desc, solved_desc, states_desc, v_new_desc, grad_states_desc, v_desc, factors_desc, k_desc, q_desc = descs
    grad_o, solved, state, v_new, grad_state, v, k, q = tiles_at(slots, 0)
    full, empty, _, _ = barriers
    C: gl.constexpr = k.shape[0]
    K: gl.constexpr = k.shape[1]
    for i in range(0, steps):
        phase = i & 1
        token = (first + i) * C
        chunk = row + first + i
        _load(grad_o_desc, token, v_column, grad_o, full, empty, GRAD_O, phase)
        _load(solved_desc, chunk * C, 0, solved, full, empty, SOLVED, phase)
        _load(v_new_desc, chunk * C, 0, v_new, full, empty, V_NEW, phase)
        _load(states_desc, chunk * K, 0, state, full, empty, STATE, phase)
        _load(grad_states_desc, chunk * K, 0, grad_state, full, empty, GRAD_STATE, phase)
        _load(v_desc, token, v_column, v, full, empty, VALUES, phase)
        numbers = all_factors.index(i & 1)
        _load(factors_desc, chunk * FACTORS, 0, numbers, full, empty, NUMBERS + (i & 1), i >> 1 & 1)
        _load(k_desc, token, key_column, k, full, empty, KEYS, phase)
        _load(q_desc, token, key_column, q, full, empty, QUERIES, phase)


@gluon.jit
def _write(grad_q_desc, grad_k_desc, grad_q_tiles, grad_k_tiles, barriers, key_column, first, steps):
    _, _, made, taken = barriers
    grad_q_tile, grad_k_tile = grad_q_tiles.index(0), grad_k_tiles.index(0)
    C: gl.constexpr = grad_k_tile.shape[0]
    for i in range(0, steps):
        phase = i & 1
        token = (first + i) * C
        mbarrier.wait(made.index(GRAD_Q), phase)
        tma.async_copy_shared_to_global(grad_q_desc, [token, key_column], grad_q_tile)
        mbarrier.wait(made.index(GRAD_K), phase)
        tma.async_copy_shared_to_global(grad_k_desc, [token, key_column], grad_k_tile)
        tma.store_wait(pendings=0)
        mbarrier.arrive(taken.index(GRAD_Q))
        mbarrier.arrive(taken.index(GRAD_K))


@gluon.jit(do_not_specialize=_LENGTHS)
def gradients_kernel(
    q_desc,
    k_desc,
    v_desc,
    grad_o_desc,
    v_new_desc,
    states_desc,
    solved_desc,
    grad_states_desc,
    factors_desc,
    grad_q_desc,
    grad_k_desc,
    grad_v_ptr,
    grad_g_ptr,
    grad_beta_ptr,
    scale,
    num_tokens,
    num_chunks,
    first_chunk,
    end_chunk,
    H: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    GROUP: gl.constexpr,
    NORMALIZE: gl.constexpr,
):
    """PG of the chunks first_chunk .. end_chunk - 1. Program = (GROUP chunks, head)."""
    dtype: gl.constexpr = k_desc.dtype
    pid = gl.program_id(0)
    head = pid % H
    first = first_chunk + (pid // H) * GROUP
    steps = gl.minimum(end_chunk - first, GROUP)
    slots = (
        gl.allocate_shared_memory(dtype, [1, C, V], grad_o_desc.layout),
        gl.allocate_shared_memory(dtype, [1, C, V], solved_desc.layout),
        gl.allocate_shared_memory(dtype, [1, K, V], states_desc.layout),
        gl.allocate_shared_memory(dtype, [1, C, V], v_new_desc.layout),
        gl.allocate_shared_memory(dtype, [1, K, V], grad_states_desc.layout),
        gl.allocate_shared_memory(dtype, [1, C, V], v_desc.layout),
        gl.allocate_shared_memory(dtype, [1, C, K], k_desc.layout),
        gl.allocate_shared_memory(dtype, [1, C, K], q_desc.layout),
    )
    factors = gl.allocate_shared_memory(gl.float32, [2, factors_desc.block_type.shape[0], C], factors_desc.layout)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    pairs = gl.allocate_shared_memory(dtype, [1, C, C], square)
    system = gl.allocate_shared_memory(dtype, [1, C, C], square)
    grad_q_tile = gl.allocate_shared_memory(dtype, [1, C, K], grad_q_desc.layout)
    grad_k_tile = gl.allocate_shared_memory(dtype, [1, C, K], grad_k_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    sums = gl.allocate_shared_memory(gl.float32, [2 * SUMS, C], plain)
    state_dots = gl.allocate_shared_memory(gl.float32, [2, K], plain)

    full = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [7, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [7, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(10):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS[i])
    for i in gl.static_range(7):
        mbarrier.init(made.index(i), count=1)
        mbarrier.init(taken.index(i), count=2 if i == 0 else 1)  # PAIRS is read twice
    fence_async_shared()
    barriers = (full, empty, made, taken)
    descs = (grad_o_desc, solved_desc, states_desc, v_new_desc, grad_states_desc, v_desc, factors_desc, k_desc, q_desc)
    key_column, v_column = head * K, head * V
    gl.warp_specialize(
        [
            (_keys, (slots, factors, pairs, system, grad_k_tile, sums, barriers, num_tokens, steps, NORMALIZE)),
            (_queries, (slots, factors, pairs, grad_q_tile, sums, barriers, scale, num_tokens, steps, NORMALIZE)),
            (
                _values,
                (
                    slots,
                    factors,
                    sums,
                    state_dots,
                    barriers,
                    grad_v_ptr + v_column,
                    grad_g_ptr + head,
                    grad_beta_ptr + head,
                    first,
                    steps,
                    num_tokens,
                    H,
                    V,
                ),
            ),
            (_fetch, (descs, slots, factors, barriers, key_column, v_column, head * num_chunks, first, steps)),
            (_write, (grad_q_desc, grad_k_desc, grad_q_tile, grad_k_tile, barriers, key_column, first, steps)),
        ],
        [4, 4, 1, 1],
        [168, 104, 24, 24],
    )
