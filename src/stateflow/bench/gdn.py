"""``stateflow bench gdn``: the gated delta rule against flash-linear-attention and FlashQLA, in one run.

The libraries need versions of Triton that exclude each other, so each has a process with a path of its own. Those
of the peers start first: they compile and tune themselves while our kernels are tuned (with --tune), and are timed
after ours, against whose results theirs are compared.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from stateflow.bench.gdn_contestants import OURS
from stateflow.bench.gdn_report import render
from stateflow.bench.gdn_worker import done_path
from stateflow.bench.measure import Rows, Turns, read_rows, require_cuda
from stateflow_kernels.plan_table import Shape, bucket_of, to_json

LEAST_RUNS = 10
# FLA hands its work to other libraries where it finds them: what is measured is FLA.
PEER_ENV = {"fla": {"FLA_FLASH_QLA": "0", "FLA_TILELANG": "0"}}


def shapes_of(
    heads: Sequence[int],
    tokens: Sequence[int],
    dims: Sequence[tuple[int, int]],
    dtype: str,
    untuned: tuple[int, int] | None = None,
) -> list[Shape]:
    """All combinations, one count of heads after the other; `untuned` (heads, tokens) last, at the first dims.

    Raises:
        ValueError: sizes that the kernels do not take.
    """
    from stateflow.planning.kernel_shapes import explicit_shapes

    cases = [(h, n, *kv) for h in heads for kv in dims for n in tokens]
    if untuned is not None:
        cases.append((*untuned, *dims[0]))
    for h, n, k_dim, v_dim in cases:
        explicit_shapes([h], [n], k_dim, v_dim, dtype)  # raises
    return [Shape("gated_delta_rule", h, h, k_dim, v_dim, dtype, 1, n) for h, n, k_dim, v_dim in dict.fromkeys(cases)]


def run(options) -> int:
    """The command. Raises ValueError for a call that cannot be."""
    if options.render is not None:
        if not options.render.is_file():
            raise ValueError(f"--render {options.render}: there is no such file; --json FILE writes one")
        _write_report(read_rows(options.render), options.markdown)
        return 0
    if options.runs < LEAST_RUNS:
        raise ValueError(f"--runs {options.runs}: a median needs {LEAST_RUNS} or more")
    shapes = shapes_of(options.heads, options.tokens, options.dims, options.dtype, options.untuned)
    peer_shapes = shapes_of(
        options.peer_heads or options.heads,
        options.peer_tokens or options.tokens,
        options.peer_dims or options.dims,
        options.dtype,
    )
    if options.peer_untuned and options.untuned is not None:
        peer_shapes.append(shapes[-1])
    missing = [shape for shape in peer_shapes if shape not in shapes]
    if missing:
        raise ValueError(f"the peers' shape {missing[0]} is not among ours: they would have nothing to agree with")
    require_cuda("stateflow bench")
    with tempfile.TemporaryDirectory(prefix="stateflow-bench-") as work:
        return _run(options, shapes, peer_shapes, Path(work))


def _run(options, shapes: list[Shape], peer_shapes: list[Shape], work: Path) -> int:
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
            # A process for each count of heads: compiling for one does not wait for the other.
            for heads in dict.fromkeys(shape.num_heads for shape in peer_shapes):
                # The longest first: FLA tunes itself at the first length that it sees.
                mine = sorted((s for s in peer_shapes if s.num_heads == heads), key=lambda s: -s.tokens)
                processes.append(Process(name, mine, rows, work, options.runs, folder))
        if options.tune is not None:
            _tune(options, work)
        ours = Process(OURS, shapes, rows, work, options.runs, None)
        processes.append(ours)
        ours.wait(None)
        done_path(work).touch()
        for process in processes[:-1]:
            process.wait(options.peer_timeout)
    finally:
        for process in processes:
            process.end()
        signal.signal(signal.SIGTERM, before)
        found = read_rows(rows)
        _write_report(found, options.markdown)
    return int(not any("forward" in row for row in found if row.get("contestant") == OURS))


def _tune(options, work: Path) -> None:
    """Our kernels for the shapes of the benchmark without `--untuned`; our process will find the table."""
    import gc

    import torch

    from stateflow.planning.kernel_tuning import run as tune
    from stateflow_kernels import plans

    sizes = (options.tune_heads or options.heads, [bucket_of(n) for n in options.tokens])
    shapes = shapes_of(*sizes, options.tune_dims or options.dims, options.dtype)
    table = options.tune.resolve()
    try:
        tune(shapes, table, options.tune_budget, Turns(work))
    except Exception:  # the benchmark says what is there without it
        traceback.print_exc()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if table.exists():
        os.environ[plans.VARIABLE] = str(table)


class Process:
    """A worker with its own path and log."""

    def __init__(self, group: str, shapes: Sequence[Shape], rows: Path, work: Path, runs: int, path: Path | None):
        self.group, self.rows = group, rows
        self.name = f"{group}-{'-'.join(map(str, dict.fromkeys(shape.num_heads for shape in shapes)))}"
        self.log = work / f"{self.name}.log"
        spec = dict(group=group, shapes=[to_json(shape) for shape in shapes], rows=str(rows), work=str(work), runs=runs)
        spec_path = work / f"{self.name}.json"
        spec_path.write_text(json.dumps(spec))
        self.started = time.monotonic()
        with open(self.log, "w") as log:
            command = [sys.executable, "-u", "-m", "stateflow.bench.gdn_worker", str(spec_path)]
            self.process = subprocess.Popen(command, env=worker_env(group, path), stdout=log, stderr=subprocess.STDOUT)

    def wait(self, seconds: float | None) -> None:
        """For its end, or until so long after its start; a row says if it came to no good one."""
        left = None if seconds is None else max(0.1, self.started + seconds - time.monotonic())
        try:
            status = self.process.wait(left)
        except subprocess.TimeoutExpired:
            self.end()
            print(f"{self.name}:\n{self.log.read_text()[-6000:]}", flush=True)
            self._failed(f"the process {self.name} was stopped after {seconds:.0f} s")
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


def worker_env(group: str, path: Path | None) -> dict[str, str]:
    """A peer's folder comes first, so that its Triton is the one of the process."""
    import stateflow
    import stateflow_kernels

    own = [str(Path(package.__file__).parents[1]) for package in (stateflow, stateflow_kernels)]
    paths = [*([] if path is None else [str(path)]), *dict.fromkeys(own), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **PEER_ENV.get(group, {})}


def _write_report(rows: list[dict], path: Path | None) -> None:
    text = render(rows)
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
