"""How parameters are initialised: a rule a parameter, each fed from a generator of the caller's choice."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Initializer = Callable[[Tensor, torch.Generator | None], object]
"""Fills the tensor in place with numbers from the generator (None: torch's default one)."""


def normal(std: float) -> Initializer:
    return lambda x, generator: x.normal_(0.0, std, generator=generator)


def uniform(bound: float) -> Initializer:
    return lambda x, generator: x.uniform_(-bound, bound, generator=generator)


def ones() -> Initializer:
    return lambda x, generator: x.fill_(1.0)


def log_uniform(low: float, high: float) -> Initializer:
    """log(U(low, high))."""
    return lambda x, generator: x.uniform_(low, high, generator=generator).log_()


def inverse_softplus_log_uniform(low: float, high: float) -> Initializer:
    """softplus^-1(exp(U(log low, log high))), with softplus^-1(y) = y + log(1 - e^{-y})."""

    def fill(x: Tensor, generator: torch.Generator | None) -> Tensor:
        step = x.uniform_(math.log(low), math.log(high), generator=generator).exp()
        return x.copy_(step + torch.log(-torch.expm1(-step)))

    return fill


@torch.no_grad()
def apply(module: nn.Module, initializers: dict[str, Initializer]) -> None:
    """Fills `module`'s parameters from torch's default generator; `initializers` must name each of them."""
    parameters = dict(module.named_parameters())
    assert parameters.keys() == initializers.keys(), parameters.keys() ^ initializers.keys()
    for name, fill in initializers.items():
        if not parameters[name].is_meta:
            fill(parameters[name], None)


def prefixed(prefix: str, initializers: dict[str, Initializer]) -> dict[str, Initializer]:
    return {f"{prefix}.{name}": fill for name, fill in initializers.items()}
