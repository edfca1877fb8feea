"""Launches Mamba-3's kernels for Hopper, where they run; everywhere else the kernels are `mamba3`'s."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from . import hopper

if TYPE_CHECKING:
    from .gated_delta_rule import Tile
    from .mamba3_rule import Backward, Prepared, Problem

SIZES = ((128, 64, 32),)  # N, P, R
CHUNK = 64
# What a program's heads share is loaded once; fewer programs are less even.
HEADS = 8
# From so many heads on the programs of the forward's Local have twice as many: 4 % faster with 80 heads on an H200.
MANY_HEADS = 80
# Those of the one kernel for all gradients, at most.
GRADIENT_HEADS = 20
# Of a thread of Local: two programs then fit at once. And of those warps of Out that make q and k, beside which the
# others keep enough.
REGISTERS, ROW_REGISTERS = 128, 120


def runs(problem: Problem, *tiles: Tile, given: tuple[Tensor, ...] = ()) -> bool:
    """Whether kernels with these tiles are launched in this form.

    `given`: tensors from the caller beside the inputs; the copy engine takes multiples of 16 bytes.
    """
    return (
        all(tile.specialized for tile in tiles)
        and problem.batch == 1
        and problem.dtype != torch.float32
        and (problem.n_dim, problem.p_dim, problem.num_angles) in SIZES
        and all(x.data_ptr() % 16 == 0 for x in (problem.inputs.x, problem.inputs.z, *given))
        and hopper.available(problem.device)
    )


def _tiles(problem: Problem, x: Tensor | None, columns: int, width: int = CHUNK):
    """x [.., columns] in tiles of this width, 64 rows each. Once a call, as `hopper._matrix`."""
    if x is None:
        return None
    key = id(x), width
    if key not in problem.descriptors:
        problem.descriptors[key] = hopper._tiles(x.view(-1, columns), CHUNK, width), x  # which lives on: so does its id
    return problem.descriptors[key][0]


def _launch(kernel, programs: int, problem: Problem, *args, **options) -> None:
    constants = {name: problem.constants[name] for name in ("H", "N", "P", "R", "C", "HAS_DOCS")}
    kernel[(programs,)](*args, **(constants | dict(HEADS=HEADS, num_warps=8) | options))


def _num_units(problem: Problem, chunks: range, heads: int | None = None) -> int:
    return len(chunks) * triton.cdiv(problem.num_heads, HEADS if heads is None else heads)


def local_heads(num_heads: int, with_rows: bool) -> int:
    """Of a program of Local: more where there are many. No bits depend on it."""
    many = not with_rows and num_heads >= MANY_HEADS and num_heads % (2 * HEADS) == 0
    return 2 * HEADS if many else HEADS


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def local(prepared: Prepared, chunks: range) -> None:
    """Local, of all heads."""
    from .hopper_mamba3_local import local_kernel

    problem, inputs = prepared.problem, prepared.problem.inputs
    heads = local_heads(problem.num_heads, prepared.k_rows is not None)
    _launch(
        *(local_kernel, _num_units(problem, chunks, heads), problem),
        _tiles(problem, inputs.x, problem.num_heads * problem.p_dim),
        *(_tiles(problem, x, problem.n_dim) for x in (prepared.k_rows, prepared.q_rows, prepared.states)),
        *(inputs.x, inputs.B, inputs.C, inputs.B_norm, inputs.C_norm, inputs.B_bias, inputs.C_bias),
        *(problem.doc_start, inputs.k_last, inputs.v_last, prepared.B_factor, prepared.C_factor, prepared.speed),
        *(prepared.dt, prepared.scale, prepared.gate_sum, prepared.theta),
        *(prepared.k_bound, prepared.v_bound, prepared.cos_sin_rows),
        *(problem.num_tokens, problem.num_chunks, chunks.start),
        HEADS=heads,
        maxnreg=REGISTERS,
    )


def both(prepared: Prepared, chunks: range, back: Backward) -> None:
    """Local and Local back, of all heads."""
    from .hopper_mamba3_both import both_kernel

    problem, inputs = prepared.problem, prepared.problem.inputs
    num_units, columns = _num_units(problem, chunks), problem.num_heads * problem.p_dim
    _launch(
        *(both_kernel, min(num_units, num_multiprocessors(problem.device)), problem),
        *(_tiles(problem, x, columns) for x in (inputs.x, inputs.z, back.grad_y)),
        *(_tiles(problem, x, problem.n_dim) for x in (prepared.k_rows, prepared.q_rows, prepared.states)),
        *(_tiles(problem, back.grad_read, columns), _tiles(problem, back.grad_states, problem.n_dim)),
        *(inputs.x, inputs.B, inputs.C, inputs.B_norm, inputs.C_norm, inputs.B_bias, inputs.C_bias),
        *(problem.doc_start, inputs.k_last, inputs.v_last, prepared.B_factor, prepared.C_factor, prepared.speed),
        *(prepared.dt, prepared.scale, prepared.gate_sum, prepared.theta),
        *(prepared.k_bound, prepared.v_bound, prepared.cos_sin_rows),
        *(problem.num_tokens, problem.num_chunks, chunks.start, num_units),
        ROW_REGISTERS=ROW_REGISTERS,
    )


def out(prepared: Prepared, chunks: range, y: Tensor) -> None:
    """Out, of all heads."""
    from .hopper_mamba3_out import out_kernel

    problem, inputs = prepared.problem, prepared.problem.inputs
    x, z, y = (_tiles(problem, tensor, problem.num_heads * problem.p_dim) for tensor in (inputs.x, inputs.z, y))
    num_units = _num_units(problem, chunks)
    _launch(
        *(out_kernel, min(num_units, num_multiprocessors(problem.device)), problem),
        *(x, z, _tiles(problem, prepared.states, problem.n_dim, problem.n_dim), y),
        *(inputs.B, inputs.C, inputs.B_norm, inputs.C_norm, inputs.B_bias, inputs.C_bias, inputs.D),
        *(problem.doc_start, prepared.B_factor, prepared.C_factor, prepared.speed),
        *(prepared.dt, prepared.own, prepared.scale, prepared.gate_sum, prepared.theta),
        *(problem.num_tokens, problem.num_chunks, chunks.start, num_units),
        ROW_REGISTERS=ROW_REGISTERS,
    )


def merges_gradients(problem: Problem, heads_a_program: int, grad_y: Tensor) -> bool:
    """Whether Queries and Keys of this problem are launched as one kernel."""
    inputs = problem.inputs
    return (
        heads_a_program > 0
        and problem.batch == 1
        and problem.dtype != torch.float32
        and (problem.n_dim, problem.p_dim, problem.num_angles) in SIZES
        and all(x.data_ptr() % 16 == 0 for x in (inputs.x, inputs.z, grad_y))
        and hopper.available(problem.device)
    )


def gradients(back: Backward) -> None:
    """Queries and Keys, of all heads."""
    from . import hopper_mamba3_gradients

    problem, prepared, inputs, grads = back.problem, back.prepared, back.problem.inputs, back.grads
    values = problem.num_heads * problem.p_dim
    rows = inputs.x, back.grad_read, inputs.z, back.grad_y
    states, query_and_key_rows = (prepared.states, back.grad_states), (prepared.k_rows, prepared.q_rows)
    hopper_mamba3_gradients.gradients_kernel[(problem.num_chunks * back.num_groups,)](
        *(_tiles(problem, x, values) for x in rows),
        *(_tiles(problem, x, problem.n_dim, problem.n_dim) for x in (*states, *query_and_key_rows)),
        _tiles(problem, prepared.cos_sin_rows, 2 * problem.num_angles),
        *(_tiles(problem, x, values) for x in (grads.z, grads.x)),
        *(*rows, *states, *query_and_key_rows, prepared.cos_sin_rows),
        *(problem.doc_start, prepared.speed, inputs.D),
        *(prepared.dt, prepared.own, prepared.scale, prepared.gate_sum, prepared.decay, prepared.k_bound),
        *(back.owed_k, back.grad_v_bound, back.grad_v_last),
        *(back.query_rows, back.key_rows, back.speed_rows, back.query_bias, back.key_bias),
        *(back.grad_gate, back.grad_turn, back.turn_total, back.grad_scale, back.grad_own, back.grad_both),
        *(problem.num_tokens, problem.num_chunks, 0),
        **{name: problem.constants[name] for name in ("H", "N", "P", "R", "C", "HAS_DOCS")},
        GROUP=back.gradient_heads,
        num_warps=4,
    )
