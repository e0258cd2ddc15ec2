"""Effective decay factors a_eff = exp(mean of log a) of heads and key channels, and their stability (DAMP 4.2, C.2).

Units of all linear layers are pooled, as in the paper: one quantile and one rank correlation for the whole model.
Arrays are per linear layer, `[N, H]` or `[N, H, K]` mean log-decays of N sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.horizons.observed import rank_correlation

F64 = NDArray[np.float64]

REFERENCE: Final = "math"
"""Domain that the others are ranked against."""

PERCENTILES: Final = (10, 50, 90)


@dataclass(frozen=True, slots=True)
class DomainDecay:
    """Effective decay on one domain's text, pooled over layers.

    Attributes:
        domain, sequences, tokens: the text, tokens in all.
        p10, p50, p90: percentiles of a_eff over all units.
        with_reference: Spearman with the reference domain over all units, None where one side is constant.
    """

    domain: str
    sequences: int
    tokens: int
    p10: float
    p50: float
    p90: float
    with_reference: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def pooled(layers: Sequence[F64]) -> F64:
    """`[N, units]` over all layers, head by head and channel by channel."""
    return np.concatenate([layer.reshape(len(layer), -1) for layer in layers], axis=1)


def effective(mean_log_decay: F64) -> F64:
    """a_eff of every unit from `[N, units]` mean log-decays of equally long sequences."""
    return np.asarray(np.exp(mean_log_decay.mean(axis=0)), np.float64)


def band(mean_log_decay: F64) -> tuple[F64, F64]:
    """10th and 90th percentile over sequences of each unit's a_eff."""
    low, high = np.percentile(np.exp(mean_log_decay), (10, 90), axis=0)
    return np.asarray(low, np.float64), np.asarray(high, np.float64)


def domain_decays(
    by_domain: Mapping[str, F64], *, tokens: int, reference: str = REFERENCE
) -> tuple[DomainDecay, ...]:
    """Percentiles of every domain and its rank correlation with the reference.

    Args:
        by_domain: `[N, units]` mean log-decays of sequences of `tokens` tokens.
    """
    factors = {domain: effective(rows) for domain, rows in by_domain.items()}
    found = []
    for domain, rows in by_domain.items():
        p10, p50, p90 = np.percentile(factors[domain], PERCENTILES).tolist()
        rho = None if domain == reference else rank_correlation(factors[reference], factors[domain])
        found.append(DomainDecay(domain, len(rows), tokens * len(rows), p10, p50, p90, rho))
    return tuple(found)


def units_at(factors: F64, percentiles: Sequence[int] = PERCENTILES) -> tuple[int, ...]:
    """Places of the units that stand at these percentiles of a_eff (nearest rank, first of equals)."""
    order = np.argsort(factors, kind="stable")
    last = factors.size - 1
    return tuple(int(order[round(percentile / 100 * last)]) for percentile in percentiles)
