"""SYNTHETIC horizons of the full-size models, fitted to the numbers that the papers publish.

No weight of a real model is behind these arrays. Counts per layer, head and rank are set to the
published ones where a figure gives them; everything else follows a seeded normal spread, mapped to
tokens by a piecewise quantile function through the published capacities. They exist so that the
product's arithmetic can be held against published results at full size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hybridstate.families import ModelSpec
from tests.plan.geometry import SPECS

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
RANKS = 8
NOTE = "SYNTHETIC horizons fitted to published counts; no real weights"


@dataclass(frozen=True)
class HeadTargets:
    """Counts at the cutoff whose retained-fraction map a figure shows.

    Attributes:
        w_max: that cutoff.
        none, every: layer-head pairs that keep nothing, and everything.
        lowest, highest: retained units of the emptiest and the fullest layer.
        middle: ordinal of the layer nearest the median, its count, and its counterpart's.
        fullest_rank: units of the fullest of 8 contiguous ranks, None if not published.
    """

    w_max: int
    none: int
    every: int
    lowest: int
    highest: int
    middle: tuple[int, int, int] | None = None
    fullest_rank: int | None = None


@dataclass(frozen=True)
class Fit:
    """One model: retained units at each cutoff, spread, and the shape of one figure.

    Attributes:
        retained: cutoff -> units over all ranks.
        median: tokens of the median horizon (figure 1: ln(1e-3) / ln(median alpha)).
        spread: standard deviations between layers, between heads, inside heads (log10 tokens).
        shortest, longest: ends of the quantile function, tokens.
        budget: bytes per rank of a pool in which every published capacity comes out as printed.
    """

    retained: Mapping[int, int]
    median: float
    spread: tuple[float, float, float]
    shortest: float
    longest: float
    budget: int
    heads: HeadTargets | None = None
    seed: int = 2027


FITS: dict[str, Fit] = {
    "kimi_linear": Fit(
        retained={16: 8 * 3673, 64: 8 * 1147, 128: 8 * 363, 512: 8 * 17},
        median=np.log(1e-3) / np.log(0.471),
        spread=(0.03, 0.556, 0.18),
        shortest=0.6,
        longest=6e3,
        budget=1856 * 2**20,
        heads=HeadTargets(16, 215, 36, 733, 2286, middle=(16, 1536, 1413), fullest_rank=4420),
    ),
    "qwen3_next": Fit(
        retained={16: 8 * 130, 64: 8 * 108, 128: 8 * 89, 512: 8 * 56},
        median=np.log(1e-3) / np.log(0.969),
        spread=(0.2, 0.9, 0.0),
        shortest=2.0,
        longest=4e5,
        budget=1152 * 2**20,
    ),
    "kimi_k3": Fit(
        retained={64: 8 * 64417, 128: 8 * 50856, 512: 8 * 27800},
        median=np.log(1e-3) / np.log(0.942),
        spread=(0.23, 0.64, 0.73),
        shortest=1.3816,
        longest=4e5,
        budget=19072 * 2**20,
        heads=HeadTargets(64, 108, 4, 3281, 9105),
    ),
}


@cache
def synthetic_horizons(model: str) -> tuple[F64, ...]:
    """Per linear layer `[H]` or `[H, K]`, tokens; the same for every call."""
    spec, fit = SPECS[model], FITS[model]
    rng = np.random.Generator(np.random.PCG64(fit.seed))
    layers, heads, channels = _sizes(spec)
    between, among, within = fit.spread
    score = rng.normal(0, between, (layers, 1, 1)) + rng.normal(0, among, (layers, heads, 1))
    score = score + rng.normal(0, within, (layers, heads, channels))
    group = np.zeros(score.shape, np.int64)
    if fit.heads is not None:
        counts = head_counts(fit.heads, score.mean(axis=2), fit.retained[fit.heads.w_max], rng)
        places = np.argsort(np.argsort(-score, axis=2, kind="stable"), axis=2, kind="stable")
        group = (places < counts[:, :, None]).astype(np.int64)
    order = np.lexsort((score.reshape(-1), group.reshape(-1)))
    tokens = np.empty(order.size)
    tokens[order] = quantiles(fit, order.size)
    shaped = tokens.reshape(score.shape)
    return tuple(layer if channels > 1 else layer[:, 0] for layer in shaped)


def _sizes(spec: ModelSpec) -> tuple[int, int, int]:
    layer = spec.layers[0]
    channels = layer.key_dim if spec.unit == "channel" else 1
    return len(spec.layers), layer.value_heads, channels


def quantiles(fit: Fit, units: int) -> F64:
    """Ascending horizons: log-linear between knots, `retained[W]` of them strictly above W."""
    knots = [(0.0, fit.shortest), (float(units), fit.longest)]
    knots += [(float(units - kept), float(w)) for w, kept in fit.retained.items()]
    knots.append((units / 2, fit.median))
    places, tokens = zip(*sorted(knots), strict=True)
    assert list(tokens) == sorted(tokens), "the published numbers contradict each other"
    return np.exp(np.interp(np.arange(units) + 0.5, places, np.log(tokens)))


def head_counts(goal: HeadTargets, score: F64, total: int, rng: np.random.Generator) -> I64:
    """Retained channels of every layer-head pair, `[L, H]`, with all of the figure's totals."""
    layers, heads = score.shape
    per_layer = layer_counts(goal, layers, total, rng)
    rank = heads // RANKS
    lifted = score + 0.5 * ((per_layer / per_layer.mean()) - 1)[:, None]
    fullest = 5  # which rank is the fullest is not published
    if goal.fullest_rank is not None:
        lifted[:, fullest * rank : (fullest + 1) * rank] += 0.15
    order = np.argsort(lifted.reshape(-1), kind="stable")
    kind = np.full(order.size, 1)
    kind[order[: goal.none]], kind[order[order.size - goal.every :]] = 0, 2
    mixed = (kind == 1).reshape(layers, heads)
    counts = np.where(kind == 2, 128, 0).reshape(layers, heads)
    share = 1 / (1 + np.exp(-3 * (lifted - np.median(lifted[mixed]))))
    counts[mixed] = np.clip(np.rint(128 * share[mixed]), 1, 127).astype(np.int64)
    for layer in range(layers):
        _shift(counts[layer], mixed[layer], int(per_layer[layer] - counts[layer].sum()))
    if goal.fullest_rank is not None:
        _fill_rank(counts, mixed, fullest, goal.fullest_rank)
    return counts


def layer_counts(goal: HeadTargets, layers: int, total: int, rng: np.random.Generator) -> I64:
    """Retained units per layer: the published extremes and middle, a smooth rest, the total."""
    fixed = [goal.lowest, goal.highest]
    if goal.middle is not None:
        _, here, counterpart = goal.middle
        fixed += [here, counterpart]
        half = (layers - 4) // 2
        low = np.linspace(goal.lowest, counterpart, half + 2)[1:-1]
        high = here + (goal.highest - here) * (np.arange(1, half + 1) / (half + 1))
        rest, bounds = np.concatenate([low, high]), (half, counterpart, here)
    else:
        mean = (total - sum(fixed)) / (layers - 2)
        power = (goal.highest - goal.lowest) / (mean - goal.lowest) - 1
        place = np.arange(1, layers - 1) / (layers - 1)
        rest = goal.lowest + (goal.highest - goal.lowest) * place**power
        bounds = (0, goal.lowest, goal.lowest)
    counts = np.rint(rest).astype(np.int64)
    step = 0
    while (missing := total - sum(fixed) - int(counts.sum())) != 0:
        one = step % len(counts)
        floor = goal.lowest if one < bounds[0] else bounds[2]
        ceiling = bounds[1] if one < bounds[0] else goal.highest
        moved = counts[one] + np.sign(missing)
        counts[one] = moved if floor < moved < ceiling else counts[one]
        step += 1
    values = np.concatenate([counts, fixed[:2]])
    values = rng.permutation(values)
    if goal.middle is not None:  # equally far from the median: the named layer comes first
        values = np.insert(values, goal.middle[0], goal.middle[1])
        values = np.append(values, goal.middle[2])
    return np.asarray(values, np.int64)


def _shift(counts: I64, mixed: NDArray[np.bool_], missing: int) -> None:
    """Add `missing` units to the mixed heads of one layer, evenly, keeping each in 1..127."""
    places: Sequence[int] = np.flatnonzero(mixed).tolist()
    while missing:
        for place in places:
            moved = counts[place] + np.sign(missing)
            if missing and 1 <= moved <= 127:
                counts[place] = moved
                missing -= int(np.sign(missing))


def _fill_rank(counts: I64, mixed: NDArray[np.bool_], fullest: int, units: int) -> None:
    """Move units between heads of one layer until one rank has `units` and no other as many."""
    layers, heads = counts.shape
    rank_of = np.arange(heads) // (heads // RANKS)
    layer = 0
    while True:
        loads = np.bincount(rank_of, counts.sum(axis=0), RANKS).astype(np.int64)
        others = np.delete(np.arange(RANKS), fullest)
        if loads[fullest] == units and loads[others].max() < units:
            return
        high = int(others[np.argmax(loads[others])])
        low = int(others[np.argmin(loads[others])])
        if loads[fullest] > units:
            giver, taker = fullest, low
        elif loads[fullest] < units:
            giver, taker = high, fullest
        else:
            giver, taker = high, low
        row, free = counts[layer % layers], mixed[layer % layers]
        give = np.flatnonzero((rank_of == giver) & free & (row > 1))
        take = np.flatnonzero((rank_of == taker) & free & (row < 127))
        if give.size and take.size:
            row[give[np.argmax(row[give])]] -= 1
            row[take[np.argmin(row[take])]] += 1
        layer += 1
