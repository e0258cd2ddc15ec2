"""One decode step on pooled states as plain Triton kernels: any dimensions, any GPU, and the interpreter.

Both kernels use one pass over the old state for the two sums it enters (a = exp(g), k and q normalised):

    kS_v = sum_u a_u k_u S_uv      delta = beta (v / c - kS)
    qS_v = sum_u a_u q_u S_uv      o     = c (qS + (k . q) delta)

and a second one for S <- a S + k delta. INT8 rows fold their scale into k and q, so sums run on codes.
One program owns one head and the value columns of one group, because a group's maximum needs all of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from hybridstate.kernels.layout import DenseLayout, PackedLayout

ROUND = tl.constexpr(
    12582912.0
)  # 1.5 * 2^23: adding it rounds to nearest even in the low mantissa bits
SMALLEST = tl.constexpr(
    1e-35
)  # a group below this is stored as zero, so that its reciprocal stays finite
HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def _squares(x):
    """Sum of x^2 along the only axis, rounded as in `_inner`: the compiler drops zeros added to squares, not these."""
    return -tl.sum(0.0 - x * x, 0)


@triton.jit
def _inner(x, y, AXIS: tl.constexpr, PAIRED: tl.constexpr = False):
    """Sum of x * y along AXIS, the same bits in every lane that holds it. PAIRED: a lane loads neighbours along AXIS.

    Lanes exchange their values and add. Where a lane holds one product, the compiler fuses it with that addition:
    fma(a, b, round(c d)) in one lane, fma(c, d, round(a b)) in the other, which differ in the last bit, and which of
    them is stored is undefined. Adding zero rounds the product first. Longer sums are left alone: there a lane adds
    products of its own before.
    """
    products = x * y
    few: tl.constexpr = products.shape[AXIS] <= 32 and not (PAIRED and products.numel >= 256)
    if few or products.numel <= 128:
        products += 0.0
    return tl.sum(products, AXIS)


@triton.jit
def _log_decay(x, rate, bias, GATE: tl.constexpr, LOWER: tl.constexpr):
    """Log decay from itself (GATE 0), the softplus gate (1) or the safe gate (2); rate = exp(A_log).

    log(1 + t) = 2 atanh(s), s = t / (2 + t) <= 1 / 3, by seven terms: to 1e-7 of itself where decays are closest to
    1, and without the branches of the library's logarithm.
    """
    if GATE == 1:
        x = x + bias
        t = tl.exp(-tl.abs(x))
        s = t / (2.0 + t)
        s2 = s * s
        series = (((1.0 / 13.0 * s2 + 1.0 / 11.0) * s2 + 1.0 / 9.0) * s2 + 1.0 / 7.0) * s2
        series = ((series + 1.0 / 5.0) * s2 + 1.0 / 3.0) * s2 + 1.0
        x = -rate * (tl.maximum(x, 0.0) + 2.0 * s * series)
    elif GATE == 2:
        x = LOWER / (1.0 + tl.exp(-rate * (x + bias)))
    return x


@triton.jit
def _strength(x, LOGIT: tl.constexpr):
    """LOGIT * sigmoid(x), or x itself where LOGIT is 0."""
    if LOGIT > 0:
        x = LOGIT / (1.0 + tl.exp(-x))
    return x


@triton.jit
def _vectors(
    q, k, g, a_log, dt_bias, key_index, rows, mask,
    KDA: tl.constexpr, GATE: tl.constexpr, LOWER: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """q, k and decay of some key rows in float32; g and dt_bias point at the head's scalar or its K values."""
    channels = rows
    if INDEXED:
        channels = tl.load(key_index + rows, mask, 0).to(tl.int32)
    qf = tl.load(q + channels, mask, 0.0).to(tl.float32)
    kf = tl.load(k + channels, mask, 0.0).to(tl.float32)
    rate = 0.0
    bias = 0.0
    if GATE > 0:
        rate = tl.exp(tl.load(a_log))
    if KDA:
        if GATE > 0:
            bias = tl.load(dt_bias + channels, mask, 0.0)
        x = tl.load(g + channels, mask, 0.0).to(tl.float32)
    else:
        if GATE > 0:
            bias = tl.load(dt_bias)
        x = tl.load(g).to(tl.float32)
    return qf, kf, tl.exp(_log_decay(x, rate, bias, GATE, LOWER))


@triton.jit
def _to_half(x, live, saturated, COUNTED: tl.constexpr):
    """float32 to float16, saturating at 65,504; clipped live values are counted, a NaN stays one."""
    if COUNTED:
        count = tl.sum(tl.sum(((tl.abs(x) > HALF_MAX) & live).to(tl.int32), 1), 0)
        if count > 0:
            tl.atomic_add(saturated, count)
    x = tl.where(x > HALF_MAX, HALF_MAX, tl.where(x < -HALF_MAX, -HALF_MAX, x))
    return x.to(tl.float16)


@triton.jit
def _fragment_offset(rows, cols, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Element offset of (key row, column of a block) in fragment order; VECTOR columns share 16 bytes."""
    I: tl.constexpr = BLOCK // 8
    i = cols % I
    lane = 4 * (cols // I)[:, None] + ((rows % 16) // 4)[None, :]
    vector = (i // VECTOR * (128 * VECTOR) + i % VECTOR * 4)[:, None]
    return (rows // 16 * (16 * BLOCK) + rows % 4)[None, :] + vector + lane * (4 * VECTOR)


@triton.jit
def packed_kernel(
    q, k, v, g, beta, pool, value_scale, slots, out, a_log, dt_bias, key_index, saturated,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head,
    g_batch, beta_batch, slot_bytes,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KHI: tl.constexpr,
    GROUP: tl.constexpr, HEAD_BYTES: tl.constexpr, BLOCK: tl.constexpr, KDA: tl.constexpr,
    SCALED: tl.constexpr, GATE: tl.constexpr, LOWER: tl.constexpr, LOGIT: tl.constexpr,
    INDEXED: tl.constexpr, COUNTED: tl.constexpr, GP: tl.constexpr, HP: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """Grid: batch * H * groups. BLOCK: columns of a block in fragment order, 0 in natural order. GP, HP, LP:
    group, FP16 rows, INT8 rows, rounded up to powers of two. GATE, LOWER, LOGIT: fusion.py."""
    KLO: tl.constexpr = K - KHI
    FRAGMENT: tl.constexpr = BLOCK > 0
    PAIRED: tl.constexpr = KHI == HP  # a lane reads 4 bytes or more of a column
    G: tl.constexpr = (V + GROUP - 1) // GROUP
    group = tl.program_id(0) % G
    bh = tl.program_id(0) // G
    h = bh % H
    b = (bh // H).to(tl.int64)
    lane = tl.arange(0, GP)
    cols = group * GROUP + lane
    live = (lane < GROUP) & (cols < V)
    p_out = out + b * out_batch + h * out_head + cols
    slot = tl.load(slots + b).to(tl.int64)
    if slot < 0:
        tl.store(p_out, tl.zeros([GP], out.dtype.element_ty), live)
        return
    head = pool + slot * slot_bytes + h * HEAD_BYTES
    place = cols
    if FRAGMENT:
        head += group * GROUP // BLOCK * (HEAD_BYTES * BLOCK // V)
        place = cols % BLOCK
        p_hi = head.to(tl.pointer_type(tl.float16))
        p_lo = (head + KHI * BLOCK * 2).to(tl.pointer_type(tl.int8))
        p_scale = (head + KHI * BLOCK * 2 + KLO * BLOCK).to(tl.pointer_type(tl.float32))
    else:
        p_scale = head.to(tl.pointer_type(tl.float32))
        p_hi = (head + KLO * G * 4).to(tl.pointer_type(tl.float16))
        p_lo = (head + KLO * G * 4 + KHI * V * 2).to(tl.pointer_type(tl.int8))
    q += b * q_batch + h // (H // HK) * q_head
    k += b * k_batch + h // (H // HK) * k_head
    g += b * g_batch + (h * K if KDA else h)
    dt_bias += h * K if KDA else h
    a_log += h
    key_index += h * K
    value = tl.load(v + b * v_batch + h * v_head + cols, live, 0.0).to(tl.float32)
    c = tl.load(value_scale + h * V + cols, live, 1.0) if SCALED else 1.0
    strength = _strength(tl.load(beta + b * beta_batch + h).to(tl.float32), LOGIT)

    qq = 0.0
    kk = 0.0
    kq = 0.0
    k_read = tl.zeros([GP], tl.float32)
    q_read = tl.zeros([GP], tl.float32)
    if KHI > 0:
        u = tl.arange(0, HP)
        in_hi = u < KHI
        q_hi, k_hi, a_hi = _vectors(
            q, k, g, a_log, dt_bias, key_index, u, in_hi, KDA, GATE, LOWER, INDEXED
        )
        qq += _squares(q_hi)
        kk += _squares(k_hi)
        kq += _inner(k_hi, q_hi, 0)
        if FRAGMENT:
            at_hi = _fragment_offset(u, place, 2, BLOCK)
        else:
            at_hi = cols[:, None] * KHI + u[None, :]
        tile_hi = live[:, None] & in_hi[None, :]
        s_hi = tl.load(p_hi + at_hi, tile_hi, 0.0).to(tl.float32)
        k_read += _inner(s_hi, (k_hi * a_hi)[None, :], 1, PAIRED)
        q_read += _inner(s_hi, (q_hi * a_hi)[None, :], 1, PAIRED)
    if KLO > 0:
        w = tl.arange(0, LP)
        in_lo = w < KLO
        q_lo, k_lo, a_lo = _vectors(
            q, k, g, a_log, dt_bias, key_index, KHI + w, in_lo, KDA, GATE, LOWER, INDEXED
        )
        qq += _squares(q_lo)
        kk += _squares(k_lo)
        kq += _inner(k_lo, q_lo, 0)
        if FRAGMENT:
            at_lo = _fragment_offset(w, place, 4, BLOCK)
            at_scale = w // 16 * (BLOCK // 2) + group * GROUP % BLOCK // 2 + w % 16
        else:
            at_lo = cols[:, None] * KLO + w[None, :]
            at_scale = group * KLO + w
        tile_lo = live[:, None] & in_lo[None, :]
        scale = tl.load(p_scale + at_scale, in_lo, 0.0) * a_lo
        codes = tl.load(p_lo + at_lo, tile_lo, -128 if FRAGMENT else 0)
        if FRAGMENT:
            codes = codes ^ -128  # stored as code + 128
        s_lo = codes.to(tl.float32)
        k_read += _inner(s_lo, (k_lo * scale)[None, :], 1)
        q_read += _inner(s_lo, (q_lo * scale)[None, :], 1)
    qn = tl.rsqrt(qq + 1e-6) * (K**-0.5)
    kn = tl.rsqrt(kk + 1e-6)
    delta = strength * (value / c - k_read * kn)
    o = (q_read * qn + kq * qn * kn * delta) * c
    tl.store(p_out, o.to(out.dtype.element_ty), live)

    step = delta * kn
    if KHI > 0:
        t_hi = s_hi * (a_hi[None, :] if KDA else a_hi) + step[:, None] * k_hi[None, :]
        tl.store(p_hi + at_hi, _to_half(t_hi, tile_hi, saturated, COUNTED), tile_hi)
    if KLO > 0:
        # Reading the codes again is cheaper than keeping their float32 copies in registers (they are in L1).
        codes = tl.load(p_lo + at_lo, tile_lo, -128 if FRAGMENT else 0)
        if FRAGMENT:
            codes = codes ^ -128
        t_lo = codes.to(tl.float32) * scale[None, :] + step[:, None] * k_lo[None, :]
        largest = tl.max(tl.abs(t_lo), 0)
        usable = largest > SMALLEST
        inverse = tl.where(usable, 127.0 / tl.where(usable, largest, 1.0), 0.0)
        rounded = (t_lo * inverse[None, :] + ROUND).to(tl.int32, bitcast=True).to(tl.int8)
        if FRAGMENT:
            rounded = rounded ^ -128
        # A delta that is not finite poisons its group's scales: NaN is never requantised into numbers.
        poison = _inner(step, 0.0, 0)
        tl.store(p_scale + at_scale, tl.where(usable, largest / 127.0, 0.0) + poison, in_lo)
        tl.store(p_lo + at_lo, rounded, tile_lo)


@triton.jit
def dense_kernel(
    q, k, v, g, beta, pool, value_scale, slots, out, a_log, dt_bias, key_index, saturated,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head,
    g_batch, beta_batch, slot_values,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KDA: tl.constexpr,
    SCALED: tl.constexpr, GATE: tl.constexpr, LOWER: tl.constexpr, LOGIT: tl.constexpr,
    INDEXED: tl.constexpr, COUNTED: tl.constexpr, OVERLAP: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr,
    TILE: tl.constexpr, S_TILE: tl.constexpr, S_ROW: tl.constexpr, S_COL: tl.constexpr,
):  # fmt: skip
    """Grid: batch * H * ceil(V / BV). Value (u, v) of a head lies at v // TILE * S_TILE + u * S_ROW
    + v % TILE * S_COL; KP: K rounded up to a power of two. OVERLAP: as in gluon_update.py."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    bh = tl.program_id(0) // BLOCKS
    h = bh % H
    b = (bh // H).to(tl.int64)
    cols = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    live = cols < V
    p_out = out + b * out_batch + h * out_head + cols
    if OVERLAP == 1:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + b).to(tl.int64)
    if slot < 0:
        if OVERLAP == 2:
            gdc_wait()
        tl.store(p_out, tl.zeros([BV], out.dtype.element_ty), live)
        return
    u = tl.arange(0, KP)
    rows = u < K
    at = u[:, None] * S_ROW + (cols // TILE * S_TILE + cols % TILE * S_COL)[None, :]
    tile = rows[:, None] & live[None, :]
    p_state = pool + slot * slot_values + h * (K * V) + at
    state = tl.load(p_state, tile, 0.0).to(tl.float32)
    if OVERLAP == 2:
        gdc_wait()
        gdc_launch_dependents()
    q += b * q_batch + h // (H // HK) * q_head
    k += b * k_batch + h // (H // HK) * k_head
    g += b * g_batch + (h * K if KDA else h)
    dt_bias += h * K if KDA else h
    q_rows, k_rows, a = _vectors(
        q, k, g, a_log + h, dt_bias, key_index + h * K, u, rows, KDA, GATE, LOWER, INDEXED
    )
    value = tl.load(v + b * v_batch + h * v_head + cols, live, 0.0).to(tl.float32)
    c = tl.load(value_scale + h * V + cols, live, 1.0) if SCALED else 1.0
    strength = _strength(tl.load(beta + b * beta_batch + h).to(tl.float32), LOGIT)
    q_rows = q_rows * (tl.rsqrt(_squares(q_rows) + 1e-6) * (K**-0.5))
    k_rows = k_rows * tl.rsqrt(_squares(k_rows) + 1e-6)
    state = state * (a[:, None] if KDA else a)
    delta = strength * (value / c - _inner(state, k_rows[:, None], 0))
    state = state + k_rows[:, None] * delta[None, :]
    o = _inner(state, q_rows[:, None], 0) * c
    tl.store(p_out, o.to(out.dtype.element_ty), live)
    if pool.dtype.element_ty == tl.float16:
        tl.store(p_state, _to_half(state, tile, saturated, COUNTED), tile)
    else:
        tl.store(p_state, state.to(pool.dtype.element_ty), tile)


def _pointers(fusion: StepFusion, absent: Tensor) -> list[Tensor]:
    """The optional tensors in the kernels' order; `absent` stands for those that are not read."""
    found = (fusion.a_log, fusion.dt_bias, fusion.key_index, fusion.saturated)
    return [absent if x is None else x for x in found]


def _constants(fusion: StepFusion) -> dict[str, int | float | bool]:
    """The kernels' constants that say which of them count."""
    return {
        "GATE": fusion.gate,
        "LOWER": fusion.lower_bound or 0.0,
        "LOGIT": fusion.beta_scale or 0.0,
        "INDEXED": fusion.key_index is not None,
        "COUNTED": fusion.saturated is not None,
    }


def _strides(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[int, ...]:
    return tuple(x.stride(axis) for x in (q, k, v, out) for axis in (0, 1))


def packed_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor,
    out: Tensor, value_scale: Tensor | None, layout: PackedLayout,
    fusion: StepFusion = NO_FUSION,
) -> None:  # fmt: skip
    """Launch `packed_kernel`; arguments as in `update.packed_step`, already checked.

    One warp needs no barrier and no exchange through shared memory; fragment order, whose addresses this kernel
    cannot vectorise, would spill with one.
    """
    batch, heads, value_dim = v.shape
    power = triton.next_power_of_2
    packed_kernel[(batch * heads * layout.groups,)](
        q, k, v, g, beta, pool, out if value_scale is None else value_scale, slots, out,
        *_pointers(fusion, out), *_strides(q, k, v, out),
        g.stride(0), beta.stride(0), pool.stride(0),
        H=heads, HK=q.shape[1], K=layout.key_dim, V=value_dim, KHI=layout.k_hi,
        GROUP=layout.group, HEAD_BYTES=layout.head_bytes,
        BLOCK=layout.block if layout.order == "fragment" else 0,
        KDA=g.dim() == 3, SCALED=value_scale is not None, **_constants(fusion),
        GP=power(min(layout.group, value_dim)), HP=power(max(layout.k_hi, 1)),
        LP=power(max(layout.rows_lo, 1)), num_warps=2 if layout.order == "fragment" else 1,
    )  # fmt: skip


def dense_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor,
    out: Tensor, value_scale: Tensor | None, layout: DenseLayout,
    fusion: StepFusion = NO_FUSION, *, columns: int | None = None, warps: int = 1,
    overlap: int = 0,
) -> None:  # fmt: skip
    """Launch `dense_kernel`; `columns` per program default to a 32-byte sector of the pool."""
    batch, heads, value_dim = v.shape
    block = columns or DENSE_COLUMNS[layout.order, layout.dtype]
    tile, row, col = layout.strides
    dense_kernel[(batch * heads * triton.cdiv(value_dim, block),)](
        q, k, v, g, beta, pool, out if value_scale is None else value_scale, slots, out,
        *_pointers(fusion, out), *_strides(q, k, v, out),
        g.stride(0), beta.stride(0), pool.stride(0),
        H=heads, HK=q.shape[1], K=layout.key_dim, V=value_dim, KDA=g.dim() == 3,
        SCALED=value_scale is not None, **_constants(fusion), OVERLAP=overlap,
        BV=block, KP=triton.next_power_of_2(layout.key_dim),
        TILE=layout.tile, S_TILE=tile, S_ROW=row, S_COL=col, num_warps=warps,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip


DENSE_COLUMNS: dict[tuple[str, torch.dtype], int] = {
    ("rows", torch.float32): 8,
    ("rows", torch.float16): 16,
    ("rows", torch.bfloat16): 16,
    ("tiles", torch.float32): 8,
    ("tiles", torch.float16): 8,
    ("tiles", torch.bfloat16): 8,
    ("columns", torch.float32): 16,
    ("columns", torch.float16): 32,
    ("columns", torch.bfloat16): 32,
}
"""Value columns per one-warp program, the fastest measured for 128 x 128 on Hopper."""
