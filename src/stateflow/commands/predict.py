"""``stateflow predict CONFIG ...``: whole steps, and the paper's tables 2 and 3, for machines that one does not have.

Every config in each recomputation mode, at each length and number of microbatches: whole sequences and the fastest
(N, alpha) that fits, simulated on measured stages (``--cache``, scaled to the number of ranks) or on counted ones;
beside it what the paper has, and what the simulator makes of runs that were measured (``--rows``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stateflow.chunks import MAX_SKEW
from stateflow.commands import read_config
from stateflow.planning.devices import DEVICES, GIB, device_named
from stateflow.planning.job import RECOMPUTE_MODES

if TYPE_CHECKING:
    from stateflow.planning.analytic import Analytic

SKEWS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
PAPERS_DEVICE = "a100"
ROW_FIELDS = ("name", "error", "seconds", "seq_len", "microbatches", "chunks", "peak_gib")


def register(commands) -> None:
    from stateflow.planning.analytic import NUM_CHUNKS
    from stateflow.planning.paper import MICROBATCHES, RANKS, TOKENS

    parser = commands.add_parser("predict", help="steps of that many ranks, and the paper's tables, by simulation")
    many = dict(type=int, nargs="+", metavar="N")
    parser.add_argument("configs", type=Path, nargs="+", metavar="config", help="train.tomls")
    parser.add_argument("--ranks", type=int, default=RANKS, metavar="P", help=f"pipeline ranks (default {RANKS})")
    parser.add_argument("--tokens", default=list(TOKENS), help="sequence lengths (default 65536 131072)", **many)
    parser.add_argument("--microbatches", default=list(MICROBATCHES), help="sequences a step (4 8 16)", **many)
    parser.add_argument("--num-chunks", default=[n for n in NUM_CHUNKS if n > 1], help="N to search", **many)
    parser.add_argument(
        "--skew", type=float, nargs="+", default=list(SKEWS), metavar="ALPHA",
        help="alpha to search where there is attention (default 0 to 1.25 in quarters)",
    )  # fmt: skip
    parser.add_argument(
        "--recompute", nargs="+", choices=RECOMPUTE_MODES, metavar="MODE",
        help=f"recomputation modes, of {', '.join(RECOMPUTE_MODES)}; default: the config's",
    )  # fmt: skip
    parser.add_argument(
        "--cache", type=Path, nargs="+", default=[], metavar="FILE",
        help="points measured by stateflow plan, of stages for any number of ranks; default: counted costs",
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=flavor_and_file, nargs="+", default=[], metavar="FLAVOR=FILE",
        help="rows of stateflow bench pipeline --json, to see how far the simulator is off",
    )  # fmt: skip
    parser.add_argument("--device", help=f"memory and links of h200, h100, a100 or cpu; default: measured on, or "
                        f"{PAPERS_DEVICE}, the paper's")  # fmt: skip
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory limit a rank; default: the device's")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the Markdown there")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def flavor_and_file(text: str) -> tuple[str, Path]:
    flavor, sign, path = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text}: give FLAVOR=FILE, e.g. gdn_3b=rows.jsonl")
    return flavor, Path(path)


@dataclass(frozen=True)
class Prediction:
    """One setting; times in seconds, memory in bytes of each rank, None for what does not fit.

    ``flops`` are the model's of a step, on one device's share, and ``peak_flops`` what that device could do a second.
    """

    flavor: str
    hybrid: bool
    recompute: str
    tokens: int
    microbatches: int
    ranks: int
    devices: int  # ranks of pipeline and tensor parallelism
    flops: float
    peak_flops: float
    whole_seconds: float | None
    whole_rank_bytes: tuple[int, ...]  # also if it does not fit
    num_chunks: int | None = None
    skew: float | None = None
    graphs: bool | None = None
    seconds: float | None = None
    bubble: float | None = None
    rank_bytes: tuple[int, ...] | None = None

    @property
    def whole_bytes(self) -> int:
        """Of the fullest rank."""
        return max(self.whole_rank_bytes)

    @property
    def peak_bytes(self) -> int | None:
        return None if self.rank_bytes is None else max(self.rank_bytes)

    @property
    def rate(self) -> float | None:
        """Tokens a second and device."""
        return None if self.seconds is None else self.tokens * self.microbatches / self.seconds / self.devices

    @property
    def mfu(self) -> float | None:
        return None if self.seconds is None else self.flops / self.seconds / self.peak_flops

    @property
    def whole_mfu(self) -> float | None:
        return None if self.whole_seconds is None else self.flops / self.whole_seconds / self.peak_flops

    @property
    def speedup(self) -> float | None:
        return None if None in (self.whole_seconds, self.seconds) else self.whole_seconds / self.seconds

    @property
    def memory_ratio(self) -> float | None:
        return None if None in (self.whole_seconds, self.peak_bytes) else self.whole_bytes / self.peak_bytes

    @property
    def of_bound(self) -> float | None:
        """Share of (M + P - 1) / (M + (P - 1) / N), eq. 14 over eq. 15, that the speed-up reaches."""
        if self.speedup is None:
            return None
        m, p, n = self.microbatches, self.ranks, self.num_chunks
        return self.speedup * (m + (p - 1) / n) / (m + p - 1)


@dataclass(frozen=True)
class Check:
    """A measured run beside its simulation."""

    flavor: str
    tokens: int
    microbatches: int
    ranks: int
    name: str
    measured: float
    simulated: float
    measured_gib: float
    predicted_gib: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


class Source:
    """Where costs come from: measured stages, or counts."""

    def __init__(self, options: argparse.Namespace):
        from stateflow.planning.profile import Cache

        for path in options.cache:
            if not path.is_file():
                raise ValueError(f"--cache {path}: no such file; stateflow plan writes it")
        self.caches = [Cache(path) for path in options.cache]
        self.device = options.device
        if options.memory is not None and not options.memory > 0:
            raise ValueError(f"--memory {options.memory:g}: must be above 0 GiB")
        self.limit = None if options.memory is None else options.memory * GIB
        self.used: dict[str, str] = {}  # by flavor in words

    def costs(self, flavor: str, job_config, job) -> dict[bool, Analytic]:
        """An ``Analytic`` of the job: with layers in CUDA graphs (True), without (False), or each where both are known.

        A config with ``cuda_graphs`` may use them; one without does not.
        """
        from stateflow.commands.plan_measured import key_facts
        from stateflow.planning.analytic import Analytic
        from stateflow.planning.scaling import Scaled, describe, measured_stages, without_graphs

        if not self.caches:
            device = device_named(self.device or PAPERS_DEVICE)
            self.used[flavor] = (
                f"**counted, nothing measured**: FLOPs at assumed shares of the {device.name}'s peak "
                f"({device.dense_fraction:.0%} in matrix products, {device.attention_fraction:.0%} in attention, "
                f"{device.recurrence_fraction:.0%} in recurrences)"
            )
            return {False: Analytic(job, device, self.limit)}
        facts, missing = key_facts(job_config, job, None, False), []
        for cache in self.caches:
            try:
                profiles, where = measured_stages(cache, facts)
            except ValueError as error:
                missing.append(str(error))
                continue
            name = self.device or next((key for key in DEVICES if key in where.lower()), None)
            if name is None:
                raise ValueError(f"{cache.path}: measured on {where}, which is not in the table: say --device")
            stages = "; ".join(map(describe, profiles))
            self.used[flavor] = f"measured on {where}: stages of {stages}"
            eager = without_graphs(cache, facts, where)
            found = {} if eager is None else {False: Scaled(job, device_named(name), self.limit).use(eager)}
            if facts["cuda_graphs"]:
                found[True] = Scaled(job, device_named(name), self.limit).use(profiles, eager, recorded=True)
            return found
        raise ValueError("; ".join(missing))


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    for path in options.configs:
        if not path.is_file():
            raise ValueError(f"no such config: {path}")
    for name in ("tokens", "microbatches", "num_chunks"):
        if min(getattr(options, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {min(getattr(options, name))}: the least is 1")
    for alpha in options.skew:
        if not 0 <= alpha <= MAX_SKEW:
            raise ValueError(f"--skew {alpha:g} is outside 0 .. {MAX_SKEW}")
    source = Source(options)
    predictions, checks = [], []
    rows = {flavor: read_rows(path) for flavor, path in options.rows}
    for path in options.configs:
        flavor = read_config(path, overrides, options.ranks).model.flavor
        for tokens in options.tokens:
            job_config, job = job_at(path, overrides, options.ranks, tokens)
            for mode in options.recompute or [job.recompute]:
                predictions += predict(options, source, flavor, job_config, job.with_recompute(mode))
        checks += check(source, flavor, path, overrides, rows.pop(flavor, []))
    if rows:
        raise ValueError(f"--rows {next(iter(rows))}: none of the configs has this flavor")
    if options.json:
        derived = ("rate", "mfu", "whole_mfu", "speedup", "of_bound", "whole_bytes", "peak_bytes", "memory_ratio")
        figures = [{**asdict(p), **{name: getattr(p, name) for name in derived}} for p in predictions]
        errors = [{**asdict(c), "error": c.error} for c in checks]
        print(json.dumps({"costs": source.used, "settings": figures, "measured": errors}, indent=2))
        return 0
    text = markdown(predictions, checks, source.used, options.ranks)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


def job_at(path: Path, overrides: Sequence[str], ranks: int, tokens: int):
    from stateflow.titan.planning import job_of

    job_config = read_config(path, [*overrides, f"--training.seq_len={tokens}"], ranks)
    return job_config, job_of(job_config)


def predict(options: argparse.Namespace, source: Source, flavor: str, job_config, job) -> list[Prediction]:
    """One sequence length and recomputation mode, at each number of microbatches."""
    from stateflow.model import flops_per_token
    from stateflow.planning.analytic import best_cell

    hybrid = "attention" in job.model.layer_kinds()
    devices = job.num_ranks * job.tensor_parallel
    flops = flops_per_token(job.model, job.seq_len) * job.seq_len / devices
    found = []
    for count in options.microbatches:
        known = source.costs(flavor, job_config, dataclasses.replace(job, num_microbatches=count))
        whole = eager(known).cell(1, 0.0)
        cuts = [(n, a) for n in options.num_chunks for a in (options.skew if hybrid else [0.0])]
        cells = {graphs: best_cell([costs.cell(*cut) for cut in cuts]) for graphs, costs in known.items()}
        best = best_cell([cell for cell in cells.values() if cell is not None])
        of_best = {}
        if best is not None:
            of_best = dict(
                num_chunks=best.num_chunks, skew=best.skew, graphs=best is cells.get(True), seconds=best.step_time,
                bubble=best.bubble, rank_bytes=best.peak_bytes,
            )  # fmt: skip
        found.append(
            Prediction(
                flavor, hybrid, job.recompute, job.seq_len, count, job.num_ranks, devices, flops * count,
                eager(known).device.flops, whole.step_time if whole.fits else None, whole.peak_bytes, **of_best,
            )
        )  # fmt: skip
    return found


def eager(known: dict[bool, Analytic]) -> Analytic:
    """What whole sequences run as: there the host is ahead of the GPU without graphs."""
    return known.get(False) or known[True]


def read_rows(path: Path) -> list[dict]:
    fix = "give what bench pipeline --json wrote"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(f"--rows {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"--rows {path}: {error}; {fix}") from error
    for row in rows:
        missing = [name for name in ROW_FIELDS if name not in row] if isinstance(row, dict) else ROW_FIELDS
        if missing:
            raise ValueError(f"--rows {path}: a row has no {', '.join(missing)}; {fix}")
        if not row["error"] and not all(0 < seconds < math.inf for seconds in row["seconds"]):
            raise ValueError(f"--rows {path}: the row {row['name']!r} took {row['seconds']} s; {fix}")
    if not rows:
        raise ValueError(f"--rows {path}: has no rows; {fix}")
    return rows


def check(source: Source, flavor: str, path: Path, overrides: Sequence[str], rows: Sequence[dict]) -> list[Check]:
    """The measured rows of one model, each simulated on as many ranks as it ran on."""
    from stateflow.chunks import ChunkPlan

    checks = []
    for row in rows:
        if row["error"] or not row["seconds"]:
            continue
        ranks = len(row["peak_gib"])
        job_config, job = job_at(path, overrides, ranks, row["seq_len"])
        known = source.costs(flavor, job_config, dataclasses.replace(job, num_microbatches=row["microbatches"]))
        costs = known[True] if True in known and row["chunks"] else eager(known)
        plan = ChunkPlan.explicit(row["seq_len"], row["chunks"] or [row["seq_len"]])
        simulation = costs.simulate(plan)
        peak = max(costs.peak_bytes(simulation.schedule, plan)) / GIB
        measured = statistics.median(row["seconds"])
        checks.append(
            Check(
                flavor, row["seq_len"], row["microbatches"], ranks, row["name"], measured, simulation.step_time,
                max(row["peak_gib"]), peak,
            )
        )  # fmt: skip
    return checks


# ------------------------------------------------------------------------------ Markdown
def markdown(predictions: Sequence[Prediction], checks: Sequence[Check], used: dict[str, str], ranks: int) -> str:
    from stateflow.planning.paper import published

    lines = [f"# Predicted for {ranks} pipeline ranks", "", "Simulated: nothing here ran on so many.", ""]
    lines += [f"* {name}: costs {how}." for name, how in used.items()]
    lines += [
        "", "1F1B is whole sequences. MFU counts the model's FLOPs, not recomputation. \"Of bound\" is the share of "
        "(M + P - 1) / (M + (P - 1) / N) that the speed-up reaches. Memory is of each rank, in brackets what does not "
        "fit. \"Graphs\": faster with layers in CUDA graphs.", "", *steps_table(predictions),
    ]  # fmt: skip
    compared = [
        p for p in predictions
        if p.recompute == "full" and published(p.flavor, p.tokens, p.microbatches, ranks) is not None
    ]  # fmt: skip
    if compared:
        lines += ["", "Beside the paper: rates of all ranks together, memory of the fullest rank. \"Paper\" is "
                  "Megatron / Swift on eight A100-80GB."]  # fmt: skip
    for title, hybrid in (("Linear recurrences (table 2)", False), ("Hybrids (table 3)", True)):
        some = [p for p in compared if p.hybrid == hybrid]
        if some:
            lines += ["", f"## {title}", "", *paper_table(some)]
    if checks:
        lines += ["", "## The simulator beside measured runs", "", *check_table(checks), "", error_text(checks)]
    return "\n".join(lines)


def steps_table(predictions: Sequence[Prediction]) -> list[str]:
    columns = (
        "model", "recomputation", "tokens", "M", "1F1B s/step", "MFU", "GiB", "N, alpha", "s/step", "tokens/s/GPU",
        "MFU", "idle", "GiB", "speed-up", "of bound",
    )  # fmt: skip
    rows = []
    for p in predictions:
        whole = " / ".join(map(gib, p.whole_rank_bytes))
        of_whole = ["OOM", "-", f"({whole})"]
        if p.whole_seconds is not None:
            of_whole = [f"{p.whole_seconds:.3f}", percent(p.whole_mfu, 1), whole]
        of_best = ["-"] * 5
        if p.seconds is not None:
            peaks = " / ".join(map(gib, p.rank_bytes))
            of_best = [f"{p.seconds:.3f}", f"{p.rate:,.0f}", percent(p.mfu, 1), percent(p.bubble, 1), peaks]
        rows.append(
            [
                p.flavor, p.recompute, f"{p.tokens:,}", p.microbatches, *of_whole, chosen(p), *of_best,
                times(p.speedup), percent(p.of_bound),
            ]
        )  # fmt: skip
    return table(columns, rows)


def paper_table(predictions: Sequence[Prediction]) -> list[str]:
    from stateflow.planning.paper import published

    columns = (
        "model", "tokens", "M", "whole K tok/s", "GiB", "N, alpha", "K tok/s", "GiB", "speed-up", "paper", "of bound",
        "memory ratio", "paper",
    )  # fmt: skip
    rows = []
    for p in predictions:
        paper = published(p.flavor, p.tokens, p.microbatches, p.ranks)
        speedups, memories = (
            " / ".join("-" if entry is None else times(getattr(entry, name)) for entry in paper)
            for name in ("speedup", "memory_ratio")
        )
        rows.append(
            [
                p.flavor, f"{p.tokens:,}", p.microbatches, rate(p, p.whole_seconds), gib(p.whole_bytes), chosen(p),
                rate(p, p.seconds), gib(p.peak_bytes), times(p.speedup), speedups, percent(p.of_bound),
                times(p.memory_ratio), memories,
            ]
        )  # fmt: skip
    return table(columns, rows)


def check_table(checks: Sequence[Check]) -> list[str]:
    columns = ("model", "tokens", "ranks", "M", "row", "measured s", "simulated s", "error", "GiB", "predicted GiB")
    rows = [
        [
            c.flavor, f"{c.tokens:,}", c.ranks, c.microbatches, c.name, f"{c.measured:.3f}", f"{c.simulated:.3f}",
            f"{c.error:+.1%}", f"{c.measured_gib:.1f}", f"{c.predicted_gib:.1f}",
        ]
        for c in checks
    ]  # fmt: skip
    return table(columns, rows)


def error_text(checks: Sequence[Check]) -> str:
    """The error of step times, and of what matters here: of speed-ups over whole sequences."""
    sizes = [abs(c.error) for c in checks]
    text = f"Step time: mean error {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}."
    whole = {(c.flavor, c.tokens, c.microbatches, c.ranks): c for c in checks if c.name == "1F1B"}
    ratios = []
    for c in checks:
        base = whole.get((c.flavor, c.tokens, c.microbatches, c.ranks))
        if base is not None and base is not c:
            ratios.append(abs((1 + base.error) / (1 + c.error) - 1))
    if ratios:
        text += f" Speed-up over whole sequences: mean error {statistics.mean(ratios):.1%}, worst {max(ratios):.1%}."
    return text


def rate(p: Prediction, seconds: float | None) -> str:
    return "OOM" if seconds is None else f"{p.tokens * p.microbatches / seconds / 1e3:.1f}"


def chosen(p: Prediction) -> str:
    return "nothing fits" if p.num_chunks is None else f"{p.num_chunks}, {p.skew:g}" + ", graphs" * bool(p.graphs)


def percent(share: float | None, digits: int = 0) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def gib(count: int | None) -> str:
    return "-" if count is None else f"{count / GIB:.1f}"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def table(columns: Sequence[str], rows: Sequence[Sequence]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows)]
