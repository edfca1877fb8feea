"""The short convolution with boundary state: y_t = silu(bias + sum_j w_j x_{t-j}), and its backward.

A program takes some tokens of BC channels and walks over them token by token; a thread holds a few neighbouring
channels and keeps the last W inputs, and in the backward the W unfinished gradients, in registers. So every input is
read once, apart from the W-1 tokens before a program's first (forward) or behind its last (backward). Loads of the next
few tokens are under way while these are computed.

What a thread does for a number takes about as long as memory takes for it. So programs that reach neither end of the
sequence, nearly all, run a walk that asks for no end; it is the same code with INTERIOR.

What makes a cut invisible to the last bit:

- Every sum is a chain of explicit fused multiply-adds, in the order that the definition gives: pre from the oldest
  input on; dx_s from the outgoing tail's gradient on, then w_j p_{s+j} for j = W-1 .. 0, which is why the backward
  walks against the tokens. Where a term is missing, a product with 0 is added, which changes no bits.
- silu and its derivative are one expression for all tokens.

The gradients of weight and bias are sums over tokens: each program writes its own part, a second pass adds up.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activations import sigmoid, silu
from .aot import AotCase
from .primitives import rounded
from .waves import multiprocessors, units_of_a_program


class Walk(NamedTuple):
    """How the work is shared out.

    Attributes:
        channels: of a thread with W <= 4; a wider filter halves them. No more than 16 bytes of inputs.
        warps: the most of a program.
        unroll: tokens whose loads are issued together.
        resident: programs that a multiprocessor holds at once, by their registers.
        fewest, most: bounds of a program's tokens, multiples of `unroll`. More mean fewer halo tokens and fewer parts
            of the weight's gradient.
    """

    channels: int
    warps: int
    unroll: int
    resident: int
    fewest: int
    most: int


FORWARD, BACKWARD = Walk(4, 4, 4, 6, 16, 96), Walk(2, 4, 4, 9, 16, 160)


@triton.jit
def _weight_columns(weight, channel, in_channels, C: tl.constexpr, W: tl.constexpr, W2: tl.constexpr):
    """weight [BC, W2], one wide load: column by column it would be strided."""
    column = tl.arange(0, W2)
    mask = in_channels[:, None] & (column[None, :] < W)
    return tl.load(weight + channel[:, None] * W + column[None, :], mask=mask, other=0.0)


@triton.jit
def _taps(columns, W: tl.constexpr, W2: tl.constexpr):
    """The W columns, each float32 [BC]. They change threads, so let the loads of inputs be under way before."""
    column = tl.arange(0, W2)
    columns = columns.to(tl.float32)
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.sum(tl.where(column[None, :] == j, columns, 0.0), axis=1),)
    return taps


@triton.jit
def _load(pointer, here, in_channels, INTERIOR: tl.constexpr):
    """[BC] from `pointer`; 0 unless `here`, or in the interior anything."""
    mask = tl.where(here, in_channels, False)  # not &: the interpreter makes numbers of it
    if INTERIOR:
        return tl.load(pointer, mask=mask)
    else:
        return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def _or_tail(token, tail, position, in_channels, C: tl.constexpr, W: tl.constexpr, INTERIOR: tl.constexpr):
    """float32 [BC]: `token`, loaded from `position`, or before token 0 what the tail has there."""
    if INTERIOR:
        return token.to(tl.float32)
    else:
        in_tail = (position < 0) & (position > -W)
        from_tail = _load(tail + (position + (W - 1)) * C, in_tail, in_channels, False)
        return tl.where(in_tail, from_tail, token.to(tl.float32))


@triton.jit
def _input(x, tail, position, first, num_tokens, in_channels, C: tl.constexpr, W: tl.constexpr, INTERIOR: tl.constexpr):
    """float32 [BC]: the input at `position`, 0 where there is none. The pointer x is at token `first`."""
    if INTERIOR:
        here = True
    else:
        here = (position >= 0) & (position < num_tokens)
    token = _load(x + (position - first) * C, here, in_channels, INTERIOR)
    return _or_tail(token, tail, position, in_channels, C, W, INTERIOR)


@triton.jit
def _before_silu(window, taps, bias, position, doc_start, start, W: tl.constexpr):
    """bias + sum_j w_j x_{t-j} for the token at `position`; `window` holds x_{t-W+1} .. x_t."""
    pre = bias
    for j in tl.static_range(W):
        if doc_start is None:
            pre = tl.fma(taps[j], window[j], pre)
        else:
            seen = tl.where(position - (W - 1) + j >= start, window[j], 0.0)
            pre = tl.fma(taps[j], seen, pre)
    return pre


@triton.jit
def _place(num_blocks, length, C: tl.constexpr, BC: tl.constexpr):
    """Batch index, first token, index of the token block (counted over the batch) and channels of this program."""
    num_channel_blocks: tl.constexpr = (C + BC - 1) // BC
    program = tl.program_id(0)
    block = program // num_channel_blocks
    channel = (program % num_channel_blocks) * BC + tl.arange(0, BC)
    if C % BC == 0:
        in_channels = tl.full([BC], True, tl.int1)
    else:
        in_channels = channel < C
    return (block // num_blocks).to(tl.int64), (block % num_blocks) * length, block, channel, in_channels


@triton.jit
def _bias(bias, channel, in_channels, BC: tl.constexpr):
    if bias is None:
        return tl.zeros([BC], tl.float32)
    else:
        return tl.load(bias + channel, mask=in_channels, other=0.0).to(tl.float32)


@triton.jit
def _doc_start(doc_start, offset, here):
    if doc_start is None:
        return 0
    else:
        return tl.load(doc_start + offset, mask=here, other=0)


@triton.jit
def _inputs_ahead(
    x, begin, length, first, num_tokens, in_channels, C: tl.constexpr, UNROLL: tl.constexpr, INTERIOR: tl.constexpr,
):  # fmt: skip
    """The inputs at `begin`, where x points to, and behind, relative to the program's first, if they are its."""
    tokens = ()
    for u in tl.static_range(UNROLL):
        here = begin + u < length
        if not INTERIOR:
            here = here & (first + begin + u < num_tokens)
        tokens = tokens + (_load(x + u * C, here, in_channels, INTERIOR),)
    return tokens


@triton.jit
def _walk(
    x, columns, bias_C, tail, doc_start, y, length, first, num_tokens, in_channels,
    C: tl.constexpr, W: tl.constexpr, W2: tl.constexpr, UNROLL: tl.constexpr, INTERIOR: tl.constexpr,
):  # fmt: skip
    window = ()
    for j in tl.static_range(W):
        window = window + (_input(x, tail, first + (j - W), first, num_tokens, in_channels, C, W, INTERIOR),)
    ahead = _inputs_ahead(x, 0, length, first, num_tokens, in_channels, C, UNROLL, INTERIOR)
    taps = _taps(columns, W, W2)
    for begin in range(0, length, UNROLL):
        tokens = ahead
        x += UNROLL * C
        ahead = _inputs_ahead(x, begin + UNROLL, length, first, num_tokens, in_channels, C, UNROLL, INTERIOR)
        for u in tl.static_range(UNROLL):
            position = first + begin + u
            start = _doc_start(doc_start, begin + u, position < num_tokens)
            window = window[1:] + (tokens[u].to(tl.float32),)
            out = silu(_before_silu(window, taps, bias_C, position, doc_start, start, W))
            if INTERIOR:
                mask = in_channels
            else:
                mask = tl.where(position < num_tokens, in_channels, False)
            tl.store(y + u * C, rounded(out, y.dtype.element_ty), mask=mask)
        y += UNROLL * C


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "length"])
def short_conv_kernel(
    x,  # [B, T, C]
    weight,  # [C, W]
    bias,  # [C] or None
    tail,  # [B, W-1, C] float32
    doc_start,  # [B, T] int64 or None
    y,  # [B, T, C]
    new_tail,  # [B, W-1, C] float32
    num_tokens,
    num_blocks,
    length,  # tokens of a block, a multiple of UNROLL
    C: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,  # the next power of two
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
):
    batch, first, _, channel, in_channels = _place(num_blocks, length, C, BC)
    columns = _weight_columns(weight, channel, in_channels, C, W, W2)
    bias_C = _bias(bias, channel, in_channels, BC)
    x += (batch * num_tokens + first) * C + channel
    y += (batch * num_tokens + first) * C + channel
    tail += batch * (W - 1) * C + channel
    new_tail += batch * (W - 1) * C + channel
    if doc_start is not None:
        doc_start += batch * num_tokens + first

    if (first >= W) & (first + length <= num_tokens):
        _walk(
            x, columns, bias_C, tail, doc_start, y, length, first, num_tokens, in_channels, C, W, W2, UNROLL, True
        )  # fmt: skip
    else:
        _walk(x, columns, bias_C, tail, doc_start, y, length, first, num_tokens, in_channels, C, W, W2, 1, False)

    if first + length >= num_tokens:
        for row in tl.static_range(W - 1):
            kept = _input(x, tail, num_tokens + (row - W + 1), first, num_tokens, in_channels, C, W, False)
            tl.store(new_tail + row * C, kept, mask=in_channels)


@triton.jit
def _before_silu_gradient(grad_y, window, taps, bias, position, doc_start, start, W: tl.constexpr):
    """float32 [BC]: p = dy silu'(pre) of the token at `position`."""
    pre = _before_silu(window, taps, bias, position, doc_start, start, W)
    share = sigmoid(pre)
    return grad_y.to(tl.float32) * (share * tl.fma(pre, 1.0 - share, 1.0))


@triton.jit
def _add_products(sums, factors, grad_pre, position, doc_start, start, W: tl.constexpr):
    """`sums` with what the token at `position` = t adds: its p times a factor for each of x_{t-W+1} .. x_t it sees."""
    added = ()
    for j in tl.static_range(W):
        if doc_start is None:
            added = added + (tl.fma(factors[j], grad_pre, sums[j]),)
        else:
            part = tl.where(position - (W - 1) + j >= start, grad_pre, 0.0)
            added = added + (tl.fma(factors[j], part, sums[j]),)
    return added


@triton.jit
def _tail_gradient(
    grad_new_tail, position, num_tokens, in_channels, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
    INTERIOR: tl.constexpr,
):  # fmt: skip
    """What the next chunk sends back for the input at `position`; 0 where that is not in the outgoing tail."""
    if INTERIOR:
        return tl.zeros([BC], tl.float32)
    else:
        row = position - num_tokens + (W - 1)
        return _load(grad_new_tail + row * C, (row >= 0) & (row < W - 1), in_channels, False)


@triton.jit
def _pairs_ahead(
    x, grad_y, begin, first, num_tokens, in_channels, C: tl.constexpr, W: tl.constexpr, UNROLL: tl.constexpr,
    INTERIOR: tl.constexpr,
):  # fmt: skip
    """dy of the tokens at `begin`, where the pointers are, and before, and the inputs W before them.

    Nothing of tokens before the program's first.
    """
    dys, tokens = (), ()
    for u in tl.static_range(UNROLL):
        mine = begin - u >= 0
        here, inside = mine, mine
        if not INTERIOR:
            position = first + begin - u
            here = mine & (position < num_tokens)
            inside = mine & (position >= W) & (position - W < num_tokens)
        dys = dys + (_load(grad_y - u * C, here, in_channels, INTERIOR),)
        tokens = tokens + (_load(x - (u + W) * C, inside, in_channels, INTERIOR),)
    return dys, tokens


@triton.jit
def _walk_back(
    grad_y, grad_new_tail, x, columns, bias_C, bias, tail, doc_start, grad_x, grad_tail, parts, length, first,
    num_tokens, in_channels, C: tl.constexpr, W: tl.constexpr, W2: tl.constexpr, BC: tl.constexpr,
    UNROLL: tl.constexpr, INTERIOR: tl.constexpr,
):  # fmt: skip
    # The tokens behind this program's last: only what they add to the gradients of its inputs. At each token t,
    # `window` and `grads` belong to the inputs at t-W+1 .. t.
    end = first + length - 1
    zero = tl.zeros([BC], tl.float32)
    window, grads, sums, behind = (), (), (), ()
    for j in tl.static_range(W):
        window = window + (_input(x, tail, end + j, first, num_tokens, in_channels, C, W, INTERIOR),)
        grads = grads + (zero,)
        sums = sums + (zero,)
    for back in tl.static_range(W - 1):
        position = end + (W - 1 - back)
        entering = _input(x, tail, position - W, first, num_tokens, in_channels, C, W, INTERIOR)
        dy = _load(grad_y + (position - first) * C, position < num_tokens, in_channels, INTERIOR)
        behind = behind + ((entering, dy),)
    x += (length - 1) * C
    grad_y += (length - 1) * C
    grad_x += (length - 1) * C
    dys, tokens = _pairs_ahead(x, grad_y, length - 1, first, num_tokens, in_channels, C, W, UNROLL, INTERIOR)
    taps = _taps(columns, W, W2)

    grads = (_tail_gradient(grad_new_tail, end, num_tokens, in_channels, C, W, BC, INTERIOR),) + grads[1:]
    for back in tl.static_range(W - 1):
        position = end + (W - 1 - back)
        start = _doc_start(doc_start, position - first, position < num_tokens)
        grad_pre = _before_silu_gradient(behind[back][1], window, taps, bias_C, position, doc_start, start, W)
        grads = _add_products(grads, taps, grad_pre, position, doc_start, start, W)
        entering = _tail_gradient(grad_new_tail, position - W, num_tokens, in_channels, C, W, BC, INTERIOR)
        grads = (entering,) + grads[: W - 1]
        window = (behind[back][0],) + window[: W - 1]

    sum_pre = zero
    for done in range(0, length, UNROLL):
        begin = length - 1 - done
        now_dys, now_tokens = dys, tokens
        x -= UNROLL * C
        grad_y -= UNROLL * C
        dys, tokens = _pairs_ahead(x, grad_y, begin - UNROLL, first, num_tokens, in_channels, C, W, UNROLL, INTERIOR)
        for u in tl.static_range(UNROLL):
            position = first + begin - u
            start = _doc_start(doc_start, begin - u, position < num_tokens)
            grad_pre = _before_silu_gradient(now_dys[u], window, taps, bias_C, position, doc_start, start, W)
            grads = _add_products(grads, taps, grad_pre, position, doc_start, start, W)
            if INTERIOR:
                mask = in_channels
            else:
                mask = tl.where(position < num_tokens, in_channels, False)
            tl.store(grad_x - u * C, rounded(grads[W - 1], grad_x.dtype.element_ty), mask=mask)
            sums = _add_products(sums, window, grad_pre, position, doc_start, start, W)
            if bias is not None:
                sum_pre += grad_pre
            entering = _tail_gradient(grad_new_tail, position - W, num_tokens, in_channels, C, W, BC, INTERIOR)
            grads = (entering,) + grads[: W - 1]
            entering = _or_tail(now_tokens[u], tail, position - W, in_channels, C, W, INTERIOR)
            window = (entering,) + window[: W - 1]
        grad_x -= UNROLL * C

    if not INTERIOR:  # noqa: SIM102  the compiler must not see the other
        if first == 0:
            for row in tl.static_range(W - 1):
                tl.store(grad_tail + row * C, grads[row + 1], mask=in_channels)
    for j in tl.static_range(W):
        tl.store(parts + j * C, sums[j], mask=in_channels)
    if bias is not None:
        tl.store(parts + W * C, sum_pre, mask=in_channels)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "length"])
def short_conv_backward_kernel(
    grad_y,  # [B, T, C]
    grad_new_tail,  # [B, W-1, C] float32
    x,  # [B, T, C]
    weight,  # [C, W]
    bias,  # [C] or None
    tail,  # [B, W-1, C] float32
    doc_start,  # [B, T] int64 or None
    grad_x,  # [B, T, C]
    grad_tail,  # [B, W-1, C] float32
    parts,  # [B * num_blocks, W or with a bias W + 1, C] float32: of the weight's columns, then of the bias
    num_tokens,
    num_blocks,
    length,
    C: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
):
    batch, first, block, channel, in_channels = _place(num_blocks, length, C, BC)
    columns = _weight_columns(weight, channel, in_channels, C, W, W2)
    bias_C = _bias(bias, channel, in_channels, BC)
    x += (batch * num_tokens + first) * C + channel
    grad_x += (batch * num_tokens + first) * C + channel
    grad_y += (batch * num_tokens + first) * C + channel
    tail += batch * (W - 1) * C + channel
    grad_tail += batch * (W - 1) * C + channel
    grad_new_tail += batch * (W - 1) * C + channel
    if bias is None:
        parts += block.to(tl.int64) * W * C + channel
    else:
        parts += block.to(tl.int64) * (W + 1) * C + channel
    if doc_start is not None:
        doc_start += batch * num_tokens + first

    # The tokens behind the last, W - 1 of them, must not reach the end, nor be in the outgoing tail.
    if (first >= W) & (first + length + W - 1 <= num_tokens):
        _walk_back(
            grad_y, grad_new_tail, x, columns, bias_C, bias, tail, doc_start, grad_x, grad_tail, parts, length,
            first, num_tokens, in_channels, C, W, W2, BC, UNROLL, True,
        )  # fmt: skip
    else:
        _walk_back(
            grad_y, grad_new_tail, x, columns, bias_C, bias, tail, doc_start, grad_x, grad_tail, parts, length,
            first, num_tokens, in_channels, C, W, W2, BC, 1, False,
        )  # fmt: skip


def _constexprs(num_channels: int, width: int, itemsize: int, walk: Walk) -> tuple[dict[str, int], int]:
    """What a kernel is compiled for, and the warps of a program."""
    per_warp = 32 * min(16 // itemsize, walk.channels if width <= 4 else walk.channels // 2)
    # The largest program of those that compute the fewest channels that are not there.
    num_warps = min((4, 2, 1), key=lambda n: (n > walk.warps, -(-num_channels // (per_warp * n)) * n))
    shape = dict(C=num_channels, W=width, W2=triton.next_power_of_2(width), BC=per_warp * num_warps)
    return shape | dict(UNROLL=walk.unroll), num_warps


def _share_out(x_BTC: Tensor, block_channels: int, walk: Walk) -> tuple[int, int]:
    """The number of token blocks, and the tokens of each."""
    batch, num_tokens, num_channels = x_BTC.shape
    programs_of_a_block = batch * triton.cdiv(num_channels, block_channels)
    length = walk.unroll * units_of_a_program(
        triton.cdiv(num_tokens, walk.unroll), programs_of_a_block, walk.resident * multiprocessors(x_BTC.device),
        walk.most // walk.unroll,
    )  # fmt: skip
    length = max(length, walk.fewest)
    return triton.cdiv(num_tokens, length), length


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def forward(
    x_BTC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BWC: Tensor,
    doc_start_BT: Tensor | None,
    walk: Walk | None = None,
) -> tuple[Tensor, Tensor]:
    """y in x's dtype and the last W-1 inputs, float32.

    Args:
        x_BTC: bfloat16, float16 or float32, T >= 1.
        weight_CW, bias_C: of any of these types, 2 <= W <= 8; the bias may be None.
        tail_BWC: float32 [B, W-1, C], the inputs before the first token.
        doc_start_BT: None or int64, the first token of each token's document, relative to this call's first token.
    """
    x, weight, bias, tail, doc_start = _contiguous(x_BTC, weight_CW, bias_C, tail_BWC, doc_start_BT)
    (batch, num_tokens, num_channels), width = x.shape, weight.shape[1]
    y, new_tail = torch.empty_like(x), torch.empty_like(tail)
    shape, num_warps = _constexprs(num_channels, width, x.element_size(), walk or FORWARD)
    num_blocks, length = _share_out(x, shape["BC"], walk or FORWARD)
    grid = (batch * num_blocks * triton.cdiv(num_channels, shape["BC"]),)
    short_conv_kernel[grid](
        x, weight, bias, tail, doc_start, y, new_tail, num_tokens, num_blocks, length, **shape, num_warps=num_warps
    )
    return y, new_tail


def backward(
    grad_y_BTC: Tensor,
    grad_tail_BWC: Tensor,
    x_BTC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BWC: Tensor,
    doc_start_BT: Tensor | None,
    walk: Walk | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of x, weight, bias and tail: float32 but for x's, which has x's dtype.

    Those of x and tail are the same bits wherever the sequence is cut. Arguments as in `forward`.
    """
    grad_y, grad_new_tail, x, weight, bias, tail, doc_start = _contiguous(
        grad_y_BTC, grad_tail_BWC, x_BTC, weight_CW, bias_C, tail_BWC, doc_start_BT
    )
    (batch, num_tokens, num_channels), width = x.shape, weight.shape[1]
    shape, num_warps = _constexprs(num_channels, width, x.element_size(), walk or BACKWARD)
    num_blocks, length = _share_out(x, shape["BC"], walk or BACKWARD)
    grad_x, grad_tail = torch.empty_like(x), torch.empty_like(tail)
    num_sums = width if bias is None else width + 1
    parts = torch.empty(batch * num_blocks, num_sums, num_channels, dtype=torch.float32, device=x.device)
    grid = (batch * num_blocks * triton.cdiv(num_channels, shape["BC"]),)
    short_conv_backward_kernel[grid](
        grad_y, grad_new_tail, x, weight, bias, tail, doc_start, grad_x, grad_tail, parts, num_tokens, num_blocks,
        length, **shape, num_warps=num_warps,
    )  # fmt: skip
    sums = parts.sum(0)
    return grad_x, sums[:width].t(), None if bias is None else sums[width], grad_tail


def aot_cases() -> Iterator[AotCase]:
    pointers = dict(x="*{}", weight="*{}", bias="*{}", tail="*fp32", doc_start="*i64")
    kernels = {
        short_conv_kernel: dict(y="*{}", new_tail="*fp32"),
        short_conv_backward_kernel: dict(
            grad_y="*{}", grad_new_tail="*fp32", grad_x="*{}", grad_tail="*fp32", parts="*fp32"
        ),
    }
    shapes = [("bf16", 2560, 4, False), ("bf16", 2048, 4, True), ("fp32", 90, 3, False)]
    for kernel, more in kernels.items():
        for dtype, num_channels, width, with_docs in shapes:
            types = {name: text.format(dtype) for name, text in (pointers | more).items()}
            types |= dict(num_tokens="i32", num_blocks="i32", length="i32")
            walk = FORWARD if kernel is short_conv_kernel else BACKWARD
            constexprs, num_warps = _constexprs(num_channels, width, 2 if dtype == "bf16" else 4, walk)
            if not with_docs:
                types = {name: text for name, text in types.items() if name not in ("doc_start", "bias")}
                constexprs |= dict(doc_start=None, bias=None)
            name = f"{kernel.__name__} {dtype} C={num_channels} W={width} docs,bias={with_docs}"
            yield AotCase(name, kernel, types, constexprs, num_warps)
