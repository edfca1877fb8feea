"""Decays within a chunk and document, and norms of its rows: what the gated delta rule's kernels share."""

import triton
import triton.language as tl

# Numbers of each token that Pre and OG leave for the walks and the gradients, rows of [.., FACTORS, C]: b, kappa, r,
# Gam (C times; ST reads these four as one tile), rho (STB reads from kappa to here), the gate sum, the inverse norms of
# key and query, and where the document starts (-1: before the chunk).
FACTORS = tl.constexpr(9)


@triton.jit
def document_starts(doc_start_ptr, batch, num_tokens, n, C: tl.constexpr, HAS_DOCS: tl.constexpr):
    """Where each token's document starts, relative to the chunk; padding belongs to the last document."""
    ts = tl.arange(0, C)
    if HAS_DOCS:
        position = tl.minimum(n * C + ts, num_tokens - 1)
        start = tl.load(doc_start_ptr + batch * num_tokens + position) - n.to(tl.int64) * C
        return tl.maximum(start, -1).to(tl.int32)
    else:
        return tl.full([C], -1, tl.int32)


@triton.jit
def _add(left, right):
    return left + right


@triton.jit
def _add_within(left, left_starts, right, right_starts):
    return tl.where(right_starts, right, left + right), left_starts | right_starts


@triton.jit
def document_sums(g, start, HAS_DOCS: tl.constexpr):
    """The log gates summed from the chunk's or the document's start, whose token's own gate does not count."""
    if HAS_DOCS:
        ts = tl.arange(0, g.shape[0])
        starts = ts == start
        total, _ = tl.associative_scan((tl.where(starts, 0.0, g), starts), 0, _add_within)
        return total
    else:
        return tl.associative_scan(g, 0, _add)


@triton.jit
def document_sums_by_head(x, starts, HAS_DOCS: tl.constexpr, REVERSE: tl.constexpr):
    """Sums of x [C, heads] over the tokens from the chunk's first one on, or the last one on in REVERSE, anew at
    those that start."""
    if HAS_DOCS:
        starts = starts[:, None] & (x == x)
        total, _ = tl.associative_scan((x, starts), 0, _add_within, reverse=REVERSE)
        return total
    else:
        return tl.associative_scan(x, 0, _add, reverse=REVERSE)


@triton.jit
def visible(start, C: tl.constexpr):
    """[t, s]: s is not after t and of t's document."""
    ts = tl.arange(0, C)
    return (ts[:, None] >= ts[None, :]) & (ts[None, :] >= start[:, None])


@triton.jit
def pair_decay(gate_sum, start, C: tl.constexpr):
    """D [t, s]. Masked before the exponential: what is masked may be above 0."""
    log = (gate_sum[:, None] - gate_sum[None, :]).to(tl.float32)
    return tl.exp(tl.where(visible(start, C), log, float("-inf")))


@triton.jit
def start_decay(gate_sum, start):
    """gam: 0 from the chunk's first document start on."""
    return tl.where(start < 0, tl.exp(gate_sum.to(tl.float32)), 0.0)


@triton.jit
def inverse_norm(x, eps, NORMALIZE: tl.constexpr, C: tl.constexpr):
    if NORMALIZE:
        x = x.to(tl.float32)
        return tl.rsqrt(tl.sum(x * x, axis=1) + eps)
    else:
        return tl.full([C], 1.0, tl.float32)


@triton.jit
def pair_decay_transposed(gate_sum, start, C: tl.constexpr):
    """D [s, t]: rows are the tokens that are read."""
    ts = tl.arange(0, C)
    seen = (ts[None, :] >= ts[:, None]) & (ts[:, None] >= start[None, :])
    log = (gate_sum[None, :] - gate_sum[:, None]).to(tl.float32)
    return tl.exp(tl.where(seen, log, float("-inf")))
