"""Where a sequence is cut: chunk plans, the cost model behind a skewed cut, and documents across cuts.

A sequence of T tokens is cut into N chunks at boundaries 0 = c_0 < c_1 < ... < c_N = T. Chunk i holds the
tokens c_i .. c_{i+1} - 1; its length is s_i = c_{i+1} - c_i. Equal chunks suit recurrent layers, whose cost
is linear in the length; softmax attention makes later chunks dearer, so that a plan may be skewed towards
equal cost (eq. 9-11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_MULTIPLE = 128
MAX_SKEW = 2.0


@dataclass(frozen=True)
class ChunkCost:
    """Cost model of a chunk with start c and length s (eq. 9): linear * s + quadratic * (c * s + s**2 / 2).

    ``linear`` is L_lin * C_lin + C_dense (per token), ``quadratic`` is L_soft * C_soft (per pair of query and
    key). Any unit will do: only the ratio of the two moves a boundary.

    Raises:
        ValueError: if a coefficient is negative or not finite, or if both are 0.
    """

    linear: float
    quadratic: float

    def __post_init__(self) -> None:
        for name, value in (("linear", self.linear), ("quadratic", self.quadratic)):
            if not math.isfinite(value) or value < 0:
                raise ValueError(
                    f"{name} cost {value} must be a finite number of at least 0; give 0 to drop the term"
                )
        if self.linear == 0 and self.quadratic == 0:
            raise ValueError("linear and quadratic cost are both 0; give linear=1.0 for equal chunks")

    def cost(self, start: float, length: float) -> float:
        """Cost of the chunk [start, start + length) (eq. 9)."""
        return self.linear * length + self.quadratic * (start * length + length**2 / 2)

    def balanced_boundaries(self, seq_len: int, num_chunks: int) -> tuple[float, ...]:
        """Real-valued boundaries c_0 .. c_N at which all chunks cost the same.

        Eq. 9 is C(c + s) - C(c) with C(c) = linear * c + quadratic * c**2 / 2; c_i solves C(c_i) = i/N C(T).
        """
        _check_counts(seq_len, num_chunks)
        total = self.cost(0, seq_len)
        inner = []
        for i in range(1, num_chunks):
            target = total * i / num_chunks
            # This form of the root has no difference of close numbers and holds for quadratic = 0, too.
            inner.append(2 * target / (self.linear + math.sqrt(self.linear**2 + 2 * self.quadratic * target)))
        return (0.0, *inner, float(seq_len))


@dataclass(frozen=True)
class ChunkPlan:
    """The cut of one sequence: ``boundaries`` = (0, c_1, ..., c_{N-1}, T), strictly increasing.

    Every microbatch of a step uses the same plan, and so does every pipeline rank.

    Raises:
        ValueError: if the boundaries do not start at 0, or do not increase strictly.
    """

    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        cuts = self.boundaries
        if len(cuts) < 2:
            raise ValueError(f"boundaries {cuts} hold no chunk; give at least (0, seq_len)")
        if cuts[0] != 0:
            raise ValueError(f"boundaries start at {cuts[0]}; the first one must be 0")
        for i, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):
            if stop <= start:
                raise ValueError(
                    f"boundary {stop} after {start} leaves chunk {i} empty; it must be at least {start + 1}"
                )

    @classmethod
    def build(
        cls,
        seq_len: int,
        num_chunks: int,
        skew: float = 0.0,
        cost: ChunkCost | None = None,
        multiple: int | None = None,
    ) -> ChunkPlan:
        """Cut T tokens into N chunks at c_i = (1 - skew) * i*T/N + skew * c_i_balanced (eq. 10-11).

        Args:
            seq_len: T, in tokens.
            num_chunks: N, at most T.
            skew: alpha, 0 (equal lengths) to 1 (equal costs); up to 2 goes beyond equal costs.
            cost: the cost model of eq. 9, needed where skew is not 0.
            multiple: inner boundaries are rounded to the nearest multiple of it (halves up); the last one is
                T. By default the largest power of two up to 128 of which two fit into a chunk of average
                length (2 * multiple * N <= T), else 1. With the default no rounding empties a chunk at skew
                0, nor up to skew 1 where T >= 2 * N.

        Raises:
            ValueError: for a count or a skew out of range, a missing cost, or a rounding that would empty a
                chunk.
        """
        _check_counts(seq_len, num_chunks)
        if not 0 <= skew <= MAX_SKEW:
            nearest = MAX_SKEW if skew > MAX_SKEW else 0.0
            raise ValueError(f"skew {skew} is outside 0 .. {MAX_SKEW}; the nearest that works is {nearest}")
        if skew > 0 and cost is None:
            raise ValueError(
                f"skew {skew} needs the cost of a chunk; give cost=ChunkCost(linear, quadratic), or skew 0"
            )
        if multiple is None:
            multiple = default_multiple(seq_len, num_chunks)
        if multiple < 1:
            raise ValueError(f"multiple {multiple} must be at least 1")

        cuts = _cut(seq_len, num_chunks, skew, cost, multiple)
        if cuts is None:
            fixes = _what_works(seq_len, num_chunks, skew, cost, multiple)
            raise ValueError(
                f"rounding to multiples of {multiple} leaves a chunk of the {seq_len} tokens empty "
                f"for num_chunks {num_chunks} and skew {skew}; {fixes} works"
            )
        return cls(cuts)

    @classmethod
    def explicit(cls, seq_len: int, lengths: Sequence[int]) -> ChunkPlan:
        """The plan with these chunk lengths, which must sum to ``seq_len``.

        Raises:
            ValueError: if there is no length, one is not positive, or the sum is not seq_len.
        """
        _check_counts(seq_len, len(lengths))
        for i, length in enumerate(lengths):
            if length < 1:
                raise ValueError(f"length {length} of chunk {i} must be at least 1")
        missing = seq_len - sum(lengths)
        if missing:
            change = f"add {missing} to" if missing > 0 else f"take {-missing} from"
            raise ValueError(
                f"chunk lengths sum to {sum(lengths)}, the sequence has {seq_len} tokens; {change} them"
            )
        boundaries = [0]
        for length in lengths:
            boundaries.append(boundaries[-1] + length)
        return cls(tuple(boundaries))

    @property
    def num_chunks(self) -> int:
        return len(self.boundaries) - 1

    @property
    def seq_len(self) -> int:
        return self.boundaries[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.boundaries, self.boundaries[1:], strict=False))

    def span(self, chunk: int) -> tuple[int, int]:
        """(start, stop) of a chunk, in tokens.

        Raises:
            ValueError: if there is no such chunk.
        """
        if not 0 <= chunk < self.num_chunks:
            raise ValueError(
                f"chunk {chunk} is not one of the {self.num_chunks}; give 0 .. {self.num_chunks - 1}"
            )
        return self.boundaries[chunk], self.boundaries[chunk + 1]

    def split(self, tensor: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """The chunks of ``tensor`` along ``dim``, as views (not contiguous in general).

        Raises:
            ValueError: if that dimension does not hold seq_len tokens.
        """
        if tensor.shape[dim] != self.seq_len:
            raise ValueError(
                f"dimension {dim} of the tensor holds {tensor.shape[dim]} tokens; "
                f"give whole sequences of {self.seq_len}, which the plan cuts"
            )
        return tensor.split(self.lengths, dim)

    def __str__(self) -> str:
        equal = len(set(self.lengths)) == 1
        parts = f"{self.num_chunks} x {self.lengths[0]}" if equal else " + ".join(map(str, self.lengths))
        return f"{self.seq_len} tokens = {parts}"


def default_multiple(seq_len: int, num_chunks: int) -> int:
    """The largest power of two m <= 128 with 2 * m * num_chunks <= seq_len, else 1."""
    multiple = MAX_MULTIPLE
    while multiple > 1 and 2 * multiple * num_chunks > seq_len:
        multiple //= 2
    return multiple


def document_starts(first_token_BT: Tensor) -> Tensor:
    """Start position of the document of each token, from a mark on the first token of each document.

    Args:
        first_token_BT: bool [B, T]. Tokens before the first mark belong to a document that starts at 0.

    Returns:
        int64 [B, T], positions in the whole sequence.

    Raises:
        ValueError: if the marks are not bool [B, T].
    """
    if first_token_BT.dtype != torch.bool or first_token_BT.dim() != 2:
        raise ValueError(
            f"document marks are {first_token_BT.dtype} of shape {tuple(first_token_BT.shape)}; "
            "give torch.bool [B, T]"
        )
    position_T = torch.arange(first_token_BT.shape[1], device=first_token_BT.device)
    return torch.where(first_token_BT, position_T, 0).cummax(dim=1).values


def chunk_documents(doc_start_BT: Tensor, start: int, stop: int) -> Tensor:
    """Document starts of the chunk [start, stop), relative to the chunk's first token.

    Args:
        doc_start_BT: int64 [B, T] from ``document_starts``, of the whole sequence.

    Returns:
        int64 [B, stop - start], negative where the document began in an earlier chunk.

    Raises:
        ValueError: if the chunk is empty or does not lie in the sequence, or the starts are not int64 [B, T].
    """
    if doc_start_BT.dtype != torch.int64 or doc_start_BT.dim() != 2:
        raise ValueError(
            f"document starts are {doc_start_BT.dtype} of shape {tuple(doc_start_BT.shape)}; give int64 [B, T], as "
            "document_starts makes them from marks"
        )
    seq_len = doc_start_BT.shape[1]
    if not 0 <= start < stop <= seq_len:
        raise ValueError(f"chunk [{start}, {stop}) must be non-empty and lie in 0 .. {seq_len}")
    return doc_start_BT[:, start:stop] - start


def check_documents(docs_BT: Tensor | None, batch: int, num_tokens: int) -> None:
    """Raises ValueError where document starts cannot be those of a chunk of `num_tokens` tokens.

    Type and shape always. Values on the CPU only, and not while torch.compile traces: to look at those of a GPU would
    make the host wait for it. Of the values each must be the token's own position or the start of the token before it;
    that of the first token 0 or negative. So starts that count from the sequence's first token are noticed as soon as
    one lies within the chunk or before it, other than at 0.
    """
    if docs_BT is None:
        return
    if docs_BT.dtype != torch.int64 or docs_BT.shape != (batch, num_tokens):
        raise ValueError(
            f"docs is {docs_BT.dtype} of shape {tuple(docs_BT.shape)}, but must be int64 {(batch, num_tokens)}: the "
            "start of each token's document, from document_starts and chunk_documents of stateflow.chunks"
        )
    # An exact type: a fake tensor has no values.
    if torch.compiler.is_compiling() or type(docs_BT) is not Tensor or docs_BT.device.type != "cpu":
        return
    own_T = torch.arange(num_tokens)
    good_BT = docs_BT == own_T
    good_BT[:, 1:] |= docs_BT[:, 1:] == docs_BT[:, :-1]
    good_BT[:, 0] |= docs_BT[:, 0] < 0
    if not good_BT.all():
        row, token = (~good_BT).nonzero()[0].tolist()
        known = f"with the document of the token before it ({docs_BT[row, token - 1]})" if token else "before it (< 0)"
        raise ValueError(
            f"docs[{row}, {token}] = {docs_BT[row, token]}: this token's document starts at the token ({token}) or "
            f"{known}, counted from the chunk's first token; cut document_starts with chunk_documents of "
            "stateflow.chunks"
        )


def shift_labels(tokens_BT: Tensor, ignore_index: int = -100) -> Tensor:
    """Next-token labels of whole sequences: label t is token t + 1, the last one is ``ignore_index``.

    To be called before any cut: shifting within chunks would lose the label of each chunk's last token.

    Args:
        tokens_BT: integers [B, T].

    Returns:
        int64 [B, T].
    """
    labels_BT = torch.full_like(tokens_BT, ignore_index, dtype=torch.int64)
    labels_BT[:, :-1] = tokens_BT[:, 1:]
    return labels_BT


def _check_counts(seq_len: int, num_chunks: int) -> None:
    if seq_len < 1:
        raise ValueError(f"seq_len {seq_len} must be at least 1")
    if num_chunks < 1:
        raise ValueError(f"num_chunks {num_chunks} must be at least 1")
    if num_chunks > seq_len:
        raise ValueError(f"num_chunks {num_chunks} is more than the {seq_len} tokens; give at most {seq_len}")


def _cut(
    seq_len: int, num_chunks: int, skew: float, cost: ChunkCost | None, multiple: int
) -> tuple[int, ...] | None:
    """The rounded boundaries of eq. 10-11, or None where rounding or the skew leaves a chunk empty."""
    equal = [i * seq_len / num_chunks for i in range(num_chunks + 1)]
    balanced = equal if cost is None else cost.balanced_boundaries(seq_len, num_chunks)
    cuts = [0]
    for i in range(1, num_chunks):
        real = (1 - skew) * equal[i] + skew * balanced[i]
        cuts.append(math.floor(real / multiple + 0.5) * multiple)
    cuts.append(seq_len)
    return tuple(cuts) if all(a < b for a, b in zip(cuts, cuts[1:], strict=False)) else None


def _what_works(seq_len: int, num_chunks: int, skew: float, cost: ChunkCost | None, multiple: int) -> str:
    """The largest smaller multiple (a power of two) and the largest smaller num_chunks that work."""
    fixes = []
    smaller = 2 ** ((multiple - 1).bit_length() - 1) if multiple > 1 else 0
    while smaller and _cut(seq_len, num_chunks, skew, cost, smaller) is None:
        smaller //= 2
    if smaller:
        fixes.append(f"multiple {smaller}")
    fewer = num_chunks - 1
    while _cut(seq_len, fewer, skew, cost, multiple) is None:  # one chunk always works
        fewer -= 1
    fixes.append(f"num_chunks {fewer}")
    return " or ".join(fixes)
