"""Which key channels to protect: local error, its retention, the accumulated-error risk (DAMP 5.1).

    e_{t,u} = || [Q(S_t) - S_t]_u ||^2                          Eq. 14
    C_u     = E_cal[ e_{t,u} W_{t,u} ]                          Eq. 15, W from `trajectories.record`
    J       = E_tune[ sum over channels of W e in their format ] Eq. 16

Everything is per linear layer, in float64; channels and heads are in the model's own order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.errors import NumericError, UsageError
from hybridstate.families import ModelSpec
from hybridstate.quant.arms import Arm
from hybridstate.quant.formats import Format

F64 = NDArray[np.float64]
I16 = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an anchor was taken; averages give equal weight inside each level."""

    domain: str
    sequence: int
    window: int


def equal_weights(places: list[Place]) -> F64:
    """Weights of a mean over anchors in a window, windows in a sequence, sequences, then domains."""

    domains = {p.domain for p in places}
    weights = np.empty(len(places))
    for i, place in enumerate(places):
        sequences = {p.sequence for p in places if p.domain == place.domain}
        windows = {p.window for p in places if p.sequence == place.sequence}
        same = [p for p in places if p == place]
        weights[i] = 1.0 / (len(domains) * len(sequences) * len(windows) * len(same))
    return weights


def squared_error(states: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """e of Eq. 14: `[..., K, V]` twice to `[..., K]` float64, in the state's own coordinates."""
    difference = stored.to(torch.float64) - states.to(torch.float64)
    return (difference * difference).sum(-1)


def local_error(states: torch.Tensor, low: Format) -> torch.Tensor:
    """e of every channel when the whole state is stored as `low`: `[N, H, K]` float64."""
    return squared_error(states, low.reconstruct(states))


def weighted(error: torch.Tensor, weights: torch.Tensor) -> F64:
    """W e per anchor `[N, H, K]`; GDN weights `[N, H]` hold for every channel of a head."""
    if weights.dim() == 2:
        weights = weights[..., None]
    product: F64 = (error * weights.to(torch.float64)).numpy()
    return product


def risk(products: F64, places: list[Place]) -> F64:
    """C of Eq. 15, `[H, K]`, from W e per anchor `[N, H, K]`.

    Raises:
        NumericError: a product is not finite.
    """
    if not np.isfinite(products).all():
        n, head, channel = np.argwhere(~np.isfinite(products))[0].tolist()
        raise NumericError(
            f"risk of head {head}, channel {channel} is not finite at anchor {n}",
            index=[n, head, channel],
            expected="finite values",
        )
    result: F64 = np.einsum("n,nhk->hk", equal_weights(places), products)
    return result


def default_k_hi(key_dim: int) -> int:
    """16 of 128 channels, in the same proportion for other widths, in steps of 16."""
    return min(key_dim, 16 * max(1, round(key_dim / 128)))


def check_k_hi(k_hi: int | None, spec: ModelSpec) -> int:
    """The number of protected channels per head: as given if every layer has them, or the default.

    Raises:
        UsageError: negative, or more than a layer's key channels.
    """
    smallest = min(layer.key_dim for layer in spec.layers)
    if k_hi is None:
        return default_k_hi(smallest)
    if not 0 <= k_hi <= smallest:
        raise UsageError(
            f"k_hi is {k_hi}, the state has {smallest} key channels per head",
            hint=f"the default is {default_k_hi(smallest)}",
            found=k_hi,
            expected=f"0 to {smallest}",
        )
    return k_hi


def protect(scores: F64, k_hi: int, key_heads: int) -> I16:
    """The `k_hi` channels of highest score per key head, ascending: `[H, k_hi]`.

    Value heads that read one key head share a selection, by the sum of their scores, so that the key
    order can be absorbed in the weights. Equal scores prefer the lower channel.
    """
    heads, key_dim = scores.shape
    bundle = heads // key_heads
    shared = scores.reshape(key_heads, bundle, key_dim).sum(1)
    chosen = np.sort(np.argsort(-shared, axis=1, kind="stable")[:, :k_hi], axis=1)
    return np.repeat(chosen, bundle, axis=0).astype(np.int16)


def protect_random(shape: tuple[int, int], k_hi: int, key_heads: int, seed: tuple[int, ...]) -> I16:
    """As many channels as `protect`, drawn per key head: `[H, k_hi]`, ascending."""
    heads, key_dim = shape
    generator = np.random.Generator(np.random.PCG64(list(seed)))
    chosen = np.stack(
        [np.sort(generator.permutation(key_dim)[:k_hi]) for _ in range(key_heads)]
    ).reshape(key_heads, k_hi)
    return np.repeat(chosen, heads // key_heads, axis=0).astype(np.int16)


def objective(
    states: torch.Tensor,
    weights: torch.Tensor,
    places: list[Place],
    arm: Arm,
    ordinal: int,
    device: torch.device | None = None,
) -> float:
    """J of Eq. 16 for one layer, summed over heads: each channel's error in the format it gets.

    One anchor at a time goes to the device, which holds the arm.
    """
    parts = []
    for place, state in enumerate(states):
        one = state[None] if device is None else state[None].to(device)
        stored = arm.reconstruct(one, ordinal, sequences=torch.tensor([place]))
        parts.append(squared_error(one, stored).cpu())
    error = torch.cat(parts)
    return float(risk(weighted(error, weights), places).sum())


@dataclass(frozen=True, slots=True)
class SplitAgreement:
    """How two halves of the calibration data agree, means over layers and heads (DAMP C.1)."""

    overlap: float
    """Share of protected channels that both halves choose."""
    random_overlap: float
    """Expected for two random choices, k_hi / K."""
    spearman: float | None
    """Rank correlation of the scores; None where every head has constant scores."""
    constant_heads: int
    """Heads left out of it because a half gives all their channels one score."""


def split_agreement(
    halves: list[tuple[F64, F64]], k_hi: int, key_heads: tuple[int, ...]
) -> SplitAgreement:
    """Compare scores `[H, K]` of two halves, per layer."""
    from hybridstate.horizons.observed import rank_correlation

    overlaps: list[float] = []
    correlations: list[float] = []
    constant = 0
    for (first, second), heads in zip(halves, key_heads, strict=True):
        a, b = protect(first, k_hi, heads), protect(second, k_hi, heads)
        overlaps += [len(set(x) & set(y)) / max(k_hi, 1) for x, y in zip(a, b, strict=True)]
        for x, y in zip(first, second, strict=True):
            rho = rank_correlation(x, y)
            if rho is None:
                constant += 1
            else:
                correlations.append(rho)
    return SplitAgreement(
        overlap=float(np.mean(overlaps)),
        random_overlap=k_hi / halves[0][0].shape[1],
        spearman=float(np.mean(correlations)) if correlations else None,
        constant_heads=constant,
    )
