"""The schedule on top of torch.distributed.pipelining: ``StateFlowStage`` and ``ScheduleStateFlow``.

Only this file and ``edges`` touch torch's private pipelining names.  What torch provides: the executor of a lowered
table, FSDP2's unshard/reshard/reduce, DDP's no-sync, profiling ranges.  What is ours: the order (``policies``), its
check (``checker``), lowering, splitting along (batch, sequence), boundary states (``stage``), the split of the
backward (``deferred``), buffers and sends (``transport``), process groups (``edges``), their failure (``progress``,
``watchdog``), and losses by unit.  torch's microbatch index is the unit ``a * N + i`` here.

Tested on torch 2.11 and 2.13: whatever moved between these releases (metadata inference, receive infos, signatures of
private hooks) is overridden rather than adapted to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.nn.parallel import DistributedDataParallel

from stateflow.chunks import ChunkPlan, chunk_documents
from stateflow.pipeline.checker import check_communication, check_schedule
from stateflow.pipeline.edges import Edges
from stateflow.pipeline.lowering import edges_of, lower, lower_forward_only
from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.progress import Message
from stateflow.pipeline.schedule import Action, Kind, Schedule
from stateflow.pipeline.stage import ChunkStage, LossFunction
from stateflow.pipeline.transport import BufferPool, SendLedger, arrival_proofs
from stateflow.pipeline.watchdog import Watchdog, make_progress

ActionHook = Callable[[Action], AbstractContextManager]

_MAX_PENDING_EVAL_SENDS = 2


class StateFlowStage(PipelineStage):
    """A ``PipelineStage`` whose unit of work is a chunk of a microbatch.

    Args:
        module: this stage's part of a model, see ``ChunkStage`` for what it must offer.
        stage_index, num_stages, device, group: as for ``PipelineStage``.
        plan: where the sequence is cut.
        microbatch_size: sequences in a microbatch (B).
        hidden_size: width D of the activation that crosses stages, [B, s, D].
        activation_dtype: its dtype; under mixed precision the compute dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        plan: ChunkPlan,
        *,
        microbatch_size: int,
        hidden_size: int,
        activation_dtype: torch.dtype = torch.float32,
        group: dist.ProcessGroup | None = None,
        track_usage: bool = False,
    ):
        super().__init__(module, stage_index, num_stages, torch.device(device), group=group)
        self.plan = plan
        self.microbatch_size, self.hidden_size, self.activation_dtype = microbatch_size, hidden_size, activation_dtype
        self.units = ChunkStage(
            module, plan, activation_dtype, is_last=self.is_last, name=f"stage {stage_index}", track_usage=track_usage
        )
        self.pool = BufferPool(self.device)
        self.progress = make_progress(self.group, self.device)
        self.ledger = SendLedger(self.progress)
        self.edges: Edges | None = None  # the schedule's
        self.action_hook: ActionHook | None = None
        self.loss_scale: float | Tensor = 1.0
        self.unit_outputs: dict[int, object] = {}
        self._activations: dict[int, Tensor] = {}  # inputs of forwards to come: received or from a stage on this rank
        self._gradients: dict[int, Tensor | None] = {}
        self._buffers: dict[tuple[str, int], Tensor] = {}  # the pool's, by ("F" | "B", unit)
        self._receives: dict[tuple[str, int], list[dist.Work]] = {}
        self._outbox: dict[tuple[str, int], Tensor] = {}

    # ---- torch's metadata: shapes are known from the plan, so nothing is inferred and nothing allocated up front
    def _prepare_forward_infra(self, num_microbatches, *args, **kwargs):
        self.chunks = num_microbatches
        self.args_recv_info = {unit: () for unit in range(num_microbatches)}
        self.act_send_info = {}
        return ()

    def _prepare_backward_infra(self, num_microbatches, *args, **kwargs):
        self.chunks = num_microbatches
        self.grad_recv_info = {unit: () for unit in range(num_microbatches)}
        return None

    def _get_init_p2p_neighbors_ops(self):
        return []  # edges are connected when they are made

    # ---- communication
    def _unit(self, u: int) -> tuple[int, int]:
        return divmod(u, self.plan.num_chunks)

    # torch gets no operations to start and wait for, as it would not say which one failed; and it would keep the Work
    # of sends, and the tensors, until the end of the step.
    def _recv(self, direction: str, u: int, peer_stage: int) -> list:
        a, chunk = self._unit(u)
        peer = self.stage_index_to_group_rank[peer_stage]
        shape = (self.microbatch_size, self.plan.lengths[chunk], self.hidden_size)
        buffer = self._buffers[direction, u] = self.pool.take(shape, self.activation_dtype)
        inbox = self._activations if direction == "F" else self._gradients
        inbox[u] = buffer.detach()  # an alias, so that the pooled tensor itself never joins a graph
        kind = Kind.RECV_F if direction == "F" else Kind.RECV_B
        with self.progress.action(Action(self.stage_index, kind, a, chunk)), self.progress.with_peer(peer):
            self._receives[direction, u] = self.edges.receive(buffer, peer)
        return []

    def _send(self, kind: Kind, u: int, tensor: Tensor, peer_stage: int) -> list:
        peer = self.stage_index_to_group_rank[peer_stage]
        with self.progress.action(Action(self.stage_index, kind, *self._unit(u))):
            self.ledger.post((kind, self.stage_index, *self._unit(u)), tensor, peer, self.edges.send)
        return []

    def get_fwd_recv_ops(self, u: int):
        return [] if self.is_first else self._recv("F", u, self.stage_index - 1)

    def get_bwd_recv_ops(self, u: int):
        return [] if self.is_last or not self.has_backward else self._recv("B", u, self.stage_index + 1)

    def get_fwd_send_ops(self, u: int):
        if self.is_last:
            return []
        ops = self._send(Kind.SEND_F, u, self._outbox.pop(("F", u)), self.stage_index + 1)
        if not self.has_backward:
            self.ledger.keep_at_most(_MAX_PENDING_EVAL_SENDS)
        return ops

    def get_bwd_send_ops(self, u: int):
        if self.is_first or not self.has_backward:
            return []
        return self._send(Kind.SEND_B, u, self._outbox.pop(("B", u)), self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs, u: int) -> None:
        self._activations[u] = prev_stage_outputs.detach()

    def get_local_bwd_output(self, u: int):
        return self._outbox.pop(("B", u))

    def set_local_bwd_input(self, next_stage_bwd_outputs, u: int) -> None:
        self._gradients[u] = next_stage_bwd_outputs

    def _await(self, kind: Kind, u: int, sender: int) -> None:
        """Waits for a message to this stage: the host with gloo, the current stream with NCCL."""
        message: Message = (kind, sender, *self._unit(u))
        works = self._receives.pop(("F" if kind is Kind.SEND_F else "B", u), ())
        if works:  # none from a stage on this rank
            with self.progress.with_peer(self.stage_index_to_group_rank[sender], message):
                for work in works:
                    self.progress.wait(work)
        self.ledger.received(message)

    def _acting(self, kind: Kind, u: int) -> AbstractContextManager:
        return self.progress.action(Action(self.stage_index, kind, *self._unit(u)))

    def _release(self, direction: str, u: int) -> None:
        buffer = self._buffers.pop((direction, u), None)
        if buffer is not None:
            self.pool.give_back(buffer)

    # ---- compute
    def _timed(self, kind: Kind, u: int) -> AbstractContextManager:
        if self.action_hook is None:
            return nullcontext()
        return self.action_hook(Action(self.stage_index, kind, *self._unit(u)))

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
        with self._acting(Kind.F, fwd_chunk_id):
            return self._forward(fwd_chunk_id, args, kwargs or {})

    def _forward(self, u: int, args, kwargs: dict):
        if self.is_first:
            (x,) = args
        else:
            x = self._activations.pop(u)
            self._await(Kind.SEND_F, u, self.stage_index - 1)
        training = self.has_backward and torch.is_grad_enabled()
        with self._timed(Kind.F, u):
            output = self.units.forward(*self._unit(u), x, training=training, **kwargs)
        if self.is_last:
            self.unit_outputs[u] = output
        else:
            self._check_activation(u, output)
            if not training and output.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                output = output.clone()  # a part without layers: its input goes back to the pool before this is sent
            if self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
                self._outbox["F", u] = output
        if not training:
            self._release("F", u)
        return output

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        if self.has_backward:
            kind = Kind.B if full_backward else Kind.I
            with self._acting(kind, bwd_chunk_id):
                self._backward(kind, bwd_chunk_id, last_backward)

    def _backward(self, kind: Kind, u: int, last_backward: bool) -> None:
        grad = None
        if not self.is_last:
            grad = self._gradients.pop(u)
            self._await(Kind.SEND_B, u, self.stage_index + 1)
        with self._timed(kind, u):
            grad_input = self.units.backward(
                *self._unit(u), grad, loss_scale=self.loss_scale, engine=self._engine, last_backward=last_backward,
                input_only=kind is Kind.I,
            )  # fmt: skip
            if kind is Kind.B:
                self._cast_deferred_gradients()
        if not self.is_first:
            if grad_input is None:  # a part without any trainable path to its input
                grad_input = self._zero_gradient(u)
            self._outbox["B", u] = grad_input
        if kind is Kind.B:
            self._release("F", u)
            self._release("B", u)

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        if not self.has_backward:
            return
        u = bwd_chunk_id
        with self._acting(Kind.W, u), self._timed(Kind.W, u):
            self.units.weight_backward(*self._unit(u))
            self._cast_deferred_gradients()
        # Only now: a projection may have kept what was received.
        self._release("F", u)
        self._release("B", u)

    def split_backward(self) -> None:
        """Prepares the module for I and W.  Raises ValueError where it cannot be."""
        if isinstance(self.submod, DistributedDataParallel):
            raise ValueError(
                f"stage {self.stage_index}: DDP reduces gradients within the backward, and a split one leaves weight "
                "gradients for later; use FSDP2 (fully_shard), or a policy without I and W"
            )
        self.units.split_backward()

    def _cast_deferred_gradients(self) -> None:
        """FSDP2 adds up gradients in its reduce dtype, to which it casts after each backward: so W must do."""
        if isinstance(self.submod, FSDPModule) and self.units.splits_backward:
            for state in fully_shard.state(self.submod)._state_ctx.all_states:
                for group in _parameter_groups(state):
                    for parameter in group.fsdp_params:
                        if hasattr(parameter, "_unsharded_param"):
                            parameter.accumulate_unsharded_grad_if_needed()
                            parameter.to_accumulated_grad_if_needed()

    def _engine(self, root: Tensor, leaves: Sequence[Tensor], last_backward: bool):
        # torch's own helper keeps FSDP2 and DDP from reducing gradients before the last backward. For I, too, it is
        # a full backward as far as torch knows.
        kwargs = {"stage_output": root, "output_grads": None, "input_values": list(leaves)}
        grads, _ = self.backward_maybe_with_nosync("full", kwargs, last_backward=last_backward)
        return grads

    def _zero_gradient(self, u: int) -> Tensor:
        shape = (self.microbatch_size, self.plan.lengths[self._unit(u)[1]], self.hidden_size)
        return torch.zeros(shape, dtype=self.activation_dtype, device=self.device)

    def _check_activation(self, u: int, output: Tensor) -> None:
        a, i = self._unit(u)
        shape = (self.microbatch_size, self.plan.lengths[i], self.hidden_size)
        if tuple(output.shape) != shape or output.dtype != self.activation_dtype:
            raise ValueError(
                f"stage {self.stage_index}: (microbatch {a}, chunk {i}) gave an activation {tuple(output.shape)} "
                f"{output.dtype}, its receiver expects {shape} {self.activation_dtype}: make microbatch_size, "
                "hidden_size and activation_dtype of the stage agree with the module"
            )

    # ---- house-keeping
    def clear_runtime_states(self) -> None:
        if self.units._units or self._buffers or self._outbox:  # the previous step raised
            self.pool.clear()
            self.ledger.clear()
        mine = (self._activations, self._gradients, self._buffers, self._receives, self._outbox, self.unit_outputs)
        for held in mine:
            held.clear()
        self.units.reset()
        self.output_chunks.clear()

    def finish_step(self) -> None:
        self.ledger.drain()
        self.units.assert_drained()


class ScheduleStateFlow(_PipelineScheduleRuntime):
    """Pipelines chunks of sequences: a ``PipelineScheduleMulti`` that enumerates units (microbatch, chunk).

    Args:
        stages: this rank's ``StateFlowStage``s (one or several), all with the same plan.
        n_microbatches: M, microbatches in a batch; ``step`` takes M * microbatch_size sequences.
        policy, weight_lag, recomputed: as for ``policies.build_schedule``; ``schedule`` gives a table directly instead.
        loss_fn: ``(output, labels) -> sum over the chunk's tokens``; None for forward-only use.
        action_hook: ``hook(action)`` returns a context manager entered around each F, B, I and W, e.g. to time it.

    Raises ValueError (ScheduleError) for an illegal table, and on every rank if ranks disagree about plan or order.
    """

    def __init__(
        self,
        stages: Sequence[StateFlowStage],
        n_microbatches: int,
        *,
        policy: str = "1f1b",
        weight_lag: int | None = None,
        recomputed: bool = False,
        schedule: Schedule | None = None,
        loss_fn: LossFunction | None = None,
        action_hook: ActionHook | None = None,
    ):
        stages = list(stages)
        self.plan: ChunkPlan = stages[0].plan
        self.num_microbatches = n_microbatches
        super().__init__(
            stages, n_microbatches=n_microbatches * self.plan.num_chunks, loss_fn=loss_fn, scale_grads=False
        )
        if schedule is None:
            schedule = build_schedule(
                policy, self.pp_group_size, n_microbatches, self.plan.num_chunks, len(stages), weight_lag, recomputed
            )
        self._fit(schedule, stages)
        check_schedule(schedule)
        self.schedule = schedule
        self.lowered = lower(schedule)
        check_communication(self.lowered, schedule.stage_to_rank)
        self.pipeline_order = {r: [_to_torch(a, schedule) for a in actions] for r, actions in enumerate(schedule.table)}
        with_shards = {r: _with_shard_actions(actions, schedule) for r, actions in enumerate(self.lowered)}
        self._prepare_schedule_with_comms(with_shards, format="compute_comms")
        split = schedule.split_stages()
        for stage in stages:
            if stage.stage_index in split:
                stage.split_backward()
        self._compare_ranks(stages[0].group)

        progress = stages[0].progress
        ledger = SendLedger(progress, arrival_proofs(self.lowered, schedule.stage_to_rank, self.rank))
        pool = BufferPool(stages[0].device)
        self._edges = Edges(stages[0].group or dist.group.WORLD, edges_of(schedule), stages[0].device)
        for stage in stages:
            stage.progress, stage.ledger, stage.pool, stage.action_hook = progress, ledger, pool, action_hook
            stage.edges = self._edges
            stage.units.loss_fn = loss_fn if stage.is_last else None
        self.progress, self.ledger, self.pool = progress, ledger, pool
        self._watchdog = Watchdog(progress, stages[0].device)
        self._forward_order = {
            r: [a for a in _with_shard_actions(row, schedule) if a.computation_type.value != "REDUCE_GRAD"]
            for r, row in enumerate(lower_forward_only(schedule))
        }

    def _fit(self, schedule: Schedule, stages: Sequence[StateFlowStage]) -> None:
        mine = tuple(stage.stage_index for stage in stages)
        wanted = {
            "ranks": (schedule.num_ranks, self.pp_group_size),
            "stages": (schedule.num_stages, self._num_stages),
            "microbatches": (schedule.num_microbatches, self.num_microbatches),
            "chunks": (schedule.num_chunks, self.plan.num_chunks),
            f"stages on rank {self.rank}": (schedule.stages_of(self.rank), mine),
        }
        for what, (of_table, here) in wanted.items():
            if of_table != here:
                raise ValueError(f"the schedule's table has {of_table} {what}, this run has {here}: make them agree")

    def _compare_ranks(self, group) -> None:
        """Ranks that disagree would hang on NCCL or exchange tensors of the wrong length: stop all of them at once."""
        mine = (self.schedule.digest()[:16], self.plan.lengths, self.num_microbatches)
        everyone: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        if len(set(everyone)) > 1:
            table = "; ".join(
                f"rank {r}: order {digest}, chunk lengths {list(lengths)}, {m} microbatches"
                for r, (digest, lengths, m) in enumerate(everyone)
            )
            raise ValueError(f"pipeline ranks disagree about the plan, start all of them from one config ({table})")

    # ---- one batch
    def step(
        self,
        *args: Tensor,
        target: Tensor | None = None,
        losses: list | None = None,
        return_outputs: bool = False,
        attention_masks: Tensor | None = None,
        loss_scale: float | Tensor = 1.0,
        **kwargs,
    ):
        """Forward and backward of one batch.

        ``args``: tokens [M * B, T] on the rank of the first stage.  ``target``: labels [M * B, T] on the rank of the
        last one, already shifted.  ``attention_masks``: int64 [M * B, T] absolute start of each token's document, on
        every rank, or None.  ``loss_scale`` multiplies the loss sum in the backward only, e.g. 1 / valid tokens.
        ``losses`` receives the detached loss *sums* by unit.  Returns, if asked, what the last stage gave by unit: loss
        sums with a target, else outputs.
        """
        if self._has_backward and not torch.is_grad_enabled():
            raise RuntimeError("step() needs gradients; under torch.no_grad() call eval()")
        if kwargs:
            raise ValueError(
                f"unknown inputs {sorted(kwargs)}: only tokens, target and attention_masks are cut into chunks; "
                "drop these columns from the batch"
            )
        units = [self.schedule.unit_of(u) for u in range(self._n_microbatches)]
        arg_units = [()] * len(units)
        if args:
            arg_units = [(t,) for t in self._cut(args[0], "tokens")]
        kwarg_units: list[dict] = [{} for _ in units]
        if attention_masks is not None:
            shape = (self.num_microbatches * self._stages[0].microbatch_size, self.plan.seq_len)
            if tuple(attention_masks.shape) != shape or attention_masks.dtype != torch.int64:
                raise ValueError(
                    f"attention_masks is {tuple(attention_masks.shape)} {attention_masks.dtype}; give the start of "
                    f"each token's document as int64 {shape}"
                )
            rows = attention_masks.chunk(self.num_microbatches)
            for kw, (a, i) in zip(kwarg_units, units, strict=True):
                kw["docs"] = chunk_documents(rows[a], *self.plan.span(i))
        has_last = any(stage.is_last for stage in self._stages)
        if has_last and target is None and self._has_backward:
            raise ValueError("step() on the last stage's rank needs target=labels [M * B, T]; for outputs call eval()")
        if target is not None and has_last:
            for kw, chunk in zip(kwarg_units, self._cut(target, "target"), strict=True):
                kw["target"] = chunk
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.loss_scale = loss_scale
            stage.clear_runtime_states()
        self._edges.follow_timeout()
        self._watchdog.start()
        with self.progress.step():
            # A target is only for the last of this rank's stages; torch hands one kwargs dict to all of them.
            self._step_microbatches(arg_units, kwarg_units, None, losses, return_outputs)
            for stage in self._stages:
                stage.finish_step()
        outputs = None
        for stage in self._stages:
            if stage.is_last:
                outputs, stage.unit_outputs = stage.unit_outputs, {}
        return outputs if return_outputs else None

    def eval(self, *args, target=None, losses=None, return_outputs=None, **kwargs):
        """Forward only, see ``step``; returns the last stage's outputs by unit if no target is given."""
        trained_order, had_backward = self.pipeline_order_with_comms, self._has_backward
        self.pipeline_order_with_comms, self._has_backward = self._forward_order, False
        try:
            with torch.no_grad():
                if return_outputs is None:
                    return_outputs = target is None
                return self.step(*args, target=target, losses=losses, return_outputs=return_outputs, **kwargs)
        finally:
            self.pipeline_order_with_comms, self._has_backward = trained_order, had_backward

    def _cut(self, batch_BT: Tensor, what: str) -> list[Tensor]:
        sequences, seq_len = batch_BT.shape[:2]
        size = self._stages[0].microbatch_size
        if sequences != self.num_microbatches * size:
            raise ValueError(
                f"{what} has {sequences} sequences, the schedule takes {self.num_microbatches} microbatches of {size}: "
                f"give {self.num_microbatches * size} sequences (training and validation alike)"
            )
        if seq_len != self.plan.seq_len:
            raise ValueError(
                f"{what} has {seq_len} tokens a sequence, the chunk plan cuts {self.plan.seq_len}: use sequences of "
                f"{self.plan.seq_len} tokens (training and validation alike) or another plan"
            )
        return [chunk for rows in batch_BT.chunk(self.num_microbatches) for chunk in self.plan.split(rows)]

    # ---- losses are kept by unit in the stage; torch's list by position is not used
    def _maybe_compute_loss(self, *args, **kwargs) -> None:
        pass

    def _maybe_get_loss(self, *args, **kwargs) -> None:
        return None

    def _update_losses(self, stages, losses) -> None:
        if losses is None or self._loss_fn is None:
            return
        for stage in stages:
            if stage.is_last:
                losses[:] = [stage.unit_outputs[u] for u in range(self._n_microbatches)]


def _to_torch(action: Action, schedule: Schedule) -> _Action:
    kind = _ComputationType(action.kind.value)
    return _Action(action.stage, kind, schedule.unit(action.microbatch, action.chunk))


def _with_shard_actions(row: Sequence[Action], schedule: Schedule) -> list[_Action]:
    """A rank's lowered list with FSDP2's actions, which do nothing on other stages.

    Each stage is gathered once a step, one stage ahead of its first use, is reduced after its last gradient, and is
    given back at the end, however many units there are. (torch's own pass keeps three stages gathered and gathers
    again and again where a rank has more; it also takes time quadratic in the units.) A rank's stages together hold
    what a single stage of the rank would.
    """
    actions = [_to_torch(action, schedule) for action in row]
    order = list(dict.fromkeys(action.stage for action in row if action.is_compute))
    unshard, reduce, reshard = (
        {stage: _Action(stage, _ComputationType(name), None) for stage in order}
        for name in ("UNSHARD", "REDUCE_GRAD", "RESHARD")
    )
    left = dict.fromkeys(order, schedule.num_microbatches * schedule.num_chunks)
    ahead = iter(order)
    result = [unshard[stage] for stage in itertools.islice(ahead, 2)]
    started = set(order[:1])
    for action, lowered in zip(row, actions, strict=True):
        if action.is_compute and action.stage not in started:
            started.add(action.stage)
            result += [unshard[stage] for stage in itertools.islice(ahead, 1)]
        result.append(lowered)
        if action.kind in (Kind.B, Kind.W):
            left[action.stage] -= 1
            if left[action.stage] == 0:
                result.append(reduce[action.stage])
    return result + list(reshard.values())


def _parameter_groups(state) -> list:
    """FSDP2's groups of a wrapped module; up to torch 2.12 there was at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
