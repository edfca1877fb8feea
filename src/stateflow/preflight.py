"""What ``stateflow doctor`` says before a launch: one line a finding, with what to do about it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

# Component -> (first version that works, first one that is not known to, what to install).
RANGES = {
    "python": ("3.11", "4", "Python 3.11 or newer"),
    "torch": ("2.11", "2.15", "pip install 'torch>=2.11,<2.14'"),
    "torchtitan": ("0.2.2", "0.2.3", "pip install torchtitan==0.2.2"),
    "triton": ("3.4", "4", "pip install 'triton>=3.4'"),
}


@dataclass(frozen=True)
class Finding:
    """``advice`` is None where all is well; ``fatal`` findings would end a run."""

    text: str
    advice: str | None = None
    fatal: bool = False

    def __str__(self) -> str:
        mark = "ok  " if self.advice is None else ("FAIL" if self.fatal else "note")
        return f"  {mark} {self.text}" + (f": {self.advice}" if self.advice else "")


def check_versions(found: dict[str, str | None]) -> list[Finding]:
    """Versions against the ranges that this project is tested in."""
    from stateflow.doctor import _numbers

    findings = []
    for name, (first, end, advice) in RANGES.items():
        version = found.get(name)
        if version is None:
            findings.append(Finding(f"{name} is not installed", advice, fatal=True))
        elif not _numbers(first) <= _numbers(version) < _numbers(end):
            findings.append(Finding(f"{name} {version} is outside {first} to below {end}", advice, fatal=True))
        else:
            findings.append(Finding(f"{name} {version}"))
    return findings


def check_links(device_count: int, can_access) -> list[Finding]:
    """Whether each GPU reads its neighbours' memory; ``can_access(i, j)`` says so."""
    apart = [(i, i + 1) for i in range(device_count - 1) if not can_access(i, i + 1)]
    if device_count < 2:
        return []
    if apart:
        pairs = ", ".join(f"{i}-{j}" for i, j in apart)
        advice = "stages exchange activations through the host there; order CUDA_VISIBLE_DEVICES so that neighbours do"
        return [Finding(f"GPUs {pairs} have no peer access", advice)]
    return [Finding(f"{device_count} GPUs, neighbours have peer access")]


def check_config(path: Path, overrides: Sequence[str]) -> list[Finding]:
    """The TOML, the plan, the devices that it needs, and its predicted memory."""
    from stateflow.cli import world_size
    from stateflow.commands import read_config
    from stateflow.titan import shared_gpus

    if not path.is_file():
        return [Finding(f"{path} is not there", "give the path of a train.toml", fatal=True)]
    try:
        config = read_config(path, overrides)
    except ValueError as error:
        return [Finding(f"{path} is refused", str(error), fatal=True)]
    findings = [Finding(f"{path} is a valid config")]
    needed = world_size(config)
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if have and needed > have:
        advice = (
            f"start torchrun on {-(-needed // have)} such machines, lower the degrees in [parallelism], or try it out "
            f"with {shared_gpus.VARIABLE}=1"
        )
        findings.append(Finding(f"it needs {needed} GPUs, this machine has {have}", advice))
    elif not have:
        cores = os.cpu_count() or 1
        advice = f"there is no GPU: {needed} processes on {cores} cores of the CPU, which is for trying out only"
        findings.append(Finding(f"it needs {needed} devices", advice))
    else:
        findings.append(Finding(f"it needs {needed} of {have} GPUs"))
    findings += _check_plan(config)
    findings += _check_parts(config)
    findings += _check_memory(config)
    return findings


def _check_plan(config) -> list[Finding]:
    from stateflow.planning.plan_file import read_evidence

    path = config.stateflow.plan
    if path is None:
        return []
    evidence = read_evidence(Path(path))
    made_on, made_with = evidence.get("device"), evidence.get("torch")
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    advice = "it works, but another may be faster: stateflow plan measures afresh"
    if made_on != here:
        return [Finding(f"the plan {path} was made on {made_on}, here is {here}", advice)]
    if made_with != torch.__version__:
        return [Finding(f"the plan {path} was made with torch {made_with}, here is {torch.__version__}", advice)]
    seconds = evidence.get("measured_step_time", evidence.get("predicted_step_time"))
    expected = "" if seconds is None else f"; it expects {seconds:.4g} s a step"
    return [Finding(f"the plan {path} fits this run and was made on {here}{expected}")]


def _check_parts(config) -> list[Finding]:
    from stateflow.titan.planning import job_of, parts_without_layers

    remark = parts_without_layers(job_of(config))
    return [] if remark is None else [Finding("stages are uneven", remark)]


def _check_memory(config) -> list[Finding]:
    """Peak of the fullest rank by counting, against the memory of the device here (of an H200 without one)."""
    from stateflow.planning.analytic import Analytic
    from stateflow.planning.devices import GIB, device_named
    from stateflow.titan.config import make_plan
    from stateflow.titan.planning import job_of

    job = job_of(config)
    cpu = not torch.cuda.is_available()
    device = device_named(None)
    limit = None if cpu else 0.93 * torch.cuda.get_device_properties(0).total_memory
    analytic = Analytic(job, device, limit)
    chunked = config.stateflow.enable and job.num_ranks > 1
    plan = make_plan(config) if chunked else job.plan(1, 0.0)
    peaks = analytic.peak_bytes(analytic.schedule(job.policy, plan.num_chunks), plan)
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    where = f"{device.name}, as there is none here" if cpu else torch.cuda.get_device_name()
    text = f"predicted peak {peaks[worst] / GIB:.1f} GiB on rank {worst}, usable {analytic.limit / GIB:.1f} ({where})"
    if peaks[worst] <= analytic.limit:
        return [Finding(text)]
    return [Finding(text, _what_saves_memory(job, analytic, plan.num_chunks, chunked), fatal=not cpu)]


def _what_saves_memory(job, analytic, num_chunks: int, chunked: bool) -> str:
    """The first change that fits by prediction: more chunks, then recomputation."""
    from stateflow.planning.analytic import NUM_CHUNKS, Analytic

    on = "" if chunked else "enable = true and "
    for n in NUM_CHUNKS:
        if n > num_chunks and job.num_ranks > 1 and analytic.cell(n, 0.0).fits:
            return f"[stateflow] {on}num_chunks = {n} would fit"
    if job.recompute != "full":
        full = Analytic(job.with_recompute("full"), analytic.device, analytic.limit)
        for n in (num_chunks, *NUM_CHUNKS):
            if full.cell(n, 0.0).fits:
                chunks = "" if n == num_chunks else f" with num_chunks = {n}"
                return f'[activation_checkpoint] mode = "full"{chunks} would fit'
    return "no number of chunks fits: more pipeline ranks, tensor parallelism or FSDP would help"
