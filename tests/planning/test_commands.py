"""``plan``, ``simulate``, ``draw`` as a user meets them, in this process."""

import json
import shlex
from pathlib import Path

import pytest

from stateflow.cli import main

CONFIGS = Path(__file__).parents[2] / "titan_configs"
DEMO = str(CONFIGS / "demo.toml")


def figures(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_analytic_plan_holds_every_cell(capsys):
    found = figures(capsys, "plan", DEMO, "--analytic", "--device", "cpu", "--microbatches", "3")
    cells = {(cell["num_chunks"], cell["skew"]): cell for cell in found["cells"]}
    skews = [0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0, 1.25]
    assert set(cells) == {(n, skew) for n in (1, 2, 4, 6, 8, 16, 32) for skew in skews}
    for (num_chunks, _), cell in cells.items():
        assert len(cell["lengths"]) == num_chunks and sum(cell["lengths"]) == 2048
        assert cell["step_time"] > 0 and 0 <= cell["bubble"] < 1 and len(cell["peak_bytes"]) == 2
    assert found["best"]["step_time"] == min(cell["step_time"] for cell in cells.values())


def test_the_papers_model_is_planned_without_its_machines(capsys):
    config = str(CONFIGS / "gdn_3b_hybrid_128k.toml")
    assert main(["plan", config, "--analytic", "--device", "a100", "--memory", "15", "--microbatches", "2"]) == 0
    text = capsys.readouterr().out
    assert "131072 tokens, PP8, 2 microbatches" in text and "A100: 312 TFLOP/s" in text
    assert "GiB of 15.0 GiB" in text and "times as fast as whole sequences" not in text  # N = 1 does not fit
    assert "best: num_chunks = " in text


def test_simulate(capsys, tmp_path):
    found = figures(capsys, "simulate", DEMO, "--ranks", "4", "--microbatches", "3", "--num-chunks", "2")
    assert found["lengths"] == [1024, 1024] and len(found["busy"]) == 4
    assert sum(found["lost"].values()) == pytest.approx(found["bubble"] + found["lost"]["chunk_overhead"])
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"F": [[1, 1]] * 4, "B": [[2, 2]] * 4}))
    found = figures(
        capsys, "simulate", DEMO, "--ranks", "4", "--microbatches", "3", "--num-chunks", "2", "--policy", "gpipe",
        "--cost-file", str(costs),
    )  # fmt: skip
    assert found["step_time"] == pytest.approx((3 + 3 / 2) * 6, rel=1e-3)


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_too_many_chunks_are_remarked(command, capsys):
    call = [command, str(CONFIGS / "gdn_3b.toml"), "--microbatches", "4", "--ranks", "3", "--device", "h200"]
    assert main([*call, "--training.seq-len=8192"]) == 0
    text = capsys.readouterr().out
    assert "of the step is overhead of 8 chunks, too short to cover the host's launches; take fewer: --num-" in text
    assert main([*call, "--training.seq-len=131072"]) == 0
    assert "note:" not in capsys.readouterr().out


def test_a_rank_without_layers_is_remarked(capsys):
    call = ["simulate", DEMO, "--ranks", "8"]
    assert main(call) == 0
    assert "note: stage 7 holds no layer but norm and output: [parallelism]" in capsys.readouterr().out
    assert main([*call, *SPREAD]) == 0
    assert "note: stage" not in capsys.readouterr().out


SPREAD = [
    "--parallelism.pipeline_parallel_first_stage_less_layers=0",
    "--parallelism.pipeline_parallel_last_stage_less_layers=0",
]


def test_compare_has_a_row_for_every_policy(capsys):
    from stateflow.pipeline.policies import POLICIES

    call = ["compare", DEMO, "--device", "h200", "--ranks", "4", "--microbatches", "4", "--num-chunks", "2", *SPREAD]
    rows = figures(capsys, *call)
    assert {(row["policy"], row["num_chunks"]) for row in rows} == {(p, n) for p in POLICIES for n in (1, 2)}
    by = {(row["policy"], row["num_chunks"], row["stages_per_rank"]): row for row in rows}
    assert by["1f1b", 2, 1]["in_flight"] == [5 / 2, 4 / 2, 3 / 2, 2 / 2]
    assert by["zero_bubble", 2, 1]["in_flight"] == [5 / 2] * 4
    for row in rows:
        assert row["step_time"] > 0 and len(row["peak_bytes"]) == 4
        shares = [share for cause, share in row["lost"].items() if cause != "chunk_overhead"]
        assert sum(shares) == pytest.approx(row["bubble"])
    assert main(call + ["--policies", "1f1b", "v_shape", "--no-whole"]) == 0
    assert "v_shape        2  2 " in capsys.readouterr().out


def test_compare_says_what_cannot_be_cut(capsys):
    call = ["compare", DEMO, "--ranks", "8", "--policies", "1f1b", "v_shape", "--no-whole", *SPREAD]
    plain, v_shape = figures(capsys, *call)
    assert plain["step_time"] > 0 and v_shape["step_time"] is None and "16" in v_shape["why_not"]


def table_of(tmp_path, policy="zero_bubble") -> tuple[Path, list[str]]:
    path = tmp_path / "mine.csv"
    assert main(["schedule", DEMO, "--policy", policy, "--num-chunks", "2", "--out", str(path)]) == 0
    return path, [f"--stateflow.schedule-file={path}", "--stateflow.num-chunks=2"]


def test_a_table_of_ones_own_is_a_row_like_its_policy(capsys, tmp_path):
    _, given = table_of(tmp_path)
    capsys.readouterr()
    rows = figures(capsys, "compare", DEMO, "--policies", "1f1b", "zero_bubble", "--no-whole", *given)
    assert [row["policy"] for row in rows] == ["1f1b", "zero_bubble", "zero_bubble", "mine.csv"]
    plain, split, mine = rows[0], rows[1], rows[3]
    assert mine | {"policy": "zero_bubble"} == split and mine["step_time"] != plain["step_time"]
    found = figures(capsys, "simulate", DEMO, *given)
    assert found["policy"] == "mine.csv" and found["step_time"] == pytest.approx(split["step_time"])
    for arguments, message in (
        (["simulate", "--num-chunks", "4"], "--num-chunks 4: the table of [stateflow] schedule_file is of 2 chunks"),
        (["simulate", "--microbatches", "3"], "--microbatches 3: the table of [stateflow] schedule_file is of 2"),
        (["plan", "--analytic"], "a plan searches orders: drop the key (--stateflow.schedule-file None)"),
    ):
        assert main([arguments[0], DEMO, *arguments[1:], *given]) == 2
        assert message in capsys.readouterr().err


def test_measured_rows(capsys, tmp_path, monkeypatch):
    """Each row trains with its own order, cut and stages; one that fails is a row, too."""
    from stateflow.commands import plan_verify
    from stateflow.pipeline.policies import build_schedule
    from stateflow.pipeline.simulator import simulate
    from stateflow.pipeline.trace import Trace
    from stateflow.titan.config import make_plan, num_stages
    from stateflow.titan.order import make_schedule
    from tests.titan.harness import parse_arguments

    _, given = table_of(tmp_path)
    ran = []

    def train(arguments, nproc, folder, timeout):
        config = parse_arguments(arguments)
        plan = make_plan(config)
        ran.append((config.stateflow.policy, plan.num_chunks, num_stages(config) // 2, timeout))
        if len(ran) == 2:
            return None, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB"
        if len(ran) == 3:
            return None, "not done after 9 s"
        schedule = make_schedule(config, plan.num_chunks)
        return Trace(schedule, plan.lengths, "CPU", (simulate(schedule, lambda action: 1.0),), 3 * 2**30), ""

    monkeypatch.setattr(plan_verify, "train_for_a_trace", train)
    picture = tmp_path / "all.svg"
    call = ["compare", DEMO, "--policies", "1f1b", "interleaved", "zero_bubble", "--measure", "--row-timeout", "9"]
    call += [*given, *SPREAD, "--json", "--out", str(picture)]
    capsys.readouterr()
    assert main(call) == 0
    rows = json.loads(capsys.readouterr().out)
    orders = [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]
    on_chunks = [(policy, 2, stages, 9.0) for policy, stages in [*orders, ("zero_bubble", 2), ("1f1b", 1)]]
    assert ran == [(policy, 1, stages, 9.0) for policy, stages in orders] + on_chunks
    assert rows[1]["measured_why_not"].startswith("out of memory: torch.OutOfMemoryError")
    assert rows[2]["measured_why_not"] == "failed: not done after 9 s"
    units = [simulate(build_schedule(p, 2, 2, 2, v), lambda action: 1.0).step_time for p, _, v, _ in on_chunks[:4]]
    assert [row["measured_time"] for row in rows[3:]] == [*units, units[2]]
    assert all(row["measured_peak_bytes"] == 3 * 2**30 and row["step_time"] > 0 for row in rows[3:])
    text = picture.read_text()
    assert "mine.csv, N = 2, V = 1, measured" in text and "zero_bubble, N = 2, V = 2, simulated" in text
    assert "interleaved, N = 1, V = 2, measured" not in text


@pytest.mark.parametrize("enabled", [True, False])
def test_the_command_that_uses_a_plan_is_accepted(enabled, capsys, tmp_path, monkeypatch):
    """As it is printed: with the overrides that the plan was made for, without keys that the plan brings."""
    from stateflow.cli import build_parser, parse_config

    config, out = tmp_path / "my train.toml", tmp_path / "plan.toml"
    text = Path(DEMO).read_text().replace("num_chunks = 4", "num_chunks = 4\nskew = 0.5")
    config.write_text(text if enabled else text.replace("enable = true", "enable = false", 1))
    call = [
        "plan", str(config), "--verify", "0", "--policies", "1f1b", "--out", str(out), "--lengths", "64", "128",
        "--microbatches", "3", "--training.seq-len", "128", "--validation.no-enable", "--stateflow.num-chunks=2",
        "--model.flavor=tiny", f"--job.dump_folder={tmp_path}", "--cache", str(tmp_path / "cache.json"),
    ]  # fmt: skip
    assert main(call) == 0
    printed = capsys.readouterr().out.split("use it with\n")[1].strip()
    options, overrides = build_parser().parse_known_args(shlex.split(printed)[1:])
    assert options.command == "train" and options.config == config
    accepted = parse_config(["--job.config_file", str(config), *overrides])
    assert accepted.stateflow.enable and accepted.stateflow.plan == str(out)
    assert accepted.training.seq_len == 128 and accepted.training.local_batch_size == 3


def test_rows_that_cannot_be_measured(capsys, monkeypatch):
    from stateflow.commands import plan_verify

    monkeypatch.setattr(plan_verify, "train_for_a_trace", lambda *_: (None, "RuntimeError: broken"))
    call = ["compare", DEMO, "--policies", "zero_bubble", "v_shape", "--no-whole", "--measure", "--num-chunks", "2"]
    assert main([*call, "--parallelism.pipeline_parallel_layers_per_stage=5"]) == 0
    text = capsys.readouterr().out
    assert "failed: RuntimeError: broken" in text and "CPU: " in text
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert main(call) == 2
    assert "--measure: the run needs 2 cores, here is 1; give --ranks" in capsys.readouterr().err


def test_pictures_of_a_comparison(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "all.svg"
    assert main(["compare", DEMO, "--microbatches", "2", "--out", str(path), *SPREAD]) == 0
    text = path.read_text()
    assert "v_shape, N = 4, V = 2" in text and "1f1b, N = 1, V = 1" in text


def test_a_timeline_of_a_config(capsys):
    call = ["schedule", DEMO, "--microbatches", "1", "--num-chunks", "2", "--timeline"]
    assert main([*call, "--activation_checkpoint.mode=none"]) == 0
    assert capsys.readouterr().out.startswith("rank 0 00...aaaa\nrank 1 .00aaaa..\n")
    assert main([*call, "--activation_checkpoint.mode=full"]) == 0
    assert capsys.readouterr().out.startswith("rank 0 00....aaaaaa\nrank 1 .00aaaaaa...\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "no.toml", "--analytic"], "no such config: no.toml"),
        (["simulate", DEMO, "--ranks", "9"], "pipeline_parallel_degree = 9 is above the model's 8 layers"),
        (["plan", DEMO, "--ranks", "9", "--analytic"], "use at most 8"),
        (["compare", DEMO, "--ranks", "16"], "stateflow: --ranks 16: [parallelism] pipeline_parallel_degree = 16 is"),
        (["simulate", DEMO, "--microbatches", "0"], "--microbatches 0: the least is 1"),
        (["simulate", DEMO, "--policy", "2f2b"], "--policy 2f2b: unknown; there are 1f1b"),
        (["simulate", DEMO, "--num-chunks", "3000"], "num_chunks 3000 is more than the 2048 tokens"),
        (["simulate", DEMO, "--cost-file", "no.json"], "--cost-file no.json:"),
        (["simulate", DEMO, "--memory", "nan"], "--memory nan: must be above 0 GiB"),
    ],
)
def test_wrong_calls_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("stateflow: ") and message in error and error.count("\n") == 1
