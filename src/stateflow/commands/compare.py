"""``stateflow compare CONFIG --policies all``: the orders of the field on one job, predicted and measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stateflow.commands import Scenario, add_config, device_text, read_scenario, titan_arguments
from stateflow.commands.simulate import fewer_chunks

if TYPE_CHECKING:
    from stateflow.chunks import ChunkPlan
    from stateflow.planning.comparison import Row


def register(commands) -> None:
    parser = commands.add_parser("compare", help="step time, idle time and memory of several policies")
    add_config(parser)
    parser.add_argument(
        "--policies", nargs="+", default=["all"], metavar="POLICY", help="which ones; default: all that there are"
    )
    parser.add_argument("--num-chunks", type=int, metavar="N", help="chunks a sequence; default: the config's plan")
    parser.add_argument("--skew", type=float, metavar="ALPHA", help="alpha of eq. 11; default: the config's plan")
    parser.add_argument("--no-whole", action="store_true", help="leave out the rows on whole sequences")
    parser.add_argument("--measure", action="store_true", help="also train a few steps of each on this machine")
    parser.add_argument(
        "--row-timeout", type=float, default=600.0, metavar="S", help="seconds for a measurement (default 600)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="a picture of all timelines, .svg or .png")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    from stateflow.pipeline.policies import POLICIES, find_policy
    from stateflow.planning.comparison import measured_table, table

    names = list(POLICIES) if options.policies == ["all"] else options.policies
    for name in names:
        find_policy(name)
    if options.measure:
        options.device = options.device or _device_here()
    scenario = read_scenario(options, overrides)
    if options.measure:
        _check_machine(scenario)
    plan, whole = scenario.plan(options), scenario.job.plan(1, 0.0)
    rows = predict(scenario, names, plan, None if options.no_whole else whole)
    if options.measure:
        for row in rows:
            measure(row, options, scenario, overrides, whole if row.num_chunks == 1 else plan)
            outcome = row.measured_why_not or f"{row.measured_time:.4g} s"
            print(f"measured {row.name}: {outcome}", file=sys.stderr, flush=True)
    if options.out is not None:
        _draw(rows, options.out, plan, whole)
    if options.json:
        print(json.dumps([row.to_json() for row in rows], indent=2))
        return 0
    print(f"{scenario.job.describe()}\n{device_text(options, scenario)}\n{plan}\n")
    print(table(rows))
    print("\nV stages a rank; in flight: most and least of the ranks, in full sequences; speed: of the first row's")
    overhead = scenario.analytic.lost_time(plan, scenario.analytic.simulate(plan)).shares()["chunk_overhead"]
    if (hint := fewer_chunks(scenario, plan, overhead)) is not None:
        print(hint)
    if options.measure:
        print(f"\nmeasured here, the median of a few training steps:\n{measured_table(rows)}")
    return 0


def predict(scenario: Scenario, names: Sequence[str], plan: ChunkPlan, whole: ChunkPlan | None) -> list[Row]:
    """A row for each policy, on whole sequences and on chunks, and one for the table that the config names."""
    from stateflow.planning.analytic import Analytic
    from stateflow.planning.comparison import Row, candidates, compare
    from stateflow.titan.planning import part_names

    job, given = scenario.job, scenario.job_config.parallelism
    # What policy or table of the config imply is not asked of the other rows.
    explicit = given.pipeline_parallel_layers_per_stage is not None or given.module_fqns_per_model_part is not None
    least = job.stages_per_rank if explicit else 1
    rows = []
    for name, on_whole, per_rank in candidates(names, least, whole is not None):
        cut = whole if on_whole else plan
        try:
            parts = part_names(scenario.job_config, per_rank * job.num_ranks)
        except ValueError as error:
            rows.append(Row(name, cut.num_chunks, per_rank, why_not=str(error)))
            continue
        one = dataclasses.replace(job, policy=name, parts=tuple(map(tuple, parts)))
        analytic = Analytic(one, scenario.analytic.device, scenario.analytic.memory_limit)
        rows.append(compare(analytic, cut, name, per_rank))
    if scenario.analytic.table is not None:
        row = compare(scenario.analytic, plan, job.policy, job.stages_per_rank)
        row.policy = scenario.order
        rows.append(row)
    return rows


def _draw(rows: Sequence[Row], path: Path, plan: ChunkPlan, whole: ChunkPlan) -> None:
    from stateflow.planning.picture import picture_data, write_below_each_other

    steps = [
        (row, step, source)
        for row in rows
        for step, source in ((row.simulation, "simulated"), (row.measurement, "measured"))
        if step is not None
    ]
    several = any(source == "measured" for _, _, source in steps)
    pictures = [
        picture_data(
            step.spans, title=f"{row.name}, {source}" if several else row.name, source=source,
            lengths=(whole if row.num_chunks == 1 else plan).lengths,
        )
        for row, step, source in steps
    ]  # fmt: skip
    write_below_each_other(pictures, path)


# ---- measuring
def _device_here() -> str | None:
    """What to predict for where it is going to be measured; None is the GPU here."""
    import torch

    return None if torch.cuda.is_available() else "cpu"


def _check_machine(scenario: Scenario) -> None:
    from stateflow.cli import world_size
    from stateflow.titan.shared_gpus import devices_missing

    if missing := devices_missing(world_size(scenario.job_config)):
        raise ValueError(f"--measure: {missing}; give --ranks, or leave it out")


def measure(
    row: Row, options: argparse.Namespace, scenario: Scenario, overrides: Sequence[str], cut: ChunkPlan
) -> None:
    """Trains a few steps as the row says, and fills in what was measured or why it was not."""
    from stateflow.cli import world_size
    from stateflow.commands.plan_verify import train_for_a_trace

    job = scenario.job
    titan = titan_arguments(options.config, overrides, options.ranks)
    titan.append(f"--training.local_batch_size={job.num_microbatches * job.microbatch_size}")
    try:
        if row.policy not in _policies():  # the table, which the overrides or the file name
            chosen = []
        else:
            chosen = [*_order_overrides(scenario, row, cut), *_stage_overrides(scenario, row)]
        _read(options, [*titan, *chosen])
    except ValueError as error:
        row.measured_why_not = f"refused: {error}"
        return
    with tempfile.TemporaryDirectory() as folder:
        trace, trouble = train_for_a_trace(
            [*titan, *chosen], world_size(scenario.job_config), Path(folder), options.row_timeout
        )
    if trace is None:
        kind = "out of memory" if "out of memory" in trouble.lower() else "failed"
        row.measured_why_not = trouble if trouble.startswith(kind) else f"{kind}: {trouble}"
        return
    row.measurement = trace.median_step()
    row.measured_time, row.measured_bubble = row.measurement.step_time, row.measurement.bubble
    row.measured_peak_bytes = trace.peak_bytes


def _policies() -> dict:
    from stateflow.pipeline.policies import POLICIES

    return POLICIES


def _order_overrides(scenario: Scenario, row: Row, cut: ChunkPlan) -> list[str]:
    """Policy and cut of a row, in place of whatever the config says about them."""
    lag = scenario.job.weight_lag if _policies()[row.policy].splits_backward else None
    return [
        "--stateflow.plan", "None", "--stateflow.schedule-file", "None", "--stateflow.num-chunks", "None",
        "--stateflow.skew", "None", "--stateflow.weight-lag", str(lag), f"--stateflow.policy={row.policy}",
        "--stateflow.chunk-lengths", *map(str, cut.lengths),
    ]  # fmt: skip


def _stage_overrides(scenario: Scenario, row: Row) -> list[str]:
    """As many stages a rank as the row has: by the config itself, or by a number of layers a stage.

    Raises:
        ValueError: if no number of layers gives so many.
    """
    p, wanted = scenario.job_config.parallelism, row.stages_per_rank * scenario.job.num_ranks
    if p.module_fqns_per_model_part is not None:
        if len(p.module_fqns_per_model_part) != wanted:
            raise ValueError(f"[parallelism] module_fqns_per_model_part has not {wanted} parts; leave it out")
        return []
    if row.stages_per_rank == _policies()[row.policy].default_stages_per_rank:
        return ["--parallelism.pipeline_parallel_layers_per_stage", "None"]
    ends = p.pipeline_parallel_first_stage_less_layers + p.pipeline_parallel_last_stage_less_layers
    layers = scenario.job.model.num_layers + ends
    for per_stage in range(1, layers + 1):
        if -(-layers // per_stage) == wanted:
            return [f"--parallelism.pipeline_parallel_layers_per_stage={per_stage}"]
    raise ValueError(
        f"no [parallelism] pipeline_parallel_layers_per_stage gives {wanted} stages of {layers} layers (with "
        "the weights of embedding and head)"
    )


def _read(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Checks a config before processes are started for it.  Raises ValueError."""
    from stateflow.cli import _one_sentence, parse_config

    try:
        parse_config(arguments)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(_one_sentence(error, options.config)) from error
