"""Policies and tables of one's own in a config: what is run, on which ranks, and what is refused."""

from __future__ import annotations

import pytest
import torch

from stateflow.cli import main
from stateflow.pipeline.policies import POLICIES, build_schedule
from stateflow.pipeline.schedule import Schedule
from stateflow.titan.config import num_stages
from stateflow.titan.order import placement, read_schedule_file
from tests.titan import harness

SPREAD = [
    "--parallelism.pipeline_parallel_first_stage_less_layers=0",
    "--parallelism.pipeline_parallel_last_stage_less_layers=0",
]


def write_table(path, policy="zero_bubble", sizes=(2, 2, 4), **kwargs):
    path.write_text(build_schedule(policy, *sizes, **kwargs).to_csv())
    return [f"--stateflow.schedule-file={path}"]


def test_a_table_says_where_the_stages_are(tmp_path):
    config = harness.parse(write_table(tmp_path / "v.csv", "v_shape", stages_per_rank=2) + SPREAD)
    assert (num_stages(config), placement(config)) == (4, (0, 1, 1, 0))
    config = harness.parse(write_table(tmp_path / "loop.csv", "interleaved", stages_per_rank=2) + SPREAD)
    assert (num_stages(config), placement(config)) == (4, (0, 1, 0, 1))
    assert placement(harness.parse(["--stateflow.policy=v_shape", *SPREAD])) == (0, 1, 1, 0)
    assert placement(harness.parse(["--stateflow.policy=v_shape", "--stateflow.no-enable"])) == (0, 1)


def test_the_text_form_can_be_run_too(tmp_path):
    path = tmp_path / "table.txt"
    path.write_text(build_schedule("gpipe", 2, 2, 4).to_text())
    assert read_schedule_file(harness.parse([f"--stateflow.schedule-file={path}"])).policy == "gpipe"


@pytest.mark.parametrize(
    ("table", "overrides", "message"),
    [
        (dict(sizes=(2, 3, 4)), [], "is of 3 microbatches, this run of 2"),
        (dict(sizes=(3, 2, 4)), [], "is of 3 ranks, this run of 2; change it, or .*pipeline_parallel_degree"),
        (dict(), ["--training.local_batch_size=3"], "is of 2 microbatches, this run of 3; .*local_batch_size"),
        (dict(policy="1f1b", stages_per_rank=2), ["--parallelism.pipeline_parallel_layers_per_stage=3"], "of 4 stages"),
        (dict(), ["--stateflow.policy=gpipe"], "drop policy, weight_lag and plan"),
        (dict(), ["--stateflow.num-chunks=8"], "is of 4 chunks a sequence, this run of 8; set .* num_chunks = 4, or"),
        (dict(), ["--stateflow.num-chunks=2"], "is of 4 chunks a sequence, this run of 2; set .* num_chunks = 4, or"),
        (
            dict(), ["--stateflow.num-chunks=None", "--stateflow.chunk-lengths", "48", "48"],
            "is of 4 chunks a sequence, this run of 2; set .stateflow. chunk_lengths to 4 lengths",
        ),
        (
            dict(),
            ["--compile.enable", "--compile.components=model", "--parallelism.tensor_parallel_degree=2",
             "--stateflow.sequence-parallel-norms"],
            "has I and W, which compiled blocks can do only where they get all tokens .* sequence_parallel_norms = fal",
        ),
    ],
)
def test_a_table_of_another_run_is_refused(tmp_path, table, overrides, message):
    argument = write_table(tmp_path / "table.csv", **table)
    with pytest.raises(ValueError, match=message):
        harness.parse([*argument, *overrides])


def test_compiled_blocks_that_would_not_recompute_are_refused(monkeypatch):
    split = ["--stateflow.policy=zero_bubble", "--compile.enable", "--compile.components=model"]
    full = "--activation_checkpoint.mode=full"
    for version, refused in (("2.11.0+cu130", True), ("2.13.0", False)):
        monkeypatch.setattr("torch.__version__", torch.torch_version.TorchVersion(version))
        harness.parse(split)
        if refused:
            with pytest.raises(ValueError, match="before torch 2.13 .here 2.11.0.cu130. compiled blocks then keep"):
                harness.parse([*split, full])
        else:
            harness.parse([*split, full])


def test_who_interleaves_has_two_stages_a_rank():
    """As in torchtitan; one on purpose is refused where it would be another policy."""
    per_stage = "--parallelism.pipeline_parallel_layers_per_stage"
    for policy in ("interleaved", "mepipe"):
        config = harness.parse([f"--stateflow.policy={policy}", *SPREAD])
        assert (num_stages(config), placement(config)) == (4, (0, 1, 0, 1))
    assert num_stages(harness.parse(["--stateflow.policy=mepipe", f"{per_stage}=2", *SPREAD])) == 2
    assert num_stages(harness.parse(["--stateflow.policy=interleaved", f"{per_stage}=1", *SPREAD])) == 4
    with pytest.raises(ValueError, match="'interleaved' needs at least 2 stages a rank, .* = 2 gives one; set it to 1"):
        harness.parse(["--stateflow.policy=interleaved", f"{per_stage}=2", *SPREAD])
    with pytest.raises(ValueError, match="8 stages, 2 a rank, and it has 4 layers .*use .*parallel_degree = 2, or a p"):
        harness.parse(["--stateflow.policy=interleaved", "--parallelism.pipeline_parallel_degree=4", *SPREAD])
    with pytest.raises(ValueError, match="'v_shape' cuts the model into 8 stages"):
        harness.parse(["--stateflow.policy=v_shape", "--parallelism.pipeline_parallel_degree=4", *SPREAD])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0I0.2,", ""), "is refused: rank 0: 0I0.2 is missing; add 0I0.2 to its list"),
        (("1I0.3,", "1I0.2,1I0.3,"), "rank 1, step 4: I of .microbatch 0, chunk 2. .*backward chunks must descend"),
        (("1F0.1,", "1F0.2,1F0.1,"), "rank 1, step 1: F of .microbatch 0, chunk 2. .*forward chunks must ascend"),
    ],
)
def test_an_illegal_table_is_refused_by_relation_rank_step_and_unit(tmp_path, change, message):
    path = tmp_path / "table.csv"
    argument = write_table(path)
    text = path.read_text()
    assert change[0] in text
    moved = change[1].split(",")[0]
    text = text.replace(moved + ",", "", 1) if moved else text
    path.write_text(text.replace(*change, 1))
    with pytest.raises(ValueError, match=message):
        harness.parse(argument)


def test_placements_that_the_model_cannot_be_cut_for(tmp_path):
    path = tmp_path / "table.csv"
    argument = write_table(path, "1f1b")
    path.write_text("\n".join(reversed(path.read_text().split())))
    with pytest.raises(ValueError, match=r"places stages on the ranks \[1, 0\]; the model can be cut for \[0, 1\]"):
        harness.parse(argument)


def test_the_command_writes_what_the_key_reads(tmp_path, capsys):
    path = tmp_path / "table.csv"
    demo, overrides = str(harness.CONFIG), ["--stateflow.policy=zero_bubble", "--stateflow.weight_lag=0"]
    assert main(["schedule", demo, "--out", str(path), *overrides]) == 0
    assert "zero_bubble" in capsys.readouterr().out
    config = harness.parse([])
    config.stateflow.schedule_file = str(path)
    schedule = read_schedule_file(config)
    sizes = (schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks)
    assert schedule.table == build_schedule("zero_bubble", *sizes, weight_lag=0).table
    assert main(["schedule", demo, "--policy", "gpipe"]) == 0
    assert Schedule.from_text(capsys.readouterr().out).policy == "gpipe"
    for policy in POLICIES:
        assert main(["schedule", demo, "--policy", policy, "--out", str(path), *SPREAD]) == 0
