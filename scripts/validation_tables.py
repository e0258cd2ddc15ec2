"""Tables of docs/results.md from recorded `analyze --validate`: ranks, cutoffs, gate input, decay, intervention.

Recordings from before the prefixes came in tiers hold ranks and cutoffs alone; they give those two tables.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tables

from hybridstate.cli.output import interval

Result = Mapping[str, Any]

PUBLISHED = (
    "Published medians (DASC, Table 1b): H_e .801 Qwen3-Next, .856 Kimi-Linear, .895 Kimi-K3; "
    "M_S .632, .533, .443."
)
ZEROED = {
    "nothing": "nothing",
    "zero-kv": "KV of full attention",
    "zero-linear": "recurrent states",
    "zero-linear-conv": "recurrent states and convolution windows",
    "zero-both": "KV and recurrent states",
    "zero-all": "KV, recurrent states and windows",
}


def validation(result: Result) -> str:
    """Rank agreement and agreement at each cutoff, on all prefixes at the static gate input."""
    found = result["validation"]
    ranks = [
        [
            label,
            *_quartiles(found[key]),
            f"{found[key]['pairs']:,}",
            f"{found[key]['constant_pairs']:,}",
        ]
        for label, key in (("observed horizon H_e", "horizons"), ("state norm M_S", "magnitudes"))
    ]
    columns = ["static horizon against", "Spearman, median", "quartiles", "pairs", "constant pairs"]
    cutoffs = ["W_max", "same side under H_s and H_e", "omitted", "omitted though H_e is longer"]
    parts = [tables.markdown(columns, ranks), tables.markdown(cutoffs, _decisions(found))]
    return "\n\n".join([*parts, f"{_prefixes(found)} {PUBLISHED}"])


def gate_input(result: Result) -> str:
    """a_s by objective, chosen on every other prefix and reported on the rest."""
    found = result["validation"]
    if not found.get("held_out"):
        return ""
    rows = [
        [
            f"{agreed['gate_input']:g}",
            str(agreed["gate_input_source"]),
            *_quartiles(agreed["horizons"]),
            _number(agreed["magnitudes"]["median"]),
            *(tables.percent(cutoff["same_side"]) for cutoff in agreed["cutoffs"]),
        ]
        for agreed in found["held_out"]
    ]
    columns = ["a_s", "from", "H_e, median", "quartiles", "M_S, median"]
    columns += [f"same side at {cutoff['w_max']}" for cutoff in found["cutoffs"]]
    choices = [_choice(choice) for choice in found["gate_input_choices"].values()]
    held_out = found["held_out"][0]["prefixes"]
    note = (
        f"Chosen on {found['prefixes'] - held_out} prefixes (even places), reported on {held_out} (odd). "
        + " ".join(choices)
    )
    return f"{tables.markdown(columns, rows)}\n\n{note}"


def decay(result: Result) -> str:
    """Effective decay of the three domains, pooled over all layers."""
    found = result["validation"].get("decay")
    if not found:
        return ""
    rows = [
        [
            domain["domain"],
            f"{domain['sequences']} of {domain['tokens'] // domain['sequences']:,} tokens",
            *(f"{domain[name]:.4f}" for name in ("p10", "p50", "p90")),
            _number(domain["with_reference"]),
        ]
        for domain in found["domains"]
    ]
    columns = ["text", "sequences", "p10", "p50", "p90", "Spearman with math"]
    note = (
        f"Effective decay exp(mean log a) of every unit over all layers ({found['text']}). Published (DAMP "
        "4.2, C.2): GDN of Qwen3.6-35B p10/p50/p90 .376/.967/.9996, Spearman with math .998 code and .999 "
        "general; KDA .994 and .999."
    )
    return f"{tables.markdown(columns, rows)}\n\n{note}"


def intervention(result: Result) -> str:
    """What a cached prefix loses with parts of it zeroed (DASC, Table 1a)."""
    found = result["validation"].get("intervention")
    if not found:
        return ""
    rows = [
        [
            ZEROED[arm["arm"]],
            tables.percent(arm["accuracy"]),
            _points(arm),
            *(tables.percent(depth["accuracy"]) for depth in arm["by_depth"]),
        ]
        for arm in found["arms"]
    ]
    columns = ["zeroed in the cached prefix", "exact answers", "change, points (95 %)"]
    columns += [f"needle at {depth:g}" for depth in found["depths"]]
    note = (
        f"{found['examples_per_depth']} synthetic questions at each depth: {found['task']}, prompts of "
        f"{found['tokens']:,} tokens. Every row resumed the same {found['prefix']['captured']} captured prefixes "
        f"({found['prefix']['checked']} checks: {found['prefix']['check']}). Published (DASC, Table 1a, RULER "
        "NIAH-S1): KV zeroed 0, recurrent states zeroed .990 Qwen3-Next and 1.000 Kimi-Linear, both 0. The "
        "embedded models were trained so that only their state can answer."
    )
    return f"{tables.markdown(columns, rows)}\n\n{note}"


def _prefixes(found: Result) -> str:
    chosen = found.get("prefix_selection")
    if chosen is None:
        lengths = f"of {found['tokens']:,} tokens"
    else:
        lengths = (
            "("
            + ", ".join(f"{t['selected']} of {t['tier']:,} tokens" for t in chosen["tiers"])
            + ")"
        )
        short = chosen["fallbacks"]
        lengths += f", {short} of them shorter for want of longer texts" if short else ""
    return f"{found['prefixes']} prefixes {lengths}, {found['source']}; units are counted once per prefix."


def _decisions(found: Result) -> list[Sequence[str]]:
    return [
        [
            f"{cutoff['w_max']:,}",
            tables.percent(cutoff["same_side"]),
            f"{cutoff['omitted']:,}",
            f"{cutoff['omitted_but_longer']:,}",
        ]
        for cutoff in found["cutoffs"]
    ]


def _quartiles(ranks: Result) -> tuple[str, str]:
    low, high = (_number(ranks[key]) for key in ("lower_quartile", "upper_quartile"))
    return _number(ranks["median"]), f"{low} to {high}"


def _number(value: float | None) -> str:
    return "" if value is None else tables.significant(value)


def _choice(choice: Result) -> str:
    name = {"rank": "Rank agreement", "median": "Matching median horizons"}[choice["objective"]]
    if choice["flat"]:
        return f"{name} is flat over the grid of a_s and chooses nothing."
    border = ", the end of the grid" if choice["at_border"] else ""
    return (
        f"{name} chooses {choice['gate_input']:g}{border} (objective {choice['value']:.3f} there, "
        f"{choice['worst']:.3f} at worst)."
    )


def _points(arm: Result) -> str:
    if arm["arm"] == "nothing":
        return ""
    change = f"{100 * arm['difference']:.1f}"
    bounds = interval(arm["difference_interval_95"], lambda bound: f"{100 * bound:.1f}")
    return f"{change} ({bounds})" if bounds else change
