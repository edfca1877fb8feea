"""Causal softmax attention of a chunk over [prefix; chunk], in blocks, with its hand-derived backward.

A query block visits the key blocks from the last one that it may see back to the start of the prefix, keeping
a running maximum m, normaliser l and unnormalised output (online softmax). The first block it visits holds
the diagonal, so every row has a finite maximum from then on and masked scores of -inf need no special case.

    o = softmax(scale q k^T + mask) v,   lse = m + log l
    P = e^{scale q k^T - lse};  dv = P^T do;  dS = P . (do v^T - delta),  delta_t = <do_t, o_t>
    dq = scale dS k;  dk = scale dS^T q

Only q, k, v, the prefixes as they were given (views, never copied whole), o and lse live from forward to
backward; no more than one block of scores (BLOCK_SIZES) a head exists at a time. Where a library has kernels for the
shape, two calls of it do the same (`attention_parts`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..chunks import check_documents
from . import attention_parts as parts
from . import reference
from .numerics import at_least_float32, product
from .operation import Operation

# Queries and keys a block. On a CPU the scores of one head should stay in the cache.
BLOCK_SIZES = {"cpu": (128, 512), "cuda": (512, 1024)}


class _KeyBlock(NamedTuple):
    """Keys [start, stop) of one part. Positions count from the chunk's first token: < 0 in the prefix."""

    in_prefix: bool
    start: int
    stop: int
    first_position: int


def _query_blocks(num_tokens: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_tokens, size):
        yield start, min(start + size, num_tokens)


def _key_blocks(prefix_len: int, query_stop: int, size: int) -> Iterator[_KeyBlock]:
    """The blocks that queries before `query_stop` may see, the one with the diagonal first."""
    for start in reversed(range(0, query_stop, size)):
        yield _KeyBlock(False, start, min(start + size, query_stop), start)
    for start in reversed(range(0, prefix_len, size)):
        yield _KeyBlock(True, start, min(start + size, prefix_len), start - prefix_len)


def _block_sizes(device: torch.device) -> tuple[int, int]:
    queries, keys = BLOCK_SIZES["cpu" if device.type == "cpu" else "cuda"]
    assert keys % queries == 0, "the first key block of a query block must hold its whole diagonal"
    return queries, keys


def _query_rows(x_BTHK: Tensor, start: int, stop: int, num_groups: int) -> Tensor:
    """[B, T, H, K] -> [B * G, H/G * (stop - start), K]: the query heads of one key head below each other."""
    x = x_BTHK[:, start:stop].unflatten(2, (num_groups, -1)).permute(0, 2, 3, 1, 4)
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3], x.shape[4])


def _from_query_rows(x_XRV: Tensor, batch: int, num_tokens: int) -> Tensor:
    """The inverse of `_query_rows`: [B, stop - start, H, V]."""
    x = x_XRV.unflatten(0, (batch, -1)).unflatten(2, (-1, num_tokens))
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _key_rows(x_BSGK: Tensor, start: int, stop: int) -> Tensor:
    """[B, S, G, K] -> [B * G, stop - start, K]."""
    return x_BSGK[:, start:stop].transpose(1, 2).flatten(0, 1)


def _add_key_rows(total_BSGK: Tensor, start: int, stop: int, rows_XSK: Tensor) -> None:
    total_BSGK[:, start:stop] += rows_XSK.unflatten(0, (total_BSGK.shape[0], -1)).transpose(1, 2)


def _masked_scores(
    query_XRK: Tensor,
    key_XSK: Tensor,
    scale: float,
    block: _KeyBlock,
    query_start: int,
    query_stop: int,
    doc_start_BT: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """scale q k^T with -inf where the key is in the query's future or in another document."""
    scores = product(query_XRK, key_XSK.mT, dtype) * scale
    positions = torch.arange(
        block.first_position, block.first_position + key_XSK.shape[1], device=scores.device
    )
    hidden = None
    if block.first_position + key_XSK.shape[1] - 1 > query_start:
        queries = torch.arange(query_start, query_stop, device=scores.device)
        hidden = (positions > queries[:, None])[None]
    if doc_start_BT is not None:
        other = positions < doc_start_BT[:, query_start:query_stop, None]
        hidden = other if hidden is None else hidden | other
    if hidden is None:
        return scores
    num_queries = query_stop - query_start
    by_query = scores.view(hidden.shape[0], -1, num_queries, key_XSK.shape[1])
    by_query.masked_fill_(hidden[:, None], -torch.inf)
    return scores


@Operation("stateflow::prefix_attention")
def _prefix_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    k_prefix_BSGK: Tensor,
    v_prefix_BSGV: Tensor,
    doc_start_BT: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp [B, H, T] of the scores. The gradient of the latter is not propagated."""
    operands = parts.Operands(q_BTHK, k_BTGK, v_BTGV, k_prefix_BSGK, v_prefix_BSGV)
    if (part := parts.choose(operands, doc_start_BT)) is not None:
        return parts.run(part, parts.forward, operands, operands, scale)
    batch, num_tokens, num_heads, _ = q_BTHK.shape
    num_groups = k_BTGK.shape[2]
    num_queries, num_keys = _block_sizes(q_BTHK.device)
    accumulate = at_least_float32(q_BTHK)
    output = q_BTHK.new_empty(batch, num_tokens, num_heads, v_BTGV.shape[3])
    lse_BHT = q_BTHK.new_empty(batch, num_heads, num_tokens, dtype=accumulate)
    for start, stop in _query_blocks(num_tokens, num_queries):
        query = _query_rows(q_BTHK, start, stop, num_groups)
        maximum = normaliser = total = None
        for block in _key_blocks(k_prefix_BSGK.shape[1], stop, num_keys):
            keys, values = (k_prefix_BSGK, v_prefix_BSGV) if block.in_prefix else (k_BTGK, v_BTGV)
            key, value = (_key_rows(x, block.start, block.stop) for x in (keys, values))
            scores = _masked_scores(query, key, scale, block, start, stop, doc_start_BT, q_BTHK.dtype)
            block_maximum = scores.amax(-1, keepdim=True)
            new_maximum = block_maximum if maximum is None else torch.maximum(maximum, block_maximum)
            weights = scores.sub_(new_maximum).exp_()
            block_sum = weights.sum(-1, keepdim=True)
            block_total = product(weights, value, q_BTHK.dtype)
            if maximum is None:
                normaliser, total = block_sum, block_total
            else:
                shrink = (maximum - new_maximum).exp()
                normaliser = normaliser * shrink + block_sum
                total = total * shrink + block_total
            maximum = new_maximum
        output[:, start:stop] = _from_query_rows(total / normaliser, batch, stop - start)
        lse = maximum + normaliser.log()
        lse_BHT[:, :, start:stop] = _from_query_rows(lse, batch, stop - start)[..., 0].transpose(1, 2)
    return output, lse_BHT


@_prefix_attention.register_fake
def _(q_BTHK, k_BTGK, v_BTGV, k_prefix_BSGK, v_prefix_BSGV, doc_start_BT, scale):
    batch, num_tokens, num_heads, _ = q_BTHK.shape
    output = q_BTHK.new_empty(batch, num_tokens, num_heads, v_BTGV.shape[3])
    return output, q_BTHK.new_empty(batch, num_heads, num_tokens, dtype=at_least_float32(q_BTHK))


@Operation("stateflow::prefix_attention_backward")
def _prefix_attention_backward(
    grad_o_BTHV: Tensor,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    k_prefix_BSGK: Tensor,
    v_prefix_BSGV: Tensor,
    doc_start_BT: Tensor | None,
    output_BTHV: Tensor,
    lse_BHT: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = parts.Operands(q_BTHK, k_BTGK, v_BTGV, k_prefix_BSGK, v_prefix_BSGV)
    if (part := parts.choose(inputs, doc_start_BT)) is not None:
        return parts.run(part, parts.backward, inputs, grad_o_BTHV, inputs, output_BTHV, lse_BHT, scale)
    batch, num_tokens = q_BTHK.shape[:2]
    num_groups, dtype = k_BTGK.shape[2], q_BTHK.dtype
    num_queries, num_keys = _block_sizes(q_BTHK.device)
    accumulate = at_least_float32(q_BTHK)
    grads = [torch.zeros(x.shape, dtype=accumulate, device=x.device) for x in inputs]
    grad_q_BTHK, grad_k, grad_v, grad_k_prefix, grad_v_prefix = grads
    delta_BTH1 = (grad_o_BTHV.to(accumulate) * output_BTHV).sum(-1, keepdim=True)
    lse_BTH1 = lse_BHT.transpose(1, 2)[..., None]
    for start, stop in _query_blocks(num_tokens, num_queries):
        query, grad_o, delta, lse = (
            _query_rows(x, start, stop, num_groups) for x in (q_BTHK, grad_o_BTHV, delta_BTH1, lse_BTH1)
        )
        grad_query = torch.zeros(query.shape, dtype=accumulate, device=query.device)
        for block in _key_blocks(k_prefix_BSGK.shape[1], stop, num_keys):
            keys, values = (k_prefix_BSGK, v_prefix_BSGV) if block.in_prefix else (k_BTGK, v_BTGV)
            grad_keys, grad_values = (grad_k_prefix, grad_v_prefix) if block.in_prefix else (grad_k, grad_v)
            span = (block.start, block.stop)
            key, value = (_key_rows(x, *span) for x in (keys, values))
            scores = _masked_scores(query, key, scale, block, start, stop, doc_start_BT, dtype)
            weights = scores.sub_(lse).exp_()
            _add_key_rows(grad_values, *span, product(weights.mT, grad_o, dtype))
            grad_scores = (product(grad_o, value.mT, dtype) - delta).mul_(weights).mul_(scale)
            grad_query += product(grad_scores, key, dtype)
            _add_key_rows(grad_keys, *span, product(grad_scores.mT, query, dtype))
        grad_q_BTHK[:, start:stop] = _from_query_rows(grad_query, batch, stop - start)
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True))


@_prefix_attention_backward.register_fake
def _(
    grad_o, q_BTHK, k_BTGK, v_BTGV, k_prefix_BSGK, v_prefix_BSGV, doc_start_BT, output_BTHV, lse_BHT, scale
):
    return tuple(x.new_empty(x.shape) for x in (q_BTHK, k_BTGK, v_BTGV, k_prefix_BSGK, v_prefix_BSGV))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad_o_BTHV, _grad_lse):
    return *_prefix_attention_backward(grad_o_BTHV, *ctx.saved_tensors, ctx.scale), None, None


_prefix_attention.register_autograd(_backward, setup_context=_setup_context)


def prefix_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    k_prefix_BSGK: Tensor,
    v_prefix_BSGV: Tensor,
    doc_start_BT: Tensor | None = None,
    *,
    scale: float | None = None,
    backend: str = "chunk",
) -> Tensor:
    """o_t = sum_p softmax_p(scale <q_t, k_p>) v_p over the p of [prefix; chunk] that token t may see.

    Args:
        q_BTHK: queries of H heads for the chunk's T >= 1 tokens.
        k_BTGK, v_BTGV: the chunk's keys and values of G heads, H a multiple of G; query head h reads
            h // (H / G).
        k_prefix_BSGK, v_prefix_BSGV: those of the S >= 0 tokens before the chunk; views of larger buffers are
            fine. They are read in place, never copied whole, and must not change until the backward has run.
        doc_start_BT: None, or int64: the position, relative to the chunk's first token, of the first token of
            each token's document. Token t sees p iff p <= S + t and p >= S + doc_start[t].
        scale: factor of the scores; None is K^-0.5.
        backend: "chunk" (blocks with online softmax, and cuDNN's or torch's flash kernels for 16-bit inputs on
            an NVIDIA GPU without documents), or "reference" for a full mask and a plain softmax.

    Returns:
        o_BTHV in q's dtype, accumulated in at least float32; differentiable in q, k, v and both prefixes.

    Raises:
        ValueError: shapes that do not fit, documents that cannot be (`chunks.check_documents`), an unknown backend.
    """
    batch, num_tokens, num_heads, head_dim = q_BTHK.shape
    num_groups, v_dim = v_BTGV.shape[2:]
    prefix_len = k_prefix_BSGK.shape[1]
    if num_tokens < 1:
        raise ValueError("prefix_attention needs at least 1 token, got 0: leave empty chunks out")
    if num_heads % num_groups:
        raise ValueError(f"{num_heads} query heads are no multiple of the {num_groups} key heads")
    for name, x, shape in (
        ("k", k_BTGK, (batch, num_tokens, num_groups, head_dim)),
        ("v", v_BTGV, (batch, num_tokens, num_groups, v_dim)),
        ("k_prefix", k_prefix_BSGK, (batch, prefix_len, num_groups, head_dim)),
        ("v_prefix", v_prefix_BSGV, (batch, prefix_len, num_groups, v_dim)),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} {list(x.shape)} must be {list(shape)}")
    check_documents(doc_start_BT, batch, num_tokens)
    if scale is None:
        scale = head_dim**-0.5
    inputs = (q_BTHK, k_BTGK, v_BTGV, k_prefix_BSGK, v_prefix_BSGV, doc_start_BT)
    if backend in ("chunk", "auto"):
        return _prefix_attention(*inputs, float(scale))[0]
    if backend == "reference":
        return reference.prefix_attention(*inputs, scale)
    raise ValueError(f"unknown backend {backend!r}: use 'chunk' or 'reference'")
