"""A Mamba-3 layer whose projections run beside its kernels: the bits of the layer that is called part by part."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stateflow.layer_graphs import CudaRecorder, LayerGraphs
from stateflow.layers import Block, Mamba3, Mamba3Dynamics, mamba3_overlap
from stateflow.layers.mamba3_overlap import AtOnce
from stateflow.pipeline.deferred import DeferredWeights, run_all
from stateflow.recompute import Recomputed
from stateflow.working_weights import WorkingWeights
from stateflow_kernels import plans
from stateflow_kernels.mamba3_rule import Mamba3Plan
from tests.kernels.kernel_testing import on_devices
from tests.recurrence.op_testing import (
    LargestTensor,
    assert_close,
    assert_same_bits,
    documents,
    poisoned_memory,
    with_grads,
)

DIM, TOKENS = 10, 21


def make_layer(overlap: str, **options) -> Mamba3:
    torch.manual_seed(0)
    sizes = dict(head_dim=4, state_dim=8, num_angles=2, chunk_size=8, backend="chunk") | options
    return Mamba3(DIM, 3, overlap_projections=overlap, **sizes).double()


def make_arguments(layer: Mamba3, tokens: int = TOKENS, batch: int = 2) -> tuple[Tensor, tuple[Tensor, ...]]:
    torch.manual_seed(1)
    weight = layer.out_proj.weight
    state = tuple(torch.randn(batch, *spec.shape) for spec in layer.state_spec(weight.dtype))
    state = tuple(x.to(weight.device, weight.dtype if weight.dtype == torch.float64 else torch.float32) for x in state)
    x = torch.randn(batch, tokens, weight.shape[0]).to(weight)
    return x.requires_grad_(), tuple(s.requires_grad_() for s in state)


def results(layer: nn.Module, docs: Tensor | None = None, run=None, **sizes) -> list[Tensor]:
    mixer = layer.mixer if isinstance(layer, Block) else layer
    x, state = make_arguments(mixer, **sizes)
    y, update = (run or layer)(x, state, docs)
    return with_grads([y, *update], [x, *state, *layer.parameters()])


@pytest.fixture
def calls(monkeypatch) -> list[AtOnce]:
    """Of the one operation, with what may run at once."""
    found, update = [], mamba3_overlap.update
    monkeypatch.setattr(mamba3_overlap, "update", lambda *args: found.append(args[-1]) or update(*args))
    return found


@pytest.mark.parametrize("with_docs", [False, True])
def test_all_gradients_are_those_of_the_parts(with_docs, calls):
    docs = documents(2, TOKENS) if with_docs else None
    expected = results(make_layer("off"), docs)
    assert not calls
    with poisoned_memory():  # x, z and the gradient of y are written late, but before they are read
        assert_same_bits(results(make_layer("on"), docs), expected)
    assert calls == [AtOnce(True, True)]
    # And of the definition, token by token.
    assert_close(expected, results(make_layer("off", backend="reference"), docs))


def test_a_backward_under_autocast_computes_as_its_forward_did(calls):
    found = []
    for on in (False, True):
        layer = make_layer("on").float()
        x, state = make_arguments(layer)
        y, update = layer(x, state)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            sum(t.square().sum() for t in (y, *update)).backward()
        found.append([x.grad, *(s.grad for s in state), *(p.grad for p in layer.parameters())])
    assert len(calls) == 2
    assert_same_bits(*found)


def test_frozen_weights_get_no_gradient(calls):
    found = []
    for overlap in ("off", "on"):
        layer = make_layer(overlap)
        for module in (layer.z_proj, layer.dt_proj, layer.out_proj):
            module.requires_grad_(False)
        x, state = make_arguments(layer)
        y, update = layer(x, state)
        sum((t**2).sum() for t in (y, *update)).backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    assert len(calls) == 1 and [g is None for g in found[0]] == [g is None for g in found[1]]
    assert_same_bits(*([g for g in grads if g is not None] for grads in found))


def test_an_output_projection_with_a_hook_is_called(calls):
    """As under tensor parallelism, where it sums over ranks."""
    found = []
    for overlap in ("off", "on"):
        layer = make_layer(overlap)
        layer.out_proj.register_forward_hook(lambda _module, _args, output: 3 * output)
        found.append(results(layer))
    assert len(calls) == 1
    assert_same_bits(*found)


def test_documents_are_checked_as_the_parts_do(calls):
    for overlap in ("on", "off"):
        x, state = make_arguments(layer := make_layer(overlap))
        with pytest.raises(ValueError, match=r"docs\[0, 0\] = 3"):  # by a block, which calls no mixer but this
            layer.update(x, state, torch.full((2, TOKENS), 3))
    assert len(calls) == 1


def test_an_empty_batch(calls):
    found = results(make_layer("on"), batch=0)
    assert len(calls) == 1
    assert_same_bits(found, results(make_layer("off"), batch=0))


@pytest.mark.parametrize("how", ["hook", "bias", "autocast", "dispatch mode", "no gradient", "reference"])
def test_where_calls_are_wanted_the_parts_are_called(how, calls):
    layer = make_layer("on", **({"backend": "reference"} if how == "reference" else {}))
    seen = []
    if how == "hook":
        layer.z_proj.register_forward_pre_hook(lambda *_: seen.append(1))
    if how == "bias":
        layer.B_proj = nn.Linear(DIM, 8, dtype=torch.float64)
    contexts = {"autocast": functools.partial(torch.autocast, "cpu"), "dispatch mode": LargestTensor}
    x, state = make_arguments(layer)
    x = x.detach() if how == "no gradient" else x
    if how in contexts:
        with contexts[how]():
            layer.update(x, state, None)
    else:
        layer.update(x, state, None)
    assert not calls and bool(seen) == (how == "hook")


def test_the_plan_decides_for_each_direction(monkeypatch, calls):
    layer = make_layer("auto", backend="auto")
    x, _ = make_arguments(layer)
    assert mamba3_overlap.wanted(layer, x) is None  # no kernels on a CPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for forward, backward in ((False, False), (True, False), (False, True)):
        plan = Mamba3Plan(overlap_projections=forward, overlap_projections_backward=backward)
        with plans.using(plan):
            expected = AtOnce(forward, backward) if forward or backward else None
            assert mamba3_overlap.wanted(layer, x) == expected
    with pytest.raises(ValueError, match="unknown overlap_projections 'maybe': use one of 'auto', 'on', 'off'"):
        make_layer("maybe")


def make_block(overlap: str) -> Block:
    return Block(DIM, make_layer(overlap), ffn_dim=12).double()


def test_recomputed_blocks(calls):
    torch.manual_seed(2)
    expected = results(block := make_block("off"))
    again = make_block("on")
    again.load_state_dict(block.state_dict())
    assert_same_bits(results(again, run=lambda *args: checkpoint(again, *args, use_reentrant=False)), expected)
    assert len(calls) == 2
    # `Recomputed` adds to .grad.
    x, state = make_arguments(again.mixer)
    y, update = Recomputed(again)(x, state, None)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in (y, *update)]
    torch.autograd.backward([y, *update], grads)
    assert_close([y, *update, x.grad, *(s.grad for s in state), *(p.grad for p in again.parameters())], expected)
    assert len(calls) == 4


@pytest.mark.parametrize("order", ["working", "put off", "working, put off"])
def test_weight_gradients_that_the_products_add_or_w_does(order, calls):
    expected, layer = results(make_layer("off")), make_layer("on")
    weights = None
    if "working" in order:
        weights = WorkingWeights(layer, torch.float64, lambda m: isinstance(m, Mamba3Dynamics))
    deferred = DeferredWeights(layer) if "put off" in order else None
    x, state = make_arguments(layer)
    y, update = layer(x, state)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in (y, *update)]
    if deferred is None:
        torch.autograd.backward([y, *update], grads)
    else:
        with deferred.collecting() as work:
            torch.autograd.backward([y, *update], grads)
        # The output projection first: its operands are there first.
        assert len(work) == 9 and work[0].weight.shape == layer.out_proj.weight.shape
        run_all(work)
    assert len(calls) == 1 and (weights is None or weights.of(layer))
    assert_close([x.grad, *(s.grad for s in state), *(p.grad for p in layer.parameters())], expected[5:])


@on_devices
def test_on_the_kernels(device, calls):
    """Interpreted without a GPU, where each launch ends before the next: what is read too early shows."""
    found = []
    for overlap in ("off", "on"):
        layer = make_layer(overlap, head_dim=16, state_dim=16, num_angles=4, chunk_size=64, backend="triton")
        with poisoned_memory():
            found.append(results(layer.float().to(device), batch=1, tokens=70))
    assert len(calls) == 1
    assert_same_bits(*found)


# ------------------------------------------------------------------------------- on a GPU
def make_large(overlap: str, dtype=torch.bfloat16) -> tuple[Mamba3, WorkingWeights]:
    torch.manual_seed(0)
    layer = Mamba3(512, 24, overlap_projections=overlap, backend="triton").cuda()
    weights = WorkingWeights(layer, dtype, lambda module: isinstance(module, Mamba3Dynamics))
    weights.prepare()
    return layer, weights


def large_results(layer: Mamba3, tokens: int) -> list[Tensor]:
    """With the gradients that products have added in float32."""
    layer.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(1, tokens, 512, device="cuda").bfloat16().requires_grad_()
    state = tuple(torch.randn(1, *s.shape, device="cuda").requires_grad_() for s in layer.state_spec(x.dtype))
    y, update = layer(x, state)
    torch.autograd.backward([y, *update], [torch.randn_like(t) for t in (y, *update)])
    return [y, *update, x.grad, *(s.grad for s in state), *(p.grad for p in layer.parameters())]


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tokens", [1000, 16384])
def test_same_bits_at_once_and_in_turn(tokens, monkeypatch):
    """The layer's parts, the one operation on one stream, and with the walks on side streams, five times over."""
    expected = large_results(make_large("off")[0], tokens)
    layer, _ = make_large("on")
    wanted = mamba3_overlap.wanted
    monkeypatch.setattr(mamba3_overlap, "wanted", lambda *args: wanted(*args) and AtOnce(False, False))
    assert_same_bits(large_results(layer, tokens), expected)
    monkeypatch.setattr(mamba3_overlap, "wanted", wanted)
    for _ in range(5):
        assert_same_bits(large_results(layer, tokens), expected)


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_the_plan_turns_it_on(calls):
    layer, _ = make_large("auto")
    plan = plans.fallback_plan(torch.device("cuda", 0), torch.bfloat16, 128, 64, "mamba3")
    with plans.using(dataclasses.replace(plan, overlap_projections=True)):
        found = large_results(layer, 1000)
    assert calls == [AtOnce(True, False)]
    assert_same_bits(found, large_results(make_large("off")[0], 1000))


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_in_a_graph():
    """Recorded with its side streams; replays on other arguments."""
    outputs = []
    for overlap, graphs in (("off", None), ("on", LayerGraphs(CudaRecorder()))):
        torch.manual_seed(0)
        block = Block(512, Mamba3(512, 24, overlap_projections=overlap, backend="triton"), 640, backend="auto").cuda()
        weights = WorkingWeights(block, torch.bfloat16, lambda module: isinstance(module, Mamba3Dynamics))
        layer, found = Recomputed(block, graphs), []
        for seed in range(4):
            weights.prepare()
            torch.manual_seed(seed)
            x = torch.randn(1, 2048, 512, device="cuda").bfloat16().requires_grad_()
            state = tuple(torch.randn(1, *s.shape, device="cuda") for s in block.mixer.state_spec(x.dtype))
            y, update = layer(x, state, None)
            torch.autograd.backward([y, *update], [torch.randn_like(t) for t in (y, *update)])
            found += [y, *update, x.grad]
        outputs.append([*found, *(p.grad for p in block.parameters())])
        assert graphs is None or graphs.num_recorded == 2
    assert_same_bits(*outputs)
