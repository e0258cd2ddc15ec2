"""Attention of one decoded token per sequence over a cache with more columns than are used.

    o_h = softmax(scale * q_h K^T + mask) V        heads h of a group share K and V

What may be seen is a mask, or the first columns of a cache line that the sequence names: lines of different lengths
then make one batch (`lines`, `lengths`). Columns out of sight are skipped, so a padded cache costs what it holds. Long
caches are cut into parts that separate programs attend to; a second launch joins them through their log-sum-exp. With
`values` None the values are the first columns of the keys: the latent of multi-head latent attention, read once for
both. `append_step` puts the new token's keys and values into the lines.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridstate.errors import NumericError

BLOCK: Final = {False: 64, True: 32}
"""Cache columns of one step of a program, by whether keys are latents; measured in bfloat16 on an H200."""
STEP_BYTES: Final = 1 << 15
"""Most bytes of the keys of a step; those of three steps lie in shared memory, with as many values."""
PART_TOKENS: Final = 1024
"""Most cache columns of one part."""
PROGRAMS: Final = 264
"""Programs from which longer parts are better than more of them: two for each processor of an H200."""


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
def _block(
    q_main, q_rest, keys, values, k_row, v_row, row, seen, scale, top, total, acc,
    DK: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr, KP: tl.constexpr, REST: tl.constexpr,
    RP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: running maximum, sum and weighted values after these rows."""
    first: tl.constexpr = DK - REST
    col = tl.arange(0, KP)
    at = row[:, None].to(tl.int64) * k_row
    k_main = tl.load(keys + at + col[None, :], seen[:, None] & (col < first)[None, :], 0.0)
    scores = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
    if REST > 0:
        rest = tl.arange(0, RP)
        k_rest = tl.load(
            keys + at + first + rest[None, :], seen[:, None] & (rest < REST)[None, :], 0.0
        )
        scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee")
    scores = tl.where(seen[None, :], scores * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    p = tl.exp(scores - higher[:, None])
    shrink = tl.exp(top - higher)
    if LATENT:
        v = k_main
    else:
        vcol = tl.arange(0, VP)
        v = tl.load(
            values + row[:, None].to(tl.int64) * v_row + vcol[None, :],
            seen[:, None] & (vcol < DV)[None, :],
            0.0,
        )
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit
def attention_kernel(
    q, keys, values, mask, lines, lengths, out, partial, lse,
    q_batch, q_head, k_batch, k_group, k_row, v_batch, v_group, v_row, mask_batch, length, part, scale,
    G: tl.constexpr, SHARED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr,
    SPLIT: tl.constexpr, MASKED: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr, REST: tl.constexpr,
    RP: tl.constexpr, VP: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Grid: (batch, groups, parts). Keys are read as KP columns and REST more; KP serves as values too if LATENT."""
    batch = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    number = tl.program_id(2)
    head = tl.arange(0, HP)
    col = tl.arange(0, KP)
    rest = tl.arange(0, RP)
    inside = head < SHARED
    first: tl.constexpr = DK - REST
    p_q = q + batch * q_batch + (group * SHARED + head)[:, None] * q_head
    q_main = tl.load(p_q + col[None, :], inside[:, None] & (col < first)[None, :], 0.0)
    q_rest = q_main
    if REST > 0:
        q_rest = tl.load(p_q + first + rest[None, :], inside[:, None] & (rest < REST)[None, :], 0.0)
    line = batch
    if not MASKED:
        line = tl.load(lines + batch).to(tl.int64)
        length = tl.where(line < 0, 0, tl.minimum(tl.load(lengths + batch).to(tl.int32), length))
        line = tl.maximum(line, 0)
    keys += line * k_batch + group * k_group
    values += line * v_batch + group * v_group
    top = tl.full([HP], float("-inf"), tl.float32)
    total = tl.zeros([HP], tl.float32)
    acc = tl.zeros([HP, KP if LATENT else VP], tl.float32)
    end = tl.minimum(length, (number + 1) * part)
    for start in range(number * part, end, BL):
        row = start + tl.arange(0, BL)
        seen = row < end
        if MASKED:
            seen = tl.load(mask + batch * mask_batch + row, seen, 0) != 0
            if tl.max(seen.to(tl.int32), 0) > 0:
                top, total, acc = _block(
                    q_main, q_rest, keys, values, k_row, v_row, row, seen, scale, top, total, acc,
                    DK, DV, LATENT, KP, REST, RP, VP,
                )  # fmt: skip
        else:  # without a branch the loads of coming steps overlap this one
            top, total, acc = _block(
                q_main, q_rest, keys, values, k_row, v_row, row, seen, scale, top, total, acc,
                DK, DV, LATENT, KP, REST, RP, VP,
            )  # fmt: skip
    wide = tl.arange(0, KP if LATENT else VP)
    live = inside[:, None] & (wide < DV)[None, :]
    home = (batch * G + group) * SHARED + head
    if SPLIT:
        place = home * tl.num_programs(2) + number
        safe = tl.where(total > 0, total, 1.0)
        tl.store(partial + place[:, None] * DV + wide[None, :], acc / safe[:, None], live)
        tl.store(lse + place, tl.where(total > 0, top + tl.log(safe), float("-inf")), inside)
    else:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + home[:, None] * DV + wide[None, :], result.to(out.dtype.element_ty), live)


@triton.jit
def join_kernel(partial, lse, out, parts, DV: tl.constexpr, VP: tl.constexpr, PP: tl.constexpr):
    """Grid: batch * heads. Parts weighted by exp of their log-sum-exp."""
    home = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PP)
    col = tl.arange(0, VP)
    logs = tl.load(lse + home * parts + number, number < parts, float("-inf"))
    top = tl.max(logs, 0)
    weight = tl.exp(logs - tl.where(top > float("-inf"), top, 0.0))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total > 0, total, 1.0)
    live = (number < parts)[:, None] & (col < DV)[None, :]
    each = tl.load(partial + (home * parts + number)[:, None] * DV + col[None, :], live, 0.0)
    result = tl.sum(each * weight[:, None], 0)
    tl.store(out + home * DV + col, result.to(out.dtype.element_ty), col < DV)


def attention_step(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    scale: float,
    width: int = 0,
    *,
    lines: Tensor | None = None,
    lengths: Tensor | None = None,
    warps: int = 4,
    block: int | None = None,
    part: int | None = None,
) -> Tensor:
    """Attention of a decode batch; arguments and result as `attention_reference`, or without a mask:

    Args:
        lines: int64 `[B]`, the line of `keys` and `values` of each sequence; -1 for padding, whose output is zero.
        lengths: int64 `[B]`, columns of its line that a sequence sees.
        warps, block, part: of a program; cache columns of its steps, and of all of them.

    The last axes must be contiguous. Allocates its output (and parts), so it can be captured in a CUDA graph.

    Raises:
        NumericError: heads that do not divide into the groups, a mask of another shape, or strided columns.
    """
    batch, heads, depth = q.shape
    groups, length = keys.shape[1:3]
    if heads % groups or keys.shape[3] != depth or (mask is None) != (lines is not None):
        raise NumericError(f"attention of {list(q.shape)} over {list(keys.shape)}")
    if mask is not None and mask.shape != (batch, length):
        raise NumericError(
            f"attention of {list(q.shape)} over {list(keys.shape)} with a mask {list(mask.shape)}"
        )
    held = keys if values is None else values
    strides = [q.stride(2), keys.stride(3), held.stride(3)]
    if {*strides, 1 if mask is None else mask.stride(1)} != {1}:
        raise NumericError("attention needs contiguous columns in q, keys, values and mask")
    latent = values is None
    dv = width if latent else held.shape[3]
    rest = depth - width if latent else 0
    main = triton.next_power_of_2(max(16, depth - rest))
    row_bytes = q.element_size() * triton.next_power_of_2(max(main, dv))
    step = block or min(BLOCK[latent], max(16, STEP_BYTES // row_bytes))
    part = part or part_columns(batch * groups, length, step)
    parts = triton.cdiv(length, part)
    split = parts > 1
    out = torch.empty((batch, heads, dv), dtype=q.dtype, device=q.device)
    partial = torch.empty(
        (batch * heads * parts, dv) if split else (1,), dtype=torch.float32, device=q.device
    )
    lse = torch.empty(
        (batch * heads * parts,) if split else (1,), dtype=torch.float32, device=q.device
    )
    none = q if mask is None else mask
    attention_kernel[(batch, groups, parts)](
        q, keys, held, none, q if lines is None else lines, q if lengths is None else lengths, out, partial, lse,
        q.stride(0), q.stride(1), *keys.stride()[:3], *held.stride()[:3], none.stride(0), length,
        part, scale, groups, heads // groups, depth, dv, latent, split, mask is not None,
        triton.next_power_of_2(max(16, heads // groups)), main, rest,
        triton.next_power_of_2(max(16, rest)), triton.next_power_of_2(max(16, dv)), step,
        num_warps=warps, num_stages=2 if main > 256 else 3,
    )  # fmt: skip
    if split:
        join_kernel[(batch * heads,)](
            partial, lse, out, parts, dv, triton.next_power_of_2(dv), triton.next_power_of_2(parts)
        )
    return out


def part_columns(programs: int, length: int, step: int) -> int:
    """Columns of a part: short enough that few sequences fill the device, whole steps, at most `PART_TOKENS`."""
    wanted = max(1, PROGRAMS // max(programs, 1))
    columns = 1 << (-(-length // wanted) - 1).bit_length()
    return min(PART_TOKENS, max(step, columns))


@triton.jit
def append_kernel(
    new, held, lines, positions, new_batch, new_group, held_line, held_group, held_row, first, length,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Grid: (batch, groups). One row of D columns, to columns `first` and on of the line's row."""
    batch = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    line = tl.load(lines + batch).to(tl.int64)
    col = tl.arange(0, DP)
    row = tl.load(positions + batch).to(tl.int64)
    value = tl.load(new + batch * new_batch + group * new_group + col, col < D, 0.0)
    target = held + line * held_line + group * held_group + row * held_row + first
    inside = (line >= 0) & (row < length)
    tl.store(target + col, value.to(held.dtype.element_ty), (col < D) & inside)


def append_step(
    new: Tensor, held: Tensor, lines: Tensor, positions: Tensor, first: int = 0
) -> None:
    """Write one token's rows into a cache, one launch.

    Args:
        new: `[B, G, D]`, columns contiguous.
        held: `[lines, G, L, >= first + D]`, written in place.
        lines: int64 `[B]`, -1 for padding.
        positions: int64 `[B]`; rows at L and beyond are dropped.
        first: column that the row begins at.

    Raises:
        NumericError: shapes do not fit.
    """
    batch, groups, depth = new.shape
    fits = held.shape[1] == groups and held.shape[3] >= first + depth
    if not fits or new.stride(2) != 1 or held.stride(3) != 1:
        raise NumericError(f"rows {list(new.shape)} do not fit a cache of {list(held.shape)}")
    append_kernel[(batch, groups)](
        new, held, lines, positions, new.stride(0), new.stride(1), *held.stride()[:3], first, held.shape[2],
        depth, triton.next_power_of_2(depth), num_warps=1 if depth <= 256 else 4,
    )  # fmt: skip


def append_reference(
    new: Tensor, held: Tensor, lines: Tensor, positions: Tensor, first: int = 0
) -> None:
    """The torch twin of `append_step`."""
    live = (lines >= 0) & (positions < held.shape[2])
    rows = held[..., first : first + new.shape[2]]
    rows[lines[live], :, positions[live]] = new[live].to(held.dtype)
