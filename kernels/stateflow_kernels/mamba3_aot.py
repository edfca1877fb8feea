"""Mamba-3's kernels as cases for `aot`, in bfloat16 for heads of 64, states of 128 and 32 angles, 80 heads.

As the default plan launches them.
"""

import torch
import triton.language as tl

from . import hopper, hopper_mamba3, mamba3, mamba3_backward, mamba3_finish, mamba3_gradients
from .aot import AotCase
from .gated_delta_rule import CHUNK, Tile
from .mamba3_rule import (
    GATE_HEADS,
    GATES,
    ONE_WARP,
    REGISTERS,
    SHARED_BACK,
    SHARED_TOKENS,
    SMALL,
    SUM_ROWS,
    SUMS,
    default_plan,
)

_N, _P, _R, _H = 128, 64, 32, 80
_NUMBERS = {"eps": "fp32", "A_floor": "fp32"}
# The pointers that do not have the type of x; all other names of arguments that end in _ptr do.
_LOW = {
    *("x_ptr", "z_ptr", "y_ptr", "B_ptr", "C_ptr", "dd_dt_ptr", "dd_A_ptr", "trap_ptr", "angle_ptr", "states_ptr"),
    *("grad_y_ptr", "grad_read_ptr", "grad_states_ptr", "grad_x_ptr", "grad_z_ptr", "grad_B_ptr", "grad_C_ptr"),
    *("grad_angle_ptr", "k_rows_ptr", "q_rows_ptr"),
    *("grad_dd_dt_ptr", "grad_dd_A_ptr", "grad_trap_ptr", "query_rows_ptr", "key_rows_ptr", "speed_rows_ptr"),
}


def _case(name: str, kernel, tile: Tile) -> AotCase:
    values = dict(BATCH=1, H=_H, N=_N, P=_P, R=_R, C=CHUNK, BN=_N, BP=_P, BR=_R, BX=_N - 2 * _R, BV=tile.block_v)
    values |= dict(BT=SHARED_TOKENS, HB=GATE_HEADS, NB=_P // default_plan(_N, _P, torch.bfloat16).scan_backward.block_v)
    values |= dict(HAS_DOCS=True, DTYPE=tl.bfloat16, PRECISION="tf32", STAGES=tile.num_stages)
    values |= dict(cos_sin_rows_ptr=None, GROUPS=_H, ROWS=SUM_ROWS)
    names = kernel.arg_names
    constexprs = {key: value for key, value in values.items() if key in names}
    pointers = {n: "*bf16" if n in _LOW else "*fp32" for n in names if n.endswith("_ptr") and n not in values}
    pointers |= {n: "*i64" for n in names if n == "doc_start_ptr"}
    numbers = {n: kind for n, kind in _NUMBERS.items() if n in names}
    lengths = {n: "i32" for n in names if n not in constexprs | pointers | numbers}
    options = (tile.num_warps, tile.num_stages, REGISTERS.get(kernel.__name__))
    return AotCase(name, kernel, pointers | numbers | lengths, constexprs, *options)


def _specialized_cases() -> list[AotCase]:
    """For Hopper, where Triton is one that they are written for."""
    if not hopper.known_triton():
        return []
    from .hopper_mamba3_both import both_kernel
    from .hopper_mamba3_local import local_kernel
    from .hopper_mamba3_out import out_kernel

    # What there is none of in the forward and without documents.
    without = dict.fromkeys(("doc_start_ptr", "cos_sin_rows_ptr", "k_rows_desc", "q_rows_desc"))
    cases = []
    for kernel, absent in ((local_kernel, without), (local_kernel, {}), (out_kernel, without), (both_kernel, {})):
        names = kernel.arg_names
        values = dict(H=_H, N=_N, P=_P, R=_R, C=CHUNK, HEADS=hopper_mamba3.HEADS, HAS_DOCS=not absent) | absent
        values |= dict(ROW_REGISTERS=hopper_mamba3.ROW_REGISTERS)
        if kernel is local_kernel:
            values |= dict(HEADS=hopper_mamba3.local_heads(_H, with_rows=not absent))
        values = {n: value for n, value in values.items() if n in names}
        kinds = {n: "*bf16" if n in _LOW else "*fp32" if n.endswith("_ptr") else "i32" for n in names}
        kinds |= dict(doc_start_ptr="*i64", cos_sin_rows_ptr="*fp16")
        for n in (n for n in names if n.endswith("_desc")):
            width = _N if n == "states_desc" and kernel is out_kernel else CHUNK
            kinds[n] = f"tensordesc<bf16[{CHUNK},{width}],{hopper.layout(CHUNK, width, torch.bfloat16)!r}>"
        kinds = {n: kind for n, kind in kinds.items() if n in names and n not in values}
        name = f"{kernel.__name__.removesuffix('_kernel')}, specialised" + ("" if absent else ", with all outputs")
        options = (8, 1, hopper_mamba3.REGISTERS if kernel is local_kernel else None, (90,))
        cases.append(AotCase(name, kernel, kinds, values, *options))
    return cases + [_gradients_case(*options) for options in ((False, "bf16"), (True, "bf16"), (True, "fp16"))]


def _gradients_case(has_docs: bool, kind: str) -> AotCase:
    from .hopper_mamba3_gradients import gradients_kernel

    tile = f"tensordesc<{kind}[{CHUNK},{CHUNK}],{hopper.layout(CHUNK, CHUNK, torch.bfloat16)!r}>"
    values = dict(H=_H, N=_N, P=_P, R=_R, C=CHUNK, GROUP=hopper_mamba3.GRADIENT_HEADS, HAS_DOCS=has_docs)
    pointers = {n: f"*{kind}" if n in _LOW else "*fp32" for n in gradients_kernel.arg_names if n.endswith("_ptr")}
    pointers |= dict(doc_start_ptr="*i64", turns_ptr="*fp16")
    if not has_docs:
        del pointers["doc_start_ptr"]
        values |= dict(doc_start_ptr=None)
    others = [n for n in gradients_kernel.arg_names if n not in values | pointers]
    others = {n: tile if n.endswith("_desc") else "i32" for n in others}
    others |= dict(turns_desc=tile.replace(kind, "fp16"))
    wide = f"tensordesc<{kind}[{CHUNK},{_N}],{hopper.layout(CHUNK, _N, torch.bfloat16)!r}>"
    others |= dict.fromkeys(("states_desc", "grad_states_desc", "k_rows_desc", "q_rows_desc"), wide)
    name = f"gradients, specialised, {kind}" + (" with documents" if has_docs else "")
    return AotCase(name, gradients_kernel, pointers | others, values, 4, 1, archs=(90,))


def aot_cases() -> list[AotCase]:
    plan = default_plan(_N, _P, torch.bfloat16)
    planned = {
        "local": mamba3.local_kernel,
        "out": mamba3.out_kernel,
        "local_backward": mamba3_backward.local_backward_kernel,
        "query_gradients": mamba3_gradients.query_gradients_kernel,
        "key_gradients": mamba3_gradients.key_gradients_kernel,
        "scan": mamba3.scan_kernel,
        "scan_backward": mamba3_backward.scan_backward_kernel,
    }
    fixed = {
        "shared": (mamba3.shared_kernel, SMALL),
        "gates": (mamba3.gates_kernel, GATES),
        "theta": (mamba3.theta_kernel, ONE_WARP),
        "owed": (mamba3_backward.owed_kernel, ONE_WARP),
        "carry": (mamba3_finish.carry_kernel, ONE_WARP),
        "gates_backward": (mamba3_finish.gates_backward_kernel, GATES),
        "shared_backward": (mamba3_finish.shared_backward_kernel, SHARED_BACK),
        "sums": (mamba3_finish.sums_kernel, SUMS),
    }
    cases = [_case(name, kernel, getattr(plan, name)) for name, kernel in planned.items()]
    cases += [_case(name, kernel, tile) for name, (kernel, tile) in fixed.items()]
    return cases + _specialized_cases()
