"""The kernels compile for sm_80 and sm_90 and fit into registers. Needs no GPU, but Triton's compiler (NVIDIA)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

pytestmark = pytest.mark.slow
MODULES = ("short_conv", "gated_norm", "gates", "softmax_loss", "swiglu")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    # A process of its own: in this one, kernels may be interpreted.
    kernels = Path(__file__).parents[2] / "kernels"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    env["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(kernels)])
    command = [sys.executable, "-m", "stateflow_kernels.aot", *MODULES]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_module_compiles_for_both_architectures(reports):
    seen = {(r["module"], r["arch"]) for r in reports}
    assert seen == {(module, arch) for module in MODULES for arch in (80, 90)}
    assert {r["triton"] for r in reports} == {triton.__version__}
    assert len({(r["module"], r["case"], r["arch"]) for r in reports}) == len(reports)


def test_nothing_spills(reports):
    assert not [r for r in reports if r["spill_bytes"] or not 16 <= r["registers"] < 255]


def test_elementwise_kernels_need_little_shared_memory_and_no_tensor_cores(reports):
    assert not [r for r in reports if r["wgmma"] or r["shared_bytes"] > 16 * 1024]


def test_an_interpreting_process_is_refused():
    env = os.environ | {"TRITON_INTERPRET": "1"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-m", "stateflow_kernels.aot"], env=env, capture_output=True, text=True)
    assert done.returncode != 0 and "TRITON_INTERPRET is set" in done.stderr
