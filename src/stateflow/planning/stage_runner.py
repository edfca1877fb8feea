"""Real stages to measure: in this process, or, under tensor parallelism, in one process for each of its ranks."""

from __future__ import annotations

import gc
import queue
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from stateflow.planning.job import Job
from stateflow.planning.profile import Point, measure

PATIENCE = 300.0  # seconds without an answer, after which something hangs


class LocalStages:
    """Measures chunks of one stage at a time; the last one stays built until ``release``.

    Args:
        config: the merged config.
        device: to measure on.
        tp_mesh: of the ranks that measure together; None without tensor parallelism.
    """

    def __init__(self, config, device: torch.device, tp_mesh=None):
        self.config, self.device, self.tp_mesh = config, device, tp_mesh
        self._built: tuple | None = None
        self._module: torch.nn.Module | None = None

    def measure(self, job: Job, part: Sequence[str], split: bool, start: int, length: int) -> Point:
        """The chunk [start, start + length) of the stage with the modules ``part``."""
        from stateflow.titan.planning import stage_module

        wanted = (tuple(part), job.recompute, job.recompute_every, split)
        if self._built != wanted:
            self.release()
            self._module = stage_module(self.config, job, part, self.device, self.tp_mesh)
            self._built = wanted
        return measure(
            self._module, self.device, job.compute_dtype, start, length, batch=job.microbatch_size, dim=job.model.dim,
            vocab_size=job.model.vocab_size, is_first="tok_embeddings" in part, is_last="output" in part,
            documents=self.config.stateflow.reset_at_documents, split=split, agree=self._agree,
        )  # fmt: skip

    def _agree(self, figures: list[float]) -> list[float]:
        if self.tp_mesh is None:
            return figures
        largest = torch.tensor(figures, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.tp_mesh.get_group())
        return largest.tolist()

    def release(self) -> None:
        self._built = self._module = None
        gc.collect()  # the module is part of cycles: its memory would go in the midst of a later measurement
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.release()


class TensorParallelStages:
    """The same by ``degree`` processes, each with its part of the heads; a figure is the slowest rank's.

    Args:
        titan_arguments: what torchtitan's parser makes the config from.
        degree: of tensor parallelism.
        device_type: "cuda" (a GPU a rank) or "cpu".
    """

    def __init__(self, titan_arguments: Sequence[str], degree: int, device_type: str):
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._replies = context.Queue()
        self._requests = [context.Queue() for _ in range(degree)]
        self._processes = [
            context.Process(
                target=_serve, daemon=True,
                args=(rank, degree, device_type, list(titan_arguments), str(Path(self._folder.name) / "store"),
                      self._requests[rank], self._replies),
            )
            for rank in range(degree)
        ]  # fmt: skip
        for process in self._processes:
            process.start()

    def measure(self, job: Job, part: Sequence[str], split: bool, start: int, length: int) -> Point:
        """As ``LocalStages.measure``.  Raises RuntimeError where a rank fails or does not answer."""
        for requests in self._requests:
            requests.put((job, tuple(part), split, start, length))
        end = time.monotonic() + PATIENCE
        while True:
            try:
                answer = self._replies.get(timeout=1.0)
                break
            except queue.Empty:
                dead = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
                if dead or time.monotonic() > end:
                    what = f"rank {dead[0]} of them ended" if dead else f"they are silent for {PATIENCE:.0f} s"
                    self.close()
                    raise RuntimeError(f"processes that measure tensor-parallel stages: {what}") from None
        if isinstance(answer, str):
            self.close()
            raise RuntimeError(f"a rank that measures a tensor-parallel stage failed: {answer}")
        return answer

    def release(self) -> None:
        """Nothing: a rank replaces its stage when another is asked for."""

    def close(self) -> None:
        for requests in self._requests:
            requests.put(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank, degree, device_type, titan_arguments, store, requests, replies) -> None:
    """One rank's process: measures what it is asked for; rank 0 answers."""
    from torch.distributed.device_mesh import init_device_mesh

    from stateflow.cli import parse_config
    from stateflow.launch import end_with_parent

    end_with_parent()
    try:
        torch.set_num_threads(1)
        device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
        if device_type == "cuda":
            torch.cuda.set_device(device)
        config = parse_config(titan_arguments)
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=degree,
            timeout=timedelta(seconds=PATIENCE),
        )  # fmt: skip
        stages = LocalStages(config, device, init_device_mesh(device_type, (degree,), mesh_dim_names=("tp",)))
        while (request := requests.get()) is not None:
            torch.manual_seed(0)  # the same tokens on all ranks
            point = stages.measure(*request)
            if rank == 0:
                replies.put(point)
        dist.destroy_process_group()
    except Exception as error:
        replies.put(f"{type(error).__name__}: {error}")
        raise
