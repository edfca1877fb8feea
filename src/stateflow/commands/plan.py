"""``stateflow plan CONFIG``: which N and alpha; measured (``plan_measured``), or with --analytic from counts alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stateflow.commands import Scenario, add_config, device_text, read_scenario
from stateflow.planning.devices import GIB
from stateflow.planning.job import RECOMPUTE_MODES


def register(commands) -> None:
    parser = commands.add_parser("plan", help="find number and lengths of the chunks for a config")
    add_config(parser)
    parser.add_argument("--analytic", action="store_true", help="predict from counts; needs no GPU and runs nothing")
    parser.add_argument("--json", action="store_true", help="print every cell of the grid as JSON")
    measured = parser.add_argument_group("without --analytic: measure on the device at hand")
    measured.add_argument("--out", type=Path, metavar="FILE", help="the plan file; default: dump_folder/plan.toml")
    measured.add_argument("--cache", type=Path, metavar="FILE", help="measured points; dump_folder/plan_cache.json")
    measured.add_argument(
        "--lengths", type=int, nargs="+", metavar="TOKENS",
        help="chunk lengths to measure; default: from the whole sequence down, more of them where it may matter",
    )  # fmt: skip
    measured.add_argument("--time-budget", type=float, metavar="S", help="seconds after which no more is measured")
    measured.add_argument("--verify", type=int, default=3, metavar="K", help="really run the best K (default 3)")
    measured.add_argument("--policies", nargs="+", metavar="POLICY", help="orders to search; default: all")
    measured.add_argument(
        "--check-grid", action="store_true", help="also measure a small grid; fails if its best beats the plan by 2 %%"
    )
    measured.add_argument("--recompute", nargs="+", choices=RECOMPUTE_MODES, help="modes to search; the config's")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    from stateflow.titan.planning import parts_without_layers

    scenario = read_scenario(options, overrides)
    if scenario.job.num_ranks == 1:
        raise ValueError(
            "[parallelism] pipeline_parallel_degree = 1 has no pipeline to plan; give --ranks P, or set the degree"
        )
    if scenario.analytic.table is not None:
        raise ValueError(
            f"[stateflow] schedule_file = {scenario.job_config.stateflow.schedule_file!r} is the order of one number "
            "of chunks, and a plan searches orders: drop the key (--stateflow.schedule-file None), or see stateflow "
            "compare and simulate"
        )
    if not options.json and (remark := parts_without_layers(scenario.job)) is not None:
        print(f"note: {remark}")
    if options.analytic:
        for name in ("out", "cache", "lengths", "time_budget", "policies", "check_grid", "recompute"):
            if getattr(options, name) not in (None, False):
                raise ValueError(f"--{name.replace('_', '-')} is for measuring: leave it out, or --analytic")
        return _analytic(options, scenario)
    if options.json:
        raise ValueError("--json goes with --analytic; a measured plan is written to --out as TOML")
    if options.verify < 0:
        raise ValueError(f"--verify {options.verify}: the least is 0")
    if options.time_budget is not None and options.time_budget < 0:
        raise ValueError(f"--time-budget {options.time_budget:g}: the least is 0 seconds")
    from stateflow.commands.plan_measured import run as run_measured

    return run_measured(options, scenario, overrides)


def _analytic(options: argparse.Namespace, scenario: Scenario) -> int:
    from stateflow.planning.analytic import best_cell

    job, analytic = scenario.job, scenario.analytic
    cells = analytic.grid()
    best = best_cell(cells)
    if options.json:
        figures = {
            "job": job.describe(),
            "device": vars(analytic.device),
            "memory_limit": analytic.limit,
            "static_bytes": [analytic.static_of_rank(rank) for rank in range(job.num_ranks)],
            "best": None if best is None else best.to_json(),
            "cells": [cell.to_json() for cell in cells],
        }
        print(json.dumps(figures, indent=2))
        return 0
    print(job.describe())
    print(device_text(options, scenario))
    print(f"policy {job.policy}; at most {analytic.limit / GIB:.1f} GiB a rank\n")
    print(grid_table(cells))
    reasons = why_not(cells)
    if reasons:
        print("\n" + "\n".join(reasons))
    if best is None:
        print("\nnothing fits: more ranks, recomputation ([activation_checkpoint] mode = \"full\") or FSDP would help")
        return 0
    whole = next((cell for cell in cells if cell.num_chunks == 1), None)
    print(f"\nbest: num_chunks = {best.num_chunks}, skew = {best.skew:g}: {', '.join(map(str, best.lengths))}")
    peaks = " ".join(f"{peak / GIB:.1f}" for peak in best.peak_bytes)
    print(f"  {best.step_time:.4g} s a step, {best.bubble:.1%} idle, peak GiB a rank: {peaks}")
    if whole is not None and whole.fits:
        if best.num_chunks == 1:
            print("  whole sequences are the fastest here: chunks would only add overhead")
        else:
            gain = whole.step_time / best.step_time
            print(f"  {gain:.2f} times as fast as whole sequences ({whole.step_time:.4g} s)")
    return 0


def grid_table(cells) -> str:
    """A row for each alpha, a column for each N: step time, idle share, peak GiB of the fullest rank."""
    counts = sorted({cell.num_chunks for cell in cells})
    skews = sorted({cell.skew for cell in cells})
    at = {(cell.num_chunks, cell.skew): cell for cell in cells}

    def text(cell) -> str:
        if cell.step_time is None:
            return "-"
        mark = "" if cell.fits else "!"
        return f"{cell.step_time:.4g}s {cell.bubble * 100:.0f}% {max(cell.peak_bytes) / GIB:.1f}G{mark}"

    rows = [["alpha", *(f"N = {n}" for n in counts)]]
    rows += [[f"{skew:g}", *(text(at[n, skew]) for n in counts)] for skew in skews]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["step time, idle share of the ranks, peak memory of the fullest rank; ! does not fit, - is no plan"]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def why_not(cells) -> list[str]:
    """One line for each reason, with the cells that it holds for."""
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.why_not is not None:
            reasons.setdefault(cell.why_not, []).append(f"({cell.num_chunks}, {cell.skew:g})")
    lines = []
    for reason, where in reasons.items():
        shown = " ".join(where[:6]) + (f" and {len(where) - 6} more" if len(where) > 6 else "")
        lines.append(f"{shown}: {reason}")
    return lines
