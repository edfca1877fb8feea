"""The loss over a vocabulary that is cut over processes equals that of full logits, gradients included."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from stateflow.loss import cross_entropy_sum, reference_cross_entropy
from stateflow.model import logits
from stateflow.sharded_loss import sharded_linear_cross_entropy
from tests.recurrence.op_testing import assert_close, saved_tensors
from tests.workers import WorkerPool

NUM_RANKS, VOCAB = 3, 12
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def workers():
    pool = WorkerPool(NUM_RANKS)
    yield pool
    pool.close()


def make_inputs(group, ignored: float, dtype=torch.float64, num_tokens: int = 11):
    torch.manual_seed(0)
    hidden = torch.randn(2, num_tokens, 5, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCAB, 5, dtype=dtype).requires_grad_()
    labels = torch.randint(VOCAB, (2, num_tokens))
    labels = labels.masked_fill(torch.rand(2, num_tokens) < ignored, -100)
    mesh = DeviceMesh.from_group(group, "cpu")
    sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    return hidden, weight, sharded, labels


def equals_full_logits(rank, group, *, ignored: float, block_tokens: int) -> None:
    hidden, weight, sharded, labels = make_inputs(group, ignored)
    expected = reference_cross_entropy((hidden, weight), labels)
    grads = torch.autograd.grad(0.7 * expected, [hidden, weight])
    value = sharded_linear_cross_entropy(hidden, sharded, labels, block_tokens=block_tokens)
    grad_hidden, grad_weight = torch.autograd.grad(0.7 * value, [hidden, sharded])
    assert_close([value, grad_hidden, grad_weight.full_tensor()], [expected, *grads])


@pytest.mark.parametrize("block_tokens", [4, 1024])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
def test_loss_and_gradients_equal_those_of_full_logits(workers, ignored, block_tokens):
    workers.run(equals_full_logits, NUM_RANKS, ignored=ignored, block_tokens=block_tokens)


def ignores_autocast_of_the_backward(rank, group) -> None:
    grads = []
    for under in (False, True):
        hidden, _, sharded, labels = make_inputs(group, 0.3, torch.float32)
        value = sharded_linear_cross_entropy(hidden, sharded, labels)
        with torch.autocast("cpu", torch.bfloat16, enabled=under):
            grads.append(torch.autograd.grad(value, [hidden, sharded]))
    assert all(torch.equal(a, b) for (a, b) in zip(*([h, w.to_local()] for h, w in grads), strict=True))


def test_a_backward_under_autocast_computes_as_its_forward_did(workers):
    workers.run(ignores_autocast_of_the_backward, NUM_RANKS)


def is_chosen_by_the_weight(rank, group) -> None:
    hidden, weight, sharded, labels = make_inputs(group, 0.3)
    with saved_tensors() as saved:
        value = cross_entropy_sum((hidden, sharded), labels)
    assert {tuple(x.shape) for x in saved} == {(22, 5), (VOCAB // NUM_RANKS, 5), (22,)}
    assert_close([value, logits((hidden, sharded))], [cross_entropy_sum((hidden, weight), labels), hidden @ weight.t()])


def test_a_cut_weight_chooses_it_and_nothing_wide_is_saved(workers):
    workers.run(is_chosen_by_the_weight, NUM_RANKS)


def handles_extremes(rank, group) -> None:
    hidden, weight, sharded, labels = make_inputs(group, 0.0, torch.float32)
    with torch.no_grad():
        hidden.mul_(1e4)
    assert_close([cross_entropy_sum((hidden, sharded), labels)], [cross_entropy_sum((hidden, weight), labels)], 1e-6)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, sharded)]
    value = cross_entropy_sum(low, labels)
    grads = torch.autograd.grad(value, low)
    assert value.dtype == torch.float32 and value.isfinite()
    assert all(g.dtype == torch.bfloat16 for g in grads) and grads[0].isfinite().all()


def test_large_logits_and_16_bits(workers):
    workers.run(handles_extremes, NUM_RANKS)


def rounds_the_gradient_of_the_weight_once(rank, group) -> None:
    hidden, weight, sharded, labels = make_inputs(group, 0.2, torch.bfloat16, num_tokens=60)
    value = sharded_linear_cross_entropy(hidden, sharded, labels, block_tokens=1)
    (grad,) = torch.autograd.grad(value, [sharded])
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    (expected,) = torch.autograd.grad(reference_cross_entropy(exact, labels), exact[1:])
    assert_close([grad.full_tensor()], [expected], tolerance=4e-3)


def test_blocks_of_16_bits_add_up_in_float32(workers):
    workers.run(rounds_the_gradient_of_the_weight_once, NUM_RANKS)
