"""Value scaling and reordering: which factors and order a head stores its values in (DAMP A.1-A.3).

    c_v = (rms_v / geomean(rms))^p,  p in {0, 1/4, 1/2, 3/4, 1},  order: the model's, or ascending rms_v / c_v

rms is over key channels and fitting anchors. A candidate is judged by J on the tuning split (Eq. 16) with the
channels protected that its own risk selects. No scaling in the model's order is candidate 0, and ties prefer
the earlier candidate. p = 1 makes all scaled rms equal, so it has no order of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hybridstate.quant.arms import Arm, ValueMap
from hybridstate.quant.formats import FORMATS, Format
from hybridstate.quant.risk import (
    F64,
    I16,
    Place,
    equal_weights,
    protect,
    squared_error,
)

CANDIDATES: Final[tuple[tuple[float, bool], ...]] = (
    (0.0, False),
    (0.0, True),
    (0.25, False),
    (0.25, True),
    (0.5, False),
    (0.5, True),
    (0.75, False),
    (0.75, True),
    (1.0, False),
)
"""(p, whether values are reordered)."""

RMS_FLOOR: Final = 1e-6
"""Least rms of a value dimension, as a share of its head's largest."""


@dataclass(frozen=True, slots=True)
class Anchors:
    """States and error weights of one layer on some sequences, with their places.

    Attributes:
        states: `[N, H, K, V]`.
        weights: `[N, H]` or `[N, H, K]`, W of Eq. 15.
        places: N of them.
    """

    states: torch.Tensor
    weights: torch.Tensor
    places: list[Place]


@dataclass(frozen=True, slots=True)
class Table:
    """Errors of every candidate for one layer and low format, `[C, H, K]` each.

    Attributes:
        risk: C_u of Eq. 15 on the fitting split.
        error: the mean local error there, without its retention.
        low, high: expected W e on the tuning split, if stored low or in FP16.
    """

    risk: F64
    error: F64
    low: F64
    high: F64


@dataclass(frozen=True, slots=True)
class Choice:
    """What one layer stores.

    Attributes:
        candidate: `[H]` index into `CANDIDATES`.
        protected: `[H, k_hi]` key channels in FP16, ascending.
        objective: `[H]` J.
    """

    candidate: I16
    protected: I16
    objective: F64


def value_rms(anchors: Anchors) -> F64:
    """Root mean square of every value dimension over key channels and anchors, `[H, V]`."""
    shares = torch.from_numpy(equal_weights(anchors.places)).to(anchors.states.device)
    mean = [
        share * state.to(torch.float64).square().mean(-2)
        for share, state in zip(shares, anchors.states, strict=True)
    ]
    total = torch.stack(mean).sum(0)
    rms: F64 = total.sqrt().cpu().numpy()
    return rms


def value_maps(rms: F64) -> tuple[ValueMap, ...]:
    """Factors and order of every candidate from rms `[H, V]`; a head of zeros stays as it is."""
    peak = rms.max(1, keepdims=True)
    safe = np.where(peak > 0, np.maximum(rms, RMS_FLOOR * peak), 1.0)
    relative = safe / np.exp(np.log(safe).mean(1, keepdims=True))
    maps = []
    for power, reorder in CANDIDATES:
        scale = (relative**power).astype(np.float32)
        order = np.tile(np.arange(rms.shape[1]), (len(rms), 1))
        if reorder:
            order = np.argsort(safe / scale, axis=1, kind="stable")
        maps.append(ValueMap(torch.from_numpy(scale), torch.from_numpy(order)))
    return tuple(maps)


def table(
    fit: Anchors,
    tune: Anchors,
    low: Format,
    maps: tuple[ValueMap, ...] | None,
    *,
    device: torch.device,
) -> Table:
    """Errors of all candidates, or of plain storage alone if `maps` is None; one anchor at a time."""
    arms = []
    for values in maps or (None,):
        kept = None if values is None else (values.to(device),)
        high = Arm("high", FORMATS["fp16"], values=kept)
        arms.append((Arm("low", low, values=kept), high))
    risk, error = (_zeros(len(arms), fit.states) for _ in range(2))
    kept_low, kept_high = (_zeros(len(arms), fit.states) for _ in range(2))
    for share, state, weight in _each(fit, device):
        for c, (arm, _) in enumerate(arms):
            e = squared_error(state, arm.reconstruct(state, 0))[0].cpu().numpy()
            error[c] += share * e
            risk[c] += share * e * weight
    for share, state, weight in _each(tune, device):
        for c, (arm, high) in enumerate(arms):
            for total, stored in ((kept_low, arm), (kept_high, high)):
                e = squared_error(state, stored.reconstruct(state, 0))[0].cpu().numpy()
                total[c] += share * e * weight
    return Table(risk, error, kept_low, kept_high)


def _zeros(candidates: int, states: torch.Tensor) -> F64:
    return np.zeros((candidates, *states.shape[1:3]))


def _each(anchors: Anchors, device: torch.device) -> Iterator[tuple[float, torch.Tensor, F64]]:
    """Share of the mean, state `[1, H, K, V]` on the device, weight `[H, K]` or `[H, 1]`."""
    shares = equal_weights(anchors.places)
    for share, state, weight in zip(shares, anchors.states, anchors.weights, strict=True):
        w = weight.to(torch.float64).numpy()
        yield float(share), state[None].to(device), w if w.ndim == 2 else w[:, None]


def choose(table: Table, scores: F64, k_hi: int, key_heads: int, *, shared: bool) -> Choice:
    """The candidate and channels of every head.

    Args:
        scores: `[C, H, K]` by which channels are protected under each candidate.
        shared: value heads that read one key head share their channels: the candidates that heads
            choose alone give the summed scores, and each head chooses again with the channels fixed.
    """
    count, heads, _ = scores.shape
    alone = np.stack([protect(s, k_hi, heads) for s in scores])  # [C, H, k_hi]
    objective = _objective(table, alone)
    candidate = objective.argmin(0)
    every = np.arange(heads)
    protected = alone[candidate, every]
    if shared and key_heads < heads:
        protected = protect(scores[candidate, every], k_hi, key_heads)
        objective = _objective(table, np.broadcast_to(protected, (count, *protected.shape)))
        candidate = objective.argmin(0)
    return Choice(candidate.astype(np.int16), protected, objective[candidate, every])


def _objective(table: Table, protected: I16) -> F64:
    """J `[C, H]` with channels `[C, H, k_hi]` protected (Eq. 16)."""
    gain = np.take_along_axis(table.high - table.low, protected.astype(np.int64), axis=2)
    result: F64 = table.low.sum(2) + gain.sum(2)
    return result


def chosen_map(maps: tuple[ValueMap, ...], candidate: I16) -> ValueMap:
    """Each head's candidate, as one map."""
    heads = range(len(candidate))
    return ValueMap(
        torch.stack([maps[candidate[h]].scale[h] for h in heads]),
        torch.stack([maps[candidate[h]].order[h] for h in heads]),
    )
