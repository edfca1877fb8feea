"""``stateflow plan CONFIG``: profile the stages on the device at hand, search, verify the best, write a plan file."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from subprocess import STDOUT, TimeoutExpired

from stateflow.commands import Scenario, titan_arguments
from stateflow.planning.devices import DEVICES, GIB, Device, device_named

SHOWN = 8  # candidates printed and kept in the plan file
TRACED = (3, 6)  # steps that a verification measures; those before warm up


def run(options: argparse.Namespace, scenario: Scenario, overrides: Sequence[str]) -> int:
    import torch

    from stateflow.pipeline.policies import POLICIES
    from stateflow.planning.profile import Budget, Cache
    from stateflow.planning.search import Measured, describe, search
    from stateflow.titan.cpu_host import accelerator_in_use

    job, config = scenario.job, scenario.job_config
    if options.device is not None:
        raise ValueError(f"--device {options.device} is for --analytic; a measured plan is for the device at hand")
    if job.tensor_parallel > 1:
        raise ValueError(
            f"tensor_parallel_degree = {job.tensor_parallel}: one process measures whole stages only; use --analytic"
        )
    device = torch.device("cuda" if accelerator_in_use() and torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # as a rank of `stateflow train` has
    out = options.out or Path(config.job.dump_folder) / "plan.toml"
    cache = Cache(options.cache or Path(config.job.dump_folder) / "plan_cache.json")
    budget = Budget(options.time_budget)
    entry = device_entry(device, job.num_ranks)
    limit = entry.usable_fraction * entry.memory if options.memory is None else options.memory * GIB
    print(f"{job.describe()}\nprofiling on {entry.name}, at most {limit / GIB:.1f} GiB a rank, cache {cache.path}")

    candidates, fit = [], []
    for mode in options.recompute or [job.recompute]:
        one = job if mode == job.recompute else job.with_recompute(mode)
        measured = Measured(one, entry, limit)
        profiles = profile_stages(config, measured, device, cache, budget)
        for profile in dict.fromkeys(profiles):
            fit += profile.fit_errors()
        candidates += search(measured.use(profiles), runnable_policies(measured, POLICIES))
    candidates.sort(key=lambda c: (not c.fits, c.step_time, c.plan.num_chunks))
    worst = {name: max((abs(entry[i]) for entry in fit), default=None) for name, i in (("forward", 2), ("backward", 3))}
    if fit:
        print(f"fit: worst error at {len(fit)} held-out points: forward {worst['forward']:.1%}, "
              f"backward {worst['backward']:.1%}")  # fmt: skip
    print("\npredicted, fastest first:")
    for candidate in candidates[:SHOWN]:
        print(describe(candidate))
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        print("nothing fits: more ranks, recomputation or FSDP would help; no plan is written")
        return 1
    whole = next((c for c in candidates if c.plan.num_chunks == 1), None)
    if whole is not None:
        print(f"{describe(whole)}  (whole sequences)")

    times = verify(options, scenario, overrides, fitting, whole, budget)
    chosen = min(times, key=times.__getitem__) if times else fitting[0]
    print("\n" + verdict(chosen, whole, times))
    write(out, scenario, chosen, candidates, whole, times, entry, worst)
    print(f"plan file {out}; use it with --stateflow.plan {out} (and no num_chunks, skew or chunk_lengths)")
    return 0


def runnable_policies(measured, policies) -> list[str]:
    """Those to search: the job's own, and all with its stages that need no split of what was measured whole."""
    job = measured.job

    def fits(name: str) -> bool:
        if name == "interleaved" and job.stages_per_rank == 1:
            return False  # that is 1f1b
        return policies[name].stages_per_rank in (None, job.stages_per_rank) and not policies[name].splits_backward

    return [name for name in policies if name == job.policy or fits(name)]


def device_entry(device, num_ranks: int) -> Device:
    """The device at hand with its real memory; links are the table's. Ranks on a CPU share the host's memory."""
    import torch

    if device.type == "cpu":
        return dataclasses.replace(DEVICES["cpu"], memory=DEVICES["cpu"].memory / num_ranks)
    properties = torch.cuda.get_device_properties(device)
    return dataclasses.replace(device_named(None), name=properties.name, memory=properties.total_memory)


def profile_stages(config, measured, device, cache, budget) -> list:
    """A profile for each stage; stages of the same layers share one."""
    import torch

    from stateflow.planning.profile import measure, points_to_measure, profile_stage
    from stateflow.titan.planning import stage_module

    job = measured.job
    lengths = {n for skew in (0.0, 1.0, 1.25) for count in (2, 32) for n in _lengths(job, count, skew)}
    shortest = max(16, min(lengths, default=job.seq_len))
    kinds, found = job.model.layer_kinds(), {}
    profiles = []
    for number, part in enumerate(job.parts):
        layers = [kinds[int(name.removeprefix("layers."))] for name in part if name.startswith("layers.")]
        ends = ("tok_embeddings" in part, "output" in part)
        same = (tuple(layers), ends)
        if same not in found:
            reads_prefix = measured.stages[number].footprint.window_bytes_per_token > 0
            wanted = points_to_measure(job.seq_len, shortest, reads_prefix)
            module: list[torch.nn.Module] = []  # built when a point is not in the cache

            def measure_point(start: int, length: int, part=part, ends=ends, module=module):
                if not module:
                    module.append(stage_module(config, job, part, device))
                return measure(
                    module[0], device, job.compute_dtype, start, length, batch=job.microbatch_size, dim=job.model.dim,
                    vocab_size=job.model.vocab_size, is_first=ends[0], is_last=ends[1],
                    documents=config.stateflow.reset_at_documents,
                )  # fmt: skip

            def progress(text: str, number=number) -> None:
                end = "\r" if sys.stderr.isatty() else "\n"
                print(f"  stage {number} of {len(job.parts)}, {job.recompute}: {text:<60}", end=end, file=sys.stderr)

            found[same] = profile_stage(measure_point, _key(config, job, same), cache, wanted, budget, progress)
            module.clear()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        profiles.append(found[same])
    return profiles


def _lengths(job, num_chunks: int, skew: float) -> tuple[int, ...]:
    try:
        return job.plan(num_chunks, skew).lengths
    except ValueError:
        return ()


def _key(config, job, same) -> str:
    """What a measured point depends on, as a short hash."""
    import torch

    from stateflow.planning.plan_file import model_digest

    facts = (
        model_digest(job.model), same, str(job.compute_dtype), job.microbatch_size, job.recompute, job.recompute_every,
        config.compile.enable, job.model.backend, config.stateflow.reset_at_documents, torch.__version__,
        torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    )  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


# ---- verification
def verify(options, scenario: Scenario, overrides, fitting, whole, budget) -> dict:
    """Measured step time of the best few and of whole sequences, by really training a few steps: {candidate: s}."""
    import torch

    from stateflow.cli import world_size

    if options.verify == 0:
        return {}
    nproc = world_size(scenario.job_config)
    here = torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1
    if nproc > here:
        unit = "GPUs" if torch.cuda.is_available() else "cores"
        print(f"\nnot verified: the run needs {nproc} {unit}, here are {here}")
        return {}
    chosen = fitting[: options.verify]
    if whole is not None and whole.fits and whole not in chosen:
        chosen.append(whole)
    print("\nverified by running them:")
    times = {}
    for candidate in chosen:
        if budget.spent:
            print("the time budget is spent; the rest is not verified")
            break
        step, trouble = measured_step(options, scenario, overrides, candidate, nproc)
        if step is None:
            print(f"  failed     {candidate.name}: {trouble}")
            continue
        times[candidate] = step
        error = candidate.step_time / step - 1
        print(f"{step:9.4g} s  predicted {candidate.step_time:.4g} s ({error:+.1%})  {candidate.name}")
    return times


def measured_step(options, scenario: Scenario, overrides, candidate, nproc: int) -> tuple[float | None, str]:
    """The median step time of a short training run of a candidate, or None and the last line of its log."""
    job = scenario.job
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *titan_arguments(options.config, overrides, options.ranks),
            "--stateflow.plan", "None", "--stateflow.num-chunks", "None", "--stateflow.skew", "None",
            f"--stateflow.policy={candidate.policy}", "--stateflow.chunk-lengths", *map(str, candidate.plan.lengths),
            f"--training.local_batch_size={job.num_microbatches * job.microbatch_size}",
            f"--activation_checkpoint.mode={candidate.recompute}",
        ]  # fmt: skip
        trace, trouble = train_for_a_trace(arguments, nproc, Path(folder))
    return (None, trouble) if trace is None else (trace.median_step().step_time, "")


def train_for_a_trace(arguments: Sequence[str], nproc: int, folder: Path, timeout: float | None = None):
    """Trains a few steps in ``folder`` under torchrun: (the trace, "") or (None, the error that ended it).

    A run that is not done after ``timeout`` seconds is ended.
    """
    from stateflow.launch import run_to_its_end
    from stateflow.pipeline.trace import read_trace

    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}",
        "-m", "torchtitan.train", *arguments,
        "--stateflow.enable", "--stateflow.trace", "--stateflow.trace-steps", *map(str, TRACED),
        f"--training.steps={TRACED[1]}", "--validation.no-enable", "--checkpoint.no-enable",
        "--metrics.no-enable_tensorboard", f"--job.dump_folder={folder}",
    ]  # fmt: skip
    log = folder / "log"
    env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ}
    try:
        with log.open("w") as stream:
            status = run_to_its_end(command, timeout=timeout, env=env, stdout=stream, stderr=STDOUT)
    except TimeoutExpired:
        return None, f"not done after {timeout:g} s"
    if status == 0:
        return read_trace(folder / "trace"), ""
    errors = [line for line in log.read_text().splitlines() if "Error" in line]
    # torchrun's own complaint that a process has failed says nothing.
    errors = [line for line in errors if "ChildFailedError" not in line] or errors
    return None, (errors or [f"status {status}"])[-1].strip()[-300:]


def verdict(chosen, whole, times: dict) -> str:
    how = "measured" if times else "predicted"
    best = times.get(chosen, chosen.step_time)
    text = f"chosen: {chosen.name}: {', '.join(map(str, chosen.plan.lengths))}, {best:.4g} s ({how})"
    if chosen.plan.num_chunks == 1:
        return f"{text}\nwhole sequences are the fastest here: chunks are slower, leave [stateflow] enable = false"
    if whole is None or (times and whole not in times):
        return text
    if not whole.fits:
        return f"{text}\nwhole sequences do not fit"
    return f"{text}\n{times.get(whole, whole.step_time) / best:.2f} times as fast as whole sequences"


def write(out: Path, scenario: Scenario, chosen, candidates, whole, times, entry: Device, worst: dict) -> None:
    import torch

    from stateflow.planning.plan_file import PlanFile, write_plan
    from stateflow.titan.config import plan_target

    job = scenario.job
    target = dataclasses.replace(
        plan_target(scenario.job_config), microbatches=job.num_microbatches, recompute=chosen.recompute
    )
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
        "worst_fit_error_forward": worst["forward"],
        "worst_fit_error_backward": worst["backward"],
    }
    rows = [
        {
            "policy": c.policy,
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
    write_plan(out, PlanFile(target, chosen.policy, chosen.plan.lengths), evidence, rows)
