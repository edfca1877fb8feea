"""Buffers and sends of one rank, without processes."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import torch
from hypothesis import given, settings

from stateflow.chunks import ChunkPlan
from stateflow.pipeline.edges import Edges
from stateflow.pipeline.lowering import lower
from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.progress import Progress
from stateflow.pipeline.runtime import StateFlowStage
from stateflow.pipeline.schedule import Kind
from stateflow.pipeline.transport import BufferPool, SendLedger, arrival_proofs
from tests.pipeline.test_policies import cases


def message_to(action):
    """The message that an action computes on, if there is one."""
    kind, step = (Kind.SEND_F, -1) if action.kind is Kind.F else (Kind.SEND_B, 1)
    return kind, action.stage + step, action.microbatch, action.chunk


@settings(max_examples=60)
@given(cases())
def test_a_message_proves_that_all_its_sender_had_computed_on_has_arrived(case):
    """And nothing else: what it proves was not proved before, and its wait cannot block."""
    schedule = build_schedule(*case)
    lowered = lower(schedule)
    sends = {rank: {(a.kind, a.stage, a.microbatch, a.chunk) for a in row if a.kind in (Kind.SEND_F, Kind.SEND_B)}
             for rank, row in enumerate(lowered)}  # fmt: skip
    for rank, mine in sends.items():
        proofs = arrival_proofs(lowered, schedule.stage_to_rank, rank)
        for peer, row in enumerate(lowered):
            proved, computed_on = set(), set()
            for action in row if peer != rank else ():
                if action.is_compute and action.kind is not Kind.W:
                    computed_on |= {message_to(action)} & mine
                elif not action.is_compute and action.kind in (Kind.SEND_F, Kind.SEND_B):
                    receiver = action.stage + (1 if action.kind is Kind.SEND_F else -1)
                    if schedule.stage_to_rank[receiver] == rank:
                        now = proofs.get((action.kind, action.stage, action.microbatch, action.chunk), [])
                        assert set(now) == computed_on - proved and len(now) == len(set(now))
                        proved |= set(now)


def test_sends_are_of_contiguous_tensors_and_live_until_they_are_retired():
    ledger = SendLedger(Progress(0), proofs={"reply": ["first"], "last": ["second", "third"]})
    waited, sent = [], []

    class Work:
        def __init__(self, name):
            self.name = name

        def wait(self):
            waited.append(self.name)

    def send(tensor, peer):
        sent.append((tensor, peer))
        return [Work(len(sent))]

    for name in ("first", "second", "third"):
        ledger.post(name, torch.arange(6).view(2, 3).t(), 1, send)
    assert all(tensor.is_contiguous() and peer == 1 for tensor, peer in sent) and ledger.peak_pending == 3
    ledger.received("nothing that proves anything")
    assert not waited
    ledger.received("reply")
    assert waited == [1] and ledger.progress.pending() == ["second", "third"]
    ledger.keep_at_most(1)
    assert waited == [1, 2]
    ledger.received("last")  # proves one that has been waited for
    ledger.drain()
    assert waited == [1, 2, 3] and not ledger.progress.pending()


def test_a_pool_hands_out_what_came_back_and_forgets_it_when_cleared():
    pool = BufferPool(torch.device("cpu"))
    first, second = (pool.take((2, 3), torch.float32) for _ in range(2))
    pool.give_back(first)
    assert pool.take((3, 2), torch.float32) is not first and pool.take((2, 3), torch.float32) is first
    assert (pool.num_live, pool.peak_live, pool.num_allocated, pool.allocated_bytes) == (3, 3, 3, 3 * 6 * 4)
    pool.give_back(first)
    pool.clear()
    assert pool.num_live == 0 and pool.take((2, 3), torch.float32) is not first
    assert second is not first


def test_channels_follow_the_timeout_of_the_group():
    told = []
    options = SimpleNamespace(_timeout=timedelta(seconds=9))
    edges = object.__new__(Edges)  # none of its connections
    edges._backend, edges._timeout = SimpleNamespace(options=options), options._timeout
    edges._channels = {edge: SimpleNamespace(_set_default_timeout=told.append) for edge in ((0, 1), (1, 0))}
    edges.follow_timeout()
    assert not told
    options._timeout = timedelta(seconds=3)
    for _ in range(2):
        edges.follow_timeout()
    assert told == [timedelta(seconds=3)] * 2


class Middle(SimpleNamespace):
    """What the methods of a ``StateFlowStage`` between two others use, without a process group."""

    _forward, _backward = StateFlowStage._forward, StateFlowStage._backward
    _zero_gradient = StateFlowStage._zero_gradient
    clear_runtime_states = StateFlowStage.clear_runtime_states

    def __init__(self, **changes):
        super().__init__(
            is_first=False, is_last=False, stage_index=1, group_rank=1, stage_index_to_group_rank={0: 0, 1: 1, 2: 2},
            plan=ChunkPlan((0, 3)), microbatch_size=1, hidden_size=2, activation_dtype=torch.float64, loss_scale=1.0,
            device=torch.device("cpu"), _activations={}, _gradients={}, _buffers={}, _receives={}, _outbox={},
            unit_outputs={}, output_chunks=[], pool=BufferPool(torch.device("cpu")), ledger=SendLedger(Progress(0)),
            _unit=lambda u: (0, u), _await=lambda *_: None, _timed=lambda *_: nullcontext(), _engine=None,
            _check_activation=lambda *_: None, _release=lambda *_: None, _cast_deferred_gradients=lambda: None,
        )  # fmt: skip
        vars(self).update(changes)


def test_a_part_without_layers_sends_no_buffer_that_is_given_back():
    x = torch.randn(1, 3, 2)
    units = SimpleNamespace(forward=lambda microbatch, chunk, x, training: x.detach())
    for training in (False, True):
        stage = Middle(units=units, _activations={0: x}, has_backward=training)
        stage._forward(0, (), {})
        sent = stage._outbox["F", 0]
        assert torch.equal(sent, x) and (sent.data_ptr() == x.data_ptr()) == training  # in training kept until B


def test_a_part_that_does_not_depend_on_its_input_sends_zeros_back():
    units = SimpleNamespace(backward=lambda *args, **options: None)
    stage = Middle(units=units, _gradients={0: torch.ones(1, 3, 2)})
    stage._backward(Kind.B, 0, False)
    assert torch.equal(stage._outbox["B", 0], torch.zeros(1, 3, 2, dtype=torch.float64))


def test_what_a_step_that_raised_had_under_way_is_forgotten():
    units = SimpleNamespace(_units={}, reset=lambda: None)
    stage = Middle(units=units)
    stage._buffers["F", 0] = stage.pool.take((1, 3, 2), torch.float32)
    stage.ledger.post("message", torch.zeros(2), 2, lambda *_: ())
    stage.clear_runtime_states()
    assert stage.pool.num_live == 0 and not stage._buffers and not stage.ledger.progress.pending()
