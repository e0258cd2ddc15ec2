"""Tables of `bench serve` and `bench simulate`: fit, every point, operating point, control."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridstate.bench.serving_points import other_commits, ways
from hybridstate.cli.output import Output, counted


def serving_tables(out: Output, result: dict[str, Any]) -> None:
    """Fit, every point, the control."""
    if result["fit"] is not None:
        _fit_table(out, result["fit"])
    how = "simulated" if result["simulated"] else f"served on {result['device']['name']}"
    ranks = result["profile"]["tp"]
    how += f" at TP {ranks}" if ranks > 1 else ""
    synthetic = "synthetic " if result["trace"]["synthetic"] else ""
    operating = result["operating_point"]
    seconds = result["cost_model"]["source"] if result["simulated"] else "of the engine"
    comparable = result["simulated"] or _on_gpu(result)
    means = f"means of {seed_counts(result)} over all requests"
    if not any("mean" in p for p in (*result["points"], *result["control"])):
        means = "no seed ran"
    told = earlier_commits(result)
    _points_table(
        out,
        f"{result['model']}: {synthetic}trace {result['trace']['name']}, {how}, {counted(result['clients'], 'client')}",
        result,
        "points",
        note=f"{result['trace']['note']}; {result['profile']['note']}; seconds: {seconds}; "
        f"ratio: working set of {counted(result['working_set'], 'state')} over dense slots; every arm has the dense "
        f"arm's bytes; {means}; {f'{told}; ' if told else ''}"
        + (
            "change: mean TTFT against dense"
            + (", over the seeds that both have" if _uneven(result) else "")
            if comparable
            else "times on a CPU say nothing about GPUs, so no change against dense is shown"
        ),
        change=comparable,
    )
    _warn(out, result)
    if operating["dense_token_hit_rate"] is None:
        out.warn("the dense arm ran nowhere, so there is no operating point")
        return
    out.text(
        f"operating point: ratio {operating['ratio']:g}, dense token hit rate "
        f"{100 * operating['dense_token_hit_rate']:.1f} % ({operating['rule']}); by ratio: {dense_hits(operating)}"
    )
    if result["control"]:
        _points_table(
            out,
            "control: synthetic prompts that share nothing",
            result,
            "control",
            change=comparable,
            note="no cache can gain here; live states of fewer bytes still decode faster",
        )


def _on_gpu(result: dict[str, Any]) -> bool:
    return str(result["device"]["device"]).startswith("cuda")


def _points_table(
    out: Output, title: str, result: Mapping[str, Any], name: str, note: str, *, change: bool
) -> None:
    """The table of `points` or `control`, with the number of seeds where points differ in it."""
    uneven = _uneven(result)
    out.table(
        title,
        (
            "arm",
            "ratio",
            "limit",
            *(("seeds",) if uneven else ()),
            "native",
            "compressed",
            "hit %",
            "TTFT s",
            "P95 s",
            "TPOT ms",
            "E2E s",
            "replayed",
            "evicted",
            *(("change",) if change else ()),
        ),
        [_point_row(point, seeds=uneven)[: None if change else -1] for point in result[name]],
        note=note,
    )


def _warn(out: Output, result: Mapping[str, Any]) -> None:
    """What is missing, where and why, and what does not compare."""
    every = (*result["points"], *result["control"])
    if late := result.get("not_begun", 0):
        out.warn(f"the deadline came before {counted(late, 'run')}, of one seed each")
    for name, said in (("skipped", ""), ("not_continued", "no more seeds of ")):
        for why, points in _by_reason(every, name).items():
            out.warn(f"{said}{_where(result, points)}: {why}")
    asked = result.get("seeds_asked", result["seeds"])
    if short := [p for p in every if 0 < len(p.get("seeds", ())) < asked]:
        out.warn(f"fewer than {counted(asked, 'seed')}: {_where(result, short, seeds=True)}")
    if left := [p for p in every if p.get("left_out")]:
        count = counted(sum(p["left_out"] for p in left), "seed")
        out.warn(f"{count} that ran behind a missing one left out: {_where(result, left)}")
    different = ways(every)
    if len(different) > 1:
        told = "; ".join(f"{name} ({', '.join(arms)})" for name, arms in different.items())
        out.warn(f"seeds ran in different ways, whose seconds do not compare: {told}")


def _by_reason(
    points: Sequence[Mapping[str, Any]], name: str
) -> dict[str, list[Mapping[str, Any]]]:
    """Points that have a reason of that name, by its text without the arm."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        if name in point:
            found.setdefault(point[name].removeprefix(f"{point['arm']}: "), []).append(point)
    return found


def _where(
    result: Mapping[str, Any], points: Sequence[Mapping[str, Any]], *, seeds: bool = False
) -> str:
    """Arms with their places, those of the same places together: `damp, int8 at ratios 0.5, 1; nr-16 at ratio 1`.

    Args:
        seeds: whether each place follows the number of seeds that it has, `damp (2 at ratio 0.5; 1 at ratios 1, 2)`.
    """
    first = result["points"][0]["limit"]
    control = {id(point) for point in result["control"]}
    found: dict[str, dict[tuple[bool, int, int], list[float]]] = {}
    for point in points:
        place = (id(point) in control, -point["limit"], -len(point["seeds"]) if seeds else 0)
        found.setdefault(point["arm"], {}).setdefault(place, []).append(point["ratio"])
    arms: dict[str, list[str]] = {}
    for arm, places in found.items():
        told = []
        for (of_control, limit, number), ratios in sorted(places.items()):
            listed = ", ".join(f"{ratio:g}" for ratio in sorted(ratios))
            text = f"{-number} " if seeds else ""
            text += f"at ratio{'' if len(ratios) == 1 else 's'} {listed}"
            text += f" with limit {-limit}" if -limit != first else ""
            told.append(text + (" of the control" if of_control else ""))
        joined = f"({'; '.join(told)})" if seeds else " and ".join(told)
        arms.setdefault(joined, []).append(arm)
    return "; ".join(f"{', '.join(names)} {text}" for text, names in arms.items())


def _seed_numbers(result: Mapping[str, Any]) -> list[int]:
    return [len(p["seeds"]) for p in (*result["points"], *result["control"]) if "mean" in p]


def _uneven(result: Mapping[str, Any]) -> bool:
    return len(set(_seed_numbers(result))) > 1


def seed_counts(result: Mapping[str, Any]) -> str:
    """How many seeds the points are means of: one number, or the least and the most."""
    each = _seed_numbers(result) or [result["seeds"]]
    most = counted(max(each), "seed")
    return most if min(each) == max(each) else f"{min(each)} to {most}"


def earlier_commits(result: Mapping[str, Any], own: str | None = None) -> str:
    """Where earlier seeds of a run that went on ran, in words; empty where all ran at its own commit."""
    commits = [commit[:7] for commit in other_commits(result.get("continued", ()), own)]
    if not commits:
        return ""
    return f"earlier seeds ran at commit{'' if len(commits) == 1 else 's'} {', '.join(commits)}"


def dense_hits(operating: Mapping[str, Any]) -> str:
    """Dense token hit rate at every ratio, the smallest first, in whatever order they ran."""
    rates = sorted(operating["dense_token_hit_rates"].items(), key=lambda item: float(item[0]))
    return ", ".join(f"{ratio} {100 * rate:.1f} %" for ratio, rate in rates)


def _point_row(point: dict[str, Any], *, seeds: bool) -> tuple[object, ...]:
    head: tuple[object, ...] = (point["arm"], f"{point['ratio']:g}", point["limit"])
    head += (len(point.get("seeds", ())),) if seeds else ()
    if "mean" not in point:
        return (*head, *(None,) * 10)
    mean, ours = point["mean"], point["mean"]["hybridstate"]
    change = point.get("against_dense", {}).get("ttft")
    return (
        *head,
        point["slots_native"],
        point["slots_compressed"],
        f"{100 * ours['token_hit_rate']:.1f}",
        f"{mean['mean_ttft_ms'] / 1e3:.3f}",
        f"{mean['p95_ttft_ms'] / 1e3:.3f}",
        f"{mean['mean_tpot_ms']:.2f}",
        f"{mean['mean_e2e_latency_ms'] / 1e3:.3f}",
        round(ours["replayed_tokens"]),
        round(ours["evictions_dense"] + ours["evictions_compressed"]),
        None if change is None else f"{100 * change:+.1f}%",
    )


def _fit_table(out: Output, fitted: dict[str, Any]) -> None:
    rows: list[tuple[object, ...]] = []
    for kind, terms in fitted["cost_model"].items():
        if kind == "source" or "standard_errors" not in terms:
            continue
        for term, value in terms.items():
            if term != "standard_errors":
                rows.append((kind, term, f"{value:.4g}", f"{terms['standard_errors'][term]:.2g}"))
    out.table("fitted cost model, seconds", ("operation", "per", "value", "+/-"), rows)
    out.table(
        "measured and predicted points",
        (
            "arm",
            "ratio",
            "limit",
            "used",
            "TTFT s",
            "predicted",
            "error",
            "hit %",
            "predicted",
            "points",
        ),
        [
            (
                row.get("arm", row["point"]),
                None if "ratio" not in row else f"{row['ratio']:g}",
                row.get("limit"),
                "fitted" if row["fitted"] else "predicted",
                f"{row['measured_ttft_s']:.3f}",
                f"{row['predicted_ttft_s']:.3f}",
                f"{100 * row['ttft_error']:+.1f}%",
                f"{100 * row['measured_hit']:.1f}",
                f"{100 * row['predicted_hit']:.1f}",
                f"{100 * row['hit_error']:+.1f}",
            )
            for row in fitted["points"]
        ],
        note=f"largest errors of points that were not fitted: {100 * fitted['largest_ttft_error']:.1f} % in mean TTFT, "
        f"{100 * fitted['largest_hit_error']:.1f} points in hit rate",
    )
