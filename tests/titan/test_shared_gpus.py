"""More ranks than GPUs: refused with a word, or each with a GPU and a host name that NCCL lets pass."""

import os
from types import SimpleNamespace

import pytest
import torch

from stateflow.cli import main, parse_config
from stateflow.commands import compare, plan_verify, sweep
from stateflow.titan import shared_gpus

DEMO = "titan_configs/demo.toml"


@pytest.fixture
def gpus(monkeypatch):
    """A number of GPUs that are not there."""

    def make(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    for name in (shared_gpus.VARIABLE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_HOSTID"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)  # restored in the end, whatever the test leaves
    return make


@pytest.mark.parametrize("command", [["train"], ["verify"], ["bench", "pipeline"]])
def test_fewer_gpus_than_ranks_are_refused_with_what_works(gpus, capsys, command):
    gpus(1)
    assert main([*command, DEMO]) == 2
    said = capsys.readouterr().err
    assert "the run needs 2 GPUs, here is 1" in said
    assert "CUDA_VISIBLE_DEVICES=" in said and "STATEFLOW_SHARE_GPUS=1" in said


def test_ranks_of_one_gpu_are_hosts_of_their_own(gpus, monkeypatch):
    gpus(3)
    monkeypatch.setenv(shared_gpus.VARIABLE, "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    places = set()
    for rank in range(8):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        shared_gpus.enable_if_asked()
        assert int(os.environ["LOCAL_RANK"]) == rank % 3
        places.add((os.environ["NCCL_HOSTID"], os.environ["LOCAL_RANK"]))
    assert len(places) == 8
    assert len({host for host, _ in places}) == 3  # with peer access within each


def test_what_measures_a_plan_does_not_share(gpus, monkeypatch):
    """It would choose by times at which ranks took turns."""
    gpus(1)
    monkeypatch.setenv(shared_gpus.VARIABLE, "1")
    scenario = SimpleNamespace(job_config=parse_config(["--job.config_file", DEMO]))
    assert plan_verify.devices_missing(scenario) == "the run needs 2 GPUs, here is 1"
    with pytest.raises(ValueError, match="--measure: the run needs 2 GPUs, here is 1"):
        compare._check_machine(scenario)
    with pytest.raises(ValueError, match="the run needs 2 GPUs, here is 1; give --ranks, or --simulate"):
        sweep.measure_cell(None, scenario, [])


@pytest.mark.parametrize("asked, count, ranks", [("0", 1, 2), ("1", 2, 2), ("1", 0, 2)])
def test_nothing_changes_unless_asked_and_needed(gpus, monkeypatch, asked, count, ranks):
    gpus(count)
    monkeypatch.setenv(shared_gpus.VARIABLE, asked)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", "1")
    shared_gpus.enable_if_asked()
    assert os.environ["LOCAL_RANK"] == "1" and "NCCL_HOSTID" not in os.environ
