"""Candidates of a search really run: the best few before one is chosen, and a small grid to compare the choice with."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stateflow.commands import Scenario, titan_arguments
from stateflow.planning.plan_file import PlanFile, write_plan

GRID_CHUNKS, GRID_SKEWS = (1, 2, 4, 8), (0.0, 0.5, 1.0)
WITHIN = 0.02  # of the grid's best the chosen plan has to be


def plan_file_of(scenario: Scenario, candidate) -> PlanFile:
    from stateflow.titan.config import plan_target

    job = scenario.job
    target = dataclasses.replace(
        plan_target(scenario.job_config), stages=candidate.stages_per_rank * job.num_ranks,
        microbatches=job.num_microbatches, recompute=candidate.recompute,
    )  # fmt: skip
    return PlanFile(target, candidate.policy, candidate.plan.lengths, candidate.weight_lag)


def devices_missing(scenario: Scenario) -> str | None:
    """Why this machine cannot run the config, or None."""
    from stateflow.cli import world_size
    from stateflow.titan import shared_gpus

    return shared_gpus.devices_missing(world_size(scenario.job_config))


def trial_of(scenario: Scenario, candidate, folder: Path):
    """The trial that runs a candidate by its own plan file, as ``[stateflow] plan`` would."""
    from stateflow.titan.trials import Trial

    folder.mkdir()
    path = folder / "plan.toml"
    write_plan(path, plan_file_of(scenario, candidate), {}, [])
    job = scenario.job
    overrides = [
        "--stateflow.plan", str(path), "--stateflow.num-chunks", "None", "--stateflow.skew", "None",
        "--stateflow.policy", "None", "--stateflow.weight-lag", "None", "--stateflow.chunk-lengths",
        f"--training.local_batch_size={job.num_microbatches * job.microbatch_size}",
        f"--activation_checkpoint.mode={candidate.recompute}",
    ]  # fmt: skip
    return Trial(overrides, str(folder / "trace"))


def run_candidates(options, scenario: Scenario, overrides, candidates: Sequence, seconds: float | None, report) -> dict:
    """Measured step time of each candidate that ran: {candidate: s}.  ``report(candidate, outcome)`` of each."""
    from stateflow.cli import world_size
    from stateflow.titan.trials import run_trials

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trials = [trial_of(scenario, c, folder / str(number)) for number, c in enumerate(candidates)]
        outcomes = run_trials(
            titan_arguments(options.config, overrides, options.ranks), trials, world_size(scenario.job_config), folder,
            seconds, lambda number, outcome: report(candidates[number], outcome),
        )  # fmt: skip
    ran = zip(candidates, outcomes, strict=False)
    return {c: outcome.trace.median_step().step_time for c, outcome in ran if outcome.trace is not None}


def verify(options, scenario: Scenario, overrides, chosen: Sequence, budget) -> dict:
    """Measured step time of candidates by really training a few steps, in one launch: {candidate: s}."""
    missing = devices_missing(scenario)
    if missing or budget.spent or not chosen:
        if options.verify:
            print(f"\nnot verified: {missing or 'the time budget is spent'}")
        return {}
    print(f"\nplans run one after the other, {len(chosen)} of them:", flush=True)
    seen = []

    def report(candidate, outcome) -> None:
        seen.append(candidate)
        print(outcome_text(candidate, outcome), flush=True)

    times = run_candidates(options, scenario, overrides, chosen, budget.left, report)
    for candidate in chosen:
        if candidate not in seen:
            print(f"  not run    {candidate.name}: the time budget is spent")
    return times


def to_verify(fitting: Sequence, whole, count: int) -> list:
    """The best ``count`` and whole sequences."""
    chosen = list(fitting[:count])
    if count and whole is not None and whole.fits and whole not in chosen:
        chosen.append(whole)
    return chosen


def outcome_text(candidate, outcome) -> str:
    if outcome.trace is None:
        return f"  failed     {candidate.name}: {outcome.trouble}"
    step = outcome.trace.median_step().step_time
    error = candidate.step_time / step - 1
    return f"{step:9.4g} s  predicted {candidate.step_time:.4g} s ({error:+.1%})  {candidate.name}"


# ---- the choice against a grid
def grid_cells(scenario: Scenario, measured, policy: str, known: Sequence) -> list:
    """The candidates of GRID_CHUNKS x GRID_SKEWS under a policy that fit; those in ``known`` are taken from there."""
    cells = {}
    for n in GRID_CHUNKS:
        for skew in GRID_SKEWS if n > 1 else (0.0,):
            try:
                plan = scenario.job.plan(n, skew)
            except ValueError:
                continue  # the rounding leaves a chunk empty
            if plan.boundaries not in cells:
                cells[plan.boundaries] = measured.candidate(plan, policy, skew)

    def facts(c) -> tuple:
        return c.policy, c.stages_per_rank, c.recompute, c.plan.boundaries

    at = {facts(c): c for c in known}
    return [at.get(facts(cell), cell) for cell in cells.values() if cell.fits]


def check_grid(chosen, cells: Sequence, times: dict) -> int:
    """Prints the chosen plan beside the fastest of the grid; 0 if it is within WITHIN of that, 1 if not."""
    ran = [cell for cell in cells if cell in times]
    if not ran or chosen not in times:
        print("\nthe grid was not measured: nothing to compare the chosen plan with")
        return 1
    best = min(ran, key=times.__getitem__)
    away = times[chosen] / times[best] - 1
    verdict = "within" if away <= WITHIN else "NOT within"
    errors = [abs(c.step_time / times[c] - 1) for c in times]
    print(
        f"\nbest of a grid of {len(ran)}: {times[best]:.4g} s, {best.name}\nchosen:            {times[chosen]:.4g} s, "
        f"{chosen.name}\nthat is {away:+.1%}, {verdict} {WITHIN:.0%}; predictions are off by "
        f"{statistics.median(errors):.1%} in the median, {max(errors):.1%} at most"
    )
    return 0 if away <= WITHIN else 1


def chunk_by_chunk(options, scenario: Scenario, overrides, measured, candidates: Sequence, device) -> dict:
    """{candidate: s} with the cost of every chunk measured, not interpolated, and the order of the units simulated.

    For machines with too few devices to run the plans.
    """
    from stateflow.commands.plan_measured import open_stages
    from stateflow.pipeline.schedule import Kind
    from stateflow.pipeline.simulator import simulate

    job = measured.job
    split = Kind.W in measured.surfaces[0]
    layers = job.model.layer_kinds()
    known: dict[tuple, object] = {}
    print(f"\nchunks of {len(candidates)} plans measured one by one, their order simulated:", flush=True)
    stages = open_stages(options, scenario, overrides, device)
    chunks = sorted({c.plan.span(i) for c in candidates for i in range(c.plan.num_chunks)})
    kinds = []
    for part in job.parts:
        own = tuple(layers[int(name.removeprefix("layers."))] for name in part if name.startswith("layers."))
        kinds.append((own, "tok_embeddings" in part, "output" in part))
    try:
        for kind, part in dict(zip(kinds, job.parts, strict=True)).items():
            for start, stop in chunks:
                known[kind, start, stop] = stages.measure(job, part, split, start, stop - start)
    finally:
        stages.close()
    times = {}
    for candidate in candidates:
        plan = candidate.plan

        def seconds(action, plan=plan):
            point = known[kinds[action.stage], *plan.span(action.chunk)]
            return {Kind.F: point.forward, Kind.W: point.weight}.get(action.kind, point.backward)

        schedule = measured.schedule(candidate.policy, plan.num_chunks)
        step = simulate(schedule, seconds, measured.link, measured.message_bytes(plan)).step_time
        times[candidate] = step
        print(f"{step:9.4g} s  predicted {candidate.step_time:.4g} s "
              f"({candidate.step_time / step - 1:+.1%})  {candidate.name}", flush=True)  # fmt: skip
    return times


def train_for_a_trace(arguments: Sequence[str], nproc: int, folder: Path, timeout: float | None = None):
    """Trains a few steps in ``folder`` under torchrun: (the trace, "") or (None, the error that ended it).

    A run that is not done after ``timeout`` seconds is ended.
    """
    from stateflow.titan.trials import PATIENCE, Trial, run_trials

    trials, patience = [Trial([], str(folder / "trace"))], max(PATIENCE, timeout or 0.0)
    outcomes = run_trials(arguments, trials, nproc, folder, timeout, patience=patience)
    if not outcomes:
        return None, f"not done after {timeout:g} s"
    return outcomes[0].trace, outcomes[0].trouble
