"""What the kernels' tests share. They run on a CUDA device, or on the CPU where Triton interprets (tests/conftest.py).

Float32 is compared with the float64 reference. So are 16-bit types, after the inputs are rounded to them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from stateflow_kernels.primitives import INTERPRETED
from tests.recurrence.op_testing import assert_close

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
on_devices = pytest.mark.parametrize("device", DEVICES)

# Forward, gradients.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (5e-3, 8e-3), torch.bfloat16: (5e-3, 8e-3)}


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def check(
    triton: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Compares outputs and gradients of `triton(*inputs)` with `reference` in float64; returns the former's."""
    exact = [None if x is None else leaf(x.double().cpu()) for x in inputs]
    given = [None if x is None else leaf(x) for x in inputs]
    outputs, expected = triton(*given), reference(*exact)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs]
    results = torch.autograd.grad(outputs, [x for x in given if x is not None], grads)
    for x, grad in zip([x for x in given if x is not None], results, strict=True):
        assert grad.dtype == x.dtype
    exact_results = torch.autograd.grad(
        expected, [x for x in exact if x is not None], [g.double().cpu() for g in grads]
    )
    forward, backward = TOLERANCES[dtype]
    assert_close([o.cpu() for o in outputs], expected, forward)
    assert_close([g.cpu() for g in results], exact_results, backward)
    return [*outputs, *results]


@contextlib.contextmanager
def only_own_memory() -> Iterator[None]:
    """Interpreted kernels may only load and store inside the storages of their launch's own tensors.

    Elsewhere there is memory of the process, too, so a wrong address need not show otherwise.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    init_args, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    name, storages = "", []

    def remember(self, args, kwargs):
        nonlocal name
        name = self.fn.__name__
        args, kwargs = init_args(self, args, kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        starts = [x.untyped_storage() for x in tensors]
        storages[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in starts]
        return args, kwargs

    def verify(what: str, pointers, mask) -> None:
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        addresses = np.asarray(pointers.data)
        if mask is not None:
            addresses = addresses[np.broadcast_to(np.asarray(mask.data).astype(bool), addresses.shape)]
        addresses = addresses.astype(np.uint64)
        inside = np.zeros(addresses.shape, bool)
        for start, end in storages:
            inside |= (addresses >= np.uint64(start)) & (addresses + np.uint64(size) <= np.uint64(end))
        assert inside.all(), f"{name} {what} {(~inside).sum()} of {inside.size} numbers outside of its tensors"

    def checked_load(self, pointers, mask, *options):
        verify("loads", pointers, mask)
        return load(self, pointers, mask, *options)

    def checked_store(self, pointers, value, mask, *options):
        verify("stores", pointers, mask)
        return store(self, pointers, value, mask, *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_init_args_hst", remember)
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        yield
