"""What the mean time to the first token does not show of a recorded run: its quantiles, throughput, hits by turn."""

from collections.abc import Mapping, Sequence
from typing import Any

import tables

Result = Mapping[str, Any]
QUANTILES = {"median TTFT": "median_ttft_ms", "P95": "p95_ttft_ms", "P99": "p99_ttft_ms"}


def tails(result: Result) -> str:
    """Every arm at the operating point and the first limit, changes over the seeds that it and dense have."""
    chosen, limit = result["operating_point"]["ratio"], result["points"][0]["limit"]
    points = [
        p
        for p in result["points"]
        if (p["ratio"], p["limit"]) == (chosen, limit) and p.get("seeds")
    ]
    dense = next((p["seeds"] for p in points if p["arm"] == "dense"), None)
    rows = []
    for point in points:
        seeds = point["seeds"]
        base = None if point["arm"] == "dense" else dense
        cells = [
            f"{_mean(seeds, k) / 1e3:.3f} s{_change(seeds, base, k)}" for k in QUANTILES.values()
        ]
        served = "request_throughput"
        cells.append(f"{_mean(seeds, served):.1f}{_change(seeds, base, served)}")
        rows.append([point["arm"], *cells, _turns(seeds)])
    head = [f"arm, ratio {chosen:g}", *QUANTILES, "requests a second", "token hit by turn"]
    return tables.markdown(head, rows)


def _mean(seeds: Sequence[Result], key: str) -> float:
    return float(sum(seed[key] for seed in seeds) / len(seeds))


def _change(ours: Sequence[Result], theirs: Sequence[Result] | None, key: str) -> str:
    both = min(len(ours), len(theirs or ()))
    base = _mean((theirs or ())[:both], key) if both else 0.0
    return f", {100 * (_mean(ours[:both], key) / base - 1):+.1f} %" if base else ""


def _turns(seeds: Sequence[Result]) -> str:
    """Token hit rate of the first turn of conversations, the second, ..."""
    rates = zip(*(seed["hybridstate"]["token_hit_rate_by_turn"] for seed in seeds), strict=True)
    return ", ".join(f"{100 * sum(turn) / len(seeds):.0f}" for turn in rates) + " %"
