"""Launches Mamba-3's kernels for Hopper, where they run; everywhere else the kernels are `mamba3`'s."""

from __future__ import annotations

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
NUM_WARPS = 8
# What a program's heads share is loaded once; fewer programs are less even.
HEADS = 8
# Those of the one kernel for all gradients, at most.
GRADIENT_HEADS = 16
# Of a thread: two programs then fit at once.
REGISTERS = 128


def runs(problem: Problem, tile: Tile) -> bool:
    """Whether Local of this problem is launched in this form. The copy engine takes multiples of 16 bytes."""
    return (
        tile.specialized
        and problem.batch == 1
        and problem.dtype != torch.float32
        and (problem.n_dim, problem.p_dim, problem.num_angles) in SIZES
        and problem.inputs.x.data_ptr() % 16 == 0
        and hopper.available(problem.device)
    )


def _tiles(x: Tensor, columns: int):
    """x [.., columns] in tiles of 64 x 64."""
    return hopper._tiles(x.view(-1, columns), CHUNK, CHUNK)


def local(prepared: Prepared, chunks: range) -> None:
    """Local, of all heads."""
    from . import hopper_mamba3_local

    problem, inputs = prepared.problem, prepared.problem.inputs
    n_dim, heads = problem.n_dim, problem.num_heads
    hopper_mamba3_local.local_kernel[(len(chunks) * triton.cdiv(heads, HEADS),)](
        _tiles(inputs.x, heads * problem.p_dim),
        *(_tiles(x, n_dim) for x in (prepared.k_rows, prepared.q_rows, prepared.states)),
        *(inputs.x, inputs.B, inputs.C, inputs.B_norm, inputs.C_norm, inputs.B_bias, inputs.C_bias),
        *(problem.doc_start, inputs.k_last, inputs.v_last, prepared.B_factor, prepared.C_factor, prepared.speed),
        *(prepared.dt, prepared.scale, prepared.gate_sum, prepared.theta),
        *(prepared.k_bound, prepared.v_bound, prepared.cos_sin_rows),
        *(problem.num_tokens, problem.num_chunks, chunks.start),
        **{name: problem.constants[name] for name in ("H", "N", "P", "R", "C", "HAS_DOCS")},
        HEADS=HEADS,
        num_warps=NUM_WARPS,
        maxnreg=REGISTERS,
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
    hopper_mamba3_gradients.gradients_kernel[(problem.num_chunks * back.num_groups,)](
        *(_tiles(x, values) for x in (inputs.x, back.grad_read, inputs.z, back.grad_y)),
        *(_tiles(x, problem.n_dim) for x in (prepared.states, back.grad_states, prepared.k_rows, prepared.q_rows)),
        _tiles(prepared.cos_sin_rows, 2 * problem.num_angles),
        *(_tiles(x, values) for x in (grads.z, grads.x)),
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
