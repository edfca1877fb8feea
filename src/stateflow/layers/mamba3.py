"""Mamba-3 (one input, one output a head) as a layer, with a weight map to and from the official module's."""

import torch
from torch import Tensor, nn

from ..projections import project
from ..recurrence import mamba3
from ..recurrence.numerics import at_least_float32
from . import initialize, mamba3_overlap
from .initialize import Initializer
from .mixer import Mixer, State, StateSpec


class Mamba3Dynamics(nn.Module):
    """The parameters of the recurrence; a module of its own for FSDP to keep in float32. They are passed, not called.

    dt_bias and D are [H], the factors B_norm and C_norm [N], the biases B_bias and C_bias [H, N].
    """

    def __init__(self, num_heads: int, state_dim: int):
        super().__init__()
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.B_norm = nn.Parameter(torch.empty(state_dim))
        self.C_norm = nn.Parameter(torch.empty(state_dim))
        self.B_bias = nn.Parameter(torch.empty(num_heads, state_dim))
        self.C_bias = nn.Parameter(torch.empty(num_heads, state_dim))
        self.D = nn.Parameter(torch.empty(num_heads))
        initialize.apply(self, self.initializers())

    def initializers(self) -> dict[str, Initializer]:
        rules = {name: initialize.ones() for name in ("B_norm", "C_norm", "B_bias", "C_bias", "D")}
        return {"dt_bias": initialize.inverse_softplus_log_uniform(1e-3, 1e-1), **rules}


class Mamba3(Mixer):
    """y = out_proj(o), with o the heads of `stateflow.recurrence.mamba3` over projections of x.

    Per head, with v = x_proj(x), dt = softplus(dt_proj(x) + dt_bias), A = -max(softplus(A_proj(x)), 1e-4), lam =
    sigmoid(trap_proj(x)), an angle theta that grows by pi tanh(angle_proj(x)) dt, and k and q = R(theta)
    (rms(B_proj(x)) B_norm + B_bias), likewise with C:

        S_t = e^{A dt} (S_{t-1} + (1 - lam) dt k_{t-1} v_{t-1}^T) + lam dt k_t v_t^T
        o_t = (S_t^T q_t + D v_t) silu(z_proj(x))

    B, C and the angles are shared by all heads. There is no convolution.

    Args:
        dim: width D of the residual stream.
        num_heads: H; the official module has 2 dim / head_dim.
        head_dim, state_dim: P and N.
        num_angles: R, at most N / 2; the official module turns half of the N dimensions, so N / 4, or all.
        norm_eps: of the norms of B and C.
        A_floor: least size of A.
        chunk_size: tokens that the recurrence computes at once.
        backend: "auto", "triton", "chunk" or "reference", see `stateflow.recurrence.backends`.
        overlap_projections: "on", "off", or "auto" where the kernels' plan says that it pays, see `mamba3_overlap`.

    State, all carried in at least float32: `theta` [H, R], `recurrent` [H, N, P], and k and v of the last token,
    `k_last` [H, N] and `v_last` [H, P].

    `to_official` and `from_official` map the parameters one to one to those of `mamba_ssm.modules.mamba3.Mamba3`
    (SISO, one group, no norm before the output projection).
    """

    sharding = {
        "z_proj.weight": "heads",
        "x_proj.weight": "heads",
        "B_proj.weight": "replicate",
        "C_proj.weight": "replicate",
        "dt_proj.weight": "heads",
        "A_proj.weight": "heads",
        "trap_proj.weight": "heads",
        "angle_proj.weight": "replicate",
        "dynamics.dt_bias": "heads",
        "dynamics.B_norm": "replicate",
        "dynamics.C_norm": "replicate",
        "dynamics.B_bias": "heads",
        "dynamics.C_bias": "heads",
        "dynamics.D": "heads",
        "out_proj.weight": "heads_in",
    }

    # In the order of the rows of the official in_proj.
    _PROJECTIONS = ("z", "x", "B", "C", "dt", "A", "trap", "angle")
    # Ours, official; the official biases have a dimension of the rank (1 for SISO) in the middle.
    _SAME = (
        ("dynamics.dt_bias", "dt_bias"),
        ("dynamics.B_norm", "B_norm.weight"),
        ("dynamics.C_norm", "C_norm.weight"),
        ("dynamics.D", "D"),
        ("out_proj.weight", "out_proj.weight"),
    )
    _BIASES = (("dynamics.B_bias", "B_bias"), ("dynamics.C_bias", "C_bias"))

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int = 64,
        state_dim: int = 128,
        num_angles: int = 32,
        norm_eps: float = 1e-5,
        A_floor: float = 1e-4,
        chunk_size: int = 64,
        backend: str = "auto",
        overlap_projections: str = "auto",
    ):
        super().__init__()
        if overlap_projections not in mamba3_overlap.MODES:
            modes = ", ".join(map(repr, mamba3_overlap.MODES))
            raise ValueError(f"unknown overlap_projections {overlap_projections!r}: use one of {modes}")
        if not 1 <= num_angles <= state_dim // 2:
            raise ValueError(
                f"num_angles = {num_angles} must be from 1 to half of state_dim = {state_dim}: "
                f"use {min(max(1, num_angles), max(1, state_dim // 2))}"
            )
        self.num_heads, self.head_dim = num_heads, head_dim
        self.state_dim, self.num_angles = state_dim, num_angles
        self.norm_eps, self.A_floor = norm_eps, A_floor
        self.chunk_size, self.backend, self.overlap_projections = chunk_size, backend, overlap_projections
        inner = num_heads * head_dim
        self.z_proj = nn.Linear(dim, inner, bias=False)
        self.x_proj = nn.Linear(dim, inner, bias=False)
        self.B_proj = nn.Linear(dim, state_dim, bias=False)
        self.C_proj = nn.Linear(dim, state_dim, bias=False)
        self.dt_proj = nn.Linear(dim, num_heads, bias=False)
        self.A_proj = nn.Linear(dim, num_heads, bias=False)
        self.trap_proj = nn.Linear(dim, num_heads, bias=False)
        self.angle_proj = nn.Linear(dim, num_angles, bias=False)
        self.dynamics = Mamba3Dynamics(num_heads, state_dim)
        self.out_proj = nn.Linear(inner, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialize.apply(self, self.initializers(std=0.02, out_std=0.02))

    def initializers(self, std: float, out_std: float) -> dict[str, Initializer]:
        rules = {f"{name}_proj.weight": initialize.normal(std) for name in self._PROJECTIONS}
        rules |= initialize.prefixed("dynamics", self.dynamics.initializers())
        return rules | {"out_proj.weight": initialize.normal(out_std)}

    def sharded_head_counts(self) -> dict[str, int]:
        return {"num_heads": self.num_heads}

    def state_spec(self, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        carried = at_least_float32(dtype)
        return (
            StateSpec("theta", (self.num_heads, self.num_angles), carried, "carry"),
            StateSpec("recurrent", (self.num_heads, self.state_dim, self.head_dim), carried, "carry"),
            StateSpec("k_last", (self.num_heads, self.state_dim), carried, "carry"),
            StateSpec("v_last", (self.num_heads, self.head_dim), carried, "carry"),
        )

    def projections(self) -> list[nn.Linear]:
        """Of the input."""
        return [getattr(self, f"{name}_proj") for name in self._PROJECTIONS]

    def parameters_of_core(self) -> State:
        """In the order in which the recurrence takes them."""
        of = self.dynamics
        return of.dt_bias, of.B_norm, of.C_norm, of.B_bias, of.C_bias, of.D

    def pre(self, x_BTD: Tensor, state: State, docs: Tensor | None) -> tuple[State, State, State]:
        z, x, *shared_and_gates = project(x_BTD, *self.projections())
        # -1 for the heads: under tensor parallelism a rank has only its own.
        z_BTHP, x_BTHP = (y.unflatten(-1, (-1, self.head_dim)) for y in (z, x))
        return (x_BTHP, z_BTHP, *shared_and_gates), (), ()

    def core(self, operands: State, state: State, docs: Tensor | None) -> tuple[Tensor, State]:
        y_BTHP, *carried = mamba3(
            *operands,
            *self.parameters_of_core(),
            *state,
            docs,
            norm_eps=self.norm_eps,
            A_floor=self.A_floor,
            chunk_size=self.chunk_size,
            backend=self.backend,
        )
        return y_BTHP, tuple(carried)

    def out(self, mixed_BTHV: Tensor, side: State) -> Tensor:
        return self.out_proj(mixed_BTHV.flatten(2))

    def update(self, x_BTD: Tensor, state: State, docs: Tensor | None) -> tuple[Tensor, State]:
        at_once = mamba3_overlap.wanted(self, x_BTD)
        if at_once is None:
            return super().update(x_BTD, state, docs)
        return mamba3_overlap.update(self, x_BTD, state, docs, at_once)

    @classmethod
    def to_official(cls, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The official module's parameters from those of one layer, whole (not cut by tensor parallelism).

        Raises ValueError where a parameter is missing or there is one that the layer does not have.
        """
        _expect_names(weights, cls.sharding)
        official = {"in_proj.weight": torch.cat([weights[f"{name}_proj.weight"] for name in cls._PROJECTIONS])}
        official |= {theirs: weights[ours] for ours, theirs in cls._SAME}
        return official | {theirs: weights[ours].unsqueeze(1) for ours, theirs in cls._BIASES}

    @classmethod
    def from_official(cls, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `to_official`; sizes follow from the shapes.

        Raises ValueError where a parameter is missing, where there is one that the layer does not have (as those of
        MIMO or of a norm before the output projection), and for shapes that do not fit.
        """
        others = [theirs for _, theirs in (*cls._SAME, *cls._BIASES)]
        _expect_names(weights, ["in_proj.weight", *others])
        num_heads, (state_dim,) = len(weights["dt_bias"]), weights["B_norm.weight"].shape
        inner, in_proj = weights["out_proj.weight"].shape[1], weights["in_proj.weight"]
        rows = [inner, inner, state_dim, state_dim, num_heads, num_heads, num_heads]
        num_angles = len(in_proj) - sum(rows)
        if not 1 <= num_angles <= state_dim // 2 or inner % num_heads:
            raise ValueError(
                f"in_proj.weight has {len(in_proj)} rows: with {num_heads} heads of {inner / num_heads:g} and a state "
                f"of {state_dim} it must have {sum(rows)} and 1 to {state_dim // 2} for the angles; one group, no MIMO"
            )
        for _, theirs in cls._BIASES:
            if weights[theirs].shape != (num_heads, 1, state_dim):
                raise ValueError(
                    f"{theirs} {list(weights[theirs].shape)} must be {[num_heads, 1, state_dim]}: MIMO is not supported"
                )
        parts = in_proj.split([*rows, num_angles])
        ours = {f"{name}_proj.weight": part for name, part in zip(cls._PROJECTIONS, parts, strict=True)}
        ours |= {mine: weights[theirs] for mine, theirs in cls._SAME}
        return ours | {mine: weights[theirs].squeeze(1) for mine, theirs in cls._BIASES}


def _expect_names(weights: dict[str, Tensor], names) -> None:
    missing, unknown = sorted(set(names) - set(weights)), sorted(set(weights) - set(names))
    if missing or unknown:
        raise ValueError(f"weights of one Mamba-3 layer: missing {missing}, unknown {unknown}")
