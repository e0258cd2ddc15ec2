"""Root-mean-square norms, the one-token convolution and gated products of a decode step, one launch each.

    norm:   y = x / sqrt(mean(x^2) + eps) * w [* act(gate)]        arithmetic in float32, rounded once
    conv:   y_c = silu( b_c + sum_j W_cj window_cj ),  window <- window shifted by the new token
    gated:  y = act(gate) * x

transformers spells each as six to ten elementwise launches, which at decode batches cost more than the projections.
"""

from itertools import pairwise
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridstate.errors import NumericError

ACTIVATIONS: Final = {"": 0, "silu": 1, "sigmoid": 2}
CHANNELS = 256
"""Channels of one program of the convolution."""


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
    gate: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """The torch twin.

    Args:
        x: `[..., D]`.
        weight: `[D]`; `zero_centred` means one is added to it.
        gate: as `x`, multiplied after `activation` (`silu` or `sigmoid`).
    """
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    y = y * (weight.float() + (1.0 if zero_centred else 0.0))
    if gate is not None:
        wide = gate.float()
        y = y * (wide * wide.sigmoid() if activation == "silu" else wide.sigmoid())
    return y.to(x.dtype)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, weight, gate, out, x_outer, x_inner, gate_outer, gate_inner, rows, eps, INNER: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, CENTRED: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Grid: rows / R; INNER rows lie `inner` apart, then the next `outer`."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    col = tl.arange(0, DP)
    live = (row < rows)[:, None] & (col < D)[None, :]
    place = (row // INNER) * x_outer + (row % INNER) * x_inner
    value = tl.load(x + place[:, None] + col[None, :], live, 0.0).to(tl.float32)
    w = tl.load(weight + col, col < D, 0.0).to(tl.float32)
    if CENTRED:
        w += 1.0
    mean = tl.sum(value * value, 1) / D
    y = value * tl.rsqrt(mean + eps)[:, None] * w[None, :]
    if ACT > 0:
        place = (row // INNER) * gate_outer + (row % INNER) * gate_inner
        z = tl.load(gate + place[:, None] + col[None, :], live, 0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-z))
        y = y * (z * share if ACT == 1 else share)
    tl.store(out + row[:, None] * D + col[None, :], y.to(out.dtype.element_ty), live)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centred: bool = False,
    gate: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """One launch; arguments and result as `rms_norm_reference`, the last axis contiguous.

    Raises:
        NumericError: an activation without a gate or of another name, or strided columns.
    """
    if (gate is None) != (activation == "") or activation not in ACTIVATIONS:
        raise NumericError(f"a gate takes silu or sigmoid, found {activation!r}")
    width = x.shape[-1]
    # rows at equal distances, as the tokens of a prompt: no kernel of its own for every number of them
    even = _even_rows(x) and (gate is None or _even_rows(gate))
    inner = 1 if even or x.dim() < 3 else x.shape[-2]
    flat = x.reshape(-1, inner, width)
    gates = flat if gate is None else gate.reshape(flat.shape)
    if flat.stride(2) != 1 or gates.stride(2) != 1:
        raise NumericError("a norm needs contiguous columns")
    rows = len(flat) * inner
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    padded = triton.next_power_of_2(width)
    block = max(1, min(1024 // padded, 8))
    rms_norm_kernel[(triton.cdiv(rows, block),)](
        flat, weight, gates, out, *flat.stride()[:2], *gates.stride()[:2], rows, eps, inner,
        width, padded, block, zero_centred, ACTIVATIONS[activation], num_warps=4,
    )  # fmt: skip
    return out


def _even_rows(x: Tensor) -> bool:
    """Whether all rows lie at one distance from each other."""
    sizes = [(n, step) for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    return all(a[1] == b[0] * b[1] for a, b in pairwise(sizes))


def conv_reference(
    x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor | None = None
) -> Tensor:
    """The torch twin: one token of a depthwise causal convolution with SiLU; shifts `window` in place.

    Args:
        x: `[B, C]`.
        window: `[B, C, L]`, oldest token first, at least `W - 1` columns; `[slots, C, L]` with `slots`.
        weight: `[C, W]`.
        bias: `[C]` or None.
        slots: int64 `[B]`, the window of each row; -1 for padding, whose output is zero. None: row by row.

    Returns:
        `[B, C]` in the dtype of `x`.
    """
    if slots is not None:
        live = slots >= 0
        held = window[slots[live]]
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        out[live] = conv_reference(x[live], held, weight, bias)
        window[slots[live]] = held
        return out
    taps = weight.shape[1]
    joined = torch.cat([window.to(x.dtype), x[..., None]], -1)
    y = (joined[..., -taps:].float() * weight.float()).sum(-1)
    y = y if bias is None else y + bias.float()
    window.copy_(joined[..., -window.shape[-1] :])
    return torch.nn.functional.silu(y).to(x.dtype)


@triton.jit
def conv_kernel(
    x, window, weight, bias, slots, out, x_batch, x_channel, w_batch, C,
    L: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SLOTS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid: (batch, C / BC)."""
    batch = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channel < C
    live = inside
    slot = batch
    if SLOTS:
        slot = tl.load(slots + batch).to(tl.int64)
        live = inside & (slot >= 0)
    new = tl.load(x + batch * x_batch + channel * x_channel, live, 0.0)
    held = window + slot * w_batch + channel * L
    y = new.to(tl.float32) * tl.load(weight + channel * W + W - 1, live, 0.0).to(tl.float32)
    for j in tl.static_range(L):
        value = tl.load(held + j, live, 0.0)
        if j >= L - (W - 1):
            tap = tl.load(weight + channel * W + j - (L - (W - 1)), live, 0.0)
            y += value.to(tl.float32) * tap.to(tl.float32)
        if j > 0:
            tl.store(held + j - 1, value, live)
    tl.store(held + L - 1, new.to(window.dtype.element_ty), live)
    if BIAS:
        y += tl.load(bias + channel, live, 0.0).to(tl.float32)
    y = tl.where(live, y / (1.0 + tl.exp(-y)), 0.0)
    tl.store(out + batch * C + channel, y.to(out.dtype.element_ty), inside)


def conv_step(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """One launch; arguments and result as `conv_reference`.

    Raises:
        NumericError: shapes that do not fit, or a window whose channels are not contiguous.
    """
    batch, channels = x.shape
    length, taps = window.shape[-1], weight.shape[-1]
    rows = batch if slots is None else window.shape[0]
    fits = window.shape[:2] == (rows, channels) and weight.shape[0] == channels
    if not fits or length < taps - 1:
        raise NumericError(
            f"a convolution of {list(x.shape)} with window {list(window.shape)} and weight "
            f"{list(weight.shape)}"
        )
    if window.stride(2) != 1 or window.stride(1) != length or not weight.is_contiguous():
        raise NumericError("a convolution needs contiguous windows and weights")
    out = torch.empty((batch, channels), dtype=x.dtype, device=x.device)
    conv_kernel[(batch, triton.cdiv(channels, CHANNELS))](
        x, window, weight, weight if bias is None else bias, x if slots is None else slots, out,
        x.stride(0), x.stride(1), window.stride(0), channels,
        length, taps, bias is not None, slots is not None, CHANNELS, num_warps=4,
    )  # fmt: skip
    return out


def gated_reference(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """The torch twin of `gated`."""
    wide = gate.float()
    share = wide * wide.sigmoid() if activation == "silu" else wide.sigmoid()
    return (x.float() * share).to(x.dtype)


@triton.jit
def gated_kernel(
    x, gate, out, x_row, gate_row, D: tl.constexpr, SILU: tl.constexpr, BD: tl.constexpr
):
    """Grid: (rows, D / BD)."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BD + tl.arange(0, BD)
    live = col < D
    value = tl.load(x + row * x_row + col, live, 0.0).to(tl.float32)
    z = tl.load(gate + row * gate_row + col, live, 0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-z))
    if SILU:
        share *= z
    tl.store(out + row * D + col, (value * share).to(out.dtype.element_ty), live)


def gated(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """x times an activation of the gate, in float32, one launch.

    Args:
        x, gate: `[T, D]`, columns contiguous; rows may lie apart.
        activation: `silu` or `sigmoid`.

    Raises:
        NumericError: another activation, shapes that differ, or strided columns.
    """
    if ACTIVATIONS.get(activation, 0) == 0:
        raise NumericError(f"a gate takes silu or sigmoid, found {activation!r}")
    if x.shape != gate.shape or x.stride(1) != 1 or gate.stride(1) != 1:
        raise NumericError(f"a product of {list(x.shape)} with a gate {list(gate.shape)}")
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    gated_kernel[(rows, triton.cdiv(width, block))](
        x, gate, out, x.stride(0), gate.stride(0), width, activation == "silu", block, num_warps=4
    )
    return out
