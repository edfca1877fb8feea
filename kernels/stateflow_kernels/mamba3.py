"""Mamba-3's forward kernels (backward: `mamba3_backward`), in the notation of `stateflow.recurrence.mamba3`.

What a chunk adds to the state does not depend on the state. So, unlike the gated delta rule's, its products are
taken for all chunks at once, and the walk through the chunks is left with a multiplication and an addition:

    Shared   1 / rms of B and C, pi tanh(angle)                                 (a chunk)
    Gates    dt, g, s, sums of A dt, Gam, d_1, and the chunk's turn             (a chunk and some heads)
    Theta    theta' = (theta + turn) mod 2 pi                                   (a head, in order)
    Local    q and k, A = V^T (e kh), k and v of the last token                 (a chunk and head)
    Scan     S~ = S + d_1 v_0 k_0^T, S' = Gam S~ + A                            (some rows of a head's S, in order)
    Out      Y = gam (Q S~) + (Q kh^T . L) V + (g <q, k> + D) V, y = Y silu(z)  (a chunk and head)

S is P x N here. Layouts, all contiguous, NC chunks of C tokens, the last one padded:

    tokens        [B, H, NC, C] float32; in the padding dt, g and s are 0
    theta         [B, H, NC, R] float32: the angle that comes into each chunk
    gate_sum      as tokens; float64 for float32 inputs, so that differences of sums keep their digits
    k_rows        [B, H, NC, C, N] in DTYPE, q_rows as it: k and q as the products take them
    states        [B, H, NC, P, N] in DTYPE: A, then S~ in its place
    k_bound       [B, H, NC + 1, N] float32, v_bound [.., P]: k and v of the token before each chunk and after the last

Where N is last, turned columns come apart, see `mamba3_tiles`; only what comes in and goes out has them as in B and C.
"""

import triton
import triton.language as tl

from .decays import document_starts, document_sums_by_head, start_decay
from .mamba3_tiles import (
    earlier_decay,
    element,
    end_decay,
    load_group,
    load_speed,
    revolutions_off,
    rotation,
    sigmoid,
    softplus,
    store_group,
    store_groups,
    true_columns,
    turned_rows,
)
from .primitives import diagonal, dot, rounded

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk", "end_chunk"]


@triton.jit
def _inverse_rms(x_ptr, in_chunk, eps, N: tl.constexpr, C: tl.constexpr, BN: tl.constexpr):
    ns = tl.arange(0, BN)
    offset = tl.arange(0, C)[:, None] * N + ns[None, :]
    x = tl.load(x_ptr + offset, mask=in_chunk[:, None] & (ns < N)[None, :], other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)


@triton.jit(do_not_specialize=_LENGTHS)
def shared_kernel(
    B_ptr,
    C_ptr,
    angle_ptr,
    B_factor_ptr,
    C_factor_ptr,
    speed_ptr,
    eps,
    num_tokens,
    num_chunks,
    first_chunk,
    BATCH: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """Shared, of one chunk: inverse norms [B, T] and speeds [B, T, R], float32."""
    pid = tl.program_id(0)
    n = first_chunk + pid // BATCH
    token = (pid % BATCH).to(tl.int64) * num_tokens + n.to(tl.int64) * C
    ts = tl.arange(0, C)
    in_chunk = ts < num_tokens - n * C
    tl.store(B_factor_ptr + token + ts, _inverse_rms(B_ptr + token * N, in_chunk, eps, N, C, BN), mask=in_chunk)
    tl.store(C_factor_ptr + token + ts, _inverse_rms(C_ptr + token * N, in_chunk, eps, N, C, BN), mask=in_chunk)
    angles = tl.arange(0, BR)
    offset = ts[:, None] * R + angles[None, :]
    mask = in_chunk[:, None] & (angles < R)[None, :]
    angle = tl.load(angle_ptr + token * R + offset, mask=mask, other=0.0).to(tl.float32)
    small = tl.exp(-2.0 * tl.abs(angle))
    tanh = tl.where(angle < 0.0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)
    tl.store(speed_ptr + token * R + offset, 3.141592653589793 * tanh, mask=mask)


@triton.jit(do_not_specialize=_LENGTHS)
def gates_kernel(
    dd_dt_ptr,
    dd_A_ptr,
    trap_ptr,
    dt_bias_ptr,
    doc_start_ptr,
    speed_ptr,
    dt_ptr,
    own_ptr,
    scale_ptr,
    gate_sum_ptr,
    before_ptr,
    decay_ptr,
    turn_ptr,
    A_floor,
    num_tokens,
    num_chunks,
    first_chunk,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BR: tl.constexpr,
    HB: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Gates of one chunk and HB heads, whose gates lie beside each other.

    `before`, `decay` [B, H, NC]: d_1 and Gam; `turn` [B, H, NC, R].
    """
    BLOCKS: tl.constexpr = (H + HB - 1) // HB
    pid = tl.program_id(0)
    n = first_chunk + pid // (BATCH * BLOCKS)
    batch = (pid // BLOCKS % BATCH).to(tl.int64)
    hs = pid % BLOCKS * HB + tl.arange(0, HB)
    chunks = (batch * H + hs) * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    in_chunk = ts < num_tokens - n * C
    inside = in_chunk[:, None] & (hs < H)[None, :]
    gate = (token + ts)[:, None] * H + hs[None, :]
    bias = tl.load(dt_bias_ptr + hs, mask=hs < H, other=0.0).to(tl.float32)[None, :]
    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)

    dt = softplus(tl.load(dd_dt_ptr + gate, mask=inside, other=0.0).to(tl.float32) + bias)
    dt = tl.where(inside, dt, 0.0)
    trap = tl.load(trap_ptr + gate, mask=inside, other=0.0).to(tl.float32)
    own = sigmoid(trap) * dt
    # d of the token after, as far as this chunk knows it.
    has_next = inside & ((ts + 1 < num_tokens - n * C) & (ts + 1 < C))[:, None]
    dt_next = softplus(tl.load(dd_dt_ptr + gate + H, mask=has_next, other=0.0).to(tl.float32) + bias)
    trap_next = tl.load(trap_ptr + gate + H, mask=has_next, other=0.0).to(tl.float32)
    before_next = tl.where(has_next, sigmoid(-trap_next) * dt_next, 0.0)

    A = tl.maximum(softplus(tl.load(dd_A_ptr + gate, mask=inside, other=0.0).to(tl.float32)), A_floor)
    g = -A * dt
    if DTYPE == tl.float32:  # noqa: SIM300
        g = g.to(tl.float64)
    else:
        g = tl.maximum(g, -100.0)
    # A token's own gate counts from its document's second token on.
    is_first = ts == start
    gate_sum = document_sums_by_head(tl.where(is_first[:, None], 0.0, g), is_first, HAS_DOCS, False)
    tokens = chunks[None, :] * C + ts[:, None]
    valid = (hs < H)[None, :] & (ts >= 0)[:, None]
    tl.store(dt_ptr + tokens, dt, mask=valid)
    tl.store(own_ptr + tokens, own, mask=valid)
    tl.store(scale_ptr + tokens, own + before_next, mask=valid)
    tl.store(gate_sum_ptr + tokens, gate_sum, mask=valid)
    before = tl.where((ts == 0)[:, None], sigmoid(-trap) * dt, 0.0)
    tl.store(before_ptr + chunks, tl.sum(before, axis=0), mask=hs < H)
    decay = tl.where((ts == C - 1)[:, None], start_decay(gate_sum, start[:, None]), 0.0)
    tl.store(decay_ptr + chunks, tl.sum(decay, axis=0), mask=hs < H)

    # Loaded as the product takes it: angles by tokens.
    angles = tl.arange(0, BR)
    inside = (angles < R)[:, None] & in_chunk[None, :]
    speed = tl.load(speed_ptr + token * R + ts[None, :] * R + angles[:, None], mask=inside, other=0.0)
    of_last = ts >= element(start, C - 1, C)
    turned = tl.dot(speed, tl.where(of_last[:, None], dt, 0.0), input_precision="tf32x3")
    inside = (angles < R)[:, None] & (hs < H)[None, :]
    tl.store(turn_ptr + chunks[None, :] * R + angles[:, None], turned, mask=inside)


@triton.jit
def _last_start(doc_start_ptr, batch, num_tokens, n, C: tl.constexpr, W: tl.constexpr, HAS_DOCS: tl.constexpr):
    """[W] times the same: where the document of the chunk's last token starts, relative to the chunk.

    A vector, because loads of vectors are pipelined and those of numbers are not.
    """
    if HAS_DOCS:
        last = tl.minimum(n * C + C, num_tokens) - 1
        start = tl.load(doc_start_ptr + batch * num_tokens + last + tl.zeros([W], tl.int32))
        return start - n * C
    else:
        return tl.full([W], -1, tl.int64)


@triton.jit(do_not_specialize=_LENGTHS)
def theta_kernel(
    theta_in_ptr,
    doc_start_ptr,
    turn_ptr,
    theta_ptr,
    theta_out_ptr,
    num_tokens,
    num_chunks,
    H: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BR: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Theta of one head through all chunks."""
    head = tl.program_id(0).to(tl.int64)
    batch = head // H
    angles = tl.arange(0, BR)
    mask = angles < R
    theta = tl.load(theta_in_ptr + head * R + angles, mask=mask, other=0.0)
    for n in tl.range(0, num_chunks, num_stages=STAGES):
        offset = (head * num_chunks + n) * R + angles
        turned = tl.load(turn_ptr + offset, mask=mask, other=0.0)
        start = _last_start(doc_start_ptr, batch, num_tokens, n, C, BR, HAS_DOCS)
        tl.store(theta_ptr + offset, theta, mask=mask)
        theta = tl.where(start < 0, theta, 0.0) + turned
        theta = revolutions_off(theta, tl.floor(theta * 0.15915494309189535))
        # Rounding may leave it a little outside of [0, 2 pi).
        theta = tl.where(theta < 0.0, theta + 6.283185307179586, theta)
        theta = tl.where(theta >= 6.283185307179586, 0.0, theta)
    tl.store(theta_out_ptr + head * R + angles, theta, mask=mask)


@triton.jit(do_not_specialize=_LENGTHS)
def local_kernel(
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
    k_rows_ptr,
    q_rows_ptr,
    states_ptr,
    k_bound_ptr,
    v_bound_ptr,
    cos_sin_rows_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BX: tl.constexpr,
    BV: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Local of one chunk and head.

    `cos_sin_rows` [B, H, NC, C, 2R] float16, if wanted: R cosines, then R sines of every token's angle.
    """
    pid = tl.program_id(0)
    n = first_chunk + pid // (BATCH * H)
    head = (pid % (BATCH * H)).to(tl.int64)
    batch = head // H
    chunk = head * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    in_chunk = ts < num_tokens - n * C
    last = tl.minimum(num_tokens - n * C, C) - 1
    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    speed = load_speed(speed_ptr + token * R, in_chunk, C, R, BR)
    dt = tl.load(dt_ptr + chunk * C + ts)
    scale = tl.load(scale_ptr + chunk * C + ts)
    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts)
    cos, sin = rotation(speed, dt, theta_ptr + chunk * R, start, C, R, BR)
    if cos_sin_rows_ptr is not None:
        rows = cos_sin_rows_ptr + chunk * (C * 2 * R)
        store_group(rows, ts, cos, 0, R, BR, 2 * R, C, True)
        store_group(rows, ts, sin, R, R, BR, 2 * R, C, True)
    # The padding's rows are stored, too: whatever they are, no product gets anything of them.
    first, second, rest = turned_rows(
        C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, C_bias_ptr + (head % H) * N, in_chunk, cos, sin,
        N, R, C, BR, BX,
    )  # fmt: skip
    store_groups(q_rows_ptr + chunk * (C * N), ts, first, second, rest, N, R, BR, BX, C, True)
    first, second, rest = turned_rows(
        B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, B_bias_ptr + (head % H) * N, in_chunk, cos, sin,
        N, R, C, BR, BX,
    )  # fmt: skip
    store_groups(k_rows_ptr + chunk * (C * N), ts, first, second, rest, N, R, BR, BX, C, True)

    # Row 0 of a matrix of one row: only the last token's is stored.
    bound = head * (num_chunks + 1) + n
    rows = tl.where(ts == last, 0, 1)
    store_groups(k_bound_ptr + (bound + 1) * N, rows, first, second, rest, N, R, BR, BX, 1, False)
    ns = tl.arange(0, BN)
    if n == 0:
        k_last = tl.load(k_last_ptr + head * N + true_columns(ns, R), mask=ns < N)
        tl.store(k_bound_ptr + bound * N + ns, k_last, mask=ns < N)

    factor = (scale * end_decay(gate_sum, gate_sum_ptr + chunk * C, start, C, HAS_DOCS))[:, None]
    first = rounded(first * factor, DTYPE)
    second = rounded(second * factor, DTYPE)
    rest = rounded(rest * factor, DTYPE)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        v_mask = vs < P
        v = tl.load(
            x_ptr + (token * H + head % H) * P + (ts[:, None] * (H * P) + vs[None, :]),
            mask=in_chunk[:, None] & v_mask[None, :],
            other=0.0,
        )
        v_next = v_bound_ptr + (bound + 1) * P + tl.zeros([C, 1], tl.int32)
        tl.store(v_next + vs[None, :], v.to(tl.float32), mask=(ts == last)[:, None] & v_mask[None, :])
        if n == 0:
            tl.store(v_bound_ptr + bound * P + vs, tl.load(v_last_ptr + head * P + vs, mask=v_mask), mask=v_mask)
        added_first = dot(tl.trans(v), first, tl.zeros([BV, BR], tl.float32), DTYPE, PRECISION)
        added_second = dot(tl.trans(v), second, tl.zeros([BV, BR], tl.float32), DTYPE, PRECISION)
        added_rest = dot(tl.trans(v), rest, tl.zeros([BV, BX], tl.float32), DTYPE, PRECISION)
        row = states_ptr + chunk * (P * N)
        store_groups(row, vs, added_first, added_second, added_rest, N, R, BR, BX, P, P % BV == 0)


@triton.jit(do_not_specialize=_LENGTHS)
def scan_kernel(
    before_ptr,
    decay_ptr,
    k_bound_ptr,
    v_bound_ptr,
    state_in_ptr,
    states_ptr,
    state_out_ptr,
    k_out_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    end_chunk,
    N: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scan of BV rows of one head's state over first_chunk .. end_chunk - 1. `state_in`, `_out` [B, H, N, P] float32.

    `k_out` [B, H, N]: k of the last token, with its columns in their true places.
    """
    NB: tl.constexpr = (P + BV - 1) // BV
    EXACT: tl.constexpr = P % BV == 0
    pid = tl.program_id(0)
    head = (pid // NB).to(tl.int64)
    ps = (pid % NB) * BV + tl.arange(0, BV)
    ns = tl.arange(0, BN)
    mask = (ps < P)[:, None] & (ns < N)[None, :]
    outside = head * (N * P) + true_columns(ns, R)[None, :] * P + ps[:, None]
    state = tl.load(state_in_ptr + outside, mask=mask, other=0.0)
    # Numbers as vectors, whose loads are pipelined.
    zeros = tl.zeros([BV], tl.int32)
    for n in tl.range(first_chunk, end_chunk, num_stages=STAGES):
        chunk = head * num_chunks + n
        bound = head * (num_chunks + 1) + n
        added = load_group(states_ptr + chunk * (P * N), ps, 0, N, BN, N, P, EXACT).to(tl.float32)
        k = tl.load(k_bound_ptr + bound * N + ns, mask=ns < N, other=0.0)
        v = tl.load(v_bound_ptr + bound * P + ps, mask=ps < P, other=0.0)
        v *= tl.load(before_ptr + chunk + zeros)
        decay = tl.load(decay_ptr + chunk + zeros)
        state += v[:, None] * k[None, :]
        store_group(states_ptr + chunk * (P * N), ps, state, 0, N, BN, N, P, EXACT)
        state = state * decay[:, None] + added
    tl.store(state_out_ptr + outside, state, mask=mask)
    k = tl.load(k_bound_ptr + (head * (num_chunks + 1) + end_chunk) * N + ns, mask=ns < N, other=0.0)
    tl.store(k_out_ptr + head * N + true_columns(ns, R), k, mask=ns < N)


@triton.jit(do_not_specialize=_LENGTHS)
def out_kernel(
    x_ptr,
    z_ptr,
    D_ptr,
    doc_start_ptr,
    own_ptr,
    scale_ptr,
    gate_sum_ptr,
    k_rows_ptr,
    q_rows_ptr,
    states_ptr,
    y_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Out of one chunk and head."""
    pid = tl.program_id(0)
    n = first_chunk + pid // (BATCH * H)
    head = (pid % (BATCH * H)).to(tl.int64)
    batch = head // H
    chunk = head * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    in_chunk = ts < num_tokens - n * C
    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    k = load_group(k_rows_ptr + chunk * (C * N), ts, 0, N, BN, N, C, True)
    q = load_group(q_rows_ptr + chunk * (C * N), ts, 0, N, BN, N, C, True)
    pairs = dot(q, tl.trans(k), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    # With what a token reads of itself on the diagonal.
    own_read = tl.load(own_ptr + chunk * C + ts) * diagonal(pairs, C) + tl.load(D_ptr + head % H).to(tl.float32)
    scores = pairs * earlier_decay(scale_ptr + chunk * C, gate_sum_ptr + chunk * C, start, C)
    scores = rounded(tl.where(ts[:, None] == ts[None, :], own_read[:, None], scores), DTYPE)
    from_start = start_decay(tl.load(gate_sum_ptr + chunk * C + ts), start)[:, None]
    base = (token * H + head % H) * P
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        state = load_group(states_ptr + chunk * (P * N), vs, 0, N, BN, N, P, P % BV == 0)
        offset = ts[:, None] * (H * P) + vs[None, :]
        mask = in_chunk[:, None] & (vs < P)[None, :]
        v = tl.load(x_ptr + base + offset, mask=mask, other=0.0)
        z = tl.load(z_ptr + base + offset, mask=mask, other=0.0).to(tl.float32)
        y = dot(q, tl.trans(state), tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
        y = dot(scores, v, y * from_start, DTYPE, PRECISION)
        tl.store(y_ptr + base + offset, rounded(y * z * sigmoid(z), DTYPE), mask=mask)
