"""Tables of measured plans, as JSON files. A file holds the entries of one environment.

    {"device": "nvidia_h200", "torch": "2.11", "triton": "3.6.0", "ptxas": "12.8.93",
     "entries": [{"shape": {...}, "plan": {...}, "evidence": {...}}, ...]}

An entry applies to its K, V (Mamba-3: N, P, angles) and dtype only: what a kernel needs of registers and shared memory
depends on these, not on how many heads, sequences or tokens there are. Of the entries that apply, the nearest counts.
"""

import dataclasses
import itertools
import json
import math
import os
import re
import tempfile
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .gated_delta_rule import Plan
from .mamba3_rule import Mamba3Plan

PLAN_TYPES = {"gated_delta_rule": Plan, "mamba3": Mamba3Plan}


def bucket_of(num_tokens: int) -> int:
    """The nearest power of two, by ratio."""
    return 1 << round(math.log2(num_tokens))


def normalized(device_name: str) -> str:
    """The name of a GPU as tables have it: "NVIDIA H200" is nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


def numbers_of(version: str, count: int) -> str:
    """The first numbers of a version: 2.11.0+cu130 to two is 2.11."""
    return ".".join(re.findall(r"\d+", version.split("+")[0])[:count])


@dataclass(frozen=True)
class Environment:
    """What measured times depend on besides the shape."""

    device: str
    torch: str
    triton: str
    ptxas: str

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}, triton {self.triton}, ptxas {self.ptxas}"

    @property
    def file_name(self) -> str:
        return f"{self.device}-torch{self.torch}-triton{self.triton}-ptxas{self.ptxas}.json"


@dataclass(frozen=True)
class Shape:
    """A kind of call. `tokens` is a bucket: a power of two; heads are those of one rank.

    For "mamba3" k_dim and v_dim are N and P, num_key_heads is 1, and num_angles counts; else it is 0. `segments`: how
    many are walked through at once; above 1 only without exact order.
    """

    family: str
    num_heads: int
    num_key_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    batch: int
    tokens: int
    num_angles: int = 0
    segments: int = 1

    def __str__(self) -> str:
        heads = f"{self.num_heads} heads"
        if self.num_key_heads != self.num_heads:
            heads += f" of {self.num_key_heads}"
        batch = f"{self.batch} x " if self.batch > 1 else ""
        sizes = f"{self.k_dim} x {self.v_dim}" + (f" and {self.num_angles} angles" if self.num_angles else "")
        segments = f" in {self.segments} segments" if self.segments > 1 else ""
        return f"{self.family}, {heads}, {sizes}, {self.dtype}, {batch}{self.tokens} tokens{segments}"

    def applies_to(self, wanted: "Shape") -> bool:
        same = ("family", "k_dim", "v_dim", "num_angles", "dtype")
        alike = (self.segments > 1) == (wanted.segments > 1)
        return alike and all(getattr(self, name) == getattr(wanted, name) for name in same)

    def distance(self, wanted: "Shape") -> tuple[float, ...]:
        """How far from `wanted`; most important first: the number of independent walks, then how they come about."""
        return (
            abs(math.log2(self.batch * self.num_heads / (wanted.batch * wanted.num_heads))),
            abs(math.log2(self.num_heads / wanted.num_heads)),
            abs(math.log2(self.num_key_heads / wanted.num_key_heads)),
            abs(math.log2(self.tokens / wanted.tokens)),
            abs(self.segments - wanted.segments),
        )


@dataclass(frozen=True)
class Entry:
    """A plan for a shape, with what was measured: times in ms of it and of the default plan, and the date."""

    shape: Shape
    plan: typing.Any
    evidence: dict = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Table:
    environment: Environment
    entries: tuple[Entry, ...]
    source: str = ""

    def nearest(self, wanted: Shape) -> Entry | None:
        """Of the entries for the same family, K, V and dtype the nearest; None if there is none."""
        fitting = [entry for entry in self.entries if entry.shape.applies_to(wanted)]
        return min(fitting, key=lambda entry: entry.shape.distance(wanted), default=None)


def to_json(value):
    """A dataclass of dataclasses, tuples, numbers and strings as what `json` writes."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [to_json(x) for x in value] if isinstance(value, tuple) else value


def from_json(kind, value):
    """The inverse of `to_json`. Fields that are missing take their default.

    Raises:
        ValueError: a field that `kind` does not have, or a value of another type.
    """
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or not value.keys() <= hints.keys():
            raise ValueError(f"{value!r} must be a table with the keys {', '.join(hints)}")
        try:
            return kind(**{name: from_json(hints[name], x) for name, x in value.items()})
        except TypeError as error:  # a field without default is missing
            raise ValueError(f"{value!r}: {error}") from error
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{value!r} must be a list")
        return tuple(from_json(typing.get_args(kind)[0], x) for x in value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{value!r} must be of type {kind.__name__}")
    return value


def check_plan(plan) -> None:
    """Raises ValueError if no launch could look like this."""
    for name, value in vars(plan).items():
        if dataclasses.is_dataclass(value):
            block, warps, stages = value.block_v, value.num_warps, value.num_stages
            smallest = 8 if name.startswith("scan") else 16  # no products there, whose sides are 16 at least
            if block not in range(smallest, 257) or block & (block - 1):
                raise ValueError(f"{name}: block_v = {block} must be a power of two from {smallest} to 256")
            if warps not in (1, 2, 4, 8, 16) or not 1 <= stages <= 8:
                launch = f"num_warps = {warps} must be 1, 2, 4, 8 or 16 and num_stages = {stages} from 1 to 8"
                raise ValueError(f"{name}: {launch}")
        elif isinstance(value, tuple) and not all(a < b for a, b in itertools.pairwise((0.0, *value, 1.0))):
            raise ValueError(f"{name} = {list(value)} must be shares between 0 and 1 that increase")


def _entry(value: dict) -> Entry:
    shape = from_json(Shape, value["shape"])
    if shape.family not in PLAN_TYPES:
        raise ValueError(f"unknown family {shape.family!r}: use one of {', '.join(PLAN_TYPES)}")
    numbers = [x for name, x in vars(shape).items() if isinstance(x, int) and name != "num_angles"]
    if min(numbers) < 1 or shape.num_angles < 0 or not isinstance(getattr(torch, shape.dtype, None), torch.dtype):
        raise ValueError(f"{shape} is no shape")
    plan = from_json(PLAN_TYPES[shape.family], value["plan"])
    check_plan(plan)
    return Entry(shape, plan, dict(value.get("evidence", {})))


def load(path: Path) -> Table:
    """Reads a table.

    Raises:
        ValueError: there is no such file, or it is no table.
    """
    try:
        content = json.loads(path.read_text())
        header = {f.name: content[f.name] for f in dataclasses.fields(Environment)}
        return Table(from_json(Environment, header), tuple(map(_entry, content["entries"])), str(path))
    except OSError as error:
        raise ValueError(f"the table of plans {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is no table of plans: {what}") from error


def save(path: Path, environment: Environment, entries: Iterable[Entry]) -> Table:
    """Writes the entries, beside those for other shapes that the file already has for the same environment."""
    found = {}
    if path.exists():
        table = load(path)
        if table.environment != environment:
            raise ValueError(
                f"{path} is a table for {table.environment}, this is {environment}: name another file, or remove it"
            )
        found = {entry.shape: entry for entry in table.entries}
    found |= {entry.shape: entry for entry in entries}
    ordered = sorted(found.values(), key=lambda entry: tuple(vars(entry.shape).values()))
    lines = ",\n".join(
        "  " + json.dumps({"shape": to_json(e.shape), "plan": to_json(e.plan), "evidence": e.evidence}) for e in ordered
    )
    header = json.dumps(to_json(environment))[:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may read meanwhile: it sees the old file or the new one.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(f'{header}, "entries": [\n{lines}\n]}}\n')
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return Table(environment, tuple(ordered), str(path))
