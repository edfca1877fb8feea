"""The operations as their definitions read: token by token or with full masks, under plain autograd.

Slow and memory-hungry on purpose, and sharing no code with the fast forms: this is what those are tested
against, in float64, and what a model built with `backend="reference"` runs.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    doc_start_BT: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,  o_t = scale S_t^T q_t.

    S_{t-1} is zero where token t is the first of its document.
    """
    dtype = _compute_dtype(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)
    repeats = v_BTHV.shape[2] // k_BTHK.shape[2]
    q, k = (x.to(dtype).repeat_interleave(repeats, dim=2) for x in (q_BTHK, k_BTHK))
    v, g, beta, state = (x.to(dtype) for x in (v_BTHV, g_BTH, beta_BTH, state_BHKV))
    outputs = []
    # unbind, not x[:, t]: the backward of each index would fill a tensor of the whole sequence.
    tokens = zip(*(x.unbind(dim=1) for x in (q, k, v, g, beta)), strict=True)
    for t, (q_t, k_t, v_t, g_t, beta_t) in enumerate(tokens):
        if doc_start_BT is not None:
            first_B = doc_start_BT[:, t] == t
            state = torch.where(first_B[:, None, None, None], torch.zeros_like(state), state)
        state = g_t.exp()[..., None, None] * state
        error = v_t - torch.einsum("bhkv,bhk->bhv", state, k_t)
        state = state + torch.einsum("bhk,bhv->bhkv", k_t, beta_t[..., None] * error)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q_t))
    return torch.stack(outputs, dim=1).to(v_BTHV.dtype), state.to(state_BHKV.dtype)


def short_conv(
    x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, tail_BWC: Tensor, doc_start_BT: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y_t = silu(bias + sum_j weight[:, W-1-j] x_{t-j}), over the inputs of the token's own document."""
    dtype = _compute_dtype(x_BTC, weight_CW, tail_BWC)
    width = weight_CW.shape[1]
    inputs = torch.cat([tail_BWC.to(dtype), x_BTC.to(dtype)], dim=1)
    windows_BTCW = inputs.unfold(1, width, 1)
    if doc_start_BT is not None:
        last_T1 = torch.arange(x_BTC.shape[1], device=x_BTC.device)[:, None]
        positions_TW = last_T1 + torch.arange(1 - width, 1, device=x_BTC.device)
        own_document_BTW = positions_TW[None] >= doc_start_BT[..., None]
        windows_BTCW = torch.where(own_document_BTW[:, :, None], windows_BTCW, torch.zeros_like(windows_BTCW))
    pre = torch.einsum("btcw,cw->btc", windows_BTCW, weight_CW.to(dtype))
    y = F.silu(pre if bias_C is None else pre + bias_C.to(dtype))
    tail = inputs[:, inputs.shape[1] - (width - 1) :]
    return y.to(x_BTC.dtype), tail.to(tail_BWC.dtype, copy=True)


def prefix_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    k_prefix_BSGK: Tensor,
    v_prefix_BSGV: Tensor,
    doc_start_BT: Tensor | None,
    scale: float,
) -> Tensor:
    """Softmax over all positions p of [prefix; chunk] with p <= S + t and p >= S + doc_start[t]."""
    dtype = _compute_dtype(q_BTHK, k_BTGK, v_BTGV)
    num_tokens, prefix_len = q_BTHK.shape[1], k_prefix_BSGK.shape[1]
    repeats = q_BTHK.shape[2] // k_BTGK.shape[2]
    k = torch.cat([k_prefix_BSGK, k_BTGK], dim=1).to(dtype).repeat_interleave(repeats, dim=2)
    v = torch.cat([v_prefix_BSGV, v_BTGV], dim=1).to(dtype).repeat_interleave(repeats, dim=2)
    query_T1 = torch.arange(num_tokens, device=q_BTHK.device)[:, None]
    key_P = torch.arange(prefix_len + num_tokens, device=q_BTHK.device) - prefix_len
    visible_BTP = (key_P <= query_T1)[None]
    if doc_start_BT is not None:
        visible_BTP = visible_BTP & (key_P >= doc_start_BT[..., None])
    scores = scale * torch.einsum("bthk,bphk->bhtp", q_BTHK.to(dtype), k)
    probabilities = scores.masked_fill(~visible_BTP[:, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("bhtp,bphv->bthv", probabilities, v).to(q_BTHK.dtype)


def mamba3(
    x_BTHP: Tensor,
    z_BTHP: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    dd_dt_BTH: Tensor,
    dd_A_BTH: Tensor,
    trap_BTH: Tensor,
    angle_BTR: Tensor,
    dt_bias_H: Tensor,
    B_norm_N: Tensor,
    C_norm_N: Tensor,
    B_bias_HN: Tensor,
    C_bias_HN: Tensor,
    D_H: Tensor,
    theta_BHR: Tensor,
    state_BHNP: Tensor,
    k_last_BHN: Tensor,
    v_last_BHP: Tensor,
    doc_start_BT: Tensor | None,
    norm_eps: float,
    A_floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """S_t = e^{A dt} (S_{t-1} + (1 - lam) dt k_{t-1} v_{t-1}^T) + lam dt k_t v_t^T,  y = (S^T q + D v) silu(z).

    theta, S and the previous token's k and v are zero where token t is the first of its document.
    """
    tensors = (
        x_BTHP, z_BTHP, B_BTN, C_BTN, dd_dt_BTH, dd_A_BTH, trap_BTH, angle_BTR,
        dt_bias_H, B_norm_N, C_norm_N, B_bias_HN, C_bias_HN, D_H,
        theta_BHR, state_BHNP, k_last_BHN, v_last_BHP,
    )  # fmt: skip
    dtype = _compute_dtype(*tensors)
    v, z, B, C, dd_dt, dd_A, trap, angle = (x.to(dtype) for x in tensors[:8])
    dt_bias, B_norm, C_norm, B_bias, C_bias, D = (x.to(dtype) for x in tensors[8:14])
    theta, state, k_last, v_last = (x.to(dtype) for x in tensors[14:])

    dt = F.softplus(dd_dt + dt_bias)
    A = -F.softplus(dd_A).clamp(min=A_floor)
    weight = trap.sigmoid()
    turn = math.pi * angle.tanh()[:, :, None] * dt[..., None]
    k, q = (
        F.rms_norm(x, x.shape[-1:], norm, norm_eps)[:, :, None] + bias
        for x, norm, bias in ((B, B_norm, B_bias), (C, C_norm, C_bias))
    )
    outputs = []
    tokens = zip(*(x.unbind(dim=1) for x in (q, k, v, z, dt, A, weight, turn)), strict=True)
    for t, (q_t, k_t, v_t, z_t, dt_t, A_t, weight_t, turn_t) in enumerate(tokens):
        if doc_start_BT is not None:
            first_B = doc_start_BT[:, t] == t
            theta, state, k_last, v_last = (
                torch.where(first_B.view(-1, *[1] * (x.dim() - 1)), torch.zeros_like(x), x)
                for x in (theta, state, k_last, v_last)
            )
        theta = torch.remainder(theta + turn_t, 2 * math.pi)
        q_t, k_t = _turned(q_t, theta), _turned(k_t, theta)
        previous = ((1 - weight_t) * dt_t)[..., None, None] * torch.einsum("bhn,bhp->bhnp", k_last, v_last)
        own = (weight_t * dt_t)[..., None, None] * torch.einsum("bhn,bhp->bhnp", k_t, v_t)
        state = (A_t * dt_t).exp()[..., None, None] * (state + previous) + own
        read = torch.einsum("bhnp,bhn->bhp", state, q_t) + D[:, None] * v_t
        outputs.append(read * F.silu(z_t))
        k_last, v_last = k_t, v_t
    incoming = (theta_BHR, state_BHNP, k_last_BHN, v_last_BHP)
    carried = (x.to(like.dtype) for x, like in zip((theta, state, k_last, v_last), incoming, strict=True))
    return torch.stack(outputs, dim=1).to(x_BTHP.dtype), *carried


def _turned(x_BHN: Tensor, theta_BHR: Tensor) -> Tensor:
    """Pairs (2i, 2i+1) of x turned by theta_i; what lies behind the last pair stays."""
    num_turned = 2 * theta_BHR.shape[-1]
    # torch.complex copies: a view as complex numbers must begin at an even place, which those of an odd N do not.
    pair = torch.complex(x_BHN[..., 0:num_turned:2], x_BHN[..., 1:num_turned:2])
    turned = torch.view_as_real(pair * torch.polar(torch.ones_like(theta_BHR), theta_BHR)).flatten(-2)
    return torch.cat([turned, x_BHN[..., num_turned:]], dim=-1)
