"""Pre-tokenised data: rows of token ids, with the boundaries of the documents that are packed in them.

    input_ids      the tokens of a row, of any length
    document_ids   optional: a number for each of them; a document begins wherever the number changes
    cu_seqlens     optional, instead: 0, the end of each document in the row, the row's length last

Rows follow each other as one stream that is cut into windows of T + 1 tokens, exactly as the documents of a text
dataset are. With one of the columns, every row begins a document, and nothing but the column counts; without, the
tokenizer's bos and eos mark documents as they do in text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torchtitan.tools.logging import logger

from stateflow.documents import COLUMNS

TOKENS = "input_ids"


def select_columns(dataset: Dataset | IterableDataset, names: Sequence[str], source: str):
    """Keep the columns described above.  Raises ValueError if the documents are given twice."""
    given = [name for name in COLUMNS if name in names]
    if len(given) > 1:
        raise ValueError(f"dataset {source!r} has the columns {' and '.join(given)}, which say the same: drop one")
    return dataset.select_columns([TOKENS, *given])


def is_packed(dataset: Dataset | IterableDataset) -> bool:
    names = dataset.column_names
    if names is None:  # a streamed file format without a schema: look at the first row
        names = list(next(iter(dataset.take(1)), {}))
    return TOKENS in names


def documents_of_row(row: Mapping[str, Any], where: str = "") -> list[int] | None:
    """The document of each token of a row, counted from 0; None without a column that says.

    A row whose entry in that column is null is one document. ``where`` begins the message of an error.

    Raises:
        ValueError: the column does not fit the row's tokens.
    """
    num_tokens = len(row[TOKENS])
    ids, ends = row.get("document_ids"), row.get("cu_seqlens")
    if ids is None and ends is None:
        return [0] * num_tokens if any(name in row for name in COLUMNS) else None
    if ids is not None:
        if len(ids) != num_tokens:
            raise ValueError(f"{where}the row has {num_tokens} {TOKENS} and {len(ids)} document_ids; give one for each")
        changes = (a != b for a, b in itertools.pairwise(ids))
        return list(itertools.accumulate(changes, initial=0)) if num_tokens else []
    falls = any(b < a for a, b in itertools.pairwise(ends))
    if not ends or ends[0] != 0 or ends[-1] != num_tokens or falls:
        raise ValueError(
            f"{where}cu_seqlens = {ends} does not fit a row of {num_tokens} tokens; it must begin with 0, never "
            f"decrease and end with {num_tokens}"
        )
    spans = [b - a for a, b in itertools.pairwise(ends) if b > a]
    return [number for number, length in enumerate(spans) for _ in range(length)]


class PackedStream:
    """The windows of rows that follow each other; what is left over of them is the state to resume from.

    ``vocab_size`` bounds the token ids, so that one too large is named instead of ending in an index error. ``share``
    says of which rows this is the stream, where it is not all.
    """

    def __init__(self, name: str, seq_len: int, vocab_size: int | None = None, share: str = ""):
        self.name, self.seq_len, self.vocab_size, self.share = name, seq_len, vocab_size, share
        self.tokens: list[int] = []
        self.documents: list[int] = []
        self._next_document = 0

    def add(self, row: Mapping[str, Any], number: int) -> None:
        """``number`` is the row's, from 1, for messages."""
        where = f"row {number} of dataset {self.name!r}{self.share}: "
        documents = documents_of_row(row, where)
        self._check_tokens(row[TOKENS], where)
        self.tokens += row[TOKENS]
        if documents:
            self.documents += [self._next_document + d for d in documents]
            self._next_document = self.documents[-1] + 1

    def windows(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Each window that is full by now: ({"input", and "document_ids" where a column says}, labels)."""
        size = self.seq_len + 1
        while len(self.tokens) >= size:
            window, self.tokens = torch.tensor(self.tokens[:size], dtype=torch.int64), self.tokens[size:]
            columns = {"input": window[:-1]}
            if self.documents:
                ids, self.documents = torch.tensor(self.documents[:size]), self.documents[size:]
                columns["document_ids"] = ids[:-1]
            yield columns, window[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"token_buffer": self.tokens, "document_buffer": self.documents, "document": self._next_document}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tokens, self.documents = list(state["token_buffer"]), list(state.get("document_buffer", []))
        self._next_document = state.get("document", 0)

    def _check_tokens(self, tokens: Sequence[int], where: str) -> None:
        if self.vocab_size is None or not tokens:
            return
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{where}it has the token id {token}, the model's vocab_size is {self.vocab_size}; "
                    + ("ids start at 0" if token < 0 else f"set [stateflow.model] vocab_size = {token + 1} or more")
                )


def report_end(name: str, infinite: bool) -> None:
    logger.warning(f"Dataset {name} " + ("is being re-looped" if infinite else "has run out of data"))
