"""``stateflow bench mamba3``: Mamba-3 against the official kernels of mamba-ssm, in one run."""

from __future__ import annotations

from collections.abc import Sequence

from stateflow.bench import processes
from stateflow.bench.mamba3_contestants import SUBJECT
from stateflow.bench.mamba3_report import render
from stateflow_kernels.plan_table import Shape


def shapes_of(
    heads: Sequence[int],
    tokens: Sequence[int],
    dims: Sequence[tuple[int, int]],
    dtype: str,
    untuned: tuple[int, int] | None = None,
) -> list[Shape]:
    """All combinations, one count of heads after the other; `untuned` (heads, tokens) last, at the first dims.

    `dims`: the state's N and the head's P; N / 4 angles turn half of N, as in the official module.

    Raises:
        ValueError: a number below 1, or an N that is no multiple of 8.
    """
    cases = processes.cases_of(heads, tokens, dims, untuned)
    for h, n, n_dim, p_dim in cases:
        if min(h, n, n_dim, p_dim) < 1:
            raise ValueError(f"{h} heads of {n_dim} x {p_dim} with {n} tokens: no number may be below 1")
        if n_dim % 8:
            raise ValueError(f"N = {n_dim}: must be a multiple of 8, so that N / 4 angles are an even number")
    return [Shape("mamba3", h, h, n_dim, p_dim, dtype, 1, n) for h, n, n_dim, p_dim in cases]


def run(options) -> int:
    """The command. Raises ValueError for a call that cannot be."""
    return processes.run(options, SUBJECT, shapes_of, render)
