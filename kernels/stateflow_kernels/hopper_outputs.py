"""ST and Out of the forward in one kernel for Hopper, in Gluon: neither states nor Vn leave the chip.

Out needs the state and Vn just when ST's walk has them in shared memory, as operands of its own products. So beside the
walk of `hopper_transition`, a second group of four warps takes O = rho (q S) + P Vn from there, with the scores P that
Pre left, while the walk waits for its chain. Formulas, operands, roundings and the order of products are those of
`transition` and `gated_delta.out_kernel`: the results have the same bits. For the sizes of `hopper_transition`.
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

from .decays import FACTORS
from .hopper_transition import _LENGTHS, _barriers, _factor, _products_layout, _program, _segment_chunks, _walk


@gluon.jit
def _fetch(descs, columns, slots, ready, empty, row, first_chunk, end_chunk):
    """All loads of both groups: each step's into its slot as soon as both are done with the step that had it last."""
    q_desc, k_desc, v_desc, solve_desc, scores_desc, factors_desc = descs
    q_slots, k_slots, v_slots, solve_slots, scores_slots, factors_slots = slots
    key_column, v_column = columns
    C: gl.constexpr = solve_desc.block_type.shape[0]
    STAGES: gl.constexpr = k_slots.shape[0]
    wide: gl.constexpr = 2 * k_desc.block_type.nbytes + v_desc.block_type.nbytes
    size: gl.constexpr = wide + 2 * solve_desc.block_type.nbytes + factors_desc.block_type.nbytes
    for n in range(first_chunk, end_chunk):
        i = n - first_chunk
        slot = i % STAGES
        bar = ready.index(slot)
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, size)
        tma.async_copy_global_to_shared(k_desc, [n * C, key_column], bar, k_slots.index(slot))
        tma.async_copy_global_to_shared(v_desc, [n * C, v_column], bar, v_slots.index(slot))
        tma.async_copy_global_to_shared(factors_desc, [(row + n) * FACTORS, 0], bar, factors_slots.index(slot))
        tma.async_copy_global_to_shared(solve_desc, [(row + n) * C, 0], bar, solve_slots.index(slot))
        tma.async_copy_global_to_shared(q_desc, [n * C, key_column], bar, q_slots.index(slot))
        tma.async_copy_global_to_shared(scores_desc, [(row + n) * C, 0], bar, scores_slots.index(slot))


@gluon.jit
def _read(slots, states, rows, outputs, barriers, steps):
    """O of each step, from what the walk has just made."""
    q_slots, scores_slots, factors_slots = slots
    ready, empty, states_full, rows_full, free, made, taken = barriers
    dtype: gl.constexpr = q_slots.dtype
    STAGES: gl.constexpr = q_slots.shape[0]
    TILES: gl.constexpr = states.shape[0]
    C: gl.constexpr = scores_slots.shape[1]
    BV: gl.constexpr = states.shape[2]
    acc: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BV, 16])
    zeros = gl.zeros([C, BV], gl.float32, acc)
    for i in range(0, steps):
        slot = i % STAGES
        tile = i % TILES
        phase = (i // TILES) & 1
        mbarrier.wait(ready.index(slot), (i // STAGES) & 1)
        mbarrier.wait(states_full.index(tile), phase)
        o = warpgroup_mma(q_slots.index(slot), states.index(tile), zeros, use_acc=False, is_async=True)
        q_scale = _factor(factors_slots.index(slot), 4, acc)
        o = warpgroup_mma_wait(0, deps=(o,))
        o = o * q_scale
        mbarrier.wait(rows_full.index(tile), phase)
        o = warpgroup_mma(scores_slots.index(slot), rows.index(tile), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        gl.thread_barrier()
        mbarrier.arrive(free.index(tile))
        mbarrier.arrive(empty.index(slot))
        mbarrier.wait(taken.index(tile), phase ^ 1)
        outputs.index(tile).store(o.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(made.index(tile))


@gluon.jit
def _write(o_desc, outputs, made, taken, column, first_chunk, steps):
    C: gl.constexpr = outputs.shape[1]
    TILES: gl.constexpr = outputs.shape[0]
    for i in range(0, steps):
        tile = i % TILES
        mbarrier.wait(made.index(tile), (i // TILES) & 1)
        tma.async_copy_shared_to_global(o_desc, [(first_chunk + i) * C, column], outputs.index(tile))
        tma.store_wait(pendings=0)
        mbarrier.arrive(taken.index(tile))


@gluon.jit(do_not_specialize=_LENGTHS)
def transition_out_kernel(
    q_desc,
    k_desc,
    v_desc,
    solve_desc,
    scores_desc,
    factors_desc,
    o_desc,
    state_in_ptr,
    state_out_ptr,
    num_chunks,
    first_chunk,
    end_chunk,
    num_segments,
    H: gl.constexpr,
    HK: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    C: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
):
    """ST and Out over the chunks first_chunk .. end_chunk - 1. Program = (head, segment, block of BV columns)."""
    dtype: gl.constexpr = k_desc.dtype
    TILES: gl.constexpr = 3 if STAGES % 2 else 2  # of states, Vn and outputs; divides STAGES
    block, segment, head = _program(num_segments, V // BV)
    first, end = _segment_chunks(segment, num_segments, first_chunk, end_chunk)
    column = block * BV
    row = head * num_chunks

    acc: gl.constexpr = _products_layout(BV, gl.num_warps())
    ks = gl.arange(0, K, layout=gl.SliceLayout(1, acc))
    vs = column + gl.arange(0, BV, layout=gl.SliceLayout(0, acc))
    state_offset = ks[:, None] * V + vs[None, :]
    q_slots = gl.allocate_shared_memory(dtype, [STAGES, C, K], q_desc.layout)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, C, K], k_desc.layout)
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, C, BV], v_desc.layout)
    solve_slots = gl.allocate_shared_memory(dtype, [STAGES, C, C], solve_desc.layout)
    scores_slots = gl.allocate_shared_memory(dtype, [STAGES, C, C], scores_desc.layout)
    factors_slots = gl.allocate_shared_memory(gl.float32, [STAGES, 8, C], factors_desc.layout)
    states = gl.allocate_shared_memory(
        dtype, [TILES, K, BV], gl.NVMMASharedLayout.get_default_for([K, BV], gl.bfloat16)
    )
    rows = gl.allocate_shared_memory(dtype, [TILES, C, BV], o_desc.layout)
    outputs = gl.allocate_shared_memory(dtype, [TILES, C, BV], o_desc.layout)
    operand = gl.allocate_shared_memory(dtype, [1, C, BV], o_desc.layout)
    ready = _barriers(STAGES)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2)
    states_full, rows_full, free = _barriers(TILES), _barriers(TILES), _barriers(TILES)
    made, taken = _barriers(TILES), _barriers(TILES)
    walking = (ready, empty, states_full, rows_full, free)
    reading = (ready, empty, states_full, rows_full, free, made, taken)
    fence_async_shared()
    state = gl.load(state_in_ptr + (head * num_segments + segment).to(gl.int64) * (K * V) + state_offset)
    state_out = state_out_ptr + head.to(gl.int64) * (K * V) + state_offset
    is_last = segment == num_segments - 1
    descs = (q_desc, k_desc, v_desc, solve_desc, scores_desc, factors_desc)
    slots = (q_slots, k_slots, v_slots, solve_slots, scores_slots, factors_slots)
    walk_slots = (k_slots, v_slots, solve_slots, factors_slots)
    v_column = head * V + column
    columns = ((head // (H // HK)) * K, v_column)
    steps = end - first
    gl.warp_specialize(
        [
            (_walk, (state, state_out, is_last, walk_slots, states, rows, operand, walking, steps, True)),
            (_read, ((q_slots, scores_slots, factors_slots), states, rows, outputs, reading, steps)),
            (_fetch, (descs, columns, slots, ready, empty, row, first, end)),
            (_write, (o_desc, outputs, made, taken, v_column, first, steps)),
        ],
        [4, 1, 1],
        [96, 24, 24],
    )
