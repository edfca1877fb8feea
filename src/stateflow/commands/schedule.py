"""``stateflow schedule CONFIG``: the order of the units as a table, to look at, to edit and to run again."""

from __future__ import annotations

import argparse
from pathlib import Path

from stateflow.commands import add_plan, read_config


def register(commands) -> None:
    parser = commands.add_parser("schedule", help="print or write the table of actions that a config runs")
    parser.add_argument("config", type=Path, help="a train.toml")
    parser.add_argument("--ranks", type=int, metavar="P", help="pipeline ranks to imagine; default: the config's")
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches a step; default: the config's")
    add_plan(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write it: .csv is one line a rank, any other suffix the whole text"
    )
    parser.add_argument("--timeline", action="store_true", help="draw it as text, with equal stages and chunks")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    from stateflow.pipeline.timeline import LEGEND, timeline
    from stateflow.titan.config import make_plan
    from stateflow.titan.order import make_schedule, recomputes

    if options.policy is not None:
        overrides = [*overrides, f"--stateflow.policy={options.policy}"]
    if options.num_chunks is not None:
        overrides = [*overrides, f"--stateflow.num_chunks={options.num_chunks}"]
    if options.skew is not None:
        overrides = [*overrides, f"--stateflow.skew={options.skew}"]
    config = read_config(options.config, overrides, options.ranks)
    schedule = make_schedule(config, make_plan(config).num_chunks, options.microbatches)
    if options.timeline:
        print(f"{timeline(schedule, recomputes(config))}\n{LEGEND}")
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise ValueError(f"--out {options.out}: there is no folder {options.out.absolute().parent}; create it first")
    if options.out is None:
        if not options.timeline:
            print(schedule.to_text(), end="")
        return 0
    options.out.write_text(schedule.to_csv() if options.out.suffix == ".csv" else schedule.to_text())
    print(
        f"{options.out}: {schedule.policy}, {schedule.num_microbatches} microbatches of {schedule.num_chunks} chunks, "
        f"{schedule.num_stages} stages on {schedule.num_ranks} ranks; run it with [stateflow] schedule_file"
    )
    return 0
