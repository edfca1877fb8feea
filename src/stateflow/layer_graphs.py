"""CUDA graphs of recomputed layers: the host launches a layer's forward, or its whole backward, at once.

With chunks of a few thousand tokens the GPU is done with a kernel before the host has launched the next one.  A layer
that is fully recomputed is two pure functions, (x, state) -> (y, state') and (x, state, dy, dstate') -> (dx, dstate),
the latter adding to gradient buffers that stay in place.  Each is recorded once a layer, shape of its arguments and
autocast.

A replay reads and writes fixed memory: arguments are copied in, results copied out, by buffers that all layers share,
as are the intermediate tensors (one memory pool).  That is sound because replays follow one another on one stream, and
each result is copied out before the next replay.

The first call with a shape runs as usual, so that kernels are compiled, checked and chosen before the second records.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from stateflow.autocast import Autocast

Tensors = Sequence[Tensor | None]
Function = Callable[[Tensors], Tensors]


class CudaRecorder:
    """Records what a function launches; one pool of memory and one stream for all recordings."""

    def __init__(self):
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """The launches of `function`, which does not compute anything yet: a call of what is returned does.

        Raises RuntimeError where `function` synchronises with the device.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Without torch.cuda.graph, whose synchronisation would wait for other ranks.
        collects = gc.isenabled()
        gc.disable()  # a collection may free what must not be freed while a stream records
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                # Of this thread only: NCCL's watchdog asks for events from another.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        current.wait_stream(self._stream)
        return graph.replay


class LayerGraphs:
    """Runs functions of tensors, from the second call with a key and shapes on as recorded graphs.

    Args:
        recorder: `record(function)` returns what repeats it on the same memory.
    """

    def __init__(self, recorder):
        self._recorder = recorder
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[Callable[[], None], list[Tensor], list[Tensor | None]]] = {}
        self._buffers: dict[Hashable, Tensor] = {}

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def call(self, key: Hashable, function: Function, arguments: Tensors) -> list[Tensor | None]:
        """`function(arguments)`. It must depend on nothing else but memory that stays in place, and keep nothing."""
        given = [t for t in arguments if t is not None]
        key = key, Autocast.at(given[0]), *(None if t is None else (t.shape, t.dtype) for t in arguments)
        if key not in self._recorded:
            if key not in self._seen:
                self._seen.add(key)
                return list(function(arguments))
            self._recorded[key] = self._record(function, arguments)
        replay, inputs, outputs = self._recorded[key]
        with torch.no_grad():
            torch._foreach_copy_(inputs, given)
            replay()
            there = [t for t in outputs if t is not None]
            copies = [torch.empty_like(t) for t in there]
            torch._foreach_copy_(copies, there)
        results = iter(copies)
        return [None if t is None else next(results) for t in outputs]

    def _record(self, function: Function, arguments: Tensors):
        inputs = [self._buffer(("in", i), t) for i, t in enumerate(arguments)]
        outputs: list[Tensor | None] = []

        def run() -> None:
            results = function(inputs)
            if not outputs:
                # Allocated by the recording, as these are: in memory that no later recording may take.
                outputs.extend(self._buffer(("out", i), t) for i, t in enumerate(results))
            with torch.no_grad():
                for buffer, result in zip(outputs, results, strict=True):
                    if result is not None:
                        buffer.copy_(result)

        replay = self._recorder.record(run)
        return replay, [t for t in inputs if t is not None], outputs

    def _buffer(self, place: Hashable, like: Tensor | None) -> Tensor | None:
        if like is None:
            return None
        key = place, like.shape, like.dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self._buffers[key]
