"""The collectives that a model needs itself, as functions that torch.compile can trace."""

import torch
from torch import Tensor


def all_reduce(x: Tensor, operation: str, group_name: str) -> Tensor:
    """A new tensor: the "sum" or "max" of x over the ranks of the process group of that name."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), operation, group_name))


def all_gather_tokens(x_BSD: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """[B, num_ranks * S, D]: the ranks' equally many tokens one after another."""
    ops = torch.ops._c10d_functional
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(x_BSD.contiguous(), num_ranks, group_name))
    return gathered.unflatten(0, (num_ranks, -1)).transpose(0, 1).flatten(1, 2)


def reduce_scatter_tokens(x_BTD: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """[B, T / num_ranks, D]: this rank's tokens of the sum over the ranks."""
    ops = torch.ops._c10d_functional
    by_rank = x_BTD.unflatten(1, (num_ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return ops.wait_tensor(ops.reduce_scatter_tensor(by_rank, "sum", num_ranks, group_name))
