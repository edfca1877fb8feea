"""What a call of the recurrent kernels would run here and why, for people."""

from __future__ import annotations

import torch

from stateflow.planning.kernel_launches import launched, problem_of
from stateflow.planning.kernel_shapes import MAMBA3
from stateflow_kernels import hopper, plans, waves
from stateflow_kernels.gated_delta_rule import CHUNK
from stateflow_kernels.plan_table import Shape, bucket_of

# By kernel, as `docs/kernels.md` has them.
_NAMES = {
    "pre": "Pre",
    "transition": "ST",
    "transition_out": "ST with Out",
    "out": "Out",
    "out_backward": "OG",
    "transition_backward": "STB",
    "query_backward": "gradients of q",
    "solve_backward": "of v and beta",
    "key_backward": "of k and gates",
    "gradients": "all gradients in one",
}


def describe(shape: Shape, device: torch.device) -> list[str]:
    """Where the plan comes from, which form each kernel has, and what keeps faster ones from running."""
    lines = [f"{shape}", f"  plan: {_source(shape, device)}"]
    if shape.family == MAMBA3:
        return lines
    plan, problem = plans.choice_for(shape, device).plan, problem_of(shape, device)
    forms: dict[bool, list[str]] = {True: [], False: []}
    for name, tile in launched(plan, shape, device):
        if name in _NAMES:
            forms[_is_for_hopper(name, tile, problem)].append(_NAMES[name])
    reason = hopper.obstacle(problem)
    why = f" ({reason})" if reason else ""
    lines.append(f"  kernels for Hopper: {', '.join(forms[True]) or 'none'}{why}")
    if forms[False]:
        lines.append(f"  in Triton: {', '.join(forms[False])}")
    return lines


def in_segments(shape: Shape) -> tuple[Shape | None, str]:
    """The shape with exact_order = false, or None where that changes nothing; and that in words."""
    sizes = (-(-shape.tokens // CHUNK), shape.batch * shape.num_heads, shape.k_dim, shape.v_dim)
    reason = waves.why_one_walk(*sizes)
    if reason is not None:
        return None, f"with exact_order = false the same: {reason}"
    segments = waves.walk_segments(*sizes)
    return Shape(**vars(shape) | {"segments": segments}), f"with exact_order = false in {segments} segments at once"


def _is_for_hopper(name: str, tile, problem) -> bool:
    if name == "pre":
        return hopper.prepares(problem, tile, problem)  # scores are asked for wherever another kernel is for Hopper
    return name == "gradients" or (name.startswith("transition") and hopper.runs(problem, tile))


def _source(shape: Shape, device: torch.device) -> str:
    choice = plans.choice_for(shape, device)
    wanted = Shape(**vars(shape) | {"tokens": bucket_of(shape.tokens)})
    if choice.shape == wanted:
        return f"measured for this shape ({choice.table})"
    if choice.shape is None:
        return "the default: no table has an entry for this K, V and type; stateflow tune-kernels measures one"
    if choice.shape == Shape(**vars(wanted) | {"segments": 1}):
        return f"that of the exact order with wide walks ({choice.table}); tune-kernels --any-order measures one"
    return f"the nearest entry, {choice.shape} ({choice.table}); stateflow tune-kernels measures one for this shape"
