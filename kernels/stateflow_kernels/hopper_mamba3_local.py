"""Mamba-3's Local for Hopper, in Gluon: what heads share is loaded once, and every warp has its own tokens.

Local in Triton's form passes tiles from layout to layout and waits for each of its loads in turn. Here a program takes
a few heads of one chunk. A thread has the same tokens and columns of B and C throughout, normalised and with the norms'
weights in registers, and what it needs of them for each head lies there, too: the columns of its pairs, and the angle
that turns them. So angles are sums within a thread and over the eight warps, and no tile is moved before q and k are
done. These go through shared memory, where the copy engine takes them from and k is the right operand of A = V^T (e kh);
e and s are on the values' side.

In the notation of `mamba3`, with its layouts. For B = 1, 16-bit inputs and the sizes of `hopper.MAMBA3_SIZES`.
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

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk"]


@gluon.jit
def _sine(x):
    return gl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _cosine(x):
    return gl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _add_from_start(a, a_starts, b, b_starts):
    return gl.where(b_starts != 0, b, a + b), a_starts | b_starts


@gluon.jit
def _rotation(speed, dt, theta, start, ts, HAS_DOCS: gl.constexpr):
    """Sine and cosine of every token's angle, by sums over its document's tokens in order."""
    turned = speed * gl.expand_dims(dt, 1)
    if HAS_DOCS:
        starts, turned = gl.broadcast(gl.expand_dims(gl.where(start == ts, 1, 0), 1), turned)
        turned, starts = gl.associative_scan((turned, starts), 0, _add_from_start)
        angle = turned + gl.where(gl.expand_dims(start, 1) < 0, gl.expand_dims(theta, 0), 0.0)
    else:
        angle = gl.associative_scan(turned, 0, _add) + gl.expand_dims(theta, 0)
    # To the nearest whole number, as float32 rounds where its last digit is 1. And as `revolutions_off`.
    turns = (angle * 0.15915494309189535 + 12582912.0) - 12582912.0
    angle = angle - turns * 6.28125 - turns * 0.0019353071795864769
    return _sine(angle), _cosine(angle)


@gluon.jit
def _group(row_ptr, factor, norm_ptr, in_chunk, ts, columns, N: gl.constexpr):
    """These columns of B or C of the chunk's tokens, normalised and with the norm's weights; float32."""
    offset = gl.expand_dims(ts, 1) * N + gl.expand_dims(columns, 0)
    row = gl.load(row_ptr + offset, mask=gl.expand_dims(in_chunk, 1), other=0.0).to(gl.float32)
    return row * gl.expand_dims(factor, 1) * gl.expand_dims(gl.load(norm_ptr + columns).to(gl.float32), 0)


@gluon.jit
def _groups(row_ptr, factor_ptr, norm_ptr, end, pairs: gl.constexpr, wide: gl.constexpr, sizes: gl.constexpr):
    """First and second columns of the pairs, and the others."""
    N: gl.constexpr = sizes[0]
    R: gl.constexpr = sizes[1]
    C: gl.constexpr = sizes[2]
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, pairs))
    angles = gl.arange(0, R, layout=gl.SliceLayout(0, pairs))
    factor = gl.load(factor_ptr + ts, mask=ts < end, other=0.0)
    first = _group(row_ptr, factor, norm_ptr, ts < end, ts, 2 * angles, N)
    second = _group(row_ptr, factor, norm_ptr, ts < end, ts, 2 * angles + 1, N)
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, wide))
    others = 2 * R + gl.arange(0, N - 2 * R, layout=gl.SliceLayout(0, wide))
    factor = gl.load(factor_ptr + ts, mask=ts < end, other=0.0)
    return first, second, _group(row_ptr, factor, norm_ptr, ts < end, ts, others, N)


@gluon.jit
def _biases(bias_ptr, pairs: gl.constexpr, wide: gl.constexpr, N: gl.constexpr, R: gl.constexpr):
    """As `_groups`."""
    angles = gl.arange(0, R, layout=gl.SliceLayout(0, pairs))
    others = 2 * R + gl.arange(0, N - 2 * R, layout=gl.SliceLayout(0, wide))
    first = gl.load(bias_ptr + 2 * angles).to(gl.float32)
    second = gl.load(bias_ptr + 2 * angles + 1).to(gl.float32)
    rest = gl.load(bias_ptr + others).to(gl.float32)
    return gl.expand_dims(first, 0), gl.expand_dims(second, 0), gl.expand_dims(rest, 0)


@gluon.jit
def _turned(groups, biases, sin, cos):
    """q or k of a head."""
    first = groups[0] + biases[0]
    second = groups[1] + biases[1]
    return first * cos - second * sin, first * sin + second * cos, groups[2] + biases[2]


@gluon.jit
def _place(tiles, rows):
    """Writes q or k: a tile of the turned columns, first and second ones side by side, and one of the others."""
    first, second, rest = rows
    dtype: gl.constexpr = tiles.dtype
    C: gl.constexpr = tiles.shape[1]
    W: gl.constexpr = tiles.shape[2]
    turned = gl.permute(gl.join(first.to(dtype), second.to(dtype)), (0, 2, 1))
    tiles.index(0).store(gl.reshape(turned, (C, W)))
    tiles.index(1).store(rest.to(dtype))


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


@gluon.jit
def _starts(doc_start_ptr, num_tokens, n, C: gl.constexpr, layout: gl.constexpr, HAS_DOCS: gl.constexpr):
    """As `decays.document_starts`."""
    ts = gl.arange(0, C, layout=layout)
    if HAS_DOCS:
        position = gl.minimum(n * C + ts, num_tokens - 1)
        return gl.maximum(gl.load(doc_start_ptr + position) - n * C, -1).to(gl.int32)
    else:
        return gl.full([C], -1, gl.int32, layout)


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
    """Local of one chunk and HEADS heads.

    `cos_sin_rows` [H, NC, C, 2R] float16, if wanted: R cosines, then R sines of every token's angle.
    """
    GROUPS: gl.constexpr = (H + HEADS - 1) // HEADS
    sizes: gl.constexpr = (N, R, C)
    dtype: gl.constexpr = x_desc.dtype
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

    slots = gl.allocate_shared_memory(dtype, [2, C, P], x_desc.layout)
    scaled = gl.allocate_shared_memory(dtype, [C, P], x_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [2, C, N // 2], q_rows_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, C, N // 2], k_rows_desc.layout)
    added = gl.allocate_shared_memory(dtype, [2, P, N // 2], states_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(ready.index(0), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [n * C, first_head * P], ready.index(0), slots.index(0))

    C_groups = _groups(C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, end, pairs, wide, sizes)
    B_groups = _groups(B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, end, pairs, wide, sizes)
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, pairs))
    angles = gl.arange(0, R, layout=gl.SliceLayout(0, pairs))
    by_angle = gl.expand_dims(ts, 1) * R + gl.expand_dims(angles, 0)
    speed = gl.load(speed_ptr + token * R + by_angle, mask=gl.expand_dims(ts < end, 1), other=0.0)
    start = _starts(doc_start_ptr, num_tokens, n, C, gl.SliceLayout(1, pairs), HAS_DOCS)
    vt = gl.arange(0, C, layout=gl.SliceLayout(1, values))
    vs = gl.arange(0, P, layout=line)
    if HAS_DOCS:
        last_start = gl.load(doc_start_ptr + (gl.minimum(n * C + C, num_tokens) - 1)) - n * C

    for i in range(0, heads):
        head = (first_head + i).to(gl.int64)
        chunk = head * num_chunks + n
        bound = chunk + head
        dt = gl.load(dt_ptr + chunk * C + ts)
        theta = gl.load(theta_ptr + chunk * R + angles)
        scale = gl.load(scale_ptr + chunk * C + vt)
        to_end = gl.load(gate_sum_ptr + (chunk * C + C - 1)) - gl.load(gate_sum_ptr + chunk * C + vt)
        C_biases = _biases(C_bias_ptr + head * N, pairs, wide, N, R)
        B_biases = _biases(B_bias_ptr + head * N, pairs, wide, N, R)
        v_last = gl.load(x_ptr + (token + last) * (H * P) + head * P + vs).to(gl.float32)
        sin, cos = _rotation(speed, dt, theta, start, ts, HAS_DOCS)
        if cos_sin_rows_ptr is not None:
            row = cos_sin_rows_ptr + chunk * (C * 2 * R) + gl.expand_dims(ts, 1) * (2 * R) + gl.expand_dims(angles, 0)
            gl.store(row, cos.to(gl.float16))
            gl.store(row + R, sin.to(gl.float16))

        # The padding's rows are stored, too: whatever they are, no product gets anything of them.
        tma.store_wait(pendings=0)
        _place(q_tiles, _turned(C_groups, C_biases, sin, cos))
        k = _turned(B_groups, B_biases, sin, cos)
        _place(k_tiles, k)
        if end >= C:  # so that the compiler knows which of a thread's tokens is none
            _store_token(k_bound_ptr + (bound + 1) * N, k, C - 1, pairs, wide, sizes)
        else:
            _store_token(k_bound_ptr + (bound + 1) * N, k, last, pairs, wide, sizes)
        gl.store(v_bound_ptr + (bound + 1) * P + vs, v_last)
        if HAS_DOCS:
            to_end = gl.where(vt >= last_start, to_end, float("-inf"))
        scale = scale * gl.exp(to_end)
        slot = i % 2
        mbarrier.wait(ready.index(slot), (i // 2) & 1)
        v = slots.index(slot).load(values).to(gl.float32) * gl.expand_dims(scale, 1)
        scaled.store(v.to(dtype))
        fence_async_shared()
        row = (first_head + i) * num_chunks + n
        left = scaled.permute((1, 0))
        zeros = gl.zeros([P, N // 2], gl.float32, acc)
        turned = warpgroup_mma(left, k_tiles.index(0), zeros, use_acc=False, is_async=True)
        rest = warpgroup_mma(left, k_tiles.index(1), zeros, use_acc=False, is_async=True)
        for j in gl.static_range(2):
            tma.async_copy_shared_to_global(q_rows_desc, [row * C, j * (N // 2)], q_tiles.index(j))
            tma.async_copy_shared_to_global(k_rows_desc, [row * C, j * (N // 2)], k_tiles.index(j))
        if i + 1 < heads:
            other = ready.index(1 - slot)
            mbarrier.expect(other, x_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [n * C, (first_head + i + 1) * P], other, slots.index(1 - slot))
        turned, rest = warpgroup_mma_wait(0, deps=(turned, rest))
        added.index(0).store(turned.to(dtype))
        added.index(1).store(rest.to(dtype))
        fence_async_shared()
        for j in gl.static_range(2):
            tma.async_copy_shared_to_global(states_desc, [row * P, j * (N // 2)], added.index(j))
    tma.store_wait(pendings=0)

    if n == 0:
        ns = gl.arange(0, N, layout=line)
        true = gl.where(ns < R, 2 * ns, 2 * (ns - R) + 1)
        true = gl.where(ns < 2 * R, true, ns)
        for i in range(0, heads):
            head = (first_head + i).to(gl.int64)
            gl.store(k_bound_ptr + head * (num_chunks + 1) * N + ns, gl.load(k_last_ptr + head * N + true))
            gl.store(v_bound_ptr + head * (num_chunks + 1) * P + vs, gl.load(v_last_ptr + head * P + vs))
