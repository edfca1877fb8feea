"""Starting other programs so that none of them outlives this one."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

GRACE_SECONDS = 30.0
WATCH_SECONDS = 0.2
REPORTS = "STATEFLOW_REPORTS"  # environment: a folder for the last words of processes, of which torchrun shows one's


@contextlib.contextmanager
def only_one(file: Path) -> Iterator[None]:
    """Holds a lock on ``file``, which stays; the system lets go of it when this process ends, however it does.

    Raises BlockingIOError where another process holds it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def end_with_parent() -> None:
    """Asks Linux for SIGTERM when the parent of this process dies: SIGKILL leaves it no time to pass one on."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def run_to_its_end(
    command: Sequence[str], *, timeout: float | None = None, watch: Callable[[], bool] | None = None, **kwargs
) -> int:
    """Runs ``command`` and returns its exit status; SIGTERM, SIGHUP and Ctrl-C are passed on to it and waited for.

    Without this a stopped parent (a scheduler, ``timeout``, a cancelled job) would leave torchrun and its workers.
    After ``timeout`` seconds it is ended and subprocess.TimeoutExpired raised; with ``watch`` instead, which is called
    every WATCH_SECONDS, as soon as that returns false.
    """
    before = end_with_parent if sys.platform == "linux" else None
    child = subprocess.Popen(command, preexec_fn=before, **kwargs)

    def leave(signum, _frame):
        raise SystemExit(128 + signum)  # on the way out the child is ended

    previous = {s: signal.signal(s, leave) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        while True:
            try:
                return child.wait(timeout if watch is None else WATCH_SECONDS)
            except subprocess.TimeoutExpired:
                if watch is None or not watch():
                    raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_SECONDS)
            child.kill()
            child.wait()
