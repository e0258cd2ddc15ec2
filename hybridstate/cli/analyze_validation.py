"""Tables of `analyze --validate`: ranks, cutoffs, the chosen gate input, decay of domains, the intervention."""

from collections.abc import Mapping
from typing import Any, Final

from hybridstate.cli.output import Output, interval

Found = Mapping[str, Any]

VALIDATION_FILE: Final = "validation.json"
"""In the folder of `-o`: the validation alone with its provenance, as kept in `benchmarks/`."""


def validation_tables(out: Output, found: Found) -> None:
    """Everything a validation found, from its JSON form."""
    chosen = found["prefix_selection"]
    lengths = ", ".join(f"{tier['selected']} of {tier['tier']:,}" for tier in chosen["tiers"])
    short = f", {chosen['fallbacks']} shorter than asked for" if chosen["fallbacks"] else ""
    title = f"static horizons against {found['prefixes']} prefix{'' if found['prefixes'] == 1 else 'es'}"
    out.table(
        f"{title} ({found['source']}, {lengths} tokens{short})",
        ("Spearman, per prefix and layer", "median", "25 %", "75 %", "pairs", "constant"),
        [
            (
                name,
                *map(_rho, (a["median"], a["lower_quartile"], a["upper_quartile"])),
                a["pairs"],
                a["constant_pairs"],
            )
            for name, a in (
                ("observed horizon H_e", found["horizons"]),
                ("state magnitude M_S", found["magnitudes"]),
            )
        ],
        note="constant: pairs left out because all units were equal",
    )
    out.table(
        "the cutoff, decided by static and by observed horizons",
        ("W_max", "same side %", "omitted", "omitted but longer"),
        [
            (c["w_max"], f"{100 * c['same_side']:.1f}", c["omitted"], c["omitted_but_longer"])
            for c in found["cutoffs"]
        ],
        note="units counted once per prefix",
    )
    _choices(out, found)
    out.table(
        "effective decay exp(mean log a) over all units, shipped texts",
        ("domain", "sequences", "tokens", "p10", "p50", "p90", "Spearman with math"),
        [
            (
                d["domain"],
                d["sequences"],
                d["tokens"],
                *(f"{d[name]:.4f}" for name in ("p10", "p50", "p90")),
                _rho(d["with_reference"]),
            )
            for d in found["decay"]["domains"]
        ],
    )
    if found["intervention"] is not None:
        intervention_table(out, found["intervention"])


def _choices(out: Output, found: Found) -> None:
    """a_s by objective, and agreement of each candidate on prefixes that chose nothing."""
    if not found["held_out"]:
        out.text("one prefix alone: nothing is left to report a chosen gate input on")
        return
    out.table(
        f"gate input chosen on {found['prefixes'] - found['held_out'][0]['prefixes']} prefixes "
        f"(even places), reported on {found['held_out'][0]['prefixes']} (odd)",
        ("a_s", "from", "H_e", "M_S", *(f"same side % at {c['w_max']}" for c in found["cutoffs"])),
        [
            (
                f"{a['gate_input']:g}",
                a["gate_input_source"],
                _rho(a["horizons"]["median"]),
                _rho(a["magnitudes"]["median"]),
                *(f"{100 * c['same_side']:.1f}" for c in a["cutoffs"]),
            )
            for a in found["held_out"]
        ],
        note="; ".join(_choice(choice) for choice in found["gate_input_choices"].values())
        + f"; a plan may take {found['gate_input_objective']}",
    )


def _choice(choice: Found) -> str:
    name, value = choice["objective"], choice["value"]
    if choice["flat"]:
        return f"{name}: flat over the grid, chooses nothing"
    return f"{name}: {choice['gate_input']:g}, objective {value:.3f} there and {choice['worst']:.3f} at worst"


def intervention_table(out: Output, found: Found) -> None:
    """Accuracy by what was zeroed and by depth."""
    out.table(
        f"a cached prefix with parts of it zeroed: {found['task']}, {found['examples_per_depth']} "
        "questions at each depth",
        (
            "zeroed",
            "accuracy %",
            "change",
            "95 % interval",
            *(f"at {d:g}" for d in found["depths"]),
        ),
        [
            (
                arm["arm"],
                f"{100 * arm['accuracy']:.1f}",
                f"{100 * arm['difference']:.1f}",
                interval(arm["difference_interval_95"], lambda bound: f"{100 * bound:.1f}"),
                *(f"{100 * depth['accuracy']:.0f}" for depth in arm["by_depth"]),
            )
            for arm in found["arms"]
        ],
        note="points against `nothing`, paired bootstrap; conv: convolution windows zeroed as well; "
        f"every arm resumed one of {found['prefix']['captured']} captured prefixes, bit-equal after each; "
        f"questions are {found['task_data']}",
    )


def _rho(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
