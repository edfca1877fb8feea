"""Launches Mamba-3's kernels: `mamba3` for the forward, `mamba3_backward` for the backward.

Nothing is saved for the backward: angles and states are computed again there, from the inputs.

With cuts, Scan works on a side stream beside another segment's parallel part, and with `overlap_backward` that of the
backward beside what does not need it; so it does, on Hopper, where it is few programs:

    forward     Local1 -> (Scan1 || Local2) -> (Scan2 || Out1) -> Out2
    backward    Local -> (Scan || Local back) -> Scan back -> Queries -> Keys

(Where Local and Local back are one kernel, Scan works beside Scan back.)
Every kernel does the same with a segment as with the whole, so neither changes a bit.

A caller that has work of its own, as the projections of a layer, may put it beside them: see `Beside`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import hopper, hopper_mamba3
from . import mamba3 as kernels
from . import mamba3_backward as backward_kernels
from . import mamba3_finish as finish_kernels
from . import mamba3_gradients as gradient_kernels
from .gated_delta_rule import _DTYPES, CHUNK, Tile, _SideStreams

# What no plan says: kernels that take little time, and those of one vector or a few.
SMALL, ONE_WARP = Tile(16, 4, 3), Tile(16, 1, 8)
# Left alone, the compiler takes so many that two programs fit at once, where three hide more of the waiting.
REGISTERS = {"local_kernel": 168}
SHARED_TOKENS, SHARED_BACK = 16, Tile(16, 4, 6)
SUM_ROWS, SUMS = 16, Tile(16, 8, 3)
# Heads of a program of Gates and Gates back: their numbers of a token lie beside each other.
GATE_HEADS, GATES = 16, Tile(16, 4, 2)
# Whose tiles may say `specialized`: the form of `hopper_mamba3`, where that runs.
SPECIALIZED = ("local", "out", "local_backward")


@dataclass(frozen=True)
class Mamba3Plan:
    """A tile for each kernel, and what runs beside what.

    `block_v` of a tile is columns of P at a time, which are rows of S. `cuts`: shares of the chunks at which a forward
    is cut into segments; `overlap_backward`: the backward's first scan runs beside another kernel. `gradient_heads`:
    Queries and Keys are one kernel, see `hopper_mamba3_gradients`, with up to so many heads a program, where that runs.
    `overlap_projections`, `overlap_projections_backward`: a layer puts its projections beside these, see `Beside`.
    """

    local: Tile = Tile(64, 4, 2)
    scan: Tile = Tile(8, 1, 8)
    out: Tile = Tile(64, 4, 2)
    local_backward: Tile = Tile(64, 4, 2)
    scan_backward: Tile = Tile(8, 1, 8)
    query_gradients: Tile = Tile(64, 4, 2)
    key_gradients: Tile = Tile(64, 4, 2)
    cuts: tuple[float, ...] = ()
    overlap_backward: bool = False
    gradient_heads: int = 0
    overlap_projections: bool = False
    overlap_projections_backward: bool = False


def default_plan(k_dim: int, v_dim: int, dtype: torch.dtype, shared_memory: int = 232_448) -> Mamba3Plan:
    """A plan that fits N = k_dim, P = v_dim, without overlap. `shared_memory`: bytes that a program may have.

    Columns depend on the sizes and the type alone: sums over blocks of them must not depend on a GPU's table. No loop
    with products goes without a load pipeline, see `gated_delta_rule.default_plan`.
    """
    block_n, block_p = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    large = dtype.itemsize * block_n > 256
    columns = min(32 if large else 64, block_p)
    # A warp has whole rows of S, and many warps few of them: a walk waits for memory, not for sums.
    scan = Tile(8, 1, 8)
    # Tiles of 64 rows are shared out among four warps; eight would do the same twice, but have more registers.
    parallel = Tile(columns, 8 if large else 4, 2)
    walks = dict(scan=scan, scan_backward=scan)
    names = ("local", "out", "local_backward", "query_gradients", "key_gradients")
    return Mamba3Plan(**walks, **dict.fromkeys(names, parallel))


class Inputs(NamedTuple):
    """As `stateflow.recurrence.mamba3` has them, contiguous; x, z, B and C of one type, the states float32."""

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


def _nothing(*_: Tensor) -> None:
    pass


@dataclass(frozen=True)
class Beside:
    """What a caller launches while kernels of ours leave the device idle.

    Attributes:
        gates: beside Gates and Theta, of the forward and of the backward. x, z and the gradient of y need not be
            there before; x and the gradient of y must be after it.
        scan: beside Scan of the forward. z must be there after it.
        meanwhile: after `gates` of the backward and beside all that follows, whose kernels go first.
        finish: beside the last kernels of the backward; gets the gradients of x and z, which are there.
        at_once: ours and the caller's are on streams of their own. Else all is in turn on one, with the same bits.
    """

    gates: Callable[[], None] = _nothing
    scan: Callable[[], None] = _nothing
    meanwhile: Callable[[], None] = _nothing
    finish: Callable[[Tensor, Tensor], None] = _nothing
    at_once: bool = True


@functools.cache
def _arguments(kernel) -> frozenset[str]:
    return frozenset(kernel.arg_names)


class Problem:
    """The shapes of one call, what its kernels share, and the tensors between them."""

    def __init__(self, inputs: Inputs, doc_start: Tensor | None, norm_eps: float, A_floor: float):
        x = inputs.x
        self.inputs, self.doc_start, self.norm_eps, self.A_floor = inputs, doc_start, norm_eps, A_floor
        self.batch, self.num_tokens, self.num_heads, self.p_dim = x.shape
        self.n_dim, self.num_angles = inputs.B.shape[2], inputs.angle.shape[2]
        self.num_chunks = triton.cdiv(self.num_tokens, CHUNK)
        self.heads = self.batch * self.num_heads
        self.gate_blocks = self.batch * triton.cdiv(self.num_heads, GATE_HEADS)
        self.dtype, self.device = x.dtype, x.device
        self.descriptors: dict[tuple, tuple] = {}  # see `hopper_mamba3._tiles`
        half = max(16, triton.next_power_of_2(self.num_angles))  # products sum over them: 16 is the least
        others = max(16, triton.next_power_of_2(max(1, self.n_dim - 2 * self.num_angles)))
        # What kernels may be specialised on; each takes those that it names. Never a length.
        self.constants = dict(
            BATCH=self.batch, H=self.num_heads, N=self.n_dim, P=self.p_dim, R=self.num_angles, C=CHUNK,
            BN=triton.next_power_of_2(self.n_dim), BP=triton.next_power_of_2(self.p_dim), BR=half, BX=others,
            BT=SHARED_TOKENS, HB=GATE_HEADS, HAS_DOCS=doc_start is not None, DTYPE=_DTYPES[x.dtype],
            PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
        )  # fmt: skip

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def by_chunk(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.empty(self.batch, self.num_heads, self.num_chunks, *shape, dtype=dtype)

    def tokens(self) -> Tensor:
        return self.by_chunk(CHUNK)

    def states(self) -> Tensor:
        return self.by_chunk(self.p_dim, self.n_dim, dtype=self.dtype)

    def rows(self, width: int) -> Tensor:
        return self.by_chunk(CHUNK, width, dtype=self.dtype)

    def launch(self, kernel, programs: int, tile: Tile, *args, **more) -> None:
        constants = self.constants | dict(BV=tile.block_v, STAGES=tile.num_stages) | more
        constants = {name: value for name, value in constants.items() if name in _arguments(kernel)}
        if self.device.type == "cuda" and kernel.__name__ in REGISTERS and tile.num_warps == 4:
            constants["maxnreg"] = REGISTERS[kernel.__name__]
        kernel[(programs,)](*args, num_warps=tile.num_warps, num_stages=tile.num_stages, **constants)

    def per_chunk(self, kernel, tile: Tile, chunks: range, *args, programs: int | None = None, **more) -> None:
        """Launches a kernel over some chunks, with as many programs for each as given, or as there are heads."""
        programs = self.heads if programs is None else programs
        lengths = (self.num_tokens, self.num_chunks, chunks.start)
        self.launch(kernel, len(chunks) * programs, tile, *args, *lengths, **more)

    def scan(self, kernel, tile: Tile, chunks: range, *args) -> None:
        blocks = self.num_blocks(tile)
        lengths = (self.num_tokens, self.num_chunks, chunks.start, chunks.stop)
        self.launch(kernel, self.heads * blocks, tile, *args, *lengths)

    def num_blocks(self, tile: Tile) -> int:
        return triton.cdiv(self.p_dim, tile.block_v)

    def per_head(self, kernel, *args, **more) -> None:
        self.launch(kernel, self.heads, ONE_WARP, *args, self.num_tokens, self.num_chunks, **more)

    def segments(self, cuts: tuple[float, ...]) -> list[range]:
        """The chunks cut at these shares of their number; in one piece where there is nothing to overlap."""
        edges = {0, self.num_chunks}
        if self.device.type == "cuda":
            edges |= {round(cut * self.num_chunks) for cut in cuts}
        edges = sorted(edges)
        return [range(*pair) for pair in zip(edges, edges[1:], strict=False)]


class Prepared:
    """What the forward's kernels leave for each other and for the backward's; each method launches one of them."""

    def __init__(self, problem: Problem, with_rows: bool = True):
        """`with_rows`: whether Local leaves q and k; Out for Hopper makes them itself."""
        self.problem = problem
        self.whole = range(problem.num_chunks)
        by_token, num_angles = (problem.batch, problem.num_tokens), problem.num_angles
        self.B_factor, self.C_factor = problem.empty(*by_token), problem.empty(*by_token)
        self.speed = problem.empty(*by_token, num_angles)
        self.dt, self.own, self.scale = problem.tokens(), problem.tokens(), problem.tokens()
        exact = torch.float64 if problem.dtype == torch.float32 else torch.float32
        self.gate_sum = problem.by_chunk(CHUNK, dtype=exact)
        self.before, self.decay = problem.by_chunk(), problem.by_chunk()
        self.turn, self.theta = problem.by_chunk(num_angles), problem.by_chunk(num_angles)
        bounds = (problem.batch, problem.num_heads, problem.num_chunks + 1)
        self.k_bound, self.v_bound = problem.empty(*bounds, problem.n_dim), problem.empty(*bounds, problem.p_dim)
        self.states = problem.states()
        self.k_rows, self.q_rows = (problem.rows(problem.n_dim) if with_rows else None for _ in "kq")
        # [B, H, NC, C, 2R] float16, for who wants it: Local leaves the cosines and sines of all tokens there.
        self.cos_sin_rows: Tensor | None = None
        inputs = problem.inputs
        self.theta_out, self.state_out, self.k_out = map(torch.empty_like, (inputs.theta, inputs.state, inputs.k_last))

    def gates(self) -> None:
        """Shared, Gates and Theta of all chunks."""
        problem, inputs = self.problem, self.problem.inputs
        problem.per_chunk(
            kernels.shared_kernel,
            SMALL,
            self.whole,
            *(inputs.B, inputs.C, inputs.angle, self.B_factor, self.C_factor, self.speed, problem.norm_eps),
            programs=problem.batch,
        )
        problem.per_chunk(
            kernels.gates_kernel,
            GATES,
            self.whole,
            *(inputs.dd_dt, inputs.dd_A, inputs.trap, inputs.dt_bias, problem.doc_start, self.speed),
            *(self.dt, self.own, self.scale, self.gate_sum, self.before, self.decay, self.turn, problem.A_floor),
            programs=problem.gate_blocks,
        )
        problem.per_head(kernels.theta_kernel, inputs.theta, problem.doc_start, self.turn, self.theta, self.theta_out)

    def local(self, tile: Tile, chunks: range) -> None:
        problem, inputs = self.problem, self.problem.inputs
        if hopper_mamba3.runs(problem, tile):
            hopper_mamba3.local(self, chunks)
            return
        problem.per_chunk(
            kernels.local_kernel,
            tile,
            chunks,
            *(inputs.x, inputs.B, inputs.C, inputs.B_norm, inputs.C_norm, inputs.B_bias, inputs.C_bias),
            *(problem.doc_start, inputs.k_last, inputs.v_last, self.B_factor, self.C_factor, self.speed),
            *(self.dt, self.scale, self.gate_sum, self.theta),
            *(self.k_rows, self.q_rows, self.states, self.k_bound, self.v_bound, self.cos_sin_rows),
        )

    def scan(self, tile: Tile, chunks: range) -> None:
        # A later segment goes on from the state that the one before it left.
        state = self.problem.inputs.state if chunks.start == 0 else self.state_out
        bounds = (self.before, self.decay, self.k_bound, self.v_bound)
        self.problem.scan(kernels.scan_kernel, tile, chunks, *bounds, state, self.states, self.state_out, self.k_out)

    def out(self, tile: Tile, chunks: range, y: Tensor) -> None:
        problem, inputs = self.problem, self.problem.inputs
        if hopper_mamba3.runs(problem, tile):
            hopper_mamba3.out(self, chunks, y)
            return
        problem.per_chunk(
            kernels.out_kernel,
            tile,
            chunks,
            *(inputs.x, inputs.z, inputs.D, problem.doc_start, self.own, self.scale, self.gate_sum),
            *(self.k_rows, self.q_rows, self.states, y),
        )


class Backward:
    """What the backward's kernels leave for each other; each method launches one of them."""

    def __init__(self, prepared: Prepared, plan: Mamba3Plan, grads: tuple[Tensor, ...]):
        problem = prepared.problem
        self.prepared, self.problem = prepared, problem
        self.grad_y, self.grad_theta, self.grad_state, self.grad_k_last, self.grad_v_last = grads
        self.whole, self.grads = prepared.whole, Inputs(*map(torch.empty_like, problem.inputs))
        self.set_blocks(plan.scan_backward)
        merges = hopper_mamba3.merges_gradients(problem, plan.gradient_heads, self.grad_y)
        self.set_gradient_heads(plan.gradient_heads if merges else 0)
        # dY, before the gate z.
        self.grad_read = torch.empty_like(problem.inputs.x)
        self.grad_states, self.grad_v_bound = problem.states(), problem.by_chunk(problem.p_dim)
        self.owed_k = problem.by_chunk(problem.n_dim)
        self.query_bias, self.key_bias = problem.by_chunk(problem.n_dim), problem.by_chunk(problem.n_dim)
        self.grad_both = problem.tokens()
        self.grad_gate, self.grad_turn = problem.tokens(), problem.tokens()
        self.grad_scale, self.grad_own = problem.tokens(), problem.tokens()
        self.grad_dt_bias = problem.by_chunk()
        self.turn_total, self.carry = problem.by_chunk(problem.num_angles), problem.by_chunk(problem.num_angles)
        parts = CHUNK // SHARED_TOKENS * problem.num_chunks
        self.grad_norms = problem.empty(2, problem.batch, parts, problem.n_dim)

    def set_blocks(self, tile: Tile) -> None:
        """What Scan back leaves for each block of its rows."""
        self.num_blocks = self.problem.num_blocks(tile)
        self.grad_k_bound = self.problem.by_chunk(self.num_blocks, self.problem.n_dim)
        self.grad_before = self.problem.by_chunk(self.num_blocks)

    def set_gradient_heads(self, heads: int) -> None:
        """How many heads a program of the one kernel for all gradients has at most; 0: there are two kernels.

        It sums their rows. All programs have as many, or nearly.
        """
        problem = self.problem
        self.num_groups = triton.cdiv(problem.num_heads, heads) if heads else problem.num_heads
        self.gradient_heads = triton.cdiv(problem.num_heads, self.num_groups) if heads else 0
        rows = (problem.batch, self.num_groups, problem.num_chunks, CHUNK)
        widths = (problem.n_dim, problem.n_dim, problem.num_angles)
        self.query_rows, self.key_rows, self.speed_rows = (
            problem.empty(*rows, width, dtype=problem.dtype) for width in widths
        )
        if heads and self.prepared.cos_sin_rows is None:
            self.prepared.cos_sin_rows = problem.by_chunk(CHUNK, 2 * problem.num_angles, dtype=torch.float16)
        if not heads:
            # What Queries leaves for Keys.
            self.query_theta = problem.by_chunk(CHUNK, problem.num_angles)
            self.query_gate, self.read_by, self.both = problem.tokens(), problem.tokens(), problem.tokens()

    def local(self, tile: Tile) -> None:
        prepared, inputs = self.prepared, self.problem.inputs
        self.problem.per_chunk(
            backward_kernels.local_backward_kernel,
            tile,
            self.whole,
            *(self.grad_y, inputs.z, self.problem.doc_start, prepared.gate_sum, prepared.q_rows),
            *(self.grad_read, self.grad_states),
        )

    def scan(self, tile: Tile) -> None:
        """Scan back and Owed, with a tile of the width that `set_blocks` was told."""
        prepared = self.prepared
        self.problem.scan(
            backward_kernels.scan_backward_kernel,
            tile,
            self.whole,
            *(prepared.before, prepared.decay, prepared.k_bound, prepared.v_bound, self.grad_state, self.grad_states),
            *(self.grad_k_bound, self.grad_v_bound, self.grad_before, self.grads.state),
        )
        self.problem.per_chunk(
            backward_kernels.owed_kernel,
            ONE_WARP,
            self.whole,
            *(self.grad_k_last, self.grad_k_bound, self.owed_k, self.grads.k_last),
            NB=self.num_blocks,
        )

    def query_gradients(self, tile: Tile) -> None:
        prepared, inputs = self.prepared, self.problem.inputs
        self.problem.per_chunk(
            gradient_kernels.query_gradients_kernel,
            tile,
            self.whole,
            *(self.grad_y, self.grad_read, inputs.x, inputs.z, inputs.D, self.problem.doc_start),
            *(prepared.speed, prepared.dt, prepared.own, prepared.scale, prepared.gate_sum, prepared.theta),
            *(prepared.k_rows, prepared.q_rows, prepared.states, self.grads.z, self.query_rows, self.query_bias),
            *(self.query_theta, self.query_gate, self.read_by, self.both, self.grad_both),
        )

    def key_gradients(self, tile: Tile) -> None:
        prepared, inputs = self.prepared, self.problem.inputs
        self.problem.per_chunk(
            gradient_kernels.key_gradients_kernel,
            tile,
            self.whole,
            *(self.grad_read, inputs.x, inputs.D, self.problem.doc_start, self.grad_v_last),
            *(prepared.speed, prepared.dt, prepared.own, prepared.scale, prepared.gate_sum, prepared.decay),
            *(prepared.theta, prepared.k_rows, prepared.q_rows, prepared.states, prepared.k_bound),
            *(self.grad_states, self.owed_k, self.grad_v_bound),
            *(self.query_theta, self.query_gate, self.read_by, self.both, self.grad_both),
            *(self.grads.x, self.key_rows, self.speed_rows, self.key_bias),
            *(self.grad_gate, self.grad_turn, self.turn_total, self.grad_scale, self.grad_own),
        )

    def gradients(self) -> None:
        """Queries and Keys in one, with as many heads a program as `set_gradient_heads` was told."""
        hopper_mamba3.gradients(self)

    def finish(self) -> Inputs:
        """Carry, Gates back, Shared back and Sums."""
        problem, prepared, grads, inputs = self.problem, self.prepared, self.grads, self.problem.inputs
        problem.per_head(
            finish_kernels.carry_kernel,
            *(self.grad_theta, problem.doc_start, self.turn_total, self.grad_v_bound),
            *(self.carry, grads.theta, grads.v_last),
        )
        problem.per_chunk(
            finish_kernels.gates_backward_kernel,
            GATES,
            self.whole,
            *(inputs.dd_dt, inputs.dd_A, inputs.trap, inputs.dt_bias, problem.doc_start, prepared.speed, self.carry),
            *(self.grad_gate, self.grad_turn, self.grad_scale, self.grad_own, self.grad_before),
            *(grads.dd_dt, grads.dd_A, grads.trap, self.grad_dt_bias, problem.A_floor),
            programs=problem.gate_blocks,
            NB=self.num_blocks,
        )
        problem.per_chunk(
            finish_kernels.shared_backward_kernel,
            SHARED_BACK,
            self.whole,
            *(inputs.B, inputs.C, inputs.B_norm, inputs.C_norm, problem.doc_start),
            *(prepared.B_factor, prepared.C_factor, prepared.speed, prepared.dt, self.carry),
            *(self.key_rows, self.query_rows, self.speed_rows),
            *(grads.B, grads.C, grads.angle, *self.grad_norms),
            programs=problem.batch * (CHUNK // SHARED_TOKENS),
            GROUPS=self.num_groups,
        )
        problem.launch(
            finish_kernels.sums_kernel,
            problem.num_heads + 2 * triton.cdiv(problem.n_dim, SHARED_TOKENS),
            SUMS,
            *(self.grad_dt_bias, self.key_bias, self.query_bias, self.grad_both, self.grad_norms),
            *(grads.dt_bias, grads.B_bias, grads.C_bias, grads.D, grads.B_norm, grads.C_norm),
            *(problem.num_tokens, problem.num_chunks),
            ROWS=SUM_ROWS,
        )
        return grads


def forward(
    inputs: Inputs,
    doc_start: Tensor | None,
    norm_eps: float,
    A_floor: float,
    plan: Mamba3Plan,
    beside: Beside | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [B, T, H, P] in x's type; theta, state, k_last and v_last after the last token, float32.

    doc_start int64 [B, T] or None, contiguous. Shapes and types are the caller's business. With `beside` there are no
    segments.
    """
    problem = Problem(inputs, doc_start, norm_eps, A_floor)
    prepared = Prepared(problem, with_rows=not hopper_mamba3.runs(problem, plan.local, plan.out))
    y = torch.empty_like(inputs.x)
    segments = problem.segments(plan.cuts if beside is None else ())
    side = _SideStreams(problem.device, len(segments) > 1 if beside is None else beside.at_once)
    beside = beside or Beside()
    known = side.run(0, prepared.gates)
    beside.gates()
    side.wait(known)
    walked = []
    for i, chunks in enumerate(segments):
        prepared.local(plan.local, chunks)
        walked.append(side.run(0, partial(prepared.scan, plan.scan, chunks)))
        if i:
            side.wait(walked[i - 1])
            prepared.out(plan.out, segments[i - 1], y)
    beside.scan()
    side.wait(walked[-1])
    prepared.out(plan.out, segments[-1], y)
    return y, prepared.theta_out, prepared.state_out, prepared.k_out, prepared.v_bound[:, :, -1].clone()


def _few_programs(problem: Problem, plan: Mamba3Plan) -> bool:
    """Whether a scan is so few programs that on Hopper two at once take little longer.

    With 80 heads on an H200 either moves what memory can, and both at once are slower than one after the other.
    """
    programs = problem.heads * problem.num_blocks(plan.scan)
    return hopper.available(problem.device) and programs <= 2 * hopper_mamba3.num_multiprocessors(problem.device)


def backward(
    grads: tuple[Tensor, ...],
    inputs: Inputs,
    doc_start: Tensor | None,
    norm_eps: float,
    A_floor: float,
    plan: Mamba3Plan,
    beside: Beside | None = None,
) -> Inputs:
    """The gradients of all inputs in their types, from those of `forward`'s outputs (its types, contiguous)."""
    problem = Problem(inputs, doc_start, norm_eps, A_floor)
    prepared = Prepared(problem)
    back = Backward(prepared, plan, grads)
    at_once = plan.overlap_backward or _few_programs(problem, plan)
    side = _SideStreams(problem.device, at_once if beside is None else beside.at_once)
    beside = beside or Beside()
    known = side.run(0, prepared.gates)
    beside.gates()
    meanwhile = side.run(2, beside.meanwhile, priority=0)
    side.wait(known)
    in_one = hopper_mamba3.runs(problem, plan.local, plan.local_backward, given=(back.grad_y,))
    if in_one:
        hopper_mamba3.both(prepared, back.whole, back)
    else:
        prepared.local(plan.local, back.whole)
    states = side.run(0, partial(prepared.scan, plan.scan, back.whole))
    if not in_one:
        back.local(plan.local_backward)
    grad_states = side.run(1, partial(back.scan, plan.scan_backward))
    side.wait(states)
    side.wait(grad_states)
    if back.gradient_heads:
        back.gradients()
    else:
        back.query_gradients(plan.query_gradients)
        back.key_gradients(plan.key_gradients)
    found: list[Inputs] = []
    finished = side.run(0, lambda: found.append(back.finish()))
    beside.finish(back.grads.x, back.grads.z)
    side.wait(finished)
    side.wait(meanwhile)
    return found[0]
