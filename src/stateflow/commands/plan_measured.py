"""``stateflow plan CONFIG``: profile the stages on the device at hand, search, verify the best, write a plan file."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from stateflow.commands import Scenario, titan_arguments
from stateflow.commands.plan_verify import (
    check_grid,
    chunk_by_chunk,
    devices_missing,
    grid_cells,
    to_verify,
    verify,
)
from stateflow.planning.devices import DEVICES, GIB, Device, device_named, gib_text

SHOWN = 8  # candidates printed and kept in the plan file
# Shares of --time-budget after which measuring and searching end, so that something is left to verify by.
MEASURING, SEARCHING = 0.6, 0.75
NEAR = 1.15  # times the fastest by rough profiles, within which a variant is measured more closely


def run(options: argparse.Namespace, scenario: Scenario, overrides: Sequence[str]) -> int:
    import torch

    from stateflow.planning.profile import Budget, Cache
    from stateflow.planning.search import Measured, describe, search
    from stateflow.titan.cpu_host import accelerator_in_use

    job, config = scenario.job, scenario.job_config
    refuse(options, scenario)
    device = torch.device("cuda" if accelerator_in_use() and torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # as a rank of `stateflow train` has
    out = options.out or Path(config.job.dump_folder) / "plan.toml"
    cache = Cache(options.cache or Path(config.job.dump_folder) / "plan_cache.json")
    budget = Budget(options.time_budget)
    entry = device_entry(device, job.num_ranks * job.tensor_parallel)
    limit = entry.usable_fraction * entry.memory if options.memory is None else options.memory * GIB
    print(f"{job.describe()}\nprofiling on {entry.name}, at most {gib_text(limit)} GiB a rank, cache {cache.path}")

    chosen_variants, left_out = searched_variants(options, scenario)
    for line in left_out:
        print(f"not searched: {line}")
    stages = open_stages(options, scenario, overrides, device)
    try:
        profiler = Profiler(config, stages, cache, budget, options.lengths)
        profiled = profiler.run(chosen_variants, promising(config, entry, limit, budget))
    finally:
        stages.close()
    entries, fit = [], []
    for variant, profiles in zip(chosen_variants, profiled, strict=True):
        if profiles is None:
            print(variant.not_measured([v for v, p in zip(chosen_variants, profiled, strict=True) if p is not None]))
            continue
        recorded = in_graphs(config, variant.job)
        entries.append((Measured(variant.job, entry, limit).use(profiles, recorded), variant.policies))
        for profile in dict.fromkeys(profiles):
            fit += profile.fit_errors()
    if not entries:
        print(
            f"--time-budget {options.time_budget:g} was over before two chunk lengths of each stage were measured: no "
            "plan is written; the same command goes on from here"
        )
        return 1
    worst = worst_errors(fit)
    if worst:
        text = ", ".join(f"{name} {error:.1%}" for name, error in worst.items())
        print(f"fit: worst error at the held-out points: {text}")
    found = search(entries, budget=budget.share(SEARCHING))
    candidates = found.candidates
    print("\npredicted, fastest first:")
    for candidate in candidates[:SHOWN]:
        print(describe(candidate))
    print(search_text(found))
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        print("nothing fits: more ranks, recomputation or FSDP would help; no plan is written")
        return 1
    whole = next((c for c in candidates if c.plan.num_chunks == 1), None)
    if whole is not None and whole not in candidates[:SHOWN]:
        print(describe(whole))

    chosen_few = to_verify(fitting, whole, options.verify)
    cells = []
    if options.check_grid:
        own = next(
            one for one, policies in entries
            if fitting[0].policy in policies and one.job.recompute == fitting[0].recompute
            and one.job.stages_per_rank == fitting[0].stages_per_rank
        )  # fmt: skip
        cells = grid_cells(scenario, own, fitting[0].policy, candidates)
    runs = list(dict.fromkeys([*chosen_few, *(fitting[:1] if cells else []), *cells]))
    times = verify(options, scenario, overrides, runs, budget)
    tried = {c: times[c] for c in chosen_few if c in times}
    chosen = min(tried, key=tried.__getitem__) if tried else fitting[0]
    print("\n" + verdict(chosen, whole, times))
    write(out, scenario, chosen, candidates, whole, times, entry, worst)
    print(f"plan file {out}; use it with\n  {use_text(options, scenario, overrides, chosen, out)}")
    if not options.check_grid:
        return 0
    if not times and devices_missing(scenario):
        times = chunk_by_chunk(options, scenario, overrides, own, list(dict.fromkeys([chosen, *cells])), device)
    return check_grid(chosen, cells, times)


def refuse(options: argparse.Namespace, scenario: Scenario) -> None:
    """Raises ValueError, with the least change, where nothing can be measured here or a plan could not be used."""
    import torch

    from stateflow.titan.cpu_host import refuse_large

    job = scenario.job
    if options.device is not None:
        raise ValueError(f"--device {options.device} is for --analytic; a measured plan is for the device at hand")
    refuse_large(scenario.job_config)
    here = torch.cuda.device_count() if torch.cuda.is_available() else None
    if here is not None and here < job.tensor_parallel:
        raise ValueError(
            f"[parallelism] tensor_parallel_degree = {job.tensor_parallel}: its stages take as many GPUs to measure, "
            f"here {'is' if here == 1 else 'are'} {here}; set it to {here}, or use --analytic"
        )
    lengths, multiple = options.lengths, job.multiple or 1
    if lengths is None:
        return
    wrong = [n for n in lengths if not 0 < n <= job.seq_len or n % multiple]
    if wrong or len(set(lengths)) < 2:
        raise ValueError(
            f"--lengths {' '.join(map(str, lengths))}: give two or more lengths of chunks, up to the sequence's "
            f"{job.seq_len} tokens" + (f" and multiples of {multiple}" if multiple > 1 else "")
        )


def searched_variants(options: argparse.Namespace, scenario: Scenario):
    """(variants, what cannot be searched and why)."""
    from stateflow.pipeline.policies import POLICIES, find_policy
    from stateflow.planning.variants import variants
    from stateflow.titan.order import backward_misfit
    from stateflow.titan.planning import part_names

    job, config = scenario.job, scenario.job_config
    names = list(POLICIES) if options.policies in (None, ["all"]) else options.policies
    for name in names:
        find_policy(name)
    p = config.parallelism
    stages_are_set = p.pipeline_parallel_layers_per_stage is not None or p.module_fqns_per_model_part is not None
    found, left_out = variants(
        job, lambda count: part_names(config, count), names, options.recompute or [job.recompute],
        stages_are_set=stages_are_set, misfit=lambda splits, mode: backward_misfit(config, splits, mode),
    )  # fmt: skip
    if not found:
        raise ValueError(f"--policies {' '.join(names)}: none can be searched: {'; '.join(left_out)}")
    return found, left_out


def device_entry(device, num_ranks: int) -> Device:
    """The device at hand with its real memory; links are the table's. Ranks on a CPU share the host's memory."""
    import torch

    if device.type == "cpu":
        return dataclasses.replace(DEVICES["cpu"], memory=DEVICES["cpu"].memory / num_ranks)
    properties = torch.cuda.get_device_properties(device)
    return dataclasses.replace(device_named(None), name=properties.name, memory=properties.total_memory)


def open_stages(options: argparse.Namespace, scenario: Scenario, overrides: Sequence[str], device):
    """What measures stages: this process, or one for each rank of tensor parallelism."""
    from stateflow.planning.stage_runner import LocalStages, TensorParallelStages

    degree = scenario.job.tensor_parallel
    if degree == 1:
        return LocalStages(scenario.job_config, device)
    arguments = titan_arguments(options.config, overrides, options.ranks)
    return TensorParallelStages(arguments, degree, device.type)


def promising(config, entry: Device, limit: float, budget):
    """What says which variants deserve more points: the first, and those that rough profiles put near the fastest."""
    from stateflow.planning.search import Measured, search

    def choose(variants, rough) -> list[int]:
        best = {}
        for number, (variant, profiles) in enumerate(zip(variants, rough, strict=True)):
            if profiles is not None:
                measured = Measured(variant.job, entry, limit).use(profiles, in_graphs(config, variant.job))
                found = search([(measured, variant.policies)], budget=budget.share(MEASURING))
                best[number] = min((c.step_time for c in found.candidates if c.fits), default=float("inf"))
        fastest = min(best.values())
        return [number for number, seconds in best.items() if number == 0 or seconds <= NEAR * fastest]

    return choose


class Profiler:
    """Measures all kinds of stages of some variants: a few points first, the rest where it may matter.

    The few of the first variant may take the whole ``budget``, without which there would be no plan at all; all others
    their share of it. With ``lengths`` chunks of these are measured, of every variant, and no others.
    """

    def __init__(self, config, stages, cache, budget, lengths: Sequence[int] | None = None):
        self.config, self.stages, self.cache, self.budget, self.lengths = config, stages, cache, budget, lengths
        self.done = self.total = 0
        self.counted: dict[str, int] = {}  # points of a kind of stage that ``done`` holds already

    def run(self, variants, promising) -> list[list | None]:
        """For each variant a profile a stage; None where the time was over.

        ``promising`` takes the variants and such a list, and gives the numbers of those to measure more closely.
        """
        from stateflow.planning.profile import coarse

        kinds = [self.kinds(variant) for variant in variants]
        rough = (lambda fitted: fitted) if self.lengths else coarse
        few = [{same: (key, run, (rough(wanted[0]), [])) for same, (key, run, wanted) in of} for of in kinds]
        self.total = sum(len(wanted[0]) for of in few for _, _, wanted in of.values())
        found = []
        for number, of in enumerate(few):
            budget = self.budget.share(MEASURING) if number else self.budget
            found.append({same: self.profile(*kind, budget) for same, kind in of.items()})
        usable = [all(profile.usable for profile in profiles.values()) for profiles in found]
        known = [
            [profiles[same] for same, _ in of] if good else None
            for profiles, of, good in zip(found, kinds, usable, strict=True)
        ]
        closer = promising(variants, known) if any(usable) and not self.lengths else []
        more = [dict(kinds[number]) for number in closer]
        self.total += sum(
            len(fitted) - len(coarse(fitted)) + len(held) for of in more for _, _, (fitted, held) in of.values()
        )
        for number, of in zip(closer, more, strict=True):
            for same, kind in of.items():
                found[number][same] = self.profile(*kind, self.budget.share(MEASURING))
        if sys.stderr.isatty():
            print(file=sys.stderr)
        return [
            [profiles[same] for same, _ in of] if good else None
            for profiles, of, good in zip(found, kinds, usable, strict=True)
        ]

    def kinds(self, variant) -> list[tuple]:
        """For each stage (what stages of the same cost agree in, (key of the cache, measure, points))."""
        import math

        from stateflow.planning.costs import stage_costs
        from stateflow.planning.profile import points_of, points_to_measure

        job, layers = variant.job, variant.job.model.layer_kinds()
        cuts = [_lengths(job, count, skew) for skew in (0.0, 1.0, 1.25) for count in (2, 32)]
        multiple = job.multiple or 1
        if self.config.stateflow.sequence_parallel_norms:
            multiple = math.lcm(multiple, job.tensor_parallel)
        shortest = max(16, min((n for cut in cuts for n in cut), default=job.seq_len))
        shortest = min(job.seq_len, -(-shortest // multiple) * multiple)
        found = []
        for part, costs in zip(job.parts, stage_costs(job), strict=True):
            own = tuple(layers[int(name.removeprefix("layers."))] for name in part if name.startswith("layers."))
            same = (own, "tok_embeddings" in part, "output" in part)
            reads_prefix = costs.footprint.window_bytes_per_token > 0
            if self.lengths:
                wanted = points_of(self.lengths, job.seq_len, reads_prefix), []
            else:
                wanted = points_to_measure(job.seq_len, shortest, reads_prefix, multiple)

            def measure(start: int, length: int, part=part):
                return self.stages.measure(job, part, variant.split, start, length)

            facts = key_facts(self.config, job, same, variant.split)
            key = hashlib.sha256(json.dumps(list(facts.values())).encode()).hexdigest()[:16]
            self.cache.describe(key, json.loads(json.dumps(facts)))
            found.append((same, (key, measure, wanted)))
        return found

    def profile(self, key: str, measure, wanted, budget):
        from stateflow.planning.profile import profile_stage

        missing = [point for points in wanted for point in points if self.cache.get(key, *point) is None]
        self.done += len(wanted[0]) + len(wanted[1]) - len(missing) - self.counted.get(key, 0)
        profile = profile_stage(measure, key, self.cache, wanted, budget, self.progress)
        self.counted[key] = len(wanted[0])
        return profile

    def progress(self, text: str) -> None:
        self.done += "once more" not in text
        share = min(1.0, self.done / max(1, self.total))
        bar = "#" * round(20 * share) + "." * (20 - round(20 * share))
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"  [{bar}] {self.done:3d} of {self.total}: {text:<52}", end=end, file=sys.stderr, flush=True)


def key_facts(config, job, same, split: bool) -> dict:
    """What a measured point of a stage depends on. ``same`` is (kinds of its layers, embeds tokens, has the head)."""
    import torch

    from stateflow.planning.plan_file import model_digest

    return {
        "model": model_digest(job.model),
        "stage": same,
        "dtype": str(job.compute_dtype),
        "microbatch_size": job.microbatch_size,
        "recompute": job.recompute,
        "recompute_every": job.recompute_every if job.recompute == "selective" else 0,
        "split": split,
        "tensor_parallel": job.tensor_parallel,
        "sequence_parallel_norms": config.stateflow.sequence_parallel_norms,
        "compile": config.compile.enable,
        "cuda_graphs": in_graphs(config, job),
        "backend": job.model.backend,
        "reset_at_documents": config.stateflow.reset_at_documents,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }


def in_graphs(config, job) -> bool:
    """Whether the layers of a job run in CUDA graphs."""
    return config.stateflow.cuda_graphs and job.recompute == "full"


def _lengths(job, num_chunks: int, skew: float) -> tuple[int, ...]:
    try:
        return job.plan(num_chunks, skew).lengths
    except ValueError:
        return ()


NAMES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def worst_errors(fit: Sequence[tuple]) -> dict[str, float]:
    """By kind of action the largest relative error at the points that were held out."""
    worst: dict[str, float] = {}
    for kind, _, _, error in fit:
        name = NAMES[kind.value]
        worst[name] = max(worst.get(name, 0.0), abs(error))
    return worst


def search_text(found) -> str:
    """How many plans there were, and how the dynamic program did against the alpha family."""
    total = len(found.candidates) + found.too_slow + found.left_out
    text = f"{total} plans, {found.too_slow} of them with too much work to be among the fastest"
    if found.left_out:
        text += f", {found.left_out} left out: the time budget is spent"
    fitting = [c for c in found.candidates if c.fits]
    family = min((c.step_time for c in fitting if c.skew is not None), default=None)
    program = min((c.step_time for c in fitting if c.skew is None), default=None)
    if program is None or family is None:
        return f"{text}\nthe dynamic program over boundaries found nothing as fast"
    gain = family / program - 1
    return f"{text}\nthe dynamic program over boundaries against the alpha family: {gain:+.1%} in speed"


def verdict(chosen, whole, times: dict) -> str:
    how = "measured" if times else "predicted"
    best = times.get(chosen, chosen.step_time)
    text = f"chosen: {chosen.name}: {', '.join(map(str, chosen.plan.lengths))}, {best:.4g} s ({how})"
    if chosen.plan.num_chunks == 1:
        hint = ", leave [stateflow] enable = false" if chosen.policy == "1f1b" else ""
        return f"{text}\nwhole sequences are the fastest here: chunks are slower{hint}"
    if whole is None or (times and whole not in times):
        return text
    if not whole.fits:
        return f"{text}\nwhole sequences do not fit"
    return f"{text}\n{times.get(whole, whole.step_time) / best:.2f} times as fast as whole sequences"


def use_text(options: argparse.Namespace, scenario: Scenario, overrides: Sequence[str], chosen, out: Path) -> str:
    """The command that trains by a plan: what it was made for, and what takes back keys that the plan brings."""
    from stateflow.cli import parse_config
    from stateflow.overrides import command, replaced

    # Not the scenario's config: of one that is not enabled that has a single chunk.
    job, config = scenario.job, parse_config(titan_arguments(options.config, overrides, options.ranks))
    section, changes = config.stateflow, {"stateflow.plan": out}
    if not section.enable:
        changes["stateflow.enable"] = True
    planned = {"num_chunks": None, "skew": None, "policy": chosen.policy, "weight_lag": chosen.weight_lag}
    for name, value in planned.items():
        if getattr(section, name) not in (None, value):
            changes[f"stateflow.{name}"] = None
    if section.chunk_lengths:
        changes["stateflow.chunk_lengths"] = []
    if chosen.recompute != config.activation_checkpoint.mode:
        changes["activation_checkpoint.mode"] = chosen.recompute
    if options.ranks is not None:
        changes["parallelism.pipeline_parallel_degree"] = options.ranks
    if options.microbatches is not None:
        changes["training.local_batch_size"] = job.num_microbatches * job.microbatch_size
    return command("train", options.config, replaced(overrides, changes))


def write(out: Path, scenario: Scenario, chosen, candidates, whole, times, entry: Device, worst: dict) -> None:
    import torch

    from stateflow.commands.plan_verify import plan_file_of
    from stateflow.planning.plan_file import write_plan

    evidence = {
        "made": datetime.date.today().isoformat(),
        "device": entry.name,
        "torch": torch.__version__,
        "verified": chosen in times,
        "predicted_step_time": chosen.step_time,
        "measured_step_time": times.get(chosen),
        "predicted_bubble": chosen.bubble,
        "predicted_peak_bytes": max(chosen.peak_bytes),
        "whole_sequences_step_time": None if whole is None else times.get(whole, whole.step_time),
        **{f"worst_fit_error_{name.replace(' ', '_')}": error for name, error in worst.items()},
    }
    rows = [
        {
            "policy": c.policy,
            "stages_per_rank": c.stages_per_rank,
            "recompute": c.recompute,
            "chunk_lengths": list(c.plan.lengths),
            "skew": c.skew,
            "predicted_step_time": c.step_time,
            "measured_step_time": times.get(c),
            "predicted_bubble": c.bubble,
            "predicted_peak_bytes": max(c.peak_bytes),
            "fits": c.fits,
        }
        for c in dict.fromkeys([*candidates[:SHOWN], *times])
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_plan(out, plan_file_of(scenario, chosen), evidence, rows)
