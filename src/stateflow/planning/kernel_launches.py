"""The kernels of the gated delta rule one at a time, each on inputs of its own, for compilation and timing.

    python -m stateflow.planning.kernel_launches --shapes 20x32768 10x32768 20x16384

checks the plan of each shape (heads x tokens) against float64 on the current GPU, then prints the device time of each
kernel and of the whole forward and backward in ms, with that plan and with others that differ in one thing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from stateflow.recurrence import self_check
from stateflow_kernels import gated_delta, gated_delta_backward, hopper
from stateflow_kernels import gated_delta_rule as kernels
from stateflow_kernels.gated_delta_rule import CHUNK, Plan, Tile, _Prepared, _Problem
from stateflow_kernels.plan_table import Shape
from stateflow_kernels.waves import walk_segments

EPS = 1e-6
# In the order in which each has what it reads.
KERNELS = (
    "pre", "transition", "transition_out", "out", "out_backward", "transition_backward", "query_backward",
    "solve_backward", "key_backward",
)  # fmt: skip


def random_inputs(
    shape: Shape, num_tokens: int, device: torch.device | str, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v, g, beta, state as `gated_delta_rule` takes them, q and k not normalised; gradients of o and state.

    Drawn on the device: equal on one kind of device with one version of torch.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype, batch, heads = getattr(torch, shape.dtype), shape.batch, shape.num_heads
    tokens, states = (batch, num_tokens), (batch, heads, shape.k_dim, shape.v_dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device)

    q, k = (normal(*tokens, shape.num_key_heads, shape.k_dim).to(dtype) for _ in range(2))
    v, grad_o = (normal(*tokens, heads, shape.v_dim).to(dtype) for _ in range(2))
    # In segments a memory that lasts: what maps carry on would else be too little for a comparison.
    g, beta = -(0.1 if shape.segments == 1 else 0.005) * uniform(*tokens, heads), uniform(*tokens, heads)
    state, grad_state = 0.3 * normal(*states), normal(*states)
    return [q, k, v, g, beta, state], [grad_o, grad_state]


class Call:
    """The whole operation on random inputs, as `kernel_bench` asks for it."""

    def __init__(self, shape: Shape, num_tokens: int, device: torch.device):
        self.inputs, self.grads = random_inputs(shape, num_tokens, device)
        self.options = (shape.k_dim**-0.5, EPS)
        self.bounds = self_check.BOUNDS_FLOAT32 if shape.dtype == "float32" else self_check.BOUNDS_16_BITS

    def forward(self, plan: Plan) -> tuple[Tensor, ...]:
        return kernels.forward(*self.inputs, None, *self.options, plan)

    def backward(self, plan: Plan, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return kernels.backward(*self.grads, *self.inputs, None, outputs[2], *self.options, plan)

    def results(self, plan: Plan) -> list[Tensor]:
        """In the order of the bounds."""
        outputs = self.forward(plan)
        return [*outputs[:2], *self.backward(plan, outputs)]

    def expected(self) -> list[Tensor]:
        """The same by the chunk form in float64."""
        from stateflow.recurrence.gated_delta_kernels import chunk_form, chunk_form_backward

        exact, exact_grads = ([x.cpu().double() for x in xs] for xs in (self.inputs, self.grads))
        outputs = chunk_form(*exact, None, *self.options)
        return [*outputs, *chunk_form_backward(*exact_grads, *exact, None, *self.options)]


class Launches:
    """A function for each kernel, by its name in `Plan`, that launches it with a tile.

    Inputs normalised by the kernels, no documents. The buffers hold what the kernels leave there; with `fill`
    each kernel has run once with the tiles of the plan given, so that all inputs are those of a real call.
    """

    def __init__(self, shape: Shape, num_tokens: int, device: torch.device, fill: Plan | None = None):
        (q, k, v, g, beta, state), (grad_o, grad_state) = random_inputs(shape, num_tokens, device)
        scale = shape.k_dim**-0.5
        problem = _Problem(q, v, None, scale, EPS, shape.segments)
        starts, maps, ends = problem.segment_states(), problem.segment_maps(), problem.segment_states()
        in_segments = shape.segments > 1
        state_in = starts if in_segments else state
        whole = range(problem.num_chunks)
        prepared = _Prepared(problem)
        v_new, states = problem.tiles(shape.v_dim), problem.states()
        grad_solved, grad_states = problem.tiles(shape.v_dim), problem.states()
        q_norm, grad_gate = prepared.factors[..., kernels.Q_NORM, :], problem.tokens()
        grad_system = problem.tiles(CHUNK)
        state_out, grad_state_in = torch.empty_like(state), torch.empty_like(state)
        o, grad_v, grad_g, grad_beta = (torch.empty_like(x) for x in (v, v, g, beta))
        shared = shape.num_heads > shape.num_key_heads
        like = dict(dtype=torch.float32 if shared else q.dtype, device=device)
        grad_q, grad_k = (torch.empty(*v.shape[:3], shape.k_dim, **like) for _ in range(2))
        factors, docs = (prepared.gate_sum, prepared.k_norm), None
        scores = problem.tiles(CHUNK) if hopper.available(problem.device) else None

        def pre(tile: Tile) -> None:
            prepared.run(problem, tile, whole, q, k, g, beta, scores)

        def pre_backward(tile: Tile) -> None:
            """Pre where T is given."""
            _Prepared(problem, prepared.solve).run(problem, tile, whole, q, k, g, beta, scores)

        def transition(tile: Tile) -> None:
            """In segments with their maps, which have the same tile."""
            if in_segments:
                problem.fill_starts(tile, prepared, k, v, state, starts, maps)
            problem.transition(tile, whole, prepared, k, v, state_in, states, v_new, state_out)

        def transition_backward(tile: Tile) -> None:
            given = scores if hopper.runs(problem, tile, q, k, grad_o) else None
            if in_segments:
                problem.fill_ends(tile, prepared, q, k, grad_o, given, grad_solved, grad_state, ends, maps)
            outputs = (ends if in_segments else grad_state, grad_solved, grad_states, grad_state_in)
            problem.transition_backward(tile, whole, prepared, q, k, grad_o, given, *outputs)

        def transition_out(tile: Tile) -> None:
            """ST and Out in one, where that runs; else ST."""
            if hopper.runs(problem, tile, q, k, v):
                args = (prepared.solve, scores, prepared.factors, q, k, v, state_in, o, state_out)
                hopper.transition_out(problem, tile, whole, *args)
            else:
                problem.transition(tile, whole, prepared, k, v, state_in, states, v_new, state_out)

        def per_chunk(kernel, args: tuple, tile: Tile) -> None:
            problem.per_chunk(kernel, tile, whole, *args)

        numbers = (problem.scale, problem.eps)
        self.by_name: dict[str, Callable[[Tile], None]] = {
            "pre": pre,
            "transition": transition,
            "transition_out": transition_out,
            "out": partial(per_chunk, gated_delta.out_kernel, (q, k, docs, states, v_new, *factors, o, *numbers)),
            "out_backward": partial(
                per_chunk,
                gated_delta_backward.out_backward_kernel,
                (q, k, docs, grad_o, *factors, prepared.factors, grad_solved, *numbers),
            ),
            "transition_backward": transition_backward,
            "query_backward": partial(
                per_chunk,
                gated_delta_backward.query_backward_kernel,
                (q, k, docs, grad_o, prepared.gate_sum, q_norm, prepared.k_norm, v_new, states, grad_q, grad_gate)
                + (problem.scale,),
            ),
            "solve_backward": partial(
                per_chunk,
                gated_delta_backward.solve_backward_kernel,
                (k, v, beta, docs, *factors, v_new, states, grad_solved, grad_gate, grad_system)
                + (grad_k, grad_v, grad_beta),
            ),
            "key_backward": partial(
                per_chunk,
                gated_delta_backward.key_backward_kernel,
                (q, k, docs, grad_o, prepared.gate_sum, q_norm, prepared.k_norm, v_new, states, grad_states)
                + (grad_gate, grad_system, grad_k, grad_g, problem.scale),
            ),
        }
        # All three of the last ones at once, where that runs.
        made = (prepared.factors, q, k, v, grad_o, v_new, states, grad_solved, grad_states)
        outputs = (grad_q, grad_k, grad_v, grad_g, grad_beta)
        self.merges_gradients = hopper.merges_gradients(problem, 1, q, k, v, grad_o)
        self.pre_backward = pre_backward
        self.gradients = lambda chunks_a_program: hopper.gradients(problem, chunks_a_program, whole, *made, *outputs)
        # Not of a tile of their own: see `launched`.
        self.by_name |= {"pre_backward": pre_backward, "gradients": self.gradients}
        self.results = dict(o=o, state=state_out, dq=grad_q, dk=grad_k, dv=grad_v, dg=grad_g, dbeta=grad_beta)
        self.results["dstate"] = grad_state_in
        if fill is not None:
            for name in KERNELS:
                self.by_name[name](getattr(fill, name))


def problem_of(shape: Shape, device: torch.device) -> SimpleNamespace:
    """As much of a `_Problem` as tells which kernels run."""
    sizes = dict(k_dim=shape.k_dim, v_dim=shape.v_dim, num_heads=shape.num_heads, num_key_heads=shape.num_key_heads)
    return SimpleNamespace(batch=shape.batch, dtype=getattr(torch, shape.dtype), device=device, **sizes)


def launched(plan: Plan, shape: Shape, device: torch.device) -> list[tuple[str, Tile | int]]:
    """What a forward and a backward with this plan launch, by the names in `Launches`; "gradients" has chunks."""
    problem = problem_of(shape, device)
    unused = {"out"} if hopper.runs(problem, plan.transition_out) else {"transition_out"}
    if hopper.runs(problem, plan.transition_backward):
        unused.add("out_backward")
    merged = hopper.merges_gradients(problem, plan.gradient_chunks)
    if merged:
        unused |= {"query_backward", "solve_backward", "key_backward"}
    found = [(name, getattr(plan, name)) for name in KERNELS if name not in unused]
    return [*found, ("pre_backward", plan.pre), *([("gradients", plan.gradient_chunks)] if merged else [])]


def _variants(plan: Plan) -> dict[str, Plan]:
    """Backwards that differ in one thing from the plan's."""
    found = {f"gradient_chunks {n}": replace(plan, gradient_chunks=n) for n in (0, 4, 8, 16, 32)}
    for cuts in ((), (0.5,), (0.33, 0.66)):
        found[f"overlap, cuts {list(cuts)}"] = replace(plan, overlap_backward=True, backward_cuts=cuts)
    pairs = (((32, 4, 2), (32, 4, 2)), ((16, 4, 3), (16, 4, 2)), ((32, 4, 4), (32, 4, 3)), ((16, 4, 4), (16, 4, 3)))
    for walk, walk_back in pairs:
        tiles = dict(transition=Tile(*walk, specialized=True), transition_backward=Tile(*walk_back, specialized=True))
        found[f"overlap, ST {walk}, STB {walk_back}"] = replace(plan, **tiles, overlap_backward=True, backward_cuts=())
    found["no overlap"] = replace(plan, overlap_backward=False, backward_cuts=())
    return {name: variant for name, variant in found.items() if variant != plan}


def _forward_variants(plan: Plan) -> dict[str, Plan]:
    tiles = [Tile(*sizes, specialized=True) for sizes in ((32, 4, 3), (32, 4, 2), (16, 4, 3), (16, 4, 2))]
    found = {"ST and Out apart": replace(plan, transition_out=Tile())}
    for tile in tiles:
        for cuts in ((), (0.5,), (0.3, 0.6)):
            name = f"ST and Out in one, BV {tile.block_v}, {tile.num_stages} stages, cuts {list(cuts)}"
            found[name] = replace(plan, transition_out=tile, cuts=cuts)
    return {name: variant for name, variant in found.items() if variant != plan}


def _time_kernels(shape: Shape, device: torch.device, plan: Plan, measure) -> dict[str, float]:
    launches = Launches(shape, shape.tokens, device, fill=plan)
    times = {name: measure(lambda name=name: launches.by_name[name](getattr(plan, name))) for name in KERNELS}
    times["pre of the backward"] = measure(lambda: launches.pre_backward(plan.pre))
    if launches.merges_gradients and plan.gradient_chunks:
        times["gradients"] = measure(lambda: launches.gradients(plan.gradient_chunks))
    return times


def time_all(shape: Shape, say=print) -> None:
    """Prints what the module says, medians of 11 runs."""
    from stateflow.bench.measure import time_call
    from stateflow_kernels.plans import choice_for

    device = torch.device("cuda", torch.cuda.current_device())
    plan = choice_for(shape, device).plan
    sizes = (shape.num_heads, shape.num_key_heads, shape.k_dim, shape.v_dim)
    options = dict(normalize=True, has_docs=False, in_segments=shape.segments > 1)
    problem = self_check.Problem(device, getattr(torch, shape.dtype), *sizes, **options)
    inputs, grads = problem.example()
    expected = problem.expected(*([x if x is None else x.double() for x in xs] for xs in (inputs, grads)))

    def verdict(plan: Plan) -> str:
        trial = self_check._try(problem, plan, inputs, grads, expected)
        missed = trial.misses(problem.bounds)
        return f"wrong: {', '.join(missed)}" if missed else f"right, largest error {max(trial.errors.values()):.1e}"

    def measure(call: Callable[[], object], ahead_ms: float = 0.4) -> float:
        return time_call(call, runs=11, warm_up=2, ahead_ms=ahead_ms).median

    say(f"{shape}: {verdict(plan)}")
    times = _time_kernels(shape, device, plan, measure)
    say("  " + ", ".join(f"{name} {ms:.3f}" for name, ms in times.items()) + " ms")
    call = Call(shape, shape.tokens, device)
    outputs = call.forward(plan)
    forward = measure(lambda: call.forward(plan), 2.0)
    backward = measure(lambda: call.backward(plan, outputs), 2.0)
    say(f"  forward {forward:.3f} ms, backward {backward:.3f} ms, both {forward + backward:.3f} ms")
    if shape.segments > 1:
        return
    for name, variant in _forward_variants(plan).items():
        ms = measure(lambda variant=variant: call.forward(variant), 2.0)
        say(f"  forward with {name}: {ms:.3f} ms, {verdict(variant)}")
    for name, variant in _variants(plan).items():
        ms = measure(lambda variant=variant: call.backward(variant, outputs), 2.0)
        say(f"  backward with {name}: {ms:.3f} ms, {verdict(variant)}")


def main(arguments: list[str]) -> int:
    from stateflow.bench.measure import end_without_cuda

    parser = argparse.ArgumentParser(prog="python -m stateflow.planning.kernel_launches")
    parser.add_argument("--shapes", nargs="+", default=["20x32768", "10x32768", "20x16384"])
    for name in ("k-dim", "v-dim"):
        parser.add_argument(f"--{name}", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--any-order", action="store_true", help="in segments, where that is used")
    options = parser.parse_args(arguments)
    end_without_cuda(parser)
    for text in options.shapes:
        heads, tokens = map(int, text.split("x"))
        sizes = (options.k_dim, options.v_dim)
        segments = walk_segments(-(-tokens // CHUNK), heads, *sizes) if options.any_order else 1
        time_all(Shape("gated_delta_rule", heads, heads, *sizes, options.dtype, 1, tokens, segments=segments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
