"""Bad configs end with one sentence that names the value and a change that works, before any process group exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.titan import harness

DOC = Path(__file__).parents[2] / "docs" / "composability.md"

# override(s) -> what the message must contain
REFUSED = {
    "--stateflow.policy=1f1": "policy = '1f1' is unknown; did you mean '1f1b'",
    "--stateflow.policy=zigzag": "known: 1f1b, gpipe",
    "--stateflow.weight-lag=1": "policy 1f1b has no separate W, so no weight_lag; leave it out, or use one of",
    "--stateflow.weight-lag=-1 --stateflow.policy=mepipe": "weight_lag = -1 is too small; the least is 0",
    "--stateflow.policy=v_shape --parallelism.pipeline_parallel_layers_per_stage=3":
        "takes 2 stages a rank, which is 4",
    "--stateflow.policy=zero_bubble --compile.enable --compile.components=model "
    "--parallelism.tensor_parallel_degree=2 --stateflow.sequence-parallel-norms":
        "'zero_bubble' splits the backward, which compiled blocks can do only where they get all tokens of a chunk",
    "--stateflow.policy=interleaved --parallelism.pipeline_parallel_layers_per_stage=3":
        "'interleaved' needs at least 2 stages a rank",
    "--stateflow.schedule-file=no/such.csv": "no/such.csv",
    "--stateflow.schedule-file=README.md": "line 3, cell 1 of the schedule",
    "--stateflow.num-chunks=0": "num_chunks = 0 is too small; the least is 1",
    "--stateflow.num-chunks=-3": "num_chunks = -3 is too small",
    "--stateflow.num-chunks=97": "num_chunks = 97",
    "--stateflow.skew=-0.5": "skew = -0.5",
    "--stateflow.skew=3": "skew = 3",
    "--stateflow.chunk-multiple=64 --stateflow.num-chunks=4": "num_chunks = 4",
    "--stateflow.chunk-lengths 48 48": "chunk_lengths = [48, 48] already says where to cut: drop num_chunks = 4",
    "--stateflow.num-chunks=None --stateflow.skew=1 --stateflow.chunk-lengths 48 48": "drop skew = 1",
    "--stateflow.num-chunks=None --stateflow.chunk-lengths 48 47": "seq_len = 96",
    "--stateflow.num-chunks=None --stateflow.chunk-lengths 96 0": "chunk_lengths",
    "--stateflow.num-chunks=None --stateflow.chunk-lengths 100 -4": "chunk_lengths",
    "--stateflow.model.num-v-heads=3": "num_v_heads = 3",
    "--stateflow.model.num-kv-heads=3": "num_kv_heads = 3",
    "--stateflow.model.pattern=gdn,mamba": "pattern = 'mamba'",
    "--stateflow.model.dim=0": "dim = 0",
    "--stateflow.model.rope-theta=0": "rope_theta = 0.0: must be a number above 0",
    "--stateflow.model.mamba-num-angles=5": "mamba_num_angles = 5",
    "--stateflow.kernels=triton --stateflow.model.pattern=mamba3": "does not fit the mamba3 layers, with N = mam",
    "--model.flavor=huge": "flavor = 'huge' is unknown; choose one of",
    "--model.flavor=demo_mamba": "flavor = 'demo_mamba' is unknown; did you mean 'demo_mamba3'? known: demo, ",
    "--model.name=llama3": 'set [model] name = "stateflow", and flavor',
    "--parallelism.pipeline_parallel_degree=5": "above the model's 4 layers; use at most 4",
    "--parallelism.tensor_parallel_degree=4": "tensor_parallel_degree = 4 does not divide the model's num_heads = 2",
    "--parallelism.tensor_parallel_degree=2 --parallelism.enable_async_tensor_parallel": "set it to false",
    "--parallelism.tensor_parallel_degree=2 --stateflow.sequence-parallel-norms --training.seq_len=95": "set it to 96",
    "--parallelism.tensor_parallel_degree=2 --stateflow.sequence-parallel-norms --stateflow.num-chunks=33": (
        "set chunk_multiple = 2"
    ),
    "--parallelism.context_parallel_degree=2": "context_parallel_degree = 2",
    "--parallelism.expert_parallel_degree=2": "expert_parallel_degree = 2",
    "--parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree=1": "replicate_degree = 2",
    "--parallelism.pipeline_parallel_microbatch_size=3": "pipeline_parallel_microbatch_size = 3 does not divide",
    "--parallelism.pipeline_parallel_layers_per_stage=2": "gives 3 stages, not a multiple of",
    "--validation.enable --validation.local_batch_size=1": "[validation] local_batch_size = 1 differs",
    "--validation.enable --validation.seq_len=48": "[validation] seq_len = 48 differs",
    "--validation.enable --validation.steps=-1": "[validation] steps = -1",
    "--parallelism.pipeline_parallel_degree=0": "pipeline_parallel_degree = 0 is too small; the least is 1",
    "--parallelism.pipeline_parallel_degree=-1": "pipeline_parallel_degree = -1 is too small",
    "--parallelism.pipeline_parallel_layers_per_stage=0": "pipeline_parallel_layers_per_stage = 0",
    "--parallelism.data_parallel_replicate_degree=2": "data_parallel_replicate_degree = 2",
    "--parallelism.data_parallel_shard_degree=0": "data_parallel_shard_degree = 0",
    "--training.local_batch_size=0": "local_batch_size = 0 is too small",
    "--training.global_batch_size=0": "global_batch_size = 0: use -1",
    "--training.seq_len=0": "seq_len = 0 is too small",
    "--training.steps=0": "steps = 0 is too small",
    "--metrics.log_freq=0": "log_freq = 0 is too small; the least is 1",
    "--training.max_norm=0": "max_norm = 0.0 must be above 0",
    "--training.max_norm=-1": "max_norm = -1.0 must be above 0; without clipping it is a large number, e.g. 1e9",
    "--parallelism.pipeline_parallel_first_stage_less_layers=6": "first_stage_less_layers = 6 and pipeline_parallel_",
    "--stateflow.no-enable --parallelism.pipeline_parallel_last_stage_less_layers=6": "less_layers = 6 do not fit",
    "--stateflow.rope-reset --stateflow.no-reset-at-documents": "rope_reset = true has no documents to reset at",
    "--checkpoint.enable --job.dump_folder=no/such --checkpoint.initial_load_path=no/such/step-1": "no folder",
    "--checkpoint.enable --checkpoint.last_save_in_hf": "last_save_in_hf = true: these models have no form",
    "--checkpoint.enable --checkpoint.initial_load_in_hf": "initial_load_in_hf = true: these models have no",
    "--stateflow.tokenizer=no/such/tokenizer.json": "no/such/tokenizer.json",
    "--training.dataset=no/such/folder": "no/such/folder",
    "--stateflow.kernels=cuda": """kernels = 'cuda' is unknown; use one of "auto", "triton", "reference\"""",
    "--stateflow.mixed-precision-alone --parallelism.pipeline_parallel_degree=1":
        "mixed_precision_alone = true is for pipelines",
    "--stateflow.mixed-precision-alone --parallelism.data_parallel_replicate_degree=2":
        "data_parallel_replicate_degree = 2: set that to 1",
    "--stateflow.mixed-precision-alone --stateflow.no-enable "
    "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble":
        "mixed_precision_alone = true does not go with torchtitan's ZBVZeroBubble",
    "--stateflow.cuda-graphs": "cuda_graphs = true needs mixed_precision_alone = true",
    "--stateflow.cuda-graphs --stateflow.mixed-precision-alone --parallelism.tensor_parallel_degree=2":
        "cuda_graphs = true needs mixed_precision_alone = true in a pipeline without data or tensor parallelism",
    "--stateflow.cuda-graphs --stateflow.mixed-precision-alone --activation_checkpoint.mode=none":
        'cuda_graphs = true records recomputed layers, [activation_checkpoint] mode = "none"',
    "--stateflow.cuda-graphs --stateflow.mixed-precision-alone --activation_checkpoint.mode=full --compile.enable":
        "cuda_graphs = true does not go with compiled blocks",
    "--stateflow.cuda-graphs --stateflow.mixed-precision-alone --activation_checkpoint.mode=full "
    "--stateflow.policy=zero_bubble":
        "'zero_bubble' splits the backward, which a recorded layer cannot do: set [stateflow] cuda_graphs = false",
    "--stateflow.trace": "trace_steps = [3, 5] is beyond [training] steps =",
    "--stateflow.trace --stateflow.trace-steps 3 1": "trace_steps = [3, 1] must be the first and the last step",
    "--stateflow.trace --stateflow.trace-steps 1 1 --stateflow.no-enable": "trace = true records the schedule",
    "--stateflow.num-chunks=None --stateflow.plan=no/such.toml": "plan file no/such.toml cannot be read",
    "--stateflow.num-chunks=4 --stateflow.plan=no/such.toml": "drop num_chunks = 4, or the plan",
    "--stateflow.kernels=triton": "head_v_dim: K must be a multiple of 8 from 16 to 256, it is 8 (the nearest is 16)",
}  # fmt: skip

WRONG_TYPES = {
    "num_chunks": "8",
    "skew": "much",
    "enable": 1,
    "policy": 3,
    "chunk_lengths": [48.0, 48],
    "chunk_multiple": True,
    "reset_at_documents": "yes",
    "rope_reset": "yes",
    "sequence_parallel_norms": "yes",
    "mixed_precision_alone": "yes",
    "cuda_graphs": 1,
    "exact_order": "no",
    "tokenizer": 7,
    "kernels": ["auto"],
    "weight_lag": True,
    "schedule_file": 3,
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_a_config_that_cannot_work_is_refused_with_a_sentence(overrides):
    with pytest.raises(ValueError) as error:
        harness.parse(overrides.split())
    message = str(error.value)
    assert REFUSED[overrides] in message, message
    assert "\n" not in message.strip(), "one sentence, not a report"


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("dim", 64.0, "a whole number"), ("dim", True, "a whole number"), ("pattern", ["gdn"], "a string"),
        ("rope_theta", "1e6", "a number"), ("allow_neg_eigval", 1, "true or false"),
    ],
)  # fmt: skip
def test_a_mistyped_field_of_the_model_is_refused(key, value, kind):
    from stateflow.titan.config import validate

    config = harness.parse([])
    setattr(config.stateflow.model, key, value)
    with pytest.raises(ValueError, match=rf"\[stateflow.model\] {key} = .* must be {kind}"):
        validate(config)


def test_fields_of_the_model_reach_it():
    from stateflow.titan.flavors import resolve_model

    args = ["--stateflow.model.rope-theta=1000000", "--stateflow.model.allow-neg-eigval", "True"]
    model = resolve_model(harness.parse(args))
    assert (model.rope_theta, model.allow_neg_eigval) == (1e6, True)


@pytest.mark.parametrize("key", WRONG_TYPES)
def test_a_mistyped_toml_value_is_refused(key, tmp_path):
    import stateflow.titan  # noqa: F401
    from stateflow.titan.config import validate

    config = harness.parse([])
    setattr(config.stateflow, key, WRONG_TYPES[key])
    with pytest.raises(ValueError, match=rf"\[stateflow\] {key} = "):
        validate(config)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]], "leaves out layers.2, layers.3"),
        ([["tok_embedings", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "output"]], "'tok_embedings'"),
        ([["tok_embeddings", "layers.1", "layers.0"], ["layers.2", "layers.3", "norm", "output"]], "order"),
    ],
)
def test_parts_must_hold_the_whole_model(parts, message):
    from stateflow.titan.config import validate

    config = harness.parse([])
    config.parallelism.module_fqns_per_model_part = parts
    with pytest.raises(ValueError, match=message):
        validate(config)


def test_an_unknown_key_of_the_toml_is_refused(tmp_path):
    from torchtitan.config import ConfigManager

    import stateflow.titan  # noqa: F401

    text = harness.CONFIG.read_text().replace("num_chunks = 4", "num_chunk = 4")
    path = tmp_path / "train.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="num_chunk"):
        ConfigManager().parse_args(["--job.config_file", str(path)])


def test_every_refusal_stands_in_the_docs():
    """docs/composability.md lists each refused key, and this file tests at least as many as it lists."""
    rows = [line for line in DOC.read_text().splitlines() if line.startswith("| refused |")]
    assert len(rows) >= 25
    documented = " ".join(rows)
    for overrides in REFUSED:
        for key in re.findall(r"--[a-z]+\.([a-z_.-]+)", overrides):
            name = key.replace("-", "_").split(".")[-1]
            known = ("data_parallel_shard_degree", "enable", "dump_folder", "steps")
            assert name.removeprefix("no_") in documented or name in known, key


def test_every_flavor_is_a_legal_model_and_has_the_size_of_its_name():
    from stateflow.model import count_parameters
    from stateflow.titan.flavors import FLAVORS

    billions = {"3b": (2.7, 3.4), "15b": (13.5, 15.9), "32b": (30.0, 36.0)}
    for name, args in FLAVORS.items():
        args.validate()
        for size, (least, most) in billions.items():
            if f"_{size}" in name:
                assert least * 1e9 < count_parameters(args) < most * 1e9, name


@pytest.mark.parametrize("path", sorted(harness.CONFIG.parent.glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_in_the_repository_is_accepted(path):
    from torchtitan.config import ConfigManager

    import stateflow.titan  # noqa: F401

    config = ConfigManager().parse_args(["--job.config_file", str(path)])
    assert config.stateflow.enable and path.stem.startswith(config.model.flavor)


def test_a_config_may_cut_by_cost_between_and_beyond():
    from stateflow.titan.config import make_plan

    model = ["--model.flavor=gdn_3b_hybrid", "--training.seq_len=131072", "--stateflow.num-chunks=8"]
    plans = {skew: make_plan(harness.parse([*model, f"--stateflow.skew={skew}"])) for skew in (0, 0.5, 1, 1.25)}
    lengths = {skew: plan.lengths for skew, plan in plans.items()}
    assert lengths[0] == (16384,) * 8
    assert all(sum(x) == 131072 and all(n % 128 == 0 for n in x) for x in lengths.values())
    # Attention makes later tokens dearer, so chunks get shorter along the sequence, the more so the larger alpha.
    assert list(lengths[1]) == sorted(lengths[1], reverse=True)
    assert lengths[0][0] < lengths[0.5][0] < lengths[1][0] < lengths[1.25][0]
