"""What a selection keeps, seen by layer and head: the statistics under DASC's figures 6 to 8.

A layer-head pair is *mixed* when it keeps some of its key channels and omits others; a head of a GDN
layer is one unit, so it never is.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridstate.families import ModelSpec
from hybridstate.plan.select import Selection


@dataclass(frozen=True, slots=True, eq=False)
class RetentionMap:
    """Retained shares of every layer-head pair.

    Attributes:
        shares: per linear layer, `[H]`, 0 to 1.
        blocks: 0-based block index of each linear layer.
    """

    shares: tuple[NDArray[np.float64], ...]
    blocks: tuple[int, ...]

    @property
    def pairs(self) -> dict[str, int]:
        """Layer-head pairs: `mixed`, `none` retained, `all` retained, and their sum `total`."""
        share = np.concatenate(self.shares)
        none, every = int((share == 0).sum()), int((share == 1).sum())
        return {
            "mixed": share.size - none - every,
            "none": none,
            "all": every,
            "total": share.size,
        }

    @property
    def layer_means(self) -> NDArray[np.float64]:
        """Mean share of each linear layer, `[L]`."""
        return np.array([share.mean() for share in self.shares])

    @property
    def nearest_median(self) -> int:
        """Ordinal of the layer whose mean is nearest the median over layers, the first of equals.

        With an even number of layers the two in the middle are equally near; distances within
        rounding of the smallest count as equal to it.
        """
        distance = np.abs(self.layer_means - np.median(self.layer_means))
        return int(np.flatnonzero(distance <= distance.min() + 1e-12)[0])

    def to_json(self) -> dict[str, Any]:
        """Counts of pairs, range and median of the layer means, and the layer nearest it."""
        means, nearest = self.layer_means, self.nearest_median
        return {
            "pairs": self.pairs,
            "layer_mean": {
                "min": float(means.min()),
                "median": float(np.median(means)),
                "max": float(means.max()),
            },
            "nearest_median": {
                "block": self.blocks[nearest],
                "ordinal": nearest,
                "mean": float(means[nearest]),
            },
        }


def retention_map(spec: ModelSpec, selection: Selection) -> RetentionMap:
    """Retained shares by layer and value head."""
    shares = tuple(
        mask.reshape(layer.value_heads, -1).mean(axis=1)
        for layer, mask in zip(spec.layers, selection.retained, strict=True)
    )
    return RetentionMap(shares, tuple(layer.index for layer in spec.layers))
