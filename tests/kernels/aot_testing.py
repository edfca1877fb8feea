"""Compiles kernels ahead of time with the Tritons that are here: the installed one, and 3.6.0 where `make test` put it.

The latter is what PyTorch 2.10 and 2.11 bring to a GPU, and what the kernels in Gluon are for: it compiles for every
architecture, the installed one only for Hopper where both are here and it is not the nightly run. OTHER_TRITON in the
environment names another folder of 3.6.0.

What was compiled is kept until `make clean`: a kernel whose source, Triton and assembler are those of an earlier run is
not compiled again, but its code is looked at.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stateflow_kernels.aot import TARGETS

OTHER = Path(os.environ.get("OTHER_TRITON") or Path(sys.prefix) / "triton-3.6.0")
OTHER_VERSION = "3.6.0"
ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "aot-cache"
needs_other = pytest.mark.skipif(not OTHER.exists(), reason="`make test` brings it")
# Those that the installed one compiles for.
ARCHS = (90,) if OTHER.exists() and os.environ.get("HYPOTHESIS_PROFILE") != "nightly" else TARGETS
TRITONS = [pytest.param(None, id="installed"), pytest.param(OTHER, id=OTHER_VERSION, marks=needs_other)]


def import_first(folder: Path | None, *more: Path) -> dict[str, str]:
    """This process's environment without what it says of Triton; modules come from `folder`, if any, before others."""
    settings = ("TRITON_INTERPRET", "TRITON_PTXAS_PATH")
    env = {name: value for name, value in os.environ.items() if name not in settings}
    paths = [folder, *more, env.get("PYTHONPATH")]
    return env | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}


def compile_ahead(triton: Path | None, *modules: str) -> list[dict]:
    """What `stateflow_kernels.aot` says of these modules. `triton`: a folder to be imported from first."""
    # A process of its own: in this one, kernels may be interpreted.
    env = import_first(triton, ROOT / "kernels") | {"TRITON_CACHE_DIR": str(CACHE)}
    archs = TARGETS if triton else ARCHS
    command = [sys.executable, "-m", "stateflow_kernels.aot", *modules, "--arch", *map(str, archs)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert triton is None or {report["triton"] for report in found} == {OTHER_VERSION}
    return found


def takes_gluon(reports: list[dict]) -> bool:
    """As `hopper.known_triton` says, of the Triton that these were compiled with."""
    return reports[0]["triton"].startswith(("3.6.", "3.7."))


def archs_of(reports: list[dict]) -> tuple[int, ...]:
    """What the Triton of these compiles for."""
    return TARGETS if reports[0]["triton"] == OTHER_VERSION else ARCHS
