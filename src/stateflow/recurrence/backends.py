"""Which form of an operation runs: the hand-written Triton kernels, or PyTorch.

    auto        the kernels on a CUDA device for float32, bfloat16 and float16, where they fit; else "chunk"
    triton      the kernels; ValueError where they cannot run
    chunk       the fast form in PyTorch, any device, also float64
    reference   the definition, slow, under plain autograd
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "chunk", "reference")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(name: str, backend: str, *tensors: Tensor | None, misfit: str | None = None) -> str:
    """ "triton", "chunk" or "reference", for an operation called `name` on floating-point `tensors`.

    `misfit`: a reason, with the value, why the kernels cannot take these arguments whatever their type and device.

    Raises:
        ValueError: an unknown backend, or "triton" where the kernels cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(map(repr, BACKENDS))}")
    if backend in ("chunk", "reference"):
        return backend
    present = [x for x in tensors if x is not None]
    other = next((x.dtype for x in present if x.dtype not in KERNEL_DTYPES), None)
    if other is not None:
        misfit = f"they compute in float32 and one of its tensors has {other}"
    if backend == "auto":
        return "triton" if misfit is None and all(x.is_cuda for x in present) else "chunk"
    if misfit is None and not all(x.is_cuda for x in present) and not _interpreted():
        misfit = (
            f"they need a CUDA device, the tensors are on {present[0].device} (to interpret them there, set "
            "TRITON_INTERPRET=1 before the process starts)"
        )
    if misfit is not None:
        raise ValueError(f"{name} cannot use the Triton kernels: {misfit}; use backend 'chunk' or 'auto'")
    return "triton"


def size_misfit(names: tuple[str, str], k_dim: int, v_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernels of a recurrence cannot take heads of these sizes, under their `names`; None if they can."""
    if dtype == torch.float32 and k_dim > 128:
        return f"{names[0]} must be at most 128 in float32, whose tiles need more shared memory; it is {k_dim}"
    for name, size in zip(names, (k_dim, v_dim), strict=True):
        if size % 8 or not 16 <= size <= 256:
            nearest = min(256, max(16, -(-size // 8) * 8))
            return f"{name} must be a multiple of 8 from 16 to 256, it is {size} (the nearest is {nearest})"
    return None


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, whatever the tensors' is."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _interpreted() -> bool:
    from stateflow_kernels.primitives import INTERPRETED

    return INTERPRETED
