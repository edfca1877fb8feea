"""Projections of one tensor: what calling them one by one gives, without additions of gradients."""

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
    assert_equal(results, expected)


def test_weights_of_unused_outputs_are_not_looked_at():
    module, x = make(True), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    module.last.weight.data.fill_(torch.inf)
    module(x)[1].sum().backward()  # b of its pair is unused, too
    assert x.grad.isfinite().all()
    assert module.a.weight.grad is not None and module.b.weight.grad is None and module.last.weight.grad is None


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


def kinds_of_hooks():
    of_module = (
        "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
        "register_full_backward_pre_hook",
    )  # fmt: skip
    yield from ((name, lambda linear, hook, name=name: getattr(linear, name)(hook)) for name in of_module)
    for name in ("register_module_forward_hook", "register_module_full_backward_hook"):
        yield name, lambda linear, hook, name=name: getattr(nn.modules.module, name)(hook)


@pytest.mark.parametrize("register", [pytest.param(register, id=name) for name, register in kinds_of_hooks()])
def test_every_kind_of_hook_is_called(register):
    module, calls = make(True), []
    handle = register(module.a, lambda linear, *_: calls.append(linear))
    try:
        run(module, (4, 6))
    finally:
        handle.remove()
    assert calls.count(module.a) == 2


def test_a_forward_that_one_projection_has_of_its_own_is_called():
    module, x = make(True), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    plain = module(x)[1]
    module.a.forward = lambda x: 2 * nn.functional.linear(x, module.a.weight)
    torch.testing.assert_close(module(x)[1], 2 * plain)


def test_a_weight_that_is_computed_is_computed_once():
    class Counted(nn.Module):
        calls = 0

        def forward(self, weight):
            self.calls += 1
            return 2 * weight

    module, counted, x = make(True), Counted(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    nn.utils.parametrize.register_parametrization(module.a, "weight", counted)
    counted.calls = 0
    module(x)[1].sum().backward()
    assert counted.calls == 1
    expected = 2 * x.detach().sum(0).expand(3, 6)
    torch.testing.assert_close(module.a.parametrizations.weight.original.grad, expected)


def test_autocast_gives_gradients_of_the_parameters_dtype():
    results = []
    for module in (make(True).float(), make(False).float()):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = module(x)
        assert all(y.dtype == torch.bfloat16 for y in outputs)
        sum(y.float().square().sum() for y in outputs).backward()
        results.append([x.grad, *(p.grad for p in module.parameters())])
    assert_equal(*results)


@pytest.mark.parametrize("working", [False, True])
def test_a_backward_under_autocast_computes_as_its_forward_did(working):
    results = []
    for on in (False, True):
        module = make(True).float()
        if working:
            WorkingWeights(module, torch.float32)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
        loss = sum(y.square().sum() for y in module(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss.backward()
        results.append([x.grad, *(p.grad for p in module.parameters() if p.requires_grad)])
    for without, under in zip(*results, strict=True):
        assert torch.equal(without, under)


def second_derivatives(module):
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    loss = sum(y.square().sum() for y in module(x))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def test_second_derivatives():
    assert_equal(second_derivatives(make(True)), second_derivatives(make(False)))


@pytest.mark.parametrize("kept", ["working", "put off"])
def test_second_derivatives_of_weights_that_add_up_themselves_are_refused(kept):
    module = make(True)
    WorkingWeights(module, torch.float64) if kept == "working" else DeferredWeights(module)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        second_derivatives(module)


def test_transforms_of_functions_go_through():
    module, x = make(True), torch.randn(4, 6, dtype=torch.float64)

    def loss(x):
        return sum(y.square().sum() for y in module(x))

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(x), leaf.grad)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), leaf.grad)


def test_on_the_meta_device():
    module, x = make(True).to("meta"), torch.randn(4, 6, dtype=torch.float64, device="meta", requires_grad=True)
    outputs = module(x)
    sum(y.sum() for y in outputs).backward()
    assert x.grad.shape == x.shape and [len(y.T) for y in outputs] == [8, 3, 3, 5, 4]
