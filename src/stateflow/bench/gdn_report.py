"""The rows of `stateflow bench gdn` as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from stateflow.bench import report
from stateflow.bench.contestants import OURS, SERIAL
from stateflow.bench.gdn_contestants import ANY_ORDER, DEFAULT, SERIAL_64
from stateflow.bench.measure import markdown_table
from stateflow.bench.report import Found, Key

PEER_NAMES = {"fla": "FLA", "flashqla": "FlashQLA", "flashqla, no split": "FlashQLA, no split"}


def render(rows: Sequence[dict]) -> str:
    """All tables; rows that have no times are told below."""
    timed = report.timed_rows(rows)
    parts = [report.versions(rows)]
    if timed:
        more = "Not tuned: the table has no entry for exactly this shape, the nearest one counts."
        parts += [
            report.against_peers(timed, PEER_NAMES, "K x V", _note, more),
            _against_ourselves(timed),
            report.memory(timed, PEER_NAMES, "K x V"),
            report.accuracy(timed, PEER_NAMES),
        ]
    parts += [_walks(rows), _plans(timed), report.without_times(rows)]
    return "\n\n".join(part for part in parts if part)


def _note(ours: dict) -> str:
    return "" if ours["tuned"] else "not tuned"


def _against_ourselves(timed: dict[Key, Found]) -> str:
    names = (OURS, SERIAL, DEFAULT, SERIAL_64, ANY_ORDER)
    columns = ["heads", "tokens", "K x V", *names, "gain of overlap", "gain over serial BV 64"]
    lines = []
    for key, found in timed.items():
        ours = found.get(OURS)
        gains = [report.ratio(found.get(name), ours, "_device") for name in (SERIAL, SERIAL_64)]
        times = [report.times(found.get(name), "_device") for name in names]
        lines.append([*report.shape_cells(key), *times, *(f"{gain}x" if gain else "" for gain in gains)])
    return f"Ours with other plans, forward / backward in ms on the device alone.\n\n{markdown_table(columns, lines)}"


def _walks(rows: Sequence[dict]) -> str:
    times: dict[Key, dict[tuple[str, int], str]] = {}
    for row in rows:
        if row["kind"] == "walk":
            text = f"{row['time']['median']:.3f}" if "time" in row else "failed"
            times.setdefault(report.key_of(row), {})[row["kernel"], row["tile"]["block_v"]] = text
    if not times:
        return ""
    cells = sorted({cell for found in times.values() for cell in found})
    names = {"transition": "ST", "transition_backward": "STB"}
    columns = ["heads", "tokens", "K x V", *(f"{names[kernel]}, BV {block}" for kernel, block in cells)]
    lines = [[*report.shape_cells(key), *(found.get(cell, "") for cell in cells)] for key, found in times.items()]
    return f"ST and STB alone in ms, by columns of V a program takes.\n\n{markdown_table(columns, lines)}"


def _tile(tile: dict) -> str:
    sizes = "/".join(str(tile[name]) for name in ("block_v", "num_warps", "num_stages"))
    return sizes + ("s" if tile.get("specialized") else "")


def _plans(timed: dict[Key, Found]) -> str:
    lines = []
    for key, found in timed.items():
        if OURS in found:
            plan = found[OURS]["plan"]
            tiles = [_tile(tile) for tile in plan.values() if isinstance(tile, dict)]
            overlap = f"{plan['cuts']} {plan['backward_cuts']} {'on' if plan['overlap_backward'] else 'off'}"
            lines.append([*report.shape_cells(key), ", ".join(tiles), overlap])
    if not lines:
        return ""
    names = [name for name, tile in plan.items() if isinstance(tile, dict)]
    text = f"Plans: columns of V / warps / stages (s: specialised) of {', '.join(names)}; cuts of the forward, of the "
    text += "backward, overlap in the backward."
    return f"{text}\n\n{markdown_table(['heads', 'tokens', 'K x V', 'tiles', 'overlap'], lines)}"
