"""Two ranks of a pipeline of which one is killed or stopped in the middle of its second step.

``python -m tests.pipeline.failing_rank BACKEND RANK STORE VICTIM SIGNAL ACTION [sigterm]``
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from stateflow.chunks import ChunkPlan
from stateflow.loss import cross_entropy_sum
from stateflow.pipeline.runtime import ScheduleStateFlow, StateFlowStage
from stateflow.pipeline.split import split_model
from stateflow.pipeline.watchdog import report_termination
from tests import cases
from tests.shared_gpu import gpu_of

PLAN = ChunkPlan.explicit(8, [4, 4])
MICROBATCHES, DIM = 3, 12
TIMEOUTS = {"gloo": 3.0, "nccl": 15.0}


def main(backend: str, rank: int, store: str, victim: int, signal_name: str, action_text: str, *options: str) -> None:
    device = gpu_of(rank) if backend == "nccl" else torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    part = split_model(cases.make_model(["gdn", "gdn"]), 2)[rank].to(device)
    stage = StateFlowStage(
        part, rank, 2, device, PLAN, microbatch_size=1, hidden_size=DIM, activation_dtype=torch.float64
    )
    steps = 0

    @contextmanager
    def hook(action):
        if steps == 1 and rank == victim and str(action) == action_text:
            if device.type == "cuda":
                torch.cuda.synchronize()  # what came before is done, on the peer as well
            os.kill(os.getpid(), signal.Signals[signal_name])
        yield

    schedule = ScheduleStateFlow([stage], MICROBATCHES, loss_fn=cross_entropy_sum, action_hook=hook)
    if "sigterm" in options:
        report_termination(schedule.progress)
    tokens, labels = (t.to(device) for t in cases.make_batch(MICROBATCHES, PLAN.seq_len, seed=0))
    for steps in range(2):  # noqa: B007  read by the hook
        schedule.step(*((tokens,) if rank == 0 else ()), target=labels if rank == 1 else None)
        if device.type == "cuda":
            torch.cuda.synchronize()
        # As torchtitan does after its first step.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUTS[backend]))
        print("step done", flush=True)


if __name__ == "__main__":
    backend, rank, store, victim, *rest = sys.argv[1:]
    main(backend, int(rank), store, int(victim), *rest)
