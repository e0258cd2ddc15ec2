"""T tokens of the recurrence on pooled states in one plain Triton kernel, for the replay of short suffixes.

A program owns one head's value columns of one group. Its state is read once, stays in registers as float32 over all
tokens, and is stored once: a packed state is requantised once in T tokens rather than at each. Tokens follow each
other in a loop, as written in `reference`; the next token's q, k and gate are in flight while the present one computes.
"""

import triton
import triton.language as tl

from hybridstate.kernels.pack_triton import _as_stored, _group_scale, _half, nearest_code
from hybridstate.kernels.triton_update import _inner, _squares


@triton.jit
def _token(q, k, g, rows, live, KDA: tl.constexpr):
    """q, k and log decay of one token; g is its head's scalar or its K values."""
    qf = tl.load(q + rows, live, 0.0).to(tl.float32)
    kf = tl.load(k + rows, live, 0.0).to(tl.float32)
    if KDA:
        gf = tl.load(g + rows, live, 0.0).to(tl.float32)
    else:
        gf = tl.load(g).to(tl.float32)
    return qf, kf, gf


@triton.jit
def _fragment_spot(rows, cols, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Element offset of (key row, column of a block) in fragment order; VECTOR columns share 16 bytes."""
    I: tl.constexpr = BLOCK // 8
    i = cols % I
    lane = 4 * (cols // I)[:, None] + ((rows % 16) // 4)[None, :]
    vector = (i // VECTOR * (128 * VECTOR) + i % VECTOR * 4)[:, None]
    return (rows // 16 * (16 * BLOCK) + rows % 4)[None, :] + vector + lane * (4 * VECTOR)


@triton.jit
def tokens_kernel(
    q, k, v, g, beta, pool, value_scale, slots, lengths, out, slot_step, T,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KHI: tl.constexpr,
    GROUP: tl.constexpr, HEAD_BYTES: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    KDA: tl.constexpr, SCALED: tl.constexpr, TILE: tl.constexpr, S_TILE: tl.constexpr,
    S_ROW: tl.constexpr, S_COL: tl.constexpr, GP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Grid: batch * H * groups; `slot_step` bytes (packed) or values (dense) between slots. BLOCK: columns of a
    block in fragment order, 0 in any other. GP, KP: powers of two."""
    KLO: tl.constexpr = K - KHI
    FRAGMENT: tl.constexpr = BLOCK > 0
    G: tl.constexpr = (V + GROUP - 1) // GROUP
    group = tl.program_id(0) % G
    h = tl.program_id(0) // G % H
    b = (tl.program_id(0) // (G * H)).to(tl.int64)
    lane = tl.arange(0, GP)
    cols = group * GROUP + lane
    in_cols = (lane < GROUP) & (cols < V)
    u = tl.arange(0, KP)
    in_rows = u < K
    slot = tl.load(slots + b)
    length = tl.minimum(tl.load(lengths + b), T)
    if slot < 0:
        length = 0
    p_out = out + h * V + cols
    for t in range(length, T):
        tl.store(p_out + (b * T + t) * (H * V), tl.zeros([GP], out.dtype.element_ty), in_cols)
    if length > 0:
        inside = in_cols[:, None] & in_rows[None, :]
        c = (
            tl.load(value_scale + h * V + cols, in_cols, 1.0)
            if SCALED
            else tl.full([GP], 1.0, tl.float32)
        )
        if PACKED:
            head = pool + slot * slot_step + h * HEAD_BYTES
            in_lo = u >= KHI
            if FRAGMENT:
                head += group * GROUP // BLOCK * (HEAD_BYTES * BLOCK // V)
                within = cols % BLOCK
                low = tl.maximum(u - KHI, 0)
                p_hi = head.to(tl.pointer_type(tl.float16))
                p_lo = (head + KHI * BLOCK * 2).to(tl.pointer_type(tl.int8))
                p_scale = (head + KHI * BLOCK * 2 + KLO * BLOCK).to(tl.pointer_type(tl.float32))
                at_hi = _fragment_spot(u, within, 2, BLOCK)
                at_lo = _fragment_spot(low, within, 4, BLOCK)
                at_scale = low // 16 * (BLOCK // 2) + group * GROUP % BLOCK // 2 + low % 16
            else:
                p_scale = head.to(tl.pointer_type(tl.float32))
                p_hi = (head + KLO * G * 4).to(tl.pointer_type(tl.float16))
                p_lo = (head + KLO * G * 4 + KHI * V * 2).to(tl.pointer_type(tl.int8))
                at_hi = cols[:, None] * KHI + u[None, :]
                at_lo = cols[:, None] * KLO + (u - KHI)[None, :]
                at_scale = group * KLO + u - KHI
            m_hi = inside & (u < KHI)[None, :]
            m_lo = inside & in_lo[None, :]
            codes = tl.load(p_lo + at_lo, m_lo, -128 if FRAGMENT else 0)
            if FRAGMENT:
                codes = codes ^ -128
            scale = tl.load(p_scale + at_scale, in_lo & in_rows, 0.0)
            state = codes.to(tl.float32) * scale[None, :]
            if KHI > 0:
                state += tl.load(p_hi + at_hi, m_hi, 0.0).to(tl.float32)
        else:
            spot = u[None, :] * S_ROW + (cols // TILE * S_TILE + cols % TILE * S_COL)[:, None]
            p_state = pool + slot * slot_step + h * (K * V) + spot
            state = tl.load(p_state, inside, 0.0).to(tl.float32)
        if SCALED:
            state = state * c[:, None]
        hk = h // (H // HK)
        q += (b * T * HK + hk) * K
        k += (b * T * HK + hk) * K
        v += (b * T * H + h) * V
        beta += b * T * H + h
        g += (b * T * H + h) * K if KDA else b * T * H + h
        G_STEP: tl.constexpr = H * K if KDA else H
        qf, kf, gf = _token(q, k, g, u, in_rows, KDA)
        value = tl.load(v + cols, in_cols, 0.0).to(tl.float32)
        strength = tl.load(beta).to(tl.float32)
        for t in range(length):
            ahead = tl.minimum(t + 1, length - 1).to(tl.int64)
            q_next, k_next, g_next = _token(
                q + ahead * HK * K, k + ahead * HK * K, g + ahead * G_STEP, u, in_rows, KDA
            )
            value_next = tl.load(v + ahead * H * V + cols, in_cols, 0.0).to(tl.float32)
            strength_next = tl.load(beta + ahead * H).to(tl.float32)
            qn = qf * (tl.rsqrt(_squares(qf) + 1e-6) * (K**-0.5))
            kn = kf * tl.rsqrt(_squares(kf) + 1e-6)
            decay = tl.exp(gf)
            state = state * (decay[None, :] if KDA else decay)
            delta = strength * (value - _inner(state, kn[None, :], 1))
            state = state + delta[:, None] * kn[None, :]
            o = _inner(state, qn[None, :], 1)
            tl.store(p_out + (b * T + t) * (H * V), o.to(out.dtype.element_ty), in_cols)
            qf, kf, gf = q_next, k_next, g_next
            value, strength = value_next, strength_next
        if SCALED:
            state = tl.div_rn(state, tl.broadcast_to(c[:, None], state.shape))
        if PACKED:
            if KHI > 0:
                tl.store(p_hi + at_hi, _half(state), m_hi)
            if KLO > 0:
                new_scale, divisor = _group_scale(tl.where(inside, state, 0.0), 0)
                tl.store(p_scale + at_scale, new_scale, in_lo & in_rows)
                codes = nearest_code(state, divisor[None, :])
                tl.store(p_lo + at_lo, codes ^ -128 if FRAGMENT else codes, m_lo)
        else:
            tl.store(p_state, _as_stored(state, pool.dtype.element_ty), inside)
