"""Policies: in what order the units are issued. Each is one short function that returns a ``Schedule``.

All obey eq. 8; they differ in memory and in the idle time of the ranks, see docs/schedules.md. With one chunk a
sequence each is the whole-sequence schedule of the same name. A new one is a function from ``Sizes`` under
``@register_policy("name")``; ``build_schedule`` checks what it returns.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stateflow.pipeline.checker import check_schedule
from stateflow.pipeline.list_scheduling import list_schedule, merge_by_list_scheduling
from stateflow.pipeline.schedule import Action, Kind, Schedule, Table, in_flight_peaks

Placement = Callable[[int, int], tuple[int, ...]]  # (num_ranks, num_stages) -> stage_to_rank


def loop_placement(num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Stage s on rank s mod P."""
    return tuple(stage % num_ranks for stage in range(num_stages))


def v_placement(num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Down the ranks and up again: the first and the last of two stages a rank are both on rank 0."""
    return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))


@dataclass(frozen=True)
class Sizes:
    """What a policy is asked for: P ranks, S stages, M microbatches, N chunks; without ``weight_lag`` its default.

    ``recomputed`` says that a backward begins by a forward, which matters where the order depends on times.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_chunks: int
    weight_lag: int | None = None
    recomputed: bool = False

    @property
    def num_units(self) -> int:
        return self.num_microbatches * self.num_chunks

    @property
    def stages_per_rank(self) -> int:
        return self.num_stages // self.num_ranks

    def units(self) -> list[tuple[int, int]]:
        """In the order of forwards."""
        return [(a, i) for a in range(self.num_microbatches) for i in range(self.num_chunks)]

    def backward_units(self) -> list[tuple[int, int]]:
        """Microbatches ascend, the chunks of each descend."""
        return [(a, i) for a in range(self.num_microbatches) for i in reversed(range(self.num_chunks))]

    def schedule(self, policy: str, stage_to_rank: tuple[int, ...], table: Table) -> Schedule:
        """The table as a Schedule that declares the peaks which the table has."""
        return Schedule(
            policy=policy,
            num_ranks=self.num_ranks,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_chunks=self.num_chunks,
            stage_to_rank=stage_to_rank,
            table=table,
            peak_in_flight=in_flight_peaks(table, self.num_stages),
        )


@dataclass(frozen=True)
class Policy:
    """A registered policy.

    Attributes:
        build: the function.
        placement: of the stages on the ranks.
        splits_backward: whether it issues I and W, and so takes ``weight_lag``.
        stages_per_rank: the only number it takes; None for any.
        interleaves: whether its point is to have several stages a rank.
    """

    build: Callable[[Sizes], Schedule]
    placement: Placement = loop_placement
    splits_backward: bool = False
    stages_per_rank: int | None = None
    interleaves: bool = False

    @property
    def default_stages_per_rank(self) -> int:
        """Where nobody says: two for those that interleave, as in torchtitan."""
        return self.stages_per_rank or (2 if self.interleaves else 1)


POLICIES: dict[str, Policy] = {}


def register_policy(name: str, **traits) -> Callable:
    """Decorator that makes a function from ``Sizes`` to ``Schedule`` known under ``name``; traits are ``Policy``'s.

    Raises:
        ValueError: if the name is taken, or is not a single word.
    """
    if name in POLICIES:
        raise ValueError(f"a policy named {name!r} exists already; choose another name")
    if len(name.split()) != 1:
        raise ValueError(f"policy name {name!r} must be a single word")

    def register(build: Callable[[Sizes], Schedule]) -> Callable[[Sizes], Schedule]:
        POLICIES[name] = Policy(build, **traits)
        return build

    return register


def find_policy(name: str) -> Policy:
    """The policy of a name.  ValueError, with the nearest name, if there is none."""
    if name not in POLICIES:
        nearest = difflib.get_close_matches(name.lower(), POLICIES, n=1, cutoff=0.0)[0]
        known = ", ".join(sorted(POLICIES))
        raise ValueError(f"unknown policy {name!r}; did you mean {nearest!r}? Known: {known}")
    return POLICIES[name]


def check_options(policy: str, stages_per_rank: int, weight_lag: int | None) -> None:
    """Refuses a number of stages a rank or a lag that the policy does not take.  Raises ValueError."""
    traits = find_policy(policy)
    if traits.stages_per_rank not in (None, stages_per_rank):
        raise ValueError(
            f"policy {policy} places {traits.stages_per_rank} stages on each rank, not {stages_per_rank}; "
            f"cut the model into {traits.stages_per_rank} stages a rank"
        )
    if weight_lag is None:
        return
    if not traits.splits_backward:
        able = ", ".join(name for name, other in POLICIES.items() if other.splits_backward)
        raise ValueError(f"policy {policy} has no separate W, so no weight_lag; leave it out, or use one of {able}")
    if weight_lag < 0:
        raise ValueError(f"weight_lag {weight_lag} must be at least 0")


def build_schedule(
    policy: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    stages_per_rank: int = 1,
    weight_lag: int | None = None,
    recomputed: bool = False,
) -> Schedule:
    """The checked schedule of a policy for P ranks, M microbatches and N chunks.

    ``weight_lag`` is the most units whose W may trail their I on a rank, for policies that split the backward;
    ``recomputed`` says that backwards recompute their forward, so that I takes as long as two of them.

    Raises:
        ValueError: for an unknown policy, a size below 1, or what the policy does not take.
        ScheduleError: if the policy returns an illegal table.
    """
    traits = find_policy(policy)
    sizes = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_chunks": num_chunks,
        "stages_per_rank": stages_per_rank,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} {size} must be at least 1")
    check_options(policy, stages_per_rank, weight_lag)
    num_stages = num_ranks * stages_per_rank
    schedule = traits.build(Sizes(num_ranks, num_stages, num_microbatches, num_chunks, weight_lag, recomputed))
    check_schedule(schedule)
    return schedule


@register_policy("1f1b")
def one_forward_one_backward(sizes: Sizes) -> Schedule:
    """The paper's and Seq1F1B's order: warm-up forwards, one forward and one backward in turn, the rest.

    Microbatches ascend; within one, forward chunks ascend and backward chunks descend. The first backward on
    the last stage needs all N chunks of a microbatch, so stage s of S warms up with min(M*N, N + S - s - 2)
    units and holds at most min(M*N, N + S - s - 1) in flight (eq. 13). With N = 1 this is plain 1F1B. With
    several stages a rank each stage keeps its own 1F1B order and the rank merges them as they become ready.
    """
    stage_to_rank = loop_placement(sizes.num_ranks, sizes.num_stages)
    orders = []
    for stage in range(sizes.num_stages):
        forwards = _actions(stage, Kind.F, sizes.units())
        backwards = _actions(stage, Kind.B, sizes.backward_units())
        orders.append(_in_turn(forwards, backwards, sizes.num_chunks + sizes.num_stages - stage - 2))
    table = merge_by_list_scheduling(orders, stage_to_rank, sizes.num_ranks, sizes.recomputed)
    return sizes.schedule("1f1b", stage_to_rank, table)


@register_policy("gpipe")
def all_forward_all_backward(sizes: Sizes) -> Schedule:
    """TeraPipe's order: all forwards, one local stage after the other, then all backwards in reverse.

    Every stage holds all M*N units in flight.
    """
    rows = []
    for rank in range(sizes.num_ranks):
        stages = range(rank, sizes.num_stages, sizes.num_ranks)
        forwards = [action for stage in stages for action in _actions(stage, Kind.F, sizes.units())]
        backwards = [Action(f.stage, Kind.B, f.microbatch, f.chunk) for f in reversed(forwards)]
        rows.append((*forwards, *backwards))
    return sizes.schedule("gpipe", loop_placement(sizes.num_ranks, sizes.num_stages), tuple(rows))


@register_policy("interleaved", interleaves=True)
def interleaved(sizes: Sizes) -> Schedule:
    """Megatron's interleaved 1F1B, generalised to units: V stages a rank take turns in groups of G units.

    A group is as many whole sequences as give at least P units, so that its first unit is back from the last rank
    when its last one has left the first: G = N * ceil(P / N); with N = 1 these are Megatron's P microbatches. Rank r
    warms up with (V - 1) * G + N - 1 + (P - 1 - r) units and holds at most one more, each 1/V of a rank's layers.
    (Megatron warms up with 2 * (P - 1 - r), which takes as long and holds more, in order to hide its messages.) With
    V = 1 this is 1F1B.
    """
    rows = tuple(tuple(_interleaved_row(sizes, rank, Kind.B)) for rank in range(sizes.num_ranks))
    return sizes.schedule("interleaved", loop_placement(sizes.num_ranks, sizes.num_stages), rows)


@register_policy("zero_bubble", splits_backward=True)
def zero_bubble(sizes: Sizes) -> Schedule:
    """ZB-H1 over units, of one or more stages a rank: B is split, and on rank r the W of a unit waits for r more I.

    The order of F and I is that of ``interleaved``. Input gradients go up the ranks without waiting for W, and when
    they are through every rank has just so many W left as fill its share of the (P - 1) / N residue of eq. 15: what
    remains idle is (P - 1) / (N * V) forwards. The lag of r units makes all ranks hold what rank 0 holds.
    ``weight_lag`` L limits it to min(r, L); 0 holds what 1F1B holds.
    """
    rows = []
    for rank in range(sizes.num_ranks):
        lag = rank if sizes.weight_lag is None else min(rank, sizes.weight_lag)
        row, pending = [], []
        for action in _interleaved_row(sizes, rank, Kind.I):
            row.append(action)
            if action.kind is Kind.I:
                pending.append(_weight_of(action))
                if len(pending) > lag:
                    row.append(pending.pop(0))
        rows.append((*row, *pending))
    return sizes.schedule("zero_bubble", loop_placement(sizes.num_ranks, sizes.num_stages), tuple(rows))


@register_policy("mepipe", splits_backward=True, interleaves=True)
def mepipe(sizes: Sizes) -> Schedule:
    """MEPipe's idea: stages of slices interleaved, and weight gradients wherever a rank would be idle.

    F and I keep the order of ``interleaved``; a W is run when nothing else can be, or when a rank holds as many units
    as rank 0 warms up with, (V - 1) * G + N + P - 1, or when ``weight_lag`` units wait for theirs.
    """
    stage_to_rank = loop_placement(sizes.num_ranks, sizes.num_stages)
    streams = []
    for rank in range(sizes.num_ranks):
        row = _interleaved_row(sizes, rank, Kind.I)
        streams.append([row, [_weight_of(action) for action in row if action.kind is Kind.I]])
    table = list_schedule(
        streams,
        stage_to_rank,
        prefer=lambda action: action.kind is Kind.W,
        recomputed=sizes.recomputed,
        max_per_rank=_interleaved_warm_up(sizes, 0) + 1,
        max_waiting=sizes.weight_lag,
    )
    assert table is not None, "the interleaved order holds a wait cycle"
    return sizes.schedule("mepipe", stage_to_rank, table)


@register_policy("v_shape", placement=v_placement, splits_backward=True, stages_per_rank=2)
def v_shape(sizes: Sizes) -> Schedule:
    """ZB-V over units: two stages a rank, down the ranks and up again, so that the loss is where the tokens are.

    Each stage holds at most N + S - s - 1 units between F and I, which adds up to 2 * N + 2 * P - 1 on every rank; so
    many a rank may hold until W at first. I goes first, then F of the later stage, and W fills what is left.
    """
    stage_to_rank = v_placement(sizes.num_ranks, sizes.num_stages)
    streams: list[list[list[Action]]] = [[] for _ in range(sizes.num_ranks)]
    for stage, rank in enumerate(stage_to_rank):
        backwards = _actions(stage, Kind.I, sizes.backward_units())
        streams[rank] += [_actions(stage, Kind.F, sizes.units()), backwards, [_weight_of(a) for a in backwards]]
    order = {Kind.I: 0, Kind.F: 1, Kind.W: 2}
    limit, table = 2 * sizes.num_chunks + 2 * sizes.num_ranks - 1, None
    while table is None:
        table = list_schedule(
            streams,
            stage_to_rank,
            prefer=lambda action: (order[action.kind], -action.stage),
            recomputed=sizes.recomputed,
            max_per_stage=[sizes.num_chunks + sizes.num_stages - s - 1 for s in range(sizes.num_stages)],
            max_per_rank=limit,
            max_waiting=sizes.weight_lag,
        )
        limit += 1
    return sizes.schedule("v_shape", stage_to_rank, table)


# ---- parts of orders


def _actions(stage: int, kind: Kind, units: Iterable[tuple[int, int]]) -> list[Action]:
    return [Action(stage, kind, microbatch, chunk) for microbatch, chunk in units]


def _weight_of(action: Action) -> Action:
    return Action(action.stage, Kind.W, action.microbatch, action.chunk)


def _in_turn(forwards: list[Action], backwards: list[Action], num_warmup: int) -> list[Action]:
    """The first forwards, then one forward and one backward in turn, then the other backwards."""
    num_warmup = min(len(forwards), num_warmup)
    steady = [action for pair in zip(forwards[num_warmup:], backwards, strict=False) for action in pair]
    return forwards[:num_warmup] + steady + backwards[len(forwards) - num_warmup :]


def _group_microbatches(sizes: Sizes) -> int:
    """Microbatches of a group: as many as give each rank a unit, or all."""
    return min(sizes.num_microbatches, -(-sizes.num_ranks // sizes.num_chunks))


def _interleaved_warm_up(sizes: Sizes, rank: int) -> int:
    group = _group_microbatches(sizes) * sizes.num_chunks
    warm_up = (sizes.stages_per_rank - 1) * group + sizes.num_chunks - 1 + sizes.num_ranks - 1 - rank
    return min(sizes.num_units * sizes.stages_per_rank, warm_up)


def _interleaved_row(sizes: Sizes, rank: int, backward: Kind) -> list[Action]:
    """One rank's F and B (or I): its stages take turns in groups, up in the forward and down in the backward."""
    share = _group_microbatches(sizes)
    stages = range(rank, sizes.num_stages, sizes.num_ranks)
    forwards, backwards = [], []
    for first in range(0, sizes.num_microbatches, share):
        group = range(first, min(sizes.num_microbatches, first + share))
        up = [(a, i) for a in group for i in range(sizes.num_chunks)]
        down = [(a, i) for a in group for i in reversed(range(sizes.num_chunks))]
        for stage in stages:
            forwards += _actions(stage, Kind.F, up)
        for stage in reversed(stages):
            backwards += _actions(stage, backward, down)
    return _in_turn(forwards, backwards, _interleaved_warm_up(sizes, rank))
