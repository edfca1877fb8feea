"""The gradient scale of an optimizer step, without processes; the runs that take it are in test_training.py."""

from types import SimpleNamespace

import pytest
import torch
from torchtitan.config import JobConfig

from stateflow.titan.data import TokenCounter, valid_tokens
from stateflow.titan.pipeline import GlobalMean, corrected, make_global_mean

CPU = torch.device("cpu")


def test_one_scale_for_all_calls_of_an_optimizer_step():
    counter = TokenCounter()
    counter.add(1000)  # an earlier run's
    mean = GlobalMean(counter, 2, None, CPU)
    for counts, expected in (((10, 6), 1 / 16), ((0, 0), 1.0), ((3, 0), 1 / 3)):
        for count in counts:  # both batches are pulled before the first call
            counter.add(count)
        scales = [mean.next() for _ in range(2)]
        assert [scale.item() for scale in scales] == [expected] * 2 and scales[0].dtype == torch.float64


@pytest.mark.parametrize(("degree", "batch_size", "calls"), [(None, -1, 1), (1, 4, 2), (2, 4, 1), (2, 12, 3)])
def test_a_step_has_as_many_calls_as_the_trainer_makes(degree, batch_size, calls):
    config = JobConfig()
    config.training.local_batch_size, config.training.global_batch_size = 2, batch_size
    mesh = None if degree is None else SimpleNamespace(size=lambda: degree, get_group=lambda: "group")
    mean = make_global_mean(SimpleNamespace(get_optional_mesh={"batch": mesh}.get), config, CPU)
    assert mean.accumulation_steps == calls and mean.counter is valid_tokens
    assert mean.group == (None if degree in (None, 1) else "group")


def test_torchtitans_own_schedule_gets_the_scale_and_leaves_no_gradients_of_inference():
    part = torch.nn.Linear(2, 2)

    def infer(*_):
        part(torch.ones(2)).sum().backward()

    stage = SimpleNamespace(submod=part, _prepare_backward_infra=infer)
    schedule = SimpleNamespace(
        step=lambda *args, **kwargs: (args, kwargs), eval=lambda *args, **kwargs: kwargs, _has_backward=True,
        _maybe_get_loss=lambda stage, index: None if index else torch.tensor(6.0, dtype=torch.float32), _stage=stage,
    )  # fmt: skip
    counter = TokenCounter()
    corrected(schedule, GlobalMean(counter, 1, None, CPU))
    counter.add(4)
    assert schedule.step(1, target=2, document_ids=3, cu_seqlens=4) == ((1,), {"target": 2})
    assert schedule._maybe_get_loss(stage, 0) == 1.5 and schedule._maybe_get_loss(stage, 1) is None
    assert schedule.eval(target=2, document_ids=3) == {"target": 2, "return_outputs": False}
    stage._prepare_backward_infra()
    assert all(parameter.grad is None for parameter in part.parameters())
