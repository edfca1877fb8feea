"""q and k of a head for Hopper, in Gluon: what Mamba-3's kernels there share.

Eight warps have a chunk: each its own tokens, each lane its own columns. So what of B and C and of the speeds a thread
needs for a head is what it needs for every head, and stays in its registers, B and C normalised and with the norms'
weights. Angles are sums within a thread and over the warps, and no tile moves before q and k are done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@gluon.jit
def _hardware(code: gl.constexpr, x):
    """One of the functions of one argument that the hardware has, off by one or two units in the last place."""
    return gl.inline_asm_elementwise(code, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def power_of_two(x):
    return _hardware("ex2.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def log_two(x):
    return _hardware("lg2.approx.ftz.f32 $0, $1;", x)


@gluon.jit
def exponential(x):
    return power_of_two(x * 1.4426950408889634)


@gluon.jit
def sigmoid(x):
    return _hardware("rcp.approx.ftz.f32 $0, $1;", 1.0 + exponential(-x))


@gluon.jit
def sine_cosine(angle):
    """As `mamba3_tiles.sine_cosine`."""
    # To the nearest whole number, as float32 rounds where its last digit is 1.
    turns = (angle * 0.15915494309189535 + 12582912.0) - 12582912.0
    angle = angle - turns * 6.28125 - turns * 0.0019353071795864769
    return _hardware("sin.approx.ftz.f32 $0, $1;", angle), _hardware("cos.approx.ftz.f32 $0, $1;", angle)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _add_from_start(a, a_starts, b, b_starts):
    return gl.where(b_starts != 0, b, a + b), a_starts | b_starts


@gluon.jit
def rotation(speed, dt, theta, start, ts, HAS_DOCS: gl.constexpr):
    """Sine and cosine of every token's angle, by sums over its document's tokens in order."""
    turns = speed * gl.expand_dims(dt, 1)
    theta = gl.expand_dims(theta, 0)
    if HAS_DOCS:
        is_start, turns = gl.broadcast(gl.expand_dims(gl.where(start == ts, 1, 0).to(gl.int8), 1), turns)
        turns, is_start = gl.associative_scan((turns, is_start), 0, _add_from_start)
        return sine_cosine(turns + gl.where(gl.expand_dims(start, 1) < 0, theta, 0.0))
    else:
        return sine_cosine(gl.associative_scan(turns, 0, _add) + theta)


@gluon.jit
def _group(row_ptr, factor, norm_ptr, in_chunk, ts, columns, N: gl.constexpr):
    """These columns of B or C of the chunk's tokens, normalised and with the norm's weights; float32."""
    offset = gl.expand_dims(ts, 1) * N + gl.expand_dims(columns, 0)
    row = gl.load(row_ptr + offset, mask=gl.expand_dims(in_chunk, 1), other=0.0).to(gl.float32)
    return row * gl.expand_dims(factor, 1) * gl.expand_dims(gl.load(norm_ptr + columns).to(gl.float32), 0)


@gluon.jit
def groups(row_ptr, factor_ptr, norm_ptr, end, pairs: gl.constexpr, wide: gl.constexpr, sizes: gl.constexpr):
    """First and second columns of the pairs, and the others."""
    N: gl.constexpr = sizes[0]
    R: gl.constexpr = sizes[1]
    C: gl.constexpr = sizes[2]
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, pairs))
    angles = gl.arange(0, R, layout=gl.SliceLayout(0, pairs))
    factor = gl.load(factor_ptr + ts, mask=ts < end, other=0.0)
    first = _group(row_ptr, factor, norm_ptr, ts < end, ts, 2 * angles, N)
    second = _group(row_ptr, factor, norm_ptr, ts < end, ts, 2 * angles + 1, N)
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, wide))
    others = 2 * R + gl.arange(0, N - 2 * R, layout=gl.SliceLayout(0, wide))
    factor = gl.load(factor_ptr + ts, mask=ts < end, other=0.0)
    return first, second, _group(row_ptr, factor, norm_ptr, ts < end, ts, others, N)


@gluon.jit
def groups_of_pairs(row_ptr, factor_ptr, norm_ptr, end, pairs: gl.constexpr, wide: gl.constexpr, sizes: gl.constexpr):
    """As `groups`, where a thread has two neighbouring angles: it loads all their columns at once."""
    N: gl.constexpr = sizes[0]
    R: gl.constexpr = sizes[1]
    C: gl.constexpr = sizes[2]
    both: gl.constexpr = gl.BlockedLayout([C // 16, 2, 2], [2, R // 2, 1], [8, 1, 1], [2, 1, 0])
    by_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, both))
    by_angle: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, both))
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, both)))
    angles = gl.expand_dims(gl.expand_dims(gl.arange(0, R, layout=by_angle), 0), 2)
    columns = 2 * angles + gl.expand_dims(gl.expand_dims(gl.arange(0, 2, layout=by_column), 0), 1)
    factor = gl.expand_dims(gl.expand_dims(gl.load(factor_ptr + ts, mask=ts < end, other=0.0), 1), 2)
    in_chunk = gl.expand_dims(gl.expand_dims(ts < end, 1), 2)
    ts = gl.expand_dims(gl.expand_dims(ts, 1), 2)
    row = gl.load(row_ptr + ts * N + columns, mask=in_chunk, other=0.0).to(gl.float32)
    first, second = gl.split(row * factor * gl.load(norm_ptr + columns).to(gl.float32))
    ts = gl.arange(0, C, layout=gl.SliceLayout(1, wide))
    others = 2 * R + gl.arange(0, N - 2 * R, layout=gl.SliceLayout(0, wide))
    factor = gl.load(factor_ptr + ts, mask=ts < end, other=0.0)
    rest = _group(row_ptr, factor, norm_ptr, ts < end, ts, others, N)
    return gl.convert_layout(first, pairs), gl.convert_layout(second, pairs), rest


@gluon.jit
def numbers(ptr, stride, heads, HEADS: gl.constexpr, WIDTH: gl.constexpr, STEP: gl.constexpr = 1):
    """WIDTH numbers of each head, float32: the first head's from `ptr` on, the next one's a stride later. STEP: 0 for
    WIDTH times the same one.

    A program takes those of all its heads ahead: in the loop there would be nothing to do until they come.
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    i = gl.arange(0, HEADS * WIDTH, layout=line)
    offset = (i // WIDTH).to(gl.int64) * stride + i % WIDTH * STEP
    return gl.load(ptr + offset, mask=i // WIDTH < heads, other=0.0).to(gl.float32)


@gluon.jit
def token_starts(doc_start_ptr, num_tokens, n, HEADS: gl.constexpr, C: gl.constexpr):
    """`starts` of each token, again for every head."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    position = gl.minimum(n * C + gl.arange(0, HEADS * C, layout=line) % C, num_tokens - 1)
    return gl.maximum(gl.load(doc_start_ptr + position) - n * C, -1).to(gl.int32)


@gluon.jit
def bias_numbers(ptr, heads, HEADS: gl.constexpr, N: gl.constexpr, R: gl.constexpr):
    """The same of a bias, with its columns apart."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    i = gl.arange(0, HEADS * N, layout=line)
    return gl.load(ptr + (i - i % N + true_columns(i % N, R)), mask=i // N < heads, other=0.0).to(gl.float32)


@gluon.jit
def true_columns(columns, R: gl.constexpr):
    """As `mamba3_tiles.true_columns`."""
    in_pair = gl.where(columns < R, 2 * columns, 2 * (columns - R) + 1)
    return gl.where(columns < 2 * R, in_pair, columns)


@gluon.jit
def number_places(HEADS: gl.constexpr, WIDTH: gl.constexpr):
    """In shared memory, a row for each head."""
    return gl.allocate_shared_memory(gl.float32, [HEADS, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def keep(place, values):
    """Puts `numbers` there."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    SIZE: gl.constexpr = place.shape[0] * place.shape[1]
    place._reinterpret(gl.float32, [SIZE], plain).store(values)


@gluon.jit
def release(barrier):
    """Says that a place is free, or full: only when all warps are done with it.

    A barrier alone does not keep the copy engine from a place that a load of this group still reads: the arithmetic
    with what is loaded, and the wait for it, may come after the barrier. The fence orders loads before copies, but the
    assembler need not wait for them at it: that it does where tiles are given back, a test sees in what it made.
    """
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(barrier)


@gluon.jit
def biases(row, pairs: gl.constexpr, wide: gl.constexpr, R: gl.constexpr):
    """As `groups`."""
    N: gl.constexpr = row.shape[0]
    first = row.slice(0, R).load(gl.SliceLayout(0, pairs))
    second = row.slice(R, R).load(gl.SliceLayout(0, pairs))
    rest = row.slice(2 * R, N - 2 * R).load(gl.SliceLayout(0, wide))
    return gl.expand_dims(first, 0), gl.expand_dims(second, 0), gl.expand_dims(rest, 0)


@gluon.jit
def turned(groups, biases, sin, cos):
    """q or k of a head."""
    first = groups[0] + biases[0]
    second = groups[1] + biases[1]
    return first * cos - second * sin, first * sin + second * cos, groups[2] + biases[2]


@gluon.jit
def place(tiles, rows):
    """Writes q or k: a tile of the turned columns, first and second ones side by side, and one of the others."""
    first, second, rest = rows
    dtype: gl.constexpr = tiles[0].dtype
    turned = gl.permute(gl.join(first.to(dtype), second.to(dtype)), (0, 2, 1))
    tiles[0].store(gl.reshape(turned, tiles[0].shape))
    tiles[1].store(rest.to(dtype))


@gluon.jit
def barriers(count: gl.constexpr):
    """That many barriers, of one arrival each."""
    places = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(places.index(i), count=1)
    return places


@gluon.jit
def fetch(descs, places, ready, rows, columns):
    """A tile each. With a barrier for each, of its own: on one, all warps would have to meet between the copies."""
    for j in gl.static_range(len(descs)):
        mbarrier.expect(ready[j], descs[j].block_type.nbytes)
    for j in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(descs[j], [rows[j], columns[j]], ready[j], places[j])


@gluon.jit
def two_tiles(dtype: gl.constexpr, layout: gl.constexpr):
    """Of the turned columns and of the others. Not one allocation, or there were barriers between their stores."""
    return gl.allocate_shared_memory(dtype, [64, 64], layout), gl.allocate_shared_memory(dtype, [64, 64], layout)


@gluon.jit
def starts(doc_start_ptr, num_tokens, n, C: gl.constexpr, layout: gl.constexpr, HAS_DOCS: gl.constexpr):
    """As `decays.document_starts`."""
    ts = gl.arange(0, C, layout=layout)
    if HAS_DOCS:
        position = gl.minimum(n * C + ts, num_tokens - 1)
        return gl.maximum(gl.load(doc_start_ptr + position) - n * C, -1).to(gl.int32)
    else:
        return gl.full([C], -1, gl.int32, layout)


@gluon.jit
def store_token(row_ptr, rows, last, wanted, pairs: gl.constexpr, wide: gl.constexpr, sizes: gl.constexpr):
    """k of one token as a row of `k_bound`, if it is wanted."""
    N: gl.constexpr = sizes[0]
    R: gl.constexpr = sizes[1]
    C: gl.constexpr = sizes[2]
    columns = gl.expand_dims(gl.arange(0, R, layout=gl.SliceLayout(0, pairs)), 0)
    ts = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, pairs)), 1)
    gl.store(row_ptr + columns + 0 * ts, rows[0], mask=(ts == last) & (columns < R) & wanted)
    gl.store(row_ptr + R + columns + 0 * ts, rows[1], mask=(ts == last) & (columns < R) & wanted)
    columns = gl.expand_dims(gl.arange(0, N - 2 * R, layout=gl.SliceLayout(0, wide)), 0)
    ts = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, wide)), 1)
    gl.store(row_ptr + 2 * R + columns + 0 * ts, rows[2], mask=(ts == last) & (columns < N - 2 * R) & wanted)
