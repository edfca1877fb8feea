"""``stateflow draw CONFIG --out FILE``: the schedule of a plan as a picture or a trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from stateflow.commands import Scenario, add_config, add_plan, read_scenario


def register(commands) -> None:
    parser = commands.add_parser("draw", help="draw the schedule of a config: SVG, PNG, JSON, or a Chrome trace")
    add_config(parser)
    add_plan(parser)
    parser.add_argument(
        "--out", type=Path, nargs="+", required=True, metavar="FILE", help=".svg, .png, .json or .trace.json"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    from stateflow.planning.picture import check_path, write

    for path in options.out:
        check_path(path)
    scenario = read_scenario(options, overrides)
    data = simulated(options, scenario)
    for path in options.out:
        write(data, path)
        print(f"{path}: {data['source']} step of {data['step_time']:.4g} s, {data['bubble']:.1%} idle")
    return 0


def simulated(options: argparse.Namespace, scenario: Scenario) -> dict:
    """The picture's data of the predicted step."""
    from stateflow.pipeline.simulator import memory_over_time
    from stateflow.planning.picture import picture_data

    job, analytic = scenario.job, scenario.analytic
    plan = scenario.plan(options)
    simulation = analytic.simulate(plan)
    memory = memory_over_time(simulation, plan, [stage.footprint for stage in analytic.stages])
    shifted = []
    for rank, points in enumerate(memory):
        static = sum(analytic.static_of_rank(rank).values())
        shifted.append([type(p)(p.time, p.num_bytes + static) for p in points])
    return picture_data(
        simulation.spans,
        title=f"{job.policy}, {job.describe()}, chunks of {' + '.join(map(str, plan.lengths))}",
        source="simulated",
        lengths=plan.lengths,
        memory=shifted,
        lost=analytic.lost_time(plan, simulation),
    )
