"""What a checkpoint records, and which runs may resume from it; nearly all without processes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from stateflow.titan import resume
from stateflow.titan.data import build_dataloader
from stateflow.titan.tokenizer import build_tokenizer
from tests.titan import harness

PP1 = "--parallelism.pipeline_parallel_degree=1"
PP2 = "--parallelism.pipeline_parallel_degree=2"


@pytest.fixture(autouse=True)
def four_processes(monkeypatch):
    """As in a worker of torchrun: with PP2 and an automatic shard degree two ranks read different data."""
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.fixture
def folder(tmp_path):
    """A dump folder with checkpoints of steps 10 and 20 by the small hybrid model at DP 2."""
    config = harness.parse([])
    for step in (10, 20):
        save(tmp_path / "checkpoint" / f"step-{step}", resume.describe_run(config, dp_degree=2))
    return tmp_path


def save(checkpoint, record) -> None:
    if record is not None:
        resume.write(checkpoint, record)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / ".metadata").write_bytes(b"")


def manager_of(config, folder, **states):
    return SimpleNamespace(
        states={"train_state": SimpleNamespace(job_config=config), **states}, last_save_model_only=False,
        _should_save=lambda *args: True, _create_checkpoint_id=lambda step: f"{folder}/checkpoint/step-{step}",
    )  # fmt: skip


def parse(folder, *args):
    return harness.parse(["--checkpoint.enable", f"--job.dump_folder={folder}", *args])


FREE = [
    "--stateflow.num-chunks=2", "--stateflow.num-chunks=3 --stateflow.skew=1.0", "--stateflow.policy=gpipe",
    "--stateflow.enable", "--stateflow.no-enable", "--stateflow.no-reset-at-documents",
    "--debug.seed=7", "--stateflow.rope-reset",
    "--parallelism.pipeline_parallel_degree=4 --parallelism.data_parallel_shard_degree=2",
    "--parallelism.pipeline_parallel_degree=1 --parallelism.data_parallel_shard_degree=2",
    "--training.steps=100", "--training.seq_len=48 --validation.seq_len=48", "--training.local_batch_size=4",
    "--activation_checkpoint.mode=full",
    "--stateflow.model.pattern=gdn,gdn,gdn,attention,gdn", "--checkpoint.load_only",
]  # fmt: skip


@pytest.mark.parametrize("args", FREE)
def test_what_may_differ_freely(folder, args):
    parse(folder, *args.split())


REFUSED = {
    "--stateflow.model.dim=48": ["step-20 is of another model", "dim = 32 there, 48 here", "or give this run another"],
    "--stateflow.model.pattern=gdn": ["layers = ['gdn', 'gdn', 'gdn', 'attention'] there"],
    "--stateflow.model.ffn-dim=80 --stateflow.model.num-layers=3": ["ffn_dim = 64 there", "num_layers = 4 there"],
    "--model.flavor=demo": ["flavor 'tiny' there, 'demo' here", "dim = 32 there, 160 here"],
    "--parallelism.pipeline_parallel_degree=4": ["a data-parallel degree of 2, this run has 1", "keep 2"],
    "--parallelism.data_parallel_shard_degree=4": ["this run has 4", "--checkpoint.exclude_from_loading dataloader"],
    "--training.dataset=stdlib_validation": ["dataset = 'stdlib' there, 'stdlib_validation' here"],
    "--training.dataloader.num_workers=1": ["num_workers = 0 there, 1 here"],
    "--optimizer.lr=0.1": ["step-20 brings its own", "lr = 0.002 there, 0.1 here", "exclude_from_loading lr_scheduler"],
    "--optimizer.name=Adam --optimizer.weight_decay=0.5": [
        "name = 'AdamW' there, 'Adam' here; [optimizer] weight_decay = 0.1 there, 0.5 here", "_loading optimizer",
    ],
    "--checkpoint.load_step=10 --stateflow.model.dim=48": ["step-10 is of another model"],
}  # fmt: skip


@pytest.mark.parametrize("args", REFUSED)
def test_what_may_not_differ(folder, args):
    with pytest.raises(ValueError) as error:
        parse(folder, *args.split())
    for part in REFUSED[args]:
        assert part in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("args", ["--parallelism.data_parallel_shard_degree=4", "--training.dataset=stdlib_validation"])
def test_the_position_may_be_left_behind(folder, args):
    parse(folder, args, "--checkpoint.exclude_from_loading", "dataloader")
    with pytest.raises(ValueError, match="another model"):
        parse(folder, args, "--checkpoint.exclude_from_loading", "dataloader", "--stateflow.model.dim=48")


def test_the_optimizer_may_begin_anew(folder):
    without = "--checkpoint.exclude_from_loading=lr_scheduler"
    parse(folder, "--optimizer.lr=0.1", without)
    parse(folder, "--optimizer.eps=0.1", "--optimizer.lr=0.1", f"{without},optimizer")
    with pytest.raises(ValueError, match="eps = 1e-08 there, 0.1 here"):
        parse(folder, "--optimizer.eps=0.1", without)


def test_files_that_have_changed_since(tmp_path):
    """The saved position would be one in other text, silently."""
    text = tmp_path / "data" / "a.jsonl"
    text.parent.mkdir()
    text.write_text('{"text": "one"}\n{"text": "two"}\n')
    data = f"--training.dataset={text.parent}"
    config = harness.parse([data])
    loader = build_dataloader(2, 0, build_tokenizer(config), config)
    text.unlink()  # a run that has begun goes on
    checkpoint = tmp_path / "checkpoint" / "step-2"
    resume._write_record(manager_of(config, tmp_path, dataloader=loader), 2, last_step=False)
    save(checkpoint, None)
    text.write_text('{"text": "one"}\n{"text": "two"}\n')
    parse(tmp_path, data)
    text.write_text('{"text": "one"}\n')
    with pytest.raises(ValueError, match="its files = '1 with 32 bytes in all' there, '1 with 16 bytes in all' here"):
        parse(tmp_path, data)
    parse(tmp_path, data, "--checkpoint.exclude_from_loading=dataloader")


def test_nothing_is_checked_where_nothing_is_loaded(folder, tmp_path):
    other = "--stateflow.model.dim=48"
    harness.parse([f"--job.dump_folder={folder}", other])  # checkpoints are off
    parse(folder, other, "--checkpoint.folder=elsewhere")
    incomplete = tmp_path / "new" / "checkpoint" / "step-5"  # the run died while it wrote its first checkpoint
    resume.write(incomplete, resume.describe_run(harness.parse([]), 2))
    parse(tmp_path / "new", other)
    unknown = tmp_path / "old"  # written before there were records
    save(unknown / "checkpoint" / "step-5", None)
    parse(unknown, other)


def test_the_newest_complete_checkpoint_counts(folder):
    wider = resume.describe_run(harness.parse(["--stateflow.model.dim=48"]), 2)
    save(folder / "checkpoint" / "step-100", wider)
    with pytest.raises(ValueError, match="step-100 is of another model"):
        parse(folder)
    parse(folder, "--checkpoint.load_step=20")


def test_the_degree_is_unknown_without_a_launcher(folder, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE")
    parse(folder, "--parallelism.pipeline_parallel_degree=4")  # the workers know, and refuse
    assert resume.data_parallel_degree(harness.parse([])) is None
    with pytest.raises(ValueError, match="this run has 3"):
        parse(folder, "--parallelism.data_parallel_shard_degree=3")


def test_a_checkpoint_of_the_model_alone(folder, tmp_path):
    config = harness.parse([])
    save(folder / "checkpoint" / "step-30", resume.describe_run(config, 2, model_only=True))
    with pytest.raises(ValueError, match="holds the model alone.*--checkpoint.load_step"):
        parse(folder)
    parse(folder, "--checkpoint.load_step=20")
    parse(tmp_path / "new", f"--checkpoint.initial_load_path={folder}/checkpoint/step-30")


def test_a_seed_checkpoint_gives_weights_only(tmp_path):
    save(tmp_path / "checkpoint" / "step-0", resume.describe_run(harness.parse([]), 1, model_only=True))
    parse(tmp_path)
    with pytest.raises(ValueError, match="step-0 is of another model"):
        parse(tmp_path, "--stateflow.model.dim=48")


def test_initial_load_path(folder, tmp_path):
    new = tmp_path / "new"
    load = f"--checkpoint.initial_load_path={folder}/checkpoint/step-20"
    record = resume.describe_run(harness.parse([]), 2)
    for args in ([], ["--parallelism.pipeline_parallel_degree=4"]):
        parse(new, load, *args)
    with pytest.raises(ValueError, match="step-20 is of another model .* give another .* initial_load_path"):
        parse(new, load, "--stateflow.model.num-layers=5")
    everything = "--checkpoint.no_initial_load_model_only"
    with pytest.raises(ValueError, match="a data-parallel degree of 2, this run has 1"):
        parse(new, load, everything, "--parallelism.pipeline_parallel_degree=4")
    record["model"]["rope_theta"] = 5.0  # weights may be taken over with another base of positions
    resume.write(folder / "checkpoint" / "step-20", record)
    parse(new, load)
    with pytest.raises(ValueError, match="rope_theta = 5.0 there, 10000.0 here"):
        parse(new, load, everything)
    with pytest.raises(ValueError, match="initial_load_path = 'no/such' is no folder"):
        parse(new, "--checkpoint.initial_load_path=no/such")
    assert not new.exists(), "a folder would make torchtitan ignore initial_load_path"


def test_a_save_over_an_older_checkpoint_begins_by_making_that_incomplete(folder):
    """A run from an earlier step that dies while it saves would leave files of both runs, which load together."""
    resume._write_record(manager_of(harness.parse([]), folder), 20, last_step=False)
    assert resume._latest_step(folder / "checkpoint") == 10
    assert (folder / "checkpoint" / "step-20" / resume.FILE).is_file()


def test_a_damaged_record_says_so(folder):
    path = folder / "checkpoint" / "step-20" / resume.FILE
    for text in ("{", "[]", '{"model": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="cannot be read .* delete it"):
            parse(folder)
    record = resume.describe_run(harness.parse([]), 2)
    record["model"]["a field of a later version"] = 1
    del record["model"]["norm_eps"]
    path.write_text(json.dumps(record))
    parse(folder)


# -------------------------------------------------------------------------------- with processes


@pytest.mark.processes
def test_a_run_writes_the_record_and_another_is_refused_by_name(titan, tmp_path):
    args = ["--checkpoint.enable", "--checkpoint.interval=2", f"--job.dump_folder={tmp_path}"]
    whole = titan.train(2, PP2, "--training.steps=4", *args)
    for step in (2, 4):
        record = json.loads((tmp_path / "checkpoint" / f"step-{step}" / resume.FILE).read_text())
        assert record == json.loads(json.dumps(resume.describe_run(harness.parse([]), 1)))
    from tests.workers import WorkerError

    with pytest.raises(WorkerError, match="of another model.*ffn_dim = 64 there, 80 here"):
        titan.train(1, PP1, *args, "--stateflow.model.ffn-dim=80")
    with pytest.raises(WorkerError, match="a data-parallel degree of 1, this run has 2"):
        titan.train(2, PP1, *args)
    # In the midst of an epoch: the same batches follow.
    back = titan.train(2, PP2, "--training.steps=4", *args, "--checkpoint.load_step=2", "--checkpoint.load_only")
    assert back.losses == {step: whole.losses[step] for step in (3, 4)}
    moved = titan.train(
        2, PP1, "--training.steps=6", *args, "--checkpoint.load_only", "--checkpoint.exclude_from_loading", "dataloader"
    )
    assert sorted(moved.losses) == [5, 6]
