"""The end of a rank whose peer no longer answers.

With gloo a send or receive raises: at once if the peer is gone, after the group's timeout if it hangs.  With NCCL it
only tells the stream to wait: the host runs ahead and nothing raises, until NCCL's own watchdog aborts the process with
a message that names no action.  Events behind each message and each action (``Progress.marks``) tell the ``Watchdog``
how far the device has come; it looks at them now and then from a thread of its own, so units wait for nothing.

A process may end before that: killed, or aborted by NCCL, which between hosts sees at once that a peer is gone.  What
the watchdog saw last is then in a file for the launcher.

The timeout is that of the pipeline's process group at the moment, hence torchtitan's ``comm.init_timeout_seconds`` up
to the end of the first step and ``comm.train_timeout_seconds`` from then on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from stateflow.pipeline.progress import PeerError, Place, Progress, leave_word, publish

EARLY = 0.9  # of NCCL's timeout: its own watchdog ends the process after all of it
LATE = 1.1  # of gloo's: its operations raise after all of it
MAX_POLL_SECONDS = 1.0


class Watchdog:
    """Ends the process when a wait for a peer has seen no progress for the timeout, with a report of where.

    A computation that takes as long, e.g. because it compiles, is reported once and left alone: where it keeps others
    waiting, they end.
    """

    def __init__(self, progress: Progress, device: torch.device, end: Callable[[str], None] | None = None):
        self._progress = weakref.ref(progress)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # of this thread, which will not watch
        self._device = device
        self._end = end or end_process
        self._thread: threading.Thread | None = None
        self._changes, self._since, self._reported = -1, 0.0, False
        self._left_word = False

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="stateflow-watchdog", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else the first query would open a context on device 0
        while (poll := self._watch_once()) is not None:  # without a hold on progress: its owner may go in the meantime
            time.sleep(poll)

    def _watch_once(self) -> float | None:
        """Returns the seconds to the next time; None if there is nothing left to watch."""
        progress = self._progress()
        if progress is None:
            return None
        poll = self.look(progress, time.monotonic())
        if (progress.in_step or progress.marks) and not progress.raised:
            leave_word(progress.report("its process ended without a word; last seen here", where(progress)))
            self._left_word = True
        elif self._left_word:  # not another pipeline's of this process
            leave_word(None)
            self._left_word = False
        return poll

    def look(self, progress: Progress, now: float) -> float:
        """Takes one look; returns the seconds to the next."""
        limit = progress.timeout()
        if limit is None:
            return MAX_POLL_SECONDS
        limit *= LATE if progress.record is None else EARLY
        moved = _drop_marks_that_are_done(progress)
        busy = progress.in_step or progress.marks
        if moved or not busy or progress.changes != self._changes:
            self._changes, self._since, self._reported = progress.changes, now, False
        place, asked = _front(progress)
        waited = now - self._since
        # NCCL's clock counts from there. Where the device has just come to this message it may be there already.
        if asked is not None and not moved and now - asked > max(limit, waited):
            self._report_once(progress, place, f"still not there {now - asked:.1f} s after it was asked for")
        elif waited > limit:
            self._report_once(progress, place, f"no progress for {waited:.1f} s")
        return min(MAX_POLL_SECONDS, limit / 20)

    def _report_once(self, progress: Progress, place: Place, why: str) -> None:
        if not self._reported:
            self._reported = True
            (publish if place.peer is None else self._end)(progress.report(why, place))


def where(progress: Progress) -> Place:
    """What the device has to do next, or if that is nothing, where the host is."""
    return _front(progress)[0]


def _front(progress: Progress) -> tuple[Place, float | None]:
    """`where`, and if the device waits for a peer there since when it was to."""
    with suppress(IndexError):
        mark = progress.marks[0]
        return mark.place, None if mark.place.peer is None else mark.time
    return progress.place, None


def _drop_marks_that_are_done(progress: Progress) -> bool:
    dropped = False
    with suppress(RuntimeError):  # an error of the device, which the main thread meets by itself
        while progress.marks and progress.marks[0].event.query():
            progress.marks.popleft()
            dropped = True
    return dropped


def make_progress(group: dist.ProcessGroup | None, device: torch.device) -> Progress:
    """For a pipeline over ``group``, by default of all ranks: its timeout, and on a GPU events."""
    group = group or dist.group.WORLD

    def name(rank: int) -> str:
        among_all = dist.get_global_rank(group, rank)
        return str(rank) if among_all == rank else f"{rank} of the pipeline (rank {among_all} of all)"

    record = _record_event if device.type == "cuda" else None
    return Progress(dist.get_rank(group), group_timeout(group, device), record, name)


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> Callable[[], float | None]:
    """Tells the seconds that an operation of ``group`` may take, as set when asked; None if the backend does not."""

    def seconds() -> float | None:
        with suppress(AttributeError, RuntimeError):  # no such option, no such backend
            return group._get_backend(device).options._timeout.total_seconds()
        return None

    return seconds


def end_process(report: str) -> None:
    """Publishes the report, for torchrun's summary as well, and ends the process whatever its threads wait for."""
    publish(report)
    with suppress(Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(PeerError(report))
        sys.stdout.flush()
    os._exit(1)


_watched: weakref.WeakSet[Progress] = weakref.WeakSet()


def report_termination(progress: Progress) -> None:
    """From now on SIGTERM in the middle of a step is reported before it ends the process.

    torchrun sends it to all ranks when one is gone, mostly before any timeout.  Python runs a handler between two
    bytecodes of the main thread, which may wait for the device; so a thread answers.  Does nothing outside the main
    thread, or where the program has a handler of its own.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not _watched and in_main_thread and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        notes, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGTERM, _end_by_default)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)
        threading.Thread(target=_answer, args=(notes,), name="stateflow-sigterm", daemon=True).start()
    _watched.add(progress)


def _answer(notes: int) -> None:
    while signal.SIGTERM not in os.read(notes, 64):
        pass
    for progress in list(_watched):
        if progress.in_step or progress.marks:
            _drop_marks_that_are_done(progress)
            publish(progress.report("ended by SIGTERM", where(progress)))
    os._exit(128 + signal.SIGTERM)


def _end_by_default(signum, _frame) -> None:
    time.sleep(2.0)  # `_answer` is faster, if anything still notifies it
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _forget_signals() -> None:
    """In a forked child, e.g. of a data loader: it would write into the parent's pipe."""
    if signal.getsignal(signal.SIGTERM) is _end_by_default:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
