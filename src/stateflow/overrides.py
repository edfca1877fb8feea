"""torchtitan overrides of a call, ``--section.key VALUE``, as they go into another command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any


def key_of(option: str) -> str:
    """ "training.seq_len" of --training.seq-len=8; a flag and its --section.no-flag have the same."""
    section, _, key = option.removeprefix("--").partition("=")[0].replace("-", "_").rpartition(".")
    return f"{section}.{key.removeprefix('no_')}"


def replaced(overrides: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """The overrides with ``changes``, {"section.key": value}, in place of those of the same keys."""
    kept, keep = [], True
    for argument in overrides:
        if argument.startswith("--"):
            keep = key_of(argument) not in changes
        if keep:
            kept.append(argument)
    return kept + [argument for key, value in changes.items() for argument in _spelled(key, value)]


def _spelled(key: str, value: Any) -> list[str]:
    section, _, name = key.rpartition(".")
    if section.startswith("stateflow"):
        name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{section}.{name if value else f'no-{name}'}"]
    values = map(str, value) if isinstance(value, list | tuple) else [str(value)]
    return [f"--{section}.{name}", *values]


def command(program: str, config: object, overrides: Sequence[str], nproc: int | None = None) -> str:
    """``stateflow PROGRAM CONFIG``, to be pasted into a shell."""
    processes = [] if nproc is None else ["--nproc", str(nproc)]
    return shlex.join(["stateflow", program, str(config), *processes, *overrides])
