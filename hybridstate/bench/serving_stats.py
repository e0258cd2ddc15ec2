"""Latencies and hit rates of a serving run, with SGLang's keys and definitions, and their mean over seeds.

    TTFT   first token - sending; a client of a full server waits inside of it
    TPOT   (last token - first token) / (tokens - 1), requests of at least two tokens
    ITL    time between two tokens of one request, all of them together
    E2E    last token - sending

All requests count, misses too. Statistics are taken in each seed and then averaged; requests of different seeds are
never pooled (DASC C.3). Percentiles are linear, standard deviations are those of a population, as NumPy's defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.bench.scheduler import Run, Served
from hybridstate.runtime.admission import Counters

Floats = NDArray[np.float64]

PERCENTILES: Final = (90, 95, 99)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a request has to keep to count as good, in seconds; infinite where nothing is asked."""

    ttft: float = 10.0
    tpot: float = 0.1
    e2e: float = float("inf")


def statistics(
    run: Run, counters: Counters, *, clients: int, limit: int, goal: Goal
) -> dict[str, Any]:
    """SGLang's result object of one seed, plus a `hybridstate` block.

    Args:
        run: what happened.
        counters: of its cache.
        clients, limit: conversations and running requests at once.
        goal: of the goodput.
    """
    served = run.served
    outputs = np.array([r.output_tokens for r in served])
    ttft = np.array([r.first - r.sent for r in served])
    e2e = np.array([r.last - r.sent for r in served])
    several = outputs > 1
    tpot = (e2e - ttft)[several] / (outputs[several] - 1)
    each = np.zeros(len(served))
    each[several] = tpot
    good = (ttft <= goal.ttft) & (each <= goal.tpot) & (e2e <= goal.e2e)
    prompt_tokens = sum(r.prompt_tokens for r in served)
    total_output = int(outputs.sum())
    seconds = max(run.seconds, 1e-12)
    document: dict[str, Any] = {
        "backend": "hybridstate",
        "request_rate": "inf",
        "max_concurrency": clients,
        "duration": run.seconds,
        "completed": len(served),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": total_output,
        "request_throughput": len(served) / seconds,
        "input_throughput": prompt_tokens / seconds,
        "output_throughput": total_output / seconds,
        "total_throughput": (prompt_tokens + total_output) / seconds,
        "concurrency": float(e2e.sum()) / seconds,
        "max_concurrent_requests": run.peak,
        "request_goodput": float(good.sum()) / seconds,
        "slo_attainment": float(good.mean()) if len(served) else 0.0,
        "goodput_slos_ms": {
            name: value * 1e3
            for name, value in (("ttft", goal.ttft), ("tpot", goal.tpot), ("e2el", goal.e2e))
            if np.isfinite(value)
        },
    }
    for name, values in (("e2e_latency", e2e), ("ttft", ttft), ("tpot", tpot)):
        document |= _summary(name, values, np.ones(len(values)))
    gaps = [np.empty(0), *(values for values, _ in run.gaps)]
    weights = [np.empty(0), *(np.full(len(values), count, float) for values, count in run.gaps)]
    document |= _summary("itl", np.concatenate(gaps), np.concatenate(weights))
    document["hybridstate"] = {
        "server_limit": limit,
        "token_hit_rate": _rate(counters.tokens_dense + counters.tokens_compressed, prompt_tokens),
        "token_hit_rate_dense": _rate(counters.tokens_dense, prompt_tokens),
        "token_hit_rate_compressed": _rate(counters.tokens_compressed, prompt_tokens),
        "token_hit_rate_by_turn": _by_turn(served, ("dense", "compressed")),
        "token_hit_rate_dense_by_turn": _by_turn(served, ("dense",)),
        "token_hit_rate_compressed_by_turn": _by_turn(served, ("compressed",)),
        **counters.to_json(),
    }
    return document


def mean_over_seeds(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every number averaged over the seeds' documents; the rest from the first."""
    return {key: _mean([document[key] for document in documents]) for key in documents[0]}


def _mean(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _mean([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [_mean(list(column)) for column in zip(*values, strict=False)]
    if isinstance(first, bool) or not isinstance(first, int | float):
        return first
    return float(np.mean(values))


def _summary(name: str, values: Floats, weights: Floats) -> dict[str, float]:
    """Mean, median, deviation and percentiles in milliseconds; zeros where there is no value."""
    labels = ["mean", "median", "std", *(f"p{p}" for p in PERCENTILES)]
    if not len(values):
        return {f"{label}_{name}_ms": 0.0 for label in labels}
    total = weights.sum()
    mean = float((values * weights).sum() / total)
    deviation = float(np.sqrt((weights * (values - mean) ** 2).sum() / total))
    order = np.argsort(values, kind="stable")
    ranks, ordered = np.cumsum(weights[order]), values[order]
    quantiles = [_quantile(ordered, ranks, p / 100) for p in (50, *PERCENTILES)]
    numbers = [mean, quantiles[0], deviation, *quantiles[1:]]
    return {
        f"{label}_{name}_ms": 1e3 * float(number)
        for label, number in zip(labels, numbers, strict=True)
    }


def _quantile(ordered: Floats, ranks: Floats, share: float) -> float:
    """NumPy's linear percentile of values that are repeated; `ranks` counts values up to each."""
    position = share * (ranks[-1] - 1)
    low, high = np.floor(position), np.ceil(position)
    below = ordered[np.searchsorted(ranks, low, side="right")]
    above = ordered[np.searchsorted(ranks, high, side="right")]
    return float(below + (above - below) * (position - low))


def _by_turn(served: Sequence[Served], tiers: Sequence[str]) -> list[float]:
    """Tokens found in these tiers over prompt tokens, for the first, second ... turn of conversations."""
    turns = 1 + max((r.turn for r in served), default=-1)
    prompt, hit = np.zeros(turns), np.zeros(turns)
    for request in served:
        prompt[request.turn] += request.prompt_tokens
        hit[request.turn] += request.hit_tokens if request.tier in tiers else 0
    return [_rate(h, p) for h, p in zip(hit.tolist(), prompt.tolist(), strict=True)]


def _rate(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
