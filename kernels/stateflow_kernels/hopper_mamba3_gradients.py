"""Mamba-3's Queries and Keys in one kernel for Hopper, in Gluon: each tile of a chunk and head is read once.

The two kernels of `mamba3_gradients`, whose docstring says what is computed and what must cancel, wait for memory and
for each other's warps more than they compute. Here three warpgroups (`hopper_mamba3_groups`) share the tiles of one
chunk and head in shared memory: one has the pairs of tokens and the gradients of the queries, one those of the keys and
of the turns, one those of z and x. A warp has the copy engine fetch the next head's tiles, each as soon as all that
read its place are done; one has it write; one makes the numbers of each token from the gates, one the gradients of the
gates.

A program walks through some heads of one chunk. So what is summed over heads, the parts of B's, C's and the speeds'
gradients, stays on the chip and is written once for them all.

Of q, k, S and E the columns that turn come first (of each pair the first, then the second). What a token reads of
itself is on the diagonal of the scores, rounded with them as in the forward.

Nothing in the loops may be spilled: with all of shared memory taken, local memory has next to no cache, and a load of a
spilled register takes about 450 cycles, as long as a product. So what would fill registers is not kept, see
`unknown_zero`, and registers are shared out so that each group has just enough.

For B = 1, N = 128, P = 64, R = 32 and 16-bit inputs. All barriers are waited for before the products that follow are
started, and the products before the next barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .hopper_common import release, tiles_at
from .hopper_mamba3_groups import (
    AT_END,
    BOTH,
    COUNT,
    DT,
    FROM_START,
    FROM_STATE,
    GATE,
    GATE_SUM,
    GRAD_BOTH,
    GRAD_STATE,
    GRADS,
    LOG_COLUMN,
    LOG_ROW,
    NUMBERS,
    OWED_K,
    OWED_TURN,
    OWED_V,
    OWN,
    READERS,
    ROWS,
    SKIP,
    STATE,
    SUMS,
    TAKERS,
    TO_END,
    TRACE,
    VALUES,
    WRITTEN,
    keys,
    queries,
    reciprocal,
    starts,
    values,
)
from .hopper_mamba3_tiles import log_two

_LENGTHS = ["num_tokens", "num_chunks", "first_chunk"]


@gluon.jit
def _two_barriers(count: gl.constexpr):
    """One for each of two places."""
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=count)
    mbarrier.init(barriers.index(1), count=count)
    return barriers


@gluon.jit
def _barrier(count: gl.constexpr):
    """With an allocation of its own: between uses of one allocation all warps of a group would have to meet."""
    barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(barrier, count=count)
    return barrier


@gluon.jit
def _first(place, layout: gl.constexpr):
    """The first of four equal numbers a token."""
    all_four: gl.constexpr = gl.BlockedLayout([2, 4], [32, 1], [1, 1], [1, 0])
    pairs = gl.reshape(place.load(all_four), [place.shape[0], 2, 2])
    left, _ = gl.split(gl.permute(pairs, (0, 2, 1)))
    first, _ = gl.split(left)
    return gl.convert_layout(first, layout)


@gluon.jit
def _gates(sums, barriers, ptrs, head, n, num_chunks, steps, C: gl.constexpr):
    """The gradients of each head's gate sums and of s and g."""
    scale_ptr, decay_ptr, grad_gate_ptr, grad_scale_ptr, grad_own_ptr, grad_both_ptr = ptrs
    _, _, made, taken = barriers
    line: gl.constexpr = gl.BlockedLayout([C // 32], [32], [1], [0])
    ts = gl.arange(0, C, layout=line)
    for i in range(0, steps):
        place = i & 1
        phase = i >> 1 & 1
        chunk = (head + i) * num_chunks + n
        token = chunk * C + ts
        scale = gl.load(scale_ptr + token)
        decay = gl.load(decay_ptr + chunk)
        mbarrier.wait(made[SUMS].index(place), phase)
        read_by = _first(sums[LOG_COLUMN].index(place), line)
        both = sums[BOTH].index(place).load(line)
        at_end = sums[AT_END].index(place).load(line)
        grad_both = sums[GRAD_BOTH].index(place).load(line)
        trace = sums[TRACE].index(place).load(line)
        grad_gate = _first(sums[LOG_ROW].index(place), line) - read_by + sums[FROM_STATE].index(place).load(line)
        of_state = gl.sum(at_end + decay * trace, axis=0)
        grad_gate = grad_gate - at_end + gl.where(ts == C - 1, of_state, 0.0)
        # <k, dkh>, from what is there: see `key_gradients_kernel`.
        per_scale = gl.where(scale > 0.0, reciprocal(gl.where(scale > 0.0, scale, 1.0)), 0.0)
        grad_scale = (read_by + at_end) * per_scale
        gl.store(grad_gate_ptr + token, grad_gate)
        gl.store(grad_scale_ptr + token, grad_scale)
        gl.store(grad_own_ptr + token, grad_scale + grad_both * both)
        gl.store(grad_both_ptr + token, grad_both)
        # What was loaded has been stored.
        release(taken[SUMS].index(place))


@gluon.jit
def _numbers(
    numbers, barriers, token_ptrs, owed_ptrs, doc_start_ptr, head, n, num_tokens, num_chunks, steps, C: gl.constexpr,
    N: gl.constexpr, P: gl.constexpr, R: gl.constexpr, HAS_DOCS: gl.constexpr,
):  # fmt: skip
    """The numbers of each head's tokens. All loads of a head are under way at once."""
    dt_ptr, own_ptr, scale_ptr, gate_sum_ptr, D_ptr = token_ptrs
    grad_v_out_ptr, grad_v_bound_ptr, owed_k_ptr, k_bound_ptr = owed_ptrs
    full, empty, _, _ = barriers
    line: gl.constexpr = gl.BlockedLayout([C // 32], [32], [1], [0])
    short: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ts = gl.arange(0, C, layout=line)
    angles = gl.arange(0, R, layout=short)
    start = ts * 0 - 1
    last_start = start
    if HAS_DOCS:
        start = starts(doc_start_ptr, n, num_tokens, C, line)
        position = gl.minimum(n * C + C, num_tokens) - 1
        last_start = (gl.load(doc_start_ptr + (position + ts * 0)) - n.to(gl.int64) * C).to(gl.int32)
    is_final = ts * 0 + n == num_chunks - 1
    for i in range(0, steps):
        place = i & 1
        first = COUNT * place
        this = head + i
        chunk = this * num_chunks + n
        token = chunk * C + ts
        dt = gl.load(dt_ptr + token)
        own = gl.load(own_ptr + token)
        scale = gl.load(scale_ptr + token)
        gate_sum = gl.load(gate_sum_ptr + token)
        gate_total = gl.load(gate_sum_ptr + (chunk * C + (ts * 0 + C - 1)))
        skip = gl.load(D_ptr + (this + ts * 0)).to(gl.float32)
        # What the chunk after this one, or the next call, owes to the last token.
        owed_v_out = gl.load(grad_v_out_ptr + (this * P + ts), mask=is_final, other=0.0)
        owed_v = gl.load(grad_v_bound_ptr + ((chunk + 1) * P + ts), mask=is_final == 0, other=0.0)
        owed_ptr = owed_k_ptr + (chunk * N + angles)
        owed_first = gl.load(owed_ptr)
        owed_second = gl.load(owed_ptr + R)
        owed_third = gl.load(owed_ptr + 2 * R)
        owed_fourth = gl.load(owed_ptr + 3 * R)
        bound = k_bound_ptr + ((this * (num_chunks + 1) + n + 1) * N + angles)
        bound_first = gl.load(bound)
        bound_second = gl.load(bound + R)
        mbarrier.wait(empty[NUMBERS].index(place), (i >> 1 & 1) ^ 1)
        numbers.index(first + DT).store(dt)
        numbers.index(first + OWN).store(own)
        log = gate_sum * 1.4426950408889634  # for powers of 2
        numbers.index(first + GATE_SUM).store(log)
        numbers.index(first + WRITTEN).store(log - log_two(scale))
        numbers.index(first + FROM_START).store(gl.where(start < 0, gl.exp(gate_sum), 0.0))
        to_end = gl.where(ts >= last_start, gate_total - gate_sum, float("-inf"))
        numbers.index(first + TO_END).store(scale * gl.exp(to_end))
        numbers.index(first + SKIP).store(skip)
        numbers.index(first + OWED_V).store(owed_v_out + owed_v)
        numbers.index(first + OWED_K).slice(0, R).store(owed_first)
        numbers.index(first + OWED_K).slice(R, R).store(owed_second)
        numbers.index(first + OWED_K + 1).slice(0, R).store(owed_third)
        numbers.index(first + OWED_K + 1).slice(R, R).store(owed_fourth)
        numbers.index(first + OWED_TURN).slice(0, R).store(owed_second * bound_first - owed_first * bound_second)
        release(full[NUMBERS].index(place))


@gluon.jit
def _expect(full, empty, what: gl.constexpr, phase, num_bytes: gl.constexpr):
    """Once its places are free. Returns the barrier of the copies that follow."""
    mbarrier.wait(empty[what], phase ^ 1)
    mbarrier.expect(full[what], num_bytes)
    return full[what]


@gluon.jit
def _fetch_into_cache(pointers, head, n, num_tokens, num_chunks, H: gl.constexpr, C: gl.constexpr, P: gl.constexpr):
    """Has what `_fetch` takes for a head brought from memory to the L2 cache: the places for it are not free yet.

    `pointers`: of four tensors with rows of P numbers of 16 bits, and of five in whole tiles: 16 KB, the last one 8 KB.
    """
    tile_code: gl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 16384; mov.u32 $0, 0;"
    half_code: gl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 8192; mov.u32 $0, 0;"
    line_code: gl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    lanes: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    t = gl.minimum(n * C + gl.arange(0, C, layout=lanes), num_tokens - 1).to(gl.int64)
    row = (t * H + head) * (2 * P)
    tile = (head.to(gl.int64) * num_chunks + n) * 16384
    for j in gl.static_range(4):
        address = pointers[j].to(gl.int64) + row
        gl.inline_asm_elementwise(line_code, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)
        address = pointers[4 + j].to(gl.int64) + tile
        gl.inline_asm_elementwise(tile_code, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)
    address = pointers[8].to(gl.int64) + tile // 2
    gl.inline_asm_elementwise(half_code, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fetch(descs, pointers, tiles, turns, barriers, head, n, num_tokens, num_chunks, steps, H: gl.constexpr):
    """All loads, of each head in the order in which the places become free."""
    x_desc, grad_read_desc, z_desc, grad_y_desc, states_desc, grad_states_desc, k_desc, q_desc, turns_desc = descs
    x, grad_read, z, grad_y, state, grad_state, k, q = tiles_at(tiles, 0)
    full, empty, _, _ = barriers
    C: gl.constexpr = x.shape[0]
    P: gl.constexpr = x.shape[1]
    of_x: gl.constexpr = x_desc.block_type.nbytes
    of_row: gl.constexpr = k_desc.block_type.nbytes
    for i in range(0, steps):
        phase = i & 1
        column = (head + i) * P
        row = ((head + i) * num_chunks + n) * C
        state_row = ((head + i) * num_chunks + n) * P
        bar = _expect(full, empty, GRAD_STATE, phase, grad_states_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(grad_states_desc, [state_row, 0], bar, grad_state)
        bar = _expect(full, empty, STATE, phase, states_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(states_desc, [state_row, 0], bar, state)
        bar = _expect(full, empty, VALUES, phase, 2 * of_x)
        tma.async_copy_global_to_shared(x_desc, [n * C, column], bar, x)
        tma.async_copy_global_to_shared(grad_read_desc, [n * C, column], bar, grad_read)
        bar = _expect(full, empty, ROWS, phase, 2 * of_row + turns_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [row, 0], bar, k)
        tma.async_copy_global_to_shared(q_desc, [row, 0], bar, q)
        tma.async_copy_global_to_shared(turns_desc, [row, 0], bar, turns)
        bar = _expect(full, empty, GATE, phase, 2 * of_x)
        tma.async_copy_global_to_shared(z_desc, [n * C, column], bar, z)
        tma.async_copy_global_to_shared(grad_y_desc, [n * C, column], bar, grad_y)
        if i + 1 < steps:
            _fetch_into_cache(pointers, head + i + 1, n, num_tokens, num_chunks, H, C, P)


@gluon.jit
def _write(grad_z_desc, grad_x_desc, tiles, barriers, head, n, steps):
    """dz and dx, which are in the places of z and dy."""
    _, _, z, grad_y, _, _, _, _ = tiles_at(tiles, 0)
    _, empty, made, _ = barriers
    C: gl.constexpr = z.shape[0]
    P: gl.constexpr = z.shape[1]
    for i in range(0, steps):
        column = (head + i) * P
        mbarrier.wait(made[GRADS], i & 1)
        tma.async_copy_shared_to_global(grad_z_desc, [n * C, column], z)
        tma.async_copy_shared_to_global(grad_x_desc, [n * C, column], grad_y)
        tma.store_wait(pendings=0)
        mbarrier.arrive(empty[GATE])


@gluon.jit(do_not_specialize=_LENGTHS)
def gradients_kernel(
    x_desc,
    grad_read_desc,
    z_desc,
    grad_y_desc,
    states_desc,
    grad_states_desc,
    k_rows_desc,
    q_rows_desc,
    turns_desc,
    grad_z_desc,
    grad_x_desc,
    x_ptr,
    grad_read_ptr,
    z_ptr,
    grad_y_ptr,
    states_ptr,
    grad_states_ptr,
    k_rows_ptr,
    q_rows_ptr,
    turns_ptr,
    doc_start_ptr,
    speed_ptr,
    D_ptr,
    dt_ptr,
    own_ptr,
    scale_ptr,
    gate_sum_ptr,
    decay_ptr,
    k_bound_ptr,
    owed_k_ptr,
    grad_v_bound_ptr,
    grad_v_out_ptr,
    query_rows_ptr,
    key_rows_ptr,
    speed_rows_ptr,
    query_bias_ptr,
    key_bias_ptr,
    grad_gate_ptr,
    grad_turn_ptr,
    turn_total_ptr,
    grad_scale_ptr,
    grad_own_ptr,
    grad_both_ptr,
    num_tokens,
    num_chunks,
    first_chunk,
    H: gl.constexpr,
    N: gl.constexpr,
    P: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_DOCS: gl.constexpr,
):
    """Queries and Keys of one chunk and GROUP heads. As those, but for what is summed over the group's heads:

    `query_rows`, `key_rows` [H / GROUP, NC, C, N], `speed_rows` [.., R]. `turns` [H, NC, C, 2 R] float16: cosines, then
    sines of the tokens' angles.
    """
    dtype: gl.constexpr = x_desc.dtype
    GROUPS: gl.constexpr = (H + GROUP - 1) // GROUP
    pid = gl.program_id(0)
    n = first_chunk + pid // GROUPS
    group = pid % GROUPS
    head = group * GROUP
    steps = gl.minimum(H - head, GROUP)
    layout: gl.constexpr = x_desc.layout
    wide_layout: gl.constexpr = k_rows_desc.layout
    tiles = (
        gl.allocate_shared_memory(dtype, [1, C, C], layout),
        gl.allocate_shared_memory(dtype, [1, C, C], layout),
        gl.allocate_shared_memory(dtype, [1, C, C], layout),
        gl.allocate_shared_memory(dtype, [1, C, C], layout),
        gl.allocate_shared_memory(dtype, [1, C, N], wide_layout),
        gl.allocate_shared_memory(dtype, [1, C, N], wide_layout),
        gl.allocate_shared_memory(dtype, [1, C, N], wide_layout),
        gl.allocate_shared_memory(dtype, [1, C, N], wide_layout),
    )
    turns = gl.allocate_shared_memory(gl.float16, [1, C, 2 * R], turns_desc.layout)
    made_tiles = (
        gl.allocate_shared_memory(dtype, [1, C, C], layout),
        gl.allocate_shared_memory(dtype, [1, C, C], layout),
        gl.allocate_shared_memory(gl.bfloat16, [1, C, C], layout),
    )
    query_tile = gl.allocate_shared_memory(dtype, [1, C, N], wide_layout)
    key_tile = gl.allocate_shared_memory(dtype, [1, C, N], wide_layout)
    seen = gl.allocate_shared_memory(gl.bfloat16, [1, C, C], layout)
    # Sums over heads of what does not turn: registers for those, too, would be too many.
    # A thread has its numbers of these in 16 bytes side by side: as tiles, two threads would often meet in a bank.
    thread: gl.constexpr = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16]]
    sum_layout: gl.constexpr = gl.SharedLinearLayout(thread + [[0, 32]])
    query_rest = gl.allocate_shared_memory(gl.float32, [C, C], sum_layout)
    key_rest = gl.allocate_shared_memory(gl.float32, [C, C], sum_layout)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 16], dtype)
    ones = gl.allocate_shared_memory(dtype, [1, C, 16], narrow)
    fill: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    ones.index(0).store(gl.full([C, 16], 1.0, dtype, fill))
    # A product's operands are of one type.
    log_ones = gl.allocate_shared_memory(gl.bfloat16, [1, C, 16], narrow)
    log_ones.index(0).store(gl.full([C, 16], 1.0, gl.bfloat16, fill))
    theta_layout: gl.constexpr = gl.SharedLinearLayout(thread)
    theta = gl.allocate_shared_memory(gl.float32, [C, R], theta_layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    numbers = gl.allocate_shared_memory(gl.float32, [2 * COUNT, C], plain)
    fours: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    spent = gl.allocate_shared_memory(gl.float32, [C], plain)
    sums = (
        gl.allocate_shared_memory(gl.float32, [2, C], plain),
        gl.allocate_shared_memory(gl.float32, [2, C], plain),
        gl.allocate_shared_memory(gl.float32, [2, C], plain),
        gl.allocate_shared_memory(gl.float32, [2, C], plain),
        gl.allocate_shared_memory(gl.float32, [2, C, 4], fours),
        gl.allocate_shared_memory(gl.float32, [2, C, 4], fours),
        gl.allocate_shared_memory(gl.float32, [2, C], plain),
    )

    full = (_barrier(1), _barrier(1), _barrier(1), _barrier(1), _barrier(1), _two_barriers(1))
    empty = (
        _barrier(READERS[0]),
        _barrier(READERS[1]),
        _barrier(READERS[2]),
        _barrier(READERS[3]),
        _barrier(READERS[4]),
        _two_barriers(READERS[5]),
    )
    made = (_barrier(1), _barrier(1), _barrier(1), _two_barriers(1))
    taken = (
        _barrier(TAKERS[0]),
        _barrier(TAKERS[1]),
        _barrier(TAKERS[2]),
        _two_barriers(TAKERS[3]),
    )
    fence_async_shared()
    barriers = (full, empty, made, taken)
    descs = (
        x_desc,
        grad_read_desc,
        z_desc,
        grad_y_desc,
        states_desc,
        grad_states_desc,
        k_rows_desc,
        q_rows_desc,
        turns_desc,
    )
    pointers = (
        x_ptr,
        grad_read_ptr,
        z_ptr,
        grad_y_ptr,
        states_ptr,
        grad_states_ptr,
        k_rows_ptr,
        q_rows_ptr,
        turns_ptr,
    )
    # Where each group has next to no loads of spilled numbers in its loop.
    KEY_REGISTERS: gl.constexpr = 200 if HAS_DOCS else 192
    group_rows = (group.to(gl.int64) * num_chunks + n) * C
    gl.warp_specialize(
        [
            (
                queries,
                (
                    tiles,
                    turns,
                    numbers,
                    made_tiles,
                    theta,
                    query_tile,
                    query_rest,
                    ones,
                    sums,
                    barriers,
                    query_rows_ptr + group_rows * N,
                    query_bias_ptr,
                    doc_start_ptr,
                    head,
                    n,
                    num_tokens,
                    num_chunks,
                    steps,
                    HAS_DOCS,
                ),
            ),
            (
                keys,
                (
                    tiles,
                    turns,
                    numbers,
                    made_tiles,
                    theta,
                    key_tile,
                    key_rest,
                    ones,
                    seen,
                    spent,
                    barriers,
                    key_rows_ptr + group_rows * N,
                    key_bias_ptr,
                    speed_ptr + n.to(gl.int64) * (C * R),
                    speed_rows_ptr + group_rows * R,
                    grad_turn_ptr,
                    turn_total_ptr,
                    doc_start_ptr,
                    head,
                    n,
                    num_tokens,
                    num_chunks,
                    steps,
                    R,
                    HAS_DOCS,
                ),
            ),
            (values, (tiles, numbers, made_tiles, log_ones, sums, barriers, n, num_tokens, steps)),
            (_fetch, (descs, pointers, tiles, turns.index(0), barriers, head, n, num_tokens, num_chunks, steps, H)),
            (_write, (grad_z_desc, grad_x_desc, tiles, barriers, head, n, steps)),
            (
                _numbers,
                (
                    numbers,
                    barriers,
                    (dt_ptr, own_ptr, scale_ptr, gate_sum_ptr, D_ptr),
                    (grad_v_out_ptr, grad_v_bound_ptr, owed_k_ptr, k_bound_ptr),
                    doc_start_ptr,
                    head,
                    n,
                    num_tokens,
                    num_chunks,
                    steps,
                    C,
                    N,
                    P,
                    R,
                    HAS_DOCS,
                ),
            ),
            (
                _gates,
                (
                    sums,
                    barriers,
                    (scale_ptr, decay_ptr, grad_gate_ptr, grad_scale_ptr, grad_own_ptr, grad_both_ptr),
                    head,
                    n,
                    num_chunks,
                    steps,
                    C,
                ),
            ),
        ],
        [4, 4, 1, 1, 1, 1],
        [KEY_REGISTERS, 112, 40, 40, 40, 40],
    )
