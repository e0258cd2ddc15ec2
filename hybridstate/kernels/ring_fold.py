"""What the ring kernels share: a packed 128 x 128 head on its way in, the ring's rows and gates, and the fold (Gluon).

A fold is S <- decay S + sum_i (fade_i k_i) u_i^T over at most 16 entries: one matrix product of depth 16 per tile,
whose accumulators meet the codes' in the same registers. Both factors are float16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from hybridstate.kernels.gluon_parts import (
    LEFT,
    MMA,
    RIGHT,
    ROUND,
    SHARED2,
    SHARED3,
    TINY_GROUP,
    UNIT,
    UP,
    _barrier,
    _copy,
    _exp,
    _float16,
    _grid,
    _left_codes,
    _low_bytes,
    _reciprocal,
    _to_tile,
    _vector_offsets,
    _view,
    channel_layout,
    row_layout,
    scale_layout,
    tile_layout,
    vector_layout,
)
from hybridstate.kernels.ring_reference import LEAST_LOG_DECAY

Q_SCALE = gl.constexpr(128.0**-0.5)
W = gl.constexpr(128)
"""Value columns of a warp: the whole head, which has one phase."""
TILE = gl.constexpr(tile_layout(128))
SCALES = gl.constexpr(scale_layout(128))
CHANNEL = gl.constexpr(channel_layout(128))
CODE_VECTORS = gl.constexpr(vector_layout(4, 16))
HALF_VECTORS = gl.constexpr(vector_layout(8, 8))
SCALE_VECTORS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [1, 1], [1, 0]))
VALUE_ROWS = gl.constexpr(row_layout(16))
FLOOR = gl.constexpr(LEAST_LOG_DECAY)
DEPTH = gl.constexpr(16)
"""Entries of one matrix product; the longest ring."""
_ENTRIES = gl.BlockedLayout([16, 4], [1, 32], [1, 1], [1, 0])
ENTRIES = gl.constexpr(_ENTRIES)
"""[entry, channel or value column]: a lane owns 4 columns of every entry."""
COLUMNS = gl.constexpr(gl.SliceLayout(0, _ENTRIES))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _floored(g):
    """Log decays above the floor; a NaN stays one."""
    return gl.where(g < FLOOR, FLOOR, g)


@gluon.jit
def _log_decay_of(x, a_log, bias, GATE: gl.constexpr, LOWER: gl.constexpr):
    """Log decay from itself (GATE 0), softplus gate (1) or safe gate (2); `gluon_parts._decay_of` before its exp.

    log(1 + t) is t log(w) / (w - 1) with w = 1 + t rounded: right where decays are closest to 1.
    """
    if GATE == 1:
        x = x + bias
        t = _exp(-gl.abs(x))
        w = 1.0 + t
        inexact = w - 1.0
        log1p = gl.where(inexact == 0.0, t, gl.log(w) * t * _reciprocal(gl.maximum(inexact, 1e-9)))
        x = -gl.exp(a_log) * (gl.maximum(x, 0.0) + log1p)
    elif GATE == 2:
        x = LOWER * _reciprocal(1.0 + _exp(-gl.exp(a_log) * (x + bias)))
    return x


@gluon.jit
def _ring_rows(base, held, columns):
    """The held rows of a ring [entry, 128] in float32, zero where nothing is held."""
    entry = gl.arange(0, held.shape[0], layout=held.type.layout)
    at = gl.expand_dims(entry, 1) * 128 + gl.expand_dims(columns, 0)
    mask = gl.expand_dims(held, 1) & (gl.expand_dims(columns, 0) >= 0)
    return gl.load(base + at, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def _gates(p_gates, held, count, g, columns, KDA: gl.constexpr, WHOLE: gl.constexpr):
    """Log decays of the held entries up to the present, and of the packed state, `g` being the present one's.

    WHOLE: the tile is no longer than the ring, so that GDN's sums are read without a mask.

    KDA: [entry, channel] and [channel] from one float16 log decay per entry and channel.
    GDN: [entry] and a scalar from sums of log decays since the last rewrite.
    """
    if KDA:
        past = _ring_rows(p_gates, held, columns)
        total = gl.sum(past, 0) + g
        # a scan from the last entry backwards would leave the lane; this one stays in it
        fades = gl.expand_dims(total, 0) - gl.associative_scan(past, 0, _add)
    else:
        entry = gl.arange(0, held.shape[0], layout=held.type.layout)
        if WHOLE:
            past = gl.load(p_gates + entry)
        else:
            past = gl.load(p_gates + entry, mask=held, other=0.0)
        total = gl.load(p_gates + gl.maximum(count - 1, 0))
        total = gl.where(count > 0, total, 0.0) + g
        fades = gl.where(held, total - past, 0.0)
    return fades, total


@gluon.jit
def _fold_operands(
    p_keys, p_values, p_gates, count, key, g, HIGH: gl.constexpr, KDA: gl.constexpr,
    FRESH: gl.constexpr,
):  # fmt: skip
    """Left operand [value column, entry] and, in shared memory, [chunk, channel, entry] of the ring's product.

    The third result holds, for each chunk of float16 rows, what rounding the faded keys to float16 left over: as much
    as storage takes from those rows, and a hundredth of what it takes from INT8 rows.

    With FRESH entry `count` is the present one: its key is `key`, its value comes later (`_with_present`). Without
    it `g` is zero.
    """
    columns = gl.arange(0, 128, layout=COLUMNS)
    entry = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, ENTRIES))
    held = entry < count
    fades, _total = _gates(p_gates, held, count, g, columns, KDA, False)
    if KDA:
        keys = _ring_rows(p_keys, held, columns) * _exp(fades)
    else:
        keys = _ring_rows(p_keys, held, columns) * gl.expand_dims(_exp(fades), 1)
    values = _ring_rows(p_values, held, columns)
    if FRESH:
        present = gl.expand_dims(entry == count, 1)
        keys = gl.where(present, gl.expand_dims(key, 0), keys)
    left = gl.reshape(values.to(gl.float16), [16, 8, 16])  # entry, r, i
    left = gl.reshape(gl.permute(left, [2, 1, 0]), [128, 16])
    left = gl.convert_layout(left, LEFT)
    right = gl.allocate_shared_memory(gl.float16, [8, 16, 16], SHARED2)
    rounded = keys.to(gl.float16)
    rests = ()
    if HIGH > 0:
        _store_chunks(right, (keys - rounded.to(gl.float32)).to(gl.float16))
        for c in gl.static_range(HIGH):
            rests += (right.index(c).permute((1, 0)).load(RIGHT),)  # type: ignore[assignment]
        _barrier()
    _store_chunks(right, rounded)
    return left, right, rests


@gluon.jit
def _store_chunks(right, keys):
    """[entry, channel] to [chunk, channel, entry]; channel 4 j + 2 hh + e stands at 8 hh + 2 j + e, as codes do."""
    split = gl.permute(gl.reshape(keys, [16, 8, 4, 2, 2]), [1, 3, 2, 4, 0])
    _view(right, gl.float16, [8, 16, 16], SHARED3).store(gl.reshape(split, [8, 16, 16]))
    _barrier()


@gluon.jit
def _tile_of(x):
    """Accumulators [value column, channel] to [i, g, r % 2, channel]."""
    split = gl.reshape(x, [16, 4, 2, 2, 4, 2])
    tile = gl.reshape(gl.permute(split, [0, 1, 2, 4, 3, 5]), [16, 4, 2, 16])
    return gl.convert_layout(tile, TILE, assert_trivial=True)


@gluon.jit
def _with_present(left, value, count):
    """The left operand with `value` [i, g, r % 2] as entry `count`."""
    entry = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, LEFT))
    column = gl.convert_layout(
        gl.reshape(_float16(value), [128]), gl.SliceLayout(1, LEFT), assert_trivial=True
    )
    return gl.where(gl.expand_dims(entry == count, 0), gl.expand_dims(column, 1), left)


@gluon.jit
def _group_poison(values):
    """NaN for groups [g] of [i, g, r % 2] in which a value is not a number, else zero."""
    poison = gl.sum(gl.sum(values * 0.0, 0), 1)
    return gl.convert_layout(poison, gl.SliceLayout(1, SCALES))


@gluon.jit
def _fold_poison(left, right):
    """The same from a product's operands: such a value shows in every channel, the first included."""
    zero = gl.zeros([128, 16], gl.float32, layout=MMA)
    probe = _tile_of(mma_v2(left, right.index(0).permute((1, 0)).load(RIGHT), zero))
    return _group_poison(gl.sum(probe * 0.0, 3))


@gluon.jit
def _rewrite_halves(
    p_halves, halves, decays, decay, left, right, rests, HIGH: gl.constexpr, KDA: gl.constexpr
):
    """The float16 rows of `_rewrite`; `rests` completes `right` there, see `_fold_operands`."""
    zero = gl.zeros([128, 16], gl.float32, layout=MMA)
    offsets = _vector_offsets(0, W, W, 8)
    for c in gl.static_range(HIGH):
        split = gl.reshape(halves.index(c).load(HALF_VECTORS), [8, 4, 2, 4, 2, 4])
        old = gl.reshape(gl.permute(split, [0, 4, 1, 2, 3, 5]), [16, 4, 2, 16])
        old = gl.convert_layout(old, TILE, assert_trivial=True).to(gl.float32)
        write = mma_v2(left, rests[c], zero)
        write = _tile_of(mma_v2(left, right.index(c).permute((1, 0)).load(RIGHT), write))
        if KDA:
            new = old * _to_tile(decays.index(c).load(CHANNEL)) + write
        else:
            new = old * decay + write
        split = gl.permute(gl.reshape(_float16(new), [8, 2, 4, 2, 4, 4]), [0, 2, 3, 4, 1, 5])
        new = gl.reshape(split, [8, 32, 8])
        new = gl.convert_layout(new, HALF_VECTORS, assert_trivial=True)
        gl.store(p_halves + c * 2048 + offsets, new)


@gluon.jit
def _rewrite(
    p_halves, p_codes, p_scales, halves, codes, scales, decays, decay, left, right, rests, poison,
    HIGH: gl.constexpr, KDA: gl.constexpr,
):  # fmt: skip
    """S <- decay S + left right, float16 rows stored as they are, INT8 rows with fresh scales.

    `poison` [g] is NaN for groups with a value that is not a number, else zero: a maximum alone would drop it.
    """
    LOW: gl.constexpr = 8 - HIGH
    zero = gl.zeros([128, 16], gl.float32, layout=MMA)
    if HIGH > 0:
        _rewrite_halves(p_halves, halves, decays, decay, left, right, rests, HIGH, KDA)
    if LOW > 0:
        offsets = _vector_offsets(0, W, W, 16)
        row = gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT))
        column = gl.arange(0, 16, layout=gl.SliceLayout(0, RIGHT))
        diagonal = gl.expand_dims(row, 1) == gl.expand_dims(column, 0)
        identity = gl.where(diagonal, UP, 0.0).to(gl.bfloat16)
        minus_128 = gl.full([128, 16], -128.0 / UNIT, gl.float32, layout=MMA)
        scale_offsets = _grid(4, 16, 16, SCALES)
        poisons = gl.allocate_shared_memory(gl.float32, [4, 16], SHARED2)  # registers are scarce
        poisons.store(gl.expand_dims(poison, 1) + gl.zeros([4, 16], gl.float32, layout=SCALES))
        _barrier()
        for c in range(LOW):
            code = mma_v2(_left_codes(codes.index(c).load(CODE_VECTORS), W), identity, minus_128)
            write = mma_v2(left, right.index(c + HIGH).permute((1, 0)).load(RIGHT), zero)
            scale = scales.index(c).load(SCALES)
            if KDA:
                scale = scale * gl.expand_dims(decays.index(c + HIGH).load(CHANNEL), 0)
            else:
                scale = scale * decay
            poisoned = poisons.load(SCALES) + scale * 0.0
            scale = gl.expand_dims(gl.expand_dims(scale * UNIT, 1), 0)
            new = _tile_of(code) * scale + _tile_of(write)
            largest = gl.maximum(gl.max(gl.max(gl.abs(new), 0), 1), TINY_GROUP)
            gl.store(p_scales + c * 64 + scale_offsets, largest * (1.0 / 127.0) + poisoned)
            inverse = 127.0 * _reciprocal(largest)
            rounded = new * gl.expand_dims(gl.expand_dims(inverse, 1), 0) + ROUND
            split = gl.permute(gl.reshape(_low_bytes(rounded), [4, 4, 8, 4, 4]), [0, 2, 3, 1, 4])
            bytes_ = gl.reshape(split, [4, 32, 16])
            bytes_ = gl.convert_layout(bytes_, CODE_VECTORS, assert_trivial=True)
            gl.store(p_codes + c * 2048 + offsets, bytes_)


@gluon.jit
def _start_copy(head, HIGH: gl.constexpr):
    """Send one packed head to shared memory; its three parts there and where they lie in the pool."""
    LOW: gl.constexpr = 8 - HIGH
    p_halves = head.to(gl.pointer_type(gl.float16))
    p_codes = (head + HIGH * 4096).to(gl.pointer_type(gl.int8))
    p_scales = (head + HIGH * 4096 + LOW * 2048).to(gl.pointer_type(gl.float32))
    # a part without rows is never read; one chunk keeps the types
    codes = gl.allocate_shared_memory(gl.int8, [max(LOW, 1), 4, 32, 16], SHARED3)
    scales = gl.allocate_shared_memory(gl.float32, [max(LOW, 1), 4, 16], SHARED2)
    halves = gl.allocate_shared_memory(gl.float16, [max(HIGH, 1), 8, 32, 8], SHARED3)
    for c in gl.static_range(LOW):
        _copy(codes.index(c), p_codes + c * 2048 + _vector_offsets(0, W, W, 16))
        _copy(scales.index(c), p_scales + c * 64 + _grid(4, 16, 16, SCALE_VECTORS))
    for c in gl.static_range(HIGH):
        _copy(halves.index(c), p_halves + c * 2048 + _vector_offsets(0, W, W, 8))
    async_copy.commit_group()
    return p_halves, p_codes, p_scales, halves, codes, scales
