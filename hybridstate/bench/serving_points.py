"""Points of a serving comparison: what their seeds found, put together, continued and compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hybridstate.bench.serving_stats import mean_over_seeds
from hybridstate.errors import NumericError, UsageError

TARGET_HIT: Final = 0.5

Key = tuple[str, float, int, bool]
"""Arm, ratio, limit, and whether on the control."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed of a point found.

    Attributes:
        statistics: of `serving_stats`.
        digest: of all reclamations.
        outputs: digest of all replies, None where nothing was generated.
        operations: rows for the cost model, None where nothing was measured.
        engine: how steps ran, None likewise.
        error: why there are no statistics, None where there are.
    """

    statistics: dict[str, Any]
    digest: str
    outputs: str | None = None
    operations: dict[str, list[list[float]]] | None = None
    engine: dict[str, Any] | None = None
    error: str | None = None


def earlier(document: Mapping[str, Any], header: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """Points of a document of the same sweep, for `known`.

    Args:
        document: the earlier result.
        header: of the sweep that goes on; every entry has to be the same there.

    Raises:
        UsageError: it was another sweep.
    """
    other = [
        f"{name} ({document[name]}, here {value})"
        if isinstance(value, float | int) and name in document
        else name
        for name, value in header.items()
        if document.get(name) != value
    ]
    if other:
        raise UsageError(
            f"the earlier run had another {', '.join(other)}",
            hint="resume with the same options, model and trace",
        )
    return {
        (p["arm"], p["ratio"], p["limit"], control): p
        for control, points in ((False, "points"), (True, "control"))
        for p in document[points]
    }


def point_of(
    head: Mapping[str, Any], found: Sequence[Outcome], known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All seeds of one point, those of an earlier run first; operations of the seeds one after the other."""
    if not found:
        late = {**head, "skipped": f"{head['arm']}: not begun before the deadline"}
        return late if known is None else dict(known)
    failed = [outcome.error for outcome in found if outcome.error is not None]
    if failed and known is not None:
        return {**known, "not_continued": f"{head['arm']}: {failed[0]}"}
    if failed:
        return {**head, "skipped": f"{head['arm']}: {failed[0]}", "failed": True}
    old = known or {}
    seeds = [*old.get("seeds", ()), *(outcome.statistics for outcome in found)]
    digests = [*old.get("reclamation_digests", ()), *(outcome.digest for outcome in found)]
    point = {
        **head,
        "reclamation_digests": digests,
        "mean": mean_over_seeds(seeds),
        "seeds": seeds,
    }
    measured = [outcome.operations for outcome in found if outcome.operations is not None]
    if measured:
        measured = [*([old["operations"]] if "operations" in old else []), *measured]
        kinds = dict.fromkeys(kind for rows in measured for kind in rows)
        point["operations"] = {
            kind: [row for rows in measured for row in rows.get(kind, [])] for kind in kinds
        }
        outputs = [outcome.outputs for outcome in found]
        point["output_digests"] = [*old.get("output_digests", ()), *outputs]
        point["mean_ttft_s"] = point["mean"]["mean_ttft_ms"] / 1e3
        point["token_hit_rate"] = hit_rate(point)
        point["engine"] = found[0].engine
        ways = [*old.get("earlier_engines", ()), *([old["engine"]] if old.get("engine") else [])]
        if other := [engine for engine in ways if way(engine) != way(found[0].engine)]:
            point["earlier_engines"] = other
    return point


def way(engine: Mapping[str, Any] | None) -> str:
    """How steps and prompts ran, in words; seconds of two ways do not compare."""
    engine = engine or {}
    prompts = engine.get("prompts") or {}
    return f"steps {engine.get('mode', 'unknown')}, prompts {prompts.get('mode', 'eager')}"


def ways(points: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Arms whose measured points have seeds that ran in each way, in the order of the points."""
    found: dict[str, dict[str, None]] = {}
    for point in points:
        if "engine" in point:
            for engine in (point["engine"], *point.get("earlier_engines", ())):
                found.setdefault(way(engine), {})[point["arm"]] = None
    return {name: list(arms) for name, arms in found.items()}


def operating_point(points: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The dense point whose token hit rate is closest to one half; the smaller working set of two that are as close.

    Raises:
        NumericError: the dense arm failed everywhere.
    """
    failed = [point["skipped"] for point in points if point.get("failed")]
    if failed and len(failed) == len(points):
        raise NumericError(f"the dense arm failed at every point, first: {failed[0]}")
    return min(points, key=lambda p: (abs(hit_rate(p) - TARGET_HIT), p["ratio"]))


def hit_rate(point: Mapping[str, Any]) -> float:
    """Mean token hit rate of a point over its seeds; -1 where nothing ran."""
    return float(point["mean"]["hybridstate"]["token_hit_rate"]) if "mean" in point else -1.0


def compare(points: Sequence[dict[str, Any]]) -> None:
    """Add every point's change against the dense arm at the same ratio and limit, over the seeds that both have."""
    dense = {(p["ratio"], p["limit"]): p for p in points if p["arm"] == "dense" and "mean" in p}
    for point in points:
        base = dense.get((point["ratio"], point["limit"]))
        if base is None or "mean" not in point:
            continue
        both = min(len(base["seeds"]), len(point["seeds"]))
        ours, theirs = (mean_over_seeds(p["seeds"][:both]) for p in (point, base))
        point["against_dense"] = {
            name: ours[key] / theirs[key] - 1 if theirs[key] else 0.0
            for name, key in (
                ("ttft", "mean_ttft_ms"),
                ("e2e", "mean_e2e_latency_ms"),
                ("tpot", "mean_tpot_ms"),
            )
        }
