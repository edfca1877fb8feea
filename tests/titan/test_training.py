"""torchtitan's features around the pipeline: every layout gives the unpipelined run's losses, norms and gradients."""

from __future__ import annotations

import pytest
import torch

from stateflow.faults import FAULTS
from tests.titan import harness
from tests.titan.conftest import nightly
from tests.workers import WorkerError

pytestmark = pytest.mark.processes

PP1 = "--parallelism.pipeline_parallel_degree=1"
PP2 = "--parallelism.pipeline_parallel_degree=2"
PP4 = "--parallelism.pipeline_parallel_degree=4"
FSDP2 = "--parallelism.data_parallel_shard_degree=2"
MAMBA3 = "--stateflow.model.pattern=mamba3,mamba3,mamba3,attention"
BOTH = "--stateflow.model.pattern=gdn,mamba3,gdn,attention"
HSDP2x2 = [FSDP2, "--parallelism.data_parallel_replicate_degree=2"]
OFF = "--stateflow.no-enable"
ACCUMULATE = "--training.global_batch_size=4"

SPREAD = [
    "--parallelism.pipeline_parallel_first_stage_less_layers=0",
    "--parallelism.pipeline_parallel_last_stage_less_layers=0",
]

VERIFIED = {
    "PP2": (2, [PP2]),
    "PP4, skewed": (4, [PP4, "--stateflow.num-chunks=3", "--stateflow.skew=1.0"]),
    "PP2, chunks of 1, 2 and 3 tokens": (
        2, [PP2, "--stateflow.num-chunks=None", "--stateflow.chunk-lengths", "1", "90", "2", "3"],
    ),
    "PP2, one chunk": (2, [PP2, "--stateflow.num-chunks=1"]),
    "PP2, gpipe, documents joined": (2, [PP2, "--stateflow.policy=gpipe", "--stateflow.no-reset-at-documents"]),
    "PP2, two stages a rank": (
        2, [PP2, "--parallelism.pipeline_parallel_layers_per_stage=1", *SPREAD],
    ),
    "PP2, zero_bubble, whole sequences": (2, [PP2, "--stateflow.policy=zero_bubble", "--stateflow.num-chunks=1"]),
    "PP2, v_shape": (2, [PP2, "--stateflow.policy=v_shape", *SPREAD]),
    "PP2, whole sequences, torchtitan's 1F1B": (2, [PP2, OFF]),
    "PP1": (1, [PP1]),
    "PP2, gradient accumulation": (2, [PP2, ACCUMULATE]),
    "PP2, torchtitan's 1F1B, gradient accumulation": (2, [PP2, OFF, ACCUMULATE]),
    "PP2, full recomputation": (2, [PP2, "--activation_checkpoint.mode=full"]),
    "PP2, selective recomputation": (
        2, [PP2, "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
    ),
    "PP2, working weights, accumulation, full recomputation": (
        2, [PP2, "--stateflow.mixed-precision-alone", ACCUMULATE, "--activation_checkpoint.mode=full"],
    ),
    "PP2, working weights, zero_bubble": (
        2, [PP2, "--stateflow.mixed-precision-alone", "--stateflow.policy=zero_bubble"],
    ),
    "PP2, torchtitan's 1F1B, full recomputation": (2, [PP2, OFF, "--activation_checkpoint.mode=full"]),
    "PP2, working weights, whole sequences, torchtitan's 1F1B": (
        2, [PP2, OFF, "--stateflow.mixed-precision-alone", "--activation_checkpoint.mode=full"],
    ),
    "PP2 x FSDP2": (4, [PP2, FSDP2]),
    "PP2 x FSDP2, accumulation, full recomputation": (
        4, [PP2, FSDP2, "--training.global_batch_size=8", "--activation_checkpoint.mode=full"],
    ),
    "PP2, Mamba-3, chunks of 1, 2 and 3 tokens, full recomputation": (
        2, [PP2, MAMBA3, "--stateflow.num-chunks=None", "--stateflow.chunk-lengths", "1", "90", "2", "3",
            "--activation_checkpoint.mode=full"],
    ),
    "PP2 x FSDP2, Mamba-3, selective recomputation": (
        4, [PP2, FSDP2, MAMBA3, "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op"],
    ),
    "PP2 x FSDP2, zero_bubble, accumulation, full recomputation": (
        4, [PP2, FSDP2, "--stateflow.policy=zero_bubble", "--training.global_batch_size=8",
            "--activation_checkpoint.mode=full"],
    ),
    "PP2 x FSDP2, v_shape": (4, [PP2, FSDP2, "--stateflow.policy=v_shape", *SPREAD]),
    "PP2 x FSDP2, four stages a rank, interleaved": (
        4, [PP2, FSDP2, "--stateflow.policy=interleaved", "--parallelism.pipeline_parallel_layers_per_stage=1",
            "--stateflow.model.num-layers=8", *SPREAD],
    ),
    "PP2 x TP2, zero_bubble": (4, [PP2, "--parallelism.tensor_parallel_degree=2", "--stateflow.policy=zero_bubble"]),
    "FSDP2": (2, [PP1, FSDP2]),
    "HSDP2x2": (4, [PP1, *HSDP2x2]),
}  # fmt: skip


# A second step, on updated weights and used buffers, is worth its time in two processes, and in four of these.
SECOND_STEP = ("PP4, skewed", "PP2 x FSDP2", "PP2 x FSDP2, accumulation, full recomputation", "HSDP2x2")


@pytest.mark.parametrize("case", VERIFIED)
def test_every_gradient_equals_the_reference(titan, case):
    world_size, args = VERIFIED[case]
    steps = 2 if world_size < 4 or case in SECOND_STEP else 1
    for difference, name in titan.verify(world_size, *args, steps=steps):
        assert difference <= 1e-10, (name, difference)


@nightly
@pytest.mark.timeout(900)
def test_hybrid_sharding_beside_the_pipeline(eight):
    for args in ([], ["--training.global_batch_size=16"]):  # and accumulated
        for difference, name in eight.verify(8, PP2, *HSDP2x2, *args):
            assert difference <= 1e-10, (name, difference)


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_notices_each_planted_fault(titan, fault):
    if fault == "ascending-backward":
        with pytest.raises(WorkerError, match="backward chunks must descend"):
            titan.verify(2, PP2, steps=1, plant=fault)
    else:
        policy = "zero_bubble" if fault == "drop-weight-grad" else "1f1b"
        ((difference, _),) = titan.verify(2, PP2, BOTH, f"--stateflow.policy={policy}", steps=1, plant=fault)
        assert difference > 1e-4


recomputes_compiled = pytest.mark.skipif(torch.__version__ < (2, 13), reason="refused before torch 2.13")
# One of each kind: what layers of one kind share is tested in tests/pipeline/test_compile.py.
TWO_LAYERS = ["--stateflow.model.num-layers=2", "--stateflow.model.pattern=gdn,attention"]
SPLIT = ["--stateflow.policy=mepipe", "--activation_checkpoint.mode=full", *SPREAD]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([PP2, *TWO_LAYERS], id="PP2"),
        pytest.param([PP2, FSDP2, *TWO_LAYERS], id="PP2xFSDP2"),
        pytest.param([PP2, FSDP2, *TWO_LAYERS, "--stateflow.model.pattern=mamba3,attention"], id="mamba3"),
        pytest.param([PP2, *SPLIT], id="split, recomputed", marks=[nightly, recomputes_compiled]),
    ],
)
def test_compiled_blocks(titan, layout):
    compiled = ["--compile.enable", "--compile.components=model", "--compile.backend=aot_eager"]
    world_size = 4 if FSDP2 in layout else 2
    for difference, name in titan.verify(world_size, *compiled, *layout, dtype="float32", steps=1):
        assert difference <= 2e-5, (name, difference)


BF16 = "--training.mixed_precision_param=bfloat16"


def expected_dtypes() -> dict[str, list[str]]:
    float32, bfloat16 = ["float32"], ["bfloat16"]
    return {
        "parameter": float32, "gradient": float32, "optimizer state": float32, "gate parameters in use": float32,
        "gate": float32, "recurrent": float32, "conv_q": float32, "conv_k": float32, "conv_v": float32,
        "dynamics parameters in use": float32, "theta": float32, "k_last": float32, "v_last": float32,
        "state gradient": float32, "K/V gradient": float32, "K/V": bfloat16, "activation": bfloat16, "loss": float32,
    }  # fmt: skip


def test_what_stays_float32_under_bf16_mixed_precision(titan):
    first, *_, last = titan.call(harness.dtypes, 4, PP2, FSDP2, BOTH, BF16)
    assert {**first, **last} == expected_dtypes()


def test_mixed_precision_without_data_parallelism(four):
    args = [PP2, "--parallelism.tensor_parallel_degree=2", "--stateflow.mixed-precision-alone"]
    for difference, name in four.verify(4, *args):
        assert difference <= 1e-10, (name, difference)
    first, *_, last = four.call(harness.dtypes, 4, *args, BOTH, BF16)
    assert {**first, **last} == expected_dtypes()


def test_mixed_precision_with_working_weights(titan):
    args = ["--stateflow.mixed-precision-alone", "--activation_checkpoint.mode=full", BOTH, BF16]
    first, last = titan.call(harness.dtypes, 2, PP2, *args)
    assert {**first, **last} == expected_dtypes()


def test_loss_and_gradient_norm_do_not_depend_on_the_layout(titan):
    validate = ["--validation.enable"]
    alone = titan.train(1, PP1, *validate)
    assert len(alone.losses) == 3 and len(alone.validation) == 2
    v_shape = ["--stateflow.policy=v_shape", *SPREAD]
    for world_size, args in (
        (2, [PP2]), (4, [PP4]), (2, [PP2, OFF]), (2, [PP2, "--stateflow.num-chunks=2"]), (2, [PP2, *v_shape])
    ):  # fmt: skip
        run = titan.train(world_size, *args, *validate, log_rank=0 if v_shape[0] in args else -1)
        assert run.losses == pytest.approx(alone.losses, rel=2e-5), args
        assert run.grad_norms == pytest.approx(alone.grad_norms, rel=1e-3), args
        assert run.validation == pytest.approx(alone.validation, rel=2e-5), args


def test_resume_with_other_chunks_policy_and_layout(titan, tmp_path):
    save = ["--checkpoint.enable", "--checkpoint.interval=1", f"--job.dump_folder={tmp_path}"]
    whole = titan.train(2, PP2, *save)
    load = ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.load_step=1", save[-1]]
    for world_size, args in (
        (2, [PP2]),
        (2, [PP2, "--stateflow.num-chunks=2", "--stateflow.policy=gpipe"]),
        (2, [PP2, "--stateflow.policy=v_shape", *SPREAD]),
        (4, [PP4, "--stateflow.skew=1.0"]),
        (1, [PP1]),
        (2, [PP2, OFF]),
    ):
        on_rank_0 = "--stateflow.policy=v_shape" in args
        resumed = titan.train(world_size, *args, *load, log_rank=0 if on_rank_0 else -1)
        assert sorted(resumed.losses) == [2, 3], args
        expected = {step: whole.losses[step] for step in (2, 3)}
        assert resumed.losses == pytest.approx(expected, rel=2e-5), args


def test_what_a_v_saves_others_resume(titan, tmp_path):
    """The first rank knows the loss, and so logs; a checkpoint is the whole model's, wherever its stages are."""
    v_shape = [PP2, "--stateflow.policy=v_shape", *SPREAD]
    save = ["--checkpoint.enable", "--checkpoint.interval=1", f"--job.dump_folder={tmp_path}"]
    whole = titan.train(2, *v_shape, *save, log_rank=0)
    load = ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.load_step=1", save[-1]]
    for world_size, args, log_rank in ((1, [PP1], -1), (2, v_shape, 0)):
        resumed = titan.train(world_size, *args, *load, log_rank=log_rank)
        assert resumed.losses == pytest.approx({step: whole.losses[step] for step in (2, 3)}, rel=2e-5), args


def test_resume_with_working_weights(titan, tmp_path):
    """Written with them and read without, and the other way round: float32 parameters and optimizer state."""
    own = ["--stateflow.mixed-precision-alone", "--training.mixed_precision_param=float32"]
    own.append("--activation_checkpoint.mode=full")
    load = ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.load_step=1"]
    for i, (first, second) in enumerate([(own, []), ([], own)]):
        folder = f"--job.dump_folder={tmp_path / str(i)}"
        whole = titan.train(2, PP2, *first, "--checkpoint.enable", "--checkpoint.interval=1", folder)
        resumed = titan.train(2, PP2, *second, *load, folder)
        expected = {step: whole.losses[step] for step in (2, 3)}
        assert resumed.losses == pytest.approx(expected, rel=2e-5)
        assert resumed.grad_norms[2] == pytest.approx(whole.grad_norms[2], rel=1e-4)


def test_tensorboard_and_the_log_folder(titan, tmp_path):
    from stateflow.titan.report import summarize
    from tests.titan import harness

    args = [PP2, "--metrics.enable_tensorboard", "--validation.enable", f"--job.dump_folder={tmp_path}"]
    titan.train(2, *args)
    text = summarize(str(tmp_path), harness.parse(args))
    assert "validation" in text and "at step 3" in text
    assert list(tmp_path.rglob("events.out.tfevents*"))
