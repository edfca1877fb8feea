"""FLOPs and bytes of a model's layers and stages, counted from the modules themselves on the meta device.

A layer's forward costs (eq. 9)

    linear * s + pairs * (c * s + s**2 / 2)

for a chunk of s tokens from c on: ``linear`` is 2 FLOPs a matrix weight plus the recurrence (``RECURRENCE_FLOPS`` a
token and element of a recurrent state), ``pairs`` is 4 FLOPs a query head and channel for each pair of query and key.
A backward costs twice that, and once more what it recomputes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from stateflow.layers import Block
from stateflow.layers.mixer import Mixer
from stateflow.loss import tokens_in_block
from stateflow.model import MIXERS, ModelConfig
from stateflow.pipeline.accounting import StageFootprint
from stateflow.pipeline.deferred import DeferredWeights, held_bytes
from stateflow.planning.job import Job
from stateflow.sharded_loss import BLOCK_TOKENS

PROBE_TOKENS = 256
# A token and element of the recurrent state: reading with k, adding the outer product and reading with q are 2 each;
# Mamba-3 does not read with k. As in ``model.flops_per_token``.
RECURRENCE_FLOPS = {"gdn": 6.0, "mamba3": 4.0}


@dataclass(frozen=True)
class LayerCost:
    """One layer on one rank of tensor parallelism, for one sequence of a microbatch.

    Attributes:
        parameters: elements that the rank holds.
        dense, recurrence: FLOPs a token of the forward.
        pairs: FLOPs a pair of query and key.
        saved_bytes: what autograd keeps of a token when nothing is recomputed, the layer's input included.
        peak_bytes: widest temporaries of a token beside that.
        weight_bytes: what a token keeps from I to W where the backward is split: operands of the weight gradients.
        carry_bytes, window_bytes, window_grad_bytes: boundary state; the latter two a token.
    """

    parameters: int
    dense: float
    recurrence: float
    pairs: float
    saved_bytes: int
    peak_bytes: int
    weight_bytes: int
    carry_bytes: int
    window_bytes: int
    window_grad_bytes: int


def layer_cost(config: ModelConfig, kind: str, degree: int, dtype: torch.dtype) -> LayerCost:
    """Counts one layer of ``kind`` under tensor parallelism of ``degree`` for activations of ``dtype``."""
    config = replace(config, backend="chunk")  # kernels do not run on the meta device, whatever the config asks of them
    with torch.device("meta"):
        block = Block(config.dim, MIXERS[kind](config), config.ffn_dim, config.norm_eps)
    held = cut_by_heads(block, degree)
    named = block.named_parameters()
    computed = sum(p.numel() for name, p in named if p.dim() >= 2 and not name.endswith("_bias"))
    block = block.to(dtype)
    specs = block.mixer.state_spec(dtype)
    carries = [spec for spec in specs if spec.kind == "carry"]
    windows = [spec for spec in specs if spec.kind == "window"]
    recurrent = sum(math.prod(spec.shape) for spec in carries if len(spec.shape) == 3)
    query_width = block.mixer.num_heads * block.mixer.head_dim if windows else 0
    widest = max(p.shape[0] for p in block.parameters() if p.dim() >= 2)
    return LayerCost(
        parameters=held,
        dense=2.0 * computed,
        recurrence=RECURRENCE_FLOPS.get(kind, 6.0) * recurrent,
        pairs=4.0 * query_width,
        saved_bytes=_saved_bytes(block, config.dim, dtype),
        peak_bytes=(3 * widest + 2 * config.dim) * dtype.itemsize,
        weight_bytes=_weight_bytes(block, config.dim, dtype),  # last: it changes the block
        carry_bytes=sum(math.prod(s.shape) * s.dtype.itemsize for s in carries),
        window_bytes=sum(math.prod(s.shape) * s.dtype.itemsize for s in windows),
        window_grad_bytes=sum(
            math.prod(s.shape) * torch.promote_types(s.dtype, torch.float32).itemsize for s in windows
        ),
    )


def cut_by_heads(block: Block, degree: int) -> int:
    """Leaves the part of a block on the meta device that one rank of tensor parallelism computes, in place.

    Returns the number of parameter elements that the rank holds: more than it computes with where key heads cannot be
    divided, see ``titan.tensor_parallel``.
    """
    mixer = block.mixer
    held = sum(p.numel() for norm in (block.mixer_norm, block.ffn_norm) for p in norm.parameters())
    for module in (mixer, block.feed_forward):
        groups = module.groups if isinstance(module, Mixer) else None
        for name, kind in module.sharding.items():
            owner = module.get_submodule(name.rpartition(".")[0])
            short = name.rpartition(".")[2]
            shape = list(owner._parameters[short].shape)
            whole = math.prod(shape)
            if kind == "groups":
                share = len(groups.part(0, degree).sizes)
                divides = len(groups.sizes) % degree == 0
                shape[0] = shape[0] // len(groups.sizes) * share
                held += math.prod(shape) if divides else whole
            elif kind == "replicate":
                held += whole
            else:
                dim = 1 if kind == "heads_in" else 0
                shape[dim] //= degree
                held += math.prod(shape)
            owner._parameters[short] = nn.Parameter(torch.empty(shape, device="meta"))
    for name, count in mixer.sharded_head_counts().items():
        setattr(mixer, name, count // degree)
    if mixer.groups is not None:
        mixer.groups = mixer.groups.part(0, degree)
    return held


def _weight_bytes(block: Block, dim: int, dtype: torch.dtype) -> int:
    """Bytes a token that the block's projections note in I for W, each storage once."""
    deferred = DeferredWeights(block)
    x_BTD = torch.empty(1, PROBE_TOKENS, dim, device="meta", dtype=dtype, requires_grad=True)
    state = tuple(t.requires_grad_() for t in block.mixer.initial_state(1, "meta", dtype))
    with deferred.collecting() as work:
        y_BTD, _ = block(x_BTD, state, None)
        y_BTD.backward(torch.empty_like(y_BTD))
    return -(-held_bytes(work) // PROBE_TOKENS)


def _saved_bytes(block: Block, dim: int, dtype: torch.dtype) -> int:
    """Bytes a token that autograd saves in the block's forward, each storage once, without parameters and state."""
    sizes: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    x_BTD = torch.empty(1, PROBE_TOKENS, dim, device="meta", dtype=dtype, requires_grad=True)
    state = tuple(t.requires_grad_() for t in block.mixer.initial_state(1, "meta", dtype))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = block(x_BTD, state, None)
    own = [*block.parameters(), *state]
    for tensor in own:
        sizes.pop(tensor.untyped_storage()._cdata, None)
    del result
    return -(-sum(sizes.values()) // PROBE_TOKENS)


@dataclass(frozen=True)
class StageCost:
    """One pipeline stage for one microbatch: FLOPs of its actions, parameters, and the footprint of its units."""

    layers: tuple[LayerCost, ...]
    parameters: int
    head_flops: float  # of a token's logits
    batch: int
    recomputed: tuple[bool, ...]  # by layer
    footprint: StageFootprint
    loss_put_off: bool = True  # head and loss run once, in the backward (see ``pipeline.stage``)

    def forward_flops(self, start: int, length: int) -> dict[str, float]:
        """FLOPs of a forward by what bounds them: dense, attention, recurrence (eq. 9)."""
        return self._flops(start, length, [1.0] * len(self.layers), 0.0 if self.loss_put_off else 1.0)

    def backward_flops(self, start: int, length: int) -> dict[str, float]:
        """The same of a full backward; it is there that the loss computes its logits, or does so again."""
        return self._flops(start, length, [3.0 if again else 2.0 for again in self.recomputed], 3.0)

    def weight_flops(self, length: int) -> float:
        """Dense FLOPs that W does of a backward: the weight gradients of the layers' projections, not of the head."""
        return float(self.batch * length * sum(layer.dense for layer in self.layers))

    def _flops(self, start: int, length: int, factors: Sequence[float], head_factor: float) -> dict[str, float]:
        pairs = start * length + length**2 / 2
        weighted = list(zip(factors, self.layers, strict=True))
        dense = sum(f * layer.dense for f, layer in weighted) + head_factor * self.head_flops
        return {
            "dense": self.batch * length * dense,
            "attention": self.batch * pairs * sum(f * layer.pairs for f, layer in weighted),
            "recurrence": self.batch * length * sum(f * layer.recurrence for f, layer in weighted),
        }


def stage_costs(job: Job) -> list[StageCost]:
    """The stages of a job, in order."""
    costs = _layer_costs(job)
    return [_stage_cost(job, part, costs) for part in job.parts]


def stage_cost(job: Job, part: Sequence[str]) -> StageCost:
    """A stage of these modules, whether or not it is one of the job's."""
    return _stage_cost(job, part, _layer_costs(job))


def _layer_costs(job: Job) -> dict[str, LayerCost]:
    kinds = set(job.model.layer_kinds())
    return {kind: layer_cost(job.model, kind, job.tensor_parallel, job.compute_dtype) for kind in kinds}


def _stage_cost(job: Job, part: Sequence[str], costs: dict[str, LayerCost]) -> StageCost:
    config, batch, size = job.model, job.microbatch_size, job.compute_dtype.itemsize
    kinds = config.layer_kinds()
    numbers = [int(name.removeprefix("layers.")) for name in part if name.startswith("layers.")]
    layers = tuple(costs[kinds[n]] for n in numbers)
    recomputed = tuple(job.recomputes(position) for position in range(len(layers)))
    embedding = config.vocab_size * config.dim // job.tensor_parallel
    parameters = sum(layer.parameters for layer in layers)
    pairs = list(zip(layers, recomputed, strict=True))
    saved = sum(config.dim * size if again else layer.saved_bytes for layer, again in pairs)
    working = head_flops = 0
    loss_put_off = job.tensor_parallel == 1
    if "tok_embeddings" in part:
        parameters += embedding
        saved += 8  # the token ids
    elif layers:
        saved -= config.dim * size  # the first layer's input is the receive buffer
    if "norm" in part:
        parameters += config.dim
    if "output" in part:
        local_vocab = config.vocab_size // job.tensor_parallel
        parameters += embedding
        head_flops = 2.0 * local_vocab * config.dim
        saved += 2 * config.dim * size + (8 if loss_put_off else 16)  # inputs of norm and head, labels, logsumexp
        # Logits of a block in float32 and their gradient, and the head's gradient before it is cast.
        block = min(tokens_in_block(local_vocab) if loss_put_off else BLOCK_TOKENS, batch * job.seq_len)
        working = local_vocab * (block * (4 + size if loss_put_off else 8) + 4 * config.dim)
    peak = max((layer.peak_bytes for layer in layers), default=0)
    again = max((layer.saved_bytes for layer, again in pairs if again), default=0)
    return StageCost(
        layers=layers,
        parameters=parameters,
        head_flops=head_flops,
        batch=batch,
        recomputed=recomputed,
        loss_put_off=loss_put_off,
        footprint=StageFootprint(
            activation_bytes_per_token=batch * config.dim * size,
            carry_bytes=batch * sum(layer.carry_bytes for layer in layers),
            window_bytes_per_token=batch * sum(layer.window_bytes for layer in layers),
            window_grad_bytes_per_token=batch * sum(layer.window_grad_bytes for layer in layers),
            saved_bytes_per_token=batch * saved,
            weight_bytes_per_token=batch * sum(layer.weight_bytes for layer in layers),
            forward_bytes_per_token=batch * peak,
            backward_bytes_per_token=batch * (peak + again),
            working_bytes=working,
        ),
    )


def static_bytes(job: Job, parameters: int) -> dict[str, int]:
    """Bytes of a stage that stay through the step, by what they are.

    With FSDP a rank keeps its share of parameters and optimizer, and under pipelining the whole parameters in the
    compute dtype and the whole gradients until the last backward of the step.
    """
    itemsize = job.parameter_dtype.itemsize
    shard = -(-parameters // job.fsdp)
    held = {
        "parameters": shard * itemsize,
        "gradients": parameters * itemsize,
        "optimizer": job.optimizer_states * shard * itemsize,
        "fsdp": 0,
    }
    if job.wrapped_by_fsdp:
        held["fsdp"] = parameters * job.compute_dtype.itemsize
        held["gradients"] = parameters * job.reduce_dtype.itemsize
    return held
