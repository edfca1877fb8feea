"""Cuts a model into pipeline parts outside torchtitan (inside it, torchtitan's own splitter is used)."""

from __future__ import annotations

import copy

from torch import nn


def split_model(model: nn.Module, num_stages: int) -> list[nn.Module]:
    """Copies of ``model`` that each keep a contiguous part: the embedding in the first, norm and head in the last.

    Layers are spread evenly, earlier parts take the remainder; names stay those of the whole model.  Raises ValueError
    if there are fewer layers than stages, or if two parts would share a parameter (tied weights).
    """
    names = list(model.layers)
    if not 1 <= num_stages <= len(names):
        raise ValueError(f"num_stages = {num_stages} does not fit {len(names)} layers; use 1 to {len(names)}")
    share, extra = divmod(len(names), num_stages)
    parts, start = [], 0
    for stage in range(num_stages):
        stop = start + share + (stage < extra)
        part = copy.deepcopy(model)
        part.layers = nn.ModuleDict({name: part.layers[name] for name in names[start:stop]})
        if stage > 0:
            part.tok_embeddings = None
        if stage < num_stages - 1:
            part.norm = part.output = None
        parts.append(part)
        start = stop
    _check_nothing_is_shared(model, parts)
    return parts


def _check_nothing_is_shared(model: nn.Module, parts: list[nn.Module]) -> None:
    """The copies of a parameter would have a gradient each, and drift apart."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for number, part in enumerate(parts):
        for name, _ in part.named_parameters(remove_duplicate=False):
            first, its_name = seen.setdefault(parameters[name], (number, name))
            if first != number:
                raise ValueError(
                    f"{its_name} of part {first} and {name} of part {number} are one parameter, and parts cannot share "
                    "weights: untie them, or keep them in one part"
                )
