"""The recurrence of Mamba-3 (one input, one output a head) in chunk form, with its hand-derived backward.

Per head, with k_t and q_t after norm, bias and rotation, a_t = A dt <= 0, the weights g_t = lam dt of a token and
d_t = (1 - lam) dt of the one before it, and the state S of N x P (see `mamba3` for how all these come about):

    S_t = e^{a_t} (S_{t-1} + d_t k_{t-1} v_{t-1}^T) + g_t k_t v_t^T          y_t = (S_t^T q_t + D v_t) silu(z_t)

Chunk form. A kernel chunk has C tokens as rows, S is the state at its start and k_0, v_0 the token before it.
With s_t = g_t + d_{t+1} (d_{C+1} = 0) every token is written once, kh = s k, and only the diagonal of what a token
reads differs. L is the pairwise decay D of `chunk_layout.decays` below its diagonal, gam its decay from the chunk's
start, e its last row, Gam = gam_C.

    Pre   theta: sums of pi tanh(angle) dt within the chunk and document, on top of the chunk's incoming angle
    ST    S~ = S + d_1 k_0 v_0^T;  S' = Gam S~ + (e kh)^T V                                  (chunk after chunk)
    Out   Y = gam (Q S~) + (Q kh^T . L) V + (g <q, k> + D) V;  y = Y silu(z)

Backward, given dY (already times silu(z)) and E = dL/dS':

    STB   E~ = Gam E + (gam Q)^T dY = dL/dS~ = dL/dS                                         (reverse order)
          dk_0 = d_1 E~ v_0;  dv_0 = d_1 E~^T k_0;  dd_1 = k_0^T E~ v_0: the last row of the chunk before
    PG    X = (dY V^T) . L;  J = dY S~^T;  F = V E^T;  c = <dY, v>
          dQ = gam J + X kh + g c k;  dkh = X^T Q + e F;  dK = s dkh + g c q
          dV = (Q kh^T . L)^T dY + e (kh E) + (g <q, k> + D) dY;  dD = sum of c
          ds = <k, dkh>;  dg = ds + c <q, k>;  dd_{t+1} = ds_t
          dL = X . (Q kh^T), and e_s <F_s, kh_s> added to its last row
          dlog gam = gam <q, J>, and Gam <S~, E> added to its last element
          dtheta_i = dx_{2i+1} x_{2i} - dx_{2i} x_{2i+1}, over the rotated x in {q, k}, after dk_0 has been added,
              but without the terms g c k and g c q: a turn of both leaves <q, k>, and so would these cancel
          dturn = sums of dtheta over this and later tokens of the document

Every chunk gets what it needs from the one before through S, theta, k_0 and v_0 alone, and all sums stay within a
chunk, so that cutting a sequence at multiples of C gives the same bits as not cutting it.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..chunks import check_documents
from . import reference
from .backends import choose, size_misfit
from .chunk_layout import ChunkLayout, decays, decays_backward, matmul_by_chunk
from .numerics import at_least_float32, sigmoid, softplus
from .operation import Operation

KERNEL_CHUNK = 64


class Inputs(NamedTuple):
    """The tensors that the operation takes and whose gradients its backward returns, in order; see `mamba3`."""

    x: Tensor
    z: Tensor
    B: Tensor
    C: Tensor
    dd_dt: Tensor
    dd_A: Tensor
    trap: Tensor
    angle: Tensor
    dt_bias: Tensor
    B_norm: Tensor
    C_norm: Tensor
    B_bias: Tensor
    C_bias: Tensor
    D: Tensor
    theta: Tensor
    state: Tensor
    k_last: Tensor
    v_last: Tensor


def _sums_within_documents(x_NXCR: Tensor, starts_NXC: Tensor | None, backward: bool = False) -> Tensor:
    """Sums over the tokens of a chunk and document up to each token, or from each on; log2(C) plain additions.

    Of other documents nothing is added, not even zero times their numbers.
    """
    size = x_NXCR.shape[2]
    token_C = torch.arange(size, device=x_NXCR.device)
    distance = 1
    while distance < size:
        moved = x_NXCR.roll(-distance if backward else distance, dims=2)
        visible = (token_C < size - distance) if backward else (token_C >= distance)
        if starts_NXC is not None:
            same = token_C - distance >= starts_NXC  # this token and the one `distance` before it
            visible = visible & (same.roll(-distance, dims=2) if backward else same)
        x_NXCR = x_NXCR + moved.masked_fill(~visible[..., None], 0.0)
        distance *= 2
    return x_NXCR


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """R(theta) x; with -sin its inverse."""
    num_turned = 2 * cos.shape[-1]
    even, odd = x[..., 0:num_turned:2], x[..., 1:num_turned:2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([turned, x[..., num_turned:]], dim=-1)


def _angle_gradient(grad: Tensor, x: Tensor, num_angles: int) -> Tensor:
    """The gradient of theta from that of the rotated x = R(theta) .."""
    even, odd = (slice(first, 2 * num_angles, 2) for first in (0, 1))
    return grad[..., odd] * x[..., even] - grad[..., even] * x[..., odd]


def _unit(x: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) and the factor."""
    x = x.to(dtype)
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * factor, factor


class _Gates(NamedTuple):
    """Of every token: [B, T, H], the turn's speed [B, T, R]."""

    dt: Tensor
    A: Tensor
    weight: Tensor  # lam
    speed: Tensor  # pi tanh(angle)


def _gates(inputs: Inputs, A_floor: float, dtype: torch.dtype) -> _Gates:
    return _Gates(
        dt=softplus(inputs.dd_dt.to(dtype) + inputs.dt_bias.to(dtype)),
        A=-softplus(inputs.dd_A.to(dtype)).clamp(min=A_floor),
        weight=sigmoid(inputs.trap.to(dtype)),
        speed=math.pi * inputs.angle.to(dtype).tanh(),
    )


class _Chunks(NamedTuple):
    """The Pre part of every chunk, [N, X, ...] with X = B * H."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor  # [N, X, C, R]
    sin: Tensor
    own: Tensor  # g [N, X, C, 1]
    before: Tensor  # d_1 [N, X, 1, 1]
    scale: Tensor  # s [N, X, C, 1]
    k_scaled: Tensor  # kh
    k_before: Tensor  # k_0 [N, X, K, 1]
    v_before: Tensor  # v_0 [N, X, 1, P]
    qk: Tensor  # <q, k> [N, X, C, 1]
    D: Tensor  # [X, 1, 1]
    pair_decay: Tensor  # with its diagonal
    from_start: Tensor  # gam [N, X, C, 1]
    to_end: Tensor  # e [N, X, C, 1]
    whole: Tensor  # Gam [N, X, 1, 1]
    starts: Tensor | None  # of documents [N, X, C], within the chunk
    theta: Tensor  # after the last token [X, R]

    def scores(self) -> Tensor:
        return matmul_by_chunk(self.q, self.k_scaled.mT) * self.pair_decay.tril(-1)


def _prepare(
    inputs: Inputs, gates: _Gates, doc_start_BT: Tensor | None, norm_eps: float, layout: ChunkLayout
) -> _Chunks:
    dtype = layout.dtype
    starts = None if doc_start_BT is None else layout.doc_starts(doc_start_BT)
    # Gates before the padding: a padded token must have dt = 0.
    turn = layout.split(gates.speed[:, :, None] * gates.dt[..., None])
    own = layout.split(gates.weight * gates.dt)[..., None]
    before = layout.split((1 - gates.weight) * gates.dt)[..., None]
    pair_decay, from_start = decays(layout.split(gates.A * gates.dt), starts)

    turned = _sums_within_documents(turn, starts)
    theta_XR = inputs.theta.to(dtype).flatten(0, 1)
    incoming = []
    for n in range(layout.num_chunks):
        incoming.append(theta_XR)
        kept = theta_XR if starts is None else theta_XR.masked_fill(starts[n, :, -1:] >= 0, 0.0)
        theta_XR = torch.remainder(kept + turned[n, :, -1], 2 * math.pi)
    incoming = torch.stack(incoming)[:, :, None]
    theta = turned + (incoming if starts is None else incoming.masked_fill(starts[..., None] >= 0, 0.0))
    cos, sin = theta.cos(), theta.sin()

    def rotated(x_BTN: Tensor, norm_N: Tensor, bias_HN: Tensor) -> Tensor:
        unit, _ = _unit(x_BTN, norm_eps, dtype)
        return _rotate(layout.split((unit * norm_N.to(dtype))[:, :, None] + bias_HN.to(dtype)), cos, sin)

    k = rotated(inputs.B, inputs.B_norm, inputs.B_bias)
    q = rotated(inputs.C, inputs.C_norm, inputs.C_bias)
    v = layout.split(inputs.x)
    scale = own + F.pad(before[:, :, 1:], (0, 0, 0, 1))
    k_last, v_last = (x.to(dtype).flatten(0, 1)[None] for x in (inputs.k_last, inputs.v_last))
    return _Chunks(
        q=q,
        k=k,
        v=v,
        cos=cos,
        sin=sin,
        own=own,
        before=before[:, :, :1],
        scale=scale,
        k_scaled=scale * k,
        k_before=torch.cat([k_last, k[:-1, :, -1]])[..., None],
        v_before=torch.cat([v_last, v[:-1, :, -1]])[:, :, None],
        qk=(q * k).sum(-1, keepdim=True),
        D=inputs.D.to(dtype).repeat(layout.batch)[:, None, None],
        pair_decay=pair_decay,
        from_start=from_start[..., None],
        to_end=pair_decay[..., -1, :, None],
        whole=from_start[..., -1:, None],
        starts=starts,
        theta=theta_XR,
    )


def _state_transition(chunks: _Chunks, state_XKV: Tensor) -> tuple[Tensor, Tensor]:
    """ST: S~ of every chunk, and the state after the last one."""
    k_end = (chunks.k_scaled * chunks.to_end).mT
    added = chunks.before * chunks.k_before * chunks.v_before
    states = []
    for n in range(len(chunks.k)):
        states.append(state_XKV + added[n])
        state_XKV = torch.baddbmm(chunks.whole[n] * states[-1], k_end[n], chunks.v[n])
    return torch.stack(states), state_XKV


def _read(chunks: _Chunks, states: Tensor, scores: Tensor) -> Tensor:
    """Out without the gate: S_t^T q_t + D v_t."""
    past = matmul_by_chunk(chunks.from_start * chunks.q, states) + matmul_by_chunk(scores, chunks.v)
    return past + (chunks.own * chunks.qk + chunks.D) * chunks.v


_SCHEMA = (
    ", ".join(f"Tensor {name}" for name in Inputs._fields)
    + ", Tensor? doc_start, float norm_eps, float A_floor, int chunk_size"
)
_OUTPUTS = ("y", "theta", "state", "k_last", "v_last")


def _chunk_form(*args) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs, (doc_start_BT, norm_eps, A_floor, chunk_size) = Inputs(*args[:-4]), args[-4:]
    layout = ChunkLayout.of(inputs.x, chunk_size, at_least_float32(*inputs))
    chunks = _prepare(inputs, _gates(inputs, A_floor, layout.dtype), doc_start_BT, norm_eps, layout)
    states, state = _state_transition(chunks, inputs.state.to(layout.dtype).flatten(0, 1))
    z = layout.split(inputs.z)
    y = _read(chunks, states, chunks.scores()) * z * sigmoid(z)
    last = layout.chunk_size - layout.padding - 1
    carried = (chunks.theta, state, chunks.k[-1, :, last], chunks.v[-1, :, last])
    # Copies: an operation must not return its inputs or views of one tensor.
    return layout.merge(y, inputs.x.dtype), *(
        new.reshape(old.shape).to(old.dtype, copy=True) for new, old in zip(carried, inputs[-4:], strict=True)
    )


_mamba3 = Operation(
    "stateflow::mamba3",
    _chunk_form,
    schema=f"({_SCHEMA}) -> ({', '.join(f'Tensor {name}_out' for name in _OUTPUTS)})",
)


@_mamba3.register_fake
def _(*args):
    inputs = Inputs(*args[:-4])
    return tuple(x.new_empty(x.shape) for x in (inputs.x, *inputs[-4:]))


def _chunk_form_backward(*args) -> tuple[Tensor, ...]:
    grad_y, grad_theta, grad_state, grad_k_last, grad_v_last, *args = args
    inputs, (doc_start_BT, norm_eps, A_floor, chunk_size) = Inputs(*args[:-4]), args[-4:]
    layout = ChunkLayout.of(inputs.x, chunk_size, at_least_float32(*inputs))
    dtype = layout.dtype
    gates = _gates(inputs, A_floor, dtype)
    chunks = _prepare(inputs, gates, doc_start_BT, norm_eps, layout)
    q, k, v, starts = chunks.q, chunks.k, chunks.v, chunks.starts
    states, _ = _state_transition(chunks, inputs.state.to(dtype).flatten(0, 1))
    scores = chunks.scores()
    grad_theta, grad_state, grad_k_last, grad_v_last = (
        x.to(dtype).flatten(0, 1) for x in (grad_theta, grad_state, grad_k_last, grad_v_last)
    )

    # Through the silu gate.
    z, grad_y = layout.split(inputs.z), layout.split(grad_y)
    share = sigmoid(z)
    grad_z = grad_y * _read(chunks, states, scores) * share * (1 + z * (1 - share))
    grad_y = grad_y * z * share

    # STB.
    from_output = matmul_by_chunk((chunks.from_start * q).mT, grad_y)
    leaving, entering = [grad_state] * layout.num_chunks, [grad_state] * layout.num_chunks
    for n in reversed(range(layout.num_chunks)):
        leaving[n] = grad_state
        entering[n] = grad_state = chunks.whole[n] * grad_state + from_output[n]
    grad_leaving, grad_entering = torch.stack(leaving), torch.stack(entering)
    written = matmul_by_chunk(grad_entering, chunks.v_before.mT)
    grad_k_before = chunks.before * written
    grad_v_before = chunks.before * matmul_by_chunk(chunks.k_before.mT, grad_entering)
    grad_before_first = (chunks.k_before * written).sum((-2, -1))

    # PG.
    own_read = (grad_y * v).sum(-1, keepdim=True)
    grad_scores = matmul_by_chunk(grad_y, v.mT)
    grad_pair = grad_scores * chunks.pair_decay.tril(-1)
    grad_q_start = chunks.from_start * matmul_by_chunk(grad_y, states.mT)
    grad_q = grad_q_start + matmul_by_chunk(grad_pair, chunks.k_scaled)
    grad_k_end = chunks.to_end * matmul_by_chunk(v, grad_leaving.mT)
    grad_k_scaled = matmul_by_chunk(grad_pair.mT, q) + grad_k_end
    grad_k = chunks.scale * grad_k_scaled
    grad_v = matmul_by_chunk(scores.mT, grad_y) + chunks.to_end * matmul_by_chunk(chunks.k_scaled, grad_leaving)
    grad_v = grad_v + (chunks.own * chunks.qk + chunks.D) * grad_y
    grad_scale = (k * grad_k_scaled).sum(-1)
    grad_own = grad_scale + (own_read * chunks.qk)[..., 0]
    grad_before = torch.cat([grad_before_first[..., None], grad_scale[..., :-1]], dim=-1)
    grad_log_pair = grad_scores * scores
    grad_log_pair[..., -1, :] += (grad_k_end * chunks.k_scaled).sum(-1)
    grad_log_start = (grad_q_start * q).sum(-1)
    grad_log_start[..., -1] += chunks.whole[..., 0, 0] * (states * grad_leaving).sum((-2, -1))
    grad_decay = layout.merge(decays_backward(grad_log_pair, grad_log_start), dtype)

    # What the next chunk, or call, owes to the last token of this one.
    last = layout.chunk_size - layout.padding - 1
    grad_k[-1, :, last] += grad_k_last
    grad_v[-1, :, last] += grad_v_last
    grad_k[:-1, :, -1] += grad_k_before[1:, ..., 0]
    grad_v[:-1, :, -1] += grad_v_before[1:, :, 0]

    # Through the rotation, into the angles.
    num_angles = inputs.angle.shape[-1]
    grad_turn = _angle_gradient(grad_q, q, num_angles) + _angle_gradient(grad_k, k, num_angles)
    grad_q = grad_q + chunks.own * own_read * k
    grad_k = grad_k + chunks.own * own_read * q
    grad_turn = _sums_within_documents(grad_turn, starts, backward=True)
    token_C = torch.arange(layout.chunk_size, device=v.device)
    later, handed_on = [grad_theta] * layout.num_chunks, grad_theta
    for n in reversed(range(layout.num_chunks)):
        # What comes from later chunks reaches the tokens of the last row's document.
        reach = handed_on[:, None].expand_as(grad_turn[n])
        if starts is not None:
            reach = reach.masked_fill((token_C < starts[n, :, -1:])[..., None], 0.0)
        later[n] = reach
        handed_on = grad_turn[n, :, 0] + reach[:, 0]
        if starts is not None:
            handed_on = handed_on.masked_fill(starts[n, :, :1] >= 0, 0.0)
    grad_turn_BTHR = layout.merge(grad_turn + torch.stack(later), dtype)

    # Through the gates.
    grad_own, grad_before = layout.merge(grad_own, dtype), layout.merge(grad_before, dtype)
    dt, A, weight, speed = gates
    grad_dt = grad_own * weight + grad_before * (1 - weight) + A * grad_decay
    grad_dt = grad_dt + (grad_turn_BTHR * speed[:, :, None]).sum(-1)
    grad_dd_dt = grad_dt * sigmoid(inputs.dd_dt.to(dtype) + inputs.dt_bias.to(dtype))
    dd_A = inputs.dd_A.to(dtype)
    grad_dd_A = -(dt * grad_decay * sigmoid(dd_A)).masked_fill(softplus(dd_A) < A_floor, 0.0)
    grad_speed = (grad_turn_BTHR * dt[..., None]).sum(2)

    # Through bias and norm.
    def through_norm(grad: Tensor, x_BTN: Tensor, norm_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of x, the norm's weight and the bias."""
        grad_BTHN = layout.merge(_rotate(grad, chunks.cos, -chunks.sin), dtype)
        grad_BTN = grad_BTHN.sum(2)
        unit, factor = _unit(x_BTN, norm_eps, dtype)
        grad_unit = grad_BTN * norm_N.to(dtype)
        grad_x = factor * (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True))
        return grad_x, (grad_BTN * unit).sum((0, 1)), grad_BTHN.sum((0, 1))

    grad_B, grad_B_norm, grad_B_bias = through_norm(grad_k, inputs.B, inputs.B_norm)
    grad_C, grad_C_norm, grad_C_bias = through_norm(grad_q, inputs.C, inputs.C_norm)
    grads = Inputs(
        x=layout.merge(grad_v, inputs.x.dtype),
        z=layout.merge(grad_z, inputs.z.dtype),
        B=grad_B,
        C=grad_C,
        dd_dt=grad_dd_dt,
        dd_A=grad_dd_A,
        trap=(grad_own - grad_before) * dt * weight * (1 - weight),
        angle=grad_speed * (math.pi - speed.square() / math.pi),
        dt_bias=grad_dd_dt.sum((0, 1)),
        B_norm=grad_B_norm,
        C_norm=grad_C_norm,
        B_bias=grad_B_bias,
        C_bias=grad_C_bias,
        D=layout.merge(own_read[..., 0], dtype).sum((0, 1)),
        theta=handed_on,
        state=grad_state,
        k_last=grad_k_before[0],
        v_last=grad_v_before[0],
    )
    return tuple(grad.reshape(x.shape).to(x.dtype) for grad, x in zip(grads, inputs, strict=True))


_mamba3_backward = Operation(
    "stateflow::mamba3_backward",
    _chunk_form_backward,
    schema=(
        f"({', '.join(f'Tensor grad_{name}' for name in _OUTPUTS)}, {_SCHEMA}) -> "
        f"({', '.join(f'Tensor {name}_out' for name in Inputs._fields)})"
    ),
)


@_mamba3_backward.register_fake
def _(*args):
    return tuple(x.new_empty(x.shape) for x in args[len(_OUTPUTS) : -4])


def _setup_context(ctx, inputs, output):
    *tensors, ctx.norm_eps, ctx.A_floor, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, *grads):
    grads = _mamba3_backward(*grads, *ctx.saved_tensors, ctx.norm_eps, ctx.A_floor, ctx.chunk_size)
    return *grads, None, None, None, None


_mamba3.register_autograd(_backward, setup_context=_setup_context)


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


def kernel_size_misfit(n_dim: int, p_dim: int, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why the Triton kernels cannot take heads of these sizes; None if they can."""
    return size_misfit(("N", "P"), n_dim, p_dim, dtype)


def _kernel_misfit(inputs: Inputs, chunk_size: int) -> str | None:
    """Why the Triton kernels cannot take these arguments, whatever their device; None if they can."""
    dtypes = [x.dtype for x in inputs[:4]]
    if len(set(dtypes)) > 1:
        names = ", ".join(map(str, dtypes))
        return f"x, z, B and C must have one type, not {names}: cast them to {inputs.x.dtype}"
    if chunk_size != KERNEL_CHUNK:
        return f"they take {KERNEL_CHUNK} tokens at once, chunk_size is {chunk_size}"
    return kernel_size_misfit(inputs.B.shape[2], inputs.x.shape[3], inputs.x.dtype)


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
        backend: see `backends`. The kernels take x, z, B and C of one type, chunk_size 64, and N and P that are
            multiples of 8 from 16 to 256 (N at most 128 in float32).

    All inputs by token may have 16 bits, everything is computed in at least float32.

    Returns:
        y_BTHP in x's dtype, and theta, state, k_last and v_last after the last token, each in the dtype of the
        incoming one. All five are differentiable in all inputs; the gradient of mod is 1. Two correct angles may
        differ by a multiple of 2 pi at the edge of [0, 2 pi): compare them by sine and cosine.

    Raises:
        ValueError: shapes that do not fit, documents that cannot be (`chunks.check_documents`), a state of 16 bits,
            chunk_size < 1, an unknown backend, "triton" where the kernels cannot run.
    """
    tensors = (
        x_BTHP, z_BTHP, B_BTN, C_BTN, dd_dt_BTH, dd_A_BTH, trap_BTH, angle_BTR,
        dt_bias_H, B_norm_N, C_norm_N, B_bias_HN, C_bias_HN, D_H,
        theta_BHR, state_BHNP, k_last_BHN, v_last_BHP,
    )  # fmt: skip
    _check(*tensors, chunk_size)
    check_documents(doc_start_BT, *x_BTHP.shape[:2])
    form = choose("mamba3", backend, *tensors, misfit=_kernel_misfit(Inputs(*tensors), chunk_size))
    if form == "reference":
        return reference.mamba3(*tensors, doc_start_BT, norm_eps, A_floor)
    operation = torch.ops.stateflow.mamba3_triton if form == "triton" else torch.ops.stateflow.mamba3
    return operation(*tensors, doc_start_BT, float(norm_eps), float(A_floor), chunk_size)
