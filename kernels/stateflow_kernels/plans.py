"""Which plan the kernels of an operation are launched with: a measured one from a table, or the default.

Tables are looked at in this order:

    the user's      the file named by STATEFLOW_PLAN_TABLE, or ~/.cache/stateflow/plans/<environment>.json
    shipped         stateflow_kernels/tables, for this GPU and these versions of torch, triton and ptxas
    shipped         for this GPU and other versions (`table_entries` says so)

No table is ever for another GPU. Nothing here waits for the device.
"""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from . import assembler, gated_delta_rule, hopper, hopper_mamba3, mamba3_rule
from .gated_delta_rule import Tile
from .plan_table import Environment, Shape, Table, bucket_of, load, normalized, numbers_of

logger = logging.getLogger("stateflow")

VARIABLE = "STATEFLOW_PLAN_TABLE"
SHIPPED = Path(__file__).parent / "tables"
DEFAULTS = {"gated_delta_rule": gated_delta_rule.default_plan, "mamba3": mamba3_rule.default_plan}

# So many walks a multiprocessor are many (fewer were not measured), and the stages that they then have.
MANY_WALKS, SHALLOW = 4, 4

# Of walks in segments, see `in_segments`; the fastest ones on an H200.
WIDE_WALKS = {
    "transition": Tile(64, 4, 2, specialized=True),
    "transition_out": Tile(64, 4, 2, specialized=True),
    "transition_backward": Tile(64, 4, 2, specialized=True),
}

_forced = None
_reloads = 0


@dataclass(frozen=True)
class Choice:
    """A plan, and where it comes from: the entry's shape and table, or None for both and the default."""

    plan: object
    shape: Shape | None = None
    table: str | None = None

    def __str__(self) -> str:
        return "default" if self.shape is None else f"{self.table}: {self.shape}"


def plan_for(
    family: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    num_tokens: int,
    num_heads: int,
    k_dim: int,
    v_dim: int,
    num_key_heads: int | None = None,
    num_angles: int = 0,
    num_segments: int = 1,
):
    """The plan for these shapes. Heads are those of this rank; `num_key_heads` None: as many as `num_heads`.

    `num_segments`: how many the walks shall go through at once.

    Raises:
        ValueError: STATEFLOW_PLAN_TABLE names no table.
    """
    if _forced is not None:
        return _forced
    bucket = bucket_of(num_tokens)
    key_heads = num_heads if num_key_heads is None else num_key_heads
    sizes = (num_heads, key_heads, k_dim, v_dim, num_angles, num_segments)
    return _choose(family, device, dtype, batch, bucket, *sizes).plan


def choice_for(shape: Shape, device: torch.device) -> Choice:
    """As `plan_for`, and says where the plan is from."""
    dtype = getattr(torch, shape.dtype)
    sizes = (shape.num_heads, shape.num_key_heads, shape.k_dim, shape.v_dim, shape.num_angles, shape.segments)
    return _choose(shape.family, device, dtype, shape.batch, bucket_of(shape.tokens), *sizes)


def state() -> tuple:
    """Changes whenever an earlier answer may no longer hold: for callers that keep answers."""
    return _forced, _reloads


@contextlib.contextmanager
def using(plan) -> Iterator[None]:
    """Every call within takes this plan, in all threads: for measurements."""
    global _forced
    before, _forced = _forced, plan
    try:
        yield
    finally:
        _forced = before


def reload() -> None:
    """Forgets what was read: the next call reads the tables again."""
    global _reloads
    _reloads += 1
    _choose.cache_clear()
    _tables.cache_clear()


@functools.cache
def _choose(
    family: str,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    bucket: int,
    num_heads: int,
    num_key_heads: int,
    k_dim: int,
    v_dim: int,
    num_angles: int,
    num_segments: int,
) -> Choice:
    name = str(dtype).removeprefix("torch.")
    sizes = (num_heads, num_key_heads, k_dim, v_dim)
    wanted = Shape(family, *sizes, name, batch, bucket, num_angles, num_segments)
    for table in _tables(_device_name(device)) if device.type == "cuda" else ():
        entry = table.nearest(wanted)
        if entry is not None:
            plan = entry.plan
            if getattr(plan, "num_segments", num_segments) != num_segments:  # a shape near by, or a table made by hand
                plan = dataclasses.replace(plan, num_segments=num_segments)
            return Choice(plan, entry.shape, table.source)
    if num_segments > 1:
        choice = _choose(family, device, dtype, batch, bucket, *sizes, num_angles, 1)
        return dataclasses.replace(choice, plan=in_segments(choice.plan, num_segments, v_dim))
    return Choice(fallback_plan(device, dtype, k_dim, v_dim, family, batch * num_heads))


def fallback_plan(
    device: torch.device, dtype: torch.dtype, k_dim: int, v_dim: int, family: str = "gated_delta_rule", heads: int = 0
):
    """The plan that fits any shape on this device. `heads`: of all sequences, if known; no bits depend on it."""
    if device.type != "cuda":
        return DEFAULTS[family](k_dim, v_dim, dtype)
    shared_memory = shared_memory_of(device)
    plan = DEFAULTS[family](k_dim, v_dim, dtype, shared_memory)
    if family == "gated_delta_rule" and dtype != torch.float32 and hopper.available(device):
        plan = _with_specialized_kernels(plan, k_dim, v_dim, shared_memory)
    if family == "mamba3" and dtype != torch.float32 and hopper.available(device):
        tiles = {name: dataclasses.replace(getattr(plan, name), specialized=True) for name in mamba3_rule.SPECIALIZED}
        plan = dataclasses.replace(plan, **tiles)
        if (k_dim, v_dim) in {size[:2] for size in hopper_mamba3.SIZES}:
            plan = dataclasses.replace(plan, gradient_heads=hopper_mamba3.GRADIENT_HEADS)
        plan = _with_shallow_scans(plan, heads, v_dim, hopper_mamba3.num_multiprocessors(device))
    return plan


def _with_shallow_scans(plan, heads: int, v_dim: int, num_multiprocessors: int):
    """With shorter load pipelines where scans are many programs: those of 80 heads are 7 to 9 % faster on an H200."""
    changes = {}
    for name in ("scan", "scan_backward"):
        tile = getattr(plan, name)
        if heads * triton.cdiv(v_dim, tile.block_v) >= MANY_WALKS * num_multiprocessors:
            changes[name] = dataclasses.replace(tile, num_stages=SHALLOW)
    return dataclasses.replace(plan, **changes)


def _with_specialized_kernels(plan, k_dim: int, v_dim: int, shared_memory: int):
    changes = {}
    if k_dim in hopper.K_DIMS:
        changes["pre"] = dataclasses.replace(plan.pre, specialized=True)
    walks, together = ("transition", "transition_backward"), 0
    for name in walks:
        backward, columns = name == "transition_backward", getattr(plan, name).block_v
        stages = hopper.default_stages(backward, k_dim, columns, shared_memory)
        if k_dim in hopper.K_DIMS and v_dim % columns == 0 and stages is not None:
            changes[name] = Tile(columns, 4, stages, specialized=True)
            together += hopper.shared_bytes(backward, k_dim, columns, 2) + 1024
    # By themselves the two of the backward are faster with deep load pipelines. At once they are faster than that.
    if all(name in changes for name in walks) and together <= shared_memory:
        changes |= {name: dataclasses.replace(changes[name], num_stages=2) for name in walks}
        changes["overlap_backward"] = True
    tile = plan.transition_out
    stages = hopper.default_out_stages(k_dim, tile.block_v, shared_memory)
    if k_dim in hopper.K_DIMS and v_dim % tile.block_v == 0 and stages is not None:
        changes["transition_out"] = Tile(tile.block_v, 4, stages, specialized=True)
    merges = {k_dim, v_dim} <= set(hopper.MERGED_DIMS)
    return dataclasses.replace(plan, **changes, gradient_chunks=8 if merges else 0)


def in_segments(plan, num_segments: int, v_dim: int):
    """The plan for walks through several segments at once: without cuts, and on Hopper with wide blocks of columns.

    There are programs enough then, and wide ones read less.
    """
    wide = {}
    if all(getattr(plan, name).specialized and v_dim % tile.block_v == 0 for name, tile in WIDE_WALKS.items()):
        wide = WIDE_WALKS
    unused = dict(cuts=(), backward_cuts=(), overlap_backward=False)
    return dataclasses.replace(plan, **wide, **unused, num_segments=num_segments)


def shared_memory_of(device: torch.device) -> int:
    """Bytes that a program may have."""
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 101_376)  # what every GPU since 2020 has


def _device_name(device: torch.device) -> str:
    return normalized(torch.cuda.get_device_properties(device).name)


def environment_of(device: torch.device) -> Environment:
    return _environment(_device_name(device))


def _environment(device_name: str) -> Environment:
    versions = (numbers_of(torch.__version__, 2), numbers_of(triton.__version__, 3))
    return Environment(device_name, *versions, ptxas_version() or "unknown")


def ptxas_version() -> str | None:
    """The version of the assembler that Triton calls; None if there is none."""
    return assembler.version_of(assembler.ptxas_path())


def user_table_path(environment: Environment) -> Path:
    """Where the user's table for this environment is, whether or not it exists."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "stateflow" / "plans" / environment.file_name


@functools.cache
def _tables(device_name: str) -> tuple[Table, ...]:
    """Those for this GPU, in the order in which they count."""
    environment = _environment(device_name)
    tables, path = [], user_table_path(environment)
    if os.environ.get(VARIABLE):
        tables.append(load(path))
    elif path.exists():
        try:
            tables.append(load(path))
        except ValueError as error:
            logger.warning("ignored: %s", error)
    shipped = [load(path) for path in sorted(SHIPPED.glob("*.json"))]
    # Stable: by name among those for other versions.
    tables += sorted(shipped, key=lambda table: table.environment != environment)
    return tuple(table for table in tables if table.environment.device == device_name)


def table_entries() -> list[str]:
    """The measured plans for the GPUs of this machine, in the order in which they count, for people to read.

    Without a GPU: the shipped ones. A line that starts a table says where it does not fit what is installed.
    """
    names = sorted({_device_name(torch.device("cuda", i)) for i in range(torch.cuda.device_count())})
    here = {name: _environment(name) for name in names}
    tables = [table for name in names for table in _tables(name)]
    if not names:
        tables = [load(path) for path in sorted(SHIPPED.glob("*.json"))]
    return [line for table in tables for line in _describe(table, here.get(table.environment.device))]


def _describe(table: Table, here: Environment | None) -> list[str]:
    note = ""
    if here is not None and here != table.environment:
        note = f"; measured with other versions than here ({here}): run stateflow tune-kernels for these"
    lines = [f"{table.source} ({table.environment}){note}"]
    for entry in table.entries:
        times = entry.evidence
        if {"forward_ms", "backward_ms", "default_forward_ms", "default_backward_ms"} <= times.keys():
            measured = f"{times['forward_ms']:.3f} + {times['backward_ms']:.3f} ms"
            measured += f" (default {times['default_forward_ms']:.3f} + {times['default_backward_ms']:.3f})"
        else:
            measured = "no times"
        lines.append(f"  {entry.shape}: {measured}")
    return lines
