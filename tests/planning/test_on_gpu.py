"""Measuring and tracing on a CUDA device: figures that make sense, and memory beside what is counted."""

import dataclasses
from pathlib import Path

import pytest
import torch

from stateflow.cli import main
from stateflow.model import LanguageModel
from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.schedule import Action, Kind
from stateflow.pipeline.split import split_model
from stateflow.pipeline.trace import ActionTrace, read_trace
from stateflow.planning.costs import stage_costs
from stateflow.planning.profile import measure
from stateflow.titan.flavors import FLAVORS

from .test_costs import make_job

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
TWO_GPUS = str(Path(__file__).parents[2] / "titan_configs" / "gdn_3b_hybrid_2gpu.toml")
# The 3B hybrid with a layer of attention in four, so that all is over in two minutes.
SMALL = ["--stateflow.model.num_layers=4", "--training.seq_len=16384", "--training.local_batch_size=4"]


@pytest.mark.parametrize("kinds", [["gdn", "gdn"], ["attention", "gdn"]])
def test_measured_memory_is_near_the_counted(kinds):
    config = dataclasses.replace(FLAVORS["demo"], dim=512, ffn_dim=1408, pattern=kinds, num_layers=2, init_seed=0)
    stages = stage_costs(make_job(config, compute_dtype=torch.bfloat16))
    model = LanguageModel(config)
    with torch.no_grad():
        model.init_weights()
    for number, part in enumerate(split_model(model, 2)):
        part = part.to(DEVICE, torch.bfloat16)
        point = measure(
            part, DEVICE, torch.bfloat16, 4096, 2048, batch=1, dim=512, vocab_size=258, is_first=number == 0,
            is_last=number == 1,
        )  # fmt: skip
        assert 0 < point.forward < 10 and 0 < point.backward < 10 and not point.failed
        counted = stages[number].footprint.saved_bytes_per_token * 2048
        # Counted without a GPU, where a norm keeps float32 copies; torch's fused norm on a GPU keeps its input.
        assert 0.6 * counted < point.saved_bytes < 1.1 * counted, (number, point.saved_bytes / counted)


def test_halves_of_the_backward_add_up_to_about_the_whole():
    config = dataclasses.replace(FLAVORS["gdn_3b_hybrid"], num_layers=2, pattern=["gdn", "attention"], init_seed=0)
    model = LanguageModel(config)
    with torch.no_grad():
        model.init_weights()
    part = split_model(model, 1)[0].to(DEVICE, torch.bfloat16)
    whole, halves = (
        measure(
            part, DEVICE, torch.bfloat16, 8192, 8192, batch=1, dim=config.dim, vocab_size=config.vocab_size,
            is_first=True, is_last=True, split=split,
        )
        for split in (False, True)
    )  # fmt: skip
    print(f"B {whole.backward:.4f} s, I {halves.backward:.4f} s, W {halves.weight:.4f} s")
    assert whole.weight is None and 0 < halves.weight < halves.backward
    assert 0.7 * whole.backward < halves.backward + halves.weight < 1.4 * whole.backward


def test_the_choice_against_a_measured_grid(tmp_path, capsys):
    """On one GPU every chunk is measured and the order simulated; on two the plans train."""
    call = ["plan", TWO_GPUS, *SMALL, f"--job.dump_folder={tmp_path}", "--policies", "1f1b", "zero_bubble"]
    status = main([*call, "--verify", "3", "--check-grid"])
    said = capsys.readouterr().out
    with capsys.disabled():
        print("\n" + said)
    how = "run one after the other" if torch.cuda.device_count() > 1 else "measured one by one"
    assert how in said and "best of a grid of" in said and (tmp_path / "plan.toml").exists()
    assert status == 0, "the chosen plan is more than 2 % slower than the best of the grid"


def test_tensor_parallel_stages_are_measured(tmp_path, capsys):
    """On one GPU they are refused with the degree that works; on two their processes answer."""
    call = ["plan", TWO_GPUS, *SMALL, f"--job.dump_folder={tmp_path}", "--policies", "1f1b", "--verify", "0"]
    status = main([*call, "--parallelism.tensor_parallel_degree=2"])
    captured = capsys.readouterr()
    if torch.cuda.device_count() < 2:
        assert status == 2 and "set it to 1, or use --analytic" in captured.err
        return
    with capsys.disabled():
        print("\n" + captured.out)
    assert status == 0 and "PP2 x TP2" in captured.out and "fit: worst error" in captured.out


def test_a_trace_by_events(tmp_path):
    trace = ActionTrace(DEVICE)
    schedule = build_schedule("1f1b", 1, 1, 1)
    x = torch.randn(2048, 2048, device=DEVICE)
    for step in range(2):
        trace.begin()
        for kind in (Kind.F, Kind.B):
            with trace(Action(0, kind, 0, 0)):
                for _ in range(20):
                    x @ x
        trace.end(step)
    trace.write(tmp_path, 0, schedule, [64])
    found = read_trace(tmp_path)
    (forward, backward), = found.steps[1].spans
    assert 0 < forward.end - forward.start < 1 and forward.end <= backward.start < backward.end
    assert found.peak_bytes >= x.numel() * 4
