"""Horizons as observed on real text, and how far the static ones agree with them (DASC Eq. 4, 5; 3.4).

Arrays are per linear layer: `[P, H]` (GDN, a unit is a value head) or `[P, H, K]` (KDA, a unit is a
key channel of a head) over P prefixes. Rank correlations are taken per prefix and layer, never pooled.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridstate.errors import NumericError

F64 = NDArray[np.float64]


def observed_horizons(mean_log_decay: F64, epsilon: float) -> F64:
    """H_e = ln(epsilon) / mean g of Eq. 4; infinite where no decay was seen.

    Raises:
        NumericError: a mean is NaN or above zero.
    """
    bad = np.argwhere(~(mean_log_decay <= 0))
    if len(bad):
        index = bad[0].tolist()
        raise NumericError(
            f"mean log-decay at {index} is {mean_log_decay[tuple(index)]}, expected at most 0",
            index=index,
            found=str(mean_log_decay[tuple(index)]),
            expected="at most 0",
        )
    with np.errstate(divide="ignore"):
        return np.asarray(
            math.log(epsilon) / np.where(mean_log_decay == 0, -0.0, mean_log_decay), np.float64
        )


def state_magnitude(states: NDArray[np.floating[Any]], unit: str) -> F64:
    """M_S of Eq. 5 from `[..., H, K, V]`: Frobenius norm per head, or norm of each key row."""
    squared = np.square(states.astype(np.float64)).sum(-1)
    return np.asarray(np.sqrt(squared.sum(-1) if unit == "head" else squared), np.float64)


def rank_correlation(x: F64, y: F64) -> float | None:
    """Spearman's rho over all units, average ranks; None where one side is constant."""
    from scipy.stats import rankdata

    a, b = (rankdata(v.ravel()) for v in (x, y))
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else None


@dataclass(frozen=True, slots=True)
class RankAgreement:
    """Spearman of static horizons with an observed quantity, over prefix-layer pairs."""

    median: float | None
    lower_quartile: float | None
    upper_quartile: float | None
    pairs: int
    constant_pairs: int
    """Pairs left out because all units were equal on one side."""


def rank_agreement(static: Sequence[F64], observed: Sequence[F64]) -> RankAgreement:
    """Per prefix and layer, then median and quartiles (linear interpolation)."""
    found = [
        rank_correlation(horizons, prefix)
        for horizons, layer in zip(static, observed, strict=True)
        for prefix in layer
    ]
    known = [rho for rho in found if rho is not None]
    low, median, high = np.percentile(known, (25, 50, 75)).tolist() if known else (None,) * 3
    return RankAgreement(median, low, high, len(found), len(found) - len(known))


@dataclass(frozen=True, slots=True)
class CutoffAgreement:
    """What a cutoff decides by static and by observed horizons, over prefixes, layers and units."""

    w_max: int
    same_side: float
    """Share of units that both keep or both omit."""
    omitted: int
    """Units the static horizon omits, over all prefixes."""
    omitted_but_longer: int
    """Of those, units whose observed horizon exceeds the cutoff: kept by an oracle, lost by the plan."""


def cutoff_agreement(static: Sequence[F64], observed: Sequence[F64], w_max: int) -> CutoffAgreement:
    """Rank agreement is not cutoff agreement: compare the decisions themselves."""
    same = total = omitted = longer = 0
    for horizons, layer in zip(static, observed, strict=True):
        keep = np.broadcast_to(horizons > w_max, layer.shape)
        oracle = layer > w_max
        same += int((keep == oracle).sum())
        total += keep.size
        omitted += int((~keep).sum())
        longer += int((~keep & oracle).sum())
    return CutoffAgreement(w_max, same / total, omitted, longer)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Static horizons at one gate input against what some prefixes showed.

    Attributes:
        gate_input: a_s of the static horizons, and where it comes from.
        prefixes: how many.
        horizons: H_s against H_e.
        magnitudes: H_s against M_S.
        cutoffs: decisions at each W_max.
    """

    gate_input: float
    gate_input_source: str
    prefixes: int
    horizons: RankAgreement
    magnitudes: RankAgreement
    cutoffs: tuple[CutoffAgreement, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"cutoffs": [asdict(cutoff) for cutoff in self.cutoffs]}


@dataclass(frozen=True, slots=True)
class LayerAgreement:
    """Median over prefixes of one layer's correlations; None where all pairs were constant.

    The `_by_prefix` fields hold the correlation of every prefix, None where one side was constant.
    """

    index: int
    horizons: float | None
    magnitudes: float | None
    horizons_by_prefix: tuple[float | None, ...] = ()
    magnitudes_by_prefix: tuple[float | None, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def agreement(
    static: Sequence[F64],
    observed: Sequence[F64],
    magnitudes: Sequence[F64],
    *,
    w_max: Sequence[int],
    gate_input: float,
    gate_input_source: str,
    prefixes: Sequence[int] | None = None,
) -> Agreement:
    """Ranks and decisions over the prefixes `prefixes` (all by default)."""
    rows = list(range(len(observed[0])) if prefixes is None else prefixes)
    seen, norms = ([layer[rows] for layer in side] for side in (observed, magnitudes))
    return Agreement(
        gate_input=gate_input,
        gate_input_source=gate_input_source,
        prefixes=len(rows),
        horizons=rank_agreement(static, seen),
        magnitudes=rank_agreement(static, norms),
        cutoffs=tuple(cutoff_agreement(static, seen, w) for w in w_max),
    )


def layer_agreements(
    static: Sequence[F64],
    observed: Sequence[F64],
    magnitudes: Sequence[F64],
    indices: Sequence[int],
) -> tuple[LayerAgreement, ...]:
    """Every layer on its own; `indices` are the block indices of the linear layers."""
    found = []
    for index, horizons, layer, magnitude in zip(
        indices, static, observed, magnitudes, strict=True
    ):
        ours = tuple(rank_correlation(horizons, prefix) for prefix in layer)
        norms = tuple(rank_correlation(horizons, prefix) for prefix in magnitude)
        found.append(LayerAgreement(index, _median(ours), _median(norms), ours, norms))
    return tuple(found)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
