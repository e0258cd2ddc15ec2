"""The two Triton kernels of `kernels.prefill`: what each chunk needs, and the walk from chunk to chunk.

Inside a chunk of C tokens, with G the running sum of log decays, the delta rule is a unit lower triangular system
(Yang et al. 2024, arXiv:2412.06464; Kimi Team 2025, arXiv:2510.26692):

    A_ij = beta_i sum_u k_iu k_ju exp(G_iu - G_ju)   j < i        P_ij = the same with q_i, without beta, j <= i
    R = (I + A)^-1                                   W = R beta k exp(G)          U = R beta v
    u = U - W S        o = q exp(G) S + P u        S <- exp(G_C) S + (k exp(G_C - G))^T u

`prepare_kernel` computes W, U, P and the scaled q and k of every chunk by itself; `scan_kernel` walks over the chunks
with the state of some value columns in registers. Log decays are only ever added from the nearer token to the farther
one, never subtracted, so nothing overflows and a small difference of large sums loses nothing. R comes from joining
inverses of blocks, [[X, 0], [-Y B X, Y]], which like substitution keeps its digits where powers of A would not.
"""

from typing import Final

import triton
import triton.language as tl

BATCHES: Final = ("q_batch", "k_batch", "v_batch", "g_batch", "b_batch")
"""Strides that depend on the length of a prompt; like it, they must not make another kernel."""
FLOOR = tl.constexpr(-100.0)
"""Log decay of one token and channel that float32 takes for nothing left: exp(-100) = 4e-44."""


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _inverse(A, row, col, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A with 2^LEVELS rows."""
    R = tl.where(row == col, 1.0, 0.0) - tl.where(row // 2 == col // 2, A, 0.0)
    for level in tl.static_range(1, LEVELS):
        below = ((row >> level) != (col >> level)) & ((row >> (level + 1)) == (col >> (level + 1)))
        R -= _dot(_dot(R, tl.where(below, A, 0.0), PRECISION), R, PRECISION)
    return R


@triton.jit
def _units(x, step, live, inside, tokens, cols, EPS: tl.constexpr):
    """Rows `[slices, C, channels of a slice]` of q or k over their norms."""
    spot = tokens[None, :, None] * step + cols[:, None, :]
    found = tl.load(x + spot, live[None, :, None] & inside[:, None, :], 0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(tl.sum(found * found, 2), 0) + EPS)
    return found * norm[None, :, None]


@triton.jit
def _sums(mask, decay, S: tl.constexpr, PRECISION: tl.constexpr):
    """Sums `[S, C, channels]` of the log decays of those tokens that a row of `mask [C, C]` names."""
    C: tl.constexpr = mask.shape[0]
    chosen = tl.broadcast_to(tl.where(mask, 1.0, 0.0)[None, :, :], (S, C, C))
    return _dot(chosen, decay, PRECISION)


@triton.jit
def _channel_products(
    qs, ks, decay, row, col, S: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr
):
    """k k^T and q k^T with the decay of every channel between, of tokens `[S, C, channels]`.

    Two tokens first meet in a block of 2, 4, 8 .. tokens; between them lie the end of its lower half behind the one
    and the beginning of its upper half up to the other, so that a matrix product does all pairs of a level, with
    factors of at most one.
    """
    C: tl.constexpr = row.shape[0]
    diagonal = tl.sum(tl.sum(qs * ks, 2), 0)
    kk = tl.zeros([C, C], tl.float32)
    qk = tl.where(row == col, diagonal[:, None], 0.0)
    for level in range(LEVELS):
        lower, upper = row >> level, col >> level
        to_row = tl.exp(_sums((lower == upper) & (col <= row), decay, S, PRECISION))
        behind = tl.exp(_sums((lower == upper) & (col > row), decay, S, PRECISION))
        right = tl.permute(ks * behind, (0, 2, 1))
        meet = (lower > upper) & ((lower >> 1) == (upper >> 1))
        kk += tl.where(meet, tl.sum(_dot(ks * to_row, right, PRECISION), 0), 0.0)
        qk += tl.where(meet, tl.sum(_dot(qs * to_row, right, PRECISION), 0), 0.0)
    return kk, qk


@triton.jit
def _parts(scratch, count, KP: tl.constexpr, VP: tl.constexpr, C: tl.constexpr):
    """Float32 results of `count` chunks, one kind after the other.

    W, scaled q and scaled k `[count, C, KP]` each, U `[count, C, VP]`, P `[count, C, C]`, the decay of a whole chunk
    `[count, KP]` or `[count]`.
    """
    wide = tl.cast(count, tl.int64) * (C * KP)
    values = scratch + 3 * wide
    pairs = values + tl.cast(count, tl.int64) * (C * VP)
    last = pairs + tl.cast(count, tl.int64) * (C * C)
    return scratch, scratch + wide, scratch + 2 * wide, values, pairs, last


@triton.jit(do_not_specialize=["T", "first", *BATCHES])
def prepare_kernel(
    q, k, v, g, beta, scratch, q_batch, q_token, k_batch, k_token, v_batch, v_token, g_batch, g_token,
    b_batch, b_token, T, first, SCALE: tl.constexpr, EPS: tl.constexpr, H: tl.constexpr, HK: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, S: tl.constexpr, VS: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, KDA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, batch * H); chunk 0 begins at token `first`, tokens from T on are none.

    Heads of a token are contiguous. Writes what `_parts` names, zero where padded. Key channels are cut into S slices
    and value columns into VS, so that every warp has its own.
    """
    chunk = tl.program_id(0)
    owner = tl.program_id(1)
    batch = (owner // H).to(tl.int64)
    head = owner % H
    begin = (first + chunk * C).to(tl.int64)
    tokens = tl.arange(0, C)
    live = begin + tokens < T
    cols = tl.arange(0, S)[:, None] * (KP // S) + tl.arange(0, KP // S)[None, :]
    inside = cols < K
    row = tokens[:, None]
    col = tokens[None, :]
    key_head = head // (H // HK)
    qp = q + batch * q_batch + begin * q_token + key_head * K
    kp = k + batch * k_batch + begin * k_token + key_head * K
    gp = g + batch * g_batch + begin * g_token + head * (K if KDA else 1)
    bs = tl.load(beta + batch * b_batch + (begin + tokens) * b_token + head, live, 0.0)
    bs = bs.to(tl.float32)
    spot = (owner * tl.num_programs(0) + chunk).to(tl.int64)
    count = tl.num_programs(0) * tl.num_programs(1)
    reads, queries, keys, values, pairs, last = _parts(scratch, count, KP, VP, C)
    qs = _units(qp, q_token, live, inside, tokens, cols, EPS) * SCALE
    ks = _units(kp, k_token, live, inside, tokens, cols, EPS)
    if KDA:
        full = live[None, :, None] & inside[:, None, :]
        decay = tl.load(gp + tokens[None, :, None] * g_token + cols[:, None, :], full, 0.0)
        decay = decay.to(tl.float32)
        decay = tl.where(decay < FLOOR, FLOOR, decay)  # a maximum would drop a NaN
        kk, qk = _channel_products(qs, ks, decay, row, col, S, LEVELS, PRECISION)
        from_start = _sums(col <= row, decay, S, PRECISION)
        to_end = _sums(col > row, decay, S, PRECISION)
        tl.store(last + spot * KP + cols, tl.exp(tl.sum(decay, 1)))
    else:
        decay = tl.load(gp + tokens * g_token, live, 0.0).to(tl.float32)
        after = tl.where(row > col, decay[:, None], 0.0)  # of the tokens behind col
        between = tl.exp(tl.cumsum(after, 0))
        turned = tl.permute(ks, (0, 2, 1))
        kk = tl.sum(_dot(ks, turned, PRECISION), 0) * between
        qk = tl.sum(_dot(qs, turned, PRECISION), 0) * between
        from_start = tl.cumsum(decay, 0)[None, :, None]
        to_end = tl.sum(after, 0)[None, :, None]
        tl.store(last + spot, tl.exp(tl.sum(decay, 0)))
    tl.store(pairs + spot * C * C + row * C + col, tl.where(row >= col, qk, 0.0))
    solve = _inverse(tl.where(row > col, kk * bs[:, None], 0.0), row, col, LEVELS, PRECISION)
    from_start = tl.exp(from_start)
    wide = spot * C * KP + tokens[None, :, None] * KP + cols[:, None, :]
    tl.store(queries + wide, qs * from_start)
    tl.store(keys + wide, ks * tl.exp(to_end))
    bs = bs[None, :, None]
    every = tl.broadcast_to(solve[None, :, :], (S, C, C))
    tl.store(reads + wide, _dot(every, ks * from_start * bs, PRECISION))
    at = tl.arange(0, VS)[:, None] * (VP // VS) + tl.arange(0, VP // VS)[None, :]
    vp = v + batch * v_batch + begin * v_token + head * V
    held = live[None, :, None] & (at < V)[:, None, :]
    vs = tl.load(vp + tokens[None, :, None] * v_token + at[:, None, :], held, 0.0).to(tl.float32)
    every = tl.broadcast_to(solve[None, :, :], (VS, C, C))
    found = _dot(every, vs * bs, PRECISION)
    tl.store(values + spot * C * VP + tokens[None, :, None] * VP + at[:, None, :], found)


@triton.jit(do_not_specialize=["T", "first", "chunks"])
def scan_kernel(
    scratch, before, out, after, T, first, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, S: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, KDA: tl.constexpr, ZERO: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (VP / BV, batch * H); `before` and `after` are states `[batch * H, K, V]`, which may be the same.

    Rows of `out [batch, T, H, V]` from token `first` on are written; ZERO begins with no state. A warp has a slice of
    the key channels.
    """
    owner = tl.program_id(1).to(tl.int64)
    tokens = tl.arange(0, C)
    cols = tl.arange(0, S)[:, None] * (KP // S) + tl.arange(0, KP // S)[None, :]
    at = tl.program_id(0) * BV + tl.arange(0, BV)
    held = (cols < K)[:, :, None] & (at < V)[None, None, :]
    state_spot = owner * K * V + cols[:, :, None] * V + at[None, None, :]
    if ZERO:
        state = tl.zeros([S, KP // S, BV], tl.float32)
    else:
        state = tl.load(before + state_spot, held, 0.0)
    wide = tokens[None, :, None] * KP + cols[:, None, :]
    turned = tokens[None, None, :] * KP + cols[:, :, None]
    target = out + ((owner // H) * T * H + owner % H) * V
    count = chunks * tl.num_programs(1)
    reads, queries, keys, values, pairs, last = _parts(scratch, count, KP, VP, C)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        spot = owner * chunks + chunk
        w = tl.load(reads + spot * C * KP + wide)
        u = tl.load(values + spot * C * VP + tokens[:, None] * VP + at[None, :])
        p = tl.load(pairs + spot * C * C + tokens[:, None] * C + tokens[None, :])
        qs = tl.load(queries + spot * C * KP + wide)
        ks = tl.load(keys + spot * C * KP + turned)
        u -= tl.sum(_dot(w, state, PRECISION), 0)
        o = tl.sum(_dot(qs, state, PRECISION), 0) + _dot(p, u, PRECISION)
        if KDA:
            decay = tl.load(last + spot * KP + cols)[:, :, None]
        else:
            decay = tl.load(last + spot)
        every = tl.broadcast_to(u[None, :, :], (S, C, BV))
        state = state * decay + _dot(ks, every, PRECISION)
        token = first + chunk * C + tokens
        live = (token < T)[:, None] & (at < V)[None, :]
        o = o.to(out.dtype.element_ty)
        tl.store(target + token.to(tl.int64)[:, None] * (H * V) + at[None, :], o, live)
    tl.store(after + state_spot, state, held)
