"""What the doctor says before a launch: one line a finding, with what to do."""

from pathlib import Path

import pytest

from stateflow import preflight
from stateflow.cli import main
from stateflow.planning.analytic import Analytic
from stateflow.planning.devices import DEVICES
from tests.planning.test_costs import make_job

CONFIGS = Path(__file__).parents[1] / "titan_configs"
GOOD = {"python": "3.12.1", "torch": "2.13.0+cpu", "torchtitan": "0.2.2", "triton": "3.9.0"}


def test_versions():
    assert not any(finding.advice for finding in preflight.check_versions(GOOD))
    for name, version in (("torch", "2.10.1"), ("torch", "2.15.0"), ("torchtitan", "0.3.0"), ("triton", None)):
        findings = [f for f in preflight.check_versions({**GOOD, name: version}) if f.advice]
        assert len(findings) == 1 and findings[0].fatal and name in findings[0].text
        assert "pip install" in findings[0].advice
        assert str(findings[0]).startswith("  FAIL ") and "\n" not in str(findings[0])


def test_links():
    assert preflight.check_links(1, None) == []
    (finding,) = preflight.check_links(4, lambda i, j: True)
    assert finding.advice is None
    (finding,) = preflight.check_links(4, lambda i, j: i != 1)
    assert "GPUs 1-2 have no peer access" in str(finding) and not finding.fatal


def test_more_chunks_are_advised_before_recomputation():
    job = make_job(seq_len=4096)
    analytic = Analytic(job, DEVICES["cpu"])
    peaks = {n: max(analytic.cell(n, 0.0).peak_bytes) for n in (1, 2, 4, 8)}
    assert peaks[1] > peaks[2] > peaks[4] > peaks[8]
    limited = Analytic(job, DEVICES["cpu"], peaks[4])
    advice = "[stateflow] {}num_chunks = 4 would fit"
    assert preflight._what_saves_memory(job, limited, 2, True) == advice.format("")
    assert preflight._what_saves_memory(job, limited, 1, False) == advice.format("enable = true and ")


def report(capsys, *arguments: str) -> tuple[int, str]:
    status = main(["doctor", *arguments])
    return status, capsys.readouterr().out.split("before a launch:")[1]


def test_a_config_is_checked(capsys, monkeypatch):
    monkeypatch.setattr("stateflow.doctor._devices", lambda: [])  # the self-checks have tests of their own
    config = str(CONFIGS / "gdn_3b_hybrid_128k.toml")
    status, text = report(capsys, config)
    assert status == 0 and "is a valid config" in text and "predicted peak" in text
    status, text = report(capsys, config, "--stateflow.num-chunks=1", "--activation_checkpoint.mode=none")
    assert '[activation_checkpoint] mode = "full"' in text and "would fit" in text
    status, text = report(capsys, config, "--stateflow.num-chunks=2", "--training.local_batch_size=2",
                          "--activation_checkpoint.mode=none")  # fmt: skip
    assert "would fit" in text
    status, text = report(capsys, config, "--stateflow.policy=1f2b")
    assert status == 1 and "is refused: [stateflow] policy = '1f2b' is unknown" in text
    status, text = report(capsys, "no.toml")
    assert status == 1 and "no.toml is not there: give the path of a train.toml" in text


@pytest.mark.parametrize("extra", [[], ["--stateflow.num-chunks=8"]])
def test_options_without_a_config(capsys, monkeypatch, extra):
    monkeypatch.setattr("stateflow.doctor._devices", lambda: [])
    assert main(["doctor", *extra]) == (2 if extra else 0)
