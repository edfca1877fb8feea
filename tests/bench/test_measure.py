"""What every benchmark measures with."""

import math
import threading
from pathlib import Path

import pytest
import torch

from stateflow.bench.measure import (
    Rows,
    Timing,
    Turns,
    markdown_table,
    measure_memory,
    misses,
    read_rows,
    relative_l2,
    time_call,
)


def test_timings():
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.median, timing.low, timing.high, timing.runs) == (3.0, 2.0, 4.0, 5)
    assert Timing.of([2.0]).spread == 0.0
    fast, slow = Timing(1.0, 0.95, 1.05, 9), Timing(1.2, 1.1, 1.3, 9)
    assert fast.beats(slow) and not slow.beats(fast)
    assert not Timing(1.1, 1.0, 1.2, 9).beats(slow), "within the spread"
    assert not Timing(0.995, 0.995, 0.995, 9).beats(Timing(1.0, 1.0, 1.0, 9)), "half a percent"


def test_nan_is_a_miss():
    x = torch.ones(4)
    assert relative_l2(1.5 * x, x) == pytest.approx(0.5)
    assert relative_l2(x, torch.zeros(4)) == 2.0
    assert math.isnan(relative_l2(x * math.nan, x))
    assert misses({"o": math.nan, "dq": 0.1, "dk": 0.2}, {"o": 1.0, "dq": 0.1, "dk": 0.1}) == [
        "o nan (bound 1.0e+00)", "dk 2.0e-01 (bound 1.0e-01)"
    ]  # fmt: skip


def test_one_measures_at_a_time(tmp_path):
    inside, most = [], []

    def measure():
        turns = Turns(tmp_path)
        for _ in range(5):
            with turns.measuring(), turns.measuring():
                inside.append(1)
                most.append(len(inside))
                threading.Event().wait(0.002)
                inside.pop()

    threads = [threading.Thread(target=measure) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(most) == 15 and max(most) == 1


def test_a_turn_ends_with_an_error(tmp_path):
    for turns in (Turns(tmp_path), Turns(None)):
        with pytest.raises(KeyError), turns.measuring():
            raise KeyError
    with Turns(tmp_path).measuring():
        pass


def test_autotuning_compiles_outside_of_its_turn(tmp_path, monkeypatch):
    import triton.testing

    turns, seen = Turns(tmp_path), []
    monkeypatch.setattr(triton.testing, "do_bench", lambda fn, **options: [fn(), seen.append(options)])
    turns.for_autotuning()
    triton.testing.do_bench(lambda: seen.append(turns._held), quantiles=(0.5,))
    assert seen == [False, True, dict(quantiles=(0.5,), warmup=10, rep=40)]


def test_rows_are_there_at_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    rows = Rows(path, versions={"torch": "2.11"})
    rows.write(kind="time", heads=20)
    assert read_rows(path) == [{"versions": {"torch": "2.11"}, "kind": "time", "heads": 20}]
    Rows(path).write(kind="time", heads=10)
    assert [row["heads"] for row in read_rows(path)] == [20, 10]


def test_markdown():
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path):
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    for ahead_ms in (0.0, 1.0):
        timing = time_call(lambda: x @ x, runs=10, ahead_ms=ahead_ms)
        assert timing.runs == 10 and 0 < timing.low <= timing.median <= timing.high
    memory = measure_memory(lambda: (torch.exp(x * 2),), lambda outputs: torch.autograd.grad(outputs, x, outputs))
    size = x.numel() * 4 / 1e6
    assert memory.peak_forward >= 2 * size * 0.99 and memory.peak_both >= memory.peak_forward
    assert memory.saved < 0.1, "exp keeps its output, which is no extra"
