"""A pool of real processes, started once for a test session, by default with gloo groups in place.

``pool.run(function, num_ranks, **kwargs)`` calls ``function(rank, group, **kwargs)`` in the first ``num_ranks``
processes and returns their results; an exception in any of them is raised here with its traceback.  A call that takes
longer than ``TIMEOUT`` seconds ends the pool with a message instead of hanging.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from stateflow.launch import end_with_parent

TIMEOUT = 600.0  # a hang is the only thing that it should ever end: machines are busy at times


class WorkerError(RuntimeError):
    pass


def _serve(rank: int, world_size: int, store: str | None, pipe) -> None:
    end_with_parent()  # also when that is killed
    torch.set_num_threads(1)
    groups: dict = dict.fromkeys(range(1, world_size + 1))
    if store is not None:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT)
        )
        groups = {n: dist.new_group(list(range(n)), backend="gloo") for n in groups}
    while (task := pipe.recv()) is not None:
        function, num_ranks, kwargs = task
        try:
            pipe.send(("ok", function(rank, groups[num_ranks], **kwargs)))
        except BaseException:  # noqa: BLE001  reported to the test
            pipe.send(("error", traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


class WorkerPool:
    def __init__(self, world_size: int, init_groups: bool = True, timeout: float = TIMEOUT):
        self.world_size, self.init_groups, self.timeout = world_size, init_groups, timeout
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(self.world_size):
            here, there = context.Pipe()
            store = f"{self._folder.name}/store" if self.init_groups else None
            args = (rank, self.world_size, store, there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable, num_ranks: int, **kwargs) -> list:
        for pipe in self._pipes[:num_ranks]:
            pipe.send((function, num_ranks, kwargs))
        deadline = time.monotonic() + self.timeout
        replies: list = [None] * num_ranks
        while any(r is None for r in replies):
            for rank, pipe in enumerate(self._pipes[:num_ranks]):
                if replies[rank] is None and pipe.poll(0.01):
                    replies[rank] = pipe.recv()
            failed = [r[1] for r in replies if r is not None and r[0] == "error"]
            waiting = [rank for rank, r in enumerate(replies) if r is None]
            # A rank that failed leaves its peers waiting in a receive: do not sit out their timeout.
            if failed and waiting and time.monotonic() > deadline - self.timeout + 5.0 or time.monotonic() > deadline:
                self.restart()
                raise WorkerError("\n".join(failed) or f"ranks {waiting} did not answer within {self.timeout:.0f} s")
        failed = [r[1] for r in replies if r[0] == "error"]
        if failed:
            raise WorkerError("\n".join(failed))
        return [r[1] for r in replies]

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()
