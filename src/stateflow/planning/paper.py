"""Figures of the paper (arXiv 2608.06838v1), tables 2 and 3: 3B models, PP8 x TP1, A100-80GB, full recomputation.

Thousand tokens a second of all eight GPUs, and peak GB of the fullest; None is out of memory.
"""

from __future__ import annotations

from typing import NamedTuple

RANKS = 8
TOKENS = (65536, 131072)
MICROBATCHES = (4, 8, 16)


class Figure(NamedTuple):
    kilotokens: float
    gigabytes: float


class Entry(NamedTuple):
    """Whole sequences and chunks in one framework."""

    whole: Figure | None
    chunks: Figure

    @property
    def speedup(self) -> float | None:
        return None if self.whole is None else self.chunks.kilotokens / self.whole.kilotokens

    @property
    def memory_ratio(self) -> float | None:
        """How many times as much whole sequences take."""
        return None if self.whole is None else self.whole.gigabytes / self.chunks.gigabytes


def _entry(whole: tuple | None, chunks: tuple) -> Entry:
    return Entry(None if whole is None else Figure(*whole), Figure(*chunks))


def _rows(*rows: tuple) -> dict[tuple[int, int], tuple[Entry, Entry]]:
    """One row for each length and number of microbatches: Megatron without and with chunks, Swift likewise."""
    settings = [(tokens, count) for tokens in TOKENS for count in MICROBATCHES]
    return {
        setting: (_entry(megatron, chunked), _entry(swift, chunked_swift))
        for setting, (megatron, chunked, swift, chunked_swift) in zip(settings, rows, strict=True)
    }


# {flavor: {(tokens, microbatches): (Megatron, Swift)}}
TABLES = {
    "gdn_3b": _rows(
        ((20.2, 43.7), (38.6, 24.3), (19.3, 25.5), (38.3, 19.5)),
        ((28.7, 43.7), (42.3, 26.3), (27.4, 26.6), (40.6, 19.7)),
        ((35.4, 43.7), (43.2, 27.5), (33.9, 26.7), (41.7, 19.7)),
        ((18.8, 75.3), (41.4, 40.6), (19.3, 46.5), (40.5, 34.3)),
        ((28.4, 76.5), (43.8, 41.3), (27.3, 48.8), (42.2, 34.3)),
        ((35.7, 76.5), (44.2, 46.5), (32.3, 48.8), (43.1, 34.3)),
    ),
    "mamba3_3b": _rows(
        ((16.1, 43.0), (33.7, 25.7), (15.6, 26.0), (32.3, 19.8)),
        ((22.8, 43.0), (35.3, 28.7), (22.1, 31.0), (33.9, 20.1)),
        ((28.8, 43.0), (36.8, 29.1), (27.9, 31.0), (35.4, 20.1)),
        (None, (35.4, 42.5), (15.6, 47.3), (33.9, 34.7)),
        (None, (36.9, 42.5), (22.0, 57.4), (35.4, 34.7)),
        (None, (37.7, 42.5), (27.7, 57.4), (36.2, 35.3)),
    ),
    "gdn_3b_hybrid": _rows(
        ((14.9, 43.1), (30.1, 29.3), (14.5, 25.1), (29.2, 20.1)),
        ((21.7, 42.8), (30.5, 27.8), (20.9, 26.4), (30.9, 21.5)),
        ((26.8, 43.1), (33.7, 35.9), (26.1, 26.5), (32.2, 21.5)),
        ((11.5, 76.5), (25.5, 54.3), (11.1, 45.7), (24.1, 39.5)),
        ((15.4, 76.5), (23.6, 42.5), (16.1, 48.6), (25.4, 39.5)),
        ((20.5, 76.5), (26.7, 57.3), (19.7, 48.7), (26.0, 39.9)),
    ),
    "mamba3_3b_hybrid": _rows(
        ((13.1, 42.3), (27.3, 25.3), (12.9, 25.6), (26.6, 19.7)),
        ((18.6, 42.3), (28.4, 33.0), (18.4, 30.6), (27.3, 20.5)),
        ((23.5, 42.3), (29.7, 33.6), (23.3, 30.6), (27.9, 21.3)),
        (None, (22.9, 40.5), (10.1, 46.8), (22.2, 35.1)),
        (None, (22.7, 56.4), (14.5, 56.8), (22.6, 35.2)),
        (None, (23.2, 58.6), (18.6, 56.8), (22.4, 36.4)),
    ),
}


def published(flavor: str, tokens: int, microbatches: int, ranks: int) -> tuple[Entry, Entry] | None:
    """(Megatron, Swift), where the paper has this setting."""
    return TABLES.get(flavor, {}).get((tokens, microbatches)) if ranks == RANKS else None
