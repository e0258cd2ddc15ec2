"""Attention of one decoded token per sequence over a cache with more columns than are used.

    o_h = softmax(scale * q_h K^T + mask) V        heads h of a group share K and V

A block of keys that the mask hides is skipped, so a padded cache costs what it holds. Long caches are cut into parts
that separate programs attend to; a second launch joins them through their log-sum-exp. With `values` None the values
are the first columns of the keys: the latent of multi-head latent attention, read once for both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridstate.errors import NumericError

BLOCK = 32
"""Cache columns of one step of a program."""
PART_TOKENS = 1024
"""Cache columns of one part: a sequence of this length needs no second launch."""


def attention_reference(
    q: Tensor, keys: Tensor, values: Tensor | None, mask: Tensor, scale: float, width: int = 0
) -> Tensor:
    """The torch twin in float32.

    Args:
        q: `[B, H, DK]`.
        keys: `[B, G, L, DK]`, `H / G` heads share one.
        values: `[B, G, L, DV]`, or None for the first `width` columns of the keys.
        mask: bool `[B, L]`, True where a column may be seen; at least one per sequence.
        scale: of the scores.

    Returns:
        `[B, H, DV]` in the dtype of `q`.
    """
    if values is None:
        values = keys[..., :width]
    shared = q.shape[1] // keys.shape[1]
    k = keys.float().repeat_interleave(shared, 1)
    v = values.float().repeat_interleave(shared, 1)
    scores = torch.einsum("bhd,bhld->bhl", q.float(), k) * scale
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return torch.einsum("bhl,bhld->bhd", scores.softmax(-1), v).to(q.dtype)


@triton.jit
def attention_kernel(
    q, keys, values, mask, out, partial, lse,
    q_batch, q_head, k_batch, k_group, k_row, v_batch, v_group, v_row, mask_batch, length, part, scale,
    G: tl.constexpr, SHARED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr,
    SPLIT: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr, REST: tl.constexpr, RP: tl.constexpr,
    VP: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Grid: (batch, groups, parts). Keys are read as KP columns and REST more; KP serves as values too if LATENT."""
    batch = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    number = tl.program_id(2)
    head = tl.arange(0, HP)
    col = tl.arange(0, KP)
    rest = tl.arange(0, RP)
    vcol = tl.arange(0, VP)
    inside = head < SHARED
    first: tl.constexpr = DK - REST
    p_q = q + batch * q_batch + (group * SHARED + head)[:, None] * q_head
    q_main = tl.load(p_q + col[None, :], inside[:, None] & (col < first)[None, :], 0.0)
    if REST > 0:
        q_rest = tl.load(p_q + first + rest[None, :], inside[:, None] & (rest < REST)[None, :], 0.0)
    keys += batch * k_batch + group * k_group
    values += batch * v_batch + group * v_group
    top = tl.full([HP], float("-inf"), tl.float32)
    total = tl.zeros([HP], tl.float32)
    acc = tl.zeros([HP, KP if LATENT else VP], tl.float32)
    end = tl.minimum(length, (number + 1) * part)
    for start in range(number * part, end, BL):
        row = start + tl.arange(0, BL)
        seen = tl.load(mask + batch * mask_batch + row, row < end, 0) != 0
        if tl.max(seen.to(tl.int32), 0) > 0:
            at = row[:, None].to(tl.int64) * k_row
            k_main = tl.load(keys + at + col[None, :], seen[:, None] & (col < first)[None, :], 0.0)
            scores = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
            if REST > 0:
                k_rest = tl.load(
                    keys + at + first + rest[None, :], seen[:, None] & (rest < REST)[None, :], 0.0
                )
                scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
            scores = tl.where(seen[None, :], scores * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp(scores - higher[:, None])
            shrink = tl.exp(top - higher)
            total = total * shrink + tl.sum(p, 1)
            top = higher
            if LATENT:
                v = k_main
            else:
                v = tl.load(
                    values + row[:, None].to(tl.int64) * v_row + vcol[None, :],
                    seen[:, None] & (vcol < DV)[None, :],
                    0.0,
                )
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    wide = tl.arange(0, KP if LATENT else VP)
    live = inside[:, None] & (wide < DV)[None, :]
    home = (batch * G + group) * SHARED + head
    if SPLIT:
        place = home * tl.num_programs(2) + number
        safe = tl.where(total > 0, total, 1.0)
        tl.store(partial + place[:, None] * DV + wide[None, :], acc / safe[:, None], live)
        tl.store(lse + place, tl.where(total > 0, top + tl.log(safe), float("-inf")), inside)
    else:
        result = acc / total[:, None]
        tl.store(out + home[:, None] * DV + wide[None, :], result.to(out.dtype.element_ty), live)


@triton.jit
def join_kernel(partial, lse, out, parts, DV: tl.constexpr, VP: tl.constexpr, PP: tl.constexpr):
    """Grid: batch * heads. Parts weighted by exp of their log-sum-exp."""
    home = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PP)
    col = tl.arange(0, VP)
    logs = tl.load(lse + home * parts + number, number < parts, float("-inf"))
    weight = tl.exp(logs - tl.max(logs, 0))
    weight = weight / tl.sum(weight, 0)
    live = (number < parts)[:, None] & (col < DV)[None, :]
    each = tl.load(partial + (home * parts + number)[:, None] * DV + col[None, :], live, 0.0)
    result = tl.sum(each * weight[:, None], 0)
    tl.store(out + home * DV + col, result.to(out.dtype.element_ty), col < DV)


def attention_step(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    mask: Tensor,
    scale: float,
    width: int = 0,
    *,
    warps: int | None = None,
) -> Tensor:
    """Attention of a decode batch; arguments and result as `attention_reference`.

    The last axes must be contiguous. Allocates its output (and parts), so it can be captured in a CUDA graph.

    Raises:
        NumericError: heads that do not divide into the groups, a mask of another shape, or strided columns.
    """
    batch, heads, depth = q.shape
    groups, length = keys.shape[1:3]
    if heads % groups or mask.shape != (batch, length) or keys.shape[3] != depth:
        raise NumericError(
            f"attention of {list(q.shape)} over {list(keys.shape)} with a mask {list(mask.shape)}"
        )
    held = keys if values is None else values
    if q.stride(2) != 1 or keys.stride(3) != 1 or held.stride(3) != 1 or mask.stride(1) != 1:
        raise NumericError("attention needs contiguous columns in q, keys, values and mask")
    latent = values is None
    dv = width if latent else held.shape[3]
    rest = depth - width if latent else 0
    main = triton.next_power_of_2(max(16, depth - rest))
    parts = triton.cdiv(length, PART_TOKENS)
    split = parts > 1
    out = torch.empty((batch, heads, dv), dtype=q.dtype, device=q.device)
    partial = torch.empty(
        (batch * heads * parts, dv) if split else (1,), dtype=torch.float32, device=q.device
    )
    lse = torch.empty(
        (batch * heads * parts,) if split else (1,), dtype=torch.float32, device=q.device
    )
    attention_kernel[(batch, groups, parts)](
        q, keys, held, mask, out, partial, lse,
        q.stride(0), q.stride(1), *keys.stride()[:3], *held.stride()[:3], mask.stride(0), length,
        PART_TOKENS, scale, groups, heads // groups, depth, dv, latent, split,
        triton.next_power_of_2(max(16, heads // groups)), main, rest,
        triton.next_power_of_2(max(16, rest)), triton.next_power_of_2(max(16, dv)), BLOCK,
        num_warps=warps or 4, num_stages=2 if main > 256 else 3,
    )  # fmt: skip
    if split:
        join_kernel[(batch * heads,)](
            partial, lse, out, parts, dv, triton.next_power_of_2(dv), triton.next_power_of_2(parts)
        )
    return out
