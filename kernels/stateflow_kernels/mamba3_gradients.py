"""Mamba-3's gradients of one chunk and head, in the notation of `mamba3_backward`: Queries, then Keys.

What one hands to the other is float32 by chunk and head: vectors [C], and the queries' part of theta's gradient.

The gradient of theta is taken with the rounded q and k of the products: only so does what turns both cancel. For the
same reason both kernels multiply with the same rounded gradients of pairs, which have s in them: k goes without it.
What a token's gate gets as one that is written, <k, dkh>, and as one that is decayed is in the products with v as well:
<gam q, J> = <dY, gam S~ q> and <e F, kh> = <v, e E^T kh>, so neither needs dq or dk.

Loads are volatile where something is loaded and computed again: else the compiler would keep the first result through
the loop, for which there are not enough registers.
"""

import triton
import triton.language as tl

from .decays import document_starts, pair_decay, pair_decay_transposed, start_decay
from .mamba3 import _LENGTHS
from .mamba3_tiles import (
    angle_gradient,
    element,
    end_decay,
    load_speed,
    masked_sum,
    other_columns,
    rotation,
    sigmoid,
    turn,
    turned_columns,
)
from .primitives import diagonal, dot, rounded


@triton.jit
def _load_state(states_ptr, vs, columns, END: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """Rows `vs` and some columns below END of the chunk's state."""
    return tl.load(
        states_ptr + vs[:, None] * N + columns[None, :], mask=(vs < P)[:, None] & (columns < END)[None, :], other=0.0
    )


@triton.jit
def _through_state(
    values_ptr, states_ptr, columns, END: tl.constexpr, in_chunk, N: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, BV: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Values [C, P] times the transpose of a state, in some columns [WIDTH] below END: dY S~^T, or V E^T."""
    product = tl.zeros([C, WIDTH], tl.float32)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        values = tl.load(values_ptr + vs[None, :], mask=in_chunk[:, None] & (vs < P)[None, :], other=0.0)
        state = _load_state(states_ptr, vs, columns, END, N, P)
        product = dot(values, state, product, DTYPE, PRECISION)
    return product


@triton.jit
def _inner_product(a_ptr, b_ptr, SIZE: tl.constexpr, STAGES: tl.constexpr):
    """<a, b> of two whole states of SIZE numbers: in no loop with products, which would have to hold the tiles."""
    BLOCK: tl.constexpr = 2048
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        offset = block + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + offset, mask=offset < SIZE, other=0.0).to(tl.float32)
        total += a * tl.load(b_ptr + offset, mask=offset < SIZE, other=0.0).to(tl.float32)
    return tl.sum(total, axis=0)


@triton.jit
def _store_rows(grad, columns, END: tl.constexpr, rows, rows_ptr, bias_ptr, in_chunk):
    """Gradients of unturned rows at the offsets `rows` [C], some columns; and their sums over the chunk's tokens."""
    tl.store(bias_ptr + columns, tl.sum(grad, axis=0), mask=columns < END)
    tl.store(
        rows_ptr + rows[:, None] + columns[None, :],
        rounded(grad, rows_ptr.dtype.element_ty),
        mask=in_chunk[:, None] & (columns < END)[None, :],
    )


@triton.jit(do_not_specialize=_LENGTHS)
def query_gradients_kernel(
    grad_y_ptr,
    grad_read_ptr,
    x_ptr,
    z_ptr,
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
    states_ptr,
    grad_z_ptr,
    query_rows_ptr,
    query_bias_ptr,
    query_theta_ptr,
    query_gate_ptr,
    read_by_ptr,
    both_ptr,
    grad_both_ptr,
    grad_D_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BR: tl.constexpr,
    BX: tl.constexpr,
    BV: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Queries of one chunk and head; row t of a pair reads column s.

    `query_rows` [B, T, H, N] in DTYPE: the head's part of what C gets. By chunk and head float32: the sums over tokens
    for the bias [N] and D; of theta [C, R] and the gate sums [C] the part that is complete here; and for Keys, each
    [C], the sum of what reads a token times what it gets from there, <q, k> of the token itself, and <dY, v>, which is
    what g <q, k> + D gets.
    """
    pid = tl.program_id(0)
    n = first_chunk + pid // (BATCH * H)
    head = (pid % (BATCH * H)).to(tl.int64)
    batch = head // H
    chunk = head * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    in_chunk = ts < num_tokens - n * C
    earlier = ts[:, None] > ts[None, :]
    itself = ts[:, None] == ts[None, :]
    turned = tl.arange(0, 2 * BR)
    rest = 2 * R + tl.arange(0, BX)
    row = (token * H + head % H) * P + ts[:, None] * (H * P)
    rows = (token * H + head % H) * N + ts * (H * N)
    states_ptr += chunk * (P * N)

    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    speed = load_speed(speed_ptr + token * R, in_chunk, C, R, BR)
    dt = tl.load(dt_ptr + chunk * C + ts)
    own = tl.load(own_ptr + chunk * C + ts)
    scale = tl.load(scale_ptr + chunk * C + ts)
    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts)
    cos, sin = rotation(speed, dt, theta_ptr + chunk * R, start, C, R, BR)
    k_turned = turned_columns(
        B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, B_bias_ptr + (head % H) * N, in_chunk, cos, sin,
        N, R, C, BR,
    )  # fmt: skip
    k_turned = rounded(k_turned, DTYPE)
    q_turned = turned_columns(
        C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, C_bias_ptr + (head % H) * N, in_chunk, cos, sin,
        N, R, C, BR,
    )  # fmt: skip
    q_turned = rounded(q_turned, DTYPE)
    pairs = dot(q_turned, tl.trans(k_turned), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    k_rest = other_columns(
        B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, B_bias_ptr + (head % H) * N, in_chunk, N, R, C, BX
    )
    k_rest = rounded(k_rest, DTYPE)
    q_rest = other_columns(
        C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, C_bias_ptr + (head % H) * N, in_chunk, N, R, C, BX
    )
    q_rest = rounded(q_rest, DTYPE)
    pairs = dot(q_rest, tl.trans(k_rest), pairs, DTYPE, PRECISION)
    both = diagonal(pairs, C)
    own_read = own * both + tl.load(D_ptr + head % H).to(tl.float32)
    # With what a token reads of itself on the diagonal.
    scores = tl.where(earlier, pairs * pair_decay(gate_sum, start, C) * scale[None, :], 0.0)
    scores = rounded(tl.where(itself, own_read[:, None], scores), DTYPE)
    from_start = start_decay(gate_sum, start)[:, None]
    grad_scores = tl.zeros([C, C], tl.float32)
    grad_gate = tl.zeros([C], tl.float32)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        value_mask = in_chunk[:, None] & (vs < P)[None, :]
        state_turned = _load_state(states_ptr, vs, turned, 2 * R, N, P)
        state_rest = _load_state(states_ptr, vs, rest, N, N, P)
        v = tl.load(x_ptr + row + vs[None, :], mask=value_mask, other=0.0)
        grad_read = tl.load(grad_read_ptr + row + vs[None, :], mask=value_mask, other=0.0)
        grad_scores = dot(grad_read, tl.trans(v), grad_scores, DTYPE, PRECISION)
        read = dot(q_turned, tl.trans(state_turned), tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
        read = dot(q_rest, tl.trans(state_rest), read, DTYPE, PRECISION) * from_start
        z = tl.load(z_ptr + row + vs[None, :], mask=value_mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + row + vs[None, :], mask=value_mask, other=0.0).to(tl.float32)
        share = sigmoid(z)
        grad_gate += tl.sum(grad_y * z * share * read, axis=1)
        read = dot(scores, v, read, DTYPE, PRECISION)
        grad_z = grad_y * read * share * (1.0 + z * (1.0 - share))
        tl.store(grad_z_ptr + row + vs[None, :], rounded(grad_z, DTYPE), mask=value_mask)

    grad_both = diagonal(grad_scores, C)
    log_pair = tl.where(earlier, grad_scores * scores.to(tl.float32), 0.0)
    read_by = tl.sum(log_pair, axis=0)
    tl.store(query_gate_ptr + chunk * C + ts, grad_gate + tl.sum(log_pair, axis=1) - read_by)
    tl.store(read_by_ptr + chunk * C + ts, read_by)
    tl.store(both_ptr + chunk * C + ts, both)
    tl.store(grad_both_ptr + chunk * C + ts, grad_both)
    tl.store(grad_D_ptr + chunk, tl.sum(grad_both, axis=0))
    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts, volatile=True)
    scale = tl.load(scale_ptr + chunk * C + ts, volatile=True)
    grad_pairs = tl.where(earlier, grad_scores * pair_decay(gate_sum, start, C) * scale[None, :], 0.0)
    grad_pairs = rounded(tl.where(itself, (own * grad_both)[:, None], grad_pairs), DTYPE)
    grad_rest = _through_state(
        grad_read_ptr + row, states_ptr, rest, N, in_chunk, N, P, C, BX, BV, DTYPE, PRECISION, STAGES
    )
    grad_rest = dot(grad_pairs, k_rest, grad_rest * from_start, DTYPE, PRECISION)
    _store_rows(grad_rest, rest, N, rows, query_rows_ptr, query_bias_ptr + chunk * N, in_chunk)
    grad_turned = _through_state(
        grad_read_ptr + row, states_ptr, turned, 2 * R, in_chunk, N, P, C, 2 * BR, BV, DTYPE, PRECISION, STAGES
    )
    grad_turned = dot(grad_pairs, k_turned, grad_turned * from_start, DTYPE, PRECISION)
    angles = tl.arange(0, BR)
    tl.store(
        query_theta_ptr + chunk * (C * R) + ts[:, None] * R + angles[None, :],
        angle_gradient(grad_turned, q_turned.to(tl.float32), C, BR),
        mask=(angles < R)[None, :],
    )
    grad_turned = turn(grad_turned, cos, -sin, C, BR)
    _store_rows(grad_turned, turned, 2 * R, rows, query_rows_ptr, query_bias_ptr + chunk * N, in_chunk)


@triton.jit(do_not_specialize=_LENGTHS)
def key_gradients_kernel(
    grad_read_ptr,
    x_ptr,
    B_ptr,
    C_ptr,
    B_norm_ptr,
    C_norm_ptr,
    B_bias_ptr,
    C_bias_ptr,
    D_ptr,
    doc_start_ptr,
    grad_k_out_ptr,
    grad_v_out_ptr,
    B_factor_ptr,
    C_factor_ptr,
    speed_ptr,
    dt_ptr,
    own_ptr,
    scale_ptr,
    gate_sum_ptr,
    theta_ptr,
    states_ptr,
    k_bound_ptr,
    grad_states_ptr,
    grad_k_bound_ptr,
    grad_v_bound_ptr,
    query_theta_ptr,
    query_gate_ptr,
    read_by_ptr,
    both_ptr,
    grad_both_ptr,
    grad_x_ptr,
    key_rows_ptr,
    speed_rows_ptr,
    key_bias_ptr,
    grad_gate_ptr,
    grad_turn_ptr,
    turn_total_ptr,
    grad_scale_ptr,
    grad_own_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BR: tl.constexpr,
    BX: tl.constexpr,
    BV: tl.constexpr,
    NB: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Keys of one chunk and head; row s of a pair is read by column t.

    Rows [B, T, H, N] and [B, T, H, R] in DTYPE: the head's part of what B and the speeds get. By chunk and head
    float32: sums over tokens for the bias [N], gradients of gate sums, of turns (ddt's part), of s and g by token, and
    the sum of turns [R] for what comes before the chunk.

    `grad_k_out` [B, H, N], `grad_v_out` [B, H, P]: what comes in for k and v of the last token of all.
    """
    pid = tl.program_id(0)
    n = first_chunk + pid // (BATCH * H)
    head = (pid % (BATCH * H)).to(tl.int64)
    batch = head // H
    chunk = head * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    in_chunk = ts < num_tokens - n * C
    later = ts[None, :] > ts[:, None]
    itself = ts[:, None] == ts[None, :]
    turned = tl.arange(0, 2 * BR)
    rest = 2 * R + tl.arange(0, BX)
    row = (token * H + head % H) * P + ts[:, None] * (H * P)
    rows = (token * H + head % H) * N + ts * (H * N)
    states_ptr += chunk * (P * N)
    grad_states_ptr += chunk * (P * N)

    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    speed = load_speed(speed_ptr + token * R, in_chunk, C, R, BR)
    dt = tl.load(dt_ptr + chunk * C + ts)
    own = tl.load(own_ptr + chunk * C + ts)
    scale = tl.load(scale_ptr + chunk * C + ts)
    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts)
    both = tl.load(both_ptr + chunk * C + ts)
    grad_both = tl.load(grad_both_ptr + chunk * C + ts)
    cos, sin = rotation(speed, dt, theta_ptr + chunk * R, start, C, R, BR)
    k_turned = turned_columns(
        B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, B_bias_ptr + (head % H) * N, in_chunk, cos, sin,
        N, R, C, BR,
    )  # fmt: skip
    k_turned = rounded(k_turned, DTYPE)
    q_turned = turned_columns(
        C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, C_bias_ptr + (head % H) * N, in_chunk, cos, sin,
        N, R, C, BR,
    )  # fmt: skip
    q_turned = rounded(q_turned, DTYPE)
    pairs = dot(k_turned, tl.trans(q_turned), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    k_rest = other_columns(
        B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, B_bias_ptr + (head % H) * N, in_chunk, N, R, C, BX
    )
    k_rest = rounded(k_rest, DTYPE)
    q_rest = other_columns(
        C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, C_bias_ptr + (head % H) * N, in_chunk, N, R, C, BX
    )
    q_rest = rounded(q_rest, DTYPE)
    pairs = dot(k_rest, tl.trans(q_rest), pairs, DTYPE, PRECISION)
    own_read = own * both + tl.load(D_ptr + head % H).to(tl.float32)
    scores = tl.where(later, pairs * pair_decay_transposed(gate_sum, start, C) * scale[:, None], 0.0)
    scores = rounded(tl.where(itself, own_read[:, None], scores), DTYPE)
    to_end = (scale * end_decay(gate_sum, start, C))[:, None]
    is_last = (ts == tl.minimum(num_tokens - n * C, C) - 1)[:, None]
    # As numbers: a number and a vector of truth values do not mix in the interpreter.
    is_final = tl.where(n == num_chunks - 1, 1, 0)
    is_inner = 1 - is_final
    grad_scores = tl.zeros([C, C], tl.float32)
    at_end = tl.zeros([C], tl.float32)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        value_mask = in_chunk[:, None] & (vs < P)[None, :]
        end_turned = _load_state(grad_states_ptr, vs, turned, 2 * R, N, P)
        end_rest = _load_state(grad_states_ptr, vs, rest, N, N, P)
        v = tl.load(x_ptr + row + vs[None, :], mask=value_mask, other=0.0)
        grad_read = tl.load(grad_read_ptr + row + vs[None, :], mask=value_mask, other=0.0)
        grad_scores = dot(v, tl.trans(grad_read), grad_scores, DTYPE, PRECISION)
        grad_v = dot(k_turned, tl.trans(end_turned), tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
        grad_v = dot(k_rest, tl.trans(end_rest), grad_v, DTYPE, PRECISION) * to_end
        # Loaded again: a tile of a product that only adds to an accumulator must not be used in another way.
        again = tl.load(x_ptr + row + vs[None, :], mask=value_mask, other=0.0, volatile=True)
        at_end += tl.sum(grad_v * again.to(tl.float32), axis=1)
        grad_v = dot(scores, grad_read, grad_v, DTYPE, PRECISION)
        # What the chunk after this one, or the next call, owes to the last token.
        v_next = tl.load(grad_v_out_ptr + head * P + vs, mask=vs < P * is_final, other=0.0)
        for block in tl.static_range(NB):
            part = grad_v_bound_ptr + ((chunk + 1) * NB + block) * P + vs
            v_next += tl.load(part, mask=vs < P * is_inner, other=0.0)
        grad_v += tl.where(is_last, v_next[None, :], 0.0)
        tl.store(grad_x_ptr + row + vs[None, :], rounded(grad_v, DTYPE), mask=value_mask)

    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts, volatile=True)
    scale = tl.load(scale_ptr + chunk * C + ts, volatile=True)
    grad_pairs = tl.where(later, grad_scores * pair_decay_transposed(gate_sum, start, C) * scale[:, None], 0.0)
    grad_pairs = rounded(tl.where(itself, (own * grad_both)[:, None], grad_pairs), DTYPE)
    next_ptr = grad_k_bound_ptr + (chunk + 1) * N
    grad_rest = _through_state(
        x_ptr + row, grad_states_ptr, rest, N, in_chunk, N, P, C, BX, BV, DTYPE, PRECISION, STAGES
    )
    grad_rest = dot(grad_pairs, q_rest, grad_rest * to_end, DTYPE, PRECISION)
    from_next = tl.load(grad_k_out_ptr + head * N + rest, mask=rest < N * is_final, other=0.0)
    from_next += tl.load(next_ptr + rest, mask=rest < N * is_inner, other=0.0)
    grad_rest += tl.where(is_last, from_next[None, :], 0.0)
    _store_rows(grad_rest, rest, N, rows, key_rows_ptr, key_bias_ptr + chunk * N, in_chunk)
    speed = load_speed(speed_ptr + token * R, in_chunk, C, R, BR, AGAIN=True)
    dt = tl.load(dt_ptr + chunk * C + ts, volatile=True)
    cos, sin = rotation(speed, dt, theta_ptr + chunk * R, start, C, R, BR)
    grad_turned = _through_state(
        x_ptr + row, grad_states_ptr, turned, 2 * R, in_chunk, N, P, C, 2 * BR, BV, DTYPE, PRECISION, STAGES
    )
    grad_turned = dot(grad_pairs, q_turned, grad_turned * to_end, DTYPE, PRECISION)
    grad_theta = angle_gradient(grad_turned, k_turned.to(tl.float32), C, BR)
    from_next = tl.load(grad_k_out_ptr + head * N + turned, mask=turned < 2 * R * is_final, other=0.0)
    from_next += tl.load(next_ptr + turned, mask=turned < 2 * R * is_inner, other=0.0)
    from_next = tl.where(is_last, from_next[None, :], 0.0)
    # k of the last token, as it was handed on.
    last_k = tl.load(k_bound_ptr + (head * (num_chunks + 1) + n + 1) * N + turned, mask=turned < 2 * R, other=0.0)
    grad_theta += angle_gradient(from_next, tl.where(is_last, last_k[None, :], 0.0), C, BR)
    grad_turned = turn(grad_turned + from_next, cos, -sin, C, BR)
    _store_rows(grad_turned, turned, 2 * R, rows, key_rows_ptr, key_bias_ptr + chunk * N, in_chunk)

    whole = _inner_product(states_ptr, grad_states_ptr, N * P, STAGES)
    at_last = tl.sum(at_end, axis=0) + element(start_decay(gate_sum, start), C - 1, C) * whole
    grad_gate = tl.load(query_gate_ptr + chunk * C + ts) - at_end + tl.where(ts == C - 1, at_last, 0.0)
    tl.store(grad_gate_ptr + chunk * C + ts, grad_gate)
    # <k, dkh>, from what is there: s times it is what all that read the token and the state's end got from it. Where s
    # is 0, so is what its gradient is multiplied with later.
    per_scale = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
    grad_scale = (tl.load(read_by_ptr + chunk * C + ts) + at_end) * per_scale
    tl.store(grad_scale_ptr + chunk * C + ts, grad_scale)
    tl.store(grad_own_ptr + chunk * C + ts, grad_scale + grad_both * both)

    # From the gradient of theta to those of the chunk's turns.
    angles = tl.arange(0, BR)
    query_theta = query_theta_ptr + chunk * (C * R) + ts[:, None] * R + angles[None, :]
    grad_theta += tl.load(query_theta, mask=(angles < R)[None, :], other=0.0)
    seen = (ts[None, :] >= ts[:, None]) & (ts[:, None] >= start[None, :])
    grad_turn = masked_sum(seen, grad_theta)
    tl.store(grad_turn_ptr + chunk * C + ts, tl.sum(grad_turn * speed, axis=1))
    first = ((ts == 0) & (start < 0))[:, None]
    tl.store(turn_total_ptr + chunk * R + angles, tl.sum(tl.where(first, grad_turn, 0.0), axis=0), mask=angles < R)
    speed_rows = (token * H + head % H) * R + ts[:, None] * (H * R) + angles[None, :]
    grad_speed = rounded(grad_turn * dt[:, None], DTYPE)
    tl.store(speed_rows_ptr + speed_rows, grad_speed, mask=in_chunk[:, None] & (angles < R)[None, :])
