"""The verdict of ``stateflow verify``: nothing that is not a number may pass."""

import math

import torch

from stateflow.titan.verify import StepComparison, compare


def test_a_step_that_is_not_finite_fails_whatever_the_others_are():
    good = StepComparison(1, 5.0, 5.0, 1.0, 1.0, "w", 1e-12, 1)
    lost = StepComparison(2, math.nan, 5.0, 1.0, 1.0, "w", 1e-12, 1)
    norm = StepComparison(2, 5.0, 5.0, math.inf, math.inf, "w", 1e-12, 1)
    assert good.largest_difference <= 1e-10
    assert lost.largest_difference == math.inf and norm.largest_difference == math.inf
    assert not all(c.largest_difference <= 1e-10 for c in (good, lost))


def test_the_worst_gradient_is_named_and_nan_is_the_worst():
    ones = {"a": torch.ones(3), "b": torch.ones(3)}
    off = {"a": torch.ones(3), "b": torch.tensor([1.0, 1.5, 1.0])}
    found = compare(1, 1.0, off, 1.0, ones)
    assert (found.worst_parameter, found.worst_difference) == ("b", 0.5)
    broken = {"a": torch.tensor([1.0, math.nan, 1.0]), "b": torch.ones(3)}
    found = compare(1, 1.0, broken, 1.0, ones)
    assert found.worst_parameter == "a" and found.largest_difference == math.inf
