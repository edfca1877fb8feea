"""``stateflow bench mamba3``: Mamba-3 against the official kernels of mamba-ssm, in one run."""

from __future__ import annotations

from stateflow.bench import processes
from stateflow.bench.mamba3_contestants import SUBJECT
from stateflow.bench.mamba3_report import render


def run(options) -> int:
    """The command. Raises ValueError for a call that cannot be."""
    return processes.run(options, SUBJECT, render)
