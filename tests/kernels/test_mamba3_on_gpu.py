"""Mamba-3's kernels at real sizes: every size of heads, the same bits each time, very long tensors.

On a new machine the first run compiles for minutes.
"""

import dataclasses
import itertools

import pytest
import torch

import stateflow_kernels.plans
from stateflow.recurrence import mamba3, mamba3_kernels, self_check
from stateflow_kernels import hopper, hopper_mamba3
from stateflow_kernels.mamba3_rule import Mamba3Plan
from tests.kernels.test_mamba3_kernels import (
    BOUNDS,
    BY_TOKEN,
    TRITON,
    compare,
    exact,
    grads_like,
    make_inputs,
    make_layer,
    run,
    run_in_pieces,
    use_plans,
    without_sums,
)
from tests.recurrence.op_testing import assert_close, assert_same_bits, documents

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

SIZES = [(128, 64, 32), (128, 64, 64), (64, 64, 16), (96, 96, 24), (128, 128, 32), (256, 256, 64), (32, 40, 8)]
OVERLAP = dict(cuts=(0.3, 0.6), overlap_backward=True)
TWO_KERNELS = dict(gradient_heads=0)
GIB = 2**30


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch):
    """A plan that was replaced would make these tests say nothing."""
    monkeypatch.setattr(self_check, "_outcomes", {})
    monkeypatch.setattr(mamba3_kernels, "_chosen", {})
    yield
    replaced = {problem: outcome for (problem, plan), outcome in self_check._outcomes.items() if outcome.plan != plan}
    assert not replaced


def use_default_with(monkeypatch, **changes) -> None:
    """The default plan of each call, with these fields changed."""

    def plan_for(family, *, device, dtype, k_dim, v_dim, **_) -> Mamba3Plan:
        return dataclasses.replace(
            stateflow_kernels.plans.fallback_plan(device, dtype, k_dim, v_dim, family), **changes
        )

    use_plans(monkeypatch, plan_for)


def make(*args, dtype=torch.bfloat16):
    return make_inputs(*args, dtype=dtype, device="cuda")


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_sizes_of_heads(dtype, sizes, with_docs):
    if dtype == torch.float32 and sizes[0] > 128:
        pytest.skip("refused")
    torch.manual_seed(0)
    inputs = make(2, 300, 3, *sizes, dtype=dtype)
    docs = documents(2, 300, rate=0.02) if with_docs else None
    # The chunk form in float64 on the CPU: the recurrence token by token agrees with it, and is slow at these sizes.
    compare(run(inputs, docs, **TRITON), run(exact(inputs), docs, backend="chunk"), BOUNDS[dtype])


@pytest.mark.parametrize("heads", [24, 40, 80])
def test_long_sequences(heads):
    """Gradients of angles add up the errors of all later tokens, which grow with the root of their number."""
    torch.manual_seed(0)
    inputs = make(1, 4096 + 70, heads, 128, 64, 32)
    high = [x.detach().double().requires_grad_() for x in inputs]
    bounds = BOUNDS[torch.bfloat16] | dict.fromkeys(("dangle", "dtheta"), 4e-2)
    compare(run(inputs, None, **TRITON), [x.cpu() for x in run(high, None, backend="chunk")], bounds)


def test_closed_gates():
    """z sigmoid(z) far below zero is small, and right to as many digits as elsewhere."""
    torch.manual_seed(0)
    inputs = make(1, 300, 24, 128, 64, 32)
    with torch.no_grad():
        inputs[1] -= 7
    compare(run(inputs, None, **TRITON), run(exact(inputs), None, backend="chunk"), BOUNDS[torch.bfloat16])


@pytest.fixture
def launches(monkeypatch) -> list:
    """Of the one kernel for all gradients."""
    if not hopper.available(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper, and a Triton that the kernel is written for")
    found, launch = [], hopper_mamba3.gradients
    monkeypatch.setattr(hopper_mamba3, "gradients", lambda back: found.append(back) or launch(back))
    return found


@pytest.mark.parametrize("with_docs", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_gradients_from_one_kernel(dtype, heads, with_docs, monkeypatch, launches):
    use_default_with(monkeypatch, gradient_heads=heads)
    torch.manual_seed(0)
    inputs = make(1, 300, 7, 128, 64, 32, dtype=dtype)
    docs = documents(1, 300, rate=0.02) if with_docs else None
    results = run(inputs, docs, **TRITON)
    assert launches
    compare(results, run(exact(inputs), docs, backend="chunk"), BOUNDS[dtype])


@pytest.mark.parametrize("changes", [{}, OVERLAP, TWO_KERNELS], ids=["serial", "overlap", "two kernels"])
def test_cuts_and_splits_of_one_sequence_give_the_same_bits(changes, monkeypatch):
    use_default_with(monkeypatch, **changes)
    torch.manual_seed(0)
    inputs = make(1, 1000, 20, 128, 64, 32)
    docs = documents(1, 1000, rate=0.005)
    whole = without_sums(run(inputs, docs, **TRITON))
    assert_same_bits(without_sums(run_in_pieces(inputs, docs, [128, 192, 896], **TRITON)), whole)


@pytest.mark.parametrize("changes", [{}, OVERLAP, TWO_KERNELS], ids=["serial", "overlap", "two kernels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_hundred_runs_give_the_same_bits(dtype, changes, monkeypatch):
    use_default_with(monkeypatch, **changes)
    torch.manual_seed(0)
    inputs = make(1, 1000, 20, 128, 64, 32, dtype=dtype)
    docs = documents(1, 1000, rate=0.005)
    first = run(inputs, docs, **TRITON)
    for _ in range(99):
        assert_same_bits(run(inputs, docs, **TRITON), first)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("sizes", [(128, 64, 32), (96, 96, 24)], ids=str)
def test_cuts_and_splits_give_the_same_bits(dtype, sizes, monkeypatch):
    torch.manual_seed(0)
    inputs = make(2, 1000, 3, *sizes, dtype=dtype)
    docs = documents(2, 1000, rate=0.005)
    whole = without_sums(run(inputs, docs, **TRITON))
    for changes, cuts in itertools.product(({}, OVERLAP), ([], [128, 192, 896])):
        use_default_with(monkeypatch, **changes)
        assert_same_bits(without_sums(run_in_pieces(inputs, docs, cuts, **TRITON)), whole)


def test_a_batch_is_its_sequences():
    torch.manual_seed(0)
    inputs = make(3, 200, 2, 64, 64, 16)
    outputs = mamba3(*inputs, **TRITON)
    for b in range(3):
        one = [x if 8 <= i < 14 else x[b : b + 1] for i, x in enumerate(inputs)]
        assert_same_bits(mamba3(*one, **TRITON), [x[b : b + 1] for x in outputs])


@pytest.mark.parametrize("changes", [{}, OVERLAP], ids=["serial", "overlap"])
def test_in_a_cuda_graph(changes, monkeypatch):
    use_default_with(monkeypatch, **changes)
    torch.manual_seed(0)
    inputs = [x.detach() for x in make(1, 500, 2, 128, 64, 32)]
    expected = mamba3(*inputs, **TRITON)  # also the self-check, which cannot run in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = mamba3(*inputs, **TRITON)
    for x in outputs:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(outputs, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_compiled_with_inductor(dtype):
    layer = make_layer("cuda", "triton")
    layer = layer.to(dtype)
    compiled = torch.compile(layer, fullgraph=True)
    for num_tokens in (100, 70, 164):  # from the second on with a symbolic length
        x = torch.randn(1, num_tokens, 16, device="cuda", dtype=dtype, requires_grad=True)
        results = []
        for form in (compiled, layer):
            y, state = form(x)
            outputs = [y, *state]
            results.append([*outputs, *torch.autograd.grad(outputs, [x, *layer.parameters()], grads_like(outputs))])
        assert_close(*results, 1e-5 if dtype == torch.float32 else 3e-2)


def test_more_than_2_31_elements():
    """Of x, z and y. The last document is a short sequence, bit for bit."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 100 * GIB:
        pytest.skip("needs 100 GiB of free GPU memory")
    num_tokens, last, heads, sizes = 2**18 + 100, 2**18, 160, (32, 64, 8)
    assert num_tokens * heads * 64 > 2**31 and last % 64 == 0
    torch.manual_seed(0)
    with torch.device("cuda"):
        inputs = [x.detach() for x in make(1, num_tokens, heads, *sizes)]
        docs = torch.tensor([[-1] * last + [last] * (num_tokens - last)])
    y, *states = mamba3(*inputs, docs, **TRITON)
    short = [x[:, last:].contiguous() if i in range(8) else x for i, x in enumerate(inputs)]
    short_y, *short_states = mamba3(*short, docs[:, last:] - last, **TRITON)
    assert_same_bits([short_y, *short_states], [y[:, last:], *states])
    inputs = [x.requires_grad_() if i in range(8) else x for i, x in enumerate(inputs)]
    outputs = mamba3(*inputs, docs, **TRITON)
    grads = torch.autograd.grad(outputs, inputs[BY_TOKEN], [torch.ones_like(x) for x in outputs])
    short = [x.detach().requires_grad_() if i in range(8) else x for i, x in enumerate(short)]
    short_outputs = mamba3(*short, docs[:, last:] - last, **TRITON)
    short_grads = torch.autograd.grad(short_outputs, short[BY_TOKEN], [torch.ones_like(x) for x in short_outputs])
    assert_same_bits([x[:, last:] for x in grads], short_grads)
    assert all(x[:, : last : 2**12].isfinite().all() for x in grads)
