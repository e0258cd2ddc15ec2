"""Deferred requantisation on packed 128 x 128 states with matrix instructions (Gluon, NVIDIA).

The mathematics and the ring are those of `ring_reference.py`; layouts and passes those of `gluon_update.py`. A step
whose ring has room reads the packed head once (pass 1 alone) and appends its input; the step that fills the ring
writes the head anew, in the same launch. Phases are per slot and head, read and written by the one program that owns
the head: no host decision, no atomic, fit for CUDA graphs.

- While the head is on its way to shared memory, the ring is folded into two sums per value column: scores
  k . (fade_i * k_i) and q . (fade_i * k_i) of the held entries, times their pseudo values. Lanes own 4 channels of
  every entry, so a ring row is one 256-byte access, and sums over entries stay inside a lane.
- A rewrite is S <- decay S + sum_i (fade_i k_i) u_i^T over at most 16 entries: one matrix product of depth 16 per
  tile, whose accumulators meet the codes' in the same registers. Both factors are float16.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.ring_parts import (
    CHANNEL,
    CODE_VECTORS,
    HALF_VECTORS,
    LEFT,
    MMA,
    NORM_EPSILON,
    Q_SCALE,
    RIGHT,
    ROUND,
    SCALE_VECTORS,
    SCALES,
    SHARED1,
    SHARED2,
    SHARED3,
    SUMS,
    TILE,
    TINY_GROUP,
    UNIT,
    UP,
    VALUE_ROWS,
    _barrier,
    _copy,
    _exp,
    _float16,
    _grid,
    _left_codes,
    _low_bytes,
    _own_group,
    _reciprocal,
    _sums_over_codes,
    _sums_over_halves,
    _to_column,
    _to_tile,
    _vector_offsets,
    _view,
)
from hybridstate.kernels.ring_reference import LEAST_LOG_DECAY, Ring

FLOOR = gl.constexpr(LEAST_LOG_DECAY)
DEPTH = gl.constexpr(16)
"""Entries of one matrix product; the longest ring."""


def _entries_layout(entries: int) -> gl.constexpr:
    """[entry, channel or value column]: a lane owns 4 columns of every entry."""
    return gl.constexpr(gl.BlockedLayout([entries, 4], [1, 32], [1, 1], [1, 0]))


ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0]))
ENTRIES = gl.constexpr(_entries_layout(16).value)
COLUMNS = gl.constexpr(gl.SliceLayout(0, ENTRIES.value))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _floored(g):
    """Log decays above the floor; a NaN stays one."""
    return gl.where(g < FLOOR, FLOOR, g)


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
    p_keys, p_values, p_gates, count, key, value, g,
    KDA: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """Left operand [value column, entry] and, in shared memory, [chunk, channel, entry] of the ring's product.

    With FRESH the present input is entry `count`; without it `g` is zero and nothing is added.
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
        values = gl.where(present, gl.expand_dims(value, 0), values)
    left = gl.reshape(values.to(gl.float16), [16, 8, 16])  # entry, r, i
    left = gl.reshape(gl.permute(left, [2, 1, 0]), [128, 16])
    left = gl.convert_layout(left, LEFT)
    # channel 4 j + 2 hh + e stands at column 8 hh + 2 j + e of the product, as codes do
    split = gl.permute(gl.reshape(keys.to(gl.float16), [16, 8, 4, 2, 2]), [1, 3, 2, 4, 0])
    right = gl.allocate_shared_memory(gl.float16, [8, 16, 16], SHARED2)
    _view(right, gl.float16, [8, 16, 16], SHARED3).store(gl.reshape(split, [8, 16, 16]))
    _barrier()
    return left, right


@gluon.jit
def _tile_of(x):
    """Accumulators [value column, channel] to [i, g, r % 2, channel]."""
    split = gl.reshape(x, [16, 4, 2, 2, 4, 2])
    tile = gl.reshape(gl.permute(split, [0, 1, 2, 4, 3, 5]), [16, 4, 2, 16])
    return gl.convert_layout(tile, TILE, assert_trivial=True)


@gluon.jit
def _rewrite(
    p_halves, p_codes, p_scales, halves, codes, scales, decays, decay, left, right,
    HIGH: gl.constexpr, KDA: gl.constexpr,
):  # fmt: skip
    """S <- decay S + left right, float16 rows stored as they are, INT8 rows with fresh scales."""
    LOW: gl.constexpr = 8 - HIGH
    zero = gl.zeros([128, 16], gl.float32, layout=MMA)
    if HIGH > 0:
        offsets = _vector_offsets(8, 8, HALF_VECTORS)
        for c in range(HIGH):
            split = gl.reshape(halves.index(c).load(HALF_VECTORS), [8, 4, 2, 4, 2, 4])
            old = gl.reshape(gl.permute(split, [0, 4, 1, 2, 3, 5]), [16, 4, 2, 16])
            old = gl.convert_layout(old, TILE, assert_trivial=True).to(gl.float32)
            write = _tile_of(mma_v2(left, right.index(c).permute((1, 0)).load(RIGHT), zero))
            if KDA:
                new = old * _to_tile(decays.index(c).load(CHANNEL)) + write
            else:
                new = old * decay + write
            split = gl.permute(gl.reshape(_float16(new), [8, 2, 4, 2, 4, 4]), [0, 2, 3, 4, 1, 5])
            new = gl.reshape(split, [8, 32, 8])
            new = gl.convert_layout(new, HALF_VECTORS, assert_trivial=True)
            gl.store(p_halves + c * 2048 + offsets, new)
    if LOW > 0:
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
        # A maximum drops NaN: a value that is not a number makes its column so in every channel, the first included,
        # and poisons the scales of its group.
        probe = _tile_of(mma_v2(left, right.index(0).permute((1, 0)).load(RIGHT), zero)) * 0.0
        poison = gl.sum(gl.sum(gl.sum(probe, 3), 0), 1)  # [g]
        poison = gl.convert_layout(poison, gl.SliceLayout(1, SCALES))
        poisons = gl.allocate_shared_memory(gl.float32, [4, 16], SHARED2)  # registers are scarce
        poisons.store(gl.expand_dims(poison, 1) + gl.zeros([4, 16], gl.float32, layout=SCALES))
        _barrier()
        for c in range(LOW):
            code = mma_v2(_left_codes(codes.index(c).load(CODE_VECTORS)), identity, minus_128)
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
        _copy(codes.index(c), p_codes + c * 2048 + _vector_offsets(4, 16, CODE_VECTORS))
        _copy(scales.index(c), p_scales + c * 64 + _grid(4, 16, 16, SCALE_VECTORS))
    for c in gl.static_range(HIGH):
        _copy(halves.index(c), p_halves + c * 2048 + _vector_offsets(8, 8, HALF_VECTORS))
    async_copy.commit_group()
    return p_halves, p_codes, p_scales, halves, codes, scales


@gluon.jit
def ring_kernel(
    q, k, v, g, beta, pool, ring_keys, ring_values, ring_gates, phases, value_scale, slots, out,
    q_batch, k_batch, v_batch, out_batch, slot_bytes, head_bytes,
    H: gl.constexpr, HK: gl.constexpr, KDA: gl.constexpr, SCALED: gl.constexpr,
    HIGH: gl.constexpr, EVERY: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Grid: batch * H, one warp each. MODE 0: by phase; 1: append always; 2: rewrite always."""
    RING: gl.constexpr = gl.BlockedLayout([EVERY, 4], [1, 32], [1, 1], [1, 0])
    FLAT: gl.constexpr = gl.SliceLayout(0, RING)
    ROOM: gl.constexpr = EVERY - 1
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
    p_phase = phases + slot * H + h
    count = gl.load(p_phase)
    head = pool + slot * slot_bytes + h * head_bytes
    p_halves, p_codes, p_scales, halves, codes, scales = _start_copy(head, HIGH)

    # The ring and the present input, while the head is on its way.
    flat = gl.arange(0, 128, layout=FLAT)
    q_row = gl.load(q + b.to(gl.int64) * q_batch + key_head * 128 + flat).to(gl.float32)
    k_row = gl.load(k + b.to(gl.int64) * k_batch + key_head * 128 + flat).to(gl.float32)
    value = gl.load(v + b.to(gl.int64) * v_batch + h * 128 + columns).to(gl.float32)
    if SCALED:
        value_scale_row = gl.load(value_scale + h * 128 + columns)
    strength = gl.load(beta + bh).to(gl.float32)
    p_keys = ring_keys + (slot * HK + key_head) * (ROOM * 128)
    p_values = ring_values + (slot * H + h) * (ROOM * 128)
    if KDA:
        p_gates = ring_gates + (slot * H + h) * (ROOM * 128)
        g_row = _floored(gl.load(g + bh.to(gl.int64) * 128 + flat).to(gl.float32))
        g_row = g_row.to(gl.float16).to(gl.float32)
    else:
        p_gates = ring_gates + (slot * H + h) * EVERY
        g_row = _floored(gl.load(g + bh).to(gl.float32))
    held = gl.arange(0, EVERY, layout=gl.SliceLayout(1, RING)) < count
    past_keys = _ring_rows(p_keys, held, flat)
    past_values = _ring_rows(p_values, held, flat)
    fades, total = _gates(p_gates, held, count, g_row, flat, KDA, True)
    if KDA:
        past_keys = past_keys * _exp(fades)
    k_scores = gl.sum(past_keys * gl.expand_dims(k_row, 0), 1)
    q_scores = gl.sum(past_keys * gl.expand_dims(q_row, 0), 1)
    if not KDA:
        fade = _exp(fades)
        k_scores = k_scores * fade
        q_scores = q_scores * fade
    k_ring = gl.sum(gl.expand_dims(k_scores, 1) * past_values, 0)
    q_ring = gl.sum(gl.expand_dims(q_scores, 1) * past_values, 0)
    k_ring = _to_column(gl.convert_layout(gl.reshape(k_ring, [8, 16]), VALUE_ROWS))
    q_ring = _to_column(gl.convert_layout(gl.reshape(q_ring, [8, 16]), VALUE_ROWS))

    vectors = gl.allocate_shared_memory(gl.float32, [8, 2, 16], SHARED2)
    decays = gl.allocate_shared_memory(gl.float32, [8, 16], SHARED1)
    if KDA:
        a_row = _exp(total)
        k_read = k_row * a_row * UP
        q_read = q_row * a_row * UP
        decay = 1.0  # already in k_read, q_read and per channel below
        _view(decays, gl.float32, [8, 16], SHARED2).store(gl.reshape(a_row, [8, 16]))
    else:
        decay = _exp(total)
        k_read = k_row * UP
        q_read = q_row * UP
    both = gl.permute(gl.reshape(gl.join(k_read, q_read), [8, 16, 2]), [0, 2, 1])
    _barrier()  # the layout changes above may have used the same memory
    _view(vectors, gl.float32, [8, 2, 16], SHARED3).store(both)
    q_norm = gl.rsqrt(gl.sum(q_row * q_row, 0) + NORM_EPSILON) * Q_SCALE
    k_norm = gl.rsqrt(gl.sum(k_row * k_row, 0) + NORM_EPSILON)
    kq = gl.sum(k_row * q_row, 0) * q_norm * k_norm
    async_copy.wait_group(0)
    _barrier()

    if HIGH < 8:
        sums = _sums_over_codes(codes, scales, vectors, 8 - HIGH, HIGH)
    else:
        sums = gl.zeros([128, 8], gl.float32, layout=MMA)
    if HIGH > 0:
        sums = _sums_over_halves(sums, halves, vectors, HIGH)
    sums = gl.convert_layout(gl.reshape(sums, [16, 4, 2, 4, 2]), SUMS, assert_trivial=True)
    k_sums, q_sums = gl.split(sums)
    k_state = _own_group(k_sums) * decay + k_ring
    q_state = _own_group(q_sums) * decay + q_ring

    target = _to_column(value) * strength
    if SCALED:
        c = _to_column(value_scale_row)
        target = target * _reciprocal(c)
    delta = target - k_state * (k_norm * strength)
    o = q_state * q_norm + kq * delta
    if SCALED:
        o = o * c
    turned = gl.permute(gl.reshape(o, [16, 8]), [1, 0])
    turned = gl.convert_layout(turned, VALUE_ROWS, assert_trivial=True)
    gl.store(p_out + columns, turned.to(out.dtype.element_ty))
    entry = gl.permute(gl.reshape(delta, [16, 8]), [1, 0])
    entry = _float16(gl.convert_layout(entry, VALUE_ROWS, assert_trivial=True))
    key = (k_row * k_norm).to(gl.float16)

    if MODE == 2:
        _end_rewrite(
            p_keys, p_values, p_gates, p_phase, count, key, entry, g_row,
            p_halves, p_codes, p_scales, halves, codes, scales, decays, decay, HIGH, KDA,
        )  # fmt: skip
    elif MODE == 1:
        _append(
            p_keys, p_values, p_gates, p_phase, count, key, entry, g_row, total, flat,
            h % (H // HK) == 0, KDA, ROOM,
        )  # fmt: skip
    elif count >= ROOM:
        _end_rewrite(
            p_keys, p_values, p_gates, p_phase, count, key, entry, g_row,
            p_halves, p_codes, p_scales, halves, codes, scales, decays, decay, HIGH, KDA,
        )  # fmt: skip
    else:
        _append(
            p_keys, p_values, p_gates, p_phase, count, key, entry, g_row, total, flat,
            h % (H // HK) == 0, KDA, ROOM,
        )  # fmt: skip


@gluon.jit
def _append(
    p_keys, p_values, p_gates, p_phase, count, key, value, g, total, flat, first_of_key_head,
    KDA: gl.constexpr, ROOM: gl.constexpr,
):  # fmt: skip
    """Put the present input behind the held ones; a full ring is left alone rather than overrun."""
    if count < ROOM:
        gl.store(p_values + count * 128 + _grid(8, 16, 16, VALUE_ROWS), value)
        if first_of_key_head:
            gl.store(p_keys + count * 128 + flat, key)
        if KDA:
            gl.store(p_gates + count * 128 + flat, g.to(gl.float16))
        else:
            gl.store(p_gates + count, total)
        gl.store(p_phase, count + 1)


@gluon.jit
def _end_rewrite(
    p_keys, p_values, p_gates, p_phase, count, key, value, g,
    p_halves, p_codes, p_scales, halves, codes, scales, decays, decay,
    HIGH: gl.constexpr, KDA: gl.constexpr,
):  # fmt: skip
    """Fold the ring and the present input into the packed head."""
    key = gl.convert_layout(key, COLUMNS, assert_trivial=True).to(gl.float32)
    value = gl.convert_layout(gl.reshape(value, [128]), COLUMNS).to(gl.float32)
    if KDA:
        g = gl.convert_layout(g, COLUMNS, assert_trivial=True)
    left, right = _fold_operands(p_keys, p_values, p_gates, count, key, value, g, KDA, True)
    _rewrite(
        p_halves,
        p_codes,
        p_scales,
        halves,
        codes,
        scales,
        decays,
        decay,
        left,
        right,
        HIGH,
        KDA,
    )
    gl.store(p_phase, 0)


@gluon.jit
def flush_kernel(
    pool, ring_keys, ring_values, ring_gates, phases, slots, slot_bytes, head_bytes,
    H: gl.constexpr, HK: gl.constexpr, KDA: gl.constexpr, HIGH: gl.constexpr,
    EVERY: gl.constexpr,
):  # fmt: skip
    """Grid: batch * H, one warp each: fold what the ring holds into the packed head and empty the ring."""
    ROOM: gl.constexpr = EVERY - 1
    bh = gl.program_id(0)
    b = bh // H
    h = bh % H
    slot = gl.load(slots + b).to(gl.int64)
    if slot < 0:
        return
    p_phase = phases + slot * H + h
    count = gl.load(p_phase)
    if count == 0:
        return
    head = pool + slot * slot_bytes + h * head_bytes
    p_halves, p_codes, p_scales, halves, codes, scales = _start_copy(head, HIGH)
    p_keys = ring_keys + (slot * HK + h // (H // HK)) * (ROOM * 128)
    p_values = ring_values + (slot * H + h) * (ROOM * 128)
    decays = gl.allocate_shared_memory(gl.float32, [8, 16], SHARED1)
    held = gl.arange(0, DEPTH, layout=gl.SliceLayout(1, ENTRIES)) < count
    columns = gl.arange(0, 128, layout=COLUMNS)
    zero = gl.zeros([128], gl.float32, layout=COLUMNS)
    if KDA:
        p_gates = ring_gates + (slot * H + h) * (ROOM * 128)
        _fades, total = _gates(p_gates, held, count, zero, columns, KDA, False)
        _view(decays, gl.float32, [8, 16], SHARED2).store(gl.reshape(_exp(total), [8, 16]))
        decay = 1.0
        left, right = _fold_operands(p_keys, p_values, p_gates, count, zero, zero, zero, KDA, False)
    else:
        p_gates = ring_gates + (slot * H + h) * EVERY
        _fades, total = _gates(p_gates, held, count, 0.0, columns, KDA, False)
        decay = _exp(total)
        left, right = _fold_operands(p_keys, p_values, p_gates, count, zero, zero, 0.0, KDA, False)
    async_copy.wait_group(0)
    _barrier()
    _rewrite(
        p_halves,
        p_codes,
        p_scales,
        halves,
        codes,
        scales,
        decays,
        decay,
        left,
        right,
        HIGH,
        KDA,
    )
    gl.store(p_phase, 0)


MODES = {"phase": 0, "append": 1, "rewrite": 2}
"""What a launch does after its output: as each head's phase says, or one thing for every head."""


def ring_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, ring: Ring,
    slots: Tensor, out: Tensor, value_scale: Tensor | None, layout: PackedLayout,
    mode: str = "phase",
) -> None:  # fmt: skip
    """Launch `ring_kernel`; arguments as in `ring_update.ring_step`, already checked.

    `append` needs room in every ring of the batch; a full ring would lose the input.
    """
    batch, heads, _ = v.shape
    ring_kernel[(batch * heads,)](
        q, k, v, g, beta, pool, ring.keys, ring.values, ring.gates, ring.phases,
        out if value_scale is None else value_scale, slots, out,
        q.stride(0), k.stride(0), v.stride(0), out.stride(0), pool.stride(0), layout.head_bytes,
        H=heads, HK=q.shape[1], KDA=g.dim() == 3, SCALED=value_scale is not None,
        HIGH=layout.k_hi // 16, EVERY=ring.every, MODE=MODES[mode], num_warps=1,
        enable_fp_fusion=True,
    )  # fmt: skip


def ring_flush(pool: Tensor, ring: Ring, slots: Tensor, layout: PackedLayout) -> None:
    """Launch `flush_kernel`; arguments as in `ring_update.ring_flush`, already checked."""
    heads = pool.shape[1]
    flush_kernel[(slots.shape[0] * heads,)](
        pool, ring.keys, ring.values, ring.gates, ring.phases, slots, pool.stride(0),
        layout.head_bytes, H=heads, HK=ring.keys.shape[1], KDA=ring.per_channel,
        HIGH=layout.k_hi // 16, EVERY=ring.every, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
