"""What a checkpoint says about the run that wrote it, and what may not differ when another run resumes from it.

Beside torchtitan's files, every checkpoint folder ``step-N`` gets a small ``stateflow.json``: the model, the data, the
optimizer's settings and the data-parallel degree. ``check_resume`` reads it while the config is checked, before any
process group exists, where a mismatch would otherwise end in an error about tensors, an assertion, or silently in
another place of the data or with another learning rate than the config's.

Chunks, skew, policy, PP and TP degree, and whether the pipeline is on are not recorded: they may differ freely.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

FILE = "stateflow.json"
_MODEL_NAME = "stateflow"
_DATALOADER = "dataloader"
_COMPLETE = (".metadata", "model.safetensors.index.json")  # written last; one of them makes a folder a checkpoint
# Part of a checkpoint -> the keys of [optimizer] that it brings along, whatever the config says.
_OPTIMIZER_KEYS = {"lr_scheduler": ("lr",), "optimizer": ("name", "beta1", "beta2", "eps", "weight_decay")}

# Of the model's fields: how weights begin, what computes them, and how batches are read are no property of weights.
# Neither is rope_reset: rotary positions are relative, inside a document both ways give the same scores.
_NOT_THE_MODEL = (
    "init_std",
    "init_seed",
    "backend",
    "exact_order",
    "overlap_projections",
    "attn_type",
    "rope_reset",
    "pattern",
)
# A run that only takes over weights may change these, e.g. to extend the context.
_WITHOUT_WEIGHTS = ("rope_theta", "norm_eps")


def describe_model(model_args) -> dict[str, Any]:
    """The fields that weights belong to, as JSON; a mixer for each layer stands for the pattern."""
    fields = {name: value for name, value in asdict(model_args).items() if name not in _NOT_THE_MODEL}
    if fields.get("num_v_heads") is None:
        fields["num_v_heads"] = fields["num_heads"]
    return {**fields, "layers": model_args.layer_kinds()}


def describe_data(job_config, files: str | None) -> dict[str, Any]:
    """What the saved position in the data refers to, by config key; ``files`` as `data.size_of_files` says it."""
    training = job_config.training
    data = {
        "[training] dataset": training.dataset,
        "[training] dataset_path": training.dataset_path,
        "[training.dataloader] num_workers": training.dataloader.num_workers,
        "[stateflow] tokenizer": job_config.stateflow.tokenizer,
    }
    return data if files is None else {**data, "its files": files}


def describe_optimizer(job_config) -> dict[str, Any]:
    keys = [key for keys in _OPTIMIZER_KEYS.values() for key in keys]
    return {f"[optimizer] {key}": getattr(job_config.optimizer, key) for key in keys}


def describe_run(
    job_config, dp_degree: int, model_only: bool = False, files: str | None = None
) -> dict[str, Any]:
    from stateflow.titan.flavors import resolve_model

    return {
        "format": 1,
        "flavor": job_config.model.flavor,
        "model": describe_model(resolve_model(job_config)),
        "data": describe_data(job_config, files),
        "optimizer": describe_optimizer(job_config),
        "data_parallel_degree": dp_degree,
        "holds": "model" if model_only else "everything",
    }


def data_parallel_degree(job_config, world_size: int | None = None) -> int | None:
    """Ranks that read different data.  None if it follows from a number of processes that is not known yet.

    ``world_size`` is that number; without it what the launcher of this process says.
    """
    p = job_config.parallelism
    if p.data_parallel_shard_degree > 0:
        return p.data_parallel_replicate_degree * p.data_parallel_shard_degree
    world_size = os.environ.get("WORLD_SIZE") if world_size is None else world_size
    others = p.pipeline_parallel_degree * p.tensor_parallel_degree * p.context_parallel_degree
    return None if world_size is None else max(1, int(world_size) // others)


# ---------------------------------------------------------------------------------------- writing
def write(folder: str | Path, record: dict[str, Any]) -> None:
    """Puts the record into a checkpoint folder, at once or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(folder / FILE)


def install() -> None:
    """Makes torchtitan's CheckpointManager write the record along with every checkpoint of our models.

    Not when the run starts: a checkpoint folder that exists makes torchtitan ignore ``initial_load_path``, so a run
    that died before its first checkpoint would go on from random weights. And a record in ``step-N`` moves with it.
    """
    from torchtitan.components.checkpoint import CheckpointManager

    if getattr(CheckpointManager.save, "writes_stateflow", False):
        return
    original = CheckpointManager.save

    def save(self, curr_step: int, last_step: bool = False) -> None:
        _write_record(self, curr_step, last_step)  # first: a checkpoint without it would pass unchecked
        original(self, curr_step, last_step)

    save.writes_stateflow = True
    CheckpointManager.save = save


def _write_record(manager, step: int, last_step: bool) -> None:
    import torch.distributed as dist

    job_config = getattr(manager.states.get("train_state"), "job_config", None)
    if job_config is None or job_config.model.name != _MODEL_NAME or not manager._should_save(step, last_step):
        return
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    loader = manager.states.get(_DATALOADER)
    dp_degree = getattr(loader, "dp_world_size", 1)
    # The files that it began with: by now they may have changed, or be gone.
    files = getattr(loader, "files", None)
    record = describe_run(job_config, dp_degree, last_step and manager.last_save_model_only, files)
    folder = Path(manager._create_checkpoint_id(step))
    for name in _COMPLETE:  # of an earlier run: with these, a save that is cut short would pass as a mix of both
        (folder / name).unlink(missing_ok=True)
    write(folder, record)


# --------------------------------------------------------------------------------------- checking
def check_resume(job_config, world_size: int | None = None) -> None:
    """Refuses a run that would load a checkpoint of another model, of other data or of another data-parallel degree,
    or load or save one in a form that these models do not have.

    That degree may depend on the number of processes: a launcher gives it as ``world_size``.

    Raises ValueError naming what differs and what to do.  A checkpoint without a record is left to torchtitan.
    """
    options = job_config.checkpoint
    if not options.enable or job_config.model.name != _MODEL_NAME:
        return
    for name in ("initial_load_in_hf", "last_save_in_hf"):
        if getattr(options, name):
            raise ValueError(
                f"[checkpoint] {name} = true: these models have no form in Hugging Face's transformers; set it to "
                "false (docs/bare_torch.md reads the weights of a checkpoint without torchtitan)"
            )
    folder = Path(job_config.job.dump_folder) / options.folder
    if folder.exists():
        step = _latest_step(folder) if options.load_step == -1 else options.load_step
        if step is None:
            return
        checkpoint, weights_only = folder / f"step-{step}", step == 0
        elsewhere = "give this run another [job] dump_folder or [checkpoint] folder"
    elif options.initial_load_path:
        checkpoint, weights_only = Path(options.initial_load_path), options.initial_load_model_only
        elsewhere = "give another [checkpoint] initial_load_path"
        if not checkpoint.is_dir():
            raise ValueError(
                f"[checkpoint] initial_load_path = {options.initial_load_path!r} is no folder; give the folder of one "
                "checkpoint, such as outputs/demo/checkpoint/step-20"
            )
    else:
        return
    record = _read(checkpoint)
    if record is None:
        return
    _check_model(job_config, record, checkpoint, elsewhere, weights_only)
    if not weights_only:
        _check_everything_is_there(record, checkpoint)
        _check_optimizer(job_config, record, checkpoint)
        if _DATALOADER not in options.exclude_from_loading:
            _check_position(job_config, record, checkpoint, world_size)


def _latest_step(folder: Path) -> int | None:
    """The newest complete checkpoint, as torchtitan finds it."""
    steps = [
        int(match[1])
        for path in folder.iterdir()
        if (match := re.search(r"step-(\d+)", path.name)) and any((path / name).is_file() for name in _COMPLETE)
    ]
    return max(steps, default=None)


def _read(checkpoint: Path) -> dict[str, Any] | None:
    path = checkpoint / FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        return record if isinstance(record["model"], dict) and isinstance(record["data"], dict) else None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); it only says which run wrote the checkpoint: delete it to go on without "
            "that check"
        ) from None


def _differences(saved: dict[str, Any], mine: dict[str, Any]) -> list[str]:
    """What both know and disagree about, as text."""
    return [
        f"{name} = {saved[name]!r} there, {mine[name]!r} here"
        for name in mine
        if name in saved and saved[name] != mine[name]
    ]


def _check_model(job_config, record, checkpoint: Path, elsewhere: str, weights_only: bool) -> None:
    from stateflow.titan.flavors import resolve_model

    mine = describe_model(resolve_model(job_config))
    if weights_only:
        mine = {name: value for name, value in mine.items() if name not in _WITHOUT_WEIGHTS}
    differences = _differences(record["model"], mine)
    if differences:
        raise ValueError(
            f"the checkpoint {checkpoint} is of another model (flavor {record.get('flavor')!r} there, "
            f"{job_config.model.flavor!r} here): {'; '.join(differences)}. Set the model as it is there, or {elsewhere}"
        )


def _check_everything_is_there(record, checkpoint: Path) -> None:
    if record.get("holds") == "model":
        raise ValueError(
            f"the checkpoint {checkpoint} holds the model alone, without optimizer and position, as [checkpoint] "
            "last_save_model_only = true has it for a run's last step; choose an earlier one with "
            "--checkpoint.load_step, or give this run another [checkpoint] folder and set "
            "--checkpoint.initial_load_path to this one, to start from its weights"
        )


def _check_optimizer(job_config, record, checkpoint: Path) -> None:
    mine = describe_optimizer(job_config)
    for part, keys in _OPTIMIZER_KEYS.items():
        some = {name: value for name, value in mine.items() if name.removeprefix("[optimizer] ") in keys}
        differences = _differences(record.get("optimizer", {}), some)
        if differences and part not in job_config.checkpoint.exclude_from_loading:
            raise ValueError(
                f"the checkpoint {checkpoint} brings its own settings, which this run would go on with: "
                f"{'; '.join(differences)}; set them as they are there, or --checkpoint.exclude_from_loading {part} "
                "resumes everything else and begins that part anew"
            )


def _check_position(job_config, record, checkpoint: Path, world_size: int | None) -> None:
    from stateflow.titan.data import size_of_files

    way_out = "--checkpoint.exclude_from_loading dataloader resumes everything else and reads the data from its start"
    saved, mine = record.get("data_parallel_degree"), data_parallel_degree(job_config, world_size)
    if None not in (saved, mine) and saved != mine:
        raise ValueError(
            f"the checkpoint {checkpoint} was written with a data-parallel degree of {saved}, this run has {mine}: the "
            f"data loader's position cannot be divided among another number of ranks; keep {saved} (data_parallel_"
            f"shard_degree x data_parallel_replicate_degree), or {way_out}"
        )
    files = size_of_files(job_config.training.dataset, job_config.training.dataset_path)
    differences = _differences(record["data"], describe_data(job_config, files))
    if differences:
        raise ValueError(
            f"the checkpoint {checkpoint} has its position in other data: {'; '.join(differences)}; set them as they "
            f"are there, or {way_out}"
        )
