"""Libraries that tune themselves compile their variants one after the other: here several processes share them out.

Each runs the operation once for each shape with a part of the variants, and leaves what Triton compiled in its cache on
disk. None of them times anything: the process of the benchmark tunes with all variants.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stateflow_kernels.plan_table import Shape, from_json, to_json

# Tokens: these and the kernel chunks are multiples of 16, as with all lengths that matter: Triton compiles others anew.
SHORT = 1024
LIMIT_S = 900.0
TENSORS = 24  # of the size of v, that forward and backward take, about


def share_of(variants: list, index: int, count: int) -> list:
    """Every `count`-th, or two of them: a kernel with one variant is not tuned, and fails where that one does.

    The second of two is another process's first: it is likely to be there by then.
    """
    share, total = variants[index::count], len(variants)
    if len(share) > 1 or total < 2:
        return share if total > 1 else variants
    return [variants[index % total], variants[(index + 1) % total]]


def tuners(package: str) -> list:
    """The kernels that tune themselves, of all modules of a package that are imported."""
    from triton.runtime.autotuner import Autotuner

    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == package]
    found = []
    for x in [x for module in modules for x in vars(module).values()]:
        while x is not None and not isinstance(x, Autotuner):  # within what sets some of their arguments
            x = getattr(x, "fn", None) if type(x).__module__.startswith("triton.") else None
        if x is not None:
            found.append(x)
    return list(dict.fromkeys(found))


def compile_share(
    benchmark: str, group: str, shapes: Sequence[Shape], package: str, index: int, count: int, processes: int
) -> None:
    """One of `count` shares for these shapes, beside as many `processes`."""
    import torch
    import triton.testing

    from stateflow.bench.contestants import subject_named

    subject, device = subject_named(benchmark), torch.device("cuda", torch.cuda.current_device())
    subject.contestants(group, shapes[0], device)  # imports what there is to tune
    for tuner in tuners(package):
        tuner.configs = share_of(tuner.configs, index, count)
        tuner.cache_results = False  # on disk: no times were taken

    def compile_only(fn, *args, **kwargs):
        fn()
        return [0.0, 0.0, 0.0]

    triton.testing.do_bench = compile_only
    room = torch.cuda.get_device_properties(device).total_memory / (2 * processes)
    for shape in lengths_that_fit(shapes, room):
        contestant = subject.contestants(group, shape, device)[0]
        contestant.results(*subject.random_inputs(shape, shape.tokens, device))
        torch.cuda.empty_cache()
    torch.cuda.synchronize()


def lengths_that_fit(shapes: Sequence[Shape], room: float) -> list[Shape]:
    """With a short sequence, as parity is, and those of the shapes that so many bytes hold: some kernels care."""

    def fits(shape: Shape) -> bool:
        return TENSORS * 2 * shape.batch * shape.tokens * shape.num_heads * max(shape.k_dim, shape.v_dim) <= room

    return list(dict.fromkeys([*(replace(shape, tokens=SHORT) for shape in shapes), *filter(fits, shapes)]))


def jobs(shapes: Sequence[Shape], count: int) -> list[dict]:
    """What each of `count` processes does: the shapes of one count of heads and size while there are enough processes.

    Each goes through all kernels of its shapes, so that many for the same ones would have next to nothing each.
    """
    kinds: dict[Shape, list[Shape]] = {}
    for shape in shapes:
        kinds.setdefault(replace(shape, tokens=1), []).append(shape)
    groups = list(kinds.values()) if len(kinds) <= count else [list(shapes)]
    found = []
    for i in range(count):
        mine = groups[i % len(groups)]
        share = dict(index=i // len(groups), count=len(range(i % len(groups), count, len(groups))))
        found.append(dict(shapes=[to_json(shape) for shape in mine], **share))
    return found


def at_once(commands: Sequence[list[str]], limit_s: float) -> list[int]:
    """Which of the commands failed, or were ended after so long; none of them outlives this process."""
    began = time.monotonic()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends, too
    processes: list[subprocess.Popen] = []
    try:
        for command in commands:
            processes.append(subprocess.Popen(command))
        for process in processes:
            process.wait(max(1.0, began + limit_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"compiling took more than {limit_s:.0f} s", flush=True)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        signal.signal(signal.SIGTERM, before)
    return [i for i, process in enumerate(processes) if process.returncode]


def compile_at_once(benchmark: str, group: str, shapes: Sequence[Shape], package: str, work: Path) -> None:
    """The first process of the group that comes here has all shapes compiled, the others wait for it.

    What fails here is compiled later, or fails there.
    """
    done = work / f"{group}.compiled"
    with open(work / f"{group}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return
        count, began = max(1, (os.cpu_count() or 1) - 2), time.monotonic()
        common = dict(benchmark=benchmark, group=group, package=package, processes=count)
        commands = [
            [sys.executable, "-m", "stateflow.bench.shares", json.dumps(common | job)] for job in jobs(shapes, count)
        ]
        failed = at_once(commands, LIMIT_S)
        done.touch()
        took = time.monotonic() - began
        print(f"compiled {group} in {took:.0f} s with {count} processes, failed: {failed}", flush=True)


def main(text: str) -> None:
    job = json.loads(text)
    compile_share(**job | dict(shapes=[from_json(Shape, shape) for shape in job["shapes"]]))


if __name__ == "__main__":
    main(sys.argv[1])
