"""Memory from the table alone: replay each rank's lowered list and note the peaks.

How long things live. "Backward" is the action that consumes the incoming gradients: B, or I where the
backward is split. "Retirement" ends a unit: B, or W where it is split.

===========================  ================================  ====================  ====================
thing                        size                              lives from            until
===========================  ================================  ====================  ====================
unit (a, i) in flight        1 unit, s_i tokens                F(a, i)               retirement of (a, i)
tensors saved for backward   s_i * saved_bytes_per_token       F(a, i)               backward of (a, i)
what W computes from         s_i * weight_bytes_per_token      I(a, i)               W(a, i)
working memory of an action  working_bytes(s_i)                the action            the action
activation buffer of (a, i)  s_i * activation_bytes_per_token  RECV_F(a, i)          retirement of (a, i)
gradient buffer of (a, i)    s_i * activation_bytes_per_token  RECV_B(a, i)          retirement of (a, i)
state between i and i+1      carry_bytes                       F(a, i)               backward of (a, i+1)
its gradient                 carry_grad_bytes                  backward of (a, i+1)  backward of (a, i)
K/V windows of a             T * window_bytes_per_token        F(a, 0)               backward of (a, 0)
K/V gradients of a, N > 1    T * window_grad_bytes_per_token   backward of (a, N-1)  backward of (a, 0)
===========================  ================================  ====================  ====================

- Within one action what begins is added before what ends is removed: a backward holds both its incoming and
  its outgoing state gradient.
- The state that leaves chunk i is detached and becomes the leaf that enters chunk i+1: one storage, counted
  once. Chunk 0's initial state and the state that leaves the last chunk are not counted.
- With one chunk there is no prefix and so no gradient window.
- Receive buffers stay until W, because a projection may have noted one as its input or as its gradient.
- Receive buffers are pooled by shape, that is by chunk length: a pool ends up with the peak count of each
  length. Buffers handed over between two stages of one rank are not received and not counted.
- A send holds its tensor until it completes; this depends on timing and is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stateflow.pipeline.lowering import lower
from stateflow.pipeline.schedule import Action, Kind, Schedule, in_flight_change

if TYPE_CHECKING:
    from stateflow.chunks import ChunkPlan


@dataclass(frozen=True)
class StageFootprint:
    """Bytes of one stage for one microbatch (all its samples).

    Attributes:
        activation_bytes_per_token: the hidden state between two stages; its gradient is as large.
        carry_bytes: the boundary state (recurrent states, convolution tails) of all layers of the stage.
        carry_grad_bytes: the gradient of it; None for carry_bytes.
        window_bytes_per_token: K and V of all attention layers of the stage.
        window_grad_bytes_per_token: their gradients (at least float32).
        saved_bytes_per_token: what autograd keeps of a unit; 0 if only boundaries are of interest.
        weight_bytes_per_token: inputs and output gradients of the projections, which a unit keeps from I to W.
        forward_bytes_per_token, backward_bytes_per_token, working_bytes: what exists while an action runs only.
    """

    activation_bytes_per_token: int = 0
    carry_bytes: int = 0
    carry_grad_bytes: int | None = None
    window_bytes_per_token: int = 0
    window_grad_bytes_per_token: int = 0
    saved_bytes_per_token: int = 0
    weight_bytes_per_token: int = 0
    forward_bytes_per_token: int = 0
    backward_bytes_per_token: int = 0
    working_bytes: int = 0

    def while_running(self, kind: Kind, length: int) -> int:
        """Working memory of an action on a chunk of ``length`` tokens."""
        each = self.forward_bytes_per_token if kind is Kind.F else self.backward_bytes_per_token
        return self.working_bytes + length * each


@dataclass(frozen=True)
class PoolPeak:
    """Peak of a pool of receive buffers."""

    live: int  # buffers in use at once
    buffers: int  # buffers that the pool owns in the end: for each shape the most in use at once
    bytes: int  # of the owned ones


@dataclass(frozen=True)
class Peaks:
    """Peaks of one stage, or of all stages of one rank together.

    ``activation_pool`` and ``gradient_pool`` are separate pools for RECV_F and RECV_B, ``shared_pool`` is one
    pool for both. ``boundary_bytes`` is the peak of states and their gradients together,
    ``window_total_bytes`` that of K/V and their gradients, ``weight_work_bytes`` that of what waits for W.
    """

    units: int
    tokens: int
    activation_pool: PoolPeak
    gradient_pool: PoolPeak
    shared_pool: PoolPeak
    carry_bytes: int
    carry_grad_bytes: int
    boundary_bytes: int
    window_bytes: int
    window_grad_bytes: int
    window_total_bytes: int
    weight_work_bytes: int


@dataclass(frozen=True)
class Prediction:
    """Peaks per stage and per rank; the stages of a rank add up at each moment and share their pools."""

    stages: tuple[Peaks, ...]
    ranks: tuple[Peaks, ...]


def predict(
    table: Schedule | Sequence[Sequence[Action]],
    plan: ChunkPlan,
    footprint: StageFootprint | Sequence[StageFootprint],
) -> Prediction:
    """Peaks of a schedule (which is lowered first) or of a lowered table, by the module's life times.

    Args:
        table: a legal schedule, or one lowered list a rank.
        plan: the cut of the sequence.
        footprint: one for all stages, or one a stage.

    Raises:
        ValueError: if the plan or the footprints do not fit the table.
    """
    lowered = lower(table) if isinstance(table, Schedule) else table
    actions = [action for row in lowered for action in row]
    if not actions:
        raise ValueError("the table holds no action; give one lowered list a rank")
    num_stages = 1 + max(action.stage for action in actions)
    num_chunks = 1 + max(action.chunk for action in actions)
    if plan.num_chunks != num_chunks:
        raise ValueError(
            f"the plan has {plan.num_chunks} chunks, the table {num_chunks}; give a plan of {num_chunks}"
        )
    footprints = [footprint] * num_stages if isinstance(footprint, StageFootprint) else list(footprint)
    if len(footprints) != num_stages:
        raise ValueError(f"{len(footprints)} footprints for {num_stages} stages; give one, or one a stage")

    rows_of_stages: list[list[Action]] = [[] for _ in range(num_stages)]
    for action in actions:
        rows_of_stages[action.stage].append(action)
    return Prediction(
        stages=tuple(_peaks(row, plan, footprints) for row in rows_of_stages),
        ranks=tuple(_peaks(row, plan, footprints) for row in lowered),
    )


def held_bytes(
    lowered: Sequence[Sequence[Action]], plan: ChunkPlan, footprint: StageFootprint | Sequence[StageFootprint]
) -> list[list[tuple[int, int]]]:
    """For each rank and each of its lowered actions: the bytes held while it runs, and after it.

    All things of the module's table together; buffers count while they are in use.
    """
    num_stages = 1 + max(action.stage for row in lowered for action in row)
    footprints = [footprint] * num_stages if isinstance(footprint, StageFootprint) else list(footprint)
    lengths = plan.lengths
    held = []
    for row in lowered:
        replay, amounts = _Replay(plan, footprints), []
        for action in row:
            during = replay.run(action)
            if action.is_compute:
                during += footprints[action.stage].while_running(action.kind, lengths[action.chunk])
            amounts.append((during, replay.held()))
        held.append(amounts)
    return held


def in_flight_profile(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """For each rank the units in flight on all its stages after each of its actions."""
    profile = []
    for actions in schedule.table:
        count, counts = 0, []
        for action in actions:
            count += in_flight_change(action)
            counts.append(count)
        profile.append(tuple(counts))
    return tuple(profile)


def _peaks(actions: Sequence[Action], plan: ChunkPlan, footprints: Sequence[StageFootprint]) -> Peaks:
    replay = _Replay(plan, footprints)
    for action in actions:
        replay.run(action)
    peak = replay.peak
    return Peaks(
        units=peak["units"],
        tokens=peak["tokens"],
        activation_pool=replay.pool("activation"),
        gradient_pool=replay.pool("gradient"),
        shared_pool=replay.pool("shared"),
        carry_bytes=peak["carry"],
        carry_grad_bytes=peak["carry_grad"],
        boundary_bytes=peak["boundary"],
        window_bytes=peak["window"],
        window_grad_bytes=peak["window_grad"],
        window_total_bytes=peak["window_total"],
        weight_work_bytes=peak["weight_work"],
    )


class _Replay:
    """Runs the actions of a rank, or of one of its stages, and keeps present amount and peak of each thing.

    A thing is named by a string; the buffers of one shape in a pool by (pool, tokens, bytes).
    """

    def __init__(self, plan: ChunkPlan, footprints: Sequence[StageFootprint]) -> None:
        self.lengths = plan.lengths
        self.seq_len = plan.seq_len
        self.footprints = footprints
        self.now: Counter = Counter()
        self.peak: Counter = Counter()
        self.buffers: set[Action] = set()  # receives whose buffer is in use

    def held(self) -> int:
        """Bytes of all things now."""
        now = self.now
        return now["saved"] + now["weight_work"] + now["buffer_bytes"] + now["boundary"] + now["window_total"]

    def run(self, action: Action) -> int:
        """Replays one action; returns the bytes held while it runs, without its working memory."""
        begins, ends = self._life_times(action)
        for name, amount in begins:
            self.now[name] += amount
            self.peak[name] = max(self.peak[name], self.now[name])
        during = self.held()
        for name, amount in ends:
            self.now[name] -= amount
            assert self.now[name] >= 0, f"{action} frees {name}, which is not there"
        return during

    def pool(self, name: str) -> PoolPeak:
        owned = {
            key[1:]: count for key, count in self.peak.items() if isinstance(key, tuple) and key[0] == name
        }
        return PoolPeak(
            live=self.peak[name],
            buffers=sum(owned.values()),
            bytes=sum(size * count for (_, size), count in owned.items()),
        )

    def _life_times(self, action: Action) -> tuple[list[tuple], list[tuple]]:
        """What begins and what ends at an action, as (name, amount): the module's table, row by row."""
        stage, kind, microbatch, chunk = action.stage, action.kind, action.microbatch, action.chunk
        footprint, length, last_chunk = self.footprints[stage], self.lengths[chunk], len(self.lengths) - 1
        runs_backward = kind in (Kind.B, Kind.I)
        retires = kind in (Kind.B, Kind.W)
        begins: list[tuple] = []
        ends: list[tuple] = []

        if kind is Kind.F:
            begins += [("units", 1), ("tokens", length), ("saved", length * footprint.saved_bytes_per_token)]
        if runs_backward:
            ends += [("saved", length * footprint.saved_bytes_per_token)]
        if kind is Kind.I:
            begins += [("weight_work", length * footprint.weight_bytes_per_token)]
        if kind is Kind.W:
            ends += [("weight_work", length * footprint.weight_bytes_per_token)]
        if retires:
            ends += [("units", 1), ("tokens", length)]

        buffer = (length, length * footprint.activation_bytes_per_token)
        for pool, receive in (("activation", Kind.RECV_F), ("gradient", Kind.RECV_B)):
            received = Action(stage, receive, microbatch, chunk)
            names = (pool, (pool, *buffer), "shared", ("shared", *buffer))
            if kind is receive:
                self.buffers.add(received)
                begins += [*((name, 1) for name in names), ("buffer_bytes", buffer[1])]
            elif retires and received in self.buffers:
                self.buffers.remove(received)
                ends += [*((name, 1) for name in names), ("buffer_bytes", buffer[1])]

        state = footprint.carry_bytes
        state_grad = state if footprint.carry_grad_bytes is None else footprint.carry_grad_bytes
        if kind is Kind.F and chunk < last_chunk:
            begins += [("carry", state), ("boundary", state)]
        if runs_backward and chunk > 0:
            ends += [("carry", state), ("boundary", state)]
        if runs_backward and chunk > 0:
            begins += [("carry_grad", state_grad), ("boundary", state_grad)]
        if runs_backward and chunk < last_chunk:
            ends += [("carry_grad", state_grad), ("boundary", state_grad)]

        window = self.seq_len * footprint.window_bytes_per_token
        window_grad = self.seq_len * footprint.window_grad_bytes_per_token
        if kind is Kind.F and chunk == 0:
            begins += [("window", window), ("window_total", window)]
        if runs_backward and chunk == last_chunk and last_chunk > 0:
            begins += [("window_grad", window_grad), ("window_total", window_grad)]
        if runs_backward and chunk == 0:
            ends += [("window", window), ("window_total", window)]
            if last_chunk > 0:
                ends += [("window_grad", window_grad), ("window_total", window_grad)]
        return begins, ends
