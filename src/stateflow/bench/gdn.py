"""``stateflow bench gdn``: the gated delta rule against flash-linear-attention and FlashQLA, in one run."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stateflow.bench import processes
from stateflow.bench.gdn_contestants import SUBJECT
from stateflow.bench.gdn_report import render
from stateflow.bench.measure import Turns
from stateflow_kernels.plan_table import Shape, bucket_of


def shapes_of(
    heads: Sequence[int],
    tokens: Sequence[int],
    dims: Sequence[tuple[int, int]],
    dtype: str,
    untuned: tuple[int, int] | None = None,
) -> list[Shape]:
    """All combinations, one count of heads after the other; `untuned` (heads, tokens) last, at the first dims.

    Raises:
        ValueError: sizes that the kernels do not take.
    """
    from stateflow.planning.kernel_shapes import explicit_shapes

    cases = processes.cases_of(heads, tokens, dims, untuned)
    for h, n, k_dim, v_dim in cases:
        explicit_shapes([h], [n], k_dim, v_dim, dtype)  # raises
    return [Shape("gated_delta_rule", h, h, k_dim, v_dim, dtype, 1, n) for h, n, k_dim, v_dim in cases]


def run(options) -> int:
    """The command. Raises ValueError for a call that cannot be."""
    tune = None if options.tune is None else partial(_tune, options)
    return processes.run(options, SUBJECT, shapes_of, render, tune)


def _tune(options, work: Path) -> None:
    """Our kernels for the shapes of the benchmark without `--untuned`; our process will find the table."""
    import gc

    import torch

    from stateflow.planning.kernel_tuning import run as tune
    from stateflow_kernels import plans

    sizes = (options.tune_heads or options.heads, [bucket_of(n) for n in options.tokens])
    shapes = shapes_of(*sizes, options.tune_dims or options.dims, options.dtype)
    table = options.tune.resolve()
    try:
        tune(shapes, table, options.tune_budget, Turns(work))
    except Exception:  # the benchmark says what is there without it
        traceback.print_exc()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if table.exists():
        os.environ[plans.VARIABLE] = str(table)
