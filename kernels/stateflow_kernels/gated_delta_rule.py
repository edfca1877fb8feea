"""Launches the gated delta rule's kernels: forward = Pre, ST, Out; backward = Pre, ST, OG, STB, PG.

Saved for the backward are the inputs and T (C numbers a token and head); Vn and the states at the chunks' starts are
computed again there.

With cuts, ST works on a side stream beside another segment's parallel part; for two segments that is

    forward     Pre1 -> (ST1 || Pre2) -> (ST2 || Out1) -> Out2
    backward    Pre -> (ST || OG -> STB1) -> (STB2 || PG of q, PG1) -> PG2,  segment 1 the later tokens

Pre of the backward only sums gates and takes norms.

Every kernel does the same with a segment as with the whole, so cuts change no bit.

With `Plan.num_segments` the walks go through that many parts of the sequence at once (see `transition`), in the place
of the cuts. Other bits; the backward gets what the parts begin with, and their maps:

    forward     Pre -> maps -> compose -> ST, Out
    backward    Pre -> (ST || maps -> compose -> STB) -> PG
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gated_delta as kernels
from . import gated_delta_backward as backward_kernels
from . import hopper, transition
from .decays import FACTORS as _FACTORS

CHUNK = 64
FACTORS, Q_NORM = _FACTORS.value, 7
# For the backward: T; what each segment begins with, and the maps of all but the first (none for one segment).
Kept = tuple[Tensor, Tensor, Tensor]
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Tile:
    """How a kernel is launched: columns of V at a time, warps a program, depth of the load pipeline.

    `specialized`: ST and STB in the form of `hopper_transition`, where that runs; its bits are the same. For
    `transition_out`: whether ST and Out of the forward are one kernel at all, that of `hopper_outputs`. For `pre`:
    where P is asked for, that of `hopper_prepare`, whose bits are others.
    """

    block_v: int = 64
    num_warps: int = 4
    num_stages: int = 2
    specialized: bool = False


COMPOSE = Tile(16, 8, 2)  # a map in float32 takes 64 KB, and as many registers as four warps have


@dataclass(frozen=True)
class Plan:
    """A tile for each kernel, and what runs beside what.

    `cuts` and `backward_cuts` are shares of the chunks at which a call is cut into segments (none: no overlap of
    segments), `overlap_backward` puts ST and the gradients of the queries beside OG and STB. `gradient_chunks`: PG is
    the one kernel of `hopper_gradients`, where that runs, with so many chunks a program; 0: always three kernels.
    `num_segments`: how many the walks go through at once, with maps by the tiles of ST and STB.
    """

    pre: Tile = Tile(64, 4, 2)
    transition: Tile = Tile(32, 4, 4)
    out: Tile = Tile(64, 4, 2)
    transition_out: Tile = Tile(32, 4, 3)
    out_backward: Tile = Tile(64, 4, 2)
    transition_backward: Tile = Tile(32, 4, 3)
    query_backward: Tile = Tile(64, 4, 2)
    solve_backward: Tile = Tile(64, 4, 2)
    key_backward: Tile = Tile(64, 4, 2)
    cuts: tuple[float, ...] = ()
    backward_cuts: tuple[float, ...] = ()
    overlap_backward: bool = False
    gradient_chunks: int = 0
    num_segments: int = 1


def default_plan(k_dim: int, v_dim: int, dtype: torch.dtype, shared_memory: int = 232_448) -> Plan:
    """A plan that fits the shape, without overlap. `shared_memory`: bytes that a program may have; Hopper's here.

    ST and STB get as deep a load pipeline as fits: each step waits for its loads, and nothing else hides them. No loop
    goes without a pipeline: Triton 3.6.0 on an H200 gave wrong results for some kernels with one stage.
    """
    size = dtype.itemsize
    block_k, block_v = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    wide = block_k * size > 256
    walk_v = min(32 if size == 2 or not wide else 16, block_v)

    def walk(tiles_k: int, tiles_v: int, most: int) -> Tile:
        stage = CHUNK * (tiles_k * block_k + CHUNK + tiles_v * walk_v) * size
        fixed = block_k * walk_v * size
        return Tile(walk_v, 4, max([2, *(n for n in range(3, most + 1) if n * stage + fixed <= shared_memory)]))

    # Products of float32 take three passes and as many more registers.
    parallel = Tile(min(64 if size == 2 else 32, block_v), 8 if wide else 4, 2)
    return Plan(
        pre=parallel,
        transition=walk(1, 1, 4),
        out=parallel,
        out_backward=parallel,
        transition_backward=walk(2, 2, 4),
        query_backward=parallel,
        solve_backward=parallel,
        key_backward=parallel,
    )


class _Problem:
    """The shapes of one call, and the arguments that its kernels share."""

    def __init__(
        self, q: Tensor, v: Tensor, doc_start: Tensor | None, scale: float, eps: float | None, num_segments: int = 1
    ):
        self.batch, self.num_tokens, self.num_heads, self.v_dim = v.shape
        self.num_key_heads, self.k_dim = q.shape[2:]
        self.num_chunks = triton.cdiv(self.num_tokens, CHUNK)
        self.dtype, self.device = q.dtype, q.device
        self.doc_start = doc_start
        self.scale, self.eps = scale, 0.0 if eps is None else eps
        self.heads = self.batch * self.num_heads
        precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
        # Not B, T or N: what a kernel is compiled for must not depend on a chunk's length.
        self.key_sizes = dict(H=self.num_heads, HK=self.num_key_heads, K=self.k_dim, C=CHUNK)
        self.key_sizes |= dict(BK=max(16, triton.next_power_of_2(self.k_dim)), DTYPE=_DTYPES[q.dtype])
        self.key_sizes |= dict(PRECISION=precision)
        self.sizes = self.key_sizes | dict(V=self.v_dim)
        self.options = dict(B=self.batch, HAS_DOCS=doc_start is not None, NORMALIZE=eps is not None)
        self.num_segments = num_segments
        self.descriptors: dict[tuple, tuple] = {}  # see `hopper._matrix`

    def tiles(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        shape = (self.batch, self.num_heads, self.num_chunks, CHUNK, width)
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def tokens(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(self.batch, self.num_heads, self.num_chunks, CHUNK, dtype=dtype, device=self.device)

    def states(self) -> Tensor:
        shape = (self.batch, self.num_heads, self.num_chunks, self.k_dim, self.v_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def segment_states(self) -> Tensor:
        """One for each segment; none where there is one segment."""
        count = self.num_segments if self.num_segments > 1 else 0
        shape = (self.batch, self.num_heads, count, self.k_dim, self.v_dim)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def segment_maps(self) -> Tensor:
        """One for each segment but the first."""
        shape = (self.batch, self.num_heads, self.num_segments - 1, self.k_dim, self.k_dim)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def per_chunk(self, kernel, tile: Tile, chunks: range, *args, **more) -> None:
        """Launches a token-parallel kernel over some chunks of all heads."""
        kernel[(len(chunks) * self.heads,)](
            *args,
            self.num_tokens,
            self.num_chunks,
            chunks.start,
            **self.sizes,
            **self.options,
            BV=tile.block_v,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            STAGES=tile.num_stages,
            **more,
        )

    def walk(self, kernel, tile: Tile, chunks: range, *args, maps_of: tuple[int, ...] = ()) -> None:
        """Launches Triton's ST or STB through some chunks of all heads.

        `maps_of`: the maps of the segments instead, of so many columns.
        """
        block_v = min(tile.block_v, max(16, triton.next_power_of_2(self.v_dim)))
        blocks = sum(triton.cdiv(width, block_v) for width in (maps_of or (self.v_dim,)))
        parts = self.num_segments - 1 if maps_of else self.num_segments
        kernel[(self.heads * parts * blocks,)](
            *args,
            self.num_tokens,
            self.num_chunks,
            chunks.start,
            chunks.stop,
            self.num_segments,
            **self.sizes,
            BV=block_v,
            HAS_SOLVE=True,
            VECTOR_DECAY=False,
            FACTOR_STRIDE=FACTORS * CHUNK,
            DECAY_STRIDE=FACTORS * CHUNK,
            STAGES=tile.num_stages,
            MAPS=bool(maps_of),
            num_warps=tile.num_warps,
        )

    def transition(
        self, tile: Tile, chunks: range, prepared: _Prepared, k: Tensor, v: Tensor,
        state_in: Tensor, states: Tensor, v_new: Tensor, state_out: Tensor,
    ) -> None:  # fmt: skip
        """ST: from `state_in`, the state before the first of these chunks, to `state_out`."""
        if hopper.runs(self, tile, prepared.solve, k, v):
            hopper.transition(
                self, tile, chunks, prepared.solve, prepared.factors, k, v, state_in, states, v_new, state_out
            )
            return
        b, kappa, r, decay, *_ = prepared.factors.unbind(3)
        self.walk(
            transition.transition_kernel,
            *(tile, chunks, k, kappa, v, prepared.solve, b, r, decay, state_in, states, v_new, state_out, None),
        )

    def transition_backward(
        self, tile: Tile, chunks: range, prepared: _Prepared, q: Tensor, k: Tensor, grad_o: Tensor,
        scores: Tensor | None, grad_state_in: Tensor, tiles: Tensor, grad_states: Tensor, grad_state_out: Tensor,
    ) -> None:  # fmt: skip
        """STB: from the gradient of the state after the last of these chunks to that before the first.

        `tiles` receive a; without `scores` they hold P^T dO.
        """
        outputs = (grad_state_in, tiles, grad_states, grad_state_out)
        if scores is not None:
            args = (prepared.solve, scores, prepared.factors, q, k, grad_o, *outputs)
            hopper.transition_backward(self, tile, chunks, *args)
            return
        _, kappa, r, decay, rho, *_ = prepared.factors.unbind(3)
        self.walk(
            transition.transition_backward_kernel,
            *(tile, chunks, q, rho, k, kappa, prepared.solve, r, decay, grad_o, *outputs),
        )

    def fill_starts(
        self, tile: Tile, prepared: _Prepared, k: Tensor, v: Tensor, state: Tensor, starts: Tensor, maps: Tensor
    ) -> None:
        """The state before each segment, and the maps of all segments but the first."""
        chunks = range(self.num_chunks)
        if hopper.runs(self, tile, prepared.solve, k, v):
            hopper.transition_maps(self, tile, chunks, prepared.solve, prepared.factors, k, v, state, starts, maps)
        else:
            b, kappa, r, decay, *_ = prepared.factors.unbind(3)
            self.walk(
                transition.transition_kernel,
                *(tile, chunks, k, kappa, v, prepared.solve, b, r, decay, state, None, None, starts, maps),
                maps_of=(self.v_dim, self.k_dim),
            )
        self.compose(state, starts, maps, backward=False)

    def fill_ends(
        self, tile: Tile, prepared: _Prepared, q: Tensor, k: Tensor, grad_o: Tensor, scores: Tensor | None,
        tiles: Tensor, grad_state: Tensor, ends: Tensor, maps: Tensor,
    ) -> None:  # fmt: skip
        """The gradient of the state after each segment. `tiles` and `scores` as STB gets them."""
        chunks = range(self.num_chunks)
        if scores is not None:
            args = (prepared.solve, scores, prepared.factors, q, k, grad_o, grad_state, ends)
            hopper.transition_backward_maps(self, tile, chunks, *args)
        else:
            _, kappa, r, decay, rho, *_ = prepared.factors.unbind(3)
            self.walk(
                transition.transition_backward_kernel,
                *(tile, chunks, q, rho, k, kappa, prepared.solve, r, decay, grad_o, grad_state, tiles, None, ends),
                maps_of=(self.v_dim,),
            )
        self.compose(grad_state, ends, maps, backward=True)

    def compose(self, state: Tensor, ends: Tensor, maps: Tensor, backward: bool) -> None:
        """`transition.compose_kernel`: goes on from N, in `ends`, to what each segment begins with."""
        transition.compose_kernel[(self.heads * triton.cdiv(self.v_dim, COMPOSE.block_v),)](
            *(state, ends, maps, self.num_segments),
            K=self.k_dim,
            V=self.v_dim,
            BK=self.sizes["BK"],
            BV=COMPOSE.block_v,
            BACKWARD=backward,
            # Of M^T one pass of TF32 took twice the time of three: it has to be turned round first.
            PRECISION="tf32x3" if backward else self.sizes["PRECISION"],
            STAGES=COMPOSE.num_stages,
            num_warps=COMPOSE.num_warps,
        )

    def segments(self, cuts: tuple[float, ...]) -> list[range]:
        """The chunks cut at these shares of their number; in one piece where there is nothing to overlap."""
        edges = {0, self.num_chunks}
        if self.device.type == "cuda" and self.num_segments == 1:
            edges |= {round(cut * self.num_chunks) for cut in cuts}
        edges = sorted(edges)
        return [range(*pair) for pair in zip(edges, edges[1:], strict=False)]


class _SideStreams:
    """Streams beside the current one, for ST and STB. Not enabled, everything runs on the current stream.

    They have priority unless told otherwise: a walk is few programs that take long, and would else start only when the
    many short programs beside it have all been handed out. Tensors must be allocated before the first `run`, or by what
    it launches, and live until after the last `wait`: then the allocator, which knows only the stream that allocates,
    gives no memory away too early (a later `run` goes after all uses), and a graph capture sees one region.
    """

    _streams: ClassVar[dict[tuple[torch.device, int], torch.cuda.Stream]] = {}

    def __init__(self, device: torch.device, enabled: bool):
        self.device = device
        self.main = torch.cuda.current_stream(device) if enabled and device.type == "cuda" else None

    def run(self, lane: int, launch: Callable[[], None], priority: int = -1) -> torch.cuda.Event | None:
        """Launches after all that the current stream has so far, and returns the event of its end."""
        if self.main is None:
            launch()
            return None
        key = self.device, lane
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self.device, priority=priority)
        side = self._streams[key]
        side.wait_stream(self.main)
        with torch.cuda.stream(side):
            launch()
            return side.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """The current stream goes on after the event."""
        if event is not None:
            self.main.wait_event(event)


class _Prepared:
    """What Pre leaves for the other kernels."""

    def __init__(self, problem: _Problem, solve: Tensor | None = None):
        self.solve = problem.tiles(CHUNK) if solve is None else solve
        self.solved = solve is not None
        # Float64 for float32 inputs: see `gated_delta`.
        self.gate_sum = problem.tokens(torch.float64 if problem.dtype == torch.float32 else torch.float32)
        self.k_norm = problem.tokens()
        # Two of them are `out_backward_kernel`'s.
        chunks = self.k_norm.shape[:-1]
        self.factors = torch.empty(*chunks, FACTORS, CHUNK, dtype=torch.float32, device=problem.device)

    def run(
        self, problem: _Problem, tile: Tile, chunks: range, q: Tensor, k: Tensor, g: Tensor, beta: Tensor,
        scores: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`scores`: receive P."""
        if hopper.prepares(problem, tile, scores, q, k, self.solve):
            made = (self.solve, scores, self.gate_sum, self.k_norm, self.factors)
            hopper.prepare(problem, chunks, q, k, g, beta, *made, self.solved)
            return
        # Else two programs share a multiprocessor, and their chains of small products leave it idle.
        limit = 128 if problem.dtype != torch.float32 and problem.k_dim <= 128 and tile.num_warps == 4 else None
        kernels.pre_kernel[(len(chunks) * problem.heads,)](
            *(q, k, g, beta, problem.doc_start, self.solve, scores),
            *(self.gate_sum, self.k_norm, self.factors, problem.scale, problem.eps),
            problem.num_tokens,
            problem.num_chunks,
            chunks.start,
            **problem.key_sizes,
            **problem.options,
            SOLVE=not self.solved,
            SCORES=scores is not None,
            SOLVE_DTYPE=tl.float32 if problem.dtype == torch.float32 else tl.float16,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=limit,
        )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    doc_start: Tensor | None,
    scale: float,
    eps: float | None,
    plan: Plan,
) -> tuple[Tensor, Tensor, Kept]:
    """o [B, T, H, V], the state after the last token [B, H, K, V] float32, and what `backward` needs.

    q, k [B, T, HK, K] and v [B, T, H, V] of one dtype (float32, bfloat16, float16); g and beta [B, T, H]; state
    float32; doc_start int64 [B, T] or None; all contiguous. eps: normalise q and k with x / sqrt(sum x^2 + eps);
    None: they come normalised. Shapes and dtypes are the caller's business.
    """
    problem = _Problem(q, v, doc_start, scale, eps, plan.num_segments)
    prepared = _Prepared(problem)
    in_one = hopper.runs(problem, plan.transition_out, q, k, v)
    scores = problem.tiles(CHUNK) if in_one else None
    v_new, states = (None, None) if in_one else (problem.tiles(problem.v_dim), problem.states())
    o, state_out = torch.empty_like(v), torch.empty_like(state)
    segments = problem.segments(plan.cuts)
    side = _SideStreams(problem.device, len(segments) > 1)
    starts, maps = problem.segment_states(), problem.segment_maps()

    def pre(chunks: range) -> None:
        prepared.run(problem, plan.pre, chunks, q, k, g, beta, scores)

    def walk(chunks: range) -> None:
        # The second segment goes on from the state that the first one left.
        before = state if chunks.start == 0 else state_out
        if plan.num_segments > 1:
            before = starts
        if in_one:
            tile = plan.transition_out
            args = (prepared.solve, scores, prepared.factors, q, k, v, before, o, state_out)
            hopper.transition_out(problem, tile, chunks, *args)
            return
        problem.transition(plan.transition, chunks, prepared, k, v, before, states, v_new, state_out)

    def out(chunks: range) -> None:
        if in_one:
            return
        problem.per_chunk(
            kernels.out_kernel,
            plan.out,
            chunks,
            *(q, k, doc_start, states, v_new, prepared.gate_sum, prepared.k_norm, o, problem.scale, problem.eps),
        )

    walked = []
    for i, chunks in enumerate(segments):
        pre(chunks)
        if plan.num_segments > 1:
            problem.fill_starts(plan.transition, prepared, k, v, state, starts, maps)
        walked.append(side.run(0, partial(walk, chunks)))
        if i:
            side.wait(walked[i - 1])
            out(segments[i - 1])
    side.wait(walked[-1])
    out(segments[-1])
    return o, state_out, (prepared.solve, starts, maps)


def backward(
    grad_o: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    doc_start: Tensor | None,
    kept: Kept,
    scale: float,
    eps: float | None,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v (their dtype), g, beta (float32) and state, from those of o and the last state.

    Arguments as `forward`'s and what it kept; grad_o in v's dtype, grad_state float32, contiguous.
    """
    solve, starts, maps = kept
    problem = _Problem(q, v, doc_start, scale, eps, plan.num_segments)
    prepared = _Prepared(problem, solve)
    v_new, states = problem.tiles(problem.v_dim), problem.states()
    # STB for Hopper takes P^T dO by itself, of the scores; else OG leaves it where a comes.
    scores = problem.tiles(CHUNK) if hopper.runs(problem, plan.transition_backward, solve, q, k, grad_o) else None
    grad_solved, grad_states = problem.tiles(problem.v_dim), problem.states()
    grad_gate, unused, ends = problem.tokens(), torch.empty_like(state), problem.segment_states()
    q_norm = prepared.factors[..., Q_NORM, :]
    grad_system = problem.tiles(CHUNK)
    grad_v, grad_state_in = torch.empty_like(v), torch.empty_like(state)
    grad_g, grad_beta = (torch.empty(g.shape, dtype=torch.float32, device=g.device) for _ in range(2))
    shared = problem.num_heads > problem.num_key_heads
    # Value heads that share a key head: summed in float32.
    like = dict(dtype=torch.float32 if shared else q.dtype, device=q.device)
    grad_q, grad_k = (torch.empty(*v.shape[:3], problem.k_dim, **like) for _ in range(2))

    whole = range(problem.num_chunks)
    segments = problem.segments(plan.backward_cuts)[::-1]
    side = _SideStreams(problem.device, plan.overlap_backward)

    def out_backward() -> None:
        problem.per_chunk(
            backward_kernels.out_backward_kernel,
            plan.out_backward,
            whole,
            *(q, k, doc_start, grad_o, prepared.gate_sum, prepared.k_norm, prepared.factors, grad_solved),
            *(problem.scale, problem.eps),
        )

    def walk_back(chunks: range) -> None:
        after = grad_state if chunks.stop == problem.num_chunks else grad_state_in
        if plan.num_segments > 1:
            args = (prepared, q, k, grad_o, scores, grad_solved, grad_state, ends, maps)
            problem.fill_ends(plan.transition_backward, *args)
            after = ends
        outputs = (grad_solved, grad_states, grad_state_in)
        problem.transition_backward(plan.transition_backward, chunks, prepared, q, k, grad_o, scores, after, *outputs)

    def query_backward(chunks: range) -> None:
        problem.per_chunk(
            backward_kernels.query_backward_kernel,
            plan.query_backward,
            chunks,
            *(q, k, doc_start, grad_o, prepared.gate_sum, q_norm, prepared.k_norm, v_new, states, grad_q, grad_gate),
            problem.scale,
        )

    def solve_backward(chunks: range) -> None:
        problem.per_chunk(
            backward_kernels.solve_backward_kernel,
            plan.solve_backward,
            chunks,
            *(k, v, beta, doc_start, prepared.gate_sum, prepared.k_norm, v_new, states, grad_solved),
            *(grad_gate, grad_system, grad_k, grad_v, grad_beta),
        )

    def key_backward(chunks: range) -> None:
        problem.per_chunk(
            backward_kernels.key_backward_kernel,
            plan.key_backward,
            chunks,
            *(q, k, doc_start, grad_o, prepared.gate_sum, q_norm, prepared.k_norm, v_new, states, grad_states),
            *(grad_gate, grad_system, grad_k, grad_g, problem.scale),
        )

    def gradients(chunks: range) -> None:
        made = (prepared.factors, q, k, v, grad_o, v_new, states, grad_solved, grad_states)
        outputs = (grad_q, grad_k, grad_v, grad_g, grad_beta)
        hopper.gradients(problem, plan.gradient_chunks, chunks, *made, *outputs)

    def replay() -> None:
        before = starts if plan.num_segments > 1 else state
        problem.transition(plan.transition, whole, prepared, k, v, before, states, v_new, unused)

    prepared.run(problem, plan.pre, whole, q, k, g, beta, scores)
    replayed = side.run(0, replay)
    if scores is None:
        out_backward()
    walked = [side.run(1, partial(walk_back, chunks)) for chunks in segments]
    side.wait(replayed)
    merged = hopper.merges_gradients(problem, plan.gradient_chunks, q, k, v, grad_o)
    if not merged:
        query_backward(whole)
    for chunks, event in zip(segments, walked, strict=True):
        side.wait(event)
        if merged:
            gradients(chunks)
        else:
            solve_backward(chunks)
            key_backward(chunks)
    if shared:
        grad_q, grad_k = (x.unflatten(2, (problem.num_key_heads, -1)).sum(3).to(q.dtype) for x in (grad_q, grad_k))
    return grad_q, grad_k, grad_v, grad_g, grad_beta, grad_state_in
