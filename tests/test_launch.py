"""A stopped parent takes its children along."""

import os
import signal
import subprocess
import sys
import time

import pytest

CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
PARENT = f"import sys; from stateflow.launch import run_to_its_end; run_to_its_end([sys.executable, '-c', {CHILD!r}])"


def test_a_child_does_not_outlive_a_terminated_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(60) == 128 + signal.SIGTERM
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"process {child} still runs")


def test_the_exit_status_is_the_childs():
    from stateflow.launch import run_to_its_end

    assert run_to_its_end([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_what_is_watched_ends_once_it_should():
    from stateflow.launch import run_to_its_end

    asked = []

    def watch() -> bool:
        asked.append(None)
        return len(asked) < 3

    with pytest.raises(subprocess.TimeoutExpired):
        run_to_its_end([sys.executable, "-c", "import time; time.sleep(600)"], watch=watch)
    assert len(asked) == 3
    assert run_to_its_end([sys.executable, "-c", "raise SystemExit(3)"], watch=lambda: True) == 3
