"""Pictures of recorded results: restoring a cached prefix, storage formats of the live state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from hybridstate.figures.style import COLOURS, digits, new_figure, save_figure

MAIN_FORMATS: Final = (
    *("fp16", "bf16", "int8-step", "int8-step+reorder", "int8-step-stochastic"),
    *("damp", "damp-random", "damp+reorder", "damp-every-16"),
)
"""Formats of the short picture and of the README's table; `calibration_figures` draws all."""


def restore_figure(result: Mapping[str, Any], model: str, folder: Path) -> None:
    """Answers and prose after restoring, against the cutoff: NR, WR, random masks, dense.

    Args:
        result: the `result` of `bench restore`.
        model: its name, for the title.
        folder: existing; gets restore.png and restore.csv.
    """
    arms = {arm["arm"]: arm for arm in result["arms"]}
    cutoffs = sorted({arm["w_max"] for arm in result["arms"] if arm["w_max"] is not None})
    metrics = [(task, "accuracy") for task in arms["dense"]["tasks"]]
    metrics += [("prose", "kl")] if "prose" in arms["dense"] else []
    random = {(c["w_max"], c["kind"], c["metric"]): c for c in result["comparisons"]}
    rows: list[tuple[object, ...]] = []

    columns = min(3, len(metrics))
    lines = -(-len(metrics) // columns)
    figure = new_figure(3.4 * columns, 2.9 * lines + 0.3)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for empty in panels[len(metrics) :]:
        empty.set_axis_off()
    for axes, (kind, metric) in zip(panels[: len(metrics)], metrics, strict=True):

        def value(arm: str, kind: str = kind, metric: str = metric) -> float:
            entry = arms[arm]["prose"] if kind == "prose" else arms[arm]["tasks"][kind]
            return float(entry[metric])

        dense = value("dense")
        rows.append((kind, metric, "dense", "", digits(dense), ""))
        if metric == "accuracy":  # a KL to dense is zero for dense, which a log axis lacks
            axes.axhline(100 * dense, color=COLOURS[6], linewidth=0.9, label="dense")
        # open and large below filled and small: both show where they coincide
        scale = 100.0 if metric == "accuracy" else 1.0
        for policy, label, colour, style in (
            ("nr", "zeros (NR)", COLOURS[0], {"markersize": 9, "fillstyle": "none"}),
            ("wr", "replay (WR)", COLOURS[2], {"markersize": 4, "linestyle": ":"}),
        ):
            values = [value(f"{policy}-{w}") for w in cutoffs]
            shown = [scale * v for v in values]
            axes.plot(cutoffs, shown, marker="o", color=colour, label=label, **style)
            rows += [
                (kind, metric, policy, w, digits(v), "")
                for w, v in zip(cutoffs, values, strict=True)
            ]
        drawn = [(w, random[w, kind, metric]) for w in cutoffs if (w, kind, metric) in random]
        if drawn:
            means = [scale * entry["random_mean"] for _, entry in drawn]
            spread = [scale * (entry["random_sd"] or 0.0) for _, entry in drawn]
            axes.errorbar(
                [w for w, _ in drawn],
                means,
                yerr=spread,
                fmt="s--",
                markersize=4,
                capsize=3,
                color=COLOURS[1],
                label="random masks (mean, SD)",
            )
            rows += [
                (kind, metric, "random", w, digits(entry["random_mean"]), entry["random_sd"])
                for w, entry in drawn
            ]
        axes.set_xscale("log", base=2)
        axes.set_xticks(cutoffs, [f"{w:,}" for w in cutoffs], fontsize=8)
        axes.set_xlabel("cutoff $W_{max}$ in tokens")
        axes.set_title(
            "prose: KL to dense, nats/token" if metric == "kl" else f"{kind}: exact answers, %",
            fontsize=9,
        )
        if metric == "accuracy":
            axes.set_ylim(-5, 105)
        else:
            axes.set_yscale("log", nonpositive="clip")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{model}: after restoring a cached prefix", fontsize=10, x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=4)
    header = ("kind", "metric", "policy", "w_max", "value", "sd_over_masks")
    save_figure(figure, folder / "restore", header, rows)


def precision_figure(result: Mapping[str, Any], model: str, folder: Path) -> None:
    """KL of the main storage formats, and how their state error grows with the updates.

    Args:
        result: the document of `calibrate`.
        model: its name, for the title.
        folder: existing; gets precision.png and precision.csv.
    """
    found = {row["format"]: row for row in result["validation"] if row["kl"] > 0}
    named = [found[name] for name in MAIN_FORMATS if name in found]
    formats = sorted(named, key=lambda row: -float(row["kl"]))
    steps = result["validation_steps"]
    figure = new_figure(9.2, 3.3)
    points, curves = figure.subplots(1, 2)
    places = np.arange(len(formats))[::-1]
    for place, row in zip(places, formats, strict=True):
        number = MAIN_FORMATS.index(row["format"])  # a format looks alike in every model's picture
        colour, again = COLOURS[number % len(COLOURS)], number >= len(COLOURS)
        mark, line = ("s", ":") if again else ("o", "-")
        points.errorbar(
            row["kl"], place, xerr=row["kl_error"] or 0.0, fmt=mark, capsize=3, color=colour
        )
        curves.plot(
            steps, row["state_error_steps"], f"{mark}{line}",
            markersize=3, color=colour, label=row["format"],
        )  # fmt: skip
    points.set_yticks(
        places, [f"{row['format']} ({_bits(row):.4g} bits)" for row in formats], fontsize=8
    )
    points.set_xscale("log")
    points.set_xlabel("KL to FP32 in nats per token, with standard error")
    curves.set_xscale("log", base=2)
    curves.set_xticks(steps[::-3], [f"{step:,}" for step in steps[::-3]], fontsize=8)
    curves.set_xticks([], minor=True)
    curves.set_yscale("log")
    curves.set_xlabel("updates since the prompt")
    curves.set_ylabel("relative error of the state")
    curves.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    points.grid(axis="x", linewidth=0.4, alpha=0.6)
    for axes in (points, curves):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{model}: live state stored in each format, written at every update (every-16: at each 16th)",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    rows = [
        (row["format"], digits(_bits(row)), digits(row["kl"]), step, digits(error))
        for row in formats
        for step, error in zip(steps, row["state_error_steps"], strict=True)
    ]
    header = ("format", "bits_per_value", "kl_nats_per_token", "updates", "state_error")
    save_figure(figure, folder / "precision", header, rows)


def _bits(row: Mapping[str, Any]) -> float:
    """Bits per value, the ring of a deferred format included."""
    return float(row.get("bits_per_value_with_ring", row["bits_per_value"]))
