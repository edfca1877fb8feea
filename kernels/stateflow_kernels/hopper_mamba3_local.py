"""Mamba-3's Local for Hopper, in Gluon.

Local in Triton's form passes tiles from layout to layout and waits for each of its loads in turn. Here a program takes
a few heads of one chunk, with what they share in registers, see `hopper_mamba3_tiles`. q and k go through shared
memory, where the copy engine takes them from and k is the right operand of A = V^T (e kh), with e and s on the side of
the values.

In the notation of `mamba3`, with its layouts. For B = 1, 16-bit inputs and the sizes of `hopper_mamba3.SIZES`.
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
    bias_numbers,
    biases,
    exponential,
    groups,
    keep,
    numbers,
    place,
    rotation,
    starts,
    true_columns,
    turned,
    two_tiles,
)

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk"]


@gluon.jit
def _store_token(row_ptr, rows, last, pairs: gl.constexpr, wide: gl.constexpr, sizes: gl.constexpr):
    """k of one token as a row of `k_bound`."""
    N: gl.constexpr = sizes[0]
    R: gl.constexpr = sizes[1]
    C: gl.constexpr = sizes[2]
    columns = gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, pairs)), 0)
    ts = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, pairs)), 1)
    gl.store(row_ptr + columns + 0 * ts, rows[0], mask=(ts == last) & (columns < R))
    gl.store(row_ptr + R + columns + 0 * ts, rows[1], mask=(ts == last) & (columns < R))
    columns = gl.expand_dims(gl.arange(0, N - 2 * R, layout=gl.SliceLayout(0, wide)), 0)
    ts = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, wide)), 1)
    gl.store(row_ptr + 2 * R + columns + 0 * ts, rows[2], mask=(ts == last) & (columns < N - 2 * R))


@gluon.jit(do_not_specialize=_LENGTHS)
def local_kernel(
    x_desc,
    k_rows_desc,
    q_rows_desc,
    states_desc,
    x_ptr,
    B_ptr,
    C_ptr,
    B_norm_ptr,
    C_norm_ptr,
    B_bias_ptr,
    C_bias_ptr,
    doc_start_ptr,
    k_last_ptr,
    v_last_ptr,
    B_factor_ptr,
    C_factor_ptr,
    speed_ptr,
    dt_ptr,
    scale_ptr,
    gate_sum_ptr,
    theta_ptr,
    k_bound_ptr,
    v_bound_ptr,
    cos_sin_rows_ptr,
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
    """Local of one chunk and HEADS heads. Without the rows' tensors only what Scan needs.

    `cos_sin_rows` [H, NC, C, 2R] float16, if wanted: R cosines, then R sines of every token's angle.
    """
    GROUPS: gl.constexpr = (H + HEADS - 1) // HEADS
    sizes: gl.constexpr = (N, R, C)
    dtype: gl.constexpr = x_desc.dtype
    tile: gl.constexpr = x_desc.layout
    pairs: gl.constexpr = gl.BlockedLayout([C // 8, 1], [1, 32], [8, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([C // 8, (N - 2 * R) // 32], [1, 32], [8, 1], [1, 0])
    values: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // P, P // 8], [8, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    acc: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, R, 16])
    pid = gl.program_id(0)
    n = first_chunk + pid // GROUPS
    first_head = pid % GROUPS * HEADS
    heads = gl.minimum(H - first_head, HEADS)
    token = n.to(gl.int64) * C
    end = num_tokens - n * C
    last = gl.minimum(end, C) - 1

    slots = gl.allocate_shared_memory(dtype, [2, C, P], tile)
    scaled = gl.allocate_shared_memory(dtype, [C, P], tile)
    k_tiles = two_tiles(dtype, tile)
    q_tiles = two_tiles(dtype, tile) if q_rows_desc is not None else None
    added = two_tiles(dtype, tile)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(ready.index(0), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [n * C, first_head * P], ready.index(0), slots.index(0))

    chunk = first_head.to(gl.int64) * num_chunks + n
    all_dt = numbers(dt_ptr + chunk * C, num_chunks * C, heads, HEADS, C)
    all_theta = numbers(theta_ptr + chunk * R, num_chunks * R, heads, HEADS, R)
    C_biases = bias_numbers(C_bias_ptr + first_head * N, heads, HEADS, N, R)
    B_biases = bias_numbers(B_bias_ptr + first_head * N, heads, HEADS, N, R)
    if q_rows_desc is not None:
        C_groups = groups(C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, end, pairs, wide, sizes)
    B_groups = groups(B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, end, pairs, wide, sizes)
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, pairs))
    angles = gl.arange(0, R, layout=gl.SliceLayout(0, pairs))
    by_angle = gl.expand_dims(ts, 1) * R + gl.expand_dims(angles, 0)
    speed = gl.load(speed_ptr + token * R + by_angle, mask=gl.expand_dims(ts < end, 1), other=0.0)
    start = starts(doc_start_ptr, num_tokens, n, C, gl.SliceLayout(1, pairs), HAS_DOCS)
    all_dt, all_theta = keep(all_dt, HEADS, C), keep(all_theta, HEADS, R)
    C_biases, B_biases = keep(C_biases, HEADS, N), keep(B_biases, HEADS, N)
    vt = gl.arange(0, C, layout=gl.SliceLayout(1, values))
    vs = gl.arange(0, P, layout=line)
    if HAS_DOCS:
        last_start = gl.load(doc_start_ptr + (gl.minimum(n * C + C, num_tokens) - 1)) - n * C

    for i in range(0, heads):
        head = (first_head + i).to(gl.int64)
        chunk = head * num_chunks + n
        bound = chunk + head
        scale = gl.load(scale_ptr + chunk * C + vt)
        to_end = gl.load(gate_sum_ptr + (chunk * C + C - 1)) - gl.load(gate_sum_ptr + chunk * C + vt)
        v_last = gl.load(x_ptr + (token + last) * (H * P) + head * P + vs).to(gl.float32)
        dt = all_dt.index(i).load(gl.SliceLayout(1, pairs))
        theta = all_theta.index(i).load(gl.SliceLayout(0, pairs))
        sin, cos = rotation(speed, dt, theta, start, ts, HAS_DOCS)
        if cos_sin_rows_ptr is not None:
            row = cos_sin_rows_ptr + chunk * (C * 2 * R) + gl.expand_dims(ts, 1) * (2 * R) + gl.expand_dims(angles, 0)
            gl.store(row, cos.to(gl.float16))
            gl.store(row + R, sin.to(gl.float16))

        # The padding's rows are stored, too: whatever they are, no product gets anything of them.
        tma.store_wait(pendings=0)
        if q_rows_desc is not None:
            place(q_tiles, turned(C_groups, biases(C_biases.index(i), pairs, wide, R), sin, cos))
        k = turned(B_groups, biases(B_biases.index(i), pairs, wide, R), sin, cos)
        place(k_tiles, k)
        if end >= C:  # so that the compiler knows which of a thread's tokens is none
            _store_token(k_bound_ptr + (bound + 1) * N, k, C - 1, pairs, wide, sizes)
        else:
            _store_token(k_bound_ptr + (bound + 1) * N, k, last, pairs, wide, sizes)
        gl.store(v_bound_ptr + (bound + 1) * P + vs, v_last)
        if HAS_DOCS:
            to_end = gl.where(vt >= last_start, to_end, float("-inf"))
        scale = scale * exponential(to_end)
        slot = i % 2
        mbarrier.wait(ready.index(slot), (i // 2) & 1)
        v = slots.index(slot).load(values).to(gl.float32) * gl.expand_dims(scale, 1)
        scaled.store(v.to(dtype))
        fence_async_shared()
        row = (first_head + i) * num_chunks + n
        left = scaled.permute((1, 0))
        zeros = gl.zeros([P, N // 2], gl.float32, acc)
        first = warpgroup_mma(left, k_tiles[0], zeros, use_acc=False, is_async=True)
        second = warpgroup_mma(left, k_tiles[1], zeros, use_acc=False, is_async=True)
        for j in gl.static_range(2):
            if q_rows_desc is not None:
                tma.async_copy_shared_to_global(q_rows_desc, [row * C, j * (N // 2)], q_tiles[j])
            if k_rows_desc is not None:
                tma.async_copy_shared_to_global(k_rows_desc, [row * C, j * (N // 2)], k_tiles[j])
        if i + 1 < heads:
            other = ready.index(1 - slot)
            mbarrier.expect(other, x_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [n * C, (first_head + i + 1) * P], other, slots.index(1 - slot))
        first, second = warpgroup_mma_wait(0, deps=(first, second))
        added[0].store(first.to(dtype))
        added[1].store(second.to(dtype))
        fence_async_shared()
        for j in gl.static_range(2):
            tma.async_copy_shared_to_global(states_desc, [row * P, j * (N // 2)], added[j])
    tma.store_wait(pendings=0)

    if n == 0:
        ns = gl.arange(0, N, layout=line)
        for i in range(0, heads):
            head = (first_head + i).to(gl.int64)
            bound = head * (num_chunks + 1)
            gl.store(k_bound_ptr + bound * N + ns, gl.load(k_last_ptr + head * N + true_columns(ns, R)))
            gl.store(v_bound_ptr + bound * P + vs, gl.load(v_last_ptr + head * P + vs))
