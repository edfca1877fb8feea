"""``stateflow compare CONFIG --policies all``: the orders of the field on one job, predicted."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from stateflow.commands import add_config, device_text, read_scenario


def register(commands) -> None:
    parser = commands.add_parser("compare", help="predict step time, idle time and memory of several policies")
    add_config(parser)
    parser.add_argument(
        "--policies", nargs="+", default=["all"], metavar="POLICY", help="which ones; default: all that there are"
    )
    parser.add_argument("--num-chunks", type=int, metavar="N", help="chunks a sequence; default: the config's plan")
    parser.add_argument("--skew", type=float, metavar="ALPHA", help="alpha of eq. 11; default: the config's plan")
    parser.add_argument("--no-whole", action="store_true", help="leave out the rows on whole sequences")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a picture of all timelines, .svg or .png")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    from stateflow.pipeline.policies import POLICIES, find_policy
    from stateflow.planning.analytic import Analytic
    from stateflow.planning.comparison import Row, candidates, compare, table
    from stateflow.titan.planning import part_names

    names = list(POLICIES) if options.policies == ["all"] else options.policies
    for name in names:
        find_policy(name)
    scenario = read_scenario(options, overrides)
    job, plan = scenario.job, scenario.plan(options)
    whole = job.plan(1, 0.0)
    rows = []
    for name, on_whole, per_rank in candidates(names, job.stages_per_rank, not options.no_whole):
        cut = whole if on_whole else plan
        try:
            parts = part_names(scenario.job_config, per_rank * job.num_ranks)
        except ValueError as error:
            rows.append(Row(name, cut.num_chunks, per_rank, why_not=str(error)))
            continue
        one = dataclasses.replace(job, policy=name, parts=tuple(map(tuple, parts)))
        analytic = Analytic(one, scenario.analytic.device, scenario.analytic.memory_limit)
        rows.append(compare(analytic, cut, name, per_rank))
    if options.out is not None:
        _draw([row for row in rows if row.simulation is not None], options.out, plan, whole)
    if options.json:
        print(json.dumps([row.to_json() for row in rows], indent=2))
        return 0
    print(f"{job.describe()}\n{device_text(options, scenario)}\n{plan}\n")
    print(table(rows))
    print("\nV stages a rank; in flight: most and least of the ranks, in full sequences; speed: of the first row's")
    return 0


def _draw(rows: list, path: Path, plan, whole) -> None:
    from stateflow.planning.picture import picture_data, write_below_each_other

    pictures = [
        picture_data(
            row.simulation.spans, title=row.name, source="simulated",
            lengths=(whole if row.num_chunks == 1 else plan).lengths,
        )
        for row in rows
    ]  # fmt: skip
    write_below_each_other(pictures, path)
