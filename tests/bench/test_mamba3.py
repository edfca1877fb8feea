"""`stateflow bench mamba3` without a GPU: the official operation's place taken by one of the same arguments."""

import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stateflow.bench import mamba3_contestants, mamba3_regions, processes, shares, worker
from stateflow.bench.contestants import OURS, SERIAL, Absent, Contestant, Region, Spec, serial, with_choice
from stateflow.bench.mamba3_contestants import FOLDER, NORM, OFFICIAL, OPERATION, SUBJECT, WHOLE, prepare
from stateflow.bench.mamba3_report import render
from stateflow.bench.measure import Timing
from stateflow.bench.worker import done_path, sample_path
from stateflow.cli import build_parser, main
from stateflow.recurrence import mamba3, mamba3_kernels
from stateflow.recurrence.mamba3 import Inputs
from stateflow_kernels import plans
from stateflow_kernels.gated_delta_rule import default_plan
from stateflow_kernels.plan_table import Shape, to_json
from tests.bench.bench_testing import CPU, FIGURES, rows_of_worker, without_a_device
from tests.recurrence.op_testing import assert_close, assert_same_bits

SHAPE = Shape("mamba3", 2, 1, 16, 8, "bfloat16", 1, 130, 4)
PACKAGES = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", FOLDER)


def by_definition(
    Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, Input_States, return_final_states
) -> tuple[Tensor, ...]:  # fmt: skip
    """What the official operation says that it computes, one token after another; the state as P x N."""
    assert return_final_states
    theta, state, k_last, v_last = Input_States
    num_turned = 2 * Angles.shape[-1]

    def turned(x: Tensor) -> Tensor:
        first, second = x[..., 0:num_turned:2], x[..., 1:num_turned:2]
        pairs = torch.stack(
            [first * theta.cos() - second * theta.sin(), first * theta.sin() + second * theta.cos()], -1
        )
        return torch.cat([pairs.flatten(-2), x[..., num_turned:]], -1)

    outputs = []
    for t in range(V.shape[1]):
        dt, decay, own = DT[..., t], ADT[..., t].exp(), Trap[..., t].to(DT.dtype).sigmoid()
        theta = torch.remainder(theta + torch.pi * Angles[:, t].to(DT.dtype).tanh() * dt[..., None], 2 * torch.pi)
        q, k = turned(Q[:, t] + Q_bias), turned(K[:, t] + K_bias)
        v = V[:, t].to(DT.dtype)
        before = ((1 - own) * dt)[..., None, None] * v_last[..., None] * k_last[..., None, :]
        state = decay[..., None, None] * (state + before) + (own * dt)[..., None, None] * v[..., None] * k[..., None, :]
        k_last, v_last = k, v
        y = (state @ q[..., None])[..., 0] + D[:, None] * v
        outputs.append(y * F.silu(Z[:, t].to(DT.dtype)))
    return torch.stack(outputs, 1).to(V.dtype), theta, state, k_last, v_last


def without_state(*, Input_States, **arguments) -> tuple[Tensor, ...]:
    return by_definition(Input_States=[0 * x for x in Input_States], **arguments)


@pytest.fixture
def install(monkeypatch):
    """Puts a function in the place of the official operation."""

    def put(op):
        for name in (*PACKAGES, OPERATION, NORM):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[OPERATION].mamba3_siso_combined = op
        sys.modules[NORM].rmsnorm_fn = lambda x, weight, bias, eps: F.rms_norm(
            x.float(), weight.shape, weight, eps
        ).to(x.dtype)

    return put


@pytest.fixture
def work(tmp_path, monkeypatch):
    without_a_device(monkeypatch, SUBJECT, parity_tokens=20)
    monkeypatch.setattr(mamba3_contestants, "backend_for", lambda *_: "chunk")
    return tmp_path


def rows_of(group: str, work: Path, shapes=(SHAPE,)) -> list[dict]:
    return rows_of_worker(SUBJECT, group, work, shapes)


def test_the_official_arguments_mean_what_ours_mean():
    inputs, grads = SUBJECT.random_inputs(SHAPE, 20, CPU)
    inputs = [x.double().requires_grad_() for x in inputs]

    def official(*args):
        q, k, v, decay, dt, trap, q_bias, k_bias, angles, D, z, *states = prepare(
            Inputs(*args), lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5), torch.float64
        )
        y, theta, state, *last = by_definition(
            q, k, v, decay, dt, trap, q_bias, k_bias, angles, D, z, states, return_final_states=True
        )
        return y, theta, state.mT, *last

    found, expected = (
        torch.autograd.grad(f(*inputs), inputs, [g.double() for g in grads])
        for f in (official, lambda *args: mamba3(*args, backend="reference"))
    )
    assert_close(found, expected, tolerance=1e-6)  # dt and A pass through float32


def test_ours_then_the_official_kernels(work, install):
    (ours,) = rows_of(OURS, work)
    assert ours["contestant"] == OURS and ours["forward"]["median"] == 1.0 and ours["agreement"] is None
    assert ours["backend"] == "chunk"
    assert (
        ours["errors"].keys()
        == set(SUBJECT.names)
        == {"y", "theta", "state", "k_last", "v_last"} | {f"d{name}" for name in Inputs._fields}
    )
    assert 1e-4 < max(ours["errors"].values()) < 8e-3
    assert sample_path(work, SHAPE).exists()
    install(by_definition)
    rows = rows_of(OFFICIAL, work)
    assert [row["contestant"] for row in rows] == [OFFICIAL, WHOLE]
    for row in rows:
        assert "failed" not in row and row["agreement"].keys() == row["errors"].keys()
        assert 1e-4 < max(row["agreement"].values()) < 1.6e-2


def test_wrong_official_kernels_are_not_timed(work, install):
    done_path(work).touch()
    install(without_state)
    rows = rows_of(OFFICIAL, work)
    assert [row["failed"].startswith("ValueError: differs from float64: y ") for row in rows] == [True, True]
    assert all("forward" not in row for row in rows)


def test_absent_kernels_are_skipped_with_a_word(work, monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    (row,) = rows_of(OFFICIAL, work)
    assert row["skipped"].startswith("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined cannot be imported (")
    with pytest.raises(Absent, match="computes in bfloat16, float16 is not compared"):
        SUBJECT.contestants(OFFICIAL, replace(SHAPE, dtype="float16"), CPU)


def test_only_the_operation_itself_is_timed(install):
    """The official one gets prepared arguments, and gradients of its own outputs: those of what is made of them."""
    install(by_definition)
    inputs, grads = SUBJECT.random_inputs(SHAPE, 20, CPU)
    given, whole = SUBJECT.contestants(OFFICIAL, SHAPE, CPU)
    forward, backward = given.passes(inputs, grads)
    outputs = forward()
    assert outputs[2].shape == (1, 2, 8, 16), "P x N, as it has it"
    found = backward(outputs)
    assert len(found) == 15 and found[8].shape == (1, 20, 2, 4) and found[8].dtype == torch.bfloat16, "angles by head"
    forward, backward = whole.passes(inputs, grads)
    expected = backward(forward())
    assert len(expected) == 18
    # D and biases are arguments of both, so their gradients are the same numbers.
    for mine, its in ((9, 13), (6, 12), (7, 11), (11, 14)):
        assert_close([found[mine]], [expected[its]], tolerance=1e-5)


def test_a_plan_table_is_told(monkeypatch):
    plan = default_plan(128, 64, torch.bfloat16)
    assert with_choice(Contestant(OURS, mamba3), replace(SHAPE, family="other"), CPU).plan is None
    monkeypatch.setitem(plans.DEFAULTS, "mamba3", lambda *args: plan)
    chosen = with_choice(Contestant(OURS, mamba3), SHAPE, CPU)
    assert (chosen.plan, chosen.plan_source, chosen.tuned) == (plan, "default", False)


def test_a_plan_that_overlaps_also_runs_without(monkeypatch):
    plain = default_plan(128, 64, torch.bfloat16)
    monkeypatch.setattr(mamba3_contestants, "backend_for", lambda *_: "triton")
    for plan, names in ((plain, [OURS]), (replace(plain, cuts=(0.5,), overlap_backward=True), [OURS, SERIAL])):
        monkeypatch.setitem(plans.DEFAULTS, "mamba3", lambda *_, plan=plan: plan)
        plans.reload()
        found = SUBJECT.contestants(OURS, SHAPE, CPU)
        assert [contestant.name for contestant in found] == names
        assert serial(found[0]).plan == plain and found[0].plan == plan
    plans.reload()


def test_regions_that_overlap_are_rows(work, monkeypatch):
    milliseconds = dict(serial=10.0, overlapped=7.0, kernel=4.0)
    names = dict(zip("abc", milliseconds, strict=True))
    region = Region("eq. 17", *(lambda name=name: name for name in names))
    monkeypatch.setattr(type(SUBJECT), "regions", lambda *_: [region])

    def timed(call, runs, ahead_ms):
        ms = milliseconds[names[call()]]
        return Timing(ms, ms, ms, runs)

    monkeypatch.setattr(worker, "time_call", timed)
    *_, row = rows_of(OURS, work)
    assert row["kind"] == "region" and row["kernel"]["median"] == 4.0
    assert "| eq. 17 | 10.000 | 7.000 | 4.000 | 1.43x | 75.0% |" in render([row])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def regions_and_shape(request, monkeypatch):
    """On a CPU the form in PyTorch is in the place of the kernels."""
    shape = SUBJECT.shape(24, 1000, 128, 64, "bfloat16")
    if request.param == "cpu":
        shape = replace(SHAPE, v_dim=16)
        monkeypatch.setattr(mamba3_kernels, "forward", mamba3_kernels.chunk_form)
        monkeypatch.setattr(mamba3_kernels, "backward", mamba3_kernels.chunk_form_backward)
        monkeypatch.setattr("stateflow.recurrence.backends._interpreted", lambda: True)
    return mamba3_regions.regions(shape, torch.device(request.param)), shape


def test_both_ways_of_a_region_do_the_same_work(regions_and_shape):
    regions, shape = regions_and_shape
    assert [region.name for region in regions] == [
        mamba3_regions.FORWARD, mamba3_regions.BACKWARD, mamba3_regions.LAYER
    ]  # fmt: skip
    for region in regions:
        serial, overlapped, kernel = region.serial(), region.overlapped(), region.kernel()
        assert len(serial) in (5, 11, 18) and len(kernel) in (5, 18)
        assert_same_bits(overlapped, serial)
    assert mamba3_regions.dim_of(40, 64) == 5120 and mamba3_regions.dim_of(10, 64) == 320


def test_table_4b():
    def row(region, *ms):
        names = ("serial", "overlapped", "kernel")
        times = {name: Timing(t, t, t, 11).json() for name, t in zip(names, ms, strict=True)}
        return dict(kind="region", region=region, heads=40, tokens=32768, k_dim=128, v_dim=64, **times)

    rows = [row(mamba3_regions.FORWARD, 6.0, 5.0, 2.0), row(mamba3_regions.BACKWARD, 9.0, 7.5, 6.0)]
    text = render([*rows, row(mamba3_regions.LAYER, 15.0, 13.0, 6.0)])
    assert "| 40 | 32,768 | 5120 | 1.20x | 1.20x | 1.20x | 31.2% | 1.27x | 1.64x | 71.3% |" in text
    assert "| 40 | 32,768 | 128 x 64 | the layer's backward | 15.000 | 13.000 | 6.000 | 1.15x | 33.3% |" in text
    assert "table 4b" not in render(rows[:1])


def test_the_official_variants_are_compiled_at_once(install, tmp_path, monkeypatch):
    install(None)
    calls = []
    monkeypatch.setattr(shares, "compile_at_once", lambda *args: calls.append(args))
    for group in (OFFICIAL, OURS):
        spec = Spec("mamba3", group, (SHAPE,), "", str(tmp_path), 1, group_shapes=(SHAPE, SHAPE))
        SUBJECT.get_ready(spec, CPU)
    assert calls == [("mamba3", OFFICIAL, (SHAPE, SHAPE), "mamba_ssm", tmp_path)]


def test_what_compiles_ends_with_who_started_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"""
import subprocess, sys, types
from pathlib import Path
from stateflow.bench import shares
from stateflow_kernels.plan_table import Shape, from_json
class Sleeper(subprocess.Popen):
    pids = []
    def __init__(self, command):
        super().__init__(["/bin/sleep", "120"])
        self.pids.append(self.pid)
    def wait(self, *seconds):
        print(*self.pids, flush=True)
        return super().wait(*seconds)
shares.subprocess.Popen = Sleeper
shares.os = types.SimpleNamespace(cpu_count=lambda: 4)
shape = from_json(Shape, {to_json(SHAPE)})
shares.compile_at_once("mamba3", {OFFICIAL!r}, [shape], "mamba_ssm", Path({str(tmp_path)!r}))
""")
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.terminate()
        assert parent.wait(60) == 143
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def options(*args: str):
    return build_parser().parse_args(["bench", "mamba3", *args])


def test_shapes_of_the_command(monkeypatch):
    shapes = processes.shapes_of(SUBJECT, [80, 24], [8192, 65536], [(128, 64)], "bfloat16", (48, 16384))
    assert [(s.num_heads, s.tokens) for s in shapes] == [
        (80, 8192), (80, 65536), (24, 8192), (24, 65536), (48, 16384)
    ]  # fmt: skip
    defaults = options()
    assert (defaults.heads, defaults.dims, defaults.untuned) == ([80, 40, 24], [(128, 64)], (48, 16384))
    assert defaults.peers == [OFFICIAL]
    with pytest.raises(SystemExit):
        options("--peers", "fla")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dims", "12x64"], "N = 12: must be a multiple of 8"),
        (["--heads", "0"], "0 heads of 128 x 64 with 8192 tokens: no number may be below 1"),
        ([], "stateflow bench measures on a CUDA device and there is none here"),
        (["--tune", "table"], "unknown argument --tune"),
    ],
)
def test_wrong_calls(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "mamba3", *arguments]) == 2
    assert message in capsys.readouterr().err


def report_rows() -> list[dict]:
    common = dict(kind="time", heads=80, tokens=32768, k_dim=128, v_dim=64, errors={"y": 1e-3})
    slow = FIGURES | {"backward": Timing(5.0, 5.0, 5.0, 15).json()}
    slow["memory_mb"] = dict(peak_forward=300.0, peak_both=900.0, saved=2930.0)
    return [
        {**common, **FIGURES, "contestant": OURS, "backend": "triton", "versions": {"mamba-ssm": "2.3"}},
        {**common, **slow, "contestant": OFFICIAL},
        {**common, **FIGURES, **dict(forward=slow["backward"]), "contestant": SERIAL, "backend": "triton"},
        {**common, **FIGURES, "contestant": OURS, "backend": "chunk", "tokens": 8192},
        {**common, "contestant": WHOLE, "failed": "out of memory"},
    ]


def test_the_report(tmp_path, capsys):
    text = render(report_rows())
    assert "| 80 | 32,768 | 128 x 64 | 1.000 / 2.000* | 1.000 / 5.000* | 0.50 |  |" in text
    assert "| 80 | 8,192 | 128 x 64 | 1.000 / 2.000* |  |  | the form in PyTorch: no kernels |" in text
    assert "| 80 | 32,768 | 128 x 64 | 1.5 | 89.4 | 0.02 |" in text
    assert "| 80 | 32,768 | 128 x 64 | 1.000 / 2.000* | 5.000* / 2.000* | 2.33x |" in text
    assert "* official, whole, 80 heads of 128 x 64: out of memory (32,768 tokens)" in text
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in report_rows()))
    assert main(["bench", "mamba3", "--render", str(path)]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_the_command_starts_the_official_kernels_first(monkeypatch, tmp_path):
    started = []

    class Fake:
        def __init__(self, subject, spec, path):
            self.group, self.rows = spec.group, Path(spec.rows)
            sizes = [(shape.num_heads, shape.tokens) for shape in spec.shapes]
            started.append((subject.name, spec.group, path, sizes))

        def is_warm(self):
            return True

        def wait(self, seconds, end):
            if self.group == OURS:
                self.rows.write_text(json.dumps(report_rows()[0]) + "\n")

        def end(self):
            pass

    monkeypatch.setattr(processes, "Process", Fake)
    monkeypatch.setattr(processes, "require_cuda", lambda what: None)
    sizes = ["--heads", "80", "24", "--tokens", "8192", "32768", "--peer-heads", "80", "--untuned", "none"]
    assert main(["bench", "mamba3", *sizes, "--peer-path", f"official={tmp_path}"]) == 0
    assert started == [
        ("mamba3", OFFICIAL, tmp_path, [(80, 32768), (80, 8192)]),
        ("mamba3", OURS, None, [(80, 8192), (80, 32768), (24, 8192), (24, 32768)]),
    ]


def test_a_row_says_what_failed(work, install):
    """The worker as a whole, with an operation that cannot take a length."""
    done_path(work).touch()

    def short_only(*, V, **arguments):
        if V.shape[1] > 100:
            raise torch.OutOfMemoryError("too much")
        return by_definition(V=V, **arguments)

    install(short_only)
    rows = rows_of(OFFICIAL, work, [SHAPE, replace(SHAPE, tokens=60)])
    assert {(row["tokens"], row["contestant"]): row.get("failed", "timed") for row in rows} == {
        (130, OFFICIAL): "out of memory",
        (130, WHOLE): "out of memory",
        (60, OFFICIAL): "timed",
        (60, WHOLE): "timed",
    }


def test_a_plan_that_fails_its_self_check_is_not_timed(monkeypatch):
    shape = SUBJECT.shape(2, 130, 32, 32, "bfloat16")
    ours = with_choice(Contestant(OURS, mamba3), shape, CPU)
    SUBJECT.check_plan(ours, shape, CPU)
    problems = []
    monkeypatch.setattr("stateflow.recurrence.self_check.checked_plan", lambda problem, plan: problems.append(problem))
    with pytest.raises(ValueError, match="self-check failed"):
        SUBJECT.check_plan(ours, shape, CPU)
    assert (problems[0].num_heads, problems[0].n_dim, problems[0].p_dim, problems[0].num_angles) == (2, 32, 32, 8)
