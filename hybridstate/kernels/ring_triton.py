"""Deferred requantisation as plain Triton kernels: any dimensions in natural order, any GPU, and the interpreter.

The mathematics and the ring are those of `ring_reference.py`. One program owns a whole head, because its phase must be
read before and written after everything else; it walks the head's groups of value columns one after the other.
"""

import triton
import triton.language as tl
from torch import Tensor

from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.ring_reference import LEAST_LOG_DECAY, Ring
from hybridstate.kernels.triton_update import _inner, _log_decay, _squares, _strength

# 1.5 * 2^23: adding it rounds to nearest even in the low bits
ROUND = tl.constexpr(12582912.0)
SMALLEST = tl.constexpr(1e-35)  # a group below this is stored as zero: its reciprocal stays finite
HALF_MAX = tl.constexpr(65504.0)
FLOOR = tl.constexpr(LEAST_LOG_DECAY)


@triton.jit
def _part(
    q, k, g, a_log, dt_bias, p_keys, p_gates, rows, mask, entry, held, total, fade,
    K: tl.constexpr, KDA: tl.constexpr, GATE: tl.constexpr, LOWER: tl.constexpr,
):  # fmt: skip
    """For some key rows: q, k, present log decay, decay of the packed state, faded keys [entry, row]."""
    q_rows = tl.load(q + rows, mask, 0.0).to(tl.float32)
    k_rows = tl.load(k + rows, mask, 0.0).to(tl.float32)
    at = entry[:, None] * K + rows[None, :]
    tile = held[:, None] & mask[None, :]
    keys = tl.load(p_keys + at, tile, 0.0).to(tl.float32)
    if KDA:
        gate = tl.load(g + rows, mask, 0.0).to(tl.float32)
        if GATE > 0:
            bias = tl.load(dt_bias + rows, mask, 0.0)
            gate = _log_decay(gate, tl.exp(tl.load(a_log)), bias, GATE, LOWER)
            gate = tl.where(mask, gate, 0.0)
        gate = tl.where(gate < FLOOR, FLOOR, gate)
        gate = gate.to(p_gates.dtype.element_ty).to(tl.float32)
        past = tl.load(p_gates + at, tile, 0.0).to(tl.float32)
        since = tl.sum(past, 0) + gate
        keys = keys * tl.exp(since[None, :] - tl.cumsum(past, 0))
        decay = tl.exp(since)
    else:
        keys = keys * fade[:, None]
        gate = tl.zeros_like(k_rows)
        decay = tl.zeros_like(k_rows) + tl.exp(total)
    return q_rows, k_rows, gate, decay, keys


@triton.jit
def _folded(
    state, gate, p_keys, p_values, p_gates, rows, row_mask, cols, live, count, total,
    K: tl.constexpr, V: tl.constexpr, KDA: tl.constexpr,
):  # fmt: skip
    """state [column, row] plus the held entries, newest first; `gate` [row] is the present log decay (KDA)."""
    for step in range(count):
        e = count - 1 - step
        key = tl.load(p_keys + e * K + rows, row_mask, 0.0).to(tl.float32)
        value = tl.load(p_values + e * V + cols, live, 0.0).to(tl.float32)
        if KDA:
            key = key * tl.exp(gate)
            gate += tl.load(p_gates + e * K + rows, row_mask, 0.0).to(tl.float32)
        else:
            key = key * tl.exp(total - tl.load(p_gates + e))
        state += value[:, None] * key[None, :]
    return state


@triton.jit
def _saturated(x):
    """Within FP16; a NaN stays one."""
    return tl.where(x > HALF_MAX, HALF_MAX, tl.where(x < -HALF_MAX, -HALF_MAX, x))


@triton.jit
def _store_half(p, state, tile):
    tl.store(p, _saturated(state).to(tl.float16), tile)


@triton.jit
def _store_codes(p, p_scale, state, tile, rows):
    largest = tl.max(tl.abs(state), 0)
    usable = largest > SMALLEST
    inverse = tl.where(usable, 127.0 / tl.where(usable, largest, 1.0), 0.0)
    rounded = (state * inverse[None, :] + ROUND).to(tl.int32, bitcast=True).to(tl.int8)
    # a maximum would drop a NaN, and a number would be stored in its place
    poison = tl.sum(tl.where(tile, state * 0.0, 0.0), 0)
    tl.store(p_scale, tl.where(usable, largest / 127.0, 0.0) + poison, rows)
    tl.store(p, rounded, tile)


@triton.jit
def ring_kernel(
    q, k, v, g, beta, pool, ring_keys, ring_values, ring_gates, phases, value_scale, slots, out,
    a_log, dt_bias, q_batch, k_batch, v_batch, g_batch, beta_batch, out_batch, slot_bytes,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KHI: tl.constexpr,
    GROUP: tl.constexpr, HEAD_BYTES: tl.constexpr, KDA: tl.constexpr, SCALED: tl.constexpr,
    EVERY: tl.constexpr, FLUSH: tl.constexpr,
    GATE: tl.constexpr, LOWER: tl.constexpr, LOGIT: tl.constexpr,
    GP: tl.constexpr, HP: tl.constexpr, LP: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """Grid: batch * H. GP, HP, LP, EP: group, FP16 rows, INT8 rows, entries, rounded up to powers of two.

    FLUSH: fold what is held into the packed state; no input, no output.
    """
    KLO: tl.constexpr = K - KHI
    G: tl.constexpr = (V + GROUP - 1) // GROUP
    PAIRED: tl.constexpr = KHI == HP  # a lane reads 4 bytes or more of a column
    ROOM: tl.constexpr = EVERY - 1
    GATES: tl.constexpr = ROOM * K if KDA else EVERY
    bh = tl.program_id(0)
    h = bh % H
    b = (bh // H).to(tl.int64)
    lane = tl.arange(0, GP)
    slot = tl.load(slots + b).to(tl.int64)
    if slot < 0:
        if not FLUSH:
            for group in range(G):
                cols = group * GROUP + lane
                zero = tl.zeros([GP], out.dtype.element_ty)
                tl.store(out + b * out_batch + h * V + cols, zero, (lane < GROUP) & (cols < V))
        return
    count = tl.load(phases + slot * H + h)
    if (count == 0) & FLUSH:  # nothing to fold, and requantising would not give every bit back
        return
    p_scale = (pool + slot * slot_bytes + h * HEAD_BYTES).to(tl.pointer_type(tl.float32))
    p_hi = (p_scale + KLO * G).to(tl.pointer_type(tl.float16))
    p_lo = (p_hi + KHI * V).to(tl.pointer_type(tl.int8))
    p_keys = ring_keys + (slot * HK + h // (H // HK)) * (ROOM * K)
    p_values = ring_values + (slot * H + h) * (ROOM * V)
    p_gates = ring_gates + (slot * H + h) * GATES
    q += b * q_batch + h // (H // HK) * K
    k += b * k_batch + h // (H // HK) * K
    g += b * g_batch + (h * K if KDA else h)
    beta += b * beta_batch + h
    a_log += h
    dt_bias += h * K if KDA else h
    entry = tl.arange(0, EP)
    held = entry < count
    total = 0.0
    fade = tl.zeros([EP], tl.float32)
    if not KDA:
        if count > 0:
            total += tl.load(p_gates + count - 1)
        if not FLUSH:
            present = tl.load(g).to(tl.float32)
            if GATE > 0:
                rate = tl.exp(tl.load(a_log))
                present = _log_decay(present, rate, tl.load(dt_bias), GATE, LOWER)
            total += tl.where(present < FLOOR, FLOOR, present)
        fade = tl.exp(total - tl.load(p_gates + entry, held, 0.0))

    u = tl.arange(0, HP)
    in_hi = u < KHI
    w = tl.arange(0, LP)
    in_lo = w < KLO
    if FLUSH:  # the present adds nothing: no key, no decay
        in_hi_now = in_hi & False
        in_lo_now = in_lo & False
    else:
        in_hi_now = in_hi
        in_lo_now = in_lo
    q_hi, k_hi, gate_hi, a_hi, aged_hi = _part(
        q, k, g, a_log, dt_bias, p_keys, p_gates, u, in_hi_now, entry, held, total, fade,
        K, KDA, GATE, LOWER,
    )  # fmt: skip
    q_lo, k_lo, gate_lo, a_lo, aged_lo = _part(
        q + KHI, k + KHI, g + (KHI if KDA else 0), a_log, dt_bias + (KHI if KDA else 0),
        p_keys + KHI, p_gates + (KHI if KDA else 0), w, in_lo_now, entry, held, total, fade,
        K, KDA, GATE, LOWER,
    )  # fmt: skip
    if FLUSH and KDA:
        at = entry[:, None] * K + u[None, :]
        past = tl.load(p_gates + at, held[:, None] & in_hi[None, :], 0.0).to(tl.float32)
        a_hi = tl.exp(tl.sum(past, 0))
        at = entry[:, None] * K + w[None, :] + KHI
        past = tl.load(p_gates + at, held[:, None] & in_lo[None, :], 0.0).to(tl.float32)
        a_lo = tl.exp(tl.sum(past, 0))
    kn = tl.rsqrt(_squares(k_hi) + _squares(k_lo) + 1e-6)
    qn = tl.rsqrt(_squares(q_hi) + _squares(q_lo) + 1e-6) * (K**-0.5)
    k_hi *= kn
    k_lo *= kn
    q_hi *= qn
    q_lo *= qn
    kq = _inner(k_hi, q_hi, 0) + _inner(k_lo, q_lo, 0)
    k_scores = _inner(aged_hi, k_hi[None, :], 1)
    k_scores += _inner(aged_lo, k_lo[None, :], 1)
    q_scores = _inner(aged_hi, q_hi[None, :], 1)
    q_scores += _inner(aged_lo, q_lo[None, :], 1)
    key_hi = k_hi.to(ring_keys.dtype.element_ty)
    key_lo = k_lo.to(ring_keys.dtype.element_ty)
    full = (count >= ROOM) | FLUSH

    for group in range(G):
        cols = group * GROUP + lane
        live = (lane < GROUP) & (cols < V)
        tile_hi = live[:, None] & in_hi[None, :]
        tile_lo = live[:, None] & in_lo[None, :]
        at_hi = p_hi + cols[:, None] * KHI + u[None, :]
        at_lo = p_lo + cols[:, None] * KLO + w[None, :]
        s_hi = tl.load(at_hi, tile_hi, 0.0).to(tl.float32) * a_hi[None, :]
        scale = tl.load(p_scale + group * KLO + w, in_lo, 0.0) * a_lo
        s_lo = tl.load(at_lo, tile_lo, 0).to(tl.float32) * scale[None, :]
        value16 = tl.zeros([GP], ring_values.dtype.element_ty)
        if not FLUSH:
            past = tl.load(
                p_values + entry[:, None] * V + cols[None, :], held[:, None] & live[None, :], 0.0
            ).to(tl.float32)
            k_read = _inner(s_hi, k_hi[None, :], 1, PAIRED)
            k_read += _inner(s_lo, k_lo[None, :], 1)
            k_read += _inner(past, k_scores[:, None], 0)
            q_read = _inner(s_hi, q_hi[None, :], 1, PAIRED)
            q_read += _inner(s_lo, q_lo[None, :], 1)
            q_read += _inner(past, q_scores[:, None], 0)
            value = tl.load(v + b * v_batch + h * V + cols, live, 0.0).to(tl.float32)
            c = tl.load(value_scale + h * V + cols, live, 1.0) if SCALED else 1.0
            delta = _strength(tl.load(beta).to(tl.float32), LOGIT) * (value / c - k_read)
            o = (q_read + kq * delta) * c
            tl.store(out + b * out_batch + h * V + cols, o.to(out.dtype.element_ty), live)
            value16 = _saturated(delta).to(ring_values.dtype.element_ty)
        if full:
            written = value16.to(tl.float32)[:, None]
            s_hi = _folded(
                s_hi + written * key_hi.to(tl.float32)[None, :], gate_hi, p_keys, p_values, p_gates,
                u, in_hi, cols, live, count, total, K, V, KDA,
            )  # fmt: skip
            _store_half(at_hi, s_hi, tile_hi)
            s_lo = _folded(
                s_lo + written * key_lo.to(tl.float32)[None, :], gate_lo, p_keys + KHI, p_values,
                p_gates + (KHI if KDA else 0), w, in_lo, cols, live, count, total, K, V, KDA,
            )  # fmt: skip
            _store_codes(at_lo, p_scale + group * KLO + w, s_lo, tile_lo, in_lo)
        else:
            tl.store(p_values + count * V + cols, value16, live)
    if full:
        tl.store(phases + slot * H + h, 0)
    else:
        if h % (H // HK) == 0:
            tl.store(p_keys + count * K + u, key_hi, in_hi)
            tl.store(p_keys + KHI + count * K + w, key_lo, in_lo)
        if KDA:
            tl.store(p_gates + count * K + u, gate_hi.to(ring_gates.dtype.element_ty), in_hi)
            tl.store(p_gates + KHI + count * K + w, gate_lo.to(ring_gates.dtype.element_ty), in_lo)
        else:
            tl.store(p_gates + count, total)
        tl.store(phases + slot * H + h, count + 1)


def _launch(
    inputs: tuple[Tensor, ...], pool: Tensor, ring: Ring, slots: Tensor, out: Tensor,
    value_scale: Tensor | None, layout: PackedLayout, fusion: StepFusion, flush: bool,
) -> None:  # fmt: skip
    """Launch `ring_kernel` for every head of the batch; a flush passes any tensors as inputs."""
    power, heads = triton.next_power_of_2, pool.shape[1]
    strides = (0,) * 6 if flush else tuple(x.stride(0) for x in (*inputs, out))
    ring_kernel[(slots.shape[0] * heads,)](
        *inputs, pool, ring.keys, ring.values, ring.gates, ring.phases,
        out if value_scale is None else value_scale, slots, out,
        out if fusion.a_log is None else fusion.a_log,
        out if fusion.dt_bias is None else fusion.dt_bias, *strides, pool.stride(0),
        H=heads, HK=ring.keys.shape[1], K=layout.key_dim, V=layout.value_dim, KHI=layout.k_hi,
        GROUP=layout.group, HEAD_BYTES=layout.head_bytes, KDA=ring.per_channel,
        SCALED=value_scale is not None, EVERY=ring.every, FLUSH=flush,
        GATE=fusion.gate, LOWER=fusion.lower_bound or 0.0, LOGIT=fusion.beta_scale or 0.0,
        GP=power(min(layout.group, layout.value_dim)), HP=power(max(layout.k_hi, 1)),
        LP=power(max(layout.rows_lo, 1)), EP=power(ring.every - 1), num_warps=2,
    )  # fmt: skip


def ring_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, ring: Ring,
    slots: Tensor, out: Tensor, value_scale: Tensor | None, layout: PackedLayout,
    fusion: StepFusion = NO_FUSION,
) -> None:  # fmt: skip
    """Launch a step; arguments as in `ring_update.ring_step`, already checked."""
    _launch((q, k, v, g, beta), pool, ring, slots, out, value_scale, layout, fusion, False)


def ring_flush(pool: Tensor, ring: Ring, slots: Tensor, layout: PackedLayout) -> None:
    """Launch a flush; arguments as in `ring_update.ring_flush`, already checked."""
    anything = ring.values
    inputs = (anything, anything, anything, anything, anything)
    _launch(inputs, pool, ring, slots, anything, None, layout, NO_FUSION, True)
