"""studies/one_rank.py: each rank's part of a step runs alone, to its end, with a whole and with a split backward."""

from pathlib import Path

import pytest
from studies import one_rank

from stateflow.cli import main

CONFIGS = Path(__file__).parents[1] / "titan_configs"
TINY = ["--model.flavor=tiny", "--training.seq_len=64", "--stateflow.num-chunks=2"]


@pytest.mark.parametrize(
    ("rank", "more", "actions"), [(0, [], 8), (1, [], 8), (1, ["--stateflow.policy=zero_bubble"], 12)]
)
def test_a_rank_runs_alone(rank, more, actions, capsys):
    config = str(CONFIGS / "demo.toml")
    call = [config, "--rank", str(rank), *TINY, "--validation.no-enable", "--training.local-batch-size=2", *more]
    assert one_rank.main([*call, "--steps", "2"]) == 0
    text = capsys.readouterr().out
    assert f"rank {rank}, " in text and f", {actions} actions" in text and "step 1: " in text


def test_beside_measured_stages(tmp_path, capsys):
    arguments = [str(CONFIGS / "demo.toml"), *TINY, "--validation.no-enable"]
    plan = ["plan", *arguments, f"--job.dump_folder={tmp_path}", "--policies", "1f1b", "--verify", "0"]
    assert main([*plan, "--lengths", "16", "32"]) == 0
    assert one_rank.main([*arguments, "--cache", str(tmp_path / "plan_cache.json")]) == 0
    assert f"predicted by {tmp_path / 'plan_cache.json'}: " in capsys.readouterr().out


def test_with_working_weights_on_ranks_that_the_config_does_not_have(capsys):
    call = [str(CONFIGS / "gdn_3b.toml"), "--ranks", "2", "--rank", "1", *TINY, "--training.local-batch-size=1"]
    assert one_rank.main(call) == 0
    assert "PP2, 1 microbatches of 1, recomputation full, bfloat16" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        one_rank.main([*call, "--rank", "2"])
    with pytest.raises(SystemExit):
        one_rank.main([*call, "--steps", "0"])
