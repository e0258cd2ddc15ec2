"""What a stored state reads back as, by format (DAMP A.1), and the arms that a validation compares.

A `Format` is one way of storing a whole state `[..., K, V]`. An `Arm` is what a server would run: one format
for every key channel, or a high format for the protected channels of each head and a low one for the rest.
New formats are new entries of `FORMATS`; names say what they are (`int8-step` is requantised at every
update, unlike the INT8 of a checkpoint).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch

from hybridstate.defaults import FP16_MAX, GROUP
from hybridstate.errors import UsageError
from hybridstate.kernels import reference


@dataclass(frozen=True, slots=True)
class Format:
    """One storage format.

    Attributes:
        name: as printed and stored in files.
        bits: bits per value of a row of `value_dim` values, scales included.
        reconstruct: `[..., V]` to what storage returns, same shape and dtype.
    """

    name: str
    bits: Callable[[int], float]
    reconstruct: Callable[[torch.Tensor], torch.Tensor]


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


def _int8_bits(value_dim: int) -> float:
    return 8 + 32 * -(-value_dim // GROUP) / value_dim


FORMATS: Final = MappingProxyType(
    {
        format.name: format
        for format in (
            Format("fp32", lambda _: 32.0, _as_stored),
            Format("fp16", lambda _: 16.0, _fp16),
            Format("bf16", lambda _: 16.0, _bf16),
            Format("int8-step", _int8_bits, _int8),
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


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of storing every layer's state.

    Attributes:
        name: as printed.
        low: format of all key channels, or of those that are not protected.
        protected: per linear layer the channels `[H, k_hi]` (int64) that are stored as `high`.
        high: their format.
    """

    name: str
    low: Format
    protected: tuple[torch.Tensor, ...] | None = None
    high: Format = FORMATS["fp16"]

    def to(self, device: torch.device) -> "Arm":
        """The arm with its channels on a device, so that no update copies them."""
        if self.protected is None:
            return self
        return replace(self, protected=tuple(channels.to(device) for channels in self.protected))

    def reconstruct(self, state: torch.Tensor, ordinal: int) -> torch.Tensor:
        """What storage returns for one layer's state `[B, H, K, V]`."""
        stored = self.low.reconstruct(state)
        if self.protected is None or self.protected[ordinal].shape[1] == 0:
            return stored
        channels = self.protected[ordinal].to(state.device)[None, :, :, None]
        index = channels.expand(state.shape[0], -1, -1, state.shape[3])
        rows = self.high.reconstruct(state.gather(2, index))
        return stored.scatter(2, index, rows)

    def bits(self, key_dim: int, value_dim: int) -> float:
        """Bits per state value, scales included, static orders and factors not."""
        low = self.low.bits(value_dim)
        if self.protected is None:
            return low
        k_hi = self.protected[0].shape[1]
        return (k_hi * self.high.bits(value_dim) + (key_dim - k_hi) * low) / key_dim

    def saturated(self, state: torch.Tensor, ordinal: int) -> int:
        """Values of a state beyond FP16, where this arm stores FP16."""
        fp16 = FORMATS["fp16"]
        beyond = state.abs() > FP16_MAX
        if self.low is fp16:
            return int(beyond.sum())
        if self.protected is None or self.high is not fp16:
            return 0
        channels = self.protected[ordinal].to(state.device)[None, :, :, None]
        index = channels.expand(state.shape[0], -1, -1, state.shape[3])
        return int(beyond.gather(2, index).sum())


def plain_arm(name: str) -> Arm:
    """The arm that stores everything in one format."""
    return Arm(name, format_named(name))
