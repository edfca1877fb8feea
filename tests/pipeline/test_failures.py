"""A rank that is killed or hangs ends the other one, which says what it was doing and for whom it waited."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from stateflow.pipeline import watchdog
from stateflow.pipeline.progress import PeerError, Place, Progress
from stateflow.pipeline.schedule import Action, Kind
from stateflow.pipeline.watchdog import EARLY, LATE, Watchdog
from tests.pipeline.failing_rank import TIMEOUTS

ANY_PLACE = r"stage {stage}, [a-z ]+ of microbatch \d, chunk \d \({stage}[A-Z_]+\d\.\d\), .*rank {peer}"

LIMIT = 300.0  # seconds in which processes have to end, on a machine that is busy with others

AWAITS_GRADIENT = (
    "stage 0, backward of microbatch 0, chunk 1 (0B0.1), waits for the gradient of microbatch 0, chunk 1 from stage 1 "
    "on rank 1"
)


def start(backend: str, folder, victim: int, signal_name: str, action: str, *options: str) -> list[subprocess.Popen]:
    command = [sys.executable, "-m", "tests.pipeline.failing_rank", backend]
    return [
        subprocess.Popen(
            [*command, str(rank), f"{folder}/store", str(victim), signal_name, action, *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


def survive(processes: list[subprocess.Popen], victim: int) -> tuple[int, str, float]:
    """Exit status of the survivor, what it wrote to stderr, and the seconds from its first step to its end."""
    survivor = processes[1 - victim]
    try:
        first = survivor.stdout.readline()
        begun = time.monotonic()
        _, errors = survivor.communicate(timeout=LIMIT)
        assert first == "step done\n", errors
        return survivor.returncode, errors, time.monotonic() - begun
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other(tmp_path, victim):
    processes = start("gloo", tmp_path, victim, "SIGKILL", ["0F1.0", "1F0.1"][victim])
    status, errors, _ = survive(processes, victim)
    assert status == 1
    # Where the survivor is when the connection breaks is up to the machine.
    assert re.search(f"StateFlow: rank {1 - victim}, " + ANY_PLACE.format(stage=1 - victim, peer=victim), errors)
    assert "PeerError" in errors


@pytest.mark.processes
def test_a_hanging_rank_ends_the_other_after_the_timeout(tmp_path):
    processes = start("gloo", tmp_path, 1, "SIGSTOP", "1F0.1")
    status, errors, seconds = survive(processes, 1)
    assert status == 1
    assert f"StateFlow: rank 0, {AWAITS_GRADIENT}: " in errors
    assert seconds >= TIMEOUTS["gloo"]


def check_sigterm(processes: list[subprocess.Popen], seconds: float) -> None:
    """Rank 0, whose peer hangs, gets SIGTERM some seconds after its first step, and says where it is."""
    assert processes[0].stdout.readline() == "step done\n"
    time.sleep(seconds)
    processes[0].send_signal(signal.SIGTERM)
    _, errors = processes[0].communicate(timeout=LIMIT)
    processes[1].kill()
    processes[1].communicate()
    assert processes[0].returncode == 128 + signal.SIGTERM
    assert f"StateFlow: rank 0, {AWAITS_GRADIENT}: ended by SIGTERM" in errors


@pytest.mark.processes
def test_sigterm_tells_the_place_although_the_main_thread_waits(tmp_path):
    check_sigterm(start("gloo", tmp_path, 1, "SIGSTOP", "1F0.0", "sigterm"), 1.0)


class Mark:
    done = False

    def query(self) -> bool:
        return self.done


class Asynchronous:
    """A rank whose host runs ahead of its device, and the watchdog's answers."""

    def __init__(self, timeout: float = 10.0, asked: float = 0.0):
        self.asked = asked  # when everything was given to the device
        self.progress = Progress(0, lambda: timeout, Mark, clock=lambda: self.asked)
        self.reports: list[str] = []
        self.watchdog = Watchdog(self.progress, torch.device("cpu"), self.reports.append)
        with self.progress.step():
            for chunk in range(2):
                message = (Kind.SEND_B, 1, 0, chunk)
                with self.progress.action(Action(0, Kind.B, 0, chunk)), self.progress.with_peer(1, message):
                    pass

    def look(self, now: float) -> None:
        self.watchdog.look(self.progress, now)

    def check_limit(self, since: float, why: str) -> None:
        """The second message is waited for, and reported once the limit of 9 s is over."""
        self.look(since + 10 * EARLY - 0.1)
        assert not self.reports
        self.look(since + 10 * EARLY + 0.1)
        assert len(self.reports) == 1
        assert self.reports[0].startswith(
            "StateFlow: rank 0, stage 0, backward of microbatch 0, chunk 1 (0B0.1), waits for the gradient of "
            f"microbatch 0, chunk 1 from stage 1 on rank 1: {why}"
        )


def test_the_watchdog_names_what_the_device_waits_for_not_where_the_host_is():
    rank = Asynchronous(asked=8.0)
    rank.look(0.0)
    for mark in list(rank.progress.marks)[:2]:
        mark[1].done = True
    rank.look(8.0)
    rank.check_limit(8.0, "no progress for 9.1 s")


def test_the_watchdog_counts_from_when_a_message_was_asked_for_as_nccl_does():
    """Otherwise a rank with work of its own after that is aborted by NCCL, which names no action."""
    rank = Asynchronous(asked=0.0)
    for now in (6.0, 8.0):  # the first message and what follows are there only now
        rank.progress.marks[0].event.done = True
        rank.look(now)
    rank.check_limit(0.0, "still not there 9.1 s after it was asked for")


def test_a_message_that_the_device_has_just_come_to_may_be_there():
    rank = Asynchronous(asked=0.0)
    rank.look(0.0)
    for mark in list(rank.progress.marks)[:2]:
        mark.event.done = True  # a computation that takes longer than the timeout
    rank.look(100.0)
    assert not rank.reports
    rank.look(100.1)
    assert len(rank.reports) == 1


def test_the_watchdog_leaves_a_long_computation_alone(capsys):
    rank = Asynchronous()
    rank.progress.marks.popleft()[1].done = True  # the first message has come
    rank.look(0.0)
    rank.look(1000.0)
    rank.look(2000.0)
    assert not rank.reports
    assert capsys.readouterr().err.count("stage 0, backward of microbatch 0, chunk 0 (0B0.0): no progress") == 1


def test_the_watchdog_is_quiet_while_there_is_progress_or_nothing_to_do():
    rank = Asynchronous(asked=20.0)
    rank.look(0.0)
    for now in range(8, 40, 8):
        rank.progress.marks[0][1].done = True
        rank.look(float(now))
    assert not rank.progress.marks
    rank.look(1000.0)
    assert not rank.reports


def test_the_watchdog_gives_a_waiting_host_more_than_the_timeout():
    progress, reports = Progress(0, lambda: 10.0), []
    dog = Watchdog(progress, torch.device("cpu"), reports.append)
    with progress.step(), progress.action(Action(0, Kind.F, 0, 0)), progress.with_peer(1, (Kind.SEND_F, 1, 0, 0)):
        for now in (0.0, 10 * LATE - 0.1):
            dog.look(progress, now)
        assert not reports
        dog.look(progress, 10 * LATE + 0.1)
    assert len(reports) == 1


def test_reports_list_what_was_sent_and_tell_sends_from_receives():
    progress = Progress(1)
    progress.pending = lambda: [(Kind.SEND_F, 1, 0, 2)]
    place = Place(Action(1, Kind.F, 1, 0), 2, (Kind.SEND_F, 1, 0, 2), sent=True)
    assert progress.report("why", place).splitlines() == [
        "StateFlow: rank 1, stage 1, forward of microbatch 1, chunk 0 (1F1.0), waits for rank 2 to take the activation "
        "of microbatch 0, chunk 2 from stage 1: why",
        "StateFlow: sends that are not known to have arrived: 1SEND_F0.2",
    ]


class Work:
    def __init__(self):
        self.timeouts: list = []

    def wait(self, *timeout) -> None:
        self.timeouts += timeout


def test_a_host_waits_as_long_as_the_timeout_of_now_and_a_device_by_itself():
    now, work = [], Work()
    progress = Progress(0, lambda: now[0])
    for seconds in (7.0, 3.0, None):
        now[:] = [seconds]
        progress.wait(work)
    assert [t.total_seconds() for t in work.timeouts] == [7.0, 3.0]
    progress = Progress(0, lambda: 7.0, Mark)
    with progress.with_peer(1):  # the start of an operation: the device has not been given anything to wait for
        progress.wait(work)
    assert len(work.timeouts) == 2 and not progress.marks
    with progress.with_peer(1, (Kind.SEND_F, 1, 0, 0)):
        progress.wait(work)
    assert len(progress.marks) == 1


def test_other_errors_get_a_note_of_the_place_and_peers_errors_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(watchdog.publish.__globals__["REPORTS"], str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    progress = Progress(1)
    with pytest.raises(ZeroDivisionError) as caught, progress.step(), progress.action(Action(1, Kind.W, 2, 3)):
        raise ZeroDivisionError
    assert "stage 1, weight gradient of microbatch 2, chunk 3 (1W2.3): failed" in caught.value.__notes__[0]
    with (
        pytest.raises(PeerError, match=r"\(1SEND_F0.0\), with rank 2: closed") as caught,
        progress.step(), progress.action(Action(1, Kind.SEND_F, 0, 0)), progress.with_peer(2),
    ):  # fmt: skip
        raise RuntimeError("closed")
    with (
        pytest.raises(torch.OutOfMemoryError) as own_fault,
        progress.step(), progress.action(Action(1, Kind.RECV_F, 0, 0)), progress.with_peer(0),
    ):  # fmt: skip
        raise torch.OutOfMemoryError
    assert "failed" in own_fault.value.__notes__[0]
    assert str(caught.value) in capsys.readouterr().err
    assert (tmp_path / "rank_3.txt").read_text() == f"{caught.value}\n"


def test_a_process_that_ends_abruptly_leaves_its_place(tmp_path, monkeypatch):
    """Where the device is, as long as a step lasts; nothing where an error tells."""
    monkeypatch.setenv(watchdog.publish.__globals__["REPORTS"], str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    path = tmp_path / "rank_3.last"
    rank = Asynchronous(timeout=0.2)
    rank.watchdog.start()

    def soon(condition) -> bool:
        end = time.monotonic() + LIMIT
        while not (held := condition()) and time.monotonic() < end:
            time.sleep(0.01)
        return held

    def place() -> str:
        return path.read_text() if path.exists() else ""

    what = "StateFlow: rank 0, stage 0, backward of microbatch 0, chunk {0} (0B0.{0}), waits for the gradient of "
    ended = ": its process ended without a word; last seen here\n"
    assert soon(lambda: place().startswith(what.format(0)) and place().endswith(ended))
    for mark in list(rank.progress.marks)[:2]:
        mark[1].done = True
    assert soon(lambda: place().startswith(what.format(1)))
    for mark in list(rank.progress.marks):
        mark[1].done = True
    assert soon(lambda: not path.exists())
    with pytest.raises(ZeroDivisionError), rank.progress.step():
        assert soon(path.exists)
        raise ZeroDivisionError
    assert soon(lambda: not path.exists())


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_where_an_error_tells_the_place_stays_untold_although_the_device_waits(tmp_path, monkeypatch, error):
    monkeypatch.setenv(watchdog.publish.__globals__["REPORTS"], str(tmp_path))
    rank = Asynchronous(asked=time.monotonic())
    with pytest.raises(error), rank.progress.step():
        rank.watchdog._watch_once()
        assert list(tmp_path.iterdir())
        raise error
    assert not list(tmp_path.iterdir())
    rank.watchdog._watch_once()
    assert rank.progress.marks and not list(tmp_path.iterdir())


def test_an_idle_pipeline_leaves_the_word_of_another_alone(tmp_path, monkeypatch):
    monkeypatch.setenv(watchdog.publish.__globals__["REPORTS"], str(tmp_path))
    busy, idle = Asynchronous(asked=time.monotonic()), Asynchronous()
    idle.progress.marks.clear()
    for rank in (busy, idle):
        rank.watchdog._watch_once()
    assert list(tmp_path.iterdir())
    busy.progress.marks.clear()
    busy.watchdog._watch_once()
    assert not list(tmp_path.iterdir())
