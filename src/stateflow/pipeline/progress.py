"""What a rank is doing, action by action, so that a failed or hanging run can say where and for whom it waited."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from stateflow.launch import REPORTS
from stateflow.pipeline.schedule import Action, Kind

Message = tuple[Kind, int, int, int]  # (SEND_F or SEND_B, sending stage, microbatch, chunk)

_OPERATIONS = {
    Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient",
    Kind.SEND_F: "send of the activation", Kind.SEND_B: "send of the gradient",
    Kind.RECV_F: "receive of the activation", Kind.RECV_B: "receive of the gradient",
}  # fmt: skip


class PeerError(RuntimeError):
    """A send or receive failed; the message names stage, operation, microbatch, chunk and peer."""


class Place(NamedTuple):
    """Where a rank is: within ``action``, for the sake of rank ``peer`` if it is given.

    With ``message`` it waits for that to come from there, or with ``sent`` to be taken there.
    """

    action: Action | None = None
    peer: int | None = None
    message: Message | None = None
    sent: bool = False
    done: bool = False

    def describe(self, name_peer: Callable[[int], str] = str) -> str:
        if self.action is None:
            where = "before the first action of a step"
        else:
            a = self.action
            where = f"stage {a.stage}, {_OPERATIONS[a.kind]} of microbatch {a.microbatch}, chunk {a.chunk} ({a})"
        if self.done:
            where = f"behind {where}"
        if self.peer is None:
            return where
        if self.message is None:
            return f"{where}, with rank {name_peer(self.peer)}"
        kind, stage, microbatch, chunk = self.message
        what = f"the {'activation' if kind is Kind.SEND_F else 'gradient'} of microbatch {microbatch}, chunk {chunk}"
        if self.sent:
            return f"{where}, waits for rank {name_peer(self.peer)} to take {what} from stage {stage}"
        return f"{where}, waits for {what} from stage {stage} on rank {name_peer(self.peer)}"


class Mark(NamedTuple):
    """Behind something that the device was given to do, at that ``time`` in seconds."""

    place: Place
    event: object
    time: float


class Progress:
    """The place of one rank, noted by its stages.

    Args:
        rank: this rank in the pipeline's group; peers are numbers of that group, too.
        timeout: seconds after which a wait has failed, asked for anew each time; None for never.
        record: leaves a mark behind what the device has been given to do, of which ``mark.query()`` says if it is
            done; None where the host itself waits.
        name_peer: how a report calls a peer.
        clock: tells seconds.
    """

    def __init__(
        self,
        rank: int,
        timeout: Callable[[], float | None] = lambda: None,
        record: Callable[[], object] | None = None,
        name_peer: Callable[[int], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.rank, self.timeout, self.record, self.name_peer, self.clock = rank, timeout, record, name_peer, clock
        self.in_step = False
        self.raised = False  # the last step did, which says why the process ends
        self.place = Place()
        self.changes = 0  # how often the host's place has changed
        self.marks: deque[Mark] = deque()  # oldest first, without those seen to be done
        self.pending: Callable[[], list[Message]] = list  # sends that are not known to have arrived

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around all actions of a step. Any exception of theirs gets a note of the place."""
        self._move(Place())
        self.in_step, self.raised = True, False
        try:
            yield
        except BaseException as error:
            self.raised = True
            leave_word(None)
            if isinstance(error, Exception) and not isinstance(error, PeerError):
                error.add_note(self.report("failed"))
            raise
        finally:
            self.in_step = False

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Around all that an action does."""
        self._move(Place(action))
        yield
        if action.is_compute:
            self._mark()
        self._move(Place(action, done=True))

    @contextmanager
    def with_peer(self, peer: int, message: Message | None = None, *, sent: bool = False) -> Iterator[None]:
        """Around what may fail on account of rank ``peer``: the wait for a message, or the start of an operation.

        Raises PeerError for a RuntimeError within.
        """
        outer = self.place
        self._move(outer._replace(peer=peer, message=message, sent=sent))
        try:
            yield
        except torch.OutOfMemoryError:
            raise  # this rank's own fault
        except RuntimeError as error:
            report = self.report(str(error).strip())
            publish(report)
            raise PeerError(report) from error
        if message is not None:
            self._mark()
        self._move(outer)

    def wait(self, work: dist.Work) -> None:
        """Waits; where the host does so itself not longer than the timeout of now, which torch's own may not be."""
        seconds = self.timeout() if self.record is None else None
        if seconds is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=seconds))

    def report(self, why: str, place: Place | None = None) -> str:
        place = self.place if place is None else place
        report = f"StateFlow: rank {self.name_peer(self.rank)}, {place.describe(self.name_peer)}: {why}"
        if pending := self.pending():
            sends = ", ".join(f"{stage}{kind}{a}.{i}" for kind, stage, a, i in pending)
            report += f"\nStateFlow: sends that are not known to have arrived: {sends}"
        return report

    def _move(self, place: Place) -> None:
        self.place = place
        self.changes += 1

    def _mark(self) -> None:
        if self.record is not None:
            self.marks.append(Mark(self.place, self.record(), self.clock()))


def publish(report: str) -> None:
    """Prints a report to stderr, and appends it to a file of this process where ``REPORTS`` asks for that."""
    with suppress(OSError, ValueError):  # whatever else fails, a closed stream is no reason to go on
        print(report, file=sys.stderr, flush=True)
    if path := _own_file(".txt"):
        with suppress(OSError), path.open("a") as stream:
            stream.write(report + "\n")


def leave_word(report: str | None) -> None:
    """What the launcher prints if this process ends without a report of its own, say by SIGKILL; None takes it back."""
    if path := _own_file(".last"):
        with suppress(OSError):
            path.unlink(missing_ok=True) if report is None else path.write_text(report + "\n")


def _own_file(suffix: str) -> Path | None:
    folder = os.environ.get(REPORTS)
    return Path(folder) / f"rank_{os.environ.get('RANK', os.getpid())}{suffix}" if folder else None
