"""Costs of stages that were not measured from stages of the same model that were, e.g. of PP8 from those of PP2.

A stage's time at (start, length) is taken apart into its layers and its head:

    layers(target) = layers(measured) * work(target) / work(measured),      head = last stage - its layers

where ``work`` is counted (eq. 9): only the *ratio* of two counts of the same kinds of layers enters.  Memory of units
scales by the same kind of ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stateflow.chunks import ChunkPlan
from stateflow.pipeline.accounting import StageFootprint
from stateflow.pipeline.schedule import Kind
from stateflow.planning.analytic import Analytic
from stateflow.planning.costs import StageCost, stage_cost
from stateflow.planning.profile import Cache, StageProfile
from stateflow.planning.search import with_measured_memory

Composition = tuple[tuple[str, ...], bool, bool]  # kinds of the layers, embeds tokens, has the head
_MEASURED_BYTES = ("saved_bytes_per_token", "forward_bytes_per_token", "backward_bytes_per_token")


def composition(kinds: Sequence[str], part: Sequence[str]) -> Composition:
    """Of the stage with the modules ``part`` in a model with layers of ``kinds``."""
    own = tuple(kinds[int(name.removeprefix("layers."))] for name in part if name.startswith("layers."))
    return own, "tok_embeddings" in part, "output" in part


def measured_stages(cache: Cache, facts: dict) -> tuple[dict[Composition, StageProfile], str]:
    """The stages in a cache that agree with ``facts`` in all but the stage, torch and the device; and on what.

    Raises:
        ValueError: if there is none with two chunk lengths, saying what the cache has instead.
    """
    free = {"stage", "torch", "device"}
    found: dict[str, dict[Composition, StageProfile]] = {}
    others = set()
    for key, about in cache.described().items():
        about = {"cuda_graphs": False, **about}  # older caches do not say
        wrong = [f"{n} = {about.get(n)}" for n in facts if n not in free and about.get(n) != facts[n]]
        if wrong:
            others.add(", ".join(wrong))
            continue
        profile = StageProfile(tuple(cache.all_of(key)), ())
        if profile.usable:
            kinds, first, last = about["stage"]
            device = f"{about['device']}, torch {about['torch']}"
            found.setdefault(device, {})[tuple(kinds), first, last] = profile
    if not found:
        wanted = ", ".join(f"{n} = {v}" for n, v in facts.items() if n not in free)
        text = f"; it has {'; '.join(sorted(others)[:3])}" if others else ""
        raise ValueError(
            f"{cache.path}: no stages measured for {wanted}{text}: run stateflow plan on a config of this model first"
        )
    device = max(found, key=lambda name: (len(found[name]), name))
    return found[device], device


def without_graphs(cache: Cache, facts: dict, where: str) -> dict[Composition, StageProfile] | None:
    """Stages measured with no layer in a CUDA graph on ``where`` (see `measured_stages`), or None."""
    try:
        stages, device = measured_stages(cache, {**facts, "cuda_graphs": False})
    except ValueError:
        return None
    return stages if device == where else None


class Scaled(Analytic):
    """``Analytic`` on the measured stages of ``use``, for any number of ranks."""

    def use(
        self, profiles: Mapping[Composition, StageProfile], memory: Mapping[Composition, StageProfile] | None = None,
        recorded: bool = False,
    ) -> Scaled:
        """Times of ``profiles``, and bytes of ``memory`` where it has a stage.

        What a recorded layer works in belongs to its CUDA graph, and the allocator counts it as nobody's: stages that
        were measured in graphs (``recorded``) want a ``memory`` that was not.

        Raises ValueError without a stage that has layers and no head, or if a head is needed and none measured.
        """
        kinds = self.job.model.layer_kinds()
        self._surfaces = {which: profile.surfaces() for which, profile in profiles.items()}
        plain = [which for which in profiles if which[0] and not which[2]]
        ends = [which for which in profiles if which[2]]
        wanted = [composition(kinds, part) for part in self.job.parts]
        if not plain or (not ends and any(which[2] for which in wanted)):
            raise ValueError(
                "scaling takes a measured stage with layers and without the head, and one with the head; there is "
                f"{', '.join(map(describe, profiles)) or 'none'}: run stateflow plan for two or more ranks"
            )
        self._counted = {which: self._count(which, kinds) for which in {**profiles, **(memory or {})}}
        self._plain, self._end = max(plain, key=lambda w: len(w[0])), (ends or [None])[0]
        self._wanted = wanted
        self._unseen = set(profiles) - set(memory or ()) if recorded else set()
        for number, which in enumerate(wanted):
            self.stages[number] = self._with_memory(self.stages[number], which, {**profiles, **(memory or {})})
        return self

    def _count(self, which: Composition, kinds: Sequence[str]) -> StageCost:
        """A measured stage as it is counted; it is somewhere in the model."""
        own, first, last = which
        at = next((i for i in range(len(kinds)) if tuple(kinds[i : i + len(own)]) == own), None)
        if at is None:
            raise ValueError(f"a stage of {describe(which)} was measured, and the model's layers are {' '.join(kinds)}")
        names = [f"layers.{at + i}" for i in range(len(own))]
        part = ["tok_embeddings"] * first + names + ["norm", "output"] * last
        return stage_cost(self.job, part)

    def _work(self, kind: Kind, stage: StageCost, start: int, length: int) -> float:
        """Counted seconds of the layers alone."""
        return self._work_seconds(self._flops(kind, replace(stage, head_flops=0.0), start, length))

    def _seconds(self, plan: ChunkPlan, kind: Kind, stage_index: int, chunk: int) -> float:
        start, stop = plan.span(chunk)
        which = self._wanted[stage_index]
        if which in self._surfaces:
            return self._surfaces[which][kind].seconds(start, stop - start)
        span = (kind, start, stop - start)
        seconds = self._layers(self._work(kind, self.stages[stage_index], *span[1:]), span)
        if which[2]:
            end = self._counted[self._end]
            whole = self._surfaces[self._end][kind].seconds(*span[1:])
            seconds += max(0.0, whole - self._layers(self._work(kind, end, *span[1:]), span))
        return seconds

    def _layers(self, work: float, span: tuple[Kind, int, int]) -> float:
        kind, start, length = span
        reference = self._work(kind, self._counted[self._plain], start, length)
        return self._surfaces[self._plain][kind].seconds(start, length) * work / reference

    def _with_memory(self, stage: StageCost, which: Composition, profiles) -> StageCost:
        """The stage with counted bytes of units in the ratio that was measured to counted, where a GPU has counted."""
        reference = which if which in profiles else self._end if which[2] else self._plain
        counted = self._counted[reference]
        measured = with_measured_memory(counted, profiles[reference], reference in self._unseen)
        if measured is counted:
            return stage
        scaled = {n: _ratio(stage.footprint, counted.footprint, measured.footprint, n) for n in _MEASURED_BYTES}
        constant = measured.footprint.working_bytes  # of the head and the embedding: as large in any stage
        return replace(stage, footprint=replace(stage.footprint, working_bytes=constant, **scaled))


def _ratio(target: StageFootprint, counted: StageFootprint, measured: StageFootprint, name: str) -> int:
    before = getattr(counted, name)
    return round(getattr(target, name) * getattr(measured, name) / before) if before else getattr(measured, name)


def describe(which: Composition) -> str:
    kinds, first, last = which
    counts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    return " + ".join([*["embedding"] * first, *counts, *["head"] * last])
