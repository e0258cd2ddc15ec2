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

from hybridstate.kernels.layout import DenseLayout, PackedLayout

ROUND = tl.constexpr(
    12582912.0
)  # 1.5 * 2^23: adding it rounds to nearest even in the low mantissa bits
SMALLEST = tl.constexpr(
    1e-35
)  # a group below this is stored as zero, so that its reciprocal stays finite
HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def _vectors(q, k, g, rows, mask, KDA: tl.constexpr):
    """q, k and decay of some key rows in float32; g points at the head's scalar or at its K values."""
    qf = tl.load(q + rows, mask, 0.0).to(tl.float32)
    kf = tl.load(k + rows, mask, 0.0).to(tl.float32)
    if KDA:
        a = tl.exp(tl.load(g + rows, mask, 0.0).to(tl.float32))
    else:
        a = tl.exp(tl.load(g).to(tl.float32))
    return qf, kf, a


@triton.jit
def _fragment_offset(rows, cols, VECTOR: tl.constexpr):
    """Element offset of (key row, value column) in fragment order; VECTOR columns share 16 bytes."""
    i = cols % 16
    lane = 4 * (cols // 16)[:, None] + ((rows % 16) // 4)[None, :]
    vector = (i // VECTOR * (128 * VECTOR) + i % VECTOR * 4)[:, None]
    return (rows // 16 * 2048 + rows % 4)[None, :] + vector + lane * (4 * VECTOR)


@triton.jit
def packed_kernel(
    q, k, v, g, beta, pool, value_scale, slots, out,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, slot_bytes,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KHI: tl.constexpr,
    GROUP: tl.constexpr, HEAD_BYTES: tl.constexpr, FRAGMENT: tl.constexpr, KDA: tl.constexpr,
    SCALED: tl.constexpr, GP: tl.constexpr, HP: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """Grid: batch * H * groups. GP, HP, LP: group, FP16 rows, INT8 rows, rounded up to powers of two."""
    KLO: tl.constexpr = K - KHI
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
    if FRAGMENT:
        p_hi = head.to(tl.pointer_type(tl.float16))
        p_lo = (head + KHI * V * 2).to(tl.pointer_type(tl.int8))
        p_scale = (head + KHI * V * 2 + KLO * V).to(tl.pointer_type(tl.float32))
    else:
        p_scale = head.to(tl.pointer_type(tl.float32))
        p_hi = (head + KLO * G * 4).to(tl.pointer_type(tl.float16))
        p_lo = (head + KLO * G * 4 + KHI * V * 2).to(tl.pointer_type(tl.int8))
    q += b * q_batch + h // (H // HK) * q_head
    k += b * k_batch + h // (H // HK) * k_head
    g += bh.to(tl.int64) * K if KDA else bh
    value = tl.load(v + b * v_batch + h * v_head + cols, live, 0.0).to(tl.float32)
    c = tl.load(value_scale + h * V + cols, live, 1.0) if SCALED else 1.0
    strength = tl.load(beta + bh).to(tl.float32)

    qq = 0.0
    kk = 0.0
    kq = 0.0
    k_read = tl.zeros([GP], tl.float32)
    q_read = tl.zeros([GP], tl.float32)
    if KHI > 0:
        u = tl.arange(0, HP)
        in_hi = u < KHI
        q_hi, k_hi, a_hi = _vectors(q, k, g, u, in_hi, KDA)
        qq += tl.sum(q_hi * q_hi)
        kk += tl.sum(k_hi * k_hi)
        kq += tl.sum(k_hi * q_hi)
        at_hi = _fragment_offset(u, cols, 2) if FRAGMENT else cols[:, None] * KHI + u[None, :]
        tile_hi = live[:, None] & in_hi[None, :]
        s_hi = tl.load(p_hi + at_hi, tile_hi, 0.0).to(tl.float32)
        k_read += tl.sum(s_hi * (k_hi * a_hi)[None, :], 1)
        q_read += tl.sum(s_hi * (q_hi * a_hi)[None, :], 1)
    if KLO > 0:
        w = tl.arange(0, LP)
        in_lo = w < KLO
        q_lo, k_lo, a_lo = _vectors(q + KHI, k + KHI, g + (KHI if KDA else 0), w, in_lo, KDA)
        qq += tl.sum(q_lo * q_lo)
        kk += tl.sum(k_lo * k_lo)
        kq += tl.sum(k_lo * q_lo)
        at_lo = _fragment_offset(w, cols, 4) if FRAGMENT else cols[:, None] * KLO + w[None, :]
        at_scale = w // 16 * 64 + group * 16 + w % 16 if FRAGMENT else group * KLO + w
        tile_lo = live[:, None] & in_lo[None, :]
        scale = tl.load(p_scale + at_scale, in_lo, 0.0) * a_lo
        codes = tl.load(p_lo + at_lo, tile_lo, -128 if FRAGMENT else 0)
        if FRAGMENT:
            codes = codes ^ -128  # stored as code + 128
        s_lo = codes.to(tl.float32)
        k_read += tl.sum(s_lo * (k_lo * scale)[None, :], 1)
        q_read += tl.sum(s_lo * (q_lo * scale)[None, :], 1)
    qn = tl.rsqrt(qq + 1e-6) * (K**-0.5)
    kn = tl.rsqrt(kk + 1e-6)
    delta = strength * (value / c - k_read * kn)
    o = (q_read * qn + kq * qn * kn * delta) * c
    tl.store(p_out, o.to(out.dtype.element_ty), live)

    step = delta * kn
    if KHI > 0:
        t_hi = s_hi * (a_hi[None, :] if KDA else a_hi) + step[:, None] * k_hi[None, :]
        t_hi = tl.minimum(tl.maximum(t_hi, -HALF_MAX), HALF_MAX)
        tl.store(p_hi + at_hi, t_hi.to(tl.float16), tile_hi)
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
        tl.store(p_scale + at_scale, tl.where(usable, largest / 127.0, 0.0), in_lo)
        tl.store(p_lo + at_lo, rounded, tile_lo)


@triton.jit
def dense_kernel(
    q, k, v, g, beta, pool, value_scale, slots, out,
    q_batch, q_head, k_batch, k_head, v_batch, v_head, out_batch, out_head, slot_values,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KDA: tl.constexpr, SCALED: tl.constexpr, BV: tl.constexpr, KP: tl.constexpr,
    TILE: tl.constexpr, S_TILE: tl.constexpr, S_ROW: tl.constexpr, S_COL: tl.constexpr,
):  # fmt: skip
    """Grid: batch * H * ceil(V / BV). Value (u, v) of a head lies at v // TILE * S_TILE + u * S_ROW
    + v % TILE * S_COL; KP: K rounded up to a power of two."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    bh = tl.program_id(0) // BLOCKS
    h = bh % H
    b = (bh // H).to(tl.int64)
    cols = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    live = cols < V
    p_out = out + b * out_batch + h * out_head + cols
    slot = tl.load(slots + b).to(tl.int64)
    if slot < 0:
        tl.store(p_out, tl.zeros([BV], out.dtype.element_ty), live)
        return
    u = tl.arange(0, KP)
    rows = u < K
    at = u[:, None] * S_ROW + (cols // TILE * S_TILE + cols % TILE * S_COL)[None, :]
    tile = rows[:, None] & live[None, :]
    p_state = pool + slot * slot_values + h * (K * V) + at
    state = tl.load(p_state, tile, 0.0).to(tl.float32)
    q += b * q_batch + h // (H // HK) * q_head
    k += b * k_batch + h // (H // HK) * k_head
    g += bh.to(tl.int64) * K if KDA else bh
    q_rows, k_rows, a = _vectors(q, k, g, u, rows, KDA)
    value = tl.load(v + b * v_batch + h * v_head + cols, live, 0.0).to(tl.float32)
    c = tl.load(value_scale + h * V + cols, live, 1.0) if SCALED else 1.0
    strength = tl.load(beta + bh).to(tl.float32)
    q_rows = q_rows * (tl.rsqrt(tl.sum(q_rows * q_rows) + 1e-6) * (K**-0.5))
    k_rows = k_rows * tl.rsqrt(tl.sum(k_rows * k_rows) + 1e-6)
    state = state * (a[:, None] if KDA else a)
    delta = strength * (value / c - tl.sum(state * k_rows[:, None], 0))
    state = state + k_rows[:, None] * delta[None, :]
    o = tl.sum(state * q_rows[:, None], 0) * c
    tl.store(p_out, o.to(out.dtype.element_ty), live)
    if pool.dtype.element_ty == tl.float16:
        state = tl.minimum(tl.maximum(state, -HALF_MAX), HALF_MAX)
    tl.store(p_state, state.to(pool.dtype.element_ty), tile)


def _strides(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[int, ...]:
    return tuple(x.stride(axis) for x in (q, k, v, out) for axis in (0, 1))


def packed_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor,
    out: Tensor, value_scale: Tensor | None, layout: PackedLayout,
) -> None:  # fmt: skip
    """Launch `packed_kernel`; arguments as in `update.packed_step`, already checked.

    One warp needs no barrier and no exchange through shared memory; fragment order, whose addresses this kernel
    cannot vectorise, would spill with one.
    """
    batch, heads, value_dim = v.shape
    power = triton.next_power_of_2
    packed_kernel[(batch * heads * layout.groups,)](
        q, k, v, g, beta, pool, out if value_scale is None else value_scale, slots, out,
        *_strides(q, k, v, out), pool.stride(0),
        H=heads, HK=q.shape[1], K=layout.key_dim, V=value_dim, KHI=layout.k_hi,
        GROUP=layout.group, HEAD_BYTES=layout.head_bytes, FRAGMENT=layout.order == "fragment",
        KDA=g.dim() == 3, SCALED=value_scale is not None,
        GP=power(min(layout.group, value_dim)), HP=power(max(layout.k_hi, 1)),
        LP=power(max(layout.rows_lo, 1)), num_warps=2 if layout.order == "fragment" else 1,
    )  # fmt: skip


def dense_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor,
    out: Tensor, value_scale: Tensor | None, layout: DenseLayout, *,
    columns: int | None = None, warps: int = 1,
) -> None:  # fmt: skip
    """Launch `dense_kernel`; `columns` per program default to a 32-byte sector of the pool."""
    batch, heads, value_dim = v.shape
    block = columns or DENSE_COLUMNS[layout.order, layout.dtype]
    tile, row, col = layout.strides
    dense_kernel[(batch * heads * triton.cdiv(value_dim, block),)](
        q, k, v, g, beta, pool, out if value_scale is None else value_scale, slots, out,
        *_strides(q, k, v, out), pool.stride(0),
        H=heads, HK=q.shape[1], K=layout.key_dim, V=value_dim, KDA=g.dim() == 3,
        SCALED=value_scale is not None, BV=block, KP=triton.next_power_of_2(layout.key_dim),
        TILE=layout.tile, S_TILE=tile, S_ROW=row, S_COL=col, num_warps=warps,
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
