"""The search for plans with a made-up device, and what it launches on a real (or interpreted) one."""

from dataclasses import replace

import pytest
import torch

from stateflow.bench.measure import Timing, Turns
from stateflow.planning import kernel_tuning, mamba3_launches
from stateflow.planning.kernel_bench import KernelBench, compile_jobs
from stateflow.planning.kernel_launches import EPS, KERNELS, Launches, random_inputs
from stateflow.planning.kernel_tuning import BACKWARDS, CUTS, candidate_tiles, groups_of, tune
from stateflow_kernels import gated_delta_rule as kernels
from stateflow_kernels import mamba3_rule, plans
from stateflow_kernels.gated_delta_rule import Plan, Tile, default_plan
from stateflow_kernels.plan_table import Entry, Environment, Shape, load, save
from stateflow_kernels.primitives import INTERPRETED
from tests.kernels.kernel_testing import on_devices

HERE = Environment("a_gpu", "2.11", "3.6.0", "12.8.93")
SHAPE = Shape("gated_delta_rule", 20, 20, 128, 128, "bfloat16", 1, 8192)
IN_SEGMENTS = replace(SHAPE, num_heads=10, num_key_heads=10, segments=5)
SMALL = Shape("gated_delta_rule", 2, 1, 32, 48, "float16", 1, 130)


class FakeBench:
    """Kernels take 1 ms each, the whole the sum of them; tiles, cuts and overlap as `times` and `gains` say."""

    def __init__(self, times=None, gains=None, wrong=(), failures=None, noise=0.0):
        self.times, self.gains, self.wrong = times or {}, gains or {}, wrong
        self.failures, self.noise = failures or {}, noise
        self.now, self.checked, self.timed = 0.0, [], []

    def clock(self) -> float:
        return self.now

    def compile(self, jobs, seconds):
        self.compiled, self.seconds = list(jobs), seconds
        return {job: self.failures[job[1:]] for job in jobs if job[1:] in self.failures}

    def check(self, plan):
        self.checked.append(plan)
        bad = [name for name in KERNELS if (name, getattr(plan, name)) in self.wrong]
        return f"wrong: {bad}" if bad else None

    def prepare(self, shape, plan):
        self.shape = shape

    def timing(self, ms):
        self.now += 1.0
        return Timing(ms, ms - self.noise / 2, ms + self.noise / 2, 11)

    def ms(self, kernel, tile):
        return self.times.get((kernel, tile), 1.0)

    def time_kernel(self, kernel, tile):
        assert any(getattr(plan, kernel) == tile for plan in self.checked), "timed before it was checked"
        self.timed.append((kernel, tile))
        return self.timing(self.ms(kernel, tile))

    def time_forward(self, plan):
        assert plan in self.checked
        whole = sum(self.ms(name, getattr(plan, name)) for name in ("pre", "transition", "out"))
        return self.timing(whole - self.gains.get(plan.cuts, 0.0))

    def time_backward(self, plan):
        assert plan in self.checked
        of_forward = ("pre", "out", "transition_out")
        whole = sum(self.ms(name, getattr(plan, name)) for name in KERNELS if name not in of_forward)
        return self.timing(whole - self.gains.get((plan.backward_cuts, plan.overlap_backward), 0.0))


def search(bench, tmp_path, shapes=(SHAPE,), seconds=1e9):
    lines = []
    entries = tune(
        shapes, lambda shape: bench, lambda shape: Plan(), HERE, tmp_path / "t.json", seconds, lines.append, bench.clock
    )
    return entries, lines


def test_kernels_in_one_and_walks_at_once(tmp_path):
    class Bench(FakeBench):
        def time_forward(self, plan):
            gain = (plan.transition_out == in_one) + 0.2 * (plan.cuts == CUTS[1])
            return self.timing(3.0 - gain)

        def time_backward(self, plan):
            gain = 0.5 * ((plan.transition, plan.transition_backward) == walks and plan.overlap_backward)
            return self.timing(3.0 - gain - 0.3 * (plan.gradient_chunks == 16))

    in_one = Tile(16, 4, 3, specialized=True)
    walks = (Tile(32, 4, 2, specialized=True),) * 2
    bench = Bench()
    default = Plan(transition_out=Tile(32, 4, 3, specialized=True), gradient_chunks=8)
    (entry,) = tune(
        (SHAPE,), lambda _: bench, lambda _: default, HERE, tmp_path / "t.json", 1e9, lambda _: None, bench.clock
    )
    plan = entry.plan
    assert (plan.transition_out, plan.cuts, plan.gradient_chunks) == (in_one, CUTS[1], 16)
    assert (plan.transition, plan.transition_backward) == walks and plan.overlap_backward


def test_the_fastest_tile_of_each_kernel_and_what_overlaps(tmp_path):
    best = {"transition": Tile(16, 4, 3), "key_backward": Tile(32, 4, 3)}
    gains = {CUTS[1]: 0.4, CUTS[0]: 0.2, ((0.33,), True): 0.5, ((), True): 0.3}
    bench = FakeBench({item: 0.5 for item in best.items()}, gains)
    (entry,), _ = search(bench, tmp_path)
    expected = replace(Plan(), **best, cuts=CUTS[1], backward_cuts=(0.33,), overlap_backward=True)
    assert entry.plan == expected
    assert entry.evidence["forward_ms"] == pytest.approx(2.1) and entry.evidence["default_forward_ms"] == 3.0
    assert entry.evidence["backward_ms"] == pytest.approx(6.0 - 1.0 - 0.5) and entry.evidence["complete"]
    assert {"date", "kernels_ms", "default_backward_ms"} <= entry.evidence.keys()
    assert load(tmp_path / "t.json").entries[0].plan == expected


def test_what_wins_by_less_than_the_noise_changes_nothing(tmp_path):
    gains = {CUTS[0]: 0.15, ((), True): 0.15}
    bench = FakeBench({("pre", Tile(32, 4, 2)): 0.9, ("out", Tile(32, 4, 2)): 0.995}, gains, noise=0.2)
    (entry,), _ = search(bench, tmp_path)
    assert entry.plan == Plan()
    (entry,), _ = search(replace_noise(bench, 0.05), tmp_path)
    assert entry.plan.pre == Tile(32, 4, 2) and entry.plan.cuts == CUTS[0] and entry.plan.overlap_backward
    assert entry.plan.out == Plan().out, "half a percent is no gain"


def replace_noise(bench, noise):
    return FakeBench(bench.times, bench.gains, bench.wrong, bench.failures, noise)


def test_what_is_wrong_or_does_not_compile_is_neither_timed_nor_taken(tmp_path):
    wrong, failed = ("transition", Tile(16, 4, 3)), ("transition", Tile(64, 4, 3))
    bench = FakeBench({wrong: 0.1, failed: 0.1}, wrong=[wrong], failures={failed: "OutOfResources"})
    (entry,), lines = search(bench, tmp_path)
    assert entry.plan == Plan()
    assert wrong not in bench.timed and failed not in bench.timed
    assert any("transition 16/4/3 dropped: wrong" in line for line in lines)
    assert any("transition 64/4/3 dropped: OutOfResources" in line for line in lines)


def test_a_wrong_default_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the default plan is not right here"):
        search(FakeBench(wrong=[("pre", Plan().pre)]), tmp_path)


def test_the_time_ends(tmp_path):
    times = {("pre", Tile(32, 4, 2)): 0.5, ("transition", Tile(16, 4, 3)): 0.5}
    shapes = [SHAPE, replace(SHAPE, tokens=16384)]
    bench = FakeBench(times)
    entries, lines = search(bench, tmp_path, shapes, seconds=30.0)
    assert bench.seconds == pytest.approx(18.0)
    assert [entry.evidence["complete"] for entry in entries] == [False, False]
    assert entries[0].plan == replace(Plan(), pre=Tile(32, 4, 2)), "what was found in time counts"
    assert bench.now < 60 and any("time is over" in line for line in lines)
    assert len(load(tmp_path / "t.json").entries) == 2


def test_a_plan_that_is_slower_as_a_whole_is_not_taken(tmp_path):
    class Slower(FakeBench):
        def time_backward(self, plan):
            timing = super().time_backward(plan)
            return timing if plan == Plan() else replace(timing, median=timing.median + 2.0)

    (entry,), _ = search(Slower({("out", Tile(32, 4, 2)): 0.5}), tmp_path)
    assert entry.plan == Plan() and entry.evidence["backward_ms"] == entry.evidence["default_backward_ms"]


def test_what_is_compiled_at_once():
    other = replace(SHAPE, num_heads=10, num_key_heads=10)
    shapes = [SHAPE, other, replace(SHAPE, tokens=64), replace(SHAPE, batch=2)]
    assert [len(group) for group in groups_of(shapes)] == [2, 1, 1]


@pytest.mark.parametrize("v_dim", [16, 48, 128])
def test_candidates(v_dim):
    shape = replace(SHAPE, v_dim=v_dim)
    for kernel in KERNELS:
        default = getattr(default_plan(128, v_dim, torch.bfloat16), kernel)
        tiles = candidate_tiles(kernel, shape, default)
        assert tiles[0] == default and len(set(tiles)) == len(tiles) <= 12
        assert all(tile.block_v <= max(64, 2 * v_dim) for tile in tiles)
    assert all(options["overlap_backward"] for options in BACKWARDS)


def test_walks_in_segments_have_wide_candidates_and_no_cuts(tmp_path):
    wide = Tile(64, 8, 2, specialized=True)
    assert wide not in candidate_tiles("transition", SHAPE, Tile())
    default = Plan(num_segments=5)
    bench = FakeBench({("transition", wide): 0.5}, gains={(0.5,): 0.9, ((), True): 0.3})
    (entry,) = tune([IN_SEGMENTS], lambda _: bench, lambda _: default, HERE, tmp_path / "t.json", 1e6, str, bench.clock)
    assert entry.plan == replace(default, transition=wide, overlap_backward=True)
    assert load(tmp_path / "t.json").entries == (entry,)
    assert {name for name, _ in bench.timed} == {"transition", "transition_backward"}


def test_a_search_in_segments_begins_with_what_runs_without_an_entry(tmp_path, monkeypatch):
    """With the plan of the exact order, which may be a measured one."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr("stateflow.bench.measure.require_cuda", lambda what: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(plans, "_device_name", lambda device: "nvidia_h200")
    monkeypatch.setattr(plans, "shared_memory_of", lambda device: 232_448)
    monkeypatch.setattr(plans.hopper, "available", lambda device: True)
    monkeypatch.setattr(plans, "SHIPPED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(plans.VARIABLE, raising=False)
    begun = []
    monkeypatch.setattr(kernel_tuning, "tune", lambda shapes, _, default_for, *__, **___: begun.append(
        [default_for(shape) for shape in shapes]
    ))  # fmt: skip
    try:
        plans.reload()
        shape = replace(IN_SEGMENTS, segments=1)
        measured = replace(plans.fallback_plan(gpu, torch.bfloat16, 128, 128), gradient_chunks=32)
        save(tmp_path / "table.json", plans.environment_of(gpu), [Entry(shape, measured)])
        plans.reload()
        kernel_tuning.run([IN_SEGMENTS, shape], tmp_path / "out.json", 1.0)
        (in_segments, exact), runs = begun[0], plans.choice_for(IN_SEGMENTS, gpu).plan
    finally:
        plans.reload()
    assert in_segments == runs and runs.gradient_chunks == 32 and runs.num_segments == 5
    assert exact.gradient_chunks != 32  # it has to beat what needs no table


def test_what_is_compiled_before_a_search_in_segments(tmp_path):
    """Of all counts of heads at once; the walks' candidates, and what else a check launches."""
    walk = Tile(64, 4, 2, specialized=True)
    default = Plan(transition=walk, transition_out=walk, transition_backward=walk, gradient_chunks=16, num_segments=5)
    shapes = [replace(IN_SEGMENTS, num_heads=n, num_key_heads=n, tokens=t) for n in (8, 10) for t in (16384, 65536)]
    benches = []
    make = lambda shape: benches.append(FakeBench()) or benches[-1]  # noqa: E731
    entries = tune(shapes, make, lambda _: default, HERE, tmp_path / "t.json", 1e6, str, lambda: 0.0)
    assert [entry.shape for entry in entries] == shapes
    found = [(shape.num_heads, name) for shape, name, _ in benches[0].compiled]
    assert not hasattr(benches[1], "compiled")
    walks = ("transition", "transition_out", "transition_backward")
    assert found.count((8, "transition")) == len(candidate_tiles("transition", IN_SEGMENTS, walk)) == 4
    assert {name for _, name in found} == {*walks, "pre", "pre_backward", "gradients"}
    assert len(found) == 2 * (3 * 4 + 3) and found[:2] == [(8, "transition"), (8, "transition_out")]
    # Of the exact order each number of chunks that a program of the gradient kernel may take.
    bench = FakeBench()
    search_of = kernel_tuning.Search(bench, replace(default, num_segments=1))
    jobs = [job for jobs in search_of.jobs(SHAPE) for job in jobs]
    assert sorted(n for _, name, n in jobs if name == "gradients") == [4, 16, 32]
    backward = [tile for _, name, tile in jobs if name == "pre_backward"]
    assert backward == [tile for _, name, tile in jobs if name == "pre"]


@on_devices
@pytest.mark.parametrize(("tokens", "segments"), [(130, 1), (70, 2)])
def test_each_launch_does_what_the_operation_does(device, tokens, segments):
    plan = replace(default_plan(32, 48, torch.float16), num_segments=segments)
    shape = replace(SMALL, segments=segments)
    launches = Launches(shape, tokens, torch.device(device), fill=plan)
    inputs, grads = random_inputs(shape, tokens, device)
    options = (SMALL.k_dim**-0.5, EPS, plan)
    o, state, solve = kernels.forward(*inputs, None, *options)
    dq, dk, *others = kernels.backward(*grads, *inputs, None, solve, *options)
    results = dict(launches.results)
    for name, expected in (("dq", dq), ("dk", dk)):  # of all value heads: the operation sums them
        summed = results.pop(name).unflatten(2, (SMALL.num_key_heads, -1)).sum(3).to(expected.dtype)
        assert torch.equal(summed, expected), name
    expected = dict(zip(("o", "state", "dv", "dg", "dbeta", "dstate"), (o, state, *others), strict=True))
    assert results.keys() == expected.keys()
    assert all(torch.equal(results[name], expected[name]) for name in expected)


@on_devices
def test_each_launch_of_mamba3_does_what_the_operation_does(device):
    shape = Shape("mamba3", 1, 1, 16, 24, "float16", 1, 70, 4)
    plan = mamba3_rule.default_plan(16, 24, torch.float16)
    launches = mamba3_launches.Launches(shape, shape.tokens, torch.device(device), fill=plan)
    call = mamba3_launches.Call(shape, shape.tokens, torch.device(device))
    outputs = call.forward(plan)
    assert torch.equal(launches.y, outputs[0])
    grads = zip(launches.finish(), call.backward(plan, outputs), strict=True)
    assert all(torch.equal(actual, expected) for actual, expected in grads)


def test_a_search_for_mamba3(tmp_path):
    class Mamba3Bench(FakeBench):
        def check(self, plan):
            self.checked.append(plan)

        def time_forward(self, plan):
            return self.timing(3.0 - self.gains.get(plan.cuts, 0.0))

        def time_backward(self, plan):
            return self.timing(3.0 - self.gains.get(plan.overlap_backward, 0.0))

        def time_layer(self, plan, dim):
            assert dim == 2560
            gains = (0.5 * plan.overlap_projections, 0.005 * plan.overlap_projections_backward)
            return tuple(self.timing(9.0 - gain) for gain in gains)

    shape = Shape("mamba3", 80, 1, 128, 64, "bfloat16", 1, 8192, 32)
    default = mamba3_rule.default_plan(128, 64, torch.bfloat16)
    best = {"scan": Tile(16, 2, 6), "key_gradients": Tile(64, 8, 2)}
    bench = Mamba3Bench({item: 0.5 for item in best.items()}, {CUTS[1]: 0.4, True: 0.3})
    (entry,) = tune([shape], lambda _: bench, lambda _: default, HERE, tmp_path / "t.json", 1e9, str, bench.clock)
    assert entry.plan == replace(default, **best, cuts=CUTS[1], overlap_backward=True, overlap_projections=True)
    assert entry.evidence["layer_ms"] == {"dim": 2560, "serial": [9.0, 9.0], "at_once": [8.5, 8.995]}
    assert load(tmp_path / "t.json").entries == (entry,)

    def does_not_fit(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    bench.time_layer = does_not_fit
    (entry,) = tune([shape], lambda _: bench, lambda _: default, HERE, tmp_path / "u.json", 1e9, str, bench.clock)
    assert entry.plan == replace(default, **best, cuts=CUTS[1], overlap_backward=True)
    assert load(tmp_path / "u.json").entries == (entry,)
    # What leaves or takes sums over blocks of columns has one width, whatever the length.
    for kernel in ("scan_backward", "query_gradients", "key_gradients"):
        assert {tile.block_v for tile in candidate_tiles(kernel, shape, getattr(default, kernel))} == {
            getattr(default, kernel).block_v
        }


def test_what_has_one_form_on_hopper_is_compiled_but_not_searched(tmp_path):
    class Mamba3Bench(FakeBench):
        def check(self, plan):
            self.checked.append(plan)

        def time_forward(self, plan):
            return self.timing(1.0)

        time_backward = time_forward

        def time_layer(self, plan, dim):
            return self.timing(1.0), self.timing(1.0)

    shape = Shape("mamba3", 80, 1, 128, 64, "bfloat16", 1, 8192, 32)
    plan = mamba3_rule.default_plan(128, 64, torch.bfloat16)
    forms = {name: replace(getattr(plan, name), specialized=True) for name in mamba3_rule.SPECIALIZED}
    plan = replace(plan, **forms, gradient_heads=20)

    def kernels_of(shape, plan):
        bench = Mamba3Bench()
        tune([shape], lambda _: bench, lambda _: plan, HERE, tmp_path / "t.json", 1e9, str, bench.clock)
        assert len(bench.compiled) == len(set(bench.compiled))
        return {name for _, name, _ in bench.compiled}, {name for name, _ in bench.timed}

    fixed = {"both", "gradients", "out", "local_without_rows"}
    assert kernels_of(shape, plan) == (fixed | {"scan", "scan_backward"}, {"scan", "scan_backward"})
    assert {name for name, _ in mamba3_launches.launched(shape, plan)} == fixed | {"scan", "scan_backward"}
    everything = (set(mamba3_launches.KERNELS),) * 2
    assert kernels_of(shape, replace(plan, gradient_heads=0)) == everything
    for other in (dict(batch=2), dict(num_angles=16), dict(dtype="float32")):
        assert kernels_of(replace(shape, **other), plan) == everything


@on_devices
def test_the_check_finds_what_is_wrong(device, monkeypatch):
    monkeypatch.setattr("stateflow.planning.kernel_bench.CHECK_TOKENS", 70)
    bench = KernelBench(SMALL, torch.device(device), Turns(None))
    plan = default_plan(32, 48, torch.float16)
    assert bench.check(plan) is None
    assert "OutOf" in bench.check(OutOfResources()) or "Error" in bench.check(OutOfResources())
    backward = kernels.backward
    monkeypatch.setattr(kernels, "backward", lambda *args: tuple(1.05 * x for x in backward(*args)))
    assert bench.check(plan).startswith("wrong: dq 5.0e-02 (bound 8.0e-03), dk")


@on_devices
def test_the_check_sees_what_segments_hand_on(device, monkeypatch):
    shape = replace(SMALL, segments=3)
    monkeypatch.setattr("stateflow.planning.kernel_bench.CHECK_TOKENS", 70)
    bench = KernelBench(shape, torch.device(device), Turns(None))
    plan = replace(default_plan(32, 48, torch.float16), num_segments=3)
    assert bench.check(plan) is None
    compose = kernels._Problem.compose

    def into_nothing(self, state, ends, maps, backward):
        compose(self, state, ends, torch.zeros_like(maps), backward)

    monkeypatch.setattr(kernels._Problem, "compose", into_nothing)
    assert bench.check(plan).startswith("wrong: o ")


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_a_search_in_segments_on_kernels_that_run(tmp_path, monkeypatch):
    """Everything but the times: what is launched is launched, and found right."""
    shape = replace(SMALL, num_heads=1, num_key_heads=1, k_dim=16, v_dim=24, tokens=256, segments=2)
    monkeypatch.setattr("stateflow.planning.kernel_bench.CHECK_TOKENS", 70)
    monkeypatch.setattr(
        "stateflow.planning.kernel_bench.time_call", lambda call, **_: call() and None or Timing(1.0, 1.0, 1.0, 11)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(KernelBench, "compile", lambda self, jobs, seconds: {})
    default = plans.in_segments(default_plan(16, 24, torch.float16), 2, 24)
    make, lines = lambda shape: KernelBench(shape, torch.device("cpu"), Turns(None)), []
    (entry,) = tune([shape], make, lambda _: default, HERE, tmp_path / "t.json", 1e6, lines.append)
    assert entry.plan == default and entry.evidence["complete"]
    assert set(entry.evidence["kernels_ms"]) == {"transition", "transition_backward"}
    assert all(len(times) == 3 for times in entry.evidence["kernels_ms"].values())
    assert not any("dropped" in line for line in lines)


class OutOfResources:
    """No plan at all."""


@pytest.mark.processes
def test_worker_processes_say_what_failed():
    plan = default_plan(32, 48, torch.float16)
    jobs = [(SMALL, *pair) for pair in (("pre", plan.pre), ("out", plan.out), ("no_such_kernel", Tile()))]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failures = compile_jobs(jobs, device, workers=2, seconds=200)
    assert failures == {jobs[2]: "KeyError: 'no_such_kernel'"}
    assert compile_jobs(jobs[:1], device, workers=1, seconds=0.0) == {jobs[0]: "it was not compiled in time"}


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="stateflow tune-kernels measures on a CUDA device and there is none"):
        kernel_tuning.run([SHAPE], None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gated_delta_rule", "mamba3"])
def test_on_a_gpu(tmp_path, monkeypatch, family):
    from stateflow_kernels import plans

    monkeypatch.setattr(kernel_tuning, "_PARALLEL", kernel_tuning._PARALLEL[:2])
    monkeypatch.setattr(kernel_tuning, "_WALK", kernel_tuning._WALK[:2])
    monkeypatch.setattr(kernel_tuning, "_WALK_BACK", kernel_tuning._WALK_BACK[:2])
    monkeypatch.setenv(plans.VARIABLE, str(tmp_path / "table.json"))
    monkeypatch.setattr(kernel_tuning, "_SCAN", kernel_tuning._SCAN[:2])
    monkeypatch.setattr(kernel_tuning, "_SCAN_LAUNCHES", kernel_tuning._SCAN_LAUNCHES[:2])
    shape = replace(SHAPE, num_heads=4, num_key_heads=2, k_dim=64, v_dim=64, tokens=1024)
    if family == "mamba3":
        shape = replace(shape, family=family, num_key_heads=1, num_angles=16)
    assert kernel_tuning.run([shape], None, 200.0) == 0
    (entry,) = load(tmp_path / "table.json").entries
    assert entry.shape == shape and entry.evidence["complete"] and entry.evidence["forward_ms"] > 0
    plans.reload()
    assert plans.choice_for(shape, torch.device("cuda", 0)).plan == entry.plan
    monkeypatch.undo()
    plans.reload()
