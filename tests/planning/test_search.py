"""Cost surfaces, the dynamic program and the search against brute force; plan files against what they refuse."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow.chunks import ChunkCost, ChunkPlan
from stateflow.cli import main
from stateflow.model import ModelConfig
from stateflow.pipeline.policies import build_schedule, find_policy
from stateflow.pipeline.schedule import Kind
from stateflow.pipeline.simulator import simulate
from stateflow.planning.devices import DEVICES
from stateflow.planning.plan_file import PlanFile, Target, misfit, model_digest, read_plan, write_plan
from stateflow.planning.profile import (
    Budget,
    Cache,
    CostSurface,
    Point,
    StageProfile,
    coarse,
    measure,
    points_of,
    points_to_measure,
    profile_stage,
)
from stateflow.planning.search import KEPT, Measured, best_cuts, search
from tests import cases

from .test_costs import make_job

DEMO = str(Path(__file__).parents[2] / "titan_configs" / "demo.toml")
TINY = ["--model.flavor=tiny", "--training.seq_len=128", "--validation.seq_len=128"]


@given(st.floats(0, 10), st.floats(0.01, 10), st.floats(0, 1), st.integers(0, 900), st.integers(40, 1000))
def test_a_surface_meets_eq_9_with_a_constant_exactly(constant, linear, quadratic, start, length):
    cost = ChunkCost(linear, quadratic)
    points, _ = points_to_measure(1024, 32, reads_prefix=True)
    surface = CostSurface([(s, n, constant + cost.cost(s, n)) for s, n in points])
    expected = constant + cost.cost(start, length)
    assert surface.seconds(start, length) == pytest.approx(expected, rel=1e-6)


def test_a_chunk_beyond_all_measured_ones_is_the_sum_of_pieces():
    cost = ChunkCost(1.0, 0.05)
    points = points_of([64, 128, 32], 256, reads_prefix=True)
    assert points == [(0, 128), (128, 128), (0, 64), (192, 64), (0, 32), (224, 32)]
    assert points_of([64, 256], 256, reads_prefix=True) == [(0, 256), (0, 64), (192, 64)]
    assert points_of([64, 32], 256, reads_prefix=False) == [(0, 64), (0, 32)]
    surface = CostSurface([(s, n, cost.cost(s, n)) for s, n in points])
    for start, length in ((0, 256), (100, 300), (1000, 129)):
        assert surface.seconds(start, length) == pytest.approx(cost.cost(start, length), rel=1e-9)


def test_a_surface_does_not_smooth_a_corner():
    """Launch-bound up to 256 tokens, then linear."""
    surface = CostSurface([(0, n, max(1.0, n / 256)) for n in (64, 128, 256, 512, 1024)])
    for length in range(64, 1025, 16):
        assert surface.seconds(0, length) == pytest.approx(max(1.0, length / 256), rel=1e-9)
    assert CostSurface([(0, 64, 1.0), (0, 128, 10.0)]).seconds(0, 16) == 0  # and none below it
    with pytest.raises(ValueError, match=r"lengths \[64\] only; two are the least"):
        CostSurface([(0, 64, 1.0)])


def compositions(cuts):
    inner = cuts[1:-1]
    for count in range(len(inner) + 1):
        for chosen in itertools.combinations(inner, count):
            yield [cuts[0], *chosen, cuts[-1]]


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(2, 7), st.integers(1, 6), st.integers(1, 8))
def test_dynamic_program_finds_the_optimum(seed, num_cuts, num_microbatches, num_stages):
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, 100), num_cuts - 1))
    cuts = [0, *cuts]
    costs = {pair: rng.randint(1, 50) for pair in itertools.combinations(cuts, 2)}

    def value(boundaries):
        pieces = [costs[pair] for pair in zip(boundaries, boundaries[1:], strict=False)]
        return num_microbatches * sum(pieces) + (num_stages - 1) * max(pieces)

    found = best_cuts(cuts, lambda a, b: costs[a, b], num_microbatches, num_stages, num_cuts, num_limits=10**6)
    boundaries, best = found[0]
    assert best == value(boundaries) == min(map(value, compositions(cuts)))
    fewer, _ = best_cuts(cuts, lambda a, b: costs[a, b], num_microbatches, num_stages, 1, num_limits=10**6)[0]
    assert fewer == [cuts[0], cuts[-1]]


def profile_of(cost, seq_len=64) -> StageProfile:
    points, _ = points_to_measure(seq_len, 8, reads_prefix=True)
    return StageProfile(tuple(Point(s, n, cost(s, n), 2 * cost(s, n)) for s, n in points), ())


@pytest.mark.parametrize("overhead", [0.0, 0.5, 300.0])
def test_search_finds_the_optimum_by_brute_force(overhead):
    """Every cut of 64 tokens into pieces of 8, or into the family's, in each policy; chunks may also be a loss."""
    job = dataclasses.replace(make_job(num_ranks=2, num_microbatches=2, seq_len=64), multiple=8)
    cost = ChunkCost(1.0, 0.05)
    measured = Measured(job, dataclasses.replace(DEVICES["cpu"], link_latency=0, link_bandwidth=float("inf")))
    measured.use([profile_of(lambda s, n: overhead + cost.cost(s, n))] * 2)
    found = search([(measured, ["1f1b", "gpipe"])]).candidates

    def step_time(policy, plan):
        schedule = build_schedule(policy, 2, 2, plan.num_chunks)
        scale = {Kind.F: 1, Kind.B: 2}

        def seconds(action):
            start, stop = plan.span(action.chunk)
            return scale[action.kind] * (overhead + cost.cost(start, stop - start))

        return simulate(schedule, seconds).step_time

    best = min(
        step_time(policy, ChunkPlan(tuple(boundaries)))
        for policy in ("1f1b", "gpipe")
        for boundaries in compositions(list(range(0, 65, 8)))
    )
    assert found[0].step_time == pytest.approx(step_time(found[0].policy, found[0].plan), rel=1e-6)
    assert found[0].step_time <= best * 1.01
    assert (found[0].plan.num_chunks == 1) == (overhead == 300.0)  # never chunks that are slower
    assert any(c.policy == "1f1b" and c.plan.num_chunks == 1 for c in found)


def test_memory_is_a_hard_limit():
    job = make_job(num_ranks=2, num_microbatches=4, seq_len=256)
    profile = profile_of(lambda s, n: 1.0 + n, 256)  # whole sequences are the fastest
    free = search([(Measured(job, DEVICES["cpu"]).use([profile] * 2), ["1f1b"])]).candidates
    peaks = sorted(max(c.peak_bytes) for c in free)
    limited = Measured(job, DEVICES["cpu"], memory_limit=peaks[3]).use([profile] * 2)
    tight = search([(limited, ["1f1b"])]).candidates
    assert max(tight[0].peak_bytes) <= peaks[3] < max(free[0].peak_bytes)
    assert [c.fits for c in tight] == sorted((c.fits for c in tight), reverse=True)
    assert tight[0].step_time == min(c.step_time for c in tight if c.fits)
    # However many faster ones do not fit.
    profile = profile_of(lambda s, n: 1000.0 + n, 256)
    limit = max(limited.peak_bytes(limited.schedule("1f1b", 32), job.plan(32, 0.0)))
    least = search([(Measured(job, DEVICES["cpu"], memory_limit=limit).use([profile] * 2), ["1f1b"])]).candidates
    assert sum(not c.fits for c in least) > KEPT and least[0].fits and least[0].plan.num_chunks > 2


@pytest.mark.parametrize("part", [0, 1])
def test_measure_runs_the_real_stage_and_leaves_nothing(part):
    model = cases.make_model(["gdn", "attention"], torch.float32)
    from stateflow.pipeline.split import split_model

    module = split_model(model, 2)[part]
    point = measure(
        module, torch.device("cpu"), torch.float32, 24, 8, batch=2, dim=12, vocab_size=cases.VOCAB, is_first=part == 0,
        is_last=part == 1, documents=part == 1, repeats=1,
    )  # fmt: skip
    assert point.forward > 0 and point.backward > 0 and not point.failed
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def test_profiling_resumes_and_respects_its_budget(tmp_path):
    calls = []

    def run(start, length):
        calls.append((start, length))
        return Point(start, length, float(length), 2.0 * length)

    wanted = points_to_measure(1024, 64, reads_prefix=True)
    cache = Cache(tmp_path / "cache.json")
    spent = profile_stage(run, "key", cache, wanted, Budget(0), lambda text: None)
    assert not spent.usable and not calls
    few = profile_stage(run, "key", cache, (coarse(wanted[0]), []), Budget(None), lambda text: None)
    assert few.usable and {p.length for p in few.points} == {64, 256, 1024} and len(calls) == 5
    before = list(calls)
    whole = profile_stage(run, "key", Cache(tmp_path / "cache.json"), wanted, Budget(None), lambda text: None)
    assert set(calls) == {*wanted[0], *wanted[1]} and len(calls) == len(set(calls)) and calls[: len(before)] == before
    assert whole.fit_errors() and max(abs(error[3]) for error in whole.fit_errors()) < 1e-9
    profile_stage(run, "key", Cache(tmp_path / "cache.json"), wanted, Budget(None), lambda text: None)
    assert len(calls) == len(set(calls))
    (tmp_path / "cache.json").write_text("{")
    with pytest.raises(ValueError, match="not readable as JSON; delete it"):
        Cache(tmp_path / "cache.json")
    (tmp_path / "cache.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no measured points"):
        Cache(tmp_path / "cache.json")


def test_a_share_of_a_budget_began_with_it():
    budget = Budget(10.0)
    budget.begin -= 6.0
    assert budget.share(0.5).spent and not budget.spent and 3.0 < budget.share(0.95).left < 3.6
    assert Budget(None).share(0.5).left is None


def test_a_disturbed_point_is_measured_again(tmp_path):
    calls = []

    def run(start, length):
        calls.append((start, length))
        slow = 3.0 if (start, length) == (0, 256) and calls.count((0, 256)) == 1 else 1.0
        return Point(start, length, slow * length, 2.0 * length)

    wanted = points_to_measure(1024, 64, reads_prefix=True)
    profile = profile_stage(run, "key", Cache(tmp_path / "cache.json"), wanted, Budget(None), lambda text: None)
    assert calls.count((0, 256)) == 2
    assert profile.surfaces()[Kind.F].seconds(0, 300) == pytest.approx(300)
    assert Cache(tmp_path / "cache.json").get("key", 0, 256).forward == 256


def test_the_bound_that_ends_a_search_is_one():
    """What ``search`` leaves out is no faster than what it keeps: by simulating everything."""
    rng = random.Random(3)
    for _ in range(4):
        stages = rng.choice([2, 4])
        job = make_job(num_ranks=2, num_microbatches=rng.randint(1, 3), seq_len=256)
        part = ("layers.0",)
        job = dataclasses.replace(job, parts=(part,) * stages)
        split = stages == 4
        policies = ["zero_bubble", "v_shape", "mepipe"] if split else ["1f1b", "gpipe"]
        job = dataclasses.replace(job, policy=policies[0])
        entry = dataclasses.replace(DEVICES["cpu"], link_latency=0, link_bandwidth=float("inf"))
        profiles = []
        for _stage in range(stages):
            constant, linear = rng.uniform(0, 30), rng.uniform(0.5, 2)
            points, _ = points_to_measure(256, 8, reads_prefix=True)
            times = [(s, n, constant + linear * n + 1e-3 * s * n) for s, n in points]
            profiles.append(StageProfile(
                tuple(Point(s, n, t, 2 * t, 0.7 * t if split else None) for s, n, t in times), ()
            ))  # fmt: skip
        measured = Measured(job, entry).use(profiles)
        found = search([(measured, policies)])
        assert found.too_slow > 0 and found.left_out == 0
        everything = []
        for policy in policies:
            placed = find_policy(policy).placement(2, stages)
            for n, skew in itertools.product((1, 2, 4, 6, 8, 16, 32), (0.0, 0.5, 1.0)):
                plan = job.plan(n, skew)
                everything.append(measured.candidate(plan, policy, skew).step_time)
                assert measured.least_time(plan, placed) <= everything[-1] * (1 + 1e-9), (policy, n, skew)
        assert found.candidates[0].step_time <= min(everything) * (1 + 1e-12)


def test_a_search_without_time_says_what_it_left_out():
    measured = Measured(make_job(seq_len=64), DEVICES["cpu"]).use([profile_of(lambda s, n: 1.0 + n)] * 2)
    found = search([(measured, ["1f1b", "gpipe"])], budget=Budget(0))
    assert len(found.candidates) == 2 and found.left_out > 10 and found.candidates[-1].plan.num_chunks == 1


TARGET = Target("abc", 64, 2, 2, 4, "none")
CHANGE = {"seq_len": "[training] seq_len = 64", "stages": "leave out layers_per_stage"}


def test_plan_file_round_trip_and_refusals(tmp_path):
    path = tmp_path / "plan.toml"
    found = PlanFile(TARGET, "1f1b", (40, 24))
    write_plan(path, found, {"device": 'a "b"', "verified": True, "x": 1.0, "y": None}, [{"chunk_lengths": [64]}])
    assert read_plan(path) == found and found.plan().lengths == (40, 24)
    assert misfit(found, TARGET, CHANGE, True) is None
    other = dataclasses.replace(TARGET, seq_len=128)
    message = "was made for seq_len = 64, the run has 128; set [training] seq_len = 64"
    assert misfit(found, other, CHANGE, True) == message
    other = dataclasses.replace(TARGET, stages=4)
    assert misfit(found, other, CHANGE, True).endswith("stages = 2, the run has 4; leave out layers_per_stage")
    assert misfit(found, dataclasses.replace(TARGET, model="x"), CHANGE, True) == "was made for another model"
    assert misfit(found, TARGET, CHANGE, False) == "asks for the policy '1f1b', which is unknown here"
    for old, new, message in (
        ("version = 1", "version = 2", "has version 2, this program reads 1; make it anew"),
        ("[40, 24]", "[40, 23]", "chunk lengths sum to 63"),
        ("ranks = 2", "", "ranks"),
        ("[plan]", "[plan", "is no TOML"),
    ):
        broken = tmp_path / "broken.toml"
        broken.write_text(path.read_text().replace(old, new))
        with pytest.raises(ValueError, match="plan file .*broken.toml.*" + message.replace("[", r"\[")):
            read_plan(broken)
    with pytest.raises(ValueError, match="cannot be read .*; make one with stateflow plan"):
        read_plan(tmp_path / "none.toml")


@pytest.mark.processes
def test_a_plan_is_searched_verified_written_and_used(tmp_path, capsys):
    folder = f"--job.dump_folder={tmp_path}"
    arguments = [DEMO, *TINY, folder, "--policies", "1f1b", "v_shape"]
    assert main(["plan", *arguments, "--verify", "1"]) == 0
    captured = capsys.readouterr()
    assert "fit: worst error" in captured.out and ", whole sequences, recomputation" in captured.out
    assert "plans run one after the other, " in captured.out and "predicted" in captured.out
    found = read_plan(tmp_path / "plan.toml")
    assert sum(found.chunk_lengths) == 128 and found.target.ranks == 2
    assert "verified = true" in (tmp_path / "plan.toml").read_text()

    assert main(["plan", *arguments, "--verify", "0"]) == 0  # everything is in the cache
    assert "chunk of" not in capsys.readouterr().err

    # Whichever policy was the fastest here.
    use = [DEMO, *TINY, f"--stateflow.plan={tmp_path / 'plan.toml'}", "--stateflow.policy=None"]
    assert main(["simulate", *use, "--stateflow.num-chunks=None", "--json"]) == 0
    assert f'"policy": "{found.policy}"' in capsys.readouterr().out
    for extra, message in (
        ([], "drop num_chunks = 4, or the plan (on the command line: --stateflow.num-chunks None"),
        (["--stateflow.num-chunks=None", "--stateflow.model.dim=64"], "was made for another model; or make one for"),
        (["--stateflow.num-chunks=None", "--training.local_batch_size=4", "--validation.local_batch_size=4"],
         "was made for microbatches = 2, the run has 4"),
        (["--stateflow.num-chunks=None", "--activation_checkpoint.mode=full"], "was made for recompute = none"),
    ):  # fmt: skip
        assert main(["simulate", *use, *extra]) == 2
        assert message in capsys.readouterr().err


def test_the_lengths_to_measure_may_be_given(tmp_path, capsys):
    """Those and no others, in every mode; a plan is made from them."""
    arguments = [DEMO, *TINY, f"--job.dump_folder={tmp_path}", "--policies", "1f1b", "--verify", "0"]
    assert main(["plan", *arguments, "--lengths", "16", "32", "--recompute", "none", "full"]) == 0
    capsys.readouterr()
    cache = Cache(tmp_path / "plan_cache.json")
    stages = {key: sorted((p.start, p.length) for p in cache.all_of(key)) for key in cache.described()}
    assert sorted(stages.values()) == 2 * [[(0, 16), (0, 32)]] + 2 * [[(0, 16), (0, 32), (96, 32), (112, 16)]]
    assert {about["recompute"] for about in cache.described().values()} == {"none", "full"}
    assert sum(read_plan(tmp_path / "plan.toml").chunk_lengths) == 128
    for lengths, more in ((["16"], ""), (["16", "256"], ""), (["16", "20"], " and multiples of 8")):
        assert main(["plan", *arguments, "--stateflow.chunk_multiple=8", "--lengths", *lengths]) == 2
        assert "give two or more lengths of chunks, up to the sequence's 128 tokens" + more in capsys.readouterr().err
    assert main(["plan", DEMO, *TINY, "--analytic", "--lengths", "16", "32"]) == 2
    assert "--lengths is for measuring" in capsys.readouterr().err
    assert main(["plan", DEMO, *TINY, "--analytic", "--out", "plan.toml"]) == 2  # no file would be there
    assert "--out is for measuring" in capsys.readouterr().err


@pytest.mark.parametrize(("constant", "quadratic"), [(0.0, 0.0), (20.0, 0.0), (5.0, 2e-3), (60.0, 2e-3), (400.0, 1e-3)])
def test_the_choice_is_within_two_percent_of_an_exhaustive_grid(constant, quadratic):
    """Launch-bound up to a corner that no measured point meets, then linear and quadratic; the grid runs the truth."""
    job = make_job(num_ranks=2, num_microbatches=3, seq_len=1024)
    entry = dataclasses.replace(DEVICES["cpu"], link_latency=0, link_bandwidth=float("inf"))

    def truth(start, length):
        return max(constant, length + quadratic * length * (start + length / 2))

    points, _ = points_to_measure(1024, 16, reads_prefix=True)
    profile = StageProfile(tuple(Point(s, n, truth(s, n), 2 * truth(s, n)) for s, n in points), ())
    measured = Measured(job, entry).use([profile] * 2)

    def really(policy, plan):
        def seconds(action):
            start, stop = plan.span(action.chunk)
            return (1 if action.kind is Kind.F else 2) * truth(start, stop - start)

        return simulate(measured.schedule(policy, plan.num_chunks), seconds).step_time

    chosen = search([(measured, ["1f1b", "gpipe"])]).candidates[0]
    grid = [
        really(policy, job.plan(n, skew))
        for policy in ("1f1b", "gpipe")
        for n in (1, 2, 4, 6, 8, 16, 32)
        for skew in (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
    ]
    assert really(chosen.policy, chosen.plan) <= 1.02 * min(grid)


def test_a_plan_stays_one_for_a_model_that_is_computed_in_another_way():
    model = ModelConfig()
    for changes in (dict(backend="chunk"), dict(exact_order=False), dict(overlap_projections="on")):
        assert model_digest(dataclasses.replace(model, **changes)) == model_digest(model)
    sizes = [f.name for f in dataclasses.fields(model) if type(getattr(model, f.name)) is int]
    assert len(sizes) >= 15
    for name in sizes:
        assert model_digest(dataclasses.replace(model, **{name: 2 * getattr(model, name)})) != model_digest(model), name
    assert model_digest(dataclasses.replace(model, pattern=["gdn"])) != model_digest(model)
