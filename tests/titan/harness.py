"""Runs torchtitan's Trainer on small configs inside a pool of worker processes, one scenario after another."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from tyro import _docstrings

# The words of `--help`, for which each parse reads the source of every config class: more than half of its time.
_docstrings.get_field_docstring = lambda *_: None

CONFIG = Path(__file__).parents[2] / "titan_configs" / "demo.toml"
SEQ_LEN = 96
SMALL = [
    "--model.flavor=tiny", f"--training.seq_len={SEQ_LEN}", f"--validation.seq_len={SEQ_LEN}",
    "--training.local_batch_size=2", "--validation.local_batch_size=2", "--training.steps=3", "--validation.freq=3",
    "--validation.steps=1", "--metrics.log_freq=1", "--checkpoint.no-enable", "--validation.no-enable",
    "--metrics.no-enable_tensorboard", "--lr_scheduler.warmup_steps=1",
]  # fmt: skip


@dataclass
class Run:
    """What one rank saw."""

    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)


# Below the ports that systems give to whoever asks for any: between here and the workers' use nobody gets one of them.
_PORTS = itertools.count(random.SystemRandom().randrange(10_000))


def free_port() -> int:
    for number in _PORTS:
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("localhost", port := 20_000 + number % 10_000))
            return port


def parse(args: list[str]):
    from torchtitan.config import ConfigManager

    import stateflow.titan  # noqa: F401

    return ConfigManager().parse_args(["--job.config_file", str(CONFIG), *SMALL, *args])


def parse_arguments(arguments: list[str]):
    """The config of whole arguments of torchtitan."""
    from torchtitan.config import ConfigManager

    import stateflow.titan  # noqa: F401

    return ConfigManager().parse_args(list(arguments))


@functools.cache
def _settle() -> None:
    """Once a process: what the imports made stays, so the collections below and the Trainer's need not look at it.

    And the text is read once.
    """
    import torchtitan.train  # noqa: F401

    import stateflow.titan.verify  # noqa: F401
    from stateflow.titan import data

    data.load_corpus = functools.cache(data.load_corpus)
    gc.collect()
    gc.freeze()


def _enter(rank: int, world_size: int, port: int) -> None:
    _settle()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="localhost", MASTER_PORT=str(port), LOG_RANK="0",
    )  # fmt: skip


@contextlib.contextmanager
def _without_sleep():
    """At the end of a training rank 0 sleeps two seconds, so that the others end before it. Here they wait for all."""
    import torchtitan.train

    with mock.patch.object(torchtitan.train, "time", mock.Mock(wraps=time, sleep=lambda _: None)):
        yield
    dist.barrier()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()
    gc.collect()


def forget_meshes(rank: int, group) -> None:
    """Torch keeps how an operation is sharded, by mesh and with its process groups."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def train(rank: int, group, *, world_size: int, port: int, args: list[str]) -> Run:
    """One whole training run of ``SMALL`` with ``args``."""
    from torchtitan.train import Trainer

    _enter(rank, world_size, port)
    run = Run()
    try:
        trainer = Trainer(parse(args))

        def log(step, avg_loss, max_loss, grad_norm, extra_metrics=None):
            run.losses[step], run.grad_norms[step] = float(avg_loss), float(grad_norm)

        def log_validation(loss, step, extra_metrics=None):
            run.validation[step] = float(loss)

        if "--metrics.enable_tensorboard" not in args:
            trainer.metrics_processor.log = log
            trainer.metrics_processor.log_validation = log_validation
        with _without_sleep():
            trainer.train()
        trainer.close()
    finally:
        _leave()
    return run


def look_inside(rank: int, group, *, world_size: int, port: int, args: list[str]) -> dict:
    """After one step, what this rank holds: gradients of replicated parameters, states, parameters, tokens."""
    from torch.distributed.tensor import DTensor, Replicate
    from torchtitan.train import Trainer

    _enter(rank, world_size, port)
    try:
        trainer = Trainer(parse(args))
        (model,) = trainer.model_parts
        tokens: set[int] = set()
        for norm in (model.norm, *(norm for b in model.layers.values() for norm in (b.mixer_norm, b.ffn_norm))):
            norm.register_forward_pre_hook(lambda _module, args: tokens.add(args[0].shape[1]))
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        named = {name: p for name, p in model.named_parameters() if p.placements == (Replicate(),)}
        assert all(p.grad.placements == p.placements for p in model.parameters())
        held = {
            "gradients": {name: p.grad.to_local().clone() for name, p in named.items()},
            "states": [tuple(s.shape for s in specs) for specs in model.state_spec(torch.float32).values()],
            "tokens": tokens,
            "numel": sum(p.to_local().numel() for p in model.parameters()),
        }
        trainer.close()
    finally:
        _leave()
    return held


def verify_with_fault(rank: int, group, *, fault: str, **kwargs):
    """`verify` with one sum over the ranks left out."""
    from stateflow.layers import Mamba3Dynamics
    from stateflow.titan import tensor_parallel

    with_local_parameters = tensor_parallel._with_local_parameters

    def forget(kind):
        def make(cls, names, summed):
            return with_local_parameters(cls, names, () if issubclass(cls, kind) else summed)

        return make

    broken = {
        "input gradient": ("_enter_behind", lambda module, args, output: output),
        "replicated gradient": ("_with_local_parameters", forget(torch.nn.Module)),
        "norm gradient": ("_with_local_parameters", forget(torch.nn.RMSNorm)),
        "key and value gradient": ("_with_local_parameters", forget(torch.nn.Linear)),
        "shared B, C and angle gradient": ("_with_local_parameters", forget(torch.nn.Linear)),
        "shared norms' gradient": ("_with_local_parameters", forget(Mamba3Dynamics)),
    }
    with mock.patch.object(tensor_parallel, *broken[fault]):
        return verify(rank, group, **kwargs)


def verify(
    rank: int, group, *, world_size: int, port: int, args: list[str], dtype: str, steps: int, plant=None, parts=None
):
    """The comparison of ``stateflow verify``; the largest relative difference of each step, from rank 0."""
    from stateflow.faults import FAULTS
    from stateflow.titan.verify import compare_run

    _enter(rank, world_size, port)
    try:
        with FAULTS[plant]() if plant else contextlib.nullcontext():
            config = parse(args)
            config.parallelism.module_fqns_per_model_part = parts
            _, comparisons = compare_run(config, getattr(torch, dtype), steps)
    finally:
        _leave()
    return [(c.largest_difference, c.worst_parameter) for c in comparisons]


def dtypes(rank: int, group, *, world_size: int, port: int, args: list[str]) -> dict[str, list[str]]:
    """The dtypes that one training step of this rank computes in, keeps and optimises, by what they belong to."""
    from torchtitan.train import Trainer

    from stateflow.layers import DecayGate, Mamba3
    from stateflow.pipeline.stage import ChunkStage

    _enter(rank, world_size, port)
    seen: dict[str, set[str]] = {}

    def note(what: str, tensor) -> None:
        seen.setdefault(what, set()).add(str(tensor.dtype).removeprefix("torch."))

    gate, core, forward, backward = DecayGate.forward, Mamba3.core, ChunkStage.forward, ChunkStage.backward

    def noted_gate(self, *args):
        note("gate parameters in use", self.A_log)
        g, beta = gate(self, *args)
        note("gate", g)
        return g, beta

    def noted_core(self, *args):
        for parameter in ("dt_bias", "B_norm", "C_norm", "B_bias", "C_bias", "D"):
            note("dynamics parameters in use", getattr(self.dynamics, parameter))
        return core(self, *args)

    def noted_forward(self, a, i, x, **kwargs):
        out = forward(self, a, i, x, **kwargs)
        if x.is_floating_point():
            note("activation", x)
        if a in self._carries:
            for (_, name), carry in zip(self.spec.carries, self._carries[a], strict=True):
                note(name, carry)
        for window in self._windows.get(a, ()):
            note("K/V", window.values)
        if kwargs.get("target") is not None:
            note("loss", out) if self.loss_fn is not None else None
        return out

    def noted_backward(self, a, i, *rest, **kwargs):
        out = backward(self, a, i, *rest, **kwargs)
        for grad in self._state_grads.get((a, i - 1), ()):
            note("state gradient", grad)
        for window in self._windows.get(a, ()):
            if window.grads is not None:
                note("K/V gradient", window.grads)
        return out

    try:
        with (
            mock.patch.object(DecayGate, "forward", noted_gate),
            mock.patch.object(Mamba3, "core", noted_core),
            mock.patch.object(ChunkStage, "forward", noted_forward),
            mock.patch.object(ChunkStage, "backward", noted_backward),
        ):
            trainer = Trainer(parse(args))
            trainer.metrics_processor.log = lambda *args, **kwargs: None
            trainer.step = 1
            trainer.train_step(trainer.batch_generator(trainer.dataloader))
        for part in trainer.model_parts:
            for parameter in part.parameters():
                note("parameter", parameter)
                note("gradient", parameter.grad)
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                note("optimizer state", state["exp_avg"])
        trainer.close()
    finally:
        _leave()
    return {what: sorted(names) for what, names in seen.items()}
