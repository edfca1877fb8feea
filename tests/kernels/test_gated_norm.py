import pytest
import torch

from stateflow.recurrence import gated_rms_norm
from tests.kernels.kernel_testing import check, leaf, on_devices
from tests.recurrence.op_testing import assert_close, assert_same_bits, poisoned_memory, saved_tensors, with_grads

EPS = 1e-3  # large enough to show in rows of small numbers


def make_inputs(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, gate = torch.randn(shape).to(device, dtype), torch.randn(shape).to(device, dtype)
    x[..., :1, :] *= 1e-2
    return [x, gate, torch.randn(shape[-1]).to(device)]


def check_norm(inputs: list[torch.Tensor]) -> None:
    triton, reference = (
        lambda *x, backend=backend: [gated_rms_norm(*x, EPS, backend=backend)] for backend in ("triton", "reference")
    )
    check(triton, reference, inputs, inputs[0].dtype)


@pytest.mark.other_triton
@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 5, 3, 72), (1, 32), (70, 128), (2, 30, 192), (3, 256), (7, 5)])
def test_output_and_gradients(device, shape, dtype):
    check_norm(make_inputs(device, shape, dtype))


@on_devices
def test_the_bits_of_a_row_do_not_depend_on_its_place(device):
    inputs = [leaf(x) for x in make_inputs(device, (90, 72), torch.float32)]
    x, gate, weight = inputs
    whole = with_grads([gated_rms_norm(*inputs, EPS, backend="triton")], inputs[:2])
    pieces = [gated_rms_norm(x[i:j], gate[i:j], weight, EPS, backend="triton") for i, j in ((0, 1), (1, 47), (47, 90))]
    assert_same_bits(with_grads([torch.cat(pieces)], inputs[:2]), whole)


@on_devices
def test_no_uninitialised_memory_is_read_or_left(device):
    with poisoned_memory():
        check_norm(make_inputs(device, (35, 72), torch.float32))


@on_devices
def test_strided_inputs_and_expanded_gradients(device):
    x, gate, weight = make_inputs(device, (6, 4, 40), torch.float32)
    x, gate = leaf(x.transpose(0, 1)), leaf(gate.transpose(0, 1))
    plain = [leaf(v.double().cpu()) for v in (x, gate, weight)]
    given = [x, gate, leaf(weight)]
    grads = torch.autograd.grad(gated_rms_norm(*given, EPS, backend="triton").sum(), given)
    expected = torch.autograd.grad(gated_rms_norm(*plain, EPS).sum(), plain)
    assert_close([v.cpu() for v in grads], expected, 1e-5)


@on_devices
def test_only_the_inputs_are_saved(device):
    inputs = [leaf(x) for x in make_inputs(device, (2, 3, 32), torch.float32)]
    with saved_tensors() as saved:
        gated_rms_norm(*inputs, EPS, backend="triton")
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in inputs}


@on_devices
def test_operation_is_well_formed(device):
    inputs = [leaf(x) for x in make_inputs(device, (3, 8), torch.float32)]
    torch.library.opcheck(torch.ops.stateflow.gated_rms_norm, (*inputs, EPS))
