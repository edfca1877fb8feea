"""The part of Mamba-3's kernels for Hopper that makes q and k, in Gluon, and how programs share out the work.

A unit of work is a chunk and a few heads; a program has many, one after the other. Eight warps of it make q and k of
one head after the other, ahead of those that take products with them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_mamba3_tiles import (
    bias_numbers,
    biases,
    groups,
    groups_of_pairs,
    keep,
    numbers,
    place,
    release,
    rotation,
    starts,
    store_token,
    turned,
)


@gluon.jit
def num_rounds(num_units):
    """How many units this program has: every so many-th, as many as there are programs."""
    return (num_units - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def unit_of(i, first_chunk, H: gl.constexpr, HEADS: gl.constexpr):
    """The chunk of a unit of work, its first head, and the number of its heads."""
    GROUPS: gl.constexpr = (H + HEADS - 1) // HEADS
    first_head = i % GROUPS * HEADS
    return first_chunk + i // GROUPS, first_head, gl.minimum(H - first_head, HEADS)


@gluon.jit
def make_rows(
    pointers, left, places, tiles, full, empty, lengths, H: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
    HAS_DOCS: gl.constexpr, ANGLES: gl.constexpr = 1,
):  # fmt: skip
    """q and k of each head into tiles; if wanted, the last token's k and the cosines and sines of all angles, too.

    ANGLES: one or two, so many neighbouring ones has a thread. With two, sums over tokens have one more step, between
    lanes, but what is turned is loaded and stored in pairs.
    """
    k_bound_ptr, cos_sin_rows_ptr = left
    B_ptr, C_ptr, B_norm_ptr, C_norm_ptr, B_bias_ptr, C_bias_ptr, B_factor_ptr, C_factor_ptr = pointers[0]
    speed_ptr, dt_ptr, theta_ptr, doc_start_ptr = pointers[1]
    all_dt, all_theta, C_biases, B_biases = places
    HEADS: gl.constexpr = all_dt.shape[0]
    C: gl.constexpr = all_dt.shape[1]
    SLOTS: gl.constexpr = tiles[0].shape[0]
    sizes: gl.constexpr = (N, R, C)
    pairs: gl.constexpr = gl.BlockedLayout([C // (8 * ANGLES), ANGLES], [ANGLES, R // ANGLES], [8, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([C // 8, (N - 2 * R) // 32], [1, 32], [8, 1], [1, 0])
    num_tokens, num_chunks, first_chunk, num_units = lengths
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, pairs))
    angles = gl.arange(0, R, layout=gl.SliceLayout(0, pairs))
    by_angle = gl.expand_dims(ts, 1) * R + gl.expand_dims(angles, 0)
    step = 0
    for i in range(0, num_rounds(num_units)):
        unit = gl.program_id(0) + i * gl.num_programs(0)
        n, first_head, heads = unit_of(unit, first_chunk, H, HEADS)
        token = n.to(gl.int64) * C
        end = num_tokens - n * C
        chunk = first_head.to(gl.int64) * num_chunks + n
        dt = numbers(dt_ptr + chunk * C, num_chunks * C, heads, HEADS, C)
        theta = numbers(theta_ptr + chunk * R, num_chunks * R, heads, HEADS, R)
        C_bias = bias_numbers(C_bias_ptr + first_head * N, heads, HEADS, N, R)
        B_bias = bias_numbers(B_bias_ptr + first_head * N, heads, HEADS, N, R)
        if ANGLES == 1:
            C_groups = groups(C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, end, pairs, wide, sizes)
            B_groups = groups(B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, end, pairs, wide, sizes)
        else:
            C_groups = groups_of_pairs(C_ptr + token * N, C_factor_ptr + token, C_norm_ptr, end, pairs, wide, sizes)
            B_groups = groups_of_pairs(B_ptr + token * N, B_factor_ptr + token, B_norm_ptr, end, pairs, wide, sizes)
        speed = gl.load(speed_ptr + token * R + by_angle, mask=gl.expand_dims(ts < end, 1), other=0.0)
        start = starts(doc_start_ptr, num_tokens, n, C, gl.SliceLayout(1, pairs), HAS_DOCS)
        keep(all_dt, dt)
        keep(all_theta, theta)
        keep(C_biases, C_bias)
        keep(B_biases, B_bias)
        for h in range(0, heads):
            slot = step % SLOTS
            steps = all_dt.index(h).load(gl.SliceLayout(1, pairs))
            before = all_theta.index(h).load(gl.SliceLayout(0, pairs))
            sin, cos = rotation(speed, steps, before, start, ts, HAS_DOCS)
            head = (first_head + h).to(gl.int64)
            if cos_sin_rows_ptr is not None:
                row = cos_sin_rows_ptr + ((head * num_chunks + n) * (2 * C * R) + by_angle + R * gl.expand_dims(ts, 1))
                gl.store(row, cos.to(gl.float16))
                gl.store(row + R, sin.to(gl.float16))
            mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
            q = turned(C_groups, biases(C_biases.index(h), pairs, wide, R), sin, cos)
            place((tiles[0].index(slot), tiles[1].index(slot)), q)
            k = turned(B_groups, biases(B_biases.index(h), pairs, wide, R), sin, cos)
            place((tiles[2].index(slot), tiles[3].index(slot)), k)
            release(full.index(slot))
            if k_bound_ptr is not None:
                # Of a whole chunk, so that the compiler knows which of a thread's tokens it is none of.
                row = k_bound_ptr + (head * (num_chunks + 1) + n + 1) * N
                store_token(row, k, C - 1, end >= C, pairs, wide, sizes)
            step += 1
        if k_bound_ptr is not None:  # noqa: SIM102
            if end < C:
                for h in range(0, heads):
                    steps = all_dt.index(h).load(gl.SliceLayout(1, pairs))
                    before = all_theta.index(h).load(gl.SliceLayout(0, pairs))
                    sin, cos = rotation(speed, steps, before, start, ts, HAS_DOCS)
                    k = turned(B_groups, biases(B_biases.index(h), pairs, wide, R), sin, cos)
                    row = k_bound_ptr + ((first_head + h).to(gl.int64) * (num_chunks + 1) + n + 1) * N
                    store_token(row, k, end - 1, True, pairs, wide, sizes)
