"""One decode step on states in fragment order with matrix instructions (Gluon, NVIDIA).

One warp owns W value columns of a head (gluon_parts.py): a whole block at large batches, a part of one where few
heads must fill the device. All its values are in flight at once through 16-byte asynchronous copies; both passes
read them from shared memory.

Why it is fast where a plain kernel is bound by instructions rather than by memory:

- A byte b, zero-extended to 16 bits, is the bfloat16 number b * 2^-133 exactly (subnormals and the first binade
  share one spacing), so codes become matrix operands by byte permutation alone, two in one instruction.
- Pass 1, the two sums over key channels, is a matrix product of codes (M = value column, K = channel) with
  {k, q}_u a_u s_ug * 2^100, one column per (group, {k, q}), split into two bfloat16 terms (17 bits). A row reads
  the two columns of its own group. The stored offset of 128 leaves through one more product with a constant.
- Pass 2 works in units of the old scale, t = code + kappa_u delta_v with kappa = k / (a s), so dequantisation
  costs no multiply: codes become float32 by a product with the identity, the offset rides in the accumulator.
  New scale = max|t| a s / 127, new code = round(127 t / max|t|) by adding 1.5 * 2^23 + 128.

A column whose delta is not finite poisons the scales of its group, so that a NaN is never requantised into
numbers. Rows of 16 bits (FP16 of packed states; FP16 or BF16 of dense ones) take the same sums and one FFMA.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from hybridstate.kernels.gluon_parts import (
    HALF_LIMIT,
    LEFT,
    MMA,
    NORM_EPSILON,
    RIGHT,
    ROUND,
    SHARED1,
    SHARED2,
    SHARED3,
    TINY_GROUP,
    TINY_SCALE,
    UNIT,
    UP,
    _barrier,
    _bfloat16,
    _copy,
    _decay_of,
    _float16,
    _grid,
    _left_codes,
    _left_halves,
    _low_bytes,
    _own_sums,
    _paired,
    _reciprocal,
    _release_next_grid,
    _right_operand,
    _to_column,
    _to_row,
    _to_tile,
    _truncated,
    _vector_offsets,
    _view,
    _wait_for_previous_grid,
    _write_strength,
    channel_layout,
    flat_layout,
    launch_arguments,
    operand_layout,
    row_layout,
    scale_layout,
    sums_layout,
    tile_layout,
    vector_layout,
)
from hybridstate.kernels.gluon_split import split_kernel
from hybridstate.kernels.layout import Layout, PackedLayout


@gluon.jit
def _sums_over_codes(
    codes, scales, vectors, CHUNKS: gl.constexpr, FIRST: gl.constexpr, W: gl.constexpr
):
    """sum_u code_uv s_ug a_u {k, q}_u over the INT8 rows, as [value column, right column]."""
    paired: gl.constexpr = gl.SliceLayout(1, operand_layout(W))  # [group, {k, q}, channel]
    total = gl.zeros([W, 8], gl.float32, layout=MMA)
    offset = gl.zeros([16, 8], gl.float32, layout=MMA)
    all_128 = gl.full([16, 16], 0x0080, gl.int16, layout=LEFT).to(gl.bfloat16, bitcast=True)
    for c in range(CHUNKS):
        left = _left_codes(codes.index(c).load(vector_layout(W // 32, 16)), W)
        scale = scales.index(c).load(gl.SliceLayout(1, paired))
        right = _paired(scale, vectors.index(c + FIRST).load(gl.SliceLayout(0, paired)), W)
        high = _truncated(right)
        right_high = _right_operand(_bfloat16(high), W)
        right_low = _right_operand(_bfloat16(right - high), W)
        total = mma_v2(left, right_high, total)
        total = mma_v2(left, right_low, total)
        offset = mma_v2(all_128, right_high, offset)
        offset = mma_v2(all_128, right_low, offset)
    split = gl.reshape(offset, [2, W // 32, 256 // W, 4, 2])
    split = gl.convert_layout(split, sums_layout(W, 2), assert_trivial=True)
    row = gl.max(split, 0)  # all rows are equal; the maximum only drops an axis
    row = gl.convert_layout(row, gl.SliceLayout(0, sums_layout(W, W // 8)), assert_trivial=True)
    total = gl.reshape(total, [W // 8, W // 32, 256 // W, 4, 2])
    total = gl.convert_layout(total, sums_layout(W, W // 8), assert_trivial=True)
    total = total * UNIT - gl.expand_dims(row * UNIT, 0)
    return gl.convert_layout(gl.reshape(total, [W, 8]), MMA, assert_trivial=True)


@gluon.jit
def _sums_over_halves(
    total, halves, vectors, CHUNKS: gl.constexpr, W: gl.constexpr, BF16: gl.constexpr
):
    """Adds sum_u S_uv a_u {k, q}_u over the 16-bit rows; k and q keep 22 bits (FP16) or 17 (BF16)."""
    paired: gl.constexpr = gl.SliceLayout(1, operand_layout(W))
    down = gl.full([W // 32, 16], 1.0 / UP, gl.float32, layout=gl.SliceLayout(1, paired))
    for c in range(CHUNKS):
        left = _left_halves(halves.index(c).load(vector_layout(W // 16, 8)), W)
        right = _paired(down, vectors.index(c).load(gl.SliceLayout(0, paired)), W)
        if BF16:
            rest = right - _truncated(right)
            high = _bfloat16(_truncated(right))
            low = _bfloat16(rest)
        else:
            high = right.to(gl.float16)
            low = (right - high.to(gl.float32)).to(gl.float16)
        total = mma_v2(left, _right_operand(high, W), total)
        total = mma_v2(left, _right_operand(low, W), total)
    return total


@gluon.jit
def _rewrite_halves(
    target, halves, keys, decays, decay, step, tile, saturated,
    CHUNKS: gl.constexpr, KDA: gl.constexpr, W: gl.constexpr, BLOCK: gl.constexpr,
    BF16: gl.constexpr, COUNTED: gl.constexpr,
):  # fmt: skip
    """S <- a S + k delta on the 16-bit rows."""
    offsets = _vector_offsets(tile, W, BLOCK, 8)
    if COUNTED:
        hits = gl.zeros([W // 32, 256 // W, 16], gl.int32, layout=gl.SliceLayout(0, tile_layout(W)))
    for c in range(CHUNKS):
        old = halves.index(c).load(vector_layout(W // 16, 8))
        old = gl.reshape(old, [W // 16, W // 32, 256 // W, 4, 2, 4])
        old = gl.reshape(gl.permute(old, [0, 4, 1, 2, 3, 5]), [W // 8, W // 32, 256 // W, 16])
        old = gl.convert_layout(old, tile_layout(W), assert_trivial=True).to(gl.float32)
        write = _to_tile(keys.index(c).load(channel_layout(W)) * UNIT) * step
        if KDA:
            new = old * _to_tile(decays.index(c).load(channel_layout(W))) + write
        else:
            new = old * decay + write
        if COUNTED:
            hits += gl.sum((gl.abs(new) > HALF_LIMIT).to(gl.int32), 0)
        if BF16:
            stored = _bfloat16(new)
        else:
            stored = _float16(new)
        split = gl.permute(gl.reshape(stored, [W // 16, 2, 8, 4, 4]), [0, 2, 3, 1, 4])
        stored = gl.reshape(split, [W // 16, 32, 8])
        stored = gl.convert_layout(stored, vector_layout(W // 16, 8), assert_trivial=True)
        gl.store(target + c * (16 * BLOCK) + offsets, stored)
    if COUNTED:
        count = gl.sum(gl.sum(gl.sum(hits, 0), 0), 0)
        if count > 0:
            gl.atomic_add(saturated, count)


@gluon.jit
def _rewrite_codes(
    target, scale_target, codes, scales, keys, decays, decay, step, poison, tile,
    CHUNKS: gl.constexpr, FIRST: gl.constexpr, KDA: gl.constexpr,
    W: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """S <- a S + k delta on the INT8 rows, requantised with fresh scales."""
    offsets = _vector_offsets(tile, W, BLOCK, 16)
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT))
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, RIGHT))
    diagonal = gl.expand_dims(row, 1) == gl.expand_dims(column, 0)
    identity = gl.where(diagonal, UP, 0.0).to(gl.bfloat16)
    minus_128 = gl.full([W, 16], -128.0 / UNIT, gl.float32, layout=MMA)
    scale_offsets = _grid(W // 32, 16, 16, scale_layout(W))
    for c in range(CHUNKS):
        left = _left_codes(codes.index(c).load(vector_layout(W // 32, 16)), W)
        old = mma_v2(left, identity, minus_128)  # code * 2^-33
        scale = scales.index(c).load(scale_layout(W))
        if KDA:
            scale = scale * gl.expand_dims(decays.index(c + FIRST).load(channel_layout(W)), 0)
        else:
            scale = scale * decay
        scale = gl.maximum(scale, TINY_SCALE)
        key = keys.index(c + FIRST).load(channel_layout(W))
        kappa = gl.expand_dims(key, 0) * _reciprocal(scale)
        split = gl.reshape(old, [W // 8, W // 32, 256 // W, 2, 4, 2])
        split = gl.permute(split, [0, 1, 2, 4, 3, 5])
        new = gl.reshape(split, [W // 8, W // 32, 256 // W, 16])
        new = gl.convert_layout(new, tile_layout(W), assert_trivial=True)
        new = new + gl.expand_dims(gl.expand_dims(kappa, 1), 0) * step
        largest = gl.maximum(gl.max(gl.max(gl.abs(new), 0), 1), TINY_GROUP)
        gl.store(
            scale_target + c * (BLOCK // 2) + scale_offsets,
            largest * scale * (UNIT / 127.0) + poison,
        )
        inverse = 127.0 * _reciprocal(largest)
        rounded = new * gl.expand_dims(gl.expand_dims(inverse, 1), 0) + ROUND
        bytes_ = gl.reshape(_low_bytes(rounded), [W // 32, 4, 8, 4, 4])
        bytes_ = gl.reshape(gl.permute(bytes_, [0, 2, 3, 1, 4]), [W // 32, 32, 16])
        bytes_ = gl.convert_layout(bytes_, vector_layout(W // 32, 16), assert_trivial=True)
        gl.store(target + c * (16 * BLOCK) + offsets, bytes_)


@gluon.jit
def packed_kernel(
    q, k, v, g, beta, pool, value_scale, slots, out, a_log, dt_bias, key_index, saturated,
    q_batch, k_batch, v_batch, g_batch, beta_batch, out_batch, slot_bytes,
    H: gl.constexpr, HK: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HIGH: gl.constexpr,
    BF16: gl.constexpr, W: gl.constexpr, BLOCK: gl.constexpr, KDA: gl.constexpr,
    SCALED: gl.constexpr, GATE: gl.constexpr, LOWER: gl.constexpr, LOGIT: gl.constexpr,
    INDEXED: gl.constexpr, COUNTED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid: batch * H * V / W, one warp each.

    HIGH: chunks of 16 rows stored in 16 bits, 0 to K / 16. GATE, LOWER, LOGIT: fusion.py. OVERLAP: 0 none; 1 start
    beside the end of the kernel before; 2 also read states there, which that kernel then must not write.
    """
    LOW: gl.constexpr = K // 16 - HIGH
    KP: gl.constexpr = 64 if K <= 64 else (128 if K <= 128 else 256)
    BLOCK_BYTES: gl.constexpr = BLOCK * (32 * HIGH + 18 * LOW)
    half: gl.constexpr = gl.bfloat16 if BF16 else gl.float16
    TILES: gl.constexpr = V // W
    part = gl.program_id(0) % TILES
    bh = gl.program_id(0) // TILES
    b = bh // H
    h = bh % H
    key_head = h // (H // HK)
    tile = part % (BLOCK // W)
    columns = _grid(8, W // 8, W // 8, row_layout(W // 8))
    p_out = out + b.to(gl.int64) * out_batch + h * V + part * W
    if OVERLAP == 1:
        _wait_for_previous_grid()
        _release_next_grid()
    slot = gl.load(slots + b).to(gl.int64)
    if slot < 0:
        if OVERLAP == 2:
            _wait_for_previous_grid()  # it may still read what `out` held
        zero = gl.full([8, W // 8], 0.0, out.dtype.element_ty, layout=row_layout(W // 8))
        gl.store(p_out + columns, zero)
        return

    # The whole tile goes on its way before anything is computed.
    head = pool.to(gl.pointer_type(gl.uint8)) + slot * slot_bytes
    head = head + (h * (V // BLOCK * BLOCK_BYTES) + part // (BLOCK // W) * BLOCK_BYTES)
    p_halves = head.to(gl.pointer_type(half))
    p_codes = (head + HIGH * 32 * BLOCK).to(gl.pointer_type(gl.int8))
    p_scales = (head + (HIGH * 32 + LOW * 16) * BLOCK).to(gl.pointer_type(gl.float32))
    p_scales = p_scales + tile * (W // 2)
    if LOW > 0:
        codes = gl.allocate_shared_memory(gl.int8, [LOW, W // 32, 32, 16], SHARED3)
        scales = gl.allocate_shared_memory(gl.float32, [LOW, W // 32, 16], SHARED2)
        code_offsets = _vector_offsets(tile, W, BLOCK, 16)
        scale_offsets = _grid(W // 32, 16, 16, row_layout(4))
        for c in gl.static_range(LOW):
            _copy(codes.index(c), p_codes + c * (16 * BLOCK) + code_offsets)
            _copy(scales.index(c), p_scales + c * (BLOCK // 2) + scale_offsets)
    if HIGH > 0:
        halves = gl.allocate_shared_memory(half, [HIGH, W // 16, 32, 8], SHARED3)
        half_offsets = _vector_offsets(tile, W, BLOCK, 8)
        for c in gl.static_range(HIGH):
            _copy(halves.index(c), p_halves + c * (16 * BLOCK) + half_offsets)
    async_copy.commit_group()
    if OVERLAP == 2:
        _wait_for_previous_grid()
        _release_next_grid()  # not earlier: the next kernel reads states once this has waited

    # Meanwhile q, k and decay; the loops below would expose their latency if they read global memory.
    flat = gl.arange(0, KP, layout=flat_layout(KP))
    inside = flat < K
    channel = flat
    if INDEXED:
        channel = gl.load(key_index + h * K + flat, inside, 0).to(gl.int32)
    p_q = q + b.to(gl.int64) * q_batch + key_head * K
    p_k = k + b.to(gl.int64) * k_batch + key_head * K
    q_row = gl.load(p_q + channel, inside, 0.0).to(gl.float32)
    k_row = gl.load(p_k + channel, inside, 0.0).to(gl.float32)
    value = gl.load(v + b.to(gl.int64) * v_batch + (h * V + part * W) + columns).to(gl.float32)
    if SCALED:
        value_scale_row = gl.load(value_scale + (h * V + part * W) + columns)
    strength = gl.load(beta + b.to(gl.int64) * beta_batch + h).to(gl.float32)
    strength = _write_strength(strength, LOGIT)
    rate = 0.0
    bias = 0.0
    if GATE > 0:
        rate = gl.load(a_log + h)
    vectors = gl.allocate_shared_memory(gl.float32, [KP // 16, 2, 16], SHARED2)
    keys = gl.allocate_shared_memory(gl.float32, [KP // 16, 16], SHARED1)
    if KDA:
        a_row = gl.load(g + b.to(gl.int64) * g_batch + h * K + channel, inside, 0.0)
        if GATE > 0:
            bias = gl.load(dt_bias + h * K + channel, inside, 0.0)
        a_row = _decay_of(a_row.to(gl.float32), rate, bias, GATE, LOWER)
        k_read = k_row * a_row * UP
        q_read = q_row * a_row * UP
        decay = 1.0  # already in k_read, q_read and per channel below
        decays = gl.allocate_shared_memory(gl.float32, [KP // 16, 16], SHARED1)
        _view(decays, gl.float32, [KP // 16, 16], SHARED2).store(gl.reshape(a_row, [KP // 16, 16]))
    else:
        if GATE > 0:
            bias = gl.load(dt_bias + h)
        decay = gl.load(g + b.to(gl.int64) * g_batch + h).to(gl.float32)
        decay = _decay_of(decay, rate, bias, GATE, LOWER)
        k_read = k_row * UP
        q_read = q_row * UP
        decays = keys  # not read
    both = gl.permute(gl.reshape(gl.join(k_read, q_read), [KP // 16, 16, 2]), [0, 2, 1])
    _view(vectors, gl.float32, [KP // 16, 2, 16], SHARED3).store(both)
    _view(keys, gl.float32, [KP // 16, 16], SHARED2).store(gl.reshape(k_row, [KP // 16, 16]))
    q_norm = gl.rsqrt(gl.sum(q_row * q_row, 0) + NORM_EPSILON) * (K**-0.5)
    k_norm = gl.rsqrt(gl.sum(k_row * k_row, 0) + NORM_EPSILON)
    kq = gl.sum(k_row * q_row, 0) * q_norm * k_norm
    async_copy.wait_group(0)
    _barrier()

    if LOW > 0:
        sums = _sums_over_codes(codes, scales, vectors, LOW, HIGH, W)
    else:
        sums = gl.zeros([W, 8], gl.float32, layout=MMA)
    if HIGH > 0:
        sums = _sums_over_halves(sums, halves, vectors, HIGH, W, BF16)
    k_state, q_state = _own_sums(sums, W)

    target = _to_column(value, W) * strength
    if SCALED:
        c = _to_column(value_scale_row, W)
        target = target * _reciprocal(c)
    delta = target - k_state * (k_norm * strength * decay)
    o = q_state * (q_norm * decay) + kq * delta
    if SCALED:
        o = o * c
    gl.store(p_out + columns, _to_row(o, W).to(out.dtype.element_ty))

    step = gl.expand_dims(delta * (k_norm * (1.0 / UNIT)), 3)
    if HIGH > 0:
        _rewrite_halves(
            p_halves, halves, keys, decays, decay, step, tile, saturated,
            HIGH, KDA, W, BLOCK, BF16, COUNTED,
        )  # fmt: skip
    if LOW > 0:
        poison = gl.sum(
            gl.sum(step * 0.0, 0), 1
        )  # 0, or NaN where a delta of the group is not finite
        _rewrite_codes(
            p_codes, p_scales, codes, scales, keys, decays, decay, step, poison, tile,
            LOW, HIGH, KDA, W, BLOCK,
        )  # fmt: skip


def packed_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor,
    out: Tensor, value_scale: Tensor | None, layout: Layout, fusion: StepFusion = NO_FUSION,
    *, columns: int | None = None, warps: int = 1, overlap: int = 0,
) -> None:  # fmt: skip
    """Launch a matrix kernel; arguments as in `update.packed_step`, already checked.

    FMA fusion is asked for by name because the instruction budget depends on it and its default will change.

    Args:
        layout: in fragment order; a dense one has rows of 16 bits alone.
        columns: value columns of a program, at most `layout.block`; None: columns and warps by the number of
            heads in the batch (`matrix_form`).
        warps: of a program; several share the key channels of the same columns (gluon_split.py).
        overlap: programmatic dependent launch, see the kernel.
    """
    if columns is None:
        columns, warps = matrix_form(layout, v.shape[0] * v.shape[1])
    grid, pointers, constants = launch_arguments(
        q, k, v, g, beta, pool, slots, out, value_scale, layout, fusion, columns, overlap
    )
    if warps > 1:
        constants["WARPS"] = warps
    kernel = packed_kernel if warps == 1 else split_kernel
    kernel[grid](
        *pointers, **constants, num_warps=warps, enable_fp_fusion=True, launch_pdl=overlap > 0
    )


def matrix_form(layout: Layout, heads: int) -> tuple[int, int]:
    """Columns and warps of a program for `heads` heads in a batch: the narrower, the fewer they are."""
    tiles = heads * layout.value_dim // 128
    widest = layout.block if isinstance(layout, PackedLayout) else min(layout.block, 64)
    return next((c, w) for least, c, w in FORMS if tiles >= least and c <= widest)


FORMS: tuple[tuple[int, int, int], ...] = ((512, 128, 1), (256, 64, 1), (96, 32, 1), (0, 32, 4))
"""Least 128-column heads in a batch from which a program of these columns and warps is the fastest measured.

On an H200 at 128 x 128, GDN and KDA, gate fused, at 32, 128, 256, 512, 2,048 and 8,192 heads. Rows of 16 bits alone
run faster 64 columns wide (139 against 142 us at 8,192 heads).
"""
