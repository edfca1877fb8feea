"""``stateflow simulate CONFIG``: one plan on machines that one does not have."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stateflow.commands import Scenario, add_config, add_plan, device_text, read_scenario
from stateflow.pipeline.schedule import Action, Kind
from stateflow.planning.devices import gib_text

if TYPE_CHECKING:
    from stateflow.chunks import ChunkPlan

MUCH_OVERHEAD, WORTH_FEWER = 0.1, 1.1  # share of the step; ratio of step times


def register(commands) -> None:
    parser = commands.add_parser("simulate", help="predict step time, idle time by cause and memory of one plan")
    add_config(parser)
    add_plan(parser)
    parser.add_argument(
        "--cost-file", type=Path, metavar="FILE",
        help='measured seconds as JSON: {"F": [[each chunk] each stage], "B": ...} or "I" and "W" for B',
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    from stateflow.pipeline.simulator import lost_time, simulate
    from stateflow.titan.planning import parts_without_layers

    scenario = read_scenario(options, overrides)
    job, analytic = scenario.job, scenario.analytic
    plan = scenario.plan(options)
    schedule = analytic.schedule(job.policy, plan.num_chunks)
    if options.cost_file is not None:
        cost = read_costs(options.cost_file, len(job.parts), plan.num_chunks)
        simulation = simulate(schedule, cost, analytic.link, analytic.message_bytes(plan))
        lost = lost_time(simulation, cost)
    else:
        simulation = analytic.simulate(plan)
        lost = analytic.lost_time(plan, simulation)
    peaks = analytic.peak_bytes(schedule, plan)
    tokens = job.num_microbatches * job.microbatch_size * job.seq_len
    ranks = range(job.num_ranks)
    shares = lost.shares()
    figures = {
        "policy": scenario.order,
        "lengths": list(plan.lengths),
        "step_time": simulation.step_time,
        "tokens_per_second": tokens / simulation.step_time,
        "bubble": simulation.bubble,
        "lost": shares,
        "busy": [simulation.busy(rank) / simulation.step_time for rank in ranks],
        "peak_bytes": list(peaks),
        "fits": max(peaks) <= analytic.limit,
    }
    if options.json:
        print(json.dumps(figures, indent=2))
        return 0
    print(job.describe())
    source = f"costs from {options.cost_file}" if options.cost_file else device_text(options, scenario)
    print(f"{source}\n{scenario.order}, {plan}")
    if (remark := parts_without_layers(job)) is not None:
        print(f"note: {remark}")
    print()
    print(f"step    {simulation.step_time:.4g} s, {figures['tokens_per_second']:,.0f} tokens/s")
    print(f"bubble  {simulation.bubble:.1%} of the ranks' time is idle")
    for cause, share in shares.items():
        print(f"        {share:6.1%}  {cause.replace('_', ' ')}" + (" (busy)" if cause == "chunk_overhead" else ""))
    print("\nrank  busy   peak GiB  of it parameters, gradients, optimizer")
    for rank in ranks:
        static = sum(analytic.static_of_rank(rank).values())
        print(f"{rank:4d} {figures['busy'][rank]:6.1%} {gib_text(peaks[rank]):>9}  {gib_text(static)}")
    if options.cost_file is None and (hint := fewer_chunks(scenario, plan, shares["chunk_overhead"])) is not None:
        print(f"\n{hint}")
    if not figures["fits"]:
        print(f"\ndoes not fit: {gib_text(max(peaks))} GiB of {gib_text(analytic.limit)} GiB usable")
    return 0


def fewer_chunks(scenario: Scenario, plan: ChunkPlan, overhead: float) -> str | None:
    """Where chunk overhead takes much of the step: how much faster fewer chunks are predicted to be; else None."""
    from stateflow.planning.analytic import NUM_CHUNKS

    analytic = scenario.analytic
    if overhead < MUCH_OVERHEAD or analytic.table is not None:
        return None
    schedule = analytic.schedule(scenario.job.policy, plan.num_chunks)
    now, fits = analytic.simulate(plan).step_time, max(analytic.peak_bytes(schedule, plan)) <= analytic.limit
    skew = scenario.job_config.stateflow.skew or 0.0
    cells = [analytic.cell(n, skew) for n in NUM_CHUNKS if n < plan.num_chunks]
    cells = [cell for cell in cells if cell.step_time is not None and (cell.fits or not fits)]
    best = min(cells, key=lambda cell: (cell.step_time, cell.num_chunks), default=None)
    if best is None or now < WORTH_FEWER * best.step_time:
        return None
    graphs = " (CUDA graphs, which make launches fewer, are not counted)" * scenario.job_config.stateflow.cuda_graphs
    return (
        f"note: {overhead:.0%} of the step is overhead of {plan.num_chunks} chunks, too short to cover the host's "
        f"launches{graphs}; take fewer: --num-chunks {best.num_chunks} is predicted to take {best.step_time:.4g} s, "
        f"{now / best.step_time:.1f} times as fast"
    )


def read_costs(path: Path, num_stages: int, num_chunks: int) -> Callable[[Action], float]:
    """Seconds of each action from a cost file.

    Raises:
        ValueError: naming the file and what is missing in it.
    """
    try:
        table = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--cost-file {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"--cost-file {path}: {error}") from error
    kinds = {kind.value for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    if not isinstance(table, dict) or "F" not in table or not ("B" in table or {"I", "W"} <= table.keys()):
        raise ValueError(f"--cost-file {path}: needs the keys F and B, or F, I and W")
    for kind, rows in table.items():
        if kind not in kinds:
            raise ValueError(f"--cost-file {path}: unknown kind {kind!r}; there are F, B, I, W")
        good = isinstance(rows, list) and len(rows) == num_stages
        good = good and all(isinstance(row, list) and len(row) == num_chunks for row in rows)
        if not good or not all(isinstance(cost, int | float) for row in rows for cost in row):
            raise ValueError(
                f"--cost-file {path}: {kind} must hold {num_stages} rows (stages) of {num_chunks} numbers (chunks)"
            )

    def cost(action: Action) -> float:
        if action.kind.value not in table:
            raise ValueError(f"--cost-file {path}: the policy needs {action.kind.value}, which is not there")
        return table[action.kind.value][action.stage][action.chunk]

    return cost
