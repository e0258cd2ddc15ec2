"""How wide a slot must be as a function of the cutoff, and the cutoff that makes it narrow enough."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.families import ModelSpec
from hybridstate.plan.placement import Balance, check_tp

LONGEST_CUTOFF: Final = 2**20
"""The largest cutoff that the search for one tries."""


def slot_width(
    spec: ModelSpec, horizons: Sequence[NDArray[np.float64]], tp: int, balance: Balance
) -> Callable[[int], int]:
    """Units of a ragged slot at a cutoff.

    Without balancing it is the fullest of the contiguous ranks. Both balanced modes store
    ceil(N / P) units on every rank, whatever the permutation.
    """
    check_tp(spec, tp)
    values = [layer.reshape(tp, -1) for layer in horizons]
    horizon = np.concatenate(values, axis=1) if values else np.empty((tp, 0))

    def width(w_max: int) -> int:
        counts = (horizon > w_max).sum(axis=1)
        return int(counts.max()) if balance == "off" else -(-int(counts.sum()) // tp)

    return width


def padded_width(
    spec: ModelSpec, horizons: Sequence[NDArray[np.float64]], tp: int
) -> Callable[[int], int]:
    """Units of a padded slot at a cutoff: the fullest layer of the fullest contiguous rank, L times."""
    check_tp(spec, tp)

    def width(w_max: int) -> int:
        fullest = max(int((h.reshape(tp, -1) > w_max).sum(axis=1).max()) for h in horizons)
        return fullest * len(horizons)

    return width


def smallest_cutoff(enough: Callable[[int], bool]) -> int | None:
    """The smallest W_max of 4 to 2^20 tokens that is enough; None if none is.

    A larger cutoff never keeps more, so bisection finds it.
    """
    low, high = 4, LONGEST_CUTOFF
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low
