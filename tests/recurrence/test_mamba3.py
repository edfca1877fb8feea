"""Mamba-3 against numbers recorded from the official step's formulas, in 16 bits, and what it refuses."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stateflow.recurrence import mamba3
from stateflow.recurrence.mamba3 import Inputs
from tests.recurrence.op_testing import assert_close, with_grads
from tests.recurrence.recurrences import mamba3_inputs

FIXTURE = Path(__file__).parent / "mamba3_numbers.json"
OUTPUTS = ("y", "theta", "state", "k_last", "v_last")


def recorded_inputs() -> Inputs:
    """The same on every machine and version: no random generator."""
    batch, tokens, heads, p_dim, n_dim, angles = 2, 5, 2, 2, 6, 2
    by_token, by_head = (batch, tokens), (batch, heads)
    shapes = Inputs(
        x=(*by_token, heads, p_dim), z=(*by_token, heads, p_dim), B=(*by_token, n_dim), C=(*by_token, n_dim),
        dd_dt=(*by_token, heads), dd_A=(*by_token, heads), trap=(*by_token, heads), angle=(*by_token, angles),
        dt_bias=(heads,), B_norm=(n_dim,), C_norm=(n_dim,), B_bias=(heads, n_dim), C_bias=(heads, n_dim), D=(heads,),
        theta=(*by_head, angles), state=(*by_head, n_dim, p_dim), k_last=(*by_head, n_dim), v_last=(*by_head, p_dim),
    )  # fmt: skip
    tensors = []
    for number, shape in enumerate(shapes):
        position = torch.arange(math.prod(shape), dtype=torch.float64)
        tensors.append(torch.sin(0.7 * number + 1.3 * position + 0.01 * position**2).reshape(shape))
    inputs = Inputs(*tensors)
    inputs.dd_A[0, 2] = -12.0  # below the floor
    inputs.theta.add_(math.pi)
    return Inputs(*(x.requires_grad_() for x in inputs))


def official_steps(inputs: Inputs) -> tuple[Tensor, ...]:
    """One token after another, one head after another, with the state as P x N: the official module's decoding step."""
    batch, num_tokens, num_heads, _ = inputs.x.shape
    num_angles = inputs.angle.shape[2]

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt(torch.mean(x * x) + 1e-5) * weight

    def rotary(x: Tensor, theta: Tensor) -> Tensor:
        turned = list(x)
        for i in range(num_angles):
            first, second = x[2 * i], x[2 * i + 1]
            turned[2 * i] = first * torch.cos(theta[i]) - second * torch.sin(theta[i])
            turned[2 * i + 1] = first * torch.sin(theta[i]) + second * torch.cos(theta[i])
        return torch.stack(turned)

    ys, finals = [], []
    for b in range(batch):
        for h in range(num_heads):
            theta, ssm = inputs.theta[b, h], inputs.state[b, h].T
            k_previous, v_previous = inputs.k_last[b, h], inputs.v_last[b, h]
            for t in range(num_tokens):
                A = torch.clamp(-torch.log1p(torch.exp(inputs.dd_A[b, t, h])), max=-1e-4)
                dt = torch.log1p(torch.exp(inputs.dd_dt[b, t, h] + inputs.dt_bias[h]))
                trap = 1 / (1 + torch.exp(-inputs.trap[b, t, h]))
                theta = theta + torch.tanh(inputs.angle[b, t]) * dt * math.pi
                theta = theta - 2 * math.pi * torch.floor(theta / (2 * math.pi)).detach()
                k = rotary(rms_norm(inputs.B[b, t], inputs.B_norm) + inputs.B_bias[h], theta)
                q = rotary(rms_norm(inputs.C[b, t], inputs.C_norm) + inputs.C_bias[h], theta)
                v, z = inputs.x[b, t, h], inputs.z[b, t, h]
                alpha = torch.exp(A * dt)
                beta, gamma = alpha * dt * (1 - trap), trap * dt
                ssm = alpha * ssm + beta * torch.outer(v_previous, k_previous) + gamma * torch.outer(v, k)
                ys.append((ssm @ q + inputs.D[h] * v) * z / (1 + torch.exp(-z)))
                k_previous, v_previous = k, v
            finals.append((theta, ssm.T, k_previous, v_previous))
    y = torch.stack(ys).unflatten(0, (batch, num_heads, num_tokens)).transpose(1, 2)
    return y, *(torch.stack(x).unflatten(0, (batch, num_heads)) for x in zip(*finals, strict=True))


def outputs_and_gradients(outputs: tuple[Tensor, ...], inputs: Inputs) -> list[Tensor]:
    """The gradients are those of a sum with weights cos(0), cos(1), .. over all numbers that come out."""
    flat = torch.cat([x.flatten() for x in outputs])
    weights = torch.cos(torch.arange(len(flat), dtype=torch.float64))
    return [x.detach() for x in (*outputs, *torch.autograd.grad((weights * flat).sum(), inputs))]


def record() -> None:
    inputs = recorded_inputs()
    names = (*OUTPUTS, *(f"grad_{name}" for name in Inputs._fields))
    tensors = outputs_and_gradients(official_steps(inputs), inputs)
    numbers = {name: x.flatten().tolist() for name, x in zip(names, tensors, strict=True)}
    FIXTURE.write_text("{\n" + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in numbers.items()) + "\n}\n")


def recorded(inputs: Inputs) -> list[Tensor]:
    numbers = json.loads(FIXTURE.read_text())
    like = (inputs.x, *inputs[-4:], *inputs)
    return [torch.tensor(x, dtype=torch.float64).view(y.shape) for x, y in zip(numbers.values(), like, strict=True)]


FORMS = {
    "chunk": lambda inputs: mamba3(*inputs, backend="chunk"),
    "chunks of 2": lambda inputs: mamba3(*inputs, chunk_size=2, backend="chunk"),
    "reference": lambda inputs: mamba3(*inputs, backend="reference"),
    "official steps": official_steps,
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_all_gradients_are_the_recorded_ones(form):
    inputs = recorded_inputs()
    assert_close(outputs_and_gradients(FORMS[form](inputs), inputs), recorded(inputs), tolerance=1e-12)


def test_16_bit_inputs_stay_within_the_bounds_of_the_design():
    torch.manual_seed(0)
    low = Inputs(*(x.detach() for x in mamba3_inputs(2, 200, 2, 2, 32, 32)))
    low = Inputs(*(x.to(torch.bfloat16 if i < 8 else torch.float32).requires_grad_() for i, x in enumerate(low)))
    high = [x.detach().double().requires_grad_() for x in low]
    found, expected = with_grads(mamba3(*low), low), with_grads(mamba3(*high, backend="reference"), high)
    assert [x.dtype for x in found] == [torch.bfloat16, *[torch.float32] * 4, *(x.dtype for x in low)]
    for outputs in (found, expected):
        outputs[1] = torch.polar(torch.ones_like(outputs[1]), outputs[1]).real  # angles are equal modulo 2 pi
    assert_close(found[:5], expected[:5], tolerance=5e-3)
    assert_close(found[5:], expected[5:], tolerance=8e-3)


@pytest.mark.parametrize("value", [-1e4, 1e4])
@pytest.mark.parametrize("name", ["dd_dt", "dd_A", "trap", "angle", "z"])
def test_extreme_gates(name, value):
    torch.manual_seed(1)
    inputs = Inputs(*mamba3_inputs(1, 70, 2, 1, 4, 3))
    with torch.no_grad():
        getattr(inputs, name)[:, ::7] = value
    chunk, reference = (with_grads(mamba3(*inputs, backend=b), inputs) for b in ("chunk", "reference"))
    assert all(x.isfinite().all() for x in chunk)
    for outputs in (chunk, reference):
        outputs[1] = outputs[1].cos()
    # A step of 1e4 turns by thousands of revolutions, which cost as many digits of the angle.
    assert_close(chunk, reference, tolerance=1e-8 if (name, value) == ("dd_dt", 1e4) else 1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.zeros(1, 4, 6)), r"x \[1, 4, 6\] must be \[batch, tokens, heads, P\]"),
        (dict(C=torch.zeros(1, 4, 5)), r"C \[1, 4, 5\] must be \[1, 4, 6\] beside"),
        (dict(trap=torch.zeros(1, 4, 3)), r"trap \[1, 4, 3\] must be \[1, 4, 2\]"),
        (dict(B_bias=torch.zeros(6)), r"B_bias \[6\] must be \[2, 6\]"),
        (dict(state=torch.zeros(1, 2, 3, 6)), r"state \[1, 2, 3, 6\] must be \[1, 2, 6, 3\]"),
        (dict(angle=torch.zeros(1, 4, 4), theta=torch.zeros(1, 2, 4)), "R = 4: .* R must be from 1 to 3"),
        (dict(theta=torch.zeros(1, 2, 2, dtype=torch.bfloat16)), "theta has torch.bfloat16"),
        (dict(v_last=torch.zeros(1, 2, 3, dtype=torch.bfloat16)), "v_last has torch.bfloat16"),
        (dict(chunk_size=0), "chunk_size must be at least 1, got 0"),
        (dict(backend="kernel"), "unknown backend 'kernel'"),
        (dict(backend="triton"), "mamba3 cannot use the Triton kernels: N must be a multiple of 8 .* it is 6"),
    ],
)
def test_refusals(change, message):
    shapes = Inputs(
        x=(1, 4, 2, 3), z=(1, 4, 2, 3), B=(1, 4, 6), C=(1, 4, 6), dd_dt=(1, 4, 2), dd_A=(1, 4, 2), trap=(1, 4, 2),
        angle=(1, 4, 2), dt_bias=(2,), B_norm=(6,), C_norm=(6,), B_bias=(2, 6), C_bias=(2, 6), D=(2,),
        theta=(1, 2, 2), state=(1, 2, 6, 3), k_last=(1, 2, 6), v_last=(1, 2, 3),
    )  # fmt: skip
    options = {name: value for name, value in change.items() if name not in Inputs._fields}
    tensors = {name: value for name, value in change.items() if name in Inputs._fields}
    inputs = Inputs(*map(torch.zeros, shapes))._replace(**tensors)
    with pytest.raises(ValueError, match=message):
        mamba3(*inputs, **options)


if __name__ == "__main__":
    record()
