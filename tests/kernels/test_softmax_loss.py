import pytest
import torch

from stateflow.loss import linear_cross_entropy, linear_cross_entropy_with_gradients, reference_cross_entropy
from stateflow_kernels import softmax_loss
from stateflow_kernels.primitives import INTERPRETED
from tests.kernels.kernel_testing import TOLERANCES, leaf, on_devices, only_own_memory
from tests.recurrence.op_testing import assert_close, poisoned_memory

SCALE = 0.3


def make_rows(device: str, num_rows: int, row_len: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = (3 * torch.randn(num_rows, row_len)).to(device, dtype)
    labels = torch.randint(row_len, (num_rows,), device=device)
    labels[1::3] = -100
    return logits, labels


def expected_rows(logits: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    exact = leaf(logits.double().cpu())
    loss = torch.nn.functional.cross_entropy(exact, labels.cpu(), reduction="none", ignore_index=-100)
    return [loss, exact.logsumexp(-1).detach(), torch.autograd.grad(SCALE * loss.sum(), exact)[0]]


def run_rows(logits: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Loss, lse and gradient in two launches, loss and gradient in one."""
    scale = torch.tensor(SCALE, dtype=torch.float64, device=logits.device)
    loss, lse = softmax_loss.losses(logits, labels, -100)
    grad = softmax_loss.gradients(logits.clone(), labels, lse, scale, -100, dtype)
    both = softmax_loss.losses_with_gradients(logits.clone(), labels, scale, -100, dtype)
    assert grad.dtype == both[1].dtype == dtype
    return [[x.cpu() for x in (loss, lse, grad)], [x.cpu() for x in both]]


def check_rows(logits: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype) -> None:
    loss, lse, grad = expected_rows(logits, labels)
    two, one = run_rows(logits, labels, dtype)
    assert_close([two[0], two[1], one[0]], [loss, lse, loss], 1e-6)
    assert_close([two[2], one[1]], [grad, grad], 1e-5 if dtype == torch.float32 else 4e-3)
    ignored = labels.cpu() == -100
    assert (two[0][ignored] == 0).all() and (two[2][ignored] == 0).all() and (one[1][ignored] == 0).all()


@on_devices
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 19), (1, 1), (3, 64), (4, 5001)])  # the last in two parts
def test_rows(device, shape, dtype, out):
    check_rows(*make_rows(device, *shape, dtype), out)


@on_devices
def test_the_gradient_takes_the_place_of_the_logits(device):
    logits, labels = make_rows(device, 5, 33, torch.float32)
    _, lse = softmax_loss.losses(logits, labels, -100)
    scale = torch.ones((), device=device)
    assert softmax_loss.gradients(logits.clone(), labels, lse, scale, -100, torch.bfloat16) is not logits
    assert softmax_loss.gradients(logits, labels, lse, scale, -100, torch.float32) is logits


@on_devices
def test_extreme_logits_and_ignored_rows_that_hold_anything(device):
    logits, labels = make_rows(device, 4, 40, torch.float32)
    logits[0] = torch.linspace(-1e4, 1e4, 40)
    logits[1] = torch.nan  # ignored
    logits[2, :39] = -torch.inf
    labels[2] = 39
    expected = expected_rows(logits[[0, 2, 3]], labels[[0, 2, 3]])
    two, one = run_rows(logits, labels, torch.float32)
    assert_close([two[0][[0, 2, 3]], two[2][[0, 2, 3]]], [expected[0], expected[2]], 1e-6)
    assert two[0][1] == one[0][1] == 0 and (two[2][1] == 0).all() and (one[1][1] == 0).all()


@on_devices
def test_no_uninitialised_memory_is_read_or_left(device):
    with poisoned_memory():
        check_rows(*make_rows(device, 5, 19, torch.float32), torch.bfloat16)


@on_devices
def test_a_label_outside_of_the_vocabulary_gives_nan_and_reads_no_other_row(device):
    logits = torch.randn(4, 7, device=device)
    labels = torch.tensor([6, 7, -1, -100], device=device)
    loss, _ = softmax_loss.losses(logits, labels, -100)
    assert loss.isnan().tolist() == [False, True, True, False]


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_rows_are_not_left():
    with only_own_memory():
        run_rows(*make_rows("cpu", 5, 19, torch.float32), torch.bfloat16)


@pytest.mark.other_triton
@on_devices
@pytest.mark.parametrize("block_tokens", [8, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_and_loss(device, dtype, block_tokens):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape).to(device, dtype) for shape in ((2, 15, 16), (37, 16)))
    labels = torch.randint(37, (2, 15), device=device).masked_fill(torch.rand(2, 15, device=device) < 0.3, -100)
    given, exact = [leaf(hidden), leaf(weight)], [leaf(hidden.double().cpu()), leaf(weight.double().cpu())]
    expected = reference_cross_entropy(tuple(exact), labels.cpu())
    expected = [expected, *torch.autograd.grad(SCALE * expected, exact)]
    loss = linear_cross_entropy(*given, labels, block_tokens=block_tokens, backend="triton")
    twice = [loss, *torch.autograd.grad(SCALE * loss, given)]
    loss, grads = linear_cross_entropy_with_gradients(
        *given, labels, SCALE, block_tokens=block_tokens, backend="triton"
    )
    for mine in (twice, [loss, *grads]):
        assert [x.dtype for x in mine] == [torch.float32, dtype, dtype]
        assert_close([x.cpu() for x in mine[:1]], expected[:1], 1e-5)
        assert_close([x.cpu() for x in mine[1:]], expected[1:], TOLERANCES[dtype][1])


def test_float64_is_refused():
    hidden, weight, labels = torch.zeros(1, 2, 3).double(), torch.zeros(4, 3).double(), torch.zeros(1, 2).long()
    with pytest.raises(ValueError, match="float64; use backend 'chunk' or 'auto'"):
        linear_cross_entropy(hidden, weight, labels, backend="triton")


@pytest.mark.gpu
def test_a_real_vocabulary_against_float64():
    """4,096 tokens of a 3B model in bfloat16, rows of 50,304; also in blocks, whose products add to the weight's."""
    torch.manual_seed(0)
    dim, vocab, tokens = 2560, 50304, 4096
    hidden = torch.randn(1, tokens, dim, device="cuda").bfloat16()
    weight = (torch.randn(vocab, dim, device="cuda") * dim**-0.5).bfloat16()
    labels = torch.randint(vocab, (1, tokens), device="cuda").masked_fill(
        torch.rand(1, tokens, device="cuda") < 0.1, -100
    )
    exact = [leaf(x.double()) for x in (hidden, weight)]
    expected = reference_cross_entropy(tuple(exact), labels)
    expected = [expected.detach(), *torch.autograd.grad(expected / tokens, exact)]
    for block_tokens in (None, 1000):
        loss, grads = linear_cross_entropy_with_gradients(
            hidden, weight, labels, 1 / tokens, block_tokens=block_tokens
        )
        assert_close([loss], expected[:1], 1e-5)
        assert_close(grads, expected[1:], 8e-3)
    given = [leaf(hidden), leaf(weight)]
    loss = linear_cross_entropy(*given, labels)
    assert_close([loss], expected[:1], 1e-5)
    assert_close(torch.autograd.grad(loss / tokens, given), expected[1:], 8e-3)
