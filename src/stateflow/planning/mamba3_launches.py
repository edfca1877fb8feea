"""Mamba-3's kernels one at a time, each on inputs of its own, for compilation and timing.

    python -m stateflow.planning.mamba3_launches --heads 80 40 24 --tokens 32768

checks the default plan against float64 on the current GPU, then prints the device time of each kernel and of the
whole forward and backward in ms. Also of the one kernel in the place of query_gradients and key_gradients, as planned
and, with `--gradient-heads 8 16`, with so many heads a program; plans with these are checked and timed as a whole, too.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from stateflow.recurrence.mamba3_kernels import A_FLOOR, NORM_EPS, Problem, random_inputs
from stateflow_kernels import hopper_mamba3
from stateflow_kernels import mamba3_rule as rule
from stateflow_kernels.gated_delta_rule import Tile
from stateflow_kernels.mamba3_rule import Mamba3Plan
from stateflow_kernels.plan_table import Shape

# In the order in which each has what it reads.
KERNELS = ("local", "scan", "out", "local_backward", "scan_backward", "query_gradients", "key_gradients")


def in_gluon(shape: Shape, plan: Mamba3Plan) -> bool:
    """Whether a call with aligned tensors launches the plan's forms for Hopper, whose tiles are fixed."""
    return (
        all(getattr(plan, name).specialized for name in rule.SPECIALIZED)
        and plan.gradient_heads > 0
        and shape.batch == 1
        and shape.dtype != "float32"
        and (shape.k_dim, shape.v_dim, shape.num_angles) in hopper_mamba3.SIZES
    )


def launched(shape: Shape, plan: Mamba3Plan) -> list[tuple[str, Tile | int]]:
    """Forward and backward, each kernel once, in the order in which each has what it reads."""
    if not in_gluon(shape, plan):
        return [(name, getattr(plan, name)) for name in KERNELS]
    names = dict(local_without_rows="local", both="local", scan="scan", out="out", scan_backward="scan_backward")
    return [(name, getattr(plan, tile)) for name, tile in names.items()] + [("gradients", plan.gradient_heads)]


def problem_of(shape: Shape, device: torch.device | str) -> Problem:
    """Gates in the type of the values, as projections give them; no documents."""
    dtype = getattr(torch, shape.dtype)
    sizes = (shape.num_heads, shape.k_dim, shape.v_dim, shape.num_angles)
    return Problem(torch.device(device), dtype, dtype, *sizes, has_docs=False, batch=shape.batch)


def example(
    shape: Shape, num_tokens: int, device: torch.device | str, seed: int = 0
) -> tuple[rule.Inputs, tuple[Tensor, ...]]:
    """What the operation takes, and gradients of what it returns; drawn on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    inputs, grads = random_inputs(
        problem_of(shape, device),
        shape.batch,
        num_tokens,
        lambda *size: torch.randn(size, generator=generator, device=device),
        lambda *size: torch.rand(size, generator=generator, device=device),
    )
    return rule.Inputs(*inputs), tuple(grads)


class Call:
    """The whole operation on random inputs, as `kernel_bench` asks for it."""

    def __init__(self, shape: Shape, num_tokens: int, device: torch.device):
        self.problem = problem_of(shape, device)
        self.inputs, self.grads = example(shape, num_tokens, device)
        self.bounds = self.problem.bounds

    def forward(self, plan: Mamba3Plan) -> tuple[Tensor, ...]:
        return rule.forward(self.inputs, None, NORM_EPS, A_FLOOR, plan)

    def backward(self, plan: Mamba3Plan, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return rule.backward(self.grads, self.inputs, None, NORM_EPS, A_FLOOR, plan)

    def results(self, plan: Mamba3Plan) -> list[Tensor]:
        """In the order of the bounds."""
        return self.problem.launch([*self.inputs, None], list(self.grads), plan)

    def expected(self) -> list[Tensor]:
        """The same by the chunk form in float64."""
        inputs, grads = ([x.cpu().double() for x in xs] for xs in (self.inputs, self.grads))
        return self.problem.expected([*inputs, None], grads)


class Launches:
    """A function for each kernel, by its name in `Mamba3Plan`, that launches it with a tile.

    The buffers hold what the kernels leave there; with `fill` those that a call with this plan launches have run once,
    so that all inputs are those of a real call. The scans work in place: again, they decay what is there.
    """

    def __init__(self, shape: Shape, num_tokens: int, device: torch.device, fill: Mamba3Plan | None = None):
        inputs, grads = example(shape, num_tokens, device)
        problem = rule.Problem(inputs, None, NORM_EPS, A_FLOOR)
        prepared = rule.Prepared(problem)
        self.y = torch.empty_like(inputs.x)
        plan = rule.default_plan(shape.k_dim, shape.v_dim, problem.dtype) if fill is None else fill
        # With what either form of the gradients needs.
        back = rule.Backward(prepared, dataclasses.replace(plan, gradient_heads=0), grads)
        self.merges_gradients = hopper_mamba3.merges_gradients(problem, 1, back.grad_y)
        self.back, self.heads_summed = back, 0
        whole = prepared.whole
        prepared.gates()
        self.gates, self.finish = prepared.gates, back.finish
        # The forward's, where that keeps no rows of q and k.
        without_rows = copy.copy(prepared)
        without_rows.k_rows = without_rows.q_rows = without_rows.cos_sin_rows = None
        if self.merges_gradients:
            self._sum_heads(1)
        self.keeps_rows = not hopper_mamba3.runs(problem, plan.local, plan.out)
        self.by_name: dict[str, Callable[[Tile], None]] = {
            "local": lambda tile: prepared.local(tile, whole),
            "scan": lambda tile: prepared.scan(tile, whole),
            "out": lambda tile: prepared.out(tile, whole, self.y),
            "local_backward": back.local,
            "scan_backward": lambda tile: self._scan_backward(back, tile),
            "query_gradients": partial(self._gradients, back.query_gradients, 1),
            "key_gradients": partial(self._gradients, back.key_gradients, 1),
            # In the place of some of these where `in_gluon`: Local of the forward, both Locals of the backward, and
            # all gradients, which has a number of heads for a tile.
            "local_without_rows": lambda tile: without_rows.local(tile, whole),
            "both": lambda _: hopper_mamba3.both(prepared, whole, back),
            "gradients": lambda heads: self._gradients(lambda _: back.gradients(), heads, heads),
        }
        if fill is not None:
            for name, tile in launched(shape, fill):
                self.by_name[name](tile)

    def _gradients(self, launch: Callable[[Tile | int], None], heads: int, tile: Tile | int) -> None:
        if self.merges_gradients and self.heads_summed != heads:
            self._sum_heads(heads)
        launch(tile)

    def _sum_heads(self, heads: int) -> None:
        """Gradients of B, C and angles have rows for each so many heads."""
        self.back.set_gradient_heads(heads)
        self.heads_summed = heads

    @staticmethod
    def _scan_backward(back: rule.Backward, tile: Tile) -> None:
        if back.num_blocks != back.problem.num_blocks(tile):
            back.set_blocks(tile)
        back.scan(tile)


def _time_kernels(
    shape: Shape, device: torch.device, plan: Mamba3Plan, measure, gradient_heads: list[int]
) -> dict[str, float]:
    launches = Launches(shape, shape.tokens, device, fill=plan)
    times = {"gates": measure(launches.gates)}
    for name in KERNELS:
        times[name] = measure(lambda name=name: launches.by_name[name](getattr(plan, name)))
        if name == "local" and not launches.keeps_rows:
            times["local without rows"] = measure(partial(launches.by_name["local_without_rows"], plan.local))
            times["local with local_backward"] = measure(partial(launches.by_name["both"], plan.local))
    times["finish"] = measure(launches.finish)
    for heads in gradient_heads if launches.merges_gradients else ():
        times[f"gradients of {heads} heads a program"] = measure(partial(launches.by_name["gradients"], heads))
        times[f"finish after {heads}"] = measure(launches.finish)
    return times


def time_all(shape: Shape, gradient_heads: list[int], say=print) -> None:
    """Prints the device time of every kernel with its default tile, median of 11 runs."""
    from stateflow.bench.measure import time_call
    from stateflow.recurrence import self_check
    from stateflow_kernels.plans import choice_for

    device = torch.device("cuda", torch.cuda.current_device())
    plan = choice_for(shape, device).plan
    plans = {"": plan} | {
        f"{heads} heads a program: ": dataclasses.replace(plan, gradient_heads=heads) for heads in gradient_heads
    }

    def measure(call: Callable[[], object], ahead_ms: float = 0.4) -> float:
        return time_call(call, runs=11, warm_up=2, ahead_ms=ahead_ms).median

    for name, changed in plans.items():
        trial = self_check.run(problem_of(shape, device), changed).trials[0]
        missed = trial.misses(problem_of(shape, device).bounds)
        say(f"{shape}: {name}{'wrong: ' + ', '.join(missed) if missed else 'right'}")
        say(f"  errors {', '.join(f'{name} {error:.1e}' for name, error in trial.errors.items())}")
    planned = [plan.gradient_heads] if plan.gradient_heads else []
    times = _time_kernels(shape, device, plan, measure, list(dict.fromkeys(planned + gradient_heads)))
    say("  " + ", ".join(f"{name} {ms:.3f}" for name, ms in times.items()) + " ms")
    call = Call(shape, shape.tokens, device)
    for name, changed in plans.items():
        # So long do their launches take on a slow host.
        forward = measure(partial(call.forward, changed), ahead_ms=3.0)
        backward = measure(partial(call.backward, changed, ()), ahead_ms=3.0)
        say(f"  {name}forward {forward:.3f} ms, backward {backward:.3f} ms, both {forward + backward:.3f} ms")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m stateflow.planning.mamba3_launches")
    parser.add_argument("--heads", type=int, nargs="+", default=[80, 40, 24])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768])
    for name, default in (("n-dim", 128), ("p-dim", 64), ("angles", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gradient-heads", type=int, nargs="+", default=[])
    options = parser.parse_args(arguments)
    sizes = (options.n_dim, options.p_dim, options.dtype, 1)
    for heads in options.heads:
        for tokens in options.tokens:
            time_all(Shape("mamba3", heads, 1, *sizes, tokens, options.angles), options.gradient_heads)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
