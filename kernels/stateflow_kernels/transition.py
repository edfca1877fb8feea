"""The state transition (ST) and its adjoint (STB), one kernel each, in a form that several recurrences share.

The gated delta rule runs on them, with a solve and a scalar decay. Nothing uses or tests the other settings of the two
flags yet (Mamba-3 has a scan of its own).

Per head and kernel chunk of C tokens, with the state S [K, V] before the chunk and one factor a token each in the
diagonal matrices b, r, kappa and rho:

    ST, in order:    Vn = V, or T (b V - r k S) with a solve    S' = Lam S + k^T kappa Vn
    STB, reversed:   dVn = P^T dY + kappa k E    a = T^T dVn    E' = Lam E + q^T rho dY - k^T r a

E is dL/dS' on entry to a chunk. Lam is a scalar or a vector [K]. With a solve this is the delta rule: T V' = U and
T r k = W of the literature, multiplied out of order, so that neither U nor W exists in memory, ST reads what the
forward saved, and STB's `a` is all that the gradients through the solve need. Each program owns some columns of S of
one head and walks through the chunks with the state in float32 registers, so that a walk may stop and go on at any
chunk without changing a bit.

In segments: where there are too few heads for the device, the chunks are shared out among `num_segments` segments whose
walks run at once, each from a state of its own. For these a kernel with MAPS runs first: a segment takes the state S to
M S + N, and the walk from 0 ends at N, those from the columns of the identity, without values, at M. E goes through the
segment by M^T, so that STB needs only what a walk from 0 adds. `compose_kernel` then goes from segment to segment. That
sums in another order than one walk. Segments are numbered by their tokens, also for STB.

Layouts (all contiguous):
    q, k               [B, T, HK, K]; head h reads key head h // (H / HK)
    v, dY (grad_y)     [B, T, H, V]
    v_new, ...         "tiles" [B, H, N, C, X]: N chunks, the last one padded with zeros
    solve              T, tiles with X = C
    k_scale (kappa), q_scale (rho), v_scale (b), r_scale (r)    [B, H, N, C] float32, 0 in the padding; chunks
                       FACTOR_STRIDE apart
    decay              [B, H, N] float32, or [B, H, N, K] where VECTOR_DECAY; chunks DECAY_STRIDE apart
    states             [B, H, N, K, V] in DTYPE: the state (its gradient) as it entered each chunk
    state              [B, H, K, V] float32; that a walk begins with, [B, H, G, K, V] for G segments
    maps               M of the segments but the first, [B, H, G - 1, K, K] float32
"""

import triton
import triton.language as tl

from .primitives import dot, rounded

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk", "end_chunk", "num_segments"]


@triton.jit
def _program(num_segments, BLOCKS: tl.constexpr):
    """Which block of columns, segment, and batch and head."""
    pid = tl.program_id(0)
    rest = pid // BLOCKS
    return pid % BLOCKS, rest % num_segments, (rest // num_segments).to(tl.int64)


@triton.jit
def _segment_chunks(segment, num_segments, first_chunk, end_chunk):
    """The segment's chunks, from the first up to the end."""
    chunks = end_chunk - first_chunk
    return first_chunk + segment * chunks // num_segments, first_chunk + (segment + 1) * chunks // num_segments


@triton.jit(do_not_specialize=_LENGTHS)
def transition_kernel(
    k_ptr,
    k_scale_ptr,
    v_ptr,
    solve_ptr,
    v_scale_ptr,
    r_scale_ptr,
    decay_ptr,
    state_in_ptr,
    states_ptr,
    v_new_ptr,
    state_out_ptr,
    maps_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    end_chunk,
    num_segments,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_SOLVE: tl.constexpr,
    VECTOR_DECAY: tl.constexpr,
    FACTOR_STRIDE: tl.constexpr,
    DECAY_STRIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    MAPS: tl.constexpr,
):
    """ST over the chunks first_chunk .. end_chunk - 1. Program = (batch and head, segment, block of BV columns).

    With MAPS no `states` and `v_new`, but N of all segments but the last one, where the segments after them begin (in
    `state_out`), and M of all but the first.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    BLOCKS: tl.constexpr = NV + (K + BV - 1) // BV if MAPS else NV
    column, part, head = _program(num_segments - 1 if MAPS else num_segments, BLOCKS)
    segment = part + (column >= NV).to(tl.int32) if MAPS else part
    first, end = _segment_chunks(segment, num_segments, first_chunk, end_chunk)
    batch = head // H
    key_head = (head % H) // (H // HK)

    ks = tl.arange(0, BK)
    vs = column * BV + tl.arange(0, BV)
    ts = tl.arange(0, C)
    k_mask = ks[None, :] < K
    v_mask = vs[None, :] < V
    state_mask = (ks[:, None] < K) & v_mask
    state_offset = ks[:, None] * V + vs[None, :]
    if MAPS:
        state = tl.where(ks[:, None] == vs[None, :] - NV * BV, 1.0, 0.0)
        if segment == 0:
            state = tl.load(state_in_ptr + head * K * V + state_offset, mask=state_mask, other=0.0)
    else:
        state_in_ptr += (head * num_segments + segment) * (K * V)
        state = tl.load(state_in_ptr + state_offset, mask=state_mask, other=0.0)

    for n in tl.range(first, end, num_stages=STAGES):
        chunk = head * num_chunks + n
        token = batch * num_tokens + n * C
        seen = ts[:, None] < num_tokens - n * C
        k = tl.load(
            k_ptr + (token * HK + key_head) * K + (ts[:, None] * (HK * K) + ks[None, :]), mask=seen & k_mask, other=0.0
        )
        k_scale = tl.load(k_scale_ptr + chunk * FACTOR_STRIDE + ts)
        v = tl.load(
            v_ptr + (token * H + head % H) * V + (ts[:, None] * (H * V) + vs[None, :]), mask=seen & v_mask, other=0.0
        )
        v_new = v.to(tl.float32)
        if VECTOR_DECAY:
            decay = tl.load(decay_ptr + chunk * DECAY_STRIDE + ks, mask=ks < K, other=0.0)[:, None]
        else:
            decay = tl.load(decay_ptr + chunk * DECAY_STRIDE)
        if not MAPS:
            tl.store(states_ptr + chunk * (K * V) + state_offset, rounded(state, DTYPE), mask=state_mask)
        if HAS_SOLVE:
            v_scale = tl.load(v_scale_ptr + chunk * FACTOR_STRIDE + ts)
            r_scale = tl.load(r_scale_ptr + chunk * FACTOR_STRIDE + ts)
            solve = tl.load(solve_ptr + chunk * (C * C) + (ts[:, None] * C + ts[None, :]))
            read = dot(k, state, tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
            v_new = v_new * v_scale[:, None] - read * r_scale[:, None]
            v_new = dot(solve, v_new, tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
            if not MAPS:
                rows = chunk * (C * V) + (ts[:, None] * V + vs[None, :])
                tl.store(v_new_ptr + rows, rounded(v_new, DTYPE), mask=v_mask)
        state = dot(tl.trans(k), v_new * k_scale[:, None], state * decay, DTYPE, PRECISION)

    if MAPS:
        state_out_ptr += (head * num_segments + segment + 1) * (K * V)
        tl.store(state_out_ptr + state_offset, state, mask=state_mask)
        key_columns = vs[None, :] - NV * BV
        maps_ptr += (head * (num_segments - 1) + part) * (K * K)
        map_mask = (ks[:, None] < K) & (key_columns >= 0) & (key_columns < K)
        tl.store(maps_ptr + ks[:, None] * K + key_columns, state, mask=map_mask)
    elif segment == num_segments - 1:
        tl.store(state_out_ptr + head * K * V + state_offset, state, mask=state_mask)


@triton.jit(do_not_specialize=_LENGTHS)
def transition_backward_kernel(
    q_ptr,
    q_scale_ptr,
    k_ptr,
    k_scale_ptr,
    solve_ptr,
    r_scale_ptr,
    decay_ptr,
    grad_y_ptr,
    grad_state_in_ptr,
    grad_v_new_ptr,
    grad_states_ptr,
    grad_state_out_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    end_chunk,
    num_segments,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_SOLVE: tl.constexpr,
    VECTOR_DECAY: tl.constexpr,
    FACTOR_STRIDE: tl.constexpr,
    DECAY_STRIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    MAPS: tl.constexpr,
):
    """STB over the chunks end_chunk - 1 .. first_chunk; `grad_v_new` holds P^T dY and receives a, or dVn.

    With MAPS neither `grad_states` nor a, but what the walks through all segments but the first add to E, where the
    segments before them end (in `grad_state_out`).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    column, part, head = _program(num_segments - 1 if MAPS else num_segments, NV)
    segment = part + 1 if MAPS else part
    first, end = _segment_chunks(segment, num_segments, first_chunk, end_chunk)
    batch = head // H
    key_head = (head % H) // (H // HK)

    ks = tl.arange(0, BK)
    vs = column * BV + tl.arange(0, BV)
    ts = tl.arange(0, C)
    k_mask = ks[None, :] < K
    v_mask = vs[None, :] < V
    state_mask = (ks[:, None] < K) & v_mask
    state_offset = ks[:, None] * V + vs[None, :]
    if MAPS:
        grad_state = tl.zeros([BK, BV], tl.float32)
        if segment == num_segments - 1:
            grad_state = tl.load(grad_state_in_ptr + head * K * V + state_offset, mask=state_mask, other=0.0)
    else:
        grad_state_in_ptr += (head * num_segments + segment) * (K * V)
        grad_state = tl.load(grad_state_in_ptr + state_offset, mask=state_mask, other=0.0)

    for i in tl.range(0, end - first, num_stages=STAGES):
        n = end - 1 - i
        chunk = head * num_chunks + n
        token = batch * num_tokens + n * C
        seen = ts[:, None] < num_tokens - n * C
        key_base = (token * HK + key_head) * K
        key_offset = ts[:, None] * (HK * K) + ks[None, :]
        k = tl.load(k_ptr + key_base + key_offset, mask=seen & k_mask, other=0.0)
        q = tl.load(q_ptr + key_base + key_offset, mask=seen & k_mask, other=0.0)
        k_scale = tl.load(k_scale_ptr + chunk * FACTOR_STRIDE + ts)
        q_scale = tl.load(q_scale_ptr + chunk * FACTOR_STRIDE + ts)
        grad_y_base = (token * H + head % H) * V
        grad_y_offset = ts[:, None] * (H * V) + vs[None, :]
        grad_y = tl.load(grad_y_ptr + grad_y_base + grad_y_offset, mask=seen & v_mask, other=0.0).to(tl.float32)
        tile_base = chunk * (C * V)
        tile_offset = ts[:, None] * V + vs[None, :]
        from_output = tl.load(grad_v_new_ptr + tile_base + tile_offset, mask=v_mask, other=0.0).to(tl.float32)
        if VECTOR_DECAY:
            decay = tl.load(decay_ptr + chunk * DECAY_STRIDE + ks, mask=ks < K, other=0.0)[:, None]
        else:
            decay = tl.load(decay_ptr + chunk * DECAY_STRIDE)
        if not MAPS:
            tl.store(grad_states_ptr + chunk * (K * V) + state_offset, rounded(grad_state, DTYPE), mask=state_mask)
        from_state = dot(k, grad_state, tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
        grad_v_new = from_output + from_state * k_scale[:, None]
        grad_state = dot(tl.trans(q), grad_y * q_scale[:, None], grad_state * decay, DTYPE, PRECISION)
        if HAS_SOLVE:
            r_scale = tl.load(r_scale_ptr + chunk * FACTOR_STRIDE + ts)
            solve = tl.load(solve_ptr + chunk * (C * C) + (ts[:, None] * C + ts[None, :]))
            grad_v_new = dot(tl.trans(solve), grad_v_new, tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
            grad_state = dot(tl.trans(k), grad_v_new * -r_scale[:, None], grad_state, DTYPE, PRECISION)
        if not MAPS:
            tl.store(grad_v_new_ptr + tile_base + tile_offset, rounded(grad_v_new, DTYPE), mask=v_mask)

    if MAPS:
        grad_state_out_ptr += (head * num_segments + part) * (K * V)
        tl.store(grad_state_out_ptr + state_offset, grad_state, mask=state_mask)
    elif segment == 0:
        tl.store(grad_state_out_ptr + head * K * V + state_offset, grad_state, mask=state_mask)


@triton.jit(do_not_specialize=["num_segments"])
def compose_kernel(
    state_ptr,
    ends_ptr,
    maps_ptr,
    num_segments,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What the segments' walks begin with: states, from the first segment on, or with BACKWARD E, from the last one on.

    `ends` [B, H, G, K, V] holds N of each segment in the place of the one that comes next; the first of them began with
    `state`. Program = (batch and head, block of BV columns).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    head = (pid // NV).to(tl.int64)
    ks = tl.arange(0, BK)
    vs = (pid % NV) * BV + tl.arange(0, BV)
    mask = (ks[:, None] < K) & (vs[None, :] < V)
    offset = ks[:, None] * V + vs[None, :]
    map_mask = (ks[:, None] < K) & (ks[None, :] < K)
    map_offset = ks[None, :] * K + ks[:, None] if BACKWARD else ks[:, None] * K + ks[None, :]
    ends_ptr += head * num_segments * (K * V) + offset
    maps_ptr += head * (num_segments - 1) * (K * K) + map_offset

    place = num_segments - 1 if BACKWARD else 0
    tl.store(ends_ptr + place * (K * V), tl.load(state_ptr + head * (K * V) + offset, mask=mask), mask=mask)
    place = num_segments - 2 if BACKWARD else 1
    state = tl.load(ends_ptr + place * (K * V), mask=mask, other=0.0)
    for i in tl.range(2, num_segments, num_stages=STAGES):
        place = num_segments - 1 - i if BACKWARD else i
        of_map = place if BACKWARD else i - 2
        through = tl.load(maps_ptr + of_map * (K * K), mask=map_mask, other=0.0)
        added = tl.load(ends_ptr + place * (K * V), mask=mask, other=0.0)
        state = dot(through, state, added, tl.float32, PRECISION)
        tl.store(ends_ptr + place * (K * V), state, mask=mask)
