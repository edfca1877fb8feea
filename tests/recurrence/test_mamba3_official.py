"""Mamba-3 against the kernels of mamba-ssm, where they can be imported: outputs and all gradients, and its step.

Without a GPU `test_mamba3` compares with recorded numbers of the same definition.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stateflow.bench import shares
from stateflow.bench.mamba3_contestants import (
    FOLDER,
    OFFICIAL,
    OPERATION,
    PACKAGE,
    SUBJECT,
    WHOLE,
    Mamba3,
    finish,
    prepare,
)
from stateflow.bench.measure import misses, relative_l2
from stateflow.bench.worker import Parity
from stateflow.recurrence import mamba3
from stateflow.recurrence.mamba3 import Inputs
from stateflow_kernels.plan_table import Shape

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SHAPE = Shape("mamba3", 4, 1, 128, 64, "bfloat16", 1, 208, 32)  # three kernel chunks and a part of a fourth
STEP = f"{FOLDER}.mamba3_siso_step"


@pytest.fixture
def few_variants(monkeypatch):
    """Of the hundreds among which the official kernels tune themselves two each: to be right is enough here."""
    pytest.importorskip(OPERATION, exc_type=ImportError)
    for tuner in shares.tuners(PACKAGE):
        monkeypatch.setattr(tuner, "configs", tuner.configs[:2])


class Short(Mamba3):
    parity_tokens = SHAPE.tokens


@pytest.mark.parametrize("name", [OFFICIAL, WHOLE])
def test_outputs_and_all_gradients(name, few_variants):
    """Theirs against ours in float64; `test_on_gpu` compares ours on the device with ours in float64."""
    (contestant,) = (x for x in SUBJECT.contestants(OFFICIAL, SHAPE, DEVICE) if x.name == name)
    errors = Parity(Short(), DEVICE).errors(contestant, SHAPE)
    assert errors.keys() == set(SUBJECT.names)
    assert misses(errors, SUBJECT.parity) == []


def test_decoding_continues_what_the_operation_left(few_variants):
    """Half of a sequence by ours, the other half token by token by the official step, from our state."""
    step = pytest.importorskip(STEP, exc_type=ImportError).mamba3_siso_step
    inputs, _ = SUBJECT.random_inputs(SHAPE, 96, DEVICE)
    inputs = Inputs(*(x.float() for x in inputs))
    tokens, rest = inputs[:8], inputs[8:]
    with torch.no_grad():
        y, *expected = mamba3(*inputs)
        _, *states = mamba3(*(x[:, :64] for x in tokens), *rest)
        second = Inputs(*(x[:, 64:] for x in tokens), *rest)
        found = decoded(step, second._replace(**dict(zip(("theta", "state", "k_last", "v_last"), states, strict=True))))
    errors = [
        relative_l2(*pair) for pair in zip(*map(SUBJECT.comparable, (found, [y[:, 64:], *expected])), strict=True)
    ]
    # The step multiplies state and q in bfloat16, and its tanh, sine and cosine are the approximate instructions.
    assert max(errors) < 5e-3, errors


def decoded(step, inputs: Inputs) -> tuple[Tensor, ...]:
    """The official step, token after token. Its v is that of the last token, which it does not return."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)

    q, k, v, decay, dt, trap, q_bias, k_bias, angles, D, z, *states = prepare(inputs, norm, torch.float32)
    outputs = []
    for t in range(v.shape[1]):
        by_token = [x[:, t] for x in (q, k, v)] + [x[..., t] for x in (decay, dt, trap)]
        out, (*states, _) = step(*by_token, q_bias, k_bias, angles[:, t], D, z[:, t], tuple(states))
        states.append(v[:, t])
        outputs.append(out)
    return finish([torch.stack(outputs, dim=1), *states])


def test_what_is_compared_would_tell_a_difference(few_variants):
    """A quarter of a turn more in one angle of the incoming state is seen."""
    contestant = SUBJECT.contestants(OFFICIAL, SHAPE, DEVICE)[0]

    def turned(inputs):
        theta = Inputs(*inputs).theta.clone()
        theta[:, 0, 0] += torch.pi / 2
        return contestant.prepare(Inputs(*inputs)._replace(theta=theta))

    errors = Parity(Short(), DEVICE).errors(replace(contestant, prepare=turned), SHAPE)
    assert misses(errors, SUBJECT.parity) != []
