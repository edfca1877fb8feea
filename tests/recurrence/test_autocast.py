"""An operation computes in the types of its contract, and its backward as its forward did, whatever autocast is on."""

import pytest
import torch
from torch import Tensor

from stateflow.loss import linear_cross_entropy
from stateflow.recurrence import gated_delta_rule, mamba3, prefix_attention

from .recurrences import gated_delta_inputs, mamba3_inputs


def loss(forward_autocast) -> tuple[Tensor, list[Tensor]]:
    hidden, weight = torch.randn(1, 40, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    with forward_autocast:
        return linear_cross_entropy(hidden, weight, torch.arange(40)[None]), [hidden, weight]


def delta_rule(forward_autocast) -> tuple[Tensor, list[Tensor]]:
    inputs = [torch.randn(1, 9, 2, 8) for _ in range(3)]
    inputs += [-torch.rand(1, 9, 2), torch.rand(1, 9, 2), torch.randn(1, 2, 8, 8)]
    for x in inputs:
        x.requires_grad_()
    with forward_autocast:
        outputs = gated_delta_rule(*inputs, backend="chunk", use_qk_l2norm_in_kernel=True)
    return sum(x.square().sum() for x in outputs), inputs


@pytest.mark.parametrize("make, forward", [(loss, False), (loss, True), (delta_rule, False)])
def test_a_backward_computes_as_its_forward_did(make, forward):
    found = []
    for backward in (forward, not forward):
        torch.manual_seed(0)
        y, inputs = make(torch.autocast("cpu", torch.bfloat16, enabled=forward))
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            found.append(torch.autograd.grad(y, inputs))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def delta_rule_without_norm(autocast) -> tuple[Tensor, list[Tensor]]:
    inputs = gated_delta_inputs(1, 70, 2, 1, 4, 3, dtype=torch.float32)
    with autocast:
        outputs = gated_delta_rule(*inputs, backend="chunk")
    return sum(x.square().sum() for x in outputs), inputs


def mamba3_of_float32(autocast) -> tuple[Tensor, list[Tensor]]:
    inputs = mamba3_inputs(1, 70, 2, 1, 4, 3, dtype=torch.float32)
    with autocast:
        outputs = mamba3(*inputs, backend="chunk")
    return sum(x.square().sum() for x in outputs), inputs


def attention_of_float32(autocast) -> tuple[Tensor, list[Tensor]]:
    inputs = [torch.randn(1, n, heads, 4, requires_grad=True) for n, heads in ((9, 4), (9, 2), (9, 2), (5, 2), (5, 2))]
    with autocast:
        return prefix_attention(*inputs).square().sum(), inputs


@pytest.mark.parametrize("make", [loss, delta_rule_without_norm, mamba3_of_float32, attention_of_float32])
def test_autocast_does_not_round_within_an_operation(make):
    """States, scores and logits would silently have 8 bits; the gated delta rule of more than a chunk even failed."""
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        y, inputs = make(torch.autocast("cpu", torch.bfloat16, enabled=enabled))
        found.append((y, *torch.autograd.grad(y, inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
