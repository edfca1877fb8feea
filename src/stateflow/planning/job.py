"""What is to be planned: the facts of a run that its cost and memory depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stateflow.chunks import ChunkCost, ChunkPlan
from stateflow.model import ModelConfig

RECOMPUTE_MODES = ("none", "full", "selective")


@dataclass(frozen=True)
class Job:
    """A pipelined training step.

    Attributes:
        parts: for each stage the names of its modules ("tok_embeddings", "layers.3", "norm", "output").
        num_microbatches, microbatch_size: M microbatches of so many sequences each a step and data-parallel rank.
        tensor_parallel, fsdp: degrees; ``wrapped_by_fsdp`` may be true at degree 1, for mixed precision.
        recompute: "none"; "full" recomputes each layer in the backward; "selective" every ``recompute_every``-th one
            (0: chosen operations only, which is counted like "none", an upper bound of the memory).
        optimizer_states: tensors of a parameter's size that the optimizer keeps.
        skew_cost: eq. 9 as ``[stateflow] skew`` uses it.
        policy, weight_lag: order of the units; the lag is for policies that split the backward.
        multiple: of chunk boundaries; None is the default of ``ChunkPlan.build``.
    """

    model: ModelConfig
    parts: tuple[tuple[str, ...], ...]
    seq_len: int
    num_ranks: int
    num_microbatches: int
    microbatch_size: int
    skew_cost: ChunkCost
    tensor_parallel: int = 1
    fsdp: int = 1
    wrapped_by_fsdp: bool = False
    parameter_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    recompute: str = "none"
    recompute_every: int = 0
    optimizer_states: int = 2
    multiple: int | None = None
    policy: str = "1f1b"
    weight_lag: int | None = None

    @property
    def stages_per_rank(self) -> int:
        return len(self.parts) // self.num_ranks

    def recomputes(self, position: int) -> bool:
        """Whether the layer at this position of a stage is recomputed in the backward."""
        if self.recompute == "selective" and self.recompute_every:
            return (position + 1) % self.recompute_every == 0
        return self.recompute == "full"

    def plan(self, num_chunks: int, skew: float) -> ChunkPlan:
        """The cut of ``[stateflow] num_chunks`` and ``skew``; ValueError where there is none."""
        return ChunkPlan.build(self.seq_len, num_chunks, skew, cost=self.skew_cost, multiple=self.multiple)

    def with_recompute(self, mode: str) -> Job:
        return replace(self, recompute=mode)

    def message_bytes(self, length: int) -> int:
        """Of an activation of a chunk, or its gradient."""
        return self.microbatch_size * length * self.model.dim * self.compute_dtype.itemsize

    def describe(self) -> str:
        tp = f" x TP{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        fsdp = f" x FSDP{self.fsdp}" if self.fsdp > 1 else ""
        stages = f", {self.stages_per_rank} stages a rank" if self.stages_per_rank > 1 else ""
        return (
            f"{self.seq_len} tokens, PP{self.num_ranks}{tp}{fsdp}{stages}, {self.num_microbatches} microbatches of "
            f"{self.microbatch_size}, recomputation {self.recompute}, {str(self.compute_dtype).removeprefix('torch.')}"
        )
