"""Policies and tables of one's own in a config: what is run, on which ranks, and what is refused."""

from __future__ import annotations

import pytest

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
        (dict(), ["--compile.enable", "--compile.components=model"], "has I and W, which compiled blocks cannot do"),
    ],
)
def test_a_table_of_another_run_is_refused(tmp_path, table, overrides, message):
    argument = write_table(tmp_path / "table.csv", **table)
    with pytest.raises(ValueError, match=message):
        harness.parse([*argument, *overrides])


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
