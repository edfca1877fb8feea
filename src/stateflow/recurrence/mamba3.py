"""The recurrence of Mamba-3 (one input, one output a head) in chunk form, with its hand-derived backward."""

import torch
from torch import Tensor

from . import reference
from .backends import choose
from .numerics import at_least_float32

KERNEL_CHUNK = 64


def _check(
    x: Tensor, z: Tensor, B: Tensor, C: Tensor, dd_dt: Tensor, dd_A: Tensor, trap: Tensor, angle: Tensor,
    dt_bias: Tensor, B_norm: Tensor, C_norm: Tensor, B_bias: Tensor, C_bias: Tensor, D: Tensor,
    theta: Tensor, state: Tensor, k_last: Tensor, v_last: Tensor, chunk_size: int,
) -> None:  # fmt: skip
    if x.dim() != 4 or B.dim() != 3 or angle.dim() != 3:
        raise ValueError(
            f"x {list(x.shape)} must be [batch, tokens, heads, P], B {list(B.shape)} [batch, tokens, N] and angle "
            f"{list(angle.shape)} [batch, tokens, R]"
        )
    batch, num_tokens, num_heads, p_dim = x.shape
    n_dim, num_angles = B.shape[2], angle.shape[2]
    if num_tokens < 1:
        raise ValueError("mamba3 needs at least 1 token, got 0: leave empty chunks out")
    by_token, by_head = (batch, num_tokens), (batch, num_heads)
    expected = {
        "z": (z, (*by_token, num_heads, p_dim)),
        "B": (B, (*by_token, n_dim)),
        "C": (C, (*by_token, n_dim)),
        "dd_dt": (dd_dt, (*by_token, num_heads)),
        "dd_A": (dd_A, (*by_token, num_heads)),
        "trap": (trap, (*by_token, num_heads)),
        "angle": (angle, (*by_token, num_angles)),
        "dt_bias": (dt_bias, (num_heads,)),
        "B_norm": (B_norm, (n_dim,)),
        "C_norm": (C_norm, (n_dim,)),
        "B_bias": (B_bias, (num_heads, n_dim)),
        "C_bias": (C_bias, (num_heads, n_dim)),
        "D": (D, (num_heads,)),
        "theta": (theta, (*by_head, num_angles)),
        "state": (state, (*by_head, n_dim, p_dim)),
        "k_last": (k_last, (*by_head, n_dim)),
        "v_last": (v_last, (*by_head, p_dim)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(
                f"{name} {list(tensor.shape)} must be {list(shape)} beside x {list(x.shape)}, B {list(B.shape)} and "
                f"angle {list(angle.shape)}"
            )
    if not 1 <= num_angles <= n_dim // 2:
        raise ValueError(
            f"angle has R = {num_angles}: it turns pairs of the N = {n_dim} dimensions of B and C, so R must be from "
            f"1 to {n_dim // 2}"
        )
    for name, carried in (("theta", theta), ("state", state), ("k_last", k_last), ("v_last", v_last)):
        if carried.dtype != at_least_float32(carried):
            raise ValueError(
                f"{name} has {carried.dtype} but must be at least float32: keep states out of autocasts "
                "(under FSDP2: MixedPrecisionPolicy(cast_forward_inputs=False))"
            )
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def kernel_misfit() -> str | None:
    """Why the Triton kernels cannot take a problem, whatever its device; None if they can."""
    return "there are none for Mamba-3"


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
    doc_start_BT: Tensor | None = None,
    *,
    norm_eps: float = 1e-5,
    A_floor: float = 1e-4,
    chunk_size: int = KERNEL_CHUNK,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything of a Mamba-3 layer between its projections, from their raw outputs to the input of the last one.

    With v = x, per batch entry, token t and head h; theta, B, C and angle by dimension n or angle i:

        dt = softplus(dd_dt + dt_bias)        A = -max(softplus(dd_A), A_floor)        lam = sigmoid(trap)
        theta_t = (theta_{t-1} + pi tanh(angle) dt) mod 2 pi
        k = R(theta) (rms(B) B_norm + B_bias)        q = R(theta) (rms(C) C_norm + C_bias)
        S_t = e^{A dt} (S_{t-1} + (1 - lam) dt k_{t-1} v_{t-1}^T) + lam dt k_t v_t^T
        y = (S_t^T q_t + D v_t) silu(z)

    rms(a) = a / sqrt(mean(a^2) + norm_eps) over N. R turns each pair (2i, 2i+1), i < R: (a, b) becomes
    (a cos - b sin, a sin + b cos); dimensions from 2R on stay. A first token of a document has theta_{t-1} = 0,
    S_{t-1} = 0 and no previous token: of its dt, A and lam only lam dt and the turn matter.

    The inputs are all that a backward needs, so no normalised, biased, rotated or gated copy is kept. The silu
    gate is inside, or the value before it would have to be kept for the gradient of z.

    Args:
        x_BTHP, z_BTHP: values and gates of H heads.
        B_BTN, C_BTN: of one group that all heads share, before norm, bias and rotation.
        dd_dt_BTH, dd_A_BTH, trap_BTH: one number a head, raw.
        angle_BTR: R angles that all heads share, raw; R at most N / 2.
        dt_bias_H, B_norm_N, C_norm_N, B_bias_HN, C_bias_HN, D_H: parameters, of any floating type.
        theta_BHR, state_BHNP, k_last_BHN, v_last_BHP: what the token before the first one left: its angle and
            S, its k (with bias and rotation, before any scale) and its v. Each at least float32. Zeros before a
            sequence.
        doc_start_BT: None, or int64: the position, relative to this call's first token, of the first token of
            each token's document; negative where it lies before this call.
        norm_eps, A_floor: as above.
        chunk_size: tokens that are computed at once. Cutting a sequence at multiples of it gives the same bits.
        backend: see `backends`.

    All inputs by token may have 16 bits, everything is computed in at least float32.

    Returns:
        y_BTHP in x's dtype, and theta, state, k_last and v_last after the last token, each in the dtype of the
        incoming one. All five are differentiable in all inputs; the gradient of mod is 1. Two correct angles may
        differ by a multiple of 2 pi at the edge of [0, 2 pi): compare them by sine and cosine.

    Raises:
        ValueError: shapes that do not fit, a state of 16 bits, chunk_size < 1, an unknown backend, "triton"
            where the kernels cannot run.
    """
    tensors = (
        x_BTHP, z_BTHP, B_BTN, C_BTN, dd_dt_BTH, dd_A_BTH, trap_BTH, angle_BTR,
        dt_bias_H, B_norm_N, C_norm_N, B_bias_HN, C_bias_HN, D_H,
        theta_BHR, state_BHNP, k_last_BHN, v_last_BHP,
    )  # fmt: skip
    _check(*tensors, chunk_size)
    if choose("mamba3", backend, *tensors, misfit=kernel_misfit()) == "reference":
        return reference.mamba3(*tensors, doc_start_BT, norm_eps, A_floor)
    return _mamba3(*tensors, doc_start_BT, float(norm_eps), float(A_floor), chunk_size)
