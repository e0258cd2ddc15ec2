"""Arms: what a server would run. Formats by key channel, in which coordinates, and when they are applied.

An arm stores every key channel in one format, or the protected channels of each head in a high format and
the rest in a low one; optionally in scaled and reordered value coordinates (DAMP A.3), only at every L-th
update, or with the rounding error carried over to the next write.
"""

from dataclasses import dataclass, replace

import torch

from hybridstate.defaults import FP16_MAX, GROUP
from hybridstate.families import LinearLayer
from hybridstate.quant.formats import FORMATS, Format, format_named, grouped
from hybridstate.quant.ring import ring_bits
from hybridstate.quant.rounding import uniform

RESIDUAL_BITS = {"fp16": 16.0, "int4": 4.0}
"""Bits per value of a carried residual; INT4 takes its scale from the INT8 scale and stores none."""


@dataclass(frozen=True, slots=True)
class ValueMap:
    """Value scaling and reordering of one layer: stored T = P_V D_c^-1 of every row (DAMP Eq. 17).

    Attributes:
        scale: `[H, V]` float32, c by value dimension of the model.
        order: `[H, V]` int64; stored column j holds value dimension `order[h, j]`.
    """

    scale: torch.Tensor
    order: torch.Tensor

    def to(self, device: torch.device) -> "ValueMap":
        """On a device."""
        return ValueMap(self.scale.to(device), self.order.to(device))

    def stored(self, state: torch.Tensor) -> torch.Tensor:
        """`[B, H, K, V]` in stored coordinates."""
        scaled = state / self.scale.to(state.dtype)[None, :, None, :]
        return scaled.gather(3, self.order[None, :, None, :].expand_as(state))

    def original(self, stored: torch.Tensor) -> torch.Tensor:
        """Back to the model's coordinates."""
        index = self.order[None, :, None, :].expand_as(stored)
        state = torch.empty_like(stored).scatter_(3, index, stored)
        return state * self.scale.to(state.dtype)[None, :, None, :]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of storing every layer's state.

    Attributes:
        name: as printed.
        low: format of all key channels, or of those that are not protected.
        protected: per linear layer the channels `[H, k_hi]` (int64) that are stored as `high`.
        high: their format.
        values: per linear layer the value scaling and order; None stores the model's coordinates.
        every: updates between two writes; between them the state is rebuilt from its recent inputs.
        feedback: `fp16` or `int4` residual added to the next write; None carries nothing.
        seed: of stochastic rounding.
    """

    name: str
    low: Format
    protected: tuple[torch.Tensor, ...] | None = None
    high: Format = FORMATS["fp16"]
    values: tuple[ValueMap, ...] | None = None
    every: int = 1
    feedback: str | None = None
    seed: int = 0

    def to(self, device: torch.device) -> "Arm":
        """The arm with its channels on a device, so that no update copies them."""
        return replace(
            self,
            protected=self.protected and tuple(c.to(device) for c in self.protected),
            values=self.values and tuple(v.to(device) for v in self.values),
        )

    @property
    def exact(self) -> bool:
        """Whether storage returns what it was given."""
        return self.low is FORMATS["fp32"] and self.protected is None

    def reconstruct(
        self,
        state: torch.Tensor,
        ordinal: int,
        update: int | torch.Tensor = 0,
        sequences: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What storage returns for one layer's state `[B, H, K, V]`.

        `update` and `sequences [B]` say which random numbers a stochastic format draws.
        """
        values = None if self.values is None else self.values[ordinal]
        inside = state if values is None else values.stored(state)
        index = self._rows(inside, ordinal)
        rest = inside
        if index is not None and self.low.whole_state:
            rest = inside.scatter(2, index, 0.0)  # a shared scale spans low rows only
        if self.low.stochastic is None:
            stored = self.low.reconstruct(rest)
        else:
            rows = torch.arange(state.shape[0]) if sequences is None else sequences
            draws = uniform(rest.shape, rows, (self.seed, ordinal, update), rest.device)
            stored = self.low.stochastic(rest, draws)
        if index is not None:
            stored = stored.scatter(2, index, self.high.reconstruct(inside.gather(2, index)))
        return stored if values is None else values.original(stored)

    def _rows(self, state: torch.Tensor, ordinal: int) -> torch.Tensor | None:
        """Index of the protected rows `[B, H, k_hi, V]` for gather and scatter."""
        if self.protected is None or self.protected[ordinal].shape[1] == 0:
            return None
        channels = self.protected[ordinal].to(state.device)[None, :, :, None]
        return channels.expand(state.shape[0], -1, -1, state.shape[3])

    def residual(self, state: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """What is carried to the next write: the rounding error, in the residual's own format.

        INT4 codes are -7 to 7 of half an INT8 step, whose scale the payload already stores.
        """
        error = state - stored
        if self.feedback == "fp16":
            return FORMATS["fp16"].reconstruct(error)
        half = grouped(state, GROUP).abs().amax(-1, keepdim=True) / 254.0
        step = torch.where(half > 0, half, torch.ones_like(half)) / 7.0
        codes = (grouped(error, GROUP) / step).round().clamp_(-7, 7)
        return (codes * step).flatten(-2)[..., : state.shape[-1]]

    def bits(self, key_dim: int, value_dim: int) -> float:
        """Bits per state value, scales and residuals included; static orders and factors, ring not."""
        low = self.low.bits(value_dim)
        if self.feedback is not None:
            low += RESIDUAL_BITS[self.feedback]
        if self.protected is None:
            return low
        k_hi = self.protected[0].shape[1]
        return (k_hi * self.high.bits(value_dim) + (key_dim - k_hi) * low) / key_dim

    def ring_bits(self, layer: LinearLayer, *, per_channel: bool) -> float:
        """Bits per state value of the inputs kept between two writes, 0 where every update writes."""
        return ring_bits(layer, self.every, per_channel=per_channel)

    def saturated(self, state: torch.Tensor, ordinal: int) -> int:
        """Values of a state beyond FP16, where this arm stores FP16."""
        fp16 = FORMATS["fp16"]
        inside = state if self.values is None else self.values[ordinal].stored(state)
        if self.low is fp16:
            return int((inside.abs() > FP16_MAX).sum())
        index = self._rows(inside, ordinal)
        if index is None or self.high is not fp16:
            return 0
        return int((inside.gather(2, index).abs() > FP16_MAX).sum())


def plain_arm(name: str) -> Arm:
    """The arm that stores everything in one format."""
    return Arm(name, format_named(name))
