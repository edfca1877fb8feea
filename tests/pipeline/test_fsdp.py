"""Several stages a rank under FSDP2: exact, and gathered and reduced once a step whatever the number of units."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from stateflow.chunks import ChunkPlan
from stateflow.loss import cross_entropy_sum
from stateflow.pipeline.runtime import ScheduleStateFlow, StateFlowStage
from stateflow.pipeline.split import split_model
from tests import cases

pytestmark = pytest.mark.processes
DIM = 12


class Count(TorchDispatchMode):
    """How often gradients are reduced and parameters gathered."""

    def __init__(self):
        super().__init__()
        self.calls = {"allgather": 0, "reduce_scatter": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for name in self.calls:
            self.calls[name] += str(function).startswith("c10d.") and name in str(function)
        return function(*args, **(kwargs or {}))


def shard(part, mesh, policy):
    options = dict(mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for block in part.layers.values():
        fully_shard(block, **options)
    fully_shard(part, **options)
    for module in part.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def train_sharded(rank, group, *, policy, lengths, microbatches=2, num_stages=4, mixed=False, weight_lag=None):
    """One step of a pipeline on each of two ranks alone, sharded over both: gradients, difference, collectives, ..."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    mesh = DeviceMesh.from_group(group, "cpu")
    dtype = torch.float32 if mixed else torch.float64
    model = cases.make_model(["gdn", "attention", "gdn", "gdn"], dtype)
    plan = ChunkPlan.explicit(sum(lengths), lengths)
    compute = torch.bfloat16 if mixed else dtype
    precision = MixedPrecisionPolicy(compute, torch.float32 if mixed else None, cast_forward_inputs=False)
    stages = []
    for index, part in enumerate(split_model(model, num_stages)):
        shard(part, mesh, precision)
        stages.append(
            StateFlowStage(
                part, index, num_stages, torch.device("cpu"), plan, microbatch_size=1, hidden_size=DIM, group=alone,
                activation_dtype=compute,
            )
        )  # fmt: skip
    schedule = ScheduleStateFlow(
        stages, microbatches, policy=policy, weight_lag=weight_lag, loss_fn=cross_entropy_sum
    )
    tokens, labels = cases.make_batch(2 * microbatches, plan.seq_len, seed=3)
    mine = slice(rank * microbatches, (rank + 1) * microbatches)
    left_uncast = []

    def check(stage, original):
        def weight(*args, **kwargs):
            original(*args, **kwargs)
            left_uncast.extend(n for n, p in stage.submod.named_parameters() if p.dtype != dtype and p.grad is not None)

        return weight

    for stage in stages:
        stage.backward_weight_one_chunk = check(stage, stage.backward_weight_one_chunk)
    for _ in range(2):  # the second step starts from what the first left gathered
        for stage in stages:
            stage.submod.zero_grad()
        with Count() as collectives:
            schedule.step(tokens[mine], target=labels[mine], loss_scale=1 / labels.numel())
        grads = {name: p.grad.full_tensor() for stage in stages for name, p in stage.submod.named_parameters()}
        schedule.eval(tokens[mine], target=labels[mine], losses=[])
    _, expected = cases.reference_gradients(model, tokens, labels)
    difference = cases.largest_difference(grads, expected)
    return grads, difference, collectives.calls, left_uncast


@pytest.mark.parametrize("policy", ["interleaved", "zero_bubble", "mepipe"])
def test_gathers_and_reductions_do_not_grow_with_the_units(workers, policy):
    results = {}
    for lengths in ([4, 4], [2, 1, 1, 1, 1, 2]):
        (_, difference, counts, _), _ = workers.run(train_sharded, 2, policy=policy, lengths=lengths)
        assert difference[0] <= 1e-10, difference
        results[len(lengths)] = counts
    assert results[2] == results[6]
    # A group of parameters for each of 4 blocks, one for the embedding, one for norm and head.
    assert results[2] == {"allgather": 6, "reduce_scatter": 6}


def test_weight_gradients_add_up_in_the_reduce_dtype(workers):
    """bf16 computes, float32 adds up: with W put off the same as with a whole backward."""
    sums = {}
    for policy in ("interleaved", "mepipe"):
        (sums[policy], _, _, left_uncast), _ = workers.run(
            train_sharded, 2, policy=policy, lengths=[1] * 8, microbatches=1, num_stages=1, mixed=True
        )
        assert left_uncast == []
    assert cases.largest_difference(sums["mepipe"], sums["interleaved"])[0] <= 1e-5
