"""Points of a serving comparison: what their seeds found, put together, continued and compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hybridstate.bench.serving_stats import mean_over_seeds
from hybridstate.errors import NumericError

TARGET_HIT: Final = 0.5

NOT_BEGUN: Final = "not begun before the deadline"

LONGEST: Final = 600
"""Letters that are shown of a value that differs."""

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


def other_commits(ran: Sequence[str], own: str | None) -> list[str]:
    """Commits of earlier seeds other than a run's own, each once, in order."""
    return [commit for commit in dict.fromkeys(ran) if commit != own]


def differing(was: Any, now: Any) -> str:
    """Two values in one line, `A, here B`: of mappings the entries that differ, of long texts the parts."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        other = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        other = [name for name in other if name != "note"] or other  # which says the others again
        return "; ".join(f"{name} {differing(was.get(name), now.get(name))}" for name in other)
    if isinstance(was, str) and isinstance(now, str):
        before, here = was.split("; "), now.split("; ")
        was = "; ".join(part for part in before if part not in here) or was
        now = "; ".join(part for part in here if part not in before) or now
    theirs, ours = _shown(was), _shown(now)
    if not theirs or theirs == ours:  # as text and number
        theirs, ours = repr(was), repr(now)
    return f"{theirs:.{LONGEST}}, here {ours:.{LONGEST}}"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {_shown(item)}" for name, item in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def point_of(
    head: Mapping[str, Any],
    found: Sequence[Outcome | None],
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All seeds of one point, those of an earlier run first; operations of the seeds one after the other.

    The seeds of a point are 0, 1, 2 ... without a gap, so that their number says which are missing. What ran behind a
    seed that failed, or that was not begun, is `left_out` and counted.

    Args:
        head: what is known of the point before it runs.
        found: of the seeds behind those of `known`, in their order; None for one that was not begun.
        known: the point of an earlier run.
    """
    whole: list[Outcome] = []
    for outcome in found:
        if outcome is None or outcome.error is not None:
            break
        whole.append(outcome)
    stopped = found[len(whole)] if len(whole) < len(found) else None
    ran = sum(outcome is not None and outcome.error is None for outcome in found)
    why: dict[str, Any] = {}
    if ran > len(whole):
        why["left_out"] = ran - len(whole)
    if stopped is not None:
        why["not_continued"] = f"{head['arm']}: {stopped.error}"
    if whole:
        return {**_merged(head, whole, known or {}), **why}
    if known is not None:
        return {**known, **why}
    if stopped is not None:
        failed = why.pop("not_continued")
        return {**head, "skipped": failed, "failed": True, **why}
    return {**head, "skipped": f"{head['arm']}: {NOT_BEGUN}", **why}


def _merged(
    head: Mapping[str, Any], found: Sequence[Outcome], old: Mapping[str, Any]
) -> dict[str, Any]:
    """A point of at least one new seed."""
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
    """The dense point whose first seed has the token hit rate closest to one half, the smaller working set of two that
    are as close: the same however many seeds have run.

    Raises:
        NumericError: the dense arm failed everywhere.
    """
    failed = [point["skipped"] for point in points if point.get("failed")]
    if failed and len(failed) == len(points):
        raise NumericError(f"the dense arm failed at every point, first: {failed[0]}")

    def first_hit(point: Mapping[str, Any]) -> float:
        seeds = point.get("seeds")
        return float(seeds[0]["hybridstate"]["token_hit_rate"]) if seeds else -1.0

    return min(points, key=lambda p: (abs(first_hit(p) - TARGET_HIT), p["ratio"]))


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
