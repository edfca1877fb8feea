"""The rows of `stateflow bench gdn` as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from stateflow.bench.gdn_contestants import DEFAULT, OURS, SERIAL, SERIAL_64
from stateflow.bench.measure import markdown_table

PEER_NAMES = {"fla": "FLA", "flashqla": "FlashQLA", "flashqla, no split": "FlashQLA, no split"}
LAUNCH_BOUND = 1.2  # a caller's time by the device's

Key = tuple[int, int, int, int]


def _key(row: dict) -> Key:
    return row["heads"], row["tokens"], row["k_dim"], row["v_dim"]


def _sum(row: dict) -> float:
    return row["forward"]["median"] + row["backward"]["median"]


def _shape(key: Key) -> list[str]:
    heads, tokens, k_dim, v_dim = key
    return [str(heads), f"{tokens:,}", f"{k_dim} x {v_dim}"]


def _times(row: dict | None) -> str:
    if row is None:
        return ""
    cells = []
    for name in ("forward", "backward"):
        time = row[name]
        bound = time["median"] > LAUNCH_BOUND * row[f"{name}_device"]["median"]
        cells.append(f"{time['median']:.3f}{'*' if bound else ''}")
    return " / ".join(cells)


def _ratio(row: dict | None, other: dict | None) -> str:
    return "" if row is None or other is None else f"{_sum(row) / _sum(other):.2f}"


def render(rows: Sequence[dict]) -> str:
    """All tables; rows that have no times are told below."""
    timed: dict[Key, dict[str, dict]] = {}
    for row in rows:
        if row["kind"] == "time" and "forward" in row:
            timed.setdefault(_key(row), {})[row["contestant"]] = row
    parts = [_versions(rows)]
    if timed:
        parts += [_against_peers(timed), _against_ourselves(timed), _memory(timed), _accuracy(timed)]
    parts += [_walks(rows), _plans(timed), _without_times(rows)]
    return "\n\n".join(part for part in parts if part)


def _versions(rows: Sequence[dict]) -> str:
    lines = {}
    for row in rows:
        if "versions" in row and "contestant" in row:
            text = ", ".join(f"{name} {value}" for name, value in row["versions"].items())
            names = lines.setdefault(text, [])
            if row["contestant"] not in names:
                names.append(row["contestant"])
    return "\n".join(f"* {'; '.join(names)}: {text}" for text, names in lines.items())


def _against_peers(timed: dict[Key, dict[str, dict]]) -> str:
    peers = [name for name in PEER_NAMES if any(name in found for found in timed.values())]
    columns = ["heads", "tokens", "K x V", "ours", *(PEER_NAMES[p] for p in peers)]
    columns += [f"ours / {PEER_NAMES[p]}" for p in peers] + [""]
    lines = []
    for key, found in timed.items():
        ours = found.get(OURS)
        note = "" if ours is None or ours["tuned"] else "not tuned"
        cells = [_times(found.get(name)) for name in (OURS, *peers)]
        lines.append([*_shape(key), *cells, *(_ratio(ours, found.get(p)) for p in peers), note])
    text = "Forward / backward in ms, medians (* bound by launches: the device alone is faster by 1.2). "
    text += "Ratios are of the sums. Not tuned: the table has no entry for exactly this shape, the nearest one counts."
    return f"{text}\n\n{markdown_table(columns, lines)}"


def _against_ourselves(timed: dict[Key, dict[str, dict]]) -> str:
    names = (OURS, SERIAL, DEFAULT, SERIAL_64)
    columns = ["heads", "tokens", "K x V", *names, "gain of overlap", "gain over serial BV 64"]
    lines = []
    for key, found in timed.items():
        ours = found.get(OURS)
        gains = [_ratio(found.get(name), ours) for name in (SERIAL, SERIAL_64)]
        times = [_times(found.get(name)) for name in names]
        lines.append([*_shape(key), *times, *(f"{gain}x" if gain else "" for gain in gains)])
    return f"Ours with other plans, forward / backward in ms.\n\n{markdown_table(columns, lines)}"


def _memory(timed: dict[Key, dict[str, dict]]) -> str:
    names = [name for name in (OURS, *PEER_NAMES) if any(name in found for found in timed.values())]
    lines = []
    for key, found in timed.items():
        cells = []
        for name in names:
            memory = found[name]["memory_mb"] if name in found else None
            parts = () if memory is None else (memory["peak_forward"], memory["peak_both"], memory["saved"])
            cells.append(" / ".join(f"{n:,.0f}" for n in parts))
        lines.append([*_shape(key), *cells])
    text = "Memory in MB beyond the inputs: most in the forward / most in both passes / kept for the backward."
    return f"{text}\n\n{markdown_table(['heads', 'tokens', 'K x V', *(PEER_NAMES.get(n, n) for n in names)], lines)}"


def _accuracy(timed: dict[Key, dict[str, dict]]) -> str:
    worst: dict[str, dict[str, float]] = {}
    for found in timed.values():
        for contestant, row in found.items():
            errors = worst.setdefault(contestant, {})
            for name, error in row["errors"].items():
                errors[name] = max(error, errors.get(name, 0.0))
    columns = list(next(iter(worst.values())))
    lines = [[PEER_NAMES.get(c, c), *(f"{errors[n]:.1e}" for n in columns)] for c, errors in worst.items()]
    return f"Largest relative L2 error against float64.\n\n{markdown_table(['', *columns], lines)}"


def _walks(rows: Sequence[dict]) -> str:
    times: dict[Key, dict[tuple[str, int], str]] = {}
    for row in rows:
        if row["kind"] == "walk":
            text = f"{row['time']['median']:.3f}" if "time" in row else "failed"
            times.setdefault(_key(row), {})[row["kernel"], row["tile"]["block_v"]] = text
    if not times:
        return ""
    cells = sorted({cell for found in times.values() for cell in found})
    names = {"transition": "ST", "transition_backward": "STB"}
    columns = ["heads", "tokens", "K x V", *(f"{names[kernel]}, BV {block}" for kernel, block in cells)]
    lines = [[*_shape(key), *(found.get(cell, "") for cell in cells)] for key, found in times.items()]
    return f"ST and STB alone in ms, by columns of V a program takes.\n\n{markdown_table(columns, lines)}"


def _plans(timed: dict[Key, dict[str, dict]]) -> str:
    lines = []
    for key, found in timed.items():
        if OURS in found:
            plan = found[OURS]["plan"]
            tiles = ["/".join(map(str, tile.values())) for tile in plan.values() if isinstance(tile, dict)]
            overlap = f"{plan['cuts']} {plan['backward_cuts']} {'on' if plan['overlap_backward'] else 'off'}"
            lines.append([*_shape(key), ", ".join(tiles), overlap])
    if not lines:
        return ""
    names = [name for name, tile in plan.items() if isinstance(tile, dict)]
    text = f"Plans: columns of V / warps / stages of {', '.join(names)}; cuts of the forward, of the backward, overlap "
    text += "in the backward."
    return f"{text}\n\n{markdown_table(['heads', 'tokens', 'K x V', 'tiles', 'overlap'], lines)}"


def _without_times(rows: Sequence[dict]) -> str:
    lines = {}
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
