"""Who takes part in the benchmark of the gated delta rule: ways to call it that mean the same.

A contestant gets q, k, v, g, beta and state as `gated_delta_rule` does, normalises q and k itself, and returns o and
the last state.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stateflow_kernels.gated_delta_rule import Plan, default_plan
from stateflow_kernels.plan_table import Shape

OURS = "ours"
SERIAL, DEFAULT, SERIAL_64 = "ours, serial", "ours, default plan", "ours, serial BV 64"


class Absent(Exception):
    """A contestant is not here, or does not take the shape: no failure."""


@dataclass(frozen=True)
class Contestant:
    name: str
    call: Callable[..., tuple[Tensor, Tensor]]
    plan: Plan | None = None
    plan_source: str | None = None
    tuned: bool | None = None

    def running(self):
        """The context in which it runs, forward and backward."""
        from stateflow_kernels import plans

        return contextlib.nullcontext() if self.plan is None else plans.using(self.plan)


def contestants(group: str, shape: Shape, device: torch.device) -> list[Contestant]:
    """Those of "ours", "fla" or "flashqla" for a shape.

    Raises:
        Absent: the library is not here, or does not take this shape.
    """
    return {"ours": _ours, "fla": _fla, "flashqla": _flashqla}[group](shape, device)


def versions(group: str) -> dict[str, str]:
    """Of the packages that make up a group."""
    found = {}
    for package in {"ours": (), "fla": ("fla-core",), "flashqla": ("flash-qla", "tilelang")}[group]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _ours(shape: Shape, device: torch.device) -> list[Contestant]:
    from stateflow.recurrence import gated_delta_rule
    from stateflow_kernels import plans

    def call(q, k, v, g, beta, state):
        return gated_delta_rule(q, k, v, g, beta, state, backend="triton", use_qk_l2norm_in_kernel=True)

    choice = plans.choice_for(shape, device)
    # A table has powers of two: other lengths have an entry, but not one that was measured for them.
    tuned = choice.shape == shape
    serial = replace(choice.plan, cuts=(), backward_cuts=(), overlap_backward=False)
    memory = plans.shared_memory_of(device) if device.type == "cuda" else 232_448
    default = default_plan(shape.k_dim, shape.v_dim, getattr(torch, shape.dtype), memory)
    walks = ("transition", "transition_backward")
    wide = {name: replace(getattr(default, name), block_v=64, num_stages=2) for name in walks}
    return [
        Contestant(OURS, call, choice.plan, str(choice), tuned),
        Contestant(SERIAL, call, serial, "the same plan, nothing overlaps", tuned),
        Contestant(DEFAULT, call, default, "default", False),
        Contestant(SERIAL_64, call, replace(default, **wide), "the default with BV 64 in ST and STB", False),
    ]


def _import(package: str, name: str):
    try:
        return getattr(importlib.import_module(package), name)
    except Exception as error:  # some look for a GPU or a compiler while they are imported
        raise Absent(f"{package} cannot be imported ({type(error).__name__}: {str(error)[:200]})") from error


def _fla(shape: Shape, device: torch.device) -> list[Contestant]:
    op = _import("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")

    def call(q, k, v, g, beta, state):
        options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
        return op(q=q, k=k, v=v, g=g, beta=beta, initial_state=state, **options)

    return [Contestant("fla", call)]


def _flashqla(shape: Shape, device: torch.device) -> list[Contestant]:
    if (shape.k_dim, shape.v_dim) != (128, 128):
        raise Absent("flash_qla takes heads of 128 x 128 only")
    op = _import("flash_qla", "chunk_gated_delta_rule")

    def call(auto_cp: bool, q, k, v, g, beta, state):
        options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True, auto_cp=auto_cp)
        return op(q=q, k=k, v=v, g=g, beta=beta, initial_state=state, **options)

    # Its split of a sequence among the SMs may be inexact: with and without.
    names = {"flashqla": True, "flashqla, no split": False}
    return [Contestant(name, lambda *args, on=on: call(on, *args)) for name, on in names.items()]
