"""What a run's step was predicted to take, and by what: its plan, its own trace, or counts for the GPU at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from stateflow.pipeline.simulator import simulate
from stateflow.pipeline.trace import Trace, read_trace
from stateflow.planning.analytic import Analytic
from stateflow.planning.devices import DEVICES, device_named
from stateflow.planning.plan_file import read_evidence


@dataclass(frozen=True)
class Prediction:
    """Seconds of the forwards and backwards of a step, without optimizer and data."""

    seconds: float
    source: str


def predictions(job_config) -> list[Prediction]:
    """All that there are for a pipelined run of a validated config; none for others."""
    if not job_config.stateflow.enable or job_config.parallelism.pipeline_parallel_degree == 1:
        return []
    found = []
    if job_config.stateflow.plan is not None:
        seconds = read_evidence(Path(job_config.stateflow.plan)).get("predicted_step_time")
        if seconds is not None:
            found.append(Prediction(float(seconds), "predicted by the plan"))
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    if any(key in name for key in DEVICES):  # what the table says of a CPU is a guess
        from stateflow.titan.config import make_plan
        from stateflow.titan.planning import job_of

        if job_config.stateflow.schedule_file is None:
            analytic = Analytic(job_of(job_config), device_named(None))
            seconds = analytic.simulate(make_plan(job_config)).step_time
            found.append(Prediction(float(seconds), f"predicted from counts for {analytic.device.name}"))
    return found


def traced(job_config, dump_folder: Path) -> tuple[float, Prediction] | None:
    """Of a run with ``[stateflow] trace``: the median traced step, and that step simulated with its own mean costs."""
    if not job_config.stateflow.trace:
        return None
    try:
        trace: Trace = read_trace(dump_folder / "trace")
    except ValueError:
        return None  # the run ended before the traced steps
    again = simulate(trace.schedule, trace.mean_costs().__getitem__).step_time
    return trace.median_step().step_time, Prediction(float(again), "simulated with the measured cost of each chunk")
