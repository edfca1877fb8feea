"""Tables in Markdown of a benchmark's rows: what the benchmarks of all operations have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stateflow.bench.contestants import OURS
from stateflow.bench.measure import markdown_table

LAUNCH_BOUND = 1.2  # a caller's time by the device's
TIMES = "Forward / backward in ms, medians (* bound by launches: the device alone is faster by 1.2). "

Key = tuple[int, int, int, int]
Found = Mapping[str, dict]
"""The row of each contestant that was timed."""


def key_of(row: dict) -> Key:
    return row["heads"], row["tokens"], row["k_dim"], row["v_dim"]


def timed_rows(rows: Sequence[dict]) -> dict[Key, dict[str, dict]]:
    timed: dict[Key, dict[str, dict]] = {}
    for row in rows:
        if row["kind"] == "time" and "forward" in row:
            timed.setdefault(key_of(row), {})[row["contestant"]] = row
    return timed


def shape_cells(key: Key) -> list[str]:
    heads, tokens, k_dim, v_dim = key
    return [str(heads), f"{tokens:,}", f"{k_dim} x {v_dim}"]


def times(row: dict | None) -> str:
    if row is None:
        return ""
    cells = []
    for name in ("forward", "backward"):
        time = row[name]
        bound = time["median"] > LAUNCH_BOUND * row[f"{name}_device"]["median"]
        cells.append(f"{time['median']:.3f}{'*' if bound else ''}")
    return " / ".join(cells)


def ratio(row: dict | None, other: dict | None) -> str:
    """Of the sums of forward and backward."""
    if row is None or other is None:
        return ""
    mine, its = (x["forward"]["median"] + x["backward"]["median"] for x in (row, other))
    return f"{mine / its:.2f}"


def versions(rows: Sequence[dict]) -> str:
    lines: dict[str, list[str]] = {}
    for row in rows:
        if "versions" in row and "contestant" in row:
            text = ", ".join(f"{name} {value}" for name, value in row["versions"].items())
            names = lines.setdefault(text, [])
            if row["contestant"] not in names:
                names.append(row["contestant"])
    return "\n".join(f"* {'; '.join(names)}: {text}" for text, names in lines.items())


def against_peers(
    timed: Mapping[Key, Found], titles: Mapping[str, str], dims: str, note: Callable[[dict], str], more: str
) -> str:
    """Times and ratios; `titles` of the peers by name, `note` on a row of ours, `more` under the table's words."""
    peers = [name for name in titles if any(name in found for found in timed.values())]
    columns = ["heads", "tokens", dims, "ours", *(titles[p] for p in peers)]
    columns += [f"ours / {titles[p]}" for p in peers] + [""]
    lines = []
    for key, found in timed.items():
        ours = found.get(OURS)
        cells = [times(found.get(name)) for name in (OURS, *peers)]
        ratios = [ratio(ours, found.get(p)) for p in peers]
        lines.append([*shape_cells(key), *cells, *ratios, "" if ours is None else note(ours)])
    return f"{TIMES}Ratios are of the sums. {more}\n\n{markdown_table(columns, lines)}"


def memory(timed: Mapping[Key, Found], titles: Mapping[str, str], dims: str) -> str:
    names = [name for name in (OURS, *titles) if any(name in found for found in timed.values())]
    lines = []
    for key, found in timed.items():
        cells = []
        for name in names:
            of = found[name]["memory_mb"] if name in found else None
            parts = () if of is None else (of["peak_forward"], of["peak_both"], of["saved"])
            cells.append(" / ".join(f"{n:,.0f}" for n in parts))
        lines.append([*shape_cells(key), *cells])
    text = "Memory in MB beyond the inputs: most in the forward / most in both passes / kept for the backward."
    return f"{text}\n\n{markdown_table(['heads', 'tokens', dims, *(titles.get(n, n) for n in names)], lines)}"


def accuracy(timed: Mapping[Key, Found], titles: Mapping[str, str]) -> str:
    worst: dict[str, dict[str, float]] = {}
    for found in timed.values():
        for contestant, row in found.items():
            errors = worst.setdefault(contestant, {})
            for name, error in row["errors"].items():
                errors[name] = max(error, errors.get(name, 0.0))
    columns = list(next(iter(worst.values())))
    lines = [[titles.get(c, c), *(f"{errors[n]:.1e}" for n in columns)] for c, errors in worst.items()]
    return f"Largest relative L2 error against float64.\n\n{markdown_table(['', *columns], lines)}"


def regions(rows: Sequence[dict], dims: str) -> str:
    """How much faster kernels that run at once are, and how much of one of them is hidden so."""
    lines = []
    for row in rows:
        if row["kind"] == "region":
            serial, overlapped, kernel = (row[name]["median"] for name in ("serial", "overlapped", "kernel"))
            cells = [f"{ms:.3f}" for ms in (serial, overlapped, kernel)]
            gains = [f"{serial / overlapped:.2f}x", f"{(serial - overlapped) / kernel:.1%}"]
            lines.append([*shape_cells(key_of(row)), row["region"], *cells, *gains])
    if not lines:
        return ""
    columns = ["heads", "tokens", dims, "region", "one stream", "overlapped", "the kernel alone", "speedup", "hidden"]
    text = "Regions whose kernels run at once, projections included, on the device in ms. Hidden: the time won by the "
    return f"{text}time of the kernel that the others are to hide.\n\n{markdown_table(columns, lines)}"


def without_times(rows: Sequence[dict]) -> str:
    lines: dict[str, list] = {}
    for row in rows:
        reason = row.get("skipped") or row.get("failed")
        if reason and row["kind"] != "walk":
            shape = f", {row['heads']} heads of {row['k_dim']} x {row['v_dim']}" if "heads" in row else ""
            lines.setdefault(f"{row['contestant']}{shape}: {reason}", []).append(row.get("tokens"))
    told = []
    for text, tokens in lines.items():
        known = [f"{n:,}" for n in tokens if n is not None]
        told.append(f"* {text}" + (f" ({', '.join(known)} tokens)" if known else ""))
    return "Without times:\n\n" + "\n".join(told) if told else ""
