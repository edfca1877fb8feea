"""What has to be profiled apart: recomputation, number of stages, and whether the backward is split.

Policies that agree in these three run the same actions and so share their measurements; the search goes over all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stateflow.pipeline.policies import find_policy
from stateflow.planning.job import Job

# Policies that are worth two stages a rank where the config leaves the number open; 1f1b and gpipe then only wait more.
INTERLEAVING = ("interleaved", "zero_bubble", "mepipe")


@dataclass(frozen=True)
class Variant:
    """``policies`` on the stages of ``job``; with ``split`` they run I and W for B."""

    job: Job
    split: bool
    policies: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.named(self.policies)

    def named(self, policies: Sequence[str]) -> str:
        """Some of its policies with what they have in common here."""
        per_rank = self.job.stages_per_rank
        stages = f"{per_rank} stage{'s' * (per_rank > 1)} a rank, recomputation {self.job.recompute}"
        return f"{', '.join(policies)} with {stages}"

    def not_measured(self, searched: Sequence[Variant]) -> str:
        """That it was not searched, and how its policies were all the same: the list of results may name them."""
        text = f"not searched, no time to measure its stages: {self.name}"
        others = [(one, [p for p in self.policies if p in one.policies]) for one in searched]
        known = "; ".join(one.named(policies) for one, policies in others if policies)
        return f"{text} (searched: {known})" if known else text


def variants(
    job: Job, part_names: Callable[[int], Sequence[Sequence[str]]], policies: Sequence[str], modes: Sequence[str], *,
    stages_are_set: bool, misfit: Callable[[bool, str], str | None],
) -> tuple[list[Variant], list[str]]:
    """All variants, the job's own first, and a line for each (policy, stages a rank, mode) that cannot be.

    Args:
        job: as configured.
        part_names: how the model is cut into so many stages; raises ValueError where it cannot be.
        policies, modes: what to search.
        stages_are_set: the config says how many stages there are, so a plan cannot.
        misfit: why a backward cannot be split or not (the first argument) under a mode; None where it can.
    """
    own = job.stages_per_rank
    least = own if stages_are_set else 1  # what the job's policy implies is not asked of the others
    groups: dict[tuple[int, bool], list[str]] = {}
    left_out = []
    for name in sorted(policies, key=lambda name: name != job.policy):
        traits = find_policy(name)
        numbers = [traits.stages_per_rank or least]
        if traits.stages_per_rank is None and not stages_are_set and name in INTERLEAVING:
            numbers = [1, 2]
        if name == job.policy:
            numbers = [own, *(n for n in numbers if n != own)]
        if stages_are_set and traits.stages_per_rank not in (None, own):
            left_out.append(
                f"{name}: takes {traits.stages_per_rank} stages a rank, the config sets {own}; leave out [parallelism] "
                "pipeline_parallel_layers_per_stage and module_fqns_per_model_part"
            )
            continue
        if name == "interleaved":
            numbers = [n for n in numbers if n > 1]  # with one stage a rank that is 1f1b
            if not numbers:
                left_out.append("interleaved: with one stage a rank, as the config sets, it is 1f1b")
        for per_rank in numbers:
            groups.setdefault((per_rank, traits.splits_backward), []).append(name)
    found = []
    for mode in modes:
        one = job if mode == job.recompute else job.with_recompute(mode)
        for (per_rank, split), names in groups.items():
            if (reason := misfit(split, mode)) is not None:
                left_out.append(f"{', '.join(names)} with {per_rank} stages a rank, recomputation {mode}: {reason}")
                continue
            try:
                parts = job.parts if per_rank == own else tuple(map(tuple, part_names(per_rank * job.num_ranks)))
            except ValueError as error:
                line = f"{', '.join(names)} with {per_rank} stages a rank: {error}"
                if line not in left_out:
                    left_out.append(line)
                continue
            lag = job.weight_lag if split else None
            found.append(Variant(replace(one, parts=parts, policy=names[0], weight_lag=lag), split, tuple(names)))
    return found, left_out

