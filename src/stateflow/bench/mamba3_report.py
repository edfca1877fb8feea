"""The rows of `stateflow bench mamba3` as tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stateflow.bench import report
from stateflow.bench.contestants import OURS, SERIAL
from stateflow.bench.mamba3_contestants import OFFICIAL, WHOLE
from stateflow.bench.mamba3_regions import BACKWARD, FORWARD, PAPER, PAPER_HIDDEN, dim_of
from stateflow.bench.measure import markdown_table
from stateflow.bench.report import Found, Key

TITLES = {OFFICIAL: OFFICIAL, WHOLE: WHOLE}
DIMS = "N x P"


def render(rows: Sequence[dict]) -> str:
    """All tables; rows that have no times are told below."""
    timed = report.timed_rows(rows)
    parts = [report.versions(rows)]
    if timed:
        more = '"official" is its operation alone, which does less than ours; "official, whole" does what ours does.'
        parts += [
            report.against_peers(timed, TITLES, DIMS, _note, more),
            _overlap(timed),
            report.memory(timed, TITLES, DIMS),
            _saved(timed),
            report.accuracy(timed, TITLES),
        ]
    parts += [report.regions(rows, DIMS), _table_4b(rows), report.without_times(rows)]
    return "\n\n".join(part for part in parts if part)


def _note(ours: dict) -> str:
    notes = ["the form in PyTorch: no kernels"] if ours["backend"] != "triton" else []
    if not ours.get("tuned", True):
        notes.append("not tuned")
    return ", ".join(notes)


def _overlap(timed: Mapping[Key, Found]) -> str:
    lines = []
    for key, found in timed.items():
        if {OURS, SERIAL} <= found.keys():
            both = [report.times(found[name]) for name in (OURS, SERIAL)]
            lines.append([*report.shape_cells(key), *both, f"{report.ratio(found[SERIAL], found[OURS])}x"])
    if not lines:
        return ""
    columns = ["heads", "tokens", DIMS, OURS, SERIAL, "gain of overlap"]
    return f"Ours with nothing that overlaps, forward / backward in ms.\n\n{markdown_table(columns, lines)}"


def _saved(timed: Mapping[Key, Found]) -> str:
    """What is kept for the backward, by token: that does not grow with the length."""
    names = [name for name in (OURS, *TITLES) if any(name in found for found in timed.values())]
    lines = []
    for key, found in timed.items():
        saved = {name: found[name]["memory_mb"]["saved"] for name in names if name in found}
        cells = [f"{saved[name] * 1e3 / key[1]:,.1f}" if name in saved else "" for name in names]
        share = f"{saved[OURS] / saved[OFFICIAL]:.2f}" if {OURS, OFFICIAL} <= saved.keys() and saved[OFFICIAL] else ""
        lines.append([*report.shape_cells(key), *cells, share])
    columns = ["heads", "tokens", DIMS, *(TITLES.get(name, name) for name in names), f"ours / {OFFICIAL}"]
    return f"Kept for the backward beside the inputs, in KB a token.\n\n{markdown_table(columns, lines)}"


def _table_4b(rows: Sequence[dict]) -> str:
    """Forward and backward of each shape together, beside what the paper has for as many heads and tokens."""
    found: dict[Key, dict[str, dict]] = {}
    for row in rows:
        if row["kind"] == "region":
            found.setdefault(report.key_of(row), {})[row["region"]] = row
    lines = []
    for key, by_name in found.items():
        if not {FORWARD, BACKWARD} <= by_name.keys():
            continue
        both = [by_name[name] for name in (FORWARD, BACKWARD)]
        times = ([row[name]["median"] for row in both] for name in ("serial", "overlapped", "kernel"))
        serial, overlapped, kernel = times
        gains = [f"{a / b:.2f}x" for a, b in zip(serial, overlapped, strict=True)]
        total = f"{sum(serial) / sum(overlapped):.2f}x"
        hidden = f"{(sum(serial) - sum(overlapped)) / sum(kernel):.1%}"
        heads, tokens, _, p_dim = key
        paper = [f"{gain:.2f}x" for gain in PAPER.get(heads, {}).get(tokens, ())] or ["", ""]
        most = f"{PAPER_HIDDEN[heads]:.1%}" if heads in PAPER_HIDDEN else ""
        cells = [str(heads), f"{tokens:,}", str(dim_of(heads, p_dim))]
        lines.append([*cells, *gains, total, hidden, *paper, most])
    if not lines:
        return ""
    columns = ["heads", "tokens", "width", "forward", "backward", "both", "hidden", "paper, forward", "backward"]
    columns.append("hidden, at most")
    text = "The paper's table 4b (its kernels, A100): speed-ups of eq. 17 and 19, and the hidden share of "
    return f"{text}the operation's kernels.\n\n{markdown_table(columns, lines)}"
