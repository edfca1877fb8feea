"""Mamba-3's kernels for Hopper, emulated on the CPU: what they compute, and that their barriers fit together."""

import dataclasses

import pytest
import torch

import stateflow_kernels.mamba3_rule as rule
from stateflow.recurrence.mamba3_kernels import A_FLOOR, NORM_EPS
from stateflow_kernels import hopper_mamba3
from stateflow_kernels.mamba3_rule import default_plan
from stateflow_kernels.primitives import INTERPRETED
from tests.kernels.gluon_emulation import hopper_on_the_cpu
from tests.kernels.test_mamba3_kernels import TRITON, check, make_inputs, run_in_pieces, use_plans, without_sums
from tests.recurrence.op_testing import assert_close, assert_same_bits, documents

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the other kernels must run on the CPU, too")

DEFAULT = default_plan(128, 64, torch.bfloat16)
TILES = {name: dataclasses.replace(getattr(DEFAULT, name), specialized=True) for name in rule.SPECIALIZED}
PLAN = dataclasses.replace(DEFAULT, **TILES)
SIZES = (128, 64, 32)


@pytest.fixture(autouse=True)
def plan(monkeypatch):
    use_plans(monkeypatch, lambda *_, **__: PLAN)
    monkeypatch.setattr(hopper_mamba3, "HEADS", 2)


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """Names of what was launched in this form."""
    found: list[str] = []
    for name in ("local", "out", "both"):
        launch = getattr(hopper_mamba3, name)
        monkeypatch.setattr(hopper_mamba3, name, lambda *args, f=launch: found.append(f.__name__) or f(*args))
    return found


@pytest.mark.parametrize(("num_tokens", "with_docs"), [(100, False), (150, True)])  # two chunks, three
def test_outputs_and_all_gradients_equal_the_recurrence(num_tokens, with_docs, monkeypatch, launches):
    torch.manual_seed(0)
    inputs = make_inputs(1, num_tokens, 3, *SIZES, dtype=torch.bfloat16)
    docs = documents(1, num_tokens, rate=0.03) if with_docs else None
    with hopper_on_the_cpu(monkeypatch):
        results = check(inputs, docs)
        assert launches == ["local", "out", "both"]
        assert_same_bits(without_sums(run_in_pieces(inputs, docs, [64], **TRITON)), without_sums(results))


@pytest.mark.parametrize("with_docs", [False, True])
def test_what_the_backward_starts_with_is_what_tritons_leave(with_docs, monkeypatch):
    """With the cosines and sines, and the boundaries' k and v; by the kernel for both and by those of their own."""
    torch.manual_seed(0)
    inputs = rule.Inputs(*(x.detach() for x in make_inputs(1, 100, 3, *SIZES, dtype=torch.float16)))
    docs = documents(1, 100, rate=0.03) if with_docs else None
    grads = (torch.randn_like(inputs.x), *(torch.zeros_like(x) for x in inputs[14:]))
    left = []
    with hopper_on_the_cpu(monkeypatch):
        for form in ("both", "specialised", "Triton's"):
            plan = DEFAULT if form == "Triton's" else PLAN
            prepared = rule.Prepared(rule.Problem(inputs, docs, NORM_EPS, A_FLOOR))
            back = rule.Backward(prepared, plan, grads)
            prepared.cos_sin_rows = prepared.problem.by_chunk(64, 64, dtype=torch.float16)
            prepared.gates()
            if form == "both":
                hopper_mamba3.both(prepared, prepared.whole, back)
            else:
                prepared.local(plan.local, prepared.whole)
                back.local(plan.local_backward)
            names = ("k_rows", "q_rows", "states", "k_bound", "v_bound", "cos_sin_rows")
            left.append([getattr(prepared, name) for name in names] + [back.grad_read, back.grad_states])
    assert_close(left[0], left[2], 1e-3)
    assert_close(left[1], left[2], 1e-3)


@pytest.mark.parametrize("with_docs", [False, True])
def test_no_bit_depends_on_how_many_heads_a_program_of_local_has(with_docs, monkeypatch):
    torch.manual_seed(0)
    inputs = rule.Inputs(*(x.detach() for x in make_inputs(1, 100, 4, *SIZES, dtype=torch.bfloat16)))
    docs = documents(1, 100, rate=0.03) if with_docs else None
    left = []
    with hopper_on_the_cpu(monkeypatch):
        for many, heads in ((80, 2), (4, 4)):
            monkeypatch.setattr(hopper_mamba3, "MANY_HEADS", many)
            assert hopper_mamba3.local_heads(4, with_rows=False) == heads
            assert hopper_mamba3.local_heads(4, with_rows=True) == hopper_mamba3.local_heads(5, with_rows=False) == 2
            prepared = rule.Prepared(rule.Problem(inputs, docs, NORM_EPS, A_FLOOR), with_rows=False)
            prepared.gates()
            prepared.local(PLAN.local, prepared.whole)
            left.append([getattr(prepared, name) for name in ("states", "k_bound", "v_bound")])
    assert_same_bits(*left)
