"""What storage returns of a dense state, for many ways of storing at once: one plain Triton kernel, in place.

A state [A * S, H, K, V] holds the S sequences of A arms, arm after arm. A program takes 16 key rows of one head of one
row of one arm that writes, brings them into the arm's stored value coordinates, rounds each row in the arm's low
format or, where protected, to FP16, and writes back what a read would give. Rounding is that of `quant.formats` bit
for bit: IEEE divisions, ties to even, no fused multiply-add (the launch turns it off), NaN stays NaN.
"""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to nearest even
HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def _nearest(x):
    """round_half_even of |x| < 2^22."""
    return (x + ROUND) - ROUND


@triton.jit
def _top(x):
    """max|x| of each group; the bits of |x| order like |x| and put NaN last, so that it is not lost."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, 2).to(tl.float32, bitcast=True)[:, :, None]


@triton.jit
def _whole(x, like):
    """A number for every value of a tile."""
    return tl.broadcast_to(x, like.shape)


@triton.jit
def _ratio(x, scale):
    """x / scale, x where the scale is zero."""
    return tl.div_rn(x, _whole(tl.where(scale > 0, scale, 1.0), x))


@triton.jit
def _half(x):
    """What FP16 returns, saturating; NaN stays NaN (a GPU's minimum and maximum drop it)."""
    bounded = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX)
    return tl.where(x == x, bounded, x).to(tl.float16).to(tl.float32)


@triton.jit
def _e4m3(x):
    """Round to E4M3 (nearest, ties to even, saturating)."""
    size = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    step = ((exponent + 124) << 23).to(tl.float32, bitcast=True)
    inverse = ((130 - exponent) << 23).to(tl.float32, bitcast=True)
    rounded = _nearest(size * inverse) * step
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def _e2m1(x):
    """Round to 0, 0.5, 1, 1.5, 2, 3, 4, 6 with sign (nearest, ties to even, saturating)."""
    size = tl.minimum(tl.abs(x), 6.0)
    step = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
    inverse = tl.where(size < 2, 2.0, tl.where(size < 4, 1.0, 0.5))
    rounded = _nearest(size * inverse) * step
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def _mix(h):
    """The 32-bit finaliser of MurmurHash3."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _uniform(place, row):
    """`quant.rounding.uniform`: from the place inside a state and its row's hash, both uint32."""
    hashed = _mix(_mix(place * 0x9E3779B1 + row) ^ row)
    return (hashed >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def peak_kernel(
    state, arms, protected, scale, peaks,
    S, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """max|x| over the key channels of a head that are not protected. Grid: (arms * S, H)."""
    pair = tl.program_id(0)
    arm = tl.load(arms + pair // S)
    head = tl.program_id(1)
    row = (arm * S + pair % S) * H + head
    v = tl.arange(0, WIDTH)
    factor = tl.load(scale + (arm * H + head) * V + v, v < V, other=1.0)
    bits = tl.zeros((ROWS, WIDTH), tl.int32)
    for first in range(0, K, ROWS):
        k = first + tl.arange(0, ROWS)
        keep = tl.load(protected + (arm * H + head) * K + k, k < K, other=1) != 0
        there = ((k < K) & (keep == 0))[:, None] & (v < V)[None, :]
        x = tl.load(state + (row.to(tl.int64) * K + k)[:, None] * V + v[None, :], there, other=0.0)
        x = tl.div_rn(x, tl.broadcast_to(factor[None, :], x.shape))
        bits = tl.maximum(bits, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(peaks + row, tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True))


@triton.jit
def store_kernel(
    state, arms, kinds, protected, order, scale, peaks, hashes,
    S, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (writing arms * S, H, ceil(K / ROWS)); kinds as in `storage.KINDS`, int8-step is 0.

    `peaks` [A * S * H] float32 is what `peak_kernel` found, for NVFP4; `hashes` [A * S] int32 the rows' hashes, for
    stochastic rounding.
    """
    pair = tl.program_id(0)
    arm = tl.load(arms + pair // S)
    head = tl.program_id(1)
    row = (arm * S + pair % S) * H + head
    k = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    v = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    known = v < V
    column = tl.load(order + (arm * H + head) * V + v, known, other=0)
    factor = tl.load(scale + (arm * H + head) * V + column, known, other=1.0)
    there = (k < K)[:, None, None] & known[None, :, :]
    at = state + (row.to(tl.int64) * K + k)[:, None, None] * V + column[None, :, :]
    x = tl.load(at, there, other=0.0)
    x = tl.div_rn(x, _whole(factor[None, :, :], x))
    kind = tl.load(kinds + arm)
    stored = x
    if kind == 0:
        top = _top(x)
        unit = tl.div_rn(top, tl.full(top.shape, 127.0, tl.float32))
        code = tl.minimum(tl.maximum(_nearest(_ratio(x, unit)), -127.0), 127.0)
        stored = code * unit
    elif kind == 1:
        top = _top(x)
        unit = tl.div_rn(top, tl.full(top.shape, 448.0, tl.float32))
        stored = _e4m3(_ratio(x, unit)) * unit
    elif kind == 2:
        low = tl.min(tl.where(known[None, :, :], x, float("inf")), 2)[:, :, None]
        high = tl.max(tl.where(known[None, :, :], x, float("-inf")), 2)[:, :, None]
        unit = tl.div_rn(high - low, tl.full(low.shape, 15.0, tl.float32))
        code = tl.minimum(tl.maximum(_nearest(_ratio(x - low, unit)), 0.0), 15.0)
        stored = code * unit + low
    elif kind == 3:
        stored = _half(x)
    elif kind == 5:
        blocks = tl.reshape(x, (ROWS, GROUPS * 2, 16))
        peak = tl.load(peaks + row)
        overall = tl.div_rn(peak, peak * 0.0 + 2688.0)
        top = _top(blocks)
        part = tl.div_rn(top, tl.full(top.shape, 6.0, tl.float32))
        part = tl.div_rn(
            part, tl.where(overall > 0, overall, 1.0) + tl.zeros(part.shape, tl.float32)
        )
        unit = _e4m3(part) * overall
        stored = tl.reshape(_e2m1(_ratio(blocks, unit)) * _whole(unit, blocks), (ROWS, GROUPS, 32))
    elif kind == 6:
        top = _top(x)
        unit = tl.div_rn(top, tl.full(top.shape, 127.0, tl.float32))
        place = (head * K + k)[:, None, None] * V + v[None, :, :]
        draw = _uniform(place.to(tl.uint32), tl.load(hashes + arm * S + pair % S).to(tl.uint32))
        code = tl.minimum(tl.maximum(tl.floor(_ratio(x, unit) + draw), -127.0), 127.0)
        stored = code * unit
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        stored = bits.to(tl.float32, bitcast=True)
    keep = tl.load(protected + (arm * H + head) * K + k, k < K, other=0) != 0
    stored = tl.where(keep[:, None, None], _half(x), stored)
    stored = tl.where(x == x, stored, x)
    tl.store(at, stored * factor[None, :, :], there)
