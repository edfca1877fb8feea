"""The CPU host: every copy of the device names is replaced, once, and the stock Trainer then runs."""

import importlib
import json
import mmap
import os
import subprocess
import sys

import pytest
import torch

from stateflow.titan import cpu_host

MODULES = [importlib.import_module(name) for name in cpu_host._MODULES_WITH_A_COPY]
UTILS = MODULES[0]


@pytest.fixture
def unpatched(monkeypatch):
    """torchtitan as after its import on a CUDA host; what the test changes is undone."""
    for module in MODULES:
        for name, value in (("device_type", "cuda"), ("device_module", torch.cuda)):
            if name in vars(module):
                monkeypatch.setattr(module, name, value)
    for name in ("get_device_info", "get_peak_flops"):
        monkeypatch.setattr(UTILS, name, getattr(UTILS, name))


def test_enable_replaces_every_copy(unpatched):
    assert not cpu_host.is_enabled()
    cpu_host.enable()
    copies = 0
    for name, module in list(sys.modules.items()):
        if not name.startswith("torchtitan"):
            continue
        if "device_type" in vars(module):
            assert module.device_type == "cpu", name
            copies += 1
        if "device_module" in vars(module):
            assert isinstance(module.device_module, cpu_host.CpuDeviceModule), name
    assert copies >= 4  # tools.utils, components.metrics, distributed.utils and .parallel_dims
    assert UTILS.get_device_info() == ("cpu", UTILS.device_module)
    assert UTILS.get_peak_flops("CPU") == float("inf")


def test_enable_twice_keeps_the_module(unpatched):
    cpu_host.enable()
    first = UTILS.device_module
    cpu_host.enable()
    assert UTILS.device_module is first
    assert all(vars(module).get("device_module", first) is first for module in MODULES)


@pytest.mark.parametrize(
    ("available", "visible", "on_cpu"),
    [(True, None, False), (True, "0,1", False), (True, "", True), (False, None, True), (False, "0", True)],
)
def test_enable_only_if_needed(unpatched, monkeypatch, available, visible, on_cpu):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cpu_host.enable_if_needed() is on_cpu
    assert UTILS.device_type == ("cpu" if on_cpu else "cuda")


def test_memory_figures_follow_the_resident_set():
    device = cpu_host.CpuDeviceModule()
    device.reset_peak_memory_stats()
    before = device.memory_allocated()
    # Not from the allocator, which may have as much left over from earlier tests, resident already.
    block = torch.frombuffer(mmap.mmap(-1, 64 * 2**20), dtype=torch.uint8).fill_(1)
    stats = device.memory_stats()
    grown = 48 * 2**20  # less than the block: other memory may have been freed meanwhile
    assert device.memory_allocated() >= before + grown
    assert stats["active_bytes.all.peak"] >= before + grown
    assert stats["reserved_bytes.all.peak"] <= device.get_device_properties().total_memory
    assert block.sum() == 64 * 2**20
    del block
    assert device.max_memory_allocated() >= before + grown, "a peak outlives what caused it"
    if os.access("/proc/self/clear_refs", os.W_OK):
        device.reset_peak_memory_stats()
        assert device.max_memory_allocated() < before + grown, "until it is reset"


def test_figures_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_host, "_PROC_STATUS", tmp_path / "missing")
    monkeypatch.setattr(cpu_host, "_PROC_CLEAR_REFS", tmp_path / "none" / "missing")
    now, peak = cpu_host.resident_bytes()
    assert now == peak > 2**20
    cpu_host.reset_peak_resident_bytes()
    assert cpu_host.resident_bytes()[1] >= peak


def test_device_module_answers_what_the_trainer_asks():
    device = cpu_host.CpuDeviceModule()
    assert device.current_device() == 0 and isinstance(device.current_device(), int)
    assert device.set_device(torch.device("cpu:1")) is None
    assert device.synchronize() is None and device.empty_cache() is None
    assert device.get_device_name().startswith("CPU")
    assert device.is_available() == torch.cpu.is_available()  # from torch.cpu
    with pytest.raises(AttributeError):
        device.no_such_name  # noqa: B018


TRAINER_SCRIPT = """
import dataclasses, json, sys, types
from stateflow.titan import cpu_host
assert cpu_host.enable_if_needed()
from torchtitan.config import JobConfig
from torchtitan.protocols import train_spec as specs
from torchtitan.train import Trainer
from stateflow.titan import data, report, tokenizer

config = JobConfig()
config.job.dump_folder = sys.argv[1]
config.stateflow = types.SimpleNamespace(tokenizer="bytes", enable=False, num_chunks=None, trace=False)
config.model.name, config.model.flavor = "llama3_on_cpu", "debugmodel"
config.training.dataset, config.training.local_batch_size, config.training.seq_len = "stdlib", 2, 64
config.training.steps, config.training.mixed_precision_param = 3, "float32"
config.lr_scheduler.warmup_steps = 1
config.optimizer.implementation = "foreach"
config.activation_checkpoint.mode = "none"
config.metrics.enable_tensorboard, config.metrics.log_freq = True, 1
config.validation.enable, config.validation.dataset = True, "stdlib_validation"
config.validation.local_batch_size, config.validation.seq_len = 2, 64
config.validation.freq, config.validation.steps = 3, 2
config.checkpoint.enable, config.checkpoint.interval = True, 3

stock = specs.get_train_spec("llama3")
specs.register_train_spec("llama3_on_cpu", dataclasses.replace(
    stock, build_tokenizer_fn=tokenizer.build_tokenizer, build_dataloader_fn=data.build_dataloader,
    build_validator_fn=data.build_validator))
trainer = Trainer(config)
trainer.train()
trainer.close()
print(report.summarize(sys.argv[1], config, world_size=1))
result = {"step": trainer.step, "tokens": data.valid_tokens.take(), "device": str(trainer.device)}
print("RESULT", json.dumps(result))
"""


def test_stock_trainer_trains_validates_saves_and_reports(tmp_path):
    environment = {
        **os.environ,
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
        **{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    }
    run = subprocess.run(
        [sys.executable, "-c", TRAINER_SCRIPT, str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.rsplit("RESULT", 1)[1])
    assert result["step"] == 3 and result["device"].startswith("cpu")
    assert result["tokens"] == 3 * 2 * 64, "validation batches must not be counted"
    figures = json.loads((tmp_path / "summary.json").read_text())
    assert figures["num_logged_steps"] == 3
    assert figures["first_training_loss"][0] == 1 and figures["last_training_loss"][0] == 3
    assert figures["last_training_loss"][1] < figures["first_training_loss"][1]
    assert figures["validation_loss"][0] == 3 and figures["validation_loss"][1] > 0
    assert 3.0 < figures["validation_entropy"] < 3.6  # Python source by bytes, in nats
    assert figures["tokens_per_second_total"] == figures["tokens_per_second_per_device"] > 0
    assert (tmp_path / "checkpoint" / "step-3").is_dir()
    for shown in ("first loss", "validation", "byte-frequency entropy", "checkpoints", "stateflow verify"):
        assert shown in run.stdout, shown
