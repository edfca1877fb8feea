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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "no.toml", "--analytic"], "no such config: no.toml"),
        (["simulate", DEMO, "--ranks", "9"], "pipeline_parallel_degree = 9 is above the model's 8 layers"),
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
