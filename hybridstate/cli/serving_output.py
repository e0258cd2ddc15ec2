"""Tables of `bench serve` and `bench simulate`: fit, every point, operating point, control."""

from collections.abc import Mapping
from typing import Any

from hybridstate.bench.serving_points import ways
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
    _points_table(
        out,
        f"{result['model']}: {synthetic}trace {result['trace']['name']}, {how}, {counted(result['clients'], 'client')}",
        result["points"],
        note=f"{result['trace']['note']}; {result['profile']['note']}; seconds: {seconds}; "
        f"ratio: working set of {counted(result['working_set'], 'state')} over dense slots; every arm has the dense "
        f"arm's bytes; means of {seed_counts(result)} over all requests; "
        + (
            "change: mean TTFT against dense"
            if comparable
            else "times on a CPU say nothing about GPUs, so no change against dense is shown"
        ),
        change=comparable,
    )
    every = (*result["points"], *result["control"])
    short = [
        f"{p['arm']} at ratio {p['ratio']:g}"
        for p in every
        if 0 < len(p.get("seeds", ())) < result["seeds"]
    ]
    if short:
        out.warn(f"fewer than {counted(result['seeds'], 'seed')}: {', '.join(short)}")
    for text in dict.fromkeys(p["not_continued"] for p in every if "not_continued" in p):
        out.warn(f"no more seeds of {text}")
    different = ways(every)
    if len(different) > 1:
        told = "; ".join(f"{name} ({', '.join(arms)})" for name, arms in different.items())
        out.warn(f"seeds ran in different ways, whose seconds do not compare: {told}")
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
            result["control"],
            change=comparable,
            note="no cache can gain here; live states of fewer bytes still decode faster",
        )


def _on_gpu(result: dict[str, Any]) -> bool:
    return str(result["device"]["device"]).startswith("cuda")


def _points_table(
    out: Output, title: str, points: list[dict[str, Any]], note: str, *, change: bool
) -> None:
    out.table(
        title,
        (
            "arm",
            "ratio",
            "limit",
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
        [_point_row(point)[: None if change else -1] for point in points],
        note=note,
    )
    for text in dict.fromkeys(point["skipped"] for point in points if "skipped" in point):
        out.warn(text)


def seed_counts(result: Mapping[str, Any]) -> str:
    """How many seeds the points are means of: one number, or the least and the most."""
    each = [len(p["seeds"]) for p in (*result["points"], *result["control"]) if "mean" in p]
    least = min(each, default=result["seeds"])
    most = counted(result["seeds"], "seed")
    return most if least == result["seeds"] else f"{least} to {most}"


def dense_hits(operating: Mapping[str, Any]) -> str:
    """Dense token hit rate at every ratio, the smallest first, in whatever order they ran."""
    rates = sorted(operating["dense_token_hit_rates"].items(), key=lambda item: float(item[0]))
    return ", ".join(f"{ratio} {100 * rate:.1f} %" for ratio, rate in rates)


def _point_row(point: dict[str, Any]) -> tuple[object, ...]:
    head = (point["arm"], f"{point['ratio']:g}", point["limit"])
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
