"""The command lines of the benchmarks. Imports nothing heavy: every call of `stateflow` reads this."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path


def dims(text: str) -> tuple[int, int]:
    """ "128x64" is K = 128, V = 64."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be K x V, as in 128x128")
    return int(found[1]), int(found[2])


def heads_and_tokens(text: str) -> tuple[int, int] | None:
    """ "12x8192" is 12 heads, 8,192 tokens; "none" is None."""
    return None if text == "none" else dims(text)


def peer_path(names: Sequence[str], text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or name not in names:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=/folder with a NAME of {', '.join(names)}")
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"{path!r} of {name} is no folder")
    return name, Path(path).resolve()


def shape(text: str) -> tuple[int, ...]:
    """ "20x8192" is 20 heads, 8,192 tokens, of the first of --dims; "20x8192x96x192" of 96 x 192."""
    if re.fullmatch(r"\d+x\d+(x\d+x\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be HEADS x TOKENS, or with sizes, as in 20x8192x96x192")
    return tuple(map(int, text.split("x")))


WHOLE = dict(type=int, nargs="+", metavar="N")


def add_gdn(parser: argparse.ArgumentParser) -> None:
    add_operation(parser, [20, 10, 8], [(128, 128), (96, 192)], "KxV", (12, 16384), ("fla", "flashqla"))
    parser.add_argument("--tune", type=Path, metavar="FILE", help="tune the kernels first, into this table")
    parser.add_argument("--tune-heads", help="those to tune (default: all)", **WHOLE)
    parser.add_argument("--tune-dims", type=dims, nargs="+", metavar="KxV", help="likewise (default: all)")
    parser.add_argument("--tune-budget", type=float, metavar="S", help="seconds for the tuning, about")


def add_mamba3(parser: argparse.ArgumentParser) -> None:
    add_operation(parser, [80, 40, 24], [(128, 64)], "NxP", (48, 16384), ("official",))


def add_operation(
    parser: argparse.ArgumentParser,
    heads: list[int],
    head_dims: list[tuple[int, int]],
    names: str,
    untuned: tuple[int, int],
    peers: tuple[str, ...],
) -> None:
    """What the benchmarks of one operation have in common: see `processes.run`."""

    def default(values: Sequence) -> str:
        return "default " + " ".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)

    parser.add_argument("--heads", default=heads, help=default(heads), **WHOLE)
    parser.add_argument("--tokens", default=[8192, 16384, 32768, 65536], help="default 8192 to 65536", **WHOLE)
    parser.add_argument("--dims", type=dims, nargs="+", metavar=names, default=head_dims, help=default(head_dims))
    listed = dict(type=shape, nargs="+", metavar="HEADSxTOKENS")
    parser.add_argument("--shapes", help="these in the place of all combinations; also HEADSxTOKENSxKxV", **listed)
    parser.add_argument("--ours", nargs="*", metavar="WORD", help="variants of ours to measure, too (default: all)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--untuned",
        type=heads_and_tokens,
        metavar="HEADSxTOKENS",
        default=untuned,
        help=f'a shape more that is never tuned here, or "none" ({default([untuned])})',
    )
    path = partial(peer_path, peers)
    parser.add_argument("--peers", nargs="*", choices=peers, default=list(peers), help="none: only our own")
    parser.add_argument("--peer-path", type=path, nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--peer-heads", help="of those above, for the peers (default: all)", **WHOLE)
    parser.add_argument("--peer-tokens", help="of those above, for the peers (default: all)", **WHOLE)
    parser.add_argument("--peer-dims", type=dims, nargs="+", metavar=names, help="likewise (default: all)")
    parser.add_argument("--peer-untuned", action="store_true", help="the peers also run the shape of --untuned")
    parser.add_argument("--peer-timeout", type=float, default=1800.0, metavar="S", help="from the start (default 1800)")
    seconds = dict(type=float, metavar="S")
    parser.add_argument("--warm-up", default=600.0, help="for compiling, before anything is timed (600)", **seconds)
    parser.add_argument("--time-limit", help="for all: then the report of what is there (default: none)", **seconds)
    parser.add_argument("--runs", type=int, default=15, metavar="N", help="timed runs (default 15, at least 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, one a line, as they come")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    parser.add_argument("--render", type=Path, metavar="FILE", help="measure nothing: tables of the rows in FILE")


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="a train.toml")
    parser.add_argument("--nproc", type=int, help="processes on this machine; default: by the config's degrees")
    many = dict(nargs="+", metavar="N")
    parser.add_argument("--num-chunks", type=int, default=[2, 4, 8, 16], help="default 2 4 8 16", **many)
    parser.add_argument("--skew", type=float, nargs="+", default=[0.0], metavar="ALPHA", help="of eq. 11 (default 0)")
    parser.add_argument("--microbatches", type=int, help="sequences a step (default: local_batch_size)", **many)
    parser.add_argument("--tokens", type=int, help="sequence lengths (default: seq_len)", **many)
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="timed optimizer steps a row (default 3)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before them (default 2)")
    parser.add_argument("--row-timeout", type=float, default=600.0, metavar="S", help="seconds for a row (default 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, one a line, as they come")
