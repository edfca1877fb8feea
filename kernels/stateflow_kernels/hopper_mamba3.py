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
WALK_DIMS = (64, 128, 256)  # N
CHUNK = 64
NUM_WARPS = 8
# What a program's heads share is loaded once; fewer programs are less even.
HEADS = 8
# Of a thread: two programs then fit at once. By kernel; Local is another one where it leaves no rows.
REGISTERS = dict(local=128, local_with_rows=128, out=128)


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


def walks(problem: Problem, tile: Tile) -> bool:
    """Whether a walk through the chunks with this tile is launched in this form: 16 lanes of a warp a row, say."""
    return (
        tile.specialized
        and problem.dtype != torch.float32
        and problem.n_dim in WALK_DIMS
        and problem.p_dim % tile.block_v == 0
        and hopper.available(problem.device)
    )


def _tiles(x: Tensor | None, columns: int, width: int = CHUNK):
    """x [.., columns] in tiles of this width, 64 rows each."""
    return None if x is None else hopper._tiles(x.view(-1, columns), CHUNK, width)


def _launch(kernel, name: str, problem: Problem, chunks: range, *args) -> None:
    kernel[(len(chunks) * triton.cdiv(problem.num_heads, HEADS),)](
        *(*args, problem.num_tokens, problem.num_chunks, chunks.start),
        **{name: problem.constants[name] for name in ("H", "N", "P", "R", "C", "HAS_DOCS")},
        HEADS=HEADS,
        num_warps=NUM_WARPS,
        maxnreg=REGISTERS[name],
    )


def local(prepared: Prepared, chunks: range, back: Backward | None = None) -> None:
    """Local, of all heads; with `back` Local back in the same programs."""
    from .hopper_mamba3_local import local_kernel

    problem, inputs = prepared.problem, prepared.problem.inputs
    _launch(
        local_kernel,
        "local" if prepared.k_rows is None else "local_with_rows",
        *(problem, chunks, _tiles(inputs.x, problem.num_heads * problem.p_dim)),
        *(_tiles(x, problem.n_dim) for x in (prepared.k_rows, prepared.q_rows, prepared.states)),
        *_back_tiles(problem, back),
        *(inputs.x, inputs.B, inputs.C, inputs.B_norm, inputs.C_norm, inputs.B_bias, inputs.C_bias),
        *(problem.doc_start, inputs.k_last, inputs.v_last, prepared.B_factor, prepared.C_factor, prepared.speed),
        *(prepared.dt, prepared.scale, prepared.gate_sum, prepared.theta),
        *(prepared.k_bound, prepared.v_bound, prepared.cos_sin_rows),
    )


def _back_tiles(problem: Problem, back: Backward | None) -> tuple:
    if back is None:
        return (None,) * 4
    values = (problem.inputs.z, back.grad_y, back.grad_read)
    tiles = (_tiles(x, problem.num_heads * problem.p_dim) for x in values)
    return *tiles, _tiles(back.grad_states, problem.n_dim)


def out(prepared: Prepared, chunks: range, y: Tensor) -> None:
    """Out, of all heads."""
    from .hopper_mamba3_out import out_kernel

    problem, inputs = prepared.problem, prepared.problem.inputs
    x, z, y = (_tiles(tensor, problem.num_heads * problem.p_dim) for tensor in (inputs.x, inputs.z, y))
    _launch(
        out_kernel,
        "out",
        *(problem, chunks, x, z, _tiles(prepared.states, problem.n_dim, problem.n_dim), y),
        *(inputs.B, inputs.C, inputs.B_norm, inputs.C_norm, inputs.B_bias, inputs.C_bias, inputs.D),
        *(problem.doc_start, prepared.B_factor, prepared.C_factor, prepared.speed),
        *(prepared.dt, prepared.own, prepared.scale, prepared.gate_sum, prepared.theta),
    )


def walk(name: str, problem: Problem, tile: Tile, chunks: range, *args) -> None:
    """Scan or Scan back, with the arguments of Triton's kernel of this name."""
    from . import hopper_mamba3_scan

    kernel = getattr(hopper_mamba3_scan, name)
    sizes = {size: problem.constants[size] for size in ("N", "P", "R")}
    kernel[(problem.heads * problem.num_blocks(tile),)](
        *(*args, problem.num_chunks, chunks.start, chunks.stop),
        **sizes,
        BV=tile.block_v,
        STAGES=tile.num_stages,
        num_warps=1,
    )
