"""What a linear layer does to a prompt between its projection and the recurrence, in two launches.

    convolve:  y_t = silu( b + sum_j W_j x_{t - W + 1 + j} ), tokens before the first from the window
    gates:     log decay and strength from their raw projections (`kernels.fusion`)

`kernels.norms.conv_step` and the update's fused gates do the same for one token.

A captured prompt has a fixed number of tokens, of which the first `count` are its own: the window is the one behind
them, and the others have decay one and strength zero, so that they leave the state as it is.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridstate.errors import NumericError
from hybridstate.kernels.fusion import GATE_GIVEN, StepFusion
from hybridstate.kernels.triton_update import _log_decay, _strength

BLOCK: Final = (16, 128)
"""Tokens and channels of one program."""


def convolve_reference(
    x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The torch twin: a depthwise causal convolution with SiLU over the tokens of one sequence.

    Args:
        x: `[T, C]`, columns contiguous; rows may lie apart.
        window: `[C, W - 1]`, the tokens before, oldest first.
        weight: `[C, W]`.
        bias: `[C]` or None.
        count: int64 `[1]`, tokens before the window that is returned; all of them by default.

    Returns:
        y `[T, C]` in the dtype of `x`, and the window behind the last token that counts, in its own.
    """
    joined = torch.cat([window.to(x.dtype).T, x])  # [W - 1 + T, C]
    taps = weight.shape[1]
    rows = joined.float().unfold(0, taps, 1)  # [T, C, W]
    y = (rows * weight.float()).sum(-1)
    y = y if bias is None else y + bias.float()
    end = torch.tensor([len(x)], device=x.device) if count is None else count
    after = joined[end + torch.arange(taps - 1, device=x.device)]
    return torch.nn.functional.silu(y).to(x.dtype), after.T.to(window.dtype).contiguous()


@triton.jit(do_not_specialize=["T"])
def convolve_kernel(
    x, window, weight, bias, count, out, after, x_row, T, channels,
    W: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid: (T / BT, C / BC); the first programs write the window behind the last token that counts."""
    token = (tl.program_id(0) * BT + tl.arange(0, BT))[:, None]
    channel = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    inside = channel < channels
    live = inside & (token < T)
    y = tl.zeros([BT, BC], tl.float32)
    for j in tl.static_range(W):
        from_token = token + j - (W - 1)
        here = live & (from_token >= 0)
        value = tl.load(x + from_token.to(tl.int64) * x_row + channel, here, 0.0).to(tl.float32)
        if j < W - 1:
            before = live & (from_token < 0)
            old = tl.load(window + channel * (W - 1) + from_token + W - 1, before, 0.0)
            value += old.to(x.dtype.element_ty).to(tl.float32)
        y += value * tl.load(weight + channel * W + j, inside, 0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + channel, inside, 0.0).to(tl.float32)
    y = y / (1.0 + tl.exp(-y))
    tl.store(out + token.to(tl.int64) * channels + channel, y.to(out.dtype.element_ty), live)
    if tl.program_id(0) == 0:
        end = tl.load(count).to(tl.int32) if COUNTED else T
        for j in tl.static_range(W - 1):
            last = end - (W - 1) + j
            new = tl.load(x + last.to(tl.int64) * x_row + channel, inside & (last >= 0), 0.0)
            past = tl.load(window + channel * (W - 1) + last + W - 1, inside & (last < 0), 0.0)
            kept = new.to(after.dtype.element_ty) + past.to(after.dtype.element_ty)
            tl.store(after + channel * (W - 1) + j, kept, inside)


def convolve(
    x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One launch; arguments and results as `convolve_reference`.

    Raises:
        NumericError: shapes that do not fit, or strided columns.
    """
    tokens, channels = x.shape
    taps = weight.shape[1]
    if window.shape != (channels, taps - 1) or weight.shape[0] != channels:
        raise NumericError(
            f"a convolution of {list(x.shape)} with window {list(window.shape)} and weight {list(weight.shape)}"
        )
    if x.stride(1) != 1 or not window.is_contiguous() or not weight.is_contiguous():
        raise NumericError("a convolution needs contiguous columns, windows and weights")
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    after = torch.empty_like(window)
    rows, columns = BLOCK
    convolve_kernel[(triton.cdiv(tokens, rows), triton.cdiv(channels, columns))](
        x, window, weight, weight if bias is None else bias, weight if count is None else count, out, after,
        x.stride(0), tokens, channels, taps, bias is not None, count is not None, rows, columns, num_warps=4,
    )  # fmt: skip
    return out, after


def gates_reference(
    raw: Tensor, logit: Tensor, fusion: StepFusion, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The torch twin of `gates`."""
    assert fusion.dt_bias is not None, "raw gates come with their parameters"
    decay = raw.unflatten(1, tuple(fusion.dt_bias.shape))
    _, _, decay, strength = fusion.derive(logit, logit, decay, logit)
    if count is None:
        return decay, strength
    spare = torch.arange(len(logit), device=logit.device) >= count
    over = spare.view(-1, *(1,) * (decay.dim() - 1))
    return decay.masked_fill(over, 0.0), strength.masked_fill(spare[:, None], 0.0)


@triton.jit(do_not_specialize=["T"])
def gates_kernel(
    raw, logit, a_log, dt_bias, count, decay, strength, raw_row, logit_row, T, H, UNITS: tl.constexpr,
    GATE: tl.constexpr, LOWER: tl.constexpr, LOGIT: tl.constexpr, COUNTED: tl.constexpr,
    BT: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    """Grid: (T / BT, H); a program derives the UNITS decays and the strength of a head's tokens."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    unit = tl.arange(0, BU)
    live = token < T
    full = live[:, None] & (unit < UNITS)[None, :]
    spot = head * UNITS + unit
    x = tl.load(raw + token.to(tl.int64)[:, None] * raw_row + spot[None, :], full, 0.0).to(
        tl.float32
    )
    bias = tl.load(dt_bias + spot, unit < UNITS, 0.0)[None, :]
    g = _log_decay(x, tl.exp(tl.load(a_log + head)), bias, GATE, LOWER)
    counts = token < (tl.load(count).to(tl.int32) if COUNTED else T)
    g = tl.where(counts[:, None], g, 0.0)
    tl.store(decay + token.to(tl.int64)[:, None] * (H * UNITS) + spot[None, :], g, full)
    b = tl.load(logit + token.to(tl.int64) * logit_row + head, live, 0.0).to(tl.float32)
    strong = tl.where(counts, _strength(b, LOGIT), 0.0)
    tl.store(strength + token.to(tl.int64) * H + head, strong, live)


def gates(
    raw: Tensor, logit: Tensor, fusion: StepFusion, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One launch; log decay and strength as `StepFusion.derive` gives them, in float32.

    Args:
        raw: `[T, H]`, or `[T, H * K]` where decays are per key channel; columns contiguous.
        logit: `[T, H]`, likewise.
        fusion: with gate parameters and a scale of strengths.
        count: int64 `[1]`, tokens whose gates count; the others get log decay and strength zero. All by default.

    Returns:
        `[T, H]` or `[T, H, K]`, and `[T, H]`.

    Raises:
        NumericError: gates that are given already, or strided columns.
    """
    tokens, heads = logit.shape
    bias = fusion.dt_bias
    if fusion.gate == GATE_GIVEN or fusion.beta_scale is None or bias is None:
        raise NumericError("gates are derived from raw projections")
    if raw.stride(1) != 1 or logit.stride(1) != 1 or raw.shape != (tokens, bias.numel()):
        raise NumericError(f"gates of {list(raw.shape)} and {list(logit.shape)}")
    units = raw.shape[1] // heads
    decay = torch.empty((tokens, *bias.shape), dtype=torch.float32, device=raw.device)
    strength = torch.empty((tokens, heads), dtype=torch.float32, device=raw.device)
    rows, padded = (8 if units > 1 else 128), triton.next_power_of_2(units)
    constants: dict[str, Any] = {
        "UNITS": units, "GATE": fusion.gate, "LOWER": fusion.lower_bound or 0.0, "LOGIT": fusion.beta_scale,
        "COUNTED": count is not None, "BT": rows, "BU": padded,
    }  # fmt: skip
    gates_kernel[(triton.cdiv(tokens, rows), heads)](
        raw, logit, fusion.a_log, bias, bias if count is None else count, decay, strength, raw.stride(0),
        logit.stride(0), tokens, heads, **constants, num_warps=4,
    )  # fmt: skip
    return decay, strength
