"""Measured cost of a stage's chunks: real stages run at a handful of (start, length), interpolated between.

At a point three chunks run through ``ChunkStage``: the prefix without gradients, the chunk that is timed, and a short
tail, so that the timed chunk reads a prefix, hands its state on, and gets state and K/V gradients back like any chunk
in the middle of a sequence.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from stateflow.chunks import ChunkPlan
from stateflow.loss import cross_entropy_sum
from stateflow.pipeline.schedule import Kind
from stateflow.pipeline.stage import ChunkStage

TAIL = 16
# At least; short chunks are repeated up to MOST_REPEATS times within ENOUGH_SECONDS, with their prefixes.
REPEATS = 3
MOST_REPEATS, ENOUGH_SECONDS = 12, 1.0


@dataclass(frozen=True)
class Point:
    """Measured at one (start, length): seconds, and on a GPU bytes (else None). ``failed`` is out of memory.

    Of a stage that splits its backward ``backward`` is I, and ``weight`` W; of others ``weight`` is None.
    """

    start: int
    length: int
    forward: float = 0.0
    backward: float = 0.0
    weight: float | None = None
    saved_bytes: int | None = None
    forward_bytes: int | None = None  # while the forward runs, beyond what it saves
    backward_bytes: int | None = None  # while the backward runs, beyond what was there before
    failed: bool = False


def measure(
    module: torch.nn.Module, device: torch.device, dtype: torch.dtype, start: int, length: int, *, batch: int, dim: int,
    vocab_size: int, is_first: bool, is_last: bool, documents: bool = False, split: bool = False,
    repeats: int = REPEATS, agree: Callable[[list[float]], list[float]] = lambda figures: figures,
) -> Point:
    """Runs the chunk [start, start + length) ``repeats`` times or more after a warm-up.

    Takes the median on a GPU, and the least on a CPU, where other programs can only add. With ``documents`` the layers
    get document starts, as in a run that resets at them; here the sequence is one document, the dearest case.
    With ``split`` the backward is I and then W; the module is left prepared for that. Ranks of tensor parallelism call
    this together: ``agree`` gives all of them the largest of each figure.

    Raises ValueError with ``split`` for a module compiled in place.
    """
    lengths = [n for n in (start, length, TAIL) if n]
    plan = ChunkPlan.explicit(sum(lengths), lengths)
    timed = 1 if start else 0
    stage = ChunkStage(module, plan, dtype, is_last=is_last, loss_fn=cross_entropy_sum if is_last else None)
    on_gpu = device.type == "cuda"
    if split:
        stage.split_backward()

    def chunk_input(n: int) -> torch.Tensor:
        if is_first:
            return torch.randint(vocab_size, (batch, n), device=device)
        return torch.randn(batch, n, dim, device=device, dtype=dtype)

    def run_forward(chunk: int, x: torch.Tensor, **kwargs):
        first, last = plan.span(chunk)
        docs = torch.full((batch, last - first), -first, device=device) if documents else None
        return stage.forward(0, chunk, x, docs=docs, target=targets[chunk], **kwargs)

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def held() -> int:
        return torch.cuda.memory_allocated(device) if on_gpu else 0

    def peak(reset: bool = False) -> int:
        if not on_gpu:
            return 0
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)

    rounds: list[Point] = []
    warm, spent = 0.0, 0.0  # when the first round was over, and the seconds since then, as the ranks agree
    try:
        while len(rounds) <= repeats or (len(rounds) <= MOST_REPEATS and spent < ENOUGH_SECONDS):
            targets = [torch.randint(vocab_size, (batch, n), device=device) if is_last else None for n in lengths]
            if start:
                with torch.no_grad():
                    run_forward(0, chunk_input(start), training=False)
            x = chunk_input(length)
            grad = None if is_last else torch.randn(batch, length, dim, device=device, dtype=dtype)
            before, begin = held(), now()
            peak(reset=True)
            output = run_forward(timed, x)
            forward = now() - begin
            after, forward_peak = held(), peak()
            del output, x
            out = run_forward(timed + 1, chunk_input(TAIL))
            tail_grad = None if is_last else torch.zeros_like(out)
            stage.backward(0, timed + 1, tail_grad, input_only=split)
            if split:
                stage.weight_backward(0, timed + 1)
            held_before, begin = held(), now()
            peak(reset=True)
            stage.backward(0, timed, grad, input_only=split)
            backward, weight, backward_peak = now() - begin, 0.0, peak()
            if split:
                begin = now()
                stage.weight_backward(0, timed)
                weight = now() - begin
            sizes = (after - before, forward_peak - after, backward_peak - held_before)
            spent = now() - warm if rounds else 0.0
            *times, saved, needed, needed_back, spent = agree([forward, backward, weight, *map(float, sizes), spent])
            rounds.append(
                Point(
                    start, length, times[0], times[1], times[2] if split else None,
                    *((int(saved), int(needed), int(needed_back)) if on_gpu else (None,) * 3),
                )
            )  # fmt: skip
            stage.reset()
            module.zero_grad(set_to_none=False)
            if len(rounds) == 1:
                warm = now()
    except torch.OutOfMemoryError:
        stage.reset()
        module.zero_grad()
        torch.cuda.empty_cache()
        return Point(start, length, failed=True)
    rounds, typical = rounds[1:], statistics.median if on_gpu else min
    last = rounds[-1]
    return Point(
        start, length, typical(p.forward for p in rounds), typical(p.backward for p in rounds),
        typical(p.weight for p in rounds) if split else None,
        last.saved_bytes, last.forward_bytes, last.backward_bytes,
    )  # fmt: skip


class CostSurface:
    """Seconds of a stage's forward or backward at any (start, length) from a few measured points.

    At one length the cost is a line in the start (a prefix costs in proportion to its length); between lengths the
    line's offset follows a parabola, kept within its neighbours, and its slope is linear. So eq. 9, with any constant
    on top, is met exactly. A chunk longer than any measured one is summed from equal pieces: eq. 9 is additive.
    """

    def __init__(self, points: Sequence[tuple[int, int, float]]):
        """``points``: (start, length, seconds).  Raises ValueError for fewer than two lengths."""
        by_length: dict[int, list[tuple[int, float]]] = {}
        for start, length, seconds in points:
            by_length.setdefault(length, []).append((start, seconds))
        self.lengths = sorted(by_length)
        if len(self.lengths) < 2:
            raise ValueError(f"measured at lengths {self.lengths} only; two are the least to interpolate")
        lines = {length: _line(by_length[length]) for length in self.lengths}
        self.offsets = [lines[length][0] for length in self.lengths]
        slopes = [lines[length][1] for length in self.lengths]
        known = [(n, s) for n, s in zip(self.lengths, slopes, strict=True) if s is not None]
        # A length seen at one start only (the whole sequence) takes its slope in proportion from the nearest other.
        self.slopes = [
            s if s is not None else _proportional(n, known) for n, s in zip(self.lengths, slopes, strict=True)
        ]

    def seconds(self, start: int, length: int) -> float:
        pieces = max(1, -(-length // self.lengths[-1]))
        cuts = [start + length * i // pieces for i in range(pieces + 1)]
        return sum(self._within(cut, until - cut) for cut, until in zip(cuts, cuts[1:], strict=False))

    def _within(self, start: int, length: int) -> float:
        """Of a chunk no longer than the longest measured one."""
        lengths = self.lengths
        right = next((i for i, n in enumerate(lengths) if n >= length), len(lengths) - 1)
        right = max(1, right)
        left = right - 1
        weight = (length - lengths[left]) / (lengths[right] - lengths[left])
        slope = self.slopes[left] + weight * (self.slopes[right] - self.slopes[left])
        offset = self._offset(left, right, length)
        return max(0.0, offset + slope * start)

    def _offset(self, left: int, right: int, length: int) -> float:
        values, lengths = self.offsets, self.lengths
        a, b = values[left], values[right]
        weight = (length - lengths[left]) / (lengths[right] - lengths[left])
        linear = a + weight * (b - a)
        if len(lengths) == 2 or not 0 <= weight <= 1:
            return linear
        # The straight line plus a bend. Of the parabolas through the next point on either side take the one that
        # bends less: they agree where the cost is smooth, and at a corner (launches no longer bound it) one is right.
        bends = []
        for third in (left - 1, right + 1):
            if 0 <= third < len(lengths):
                onward = (values[third] - b) / (lengths[third] - lengths[right])
                slope = (b - a) / (lengths[right] - lengths[left])
                bends.append((onward - slope) / (lengths[third] - lengths[left]))
        parabola = linear + min(bends, key=abs) * (length - lengths[left]) * (length - lengths[right])
        return min(max(parabola, min(a, b)), max(a, b))


def _line(points: list[tuple[int, float]]) -> tuple[float, float | None]:
    """(value at start 0, slope) of the least-squares line; the slope is None where there is one start only."""
    starts = [start for start, _ in points]
    if len(set(starts)) == 1:
        return statistics.mean(seconds for _, seconds in points), None
    slope, offset = statistics.linear_regression(starts, [seconds for _, seconds in points])
    slope = max(0.0, slope)
    return (offset if slope else statistics.mean(seconds for _, seconds in points)), slope


def _proportional(length: int, known: list[tuple[int, float]]) -> float:
    if not known:
        return 0.0
    nearest, slope = min(known, key=lambda entry: abs(entry[0] - length))
    return slope * length / nearest


@dataclass(frozen=True)
class StageProfile:
    """What was measured of one kind of stage, and the surfaces through it."""

    points: tuple[Point, ...]
    held_out: tuple[Point, ...]

    @property
    def usable(self) -> bool:
        """Whether there are two lengths, the least to interpolate."""
        return len({p.length for p in self.points if not p.failed}) >= 2

    def surfaces(self) -> dict[Kind, CostSurface]:
        """Seconds of F and B, or of F, I and W where the backward was split.  ValueError if not ``usable``."""
        good = [p for p in self.points if not p.failed]
        names = {Kind.F: "forward", Kind.B: "backward"}
        if any(p.weight is not None for p in good):
            names = {Kind.F: "forward", Kind.I: "backward", Kind.W: "weight"}
        return {kind: CostSurface([(p.start, p.length, getattr(p, n)) for p in good]) for kind, n in names.items()}

    def fit_errors(self) -> list[tuple[Kind, int, int, float]]:
        """(kind, start, length, relative error) at the held-out points."""
        errors = []
        for kind, surface in self.surfaces().items():
            name = {Kind.F: "forward", Kind.W: "weight"}.get(kind, "backward")
            for p in self.held_out:
                if not p.failed:
                    error = surface.seconds(p.start, p.length) / getattr(p, name) - 1
                    errors.append((kind, p.start, p.length, error))
        return errors


def points_to_measure(seq_len: int, shortest: int, reads_prefix: bool, multiple: int = 1) -> tuple[list, list]:
    """((start, length) to fit, (start, length) held out); the coarse ones come first, for a short time budget.

    Starts and lengths are multiples of ``multiple``, which has to divide ``seq_len`` and ``shortest``.
    """
    lengths = [seq_len]
    while lengths[-1] > shortest:
        lengths.append(max(shortest, _round(lengths[-1] // 2, multiple)))
    # Ends first, then the middle: a surface exists as soon as there are two lengths.
    ordered = sorted(lengths[1:], key=lambda n: (n not in (lengths[-1], lengths[min(2, len(lengths) - 1)]), -n))
    points = []
    for length in ordered:
        points += [(0, length)] + ([(seq_len - length, length)] if reads_prefix and length < seq_len else [])
    points.append((0, seq_len))
    held_out = []
    for share, part in ((3, 3), (12, 2)):
        length = max(shortest, _round(seq_len // share, multiple))
        if length not in lengths:
            held_out.append((_round(seq_len // part, multiple) if reads_prefix else 0, length))
    return points, held_out


def points_of(lengths: Sequence[int], seq_len: int, reads_prefix: bool) -> list[tuple[int, int]]:
    """(start, length) of chunks of ``lengths``, the longest first: at 0, and where it matters at the sequence's end."""
    points = []
    for length in sorted(set(lengths), reverse=True):
        points += [(0, length)] + ([(seq_len - length, length)] if reads_prefix and length < seq_len else [])
    return points


def _round(length: int, multiple: int) -> int:
    return max(multiple, length // multiple * multiple)


def coarse(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first of ``points_to_measure``'s, up to the end of the second length, and the whole sequence."""
    lengths = list(dict.fromkeys(length for _, length in points))
    return [point for point in points if point[1] in (*lengths[:2], max(lengths))]


ABOUT = "about "  # in front of a key: what it stands for


class Cache:
    """Measured points in a JSON file, written after each, so that an interrupted search goes on where it was."""

    def __init__(self, path: Path):
        self.path = path
        self.points: dict[str, dict] = {}
        if path.exists():
            try:
                self.points = json.loads(path.read_text())
            except ValueError:
                raise ValueError(f"{path}: not readable as JSON; delete it to measure afresh") from None
            if not isinstance(self.points, dict):
                raise ValueError(f"{path}: holds no measured points, as stateflow plan writes them; give another file")

    def get(self, key: str, start: int, length: int) -> Point | None:
        entry = self.points.get(f"{key} {start} {length}")
        return None if entry is None else Point(**entry)

    def put(self, key: str, point: Point) -> None:
        self.points[f"{key} {point.start} {point.length}"] = asdict(point)
        self._write()

    def describe(self, key: str, facts: dict) -> None:
        """Keeps in words what ``key`` stands for, for readers on other machines."""
        if self.points.get(f"{ABOUT}{key}") != facts:
            self.points[f"{ABOUT}{key}"] = facts
            self._write()

    def described(self) -> dict[str, dict]:
        """The facts of each key that has some."""
        return {name.removeprefix(ABOUT): facts for name, facts in self.points.items() if name.startswith(ABOUT)}

    def all_of(self, key: str) -> list[Point]:
        """All points measured of ``key``."""
        return [Point(**entry) for name, entry in self.points.items() if name.startswith(f"{key} ")]

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.points, indent=0) + "\n")
        partial.replace(self.path)


class Budget:
    """A time budget in seconds from now on; None is no limit."""

    def __init__(self, seconds: float | None):
        self.seconds, self.begin = seconds, time.monotonic()

    def share(self, part: float) -> Budget:
        """A budget that began when this one did and has a part of its seconds, so that something is left for others."""
        mine = Budget(None if self.seconds is None else part * self.seconds)
        mine.begin = self.begin
        return mine

    @property
    def left(self) -> float | None:
        """Seconds, at least 0; None without a limit."""
        return None if self.seconds is None else max(0.0, self.begin + self.seconds - time.monotonic())

    @property
    def spent(self) -> bool:
        return self.left == 0.0


def profile_stage(
    run: Callable[[int, int], Point], key: str, cache: Cache, wanted: tuple[list, list], budget: Budget,
    progress: Callable[[str], None],
) -> StageProfile:
    """Measures what the cache does not hold, until the budget is spent: then the profile may not be ``usable``.

    A new point far above what the others say is measured once more and the lesser figures kept: something else ran.
    """
    fitted, held_out, new = [], [], []
    for kept, points in ((fitted, wanted[0]), (held_out, wanted[1])):
        for start, length in points:
            point = cache.get(key, start, length)
            if point is None:
                if budget.spent:
                    continue
                progress(f"chunk of {length} tokens at {start}")
                point = run(start, length)
                cache.put(key, point)
                new.append(point)
            kept.append(point)
    for kept in (fitted, held_out):
        for i, point in enumerate(kept):
            if point in new and not budget.spent and _is_suspicious(point, [p for p in fitted if p is not point]):
                progress(f"chunk of {point.length} tokens at {point.start}, once more")
                again = run(point.start, point.length)
                if not again.failed:
                    least = {
                        name: min(getattr(point, name), getattr(again, name))
                        for name in ("forward", "backward", "weight")
                        if getattr(point, name) is not None
                    }
                    kept[i] = replace(again, **least)
                    cache.put(key, kept[i])
    return StageProfile(tuple(fitted), tuple(held_out))


def _is_suspicious(point: Point, others: Sequence[Point]) -> bool:
    """Slower by an eighth than the surfaces through the other points say."""
    profile = StageProfile(tuple(others), (point,))
    if point.failed or not profile.usable:
        return False
    return any(error < 1 / 1.125 - 1 for _, _, _, error in profile.fit_errors())
