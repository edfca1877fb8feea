"""Kernels that are wrong must not be trained on: the check finds them, says so once, and something right runs."""

import dataclasses
import logging

import pytest
import torch

import stateflow_kernels.gated_delta_rule as kernels
import stateflow_kernels.plans
from stateflow.recurrence import gated_delta_kernels, gated_delta_rule, self_check
from stateflow.recurrence.self_check import NAMES, Problem, Trial, checked_plan, safe_plans
from stateflow_kernels.gated_delta_rule import Plan, Tile
from stateflow_kernels.primitives import INTERPRETED
from tests.kernels.test_gated_delta_kernels import exact, make_inputs, run, use_plans
from tests.recurrence.op_testing import assert_close, assert_same_bits, documents

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def checks_on_the_cpu(monkeypatch):
    monkeypatch.setattr(self_check, "CHECKED_DEVICES", ("cpu",))
    monkeypatch.setattr(self_check, "_outcomes", {})
    monkeypatch.setattr(gated_delta_kernels, "_chosen", {})
    monkeypatch.setattr(self_check, "NUM_TOKENS", 110)


def problem(dtype: torch.dtype = torch.float32, **changes) -> Problem:
    fields = dict(num_heads=1, num_key_heads=1, k_dim=16, v_dim=16, normalize=True, has_docs=True) | changes
    return Problem(torch.device("cpu"), dtype, **fields)


def default() -> Plan:
    return stateflow_kernels.plans.fallback_plan(torch.device("cpu"), torch.float32, 16, 16)


def scale_in_backward(monkeypatch, wrong_for=lambda plan: True) -> None:
    """A planted fault: the backward takes another scale than the forward."""
    backward = kernels.backward

    def faulty(*args):
        *rest, scale, eps, plan = args
        return backward(*rest, scale * (1.05 if wrong_for(plan) else 1.0), eps, plan)

    monkeypatch.setattr(kernels, "backward", faulty)


def test_right_kernels_pass_silently_and_once(caplog, monkeypatch):
    asked = Plan(cuts=(0.3,))
    assert checked_plan(problem(torch.bfloat16), asked) is asked
    monkeypatch.setattr(kernels, "forward", None)  # a second check would fail
    assert checked_plan(problem(torch.bfloat16, batch=2), asked) is asked
    assert not caplog.records


def test_a_wrong_backward_makes_the_chunk_form_run(caplog, monkeypatch):
    scale_in_backward(monkeypatch)
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING):
        for normalize in (True, False):
            inputs = make_inputs(1, 30, 1, 1, 16, 16, normalize=normalize)
            docs = documents(1, 30, rate=0.1)
            options = dict(use_qk_l2norm_in_kernel=normalize)
            results = run(inputs, docs, backend="triton", **options)
            run(inputs, docs, backend="triton", **options)
            assert_close(results, run(exact(inputs), docs, backend="reference", **options), 1e-5)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 * 3, "two plans and what runs instead, once for each kind of problem"
    assert "failed their self-check with Plan(" in messages[0] and "dq 5.0e-02 (bound 2e-05)" in messages[0]
    assert " o " not in messages[0]
    assert messages[2].endswith("the chunk form in PyTorch runs instead")


def test_the_chunk_form_within_the_operation_takes_16_bits_and_shared_heads(monkeypatch):
    monkeypatch.setattr(self_check, "checked_plan", lambda *_: None)
    torch.manual_seed(0)
    inputs = make_inputs(2, 30, 1, 2, 16, 24, dtype=torch.bfloat16, normalize=True)
    results = run(inputs, None, backend="triton", use_qk_l2norm_in_kernel=True)
    assert [x.dtype for x in results] == [torch.bfloat16, torch.float32, *(x.dtype for x in inputs)]
    expected = run(exact(inputs), None, backend="reference", use_qk_l2norm_in_kernel=True)
    assert_close(results, expected, 8e-3)
    # opcheck compares with what the fake implementations promise.
    torch.library.opcheck(torch.ops.stateflow.gated_delta_rule_triton, (*inputs, None, 1.0, 1e-6, 1))


def test_a_plan_that_is_wrong_or_does_not_compile_is_replaced_by_the_next(caplog, monkeypatch):
    bad = Plan(out=Tile(128, 8, 3))
    scale_in_backward(monkeypatch, wrong_for=lambda plan: plan == default())
    forward = kernels.forward

    def limited(*args):
        if args[-1] == bad:
            raise RuntimeError("out of resource: shared memory\nRequired: 300000")
        return forward(*args)

    monkeypatch.setattr(kernels, "forward", limited)
    use_plans(monkeypatch, lambda *_, **__: bad)
    used = []
    launch = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *args: used.append(args[-1]) or launch(*args))
    with caplog.at_level(logging.WARNING), torch.no_grad():
        gated_delta_rule(*make_inputs(1, 5, 1, 1, 16, 16), backend="triton")
    smallest = safe_plans(problem(), bad)[2]
    assert used == [bad, default(), smallest, smallest]
    messages = [record.getMessage() for record in caplog.records]
    assert "RuntimeError" in messages[0] and "Required: 300000" in messages[0]
    assert "dstate" in messages[1] and messages[2].endswith(f"{smallest} runs instead")


def test_safe_plans():
    asked = Plan(cuts=(0.5,))
    plans = safe_plans(problem(), asked)
    assert plans[:2] == [asked, default()] and len(plans) == 3
    tiles = [x for x in vars(plans[2]).values() if isinstance(x, Tile)]
    assert len(tiles) == sum(isinstance(x, Tile) for x in vars(Plan()).values())
    assert all(tile.num_stages == 2 and tile.block_v <= 16 for tile in tiles)
    assert safe_plans(problem(), default()) == plans[1:]
    assert safe_plans(problem(), plans[2]) == [plans[2], default()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_error_counts_and_nan_does_not_pass(dtype):
    bounds = problem(dtype).bounds
    small = {name: bound / 2 for name, bound in bounds.items()}
    assert Trial(Plan(), small, None).misses(bounds) == []
    for name in NAMES:
        for error in (2 * bounds[name], float("nan"), float("inf")):
            (miss,) = Trial(Plan(), small | {name: error}, None).misses(bounds)
            assert miss.startswith(f"{name} ")
    assert Trial(Plan(), {}, "no").misses(bounds) == ["no"]


def test_a_lack_of_memory_is_no_verdict(monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernels, "forward", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        checked_plan(problem(), Plan())
    assert not self_check._outcomes


def test_problems_of_other_kinds_are_other_problems():
    other = [
        dict(num_heads=2),
        dict(num_heads=2, num_key_heads=2),
        dict(k_dim=32),
        dict(v_dim=32),
        dict(normalize=False),
        dict(has_docs=False),
        dict(in_segments=True),
    ]
    problems = {problem(), problem(torch.bfloat16), *(problem(**changes) for changes in other)}
    assert len(problems) == 2 + len(other)
    assert problem(batch=3) == problem()


def test_the_check_is_not_run_inside_a_capture(monkeypatch):
    on_gpu = dataclasses.replace(problem(), device=torch.device("cuda", 0))
    monkeypatch.setattr(self_check, "CHECKED_DEVICES", ("cuda",))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must run once before a CUDA graph captures them"):
        checked_plan(on_gpu, Plan())
    self_check._outcomes[on_gpu, Plan()] = self_check.Outcome(Plan(), ())
    assert checked_plan(on_gpu, Plan()) == Plan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_defaults_of_the_program_change_nothing(dtype):
    torch.manual_seed(0)
    inputs = make_inputs(1, 20, 1, 1, 16, 16)
    results = []
    for default_dtype in (torch.float32, dtype):
        torch.set_default_dtype(default_dtype)
        try:
            (trial,) = self_check.run(problem(), default()).trials
            results.append((trial.errors, run(inputs, None, backend="triton")))
        finally:
            torch.set_default_dtype(torch.float32)
    (errors, expected), (other_errors, others) = results
    assert other_errors == errors
    assert [x.dtype for x in others] == [x.dtype for x in expected]
    assert_same_bits(others, expected)


def test_random_numbers_of_the_run_are_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    self_check.run(problem(), Plan())
    assert torch.equal(torch.rand(3), expected)
