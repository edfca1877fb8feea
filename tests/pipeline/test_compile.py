"""torch.compile of every block: full graph, few graphs however many chunk lengths, and the numbers of eager."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from stateflow.chunks import ChunkPlan
from stateflow.layers import DecayGate
from stateflow.pipeline.local import run_local
from stateflow.working_weights import WorkingWeights
from tests import cases

pytestmark = pytest.mark.slow
# Ten different lengths: one graph a length would hit dynamo's recompile limit and fall back or fail.
PLAN = ChunkPlan.explicit(97, [16, 15, 14, 13, 11, 9, 8, 6, 3, 2])


def run(
    kinds, *, compiled: bool, recompute: bool = False, docs: bool = False, working: bool = False, policy: str = "1f1b",
    backend: str = "aot_eager", device: str = "cpu", plan: ChunkPlan = PLAN, dtype: torch.dtype = torch.float32,
):  # fmt: skip
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = cases.make_model(kinds, dtype).to(device)
    tokens, labels = (t.to(device) for t in cases.make_batch(2, plan.seq_len, seed=4))
    documents = cases.make_documents(2, plan.seq_len, seed=4, density=0.05).to(device) if docs else None
    (stage,) = cases.make_stages(model, 1, plan)
    if working:
        WorkingWeights(stage.module, dtype, lambda module: isinstance(module, DecayGate))
    layers = stage.module.layers
    for name, block in list(layers.named_children()):
        if recompute:
            block = checkpoint_wrapper(block)
        if compiled:
            block = torch.compile(block, backend=counter, fullgraph=True)
        layers.register_module(name, block)
    for _ in range(2):
        stage.module.zero_grad()
        scale = 1 / labels.numel()
        losses = run_local(cases.schedule_of(policy, 1, 2, plan), [stage], plan, tokens, labels, docs=documents,
                           loss_scale=scale)  # fmt: skip
    torch._dynamo.reset()
    return torch.stack(losses), cases.gradients_of([stage]), counter.frame_count


# A checkpoint around a block knows nothing of its kind: one kind has it without documents, too.
@pytest.mark.parametrize(
    ("kind", "recompute", "docs"),
    [(kind, both, both) for kind in ("gdn", "mamba3", "attention") for both in (False, True)]
    + [("gdn", True, False), ("mamba3", False, True), ("attention", False, True)],
)
def test_compiled_blocks_equal_eager_with_few_graphs(kind, recompute, docs):
    # Not float32: they add up the gradients of a norm's output in another order (see `stateflow.projections`).
    options = dict(recompute=recompute, docs=docs, dtype=torch.float64)
    losses, grads, graphs = run([kind, kind], compiled=True, **options)
    eager_losses, eager_grads, _ = run([kind, kind], compiled=False, **options)
    assert torch.allclose(losses, eager_losses, rtol=1e-10)
    grads = {name.replace("_orig_mod.", ""): g for name, g in grads.items()}
    worst, name = cases.largest_difference(grads, eager_grads)
    assert worst <= 1e-10, (name, worst)
    # The first chunk's length is static, the second makes it dynamic; attention also sees a first chunk without prefix.
    assert graphs <= (3 if kind == "attention" else 2), graphs


def split_against_whole(kind, recompute, **where):
    """Losses and gradients of a split backward of compiled blocks against a whole one of eager blocks."""
    plan = ChunkPlan.explicit(37, [16, 12, 9])
    options = dict(recompute=recompute, plan=plan, **where)
    losses, grads, graphs = run([kind, kind], compiled=True, policy="zero_bubble", **options)
    eager_losses, eager_grads, _ = run([kind, kind], compiled=False, **options)
    assert torch.allclose(losses, eager_losses, rtol=1e-5)
    grads = {name.replace("_orig_mod.", ""): g for name, g in grads.items()}
    return cases.largest_difference(grads, eager_grads), graphs


@pytest.mark.parametrize(("kind", "recompute"), [("gdn", True), ("mamba3", False), ("attention", True)])
def test_a_split_backward_of_compiled_blocks(kind, recompute):
    (worst, name), graphs = split_against_whole(kind, recompute, dtype=torch.float64)
    assert worst <= 1e-10, (name, worst)
    assert graphs <= (3 if kind == "attention" else 2), graphs


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("kind", ["gdn", "mamba3", "attention"])
def test_a_split_backward_of_inductors_graphs(kind, recompute):
    """Inductor reuses buffers: operands that wait for W must not be among them."""
    (worst, name), _ = split_against_whole(kind, recompute, backend="inductor", device="cuda")
    assert worst <= 1e-3, (name, worst)


@pytest.mark.parametrize("policy", ["1f1b", "zero_bubble"])
def test_compiled_blocks_compute_with_working_weights(policy):
    options = dict(compiled=True, recompute=True, working=True, policy=policy, dtype=torch.float64)
    losses, grads, graphs = run(["gdn", "gdn"], **options)
    eager_losses, eager_grads, _ = run(["gdn", "gdn"], compiled=False, dtype=torch.float64)
    assert torch.allclose(losses, eager_losses, rtol=1e-10)
    grads = {name.replace("_orig_mod.", ""): g for name, g in grads.items()}
    eager_grads = {name: eager_grads[name.replace("_checkpoint_wrapped_module.", "")] for name in grads}
    worst, name = cases.largest_difference(grads, eager_grads)
    assert worst <= 1e-10, (name, worst)
    assert graphs <= 2, graphs
