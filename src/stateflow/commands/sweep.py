"""``stateflow sweep CONFIG --set KEY=V1,V2``: a grid of runs, or of predictions, as JSONL and pictures."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stateflow.commands import add_config, read_scenario, titan_arguments


def register(commands) -> None:
    parser = commands.add_parser("sweep", help="run or simulate a grid of settings: JSONL and pictures")
    add_config(parser)
    parser.add_argument(
        "--set", action="append", required=True, metavar="KEY=V1,V2", dest="settings",
        help="values of a key of the config, e.g. stateflow.num_chunks=1,2,4; give it once a key",
    )  # fmt: skip
    parser.add_argument("--simulate", action="store_true", help="predict each cell instead of running it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: dump_folder/sweep.jsonl")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw throughput and peak memory, .png or .svg")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    grid = parse_settings(options.settings)
    scenario = read_scenario(options, overrides)
    if options.plot is not None:
        check_plot(options.plot, grid)
    out = options.out or Path(scenario.job_config.job.dump_folder) / "sweep.jsonl"
    how = "simulated" if options.simulate else "measured"
    done = read_rows(out)
    rows = []
    cells = list(itertools.product(*grid.values()))
    for number, values in enumerate(cells, start=1):
        cell = dict(zip(grid, values, strict=True))
        row = next((r for r in done if r["cell"] == cell and r["how"] == how and r["config"] == str(options.config)
                    and r["overrides"] == overrides), None)  # fmt: skip
        if row is None:
            row = {"cell": cell, "how": how, "config": str(options.config), "overrides": overrides}
            row |= run_cell(options, overrides, cell)
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
        rows.append(row)
        print(f"{number:3d}/{len(cells)}  {_cell_text(cell)}: {_row_text(row)}", flush=True)
    failed = sum(row["status"] != "ok" for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} cells {how}, in {out}")
    if options.plot is not None:
        plot(rows, grid, options.plot, how)
        print(f"{options.plot}: throughput and peak memory")
    return 0


def parse_settings(settings: Sequence[str]) -> dict[str, list[str]]:
    """{key: values} in the order given.  Raises ValueError."""
    grid: dict[str, list[str]] = {}
    for text in settings:
        key, equals, values = text.partition("=")
        if not equals or not key or not all(values.split(",")):
            raise ValueError(f"--set {text}: write KEY=V1,V2, e.g. --set stateflow.num_chunks=1,2,4")
        if key in grid:
            raise ValueError(f"--set {text}: {key} is given twice; put all its values in one")
        grid[key] = values.split(",")
    return grid


def read_rows(path: Path) -> list[dict]:
    """Rows of an earlier, perhaps interrupted, sweep; a last line that was cut off is dropped."""
    rows = []
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: no JSON; delete the line or choose another --out") from None
            path.write_text("".join(f"{line}\n" for line in lines[:-1]))
    return rows


def cell_overrides(cell: dict[str, str]) -> list[str]:
    """torchtitan's form of a cell: true and false are flags."""
    arguments = []
    for key, value in cell.items():
        if value in ("true", "false"):
            section, _, name = key.rpartition(".")
            arguments.append(f"--{section}.{name if value == 'true' else 'no-' + name}")
        else:
            arguments.append(f"--{key}={value}")
    return arguments


def run_cell(options: argparse.Namespace, overrides: Sequence[str], cell: dict[str, str]) -> dict:
    """Status and figures of one cell; what fails is recorded and does not stop the sweep."""
    arguments = [*overrides, *cell_overrides(cell)]
    try:
        scenario = read_scenario(options, arguments)
        if options.simulate:
            return simulate_cell(scenario)
        return measure_cell(options, scenario, arguments)
    except ValueError as error:
        return {"status": "refused", "reason": str(error)}


def simulate_cell(scenario) -> dict:
    from stateflow.titan.config import make_plan

    job, analytic = scenario.job, scenario.analytic
    plan = make_plan(scenario.job_config)
    simulation = analytic.simulate(plan)
    peaks = analytic.peak_bytes(simulation.schedule, plan)
    figures = {
        "lengths": list(plan.lengths),
        "step_time": simulation.step_time,
        "tokens_per_second": job.num_microbatches * job.microbatch_size * job.seq_len / simulation.step_time,
        "bubble": simulation.bubble,
        "peak_bytes": max(peaks),
    }
    if max(peaks) > analytic.limit:
        return {"status": "oom", "reason": "does not fit by prediction", **figures}
    return {"status": "ok", **figures}


def measure_cell(options: argparse.Namespace, scenario, arguments: Sequence[str]) -> dict:
    """Trains a few steps under torchrun and takes the traced steps."""
    import torch

    from stateflow.cli import world_size
    from stateflow.commands.plan_verify import devices_missing, train_for_a_trace
    from stateflow.titan.cpu_host import refuse_large

    refuse_large(scenario.job_config)
    if torch.cuda.is_available() and (missing := devices_missing(scenario)):
        raise ValueError(f"{missing}; give --ranks, or --simulate")
    job = scenario.job
    with tempfile.TemporaryDirectory() as folder:
        titan = titan_arguments(options.config, arguments, options.ranks)
        titan.append(f"--training.local_batch_size={job.num_microbatches * job.microbatch_size}")
        trace, trouble = train_for_a_trace(titan, world_size(scenario.job_config), Path(folder))
    if trace is None:
        return {"status": "oom" if "out of memory" in trouble.lower() else "failed", "reason": trouble}
    step = trace.median_step()
    return {
        "status": "ok",
        "lengths": list(trace.lengths),
        "step_time": step.step_time,
        "tokens_per_second": job.num_microbatches * job.microbatch_size * job.seq_len / step.step_time,
        "bubble": step.bubble,
        "peak_bytes": trace.peak_bytes,
    }


def _cell_text(cell: dict[str, str]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} = {value}" for key, value in cell.items())


def _row_text(row: dict) -> str:
    if "step_time" not in row:
        return f"{row['status']}: {row['reason']}"
    text = f"{row['step_time']:.4g} s, {row['tokens_per_second']:,.0f} tokens/s, {row['bubble']:.1%} idle"
    if row["peak_bytes"] is not None:
        text += f", {row['peak_bytes'] / 2**30:.2f} GiB"
    return text if row["status"] == "ok" else f"{row['status']} ({row['reason']}): {text}"


def check_plot(path: Path, grid: dict) -> None:
    from stateflow.planning.picture import pyplot

    if path.suffix not in (".png", ".svg") or not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: give a .png or .svg in a folder that exists")
    if len(grid) > 2:
        raise ValueError(f"--plot shows one or two keys, --set has {len(grid)}")
    pyplot()


def plot(rows: Sequence[dict], grid: dict[str, list[str]], path: Path, how: str) -> None:
    """Throughput as bars and peak memory as a line over the first key's values, a panel for each of the second's.

    The counterparts of the paper's figures 3 (over N) and 5 (over alpha): the fastest cell is dark and bears its
    speed-up over the first; cells without a figure are marked by their status.
    """
    from stateflow.planning.picture import pyplot, save

    plots = pyplot()
    keys = list(grid)
    panels = grid[keys[1]] if len(keys) == 2 else [None]
    width = max(3.4, 0.55 * len(grid[keys[0]]) + 1.2)
    figure, axes = plots.subplots(1, len(panels), figsize=(width * len(panels), 3.2), squeeze=False, sharey=True)
    most = max((row["peak_bytes"] or 0 for row in rows if "peak_bytes" in row), default=0) / 2**30
    for axis, panel in zip(axes[0], panels, strict=True):
        mine = [row for row in rows if panel is None or row["cell"][keys[1]] == panel]
        speeds = [row["tokens_per_second"] if row["status"] == "ok" else 0.0 for row in mine]
        best = max(range(len(mine)), key=speeds.__getitem__)
        colors = ["#1f4e8c" if i == best else "#9fbfe3" for i in range(len(mine))]
        axis.bar(range(len(mine)), speeds, color=colors)
        first = next((speed for speed in speeds if speed), 0.0)
        if first:
            gain = f"{speeds[best] / first:.2f}x"
            axis.annotate(gain, (best, speeds[best]), ha="center", va="bottom", fontsize=8, weight="bold")
        for i, row in enumerate(mine):
            if row["status"] != "ok":
                axis.annotate(row["status"].upper(), (i, 0), ha="center", va="bottom", rotation=90, color="#a02020")
        axis.set_xticks(range(len(mine)), [row["cell"][keys[0]] for row in mine])
        axis.set_xlabel(keys[0])
        axis.set_title(f"{how}" + (f", {keys[1]} = {panel}" if panel is not None else ""), fontsize=9)
        axis.set_ylim(0, 1.15 * max((row.get("tokens_per_second", 0.0) for row in rows), default=1.0) or 1)
        axis.spines[["top"]].set_visible(False)
        memory = [(i, row["peak_bytes"] / 2**30) for i, row in enumerate(mine) if row.get("peak_bytes")]
        if memory:
            right = axis.twinx()
            right.plot(*zip(*memory, strict=True), color="#c4611a", marker="o", markersize=3, linewidth=1.2)
            right.set_ylim(0, 1.15 * most)
            right.spines[["top"]].set_visible(False)
            right.tick_params(axis="y", colors="#c4611a")
            if axis is axes[0][-1]:
                right.set_ylabel("peak memory (GiB)", color="#c4611a")
    axes[0][0].set_ylabel("tokens/s")
    figure.tight_layout()
    save(figure, path)
    plots.close(figure)
