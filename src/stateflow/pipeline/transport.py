"""Buffers and sends of one rank: receive buffers from a pool, sends retired as soon as they are known to have arrived.

Life times
----------
==================  =======================================  ==========================================
tensor              allocated at                             given back at
==================  =======================================  ==========================================
activation buffer   RECV_F(u)                                end of B(u) (of F(u) when evaluating)
gradient buffer     RECV_B(u)                                end of B(u)
sent tensor         SEND(u)                                  the first receive that proves its arrival
==================  =======================================  ==========================================

The pool keeps buffers by shape, so it grows to the in-flight window of the table and then never again.  Reuse is safe
on CUDA because a buffer returns to the pool only after the kernels that read it are queued on the current stream, and
a receive posted from that stream waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from stateflow.pipeline.progress import Message, Progress
from stateflow.pipeline.schedule import Action, Kind


class BufferPool:
    """Receive buffers by (shape, dtype); ``live`` and ``allocated`` count buffers and bytes for tests and reports."""

    def __init__(self, device: torch.device):
        self.device = device
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self.num_live = self.peak_live = 0
        self.num_allocated = self.allocated_bytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        free = self._free[torch.Size(shape), dtype]
        if free:
            buffer = free.pop()
        else:
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
            self.num_allocated += 1
            self.allocated_bytes += buffer.numel() * buffer.element_size()
        self.num_live += 1
        self.peak_live = max(self.peak_live, self.num_live)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self.num_live -= 1
        self._free[buffer.shape, buffer.dtype].append(buffer)

    def clear(self) -> None:
        """Drops every buffer, e.g. after a step that raised with receives still posted into some of them."""
        self._free.clear()
        self.num_live = 0


def arrival_proofs(lowered: Sequence[Sequence[Action]], stage_to_rank: Sequence[int], rank: int) -> dict:
    """Which of this rank's sends have arrived once a receive has been waited for: ``{received: [sent, ...]}``.

    A peer that sent m had, in its program order, already waited for all that it computed on before; so when ``rank``
    has received m, those messages have arrived and waiting for their sends cannot block.  Keys and values are Messages.
    """
    proofs: dict[Message, list[Message]] = {}
    for peer, actions in enumerate(lowered):
        if peer == rank:
            continue
        consumed: list[Message] = []  # messages from ``rank`` that ``peer`` has computed on since its last send to it
        for action in actions:
            unit = (action.microbatch, action.chunk)
            if action.kind is Kind.F and action.stage > 0 and stage_to_rank[action.stage - 1] == rank:
                consumed.append((Kind.SEND_F, action.stage - 1, *unit))
            elif action.kind in (Kind.B, Kind.I) and action.stage + 1 < len(stage_to_rank):
                if stage_to_rank[action.stage + 1] == rank:
                    consumed.append((Kind.SEND_B, action.stage + 1, *unit))
            elif action.kind in (Kind.SEND_F, Kind.SEND_B):
                receiver = action.stage + (1 if action.kind is Kind.SEND_F else -1)
                if stage_to_rank[receiver] == rank and consumed:
                    proofs[action.kind, action.stage, *unit] = consumed
                    consumed = []
    return proofs


class SendLedger:
    """Sends of one rank that have not been retired; shared by the rank's stages."""

    def __init__(self, progress: Progress, proofs: dict | None = None):
        self.progress, self.proofs = progress, proofs or {}
        self._pending: dict[Message, tuple[list, Tensor, int]] = {}
        self.peak_pending = 0
        progress.pending = lambda: list(self._pending)

    def post(self, message: Message, tensor: Tensor, peer: int, send: Callable[[Tensor, int], Iterable]) -> None:
        """Starts a send to rank ``peer``; the tensor is kept alive until the send is retired."""
        tensor = tensor.contiguous()  # gloo and NCCL send raw memory
        with self.progress.with_peer(peer):
            self._pending[message] = (list(send(tensor, peer)), tensor, peer)
        self.peak_pending = max(self.peak_pending, len(self._pending))

    def received(self, message: Message) -> None:
        """Retires the sends that ``message``, now received, proves to have arrived."""
        for sent in self.proofs.get(message, ()):
            self._wait(sent)

    def keep_at_most(self, count: int) -> None:
        """Retires the oldest sends beyond ``count``: in a forward-only pass nothing comes back as a proof."""
        while len(self._pending) > count:
            self._wait(next(iter(self._pending)))

    def drain(self) -> None:
        self.keep_at_most(0)

    def clear(self) -> None:
        self._pending.clear()

    def _wait(self, message: Message) -> None:
        works, _tensor, peer = self._pending.get(message, ((), None, -1))
        if works:
            with self.progress.with_peer(peer, message, sent=True):
                for work in works:
                    self.progress.wait(work)
        self._pending.pop(message, None)
