"""Who takes part in a benchmark of an operation, and what the benchmark must know about the operation."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from stateflow_kernels.plan_table import Shape, to_json

OURS, SERIAL = "ours", "ours, serial"
Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Spec:
    """What a process of the benchmark is to do; a JSON file."""

    benchmark: str
    group: str
    shapes: tuple[Shape, ...]
    rows: str
    work: str  # a folder that the processes share
    runs: int
    name: str = ""  # of the process
    group_shapes: tuple[Shape, ...] = ()  # of all processes of the group
    choices: tuple[str, ...] = ()  # see `Subject.choices`


class Absent(Exception):
    """A contestant is not here, or does not take the shape: no failure."""


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Contestant:
    """A way to call the operation.

    Only `call` is timed: from `prepare(inputs)`, the operation's inputs as the contestant takes them, to what
    `finish` makes the operation's outputs of. Both are differentiable, and agreement is judged through them.
    """

    name: str
    call: Callable[..., tuple[Tensor, ...]]
    prepare: Callable[[Tensors], Tensors] = unchanged
    finish: Callable[[Tensors], Tensors] = unchanged
    plan: object | None = None
    plan_source: str | None = None
    tuned: bool | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    """More for its rows."""

    def running(self):
        """The context in which it runs, forward and backward."""
        from stateflow_kernels import plans

        return contextlib.nullcontext() if self.plan is None else plans.using(self.plan)

    def results(self, inputs: Tensors, grads: Tensors) -> list[Tensor]:
        """The outputs and the gradients of all inputs."""
        inputs = [x.detach().requires_grad_() for x in inputs]
        with self.running():
            outputs = self.finish(self.call(*self.prepare(inputs)))
            found = torch.autograd.grad(outputs, inputs, list(grads))
        return [*(x.detach() for x in outputs), *found]

    def passes(self, inputs: Tensors, grads: Tensors) -> tuple[Callable, Callable]:
        """What is timed: the forward, and the backward of its outputs, on tensors prepared beforehand."""
        with torch.no_grad():
            prepared = self.prepare(inputs)
        prepared = [x.detach().requires_grad_() for x in prepared]
        with self.running():
            raw = [x.detach().requires_grad_() for x in self.call(*prepared)]
        # Of the outputs as the contestant has them.
        raw_grads = torch.autograd.grad(self.finish(raw), raw, list(grads))

        def forward() -> tuple[Tensor, ...]:
            return self.call(*prepared)

        def backward(outputs: Tensors) -> tuple[Tensor, ...]:
            return torch.autograd.grad(outputs, prepared, raw_grads, retain_graph=True)

        return forward, backward

    def row(self) -> dict:
        row: dict = dict(contestant=self.name, **self.facts)
        if self.plan is not None:
            row |= dict(plan=to_json(self.plan), plan_source=self.plan_source, tuned=self.tuned)
        return row


@dataclass(frozen=True)
class Region:
    """Two ways to do the same work on the device: as one stream does it, and with kernels that run at once.

    `kernel` is the one that the other work is to hide, alone.
    """

    name: str
    serial: Callable[[], object]
    overlapped: Callable[[], object]
    kernel: Callable[[], object]


class Subject:
    """The operation of a benchmark. Subclasses give the attributes and the methods that raise."""

    name: str  # of the benchmark
    peers: tuple[str, ...]
    packages: Mapping[str, tuple[str, ...]]  # that make up a peer
    environment: Mapping[str, Mapping[str, str]] = {}  # of a peer's process
    names: tuple[str, ...]  # of the outputs, then of the gradients of the inputs
    bounds: Mapping[str, float]  # relative L2 errors that our own kernels must keep
    by_token: frozenset[str]  # which of `names` have a token at dimension 1
    parity_tokens: int
    # What of ours may be left out, by the words of the command line: contestants beside `OURS`, and "parts", "regions".
    choices: Mapping[str, str] = {}

    @property
    def parity(self) -> dict[str, float]:
        """Against float64, three times what our own kernels must keep: others round elsewhere."""
        return {name: 3 * bound for name, bound in self.bounds.items()}

    @property
    def agreement(self) -> dict[str, float]:
        """Between two results, each of which may differ from float64 by that much."""
        return {name: 2 * bound for name, bound in self.parity.items()}

    def shape(self, heads: int, tokens: int, k_dim: int, v_dim: int, dtype: str) -> Shape:
        """Raises ValueError: sizes that the operation does not take."""
        raise NotImplementedError

    def contestants(self, group: str, shape: Shape, device: torch.device) -> list[Contestant]:
        """Those of `OURS` or of a peer, for a shape. Raises Absent: not here, or does not take this shape."""
        raise NotImplementedError

    def random_inputs(self, shape: Shape, num_tokens: int, device: torch.device, seed: int = 0):
        """The operation's inputs, and gradients of its outputs."""
        raise NotImplementedError

    def exact_results(self, shape: Shape, inputs: Tensors, grads: Tensors) -> list[Tensor]:
        """As `names` has them, in float64, on the CPU."""
        raise NotImplementedError

    def comparable(self, results: Tensors) -> list[Tensor]:
        """The results, where equal ones may differ in value: something that tells them apart only if they differ."""
        return list(results)

    def chosen(self, group: str, shape: Shape, device: torch.device, words: Collection[str]) -> list[Contestant]:
        """As `contestants`; of ours `OURS`, and those that the words name."""
        left_out = {name for word, name in self.choices.items() if group == OURS and word not in words}
        return [contestant for contestant in self.contestants(group, shape, device) if contestant.name not in left_out]

    def get_ready(self, spec: Spec, device: torch.device) -> None:
        """Before any contestant of a process runs: what can be compiled at once."""

    def check_plan(self, contestant: Contestant, shape: Shape, device: torch.device) -> None:
        """Raises ValueError if something else than the contestant's plan would run."""

    def regions(self, shape: Shape, device: torch.device) -> list[Region]:
        """What of ours overlaps, if anything: timed against the same work on one stream."""
        return []

    def parts(self, shape: Shape, device: torch.device) -> list[tuple[dict, Callable[[], object]]]:
        """Parts of ours to be timed alone: fields of a row, which has kind "walk", and what to call."""
        return []

    def versions(self, group: str) -> dict[str, str]:
        """Of the packages that make up a group."""
        found = {}
        for package in self.packages.get(group, ()):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
        return found


def subject_named(name: str) -> Subject:
    return importlib.import_module(f"stateflow.bench.{name}_contestants").SUBJECT


def import_from(module: str, name: str):
    """Raises Absent where that fails, for whatever reason: some look for a GPU or a compiler while imported."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise Absent(f"{module} cannot be imported ({type(error).__name__}: {str(error)[:200]})") from error


def with_choice(contestant: Contestant, shape: Shape, device: torch.device) -> Contestant:
    """With the plan that a call of ours takes for this shape; as it is if the operation has no plans."""
    from stateflow_kernels import plans

    if shape.family not in plans.DEFAULTS:
        return contestant
    choice = plans.choice_for(shape, device)
    # A table has powers of two: other lengths have an entry, but not one that was measured for them.
    return replace(contestant, plan=choice.plan, plan_source=str(choice), tuned=choice.shape == shape)


def serial(ours: Contestant) -> Contestant:
    """With the same plan, but that nothing overlaps."""
    off = dict(cuts=(), backward_cuts=(), overlap_backward=False)
    present = {f.name for f in fields(ours.plan)}
    plan = replace(ours.plan, **{name: value for name, value in off.items() if name in present})
    return replace(ours, name=SERIAL, plan=plan, plan_source="the same plan, nothing overlaps")
