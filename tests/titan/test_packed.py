"""Pre-tokenised rows with document columns: as a dataset, and through the pipeline."""

from __future__ import annotations

import copy
import itertools
import json
import random
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from torchtitan.hf_datasets import DatasetConfig

from stateflow.titan import data, packed
from stateflow.titan.model import TitanModel
from tests.titan.test_data import clean_tables, loader_of, make_config, own_cache, validator_of  # noqa: F401

PP1 = "--parallelism.pipeline_parallel_degree=1"
PP2 = "--parallelism.pipeline_parallel_degree=2"


def write_rows(path, rows) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def make_texts(count: int, longest: int = 150) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(97, 123) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


def pack(texts: list[list[int]], column: str, per_row: int) -> list[dict]:
    """Rows of ``per_row`` documents each, marked by bos and eos as text is, and by the column."""
    rows = []
    for group in itertools.batched(texts, per_row) if hasattr(itertools, "batched") else _batched(texts, per_row):
        documents = [[256, *text, 257] for text in group]
        row = {"input_ids": list(itertools.chain(*documents))}
        if column == "document_ids":
            row[column] = [7 * number for number, document in enumerate(documents) for _ in document]
        elif column == "cu_seqlens":
            row[column] = list(itertools.accumulate(map(len, documents), initial=0))
        rows.append(row)
    return rows


def _batched(items, size):
    return (items[start : start + size] for start in range(0, len(items), size))


def starts_of(batch) -> torch.Tensor:
    ids = batch["document_ids"]
    return torch.cat([torch.zeros_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], dim=1)


@pytest.mark.parametrize("column", ["document_ids", "cu_seqlens"])
@pytest.mark.parametrize("per_row", [1, 3, 40])
def test_windows_and_boundaries_are_those_of_text(tmp_path, column, per_row):
    texts = make_texts(40)
    rows = write_rows(tmp_path / "rows.jsonl", pack(texts, column, per_row))
    plain = write_rows(tmp_path / "text.jsonl", [{"text": bytes(text).decode()} for text in texts])
    batches = list(loader_of(make_config(rows), infinite=False))
    expected = list(loader_of(make_config(plain), infinite=False))
    assert len(batches) == len(expected) > 50
    for (columns, labels), (text, text_labels) in zip(batches, expected, strict=True):
        assert torch.equal(columns["input"], text["input"]) and torch.equal(labels, text_labels)
        first = columns["input"] == 256
        first[:, 0] = False
        assert torch.equal(starts_of(columns), first)


def test_the_label_of_a_documents_last_token_is_the_next_documents_first(tmp_path):
    """torchtitan's convention, kept: a label is the next token of the stream, whosever it is."""
    rows = write_rows(tmp_path / "rows.jsonl", pack([[97, 98], [99]], "document_ids", 2))
    config = make_config(rows, batch_size=1, seq_len=6)
    ((columns, labels),) = list(loader_of(config, infinite=False))
    assert columns["input"].tolist() == [[256, 97, 98, 257, 256, 99]]
    assert columns["document_ids"].tolist() == [[0, 0, 0, 0, 1, 1]]
    assert labels.tolist() == [[97, 98, 257, 256, 99, 257]]


def test_rows_without_a_column_leave_documents_to_bos_and_eos(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", pack(make_texts(10), "none", 2))
    columns, _ = next(iter(loader_of(make_config(rows))))
    assert list(columns) == ["input"]


@pytest.mark.parametrize(("num_before", "num_workers"), [(0, 0), (1, 0), (7, 0), (60, 0), (7, 1)])
def test_the_position_is_kept_in_the_midst_of_a_row_and_an_epoch(tmp_path, num_before, num_workers):
    rows = write_rows(tmp_path / "rows.jsonl", pack(make_texts(25), "document_ids", 5))
    config = make_config(rows, num_workers=num_workers)
    everything = list(itertools.islice(loader_of(config), num_before + 30))
    stopped = loader_of(config)
    batches = iter(stopped)
    for _ in range(num_before):
        next(batches)
    state = stopped.state_dict()
    resumed = loader_of(config)
    resumed.load_state_dict(state)
    for (columns, labels), (expected, expected_labels) in zip(resumed, everything[num_before:], strict=False):
        assert columns.keys() == expected.keys() == {"input", "document_ids"}
        assert all(torch.equal(columns[name], expected[name]) for name in columns)
        assert torch.equal(labels, expected_labels)


@pytest.mark.parametrize("num_before", [2, 3])
def test_a_stream_resumes_where_the_rest_of_an_epoch_has_no_tokens(monkeypatch, num_before):
    rows = [{"input_ids": [token] * 5} for token in (1, 2, 3)] + [{"input_ids": []}]
    source = DatasetConfig("", lambda _: IterableDataset.from_generator(lambda: iter(rows)), None)
    monkeypatch.setitem(data.DATASETS, "rows", source)

    def make_stream():
        return data.TextDataset("rows", None, None, seq_len=4, infinite=True)

    stopped = make_stream()
    list(itertools.islice(iter(stopped), num_before))
    resumed = make_stream()
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    found = [columns["input"][0].item() for columns, _ in itertools.islice(iter(resumed), 4)]
    assert found == [1, 2, 3, 1, 2, 3, 1][num_before : num_before + 4]


def test_parquet_streams_and_validation(tmp_path):
    table = Dataset.from_list(pack(make_texts(30), "cu_seqlens", 4))
    table.to_parquet(tmp_path / "rows.parquet")
    config = make_config(str(tmp_path / "rows.parquet"))
    first = next(iter(loader_of(config)))[0]
    config.validation.dataset, config.validation.steps = config.training.dataset, 2
    config.validation.local_batch_size, config.validation.seq_len = 2, 16
    data.valid_tokens.take()
    validated = next(iter(validator_of(config).validation_dataloader))[0]
    assert data.valid_tokens.take() == 0, "of training only"
    config.validation.steps = -1
    assert 0 < len(list(itertools.islice(validator_of(config).validation_dataloader, 1000))) < 1000, "to the end, once"
    assert torch.equal(first["input"], validated["input"])
    assert torch.equal(first["document_ids"], validated["document_ids"])

    def generate():
        yield from pack(make_texts(30), "cu_seqlens", 4)

    for stream in (IterableDataset.from_generator(generate), table.to_iterable_dataset()):
        stream = data._only_text(stream, "stream")
        assert packed.is_packed(stream)
        assert set(next(iter(stream))) == {"input_ids", "cu_seqlens"}
    with pytest.raises(ValueError, match="holds input_ids, not text"):
        list(data.iterate_texts(str(tmp_path / "rows.parquet")))


GOOD_ROW = {"input_ids": [1], "cu_seqlens": [0, 1], "document_ids": [0]}
BAD_ROWS = {
    "row 2 of .*: the row has 3 input_ids and 2 document_ids": {"input_ids": [1, 2, 3], "document_ids": [0, 0]},
    r"row 2 of .*: cu_seqlens = \[0, 2\] does not fit a row of 3": {"input_ids": [1, 2, 3], "cu_seqlens": [0, 2]},
    r"cu_seqlens = \[1, 3\]": {"input_ids": [1, 2, 3], "cu_seqlens": [1, 3]},
    r"cu_seqlens = \[0, 2, 1, 3\]": {"input_ids": [1, 2, 3], "cu_seqlens": [0, 2, 1, 3]},
    "say the same: drop one": {"input_ids": [1], "cu_seqlens": [0, 1], "document_ids": [0]},
    "row 2 of .*: it has the token id 300, the model's vocab_size is 258; set .* = 301": {"input_ids": [1, 300, 2]},
    "the token id -1, .* ids start at 0": {"input_ids": [1, -1, 2]},
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_rows_that_do_not_fit_are_refused(tmp_path, message):
    from tests.titan import harness

    bad = BAD_ROWS[message]
    rows = write_rows(tmp_path / "rows.jsonl", [{name: GOOD_ROW[name] for name in bad}, bad])
    config = harness.parse([f"--training.dataset={rows}"])
    with pytest.raises(ValueError, match=message):
        next(iter(loader_of(config)))


def test_rows_without_any_token_are_refused(tmp_path):
    """They would be read again and again, for ever."""
    source = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [], "document_ids": []}] * 3)
    with pytest.raises(ValueError, match="has no tokens: all rows are empty"):
        next(iter(loader_of(make_config(dataset=source))))


def test_an_empty_row_and_a_row_without_marks():
    assert packed.documents_of_row({"input_ids": [], "document_ids": []}) == []
    assert packed.documents_of_row({"input_ids": [], "cu_seqlens": [0]}) == []
    assert packed.documents_of_row({"input_ids": [4, 5], "document_ids": None}) == [0, 0]
    assert packed.documents_of_row({"input_ids": [4, 5, 6], "cu_seqlens": [0, 1, 1, 3]}) == [0, 1, 1]


# ------------------------------------------------------------------------------ through the pipeline


@pytest.fixture
def sources(tmp_path):
    """One stream of tokens: as text, with each column, and with a column that joins everything."""
    texts = make_texts(60)
    (joined,) = pack(texts, "none", len(texts))
    joined["cu_seqlens"] = [0, len(joined["input_ids"])]
    return {
        "text": write_rows(tmp_path / "text.jsonl", [{"text": bytes(text).decode()} for text in texts]),
        "document_ids": write_rows(tmp_path / "ids.jsonl", pack(texts, "document_ids", 4)),
        "cu_seqlens": write_rows(tmp_path / "cu.jsonl", pack(texts, "cu_seqlens", 4)),
        "joined": write_rows(tmp_path / "joined.jsonl", [joined]),
    }


@pytest.mark.processes
def test_columns_train_as_the_same_boundaries_from_bos_and_eos(titan, sources):
    def train(name, *args, world_size=2):
        source = [f"--training.dataset={sources[name]}", f"--validation.dataset={sources[name]}"]
        return titan.train(world_size, *source, "--validation.enable", *args)

    reset = train("text", PP2)
    for name in ("document_ids", "cu_seqlens"):
        run = train(name, PP2)
        assert (run.losses, run.grad_norms, run.validation) == (reset.losses, reset.grad_norms, reset.validation)
    joined, off = train("joined", PP2), train("text", PP2, "--stateflow.no-reset-at-documents")
    # Not bos and eos but the column decides, or else this would be equal to ``reset``.
    assert joined.losses == off.losses != reset.losses
    assert train("document_ids", PP2, "--stateflow.no-reset-at-documents").losses == off.losses
    for world_size, args in ((1, [PP1]), (2, [PP2, "--stateflow.no-enable"])):
        run = train("document_ids", *args, world_size=world_size)
        assert run.losses == pytest.approx(reset.losses, rel=2e-5), args
        assert run.validation == pytest.approx(reset.validation, rel=2e-5), args


@pytest.mark.processes
@pytest.mark.parametrize("args", [[], ["--stateflow.rope-reset"], ["--parallelism.data_parallel_shard_degree=2"]])
def test_every_gradient_with_columns(titan, sources, args):
    source = f"--training.dataset={sources['document_ids']}"
    world_size = 4 if args and "shard" in args[0] else 2
    for difference, name in titan.verify(world_size, PP2, source, "--stateflow.num-chunks=5", *args):
        assert difference <= 1e-10, (name, difference)


@pytest.mark.parametrize(
    ("marks", "starts"),
    [
        (dict(bos_id=256, eos_id=257), [0, 0, 2, 3, 3, 5]),
        (dict(bos_id=256), [0, 0, 0, 3, 3, 3]),
        (dict(eos_id=257), [0, 0, 2, 2, 2, 5]),
        ({}, [0] * 6),
    ],
)
def test_documents_begin_at_bos_and_behind_eos(marks, starts):
    from stateflow.titan.flavors import resolve_model
    from tests.titan import harness

    tokens, tokenizer = torch.tensor([[97, 257, 98, 256, 257, 99]]), SimpleNamespace(**marks)
    model = TitanModel(resolve_model(harness.parse([])))
    assert model.get_attention_masks(tokens, tokenizer).tolist() == [starts]
    ids = {"document_ids": torch.tensor([[4, 4, 4, 4, 5, 5]])}
    assert model.get_attention_masks(tokens, tokenizer, ids).tolist() == [[0, 0, 0, 0, 4, 4]]  # which decide alone
    model = TitanModel(resolve_model(harness.parse(["--stateflow.no-reset-at-documents"])))
    with pytest.raises(TypeError, match="reset_at_documents is off"):
        model.get_attention_masks(tokens, tokenizer)


def test_rope_reset_reaches_the_model():
    """No loss shows it: rotations are relative, so inside a document both positions give the same up to rounding."""
    from stateflow.titan.flavors import resolve_model
    from tests.titan import harness

    for args, expected in ([], False), (["--stateflow.rope-reset"], True):
        model = TitanModel(resolve_model(harness.parse(args)))
        assert [block.mixer.rope_reset for block in model.layers.values() if hasattr(block.mixer, "rope_reset")] == [
            expected
        ]
