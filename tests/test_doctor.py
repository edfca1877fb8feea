"""`stateflow doctor`: what it finds, what it warns of, and its exit status."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from stateflow import doctor
from stateflow.cli import main
from stateflow.planning import kernel_launches
from stateflow.recurrence import self_check
from stateflow_kernels import hopper, plans, waves
from stateflow_kernels.gated_delta_rule import Tile
from stateflow_kernels.plan_table import Entry, Shape, save
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
    if not torch.cuda.is_available():
        assert "nvidia_h200" in printed and "bfloat16, 32768 tokens: " not in printed and len(printed.splitlines()) < 40


def test_self_checks_that_pass(interpreted, capsys):
    assert main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "1 heads of 1, K = 16, V = 16, float32, normalised, documents\n    ok: o " in printed
    assert "1 heads of 1, K = 16, V = 16, float32, normalised, documents, in segments\n    ok: o " in printed
    assert "1 heads, N = 16, P = 16, R = 4, float32, documents\n    ok: y " in printed
    assert "gated_delta_rule, 1 heads, 16 x 16, bfloat16, 32768 tokens\n    plan: the default: no table has" in printed
    assert "kernels for Hopper: none (they are not interpreted)" in printed
    assert "with exact_order = false in 16 segments at once\n    gated_delta_rule, 1 heads" in printed


def test_a_failed_self_check_is_shown_and_is_the_exit_status(interpreted, monkeypatch, capsys):
    monkeypatch.setitem(self_check.BOUNDS_FLOAT32, "dg", 0.0)
    assert main(SMALL) == 1
    printed = capsys.readouterr().out
    assert "FAILED with Plan(" in printed and "dg " in printed and "(bound 0e+00)" in printed
    assert "no plan passed: the PyTorch form runs instead" in printed


GPU = torch.device("cuda", 0)
FEW = Shape("gated_delta_rule", 10, 10, 128, 128, "bfloat16", 1, 32768)


@pytest.fixture
def on_hopper(monkeypatch, tmp_path):
    """With one measured plan."""
    monkeypatch.setattr(plans, "_device_name", lambda device: "nvidia_h200")
    monkeypatch.setattr(plans, "shared_memory_of", lambda device: 232_448)
    monkeypatch.setattr(plans.hopper_mamba3, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "known_triton", lambda: True)
    monkeypatch.setattr(hopper, "INTERPRETED", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(plans.VARIABLE, raising=False)
    monkeypatch.setattr(plans, "SHIPPED", tmp_path)
    plans.reload()
    measured = replace(plans.fallback_plan(GPU, torch.bfloat16, 128, 128), gradient_chunks=16)
    save(tmp_path / "table.json", plans.environment_of(GPU), [Entry(FEW, measured)])
    yield
    plans.reload()


def test_why_a_kernel_is_not_the_fast_one(on_hopper, monkeypatch):
    def told(**changes) -> str:
        return "\n".join(doctor._choices([replace(FEW, **changes)], GPU))

    for text in ("plan: measured for this shape (", "in 6 segments at once", "exact order with wide walks ("):
        assert text in told()
    assert told().count("kernels for Hopper: Pre, ST, ST with Out, STB, all gradients in one") == 2
    assert "in Triton" not in told()
    assert "the nearest entry, gated_delta_rule, 10 heads" in told(num_heads=12, num_key_heads=12)
    assert "false the same: 20 heads are walks enough, up to 13 with V = 128" in told(num_heads=20, num_key_heads=20)
    assert "the same: 159 chunks of 64 tokens are too few, 160 is the least" in told(tokens=159 * 64)
    assert "in 5 segments at once" in told(tokens=160 * 64)
    assert "the same: K is 256, above 128" in told(k_dim=256)
    text = told(k_dim=96, v_dim=192)
    assert "the default: no table has an entry for this K, V and type" in text
    assert "kernels for Hopper: none (they are for K = 64 or 128, it is 96)\n  in Triton: Pre, ST, Out, OG" in text
    assert "in Triton: gradients of q, of v and beta, of k and gates" in told(num_key_heads=5)
    assert "(they are for 16 bits)" in told(dtype="float32")
    assert "(they are for one sequence, a microbatch has 2)" in told(batch=2)
    monkeypatch.setattr(hopper, "known_triton", lambda: False)
    assert "they are for Triton 3.6 and 3.7, this is" in told()
    mamba3 = Shape("mamba3", 24, 1, 128, 64, "bfloat16", 1, 32768, 32)
    assert doctor._choices([mamba3], GPU)[1].startswith("  plan: the default: no table has an entry")


def test_a_reason_is_given_just_where_no_kernel_for_hopper_runs(on_hopper):
    for changes in (dict(), dict(k_dim=64), dict(k_dim=96), dict(dtype="float32"), dict(batch=2), dict(v_dim=96)):
        problem = kernel_launches.problem_of(replace(FEW, **changes), GPU)
        runs = hopper.runs(problem, Tile(32, 4, 2, specialized=True))
        assert runs == (hopper.obstacle(problem) is None), changes


@pytest.mark.parametrize("heads", [1, 5, 13, 14, 27, 200])
@pytest.mark.parametrize("chunks", [1, 159, 160, 512])
@pytest.mark.parametrize("dims", [(128, 128), (64, 40), (96, 192), (144, 64)])
def test_a_reason_is_given_just_where_there_is_one_walk(heads, chunks, dims):
    assert (waves.why_one_walk(chunks, heads, *dims) is None) == (waves.walk_segments(chunks, heads, *dims) > 1)


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
    assert main(["doctor", "--tokens", "0"]) == 2
    assert main(["doctor", "--stateflow.num-chunks=8"]) == 2
    assert "unknown argument --stateflow.num-chunks=8" in capsys.readouterr().err


def test_it_is_a_command_of_its_own():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "stateflow", "doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert "there is no CUDA device" in done.stdout
