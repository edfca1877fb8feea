"""``stateflow sweep``: the grid, its file, what fails, and the pictures."""

import json
from pathlib import Path

import pytest

from stateflow.cli import main
from stateflow.commands import plan_verify, sweep

DEMO = str(Path(__file__).parents[2] / "titan_configs" / "demo.toml")
GRID = ["--set", "stateflow.num_chunks=1,2,4", "--set", "stateflow.skew=0,1"]


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def simulate(path: Path, *arguments: str) -> list[dict]:
    command = ["sweep", DEMO, "--device", "cpu", "--simulate", "--out", str(path), *arguments]
    assert main(command) == 0
    return rows_of(path)


def test_a_simulated_grid(tmp_path, capsys):
    rows = simulate(tmp_path / "sweep.jsonl", *GRID)
    cells = [(row["cell"]["stateflow.num_chunks"], row["cell"]["stateflow.skew"]) for row in rows]
    assert cells == [(n, skew) for n in "124" for skew in "01"]
    for row, (n, skew) in zip(rows, cells, strict=True):
        assert row["status"] == "ok" and len(row["lengths"]) == int(n) and sum(row["lengths"]) == 2048
        assert (len(set(row["lengths"])) == 1) == (skew == "0" or n == "1")
        assert row["tokens_per_second"] == pytest.approx(2 * 2048 / row["step_time"]) and row["peak_bytes"] > 0
    peaks = [row["peak_bytes"] for row in rows if row["cell"]["stateflow.skew"] == "0"]
    assert peaks[0] > peaks[1] > peaks[2]  # figure 3: memory falls with N


def test_an_interrupted_sweep_goes_on(tmp_path, capsys, monkeypatch):
    path = tmp_path / "sweep.jsonl"
    whole = simulate(path, *GRID)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:30])  # killed while it wrote the third cell
    calls = []
    original = sweep.run_cell
    monkeypatch.setattr(sweep, "run_cell", lambda o, v, cell: calls.append(cell) or original(o, v, cell))
    assert simulate(path, *GRID) == whole and len(calls) == 4
    assert simulate(path, *GRID) == whole and len(calls) == 4
    simulate(path, *GRID, "--training.local_batch_size=4", "--validation.local_batch_size=4")
    assert len(calls) == 10  # other overrides are other cells
    path.write_text("{\n" + path.read_text())
    assert main(["sweep", DEMO, "--device", "cpu", "--simulate", "--out", str(path), *GRID]) == 2
    assert "line 1: no JSON" in capsys.readouterr().err


def test_cells_that_cannot_be_are_recorded(tmp_path, capsys):
    rows = simulate(tmp_path / "a.jsonl", "--set", "stateflow.num_chunks=2,5000", "--set", "stateflow.policy=1f1b,x")
    assert [row["status"] for row in rows] == ["ok", "refused", "refused", "refused"]
    assert "5000" in rows[2]["reason"]
    (row,) = simulate(tmp_path / "b.jsonl", "--set", "stateflow.num_chunks=2", "--memory", "0.001")
    assert row["status"] == "oom" and row["peak_bytes"] > 0.001 * 2**30


def test_out_of_memory_is_recorded_as_such(tmp_path, capsys, monkeypatch):
    reason = "[rank1]: torch.OutOfMemoryError: CUDA out of memory."
    monkeypatch.setattr(plan_verify, "train_for_a_trace", lambda *args: (None, reason))
    path = tmp_path / "sweep.jsonl"
    assert main(["sweep", DEMO, "--set", "stateflow.num_chunks=2", "--out", str(path)]) == 0
    (row,) = rows_of(path)
    assert (row["status"], row["reason"], row["how"]) == ("oom", reason, "measured")


@pytest.mark.parametrize("settings", [GRID, GRID[:2]])
def test_plots(tmp_path, capsys, settings):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "figure.svg"
    simulate(tmp_path / "a.jsonl", *settings, "--plot", str(picture))
    text = picture.read_text()
    assert "tokens/s" in text and "peak memory (GiB)" in text and "1.00x" in text or "x</text>" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "stateflow.num_chunks"], "write KEY=V1,V2"),
        (["--set", "a=1", "--set", "a=2"], "a is given twice"),
        ([*GRID, "--set", "stateflow.policy=gpipe", "--plot", "a.png"], "--plot shows one or two keys, --set has 3"),
        ([*GRID, "--plot", "a.pdf"], "give a .png or .svg"),
    ],
)
def test_wrong_calls(arguments, message, capsys):
    assert main(["sweep", DEMO, "--simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_flags():
    cell = {"stateflow.enable": "true", "checkpoint.enable": "false", "stateflow.num_chunks": "2"}
    assert sweep.cell_overrides(cell) == ["--stateflow.enable", "--checkpoint.no-enable", "--stateflow.num_chunks=2"]


@pytest.mark.processes
def test_a_measured_cell(tmp_path, capsys):
    path = tmp_path / "sweep.jsonl"
    tiny = ["--model.flavor=tiny", "--training.seq_len=64", "--validation.seq_len=64"]
    assert main(["sweep", DEMO, *tiny, "--set", "stateflow.num_chunks=2", "--out", str(path)]) == 0
    (row,) = rows_of(path)
    assert row["status"] == "ok" and row["lengths"] == [32, 32] and row["step_time"] > 0
