"""Mamba-3's Out for Hopper, in Gluon, which makes q and k itself.

Read from memory, rows of q and k would be more than half of what Out and Local move in the forward. B and C are shared
by the heads: a unit of work is a chunk and a few heads. Eight warps keep B and C in registers and make q and k of one
head after the other, see `hopper_mamba3_tiles`; eight others, which then have registers for it, take the products of
the head before and its y; a warp has the copy engine fetch states, x and z ahead. None of them waits at the end of a
unit: a program has many, one after the other.

In the notation of `mamba3`, with its layouts. For what `hopper_mamba3_local` is for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_mamba3_rows import make_rows, num_rounds, unit_of
from .hopper_mamba3_tiles import barriers, keep, log_two, number_places, numbers, power_of_two, release, sigmoid, starts

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk", "num_units"]


@gluon.jit
def _fetch(descs, slots, full, empty, lengths, H: gl.constexpr, HEADS: gl.constexpr):
    """x, z and the state of each head, as soon as the place is free."""
    x_desc, z_desc, states_desc = descs
    x_slots, z_slots, state_slots = slots
    _, num_chunks, first_chunk, num_units = lengths
    C: gl.constexpr = x_slots.shape[1]
    P: gl.constexpr = x_slots.shape[2]
    SLOTS: gl.constexpr = x_slots.shape[0]
    size: gl.constexpr = x_desc.block_type.nbytes + z_desc.block_type.nbytes + states_desc.block_type.nbytes
    step = 0
    for i in range(0, num_rounds(num_units)):
        unit = gl.program_id(0) + i * gl.num_programs(0)
        n, first_head, heads = unit_of(unit, first_chunk, H, HEADS)
        for head in range(first_head, first_head + heads):
            slot = step % SLOTS
            ready = full.index(slot)
            row = (head * num_chunks + n) * P
            mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
            mbarrier.expect(ready, size)
            tma.async_copy_global_to_shared(states_desc, [row, 0], ready, state_slots.index(slot))
            tma.async_copy_global_to_shared(x_desc, [n * C, head * P], ready, x_slots.index(slot))
            tma.async_copy_global_to_shared(z_desc, [n * C, head * P], ready, z_slots.index(slot))
            step += 1


@gluon.jit
def _numbers(pointers, unit, lengths, H: gl.constexpr, HEADS: gl.constexpr, C: gl.constexpr):
    """Gate sums, g and s of a unit; of none, where there is none."""
    gate_sum_ptr, own_ptr, scale_ptr, _, _ = pointers
    _, num_chunks, first_chunk, num_units = lengths
    n, first_head, heads = unit_of(unit, first_chunk, H, HEADS)
    heads = gl.where(unit < num_units, heads, 0)
    first = (first_head.to(gl.int64) * num_chunks + n) * C
    sums = numbers(gate_sum_ptr + first, num_chunks * C, heads, HEADS, C)
    own = numbers(own_ptr + first, num_chunks * C, heads, HEADS, C)
    return sums, own, numbers(scale_ptr + first, num_chunks * C, heads, HEADS, C)


@gluon.jit
def _read(
    y_desc, pointers, places, tiles, slots, scores, y_tile, rows_full, rows_empty, loads_full, loads_empty, lengths,
    H: gl.constexpr, HAS_DOCS: gl.constexpr,
):  # fmt: skip
    """y of each head."""
    gate_sum_ptr, own_ptr, scale_ptr, D_ptr, doc_start_ptr = pointers
    all_sums, all_own, all_written = places
    x_slots, z_slots, state_slots = slots
    HEADS: gl.constexpr = all_sums.shape[0]
    C: gl.constexpr = all_sums.shape[1]
    P: gl.constexpr = x_slots.shape[2]
    W: gl.constexpr = tiles[0].shape[2]
    SLOTS: gl.constexpr = x_slots.shape[0]
    dtype: gl.constexpr = x_slots.dtype
    acc: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, P // 2, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    t = gl.expand_dims(gl.arange(0, C, layout=by_row), 1)
    s = gl.expand_dims(gl.arange(0, C, layout=by_column), 0)
    zeros = gl.zeros([C, C], gl.float32, acc)
    # Numbers that stay in registers: to compare anew for each head takes longer.
    seen = gl.where(t > s, 0.0, float("-inf"))
    diagonal = gl.where(t == s, 1.0, 0.0)
    num_tokens, num_chunks, first_chunk, num_units = lengths
    sums, own, scale = _numbers(pointers, gl.program_id(0), lengths, H, HEADS, C)
    step = 0
    for i in range(0, num_rounds(num_units)):
        unit = gl.program_id(0) + i * gl.num_programs(0)
        n, first_head, heads = unit_of(unit, first_chunk, H, HEADS)
        start = gl.expand_dims(starts(doc_start_ptr, num_tokens, n, C, by_row, HAS_DOCS), 1)
        if HAS_DOCS:
            seen = gl.where((t > s) & (s >= start), 0.0, float("-inf"))
        log = sums * 1.4426950408889634  # to base 2
        keep(all_sums, log)
        keep(all_own, own)
        keep(all_written, log - log_two(scale))
        # The next unit's: they are there when this one is over.
        sums, own, scale = _numbers(pointers, unit + gl.num_programs(0), lengths, H, HEADS, C)
        for h in range(0, heads):
            slot = step % SLOTS
            phase = (step // SLOTS) & 1
            q, q_rest = tiles[0].index(slot), tiles[1].index(slot)
            k, k_rest = tiles[2].index(slot).permute((1, 0)), tiles[3].index(slot).permute((1, 0))
            state = state_slots.index(slot).permute((1, 0))
            skip = gl.load(D_ptr + first_head + h).to(gl.float32)
            mbarrier.wait(rows_full.index(slot), phase)
            mbarrier.wait(loads_full.index(slot), phase)
            pair = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
            pair = warpgroup_mma(q_rest, k_rest, pair, is_async=True)
            y = warpgroup_mma(q, state.slice(0, W), zeros, use_acc=False, is_async=True)
            y = warpgroup_mma(q_rest, state.slice(W, W), y, is_async=True)
            row_sum = gl.expand_dims(all_sums.index(h).load(by_row), 1)
            itself = gl.expand_dims(all_own.index(h).load(by_row), 1)
            written = gl.expand_dims(all_written.index(h).load(by_column), 0)
            from_start = power_of_two(row_sum)
            if HAS_DOCS:
                from_start = gl.where(start < 0, from_start, 0.0)
            # Masked before the exponential: what is not seen may be above 0. On the diagonal is what a token reads of
            # itself.
            factor = power_of_two((row_sum - written) + seen) + itself * diagonal
            more = skip * diagonal
            pair = warpgroup_mma_wait(2, deps=(pair,))
            scores.store((pair * factor + more).to(dtype))
            tma.store_wait(pendings=0)  # of the y before; its tile is written behind the barrier that follows
            y = warpgroup_mma_wait(0, deps=(y,))
            release(rows_empty.index(slot))
            y = warpgroup_mma(scores, x_slots.index(slot), y * from_start, is_async=True)
            z = z_slots.index(slot).load(acc).to(gl.float32)
            gate = z * sigmoid(z)  # not by tanh(z / 2): where gates are closed nothing would be left of its digits
            y = warpgroup_mma_wait(0, deps=(y,))
            y_tile.store((y * gate).to(dtype))
            fence_async_shared()
            release(loads_empty.index(slot))
            tma.async_copy_shared_to_global(y_desc, [n * C, (first_head + h) * P], y_tile)
            step += 1
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=_LENGTHS)
def out_kernel(
    x_desc,
    z_desc,
    states_desc,
    y_desc,
    B_ptr,
    C_ptr,
    B_norm_ptr,
    C_norm_ptr,
    B_bias_ptr,
    C_bias_ptr,
    D_ptr,
    doc_start_ptr,
    B_factor_ptr,
    C_factor_ptr,
    speed_ptr,
    dt_ptr,
    own_ptr,
    scale_ptr,
    gate_sum_ptr,
    theta_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    num_units,
    H: gl.constexpr,
    N: gl.constexpr,
    P: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
    HEADS: gl.constexpr,
    HAS_DOCS: gl.constexpr,
    ROW_REGISTERS: gl.constexpr,
):
    """Out. A unit of work is a chunk and HEADS heads; a program has every so many-th of them."""
    SLOTS: gl.constexpr = 2
    dtype: gl.constexpr = x_desc.dtype
    tile: gl.constexpr = x_desc.layout
    x_slots = gl.allocate_shared_memory(dtype, [SLOTS, C, P], tile)
    z_slots = gl.allocate_shared_memory(dtype, [SLOTS, C, P], tile)
    state_slots = gl.allocate_shared_memory(dtype, [SLOTS, P, N], states_desc.layout)
    q = gl.allocate_shared_memory(dtype, [SLOTS, C, 2 * R], tile)
    q_rest = gl.allocate_shared_memory(dtype, [SLOTS, C, N - 2 * R], tile)
    k = gl.allocate_shared_memory(dtype, [SLOTS, C, 2 * R], tile)
    k_rest = gl.allocate_shared_memory(dtype, [SLOTS, C, N - 2 * R], tile)
    scores = gl.allocate_shared_memory(dtype, [C, C], tile)
    y_tile = gl.allocate_shared_memory(dtype, [C, P], tile)
    all_dt, all_theta = number_places(HEADS, C), number_places(HEADS, R)
    C_biases, B_biases = number_places(HEADS, N), number_places(HEADS, N)
    all_sums, all_own, all_written = number_places(HEADS, C), number_places(HEADS, C), number_places(HEADS, C)
    rows_full, rows_empty, loads_full, loads_empty = barriers(SLOTS), barriers(SLOTS), barriers(SLOTS), barriers(SLOTS)
    fence_async_shared()

    tiles, slots = (q, q_rest, k, k_rest), (x_slots, z_slots, state_slots)
    of_rows = (B_ptr, C_ptr, B_norm_ptr, C_norm_ptr, B_bias_ptr, C_bias_ptr, B_factor_ptr, C_factor_ptr)
    of_angles = (speed_ptr, dt_ptr, theta_ptr, doc_start_ptr)
    of_reading = (gate_sum_ptr, own_ptr, scale_ptr, D_ptr, doc_start_ptr)
    descs, lengths = (x_desc, z_desc, states_desc), (num_tokens, num_chunks, first_chunk, num_units)
    row_places, read_places = (all_dt, all_theta, C_biases, B_biases), (all_sums, all_own, all_written)
    gl.warp_specialize(
        [
            (
                _read,
                (
                    y_desc, of_reading, read_places, tiles, slots, scores, y_tile, rows_full, rows_empty, loads_full,
                    loads_empty, lengths, H, HAS_DOCS,
                ),
            ),
            (
                make_rows,
                (
                    (of_rows, of_angles), (None, None), row_places, tiles, rows_full, rows_empty, lengths,
                    H, N, R, HAS_DOCS, 2,
                ),
            ),
            (_fetch, (descs, slots, loads_full, loads_empty, lengths, H, HEADS)),
        ],
        [8, 1],
        [ROW_REGISTERS, 24],
    )  # fmt: skip
