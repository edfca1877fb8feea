"""The token-parallel kernels of the gated delta rule's forward, Pre and Out (backward: `gated_delta_backward`).

The notation is that of `stateflow.recurrence.gated_delta`, per head and chunk of C tokens: D the pairwise decay,
gam the decay from the chunk's start, e the decay to its end, Gam the whole chunk's. Queries and keys are read as
they come; with NORMALIZE the kernels put their inverse norms rq, rk into the factors of rows, so that no
normalised copy exists:

    A = tril(b rk_t rk_s (k k^T) . D, -1)    T = (I + A)^-1    r = b gam rk    kappa = e rk    (Pre)
    O = s rq gam (q S) + (s rq_t rk_s (q k^T) . D) Vn                                          (Out)

ST between them is `transition`'s, with b, r and kappa.

The log gates are summed within one document and one chunk (so that no bit depends on a neighbour), in float64
where the inputs are float32, else in float32 with each gate at least -100: e^-100 is nothing to 16 bits, and
larger numbers would only cost the differences of sums their digits.
"""

import triton
import triton.language as tl

from .decays import FACTORS, document_starts, document_sums, inverse_norm, pair_decay, start_decay
from .primitives import dot, rounded

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk"]


@triton.jit
def _join_blocks(system, inverse, joined, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of the diagonal blocks of twice the width; `joined`: what lies between two of them.

    [[X, 0], [-Y A' X, Y]] inverts [[X^-1, 0], [A', Y^-1]]: substitution by blocks, so nothing cancels.
    """
    zeros = tl.zeros_like(inverse)
    right = dot(tl.where(joined, system, 0.0), inverse, zeros, DTYPE, PRECISION)
    return inverse - dot(inverse, right, zeros, DTYPE, PRECISION)


@triton.jit
def _between(WIDTH: tl.constexpr, row, column):
    return (row // (2 * WIDTH) == column // (2 * WIDTH)) & (row // WIDTH > column // WIDTH)


@triton.jit
def _unit_triangular_inverse(system, C: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of the part of A [C, C] below its diagonal: first the diagonal blocks of 16, then by doubling.

    DTYPE: of the products' operands. Float16 is enough for 16-bit inputs: with keys of norm 1 and beta up to 2 no block
    has a number above 2.
    """
    NB: tl.constexpr = C // 16
    block = tl.arange(0, NB)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    small = tl.sum(tl.where(diagonal, tl.reshape(system, [NB, 16, NB, 16]), 0.0), axis=2)
    ts = tl.arange(0, 16)
    row = ts[None, :, None]
    column = ts[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(_between(1, row, column), small, 0.0)
    inverse = _join_blocks(small, inverse, _between(2, row, column), DTYPE, PRECISION)
    inverse = _join_blocks(small, inverse, _between(4, row, column), DTYPE, PRECISION)
    inverse = _join_blocks(small, inverse, _between(8, row, column), DTYPE, PRECISION)
    inverse = tl.reshape(tl.where(diagonal, inverse[:, :, None, :], 0.0), [C, C])
    ts = tl.arange(0, C)
    inverse = _join_blocks(system, inverse, _between(16, ts[:, None], ts[None, :]), DTYPE, PRECISION)
    return _join_blocks(system, inverse, _between(32, ts[:, None], ts[None, :]), DTYPE, PRECISION)


@triton.jit(do_not_specialize=_LENGTHS)
def pre_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    doc_start_ptr,
    solve_ptr,
    scores_ptr,
    gate_sum_ptr,
    k_norm_ptr,
    factors_ptr,
    scale,
    eps,
    num_tokens,
    num_chunks,
    first_chunk,
    B: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SOLVE: tl.constexpr,
    SCORES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_DTYPE: tl.constexpr,
):
    """Pre of one chunk and head: the factors of the tokens, T where SOLVE, and P where SCORES.

    Without SCORES the factors of the queries are left to `out_backward_kernel`.
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
    k = tl.load(k_ptr + key_base + key_offset, mask=key_mask, other=0.0)
    gate_base = token * H + head % H
    g = tl.load(g_ptr + gate_base + ts * H, mask=in_chunk, other=0.0)
    beta = tl.load(beta_ptr + gate_base + ts * H, mask=in_chunk, other=0.0).to(tl.float32)
    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)

    if DTYPE == tl.float32:  # noqa: SIM300
        g = g.to(tl.float64)
    else:
        g = tl.maximum(g.to(tl.float32), -100.0)
    gate_sum = document_sums(g, start, HAS_DOCS)
    k_norm = inverse_norm(k, eps, NORMALIZE, C)
    from_start = start_decay(gate_sum, start)
    # Of the chunk's last token.
    end_sum = tl.sum(tl.where(ts == C - 1, gate_sum, 0.0), axis=0)
    end_start = tl.max(start, axis=0)
    to_end = tl.exp(tl.where(ts >= end_start, (end_sum - gate_sum).to(tl.float32), float("-inf")))
    tl.store(gate_sum_ptr + chunk * C + ts, gate_sum)
    tl.store(k_norm_ptr + chunk * C + ts, k_norm)
    factors = factors_ptr + chunk * (FACTORS * C) + ts
    tl.store(factors, beta)
    tl.store(factors + C, tl.where(in_chunk, to_end * k_norm, 0.0))
    tl.store(factors + 2 * C, beta * from_start * k_norm)
    whole = tl.where(end_start < 0, tl.exp(end_sum.to(tl.float32)), 0.0)
    tl.store(factors + 3 * C, tl.zeros([C], tl.float32) + whole)
    tl.store(factors + 5 * C, gate_sum.to(tl.float32))
    tl.store(factors + 6 * C, k_norm)
    tl.store(factors + 8 * C, start.to(tl.float32))
    pairs = pair_decay(gate_sum, start, C)
    if SCORES:
        q = tl.load(q_ptr + key_base + key_offset, mask=key_mask, other=0.0)
        q_norm = inverse_norm(q, eps, NORMALIZE, C)
        tl.store(factors + 7 * C, q_norm)
        q_norm *= scale
        tl.store(factors + 4 * C, tl.where(in_chunk, q_norm * from_start, 0.0))
        scores = dot(q, tl.trans(k), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
        scores = scores * pairs * q_norm[:, None] * k_norm[None, :]
        tl.store(scores_ptr + chunk * (C * C) + (ts[:, None] * C + ts[None, :]), rounded(scores, DTYPE))
    if SOLVE:
        products = dot(k, tl.trans(k), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
        system = products * pairs * (beta * k_norm)[:, None] * k_norm[None, :]
        solve = _unit_triangular_inverse(system, C, SOLVE_DTYPE, PRECISION)
        tl.store(solve_ptr + chunk * (C * C) + (ts[:, None] * C + ts[None, :]), rounded(solve, DTYPE))


@triton.jit(do_not_specialize=_LENGTHS)
def out_kernel(
    q_ptr,
    k_ptr,
    doc_start_ptr,
    states_ptr,
    v_new_ptr,
    gate_sum_ptr,
    k_norm_ptr,
    o_ptr,
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
    """Out of one chunk and head."""
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
    q_scale = q_norm * start_decay(gate_sum, start)

    scores = dot(q, tl.trans(k), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    scores = scores * pair_decay(gate_sum, start, C) * q_norm[:, None] * k_norm[None, :]
    for v_block in tl.range(0, V, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        v_mask = vs[None, :] < V
        state = tl.load(
            states_ptr + chunk * (K * V) + (ks[:, None] * V + vs[None, :]), mask=(ks[:, None] < K) & v_mask, other=0.0
        )
        v_new = tl.load(v_new_ptr + chunk * (C * V) + (ts[:, None] * V + vs[None, :]), mask=v_mask, other=0.0)
        o = dot(q, state, tl.zeros([C, BV], tl.float32), DTYPE, PRECISION) * q_scale[:, None]
        o = dot(scores, v_new, o, DTYPE, PRECISION)
        tl.store(
            o_ptr + (token * H + head % H) * V + (ts[:, None] * (H * V) + vs[None, :]),
            rounded(o, DTYPE),
            mask=in_chunk[:, None] & v_mask,
        )
