"""The official Mamba-3 kernels tune themselves among a few hundred variants: these are compiled at once, beforehand.

One after the other they would take a quarter of an hour and more; see `shares`.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import sys
import time
from pathlib import Path

from stateflow.bench.shares import LIMIT_S, SHORT, at_once, share_of
from stateflow_kernels.plan_table import Shape, from_json, to_json

FOLDER = "mamba_ssm.ops.triton.mamba3"
OPERATION, NORM = f"{FOLDER}.mamba3_siso_combined", "mamba_ssm.ops.triton.layernorm_gated"
MODULES = (f"{FOLDER}.mamba3_siso_fwd", f"{FOLDER}.mamba3_siso_bwd", f"{FOLDER}.angle_dt")


def tuners() -> list:
    """The kernels that tune themselves."""
    from triton.runtime.autotuner import Autotuner

    found = [x for name in MODULES for x in vars(importlib.import_module(name)).values() if isinstance(x, Autotuner)]
    return list(dict.fromkeys(found))


def compile_share(shape: Shape, index: int, count: int) -> None:
    import torch
    import triton.testing

    from stateflow.bench.mamba3_contestants import OFFICIAL, SUBJECT

    device = torch.device("cuda", torch.cuda.current_device())
    for tuner in tuners():
        tuner.configs = share_of(tuner.configs, index, count)
        tuner.cache_results = False  # on disk: no times were taken

    def compile_only(fn, *args, **kwargs):
        fn()
        return [0.0, 0.0, 0.0]

    triton.testing.do_bench = compile_only
    contestant = SUBJECT.contestants(OFFICIAL, shape, device)[0]
    contestant.results(*SUBJECT.random_inputs(shape, SHORT, device))
    torch.cuda.synchronize()


def compile_at_once(shape: Shape, work: Path) -> None:
    """For these heads; the processes that share `work` one after the other, who find what is already compiled.

    What fails here is compiled later, or fails there.
    """
    with open(work / "official.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        count = max(1, (os.cpu_count() or 1) - 4)  # some are for those that measure
        began = time.monotonic()
        jobs = [json.dumps(dict(shape=to_json(shape), index=i, count=count)) for i in range(count)]
        failed = at_once([[sys.executable, "-m", "stateflow.bench.official_mamba3", job] for job in jobs], LIMIT_S)
        took = time.monotonic() - began
        print(f"compiled the official kernels in {took:.0f} s with {count} processes, failed: {failed}", flush=True)


def main(text: str) -> None:
    job = json.loads(text)
    compile_share(from_json(Shape, job["shape"]), job["index"], job["count"])


if __name__ == "__main__":
    main(sys.argv[1])
