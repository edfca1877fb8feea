"""Where text comes from: corpus, local files, Hugging Face ids; the counting dataloader; the tokenizers."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, Features, IterableDataset, Value
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import IterableDataset as TorchIterableDataset
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, build_text_dataloader

from stateflow.titan import corpus, data
from stateflow.titan.tokenizer import ByteTokenizer, build_tokenizer


@pytest.fixture(autouse=True)
def clean_tables():
    """What a test registers or counts is forgotten afterwards."""
    datasets, registered = dict(DATASETS), dict(data._registered)
    data.valid_tokens.take()
    yield
    DATASETS.clear()
    DATASETS.update(datasets)
    data._registered.clear()
    data._registered.update(registered)
    data.valid_tokens.take()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def make_config(dataset="stdlib", path=None, batch_size=2, seq_len=16, num_workers=0) -> JobConfig:
    config = JobConfig()
    config.training.dataset, config.training.dataset_path = dataset, path
    config.training.local_batch_size, config.training.seq_len = batch_size, seq_len
    config.training.dataloader.num_workers = num_workers
    config.stateflow = SimpleNamespace(tokenizer="bytes", enable=True, num_chunks=4)
    return config


def loader_of(config, infinite=True, rank=0, num_ranks=1):
    return data.build_dataloader(num_ranks, rank, ByteTokenizer(), config, infinite=infinite)


def texts_of(name, path=None) -> list[str]:
    return list(data.iterate_texts(name, path))


def equal_batches(left, right) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a["input"], b["input"]) and torch.equal(x, y)
        for (a, x), (b, y) in zip(left, right, strict=True)
    )


@pytest.fixture
def text_folder(tmp_path):
    """Twelve documents of different lengths, in a folder with capitals in its name."""
    folder = tmp_path / "Texts"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.txt").write_text(f"document {number}\n\n" + "abc " * number)
    return folder


# ------------------------------------------------------------------------------------- the corpus


def test_stdlib_splits_are_disjoint_and_deterministic():
    train, validation = (corpus.corpus_files(split) for split in corpus.SPLITS)
    assert not set(train) & set(validation)
    assert train == sorted(train) and validation == sorted(validation)
    assert 0.04 < len(validation) / len(train + validation) < 0.16
    parts = {part for path in train + validation for part in path.relative_to(corpus.stdlib_folder()).parts}
    assert not parts & {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__"}

    first, second = corpus.load_corpus("validation"), corpus.load_corpus("validation")
    assert first.column_names == ["text"]
    assert first["text"][:] == second["text"][:]
    assert 0 < len(first) <= len(validation)


def test_split_of_a_file_never_changes():
    """Literal values: another hash would move files from validation to training, and here it would show."""
    names = [f"package/module_{number}.py" for number in range(40)]
    assert [n for n, name in enumerate(names) if corpus.split_of(name) == "validation"] == [14, 38]


def make_tree(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


def test_corpus_of_a_tree(tmp_path):
    wanted = [f"package/module_{number}.py" for number in range(40)]
    make_tree(
        tmp_path, [*wanted, "test/a.py", "json/tests/b.py", "site-packages/c.py", "lib2to3/d.py", "e.txt"]
    )
    (tmp_path / "package" / "empty.py").write_text("\n")
    (tmp_path / "package" / "latin.py").write_bytes(b"# caf\xe9\n")
    by_split = {split: corpus.load_corpus(split, tmp_path)["text"][:] for split in corpus.SPLITS}
    everything = by_split["train"] + by_split["validation"]
    assert sorted(everything) == sorted([f"# {name}\n" for name in wanted] + ["# caf\ufffd\n"])
    assert by_split["train"] != sorted(by_split["train"]), "the order is a permutation, not alphabetical"

    (tmp_path / "package" / "module_3.py").unlink()
    fewer = corpus.load_corpus("train", tmp_path)["text"][:]
    assert fewer == [text for text in by_split["train"] if text != "# package/module_3.py\n"]
    assert texts_of("stdlib", str(tmp_path)) == fewer
    assert texts_of("STDLIB_validation", str(tmp_path)) == by_split["validation"]


def test_corpus_refusals(tmp_path):
    with pytest.raises(ValueError, match="'test'"):
        corpus.corpus_files("test")
    with pytest.raises(ValueError, match="no Python sources for the train split"):
        corpus.load_corpus("train", tmp_path)
    with pytest.raises(ValueError, match="missing"):
        corpus.load_corpus("train", tmp_path / "missing")


# ------------------------------------------------------------------------------------- local files


def test_folder_of_text_files_is_one_document_a_file(text_folder):
    texts = texts_of(str(text_folder))
    assert texts == [path.read_text() for path in sorted(text_folder.iterdir())]
    assert texts_of(str(text_folder / "03.txt")) == ["document 3\n\nabc abc abc "]


def test_local_rows_use_the_text_column_or_the_only_strings(tmp_path):
    rows = [
        {"text": "one", "url": "u", "n": 1},
        {"text": None, "url": "v", "n": 2},
        {"text": "two", "url": "w"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert texts_of(str(tmp_path / "a.jsonl")) == ["one", "", "two"]

    Dataset.from_dict({"body": ["x", "y"], "n": [1, 2]}).to_parquet(tmp_path / "b.parquet")
    assert texts_of(str(tmp_path / "b.parquet")) == ["x", "y"]

    (tmp_path / "c.json").write_text(json.dumps([{"title": "t", "body": "b", "n": 1}]))
    with pytest.raises(ValueError, match="title, body, n"):
        texts_of(str(tmp_path / "c.json"))
    (tmp_path / "d.jsonl").write_text('{"text": 1}')
    with pytest.raises(ValueError, match="columns: text"):
        texts_of(str(tmp_path / "d.jsonl"))


@pytest.mark.parametrize("names", [("train/a.txt", "validation/b.txt"), ("train.txt", "validation.txt")])
def test_splits_of_a_folder(tmp_path, names):
    for name, text in zip(names, ("for training", "for validation"), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert texts_of(str(tmp_path)) == texts_of(f"{tmp_path}:train") == ["for training"]
    assert texts_of(f"{tmp_path}:validation") == ["for validation"]
    with pytest.raises(ValueError, match="no split 'dev', only train, validation"):
        data.resolve_dataset(f"{tmp_path}:dev")


def test_shards_with_split_names_are_not_mixed(tmp_path):
    shards = tmp_path / "data"
    shards.mkdir()
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"):
        Dataset.from_dict({"text": [name]}).to_parquet(shards / f"{name}.parquet")
    assert texts_of(str(tmp_path)) == ["train-00000-of-00002", "train-00001-of-00002"]
    assert texts_of(f"{tmp_path}:validation") == ["validation-00000-of-00001"]


def test_odd_paths(tmp_path, monkeypatch):
    folder = tmp_path / "a[1]: *"
    (folder / "in").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "in" / "x?.txt").write_bytes(b"caf\xe9")
    (folder / ".hidden" / "y.txt").write_text("no")
    assert texts_of(str(folder)) == ["caf\ufffd"]
    monkeypatch.chdir(tmp_path)
    assert texts_of(folder.name) == ["caf\ufffd"], "a relative path without ./"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts_of(f"~/{folder.name}:train") == ["caf\ufffd"]


def test_names_that_differ_in_case_stay_apart(tmp_path):
    for name in ("data", "Data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    if len(list(tmp_path.iterdir())) == 1:
        pytest.skip("the file system ignores case")
    keys = [data.resolve_dataset(str(tmp_path / name))[0] for name in ("data", "Data", "data", "Data")]
    assert keys == [key.lower() for key in keys], "torchtitan looks names up in lower case"
    assert keys[:2] == keys[2:] and keys[0] != keys[1]
    assert [texts_of(str(tmp_path / name)) for name in ("data", "Data")] == [["data"], ["Data"]]
    for name in ("data", "Data"):
        config = make_config(str(tmp_path / name), batch_size=1, seq_len=5)
        config.validation.dataset, config.validation.local_batch_size = str(tmp_path / name), 1
        config.validation.seq_len, config.validation.steps = 5, 1
        for loader in (loader_of(config), validator_of(config).validation_dataloader):
            inputs, _ = next(iter(loader))
            assert ByteTokenizer().decode(inputs["input"][0].tolist()) == name


def test_dataset_path_names_the_source_of_an_unknown_name(text_folder):
    name, path = data.resolve_dataset("Mine", str(text_folder))
    assert (name, path) == ("mine", None)
    assert DATASETS[name].path == str(text_folder)
    assert len(texts_of("Mine", str(text_folder))) == 12


def test_known_names_are_left_alone(tmp_path):
    for name in ("c4", "stdlib", "stdlib_validation", "StdLib"):
        assert data.resolve_dataset(name, None) == (name, None)
    assert data.resolve_dataset("c4_test", str(tmp_path)) == ("c4_test", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stdlb", "did you mean 'stdlib'"),
        ("zzz", "known names are c4, c4_test, c4_validation, stdlib, stdlib_validation"),
        ("./no/such", "no such file or folder"),
        ("/no/such", "no such file or folder"),
        ("~/no-such", "no such file or folder"),
        ("no/such/folder", "no such file or folder"),
        ("such.jsonl", "no such file or folder"),
        ("such.jsonl:validation", "no such file or folder"),
        ("two words", "unknown"),
        ("hf:a/b/c/d", "unknown"),
        ("c4_test", "tests/assets/c4_test"),
    ],
)
def test_missing_data_is_refused_by_name(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        data.resolve_dataset(name)
    assert name in str(error.value)
    with pytest.raises(ValueError, match=message):
        loader_of(make_config(name))


def test_unusable_files_are_refused(tmp_path):
    def refused(name, content, message):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            texts_of(str(path if "/" not in name else path.parent))
        assert error.value.__cause__ is None and (
            error.value.__context__ is None or error.value.__suppress_context__
        )

    refused("a.csv", b"x", "cannot read .csv files")
    refused("a.jsonl", b"{nope", "cannot be read as json")
    refused("a.parquet", b"nope", "cannot be read as parquet")
    refused("a.txt", b"", "is empty")
    refused("none/a.md", b"x", "holds no .txt, .jsonl, .json, .parquet files")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "b.txt").write_text("x")
    refused("mixed/a.jsonl", b'{"text": "x"}', "mixes .jsonl, .txt files")
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(ValueError, match="no split 'validation'"):
        data.resolve_dataset(f"{tmp_path}/one.txt:validation")


# ------------------------------------------------------------------------------------- Hugging Face


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the network: records the requests and streams twelve rows."""
    requests = []
    rows = [{"n": number, "text": f"row {number} " + "x" * number} for number in range(12)]

    def load(repo, *, name=None, split, streaming):
        assert streaming
        requests.append((repo, name, split))
        if repo == "no/such":
            raise ConnectionError("cannot reach the Hub")
        if repo == "no/schema":
            return IterableDataset.from_generator(lambda: iter(rows))
        features = Features({"n": Value("int64"), "text": Value("string")})
        return Dataset.from_list(rows, features=features).to_iterable_dataset(num_shards=2)

    monkeypatch.setattr(data, "load_dataset", load)
    return requests


@pytest.mark.parametrize(
    ("name", "request_made"),
    [
        ("Owner/Name", ("Owner/Name", None, "train")),
        ("owner/name:test", ("owner/name", None, "test")),
        ("hf:Single", ("Single", None, "train")),
        ("hf:single:validation", ("single", None, "validation")),
        ("hf:owner/name/Config-1:test", ("owner/name", "Config-1", "test")),
    ],
)
def test_hub_ids_are_parsed_and_streamed(hub, name, request_made):
    key, path = data.resolve_dataset(name)
    assert (key, path, hub) == (name.lower(), None, []), "resolving contacts nobody"
    assert texts_of(name)[3] == "row 3 xxx"
    assert hub == [request_made]


def test_hub_without_schema_and_without_network(hub):
    assert texts_of("no/schema")[:2] == ["row 0 ", "row 1 x"]
    with pytest.raises(ValueError, match="no local folder.*cannot reach the Hub") as error:
        loader_of(make_config("no/such"))
    assert error.value.__suppress_context__


def test_own_names_of_torchtitan_fail_in_one_sentence(monkeypatch):
    def unreachable(path):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(DATASETS["c4"], "loader", unreachable)
    with pytest.raises(ValueError, match="'c4' cannot be loaded: Couldn't reach the Hub"):
        loader_of(make_config("c4"))


# ------------------------------------------------------------------------------------- the dataloader


def test_batches_equal_torchtitans(text_folder):
    config = make_config(str(text_folder))
    ours = list(itertools.islice(loader_of(config), 20))
    config.training.dataset, config.training.dataset_path = data.resolve_dataset(str(text_folder))
    theirs = list(itertools.islice(build_text_dataloader(1, 0, ByteTokenizer(), config), 20))
    assert equal_batches(ours, theirs)
    inputs, labels = ours[0]
    assert inputs["input"].shape == labels.shape == (2, 16) and labels.dtype == torch.int64
    assert torch.equal(inputs["input"][0, 1:], labels[0, :-1]) and inputs["input"][0, 0] == 256


@pytest.mark.parametrize("num_workers", [0, 1])
def test_tokens_are_counted_as_batches_are_handed_out(text_folder, num_workers):
    batches = iter(loader_of(make_config(str(text_folder), num_workers=num_workers)))
    assert data.valid_tokens.take() == 0
    for num_batches in (1, 3, 2):
        for _ in range(num_batches):
            next(batches)
        assert data.valid_tokens.take() == num_batches * 2 * 16
        assert data.valid_tokens.take() == 0


class Masked(TorchIterableDataset):
    """Rows of five labels, of which row n ignores n."""

    def __iter__(self):
        for num_ignored in range(4):
            labels = torch.arange(5)
            labels[:num_ignored] = -100
            yield {"input": torch.arange(5)}, labels


def test_ignored_labels_do_not_count():
    loader = data.CountingDataLoader(Masked(), dp_rank=0, dp_world_size=1, batch_size=2)
    assert [data.valid_tokens.take() for _ in loader] == [9, 5]


@given(st.lists(st.one_of(st.integers(0, 10**6), st.none())))
def test_counter_adds_up(events):
    counter, expected = data.TokenCounter(), 0
    for event in events:
        if event is None:
            assert counter.take() == expected
            expected = 0
        else:
            counter.add(event)
            expected += event
    assert counter.take() == expected


@pytest.mark.parametrize("source", ["files", "stream", "stream without schema"])
@pytest.mark.parametrize("num_before", [0, 1, 7, 23])
def test_resumption_continues_with_the_same_batches(text_folder, hub, monkeypatch, source, num_before):
    names = {"files": str(text_folder), "stream": "owner/name", "stream without schema": "no/schema"}
    if source == "files":
        monkeypatch.undo()  # the real load_dataset
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", text_folder.parent / "cache")
    config = make_config(names[source])

    uncut = list(itertools.islice(loader_of(config), num_before + 30))
    stopped = loader_of(config)
    batches = iter(stopped)
    for _ in range(num_before):
        next(batches)
    state = stopped.state_dict()
    next(batches)  # the state is a snapshot

    resumed = loader_of(config)
    resumed.load_state_dict(state)
    data.valid_tokens.take()
    continued = list(itertools.islice(resumed, 30))
    assert equal_batches(continued, uncut[num_before:])
    assert data.valid_tokens.take() == 30 * 2 * 16
    assert not equal_batches(continued, uncut[:30]) or num_before == 0


def test_ranks_share_the_documents(text_folder):
    def letters(loader):
        return "".join(ByteTokenizer().decode(x["input"].flatten().tolist()) for x, _ in loader)

    config = make_config(str(text_folder), batch_size=1, seq_len=4)
    shares = [letters(loader_of(config, infinite=False, rank=rank, num_ranks=2)) for rank in (0, 1)]
    seen = [{number for number in range(12) if f"ment {number}\n"[2:7] in share} for share in shares]
    assert shares[0] != shares[1] and len(shares[0]) > 30 and len(shares[1]) > 30
    assert seen[0] != seen[1]


def test_too_few_documents_for_the_ranks(text_folder):
    config = make_config(str(text_folder / "03.txt"))
    with pytest.raises(ValueError, match="data-parallel rank 1 of 2 gets none"):
        loader_of(config, rank=1, num_ranks=2)


# ------------------------------------------------------------------------------------- validation


def validator_of(config, **kwargs):
    arguments = dict.fromkeys(
        ["parallel_dims", "loss_fn", "validation_context", "maybe_enable_amp", "pp_schedule"]
    )
    arguments |= {"metrics_processor": object(), **kwargs}
    return data.build_validator(config, dp_world_size=1, dp_rank=0, tokenizer=ByteTokenizer(), **arguments)


def test_validator_resolves_its_dataset_and_does_not_count(text_folder):
    config = make_config()
    config.validation.enable, config.validation.steps = True, 2
    config.validation.dataset, config.validation.local_batch_size = str(text_folder), 2
    config.validation.seq_len = 16
    validator = validator_of(config, pp_schedule=object())
    assert (config.validation.dataset, config.validation.dataset_path) == (str(text_folder), None)
    batches = list(itertools.islice(validator.validation_dataloader, 3))
    assert equal_batches(batches, list(itertools.islice(loader_of(make_config(str(text_folder))), 3)))
    data.valid_tokens.take()
    next(iter(validator.validation_dataloader))
    assert data.valid_tokens.take() == 0


def test_validator_refusals(text_folder):
    config = make_config()
    config.validation.dataset = "./missing"
    with pytest.raises(ValueError, match="'./missing'"):
        validator_of(config)
    config.validation.dataset = str(text_folder)
    config.validation.steps = -1
    assert validator_of(config).validation_dataloader is not None
    with pytest.raises(ValueError, match="validation.steps = -1"):
        validator_of(config, pp_schedule=object())


# ------------------------------------------------------------------------------------- tokenizers

any_text = st.text(st.characters())  # every code point, lone surrogates included


@given(any_text, st.booleans(), st.booleans())
def test_bytes_round_trip(text, add_bos, add_eos):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text, add_bos=add_bos, add_eos=add_eos)
    assert tokenizer.decode(tokens) == tokenizer.decode(torch.tensor(tokens, dtype=torch.int64)) == text
    assert tokens == [256] * add_bos + tokenizer.encode(text) + [257] * add_eos
    assert all(0 <= token < tokenizer.get_vocab_size() == 258 for token in tokens)


@given(st.lists(st.integers(-1, 300)))
def test_any_ids_decode(tokens):
    decoded = ByteTokenizer().decode(tokens)
    assert decoded == ByteTokenizer().decode([token for token in tokens if 0 <= token < 256])


def test_byte_tokenizer_marks():
    tokenizer = ByteTokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (256, 257, 258)
    assert tokenizer.encode("h\u00e9") == [0x68, 0xC3, 0xA9]
    assert tokenizer.decode([0x68, 0xC3]) == "h\ufffd"
    assert isinstance(build_tokenizer(make_config()), ByteTokenizer)


@pytest.fixture
def tokenizer_folder(tmp_path):
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "state": 3, "flow": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return tmp_path


def test_hugging_face_tokenizer_from_a_file_or_folder(tokenizer_folder):
    config = make_config()
    for choice in (tokenizer_folder, tokenizer_folder / "tokenizer.json"):
        config.stateflow.tokenizer = str(choice)
        tokenizer = build_tokenizer(config)
        assert tokenizer.encode("flow state", add_bos=True, add_eos=True) == [1, 4, 3, 2]
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.get_vocab_size()) == (1, 2, 5)


def test_tokenizer_without_marks_warns(tokenizer_folder, caplog):
    (tokenizer_folder / "tokenizer_config.json").unlink()
    config = make_config()
    config.stateflow.tokenizer = str(tokenizer_folder)
    with caplog.at_level("WARNING"):
        assert build_tokenizer(config).encode("flow", add_bos=True, add_eos=True) == [4]
    assert "no bos and no eos" in caplog.text


def test_tokenizer_refusals(tokenizer_folder):
    config = make_config()
    (tokenizer_folder / "empty").mkdir()
    (tokenizer_folder / "mine.json").write_text("{}")
    (tokenizer_folder / "broken").mkdir()
    (tokenizer_folder / "broken" / "tokenizer.json").write_text("{}")
    cases = {
        "missing": "no file or folder",
        "empty": "No supported tokenizer files",
        "mine.json": "must be called tokenizer.json",
        "broken": "cannot read a tokenizer",
    }
    for name, message in cases.items():
        config.stateflow.tokenizer = str(tokenizer_folder / name)
        with pytest.raises(ValueError, match=message) as error:
            build_tokenizer(config)
        assert str(tokenizer_folder / name) in str(error.value)
    for choice in ("", None, 3):
        config.stateflow.tokenizer = choice
        with pytest.raises(ValueError, match='"bytes"'):
            build_tokenizer(config)
