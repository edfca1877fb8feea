"""Short training runs of several plans in one launch, each traced: what a search verifies by.

Every trial is the config with some overrides, run by torchtitan's Trainer for a few steps. A trial that fails is a
result like another; its processes end, and the remaining trials run in fresh ones.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stateflow.launch import run_to_its_end
from stateflow.pipeline.trace import Trace, read_trace

TRACED = (3, 6)  # steps that are measured; those before warm up
PATIENCE = 600.0  # seconds for a trial


@dataclass
class Trial:
    """One plan to run: ``overrides`` of the config, and the folder that its trace goes to."""

    overrides: list[str]
    folder: str


@dataclass(frozen=True)
class Outcome:
    """The trace of a trial; None with the reason why there is none."""

    trace: Trace | None
    trouble: str = ""


def run_trials(
    titan_args: Sequence[str], trials: Sequence[Trial], nproc: int, folder: Path, seconds: float | None = None,
    report: Callable[[int, Outcome], None] = lambda number, outcome: None,
) -> list[Outcome]:
    """Runs the trials in order and returns what came of each; those that ``seconds`` leave no time for are missing.

    ``report`` is told (number, outcome) once a launch is over, of each trial that ran in it.
    """
    outcomes: list[Outcome] = []
    end = None if seconds is None else time.monotonic() + seconds
    while len(outcomes) < len(trials):
        left = trials[len(outcomes) :]
        results, log = folder / "results.jsonl", folder / "log"
        results.unlink(missing_ok=True)
        options = {"trials": [asdict(trial) for trial in left], "results": str(results)}
        env = {
            "OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", "STATEFLOW_TRIALS": json.dumps(options),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}",
            "-m", "stateflow.titan.trials", *titan_args,
        ]  # fmt: skip
        status, in_time = 1, True
        with log.open("w") as stream:
            try:
                timeout = None if end is None else max(0.0, end - time.monotonic())
                status = run_to_its_end(command, timeout, env=env, stdout=stream, stderr=subprocess.STDOUT)
            except subprocess.TimeoutExpired:
                in_time = False
        lines = results.read_text().splitlines() if results.exists() else []
        here: list[Outcome] = []
        for number, trouble in (json.loads(line) for line in lines):
            if number == len(here):  # of a trial that failed on several ranks the first word counts
                here.append(Outcome(None, trouble) if trouble else Outcome(read_trace(Path(left[number].folder))))
        failed = status != 0 and not (here and here[-1].trouble)
        if in_time and len(here) < len(left) and (failed or not here):
            here.append(Outcome(None, last_error(log) or f"status {status}"))
        for outcome in here:
            report(len(outcomes), outcome)
            outcomes.append(outcome)
        if not in_time:
            break
    return outcomes


def last_error(log: Path) -> str:
    """The last line of a log that names an error."""
    errors = [line.strip() for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    # torchrun's own complaint that a process has failed says nothing.
    errors = [line for line in errors if "ChildFailedError" not in line] or errors
    return errors[-1][-300:] if errors else ""


# ------------------------------------------------------------------------- the workers
def run_one(titan_args: Sequence[str], trial: Trial) -> None:
    """Trains TRACED[1] steps in this rank's process; the schedule leaves the trace in the trial's folder."""
    import torch
    import torch.distributed as dist
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    folder = Path(trial.folder)
    config = ConfigManager().parse_args([
        *titan_args, *trial.overrides, "--stateflow.enable", "--stateflow.trace", "--stateflow.trace-steps",
        *map(str, TRACED), f"--training.steps={TRACED[1]}", "--validation.no-enable", "--checkpoint.no-enable",
        "--metrics.no-enable_tensorboard", f"--job.dump_folder={folder.parent}",
    ])  # fmt: skip
    trainer = Trainer(config)
    trainer.pp_schedule.trace_folder = trainer.pp_schedule.trace_folder and folder
    group = dist.new_group(backend="gloo")
    trainer.checkpointer.load(step=-1)
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, TRACED[1] + 1):
        trainer.step = step
        trainer.train_step(batches)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier(group=group)
    trainer.close()


def _worker() -> None:
    import torch
    import torch.distributed as dist
    from torchtitan.tools.logging import init_logger

    import stateflow.titan  # noqa: F401

    options = json.loads(os.environ["STATEFLOW_TRIALS"])
    init_logger()
    for number, fields in enumerate(options["trials"]):
        faulthandler.dump_traceback_later(PATIENCE, exit=True)  # a hang ends here, with every stack
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        error = ""
        try:
            run_one(sys.argv[1:], Trial(**fields))
        except torch.OutOfMemoryError as out_of_memory:
            error = f"out of memory: {str(out_of_memory)[:120]}"
        except (ValueError, RuntimeError) as failure:
            error = f"{type(failure).__name__}: {str(failure)[:300]}"
        faulthandler.cancel_dump_traceback_later()
        if error or os.environ["RANK"] == "0":
            with Path(options["results"]).open("a") as stream:
                stream.write(json.dumps([number, error]) + "\n")
        if error:
            os._exit(1)  # the other ranks may wait in a collective: the launcher ends them
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    _worker()
