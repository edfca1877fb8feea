"""What makes sense after a run: its own command, with what is to be different."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stateflow.overrides import command, replaced
from stateflow.titan.config import make_plan, validate

CHUNKS = (8, 16, 4, 2)


def next_commands(job_config, overrides: Sequence[str] = (), nproc: int | None = None) -> list[tuple[str, str]]:
    """(command, what it is for): two or three. ``overrides`` and ``nproc`` are those of the run's command.

    All keep them, or it would be another run. Each that trains has a folder of its own: in this run's it would go on
    from the checkpoint, and its figures would take the place of this run's.
    """
    config_file = job_config.job.config_file or "train.toml"
    commands = [(command("verify", config_file, overrides, nproc), "gradients against the unpipelined model")]
    folders = _free_folders(job_config.job.dump_folder.rstrip("/"))
    for choices, purpose in _ideas(job_config):
        changes = next((changes for changes in choices if _accepted(job_config, changes)), None)
        if changes is not None:
            arguments = replaced(overrides, {**changes, "job.dump_folder": next(folders)})
            commands.append((command("train", config_file, arguments, nproc), purpose))
    return commands


def _ideas(job_config) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """(changes of which the first that the config admits is meant, what they are for)"""
    options = job_config.stateflow
    if options.enable:
        if not (options.chunk_lengths or options.plan or options.schedule_file):  # they say how many chunks
            now = make_plan(job_config).num_chunks
            choices = [{"stateflow.num_chunks": n} for n in CHUNKS if n != now]
            seeded = job_config.debug.seed is not None
            yield choices, f"other chunks, the same losses{'' if seeded else ' once [debug] seed is set'}"
        # Whole sequences have no trace of chunks, and in torchtitan's schedule layers are not recorded.
        off = {f"stateflow.{name}": False for name in ("enable", "trace", "cuda_graphs") if getattr(options, name)}
        yield [off], "the same model without chunks, to compare with"
    else:
        yield [{"stateflow.enable": True}], "the same model, its sequences pipelined in chunks"
    if not job_config.validation.enable:
        on, training = {"validation.enable": True}, job_config.training
        sizes = {f"validation.{name}": getattr(training, name) for name in ("seq_len", "local_batch_size")}
        yield [on, {**on, **sizes}], "with a validation loss"


def _accepted(job_config, changes: Mapping[str, Any]) -> bool:
    changed = copy.deepcopy(job_config)
    changed.checkpoint.enable = False  # the folder is another
    for key, value in changes.items():
        section, _, name = key.partition(".")
        setattr(getattr(changed, section), name, value)
    try:
        validate(changed)
    except ValueError:
        return False
    return True


def _free_folders(folder: str) -> Iterator[str]:
    number = 1
    while True:
        number += 1
        if not Path(f"{folder}_{number}").exists():
            yield f"{folder}_{number}"
