"""Mixture-of-experts feed-forward for decode batches: every expert's weights cross memory once.

    o_t = sum_j w_tj W_down[e_tj] ( silu(W_gate[e_tj] x_t) * (W_up[e_tj] x_t) )

At a few tokens per expert the step is bound by reading weights. One launch orders the (token, expert) pairs and cuts
them into blocks of 16 tokens of one expert, one applies gate, up and activation, one applies down and the routing
weight, and one sums the k experts of a token with whatever else is added to them: no atomics, no host synchronisation,
so a CUDA graph can hold it and two runs agree bit for bit. A crowded expert is as many blocks, which run beside each
other. Weights are the tiles of `M`, tokens those of `N` of the tensor cores, since 16 rows suffice for the tokens.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridstate.errors import NumericError

TOKENS: Final = 16
"""Tokens of one expert that a program takes."""
MAX_PAIRS: Final = 1 << 14
"""Token-expert pairs that one program looks through; more are refused."""


def experts_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """The torch twin: one expert after the other, arithmetic in the dtype of `x`.

    Args:
        x: `[T, D]`.
        gate_up: `[E, 2 I, D]`, gate rows first.
        down: `[E, D, I]`.
        chosen: int64 `[T, k]` experts of each token; E and above (an expert of another rank: the sentinel of
            transformers' expert parallelism) adds nothing.
        weights: `[T, k]` routing weights.
        shared: `[T, D]` added to the sum: the output of an expert that every token takes.
        shared_gate: `[T]` logits; `shared` is multiplied by their sigmoid.

    Returns:
        `[T, D]` in the dtype of `x`; products are summed in float32.
    """
    out = torch.zeros(*chosen.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype) @ down[expert].T
        out[token, place] = y.float() * weights[token, place, None].float()
    total = out.sum(1)
    if shared is not None:
        factor = 1.0 if shared_gate is None else shared_gate.float().sigmoid()[:, None]
        total = total + factor * shared.float()
    return total.to(x.dtype)


@triton.jit
def order_kernel(
    chosen, order, starts, block_expert, block_first, pairs, blocks,
    E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid: experts. Its pairs in their order, where they begin, and its blocks of BT pairs.

    N, EP, NB: pairs, experts + 1 and blocks, rounded up to powers of two. Block b holds pairs `block_first[b]` and on
    of `block_expert[b]`, up to the next start; blocks nobody needs have expert -1.
    """
    expert = tl.program_id(0)
    place = tl.arange(0, N)
    live = place < pairs
    # past the experts, in the last bin: padding, and experts of other ranks
    found = tl.minimum(tl.load(chosen + place, live, EP - 1), EP - 1).to(tl.int32)
    bins = tl.arange(0, EP)
    counts = tl.where(bins < E, tl.histogram(found, EP), 0)
    before = bins < expert
    start = tl.sum(tl.where(before, counts, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    needed = (counts + BT - 1) // BT
    first = tl.sum(tl.where(before, needed, 0), 0)
    mine = (found == expert) & live
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(order + start + rank, place, mine)
    tl.store(starts + expert, start)
    block = tl.arange(0, NB)
    mine_too = block < (count + BT - 1) // BT
    tl.store(block_expert + first + block, tl.zeros([NB], tl.int32) + expert, mine_too)
    tl.store(block_first + first + block, start + block * BT, mine_too)
    if expert == E - 1:
        tl.store(starts + E, start + count)
        idle = (block >= first + (count + BT - 1) // BT) & (block < blocks)
        tl.store(block_expert + block, tl.full([NB], -1, tl.int32), idle)


@triton.jit
def gate_up_kernel(
    x, gate_up, order, starts, block_expert, block_first, out, x_row,
    TOPK: tl.constexpr, D: tl.constexpr, I: tl.constexpr,
    BI: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid: (I / BI, blocks). out[p] = silu(gate) * up of ordered pair p, `[pairs, I]`."""
    expert = tl.load(block_expert + tl.program_id(1))
    if expert >= 0:
        first = tl.load(block_first + tl.program_id(1))
        last = tl.load(starts + expert + 1)
        rows = tl.program_id(0) * BI + tl.arange(0, BI)
        weight = gate_up + expert.to(tl.int64) * (2 * I * D) + rows[:, None] * D
        inside = (rows < I)[:, None]
        pair = first + tl.arange(0, BT)
        live = pair < last
        token = (tl.load(order + pair, live, 0) // TOPK).to(tl.int64)
        gate = tl.zeros([BI, BT], tl.float32)
        up = tl.zeros([BI, BT], tl.float32)
        for d in range(0, D, BD):
            at = d + tl.arange(0, BD)
            fits = at < D
            xs = tl.load(
                x + token[None, :] * x_row + at[:, None], fits[:, None] & live[None, :], 0.0
            )
            tile = inside & fits[None, :]
            gate = tl.dot(
                tl.load(weight + at[None, :], tile, 0.0), xs, gate, input_precision="ieee"
            )
            up = tl.dot(
                tl.load(weight + I * D + at[None, :], tile, 0.0), xs, up, input_precision="ieee"
            )
        # the twin rounds both projections to the dtype of x before the activation
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        y = gate / (1.0 + tl.exp(-gate)) * up
        target = out + pair[None, :].to(tl.int64) * I + rows[:, None]
        tl.store(target, y.to(out.dtype.element_ty), inside & live[None, :])


@triton.jit
def down_kernel(
    y, down, order, starts, block_expert, block_first, weights, out, D: tl.constexpr, I: tl.constexpr,
    BO: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid: (D / BO, blocks). out[pair] = weight * W_down y, back in the pairs' own order, `[pairs, D]`."""
    expert = tl.load(block_expert + tl.program_id(1))
    if expert >= 0:
        first = tl.load(block_first + tl.program_id(1))
        last = tl.load(starts + expert + 1)
        rows = tl.program_id(0) * BO + tl.arange(0, BO)
        matrix = down + expert.to(tl.int64) * (D * I) + rows[:, None] * I
        inside = (rows < D)[:, None]
        pair = first + tl.arange(0, BT)
        live = pair < last
        home = tl.load(order + pair, live, 0).to(tl.int64)
        acc = tl.zeros([BO, BT], tl.float32)
        for i in range(0, I, BI):
            at = i + tl.arange(0, BI)
            fits = at < I
            ys = tl.load(
                y + pair[None, :].to(tl.int64) * I + at[:, None],
                fits[:, None] & live[None, :],
                0.0,
            )
            acc = tl.dot(
                tl.load(matrix + at[None, :], inside & fits[None, :], 0.0),
                ys,
                acc,
                input_precision="ieee",
            )
        # the twin rounds the projection to the dtype of x before it is weighted
        share = tl.load(weights + home, live, 0.0).to(tl.float32)
        o = acc.to(y.dtype.element_ty).to(tl.float32) * share[None, :]
        target = out + home[None, :] * D + rows[:, None]
        tl.store(target, o.to(out.dtype.element_ty), inside & live[None, :])


@triton.jit
def combine_kernel(
    parts, chosen, shared, gate, out, shared_row, gate_row, E: tl.constexpr, D: tl.constexpr,
    TOPK: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, D / BD). Sum of a token's experts, and of the shared one times the sigmoid of its gate."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    live = col < D
    total = tl.zeros([BD], tl.float32)
    for n in tl.static_range(TOPK):
        here = tl.load(chosen + token * TOPK + n) < E  # else nothing was written
        part = parts + (token * TOPK + n) * D + col
        total += tl.load(part, live & here, 0.0).to(tl.float32)
    if SHARED:
        more = tl.load(shared + token * shared_row + col, live, 0.0).to(tl.float32)
        if GATED:
            more *= 1.0 / (1.0 + tl.exp(-tl.load(gate + token * gate_row).to(tl.float32)))
        total += more
    tl.store(out + token * D + col, total.to(out.dtype.element_ty), live)


def experts_step(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    *,
    tiles: tuple[int, int, int, int] = (64, 128, 128, 64),
    warps: int = 4,
    stages: int = 3,
) -> Tensor:
    """The experts of a decode batch, four launches whatever the routing.

    Args: as `experts_reference`, on one CUDA device (or under the interpreter); rows of `x` and `shared` may lie
        apart, `shared_gate` may be a column; the others are contiguous.
        tiles: rows and depth of a weight tile of gate/up, then of down.
        warps, stages: of both matrix kernels.

    Raises:
        NumericError: shapes do not fit, or more than `MAX_PAIRS` token-expert pairs.
    """
    tokens, width = x.shape
    experts, inner = down.shape[0], down.shape[2]
    pairs = chosen.numel()
    if gate_up.shape != (experts, 2 * inner, width) or down.shape != (experts, width, inner):
        raise NumericError(
            f"experts {list(gate_up.shape)} and {list(down.shape)} do not fit {width} inputs",
            found=[list(gate_up.shape), list(down.shape)],
        )
    if pairs > MAX_PAIRS:
        raise NumericError(f"{pairs} token-expert pairs at once, at most {MAX_PAIRS}", found=pairs)
    top = chosen.shape[1]
    blocks = block_count(pairs, experts)

    def integers(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=x.device)

    order, starts, block_expert, block_first = map(integers, (pairs, experts + 1, blocks, blocks))
    y = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    chosen = chosen.contiguous()
    power = triton.next_power_of_2
    size = power(max(pairs, 16))
    order_kernel[(experts,)](
        chosen, order, starts, block_expert, block_first, pairs, blocks,
        experts, power(experts + 1), size, power(blocks), TOKENS, num_warps=4 if size <= 4096 else 8,
    )  # fmt: skip
    rows, depth, out_rows, out_depth = tiles
    plan = (order, starts, block_expert, block_first)
    gate_up_kernel[(triton.cdiv(inner, rows), blocks)](
        x, gate_up, *plan, y, x.stride(0), top, width, inner, rows, depth, TOKENS,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    down_kernel[(triton.cdiv(width, out_rows), blocks)](
        y, down, *plan, weights.contiguous(), parts, width, inner, out_rows, out_depth, TOKENS,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    block = min(1024, power(width))
    combine_kernel[(tokens, triton.cdiv(width, block))](
        parts, chosen, x if shared is None else shared, x if shared_gate is None else shared_gate, out,
        0 if shared is None else shared.stride(0), 0 if shared_gate is None else shared_gate.stride(0),
        experts, width, top, shared is not None, shared_gate is not None, block, num_warps=4,
    )  # fmt: skip
    return out


def block_count(pairs: int, experts: int) -> int:
    """Blocks of `TOKENS` pairs of one expert that any routing can need: one unfilled for each expert in use."""
    used = min(pairs, experts)
    return used + (pairs - used) // TOKENS
