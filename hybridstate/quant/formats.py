"""What a stored state reads back as, by format (DAMP A.1).

A `Format` is one way of storing a whole state `[..., K, V]`; `quant.arms` mixes formats by channel and says
when they are applied. New formats are new entries of `FORMATS`; names say what they are (`int8-step` is
requantised at every update, unlike the INT8 of a checkpoint).
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from hybridstate.defaults import FP16_MAX, GROUP
from hybridstate.errors import UsageError
from hybridstate.kernels import reference

E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0
NVFP4_BLOCK: Final = 16
"""Values along V that share one E4M3 scale in NVFP4."""


@dataclass(frozen=True, slots=True)
class Format:
    """One storage format.

    Attributes:
        name: as printed and stored in files.
        bits: bits per value of a row of `value_dim` values, scales and zero points included.
        reconstruct: `[..., K, V]` to what storage returns, same shape and dtype.
        stochastic: the same with a uniform number in [0, 1) per value, where rounding is random.
        whole_state: a scale spans all key channels, so a row's result depends on the other rows.
    """

    name: str
    bits: Callable[[int], float]
    reconstruct: Callable[[torch.Tensor], torch.Tensor]
    stochastic: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    whole_state: bool = False


def _as_stored(x: torch.Tensor) -> torch.Tensor:
    return x


def _fp16(x: torch.Tensor) -> torch.Tensor:
    """Half precision; saturates, as the kernel does, where a plain cast would give infinity."""
    return x.clamp(-FP16_MAX, FP16_MAX).to(torch.float16).to(x.dtype)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def _int8(x: torch.Tensor) -> torch.Tensor:
    """Symmetric INT8 in groups of 32 along V (DAMP Eq. 5-6): what packing and unpacking return."""
    codes, scales = reference.quantise_groups(x, check=False)
    return reference.dequantise_groups(codes, scales).to(x.dtype)


def _int8_stochastic(x: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`_int8` with code = floor(x / s + u): unbiased, at up to twice the error of one rounding."""
    groups = grouped(x, GROUP)
    scale = reference.quotient(groups.abs().amax(-1, keepdim=True), 127.0).to(torch.float32)
    draws = grouped(uniform, GROUP).to(x.dtype)
    codes = torch.floor(groups / _divisor(scale, x.dtype) + draws).clamp_(-127, 127)
    return _ungrouped(codes.to(torch.float32) * scale, x)


def _int8_halves(x: torch.Tensor) -> torch.Tensor:
    """Stochastic INT8 where nobody draws: u = 1/2, rounding to nearest with ties upwards."""
    return _int8_stochastic(x, torch.full_like(x, 0.5))


def _fp8(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with one FP32 scale, max|x| / 448, per 32 values along V; no zero point."""
    groups = grouped(x, GROUP)
    scale = reference.quotient(groups.abs().amax(-1, keepdim=True), E4M3_MAX).to(torch.float32)
    codes = _e4m3(groups / _divisor(scale, x.dtype))
    return _ungrouped(codes * scale, x)


def _int4(x: torch.Tensor) -> torch.Tensor:
    """Asymmetric INT4 in groups of 32: x = q s + z, z = min, s = (max - min) / 15, both FP32.

    A constant group has s = 0 and comes back as its zero point.
    """
    groups = grouped(x, GROUP, fill_edge=True)
    zero = groups.amin(-1, keepdim=True).to(torch.float32)
    scale = reference.quotient(groups.amax(-1, keepdim=True) - zero, 15.0).to(torch.float32)
    codes = ((groups - zero) / _divisor(scale, x.dtype)).round().clamp_(0, 15)
    return _ungrouped(codes.to(torch.float32) * scale + zero, x)


def _nvfp4(x: torch.Tensor) -> torch.Tensor:
    """E2M1 in blocks of 16 along V, an E4M3 scale per block, one FP32 scale per state `[K, V]`.

    The global scale maps the largest block scale onto E4M3's largest value:
    global = max|S| / (6 * 448), block = E4M3(max|block| / 6 / global).
    """
    blocks = grouped(x, NVFP4_BLOCK)
    peak = blocks.abs().amax((-3, -2, -1), keepdim=True)
    overall = reference.quotient(peak, E2M1_MAX * E4M3_MAX).to(torch.float32)
    relative = reference.quotient(blocks.abs().amax(-1, keepdim=True), E2M1_MAX)
    relative = relative / _divisor(overall, x.dtype)
    scale = _e4m3(relative) * overall
    return _ungrouped(_e2m1(blocks / _divisor(scale, x.dtype)) * scale, x)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 (nearest, ties to even, saturating), in float32."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to 0, 0.5, 1, 1.5, 2, 3, 4, 6 with sign (nearest, ties to even, saturating), float32."""
    size = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x.dtype)
    return (torch.sign(x) * (size / step).round() * step).to(torch.float32)


def grouped(x: torch.Tensor, group: int, *, fill_edge: bool = False) -> torch.Tensor:
    """`[..., V]` to `[..., ceil(V / group), group]`, the last one filled with zeros or its last value."""
    missing = -x.shape[-1] % group
    if missing:
        edge = x[..., -1:] if fill_edge else torch.zeros_like(x[..., -1:])
        x = torch.cat([x, edge.expand(*x.shape[:-1], missing)], -1)
    groups: torch.Tensor = x.unflatten(-1, (-1, group))
    return groups


def _ungrouped(groups: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return groups.flatten(-2)[..., : like.shape[-1]].to(like.dtype)


def _divisor(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A scale to divide by: 1 where it is 0, since all codes are 0 there anyway."""
    return torch.where(scale > 0, scale, torch.ones_like(scale)).to(dtype)


def _per_group(bits: float, parameters: int) -> Callable[[int], float]:
    """Bits of a value with so many FP32 parameters per group of 32."""
    return lambda value_dim: bits + 32 * parameters * -(-value_dim // GROUP) / value_dim


def _nvfp4_bits(value_dim: int) -> float:
    """4.5 at multiples of 16; the one FP32 scale of a whole state (0.002 at 128 x 128) is left out."""
    return 4 + 8 * -(-value_dim // NVFP4_BLOCK) / value_dim


FORMATS: Final = MappingProxyType(
    {
        format.name: format
        for format in (
            Format("fp32", lambda _: 32.0, _as_stored),
            Format("fp16", lambda _: 16.0, _fp16),
            Format("bf16", lambda _: 16.0, _bf16),
            Format("int8-step", _per_group(8, 1), _int8),
            Format("int8-step-stochastic", _per_group(8, 1), _int8_halves, _int8_stochastic),
            Format("fp8", _per_group(8, 1), _fp8),
            Format("int4", _per_group(4, 2), _int4),
            Format("nvfp4", _nvfp4_bits, _nvfp4, whole_state=True),
        )
    }
)


def format_named(name: str) -> Format:
    """A registered format.

    Raises:
        UsageError: unknown name.
    """
    if name not in FORMATS:
        raise UsageError(f"no storage format {name!r}", hint=f"one of {', '.join(FORMATS)}")
    return FORMATS[name]
