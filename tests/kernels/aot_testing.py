"""Compiles kernels ahead of time with the Tritons that are here: the installed one, and 3.6.0 where `make test` put it.

The latter is what PyTorch 2.10 and 2.11 bring to a GPU, and what the kernels in Gluon are for.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

OTHER = Path(sys.prefix) / "triton-3.6.0"
TRITONS = [
    pytest.param(None, id="installed"),
    pytest.param(OTHER, id="3.6.0", marks=pytest.mark.skipif(not OTHER.exists(), reason="`make test` brings it")),
]


def compile_ahead(triton: Path | None, cache: Path, *modules: str) -> list[dict]:
    """What `stateflow_kernels.aot` says of these modules. `triton`: a folder to be imported from first."""
    # A process of its own: in this one, kernels may be interpreted.
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TRITON_PTXAS_PATH")}
    paths = [triton, Path(__file__).parents[2] / "kernels", env.get("PYTHONPATH")]
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}
    command = [sys.executable, "-m", "stateflow_kernels.aot", *modules]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert triton is None or {report["triton"] for report in found} == {"3.6.0"}
    return found


def takes_gluon(reports: list[dict]) -> bool:
    """As `hopper.known_triton` says, of the Triton that these were compiled with."""
    return reports[0]["triton"].startswith(("3.6.", "3.7."))
