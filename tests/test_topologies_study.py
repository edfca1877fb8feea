"""studies/topologies.py: the order of its rows, its time, what it leaves behind, and that its rows can run."""

from __future__ import annotations

import json

import pytest
from studies import topologies
from studies.topologies import Book, Entry, Options, Planner, campaign, chosen, main, markdown, run

SMALL = [
    Entry("gdn_3b", pp, 1, 65536, 4, choice) for pp, choice in ((2, "1F1B"), (2, "4"), (2, "16"), (4, "1F1B"), (4, "4"))
]


class Machine:
    """In the place of ``measure_rows``: rows take ``seconds`` and a launch 5 more, on a clock of its own."""

    def __init__(self, seconds=100.0, errors=()):
        self.clock, self.seconds, self.errors, self.launches = 0.0, seconds, errors, []

    def now(self) -> float:
        return self.clock

    def measure(self, arguments, rows, *, nproc, report, go_on, **_):
        self.launches.append((nproc, [row.name for row in rows]))
        self.clock += 5.0
        for row in rows:
            if not go_on(row):
                return
            self.clock += self.seconds
            row.seconds, row.losses, row.peak_gib, row.reserved_gib = [2.0, 1.0, 1.5], [3.0], [7.0, 8.0], [9.0, 9.5]
            row.chunks = [1] * (1 if row.name == "1F1B" else int(row.name.split()[0][2:]))
            row.flops_per_token = 2e10
            if row.name in self.errors:
                row.error, row.seconds = "out of memory: 20 GiB | of 139", []
            report(row)


def go(tmp_path, machine, seconds=None, options=None, entries=SMALL) -> tuple[bool, list[str], Book]:
    said: list[str] = []
    options = options or Options(rehearsal=True)
    book = Book(tmp_path)
    planner = Planner(options, memo=tmp_path / "plans.json")
    done = run(entries, options, book, planner, seconds, said.append, machine.measure, machine.now)
    return done, said, book


def test_rows_run_in_order_one_launch_a_topology_and_a_failure_is_a_row(tmp_path):
    machine = Machine(errors=("N=16 alpha=0",))
    done, said, book = go(tmp_path, machine)
    assert done and [record["key"] for record in book.records] == [entry.key for entry in SMALL]
    assert machine.launches == [(2, ["1F1B", "N=4 alpha=0", "N=16 alpha=0"]), (4, ["1F1B", "N=4 alpha=0"])]
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert written == book.records and written[0]["wall_seconds"] == 105.0 and written[1]["wall_seconds"] == 100.0
    # Predictions come first, and with the row what became of them.
    assert all("predicted" in text for text in said[:5]) and said[7].endswith("out of memory: 20 GiB | of 139")
    off = written[1]["predicted_seconds"] / 1.5 - 1
    assert f"({off:+.0%})" in said[6] and "vs 1F1B 1.000x" in said[6]
    table = (tmp_path / "table.md").read_text()
    assert table == markdown(written) and [line.count("|") for line in table.splitlines()] == [15] * 7
    again = Machine()
    assert go(tmp_path, again)[0] and again.launches == []


def test_a_row_without_time_is_left_to_the_next_call(tmp_path):
    machine = Machine()
    likely = topologies.ROW
    done, said, book = go(tmp_path, machine, seconds=205.0 + likely - 1)
    assert not done and len(book.records) == 2 and "no time for gdn_3b PP2xTP1 64K M4 16" in said[-1]
    with (tmp_path / "rows.jsonl").open("a") as stream:
        stream.write('{"key": "of a run that was killed')
    machine = Machine()
    done, _, book = go(tmp_path, machine)
    assert done and len(book.records) == 5 and machine.launches[0] == (2, ["N=16 alpha=0"])


def test_what_is_not_likely_to_end_is_not_even_predicted(tmp_path):
    done, said, _ = go(tmp_path, Machine(), seconds=topologies.ROW)
    assert not done and len([text for text in said if text.startswith("gdn_3b") and "predicted" in text]) == 2


def test_the_best_topology_of_the_baseline_is_named_beside_the_own(tmp_path):
    _, _, book = go(tmp_path, Machine())
    book.records[3]["row"]["seconds"] = [0.5]  # 1F1B at PP4
    found = topologies.figures(book.records[1], book.records)
    assert found["vs 1F1B"] == "1.000x" and found["vs best 1F1B"] == "0.333x"
    book.records[1]["row"]["losses"] = [3.1]
    assert topologies.figures(book.records[1], book.records)["vs 1F1B"] == "LOSS!"


def test_choices():
    assert chosen("1F1B", (8, 0.5)) == (None, 0.0) and chosen("plan", (8, 0.5)) == (8, 0.5)
    assert chosen("plan/2", (8, 0.5)) == (4, 0.5) and chosen("plan*2", (8, 0.5)) == (16, 0.5)
    assert chosen("6", (8, 0.5)) == (6, 0.0) and chosen("8,0.75", (2, 0.0)) == (8, 0.75)


@pytest.mark.parametrize("gpus", [8, 4, 2])
def test_the_campaigns_rows_can_be(gpus):
    """Each case of each list once: its config is accepted and predicted to fit, whole, where that is asked for."""
    entries = campaign(gpus)
    assert len({entry.key for entry in entries}) == len(entries)
    assert all(entry.pp * entry.tp == gpus for entry in entries)
    # A case's baseline comes before what is compared with it, on the machine's first topology.
    for number, entry in enumerate(entries):
        baselines = [e for e in entries[:number] if e.choice == "1F1B" and e.case == entry.case]
        assert entry.choice == "1F1B" or baselines, entry.key
    planner = Planner(Options(device="h200"))
    firsts = {(e.model, e.fit, e.pp, e.tp): e for e in reversed(entries) if e.choice == "1F1B"}
    for entry in firsts.values():
        planned = planner.plan(entry)
        assert planned.seconds > 0 and 1 < planned.peak_gib < 140, entry.key
        assert (planned.layers is not None) == entry.fit


def test_wrong_calls(capsys, tmp_path):
    for arguments, message in (
        (["--gpus", "3", "--list"], "--gpus 3: there are rows for 8, 4 and 2"),
        (["--gpus", "64"], "--gpus 64"),
        (["--gpus", "2", "--list", "--profiles", str(tmp_path / "none")], "no such file"),
        (["--gpus", "2", "--list", "--first", "1", "--training.dtype=float8"], "gdn_3b PP2xTP1 64K M4 1F1B:"),
    ):
        assert main([*arguments, "--out", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.processes
def test_a_rehearsal_of_two_processes(tmp_path, capsys):
    call = ["--gpus", "2", "--rehearsal", "--models", "gdn_3b", "--first", "2", "--out", str(tmp_path)]
    assert main([*call, "--stateflow.model.num_layers=2"]) == 0
    baseline, chunked = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert baseline["row"]["losses"] == pytest.approx(chunked["row"]["losses"], rel=1e-5)
    assert baseline["num_chunks"] is None and len(chunked["row"]["chunks"]) == chunked["num_chunks"] > 1
    assert "vs 1F1B" in capsys.readouterr().out
