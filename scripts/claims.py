"""What the two papers report beside what is recorded here: the first table of docs/results.md.

Each claim reads the recordings that speak to it and says nothing where there are none. Published values are those of
tests/data/paper_numbers.json, of the papers' models; a difference is not a contradiction where the models differ.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import quality_tables
from calibration_tables import PUBLISHED, paper
from findings import models, over_seeds, times
from quality_findings import beyond, own
from recordings import (
    CALIBRATED,
    DECODED,
    QUALITY,
    SERVED,
    VALIDATED,
    recorded,
    runs,
    synthetic,
    trained,
)
from tables import Result, markdown, percent

from hybridstate.figures.paired import cutoffs, difference, masks

Results = Mapping[str, Result]


THREE = ("qwen3_next", "kimi_linear", "kimi_k3")
KINDS = ("gdn", "kda")
SYNTHETIC = " (synthetic weights)"
LEAD = (
    "Published: Qwen3-Next / Kimi-Linear / Kimi-K3 (DASC), GDN / KDA (DAMP), or as named. Here: `tiny-gdn` / "
    "`tiny-kda`, two models of five million parameters trained so that only the state can answer, or as named; "
    "full-size models have synthetic weights, which tell time and nothing about answers. Where models differ "
    "so much, another number is no contradiction, but a reason to measure the model in question."
)


def of(pattern: str, wanted: Callable[[dict[str, Any]], bool], merge: Any = None) -> Results:
    return {run.name: run.result for run in runs(pattern, wanted, merge)}


def validated() -> Results:
    return of(VALIDATED, lambda result: "validation" in result)


def calibrated() -> Results:
    return of(CALIBRATED, trained)


def full_size() -> Results:
    """Decode steps of full-size models, synthetic weights."""
    return of(DECODED, synthetic)


def quality() -> Results:
    """Answers after compressed hits, where there are cutoffs."""
    found = of(QUALITY, lambda result: True, quality_tables.merged)
    return {name: result for name, result in found.items() if cutoffs(result)}


def values(key: str, names: Sequence[str], form: Callable[[Any], str]) -> str:
    """Published values of several models, in the order of `names`."""
    return " / ".join(form(paper()[key.format(name)]) for name in names)


def reductions(measure: str) -> str:
    """Published changes of a mean time with NR, and those of Kimi-K3 in a queue."""
    text = values(f"dasc.{measure}_reduction.{{}}", THREE, lambda v: f"-{v:g} %")
    queue = values(f"dasc.c3.reduction.{{}}.{measure}", ("l16", "l8"), lambda v: f"-{v:g} %")
    return f"{text} at 8 ranks with hardly any queue; Kimi-K3 in a queue {queue}"


def full_size_values(key: str, form: str) -> str:
    """Published values of the two models that are timed at full size."""
    named = (
        paper()[key]
        if key in paper()
        else {n: paper()[f"{key}.{n}"] for n in ("kimi_linear", "qwen36")}
    )
    return ", ".join(
        f"{label} {form.format(named[name])}"
        for name, label in (("kimi_linear", "Kimi-Linear"), ("qwen36", "Qwen3.6-35B"))
    )


# -- DASC ----------------------------------------------------------------------------------------------


def horizons() -> str:
    return models(validated(), lambda r: f"{r['validation']['horizons']['median']:.3f}")


def zeros_at_16() -> str:
    found = [
        abs(difference(result, group, ["nr-16"]).mean)
        for result in quality().values()
        for group in own(result)
        if 16 in cutoffs(result)
    ]
    return f"mean of the tasks: at most {100 * max(found):.1f} points" if found else ""


def zeros_at_512() -> str:
    def largest(result: Result) -> str:
        found = [
            difference(result, group, ["nr-512"]) for group in own(result) if 512 in cutoffs(result)
        ]
        least = min(found, key=lambda e: e.mean, default=None)
        return "" if least is None else f"{quality_tables.points(least)}"

    text = models(quality(), largest)
    return f"mean of the tasks, the worse of two boundaries: {text} points" if text else ""


def against_masks() -> str:
    found = [
        difference(result, group, [f"nr-{w}"], names)
        for result in quality().values()
        for group in own(result)
        for w in cutoffs(result)
        if (names := masks(result, w))
    ]
    better = sum(e.mean > 0 for e in found)
    clear = sum(e.mean > 0 and beyond(e) for e in found)
    return f"better in {better} of {len(found)} cases, beyond noise in {clear}" if found else ""


REPLAYED = 128
"""Cutoff of DASC's comparison of WR with NR."""


def replay() -> str:
    """At the cutoff of the published figure, and at any."""
    found = [
        (w, difference(result, group, [f"wr-{w}"], [f"nr-{w}"]))
        for result in quality().values()
        for group in own(result)
        for w in cutoffs(result)
    ]
    if not found:
        return ""
    width, best = max(found, key=lambda e: e[1].mean)
    clear = sum(e.mean > 0 and beyond(e) for _, e in found)
    at = [100 * e.mean for w, e in found if w == REPLAYED]
    same = f"{min(at):+.1f} to {max(at):+.1f} at {REPLAYED}; " if at else ""
    return (
        f"{same}at any cutoff at most {quality_tables.points(best)} ({width}), beyond noise in {clear} of "
        f"{len(found)} cases"
    )


def served(measure: str) -> str:
    """Change of the best arm with a cutoff alone at the rule's ratio; `measure` is ttft or e2e."""
    parts = []
    for pattern, label in zip(SERVED, ("measured", "simulated"), strict=True):
        found = []
        for _, document in recorded(pattern):
            result = document["result"]
            alone = result["budget_scope"] == "state" and result["points"][0]["tp"] == 1
            chosen, first = result["operating_point"], result["points"][0]["limit"]
            fits = label == "measured" or result["model"] not in measured_models()
            if not alone or not fits or not result["think_s"]:
                continue
            arms = [
                (p["against_dense"][measure], p["arm"])
                for p in result["points"]
                if (p["ratio"], p["limit"]) == (chosen["ratio"], first)
                and p["kind"] == "nr"
                and "against_dense" in p
            ]
            if arms:
                change, arm = min(arms)
                found.append(f"`{result['model']}` {100 * change:+.1f} % (`{arm}`)")
        if found:
            parts.append(f"{label}: {', '.join(found)}")
    queue = "in a queue, where dense states hit half of the tokens; "
    return queue + "; ".join(parts) if parts else ""


def measured_models() -> set[str]:
    return {document["result"]["model"] for _, document in recorded(SERVED[0])}


# -- DAMP ----------------------------------------------------------------------------------------------


def concentration() -> str:
    def share(result: Result) -> str:
        found = result["error_concentration"].get("reordered")
        return percent(found["mean_over_heads"], 0) if found else ""

    return models(calibrated(), share)


def domains() -> str:
    def least(result: Result) -> str:
        found = [d["with_reference"] for d in result["validation"]["decay"]["domains"]]
        return f"{min(x for x in found if x is not None):.3f}"

    return models(validated(), least)


def halves() -> str:
    text = models(
        calibrated(),
        lambda r: percent(r["over_seeds"]["selector_agreement"]["damp"]["overlap"]["mean"]),
    )
    return f"{text}, values as they are" if text else ""


def decay_in_the_risk() -> str:
    text = models(calibrated(), lambda r: over_seeds(r, "damp+reorder", "damp-error-only+reorder"))
    return f"KL over that of the local error alone {text}" if text else ""


ANSWERED = ("fp32", "damp+reorder", "int8-step")
REORDERED = "int8-step+reorder"
"""Formats as DAMP reports them: it scales and reorders values."""


def plain_int8() -> str:
    """The KL as published, with values reordered, and answers to recall questions after thousands of updates."""

    def recall(result: Result) -> str:
        rows = (result.get("task_accuracy") or {}).get("rows", [])
        found = {row["format"]: row["accuracy"] for row in rows if row["task"] == "recall"}
        if not found.keys() >= set(ANSWERED):
            return ""
        return ", ".join(f"{100 * found[name]:.1f}" for name in ANSWERED) + " %"

    text = models(calibrated(), lambda r: times(r, "damp+reorder", "int8-step"))
    answers = models(calibrated(), recall)
    parts = [f"KL of DAMP over that of plain INT8 {text}"] if text else []
    return "; ".join([*parts, *([f"recall {answers}"] if answers else [])])


def reordered_int8() -> str:
    """DAMP's "INT8+SR": values scaled and reordered, no channel in FP16."""
    text = models(calibrated(), lambda r: times(r, REORDERED, "damp+reorder"))
    return f"KL over that of DAMP {text}" if text else ""


def update() -> str:
    found: dict[int, list[float]] = {}
    for _, document in recorded("update.json"):
        for entry in document["result"].get("fastest", []):
            rivals = [
                x["over_damp"] for name, x in entry["fastest"].items() if name.startswith("fp32")
            ]
            if entry["state"] == "damp" and rivals:
                found.setdefault(entry["batch"], []).append(min(rivals))
    if not found:
        return ""
    at = 256 if 256 in found else max(found)
    most = max(found, key=lambda batch: max(found[batch]))
    return (
        f"{min(found[at]):.2f}x to {max(found[at]):.2f}x over the fastest FP32 kernel of each layer at batch {at}, "
        f"at most {max(found[most]):.2f}x (batch {most})"
    )


def savings(text: Callable[[Result], str]) -> str:
    """Of each full-size model at batch 256."""
    parts = []
    for name, result in full_size().items():
        row = next((s for s in result["savings"] if s["batch"] == 256), None)
        if row:
            parts.append(f"{name.removesuffix(SYNTHETIC)} {text(row)}")
    return ", ".join(parts)


def recurrent_share() -> str:
    return savings(lambda row: percent(row["recurrent_share"]))


def whole_step() -> str:
    def line(row: Result) -> str:
        return f"-{percent(row['tpot_cut'])} where bytes allow -{percent(row['cut_by_bytes'])}"

    return savings(line)


def minutes() -> str:
    found = of(CALIBRATED, synthetic)
    parts = [
        f"{name.removesuffix(SYNTHETIC)} {result['measured']['wall_s'] / 60:.1f} min"
        for name, result in found.items()
        if "measured" in result
    ]
    said = "without the search for scales and orders, with validation"
    return f"{', '.join(parts)}, {said}" if parts else ""


DASC: tuple[tuple[str, Callable[[], str], Callable[[], str], str], ...] = (
    (
        "static horizons rank units as observed ones do (Spearman, median)",
        lambda: values("dasc.table1b.{}.spearman_Hs_He", THREE, lambda v: f"{v[0]:.3f}"),
        horizons,
        "#static-horizons-against-observed-ones",
    ),
    (
        "zeros (NR) at `W_max` 16 change answers by",
        lambda: (
            f"at most {paper()['dasc.claim.kimi&qwen W16 max gap']:g} points on any benchmark "
            "(Kimi-Linear, Qwen3-Next)"
        ),
        zeros_at_16,
        "#answers-after-compressed-hits",
    ),
    (
        "zeros at 512",
        lambda: (
            f"a loss of at most {paper()['dasc.claim.k3 W512 max gap IMO']:g} points on any benchmark (Kimi-K3)"
        ),
        zeros_at_512,
        "#answers-after-compressed-hits",
    ),
    (
        "the kept units beat as many random ones",
        lambda: (
            f"{paper()['dasc.claim.kimi dasc>random of 15']:g} of 15 (Kimi-Linear and Kimi-K3 each), mixed "
            "for Qwen3-Next"
        ),
        against_masks,
        "#hits-against-random-masks-of-the-same-bytes",
    ),
    (
        "replaying (WR) over zeros, in points of answers",
        lambda: "{:+g} to {:+g} at 128 (five benchmarks, Kimi-Linear)".format(
            *paper()["dasc.wr.accuracy_gain_W128"]
        ),
        replay,
        "#answers-after-compressed-hits",
    ),
    (
        "mean time to the first token with NR",
        lambda: reductions("ttft"),
        lambda: served("ttft"),
        "serving.md#measured",
    ),
    (
        "mean time of a request with NR",
        lambda: reductions("e2e"),
        lambda: served("e2e"),
        "serving.md#measured",
    ),
)
DAMP: tuple[tuple[str, Callable[[], str], Callable[[], str], str], ...] = (
    (
        "squared INT8 error in the worst eighth of the key channels, values scaled and reordered",
        lambda: " / ".join(f"{100 * paper()['damp.error_concentration'][k]:.0f} %" for k in KINDS),
        concentration,
        "#where-the-error-of-int8-sits",
    ),
    (
        "order of the decays in code and general text against math (Spearman, least)",
        lambda: values("damp.decay_rank_stability.{}", KINDS, lambda v: f"{min(v):.3f}"),
        domains,
        "#decay-of-three-kinds-of-text",
    ),
    (
        "channels that two halves of the prompts both choose",
        lambda: " / ".join(f"{paper()['damp.split_overlap'][k]:g} %" for k in KINDS),
        halves,
        "#agreement-of-two-halves-of-the-prompts",
    ),
    (
        "error times decay chooses the channels",
        lambda: "the best of the selectors compared (KDA, three benchmarks)",
        decay_in_the_risk,
        "#which-key-channels-are-kept-in-fp16",
    ),
    (
        "answers with FP32 states, DAMP, plain INT8",
        lambda: (
            "AIME 2026 "
            + ", ".join(f"{paper()[PUBLISHED[name]]:g}" for name in ANSWERED)
            + " % (Qwen3.6-35B; DAMP is 63.98 + 19.84)"
        ),
        plain_int8,
        "#storage-formats-of-the-live-state",
    ),
    (
        "the same, INT8 with values scaled and reordered",
        lambda: f"AIME 2026 {paper()[PUBLISHED[REORDERED]]:g} % (Qwen3.6-35B)",
        reordered_int8,
        "#storage-formats-of-the-live-state",
    ),
    (
        "one update over FP32",
        lambda: f"up to {paper()['damp.kernel_speedup']:g}x (batch 16 to 256, SGLang's FP32)",
        update,
        "kernels.md#forms",
    ),
    (
        "share of the updates in a step at batch 256",
        lambda: f"Qwen3.6-35B {paper()['damp.recurrent_share']:g} %",
        recurrent_share,
        "#time-per-output-token-at-full-size",
    ),
    (
        "time per output token at batch 256",
        lambda: full_size_values("damp.tpot", "-{:g} %"),
        whole_step,
        "#time-per-output-token-at-full-size",
    ),
    (
        "a calibration takes",
        lambda: full_size_values("damp.calibration_minutes", "{:g} min"),
        minutes,
        "#calibration-at-full-size",
    ),
)


def claims() -> str:
    """The table, DASC's claims first; "" where nothing is recorded."""
    rows = [
        [f"[{claim}]({link})", published(), found]
        for claim, published, here, link in (*DASC, *DAMP)
        if (found := here())
    ]
    table = markdown(["", "published", "here"], rows).replace(
        "---:", "---", 2
    )  # texts stand on the left
    return f"{LEAD}\n\n{table}" if rows else ""
