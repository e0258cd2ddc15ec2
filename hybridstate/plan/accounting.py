"""Bytes of a checkpoint, dense and compressed (DASC 4.1 and C.1); integers throughout.

A checkpoint holds the FP32 temporal state `[H, K, V]` of every linear layer and the BF16 window of
its short convolution, `conv_width - 1` columns. Only the temporal state is compressed:

    ragged   exactly the retained units of each layer
    padded   as many units per layer as the fullest layer retains, R_max
"""

from dataclasses import dataclass
from typing import Any, Final

from hybridstate.defaults import GROUP, K_HI_SHARE
from hybridstate.errors import PlanMismatch
from hybridstate.families import ModelSpec
from hybridstate.plan.select import Selection

TEMPORAL_BYTES: Final = 4
"""FP32 temporal state."""

CONV_BYTES: Final = 2
"""BF16 convolution state."""

_POOL_ALIGNMENT: Final = 16
"""Heads of a packed pool start at multiples of this, as in `kernels.layout`."""


@dataclass(frozen=True, slots=True)
class Accounting:
    """Bytes of one checkpoint at one cutoff.

    Attributes:
        temporal_dense_bytes: all units.
        temporal_ragged_bytes: retained units.
        temporal_padded_bytes: R_max units in every layer.
        conv_bytes: convolution windows, never compressed.
    """

    temporal_dense_bytes: int
    temporal_ragged_bytes: int
    temporal_padded_bytes: int
    conv_bytes: int

    @property
    def dense_bytes(self) -> int:
        """The whole dense checkpoint."""
        return self.temporal_dense_bytes + self.conv_bytes

    @property
    def ragged_bytes(self) -> int:
        """The whole ragged checkpoint."""
        return self.temporal_ragged_bytes + self.conv_bytes

    @property
    def padded_bytes(self) -> int:
        """The whole padded checkpoint."""
        return self.temporal_padded_bytes + self.conv_bytes

    @property
    def ratio_temporal_ragged(self) -> float | None:
        """C_temp: dense over ragged temporal bytes, None where nothing is retained."""
        return _ratio(self.temporal_dense_bytes, self.temporal_ragged_bytes)

    @property
    def ratio_temporal_padded(self) -> float | None:
        """Dense over padded temporal bytes, None where nothing is retained."""
        return _ratio(self.temporal_dense_bytes, self.temporal_padded_bytes)

    @property
    def ratio_full_ragged(self) -> float | None:
        """C_ckpt: dense over ragged bytes with the convolution state."""
        return _ratio(self.dense_bytes, self.ragged_bytes)

    @property
    def ratio_full_padded(self) -> float | None:
        """Dense over padded bytes with the convolution state."""
        return _ratio(self.dense_bytes, self.padded_bytes)

    @property
    def ratio_full_limit(self) -> float | None:
        """C_ckpt if nothing were retained: what the convolution state alone allows."""
        return _ratio(self.dense_bytes, self.conv_bytes)

    @property
    def layout_gain(self) -> float | None:
        """R_max over mean r: padded over ragged temporal bytes, None where nothing is retained."""
        return _ratio(self.temporal_padded_bytes, self.temporal_ragged_bytes)

    def to_json(self) -> dict[str, Any]:
        """Bytes as integers, ratios as numbers or null."""
        names = (
            "temporal_dense_bytes",
            "temporal_ragged_bytes",
            "temporal_padded_bytes",
            "conv_bytes",
            "dense_bytes",
            "ragged_bytes",
            "padded_bytes",
            "ratio_temporal_ragged",
            "ratio_temporal_padded",
            "ratio_full_ragged",
            "ratio_full_padded",
            "ratio_full_limit",
            "layout_gain",
        )
        return {name: getattr(self, name) for name in names}


def account(spec: ModelSpec, selection: Selection) -> Accounting:
    """Bytes of one checkpoint of this model under this selection.

    Raises:
        PlanMismatch: the selection's layers or units are not the model's.
    """
    units = tuple(spec.units(layer) for layer in spec.layers)
    if selection.units != units:
        raise PlanMismatch(
            f"the selection covers {list(selection.units)} units per layer, {spec.name} has "
            f"{list(units)}",
            found=list(selection.units),
            expected=list(units),
        )
    unit_bytes = [spec.unit_values(layer) * TEMPORAL_BYTES for layer in spec.layers]
    counts = selection.counts
    fullest = max(counts, default=0)
    return Accounting(
        temporal_dense_bytes=sum(n * b for n, b in zip(units, unit_bytes, strict=True)),
        temporal_ragged_bytes=sum(r * b for r, b in zip(counts, unit_bytes, strict=True)),
        temporal_padded_bytes=sum(fullest * b for b in unit_bytes),
        conv_bytes=conv_bytes(spec),
    )


def conv_bytes(spec: ModelSpec) -> int:
    """BF16 bytes of the convolution windows of all linear layers, `conv_width - 1` columns each."""
    return sum(layer.conv_channels * (layer.conv_width - 1) * CONV_BYTES for layer in spec.layers)


def temporal_bytes(spec: ModelSpec) -> int:
    """FP32 bytes of the temporal state of all linear layers."""
    return sum(
        spec.units(layer) * spec.unit_values(layer) * TEMPORAL_BYTES for layer in spec.layers
    )


def packed_bits(key_dim: int, k_hi: int, group: int = GROUP, value_dim: int | None = None) -> float:
    """Bits per state value with `k_hi` FP16 key channels and the rest INT8 (DAMP 6.1): 9.875 at 16/128.

    Args:
        key_dim: K.
        k_hi: protected channels, 0 to K.
        group: values along V that share one FP32 scale.
        value_dim: V, if the last group may be short; None counts `32 / group` bits for scales.

    Raises:
        PlanMismatch: k_hi outside 0 to K.
    """
    if not 0 <= k_hi <= key_dim:
        raise PlanMismatch(f"K_hi must lie in 0..{key_dim}, found {k_hi}", found=k_hi)
    scale_bits = 32 / group if value_dim is None else 32 * -(-value_dim // group) / value_dim
    return (16 * k_hi + (8 + scale_bits) * (key_dim - k_hi)) / key_dim


def default_k_hi(key_dim: int) -> int:
    """FP16 key channels where no calibration says otherwise: 16 of 128, in steps of 16."""
    return min(key_dim, 16 * max(1, round(K_HI_SHARE * key_dim / 16)))


def packed_head_bytes(key_dim: int, value_dim: int, k_hi: int, group: int = GROUP) -> int:
    """Bytes of one packed head in a pool: FP16 rows, INT8 rows, FP32 scales, rounded up to 16."""
    scales = -(-value_dim // group)
    payload = 2 * k_hi * value_dim + (key_dim - k_hi) * (value_dim + 4 * scales)
    return -(-payload // _POOL_ALIGNMENT) * _POOL_ALIGNMENT


def _ratio(whole: int, part: int) -> float | None:
    return whole / part if part else None
