"""Whether the values of a train.toml are of the types that their keys declare, and in their range.

torchtitan takes them as they come: a number as text fails far away, ``compile = true`` in place of a table is dropped,
and ``lr = true`` is a rate of 1.
"""

# No `from __future__ import annotations` here: it would make the config's types text.
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

# (section, key, least): torchtitan takes these as they come, and fails far away or not at all.
_WHOLE_NUMBERS = [
    ("parallelism", "pipeline_parallel_degree", 1),
    ("parallelism", "tensor_parallel_degree", 1),
    ("parallelism", "context_parallel_degree", 1),
    ("parallelism", "expert_parallel_degree", 1),
    ("parallelism", "data_parallel_replicate_degree", 1),
    ("parallelism", "data_parallel_shard_degree", -1),
    ("parallelism", "pipeline_parallel_microbatch_size", 1),
    ("parallelism", "pipeline_parallel_layers_per_stage", 1),
    ("parallelism", "pipeline_parallel_first_stage_less_layers", 0),
    ("parallelism", "pipeline_parallel_last_stage_less_layers", 0),
    ("training", "seq_len", 1),
    ("training", "local_batch_size", 1),
    ("training", "global_batch_size", -1),
    ("training", "steps", 1),
    ("validation", "seq_len", 1),
    ("validation", "local_batch_size", 1),
    ("validation", "freq", 1),
    ("checkpoint", "interval", 1),
    ("metrics", "log_freq", 1),
]

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def check_types(config_class: type, toml: Mapping[str, Any], section: str = "") -> None:
    """Raises ValueError, naming section, key and value.  Unknown keys are torchtitan's to refuse."""
    wanted = {field.name: field.type for field in dataclasses.fields(config_class)}
    for key, value in toml.items():
        name = f"{section}.{key}".lstrip(".")
        if key not in wanted or name == "stateflow":  # whose keys `validate` knows more of
            continue
        if dataclasses.is_dataclass(wanted[key]):
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} = {value!r} must be a table: write [{name}], and its keys below")
            check_types(wanted[key], value, name)
        elif not _fits(value, wanted[key]):
            raise ValueError(f"[{section}] {key} = {value!r} must be {_in_words(wanted[key])}")


def _fits(value: Any, wanted: Any) -> bool:
    kind, of = typing.get_origin(wanted), typing.get_args(wanted)
    if kind is typing.Literal:
        return isinstance(value, str) and value in of
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in of)
    if kind is list:
        return isinstance(value, list) and all(_fits(one, of[0]) for one in value)
    return type(value) is wanted or (wanted is float and type(value) is int)


def _in_words(wanted: Any) -> str:
    kind, of = typing.get_origin(wanted), typing.get_args(wanted)
    if kind is typing.Literal:
        return f"one of {', '.join(map(repr, of))}"
    if kind in (typing.Union, types.UnionType):
        return " or ".join(_in_words(one) for one in of if one is not type(None))
    if kind is list:
        return f"a list, each {_in_words(of[0])}"
    return _WORDS[wanted]


def check_ranges(job_config) -> None:
    """Of the torchtitan keys that other checks compute with, or that would end a run in its first steps."""
    for section, key, least in _WHOLE_NUMBERS:
        value = getattr(getattr(job_config, section), key)
        if value is not None and value < least:
            raise ValueError(f"[{section}] {key} = {value} is too small; the least is {least}")
    max_norm = job_config.training.max_norm
    if not max_norm > 0:  # 0 would train nothing, and a negative one uphill
        raise ValueError(
            f"[training] max_norm = {max_norm} must be above 0; without clipping it is a large number, e.g. 1e9"
        )
    if job_config.parallelism.data_parallel_shard_degree == 0:
        raise ValueError("[parallelism] data_parallel_shard_degree = 0: use 1, or -1 for what is left")
    if job_config.training.global_batch_size == 0:
        raise ValueError("[training] global_batch_size = 0: use -1 for one batch a data-parallel rank")
