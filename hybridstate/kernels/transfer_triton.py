"""Copies between pools and checkpoint buffers as plain Triton kernels, one launch for all layers.

A unit is a key row of V values; a retained head is K of them. `rows` holds flat key rows (layer, head, key) and `to`
their positions in a checkpoint, below zero where a row has none. Tables and slots as in `pack_triton`; a checkpoint
is one row of a uint8 buffer: rows of FP32, or all INT8 codes and then all scales.
"""

import triton
import triton.language as tl

from hybridstate.kernels.pack_triton import largest, nearest_code, scale_of

LEAST = tl.constexpr(1e-8)  # DASC Eq. 8: the amplitude of a row of zeros


@triton.jit
def _dense_rows(dense, table, slot, slot_values, row, live, HK: tl.constexpr, V: tl.constexpr):
    """First value of each flat key row in a float32 pool of rows order."""
    offset = tl.load(table + row // HK, live, 0) * 4
    return dense + slot * slot_values + offset + row % HK * V


@triton.jit
def gather_kernel(
    dense, table, slots, slot_values, buffer, into, buffer_step, scales_at, rows, to, count, B,
    HK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BR: tl.constexpr,
    INT8: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid: B * ceil(count / BR). Rows of slots into checkpoints, FP32 or INT8 with a scale of type SCALE."""
    blocks = tl.cdiv(count, BR)
    b = tl.program_id(0) // blocks
    slot = tl.load(slots + b)
    target = tl.load(into + b)
    if (slot < 0) | (target < 0):
        return
    i = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    live = i < count
    row = tl.load(rows + i, live, 0)
    at = tl.load(to + i, live, 0).to(tl.int64)
    cols = tl.arange(0, VP)
    inside = live[:, None] & (cols < V)[None, :]
    p = _dense_rows(dense, table, slot, slot_values, row, live, HK, V)
    x = tl.load(p[:, None] + cols[None, :], inside, 0.0)
    blob = buffer + target * buffer_step * 16
    spot = at[:, None] * V + cols[None, :]
    if INT8:
        top = tl.maximum(largest(x, 1), LEAST, propagate_nan=tl.PropagateNan.ALL)
        scale = scale_of(top).to(SCALE)
        wide = scale.to(tl.float32)
        divisor = tl.where(wide > 0, wide, 1.0)
        codes = nearest_code(x, divisor[:, None])
        tl.store(blob.to(tl.pointer_type(tl.int8)) + spot, codes, inside)
        tl.store((blob + scales_at).to(tl.pointer_type(SCALE)) + at, scale, live)
    else:
        tl.store(blob.to(tl.pointer_type(tl.float32)) + spot, x, inside)


@triton.jit
def scatter_kernel(
    dense, table, slots, slot_values, buffer, source, buffer_step, scales_at, rows, to, count, B,
    HK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BR: tl.constexpr,
    INT8: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The inverse of `gather_kernel`; a row without a position becomes zero."""
    blocks = tl.cdiv(count, BR)
    b = tl.program_id(0) // blocks
    slot = tl.load(slots + b)
    origin = tl.load(source + b)
    if (slot < 0) | (origin < 0):
        return
    i = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    live = i < count
    row = tl.load(rows + i, live, 0)
    at = tl.load(to + i, live, -1).to(tl.int64)
    cols = tl.arange(0, VP)
    inside = live[:, None] & (cols < V)[None, :]
    found = inside & (at >= 0)[:, None]
    blob = buffer + origin * buffer_step * 16
    spot = at[:, None] * V + cols[None, :]
    if INT8:
        codes = tl.load(blob.to(tl.pointer_type(tl.int8)) + spot, found, 0)
        p_scale = (blob + scales_at).to(tl.pointer_type(SCALE)) + at
        scale = tl.load(p_scale, live & (at >= 0), 0.0).to(tl.float32)
        x = codes.to(tl.float32) * scale[:, None]
    else:
        x = tl.load(blob.to(tl.pointer_type(tl.float32)) + spot, found, 0.0)
    p = _dense_rows(dense, table, slot, slot_values, row, live, HK, V)
    tl.store(p[:, None] + cols[None, :], x, inside)


@triton.jit
def refresh_kernel(
    source, source_table, source_slots, source_values, dense, table, slots, slot_values,
    rows, count, B,
    HK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid: B * ceil(count / BR). The given rows of slots from the same rows of another pool."""
    blocks = tl.cdiv(count, BR)
    b = tl.program_id(0) // blocks
    slot = tl.load(slots + b)
    origin = tl.load(source_slots + b)
    if (slot < 0) | (origin < 0):
        return
    i = tl.program_id(0) % blocks * BR + tl.arange(0, BR)
    live = i < count
    row = tl.load(rows + i, live, 0)
    cols = tl.arange(0, VP)
    inside = live[:, None] & (cols < V)[None, :]
    p = _dense_rows(source, source_table, origin, source_values, row, live, HK, V)
    x = tl.load(p[:, None] + cols[None, :], inside, 0.0)
    p = _dense_rows(dense, table, slot, slot_values, row, live, HK, V)
    tl.store(p[:, None] + cols[None, :], x, inside)


@triton.jit
def copy_kernel(
    source, source_table, source_slots, source_step, target, target_table, target_slots,
    target_step, words, B, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: layers * B * ceil(words / BLOCK). Runs of words; tables and steps count UNIT bytes.

    A word is 4 bytes where UNIT allows it, otherwise UNIT.
    """
    blocks = tl.cdiv(words, BLOCK)
    block = tl.program_id(0) % blocks
    b = tl.program_id(0) // blocks % B
    layer = tl.program_id(0) // blocks // B
    origin = tl.load(source_slots + b)
    slot = tl.load(target_slots + b)
    if (slot < 0) | (origin < 0):
        return
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p_source = source + (tl.load(source_table + layer) + origin * source_step) * UNIT
    p_target = target + (tl.load(target_table + layer) + slot * target_step) * UNIT
    word: tl.constexpr = tl.int32 if UNIT >= 4 else tl.int16 if UNIT == 2 else tl.int8
    kind: tl.constexpr = tl.pointer_type(word)
    x = tl.load(p_source.to(kind) + i, i < words)
    tl.store(p_target.to(kind) + i, x, i < words)
