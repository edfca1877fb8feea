"""Starting other programs so that none of them outlives this one."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Sequence

GRACE_SECONDS = 30.0


def run_to_its_end(command: Sequence[str], **kwargs) -> int:
    """Runs ``command`` and returns its exit status; SIGTERM, SIGHUP and Ctrl-C are passed on to it and waited for.

    Without this a stopped parent (a scheduler, ``timeout``, a cancelled job) would leave torchrun and its workers.
    """
    child = subprocess.Popen(command, **kwargs)

    def leave(signum, _frame):
        raise SystemExit(128 + signum)  # on the way out the child is ended

    previous = {s: signal.signal(s, leave) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_SECONDS)
            child.kill()
            child.wait()
