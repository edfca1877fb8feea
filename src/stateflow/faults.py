"""Faults to plant on purpose: proof that a check of gradients would notice them.

Each is a context manager that breaks one thing of the running pipeline, inside this process only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import torch

from stateflow.pipeline.schedule import Kind
from stateflow.pipeline.stage import ChunkStage


@contextmanager
def _wrapped(owner, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        yield


def drop_state_grad() -> AbstractContextManager:
    """The gradient of the state that a chunk hands on is lost: truncated back-propagation at every cut."""

    def make(original):
        return lambda self, a, i: [None] * len(original(self, a, i))

    return _wrapped(ChunkStage, "_outgoing_grads", make)


def _drop_carries(names: tuple[str, ...]) -> AbstractContextManager:
    """Each chunk starts from zeros in the carried tensors whose name begins with one of `names`."""

    def make(original):
        def incoming(self, *args):
            carries = original(self, *args)
            for (_, name), carry in zip(self.spec.carries, carries, strict=True):
                if name.startswith(names):
                    with torch.no_grad():
                        carry.zero_()
            return carries

        return incoming

    return _wrapped(ChunkStage, "_incoming_carries", make)


def drop_conv_tail() -> AbstractContextManager:
    """Each chunk's short convolutions start from zeros instead of the previous chunk's last inputs."""
    return _drop_carries(("conv",))


def drop_last_token() -> AbstractContextManager:
    """Mamba-3's trapezoidal rule misses, at each chunk's first token, the k and v of the token before."""
    return _drop_carries(("k_last", "v_last"))


def drop_kv_grad() -> AbstractContextManager:
    """What later chunks' attention owes to this chunk's keys and values is lost."""

    def make(original):
        return lambda self, a, i: [None] * len(original(self, a, i))

    return _wrapped(ChunkStage, "_window_grads", make)


def ascending_backward() -> AbstractContextManager:
    """Every policy's table has the backward chunks of a microbatch in ascending order; the checker must refuse it."""

    def make(original):
        def build(*args, **kwargs):
            schedule = original(*args, **kwargs)
            last = schedule.num_chunks - 1

            def mirrored(action):
                if action.kind is Kind.B:
                    return dataclasses.replace(action, chunk=last - action.chunk)
                return action

            return dataclasses.replace(
                schedule, table=tuple(tuple(mirrored(a) for a in actions) for actions in schedule.table)
            )

        return build

    from stateflow.pipeline import runtime

    return _wrapped(runtime, "build_schedule", make)


def shift_labels_per_chunk() -> AbstractContextManager:
    """Labels are shifted inside each chunk, so that the last token of every chunk has none."""

    def make(original):
        def forward(self, a, i, x, *, target=None, **kwargs):
            if target is not None and i < self.plan.num_chunks - 1:
                target = target.clone()
                target[:, -1] = -100
            return original(self, a, i, x, target=target, **kwargs)

        return forward

    return _wrapped(ChunkStage, "forward", make)


def scale_grad() -> AbstractContextManager:
    """Gradients are a mean over chunks of sums: 1/N of what they should be."""

    def make(original):
        def backward(self, a, i, grad=None, *, loss_scale=1.0, **kwargs):
            return original(self, a, i, grad, loss_scale=loss_scale / self.plan.num_chunks, **kwargs)

        return backward

    return _wrapped(ChunkStage, "backward", make)


def drop_weight_grad() -> AbstractContextManager:
    """What one projection of each unit left for W counts nothing. Shows under policies with I and W only."""

    def make(original):
        def weight_backward(self, a, i):
            last = self._weight_work[a, i][-1]
            last.grad = torch.zeros_like(last.grad)
            return original(self, a, i)

        return weight_backward

    return _wrapped(ChunkStage, "weight_backward", make)


FAULTS: dict[str, Callable[[], AbstractContextManager]] = {
    "drop-state-grad": drop_state_grad,
    "drop-conv-tail": drop_conv_tail,
    "drop-last-token": drop_last_token,
    "drop-kv-grad": drop_kv_grad,
    "ascending-backward": ascending_backward,
    "shift-labels-per-chunk": shift_labels_per_chunk,
    "scale-grad": scale_grad,
    "drop-weight-grad": drop_weight_grad,
}

