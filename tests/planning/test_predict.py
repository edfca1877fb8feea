"""``stateflow predict``: stages scaled to other numbers of ranks, the paper's figures, and the simulator's error."""

import copy
import dataclasses
import functools
import itertools
import json
import os
from pathlib import Path

import pytest

from stateflow.cli import main
from stateflow.commands import read_config
from stateflow.commands.plan_measured import Profiler, key_facts
from stateflow.commands.predict import Check, error_text
from stateflow.model import flops_per_token
from stateflow.pipeline.schedule import Kind
from stateflow.planning import paper
from stateflow.planning.analytic import Analytic
from stateflow.planning.devices import DEVICES
from stateflow.planning.profile import Cache, Point, StageProfile
from stateflow.planning.scaling import Scaled, composition, measured_stages, without_graphs
from stateflow.planning.search import with_measured_memory
from stateflow.planning.variants import variants
from stateflow.titan.planning import job_of, part_names

CONFIGS = Path(__file__).parents[2] / "titan_configs"
HYBRID = CONFIGS / "gdn_3b_hybrid.toml"
DEVICE = dataclasses.replace(DEVICES["h200"], launch_seconds=0.0)  # without a floor eq. 9 holds exactly
SLOWER = 1.7  # what was "measured", times what is counted
SAVED = 3  # likewise of bytes


@functools.cache
def job_on(ranks: int, tokens: int = 8192):
    config = read_config(HYBRID, [f"--training.seq_len={tokens}", "--stateflow.num_chunks=4"], ranks)
    return config, job_of(config)


@functools.cache
def profiles_on(ranks: int, with_memory: bool = False) -> dict:
    """Stages of so many ranks as if measured: their counts, slower by a factor."""
    _, job = job_on(ranks)
    counts, kinds, profiles = Analytic(job, DEVICE), job.model.layer_kinds(), {}
    for number, part in enumerate(job.parts):
        points = []
        for start, length in ((0, 1024), (7168, 1024), (0, 2048), (6144, 2048), (0, 4096), (4096, 4096), (0, 8192)):
            times = [SLOWER * seconds(counts, kind, number, start, length) for kind in (Kind.F, Kind.B)]
            sizes = ()
            if with_memory:
                footprint = counts.stages[number].footprint
                saved = SAVED * footprint.saved_bytes_per_token * length + footprint.carry_bytes
                sizes = (None, saved, footprint.forward_bytes_per_token * length, 0)
            points.append(Point(start, length, *times, *sizes))
        profiles[composition(kinds, part)] = StageProfile(tuple(points), ())
    return profiles


def seconds(costs: Analytic, kind: Kind, stage: int, start: int, length: int) -> float:
    return costs._seconds(Span(start, start + length), kind, stage, 0)


@dataclasses.dataclass
class Span:
    start: int
    stop: int

    def span(self, _chunk: int):
        return self.start, self.stop


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_stages_of_two_ranks_tell_those_of_any_number(ranks):
    _, job = job_on(ranks)
    scaled, counts = Scaled(job, DEVICE).use(profiles_on(2)), Analytic(job, DEVICE)
    for stage in range(ranks):
        for kind in (Kind.F, Kind.B):
            for span in ((0, 1024), (3000, 1500), (5000, 3192), (0, 8192), (0, 20000), (8192, 16384)):
                expected = SLOWER * seconds(counts, kind, stage, *span)
                assert seconds(scaled, kind, stage, *span) == pytest.approx(expected, rel=1e-9), (stage, kind, span)


def test_measured_bytes_scale_too():
    _, job = job_on(8)
    scaled, counts = Scaled(job, DEVICE).use(profiles_on(2, with_memory=True)), Analytic(job, DEVICE)
    for one, other in zip(scaled.stages, counts.stages, strict=True):
        expected = SAVED * other.footprint.saved_bytes_per_token
        assert one.footprint.saved_bytes_per_token == pytest.approx(expected, rel=1e-3)
        assert one.footprint.forward_bytes_per_token == other.footprint.forward_bytes_per_token
        assert one.footprint.window_bytes_per_token == other.footprint.window_bytes_per_token


def test_what_cannot_be_scaled_is_refused():
    _, job = job_on(8)
    profiles = profiles_on(2)
    for left_out in profiles:
        some = {which: profile for which, profile in profiles.items() if which != left_out}
        with pytest.raises(ValueError, match="one with the head; there is .*attention.*: run stateflow plan for two"):
            Scaled(job, DEVICE).use(some)


def cache_of(path: Path, device: str = "NVIDIA H200", **changed) -> Cache:
    config, job = job_on(2)
    cache = Cache(path)
    for number, (which, profile) in enumerate(profiles_on(2).items()):
        key = f"{device}{number}"
        cache.describe(key, {**key_facts(config, job, which, False), "device": device, "torch": "2.11", **changed})
        for point in profile.points:
            cache.put(key, point)
    return cache


def test_a_cache_says_what_it_holds(tmp_path):
    cache_of(tmp_path / "cache.json", recompute="none")
    config, job = job_on(8)
    facts = key_facts(config, job, None, False)
    with pytest.raises(ValueError, match="no stages measured for .*recompute = full.*; it has recompute = none: run"):
        measured_stages(Cache(tmp_path / "cache.json"), facts)
    cache_of(tmp_path / "cache.json")
    profiles, where = measured_stages(Cache(tmp_path / "cache.json"), facts)
    assert where == "NVIDIA H200, torch 2.11" and set(profiles) == set(profiles_on(2))
    assert all(len(profile.points) == 7 for profile in profiles.values())
    # Where all stages are measured; of equals one and the same.
    cache = cache_of(tmp_path / "cache.json", device="NVIDIA A100")
    (which, profile), *_ = profiles_on(2).items()
    cache.describe("one stage", {**key_facts(config, job, which, False), "device": "Z", "torch": "3"})
    for point in profile.points:
        cache.put("one stage", point)
    assert measured_stages(Cache(tmp_path / "cache.json"), facts)[1] == "NVIDIA H200, torch 2.11"


def test_plan_keeps_in_words_what_it_measures(tmp_path):
    config, job = job_on(2)
    found, _ = variants(
        job, lambda count: part_names(config, count), ["1f1b"], ["full"], stages_are_set=False,
        misfit=lambda splits, mode: None,
    )  # fmt: skip
    cache = Cache(tmp_path / "cache.json")
    kinds = Profiler(config, None, cache, None).kinds(found[0])
    described = Cache(tmp_path / "cache.json").described()
    assert set(described) == {key for _, (key, _, _) in kinds}
    for same, (key, _, _) in kinds:
        assert described[key]["stage"] == [list(same[0]), same[1], same[2]]
        assert described[key]["recompute"] == "full" and described[key]["device"] == "CPU"


SHORT = ["--tokens", "8192", "--num-chunks", "2", "4", "--skew", "0", "0.75", "--stateflow.num_chunks=4"]


def test_counted_tables_are_marked_and_stand_beside_the_papers(capsys, tmp_path):
    out = tmp_path / "tables.md"
    call = ["predict", str(HYBRID), "--tokens", "65536", "--microbatches", "4", "--num-chunks", "8", "--skew", "0.75"]
    assert main([*call, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text == out.read_text()
    assert "gdn_3b_hybrid: costs **counted, nothing measured**: FLOPs at assumed shares of the A100's peak" in text
    step, row = [line for line in text.splitlines() if line.startswith("| gdn_3b_hybrid")]
    assert step.startswith("| gdn_3b_hybrid | full | 65,536 | 4 | ") and "| 8, 0.75 |" in step
    assert row.startswith("| gdn_3b_hybrid | 65,536 | 4 | ") and "| 8, 0.75 |" in row
    assert "| 2.02x / 2.01x |" in row and row.endswith("| 1.47x / 1.25x |")
    assert "Hybrids (table 3)" in text and "table 2" not in text and "beside measured runs" not in text


def test_measured_tables_and_the_simulators_error(capsys, tmp_path):
    cache_of(tmp_path / "cache.json")
    call = ["predict", str(HYBRID), "--cache", str(tmp_path / "cache.json"), *SHORT, "--microbatches", "4"]

    def figures(*more: str) -> dict:
        assert main([*call, "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)

    found = figures("--ranks", "2")
    assert found["costs"]["gdn_3b_hybrid"].startswith("measured on NVIDIA H200, torch 2.11: stages of embedding + ")
    (two,) = found["settings"]
    # Runs on two ranks that took a tenth longer than simulated, one that failed, and whole sequences that did not.
    plan = job_on(2)[1].plan(two["num_chunks"], two["skew"])
    common = {"seq_len": 8192, "microbatches": 4, "peak_gib": [30.0, 40.0], "error": ""}
    rows = [
        {**common, "name": "1F1B", "chunks": [], "seconds": [two["whole_seconds"]] * 3},
        {**common, "name": "chunks", "chunks": plan.lengths, "seconds": [1.1 * two["seconds"]] * 3},
        {**common, "name": "failed", "chunks": plan.lengths, "seconds": [], "error": "out of memory"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = figures("--rows", f"gdn_3b_hybrid={path}")
    assert [(c["name"], c["ranks"]) for c in found["measured"]] == [("1F1B", 2), ("chunks", 2)]
    assert [c["error"] for c in found["measured"]] == pytest.approx([0.0, 1 / 1.1 - 1], abs=1e-6)
    assert found["settings"][0]["ranks"] == 8 and found["settings"][0]["speedup"] > two["speedup"]

    assert main([*call, "--rows", f"gdn_3b_hybrid={path}"]) == 0
    text = capsys.readouterr().out
    assert "mean error 4.5%, worst 9.1%. Speed-up over whole sequences: mean error 10.0%, worst 10.0%." in text
    assert "| gdn_3b_hybrid | 8,192 | 2 | 4 | chunks |" in text and "| -9.1% | 40.0 |" in text


def test_steps_in_each_recomputation_mode(capsys, tmp_path):
    """The config's own mode and others that the cache holds, with rates, MFU and each rank's memory."""
    for mode, slower in (("full", 1.0), ("none", 0.75)):
        config, job = job_on(2)
        job, cache = job.with_recompute(mode), Cache(tmp_path / "cache.json")
        for number, (which, profile) in enumerate(profiles_on(2).items()):
            cache.describe(f"{mode}{number}", {**key_facts(config, job, which, False), "device": "H200", "torch": "2"})
            for p in profile.points:
                cache.put(f"{mode}{number}", dataclasses.replace(p, backward=slower * p.backward))
    call = ["predict", str(HYBRID), "--cache", str(tmp_path / "cache.json"), *SHORT, "--ranks", "2", "--microbatches"]
    call += ["1", "4", "--recompute", "full", "none"]
    assert main([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["settings"]
    assert [(p["recompute"], p["microbatches"]) for p in found] == [("full", 1), ("full", 4), ("none", 1), ("none", 4)]
    for full, none in itertools.product(found[:2], found[2:]):
        if full["microbatches"] == none["microbatches"]:
            assert none["seconds"] < full["seconds"] and none["peak_bytes"] > full["peak_bytes"]
    _, job = job_on(2)
    for p in found:
        assert p["rate"] == pytest.approx(8192 * p["microbatches"] / p["seconds"] / 2)
        assert p["mfu"] == pytest.approx(p["rate"] * flops_per_token(job.model, 8192) / DEVICE.flops)
        assert p["whole_mfu"] * p["whole_seconds"] == pytest.approx(p["mfu"] * p["seconds"])
        assert len(p["rank_bytes"]) == 2 and max(p["rank_bytes"]) == p["peak_bytes"] and 0 < p["bubble"] < 1
    assert main(call) == 0
    text = capsys.readouterr().out
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| gdn_3b_hybrid")]
    assert [row[1] for row in rows] == ["full", "full", "none", "none"] and "Beside the paper" not in text
    for row, p in zip(rows, found, strict=True):
        assert row[7:11] == [
            f"{p['num_chunks']}, {p['skew']:g}", f"{p['seconds']:.3f}", f"{p['rate']:,.0f}", f"{100 * p['mfu']:.1f} %"
        ]  # fmt: skip
    assert main([*call, "--memory", "20"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| gdn_3b_hybrid")]
    assert all("| OOM | - | (" in row and "| nothing fits | - | - | - | - | - | - | - |" in row for row in rows)


def test_layers_in_cuda_graphs_are_another_measurement(tmp_path, capsys):
    config, job = job_on(2)
    recorded = copy.deepcopy(config)
    recorded.stateflow.cuda_graphs = True
    facts, eager = key_facts(recorded, job, None, False), key_facts(config, job, None, False)
    assert not key_facts(recorded, job.with_recompute("none"), None, False)["cuda_graphs"]  # has no recorded layers
    path = tmp_path / "cache.json"
    cache = cache_of(path, cuda_graphs=True)
    where = measured_stages(cache, facts)[1]
    assert without_graphs(cache, facts, where) is None
    with pytest.raises(ValueError, match="it has cuda_graphs = True"):
        measured_stages(cache, eager)

    # Without graphs long chunks are faster, short ones slower, and all that a layer works in is counted.
    for number, (which, profile) in enumerate(profiles_on(2, with_memory=True).items()):
        cache.describe(f"eager{number}", {**eager, "stage": which, "device": "NVIDIA H200", "torch": "2.11"})
        for p in profile.points:
            slower = 0.95 if p.length > 1024 else 2.0
            times = dict(forward=slower * p.forward, backward=slower * p.backward)
            cache.put(f"eager{number}", dataclasses.replace(p, **times))
    assert without_graphs(cache, facts, where) == measured_stages(cache, eager)[0] != measured_stages(cache, facts)[0]
    assert without_graphs(cache, facts, "NVIDIA A100, torch 2.11") is None  # times of two GPUs are not compared
    call = ["predict", str(HYBRID), "--cache", str(path), "--tokens", "8192", "--microbatches", "4", "--ranks", "2"]
    call += ["--stateflow.num_chunks=4", "--skew", "0", "--num-chunks"]

    def only(*more: str) -> dict:
        assert main([*call, *more, "--json"]) == 0
        (one,) = json.loads(capsys.readouterr().out)["settings"]
        return one

    long, short, plain = only("4", "--stateflow.cuda_graphs"), only("8", "--stateflow.cuda_graphs"), only("8")
    assert (long["graphs"], short["graphs"], plain["graphs"]) == (False, True, False)
    assert short["seconds"] < 0.6 * plain["seconds"] and long["whole_seconds"] == plain["whole_seconds"]
    assert short["rank_bytes"] == plain["rank_bytes"]
    assert main([*call, "8", "--stateflow.cuda_graphs"]) == 0
    assert "| 8, 0, graphs |" in capsys.readouterr().out

    for about in cache.points.values():  # a file of before these were told apart
        about.pop("cuda_graphs", None)
    assert measured_stages(cache, eager)


def test_graphs_and_memory_may_be_of_other_numbers_of_ranks():
    """Bytes of the very stages, measured without graphs, are taken where times are scaled from other ones."""
    _, job = job_on(2)
    eager = profiles_on(2, with_memory=True)
    scaled = Scaled(job, DEVICE).use(profiles_on(4), eager, recorded=True)
    expected = Scaled(job, DEVICE).use(eager)
    assert [stage.footprint for stage in scaled.stages] == [stage.footprint for stage in expected.stages]


def test_memory_of_backwards_is_a_line():
    """The head's gradient does not grow with the chunk: it is not taken for more where chunks are longer."""
    _, job = job_on(2)
    stage = Analytic(job, DEVICE).stages[1]
    points = tuple(Point(4096, n, 1.0, 1.0, None, 1000 * n, 20 * n, 5000 + 300 * n) for n in (512, 1024, 2048))
    for kept in (points, points[:1]):
        footprint = with_measured_memory(stage, StageProfile(kept, ())).footprint
        for p in kept:
            assert footprint.while_running(Kind.B, p.length) == pytest.approx(p.backward_bytes, abs=p.length)
            assert footprint.while_running(Kind.F, p.length) >= p.forward_bytes
    assert footprint.working_bytes == 0
    # A chunk at 0 allocates the window of the whole sequence, too.
    at_the_start = tuple(dataclasses.replace(p, start=0, saved_bytes=9000 * p.length) for p in points)
    found = with_measured_memory(stage, StageProfile((*points, *at_the_start), ()))
    assert found.footprint == with_measured_memory(stage, StageProfile(points, ())).footprint
    steeper = tuple(dataclasses.replace(p, backward_bytes=p.length**2) for p in points)
    footprint = with_measured_memory(stage, StageProfile(steeper, ())).footprint
    assert footprint.working_bytes == 0 and footprint.backward_bytes_per_token == 2048  # no less than nothing
    # In a graph next to nothing is seen: what is counted is needed all the same.
    hidden = tuple(dataclasses.replace(p, forward_bytes=0, backward_bytes=5000) for p in points)
    seen, counted = (with_measured_memory(stage, StageProfile(hidden, ()), r).footprint for r in (False, True))
    assert seen.backward_bytes_per_token == 0 and seen.working_bytes == counted.working_bytes == 5000
    assert counted.backward_bytes_per_token == stage.footprint.backward_bytes_per_token > 0
    assert counted.forward_bytes_per_token == stage.footprint.forward_bytes_per_token > 0
    assert counted.saved_bytes_per_token == seen.saved_bytes_per_token


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cache", "nowhere.json"], "--cache nowhere.json: no such file; stateflow plan writes it"),
        (["--rows", "gdn_3b_hybrid=nowhere"], "--rows nowhere: cannot be read"),
        (["--rows", f"gdn_3b_hybrid={os.devnull}"], f"--rows {os.devnull}: has no rows; give what bench"),
        (["--microbatches", "0"], "--microbatches 0: the least is 1"),
        (["--device", "abacus"], "--device abacus: unknown; there are h200"),
    ],
)
def test_refusals(more, message, capsys):
    assert main(["predict", str(HYBRID), *SHORT, *more]) == 2
    assert message in capsys.readouterr().err


def test_rows_of_another_kind_are_refused(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"name": "whole", "error": ""}\n')
    assert main(["predict", str(HYBRID), *SHORT, "--rows", f"gdn_3b_hybrid={path}"]) == 2
    assert "a row has no seconds, seq_len, microbatches, chunks, peak_gib; give what" in capsys.readouterr().err


def test_the_papers_figures():
    best = max(one.speedup for t in paper.TABLES.values() for entries in t.values() for one in entries if one.whole)
    assert best == pytest.approx(2.22, abs=5e-3)
    assert paper.published("gdn_3b", 131072, 16, 8)[0].chunks == (44.2, 46.5)
    assert paper.published("mamba3_3b", 131072, 4, 8)[0].speedup is None
    assert paper.published("gdn_3b", 65536, 4, 2) is None and paper.published("demo", 65536, 4, 8) is None


def test_errors_of_speed_ups_compare_equal_settings_only():
    def check(name: str, tokens: int, error: float) -> Check:
        return Check("gdn_3b", tokens, 4, 2, name, 1.0, 1.0 + error, 1.0, 1.0)

    assert "Speed-up" not in error_text([check("1F1B", 1, 0.1), check("N=4", 2, 0.0)])
    assert "mean error 10.0%, worst 10.0%." in error_text([check("1F1B", 1, 0.1), check("N=4", 1, 0.0)])
