"""A benchmark's command: its processes, their order, and its report.

The libraries need versions of Triton that exclude each other, so each has a process with a path of its own. Those
of the peers start first: they compile and tune themselves while our kernels are tuned and compiled. Nothing is timed
before all of them are warm, or have taken too long for it. Each shape of theirs is timed after ours, against whose
results theirs are compared.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stateflow.bench.contestants import OURS, Spec, Subject
from stateflow.bench.measure import Rows, read_rows, require_cuda
from stateflow.bench.worker import done_path, go_path, warm_path
from stateflow_kernels.plan_table import Shape, to_json

LEAST_RUNS = 10

Render = Callable[[Sequence[dict]], str]


def shapes_of(
    subject: Subject,
    heads: Sequence[int],
    tokens: Sequence[int],
    dims: Sequence[tuple[int, int]],
    dtype: str,
    untuned: tuple[int, int] | None = None,
) -> list[Shape]:
    """All combinations, one count of heads after the other; `untuned` (heads, tokens) last, at the first dims.

    Raises:
        ValueError: sizes that the operation does not take.
    """
    cases = [(h, n, *kv) for h in heads for kv in dims for n in tokens]
    if untuned is not None:
        cases.append((*untuned, *dims[0]))
    return [subject.shape(*case, dtype) for case in dict.fromkeys(cases)]


def run(options, subject: Subject, render: Render, tune: Callable[[Path], None] | None = None) -> int:
    """The command.

    Args:
        options: as `arguments` has them.
        render: the report from the rows.
        tune: what to do with the folder of the processes once those of the peers have started.

    Returns:
        0 if anything of ours was timed, else 1.

    Raises:
        ValueError: a call that cannot be.
    """
    if options.render is not None:
        if not options.render.is_file():
            raise ValueError(f"--render {options.render}: there is no such file; --json FILE writes one")
        _write_report(render(read_rows(options.render)), options.markdown)
        return 0
    if options.runs < LEAST_RUNS:
        raise ValueError(f"--runs {options.runs}: a median needs {LEAST_RUNS} or more")
    unknown = set(options.ours or ()) - subject.choices.keys()
    if unknown:
        raise ValueError(f"--ours {', '.join(sorted(unknown))}: choose from {', '.join(subject.choices)}")
    shapes, peer_shapes = _shapes(options, subject)
    require_cuda("stateflow bench")
    with tempfile.TemporaryDirectory(prefix="stateflow-bench-") as work:
        return _run(options, subject, shapes, peer_shapes, Path(work), render, tune)


def _shapes(options, subject: Subject) -> tuple[list[Shape], list[Shape]]:
    """Ours, and those of them that the peers run."""
    if options.shapes is None:
        shapes = shapes_of(subject, options.heads, options.tokens, options.dims, options.dtype, options.untuned)
        sizes = (options.peer_heads or options.heads, options.peer_tokens or options.tokens)
        peer_shapes = shapes_of(subject, *sizes, options.peer_dims or options.dims, options.dtype)
    else:
        cases = [(*case, *options.dims[0])[:4] for case in options.shapes]
        peer_shapes = [subject.shape(*case, options.dtype) for case in dict.fromkeys(cases)]
        shapes = list(peer_shapes)
        if options.untuned is not None:
            shapes.append(subject.shape(*options.untuned, *options.dims[0], options.dtype))
        for name in ("heads", "tokens", "dims"):
            wanted = getattr(options, f"peer_{name}")
            if wanted is not None:
                peer_shapes = [shape for shape in peer_shapes if _size(shape, name) in wanted]
    if options.peer_untuned and options.untuned is not None:
        peer_shapes.append(shapes[-1])
    if options.peers and not peer_shapes:
        raise ValueError("--peer-heads, --peer-tokens, --peer-dims: they leave the peers none of --shapes")
    missing = [shape for shape in peer_shapes if shape not in shapes]
    if missing:
        raise ValueError(f"the peers' shape {missing[0]} is not among ours: they would have nothing to agree with")
    return shapes, list(dict.fromkeys(peer_shapes))


def _size(shape: Shape, name: str):
    return {"heads": shape.num_heads, "tokens": shape.tokens, "dims": (shape.k_dim, shape.v_dim)}[name]


def _run(options, subject, shapes, peer_shapes, work: Path, render: Render, tune) -> int:
    end = time.monotonic() + (math.inf if options.time_limit is None else options.time_limit)
    rows = work / "rows.jsonl" if options.json is None else options.json.resolve()
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.unlink(missing_ok=True)
    processes: list[Process] = []

    def leave(signum, _frame):
        raise SystemExit(128 + signum)  # on the way out the processes are ended, and what is there is reported

    before = signal.signal(signal.SIGTERM, leave)
    try:
        for name in options.peers:
            folder = dict(options.peer_path).get(name)
            # A process for each count of heads and size: compiling for one does not wait for the other.
            for kind in dict.fromkeys(replace(shape, tokens=1) for shape in peer_shapes):
                # The longest first: those that tune themselves do so at the first length that they see.
                mine = sorted((s for s in peer_shapes if replace(s, tokens=1) == kind), key=lambda s: -s.tokens)
                spec = Spec(subject.name, name, tuple(mine), str(rows), str(work), options.runs)
                processes.append(Process(subject, replace(spec, group_shapes=tuple(peer_shapes)), folder))
        if tune is not None:
            tune(work)
        spec = Spec(subject.name, OURS, tuple(shapes), str(rows), str(work), options.runs, group_shapes=tuple(shapes))
        choices = tuple(subject.choices if options.ours is None else options.ours)
        ours = Process(subject, replace(spec, choices=choices), None)
        processes.append(ours)
        _until_warm(processes, min(end, time.monotonic() + options.warm_up))
        go_path(work).touch()
        ours.wait(None, end)
        done_path(work).touch()
        for process in processes[:-1]:
            process.wait(options.peer_timeout, end)
    finally:
        for process in processes:
            process.end()
        signal.signal(signal.SIGTERM, before)
        found = read_rows(rows)
        _write_report(render(found), options.markdown)
    return int(not any("forward" in row for row in found if row.get("contestant") == OURS))


def _until_warm(processes: Sequence[Process], end: float) -> None:
    """Until each has compiled all it needs, or has ended; or until `end`."""
    began = time.monotonic()
    while True:
        cold = [process.name for process in processes if not process.is_warm()]
        if not cold or time.monotonic() >= end:
            break
        time.sleep(0.1)
    late = f", while these are not warm yet: {', '.join(cold)}" if cold else ""
    print(f"warm after {time.monotonic() - began:.0f} s: what is timed is timed from here on{late}", flush=True)


class Process:
    """A worker with its own path and log. The spec gets its name here."""

    def __init__(self, subject: Subject, spec: Spec, path: Path | None):
        self.group, self.rows, self.work = spec.group, Path(spec.rows), Path(spec.work)
        first, sizes = spec.shapes[0], {(shape.num_heads, shape.k_dim, shape.v_dim) for shape in spec.shapes}
        of_size = f"-{first.num_heads}-{first.k_dim}x{first.v_dim}" if len(sizes) == 1 else ""
        self.name = f"{spec.group}{of_size}"
        self.log = self.work / f"{self.name}.log"
        spec_path = self.work / f"{self.name}.json"
        spec_path.write_text(json.dumps(to_json(replace(spec, name=self.name))))
        self.started = time.monotonic()
        env = worker_env(path, subject.environment.get(spec.group, {}))
        with open(self.log, "w") as log:
            command = [sys.executable, "-u", "-m", "stateflow.bench.worker", str(spec_path)]
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def is_warm(self) -> bool:
        return warm_path(self.work, self.name).exists() or self.process.poll() is not None

    def wait(self, seconds: float | None, end: float = math.inf) -> None:
        """For its end, or until so long after its start, or until `end`; a row says if it came to no good one."""
        end = min(end, math.inf if seconds is None else self.started + seconds)
        left = None if end == math.inf else max(0.1, end - time.monotonic())
        try:
            status = self.process.wait(left)
        except subprocess.TimeoutExpired:
            self.end()
            print(f"{self.name}:\n{self.log.read_text()[-6000:]}", flush=True)
            self._failed(f"the process {self.name} was stopped after {time.monotonic() - self.started:.0f} s")
            return
        print(f"{self.name}:\n{self.log.read_text()[-6000:]}", flush=True)
        if status != 0:
            self._failed(f"the process {self.name} ended with status {status}")

    def _failed(self, reason: str) -> None:
        print(f"{self.name}: {reason}", flush=True)
        Rows(self.rows).write(kind="process", contestant=self.group, failed=reason)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def worker_env(path: Path | None, more: dict[str, str]) -> dict[str, str]:
    """A peer's folder comes first, so that its Triton is the one of the process."""
    import stateflow
    import stateflow_kernels

    own = [str(Path(package.__file__).parents[1]) for package in (stateflow, stateflow_kernels)]
    paths = [*([] if path is None else [str(path)]), *dict.fromkeys(own), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **more}


def _write_report(text: str, path: Path | None) -> None:
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
