"""The plan file: what a search chose, for whom, and on which evidence. TOML, written for people, read by a run.

``[plan]`` is what ``[stateflow] plan = "file"`` takes: chunk lengths, policy, weight lag and the number of stages. It
only fits the model, sequence length, ranks, microbatches and recomputation that it was made for. ``[evidence]`` is for
the reader.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stateflow.chunks import ChunkPlan
from stateflow.model import ModelConfig

VERSION = 1
# Fields that change neither the cost of a chunk nor the tensors that exist.
_NOT_SHAPE = {"init_std", "init_seed", "backend", "exact_order", "rope_theta", "rope_reset", "norm_eps", "attn_type"}
_NOT_SHAPE |= {"pattern", "overlap_projections"}


def model_digest(config: ModelConfig) -> str:
    """Short hash of what a model's costs depend on."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(ModelConfig) if f.name not in _NOT_SHAPE}
    fields["layers"] = config.layer_kinds()
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Target:
    """What a plan is for; all fields must agree with the run, which takes ``stages`` from the plan if it can."""

    model: str  # digest
    seq_len: int
    ranks: int
    stages: int
    microbatches: int
    recompute: str


@dataclass(frozen=True)
class PlanFile:
    target: Target
    policy: str
    chunk_lengths: tuple[int, ...]
    weight_lag: int | None = None  # None: the policy's own

    def plan(self) -> ChunkPlan:
        return ChunkPlan.explicit(self.target.seq_len, self.chunk_lengths)


def write_plan(path: Path, found: PlanFile, evidence: dict, candidates: Sequence[dict]) -> None:
    """Writes a plan with its evidence: ``evidence`` is one table, ``candidates`` an array of tables in it."""
    lines = [
        "# A chunk plan of `stateflow plan`. Use it with",
        "#   [stateflow]",
        f'#   plan = "{path}"',
        "# It holds for the model, sequence length, ranks, microbatches and recomputation below, on this kind of GPU.",
        "",
        f"version = {VERSION}",
        "",
        "[plan]",
        f"policy = {_value(found.policy)}",
        f"chunk_lengths = {_value(list(found.chunk_lengths))}",
        *([] if found.weight_lag is None else [f"weight_lag = {found.weight_lag}"]),
        "",
        "[plan.for]",
        *(f"{key} = {_value(value)}" for key, value in dataclasses.asdict(found.target).items()),
        "",
        "[evidence]  # times in seconds, memory in bytes of the fullest rank",
        *(f"{key} = {_value(value)}" for key, value in evidence.items() if value is not None),
    ]
    for candidate in candidates:
        lines += ["", "[[evidence.candidates]]"]
        lines += [f"{key} = {_value(value)}" for key, value in candidate.items() if value is not None]
    path.write_text("\n".join(lines) + "\n")


def _value(value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}" if "." in f"{value:.6g}" or "e" in f"{value:.6g}" else f"{value:.1f}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


def read_plan(path: Path) -> PlanFile:
    """The plan of a file.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"plan file {path} cannot be read ({error.strerror}); make one with stateflow plan") from None
    except UnicodeDecodeError:
        raise ValueError(f"plan file {path} is no text; make one with stateflow plan") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"plan file {path} is no TOML: {error}") from None
    if data.get("version") != VERSION:
        version = data.get("version")
        raise ValueError(f"plan file {path} has version {version!r}, this program reads {VERSION}; make it anew")
    try:
        section = data["plan"]
        target = Target(**section["for"])
        policy, lengths, lag = section["policy"], section["chunk_lengths"], section.get("weight_lag")
        if not isinstance(policy, str):
            raise TypeError(f"policy = {policy!r} is no string")
        if not isinstance(lengths, list) or not all(type(n) is int for n in lengths):
            raise TypeError(f"chunk_lengths = {lengths!r} is no list of whole numbers")
        if lag is not None and type(lag) is not int:
            raise TypeError(f"weight_lag = {lag!r} is no whole number")
        found = PlanFile(target, policy, tuple(lengths), lag)
        found.plan()
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"plan file {path}: {what} in [plan]; make it anew with stateflow plan") from None
    return found


def read_evidence(path: Path) -> dict:
    """The ``[evidence]`` of a plan file; empty where there is none."""
    return tomllib.loads(path.read_text()).get("evidence", {})


def misfit(found: PlanFile, run: Target, change: dict[str, str], policy_known: bool) -> str | None:
    """Why a plan does not fit a run, with the change of the run by which it would, or None.

    ``change`` holds for each field of a ``Target`` what to set; the model has none.
    """
    for field in dataclasses.fields(Target):
        planned, have = getattr(found.target, field.name), getattr(run, field.name)
        if planned != have:
            if field.name == "model":
                return "was made for another model"
            how = change[field.name]
            how = how if how.startswith("leave") else f"set {how}"
            return f"was made for {field.name} = {planned}, the run has {have}; {how}"
    return None if policy_known else f"asks for the policy {found.policy!r}, which is unknown here"
