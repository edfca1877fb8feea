"""The contract of a token mixer: (x, state, docs) -> (y, state'), with `state` a flat tuple of tensors.

A mixer is three methods that a block (or an overlapping runtime) composes: `pre` (projections, convolution,
gates), `core` (the recurrence or the attention alone) and `out` (normalisation, output projection). All are
pure functions of their arguments and parameters: activation recomputation replays a chunk from its saved
incoming state and gets the same bits.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..chunks import check_documents
from .initialize import Initializer

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class StateSpec:
    """One tensor of a mixer's boundary state, differentiable like an activation.

    Attributes:
        name: unique within the mixer.
        shape: without the batch dimension; for a window the shape of one token.
        dtype: what the state is carried in.
        kind: "carry" is replaced by every chunk, tensor [B, *shape]. "window" grows by the tokens of every
            chunk, tensor [B, S, *shape] with S the number of tokens before the chunk.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Literal["carry", "window"]


@dataclass(frozen=True)
class HeadGroups:
    """Heads in consecutive groups, all of a layer's or one rank's part: those of a group share, say, a key head.

    Attributes:
        first: number of the first group in the whole layer.
        sizes: how many of the heads here belong to that group, and to each following one.
    """

    first: int
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, num_heads: int, num_groups: int) -> "HeadGroups":
        return cls(0, (num_heads // num_groups,) * num_groups)

    def part(self, rank: int, num_ranks: int) -> "HeadGroups":
        """The groups of one rank's equal share of the heads; the first and the last may go on at the neighbours."""
        num_heads = sum(self.sizes)
        assert num_heads % num_ranks == 0, f"{num_heads} heads on {num_ranks} ranks"
        group_of = [g for g, size in enumerate(self.sizes) for _ in range(size)]
        share = num_heads // num_ranks
        mine = group_of[rank * share : (rank + 1) * share]
        return HeadGroups(self.first + mine[0], tuple(len(list(same)) for _, same in itertools.groupby(mine)))

    def are_equal(self) -> bool:
        return len(set(self.sizes)) == 1

    def runs(self) -> Iterator[tuple[slice, slice]]:
        """(heads, groups) of each longest run of groups of one size."""
        head = group = 0
        for size, same in itertools.groupby(self.sizes):
            count = len(list(same))
            yield slice(head, head + size * count), slice(group, group + count)
            head, group = head + size * count, group + count

    def expand(self, x_BTGK: Tensor) -> Tensor:
        """x of each head's group, [B, T, H, K]; x itself where all groups are of one size."""
        if self.are_equal():
            return x_BTGK
        entries = zip(x_BTGK.split(1, dim=2), self.sizes, strict=True)
        return torch.cat([x.expand(-1, -1, size, -1) for x, size in entries], dim=2)


class Mixer(nn.Module):
    """Base of all mixers: a subclass gives `state_spec`, `pre`, `core`, `out`, `initializers`, `sharding`."""

    sharding: ClassVar[dict[str, Literal["heads", "groups", "heads_in", "replicate"]]] = {}
    """For tensor parallelism, a parameter each: "heads" is cut by heads on dim 0, "heads_in" on dim 1.

    "groups" is cut by `groups` on dim 0. Where their number cannot be divided, each rank keeps the parameter whole and
    sees those rows of it that belong to its own groups. "heads_in" belongs to a linear map called as a module, without
    a bias, whose output is the sum over heads. All other parameters are "replicate": every rank uses them whole, and
    what flows from them to y goes through heads.
    """

    groups: HeadGroups | None = None
    """The heads by what they share, for a mixer with parameters that are declared "groups".

    Under tensor parallelism it becomes this rank's part, whose sizes may differ from group to group.
    """

    def sharded_head_counts(self) -> dict[str, int]:
        """The head counts that the tensor parallel degree must divide, by the name of argument and attribute.

        Under tensor parallelism the attributes become this rank's counts, and with them and with `groups` the shapes of
        `state_spec`; `pre`, `core` and `out` take the number of heads from their tensors or from `groups`.
        """
        raise NotImplementedError

    def state_spec(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """The boundary state, in order, for activations of `dtype`."""
        raise NotImplementedError

    def initializers(self, std: float, out_std: float) -> dict[str, Initializer]:
        """A rule for every parameter: `std` for projections, `out_std` for the one into the residual."""
        raise NotImplementedError

    def pre(self, x_BTD: Tensor, state: State, docs: Tensor | None) -> tuple[State, State, State]:
        """The operands of `core`, what `out` needs besides, and the leading tensors of the state's update."""
        raise NotImplementedError

    def core(self, operands: State, state: State, docs: Tensor | None) -> tuple[Tensor, State]:
        """The mixed values [B, T, H, V] and the remaining tensors of the state's update."""
        raise NotImplementedError

    def out(self, mixed_BTHV: Tensor, side: State) -> Tensor:
        """y_BTD."""
        raise NotImplementedError

    def initial_state(self, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> State:
        """The state before a sequence: zeros, and windows of length 0."""
        return tuple(
            torch.zeros(
                batch_size,
                *((0,) if spec.kind == "window" else ()),
                *spec.shape,
                device=device,
                dtype=spec.dtype,
            )
            for spec in self.state_spec(dtype)
        )

    def update(self, x_BTD: Tensor, state: State, docs: Tensor | None) -> tuple[Tensor, State]:
        """y_BTD and the state's update.

        That is the new value of a carry, but only this chunk's entries [B, T, *shape] of a window. A window
        in `state` is only read, so it may be a view of a buffer that the caller fills.
        """
        operands, side, first = self.pre(x_BTD, state, docs)
        mixed_BTHV, rest = self.core(operands, state, docs)
        return self.out(mixed_BTHV, side), first + rest

    def advance(self, state: State, update: State) -> State:
        """The state after the chunk: carries replaced, windows extended."""
        specs = self.state_spec(torch.float32)
        return tuple(
            torch.cat([old, new], dim=1) if spec.kind == "window" else new
            for spec, old, new in zip(specs, state, update, strict=True)
        )

    def forward(
        self, x_BTD: Tensor, state: State | None = None, docs: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """One chunk of a sequence outside any pipeline.

        Args:
            x_BTD: the chunk's inputs, T >= 1.
            state: what the call on the preceding chunk returned; None at the start of a sequence. Detach it
                for truncated backpropagation.
            docs: None, or int64 [B, T]: the position, relative to the chunk's first token, of the first token
                of each token's document (negative: before this chunk), from `chunks.chunk_documents`.

        Returns:
            y_BTD and the state for the next chunk, differentiable through it.

        Raises:
            ValueError: for docs of another type or shape; on the CPU also for values that cannot be.
        """
        check_documents(docs, *x_BTD.shape[:2])
        if state is None:
            state = self.initial_state(x_BTD.shape[0], x_BTD.device, x_BTD.dtype)
        y_BTD, update = self.update(x_BTD, state, docs)
        return y_BTD, self.advance(state, update)
