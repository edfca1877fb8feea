"""``stateflow bench pipeline``: whole training steps under torchtitan's 1F1B and under StateFlow, in one run.

Every row is the same config, and so the same model, kernels, loss, compile and recomputation settings, with other
overrides: the baseline ``[stateflow] enable = false`` (torchtitan's own schedule, gradient scale corrected), then one
row for each number of chunks and skew.  All rows start from the same weights and data; a row whose first losses are not
the baseline's is marked and gets no speed-up.  A row that runs out of memory or hangs is a result like another: its
processes end, and the remaining rows run in fresh ones.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from subprocess import STDOUT, TimeoutExpired

import torch
import torch.distributed as dist

from stateflow.launch import run_to_its_end

LOSS_TOLERANCE = {"bfloat16": 5e-3, "float16": 5e-3, "float32": 1e-5}  # relative, first steps
# Dense bf16 peaks by the vendor's datasheets, for the MFU.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


@dataclass
class Row:
    """One measured configuration; times are whole optimizer steps, the slowest rank's."""

    name: str
    overrides: list[str]
    seq_len: int
    microbatches: int
    chunks: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_gib: list[float] = field(default_factory=list)
    flops_per_token: float = 0.0
    error: str = ""
    # With the memory of CUDA graphs, which counts as nobody's when a graph is replayed.
    reserved_gib: list[float] = field(default_factory=list)
    # Batches of so many microbatches in a step: one a data-parallel rank and accumulation.
    batches: int = 1

    def tokens_per_second(self, world_size: int) -> float:
        """Per device, from the median step."""
        return self.seq_len * self.microbatches * self.batches / statistics.median(self.seconds) / world_size


def make_rows(
    seq_lens: Sequence[int], microbatches: Sequence[int], num_chunks: Sequence[int], skews: Sequence[float]
) -> list[Row]:
    """The baseline and one row for each (N, alpha), for every sequence length and number of microbatches."""
    rows = []
    for seq_len, count in product(seq_lens, microbatches):
        common = [
            f"--training.seq_len={seq_len}", f"--training.local_batch_size={count}", "--validation.no-enable",
            "--checkpoint.no-enable", "--metrics.no-enable-tensorboard",
        ]
        # Over whole sequences the host is ahead of the GPU: graphs would only take memory.
        rows.append(Row("1F1B", [*common, "--stateflow.no-enable", "--stateflow.no-cuda-graphs"], seq_len, count))
        for n, skew in product(num_chunks, skews):
            chosen = ["--stateflow.enable", f"--stateflow.num_chunks={n}", f"--stateflow.skew={skew}"]
            rows.append(Row(f"N={n} alpha={skew:g}", [*common, *chosen], seq_len, count))
    return rows


# ------------------------------------------------------------------ the calling process
def run(
    titan_args: Sequence[str], rows: list[Row], *, nproc: int, stages: int, steps: int, warmup: int,
    row_timeout: float, dtype: str, json_path: Path | None,
) -> int:
    """Measures the rows, prints the table as it grows, and returns 0 if the baseline and one other row ran."""
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ValueError(f"--json {json_path}: there is no folder {json_path.absolute().parent}; create it first")
    print(f"{device_name()}, torch {torch.__version__}, {nproc} processes, {stages} stages, {dtype}")
    print(HEADER)
    done: list[Row] = []

    def report(row: Row) -> None:
        done.append(row)
        print(format_row(row, baseline_of(done, row), nproc, stages, dtype), flush=True)
        if json_path is not None:
            json_path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in done))

    log = None if json_path is None else json_path.with_suffix(".log")
    measure_rows(
        titan_args, rows, nproc=nproc, steps=steps, warmup=warmup, row_timeout=row_timeout, report=report, keep_log=log
    )
    if (text := remark(done, stages, dtype)) is not None:
        print(text)
    good = [row for row in done if not row.error]
    return 0 if any(row.name == "1F1B" for row in good) and len(good) > 1 else 1


def measure_rows(
    titan_args: Sequence[str], rows: Sequence[Row], *, nproc: int, steps: int, warmup: int, row_timeout: float,
    report: Callable[[Row], None], keep_log: Path | None = None, go_on: Callable[[Row], bool] = lambda row: True,
) -> None:
    """Measures the rows in order in ``nproc`` processes, and tells ``report`` of each as soon as it is known.

    A row that fails ends its processes; the next ones run in fresh ones, and the output of those that failed goes to
    ``keep_log``. ``go_on`` is asked again and again with the row that runs: once it says no, everything ends there.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        waiting = list(rows)

        def follow() -> bool:
            """Reports rows that are new in the results; whether to go on with the one after them."""
            lines = results.read_text().splitlines(keepends=True) if results.exists() else []
            for line in lines:
                row = Row(**json.loads(line)) if line.endswith("\n") else None
                # Of a row that failed on several ranks the first word counts.
                if row is not None and waiting and row.overrides == waiting[0].overrides:
                    del waiting[0]
                    report(row)
            return not waiting or go_on(waiting[0])

        while waiting and go_on(waiting[0]):
            number = len(waiting)
            options = {
                "rows": [asdict(row) for row in waiting], "steps": steps, "warmup": warmup, "timeout": row_timeout,
                "results": str(results),
            }
            results.unlink(missing_ok=True)
            env = {
                "OMP_NUM_THREADS": "1", **os.environ, "STATEFLOW_BENCH": json.dumps(options), "PYTHONUNBUFFERED": "1"
            }
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}",
                "-m", "stateflow.titan.bench", *titan_args,
            ]
            with log.open("w") as stream:
                try:
                    status = run_to_its_end(command, env=env, stdout=stream, stderr=STDOUT, watch=follow)
                except TimeoutExpired:
                    follow()
                    return
            follow()
            if status and keep_log is not None:
                keep_log.write_text(log.read_text(errors="replace")[-100_000:])
            lines = results.read_text().splitlines() if results.exists() else []
            spoken = bool(lines) and bool(json.loads(lines[-1])["error"])
            if waiting and not spoken and (status or len(waiting) == number):
                # The row that ended its processes without a word.
                lost = waiting.pop(0)
                lost.error = f"failed: {_last_error(log)}"
                report(lost)


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    if any(line.startswith("Timeout (") for line in lines):  # of faulthandler
        return "not done in time, see --row-timeout"
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (errors or lines or ["no output"])[-1][-300:]


def baseline_of(done: Sequence[Row], row: Row) -> Row | None:
    for other in done:
        if other.name == "1F1B" and (other.seq_len, other.microbatches) == (row.seq_len, row.microbatches):
            return None if other.error else other
    return None


def losses_agree(row: Row, baseline: Row, dtype: str) -> bool:
    """Whether the first losses are the baseline's, within the rounding of ``dtype``."""
    pairs = list(zip(row.losses, baseline.losses, strict=False))
    return bool(pairs) and all(abs(a - b) <= LOSS_TOLERANCE[dtype] * abs(b) for a, b in pairs)


HEADER = f"{'tokens':>8} {'M':>3}  {'row':<16} {'s/step':>8} {'spread':>7} {'tok/s/GPU':>10} {'MFU %':>6} " \
    f"{'vs 1F1B':>8} {'of bound':>8}  peak GiB a rank (reserved)"


def of_bound(row: Row, baseline: Row, stages: int) -> float:
    """Share of the speed-up (M + P - 1) / (M + (P - 1) / N) reached."""
    m, p, n = row.microbatches, stages, max(1, len(row.chunks))
    gain = statistics.median(baseline.seconds) / statistics.median(row.seconds)
    return gain / ((m + p - 1) / (m + (p - 1) / n))


def remark(rows: Sequence[Row], stages: int, dtype: str) -> str | None:
    """What a share of the bound above 1 means, where there is one."""
    for row in rows:
        baseline = None if row.error else baseline_of(rows, row)
        if baseline is None or baseline is row or not losses_agree(row, baseline, dtype):
            continue
        if of_bound(row, baseline, stages) > 1.005:
            return (
                "of bound above 100 %: the bound is for the same work a token in chunks as in whole sequences; here "
                "chunks were cheaper, as where they fit a CPU's caches, or the times spread"
            )
    return None


def format_row(row: Row, baseline: Row | None, world_size: int, stages: int, dtype: str) -> str:
    """One line of the table; ``of bound``: share of the speed-up (M + P - 1) / (M + (P - 1) / N) reached."""
    head = f"{row.seq_len:>8} {row.microbatches:>3}  {row.name:<16}"
    if row.error:
        return f"{head} {row.error}"
    median = statistics.median(row.seconds)
    spread = (max(row.seconds) - min(row.seconds)) / median
    rate = row.tokens_per_second(world_size)
    peak = next((f for name, f in PEAK_FLOPS.items() if name in device_name()), None)
    mfu = f"{100 * rate * row.flops_per_token / peak:.1f}" if peak else "-"
    speedup = bound = "-"
    if baseline is not None and baseline is not row:
        if losses_agree(row, baseline, dtype):
            gain = statistics.median(baseline.seconds) / median
            speedup, bound = f"{gain:.3f}x", f"{100 * of_bound(row, baseline, stages):.0f} %"
        else:
            speedup = "LOSS!"
    known = any(row.peak_gib)  # not of a CPU
    peaks = " / ".join(f"{g:.1f}" for g in row.peak_gib) if known else "-"
    if known and row.reserved_gib:
        peaks += f" ({' / '.join(f'{g:.1f}' for g in row.reserved_gib)})"
    return f"{head} {median:>8.3f} {100 * spread:>5.1f} % {rate:>10,.0f} {mfu:>6} {speedup:>8} {bound:>8}  {peaks}"


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


# ------------------------------------------------------------------------- the workers
def measure(row: Row, titan_args: Sequence[str], *, steps: int, warmup: int) -> Row:
    """Runs one row in this rank's process; on rank 0 the row comes back filled in."""
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    from stateflow.titan.order import loss_rank

    config = ConfigManager().parse_args([*titan_args, *row.overrides])
    config.metrics.log_freq = 1
    cuda = torch.cuda.is_available()
    trainer = Trainer(config)
    group = dist.new_group(backend="gloo")
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, avg_loss, *args, **kwargs: losses.append(float(avg_loss))
    trainer.checkpointer.load(step=-1)
    batches = trainer.batch_generator(trainer.dataloader)
    seconds = []
    for step in range(1, warmup + steps + 1):
        trainer.step = step
        # The next batch is read before the clock starts: data loading is not what is compared.
        batch = [next(batches) for _ in range(trainer.gradient_accumulation_steps)]
        if step == warmup + 1 and cuda:
            torch.cuda.reset_peak_memory_stats()
        _synchronize(cuda)
        dist.barrier(group=group)
        start = time.perf_counter()
        trainer.train_step(iter(batch))
        _synchronize(cuda)
        if step > warmup:
            seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    reserved = torch.cuda.max_memory_reserved() / 2**30 if cuda else 0.0
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, (seconds, peak, losses, reserved), group=group)
    row.seconds = [max(times) for times in zip(*(entry[0] for entry in every), strict=True)]
    row.peak_gib = [entry[1] for entry in every]
    row.reserved_gib = [entry[3] for entry in every]
    # Only the rank of the last stage knows the loss; the others log -1.
    row.losses = every[loss_rank(trainer.job_config, len(every))][2]
    row.flops_per_token = float(trainer.metrics_processor.num_flops_per_token)
    data_parallel = trainer.parallel_dims.get_optional_mesh("batch")
    row.batches = trainer.gradient_accumulation_steps * (1 if data_parallel is None else data_parallel.size())
    schedule = getattr(trainer, "pp_schedule", None)
    row.chunks = list(schedule.plan.lengths) if hasattr(schedule, "plan") else []
    trainer.close()
    return row


def _synchronize(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def _worker() -> None:
    from torchtitan.tools.logging import init_logger

    import stateflow.titan  # noqa: F401

    options = json.loads(os.environ["STATEFLOW_BENCH"])
    init_logger()
    for row in (Row(**fields) for fields in options["rows"]):
        faulthandler.dump_traceback_later(options["timeout"], exit=True)  # a hang ends here, with every stack
        error = ""
        try:
            row = measure(row, sys.argv[1:], steps=options["steps"], warmup=options["warmup"])
        except torch.OutOfMemoryError as out_of_memory:
            error = f"out of memory: {str(out_of_memory)[:120]}"
        except (ValueError, RuntimeError) as failure:
            error = f"{type(failure).__name__}: {str(failure)[:300]}"
        faulthandler.cancel_dump_traceback_later()
        if error or os.environ["RANK"] == "0":
            row.error = error
            with Path(options["results"]).open("a") as stream:
                stream.write(json.dumps(asdict(row)) + "\n")
        if error:
            os._exit(1)  # the other ranks may wait in a collective: the launcher ends them
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    _worker()
