"""Layers that are recomputed by `Recomputed`, and working weights: the gradients of layers that keep everything."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stateflow.chunks import ChunkPlan
from stateflow.layer_graphs import CudaRecorder, LayerGraphs
from stateflow.layers import DecayGate, Mamba3Dynamics
from stateflow.loss import cross_entropy_sum
from stateflow.model import LanguageModel, ModelConfig
from stateflow.pipeline.local import run_local
from stateflow.pipeline.stage import ChunkStage
from stateflow.recompute import Recomputed
from stateflow.working_weights import WorkingWeights
from tests import cases

PLAN = ChunkPlan.explicit(13, [5, 1, 4, 3])


def make_stages(kinds, num_stages, dtype=torch.float64, working=None, graphs=None):
    """Stages of recomputed layers; `working`: the dtype of working weights, None for none."""
    model = cases.make_model(kinds, dtype)
    stages = cases.make_stages(model, num_stages, PLAN)
    for stage in stages:
        if working is not None:
            WorkingWeights(stage.module, working, lambda m: isinstance(m, DecayGate | Mamba3Dynamics))
        for name, block in list(stage.module.layers.named_children()):
            stage.module.layers.register_module(name, Recomputed(block, graphs))
    return model, stages


def gradients(stages):
    prefix = "_checkpoint_wrapped_module."
    return {name.replace(prefix, ""): grad for name, grad in cases.gradients_of(stages).items()}


@pytest.mark.parametrize("policy", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("working", [None, torch.float64], ids=["", "working weights"])
@pytest.mark.parametrize("with_docs", [False, True], ids=["", "documents"])
def test_gradients_equal_the_reference(policy, working, with_docs):
    model, stages = make_stages(["gdn", "attention", "mamba3", "gdn"], 2, working=working)
    tokens, labels = cases.make_batch(2, PLAN.seq_len, seed=3, ignore=0.2)
    docs = cases.make_documents(2, PLAN.seq_len, seed=3) if with_docs else None
    _, expected = cases.reference_gradients(model, tokens, labels, docs)
    schedule = cases.schedule_of(policy, 2, 2, PLAN)
    for stage in stages:
        if policy == "zero_bubble":
            stage.split_backward()
    for _ in range(2):  # a second step: gradient buffers are used again
        for stage in stages:
            stage.module.zero_grad()
        run_local(schedule, stages, PLAN, tokens, labels, docs=docs, loss_scale=1 / (labels != -100).sum().item())
        worst, name = cases.largest_difference(gradients(stages), expected)
        assert worst <= 1e-10, (name, worst)


class Repeats:
    """In place of `CudaRecorder`: a replay calls the function again, on the memory that it was recorded with."""

    def record(self, function):
        return function


def check_graphs(recorder, device, dtype, tolerance):
    """Three steps of recorded layers, with other tokens each, against the reference."""
    graphs = LayerGraphs(recorder)
    model, stages = make_stages(["gdn", "attention", "gdn", "mamba3"], 2, dtype, working=dtype, graphs=graphs)
    for stage in stages:
        stage.module.to(device)
    schedule = cases.schedule_of("1f1b", 2, 2, PLAN)
    for seed in range(3):
        tokens, labels = cases.make_batch(2, PLAN.seq_len, seed, ignore=0.2)
        docs = cases.make_documents(2, PLAN.seq_len, seed)
        reference, state = cases.make_model(model.config.layer_kinds()), {}
        for stage in stages:
            stage.module.zero_grad()
            for name, parameter in stage.module.named_parameters():
                with torch.no_grad():  # what an optimizer does
                    parameter.mul_(0.9)
                state[name.replace("_checkpoint_wrapped_module.", "")] = parameter
        reference.load_state_dict({name: p.detach().cpu().double() for name, p in state.items()})
        _, expected = cases.reference_gradients(reference, tokens, labels, docs)
        scale = 1 / (labels != -100).sum().item()
        on_device = (t.to(device) for t in (tokens, labels))
        run_local(schedule, stages, PLAN, *on_device, docs=docs.to(device), loss_scale=scale)
        grads = {name: grad.cpu().double() for name, grad in gradients(stages).items()}
        worst, name = cases.largest_difference(grads, expected)
        assert worst <= tolerance, (seed, name, worst)
    # Three recurrent layers, forward and backward, four lengths; of a sequence's last chunk no state goes on.
    assert graphs.num_recorded == 3 * 2 * 4


def test_recorded_layers_equal_the_reference():
    check_graphs(Repeats(), "cpu", torch.float64, 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-3)])
def test_cuda_graphs_of_layers_equal_the_reference(dtype, tolerance):
    check_graphs(CudaRecorder(), "cuda", dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("docs", [False, True], ids=["", "documents"])
def test_cuda_graphs_of_the_kernels_equal_launches(docs):
    """Mixed precision, the Triton kernels, chunks of two lengths; three steps, one gradient of each parameter."""
    config = ModelConfig(
        dim=512, num_layers=3, pattern=["gdn"], vocab_size=256, num_heads=4, head_k_dim=128, head_v_dim=128,
        ffn_dim=1024, init_seed=0,
    )  # fmt: skip
    plan = ChunkPlan.explicit(1920, [512, 512, 512, 384])
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 256, (2, plan.seq_len + 1), generator=generator).cuda()
    starts = cases.make_documents(2, plan.seq_len, seed=0, density=0.01).cuda() if docs else None
    results = []
    for graphs in (None, LayerGraphs(CudaRecorder())):
        model = LanguageModel(config).cuda()
        model.init_weights()
        WorkingWeights(model, torch.bfloat16, lambda m: isinstance(m, DecayGate))
        for name, block in list(model.layers.named_children()):
            model.layers.register_module(name, Recomputed(block, graphs))
        stage = ChunkStage(model, plan, torch.bfloat16, loss_fn=cross_entropy_sum)
        schedule = cases.schedule_of("1f1b", 1, 2, plan)
        for _ in range(3):
            model.zero_grad()
            losses = run_local(schedule, [stage], plan, text[:, :-1], text[:, 1:], docs=starts, loss_scale=1e-3)
        results.append((torch.stack(losses), {name: p.grad for name, p in model.named_parameters()}))
    (losses, expected), (recorded_losses, grads) = results
    assert graphs.num_recorded == 3 * 2 * 2  # layers, forward and backward, lengths
    torch.testing.assert_close(recorded_losses, losses, rtol=1e-4, atol=0)
    for name, grad in expected.items():
        assert grad.isfinite().all() and grad.norm() > 0, name
        assert (grads[name] - grad).norm() <= 5e-3 * grad.norm(), name


def test_a_recording_keeps_results_apart():
    graphs = LayerGraphs(Repeats())

    def double(tensors):
        return [2 * tensors[0], None if tensors[1] is None else tensors[1].clone()]

    results = [graphs.call("double", double, (torch.full((3,), float(i)), None)) for i in range(4)]
    assert [r[0].tolist() for r in results] == [[2.0 * i] * 3 for i in range(4)] and graphs.num_recorded == 1
    assert all(r[1] is None for r in results)
    for shape in ((3,), (4,), (4,)):  # with a second tensor, and then of another length, each recorded by itself
        graphs.call("double", double, (torch.ones(shape), torch.ones(shape)))
    assert graphs.num_recorded == 2
    with torch.autocast("cpu", torch.bfloat16):  # what was recorded computes in other types
        for _ in range(2):
            graphs.call("double", double, (torch.ones(3), None))
    assert graphs.num_recorded == 3


def test_only_inputs_live_and_the_last_product_is_left_out(monkeypatch):
    _, (stage,) = make_stages(["gdn"], 1)
    layer = stage.module.layers["0"]
    calls = []
    linear = nn.Linear.forward  # not hooks: these want each call
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: calls.append(self) or linear(self, x))
    x = torch.randn(1, 5, 12, dtype=torch.float64, requires_grad=True)
    state = layer.mixer.initial_state(1, "cpu", torch.float64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y, _ = layer(x, state, None)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (x, *state)}
    y.sum().backward()
    assert calls == [layer.mixer.o_proj, layer.feed_forward.w2, layer.mixer.o_proj]

    kept.clear()  # the same where only the state needs a gradient, as behind a frozen embedding
    state = tuple(t.requires_grad_() for t in state)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x.detach(), state, None)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (x, *state)}


def test_a_recorded_backward_is_one_of_the_inputs_that_need_a_gradient():
    _, (stage,) = make_stages(["gdn"], 1, graphs=LayerGraphs(Repeats()))
    layer, plain = stage.module.layers["0"], cases.make_model(["gdn"]).layers["0"]
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    for needs_grad in (False, False, True, True, False):
        grads = []
        for block in (layer, plain):
            leaf = x.clone().requires_grad_(needs_grad)
            state = [t.requires_grad_() for t in layer.mixer.initial_state(1, "cpu", torch.float64)]
            block(leaf, tuple(state), None)[0].square().sum().backward()
            grads.append([leaf.grad, *(t.grad for t in state)])
        for got, want in zip(*grads, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_an_update_that_needs_no_gradient_may_be_handed_one():
    _, (stage,) = make_stages(["attention"], 1)
    layer, plain = stage.module.layers["0"], cases.make_model(["attention"]).layers["0"]
    x, results = torch.randn(1, 3, 12, dtype=torch.float64), []
    for block in (layer, plain):
        block.mixer.wk.weight.requires_grad_(False)
        block.mixer_norm.weight.requires_grad_(False)
        state = [torch.linspace(0, 1, 2 * math.prod(spec.shape), dtype=torch.float64).view(1, 2, *spec.shape)
                 .requires_grad_() for spec in layer.mixer.state_spec(torch.float64)]  # fmt: skip
        y, (k, _) = block(x, tuple(state), None)
        (y.square().sum() + (k.sum() if k.requires_grad else 0)).backward()
        results.append([t.grad for t in state])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_outputs_without_a_gradient_and_no_gradient_at_all():
    _, (stage,) = make_stages(["gdn"], 1)
    layer, plain = stage.module.layers["0"], cases.make_model(["gdn"]).layers["0"]
    x = torch.randn(1, 5, 12, dtype=torch.float64, requires_grad=True)
    state = tuple(torch.randn_like(t) for t in layer.mixer.initial_state(1, "cpu", torch.float64))
    for pick in (lambda y, update: y.square().sum(), lambda y, update: update[3].square().sum()):
        results = []
        for block in (layer, plain):
            x.grad = None
            block.zero_grad()
            pick(*block(x, state, None)).backward()
            grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in block.named_parameters()}
            results.append({"x": x.grad} | grads)
        assert cases.largest_difference(*results)[0] <= 1e-12
    with torch.no_grad():
        assert not layer(x, state, None)[0].requires_grad
    layer.zero_grad()
    layer(x.detach(), state, None)[0].sum().backward()  # only parameters need gradients
    assert all(p.grad is not None for p in layer.feed_forward.parameters())


class TestWorkingWeights:
    def make(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))
        return model, WorkingWeights(model, torch.bfloat16, keep=lambda module: False)

    def test_it_computes_in_the_working_dtype_and_adds_up_in_that_of_the_parameters(self):
        model, _ = self.make()
        x = torch.randn(5, 3, dtype=torch.bfloat16)
        expected = [torch.zeros_like(p) for p in model.parameters()]
        copies = [p.detach().bfloat16().requires_grad_() for p in model.parameters()]
        for scale in (1.0, 1e-3, 3.0):
            y = model(x * scale)
            assert y.dtype == torch.bfloat16
            y.sum().backward()
            w0, b0, w1 = copies
            other = torch.nn.functional.linear(torch.nn.functional.linear(x * scale, w0, b0), w1)
            assert torch.equal(y, other)
            for total, grad in zip(expected, torch.autograd.grad(other.sum(), copies), strict=True):
                total += grad.float()
        for p, total in zip(model.parameters(), expected, strict=True):
            assert p.dtype == p.grad.dtype == torch.float32
            # Autograd rounds each gradient to 16 bits first.
            torch.testing.assert_close(p.grad, total, rtol=1e-2, atol=1e-2)

    def test_no_sum_is_rounded_to_the_working_dtype(self):
        linear = nn.Linear(3, 2)
        WorkingWeights(linear, torch.bfloat16)
        linear(torch.ones(257, 3, dtype=torch.bfloat16)).sum().backward()
        assert (linear._parameters["weight"].grad == 257).all()  # in 16 bits 256
        assert (linear._parameters["bias"].grad == 257).all()

    def test_a_step_of_the_optimizer_is_seen_and_buffers_stay(self):
        model, _ = self.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x, places = torch.randn(5, 3, dtype=torch.bfloat16), set()
        for _ in range(3):
            model(x).square().sum().backward()
            places.add((model[0]._parameters["weight"].grad.data_ptr(), model[0].weight.data_ptr()))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert torch.equal(model(x), model[1](model[0](x)))
            for module in model:
                assert torch.equal(module.weight, module._parameters["weight"].bfloat16())
        assert len(places) == 1

    def test_a_new_step_casts_whatever_the_version_counters_say(self):
        model, _ = self.make()
        x = torch.randn(5, 3, dtype=torch.bfloat16)
        model(x).sum().backward()
        model[0]._parameters["weight"].data.mul_(2)  # uncounted
        model.zero_grad()
        model(x)
        assert torch.equal(model[0].weight, model[0]._parameters["weight"].bfloat16())

    def test_a_gradient_that_someone_replaced_counts(self):
        model, _ = self.make()
        x = torch.randn(5, 3, dtype=torch.bfloat16)
        model(x).sum().backward()
        first = [p.grad.clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = 2 * p.grad
        model(x).sum().backward()
        for p, grad in zip(model.parameters(), first, strict=True):
            assert torch.equal(p.grad, 3 * grad)

    def test_names_of_parameters_and_checkpoints_stay(self):
        model, weights = self.make()
        model(torch.randn(5, 3, dtype=torch.bfloat16)).sum().backward()
        names = ["0.weight", "0.bias", "1.weight"]
        assert list(model.state_dict()) == [n for n, _ in model.named_parameters()] == names
        assert all(t.dtype == torch.float32 for t in model.state_dict().values())
        assert [w.parameter for w in weights.of(model[0])] == list(model[0].parameters())


class Adapted(nn.Linear):
    """A frozen projection and a small one beside it."""

    def __init__(self, base: nn.Linear):
        super().__init__(base.in_features, base.out_features, bias=False, dtype=torch.float64)
        self.weight = base.weight.requires_grad_(False)
        self.small = nn.Linear(base.in_features, base.out_features, dtype=torch.float64)
        nn.init.ones_(self.small.weight)

    def forward(self, x):
        return F.linear(x, self.weight) + self.small(x)


def replaced(block):
    block.feed_forward.w2 = Adapted(block.feed_forward.w2)


def wrapped(block):
    w2 = block.feed_forward.w2
    block.feed_forward.w2 = nn.Sequential(w2, nn.RMSNorm(w2.out_features, dtype=torch.float64))


def with_a_hook(block):
    block.feed_forward.w2.register_forward_hook(lambda module, args, y: 2 * y)


def with_a_backward_hook(block):
    block.feed_forward.w2.register_full_backward_hook(lambda module, grads, _: (2 * grads[0],))


def with_a_bias(block):
    block.feed_forward.w2.bias = nn.Parameter(torch.ones_like(block.feed_forward.w2.weight[:, 0]))


@pytest.mark.parametrize("change", [replaced, wrapped, with_a_hook, with_a_backward_hook, with_a_bias])
def test_a_last_projection_that_does_more_than_multiply(change):
    results = []
    for recompute in (False, True):
        model = cases.make_model(["attention"], torch.float64)
        block = model.layers["0"]
        change(block)
        layer = Recomputed(block) if recompute else block
        x = torch.linspace(-1, 1, 5 * model.config.dim, dtype=torch.float64).view(1, 5, -1).requires_grad_()
        y, _ = layer(x, block.mixer.initial_state(1, "cpu", torch.float64), None)
        (y * torch.linspace(1, 2, y.numel(), dtype=torch.float64).view_as(y)).sum().backward()
        results.append({"x": x.grad, **{name: p.grad for name, p in block.named_parameters() if p.requires_grad}})
    expected, grads = results
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: name + text)


def test_second_derivatives_are_refused():
    model = cases.make_model(["attention"], torch.float64)
    block = model.layers["0"]
    x = torch.ones(1, 5, model.config.dim, dtype=torch.float64, requires_grad=True)
    y, _ = Recomputed(block)(x, block.mixer.initial_state(1, "cpu", torch.float64), None)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


@pytest.mark.parametrize("forward, backward", [(True, False), (False, True)])
def test_autocast_of_the_forward_counts_when_it_is_computed_again(forward, backward):
    results = []
    for recompute in (False, True):
        model = cases.make_model(["attention"], torch.float32)
        layer = Recomputed(model.layers["0"]) if recompute else model.layers["0"]
        x = torch.linspace(-1, 1, 5 * model.config.dim).view(1, 5, -1).requires_grad_()
        state = model.layers["0"].mixer.initial_state(1, "cpu", torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            y, _ = layer(x, state, None)
        with torch.autocast("cpu", torch.bfloat16, enabled=recompute and backward):
            y.square().sum().backward()
        results.append({"x": x.grad, **{name: p.grad for name, p in model.layers["0"].named_parameters()}})
    expected, grads = results
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name
