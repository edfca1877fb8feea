"""What crosses a cut: the boundary state of a chunk, and the sequence-wide windows of attention layers.

A unit hands two kinds of state to the next chunk of its microbatch (paper, eq. 4-7):

* **carries** have a fixed size and are replaced by every chunk (recurrent state, convolution tails).  A stage keeps
  them as a list in the order of the specs, and takes a first state as one TensorDict by layer name; module calls take
  and return flat tuples in the order of the layer's specs.
* **windows** grow with the sequence (K and V of softmax attention).  They live in one buffer for the whole sequence,
  written once and read in place, so that no chunk duplicates its prefix; their gradients accumulate in a second buffer
  of the same shape that exists only while the microbatch is back-propagated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from stateflow.layers.mixer import StateSpec

LayerSpecs = dict[str, tuple[StateSpec, ...]]
FlatState = tuple[tuple[Tensor, ...], ...]


def own_storage(tensor: Tensor) -> Tensor:
    """Detached, and without pinning a larger storage: a conv tail ``x[:, -3:]`` would keep the whole chunk alive."""
    detached = tensor.detach()
    if detached.untyped_storage().nbytes() > detached.numel() * detached.element_size():
        return detached.clone()
    return detached


def num_bytes(tensors: Iterator[Tensor] | Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class BoundarySpec:
    """Names and order of a stage's boundary tensors: ``specs`` maps a layer name to the specs of its mixer."""

    def __init__(self, specs: LayerSpecs):
        self.specs = specs
        self.carries = [(layer, s.name) for layer, ss in specs.items() for s in ss if s.kind == "carry"]
        self.windows = [(layer, s.name) for layer, ss in specs.items() for s in ss if s.kind == "window"]

    def carries_of(self, state: FlatState, batch_size: int) -> TensorDict:
        """Carry tensors of a flat state or update as a TensorDict ``{layer: {name: [B, ...]}}``, as they are."""
        layers = {}
        for (layer, specs), tensors in zip(self.specs.items(), state, strict=True):
            named = {s.name: t for s, t in zip(specs, tensors, strict=True) if s.kind == "carry"}
            if named:
                layers[layer] = TensorDict(named, batch_size=[batch_size])
        return TensorDict(layers, batch_size=[batch_size])

    def carry_tensors(self, state: FlatState) -> list[Tensor]:
        """Carry tensors of a flat state or update, in the order of ``self.carries``."""
        return self._of_kind("carry", state)

    def windows_of(self, state: FlatState) -> list[Tensor]:
        """Window tensors of a flat state or update, in the order of ``self.windows``."""
        return self._of_kind("window", state)

    def _of_kind(self, kind: str, state: FlatState) -> list[Tensor]:
        return [
            t
            for specs, tensors in zip(self.specs.values(), state, strict=True)
            for s, t in zip(specs, tensors, strict=True)
            if s.kind == kind
        ]

    def flat(self, carries: Sequence[Tensor], windows: Sequence[Tensor]) -> FlatState:
        """Inverse of ``carry_tensors`` and ``windows_of``: the tuple of tuples that the module call takes."""
        rest = {"carry": iter(carries), "window": iter(windows)}
        return tuple(tuple(next(rest[s.kind]) for s in specs) for specs in self.specs.values())

    def carry_list(self, carries: TensorDict) -> list[Tensor]:
        return [carries[key] for key in self.carries]

    def from_list(self, tensors: Sequence[Tensor | None]) -> dict[tuple[str, str], Tensor | None]:
        return dict(zip(self.carries, tensors, strict=True))


class SequenceWindow:
    """One window tensor of one microbatch, e.g. K of an attention layer: ``values`` [B, T, *shape].

    Writes go through ``.data``: a chunk that is still to be back-propagated has saved a view of the prefix, and a
    plain in-place write of later tokens would raise autograd's version-counter error although no saved element changes.
    """

    def __init__(self, example: Tensor, seq_len: int):
        self.values = example.new_empty((example.shape[0], seq_len, *example.shape[2:]))
        self.grads: Tensor | None = None

    def write(self, start: int, chunk: Tensor) -> None:
        self.values.data[:, start : start + chunk.shape[1]].copy_(chunk.detach())

    def prefix(self, length: int) -> Tensor:
        """Read-only view of the first ``length`` tokens, with a version counter of its own."""
        return self.values.data[:, :length]

    def add_prefix_grad(self, grad: Tensor) -> None:
        self._grad_buffer()[:, : grad.shape[1]].add_(grad)

    def chunk_grad(self, start: int, stop: int) -> Tensor:
        """What all later chunks' gradients add up to for the tokens [start, stop), in the window's own dtype."""
        return self._grad_buffer()[:, start:stop].to(self.values.dtype)

    def _grad_buffer(self) -> Tensor:
        if self.grads is None:
            dtype = torch.promote_types(self.values.dtype, torch.float32)
            self.grads = torch.zeros(self.values.shape, dtype=dtype, device=self.values.device)
        return self.grads


class ReadPrefix(torch.autograd.Function):
    """Hands a window's prefix to the module and adds the gradient that comes back into the window's gradient buffer.

    ``anchor`` is any tensor that requires grad; it makes autograd record this node and receives no gradient.
    """

    @staticmethod
    def forward(ctx, anchor: Tensor, window: SequenceWindow, length: int) -> Tensor:
        ctx.window = window
        return window.prefix(length)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.window.add_prefix_grad(grad)
        return None, None, None
