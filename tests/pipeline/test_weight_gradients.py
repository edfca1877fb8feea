"""Weight gradients that the product adds up: the gradients of autograd, and no product in memory."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stateflow.layer_graphs import CudaRecorder
from stateflow.layers import DecayGate, Mamba3Dynamics
from stateflow.pipeline.deferred import DeferredWeights, run_all
from stateflow.recompute import Recomputed
from stateflow.recurrence.numerics import add_product, adds_products
from stateflow.working_weights import WorkingWeights
from tests import cases


class Projections(nn.Module):
    """With and without a bias, frozen ones, one used twice, one tied to an embedding."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3, bias=False)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.frozen_weight, self.frozen_bias = nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen_weight.weight.requires_grad_(False)
        self.frozen_bias.bias.requires_grad_(False)
        self.embedding, self.tied = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, x, tokens):
        x = self.frozen_bias(self.frozen_weight(self.frozen(x.tanh()))).tanh()
        x = self.down(self.up(self.down(self.up(x).tanh())).tanh()) + self.embedding(tokens)
        return self.tied(x).transpose(0, -1)  # the gradient that comes back is not contiguous


def make_projections():
    torch.manual_seed(0)
    return Projections().double()


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3)])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("order", ["working", "working, put off", "put off, working"])
def test_any_linear_module(shape, needs_grad, order):
    plain, module = make_projections(), make_projections()
    deferred = None
    for step in order.split(", "):
        if step == "working":
            WorkingWeights(module, torch.float64)
        else:
            deferred = DeferredWeights(module)
    results = []
    for model in (plain, module):
        generator = torch.Generator().manual_seed(1)
        grads = []
        for _ in range(2):  # units add up
            x = torch.randn(shape, dtype=torch.float64, generator=generator)
            x = x.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_(needs_grad)
            y = model(x, torch.randint(0, 7, shape[:-1], generator=generator))
            loss = (y * torch.randn(y.shape, dtype=torch.float64, generator=generator)).sum()
            if model is plain or deferred is None:
                loss.backward()
            else:
                with deferred.collecting() as work:
                    loss.backward()
                assert len(work) == 6
                run_all(work)
            grads.append(x.grad)
        results.append([*grads, *(p.grad for p in model.parameters())])
    assert [p.requires_grad for p in module.parameters()].count(False) == 4
    for got, want in zip(*reversed(results), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)


CAT = torch.ops.aten.cat.default


class Products(TorchDispatchMode):
    """Notes the operations that return a tensor of one of `shapes`, and that tensor's address.

    Not views, and not the weights of projections that go together.
    """

    def __init__(self, shapes):
        super().__init__()
        self.shapes, self.seen = shapes, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.shape in self.shapes and not (func.is_view or func is CAT):
                self.seen.append((func, t.data_ptr()))
        return result


@pytest.mark.parametrize("how", ["kept", "recomputed", "put off", "recomputed, put off"])
@pytest.mark.parametrize("kind", ["gdn", "mamba3", "attention"])
def test_the_products_of_a_block_are_added_in_place(kind, how):
    model = cases.make_model([kind])
    weights = WorkingWeights(model, torch.float64, lambda m: isinstance(m, DecayGate | Mamba3Dynamics))
    block = model.layers["0"]
    linears = [m for m in block.modules() if isinstance(m, nn.Linear)]
    layer = Recomputed(block) if "recomputed" in how else block
    deferred = DeferredWeights(layer) if "put off" in how else None
    x = torch.randn(1, 5, model.config.dim, dtype=torch.float64, requires_grad=True)
    weights.prepare()
    y, _ = layer(x, block.mixer.initial_state(1, "cpu", torch.float64), None)
    handed_over = []
    for linear in linears:
        linear.weight.register_post_accumulate_grad_hook(lambda w: handed_over.append(w.grad))
    buffers = sorted(linear._parameters["weight"].grad.data_ptr() for linear in linears)
    with Products({linear.weight.shape for linear in linears}) as products:
        if deferred is None:
            y.square().sum().backward()
        else:
            with deferred.collecting() as work:
                y.square().sum().backward()
            assert not products.seen and len(work) == len(linears)
            run_all(work)
    assert {func for func, _ in products.seen} == {torch.ops.aten.addmm_.default}
    assert sorted(place for _, place in products.seen) == buffers
    assert all(grad is None for grad in handed_over)
    assert all(linear._parameters["weight"].grad.norm() > 0 for linear in linears)


def test_a_product_of_other_dtypes_is_made_and_added():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(s, generator=generator).bfloat16() for s in ((6, 5), (5, 4)))
    total = torch.randn(6, 4, generator=generator)
    expected = total + left.float() @ right.float()
    add_product(total, left, right)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    assert not adds_products(total.device, torch.bfloat16, torch.float32)


@pytest.mark.gpu
def test_a_gpu_adds_16_bits_to_float32():
    device = torch.device("cuda", torch.cuda.current_device())
    assert adds_products(device, torch.bfloat16, torch.float32)
    assert adds_products(device, torch.float16, torch.float32)
    assert not adds_products(device, torch.bfloat16, torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("num_out, num_in", [(6912, 2560), (2560, 6912), (20, 2560)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_real_sizes_are_added_up_in_float32(num_out, num_in, dtype):
    """Three units, the last two a recorded graph's; no second tensor of the size of the weight is allocated."""
    generator = torch.Generator("cuda").manual_seed(0)
    grad, x = (torch.randn(4096, n, device="cuda", generator=generator).to(dtype) for n in (num_out, num_in))
    total = torch.randn(num_out, num_in, device="cuda", generator=generator)
    expected = total.double() + 3 * (grad.t().double() @ x.double())
    place = total.data_ptr()
    add_product(total.clone(), grad.t(), x)  # the library's workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_product(total, grad.t(), x)
    if num_out * num_in > 2**20:
        assert torch.cuda.max_memory_allocated() - before < num_out * num_in * dtype.itemsize
    replay = CudaRecorder().record(lambda: add_product(total, grad.t(), x))
    for _ in range(2):
        replay()
    assert total.data_ptr() == place
    # Products of 16 bits are exact in float32; a sum rounded to 16 bits would be off by 1e-3.
    assert (total - expected).norm() <= 5e-5 * expected.norm()


@pytest.mark.gpu
def test_a_recorded_backward_of_a_projection_adds_to_its_buffer():
    linear = nn.Linear(2560, 6912, bias=False, device="cuda")
    weights = WorkingWeights(linear, torch.bfloat16)
    x = torch.randn(1, 4096, 2560, device="cuda").bfloat16()
    grad = torch.randn(1, 4096, 6912, device="cuda").bfloat16()
    weights.prepare()
    handed_over = []
    linear.weight.register_post_accumulate_grad_hook(lambda w: handed_over.append(w.grad))

    grads_x = []

    def run():
        leaf = x.detach().requires_grad_()
        linear(leaf).backward(grad)
        grads_x[:] = [leaf.grad]

    run()
    expected = grad[0].t().double() @ x[0].double()
    total = linear._parameters["weight"].grad
    assert (total - expected).norm() <= 5e-5 * expected.norm()
    replay = CudaRecorder().record(run)
    for _ in range(2):
        replay()
    assert (total - 3 * expected).norm() <= 15e-5 * expected.norm()
    expected_x = grad[0].double() @ linear.weight.detach().double()
    assert (grads_x[0][0] - expected_x).norm() <= 5e-3 * expected_x.norm()
    assert all(g is None for g in handed_over)
