"""Markdown tables of recorded calibrations. Pure functions: the `result` of `calibrate` in, text out, "" where absent.

Published values come from tests/data/paper_numbers.json. The bodies of DAMP's tables 1-8 are not in the text that this
project holds, so only what its prose states can stand beside.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tables import Result, markdown, percent, significant, small

from hybridstate.cli.output import counted, interval

PAPER = Path(__file__).resolve().parents[1] / "tests" / "data" / "paper_numbers.json"

LATE = 129
"""First step of the bins of the second slope: growth that has settled, or has not."""

PLAIN = ("fp32", "fp16", "bf16", "fp8", "int8-step", "int8-step-stochastic", "int4", "nvfp4")
MIXED = ("damp", "damp-fp8", "damp-int4", "damp-nvfp4")
FORMATS = (
    *("fp32", "fp16", "bf16", "fp8", "int8-step", "int8-step+reorder", "int4", "int4+reorder"),
    *("nvfp4", "damp", "damp+reorder", "damp-fp8", "damp-int4", "damp-int4+reorder", "damp-nvfp4"),
)
SELECTORS = ("damp", "error-only", "retention-only", "energy", "random", "per-head")
BUDGETS = (0, 4, 8, 16, 32, 64)
BASELINES = (
    *("int8-step", "int8-step-stochastic", "int8-feedback-int4", "int8-feedback-fp16"),
    *("int8-every-4", "int8-every-8", "int8-every-16"),
    *("damp", "damp-every-4", "damp-every-8", "damp-every-16", "fp16"),
)


@cache
def paper() -> dict[str, Any]:
    """Published values by key."""
    return {row["key"]: row["value"] for row in json.loads(PAPER.read_text())["numbers"]}


def by_format(result: Result) -> dict[str, Any]:
    return {row["format"]: row for row in result["validation"]}


def kl(row: Result) -> str:
    """Mean and standard error over sequences."""
    if row["kl"] == 0:
        return "0"
    error = row["kl_error"]
    return f"{row['kl']:.2e}" + (f" ± {error:.0e}" if error is not None else "")


def state_error(value: float | None) -> str:
    """Four decimals; a state that has diverged in three digits."""
    return small(value) if value is None or value < 10 else f"{value:.2e}"


def bits(row: Result) -> str:
    ring = row["bits_per_value_with_ring"] - row["bits_per_value"]
    return f"{row['bits_per_value']:g}" + (f" + {ring:.3g} ring" if ring else "")


def below(result: Result) -> str:
    """What stands under a table of divergences."""
    seeds = result.get("validation_seeds", [result["seed"]])
    count, updates = result["validation_sequences"], result["validation_positions"]
    text = f"{counted(count, 'sequence')} of {counted(updates, 'update')}"
    if len(seeds) > 1 or missing_seeds(result):
        text += f" from {seeds_of(result)} (prompts, texts, random channels, rounding)"
    return f"{text}; ± is the standard error over sequences."


def missing_seeds(result: Result) -> list[str]:
    """Seeds that the recorded run was asked for and did not reach."""
    unfinished = result.get("unfinished") or []
    return [name.removeprefix("seed-") for name in unfinished if name.startswith("seed-")]


def seeds_of(result: Result) -> str:
    """How many seeds there are, and of how many where some are missing."""
    found = len(result.get("validation_seeds", [result["seed"]]))
    missing = len(missing_seeds(result))
    return f"{found} of {found + missing} seeds" if missing else counted(found, "seed")


def unfinished(result: Result) -> str:
    """What the recorded run was asked for and lacks, in one sentence; empty where it is whole."""
    parts = [f"seed {seed}" for seed in missing_seeds(result)]
    parts += ["the greedy row"] if "greedy" in (result.get("unfinished") or []) else []
    if not parts:
        return ""
    listed = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    verb = "is" if len(parts) == 1 else "are"
    return f"{listed[0].upper()}{listed[1:]} {verb} missing: the time on the GPU ended."


def divergence_rows(
    result: Result, names: tuple[str, ...], more: Callable[[str, Any], list[str]]
) -> list[list[str]]:
    """Format, bits, KL, its spread over seeds, top-1, state error, perplexity, then `more`."""
    found = by_format(result)
    return [
        [
            name,
            bits(row),
            kl(row),
            significant(row.get("kl_spread")),
            percent(row["top1"], 2),
            state_error(row["state_error"]),
            f"{row['perplexity_ratio']:.4f}x",
            *more(name, row),
        ]
        for name in names
        if (row := found.get(name)) is not None
    ]


COLUMNS = (
    *("format", "bits/value", "KL, nats/token", "SD over seeds", "same top-1"),
    *("state error", "perplexity"),
)

PUBLISHED = {
    "fp32": "damp.acc.qwen36.aime.fp32",
    "int8-step": "damp.acc.qwen36.aime.int8",
    "int8-step+reorder": "damp.acc.qwen36.aime.int8_sr",
    "damp+reorder": "damp.acc.qwen36.aime.damp",
}
"""Formats whose answers DAMP reports, by our names; its SR is scaling and reordering."""


def formats(result: Result) -> str:
    """Every format; beside them DAMP's published accuracies of the same formats."""

    def beside(name: str, _: Any) -> list[str]:
        return [f"{paper()[PUBLISHED[name]]:g} %" if name in PUBLISHED else ""]

    gdn = result["model"]["kind"] == "gdn"  # the published model is one
    rows = divergence_rows(result, FORMATS, beside if gdn else lambda *_: [])
    columns = [*COLUMNS, "DAMP: AIME 2026, Qwen3.6-35B"] if gdn else COLUMNS
    table = markdown(columns, rows)
    return f"{table}\n\n{below(result)} State error: relative, after the last update."


def selectors(result: Result) -> str:
    """DAMP tables 4 and 8: which channels are protected, at the same bits."""

    def name_of(selector: str, reorder: bool) -> str:
        middle = "" if selector == "damp" else f"-{selector}"
        return f"damp{middle}" + ("+reorder" if reorder else "")

    objective = result["objective"]
    parts = []
    for reorder in (True, False):
        names = tuple(name_of(s, reorder) for s in SELECTORS)
        rows = divergence_rows(
            result, names, lambda name, _: [significant(objective.get(name)), slope(result, name)]
        )
        if len(rows) < 2:
            continue
        title = "INT8, values scaled and reordered" if reorder else "INT8, values as they are"
        table = markdown([f"{title}: chosen by", *COLUMNS[1:], "risk J", "slope"], rows)
        parts.append(table)
    if not parts:
        return ""
    fixed = (
        "Channels are chosen before the validation, random ones drawn once a seed; they stay the same over all its "
        "sequences and updates."
    )
    notes = [
        below(result),
        fixed,
        "DAMP states that its own selector was best on all three benchmarks.",
    ]
    notes += [f"{name} is undefined: {why}." for name, why in result["skipped"].items()]
    notes += [gap_sentence(result)] if result["key_order_gap"] else []
    return "\n\n".join([*parts, " ".join(notes)])


def gap_sentence(result: Result) -> str:
    """What sharing channels between the value heads of a key head costs."""
    over = result.get("over_seeds", {}).get("key_order_gap", {})
    found = by_format(result)
    texts = []
    for name, gap in result["key_order_gap"].items():
        base, plus, rest = name.partition("+")
        alone = f"{base}-per-head{plus}{rest}"
        mean = over.get(name) or {"mean": gap, "spread": None}
        text = f"J of {name} lies {100 * mean['mean']:+.2f} % from channels per value head"
        if mean["spread"] is not None:
            text += f" (SD over seeds {100 * mean['spread']:.2f})"
        if name in found and found.get(alone, {}).get("kl"):
            text += f", its KL {100 * (found[name]['kl'] / found[alone]['kl'] - 1):+.1f} %"
        texts.append(text)
    return "; ".join(texts) + "."


def budgets(result: Result) -> str:
    """DAMP figure 5: divergence against protected channels."""
    found = by_format(result)
    default = result["k_hi"]
    rows = []
    for k_hi in BUDGETS:
        cells: list[str] = []
        for end in ("", "+reorder"):
            names = [f"damp-k{k_hi}{end}"]
            names += [f"damp{end}"] if k_hi == default else []
            names += [f"int8-step{end}"] if k_hi == 0 else []
            row = next((found[name] for name in names if name in found), None)
            cells += (
                ["", "", ""]
                if row is None
                else [kl(row), state_error(row["state_error"]), bits(row)]
            )
        if any(cells):
            rows.append([str(k_hi), cells[2] or cells[5], *cells[0:2], *cells[3:5]])
    if len(rows) < 3:
        return ""
    columns = ["FP16 key channels", "bits/value", "KL", "state error"]
    columns += ["KL, reordered", "state error, reordered"]
    return f"{markdown(columns, rows)}\n\n{below(result)}"


def baselines(result: Result) -> str:
    """What the papers lack: carried residuals, stochastic rounding, deferred requantisation with its ring."""
    rows = divergence_rows(result, BASELINES, lambda name, _: [slope(result, name)])
    if sum(row[0] not in PLAIN + MIXED for row in rows) < 2:
        return ""
    table = markdown([*COLUMNS, "slope"], rows)
    return (
        f"{table}\n\n{below(result)} `every-L`: the state is written at every L-th update and rebuilt from the "
        "ring of inputs in between, whose bits are counted apart."
    )


def slope(result: Result, name: str) -> str:
    """Exponent of KL ~ step**b with its interval; empty where the format or its slope is missing."""
    steps = by_format(result).get(name, {}).get("steps")
    if steps is None or steps["slope"] is None:
        return ""
    low, high = steps["slope_low"], steps["slope_high"]
    spread = interval(None if low is None else (low, high), "{:.2f}".format)
    if not spread and result["validation_sequences"] == 1:
        spread = "one sequence"
    return f"{steps['slope']:.2f}" + (f" ({spread})" if spread else "")


def late_slope(result: Result, name: str) -> str:
    """The same exponent over bins from step `LATE` on, from their means alone."""
    from hybridstate.quality.divergence import growth

    steps = by_format(result).get(name, {}).get("steps")
    if steps is None or steps["slope"] is None:
        return ""
    late = [place for place, (first, _) in enumerate(result["step_bins"]) if first >= LATE]
    bins = tuple((first, last) for first, last in (result["step_bins"][place] for place in late))
    value, _, _ = growth(bins, np.array([[steps["kl"][place] for place in late]]))
    return "" if value is None else f"{value:.2f}"


def steps(result: Result) -> str:
    """KL in bins of decode steps, every third one, with the slope."""
    bins = result.get("step_bins")
    if bins is None:
        return ""
    shown = [place for place in range(len(bins)) if place % 3 == (len(bins) - 1) % 3]
    rows = [
        [
            row["format"],
            *(significant(row["steps"]["kl"][b]) for b in shown),
            slope(result, row["format"]),
            late_slope(result, row["format"]),
        ]
        for row in result["validation"]
        if row["kl"] > 0
    ]
    heads = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in bins]
    table = markdown(
        ["KL at steps", *(heads[b] for b in shown), "slope (95 %)", f"from step {LATE} on"], rows
    )
    return (
        f"{table}\n\nSlope b of KL ~ step^b over bins from step 9 on, sequences resampled for the interval; the last "
        f"column is the slope over bins from step {LATE} on, of their means. Prompts of "
        f"{result['protocol']['input_tokens']:,} tokens prefilled in chunks of {result['prefill_chunk']:,}, the state "
        f"stored at each chunk's end. {below(result)}"
    )


def answers(result: Result) -> str:
    """Exact answers after thousands of requantised updates, beside FP32."""
    found = result.get("task_accuracy")
    if not found:
        return ""
    tasks = list(found["texts"])
    cells = {(row["format"], row["task"]): row for row in found["rows"]}

    def cell(row: Result, key: str) -> str:
        error = row[f"{key}_error"]
        text = f"{100 * row[key] + 0.0:.1f}"  # never -0.0
        return text if error is None else f"{text} ± {100 * error:.1f}"

    rows = [
        [
            name,
            *(cell(cells[name, task], key) for task in tasks for key in ("accuracy", "below_fp32")),
        ]
        for name in dict.fromkeys(row["format"] for row in found["rows"])
    ]
    columns = ["% exact", *(c for task in tasks for c in (task, f"{task}, below FP32"))]
    counts = ", ".join(
        f"{found['questions'][t]:,} questions of {t} in {found['texts'][t]} texts "
        f"(chance {100 * found['chance'][t]:.2g} %)"
        for t in tasks
    )
    return (
        f"{markdown(columns, rows)}\n\nSynthetic texts, decoded token by token through the stored state; at least "
        f"{found['filler_updates']:,} updates lie between the last fact and the first question. {counts}; ± is the "
        "standard error over texts."
    )


def agreement(result: Result) -> str:
    """DAMP table 7: what two halves of the prompts choose."""
    kind = result["model"]["kind"]
    over = result.get("over_seeds", {}).get("selector_agreement", {})
    rows = []
    for name, found in result.get("selector_agreement", {}).items():
        spread = over.get(name, {})
        rows.append(
            [
                name,
                mean_and_spread(spread.get("overlap"), found["overlap"], 100, " %"),
                percent(found["random_overlap"]),
                mean_and_spread(spread.get("spearman"), found["spearman"], 1, ""),
            ]
        )
    if not rows:
        return ""
    rows.append(
        [
            "DAMP C.1, its own selector, values reordered",
            f"{paper()['damp.split_overlap'][kind]:g} %",
            f"{paper()['damp.split_overlap']['random']:g} %",
            f"{paper()['damp.split_rank_spearman'][kind]:g}",
        ]
    )
    columns = ["channels chosen by", "same in both halves", "by chance", "rank correlation"]
    count = len(result.get("validation_seeds", [0]))
    text = f"Mean and standard deviation over {seeds_of(result)}. " if count > 1 else ""
    return (
        f"{markdown(columns, rows)}\n\n{text}Each half holds half of the prompts of every domain."
    )


def mean_and_spread(over: Any, alone: float | None, factor: float, unit: str) -> str:
    """Over seeds where there are several."""
    if over:
        text = f"{factor * over['mean']:.3g}"
        return text + (f" ± {factor * over['spread']:.1g}" if over["spread"] else "") + unit
    return "" if alone is None else f"{factor * alone:.3g}{unit}"


def concentration(result: Result) -> str:
    """DAMP Finding 1: squared INT8 error in the top 12.5 % of key channels; and what predicts its accumulation."""
    shares = result.get("error_concentration", {})
    if "plain" not in shares:
        return ""
    over = result.get("over_seeds", {}).get("error_concentration", {})
    published = paper()["damp.error_concentration"][result["model"]["kind"]]
    rows = []
    for name, label in (("plain", "INT8"), ("reordered", "INT8, values scaled and reordered")):
        if name in shares:
            spread = over.get(name, {})
            rows.append(
                [
                    label,
                    *(
                        mean_and_spread(spread.get(key), shares[name][key], 100, " %")
                        for key in ("mean_over_heads", "pooled")
                    ),
                    f"{100 * published:g} %" if name == "reordered" else "",
                ]
            )
    columns = ["squared error in the worst 12.5 % of each head's key channels", "mean of the heads"]
    columns += ["of the error of all heads", "DAMP 4.1"]
    note = "The mean counts every head alike; the share of all heads' summed error counts a head by its error."
    return f"{markdown(columns, rows)}\n\n{note} {prediction(result)}".rstrip()


def prediction(result: Result) -> str:
    """Whether the risk predicts the error that plain INT8 accumulates."""
    over = result.get("over_seeds", {}).get("risk_prediction", {})
    parts = []
    for name, label in (("damp", "the risk C_u"), ("error-only", "the local error alone")):
        found = result.get("risk_prediction", {}).get(name, {})
        if found.get("spearman") is not None:
            spread = over.get(name, {}).get("spearman")
            parts.append(f"{label} {mean_and_spread(spread, found['spearman'], 1, '')}")
    if not parts:
        return ""
    return (
        "Rank correlation with the error that per-step INT8 accumulated in each key channel, mean over heads: "
        + ", ".join(parts)
        + "."
    )


def greedy(result: Result) -> str:
    """What greedy trajectories give, beside the sampled ones."""
    second = result.get("greedy")
    if not second:
        return ""
    first, other = by_format(result), {row["format"]: row for row in second["validation"]}
    names = [name for name in ("fp16", "bf16", "int8-step", "damp") if name in other]
    quantities: list[tuple[str, Callable[[Any, Any], str]]] = [
        ("repeated 32-grams", lambda doc, _: percent(doc["repeated_32gram_share"])),
        ("split agreement", lambda doc, _: percent(doc["split_agreement"])),
        *((f"KL of {n}", lambda _, rows, n=n: kl(rows[n])) for n in names),
    ]
    rows = [
        [f"temperature {result['protocol']['temperature']:g}", *(f(result, first) for _, f in quantities)],
        ["greedy", *(f(second, other) for _, f in quantities)],
    ]  # fmt: skip
    return markdown(["trajectories", *(name for name, _ in quantities)], rows)


TABLES: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("Storage formats of the live state", formats),
    ("Which key channels are kept in FP16", selectors),
    ("How many key channels are kept in FP16", budgets),
    ("Baselines the papers lack", baselines),
    ("Divergence over steps", steps),
    ("Answers after thousands of updates", answers),
    ("Agreement of two halves of the prompts", agreement),
    ("Where the error of INT8 sits", concentration),
    ("Greedy trajectories", greedy),
)
"""Title and table, in the order of docs/results.md."""
