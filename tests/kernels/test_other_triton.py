"""Kernels interpreted under the other Triton too, see aot_testing: the tests with the marker `other_triton`.

In a process of its own, since a process has one Triton. With an older numpy, which lies beside that Triton: its
interpreter takes `int()` of arrays of one number, which numpy 2.4 no longer allows.
"""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from tests.kernels.aot_testing import OTHER, OTHER_VERSION, ROOT, import_first, needs_other

# The versions come from the process whose tests count.
PROGRAM = """
import sys, numpy, pytest, triton
print(triton.__version__, numpy.__version__)
sys.exit(pytest.main(sys.argv[1:]))
"""
# Tests at least: forward and backward in float32 and in 16 bits.
EXPECTED = {
    "test_gated_delta_kernels": 2,
    "test_mamba3_kernels": 2,
    "test_short_conv": 2,
    "test_gated_norm": 2,
    "test_gates": 2,
    "test_swiglu": 2,
    "test_softmax_loss": 2,
}


@needs_other
@pytest.mark.slow
def test_interpreted_kernels_are_right_under_the_other_triton(tmp_path):
    report = tmp_path / "report.xml"
    env = {name: value for name, value in import_first(OTHER).items() if not name.startswith("PYTEST_")}
    env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    files = [f"tests/kernels/{name}.py" for name in EXPECTED]
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-m", "other_triton and not gpu", f"--junitxml={report}"]
    command = [sys.executable, "-c", PROGRAM, *options, *files]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    triton, numpy = done.stdout.split(maxsplit=2)[:2]
    assert triton == OTHER_VERSION
    assert tuple(map(int, numpy.split(".")[:2])) < (2, 4)
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert not [case.get("name") for case in cases if len(case)], "a test did not pass"
    passed = Counter(case.get("classname").rpartition(".")[2] for case in cases)
    assert not [name for name, least in EXPECTED.items() if passed[name] < least], passed
