"""Mamba-3's backward kernels, in the notation of `stateflow.recurrence.mamba3` and with the layouts of `mamba3`.

After the forward's Shared, Gates, Theta, Local and Scan, which put S~ back into place:

    Local back   A' = dY^T (gam Q)                                               (a chunk and head)
    Scan back    E in the place of A', E~ = Gam E + A'; dk_0, dv_0, dd_1         (some columns of a head, in reverse)
    Queries      dz, of q, and what Keys wants of it                             (a chunk and head)
    Keys         dx, and of k, angles and gates of this head                     (a chunk and head)
    Carry        the gradient of theta that comes into a chunk from later ones   (a head, in reverse)
    Gates back   ddt, dA, dtrap                                                  (a chunk and head)
    Shared back  dB, dC and dangle: sums over heads, through the norms           (some tokens)

Queries and Keys are in `mamba3_gradients`, the last three in `mamba3_finish`.
"""

import triton
import triton.language as tl

from .decays import document_starts, start_decay
from .mamba3 import _LENGTHS
from .mamba3_tiles import load_speed, other_columns, rotation, sigmoid, turned_columns
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
    grad_read_ptr,
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
    """Local back of one chunk and head. `grad_read` [B, T, H, P] in DTYPE: dY, the gradient before the gate z."""
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
        grad_y = rounded(grad_y * z * sigmoid(z), DTYPE)
        tl.store(grad_read_ptr + value_base + value_offset, grad_y, mask=value_mask)
        grad_y = tl.trans(grad_y)
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
