"""How much GPU time the kernels of a stage take by the length of its chunks: do short chunks cost more a token?

    python studies/unit_kernels.py titan_configs/gdn_3b_2gpu.toml --layers 4 --lengths 65536 16384 8192 4096
    python studies/unit_kernels.py titan_configs/gdn_3b_2gpu.toml --names 20 --stateflow.no-cuda-graphs \
        --activation-checkpoint.mode none

Runs three chunks of each length, forward and then backward with the config's recomputation, through layers of the
model on one GPU. Prints milliseconds per 65,536 tokens: `wall` from begin to end without a profiler, so with all
waiting, then of kernels, in all and by kind, and the MFU of these layers if the GPU never waited. `--names`: also that
many kernels by name, the dearest first, in front how many of them a layer runs for a chunk. `--host`: also how long the
host takes to launch a layer's chunk, forward and backward, and that many functions by their own time, under cProfile.
Other arguments are keys of the config. Nothing is sent.
"""

import argparse
import collections
import cProfile
import pstats
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torchtitan.tools.utils import get_peak_flops

from stateflow.bench.measure import end_without_cuda
from stateflow.chunks import ChunkPlan
from stateflow.commands import read_config
from stateflow.model import flops_per_token
from stateflow.pipeline.stage import ChunkStage
from stateflow.titan.planning import job_of, stage_module

CHUNKS, WARM_UP, TIMED, PER_TOKENS = 3, 3, 5, 65536
# The first that matches a kernel's name.
KINDS = {
    "products": r"gemm|cutlass|cublas|nvjet|xmma",
    "conv, gates": r"short_conv|gated_norm|delta_gates|swiglu",
    "recurrence": r"transition|pre_kernel|^out_kernel|_backward_kernel|gradients_kernel|local_kernel|scan_kernel",
    "additions": r"CUDAFunctor_add|AddFunctor",
    "everything else": "",
}


class Units:
    """Three chunks through a stage."""

    def __init__(self, stage: ChunkStage, length: int, dim: int, dtype: torch.dtype):
        self.stage = stage
        self.inputs = [torch.randn(1, length, dim, device="cuda", dtype=dtype) for _ in range(CHUNKS)]
        self.grad = torch.randn(1, length, dim, device="cuda", dtype=dtype)

    def forward(self) -> None:
        for chunk, x in enumerate(self.inputs):
            self.stage.forward(0, chunk, x)

    def backward(self) -> None:
        for chunk in reversed(range(CHUNKS)):
            self.stage.backward(0, chunk, self.grad)

    def run(self) -> None:
        self.forward()
        self.backward()


def host_times(units: Units, layers: int, functions: int) -> None:
    """Prints microseconds of the host a layer and chunk, with the device idle before."""
    taken = []
    for _ in range(TIMED):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        units.forward()
        between = time.perf_counter()
        units.backward()
        taken.append((between - begin, time.perf_counter() - between))
    medians = [1e6 * statistics.median(times) / CHUNKS / layers for times in zip(*taken, strict=True)]
    print("host, us a layer and chunk: forward {:.0f}, backward {:.0f}".format(*medians))
    with torch.autograd.set_multithreading_enabled(False), cProfile.Profile() as profiled:  # of this thread only
        for _ in range(TIMED):
            units.run()
        torch.cuda.synchronize()
    stats = pstats.Stats(profiled)
    each = TIMED * CHUNKS * layers
    for place in sorted(stats.stats, key=lambda place: -stats.stats[place][2])[:functions]:
        _, calls, own, cumulative, _ = stats.stats[place]
        where = f"{'/'.join(Path(place[0]).parts[-2:])}:{place[1]} {place[2]}"
        print(f"{calls / each:>17.2f} {1e6 * own / each:>8.1f} {1e6 * cumulative / each:>8.1f} {where}", flush=True)


def kernel_times(run: Callable[[], None]) -> tuple:
    """Microseconds a chunk: (by kernel, in all from begin to end), and how many of each kernel."""
    for _ in range(WARM_UP):
        run()
    walls = []
    for _ in range(TIMED):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        walls.append(1e6 * (time.perf_counter() - begin) / CHUNKS)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    times, counts = collections.Counter(), collections.Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += (event.time_range.end - event.time_range.start) / CHUNKS
            counts[event.name] += 1
    return times, statistics.median(walls), counts


def by_kind(times: collections.Counter) -> collections.Counter:
    kinds = collections.Counter()
    for name, micros in times.items():
        kinds[next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))] += micros
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 16384, 8192, 4096])
    parser.add_argument("--names", type=int, default=0)
    parser.add_argument("--host", type=int, default=0)
    options, keys = parser.parse_known_args()
    end_without_cuda(parser)
    try:
        config = read_config(options.config, [f"--stateflow.model.num_layers={2 * options.layers}", *keys])
    except ValueError as error:
        parser.error(str(error))
    job = job_of(config)
    part = [f"layers.{i}" for i in range(options.layers)]
    module = stage_module(config, job, part, torch.device("cuda"))
    without, seq_len = replace(job.model, num_layers=options.layers), config.training.seq_len
    flops = flops_per_token(job.model, seq_len) - flops_per_token(without, seq_len)
    peak = get_peak_flops(torch.cuda.get_device_name())
    print(f"{'tokens':>8} {'wall':>8} {'all':>8} {'MFU':>6}", *(f"{kind:>16}" for kind in KINDS))
    for length in options.lengths:
        plan = ChunkPlan.explicit(CHUNKS * length, [length] * CHUNKS)
        stage = ChunkStage(module, plan, job.compute_dtype, is_last=False)
        units = Units(stage, length, job.model.dim, job.compute_dtype)
        times, wall, counts = kernel_times(units.run)
        kinds = by_kind(times)
        shown = [1e-3 * PER_TOKENS / length * kinds[kind] for kind in KINDS]
        mfu = flops * PER_TOKENS / (1e-3 * sum(shown)) / peak
        wall *= 1e-3 * PER_TOKENS / length
        columns = f"{wall:>8.1f} {sum(shown):>8.1f} {mfu:>6.1%}", *(f"{ms:>16.1f}" for ms in shown)
        print(f"{length:>8,}", *columns, flush=True)
        for name, micros in times.most_common(options.names):
            each = counts[name] / CHUNKS / options.layers
            print(f"{each:>17.2f} {1e-3 * PER_TOKENS / length * micros:>8.1f} {name[:100]}", flush=True)
        if options.host:
            host_times(units, options.layers, options.host)


if __name__ == "__main__":
    main()
