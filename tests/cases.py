"""Small models, batches and comparisons that the pipeline tests share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from stateflow.chunks import ChunkPlan, document_starts
from stateflow.loss import cross_entropy_sum, reference_cross_entropy
from stateflow.model import LanguageModel, ModelConfig
from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.split import split_model
from stateflow.pipeline.stage import ChunkStage

VOCAB = 19


def make_model(kinds: Sequence[str], dtype=torch.float64, backend: str = "chunk", seed: int = 1) -> LanguageModel:
    """One layer for each entry of ``kinds``; widths small enough for hundreds of cases."""
    config = ModelConfig(
        dim=12, num_layers=len(kinds), pattern=list(kinds), vocab_size=VOCAB, num_heads=1, num_v_heads=2, head_k_dim=4,
        head_v_dim=3, num_mamba_heads=2, mamba_head_dim=3, mamba_state_dim=6, mamba_num_angles=2, num_attention_heads=2,
        num_kv_heads=1, attention_head_dim=4, rope_theta=100.0, ffn_dim=10, init_std=0.3, init_seed=seed,
        backend=backend,
    )  # fmt: skip
    model = LanguageModel(config)
    with torch.no_grad():
        model.init_weights()
    return model.to(dtype)


def as_reference(model: LanguageModel) -> LanguageModel:
    """The same weights behind token-by-token recurrence, full-softmax attention and no chunk-form code."""
    kinds = model.config.layer_kinds()
    reference = make_model(kinds, next(model.parameters()).dtype, backend="reference")
    reference.load_state_dict(model.state_dict())
    return reference


def make_batch(num_sequences: int, seq_len: int, seed: int, ignore: float = 0.0) -> tuple[Tensor, Tensor]:
    """Random tokens and next-token labels; a share ``ignore`` of the labels is masked, but never all of them."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, VOCAB, (num_sequences, seq_len + 1), generator=generator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    masked = torch.rand(labels.shape, generator=generator) < ignore
    masked[-1, -1] = False
    labels[masked] = -100
    return tokens, labels


def make_documents(num_sequences: int, seq_len: int, seed: int, density: float = 0.2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return document_starts(torch.rand((num_sequences, seq_len), generator=generator) < density)


def make_stages(model: LanguageModel, num_stages: int, plan: ChunkPlan, **kwargs) -> list[ChunkStage]:
    dtype = next(model.parameters()).dtype
    stages = [
        ChunkStage(part, plan, dtype, is_last=s == num_stages - 1, name=f"stage {s}", **kwargs)
        for s, part in enumerate(split_model(model, num_stages))
    ]
    stages[-1].loss_fn = cross_entropy_sum
    return stages


def reference_gradients(model: LanguageModel, tokens, labels, docs=None) -> tuple[float, dict[str, Tensor]]:
    """Mean loss over valid tokens and its gradients, unchunked."""
    reference = as_reference(model)
    count = (labels != -100).sum()
    loss = reference_cross_entropy(reference(tokens, attention_masks=docs), labels) / count
    loss.backward()
    return loss.item(), {name: p.grad for name, p in reference.named_parameters()}


def gradients_of(stages: Sequence[ChunkStage]) -> dict[str, Tensor]:
    return {name: p.grad for stage in stages for name, p in stage.module.named_parameters()}


def largest_difference(grads: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """Largest relative difference of any tensor, and whose: max|a - b| / max|b|.

    A tensor of which no number reaches a millionth of the largest of all is compared with that: it may be nothing but
    rounding, as the angles' gradient of a single token, whose query and key turn alike.
    """
    assert grads.keys() == reference.keys(), sorted(grads.keys() ^ reference.keys())
    worst, name = 0.0, ""
    floor = max(1e-12, 1e-6 * max((b.abs().max().item() for b in reference.values() if b is not None), default=0.0))
    for key, b in reference.items():
        a = torch.zeros_like(b) if grads[key] is None else grads[key]
        b = torch.zeros_like(a) if b is None else b
        difference = ((a - b).abs().max() / b.abs().max().clamp(min=floor)).item()
        if not difference <= worst:
            worst, name = difference, key
    return worst, name


def checkpoint_blocks(model: torch.nn.Module, wrap=checkpoint_wrapper) -> None:
    """Full activation recomputation in units of one layer, by torch's wrapper or another."""
    for name, block in list(model.layers.named_children()):
        model.layers.register_module(name, wrap(block))


def schedule_of(
    policy: str, num_ranks: int, num_microbatches: int, plan: ChunkPlan, stages_per_rank: int = 1,
    weight_lag: int | None = None,
):  # fmt: skip
    return build_schedule(policy, num_ranks, num_microbatches, plan.num_chunks, stages_per_rank, weight_lag)
