"""Projections of one tensor: what calling them one by one gives, without additions of gradients."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stateflow.pipeline.deferred import DeferredWeights, run_all
from stateflow.projections import project
from stateflow.working_weights import WorkingWeights


class Gates(nn.Module):
    def __init__(self, together: bool):
        super().__init__()
        self.wide, self.frozen, self.last = (nn.Linear(6, n, bias=False) for n in (8, 5, 4))
        self.a, self.b = (nn.Linear(6, 3, bias=False) for _ in range(2))
        self.frozen.weight.requires_grad_(False)
        self.together = together

    def forward(self, x):
        if self.together:
            return project(x, self.wide, (self.a, self.b), self.frozen, self.last)
        return [linear(x) for linear in (self.wide, self.a, self.b, self.frozen, self.last)]


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def run(module, shape, needs_grad=True, deferred=None, used=slice(None)):
    """Outputs, the gradient of x of two calls each, and the gradients of the weights, which add up."""
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(2):
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        x = x.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_(needs_grad)
        outputs = module(x)
        grads = [torch.randn(y.shape, dtype=torch.float64, generator=generator) for y in outputs]
        pairs = [(y, grad) for y, grad in list(zip(outputs, grads, strict=True))[used] if y.requires_grad]
        if deferred is None:
            torch.autograd.backward(*zip(*pairs, strict=True))
        else:
            with deferred.collecting() as work:
                torch.autograd.backward(*zip(*pairs, strict=True))
            assert len(work) == 4  # all but the frozen one
            run_all(work)
        results += [*(y.detach() for y in outputs), x.grad]
    return [*results, *(p.grad for p in module.parameters())]


def make(together: bool):
    torch.manual_seed(0)
    return Gates(together).double()


def assert_equal(results, expected):
    for got, want in zip(results, expected, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 5, 6)])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("steps", ["", "working", "put off", "working, put off", "put off, working"])
def test_results_are_those_of_calls_one_by_one(shape, needs_grad, steps):
    module, deferred = make(True), None
    for step in filter(None, steps.split(", ")):
        if step == "working":
            WorkingWeights(module, torch.float64)
        else:
            deferred = DeferredWeights(module)
    with torch.no_grad():
        module(torch.zeros(shape, dtype=torch.float64))  # makes the working weights
    assert_equal(run(module, shape, needs_grad, deferred), run(make(False), shape, needs_grad))


@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2), slice(3, None)])
def test_outputs_that_nothing_depends_on(used):
    results, expected = (run(make(together), (4, 6), used=used) for together in (True, False))
    for got, want in itertools.zip_longest(results, expected):
        if want is None:
            assert got is None or not got.any()
        else:
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kept", [False, True])
def test_the_products_add_up_the_gradient(kept):
    module = make(True)
    if kept:
        WorkingWeights(module, torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with Operations() as forward:
        outputs = module(x)
    with Operations() as backward:
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert forward.seen.count("mm") == 4  # of five projections
    for_weights = 4  # one of the five is frozen
    assert backward.seen.count("addmm_") == 3 + (for_weights if kept else 0)
    assert backward.seen.count("mm") == 1 + (0 if kept else for_weights)
    assert not [name for name in backward.seen if name.startswith("add.") or name.startswith("add_.")]


def test_the_same_bits_with_and_without_gradients():
    module, x = make(True).bfloat16(), torch.randn(4, 6).bfloat16().requires_grad_()
    with torch.no_grad():
        expected = module(x)
    assert all(torch.equal(got, want) for got, want in zip(module(x), expected, strict=True))


def test_hooks_and_biases_are_honoured():
    module, calls = make(True), []
    module.a.register_forward_pre_hook(lambda *_: calls.append("a"))
    assert_equal(run(module, (4, 6)), run(make(False), (4, 6)))
    assert calls == ["a", "a"]
    linear, x = nn.Linear(6, 3).double(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.equal(project(x, linear)[0], linear(x))


def test_a_compiled_part_calls_them_one_by_one():
    results = []
    for module in (torch.compile(make(True), backend="aot_eager", fullgraph=True), make(False)):
        results.append(run(module, (4, 6)))
    assert_equal(*results)
