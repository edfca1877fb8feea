"""The loss of a chunk without its logits: the head and the cross entropy in one operation.

With h the hidden states, z = h W^T the logits and y the labels, over the tokens whose label counts:

    loss = sum_n (lse_n - z_n[y_n]),   lse = logsumexp(z)          dz = softmax(z) - onehot(y)
    dh = dz W,   dW = dz^T h

Both passes compute z for `block_tokens` tokens at a time, and only lse lives from one to the other: a
pipeline's last stage holds many chunks between forward and backward, and their logits would dwarf the rest.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from stateflow.recurrence.operation import Operation

from .recurrence.numerics import at_least_float32, product
from .sharded_loss import sharded_linear_cross_entropy


def _blocks(num_tokens: int, block_tokens: int) -> list[slice]:
    return [
        slice(start, min(start + block_tokens, num_tokens)) for start in range(0, num_tokens, block_tokens)
    ]


@Operation("stateflow::linear_cross_entropy")
def _linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, ignore_index: int, block_tokens: int
) -> tuple[Tensor, Tensor]:
    """The summed loss and the logsumexp of every token's logits; no gradient flows through the latter."""
    dtype = at_least_float32(hidden_ND)
    lse_N = hidden_ND.new_empty(len(hidden_ND), dtype=dtype)
    target_N = torch.empty_like(lse_N)
    counts_N = labels_N != ignore_index
    safe_labels_N = labels_N.masked_fill(~counts_N, 0)
    for block in _blocks(len(hidden_ND), block_tokens):
        logits = product(hidden_ND[block], weight_VD.t(), hidden_ND.dtype)
        lse_N[block] = logits.logsumexp(-1)
        target_N[block] = logits.gather(1, safe_labels_N[block, None])[:, 0]
    # Selected, not multiplied by 0: the loss of an ignored token may be anything, even infinite.
    return (lse_N - target_N).masked_fill(~counts_N, 0).sum(), lse_N


@_linear_cross_entropy.register_fake
def _(hidden_ND, weight_VD, labels_N, ignore_index, block_tokens):
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
) -> tuple[Tensor, Tensor]:
    operand_dtype = hidden_ND.dtype
    grad_hidden_ND = torch.empty(hidden_ND.shape, dtype=hidden_ND.dtype, device=hidden_ND.device)
    grad_weight_VD = torch.zeros(weight_VD.shape, dtype=lse_N.dtype, device=weight_VD.device)
    counts_N = labels_N != ignore_index
    safe_labels_N = labels_N.masked_fill(~counts_N, 0)
    minus_one = lse_N.new_full((1, 1), -1.0)
    for block in _blocks(len(hidden_ND), block_tokens):
        logits = product(hidden_ND[block], weight_VD.t(), operand_dtype)
        grad_logits = logits.sub_(lse_N[block, None]).exp_()
        grad_logits.scatter_add_(1, safe_labels_N[block, None], minus_one.expand(len(grad_logits), 1))
        grad_logits.mul_(grad_loss).masked_fill_(~counts_N[block, None], 0)
        grad_hidden_ND[block] = product(grad_logits, weight_VD, operand_dtype).to(operand_dtype)
        grad_weight_VD += product(grad_logits.t(), hidden_ND[block], operand_dtype)
    return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype)


@_linear_cross_entropy_backward.register_fake
def _(grad_loss, hidden_ND, weight_VD, labels_N, lse_N, ignore_index, block_tokens):
    return hidden_ND.new_empty(hidden_ND.shape), weight_VD.new_empty(weight_VD.shape)


def _setup_context(ctx, inputs, output):
    hidden_ND, weight_VD, labels_N, ctx.ignore_index, ctx.block_tokens = inputs
    ctx.save_for_backward(hidden_ND, weight_VD, labels_N, output[1])


def _backward(ctx, grad_loss, _grad_lse):
    grads = _linear_cross_entropy_backward(grad_loss, *ctx.saved_tensors, ctx.ignore_index, ctx.block_tokens)
    return *grads, None, None, None


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)


def linear_cross_entropy(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    ignore_index: int = -100,
    block_tokens: int = 1024,
) -> Tensor:
    """sum over the tokens with labels != ignore_index of -log softmax(hidden weight^T)[label].

    Args:
        hidden_BTD: inputs of the head (any leading dimensions).
        weight_VD: the head's weight.
        labels_BT: int64, in [0, V) or ignore_index; already shifted.
        ignore_index: the label of tokens that do not count.
        block_tokens: how many tokens' logits exist at a time.

    Returns:
        A scalar of at least float32: a sum, not a mean. Exactly 0 with zero gradients where no label counts.

    Raises:
        ValueError: shapes that do not fit, block_tokens < 1.
    """
    if hidden_BTD.shape[:-1] != labels_BT.shape or hidden_BTD.shape[-1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden {list(hidden_BTD.shape)} needs labels {list(hidden_BTD.shape[:-1])} and a weight "
            f"[V, {hidden_BTD.shape[-1]}], got {list(labels_BT.shape)} and {list(weight_VD.shape)}"
        )
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    return _linear_cross_entropy(hidden_ND, weight_VD, labels_BT.reshape(-1), ignore_index, block_tokens)[0]


def cross_entropy_sum(output: tuple[Tensor, Tensor], labels_BT: Tensor) -> Tensor:
    """The summed loss of what a model with a head returned, (hidden_BTD, weight_VD).

    A weight that is a DTensor is cut on the vocabulary over the ranks of tensor parallelism.
    """
    hidden_BTD, weight_VD = output
    if isinstance(weight_VD, DTensor):
        return sharded_linear_cross_entropy(hidden_BTD, weight_VD, labels_BT)
    return linear_cross_entropy(hidden_BTD, weight_VD, labels_BT)


def reference_cross_entropy(output: tuple[Tensor, Tensor], labels_BT: Tensor) -> Tensor:
    """The same from the full logits, under plain autograd."""
    hidden_BTD, weight_VD = output
    dtype = at_least_float32(hidden_BTD)
    logits_NV = hidden_BTD.to(dtype).flatten(0, -2) @ weight_VD.to(dtype).t()
    return F.cross_entropy(logits_NV, labels_BT.flatten(), reduction="sum", ignore_index=-100)
