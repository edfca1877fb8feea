"""ST and STB for Hopper: `transition`'s walks, written for the latency of a step, in Gluon.

A walk is bound by the latency of its steps, not by their work: a chain of products with a conversion, a fence and a
barrier between each two. In Triton's form the warps that compute also start the copies, and, by the times of variants,
wait for them at their fences. So here one warp has the copy engine fetch the tiles, the factors of the tokens
among them, another has it write the results, and the four warps that compute only compute. The state's 16-bit copy in
shared memory is at once the operand of the next product and what is written to `states`. STB takes P^T dY itself, from
the scores that Pre left: it need not wait for a kernel that has it, and runs beside the replay of ST.

Formulas, operands, roundings and the order of products are those of `transition` and, for P^T dY, of
`gated_delta_backward.out_backward_kernel`: the results have the same bits. For B = 1, a
solve, a scalar decay, 16-bit inputs, K a multiple of 64 and V a multiple of BV (where it runs: `hopper.K_DIMS`).

`factors` [FACTORS H N, C] float32, see `decays`: ST fetches the first four rows of a chunk as one tile, STB four from
the second on.
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
from .hopper_common import unknown_zero

_LENGTHS = ["num_chunks", "first_chunk", "end_chunk", "num_segments"]


@gluon.jit
def _program(num_segments, BLOCKS: gl.constexpr):
    """Which block of columns, segment and head."""
    pid = gl.program_id(0)
    rest = pid // BLOCKS
    return pid % BLOCKS, rest % num_segments, rest // num_segments


@gluon.jit
def _segment_chunks(segment, num_segments, first_chunk, end_chunk):
    """The segment's chunks, from the first up to the end."""
    chunks = end_chunk - first_chunk
    return first_chunk + segment * chunks // num_segments, first_chunk + (segment + 1) * chunks // num_segments


@gluon.constexpr_function
def _products_layout(block_v: int, num_warps: int):
    """Of what products of all warps add up to: four have 64 rows, and each four more the next columns."""
    columns = 4 * block_v // num_warps
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, num_warps // 4], instr_shape=[16, columns, 16])


@gluon.jit
def _barriers(count: gl.constexpr):
    """That many barriers, of one arrival each."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def _factor(factors, j: gl.constexpr, layout: gl.constexpr):
    """[C, 1], the j-th factor of the tokens. As one dimension: the tile's rows follow one another."""
    C: gl.constexpr = factors.shape[1]
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    row = factors._reinterpret(gl.float32, [factors.shape[0] * C], plain).slice(j * C, C)
    return gl.expand_dims(row.load(gl.SliceLayout(1, layout)), 1)


@gluon.jit
def _decay(factors, j: gl.constexpr, layout: gl.constexpr):
    return factors.slice(j, 1).slice(0, 1, dim=1).load(layout)


@gluon.jit
def _write(states_desc, rows_desc, tiles, row, column, first, steps, STEP: gl.constexpr):
    """Writes the state [K, BV] and the rows [C, BV] of each step, of the chunks first, first + STEP, ..."""
    states, rows, states_full, rows_full, free = tiles
    K: gl.constexpr = states_desc.block_type.shape[0]
    C: gl.constexpr = rows_desc.block_type.shape[0]
    TILES: gl.constexpr = states.shape[0]
    for i in range(0, steps):
        n = row + first + i * STEP
        tile = i % TILES
        phase = (i // TILES) & 1
        mbarrier.wait(states_full.index(tile), phase)
        tma.async_copy_shared_to_global(states_desc, [n * K, column], states.index(tile))
        mbarrier.wait(rows_full.index(tile), phase)
        tma.async_copy_shared_to_global(rows_desc, [n * C, column], rows.index(tile))
        tma.store_wait(pendings=0)
        mbarrier.arrive(free.index(tile))


@gluon.jit
def _fetch(descs, columns, slots, ready, empty, row, first_chunk, end_chunk):
    """ST's loads, of k, v, T and the factors: each into its slot as soon as the step that read it last is over."""
    k_desc, v_desc, solve_desc, factors_desc = descs
    k_slots, v_slots, solve_slots, factors_slots = slots
    key_column, v_column = columns
    C: gl.constexpr = solve_desc.block_type.shape[0]
    STAGES: gl.constexpr = k_slots.shape[0]
    wide: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
    size: gl.constexpr = wide + solve_desc.block_type.nbytes + factors_desc.block_type.nbytes
    for n in range(first_chunk, end_chunk):
        i = n - first_chunk
        slot = i % STAGES
        bar = ready.index(slot)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, size)
        tma.async_copy_global_to_shared(k_desc, [n * C, key_column], bar, k_slots.index(slot))
        tma.async_copy_global_to_shared(v_desc, [n * C, v_column], bar, v_slots.index(slot))
        tma.async_copy_global_to_shared(factors_desc, [(row + n) * FACTORS, 0], bar, factors_slots.index(slot))
        tma.async_copy_global_to_shared(solve_desc, [(row + n) * C, 0], bar, solve_slots.index(slot))


@gluon.jit
def _give_back(empty, i):
    """In the i-th step that of the one before."""
    if i > 0:
        mbarrier.arrive(empty)


@gluon.jit
def _next_ready(ready, i, steps, following: gl.constexpr):
    """Waits for what the step after the i-th one reads."""
    STAGES: gl.constexpr = ready.shape[0]
    if i + 1 < steps:
        mbarrier.wait(ready.index(following), ((i + 1) // STAGES) & 1)


@gluon.jit
def _walk(state, state_out, is_last, slots, states, rows, operand, barriers, steps, KEEP: gl.constexpr):
    """ST's chain of products. What does not lie on it is done while a product runs.

    KEEP: others read the states and Vn of each step, too; else only the last state counts.
    """
    k_slots, v_slots, solve_slots, factors_slots = slots
    ready, empty, states_full, rows_full, free = barriers
    dtype: gl.constexpr = k_slots.dtype
    STAGES: gl.constexpr = k_slots.shape[0]
    TILES: gl.constexpr = states.shape[0]
    # With two stages a step waits for its copies, so first of all its slot is given back to them; with more they have
    # come when the step before ends, and what has to do with them is done while a product runs.
    AHEAD: gl.constexpr = STAGES > 2
    acc: gl.constexpr = state.type.layout
    C: gl.constexpr = solve_slots.shape[1]
    BV: gl.constexpr = state.shape[1]
    zeros = gl.zeros([C, BV], gl.float32, acc)
    states.index(0).store(state.to(dtype))
    if AHEAD:
        _next_ready(ready, -1, steps, 0)
    for first in range(0, steps, STAGES):
        for slot in gl.static_range(STAGES):
            if first + slot < steps:
                tile: gl.constexpr = slot % TILES
                following: gl.constexpr = (slot + 1) % TILES
                zero = unknown_zero(steps, first + slot)
                k = k_slots.index(slot + zero)
                this_state, next_state = states.index(tile + zero), states.index(following + zero)
                rounded = operand.index(zero)
                factors = factors_slots.index(slot)
                fence_async_shared()
                if not AHEAD:
                    mbarrier.wait(ready.index(slot), (first // STAGES) & 1)
                read = warpgroup_mma(k, this_state, zeros, use_acc=False, is_async=True)
                if KEEP:
                    mbarrier.arrive(states_full.index(tile))
                if AHEAD:
                    _give_back(empty.index((slot + STAGES - 1) % STAGES), first + slot)
                v = v_slots.index(slot).load(acc).to(gl.float32) * _factor(factors, 0, acc)
                k_scale = _factor(factors, 1, acc)
                r_scale = _factor(factors, 2, acc)
                state = state * _decay(factors, 3, acc)
                read = warpgroup_mma_wait(0, deps=(read,))
                rounded.store((v - read * r_scale).to(dtype))
                fence_async_shared()
                v_new = warpgroup_mma(solve_slots.index(slot + zero), rounded, zeros, use_acc=False, is_async=True)
                v_new = warpgroup_mma_wait(0, deps=(v_new,))
                rounded.store((v_new * k_scale).to(dtype))
                fence_async_shared()
                state = warpgroup_mma(k.permute((1, 0)), rounded, state, is_async=True)
                if KEEP:
                    rows.index(tile).store(v_new.to(dtype))
                    fence_async_shared()
                    mbarrier.arrive(rows_full.index(tile))
                    mbarrier.wait(free.index(following), (((first + slot + 1) // TILES) & 1) ^ 1)
                if AHEAD:
                    _next_ready(ready, first + slot, steps, (slot + 1) % STAGES)
                state = warpgroup_mma_wait(0, deps=(state,))
                next_state.store(state.to(dtype))
                if not AHEAD:
                    mbarrier.arrive(empty.index(slot))
    if is_last:
        gl.store(state_out, state)


@gluon.jit(do_not_specialize=_LENGTHS)
def transition_kernel(
    k_desc,
    v_desc,
    solve_desc,
    states_desc,
    v_new_desc,
    factors_desc,
    state_in_ptr,
    state_out_ptr,
    num_chunks,
    first_chunk,
    end_chunk,
    num_segments,
    H: gl.constexpr,
    HK: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
):
    """ST over the chunks first_chunk .. end_chunk - 1. Program = (head, segment, block of BV columns)."""
    dtype: gl.constexpr = k_desc.dtype
    TILES: gl.constexpr = 3 if STAGES % 2 else 2  # of results; divides STAGES
    block, segment, head = _program(num_segments, V // BV)
    first, end = _segment_chunks(segment, num_segments, first_chunk, end_chunk)
    column = block * BV
    row = head * num_chunks

    acc: gl.constexpr = _products_layout(BV, gl.num_warps())
    ks = gl.arange(0, K, layout=gl.SliceLayout(1, acc))
    vs = column + gl.arange(0, BV, layout=gl.SliceLayout(0, acc))
    state_offset = ks[:, None] * V + vs[None, :]
    slots = (
        gl.allocate_shared_memory(dtype, [STAGES, C, K], k_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, BV], v_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, C], solve_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 4, C], factors_desc.layout),
    )
    states = gl.allocate_shared_memory(dtype, [TILES, K, BV], states_desc.layout)
    rows = gl.allocate_shared_memory(dtype, [TILES, C, BV], v_new_desc.layout)
    operand = gl.allocate_shared_memory(dtype, [1, C, BV], v_new_desc.layout)
    ready, empty = _barriers(STAGES), _barriers(STAGES)
    states_full, rows_full, free = _barriers(TILES), _barriers(TILES), _barriers(TILES)
    barriers = (ready, empty, states_full, rows_full, free)
    fence_async_shared()
    state = gl.load(state_in_ptr + (head * num_segments + segment).to(gl.int64) * (K * V) + state_offset)
    state_out = state_out_ptr + head.to(gl.int64) * (K * V) + state_offset
    is_last = segment == num_segments - 1
    descs = (k_desc, v_desc, solve_desc, factors_desc)
    columns = ((head // (H // HK)) * K, head * V + column)
    steps = end - first
    tiles = (states, rows, states_full, rows_full, free)
    gl.warp_specialize(
        [
            (_walk, (state, state_out, is_last, slots, states, rows, operand, barriers, steps, True)),
            (_fetch, (descs, columns, slots, ready, empty, row, first, end)),
            (_write, (states_desc, v_new_desc, tiles, row, column, first, steps, 1)),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit
def _fetch_back(descs, columns, slots, ready, empty, row, first_chunk, end_chunk):
    """STB's loads, of q, k, T, dY, P and the factors."""
    q_desc, k_desc, solve_desc, grad_y_desc, scores_desc, factors_desc = descs
    q_slots, k_slots, solve_slots, grad_y_slots, scores_slots, factors_slots = slots
    key_column, v_column = columns
    C: gl.constexpr = solve_desc.block_type.shape[0]
    STAGES: gl.constexpr = k_slots.shape[0]
    wide: gl.constexpr = 2 * k_desc.block_type.nbytes + grad_y_desc.block_type.nbytes
    size: gl.constexpr = wide + 2 * solve_desc.block_type.nbytes + factors_desc.block_type.nbytes
    for i in range(0, end_chunk - first_chunk):
        n = end_chunk - 1 - i
        slot = i % STAGES
        bar = ready.index(slot)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, size)
        tma.async_copy_global_to_shared(k_desc, [n * C, key_column], bar, k_slots.index(slot))
        tma.async_copy_global_to_shared(factors_desc, [(row + n) * FACTORS + 1, 0], bar, factors_slots.index(slot))
        tma.async_copy_global_to_shared(grad_y_desc, [n * C, v_column], bar, grad_y_slots.index(slot))
        tma.async_copy_global_to_shared(scores_desc, [(row + n) * C, 0], bar, scores_slots.index(slot))
        tma.async_copy_global_to_shared(q_desc, [n * C, key_column], bar, q_slots.index(slot))
        tma.async_copy_global_to_shared(solve_desc, [(row + n) * C, 0], bar, solve_slots.index(slot))


@gluon.jit
def _walk_back(state, state_out, is_last, slots, states, rows, scaled_y, operand, barriers, steps, KEEP: gl.constexpr):
    """STB's chain of products; `state` is E."""
    q_slots, k_slots, solve_slots, grad_y_slots, scores_slots, factors_slots = slots
    ready, empty, states_full, rows_full, free = barriers
    dtype: gl.constexpr = k_slots.dtype
    STAGES: gl.constexpr = k_slots.shape[0]
    TILES: gl.constexpr = states.shape[0]
    # With two stages a step waits for its copies, so first of all its slot is given back to them; with more they have
    # come when the step before ends, and what has to do with them is done while a product runs.
    AHEAD: gl.constexpr = STAGES > 2
    acc: gl.constexpr = state.type.layout
    C: gl.constexpr = solve_slots.shape[1]
    BV: gl.constexpr = state.shape[1]
    zeros = gl.zeros([C, BV], gl.float32, acc)
    states.index(0).store(state.to(dtype))
    if AHEAD:
        _next_ready(ready, -1, steps, 0)
    for first in range(0, steps, STAGES):
        for slot in gl.static_range(STAGES):
            if first + slot < steps:
                tile: gl.constexpr = slot % TILES
                following: gl.constexpr = (slot + 1) % TILES
                zero = unknown_zero(steps, first + slot)
                q, k = q_slots.index(slot + zero), k_slots.index(slot + zero)
                grad_output = grad_y_slots.index(slot + zero)
                this_state, next_state = states.index(tile + zero), states.index(following + zero)
                rounded, rounded_y = operand.index(zero), scaled_y.index(zero)
                factors = factors_slots.index(slot)
                solve = solve_slots.index(slot + zero).permute((1, 0))
                scores = scores_slots.index(slot + zero).permute((1, 0))
                fence_async_shared()
                if not AHEAD:
                    mbarrier.wait(ready.index(slot), (first // STAGES) & 1)
                from_state = warpgroup_mma(k, this_state, zeros, use_acc=False, is_async=True)
                from_output = warpgroup_mma(scores, grad_output, zeros, use_acc=False, is_async=True)
                if KEEP:
                    mbarrier.arrive(states_full.index(tile))
                if AHEAD:
                    _give_back(empty.index((slot + STAGES - 1) % STAGES), first + slot)
                grad_y = grad_output.load(acc).to(gl.float32) * _factor(factors, 3, acc)
                rounded_y.store(grad_y.to(dtype))
                fence_async_shared()
                state = state * _decay(factors, 2, acc)
                state = warpgroup_mma(q.permute((1, 0)), rounded_y, state, is_async=True)
                k_scale = _factor(factors, 0, acc)
                r_scale = _factor(factors, 1, acc)
                from_output, from_state = warpgroup_mma_wait(1, deps=(from_output, from_state))
                from_output = from_output.to(dtype).to(gl.float32)  # as OG leaves it where it is a kernel
                rounded.store((from_output + from_state * k_scale).to(dtype))
                fence_async_shared()
                solved = warpgroup_mma(solve, rounded, zeros, use_acc=False, is_async=True)
                solved, state = warpgroup_mma_wait(0, deps=(solved, state))
                rounded.store((solved * -r_scale).to(dtype))
                fence_async_shared()
                state = warpgroup_mma(k.permute((1, 0)), rounded, state, is_async=True)
                if KEEP:
                    rows.index(tile).store(solved.to(dtype))
                    fence_async_shared()
                    mbarrier.arrive(rows_full.index(tile))
                    mbarrier.wait(free.index(following), (((first + slot + 1) // TILES) & 1) ^ 1)
                if AHEAD:
                    _next_ready(ready, first + slot, steps, (slot + 1) % STAGES)
                state = warpgroup_mma_wait(0, deps=(state,))
                next_state.store(state.to(dtype))
                if not AHEAD:
                    mbarrier.arrive(empty.index(slot))
    if is_last:
        gl.store(state_out, state)


@gluon.jit(do_not_specialize=_LENGTHS)
def transition_backward_kernel(
    q_desc,
    k_desc,
    solve_desc,
    grad_y_desc,
    scores_desc,
    solved_desc,
    grad_states_desc,
    factors_desc,
    grad_state_in_ptr,
    grad_state_out_ptr,
    num_chunks,
    first_chunk,
    end_chunk,
    num_segments,
    H: gl.constexpr,
    HK: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
):
    """STB over the chunks end_chunk - 1 .. first_chunk."""
    dtype: gl.constexpr = k_desc.dtype
    TILES: gl.constexpr = 3 if STAGES % 2 else 2  # of results; divides STAGES
    block, segment, head = _program(num_segments, V // BV)
    first, end = _segment_chunks(segment, num_segments, first_chunk, end_chunk)
    column = block * BV
    row = head * num_chunks

    acc: gl.constexpr = _products_layout(BV, gl.num_warps())
    ks = gl.arange(0, K, layout=gl.SliceLayout(1, acc))
    vs = column + gl.arange(0, BV, layout=gl.SliceLayout(0, acc))
    state_offset = ks[:, None] * V + vs[None, :]
    slots = (
        gl.allocate_shared_memory(dtype, [STAGES, C, K], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, K], k_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, C], solve_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, BV], grad_y_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, C], scores_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 4, C], factors_desc.layout),
    )
    states = gl.allocate_shared_memory(dtype, [TILES, K, BV], grad_states_desc.layout)
    rows = gl.allocate_shared_memory(dtype, [TILES, C, BV], solved_desc.layout)
    scaled_y = gl.allocate_shared_memory(dtype, [1, C, BV], solved_desc.layout)
    operand = gl.allocate_shared_memory(dtype, [1, C, BV], solved_desc.layout)
    ready, empty = _barriers(STAGES), _barriers(STAGES)
    states_full, rows_full, free = _barriers(TILES), _barriers(TILES), _barriers(TILES)
    barriers = (ready, empty, states_full, rows_full, free)
    fence_async_shared()
    state = gl.load(grad_state_in_ptr + (head * num_segments + segment).to(gl.int64) * (K * V) + state_offset)
    descs = (q_desc, k_desc, solve_desc, grad_y_desc, scores_desc, factors_desc)
    columns = ((head // (H // HK)) * K, head * V + column)
    steps = end - first
    tiles = (states, rows, states_full, rows_full, free)
    state_out = grad_state_out_ptr + head.to(gl.int64) * (K * V) + state_offset
    is_last = segment == 0
    gl.warp_specialize(
        [
            (_walk_back, (state, state_out, is_last, slots, states, rows, scaled_y, operand, barriers, steps, True)),
            (_fetch_back, (descs, columns, slots, ready, empty, row, first, end)),
            (_write, (grad_states_desc, solved_desc, tiles, row, column, end - 1, steps, -1)),
        ],
        [1, 1],
        [24, 24],
    )
