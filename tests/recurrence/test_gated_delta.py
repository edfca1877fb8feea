import pytest
import torch

from stateflow.recurrence import gated_delta_rule
from tests.recurrence.op_testing import assert_close, with_grads
from tests.recurrence.recurrences import gated_delta_inputs as make_inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate", [0.0, -1e4, -torch.inf])
def test_extreme_gates_and_strengths(dtype, gate):
    torch.manual_seed(1)
    inputs = make_inputs(1, 150, 2, 1, 8, 8, dtype=dtype, max_beta=2.0)
    with torch.no_grad():
        inputs[3][:, ::7] = gate
        inputs[4][:, ::3] = 2.0
    chunk, reference = (
        with_grads(gated_delta_rule(*inputs, backend=backend), inputs) for backend in ("chunk", "reference")
    )
    if gate == -torch.inf:  # autograd of the reference has no gradient of exp at -inf times 0
        reference[5] = reference[5].nan_to_num(0.0)
    assert_close(chunk, reference, tolerance=2e-5 if dtype == torch.float32 else 1e-10)


def test_bf16_inputs_stay_within_the_bounds_of_the_design():
    torch.manual_seed(0)
    exact = make_inputs(2, 200, 2, 2, 32, 32)
    rounded = [x.detach().to(torch.bfloat16).requires_grad_() for x in exact[:3]]
    rounded += [exact[3].detach().float().requires_grad_()]
    rounded += [
        exact[4].detach().to(torch.bfloat16).requires_grad_(),
        exact[5].detach().float().requires_grad_(),
    ]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    low = with_grads(gated_delta_rule(*rounded), rounded)
    assert [x.dtype for x in low] == [torch.bfloat16, torch.float32, *(x.dtype for x in rounded)]
    high = with_grads(gated_delta_rule(*exact, backend="reference"), exact)
    assert_close(low[:2], high[:2], tolerance=5e-3)
    assert_close(low[2:], high[2:], tolerance=8e-3)


@pytest.mark.parametrize("backend", ["chunk", "reference"])
def test_default_scale_and_normalised_queries_and_keys(backend):
    torch.manual_seed(0)
    q, k, *others = make_inputs(1, 9, 1, 2, 4, 3)
    found = gated_delta_rule(q, k, *others, backend=backend)
    assert_close(found, gated_delta_rule(q, k, *others, scale=4**-0.5, backend=backend))
    units = [x / (x.square().sum(-1, keepdim=True) + 0.3).sqrt() for x in (3 * q, 0.2 * k)]
    found = gated_delta_rule(
        3 * q, 0.2 * k, *others, use_qk_l2norm_in_kernel=True, l2norm_eps=0.3, backend=backend
    )
    assert_close(found, gated_delta_rule(*units, *others, backend=backend))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(v_BTHV=torch.zeros(1, 4, 3, 2)), "3 value heads are no multiple of the 2 key heads"),
        (dict(g_BTH=torch.zeros(1, 4, 3)), r"g \[1, 4, 3\]"),
        (dict(g_BTH=torch.zeros(1, 4, 2, dtype=torch.bfloat16)), "g has torch.bfloat16"),
        (dict(state_BHKV=torch.zeros(1, 2, 3, 2, dtype=torch.bfloat16)), "state has torch.bfloat16"),
        (dict(state_BHKV=torch.zeros(1, 2, 2, 3)), r"must be \[1, 2, 3, 2\]"),
        (dict(q_BTHK=torch.zeros(1, 4, 1, 3)), "q .* and k .* must be"),
        (dict(chunk_size=0), "chunk_size must be at least 1, got 0"),
        (dict(backend="kernel"), "unknown backend 'kernel'"),
    ],
)
def test_refusals(change, message):
    arguments = dict(
        q_BTHK=torch.zeros(1, 4, 2, 3),
        k_BTHK=torch.zeros(1, 4, 2, 3),
        v_BTHV=torch.zeros(1, 4, 2, 2),
        g_BTH=torch.zeros(1, 4, 2),
        beta_BTH=torch.zeros(1, 4, 2),
        state_BHKV=torch.zeros(1, 2, 3, 2),
    )
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**(arguments | change))
