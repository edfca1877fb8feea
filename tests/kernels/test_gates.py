import pytest
import torch

from stateflow.recurrence import delta_gates
from tests.kernels.kernel_testing import check, leaf, on_devices
from tests.recurrence.op_testing import assert_same_bits, poisoned_memory, saved_tensors, with_grads


def make_inputs(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """As in training: dt_bias down to where softplus is 1e-3, so that log(1 + e^x) has to be accurate there."""
    torch.manual_seed(0)
    a, b = torch.randn(shape).to(device, dtype), torch.randn(shape).to(device, dtype)
    return [a, b, torch.randn(shape[-1]).to(device), (torch.rand(shape[-1]) * 6 - 7).to(device)]


def check_gates(inputs: list[torch.Tensor], doubled: bool) -> None:
    triton, reference = (
        lambda *x, backend=backend: delta_gates(*x, allow_neg_eigval=doubled, backend=backend)
        for backend in ("triton", "reference")
    )
    # The outputs and the sums are float32 whatever a and b are.
    results = check(triton, reference, inputs, inputs[0].dtype)
    assert results[0].dtype == results[1].dtype == torch.float32


@pytest.mark.other_triton
@on_devices
@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 400, 6), (1, 65, 16)])
def test_gates_and_gradients(device, shape, dtype, doubled):
    check_gates(make_inputs(device, shape, dtype), doubled)


@on_devices
def test_far_from_zero(device):
    values = torch.tensor([-80.0, -20.0, -9.0, 0.0, 9.0, 21.0, 80.0], device=device)
    a, b = values[None, :, None].clone(), values.flip(0)[None, :, None].clone()
    check_gates([a, b, torch.zeros(1, device=device), torch.zeros(1, device=device)], False)
    g, _ = delta_gates(a, b, torch.zeros(1, device=device), torch.zeros(1, device=device), backend="triton")
    exact = -torch.nn.functional.softplus(values.double())
    assert (g.flatten().double() / exact - 1).abs().max() < 1e-5


@on_devices
def test_the_bits_of_a_token_do_not_depend_on_its_place(device):
    inputs = [leaf(x) for x in make_inputs(device, (1, 400, 6), torch.float32)]
    a, b, *parameters = inputs
    whole = with_grads(delta_gates(*inputs, backend="triton"), [a, b])
    pieces = [
        delta_gates(a[:, i:j], b[:, i:j], *parameters, backend="triton") for i, j in ((0, 1), (1, 300), (300, 400))
    ]
    joined = [torch.cat(values, dim=1) for values in zip(*pieces, strict=True)]
    assert_same_bits(with_grads(joined, [a, b]), whole)


@on_devices
def test_rows_apart_and_columns_apart(device):
    """Two projections of one product are views of its output."""
    a, b, *parameters = make_inputs(device, (1, 300, 6), torch.bfloat16)
    expected = delta_gates(a, b, *parameters, backend="triton")
    together = torch.cat([a, b], -1)
    columns = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (a, b)]
    for views in ([together[..., :6], together[..., 6:]], columns):
        assert not any(x.is_contiguous() for x in views)
        assert_same_bits(delta_gates(*views, *parameters, backend="triton"), expected)
        check_gates([*views, *parameters], False)


@on_devices
def test_no_uninitialised_memory_is_read_or_left(device):
    with poisoned_memory():
        check_gates(make_inputs(device, (1, 300, 6), torch.float32), True)


@on_devices
def test_only_the_inputs_are_saved(device):
    inputs = [leaf(x) for x in make_inputs(device, (1, 4, 6), torch.float32)]
    with saved_tensors() as saved:
        delta_gates(*inputs, backend="triton")
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in inputs}


@on_devices
def test_operation_is_well_formed(device):
    inputs = [leaf(x) for x in make_inputs(device, (3, 4), torch.float32)]
    torch.library.opcheck(torch.ops.stateflow.delta_gates, (*inputs, 2.0))
