"""`stateflow doctor`: what it finds, what it warns of, and its exit status."""

import os
import subprocess
import sys

import pytest
import torch

from stateflow import doctor
from stateflow.cli import main
from stateflow.recurrence import self_check
from stateflow_kernels.primitives import INTERPRETED

SMALL = ["doctor", "--heads", "1", "--k-dim", "16", "--v-dim", "16"]


@pytest.fixture
def interpreted(monkeypatch):
    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    monkeypatch.setattr(self_check, "NUM_TOKENS", 110)
    monkeypatch.setattr(doctor, "DTYPES", (torch.float32,))
    monkeypatch.setattr(doctor, "MAMBA3_SIZES", (16, 16, 4))


def test_without_a_gpu_it_says_so_and_is_content(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_devices", list)
    assert main(SMALL) == 0
    printed = capsys.readouterr().out
    for component in ("python", "torch", "triton", "torchtitan", "ptxas"):
        assert component in printed
    assert f"torch       {torch.__version__}" in printed
    assert "there is no CUDA device" in printed and "every shape gets the default" in printed


def test_self_checks_that_pass(interpreted, capsys):
    assert main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "1 heads of 1, K = 16, V = 16, float32, normalised, documents\n    ok: o " in printed
    assert "1 heads, N = 16, P = 16, R = 4, float32, documents\n    ok: y " in printed


def test_a_failed_self_check_is_shown_and_is_the_exit_status(interpreted, monkeypatch, capsys):
    monkeypatch.setitem(self_check.BOUNDS_FLOAT32, "dg", 0.0)
    assert main(SMALL) == 1
    printed = capsys.readouterr().out
    assert "FAILED with Plan(" in printed and "dg " in printed and "(bound 0e+00)" in printed
    assert "no plan passed: the PyTorch form runs instead" in printed


def test_known_troubles_by_version():
    def found(**versions: str) -> list[str]:
        return [entry.source for entry in doctor.KNOWN if entry.applies(versions)]

    assert found(triton="3.3.1", ptxas="12.9.86") == []
    assert found(triton="3.5.0") == ["flash-linear-attention issue 640"]
    ours = "StateFlow's own GPU tests"
    assert found(triton="3.6.0+git1234") == ["flash-linear-attention issue 640", "triton issue 9757", ours]
    assert found(triton="3.7.1", ptxas="12.8.93") == [f"{ours}, flash-linear-attention issue 1262"]
    assert all(entry.what and entry.here for entry in doctor.KNOWN)


def test_wrong_calls(capsys):
    assert main(["doctor", "--k-dim", "12"]) == 2
    assert "K must be a multiple of 8 from 16 to 256, it is 12" in capsys.readouterr().err
    assert main(["doctor", "--heads", "0"]) == 2
    assert main(["doctor", "--stateflow.num-chunks=8"]) == 2
    assert "unknown argument --stateflow.num-chunks=8" in capsys.readouterr().err


def test_it_is_a_command_of_its_own():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "stateflow", "doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert "there is no CUDA device" in done.stdout
