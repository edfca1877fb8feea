import pytest
import torch
from torch import Tensor

from stateflow.recurrence import short_conv
from stateflow_kernels import short_conv as kernels
from tests.kernels.kernel_testing import check, on_devices
from tests.recurrence.op_testing import assert_close, assert_same_bits, documents, poisoned_memory, with_grads
from tests.recurrence.test_short_conv import make_inputs


def inputs_on(device: str, *args) -> list[Tensor | None]:
    return [None if x is None else x.detach().to(device).requires_grad_() for x in make_inputs(*args)]


def check_conv(inputs: list[Tensor | None], docs: Tensor | None) -> None:
    on_device = None if docs is None else docs.to(inputs[0].device)
    check(
        lambda *x: short_conv(*x, on_device, backend="triton"),
        lambda *x: short_conv(*x, docs, backend="reference"),
        inputs,
        inputs[0].dtype,
    )


@on_devices
@pytest.mark.parametrize(
    ("batch", "num_tokens", "channels", "width", "with_bias", "with_docs", "dtype"),
    [
        (2, 1, 5, 2, True, False, "float32"),
        (1, 1, 3, 4, False, True, "float32"),
        (2, 2, 7, 4, True, True, "float32"),
        (2, 3, 5, 4, False, False, "float32"),
        pytest.param(1, 3, 5, 2, True, True, "float32", marks=pytest.mark.other_triton),
        (2, 65, 7, 4, True, True, "float32"),
        (1, 65, 9, 2, False, False, "float32"),
        (1, 6, 130, 3, False, False, "float32"),  # more than one block of channels
        (1, 9, 5, 8, True, True, "float32"),
        pytest.param(1, 5, 33, 4, True, True, "bfloat16", marks=pytest.mark.other_triton),
        (1, 5, 33, 4, True, True, "float16"),
    ],
)
def test_outputs_and_gradients(device, batch, num_tokens, channels, width, with_bias, with_docs, dtype):
    torch.manual_seed(0)
    inputs = inputs_on(device, batch, num_tokens, channels, width, with_bias, getattr(torch, dtype))
    check_conv(inputs, documents(batch, num_tokens) if with_docs else None)


def few_tokens_a_program(monkeypatch) -> None:
    """So that some reach neither end of a short sequence."""
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name)._replace(fewest=4, most=4, unroll=2))


def run_in_pieces(inputs: list[Tensor | None], docs: Tensor | None, cuts: list[int]) -> tuple[Tensor, Tensor]:
    x, weight, bias, tail = inputs
    outputs = []
    for start, stop in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        piece_docs = None if docs is None else docs[:, start:stop] - start
        y, tail = short_conv(x[:, start:stop], weight, bias, tail, piece_docs, backend="triton")
        outputs.append(y)
    return torch.cat(outputs, dim=1), tail


@on_devices
@pytest.mark.parametrize(
    ("num_tokens", "cuts", "width", "with_docs", "dtype"),
    [
        (14, [1, 2, 5, 6], 4, True, "float32"),
        (14, [1, 3, 4, 13], 4, False, "bfloat16"),
        (9, [4, 6], 8, False, "float32"),
        (70, [17, 19, 50], 3, True, "float32"),
    ],
)
def test_cuts_anywhere_give_the_same_bits(device, monkeypatch, num_tokens, cuts, width, with_docs, dtype):
    """Of y, the tail, dx and the tail's gradient, although programs in the middle come to be at an end."""
    few_tokens_a_program(monkeypatch)
    torch.manual_seed(0)
    inputs = inputs_on(device, 1, num_tokens, 5, width, True, getattr(torch, dtype))
    docs = documents(1, num_tokens).to(device) if with_docs else None
    token_inputs = [inputs[0], inputs[3]]
    whole = with_grads(short_conv(*inputs, docs, backend="triton"), token_inputs)
    assert_same_bits(with_grads(run_in_pieces(inputs, docs, cuts), token_inputs), whole)


@on_devices
def test_many_programs_along_the_tokens(device, monkeypatch):
    few_tokens_a_program(monkeypatch)
    torch.manual_seed(0)
    check_conv(inputs_on(device, 2, 13, 3, 4, True, torch.float32), documents(2, 13))


@on_devices
def test_strided_inputs_and_expanded_gradients(device):
    torch.manual_seed(0)
    x, weight, bias, tail = (v.detach() for v in inputs_on(device, 3, 6, 4, 4, True, torch.float32))
    strided = [
        x.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_(),
        weight.t().contiguous().t().requires_grad_(),
        bias.repeat_interleave(2)[::2].requires_grad_(),
        tail[:1].expand(3, -1, -1).requires_grad_(),
    ]
    plain = [v.detach().double().cpu().requires_grad_() for v in strided]

    def grads(inputs: list[Tensor], backend: str) -> list[Tensor]:
        y, new_tail = short_conv(*inputs, backend=backend)
        return [y, new_tail, *torch.autograd.grad(y.sum() + 2 * new_tail.sum(), inputs)]

    assert not any(v.is_contiguous() for v in strided)
    assert_close([v.cpu() for v in grads(strided, "triton")], grads(plain, "reference"), 1e-5)


@on_devices
def test_no_uninitialised_memory_is_read_or_left(device):
    torch.manual_seed(0)
    inputs = inputs_on(device, 2, 6, 3, 4, True, torch.float32)
    with poisoned_memory():
        check_conv(inputs, documents(2, 6))


@on_devices
def test_documents_are_isolated_from_anything_that_is_not_finite(device):
    x, weight, bias, tail = inputs_on(device, 1, 6, 3, 4, True, torch.float32)
    docs = torch.tensor([[-1, -1, -1, 3, 3, 3]], device=device)
    with torch.no_grad():
        expected, _ = short_conv(x, weight, bias, tail, docs, backend="triton")
        x[:, :3] = torch.nan
        y, _ = short_conv(x, weight, bias, tail, docs, backend="triton")
    assert torch.equal(y[:, 3:], expected[:, 3:]) and y[:, :3].isnan().all()


@on_devices
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_very_negative_and_very_large_inputs_stay_finite(device):
    x = torch.tensor([[[-1e4], [1e4], [-200.0], [0.0]]], device=device, requires_grad=True)
    weight, tail = torch.tensor([[0.0, 1.0]], device=device), torch.zeros(1, 1, 1, device=device)
    y, _ = short_conv(x, weight, None, tail, backend="triton")
    assert torch.equal(y, torch.nn.functional.silu(x))
    assert torch.autograd.grad(y.sum(), x)[0].flatten().tolist() == pytest.approx([0.0, 1.0, 0.0, 0.5])


@on_devices
def test_operation_is_well_formed(device):
    inputs = inputs_on(device, 1, 2, 2, 2, True, torch.float32)
    torch.library.opcheck(torch.ops.stateflow.short_conv, (*inputs, documents(1, 2).to(device), True))
