"""The command line: ``stateflow train|verify|tune-kernels CONFIG [options] [torchtitan overrides]``, and
``stateflow doctor`` and ``stateflow bench``.

Planning (``plan``, ``simulate``, ``predict``, ``draw``, ``sweep``) is in ``stateflow.commands``, one file a command.

``python -m stateflow`` is the same program.

Anything not listed under a command is handed to torchtitan's own parser, so every key of the train.toml can be
overridden: ``--stateflow.num-chunks 8 --parallelism.pipeline-parallel-degree 4``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import io
import logging
import os
import re
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stateflow import commands as more_commands
from stateflow.faults import FAULTS
from stateflow.launch import REPORTS, only_one, run_to_its_end

OVERRIDES = "Further options are torchtitan overrides such as --training.steps 10 or --stateflow.num-chunks 8."
TOLERANCE = {"float64": 1e-10, "float32": 2e-5}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stateflow",
        description="Train linear-recurrent and hybrid language models by pipelining chunks of a sequence.",
        epilog=OVERRIDES,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a config through torchtitan's stock entry point, under torchrun")
    verify = commands.add_parser(
        "verify", help="compare the configured pipeline, gradient by gradient, with an unchunked reference"
    )
    doctor = commands.add_parser("doctor", help="say what runs on this machine, and check the kernels on its GPUs")
    doctor.add_argument("config", type=Path, nargs="?", help="a train.toml whose run to check, too")
    for name, default in (("heads", 2), ("k-dim", 128), ("v-dim", 128), ("tokens", 32768)):
        doctor.add_argument(f"--{name}", type=int, default=default, help=f"of the checks (default {default})")
    tune = commands.add_parser("tune-kernels", help="measure how the kernels are best launched here; writes a table")
    add_tuning_arguments(tune)
    add_benchmarks(commands.add_parser("bench", help="compare with other libraries on this machine's GPU"))
    for command in (train, verify):
        command.add_argument("config", type=Path, help="a train.toml")
        command.add_argument("--nproc", type=int, help="processes on this machine; default: by the config's degrees")
    verify.add_argument("--steps", type=int, default=1, help="optimizer steps to compare (default 1)")
    verify.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32", help="of everything (default float32)")
    verify.add_argument("--tolerance", type=float, help="largest relative difference; default 1e-10 or 2e-5 by dtype")
    verify.add_argument("--plant", choices=sorted(FAULTS), metavar="FAULT", help=f"plant one of: {', '.join(FAULTS)}")
    verify.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    more_commands.register(commands)
    for name, command in commands.choices.items():
        command.epilog = None if name == "bench" else OVERRIDES
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0 done, 1 the comparison failed or the run did, 2 a wrong call."""
    parser = build_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 2
    options, overrides = parser.parse_known_args(argv)
    if hasattr(options, "run"):
        return more_commands.run(options, overrides)
    if options.command == "doctor":
        return _doctor(options, overrides)
    if getattr(options, "config", None) is None:
        return _measure(options, overrides)
    if not options.config.is_file():
        print(f"stateflow: no such config: {options.config}", file=sys.stderr)
        return 2
    for name in ("nproc", "steps", "warmup"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            print(f"stateflow: --{name} {value}: the least is 1", file=sys.stderr)
            return 2
    titan_args = more_commands.titan_arguments(options.config, overrides, resumes=options.command == "train")
    try:
        config = parse_config(titan_args)
    except (ValueError, TypeError, AttributeError) as error:
        print(f"stateflow: {_one_sentence(error, options.config)}", file=sys.stderr)
        return 2
    try:
        if options.command == "train":
            return _train(options, config, titan_args, overrides)
        if options.command == "tune-kernels":
            return _tune(options, config)
        if options.command == "bench":
            return _bench_pipeline(options, config, titan_args)
        return _verify(options, config, titan_args)
    except ValueError as error:
        print(f"stateflow: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parse_config(titan_args: Sequence[str]):
    """The merged torchtitan config of ``--job.config_file FILE [overrides]``, validated.

    Raises ValueError, one line that names the option, key or file; torchtitan's own parser would print a box.
    """
    from torchtitan.config import ConfigManager

    import stateflow.titan  # noqa: F401  registers the section, the model and the checks

    said = io.StringIO()
    logging.disable(logging.ERROR)  # torchtitan's remarks come again, from the run itself
    try:
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of types: check_types has refused what matters
            return ConfigManager().parse_args(list(titan_args))
    except AssertionError as error:  # torchtitan's own checks
        raise ValueError(str(error)) from None
    except SystemExit as leaving:
        if leaving.code != 2:  # --help
            raise
        raise ValueError(_parser_complaint(said.getvalue())) from None
    finally:
        logging.disable(logging.NOTSET)


def _parser_complaint(box: str) -> str:
    """What the override parser says in a box, as one line: its first paragraph and the nearest option that exists."""
    lines = [line.strip("│| ") for line in box.splitlines()]
    said: list[str] = []
    for line in list(filter(None, lines))[1:]:  # after the title
        if line.strip("─-+╭╮╰╯ "):
            said.append(line)
        elif said:  # a rule: what follows is help
            break
    text = " ".join(said) or "the overrides cannot be parsed"
    unknown = re.match(r"Unrecognized options: (\S+?),?(?:\s|$)", text)
    if unknown is None:
        return text
    option = unknown[1].partition("=")[0]
    section, _, key = option.rpartition(".")
    if not option.startswith("--"):
        return f"{option!r} is no option; a flag takes no value: --section.key for true, --section.no-key for false"
    sections = {f"--{name}": [key.replace("_", "-") for key in table] for name, table in _tables().items() if name}
    hint = "every key of the config is --section.key VALUE"
    if near := difflib.get_close_matches(key.replace("_", "-"), sections.get(section, ()), n=1):
        hint = f"did you mean {section}.{near[0]}?"
    elif section not in sections and (near := difflib.get_close_matches(section, sections, n=1)):
        hint = f"did you mean {near[0]}.{key}?"
    return f"unknown option {option}; {hint}"


def _one_sentence(error: Exception, config: Path) -> str:
    """torchtitan's complaint about unknown keys names a class and a script that is not here: say it with the file."""
    if isinstance(error, tomllib.TOMLDecodeError | UnicodeDecodeError):
        return f"{config}: no TOML: {error}"
    if not str(error).startswith("Invalid field names"):
        return str(error)
    return f"{config}: {_unknown_key(tomllib.loads(config.read_text()))}"


def _unknown_key(toml: Mapping[str, Any]) -> str:
    """Which key of a file the config lacks, and what it may mean: the nearest, or one of that name elsewhere."""
    tables = _tables()
    for name, table in [("", toml), *_inner("", toml)]:
        known = tables.get(name)
        unknown = [] if known is None else [key for key in table if key not in known]
        if not unknown:
            continue
        key, near = unknown[0], difflib.get_close_matches(unknown[0], known, n=1)
        if not name and isinstance(table[key], dict):
            hint = f"did you mean [{near[0]}]?" if near else f"there are {', '.join(known)}"
            return f"unknown section [{key}]; {hint}"
        elsewhere = [f"[{other}]" for other in tables if other and key in tables[other]]
        if elsewhere:
            hint = f"there is one in {' and '.join(elsewhere)}"
        else:
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        return f"unknown key {key!r} {f'in [{name}]' if name else 'at top level'}; {hint}"
    return "it holds a key that the config does not know"


def _inner(name: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """("training.dataloader", its table) of every table below one."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            path = f"{name}.{key}".lstrip(".")
            yield path, value
            yield from _inner(path, value)


def _tables() -> dict[str, dict[str, Any]]:
    """{"": sections, "training": its keys, "training.dataloader": ..} of a config."""
    from torchtitan.config import JobConfig

    from stateflow.titan.config import JobConfig as Ours

    def below(name: str, place: Any) -> dict[str, dict[str, Any]]:
        found = {name: vars(place)}
        for key, value in vars(place).items():
            if dataclasses.is_dataclass(value):
                found |= below(f"{name}.{key}".lstrip("."), value)
        return found

    return {**below("", JobConfig()), **below("", Ours()), "": {**vars(Ours()), **vars(JobConfig())}}


def world_size(config) -> int:
    """Processes that the config's parallel degrees ask for; an automatic shard degree (-1) counts as 1."""
    p = config.parallelism
    degrees = (
        p.pipeline_parallel_degree, p.tensor_parallel_degree, p.context_parallel_degree,
        p.data_parallel_replicate_degree, max(1, p.data_parallel_shard_degree),
    )
    product = 1
    for degree in degrees:
        product *= degree
    return product


def torchrun(nproc: int, module: str, args: Sequence[str], log_rank: int = 0) -> int:
    """Runs ``module`` in ``nproc`` processes of this machine, shows the log of one, and returns the exit status.

    What the others had to report when a peer was gone is shown at the end, or where they were last seen.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}",
        f"--local-ranks-filter={log_rank}", "-m", module, *args,
    ]
    # LOG_RANK tells torchtitan which rank's log is shown.
    env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "LOG_RANK": str(log_rank), **os.environ}
    with tempfile.TemporaryDirectory() as reports:
        status = run_to_its_end(command, env={**env, REPORTS: reports})
        for path in sorted(Path(reports).glob("*.txt")):
            if path.name != f"rank_{log_rank}.txt":
                print(path.read_text(), end="", file=sys.stderr)
        for path in sorted(Path(reports).glob("*.last")) if status else ():
            if not path.with_suffix(".txt").exists():
                print(path.read_text(), end="", file=sys.stderr)
    return status


def _processes(options, config) -> int:
    """How many to start.  ValueError where the config's degrees, kernels or size cannot be had on this machine."""
    import torch

    from stateflow.titan import shared_gpus
    from stateflow.titan.cpu_host import refuse_large

    needed = world_size(config)
    nproc = options.nproc or needed
    if nproc % needed:
        raise ValueError(f"--nproc {nproc}: the config's parallel degrees need {needed} processes, or a multiple")
    missing = shared_gpus.devices_missing(nproc)
    if missing and torch.cuda.is_available() and not shared_gpus.asked():
        raise ValueError(
            f"{missing}; lower --nproc or the degrees in [parallelism], start torchrun on several machines, take the "
            f"CPU with CUDA_VISIBLE_DEVICES= in front, or try it out with {shared_gpus.VARIABLE}=1, where ranks take "
            "turns on a GPU"
        )
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if config.stateflow.kernels == "triton" and not torch.cuda.is_available() and not interpreted:
        raise ValueError('[stateflow] kernels = "triton" needs a GPU, and there is none here; set it to "auto"')
    refuse_large(config)
    return nproc


def _train(options, config, titan_args: Sequence[str], overrides: Sequence[str]) -> int:
    from stateflow.titan.data import open_local
    from stateflow.titan.order import loss_rank
    from stateflow.titan.resume import check_resume

    nproc = _processes(options, config)
    # What every rank would find out, each with a traceback: now that their number is known.
    check_resume(config, nproc)
    open_local(config)
    with _alone_in_its_folder(config):
        status = torchrun(nproc, "torchtitan.train", titan_args, log_rank=loss_rank(config, nproc))
    if status == 0:
        from stateflow.titan.report import summarize

        print(summarize(config.job.dump_folder, config, nproc, overrides, options.nproc))
    return status


@contextlib.contextmanager
def _alone_in_its_folder(config) -> Iterator[None]:
    """Two runs that save into one folder would mix their weights in one checkpoint."""
    if not config.checkpoint.enable:
        yield
        return
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    # Beside the folder: one that exists makes torchtitan ignore initial_load_path.
    lock = only_one(folder.with_name(f"{folder.name}.lock"))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except BlockingIOError:
            raise ValueError(
                f"another stateflow train saves into {folder}: wait for its end, or give this run another [job] "
                "dump_folder or [checkpoint] folder"
            ) from None
        except OSError as error:
            raise ValueError(f"[job] dump_folder = {config.job.dump_folder!r} cannot be written: {error}") from None
        yield


def _doctor(options, unknown: Sequence[str]) -> int:
    from stateflow.doctor import run
    from stateflow.recurrence.gated_delta import kernel_size_misfit

    problem = kernel_size_misfit(options.k_dim, options.v_dim)
    if unknown and options.config is None:
        problem = f"unknown argument {unknown[0]}"
    for name in ("heads", "tokens"):
        if getattr(options, name) < 1:
            problem = f"--{name} {getattr(options, name)}: the least is 1"
    if problem:
        print(f"stateflow: {problem}", file=sys.stderr)
        return 2
    return run(options.heads, options.k_dim, options.v_dim, options.config, unknown, options.tokens)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="?", help="a train.toml, which says the shapes; or give --heads")
    parser.add_argument("--heads", type=int, nargs="+", help="value heads of a rank, instead of a config")
    parser.add_argument("--key-heads", type=int, help="heads of q and k (default: as many)")
    for name in ("k-dim", "v-dim"):
        parser.add_argument(f"--{name}", type=int, default=128, help="of a head (default 128)")
    parser.add_argument("--angles", type=int, help="Mamba-3 with so many, N = --k-dim and P = --v-dim")
    parser.add_argument("--dim", type=int, help="width of the model, for Mamba-3 (default: half of --heads x --v-dim)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="lengths of chunks (default 8192)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a microbatch (default 1)")
    parser.add_argument("--dtype", default="bfloat16", help="of q, k and v (default bfloat16)")
    parser.add_argument("--any-order", action="store_true", help="what runs with [stateflow] exact_order = false")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table; default: where every run looks for it")
    parser.add_argument("--time-budget", type=float, metavar="S", help="seconds for everything, about")


def add_benchmarks(parser: argparse.ArgumentParser) -> None:
    from stateflow.bench.arguments import add_gdn, add_mamba3, add_pipeline

    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="{gdn,mamba3,pipeline}")
    add_gdn(benchmarks.add_parser("gdn", help="the gated delta rule against FLA and FlashQLA"))
    add_mamba3(benchmarks.add_parser("mamba3", help="Mamba-3 against the official kernels of mamba-ssm"))
    steps = "whole training steps against torchtitan's 1F1B"
    add_pipeline(benchmarks.add_parser("pipeline", help=steps, epilog=OVERRIDES))


def _measure(options, unknown: Sequence[str]) -> int:
    """A measurement without a config."""
    try:
        if unknown:
            raise ValueError(f"unknown argument {unknown[0]}")
        if options.command == "tune-kernels":
            return _tune(options, None)
        return importlib.import_module(f"stateflow.bench.{options.benchmark}").run(options)
    except ValueError as error:
        print(f"stateflow: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _tune(options, config) -> int:
    from stateflow.planning.kernel_shapes import config_shapes, explicit_shapes
    from stateflow.planning.kernel_tuning import run
    from stateflow_kernels.gated_delta_rule import CHUNK
    from stateflow_kernels.waves import why_one_walk

    dim = options.dim
    if config is not None and options.heads:
        raise ValueError(f"--heads {options.heads[0]} and a config say the same: leave one out")
    given = [name for name in ("dim", "any_order") if getattr(options, name)]
    if dim is not None and dim < 1:
        raise ValueError(f"--dim {dim} must be at least 1")
    if config is not None and given:
        raise ValueError(f"--{given[0].replace('_', '-')}: the config says that, leave it out")
    if dim is not None and options.angles is None:
        raise ValueError(f"--dim {dim} is for Mamba-3: leave it out, or give --angles")
    if options.any_order and options.angles is not None:
        raise ValueError(f"--any-order is not for Mamba-3: leave it out, or --angles {options.angles}")
    if config is not None:
        from stateflow.titan.flavors import resolve_model

        shapes, dim = config_shapes(config), resolve_model(config).dim
    elif options.heads:
        sizes = (options.k_dim, options.v_dim, options.dtype, options.batch, options.key_heads)
        more = dict(num_angles=options.angles, exact_order=not options.any_order)
        shapes = explicit_shapes(options.heads, options.tokens, *sizes, **more)
        if options.any_order and all(shape.segments == 1 for shape in shapes):
            first = (-(-options.tokens[0] // CHUNK), options.batch * options.heads[0], options.k_dim, options.v_dim)
            raise ValueError(f"--any-order changes nothing here: {why_one_walk(*first)}; leave it out")
    else:
        raise ValueError("tune-kernels needs a config, or shapes: --heads 20 --tokens 8192")
    return run(shapes, options.out, options.time_budget, dim=dim)


def _bench_pipeline(options, config, titan_args: Sequence[str]) -> int:
    from stateflow.titan.bench import make_rows, run

    training, nproc = config.training, _processes(options, config)
    rows = make_rows(
        options.tokens or [training.seq_len],
        options.microbatches or [training.local_batch_size],
        options.num_chunks,
        options.skew,
    )
    for row in rows:
        parse_config([*titan_args, *row.overrides])  # a row that cannot be is an error before anything runs
    return run(
        titan_args,
        rows,
        nproc=nproc,
        stages=config.parallelism.pipeline_parallel_degree,
        steps=options.steps,
        warmup=options.warmup,
        row_timeout=options.row_timeout,
        dtype=training.mixed_precision_param if config.stateflow.mixed_precision_alone else training.dtype,
        json_path=options.json,
    )


def _verify(options, config, titan_args: Sequence[str]) -> int:
    from stateflow.titan.verify import run

    if options.dtype == "float64" and config.stateflow.kernels == "triton":
        raise ValueError('--dtype float64 has no Triton kernels: use --dtype float32, or kernels = "auto"')
    return run(
        titan_args,
        nproc=_processes(options, config),
        steps=options.steps,
        dtype=options.dtype,
        tolerance=TOLERANCE[options.dtype] if options.tolerance is None else options.tolerance,
        plant=options.plant,
        json_path=options.json,
    )
