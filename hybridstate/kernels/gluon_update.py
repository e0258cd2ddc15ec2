"""One decode step on packed 128 x 128 states with matrix instructions (Gluon, NVIDIA).

One warp owns one head, which lies in `fragment` order (layout.py), so lane 4 r + j holds value columns
16 r + i and, in each chunk of 16 key channels, channels 4 j + e. The value group of a lane is r / 2: a lane works
with one scale per channel, and a group's maximum costs one shuffle. The whole head is in flight at once
through 16-byte asynchronous copies; both passes read it from shared memory.

Why it is fast where a plain kernel is bound by instructions rather than by memory:

- A byte b, zero-extended to 16 bits, is the bfloat16 number b * 2^-133 exactly (subnormals and the first binade
  share one spacing), so codes become matrix operands by byte permutation alone, two in one instruction.
- Pass 1, the two sums over key channels, is a matrix product of codes (M = value column, K = channel) with
  {k, q}_u a_u s_ug * 2^100, one column per (group, {k, q}), split into two bfloat16 terms (17 bits). A row reads
  the two columns of its own group. The stored offset of 128 leaves through one more product with a constant.
- Pass 2 works in units of the old scale, t = code + kappa_u delta_v with kappa = k / (a s), so dequantisation
  costs no multiply: codes become float32 by a product with the identity, the offset rides in the accumulator.
  New scale = max|t| a s / 127, new code = round(127 t / max|t|) by adding 1.5 * 2^23 + 128.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from hybridstate.kernels.layout import PackedLayout

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


@gluon.jit
def _rewrite_halves(
    target, halves, keys, decays, decay, step, CHUNKS: gl.constexpr, KDA: gl.constexpr
):
    """S <- a S + k delta on the float16 rows."""
    offsets = _vector_offsets(8, 8, HALF_VECTORS)
    for c in range(CHUNKS):
        split = gl.reshape(halves.index(c).load(HALF_VECTORS), [8, 4, 2, 4, 2, 4])
        old = gl.reshape(gl.permute(split, [0, 4, 1, 2, 3, 5]), [16, 4, 2, 16])
        old = gl.convert_layout(old, TILE, assert_trivial=True).to(gl.float32)
        write = _to_tile(keys.index(c).load(CHANNEL) * UNIT) * step
        if KDA:
            new = old * _to_tile(decays.index(c).load(CHANNEL)) + write
        else:
            new = old * decay + write
        split = gl.permute(gl.reshape(_float16(new), [8, 2, 4, 2, 4, 4]), [0, 2, 3, 4, 1, 5])
        new = gl.convert_layout(gl.reshape(split, [8, 32, 8]), HALF_VECTORS, assert_trivial=True)
        gl.store(target + c * 2048 + offsets, new)


@gluon.jit
def _rewrite_codes(
    target, scale_target, codes, scales, keys, decays, decay, step,
    CHUNKS: gl.constexpr, FIRST: gl.constexpr, KDA: gl.constexpr,
):  # fmt: skip
    """S <- a S + k delta on the INT8 rows, requantised with fresh scales."""
    offsets = _vector_offsets(4, 16, CODE_VECTORS)
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT))
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, RIGHT))
    diagonal = gl.expand_dims(row, 1) == gl.expand_dims(column, 0)
    identity = gl.where(diagonal, UP, 0.0).to(gl.bfloat16)
    minus_128 = gl.full([128, 16], -128.0 / UNIT, gl.float32, layout=MMA)
    scale_offsets = (
        gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, SCALES)), 1) * 16
        + gl.expand_dims(gl.arange(0, 16, layout=CHANNEL), 0)
    )  # fmt: skip
    for c in range(CHUNKS):
        left = _left_codes(codes.index(c).load(CODE_VECTORS))
        old = mma_v2(left, identity, minus_128)  # code * 2^-33
        scale = scales.index(c).load(SCALES)
        if KDA:
            scale = scale * gl.expand_dims(decays.index(c + FIRST).load(CHANNEL), 0)
        else:
            scale = scale * decay
        scale = gl.maximum(scale, TINY_SCALE)
        kappa = gl.expand_dims(keys.index(c + FIRST).load(CHANNEL), 0) * _reciprocal(scale)
        split = gl.reshape(old, [16, 4, 2, 2, 4, 2])
        old = gl.reshape(gl.permute(split, [0, 1, 2, 4, 3, 5]), [16, 4, 2, 16])
        new = gl.convert_layout(old, TILE, assert_trivial=True)
        new = new + gl.expand_dims(gl.expand_dims(kappa, 1), 0) * step
        largest = gl.maximum(gl.max(gl.max(gl.abs(new), 0), 1), TINY_GROUP)
        gl.store(scale_target + c * 64 + scale_offsets, largest * scale * (UNIT / 127.0))
        inverse = 127.0 * _reciprocal(largest)
        rounded = new * gl.expand_dims(gl.expand_dims(inverse, 1), 0) + ROUND
        split = gl.permute(gl.reshape(_low_bytes(rounded), [4, 4, 8, 4, 4]), [0, 2, 3, 1, 4])
        bytes_ = gl.reshape(split, [4, 32, 16])
        bytes_ = gl.convert_layout(bytes_, CODE_VECTORS, assert_trivial=True)
        gl.store(target + c * 2048 + offsets, bytes_)


@gluon.jit
def packed_kernel(
    q, k, v, g, beta, pool, value_scale, slots, out,
    q_batch, k_batch, v_batch, out_batch, slot_bytes, head_bytes,
    H: gl.constexpr, HK: gl.constexpr, KDA: gl.constexpr, SCALED: gl.constexpr,
    HIGH: gl.constexpr,
):  # fmt: skip
    """Grid: batch * H, one warp each. HIGH: chunks of 16 float16 rows, 0 to 8."""
    LOW: gl.constexpr = 8 - HIGH
    bh = gl.program_id(0)
    b = bh // H
    h = bh % H
    key_head = h // (H // HK)
    columns = _grid(8, 16, 16, VALUE_ROWS)
    p_out = out + b.to(gl.int64) * out_batch + h * 128
    slot = gl.load(slots + b).to(gl.int64)
    if slot < 0:
        zero = gl.full([8, 16], 0.0, out.dtype.element_ty, layout=VALUE_ROWS)
        gl.store(p_out + columns, zero)
        return

    # The whole head goes on its way before anything is computed.
    head = pool + slot * slot_bytes + h * head_bytes
    p_halves = head.to(gl.pointer_type(gl.float16))
    p_codes = (head + HIGH * 4096).to(gl.pointer_type(gl.int8))
    p_scales = (head + HIGH * 4096 + LOW * 2048).to(gl.pointer_type(gl.float32))
    if LOW > 0:
        codes = gl.allocate_shared_memory(gl.int8, [LOW, 4, 32, 16], SHARED3)
        scales = gl.allocate_shared_memory(gl.float32, [LOW, 4, 16], SHARED2)
        for c in gl.static_range(LOW):
            _copy(codes.index(c), p_codes + c * 2048 + _vector_offsets(4, 16, CODE_VECTORS))
            _copy(scales.index(c), p_scales + c * 64 + _grid(4, 16, 16, SCALE_VECTORS))
    if HIGH > 0:
        halves = gl.allocate_shared_memory(gl.float16, [HIGH, 8, 32, 8], SHARED3)
        for c in gl.static_range(HIGH):
            _copy(halves.index(c), p_halves + c * 2048 + _vector_offsets(8, 8, HALF_VECTORS))
    async_copy.commit_group()

    # Meanwhile q, k and decay; the loops below would expose their latency if they read global memory.
    flat = gl.arange(0, 128, layout=FLAT)
    q_row = gl.load(q + b.to(gl.int64) * q_batch + key_head * 128 + flat).to(gl.float32)
    k_row = gl.load(k + b.to(gl.int64) * k_batch + key_head * 128 + flat).to(gl.float32)
    value = gl.load(v + b.to(gl.int64) * v_batch + h * 128 + columns).to(gl.float32)
    if SCALED:
        value_scale_row = gl.load(value_scale + h * 128 + columns)
    strength = gl.load(beta + bh).to(gl.float32)
    vectors = gl.allocate_shared_memory(gl.float32, [8, 2, 16], SHARED2)
    keys = gl.allocate_shared_memory(gl.float32, [8, 16], SHARED1)
    if KDA:
        a_row = _exp(gl.load(g + bh.to(gl.int64) * 128 + flat).to(gl.float32))
        k_read = k_row * a_row * UP
        q_read = q_row * a_row * UP
        decay = 1.0  # already in k_read, q_read and per channel below
        decays = gl.allocate_shared_memory(gl.float32, [8, 16], SHARED1)
        _view(decays, gl.float32, [8, 16], SHARED2).store(gl.reshape(a_row, [8, 16]))
    else:
        decay = _exp(gl.load(g + bh).to(gl.float32))
        k_read = k_row * UP
        q_read = q_row * UP
        decays = keys  # not read
    both = gl.permute(gl.reshape(gl.join(k_read, q_read), [8, 16, 2]), [0, 2, 1])
    _view(vectors, gl.float32, [8, 2, 16], SHARED3).store(both)
    _view(keys, gl.float32, [8, 16], SHARED2).store(gl.reshape(k_row, [8, 16]))
    q_norm = gl.rsqrt(gl.sum(q_row * q_row, 0) + NORM_EPSILON) * Q_SCALE
    k_norm = gl.rsqrt(gl.sum(k_row * k_row, 0) + NORM_EPSILON)
    kq = gl.sum(k_row * q_row, 0) * q_norm * k_norm
    async_copy.wait_group(0)
    _barrier()

    if LOW > 0:
        sums = _sums_over_codes(codes, scales, vectors, LOW, HIGH)
    else:
        sums = gl.zeros([128, 8], gl.float32, layout=MMA)
    if HIGH > 0:
        sums = _sums_over_halves(sums, halves, vectors, HIGH)
    sums = gl.convert_layout(gl.reshape(sums, [16, 4, 2, 4, 2]), SUMS, assert_trivial=True)
    k_sums, q_sums = gl.split(sums)
    k_state = _own_group(k_sums)
    q_state = _own_group(q_sums)

    target = _to_column(value) * strength
    if SCALED:
        c = _to_column(value_scale_row)
        target = target * _reciprocal(c)
    delta = target - k_state * (k_norm * strength * decay)
    o = q_state * (q_norm * decay) + kq * delta
    if SCALED:
        o = o * c
    turned = gl.permute(gl.reshape(o, [16, 8]), [1, 0])
    turned = gl.convert_layout(turned, VALUE_ROWS, assert_trivial=True)
    gl.store(p_out + columns, turned.to(out.dtype.element_ty))

    step = gl.expand_dims(delta * (k_norm * (1.0 / UNIT)), 3)
    if HIGH > 0:
        _rewrite_halves(p_halves, halves, keys, decays, decay, step, HIGH, KDA)
    if LOW > 0:
        _rewrite_codes(
            p_codes, p_scales, codes, scales, keys, decays, decay, step, LOW, HIGH, KDA
        )  # fmt: skip


def packed_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor,
    out: Tensor, value_scale: Tensor | None, layout: PackedLayout,
) -> None:  # fmt: skip
    """Launch `packed_kernel`; arguments as in `update.packed_step`, already checked.

    FMA fusion is asked for by name because the instruction budget depends on it and its default will change.
    """
    batch, heads, _ = v.shape
    packed_kernel[(batch * heads,)](
        q, k, v, g, beta, pool, out if value_scale is None else value_scale, slots, out,
        q.stride(0), k.stride(0), v.stride(0), out.stride(0), pool.stride(0), layout.head_bytes,
        H=heads, HK=q.shape[1], KDA=g.dim() == 3, SCALED=value_scale is not None,
        HIGH=layout.k_hi // 16, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
