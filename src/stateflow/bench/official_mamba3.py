"""The official Mamba-3 kernels tune themselves among a few hundred variants: these are compiled at once, beforehand.

One after the other they would take a quarter of an hour and more. So some processes (`python -m` this module) run
the operation once on a short sequence, each with a share of the variants, and leave what Triton compiled in its cache
on disk. None of them times anything: the process of the benchmark tunes with all variants.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from stateflow_kernels.plan_table import Shape, from_json, to_json

FOLDER = "mamba_ssm.ops.triton.mamba3"
OPERATION, NORM = f"{FOLDER}.mamba3_siso_combined", "mamba_ssm.ops.triton.layernorm_gated"
MODULES = (f"{FOLDER}.mamba3_siso_fwd", f"{FOLDER}.mamba3_siso_bwd", f"{FOLDER}.angle_dt")
# Tokens: these and the kernel chunks are multiples of 16, as with all lengths that matter: Triton compiles others anew.
SHORT = 1024
LIMIT_S = 900.0


def tuners() -> list:
    """The kernels that tune themselves."""
    from triton.runtime.autotuner import Autotuner

    found = [x for name in MODULES for x in vars(importlib.import_module(name)).values() if isinstance(x, Autotuner)]
    return list(dict.fromkeys(found))


def share_of(variants: list, index: int, count: int) -> list:
    """Every `count`-th, or two of them: a kernel with one variant is not tuned, and fails where that one does."""
    share = variants[index::count]
    return share if len(share) > 1 else variants[:2]


def compile_share(shape: Shape, index: int, count: int) -> None:
    import torch
    import triton.testing

    from stateflow.bench.mamba3_contestants import OFFICIAL, SUBJECT

    device = torch.device("cuda", torch.cuda.current_device())
    for tuner in tuners():
        tuner.configs = share_of(tuner.configs, index, count)

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
        command = [sys.executable, "-m", "stateflow.bench.official_mamba3"]
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends, too
        processes: list[subprocess.Popen] = []
        try:
            for job in jobs:
                processes.append(subprocess.Popen([*command, job]))
            for process in processes:
                process.wait(max(1.0, began + LIMIT_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"compiling the official kernels took more than {LIMIT_S:.0f} s", flush=True)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            signal.signal(signal.SIGTERM, before)
        failed = [i for i, process in enumerate(processes) if process.returncode]
        took = time.monotonic() - began
        print(f"compiled the official kernels in {took:.0f} s with {count} processes, failed: {failed}", flush=True)


def main(text: str) -> None:
    job = json.loads(text)
    compile_share(from_json(Shape, job["shape"]), job["index"], job["count"])


if __name__ == "__main__":
    main(sys.argv[1])
