"""Tensor parallelism: every gradient equals the single process's, whatever it is combined with."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.processes

PP1 = "--parallelism.pipeline_parallel_degree=1"
PP2 = "--parallelism.pipeline_parallel_degree=2"
TP2 = "--parallelism.tensor_parallel_degree=2"
FSDP2 = "--parallelism.data_parallel_shard_degree=2"

VERIFIED = {
    "TP2": (2, [PP1, TP2]),
    "TP2, whole loss on every rank": (2, [PP1, TP2, "--parallelism.disable_loss_parallel"]),
    "PP2 x TP2": (4, [PP2, TP2]),
    "PP2 x TP2, full recomputation": (4, [PP2, TP2, "--activation_checkpoint.mode=full"]),
    "PP2 x TP2, selective recomputation": (
        4, [PP2, TP2, "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
    ),
    "FSDP2 x TP2": (4, [PP1, TP2, FSDP2]),
}  # fmt: skip


@pytest.mark.parametrize("case", VERIFIED)
def test_every_gradient_equals_the_reference(titan, case):
    world_size, args = VERIFIED[case]
    for difference, name in titan.verify(world_size, *args):
        assert difference <= 1e-10, (name, difference)
