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

BATCHES: Final = ("q_batch", "k_batch", "v_batch", "g_batch", "b_batch", "o_batch")
"""Strides that depend on the length of a prompt; like it, they must not make another kernel."""


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
def _channel_products(
    qp, kp, g, q_step, k_step, g_step, live, row, col, SCALE, EPS: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr,
):  # fmt: skip
    """k k^T and q k^T with the decay of every channel between, one column after the other from the last to the first.

    `qp`, `kp` and `g` point at the chunk's first token; entries above the diagonal mean nothing.
    """
    C: tl.constexpr = live.shape[0]
    rows = tl.arange(0, C)[:, None]
    cols = tl.arange(0, KP)
    inside = cols < K
    full = live[:, None] & inside[None, :]
    q = tl.load(qp + rows * q_step + cols[None, :], full, 0.0).to(tl.float32)
    k = tl.load(kp + rows * k_step + cols[None, :], full, 0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 1) + EPS)[:, None] * SCALE
    k *= tl.rsqrt(tl.sum(k * k, 1) + EPS)[:, None]
    count = tl.sum(live.to(tl.int32), 0)
    between = tl.zeros_like(k)
    kk = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    for back in range(C):
        j = C - 1 - back
        key = tl.load(kp + j * k_step + cols, inside & (j < count), 0.0).to(tl.float32)
        key *= tl.rsqrt(tl.sum(key * key, 0) + EPS)
        nearest = tl.load(g + (j + 1) * g_step + cols, inside & (j + 1 < count), 0.0)
        between = tl.where(rows > j, between + nearest.to(tl.float32)[None, :], 0.0)
        seen = tl.exp(between) * key[None, :]
        kk = tl.where(col == j, tl.sum(k * seen, 1)[:, None], kk)
        qk = tl.where(col == j, tl.sum(q * seen, 1)[:, None], qk)
    return kk, qk


@triton.jit(do_not_specialize=["T", "first", *BATCHES])
def prepare_kernel(
    q, k, v, g, beta, reads, values, pairs, queries, keys, last,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head, b_batch, b_token, b_head, T, first, SCALE, EPS: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    S: tl.constexpr, VS: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, KDA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, batch * H); chunk 0 begins at token `first`, tokens from T on are none.

    Writes W `reads`, `queries`, `keys` `[batch * H, chunks, C, KP]`, U `values` `[.., C, VP]`, P `pairs` `[.., C, C]`
    and the decay of a whole chunk `last` `[.., KP]` or `[..]`, float32, zero where padded. Key channels are cut into S
    slices and value columns into VS, so that every warp has its own.
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
    qp = q + batch * q_batch + begin * q_token + key_head * q_head
    kp = k + batch * k_batch + begin * k_token + key_head * k_head
    gp = g + batch * g_batch + begin * g_token + head * g_head
    bs = tl.load(beta + batch * b_batch + (begin + tokens) * b_token + head * b_head, live, 0.0)
    bs = bs.to(tl.float32)
    spot = (owner * tl.num_programs(0) + chunk).to(tl.int64)
    if KDA:
        kk, qk = _channel_products(
            qp, kp, gp, q_token, k_token, g_token, live, row, col, SCALE, EPS, K, KP
        )
        decay_spot = tokens[None, :, None] * g_token + cols[:, None, :]
        full = live[None, :, None] & inside[:, None, :]
        decay = tl.load(gp + decay_spot, full, 0.0).to(tl.float32)
        behind = tokens + 1 < C
        behind = (behind & (begin + tokens + 1 < T))[None, :, None] & inside[:, None, :]
        after = tl.load(gp + decay_spot + g_token, behind, 0.0).to(tl.float32)
        from_start = tl.cumsum(decay, 1)
        to_end = tl.cumsum(after, 1, reverse=True)
        tl.store(last + spot * KP + cols, tl.exp(tl.sum(decay, 1)))
        qs = _units(qp, q_token, live, inside, tokens, cols, EPS) * SCALE
        ks = _units(kp, k_token, live, inside, tokens, cols, EPS)
    else:
        decay = tl.load(gp + tokens * g_token, live, 0.0).to(tl.float32)
        qs = _units(qp, q_token, live, inside, tokens, cols, EPS) * SCALE
        ks = _units(kp, k_token, live, inside, tokens, cols, EPS)
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
    vp = v + batch * v_batch + begin * v_token + head * v_head
    held = live[None, :, None] & (at < V)[:, None, :]
    vs = tl.load(vp + tokens[None, :, None] * v_token + at[:, None, :], held, 0.0).to(tl.float32)
    every = tl.broadcast_to(solve[None, :, :], (VS, C, C))
    found = _dot(every, vs * bs, PRECISION)
    tl.store(values + spot * C * VP + tokens[None, :, None] * VP + at[:, None, :], found)


@triton.jit(do_not_specialize=["T", "first", "chunks", *BATCHES])
def scan_kernel(
    reads, values, pairs, queries, keys, last, before, out, after,
    o_batch, o_token, o_head, T, first, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, S: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, KDA: tl.constexpr, ZERO: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (VP / BV, batch * H); `before` and `after` are states `[batch * H, K, V]`, which may be the same.

    Rows of `out` from token `first` on are written; ZERO begins with no state. A warp has a slice of the key channels.
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
    target = out + (owner // H) * o_batch + (owner % H) * o_head
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
        tl.store(target + token.to(tl.int64)[:, None] * o_token + at[None, :], o, live)
    tl.store(after + state_spot, state, held)
