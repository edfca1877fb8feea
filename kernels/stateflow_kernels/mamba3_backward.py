"""Mamba-3's backward kernels, in the notation of `stateflow.recurrence.mamba3` and with the layouts of `mamba3`.

After the forward's Shared, Gates, Theta, Local and Scan, which put q, k and S~ back into place:

    Local back   A' = dY^T (gam Q)                                               (a chunk and head)
    Scan back    E in the place of A', E~ = Gam E + A'; dk_0, dv_0, dd_1         (some rows of a head's S, in reverse)
    Owed         sums of dk_0 for the token before the chunk                     (a chunk and head)
    Queries      dz, of q, and what Keys wants of it                             (a chunk and head)
    Keys         dx, and of k, angles and gates of this head                     (a chunk and head)
    Carry        the gradient of theta that comes into a chunk from later ones   (a head, in reverse)
    Gates back   ddt, dA, dtrap                                                  (a chunk and some heads)
    Shared back  dB, dC and dangle: sums over heads, through the norms           (some tokens)
    Sums         of the parameters: sums over chunks                             (a head)

Queries and Keys are in `mamba3_gradients`, the last four in `mamba3_finish`.
"""

import triton
import triton.language as tl

from .decays import document_starts, start_decay
from .mamba3 import _LENGTHS
from .mamba3_tiles import load_group, sigmoid, store_group, true_columns
from .primitives import dot, rounded


@triton.jit(do_not_specialize=_LENGTHS)
def local_backward_kernel(
    grad_y_ptr,
    z_ptr,
    doc_start_ptr,
    gate_sum_ptr,
    q_rows_ptr,
    grad_read_ptr,
    grad_states_ptr,
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
    from_start = start_decay(tl.load(gate_sum_ptr + chunk * C + ts), start)[:, None]
    q = load_group(q_rows_ptr + chunk * (C * N), ts, 0, N, BN, N, C, True)
    base = (token * H + head % H) * P
    for v_block in tl.range(0, P, BV, num_stages=STAGES):
        vs = v_block + tl.arange(0, BV)
        offset = ts[:, None] * (H * P) + vs[None, :]
        mask = in_chunk[:, None] & (vs < P)[None, :]
        grad_y = tl.load(grad_y_ptr + base + offset, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + base + offset, mask=mask, other=0.0).to(tl.float32)
        grad_y *= z * sigmoid(z)
        tl.store(grad_read_ptr + base + offset, rounded(grad_y, DTYPE), mask=mask)
        grad_y = tl.trans(rounded(grad_y * from_start, DTYPE))
        added = dot(grad_y, q, tl.zeros([BV, BN], tl.float32), DTYPE, PRECISION)
        store_group(grad_states_ptr + chunk * (P * N), vs, added, 0, N, BN, N, P, P % BV == 0)


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
    """Scan back of BV rows of one head's state, all chunks.

    Leaves dv_0 [B, H, NC, P]; dk_0 [B, H, NC, NB, N] and dd_1 [B, H, NC, NB] of each of the NB blocks of rows.
    """
    NB: tl.constexpr = (P + BV - 1) // BV
    EXACT: tl.constexpr = P % BV == 0
    pid = tl.program_id(0)
    block = pid % NB
    head = (pid // NB).to(tl.int64)
    ps = block * BV + tl.arange(0, BV)
    ns = tl.arange(0, BN)
    mask = (ps < P)[:, None] & (ns < N)[None, :]
    outside = head * (N * P) + true_columns(ns, R)[None, :] * P + ps[:, None]
    grad = tl.load(grad_state_ptr + outside, mask=mask, other=0.0)
    zeros = tl.zeros([BV], tl.int32)
    for i in tl.range(0, end_chunk - first_chunk, num_stages=STAGES):
        n = end_chunk - 1 - i
        chunk = head * num_chunks + n
        bound = head * (num_chunks + 1) + n
        added = load_group(grad_states_ptr + chunk * (P * N), ps, 0, N, BN, N, P, EXACT).to(tl.float32)
        k = tl.load(k_bound_ptr + bound * N + ns, mask=ns < N, other=0.0)
        v = tl.load(v_bound_ptr + bound * P + ps, mask=ps < P, other=0.0)
        before = tl.load(before_ptr + chunk + zeros)
        decay = tl.load(decay_ptr + chunk + zeros)
        store_group(grad_states_ptr + chunk * (P * N), ps, grad, 0, N, BN, N, P, EXACT)
        grad = grad * decay[:, None] + added
        read = tl.sum(grad * k[None, :], axis=1)
        grad_k = tl.sum(grad * (before * v)[:, None], axis=0)
        tl.store(grad_k_bound_ptr + (chunk * NB + block) * N + ns, grad_k, mask=ns < N)
        tl.store(grad_v_bound_ptr + chunk * P + ps, before * read, mask=ps < P)
        tl.store(grad_before_ptr + chunk * NB + block, tl.sum(v * read, axis=0))
    tl.store(grad_state_in_ptr + outside, grad, mask=mask)


@triton.jit(do_not_specialize=_LENGTHS)
def owed_kernel(
    grad_k_out_ptr,
    grad_k_bound_ptr,
    owed_k_ptr,
    grad_k_last_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    BATCH: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    NB: tl.constexpr,
):
    """Owed of one chunk and head: dk_0 goes to the chunk before, the first one's to the call before.

    `owed_k` [B, H, NC, N]: what k of each chunk's last token gets from behind; the last chunk's is `grad_k_out`
    [B, H, N], which like `grad_k_last` has its columns in their true places.
    """
    pid = tl.program_id(0)
    n = first_chunk + pid // (BATCH * H)
    head = (pid % (BATCH * H)).to(tl.int64)
    chunk = head * num_chunks + n
    ns = tl.arange(0, BN)
    true = head * N + true_columns(ns, R)
    grad = tl.zeros([BN], tl.float32)
    for block in tl.static_range(NB):
        grad += tl.load(grad_k_bound_ptr + (chunk * NB + block) * N + ns, mask=ns < N, other=0.0)
    if n == 0:
        tl.store(grad_k_last_ptr + true, grad, mask=ns < N)
    else:
        tl.store(owed_k_ptr + (chunk - 1) * N + ns, grad, mask=ns < N)
    if n == num_chunks - 1:
        tl.store(owed_k_ptr + chunk * N + ns, tl.load(grad_k_out_ptr + true, mask=ns < N), mask=ns < N)
