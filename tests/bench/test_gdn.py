"""`stateflow bench gdn` without a GPU: who may be timed, how processes meet, the report, the command line."""

import json
import os
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stateflow.bench import processes, shares, worker
from stateflow.bench.contestants import OURS, SERIAL, Absent, Contestant
from stateflow.bench.gdn_contestants import ANY_ORDER, DEFAULT, SERIAL_64, SUBJECT
from stateflow.bench.gdn_report import render
from stateflow.bench.measure import Timing, read_rows
from stateflow.bench.worker import Parity, Spec, done_path, go_path, sample_path, warm_path
from stateflow.cli import build_parser, main
from stateflow.recurrence import gated_delta_rule
from stateflow.recurrence.self_check import NAMES
from stateflow_kernels.plan_table import Shape, from_json, to_json
from stateflow_kernels.primitives import INTERPRETED
from tests.bench.bench_testing import CPU, FIGURES, rows_of_worker, without_a_device

SHAPE = Shape("gated_delta_rule", 2, 2, 32, 32, "float16", 1, 130)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


def reference(q, k, v, g, beta, initial_state, **options):
    assert options.pop("output_final_state") and options.pop("use_qk_l2norm_in_kernel")
    return gated_delta_rule(q, k, v, g, beta, initial_state, backend="chunk", use_qk_l2norm_in_kernel=True)


def without_state(q, k, v, g, beta, initial_state, **options):
    return reference(q, k, v, g, beta, 0 * initial_state, **options)


@pytest.fixture
def install(monkeypatch):
    """Puts a function in the place of FLA."""

    def put(op):
        for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = op

    return put


@pytest.fixture
def work(tmp_path, monkeypatch):
    without_a_device(monkeypatch, SUBJECT)
    return tmp_path


def rows_of(group: str, work: Path, shapes=(SHAPE,)) -> list[dict]:
    return rows_of_worker(SUBJECT, group, work, shapes)


@interpreted
def test_ours_then_a_peer(work, install):
    ours = rows_of(OURS, work)
    assert [row["contestant"] for row in ours] == [OURS, SERIAL, DEFAULT, SERIAL_64]
    assert all(row["forward"]["median"] == 1.0 and not row["tuned"] for row in ours)
    assert ours[0]["agreement"] is None and ours[0]["plan"] and ours[0]["plan_source"] == "default"
    assert set(ours[1]["agreement"].values()) == {0.0}, "the same plan"
    assert all(0 < error < 5e-3 for row in ours for error in row["errors"].values())
    assert sample_path(work, SHAPE).exists()
    install(reference)
    (row,) = rows_of("fla", work)
    assert row["contestant"] == "fla" and "failed" not in row
    assert row["agreement"].keys() == row["errors"].keys() == set(NAMES)
    assert 0 < max(row["agreement"].values()) < 5e-3


def test_a_worker_that_is_warm_waits_for_the_others(work, install, monkeypatch):
    install(reference)
    done_path(work).touch()
    rows, timed = work / "fla.jsonl", []
    monkeypatch.setattr(worker, "measure", lambda *_: timed.append(go_path(work).exists()) or FIGURES)

    def sleep(seconds: float) -> None:
        assert warm_path(work, "fla").exists()
        go_path(work).touch()

    monkeypatch.setattr(worker.time, "sleep", sleep)
    worker.Worker(Spec(SUBJECT.name, "fla", (SHAPE,), str(rows), str(work), 10, "fla", (SHAPE,)), CPU).run()
    assert timed == [True] and [row["contestant"] for row in read_rows(rows)] == ["fla"]


def test_walks_in_segments_take_part_where_they_are_used():
    few, many = (Shape("gated_delta_rule", n, n, 128, 128, "bfloat16", 1, 32768) for n in (8, 20))
    assert [c.name for c in SUBJECT.contestants(OURS, many, CPU)] == [OURS, SERIAL, DEFAULT, SERIAL_64]
    *_, in_segments = SUBJECT.contestants(OURS, few, CPU)
    assert in_segments.name == ANY_ORDER and in_segments.plan.num_segments == 8


def test_a_wrong_peer_is_not_timed(work, install):
    done_path(work).touch()
    install(without_state)
    (row,) = rows_of("fla", work)
    assert row["failed"].startswith("ValueError: differs from float64: o ") and "forward" not in row


def test_a_peer_that_disagrees_at_the_timed_shape_is_not_timed(work, install):
    torch.save({name: torch.zeros(()) for name in NAMES}, sample_path(work, SHAPE))
    install(reference)
    (row,) = rows_of("fla", work)
    assert row["failed"].startswith("disagrees with ours: o ") and "forward" not in row
    assert row["errors"]["o"] < 1e-3


def test_a_peer_that_fails_or_lacks_memory_is_a_row(work, install):
    done_path(work).touch()

    def fails_when_long(q, *args, **options):
        if q.shape[1] == 300:
            raise torch.OutOfMemoryError("too much")
        if q.shape[1] == 200:
            raise RuntimeError("a long story\nno such kernel")
        return reference(q, *args, **options)

    install(lambda q, **options: fails_when_long(q, **options))
    shapes = [from_json(Shape, to_json(SHAPE) | {"tokens": n}) for n in (300, 200, 100)]
    rows = rows_of("fla", work, shapes)
    assert {row["tokens"]: row.get("failed", "timed") for row in rows} == {
        300: "out of memory", 200: "RuntimeError: a long story\nno such kernel", 100: "timed"
    }  # fmt: skip


def test_absent_peers_are_skipped_with_a_word(work, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    (row,) = rows_of("fla", work)
    assert row["skipped"].startswith("fla.ops.gated_delta_rule cannot be imported (")
    with pytest.raises(Absent, match="128 x 128 only"):
        SUBJECT.contestants("flashqla", SHAPE, CPU)


def test_flashqla_runs_with_its_split_and_without(work, monkeypatch):
    splits = []

    def op(q, k, v, g, beta, scale=None, initial_state=None, *, auto_cp, **options):
        assert scale is None and g.dtype == beta.dtype == initial_state.dtype == torch.float32
        splits.append(auto_cp)
        return reference(q, k, v, g, beta, initial_state, **options)

    module = types.ModuleType("flash_qla")
    module.chunk_gated_delta_rule = op
    monkeypatch.setitem(sys.modules, "flash_qla", module)
    done_path(work).touch()
    rows = rows_of("flashqla", work, [replace(SHAPE, k_dim=128, v_dim=128)])
    assert [row["contestant"] for row in rows] == ["flashqla", "flashqla, no split"]
    assert not any("failed" in row for row in rows) and set(splits) == {True, False}


def test_parity_is_computed_once_for_all_lengths(monkeypatch):
    calls = []

    def call(*inputs):
        calls.append(inputs[0].shape[1])
        return gated_delta_rule(*inputs, backend="chunk", use_qk_l2norm_in_kernel=True)

    monkeypatch.setattr(SUBJECT, "parity_tokens", 70)
    parity, contestant = Parity(SUBJECT, CPU), Contestant("x", call)
    first = parity.errors(contestant, SHAPE)
    longer = parity.errors(contestant, from_json(Shape, to_json(SHAPE) | {"tokens": 999}))
    assert first is longer and calls == [70]


def test_shares_of_the_variants_to_compile():
    variants = list(range(27))
    found = [shares.share_of(variants, i, 12) for i in range(12)]
    assert sorted({x for share in found for x in share}) == variants and min(map(len, found)) > 1
    assert [shares.share_of([1, 2, 3], i, 12) for i in (0, 2, 10)] == [[1, 2], [3, 1], [2, 3]]
    assert shares.share_of([1], 1, 12) == [1] and shares.share_of([], 1, 12) == []


def test_variants_of_a_library_are_compiled_once_for_all_its_processes(tmp_path, monkeypatch, capfd):
    """Of the processes that are started each says what it got; one fails, and the benchmark goes on."""
    two_sizes = [SHAPE, replace(SHAPE, tokens=70), replace(SHAPE, k_dim=64)]
    program = "import json, sys; job = json.loads(sys.argv[-1]); print(job['index'], job['count'], len(job['shapes']))"
    program += "; sys.exit(job['index'])"
    popen = shares.subprocess.Popen
    monkeypatch.setattr(
        shares.subprocess, "Popen", lambda command: popen([sys.executable, "-c", program, command[-1]])
    )
    monkeypatch.setattr(shares.os, "cpu_count", lambda: 5)
    for _ in range(2):
        shares.compile_at_once("gdn", "fla", two_sizes, "fla", tmp_path)
    *told, summary = sorted(capfd.readouterr().out.splitlines())
    assert told == ["0 1 1", "0 2 2", "1 2 2"] and summary.endswith("with 3 processes, failed: [2]")


def test_a_share_times_nothing_and_keeps_no_choice(monkeypatch):
    import triton

    class Fake:
        def contestants(self, group, shape, device):
            return [types.SimpleNamespace(results=lambda *inputs: calls.append((inputs, tuner.configs)))]

        def random_inputs(self, shape, num_tokens, device):
            return shape, num_tokens

    calls, tuner = [], types.SimpleNamespace(configs=[1, 2, 3, 4, 5], cache_results=True)
    monkeypatch.setattr("stateflow.bench.contestants.subject_named", lambda name: Fake())
    monkeypatch.setattr(shares, "tuners", lambda package: [tuner])
    monkeypatch.setattr(triton.testing, "do_bench", None)
    memory = types.SimpleNamespace(total_memory=140 * 2**30)
    for name, value in dict(current_device=0, get_device_properties=memory, synchronize=None, empty_cache=None).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    (job, _) = shares.jobs([SHAPE], 2)
    shares.main(json.dumps(dict(benchmark="gdn", group="fla", package="fla", processes=2) | job))
    short = replace(SHAPE, tokens=shares.SHORT)
    assert calls == [((short, short.tokens), [1, 3, 5]), ((SHAPE, SHAPE.tokens), [1, 3, 5])]
    assert not tuner.cache_results
    seen = []
    assert triton.testing.do_bench(lambda: seen.append(1), quantiles=(0.5,)) == [0.0] * 3 and seen == [1]


def test_processes_are_shared_out_among_heads_and_sizes():
    shapes = [SHAPE, replace(SHAPE, tokens=500), replace(SHAPE, num_heads=8)]
    found = [(len(job["shapes"]), job["index"], job["count"]) for job in shares.jobs(shapes, 5)]
    assert found == [(2, 0, 3), (1, 0, 2), (2, 1, 3), (1, 1, 2), (2, 2, 3)]
    assert [(len(job["shapes"]), job["index"], job["count"]) for job in shares.jobs(shapes, 1)] == [(3, 0, 1)]


def test_kernels_that_tune_themselves_are_found(monkeypatch):
    import triton

    def body(x):
        pass

    tuner = triton.runtime.autotuner.Autotuner(
        triton.JITFunction(body), ["x"], [triton.Config({}, num_warps=n) for n in (1, 2, 4, 8)], [], None, None
    )
    module = types.ModuleType("fla.ops.something")
    module.kernel, module.same, module.other = triton.runtime.autotuner.Heuristics(tuner, ["x"], {}), tuner, body
    monkeypatch.setitem(sys.modules, "fla.ops.something", module)
    monkeypatch.setitem(sys.modules, "flat", types.SimpleNamespace(kernel=tuner))
    assert shares.tuners("fla") == [tuner]
    long = [replace(SHAPE, tokens=n) for n in (10_000, 100_000, 200_000)]
    short = replace(SHAPE, tokens=shares.SHORT)
    assert shares.lengths_that_fit(long, 32 * 2**20) == [short, long[0]]


def test_specs_are_files():
    spec = Spec("gdn", "fla", (SHAPE,), "rows", "work", 10, "fla-2", (SHAPE,), ("serial",))
    assert from_json(Spec, json.loads(json.dumps(to_json(spec)))) == spec


def options(*args: str):
    return build_parser().parse_args(["bench", "gdn", *args])


def test_shapes(monkeypatch):
    shapes = processes.shapes_of(SUBJECT, [20, 10], [8192, 65536], [(128, 128), (96, 192)], "bfloat16", (12, 16384))
    assert len(shapes) == 9 and shapes[-1].num_heads == 12 and shapes[-1].k_dim == 128
    assert options().untuned == (12, 16384) and options("--untuned", "none").untuned is None
    assert options("--peers").peers == [] and options("--dims", "64x32").dims == [(64, 32)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "3"], "--runs 3: a median needs 10 or more"),
        (["--peer-tokens", "4096"], "is not among ours"),
        (["--shapes", "20x8192", "--peer-heads", "10"], "they leave the peers none of --shapes"),
        (["--ours", "walks", "all"], "--ours all: choose from serial, default, serial-64, any-order, walks"),
        (["--dims", "12x128"], "K must be a multiple of 8"),
        ([], "stateflow bench measures on a CUDA device and there is none here"),
    ],
)
def test_wrong_calls(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gdn", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_peer_path_must_be_a_folder(capsys):
    for value in ("fla=/no/such/folder", "flo=/", "/tmp"):
        with pytest.raises(SystemExit):
            options("--peer-path", value)
    assert "/no/such/folder" in capsys.readouterr().err


def test_a_peers_folder_comes_first_in_its_process_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    paths = processes.worker_env(tmp_path, {})["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(tmp_path) and paths[-1] == "/elsewhere"
    assert any((Path(p) / "stateflow").is_dir() for p in paths)
    assert processes.worker_env(None, SUBJECT.environment["fla"])["FLA_TILELANG"] == "0"
    own = processes.worker_env(None, {})
    assert str(tmp_path) not in own["PYTHONPATH"] and "FLA_TILELANG" not in own


def test_a_process_that_dies_or_takes_too_long_is_a_row(tmp_path, monkeypatch, capsys):
    def start(group: str, program: str) -> processes.Process:
        spec = Spec("gdn", group, (SHAPE,), str(tmp_path / "rows"), str(tmp_path), 10)
        monkeypatch.setattr(processes.sys, "executable", "/bin/sh")
        command = tmp_path / f"{group}.sh"
        command.write_text(program)
        popen = processes.subprocess.Popen
        monkeypatch.setattr(processes.subprocess, "Popen", lambda _, **kw: popen(["/bin/sh", str(command)], **kw))
        process = processes.Process(SUBJECT, spec, None)
        monkeypatch.setattr(processes.subprocess, "Popen", popen)
        return process

    start("fla", "echo told; exit 3").wait(60)
    slow = start("flashqla", "exec sleep 60")
    slow.wait(0.2)
    assert slow.process.poll() is not None
    failed = {row["contestant"]: row["failed"] for row in read_rows(tmp_path / "rows")}
    assert failed == {
        "fla": "the process fla-2-32x32 ended with status 3",
        "flashqla": "the process flashqla-2-32x32 was stopped after 0 s",
    }
    assert "told" in capsys.readouterr().out


@pytest.fixture
def no_processes(monkeypatch, tmp_path):
    """What `bench gdn` starts and in which order, without starting it."""
    log = []

    class Fake:
        def __init__(self, subject, spec, path):
            self.group, self.rows, self.work = spec.group, Path(spec.rows), Path(spec.work)
            self.name, self.asked = spec.group, 0
            log.append((self.group, path, [(shape.num_heads, shape.tokens) for shape in spec.shapes]))
            log.extend([("choices", spec.choices)] if spec.choices else [])

        def is_warm(self):
            assert not go_path(self.work).exists()
            self.asked += 1
            return self.asked > 2

        def wait(self, seconds, end):
            assert go_path(self.work).exists()
            assert done_path(self.work).exists() == (self.group != OURS), "peers may wait for ours until it ends"
            log.append(("wait", self.group, seconds))
            if self.group == OURS:
                self.rows.write_text("".join(json.dumps(row) + "\n" for row in report_rows()))

        def end(self):
            log.append(("end", self.group))

    monkeypatch.setattr(processes, "Process", Fake)
    monkeypatch.setattr(processes, "require_cuda", lambda what: None)
    monkeypatch.setenv("STATEFLOW_PLAN_TABLE", "")

    def tune(shapes, table, seconds, turns):
        log.append(("tune", [(s.num_heads, s.k_dim, s.tokens) for s in shapes], seconds))
        table.write_text("{}")
        raise RuntimeError("the device broke")

    monkeypatch.setattr("stateflow.planning.kernel_tuning.run", tune)
    return log


def test_the_order_of_things(no_processes, tmp_path, capsys):
    arguments = ["--heads", "20", "10", "--tokens", "8192", "65536", "--dims", "128x128", "--untuned", "12x4096"]
    arguments += ["--peers", "fla", "--peer-path", f"fla={tmp_path}", "--peer-untuned", "--peer-timeout", "60"]
    arguments += ["--tune", str(tmp_path / "table"), "--tune-heads", "10", "--markdown", str(tmp_path / "table.md")]
    assert main(["bench", "gdn", *arguments]) == 0
    both = [(20, 8192), (20, 65536), (10, 8192), (10, 65536)]
    assert no_processes == [
        *[("fla", tmp_path, sorted(both[i : i + 2], reverse=True)) for i in (0, 2)],
        ("fla", tmp_path, [(12, 4096)]),
        ("tune", [(10, 128, 8192), (10, 128, 65536)], None),
        (OURS, None, [*both, (12, 4096)]),
        ("choices", tuple(SUBJECT.choices)),
        ("wait", OURS, None),
        *[("wait", "fla", 60.0)] * 3,
        *[("end", "fla")] * 3,
        ("end", OURS),
    ]
    assert os.environ["STATEFLOW_PLAN_TABLE"] == str(tmp_path / "table")
    assert "ours / FLA" in (tmp_path / "table.md").read_text()
    assert "the device broke" in capsys.readouterr().err


def test_shapes_one_by_one_and_less_of_ours(no_processes, tmp_path):
    arguments = ["--shapes", "8x65536", "10x16384", "8x16384", "20x16384x96x192", "--untuned", "12x16384"]
    arguments += ["--peers", "fla", "--peer-heads", "8", "20", "--peer-untuned", "--ours", "any-order"]
    arguments += ["--tune", str(tmp_path / "table"), "--tune-dims", "128x128", "--time-limit", "240"]
    assert main(["bench", "gdn", *arguments]) == 0
    assert no_processes[:6] == [
        ("fla", None, [(8, 65536), (8, 16384)]),
        ("fla", None, [(20, 16384)]),
        ("fla", None, [(12, 16384)]),
        ("tune", [(8, 128, 65536), (10, 128, 16384), (8, 128, 16384)], None),
        (OURS, None, [(8, 65536), (10, 16384), (8, 16384), (20, 16384), (12, 16384)]),
        ("choices", ("any-order",)),
    ]


# In the place of a worker: compiles for as long as it has heads, waits for its turn, and writes a row; or never ends.
WORKER = """
import json, sys, time
from pathlib import Path
spec = json.loads(Path(sys.argv[-1]).read_text())
work, heads = Path(spec["work"]), spec["shapes"][0]["num_heads"]
def row(**more):
    with open(spec["rows"], "a") as file:
        file.write(json.dumps(dict(kind="walk", contestant=spec["name"], at=time.time(), **more)) + chr(10))
time.sleep(0.2 * heads)
row(what="warm")
(work / (spec["name"] + ".warm")).touch()
while not (work / "go").exists():
    time.sleep(0.01)
row(what="timed")
if heads == 3:
    print("hangs", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def other_workers(monkeypatch):
    popen = processes.subprocess.Popen
    monkeypatch.setattr(
        processes.subprocess, "Popen", lambda command, **kw: popen([sys.executable, "-c", WORKER, command[-1]], **kw)
    )
    monkeypatch.setattr(processes, "require_cuda", lambda what: None)
    monkeypatch.setattr("stateflow.bench.gdn.render", lambda rows: f"{len(rows)} rows")


def test_processes_are_timed_once_all_are_warm(other_workers, tmp_path, capsys):
    rows = tmp_path / "rows"
    arguments = ["--shapes", "1x8192", "2x8192", "8x8192", "--untuned", "none", "--peers", "fla", "--json", str(rows)]
    main(["bench", "gdn", *arguments])
    found = read_rows(rows)
    names = ["fla-1-128x128", "fla-2-128x128", "fla-8-128x128", OURS]
    assert sorted(row["contestant"] for row in found) == sorted(2 * names)
    times = {what: [row["at"] for row in found if row["what"] == what] for what in ("warm", "timed")}
    assert max(times["warm"]) < min(times["timed"])
    assert "warm after " in capsys.readouterr().out


def test_the_limit_of_time_ends_all_and_tells_what_is_there(other_workers, tmp_path, capsys):
    rows, began = tmp_path / "rows", time.monotonic()
    arguments = ["--shapes", "3x8192", "60x8192", "--untuned", "none", "--peers", "fla", "--json", str(rows)]
    assert main(["bench", "gdn", *arguments, "--warm-up", "1.5", "--time-limit", "3"]) == 1
    assert time.monotonic() - began < 20
    printed = capsys.readouterr().out
    assert "while these are not warm yet: fla-60-128x128" in printed and "hangs" in printed
    found = read_rows(rows)
    assert {row["contestant"] for row in found if row.get("what") == "timed"} == {"fla-3-128x128", OURS}
    stopped = {row["contestant"]: row["failed"] for row in found if row["kind"] == "process"}
    assert stopped.keys() == {OURS, "fla"} and "was stopped after 3 s" in stopped[OURS]
    assert printed.rstrip().endswith(f"{len(found)} rows")


def test_nothing_is_timed_before_all_are_warm(monkeypatch, capsys):
    def waits(*warm_at: float) -> float:
        now = [0.0]
        fakes = [types.SimpleNamespace(name=f"p{t}", is_warm=lambda t=t: now[0] >= t) for t in warm_at]
        monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(processes.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 1.0))
        processes._until_warm(fakes, 30.0)
        return now[0]

    assert waits() == 0 and waits(3, 7) == 7
    assert "not warm" not in capsys.readouterr().out
    assert waits(3, 70) == 30
    assert "warm after 30 s: what is timed is timed from here on, while these are not warm yet: p70" in (
        capsys.readouterr().out
    )


@interpreted
def test_chosen_variants_of_ours(work):
    few = replace(SHAPE, num_heads=2, k_dim=128, v_dim=128, dtype="bfloat16", tokens=32768)
    chosen = [c.name for c in SUBJECT.chosen(OURS, few, CPU, ["any-order", "serial-64"])]
    assert chosen == [OURS, SERIAL_64, ANY_ORDER]
    assert [c.name for c in SUBJECT.chosen(OURS, SHAPE, CPU, [])] == [OURS]
    spec = Spec("gdn", OURS, (SHAPE,), str(work / "rows"), str(work), 10, choices=("walks",))
    assert worker.Worker(spec, CPU).wants("parts")
    assert not worker.Worker(replace(spec, choices=("serial",)), CPU).wants("parts")


def test_what_is_compiled_before_ours_run(monkeypatch, tmp_path):
    """Of segments the walks with their maps; each kernel once."""
    few = replace(SHAPE, num_heads=8, num_key_heads=8, k_dim=128, v_dim=128, dtype="bfloat16", tokens=32768)
    found = []
    monkeypatch.setattr("stateflow.planning.kernel_bench.compile_jobs", lambda jobs, *_: found.extend(jobs))
    spec = Spec("gdn", OURS, (few, replace(few, tokens=65536)), "rows", str(tmp_path), 10, choices=("any-order",))
    SUBJECT.get_ready(spec, CPU)
    names = [(shape.segments, name) for shape, name, _ in found]
    assert len(names) == len(set(found)) and {shape.tokens for shape, *_ in found} == {1}
    others = ["out", "out_backward", "query_backward", "solve_backward", "key_backward", "pre_backward"]
    walks = [(n, name) for n in (1, 8) for name in ("transition", "transition_backward")]
    assert sorted(names) == sorted([(1, "pre"), *((1, name) for name in others), *walks])
    found.clear()
    SUBJECT.get_ready(replace(spec, choices=("walks",)), CPU)
    assert len(found) == 9 + 6


def report_rows() -> list[dict]:
    plan = to_json(SUBJECT.contestants(OURS, SHAPE, CPU)[0].plan)
    sizes = dict(heads=20, tokens=8192, k_dim=128, v_dim=128)
    common = dict(kind="time", **sizes, errors={"o": 1e-3}, versions={"triton": "3.6.0"})
    slow = FIGURES | {"backward": Timing(5.0, 5.0, 5.0, 15).json(), "backward_device": Timing(3.0, 3.0, 3.0, 15).json()}
    return [
        {**common, **FIGURES, "contestant": OURS, "plan": plan, "tuned": True},
        {**common, **slow, "contestant": SERIAL, "plan": plan, "tuned": True},
        {**common, **slow, "contestant": "fla", "versions": {"triton": "3.7.1"}},
        {**common, **FIGURES, "contestant": OURS, "plan": plan, "tuned": False, "tokens": 4096},
        {**common, "contestant": "flashqla", "failed": "out of memory"},
        dict(kind="process", contestant="flashqla", failed="stopped after 60 s"),
        dict(kind="walk", kernel="transition", tile={"block_v": 16}, time=Timing(0.5, 0.5, 0.5, 15).json(), **sizes),
        dict(kind="walk", kernel="transition", tile={"block_v": 64}, failed="no room", **sizes),
    ]


def test_the_report():
    text = render(report_rows())
    assert "| 20 | 8,192 | 128 x 128 | 1.000 / 2.000* | 1.000 / 5.000* | 0.50 |  |" in text
    assert "| 20 | 4,096 | 128 x 128 | 1.000 / 2.000* |  |  | not tuned |" in text
    assert "| 0.900 / 1.000 | 0.900 / 3.000 | 0.49 |  |" in text, "the device alone"
    assert "| 2.05x |" in text, "the gain of overlap: the serial plan's time by the plan's"
    assert "* ours; ours, serial; flashqla: triton 3.6.0\n* fla: triton 3.7.1" in text
    assert "| ST, BV 16 | ST, BV 64 |" in text and "| 0.500 | failed |" in text
    assert "* flashqla, 20 heads of 128 x 128: out of memory (8,192 tokens)" in text
    assert "* flashqla: stopped after 60 s" in text
    assert "| 100 / 200 / 50 |" in text
    assert render([]) == ""


def test_rendering_again(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in report_rows()))
    assert main(["bench", "gdn", "--render", str(path), "--markdown", str(tmp_path / "table.md")]) == 0
    assert (tmp_path / "table.md").read_text() == capsys.readouterr().out
