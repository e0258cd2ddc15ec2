"""The matrix-instruction step with the key channels of a head split over the warps of a program (Gluon, NVIDIA).

For batches that leave most of the device idle: one warp per tile walks all chunks of 16 key channels in turn, and
its latency is the time of the step. Here each of WARPS warps takes every WARPS-th chunk of the same W columns, the
two sums over key channels meet once in shared memory, and both passes are WARPS times shorter. Layout of the pool,
arithmetic and rounding are those of gluon_update.py; the sums are added in another order.

Key channels come rotated by the 16-bit rows, so that INT8 chunk c of warp w is chunk w of group c / WARPS whatever
HIGH is; the 16-bit rows keep copies of their own. A warp without a chunk computes on zeros and stores nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from hybridstate.kernels.gluon_parts import (
    HALF_LIMIT,
    NORM_EPSILON,
    ROUND,
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
    _low_bytes,
    _reciprocal,
    _release_next_grid,
    _truncated,
    _wait_for_previous_grid,
    _write_strength,
)
from hybridstate.kernels.gluon_split_parts import (
    SPLIT2,
    SPLIT3,
    SPLIT4,
    _channel_to_tile,
    _rows_of,
    _split_left_codes,
    _split_left_halves,
    _split_offsets,
    _split_own,
    _split_paired,
    _split_right,
    _stage,
    _stage_pair,
    _warp_axis,
    split_channel,
    split_columns,
    split_flat,
    split_mma,
    split_operand,
    split_rows,
    split_scales,
    split_sums,
    split_tile,
    split_vectors,
)


@gluon.jit
def split_kernel(
    q, k, v, g, beta, pool, value_scale, slots, out, a_log, dt_bias, key_index, saturated,
    q_batch, k_batch, v_batch, g_batch, beta_batch, out_batch, slot_bytes,
    H: gl.constexpr, HK: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HIGH: gl.constexpr,
    BF16: gl.constexpr, W: gl.constexpr, BLOCK: gl.constexpr, KDA: gl.constexpr,
    SCALED: gl.constexpr, GATE: gl.constexpr, LOWER: gl.constexpr, LOGIT: gl.constexpr,
    INDEXED: gl.constexpr, COUNTED: gl.constexpr, OVERLAP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Grid: batch * H * V / W, WARPS warps each; other constants as in `gluon_update.packed_kernel`."""
    LOW: gl.constexpr = K // 16 - HIGH
    KP: gl.constexpr = 64 if K <= 64 else (128 if K <= 128 else 256)
    LSTEPS: gl.constexpr = (LOW + WARPS - 1) // WARPS
    HSTEPS: gl.constexpr = (HIGH + WARPS - 1) // WARPS
    BLOCK_BYTES: gl.constexpr = BLOCK * (32 * HIGH + 18 * LOW)
    MMA: gl.constexpr = split_mma(WARPS)
    TILE: gl.constexpr = split_tile(W, WARPS)
    ROWS: gl.constexpr = split_rows(W // 8, WARPS)
    CODES: gl.constexpr = split_vectors(W // 32, 16, WARPS)
    HALVES: gl.constexpr = split_vectors(W // 16, 8, WARPS)
    SCALES: gl.constexpr = split_scales(W, WARPS)
    CHANNEL: gl.constexpr = split_channel(W, WARPS)
    COLUMNS: gl.constexpr = split_columns(W, WARPS)
    half: gl.constexpr = gl.bfloat16 if BF16 else gl.float16
    part = gl.program_id(0) % (V // W)
    bh = gl.program_id(0) // (V // W)
    b = bh // H
    h = bh % H
    key_head = h // (H // HK)
    tile = part % (BLOCK // W)
    columns = _grid(8, W // 8, W // 8, ROWS)
    p_out = out + b.to(gl.int64) * out_batch + h * V + part * W
    if OVERLAP == 1:
        _wait_for_previous_grid()
        _release_next_grid()
    slot = gl.load(slots + b).to(gl.int64)
    if slot < 0:
        if OVERLAP == 2:
            _wait_for_previous_grid()  # it may still read what `out` held
        gl.store(p_out + columns, gl.full([8, W // 8], 0.0, out.dtype.element_ty, layout=ROWS))
        return

    head = pool.to(gl.pointer_type(gl.uint8)) + slot * slot_bytes
    head = head + (h * (V // BLOCK * BLOCK_BYTES) + part // (BLOCK // W) * BLOCK_BYTES)
    p_halves = head.to(gl.pointer_type(half))
    p_codes = (head + HIGH * 32 * BLOCK).to(gl.pointer_type(gl.int8))
    p_scales = (head + (HIGH * 32 + LOW * 16) * BLOCK).to(gl.pointer_type(gl.float32))
    p_scales = p_scales + tile * (W // 2)
    code_offsets = _split_offsets(tile, W, BLOCK, 16, WARPS)
    half_offsets = _split_offsets(tile, W, BLOCK, 8, WARPS)
    if LOW > 0:
        memory_scales: gl.constexpr = gl.BlockedLayout(
            [1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0]
        )
        codes = gl.allocate_shared_memory(gl.int8, [LSTEPS, WARPS, W // 32, 32, 16], SPLIT4)
        scales = gl.allocate_shared_memory(gl.float32, [LSTEPS, WARPS, W // 32, 16], SPLIT3)
        sw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, memory_scales)))
        sw = gl.expand_dims(gl.expand_dims(sw, 1), 2)
        sg = gl.arange(0, W // 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, memory_scales)))
        su = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, memory_scales)))
        scale_offsets = sw * (BLOCK // 2) + gl.expand_dims(gl.expand_dims(sg * 16, 0), 2)
        scale_offsets = scale_offsets + gl.expand_dims(gl.expand_dims(su, 0), 0)
        for s in gl.static_range(LSTEPS):
            _copy(
                codes.index(s), p_codes + s * (WARPS * 16 * BLOCK) + code_offsets,
                mask=_warp_axis(CODES, WARPS) < LOW - s * WARPS,
            )  # fmt: skip
            _copy(
                scales.index(s), p_scales + s * (WARPS * BLOCK // 2) + scale_offsets,
                mask=sw < LOW - s * WARPS,
            )  # fmt: skip
    if HIGH > 0:
        halves = gl.allocate_shared_memory(half, [HSTEPS, WARPS, W // 16, 32, 8], SPLIT4)
        for s in gl.static_range(HSTEPS):
            _copy(
                halves.index(s), p_halves + s * (WARPS * 16 * BLOCK) + half_offsets,
                mask=_warp_axis(HALVES, WARPS) < HIGH - s * WARPS,
            )  # fmt: skip
    async_copy.commit_group()
    if OVERLAP == 2:
        _wait_for_previous_grid()
        _release_next_grid()

    p_q = q + b.to(gl.int64) * q_batch + key_head * K
    p_k = k + b.to(gl.int64) * k_batch + key_head * K
    p_g = g + b.to(gl.int64) * g_batch + (h * K if KDA else h)
    p_bias = dt_bias + (h * K if KDA else h)
    p_index = key_index + h * K
    value = gl.load(v + b.to(gl.int64) * v_batch + (h * V + part * W) + columns).to(gl.float32)
    if SCALED:
        value_scale_row = gl.load(value_scale + (h * V + part * W) + columns)
    strength = gl.load(beta + b.to(gl.int64) * beta_batch + h).to(gl.float32)
    strength = _write_strength(strength, LOGIT)
    rate = 0.0
    if GATE > 0:
        rate = gl.load(a_log + h)
    decay = 1.0  # KDA: already in what the sums multiply by, and per channel below
    if not KDA:
        bias = 0.0
        if GATE > 0:
            bias = gl.load(p_bias)
        decay = _decay_of(gl.load(p_g).to(gl.float32), rate, bias, GATE, LOWER)
    flat = gl.arange(0, KP, layout=split_flat(KP, WARPS))
    inside = flat < K
    row = flat + 16 * HIGH  # rotated: INT8 rows first
    row = gl.where(row < K, row, row - K)
    q_row, k_row, a_row = _rows_of(
        p_q, p_k, p_g, rate, p_bias, p_index, row, inside, KDA, GATE, LOWER, INDEXED
    )
    q_norm = gl.rsqrt(gl.sum(q_row * q_row, 0) + NORM_EPSILON) * (K**-0.5)
    k_norm = gl.rsqrt(gl.sum(k_row * k_row, 0) + NORM_EPSILON)
    kq = gl.sum(k_row * q_row, 0) * q_norm * k_norm
    if LOW > 0:
        low_pairs = gl.allocate_shared_memory(gl.float32, [KP // 16 // WARPS, WARPS, 2, 16], SPLIT3)
        low_keys = gl.allocate_shared_memory(gl.float32, [KP // 16 // WARPS, WARPS, 16], SPLIT2)
        low_decays = low_keys
        _stage(low_keys, k_row, KP // 16)
        if KDA:
            low_decays = gl.allocate_shared_memory(
                gl.float32, [KP // 16 // WARPS, WARPS, 16], SPLIT2
            )
            _stage(low_decays, a_row, KP // 16)
            _stage_pair(low_pairs, k_row * a_row * UP, q_row * a_row * UP, KP // 16)
        else:
            _stage_pair(low_pairs, k_row * UP, q_row * UP, KP // 16)
    if HIGH > 0:
        first = gl.arange(0, HSTEPS * WARPS * 16, layout=split_flat(HSTEPS * WARPS * 16, WARPS))
        q_high, k_high, a_high = _rows_of(
            p_q, p_k, p_g, rate, p_bias, p_index, first, first < 16 * HIGH,
            KDA, GATE, LOWER, INDEXED,
        )  # fmt: skip
        high_pairs = gl.allocate_shared_memory(gl.float32, [HSTEPS, WARPS, 2, 16], SPLIT3)
        high_keys = gl.allocate_shared_memory(gl.float32, [HSTEPS, WARPS, 16], SPLIT2)
        high_decays = high_keys
        _stage(high_keys, k_high, HSTEPS * WARPS)
        if KDA:
            high_decays = gl.allocate_shared_memory(gl.float32, [HSTEPS, WARPS, 16], SPLIT2)
            _stage(high_decays, a_high, HSTEPS * WARPS)
            _stage_pair(high_pairs, k_high * a_high, q_high * a_high, HSTEPS * WARPS)
        else:
            _stage_pair(high_pairs, k_high, q_high, HSTEPS * WARPS)
    async_copy.wait_group(0)
    _barrier()

    paired: gl.constexpr = gl.SliceLayout(
        2, split_operand(W, WARPS)
    )  # [warp, group, {k, q}, channel]
    total = gl.zeros([WARPS, W, 8], gl.float32, layout=MMA)
    if LOW > 0:
        offset = gl.zeros([WARPS, 16, 8], gl.float32, layout=MMA)
        left128: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
        all_128 = gl.full([WARPS, 16, 16], 0x0080, gl.int16, layout=left128)
        all_128 = all_128.to(gl.bfloat16, bitcast=True)
        ow = gl.arange(
            0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(2, paired)))
        )
        ow = gl.expand_dims(gl.expand_dims(ow, 1), 2)
        for s in gl.static_range(LSTEPS):
            left = _split_left_codes(codes.index(s).load(CODES), W, WARPS)
            scale = scales.index(s).load(gl.SliceLayout(2, paired))
            scale = gl.where(ow < LOW - s * WARPS, scale, 0.0)  # no chunk: whatever lies there
            right = _split_paired(
                scale, low_pairs.index(s).load(gl.SliceLayout(1, paired)), W, WARPS
            )
            high = _truncated(right)
            right_high = _split_right(_bfloat16(high), W, WARPS)
            right_low = _split_right(_bfloat16(right - high), W, WARPS)
            total = mma_v2(left, right_high, total)
            total = mma_v2(left, right_low, total)
            offset = mma_v2(all_128, right_high, offset)
            offset = mma_v2(all_128, right_low, offset)
        split = gl.reshape(offset, [WARPS, 2, W // 32, 256 // W, 4, 2])
        split = gl.convert_layout(split, split_sums(W, WARPS, 2), assert_trivial=True)
        constant = gl.max(split, 1)  # all rows are equal
        full: gl.constexpr = split_sums(W, WARPS, W // 8)
        constant = gl.convert_layout(constant, gl.SliceLayout(1, full), assert_trivial=True)
        total = gl.reshape(total, [WARPS, W // 8, W // 32, 256 // W, 4, 2])
        total = gl.convert_layout(total, full, assert_trivial=True)
        total = total * UNIT - gl.expand_dims(constant * UNIT, 1)
        total = gl.convert_layout(gl.reshape(total, [WARPS, W, 8]), MMA, assert_trivial=True)
    if HIGH > 0:
        ones = gl.full([WARPS, W // 32, 16], 1.0, gl.float32, layout=gl.SliceLayout(2, paired))
        for s in gl.static_range(HSTEPS):
            stored = halves.index(s).load(HALVES)
            if HIGH % WARPS != 0:
                stored = gl.where(_warp_axis(HALVES, WARPS) < HIGH - s * WARPS, stored, 0.0)
            left = _split_left_halves(stored.to(half), W, WARPS)
            right = _split_paired(
                ones, high_pairs.index(s).load(gl.SliceLayout(1, paired)), W, WARPS
            )
            if BF16:
                upper = _bfloat16(_truncated(right))
                lower = _bfloat16(right - _truncated(right))
            else:
                upper = right.to(gl.float16)
                lower = (right - upper.to(gl.float32)).to(gl.float16)
            total = mma_v2(left, _split_right(upper, W, WARPS), total)
            total = mma_v2(left, _split_right(lower, W, WARPS), total)
    total = gl.reshape(total, [WARPS, W // 8, W // 32, 256 // W, 4, 2])
    total = gl.convert_layout(total, split_sums(W, WARPS, W // 8), assert_trivial=True)
    k_sums, q_sums = gl.split(total)
    k_state = _split_own(k_sums, W, WARPS)
    q_state = _split_own(q_sums, W, WARPS)

    value = gl.reshape(gl.permute(value, [1, 0]), [W // 8, W // 32, 256 // W])
    target = gl.convert_layout(value, COLUMNS, assert_trivial=True) * strength
    if SCALED:
        c = gl.reshape(gl.permute(value_scale_row, [1, 0]), [W // 8, W // 32, 256 // W])
        c = gl.convert_layout(c, COLUMNS, assert_trivial=True)
        target = target * _reciprocal(c)
    delta = target - k_state * (k_norm * strength * decay)
    o = q_state * (q_norm * decay) + kq * delta
    if SCALED:
        o = o * c
    o = gl.permute(gl.reshape(o, [W // 8, 8]), [1, 0])
    o = gl.convert_layout(o, ROWS, assert_trivial=True)
    gl.store(p_out + columns, o.to(out.dtype.element_ty))

    step = gl.expand_dims(gl.expand_dims(delta * (k_norm * (1.0 / UNIT)), 0), 4)
    if HIGH > 0:
        for s in gl.static_range(HSTEPS):
            old = halves.index(s).load(HALVES)
            old = gl.reshape(old, [WARPS, W // 16, W // 32, 256 // W, 4, 2, 4])
            old = gl.permute(old, [0, 1, 5, 2, 3, 4, 6])
            old = gl.reshape(old, [WARPS, W // 8, W // 32, 256 // W, 16])
            old = gl.convert_layout(old, TILE, assert_trivial=True).to(gl.float32)
            write = high_keys.index(s).load(CHANNEL) * UNIT
            write = _channel_to_tile(write) * step
            fade = decay
            if KDA:
                fade = _channel_to_tile(high_decays.index(s).load(CHANNEL))
            new = old * fade + write
            if COUNTED:
                tw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, CHANNEL))
                tw = _channel_to_tile(gl.expand_dims(tw, 1))
                hits = ((gl.abs(new) > HALF_LIMIT) & (tw < HIGH - s * WARPS)).to(gl.int32)
                count = gl.sum(gl.sum(gl.sum(gl.sum(gl.sum(hits, 1), 1), 1), 1), 0)
                if count > 0:
                    gl.atomic_add(saturated, count)
            if BF16:
                stored = _bfloat16(new)
            else:
                stored = _float16(new)
            stored = gl.reshape(stored, [WARPS, W // 16, 2, 8, 4, 4])
            stored = gl.reshape(gl.permute(stored, [0, 1, 3, 4, 2, 5]), [WARPS, W // 16, 32, 8])
            stored = gl.convert_layout(stored, HALVES, assert_trivial=True)
            gl.store(
                p_halves + s * (WARPS * 16 * BLOCK) + half_offsets, stored,
                mask=_warp_axis(HALVES, WARPS) < HIGH - s * WARPS,
            )  # fmt: skip
    if LOW > 0:
        right_layout: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
        r16 = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, right_layout)))
        c16 = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, right_layout)))
        diagonal = gl.expand_dims(gl.expand_dims(r16, 0), 2) == gl.expand_dims(
            gl.expand_dims(c16, 0), 1
        )
        identity = gl.where(diagonal, UP, 0.0).to(gl.bfloat16)
        identity = identity + gl.full([WARPS, 16, 16], 0.0, gl.bfloat16, layout=right_layout)
        minus_128 = gl.full([WARPS, W, 16], -128.0 / UNIT, gl.float32, layout=MMA)
        poison = gl.sum(gl.sum(step * 0.0, 1), 2)  # [1, group, 1]; NaN where a delta is not finite
        pw = gl.arange(0, WARPS, layout=gl.SliceLayout(1, CHANNEL))
        pw = gl.expand_dims(gl.expand_dims(pw, 1), 1)
        pg = gl.arange(0, W // 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, SCALES)))
        pu = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, SCALES)))
        places = pw * (BLOCK // 2) + gl.expand_dims(gl.expand_dims(pg * 16, 0), 2)
        places = places + gl.expand_dims(gl.expand_dims(pu, 0), 1)
        for s in gl.static_range(LSTEPS):
            left = _split_left_codes(codes.index(s).load(CODES), W, WARPS)
            old = mma_v2(left, identity, minus_128)
            scale = scales.index(s).load(SCALES)
            if KDA:
                scale = scale * gl.expand_dims(low_decays.index(s).load(CHANNEL), 1)
            else:
                scale = scale * decay
            scale = gl.maximum(scale, TINY_SCALE)
            key = low_keys.index(s).load(CHANNEL)
            kappa = gl.expand_dims(key, 1) * _reciprocal(scale)
            new = gl.reshape(old, [WARPS, W // 8, W // 32, 256 // W, 2, 4, 2])
            new = gl.reshape(
                gl.permute(new, [0, 1, 2, 3, 5, 4, 6]), [WARPS, W // 8, W // 32, 256 // W, 16]
            )
            new = gl.convert_layout(new, TILE, assert_trivial=True)
            new = new + gl.expand_dims(gl.expand_dims(kappa, 2), 1) * step
            largest = gl.maximum(gl.max(gl.max(gl.abs(new), 1), 2), TINY_GROUP)
            gl.store(
                p_scales + s * (WARPS * BLOCK // 2) + places,
                largest * scale * (UNIT / 127.0) + poison,
                mask=pw < LOW - s * WARPS,
            )
            inverse = 127.0 * _reciprocal(largest)
            rounded = new * gl.expand_dims(gl.expand_dims(inverse, 2), 1) + ROUND
            bytes_ = gl.reshape(_low_bytes(rounded), [WARPS, W // 32, 4, 8, 4, 4])
            bytes_ = gl.reshape(gl.permute(bytes_, [0, 1, 3, 4, 2, 5]), [WARPS, W // 32, 32, 16])
            bytes_ = gl.convert_layout(bytes_, CODES, assert_trivial=True)
            gl.store(
                p_codes + s * (WARPS * 16 * BLOCK) + code_offsets, bytes_,
                mask=_warp_axis(CODES, WARPS) < LOW - s * WARPS,
            )  # fmt: skip
