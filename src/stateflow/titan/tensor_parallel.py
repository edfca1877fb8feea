"""Tensor parallelism: DTensor parameters, computed with as plain local tensors.

Between blocks every rank of a TP group holds the same, whole activation, an ordinary tensor: boundary activations of
the pipeline and its buffers stay as they are.  Within a block a *parallel region* begins behind each norm and ends at
the projections that are cut on their input:

    x --norm--enter--> heads of this rank (column cut) --core--> projection (row cut) --leave--> + x

`enter` is the identity and sums the gradient over the ranks; `leave` sums the values and hands the gradient on.  Inside
the region each rank's gradient is the part that went through its heads, so a parameter that all ranks use (such as the
output norm's weight) gets its gradient by `enter`, too.  States belong to heads: they are never communicated.

What is cut comes from the declarations `sharding` of the mixer and of the feed-forward part, so another family of
layers needs no line here.  Parameters are DTensors, so FSDP2, checkpoints that reshard, and gradient clipping treat
them as such; a module's attribute gives the local tensor.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from stateflow.collectives import all_reduce
from stateflow.layers import Block
from stateflow.model import MIXERS, ModelConfig

# Where a mixer's argument has another name in the model's config.
_CONFIG_NAMES = {("attention", "num_heads"): "num_attention_heads"}
_PLACEMENTS = {"heads": Shard(0), "heads_in": Shard(1), "replicate": Replicate()}


def divided_counts(config: ModelConfig) -> dict[str, int]:
    """What the tensor parallel degree must divide, by the name of the model config's field."""
    counts = {}
    with torch.device("meta"):
        for kind in dict.fromkeys(config.layer_kinds()):
            for name, count in MIXERS[kind](config).sharded_head_counts().items():
                counts[_CONFIG_NAMES.get((kind, name), name)] = count
    return counts | {"ffn_dim": config.ffn_dim, "vocab_size": config.vocab_size}


def check_degree(config: ModelConfig, degree: int) -> None:
    """Raises ValueError, naming what `degree` does not divide and the degrees that do, if the model cannot be cut."""
    counts = divided_counts(config)
    largest = math.gcd(*counts.values())
    for name, count in counts.items():
        if degree < 1 or count % degree:
            works = ", ".join(str(d) for d in range(1, largest + 1) if largest % d == 0)
            raise ValueError(
                f"[parallelism] tensor_parallel_degree = {degree} does not divide the model's {name} = {count}; "
                f"degrees that work: {works} (or change {name} under [stateflow.model])"
            )


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_reduce(grad, "sum", ctx.group_name), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group_name: str) -> Tensor:
        return all_reduce(x, "sum", group_name)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def enter(x: Tensor, group_name: str) -> Tensor:
    """x, the same on all ranks; its gradient is the sum of the ranks' gradients."""
    return _Enter.apply(x, group_name)


def leave(x: Tensor, group_name: str) -> Tensor:
    """The sum of the ranks' x; the gradient, the same on all ranks, is that of each."""
    return _Leave.apply(x, group_name)


@functools.cache  # one class for all layers of a kind, so that compiled blocks share their graphs
def _with_local_parameters(cls: type[nn.Module], names: tuple[str, ...], summed: tuple[str, ...]) -> type[nn.Module]:
    """A subclass whose attributes `names` are local tensors; gradients of those in `summed` are summed over ranks."""

    def make(name: str) -> property:
        def local(self) -> Tensor:
            parameter = self._parameters[name]
            # On more dimensions than the TP one FSDP holds it sharded: nobody computes with it, but FSDP looks it up.
            if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:
                return parameter
            tensor = parameter.to_local()
            return enter(tensor, self.tp_group_name) if name in summed else tensor

        return property(local)

    return type(cls.__name__, (cls,), {name: make(name) for name in names})


def _distribute(module: nn.Module, name: str, placement, mesh: DeviceMesh) -> None:
    parameter = module._parameters[name]
    # No source rank: on the meta device there is nothing to send, and initialisation is the same on every rank.
    tensor = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(tensor, requires_grad=parameter.requires_grad))


def shard(module: nn.Module, sharding: dict[str, str], mesh: DeviceMesh, *, region: bool = True) -> None:
    """Makes `module`'s parameters DTensors as `sharding` (name -> "heads" | "heads_in" | "replicate") says.

    `region`: the module computes within a parallel region, so that the gradients of replicated parameters are parts.
    """
    declared, present = set(sharding), {name for name, _ in module.named_parameters()}
    assert declared == present, f"{type(module).__name__}.sharding does not declare {declared ^ present}"
    group_name = mesh.get_group().group_name
    for owner_name, owner in list(module.named_modules()):
        kinds = {n: sharding[f"{owner_name}.{n}".lstrip(".")] for n, _ in owner.named_parameters(recurse=False)}
        if not kinds:
            continue
        for name, kind in kinds.items():
            _distribute(owner, name, _PLACEMENTS[kind], mesh)
        owner.tp_group_name = group_name
        summed = tuple(name for name, kind in kinds.items() if region and kind == "replicate")
        owner.__class__ = _with_local_parameters(type(owner), tuple(kinds), summed)
        if "heads_in" in kinds.values():
            owner.register_forward_hook(_leave_behind)


def _enter_behind(module: nn.Module, _args, output: Tensor) -> Tensor:
    return enter(output, module.tp_group_name)


def _leave_behind(module: nn.Module, _args, output: Tensor) -> Tensor:
    return leave(output, module.tp_group_name)


def _shard_block(block: Block, mesh: DeviceMesh) -> None:
    for norm in (block.mixer_norm, block.ffn_norm):
        shard(norm, {"weight": "replicate"}, mesh, region=False)
        norm.register_forward_hook(_enter_behind)
    shard(block.mixer, block.mixer.sharding, mesh)
    shard(block.feed_forward, block.feed_forward.sharding, mesh)
    for name, count in block.mixer.sharded_head_counts().items():
        assert count % mesh.size() == 0, f"{name} = {count} on {mesh.size()} ranks: check_degree comes first"
        setattr(block.mixer, name, count // mesh.size())


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank holds some rows; `weight` is a DTensor [V, D], the output whole."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh):
        super().__init__()
        self.weight = embedding.weight
        shard(self, {"weight": "heads"}, mesh)
        self.num_rows = embedding.num_embeddings // mesh.size()
        self.first_row = self.num_rows * mesh.get_local_rank()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        row_BT = tokens_BT - self.first_row
        elsewhere_BT = (row_BT < 0) | (row_BT >= self.num_rows)
        rows_BTD = nn.functional.embedding(row_BT.masked_fill(elsewhere_BT, 0), self.weight)
        return leave(rows_BTD.masked_fill(elsewhere_BT[..., None], 0), self.tp_group_name)


def apply_tp(model: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool = True) -> None:
    """Cuts a model, or one pipeline stage's part of it, over the ranks of `mesh` (one dimension), in place.

    Call it on the meta device, or with the same values on every rank; before checkpointing, compilation and FSDP2.
    With `loss_parallel` each rank holds its part of the vocabulary in the head and no rank sees all logits of a
    token; without, every rank holds the head and computes the whole loss.  Raises ValueError, see `check_degree`.
    """
    check_degree(model.config, mesh.size())
    if model.tok_embeddings is not None:
        model.tok_embeddings = VocabParallelEmbedding(model.tok_embeddings, mesh)
    for block in model.layers.values():
        _shard_block(block, mesh)
    if model.norm is not None:
        shard(model.norm, {"weight": "replicate"}, mesh, region=False)
    if model.output is not None:
        if loss_parallel:
            # Stays a DTensor on the way to the loss, which sees by it that the vocabulary is cut.
            _distribute(model.output, "weight", Shard(0), mesh)
        else:
            shard(model.output, {"weight": "replicate"}, mesh, region=False)
