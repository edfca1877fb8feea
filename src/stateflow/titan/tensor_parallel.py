"""Tensor parallelism: DTensor parameters, computed with as plain local tensors.

Between blocks every rank of a TP group holds the same, whole activation, an ordinary tensor: boundary activations of
the pipeline and its buffers stay as they are.  Within a block a *parallel region* begins behind each norm and ends at
the projections that are cut on their input:

    x --norm--enter--> heads of this rank (column cut) --core--> projection (row cut) --leave--> + x

`enter` is the identity and sums the gradient over the ranks; `leave` sums the values and hands the gradient on.  Inside
the region each rank's gradient is the part that went through its heads, so a parameter that all ranks use (such as the
output norm's weight) gets its gradient by `enter`, too.  States belong to heads: they are never communicated.

With *sequence parallel norms* a rank holds, between regions, only its part of the chunk's tokens: `enter` gathers the
tokens (its gradient: summed and scattered), `leave` sums and scatters (its gradient: gathered).  Each rank then knows
the gradient of a norm's weight from its tokens only: it is summed like that of a parameter within the region.  What
comes from another stage is cut where the stage begins, and what leaves for one, or for the head, is whole again.

What is cut comes from the declarations `sharding` of the mixer and of the feed-forward part, so another family of
layers needs no line here.  Parameters are DTensors, so FSDP2, checkpoints that reshard, and gradient clipping treat
them as such; a module's attribute gives the local tensor.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from stateflow.collectives import all_gather_tokens, all_reduce, reduce_scatter_tokens
from stateflow.layers import Block, HeadGroups
from stateflow.model import MIXERS, ModelConfig

# Where a mixer's argument has another name in the model's config.
_CONFIG_NAMES = {
    ("attention", "num_heads"): "num_attention_heads",
    ("mamba3", "num_heads"): "num_mamba_heads",
}
_PLACEMENTS = {"heads": Shard(0), "groups": Shard(0), "heads_in": Shard(1), "replicate": Replicate()}


def divided_counts(config: ModelConfig) -> dict[str, int]:
    """What the tensor parallel degree must divide, by the name of the model config's field."""
    counts = {}
    with torch.device("meta"):
        for kind in dict.fromkeys(config.layer_kinds()):
            for name, count in MIXERS[kind](config).sharded_head_counts().items():
                if name == "num_v_heads" and config.num_v_heads is None:
                    name = "num_heads"  # which is then what decides
                counts[_CONFIG_NAMES.get((kind, name), name)] = count
    return counts | {"ffn_dim": config.ffn_dim, "vocab_size": config.vocab_size}


def check_degree(config: ModelConfig, degree: int) -> None:
    """Raises ValueError, naming what `degree` does not divide and the degrees that do, if the model cannot be cut."""
    counts = divided_counts(config)
    largest = math.gcd(*counts.values())
    for name, count in counts.items():
        if degree < 1 or count % degree:
            works = ", ".join(str(d) for d in range(1, largest + 1) if largest % d == 0)
            change = f"change {name}"
            if name in ("ffn_dim", "vocab_size") and degree >= 1:
                change = f"set {name} = {-(-count // degree) * degree}"
            raise ValueError(
                f"[parallelism] tensor_parallel_degree = {degree} does not divide the model's {name} = {count}; "
                f"degrees that work: {works} (or {change} under [stateflow.model])"
            )


# ----------------------------------------------------------------------- communication
class Group(NamedTuple):
    """The ranks of tensor parallelism as the modules know them."""

    name: str
    num_ranks: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def _tokens_of_a_rank(num_tokens: int, group: Group) -> int:
    if num_tokens % group.num_ranks:
        raise ValueError(
            f"a chunk of {num_tokens} tokens cannot be cut over {group.num_ranks} ranks for sequence parallel norms; "
            f"make every chunk a multiple of {group.num_ranks} tokens"
        )
    return num_tokens // group.num_ranks


def _own_tokens(x_BTD: Tensor, group: Group) -> Tensor:
    num_tokens = _tokens_of_a_rank(x_BTD.shape[1], group)
    return x_BTD.narrow(1, group.rank * num_tokens, num_tokens)


def _sum_and_scatter(x_BTD: Tensor, group: Group) -> Tensor:
    _tokens_of_a_rank(x_BTD.shape[1], group)
    return reduce_scatter_tokens(x_BTD, group.num_ranks, group.name)


_STEPS = {
    "same": lambda x, group: x.view_as(x),
    "sum": lambda x, group: all_reduce(x, "sum", group.name),
    "gather": lambda x, group: all_gather_tokens(x, group.num_ranks, group.name),
    "sum and scatter": _sum_and_scatter,
    "own": _own_tokens,
}


class _Communicate(torch.autograd.Function):
    """One of `_STEPS` in the forward, its transpose on these ranks in the backward."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: str, backward: str, name: str, num_ranks: int, rank: int) -> Tensor:
        ctx.backward_step, ctx.group = backward, (name, num_ranks, rank)
        return _STEPS[forward](x, Group(name, num_ranks, rank))

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _STEPS[ctx.backward_step](grad, Group(*ctx.group)), None, None, None, None, None


def enter(x: Tensor, group: Group) -> Tensor:
    """x, the same on all ranks; its gradient is the sum of the ranks' gradients."""
    return _Communicate.apply(x, "same", "sum", *group)


def leave(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' x; the gradient, the same on all ranks, is that of each."""
    return _Communicate.apply(x, "sum", "same", *group)


def enter_tokens(x_BSD: Tensor, group: Group) -> Tensor:
    """`enter` for ranks that hold a part of the tokens each."""
    return _Communicate.apply(x_BSD, "gather", "sum and scatter", *group)


def leave_tokens(x_BTD: Tensor, group: Group) -> Tensor:
    """`leave` for ranks that go on with a part of the tokens each."""
    return _Communicate.apply(x_BTD, "sum and scatter", "gather", *group)


def cut_tokens(x_BTD: Tensor, group: Group) -> Tensor:
    """This rank's tokens of x, which is the same on all ranks, as its gradient is.  ValueError if T does not divide."""
    return _Communicate.apply(x_BTD, "own", "gather", *group)


def join_tokens(x_BSD: Tensor, group: Group) -> Tensor:
    """The ranks' tokens, for a use that is the same on all ranks and gives all of them the same gradient."""
    return _Communicate.apply(x_BSD, "gather", "own", *group)


# -------------------------------------------------------------------------- parameters
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
            if name in summed:
                tensor = enter(tensor, self.tp_group)
            return tensor.narrow(0, *self.tp_rows[name]) if name in self.tp_rows else tensor

        return property(local)

    return type(cls.__name__, (cls,), {name: make(name) for name in names})


def _distribute(module: nn.Module, name: str, placement, mesh: DeviceMesh) -> None:
    parameter = module._parameters[name]
    # No source rank: on the meta device there is nothing to send, and initialisation is the same on every rank.
    tensor = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(tensor, requires_grad=parameter.requires_grad))


def shard(
    module: nn.Module, sharding: dict[str, str], mesh: DeviceMesh, *, groups: HeadGroups | None = None,
    partial: bool = True, tokens: bool = False,
) -> None:
    """Makes `module`'s parameters DTensors as `sharding` (name -> a kind of `Mixer.sharding`) says.

    Args:
        groups: of the whole mixer, for parameters of the kind "groups".
        partial: the module sees a part of the heads or of the tokens, so that the gradients of parameters that are
            whole on every rank are parts.
        tokens: what comes out of "heads_in" is cut by tokens over the ranks.
    """
    declared, present = set(sharding), {name for name, _ in module.named_parameters()}
    assert declared == present, f"{type(module).__name__}.sharding does not declare {declared ^ present}"
    group = Group.of(mesh)
    for owner_name, owner in list(module.named_modules()):
        kinds = {n: sharding[f"{owner_name}.{n}".lstrip(".")] for n, _ in owner.named_parameters(recurse=False)}
        if not kinds:
            continue
        owner.tp_group, owner.tp_rows = group, {}
        for name, kind in kinds.items():
            placement = _PLACEMENTS[kind]
            if kind == "groups" and len(groups.sizes) % group.num_ranks:
                placement, kinds[name] = Replicate(), "replicate"
                owner.tp_rows[name] = _rows(owner._parameters[name], groups, group)
            _distribute(owner, name, placement, mesh)
        summed = tuple(name for name, kind in kinds.items() if partial and kind == "replicate")
        owner.__class__ = _with_local_parameters(type(owner), tuple(kinds), summed)
        if "heads_in" in kinds.values():
            owner.register_forward_hook(_leave_to_tokens_behind if tokens else _leave_behind)


def _rows(parameter: Tensor, groups: HeadGroups, group: Group) -> tuple[int, int]:
    """(first, number) of the rows of a parameter that belong to the groups of this rank."""
    mine = groups.part(group.rank, group.num_ranks)
    rows = len(parameter) // len(groups.sizes)
    return mine.first * rows, len(mine.sizes) * rows


# ------------------------------------------------------------------------------- hooks
def _enter_behind(module: nn.Module, _args, output: Tensor) -> Tensor:
    return enter(output, module.tp_group)


def _enter_from_tokens_behind(module: nn.Module, _args, output: Tensor) -> Tensor:
    return enter_tokens(output, module.tp_group)


def _leave_behind(module: nn.Module, _args, output: Tensor) -> Tensor:
    return leave(output, module.tp_group)


def _leave_to_tokens_behind(module: nn.Module, _args, output: Tensor) -> Tensor:
    return leave_tokens(output, module.tp_group)


def _cut_before(module: nn.Module, args: tuple) -> tuple:
    return cut_tokens(args[0], module.tp_group), *args[1:]


def _join_before(module: nn.Module, args: tuple) -> tuple:
    return join_tokens(args[0], module.tp_group), *args[1:]


def _join_behind(module: nn.Module, _args, output: Tensor | tuple) -> Tensor | tuple:
    """Of a model part without a head: the hidden states alone, or with the update of the state."""
    if isinstance(output, Tensor):
        return join_tokens(output, module.tp_group)
    return join_tokens(output[0], module.tp_group), *output[1:]


# ------------------------------------------------------------------------------- model
def _shard_block(block: Block, mesh: DeviceMesh, tokens: bool) -> None:
    for norm in (block.mixer_norm, block.ffn_norm):
        shard(norm, {"weight": "replicate"}, mesh, partial=tokens)
        norm.register_forward_hook(_enter_from_tokens_behind if tokens else _enter_behind)
    mixer = block.mixer
    shard(mixer, mixer.sharding, mesh, groups=mixer.groups, tokens=tokens)
    shard(block.feed_forward, block.feed_forward.sharding, mesh, tokens=tokens)
    for name, count in mixer.sharded_head_counts().items():
        assert count % mesh.size() == 0, f"{name} = {count} on {mesh.size()} ranks: check_degree comes first"
        setattr(mixer, name, count // mesh.size())
    if mixer.groups is not None:
        mixer.groups = mixer.groups.part(mesh.get_local_rank(), mesh.size())


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank holds some rows; `weight` is a DTensor [V, D].

    The output is whole, or with `tokens` this rank's part of the tokens.
    """

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh, tokens: bool = False):
        super().__init__()
        self.weight = embedding.weight
        shard(self, {"weight": "heads"}, mesh)
        self.num_rows = embedding.num_embeddings // mesh.size()
        self.first_row = self.num_rows * mesh.get_local_rank()
        self.tokens = tokens

    def forward(self, tokens_BT: Tensor) -> Tensor:
        row_BT = tokens_BT - self.first_row
        elsewhere_BT = (row_BT < 0) | (row_BT >= self.num_rows)
        rows_BTD = nn.functional.embedding(row_BT.masked_fill(elsewhere_BT, 0), self.weight)
        rows_BTD = rows_BTD.masked_fill(elsewhere_BT[..., None], 0)
        return (leave_tokens if self.tokens else leave)(rows_BTD, self.tp_group)


def apply_tp(
    model: nn.Module, mesh: DeviceMesh, *, loss_parallel: bool = True, sequence_parallel_norms: bool = False
) -> None:
    """Cuts a model, or one pipeline stage's part of it, over the ranks of `mesh` (one dimension), in place.

    Call it on the meta device, or with the same values on every rank; before checkpointing, compilation and FSDP2.
    With `loss_parallel` each rank holds its part of the vocabulary in the head and no rank sees all logits of a
    token; without, every rank holds the head and computes the whole loss.  With `sequence_parallel_norms` the residual
    stream and the norms of a rank hold its part of a chunk's tokens, whose number the degree must divide; what the
    model part takes and returns stays whole.  Raises ValueError, see `check_degree`.
    """
    check_degree(model.config, mesh.size())
    tokens = sequence_parallel_norms
    if model.tok_embeddings is not None:
        model.tok_embeddings = VocabParallelEmbedding(model.tok_embeddings, mesh, tokens)
    for block in model.layers.values():
        _shard_block(block, mesh, tokens)
    if model.norm is not None:
        shard(model.norm, {"weight": "replicate"}, mesh, partial=tokens)
    if model.output is not None:
        if loss_parallel:
            # Stays a DTensor on the way to the loss, which sees by it that the vocabulary is cut.
            _distribute(model.output, "weight", Shard(0), mesh)
        else:
            shard(model.output, {"weight": "replicate"}, mesh, partial=False)
    if tokens:
        _cut_and_join(model, mesh)


def _cut_and_join(model: nn.Module, mesh: DeviceMesh) -> None:
    """Whole hidden states that come in are cut by tokens, and those that go out, or to the head, are joined."""
    model.tp_group = Group.of(mesh)
    if model.tok_embeddings is None:
        model.register_forward_pre_hook(_cut_before)
    if model.output is None:
        model.register_forward_hook(_join_behind)
    else:
        model.output.tp_group = model.tp_group
        model.output.register_forward_pre_hook(_join_before)
