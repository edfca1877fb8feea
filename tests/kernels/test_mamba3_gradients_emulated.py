"""Mamba-3's one kernel for all gradients, emulated on the CPU: what it computes, and that its barriers fit together."""

import dataclasses
import sys

import pytest
import torch
from torch import Tensor

import stateflow_kernels.mamba3_rule as rule
from stateflow.recurrence import mamba3
from stateflow.recurrence.mamba3_kernels import A_FLOOR, NORM_EPS
from stateflow_kernels import hopper_mamba3
from stateflow_kernels.mamba3_rule import default_plan
from stateflow_kernels.primitives import INTERPRETED
from tests.kernels.gluon_emulation import hopper_on_the_cpu
from tests.kernels.test_mamba3_kernels import (
    TRITON,
    check,
    grads_like,
    make_inputs,
    run_in_pieces,
    use_plans,
    without_sums,
)
from tests.recurrence.op_testing import assert_close, assert_same_bits, documents

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the other kernels must run on the CPU, too")

# Of three heads, one program has two and another one.
PLAN = dataclasses.replace(default_plan(128, 64, torch.bfloat16), gradient_heads=2)
SIZES = (128, 64, 32)


@pytest.mark.parametrize(("num_tokens", "with_docs"), [(100, False), (150, True)])  # two chunks, three
def test_all_gradients_equal_the_recurrences(num_tokens, with_docs, monkeypatch):
    torch.manual_seed(0)
    inputs = make_inputs(1, num_tokens, 3, *SIZES, dtype=torch.bfloat16)
    docs = documents(1, num_tokens, rate=0.03) if with_docs else None
    use_plans(monkeypatch, lambda *_, **__: PLAN)
    launches, launch = [], hopper_mamba3.gradients
    monkeypatch.setattr(hopper_mamba3, "gradients", lambda back: launches.append(back) or launch(back))
    with hopper_on_the_cpu(monkeypatch):
        results = check(inputs, docs)
        assert launches
        assert_same_bits(without_sums(run_in_pieces(inputs, docs, [64], **TRITON)), without_sums(results))


def _left_behind(inputs: rule.Inputs, docs: Tensor | None, grads: list[Tensor], plan: rule.Mamba3Plan) -> dict:
    """What the gradient kernels leave, with the rows summed over all heads."""
    prepared = rule.Prepared(rule.Problem(inputs, docs, NORM_EPS, A_FLOOR))
    back = rule.Backward(prepared, plan, tuple(grads))
    prepared.gates()
    prepared.local(plan.local, back.whole)
    prepared.scan(plan.scan, back.whole)
    back.local(plan.local_backward)
    back.scan(plan.scan_backward)
    if back.gradient_heads:
        back.gradients()
    else:
        back.query_gradients(plan.query_gradients)
        back.key_gradients(plan.key_gradients)
    names = ("query_bias", "key_bias", "grad_gate", "grad_turn", "turn_total", "grad_scale", "grad_own", "grad_both")
    left = {name: getattr(back, name) for name in names} | dict(x=back.grads.x, z=back.grads.z)
    rows = ("query_rows", "key_rows", "speed_rows")
    return left | {name: getattr(back, name).float().sum(1) for name in rows}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_leaves_what_the_two_kernels_do(dtype, monkeypatch):
    torch.manual_seed(0)
    inputs = rule.Inputs(*(x.detach() for x in make_inputs(1, 100, 3, *SIZES, dtype=dtype)))
    docs = documents(1, 100, rate=0.03)
    grads = grads_like([inputs.x, inputs.theta, inputs.state, inputs.k_last, inputs.v_last])
    with hopper_on_the_cpu(monkeypatch):
        plans = (PLAN, dataclasses.replace(PLAN, gradient_heads=0))
        left, expected = (_left_behind(inputs, docs, grads, plan) for plan in plans)
    precision = 2**-8 if dtype == torch.bfloat16 else 2**-11
    exact = {"grad_turn", "turn_total", "grad_both"}
    # Of pairs in bfloat16.
    bounds = dict.fromkeys(exact, 1e-4) | dict.fromkeys(("grad_gate", "grad_scale", "grad_own"), 2**-8)
    for name in expected:
        assert_close([left[name]], [expected[name]], bounds.get(name, precision))


def test_a_reader_that_a_place_does_not_count_is_found(monkeypatch):
    """In one of a few runs: whether threads come to a place too early is a matter of luck."""
    torch.manual_seed(0)
    inputs = make_inputs(1, 64, 3, *SIZES, dtype=torch.bfloat16)
    use_plans(monkeypatch, lambda *_, **__: PLAN)
    with hopper_on_the_cpu(monkeypatch):
        monkeypatch.setattr(sys.modules["stateflow_kernels.hopper_mamba3_gradients"], "READERS", (1,) * 10)
        with pytest.raises(AssertionError, match="arrivals|overwritten|nobody"):
            for _ in range(10):
                outputs = mamba3(*inputs, None, **TRITON)
                torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs])
