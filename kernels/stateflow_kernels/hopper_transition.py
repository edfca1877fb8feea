"""ST and STB for Hopper: the same walks as `transition`'s, with each step's instructions in an order of our own.

A walk is bound by the latency of a step, not by its work: per step Triton's form issues hundreds of instructions that
wait for one another, with one warp a scheduler and nothing else to run. Here the copy engine fetches tiles and writes
results (one instruction a tile), factors of the tokens are loaded a step ahead, and what does not lie on the chain of
dependent products is done while a product runs. The state's 16-bit copy in shared memory is at once the operand of
the next product and what is written to `states`.

Same formulas, operands and roundings as `transition`, products in the same order; needs B = 1, a solve, 16-bit inputs,
K and V multiples of 64 and at most 256, and a Triton with Gluon for Hopper.
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

_LENGTHS = ["num_chunks", "first_chunk", "end_chunk"]


@gluon.jit
def _fetch(k_desc, v_desc, solve_desc, n, key_column, v_column, row, k_slot, v_slot, solve_slot, ready, pred):
    C: gl.constexpr = solve_desc.block_type.shape[0]
    size: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes + solve_desc.block_type.nbytes
    mbarrier.expect(ready, size, pred=pred)
    tma.async_copy_global_to_shared(k_desc, [n * C, key_column], ready, k_slot, pred=pred)
    tma.async_copy_global_to_shared(v_desc, [n * C, v_column], ready, v_slot, pred=pred)
    tma.async_copy_global_to_shared(solve_desc, [(row + n) * C, 0], ready, solve_slot, pred=pred)


@gluon.jit(do_not_specialize=_LENGTHS)
def transition_kernel(
    k_desc,
    v_desc,
    solve_desc,
    states_desc,
    v_new_desc,
    k_scale_ptr,
    v_scale_ptr,
    r_scale_ptr,
    decay_ptr,
    state_in_ptr,
    state_out_ptr,
    num_chunks,
    first_chunk,
    end_chunk,
    H: gl.constexpr,
    HK: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """ST over the chunks first_chunk .. end_chunk - 1. Program = (head, block of BV columns)."""
    dtype: gl.constexpr = k_desc.dtype
    pid = gl.program_id(0)
    column = (pid % (V // BV)) * BV
    head = pid // (V // BV)
    key_column = (head // (H // HK)) * K
    v_column = head * V + column
    row = head * num_chunks

    acc: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BV, 16])
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, acc))
    ks = gl.arange(0, K, layout=gl.SliceLayout(1, acc))
    vs = column + gl.arange(0, BV, layout=gl.SliceLayout(0, acc))
    state_offset = head.to(gl.int64) * (K * V) + ks[:, None] * V + vs[None, :]

    k_slots = gl.allocate_shared_memory(dtype, [STAGES, C, K], k_desc.layout)
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, C, BV], v_desc.layout)
    solve_slots = gl.allocate_shared_memory(dtype, [STAGES, C, C], solve_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    state_tiles = gl.allocate_shared_memory(dtype, [2, K, BV], states_desc.layout)
    v_new_tiles = gl.allocate_shared_memory(dtype, [2, C, BV], v_new_desc.layout)
    right = gl.allocate_shared_memory(dtype, [C, BV], v_new_desc.layout)
    update = gl.allocate_shared_memory(dtype, [C, BV], v_new_desc.layout)
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        n = first_chunk + s
        _fetch(
            *(k_desc, v_desc, solve_desc, n, key_column, v_column, row),
            *(k_slots.index(s), v_slots.index(s), solve_slots.index(s), ready.index(s), n < end_chunk),
        )

    state = gl.load(state_in_ptr + state_offset)
    state_tiles.index(0).store(state.to(dtype))
    fence_async_shared()
    token = (row + first_chunk).to(gl.int64) * C + ts
    k_scale = gl.load(k_scale_ptr + token)
    v_scale = gl.load(v_scale_ptr + token)
    r_scale = gl.load(r_scale_ptr + token)
    decay = gl.load(decay_ptr + row + first_chunk)

    for n in range(first_chunk, end_chunk):
        i = n - first_chunk
        slot = i % STAGES
        k = k_slots.index(slot)
        state_tile = state_tiles.index(i % 2)
        v_new_tile = v_new_tiles.index(i % 2)
        # Of the next step, so that nothing waits for it.
        following = gl.minimum(n + 1, end_chunk - 1)
        token = (row + following).to(gl.int64) * C + ts
        next_k_scale = gl.load(k_scale_ptr + token)
        next_v_scale = gl.load(v_scale_ptr + token)
        next_r_scale = gl.load(r_scale_ptr + token)
        next_decay = gl.load(decay_ptr + row + following)

        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        read = warpgroup_mma(k, state_tile, gl.zeros([C, BV], gl.float32, acc), use_acc=False, is_async=True)
        tma.async_copy_shared_to_global(states_desc, [(row + n) * K, column], state_tile)
        v = v_slots.index(slot).load(acc).to(gl.float32) * v_scale[:, None]
        state = state * decay
        read = warpgroup_mma_wait(0, deps=(read,))
        right.store((v - read * r_scale[:, None]).to(dtype))
        fence_async_shared()
        v_new = warpgroup_mma(
            solve_slots.index(slot), right, gl.zeros([C, BV], gl.float32, acc), use_acc=False, is_async=True
        )
        # The results of the step before the last are written: their tiles are free.
        tma.store_wait(pendings=2)
        v_new = warpgroup_mma_wait(0, deps=(v_new,))
        update.store((v_new * k_scale[:, None]).to(dtype))
        v_new_tile.store(v_new.to(dtype))
        fence_async_shared()
        state = warpgroup_mma(k.permute((1, 0)), update, state, is_async=True)
        tma.async_copy_shared_to_global(v_new_desc, [(row + n) * C, column], v_new_tile)
        k_scale, v_scale, r_scale, decay = next_k_scale, next_v_scale, next_r_scale, next_decay
        state = warpgroup_mma_wait(0, deps=(state,))
        state_tiles.index((i + 1) % 2).store(state.to(dtype))
        fence_async_shared()
        # All warps are past the products that read this slot.
        gl.thread_barrier()
        _fetch(
            *(k_desc, v_desc, solve_desc, n + STAGES, key_column, v_column, row),
            *(k, v_slots.index(slot), solve_slots.index(slot), ready.index(slot), n + STAGES < end_chunk),
        )

    gl.store(state_out_ptr + state_offset, state)
    tma.store_wait(pendings=0)


@gluon.jit
def _fetch_back(
    q_desc, k_desc, solve_desc, grad_y_desc, tile_desc, n, key_column, v_column, column, row,
    q_slot, k_slot, solve_slot, grad_y_slot, tile_slot, ready, pred,
):  # fmt: skip
    C: gl.constexpr = solve_desc.block_type.shape[0]
    size: gl.constexpr = (
        2 * k_desc.block_type.nbytes + solve_desc.block_type.nbytes + 2 * grad_y_desc.block_type.nbytes
    )
    mbarrier.expect(ready, size, pred=pred)
    tma.async_copy_global_to_shared(k_desc, [n * C, key_column], ready, k_slot, pred=pred)
    tma.async_copy_global_to_shared(tile_desc, [(row + n) * C, column], ready, tile_slot, pred=pred)
    tma.async_copy_global_to_shared(grad_y_desc, [n * C, v_column], ready, grad_y_slot, pred=pred)
    tma.async_copy_global_to_shared(q_desc, [n * C, key_column], ready, q_slot, pred=pred)
    tma.async_copy_global_to_shared(solve_desc, [(row + n) * C, 0], ready, solve_slot, pred=pred)


@gluon.jit(do_not_specialize=_LENGTHS)
def transition_backward_kernel(
    q_desc,
    k_desc,
    solve_desc,
    grad_y_desc,
    tile_desc,
    grad_states_desc,
    q_scale_ptr,
    k_scale_ptr,
    r_scale_ptr,
    decay_ptr,
    grad_state_in_ptr,
    grad_state_out_ptr,
    num_chunks,
    first_chunk,
    end_chunk,
    H: gl.constexpr,
    HK: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """STB over the chunks end_chunk - 1 .. first_chunk; the tiles hold P^T dY and receive a."""
    dtype: gl.constexpr = k_desc.dtype
    pid = gl.program_id(0)
    column = (pid % (V // BV)) * BV
    head = pid // (V // BV)
    key_column = (head // (H // HK)) * K
    v_column = head * V + column
    row = head * num_chunks

    acc: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BV, 16])
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, acc))
    ks = gl.arange(0, K, layout=gl.SliceLayout(1, acc))
    vs = column + gl.arange(0, BV, layout=gl.SliceLayout(0, acc))
    state_offset = head.to(gl.int64) * (K * V) + ks[:, None] * V + vs[None, :]

    q_slots = gl.allocate_shared_memory(dtype, [STAGES, C, K], q_desc.layout)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, C, K], k_desc.layout)
    solve_slots = gl.allocate_shared_memory(dtype, [STAGES, C, C], solve_desc.layout)
    grad_y_slots = gl.allocate_shared_memory(dtype, [STAGES, C, BV], grad_y_desc.layout)
    tile_slots = gl.allocate_shared_memory(dtype, [STAGES, C, BV], tile_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    state_tiles = gl.allocate_shared_memory(dtype, [2, K, BV], grad_states_desc.layout)
    solved_tiles = gl.allocate_shared_memory(dtype, [2, C, BV], tile_desc.layout)
    scaled_y = gl.allocate_shared_memory(dtype, [C, BV], tile_desc.layout)
    grad_v_new_tile = gl.allocate_shared_memory(dtype, [C, BV], tile_desc.layout)
    update = gl.allocate_shared_memory(dtype, [C, BV], tile_desc.layout)
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        n = end_chunk - 1 - s
        _fetch_back(
            *(q_desc, k_desc, solve_desc, grad_y_desc, tile_desc, n, key_column, v_column, column, row),
            *(q_slots.index(s), k_slots.index(s), solve_slots.index(s), grad_y_slots.index(s), tile_slots.index(s)),
            *(ready.index(s), n >= first_chunk),
        )

    grad_state = gl.load(grad_state_in_ptr + state_offset)
    state_tiles.index(0).store(grad_state.to(dtype))
    token = (row + end_chunk - 1).to(gl.int64) * C + ts
    q_scale = gl.load(q_scale_ptr + token)
    k_scale = gl.load(k_scale_ptr + token)
    r_scale = gl.load(r_scale_ptr + token)
    decay = gl.load(decay_ptr + row + end_chunk - 1)

    for i in range(0, end_chunk - first_chunk):
        n = end_chunk - 1 - i
        slot = i % STAGES
        q = q_slots.index(slot)
        k = k_slots.index(slot)
        state_tile = state_tiles.index(i % 2)
        solved_tile = solved_tiles.index(i % 2)
        # Of the next step, so that nothing waits for it.
        following = gl.maximum(n - 1, first_chunk)
        token = (row + following).to(gl.int64) * C + ts
        next_q_scale = gl.load(q_scale_ptr + token)
        next_k_scale = gl.load(k_scale_ptr + token)
        next_r_scale = gl.load(r_scale_ptr + token)
        next_decay = gl.load(decay_ptr + row + following)

        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        grad_y = grad_y_slots.index(slot).load(acc).to(gl.float32) * q_scale[:, None]
        scaled_y.store(grad_y.to(dtype))
        fence_async_shared()
        from_state = warpgroup_mma(k, state_tile, gl.zeros([C, BV], gl.float32, acc), use_acc=False, is_async=True)
        grad_state = warpgroup_mma(q.permute((1, 0)), scaled_y, grad_state * decay, is_async=True)
        tma.async_copy_shared_to_global(grad_states_desc, [(row + n) * K, column], state_tile)
        from_output = tile_slots.index(slot).load(acc).to(gl.float32)
        from_state = warpgroup_mma_wait(1, deps=(from_state,))
        grad_v_new_tile.store((from_output + from_state * k_scale[:, None]).to(dtype))
        fence_async_shared()
        solved = warpgroup_mma(
            solve_slots.index(slot).permute((1, 0)),
            *(grad_v_new_tile, gl.zeros([C, BV], gl.float32, acc)),
            use_acc=False,
            is_async=True,
        )
        # The results of the step before the last are written: their tiles are free.
        tma.store_wait(pendings=2)
        solved, grad_state = warpgroup_mma_wait(0, deps=(solved, grad_state))
        update.store((solved * -r_scale[:, None]).to(dtype))
        solved_tile.store(solved.to(dtype))
        fence_async_shared()
        grad_state = warpgroup_mma(k.permute((1, 0)), update, grad_state, is_async=True)
        tma.async_copy_shared_to_global(tile_desc, [(row + n) * C, column], solved_tile)
        q_scale, k_scale, r_scale, decay = next_q_scale, next_k_scale, next_r_scale, next_decay
        grad_state = warpgroup_mma_wait(0, deps=(grad_state,))
        state_tiles.index((i + 1) % 2).store(grad_state.to(dtype))
        fence_async_shared()
        # All warps are past the products that read this slot.
        gl.thread_barrier()
        _fetch_back(
            *(q_desc, k_desc, solve_desc, grad_y_desc, tile_desc, n - STAGES, key_column, v_column, column, row),
            *(q, k, solve_slots.index(slot), grad_y_slots.index(slot), tile_slots.index(slot)),
            *(ready.index(slot), n - STAGES >= first_chunk),
        )

    gl.store(grad_state_out_ptr + state_offset, grad_state)
    tma.store_wait(pendings=0)
