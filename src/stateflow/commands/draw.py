"""``stateflow draw CONFIG --out FILE``: the schedule of a plan, or a measured step, as a picture or a trace."""

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
    parser.add_argument("--trace", type=Path, metavar="DIR", help="draw the step measured in this folder instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    from stateflow.planning.picture import check_path, write

    for path in options.out:
        check_path(path)
    scenario = read_scenario(options, overrides)
    data = simulated(options, scenario) if options.trace is None else measured(options, scenario)
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


def measured(options: argparse.Namespace, scenario: Scenario) -> dict:
    """The picture's data of a traced step; prints what was predicted beside it."""
    from stateflow.chunks import ChunkPlan
    from stateflow.pipeline.simulator import simulate
    from stateflow.pipeline.trace import read_trace
    from stateflow.planning.picture import picture_data

    trace = read_trace(options.trace)
    step = trace.median_step()
    job, analytic = scenario.job, scenario.analytic
    print(f"measured on {trace.device}, median of {len(trace.steps)} steps: {_figures(step)}")
    again = simulate(trace.schedule, trace.mean_costs().__getitem__, analytic.link)
    print(f"simulated with the measured cost of each chunk:  {_figures(again)}, {_difference(again, step)}")
    plan = ChunkPlan.explicit(sum(trace.lengths), trace.lengths)
    fits = (job.seq_len, job.num_ranks, len(job.parts)) == (
        plan.seq_len, trace.schedule.num_ranks, trace.schedule.num_stages
    )  # fmt: skip
    if options.device is None and analytic.device.name.lower() not in trace.device.lower():
        print(f"the table of devices has no {trace.device}: nothing to count for; --device counts for another")
    elif fits and job.num_microbatches == trace.schedule.num_microbatches:
        counted = simulate(trace.schedule, analytic.cost(plan), analytic.link, analytic.message_bytes(plan))
        name = f"predicted from counts for {analytic.device.name}:"
        print(f"{name:<48} {_figures(counted)}, {_difference(counted, step)}")
    else:
        print("the config asks for other ranks, microbatches or sequences than the trace: nothing to predict")
    return picture_data(
        step.spans,
        title=f"{trace.schedule.policy} on {trace.device}, chunks of {' + '.join(map(str, trace.lengths))}",
        source="measured",
        lengths=trace.lengths,
    )


def _figures(step) -> str:
    return f"{step.step_time:.4g} s, {step.bubble:.1%} idle"


def _difference(predicted, step) -> str:
    return f"{predicted.step_time / step.step_time - 1:+.1%} in time"
