"""One key row of a packed head to or from a row of its own, as a plain Triton kernel: addresses only, no arithmetic.

Places are those of `layout.py`: in fragment order value column v = I r + i of a block, and key row 16 c + 4 j + e, lie
at [c][i / n][lane 4 r + j][i % n][e] with n = 2 for FP16 rows and n = 4 for codes; in natural order key rows are
contiguous within a column.
"""

import triton
import triton.language as tl


@triton.jit
def _fragment(row, v, BLOCK: tl.constexpr, N: tl.constexpr):
    """Place of value columns v of key row `row` in the chunks of one block, in values."""
    I: tl.constexpr = BLOCK // 8
    column = v % BLOCK
    i = column % I
    lane = column // I * 4 + row % 16 // 4
    return row // 16 * (16 * BLOCK) + (i // N * 32 + lane) * (4 * N) + i % N * 4 + row % 4


@triton.jit
def _move(inside_head, apart, mask, GATHER: tl.constexpr):
    """Values of a head to a row of their own, or back."""
    if GATHER:
        tl.store(apart, tl.load(inside_head, mask, 0), mask)
    else:
        tl.store(inside_head, tl.load(apart, mask, 0), mask)


@triton.jit
def _half_row(
    state, row, apart, v, inside,
    K: tl.constexpr, V: tl.constexpr, KHI: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_BYTES: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """FP16 row `row` of all heads."""
    head = state + (row // KHI).to(tl.int64) * HEAD_BYTES
    if BLOCK > 0:
        place = v // BLOCK * (HEAD_BYTES * BLOCK // V // 2) + _fragment(row % KHI, v, BLOCK, 2)
        _move(head.to(tl.pointer_type(tl.int16)) + place, apart + v, inside, GATHER)
    else:
        place = v * KHI + row % KHI
        first = (head + (K - KHI) * G * 4).to(tl.pointer_type(tl.int16))
        _move(first + place, apart + v, inside, GATHER)


@triton.jit
def _code_row(
    state, row, codes, scales, v, inside,
    V: tl.constexpr, KHI: tl.constexpr, KLO: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_BYTES: tl.constexpr, GP: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """INT8 row `row` of all heads and its scales."""
    head = state + (row // KLO).to(tl.int64) * HEAD_BYTES
    w = row % KLO
    g = tl.arange(0, GP)
    if BLOCK > 0:
        BLOB: tl.constexpr = HEAD_BYTES * BLOCK // V
        PER: tl.constexpr = BLOCK // 32
        low = head + KHI * BLOCK * 2
        stored = low + v // BLOCK * BLOB + _fragment(w, v, BLOCK, 4)
        if GATHER:  # stored with an offset of 128, which is the top bit
            code = tl.load(stored, inside, 0) ^ 128
            tl.store(codes + v, code.to(tl.int8, bitcast=True), inside)
        else:
            code = tl.load(codes + v, inside, 0).to(tl.uint8, bitcast=True)
            tl.store(stored, code ^ 128, inside)
        spot = g // PER * (BLOB // 4) + w // 16 * (16 * PER) + g % PER * 16 + w % 16
        first = (low + KLO * BLOCK).to(tl.pointer_type(tl.int32))
        _move(first + spot, scales + g, g < G, GATHER)
    else:
        first = (head + KLO * G * 4 + KHI * V * 2).to(tl.pointer_type(tl.int8))
        _move(first + v * KLO + w, codes + v, inside, GATHER)
        _move(head.to(tl.pointer_type(tl.int32)) + g * KLO + w, scales + g, g < G, GATHER)


@triton.jit
def packed_rows_kernel(
    state, rows_high, rows_low, high, codes, scales, n_high,
    K: tl.constexpr, V: tl.constexpr, KHI: tl.constexpr, G: tl.constexpr,
    BLOCK: tl.constexpr, HEAD_BYTES: tl.constexpr, VP: tl.constexpr, GP: tl.constexpr,
    GATHER: tl.constexpr,
):  # fmt: skip
    """Grid: kept rows, FP16 first. `high` and `scales` are read as integers, so that a NaN keeps its bits.

    BLOCK: value columns of a block in fragment order, 0 for natural order. VP, GP: V and groups as powers of two.
    """
    number = tl.program_id(0)
    v = tl.arange(0, VP)
    inside = v < V
    if number < n_high:
        if KHI > 0:
            row = tl.load(rows_high + number)
            apart = high + number.to(tl.int64) * V
            _half_row(state, row, apart, v, inside, K, V, KHI, G, BLOCK, HEAD_BYTES, GATHER)
    else:
        if KHI < K:
            at = (number - n_high).to(tl.int64)
            row = tl.load(rows_low + at)
            _code_row(
                state, row, codes + at * V, scales + at * G, v, inside,
                V, KHI, K - KHI, G, BLOCK, HEAD_BYTES, GP, GATHER,
            )  # fmt: skip
