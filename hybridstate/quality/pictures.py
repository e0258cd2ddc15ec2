"""What the pictures of a calibration are drawn from: few numbers, three digits each."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.families import LinearLayer
from hybridstate.quant.calibration import Scores
from hybridstate.quant.selection import concentration

COLUMNS: Final = 32
"""Most columns of a recorded heat map; neighbouring value dimensions share one by root mean square."""


def pictures(layers: tuple[LinearLayer, ...], scores: Scores) -> dict[str, Any]:
    """The head of the most concentrated INT8 error, and the mean error curve over all heads.

    `head` holds `magnitude [K][<= 32]` (root mean square of the state), `int8_error [K]` and, where
    `int8-step+reorder` was run, `int8_error_reordered [K]` (mean squared error per key channel). `curve` is
    the share of a head's squared error in its channels, largest first, mean over heads.
    """
    layer = int(np.argmax([_most(error) for error in scores.error]))
    example = scores.examples[layer]
    head: dict[str, Any] = {
        "layer": layers[layer].index,
        "head": example.head,
        "value_dims_per_column": -(-example.magnitude.shape[1] // COLUMNS),
        "magnitude": [_short(row) for row in _narrow(example.magnitude)],
        "int8_error": _short(scores.error[layer][example.head]),
    }
    curve = {"plain": _short(_curve(scores.error))}
    if scores.reordered_error:
        head["int8_error_reordered"] = _short(scores.reordered_error[layer][example.head])
        curve["reordered"] = _short(_curve(scores.reordered_error))
    return {"head": head, "curve": curve}


def _most(error: NDArray[np.float64]) -> float:
    """Largest share of a head's error in 12.5 % of its channels."""
    return max(concentration(row[None])[0] for row in error)


def _narrow(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[K, V]` to at most `COLUMNS` columns by root mean square."""
    size = -(-values.shape[1] // COLUMNS)
    starts = np.arange(0, values.shape[1], size)
    counts = np.diff([*starts, values.shape[1]])
    narrow: NDArray[np.float64] = np.sqrt(np.add.reduceat(values**2, starts, axis=1) / counts)
    return narrow


def _curve(errors: tuple[NDArray[np.float64], ...]) -> NDArray[np.float64]:
    """Mean over heads with any error; layers of fewer channels are left out of the tail."""
    width = min(error.shape[1] for error in errors)
    rows = [np.sort(row)[::-1][:width] / row.sum() for e in errors for row in e if row.sum() > 0]
    return np.mean(rows, axis=0) if rows else np.zeros(width)


def _short(values: NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.3g}") for value in values]
