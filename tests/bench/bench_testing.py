"""Workers of the benchmarks on a machine without a GPU: everything is done, only the figures are made up."""

from collections.abc import Sequence
from pathlib import Path

import torch

from stateflow.bench import worker
from stateflow.bench.contestants import Subject
from stateflow.bench.measure import Memory, Timing, read_rows
from stateflow.bench.worker import Spec, Worker, go_path, warm_path
from stateflow_kernels.plan_table import Shape

CPU = torch.device("cpu")
FIGURES = {
    name: Timing(ms, ms, ms, 15).json()
    for name, ms in dict(forward=1.0, backward=2.0, forward_device=0.9, backward_device=1.0).items()
} | {"memory_mb": vars(Memory(100.0, 200.0, 50.0))}


def without_a_device(monkeypatch, subject: Subject, parity_tokens: int = 70) -> None:
    monkeypatch.setattr(worker, "measure", lambda *_: FIGURES)
    monkeypatch.setattr(subject, "parity_tokens", parity_tokens, raising=False)
    monkeypatch.setattr(type(subject), "get_ready", lambda *_: None)
    monkeypatch.setattr(type(subject), "parts", lambda *_: [])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("stateflow.bench.measure.Turns.for_autotuning", lambda self: None)


def rows_of_worker(subject: Subject, group: str, work: Path, shapes: Sequence[Shape]) -> list[dict]:
    path, shapes = work / f"{group}.jsonl", tuple(shapes)
    go_path(work).touch()
    choices = tuple(subject.choices)
    Worker(Spec(subject.name, group, shapes, str(path), str(work), 10, group, shapes, choices), CPU).run()
    assert warm_path(work, group).exists() or not any("forward" in row for row in read_rows(path))
    return read_rows(path)
