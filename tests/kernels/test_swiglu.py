import pytest
import torch

from stateflow.recurrence import swiglu
from tests.kernels.kernel_testing import check, leaf, on_devices
from tests.recurrence.op_testing import assert_close, assert_same_bits, poisoned_memory, saved_tensors


def make_inputs(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    gate, x = 4 * torch.randn(shape), torch.randn(shape)
    return [gate.to(device, dtype), x.to(device, dtype)]


def check_swiglu(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    triton, reference = (lambda *x, backend=b: [swiglu(*x, backend=backend)] for b in ("triton", "reference"))
    return check(triton, reference, inputs, inputs[0].dtype)


@pytest.mark.other_triton
@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 5, 3, 72), (1,), (70, 128), (3, 1365), (2, 0, 7)])
def test_output_and_gradients(device, shape, dtype):
    check_swiglu(make_inputs(device, shape, dtype))


@on_devices
def test_large_gates_give_finite_numbers(device):
    gate, x = make_inputs(device, (40,), torch.float32)
    gate[:2], gate[2:4] = 1e4, -1e4
    results = check_swiglu([gate, x])
    assert all(bool(r.isfinite().all()) for r in results)


@on_devices
def test_16_bits_are_rounded_once(device):
    gate, x = make_inputs(device, (3000,), torch.bfloat16)
    exact = torch.nn.functional.silu(gate.double().cpu()) * x.double().cpu()
    # To float32 first, which may move a number to the other side of a tie: by at most one place then.
    assert (swiglu(gate, x, backend="triton").cpu() == exact.bfloat16()).double().mean() > 0.999


@on_devices
def test_no_uninitialised_memory_is_read_or_left(device):
    with poisoned_memory():
        check_swiglu(make_inputs(device, (35, 72), torch.float32))


@on_devices
def test_strided_inputs_and_expanded_gradients(device):
    gate, x = (leaf(t.transpose(0, 1)) for t in make_inputs(device, (6, 4, 40), torch.float32))
    plain = [leaf(t.double().cpu()) for t in (gate, x)]
    grads = torch.autograd.grad(swiglu(gate, x, backend="triton").sum(), [gate, x])
    assert_close([g.cpu() for g in grads], torch.autograd.grad(swiglu(*plain).sum(), plain), 1e-5)


@on_devices
def test_the_bits_of_a_number_do_not_depend_on_its_place(device):
    gate, x = make_inputs(device, (2500,), torch.bfloat16)
    whole = swiglu(gate, x, backend="triton")
    pieces = [swiglu(gate[i:j], x[i:j], backend="triton") for i, j in ((0, 1), (1, 2048), (2048, 2500))]
    assert_same_bits([torch.cat(pieces)], [whole])


@on_devices
def test_only_the_inputs_are_saved(device):
    inputs = [leaf(t) for t in make_inputs(device, (2, 3, 32), torch.float32)]
    with saved_tensors() as saved:
        swiglu(*inputs, backend="triton")
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in inputs}


@on_devices
def test_operation_is_well_formed(device):
    inputs = [leaf(t) for t in make_inputs(device, (3, 8), torch.float32)]
    torch.library.opcheck(torch.ops.stateflow.swiglu, tuple(inputs))


@on_devices
@pytest.mark.parametrize("backend", ["chunk", "triton"])
def test_the_result_has_the_dtype_of_x(device, backend):
    gate, x = (leaf(t) for t in make_inputs(device, (40,), torch.float32))
    y = swiglu(gate, x.bfloat16(), backend=backend)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and gate.grad.dtype == x.grad.dtype == torch.float32


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"gate \[3\] must have the shape of x, \[4\]"):
        swiglu(torch.zeros(3), torch.zeros(4))
