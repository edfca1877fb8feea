"""The commands around planning, one file each: ``register(commands)`` adds its parser and sets ``run``.

What they share: a config with torchtitan overrides, and the ranks, microbatches and device to imagine.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stateflow.chunks import ChunkPlan
    from stateflow.planning.analytic import Analytic
    from stateflow.planning.job import Job

NAMES = ("plan", "simulate", "predict", "draw", "sweep", "schedule", "compare")


def register(commands) -> None:
    """Adds all commands of this package to the subparsers of the command line."""
    for name in NAMES:
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            importlib.import_module(f"{__name__}.{name}").register(commands)


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Runs one command; a wrong call or config is one line and status 2."""
    config = getattr(options, "config", None)
    try:
        if config is not None and not config.is_file():
            raise ValueError(f"no such config: {config}")
        for name in ("ranks", "microbatches", "num_chunks"):
            value = getattr(options, name, None)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: the least is 1")
        return options.run(options, list(overrides))
    except ValueError as error:
        print(f"stateflow: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="a train.toml")
    parser.add_argument("--ranks", type=int, metavar="P", help="pipeline ranks to imagine; default: the config's")
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches a step; default: the config's")
    parser.add_argument("--device", help="h200, h100, a100 or cpu; default: this machine's GPU, else h200")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory limit a rank; default: the device's")


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", help="order of the units; default: the config's")
    parser.add_argument("--num-chunks", type=int, metavar="N", help="chunks a sequence; default: the config's plan")
    parser.add_argument("--skew", type=float, metavar="ALPHA", help="alpha of eq. 11; default: the config's plan")


def titan_arguments(config: Path, overrides: Sequence[str], ranks: int | None = None) -> list[str]:
    """Arguments for torchtitan's parser."""
    arguments = ["--job.config_file", str(config), *overrides]
    if not any(a.startswith(("--job.custom_config_module", "--job.custom-config-module")) for a in arguments):
        arguments += ["--job.custom_config_module", "stateflow.titan"]
    if ranks is not None:
        arguments.append(f"--parallelism.pipeline_parallel_degree={ranks}")
    return arguments


def read_config(config: Path, overrides: Sequence[str], ranks: int | None = None):
    """The merged, validated config; ValueError says what is wrong in one sentence."""
    from stateflow.cli import _one_sentence, parse_config

    try:
        job_config = parse_config(titan_arguments(config, overrides, ranks))
    except (ValueError, TypeError, AttributeError) as error:
        text = _one_sentence(error, config)
        if f"pipeline_parallel_degree = {ranks}" in text:
            text = f"--ranks {ranks}: {text}"
        raise ValueError(text) from error
    section = job_config.stateflow
    if not section.enable:
        # Such a run is whole sequences in torchtitan's order: what is predicted for it is one chunk in ours.
        section.num_chunks, section.skew, section.chunk_lengths = 1, None, []
        section.plan = section.schedule_file = section.weight_lag = None
        section.policy = "1f1b"
    return job_config


@dataclasses.dataclass
class Scenario:
    """A config on the ranks, microbatches and device that the options imagine."""

    job_config: object
    job: Job
    analytic: Analytic

    @property
    def order(self) -> str:
        """Whose order of the units it is: the policy, or the file of a table."""
        return self.job.policy if self.analytic.table is None else Path(self.job_config.stateflow.schedule_file).name

    def plan(self, options: argparse.Namespace) -> ChunkPlan:
        """The cut that options and config ask for; --num-chunks and --skew come before the config's."""
        plan, table = self._plan(options), self.analytic.table
        if table is not None and table.num_chunks != plan.num_chunks:
            raise ValueError(
                f"--num-chunks {plan.num_chunks}: the table of [stateflow] schedule_file is of {table.num_chunks} "
                "chunks a sequence; leave the option out"
            )
        return plan

    def _plan(self, options: argparse.Namespace) -> ChunkPlan:
        from stateflow.titan.config import DEFAULT_NUM_CHUNKS, make_plan

        section = self.job_config.stateflow
        if options.num_chunks is None and options.skew is None:
            return make_plan(self.job_config)
        num_chunks = options.num_chunks or section.num_chunks or len(section.chunk_lengths) or DEFAULT_NUM_CHUNKS
        skew = options.skew if options.skew is not None else section.skew or 0.0
        return self.job.plan(num_chunks, skew)


def read_scenario(options: argparse.Namespace, overrides: Sequence[str]) -> Scenario:
    from stateflow.pipeline.policies import POLICIES
    from stateflow.planning.analytic import Analytic
    from stateflow.planning.devices import GIB, device_named
    from stateflow.titan.order import read_schedule_file
    from stateflow.titan.planning import job_of

    device = device_named(options.device)
    policy = getattr(options, "policy", None)
    if policy is not None:
        if policy not in POLICIES:
            raise ValueError(f"--policy {policy}: unknown; there are {', '.join(POLICIES)}")
        # Not only a name: it also says how many stages there are.
        overrides = [*overrides, f"--stateflow.policy={policy}"]
    job_config = read_config(options.config, overrides, options.ranks)
    job = job_of(job_config)
    if options.microbatches is not None:
        job = dataclasses.replace(job, num_microbatches=options.microbatches)
    if options.memory is not None and not options.memory > 0:
        raise ValueError(f"--memory {options.memory:g}: must be above 0 GiB")
    limit = None if options.memory is None else options.memory * GIB
    table = None
    if job_config.stateflow.schedule_file is not None:
        table = read_schedule_file(job_config)
        if table.num_microbatches != job.num_microbatches:
            raise ValueError(
                f"--microbatches {job.num_microbatches}: the table of [stateflow] schedule_file is of "
                f"{table.num_microbatches}; leave the option out"
            )
    return Scenario(job_config, job, Analytic(job, device, limit, table))


def device_text(options: argparse.Namespace, scenario: Scenario) -> str:
    """Which device the figures are for, and why that one."""
    device = scenario.analytic.device
    why = "" if options.device else ", the default without a GPU of the table; --device changes it"
    import torch

    if torch.cuda.is_available() and not options.device:
        why = ""
    return (
        f"{device.name}: {device.flops / 1e12:g} TFLOP/s of which {device.dense_fraction:.0%} in matrix products, "
        f"{device.attention_fraction:.0%} in attention, {device.recurrence_fraction:.0%} in recurrences (assumed){why}"
    )
