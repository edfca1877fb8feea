"""Mamba-3's gradients of one chunk and head, in the notation of `mamba3_backward`: Queries, then Keys.

What one hands to the other is float32 by chunk and head: vectors [C], and the queries' part of theta's gradient.

The gradient of theta is taken with the rounded q and k of the products: only so does what turns both cancel. For the
same reason both parts multiply with the same rounded gradients of pairs, which have s in them: k goes without it.
What a token's gate gets as one that is written, <k, dkh>, and as one that is decayed is in the products with v as well:
<gam q, J> = <dY, gam S~ q> and <e F, kh> = <v, e E^T kh>, so neither needs dq or dk. Of pairs both sums are of one
tile: where a gate is large, they must cancel.
"""

import triton
import triton.language as tl

from .decays import document_starts, start_decay
from .mamba3 import _LENGTHS
from .mamba3_tiles import (
    earlier_decay,
    end_decay,
    later_decay,
    load_group,
    load_speed,
    masked_sum,
    rotation,
    sigmoid,
    store_group,
    turn,
)
from .primitives import diagonal, dot, rounded


@triton.jit
def _store_gradient(
    sum_ptr, rows_ptr, grad, TRUE: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    FIRST: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A group of columns, FIRST and following of the rows; and the sums over tokens, at TRUE, TRUE + STEP and so on."""
    columns = tl.arange(0, WIDTH)
    tl.store(sum_ptr + TRUE + STEP * columns, tl.sum(grad, axis=0), mask=columns < COUNT)
    store_group(rows_ptr, tl.arange(0, C), grad, FIRST, COUNT, WIDTH, N, C, True)


@triton.jit
def _angle_gradient(
    grad_first, grad_second, rows_ptr, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BR: tl.constexpr
):
    """That of theta [C, BR], from those of the turned columns and these, loaded again: see `_values`."""
    columns = tl.arange(0, BR)
    offset = tl.arange(0, C)[:, None] * N + columns[None, :]
    first = tl.load(rows_ptr + offset, mask=(columns < R)[None, :], other=0.0, volatile=True).to(tl.float32)
    second = tl.load(rows_ptr + R + offset, mask=(columns < R)[None, :], other=0.0, volatile=True).to(tl.float32)
    return grad_second * first - grad_first * second


@triton.jit
def _values(tile, ptr, vs, in_chunk, P: tl.constexpr, WHOLE: tl.constexpr, AGAIN: tl.constexpr = False):
    """[C, BV] of x, or what has its shape; `ptr`: the chunk's rows. WHOLE: the tile that is given, which is all."""
    if WHOLE and not AGAIN:
        return tile
    else:
        return tl.load(ptr + vs[None, :], mask=in_chunk[:, None] & (vs < P)[None, :], other=0.0, volatile=AGAIN)


@triton.jit
def _state(
    tile, ptr, vs, N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, WHOLE: tl.constexpr
):
    """Some rows [BV, BN] of a state; see `_values`."""
    if WHOLE:
        return tile
    else:
        return load_group(ptr, vs, 0, N, BN, N, P, P % BV == 0)


@triton.jit
def _between_values(
    a, b, a_ptr, b_ptr, in_chunk, P: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """a b^T: dY V^T, or V dY^T."""
    product = tl.zeros([C, C], tl.float32)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        right = tl.trans(_values(b, b_ptr, vs, in_chunk, P, WHOLE))
        product = dot(_values(a, a_ptr, vs, in_chunk, P, WHOLE), right, product, DTYPE, PRECISION)
    return product


@triton.jit
def _through_state(
    values, values_ptr, states_ptr, in_chunk, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Values [C, P] times a state, in a group of its columns: dY S~, or V E."""
    product = tl.zeros([C, WIDTH], tl.float32)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        block = _values(values, values_ptr, vs, in_chunk, P, WHOLE)
        columns = load_group(states_ptr, vs, FIRST, COUNT, WIDTH, N, P, P % BV == 0)
        product = dot(block, columns, product, DTYPE, PRECISION)
    return product


@triton.jit
def _halves(x, C: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right half of [C, WIDTH]. Of a product: in which no number leaves its thread."""
    return tl.split(tl.permute(tl.reshape(x, [C, 2, WIDTH // 2]), (0, 2, 1)))


@triton.jit
def _gradient(
    values, state, rows, values_ptr, states_ptr, rows_ptr, pairs, factor, in_chunk, N: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr, BV: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """factor (values state) + pairs rows, in three groups of columns: of q with S~ and k, or of k with E and q."""
    if WHOLE and N == 4 * R and R == BR and N <= 128:
        product = dot(values, state, tl.zeros([C, N], tl.float32), DTYPE, PRECISION)
        product = dot(pairs, rows, product * factor, DTYPE, PRECISION)
        turned, rest = _halves(product, C, N)
        first, second = _halves(turned, C, 2 * R)
    else:
        ts = tl.arange(0, C)
        first = _through_state(
            values, values_ptr, states_ptr, in_chunk, 0, R, BR, N, P, C, BV, DTYPE, PRECISION, STAGES, WHOLE
        )
        columns = load_group(rows_ptr, ts, 0, R, BR, N, C, True)
        first = dot(pairs, columns, first * factor, DTYPE, PRECISION)
        second = _through_state(
            values, values_ptr, states_ptr, in_chunk, R, R, BR, N, P, C, BV, DTYPE, PRECISION, STAGES, WHOLE
        )
        columns = load_group(rows_ptr, ts, R, R, BR, N, C, True)
        second = dot(pairs, columns, second * factor, DTYPE, PRECISION)
        rest = _through_state(
            values, values_ptr, states_ptr, in_chunk, 2 * R, N - 2 * R, BX,
            N, P, C, BV, DTYPE, PRECISION, STAGES, WHOLE,
        )  # fmt: skip
        columns = load_group(rows_ptr, ts, 2 * R, N - 2 * R, BX, N, C, True)
        rest = dot(pairs, columns, rest * factor, DTYPE, PRECISION)
    return first, second, rest


@triton.jit(do_not_specialize=_LENGTHS)
def query_gradients_kernel(
    grad_y_ptr,
    grad_read_ptr,
    x_ptr,
    z_ptr,
    D_ptr,
    doc_start_ptr,
    speed_ptr,
    dt_ptr,
    own_ptr,
    scale_ptr,
    gate_sum_ptr,
    theta_ptr,
    k_rows_ptr,
    q_rows_ptr,
    states_ptr,
    grad_z_ptr,
    query_rows_ptr,
    query_bias_ptr,
    query_theta_ptr,
    query_gate_ptr,
    read_by_ptr,
    both_ptr,
    grad_both_ptr,
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
    """Queries of one chunk and head.

    `query_rows` [B, H, NC, C, N] in DTYPE: the head's part of what C gets. By chunk and head float32: the sums over
    tokens for the bias [N]; of theta [C, R] and the gate sums [C] the part that is complete here; and for Keys, each
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
    itself = ts[:, None] == ts[None, :]
    row = (token * H + head % H) * P + ts[:, None] * (H * P)
    rows = chunk * (C * N)
    tokens = chunk * C
    states_ptr += chunk * (P * N)

    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    own = tl.load(own_ptr + tokens + ts)
    from_start = start_decay(tl.load(gate_sum_ptr + tokens + ts), start)[:, None]
    k = load_group(k_rows_ptr + rows, ts, 0, N, BN, N, C, True)
    q = load_group(q_rows_ptr + rows, ts, 0, N, BN, N, C, True)
    x_ptr += row
    grad_read_ptr += row
    # Values and states are in blocks of P. If one holds all, its tiles serve throughout; else they are unused here.
    WHOLE: tl.constexpr = P <= BV
    vs = tl.arange(0, BV)
    v = _values(None, x_ptr, vs, in_chunk, P, False)
    grad_read = _values(None, grad_read_ptr, vs, in_chunk, P, False)

    # Rows are the tokens that read.
    pairs = dot(q, tl.trans(k), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    grad_scores = _between_values(
        grad_read, v, grad_read_ptr, x_ptr, in_chunk, P, C, BV, DTYPE, PRECISION, STAGES, WHOLE
    )
    both, grad_both = diagonal(pairs, C), diagonal(grad_scores, C)
    own_read = own * both + tl.load(D_ptr + head % H).to(tl.float32)
    decay = earlier_decay(scale_ptr + tokens, gate_sum_ptr + tokens, start, C)
    scores = rounded(pairs * decay, DTYPE)
    log_pair = grad_scores * scores.to(tl.float32)
    read_by, grad_gate = tl.sum(log_pair, axis=0), tl.sum(log_pair, axis=1)
    grad_pairs = rounded(tl.where(itself, (own * grad_both)[:, None], grad_scores * decay), DTYPE)
    tl.store(both_ptr + tokens + ts, both)
    tl.store(grad_both_ptr + tokens + ts, grad_both)
    tl.store(read_by_ptr + tokens + ts, read_by)
    whole_state = _state(None, states_ptr, vs, N, P, BN, BV, False)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        block = v_block + tl.arange(0, BV)
        value_mask = in_chunk[:, None] & (block < P)[None, :]
        state = _state(whole_state, states_ptr, block, N, P, BN, BV, WHOLE)
        # Loaded again, here and below: a product's tile would have to stay in registers. And before the
        # product, or the sum would be taken in the layout of what was loaded.
        grad_read_again = _values(None, grad_read_ptr, block, in_chunk, P, WHOLE, AGAIN=True)
        read = dot(q, tl.trans(state), tl.zeros([C, BV], tl.float32), DTYPE, PRECISION) * from_start
        grad_gate += tl.sum(grad_read_again.to(tl.float32) * read, axis=1)
        read = dot(scores, _values(v, x_ptr, block, in_chunk, P, WHOLE), read, DTYPE, PRECISION)
        read += own_read[:, None] * _values(None, x_ptr, block, in_chunk, P, WHOLE, AGAIN=True).to(tl.float32)
        z = tl.load(z_ptr + row + block[None, :], mask=value_mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + row + block[None, :], mask=value_mask, other=0.0).to(tl.float32)
        share = sigmoid(z)
        grad_z = read * (grad_y * (share * (1.0 + z * (1.0 - share))))
        tl.store(grad_z_ptr + row + block[None, :], rounded(grad_z, DTYPE), mask=value_mask)

    grad_first, grad_second, grad_rest = _gradient(
        grad_read, whole_state, k, grad_read_ptr, states_ptr, k_rows_ptr + rows, grad_pairs, from_start, in_chunk,
        N, P, R, C, BN, BR, BX, BV, DTYPE, PRECISION, STAGES, WHOLE,
    )  # fmt: skip
    _store_gradient(query_bias_ptr + chunk * N, query_rows_ptr + rows, grad_rest, 2 * R, 1, N - 2 * R, BX, 2 * R, N, C)
    tl.store(query_gate_ptr + tokens + ts, grad_gate - read_by)
    grad_theta = _angle_gradient(grad_first, grad_second, q_rows_ptr + rows, N, R, C, BR)
    store_group(query_theta_ptr + tokens * R, ts, grad_theta, 0, R, BR, R, C, True)
    speed = load_speed(speed_ptr + token * R, in_chunk, C, R, BR)
    dt = tl.load(dt_ptr + tokens + ts)
    cos, sin = rotation(speed, dt, theta_ptr + chunk * R, start, C, R, BR)
    grad_first, grad_second = turn(grad_first, grad_second, cos, -sin)
    _store_gradient(query_bias_ptr + chunk * N, query_rows_ptr + rows, grad_first, 0, 2, R, BR, 0, N, C)
    _store_gradient(query_bias_ptr + chunk * N, query_rows_ptr + rows, grad_second, 1, 2, R, BR, R, N, C)


@triton.jit(do_not_specialize=_LENGTHS)
def key_gradients_kernel(
    grad_read_ptr,
    x_ptr,
    D_ptr,
    doc_start_ptr,
    grad_v_out_ptr,
    speed_ptr,
    dt_ptr,
    own_ptr,
    scale_ptr,
    gate_sum_ptr,
    decay_ptr,
    theta_ptr,
    k_rows_ptr,
    q_rows_ptr,
    states_ptr,
    k_bound_ptr,
    grad_states_ptr,
    owed_k_ptr,
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
    BN: tl.constexpr,
    BR: tl.constexpr,
    BX: tl.constexpr,
    BV: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Keys of one chunk and head.

    `key_rows` [B, H, NC, C, N], `speed_rows` [.., R] in DTYPE: the head's part of what B and the speeds get. By chunk
    and head float32: the sums over tokens for the bias [N]; gradients of gate sums, of turns (ddt's part), of s and g
    by token; and the sum of turns [R] for what comes before the chunk.

    `owed_k` [B, H, NC, N]: see `owed_kernel`; `grad_v_out` [B, H, P]: what comes in for v of the last token of all.
    """
    pid = tl.program_id(0)
    n = first_chunk + pid // (BATCH * H)
    head = (pid % (BATCH * H)).to(tl.int64)
    batch = head // H
    chunk = head * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    in_chunk = ts < num_tokens - n * C
    itself = ts[:, None] == ts[None, :]
    row = (token * H + head % H) * P + ts[:, None] * (H * P)
    rows = chunk * (C * N)
    tokens = chunk * C
    states_ptr += chunk * (P * N)
    grad_states_ptr += chunk * (P * N)

    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    own = tl.load(own_ptr + tokens + ts)
    both, grad_both = tl.load(both_ptr + tokens + ts), tl.load(grad_both_ptr + tokens + ts)
    k = load_group(k_rows_ptr + rows, ts, 0, N, BN, N, C, True)
    q = load_group(q_rows_ptr + rows, ts, 0, N, BN, N, C, True)
    x_ptr += row
    grad_read_ptr += row
    # Values and states are in blocks of P. If one holds all, its tiles serve throughout; else they are unused here.
    WHOLE: tl.constexpr = P <= BV
    vs = tl.arange(0, BV)
    v = _values(None, x_ptr, vs, in_chunk, P, False)
    grad_read = _values(None, grad_read_ptr, vs, in_chunk, P, False)

    # Rows are the tokens that are read.
    pairs = dot(k, tl.trans(q), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    grad_scores = _between_values(
        v, grad_read, x_ptr, grad_read_ptr, in_chunk, P, C, BV, DTYPE, PRECISION, STAGES, WHOLE
    )
    own_read = own * both + tl.load(D_ptr + head % H).to(tl.float32)
    decay = later_decay(scale_ptr + tokens, gate_sum_ptr + tokens, start, C)
    scores = rounded(pairs * decay, DTYPE)
    grad_pairs = rounded(tl.where(itself, (own * grad_both)[:, None], grad_scores * decay), DTYPE)
    scale = tl.load(scale_ptr + tokens + ts)
    gate_sum = tl.load(gate_sum_ptr + tokens + ts)
    to_end = (scale * end_decay(gate_sum, gate_sum_ptr + tokens, start, C, HAS_DOCS))[:, None]
    is_last = (ts == tl.minimum(num_tokens - n * C, C) - 1)[:, None]
    # As numbers: a number and a vector of truth values do not mix in the interpreter.
    is_final = tl.where(n == num_chunks - 1, 1, 0)
    at_end = tl.zeros([C], tl.float32)
    whole = tl.zeros([BV], tl.float32)
    whole_state = _state(None, states_ptr, vs, N, P, BN, BV, False)
    whole_grad = _state(None, grad_states_ptr, vs, N, P, BN, BV, False)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        block = v_block + tl.arange(0, BV)
        state = _state(whole_state, states_ptr, block, N, P, BN, BV, WHOLE)
        grad_state = _state(whole_grad, grad_states_ptr, block, N, P, BN, BV, WHOLE)
        # <S~, E>, as the trace of a product.
        states = dot(state, tl.trans(grad_state), tl.zeros([BV, BV], tl.float32), DTYPE, PRECISION)
        whole += diagonal(states, BV)
        v_again = _values(None, x_ptr, block, in_chunk, P, WHOLE, AGAIN=True)
        grad_v = dot(k, tl.trans(grad_state), tl.zeros([C, BV], tl.float32), DTYPE, PRECISION) * to_end
        at_end += tl.sum(grad_v * v_again.to(tl.float32), axis=1)
        grad_v = dot(scores, _values(grad_read, grad_read_ptr, block, in_chunk, P, WHOLE), grad_v, DTYPE, PRECISION)
        again = _values(None, grad_read_ptr, block, in_chunk, P, WHOLE, AGAIN=True)
        grad_v += own_read[:, None] * again.to(tl.float32)
        # What the chunk after this one, or the next call, owes to the last token.
        owed = tl.load(grad_v_out_ptr + head * P + block, mask=block < P * is_final, other=0.0)
        owed += tl.load(grad_v_bound_ptr + (chunk + 1) * P + block, mask=block < P * (1 - is_final), other=0.0)
        grad_v += tl.where(is_last, owed[None, :], 0.0)
        value_mask = in_chunk[:, None] & (block < P)[None, :]
        tl.store(grad_x_ptr + row + block[None, :], rounded(grad_v, DTYPE), mask=value_mask)

    angles, others = tl.arange(0, BR), 2 * R + tl.arange(0, BX)
    # What the chunk after this one, or the next call, owes to k of the last token.
    owed_k = owed_k_ptr + chunk * N
    grad_first, grad_second, grad_rest = _gradient(
        v, whole_grad, q, x_ptr, grad_states_ptr, q_rows_ptr + rows, grad_pairs, to_end, in_chunk,
        N, P, R, C, BN, BR, BX, BV, DTYPE, PRECISION, STAGES, WHOLE,
    )  # fmt: skip
    owed = tl.load(owed_k + others, mask=others < N, other=0.0)
    grad_rest += tl.where(is_last, owed[None, :], 0.0)
    _store_gradient(key_bias_ptr + chunk * N, key_rows_ptr + rows, grad_rest, 2 * R, 1, N - 2 * R, BX, 2 * R, N, C)
    speed = load_speed(speed_ptr + token * R, in_chunk, C, R, BR)
    dt = tl.load(dt_ptr + tokens + ts)
    cos, sin = rotation(speed, dt, theta_ptr + chunk * R, start, C, R, BR)
    grad_theta = load_group(query_theta_ptr + tokens * R, ts, 0, R, BR, R, C, True)
    grad_theta += _angle_gradient(grad_first, grad_second, k_rows_ptr + rows, N, R, C, BR)
    owed = tl.load(owed_k + angles, mask=angles < R, other=0.0)
    owed_first = tl.where(is_last, owed[None, :], 0.0)
    owed = tl.load(owed_k + R + angles, mask=angles < R, other=0.0)
    owed_second = tl.where(is_last, owed[None, :], 0.0)
    # With k of the last token as it was handed on.
    handed_on = k_bound_ptr + (head * (num_chunks + 1) + n + 1) * N + angles
    last_first = tl.load(handed_on, mask=angles < R, other=0.0)
    last_second = tl.load(handed_on + R, mask=angles < R, other=0.0)
    grad_theta += owed_second * last_first[None, :] - owed_first * last_second[None, :]
    grad_first, grad_second = turn(grad_first + owed_first, grad_second + owed_second, cos, -sin)
    _store_gradient(key_bias_ptr + chunk * N, key_rows_ptr + rows, grad_first, 0, 2, R, BR, 0, N, C)
    _store_gradient(key_bias_ptr + chunk * N, key_rows_ptr + rows, grad_second, 1, 2, R, BR, R, N, C)

    of_state = tl.sum(at_end, axis=0) + tl.load(decay_ptr + chunk) * tl.sum(whole, axis=0)
    grad_gate = tl.load(query_gate_ptr + tokens + ts) - at_end + tl.where(ts == C - 1, of_state, 0.0)
    tl.store(grad_gate_ptr + tokens + ts, grad_gate)
    # <k, dkh>, from what is there: s times it is what all that read the token and the state's end got from it. Where s
    # is 0, so is what its gradient is multiplied with later.
    per_scale = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
    grad_scale = (tl.load(read_by_ptr + tokens + ts) + at_end) * per_scale
    tl.store(grad_scale_ptr + tokens + ts, grad_scale)
    tl.store(grad_own_ptr + tokens + ts, grad_scale + grad_both * both)

    # From the gradient of theta to those of the chunk's turns.
    speed = load_speed(speed_ptr + token * R, in_chunk, C, R, BR, AGAIN=True)
    dt = tl.load(dt_ptr + tokens + ts, volatile=True)
    seen = (ts[None, :] >= ts[:, None]) & (ts[:, None] >= start[None, :])
    grad_turn = masked_sum(seen, grad_theta)
    tl.store(grad_turn_ptr + tokens + ts, tl.sum(grad_turn * speed, axis=1))
    is_first = ((ts == 0) & (start < 0))[:, None]
    tl.store(turn_total_ptr + chunk * R + angles, tl.sum(tl.where(is_first, grad_turn, 0.0), axis=0), mask=angles < R)
    store_group(speed_rows_ptr + tokens * R, ts, grad_turn * dt[:, None], 0, R, BR, R, C, True)
