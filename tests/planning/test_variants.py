"""What is profiled apart, split backwards, stages of tensor parallelism, and plans that bring their stages."""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from stateflow.cli import main
from stateflow.commands import plan_measured, plan_verify, titan_arguments
from stateflow.pipeline.policies import POLICIES
from stateflow.pipeline.schedule import Kind
from stateflow.pipeline.split import split_model
from stateflow.planning.plan_file import PlanFile, write_plan
from stateflow.planning.profile import REPEATS, Point, StageProfile, measure
from stateflow.planning.stage_runner import LocalStages, TensorParallelStages
from stateflow.planning.variants import Variant, variants
from stateflow.titan.config import make_plan, num_stages, plan_target, policy, weight_lag
from stateflow.titan.order import make_schedule
from stateflow.titan.planning import job_of
from tests import cases
from tests.titan import harness

from .test_costs import make_job

DEMO = str(Path(__file__).parents[2] / "titan_configs" / "demo.toml")
PER_STAGE = "--parallelism.pipeline_parallel_layers_per_stage"


def cut(count: int):
    if count > 4:
        raise ValueError(f"{count} stages of 4 layers")
    return [[f"layers.{i}"] for i in range(count)]


def test_every_policy_of_the_registry_is_searched_or_named():
    job = make_job(dataclasses.replace(make_job().model, num_layers=4))
    for ranks, set_, whole in ((2, False, False), (4, False, False), (2, True, False), (2, False, True)):
        one = dataclasses.replace(job, num_ranks=ranks, parts=tuple(map(tuple, cut(ranks))), weight_lag=1)
        found, left_out = variants(
            one, cut, list(POLICIES), ["none", "full"], stages_are_set=set_,
            misfit=lambda splits, mode, whole=whole: "it cannot be" if whole and splits else None,
        )  # fmt: skip
        searched = {name for variant in found for name in variant.policies}
        assert searched | {name for line in left_out for name in POLICIES if name in line} >= set(POLICIES)
        assert found[0].policies[0] == "1f1b" and found[0].job.recompute == "none"
        for variant in found:
            assert variant.split == POLICIES[variant.policies[0]].splits_backward
            assert variant.job.weight_lag == (1 if variant.split else None)
            for name in variant.policies:
                assert POLICIES[name].stages_per_rank in (None, variant.job.stages_per_rank)
        if ranks == 2 and not set_ and not whole:
            keys = {(v.job.stages_per_rank, v.split, v.job.recompute) for v in found}
            assert keys == {(n, s, m) for n in (1, 2) for s in (False, True) for m in ("none", "full")}
            assert searched == set(POLICIES) and not left_out
        if ranks == 4:
            assert any("8 stages of 4 layers" in line for line in left_out) and "v_shape" not in searched
        if whole:
            assert any(line.startswith("zero_bubble") and line.endswith(": it cannot be") for line in left_out)


def test_stages_that_a_policy_implies_are_its_own():
    """interleaved has two stages a rank by itself; the others are then searched as if it were not there."""
    job = make_job(dataclasses.replace(make_job().model, num_layers=4))
    job = dataclasses.replace(job, num_ranks=2, parts=tuple(map(tuple, cut(4))), policy="mepipe")
    for set_, plain in ((False, {1}), (True, {2})):
        found, _ = variants(
            job, cut, list(POLICIES), ["none"], stages_are_set=set_, misfit=lambda splits, mode: None
        )
        assert (found[0].policies[0], found[0].job.stages_per_rank) == ("mepipe", 2)
        assert {v.job.stages_per_rank for v in found if "1f1b" in v.policies} == plain
        assert {v.job.stages_per_rank for v in found if "mepipe" in v.policies} == plain | {2}


def test_a_search_leaves_out_what_the_config_could_not_run(monkeypatch):
    monkeypatch.setattr("torch.__version__", torch.torch_version.TorchVersion("2.11.0"))
    compiled = ["--compile.enable", "--compile.components=model"]
    graphs = ["--stateflow.cuda-graphs", "--stateflow.mixed-precision-alone", "--activation_checkpoint.mode=full"]
    for arguments, split in ((compiled, {"none"}), (graphs, set()), ([], {"none", "full"})):
        config = harness.parse(arguments)
        scenario = type("Scenario", (), {"job": job_of(config), "job_config": config})
        options = type("Options", (), {"policies": None, "recompute": ["none", "full"]})
        found, left_out = plan_measured.searched_variants(options, scenario)
        whole = {"full"} if arguments is graphs else {"none", "full"}
        assert {v.job.recompute for v in found if v.split} == split
        assert {v.job.recompute for v in found if not v.split} == whole
        assert any("a recorded layer cannot do" in line for line in left_out) == (arguments is graphs)
        assert any("before torch 2.13" in line for line in left_out) == (arguments is compiled)


def test_a_stage_to_measure_computes_with_the_runs_working_weights():
    mixed = ["--stateflow.mixed-precision-alone", "--training.mixed_precision_param=bfloat16"]
    config = harness.parse([*mixed, "--activation_checkpoint.mode=full"])
    job, cpu = job_of(config), torch.device("cpu")
    stages = LocalStages(config, cpu)
    for split in (False, True):
        for length in (16, 32):
            point = stages.measure(job, job.parts[1], split, 16, length)
            assert min(point.forward, point.backward) > 0 and (point.weight is None) != split
        parameters = list(stages._module.parameters())
        assert {p.dtype for p in parameters} == {torch.float32} and job.compute_dtype == torch.bfloat16
        assert stages._module.output.weight.dtype == torch.bfloat16
        assert all(p.grad is not None for p in parameters)


def test_ranks_measure_as_many_rounds_whatever_their_clocks_say(monkeypatch):
    """Each calls collectives in every round: one round more on one rank would wait for ever."""
    meeting, figures, local = threading.Barrier(2, timeout=20.0), {}, threading.local()
    true_clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: true_clock() * getattr(local, "speed", 1.0))

    def rank(speed: float) -> int:
        local.speed, rounds = speed, []

        def agree(mine: list[float]) -> list[float]:
            rounds.append(mine)
            figures[speed] = mine
            meeting.wait()
            largest = [max(pair) for pair in zip(*figures.values(), strict=True)]
            meeting.wait()
            return largest

        module = split_model(cases.make_model(["gdn"], torch.float32), 1)[0]
        measure(
            module, torch.device("cpu"), torch.float32, 24, 8, batch=2, dim=12, vocab_size=cases.VOCAB, is_first=True,
            is_last=True, agree=agree,
        )  # fmt: skip
        return len(rounds)

    with ThreadPoolExecutor(2) as ranks:
        counts = list(ranks.map(rank, (1e-3, 1e4)))
    assert counts == [REPEATS + 1] * 2


@pytest.mark.parametrize("part", [0, 1])
def test_halves_of_a_backward_are_measured_apart(part):
    model = cases.make_model(["gdn", "attention"], torch.float32)
    module = split_model(model, 2)[part]
    calls = []
    for projection in (m for m in module.modules() if isinstance(m, torch.nn.Linear)):
        projection.weight.register_hook(lambda grad: calls.append("W"))
    point = measure(
        module, torch.device("cpu"), torch.float32, 24, 8, batch=2, dim=12, vocab_size=cases.VOCAB, is_first=part == 0,
        is_last=part == 1, split=True, repeats=1, agree=lambda figures: calls.append("agree") or figures,
    )  # fmt: skip
    assert min(point.forward, point.backward, point.weight) > 0 and not point.failed
    assert "W" in calls and calls.count("agree") >= 2
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def test_a_split_profile_has_a_surface_for_each_half():
    points = tuple(Point(0, n, 1.0 * n, 2.0 * n, 3.0 * n) for n in (8, 16, 32))
    profile = StageProfile(points, (Point(0, 24, 24.0, 48.0, 36.0),))
    assert {kind: s.seconds(0, 24) for kind, s in profile.surfaces().items()} == {Kind.F: 24, Kind.I: 48, Kind.W: 72}
    assert {kind: error for kind, _, _, error in profile.fit_errors()} == {Kind.F: 0, Kind.I: 0, Kind.W: 1}


def plan_of(tmp_path, name="v_shape", **changes) -> Path:
    """A plan file for the tiny config of the tests, of a policy that takes its own number of stages."""
    base = ["--stateflow.num-chunks=None", "--stateflow.policy=None"]
    target = plan_target(harness.parse([*base, f"--stateflow.policy={name}"]))
    target = dataclasses.replace(target, **changes)
    lengths = (target.seq_len // 2, target.seq_len - target.seq_len // 2)
    path = tmp_path / "plan.toml"
    write_plan(path, PlanFile(target, name, lengths, 1 if POLICIES[name].splits_backward else None), {}, [])
    return path


def test_a_plan_brings_policy_stages_chunks_and_lag(tmp_path):
    path = plan_of(tmp_path, stages=4)
    base = ["--stateflow.num-chunks=None", "--stateflow.policy=None", f"--stateflow.plan={path}"]
    config = harness.parse(base)
    assert (policy(config), num_stages(config), weight_lag(config)) == ("v_shape", 4, 1)
    plan = make_plan(config)
    schedule = make_schedule(config, plan.num_chunks)
    assert plan.num_chunks == 2 and schedule.stage_to_rank == (0, 1, 1, 0)
    harness.parse([*base[:-2], "--stateflow.policy=v_shape", base[-1]])  # says the same
    for extra, message in (
        (["--stateflow.policy=1f1b"], r"brings policy = 'v_shape'; drop policy = '1f1b', or the plan \(on the"),
        (["--stateflow.policy=gpipe"], "brings policy = 'v_shape'; drop policy = 'gpipe', or the plan"),
        (["--stateflow.weight_lag=3"], "brings weight_lag = 1; drop weight_lag = 3, or the plan"),
        (["--stateflow.num-chunks=2"], "drop num_chunks = 2, or the plan"),
        (["--stateflow.skew=0.5"], "drop skew = 0.5, or the plan"),
        ([f"{PER_STAGE}=4"], "made for stages = 4, the run has .*; leave out .parallelism. pipeline_parallel_layers"),
        (["--activation_checkpoint.mode=full"], r'recompute = none, .*; set \[activation_checkpoint\] mode = "none"'),
        (["--training.seq_len=64", "--validation.seq_len=64"], r"the run has 64; set \[training\] seq_len = "),
    ):
        with pytest.raises(ValueError, match=message):
            harness.parse([*base, *extra])


def test_what_was_not_measured_says_how_its_policies_were_searched_else():
    one = two = make_job()
    two = dataclasses.replace(two, parts=two.parts * 2)
    late = Variant(two, True, ("zero_bubble", "mepipe", "v_shape"))
    measured = [Variant(one, False, ("1f1b",)), Variant(one, True, ("zero_bubble", "mepipe"))]
    assert late.not_measured(measured) == (
        "not searched, no time to measure its stages: zero_bubble, mepipe, v_shape with 2 stages a rank, recomputation "
        "none (searched: zero_bubble, mepipe with 1 stage a rank, recomputation none)"
    )
    assert late.not_measured(measured[:1]).endswith("v_shape with 2 stages a rank, recomputation none")


def test_what_a_search_cannot_do_is_refused(tmp_path, capsys, monkeypatch):
    table = tmp_path / "table.csv"
    assert main(["schedule", DEMO, "--out", str(table)]) == 0
    assert main(["plan", DEMO, f"--stateflow.schedule-file={table}"]) == 2
    assert "schedule_file = " in capsys.readouterr().err
    assert main(["plan", DEMO, "--policies", "1f1"]) == 2
    assert "did you mean '1f1b'" in capsys.readouterr().err
    assert main(["plan", DEMO, "--time-budget", "-1"]) == 2
    assert "the least is 0 seconds" in capsys.readouterr().err
    folder = f"--job.dump_folder={tmp_path}"
    assert main(["plan", DEMO, folder, "--time-budget", "0"]) == 1
    said = capsys.readouterr().out
    assert "no plan is written" in said and "not searched, no time to measure its stages: 1f1b, gpipe" in said
    assert "with 1 stage a rank, recomputation none" in said and "(searched" not in said
    assert not (tmp_path / "plan.toml").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    scenario = type("Scenario", (), {"job": make_job(tensor_parallel=2), "job_config": harness.parse([])})
    with pytest.raises(ValueError, match="tensor_parallel_degree = 2: .* here is 1; set it to 1, or use --analytic"):
        plan_measured.refuse(type("Options", (), {"device": None, "lengths": None}), scenario)


def test_the_choice_beside_a_grid_whose_chunks_are_measured(tmp_path, capsys, monkeypatch):
    """As on a machine with too few devices for the run."""
    for module in (plan_verify, plan_measured):
        monkeypatch.setattr(module, "devices_missing", lambda scenario: "the run needs 2 GPUs, here is 1")
    tiny = ["--model.flavor=tiny", "--training.seq_len=32", "--validation.seq_len=32", "--stateflow.chunk_multiple=16"]
    tiny.append("--stateflow.num-chunks=2")
    status = main(["plan", DEMO, *tiny, f"--job.dump_folder={tmp_path}", "--policies", "zero_bubble", "--check-grid"])
    said = capsys.readouterr().out
    assert "not verified: the run needs 2 GPUs, here is 1" in said
    assert "chunks of 2 plans measured one by one, their order simulated" in said
    assert "best of a grid of 2" in said and (status == 0) == ("NOT within" not in said)
    assert (tmp_path / "plan.toml").exists()


@pytest.mark.processes
def test_tensor_parallel_stages_are_measured_by_their_ranks():
    """Two processes hold two halves of the heads; a rank that fails is an error, not a hang."""
    arguments = titan_arguments(Path(DEMO), ["--model.flavor=tiny", "--parallelism.tensor_parallel_degree=2"])
    job = make_job(tensor_parallel=2)
    stages = TensorParallelStages(arguments, 2, "cpu")
    try:
        whole = stages.measure(job, job.parts[1], False, 32, 16)
        halves = stages.measure(job, job.parts[0], True, 0, 32)
        assert min(whole.forward, whole.backward) > 0 and whole.weight is None and not whole.failed
        assert min(halves.forward, halves.backward, halves.weight) > 0
        with pytest.raises(RuntimeError, match="a rank that measures a tensor-parallel stage failed: .*Error"):
            stages.measure(job, ("layers.0", "no.such"), False, -1, 16)
    finally:
        stages.close()
