"""Dense states to packed slots and back as plain Triton kernels, one launch for all layers.

A program moves 16 key rows (fragment order) or one group of value columns (natural order) of one head of one slot.
Tiles are read in the order of one side and written in that of the other; between them they change owner inside the
program, so both sides see full 16-byte accesses. Rounding is that of `PackedLayout.pack` bit for bit: divisions are
IEEE divisions, ties go to even, and a NaN reaches the scale of its group, so that it shows after unpacking.

Addresses: a `table` holds each layer's distance from the first one in units of 16 bytes, `slots` the int64 slot of
each batch row (below zero: skipped). In ragged form the dense side is the row buffer of a checkpoint and `place` the
position of each key row in it, below zero where it is omitted (read as zero, not written). Packing multiplies by
`value_scale`, which then holds the rounded reciprocals 1 / c; unpacking multiplies by c.
"""

import os

import triton
import triton.language as tl

DIVIDES = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: the nearest-even integer lands in the low bits
HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def largest(x, axis: tl.constexpr):
    """max|x| along an axis; the bits of |x| order like |x| and put NaN last, so that it is not lost."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(top):
    """top / 127 as IEEE division rounds it.

    127 is a whole number, so the remainder of a quotient is exact and no quotient is a tie: a fused correction is right
    for every top, below the smallest normal number too. The interpreter cannot fuse and divides.
    """
    if DIVIDES:
        scale = tl.div_rn(top, tl.full(top.shape, 127.0, tl.float32))
    else:
        minus = tl.full(top.shape, -127.0, tl.float32)
        inverse = tl.full(top.shape, 1.0 / 127.0, tl.float32)
        scale = top * inverse
        for _ in tl.static_range(2):
            scale = tl.fma(tl.fma(scale, minus, top), inverse, scale)
    return scale


@triton.jit
def nearest_code(x, divisor):
    """round_half_even(x / divisor) in [-127, 127] as int8; `divisor` has length 1 where it is shared.

    The quotient is rounded as IEEE division rounds it, by the instructions that a division becomes where no range has
    to be checked: a refined reciprocal, shared by all values of a divisor, and two corrections with fused remainders.
    Tiny divisors are first lifted by a power of two, so that no remainder is lost below the smallest number.
    """
    if DIVIDES:
        ratio = tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    else:
        lift = tl.where(divisor < 1e-18, 1.8446744073709552e19, 1.0)  # 2^64
        d = divisor * lift
        reciprocal = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [d], dtype=tl.float32, is_pure=True, pack=1
        )
        one = tl.full(d.shape, 1.0, tl.float32)
        reciprocal = tl.fma(reciprocal, tl.fma(-d, reciprocal, one), reciprocal)
        reciprocal = tl.broadcast_to(reciprocal, x.shape)
        negative = tl.broadcast_to(-d, x.shape)
        x = x * lift
        ratio = x * reciprocal
        ratio = tl.fma(tl.fma(ratio, negative, x), reciprocal, ratio)
        ratio = tl.fma(tl.fma(ratio, negative, x), reciprocal, ratio)
    ratio = tl.minimum(tl.maximum(ratio, -127.0), 127.0)
    return (ratio + ROUND).to(tl.int32, bitcast=True).to(tl.int8)


def _skipping_zeros() -> str:
    """PTX of `nearest_code` for four values at once, codes as one word, behind a branch around four zeros."""
    lines = [
        "{ .reg .pred zero, tiny; .reg .b32 word, any, lift, d, n, e, r, x, q, low, high;",
        ".reg .b32 code0, code1, code2, code3;",
        "or.b32 any, $1, $2; or.b32 any, any, $3; or.b32 any, any, $4;",
        "and.b32 any, any, 0x7fffffff; mov.b32 word, 0; setp.eq.u32 zero, any, 0;",
        "@zero bra done;",
    ]
    for n in range(4):
        lines += [
            f"setp.lt.f32 tiny, ${5 + n}, 0f219392EF; selp.b32 lift, 0x5f800000, 0x3f800000, tiny;",
            f"mul.rn.f32 d, ${5 + n}, lift; neg.f32 n, d; rcp.approx.ftz.f32 r, d;",
            "fma.rn.f32 e, n, r, 0f3f800000; fma.rn.f32 r, r, e, r;",
            f"mul.rn.f32 x, ${1 + n}, lift; mul.rn.f32 q, x, r;",
            "fma.rn.f32 e, q, n, x; fma.rn.f32 q, e, r, q;",
            "fma.rn.f32 e, q, n, x; fma.rn.f32 q, e, r, q;",
            "max.f32 q, q, 0fc2fe0000; min.f32 q, q, 0f42fe0000;",
            f"add.rn.f32 code{n}, q, 0f4b400000;",
        ]
    lines += [
        "prmt.b32 low, code0, code1, 0x0040; prmt.b32 high, code2, code3, 0x0040;",
        "prmt.b32 word, low, high, 0x5410;",
        "done: mov.b32 $0, word; }",
    ]
    return "\n".join(lines)


SKIPPING_ZEROS = tl.constexpr(_skipping_zeros())


@triton.jit
def sparse_code(x, divisor):
    """`nearest_code` for tiles most rows of which are zero, as omitted rows of a checkpoint are."""
    if DIVIDES:
        code = nearest_code(x, divisor)
    else:
        code = tl.inline_asm_elementwise(
            SKIPPING_ZEROS, "=r,r,r,r,r,r,r,r,r", [x, tl.broadcast_to(divisor, x.shape)],
            dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    return code


@triton.jit
def _half(x):
    """float32 to float16, saturating at 65,504; NaN stays NaN."""
    bounded = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX)
    return tl.where(x == x, bounded, x).to(tl.float16)


@triton.jit
def _as_stored(x, dtype: tl.constexpr):
    """float32 to the dtype of a dense pool."""
    return _half(x) if dtype == tl.float16 else x.to(dtype)


@triton.jit
def _group_scale(x, axis: tl.constexpr):
    """Scale of each group along an axis (DAMP Eq. 5) and the divisor that a scale of zero stands for."""
    top = largest(x, axis)
    scale = scale_of(top)
    return scale, tl.where(scale > 0, scale, 1.0)


@triton.jit
def _dense_head(dense, table, layer, slot, slot_values, head, VALUES: tl.constexpr):
    """First value of one head of a dense pool."""
    step: tl.constexpr = 128 // dense.dtype.element_ty.primitive_bitwidth
    return dense + tl.load(table + layer) * step + slot * slot_values + head * VALUES


@triton.jit
def pack_fragment_kernel(
    dense, dense_table, dense_slots, slot_values, pool, pool_table, pool_slots, slot_bytes,
    order, value_scale, place, B,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KHI: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_BYTES: tl.constexpr, TILE: tl.constexpr, S_TILE: tl.constexpr, S_ROW: tl.constexpr,
    S_COL: tl.constexpr, ORDERED: tl.constexpr, SCALED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Grid: layers * B * H * V / BLOCK * K / 16; a program moves 16 key rows of a block of value columns."""
    G: tl.constexpr = BLOCK // 32
    I: tl.constexpr = BLOCK // 8
    PARTS: tl.constexpr = K // 16 * (V // BLOCK)
    part = tl.program_id(0) % PARTS
    chunk = part % (K // 16)
    block = part // (K // 16)
    head = tl.program_id(0) // PARTS % H
    b = tl.program_id(0) // (PARTS * H) % B
    layer = tl.program_id(0) // (PARTS * H) // B
    rows = chunk * 16 + tl.arange(0, 16)
    cols = block * BLOCK + tl.arange(0, G)[:, None] * 32 + tl.arange(0, 32)[None, :]
    unit = layer * H + head
    # everything that needs no slot is asked for before the slots are there
    logical = tl.load(order + unit * K + rows).to(tl.int32) if ORDERED else rows
    position = tl.load(place + unit * K + logical) if RAGGED else logical
    source = tl.load(dense_slots + b)
    target = tl.load(pool_slots + b)
    if (source < 0) | (target < 0):
        return
    if RAGGED:
        at = position.to(tl.int64)[:, None]
        flat = tl.arange(0, BLOCK)[None, :]  # a warp then reads whole rows, and skips omitted ones
        p = dense + source * slot_values + block * BLOCK + at * V + flat
        x = tl.reshape(tl.load(p, (at >= 0) & (flat >= 0), 0.0).to(tl.float32), [16, G, 32])
    else:
        p = _dense_head(dense, dense_table, layer, source, slot_values, head, K * V)
        at = (cols // TILE * S_TILE + cols % TILE * S_COL)[None, :, :]
        x = tl.load(p + logical[:, None, None] * S_ROW + at).to(tl.float32)
    if SCALED:
        x = x * tl.load(value_scale + unit * V + cols)[None, :, :]
    blob = pool + tl.load(pool_table + layer) * 16 + target * slot_bytes + head * HEAD_BYTES
    blob += block * (HEAD_BYTES * BLOCK // V)
    linear = tl.arange(0, 16 * BLOCK)
    if chunk * 16 < KHI:
        halves = tl.permute(tl.reshape(_half(x), [4, 4, 8, I // 2, 2]), [3, 2, 0, 4, 1])
        p_hi = blob.to(tl.pointer_type(tl.float16)) + chunk * (16 * BLOCK)
        tl.store(p_hi + linear, tl.reshape(halves, [16 * BLOCK]))
    else:
        low = chunk - KHI // 16
        scale, divisor = _group_scale(x, 2)
        if RAGGED:
            codes = sparse_code(x, divisor[:, :, None]) ^ -128
        else:
            codes = nearest_code(x, divisor[:, :, None]) ^ -128
        codes = tl.permute(tl.reshape(codes, [4, 4, 8, I // 4, 4]), [3, 2, 0, 4, 1])
        p_lo = (blob + KHI * BLOCK * 2).to(tl.pointer_type(tl.int8)) + low * (16 * BLOCK)
        tl.store(p_lo + linear, tl.reshape(codes, [16 * BLOCK]))
        p_scale = (blob + KHI * BLOCK * 2 + (K - KHI) * BLOCK).to(tl.pointer_type(tl.float32))
        spot = tl.arange(0, G)[None, :] * 16 + tl.arange(0, 16)[:, None]
        tl.store(p_scale + low * (16 * G) + spot, scale)


@triton.jit
def unpack_fragment_kernel(
    dense, dense_table, dense_slots, slot_values, pool, pool_table, pool_slots, slot_bytes,
    order, value_scale, place, B,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KHI: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_BYTES: tl.constexpr, TILE: tl.constexpr, S_TILE: tl.constexpr, S_ROW: tl.constexpr,
    S_COL: tl.constexpr, ORDERED: tl.constexpr, SCALED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The inverse of `pack_fragment_kernel`; same grid."""
    G: tl.constexpr = BLOCK // 32
    I: tl.constexpr = BLOCK // 8
    PARTS: tl.constexpr = K // 16 * (V // BLOCK)
    part = tl.program_id(0) % PARTS
    chunk = part % (K // 16)
    block = part // (K // 16)
    head = tl.program_id(0) // PARTS % H
    b = tl.program_id(0) // (PARTS * H) % B
    layer = tl.program_id(0) // (PARTS * H) // B
    target = tl.load(dense_slots + b)
    source = tl.load(pool_slots + b)
    if (source < 0) | (target < 0):
        return
    rows = chunk * 16 + tl.arange(0, 16)
    cols = block * BLOCK + tl.arange(0, G)[:, None] * 32 + tl.arange(0, 32)[None, :]
    unit = layer * H + head
    blob = pool + tl.load(pool_table + layer) * 16 + source * slot_bytes + head * HEAD_BYTES
    blob += block * (HEAD_BYTES * BLOCK // V)
    linear = tl.arange(0, 16 * BLOCK)
    if chunk * 16 < KHI:
        p_hi = blob.to(tl.pointer_type(tl.float16)) + chunk * (16 * BLOCK)
        halves = tl.reshape(tl.load(p_hi + linear), [I // 2, 8, 4, 2, 4])
        halves = tl.permute(halves, [2, 4, 1, 0, 3])
        x = tl.reshape(halves, [16, G, 32]).to(tl.float32)
    else:
        low = chunk - KHI // 16
        p_lo = (blob + KHI * BLOCK * 2).to(tl.pointer_type(tl.int8)) + low * (16 * BLOCK)
        codes = tl.reshape(tl.load(p_lo + linear) ^ -128, [I // 4, 8, 4, 4, 4])
        codes = tl.permute(codes, [2, 4, 1, 0, 3])
        p_scale = (blob + KHI * BLOCK * 2 + (K - KHI) * BLOCK).to(tl.pointer_type(tl.float32))
        spot = tl.arange(0, G)[None, :] * 16 + tl.arange(0, 16)[:, None]
        scale = tl.load(p_scale + low * (16 * G) + spot)
        x = tl.reshape(codes, [16, G, 32]).to(tl.float32) * scale[:, :, None]
    if SCALED:
        x = x * tl.load(value_scale + unit * V + cols)[None, :, :]
    logical = tl.load(order + unit * K + rows).to(tl.int32) if ORDERED else rows
    x = _as_stored(x, dense.dtype.element_ty)
    if RAGGED:
        at = tl.load(place + unit * K + logical).to(tl.int64)[:, None, None]
        p = dense + target * slot_values + at * V + cols[None, :, :]
        tl.store(p, x, (at >= 0) & (cols >= 0)[None, :, :])
    else:
        p = _dense_head(dense, dense_table, layer, target, slot_values, head, K * V)
        at = (cols // TILE * S_TILE + cols % TILE * S_COL)[None, :, :]
        tl.store(p + logical[:, None, None] * S_ROW + at, x)


@triton.jit
def _natural_rows(
    p, place, order, unit, rows, in_rows, cols, in_cols,
    K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, S_TILE: tl.constexpr,
    S_ROW: tl.constexpr, S_COL: tl.constexpr, ORDERED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Pointers and mask of a [column, row] tile of the dense side; `rows` are stored key rows."""
    logical = rows
    if ORDERED:
        logical = tl.load(order + unit * K + rows, in_rows, 0).to(tl.int32)
    live = in_cols[:, None] & in_rows[None, :]
    if RAGGED:
        at = tl.load(place + unit * K + logical, in_rows, -1).to(tl.int64)
        return p + at[None, :] * V + cols[:, None], live & (at >= 0)[None, :]
    spot = cols // TILE * S_TILE + cols % TILE * S_COL
    return p + (logical * S_ROW)[None, :] + spot[:, None], live


@triton.jit
def pack_natural_kernel(
    dense, dense_table, dense_slots, slot_values, pool, pool_table, pool_slots, slot_bytes,
    order, value_scale, place, B,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KHI: tl.constexpr, GROUP: tl.constexpr,
    HEAD_BYTES: tl.constexpr, TILE: tl.constexpr, S_TILE: tl.constexpr, S_ROW: tl.constexpr,
    S_COL: tl.constexpr, ORDERED: tl.constexpr, SCALED: tl.constexpr, RAGGED: tl.constexpr,
    GP: tl.constexpr, HP: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """Grid: layers * B * H * groups; GP, HP, LP: group, FP16 rows, INT8 rows as powers of two."""
    KLO: tl.constexpr = K - KHI
    G: tl.constexpr = (V + GROUP - 1) // GROUP
    group = tl.program_id(0) % G
    head = tl.program_id(0) // G % H
    b = tl.program_id(0) // (G * H) % B
    layer = tl.program_id(0) // (G * H) // B
    source = tl.load(dense_slots + b)
    target = tl.load(pool_slots + b)
    if (source < 0) | (target < 0):
        return
    unit = layer * H + head
    cols = group * GROUP + tl.arange(0, GP)
    in_cols = (tl.arange(0, GP) < GROUP) & (cols < V)
    if RAGGED:
        p = dense + source * slot_values
    else:
        p = _dense_head(dense, dense_table, layer, source, slot_values, head, K * V)
    c = tl.load(value_scale + unit * V + cols, in_cols, 1.0)[:, None] if SCALED else 1.0
    blob = pool + tl.load(pool_table + layer) * 16 + target * slot_bytes + head * HEAD_BYTES
    if KHI > 0:
        u = tl.arange(0, HP)
        where, live = _natural_rows(
            p, place, order, unit, u, u < KHI, cols, in_cols,
            K, V, TILE, S_TILE, S_ROW, S_COL, ORDERED, RAGGED,
        )  # fmt: skip
        x = tl.load(where, live, 0.0).to(tl.float32) * c
        p_hi = (blob + KLO * G * 4).to(tl.pointer_type(tl.float16))
        inside = in_cols[:, None] & (u < KHI)[None, :]
        tl.store(p_hi + cols[:, None] * KHI + u[None, :], _half(x), inside)
    if KLO > 0:
        w = tl.arange(0, LP)
        where, live = _natural_rows(
            p, place, order, unit, KHI + w, w < KLO, cols, in_cols,
            K, V, TILE, S_TILE, S_ROW, S_COL, ORDERED, RAGGED,
        )  # fmt: skip
        x = tl.load(where, live, 0.0).to(tl.float32) * c
        scale, divisor = _group_scale(x, 0)
        tl.store(blob.to(tl.pointer_type(tl.float32)) + group * KLO + w, scale, w < KLO)
        p_lo = (blob + KLO * G * 4 + KHI * V * 2).to(tl.pointer_type(tl.int8))
        codes = nearest_code(x, divisor[None, :])
        inside = in_cols[:, None] & (w < KLO)[None, :]
        tl.store(p_lo + cols[:, None] * KLO + w[None, :], codes, inside)
    PAYLOAD: tl.constexpr = KHI * V * 2 + KLO * (V + 4 * G)
    if PAYLOAD < HEAD_BYTES:  # alignment bytes are zero
        z = tl.arange(0, 16)
        tl.store(blob + PAYLOAD + z, tl.zeros([16], tl.uint8), PAYLOAD + z < HEAD_BYTES)


@triton.jit
def unpack_natural_kernel(
    dense, dense_table, dense_slots, slot_values, pool, pool_table, pool_slots, slot_bytes,
    order, value_scale, place, B,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KHI: tl.constexpr, GROUP: tl.constexpr,
    HEAD_BYTES: tl.constexpr, TILE: tl.constexpr, S_TILE: tl.constexpr, S_ROW: tl.constexpr,
    S_COL: tl.constexpr, ORDERED: tl.constexpr, SCALED: tl.constexpr, RAGGED: tl.constexpr,
    GP: tl.constexpr, HP: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """The inverse of `pack_natural_kernel`; same grid."""
    KLO: tl.constexpr = K - KHI
    G: tl.constexpr = (V + GROUP - 1) // GROUP
    group = tl.program_id(0) % G
    head = tl.program_id(0) // G % H
    b = tl.program_id(0) // (G * H) % B
    layer = tl.program_id(0) // (G * H) // B
    target = tl.load(dense_slots + b)
    source = tl.load(pool_slots + b)
    if (source < 0) | (target < 0):
        return
    unit = layer * H + head
    cols = group * GROUP + tl.arange(0, GP)
    in_cols = (tl.arange(0, GP) < GROUP) & (cols < V)
    if RAGGED:
        p = dense + target * slot_values
    else:
        p = _dense_head(dense, dense_table, layer, target, slot_values, head, K * V)
    c = tl.load(value_scale + unit * V + cols, in_cols, 1.0)[:, None] if SCALED else 1.0
    blob = pool + tl.load(pool_table + layer) * 16 + source * slot_bytes + head * HEAD_BYTES
    if KHI > 0:
        u = tl.arange(0, HP)
        inside = in_cols[:, None] & (u < KHI)[None, :]
        p_hi = (blob + KLO * G * 4).to(tl.pointer_type(tl.float16))
        x = tl.load(p_hi + cols[:, None] * KHI + u[None, :], inside, 0.0).to(tl.float32) * c
        where, live = _natural_rows(
            p, place, order, unit, u, u < KHI, cols, in_cols,
            K, V, TILE, S_TILE, S_ROW, S_COL, ORDERED, RAGGED,
        )  # fmt: skip
        tl.store(where, _as_stored(x, dense.dtype.element_ty), live)
    if KLO > 0:
        w = tl.arange(0, LP)
        inside = in_cols[:, None] & (w < KLO)[None, :]
        p_lo = (blob + KLO * G * 4 + KHI * V * 2).to(tl.pointer_type(tl.int8))
        codes = tl.load(p_lo + cols[:, None] * KLO + w[None, :], inside, 0)
        p_scale = blob.to(tl.pointer_type(tl.float32)) + group * KLO
        x = codes.to(tl.float32) * tl.load(p_scale + w, w < KLO, 0.0)[None, :] * c
        where, live = _natural_rows(
            p, place, order, unit, KHI + w, w < KLO, cols, in_cols,
            K, V, TILE, S_TILE, S_ROW, S_COL, ORDERED, RAGGED,
        )  # fmt: skip
        tl.store(where, _as_stored(x, dense.dtype.element_ty), live)
