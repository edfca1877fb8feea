"""Attention of a chunk over [prefix; chunk]: cuDNN's and torch's flash kernels in two parts, beside FlexAttention.

    python -m stateflow.bench.attention [--heads 20 --kv-heads 5 --head-dim 128] [--shapes 0,16384 16384,16384]

A shape is (tokens of the prefix, tokens of the chunk).  FlexAttention is compiled anew for each; what would begin after
``--seconds`` is left out, with a line that says so.  Each contestant's output and gradients are compared with the flash
form's first.  TFLOP/s count 4 (forward) and 10 (backward) FLOPs a query head, channel and pair of query and key.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stateflow.bench.measure import Timing, end_without_cuda, markdown_table, relative_l2, time_call
from stateflow.recurrence import attention_parts as parts

SHAPES = ((0, 16384), (16384, 16384), (49152, 16384), (28672, 4096))
MASK_BLOCK = 128
BOUND = 1e-2  # of two results in 16 bits
NAMES = ("o", "dq", "dk", "dv", "dk_prefix", "dv_prefix")


@dataclass
class Contestant:
    """``forward()`` gives what ``backward`` needs; ``results`` makes the six tensors of NAMES of both."""

    name: str
    forward: Callable[[], object]
    backward: Callable[[object], object]
    results: Callable[[object, object], Sequence[Tensor]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    begun = time.monotonic()
    rows, wrong = [], False
    for prefix, tokens in options.shapes:
        x, grad_o = make_inputs(options, prefix, tokens)
        expected = None
        for name, make in (("flash", two_parts), ("cudnn", two_parts), ("flex", flex)):
            if name == "flex" and (options.no_flex or time.monotonic() - begun > options.seconds):
                if not options.no_flex:
                    print(f"{prefix} + {tokens} flex: left out, {options.seconds:g} s are over", flush=True)
                continue
            row = {"prefix": prefix, "tokens": tokens, "name": name}
            rows.append(row)
            try:
                contestant = make(name, x, grad_o)
                saved = contestant.forward()
                results = contestant.results(saved, contestant.backward(saved))
                if expected is None:
                    expected = results
                row["errors"] = {
                    n: relative_l2(r, e) for n, r, e in zip(NAMES, results, expected, strict=True) if e.numel()
                }
                missed = [f"{n} {error:.1e}" for n, error in row["errors"].items() if not error <= BOUND]
                if missed:
                    row["why_not"], wrong = f"differs from the flash form: {', '.join(missed)}", True
                else:
                    row["forward"] = time_call(contestant.forward, runs=options.runs, warm_up=1)
                    row["backward"] = time_call(lambda c=contestant, s=saved: c.backward(s), options.runs, 1)
            except (RuntimeError, ValueError) as error:
                row["why_not"] = str(error).splitlines()[0]
            print(line(row, options), flush=True)
        del x, grad_o, expected
        torch.cuda.empty_cache()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, "
          f"{options.heads} query and {options.kv_heads} key heads of {options.head_dim}\n")  # fmt: skip
    print(table(rows, options))
    if options.json is not None:
        options.json.write_text(json.dumps([as_json(row) for row in rows], indent=2))
    return int(wrong)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stateflow.bench.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument("--kv-heads", type=int, default=5)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--shapes", type=shape, nargs="+", default=list(SHAPES), metavar="PREFIX,TOKENS")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=40.0, help="no FlexAttention is begun after (default 40)")
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads}: must be a multiple of --kv-heads {options.kv_heads}")
    end_without_cuda(parser)
    return options


def shape(text: str) -> tuple[int, int]:
    prefix, tokens = (int(number) for number in text.split(","))
    if prefix % MASK_BLOCK or tokens % MASK_BLOCK or prefix < 0 or tokens < 1:
        raise argparse.ArgumentTypeError(f"{text}: give multiples of {MASK_BLOCK}, as PREFIX,TOKENS")
    return prefix, tokens


def make_inputs(options: argparse.Namespace, prefix: int, tokens: int) -> tuple[parts.Operands, Tensor]:
    """Keys and values in one buffer each, as a stage holds them: the prefix and the chunk are views."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(length: int, heads: int) -> Tensor:
        return torch.randn(
            1, length, heads, options.head_dim, device="cuda", dtype=torch.bfloat16, generator=generator
        )

    keys, values = (draw(prefix + tokens, options.kv_heads) for _ in range(2))
    query, grad_o = (draw(tokens, options.heads) for _ in range(2))
    x = parts.Operands(query, keys[:, prefix:], values[:, prefix:], keys[:, :prefix], values[:, :prefix])
    return x, grad_o


def two_parts(name: str, x: parts.Operands, grad_o: Tensor) -> Contestant:
    part = {"flash": parts.FLASH, "cudnn": parts.CUDNN}[name]
    if not part.fits(x):
        raise ValueError("does not take this shape here")
    scale = x.q_BTHK.shape[3] ** -0.5
    return Contestant(
        name,
        forward=lambda: parts.forward(part, x, scale),
        backward=lambda saved: parts.backward(part, grad_o, x, *saved, scale),
        results=lambda saved, grads: (saved[0], *grads),
    )


def flex(name: str, x: parts.Operands, grad_o: Tensor) -> Contestant:
    """Compiled, with a block mask; keys and values in one piece, as they lie in the buffers."""
    from torch.nn.attention.flex_attention import flex_attention

    prefix, tokens = x.k_prefix_BSGK.shape[1], x.q_BTHK.shape[1]
    mask = block_mask(prefix, tokens)
    attend = torch.compile(flex_attention, dynamic=False)
    keys, values = (torch.cat(pair, 1) for pair in ((x.k_prefix_BSGK, x.k_BTGK), (x.v_prefix_BSGV, x.v_BTGV)))
    inputs = [t.transpose(1, 2).detach().requires_grad_() for t in (x.q_BTHK, keys, values)]
    grad = grad_o.transpose(1, 2)

    def results(output, grads):
        o, dq, dk, dv = (t.transpose(1, 2) for t in (output, *grads))
        return o, dq, dk[:, prefix:], dv[:, prefix:], dk[:, :prefix], dv[:, :prefix]

    return Contestant(
        name,
        forward=lambda: attend(*inputs, block_mask=mask, enable_gqa=True),
        backward=lambda output: torch.autograd.grad(output, inputs, grad, retain_graph=True),
        results=results,
    )


def block_mask(prefix: int, tokens: int, device: str = "cuda"):
    """Query t sees the keys up to prefix + t: a row of whole blocks, and the one with the diagonal."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, columns = tokens // MASK_BLOCK, (prefix + tokens) // MASK_BLOCK
    diagonal = torch.arange(rows, device=device, dtype=torch.int32) + prefix // MASK_BLOCK
    whole = torch.arange(columns, device=device, dtype=torch.int32).expand(1, 1, rows, columns).contiguous()
    one = torch.zeros_like(whole)
    one[0, 0, :, 0] = diagonal
    return BlockMask.from_kv_blocks(
        torch.ones(1, 1, rows, device=device, dtype=torch.int32), one, diagonal[None, None].contiguous(), whole,
        BLOCK_SIZE=MASK_BLOCK, mask_mod=lambda b, h, q, kv: kv <= q + prefix, seq_lengths=(tokens, prefix + tokens),
    )  # fmt: skip


def rates(row: dict, options: argparse.Namespace) -> tuple[float, float]:
    """TFLOP/s of forward and backward."""
    pairs = row["prefix"] * row["tokens"] + row["tokens"] ** 2 / 2
    flops = 4.0 * options.heads * options.head_dim * pairs
    return tuple(f * flops / row[n].median / 1e9 for f, n in ((1.0, "forward"), (2.5, "backward")))


def cells(row: dict, options: argparse.Namespace) -> list[str]:
    if "why_not" in row:
        return ["-", "-", "-", row["why_not"]]
    both = row["forward"].median + row["backward"].median
    forward, backward = rates(row, options)
    times = f"{row['forward'].median:.3f} / {row['backward'].median:.3f}"
    return [times, f"{both:.3f}", f"{forward:.0f} / {backward:.0f}", f"{max(row['errors'].values()):.1e}"]


def line(row: dict, options: argparse.Namespace) -> str:
    return f"{row['prefix']} + {row['tokens']} {row['name']}: " + ", ".join(cells(row, options))


def table(rows: Sequence[dict], options: argparse.Namespace) -> str:
    columns = ("prefix", "chunk", "kernels", "forward / backward ms", "both", "TFLOP/s", "largest difference")
    body = [[f"{row['prefix']:,}", f"{row['tokens']:,}", row["name"], *cells(row, options)] for row in rows]
    return markdown_table(columns, body)


def as_json(row: dict) -> dict:
    return {name: value.json() if isinstance(value, Timing) else value for name, value in row.items()}


if __name__ == "__main__":
    sys.exit(main())
