"""Mamba-3's backward kernels, in the notation of `stateflow.recurrence.mamba3` and with the layouts of `mamba3`.

After the forward's Shared, Gates, Theta, Local and Scan, which put S~ back into place:

    Local back   A' = dY^T (gam Q)                                               (a chunk and head)
    Scan back    E in the place of A', E~ = Gam E + A'; dk_0, dv_0, dd_1         (some columns of a head, in reverse)
    Gradients    dx, dz, and of q, k, angles and gates of this head              (a chunk and head)
    Carry        the gradient of theta that comes into a chunk from later ones   (a head, in reverse)
    Gates back   ddt, dA, dtrap                                                  (a chunk and head)
    Shared back  dB, dC and dangle: sums over heads, through the norms           (some tokens)

The last three are in `mamba3_finish`.

The gradient of theta is taken with the rounded q and kh of the products: only so does what turns both cancel. What
a token's gate gets as one that is written, <k, dkh>, and as one that is decayed is in the products with v as well:
<gam q, J> = <dY, gam S~ q> and <e F, kh> = <v, e E^T kh>, so neither needs dq or dk.
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
from .primitives import dot, rounded


@triton.jit(do_not_specialize=_LENGTHS)
def local_backward_kernel(
    grad_y_ptr,
    z_ptr,
    C_ptr,
    C_norm_ptr,
    C_bias_ptr,
    doc_start_ptr,
    C_factor_ptr,
    speed_ptr,
    dt_ptr,
    gate_sum_ptr,
    theta_ptr,
    grad_states_ptr,
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
    """Local back of one chunk and head."""
    pid = tl.program_id(0)
    n = first_chunk + pid // (BATCH * H)
    head = (pid % (BATCH * H)).to(tl.int64)
    batch = head // H
    chunk = head * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    in_chunk = ts < num_tokens - n * C
    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    speed = load_speed(speed_ptr + token * R, in_chunk, C, R, BR)
    dt = tl.load(dt_ptr + chunk * C + ts)
    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts)
    cos, sin = rotation(speed, dt, theta_ptr + chunk * R, start, C, R, BR)
    q_turned = turned_columns(
        C_ptr + token * N,
        C_factor_ptr + token,
        C_norm_ptr,
        C_bias_ptr + (head % H) * N,
        in_chunk,
        cos,
        sin,
        N,
        R,
        C,
        BR,
    )
    q_rest = other_columns(
        C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, C_bias_ptr + (head % H) * N, in_chunk, N, R, C, BX
    )
    from_start = start_decay(gate_sum, start)[:, None]
    q_turned = rounded(q_turned * from_start, DTYPE)
    q_rest = rounded(q_rest * from_start, DTYPE)
    turned = tl.arange(0, 2 * BR)
    rest = 2 * R + tl.arange(0, BX)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        v_mask = vs < P
        value_base = (token * H + head % H) * P
        value_offset = ts[:, None] * (H * P) + vs[None, :]
        value_mask = in_chunk[:, None] & v_mask[None, :]
        grad_y = tl.load(grad_y_ptr + value_base + value_offset, mask=value_mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + value_base + value_offset, mask=value_mask, other=0.0).to(tl.float32)
        grad_y = tl.trans(rounded(grad_y * z * sigmoid(z), DTYPE))
        added_turned = dot(grad_y, q_turned, tl.zeros([BV, 2 * BR], tl.float32), DTYPE, PRECISION)
        added_rest = dot(grad_y, q_rest, tl.zeros([BV, BX], tl.float32), DTYPE, PRECISION)
        row = grad_states_ptr + chunk * (P * N) + vs[:, None] * N
        tl.store(row + turned[None, :], rounded(added_turned, DTYPE), mask=v_mask[:, None] & (turned < 2 * R)[None, :])
        tl.store(row + rest[None, :], rounded(added_rest, DTYPE), mask=v_mask[:, None] & (rest < N)[None, :])


@triton.jit(do_not_specialize=_LENGTHS)
def scan_backward_kernel(
    before_ptr,
    decay_ptr,
    k_bound_ptr,
    v_bound_ptr,
    grad_state_ptr,
    grad_states_ptr,
    grad_k_bound_ptr,
    grad_v_bound_ptr,
    grad_before_ptr,
    grad_state_in_ptr,
    grad_k_last_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    end_chunk,
    N: tl.constexpr,
    P: tl.constexpr,
    BP: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scan back of BV columns of N of one head, all chunks.

    Leaves dk_0 [B, H, NC, N]; dv_0 [B, H, NC, NB, P] and dd_1 [B, H, NC, NB] of each of the NB blocks of columns.
    """
    NB: tl.constexpr = (N + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % NB
    head = (pid // NB).to(tl.int64)
    ns = block * BV + tl.arange(0, BV)
    ps = tl.arange(0, BP)
    mask = (ps < P)[:, None] & (ns < N)[None, :]
    outside = head * (N * P) + ns[None, :] * P + ps[:, None]
    offset = ps[:, None] * N + ns[None, :]
    grad = tl.load(grad_state_ptr + outside, mask=mask, other=0.0)
    grad_k = tl.zeros([BV], tl.float32)
    zeros_p = tl.zeros([BP], tl.int32)
    zeros_n = tl.zeros([BV], tl.int32)
    for i in tl.range(0, end_chunk - first_chunk, num_stages=STAGES):
        n = end_chunk - 1 - i
        chunk = head * num_chunks + n
        bound = head * (num_chunks + 1) + n
        added = tl.load(grad_states_ptr + chunk * (P * N) + offset, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(k_bound_ptr + bound * N + ns, mask=ns < N, other=0.0)
        v = tl.load(v_bound_ptr + bound * P + ps, mask=ps < P, other=0.0)
        before = tl.load(before_ptr + chunk + zeros_p)
        decay = tl.load(decay_ptr + chunk + zeros_n)
        tl.store(grad_states_ptr + chunk * (P * N) + offset, rounded(grad, grad_states_ptr.dtype.element_ty), mask=mask)
        grad = grad * decay[None, :] + added
        read = tl.sum(grad * k[None, :], axis=1)
        grad_k = tl.sum(grad * (before * v)[:, None], axis=0)
        tl.store(grad_k_bound_ptr + chunk * N + ns, grad_k, mask=ns < N)
        tl.store(grad_v_bound_ptr + (chunk * NB + block) * P + ps, before * read, mask=ps < P)
        tl.store(grad_before_ptr + chunk * NB + block, tl.sum(v * read, axis=0))
    tl.store(grad_state_in_ptr + outside, grad, mask=mask)
    tl.store(grad_k_last_ptr + head * N + ns, grad_k, mask=ns < N)


@triton.jit
def _load_state(states_ptr, vs, columns, END: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """Rows `vs` and some columns below END of the chunk's state."""
    return tl.load(
        states_ptr + vs[:, None] * N + columns[None, :], mask=(vs < P)[:, None] & (columns < END)[None, :], other=0.0
    )


@triton.jit
def _through_gate(
    low_grad_y, grad_y_ptr, z_ptr, states_ptr, columns, END: tl.constexpr, in_chunk, N: tl.constexpr, P: tl.constexpr,
    C: tl.constexpr, WIDTH: tl.constexpr, BV: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dY S~^T: what the queries of the chunk get from its state, in some columns [WIDTH] below END.

    `low_grad_y`: dY, if all of it is one block.
    """
    grad = tl.zeros([C, WIDTH], tl.float32)
    if P <= BV:
        state = _load_state(states_ptr, tl.arange(0, BV), columns, END, N, P)
        return dot(low_grad_y, state, grad, DTYPE, PRECISION)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        mask = in_chunk[:, None] & (vs < P)[None, :]
        z = tl.load(z_ptr + vs[None, :], mask=mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + vs[None, :], mask=mask, other=0.0).to(tl.float32)
        state = _load_state(states_ptr, vs, columns, END, N, P)
        grad = dot(rounded(grad_y * z * sigmoid(z), DTYPE), state, grad, DTYPE, PRECISION)
    return grad


@triton.jit
def _from_end(
    x_ptr, states_ptr, grad_states_ptr, columns, END: tl.constexpr, in_chunk, N: tl.constexpr, P: tl.constexpr,
    C: tl.constexpr, WIDTH: tl.constexpr, BV: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """V E^T, what the keys get from the state after the chunk, in some columns; and their part of <S~, E>."""
    grad = tl.zeros([C, WIDTH], tl.float32)
    whole = tl.zeros([BV], tl.float32)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        v = tl.load(x_ptr + vs[None, :], mask=in_chunk[:, None] & (vs < P)[None, :], other=0.0)
        end = _load_state(grad_states_ptr, vs, columns, END, N, P)
        state = _load_state(states_ptr, vs, columns, END, N, P)
        whole += tl.sum(state.to(tl.float32) * end.to(tl.float32), axis=1)
        grad = dot(v, end, grad, DTYPE, PRECISION)
    return grad, tl.sum(whole, axis=0)


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
def gradients_kernel(
    grad_y_ptr,
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
    grad_x_ptr,
    grad_z_ptr,
    query_rows_ptr,
    key_rows_ptr,
    speed_rows_ptr,
    query_bias_ptr,
    key_bias_ptr,
    grad_gate_ptr,
    grad_turn_ptr,
    turn_total_ptr,
    grad_scale_ptr,
    grad_own_ptr,
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
    NB: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of one chunk and head.

    Rows [B, T, H, N] and [B, T, H, R] in DTYPE: the head's part of what B, C and the speeds get. By chunk and head
    float32: sums over tokens for the biases [N] and D, gradients of gate sums, of turns (ddt's part), of s and g by
    token, and the sum of turns [R] for what comes before the chunk.

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
    turned = tl.arange(0, 2 * BR)
    rest = 2 * R + tl.arange(0, BX)
    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    D = tl.load(D_ptr + head % H).to(tl.float32)
    row = (token * H + head % H) * P + ts[:, None] * (H * P)
    rows = (token * H + head % H) * N + ts * (H * N)
    states_ptr += chunk * (P * N)
    grad_states_ptr += chunk * (P * N)

    # The queries: row t reads column s.
    speed = load_speed(speed_ptr + token * R, in_chunk, C, R, BR)
    dt = tl.load(dt_ptr + chunk * C + ts)
    own = tl.load(own_ptr + chunk * C + ts)
    scale = tl.load(scale_ptr + chunk * C + ts)
    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts)
    cos, sin = rotation(speed, dt, theta_ptr + chunk * R, start, C, R, BR)
    # Half of the columns after the other: all in float32 would need too many registers.
    k_turned = turned_columns(
        B_ptr + token * N,
        B_factor_ptr + token,
        B_norm_ptr,
        B_bias_ptr + (head % H) * N,
        in_chunk,
        cos,
        sin,
        N,
        R,
        C,
        BR,
    )
    q_turned = turned_columns(
        C_ptr + token * N,
        C_factor_ptr + token,
        C_norm_ptr,
        C_bias_ptr + (head % H) * N,
        in_chunk,
        cos,
        sin,
        N,
        R,
        C,
        BR,
    )
    both = tl.sum(q_turned * k_turned, axis=1)
    q_turned = rounded(q_turned, DTYPE)
    k_turned = rounded(k_turned * scale[:, None], DTYPE)
    k_rest = other_columns(
        B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, B_bias_ptr + (head % H) * N, in_chunk, N, R, C, BX
    )
    q_rest = other_columns(
        C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, C_bias_ptr + (head % H) * N, in_chunk, N, R, C, BX
    )
    both += tl.sum(q_rest * k_rest, axis=1)
    q_rest = rounded(q_rest, DTYPE)
    k_rest = rounded(k_rest * scale[:, None], DTYPE)
    own_read = (own * both + D)[:, None]
    scores = dot(q_turned, tl.trans(k_turned), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    scores = dot(q_rest, tl.trans(k_rest), scores, DTYPE, PRECISION)
    scores = rounded(tl.where(ts[:, None] > ts[None, :], scores * pair_decay(gate_sum, start, C), 0.0), DTYPE)
    from_start = start_decay(gate_sum, start)[:, None]
    grad_scores = tl.zeros([C, C], tl.float32)
    low_grad_y = rounded(tl.zeros([C, BV], tl.float32), DTYPE)
    own_grad = tl.zeros([C], tl.float32)
    grad_gate = tl.zeros([C], tl.float32)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        v_mask = vs < P
        value_mask = in_chunk[:, None] & v_mask[None, :]
        state_turned = _load_state(states_ptr, vs, turned, 2 * R, N, P)
        state_rest = _load_state(states_ptr, vs, rest, N, N, P)
        v = tl.load(x_ptr + row + vs[None, :], mask=value_mask, other=0.0)
        z = tl.load(z_ptr + row + vs[None, :], mask=value_mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + row + vs[None, :], mask=value_mask, other=0.0).to(tl.float32)
        share = sigmoid(z)
        read = dot(q_turned, tl.trans(state_turned), tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
        read = dot(q_rest, tl.trans(state_rest), read, DTYPE, PRECISION) * from_start
        grad_gate += tl.sum(grad_y * z * share * read, axis=1)
        read = dot(scores, v, read, DTYPE, PRECISION) + own_read * v.to(tl.float32)
        grad_z = grad_y * read * share * (1.0 + z * (1.0 - share))
        tl.store(grad_z_ptr + row + vs[None, :], rounded(grad_z, DTYPE), mask=value_mask)
        grad_y *= z * share
        own_grad += tl.sum(grad_y * v.to(tl.float32), axis=1)
        low_grad_y = rounded(grad_y, DTYPE)
        grad_scores = dot(low_grad_y, tl.trans(v), grad_scores, DTYPE, PRECISION)

    # What q and k of one token get from g <q, k>, by way of s k, as an element of the diagonal. Where s is 0, so is
    # what is divided by it, and what its gradient is multiplied with later.
    per_scale = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)
    diagonal = own * own_grad * per_scale
    log_pair = grad_scores * scores.to(tl.float32)
    read_by = tl.sum(log_pair, axis=0)
    grad_gate += tl.sum(log_pair, axis=1) - read_by
    grad_scores = tl.where(ts[:, None] > ts[None, :], grad_scores * pair_decay(gate_sum, start, C), 0.0)
    grad_scores = rounded(tl.where(ts[:, None] == ts[None, :], diagonal[:, None], grad_scores), DTYPE)
    grad_rest = _through_gate(
        low_grad_y, grad_y_ptr + row, z_ptr + row, states_ptr, rest, N, in_chunk,
        N, P, C, BX, BV, DTYPE, PRECISION, STAGES,
    )  # fmt: skip
    grad_rest = dot(grad_scores, k_rest, grad_rest * from_start, DTYPE, PRECISION)
    _store_rows(grad_rest, rest, N, rows, query_rows_ptr, query_bias_ptr + chunk * N, in_chunk)
    grad_turned = _through_gate(
        low_grad_y, grad_y_ptr + row, z_ptr + row, states_ptr, turned, 2 * R, in_chunk,
        N, P, C, 2 * BR, BV, DTYPE, PRECISION, STAGES,
    )  # fmt: skip
    grad_turned = dot(grad_scores, k_turned, grad_turned * from_start, DTYPE, PRECISION)
    grad_theta = angle_gradient(grad_turned, q_turned.to(tl.float32), C, BR)
    grad_turned = turn(grad_turned, cos, -sin, C, BR)
    _store_rows(grad_turned, turned, 2 * R, rows, query_rows_ptr, query_bias_ptr + chunk * N, in_chunk)

    # The keys: row s is read by column t. Behind the barrier all is loaded and turned again: kept, it would not fit
    # into the registers.
    tl.debug_barrier()
    speed = load_speed(speed_ptr + token * R, in_chunk, C, R, BR)
    dt = tl.load(dt_ptr + chunk * C + ts)
    own = tl.load(own_ptr + chunk * C + ts)
    scale = tl.load(scale_ptr + chunk * C + ts)
    gate_sum = tl.load(gate_sum_ptr + chunk * C + ts)
    cos, sin = rotation(speed, dt, theta_ptr + chunk * R, start, C, R, BR)
    k_turned = turned_columns(
        B_ptr + token * N,
        B_factor_ptr + token,
        B_norm_ptr,
        B_bias_ptr + (head % H) * N,
        in_chunk,
        cos,
        sin,
        N,
        R,
        C,
        BR,
    )
    k_turned = rounded(k_turned * scale[:, None], DTYPE)
    q_turned = turned_columns(
        C_ptr + token * N,
        C_factor_ptr + token,
        C_norm_ptr,
        C_bias_ptr + (head % H) * N,
        in_chunk,
        cos,
        sin,
        N,
        R,
        C,
        BR,
    )
    q_turned = rounded(q_turned, DTYPE)
    k_rest = other_columns(
        B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, B_bias_ptr + (head % H) * N, in_chunk, N, R, C, BX
    )
    k_rest = rounded(k_rest * scale[:, None], DTYPE)
    q_rest = other_columns(
        C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, C_bias_ptr + (head % H) * N, in_chunk, N, R, C, BX
    )
    q_rest = rounded(q_rest, DTYPE)
    scores = dot(k_turned, tl.trans(q_turned), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    scores = dot(k_rest, tl.trans(q_rest), scores, DTYPE, PRECISION)
    scores = tl.where(ts[None, :] > ts[:, None], scores * pair_decay_transposed(gate_sum, start, C), 0.0)
    scores = rounded(scores, DTYPE)
    to_end = end_decay(gate_sum, start, C)[:, None]
    is_last = (ts == tl.minimum(num_tokens - n * C, C) - 1)[:, None]
    # As numbers: a number and a vector of truth values do not mix in the interpreter.
    is_final = tl.where(n == num_chunks - 1, 1, 0)
    is_inner = 1 - is_final
    grad_scores = tl.zeros([C, C], tl.float32)
    at_end = tl.zeros([C], tl.float32)
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        v_mask = vs < P
        value_mask = in_chunk[:, None] & v_mask[None, :]
        end_turned = _load_state(grad_states_ptr, vs, turned, 2 * R, N, P)
        end_rest = _load_state(grad_states_ptr, vs, rest, N, N, P)
        v = tl.load(x_ptr + row + vs[None, :], mask=value_mask, other=0.0)
        z = tl.load(z_ptr + row + vs[None, :], mask=value_mask, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + row + vs[None, :], mask=value_mask, other=0.0).to(tl.float32)
        grad_y *= z * sigmoid(z)
        low_grad_y = rounded(grad_y, DTYPE)
        grad_v = dot(k_turned, tl.trans(end_turned), tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
        grad_v = dot(k_rest, tl.trans(end_rest), grad_v, DTYPE, PRECISION) * to_end
        at_end += tl.sum(grad_v * v.to(tl.float32), axis=1)
        grad_v = dot(scores, low_grad_y, grad_v, DTYPE, PRECISION) + own_read * grad_y
        # What the chunk after this one, or the next call, owes to the last token.
        v_next = tl.load(grad_v_out_ptr + head * P + vs, mask=vs < P * is_final, other=0.0)
        for block in tl.static_range(NB):
            part = grad_v_bound_ptr + ((chunk + 1) * NB + block) * P + vs
            v_next += tl.load(part, mask=vs < P * is_inner, other=0.0)
        grad_v += tl.where(is_last, v_next[None, :], 0.0)
        tl.store(grad_x_ptr + row + vs[None, :], rounded(grad_v, DTYPE), mask=value_mask)
        grad_scores = dot(v, tl.trans(low_grad_y), grad_scores, DTYPE, PRECISION)

    grad_scores = tl.where(ts[None, :] > ts[:, None], grad_scores * pair_decay_transposed(gate_sum, start, C), 0.0)
    grad_scores = rounded(tl.where(ts[:, None] == ts[None, :], diagonal[:, None], grad_scores), DTYPE)
    next_ptr = grad_k_bound_ptr + (chunk + 1) * N
    grad_rest, whole = _from_end(
        x_ptr + row, states_ptr, grad_states_ptr, rest, N, in_chunk, N, P, C, BX, BV, DTYPE, PRECISION, STAGES
    )
    grad_rest = dot(grad_scores, q_rest, grad_rest * to_end, DTYPE, PRECISION) * scale[:, None]
    from_next = tl.load(grad_k_out_ptr + head * N + rest, mask=rest < N * is_final, other=0.0)
    from_next += tl.load(next_ptr + rest, mask=rest < N * is_inner, other=0.0)
    grad_rest += tl.where(is_last, from_next[None, :], 0.0)
    _store_rows(grad_rest, rest, N, rows, key_rows_ptr, key_bias_ptr + chunk * N, in_chunk)
    grad_turned, whole_turned = _from_end(
        x_ptr + row, states_ptr, grad_states_ptr, turned, 2 * R, in_chunk, N, P, C, 2 * BR, BV, DTYPE, PRECISION,
        STAGES,
    )  # fmt: skip
    grad_turned = dot(grad_scores, q_turned, grad_turned * to_end, DTYPE, PRECISION)
    grad_theta += angle_gradient(grad_turned, k_turned.to(tl.float32), C, BR)
    from_next = tl.load(grad_k_out_ptr + head * N + turned, mask=turned < 2 * R * is_final, other=0.0)
    from_next += tl.load(next_ptr + turned, mask=turned < 2 * R * is_inner, other=0.0)
    from_next = tl.where(is_last, from_next[None, :], 0.0)
    # k of the last token, as it was handed on.
    last_k = tl.load(k_bound_ptr + (head * (num_chunks + 1) + n + 1) * N + turned, mask=turned < 2 * R, other=0.0)
    grad_theta += angle_gradient(from_next, tl.where(is_last, last_k[None, :], 0.0), C, BR)
    grad_turned = turn(grad_turned * scale[:, None] + from_next, cos, -sin, C, BR)
    _store_rows(grad_turned, turned, 2 * R, rows, key_rows_ptr, key_bias_ptr + chunk * N, in_chunk)

    at_last = tl.sum(at_end, axis=0) + element(start_decay(gate_sum, start), C - 1, C) * (whole + whole_turned)
    tl.store(grad_gate_ptr + chunk * C + ts, grad_gate - at_end + tl.where(ts == C - 1, at_last, 0.0))
    # <k, dkh>, from what is there: s times it is what all that read the token and the state's end got from it.
    grad_scale = (read_by + at_end) * per_scale
    tl.store(grad_scale_ptr + chunk * C + ts, grad_scale)
    tl.store(grad_own_ptr + chunk * C + ts, grad_scale + own_grad * both)
    tl.store(grad_D_ptr + chunk, tl.sum(own_grad, axis=0))

    # From the gradient of theta to those of the chunk's turns.
    later = (ts[None, :] >= ts[:, None]) & (ts[:, None] >= start[None, :])
    grad_turn = masked_sum(later, grad_theta)
    tl.store(grad_turn_ptr + chunk * C + ts, tl.sum(grad_turn * speed, axis=1))
    angles = tl.arange(0, BR)
    first = ((ts == 0) & (start < 0))[:, None]
    tl.store(turn_total_ptr + chunk * R + angles, tl.sum(tl.where(first, grad_turn, 0.0), axis=0), mask=angles < R)
    speed_rows = (token * H + head % H) * R + ts[:, None] * (H * R) + angles[None, :]
    grad_speed = rounded(grad_turn * dt[:, None], DTYPE)
    tl.store(speed_rows_ptr + speed_rows, grad_speed, mask=in_chunk[:, None] & (angles < R)[None, :])
