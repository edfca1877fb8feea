"""The recurrences behind one face: inputs by token, then parameters, then states; outputs by token, then states."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stateflow.recurrence import gated_delta_rule, mamba3


def gated_delta_inputs(
    batch: int,
    num_tokens: int,
    key_heads: int,
    repeats: int,
    k_dim: int,
    v_dim: int,
    *,
    dtype: torch.dtype = torch.float64,
    max_beta: float = 1.0,
    max_decay: float = 1.0,
) -> list[Tensor]:
    """q, k, v, g, beta, state, all requiring grad."""
    heads = key_heads * repeats
    q, k = (
        F.normalize(torch.randn(batch, num_tokens, key_heads, k_dim, dtype=dtype), dim=-1) for _ in range(2)
    )
    gate_shape = (batch, num_tokens, heads)
    inputs = [
        q,
        k,
        torch.randn(*gate_shape, v_dim, dtype=dtype),
        -max_decay * torch.rand(gate_shape, dtype=dtype),
        max_beta * torch.rand(gate_shape, dtype=dtype),
        torch.randn(batch, heads, k_dim, v_dim, dtype=dtype),
    ]
    return [x.requires_grad_() for x in inputs]


def mamba3_inputs(
    batch: int,
    num_tokens: int,
    key_heads: int,
    repeats: int,
    k_dim: int,
    v_dim: int,
    *,
    dtype: torch.dtype = torch.float64,
    max_decay: float = 1.0,
) -> list[Tensor]:
    """As `mamba3` takes them, all requiring grad; N is 2 k_dim or one more, of which R = 1 + k_dim // 2 pairs turn.

    Some heads' dd_A lie below the floor, and angles may wind around several times.
    """
    heads, n_dim, num_angles = key_heads * repeats, 2 * k_dim + num_tokens % 2, 1 + k_dim // 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    by_token = (batch, num_tokens)
    dd_A = max_decay * torch.rand(*by_token, heads, dtype=dtype) - 12 * (torch.rand(heads) < 0.3)
    inputs = [
        normal(*by_token, heads, v_dim),
        normal(*by_token, heads, v_dim),
        normal(*by_token, n_dim),
        normal(*by_token, n_dim),
        normal(*by_token, heads),
        dd_A,
        normal(*by_token, heads),
        normal(*by_token, num_angles),
        normal(heads) - 1,
        1 + 0.3 * normal(n_dim),
        1 + 0.3 * normal(n_dim),
        1 + 0.3 * normal(heads, n_dim),
        1 + 0.3 * normal(heads, n_dim),
        normal(heads),
        2 * math.pi * torch.rand(batch, heads, num_angles, dtype=dtype),
        normal(batch, heads, n_dim, v_dim),
        normal(batch, heads, n_dim),
        normal(batch, heads, v_dim),
    ]
    return [x.to(dtype).requires_grad_() for x in inputs]


@dataclass(frozen=True)
class Recurrence:
    make_inputs: Callable[..., list[Tensor]]
    function: Callable[..., tuple[Tensor, ...]]
    operation: Callable[..., tuple[Tensor, ...]]
    constants: tuple
    """What the operation takes behind the documents."""
    num_by_token: int
    num_states: int
    own_decay: int
    """Which input a first token of a document must ignore."""

    def parts(self, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        last = len(inputs) - self.num_states
        return inputs[: self.num_by_token], inputs[self.num_by_token : last], inputs[last:]

    def run_in_pieces(self, inputs, docs: Tensor | None, cuts: list[int], **options) -> tuple[Tensor, ...]:
        """Outputs and final states with the sequence cut, differentiable through the passed states."""
        tokens, parameters, states = self.parts(inputs)
        bounds = [0, *cuts, tokens[0].shape[1]]
        outputs = []
        for start, stop in zip(bounds, bounds[1:], strict=False):
            piece = [x[:, start:stop] for x in tokens]
            piece_docs = None if docs is None else docs[:, start:stop] - start
            output, *states = self.function(*piece, *parameters, *states, piece_docs, **options)
            outputs.append(output)
        return torch.cat(outputs, dim=1), *states


RECURRENCES = {
    "gdn": Recurrence(
        gated_delta_inputs, gated_delta_rule, torch.ops.stateflow.gated_delta_rule, (1.0, 4), 5, 1, own_decay=3
    ),
    "mamba3": Recurrence(mamba3_inputs, mamba3, torch.ops.stateflow.mamba3, (1e-5, 1e-4, 4), 8, 4, own_decay=5),
}
