"""The gated delta rule in chunk form, with its hand-derived backward.

Per head, with the log gate g <= 0, the write strength beta (b below) and the state S of K x V:

    S_t = e^{g_t} S_{t-1} + b_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T          o_t = scale S_t^T q_t

Chunk form. A kernel chunk has C tokens as rows, S is the state at its start. L_ts = sum of g_r over s < r <=
t is summed as such for each pair, never as a difference of two running sums, so nothing cancels; D = e^L
where t >= s and both tokens are of one document, else 0; gam_t = e^{g_1 + .. + g_t} up to the chunk's first
reset, from there on 0; e = the last row of D; Gam = gam_C.

    Pre   A = tril(b K K^T . D, -1);  (I + A) U = b V;  (I + A) W = b gam K
    ST    Vn = U - W S;  S' = Gam S + (e K)^T Vn                                            (chunk after
    chunk) Out   O = scale ((gam Q) S + (Q K^T . D) Vn)

Backward, given dO and E = dL/dS'. With P = scale Q K^T . D:

    OG    dVn = P^T dO
    STB   dVn += (e K) E;  E <- Gam E + scale (gam Q)^T dO - W^T dVn                        (reverse order)
    PG    dP = dO Vn^T;  F = Vn E^T with E as it entered the chunk;  J = dO S^T
          dQ = scale (gam J + (dP . D) K);  dK = e F + scale (dP . D)^T Q
          (I + A)^T [a, c] = [dVn, -dVn S^T];  dV = b a;  db = <a, v> + gam <c, k>;  dK += b gam c
          dA = -tril(a U^T + c W^T, -1);  M = dA . D;  dK += b (M K) + M^T (b K);  db += <M K, k>
          dL = dP . P + dA . A, and e_s <F_s, k_s> added to its last row
          dlog gam_t = gam_t (scale <J_t, q_t> + b_t <c_t, k_t>), and Gam <S, E> added to its last element
          dg_r = sum over t >= r > s of dL_ts, plus the sum over t >= r of dlog gam_t

The triangular systems are solved by substitution. Everything but ST and STB is batched over the chunks; those
two run over them in order and keep the state in at least float32. All sums stay within a chunk, so that
cutting a sequence at multiples of C gives the same bits as not cutting it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..chunks import check_documents
from . import reference
from .backends import choose, size_misfit
from .chunk_layout import ChunkLayout, decays, decays_backward, matmul_by_chunk
from .numerics import at_least_float32, l2_normalize
from .operation import Operation

KERNEL_CHUNK = 64


class _Chunks(NamedTuple):
    """The inputs and the Pre part of every chunk, [N, X, ...] with X = B * H. q already carries the scale."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor  # [N, X, C, 1]
    pair_decay: Tensor  # D
    from_start: Tensor  # gam [N, X, C, 1]
    to_end: Tensor  # e [N, X, C, 1]
    whole: Tensor  # Gam [N, X, 1, 1]
    system: Tensor  # A
    u: Tensor
    w: Tensor


def _prepare(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    doc_start_BT: Tensor | None,
    scale: float,
    layout: ChunkLayout,
) -> _Chunks:
    repeats = layout.num_heads // k_BTHK.shape[2]
    if repeats > 1:
        q_BTHK, k_BTHK = (x.repeat_interleave(repeats, dim=2) for x in (q_BTHK, k_BTHK))
    q, k, v, g, beta = (layout.split(x) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH))
    beta = beta[..., None]
    starts = None if doc_start_BT is None else layout.doc_starts(doc_start_BT)
    pair_decay, from_start = decays(g, starts)
    from_start = from_start[..., None]
    system = (beta * matmul_by_chunk(k, k.mT) * pair_decay).tril(-1)
    right_sides = torch.cat([beta * v, beta * from_start * k], dim=-1)
    # The unit diagonal is implied, so the solver reads only A.
    solution = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
    u, w = (x.contiguous() for x in solution.split([v.shape[-1], k.shape[-1]], dim=-1))
    return _Chunks(
        q=q * scale,
        k=k,
        v=v,
        beta=beta,
        pair_decay=pair_decay,
        from_start=from_start,
        to_end=pair_decay[..., -1, :, None],
        whole=from_start[..., -1:, :],
        system=system,
        u=u,
        w=w,
    )


def _state_transition(chunks: _Chunks, state_XKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ST: the state at every chunk's start, Vn of every chunk, and the state after the last one."""
    k_end = (chunks.k * chunks.to_end).mT
    states, news = [], []
    for n in range(len(chunks.k)):
        states.append(state_XKV)
        news.append(torch.baddbmm(chunks.u[n], chunks.w[n], state_XKV, alpha=-1))
        state_XKV = torch.baddbmm(chunks.whole[n] * state_XKV, k_end[n], news[-1])
    return torch.stack(states), torch.stack(news), state_XKV


def _layout(
    q_BTHK: Tensor, v_BTHV: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk_size: int
) -> ChunkLayout:
    # Padded tokens have k = 0, b = 0 and g = 0: they change nothing.
    return ChunkLayout.of(v_BTHV, chunk_size, at_least_float32(q_BTHK, v_BTHV, g, beta, state))


@Operation("stateflow::gated_delta_rule")
def _gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    doc_start_BT: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    layout = _layout(q_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, chunk_size)
    chunks = _prepare(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, doc_start_BT, scale, layout)
    states, v_new, state = _state_transition(chunks, state_BHKV.to(layout.dtype).flatten(0, 1))
    scores = matmul_by_chunk(chunks.q, chunks.k.mT) * chunks.pair_decay
    output = matmul_by_chunk(chunks.from_start * chunks.q, states) + matmul_by_chunk(scores, v_new)
    return layout.merge(output, v_BTHV.dtype), state.view(state_BHKV.shape).to(state_BHKV.dtype)


@_gated_delta_rule.register_fake
def _(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, doc_start_BT, scale, chunk_size):
    return v_BTHV.new_empty(v_BTHV.shape), state_BHKV.new_empty(state_BHKV.shape)


@Operation("stateflow::gated_delta_rule_backward")
def _gated_delta_rule_backward(
    grad_o_BTHV: Tensor,
    grad_state_BHKV: Tensor,
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    doc_start_BT: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    layout = _layout(q_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, chunk_size)
    chunks = _prepare(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, doc_start_BT, scale, layout)
    q, k, v, beta, pair_decay, from_start, to_end, whole, system, u, w = chunks
    states, v_new, _ = _state_transition(chunks, state_BHKV.to(layout.dtype).flatten(0, 1))
    grad_o = layout.split(grad_o_BTHV)
    scores = matmul_by_chunk(q, k.mT) * pair_decay

    # OG and STB.
    grad_v_new = list(matmul_by_chunk(scores.mT, grad_o))
    from_output = matmul_by_chunk((from_start * q).mT, grad_o)
    k_end = k * to_end
    grad_state = grad_state_BHKV.to(layout.dtype).flatten(0, 1)
    incoming = [grad_state] * layout.num_chunks
    for n in reversed(range(layout.num_chunks)):
        incoming[n] = grad_state
        grad_v_new[n] = torch.baddbmm(grad_v_new[n], k_end[n], grad_state)
        grad_state = torch.baddbmm(whole[n] * grad_state + from_output[n], w[n].mT, grad_v_new[n], alpha=-1)
    grad_states, grad_v_new = torch.stack(incoming), torch.stack(grad_v_new)

    # PG through the output and the state update.
    grad_scores = matmul_by_chunk(grad_o, v_new.mT)
    grad_pair = grad_scores * pair_decay
    grad_q_start = from_start * matmul_by_chunk(grad_o, states.mT)
    grad_q = grad_q_start + matmul_by_chunk(grad_pair, k)
    grad_k_end = to_end * matmul_by_chunk(v_new, grad_states.mT)
    grad_k = grad_k_end + matmul_by_chunk(grad_pair.mT, q)
    grad_log_pair = grad_scores * scores
    grad_log_pair[..., -1, :] += (grad_k_end * k).sum(-1)
    grad_log_start = (grad_q_start * q).sum(-1)
    grad_log_start[..., -1] += whole[..., 0, 0] * (states * grad_states).sum((-2, -1))

    # PG through U and W.
    grad_solution = torch.cat([grad_v_new, -matmul_by_chunk(grad_v_new, states.mT)], dim=-1)
    grad_sides = torch.linalg.solve_triangular(system.mT, grad_solution, upper=True, unitriangular=True)
    grad_u, grad_w = (x.contiguous() for x in grad_sides.split([v.shape[-1], k.shape[-1]], dim=-1))
    grad_w_k = from_start * (grad_w * k).sum(-1, keepdim=True)
    grad_v = beta * grad_u
    grad_k = grad_k + (beta * from_start) * grad_w
    grad_log_start += (beta * grad_w_k)[..., 0]
    grad_system = (matmul_by_chunk(grad_u, u.mT) + matmul_by_chunk(grad_w, w.mT)).tril(-1).neg()
    grad_pair = grad_system * pair_decay
    grad_pair_k = matmul_by_chunk(grad_pair, k)
    grad_k = grad_k + beta * grad_pair_k + matmul_by_chunk(grad_pair.mT, beta * k)
    grad_beta = (grad_u * v).sum(-1) + grad_w_k[..., 0] + (grad_pair_k * k).sum(-1)
    grad_log_pair += grad_system * system

    grad_g = decays_backward(grad_log_pair, grad_log_start)
    grad_q_BTHK, grad_k_BTHK = (
        _sum_repeats(layout.merge(x, layout.dtype), like)
        for x, like in ((scale * grad_q, q_BTHK), (grad_k, k_BTHK))
    )
    return (
        grad_q_BTHK,
        grad_k_BTHK,
        layout.merge(grad_v, v_BTHV.dtype),
        layout.merge(grad_g, g_BTH.dtype),
        layout.merge(grad_beta, beta_BTH.dtype),
        grad_state.view(state_BHKV.shape).to(state_BHKV.dtype),
    )


def _sum_repeats(grad_BTHK: Tensor, like_BTGK: Tensor) -> Tensor:
    """Adds up the gradients of the value heads that share a key head."""
    num_key_heads = like_BTGK.shape[2]
    if grad_BTHK.shape[2] > num_key_heads:
        grad_BTHK = grad_BTHK.unflatten(2, (num_key_heads, -1)).sum(3)
    return grad_BTHK.to(like_BTGK.dtype)


@_gated_delta_rule_backward.register_fake
def _(
    grad_o, grad_state, q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, doc_start_BT, scale, chunk_size
):
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)
    return tuple(x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_o_BTHV, grad_state_BHKV):
    grads = _gated_delta_rule_backward(
        grad_o_BTHV, grad_state_BHKV, *ctx.saved_tensors, ctx.scale, ctx.chunk_size
    )
    return *grads, None, None, None


_gated_delta_rule.register_autograd(_backward, setup_context=_setup_context)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk_size: int) -> None:
    batch, num_tokens, num_heads, v_dim = v.shape
    if num_tokens < 1:
        raise ValueError("gated_delta_rule needs at least 1 token, got 0: leave empty chunks out")
    if q.shape != k.shape or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} must be [{batch}, {num_tokens}, key heads, K]"
        )
    if num_heads % k.shape[2]:
        raise ValueError(f"{num_heads} value heads are no multiple of the {k.shape[2]} key heads of q and k")
    for name, gate in (("g", g), ("beta", beta)):
        if gate.shape != v.shape[:3]:
            raise ValueError(
                f"{name} {list(gate.shape)} must have the shape of v without its last, {list(v.shape[:3])}"
            )
    if state.shape != (batch, num_heads, k.shape[3], v_dim):
        raise ValueError(f"state {list(state.shape)} must be {[batch, num_heads, k.shape[3], v_dim]}")
    for name, x in (("g", g), ("state", state)):
        if x.dtype != at_least_float32(x):
            raise ValueError(
                f"{name} has {x.dtype} but must be at least float32: keep gates and states out of autocasts "
                "(under FSDP2: MixedPrecisionPolicy(cast_forward_inputs=False))"
            )
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def _kernel_misfit(q: Tensor, k: Tensor, v: Tensor, chunk_size: int) -> str | None:
    """Why the Triton kernels cannot take these arguments, whatever their device; None if they can."""
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v must have one type, not {q.dtype}, {k.dtype} and {v.dtype}: cast them to {v.dtype}"
    if chunk_size != KERNEL_CHUNK:
        return f"they solve {KERNEL_CHUNK} tokens at once, chunk_size is {chunk_size}"
    return kernel_size_misfit(q.shape[-1], v.shape[-1], q.dtype)


def _num_segments(q: Tensor, v: Tensor) -> int:
    from stateflow_kernels.waves import walk_segments

    batch, num_tokens, num_heads, v_dim = v.shape
    return walk_segments(-(-num_tokens // KERNEL_CHUNK), batch * num_heads, q.shape[3], v_dim)


def kernel_size_misfit(k_dim: int, v_dim: int, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why the Triton kernels cannot take heads of these sizes; None if they can."""
    return size_misfit(("K", "V"), k_dim, v_dim, dtype)


def gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    doc_start_BT: Tensor | None = None,
    *,
    scale: float | None = None,
    chunk_size: int = KERNEL_CHUNK,
    backend: str = "auto",
    use_qk_l2norm_in_kernel: bool = False,
    l2norm_eps: float = 1e-6,
    exact_order: bool = True,
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T,  o_t = scale S_t^T q_t.

    Args:
        q_BTHK, k_BTHK: queries and keys of H_k heads, L2-normalised by the caller, or here by the flag below.
        v_BTHV: values of H heads, H a multiple of H_k; value head h reads key head h // (H / H_k).
        g_BTH: log decay <= 0, at least float32. A first token of a document ignores its own.
        beta_BTH: write strength, in (0, 1), or up to 2 where negative eigenvalues are allowed.
        state_BHKV: state before the first token, at least float32.
        doc_start_BT: None, or int64: the position, relative to this call's first token, of the first token of
            each token's document; negative where it lies before this call. Zeroes the state where it is t.
        scale: factor of the output; None is K^-0.5.
        chunk_size: tokens that are solved at once. Cutting a sequence at multiples of it gives the same bits.
        backend: see `backends`. The kernels take q, k and v of one type, chunk_size 64, and K and V that are
            multiples of 8 from 16 to 256.
        use_qk_l2norm_in_kernel: replace q and k by x / sqrt(sum x^2 + l2norm_eps); the kernels do so without
            storing a copy.
        exact_order: False lets the kernels go through a long sequence of few heads in segments at once, whose sums
            have another order: then cuts at multiples of chunk_size agree to rounding only.

    Returns:
        o_BTHV in v's dtype, and the state after the last token in the dtype of `state_BHKV`. Both are
        differentiable in q, k, v, g, beta and state.

    Raises:
        ValueError: shapes that do not fit, documents that cannot be (`chunks.check_documents`), a g or state of 16
            bits, chunk_size < 1, an unknown backend, "triton" where the kernels cannot run.
    """
    _check(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, chunk_size)
    check_documents(doc_start_BT, *v_BTHV.shape[:2])
    if scale is None:
        scale = q_BTHK.shape[-1] ** -0.5
    floating = (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)
    misfit = _kernel_misfit(q_BTHK, k_BTHK, v_BTHV, chunk_size)
    form = choose("gated_delta_rule", backend, *floating, misfit=misfit)
    if form == "triton":
        # The kernels return gradients of gates in float32; the cast gives them their type back.
        inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH.float(), state_BHKV, doc_start_BT)
        eps = float(l2norm_eps) if use_qk_l2norm_in_kernel else None
        num_segments = 1 if exact_order else _num_segments(q_BTHK, v_BTHV)
        return torch.ops.stateflow.gated_delta_rule_triton(*inputs, float(scale), eps, num_segments)[:2]
    if use_qk_l2norm_in_kernel:
        q_BTHK, k_BTHK = (l2_normalize(x, l2norm_eps) for x in (q_BTHK, k_BTHK))
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, doc_start_BT)
    if form == "chunk":
        return _gated_delta_rule(*inputs, float(scale), chunk_size)
    return reference.gated_delta_rule(*inputs, scale)
