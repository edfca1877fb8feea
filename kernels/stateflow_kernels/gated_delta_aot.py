"""The gated delta rule's kernels as cases for `aot`, in bfloat16 for heads of 128 x 128.

ST and STB at two tiles and the depth of the default plan, the others as the default plan has them. The gradients for
heads of 32 x 40, too, and those in one kernel for heads of 64 x 128 in float16, whose bits did not repeat on a GPU.
"""

import dataclasses
import itertools

import torch
import triton
import triton.language as tl

from . import gated_delta, gated_delta_backward, hopper, transition
from .aot import AotCase
from .gated_delta_rule import CHUNK, COMPOSE, FACTORS, Tile, default_plan
from .plans import WIDE_WALKS

_NUMBERS = {"scale": "fp32", "eps": "fp32"}
# The pointers that do not have the type of q, k and v; all other names of arguments that end in _ptr do.
_POINTERS = {
    name: "*fp32"
    for name in (
        "g_ptr",
        "beta_ptr",
        "gate_sum_ptr",
        "k_norm_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
        "r_scale_ptr",
        "q_norm_ptr",
        "factors_ptr",
        "q_scale_ptr",
        "decay_ptr",
        "state_ptr",
        "ends_ptr",
        "maps_ptr",
        "starts_ptr",
        "state_in_ptr",
        "state_out_ptr",
        "grad_state_in_ptr",
        "grad_state_out_ptr",
        "grad_gate_ptr",
        "grad_g_ptr",
        "grad_beta_ptr",
    )
} | {"doc_start_ptr": "*i64"}


def _case(name: str, kernel, tile: Tile, k_dim: int, v_dim: int, maps: bool = False) -> AotCase:
    values = dict(B=1, H=20, HK=20, K=k_dim, V=v_dim, C=CHUNK, BK=triton.next_power_of_2(k_dim), BV=tile.block_v)
    values |= dict(
        HAS_SOLVE=True,
        VECTOR_DECAY=False,
        FACTOR_STRIDE=FACTORS * CHUNK,
        DECAY_STRIDE=FACTORS * CHUNK,
        HAS_DOCS=True,
        NORMALIZE=True,
        SOLVE=True,
        SCORES=True,
        MAPS=maps,
        BACKWARD=True,
    )
    precision = "tf32x3" if name == "compose" else "tf32"
    values |= dict(DTYPE=tl.bfloat16, PRECISION=precision, SOLVE_DTYPE=tl.float16, STAGES=tile.num_stages)
    names = kernel.arg_names
    constexprs = {key: value for key, value in values.items() if key in names}
    pointers = {n: _POINTERS.get(n, "*bf16") for n in names if n.endswith("_ptr")}
    lengths = {n: "i32" for n in names if n not in constexprs | pointers | _NUMBERS}
    numbers = {n: kind for n, kind in _NUMBERS.items() if n in names}
    limit = 128 if name == "pre" else None
    return AotCase(
        name, kernel, pointers | numbers | lengths, constexprs, tile.num_warps, tile.num_stages, maxnreg=limit
    )


def _specialized_case(kernel, tile: Tile, k_dim: int, v_dim: int) -> AotCase:
    block_v, num_warps = tile.block_v, tile.num_warps
    values = dict(H=20, HK=20, K=k_dim, V=v_dim, C=CHUNK, BV=block_v, STAGES=tile.num_stages)
    widths = dict.fromkeys(("k_desc", "q_desc"), k_dim) | dict.fromkeys(("solve_desc", "scores_desc"), CHUNK)
    num_factors = 8 if "o_desc" in kernel.arg_names else 4
    signature = {}
    for argument in (n for n in kernel.arg_names if n not in values):
        if argument == "factors_desc":
            layout = hopper.layout(num_factors, CHUNK, torch.float32)
            signature[argument] = f"tensordesc<fp32[{num_factors},{CHUNK}],{layout!r}>"
        elif argument.endswith("_desc"):
            shape = (k_dim if "states" in argument else CHUNK, widths.get(argument, block_v))
            layout = hopper.layout(*shape, torch.bfloat16)
            signature[argument] = f"tensordesc<bf16[{shape[0]},{shape[1]}],{layout!r}>"
        else:
            signature[argument] = "*fp32" if argument.endswith("_ptr") else "i32"
    limit = None if "o_desc" in kernel.arg_names else hopper.WALK_REGISTERS
    limit = limit if num_warps == 4 else None
    name = f"{kernel.__name__}, specialised, BV {block_v}"
    return AotCase(name, kernel, signature, values, num_warps, tile.num_stages, archs=(90,), maxnreg=limit)


def _merged_gradients_case(k_dim: int, v_dim: int, kind: str = "bf16") -> AotCase:
    from .hopper_gradients import gradients_kernel

    values = dict(H=20, K=k_dim, V=v_dim, C=CHUNK, GROUP=8, NORMALIZE=True)
    signature = {}
    for argument in (n for n in gradients_kernel.arg_names if n not in values):
        if argument.endswith("_desc"):
            rows, columns = hopper.gradient_tiles(k_dim, v_dim)[argument.removesuffix("_desc")]
            is_factors = argument == "factors_desc"
            layout = hopper.layout(rows, columns, torch.float32 if is_factors else torch.bfloat16)
            signature[argument] = f"tensordesc<{'fp32' if is_factors else kind}[{rows},{columns}],{layout!r}>"
        elif argument == "grad_v_ptr":
            signature[argument] = f"*{kind}"
        else:
            signature[argument] = "*fp32" if argument.endswith("_ptr") else "fp32" if argument == "scale" else "i32"
    name = f"gradients_kernel, specialised, {k_dim} x {v_dim} {kind}"
    return AotCase(name, gradients_kernel, signature, values, 4, 1, archs=(90,))


def _prepare_case(k_dim: int, has_docs: bool, solve: bool) -> AotCase:
    from .hopper_prepare import pre_kernel

    values = dict(H=20, HK=20, K=k_dim, C=CHUNK, HAS_DOCS=has_docs, NORMALIZE=True, SOLVE=solve)
    signature = {}
    for argument in (n for n in pre_kernel.arg_names if n not in values):
        if argument.endswith("_desc"):
            columns = k_dim if argument in ("q_desc", "k_desc") else CHUNK
            layout = hopper.layout(CHUNK, columns, torch.bfloat16)
            signature[argument] = f"tensordesc<bf16[{CHUNK},{columns}],{layout!r}>"
        else:
            signature[argument] = _NUMBERS.get(argument) or (
                _POINTERS[argument] if argument.endswith("_ptr") else "i32"
            )
    name = f"pre_kernel, specialised{', documents' * has_docs}{', with the solve' * solve}"
    return AotCase(name, pre_kernel, signature, values, 4, 1, archs=(90,), maxnreg=hopper.PREPARE_REGISTERS)


def _specialized_cases() -> list[AotCase]:
    """Of ST and STB for Hopper, where Triton is one that they are written for."""
    if not hopper.known_triton():
        return []
    from .hopper_outputs import transition_out_kernel
    from .hopper_segments import transition_backward_maps_kernel, transition_maps_kernel
    from .hopper_transition import transition_backward_kernel, transition_kernel

    kernels = {transition_kernel: 4, transition_backward_kernel: 3, transition_out_kernel: 3}
    wide = {
        "transition": (transition_kernel, transition_maps_kernel),
        "transition_out": (transition_out_kernel,),
        "transition_backward": (transition_backward_kernel, transition_backward_maps_kernel),
    }
    tiles = [(kernel, Tile(v, 4, stages)) for kernel, stages in kernels.items() for v in (16, 32)]
    tiles += [(kernel, WIDE_WALKS[name]) for name, these in wide.items() for kernel in these]
    return [_specialized_case(kernel, tile, 128, 128) for kernel, tile in tiles] + [
        _merged_gradients_case(128, 128),
        _merged_gradients_case(64, 128, "fp16"),
        *(_prepare_case(128, *pair) for pair in itertools.product((False, True), repeat=2)),
    ]


def aot_cases() -> list[AotCase]:
    plan = default_plan(128, 128, torch.bfloat16)
    walks = {
        "transition": transition.transition_kernel,
        "transition_backward": transition.transition_backward_kernel,
    }
    cases = [
        _case(f"{name}, BV {block_v}", kernel, dataclasses.replace(getattr(plan, name), block_v=block_v), 128, 128)
        for name, kernel in walks.items()
        for block_v in (16, 32)
    ]
    parallel = {
        "pre": gated_delta.pre_kernel,
        "out": gated_delta.out_kernel,
        "out_backward": gated_delta_backward.out_backward_kernel,
        "query_backward": gated_delta_backward.query_backward_kernel,
        "solve_backward": gated_delta_backward.solve_backward_kernel,
        "key_backward": gated_delta_backward.key_backward_kernel,
    }
    cases += _specialized_cases()
    # Narrow heads, which ptxas 12.8 assembles wrong, see `assembler`.
    small = default_plan(32, 40, torch.bfloat16)
    cases += [
        dataclasses.replace(_case(f"{name}, 32 x 40", parallel[name], getattr(small, name), 32, 40), archs=(90,))
        for name in ("query_backward", "solve_backward", "key_backward")
    ]
    cases += [_case(f"{name}, maps", walks[name], getattr(plan, name), 128, 128, maps=True) for name in walks]
    cases.append(_case("compose", transition.compose_kernel, COMPOSE, 128, 128))
    return cases + [_case(name, kernel, getattr(plan, name), 128, 128) for name, kernel in parallel.items()]
