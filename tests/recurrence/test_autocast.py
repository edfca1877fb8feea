"""The backward of an operation computes as its forward did, whatever autocast is on when it runs."""

import pytest
import torch
from torch import Tensor

from stateflow.loss import linear_cross_entropy
from stateflow.recurrence import gated_delta_rule


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
