"""Layouts, addresses and operands of the matrix kernel whose warps share a tile by key channels (Gluon, NVIDIA).

As gluon_parts.py with one axis in front: the warp, which holds one chunk of 16 key channels at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hybridstate.kernels.gluon_parts import _codes_to_bfloat16, _decay_of, _view

SPLIT4 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
SPLIT3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
SPLIT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def split_mma(N):
    """One 16 x 8 x 16 product a warp, batched over the warps."""
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[N, 1, 1], instr_shape=[1, 16, 8]
    )


@gluon.constexpr_function
def split_tile(W, N):
    """[warp, i, group, r % (8 / G), channel]."""
    return gl.BlockedLayout(
        [1, W // 8, 1, 1, 4], [1, 1, W // 32, 256 // W, 4], [N, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )


@gluon.constexpr_function
def split_scales(W, N):
    """[warp, group, channel] where the tile needs it."""
    return gl.SliceLayout(2, gl.SliceLayout(1, split_tile(W, N)))


@gluon.constexpr_function
def split_channel(W, N):
    """[warp, channel] where the tile needs it."""
    return gl.SliceLayout(1, split_scales(W, N))


@gluon.constexpr_function
def split_columns(W, N):
    """[i, group, r % (8 / G)], equal in all warps."""
    return gl.SliceLayout(0, gl.SliceLayout(4, split_tile(W, N)))


@gluon.constexpr_function
def split_operand(W, N):
    """[warp, group, copy, {k, q}, channel]."""
    return gl.BlockedLayout(
        [1, 1, 1, 1, 4], [1, W // 32, 128 // W, 2, 4], [N, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )


@gluon.constexpr_function
def split_sums(W, N, rows):
    """[warp, i, group, r % (8 / G), column pair, {k, q}]."""
    return gl.BlockedLayout(
        [1, rows, 1, 1, 1, 2],
        [1, 1, W // 32, 256 // W, 4, 1],
        [N, 1, 1, 1, 1, 1],
        [5, 4, 3, 2, 1, 0],
    )


@gluon.constexpr_function
def split_vectors(vectors, width, N):
    """Memory: [warp, vector, lane, element]."""
    return gl.BlockedLayout([1, vectors, 1, width], [1, 1, 32, 1], [N, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def split_rows(columns, N):
    """Value columns of a lane, [r, i], equal in all warps."""
    return gl.BlockedLayout([1, columns], [8, 4], [N, 1], [1, 0])


@gluon.constexpr_function
def split_flat(count, N):
    """Key channels spread over each warp."""
    return gl.BlockedLayout([max(1, count // 32)], [32], [N], [0])


@gluon.jit
def _warp_axis(layout: gl.constexpr, N: gl.constexpr):
    """arange over the warps along the first of four axes."""
    inner: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    w = gl.arange(0, N, layout=inner)
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(w, 1), 2), 3)


@gluon.jit
def _channel_to_tile(x):
    """[warp, channel] to [warp, 1, 1, 1, channel]."""
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 1)


@gluon.jit
def _split_offsets(
    tile, W: gl.constexpr, BLOCK: gl.constexpr, WIDTH: gl.constexpr, N: gl.constexpr
):
    """`gluon_parts._vector_offsets` with the warp's chunk in front."""
    VECTORS: gl.constexpr = W // (2 * WIDTH)
    SHARE: gl.constexpr = BLOCK // W
    layout: gl.constexpr = split_vectors(VECTORS, WIDTH, N)
    of_vector: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    of_lane: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    of_element: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    n = gl.arange(0, VECTORS, layout=of_vector) * (32 * WIDTH)
    lane = gl.arange(0, 32, layout=of_lane)
    e = gl.arange(0, WIDTH, layout=of_element)
    r = lane // 4
    stored = 4 * (tile * (8 // SHARE) + r // SHARE) + lane % 4
    place = (r % SHARE) * (VECTORS * 32 * WIDTH) + stored * WIDTH
    return (
        _warp_axis(layout, N) * (16 * BLOCK)
        + gl.expand_dims(gl.expand_dims(gl.expand_dims(n, 0), 2), 3)
        + gl.expand_dims(gl.expand_dims(gl.expand_dims(place, 0), 1), 3)
        + gl.expand_dims(gl.expand_dims(gl.expand_dims(e, 0), 1), 2)
    )


@gluon.jit
def _split_left_codes(x, W: gl.constexpr, N: gl.constexpr):
    """[warp, vector, lane, byte] to the left operand [warp, value column, channel]."""
    split = gl.reshape(x, [N, W // 32, 8, 4, 4, 2, 2])
    split = gl.permute(_codes_to_bfloat16(split), [0, 1, 4, 2, 5, 3, 6])
    left: gl.constexpr = gl.DotOperandLayout(0, split_mma(N), 2)
    return gl.convert_layout(gl.reshape(split, [N, W, 16]), left, assert_trivial=True)


@gluon.jit
def _split_left_halves(x, W: gl.constexpr, N: gl.constexpr):
    """[warp, vector, lane, half] to the left operand [warp, value column, channel]."""
    split = gl.permute(gl.reshape(x, [N, W // 16, 8, 4, 2, 2, 2]), [0, 1, 4, 2, 5, 3, 6])
    left: gl.constexpr = gl.DotOperandLayout(0, split_mma(N), 2)
    return gl.convert_layout(gl.reshape(split, [N, W, 16]), left, assert_trivial=True)


@gluon.jit
def _split_paired(scale, vectors, W: gl.constexpr, N: gl.constexpr):
    """scale [warp, group, channel] times {k, q} [warp, 2, channel], with copies to fill eight columns."""
    both = gl.expand_dims(scale, 2) * gl.expand_dims(vectors, 1)
    copies = gl.full([1, 1, 128 // W, 1, 1], 1.0, gl.float32, layout=split_operand(W, N))
    return gl.expand_dims(both, 2) * copies


@gluon.jit
def _split_right(x, W: gl.constexpr, N: gl.constexpr):
    """[warp, group, copy, {k, q}, channel] to the right operand [warp, channel, column]."""
    split = gl.reshape(x, [N, W // 32, 128 // W, 2, 4, 2, 2])
    split = gl.permute(split, [0, 5, 4, 6, 1, 2, 3])
    right: gl.constexpr = gl.DotOperandLayout(1, split_mma(N), 2)
    return gl.convert_layout(gl.reshape(split, [N, 16, 8]), right, assert_trivial=True)


@gluon.jit
def _split_own(x, W: gl.constexpr, N: gl.constexpr):
    """Own group's sum of every row, added over the warps: [i, group, r % (8 / G)]."""
    layout: gl.constexpr = gl.SliceLayout(5, split_sums(W, N, W // 8))
    inner: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout)))
    )
    g = gl.arange(0, W // 32, layout=inner) * (128 // W)
    index = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(g, 0), 1), 3), 4)
    index = index + gl.full([N, W // 8, W // 32, 256 // W, 1], 0, gl.int32, layout=layout)
    own = gl.gather(gl.convert_layout(x, layout, assert_trivial=True), index, 4)
    own = gl.reshape(own, [N, W // 8, W // 32, 256 // W])
    own = gl.convert_layout(own, gl.SliceLayout(4, split_tile(W, N)), assert_trivial=True)
    return gl.sum(own, 0)


@gluon.jit
def _rows_of(
    q, k, g, a_log, bias, index, row, inside,
    KDA: gl.constexpr, GATE: gl.constexpr, LOWER: gl.constexpr, INDEXED: gl.constexpr,
):  # fmt: skip
    """q, k and (KDA) decay of some stored rows, zero outside."""
    channel = row
    if INDEXED:
        channel = gl.load(index + row, inside, 0).to(gl.int32)
    q_row = gl.load(q + channel, inside, 0.0).to(gl.float32)
    k_row = gl.load(k + channel, inside, 0.0).to(gl.float32)
    a_row = k_row
    if KDA:
        a_row = gl.load(g + channel, inside, 0.0).to(gl.float32)
        b_row = 0.0
        if GATE > 0:
            b_row = gl.load(bias + channel, inside, 0.0)
        a_row = _decay_of(a_row, a_log, b_row, GATE, LOWER)
    return q_row, k_row, a_row


@gluon.jit
def _stage(memory, x, CHUNKS: gl.constexpr):
    """A vector over key channels into shared memory [group, warp, channel]."""
    _view(memory, gl.float32, [CHUNKS, 16], SPLIT2).store(gl.reshape(x, [CHUNKS, 16]))


@gluon.jit
def _stage_pair(memory, k, q, CHUNKS: gl.constexpr):
    """k and q into shared memory [group, warp, {k, q}, channel]."""
    both = gl.permute(gl.reshape(gl.join(k, q), [CHUNKS, 16, 2]), [0, 2, 1])
    _view(memory, gl.float32, [CHUNKS, 2, 16], SPLIT3).store(both)
