"""Tensor parallelism: every gradient equals the single process's, whatever it is combined with."""

from __future__ import annotations

import pytest
import torch

from stateflow.model import ModelConfig, count_parameters
from stateflow.titan.flavors import FLAVORS
from stateflow.titan.tensor_parallel import Group, check_degree, cut_tokens, divided_counts, leave_tokens
from tests.titan import harness
from tests.titan.conftest import nightly

pytestmark = pytest.mark.processes

PP1 = "--parallelism.pipeline_parallel_degree=1"
PP2 = "--parallelism.pipeline_parallel_degree=2"
TP2 = "--parallelism.tensor_parallel_degree=2"
FSDP2 = "--parallelism.data_parallel_shard_degree=2"
SP = "--stateflow.sequence-parallel-norms"
# At two ranks the third key head serves heads of both.
FIVE_KV_HEADS = [
    "--stateflow.model.num-attention-heads=10", "--stateflow.model.num-kv-heads=5",
    "--stateflow.model.attention-head-dim=4",
]  # fmt: skip
EVEN_CHUNKS = ["--stateflow.num-chunks=None", "--stateflow.chunk-lengths", "2", "60", "4", "30"]
MAMBA3 = "--stateflow.model.pattern=mamba3,mamba3,mamba3,attention"
BESIDE = "--stateflow.overlap-projections=on"
FULL = "--activation_checkpoint.mode=full"
SELECTIVE = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
# One layer of each kind: what layers of one kind share is tested in tests/pipeline/test_compile.py.
COMPILE = [
    "--compile.enable", "--compile.components=model", "--compile.backend=aot_eager", "--stateflow.model.num-layers=2",
    "--stateflow.model.pattern=gdn,attention",
]  # fmt: skip

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
    "PP2 x TP2, full recomputation": (4, [PP2, TP2, FULL]),
    "PP2 x TP2, selective recomputation": (4, [PP2, TP2, *SELECTIVE]),
    "PP2 x TP2, whole sequences, torchtitan's 1F1B": (4, [PP2, TP2, "--stateflow.no-enable"]),
    "FSDP2 x TP2": (4, [PP1, TP2, FSDP2]),
    "PP2 x TP2, Mamba-3": (4, [PP2, TP2, MAMBA3]),
    "PP2 x TP2, Mamba-3, sequence parallel norms, full recomputation": (
        4, [PP2, TP2, MAMBA3, BESIDE, SP, *EVEN_CHUNKS, FULL],
    ),
    "FSDP2 x TP2, Mamba-3": (4, [PP1, TP2, FSDP2, MAMBA3, BESIDE]),
    "PP2 x TP2, key heads of both ranks": (4, [PP2, TP2, *FIVE_KV_HEADS]),
    "TP4, fewer key heads than ranks, and some of two ranks": (
        4, [PP1, "--parallelism.tensor_parallel_degree=4", "--stateflow.model.num-heads=3",
            "--stateflow.model.num-v-heads=12", "--stateflow.model.num-attention-heads=8",
            "--stateflow.model.num-kv-heads=1", "--stateflow.model.vocab-size=260"],
    ),
    "PP2 x TP2, sequence parallel norms": (4, [PP2, TP2, SP, *EVEN_CHUNKS]),
    "PP2 x TP2, sequence parallel norms, full recomputation, key heads of both ranks": (
        4, [PP2, TP2, SP, *EVEN_CHUNKS, FULL, *FIVE_KV_HEADS],
    ),
    "PP2 x TP2, sequence parallel norms, selective recomputation": (4, [PP2, TP2, SP, *SELECTIVE]),
    "PP2 x TP2, sequence parallel norms, torchtitan's 1F1B": (4, [PP2, TP2, SP, "--stateflow.no-enable"]),
    "TP2, sequence parallel norms, whole loss on every rank": (
        2, [PP1, TP2, SP, "--parallelism.disable_loss_parallel"],
    ),
    "FSDP2 x TP2, sequence parallel norms, key heads of both ranks": (4, [PP1, TP2, FSDP2, SP, *FIVE_KV_HEADS]),
}  # fmt: skip


# A second step, on updated weights and used buffers, is worth its time in few processes, and in four of these.
SECOND_STEP = ("PP2 x TP2", "PP2 x TP2, sequence parallel norms", "FSDP2 x TP2, Mamba-3")


@pytest.mark.parametrize("case", VERIFIED)
def test_every_gradient_equals_the_reference(titan, case):
    world_size, args = VERIFIED[case]
    steps = 2 if world_size < 4 or case in SECOND_STEP else 1
    for difference, name in titan.verify(world_size, *args, steps=steps):
        assert difference <= 1e-10, (name, difference)


LAYERS = [f"layers.{i}" for i in range(4)]


@pytest.mark.parametrize(
    "parts",
    [[["tok_embeddings"], [*LAYERS, "norm", "output"]], [["tok_embeddings", *LAYERS, "norm"], ["output"]]],
    ids=["embedding alone", "head alone"],
)
def test_a_stage_without_layers_cuts_and_joins_tokens_too(titan, parts):
    ((difference, name),) = titan.call(
        harness.verify, 4, PP2, TP2, SP, dtype="float64", steps=1, parts=parts
    )[0]  # fmt: skip
    assert difference <= 1e-10, (name, difference)


@nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("args", [[], [SP, *EVEN_CHUNKS, *FIVE_KV_HEADS]], ids=["plain", "all options"])
def test_pipeline_tensor_and_data_parallel_together(eight, args):
    for difference, name in eight.verify(8, PP2, TP2, FSDP2, *args):
        assert difference <= 1e-10, (name, difference)


@pytest.mark.parametrize(
    ("other", "options"),
    [
        pytest.param(PP2, [], id="PP2xTP2-plain"),
        pytest.param(FSDP2, [SP, *FIVE_KV_HEADS], id="FSDP2xTP2-all options"),
        pytest.param(PP2, [SP, *FIVE_KV_HEADS], id="PP2xTP2-all options", marks=nightly),
        pytest.param(FSDP2, [], id="FSDP2xTP2-plain", marks=nightly),
    ],
)
def test_compiled_blocks(titan, other, options):
    layout = [other] if other == PP2 else [PP1, other]
    for difference, name in titan.verify(4, TP2, *layout, *options, *COMPILE, dtype="float32", steps=1):
        assert difference <= 2e-5, (name, difference)


FAULTS = {
    "input gradient": ([], ""),
    "replicated gradient": ([], ".o_norm.weight"),
    "norm gradient": ([SP], "norm.weight"),
    "shared B, C and angle gradient": ([MAMBA3], ("B_proj.weight", "C_proj.weight", "angle_proj.weight")),
    "shared norms' gradient": ([MAMBA3], ("dynamics.B_norm", "dynamics.C_norm")),
    "key and value gradient": (FIVE_KV_HEADS, ("wk.weight", "wv.weight")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_forgotten_sum_is_noticed(titan, fault):
    args, parameter = FAULTS[fault]
    (difference, name), = titan.call(
        harness.verify_with_fault, 2, PP1, TP2, *args, fault=fault, dtype="float64", steps=1
    )[0]  # fmt: skip
    assert difference > 1e-3
    assert name.endswith(parameter), name


def test_with_sequence_parallel_norms_a_rank_holds_its_tokens_only(titan):
    whole, cut = (titan.call(harness.look_inside, 2, PP1, TP2, *args) for args in ([], [SP]))
    assert [rank["tokens"] for rank in whole] == [{harness.SEQ_LEN}] * 2
    assert [rank["tokens"] for rank in cut] == [{harness.SEQ_LEN // 2}] * 2
    first, second = cut
    for name in first["gradients"]:
        assert torch.equal(first["gradients"][name], second["gradients"][name]), name
        torch.testing.assert_close(first["gradients"][name], whole[0]["gradients"][name], rtol=1e-3, atol=1e-6)


def test_a_rank_keeps_the_key_heads_that_its_query_heads_need(titan):
    first, second = titan.call(harness.look_inside, 2, PP1, TP2, *FIVE_KV_HEADS)
    assert first["states"][3] == second["states"][3] == ((3, 4), (3, 4))
    for name in ("layers.3.mixer.wk.weight", "layers.3.mixer.wv.weight"):
        assert first["gradients"][name].shape == (5 * 4, 32)
        assert torch.equal(first["gradients"][name], second["gradients"][name])


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


PLAIN = ([], [], [(1, [PP1]), (2, [PP1, TP2]), (2, [PP2])])
OPTIONS = (
    ["--stateflow.model.num-attention-heads=20", "--stateflow.model.num-kv-heads=5", "--stateflow.model.num-heads=4",
     "--stateflow.model.attention-head-dim=4", "--stateflow.model.vocab-size=260"],
    [SP],
    [(1, [PP1]), (4, [PP1, "--parallelism.tensor_parallel_degree=4"])],
)  # fmt: skip


@pytest.mark.parametrize(("model", "options", "layouts"), [PLAIN, OPTIONS], ids=["plain", "all options"])
def test_training_does_not_depend_on_the_layout_and_resumes_in_another(titan, tmp_path, model, options, layouts):
    save = ["--checkpoint.enable", "--checkpoint.interval=1", f"--job.dump_folder={tmp_path}"]
    alone = titan.train(1, PP1, "--validation.enable", *model)
    whole = titan.train(4, PP2, TP2, "--validation.enable", *save, *model, *options)
    assert whole.losses == pytest.approx(alone.losses, rel=2e-5)
    assert whole.grad_norms == pytest.approx(alone.grad_norms, rel=1e-3)
    assert whole.validation == pytest.approx(alone.validation, rel=2e-5)
    load = ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.load_step=1", save[-1]]
    expected = {step: whole.losses[step] for step in (2, 3)}
    for world_size, args in layouts:
        resumed = titan.train(world_size, *args, *load, *model)
        assert resumed.losses == pytest.approx(expected, rel=2e-5), args


@pytest.mark.parametrize("cut", [cut_tokens, leave_tokens])
def test_tokens_that_cannot_be_cut_in_equal_parts_are_refused(cut):
    with pytest.raises(ValueError, match="a chunk of 3 tokens cannot be cut over 2 ranks"):
        cut(torch.zeros(1, 3, 4), Group("none", 2, 0))


def test_what_the_degree_must_divide():
    config = ModelConfig(pattern=["gdn", "attention"], num_v_heads=8, num_attention_heads=6, num_kv_heads=2)
    assert divided_counts(config) == {
        "num_v_heads": 8, "num_attention_heads": 6, "ffn_dim": 704, "vocab_size": 256,
    }  # fmt: skip
    only_gdn = ModelConfig(pattern=["gdn"], num_attention_heads=3, num_kv_heads=1)
    assert divided_counts(only_gdn) == {"num_heads": 4, "ffn_dim": 704, "vocab_size": 256}
    for degree in (1, 2, 4):
        check_degree(only_gdn, degree)
        check_degree(FLAVORS["gdn_3b_hybrid"], degree)  # 20 query heads, 5 key heads


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--parallelism.tensor_parallel_degree=4"],
            r"tensor_parallel_degree = 4 does not divide the model's num_heads = 2; degrees that work: 1, 2 \(",
        ),
        (
            ["--parallelism.tensor_parallel_degree=8", "--model.flavor=gdn_3b_hybrid"],
            r"tensor_parallel_degree = 8 does not divide the model's num_heads = 20; degrees that work: 1, 2, 4 \(",
        ),
        ([TP2, "--stateflow.model.vocab-size=259"], r"degrees that work: 1 \(or set vocab_size = 260 under"),
        ([TP2, SP, "--training.seq_len=95"], r"seq_len = 95; set it to 96, or sequence_parallel_norms = false"),
        ([TP2, SP, PP2, "--stateflow.num-chunks=95"], r"a chunk of 1; set chunk_multiple = 2 and num_chunks = 48, or"),
        ([TP2, SP, PP2, "--stateflow.num-chunks=33"], r"a chunk of 3; set chunk_multiple = 2, or"),
        (
            [TP2, SP, PP2, "--stateflow.num-chunks=None", "--stateflow.chunk-lengths", "95", "1"],
            r"a multiple of 2 tokens in every chunk, the plan has a chunk of 95; change chunk_lengths, or",
        ),
        (["--parallelism.tensor_parallel_degree=0"], r"tensor_parallel_degree = 0"),
        ([TP2, "--parallelism.enable_async_tensor_parallel"], "enable_async_tensor_parallel = true"),
    ],
)
def test_refusals(args, message):
    with pytest.raises(ValueError, match=message):
        harness.parse([PP1, *args])
