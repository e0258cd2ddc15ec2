"""Matrix layouts and device functions of a packed 128 x 128 head, shared by the ring kernels.

A head in fragment order (layout.py): lane 4 r + j of a warp owns value columns 16 r + i and, in each chunk of 16 key
channels, channels 4 j + e. `gluon_update.py` says how codes become matrix operands.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

# Names that moved between Triton 3.6 and 3.9.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def _view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return memory.reinterpret(dtype, shape, layout)
else:

    @gluon.jit
    def _view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return memory._reinterpret(dtype, shape, layout)


UP = gl.constexpr(2.0**100)  # lifts a_u s_ug k_u far above the subnormal codes it meets
UNIT = gl.constexpr(2.0**33)  # 1 / (2^-133 * 2^100): a code in a lifted product counts 2^-33
TINY_SCALE = gl.constexpr(1e-30)  # a zero group, or decay that underflowed: kappa stays finite
TINY_GROUP = gl.constexpr(1e-35)  # the same for the new reciprocal
ROUND = gl.constexpr(12583040.0)  # 1.5 * 2^23 + 128: nearest even, offset included
NORM_EPSILON = gl.constexpr(1e-6)
Q_SCALE = gl.constexpr(128.0**-0.5)

# Matrix instruction 16 x 8 x 16 and its operands.
MMA = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
)
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
# A chunk in pass 2: [i, g, r % 2, channel]; slices of it hold what varies over fewer axes.
TILE = gl.constexpr(gl.BlockedLayout([16, 1, 1, 4], [1, 4, 2, 4], [1, 1, 1, 1], [3, 2, 1, 0]))
PAIRS = gl.constexpr(gl.SliceLayout(0, TILE.value))  # [g, r % 2 or {k, q}, channel]
SCALES = gl.constexpr(gl.SliceLayout(1, PAIRS.value))  # [g, channel]
VECTORS = gl.constexpr(gl.SliceLayout(0, PAIRS.value))  # [{k, q}, channel]
CHANNEL = gl.constexpr(gl.SliceLayout(0, SCALES.value))  # [channel]
COLUMN = gl.constexpr(gl.SliceLayout(3, TILE.value))  # [i, g, r % 2]
# The sums of pass 1: [i, g, r % 2, group column, {k, q}].
SUMS = gl.constexpr(
    gl.BlockedLayout([16, 1, 1, 1, 2], [1, 4, 2, 4, 1], [1, 1, 1, 1, 1], [4, 3, 2, 1, 0])
)
ONE_SUM = gl.constexpr(gl.SliceLayout(4, SUMS.value))
OFFSET_SUMS = gl.constexpr(
    gl.BlockedLayout([2, 1, 1, 1, 2], [1, 4, 2, 4, 1], [1, 1, 1, 1, 1], [4, 3, 2, 1, 0])
)
# Memory: 16 bytes a lane.
CODE_VECTORS = gl.constexpr(gl.BlockedLayout([4, 1, 16], [1, 32, 1], [1, 1, 1], [2, 1, 0]))
HALF_VECTORS = gl.constexpr(gl.BlockedLayout([8, 1, 8], [1, 32, 1], [1, 1, 1], [2, 1, 0]))
SCALE_VECTORS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [1, 1], [1, 0]))
VALUE_ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [1, 1], [1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
SHARED3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
SHARED2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SHARED1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _exp(x):
    """exp(x) to 2 ulp; underflows to zero."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }",
        "=r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _reciprocal(x):
    """1 / x to 1 ulp."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _truncated(x):
    """The bfloat16 at or below x in magnitude, as float32."""
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _bfloat16(x):
    """float32 to the nearest bfloat16, two in one instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _float16(x):
    """float32 to the nearest float16, two in one instruction, saturating at 65,504."""
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [x],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _codes_to_bfloat16(x):
    """Byte b to the bfloat16 b * 2^-133."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;",
        "=r,=r,r",
        [x],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _low_bytes(x):
    """Low byte of each float32 word, four packed into one."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x0040; prmt.b32 b, $3, $4, 0x0040; "
        "prmt.b32 $0, a, b, 0x5410; }",
        "=r,r,r,r,r",
        [x],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _right_operand(x):
    """[g, {k, q}, channel 4 j + 2 hh + e] to the right operand [8 hh + 2 j + e, 2 g + {k, q}]."""
    split = gl.permute(gl.reshape(x, [4, 2, 4, 2, 2]), [3, 2, 4, 0, 1])
    return gl.convert_layout(gl.reshape(split, [16, 8]), RIGHT, assert_trivial=True)


@gluon.jit
def _left_codes(x):
    """A chunk of code bytes [vector, lane, byte] to the left operand [value column, channel]."""
    split = gl.permute(_codes_to_bfloat16(gl.reshape(x, [4, 8, 4, 4, 2, 2])), [0, 3, 1, 4, 2, 5])
    return gl.convert_layout(gl.reshape(split, [128, 16]), LEFT, assert_trivial=True)


@gluon.jit
def _left_halves(x):
    """A chunk of float16 rows [vector, lane, half] to the left operand [value column, channel]."""
    split = gl.permute(gl.reshape(x, [8, 8, 4, 2, 2, 2]), [0, 3, 1, 4, 2, 5])
    return gl.convert_layout(gl.reshape(split, [128, 16]), LEFT, assert_trivial=True)


@gluon.jit
def _grid(A: gl.constexpr, B: gl.constexpr, step: gl.constexpr, layout: gl.constexpr):
    """Offsets a * step + b of an [A, B] tile."""
    a = gl.arange(0, A, layout=gl.SliceLayout(1, layout)) * step
    return gl.expand_dims(a, 1) + gl.expand_dims(
        gl.arange(0, B, layout=gl.SliceLayout(0, layout)), 0
    )


@gluon.jit
def _vector_offsets(N: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Offsets of [vector, lane, element] with WIDTH elements a lane and 32 lanes a vector."""
    n = gl.arange(0, N, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout))) * (32 * WIDTH)
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))) * WIDTH
    e = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    return (
        gl.expand_dims(gl.expand_dims(n, 1), 2)
        + gl.expand_dims(gl.expand_dims(lane, 0), 2)
        + gl.expand_dims(gl.expand_dims(e, 0), 0)
    )


@gluon.jit
def _to_tile(x):
    """[channel] to [1, 1, 1, channel]."""
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 0)


@gluon.jit
def _to_column(x):
    """[r, i] of VALUE_ROWS to [i, g, r % 2]."""
    turned = gl.reshape(gl.permute(x, [1, 0]), [16, 4, 2])
    return gl.convert_layout(turned, COLUMN, assert_trivial=True)


@gluon.jit
def _own_group(x):
    """From the sums over every group column, [i, g, r % 2, group], the one of the row's own group."""
    g = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, ONE_SUM))))
    index = gl.expand_dims(gl.expand_dims(gl.expand_dims(g, 0), 2), 3)
    index = index + gl.full([16, 4, 2, 1], 0, gl.int32, layout=ONE_SUM)
    own = gl.gather(gl.convert_layout(x, ONE_SUM, assert_trivial=True), index, 3)
    return gl.convert_layout(gl.reshape(own, [16, 4, 2]), COLUMN, assert_trivial=True)


@gluon.jit
def _sums_over_codes(codes, scales, vectors, CHUNKS: gl.constexpr, FIRST: gl.constexpr):
    """sum_u code_uv s_ug a_u {k, q}_u over the INT8 rows, as [value column, (group, {k, q})]."""
    total = gl.zeros([128, 8], gl.float32, layout=MMA)
    offset = gl.zeros([16, 8], gl.float32, layout=MMA)
    all_128 = gl.full([16, 16], 0x0080, gl.int16, layout=LEFT).to(gl.bfloat16, bitcast=True)
    for c in range(CHUNKS):
        left = _left_codes(codes.index(c).load(CODE_VECTORS))
        scale = gl.expand_dims(scales.index(c).load(SCALES), 1)
        right = scale * gl.expand_dims(vectors.index(c + FIRST).load(VECTORS), 0)
        high = _truncated(right)
        right_high = _right_operand(_bfloat16(high))
        right_low = _right_operand(_bfloat16(right - high))
        total = mma_v2(left, right_high, total)
        total = mma_v2(left, right_low, total)
        offset = mma_v2(all_128, right_high, offset)
        offset = mma_v2(all_128, right_low, offset)
    split = gl.reshape(offset, [2, 4, 2, 4, 2])
    split = gl.convert_layout(split, OFFSET_SUMS, assert_trivial=True)
    row = gl.max(split, 0)  # all rows are equal; the maximum only drops an axis
    row = gl.convert_layout(row, gl.SliceLayout(0, SUMS), assert_trivial=True)
    total = gl.convert_layout(gl.reshape(total, [16, 4, 2, 4, 2]), SUMS, assert_trivial=True)
    total = total * UNIT - gl.expand_dims(row * UNIT, 0)
    return gl.convert_layout(gl.reshape(total, [128, 8]), MMA, assert_trivial=True)


@gluon.jit
def _sums_over_halves(total, halves, vectors, CHUNKS: gl.constexpr):
    """Adds sum_u S_uv a_u {k, q}_u over the float16 rows; k and q keep 22 bits."""
    for c in range(CHUNKS):
        left = _left_halves(halves.index(c).load(HALF_VECTORS))
        down = gl.full([4, 2, 16], 1.0 / UP, gl.float32, layout=PAIRS)
        right = down * gl.expand_dims(vectors.index(c).load(VECTORS), 0)
        high = right.to(gl.float16)
        total = mma_v2(left, _right_operand(high), total)
        low = (right - high.to(gl.float32)).to(gl.float16)
        total = mma_v2(left, _right_operand(low), total)
    return total
