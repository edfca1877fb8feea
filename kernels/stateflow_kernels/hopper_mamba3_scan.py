"""Mamba-3's walks through the chunks in Gluon: `mamba3.scan_kernel` and `mamba3_backward.scan_backward_kernel`.

Formulas and roundings are theirs. With few heads a warp's instructions are what a step costs, and Triton gives the
state the layout of the one load from outside, whose rows are the columns here: then each step takes its tile apart,
number by number. Here the state has the layout of the tiles throughout, 8 columns a lane. One warp a program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .hopper_mamba3_tiles import true_columns

_LENGTHS = ["num_chunks", "first_chunk", "end_chunk"]


@gluon.jit
def _fetch(slots, slot, states_ptr, k_ptr, v_ptr, wanted):
    """The tile of a chunk and the token before it; always one group of copies, with nothing in it unless `wanted`."""
    tiles, k_rows, v_rows = slots
    if wanted:
        async_copy.async_copy_global_to_shared(tiles.index(slot), states_ptr)
        async_copy.async_copy_global_to_shared(k_rows.index(slot), k_ptr)
        async_copy.async_copy_global_to_shared(v_rows.index(slot), v_ptr)
    async_copy.commit_group()


@gluon.jit
def _slots(dtype: gl.constexpr, STAGES: gl.constexpr, BV: gl.constexpr, N: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    return (
        gl.allocate_shared_memory(dtype, [STAGES, BV, N], plain),
        gl.allocate_shared_memory(gl.float32, [STAGES, N], line),
        gl.allocate_shared_memory(gl.float32, [STAGES, BV], line),
    )


@gluon.jit(do_not_specialize=_LENGTHS)
def scan_kernel(
    before_ptr,
    decay_ptr,
    k_bound_ptr,
    v_bound_ptr,
    state_in_ptr,
    states_ptr,
    state_out_ptr,
    k_out_ptr,
    num_chunks,
    first_chunk,
    end_chunk,
    N: gl.constexpr,
    P: gl.constexpr,
    R: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Scan of BV rows of one head's state over first_chunk .. end_chunk - 1."""
    NB: gl.constexpr = P // BV
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [1, 1], [1, 0])
    k_line: gl.constexpr = gl.BlockedLayout([N // 32], [32], [1], [0])
    v_line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    dtype: gl.constexpr = states_ptr.dtype.element_ty
    pid = gl.program_id(0)
    head = (pid // NB).to(gl.int64)
    ps = (pid % NB) * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, layout))
    ns = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    inside = gl.expand_dims(ps, 1) * N + gl.expand_dims(ns, 0)
    outside = head * (N * P) + gl.expand_dims(true_columns(ns, R), 0) * P + gl.expand_dims(ps, 1)
    state = gl.load(state_in_ptr + outside)
    steps = end_chunk - first_chunk
    chunk = head * num_chunks + first_chunk
    states_ptr += chunk * (P * N) + inside
    k_ptr = k_bound_ptr + ((chunk + head) * N + gl.arange(0, N, layout=k_line))
    v_ptr = v_bound_ptr + ((chunk + head) * P + (pid % NB) * BV + gl.arange(0, BV, layout=v_line))
    slots = _slots(dtype, STAGES, BV, N)
    tiles, k_rows, v_rows = slots
    for i in gl.static_range(STAGES - 1):
        _fetch(slots, i, states_ptr + i * (P * N), k_ptr + i * N, v_ptr + i * P, i < steps)
    before, decay = gl.load(before_ptr + chunk), gl.load(decay_ptr + chunk)
    for i in range(0, steps):
        slot = i % STAGES
        async_copy.wait_group(STAGES - 2)
        added = tiles.index(slot).load(layout).to(gl.float32)
        k = gl.expand_dims(k_rows.index(slot).load(gl.SliceLayout(0, layout)), 0)
        v = gl.expand_dims(v_rows.index(slot).load(gl.SliceLayout(1, layout)), 1)
        ahead = STAGES - 1
        _fetch(
            slots, (i + ahead) % STAGES, states_ptr + ahead * (P * N), k_ptr + ahead * N, v_ptr + ahead * P,
            i + ahead < steps,
        )  # fmt: skip
        state = state + (v * before) * k
        gl.store(states_ptr, state.to(dtype))
        state = state * decay + added
        # The last step's next ones are there, too, or not used: a load never leaves the tensor.
        following = gl.minimum(i + 1, steps - 1)
        before, decay = gl.load(before_ptr + (chunk + following)), gl.load(decay_ptr + (chunk + following))
        states_ptr += P * N
        k_ptr += N
        v_ptr += P
    gl.store(state_out_ptr + outside, state)
    k = gl.load(k_bound_ptr + ((head * (num_chunks + 1) + end_chunk) * N + ns))
    gl.store(k_out_ptr + (head * N + true_columns(ns, R)), k)


@gluon.jit(do_not_specialize=_LENGTHS)
def scan_backward_kernel(
    before_ptr,
    decay_ptr,
    k_bound_ptr,
    v_bound_ptr,
    grad_state_ptr,
    grad_states_ptr,
    grad_k_bound_ptr,
    grad_v_bound_ptr,
    grad_before_ptr,
    grad_state_in_ptr,
    num_chunks,
    first_chunk,
    end_chunk,
    N: gl.constexpr,
    P: gl.constexpr,
    R: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Scan back of BV rows of one head's state over end_chunk - 1 .. first_chunk."""
    NB: gl.constexpr = P // BV
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [1, 1], [1, 0])
    k_line: gl.constexpr = gl.BlockedLayout([N // 32], [32], [1], [0])
    v_line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    dtype: gl.constexpr = grad_states_ptr.dtype.element_ty
    pid = gl.program_id(0)
    block = pid % NB
    head = (pid // NB).to(gl.int64)
    ps = block * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, layout))
    ns = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    inside = gl.expand_dims(ps, 1) * N + gl.expand_dims(ns, 0)
    outside = head * (N * P) + gl.expand_dims(true_columns(ns, R), 0) * P + gl.expand_dims(ps, 1)
    grad = gl.load(grad_state_ptr + outside)
    steps = end_chunk - first_chunk
    chunk = head * num_chunks + (end_chunk - 1)
    grad_states_ptr += chunk * (P * N) + inside
    k_ptr = k_bound_ptr + ((chunk + head) * N + gl.arange(0, N, layout=k_line))
    v_ptr = v_bound_ptr + ((chunk + head) * P + (pid % NB) * BV + gl.arange(0, BV, layout=v_line))
    slots = _slots(dtype, STAGES, BV, N)
    tiles, k_rows, v_rows = slots
    for i in gl.static_range(STAGES - 1):
        _fetch(slots, i, grad_states_ptr - i * (P * N), k_ptr - i * N, v_ptr - i * P, i < steps)
    before, decay = gl.load(before_ptr + chunk), gl.load(decay_ptr + chunk)
    for i in range(0, steps):
        slot = i % STAGES
        async_copy.wait_group(STAGES - 2)
        added = tiles.index(slot).load(layout).to(gl.float32)
        k = gl.expand_dims(k_rows.index(slot).load(gl.SliceLayout(0, layout)), 0)
        v = v_rows.index(slot).load(gl.SliceLayout(1, layout))
        ahead = STAGES - 1
        _fetch(
            slots, (i + ahead) % STAGES, grad_states_ptr - ahead * (P * N), k_ptr - ahead * N, v_ptr - ahead * P,
            i + ahead < steps,
        )  # fmt: skip
        gl.store(grad_states_ptr, grad.to(dtype))
        grad = grad * decay + added
        read = gl.sum(grad * k, axis=1)
        grad_k = gl.sum(grad * gl.expand_dims(before * v, 1), axis=0)
        gl.store(grad_k_bound_ptr + ((chunk * NB + block) * N + ns), grad_k)
        gl.store(grad_v_bound_ptr + (chunk * P + ps), before * read)
        gl.store(grad_before_ptr + (chunk * NB + block), gl.sum(v * read, axis=0))
        chunk -= 1
        following = gl.minimum(i + 1, steps - 1) - (i + 1)
        before, decay = gl.load(before_ptr + (chunk - following)), gl.load(decay_ptr + (chunk - following))
        grad_states_ptr -= P * N
        k_ptr -= N
        v_ptr -= P
    gl.store(grad_state_in_ptr + outside, grad)
