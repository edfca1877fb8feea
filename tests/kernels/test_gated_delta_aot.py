"""What ST and STB take on Hopper: tensor cores, no spills, room in shared memory. Needs a compiler, but no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = 227 * 1024  # of a program on sm_90


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    # A process of its own: in this one, kernels may be interpreted.
    kernels = Path(__file__).parents[2] / "kernels"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    env["PYTHONPATH"] = os.pathsep.join([str(kernels), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "stateflow_kernels.aot", "gated_delta_aot"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_both_architectures(reports):
    names = {(r["case"].split(",")[0], r["arch"]) for r in reports}
    kernels = {"transition", "transition_backward", "pre", "out", "out_backward"}
    kernels |= {"query_backward", "solve_backward", "key_backward"}
    assert names == {(kernel, arch) for kernel in kernels for arch in (80, 90)}


def test_the_walks_use_tensor_cores_without_spilling(reports):
    walks = [r for r in reports if r["case"].startswith("transition") and r["arch"] == 90]
    assert len(walks) == 6 and all(r["num_warps"] == 4 for r in walks)
    assert not [r for r in walks if not r["wgmma"] or r["spill_bytes"] or r["shared_bytes"] > SHARED_BYTES]


def test_all_fit_into_shared_memory(reports):
    assert not [r for r in reports if r["arch"] == 90 and r["shared_bytes"] > SHARED_BYTES]
