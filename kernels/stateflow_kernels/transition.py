"""The state transition (ST) and its adjoint (STB), one kernel each for every family of linear recurrences.

Per head and kernel chunk of C tokens, with the state S [K, V] before the chunk:

    Vn = U - W S          S' = Lam S + Kh^T Vn                                      (ST, in order)
    dVn = P^T dY + Kh E   E' = Lam E + Qh^T dY - W^T dVn                            (STB, in reverse order)

E is dL/dS' on entry to a chunk. Kh and Qh are given as k and q with a float32 factor a token, Lam is a scalar or
a vector [K]; without W, Vn is U. Each program owns some columns of S of one head and walks through the chunks
with the state in float32 registers, so that a walk may stop and go on at any chunk without changing a bit.

Layouts (all contiguous):
    q, k               [B, T, HK, K]; head h reads key head h // (H / HK)
    dY (grad_y)        [B, T, H, V]
    u, w, v_new, ...   "tiles" [B, H, N, C, X]: N chunks, the last one padded with zeros
    k_scale, q_scale   [B, H, N, C] float32, 0 in the padding
    decay              [B, H, N] float32, or [B, H, N, K] where VECTOR_DECAY
    states             [B, H, N, K, V] in DTYPE: the state (its gradient) as it entered each chunk
    state              [B, H, K, V] float32
"""

import triton
import triton.language as tl

from .primitives import dot, rounded

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk", "end_chunk"]


@triton.jit(do_not_specialize=_LENGTHS)
def transition_kernel(
    k_ptr,
    k_scale_ptr,
    u_ptr,
    w_ptr,
    decay_ptr,
    state_in_ptr,
    states_ptr,
    v_new_ptr,
    state_out_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    end_chunk,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_W: tl.constexpr,
    VECTOR_DECAY: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ST over the chunks first_chunk .. end_chunk - 1. Program = (batch and head, block of BV columns)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    column = pid % NV
    head = (pid // NV).to(tl.int64)
    batch = head // H
    key_head = (head % H) // (H // HK)

    ks = tl.arange(0, BK)
    vs = column * BV + tl.arange(0, BV)
    ts = tl.arange(0, C)
    k_mask = ks[None, :] < K
    v_mask = vs[None, :] < V
    state_mask = (ks[:, None] < K) & v_mask
    state_offset = ks[:, None] * V + vs[None, :]
    state = tl.load(state_in_ptr + head * K * V + state_offset, mask=state_mask, other=0.0)

    for n in tl.range(first_chunk, end_chunk, num_stages=STAGES):
        chunk = head * num_chunks + n
        token = batch * num_tokens + n * C
        seen = ts[:, None] < num_tokens - n * C
        k = tl.load(
            k_ptr + (token * HK + key_head) * K + (ts[:, None] * (HK * K) + ks[None, :]), mask=seen & k_mask, other=0.0
        )
        k_scale = tl.load(k_scale_ptr + chunk * C + ts)
        tile_offset = ts[:, None] * V + vs[None, :]
        v_new = tl.load(u_ptr + chunk * (C * V) + tile_offset, mask=v_mask, other=0.0).to(tl.float32)
        if VECTOR_DECAY:
            decay = tl.load(decay_ptr + chunk * K + ks, mask=ks < K, other=0.0)[:, None]
        else:
            decay = tl.load(decay_ptr + chunk)
        tl.store(states_ptr + chunk * (K * V) + state_offset, rounded(state, DTYPE), mask=state_mask)
        if HAS_W:
            w = tl.load(w_ptr + chunk * (C * K) + (ts[:, None] * K + ks[None, :]), mask=k_mask, other=0.0)
            v_new -= dot(w, state, tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
            tl.store(v_new_ptr + chunk * (C * V) + tile_offset, rounded(v_new, DTYPE), mask=v_mask)
        state = dot(tl.trans(k), v_new * k_scale[:, None], state * decay, DTYPE, PRECISION)

    tl.store(state_out_ptr + head * K * V + state_offset, state, mask=state_mask)


@triton.jit(do_not_specialize=_LENGTHS)
def transition_backward_kernel(
    q_ptr,
    q_scale_ptr,
    k_ptr,
    k_scale_ptr,
    w_ptr,
    decay_ptr,
    grad_y_ptr,
    grad_state_in_ptr,
    grad_v_new_ptr,
    grad_states_ptr,
    grad_state_out_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    end_chunk,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_W: tl.constexpr,
    VECTOR_DECAY: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """STB over the chunks end_chunk - 1 .. first_chunk; `grad_v_new` holds P^T dY and receives dVn."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    column = pid % NV
    head = (pid // NV).to(tl.int64)
    batch = head // H
    key_head = (head % H) // (H // HK)

    ks = tl.arange(0, BK)
    vs = column * BV + tl.arange(0, BV)
    ts = tl.arange(0, C)
    k_mask = ks[None, :] < K
    v_mask = vs[None, :] < V
    state_mask = (ks[:, None] < K) & v_mask
    state_offset = ks[:, None] * V + vs[None, :]
    grad_state = tl.load(grad_state_in_ptr + head * K * V + state_offset, mask=state_mask, other=0.0)

    for i in tl.range(0, end_chunk - first_chunk, num_stages=STAGES):
        n = end_chunk - 1 - i
        chunk = head * num_chunks + n
        token = batch * num_tokens + n * C
        seen = ts[:, None] < num_tokens - n * C
        key_base = (token * HK + key_head) * K
        key_offset = ts[:, None] * (HK * K) + ks[None, :]
        k = tl.load(k_ptr + key_base + key_offset, mask=seen & k_mask, other=0.0)
        q = tl.load(q_ptr + key_base + key_offset, mask=seen & k_mask, other=0.0)
        k_scale = tl.load(k_scale_ptr + chunk * C + ts)
        q_scale = tl.load(q_scale_ptr + chunk * C + ts)
        grad_y_base = (token * H + head % H) * V
        grad_y_offset = ts[:, None] * (H * V) + vs[None, :]
        grad_y = tl.load(grad_y_ptr + grad_y_base + grad_y_offset, mask=seen & v_mask, other=0.0).to(tl.float32)
        tile_base = chunk * (C * V)
        tile_offset = ts[:, None] * V + vs[None, :]
        from_output = tl.load(grad_v_new_ptr + tile_base + tile_offset, mask=v_mask, other=0.0).to(tl.float32)
        if VECTOR_DECAY:
            decay = tl.load(decay_ptr + chunk * K + ks, mask=ks < K, other=0.0)[:, None]
        else:
            decay = tl.load(decay_ptr + chunk)
        tl.store(grad_states_ptr + chunk * (K * V) + state_offset, rounded(grad_state, DTYPE), mask=state_mask)
        from_state = dot(k, grad_state, tl.zeros([C, BV], tl.float32), DTYPE, PRECISION)
        grad_v_new = from_output + from_state * k_scale[:, None]
        tl.store(grad_v_new_ptr + tile_base + tile_offset, rounded(grad_v_new, DTYPE), mask=v_mask)
        grad_state = dot(tl.trans(q), grad_y * q_scale[:, None], grad_state * decay, DTYPE, PRECISION)
        if HAS_W:
            w = tl.load(w_ptr + chunk * (C * K) + (ts[:, None] * K + ks[None, :]), mask=k_mask, other=0.0)
            grad_state = dot(tl.trans(w), -grad_v_new, grad_state, DTYPE, PRECISION)

    tl.store(grad_state_out_ptr + head * K * V + state_offset, grad_state, mask=state_mask)
