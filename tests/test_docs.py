"""The programs and claims in the docs are run, not trusted."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stateflow.model import LanguageModel

ROOT = Path(__file__).parents[1]


def code_blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.processes
def test_the_bare_torch_example_trains(tmp_path):
    program, *_ = code_blocks(ROOT / "docs" / "bare_torch.md", "python")
    script = tmp_path / "bare.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=800, env=None)
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", result.stdout)]
    assert len(losses) == 10 and losses[-1] < 0.8 * losses[0], losses


def test_the_example_of_one_layer_gives_what_the_whole_sequence_does(capsys):
    _, program, _ = code_blocks(ROOT / "docs" / "bare_torch.md", "python")
    found = {}
    exec(program, found)
    assert found["first_tokens"][:, 64:].any() and found["layer"].q_proj.weight.grad.any()
    (difference,) = re.findall(r"whole sequence: (\S+)", capsys.readouterr().out)
    assert float(difference) < 1e-6


def test_the_example_of_a_checkpoint_reads_it(tmp_path, monkeypatch, capsys):
    import torch.distributed.checkpoint as dcp

    from stateflow.titan.flavors import FLAVORS
    from stateflow.titan.resume import describe_model, write

    folder = tmp_path / "outputs/make_demo/checkpoint/step-40"
    saved = LanguageModel(FLAVORS["demo"])
    saved.init_weights()
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    write(folder, {"model": describe_model(FLAVORS["demo"])})
    *_, program = code_blocks(ROOT / "docs" / "bare_torch.md", "python")
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(program, found)
    for name, weight in saved.state_dict().items():
        assert torch.equal(found["model"].state_dict()[name], weight), name
    assert float(re.findall(r"loss (\S+) nats", capsys.readouterr().out)[0]) == pytest.approx(math.log(258), rel=0.05)


def test_a_fault_is_in_the_table_once_and_every_fault_is():
    from stateflow.faults import FAULTS

    text = (ROOT / "docs" / "exactness.md").read_text().partition("## Planted faults")[2].partition("\n\nThe tests")[0]
    assert sorted(re.findall(r"^\| `(.+?)` \|", text, flags=re.MULTILINE)) == sorted(FAULTS)


def test_every_key_of_the_config_is_documented():
    from stateflow.titan.config import ModelOverrides, StateFlow

    text = (ROOT / "docs" / "configuration.md").read_text()
    table = text.partition("## `[stateflow]`")[2].partition("\n\nOn the command line")[0]
    rows = dict(re.findall(r"^\| `(.+?)` \| .+? \| (.+) \|$", table, flags=re.MULTILINE))
    assert set(rows) == {*StateFlow.__annotations__} - {"model"} | {"model.*"}
    assert set(re.findall(r"`(\w+)[ `]", rows["model.*"])) == set(ModelOverrides.__annotations__)


def test_the_demo_empties_no_folder_but_its_own():
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    (removed,) = re.findall(r"rm -rf (.+)", recipe)
    assert f"--job.dump_folder={removed} " in recipe and f"`{removed}`" in (ROOT / "README.md").read_text()
    for path in (ROOT / "titan_configs").glob("*.toml"):
        assert f'dump_folder = "{removed}"' not in path.read_text(), path


def test_the_timelines_are_those_of_the_policies():
    from stateflow.pipeline.policies import POLICIES, build_schedule
    from stateflow.pipeline.timeline import timeline

    shown = set()
    for block in code_blocks(ROOT / "docs" / "schedules.md", "text"):
        first, _, picture = block.partition("\n")
        policy, *sizes = re.fullmatch(
            r"policy (\w+): P = (\d), M = (\d), N = (\d), V = (\d)(?:, weight_lag = (\d))?", first
        ).groups()
        assert picture.rstrip() == timeline(build_schedule(policy, *(n and int(n) for n in sizes))), first
        shown.add(policy)
    assert shown == set(POLICIES)


def test_the_picture_of_a_step_is_what_is_simulated_today(capsys):
    """Costs are counted, and the shares of the devices change with what is measured."""
    from stateflow.cli import main

    text = (ROOT / "docs" / "planning.md").read_text()
    config, options = re.search(r"`stateflow draw (\S+) (.*?)\s--out docs/pictures/step.svg`", text, re.DOTALL).groups()
    assert main(["simulate", str(ROOT / config), *options.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    picture = (ROOT / "docs/pictures/step.svg").read_text()
    assert f"step {found['step_time']:.4g} s, idle {found['bubble']:.1%}" in picture


@pytest.mark.parametrize(("ranks", "pattern"), [(8, "1 of 4"), (4, "1 of 4")])
def test_the_study_of_balance_is_of_todays_costs(ranks, pattern):
    from studies import balance

    results = balance.study(pattern, 128, balance.Sizes(num_ranks=ranks))
    row = balance.markdown_table(results).splitlines()[-1]
    assert row in (ROOT / "docs" / "balance.md").read_text().splitlines()


def test_no_file_is_longer_than_a_reader_can_hold():
    long = {
        str(path.relative_to(ROOT)): count
        for folder in ("src", "tests", "studies")
        for path in (ROOT / folder).rglob("*.py")
        if (count := len(path.read_text().splitlines())) > 600
    }
    assert not long
