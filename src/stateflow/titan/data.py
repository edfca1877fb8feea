"""Where training text comes from, and how many of its tokens count.

torchtitan finds data by name in its table ``DATASETS`` and wraps it in the checkpointable
``HuggingFaceTextDataset``. Both are reused: :func:`resolve_dataset` only adds to the table what
``training.dataset`` may name besides.

    stdlib, stdlib_validation    the Python standard library's sources (corpus.py)
    ./folder, file.jsonl         local .txt, .jsonl, .json or .parquet files; ":validation" picks a split
                                 (rows of text, or of token ids with documents: packed.py)
    owner/name[:split]           a Hugging Face data set, streamed; "hf:name" for an id without an owner and
                                 "hf:owner/name/config" for one of several configurations
"""

import copy
import difflib
import glob
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset, Value, load_dataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import BaseValidator
from torchtitan.components.validate import build_validator as build_torchtitan_validator
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

from stateflow.titan import packed
from stateflow.titan.corpus import TRAIN, VALIDATION, load_corpus, stdlib_folder

_BUILDER_OF_SUFFIX = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_SUFFIXES = ", ".join(_BUILDER_OF_SUFFIX)
_SPLIT_NAMES = (TRAIN, VALIDATION, "test")
_HUB_PREFIX = "hf:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_ID_AFTER_PREFIX = re.compile(r"[\w.-]+(/[\w.-]+){0,2}")

# torchtitan's key (lower case) -> the source that this module registered under it
_registered: dict[str, str] = {}


class TokenCounter:
    """Counts the tokens that bear loss, from one :meth:`take` to the next.

    The Trainer pulls all microbatches of an optimizer step before the first of them runs, and never tells
    the pipeline schedule how many valid tokens they hold. The schedule takes the count here before the
    step's first backward.
    """

    def __init__(self) -> None:
        self._count = 0

    def add(self, num_tokens: int) -> None:
        self._count += num_tokens

    def take(self) -> int:
        """The tokens added since the last call; the count starts again from zero."""
        count, self._count = self._count, 0
        return count


valid_tokens = TokenCounter()
"""What the training dataloader of this process has handed out."""


class CountingDataLoader(ParallelAwareDataloader):
    """torchtitan's dataloader, which counts the labels other than ``IGNORE_INDEX`` in :data:`valid_tokens`.

    A batch is counted when it is handed out, not when a worker prefetches it. State and resumption are
    torchtitan's. ``files`` says what local files it began with, see :func:`size_of_files`.
    """

    files: str | None = None

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        # Not a generator itself: the parent must make its iterator now, as its state_dict() refers to it.
        return self._count(super().__iter__())

    @staticmethod
    def _count(batches: Iterator) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for inputs, labels in batches:
            valid_tokens.add(int((labels != IGNORE_INDEX).sum()))
            yield inputs, labels


def _text_of(sample: dict[str, Any]) -> str:
    if "text" not in sample:
        raise ValueError(f"this dataset holds {packed.TOKENS}, not text")
    return sample["text"] or ""


def _only_text(dataset: Dataset | IterableDataset, source: str) -> Dataset | IterableDataset:
    """Keep one column and call it "text": the column of that name, else the only column of strings.

    Rows of token ids keep these and what marks their documents, see ``packed``.
    """
    if dataset.features is not None:
        names = list(dataset.features)
        strings = [n for n, f in dataset.features.items() if isinstance(f, Value) and "string" in f.dtype]
    else:  # a streamed file format without a schema: look at the first document
        sample = next(iter(dataset.take(1)), {})
        names = list(sample)
        strings = [name for name, value in sample.items() if isinstance(value, str)]
    if packed.TOKENS in names:
        return packed.select_columns(dataset, names, source)
    if "text" in strings:
        column = "text"
    elif len(strings) == 1:
        column = strings[0]
    else:
        found = ", ".join(names) or "none"
        raise ValueError(
            f'dataset {source!r} has no column "text" and {len(strings)} other columns of strings '
            f'(columns: {found}); rename the one to train on to "text"'
        )
    dataset = dataset.select_columns([column])
    return dataset if column == "text" else dataset.rename_column(column, "text")


def _split_tag(relative_path: Path, split_names: set[str]) -> str | None:
    """The split that a path is marked with: a folder ``train``, a file ``train.*`` or ``train-00000-*``."""
    for part in relative_path.parts:
        name = re.split(r"\.|-\d{5}", part, maxsplit=1)[0]
        if name in split_names:
            return name
    return None


def _files_of(path: Path, split: str | None, value: str) -> list[Path]:
    """The sorted data files of one split of a file or folder. A folder without split marks is all "train"."""
    if path.is_file():
        files, tags = [path], [None]
        if path.suffix.lower() not in _BUILDER_OF_SUFFIX:
            raise ValueError(
                f"dataset {value!r}: cannot read {path.suffix or 'this kind of'} files; use {_SUFFIXES}"
            )
    else:
        found = (p.relative_to(path) for p in path.rglob("*") if p.suffix.lower() in _BUILDER_OF_SUFFIX)
        names = sorted(p for p in found if not any(part.startswith(".") for part in p.parts))
        files = [path / name for name in names if (path / name).is_file()]
        if not files:
            raise ValueError(f"dataset {value!r}: the folder holds no {_SUFFIXES} files; put one there")
        split_names = {*_SPLIT_NAMES, split or TRAIN}
        tags = [_split_tag(file.relative_to(path), split_names) for file in files]

    splits = sorted({tag for tag in tags if tag is not None}) or [TRAIN]
    if (split or TRAIN) not in splits:
        raise ValueError(
            f"dataset {value!r}: there is no split {split or TRAIN!r}, only {', '.join(splits)}; "
            f"write {path}:{splits[0]}, or give the folder a sub-folder {split or TRAIN!r}"
        )
    if any(tags):
        files = [file for file, tag in zip(files, tags, strict=True) if tag == (split or TRAIN)]
    return files


def _load_files(path: str, files: list[Path]) -> Dataset:
    """Load local files of one kind as a map-style dataset. ``path`` is what the user wrote, for messages."""
    builders = {_BUILDER_OF_SUFFIX[file.suffix.lower()] for file in files}
    if len(builders) > 1:
        suffixes = ", ".join(sorted({file.suffix for file in files}))
        raise ValueError(f"dataset {path!r} mixes {suffixes} files; keep one kind in the folder")
    if not any(file.stat().st_size for file in files):
        raise ValueError(f"dataset {path!r} is empty; put text into it")
    (builder,) = builders
    options = {"sample_by": "document", "encoding_errors": "replace"} if builder == "text" else {}
    patterns = [glob.escape(str(file)) for file in files]  # load_dataset expands wildcards
    try:
        dataset = load_dataset(builder, data_files=patterns, split="train", **options)
    except Exception as error:  # whatever the format's reader raises, wrapped by datasets
        cause = error.__cause__ or error
        raise ValueError(f"dataset {path!r} cannot be read as {builder} files: {cause}") from None
    return _only_text(dataset, path)


def _load_from_hub(path: str, repo: str, config: str | None, split: str) -> IterableDataset:
    """Open a Hugging Face data set for streaming. ``path`` is what the user wrote, for messages."""
    try:
        dataset = load_dataset(repo, name=config, split=split, streaming=True)
    except Exception as error:  # network, authentication, unknown id, configuration or split
        raise ValueError(
            f"dataset {path!r} is no local folder, and as a Hugging Face data set it cannot be opened "
            f"({repo}, configuration {config or 'default'}, split {split}): {error}"
        ) from None
    return _only_text(dataset, path)


def _looks_local(value: str) -> bool:
    """Whether what does not exist was surely meant as a path, not as a Hugging Face id."""
    base = value.partition(":")[0]
    return base.startswith((".", "/", "~")) or base.count("/") > 1 or Path(base).suffix in _BUILDER_OF_SUFFIX


def _find_local(value: str) -> Callable[[str], Dataset] | None:
    """A loader for a local file or folder, with or without ":split"; None if nothing has that name."""
    base, colon, split = value.rpartition(":")
    for name, wanted in ((value, None), (base, split)) if colon else ((value, None),):
        path = Path(name).expanduser()
        if name and path.exists():
            return partial(_load_files, files=_files_of(path, wanted, value))
    return None


def _find_on_hub(value: str) -> Callable[[str], IterableDataset] | None:
    """A loader for what has the form of a Hugging Face id; None for anything else. Contacts nobody."""
    prefixed = value.startswith(_HUB_PREFIX)
    identifier, _, split = value.removeprefix(_HUB_PREFIX).partition(":")
    if not (_HUB_ID_AFTER_PREFIX if prefixed else _HUB_ID).fullmatch(identifier):
        return None
    parts = identifier.split("/")
    repo, config = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    return partial(_load_from_hub, repo=repo, config=config, split=split or TRAIN)


def _register(name: str, source: str, loader: Callable[[str], Any]) -> str:
    """Add a source to torchtitan's table and return its key.

    torchtitan lower-cases a name before it looks it up, but paths that differ only in case are different.
    """
    key, number = name.lower(), 1
    while key in DATASETS and _registered.get(key) != source:
        number += 1
        key = f"{name.lower()}#{number}"
    DATASETS[key] = DatasetConfig(path=source, loader=loader, sample_processor=_text_of)
    _registered[key] = source
    return key


def resolve_dataset(name: str, path: str | None = None) -> tuple[str, str | None]:
    """Make a dataset known to torchtitan and return the (name, path) to give it.

    Args:
        name: a name that torchtitan knows, or one of the forms in the module's docstring.
        path: ``dataset_path``. For a known name it says where to load from (torchtitan's meaning); for any
            other name it is the source, and ``name`` is only what to call it.

    Raises:
        ValueError: the source is missing or of no known form. Nothing is read or contacted yet, except that
            a local folder is listed.
    """
    key = name.lower()
    if key in DATASETS and key not in _registered:
        location = path or DATASETS[key].path
        if _looks_local(location) and not Path(location).expanduser().exists():
            raise ValueError(
                f"dataset {name!r} is loaded from {location!r}, which does not exist; "
                'set dataset_path to its folder, or dataset to "stdlib" or to a folder of your own text'
            )
        return name, path

    source = path or name
    loader = None
    if not source.startswith(_HUB_PREFIX):
        loader = _find_local(source)
        if loader is None and _looks_local(source):
            raise ValueError(f"dataset {source!r}: there is no such file or folder; correct the path")
    loader = loader or _find_on_hub(source)
    if loader is None:
        known = sorted(set(DATASETS) - set(_registered))
        nearest = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"the known names are {', '.join(known)}."
        raise ValueError(
            f"dataset {source!r} is unknown: {hint} It may also be a local file or folder, or a Hugging Face "
            f"id such as owner/name ({_HUB_PREFIX}name for one without an owner)"
        )
    return _register(name, source, loader), None


def size_of_files(name: str, path: str | None = None) -> str | None:
    """How many local files a dataset is and their size, to notice that they have changed; None for other data."""
    loader = DATASETS[resolve_dataset(name, path)[0].lower()].loader
    if not (isinstance(loader, partial) and loader.func is _load_files):
        return None
    files = loader.keywords["files"]
    return f"{len(files)} with {sum(file.stat().st_size for file in files):,} bytes in all"


def open_local(job_config: JobConfig) -> None:
    """Opens the run's own local files once, before there are ranks, which find them in the cache then.

    Raises:
        ValueError: they are empty, cannot be read, or have no column to train on.
    """
    sections = [job_config.training, *([job_config.validation] if job_config.validation.enable else [])]
    for section in sections:
        name, _ = resolve_dataset(section.dataset, section.dataset_path)
        loader = DATASETS[name.lower()].loader
        if isinstance(loader, partial) and loader.func is _load_files:
            with _readable_errors(section.dataset):
                loader(DATASETS[name.lower()].path)


def iterate_texts(name: str, path: str | None = None) -> Iterator[str]:
    """The documents of a dataset, in order and once, as the dataloader would read them."""
    name, path = resolve_dataset(name, path)
    config = DATASETS[name.lower()]
    with _readable_errors(name):
        for sample in config.loader(path or config.path):
            yield config.sample_processor(sample)


class TextDataset(HuggingFaceTextDataset):
    """torchtitan's text dataset, whose streams also resume in their second and later epochs.

    Rows of token ids (``packed``) go the same way, except that they are not encoded.
    """

    def __init__(self, *args, vocab_size: int | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self._stream, self._resumed = None, False
        if packed.is_packed(self._data):
            rank, ranks = kwargs.get("dp_rank", 0), kwargs.get("dp_world_size", 1)
            share = f", of the rows of data-parallel rank {rank} of {ranks}" if ranks > 1 else ""
            self._stream = packed.PackedStream(self.dataset_name, self.seq_len, vocab_size, share)

    def __iter__(self):
        return super().__iter__() if self._stream is None else self._packed_windows()

    def _packed_windows(self):
        yield from self._stream.windows()  # of a row in the midst of which a checkpoint was taken
        while True:
            # What is left of an epoch after a resume may be empty. Streams do not count rows in their state.
            empty, self._resumed = not self._resumed, False
            for row in self._get_data_iter():
                self._sample_idx += 1
                self._stream.add(row, self._sample_idx)
                empty = empty and not row[packed.TOKENS]
                yield from self._stream.windows()
            if empty:  # else a rank would read it again and again, and the others wait
                raise ValueError(f"dataset {self.dataset_name!r} has no tokens{self._stream.share}: all rows are empty")
            packed.report_end(self.dataset_name, self.infinite)
            if not self.infinite:
                return
            self._sample_idx = 0
            if isinstance(self._data, IterableDataset):
                self._data.set_epoch(self._data.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self._stream is None else {**state, **self._stream.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A stream ignores a state from another epoch than its own, and a new stream is in epoch 0.
        if isinstance(self._data, IterableDataset):
            self._data.set_epoch(state_dict["data"].get("epoch", 0))
        super().load_state_dict(state_dict)
        self._resumed = True
        if self._stream is not None:
            self._stream.load_state_dict(state_dict)


@contextmanager
def _readable_errors(name: str, dp_rank: int = 0, dp_world_size: int = 1) -> Iterator[None]:
    """Turn what torchtitan and datasets raise for data that cannot be opened into one sentence."""
    try:
        yield
    except OSError as error:  # includes the ConnectionError and DatasetNotFoundError of datasets
        raise ValueError(f"dataset {name!r} cannot be loaded: {error}") from None
    except IndexError:  # of datasets, for a share without documents
        raise ValueError(
            f"dataset {name!r} has too few documents: data-parallel rank {dp_rank} of {dp_world_size} gets "
            f"none; split it into at least {dp_world_size} documents or lower the data-parallel degree"
        ) from None


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = True,
) -> CountingDataLoader:
    """The training dataloader, for ``TrainSpec.build_dataloader_fn``.

    A batch is ({"input": x_BT}, labels_BT), both int64. Documents follow each other, each between the
    tokenizer's bos and eos, cut into windows of T + 1 tokens.

    Raises:
        ValueError: the dataset cannot be found or read, or has fewer documents than data-parallel ranks.
    """
    training = job_config.training
    name, path = resolve_dataset(training.dataset, training.dataset_path)
    with _readable_errors(training.dataset, dp_rank, dp_world_size):
        dataset = TextDataset(
            dataset_name=name,
            dataset_path=path,
            tokenizer=tokenizer,
            seq_len=training.seq_len,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            infinite=infinite,
            vocab_size=_vocab_size(job_config),
        )
    options = {**asdict(training.dataloader), "batch_size": training.local_batch_size}
    loader = CountingDataLoader(dataset, dp_rank=dp_rank, dp_world_size=dp_world_size, **options)
    loader.files = size_of_files(training.dataset, training.dataset_path)
    return loader


def build_validator(job_config: JobConfig, dp_world_size: int, dp_rank: int, **kwargs: Any) -> BaseValidator:
    """torchtitan's validator over what ``validation.dataset`` names, for ``TrainSpec.build_validator_fn``.

    Takes the arguments of torchtitan's ``build_validator``. :data:`valid_tokens` does not count its batches.

    Raises:
        ValueError: the dataset cannot be found or read, has fewer documents than data-parallel ranks, or
            would end in a short batch under pipelining.
    """
    validation = job_config.validation
    if validation.steps == -1 and kwargs.get("pp_schedule") is not None:
        raise ValueError(
            "validation.steps = -1 reads to the end of the data, whose last batch may be smaller than the "
            "pipeline takes; set a number of steps, such as --validation.steps 10"
        )
    name, path = resolve_dataset(validation.dataset, validation.dataset_path)
    resolved = copy.copy(job_config)
    resolved.validation = copy.copy(validation)
    resolved.validation.dataset, resolved.validation.dataset_path = name, path
    with _readable_errors(validation.dataset, dp_rank, dp_world_size):
        validator = build_torchtitan_validator(
            job_config=resolved, dp_world_size=dp_world_size, dp_rank=dp_rank, **kwargs
        )
        if packed.is_packed(validator.validation_dataloader.dataset._data):
            dataset = TextDataset(
                dataset_name=name,
                dataset_path=path,
                tokenizer=kwargs["tokenizer"],
                seq_len=validation.seq_len,
                dp_rank=dp_rank,
                dp_world_size=dp_world_size,
                infinite=validation.steps != -1,
                vocab_size=_vocab_size(job_config),
            )
            options = {**asdict(validation.dataloader), "batch_size": validation.local_batch_size}
            validator.validation_dataloader = ParallelAwareDataloader(
                dataset, dp_rank=dp_rank, dp_world_size=dp_world_size, **options
            )
        return validator


def _vocab_size(job_config: JobConfig) -> int | None:
    from stateflow.titan.flavors import resolve_model

    return resolve_model(job_config).vocab_size if hasattr(job_config.stateflow, "model") else None


def _load_corpus_split(path: str, split: str) -> Dataset:
    return load_corpus(split, root=path)


for _name, _split in (("stdlib", TRAIN), ("stdlib_validation", VALIDATION)):
    DATASETS[_name] = DatasetConfig(
        path=str(stdlib_folder()),
        loader=partial(_load_corpus_split, split=_split),
        sample_processor=_text_of,
    )
