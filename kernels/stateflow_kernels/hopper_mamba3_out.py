"""Mamba-3's Out for Hopper, in Gluon, which makes q and k itself.

Read from memory, rows of q and k would be more than half of what Out and Local move in the forward. B and C are shared
by the heads: a program takes a few heads of one chunk and keeps them in registers, see `hopper_mamba3_tiles`. q, k and
the scores go through shared memory, as operands of products only.

In the notation of `mamba3`, with its layouts. For what `hopper_mamba3_local` is for.
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

from .hopper_mamba3_tiles import (
    barriers,
    bias_numbers,
    biases,
    fetch,
    groups,
    keep,
    numbers,
    place,
    power_of_two,
    rotation,
    sigmoid,
    starts,
    turned,
    two_tiles,
)

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk"]


@gluon.jit(do_not_specialize=_LENGTHS)
def out_kernel(
    x_desc,
    z_desc,
    states_desc,
    y_desc,
    B_ptr,
    C_ptr,
    B_norm_ptr,
    C_norm_ptr,
    B_bias_ptr,
    C_bias_ptr,
    D_ptr,
    doc_start_ptr,
    B_factor_ptr,
    C_factor_ptr,
    speed_ptr,
    dt_ptr,
    own_ptr,
    scale_ptr,
    gate_sum_ptr,
    theta_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    H: gl.constexpr,
    N: gl.constexpr,
    P: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
    HEADS: gl.constexpr,
    HAS_DOCS: gl.constexpr,
):
    """Out of one chunk and HEADS heads."""
    GROUPS: gl.constexpr = (H + HEADS - 1) // HEADS
    sizes: gl.constexpr = (N, R, C)
    dtype: gl.constexpr = x_desc.dtype
    tile: gl.constexpr = x_desc.layout
    pairs: gl.constexpr = gl.BlockedLayout([C // 8, 1], [1, 32], [8, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([C // 8, (N - 2 * R) // 32], [1, 32], [8, 1], [1, 0])
    acc: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, P // 2, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    pid = gl.program_id(0)
    n = first_chunk + pid // GROUPS
    first_head = pid % GROUPS * HEADS
    heads = gl.minimum(H - first_head, HEADS)
    token = n.to(gl.int64) * C
    end = num_tokens - n * C

    x_slots = gl.allocate_shared_memory(dtype, [2, C, P], tile)
    z_slots = gl.allocate_shared_memory(dtype, [2, C, P], tile)
    state_tile = gl.allocate_shared_memory(dtype, [P, N], states_desc.layout)
    q_tiles, k_tiles = two_tiles(dtype, tile), two_tiles(dtype, tile)
    scores = gl.allocate_shared_memory(dtype, [C, C], tile)
    x_ready, z_ready, state_ready = barriers(2), barriers(2), barriers(1)
    fence_async_shared()
    descs = (x_desc, z_desc, states_desc)
    places = (x_slots.index(0), z_slots.index(0), state_tile)
    ready = (x_ready.index(0), z_ready.index(0), state_ready.index(0))
    rows = (n * C, n * C, (first_head * num_chunks + n) * P)
    fetch(descs, places, ready, rows, (first_head * P, first_head * P, 0))

    chunk = first_head.to(gl.int64) * num_chunks + n
    all_dt = numbers(dt_ptr + chunk * C, num_chunks * C, heads, HEADS, C)
    all_theta = numbers(theta_ptr + chunk * R, num_chunks * R, heads, HEADS, R)
    all_sums = numbers(gate_sum_ptr + chunk * C, num_chunks * C, heads, HEADS, C)
    all_own = numbers(own_ptr + chunk * C, num_chunks * C, heads, HEADS, C)
    all_scale = numbers(scale_ptr + chunk * C, num_chunks * C, heads, HEADS, C)
    C_biases = bias_numbers(C_bias_ptr + first_head * N, heads, HEADS, N, R)
    B_biases = bias_numbers(B_bias_ptr + first_head * N, heads, HEADS, N, R)
    C_groups = groups(C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, end, pairs, wide, sizes)
    B_groups = groups(B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, end, pairs, wide, sizes)
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, pairs))
    angles = gl.arange(0, R, layout=gl.SliceLayout(0, pairs))
    by_angle = gl.expand_dims(ts, 1) * R + gl.expand_dims(angles, 0)
    speed = gl.load(speed_ptr + token * R + by_angle, mask=gl.expand_dims(ts < end, 1), other=0.0)
    start = starts(doc_start_ptr, num_tokens, n, C, gl.SliceLayout(1, pairs), HAS_DOCS)
    row_start = gl.expand_dims(starts(doc_start_ptr, num_tokens, n, C, by_row, HAS_DOCS), 1)
    all_dt, all_theta = keep(all_dt, HEADS, C), keep(all_theta, HEADS, R)
    all_own, all_scale = keep(all_own, HEADS, C), keep(all_scale, HEADS, C)
    all_sums = keep(all_sums * 1.4426950408889634, HEADS, C)  # to base 2
    C_biases, B_biases = keep(C_biases, HEADS, N), keep(B_biases, HEADS, N)
    read, written = gl.arange(0, C, layout=by_row), gl.arange(0, C, layout=by_column)

    for i in range(0, heads):
        skip = gl.load(D_ptr + first_head + i).to(gl.float32)
        dt = all_dt.index(i).load(gl.SliceLayout(1, pairs))
        theta = all_theta.index(i).load(gl.SliceLayout(0, pairs))
        sin, cos = rotation(speed, dt, theta, start, ts, HAS_DOCS)
        place(q_tiles, turned(C_groups, biases(C_biases.index(i), pairs, wide, R), sin, cos))
        place(k_tiles, turned(B_groups, biases(B_biases.index(i), pairs, wide, R), sin, cos))
        fence_async_shared()
        zeros = gl.zeros([C, C], gl.float32, acc)
        pair = warpgroup_mma(q_tiles[0], k_tiles[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
        pair = warpgroup_mma(q_tiles[1], k_tiles[1].permute((1, 0)), pair, is_async=True)
        mbarrier.wait(state_ready.index(0), i & 1)
        zeros = gl.zeros([C, P], gl.float32, acc)
        state = state_tile.permute((1, 0))
        y = warpgroup_mma(q_tiles[0], state.slice(0, N // 2), zeros, use_acc=False, is_async=True)
        y = warpgroup_mma(q_tiles[1], state.slice(N // 2, N // 2), y, is_async=True)
        row_sum = gl.expand_dims(all_sums.index(i).load(by_row), 1)
        column_sum = gl.expand_dims(all_sums.index(i).load(by_column), 0)
        own = gl.expand_dims(all_own.index(i).load(by_row), 1)
        scale = gl.expand_dims(all_scale.index(i).load(by_column), 0)
        from_start = power_of_two(row_sum)
        if HAS_DOCS:
            from_start = gl.where(row_start < 0, from_start, 0.0)
        pair = warpgroup_mma_wait(2, deps=(pair,))
        t, s = gl.expand_dims(read, 1), gl.expand_dims(written, 0)
        seen = t > s
        if HAS_DOCS:
            seen = seen & (s >= row_start)
        # What is not seen may be infinite.
        score = gl.where(seen, pair * (power_of_two(row_sum - column_sum) * scale), 0.0)
        # With what a token reads of itself on the diagonal.
        score = gl.where(t == s, own * pair + skip, score)
        scores.store(score.to(dtype))
        fence_async_shared()
        tma.store_wait(pendings=0)  # of the y before, in whose place z comes; here, since all warps meet here anyway
        y = warpgroup_mma_wait(0, deps=(y,))
        y = y * from_start
        slot = i % 2
        mbarrier.wait(x_ready.index(slot), (i // 2) & 1)
        y = warpgroup_mma(scores, x_slots.index(slot), y, is_async=True)
        if i + 1 < heads:
            other = 1 - slot
            following = first_head + i + 1
            places = (x_slots.index(other), z_slots.index(other), state_tile)
            ready = (x_ready.index(other), z_ready.index(other), state_ready.index(0))
            rows = (n * C, n * C, (following * num_chunks + n) * P)
            fetch(descs, places, ready, rows, (following * P, following * P, 0))
        mbarrier.wait(z_ready.index(slot), (i // 2) & 1)
        z = z_slots.index(slot).load(acc).to(gl.float32)
        gate = z * sigmoid(z)
        y = warpgroup_mma_wait(0, deps=(y,))
        z_slots.index(slot).store((y * gate).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [n * C, (first_head + i) * P], z_slots.index(slot))
    tma.store_wait(pendings=0)
