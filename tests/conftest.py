"""Shared test set-up: one thread, fixed hypothesis examples, no GPU tests without a GPU.

HYPOTHESIS_PROFILE=ci       (default) the same examples each run, so that a red test stays red
HYPOTHESIS_PROFILE=nightly  ten times the examples, drawn afresh where a test does not fix them
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports the kernels: on a CPU they can only be interpreted, and nothing else here uses Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings  # noqa: E402

NIGHTLY_FACTOR = 10

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly",
    parent=settings.get_profile("ci"),
    derandomize=False,
    max_examples=NIGHTLY_FACTOR * settings.get_profile("ci").max_examples,
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)

# The shapes are tiny: more threads only fight each other, and xdist workers even more so.
torch.set_num_threads(1)


def _multiply_explicit_examples(item: pytest.Item) -> None:
    """Apply the nightly factor to a test that fixes its own ``max_examples``: a profile cannot reach it."""
    function = getattr(item, "function", None)
    own = getattr(function, "_hypothesis_internal_use_settings", None)
    if own is None or own.max_examples == settings.default.max_examples or hasattr(function, "_sf_nightly"):
        return
    function._hypothesis_internal_use_settings = settings(own, max_examples=NIGHTLY_FACTOR * own.max_examples)
    function._sf_nightly = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if no_gpu is not None and item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
        if PROFILE == "nightly":
            _multiply_explicit_examples(item)
