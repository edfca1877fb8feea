"""What a segment's walk does to any state, for Hopper, in Gluon: `transition`'s kernels with MAPS.

The walks are those of `hopper_transition`, of which only the last state is kept: no warp writes, and a program takes so
little shared memory that two of ST's fit a multiprocessor.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .hopper_transition import (
    _LENGTHS,
    _barriers,
    _fetch,
    _fetch_back,
    _products_layout,
    _program,
    _segment_chunks,
    _walk,
    _walk_back,
)


@gluon.jit(do_not_specialize=_LENGTHS)
def transition_maps_kernel(
    k_desc,
    v_desc,
    solve_desc,
    factors_desc,
    state_in_ptr,
    starts_ptr,
    maps_ptr,
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
    """N of all segments but the last one, where the segments after them begin, and M of all but the first.

    Program = (head, pair of segments, block of BV columns of N or M).
    """
    dtype: gl.constexpr = k_desc.dtype
    block, part, head = _program(num_segments - 1, (V + K) // BV)
    of_keys = block * BV >= V
    segment = part + of_keys.to(gl.int32)
    first, end = _segment_chunks(segment, num_segments, first_chunk, end_chunk)

    acc: gl.constexpr = _products_layout(BV, gl.num_warps())
    ks = gl.arange(0, K, layout=gl.SliceLayout(1, acc))
    vs = block * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, acc))
    slots = (
        gl.allocate_shared_memory(dtype, [STAGES, C, K], k_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, BV], v_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, C], solve_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 4, C], factors_desc.layout),
    )
    states = gl.allocate_shared_memory(dtype, [1, K, BV], gl.NVMMASharedLayout.get_default_for([K, BV], gl.bfloat16))
    operand = gl.allocate_shared_memory(dtype, [1, C, BV], v_desc.layout)
    ready, empty = _barriers(STAGES), _barriers(STAGES)
    fence_async_shared()
    # The identity's columns where V's end, and 0 before.
    state = gl.where(ks[:, None] == vs[None, :] - V, 1.0, 0.0)
    if segment == 0:
        state = gl.load(state_in_ptr + head.to(gl.int64) * (K * V) + ks[:, None] * V + vs[None, :])
    # One tensor of pointers, made of numbers: two to choose from would take registers through the whole walk.
    if of_keys:
        row_length = K
        matrix = maps_ptr + ((head * (num_segments - 1) + part).to(gl.int64) * (K * K) - V)
    else:
        row_length = V
        matrix = starts_ptr + (head * num_segments + part + 1).to(gl.int64) * (K * V)
    state_out = matrix + (ks[:, None] * row_length + vs[None, :])
    # Beyond the last column of all heads: the copy engine fills the tile with zeros.
    v_column = gl.where(of_keys, H * V, head * V + block * BV)
    columns = ((head // (H // HK)) * K, v_column)
    descs = (k_desc, v_desc, solve_desc, factors_desc)
    barriers = (ready, empty, ready, ready, ready)
    gl.warp_specialize(
        [
            (_walk, (state, state_out, True, slots, states, operand, operand, barriers, end - first, False)),
            (_fetch, (descs, columns, slots, ready, empty, head * num_chunks, first, end)),
        ],
        [1],
        [24],
    )


@gluon.jit(do_not_specialize=_LENGTHS)
def transition_backward_maps_kernel(
    q_desc,
    k_desc,
    solve_desc,
    grad_y_desc,
    scores_desc,
    factors_desc,
    grad_state_in_ptr,
    ends_ptr,
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
    """What the walks through all segments but the first add to E, where the segments before them end."""
    dtype: gl.constexpr = k_desc.dtype
    block, part, head = _program(num_segments - 1, V // BV)
    first, end = _segment_chunks(part + 1, num_segments, first_chunk, end_chunk)

    acc: gl.constexpr = _products_layout(BV, gl.num_warps())
    ks = gl.arange(0, K, layout=gl.SliceLayout(1, acc))
    vs = block * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, acc))
    state_offset = ks[:, None] * V + vs[None, :]
    slots = (
        gl.allocate_shared_memory(dtype, [STAGES, C, K], q_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, K], k_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, C], solve_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, BV], grad_y_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, C], scores_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 4, C], factors_desc.layout),
    )
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, BV], gl.bfloat16)
    states = gl.allocate_shared_memory(dtype, [STAGES, K, BV], layout)
    scaled_y = gl.allocate_shared_memory(dtype, [1, C, BV], grad_y_desc.layout)
    operand = gl.allocate_shared_memory(dtype, [1, C, BV], grad_y_desc.layout)
    ready, empty = _barriers(STAGES), _barriers(STAGES)
    fence_async_shared()
    state = gl.zeros([K, BV], gl.float32, acc)
    if part == num_segments - 2:
        state = gl.load(grad_state_in_ptr + head.to(gl.int64) * (K * V) + state_offset)
    state_out = ends_ptr + (head * num_segments + part).to(gl.int64) * (K * V) + state_offset
    descs = (q_desc, k_desc, solve_desc, grad_y_desc, scores_desc, factors_desc)
    columns = ((head // (H // HK)) * K, head * V + block * BV)
    barriers = (ready, empty, ready, ready, ready)
    steps = end - first
    gl.warp_specialize(
        [
            (_walk_back, (state, state_out, True, slots, states, operand, scaled_y, operand, barriers, steps, False)),
            (_fetch_back, (descs, columns, slots, ready, empty, head * num_chunks, first, end)),
        ],
        [1],
        [24],
    )
