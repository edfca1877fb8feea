"""Measuring and tracing on a CUDA device: figures that make sense, and memory beside what is counted."""

import dataclasses

import pytest
import torch

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
        assert 0.7 * counted < point.saved_bytes < 1.3 * counted, (number, point.saved_bytes / counted)


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
