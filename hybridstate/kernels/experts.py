"""Mixture-of-experts feed-forward for decode batches: every expert's weights cross memory once.

    o_t = sum_j w_tj W_down[e_tj] ( silu(W_gate[e_tj] x_t) * (W_up[e_tj] x_t) )

At a few tokens per expert the step is bound by reading weights. One launch sorts the (token, expert) pairs, one applies
gate, up and activation, one applies down and the routing weight, and a sum over the k experts of a token ends it:
no atomics, no padding to blocks, no host synchronisation, so a CUDA graph can hold it and two runs agree bit for bit.
Weights are the tiles of `M`, tokens those of `N` of the tensor cores, since 16 rows suffice for the tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridstate.errors import NumericError

TOKENS = 16
"""Tokens of one expert that a program takes at a time."""
MAX_PAIRS = 1 << 14
"""Token-expert pairs that one program sorts; more are split by the caller."""


def experts_reference(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """The torch twin: one expert after the other, arithmetic in the dtype of `x`.

    Args:
        x: `[T, D]`.
        gate_up: `[E, 2 I, D]`, gate rows first.
        down: `[E, D, I]`.
        chosen: int64 `[T, k]` experts of each token.
        weights: `[T, k]` routing weights.

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
    return out.sum(1).to(x.dtype)


@triton.jit
def sort_kernel(chosen, order, offsets, pairs, E: tl.constexpr, EP: tl.constexpr, N: tl.constexpr):
    """One program: pairs in order of their expert (stable), and where each expert's begin, `[E + 1]`.

    N and EP: pairs and experts + 1, rounded up to powers of two.
    """
    place = tl.arange(0, N)
    live = place < pairs
    expert = tl.load(chosen + place, live, E).to(tl.int32)
    keys = tl.sort(tl.where(live, expert * N + place, 0x7FFFFFFF))
    tl.store(order + place, keys % N, live)
    bins = tl.arange(0, EP)
    # pairs of experts below each bin: a histogram over EP bins, then its exclusive sum
    counts = tl.histogram(tl.minimum(expert, EP - 1), EP)
    before = tl.cumsum(counts, 0) - counts
    tl.store(offsets + bins, tl.minimum(before, pairs), bins <= E)


@triton.jit
def gate_up_kernel(
    x, gate_up, order, offsets, out, x_row, TOPK: tl.constexpr, D: tl.constexpr, I: tl.constexpr,
    BI: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid: (I / BI, experts). out[p] = silu(gate) * up of sorted pair p, `[pairs, I]`."""
    expert = tl.program_id(1)
    first = tl.load(offsets + expert)
    last = tl.load(offsets + expert + 1)
    rows = tl.program_id(0) * BI + tl.arange(0, BI)
    weight = gate_up + expert.to(tl.int64) * (2 * I * D) + rows[:, None] * D
    inside = (rows < I)[:, None]
    for start in range(first, last, BT):
        pair = start + tl.arange(0, BT)
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
    y, down, order, offsets, weights, out, D: tl.constexpr, I: tl.constexpr,
    BO: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid: (D / BO, experts). out[pair] = weight * W_down y, back in the pairs' own order, `[pairs, D]`."""
    expert = tl.program_id(1)
    first = tl.load(offsets + expert)
    last = tl.load(offsets + expert + 1)
    rows = tl.program_id(0) * BO + tl.arange(0, BO)
    matrix = down + expert.to(tl.int64) * (D * I) + rows[:, None] * I
    inside = (rows < D)[:, None]
    for start in range(first, last, BT):
        pair = start + tl.arange(0, BT)
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


def experts_step(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    *,
    tiles: tuple[int, int, int, int] = (64, 128, 128, 64),
    warps: int = 4,
    stages: int = 3,
) -> Tensor:
    """The experts of a decode batch, four launches whatever the routing.

    Args: as `experts_reference`; every tensor contiguous, on one CUDA device (or under the interpreter).
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
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
    y = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    size = triton.next_power_of_2(max(pairs, 16))
    bins = triton.next_power_of_2(experts + 1)
    sort_kernel[(1,)](chosen.contiguous(), order, offsets, pairs, experts, bins, size, num_warps=8)
    rows, depth, out_rows, out_depth = tiles
    gate_up_kernel[(triton.cdiv(inner, rows), experts)](
        x, gate_up, order, offsets, y, x.stride(0), top, width, inner, rows, depth, TOKENS,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    down_kernel[(triton.cdiv(width, out_rows), experts)](
        y, down, order, offsets, weights.contiguous(), out, width, inner, out_rows, out_depth, TOKENS,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out.view(tokens, top, width).sum(1, dtype=torch.float32).to(x.dtype)
