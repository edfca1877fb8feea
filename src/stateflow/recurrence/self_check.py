"""The kernels prove themselves on the device that runs them, before anything is trained on them.

Compilers have miscompiled such kernels without a word. So on first use for a kind of problem (device, heads, K, V,
type, options) and a plan, forward and backward run once on a few hundred tokens of it, and every output and
gradient is compared with the chunk form in float64 on the CPU, from the same rounded inputs. A plan that misses is
replaced by the next safe one, at last by the chunk form in PyTorch, and the log says so once, with the errors.

The check has inputs of its own and asks no other rank, so equal devices decide equally. It runs inside the
operations, never while they are traced; a CUDA graph capture must find its result there already.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger("stateflow")

NUM_TOKENS = 130  # two kernel chunks and a little of a third
# Of walks in segments: the middle ones' maps are composed twice, each of two chunks; the last segment has three, and
# ends inside one. How many there are is no matter of compilation, so those of longer sequences are not needed.
MOST_SEGMENTS, NUM_TOKENS_IN_SEGMENTS = 4, 8 * 64 + 20
MOST_HEADS = 64  # with a larger batch the check takes one sequence
EPS = 1e-6
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
# Relative L2 errors. dg and dbeta are differences of large sums.
BOUNDS_16_BITS = dict(zip(NAMES, (5e-3, 5e-3, 8e-3, 8e-3, 8e-3, 2e-2, 2e-2, 8e-3), strict=True))
BOUNDS_FLOAT32 = dict(zip(NAMES, (1e-5, 1e-5, 2e-5, 2e-5, 2e-5, 5e-5, 5e-5, 2e-5), strict=True))
# What is interpreted needs no check of the compiler.
CHECKED_DEVICES = ("cuda",)


class Checkable(Protocol):
    """What kernels are compiled for, sizes, type and options, and how they run there. Lengths do not matter to them."""

    device: torch.device

    @property
    def kernels(self) -> str:
        """Whose they are, for people."""

    @property
    def bounds(self) -> dict[str, float]:
        """By output and gradient, in the order of `expected` and `launch`: the largest relative L2 error."""

    def fallback_plan(self):
        """The plan that fits any shape on the device."""

    def example(self) -> tuple[list[Tensor | None], list[Tensor]]:
        """On the CPU, in the types that the kernels get: inputs, and gradients of the outputs."""

    def expected(self, inputs: list[Tensor | None], grads: list[Tensor]) -> list[Tensor]:
        """The outputs and gradients by the chunk form, for inputs and gradients in float64."""

    def launch(self, inputs: list[Tensor | None], grads: list[Tensor], plan) -> list[Tensor]:
        """The same by the kernels, on the device."""


@dataclass(frozen=True)
class Problem:
    """The gated delta rule's, see `Checkable`."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_key_heads: int
    k_dim: int
    v_dim: int
    normalize: bool
    has_docs: bool
    # Only shares out the programs: what passed for one batch size passed for all.
    batch: int = dataclasses.field(default=1, compare=False)
    # Whether the plan's walks go through several segments at once.
    in_segments: bool = False

    def __str__(self) -> str:
        flags = (("normalised", self.normalize), ("documents", self.has_docs), ("in segments", self.in_segments))
        options = [name for name, on in flags if on]
        return (
            f"{self.num_heads} heads of {self.num_key_heads}, K = {self.k_dim}, V = {self.v_dim}, "
            f"{', '.join([str(self.dtype).removeprefix('torch.'), *options])}"
        )

    @property
    def kernels(self) -> str:
        return "the gated delta rule"

    @property
    def bounds(self) -> dict[str, float]:
        return BOUNDS_FLOAT32 if self.dtype == torch.float32 else BOUNDS_16_BITS

    def fallback_plan(self):
        from stateflow_kernels.plans import fallback_plan

        return fallback_plan(self.device, self.dtype, self.k_dim, self.v_dim)

    def example(self) -> tuple[list[Tensor | None], list[Tensor]]:
        normal, uniform = random_numbers()
        batch, tokens = example_batch(self.batch, self.num_heads), NUM_TOKENS
        if self.in_segments:
            tokens = NUM_TOKENS_IN_SEGMENTS
        heads, k_dim, v_dim = self.num_heads, self.k_dim, self.v_dim
        q, k = (normal(batch, tokens, self.num_key_heads, k_dim) for _ in range(2))
        if not self.normalize:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        v, grad_o = (normal(batch, tokens, heads, v_dim).to(self.dtype) for _ in range(2))
        g, beta = -uniform(batch, tokens, heads), uniform(batch, tokens, heads)
        if self.in_segments:  # half of the state comes through a segment; few dimensions are soon written over
            g[:, 4:] *= 0.005
            beta *= min(1.0, k_dim / 64)
        else:  # something of the state comes through a whole chunk
            g[:, 64:128] *= 0.02
        state, grad_state = (normal(batch, heads, k_dim, v_dim) for _ in range(2))
        doc_start = None
        if self.has_docs:
            doc_start = example_documents(batch, tokens)
            if self.in_segments:
                doc_start[:, 200:] = 200  # in the second segment
        return [q.to(self.dtype), k.to(self.dtype), v, g, beta, state, doc_start], [grad_o, grad_state]

    def _options(self) -> tuple[float, float | None]:
        return self.k_dim**-0.5, EPS if self.normalize else None

    def expected(self, inputs: list[Tensor | None], grads: list[Tensor]) -> list[Tensor]:
        from .gated_delta_kernels import chunk_form, chunk_form_backward

        options = self._options()
        return [*chunk_form(*inputs, *options), *chunk_form_backward(*grads, *inputs, *options)]

    def launch(self, inputs: list[Tensor | None], grads: list[Tensor], plan) -> list[Tensor]:
        from stateflow_kernels import gated_delta_rule as kernels

        # Fewer segments are other launches, more are not.
        plan = dataclasses.replace(plan, num_segments=min(plan.num_segments, MOST_SEGMENTS))
        options = (*self._options(), plan)
        output, state, kept = kernels.forward(*inputs, *options)
        return [output, state, *kernels.backward(*grads, *inputs, kept, *options)]


@dataclass(frozen=True)
class Trial:
    """One plan's run: the errors, or why there are none."""

    plan: object
    errors: dict[str, float]
    failure: str | None

    def misses(self, bounds: dict[str, float]) -> list[str]:
        if self.failure is not None:
            return [self.failure]
        # Not `>`: NaN must not pass.
        return [
            f"{name} {error:.1e} (bound {bounds[name]:.0e})"
            for name, error in self.errors.items()
            if not error <= bounds[name]
        ]


@dataclass(frozen=True)
class Outcome:
    """All trials of a problem in order; the last one passed, unless `plan` is None: then the chunk form runs."""

    plan: object | None
    trials: tuple[Trial, ...]


_outcomes: dict[tuple[Checkable, object], Outcome] = {}
_lock = threading.Lock()


def checked_plan(problem: Checkable, plan):
    """The first of `plan` and the safe plans that passes, or None: the chunk form must run.

    Raises:
        RuntimeError: a CUDA graph is being captured and this problem was not checked before.
    """
    if problem.device.type not in CHECKED_DEVICES:
        return plan
    key = (problem, plan)
    outcome = _outcomes.get(key)
    if outcome is None:
        if problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the Triton kernels ({problem}) must run once before a CUDA graph captures them, so that their "
                "self-check is done: run one forward and backward of these shapes first"
            )
        with _lock:
            outcome = _outcomes.get(key)
            if outcome is None:
                outcome = _outcomes[key] = run(problem, plan)
                _log(problem, outcome)
    return outcome.plan


def safe_plans(problem: Checkable, plan) -> list:
    """`plan`, then the default one, then one of small tiles and short load pipelines, all in Triton.

    All with as many segments: what the forward keeps depends on them.
    """
    default = problem.fallback_plan()
    if hasattr(plan, "num_segments"):
        default = dataclasses.replace(default, num_segments=plan.num_segments)
    values = {f.name: getattr(default, f.name) for f in dataclasses.fields(default)}
    tiles = {
        name: dataclasses.replace(value, block_v=min(16, value.block_v), num_stages=2, specialized=False)
        for name, value in values.items()
        if dataclasses.is_dataclass(value)
    }
    tiles |= {name: 0 for name in ("gradient_chunks", "gradient_heads") if name in values}
    return list(dict.fromkeys([plan, default, dataclasses.replace(default, **tiles, overlap_backward=False)]))


def run(problem: Checkable, plan) -> Outcome:
    """Tries plans until one passes."""
    inputs, grads = problem.example()
    expected = problem.expected(*([_to_float64(x) for x in xs] for xs in (inputs, grads)))
    trials = []
    for candidate in safe_plans(problem, plan):
        trial = _try(problem, candidate, inputs, grads, expected)
        trials.append(trial)
        if not trial.misses(problem.bounds):
            return Outcome(candidate, tuple(trials))
    return Outcome(None, tuple(trials))


def _log(problem: Checkable, outcome: Outcome) -> None:
    missed = [(trial, trial.misses(problem.bounds)) for trial in outcome.trials]
    missed = [(trial, misses) for trial, misses in missed if misses]
    if not missed:
        return
    instead = "the chunk form in PyTorch runs instead" if outcome.plan is None else f"{outcome.plan} runs instead"
    for trial, misses in missed:
        logger.warning(
            "Triton kernels of %s (%s) failed their self-check with %s: %s",
            *(problem.kernels, problem, trial.plan, ", ".join(misses)),
        )
    logger.warning("Triton kernels of %s (%s): %s", problem.kernels, problem, instead)


def random_numbers() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Normal and uniform float32 numbers of a shape on the CPU, whatever the defaults of the program are."""
    options = dict(generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    return lambda *shape: torch.randn(shape, **options), lambda *shape: torch.rand(shape, **options)


def example_batch(batch: int, num_heads: int) -> int:
    return batch if batch * num_heads <= MOST_HEADS else 1


def example_documents(batch: int, num_tokens: int) -> Tensor:
    """One document from before the call, which ends inside a kernel chunk, then two more."""
    starts = [-3] * 40 + [40] * 20 + [60] * (num_tokens - 60)
    return torch.tensor([starts] * batch, dtype=torch.int64, device="cpu")


def _to_float64(x: Tensor | None) -> Tensor | None:
    return x.double() if x is not None and x.is_floating_point() else x


def _try(problem: Checkable, plan, inputs, grads, expected: list[Tensor]) -> Trial:
    inputs = [None if x is None else x.to(problem.device) for x in inputs]
    grads = [x.to(problem.device) for x in grads]
    try:
        results = problem.launch(inputs, grads, plan)
        errors = {
            name: _relative_error(result, reference)
            for name, result, reference in zip(problem.bounds, results, expected, strict=True)
        }
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # these say nothing about the plan, and after the second nothing runs any more
    except Exception as error:  # the compiler's errors have no common type
        return Trial(plan, {}, f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}")
    return Trial(plan, errors, None)


def _relative_error(result: Tensor, reference: Tensor) -> float:
    return ((result.cpu().double() - reference).norm() / reference.norm()).item()
