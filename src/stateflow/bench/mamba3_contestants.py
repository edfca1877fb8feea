"""Who takes part in the benchmark of Mamba-3, from the outputs of a layer's projections to what the last one gets.

What is timed, of each with an incoming state and the state it leaves, gradients of everything from those of y and
of all four parts of the last state:

    ours               `stateflow.recurrence.mamba3`: everything from the raw projections on, so softplus of dt and A,
                       RMSNorm of B and C, biases, rotation, trapezoidal weights, recurrence, D and the silu gate
    official           `mamba3_siso_combined` of mamba-ssm alone: biases, rotation, sigmoid of the trapezoidal weights,
                       recurrence, D and gate. What its module computes before that is given, and its gradients are
                       not taken further: dt, A dt, normalised B and C, angles repeated for each head in bfloat16.
    official, whole    the same from the raw projections on, as its module has it: softplus and A dt in PyTorch, its
                       Triton RMSNorm, angles repeated for each head in float32

So "official" does less than ours, and a ratio to it says less for ours than is true.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stateflow.bench import shares
from stateflow.bench.contestants import (
    OURS,
    SERIAL,
    Absent,
    Contestant,
    Subject,
    Tensors,
    import_from,
    serial,
    with_choice,
)
from stateflow.recurrence import mamba3
from stateflow.recurrence.mamba3 import Inputs
from stateflow_kernels.plan_table import Shape

OFFICIAL, WHOLE = "official", "official, whole"
PACKAGE = "mamba_ssm"
FOLDER = f"{PACKAGE}.ops.triton.mamba3"
OPERATION, NORM = f"{FOLDER}.mamba3_siso_combined", f"{PACKAGE}.ops.triton.layernorm_gated"
OUTPUTS = ("y", "theta", "state", "k_last", "v_last")
BY_TOKEN = ("x", "z", "B", "C", "dd_dt", "dd_A", "trap", "angle")
GATES = ("dd_dt", "dd_A", "trap", "angle", "dt_bias", "theta")
NORM_EPS, A_FLOOR = 1e-5, 1e-4  # of the official module


def num_angles(n_dim: int) -> int:
    """Of the official module with half of the dimensions turned."""
    return n_dim // 4


class Mamba3(Subject):
    name = "mamba3"
    peers = (OFFICIAL,)
    packages = {OFFICIAL: ("mamba-ssm",)}
    names = (*OUTPUTS, *(f"d{name}" for name in Inputs._fields))
    bounds = {
        **dict.fromkeys(OUTPUTS, 5e-3),
        **{f"d{name}": 2e-2 if name in GATES else 8e-3 for name in Inputs._fields},
    }
    by_token = frozenset(("y", *(f"d{name}" for name in BY_TOKEN)))
    # The official operation keeps angles in bfloat16: with the sequence, the gradients of its angles go astray.
    DANGLE_AGREEMENT = 0.3
    choices = {"serial": SERIAL, "regions": "regions"}
    parity_tokens = 1008  # no multiple of 64; otherwise as `shares.SHORT`: the kernels that are timed

    @property
    def agreement(self):
        return super().agreement | dict(dangle=self.DANGLE_AGREEMENT)

    def shape(self, heads, tokens, k_dim, v_dim, dtype):
        """N x P, of which N / 4 angles turn half of N, as in the official module."""
        if min(heads, tokens, k_dim, v_dim) < 1:
            raise ValueError(f"{heads} heads of {k_dim} x {v_dim} with {tokens} tokens: no number may be below 1")
        if k_dim % 8:
            raise ValueError(f"N = {k_dim}: must be a multiple of 8, so that N / 4 angles are an even number")
        return Shape("mamba3", heads, 1, k_dim, v_dim, dtype, 1, tokens, num_angles(k_dim))

    def contestants(self, group, shape, device):
        return {OURS: _ours, OFFICIAL: _official}[group](shape, device)

    def random_inputs(self, shape, num_tokens, device, seed=0):
        """As a layer has them when training starts: dt about 0.001 to 0.1, A about -1, norms and biases about 1."""
        generator = torch.Generator(device).manual_seed(seed)
        dtype, batch, heads = getattr(torch, shape.dtype), shape.batch, shape.num_heads
        n_dim, p_dim, angles = shape.k_dim, shape.v_dim, num_angles(shape.k_dim)
        tokens, states = (batch, num_tokens), (batch, heads)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device)

        def uniform(*size: int) -> Tensor:
            return torch.rand(size, generator=generator, device=device)

        dt = torch.exp(math.log(1e-3) + math.log(100.0) * uniform(heads))
        inputs = Inputs(
            x=normal(*tokens, heads, p_dim).to(dtype),
            z=normal(*tokens, heads, p_dim).to(dtype),
            B=normal(*tokens, n_dim).to(dtype),
            C=normal(*tokens, n_dim).to(dtype),
            dd_dt=normal(*tokens, heads).to(dtype),
            dd_A=normal(*tokens, heads).to(dtype),
            trap=normal(*tokens, heads).to(dtype),
            angle=normal(*tokens, angles).to(dtype),
            dt_bias=dt + torch.log(-torch.expm1(-dt)),  # of which dt is the softplus
            B_norm=1 + 0.1 * normal(n_dim),
            C_norm=1 + 0.1 * normal(n_dim),
            B_bias=1 + 0.1 * normal(heads, n_dim),
            C_bias=1 + 0.1 * normal(heads, n_dim),
            D=1 + 0.1 * normal(heads),
            theta=2 * math.pi * uniform(*states, angles),
            state=0.3 * normal(*states, n_dim, p_dim),
            k_last=normal(*states, n_dim),
            v_last=normal(*states, p_dim),
        )
        grads = [normal(*inputs.x.shape).to(dtype), *(normal(*x.shape) for x in inputs[-4:])]
        return list(inputs), grads

    def exact_results(self, shape, inputs, grads):
        """The chunk form."""
        inputs, grads = ([x.detach().cpu().double() for x in xs] for xs in (inputs, grads))
        return Contestant("exact", lambda *args: mamba3(*args, backend="chunk")).results(inputs, grads)

    def comparable(self, results):
        """Angles that differ by 2 pi are equal: their cosines and sines."""
        results = list(results)
        theta = results[OUTPUTS.index("theta")]
        results[OUTPUTS.index("theta")] = torch.stack([theta.cos(), theta.sin()])
        return results

    def check_plan(self, contestant, shape, device):
        """Raises if the self-check would put anything else in this plan's place."""
        from stateflow.recurrence.mamba3_kernels import Problem
        from stateflow.recurrence.self_check import checked_plan

        dtypes = (getattr(torch, shape.dtype),) * 2
        sizes = (shape.num_heads, shape.k_dim, shape.v_dim, shape.num_angles)
        problem = Problem(device, *dtypes, *sizes, has_docs=False, batch=shape.batch)
        if checked_plan(problem, contestant.plan) != contestant.plan:
            raise ValueError("the kernels' self-check failed with this plan")

    def regions(self, shape, device):
        """Those of a layer around the operation; none where the kernels do not run."""
        from stateflow.bench import mamba3_regions

        return mamba3_regions.regions(shape, device) if backend_for(shape, device) == "triton" else []

    def get_ready(self, spec, device):
        """The official kernels' hundreds of variants, which would take a quarter of an hour and more one by one."""
        if spec.group == OFFICIAL:
            with contextlib.suppress(Absent):
                self.contestants(OFFICIAL, spec.shapes[0], device)
                shares.compile_at_once(self.name, OFFICIAL, spec.group_shapes, PACKAGE, Path(spec.work))


SUBJECT = Mamba3()


def backend_for(shape: Shape, device: torch.device) -> str:
    """ "triton" where the kernels take such a call, else "chunk", the form in PyTorch."""
    inputs, _ = SUBJECT.random_inputs(shape, shares.SHORT, device)
    try:
        with torch.no_grad():
            mamba3(*inputs, backend="triton")
    except ValueError as error:
        print(f"{shape}: {error}", flush=True)
        return "chunk"
    return "triton"


def _ours(shape: Shape, device: torch.device) -> list[Contestant]:
    backend = backend_for(shape, device)
    ours = Contestant(OURS, lambda *inputs: mamba3(*inputs, backend=backend), facts={"backend": backend})
    if backend != "triton":
        return [ours]
    ours = with_choice(ours, shape, device)
    overlaps = ours.plan is not None and serial(ours).plan != ours.plan
    return [ours, serial(ours)] if overlaps else [ours]


def _official(shape: Shape, device: torch.device) -> list[Contestant]:
    if shape.dtype != "bfloat16":
        raise Absent(f"mamba-ssm computes in bfloat16, {shape.dtype} is not compared")
    op = import_from(OPERATION, "mamba3_siso_combined")
    norm = import_from(NORM, "rmsnorm_fn")

    def call(q, k, v, decay, dt, trap, q_bias, k_bias, angles, D, z, *states):
        *outputs, v_last = op(
            Q=q, K=k, V=v, ADT=decay, DT=dt, Trap=trap, Q_bias=q_bias, K_bias=k_bias, Angles=angles, D=D, Z=z,
            Input_States=states, return_final_states=True,
        )  # fmt: skip
        return (*outputs, v_last.clone())  # a view of all values, which would count as this output's memory

    def given(inputs: Tensors) -> Tensors:
        return tuple(x.contiguous() for x in prepare(Inputs(*inputs), _rms_norm, torch.bfloat16))

    def whole(*inputs: Tensor) -> tuple[Tensor, ...]:
        return call(*prepare(Inputs(*inputs), lambda x, weight: norm(x, weight, None, eps=NORM_EPS), torch.float32))

    return [Contestant(OFFICIAL, call, given, finish), Contestant(WHOLE, whole, finish=finish)]


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, NORM_EPS).to(x.dtype)


def prepare(inputs: Inputs, norm, angle_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The official operation's arguments: Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z and the four states.

    By head where ours is by token, [batch, heads, tokens]; the state as P x N.
    """
    by_head = (inputs.dd_dt, inputs.dd_A, inputs.trap)
    dd_dt, dd_A, trap = (x.transpose(1, 2) for x in by_head)
    dt = F.softplus(dd_dt.float() + inputs.dt_bias[:, None])
    A = -F.softplus(dd_A.float()).clamp(min=A_FLOOR)
    q, k = norm(inputs.C, inputs.C_norm)[:, :, None], norm(inputs.B, inputs.B_norm)[:, :, None]
    angles = inputs.angle[:, :, None].expand(-1, -1, inputs.x.shape[2], -1).to(angle_dtype)
    states = (inputs.theta, inputs.state.transpose(-1, -2), inputs.k_last, inputs.v_last)
    return (q, k, inputs.x, A * dt, dt, trap, inputs.C_bias, inputs.B_bias, angles, inputs.D, inputs.z, *states)


def finish(outputs: Tensors) -> tuple[Tensor, ...]:
    """y and the last state, as ours has them, from the official operation's outputs."""
    y, theta, state, k_last, v_last = outputs
    return (y, theta.float(), state.transpose(-1, -2), k_last.float(), v_last.float())
