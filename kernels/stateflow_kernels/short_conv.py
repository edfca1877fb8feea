"""The short convolution with boundary state: y_t = silu(bias + sum_j w_j x_{t-j}), and its backward.

A program takes some tokens of BC channels and walks over them token by token; a thread holds a few neighbouring
channels and keeps the last W inputs, and in the backward the W unfinished gradients, in registers. So every input is
read once, apart from the W-1 tokens before a program's first (forward) or behind its last (backward).

What makes a cut invisible to the last bit:

- Every sum is a chain of explicit fused multiply-adds, in the order that the definition gives: pre from the oldest
  input on; dx_s from the outgoing tail's gradient on, then w_j p_{s+j} for j = W-1 .. 0, which is why the backward
  walks against the tokens. Where a term is missing, a product with 0 is added, which changes no bits.
- silu and its derivative are one expression for all tokens.

The gradients of weight and bias are sums over tokens: each program writes its own part, a second pass adds up.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .aot import AotCase
from .primitives import rounded

# Tokens whose loads are in flight together. 8 take so many registers that too few warps fit.
UNROLL = 4
# Channels of a thread with W <= 4 (16 bytes of 16-bit inputs forward, 8 backward: again the registers), and the most
# warps of a program. A wider filter halves the channels.
FORWARD_SHAPE, BACKWARD_SHAPE = (8, 4), (4, 2)
# Tokens of a program: as few as fill the device (about 16 warps on each of 132 multiprocessors), within these bounds.
# More of them mean fewer halo tokens and fewer parts of the weight's gradient.
WANTED_WARPS = 2048
FORWARD_TOKENS, BACKWARD_TOKENS = (16, 64), (32, 256)


@triton.jit
def _weight_columns(weight, channel, in_channels, C: tl.constexpr, W: tl.constexpr, W2: tl.constexpr):
    """The W columns of weight [C, W], each float32 [BC]. One wide load: column by column it would be strided."""
    column = tl.arange(0, W2)
    mask = in_channels[:, None] & (column[None, :] < W)
    columns = tl.load(weight + channel[:, None] * W + column[None, :], mask=mask, other=0.0).to(tl.float32)
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.sum(tl.where(column[None, :] == j, columns, 0.0), axis=1),)
    return taps


@triton.jit
def _or_tail(token, tail, position, in_channels, C: tl.constexpr, W: tl.constexpr):
    """float32 [BC]: `token`, loaded from `position`, or before token 0 what the tail has there."""
    in_tail = (position < 0) & (position > -W)
    mask = tl.where(in_tail, in_channels, False)  # not &: the interpreter makes numbers of it
    from_tail = tl.load(tail + (position + (W - 1)) * C, mask=mask, other=0.0)
    return tl.where(in_tail, from_tail, token.to(tl.float32))


@triton.jit
def _input(x, tail, position, first, num_tokens, in_channels, C: tl.constexpr, W: tl.constexpr):
    """float32 [BC]: the input at `position`, 0 where there is none. The pointer x is at token `first`."""
    mask = tl.where((position >= 0) & (position < num_tokens), in_channels, False)
    token = tl.load(x + (position - first) * C, mask=mask, other=0.0)
    return _or_tail(token, tail, position, in_channels, C, W)


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
def _place(num_blocks, num_groups, UNROLL: tl.constexpr, C: tl.constexpr, BC: tl.constexpr):
    """Batch index, first token, index of the token block (counted over the batch) and channels of this program."""
    num_channel_blocks: tl.constexpr = (C + BC - 1) // BC
    program = tl.program_id(0)
    block = program // num_channel_blocks
    channel = (program % num_channel_blocks) * BC + tl.arange(0, BC)
    return (block // num_blocks).to(tl.int64), (block % num_blocks) * num_groups * UNROLL, block, channel


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "num_groups"])
def short_conv_kernel(
    x,  # [B, T, C]
    weight,  # [C, W]
    bias,  # [C] or None
    tail,  # [B, W-1, C] float32
    doc_start,  # [B, T] int64 or None
    y,  # [B, T, C]
    new_tail,  # [B, W-1, C] float32
    num_tokens,
    num_blocks,  # of num_groups * UNROLL tokens
    num_groups,
    C: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,  # the next power of two
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
):
    batch, first, _, channel = _place(num_blocks, num_groups, UNROLL, C, BC)
    in_channels = channel < C
    x += (batch * num_tokens + first) * C + channel
    y += (batch * num_tokens + first) * C + channel
    tail += batch * (W - 1) * C + channel
    new_tail += batch * (W - 1) * C + channel
    if doc_start is not None:
        doc_start += batch * num_tokens + first

    taps = _weight_columns(weight, channel, in_channels, C, W, W2)
    if bias is None:
        bias_C = tl.zeros([BC], tl.float32)
    else:
        bias_C = tl.load(bias + channel, mask=in_channels, other=0.0).to(tl.float32)
    window = ()
    for j in tl.static_range(W):
        window = window + (_input(x, tail, first + (j - W), first, num_tokens, in_channels, C, W),)
    for group in range(num_groups):
        begin = group * UNROLL
        tokens, masks, starts = (), (), ()
        for u in tl.static_range(UNROLL):
            here = first + begin + u < num_tokens
            mask = tl.where(here, in_channels, False)
            tokens = tokens + (tl.load(x + (begin + u) * C, mask=mask, other=0.0),)
            masks = masks + (mask,)
            if doc_start is None:
                starts = starts + (0,)
            else:
                starts = starts + (tl.load(doc_start + (begin + u), mask=here, other=0),)
        for u in tl.static_range(UNROLL):
            window = window[1:] + (tokens[u].to(tl.float32),)
            pre = _before_silu(window, taps, bias_C, first + begin + u, doc_start, starts[u], W)
            out = pre / (1.0 + tl.exp(-pre))
            tl.store(y + (begin + u) * C, rounded(out, y.dtype.element_ty), mask=masks[u])

    if first + num_groups * UNROLL >= num_tokens:
        for row in tl.static_range(W - 1):
            kept = _input(x, tail, num_tokens + (row - W + 1), first, num_tokens, in_channels, C, W)
            tl.store(new_tail + row * C, kept, mask=in_channels)


@triton.jit
def _before_silu_gradient(grad_y, window, taps, bias, position, doc_start, start, W: tl.constexpr):
    """float32 [BC]: p = dy silu'(pre) of the token at `position`."""
    pre = _before_silu(window, taps, bias, position, doc_start, start, W)
    sigmoid = 1.0 / (1.0 + tl.exp(-pre))
    return grad_y.to(tl.float32) * (sigmoid * tl.fma(pre, 1.0 - sigmoid, 1.0))


@triton.jit
def _add_to_inputs(grads, grad_pre, taps, position, doc_start, start, W: tl.constexpr):
    """`grads`, for the inputs x_{t-W+1} .. x_t, with what the token at `position` = t adds."""
    added = ()
    for j in tl.static_range(W):
        if doc_start is None:
            added = added + (tl.fma(taps[j], grad_pre, grads[j]),)
        else:
            part = tl.where(position - (W - 1) + j >= start, grad_pre, 0.0)
            added = added + (tl.fma(taps[j], part, grads[j]),)
    return added


@triton.jit
def _add_to_sums(sums, grad_pre, window, position, doc_start, start, W: tl.constexpr):
    """`sums`, the gradients of the weight's columns, with what the token at `position` adds."""
    added = ()
    for j in tl.static_range(W):
        if doc_start is None:
            added = added + (tl.fma(window[j], grad_pre, sums[j]),)
        else:
            part = tl.where(position - (W - 1) + j >= start, grad_pre, 0.0)
            added = added + (tl.fma(window[j], part, sums[j]),)
    return added


@triton.jit
def _tail_gradient(grad_new_tail, position, num_tokens, in_channels, C: tl.constexpr, W: tl.constexpr):
    """What the next chunk sends back for the input at `position`; 0 where that is not in the outgoing tail."""
    row = position - num_tokens + (W - 1)
    mask = tl.where((row >= 0) & (row < W - 1), in_channels, False)
    return tl.load(grad_new_tail + row * C, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "num_groups"])
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
    parts,  # [B * num_blocks, W + 1, C] float32: of the weight's columns, then of the bias
    num_tokens,
    num_blocks,
    num_groups,
    C: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
):
    batch, first, block, channel = _place(num_blocks, num_groups, UNROLL, C, BC)
    in_channels = channel < C
    length = num_groups * UNROLL
    x += (batch * num_tokens + first) * C + channel
    grad_x += (batch * num_tokens + first) * C + channel
    grad_y += (batch * num_tokens + first) * C + channel
    tail += batch * (W - 1) * C + channel
    grad_tail += batch * (W - 1) * C + channel
    grad_new_tail += batch * (W - 1) * C + channel
    parts += block.to(tl.int64) * (W + 1) * C + channel
    if doc_start is not None:
        doc_start += batch * num_tokens + first

    taps = _weight_columns(weight, channel, in_channels, C, W, W2)
    zero = tl.zeros([BC], tl.float32)
    if bias is None:
        bias_C = zero
    else:
        bias_C = tl.load(bias + channel, mask=in_channels, other=0.0).to(tl.float32)

    # The tokens behind this program's last: only what they add to the gradients of its inputs. At each token t,
    # `window` and `grads` belong to the inputs at t-W+1 .. t.
    end = first + length - 1
    window, grads, sums = (), (), ()
    for j in tl.static_range(W):
        window = window + (_input(x, tail, end + j, first, num_tokens, in_channels, C, W),)
        grads = grads + (zero,)
        sums = sums + (zero,)
    grads = (_tail_gradient(grad_new_tail, end, num_tokens, in_channels, C, W),) + grads[1:]
    for back in tl.static_range(W - 1):
        position = end + (W - 1 - back)
        here = position < num_tokens
        dy = tl.load(grad_y + (position - first) * C, mask=tl.where(here, in_channels, False), other=0.0)
        if doc_start is None:
            start = 0
        else:
            start = tl.load(doc_start + (position - first), mask=here, other=0)
        grad_pre = _before_silu_gradient(dy, window, taps, bias_C, position, doc_start, start, W)
        grads = _add_to_inputs(grads, grad_pre, taps, position, doc_start, start, W)
        entering = _tail_gradient(grad_new_tail, position - W, num_tokens, in_channels, C, W)
        grads = (entering,) + grads[: W - 1]
        entering = _input(x, tail, position - W, first, num_tokens, in_channels, C, W)
        window = (entering,) + window[: W - 1]

    sum_pre = zero
    for group in range(num_groups):
        begin = length - 1 - group * UNROLL
        tokens, dys, masks, starts = (), (), (), ()
        for u in tl.static_range(UNROLL):
            position = first + begin - u
            here = position < num_tokens
            mask = tl.where(here, in_channels, False)
            dys = dys + (tl.load(grad_y + (begin - u) * C, mask=mask, other=0.0),)
            masks = masks + (mask,)
            inside = (position >= W) & (position - W < num_tokens)
            mask = tl.where(inside, in_channels, False)
            tokens = tokens + (tl.load(x + (begin - u - W) * C, mask=mask, other=0.0),)
            if doc_start is None:
                starts = starts + (0,)
            else:
                starts = starts + (tl.load(doc_start + (begin - u), mask=here, other=0),)
        for u in tl.static_range(UNROLL):
            position = first + begin - u
            grad_pre = _before_silu_gradient(dys[u], window, taps, bias_C, position, doc_start, starts[u], W)
            grads = _add_to_inputs(grads, grad_pre, taps, position, doc_start, starts[u], W)
            tl.store(grad_x + (begin - u) * C, rounded(grads[W - 1], grad_x.dtype.element_ty), mask=masks[u])
            sums = _add_to_sums(sums, grad_pre, window, position, doc_start, starts[u], W)
            sum_pre += grad_pre
            entering = _tail_gradient(grad_new_tail, position - W, num_tokens, in_channels, C, W)
            grads = (entering,) + grads[: W - 1]
            entering = _or_tail(tokens[u], tail, position - W, in_channels, C, W)
            window = (entering,) + window[: W - 1]

    if first == 0:
        for row in tl.static_range(W - 1):
            tl.store(grad_tail + row * C, grads[row + 1], mask=in_channels)
    for j in tl.static_range(W):
        tl.store(parts + j * C, sums[j], mask=in_channels)
    tl.store(parts + W * C, sum_pre, mask=in_channels)


def _channel_block(num_channels: int, width: int, itemsize: int, shape: tuple[int, int]) -> tuple[int, int]:
    """Channels of a program and its warps."""
    channels, most_warps = shape
    per_warp = 32 * min(16 // itemsize, channels if width <= 4 else channels // 2)
    # The largest program of those that compute the fewest channels that are not there.
    num_warps = min((4, 2, 1), key=lambda n: (n > most_warps, -(-num_channels // (per_warp * n)) * n))
    return per_warp * num_warps, num_warps


def _launch_shape(x_BTC: Tensor, block_channels: int, num_warps: int, bounds: tuple[int, int]) -> tuple[int, int]:
    """The number of token blocks, and the groups of UNROLL tokens in each."""
    batch, num_tokens, num_channels = x_BTC.shape
    warps_a_token = batch * -(-num_channels // block_channels) * num_warps
    tokens = min(max(num_tokens * warps_a_token // WANTED_WARPS, bounds[0]), bounds[1])
    num_groups = min(tokens // UNROLL, -(-num_tokens // UNROLL))
    return -(-num_tokens // (num_groups * UNROLL)), num_groups


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def forward(
    x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, tail_BWC: Tensor, doc_start_BT: Tensor | None
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
    block_channels, num_warps = _channel_block(num_channels, width, x.element_size(), FORWARD_SHAPE)
    num_blocks, num_groups = _launch_shape(x, block_channels, num_warps, FORWARD_TOKENS)
    grid = (batch * num_blocks * -(-num_channels // block_channels),)
    short_conv_kernel[grid](
        x, weight, bias, tail, doc_start, y, new_tail, num_tokens, num_blocks, num_groups,
        C=num_channels, W=width, W2=triton.next_power_of_2(width), BC=block_channels, UNROLL=UNROLL,
        num_warps=num_warps,
    )  # fmt: skip
    return y, new_tail


def backward(
    grad_y_BTC: Tensor,
    grad_tail_BWC: Tensor,
    x_BTC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BWC: Tensor,
    doc_start_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias (computed in any case) and tail: float32 but for x's, which has x's dtype.

    Those of x and tail are the same bits wherever the sequence is cut. Arguments as in `forward`.
    """
    grad_y, grad_new_tail, x, weight, bias, tail, doc_start = _contiguous(
        grad_y_BTC, grad_tail_BWC, x_BTC, weight_CW, bias_C, tail_BWC, doc_start_BT
    )
    (batch, num_tokens, num_channels), width = x.shape, weight.shape[1]
    block_channels, num_warps = _channel_block(num_channels, width, x.element_size(), BACKWARD_SHAPE)
    num_blocks, num_groups = _launch_shape(x, block_channels, num_warps, BACKWARD_TOKENS)
    grad_x, grad_tail = torch.empty_like(x), torch.empty_like(tail)
    parts = torch.empty(batch * num_blocks, width + 1, num_channels, dtype=torch.float32, device=x.device)
    grid = (batch * num_blocks * -(-num_channels // block_channels),)
    short_conv_backward_kernel[grid](
        grad_y, grad_new_tail, x, weight, bias, tail, doc_start, grad_x, grad_tail, parts,
        num_tokens, num_blocks, num_groups,
        C=num_channels, W=width, W2=triton.next_power_of_2(width), BC=block_channels, UNROLL=UNROLL,
        num_warps=num_warps,
    )  # fmt: skip
    sums = parts.sum(0)
    return grad_x, sums[:width].t(), sums[width], grad_tail


def aot_cases() -> Iterator[AotCase]:
    pointers = dict(x="*{}", weight="*{}", bias="*{}", tail="*fp32", doc_start="*i64")
    kernels = {
        short_conv_kernel: dict(y="*{}", new_tail="*fp32"),
        short_conv_backward_kernel: dict(
            grad_y="*{}", grad_new_tail="*fp32", grad_x="*{}", grad_tail="*fp32", parts="*fp32"
        ),
    }
    shapes = [("bf16", 2048, 4, True), ("fp32", 90, 3, False)]
    for kernel, more in kernels.items():
        for dtype, num_channels, width, with_docs in shapes:
            types = {name: text.format(dtype) for name, text in (pointers | more).items()}
            types |= dict(num_tokens="i32", num_blocks="i32", num_groups="i32")
            shape = FORWARD_SHAPE if kernel is short_conv_kernel else BACKWARD_SHAPE
            block_channels, num_warps = _channel_block(num_channels, width, 2 if dtype == "bf16" else 4, shape)
            constexprs = dict(C=num_channels, W=width, W2=triton.next_power_of_2(width))
            constexprs |= dict(BC=block_channels, UNROLL=UNROLL)
            if not with_docs:
                types = {name: text for name, text in types.items() if name not in ("doc_start", "bias")}
                constexprs |= dict(doc_start=None, bias=None)
            name = f"{kernel.__name__} {dtype} C={num_channels} W={width} docs,bias={with_docs}"
            yield AotCase(name, kernel, types, constexprs, num_warps)
