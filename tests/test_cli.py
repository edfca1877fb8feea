"""The command line as a user meets it: exit statuses and one-line errors."""

from __future__ import annotations

import errno
import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from stateflow import cli
from stateflow.cli import main, parse_config, world_size
from stateflow.launch import only_one
from stateflow.model import LanguageModel
from stateflow.preflight import check_config

DEMO = Path(__file__).parents[1] / "titan_configs" / "demo.toml"


def test_a_missing_config_is_one_line(capsys):
    assert main(["train", "no/such.toml"]) == 2
    assert capsys.readouterr().err == "stateflow: no such config: no/such.toml\n"


def test_an_impossible_value_is_one_line_and_nothing_starts(capsys):
    assert main(["train", str(DEMO), "--stateflow.policy", "1f2b"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stateflow: [stateflow] policy = '1f2b' is unknown; did you mean '1f1b'?")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_chunks", "num_chunk", "unknown key 'num_chunk' in [stateflow]; did you mean num_chunks?"),
        ("seq_len = 2048\nsteps", "seqlen = 2048\nsteps", "unknown key 'seqlen' in [training]; did you mean seq_len?"),
        ("num_chunks", "seq_len", "unknown key 'seq_len' in [stateflow]; there is one in [training] and [validation]"),
        ("warmup_steps", "zzz", "unknown key 'zzz' in [lr_scheduler]; there are warmup_steps, total_steps, "),
        ("[stateflow]", "[stateflw]", "unknown section [stateflw]; did you mean [stateflow]?"),
        ("[debug]", "[stateflow.modl]\ndim = 8\n[debug]", "unknown key 'modl' in [stateflow]; did you mean model?"),
        ("[debug]", "[stateflow.model]\ndims = 8\n[debug]", "unknown key 'dims' in [stateflow.model]; did you mean di"),
        ("[debug]", "[zzz]\nx = 8\n[debug]", "unknown section [zzz]; there are stateflow, "),
        ("[job]", "seq_len = 8\n[job]", "unknown key 'seq_len' at top level; there is one in [training] and "),
    ],
)
def test_an_unknown_key_of_the_file_is_one_line(tmp_path, old, new, message, capsys):
    config = tmp_path / "train.toml"
    text = DEMO.read_text()
    assert old in text
    config.write_text(text.replace(old, new, 1))
    assert main(["train", str(config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stateflow: {config}: {message}") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--stateflow.num-chunk", "8"], "unknown option --stateflow.num-chunk; did you mean --stateflow.num-chunks?"),
        (["--training.seqlen=8"], "unknown option --training.seqlen; did you mean --training.seq-len?"),
        (["--stateflw.num-chunks=8"], "unknown option --stateflw.num-chunks; did you mean --stateflow.num-chunks?"),
        (["--nosuch.key=1"], "unknown option --nosuch.key; every key of the config is --section.key VALUE"),
        (["--stateflow.enable=3"], "'3' is no option; a flag takes no value: --section.key for true"),
        (["--training.steps=many"], "Error parsing --training.steps: invalid literal for int() with base 10: 'many'"),
    ],
)
def test_a_wrong_override_is_one_line_without_a_box(overrides, message, capsys):
    for command in (["train"], ["plan", "--analytic"]):
        assert main([*command, str(DEMO), *overrides]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"stateflow: {message}") and captured.err.count("\n") == 1
        assert not captured.out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[job]", "[job", "{}: no TOML: Expected ']' at the end of a table declaration (at line "),
        ("lr = 2e-3", 'lr = "fast"', "[optimizer] lr = 'fast' must be a number"),
        ("lr = 2e-3", "lr = true", "[optimizer] lr = True must be a number"),
        ("[job]", "compile = true\n[job]", "compile = True must be a table: write [compile], and its keys below"),
        ("interval = 20", "exclude_from_loading = 'data'", "[checkpoint] exclude_from_loading = 'data' must be a list"),
        ('mode = "none"', 'mode = "Full"', "[activation_checkpoint] mode = 'Full' must be one of 'selective', 'full',"),
        ("steps = 8", "steps = 0", "validation steps must be positive or -1"),
        ("steps = 40", 'steps = "many"', "[training] steps = 'many' must be a whole number"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, old, new, message, capsys, recwarn):
    warnings.simplefilter("ignore")  # as PYTHONWARNINGS does: no refusal may come from a warning
    config = tmp_path / "train.toml"
    config.write_text(DEMO.read_text().replace(old, new))
    assert main(["train", str(config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stateflow: {message.format(config)}") and error.count("\n") == 1
    assert not recwarn.list


def test_a_file_that_is_no_text_is_named(tmp_path, capsys):
    config = tmp_path / "train.toml"
    config.write_text(DEMO.read_text(), encoding="utf-16")
    assert main(["train", str(config)]) == 2
    assert capsys.readouterr().err.startswith(f"stateflow: {config}: no TOML: 'utf-8' codec can't decode")


def test_a_whole_number_for_a_fraction_is_fine(tmp_path):
    config = tmp_path / "train.toml"
    config.write_text(DEMO.read_text().replace("lr = 2e-3", "lr = 1"))
    assert parse_config(["--job.config_file", str(config)]).optimizer.lr == 1


def test_one_run_at_a_time_saves_into_a_folder(tmp_path, monkeypatch, capsys):
    """Else files of both would be in one checkpoint, which loads without a complaint."""
    inner = []

    def run(*args, **kwargs):  # in place of torchrun: a second run while the first one has not ended
        if not inner:
            inner.append(None)
            inner[0] = main(["train", str(DEMO), f"--job.dump_folder={tmp_path}/new"])
        return 1

    monkeypatch.setattr(cli, "torchrun", run)
    assert main(["train", str(DEMO), f"--job.dump_folder={tmp_path}/new"]) == 1  # as `run` says
    assert inner == [2] and f"another stateflow train saves into {tmp_path}/new/checkpoint" in capsys.readouterr().err
    assert main(["train", str(DEMO), f"--job.dump_folder={tmp_path}/new"]) == 1, "the lock is gone"
    assert not (tmp_path / "new" / "checkpoint").exists(), "it would make torchtitan ignore initial_load_path"


def test_a_folder_that_cannot_be(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["train", str(DEMO), f"--job.dump_folder={tmp_path}/file"]) == 2
    assert "dump_folder = " in capsys.readouterr().err


def test_too_few_processes_or_steps(capsys):
    assert main(["verify", str(DEMO), "--steps", "0"]) == 2
    assert main(["train", str(DEMO), "--nproc", "0"]) == 2
    assert "--nproc 0: the least is 1" in capsys.readouterr().err


def test_float64_has_no_kernels_to_insist_on(capsys):
    assert main(["verify", str(DEMO), "--dtype", "float64", "--stateflow.kernels", "triton"]) == 2
    assert "--dtype float64 has no Triton kernels" in capsys.readouterr().err


def test_kernels_are_the_backend_of_the_model():
    from stateflow.titan.flavors import resolve_model

    for kernels, backend in ((None, "auto"), ("auto", "auto"), ("triton", "triton"), ("reference", "chunk")):
        override = [] if kernels is None else [f"--stateflow.kernels={kernels}"]
        model_args = resolve_model(parse_config(["--job.config_file", str(DEMO), *override]))
        assert model_args.backend == backend
        mixers = [layer.mixer.backend for layer in LanguageModel(model_args).layers.values()]
        attention = "auto" if backend == "triton" else backend
        assert mixers == [attention if kind == "attention" else backend for kind in model_args.layer_kinds()]


def test_processes_by_the_config(tmp_path, monkeypatch):
    from stateflow.titan.order import loss_rank

    monkeypatch.chdir(tmp_path)  # without what `make demo` may have left in the checkout
    config = parse_config(["--job.config_file", str(DEMO), "--parallelism.data_parallel_shard_degree=3"])
    assert world_size(config) == 6
    assert loss_rank(config, 6) == 3


def test_the_loss_is_logged_where_the_last_stage_is():
    from stateflow.titan.order import loss_rank

    def rank(*overrides):
        return loss_rank(parse_config(["--job.config_file", str(DEMO), *overrides]), 4)

    assert rank() == 2
    assert rank("--stateflow.policy=v_shape") == 0
    assert rank("--parallelism.pipeline_parallel_schedule=ZBVZeroBubble") == 2  # not in use
    assert rank("--parallelism.pipeline_parallel_degree=1") == 0


def test_a_file_system_without_locks_has_none(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with only_one(tmp_path / "a.lock"), only_one(tmp_path / "a.lock"):
        assert (tmp_path / "a.lock").exists()


def test_what_hidden_ranks_report_is_shown_at_the_end(monkeypatch, capsys):
    def run(command, env):
        for rank in range(3):
            (Path(env[cli.REPORTS]) / f"rank_{rank}.txt").write_text(f"report of {rank}\n")
        return 7

    monkeypatch.setattr(cli, "run_to_its_end", run)
    assert cli.torchrun(3, "torchtitan.train", [], log_rank=1) == 7
    assert capsys.readouterr().err == "report of 0\nreport of 2\n"


def test_of_ranks_without_a_report_is_shown_where_they_were(monkeypatch, capsys):
    def run(command, env):
        for name in ("0.txt", "0.last", "1.last", "2.last"):
            (Path(env[cli.REPORTS]) / f"rank_{name}").write_text(f"{name}\n")
        return status

    monkeypatch.setattr(cli, "run_to_its_end", run)
    status = 1
    assert cli.torchrun(3, "torchtitan.train", [], log_rank=1) == 1
    assert capsys.readouterr().err == "0.txt\n1.last\n2.last\n"
    status = 0
    assert cli.torchrun(3, "torchtitan.train", [], log_rank=0) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [["train"], ["verify"], ["simulate"], ["plan", "--analytic"]])
def test_a_model_that_is_not_ours_is_one_line(tmp_path, command, capsys):
    config = tmp_path / "train.toml"
    config.write_text(DEMO.read_text().replace('name = "stateflow"', 'name = "llama3"'))
    assert main([*command, str(config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stateflow: [model] name = 'llama3' is none of these models; set [model] name = ")
    assert error.count("\n") == 1


@pytest.fixture
def no_launch(monkeypatch):
    monkeypatch.setattr(cli, "run_to_its_end", lambda *_, **__: pytest.fail("ranks were started"))


def test_a_checkpoint_of_other_data_parallel_ranks_is_refused_before_launch(tmp_path, no_launch, capsys):
    from stateflow.titan import resume

    checkpoint = tmp_path / "checkpoint" / "step-2"
    resume.write(checkpoint, resume.describe_run(parse_config(["--job.config_file", str(DEMO)]), 1))
    (checkpoint / ".metadata").write_bytes(b"")
    assert main(["train", str(DEMO), f"--job.dump_folder={tmp_path}", "--nproc", "4"]) == 2
    error = capsys.readouterr().err
    assert "was written with a data-parallel degree of 1, this run has 2" in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is measured")
@pytest.mark.parametrize("command", ["train", "verify", "bench pipeline", "plan", "compare --measure"])
def test_a_model_of_billions_is_not_started_on_a_cpu(command, no_launch, capsys):
    words = command.split()
    where = 2 if words[0] == "bench" else 1
    config = str(DEMO.parent / "gdn_3b_2gpu.toml")
    assert main([*words[:where], config, *words[where:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stateflow: gdn_3b has 3.01 billion parameters and there is no GPU here; on a CPU take one")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there they measure")
@pytest.mark.parametrize(
    "name", ["bench.attention", "bench.elementwise", "planning.kernel_launches", "planning.mamba3_launches"]
)
def test_programs_that_measure_a_gpu_say_that_there_is_none(name, monkeypatch, capsys):
    monkeypatch.setattr("stateflow_kernels.primitives.INTERPRETED", False)
    with pytest.raises(SystemExit) as leaving:
        importlib.import_module(f"stateflow.{name}").main([])
    assert leaving.value.code == 2 and "a GPU" in capsys.readouterr().err.splitlines()[-1]


def test_only_training_minds_what_a_run_of_the_config_has_left(tmp_path, no_launch, capsys):
    """torchtitan's last checkpoint holds the model alone, so after every finished run all would be refused."""
    from stateflow.titan import resume

    checkpoint = tmp_path / "checkpoint" / "step-2"
    config = parse_config(["--job.config_file", str(DEMO)])
    resume.write(checkpoint, resume.describe_run(config, 1, model_only=True))
    (checkpoint / ".metadata").write_bytes(b"")
    folder = f"--job.dump_folder={tmp_path}"
    assert main(["train", str(DEMO), folder]) == 2
    assert "holds the model alone" in capsys.readouterr().err
    (finding,) = check_config(DEMO, [folder])  # of the doctor, who says what a launch would meet
    assert finding.fatal and "holds the model alone" in str(finding)
    assert main(["simulate", str(DEMO), folder]) == main(["schedule", str(DEMO), folder]) == 0
    few = ["--ranks", "2", "--tokens", "2048", "--microbatches", "2", "--num-chunks", "2", "--skew", "0"]
    assert main(["predict", str(DEMO), *few, folder]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty; put text into it"), ('{"a": "x", "b": "y"}\n', 'has no column "text" and 2 other columns')],
)
@pytest.mark.parametrize("section", ["training", "validation"])
def test_data_that_cannot_be_read_is_refused_before_launch(
    tmp_path, no_launch, monkeypatch, content, message, section, capsys
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(content)
    arguments = [f"--{section}.dataset", str(rows), f"--job.dump_folder={tmp_path}"]
    assert main(["train", str(DEMO), *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"stateflow: dataset '{rows}' ") and message in error


@pytest.mark.processes
@pytest.mark.parametrize("plant", [None, "drop-state-grad"])
def test_verify_exits_by_its_verdict(plant, tmp_path):
    figures = tmp_path / "figures.json"
    command = [
        sys.executable, "-m", "stateflow", "verify", str(DEMO), "--dtype", "float64", "--json", str(figures),
        "--model.flavor=tiny", "--training.seq_len=64", "--validation.seq_len=64",
        *(["--plant", plant] if plant else []),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert result.returncode == (1 if plant else 0), result.stdout + result.stderr
    assert ("FAILED" if plant else "OK: largest relative difference") in result.stdout
    assert json.loads(figures.read_text())["passed"] is (plant is None)
