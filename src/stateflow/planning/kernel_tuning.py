"""``stateflow tune-kernels``: measures how the recurrent kernels are best launched here, and writes the table.

For each shape: every kernel alone, over its candidates; then what runs beside what, on the whole operation, forward
and backward by themselves. A candidate is compared with float64 before it is timed. What does not win by more than
the noise stays as it is in the default plan.

A Mamba-3 layer may put its projections beside the kernels: that is timed on a whole layer, of the model's width.

Most of the time goes into compiling, so worker processes do that first, all at once; the lengths of sequences do not
matter to it.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from stateflow.bench.measure import Timing, Turns
from stateflow.planning import mamba3_launches
from stateflow.planning.kernel_launches import KERNELS
from stateflow_kernels.gated_delta_rule import Plan, Tile
from stateflow_kernels.mamba3_rule import Mamba3Plan
from stateflow_kernels.plan_table import Entry, Environment, Shape, save

Say = Callable[[str], None]
Pair = tuple[str, Tile | int]
Job = tuple[Shape, str, Tile | int]
AnyPlan = Plan | Mamba3Plan
SECONDS_A_GROUP, SECONDS_A_SHAPE = 120.0, 30.0

# No loop without a load pipeline, see `default_plan`.
_PARALLEL = ((64, 4, 2), (128, 4, 2), (32, 4, 2), (64, 8, 2), (128, 8, 2), (64, 4, 3))
# These sum over the blocks of V: one width for all lengths, or a cut sequence would not have the bits of a whole one.
_SUMMING = ((64, 4, 2), (32, 4, 2), (32, 4, 3), (64, 4, 3), (32, 4, 4))
_SUMS = ("query_backward", "solve_backward", "key_backward")
_WALK = ((16, 4, 3), (16, 4, 4), (32, 4, 2), (32, 4, 3), (32, 4, 4), (64, 4, 3))
_WALK += tuple((v, 4, stages, True) for v, stages in ((32, 4), (16, 4), (16, 6), (32, 2)))
_WALK_OUT = tuple((v, 4, stages, True) for v, stages in ((32, 3), (32, 2), (16, 3), (16, 2)))
_WALK_BACK = ((16, 4, 2), (16, 4, 3), (32, 4, 2), (32, 4, 3), (64, 4, 2))
_WALK_BACK += tuple((v, 4, stages, True) for v, stages in ((32, 3), (32, 2), (16, 4), (16, 2)))

# Of walks in segments, whose programs are enough without narrow blocks.
_WALK_IN_SEGMENTS = tuple((*sizes, True) for sizes in ((64, 4, 2), (64, 8, 2), (32, 4, 3), (32, 4, 2)))

CUTS = ((0.5,), (0.33, 0.66), (0.25, 0.6))
# Without anything beside it, a cut only costs.
BACKWARDS = tuple(dict(overlap_backward=True, backward_cuts=cuts) for cuts in ((), (0.5,), (0.33,), (0.33, 0.66)))
# Chunks a program, where the gradients come from one kernel.
GRADIENTS = tuple(dict(gradient_chunks=chunks) for chunks in (4, 16, 32, 0))
# ST and STB that fit one multiprocessor together, columns and stages of each; ST is then the backward's only.
TOGETHER = (((32, 2), (32, 2)), ((16, 3), (16, 2)))
BESIDE = 3  # so many of the fastest tiles of a walk are also tried beside other kernels


# Mamba-3's. The scans move states, a few columns of P at a time; the backward one leaves sums for each block of them.
_SCAN = tuple((columns, warps, stages) for columns in (8, 16) for warps in (1, 2) for stages in (4, 6, 8))
_SCAN_LAUNCHES = tuple((0, warps, stages) for warps in (1, 2) for stages in (4, 6, 8))
_LAUNCHES = ((0, 4, 2), (0, 8, 2), (0, 4, 3))


@dataclass(frozen=True)
class Family:
    """What there is to choose for an operation.

    Attributes:
        kernels: the names of their tiles in the plan.
        candidates: by kernel the tiles worth a try, (columns, warps, stages); 0 columns: as many as the default has.
        walks: the kernels that go through the chunks in order, of the forward and of the backward.
        backwards: what may run beside what in the backward.
        walk_out: the kernel that is walk and outputs of the forward in one, if there is one.
        also_compiled: what a check launches besides, given the shape, those kernels' tiles and the default plan.
        has_choice: whether that kernel of the default plan runs for the shape, and in a form that has candidates.
        has_layer: whether a layer may put its projections beside the kernels, and the bench can time one.
    """

    kernels: tuple[str, ...]
    candidates: Callable[[str], tuple[tuple[int, int, int], ...]]
    walks: tuple[str, str]
    backwards: tuple[dict, ...]
    walk_out: str | None = None
    also_compiled: Callable[[Shape, Mapping[str, Sequence[Tile]], AnyPlan], list[Pair]] = lambda *_: []
    has_choice: Callable[[str, Shape, AnyPlan], bool] = lambda *_: True
    has_layer: bool = False


def _gated_delta_also_compiled(shape: Shape, tiles: Mapping[str, Sequence[Tile]], default: Plan) -> list[Pair]:
    """Pre of the backward, and the one gradient kernel for each number of chunks; in segments all others, too."""
    merged = default.gradient_chunks if shape.batch == 1 and shape.num_heads == shape.num_key_heads else 0
    chunks = {merged: None}
    if shape.segments == 1 and merged:
        chunks |= dict.fromkeys(options["gradient_chunks"] for options in GRADIENTS)
    found = [("pre_backward", tile) for tile in tiles.get("pre", [default.pre])]
    if shape.segments > 1:
        others = ["pre"] if default.transition_out.specialized else ["pre", "out", "out_backward"]
        found += [(name, getattr(default, name)) for name in (*others, *(() if merged else _SUMS))]
    return found + [("gradients", n) for n in chunks if n]


def _mamba3_has_choice(kernel: str, shape: Shape, default: Mamba3Plan) -> bool:
    """Heads a program of the gradients are none: dB and dC would have other bits for each length."""
    return kernel.startswith("scan") or not mamba3_launches.in_gluon(shape, default)


def _mamba3_also_compiled(shape: Shape, _: Mapping[str, Sequence[Tile]], default: Mamba3Plan) -> list[Pair]:
    """The kernels that leave no choice."""
    launched = mamba3_launches.launched(shape, default)
    return [(name, tile) for name, tile in launched if not name.startswith("scan")]


def _gated_delta_candidates(kernel: str) -> tuple[tuple[int, int, int], ...]:
    walks = {"transition": _WALK, "transition_backward": _WALK_BACK, "transition_out": _WALK_OUT}
    return walks.get(kernel, _SUMMING if kernel in _SUMS else _PARALLEL)


def _mamba3_candidates(kernel: str) -> tuple[tuple[int, int, int], ...]:
    walks = {"scan": _SCAN, "scan_backward": _SCAN_LAUNCHES}
    return walks.get(kernel, _LAUNCHES if kernel.endswith("_gradients") else _PARALLEL)


FAMILIES = {
    "gated_delta_rule": Family(
        KERNELS,
        _gated_delta_candidates,
        ("transition", "transition_backward"),
        BACKWARDS,
        "transition_out",
        _gated_delta_also_compiled,
    ),
    "mamba3": Family(
        mamba3_launches.KERNELS,
        _mamba3_candidates,
        ("scan", "scan_backward"),
        (dict(overlap_backward=True),),
        has_choice=_mamba3_has_choice,
        also_compiled=_mamba3_also_compiled,
        has_layer=True,
    ),
}


def candidate_tiles(kernel: str, shape: Shape, default: Tile) -> list[Tile]:
    """The default first, then those worth a try for heads of this width."""
    found = [default]
    in_segments = shape.segments > 1 and kernel.startswith("transition")
    for columns, *launch in _WALK_IN_SEGMENTS if in_segments else FAMILIES[shape.family].candidates(kernel):
        widest = max(16, 1 << (shape.v_dim - 1).bit_length())
        if columns <= widest:
            found.append(Tile(columns or default.block_v, *launch))
    return list(dict.fromkeys(found))


class Bench(Protocol):
    """What the search asks of the device, for shapes that differ in `tokens` only."""

    def compile(self, jobs: Sequence[Job], seconds: float) -> Mapping[Job, str]:
        """Compiles kernels with tiles, also for other shapes, within about this time; returns what failed, and why."""

    def check(self, plan: AnyPlan) -> str | None:
        """Why this plan is not right, compared with float64; None if it is."""

    def prepare(self, shape: Shape, plan: AnyPlan) -> None:
        """What follows is timed for this shape."""

    def time_kernel(self, kernel: str, tile: Tile) -> Timing: ...

    def time_forward(self, plan: AnyPlan) -> Timing: ...

    def time_backward(self, plan: AnyPlan) -> Timing: ...

    def time_layer(self, plan: AnyPlan, dim: int) -> tuple[Timing, Timing]:
        """Forward and backward of a whole layer of a model of width `dim`; asked last for a shape."""


class OutOfTime(Exception):
    pass


@dataclass
class Search:
    """The search for the shapes of one bench. `clock` tells seconds, `deadline` is when to stop."""

    bench: Bench
    default: AnyPlan
    say: Say = print
    clock: Callable[[], float] = time.monotonic
    deadline: float = float("inf")
    dim: int | None = None

    def __post_init__(self) -> None:
        self.verdicts: dict[AnyPlan, str | None] = {}

    def candidates(self, shape: Shape) -> dict[str, list[Tile]]:
        """By kernel, the default first. In segments of the walks only: the others are as in the exact order."""
        family = FAMILIES[shape.family]
        names = [name for name in family.kernels if family.has_choice(name, shape, self.default)]
        if shape.segments > 1:
            names = [name for name in names if name.startswith("transition")]
            if not self.default.transition_out.specialized:
                names.remove("transition_out")  # two kernels
        return {name: candidate_tiles(name, shape, getattr(self.default, name)) for name in names}

    def jobs(self, shape: Shape) -> list[list[Job]]:
        """What there is to compile, the first of each list first."""
        candidates = self.candidates(shape)
        more = FAMILIES[shape.family].also_compiled(shape, candidates, self.default)
        return [[(shape, name, tile) for tile in tiles] for name, tiles in candidates.items()] + [
            [(shape, *pair)] for pair in more
        ]

    def usable(self, shape: Shape, failures: Mapping[Job, str]) -> dict[str, list[Tile]]:
        """The candidates of each kernel that compile and are right."""
        reason = self.verdict(self.default)
        if reason is not None:
            raise ValueError(f"the default plan is not right here ({reason}); run stateflow doctor")
        usable = {}
        for name, tiles in self.candidates(shape).items():
            usable[name] = []
            for tile in tiles:
                reason = None
                if tile != getattr(self.default, name):
                    reason = failures.get((shape, name, tile)) or self.verdict(replace(self.default, **{name: tile}))
                if reason is None:
                    usable[name].append(tile)
                else:
                    self.say(f"  {name} {_short(tile)} dropped: {reason}")
        return usable

    def verdict(self, plan: AnyPlan) -> str | None:
        if plan not in self.verdicts:
            self.verdicts[plan] = self.bench.check(plan)
        return self.verdicts[plan]

    def tune(self, shape: Shape, usable: Mapping[str, Sequence[Tile]]) -> Entry:
        """The best plan within the time; with no time left, the default as it is."""
        self.bench.prepare(shape, self.default)
        evidence = {"date": datetime.date.today().isoformat(), "complete": True}
        plan, fastest = self.default, {}
        try:
            for name in usable:
                fastest[name] = self._kernel(name, usable[name], evidence)
                plan = replace(plan, **{name: fastest[name][0]})
            plan = self._whole(FAMILIES[shape.family], self._checked(plan), fastest)
        except OutOfTime:
            evidence["complete"] = False
            self.say("  the time is over: the rest stays at the default")
        entry = self._entry(shape, plan, evidence)
        return self._with_projections(entry) if FAMILIES[shape.family].has_layer else entry

    def _in_time(self) -> None:
        if self.clock() >= self.deadline:
            raise OutOfTime

    def _kernel(self, name: str, tiles: Sequence[Tile], evidence: dict) -> list[Tile]:
        """The tiles by time; the default first unless another one beats it."""
        default = getattr(self.default, name)
        times = {}
        for tile in tiles:
            self._in_time()
            times[tile] = self.bench.time_kernel(name, tile)
        order = sorted(times, key=lambda tile: times[tile].median)
        if default in times and not times[order[0]].beats(times[default]):
            order.remove(default)
            order.insert(0, default)
        shown = [f"{_short(tile)} {times[tile].median:.3f}" for tile in order[:4]]
        self.say(f"  {name}: {', '.join(shown)} ms; default {_short(default)}")
        evidence.setdefault("kernels_ms", {})[name] = {_short(t): round(times[t].median, 4) for t in order[:4]}
        return order

    def _whole(self, family: Family, serial: AnyPlan, fastest: Mapping[str, Sequence[Tile]]) -> AnyPlan:
        """Forward and backward by themselves: each with what runs beside what, and the tiles of its walk for that."""
        walk, walk_back = family.walks
        serial = replace(serial, overlap_backward=False)  # the default for Hopper is not
        if getattr(serial, "num_segments", 1) > 1:  # in the place of the cuts
            beside = [{"overlap_backward": True, walk_back: tile} for tile in fastest[walk_back][:BESIDE]]
            return self._options("backward", serial, beside, self.bench.time_backward)
        forward = [{"cuts": cuts, walk: tile} for cuts in CUTS for tile in fastest[walk][:BESIDE]]
        plan = self._options("forward", serial, forward, self.bench.time_forward)
        if family.walk_out is not None and getattr(self.default, family.walk_out).specialized:
            tiles = [tile for tile in fastest[family.walk_out] if tile.specialized]
            in_one = [{"cuts": cuts, family.walk_out: tile} for cuts in ((), *CUTS) for tile in tiles[:BESIDE]]
            plan = self._options("forward in one", plan, in_one, self.bench.time_forward)
        # ST of the backward's replay has the forward's tile.
        backward = [options | {walk_back: tile} for options in family.backwards for tile in fastest[walk_back][:BESIDE]]
        plan = self._options("backward", plan, backward, self.bench.time_backward)
        if family.walk_out is not None and getattr(plan, family.walk_out).specialized:
            pairs = [
                {name: Tile(v, 4, n, specialized=True) for name, (v, n) in zip(family.walks, pair, strict=True)}
                for pair in TOGETHER
            ]
            beside = [dict(overlap_backward=True, backward_cuts=cuts) for cuts in ((), (0.5,))]
            together = [pair | options for pair in pairs for options in beside]
            plan = self._options("backward, both walks at once", plan, together, self.bench.time_backward)
        if getattr(self.default, "gradient_chunks", 0):
            plan = self._options("backward, gradients", plan, GRADIENTS, self.bench.time_backward)
        return plan

    def _options(
        self, name: str, serial: AnyPlan, options: Sequence[dict], time_plan: Callable[[AnyPlan], Timing]
    ) -> AnyPlan:
        best, best_time = serial, time_plan(serial)
        serial_time = best_time
        for option in options:
            plan = replace(serial, **option)
            reason = self.verdict(plan)
            if reason is not None:
                self.say(f"  {name} with {option} dropped: {reason}")
                continue
            self._in_time()
            timing = time_plan(plan)
            if timing.median < best_time.median and timing.beats(serial_time):
                best, best_time = plan, timing
        what = (
            "nothing overlaps"
            if best is serial
            else f"cuts {best.cuts}"
            if name == "forward"
            else f"cuts {getattr(best, 'backward_cuts', ())}, overlap {best.overlap_backward}"
        )
        self.say(f"  {name}: serial {serial_time.median:.3f} ms, best {best_time.median:.3f} ms ({what})")
        return best

    def _checked(self, plan: AnyPlan) -> AnyPlan:
        reason = self.verdict(plan)
        if reason is None:
            return plan
        self.say(f"  the kernels together are not right ({reason}): the default stays")
        return self.default

    def _entry(self, shape: Shape, plan: AnyPlan, evidence: dict) -> Entry:
        """Timed once more as a whole: the default stays where the plan is not faster."""
        plan = self._checked(plan)
        default = tuned = self.bench.time_forward(self.default), self.bench.time_backward(self.default)
        if plan != self.default:
            tuned = self.bench.time_forward(plan), self.bench.time_backward(plan)
            if sum(timing.median for timing in tuned) > sum(timing.median for timing in default):
                plan, tuned = self.default, default
        for prefix, timings in (("", tuned), ("default_", default)):
            evidence |= {
                f"{prefix}{name}_ms": round(timing.median, 4)
                for name, timing in zip(("forward", "backward"), timings, strict=True)
            }
        self.say(f"  {_sum(tuned)} ms, default {_sum(default)} ms")
        return Entry(shape, plan, evidence)

    def _with_projections(self, entry: Entry) -> Entry:
        """Whether the layer's projections run beside the kernels, which changes no bit: forward and backward alone."""
        if self.clock() >= self.deadline:
            return entry
        shape = entry.shape
        dim = shape.num_heads * shape.v_dim // 2 if self.dim is None else self.dim
        beside = dict(overlap_projections=True, overlap_projections_backward=True)
        try:
            serial = self.bench.time_layer(entry.plan, dim)
            at_once = self.bench.time_layer(replace(entry.plan, **beside), dim)
        except torch.OutOfMemoryError:
            self.say(f"  layer of width {dim}: the memory does not hold one; its projections stay behind the kernels")
            return entry
        pays = [mine.beats(its) for mine, its in zip(at_once, serial, strict=True)]
        self.say(
            f"  layer of width {dim}: {_sum(serial)} ms, with projections beside the kernels {_sum(at_once)} ms "
            f"(pays: forward {pays[0]}, backward {pays[1]})"
        )
        times = {name: [round(t.median, 4) for t in ts] for name, ts in (("serial", serial), ("at_once", at_once))}
        evidence = entry.evidence | {"layer_ms": {"dim": dim, **times}}
        return replace(entry, plan=replace(entry.plan, **dict(zip(beside, pays, strict=True))), evidence=evidence)


def _sum(timings: Sequence[Timing]) -> str:
    return " + ".join(f"{timing.median:.3f}" for timing in timings)


def _short(tile: Tile) -> str:
    return f"{tile.block_v}/{tile.num_warps}/{tile.num_stages}" + ("/specialised" if tile.specialized else "")


def groups_of(shapes: Sequence[Shape]) -> list[list[Shape]]:
    """The shapes that have kernels in common: all but the number of tokens is the same."""
    groups: dict[Shape, list[Shape]] = {}
    for shape in shapes:
        groups.setdefault(replace(shape, tokens=1), []).append(shape)
    return list(groups.values())


def tune(
    shapes: Sequence[Shape],
    make_bench: Callable[[Shape], Bench],
    default_for: Callable[[Shape], AnyPlan],
    environment: Environment,
    out: Path,
    seconds: float,
    say: Say = print,
    clock: Callable[[], float] = time.monotonic,
    dim: int | None = None,
) -> list[Entry]:
    """Tunes all shapes within about `seconds`, writing each entry as soon as it is there.

    The time that compiling leaves is shared evenly among the groups of shapes, then among a group's shapes.
    `dim` is the width of the model; None: that of an official Mamba-3 module with so many heads.
    """
    end = clock() + seconds
    entries, groups = [], groups_of(shapes)
    searches = [Search(make_bench(group[0]), default_for(group[0]), say, clock, end, dim) for group in groups]
    # The defaults first, then the second candidates of all kernels and so on: useful wherever the time ends.
    lists = [jobs for search, group in zip(searches, groups, strict=True) for jobs in search.jobs(group[0])]
    # Each once: what is compiled besides may be a candidate, too.
    jobs = list(dict.fromkeys(job for batch in itertools.zip_longest(*lists) for job in batch if job is not None))
    say(f"compiling {len(jobs)} variants")
    began = clock()
    failures = searches[0].bench.compile(jobs, 0.6 * seconds) if groups else {}
    say(f"compiled in {clock() - began:.0f} s")
    for i, group in enumerate(groups):
        search = searches.pop(0)  # with what it holds of the device's memory
        stop = clock() + (end - clock()) / (len(groups) - i)
        say(f"{group[0].num_heads} heads, {group[0].k_dim} x {group[0].v_dim}, {group[0].dtype}:")
        usable = search.usable(group[0], failures)
        for j, shape in enumerate(group):
            search.deadline = clock() + (stop - clock()) / (len(group) - j)
            say(f"{shape}:")
            entries.append(search.tune(shape, usable))
            save(out, environment, entries[-1:])
    return entries


def run(
    shapes: Sequence[Shape],
    out: Path | None,
    seconds: float | None,
    turns: Turns | None = None,
    dim: int | None = None,
) -> int:
    """The command: tunes on the current GPU and prints what was found.

    Raises:
        ValueError: there is no GPU, or `out` holds no table for it.
    """
    from stateflow.bench.measure import require_cuda
    from stateflow.planning.kernel_bench import KernelBench
    from stateflow_kernels import plans

    require_cuda("stateflow tune-kernels")
    device = torch.device("cuda", torch.cuda.current_device())
    environment = plans.environment_of(device)
    path = plans.user_table_path(environment) if out is None else out
    if path.exists():
        save(path, environment, [])  # refuses now, not after the measurements

    def default_for(shape: Shape) -> AnyPlan:
        if shape.segments > 1:  # what runs without an entry
            plan = plans.choice_for(replace(shape, segments=1), device).plan
            return plans.in_segments(plan, shape.segments, shape.v_dim)
        sizes = (shape.k_dim, shape.v_dim, shape.family, shape.batch * shape.num_heads)
        return plans.fallback_plan(device, getattr(torch, shape.dtype), *sizes)

    if seconds is None:
        seconds = SECONDS_A_GROUP * len(groups_of(shapes)) + SECONDS_A_SHAPE * len(shapes)
    print(f"{len(shapes)} shapes on {environment}, at most about {seconds:.0f} s")

    def make_bench(shape: Shape) -> Bench:
        return KernelBench(shape, device, turns or Turns(None))

    tune(shapes, make_bench, default_for, environment, path, seconds, dim=dim)
    print(f"written: {path}")
    return 0
