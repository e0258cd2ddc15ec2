"""What every arm stores in one layer: channels by its selector, values by the candidate of least J.

Channels of plain INT8 arms come from scores that the run has anyway; other low formats and value maps need
the errors of `scaling.table`, made once per format and shared by the arms of that layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from hybridstate.families import LinearLayer
from hybridstate.quant.arms import Arm, ValueMap
from hybridstate.quant.catalogue import ArmName
from hybridstate.quant.formats import FORMATS
from hybridstate.quant.risk import F64, I16, protect, protect_random
from hybridstate.quant.scaling import (
    CANDIDATES,
    Anchors,
    Table,
    choose,
    chosen_map,
    table,
    value_maps,
    value_rms,
)


@dataclass(frozen=True, slots=True)
class Stored:
    """One arm in one layer; None where the arm has no such thing.

    Attributes:
        protected: `[H, k_hi]` key channels in FP16.
        values: scaling and order of every head.
        candidate: `[H]` which of `scaling.CANDIDATES` that is.
    """

    protected: I16 | None = None
    values: ValueMap | None = None
    candidate: I16 | None = None


@dataclass(slots=True)
class LayerSelection:
    """Selections of one layer.

    Attributes:
        layer: its geometry.
        fit, tune: anchors of the two splits.
        scores: selector name to `[H, K]` on the fitting split, for INT8 without value maps.
        k_hi: protected channels where a name gives no number.
        seed: of random channels.
        device: where errors are computed.
    """

    layer: LinearLayer
    fit: Anchors
    tune: Anchors
    scores: Mapping[str, F64]
    k_hi: int
    seed: int
    device: torch.device
    _tables: dict[tuple[str, bool], Table] = field(default_factory=dict)
    _maps: tuple[ValueMap, ...] | None = None

    def stored(self, name: ArmName) -> Stored:
        """What an arm stores."""
        k_hi = 0 if name.selector is None else self.k_hi if name.k_hi is None else name.k_hi
        if name.selector is None and not name.reorder:
            return Stored()
        if name.selector == "random":
            shape = (self.layer.value_heads, self.layer.key_dim)
            drawn = protect_random(
                shape, k_hi, self.layer.key_heads, (self.seed, self.layer.ordinal)
            )
            if not name.reorder:
                return Stored(drawn)
            fixed = np.zeros(shape)
            np.put_along_axis(fixed, drawn.astype(np.int64), 1.0, axis=1)
            return self._chosen(name, np.tile(fixed, (len(CANDIDATES), 1, 1)), k_hi)
        own = name.low is FORMATS["int8-step"] or name.selector not in ("damp", "error-only")
        if not name.reorder and own:
            heads = self.layer.key_heads if name.shared else self.layer.value_heads
            return Stored(protect(self.scores[name.selector or "damp"], k_hi, heads))
        found = self.table(name.low.name, reorder=name.reorder)
        if name.selector in (None, "damp"):
            scores = found.risk
        elif name.selector == "error-only":
            scores = found.error
        else:
            scores = np.broadcast_to(self.scores[name.selector], found.risk.shape)
        return self._chosen(name, scores, k_hi)

    def _chosen(self, name: ArmName, scores: F64, k_hi: int) -> Stored:
        found = self.table(name.low.name, reorder=name.reorder)
        made = choose(found, scores, k_hi, self.layer.key_heads, shared=name.shared)
        protected = None if name.selector is None else made.protected
        if not name.reorder:
            return Stored(protected)
        return Stored(protected, chosen_map(self.maps(), made.candidate), made.candidate)

    def table(self, low: str, *, reorder: bool) -> Table:
        """Errors of one low format with all value maps, or with none; computed once."""
        key = (low, reorder)
        if key not in self._tables:
            maps = self.maps() if reorder else None
            self._tables[key] = table(self.fit, self.tune, FORMATS[low], maps, device=self.device)
        return self._tables[key]

    def maps(self) -> tuple[ValueMap, ...]:
        """The candidates' maps of this layer."""
        if self._maps is None:
            self._maps = value_maps(value_rms(self.fit))
        return self._maps


def build_arm(name: ArmName, layers: list[Stored], seed: int) -> Arm:
    """One arm over all layers."""
    protected = [s.protected for s in layers if s.protected is not None]
    values = [s.values for s in layers if s.values is not None]
    return Arm(
        name.name,
        name.low,
        tuple(torch.from_numpy(p.astype(np.int64)) for p in protected) or None,
        values=tuple(values) or None,
        every=name.every,
        feedback=name.feedback,
        seed=seed,
    )


def refusal(name: ArmName, layers: tuple[LinearLayer, ...], *, per_channel: bool) -> str | None:
    """Why an arm means nothing for a model; None if it does."""
    if name.selector == "retention-only" and not per_channel:
        return "one decay per head gives all its key channels the same score"
    if not name.shared and all(layer.key_heads == layer.value_heads for layer in layers):
        return "every key head has one value head, so it equals the shared order"
    return None


def concentration(error: F64, share: float = 0.125) -> tuple[float, float]:
    """Share of squared error `[H, K]` in the `share` of channels with most of it (DAMP Finding 1).

    Returns:
        the mean over heads that have any error, and pooled over heads.
    """
    count = max(1, round(share * error.shape[1]))
    top = np.sort(error, axis=1)[:, -count:].sum(1)
    total = error.sum(1)
    some = total > 0
    if not some.any():
        return 0.0, 0.0
    return float((top[some] / total[some]).mean()), float(top.sum() / total.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """The head of a layer whose INT8 error is the most concentrated, for pictures.

    Attributes:
        head: its number.
        magnitude: `[K, V]` root mean square of its state over the fitting anchors.
    """

    head: int
    magnitude: F64


def example_head(error: F64, states: torch.Tensor, share: float = 0.125) -> Example:
    """Of squared error `[H, K]` and fitting anchors `[N, H, K, V]`; the first of equal heads."""
    count = max(1, round(share * error.shape[1]))
    total = np.maximum(error.sum(1), np.finfo(np.float64).tiny)
    head = int((np.sort(error, axis=1)[:, -count:].sum(1) / total).argmax())
    magnitude: F64 = states[:, head].to(torch.float64).square().mean(0).sqrt().numpy()
    return Example(head, magnitude)
