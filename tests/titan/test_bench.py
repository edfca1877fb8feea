"""``stateflow bench pipeline``: its rows and table, and one small run."""

from __future__ import annotations

import json

import pytest

from stateflow.cli import main
from stateflow.titan.bench import Row, format_row, losses_agree, make_rows, remark


def row(name: str, seconds: list[float], losses: list[float], chunks: list[int] | None = None) -> Row:
    return Row(name, [], 1024, 4, chunks or [], seconds, losses, [1.0, 2.0], 1e9)


def test_a_baseline_for_every_length_and_number_of_microbatches():
    rows = make_rows([512, 1024], [2, 4], [2, 8], [0.0, 0.75])
    assert len(rows) == 2 * 2 * (1 + 2 * 2)
    baselines = [r for r in rows if r.name == "1F1B"]
    assert [(r.seq_len, r.microbatches) for r in baselines] == [(512, 2), (512, 4), (1024, 2), (1024, 4)]
    assert all("--stateflow.no-enable" in r.overrides for r in baselines)
    assert "--stateflow.skew=0.75" in rows[-1].overrides and rows[-1].name == "N=8 alpha=0.75"


def test_a_speed_up_only_where_the_losses_agree():
    baseline = row("1F1B", [2.0, 2.2, 2.1], [3.0, 2.0])
    same = row("N=4", [1.5, 1.5, 1.6], [3.0001, 2.001], [256] * 4)
    other = row("N=4", [1.0, 1.0, 1.0], [3.0, 2.1], [256] * 4)
    assert losses_agree(same, baseline, "bfloat16") and not losses_agree(same, baseline, "float32")
    # (M + P - 1) / (M + (P - 1) / N) = 5 / 4.25 at M = 4, P = 2, N = 4.
    assert "1.400x" in format_row(same, baseline, 2, 2, "bfloat16")
    assert "119 %" in format_row(same, baseline, 2, 2, "bfloat16")
    assert "above 100 %" in remark([baseline, other, same], 2, "bfloat16")
    slower = row("N=4", [1.9], [3.0, 2.0], [256] * 4)
    failed = Row("N=8", [], 1024, 4, error="out of memory")
    assert remark([baseline, slower, other, failed], 2, "bfloat16") is None and remark([failed], 2, "float32") is None
    assert "LOSS!" in format_row(other, baseline, 2, 2, "bfloat16")
    assert not losses_agree(row("N=4", [1.0], []), baseline, "bfloat16")


def test_rates_are_of_all_tokens_of_a_step():
    alone, replicated = row("1F1B", [2.0], [3.0]), row("1F1B", [2.0], [3.0])
    replicated.batches = 6  # two data-parallel ranks, three batches of each
    assert alone.tokens_per_second(2) == 1024 * 4 / 2 / 2 and replicated.tokens_per_second(4) == 6 * 1024 * 4 / 2 / 4
    assert "3,072" in format_row(replicated, None, 4, 2, "bfloat16")


def test_a_row_without_figures_says_why():
    failed = Row("N=4", [], 1024, 4, error="out of memory: tried to allocate 20 GiB")
    assert format_row(failed, None, 2, 2, "bfloat16").endswith("out of memory: tried to allocate 20 GiB")


@pytest.mark.processes
def test_a_small_run(tmp_path, capfd):
    path = tmp_path / "rows.jsonl"
    small = ["--tokens", "256", "--num-chunks", "2", "--steps", "1", "--warmup", "1", "--stateflow.model.num_layers=2"]
    small += ["--microbatches", "2", "--training.global_batch_size=4"]
    status = main(["bench", "pipeline", "titan_configs/demo.toml", *small, "--json", str(path)])
    assert status == 0, capfd.readouterr().err
    baseline, chunked = (Row(**json.loads(line)) for line in path.read_text().splitlines())
    assert chunked.chunks == [128, 128] and len(chunked.seconds) == 1 and baseline.batches == chunked.batches == 2
    assert losses_agree(chunked, baseline, "float32")


def test_a_row_that_cannot_be_is_refused_before_anything_runs(capsys):
    assert main(["bench", "pipeline", "titan_configs/demo.toml", "--tokens", "4", "--num-chunks", "8"]) == 2
    assert "num_chunks = 8" in capsys.readouterr().err
