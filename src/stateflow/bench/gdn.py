"""``stateflow bench gdn``: the gated delta rule against flash-linear-attention and FlashQLA, in one run."""

from __future__ import annotations

import os
import traceback
from functools import partial
from pathlib import Path

from stateflow.bench import processes
from stateflow.bench.gdn_contestants import SUBJECT
from stateflow.bench.gdn_report import render
from stateflow.bench.measure import Turns
from stateflow_kernels.plan_table import bucket_of


def run(options) -> int:
    """The command. Raises ValueError for a call that cannot be."""
    tune = None if options.tune is None else partial(_tune, options)
    return processes.run(options, SUBJECT, render, tune)


def _tune(options, work: Path) -> None:
    """Our kernels for the shapes of the benchmark without `--untuned`; our process will find the table."""
    import gc

    import torch

    from stateflow.planning.kernel_tuning import run as tune
    from stateflow_kernels import plans

    if options.shapes is None:
        sizes = (options.tune_heads or options.heads, [bucket_of(n) for n in options.tokens])
        shapes = processes.shapes_of(SUBJECT, *sizes, options.tune_dims or options.dims, options.dtype)
    else:
        cases = [(*case, *options.dims[0])[:4] for case in options.shapes]
        wanted = [
            (heads, bucket_of(tokens), *dims)
            for heads, tokens, *dims in cases
            if (options.tune_heads is None or heads in options.tune_heads)
            and (options.tune_dims is None or tuple(dims) in options.tune_dims)
        ]
        shapes = [SUBJECT.shape(*case, options.dtype) for case in dict.fromkeys(wanted)]
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
