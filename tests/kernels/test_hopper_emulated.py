"""The kernels for Hopper, emulated on the CPU: what they compute, and that their barriers fit together."""

import dataclasses
import sys

import pytest
import torch

from stateflow.recurrence import gated_delta_rule
from stateflow_kernels import hopper
from stateflow_kernels.gated_delta_rule import Tile, _Prepared, _Problem, default_plan
from stateflow_kernels.primitives import INTERPRETED
from tests.kernels.gluon_emulation import hopper_on_the_cpu
from tests.kernels.test_gated_delta_kernels import BOUNDS, exact, make_inputs, run, run_in_pieces, use_plans
from tests.recurrence.op_testing import assert_close, assert_same_bits, documents

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the other kernels must run on the CPU, too")

TRITON = dict(backend="triton", use_qk_l2norm_in_kernel=True)
PREPARE = Tile(64, 4, 2, specialized=True)
PLAN = dataclasses.replace(default_plan(64, 64, torch.bfloat16), gradient_chunks=2)


@pytest.fixture
def inputs(monkeypatch) -> list[torch.Tensor]:
    for name in ("K_DIMS", "MERGED_DIMS"):
        monkeypatch.setattr(hopper, name, (64,))  # smaller than where they run, to be quick
    torch.manual_seed(0)
    return make_inputs(1, 200, 2, 1, 64, 64, dtype=torch.bfloat16, normalize=True)


def test_all_gradients_from_one_kernel(inputs, monkeypatch):
    docs = documents(1, 200, rate=0.02)
    use_plans(monkeypatch, lambda *_, **__: PLAN)
    launches, launch = [], hopper.gradients
    monkeypatch.setattr(hopper, "gradients", lambda *args: launches.append(args) or launch(*args))
    with hopper_on_the_cpu(monkeypatch):
        results = run(inputs, docs, **TRITON)
        assert launches
        assert_same_bits(run_in_pieces(inputs, docs, [64], **TRITON), results)
    expected = run(exact(inputs), docs, backend="chunk", use_qk_l2norm_in_kernel=True)
    for result, reference, bound in zip(results, expected, BOUNDS[torch.bfloat16], strict=True):
        assert_close([result], [reference], bound)


@pytest.mark.parametrize(
    "walks",
    [
        {"transition": 2, "transition_backward": 3, "transition_out": 2},
        {"transition": 4, "transition_backward": 2, "transition_out": 3},  # three and more: another order
    ],
)
def test_walks_do_what_tritons_do(walks, inputs, monkeypatch):
    """On a GPU bit for bit; here sums have another order."""
    plan = dataclasses.replace(PLAN, gradient_chunks=0)
    use_plans(monkeypatch, lambda *_, **__: plan)
    expected = run(inputs, None, **TRITON)
    tiles = {name: Tile(32, 4, stages, specialized=True) for name, stages in walks.items()} | dict(pre=PREPARE)
    use_plans(monkeypatch, lambda *_, **__: dataclasses.replace(plan, **tiles))
    launches = []
    for name in (*walks, "prepare"):
        launch = getattr(hopper, name)
        monkeypatch.setattr(hopper, name, lambda *args, f=launch: launches.append(f) or f(*args))
    with hopper_on_the_cpu(monkeypatch):
        results = run(inputs, None, **TRITON)
        assert {f.__name__ for f in launches} == {*walks, "prepare"}
        assert_same_bits(run_in_pieces(inputs, None, [64], **TRITON), results)
    assert_close(results, expected, 1e-3)


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_prepares_what_triton_does(normalize, with_docs, monkeypatch):
    """Decays that forget within a chunk, beta up to 2, and keys of which many are nearly parallel."""
    monkeypatch.setattr(hopper, "K_DIMS", (64,))
    torch.manual_seed(0)
    q, k, v, g, beta, _ = make_inputs(
        *(1, 200, 1, 1, 64, 64), dtype=torch.bfloat16, normalize=normalize, max_beta=2.0, max_decay=0.3
    )
    k = (k + 10 * k[:, :1] * (torch.arange(200) % 2)[:, None, None]).detach()
    k = k if normalize else torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    problem = _Problem(q, v, documents(1, 200, rate=0.02) if with_docs else None, 0.1, 1e-6 if normalize else None)
    made = []
    for scores in (problem.tiles(64), problem.tiles(64)):
        prepared = _Prepared(problem)
        made.append([scores, prepared.solve, prepared.factors, prepared.gate_sum, prepared.k_norm])
        args = (problem, PREPARE, range(problem.num_chunks), q.detach(), k, g.detach(), beta.detach(), scores)
        if len(made) == 1:
            prepared.run(*args)
            continue
        with hopper_on_the_cpu(monkeypatch):
            prepared.run(*args)
            # With T given, all else is the same.
            again, other_scores = _Prepared(problem, prepared.solve), problem.tiles(64)
            again.run(*args[:-1], other_scores)
        assert_same_bits([other_scores, again.factors, again.gate_sum], [scores, *made[1][2:4]])
    for triton, hoppers, bound in zip(*made, [1e-3, 1e-3, 1e-5, 1e-6, 1e-6], strict=True):
        assert_close([hoppers], [triton], bound)


def test_a_reader_that_a_place_does_not_count_is_found(inputs, monkeypatch):
    use_plans(monkeypatch, lambda *_, **__: PLAN)
    with hopper_on_the_cpu(monkeypatch):
        monkeypatch.setattr(sys.modules["stateflow_kernels.hopper_gradients"], "READERS", (1,) * 10)
        with pytest.raises(AssertionError, match="arrivals|overwritten|nobody"):
            outputs = gated_delta_rule(*inputs, None, **TRITON)
            torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs])
