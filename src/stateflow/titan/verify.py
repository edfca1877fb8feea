"""``stateflow verify``: the configured pipeline against an unchunked reference, gradient by gradient.

The pipeline runs as configured, through torchtitan's Trainer, in as many processes as the config asks for; only the
dtype is the one asked for here, and clipping, validation and checkpoints are off.
Rank 0 then builds the *reference*: the same modules in one process on whole sequences, with the token-by-token
recurrence, full softmax attention and full logits under plain autograd, and no chunk-form code.  From the same weights,
on the same batches of all data-parallel ranks, it computes loss, gradient norm and every parameter gradient; they must
agree.  The loss alone would prove nothing: with all state gradients dropped it is still exact.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import STDOUT

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from stateflow.launch import run_to_its_end
from stateflow.model import global_name

REFERENCE_ROWS = 8  # sequences that the reference runs at once


@dataclass
class StepComparison:
    """One optimizer step.  Relative differences are max|a - b| / max|b|, b the reference's tensor."""

    step: int
    loss: float
    reference_loss: float
    grad_norm: float
    reference_grad_norm: float
    worst_parameter: str
    worst_difference: float
    num_parameters: int

    @property
    def largest_difference(self) -> float:
        return max(
            _relative(self.loss, self.reference_loss),
            _relative(self.grad_norm, self.reference_grad_norm),
            self.worst_difference,
        )


def _relative(value: float, reference: float) -> float:
    difference = abs(value - reference) / max(abs(reference), 1e-30)
    return difference if math.isfinite(difference) else math.inf  # NaN would lose every comparison


# ------------------------------------------------------------------ the calling process
def run(
    titan_args: Sequence[str], *, nproc: int, steps: int, dtype: str, tolerance: float, plant: str | None,
    json_path: Path | None,
) -> int:
    """Starts the workers, prints the table, and returns 0 only if every figure is within ``tolerance``."""
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ValueError(f"--json {json_path}: there is no folder {json_path.absolute().parent}; create it first")
    with tempfile.TemporaryDirectory() as folder:
        options = {"steps": steps, "dtype": dtype, "plant": plant, "result": str(Path(folder) / "result.json")}
        env = {
            **os.environ, "STATEFLOW_VERIFY": json.dumps(options), "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}",
            "-m", "stateflow.titan.verify", *titan_args,
        ]
        log = Path(folder) / "log"
        with log.open("w") as stream:
            run_to_its_end(command, env=env, stdout=stream, stderr=STDOUT)
        result = Path(options["result"])
        outcome = json.loads(result.read_text()) if result.exists() else {"error": None}
        if "error" in outcome:
            print(outcome["error"] or log.read_text()[-6000:], file=sys.stderr)
            print("FAILED: the pipeline did not run" + (f" (planted: {plant})" if plant else ""))
            return 1
    comparisons = [StepComparison(**c) for c in outcome["steps"]]
    print(f"pipeline: {outcome['pipeline']}")
    print("reference: one process, whole sequences, token-by-token recurrence, float64")
    print(table(comparisons))
    worst = max(c.largest_difference for c in comparisons)
    passed = all(c.largest_difference <= tolerance for c in comparisons)
    if json_path is not None:
        figures = {**outcome, "dtype": dtype, "tolerance": tolerance, "plant": plant, "passed": passed}
        json_path.write_text(json.dumps(figures, indent=2) + "\n")
    verdict = "OK" if passed else "FAILED"
    note = f" (planted: {plant})" if plant else ""
    if passed and plant:
        print(f"FAILED: the planted fault {plant} never came to bear (no cut, no pipeline, or no such layer)")
        return 1
    print(f"{verdict}: largest relative difference {worst:.1e}, tolerance {tolerance:.0e}{note}")
    return 0 if passed else 1


def table(comparisons: Sequence[StepComparison]) -> str:
    rows = [("step", "quantity", "pipeline", "reference", "difference")]
    for c in comparisons:
        rows.append((str(c.step), "loss", f"{c.loss:.12g}", f"{c.reference_loss:.12g}",
                     f"{_relative(c.loss, c.reference_loss):.1e}"))
        rows.append(("", "gradient norm", f"{c.grad_norm:.12g}", f"{c.reference_grad_norm:.12g}",
                     f"{_relative(c.grad_norm, c.reference_grad_norm):.1e}"))
        rows.append(("", f"worst of {c.num_parameters} gradients", c.worst_parameter, "", f"{c.worst_difference:.1e}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


# ------------------------------------------------------------------------- the workers
def _adapt(config, dtype: str) -> None:
    """Everything in ``dtype``, no clipping (gradients are read after it), nothing written beside the log."""
    from torchtitan.config import TORCH_DTYPE_MAP

    TORCH_DTYPE_MAP["float64"] = torch.float64
    config.training.dtype = config.training.mixed_precision_param = config.training.mixed_precision_reduce = dtype
    config.training.max_norm = 1e30
    config.checkpoint.enable = config.validation.enable = config.metrics.enable_tensorboard = False
    config.metrics.log_freq = 1
    if not torch.cuda.is_available():
        config.optimizer.implementation = "foreach"


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.cpu().clone()


def _named(trainer, what: str) -> dict[str, Tensor]:
    tensors = {}
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            value = parameter if what == "weight" else parameter.grad
            if value is not None:
                tensors[global_name(name)] = _full(value)
    return tensors


class _Recorder:
    """Hands batches on to the Trainer and keeps a copy of each."""

    def __init__(self, iterator):
        self.iterator = iterator
        self.batches: list[tuple[dict[str, Tensor], Tensor]] = []

    def __iter__(self):
        return self

    def __next__(self):
        inputs, labels = next(self.iterator)
        columns = {name: value.cpu().clone() for name, value in inputs.items()}
        self.batches.append((columns, labels.cpu().clone()))
        return inputs, labels


def reference_step(model_args, weights: dict[str, Tensor], batches: Sequence[tuple[dict, Tensor]], tokenizer, dtype):
    """Loss and gradients of the unchunked model: ``(mean loss, {name: gradient})``."""
    from stateflow.loss import reference_cross_entropy
    from stateflow.titan.model import TitanModel

    args = replace(model_args, backend="reference")
    model = TitanModel(args).to(dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise AssertionError(f"reference and pipeline differ in parameters: {missing} {unexpected}")
    count = sum(int((labels != -100).sum()) for _, labels in batches)
    total = 0.0
    for name, block in list(model.layers.named_children()):
        # The graph of a token-by-token recurrence is large: keep one layer's at a time.
        model.layers.register_module(name, checkpoint_wrapper(block))
    for columns, labels in batches:
        for start in range(0, len(labels), REFERENCE_ROWS):
            rows = {name: value[start : start + REFERENCE_ROWS] for name, value in columns.items()}
            x, y = rows.pop("input"), labels[start : start + REFERENCE_ROWS]
            docs = model.get_attention_masks(x, tokenizer, rows) if args.attn_type == "varlen" else None
            loss = reference_cross_entropy(model(x, attention_masks=docs), y) / count
            loss.backward()
            total += float(loss.detach())
    return total, {global_name(name): p.grad for name, p in model.named_parameters()}


def compare(step: int, loss: float, grads: dict[str, Tensor], ref_loss: float, ref_grads: dict) -> StepComparison:
    assert grads.keys() == ref_grads.keys(), sorted(grads.keys() ^ ref_grads.keys())
    worst_name, worst = "none", 0.0
    for name, reference in ref_grads.items():
        difference = (grads[name].double() - reference.double()).abs().max().item()
        relative = difference / max(reference.double().abs().max().item(), 1e-30)
        if not relative <= worst:  # also takes NaN
            worst_name, worst = name, relative if relative == relative else float("inf")
    norm = torch.stack([g.double().norm() for g in grads.values()]).norm().item()
    ref_norm = torch.stack([g.double().norm() for g in ref_grads.values()]).norm().item()
    return StepComparison(step, loss, ref_loss, norm, ref_norm, worst_name, worst, len(ref_grads))


def compare_run(config, dtype: torch.dtype, steps: int) -> tuple[str, list[StepComparison]]:
    """Trains ``steps`` steps of ``config`` in this rank's process and compares each on rank 0 (other ranks: [])."""
    from torchtitan.train import Trainer

    from stateflow.titan.order import loss_rank

    _adapt(config, str(dtype).removeprefix("torch."))
    trainer = Trainer(config)
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, avg_loss, *args, **kwargs: losses.append(float(avg_loss))
    cpu_group = dist.new_group(backend="gloo")
    trainer.checkpointer.load(step=-1)
    recorder = _Recorder(trainer.batch_generator(trainer.dataloader))
    batch_mesh = trainer.parallel_dims.get_optional_mesh("batch")
    batch_rank = 0 if batch_mesh is None else batch_mesh.get_local_rank()
    comparisons = []
    for step in range(1, steps + 1):
        trainer.step = step
        recorder.batches.clear()
        weights = _gather(_named(trainer, "weight"), cpu_group)
        trainer.train_step(recorder)
        grads = _gather(_named(trainer, "grad"), cpu_group)
        batches = _gather({batch_rank: list(recorder.batches)}, cpu_group)
        # Only the rank of the last stage knows the loss; the others log -1.
        logs = dist.get_rank() == loss_rank(config, dist.get_world_size())
        logged = _gather({"loss": losses[-1]} if logs else {}, cpu_group)
        if dist.get_rank() == 0:
            # Always in float64: the difference is then the pipeline's own rounding.
            reference = {name: w.double() for name, w in weights.items()}
            every_batch = [batch for rank in sorted(batches) for batch in batches[rank]]
            ref_loss, ref_grads = reference_step(
                trainer.model_args, reference, every_batch, trainer.tokenizer, torch.float64
            )
            comparisons.append(compare(step, logged["loss"], grads, ref_loss, ref_grads))
    dist.barrier(group=cpu_group)
    description = _describe(trainer, dtype)
    trainer.close()
    return description, comparisons


def _worker() -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger

    import stateflow.titan  # noqa: F401
    from stateflow.faults import FAULTS
    from stateflow.pipeline.schedule import ScheduleError

    options = json.loads(os.environ["STATEFLOW_VERIFY"])
    init_logger()
    config = ConfigManager().parse_args(sys.argv[1:])
    plant = FAULTS[options["plant"]]() if options["plant"] else contextlib.nullcontext()
    with plant:
        try:
            description, comparisons = compare_run(config, getattr(torch, options["dtype"]), options["steps"])
            outcome = {"pipeline": description, "steps": [asdict(c) for c in comparisons]}
        except ScheduleError as error:
            outcome = {"error": f"refused: {error}"}
    if os.environ["RANK"] == "0":
        Path(options["result"]).write_text(json.dumps(outcome))
    dist.destroy_process_group()


def _gather(mine: dict, group) -> dict:
    """All ranks' dicts merged on rank 0; of several values of a key the first rank's is kept."""
    gathered: list | None = [None] * dist.get_world_size(group) if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered, dst=0, group=group)
    merged: dict = {}
    for part in gathered or []:
        for key, value in part.items():
            merged.setdefault(key, value)
    return merged


def _describe(trainer, dtype) -> str:
    config, dims = trainer.job_config, trainer.parallel_dims
    named = (("PP", dims.pp), ("TP", dims.tp), ("replicas ", dims.dp_replicate), ("FSDP", dims.dp_shard))
    degrees = [f"{name}{degree}" for name, degree in named if degree > 1] or ["1 process"]
    tokens = ", sequence parallel norms" if dims.tp > 1 and config.stateflow.sequence_parallel_norms else ""
    schedule = getattr(trainer, "pp_schedule", None)
    how = "no pipeline" if schedule is None else type(schedule).__name__
    if hasattr(schedule, "plan"):
        how = f"{schedule.schedule.policy}, chunks {list(schedule.plan.lengths)}"
    return f"{' x '.join(degrees)}{tokens}, {how}, {config.model.flavor}, {dtype}, device {trainer.device.type}"


if __name__ == "__main__":
    _worker()
