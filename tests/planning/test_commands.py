"""``plan``, ``simulate``, ``draw`` as a user meets them, in this process."""

import json
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


def test_a_rank_without_layers_is_remarked(capsys):
    call = ["simulate", DEMO, "--ranks", "8"]
    assert main(call) == 0
    assert "note: stage 7 holds no layer but norm and output: [parallelism]" in capsys.readouterr().out
    assert main([*call, *SPREAD]) == 0
    assert "note:" not in capsys.readouterr().out


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
        (["simulate", DEMO, "--microbatches", "0"], "--microbatches 0: the least is 1"),
        (["simulate", DEMO, "--policy", "2f2b"], "--policy 2f2b: unknown; there are 1f1b"),
        (["simulate", DEMO, "--num-chunks", "3000"], "num_chunks 3000 is more than the 2048 tokens"),
        (["simulate", DEMO, "--cost-file", "no.json"], "--cost-file no.json:"),
    ],
)
def test_wrong_calls_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("stateflow: ") and message in error and error.count("\n") == 1
