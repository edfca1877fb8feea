"""The report of a run: entropy against hand counts, figures from small TensorBoard logs written here."""

import json
import math
import os
import shlex

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.tensorboard import SummaryWriter
from torchtitan.config import JobConfig

from stateflow.overrides import key_of, replaced
from stateflow.pipeline.policies import build_schedule
from stateflow.pipeline.schedule import Kind
from stateflow.pipeline.trace import ActionTrace
from stateflow.planning.plan_file import PlanFile, Target, write_plan
from stateflow.titan import report
from stateflow.titan.config import StateFlow
from stateflow.titan.next_commands import next_commands
from stateflow.titan.tokenizer import ByteTokenizer


class LetterTokenizer(ByteTokenizer):
    """a = 0, b = 1, ... without marks, so that entropies can be counted by hand."""

    def encode(self, text, add_bos=False, add_eos=False):
        assert add_bos and add_eos, "documents are marked off as in training"
        return [ord(letter) - ord("a") for letter in text]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run on the validation text "aab": with bos and eos the frequencies are 2, 1, 1 and 1 in 5."""
    (tmp_path / "text.txt").write_text("aab")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    config = JobConfig()
    config.job.config_file = "titan_configs/demo.toml"
    config.model.name, config.model.flavor, config.training.dataset = "stateflow", "demo", "stdlib"
    config.validation.local_batch_size, config.validation.steps = config.training.local_batch_size, 8
    config.job.dump_folder = str(tmp_path / "out")
    config.metrics.enable_tensorboard = True
    config.validation.enable = True
    config.validation.dataset = str(tmp_path / "text.txt")
    config.stateflow = StateFlow(enable=True, num_chunks=4)
    return config


ENTROPY = -(2 / 5 * math.log(2 / 5) + 3 * 1 / 5 * math.log(1 / 5))


def write_log(config, training=(), validation=(), speed=(), run="20260101-0000", rank=None):
    """Writes series of (step, value) as torchtitan does; returns the run's folder."""
    folder = os.path.join(config.job.dump_folder, config.metrics.save_tb_folder, run)
    folder = folder if rank is None else os.path.join(folder, f"rank_{rank}")
    with SummaryWriter(folder, max_queue=1000) as writer:
        for tag, series in (
            ("loss_metrics/global_avg_loss", training),
            ("throughput(tps)", speed),
            ("validation_metrics/loss", validation),
        ):
            for step, value in series:
                writer.add_scalar(tag, value, step)
    return folder


def summary_of(config):
    with open(os.path.join(config.job.dump_folder, "summary.json")) as file:
        return json.load(file, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# ------------------------------------------------------------------------------------- entropy


@pytest.mark.parametrize(
    ("documents", "max_tokens", "entropy"),
    [
        (["aaaa"], 100, 0.0),
        (["ab"], 100, math.log(2)),
        (["aab", "b"], 100, math.log(2)),
        (["abcd"], 100, math.log(4)),
        ([{"text": "aaab"}], 100, -(3 / 4 * math.log(3 / 4) + 1 / 4 * math.log(1 / 4))),
        (["aab", {"text": None}, "cccc"], 4, -(2 / 4 * math.log(2 / 4) + 2 * 1 / 4 * math.log(1 / 4))),
        (["ab", "cd"], 2, math.log(2)),
    ],
)
def test_entropy_by_hand(documents, max_tokens, entropy):
    assert report.token_entropy(documents, LetterTokenizer(), max_tokens) == pytest.approx(entropy, abs=1e-12)


def test_entropy_counts_the_document_marks():
    assert report.token_entropy(["aab"], ByteTokenizer()) == pytest.approx(ENTROPY, rel=1e-12)


@given(st.lists(st.text("abcdef", max_size=20), min_size=1, max_size=8))
def test_entropy_properties(documents):
    tokenizer = ByteTokenizer()
    entropy = report.token_entropy(documents, tokenizer)
    tokens = [token for text in documents for token in tokenizer.encode(text, add_bos=True, add_eos=True)]
    _, counts = np.unique(tokens, return_counts=True)
    expected = sum(n / len(tokens) * math.log(len(tokens) / n) for n in counts)
    assert entropy == pytest.approx(expected, rel=1e-12)
    assert report.token_entropy(reversed(documents), tokenizer) == pytest.approx(entropy, rel=1e-12)
    assert entropy <= math.log(len(counts)) + 1e-12


def test_entropy_reads_no_further_than_needed():
    def documents():
        yield "ab"
        yield "cd"
        pytest.fail("read on after max_tokens")

    assert report.token_entropy(documents(), LetterTokenizer(), max_tokens=4) == pytest.approx(math.log(4))


def test_entropy_of_nothing():
    with pytest.raises(ValueError, match="no text"):
        report.token_entropy([], ByteTokenizer())
    with pytest.raises(ValueError, match="max_tokens is 0"):
        report.token_entropy(["a"], ByteTokenizer(), max_tokens=0)


# ------------------------------------------------------------------------------------- summaries


def test_summary_of_a_run(config):
    folder = write_log(
        config,
        training=[(1, 5.5), (10, 3.25), (20, 2.125)],
        validation=[(1, 5.0), (20, ENTROPY / 2)],
        speed=[(1, 100.0), (10, 1000.0), (20, 1200.0)],
    )
    checkpoints = os.path.join(config.job.dump_folder, "checkpoint")
    os.makedirs(os.path.join(checkpoints, "step-20"))
    config.parallelism.pipeline_parallel_degree, config.parallelism.data_parallel_shard_degree = 2, 1

    text = report.summarize(config.job.dump_folder, config)
    for part in (
        "5.5000 at step 1",
        "2.1250 at step 20",
        f"{ENTROPY / 2:.4f} at step 20",
        f"{ENTROPY:.4f}, byte-frequency entropy of the same text; the model beats it by 50.0 %",
        "1,100 tokens/s per device, 2,200 on all 2",
        folder,
        checkpoints,
        "stateflow verify titan_configs/demo.toml",
        "--stateflow.num-chunks 8",
        "--stateflow.no-enable",
    ):
        assert part in text, part
    assert "5.0000" not in text and len(text.splitlines()) < 16

    summary = summary_of(config)
    assert summary["first_training_loss"] == [1, 5.5] and summary["last_training_loss"] == [20, 2.125]
    assert summary["validation_loss"] == [20, pytest.approx(ENTROPY / 2, rel=1e-6)]
    assert summary["validation_entropy"] == pytest.approx(ENTROPY, rel=1e-12)
    assert summary["better_than_entropy_percent"] == pytest.approx(50, rel=1e-5)
    assert (summary["tokens_per_second_per_device"], summary["tokens_per_second_total"]) == (1100, 2200)
    assert summary["num_logged_steps"] == 3
    assert summary["places"] == {"TensorBoard": folder, "checkpoints": checkpoints}


def test_a_model_worse_than_the_entropy_says_so(config):
    write_log(config, training=[(1, 5.5)], validation=[(1, ENTROPY * 1.25)], speed=[(1, 10.0)])
    assert "the model is worse by 25.0 %" in report.summarize(config.job.dump_folder, config)
    assert summary_of(config)["better_than_entropy_percent"] == pytest.approx(-25, rel=1e-5)


def test_no_tensorboard_data(config):
    text = report.summarize(config.job.dump_folder, config)
    assert f"no TensorBoard data in {config.job.dump_folder}" in text
    assert "enable_tensorboard is off" not in text and "tokens/s" not in text and "Next" in text
    config.metrics.enable_tensorboard = False
    assert "metrics.enable_tensorboard is off" in report.summarize(config.job.dump_folder, config)
    summary = summary_of(config)
    assert summary["has_events"] is False and summary["places"] == {}
    assert all(summary[key] is None for key in ("first_training_loss", "validation_loss", "num_devices"))


def test_a_log_without_a_step(config):
    write_log(config)
    assert "holds no step yet" in report.summarize(config.job.dump_folder, config)


def test_without_validation(config):
    config.validation.enable = False
    write_log(config, training=[(1, 2.0), (2, 1.0)], speed=[(1, 5.0)])
    text = report.summarize(config.job.dump_folder, config)
    assert "entropy" not in text and "--validation.enable" in text
    assert summary_of(config)["validation_entropy"] is None
    config.validation.dataset = "./missing"  # what would be refused is no advice
    assert "--validation.enable" not in report.summarize(config.job.dump_folder, config)


def test_validation_text_that_is_gone_is_no_error(config):
    config.validation.dataset = "./missing"
    write_log(config, training=[(1, 2.0)], validation=[(1, 1.5)], speed=[(1, 5.0)])
    text = report.summarize(config.job.dump_folder, config)
    assert "1.5000 at step 1" in text and "no entropy of the validation text: dataset './missing'" in text


def test_a_run_too_short_for_two_logged_steps(config):
    """Its speed would be that of the start, and its only loss no last one."""
    write_log(config, training=[(1, 5.5)], speed=[(1, 100.0)])
    text = report.summarize(config.job.dump_folder, config)
    assert "5.5000 at step 1, the only step logged, by metrics.log_freq = 10" in text
    assert "last loss" not in text and "tokens/s" not in text
    assert summary_of(config)["tokens_per_second_per_device"] is None


def test_losses_that_are_not_finite(config):
    write_log(config, training=[(1, 2.0), (2, math.nan)], validation=[(2, math.inf)], speed=[(1, 5.0)])
    text = report.summarize(config.job.dump_folder, config)
    assert "nan at step 2 (not finite" in text and "beats" not in text and "worse" not in text
    assert summary_of(config)["last_training_loss"] == [2, None]


def test_the_latest_run_counts(config):
    write_log(config, training=[(1, 9.0), (50, 8.0)], speed=[(1, 1.0)])
    write_log(config, training=[(1, 7.0), (20, 6.0)], speed=[(1, 2.0)])  # in the same minute: the same folder
    summary = report.collect(config.job.dump_folder, config)
    assert (summary["first_training_loss"], summary["last_training_loss"]) == ((1, 7.0), (20, 6.0))
    newest = write_log(config, training=[(1, 5.0)], speed=[(1, 3.0)], run="20260101-0001")
    summary = report.collect(config.job.dump_folder, config)
    assert summary["last_training_loss"] == (1, 5.0) and summary["places"]["TensorBoard"] == newest


def test_logs_of_all_ranks(config):
    """Only the first rank of the last stage, rank 2 of 4, knows the loss; the others log -1."""
    config.parallelism.pipeline_parallel_degree = 2
    for rank in (2, 0, 1, 3):
        write_log(config, training=[(1, 4.0 if rank == 2 else -1.0)], speed=[(1, 7.0)], rank=rank)
    assert report.collect(config.job.dump_folder, config)["first_training_loss"] == (1, 4.0)


def test_every_step_of_a_long_log_is_read(config):
    folder = write_log(config, training=[(step, float(step)) for step in range(12_000)])
    assert report.read_scalars(folder)["loss_metrics/global_avg_loss"] == [
        (s, float(s)) for s in range(12_000)
    ]


def test_number_of_devices(config):
    write_log(config, training=[(1, 1.0), (2, 1.0)], speed=[(1, 1.0), (2, 10.0)])

    def total(world_size=None):
        return report.collect(config.job.dump_folder, config, world_size)["tokens_per_second_total"]

    assert total() is None and total(4) == 40, "dp_shard = -1 leaves the number to the launcher"
    config.parallelism.data_parallel_shard_degree = 3
    config.parallelism.pipeline_parallel_degree = 2
    assert total() == 60


def test_next_commands_follow_the_config(config):
    config.stateflow.num_chunks = 8
    assert "--stateflow.num-chunks 16" in report.summarize(config.job.dump_folder, config)
    config.stateflow.num_chunks, config.stateflow.chunk_lengths = None, [1536, 512]
    assert "num-chunks" not in report.summarize(config.job.dump_folder, config)
    config.stateflow.enable = False
    text = report.summarize(config.job.dump_folder, config)
    assert "--stateflow.enable" in text and "num-chunks" not in text and "no-enable" not in text


def test_a_run_that_had_nothing_to_do_keeps_the_figures_of_the_one_before(config):
    write_log(config, training=[(1, 5.0), (40, 2.0)], speed=[(1, 10.0)])
    report.summarize(config.job.dump_folder, config)
    before = summary_of(config)
    write_log(config, run="20260101-0001")
    text = report.summarize(config.job.dump_folder, config)
    assert "holds no step yet" in text and "earlier figures" in text
    assert summary_of(config) == before and before["num_logged_steps"] == 2


def test_figures_of_an_earlier_run_are_not_those_of_one_without_tensorboard(config):
    write_log(config, training=[(1, 5.0), (40, 2.0)], speed=[(1, 10.0)])
    report.summarize(config.job.dump_folder, config)
    before = summary_of(config)
    config.metrics.enable_tensorboard = False
    text = report.summarize(config.job.dump_folder, config)
    assert "metrics.enable_tensorboard is off" in text and "5.0000" not in text and "earlier figures" in text
    assert summary_of(config) == before


def next_of(config, *overrides, nproc=None) -> dict[str, list[str]]:
    """Purpose -> the arguments of the command."""
    found = {purpose: shlex.split(command) for command, purpose in next_commands(config, overrides, nproc)}
    assert all(arguments[0] == "stateflow" for arguments in found.values())
    return {purpose: arguments[1:] for purpose, arguments in found.items()}


def test_next_commands_are_the_runs_own_and_do_not_touch_its_folder(tmp_path, monkeypatch):
    """Each is accepted as it stands and differs from the run in what it is for."""
    from stateflow.cli import build_parser, parse_config
    from tests.titan.harness import CONFIG

    monkeypatch.chdir(tmp_path)
    text = tmp_path / "my text.txt"
    text.write_text("text")
    (tmp_path / "out_2").mkdir()
    overrides = [
        "--training.dataset", str(text), "--training.seq-len", "512", "--training.steps=6", "--validation.no-enable",
        "--stateflow.num-chunks=8", "--job.dump_folder", "out", "--stateflow.trace",
        "--checkpoint.no-enable",
    ]  # fmt: skip
    config = parse_config(["--job.config_file", str(CONFIG), *overrides])
    found = next_of(config, *overrides, nproc=2)
    folders = []
    assert len(found) == 4
    for purpose, arguments in found.items():
        options, given = build_parser().parse_known_args(arguments)
        again = parse_config(["--job.config_file", str(options.config), *given])
        assert options.nproc == 2
        assert (again.training.dataset, again.training.seq_len, again.training.steps) == (str(text), 512, 6)
        names = [key_of(argument) for argument in given if argument.startswith("--")]
        assert len(names) == len(set(names))
        if options.command == "train":
            folders.append(again.job.dump_folder)
        expected = {
            "gradients against the unpipelined model": (True, 8, False),
            "other chunks, the same losses": (True, 16, False),
            "the same model without chunks, to compare with": (False, 8, False),
            "with a validation loss": (True, 8, True),
        }[purpose]
        assert not again.validation.enable or again.validation.seq_len == 512  # a pipeline has one shape of batch
        assert (again.stateflow.enable, again.stateflow.num_chunks, again.validation.enable) == expected
    assert folders == ["out_3", "out_4", "out_5"]


def test_overrides_are_replaced():
    given = ["--a.b-c", "1", "2", "--a.d=3", "--stateflow.no-enable", "--x.no_y", "--a.e", "-1"]
    changes = {"a.b_c": 5, "stateflow.enable": True, "x.y": False, "stateflow.chunk_lengths": []}
    expected = ["--a.d=3", "--a.e", "-1", "--a.b_c", "5", "--stateflow.enable", "--x.no-y", "--stateflow.chunk-lengths"]
    assert replaced(given, changes) == expected and replaced(given, {}) == given


def test_without_a_seed_weights_differ_from_run_to_run(config):
    assert "other chunks, the same losses once [debug] seed is set" in next_of(config)


def test_next_commands_of_a_table(config):
    config.stateflow.schedule_file = "table.csv"  # of as many chunks as it is of
    assert not any(purpose.startswith("other chunks") for purpose in next_of(config))


def test_predicted_beside_measured(config, tmp_path):
    """The plan's figure and the traced one stand beside the logged step, each with how far it is off."""
    folder = write_log(config, training=[(1, 5.0), (2, 4.0), (3, 3.0)])
    with SummaryWriter(str(folder)) as writer:
        for step, seconds in enumerate((9.0, 2.0, 2.5, 3.0)):
            writer.add_scalar(report.STEP_SECONDS, seconds, step)
    plan = PlanFile(Target("x", 8, 2, 2, 1, "none"), "1f1b", (4, 4))
    write_plan(tmp_path / "plan.toml", plan, {"predicted_step_time": 2.0}, [])
    config.stateflow.plan, config.stateflow.trace = str(tmp_path / "plan.toml"), True
    config.parallelism.pipeline_parallel_degree = 2
    schedule = build_schedule("1f1b", 2, 1, 2)
    for rank, row in enumerate(schedule.table):
        trace = ActionTrace("cpu")
        times = [(str(a), 0.5 * i, 0.5 * i + (0.1 if a.kind is Kind.F else 0.2)) for i, a in enumerate(row)]
        trace.steps.append({"step": 3, "wall": 0.0, "actions": [list(entry) for entry in times]})
        trace.write(tmp_path / "out" / "trace", rank, schedule, [4, 4])
    config.job.dump_folder = str(tmp_path / "out")
    text = report.summarize(config.job.dump_folder, config, world_size=2)
    assert "2.5 s with optimizer and data" in text and "1.7 s of it in forwards and backwards" in text
    assert "2 s predicted by the plan (+17.6%)" in text
    assert "0.9 s simulated with the measured cost of each chunk (-47.1%)" in text
    assert report.collect(config.job.dump_folder, config)["predicted_step_seconds"]["predicted by the plan"] == 2.0
