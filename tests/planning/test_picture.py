"""Pictures: what is drawn is the schedule, whole and in legal order, in every format."""

import json
import re
import sys
from pathlib import Path

import pytest

from stateflow.cli import main
from stateflow.planning.picture import write

DEMO = str(Path(__file__).parents[2] / "titan_configs" / "demo.toml")


def drawn(tmp_path, *arguments: str) -> dict:
    path = tmp_path / "step.json"
    assert main(["draw", DEMO, "--device", "cpu", *arguments, "--out", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize(("ranks", "microbatches", "num_chunks"), [(2, 3, 4), (4, 2, 1), (8, 2, 8)])
def test_every_unit_is_drawn_once_and_in_legal_order(tmp_path, capsys, ranks, microbatches, num_chunks):
    data = drawn(
        tmp_path, "--ranks", str(ranks), "--microbatches", str(microbatches), "--num-chunks", str(num_chunks)
    )
    times = {}
    for row in data["ranks"]:
        assert len(row["boxes"]) == 2 * microbatches * num_chunks  # one stage a rank
        assert all(a["end"] <= b["start"] for a, b in zip(row["boxes"], row["boxes"][1:], strict=False))
        assert row["peak_bytes"] == max(amount for _, amount in row["memory"]) > 0
        for box in row["boxes"]:
            times[box["stage"], box["kind"], box["microbatch"], box["chunk"]] = (box["start"], box["end"])
    assert len(times) == ranks * 2 * microbatches * num_chunks
    checked = 0
    for (stage, kind, microbatch, chunk), (start, _) in times.items():  # eq. 8
        before = [(stage - 1, "F", microbatch, chunk), (stage, "F", microbatch, chunk - 1)]
        if kind == "B":
            before = [(stage, "F", microbatch, chunk), (stage + 1, "B", microbatch, chunk)]
            before.append((stage, "B", microbatch, chunk + 1))
        for other in before:
            if other in times:
                assert times[other][1] <= start
                checked += 1
    assert checked >= 2 * len(times) - 3 * microbatches * (ranks + num_chunks)
    assert data["step_time"] == max(end for _, end in times.values())
    assert sum(data["lost"].values()) == pytest.approx(data["bubble"] + data["lost"]["chunk_overhead"], abs=1e-9)


def test_chrome_trace(tmp_path, capsys):
    path = tmp_path / "step.trace.json"
    assert main(["draw", DEMO, "--device", "cpu", "--num-chunks", "2", "--out", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 2 * 2 * 2 * 2 and {event["pid"] for event in complete} == {0, 1}
    assert {event["name"] for event in complete} == {f"{k}{a}.{i}" for k in "FB" for a in (0, 1) for i in (0, 1)}
    assert all(event["dur"] > 0 for event in complete)
    assert any(event["ph"] == "C" for event in events)


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_rendered(tmp_path, capsys, ending):
    pytest.importorskip("matplotlib")
    paths = [tmp_path / f"{name}{ending}" for name in "ab"]
    assert main(["draw", DEMO, "--device", "cpu", "--num-chunks", "2", "--out", *map(str, paths)]) == 0
    content = paths[0].read_bytes()
    assert content == paths[1].read_bytes()  # the same data, the same file
    if ending == ".svg":
        text = content.decode()
        assert "rank 1" in text and "memory (MiB)" in text
        labels = re.findall(r">([01]\.[01])</text>", text)
        assert sorted(labels) == sorted([f"{a}.{i}" for a in (0, 1) for i in (0, 1)] * 4)  # 2 ranks x (F, B)
    else:
        assert content.startswith(b"\x89PNG")


def test_without_matplotlib_the_message_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["draw", DEMO, "--device", "cpu", "--out", str(tmp_path / "a.png")]) == 2
    assert "pictures need matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_refused_paths(tmp_path):
    with pytest.raises(ValueError, match="unknown ending; use one of .svg, .png, .json, .trace.json"):
        write({}, tmp_path / "a.pdf")
    with pytest.raises(ValueError, match="there is no folder"):
        write({}, tmp_path / "no" / "a.svg")
