"""Runs a schedule's table in one process, without a process group: every rank's actions, one after another.

For tests of many cases, for debugging with a plain debugger, and as the smallest statement of what a table means.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stateflow.chunks import ChunkPlan, chunk_documents
from stateflow.pipeline.schedule import Action, Kind, Schedule, ScheduleError
from stateflow.pipeline.stage import ChunkStage


def run_local(
    schedule: Schedule,
    stages: Sequence[ChunkStage],
    plan: ChunkPlan,
    tokens: Tensor,
    targets: Tensor | None = None,
    *,
    docs: Tensor | None = None,
    loss_scale: float | Tensor = 1.0,
) -> list:
    """Executes all ranks of ``schedule`` and returns what the last stage produced, by unit (loss sums with targets).

    ``stages[s]`` is stage s; ``tokens`` and ``targets`` [M * B, T] int64, ``docs`` [M * B, T] absolute document starts.
    Parameters accumulate ``.grad``.  Raises ScheduleError if no rank can go on.
    """
    num_microbatches = schedule.num_microbatches
    tokens_of = _by_unit(tokens, num_microbatches, plan)
    targets_of = None if targets is None else _by_unit(targets, num_microbatches, plan)
    activations: dict[tuple[int, int, int], Tensor] = {}
    gradients: dict[tuple[int, int, int], Tensor | None] = {}
    produced: dict[tuple[int, int], object] = {}
    last = schedule.num_stages - 1
    for stage in schedule.split_stages():
        stages[stage].split_backward()

    def inputs_ready(action: Action) -> bool:
        unit = (action.stage, action.microbatch, action.chunk)
        if action.kind is Kind.F:
            return action.stage == 0 or unit in activations
        return action.kind is Kind.W or action.stage == last or unit in gradients

    def run(action: Action) -> None:
        s, a, i = action.stage, action.microbatch, action.chunk
        if action.kind is Kind.F:
            x = tokens_of[a, i] if s == 0 else activations.pop((s, a, i))
            chunk_docs = None
            if docs is not None:
                rows = docs.chunk(num_microbatches)[a]
                chunk_docs = chunk_documents(rows, *plan.span(i))
            target = targets_of[a, i] if s == last and targets_of is not None else None
            out = stages[s].forward(a, i, x, docs=chunk_docs, target=target)
            if s == last:
                produced[a, i] = out
            else:
                activations[s + 1, a, i] = out
        elif action.kind is Kind.W:
            stages[s].weight_backward(a, i)
        else:
            grad = gradients.pop((s, a, i), None)
            grad = stages[s].backward(a, i, grad, loss_scale=loss_scale, input_only=action.kind is Kind.I)
            if s > 0:
                gradients[s - 1, a, i] = grad

    position = [0] * schedule.num_ranks
    while any(position[r] < len(schedule.table[r]) for r in range(schedule.num_ranks)):
        progress = False
        for rank, actions in enumerate(schedule.table):
            if position[rank] < len(actions) and inputs_ready(actions[position[rank]]):
                run(actions[position[rank]])
                position[rank] += 1
                progress = True
        if not progress:
            waiting = [str(t[p]) for t, p in zip(schedule.table, position, strict=True) if p < len(t)]
            raise ScheduleError(f"no rank can go on; waiting: {waiting}")
    for stage in stages:
        stage.assert_drained()
    return [produced[unit] for unit in sorted(produced)]


def _by_unit(batch_BT: Tensor, num_microbatches: int, plan: ChunkPlan) -> dict[tuple[int, int], Tensor]:
    return {
        (a, i): chunk
        for a, rows in enumerate(batch_BT.chunk(num_microbatches))
        for i, chunk in enumerate(plan.split(rows))
    }
