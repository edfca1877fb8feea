"""The token-parallel kernels of the gated delta rule's backward: OG and PG, in the notation of `gated_delta`.

OG is P^T dO, P the scores. PG, in three kernels, turns dO, S, Vn (of the replayed ST) and E, dVn (of STB) into the
gradients of q, k, v, g and beta. The formulas are in `stateflow.recurrence.gated_delta`.
"""

import triton
import triton.language as tl

from .decays import document_starts, inverse_norm, pair_decay, pair_decay_transposed, start_decay
from .primitives import dot, rounded

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk"]


@triton.jit(do_not_specialize=_LENGTHS)
def out_backward_kernel(
    q_ptr,
    k_ptr,
    doc_start_ptr,
    grad_o_ptr,
    gate_sum_ptr,
    k_norm_ptr,
    q_scale_ptr,
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
    q_norm = scale * inverse_norm(q, eps, NORMALIZE, C)
    tl.store(
        q_scale_ptr + chunk * C + ts, tl.where(in_chunk, q_norm * start_decay(gate_sum, start), 0.0)
    )

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
    k_norm_ptr,
    v_new_ptr,
    states_ptr,
    grad_q_ptr,
    grad_gate_ptr,
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
    q_norm = inverse_norm(q, eps, NORMALIZE, C)
    grad_pair = grad_scores * pair_decay(gate_sum, start, C)
    scores = dot(q, tl.trans(k), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    log_pair = grad_pair * scores * (scale * q_norm)[:, None] * k_norm[None, :]
    # <dQ_t, q_t> of the normalised query: the gradient of what decays its output.
    grad_gate = tl.sum(grad_q * q.to(tl.float32), axis=1) * (scale * from_start * q_norm) + tl.sum(log_pair, axis=1)
    tl.store(grad_gate_ptr + chunk * C + ts, grad_gate - tl.sum(log_pair, axis=0))
    grad_q = grad_q * (scale * from_start)[:, None]
    grad_q = dot(grad_pair * (scale * k_norm)[None, :], k, grad_q, DTYPE, PRECISION)
    if NORMALIZE:
        grad_q = (grad_q - q.to(tl.float32) * (grad_gate * q_norm)[:, None]) * q_norm[:, None]
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
    solve_ptr,
    grad_v_new_ptr,
    states_ptr,
    grad_gate_ptr,
    grad_system_ptr,
    grad_w_ptr,
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
    """PG through U, W and the solve, one chunk and head: dV and dbeta; for `key_backward_kernel` M and c.

    Adds its part to the gradients of the gate sums. Needs S and dVn.
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
    k_norm = tl.load(k_norm_ptr + chunk * C + ts)
    from_start = start_decay(gate_sum, start)
    beta = tl.load(beta_ptr + (token * H + head % H) + ts * H, mask=in_chunk, other=0.0).to(tl.float32)
    solve_t = tl.trans(tl.load(solve_ptr + chunk * (C * C) + (ts[:, None] * C + ts[None, :])))

    # dW = -dVn S^T, dT = dVn (b V)^T + dW (b gam K)^T, a = T^T dVn.
    grad_w = tl.zeros([C, BK], tl.float32)
    grad_solve = tl.zeros([C, C], tl.float32)
    grad_beta = tl.zeros([C], tl.float32)
    for v_block in tl.range(0, V, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        v_mask = vs[None, :] < V
        value_base = (token * H + head % H) * V
        value_offset = ts[:, None] * (H * V) + vs[None, :]
        value_mask = in_chunk[:, None] & v_mask
        grad_v_new = tl.load(
            grad_v_new_ptr + chunk * (C * V) + (ts[:, None] * V + vs[None, :]), mask=v_mask, other=0.0
        )
        state = tl.load(
            states_ptr + chunk * (K * V) + (ks[:, None] * V + vs[None, :]), mask=(ks[:, None] < K) & v_mask, other=0.0
        )
        v = tl.load(v_ptr + value_base + value_offset, mask=value_mask, other=0.0)
        grad_w = dot(grad_v_new, tl.trans(state), grad_w, DTYPE, PRECISION)
        grad_solve = dot(grad_v_new, tl.trans(v), grad_solve, DTYPE, PRECISION)
        grad_u = dot(solve_t, grad_v_new, tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
        tl.store(grad_v_ptr + value_base + value_offset, rounded(grad_u * beta[:, None], DTYPE), mask=value_mask)
        grad_beta += tl.sum(grad_u * v.to(tl.float32), axis=1)

    k = tl.load(k_ptr + key_base + key_offset, mask=key_mask, other=0.0)
    grad_w = rounded(-grad_w, DTYPE)
    key_part = dot(grad_w, tl.trans(k), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    grad_solve = (grad_solve + key_part * (from_start * k_norm)[None, :]) * beta[None, :]
    # c = T^T dW, handed on with the factors of dK in it.
    grad_w = dot(solve_t, grad_w, tl.zeros([C, BK], tl.float32), DTYPE, PRECISION)
    w_dots = tl.sum(grad_w * k.to(tl.float32), axis=1) * from_start * k_norm
    tl.store(
        grad_w_ptr + chunk * (C * K) + (ts[:, None] * K + ks[None, :]),
        rounded(grad_w * (beta * from_start)[:, None], DTYPE),
        mask=ks[None, :] < K,
    )
    # dA = -tril(T^T dT T^T, -1) and M = dA . D.
    grad_system = dot(solve_t, grad_solve, tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    grad_system = dot(grad_system, solve_t, tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    pairs = pair_decay(gate_sum, start, C)
    grad_system = tl.where(ts[:, None] > ts[None, :], -grad_system * pairs, 0.0)
    tl.store(
        grad_system_ptr + chunk * (C * C) + (ts[:, None] * C + ts[None, :]),
        rounded(grad_system * beta[:, None], DTYPE),
    )
    products = dot(k, tl.trans(k), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    products = products * grad_system * k_norm[:, None] * k_norm[None, :]
    row_sum = tl.sum(products, axis=1)
    tl.store(
        grad_beta_ptr + (token * H + head % H) + ts * H, grad_beta + w_dots + row_sum, mask=in_chunk
    )
    grad_gate = tl.load(grad_gate_ptr + chunk * C + ts)
    grad_gate += beta * (w_dots + row_sum) - tl.sum(products * beta[:, None], axis=0)
    tl.store(grad_gate_ptr + chunk * C + ts, grad_gate)


@triton.jit(do_not_specialize=_LENGTHS)
def key_backward_kernel(
    q_ptr,
    k_ptr,
    doc_start_ptr,
    grad_o_ptr,
    gate_sum_ptr,
    k_norm_ptr,
    v_new_ptr,
    states_ptr,
    grad_states_ptr,
    grad_gate_ptr,
    grad_system_ptr,
    grad_w_ptr,
    grad_k_ptr,
    grad_g_ptr,
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
    """PG of the keys and gates, one chunk and head, the last part: dK [B, T, H, K] and dg."""
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
    k_norm = tl.load(k_norm_ptr + chunk * C + ts)
    from_start = start_decay(gate_sum, start)

    # Rows are the keys' tokens, columns those of the queries.
    grad_scores = tl.zeros([C, C], tl.float32)
    grad_k = tl.zeros([C, BK], tl.float32)
    grad_decay = tl.zeros([BK], tl.float32)
    for v_block in tl.range(0, V, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        v_mask = vs[None, :] < V
        state_base = chunk * (K * V)
        state_offset = ks[:, None] * V + vs[None, :]
        state_mask = (ks[:, None] < K) & v_mask
        grad_o = tl.load(
            grad_o_ptr + (token * H + head % H) * V + (ts[:, None] * (H * V) + vs[None, :]),
            mask=in_chunk[:, None] & v_mask,
            other=0.0,
        )
        v_new = tl.load(v_new_ptr + chunk * (C * V) + (ts[:, None] * V + vs[None, :]), mask=v_mask, other=0.0)
        grad_state = tl.load(grad_states_ptr + state_base + state_offset, mask=state_mask, other=0.0)
        grad_scores = dot(v_new, tl.trans(grad_o), grad_scores, DTYPE, PRECISION)
        grad_k = dot(v_new, tl.trans(grad_state), grad_k, DTYPE, PRECISION)
        state = tl.load(states_ptr + state_base + state_offset, mask=state_mask, other=0.0)
        grad_decay += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), axis=1)

    pairs = pair_decay_transposed(gate_sum, start, C)
    to_end = tl.sum(tl.where(ts[None, :] == C - 1, pairs, 0.0), axis=1)
    q = tl.load(q_ptr + key_base + key_offset, mask=key_mask, other=0.0)
    q_norm = inverse_norm(q, eps, NORMALIZE, C)
    grad_k = grad_k * to_end[:, None]
    k = tl.load(k_ptr + key_base + key_offset, mask=key_mask, other=0.0)
    k = rounded(k.to(tl.float32) * k_norm[:, None], DTYPE)
    end_dots = tl.sum(grad_k * k.to(tl.float32), axis=1)
    grad_k = dot(grad_scores * pairs * (scale * q_norm)[None, :], q, grad_k, DTYPE, PRECISION)
    # b M K + M^T (b K)
    system = tl.load(grad_system_ptr + chunk * (C * C) + (ts[:, None] * C + ts[None, :]))
    grad_k = dot(system, k, grad_k, DTYPE, PRECISION)
    grad_k = dot(tl.trans(system), k, grad_k, DTYPE, PRECISION)
    grad_w_offset = ts[:, None] * K + ks[None, :]
    grad_k += tl.load(grad_w_ptr + chunk * (C * K) + grad_w_offset, mask=ks[None, :] < K, other=0.0).to(tl.float32)
    if NORMALIZE:
        along = tl.sum(grad_k * k.to(tl.float32), axis=1)
        grad_k = (grad_k - k.to(tl.float32) * along[:, None]) * k_norm[:, None]
    grad_base = (token * H + head % H) * K
    grad_offset = ts[:, None] * (H * K) + ks[None, :]
    tl.store(grad_k_ptr + grad_base + grad_offset, rounded(grad_k, grad_k_ptr.dtype.element_ty), mask=key_mask)

    whole = tl.sum(tl.where(ts == C - 1, from_start, 0.0), axis=0)
    grad_end = tl.sum(end_dots, axis=0) + whole * tl.sum(grad_decay, axis=0)
    grad_gate = tl.load(grad_gate_ptr + chunk * C + ts) - end_dots + tl.where(ts == C - 1, grad_end, 0.0)
    # Each gate is in the sums of its document's later tokens.
    summed = (ts[:, None] >= ts[None, :]) & (ts[None, :] > start[:, None])
    grad_g = tl.sum(tl.where(summed, grad_gate[:, None], 0.0), axis=0)
    tl.store(grad_g_ptr + (token * H + head % H) + ts * H, grad_g, mask=in_chunk)
