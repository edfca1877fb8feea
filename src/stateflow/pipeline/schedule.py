"""The schedule as data: which rank runs which action, in which order.

A unit is (microbatch a, chunk i). An action is one step of one unit on one stage; as text it reads
stage, kind, microbatch, chunk: ``2F1.3`` is stage 2, forward, microbatch 1, chunk 3. A schedule is one
list of compute actions a rank; sends and receives are added by ``lowering.lower``. Nothing here knows
torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class ScheduleError(ValueError):
    """A table that must not run: the message names the first broken relation and what to change."""


class Kind(StrEnum):
    """What an action does."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # gradients of the inputs only
    W = "W"  # gradients of the weights, after I
    SEND_F = "SEND_F"  # activation to the next stage
    RECV_F = "RECV_F"  # activation from the previous stage
    SEND_B = "SEND_B"  # gradient to the previous stage
    RECV_B = "RECV_B"  # gradient from the next stage


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
_ACTION = re.compile(r"([0-9]+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)([0-9]+)\.([0-9]+)")

_TORCH_ACTION = re.compile(r"([0-9]+)(F|B|I|W)([0-9]+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of the unit (microbatch, chunk) on a stage. ``str`` and ``Action.parse`` are inverse."""

    stage: int
    kind: Kind
    microbatch: int
    chunk: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as ``text``.

        Raises:
            ValueError: if the text is no action.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is no action; write stage, kind, microbatch.chunk, as in 2F1.3 or 0SEND_F1.3"
            )
        stage, kind, microbatch, chunk = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch), int(chunk))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}.{self.chunk}"

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE


Table = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """A schedule of compute actions. It may be wrong; ``checker.check_schedule`` says whether it is legal.

    Attributes:
        policy: name of the policy that made it, a single word.
        stage_to_rank: the rank of each stage.
        table: for each rank its actions in program order.
        peak_in_flight: for each stage the declared peak of units that have run F but not yet B (or W).
    """

    policy: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_chunks: int
    stage_to_rank: tuple[int, ...]
    table: Table
    peak_in_flight: tuple[int, ...]

    def unit(self, microbatch: int, chunk: int) -> int:
        """Index u = a * N + i of a unit; torch calls it the microbatch index."""
        return microbatch * self.num_chunks + chunk

    def unit_of(self, unit: int) -> tuple[int, int]:
        """(a, i) of a unit index; the inverse of ``unit``."""
        return divmod(unit, self.num_chunks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.stage_to_rank) if owner == rank)

    def split_stages(self) -> tuple[int, ...]:
        """The stages that run I and W for at least one unit."""
        return tuple(sorted({action.stage for row in self.table for action in row if action.kind is Kind.I}))

    def to_text(self) -> str:
        """The schedule as text: a header with the sizes, then one line a rank."""
        header = [
            f"policy {self.policy}",
            f"sizes {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatches, {self.num_chunks} chunks",
            f"stage_to_rank {_join(self.stage_to_rank)}",
            f"peak_in_flight {_join(self.peak_in_flight)}",
        ]
        return "\n".join(header) + "\n" + table_to_text(self.table)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """The schedule that ``to_text`` printed. Blank lines and lines that start with # are skipped.

        Raises:
            ValueError: naming the line that cannot be read, or the header entry that is missing.
        """
        header: dict[str, str] = {}
        rows: list[tuple[Action, ...]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, _, rest = line.partition(" ")
            try:
                if key == "rank":
                    rows.append(_parse_row(rest, len(rows)))
                elif key in _HEADER and key not in header:
                    header[key] = rest.strip()
                else:
                    raise ValueError(
                        f"{key!r} is repeated or unknown; known are rank and, once each, {', '.join(_HEADER)}"
                    )
            except ValueError as error:
                raise ValueError(f"line {number} of the schedule: {error}") from None
        missing = [key for key in _HEADER if key not in header]
        if missing:
            raise ValueError(f"the schedule has no line that starts with {missing[0]!r}; add it")
        sizes = _SIZES.fullmatch(header["sizes"])
        if sizes is None:
            raise ValueError(
                f"sizes {header['sizes']!r} cannot be read; "
                "write '2 ranks, 2 stages, 4 microbatches, 8 chunks'"
            )
        return cls(
            header["policy"],
            *map(int, sizes.groups()),
            stage_to_rank=_parse_numbers("stage_to_rank", header),
            table=tuple(rows),
            peak_in_flight=_parse_numbers("peak_in_flight", header),
        )

    def to_csv(self) -> str:
        """The table alone as CSV: one line a rank, one action a cell."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.table)

    @classmethod
    def from_csv(cls, text: str, num_chunks: int | None = None) -> Schedule:
        """A schedule from a table of actions; everything else follows from it. It may be wrong, as any schedule.

        One line a rank. A cell is an action, ``2F1.3``, or as torch writes it with the index of the unit, ``2F7`` for
        a * num_chunks + i = 7; empty cells are idle time and are skipped, as are lines that start with #. A table with
        cells of the second kind is of ``num_chunks`` chunks; otherwise it says itself how many there are.

        Raises:
            ValueError: naming line and cell that cannot be read.
        """
        rows: list[tuple[Action, ...]] = []
        by_unit = False
        lines = [line.strip() for line in text.splitlines()]
        for number, line in enumerate(lines, start=1):
            if not line or line.startswith("#"):
                continue
            row = []
            for cell, word in enumerate(line.split(","), start=1):
                if not word.strip():
                    continue
                try:
                    by_unit |= _TORCH_ACTION.fullmatch(word.strip()) is not None
                    row.append(_parse_cell(word.strip(), num_chunks))
                except ValueError as error:
                    raise ValueError(f"line {number}, cell {cell} of the schedule: {error}") from None
            rows.append(tuple(row))
        owners = {action.stage: rank for rank, row in enumerate(rows) for action in row}
        if not owners:
            raise ValueError("the schedule holds no action; write one line a rank, e.g. 0F0.0,0F0.1,0B0.1,0B0.0")
        missing = [stage for stage in range(max(owners)) if stage not in owners]
        if missing:
            raise ValueError(f"no rank of the schedule runs stage {missing[0]}, but one runs stage {max(owners)}")
        num_stages = len(owners)
        if not by_unit:
            num_chunks = 1 + max(action.chunk for row in rows for action in row)
        return cls(
            policy="imported",
            num_ranks=len(rows),
            num_stages=num_stages,
            num_microbatches=1 + max(action.microbatch for row in rows for action in row),
            num_chunks=num_chunks,
            stage_to_rank=tuple(owners[stage] for stage in range(num_stages)),
            table=tuple(rows),
            peak_in_flight=in_flight_peaks(rows, num_stages),
        )

    def digest(self) -> str:
        """SHA-256 of the text form in hex, for ranks to compare: with different schedules they would hang."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()


def table_to_text(table: Sequence[Iterable[Action]]) -> str:
    """A table of actions, lowered or not, one line a rank."""
    return "".join(f"rank {rank}: {_join(actions)}".rstrip() + "\n" for rank, actions in enumerate(table))


def in_flight_peaks(table: Sequence[Iterable[Action]], num_stages: int) -> tuple[int, ...]:
    """For each stage the largest number of units at once between their F and their B (or W)."""
    now, peak = [0] * num_stages, [0] * num_stages
    for actions in table:
        for action in actions:
            now[action.stage] += in_flight_change(action)
            peak[action.stage] = max(peak[action.stage], now[action.stage])
    return tuple(peak)


def in_flight_change(action: Action) -> int:
    """+1 for the action that puts its unit in flight (F), -1 for the one that retires it (B or W), else 0."""
    if action.kind is Kind.F:
        return 1
    return -1 if action.kind in (Kind.B, Kind.W) else 0


_HEADER = ("policy", "sizes", "stage_to_rank", "peak_in_flight")
_SIZES = re.compile(r"(\d+) ranks, (\d+) stages, (\d+) microbatches, (\d+) chunks")


def _join(items: Iterable[object]) -> str:
    return " ".join(map(str, items))


def _parse_row(text: str, expected_rank: int) -> tuple[Action, ...]:
    rank, colon, actions = text.partition(":")
    if not colon or rank.strip() != str(expected_rank):
        raise ValueError(
            f"'rank {text[:20]}' should start with 'rank {expected_rank}:'; ranks are listed from 0, in order"
        )
    return tuple(Action.parse(word) for word in actions.split())


def _parse_cell(word: str, num_chunks: int | None) -> Action:
    """An action as ``Action.parse`` or as torch writes it."""
    match = _TORCH_ACTION.fullmatch(word)
    if match is None:
        return Action.parse(word)
    if num_chunks is None:
        raise ValueError(f"{word!r} counts units, which need a number of chunks; write microbatch.chunk, as in 2F1.3")
    stage, kind, unit = match.groups()
    return Action(int(stage), Kind(kind), *divmod(int(unit), num_chunks))


def _parse_numbers(key: str, header: dict[str, str]) -> tuple[int, ...]:
    try:
        return tuple(map(int, header[key].split()))
    except ValueError:
        raise ValueError(f"{key} {header[key]!r} cannot be read; write one integer a stage") from None
