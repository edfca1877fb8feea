"""Tensor parallelism: every gradient equals the single process's, whatever it is combined with."""

from __future__ import annotations

import os

import pytest
import torch

from stateflow.model import ModelConfig, count_parameters
from stateflow.titan.flavors import FLAVORS
from stateflow.titan.tensor_parallel import check_degree, divided_counts
from tests.titan import harness
from tests.titan.conftest import TitanPool

pytestmark = pytest.mark.processes

PP1 = "--parallelism.pipeline_parallel_degree=1"
PP2 = "--parallelism.pipeline_parallel_degree=2"
TP2 = "--parallelism.tensor_parallel_degree=2"
FSDP2 = "--parallelism.data_parallel_shard_degree=2"
COMPILE = ["--compile.enable", "--compile.components=model", "--compile.backend=aot_eager"]

VERIFIED = {
    "TP2": (2, [PP1, TP2]),
    "TP2, whole loss on every rank": (2, [PP1, TP2, "--parallelism.disable_loss_parallel"]),
    "TP3, grouped value and key heads": (
        3, [PP1, "--parallelism.tensor_parallel_degree=3", "--stateflow.model.num-heads=3",
            "--stateflow.model.num-v-heads=6", "--stateflow.model.num-attention-heads=6",
            "--stateflow.model.num-kv-heads=3", "--stateflow.model.ffn-dim=63"],
    ),
    "PP2 x TP2": (4, [PP2, TP2]),
    "PP2 x TP2, chunks of 1, 2 and 3 tokens": (
        4, [PP2, TP2, "--stateflow.num-chunks=None", "--stateflow.chunk-lengths", "1", "90", "2", "3"],
    ),
    "PP2 x TP2, full recomputation": (4, [PP2, TP2, "--activation_checkpoint.mode=full"]),
    "PP2 x TP2, selective recomputation": (
        4, [PP2, TP2, "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
    ),
    "PP2 x TP2, whole sequences, torchtitan's 1F1B": (4, [PP2, TP2, "--stateflow.no-enable"]),
    "FSDP2 x TP2": (4, [PP1, TP2, FSDP2]),
}  # fmt: skip


@pytest.mark.parametrize("case", VERIFIED)
def test_every_gradient_equals_the_reference(titan, case):
    world_size, args = VERIFIED[case]
    for difference, name in titan.verify(world_size, *args):
        assert difference <= 1e-10, (name, difference)


@pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "nightly", reason="eight processes: HYPOTHESIS_PROFILE=nightly runs it"
)
@pytest.mark.timeout(900)
def test_pipeline_tensor_and_data_parallel_together():
    pool = TitanPool(8, timeout=800)
    try:
        for difference, name in pool.verify(8, PP2, TP2, FSDP2):
            assert difference <= 1e-10, (name, difference)
    finally:
        pool.close()


@pytest.mark.parametrize("other", [PP2, FSDP2], ids=["PP2xTP2", "FSDP2xTP2"])
def test_compiled_blocks(titan, other):
    layout = [other] if other == PP2 else [PP1, other]
    for difference, name in titan.verify(4, TP2, *layout, *COMPILE, dtype="float32", steps=1):
        assert difference <= 2e-5, (name, difference)


@pytest.mark.parametrize("fault", ["input gradient", "replicated gradient"])
def test_a_forgotten_sum_is_noticed(titan, fault):
    (difference, _name), = titan.call(
        harness.verify_with_fault, 2, PP1, TP2, fault=fault, dtype="float64", steps=1
    )[0]  # fmt: skip
    assert difference > 1e-3


def test_ranks_agree_on_replicated_parameters_and_hold_half_of_the_rest(titan):
    first, second = titan.call(harness.look_inside, 2, PP1, TP2)
    names = set(first["gradients"])
    assert {"norm.weight", "layers.0.mixer_norm.weight", "layers.0.mixer.o_norm.weight"} <= names
    for name in names:
        assert torch.equal(first["gradients"][name], second["gradients"][name]), name
        assert first["gradients"][name].abs().max() > 0, name
    gdn, attention = first["states"][0], first["states"][3]
    assert gdn == ((3, 8), (3, 8), (3, 12), (1, 8, 12))  # of 2 heads with keys of 8 and values of 12
    assert attention == ((1, 8), (1, 8))  # of 2 key heads
    replicated = sum(g.numel() for g in first["gradients"].values())
    whole = count_parameters(FLAVORS["tiny"])
    assert first["numel"] == second["numel"] == (whole - replicated) // 2 + replicated


def test_training_does_not_depend_on_the_layout_and_resumes_in_another(titan, tmp_path):
    save = ["--checkpoint.enable", "--checkpoint.interval=1", f"--job.dump_folder={tmp_path}"]
    alone = titan.train(1, PP1, "--validation.enable")
    whole = titan.train(4, PP2, TP2, "--validation.enable", *save)
    assert whole.losses == pytest.approx(alone.losses, rel=2e-5)
    assert whole.grad_norms == pytest.approx(alone.grad_norms, rel=1e-3)
    assert whole.validation == pytest.approx(alone.validation, rel=2e-5)
    load = ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.load_step=1", save[-1]]
    expected = {step: whole.losses[step] for step in (2, 3)}
    for world_size, args in ((1, [PP1]), (2, [PP1, TP2]), (2, [PP2])):
        resumed = titan.train(world_size, *args, *load)
        assert resumed.losses == pytest.approx(expected, rel=2e-5), args


def test_what_the_degree_must_divide():
    config = ModelConfig(pattern=["gdn", "attention"], num_v_heads=8, num_attention_heads=6, num_kv_heads=2)
    assert divided_counts(config) == {
        "num_heads": 4, "num_v_heads": 8, "num_attention_heads": 6, "num_kv_heads": 2, "ffn_dim": 704,
        "vocab_size": 256,
    }  # fmt: skip
    only_gdn = ModelConfig(pattern=["gdn"], num_kv_heads=1)
    assert "num_kv_heads" not in divided_counts(only_gdn)
    for degree in (1, 2, 4):
        check_degree(only_gdn, degree)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--parallelism.tensor_parallel_degree=4"],
            r"tensor_parallel_degree = 4 does not divide the model's num_heads = 2; degrees that work: 1, 2 \(",
        ),
        (
            [TP2, "--model.flavor=gdn_3b_hybrid"],
            r"tensor_parallel_degree = 2 does not divide the model's num_kv_heads = 5; degrees that work: 1 \(",
        ),
        ([TP2, "--stateflow.model.vocab-size=259"], r"vocab_size = 259; degrees that work: 1 \("),
        (["--parallelism.tensor_parallel_degree=0"], r"tensor_parallel_degree = 0"),
        ([TP2, "--parallelism.enable_async_tensor_parallel"], "enable_async_tensor_parallel = true"),
    ],
)
def test_refusals(args, message):
    with pytest.raises(ValueError, match=message):
        harness.parse([PP1, *args])
