"""Mamba-3's Local and Local back in one kernel for Hopper, in Gluon: what the backward starts with.

Both take products with rows that are made here: A = V^T (e kh) with k, A' = dY^T (gam Q) with q. In shared memory
these are operands, and what the copy engine writes; e and s, and gam, are on the side of the values. As in
`hopper_mamba3_out` eight warps make q and k ahead of eight others that take the products, and a warp fetches.

In the notation of `mamba3` and `mamba3_backward`, with their layouts. For what `hopper_mamba3_local` is for.
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
from .hopper_mamba3_tiles import (
    barriers,
    exponential,
    keep,
    number_places,
    numbers,
    release,
    sigmoid,
    token_starts,
    true_columns,
)

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk", "num_units"]


@gluon.jit
def _fetch(descs, slots, full, empty, lengths, H: gl.constexpr, HEADS: gl.constexpr):
    """x, z and dy of each head, as soon as the place is free."""
    _, _, first_chunk, num_units = lengths
    C: gl.constexpr = slots[0].shape[1]
    P: gl.constexpr = slots[0].shape[2]
    SLOTS: gl.constexpr = slots[0].shape[0]
    step = 0
    for i in range(0, num_rounds(num_units)):
        n, first_head, heads = unit_of(gl.program_id(0) + i * gl.num_programs(0), first_chunk, H, HEADS)
        for head in range(first_head, first_head + heads):
            slot = step % SLOTS
            ready = full.index(slot)
            mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
            mbarrier.expect(ready, 3 * descs[0].block_type.nbytes)
            for j in gl.static_range(3):
                tma.async_copy_global_to_shared(descs[j], [n * C, head * P], ready, slots[j].index(slot))
            step += 1


@gluon.jit
def _write(desc, tiles, row):
    """The two halves of a tile."""
    W: gl.constexpr = tiles[0].shape[1]
    tma.async_copy_shared_to_global(desc, [row, 0], tiles[0])
    tma.async_copy_shared_to_global(desc, [row, W], tiles[1])


@gluon.jit
def _multiply(values, tiles):
    """values^T times both halves of q or k."""
    P: gl.constexpr = values.shape[1]
    W: gl.constexpr = tiles[0].shape[1]
    acc: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, W // 2, 16])
    zeros = gl.zeros([P, W], gl.float32, acc)
    first = warpgroup_mma(values.permute((1, 0)), tiles[0], zeros, use_acc=False, is_async=True)
    return first, warpgroup_mma(values.permute((1, 0)), tiles[1], zeros, use_acc=False, is_async=True)


@gluon.jit
def _factors(pointers, unit, lengths, H: gl.constexpr, HEADS: gl.constexpr, C: gl.constexpr, HAS_DOCS: gl.constexpr):
    """s e and gam of a unit's tokens; of none, where there is none."""
    gate_sum_ptr, scale_ptr, doc_start_ptr = pointers
    num_tokens, num_chunks, first_chunk, num_units = lengths
    n, first_head, heads = unit_of(unit, first_chunk, H, HEADS)
    heads = gl.where(unit < num_units, heads, 0)
    first = (first_head.to(gl.int64) * num_chunks + n) * C
    gate_sum = numbers(gate_sum_ptr + first, num_chunks * C, heads, HEADS, C)
    last_sum = numbers(gate_sum_ptr + (first + C - 1), num_chunks * C, heads, HEADS, C, 0)
    scale = numbers(scale_ptr + first, num_chunks * C, heads, HEADS, C)
    to_end, from_start = scale * exponential(last_sum - gate_sum), exponential(gate_sum)
    if HAS_DOCS:
        n = gl.minimum(n, num_chunks - 1)
        token = gl.arange(0, HEADS * C, layout=gl.BlockedLayout([1], [32], [8], [0])) % C
        last_start = gl.load(doc_start_ptr + (gl.minimum(n * C + C, num_tokens) - 1)) - n * C
        to_end = gl.where(token >= last_start, to_end, 0.0)
        from_start = gl.where(token_starts(doc_start_ptr, num_tokens, n, HEADS, C) < 0, from_start, 0.0)
    return to_end, from_start


@gluon.jit
def _hand_on(pointers, n, first_head, heads, lengths, H: gl.constexpr, HEADS: gl.constexpr, sizes: gl.constexpr):
    """v of the last token; before the first chunk k and v of the call before."""
    x_ptr, v_bound_ptr, k_bound_ptr, k_last_ptr, v_last_ptr = pointers
    num_tokens, num_chunks, _, _ = lengths
    N: gl.constexpr = sizes[0]
    P: gl.constexpr = sizes[1]
    R: gl.constexpr = sizes[2]
    C: gl.constexpr = sizes[3]
    line: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    last = gl.minimum(n * C + C, num_tokens) - 1
    i = gl.arange(0, HEADS * P, layout=line)
    v = gl.load(x_ptr + (last.to(gl.int64) * (H * P) + first_head * P + i), mask=i // P < heads, other=0.0)
    bound = (first_head + i // P).to(gl.int64) * (num_chunks + 1) + n + 1
    gl.store(v_bound_ptr + (bound * P + i % P), v.to(gl.float32), mask=i // P < heads)
    if n == 0:
        ns, vs = gl.arange(0, N, layout=line), gl.arange(0, P, layout=line)
        for h in range(0, heads):
            head = (first_head + h).to(gl.int64)
            first = head * (num_chunks + 1)
            gl.store(k_bound_ptr + (first * N + ns), gl.load(k_last_ptr + (head * N + true_columns(ns, R))))
            gl.store(v_bound_ptr + (first * P + vs), gl.load(v_last_ptr + (head * P + vs)))


@gluon.jit
def _add(
    descs, pointers, places, tiles, slots, operands, results, rows_full, rows_empty, loads_full, loads_empty, lengths,
    H: gl.constexpr, R: gl.constexpr, HAS_DOCS: gl.constexpr,
):  # fmt: skip
    """A, dY and A' of each head, and writes its q and k."""
    k_rows_desc, q_rows_desc, states_desc, grad_read_desc, grad_states_desc = descs
    of_factors, of_bounds = pointers
    all_to_end, all_from_start = places
    x_slots, z_slots, grad_y_slots = slots
    scaled, scaled_back, grad_read = operands
    added, added_back = results
    num_tokens, num_chunks, first_chunk, num_units = lengths
    HEADS: gl.constexpr = all_to_end.shape[0]
    C: gl.constexpr = all_to_end.shape[1]
    P: gl.constexpr = x_slots.shape[2]
    N: gl.constexpr = 2 * added[0].shape[1]
    sizes: gl.constexpr = (N, P, R, C)
    SLOTS: gl.constexpr = x_slots.shape[0]
    dtype: gl.constexpr = x_slots.dtype
    values: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // P, P // 8], [8, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, values)
    to_end, from_start = _factors(of_factors, gl.program_id(0), lengths, H, HEADS, C, HAS_DOCS)
    step = 0
    for i in range(0, num_rounds(num_units)):
        unit = gl.program_id(0) + i * gl.num_programs(0)
        n, first_head, heads = unit_of(unit, first_chunk, H, HEADS)
        keep(all_to_end, to_end)
        keep(all_from_start, from_start)
        # The next unit's: they are there when this one is over.
        to_end, from_start = _factors(of_factors, unit + gl.num_programs(0), lengths, H, HEADS, C, HAS_DOCS)
        _hand_on(of_bounds, n, first_head, heads, lengths, H, HEADS, sizes)
        for h in range(0, heads):
            slot = step % SLOTS
            phase = (step // SLOTS) & 1
            q = (tiles[0].index(slot), tiles[1].index(slot))
            k = (tiles[2].index(slot), tiles[3].index(slot))
            row = (first_head + h) * num_chunks + n
            weight = gl.expand_dims(all_to_end.index(h).load(by_row), 1)
            weight_back = gl.expand_dims(all_from_start.index(h).load(by_row), 1)
            mbarrier.wait(loads_full.index(slot), phase)
            z = z_slots.index(slot).load(values).to(gl.float32)
            grad = grad_y_slots.index(slot).load(values).to(gl.float32) * (z * sigmoid(z))
            scaled.store((x_slots.index(slot).load(values).to(gl.float32) * weight).to(dtype))
            scaled_back.store((grad * weight_back).to(dtype))
            grad_read.store(grad.to(dtype))
            release(loads_empty.index(slot))
            mbarrier.wait(rows_full.index(slot), phase)
            first, second = _multiply(scaled, k)
            first_back, second_back = _multiply(scaled_back, q)
            _write(q_rows_desc, q, row * C)
            _write(k_rows_desc, k, row * C)
            tma.async_copy_shared_to_global(grad_read_desc, [n * C, (first_head + h) * P], grad_read)
            # Writes are over in the order in which they begin: q, k and dY in five, A and A' in two each.
            tma.store_wait(pendings=7)
            first, second = warpgroup_mma_wait(2, deps=(first, second))
            added[0].store(first.to(dtype))
            added[1].store(second.to(dtype))
            fence_async_shared()
            _write(states_desc, added, row * P)
            tma.store_wait(pendings=7)
            first_back, second_back = warpgroup_mma_wait(0, deps=(first_back, second_back))
            added_back[0].store(first_back.to(dtype))
            added_back[1].store(second_back.to(dtype))
            fence_async_shared()
            _write(grad_states_desc, added_back, row * P)
            tma.store_wait(pendings=4)
            release(rows_empty.index(slot))
            step += 1
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=_LENGTHS)
def both_kernel(
    x_desc,
    z_desc,
    grad_y_desc,
    k_rows_desc,
    q_rows_desc,
    states_desc,
    grad_read_desc,
    grad_states_desc,
    x_ptr,
    B_ptr,
    C_ptr,
    B_norm_ptr,
    C_norm_ptr,
    B_bias_ptr,
    C_bias_ptr,
    doc_start_ptr,
    k_last_ptr,
    v_last_ptr,
    B_factor_ptr,
    C_factor_ptr,
    speed_ptr,
    dt_ptr,
    scale_ptr,
    gate_sum_ptr,
    theta_ptr,
    k_bound_ptr,
    v_bound_ptr,
    cos_sin_rows_ptr,
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
    """Local and Local back. `cos_sin_rows` [H, NC, C, 2R]: as in `mamba3.local_kernel`."""
    SLOTS: gl.constexpr = 2
    dtype: gl.constexpr = x_desc.dtype
    tile: gl.constexpr = x_desc.layout
    x_slots = gl.allocate_shared_memory(dtype, [SLOTS, C, P], tile)
    z_slots = gl.allocate_shared_memory(dtype, [SLOTS, C, P], tile)
    grad_y_slots = gl.allocate_shared_memory(dtype, [SLOTS, C, P], tile)
    q = gl.allocate_shared_memory(dtype, [SLOTS, C, 2 * R], tile)
    q_rest = gl.allocate_shared_memory(dtype, [SLOTS, C, N - 2 * R], tile)
    k = gl.allocate_shared_memory(dtype, [SLOTS, C, 2 * R], tile)
    k_rest = gl.allocate_shared_memory(dtype, [SLOTS, C, N - 2 * R], tile)
    scaled = gl.allocate_shared_memory(dtype, [C, P], tile)
    scaled_back = gl.allocate_shared_memory(dtype, [C, P], tile)
    grad_read = gl.allocate_shared_memory(dtype, [C, P], tile)
    added = gl.allocate_shared_memory(dtype, [P, N // 2], tile)
    added_rest = gl.allocate_shared_memory(dtype, [P, N // 2], tile)
    added_back = gl.allocate_shared_memory(dtype, [P, N // 2], tile)
    added_back_rest = gl.allocate_shared_memory(dtype, [P, N // 2], tile)
    all_dt, all_theta = number_places(HEADS, C), number_places(HEADS, R)
    C_biases, B_biases = number_places(HEADS, N), number_places(HEADS, N)
    all_to_end, all_from_start = number_places(HEADS, C), number_places(HEADS, C)
    rows_full, rows_empty, loads_full, loads_empty = barriers(SLOTS), barriers(SLOTS), barriers(SLOTS), barriers(SLOTS)
    fence_async_shared()

    tiles, slots = (q, q_rest, k, k_rest), (x_slots, z_slots, grad_y_slots)
    operands, results = (scaled, scaled_back, grad_read), ((added, added_rest), (added_back, added_back_rest))
    of_rows = (B_ptr, C_ptr, B_norm_ptr, C_norm_ptr, B_bias_ptr, C_bias_ptr, B_factor_ptr, C_factor_ptr)
    of_angles = (speed_ptr, dt_ptr, theta_ptr, doc_start_ptr)
    of_factors = (gate_sum_ptr, scale_ptr, doc_start_ptr)
    of_bounds = (x_ptr, v_bound_ptr, k_bound_ptr, k_last_ptr, v_last_ptr)
    outputs = (k_rows_desc, q_rows_desc, states_desc, grad_read_desc, grad_states_desc)
    row_places, places = (all_dt, all_theta, C_biases, B_biases), (all_to_end, all_from_start)
    lengths = (num_tokens, num_chunks, first_chunk, num_units)
    gl.warp_specialize(
        [
            (
                _add,
                (
                    outputs, (of_factors, of_bounds), places, tiles, slots, operands, results, rows_full, rows_empty,
                    loads_full, loads_empty, lengths, H, R, HAS_DOCS,
                ),
            ),
            (
                make_rows,
                (
                    (of_rows, of_angles), (k_bound_ptr, cos_sin_rows_ptr), row_places, tiles, rows_full, rows_empty,
                    lengths, H, N, R, HAS_DOCS,
                ),
            ),
            (_fetch, ((x_desc, z_desc, grad_y_desc), slots, loads_full, loads_empty, lengths, H, HEADS)),
        ],
        [8, 1],
        [ROW_REGISTERS, 24],
    )  # fmt: skip
