"""Document boundaries of packed sequences, from the columns that packed data comes with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

COLUMNS = ("document_ids", "cu_seqlens")


def first_tokens_of_ids(document_ids_BT: Tensor) -> Tensor:
    """Marks for ``chunks.document_starts`` from a document number for each token.

    A document starts wherever the number differs from the one of the preceding token; which numbers is all one.

    Args:
        document_ids_BT: integers [B, T].

    Returns:
        bool [B, T].

    Raises:
        ValueError: if they are not integers [B, T].
    """
    _check_integers("document_ids", document_ids_BT, "[B, T], a number for each token")
    first_BT = torch.zeros_like(document_ids_BT, dtype=torch.bool)
    first_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    return first_BT


def first_tokens_of_cu_seqlens(cu_seqlens_BK: Tensor, seq_len: int) -> Tensor:
    """Marks for ``chunks.document_starts`` from cumulative document lengths, a list for each sequence.

    Args:
        cu_seqlens_BK: integers [B, K]; each row is 0, then the end of each document, the last one ``seq_len``. Rows
            with fewer documents repeat ``seq_len`` up to the common K, so that a loader can stack them.
        seq_len: T.

    Returns:
        bool [B, T].

    Raises:
        ValueError: naming the first row that does not begin with 0, does not end with T, or decreases.
    """
    _check_integers("cu_seqlens", cu_seqlens_BK, "[B, K], a row for each sequence")
    rule = f"a row is 0, the end of each document, and {seq_len} repeated up to the common length"
    falls_B = (cu_seqlens_BK[:, 1:] < cu_seqlens_BK[:, :-1]).any(dim=1)
    wrong_B = (cu_seqlens_BK[:, 0] != 0) | (cu_seqlens_BK[:, -1] != seq_len) | falls_B
    if wrong_B.any():
        row = int(wrong_B.nonzero()[0])
        values = cu_seqlens_BK[row].tolist()
        if values[0] != 0:
            problem = f"begins with {values[0]}, not 0"
        elif bool(falls_B[row]):
            problem = f"decreases: {_shorten(values)}"
        else:
            problem = f"ends with {values[-1]}, not with the {seq_len} tokens of a sequence"
        raise ValueError(f"cu_seqlens, row {row} {problem}; {rule}")
    # One column more takes the ends at T, which start nothing.
    first = torch.zeros(len(cu_seqlens_BK), seq_len + 1, dtype=torch.bool, device=cu_seqlens_BK.device)
    return first.scatter_(1, cu_seqlens_BK.long(), True)[:, :seq_len]


def first_tokens_of_columns(columns: Mapping[str, Tensor], num_sequences: int, seq_len: int) -> Tensor | None:
    """Marks from the column ``document_ids`` or ``cu_seqlens`` of a batch; None where it has neither.

    Raises:
        ValueError: if both are there, or one does not fit a batch of ``num_sequences`` x ``seq_len`` tokens.
    """
    given = [name for name in COLUMNS if columns.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"a batch has {' and '.join(given)}, which say the same: drop one of the two columns")
    (name,) = given
    if name == "document_ids":
        first_BT = first_tokens_of_ids(columns[name])
    else:
        first_BT = first_tokens_of_cu_seqlens(columns[name], seq_len)
    if first_BT.shape != (num_sequences, seq_len):
        raise ValueError(
            f"{name} is {tuple(columns[name].shape)} beside {num_sequences} sequences of {seq_len} tokens; "
            + (f"give {(num_sequences, seq_len)}" if name == "document_ids" else f"give {num_sequences} rows")
        )
    return first_BT


def _check_integers(name: str, tensor: Tensor, shape: str) -> None:
    kind_ok = isinstance(tensor, Tensor) and not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    )
    if not kind_ok or tensor.dim() != 2 or tensor.shape[1] == 0:
        got = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} is {got}; give integers {shape}")


def _shorten(values: list[int], most: int = 12) -> str:
    return str(values) if len(values) <= most else f"{str(values[:most])[:-1]}, ...]"
