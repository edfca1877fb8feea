"""Attention makes later chunks dearer: what skewed cuts reach against an ideal exchange of attention between ranks.

    python studies/balance.py --json outputs/balance.json --table outputs/balance.md --plot docs/balance.svg

Nothing runs on a device: costs are counted (``planning.costs``), steps are simulated (``pipeline.simulator``).  For
each share of attention layers and each context it finds the best skew (alpha of eq. 11) of several policies, and what
1F1B and interleaved 1F1B over equal chunks would take if attention were spread evenly over the ranks at every moment
(``Analytic.exchanged_cost``, an upper bound of SlimPipe's exchange).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from stateflow.pipeline.simulator import simulate
from stateflow.planning.analytic import Analytic
from stateflow.planning.devices import DEVICES, GIB
from stateflow.planning.job import Job
from stateflow.titan.config import chunk_cost
from stateflow.titan.flavors import FLAVORS

PATTERNS = {
    "no attention": ["gdn"],
    "1 of 4": ["gdn", "gdn", "gdn", "attention"],
    "1 of 2": ["gdn", "attention"],
    "all attention": ["attention"],
}
SKEWS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
CONTEXTS = (32, 64, 128, 256, 512)  # in 1024 tokens
# (policy, stages a rank); whether its cuts are skewed or attention is exchanged.
ARRANGEMENTS = (
    ("1f1b", 1, "equal"),
    ("1f1b", 1, "skewed"),
    ("interleaved", 2, "skewed"),
    ("zero_bubble", 1, "skewed"),
    ("v_shape", 2, "skewed"),
    ("1f1b", 1, "exchange"),
    ("interleaved", 2, "exchange"),
)


@dataclass(frozen=True)
class Sizes:
    """P ranks, M microbatches of one sequence, N chunks."""

    num_ranks: int = 8
    num_microbatches: int = 8
    num_chunks: int = 8


@dataclass(frozen=True)
class Result:
    """One arrangement.  ``efficiency``: what a step would take with no rank ever idle, over what it takes."""

    pattern: str
    context: int
    policy: str
    stages_per_rank: int
    how: str
    skew: float
    step_time: float
    efficiency: float
    peak_gib: float

    @property
    def name(self) -> str:
        return f"{self.policy}, {self.how}"


def make_job(pattern: str, context: int, policy: str, stages_per_rank: int, sizes: Sizes) -> Job:
    """The layers of the 3B model alone, equally many a stage: embedding and head would be an imbalance of their own."""
    model = dataclasses.replace(FLAVORS["gdn_3b"], pattern=PATTERNS[pattern])
    num_stages = stages_per_rank * sizes.num_ranks
    share, left = divmod(model.num_layers, num_stages)
    if left:
        raise ValueError(f"{model.num_layers} layers are not cut evenly into {num_stages} stages; use a divisor")
    parts = [tuple(f"layers.{share * stage + i}" for i in range(share)) for stage in range(num_stages)]
    seq_len = 1024 * context
    return Job(
        model, tuple(parts), seq_len, sizes.num_ranks, sizes.num_microbatches, 1, chunk_cost(model, seq_len),
        compute_dtype=torch.bfloat16, parameter_dtype=torch.bfloat16, recompute="full", policy=policy,
    )  # fmt: skip


def study(pattern: str, context: int, sizes: Sizes, skews: Sequence[float] = SKEWS) -> list[Result]:
    """The arrangements of one model on one context."""
    # No action waits for its launches: the question is balance alone.
    device = dataclasses.replace(DEVICES["h200"], launch_seconds=0.0)
    results, analytics = [], {}
    for policy, stages_per_rank, how in ARRANGEMENTS:
        key = (policy, stages_per_rank)
        if key not in analytics:
            analytics[key] = Analytic(make_job(pattern, context, policy, stages_per_rank, sizes), device)
        analytic = analytics[key]
        found = []
        for skew in skews if how == "skewed" else (0.0,):
            plan = analytic.job.plan(sizes.num_chunks, skew)
            cost = analytic.exchanged_cost(plan) if how == "exchange" else analytic.cost(plan)
            schedule = analytic.schedule(policy, sizes.num_chunks)
            step = simulate(schedule, cost, analytic.link, analytic.message_bytes(plan))
            found.append((step.step_time, skew, step.bubble, plan))
        time, skew, bubble, plan = min(found, key=lambda entry: entry[:2])
        peak = max(analytic.peak_bytes(analytic.schedule(policy, sizes.num_chunks), plan)) / GIB
        results.append(Result(pattern, context, policy, stages_per_rank, how, skew, time, 1 - bubble, peak))
    return results


def markdown_table(results: Sequence[Result]) -> str:
    """A line for each model and context; the best without an exchange is bold."""
    names = list(dict.fromkeys(result.name for result in results))
    lines = [f"| attention layers | context | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for pattern, context in dict.fromkeys((r.pattern, r.context) for r in results):
        row = {r.name: r for r in results if (r.pattern, r.context) == (pattern, context)}
        best = max(r.efficiency for r in row.values() if r.how != "exchange")
        cells = []
        for name in names:
            text = f"{100 * row[name].efficiency:.1f}"
            if row[name].how != "exchange" and row[name].efficiency == best:
                text = f"**{text}**"
            if row[name].how == "skewed":
                text += f" ({row[name].skew:g})"
            cells.append(text)
        lines.append(f"| {pattern} | {context}K | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results: Sequence[Result], path: Path) -> None:
    """Efficiency over context, a panel for each share of attention layers.  Needs matplotlib."""
    from stateflow.planning.picture import pyplot, save

    plots = pyplot()
    patterns = list(dict.fromkeys(result.pattern for result in results))
    names = list(dict.fromkeys(result.name for result in results))
    figure, axes = plots.subplots(1, len(patterns), figsize=(2.7 * len(patterns), 2.9), sharey=True, squeeze=False)
    colors = {"1f1b": "#1f5fa8", "interleaved": "#c2452d", "zero_bubble": "#2e7d4f", "v_shape": "#7a4fa3"}
    lines = {"equal": ":", "skewed": "-", "exchange": "--"}
    for axis, pattern in zip(axes[0], patterns, strict=True):
        for name in names:
            mine = [r for r in results if r.pattern == pattern and r.name == name]
            axis.plot(
                [r.context for r in mine], [100 * r.efficiency for r in mine], label=name, linestyle=lines[mine[0].how],
                color=colors[mine[0].policy], marker=".", markersize=4, linewidth=1.3,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks([r.context for r in mine], [f"{r.context}K" for r in mine])
        axis.set_title(pattern, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("busy, % of the step")
    axes[0][-1].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.supxlabel("context (tokens)", fontsize=8)
    figure.tight_layout()
    save(figure, path)
    plots.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=Sizes.num_ranks)
    parser.add_argument("--microbatches", type=int, default=Sizes.num_microbatches)
    parser.add_argument("--num-chunks", type=int, default=Sizes.num_chunks)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="in 1024 tokens")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--json", type=Path, default=Path("outputs/balance.json"))
    parser.add_argument("--table", type=Path, default=Path("outputs/balance.md"))
    parser.add_argument("--plot", type=Path, default=Path("outputs/balance.svg"), help=".svg or .png; needs matplotlib")
    args = parser.parse_args(argv)
    sizes = Sizes(args.ranks, args.microbatches, args.num_chunks)
    results = []
    for pattern in args.patterns:
        for context in args.contexts:
            results += study(pattern, context, sizes)
            print(f"{pattern}, {context}K done", flush=True)
    table = markdown_table(results)
    print(table)
    for path in (args.json, args.table, args.plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    args.table.write_text(table + "\n")
    args.json.write_text(json.dumps({"sizes": asdict(sizes), "results": [asdict(r) for r in results]}, indent=1) + "\n")
    plot(results, args.plot)


if __name__ == "__main__":
    main()
