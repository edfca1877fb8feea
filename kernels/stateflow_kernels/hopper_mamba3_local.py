"""Mamba-3's Local for Hopper, in Gluon. (The backward's, with Local back, is `hopper_mamba3_both`.)

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
    barriers,
    bias_numbers,
    biases,
    exponential,
    fetch,
    groups,
    keep,
    number_places,
    numbers,
    place,
    rotation,
    starts,
    store_token,
    true_columns,
    turned,
    two_tiles,
)

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk"]


@gluon.jit
def _multiply(values, tiles, acc: gl.constexpr):
    """Values^T times both tiles of q or k."""
    P: gl.constexpr = values.shape[1]
    WIDTH: gl.constexpr = tiles[0].shape[1]
    zeros = gl.zeros([P, WIDTH], gl.float32, acc)
    first = warpgroup_mma(values.permute((1, 0)), tiles[0], zeros, use_acc=False, is_async=True)
    return first, warpgroup_mma(values.permute((1, 0)), tiles[1], zeros, use_acc=False, is_async=True)


@gluon.jit
def _fetch(x_desc, tiles, ready, row, first_head, i, heads):
    """x of the program's head i, if there is one."""
    P: gl.constexpr = tiles.shape[2]
    if i < heads:
        place, barrier = tiles.index(i % 2), ready.index(i % 2)
        fetch((x_desc,), (place,), (barrier,), (row,), ((first_head + i) * P,))


@gluon.jit
def _write(desc, tiles, row):
    width: gl.constexpr = tiles[0].shape[1]
    tma.async_copy_shared_to_global(desc, [row, 0], tiles[0])
    tma.async_copy_shared_to_global(desc, [row, width], tiles[1])


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

    x_tiles = gl.allocate_shared_memory(dtype, [2, C, P], tile)
    scaled = gl.allocate_shared_memory(dtype, [C, P], tile)
    k_tiles, added = two_tiles(dtype, tile), two_tiles(dtype, tile)
    x_ready = barriers(2)
    if q_rows_desc is not None:
        q_tiles = two_tiles(dtype, tile)
    fence_async_shared()
    # Two heads ahead: from memory x takes longer than a head's work.
    _fetch(x_desc, x_tiles, x_ready, n * C, first_head, 0, heads)
    _fetch(x_desc, x_tiles, x_ready, n * C, first_head, 1, heads)

    chunk = first_head.to(gl.int64) * num_chunks + n
    dt = numbers(dt_ptr + chunk * C, num_chunks * C, heads, HEADS, C)
    theta = numbers(theta_ptr + chunk * R, num_chunks * R, heads, HEADS, R)
    gate_sum = numbers(gate_sum_ptr + chunk * C, num_chunks * C, heads, HEADS, C)
    last_sum = numbers(gate_sum_ptr + (chunk * C + C - 1), num_chunks * C, heads, HEADS, C, 0)
    scale = numbers(scale_ptr + chunk * C, num_chunks * C, heads, HEADS, C)
    C_bias = bias_numbers(C_bias_ptr + first_head * N, heads, HEADS, N, R)
    B_bias = bias_numbers(B_bias_ptr + first_head * N, heads, HEADS, N, R)
    if q_rows_desc is not None:
        C_groups = groups(C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, end, pairs, wide, sizes)
    B_groups = groups(B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, end, pairs, wide, sizes)
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, pairs))
    angles = gl.arange(0, R, layout=gl.SliceLayout(0, pairs))
    by_angle = gl.expand_dims(ts, 1) * R + gl.expand_dims(angles, 0)
    speed = gl.load(speed_ptr + token * R + by_angle, mask=gl.expand_dims(ts < end, 1), other=0.0)
    start = starts(doc_start_ptr, num_tokens, n, C, gl.SliceLayout(1, pairs), HAS_DOCS)
    all_dt, all_theta, all_to_end = number_places(HEADS, C), number_places(HEADS, R), number_places(HEADS, C)
    B_biases = number_places(HEADS, N)
    keep(all_dt, dt)
    keep(all_theta, theta)
    keep(B_biases, B_bias)
    if q_rows_desc is not None:
        C_biases = number_places(HEADS, N)
        keep(C_biases, C_bias)
    to_end = exponential(last_sum - gate_sum)
    if HAS_DOCS:
        last_start = gl.load(doc_start_ptr + (gl.minimum(n * C + C, num_tokens) - 1)) - n * C
        to_end = gl.where(gl.arange(0, HEADS * C, layout=line) % C >= last_start, to_end, 0.0)
    keep(all_to_end, scale * to_end)
    # v of the last token.
    value = gl.arange(0, HEADS * P, layout=line)
    last_v = gl.load(x_ptr + ((token + last) * (H * P) + first_head * P + value), mask=value // P < heads, other=0.0)
    behind = (first_head + value // P).to(gl.int64) * (num_chunks + 1) + n + 1
    gl.store(v_bound_ptr + (behind * P + value % P), last_v.to(gl.float32), mask=value // P < heads)

    for i in range(0, heads):
        head = (first_head + i).to(gl.int64)
        chunk = head * num_chunks + n
        bound = chunk + head
        steps = all_dt.index(i).load(gl.SliceLayout(1, pairs))
        before = all_theta.index(i).load(gl.SliceLayout(0, pairs))
        sin, cos = rotation(speed, steps, before, start, ts, HAS_DOCS)
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
        mbarrier.wait(x_ready.index(i % 2), (i // 2) & 1)
        weight = all_to_end.index(i).load(gl.SliceLayout(1, values))
        v = x_tiles.index(i % 2).load(values).to(gl.float32) * gl.expand_dims(weight, 1)
        scaled.store(v.to(dtype))
        fence_async_shared()
        row = (first_head + i) * num_chunks + n
        first, second = _multiply(scaled, k_tiles, acc)
        if q_rows_desc is not None:
            _write(q_rows_desc, q_tiles, row * C)
        if k_rows_desc is not None:
            _write(k_rows_desc, k_tiles, row * C)
        _fetch(x_desc, x_tiles, x_ready, n * C, first_head, i + 2, heads)
        first, second = warpgroup_mma_wait(0, deps=(first, second))
        added[0].store(first.to(dtype))
        added[1].store(second.to(dtype))
        fence_async_shared()
        _write(states_desc, added, row * P)
        # Behind the fences. Of a whole chunk, so that the compiler knows which of a thread's tokens it is none of.
        store_token(k_bound_ptr + (bound + 1) * N, k, C - 1, end >= C, pairs, wide, sizes)
    tma.store_wait(pendings=0)

    if end < C:
        for i in range(0, heads):
            steps = all_dt.index(i).load(gl.SliceLayout(1, pairs))
            before = all_theta.index(i).load(gl.SliceLayout(0, pairs))
            sin, cos = rotation(speed, steps, before, start, ts, HAS_DOCS)
            k = turned(B_groups, biases(B_biases.index(i), pairs, wide, R), sin, cos)
            bound = (first_head + i).to(gl.int64) * (num_chunks + 1) + n
            store_token(k_bound_ptr + (bound + 1) * N, k, last, True, pairs, wide, sizes)
    if n == 0:
        ns, vs = gl.arange(0, N, layout=line), gl.arange(0, P, layout=line)
        for i in range(0, heads):
            head = (first_head + i).to(gl.int64)
            bound = head * (num_chunks + 1)
            gl.store(k_bound_ptr + bound * N + ns, gl.load(k_last_ptr + head * N + true_columns(ns, R)))
            gl.store(v_bound_ptr + bound * P + vs, gl.load(v_last_ptr + head * P + vs))
