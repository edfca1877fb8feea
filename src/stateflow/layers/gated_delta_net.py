"""Gated DeltaNet as a layer, with the parameter names and shapes of flash-linear-attention's."""

import math

import torch
from torch import Tensor, nn

from ..projections import project
from ..recurrence import delta_gates, gated_delta_rule, short_conv
from ..recurrence.numerics import at_least_float32
from . import initialize
from .initialize import Initializer
from .mixer import HeadGroups, Mixer, State, StateSpec
from .norm import GatedRMSNorm


class ShortConv(nn.Module):
    """Depthwise causal convolution, then silu. `weight` is [C, 1, W], as nn.Conv1d's with C groups."""

    def __init__(self, num_channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))
        initialize.apply(self, self.initializers())

    def initializers(self) -> dict[str, Initializer]:
        # nn.Conv1d's default: uniform within 1 / sqrt(fan in).
        return {"weight": initialize.uniform(1 / math.sqrt(self.weight.shape[2]))}

    def forward(
        self, x_BTC: Tensor, tail_BWC: Tensor, docs: Tensor | None, backend: str
    ) -> tuple[Tensor, Tensor]:
        return short_conv(x_BTC, self.weight[:, 0], None, tail_BWC, docs, backend=backend)


class DecayGate(nn.Module):
    """The parameters of g = -exp(A_log) softplus(a + dt_bias); a module of its own for FSDP to keep in float32."""

    def __init__(self, num_heads: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        initialize.apply(self, self.initializers())

    def initializers(self) -> dict[str, Initializer]:
        return {
            "A_log": initialize.log_uniform(1.0, 16.0),
            "dt_bias": initialize.inverse_softplus_log_uniform(1e-3, 1e-1),
        }

    def forward(
        self, a_BTH: Tensor, b_BTH: Tensor, allow_neg_eigval: bool, backend: str
    ) -> tuple[Tensor, Tensor]:
        """g and beta in at least float32, see `delta_gates`."""
        return delta_gates(
            a_BTH, b_BTH, self.A_log, self.dt_bias, allow_neg_eigval=allow_neg_eigval, backend=backend
        )


class GatedDeltaNet(Mixer):
    """o = gated delta rule over short convolutions of q, k and v; y = o_proj(rmsnorm(o) * silu(g_proj(x))).

    With [q, k, v] = conv(proj(x)), q and k L2-normalised per head, g = -exp(A_log) softplus(a_proj(x) +
    dt_bias), beta = sigmoid(b_proj(x)) (twice that with `allow_neg_eigval`), and scale K^-0.5 in the
    recurrence

        S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T,   o_t = scale S_t^T q_t.

    Args:
        dim: width D of the residual stream.
        num_heads: heads of q and k.
        num_v_heads: heads of v and of the state, a multiple of `num_heads`; None is `num_heads`.
        head_k_dim, head_v_dim: K and V.
        conv_size: width W of the convolutions.
        allow_neg_eigval: lets beta reach 2, so that the transition may have negative eigenvalues.
        norm_eps: of the output norm.
        chunk_size: tokens that the recurrence solves at once.
        backend: "auto", "triton", "chunk" or "reference", see `stateflow.recurrence.backends`.
        exact_order: see `gated_delta_rule`.

    State, all carried in at least float32: the last W-1 inputs of each convolution, `recurrent` [H_v, K, V].
    """

    sharding = {
        "q_proj.weight": "groups",
        "k_proj.weight": "groups",
        "v_proj.weight": "heads",
        "a_proj.weight": "heads",
        "b_proj.weight": "heads",
        "g_proj.weight": "heads",
        "q_conv1d.weight": "groups",
        "k_conv1d.weight": "groups",
        "v_conv1d.weight": "heads",
        "decay.A_log": "heads",
        "decay.dt_bias": "heads",
        "o_norm.weight": "replicate",
        "o_proj.weight": "heads_in",
    }

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_v_heads: int | None = None,
        *,
        head_k_dim: int,
        head_v_dim: int,
        conv_size: int = 4,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-6,
        chunk_size: int = 64,
        backend: str = "auto",
        exact_order: bool = True,
    ):
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        if num_v_heads % num_heads:
            raise ValueError(
                f"num_v_heads = {num_v_heads} is no multiple of num_heads = {num_heads}: "
                f"use {max(1, round(num_v_heads / num_heads)) * num_heads}"
            )
        self.num_v_heads, self.groups = num_v_heads, HeadGroups.whole(num_v_heads, num_heads)
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.conv_size, self.allow_neg_eigval = conv_size, allow_neg_eigval
        self.chunk_size, self.backend, self.exact_order = chunk_size, backend, exact_order
        key_dim, value_dim = num_heads * head_k_dim, num_v_heads * head_v_dim
        self.q_proj = nn.Linear(dim, key_dim, bias=False)
        self.k_proj = nn.Linear(dim, key_dim, bias=False)
        self.v_proj = nn.Linear(dim, value_dim, bias=False)
        self.a_proj = nn.Linear(dim, num_v_heads, bias=False)
        self.b_proj = nn.Linear(dim, num_v_heads, bias=False)
        self.g_proj = nn.Linear(dim, value_dim, bias=False)
        self.q_conv1d = ShortConv(key_dim, conv_size)
        self.k_conv1d = ShortConv(key_dim, conv_size)
        self.v_conv1d = ShortConv(value_dim, conv_size)
        self.decay = DecayGate(num_v_heads)
        self.o_norm = GatedRMSNorm(head_v_dim, norm_eps, backend)
        self.o_proj = nn.Linear(value_dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialize.apply(self, self.initializers(std=0.02, out_std=0.02))

    def initializers(self, std: float, out_std: float) -> dict[str, Initializer]:
        rules = {f"{name}_proj.weight": initialize.normal(std) for name in "qkvabg"}
        rules |= {"o_proj.weight": initialize.normal(out_std), "o_norm.weight": initialize.ones()}
        for name in ("q_conv1d", "k_conv1d", "v_conv1d", "decay"):
            rules |= initialize.prefixed(name, getattr(self, name).initializers())
        return rules

    def sharded_head_counts(self) -> dict[str, int]:
        return {"num_v_heads": self.num_v_heads}

    @property
    def num_heads(self) -> int:
        return len(self.groups.sizes)

    def state_spec(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        carried = at_least_float32(dtype)
        tail_len = self.conv_size - 1
        key_dim, value_dim = self.num_heads * self.head_k_dim, self.num_v_heads * self.head_v_dim
        return (
            StateSpec("conv_q", (tail_len, key_dim), carried, "carry"),
            StateSpec("conv_k", (tail_len, key_dim), carried, "carry"),
            StateSpec("conv_v", (tail_len, value_dim), carried, "carry"),
            StateSpec("recurrent", (self.num_v_heads, self.head_k_dim, self.head_v_dim), carried, "carry"),
        )

    def pre(self, x_BTD: Tensor, state: State, docs: Tensor | None) -> tuple[State, State, State]:
        q, k, v, a_BTH, b_BTH, gate = project(
            x_BTD, self.q_proj, self.k_proj, self.v_proj, (self.a_proj, self.b_proj), self.g_proj
        )
        q, conv_q = self.q_conv1d(q, state[0], docs, self.backend)
        k, conv_k = self.k_conv1d(k, state[1], docs, self.backend)
        v, conv_v = self.v_conv1d(v, state[2], docs, self.backend)
        # -1 for the heads: under tensor parallelism a rank has only its own.
        q_BTHK = q.unflatten(-1, (-1, self.head_k_dim))
        k_BTHK = k.unflatten(-1, (-1, self.head_k_dim))
        v_BTHV = v.unflatten(-1, (-1, self.head_v_dim))
        # forward, not a call: FSDP's hooks on this submodule would break the graph of a compiled block.
        g_BTH, beta_BTH = self.decay.forward(a_BTH, b_BTH, self.allow_neg_eigval, self.backend)
        gate_BTHV = gate.unflatten(-1, (-1, self.head_v_dim))
        return (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH), (gate_BTHV,), (conv_q, conv_k, conv_v)

    def core(self, operands: State, state: State, docs: Tensor | None) -> tuple[Tensor, State]:
        q_BTHK, k_BTHK, *rest = operands
        q_BTHK, k_BTHK = self.groups.expand(q_BTHK), self.groups.expand(k_BTHK)
        o_BTHV, recurrent = gated_delta_rule(
            q_BTHK,
            k_BTHK,
            *rest,
            state[3],
            docs,
            chunk_size=self.chunk_size,
            backend=self.backend,
            use_qk_l2norm_in_kernel=True,
            exact_order=self.exact_order,
        )
        return o_BTHV, (recurrent,)

    def out(self, mixed_BTHV: Tensor, side: State) -> Tensor:
        return self.o_proj(self.o_norm(mixed_BTHV, side[0]).flatten(2))
