"""The end of Mamba-3's backward, in the notation of `mamba3_backward`: Carry, Gates back, Shared back and Sums.

They turn what each chunk and head left into the gradients of the raw projections, and take little time.
"""

import triton
import triton.language as tl

from .decays import document_starts, document_sums_by_head
from .mamba3 import _LENGTHS, _last_start
from .mamba3_tiles import element, load_group, load_speed, sigmoid, softplus, true_columns
from .primitives import rounded


@triton.jit(do_not_specialize=_LENGTHS)
def carry_kernel(
    grad_theta_ptr,
    doc_start_ptr,
    turn_total_ptr,
    grad_v_bound_ptr,
    carry_ptr,
    grad_theta_in_ptr,
    grad_v_last_ptr,
    num_tokens,
    num_chunks,
    H: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Carry of one head: `carry` [B, H, NC, R]. And dv of the token before the first."""
    head = tl.program_id(0).to(tl.int64)
    batch = head // H
    angles = tl.arange(0, BR)
    mask = angles < R
    grad = tl.load(grad_theta_ptr + head * R + angles, mask=mask, other=0.0)
    for i in tl.range(0, num_chunks, num_stages=STAGES):
        n = num_chunks - 1 - i
        offset = (head * num_chunks + n) * R + angles
        total = tl.load(turn_total_ptr + offset, mask=mask, other=0.0)
        start = _last_start(doc_start_ptr, batch, num_tokens, n, C, BR, HAS_DOCS)
        tl.store(carry_ptr + offset, grad, mask=mask)
        grad = tl.where(start < 0, grad, 0.0) + total
    tl.store(grad_theta_in_ptr + head * R + angles, grad, mask=mask)
    ps = tl.arange(0, BP)
    grad_v = tl.load(grad_v_bound_ptr + head * num_chunks * P + ps, mask=ps < P)
    tl.store(grad_v_last_ptr + head * P + ps, grad_v, mask=ps < P)


@triton.jit(do_not_specialize=_LENGTHS)
def gates_backward_kernel(
    dd_dt_ptr,
    dd_A_ptr,
    trap_ptr,
    dt_bias_ptr,
    doc_start_ptr,
    speed_ptr,
    carry_ptr,
    grad_gate_ptr,
    grad_turn_ptr,
    grad_scale_ptr,
    grad_own_ptr,
    grad_before_ptr,
    grad_dd_dt_ptr,
    grad_dd_A_ptr,
    grad_trap_ptr,
    grad_dt_bias_ptr,
    A_floor,
    num_tokens,
    num_chunks,
    first_chunk,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BR: tl.constexpr,
    NB: tl.constexpr,
    HB: tl.constexpr,
    HAS_DOCS: tl.constexpr,
):
    """Gates back of one chunk and HB heads. `grad_dt_bias` [B, H, NC]: the sums over the chunk."""
    BLOCKS: tl.constexpr = (H + HB - 1) // HB
    pid = tl.program_id(0)
    n = first_chunk + pid // (BATCH * BLOCKS)
    batch = (pid // BLOCKS % BATCH).to(tl.int64)
    hs = pid % BLOCKS * HB + tl.arange(0, HB)
    chunks = (batch * H + hs) * num_chunks + n
    token = batch * num_tokens + n.to(tl.int64) * C

    ts = tl.arange(0, C)
    in_chunk = ts < num_tokens - n * C
    valid = (hs < H)[None, :] & (ts >= 0)[:, None]
    start = document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS)
    tokens = chunks[None, :] * C + ts[:, None]
    # Sums of log gates, and each gate is in those of its document's later tokens. Turns: of this chunk, and what
    # later chunks want from the last token's document.
    angles = tl.arange(0, BR)
    speed = load_speed(speed_ptr + token * R, in_chunk, C, R, BR)
    reached = ts >= element(start, C - 1, C)
    is_last = ts == C - 1
    if HAS_DOCS:
        position = tl.minimum(n * C + ts + 1, num_tokens - 1)
        is_last = tl.load(doc_start_ptr + batch * num_tokens + position) == n * C + ts + 1
    grad_gate = tl.load(grad_gate_ptr + tokens, mask=valid, other=0.0)
    grad_log = document_sums_by_head(grad_gate, is_last, HAS_DOCS, True)
    grad_log = tl.where((ts == start)[:, None], 0.0, grad_log)
    inside = (angles < R)[:, None] & (hs < H)[None, :]
    carry = tl.load(carry_ptr + chunks[None, :] * R + angles[:, None], mask=inside, other=0.0)
    grad_turn = tl.where(reached[:, None], tl.dot(speed, carry, input_precision="tf32x3"), 0.0)
    grad_turn += tl.load(grad_turn_ptr + tokens, mask=valid, other=0.0)
    # Weights of the tokens themselves and of those before them.
    grad_own = tl.load(grad_own_ptr + tokens, mask=valid, other=0.0)
    grad_first = tl.zeros([HB], tl.float32)
    for block in tl.static_range(NB):
        grad_first += tl.load(grad_before_ptr + chunks * NB + block, mask=hs < H, other=0.0)
    grad_before = tl.load(grad_scale_ptr + tokens - 1, mask=valid & (ts > 0)[:, None], other=0.0)
    grad_before += tl.where((ts == 0)[:, None], grad_first[None, :], 0.0)

    inside = in_chunk[:, None] & (hs < H)[None, :]
    gate = (token + ts)[:, None] * H + hs[None, :]
    raw_dt = tl.load(dd_dt_ptr + gate, mask=inside, other=0.0).to(tl.float32)
    raw_dt += tl.load(dt_bias_ptr + hs, mask=hs < H, other=0.0).to(tl.float32)[None, :]
    raw_A = tl.load(dd_A_ptr + gate, mask=inside, other=0.0).to(tl.float32)
    trap = tl.load(trap_ptr + gate, mask=inside, other=0.0).to(tl.float32)
    dt = softplus(raw_dt)
    size = softplus(raw_A)
    # Where a gate leaves nothing of what came before, the sums' rounding is all that there is.
    grad_log = tl.where(tl.maximum(size, A_floor) * dt > 104.0, 0.0, grad_log)
    weight = sigmoid(trap)
    grad_dt = grad_own * weight + grad_before * sigmoid(-trap) + grad_turn - tl.maximum(size, A_floor) * grad_log
    grad_dt = tl.where(inside, grad_dt * sigmoid(raw_dt), 0.0)
    grad_A = tl.where(size < A_floor, 0.0, -dt * grad_log * sigmoid(raw_A))
    grad_trap = (grad_own - grad_before) * dt * weight * sigmoid(-trap)
    tl.store(grad_dd_dt_ptr + gate, rounded(grad_dt, grad_dd_dt_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_dd_A_ptr + gate, rounded(grad_A, grad_dd_A_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_trap_ptr + gate, rounded(grad_trap, grad_trap_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_dt_bias_ptr + chunks, tl.sum(grad_dt, axis=0), mask=hs < H)


@triton.jit
def _through_norm(
    x_ptr, factor_ptr, norm_ptr, rows_ptr, grad_x_ptr, grad_norm_ptr, inside, token,
    num_chunks, GROUPS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of B or C from those of the groups' rows, and the tokens' part of the norm's weight.

    `rows`: where those of the first group of heads and token are.
    """
    ts = tl.arange(0, BT)
    ns = tl.arange(0, BN)
    mask = inside[:, None] & (ns < N)[None, :]
    grad = tl.zeros([BT, BN], tl.float32)
    if GROUPS <= 8:
        # All at once. A load pipeline takes room from other programs.
        for h in tl.static_range(GROUPS):
            grad += load_group(rows_ptr + h * num_chunks * (C * N), ts, 0, N, BN, N, BT, True).to(tl.float32)
    else:
        for h in tl.range(0, GROUPS, num_stages=STAGES):
            grad += load_group(rows_ptr + h * num_chunks * (C * N), ts, 0, N, BN, N, BT, True).to(tl.float32)
    factor = tl.load(factor_ptr + token + ts, mask=inside, other=0.0)[:, None]
    ns = true_columns(ns, R)
    offset = token * N + ts[:, None] * N + ns[None, :]
    unit = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(grad_norm_ptr + ns, tl.sum(grad * unit, axis=0), mask=ns < N)
    grad *= tl.load(norm_ptr + ns, mask=ns < N, other=0.0).to(tl.float32)[None, :]
    along = tl.sum(grad * unit, axis=1) / N
    grad = factor * (grad - unit * along[:, None])
    tl.store(grad_x_ptr + offset, rounded(grad, grad_x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_LENGTHS)
def shared_backward_kernel(
    B_ptr,
    C_ptr,
    B_norm_ptr,
    C_norm_ptr,
    doc_start_ptr,
    B_factor_ptr,
    C_factor_ptr,
    speed_ptr,
    dt_ptr,
    carry_ptr,
    key_rows_ptr,
    query_rows_ptr,
    speed_rows_ptr,
    grad_B_ptr,
    grad_C_ptr,
    grad_angle_ptr,
    grad_B_norm_ptr,
    grad_C_norm_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    HB: tl.constexpr,
    HAS_DOCS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Shared back of BT tokens. `grad_B_norm`, `grad_C_norm`: [B, NC, C / BT, N], the programs' parts.

    The rows are [B, GROUPS, NC, C, ..]: summed over the heads of a group, which is one head or some.
    """
    PARTS: tl.constexpr = C // BT
    pid = tl.program_id(0)
    n = first_chunk + pid // (BATCH * PARTS)
    batch = (pid // PARTS % BATCH).to(tl.int64)
    first = pid % PARTS * BT
    token = batch * num_tokens + n.to(tl.int64) * C + first
    ts = tl.arange(0, BT)
    inside = ts < num_tokens - n * C - first
    part = ((batch * num_chunks + n) * PARTS + pid % PARTS) * N
    chunk = batch * H * num_chunks + n
    group = batch * GROUPS * num_chunks + n
    rows = (group * C + first) * N
    _through_norm(
        B_ptr, B_factor_ptr, B_norm_ptr, key_rows_ptr + rows, grad_B_ptr, grad_B_norm_ptr + part, inside, token,
        num_chunks, GROUPS, N, R, C, BT, BN, STAGES,
    )  # fmt: skip
    _through_norm(
        C_ptr, C_factor_ptr, C_norm_ptr, query_rows_ptr + rows, grad_C_ptr, grad_C_norm_ptr + part, inside, token,
        num_chunks, GROUPS, N, R, C, BT, BN, STAGES,
    )  # fmt: skip

    angles = tl.arange(0, BR)
    mask = inside[:, None] & (angles < R)[None, :]
    reached = first + ts >= element(document_starts(doc_start_ptr, batch, num_tokens, n, C, HAS_DOCS), C - 1, C)
    # dt times what is carried, summed over the heads, some of them at a time.
    grad = tl.zeros([BT, BR], tl.float32)
    for first_head in tl.range(0, H, HB, num_stages=1):
        hs = first_head + tl.arange(0, HB)
        chunks = chunk + hs * num_chunks
        seen = (hs < H)[:, None] & reached[None, :]
        dt = tl.load(dt_ptr + (chunks * C + first)[:, None] + ts[None, :], mask=seen, other=0.0)
        carried = (hs < H)[:, None] & (angles < R)[None, :]
        carry = tl.load(carry_ptr + chunks[:, None] * R + angles[None, :], mask=carried, other=0.0)
        grad += tl.sum(dt[:, :, None] * carry[:, None, :], axis=0)
    for h in tl.range(0, GROUPS, num_stages=1):
        of_group = speed_rows_ptr + ((group + h * num_chunks) * C + first) * R
        grad += load_group(of_group, ts, 0, R, BR, R, BT, True).to(tl.float32)
    offset = token * R + ts[:, None] * R + angles[None, :]
    speed = tl.load(speed_ptr + offset, mask=mask, other=0.0)
    grad *= 3.141592653589793 - speed * speed * 0.3183098861837907
    tl.store(grad_angle_ptr + offset, rounded(grad, grad_angle_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_sum(ptr, x, mask):
    tl.store(ptr, rounded(x, ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_LENGTHS)
def sums_kernel(
    grad_dt_bias_ptr,
    key_bias_ptr,
    query_bias_ptr,
    grad_both_ptr,
    grad_norms_ptr,
    dt_bias_ptr,
    B_bias_ptr,
    C_bias_ptr,
    D_ptr,
    B_norm_ptr,
    C_norm_ptr,
    num_tokens,
    num_chunks,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums: the gradients of the parameters, from what each chunk left of them. A head, or BT columns of a norm."""
    pid = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    if pid < H:
        ns = tl.arange(0, BN)
        ts = tl.arange(0, C)
        key = tl.zeros([ROWS, BN], tl.float32)
        query = tl.zeros([ROWS, BN], tl.float32)
        both = tl.zeros([ROWS, C], tl.float32)
        dt = tl.zeros([ROWS], tl.float32)
        for batch in range(0, BATCH):
            first = (batch * H + pid.to(tl.int64)) * num_chunks
            for n in tl.range(0, num_chunks, ROWS, num_stages=STAGES):
                inside = n + rows < num_chunks
                chunks = first + n + rows
                mask = inside[:, None] & (ns < N)[None, :]
                offset = chunks[:, None] * N + ns[None, :]
                key += tl.load(key_bias_ptr + offset, mask=mask, other=0.0)
                query += tl.load(query_bias_ptr + offset, mask=mask, other=0.0)
                offset = chunks[:, None] * C + ts[None, :]
                both += tl.load(grad_both_ptr + offset, mask=inside[:, None] & (ts >= 0)[None, :], other=0.0)
                dt += tl.load(grad_dt_bias_ptr + chunks, mask=inside, other=0.0)
        _store_sum(B_bias_ptr + pid * N + ns, tl.sum(key, axis=0), ns < N)
        _store_sum(C_bias_ptr + pid * N + ns, tl.sum(query, axis=0), ns < N)
        _store_sum(D_ptr + pid, tl.sum(tl.sum(both, axis=1), axis=0), pid < H)
        _store_sum(dt_bias_ptr + pid, tl.sum(dt, axis=0), pid < H)
    else:
        BLOCKS: tl.constexpr = (N + BT - 1) // BT
        columns = (pid - H) % BLOCKS * BT + tl.arange(0, BT)
        num_parts = BATCH * (C // BT) * num_chunks
        first_part = ((pid - H) // BLOCKS).to(tl.int64) * num_parts
        norm = tl.zeros([4 * ROWS, BT], tl.float32)
        parts = tl.arange(0, 4 * ROWS)
        for part in tl.range(0, num_parts, 4 * ROWS, num_stages=STAGES):
            of_norm = (part + parts < num_parts)[:, None] & (columns < N)[None, :]
            place = (first_part + part + parts)[:, None] * N + columns[None, :]
            norm += tl.load(grad_norms_ptr + place, mask=of_norm, other=0.0)
        if pid < H + BLOCKS:
            _store_sum(B_norm_ptr + columns, tl.sum(norm, axis=0), columns < N)
        else:
            _store_sum(C_norm_ptr + columns, tl.sum(norm, axis=0), columns < N)
