"""One stage's units: runs the forward and backward of (microbatch, chunk) and threads the boundary state.

The stage knows neither ranks nor transport, so the same code serves torch's pipelining (``runtime.py``) and the
single-process executor (``local.py``).  Per unit it keeps one record from forward to backward: the received
activation, the incoming carries (autograd leaves) and a scalar *root* whose graph holds the unit's outputs.  Joining
outputs in a root lets the output tensors themselves be freed as soon as they are sent, and gives every data-parallel
wrapper one tensor to call backward on.

Order is guarded here and not only in the checker: a forward takes the state of chunk i-1, a backward needs the state
gradient of chunk i+1, and either raises when it is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stateflow.boundary import BoundarySpec, ReadPrefix, SequenceWindow, num_bytes, own_storage
from stateflow.chunks import ChunkPlan
from stateflow.pipeline.accounting import StageFootprint
from stateflow.pipeline.deferred import DeferredWeights, WeightWork, held_bytes, run_all
from stateflow.recurrence.numerics import as_scalar, at_least_float32

LossFunction = Callable[[object, Tensor], Tensor]
# Runs autograd from a scalar root and returns the gradients of ``leaves``: (root, leaves, last_backward) -> grads.
BackwardEngine = Callable[[Tensor, Sequence[Tensor], bool], Sequence[Tensor | None]]


class UnitOrderError(RuntimeError):
    """A unit was run before the unit that it depends on (eq. 8)."""


class _Root(torch.autograd.Function):
    """Joins tensors into one scalar without keeping them; its backward returns the gradients put into ``slot``."""

    @staticmethod
    def forward(ctx, slot: list, *outputs: Tensor) -> Tensor:
        ctx.slot = slot
        return torch.zeros((), dtype=torch.float32, device=outputs[0].device)

    @staticmethod
    def backward(ctx, _grad: Tensor):
        grads = tuple(ctx.slot)
        ctx.slot.clear()
        return (None, *grads)


def run_autograd(root: Tensor, leaves: Sequence[Tensor], last_backward: bool) -> list[Tensor | None]:
    """The plain backward engine: parameters accumulate into ``.grad``, the leaves' gradients are returned."""
    torch.autograd.backward(root)
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return grads


@dataclass
class _PutOffLoss:
    """What the backward computes a unit's loss from, and where it puts it."""

    output: tuple[Tensor, ...]
    target: Tensor
    loss: Tensor

    def run(self, loss_fn: LossFunction, scale: Tensor | float) -> tuple[Tensor, ...]:
        """Returns the gradients of the output."""
        loss, grads = loss_fn.with_gradient(self.output, self.target, scale)
        self.loss.copy_(loss)
        return grads


@dataclass
class _Unit:
    """What one unit holds between its forward and its backward."""

    root: Tensor | None
    grad_slot: list  # the list that _Root.backward returns
    rooted: list[bool]  # which of (*output, *carries, *windows) take part in the root
    output_dtype: torch.dtype
    device: torch.device
    put_off: _PutOffLoss | None  # the loss, where the backward computes it
    activation: Tensor | None  # received from the previous stage, an autograd leaf
    carries: list[Tensor]  # incoming state, autograd leaves


@dataclass
class StageUsage:
    """What the stage holds now; compared with the prediction of ``accounting.predict``."""

    units: int = 0
    tokens: int = 0
    carry_bytes: int = 0
    carry_grad_bytes: int = 0
    window_bytes: int = 0
    window_grad_bytes: int = 0
    weight_work_bytes: int = 0

    def peak_with(self, other: StageUsage) -> StageUsage:
        return StageUsage(*(max(a, b) for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class ChunkStage:
    """Runs the units of one stage.

    ``module(x, attention_masks=docs, state=flat)`` must return ``(output, updates)`` and offer
    ``state_spec(dtype)`` and ``initial_state(batch_size, device, dtype)`` (see ``stateflow.model.LanguageModel``).
    With ``loss_fn`` (last stage) and a target, a unit's forward returns the chunk's loss *sum* instead of the output.

    A ``loss_fn`` may have an attribute ``with_gradient(output, target, scale) -> (loss sum, gradients of scale times it
    by output)``, as ``loss.cross_entropy_sum`` has, for outputs that are tuples of tensors. In training head and loss
    then run once, in the unit's backward, and the scalar that the forward has returned, NaN till then, gets its value
    there. Other losses, and outputs with DTensors, are computed in the forward, under autograd.
    """

    module: nn.Module
    plan: ChunkPlan
    activation_dtype: torch.dtype = torch.float32
    is_last: bool = True
    loss_fn: LossFunction | None = None
    name: str = "stage 0"
    track_usage: bool = False

    usage_peak: StageUsage = field(default_factory=StageUsage, init=False)
    initial_state_grads: dict[int, dict] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.spec = BoundarySpec(self.module.state_spec(self.activation_dtype))
        self._units: dict[tuple[int, int], _Unit] = {}
        self._carries: dict[int, list[Tensor]] = {}  # microbatch -> state that its next chunk starts from
        self._windows: dict[int, list[SequenceWindow]] = {}
        self._next_chunk: dict[int, int] = {}
        self._state_grads: dict[tuple[int, int], list[Tensor | None]] = {}  # unit -> gradient of its outgoing carries
        self._initial: dict[int, TensorDict] = {}
        self._deferred: DeferredWeights | None = None
        self._weight_work: dict[tuple[int, int], list[WeightWork]] = {}  # unit between I and W -> what W computes
        self._weight_bytes_per_token = 0  # of a microbatch; known after the first I

    @property
    def splits_backward(self) -> bool:
        return self._deferred is not None

    def split_backward(self) -> None:
        """Prepares the module for I and W; call it once the module is wrapped, before the first forward.

        Raises ValueError for modules compiled in place.
        """
        if self._deferred is None:
            self._deferred = DeferredWeights(self.module)

    # ------------------------------------------------------------------ forward
    def start(self, microbatch: int, carries: TensorDict) -> None:
        """Gives the state that chunk 0 of ``microbatch`` starts from (zeros otherwise).

        ``carries`` is a TensorDict ``{layer: {name: [B, ...]}}`` as ``spec.carries_of(module.initial_state(...), B)``
        makes it.  It serves one pass.  Its gradient is in ``initial_state_grads[microbatch]`` after the backward of
        chunk 0, keyed by (layer, name).
        """
        self._initial[microbatch] = carries

    def forward(
        self, microbatch: int, chunk: int, x: Tensor, *, docs: Tensor | None = None, target: Tensor | None = None,
        training: bool = True,
    ) -> Tensor | tuple[Tensor, ...]:
        """Forward of one unit (eq. 4).

        ``x``: tokens [B, s] on the first stage, else the received activation [B, s, D] (becomes an autograd leaf).
        ``docs``: int64 [B, s] start of each token's document relative to this chunk, or None.
        Returns the activation for the next stage, or on the last stage the detached loss sum (with a target) or the
        module's output.  Raises UnitOrderError if chunk - 1 of the microbatch has not run.
        """
        expected = self._next_chunk.get(microbatch, 0)
        if chunk != expected:
            raise UnitOrderError(
                f"{self.name}: forward of (microbatch {microbatch}, chunk {chunk}), but chunk {expected} is next: "
                "forward chunks must ascend (eq. 8)"
            )
        start, stop = self.plan.span(chunk)
        if x.shape[1] != stop - start:
            raise ValueError(
                f"{self.name}: chunk {chunk} of the plan has {stop - start} tokens, its input has {x.shape[1]}; "
                f"give sequences of {self.plan.seq_len} tokens"
            )
        if x.is_floating_point():
            x = x.requires_grad_(training)
        carries = self._incoming_carries(microbatch, chunk, x, training)
        prefixes = self._incoming_prefixes(microbatch, start, x, training)
        output, updates = self.module(x, attention_masks=docs, state=self.spec.flat(carries, prefixes))
        put_off = None
        if self.loss_fn is not None and target is not None:
            if training and self._can_put_off(output):
                dtype = at_least_float32(output[0])
                loss = torch.full((), math.nan, dtype=dtype, device=output[0].device)
                put_off = _PutOffLoss(_detach(output), target, loss)
            else:
                output = self.loss_fn(output, target)

        outgoing = self.spec.carry_tensors(updates)
        fresh = self.spec.windows_of(updates)
        self._write_windows(microbatch, start, fresh)
        last_chunk = chunk == self.plan.num_chunks - 1
        # The final state of a sequence goes nowhere; keeping it out of the root spares its backward.
        handed_on = [] if last_chunk else outgoing
        if training:
            self._units[microbatch, chunk] = self._record(x, carries, output, handed_on, fresh, put_off)
        if last_chunk:
            self._next_chunk.pop(microbatch, None)
            if not training:
                self._windows.pop(microbatch, None)
        else:
            self._next_chunk[microbatch] = chunk + 1
            self._carries[microbatch] = [own_storage(t) for t in outgoing]
        self._note_usage()
        return _detach(output) if put_off is None else put_off.loss

    def _can_put_off(self, output) -> bool:
        plain = isinstance(output, tuple) and not any(isinstance(t, DTensor) for t in output)
        return plain and hasattr(self.loss_fn, "with_gradient")

    def _incoming_carries(self, microbatch: int, chunk: int, x: Tensor, training: bool) -> list[Tensor]:
        if chunk > 0:
            carries = self._carries.pop(microbatch)
        elif microbatch in self._initial:
            carries = [t.detach() for t in self.spec.carry_list(self._initial[microbatch])]
            if not training:
                del self._initial[microbatch]
        else:
            zeros = self.module.initial_state(x.shape[0], x.device, self.activation_dtype)
            carries = self.spec.carry_tensors(zeros)
        # Chunk 0's zeros require grad too, so that compiled blocks see one kind of input and build one graph.
        return [t.requires_grad_(training) for t in carries]

    def _incoming_prefixes(self, microbatch: int, start: int, x: Tensor, training: bool) -> list[Tensor]:
        if start == 0:
            zeros = self.module.initial_state(x.shape[0], x.device, self.activation_dtype)
            return [w.requires_grad_(training) for w in self.spec.windows_of(zeros)]
        windows = self._windows.get(microbatch, ())
        if not training:
            return [w.prefix(start) for w in windows]
        anchor = torch.zeros((), device=x.device, requires_grad=True)
        return [ReadPrefix.apply(anchor, w, start) for w in windows]

    def _write_windows(self, microbatch: int, start: int, fresh: list[Tensor]) -> None:
        if start == 0 and fresh:
            self._windows[microbatch] = [SequenceWindow(t.detach(), self.plan.seq_len) for t in fresh]
        for window, tensor in zip(self._windows.get(microbatch, ()), fresh, strict=True):
            window.write(start, tensor)

    def _record(
        self, x, leaves, output, carries: list[Tensor], windows: list[Tensor], put_off: _PutOffLoss | None
    ) -> _Unit:
        head = output if isinstance(output, Tensor) else output[0]
        outputs = [*([head] if put_off is None else output), *carries, *windows]
        rooted = [t.requires_grad for t in outputs]
        slot: list = []
        joined = [t for t in outputs if t.requires_grad]
        root = _Root.apply(slot, *joined) if joined else None
        activation = x if x.is_floating_point() else None
        return _Unit(root, slot, rooted, head.dtype, head.device, put_off, activation, leaves)

    # ----------------------------------------------------------------- backward
    def backward(
        self, microbatch: int, chunk: int, grad_output: Tensor | None = None, *, loss_scale: Tensor | float = 1.0,
        engine: BackwardEngine = run_autograd, last_backward: bool = False, input_only: bool = False,
    ) -> Tensor | None:
        """Backward of one unit (eq. 6-7): parameters accumulate, the gradient of the received activation is returned.

        With ``input_only`` this is I, and ``weight_backward`` has to follow: the gradients of projections wait for it.
        ``grad_output`` [B, s, D] comes from the next stage; on the last stage the loss sum is scaled by ``loss_scale``.
        Raises UnitOrderError if chunk + 1 of the microbatch has not been back-propagated.
        """
        unit = self._units.get((microbatch, chunk))
        if unit is None:
            where = f"(microbatch {microbatch}, chunk {chunk})"
            raise UnitOrderError(f"{self.name}: backward of {where} before its forward")
        state_grads = self._outgoing_grads(microbatch, chunk)
        window_grads = self._window_grads(microbatch, chunk)
        if unit.put_off is not None:
            output_grads = unit.put_off.run(self.loss_fn, loss_scale)
            unit.put_off = None
        elif grad_output is None:
            output_grads = (as_scalar(loss_scale, unit.output_dtype, unit.device),)
        else:
            output_grads = (grad_output,)
        grads = [*output_grads, *state_grads, *window_grads]
        unit.grad_slot[:] = [g for g, rooted in zip(grads, unit.rooted, strict=True) if rooted]
        del output_grads, grads  # the slot alone holds them, and lets go of each once it is used
        leaves = [t for t in (unit.activation, *unit.carries) if t is not None and t.requires_grad]
        assert self._deferred is not None or not input_only, "split_backward() comes before the first forward"
        with self._deferred.collecting() if self._deferred is not None else nullcontext([]) as work:
            got = [None] * len(leaves) if unit.root is None else engine(unit.root, leaves, last_backward)
        if input_only:
            self._weight_work[microbatch, chunk] = work
            self._weight_bytes_per_token = held_bytes(work) // self.plan.lengths[chunk]
        by_leaf = {id(leaf): grad for leaf, grad in zip(leaves, got, strict=True)}
        incoming = [by_leaf.get(id(t)) for t in unit.carries]
        if chunk > 0:
            self._state_grads[microbatch, chunk - 1] = incoming  # all that has to outlive this unit
        self._note_usage()
        self._state_grads.pop((microbatch, chunk), None)
        del self._units[microbatch, chunk]
        if chunk == 0:
            if self._initial.pop(microbatch, None) is not None:
                self.initial_state_grads[microbatch] = self.spec.from_list(incoming)
            self._windows.pop(microbatch, None)
        if not input_only:
            run_all(work)
        return None if unit.activation is None else by_leaf.get(id(unit.activation))

    def weight_backward(self, microbatch: int, chunk: int) -> None:
        """W of one unit: the weight gradients that its I has put off accumulate."""
        work = self._weight_work.get((microbatch, chunk))
        if work is None:
            raise UnitOrderError(f"{self.name}: W of (microbatch {microbatch}, chunk {chunk}) before its I")
        self._note_usage()
        run_all(work)
        del self._weight_work[microbatch, chunk]

    def _outgoing_grads(self, microbatch: int, chunk: int) -> list[Tensor | None]:
        """Gradient of the state that chunk handed on: what the backward of chunk + 1 left (eq. 7)."""
        if chunk == self.plan.num_chunks - 1:
            return []
        if (microbatch, chunk) not in self._state_grads:
            raise UnitOrderError(
                f"{self.name}: backward of (microbatch {microbatch}, chunk {chunk}) before chunk {chunk + 1}: "
                "backward chunks must descend (eq. 8)"
            )
        return self._state_grads[microbatch, chunk]

    def _window_grads(self, microbatch: int, chunk: int) -> list[Tensor | None]:
        windows = self._windows.get(microbatch, [])
        if chunk == self.plan.num_chunks - 1:
            return [None] * len(windows)  # no later chunk has read the last chunk's K/V
        return [w.chunk_grad(*self.plan.span(chunk)) for w in windows]

    # ------------------------------------------------------------------- house-keeping
    def footprint(self, batch_size: int, hidden_size: int) -> StageFootprint:
        """Bytes of this stage for one microbatch of ``batch_size`` sequences, for ``accounting.predict``.

        What a unit keeps from I to W is what the last I left, so 0 before the first.
        """
        specs = [spec for specs in self.spec.specs.values() for spec in specs]

        def size(kind: str, at_least: torch.dtype | None = None) -> int:
            total = 0
            for spec in specs:
                if spec.kind == kind:
                    dtype = spec.dtype if at_least is None else torch.promote_types(spec.dtype, at_least)
                    total += batch_size * math.prod(spec.shape) * dtype.itemsize
            return total

        return StageFootprint(
            activation_bytes_per_token=batch_size * hidden_size * self.activation_dtype.itemsize,
            carry_bytes=size("carry"),
            window_bytes_per_token=size("window"),
            window_grad_bytes_per_token=size("window", torch.float32),
            weight_bytes_per_token=self._weight_bytes_per_token,
        )

    def reset(self) -> None:
        """Forgets everything in flight, e.g. after a step that raised; given initial states stay."""
        for held in (
            self._units, self._carries, self._windows, self._next_chunk, self._state_grads, self._weight_work
        ):  # fmt: skip
            held.clear()
        self.initial_state_grads.clear()

    def assert_drained(self) -> None:
        """After a whole step nothing may be left: a leftover is a unit that was never back-propagated."""
        left = {
            "units": sorted(self._units), "carries": sorted(self._carries), "windows": sorted(self._windows),
            "state gradients": sorted(self._state_grads), "units without W": sorted(self._weight_work),
        }
        left = {name: keys for name, keys in left.items() if keys}
        if left:
            raise UnitOrderError(f"{self.name}: left after the step: {left}; every unit must be run to its end")

    def usage(self) -> StageUsage:
        """Counts what the stage's containers hold right now."""
        lengths = self.plan.lengths
        windows = [w for ws in self._windows.values() for w in ws]
        held = {id(t): t for unit in self._units.values() for t in unit.carries}
        chunk0 = {id(t) for (_, chunk), unit in self._units.items() if chunk == 0 for t in unit.carries}
        carries = [t for key, t in held.items() if key not in chunk0]
        carries += [t for state in self._carries.values() for t in state]
        grads = [g for gs in self._state_grads.values() for g in gs if g is not None]
        in_flight = self._units.keys() | self._weight_work.keys()
        return StageUsage(
            units=len(in_flight),
            tokens=sum(lengths[chunk] for _, chunk in in_flight),
            carry_bytes=num_bytes(carries),
            carry_grad_bytes=num_bytes(grads),
            window_bytes=num_bytes([w.values for w in windows]),
            window_grad_bytes=num_bytes([w.grads for w in windows if w.grads is not None]),
            weight_work_bytes=held_bytes([w for work in self._weight_work.values() for w in work]),
        )

    def _note_usage(self) -> None:
        if self.track_usage:
            self.usage_peak = self.usage_peak.peak_with(self.usage())


def _detach(output):
    return output.detach() if isinstance(output, Tensor) else tuple(t.detach() for t in output)
