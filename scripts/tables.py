"""Markdown tables from recorded results. Pure functions: parsed JSON in, lines out.

Each result file is the document that a command wrote with `-o`; the tables below take its `result`.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from hybridstate.cli.output import counted, interval
from hybridstate.figures.results import MAIN_FORMATS

Result = Mapping[str, Any]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers and stand on the right."""
    head = "| " + " | ".join(columns) + " |"
    rule = "|---|" + "---:|" * (len(columns) - 1)
    return "\n".join([head, rule, *("| " + " | ".join(row) + " |" for row in rows)])


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def times(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}x"


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{1e3 * value:.3g} ms"


def small(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def significant(value: float | None) -> str:
    """Three digits, whatever the size: divergences span many orders of magnitude."""
    return "" if value is None else f"{value:.3g}"


# --- analyze --------------------------------------------------------------------------------------


def retained(analyses: Sequence[Result]) -> str:
    """Share of units kept per cutoff, and what the whole checkpoint shrinks by."""
    cutoffs = [str(c["w_max"]) for c in analyses[0]["cutoffs"]]
    rows = []
    for analysis in analyses:
        model = analysis["model"]
        horizon = analysis["horizons"]["tokens"]
        cells = [
            f"{percent(c['fraction'])}, {times(c['ratio_full_ragged'])}"
            for c in analysis["cutoffs"]
        ]
        unit = {"head": "value heads", "channel": "key channels"}[model["unit"]]
        rows.append(
            [
                f"`{model['name']}`",
                f"{horizon['units']:,} {unit}",
                f"{horizon['median']:,.0f}",
                *cells,
            ]
        )
    return markdown(["model", "units", "median horizon", *(f"W_max {w}" for w in cutoffs)], rows)


# --- training -------------------------------------------------------------------------------------


def training(result: Result) -> str:
    """What the embedded models can do, and what is left without their recurrent state."""
    models: Mapping[str, Result] = result["models"]
    rows = [["held-out prose, bits per byte (change after a filler with the state zeroed)"]]
    for model in models.values():
        need = model["need_of_state"]["1024"]
        before, after = (need[arm]["prose_bits_per_byte"] for arm in ("nothing", "zero-linear"))
        rows[0].append(f"{model['prose_bits_per_byte']:.3f} ({after - before:+.3f})")
    for task in next(iter(models.values()))["exact_match"]:
        cells = []
        for model in models.values():
            exact, need = model["exact_match"][task], model["need_of_state"]["1024"]
            shares = (exact["1024"], exact["6144"], need["zero-linear"][task])
            cells.append(" / ".join(f"{100 * share:.1f}" for share in shares) + " %")
        rows.append([f"{task}: 1k / 6k tokens / 1k with the state zeroed", *cells])
    for w_max in next(iter(models.values()))["retained"]:
        kept = [model["retained"][w_max] for model in models.values()]
        rows.append(
            [
                f"units retained at W_max {w_max}: initial, trained",
                *(f"{percent(s['initial'])}, {percent(s['trained'])}" for s in kept),
            ]
        )
    return markdown(["", *(f"`{name}`" for name in models)], rows)


# --- bench restore --------------------------------------------------------------------------------


def restore(result: Result, cutoffs: Sequence[int] | None = None) -> str:
    """Answers and prose after loading: dense, NR, WR and random masks, by cutoff (some or all)."""
    arms = {arm["arm"]: arm for arm in result["arms"]}
    dense = arms["dense"]
    task_names = list(dense["tasks"])
    rows = [
        _restore_row("dense", dense, task_names),
        _restore_row("recompute", arms["recompute"], task_names),
    ]
    tested = {arm["w_max"] for arm in result["arms"] if arm["w_max"] is not None}
    for w_max in sorted(tested if cutoffs is None else tested.intersection(cutoffs)):
        rows.append(_restore_row(f"W_max {w_max}, NR", arms[f"nr-{w_max}"], task_names))
        rows.append(_restore_row(f"W_max {w_max}, WR", arms[f"wr-{w_max}"], task_names))
        random = [c for c in result["comparisons"] if c["w_max"] == w_max]
        if random:
            rows.append(_random_row(w_max, arms[f"nr-{w_max}"], random, task_names))
    columns = ["restored with", "kept", "size", *task_names, "prose KL", "bits/byte", "TTFT"]
    return markdown(columns, rows)


def _restore_row(label: str, arm: Result, task_names: Sequence[str]) -> list[str]:
    timing = arm["ttft_s"]
    prose = arm.get("prose", {})
    kept = arm["retained_units"] / arm["units"] if arm["units"] else None
    return [
        label,
        percent(kept),
        times(arm["ratio_full"]),
        *(percent(arm["tasks"][task]["accuracy"]) for task in task_names),
        significant(prose.get("kl")),
        small(prose.get("bits_per_byte"), 3),
        milliseconds(timing["median"] if timing else None),
    ]


def _random_row(
    w_max: int, native: Result, comparisons: Sequence[Result], task_names: Sequence[str]
) -> list[str]:
    by_name = {(c["kind"] if c["metric"] == "accuracy" else c["metric"]): c for c in comparisons}

    def cell(name: str, show: Callable[[float], str]) -> str:
        entry = by_name.get(name)
        if entry is None:
            return ""
        spread = entry["random_sd"]
        return show(entry["random_mean"]) + (f" ± {show(spread)}" if spread is not None else "")

    return [
        f"W_max {w_max}, random",
        percent(native["retained_units"] / native["units"]),
        times(native["ratio_full"]),
        *(cell(task, percent) for task in task_names),
        cell("kl", significant),
        cell("bits_per_byte", lambda value: small(value, 3)),
        "",
    ]


def advantage(result: Result) -> str:
    """DASC (NR) minus the mean of the random masks on the same questions."""
    rows = []
    for entry in result["comparisons"]:
        points = entry["metric"] == "accuracy"
        bounds = interval(entry["interval_95"], partial(_signed, points=points))
        shares = [o["jaccard"] for o in entry["overlap"]]
        label = {"kl": "prose KL", "bits_per_byte": "bits/byte"}.get(entry["metric"], entry["kind"])
        rows.append(
            [
                f"W_max {entry['w_max']}, {label}",
                _signed(entry["difference"], points) + (" points" if points else ""),
                bounds or ("one case" if entry["cases"] == 1 else "-"),
                f"{entry['cases']}",
                " to ".join(dict.fromkeys((percent(min(shares)), percent(max(shares))))),
            ]
        )
    return markdown(["", "difference", "95 % interval", "cases", "mask overlap (Jaccard)"], rows)


def _signed(value: float, points: bool) -> str:
    return f"{100 * value:+.1f}" if points else f"{value:+.3g}"


def interventions(result: Result) -> str:
    """What the model loses without its state, its KV cache, or both."""
    arms = result["interventions"]
    if not arms:
        return ""
    names = list(arms[0]["tasks"])
    rows = [
        [
            arm["arm"],
            *(percent(arm["tasks"][name]["accuracy"]) for name in names),
            small(arm.get("prose", {}).get("bits_per_byte"), 3),
        ]
        for arm in arms
    ]
    return markdown(["taken away", *names, "prose bits/byte"], rows)


# --- calibrate ------------------------------------------------------------------------------------


README_FORMATS = ("fp32", *MAIN_FORMATS)
"""Formats of the README's table and picture; docs/results.md has all."""


def precision(result: Result) -> str:
    """What storage formats of the live state do to the model's next tokens: the short table of the README."""
    found = {row["format"]: row for row in result["validation"]}
    rows = []
    for row in (found[name] for name in README_FORMATS if name in found):
        spread = row["kl_error"]
        kl = f"{row['kl']:.2e}" + (f" ± {spread:.0e}" if spread is not None else "")
        bits = f"{row['bits_per_value']:g}"
        ring = row.get("bits_per_value_with_ring", row["bits_per_value"]) - row["bits_per_value"]
        if ring:
            bits += f" + {ring:.3g} ring"
        rows.append(
            [
                row["format"],
                bits,
                "0" if row["kl"] == 0 else kl,
                percent(row["top1"], 2),
                small(row["state_error"]),
                f"{row['perplexity_ratio']:.4f}x",
            ]
        )
    columns = ["format", "bits/value", "KL, nats/token", "same top-1", "state error", "perplexity"]
    sequences, updates = result["validation_sequences"], result["validation_positions"]
    seeds = len(result.get("validation_seeds", [0]))
    missing = sum(name.startswith("seed-") for name in result.get("unfinished") or [])
    below = f"{counted(sequences, 'sequence')} of {counted(updates, 'update')}"
    if missing:
        below += f" from {seeds} of {seeds + missing} seeds (the time on the GPU ended)"
    elif seeds > 1:
        below += f" from {seeds} seeds"
    return f"{markdown(columns, rows)}\n\n{below}; ± is the standard error over sequences."


# --- bench update ---------------------------------------------------------------------------------


def update(result: Result) -> str:
    """Time of one recurrent update by layer, batch and state format."""
    faster = {
        (s["dims"], s["batch"], s.get("gate"), s["state"]): s["fp32_over_this"]
        for s in result["speedups"]
    }
    rows = []
    for row in result["rows"]:
        name, gate = row["dims"]["name"], row.get("gate")
        fused = ", gate fused" if gate == "fused" else ""
        rows.append(
            [
                f"{name}, batch {row['batch']}, {row['state']}{fused}",
                str(row["backend"]),
                f"{row['bits_per_value']:g}",
                f"{1e6 * row['step_s']['median']:.3g} µs",
                times(faster.get((name, row["batch"], gate, row["state"]))),
                f"{row['gb_per_s']:,.0f}",
                "" if row["pass_gb_per_s"] is None else f"{row['pass_gb_per_s']:,.0f}",
            ]
        )
    columns = ["layer of", "ran on", "bits", "update", "FP32 over this", "GB/s", "plain pass GB/s"]
    return markdown(columns, rows)


# --- bench decode ---------------------------------------------------------------------------------


def decode(result: Result) -> str:
    """Time per output token by batch and state format."""
    base = {
        row["batch"]: row["tpot_s"]["median"] for row in result["rows"] if row["state"] == "fp32"
    }
    rows = [
        [
            f"batch {row['batch']}, {row['state']}",
            f"{row['backend']}, {row['mode']}",
            f"{row['state_bytes_per_request']:,}",
            milliseconds(row["tpot_s"]["median"]),
            times(base[row["batch"]] / row["tpot_s"]["median"]) if row["batch"] in base else "",
            f"{row['whole_step_state_gb_per_s']:,.1f}",
        ]
        for row in result["rows"]
    ]
    columns = [
        "",
        "ran on",
        "state bytes/request",
        "TPOT",
        "FP32 over this",
        "state GB per s of step",
    ]
    return markdown(columns, rows) + _key_order(result)


def _key_order(result: Result) -> str:
    """Which weights ran: with the plan's channel order in them, or with a gather beside."""
    order = result.get("protocol", {}).get("key_order")
    if order == "exported weights":
        order += " (MODEL is the folder that `export-plan` wrote)"
    return f"\n\nKey order of the packed state: {order}." if order else ""


# --- short forms for the README -------------------------------------------------------------------


def update_by_state(result: Result, layers: Container[str], batches: Container[int]) -> str:
    """One row per wanted layer and batch, one column per state format, time and ratio to FP32."""
    return _by_state(
        (
            (row["dims"]["name"], row["batch"], row["state"], row["step_s"])
            for row in result["rows"]
            if row["dims"]["name"] in layers and row["batch"] in batches
        ),
        ("layer of", "batch"),
        lambda seconds: f"{1e6 * seconds:.3g} µs",
    )


def decode_by_state(result: Result) -> str:
    """One row per batch, one column per state format, time per output token and ratio to FP32."""
    return _by_state(
        (("", row["batch"], row["state"], row["tpot_s"]) for row in result["rows"]),
        ("", "batch"),
        lambda seconds: f"{1e3 * seconds:.3g} ms",
    )


def _by_state(
    rows: Iterable[tuple[str, int, str, Result]],
    heads: tuple[str, str],
    show: Callable[[float], str],
) -> str:
    medians = {(name, batch, state): time["median"] for name, batch, state, time in rows}
    states = list(dict.fromkeys(state for _, _, state in medians))
    lines = []
    for name, batch in dict.fromkeys((name, batch) for name, batch, _ in medians):
        line = [name, str(batch)] if heads[0] else [str(batch)]
        base = medians.get((name, batch, "fp32"))
        for state in states:
            seconds = medians.get((name, batch, state))
            if seconds is None:
                line.append("")
            elif base is None or state == "fp32":
                line.append(show(seconds))
            else:
                line.append(f"{show(seconds)}, {times(base / seconds)}")
        lines.append(line)
    return markdown([head for head in heads if head] + states, lines)
