"""What a run achieved, read from its TensorBoard events when it is over.

The losses mean little without a yardstick, so the validation loss stands beside the order-0 entropy of the
same text: the loss of the best model that knows how frequent each token is and nothing else.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig

from stateflow.titan.data import iterate_texts
from stateflow.titan.next_commands import next_commands
from stateflow.titan.order import loss_rank
from stateflow.titan.prediction import predictions, traced
from stateflow.titan.tokenizer import ByteTokenizer, build_tokenizer

SUMMARY_FILE = "summary.json"
TRAINING_LOSS = "loss_metrics/global_avg_loss"
VALIDATION_LOSS = "validation_metrics/loss"
STEP_SECONDS = "time_metrics/end_to_end(s)"
TOKENS_PER_SECOND = "throughput(tps)"  # a device's share, in torchtitan's definition

Point = tuple[int, float]
"""(step, value)"""


def token_entropy(
    dataset: Iterable[str | Mapping[str, Any]], tokenizer: BaseTokenizer, max_tokens: int = 2_000_000
) -> float:
    """Order-0 entropy of a text in nats per token: H = -sum_i p_i log p_i, p_i the relative frequency of
    token i.

    Args:
        dataset: documents, each a string or a row with the column "text".
        tokenizer: encodes them, with bos and eos around each as in training.
        max_tokens: tokens to count, from the front; the last document is cut.

    Raises:
        ValueError: there are no tokens, or ``max_tokens`` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
    counts = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    remaining = max_tokens
    for document in dataset:
        text = document if isinstance(document, str) else document["text"] or ""
        tokens = np.asarray(tokenizer.encode(text, add_bos=True, add_eos=True)[:remaining], dtype=np.int64)
        seen = np.bincount(tokens, minlength=len(counts))
        seen[: len(counts)] += counts  # a tokenizer may use ids above the size that it states
        counts = seen
        remaining -= len(tokens)
        if remaining == 0:
            break
    total = int(counts.sum())
    if total == 0:
        raise ValueError("there is no text to take the entropy of")
    frequencies = counts[counts > 0] / total
    return float(-(frequencies * np.log(frequencies)).sum())


def event_file(dump_folder: str | Path, job_config: JobConfig) -> Path | None:
    """The TensorBoard events of the latest run that hold its loss, or None if there are none.

    A file and not its folder, because torchtitan names folders by the minute: two short runs can share one.
    With ``metrics.save_for_all_ranks`` each rank has a folder; only that of ``loss_rank`` holds the
    loss.
    """
    root = Path(dump_folder) / job_config.metrics.save_tb_folder
    newest = _newest(root)
    if newest is None or not newest.parent.name.startswith("rank_"):
        return newest
    run = newest.parent.parent
    num_ranks = len(list(run.glob("rank_*")))
    return _newest(run / f"rank_{loss_rank(job_config, num_ranks)}") or newest


def _newest(folder: Path) -> Path | None:
    events = [path for path in folder.rglob("events.out.tfevents.*") if path.is_file()]
    return max(events, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)


def read_scalars(events: str | Path) -> dict[str, list[Point]]:
    """All scalar series in a file (or folder) of TensorBoard events: tag -> points in the order of steps."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    accumulator = EventAccumulator(str(events), size_guidance={SCALARS: 0})  # 0: keep all, no sampling
    accumulator.Reload()
    tags = accumulator.Tags()[SCALARS]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


def count_devices(job_config: JobConfig) -> int | None:
    """Processes that a config asks for; None where it leaves them to the launcher (dp_shard = -1)."""
    p = job_config.parallelism
    degrees = (
        p.data_parallel_replicate_degree,
        p.data_parallel_shard_degree,
        p.context_parallel_degree,
        p.tensor_parallel_degree,
        p.pipeline_parallel_degree,
    )
    return math.prod(degrees) if min(degrees) > 0 else None


def _validation_entropy(job_config: JobConfig) -> tuple[float | None, str]:
    """(order-0 entropy of the validation text or None, what it is called or why there is none)."""
    validation = job_config.validation
    try:
        tokenizer = build_tokenizer(job_config)
        entropy = token_entropy(iterate_texts(validation.dataset, validation.dataset_path), tokenizer)
    except ValueError as error:
        return None, f"no entropy of the validation text: {error}"
    return entropy, f"{'byte' if isinstance(tokenizer, ByteTokenizer) else 'token'}-frequency entropy"


def _existing_places(dump_folder: Path, job_config: JobConfig, events: Path | None) -> dict[str, str]:
    """Where the run left what a person may want to look at, as far as it exists."""
    places = {f"log {path.name}": str(path) for path in sorted(dump_folder.glob("*.log"))}
    if events is not None:
        places["TensorBoard"] = str(events.parent)
    checkpoints = dump_folder / job_config.checkpoint.folder
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        places["checkpoints"] = str(checkpoints)
    return places


def collect(dump_folder: str | Path, job_config: JobConfig, world_size: int | None = None) -> dict[str, Any]:
    """The figures of a run as plain data; what is not known is None. See :func:`summarize`."""
    dump_folder = Path(dump_folder)
    # Without TensorBoard what lies there is of an earlier run.
    events = event_file(dump_folder, job_config) if job_config.metrics.enable_tensorboard else None
    scalars = read_scalars(events) if events is not None else {}
    training, validation = scalars.get(TRAINING_LOSS, []), scalars.get(VALIDATION_LOSS, [])
    # The first logged step holds what happens once, e.g. compilation.
    speeds = [value for _, value in scalars.get(TOKENS_PER_SECOND, [])][1:]
    steps = [value for _, value in scalars.get(STEP_SECONDS, [])][1:]
    trace = traced(job_config, dump_folder)
    foretold = predictions(job_config)

    entropy = label = gain = None
    if validation:
        entropy, label = _validation_entropy(job_config)
        if entropy:  # a text of one repeated token has none
            gain = 100 * (1 - validation[-1][1] / entropy)
    num_devices = world_size if world_size is not None else count_devices(job_config)
    speed = statistics.median(speeds) if speeds else None
    return {
        "has_events": events is not None,
        "first_training_loss": training[0] if training else None,
        "last_training_loss": training[-1] if training else None,
        "validation_loss": validation[-1] if validation else None,
        "validation_entropy": entropy,
        "validation_entropy_label": label,
        "better_than_entropy_percent": gain,
        "tokens_per_second_per_device": speed,
        "tokens_per_second_total": speed * num_devices if speed is not None and num_devices else None,
        "step_seconds": statistics.median(steps) if steps else None,
        "traced_step_seconds": None if trace is None else trace[0],
        "predicted_step_seconds": {p.source: p.seconds for p in [*foretold, *([] if trace is None else [trace[1]])]},
        "num_devices": num_devices,
        "num_logged_steps": len(training),
        "places": _existing_places(dump_folder, job_config, events),
    }


def _loss_text(point: Point) -> str:
    step, value = point
    text = f"{value:.4f} at step {step}"
    return text if math.isfinite(value) else f"{text} (not finite: try a lower --optimizer.lr)"


def _entropy_text(figures: Mapping[str, Any]) -> str:
    entropy, label = figures["validation_entropy"], figures["validation_entropy_label"]
    if entropy is None:
        return label
    text = f"{entropy:.4f}, {label} of the same text"
    gain = figures["better_than_entropy_percent"]
    if gain is None or not math.isfinite(gain):
        return text
    return f"{text}; the model {'beats it' if gain >= 0 else 'is worse'} by {abs(gain):.1f} %"


def _speed_text(figures: Mapping[str, Any]) -> str:
    text = f"{figures['tokens_per_second_per_device']:,.0f} tokens/s per device"
    if figures["tokens_per_second_total"] is not None and figures["num_devices"] > 1:
        text += f", {figures['tokens_per_second_total']:,.0f} on all {figures['num_devices']}"
    return f"{text} (median of the logged steps but the first)"


def _step_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Measured time of a step, and beside it what was predicted of its forwards and backwards."""
    rows = []
    if figures["step_seconds"] is not None:
        median = f"{figures['step_seconds']:.4g} s with optimizer and data"
        rows.append(("step", f"{median} (median of the logged steps but the first)"))
    measured = figures["traced_step_seconds"]
    if measured is not None:
        rows.append(("", f"{measured:.4g} s of it in forwards and backwards (median of the traced steps)"))
    measured = figures["step_seconds"] if measured is None else measured
    for source, seconds in figures["predicted_step_seconds"].items():
        off = "" if measured is None else f" ({seconds / measured - 1:+.1%})"
        rows.append(("" if rows else "step", f"{seconds:.4g} s {source}{off}"))
    return rows


def _to_text(
    figures: Mapping[str, Any],
    dump_folder: Path,
    job_config: JobConfig,
    kept: bool,
    commands: Sequence[tuple[str, str]],
) -> str:
    rows = []
    if not figures["has_events"]:
        reason = "" if job_config.metrics.enable_tensorboard else " (metrics.enable_tensorboard is off)"
        rows.append(("losses, speed", f"unknown: no TensorBoard data in {dump_folder}{reason}"))
    elif figures["first_training_loss"] is None:
        rows.append(("losses, speed", "unknown: the TensorBoard data holds no step yet"))
        if job_config.checkpoint.enable:
            steps = job_config.training.steps
            hint = f"a checkpoint at step {steps} leaves nothing to do: --training.steps {2 * steps} goes on from it, "
            rows.append(("", f"{hint}--job.dump_folder OTHER starts afresh"))
    elif figures["num_logged_steps"] == 1:
        why = f"the only step logged, by metrics.log_freq = {job_config.metrics.log_freq}"
        rows.append(("loss", f"{_loss_text(figures['first_training_loss'])}, {why}"))
    else:
        rows.append(("first loss", _loss_text(figures["first_training_loss"])))
        rows.append(("last loss", _loss_text(figures["last_training_loss"])))
    if figures["validation_loss"] is not None:
        rows.append(("validation", _loss_text(figures["validation_loss"])))
        rows.append(("yardstick", _entropy_text(figures)))
    if figures["tokens_per_second_per_device"] is not None:
        rows.append(("speed", _speed_text(figures)))
    rows += _step_rows(figures)
    rows += figures["places"].items()
    rows.append(("earlier figures" if kept else "these figures", str(dump_folder / SUMMARY_FILE)))

    width = max(len(name) for name, _ in rows)
    lines = ["Run summary (losses in nats per token)"]
    lines += [f"  {name:<{width}}  {value}" for name, value in rows]
    width = min(80, max(len(command) for command, _ in commands))  # a longer one has its purpose right behind it
    lines += ["Next", *(f"  {command:<{width}}  # {purpose}" for command, purpose in commands)]
    return "\n".join(lines)


def _finite(value: Any) -> Any:
    """The same data with None for numbers that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(item) for item in value]
    return value


def summarize(
    dump_folder: str | Path,
    job_config: JobConfig,
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    nproc: int | None = None,
) -> str:
    """A short report of the latest run in ``dump_folder``; also writes its figures to ``summary.json`` there.

    A run that logged no step, as one whose checkpoint is of the last step already, leaves the file of an earlier one.

    It shows the first and last training loss, the validation loss beside the order-0 entropy of the same
    text, the median speed, where things lie and what to try next. Missing data is reported, not an error.

    Args:
        dump_folder: ``job.dump_folder`` of the run.
        job_config: the run's merged config, with its ``[stateflow]`` section.
        world_size: processes of the run, for the total speed; by default what the config's degrees multiply
            to.
        overrides, nproc: those of the run's command, for the next ones.
    """
    dump_folder = Path(dump_folder)
    figures = collect(dump_folder, job_config, world_size)
    dump_folder.mkdir(parents=True, exist_ok=True)
    file = dump_folder / SUMMARY_FILE
    kept = figures["first_training_loss"] is None and file.is_file()
    if not kept:
        file.write_text(json.dumps(_finite(figures), indent=2, allow_nan=False) + "\n")
    return _to_text(figures, dump_folder, job_config, kept, next_commands(job_config, overrides, nproc))
