"""Mamba-3 on the hand-written Triton kernels, as `torch.library` operations of the same signature as the chunk form.

Nothing but the inputs is kept for the backward. On first use for a kind of problem the kernels must agree with the
chunk form (`self_check`); where no plan does, the chunk form takes their place inside the operation.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from . import self_check
from .backends import on_device_of
from .mamba3 import _OUTPUTS, _SCHEMA, KERNEL_CHUNK, Inputs, _chunk_form, _chunk_form_backward
from .operation import Operation

NORM_EPS, A_FLOOR = 1e-5, 1e-4
# Relative L2 errors of the outputs (theta's cosine) and gradients. Those of gates and angles are differences of
# large sums.
_GATES = ("ddd_dt", "ddd_A", "dtrap", "dangle", "ddt_bias", "dtheta")
_NAMES = (*_OUTPUTS, *(f"d{name}" for name in Inputs._fields))


def _bounds(output: float, gradient: float, gate: float) -> dict[str, float]:
    return {name: output if name in _OUTPUTS else gate if name in _GATES else gradient for name in _NAMES}


BOUNDS_16_BITS = _bounds(5e-3, 8e-3, 2e-2)
BOUNDS_FLOAT32 = _bounds(1e-5, 2e-5, 5e-5)


@dataclass(frozen=True)
class Problem:
    """See `self_check.Checkable`."""

    device: torch.device
    dtype: torch.dtype
    gate_dtype: torch.dtype
    num_heads: int
    n_dim: int
    p_dim: int
    num_angles: int
    has_docs: bool
    # Only shares out the programs: what passed for one batch size passed for all.
    batch: int = dataclasses.field(default=1, compare=False)

    def __str__(self) -> str:
        names = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.gate_dtype))
        options = [*names, *["documents"] * self.has_docs]
        sizes = f"N = {self.n_dim}, P = {self.p_dim}, R = {self.num_angles}"
        return f"{self.num_heads} heads, {sizes}, {', '.join(options)}"

    @property
    def kernels(self) -> str:
        return "Mamba-3"

    @property
    def bounds(self) -> dict[str, float]:
        return BOUNDS_FLOAT32 if self.dtype == torch.float32 else BOUNDS_16_BITS

    def fallback_plan(self):
        from stateflow_kernels.plans import fallback_plan

        return fallback_plan(self.device, self.dtype, self.n_dim, self.p_dim, "mamba3")

    def example(self) -> tuple[list[Tensor | None], list[Tensor]]:
        batch = self_check.example_batch(self.batch, self.num_heads)
        inputs, grads = random_inputs(self, batch, self_check.NUM_TOKENS, *self_check.random_numbers())
        return [*inputs, self_check.example_documents(batch, self_check.NUM_TOKENS) if self.has_docs else None], grads

    def expected(self, inputs: list[Tensor | None], grads: list[Tensor]) -> list[Tensor]:
        options = (NORM_EPS, A_FLOOR, KERNEL_CHUNK)
        outputs = _chunk_form(*inputs, *options)
        return _comparable([*outputs, *_chunk_form_backward(*grads, *inputs, *options)])

    def launch(self, inputs: list[Tensor | None], grads: list[Tensor], plan) -> list[Tensor]:
        from stateflow_kernels import mamba3_rule as kernels

        *tensors, doc_start = inputs
        arguments = (kernels.Inputs(*tensors), doc_start, NORM_EPS, A_FLOOR, plan)
        outputs = kernels.forward(*arguments)
        return _comparable([*outputs, *kernels.backward(tuple(grads), *arguments)])


def _comparable(results: list[Tensor]) -> list[Tensor]:
    """Angles are equal modulo 2 pi. A sum of terms that cancel is compared together with them: ddt_bias with ddd_dt."""
    named = dict(zip(_NAMES, results, strict=True))
    named["theta"] = named["theta"].cos()
    named["ddt_bias"] = torch.cat([named[name].double().flatten() for name in ("ddt_bias", "ddd_dt")])
    return list(named.values())


def random_inputs(problem: Problem, batch: int, num_tokens: int, normal, uniform) -> tuple[list[Tensor], list[Tensor]]:
    """The operation's tensors in the problem's types, and gradients of its outputs.

    normal, uniform: functions of a shape; where the numbers are, the tensors are.
    """
    heads, n_dim, p_dim, angles = problem.num_heads, problem.n_dim, problem.p_dim, problem.num_angles
    by_token, by_head = (batch, num_tokens), (batch, heads)

    def grown(*shape: int) -> Tensor:
        return 1 + 0.3 * normal(*shape)

    rows = [normal(*by_token, heads, p_dim), normal(*by_token, heads, p_dim), *(normal(*by_token, n_dim) for _ in "BC")]
    gates = [*(normal(*by_token, heads) for _ in range(3)), normal(*by_token, angles)]
    parameters = [normal(heads) - 2, *(grown(n_dim) for _ in "BC"), *(grown(heads, n_dim) for _ in "BC"), normal(heads)]

    def states() -> list[Tensor]:
        turned = 6 * uniform(*by_head, angles)
        return [turned, normal(*by_head, n_dim, p_dim), normal(*by_head, n_dim), normal(*by_head, p_dim)]

    inputs = [x.to(problem.dtype) for x in rows] + [x.to(problem.gate_dtype) for x in gates] + parameters + states()
    return inputs, [normal(*by_token, heads, p_dim).to(problem.dtype), *states()]


# What `_choose_plan` said: to ask again would cost more than a launch.
_chosen: dict[tuple, object] = {}


def _plan(inputs: Inputs, doc_start_BT: Tensor | None):
    """The plan that passed the self-check, or None for the chunk form."""
    from stateflow_kernels import plans

    x = inputs.x
    dtypes = tuple(tensor.dtype for tensor in inputs)
    key = x.device, x.shape, inputs.B.shape, inputs.angle.shape, dtypes, doc_start_BT is None, plans.state()
    if key not in _chosen:
        _chosen[key] = _choose_plan(inputs, doc_start_BT is not None)
    return _chosen[key]


def planned(x_shape: torch.Size, n_dim: int, num_angles: int, dtype: torch.dtype, device: torch.device):
    """The plan of the tables, before any check; x is [B, T, H, P]."""
    from stateflow_kernels.plans import plan_for

    batch, num_tokens, num_heads, p_dim = x_shape
    return plan_for(
        "mamba3",
        device=device,
        dtype=dtype,
        batch=batch,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_key_heads=1,
        k_dim=n_dim,
        v_dim=p_dim,
        num_angles=num_angles,
    )


def _choose_plan(inputs: Inputs, has_docs: bool):
    batch, _, num_heads, p_dim = inputs.x.shape
    problem = Problem(
        device=inputs.x.device,
        dtype=inputs.x.dtype,
        gate_dtype=inputs.dd_dt.dtype,
        num_heads=num_heads,
        n_dim=inputs.B.shape[2],
        p_dim=p_dim,
        num_angles=inputs.angle.shape[2],
        has_docs=has_docs,
        batch=batch,
    )
    plan = planned(inputs.x.shape, problem.n_dim, problem.num_angles, problem.dtype, problem.device)
    return self_check.checked_plan(problem, plan)


def chunk_form(inputs: Inputs, *options, beside=None) -> tuple[Tensor, ...]:
    """What is to run beside the kernels, then the chunk form, which has no place for it."""
    if beside is not None:
        beside.gates()
        beside.scan()
    return _chunk_form(*inputs, *options)


def chunk_form_backward(grads: tuple[Tensor, ...], inputs: Inputs, *options, beside=None) -> Inputs:
    if beside is not None:
        beside.gates()
        beside.meanwhile()
    results = Inputs(*_chunk_form_backward(*grads, *inputs, *options))
    if beside is not None:
        beside.finish(results.x, results.z)
    return results


def forward(
    inputs: Inputs, doc_start_BT: Tensor | None, norm_eps: float, A_floor: float, chunk_size: int, beside=None
) -> tuple[Tensor, ...]:
    """The operation without autograd. `beside`: a `stateflow_kernels.mamba3_rule.Beside`, which may write x and z."""
    with on_device_of(inputs.x):
        plan = _plan(inputs, doc_start_BT)
        if plan is None:
            return chunk_form(inputs, doc_start_BT, norm_eps, A_floor, chunk_size, beside=beside)
        from stateflow_kernels import mamba3_rule as kernels

        tensors = kernels.Inputs(*(x.contiguous() for x in inputs))
        docs = None if doc_start_BT is None else doc_start_BT.contiguous()
        return kernels.forward(tensors, docs, norm_eps, A_floor, plan, beside)


def _forward(*args) -> tuple[Tensor, ...]:
    return forward(Inputs(*args[:-4]), *args[-4:])


_mamba3_triton = Operation(
    "stateflow::mamba3_triton",
    _forward,
    schema=f"({_SCHEMA}) -> ({', '.join(f'Tensor {name}_out' for name in _OUTPUTS)})",
)


@_mamba3_triton.register_fake
def _(*args):
    inputs = Inputs(*args[:-4])
    return tuple(x.new_empty(x.shape) for x in (inputs.x, *inputs[-4:]))


def backward(
    grads: tuple[Tensor, ...],
    inputs: Inputs,
    doc_start_BT: Tensor | None,
    norm_eps: float,
    A_floor: float,
    chunk_size: int,
    beside=None,
) -> Inputs:
    """The gradients of all inputs, without autograd. `beside` may write the gradient of y, in the type of y."""
    with on_device_of(inputs.x):
        plan = _plan(inputs, doc_start_BT)
        if plan is None:
            return chunk_form_backward(grads, inputs, doc_start_BT, norm_eps, A_floor, chunk_size, beside=beside)
        from stateflow_kernels import mamba3_rule as kernels

        # Contiguous, and of the types that autograd would give them: a caller may expand or cast them.
        outputs = (inputs.x, *inputs[-4:])
        grads = tuple(grad.to(x.dtype).contiguous() for grad, x in zip(grads, outputs, strict=True))
        tensors = kernels.Inputs(*(x.contiguous() for x in inputs))
        docs = None if doc_start_BT is None else doc_start_BT.contiguous()
        return kernels.backward(grads, tensors, docs, norm_eps, A_floor, plan, beside)


def _run_backward(*args) -> tuple[Tensor, ...]:
    count = len(_OUTPUTS)
    return tuple(backward(args[:count], Inputs(*args[count:-4]), *args[-4:]))


_mamba3_triton_backward = Operation(
    "stateflow::mamba3_triton_backward",
    _run_backward,
    schema=(
        f"({', '.join(f'Tensor grad_{name}' for name in _OUTPUTS)}, {_SCHEMA}) -> "
        f"({', '.join(f'Tensor {name}_out' for name in Inputs._fields)})"
    ),
)


@_mamba3_triton_backward.register_fake
def _(*args):
    return tuple(x.new_empty(x.shape) for x in args[len(_OUTPUTS) : -4])


def _setup_context(ctx, inputs, output):
    *tensors, ctx.norm_eps, ctx.A_floor, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, *grads):
    grads = _mamba3_triton_backward(*grads, *ctx.saved_tensors, ctx.norm_eps, ctx.A_floor, ctx.chunk_size)
    return *grads, None, None, None, None


_mamba3_triton.register_autograd(_backward, setup_context=_setup_context)
