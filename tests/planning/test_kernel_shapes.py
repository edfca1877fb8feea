"""The shapes that a config's run gives the kernels."""

from pathlib import Path

import pytest

from stateflow.cli import main, parse_config
from stateflow.planning.kernel_shapes import config_shapes, explicit_shapes
from stateflow_kernels.plan_table import Shape

DEMO = Path(__file__).parents[2] / "titan_configs" / "demo.toml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A checkpoint that `make demo` has left in the checkout would be compared with the config."""
    monkeypatch.chdir(tmp_path)


def of(*overrides: str) -> list[Shape]:
    return config_shapes(parse_config(["--job.config_file", str(DEMO), *overrides]))


def test_the_demo():
    assert of() == [Shape("gated_delta_rule", 4, 4, 32, 40, "float32", 1, 512)]


def test_whole_sequences_without_chunks_and_without_pipeline():
    assert of("--stateflow.no-enable")[0].tokens == 2048
    (shape,) = of("--parallelism.pipeline_parallel_degree", "1")
    assert (shape.tokens, shape.batch) == (2048, 2)


def test_unequal_chunks_are_as_many_buckets():
    lengths = ("--stateflow.num-chunks", "None", "--stateflow.chunk-lengths", "1024", "768", "256")
    assert [shape.tokens for shape in of(*lengths)] == [256, 1024]


def test_tensor_parallelism_cuts_heads():
    (shape,) = of("--parallelism.tensor_parallel_degree", "2")
    assert (shape.num_heads, shape.num_key_heads) == (2, 2)
    shared = ("--stateflow.model.num-heads", "1", "--stateflow.model.num-v-heads", "4")
    (shape,) = of("--parallelism.tensor_parallel_degree", "2", *shared)
    assert (shape.num_heads, shape.num_key_heads) == (2, 1)


def test_segments_only_without_exact_order():
    assert [shape.segments for shape in explicit_shapes([10, 20], [32_768], 128, 128, "bfloat16")] == [1, 1]
    shapes = explicit_shapes([10, 20], [1024, 32_768], 128, 128, "bfloat16", exact_order=False)
    assert [shape.segments for shape in shapes] == [1, 6, 1, 1]
    # As many as the length itself has, not its bucket.
    shapes = explicit_shapes([10], [8192, 10_240, 10_300], 128, 128, "bfloat16", exact_order=False)
    assert [(shape.tokens, shape.segments) for shape in shapes] == [(8192, 1), (8192, 5)]
    longer = ("--training.seq_len", "65536", "--validation.seq_len", "65536", "--stateflow.num-chunks", "2")
    assert of(*longer)[0].segments == 1 and of(*longer, "--stateflow.no-exact-order")[0].segments > 1


def test_the_compute_dtype():
    low = ("--training.mixed_precision_param", "bfloat16")
    sharded = ("--parallelism.data_parallel_shard_degree", "2")
    assert of(*low, *sharded)[0].dtype == "bfloat16"
    assert of(*low, "--parallelism.data_parallel_shard_degree", "1")[0].dtype == "float32"


def test_mamba3():
    sizes = ("--stateflow.model.num-mamba-heads", "6", "--stateflow.model.mamba-state-dim", "32")
    sizes += ("--stateflow.model.mamba-head-dim", "40", "--stateflow.model.mamba-num-angles", "8")
    whole = Shape("mamba3", 6, 1, 32, 40, "float32", 1, 512, 8)
    assert of("--stateflow.model.pattern", "mamba3", *sizes) == [whole]
    gdn, mamba3 = of("--stateflow.model.pattern", "gdn,mamba3", *sizes)
    assert gdn.family == "gated_delta_rule" and mamba3 == whole
    (shape,) = of("--stateflow.model.pattern", "mamba3", *sizes, "--parallelism.tensor_parallel_degree", "2")
    assert shape.num_heads == 3
    assert explicit_shapes([6], [500], 32, 40, "float32", num_angles=8) == [whole]
    with pytest.raises(ValueError, match="--angles 17: they turn pairs of the N = 32 dimensions, 1 to 16 of them"):
        explicit_shapes([6], [500], 32, 40, "float32", num_angles=17)


def test_explicit_shapes():
    shapes = explicit_shapes([20, 10], [8192, 8000, 100], 128, 64, "float16", key_heads=5)
    assert [(s.num_heads, s.num_key_heads, s.tokens) for s in shapes] == [
        (20, 5, 128), (20, 5, 8192), (10, 5, 128), (10, 5, 8192)
    ]  # fmt: skip
    for arguments, message in [
        (([20], [0], 128, 128, "bfloat16"), r"tokens \[0\]"),
        (([20], [64], 12, 128, "bfloat16"), "K must be a multiple of 8"),
        (([20], [64], 128, 128, "float64"), "dtype 'float64'"),
        (([20], [64], 128, 128, "bfloat16", 1, 6), "20 heads are no multiple of 6 key heads"),
    ]:
        with pytest.raises(ValueError, match=message):
            explicit_shapes(*arguments)


def test_refusals(capsys):
    with pytest.raises(ValueError, match="has no gdn or mamba3 layer"):
        of("--stateflow.model.pattern", "attention")
    with pytest.raises(ValueError, match="uses no kernels"):
        of("--stateflow.kernels", "reference")
    assert main(["tune-kernels"]) == 2
    assert main(["tune-kernels", str(DEMO), "--heads", "4"]) == 2
    assert main(["tune-kernels", "--heads", "4", "--what"]) == 2
    wrong = [["--any-order"], ["--dim", "64"]]
    assert [main(["tune-kernels", str(DEMO), *more]) for more in wrong] == [2, 2]
    wrong += [["--dim", "0", "--angles", "8"], ["--any-order", "--angles", "8"]]
    assert [main(["tune-kernels", "--heads", "4", *more]) for more in wrong[1:]] == [2, 2, 2]
    few = ["tune-kernels", "--any-order", "--tokens", "8192", "--heads"]
    assert [main([*few, *heads]) for heads in (["20"], ["10"])] == [2, 2]
    errors = capsys.readouterr().err.splitlines()
    assert errors[0] == "stateflow: tune-kernels needs a config, or shapes: --heads 20 --tokens 8192"
    assert "leave one out" in errors[1] and errors[2] == "stateflow: unknown argument --what"
    assert errors[3:] == [
        "stateflow: --any-order: the config says that, leave it out",
        "stateflow: --dim: the config says that, leave it out",
        "stateflow: --dim 64 is for Mamba-3: leave it out, or give --angles",
        "stateflow: --dim 0 must be at least 1",
        "stateflow: --any-order is not for Mamba-3: leave it out, or --angles 8",
        "stateflow: --any-order changes nothing here: 20 heads are walks enough, up to 13 with V = 128 go through "
        "segments; leave it out",
        "stateflow: --any-order changes nothing here: 128 chunks of 64 tokens are too few, 160 is the least; leave it "
        "out",
    ]
