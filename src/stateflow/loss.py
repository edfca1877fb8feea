"""The loss of a chunk without its logits: the head and the cross entropy in one operation.

With h the hidden states, z = h W^T the logits and y the labels, over the tokens whose label counts:

    loss = sum_n (lse_n - z_n[y_n]),   lse = logsumexp(z)          dz = softmax(z) - onehot(y)
    dh = dz W,   dW = dz^T h

z exists for a block of tokens at a time: a pipeline's last stage holds many chunks between forward and backward, and
their logits would dwarf the rest. Under autograd both passes compute z, and only lse lives from one to the other. Who
knows the loss's own gradient beforehand, as a pipeline's backward does, gets loss and gradients from one computation
of z: `linear_cross_entropy_with_gradients`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from stateflow.recurrence.operation import Operation

from .recurrence.backends import choose
from .recurrence.numerics import add_product, as_scalar, at_least_float32, product
from .sharded_loss import sharded_linear_cross_entropy

BLOCK_LOGITS = 2**28  # a GiB in float32


def tokens_in_block(vocab_size: int) -> int:
    """How many tokens' logits exist at a time."""
    return max(1, BLOCK_LOGITS // vocab_size)


def _blocks(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, block_tokens: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Which tokens, their logits (to be overwritten at will) and their labels."""
    for start in range(0, len(hidden_ND), block_tokens):
        block = slice(start, start + block_tokens)
        yield block, product(hidden_ND[block], weight_VD.t(), hidden_ND.dtype), labels_N[block]


def _losses(logits_NV: Tensor, labels_N: Tensor, ignore_index: int, kernels: bool) -> tuple[Tensor, Tensor]:
    """Loss and lse of every row."""
    if kernels:
        from stateflow_kernels import softmax_loss

        return softmax_loss.losses(logits_NV, labels_N, ignore_index)
    ignored_N = labels_N == ignore_index
    lse_N = logits_NV.logsumexp(-1)
    target_N = logits_NV.gather(1, labels_N.masked_fill(ignored_N, 0)[:, None])[:, 0]
    # Selected, not multiplied by 0: the loss of an ignored token may be anything, even infinite.
    return (lse_N - target_N).masked_fill_(ignored_N, 0), lse_N


def _logit_gradients(
    logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor, scale: Tensor, ignore_index: int, dtype: torch.dtype,
    kernels: bool,
) -> Tensor:  # fmt: skip
    """scale (softmax - onehot), in place of the logits or in `dtype`."""
    if kernels:
        from stateflow_kernels import softmax_loss

        return softmax_loss.gradients(logits_NV, labels_N, lse_N, scale, ignore_index, dtype)
    ignored_N = labels_N == ignore_index
    grad_NV = logits_NV.sub_(lse_N[:, None]).exp_()
    minus_one = grad_NV.new_full((1, 1), -1.0).expand(len(grad_NV), 1)
    grad_NV.scatter_add_(1, labels_N.masked_fill(ignored_N, 0)[:, None], minus_one)
    return grad_NV.mul_(scale).masked_fill_(ignored_N[:, None], 0)


class _HeadGradients:
    """Gradients of the head's inputs, block by block from those of the logits."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor):
        self._hidden_ND, self._weight_VD = hidden_ND, weight_VD
        self._grad_hidden_ND = hidden_ND.new_empty(hidden_ND.shape)
        self._grad_weight_VD: Tensor | None = None

    def add(self, block: slice, grad_NV: Tensor) -> None:
        dtype = self._hidden_ND.dtype
        grad_NV = grad_NV.to(dtype) if grad_NV.is_cuda else grad_NV  # as both products round it: once, for both
        self._grad_hidden_ND[block] = product(grad_NV, self._weight_VD, dtype)
        if self._grad_weight_VD is None:
            self._grad_weight_VD = product(grad_NV.t(), self._hidden_ND[block], dtype)
        else:
            add_product(self._grad_weight_VD, grad_NV.t(), self._hidden_ND[block])

    def result(self) -> tuple[Tensor, Tensor]:
        if self._grad_weight_VD is None:  # no tokens
            return self._grad_hidden_ND, torch.zeros_like(self._weight_VD)
        return self._grad_hidden_ND, self._grad_weight_VD.to(self._weight_VD.dtype)


@Operation("stateflow::linear_cross_entropy")
def _linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, ignore_index: int, block_tokens: int, kernels: bool
) -> tuple[Tensor, Tensor]:
    """The summed loss and the logsumexp of every token's logits; no gradient flows through the latter."""
    dtype = at_least_float32(hidden_ND)
    loss_N, lse_N = (hidden_ND.new_empty(len(hidden_ND), dtype=dtype) for _ in range(2))
    for block, logits_NV, labels in _blocks(hidden_ND, weight_VD, labels_N, block_tokens):
        loss_N[block], lse_N[block] = _losses(logits_NV, labels, ignore_index, kernels)
        del logits_NV  # before the next ones take memory
    return loss_N.sum(), lse_N


@_linear_cross_entropy.register_fake
def _(hidden_ND, weight_VD, labels_N, ignore_index, block_tokens, kernels):
    dtype = at_least_float32(hidden_ND)
    return hidden_ND.new_empty((), dtype=dtype), hidden_ND.new_empty(hidden_ND.shape[0], dtype=dtype)


@Operation("stateflow::linear_cross_entropy_backward")
def _linear_cross_entropy_backward(
    grad_loss: Tensor,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    lse_N: Tensor,
    ignore_index: int,
    block_tokens: int,
    kernels: bool,
) -> tuple[Tensor, Tensor]:
    gradients = _HeadGradients(hidden_ND, weight_VD)
    for block, logits_NV, labels in _blocks(hidden_ND, weight_VD, labels_N, block_tokens):
        scaled = labels, lse_N[block], grad_loss, ignore_index, hidden_ND.dtype, kernels
        grad_NV = _logit_gradients(logits_NV, *scaled)
        del logits_NV  # before the products take memory
        gradients.add(block, grad_NV)
        del grad_NV
    return gradients.result()


@_linear_cross_entropy_backward.register_fake
def _(grad_loss, hidden_ND, weight_VD, labels_N, lse_N, ignore_index, block_tokens, kernels):
    return hidden_ND.new_empty(hidden_ND.shape), weight_VD.new_empty(weight_VD.shape)


def _setup_context(ctx, inputs, output):
    hidden_ND, weight_VD, labels_N, *ctx.arguments = inputs
    ctx.save_for_backward(hidden_ND, weight_VD, labels_N, output[1])


def _backward(ctx, grad_loss, _grad_lse):
    grads = _linear_cross_entropy_backward(grad_loss, *ctx.saved_tensors, *ctx.arguments)
    return *grads, None, None, None, None


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)


def _checked(hidden_BTD, weight_VD, labels_BT, block_tokens, backend) -> tuple[Tensor, Tensor, Tensor, int, bool]:
    """Hidden states and labels by token, the size of blocks, and whether the kernels run."""
    if hidden_BTD.shape[:-1] != labels_BT.shape or hidden_BTD.shape[-1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden {list(hidden_BTD.shape)} needs labels {list(hidden_BTD.shape[:-1])} and a weight "
            f"[V, {hidden_BTD.shape[-1]}], got {list(labels_BT.shape)} and {list(weight_VD.shape)}"
        )
    if block_tokens is None:
        block_tokens = tokens_in_block(len(weight_VD))
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    kernels = choose("linear_cross_entropy", backend, hidden_BTD, weight_VD) == "triton"
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    return hidden_ND, weight_VD, labels_BT.reshape(-1), block_tokens, kernels


def linear_cross_entropy(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    ignore_index: int = -100,
    block_tokens: int | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """sum over the tokens with labels != ignore_index of -log softmax(hidden weight^T)[label].

    Args:
        hidden_BTD: inputs of the head (any leading dimensions).
        weight_VD: the head's weight.
        labels_BT: int64, in [0, V) or ignore_index; already shifted.
        ignore_index: the label of tokens that do not count.
        block_tokens: how many tokens' logits exist at a time; None for `tokens_in_block`.
        backend: see `recurrence.backends`; "chunk" and "reference" are the same here.

    Returns:
        A scalar of at least float32: a sum, not a mean. Exactly 0 with zero gradients where no label counts.

    Raises:
        ValueError: shapes that do not fit, block_tokens < 1, a backend that is unknown or cannot run.
    """
    hidden_ND, weight_VD, labels_N, *how = _checked(hidden_BTD, weight_VD, labels_BT, block_tokens, backend)
    return _linear_cross_entropy(hidden_ND, weight_VD, labels_N, ignore_index, *how)[0]


@torch.no_grad()
def linear_cross_entropy_with_gradients(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    scale: Tensor | float = 1.0,
    ignore_index: int = -100,
    block_tokens: int | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`linear_cross_entropy` (not scaled), and the gradients of scale times it: of the hidden states and the weight.

    Logits are computed once: three products, where forward and backward of `linear_cross_entropy` take four.
    """
    hidden_ND, weight_VD, labels_N, block_tokens, kernels = _checked(
        hidden_BTD, weight_VD, labels_BT, block_tokens, backend
    )
    dtype = at_least_float32(hidden_ND)
    scale = as_scalar(scale, dtype, hidden_ND.device)
    loss_N, gradients = hidden_ND.new_empty(len(hidden_ND), dtype=dtype), _HeadGradients(hidden_ND, weight_VD)
    for block, logits_NV, labels in _blocks(hidden_ND, weight_VD, labels_N, block_tokens):
        scaled = scale, ignore_index, hidden_ND.dtype
        if kernels:
            from stateflow_kernels import softmax_loss

            loss_N[block], grad_NV = softmax_loss.losses_with_gradients(logits_NV, labels, *scaled)
        else:
            loss_N[block], lse_N = _losses(logits_NV, labels, ignore_index, kernels)
            grad_NV = _logit_gradients(logits_NV, labels, lse_N, *scaled, kernels)
        del logits_NV
        gradients.add(block, grad_NV)
        del grad_NV
    grad_hidden_ND, grad_weight_VD = gradients.result()
    return loss_N.sum(), (grad_hidden_ND.view(hidden_BTD.shape), grad_weight_VD)


@dataclass(frozen=True)
class CrossEntropySum:
    """The summed loss of what a model with a head returned, (hidden_BTD, weight_VD); `cross_entropy_sum` is one.

    A weight that is a DTensor is cut on the vocabulary over the ranks of tensor parallelism.

    Attributes:
        backend: as in `linear_cross_entropy`.
    """

    backend: str = "auto"

    def __call__(self, output: tuple[Tensor, Tensor], labels_BT: Tensor) -> Tensor:
        hidden_BTD, weight_VD = output
        if isinstance(weight_VD, DTensor):
            return sharded_linear_cross_entropy(hidden_BTD, weight_VD, labels_BT)
        return linear_cross_entropy(hidden_BTD, weight_VD, labels_BT, backend=self.backend)

    def with_gradient(
        self, output: tuple[Tensor, Tensor], labels_BT: Tensor, scale: Tensor | float
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The sum, and the gradients of scale times it by the output, for plain tensors.

        With it a pipeline's last stage puts the loss off until the backward, see `pipeline.stage.ChunkStage`.
        """
        return linear_cross_entropy_with_gradients(*output, labels_BT, scale, backend=self.backend)


cross_entropy_sum = CrossEntropySum()


def reference_cross_entropy(output: tuple[Tensor, Tensor], labels_BT: Tensor) -> Tensor:
    """The same from the full logits, under plain autograd."""
    hidden_BTD, weight_VD = output
    dtype = at_least_float32(hidden_BTD)
    logits_NV = hidden_BTD.to(dtype).flatten(0, -2) @ weight_VD.to(dtype).t()
    return F.cross_entropy(logits_NV, labels_BT.flatten(), reduction="sum", ignore_index=-100)
