"""The token-parallel kernels of the gated delta rule's backward: OG and PG, in the notation of `gated_delta`.

OG is P^T dO, P the scores. PG, in three kernels, turns dO, S, Vn (of the replayed ST) and E, a = T^T dVn (of STB) into
the gradients of q, k, v, g and beta. The formulas are in `stateflow.recurrence.gated_delta`.
"""

import triton
import triton.language as tl

from .decays import FACTORS, document_starts, inverse_norm, pair_decay, pair_decay_transposed, start_decay
from .primitives import diagonal, dot, rounded, row_dots, scaled_rows

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk"]


@triton.jit(do_not_specialize=_LENGTHS)
def out_backward_kernel(
    q_ptr,
    k_ptr,
    doc_start_ptr,
    grad_o_ptr,
    gate_sum_ptr,
    k_norm_ptr,
    factors_ptr,
    grad_v_new_ptr,
    scale,
    eps,
    num_tokens,
    num_chunks,
    first_chunk,
    B: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """OG of one chunk and head: P^T dO, and the factors of the queries for STB."""
    pid = tl.program_id(0)
    n = first_chunk + pid // (B * H)
    head = (pid % (B * H)).to(tl.int64)
    batch = head // H
    key_head = (head % H) // (H // HK)
    chunk = head * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    ks = tl.arange(0, BK)
    in_chunk = ts < num_tokens - n * C
    key_base = (token * HK + key_head) * K
    key_offset = ts[:, None] * (HK * K) + ks[None, :]
    key_mask = in_chunk[:, None] & (ks[None, :] < K)
    q = tl.load(q_ptr + key_base + key_offset, mask=key_mask, other=0.0)
    k = tl.load(k_ptr + key_base + key_offset, mask=key_mask, other=0.0)
    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts)
    k_norm = tl.load(k_norm_ptr + chunk * C + ts)
    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    q_norm = inverse_norm(q, eps, NORMALIZE, C)
    factors = factors_ptr + chunk * (FACTORS * C) + ts
    tl.store(factors + 7 * C, q_norm)
    q_norm *= scale
    rho = tl.where(in_chunk, q_norm * start_decay(gate_sum, start), 0.0)
    tl.store(factors + 4 * C, rho)

    # Row s, column t: the transposed scores from transposed operands.
    scores = dot(k, tl.trans(q), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    scores = scores * pair_decay_transposed(gate_sum, start, C) * q_norm[None, :] * k_norm[:, None]
    for v_block in tl.range(0, V, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        v_mask = vs[None, :] < V
        grad_o = tl.load(
            grad_o_ptr + (token * H + head % H) * V + (ts[:, None] * (H * V) + vs[None, :]),
            mask=in_chunk[:, None] & v_mask,
            other=0.0,
        )
        grad_v_new = dot(scores, grad_o, tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
        tl.store(
            grad_v_new_ptr + chunk * (C * V) + (ts[:, None] * V + vs[None, :]), rounded(grad_v_new, DTYPE), mask=v_mask
        )


@triton.jit(do_not_specialize=_LENGTHS)
def query_backward_kernel(
    q_ptr,
    k_ptr,
    doc_start_ptr,
    grad_o_ptr,
    gate_sum_ptr,
    q_norm_ptr,
    k_norm_ptr,
    v_new_ptr,
    states_ptr,
    grad_q_ptr,
    grad_gate_ptr,
    scale,
    num_tokens,
    num_chunks,
    first_chunk,
    B: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """PG of the queries, one chunk and head: dQ [B, T, H, K], and what O adds to the gradients of the gate sums.

    Needs S and Vn but neither E nor dVn, so it may run beside STB.
    """
    pid = tl.program_id(0)
    n = first_chunk + pid // (B * H)
    head = (pid % (B * H)).to(tl.int64)
    batch = head // H
    key_head = (head % H) // (H // HK)
    chunk = head * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    ks = tl.arange(0, BK)
    in_chunk = ts < num_tokens - n * C
    key_base = (token * HK + key_head) * K
    key_offset = ts[:, None] * (HK * K) + ks[None, :]
    key_mask = in_chunk[:, None] & (ks[None, :] < K)
    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts)
    q_norm = tl.load(q_norm_ptr + chunk * (FACTORS * C) + ts)
    k_norm = tl.load(k_norm_ptr + chunk * C + ts)
    from_start = start_decay(gate_sum, start)

    grad_scores = tl.zeros([C, C], tl.float32)
    grad_q = tl.zeros([C, BK], tl.float32)
    for v_block in tl.range(0, V, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        v_mask = vs[None, :] < V
        grad_o = tl.load(
            grad_o_ptr + (token * H + head % H) * V + (ts[:, None] * (H * V) + vs[None, :]),
            mask=in_chunk[:, None] & v_mask,
            other=0.0,
        )
        v_new = tl.load(v_new_ptr + chunk * (C * V) + (ts[:, None] * V + vs[None, :]), mask=v_mask, other=0.0)
        state = tl.load(
            states_ptr + chunk * (K * V) + (ks[:, None] * V + vs[None, :]), mask=(ks[:, None] < K) & v_mask, other=0.0
        )
        grad_scores = dot(grad_o, tl.trans(v_new), grad_scores, DTYPE, PRECISION)
        grad_q = dot(grad_o, tl.trans(state), grad_q, DTYPE, PRECISION)

    q = tl.load(q_ptr + key_base + key_offset, mask=key_mask, other=0.0)
    k = tl.load(k_ptr + key_base + key_offset, mask=key_mask, other=0.0)
    grad_pair = grad_scores * pair_decay(gate_sum, start, C)
    scores = dot(q, tl.trans(k), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    log_pair = grad_pair * scores * (scale * q_norm)[:, None] * k_norm[None, :]
    # <dQ_t, q_t> of the normalised query: the gradient of what decays its output.
    grad_q = grad_q * (scale * from_start)[:, None]
    grad_gate = row_dots(grad_q, q, C, DTYPE, PRECISION) * q_norm + tl.sum(log_pair, axis=1)
    tl.store(grad_gate_ptr + chunk * C + ts, grad_gate - tl.sum(log_pair, axis=0))
    grad_q = dot(grad_pair * (scale * k_norm)[None, :], k, grad_q, DTYPE, PRECISION)
    if NORMALIZE:
        grad_q = scaled_rows(-grad_gate * q_norm, q, grad_q, C, DTYPE, PRECISION) * q_norm[:, None]
    grad_base = (token * H + head % H) * K
    grad_offset = ts[:, None] * (H * K) + ks[None, :]
    tl.store(grad_q_ptr + grad_base + grad_offset, rounded(grad_q, grad_q_ptr.dtype.element_ty), mask=key_mask)


@triton.jit(do_not_specialize=_LENGTHS)
def solve_backward_kernel(
    k_ptr,
    v_ptr,
    beta_ptr,
    doc_start_ptr,
    gate_sum_ptr,
    k_norm_ptr,
    v_new_ptr,
    states_ptr,
    grad_solved_ptr,
    grad_gate_ptr,
    grad_system_ptr,
    grad_k_ptr,
    grad_v_ptr,
    grad_beta_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    B: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """PG through the solve, one chunk and head: dV, dbeta, and its parts of dK [B, T, H, K] and of the gate sums'.

    Needs S, Vn and a = T^T dVn. From (I + A) Vn = b (v - gam k S): dA = -tril(a Vn^T, -1), dv = b a, and no other
    gradient passes through the solve. dK is left to `key_backward_kernel` as that of the normalised keys.
    """
    pid = tl.program_id(0)
    n = first_chunk + pid // (B * H)
    head = (pid % (B * H)).to(tl.int64)
    batch = head // H
    key_head = (head % H) // (H // HK)
    chunk = head * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    ks = tl.arange(0, BK)
    in_chunk = ts < num_tokens - n * C
    key_base = (token * HK + key_head) * K
    key_offset = ts[:, None] * (HK * K) + ks[None, :]
    key_mask = in_chunk[:, None] & (ks[None, :] < K)
    value_base = (token * H + head % H) * V
    value_offset = ts[:, None] * (H * V)
    tile_base = chunk * (C * V)
    tile_offset = ts[:, None] * V
    state_base = chunk * (K * V)
    gate_base = token * H + head % H
    beta = tl.load(beta_ptr + gate_base + ts * H, mask=in_chunk, other=0.0).to(tl.float32)

    rows = tl.zeros([C, C], tl.float32)
    grad_k = tl.zeros([C, BK], tl.float32)
    values = tl.zeros([C, C], tl.float32)
    for v_block in tl.range(0, V, BV, num_stages=STAGES):
        vs = (v_block + tl.arange(0, BV))[None, :]
        v_mask = vs < V
        v_new = tl.load(v_new_ptr + tile_base + tile_offset + vs, mask=v_mask, other=0.0)
        grad_solved = tl.load(grad_solved_ptr + tile_base + tile_offset + vs, mask=v_mask, other=0.0)
        state = tl.load(states_ptr + state_base + (ks[:, None] * V + vs), mask=(ks[:, None] < K) & v_mask, other=0.0)
        v = tl.load(v_ptr + value_base + value_offset + vs, mask=in_chunk[:, None] & v_mask, other=0.0)
        rows = dot(grad_solved, tl.trans(v_new), rows, DTYPE, PRECISION)
        grad_k = dot(grad_solved, tl.trans(state), grad_k, DTYPE, PRECISION)
        values = dot(grad_solved, tl.trans(v), values, DTYPE, PRECISION)
    # Not above: see the rule on tiles of products in `primitives`.
    for v_block in tl.range(0, V, BV, num_stages=STAGES):
        vs = (v_block + tl.arange(0, BV))[None, :]
        v_mask = vs < V
        grad_solved = tl.load(grad_solved_ptr + tile_base + tile_offset + vs, mask=v_mask, other=0.0)
        tl.store(
            grad_v_ptr + value_base + value_offset + vs,
            rounded(grad_solved.to(tl.float32) * beta[:, None], DTYPE),
            mask=in_chunk[:, None] & v_mask,
        )

    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts)
    k_norm = tl.load(k_norm_ptr + chunk * C + ts)
    from_start = start_decay(gate_sum, start)
    k = tl.load(k_ptr + key_base + key_offset, mask=key_mask, other=0.0)
    # X = -(a Vn^T) . D below the diagonal; b X k and its transpose are what A gives to dK.
    products = dot(k, tl.trans(k), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    products = products * k_norm[:, None] * k_norm[None, :]
    read_dots = row_dots(grad_k, k, C, DTYPE, PRECISION) * (from_start * k_norm)
    rows = tl.where(ts[:, None] > ts[None, :], -rows * pair_decay(gate_sum, start, C), 0.0)
    products = products * rows
    system_dots = tl.sum(products, axis=1)
    tl.store(grad_beta_ptr + gate_base + ts * H, diagonal(values, C) + system_dots - read_dots, mask=in_chunk)
    grad_gate = beta * (system_dots - read_dots) - tl.sum(products * beta[:, None], axis=0)
    rows *= beta[:, None]
    # Its transpose is `key_backward_kernel`'s: an accumulator cannot be transposed (see `primitives`).
    tl.store(
        grad_system_ptr + chunk * (C * C) + (ts[:, None] * C + ts[None, :]), rounded(rows * k_norm[:, None], DTYPE)
    )
    grad_k = grad_k * (-beta * from_start)[:, None]
    grad_k = dot(rows * k_norm[None, :], k, grad_k, DTYPE, PRECISION)
    grad_base = (token * H + head % H) * K
    grad_offset = ts[:, None] * (H * K) + ks[None, :]
    tl.store(grad_k_ptr + grad_base + grad_offset, rounded(grad_k, grad_k_ptr.dtype.element_ty), mask=key_mask)
    grad_gate += tl.load(grad_gate_ptr + chunk * C + ts)
    tl.store(grad_gate_ptr + chunk * C + ts, grad_gate)


@triton.jit(do_not_specialize=_LENGTHS)
def key_backward_kernel(
    q_ptr,
    k_ptr,
    doc_start_ptr,
    grad_o_ptr,
    gate_sum_ptr,
    q_norm_ptr,
    k_norm_ptr,
    v_new_ptr,
    states_ptr,
    grad_states_ptr,
    grad_gate_ptr,
    grad_system_ptr,
    grad_k_ptr,
    grad_g_ptr,
    scale,
    num_tokens,
    num_chunks,
    first_chunk,
    B: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """PG of the keys and gates, one chunk and head, the last part: what P and E add, dK [B, T, H, K] and dg."""
    pid = tl.program_id(0)
    n = first_chunk + pid // (B * H)
    head = (pid % (B * H)).to(tl.int64)
    batch = head // H
    key_head = (head % H) // (H // HK)
    chunk = head * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    ks = tl.arange(0, BK)
    in_chunk = ts < num_tokens - n * C
    key_base = (token * HK + key_head) * K
    key_offset = ts[:, None] * (HK * K) + ks[None, :]
    key_mask = in_chunk[:, None] & (ks[None, :] < K)
    value_base = (token * H + head % H) * V
    value_offset = ts[:, None] * (H * V)
    tile_base = chunk * (C * V)
    tile_offset = ts[:, None] * V
    state_base = chunk * (K * V)
    gate_base = token * H + head % H
    # What comes through P and E. Rows are the keys' tokens, columns those of the queries.
    grad_scores = tl.zeros([C, C], tl.float32)
    from_end = tl.zeros([C, BK], tl.float32)
    by_columns = tl.zeros([BV, BV], tl.float32)  # S^T E; its trace is <S, E>
    for v_block in tl.range(0, V, BV, num_stages=STAGES):
        vs = (v_block + tl.arange(0, BV))[None, :]
        v_mask = vs < V
        state_mask = (ks[:, None] < K) & v_mask
        v_new = tl.load(v_new_ptr + tile_base + tile_offset + vs, mask=v_mask, other=0.0)
        grad_o = tl.load(grad_o_ptr + value_base + value_offset + vs, mask=in_chunk[:, None] & v_mask, other=0.0)
        grad_state = tl.load(grad_states_ptr + state_base + (ks[:, None] * V + vs), mask=state_mask, other=0.0)
        state = tl.load(states_ptr + state_base + (ks[:, None] * V + vs), mask=state_mask, other=0.0)
        grad_scores = dot(v_new, tl.trans(grad_o), grad_scores, DTYPE, PRECISION)
        from_end = dot(v_new, tl.trans(grad_state), from_end, DTYPE, PRECISION)
        by_columns = dot(tl.trans(state), grad_state, by_columns, DTYPE, PRECISION)

    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts)
    q_norm = tl.load(q_norm_ptr + chunk * (FACTORS * C) + ts)
    k_norm = tl.load(k_norm_ptr + chunk * C + ts)
    from_start = start_decay(gate_sum, start)
    pairs = pair_decay_transposed(gate_sum, start, C)
    to_end = tl.sum(tl.where(ts[None, :] == C - 1, pairs, 0.0), axis=1)
    from_end = from_end * to_end[:, None]
    k = tl.load(k_ptr + key_base + key_offset, mask=key_mask, other=0.0)
    end_dots = row_dots(from_end, k, C, DTYPE, PRECISION) * k_norm
    q = tl.load(q_ptr + key_base + key_offset, mask=key_mask, other=0.0)
    grad_base = (token * H + head % H) * K
    grad_offset = ts[:, None] * (H * K) + ks[None, :]
    grad_k = tl.load(grad_k_ptr + grad_base + grad_offset, mask=key_mask, other=0.0).to(tl.float32) + from_end
    grad_k = dot(grad_scores * pairs * (scale * q_norm)[None, :], q, grad_k, DTYPE, PRECISION)
    system = tl.load(grad_system_ptr + chunk * (C * C) + (ts[:, None] * C + ts[None, :]))
    grad_k = dot(tl.trans(system), k, grad_k, DTYPE, PRECISION)
    if NORMALIZE:
        along = row_dots(grad_k, k, C, DTYPE, PRECISION) * k_norm
        grad_k = scaled_rows(-along * k_norm, k, grad_k, C, DTYPE, PRECISION) * k_norm[:, None]
    tl.store(grad_k_ptr + grad_base + grad_offset, rounded(grad_k, grad_k_ptr.dtype.element_ty), mask=key_mask)

    whole = tl.sum(tl.where(ts == C - 1, from_start, 0.0), axis=0)
    grad_end = tl.sum(end_dots, axis=0) + whole * tl.sum(diagonal(by_columns, BV), axis=0)
    grad_gate = tl.load(grad_gate_ptr + chunk * C + ts) - end_dots + tl.where(ts == C - 1, grad_end, 0.0)
    # Each gate is in the sums of its document's later tokens.
    summed = (ts[:, None] >= ts[None, :]) & (ts[None, :] > start[:, None])
    grad_g = tl.sum(tl.where(summed, grad_gate[:, None], 0.0), axis=0)
    tl.store(grad_g_ptr + gate_base + ts * H, grad_g, mask=in_chunk)
