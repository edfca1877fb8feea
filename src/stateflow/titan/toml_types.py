"""Whether the values of a train.toml are of the types that their keys declare.

torchtitan takes them as they come: a number as text fails far away, ``compile = true`` in place of a table is dropped,
and ``lr = true`` is a rate of 1.
"""

# No `from __future__ import annotations` here: it would make the config's types text.
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

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
