"""How much GPU time the kernels of a stage take by the length of its chunks: do short chunks cost more a token?

    python studies/unit_kernels.py titan_configs/gdn_3b_2gpu.toml --layers 4 --lengths 65536 16384 8192 4096

Runs three chunks of each length, forward and then backward with the config's recomputation, through layers of the model
on one GPU, and prints milliseconds of kernels per 65,536 tokens, in all and by kind. Nothing is sent.
"""

import argparse
import collections
import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torchtitan.config import ConfigManager

import stateflow.titan  # noqa: F401
from stateflow.chunks import ChunkPlan
from stateflow.pipeline.stage import ChunkStage
from stateflow.titan.planning import job_of, stage_module

CHUNKS, WARM_UP, PER_TOKENS = 3, 3, 65536
# The first that matches a kernel's name.
KINDS = {
    "products": r"gemm|cutlass|cublas|nvjet|xmma",
    "recurrence": r"transition|pre_kernel|^out_kernel|_backward_kernel|gradients_kernel|local_kernel|scan_kernel",
    "additions": r"CUDAFunctor_add|AddFunctor",
    "everything else": "",
}


def kernel_times(stage: ChunkStage, length: int, dim: int, dtype: torch.dtype) -> collections.Counter:
    """Microseconds a chunk, by kind."""

    def run() -> None:
        inputs = [torch.randn(1, length, dim, device="cuda", dtype=dtype) for _ in range(CHUNKS)]
        grad = torch.randn(1, length, dim, device="cuda", dtype=dtype)
        for chunk, x in enumerate(inputs):
            stage.forward(0, chunk, x)
        for chunk in reversed(range(CHUNKS)):
            stage.backward(0, chunk, grad)

    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    times = collections.Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, event.name))
            times[kind] += (event.time_range.end - event.time_range.start) / CHUNKS
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 16384, 8192, 4096])
    options = parser.parse_args()
    config = ConfigManager().parse_args(
        [f"--job.config_file={options.config}", f"--stateflow.model.num_layers={2 * options.layers}"]
    )
    job = job_of(config)
    part = [f"layers.{i}" for i in range(options.layers)]
    module = stage_module(config, job, part, torch.device("cuda"))
    print(f"{'tokens':>8} {'all':>8}", *(f"{kind:>16}" for kind in KINDS))
    for length in options.lengths:
        plan = ChunkPlan.explicit(CHUNKS * length, [length] * CHUNKS)
        stage = ChunkStage(module, plan, job.compute_dtype, is_last=False)
        times = kernel_times(stage, length, job.model.dim, job.compute_dtype)
        shown = [1e-3 * PER_TOKENS / length * times[kind] for kind in KINDS]
        print(f"{length:>8,} {sum(shown):>8.1f}", *(f"{ms:>16.1f}" for ms in shown), flush=True)


if __name__ == "__main__":
    main()
