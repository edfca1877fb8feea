"""The paper's topologies on one machine of 8, 4 or 2 GPUs: torchtitan's 1F1B against StateFlow, best rows first.

    python studies/topologies.py --gpus 8 --list                     # what would run, and what is predicted of it
    python studies/topologies.py --gpus 8 --seconds 540 --out outputs/topologies_8
    python studies/topologies.py --gpus 8 --rehearsal --out outputs/rehearsal   # the same rows, tiny, on a CPU

Rows are those of ``stateflow bench pipeline``: whole optimizer steps of one model with other overrides.  They run in
the order of ``campaign``, each is written to OUT/rows.jsonl as soon as it exists, and one that runs out of memory or
time is a row, too.  A row that is not likely to end within ``--seconds`` is not begun; the same command with the same
OUT goes on with the first row that is not there.  OUT/table.md is written anew after each row.

``--list`` leaves its predictions in OUT/plans.json, so that a run with the same OUT need not work them out on a lent
machine.  ``plan`` is the number of chunks and the skew that the simulator finds fastest, from counts, or from measured
stages where ``--profiles`` (the cache of ``stateflow plan --cache``) holds them.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

import torch

from stateflow.commands import read_config, titan_arguments
from stateflow.planning.analytic import Analytic
from stateflow.planning.devices import DEVICES, Device, device_named
from stateflow.planning.profile import Budget, Cache
from stateflow.titan.bench import Row, device_name, measure_rows

BASE = Path(__file__).parents[1] / "titan_configs"
NUM_CHUNKS, SKEWS = (2, 4, 8, 16, 32), (0.0, 0.25, 0.5, 0.75, 1.0)
K = 1024
# Seconds that a launch and a row take beside their steps; times that steps may take what is predicted, until measured
# rows say better.
LAUNCH, ROW, SLOWER = 60.0, 20.0, 1.5
REHEARSED_TOKENS = 1024  # one rehearsed token stands for so many

# Speed-ups over 1F1B that the paper measured on A100s at PP8 x TP1: (model, tokens) -> by microbatches.
PAPER = {
    ("gdn_3b", 64 * K): {4: 1.91, 8: 1.47, 16: 1.22},
    ("gdn_3b", 128 * K): {4: 2.20, 8: 1.54, 16: 1.24},
    ("gdn_3b_hybrid", 64 * K): {4: 2.02, 8: 1.41, 16: 1.26},
    ("gdn_3b_hybrid", 128 * K): {4: 2.22, 8: 1.53, 16: 1.30},
}


# ------------------------------------------------------------------------ what is to run
@dataclass(frozen=True)
class Entry:
    """A row to measure.

    ``choice``: "1F1B" (torchtitan's, or its GPipe where there are fewer microbatches than stages), "plan", "plan/2" or
    "plan*2" (half or twice the plan's chunks at its skew), or "N" or "N,alpha".
    ``fit``: as many layers as are predicted to fit, in place of the model's.
    """

    model: str
    pp: int
    tp: int
    tokens: int
    microbatches: int
    choice: str
    fit: bool = False

    @property
    def key(self) -> str:
        fit = " fit" if self.fit else ""
        return f"{self.model}{fit} PP{self.pp}xTP{self.tp} {self.tokens // K}K M{self.microbatches} {self.choice}"

    @property
    def case(self) -> tuple:
        """Rows that agree in it train the same steps of the same model, on any topology."""
        return self.model, self.fit, self.tokens, self.microbatches


def rows_of(
    model: str, pp: int, tp: int, tokens: int, microbatches: Iterable[int], *choices: str, fit: bool = False
) -> list[Entry]:
    return [Entry(model, pp, tp, tokens, m, choice, fit) for m in microbatches for choice in choices]


def campaign(gpus: int) -> list[Entry]:
    """All rows for a machine of so many GPUs, the most valuable first; those of one topology stand together.

    Raises:
        ValueError: for another number of GPUs.
    """
    pure, hybrid, mamba, every = "gdn_3b", "gdn_3b_hybrid", "mamba3_3b", (4, 8, 16)
    pair, near = ("1F1B", "plan"), ("plan/2", "plan*2")
    if gpus == 8:
        return [
            *rows_of(pure, 8, 1, 64 * K, [4], *pair, *near), *rows_of(pure, 8, 1, 64 * K, [8, 16], *pair),
            *rows_of(hybrid, 8, 1, 64 * K, [4], *pair, *near), *rows_of(hybrid, 8, 1, 64 * K, [8], *pair),
            *rows_of(pure, 8, 1, 128 * K, [4, 8], *pair), *rows_of(mamba, 8, 1, 64 * K, [4, 8], *pair),
            *rows_of(hybrid, 8, 1, 128 * K, [4], *pair),
            # The baseline's other topologies (figure 3), and the 15B shape where it needs tensor parallelism.
            *rows_of(pure, 4, 2, 64 * K, every, "1F1B"), *rows_of(hybrid, 4, 2, 64 * K, [4, 8], "1F1B"),
            *rows_of("gdn_15b", 4, 2, 64 * K, [4], *pair, fit=True), *rows_of(pure, 4, 2, 64 * K, [4], "plan"),
            *rows_of(pure, 2, 4, 64 * K, every, "1F1B"), *rows_of(hybrid, 2, 4, 64 * K, [4, 8], "1F1B"),
            # Throughput and memory over N, and what takes longest.
            *rows_of(hybrid, 8, 1, 64 * K, [16], *pair), *rows_of(mamba, 8, 1, 128 * K, [4], *pair),
            *rows_of(pure, 8, 1, 64 * K, [8, 16], *near), *rows_of(hybrid, 8, 1, 64 * K, [4], "8,0.75"),
            *rows_of(pure, 8, 1, 128 * K, [16], *pair), *rows_of(mamba, 8, 1, 64 * K, [16], *pair),
            *rows_of(hybrid, 8, 1, 128 * K, [8, 16], *pair), *rows_of(mamba, 8, 1, 128 * K, [8, 16], *pair),
            *rows_of(pure, 8, 1, 64 * K, every, "2", "4", "32"), *rows_of(pure, 8, 1, 256 * K, [4], *pair),
        ]  # fmt: skip
    if gpus == 4:
        return [
            *rows_of(pure, 4, 1, 64 * K, [4], *pair, *near), *rows_of(pure, 4, 1, 64 * K, [8], *pair),
            *rows_of(hybrid, 4, 1, 64 * K, [4], *pair, *near), *rows_of(mamba, 4, 1, 64 * K, [4], *pair),
            *rows_of(pure, 4, 1, 128 * K, [4], *pair), *rows_of(hybrid, 4, 1, 64 * K, [8], *pair),
            *rows_of(pure, 2, 2, 64 * K, [4, 8], "1F1B"), *rows_of(hybrid, 2, 2, 64 * K, [4], "1F1B"),
            *rows_of("gdn_15b", 2, 2, 64 * K, [4], *pair, fit=True),
            *rows_of(pure, 4, 1, 64 * K, [16], *pair), *rows_of(hybrid, 4, 1, 128 * K, [4], *pair),
            *rows_of(mamba, 4, 1, 128 * K, [4], *pair), *rows_of(mamba, 4, 1, 64 * K, [8], *pair),
        ]  # fmt: skip
    if gpus == 2:
        return [
            *rows_of(pure, 2, 1, 64 * K, [4], *pair, *near), *rows_of(hybrid, 2, 1, 64 * K, [4], *pair, *near),
            *rows_of(mamba, 2, 1, 64 * K, [4], *pair), *rows_of(pure, 2, 1, 128 * K, [4], *pair),
            *rows_of(pure, 2, 1, 64 * K, [8], *pair), *rows_of(hybrid, 2, 1, 64 * K, [8], *pair),
        ]  # fmt: skip
    raise ValueError(f"--gpus {gpus}: there are rows for 8, 4 and 2")


@dataclass
class Options:
    """How rows are run."""

    steps: int = 2
    warmup: int = 2
    row_timeout: float = 240.0
    rehearsal: bool = False
    cuda_graphs: bool = True
    device: str | None = None
    overrides: list[str] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return BASE / ("demo.toml" if self.rehearsal else "gdn_3b.toml")

    def topology(self, pp: int, tp: int) -> list[str]:
        """Overrides that all rows of a launch have."""
        small = []
        if self.rehearsal:
            heads = [f"--stateflow.model.{name}=4" for name in ("num_heads", "num_attention_heads", "num_kv_heads")]
            small = ["--model.flavor=tiny", "--activation_checkpoint.mode=full", "--stateflow.model.num_layers=16"]
            small += [*heads, "--stateflow.model.vocab_size=260", "--lr_scheduler.warmup_steps=1"]
        return [
            f"--parallelism.pipeline_parallel_degree={pp}", f"--parallelism.tensor_parallel_degree={tp}", *small,
            "--validation.no-enable", "--checkpoint.no-enable", "--metrics.no-enable-tensorboard", *self.overrides,
        ]  # fmt: skip

    def model(self, entry: Entry) -> list[str]:
        if self.rehearsal:
            attention = ",attention" if entry.model.endswith("hybrid") else ""
            return [f"--stateflow.model.pattern={entry.model.partition('_')[0]}{attention}"]
        # "auto" leaves Mamba-3 to PyTorch, which would not be worth the time here.
        kernels = "triton" if entry.model.startswith("mamba3") else "auto"
        return [f"--model.flavor={entry.model}", f"--stateflow.kernels={kernels}"]

    def tokens(self, entry: Entry) -> int:
        return entry.tokens // REHEARSED_TOKENS if self.rehearsal else entry.tokens

    def case(self, entry: Entry, layers: int | None) -> list[str]:
        """Overrides of the entry beside its topology and its cut."""
        fitted = [] if layers is None else [f"--stateflow.model.num_layers={layers}"]
        return [
            *self.model(entry), *fitted, f"--training.seq_len={self.tokens(entry)}",
            f"--training.local_batch_size={entry.microbatches}",
        ]  # fmt: skip

    def cut(self, entry: Entry, num_chunks: int | None, skew: float) -> list[str]:
        if num_chunks is None:
            # torchtitan's 1F1B refuses fewer microbatches than stages; its GPipe takes them, in as many steps.
            order = f"--parallelism.pipeline_parallel_schedule={whole_order(entry)}"
            return ["--stateflow.no-enable", "--stateflow.no-cuda-graphs", order]
        graphs = self.cuda_graphs and not self.rehearsal and entry.tp == 1
        return [
            "--stateflow.enable", f"--stateflow.num_chunks={num_chunks}", f"--stateflow.skew={skew}",
            "--stateflow.cuda-graphs" if graphs else "--stateflow.no-cuda-graphs",
        ]  # fmt: skip


# ------------------------------------------------------------------------- what it is predicted to be
@dataclass
class Planned:
    """An entry with its cut (None: whole sequences in 1F1B), and seconds and GiB that the simulator expects."""

    entry: Entry
    row: Row
    num_chunks: int | None = None
    skew: float = 0.0
    layers: int | None = None
    seconds: float = 0.0
    peak_gib: float = 0.0
    source: str = ""


class Planner:
    """Predicts entries and chooses their cuts; what ``memo`` holds is not worked out again."""

    def __init__(self, options: Options, cache: Cache | None = None, memo: Path | None = None):
        self.options, self.cache, self.memo = options, cache, memo
        self._cases: dict[tuple, tuple] = {}
        self._best: dict[tuple, tuple[int, float]] = {}
        self._known = json.loads(memo.read_text()) if memo is not None and memo.exists() else {}

    @property
    def device(self) -> Device:
        return DEVICES["cpu"] if self.options.rehearsal else device_named(self.options.device)

    def plan(self, entry: Entry) -> Planned:
        """Raises ValueError, naming the entry, where the config cannot be."""
        measured = self.cache is not None and sorted(self.cache.points)
        facts = [entry.key, vars(self.options), self.device.name, measured]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        if key in self._known:
            known = dict(self._known[key])
            return Planned(**{**known, "entry": Entry(**known["entry"]), "row": Row(**known["row"])})
        try:
            planned = self._plan(entry)
        except ValueError as error:
            raise ValueError(f"{entry.key}: {error}") from error
        self._known[key] = asdict(planned)
        if self.memo is not None:
            self.memo.parent.mkdir(parents=True, exist_ok=True)
            self.memo.write_text(json.dumps(self._known))
        return planned

    def _plan(self, entry: Entry) -> Planned:
        options = self.options
        case = (*entry.case, entry.pp, entry.tp)
        if case not in self._cases:
            layers = self._fitting_layers(entry) if entry.fit and not options.rehearsal else None
            self._cases[case] = (layers, *self._analytic(entry, layers))
        layers, analytic, source = self._cases[case]
        if entry.choice.startswith("plan") and case not in self._best:
            self._best[case] = best_cut(analytic)
        num_chunks, skew = chosen(entry.choice, self._best.get(case))
        overrides = [*options.case(entry, layers), *options.cut(entry, num_chunks, skew)]
        self._read(entry, overrides)  # refuses what cannot run before anything does
        name = whole_order(entry) if num_chunks is None else f"N={num_chunks} alpha={skew:g}"
        row = Row(name, overrides, options.tokens(entry), entry.microbatches)
        planned = Planned(entry, row, num_chunks, skew, layers, source=source)
        cell = analytic.cell(num_chunks or 1, skew, "1f1b")
        if cell.step_time is None:
            raise ValueError(cell.why_not)
        planned.seconds, planned.peak_gib = float(cell.step_time), max(cell.peak_bytes) / 2**30
        return planned

    def _read(self, entry: Entry, overrides: Sequence[str]):
        return read_config(self.options.config, [*self.options.topology(entry.pp, entry.tp), *overrides])

    def _job(self, entry: Entry, layers: int | None):
        from stateflow.titan.planning import job_of

        config = self._read(entry, self.options.case(entry, layers))
        return config, dataclasses.replace(job_of(config), policy="1f1b")

    def _analytic(self, entry: Entry, layers: int | None) -> tuple[Analytic, str]:
        """(what predicts, from what)"""
        config, job = self._job(entry, layers)
        analytic, source = Analytic(job, self.device), "counts"
        profiles = None if self.cache is None else self._profiles(config, job)
        if profiles is not None:
            from stateflow.planning.search import Measured

            analytic, source = Measured(job, self.device).use(profiles), "profiles"
        return analytic, source

    def _profiles(self, config, job):
        """A measured profile a stage, or None where the cache lacks some."""
        from stateflow.commands.plan_measured import Profiler
        from stateflow.planning.variants import Variant

        profiler = Profiler(config, None, self.cache, Budget(0.0))  # no time: nothing is measured here
        return profiler.run([Variant(job, False, ("1f1b",))], lambda variants, rough: [0])[0]

    def _fitting_layers(self, entry: Entry) -> int:
        """The most layers, by fours, with which whole sequences are predicted to fit."""
        _, job = self._job(entry, None)
        for layers in range(job.model.num_layers, entry.pp, -4):
            _, smaller = self._job(entry, layers)
            if Analytic(smaller, self.device).cell(1, 0.0, "1f1b").fits:
                return layers
        raise ValueError(f"not even {entry.pp + 1} layers fit")


def whole_order(entry: Entry) -> str:
    """torchtitan's own order for whole sequences."""
    return "GPipe" if entry.microbatches < entry.pp else "1F1B"


def best_cut(analytic: Analytic) -> tuple[int, float]:
    """The number of chunks and the skew of the fastest prediction, of those that fit if any does."""
    skews = SKEWS if "attention" in analytic.job.model.layer_kinds() else (0.0,)
    cells = [cell for cell in analytic.grid(NUM_CHUNKS, skews) if cell.step_time is not None]
    best = min(cells, key=lambda c: (not c.fits, c.step_time, c.num_chunks))
    return best.num_chunks, best.skew


def chosen(choice: str, best: tuple[int, float] | None) -> tuple[int | None, float]:
    """(number of chunks or None for whole sequences, skew) of an entry's choice."""
    if choice == "1F1B":
        return None, 0.0
    if choice.startswith("plan"):
        num_chunks = {"plan": best[0], "plan/2": best[0] // 2, "plan*2": best[0] * 2}[choice]
        return max(1, num_chunks), best[1]
    num_chunks, _, skew = choice.partition(",")
    return int(num_chunks), float(skew or 0.0)


# ----------------------------------------------------------------------------- running it
class Book:
    """Results in OUT/rows.jsonl, one a line: key, row, what was predicted, and what it took."""

    def __init__(self, out: Path):
        self.out, self.path = out, out / "rows.jsonl"
        self.records: list[dict] = []
        if self.path.exists():
            # A line without its end is of a run that was killed while it wrote: that row runs again.
            lines = [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            self.records = [json.loads(line) for line in lines]
            self.path.write_text("".join(lines))

    def add(self, planned: Planned, wall_seconds: float) -> dict:
        row = planned.row
        record = {
            "key": planned.entry.key, "entry": asdict(planned.entry), "row": asdict(row), "layers": planned.layers,
            "num_chunks": planned.num_chunks, "skew": planned.skew, "predicted_seconds": planned.seconds,
            "predicted_peak_gib": planned.peak_gib, "predicted_from": planned.source, "wall_seconds": wall_seconds,
            "device": device_name(), "torch": torch.__version__,
        }  # fmt: skip
        self.records.append(record)
        self.out.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        return record

    def has(self, entry: Entry) -> bool:
        return any(record["key"] == entry.key for record in self.records)

    def slower(self, model: str) -> float:
        """Times its prediction that a measured row took, the median of the model's, else of all; SLOWER without any."""
        measured = [r for r in self.records if _median(r)]
        same = [r for r in measured if r["entry"]["model"] == model] or measured
        return statistics.median([_median(r) / r["predicted_seconds"] for r in same] or [SLOWER])


def _median(record: dict) -> float | None:
    seconds = record["row"]["seconds"]
    return statistics.median(seconds) if seconds and not record["row"]["error"] else None


def likely_seconds(planned: Planned, options: Options, slower: float, first: bool) -> float:
    """What the row will take, start included if it is the first of its launch."""
    steps = (options.steps + options.warmup) * planned.seconds * slower
    return (LAUNCH if first else 0.0) + ROW + steps if not options.rehearsal else ROW


def run(
    entries: Sequence[Entry], options: Options, book: Book, planner: Planner, seconds: float | None,
    tell: Callable[[str], None] = print, measure: Callable[..., None] = measure_rows,
    now: Callable[[], float] = time.monotonic,
) -> bool:
    """Measures what the book lacks, in order; whether all is there now, within ``seconds``."""
    begin, waiting, likely = now(), [], 0.0
    seen = {same_run(Entry(**record["entry"]), record["row"]["overrides"]) for record in book.records}
    missing = [entry for entry in entries if not book.has(entry)]
    for entry in missing:
        if seconds is not None and likely > seconds:
            break  # there will be no time for it
        planned = planner.plan(entry)
        if same_run(entry, planned.row.overrides) not in seen:
            seen.add(same_run(entry, planned.row.overrides))
            tell(f"{entry.key}: {prediction_text(planned)}")
            waiting.append(planned)
            likely += likely_seconds(planned, options, 1.0, first=not likely)
    whole = not missing or entry is missing[-1]
    for (pp, tp), group in groupby(waiting, key=lambda planned: (planned.entry.pp, planned.entry.tp)):
        left = list(group)
        ends = [now()]  # of the rows of this launch, its start first

        def report(row: Row, left=left, ends=ends) -> None:
            planned = left.pop(0)
            planned.row = row
            ends.append(now())
            record = book.add(planned, ends[-1] - ends[-2])
            tell(result_text(record, book.records))
            (book.out / "table.md").write_text(markdown(book.records))

        def go_on(row: Row, left=left, ends=ends) -> bool:
            """Whether the row that runs, since the last one ended, can be expected to end in time."""
            if seconds is None:
                return True
            likely = likely_seconds(left[0], options, book.slower(left[0].entry.model), first=len(ends) == 1)
            return max(ends[-1] + likely, now()) <= begin + seconds

        arguments = titan_arguments(options.config, options.topology(pp, tp))
        measure(
            arguments, [planned.row for planned in left], nproc=pp * tp, steps=options.steps, warmup=options.warmup,
            row_timeout=options.row_timeout, report=report, go_on=go_on, keep_log=book.out / "failed.log",
        )  # fmt: skip
        if left:
            tell(f"{now() - begin:.0f} s of {seconds:.0f}: no time for {left[0].entry.key}; the same command goes on")
            return False
    return whole


def same_run(entry: Entry, overrides: Sequence[str]) -> tuple:
    """Entries that agree in it are one measurement: "plan/2" may be what another names by its number."""
    return entry.pp, entry.tp, entry.case, tuple(overrides)


# -------------------------------------------------------------------------------- reports
def prediction_text(planned: Planned) -> str:
    cut = planned.row.name if planned.layers is None else f"{planned.row.name}, {planned.layers} layers"
    return f"{cut}, predicted {planned.seconds:.3g} s, {planned.peak_gib:.1f} GiB (from {planned.source})"


def baseline_of(record: dict, records: Sequence[dict], any_topology: bool = False) -> dict | None:
    """1F1B of the same case: on the record's own topology, or the fastest on any; None where there is none."""
    entry = Entry(**record["entry"])
    found = []
    for other in records:
        theirs = Entry(**other["entry"])
        own = (theirs.pp, theirs.tp) == (entry.pp, entry.tp)
        same = theirs.case == entry.case and other["layers"] == record["layers"]
        if theirs.choice == "1F1B" and same and (own or any_topology) and _median(other):
            found.append(other)
    return min(found, key=_median, default=None)


def figures(record: dict, records: Sequence[dict]) -> dict[str, str]:
    """What is said of a measured row: columns of the table."""
    from stateflow.titan.bench import PEAK_FLOPS, losses_agree

    row, entry, median = Row(**record["row"]), Entry(**record["entry"]), _median(record)
    rate = row.tokens_per_second(entry.pp * entry.tp)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in record["device"]), None)
    predicted = record["predicted_seconds"]
    texts = {
        "s/step": f"{median:.3f}", "tokens/s/GPU": f"{rate:,.0f}",
        "MFU": f"{100 * rate * row.flops_per_token / peak:.1f} %" if peak else "-",
        "vs 1F1B": "-", "of bound": "-", "vs best 1F1B": "-", "paper": "-",
        "predicted s": f"{predicted:.3f} ({predicted / median - 1:+.0%})",
        "peak GiB": f"{max(row.peak_gib):.1f} ({max(row.reserved_gib):.1f})",
    }  # fmt: skip
    own, best = baseline_of(record, records), baseline_of(record, records, any_topology=True)
    if own is not None and record is not own:
        dtype = "float32" if record["device"] == "cpu" else "bfloat16"
        if not losses_agree(row, Row(**own["row"]), dtype):
            return {**texts, "vs 1F1B": "LOSS!"}
        gain, m, p, n = _median(own) / median, entry.microbatches, entry.pp, max(1, len(row.chunks))
        texts["vs 1F1B"], texts["vs best 1F1B"] = f"{gain:.3f}x", f"{_median(best) / median:.3f}x"
        texts["of bound"] = f"{100 * gain / ((m + p - 1) / (m + (p - 1) / n)):.0f} %"
        as_in_paper = (entry.pp, entry.tp) == (8, 1) and row.seq_len == entry.tokens
        if as_in_paper and entry.microbatches in PAPER.get((entry.model, entry.tokens), {}):
            texts["paper"] = f"{PAPER[entry.model, entry.tokens][entry.microbatches]:.2f}x"
    return texts


def result_text(record: dict, records: Sequence[dict]) -> str:
    start = f"  {record['key']}, {record['row']['name']}: "
    if record["row"]["error"]:
        return start + record["row"]["error"]
    return start + ", ".join(f"{name} {text}" for name, text in figures(record, records).items() if text != "-")


def markdown(records: Sequence[dict]) -> str:
    """All rows as one table, in the order in which they ran."""
    first = next((record for record in records if not record["row"]["error"]), None)
    if first is None:
        return "".join(f"{record['key']}: {record['row']['error']}\n" for record in records)
    names = ["model", "PP x TP", "tokens", "M", "row", *figures(first, records)]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for record in records:
        entry, row = Entry(**record["entry"]), record["row"]
        model = entry.model if record["layers"] is None else f"{entry.model}, {record['layers']} layers"
        cells = [model, f"{entry.pp} x {entry.tp}", f"{row['seq_len']:,}", str(entry.microbatches), row["name"]]
        if row["error"]:
            cells += [row["error"].replace("|", "/")] + [""] * (len(names) - len(cells) - 1)
        else:
            cells += figures(record, records).values()
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="Further options are torchtitan overrides of all rows."
    )
    parser.add_argument("--gpus", type=int, required=True, help="8, 4 or 2: which rows")
    parser.add_argument("--out", type=Path, default=Path("outputs/topologies"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, metavar="S", help="for everything; default: no limit")
    parser.add_argument("--list", action="store_true", help="only print the rows and what is predicted for them")
    parser.add_argument("--rehearsal", action="store_true", help="tiny models on a CPU: does everything run?")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="only rows of these")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N rows")
    parser.add_argument("--profiles", type=Path, metavar="FILE", help="a cache of stateflow plan --cache")
    parser.add_argument("--device", help="to predict for: h200, h100, a100; default: the GPU here, else h200")
    parser.add_argument("--steps", type=int, help="timed steps a row (default 2, in a rehearsal 1)")
    parser.add_argument("--warmup", type=int, help="steps before them (default likewise)")
    parser.add_argument("--row-timeout", type=float, default=Options.row_timeout, metavar="S", help="default 240")
    parser.add_argument("--no-cuda-graphs", action="store_true", help="chunked rows launch eagerly, too")
    given, overrides = parser.parse_known_args(argv)
    usual = 1 if given.rehearsal else Options.steps
    options = Options(
        steps=given.steps or usual, warmup=usual if given.warmup is None else given.warmup,
        row_timeout=given.row_timeout, rehearsal=given.rehearsal, cuda_graphs=not given.no_cuda_graphs,
        device=given.device, overrides=overrides,
    )  # fmt: skip
    try:
        if given.profiles is not None and not given.profiles.is_file():
            raise ValueError(f"--profiles {given.profiles}: no such file")
        entries = [entry for entry in campaign(given.gpus) if given.models is None or entry.model in given.models]
        entries = entries[: given.first]
        cache = None if given.profiles is None else Cache(given.profiles)
        planner = Planner(options, cache, given.out / "plans.json")
        if given.list:
            total, before = 0.0, None
            for planned in map(planner.plan, entries):
                topology = (planned.entry.pp, planned.entry.tp)
                total += likely_seconds(planned, options, 1.0, first=topology != before)
                before = topology
                print(f"{total:6.0f} s  {planned.entry.key}: {prediction_text(planned)}")
            return 0
        here = torch.cuda.device_count()
        if here < given.gpus and not given.rehearsal:
            raise ValueError(f"--gpus {given.gpus}: here are {here}; --rehearsal runs tiny models on a CPU")
        print(f"{device_name()}, torch {torch.__version__}, {len(entries)} rows, {given.out}", flush=True)
        book = Book(given.out)
        complete = run(entries, options, book, planner, given.seconds, tell=lambda text: print(text, flush=True))
    except ValueError as error:
        print(f"topologies: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main())
