"""A step as a picture: one row a rank, boxes for actions, memory over time below.

``picture_data`` is the picture as plain data, from a simulation or a measured trace; ``write`` turns it into SVG, PNG,
JSON, or a Chrome trace (which ui.perfetto.dev and chrome://tracing read). Only SVG and PNG need matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from stateflow.pipeline.simulator import LostTime, MemoryPoint, Span

FORMATS = (".svg", ".png", ".json", ".trace.json")
# Light to dark over the chunks of a microbatch.
SHADES = {
    "F": ((0.85, 0.91, 0.98), (0.15, 0.39, 0.69)),
    "B": ((0.85, 0.95, 0.85), (0.12, 0.47, 0.24)),
    "I": ((0.99, 0.92, 0.78), (0.80, 0.47, 0.05)),
    "W": ((0.93, 0.88, 0.96), (0.45, 0.27, 0.61)),
}
KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def picture_data(
    spans: Sequence[Sequence[Span]],
    *,
    title: str,
    source: str,
    lengths: Sequence[int],
    memory: Sequence[Sequence[MemoryPoint]] | None = None,
    lost: LostTime | None = None,
) -> dict:
    """The picture as JSON-able data.

    Args:
        spans: for each rank its actions in time; times in seconds from the start of the step.
        title: first line of the picture.
        source: "simulated" or "measured".
        lengths: tokens of each chunk.
        memory: for each rank a step function of bytes.
        lost: the idle time by cause.
    """
    step_time = max((span.end for row in spans for span in row), default=0.0)
    ranks = []
    for rank, row in enumerate(spans):
        busy = sum(span.end - span.start for span in row)
        boxes = [
            {
                "action": str(span.action),
                "stage": span.action.stage,
                "kind": span.action.kind.value,
                "microbatch": span.action.microbatch,
                "chunk": span.action.chunk,
                "start": float(span.start),
                "end": float(span.end),
            }
            for span in row
        ]
        points = [] if memory is None else [[float(p.time), float(p.num_bytes)] for p in memory[rank]]
        ranks.append(
            {
                "rank": rank,
                "idle": float(1 - busy / step_time) if step_time else 0.0,
                "peak_bytes": max((amount for _, amount in points), default=None),
                "boxes": boxes,
                "memory": points,
            }
        )
    return {
        "title": title,
        "source": source,
        "lengths": list(lengths),
        "step_time": float(step_time),
        "bubble": sum(row["idle"] for row in ranks) / len(ranks) if ranks else 0.0,
        "lost": None if lost is None else {cause: float(share) for cause, share in lost.shares().items()},
        "ranks": ranks,
    }


def chrome_trace(data: dict) -> dict:
    """The same as a Chrome trace: a process for each rank, a thread for each stage, a counter for memory."""
    events: list[dict] = []
    for row in data["ranks"]:
        rank = row["rank"]
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for stage in sorted({box["stage"] for box in row["boxes"]}):
            name = {"name": f"stage {stage}"}
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": stage, "args": name})
        for box in row["boxes"]:
            events.append(
                {
                    "name": f"{box['kind']}{box['microbatch']}.{box['chunk']}",
                    "cat": KIND_NAMES[box["kind"]],
                    "ph": "X",
                    "pid": rank,
                    "tid": box["stage"],
                    "ts": box["start"] * 1e6,
                    "dur": (box["end"] - box["start"]) * 1e6,
                    "args": {"microbatch": box["microbatch"], "chunk": box["chunk"]},
                }
            )
        for time, amount in row["memory"]:
            events.append({"name": "memory", "ph": "C", "pid": rank, "ts": time * 1e6, "args": {"bytes": amount}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": data["title"]}}


def check_path(path: Path) -> None:
    """Raises ValueError for an unknown ending or a missing folder."""
    if not str(path).endswith(FORMATS):
        raise ValueError(f"--out {path}: unknown ending; use one of {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.absolute().parent}; create it first")


def write(data: dict, path: Path) -> None:
    """Writes the picture in the format that the name's ending says.

    Raises:
        ValueError: for an unknown ending, a missing folder, or SVG and PNG without matplotlib.
    """
    check_path(path)
    if str(path).endswith(".trace.json"):
        path.write_text(json.dumps(chrome_trace(data)) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(data, indent=1) + "\n")
    else:
        _render(data, path)


def pyplot():
    """matplotlib.pyplot without a display; ValueError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            "pictures need matplotlib: pip install matplotlib; .json and .trace.json need "
            "nothing"
        ) from None
    matplotlib.use("Agg")
    # Text stays text, and the same data gives the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "stateflow", "font.size": 8})
    from matplotlib import pyplot

    return pyplot


def save(figure, path: Path) -> None:
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata=metadata)


def _color(kind: str, chunk: int, num_chunks: int) -> tuple[float, ...]:
    light, dark = SHADES[kind]
    weight = (chunk + 1) / num_chunks if num_chunks > 1 else 0.55
    weight = 0.12 + 0.78 * weight
    return tuple(a + (b - a) * weight for a, b in zip(light, dark, strict=True))


def _time_unit(step_time: float) -> tuple[float, str]:
    if step_time >= 1:
        return 1.0, "s"
    return (1e3, "ms") if step_time >= 1e-3 else (1e6, "us")


def _memory_unit(peak: float) -> tuple[float, str]:
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if peak >= 2**power:
            return 2**power, name
    return 1, "bytes"


def _render(data: dict, path: Path) -> None:
    pyplot_module = pyplot()
    rows = data["ranks"]
    num_ranks, num_chunks = len(rows), len(data["lengths"])
    has_memory = any(row["memory"] for row in rows)
    most_boxes = max((len(row["boxes"]) for row in rows), default=1)
    width = min(24.0, max(9.0, 0.27 * most_boxes / max(0.3, 1 - data["bubble"])))
    heights = [0.42 * num_ranks + 0.3, 1.9] if has_memory else [0.42 * num_ranks + 0.3]
    figure, axes = pyplot_module.subplots(
        len(heights), 1, sharex=True, squeeze=False, figsize=(width, sum(heights) + 0.9),
        gridspec_kw={"height_ratios": heights, "hspace": 0.08},
    )  # fmt: skip
    scale, unit = _time_unit(data["step_time"])
    _draw_boxes(axes[0][0], data, scale, 72 * width * 0.85 / (data["step_time"] * scale or 1))
    kinds = [kind for kind in KIND_NAMES if any(box["kind"] == kind for row in rows for box in row["boxes"])]
    handles = [
        pyplot_module.Rectangle((0, 0), 1, 1, facecolor=_color(kind, num_chunks // 2, num_chunks), edgecolor="white")
        for kind in kinds
    ]
    names = [KIND_NAMES[kind] for kind in kinds]
    axes[0][0].legend(
        handles, names, ncols=len(kinds), loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0.1
    )
    shade = "darker: later chunk; " if num_chunks > 1 else ""
    title = f"{data['title']}\n{data['source']} step {data['step_time'] * scale:.4g} {unit}, {_idle_text(data)}"
    axes[0][0].set_title(f"{title}\n{shade}a label is microbatch.chunk", loc="left", fontsize=8)
    if has_memory:
        _draw_memory(axes[1][0], rows, scale, pyplot_module)
    axes[-1][0].set_xlabel(f"time ({unit})")
    save(figure, path)
    pyplot_module.close(figure)


def write_below_each_other(pictures: Sequence[dict], path: Path) -> None:
    """Several steps in one picture on one scale of time, each under its own title. SVG and PNG only."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"--out {path}: unknown ending; use .svg or .png")
    check_path(path)
    pyplot_module = pyplot()
    num_ranks = len(pictures[0]["ranks"])
    longest = max(data["step_time"] for data in pictures)
    most_boxes = max(len(row["boxes"]) for data in pictures for row in data["ranks"])
    width = min(18.0, max(9.0, 0.12 * most_boxes))
    figure, axes = pyplot_module.subplots(
        len(pictures), 1, sharex=True, squeeze=False, figsize=(width, len(pictures) * (0.2 * num_ranks + 0.45)),
        gridspec_kw={"hspace": 0.55},
    )  # fmt: skip
    scale, unit = _time_unit(longest)
    for (axis,), data in zip(axes, pictures, strict=True):
        _draw_boxes(axis, data, scale, 72 * width * 0.85 / (longest * scale or 1), one_line=True)
        axis.set_xlim(0, longest * scale or 1)
        step = f"{data['step_time'] * scale:.4g} {unit}, idle {data['bubble']:.1%}"
        axis.set_title(f"{data['title']}: {step}", loc="left", fontsize=8)
    axes[-1][0].set_xlabel(f"time ({unit})")
    save(figure, path)
    pyplot_module.close(figure)


def _idle_text(data: dict) -> str:
    text = f"idle {data['bubble']:.1%}"
    if data["lost"] is None:
        return text
    causes = [f"{cause.replace('_', ' ')} {share:.1%}" for cause, share in data["lost"].items() if share > 5e-4]
    return f"{text} ({', '.join(causes)})" if causes else text


def _draw_boxes(axis, data: dict, scale: float, points_per_unit: float, one_line: bool = False) -> None:
    num_chunks = len(data["lengths"])
    num_stages = 1 + max((box["stage"] for row in data["ranks"] for box in row["boxes"]), default=0)
    several = num_stages > len(data["ranks"]) and not one_line
    for row in data["ranks"]:
        spans = [(box["start"] * scale, (box["end"] - box["start"]) * scale) for box in row["boxes"]]
        colors = [_color(box["kind"], box["chunk"], num_chunks) for box in row["boxes"]]
        axis.broken_barh(spans, (row["rank"] - 0.42, 0.84), facecolors=colors, edgecolors="white", linewidth=0.4)
        for box, (start, length) in zip(row["boxes"], spans, strict=True):
            unit = f"{box['microbatch']}.{box['chunk']}" if num_chunks > 1 else str(box["microbatch"])
            label = f"{unit}\ns{box['stage']}" if several else unit
            longest = max(map(len, label.split("\n")))
            size = min(7.0, length * points_per_unit / (0.72 * longest))  # with a gap to the neighbours
            if size >= 4:
                dark = sum(_color(box["kind"], box["chunk"], num_chunks)) < 1.55
                axis.text(
                    start + length / 2, row["rank"], label, ha="center", va="center", fontsize=round(size, 1),
                    color="white" if dark else "#222222", linespacing=0.95,
                )  # fmt: skip
        axis.text(
            1.004, row["rank"], f"{row['idle']:.0%} idle", transform=axis.get_yaxis_transform(), va="center", fontsize=7
        )
    axis.set_yticks(range(len(data["ranks"])), [f"rank {row['rank']}" for row in data["ranks"]])
    axis.set_ylim(len(data["ranks"]) - 0.45, -0.55)
    axis.set_xlim(0, data["step_time"] * scale or 1)
    axis.set_facecolor("#f4f4f4")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _draw_memory(axis, rows: list[dict], scale: float, pyplot_module) -> None:
    peak = max(row["peak_bytes"] or 0 for row in rows)
    size, unit = _memory_unit(peak)
    colors = pyplot_module.get_cmap("viridis")
    for row in rows:
        times = [time * scale for time, _ in row["memory"]]
        amounts = [amount / size for _, amount in row["memory"]]
        color = colors(0.9 * row["rank"] / max(1, len(rows) - 1))
        name = f"rank {row['rank']}: {(row['peak_bytes'] or 0) / size:.3g}"
        axis.plot(times, amounts, drawstyle="steps-post", linewidth=1.0, color=color, label=name)
    axis.set_ylim(0, peak / size * 1.08 or 1)
    axis.set_ylabel(f"memory ({unit})")
    axis.legend(title="peak", loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=7, title_fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", linewidth=0.3)
