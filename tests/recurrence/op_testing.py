"""What the tests of the operations share: inputs, comparison, and a look inside an operation."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def documents(batch: int, num_tokens: int, rate: float = 0.2) -> Tensor:
    """Random starts of documents; the first one began some tokens before the chunk, or with it."""
    position_T = torch.arange(num_tokens)
    first = torch.rand(batch, num_tokens) < rate
    earlier = -torch.randint(0, 5, (batch, 1))
    return torch.where(first, position_T, earlier).cummax(1).values


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-10) -> None:
    """Relative L2 error of each tensor; exact where the expected one is zero up to rounding."""
    assert len(actual) == len(expected)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape and not a.isnan().any()
        error, norm = (a.double() - e.double()).norm().item(), e.double().norm().item()
        assert error <= tolerance * norm + 1e-13, f"tensor {index}: error {error}, norm {norm}"


def assert_same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    different = [i for i, (a, e) in enumerate(zip(actual, expected, strict=True)) if not torch.equal(a, e)]
    assert not different, f"tensors {different} differ"


def with_grads(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """The outputs and the gradients of all inputs for random gradients of all outputs."""
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN: what is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation in the block put out."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and not func.is_view:
                self.numel = max(self.numel, x.numel())
        return result


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that autograd keeps for the backward."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved
