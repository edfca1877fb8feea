"""What passes over memory only: short convolution, gated norm, gates, SwiGLU's activation, by shapes of programs.

    python -m stateflow.bench.elementwise [--tokens 16384 --dim 2560 --heads 20 --head-dim 128 --ffn-dim 6912]
    python -m stateflow.bench.elementwise --only short_conv_backward --tiles short_conv_backward=4,2,4,8,16,80

For each kernel, forward and backward apart (with the second pass of sums over tokens), the tile that is built in and
some others: first compared with float64 on fewer tokens, then the median time, and the rate of the bytes that any form
must move. ``--tiles NAME=a,b,..`` tries these instead, in the order of the fields of the kernel's Tile or Walk.
``copy`` and ``rms_norm`` are torch's, for comparison. On a CPU, where kernels are interpreted, times are the
interpreter's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stateflow.bench.measure import Timing, markdown_table, relative_l2, time_call
from stateflow.recurrence import delta_gates, gated_rms_norm, short_conv, swiglu

EPS = 1e-6
BOUNDS = {torch.bfloat16: 5e-3, torch.float32: 1e-4}
SETS = 3  # of inputs, in turn: the second call must not find its inputs in the L2


@dataclass(frozen=True)
class Kernel:
    """One direction of an operation.

    Attributes:
        draw: random arguments for a number of tokens.
        call: the kernel with a tile, a result or several.
        exact: the same results of arguments in float64.
        traffic: bytes a token that must be moved.
        tiles: the built-in one, then others.
    """

    draw: Callable[[int], list[Tensor]]
    call: Callable[..., Tensor | tuple[Tensor | None, ...]]
    exact: Callable[..., Tensor | tuple[Tensor, ...]]
    traffic: int
    tiles: Sequence[tuple[int, ...] | None]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    begun = time.monotonic()
    kernels = {name: kernel for name, kernel in all_kernels(options).items() if name in (options.only or NAMES)}
    if options.processes > 1:
        compile_all(kernels, arguments, options.processes)
    print(f"compiled after {time.monotonic() - begun:.1f} s", flush=True)
    rows, wrong = [], False
    for name, kernel in kernels.items():
        few = kernel.draw(options.parity_tokens)
        expected = tensors(kernel.exact(*(x.double() for x in few)))
        sets = [kernel.draw(options.tokens) for _ in range(SETS)]
        for tile in kernel.tiles:
            if time.monotonic() - begun > options.seconds:
                print(f"{name} {tile}: left out, {options.seconds:g} s are over", flush=True)
                continue
            results = tensors(kernel.call(*few, tile))
            errors = [relative_l2(r, e) / BOUNDS[r.dtype] for r, e in zip(results, expected, strict=True)]
            row = [name, "built in" if tile == kernel.tiles[0] else "", str(tile and tuple(tile))]
            if not max(errors) <= 1:
                wrong = True
                rows.append([*row, "-", "-", f"wrong: {max(errors):.1g} of what is allowed"])
            else:
                timing = measure(kernel, sets, tile, options)
                rate = kernel.traffic * options.tokens / timing.median / 1e6
                rows.append([*row, f"{1e3 * timing.median:.1f}", f"{rate:,.0f}", f"{1e3 * timing.spread:.1f} us"])
            print(" ".join(rows[-1]), flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "the interpreter"
    print(f"\n{device}, torch {torch.__version__}, {options.tokens:,} tokens, {time.monotonic() - begun:.0f} s\n")
    print(markdown_table(("kernel", "", "tile", "us", "GB/s", "quartiles apart"), rows))
    return int(wrong)


def tensors(results: Tensor | tuple[Tensor | None, ...]) -> list[Tensor]:
    return [x for x in ((results,) if isinstance(results, Tensor) else results) if x is not None]


def measure(kernel: Kernel, sets: Sequence[list[Tensor]], tile: tuple[int, ...] | None, options) -> Timing:
    """Of one call."""
    if options.device == "cpu":
        started = time.perf_counter()
        kernel.call(*sets[0], tile)
        return Timing.of([1e3 * (time.perf_counter() - started)])

    def call() -> None:
        for inputs in sets:
            kernel.call(*inputs, tile)

    of_all = time_call(call, options.runs, warm_up=2, ahead_ms=1.0)
    return Timing(*(ms / len(sets) for ms in (of_all.median, of_all.low, of_all.high)), of_all.runs)


def compile_all(kernels: dict[str, Kernel], arguments: Sequence[str] | None, processes: int) -> None:
    """Fills Triton's cache, by processes that call each kernel once: one would take most of the time for it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    work = [(name, tile, list(arguments)) for name, kernel in kernels.items() for tile in kernel.tiles if tile]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(call_once, work, chunksize=1))


def call_once(work: tuple[str, tuple[int, ...], list[str]]) -> None:
    name, tile, arguments = work
    kernel = all_kernels(parse(arguments))[name]
    kernel.call(*kernel.draw(300), tile)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stateflow.bench.elementwise", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--parity-tokens", type=int, default=700)
    parser.add_argument("--dim", type=int, default=2560, help="channels of a convolution")
    parser.add_argument("--width", type=int, default=4, help="of the convolution's filter")
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ffn-dim", type=int, default=6912)
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME")
    parser.add_argument("--tiles", nargs="+", type=named_tile, default=[], metavar="NAME=a,b,..")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=55.0, help="nothing is begun after (default 55)")
    parser.add_argument("--processes", type=int, default=12, help="that compile; 1: as it comes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        from stateflow_kernels.primitives import INTERPRETED

        if not INTERPRETED:
            parser.error("without a GPU the kernels run interpreted only: set TRITON_INTERPRET=1 before Python starts")
        options.processes = 1
    return options


def named_tile(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, numbers = text.partition("=")
    if name not in NAMES or not numbers:
        raise argparse.ArgumentTypeError(f"{text}: give NAME=a,b,.. with one of {', '.join(NAMES)}")
    return name, tuple(int(number) for number in numbers.split(","))


# Besides what is built in.
OTHERS = {
    "short_conv": [
        (4, 4, 4, 6, 16, 48), (4, 4, 4, 6, 16, 192), (4, 4, 4, 6, 16, 16), (8, 4, 4, 7, 16, 96), (8, 4, 4, 7, 16, 32),
        (8, 4, 4, 7, 16, 16),
    ],
    "short_conv_backward": [
        (2, 4, 4, 9, 16, 80), (2, 4, 4, 9, 16, 48), (2, 4, 2, 9, 16, 160), (4, 2, 4, 8, 16, 160), (4, 2, 4, 8, 16, 80),
        (4, 2, 4, 8, 16, 32), (4, 2, 2, 8, 16, 160), (2, 4, 8, 7, 16, 160),
    ],
    "gated_norm": [(4096, 4), (1024, 4), (2048, 8), (1024, 2)],
    "gated_norm_backward": [
        (1024, 4, 8, 8), (1024, 4, 8, 24), (2048, 4, 5, 64), (2048, 8, 4, 64), (1024, 2, 10, 64), (512, 2, 16, 64),
    ],
    "delta_gates": [(2048, 4), (512, 4), (512, 2)],
    "delta_gates_backward": [(1024, 4), (4096, 4), (2048, 8)],
    "swiglu": [(1024, 4), (4096, 4), (4096, 8), (2048, 8), (8192, 8)],
    "swiglu_backward": [(2048, 4), (2048, 8), (1024, 2), (4096, 8)],
}  # fmt: skip
NAMES = ("copy", "rms_norm", *OTHERS)


def all_kernels(options: argparse.Namespace) -> dict[str, Kernel]:
    from stateflow_kernels import gated_norm, gates
    from stateflow_kernels import short_conv as conv
    from stateflow_kernels import swiglu as activation

    device, generator = options.device, torch.Generator(options.device).manual_seed(0)
    dim, heads, head_dim, ffn_dim, width = (
        options.dim, options.heads, options.head_dim, options.ffn_dim, options.width
    )  # fmt: skip

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def conv_inputs(tokens: int) -> list[Tensor]:
        return [normal(1, tokens, dim), normal(dim, width), normal(1, width - 1, dim, dtype=torch.float32)]

    def gate_inputs(tokens: int) -> list[Tensor]:
        return [normal(tokens, heads), normal(tokens, heads), normal(heads), normal(heads) - 3]

    def norm_inputs(tokens: int) -> list[Tensor]:
        return [normal(tokens * heads, head_dim), normal(tokens * heads, head_dim), normal(head_dim)]

    def with_grads(operation: Callable, *outputs: Callable[[int], Tensor], inputs: Callable) -> tuple:
        """What a backward is called with, gradients of the outputs first, and the exact gradients of all inputs."""

        def draw(tokens: int) -> list[Tensor]:
            return [*(output(tokens) for output in outputs), *inputs(tokens)]

        def exact(*arguments: Tensor) -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in arguments[len(outputs) :]]
            return torch.autograd.grad(operation(*leaves), leaves, arguments[: len(outputs)])

        return draw, exact

    def exact_conv(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        return short_conv(x, weight, None, tail)

    conv_grads = with_grads(
        exact_conv, lambda tokens: normal(1, tokens, dim),
        lambda _: normal(1, width - 1, dim, dtype=torch.float32), inputs=conv_inputs,
    )  # fmt: skip
    norm_grads = with_grads(
        lambda *x: gated_rms_norm(*x, EPS), lambda tokens: normal(tokens * heads, head_dim), inputs=norm_inputs
    )
    gate_grads = with_grads(
        delta_gates, *2 * [lambda tokens: normal(tokens, heads, dtype=torch.float32)], inputs=gate_inputs
    )
    wide = with_grads(swiglu, lambda tokens: normal(tokens, ffn_dim), inputs=lambda t: [*_pair(normal, t, ffn_dim)])
    kernels = {
        "copy": Kernel(lambda t: [normal(t, dim)], lambda x, _: x.clone(), lambda x: x, 4 * dim, [None]),
        "rms_norm": Kernel(
            lambda t: [normal(t, dim), normal(dim)], lambda x, w, _: F.rms_norm(x, (dim,), w, EPS),
            lambda x, w: F.rms_norm(x, (dim,), w, EPS), 4 * dim, [None],
        ),
        "short_conv": Kernel(
            conv_inputs, lambda x, w, tail, tile: conv.forward(x, w, None, tail, None, tile and conv.Walk(*tile)),
            exact_conv, 4 * dim, [conv.FORWARD],
        ),
        "short_conv_backward": Kernel(
            conv_grads[0],
            lambda dy, dtail, x, w, tail, tile: conv.backward(
                dy, dtail, x, w, None, tail, None, tile and conv.Walk(*tile)
            ),
            lambda *x: conv_grads[1](*x), 6 * dim, [conv.BACKWARD],
        ),
        "gated_norm": Kernel(
            norm_inputs, lambda *x: gated_norm.forward(*x[:-1], EPS, gated_norm.Tile(*x[-1])),
            lambda *x: gated_rms_norm(*x, EPS), 6 * heads * head_dim, [gated_norm.FORWARD],
        ),
        "gated_norm_backward": Kernel(
            norm_grads[0], lambda *x: gated_norm.backward(*x[:-1], EPS, gated_norm.Tile(*x[-1])),
            norm_grads[1], 10 * heads * head_dim, [gated_norm.BACKWARD],
        ),
        "delta_gates": Kernel(
            gate_inputs, lambda *x: gates.forward(*x[:-1], 1.0, gates.Tile(*x[-1])), delta_gates, 12 * heads,
            [gates.FORWARD],
        ),
        "delta_gates_backward": Kernel(
            gate_grads[0], lambda *x: gates.backward(*x[:-1], 1.0, gates.Tile(*x[-1])), gate_grads[1], 16 * heads,
            [gates.BACKWARD],
        ),
        "swiglu": Kernel(
            lambda t: [*_pair(normal, t, ffn_dim)], lambda *x: activation.forward(*x[:-1], activation.Tile(*x[-1])),
            swiglu, 6 * ffn_dim, [activation.FORWARD],
        ),
        "swiglu_backward": Kernel(
            wide[0], lambda *x: activation.backward(*x[:-1], activation.Tile(*x[-1])), wide[1], 10 * ffn_dim,
            [activation.BACKWARD],
        ),
    }  # fmt: skip
    for name, others in OTHERS.items():
        given = [tile for other, tile in options.tiles if other == name]
        kernels[name].tiles[1:] = given or [tile for tile in others if tile != kernels[name].tiles[0]]
    return kernels


def _pair(normal: Callable[..., Tensor], tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    return normal(tokens, dim), normal(tokens, dim)


if __name__ == "__main__":
    sys.exit(main())
