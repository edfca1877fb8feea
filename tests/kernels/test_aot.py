"""The kernels compile for sm_80 and sm_90 and fit into registers. Needs no GPU, but Triton's compiler (NVIDIA)."""

import os
import subprocess
import sys

import pytest

from tests.kernels.aot_testing import TRITONS, archs_of, compile_ahead

pytestmark = pytest.mark.slow
MODULES = ("short_conv", "gated_norm", "gates", "softmax_loss", "swiglu")


@pytest.fixture(scope="module", params=TRITONS)
def reports(request) -> list[dict]:
    return compile_ahead(request.param, *MODULES)


def test_every_module_compiles_for_every_architecture(reports):
    seen = {(r["module"], r["arch"]) for r in reports}
    assert seen == {(module, arch) for module in MODULES for arch in archs_of(reports)}
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
