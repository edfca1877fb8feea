"""The gated delta rule on the hand-written Triton kernels, as `torch.library` operations.

The kernels may normalise q and k themselves, so that no normalised copy exists. Kept for the backward are the
inputs and T, the inverse of the triangular system: C numbers a token and head. Where the kernels go through a sequence
in segments, also the states at their starts and their maps, (V + K) K numbers of float32 a segment and head.

On first use for a kind of problem the kernels must agree with the chunk form (`self_check`). Where no plan does,
the chunk form takes their place inside the operation: graphs, saved tensors and recomputation stay as they are.
"""

import torch
from torch import Tensor

from . import self_check
from .backends import on_device_of
from .gated_delta import _gated_delta_rule as _chunk_form
from .gated_delta import _gated_delta_rule_backward as _chunk_form_backward
from .operation import Operation

CHUNK = 64

# What `_choose_plan` said: to ask again would cost more than a launch.
_chosen: dict[tuple, object] = {}


def _plan(q_BTHK: Tensor, v_BTHV: Tensor, doc_start_BT: Tensor | None, eps: float | None, num_segments: int):
    """The plan that passed the self-check, or None for the chunk form."""
    from stateflow_kernels import plans

    shapes = v_BTHV.shape, q_BTHK.shape
    options = doc_start_BT is not None, eps is not None, num_segments
    key = v_BTHV.device, v_BTHV.dtype, shapes, options, plans.state()
    if key not in _chosen:
        _chosen[key] = _choose_plan(q_BTHK, v_BTHV, *options)
    return _chosen[key]


def _choose_plan(q_BTHK: Tensor, v_BTHV: Tensor, has_docs: bool, normalize: bool, num_segments: int):
    from stateflow_kernels.plans import plan_for

    batch, num_tokens, num_heads, v_dim = v_BTHV.shape
    sizes = dict(num_heads=num_heads, num_key_heads=q_BTHK.shape[2], k_dim=q_BTHK.shape[3], v_dim=v_dim)
    common = dict(device=v_BTHV.device, dtype=v_BTHV.dtype, batch=batch, **sizes)
    plan = plan_for("gated_delta_rule", num_tokens=num_tokens, num_segments=num_segments, **common)
    # Of the plan, which may be one that was asked for whatever the shape.
    options = dict(normalize=normalize, has_docs=has_docs, in_segments=plan.num_segments > 1)
    return self_check.checked_plan(self_check.Problem(**common, **options), plan)


def _contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else x.contiguous() for x in tensors)


def _solve_shape(v_BTHV: Tensor) -> tuple[int, ...]:
    batch, num_tokens, num_heads = v_BTHV.shape[:3]
    return batch, num_heads, -(-num_tokens // CHUNK), CHUNK, CHUNK


def _segment_shapes(state_BHKV: Tensor, num_segments: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the states at the starts of segments, and of the maps of all but the first; empty for one segment."""
    batch, num_heads, k_dim, v_dim = state_BHKV.shape
    starts = num_segments if num_segments > 1 else 0
    return (batch, num_heads, starts, k_dim, v_dim), (batch, num_heads, num_segments - 1, k_dim, k_dim)


@Operation("stateflow::gated_delta_rule_triton")
def _gated_delta_rule_triton(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    doc_start_BT: Tensor | None,
    scale: float,
    eps: float | None,
    num_segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o and the last state, and for the backward T [B, H, N, C, C], states at the starts of segments, and their maps.

    eps: normalise q and k, as the kernels do.
    """
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, doc_start_BT)
    with on_device_of(v_BTHV):
        plan = _plan(q_BTHK, v_BTHV, doc_start_BT, eps, num_segments)
        if plan is None:
            output, state = chunk_form(*inputs, scale, eps)
            starts, maps = map(state.new_zeros, _segment_shapes(state, num_segments))
            return output, state, q_BTHK.new_zeros(_solve_shape(v_BTHV)), starts, maps
        from stateflow_kernels import gated_delta_rule as kernels

        output, state, kept = kernels.forward(*_contiguous(*inputs), scale, eps, plan)
        return output, state, *kept


@_gated_delta_rule_triton.register_fake
def _(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, doc_start_BT, scale, eps, num_segments):
    solve = q_BTHK.new_empty(_solve_shape(v_BTHV))
    starts, maps = map(state_BHKV.new_empty, _segment_shapes(state_BHKV, num_segments))
    return v_BTHV.new_empty(v_BTHV.shape), state_BHKV.new_empty(state_BHKV.shape), solve, starts, maps


@Operation("stateflow::gated_delta_rule_triton_backward")
def _gated_delta_rule_triton_backward(
    grad_o_BTHV: Tensor,
    grad_state_BHKV: Tensor,
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    doc_start_BT: Tensor | None,
    solve_BHNCC: Tensor,
    starts_BHGKV: Tensor,
    maps_BHGKK: Tensor,
    scale: float,
    eps: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, doc_start_BT)
    with on_device_of(v_BTHV):
        plan = _plan(q_BTHK, v_BTHV, doc_start_BT, eps, maps_BHGKK.shape[2] + 1)
        if plan is None:
            return chunk_form_backward(grad_o_BTHV, grad_state_BHKV, *inputs, scale, eps)
        from stateflow_kernels import gated_delta_rule as kernels

        # Contiguous, and of the types that autograd would give them: a caller may expand or cast them.
        grads = (grad_o_BTHV.to(v_BTHV.dtype), grad_state_BHKV.to(state_BHKV.dtype))
        kept = _contiguous(solve_BHNCC, starts_BHGKV, maps_BHGKK)
        grads = kernels.backward(*_contiguous(*grads, *inputs), kept, scale, eps, plan)
        return tuple(grad.to(x.dtype) for grad, x in zip(grads, inputs[:6], strict=True))


@_gated_delta_rule_triton_backward.register_fake
def _(
    grad_o, grad_state, q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, doc_start_BT, solve, starts, maps,
    scale, eps,
):  # fmt: skip
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)
    return tuple(x.new_empty(x.shape) for x in inputs)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, ctx.eps, _ = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*tensors, *output[2:])


def _backward(ctx, grad_o_BTHV, grad_state_BHKV, *_):
    grads = _gated_delta_rule_triton_backward(
        grad_o_BTHV, grad_state_BHKV, *ctx.saved_tensors, ctx.scale, ctx.eps
    )
    return *grads, None, None, None, None


_gated_delta_rule_triton.register_autograd(_backward, setup_context=_setup_context)


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(sum x^2 + eps) and the factor, in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse_norm = torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    return x * inverse_norm, inverse_norm


def chunk_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    doc_start: Tensor | None,
    scale: float,
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    """What the kernels compute, by the chunk form in PyTorch. No autograd."""
    if eps is not None:
        q, k = (_unit(x, eps)[0] for x in (q, k))
    return _chunk_form(q, k, v, g, beta, state, doc_start, scale, CHUNK)


def chunk_form_backward(
    grad_o: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    doc_start: Tensor | None,
    scale: float,
    eps: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g, beta and state of `chunk_form`."""
    others = (v, g, beta, state, doc_start, scale, CHUNK)
    if eps is None:
        return _chunk_form_backward(grad_o, grad_state, q, k, *others)
    (q_unit, q_factor), (k_unit, k_factor) = (_unit(x, eps) for x in (q, k))
    grad_q, grad_k, *grads = _chunk_form_backward(grad_o, grad_state, q_unit, k_unit, *others)

    def through_norm(grad: Tensor, unit: Tensor, factor: Tensor) -> Tensor:
        return factor * (grad - unit * (grad * unit).sum(-1, keepdim=True))

    grad_q = through_norm(grad_q, q_unit, q_factor).to(q.dtype)
    return grad_q, through_norm(grad_k, k_unit, k_factor).to(k.dtype), *grads
