"""The loss of `loss.py` where each rank of a group holds a part of the vocabulary ("loss parallel").

Each rank computes logits z only of its own rows of the head, block by block. With m the largest of the ranks' lse:

    lse = m + log sum_ranks exp(lse_rank - m)         z[y] comes from the one rank that holds row y
    dh = sum_ranks dz_rank W_rank,   dW_rank = dz_rank^T h

Communicated are three numbers a token and, in the backward, dh. Saved are the hidden states and lse.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .autocast import Autocast
from .collectives import all_reduce
from .recurrence.numerics import at_least_float32, product

BLOCK_TOKENS = 1024


class _ShardedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, labels_N, first_row, group_name, ignore_index, block_tokens):
        dtype = at_least_float32(hidden_ND)
        counts_N = labels_N != ignore_index
        row_N, here_N = _local_rows(labels_N, counts_N, first_row, len(weight_VD))
        lse_N = hidden_ND.new_empty(len(hidden_ND), dtype=dtype)
        target_N = torch.empty_like(lse_N)
        for start in range(0, len(hidden_ND), block_tokens):
            block = slice(start, start + block_tokens)
            logits = product(hidden_ND[block], weight_VD.t(), hidden_ND.dtype)
            lse_N[block] = logits.logsumexp(-1)
            target_N[block] = logits.gather(1, row_N[block, None])[:, 0]
        largest_N = all_reduce(lse_N, "max", group_name)
        sums_2N = torch.stack([(lse_N - largest_N).exp(), target_N.masked_fill(~here_N, 0)])
        sum_N, target_N = all_reduce(sums_2N, "sum", group_name)
        lse_N = largest_N + sum_N.log()
        ctx.autocast = Autocast.at(hidden_ND)
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, lse_N)
        ctx.arguments = first_row, group_name, ignore_index, block_tokens
        return (lse_N - target_N).masked_fill(~counts_N, 0).sum()

    @staticmethod
    def backward(ctx, grad_loss):
        with ctx.autocast.again():
            return _ShardedLinearCrossEntropy._gradients(ctx, grad_loss)

    @staticmethod
    def _gradients(ctx, grad_loss):
        hidden_ND, weight_VD, labels_N, lse_N = ctx.saved_tensors
        first_row, group_name, ignore_index, block_tokens = ctx.arguments
        counts_N = labels_N != ignore_index
        row_N, here_N = _local_rows(labels_N, counts_N, first_row, len(weight_VD))
        minus_one_N = -here_N.to(lse_N.dtype)
        grad_hidden_ND = torch.empty_like(hidden_ND, memory_format=torch.contiguous_format)
        grad_weight_VD = torch.zeros(weight_VD.shape, dtype=lse_N.dtype, device=weight_VD.device)
        for start in range(0, len(hidden_ND), block_tokens):
            block = slice(start, start + block_tokens)
            logits = product(hidden_ND[block], weight_VD.t(), hidden_ND.dtype)
            grad_logits = logits.sub_(lse_N[block, None]).exp_()
            grad_logits.scatter_add_(1, row_N[block, None], minus_one_N[block, None])
            grad_logits.mul_(grad_loss).masked_fill_(~counts_N[block, None], 0)
            grad_hidden_ND[block] = product(grad_logits, weight_VD, hidden_ND.dtype).to(hidden_ND.dtype)
            grad_weight_VD += product(grad_logits.t(), hidden_ND[block], hidden_ND.dtype)
        grad_hidden_ND = all_reduce(grad_hidden_ND, "sum", group_name)
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None, None, None, None


def _local_rows(labels_N: Tensor, counts_N: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """The row of each label in this rank's part (0 where it is elsewhere), and whether it is here."""
    row_N = labels_N - first_row
    here_N = counts_N & (row_N >= 0) & (row_N < num_rows)
    return row_N.masked_fill(~here_N, 0), here_N


def sharded_linear_cross_entropy(
    hidden_BTD: Tensor,
    weight_VD: DTensor,
    labels_BT: Tensor,
    ignore_index: int = -100,
    block_tokens: int = BLOCK_TOKENS,
) -> Tensor:
    """`loss.linear_cross_entropy` with a weight that is cut on the vocabulary, in equal parts, over a 1-D mesh.

    Hidden states and labels are the same on all ranks; so are the returned sum and the gradient of the hidden states.
    """
    assert weight_VD.placements == (Shard(0),) and weight_VD.shape[0] % weight_VD.device_mesh.size() == 0
    mesh, local_VD = weight_VD.device_mesh, weight_VD.to_local()
    return _ShardedLinearCrossEntropy.apply(
        hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
        local_VD,
        labels_BT.reshape(-1),
        mesh.get_local_rank() * len(local_VD),
        mesh.get_group().group_name,
        ignore_index,
        block_tokens,
    )
