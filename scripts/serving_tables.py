"""Generated blocks of docs/serving.md from recorded runs.

Sources: benchmarks/serve-*.json (`bench serve`), benchmarks/simulate-*.json and policies-*.json (`bench simulate`) and
benchmarks/exchange-*.json (`bench exchange`). A block without a source says that nothing was recorded.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pictures
import tables
from calibration_tables import paper
from recordings import BENCHMARKS, SERVED, recorded, source_line
from serving_tails import tails

from hybridstate.bench.serving_points import ways
from hybridstate.cli.output import counted
from hybridstate.cli.serving_output import dense_hits, earlier_commits, seed_counts

NOTHING = "No run on a GPU is recorded yet."

Result = Mapping[str, Any]


# -- tables, from parsed JSON -------------------------------------------------------------------------


def operating(result: Result) -> str:
    """Every arm at the operating point and each limit, and on the control; changes with their range over the seeds."""
    chosen = result["operating_point"]["ratio"]
    rows = []
    for name, points in (("trace", result["points"]), ("control", result["control"])):
        found = [p for p in points if p["ratio"] == chosen]
        found.sort(key=lambda p: -p["limit"])
        dense = {p["limit"]: p for p in found if p["arm"] == "dense"}
        rows += [_row(name, p, dense.get(p["limit"])) for p in found]
    head = (
        "arm",
        "on",
        "running",
        "native",
        "compressed",
        "token hit",
        "mean TTFT",
        "P95 TTFT",
        "TPOT",
    )
    return tables.markdown((*head, "mean E2E", "TTFT against dense", "seeds"), rows)


def _row(name: str, point: Result, dense: Result | None) -> list[str]:
    head = [point["arm"], name, str(point["limit"])]
    if "mean" not in point:
        return [*head, *[""] * 7, "not run", ""]
    mean, ours = point["mean"], point["mean"]["hybridstate"]
    change = point.get("against_dense", {}).get("ttft")
    return [
        *head,
        f"{point['slots_native']:,}",
        f"{point['slots_compressed']:,}",
        tables.percent(ours["token_hit_rate"]),
        f"{mean['mean_ttft_ms'] / 1e3:.3f} s",
        f"{mean['p95_ttft_ms'] / 1e3:.3f} s",
        f"{mean['mean_tpot_ms']:.2f} ms",
        f"{mean['mean_e2e_latency_ms'] / 1e3:.3f} s",
        "" if change is None else f"{100 * change:+.1f} %{spread(point, dense)}",
        str(len(point["seeds"])),
    ]


def spread(point: Result, dense: Result | None) -> str:
    """Lowest and highest change of the mean TTFT against dense of one seed; empty with fewer than two seeds of both."""
    if dense is None or point is dense or "mean" not in dense:
        return ""
    both = zip(point["seeds"], dense["seeds"], strict=False)
    found = [100 * (ours["mean_ttft_ms"] / theirs["mean_ttft_ms"] - 1) for ours, theirs in both]
    return f" ({min(found):+.1f} to {max(found):+.1f})" if len(found) > 1 else ""


def sweep(result: Result) -> str:
    """Mean TTFT, its change against dense and token hit rate of every arm at every working set, at the first limit;
    (n) where n seeds ran.
    """
    limit = result["points"][0]["limit"]
    points = [p for p in result["points"] if p["limit"] == limit]
    ratios = sorted({p["ratio"] for p in points})
    found = {(p["arm"], p["ratio"]): p for p in points}
    rows = []
    for arm in dict.fromkeys(p["arm"] for p in points):
        cells = []
        for ratio in ratios:
            point = found.get((arm, ratio))
            if point is None or "mean" not in point:
                cells.append("")
                continue
            mean = point["mean"]
            hit = 100 * mean["hybridstate"]["token_hit_rate"]
            few = f" ({len(point['seeds'])})" if len(point["seeds"]) < result["seeds"] else ""
            change = point.get("against_dense", {}).get("ttft")
            changed = "" if arm == "dense" or change is None else f", {100 * change:+.1f} %"
            cells.append(f"{mean['mean_ttft_ms'] / 1e3:.3f} s{changed}, hit {hit:.1f} %{few}")
        rows.append([arm, *cells])
    return tables.markdown(["arm", *(f"ratio {ratio:g}" for ratio in ratios)], rows)


def changes(result: Result) -> dict[str, float]:
    """Change of the mean TTFT against dense of every other arm, at the operating point and the first limit."""
    chosen, limit = result["operating_point"]["ratio"], result["points"][0]["limit"]
    return {
        p["arm"]: p["against_dense"]["ttft"]
        for p in result["points"]
        if p["ratio"] == chosen
        and p["limit"] == limit
        and p["arm"] != "dense"
        and "against_dense" in p
    }


def changes_by_ratio(results: Sequence[Result]) -> str:
    """The README's table: token hit rate of dense states and change of the mean TTFT of each other arm by working set,
    at the first limit of each run; * where a point has fewer seeds than asked for.
    """
    ratios = sorted({p["ratio"] for result in results for p in result["points"]})
    rows = []
    for result in results:
        limit = result["points"][0]["limit"]
        points = [p for p in result["points"] if p["limit"] == limit and "mean" in p]
        found = {(p["arm"], p["ratio"]): p for p in points}
        for arm in dict.fromkeys(p["arm"] for p in points):
            cells = [_change(found.get((arm, ratio)), result["seeds"]) for ratio in ratios]
            name = "tokens that dense hits" if arm == "dense" else f"TTFT of {arm}"
            rows.append([f"`{result['model']}`, {name}", *cells])
    return tables.markdown(
        ["working set over dense slots", *(f"{ratio:g}" for ratio in ratios)], rows
    )


def _change(point: Result | None, seeds: int) -> str:
    if point is None or (point["arm"] != "dense" and "against_dense" not in point):
        return ""
    if point["arm"] == "dense":
        return tables.percent(point["mean"]["hybridstate"]["token_hit_rate"])
    few = "*" if len(point["seeds"]) < seeds else ""
    return f"{100 * point['against_dense']['ttft']:+.1f} %{few}"


def changes_block() -> str:
    """Recorded runs of states alone on one GPU."""
    found = [document["result"] for _, document in recorded(SERVED[0])]
    alone = [r for r in found if r["points"][0]["tp"] == 1 and r["budget_scope"] == "state"]
    return changes_by_ratio(alone) if alone else NOTHING


def finding(result: Result) -> str:
    """What the rule chose and what the arms gained there, beside the paper's figure."""
    point = result["operating_point"]
    gains = [(change, arm) for arm, change in changes(result).items()]
    hit = tables.percent(point["dense_token_hit_rate"])
    text = (
        f"The rule chose ratio {point['ratio']:g} (dense token hit, mean of the seeds: {hit}; by ratio: "
        f"{dense_hits(point)})."
        if len(point["dense_token_hit_rates"]) > 1
        else f"One ratio ran, {point['ratio']:g} (dense token hit {hit})."
    )
    ours = [(change, arm) for change, arm in gains if arm.startswith(("nr", "wr"))]
    if ours:
        best, arm = min(ours)
        cut = {
            name: paper()[f"dasc.ttft_reduction.{name}"] for name in ("qwen3_next", "kimi_linear")
        }
        text += (
            f" There `{arm}` changes the mean TTFT by {100 * best:+.1f} %, the best of the arms with a cutoff; "
            f"DASC reports -{cut['qwen3_next']:g} % (Qwen3-Next) and -{cut['kimi_linear']:g} % (Kimi-Linear) with NR, "
            "FP32 checkpoints, 8 ranks and hardly any queue, on its own trace."
        )
        text += _room(result, arm)
    if gains and min(gains) not in ours:
        best, arm = min(gains)
        what = "Best of all arms:" if ours else "The best change of the mean TTFT there:"
        text += f" {what} `{arm}`, {100 * best:+.1f} %."
    return text


def _room(result: Result, arm: str) -> str:
    """Why the arm's change is no larger: it hits all that can be hit; and what it is one ratio further."""
    chosen, limit = result["operating_point"]["ratio"], result["points"][0]["limit"]
    means = {
        (p["arm"], p["ratio"]): p["mean"]
        for p in result["points"]
        if p["limit"] == limit and p["balance"] == "off" and "mean" in p
    }

    def hit(mean: Result) -> float:
        return float(mean["hybridstate"]["token_hit_rate"])

    most = max(map(hit, means.values()))
    if (arm, chosen) not in means or most - hit(means[arm, chosen]) > 0.0005:
        return ""
    text = (
        f" It hits {tables.percent(most)} of the tokens, as much as any arm at any ratio: more slots would bring no "
        "more hits"
    )
    if most - hit(means["dense", chosen]) < 0.0005:
        text += ", and dense states hit as many"
    larger = [ratio for name, ratio in means if name == arm and ratio > chosen]
    if not larger or ("dense", min(larger)) not in means:
        return f"{text}."
    before, after = (means[name, min(larger)]["mean_ttft_ms"] for name in ("dense", arm))
    return (
        f"{text}. With fewer dense slots, at ratio {min(larger):g}, the same arm changes the mean TTFT by "
        f"{100 * (after / before - 1):+.0f} % ({before / 1e3:.2f} to {after / 1e3:.2f} s)."
    )


def heading(result: Result) -> str:
    """A run in words: model, ranks, think time, budget."""
    parts = [result["model"]]
    parts += [f"{result['profile']['tp']} ranks"] if result["profile"]["tp"] > 1 else []
    think = result["think_s"]
    parts.append(f"{think:g} s of think time" if think else "no think time")
    parts += ["budget of states and KV"] if result["budget_scope"] == "state+kv" else []
    return ", ".join(parts)


def fit(result: Result) -> str:
    """Measured and predicted points of a fit; empty without one."""
    fitted = result.get("fit")
    if not fitted:
        return ""
    held = [row for row in fitted["points"] if not row["fitted"]]
    within = sum(abs(r["ttft_error"]) <= 0.15 and abs(r["hit_error"]) <= 0.03 for r in held)
    return (
        f"Cost model fitted on {len(fitted['points']) - len(held)} points: of the {len(held)} others {within} are "
        f"within 15 % in mean TTFT and 3 points in hit rate; largest errors "
        f"{100 * fitted['largest_ttft_error']:.1f} % and {100 * fitted['largest_hit_error']:.1f} points."
        f"{_of_the_fitted(fitted['points'])}"
    )


def _of_the_fitted(points: Sequence[Result]) -> str:
    """Errors of the points that a model was fitted on, and how many of all predictions are too long."""
    used = [row for row in points if row["fitted"] and "arm" in row]
    if not used:
        return ""
    worst = max(used, key=lambda row: abs(row["ttft_error"]))
    hit = max(abs(row["hit_error"]) for row in used)
    long = sum(row["ttft_error"] > 0 for row in points)
    return (
        f" Of the points that it was fitted on they are {100 * abs(worst['ttft_error']):.1f} % (`{worst['arm']}` at "
        f"ratio {worst['ratio']:g}) and {100 * hit:.1f} points; {long} of all {len(points)} predicted TTFTs are too "
        "long."
    )


def beside(result: Result, measured: Result) -> str:
    """What a fitted simulation says of the arms that were measured; empty where the rule chose another ratio."""
    chosen = result["operating_point"]["ratio"]
    if measured["operating_point"]["ratio"] != chosen:
        return ""
    ours = changes(result)
    both = {arm: (was, ours[arm]) for arm, was in changes(measured).items() if arm in ours}
    if not both:
        return ""
    pairs = (f"`{arm}` {100 * was:+.1f} / {100 * now:+.1f} %" for arm, (was, now) in both.items())
    text = f"Change of the mean TTFT at ratio {chosen:g}, measured / simulated: {', '.join(pairs)}."
    turned = [f"`{arm}`" for arm, (was, now) in both.items() if was * now < 0]
    return f"{text} The sign differs for {', '.join(turned)}." if turned else text


def conditions(result: Result, own: str | None = None) -> str:
    """What was served, on what, and whose seconds these are; `own` is the commit that its document names."""
    trace, profile = result["trace"], result["profile"]
    seconds = (
        f"simulated, seconds: {result['cost_model']['source']}"
        if result["simulated"]
        else f"measured on {result['device']['name']} ({result['dtype']})"
    )
    seeds = seed_counts(result)
    if seeds != counted(result["seeds"], "seed"):
        seeds += (
            " a point, as the tables say, and changes against dense over the seeds that both have"
        )
    if told := earlier_commits(result, own):
        seeds += f"; {told}"
    different = ways([*result["points"], *result["control"]])
    if len(different) > 1:
        told = "; ".join(f"{name} ({', '.join(arms)})" for name, arms in different.items())
        seeds += f". Seeds ran in different ways, whose seconds do not compare: {told}"
    placed = (
        f"; TP {profile['tp']}, placements {', '.join(profile['balances'])}"
        if profile["tp"] > 1
        else ""
    )
    return (
        f"`{result['model']}`: {seconds}{placed}. Trace `{trace['name']}`: {trace['note']}. {profile['note']}. "
        f"{counted(result['clients'], 'client')}, think time {result['think_s']:g} s, budget {result['budget_scope']}, "
        f"policy {result['policy']}, working set {counted(result['working_set'], 'state')}, "
        f"{seeds}."
    )


# -- the page -----------------------------------------------------------------------------------------


def runs(pattern: str) -> str:
    """All tables of every recorded run."""
    parts = []
    for path, document in recorded(pattern):
        result = document["result"]
        parts += [
            f"### {heading(result)}",
            conditions(result, (document.get("provenance") or {}).get("commit")),
            finding(result),
            *filter(None, (" ".join(filter(None, (fit(result), fitted(path, document)))),)),
            operating(result),
            *([] if result["simulated"] else [tails(result)]),
            sweep(result),
            *(
                pictures.link(f"serving/{path.stem}", name, heading(result))
                for name in ("serving_cutoffs", "serving_ratios")
                if (pictures.FIGURES / "serving" / path.stem / f"{name}.png").exists()
            ),
            source_line(path, document),
        ]
    return "\n\n".join(parts) or NOTHING


def fitted(path: Path, document: Mapping[str, Any]) -> str:
    """The comparison of a fitted simulation with the recorded run of its name, or with the one that was fitted.

    simulate-NAME.json is about the run in serve-NAME.json; where no costs were fitted on that run, the text says so.
    """
    words = document["arguments"]
    if "--fit" not in words:
        return ""
    source = words[words.index("--fit") + 1]
    for name in (path.name.replace("simulate-", "serve-", 1), source):
        if not (BENCHMARKS / name).exists():
            continue
        measured = json.loads((BENCHMARKS / name).read_text())["result"]
        text = beside(document["result"], measured)
        if text and measured.get("budget_scope") == document["result"].get("budget_scope"):
            return text if name == source else f"{text} Nothing of that run was fitted."
    return ""


def exchange_block() -> str:
    """Stores and loads of checkpoints whose units lie on other ranks, by placement."""
    parts = []
    for path, document in recorded("exchange-*.json"):
        result = document["result"]
        rows = [
            [
                str(row["w_max"]),
                row["mode"],
                str(row["checkpoints"]),
                f"{row['capacity']:.2f}x",
                f"{row['remote_units']:,} of {row['units']:,}",
                f"{row['remote_bytes'] / 1e6:.2f}",
                *(f"{1e6 * row[name]['median']:.0f}" for name in ("store_s", "load_s")),
            ]
            for row in result["exchange"]
        ]
        head = [
            "W_max",
            "placement",
            "checkpoints",
            "capacity",
            "remote units",
            "MB sent",
            "store, µs",
            "load, µs",
        ]
        tp, ran = result["protocol"]["tp"], result["protocol"]["backend"]
        parts += [
            f"`{result['model']}`, {tp} ranks on {tp} {document['provenance']['device']} ({ran}), "
            "synthetic states; capacity: dense bytes over slot bytes on the fullest rank; times of "
            "the slowest rank, gather and scatter included.",
            tables.markdown(head, rows),
            source_line(path, document),
        ]
    return "\n\n".join(parts) or NOTHING


BESIDE_DENSE = ("nr-64", "nr-64+int8", "damp")
"""Arms that the comparison of policies shows."""


def policies_block() -> str:
    """Dense and the arms of `BESIDE_DENSE` at the working set that the rule chooses under each policy, and at LRU's."""
    parts = []
    for name, others in pictures.policies().items():
        lru = others[0][1]["result"]
        at = lru["operating_point"]["ratio"]
        rows = []
        for _, document in others:
            result = document["result"]
            chosen = result["operating_point"]["ratio"]
            for ratio in dict.fromkeys((at, chosen)):
                rows.append([result["policy"], f"{ratio:g}", *_policy_cells(result, ratio)])
        head = (
            "policy",
            "ratio",
            "dense hit",
            "dense TTFT",
            *(f"TTFT, {arm}" for arm in BESIDE_DENSE),
        )
        parts += [
            f"**{heading(lru)}.** Ratio {at:g} is LRU's operating point; each other policy's own follows it.",
            tables.markdown(head, rows),
            pictures.link(f"serving/{name}", "serving_policies", f"{heading(lru)}, by policy"),
            *(source_line(path, document) for path, document in others[1:]),
        ]
    return "\n\n".join(parts) or NOTHING


def _policy_cells(result: Result, ratio: float) -> list[str]:
    limit = result["points"][0]["limit"]
    found = {p["arm"]: p for p in result["points"] if p["ratio"] == ratio and p["limit"] == limit}
    dense = found["dense"]["mean"]
    changed = (f"{100 * found[arm]['against_dense']['ttft']:+.1f} %" for arm in BESIDE_DENSE)
    return [
        tables.percent(dense["hybridstate"]["token_hit_rate"]),
        f"{dense['mean_ttft_ms'] / 1e3:.2f} s",
        *changed,
    ]


BLOCKS: dict[str, Callable[[], str]] = {
    "policies": policies_block,
    "exchange": exchange_block,
    "serve": lambda: runs(SERVED[0]),
    "serve-changes": changes_block,
    "simulate": lambda: runs(SERVED[1]),
}
