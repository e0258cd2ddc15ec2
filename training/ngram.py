"""A byte 6-gram as the yardstick for prose: interpolated Witten-Bell, scored on the model's own windows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from training import data

Keys = NDArray[np.uint64]


def _grams(text: data.Bytes, order: int) -> Keys:
    """Return every run of ``order`` bytes of ``text`` as one integer, first byte most significant."""
    keys = np.zeros(len(text) - order + 1, np.uint64)
    for i in range(order):
        keys = (keys << np.uint64(8)) | text[i : len(text) - order + 1 + i].astype(np.uint64)
    return keys


def _find(keys: Keys, table: Keys, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Look ``keys`` up in the sorted ``table``; 0 where absent."""
    places = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[places] == keys, values[places], 0)


def bits_per_byte(
    train: data.Bytes, text: data.Bytes, *, order: int, window: int, count: int
) -> float:
    """Return bits per byte of an ``order``-gram of ``train`` over the windows that `evaluate` scores.

    ``p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h))`` with ``T(h)`` the number of distinct successors of
    ``h`` and ``h'`` its suffix; the recursion ends in the uniform distribution over 256 bytes.
    """
    starts = np.linspace(0, len(text) - window - 1, count).astype(int)
    rows = np.stack([text[s : s + window] for s in starts])
    probability = np.full((count, window), 1 / 256)
    for n in range(1, order + 1):
        table, counts = np.unique(_grams(train, n), return_counts=True)
        contexts, first = np.unique(table >> np.uint64(8), return_index=True)
        totals = np.add.reduceat(counts, first)
        kinds = np.diff(np.append(first, len(table)))
        keys = np.stack([_grams(row, n) for row in rows])
        total, kind = (_find(keys >> np.uint64(8), contexts, v) for v in (totals, kinds))
        hits = _find(keys, table, counts)
        here = probability[:, n - 1 :]
        mixed = (hits + kind * here) / np.maximum(total + kind, 1)
        probability[:, n - 1 :] = np.where(total > 0, mixed, here)
    return float(-np.log2(probability[:, 1:]).mean())


def baseline(order: int = 6, window: int = 2048, count: int = 200) -> float:
    """Return the yardstick in bits per byte: trained on the CC0 prose, scored on the held-out book."""
    return bits_per_byte(
        data.corpora()["prose"], data.held_out(), order=order, window=window, count=count
    )
