"""Causal softmax attention with grouped key heads and rotary positions, over all tokens so far."""

import torch
from torch import Tensor, nn

from ..projections import project
from ..recurrence import prefix_attention
from ..recurrence.numerics import at_least_float32
from . import initialize
from .initialize import Initializer
from .mixer import HeadGroups, Mixer, State, StateSpec


def rotate(x_BTHK: Tensor, position_BT: Tensor, theta: float) -> Tensor:
    """Rotates the pairs (i, i + K/2) by position * theta^(-2 i / K), in at least float32."""
    dtype = at_least_float32(x_BTHK)
    half = x_BTHK.shape[-1] // 2
    exponent = torch.arange(half, device=x_BTHK.device, dtype=dtype) / half
    angle = (position_BT[..., None].to(dtype) * theta**-exponent)[:, :, None]
    cos, sin = angle.cos(), angle.sin()
    first, second = x_BTHK.to(dtype).split(half, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x_BTHK.dtype)


def nearest_divisor(number: int, wanted: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - wanted))


class Attention(Mixer):
    """y = wo(softmax(K^-0.5 rope(wq x) rope(wk x)^T) wv x) over [prefix; chunk].

    Args:
        dim: width D of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`. None is `num_heads`.
        head_dim: K, even.
        rope_theta: base of the rotary angles.
        rope_reset: restart positions at every document (t - doc_start) instead of counting from the start of
            the sequence (S + t). Where `docs` is None the sequence is one document and both are the same.
        backend: "chunk" ("auto" is the same) or "reference", see `stateflow.recurrence`.

    State, both windows in the activation dtype: k after the rotation, and v; [num_kv_heads, head_dim].
    """

    sharding = {"wq.weight": "heads", "wk.weight": "groups", "wv.weight": "groups", "wo.weight": "heads_in"}

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int,
        rope_theta: float = 10000.0,
        rope_reset: bool = False,
        backend: str = "chunk",
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            nearest = nearest_divisor(num_heads, num_kv_heads)
            raise ValueError(
                f"num_kv_heads = {num_kv_heads} does not divide num_heads = {num_heads}: use {nearest}"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim = {head_dim} must be even for rotary positions: use {head_dim + 1}")
        self.num_heads, self.head_dim = num_heads, head_dim
        self.groups = HeadGroups.whole(num_heads, num_kv_heads)
        self.rope_theta, self.rope_reset, self.backend = rope_theta, rope_reset, backend
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialize.apply(self, self.initializers(std=0.02, out_std=0.02))

    def initializers(self, std: float, out_std: float) -> dict[str, Initializer]:
        rules = {f"w{name}.weight": initialize.normal(std) for name in "qkv"}
        return rules | {"wo.weight": initialize.normal(out_std)}

    def sharded_head_counts(self) -> dict[str, int]:
        return {"num_heads": self.num_heads}

    @property
    def num_kv_heads(self) -> int:
        return len(self.groups.sizes)

    def state_spec(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        shape = (self.num_kv_heads, self.head_dim)
        return (StateSpec("k", shape, dtype, "window"), StateSpec("v", shape, dtype, "window"))

    def pre(self, x_BTD: Tensor, state: State, docs: Tensor | None) -> tuple[State, State, State]:
        q_BTHK, k_BTGK, v_BTGK = (
            y.unflatten(-1, (-1, self.head_dim)) for y in project(x_BTD, self.wq, self.wk, self.wv)
        )
        position_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None]
        if self.rope_reset and docs is not None:
            position_BT = position_BT - docs
        else:
            position_BT = position_BT + state[0].shape[1]
        q_BTHK = rotate(q_BTHK, position_BT, self.rope_theta)
        k_BTGK = rotate(k_BTGK, position_BT, self.rope_theta)
        return (q_BTHK, k_BTGK, v_BTGK), (), (k_BTGK, v_BTGK)

    def core(self, operands: State, state: State, docs: Tensor | None) -> tuple[Tensor, State]:
        if self.groups.are_equal():
            return prefix_attention(*operands, *state, docs, backend=self.backend), ()
        # One rank's heads begin or end within a group: a call for each run of equal groups, on views, copies no K/V.
        q_BTHK, *keys_and_values = *operands, *state
        mixed = [
            prefix_attention(
                q_BTHK[:, :, heads], *(x[:, :, groups] for x in keys_and_values), docs, backend=self.backend
            )
            for heads, groups in self.groups.runs()
        ]
        return torch.cat(mixed, dim=2), ()

    def out(self, mixed_BTHV: Tensor, side: State) -> Tensor:
        return self.wo(mixed_BTHV.flatten(2))
