"""Shared test set-up: one thread, fixed hypothesis examples, no GPU tests without a GPU.

HYPOTHESIS_PROFILE=ci       (default) the same examples each run, so that a red test stays red
HYPOTHESIS_PROFILE=nightly  ten times the examples, drawn afresh where a test does not fix them
"""

import gc
import os

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports the kernels: on a CPU they can only be interpreted, and nothing else here uses Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings  # noqa: E402

from tests.interpreter import refuse_what_gpus_do_not_multiply, replace_language_once_a_launch  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    refuse_what_gpus_do_not_multiply()
    replace_language_once_a_launch()

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


# Fixtures that cost much to make. Under xdist the tests that use one run in the same worker, so that it is made once;
# pools of processes would also take the machine from each other.
SHARED = {"titan": "titan", "four": "titan", "eight": "titan", "workers": "workers"}
SHARED_IN_A_FILE = ("reports", "short_runs")


def _group(item: pytest.Item) -> str | None:
    for name in item.fixturenames:
        if name in SHARED or name in SHARED_IN_A_FILE:
            return SHARED.get(name, item.path.stem)
    return None


@pytest.hookimpl(tryfirst=True)  # xdist's own hook reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if no_gpu is not None and item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
        if (group := _group(item)) is not None:
            item.add_marker(pytest.mark.xdist_group(group))
        if PROFILE == "nightly":
            _multiply_explicit_examples(item)


def pytest_collection_finish(session: pytest.Session) -> None:
    # What the imports made stays: collections, which torch's compiler and the Trainer ask for, need not look at it.
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # libraries complain of what is never let go
