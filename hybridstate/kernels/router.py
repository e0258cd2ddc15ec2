"""Choosing the experts of a token: scores, the k largest, their weights, in one launch.

softmax:  w = softmax over the k largest logits           (a softmax over all, renormalised over the chosen)
sigmoid:  s = sigmoid(logit); the k largest of s + bias;  w = factor * s / sum of the chosen s
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def route_reference(
    logits: Tensor, top: int, *, bias: Tensor | None = None, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The torch twin.

    Args:
        logits: `[T, E]`.
        top: experts per token.
        bias: `[E]` of the sigmoid form; None is the softmax form.
        factor: multiplies the weights.

    Returns:
        float32 weights and int64 experts, `[T, top]` each, best first.
    """
    wide = logits.float()
    if bias is None:
        values, chosen = wide.topk(top, dim=-1)
        return values.softmax(-1) * factor, chosen
    scores = wide.sigmoid()
    chosen = (scores + bias.float()).topk(top, dim=-1).indices
    values = scores.gather(-1, chosen)
    return values / (values.sum(-1, keepdim=True) + 1e-20) * factor, chosen


@triton.jit
def route_kernel(
    logits, bias, weights, chosen, row, factor,
    E: tl.constexpr, EP: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Grid: tokens. The largest is taken out TOP times; of equals the lowest expert goes first."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EP)
    live = expert < E
    x = tl.load(logits + token * row + expert, live, float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
        rank = tl.where(
            live, score + tl.load(bias + expert, live, 0.0).to(tl.float32), float("-inf")
        )
    else:
        score = tl.exp(x - tl.max(x, 0))
        rank = x
    place = tl.arange(0, TP)
    found = tl.zeros([TP], tl.int64)
    value = tl.zeros([TP], tl.float32)
    for n in tl.static_range(TOP):
        best = tl.max(rank, 0)
        winner = tl.min(tl.where(rank == best, expert, EP), 0)
        found = tl.where(place == n, winner.to(tl.int64), found)
        value = tl.where(place == n, tl.sum(tl.where(expert == winner, score, 0.0), 0), value)
        rank = tl.where(expert == winner, float("-inf"), rank)
    share = value / (tl.sum(value, 0) + (1e-20 if SIGMOID else 0.0)) * factor
    tl.store(weights + token * TOP + place, share, place < TOP)
    tl.store(chosen + token * TOP + place, found, place < TOP)


def route(
    logits: Tensor, top: int, *, bias: Tensor | None = None, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """One launch; arguments and result as `route_reference`, columns of the logits contiguous."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top), dtype=torch.int64, device=logits.device)
    route_kernel[(tokens,)](
        logits, logits if bias is None else bias, weights, chosen, logits.stride(0), factor,
        experts, triton.next_power_of_2(experts), top, triton.next_power_of_2(top), bias is not None,
        num_warps=1,
    )  # fmt: skip
    return weights, chosen
