"""Launches `hopper_transition`, where it runs.

It is written against the Gluon of the Tritons named here, whose interface still changes from version to version;
everywhere else ST and STB are `transition`'s.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from .primitives import INTERPRETED

if TYPE_CHECKING:
    from .gated_delta_rule import Tile, _Problem

TRITONS = ("3.6", "3.7")  # 3.7 compiled only
BLOCKS_V = (16, 32, 64)
CHUNK = 64
# 256 has not run in this form.
K_DIMS = MERGED_DIMS = (64, 128)
# Of a thread, at launch: ST and STB then fit a multiprocessor together. Those that compute get what the others leave.
WALK_REGISTERS = 128
PREPARE_REGISTERS = 128  # four programs a multiprocessor


def available(device: torch.device) -> bool:
    """Whether kernels of this form run on the device with the Triton that is installed."""
    return device.type == "cuda" and not INTERPRETED and _available(device)


def known_triton() -> bool:
    return any(triton.__version__.startswith(f"{version}.") for version in TRITONS)


@functools.cache
def _available(device: torch.device) -> bool:
    return known_triton() and torch.cuda.get_device_capability(device) == (9, 0)


def obstacle(problem: _Problem) -> str | None:
    """Why none of these kernels runs for this problem, for people; None if some do, with the right tiles."""
    device = problem.device
    if device.type != "cuda" or INTERPRETED:
        return "they are not interpreted"
    if not known_triton():
        return f"they are for Triton {' and '.join(TRITONS)}, this is {triton.__version__}"
    if not available(device):
        return f"they are for sm_90, this is sm_{''.join(map(str, torch.cuda.get_device_capability(device)))}"
    if problem.dtype == torch.float32:
        return "they are for 16 bits"
    if problem.batch != 1:
        return f"they are for one sequence, a microbatch has {problem.batch}"
    if problem.k_dim not in K_DIMS:
        return f"they are for K = {' or '.join(map(str, K_DIMS))}, it is {problem.k_dim}"
    return None


def shared_bytes(backward: bool, k_dim: int, block_v: int, num_stages: int) -> int:
    """What a program takes, up to the barriers: slots for loads, tiles for results, operands on their way."""
    keys, squares = (2, 2) if backward else (1, 1)
    stage = 2 * CHUNK * (keys * k_dim + squares * CHUNK + block_v) + 4 * 4 * CHUNK
    results = 2 * (k_dim + CHUNK) * block_v * (3 if num_stages % 2 else 2)
    return num_stages * stage + results + 2 * CHUNK * block_v * (2 if backward else 1)


def out_shared_bytes(k_dim: int, block_v: int, num_stages: int) -> int:
    """What a program of ST and Out in one takes, up to the barriers."""
    stage = 2 * CHUNK * (2 * k_dim + 2 * CHUNK + block_v) + 4 * 8 * CHUNK
    results = 2 * (k_dim + 2 * CHUNK) * block_v * (3 if num_stages % 2 else 2)
    return num_stages * stage + results + 2 * CHUNK * block_v


def default_out_stages(k_dim: int, block_v: int, shared_memory: int) -> int | None:
    """As `default_stages`."""
    fitting = [n for n in (4, 3, 2) if out_shared_bytes(k_dim, block_v, n) + 1024 <= shared_memory]
    return fitting[0] if fitting else None


def default_stages(backward: bool, k_dim: int, block_v: int, shared_memory: int) -> int | None:
    """As many as fit, up to four; None: not even two do."""
    fitting = [n for n in (4, 3, 2) if shared_bytes(backward, k_dim, block_v, n) + 1024 <= shared_memory]
    return fitting[0] if fitting else None


def runs(problem: _Problem, tile: Tile, *given: Tensor) -> bool:
    """Whether ST and STB of this problem are launched in this form.

    `given`: tensors that come from the caller; the copy engine takes multiples of 16 bytes.
    """
    return (
        tile.specialized
        and problem.batch == 1
        and problem.dtype != torch.float32
        and problem.k_dim in K_DIMS
        and tile.block_v in BLOCKS_V
        and problem.v_dim % tile.block_v == 0
        and all(x.data_ptr() % 16 == 0 for x in given)
        and available(problem.device)
    )


@functools.cache
def layout(rows: int, columns: int, dtype: torch.dtype):
    """Of a tile in shared memory, as the copy engine writes it and products read it."""
    from triton.experimental.gluon import language as gl

    if dtype == torch.float32:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)  # any 16 bits


def _tiles(x: Tensor, rows: int, columns: int):
    """For the copy engine: x, of two dimensions, in tiles of this size."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, x.shape, x.stride(), [rows, columns], layout(rows, columns, x.dtype))


def _matrix(problem: _Problem, x: Tensor, rows: int, columns: int):
    """The same of a tensor by tokens [1, T, H, D] or by chunks [1, H, N, .., D].

    Once a call: the launches of its segments share it, and to make one takes the host a good part of a launch.
    """
    key = id(x), rows, columns
    if key not in problem.descriptors:
        matrix = x.view(problem.num_tokens, -1) if x.ndim == 4 else x.view(-1, x.shape[-1])
        problem.descriptors[key] = _tiles(matrix, rows, columns), x  # which lives on: so does its id
    return problem.descriptors[key][0]


def _launch(
    kernel, problem: _Problem, tile: Tile, chunks: range, *args, max_registers: int | None = None, maps_of: int = 0
) -> None:
    """`maps_of`: the maps of the segments, of so many columns."""
    parts, columns = (problem.num_segments - 1, maps_of) if maps_of else (problem.num_segments, problem.v_dim)
    sizes = {name: problem.sizes[name] for name in ("H", "HK", "K", "V", "C")}
    kernel[(problem.heads * parts * (columns // tile.block_v),)](
        *args,
        problem.num_chunks,
        chunks.start,
        chunks.stop,
        problem.num_segments,
        **sizes,
        BV=tile.block_v,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        maxnreg=max_registers if tile.num_warps == 4 else None,
    )


def merges_gradients(problem: _Problem, chunks_a_program: int, *given: Tensor) -> bool:
    """Whether all gradients of this problem come from the one kernel of `hopper_gradients`."""
    return (
        chunks_a_program > 0
        and problem.batch == 1
        and problem.num_heads == problem.num_key_heads
        and problem.dtype != torch.float32
        and {problem.k_dim, problem.v_dim} <= set(MERGED_DIMS)
        and all(x.data_ptr() % 16 == 0 for x in given)
        and available(problem.device)
    )


def gradient_tiles(k_dim: int, v_dim: int) -> dict[str, tuple[int, int]]:
    """Rows and columns of what `hopper_gradients` has the copy engine move."""
    keys = dict.fromkeys(("q", "k", "grad_q", "grad_k"), (CHUNK, k_dim))
    values = dict.fromkeys(("v", "grad_o", "v_new", "solved"), (CHUNK, v_dim))
    states = dict.fromkeys(("states", "grad_states"), (k_dim, v_dim))
    return keys | values | states | {"factors": (16, CHUNK)}  # a power of two; the last rows are the next chunk's


def prepares(problem: _Problem, tile: Tile, scores: Tensor | None, *given: Tensor) -> bool:
    """Whether Pre of this problem is that of `hopper_prepare`. It always makes P."""
    return (
        tile.specialized
        and scores is not None
        and problem.batch == 1
        and problem.dtype != torch.float32
        and problem.k_dim in K_DIMS
        and all(x.data_ptr() % 16 == 0 for x in given)
        and available(problem.device)
    )


def prepare(
    problem: _Problem, chunks: range, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, solve: Tensor, scores: Tensor,
    gate_sum: Tensor, k_norm: Tensor, factors: Tensor, solved: bool,
) -> None:  # fmt: skip
    """Pre: P, the factors and, unless they come `solved`, T of these chunks."""
    from . import hopper_prepare

    chunk, tokens, key = problem.sizes["C"], problem.num_tokens, problem.k_dim
    hopper_prepare.pre_kernel[(len(chunks) * problem.heads,)](
        _matrix(problem, q, chunk, key),
        _matrix(problem, k, chunk, key),
        _matrix(problem, solve, chunk, chunk),
        _matrix(problem, scores, chunk, chunk),
        *(g, beta, problem.doc_start, gate_sum, k_norm, factors, problem.scale, problem.eps),
        *(tokens, problem.num_chunks, chunks.start),
        **{name: problem.sizes[name] for name in ("H", "HK", "K", "C")},
        HAS_DOCS=problem.options["HAS_DOCS"],
        NORMALIZE=problem.options["NORMALIZE"],
        SOLVE=not solved,
        num_warps=4,
        maxnreg=PREPARE_REGISTERS,
    )


def transition(
    problem: _Problem, tile: Tile, chunks: range, solve: Tensor, factors: Tensor, k: Tensor, v: Tensor,
    state_in: Tensor, states: Tensor, v_new: Tensor, state_out: Tensor,
) -> None:  # fmt: skip
    """ST; shapes as in `transition`, `factors` as in `hopper_transition`."""
    from . import hopper_transition

    chunk, key, block = problem.sizes["C"], problem.k_dim, tile.block_v
    _launch(
        hopper_transition.transition_kernel,
        *(problem, tile, chunks),
        _matrix(problem, k, chunk, key),
        _matrix(problem, v, chunk, block),
        _matrix(problem, solve, chunk, chunk),
        _matrix(problem, states, key, block),
        _matrix(problem, v_new, chunk, block),
        _matrix(problem, factors, 4, chunk),
        *(state_in, state_out),
        max_registers=WALK_REGISTERS,
    )


def transition_out(
    problem: _Problem, tile: Tile, chunks: range, solve: Tensor, scores: Tensor, factors: Tensor, q: Tensor, k: Tensor,
    v: Tensor, state_in: Tensor, o: Tensor, state_out: Tensor,
) -> None:  # fmt: skip
    """ST and Out in one, from what Pre left with the scores P."""
    from . import hopper_outputs

    chunk, key, block = problem.sizes["C"], problem.k_dim, tile.block_v
    _launch(
        hopper_outputs.transition_out_kernel,
        *(problem, tile, chunks),
        _matrix(problem, q, chunk, key),
        _matrix(problem, k, chunk, key),
        _matrix(problem, v, chunk, block),
        _matrix(problem, solve, chunk, chunk),
        _matrix(problem, scores, chunk, chunk),
        _matrix(problem, factors, 8, chunk),
        _matrix(problem, o, chunk, block),
        *(state_in, state_out),
    )


def transition_backward(
    problem: _Problem, tile: Tile, chunks: range, solve: Tensor, scores: Tensor, factors: Tensor, q: Tensor, k: Tensor,
    grad_o: Tensor, grad_state_in: Tensor, solved: Tensor, grad_states: Tensor, grad_state_out: Tensor,
) -> None:  # fmt: skip
    """STB with OG, from what Pre left with the scores P."""
    from . import hopper_transition

    chunk, key, block = problem.sizes["C"], problem.k_dim, tile.block_v
    _launch(
        hopper_transition.transition_backward_kernel,
        *(problem, tile, chunks),
        _matrix(problem, q, chunk, key),
        _matrix(problem, k, chunk, key),
        _matrix(problem, solve, chunk, chunk),
        _matrix(problem, grad_o, chunk, block),
        _matrix(problem, scores, chunk, chunk),
        _matrix(problem, solved, chunk, block),
        _matrix(problem, grad_states, key, block),
        _matrix(problem, factors, 4, chunk),
        *(grad_state_in, grad_state_out),
        max_registers=WALK_REGISTERS,
    )


def transition_maps(
    problem: _Problem, tile: Tile, chunks: range, solve: Tensor, factors: Tensor, k: Tensor, v: Tensor,
    state_in: Tensor, starts: Tensor, maps: Tensor,
) -> None:  # fmt: skip
    """ST of segments from 0, and from the columns of the identity without values."""
    from . import hopper_segments

    chunk, key, block = problem.sizes["C"], problem.k_dim, tile.block_v
    _launch(
        hopper_segments.transition_maps_kernel,
        *(problem, tile, chunks),
        _matrix(problem, k, chunk, key),
        _matrix(problem, v, chunk, block),
        _matrix(problem, solve, chunk, chunk),
        _matrix(problem, factors, 4, chunk),
        *(state_in, starts, maps),
        max_registers=WALK_REGISTERS,
        maps_of=problem.v_dim + key,
    )


def transition_backward_maps(
    problem: _Problem, tile: Tile, chunks: range, solve: Tensor, scores: Tensor, factors: Tensor, q: Tensor, k: Tensor,
    grad_o: Tensor, grad_state_in: Tensor, ends: Tensor,
) -> None:  # fmt: skip
    """STB with OG of segments from 0."""
    from . import hopper_segments

    chunk, key, block = problem.sizes["C"], problem.k_dim, tile.block_v
    _launch(
        hopper_segments.transition_backward_maps_kernel,
        *(problem, tile, chunks),
        _matrix(problem, q, chunk, key),
        _matrix(problem, k, chunk, key),
        _matrix(problem, solve, chunk, chunk),
        _matrix(problem, grad_o, chunk, block),
        _matrix(problem, scores, chunk, chunk),
        _matrix(problem, factors, 4, chunk),
        *(grad_state_in, ends),
        max_registers=WALK_REGISTERS,
        maps_of=problem.v_dim,
    )


def gradients(
    problem: _Problem, chunks_a_program: int, chunks: range, factors: Tensor, q: Tensor, k: Tensor, v: Tensor,
    grad_o: Tensor, v_new: Tensor, states: Tensor, solved: Tensor, grad_states: Tensor, grad_q: Tensor, grad_k: Tensor,
    grad_v: Tensor, grad_g: Tensor, grad_beta: Tensor,
) -> None:  # fmt: skip
    """PG: the gradients of q, k, v, g and beta of these chunks' tokens from what ST and STB left."""
    from . import hopper_gradients

    chunk, tokens = problem.sizes["C"], problem.num_tokens
    sizes = gradient_tiles(problem.k_dim, problem.v_dim)
    tensors = dict(q=q, k=k, v=v, grad_o=grad_o, v_new=v_new, states=states, solved=solved, grad_states=grad_states)
    tensors |= dict(factors=factors, grad_q=grad_q, grad_k=grad_k)
    hopper_gradients.gradients_kernel[(triton.cdiv(len(chunks), chunks_a_program) * problem.heads,)](
        *(_matrix(problem, x, *sizes[name]) for name, x in tensors.items()),
        *(grad_v, grad_g, grad_beta, problem.scale, tokens, problem.num_chunks, chunks.start, chunks.stop),
        H=problem.num_heads,
        K=problem.k_dim,
        V=problem.v_dim,
        C=chunk,
        GROUP=chunks_a_program,
        NORMALIZE=problem.options["NORMALIZE"],
        num_warps=4,
    )
