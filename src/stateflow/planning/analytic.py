"""Predicted step time and memory of every (N, alpha) from counts and a device's data sheet (eq. 9-15).

The time of an action is the largest of its FLOPs at the achieved rates and its host time for launching the layers; the
schedule is then simulated, so unequal stages and chunks, the head and the messages are in it. Memory is replayed from
the same table. On a plan that fits, compare with a measurement before believing the last ten percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from stateflow.chunks import ChunkPlan
from stateflow.pipeline.accounting import held_bytes
from stateflow.pipeline.lowering import lower
from stateflow.pipeline.policies import build_schedule, find_policy
from stateflow.pipeline.schedule import Action, Kind, Schedule
from stateflow.pipeline.simulator import Cost, Link, LostTime, Simulation, lost_time, simulate
from stateflow.planning.costs import StageCost, stage_costs, static_bytes
from stateflow.planning.devices import Device, gib_text
from stateflow.planning.job import Job

NUM_CHUNKS = (1, 2, 4, 6, 8, 16, 32)
SKEWS = tuple(sorted({*(i / 10 for i in range(11)), 0.25, 0.75, 1.25}))


@dataclass(frozen=True)
class Cell:
    """One (N, alpha): figures are None where there is no such plan. Times in seconds, memory in bytes a rank."""

    num_chunks: int
    skew: float
    policy: str
    lengths: tuple[int, ...] | None = None
    step_time: float | None = None
    bubble: float | None = None
    peak_bytes: tuple[int, ...] | None = None
    fits: bool = False
    why_not: str | None = None

    def to_json(self) -> dict:
        return asdict(self)


@dataclass
class Analytic:
    """Costs of one job on one device; schedules are built once for each (policy, N).

    ``table`` is a schedule that the job runs instead of its policy's, where it is cut into as many chunks.
    """

    job: Job
    device: Device
    memory_limit: float | None = None  # bytes a rank may use; the device's usable memory if None
    table: Schedule | None = None
    stages: list[StageCost] = field(init=False)

    def __post_init__(self) -> None:
        self.stages = stage_costs(self.job)
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._lowered: dict[tuple[str, int], list[list[Action]]] = {}
        self._stage_to_rank = find_policy(self.job.policy).placement(self.job.num_ranks, len(self.job.parts))
        if self.table is not None:
            self._stage_to_rank = self.table.stage_to_rank
            self._schedules[self.job.policy, self.table.num_chunks] = self.table
        self._static = [static_bytes(self.job, stage.parameters) for stage in self.stages]

    @property
    def limit(self) -> float:
        device = self.device
        return device.usable_fraction * device.memory if self.memory_limit is None else self.memory_limit

    def schedule(self, policy: str, num_chunks: int) -> Schedule:
        key = (policy, num_chunks)
        if key not in self._schedules:
            job = self.job
            self._schedules[key] = build_schedule(
                policy, job.num_ranks, job.num_microbatches, num_chunks, job.stages_per_rank,
                job.weight_lag if find_policy(policy).splits_backward else None, job.recompute == "full",
            )  # fmt: skip
        return self._schedules[key]

    # ---- time
    def _work_seconds(self, flops: dict[str, float]) -> float:
        device = self.device
        rates = {
            "dense": device.dense_fraction,
            "attention": device.attention_fraction,
            "recurrence": device.recurrence_fraction,
        }
        return sum(amount / (device.flops * rates[name]) for name, amount in flops.items())

    def _launch_seconds(self, kind: Kind, stage: StageCost) -> float:
        head = 1 if stage.head_flops else 0  # norm, projection and loss launch about as much as a layer
        if kind is Kind.F:
            return self.device.launch_seconds * (len(stage.layers) + (0 if stage.loss_put_off else head))
        whole = self.device.launch_seconds * (sum(3 if again else 2 for again in stage.recomputed) + 2 * head)
        weights = self.device.launch_seconds * len(stage.layers) / 2  # a few products of a layer's many kernels
        return {Kind.B: whole, Kind.I: whole - weights, Kind.W: weights}[kind]

    def _flops(self, kind: Kind, stage: StageCost, start: int, length: int) -> dict[str, float]:
        if kind is Kind.F:
            return stage.forward_flops(start, length)
        whole = stage.backward_flops(start, length)
        if kind is Kind.B:
            return whole
        weights = stage.weight_flops(length)
        return {"dense": weights} if kind is Kind.W else {**whole, "dense": whole["dense"] - weights}

    def cost(self, plan: ChunkPlan) -> Cost:
        """Seconds of each action under ``plan``."""
        known: dict[tuple[Kind, int, int], float] = {}

        def seconds(action: Action) -> float:
            key = (action.kind, action.stage, action.chunk)
            if key not in known:
                known[key] = self._seconds(plan, *key)
            return known[key]

        return seconds

    def _seconds(self, plan: ChunkPlan, kind: Kind, stage_index: int, chunk: int) -> float:
        stage, (start, stop) = self.stages[stage_index], plan.span(chunk)
        work = self._work_seconds(self._flops(kind, stage, start, stop - start))
        return max(work, self._launch_seconds(kind, stage))

    def exchanged_cost(self, plan: ChunkPlan) -> Cost:
        """``cost`` if ranks could lend each other attention at no cost: its time is the mean over stages and chunks.

        An action of a kind then takes its own projections and recurrences, and as much attention as any other action
        of that kind: what runs at the same time is always balanced. An upper bound of what an exchange of attention
        between ranks (SlimPipe, arXiv 2504.14519, does it for equal chunks) can give to a schedule: messages, waiting
        and the lengths of the queue that such an exchange has to form are left out.
        """
        pairs = [(stage, plan.span(chunk)) for stage in self.stages for chunk in range(plan.num_chunks)]
        mean: dict[Kind, float] = {}

        def flops(kind: Kind, stage: StageCost, span: tuple[int, int]) -> dict[str, float]:
            return self._flops(kind, stage, span[0], span[1] - span[0])

        def seconds(action: Action) -> float:
            if action.kind not in mean:
                work = [flops(action.kind, *pair).get("attention", 0.0) for pair in pairs]
                mean[action.kind] = self._work_seconds({"attention": sum(work) / len(work)})
            own = flops(action.kind, self.stages[action.stage], plan.span(action.chunk))
            return self._work_seconds({**own, "attention": 0.0}) + mean[action.kind]

        return seconds

    def overhead(self, plan: ChunkPlan) -> Cost:
        """The part of the cost that whole sequences would not have: waiting for the host's launches."""
        uncut = ChunkPlan((0, plan.seq_len))
        share: dict[tuple[Kind, int], float] = {}

        def seconds(action: Action) -> float:
            key = (action.kind, action.stage)
            if key not in share:
                chunks = sum(self._seconds(plan, *key, chunk) for chunk in range(plan.num_chunks))
                share[key] = max(0.0, chunks - self._seconds(uncut, *key, 0)) / plan.num_chunks
            return share[key]

        return seconds

    def simulate(self, plan: ChunkPlan, policy: str | None = None) -> Simulation:
        schedule = self.schedule(policy or self.job.policy, plan.num_chunks)
        return simulate(schedule, self.cost(plan), self.link, self.message_bytes(plan))

    @property
    def link(self) -> Link:
        return Link(self.device.link_latency, self.device.link_bandwidth)

    def message_bytes(self, plan: ChunkPlan):
        lengths = plan.lengths
        return lambda action: self.job.message_bytes(lengths[action.chunk])

    def lost_time(self, plan: ChunkPlan, simulation: Simulation) -> LostTime:
        return lost_time(simulation, self.cost(plan), overhead=self.overhead(plan))

    # ---- memory
    def static_of_rank(self, rank: int, stage_to_rank: Sequence[int] | None = None) -> dict[str, int]:
        """Bytes that stay through the step, by what they are; stages are placed as the job's policy does if unsaid."""
        total: dict[str, int] = {}
        for stage, held in enumerate(self._static):
            if (stage_to_rank or self._stage_to_rank)[stage] == rank:
                for name, amount in held.items():
                    total[name] = total.get(name, 0) + amount
        return total

    def peak_bytes(self, schedule: Schedule, plan: ChunkPlan) -> tuple[int, ...]:
        """Peak of each rank: what stays, and the most that its units hold with their working memory."""
        key = (schedule.policy, schedule.num_chunks)
        if key not in self._lowered:
            self._lowered[key] = lower(schedule)
        held = held_bytes(self._lowered[key], plan, [stage.footprint for stage in self.stages])
        return tuple(
            sum(self.static_of_rank(rank, schedule.stage_to_rank).values()) + max(during for during, _ in row)
            for rank, row in enumerate(held)
        )

    # ---- the grid
    def cell(self, num_chunks: int, skew: float, policy: str | None = None) -> Cell:
        """Predicted figures of one plan; one that cannot be, or does not fit, says why."""
        policy = policy or self.job.policy
        try:
            plan = self.job.plan(num_chunks, skew)
        except ValueError as error:
            return Cell(num_chunks, skew, policy, why_not=str(error))
        simulation = self.simulate(plan, policy)
        peaks = self.peak_bytes(simulation.schedule, plan)
        worst = max(range(len(peaks)), key=peaks.__getitem__)
        why = None
        if peaks[worst] > self.limit:
            why = f"rank {worst} needs {gib_text(peaks[worst])} GiB of {gib_text(self.limit)} GiB"
        return Cell(
            num_chunks, skew, policy, plan.lengths, simulation.step_time, simulation.bubble, peaks, why is None, why
        )

    def grid(self, num_chunks=NUM_CHUNKS, skews=SKEWS) -> list[Cell]:
        """Every (N, alpha). One chunk is the same for every alpha."""
        cells = []
        for n in num_chunks:
            whole = self.cell(1, 0.0) if n == 1 else None
            for skew in skews:
                cells.append(self.cell(n, skew) if whole is None else Cell(**{**vars(whole), "skew": skew}))
        return cells


def best_cell(cells: list[Cell]) -> Cell | None:
    """The fastest that fits; of equal ones the one with fewer chunks, then the smaller skew."""
    fitting = [cell for cell in cells if cell.fits]
    return min(fitting, key=lambda c: (c.step_time, c.num_chunks, c.skew), default=None)
