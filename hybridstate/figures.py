"""Every picture, each with the CSV it was drawn from. The only module that imports matplotlib.

Pictures are reproducible: the Agg renderer, fixed sizes, no date and no version in the metadata.
Colours are those of Okabe and Ito and the viridis map, which colour-blind readers can tell apart.
"""

import csv
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.plan.analysis import Analysis, cutoffs_at
from hybridstate.plan.select import Selection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito."""

ANALYSIS_FIGURES: Final = ("horizons", "retained", "bytes")
"""Names of the files that `analysis_figures` writes, as .png and .csv."""

_FULL_ATTENTION: Final = "#BDBDBD"
_DPI: Final = 150
_LONGEST_DECADE: Final = 7  # ten million tokens, beyond any context; what is longer is counted
_LABEL_ROWS: Final = 4
_MIB: Final = 2**20
_W_GRID: Final = tuple(2**k for k in range(2, 15))


def analysis_figures(analysis: Analysis, folder: Path) -> None:
    """Draw the three figures of `analyze` into an existing folder."""
    _horizons(analysis, folder)
    _retained(analysis, folder)
    _bytes(analysis, folder)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure in inches, on the Agg renderer and without pyplot's global state."""
    # where it cannot write its cache, matplotlib says so on stderr in its own words
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(
    figure: "Figure", path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Write `path` with suffix .png, and the numbers behind it with suffix .csv."""
    figure.savefig(path.with_suffix(".png"), dpi=_DPI, metadata={"Software": None})
    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def _horizons(analysis: Analysis, folder: Path) -> None:
    """Histogram of the horizons on a logarithmic axis, with the cutoffs."""
    values = np.concatenate([h.reshape(-1) for h in analysis.horizons])
    shown = values[(values > 0) & (values <= 10.0**_LONGEST_DECADE)]
    low, high = _decades(np.append(shown, [c.selection.w_max for c in analysis.cutoffs]))
    edges = np.logspace(low, high, 8 * (high - low) + 1)
    counts, _ = np.histogram(shown, edges)
    zero, infinite = int((values == 0).sum()), int(np.isinf(values).sum())
    longer = values.size - shown.size - zero - infinite

    figure = new_figure(7.0, 3.8)
    axes = figure.add_subplot()
    axes.bar(
        edges[:-1],
        counts,
        width=np.diff(edges),
        align="edge",
        color=COLOURS[0],
        edgecolor="white",
        linewidth=0.5,
    )
    axes.set_xscale("log")
    axes.set_ylim(0, max(1, int(counts.max())) * (1.05 + 0.07 * _LABEL_ROWS))
    axes.set_xlim(edges[0], edges[-1])
    for number, cutoff in enumerate(analysis.cutoffs):
        selection = cutoff.selection
        axes.axvline(selection.w_max, color=COLOURS[1], linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{selection.w_max}: {100 * selection.fraction:.0f} % kept",
            (selection.w_max, 1 - 0.055 * (number % _LABEL_ROWS)),
            xycoords=axes.get_xaxis_transform(),
            xytext=(3, -2),
            textcoords="offset points",
            va="top",
            fontsize=7.5,
            color=COLOURS[1],
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
        )
    beyond = [
        f"{n:,} {word}"
        for n, word in ((longer, "longer"), (infinite, "infinite"), (zero, "zero"))
        if n
    ]
    axes.set_xlabel(
        f"horizon in tokens ({analysis.epsilon:g} of the content left)"
        + (f"; not shown: {', '.join(beyond)}" if beyond else "")
    )
    axes.set_ylabel("key channels" if analysis.spec.unit == "channel" else "value heads")
    _title(axes, analysis, "static retention horizons; dashed: cutoffs $W_{max}$")
    rows: list[tuple[object, ...]] = [
        (_g(a), _g(b), int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    rows += [("0", "0", zero), (_g(edges[-1]), "inf", longer), ("inf", "inf", infinite)]
    save_figure(figure, folder / "horizons", ("from_tokens", "to_tokens", "units"), rows)


def _decades(values: NDArray[np.float64]) -> tuple[int, int]:
    """Powers of ten around positive values, at least one apart."""
    low = int(np.floor(np.log10(values.min())))
    return low, max(low + 1, int(np.ceil(np.log10(values.max()))))


def _retained(analysis: Analysis, folder: Path) -> None:
    """Retained share by block and head, one panel per cutoff, full-attention blocks in grey."""
    spec = analysis.spec
    heads = max(layer.value_heads for layer in spec.layers)
    panels, rows = [], []
    for cutoff in analysis.cutoffs:
        grid = np.full((spec.num_layers, heads), np.nan)
        for layer, mask in zip(spec.layers, cutoff.selection.retained, strict=True):
            share = mask.reshape(layer.value_heads, -1).mean(axis=1)
            grid[layer.index, : layer.value_heads] = share
            rows += [
                (cutoff.selection.w_max, layer.index, head, _g(value))
                for head, value in enumerate(share)
            ]
        panels.append((cutoff.selection, grid))

    figure = _panels(analysis, panels)
    save_figure(figure, folder / "retained", ("w_max", "block", "value_head", "share"), rows)


def _panels(
    analysis: Analysis, panels: Sequence[tuple[Selection, NDArray[np.float64]]]
) -> "Figure":
    """One map per selection, at most four in a row; NaN is full attention."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    height = min(9.0, max(2.4, 1.0 + 0.16 * analysis.spec.num_layers)) * lines + 0.6
    figure = new_figure(max(4.6, 1.4 + 2.2 * columns), height)
    colours = colormaps["viridis"].with_extremes(bad=_FULL_ATTENTION)
    grids = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grids.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (selection, grid) in zip(grids.flat, panels, strict=False):
        image = axes.imshow(
            np.ma.masked_invalid(grid),
            cmap=colours,
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
        )
        share = 100 * selection.fraction
        axes.set_title(f"$W_{{max}}$ {selection.w_max}: {share:.1f} %", fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
    for axes in grids[-1]:
        axes.set_xlabel("value head")
    for axes in grids[:, 0]:
        axes.set_ylabel("model block")
    legend = [Patch(color=_FULL_ATTENTION, label="full attention (no recurrent state)")]
    if analysis.spec.unit == "channel":
        figure.colorbar(image, ax=list(grids.flat), label="share of channels kept")
    else:
        legend += [
            Patch(color=colours(1.0), label="head kept"),
            Patch(color=colours(0.0), label="head omitted"),
        ]
    figure.suptitle(f"{analysis.source.name}: units kept in a checkpoint", fontsize=10)
    figure.legend(handles=legend, loc="outside lower center", fontsize=8, frameon=False, ncols=3)
    return figure


def _bytes(analysis: Analysis, folder: Path) -> None:
    """Bytes of a checkpoint against the cutoff: temporal and full, ragged and padded."""
    given = [cutoff.selection.w_max for cutoff in analysis.cutoffs]
    points = cutoffs_at(analysis.spec, analysis.horizons, [*_W_GRID, *given])
    w_max = [point.selection.w_max for point in points]
    sizes = [point.accounting for point in points]
    dense = sizes[0]
    series = {
        "full, padded": ([s.padded_bytes for s in sizes], COLOURS[1], "--"),
        "full, ragged": ([s.ragged_bytes for s in sizes], COLOURS[1], "-"),
        "temporal, padded": ([s.temporal_padded_bytes for s in sizes], COLOURS[0], "--"),
        "temporal, ragged": ([s.temporal_ragged_bytes for s in sizes], COLOURS[0], "-"),
    }
    figure = new_figure(7.0, 3.8)
    axes = figure.add_subplot()
    for label, (values, colour, style) in series.items():
        axes.plot(w_max, [v / _MIB for v in values], color=colour, linestyle=style, label=label)
        marked = [v / _MIB for w, v in zip(w_max, values, strict=True) if w in given]
        axes.plot(sorted(set(given)), marked, "o", color=colour, markersize=4)
    axes.axhline(dense.dense_bytes / _MIB, color=COLOURS[6], linewidth=0.8, label="dense, full")
    axes.axhline(
        dense.conv_bytes / _MIB,
        color=COLOURS[2],
        linewidth=0.8,
        linestyle=":",
        label="convolution state",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(_W_GRID, [f"{w:,}" for w in _W_GRID], fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cutoff $W_{max}$ in tokens")
    axes.set_ylabel("MiB per checkpoint")
    axes.legend(fontsize=8, frameon=False, ncols=2)
    _title(axes, analysis, "bytes of a cached state")
    rows = [
        (
            w,
            s.temporal_ragged_bytes,
            s.temporal_padded_bytes,
            s.ragged_bytes,
            s.padded_bytes,
            s.dense_bytes,
            s.conv_bytes,
        )
        for w, s in zip(w_max, sizes, strict=True)
    ]
    header = (
        "w_max",
        "temporal_ragged_bytes",
        "temporal_padded_bytes",
        "full_ragged_bytes",
        "full_padded_bytes",
        "full_dense_bytes",
        "conv_bytes",
    )
    save_figure(figure, folder / "bytes", header, rows)


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

    figure = new_figure(3.2 * len(metrics), 3.2)
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, (kind, metric) in zip(panels, metrics, strict=True):

        def value(arm: str, kind: str = kind, metric: str = metric) -> float:
            entry = arms[arm]["prose"] if kind == "prose" else arms[arm]["tasks"][kind]
            return float(entry[metric])

        dense = value("dense")
        rows.append((kind, metric, "dense", "", _g(dense), ""))
        axes.axhline(dense, color=COLOURS[6], linewidth=0.9, label="dense")
        # open and large below filled and small: both show where they coincide
        for policy, label, colour, style in (
            ("nr", "zeros (NR)", COLOURS[0], {"markersize": 9, "fillstyle": "none"}),
            ("wr", "replay (WR)", COLOURS[2], {"markersize": 4, "linestyle": ":"}),
        ):
            values = [value(f"{policy}-{w}") for w in cutoffs]
            axes.plot(cutoffs, values, marker="o", color=colour, label=label, **style)
            rows += [
                (kind, metric, policy, w, _g(v), "") for w, v in zip(cutoffs, values, strict=True)
            ]
        drawn = [(w, random[w, kind, metric]) for w in cutoffs if (w, kind, metric) in random]
        if drawn:
            means = [entry["random_mean"] for _, entry in drawn]
            spread = [entry["random_sd"] or 0.0 for _, entry in drawn]
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
                (kind, metric, "random", w, _g(entry["random_mean"]), entry["random_sd"])
                for w, entry in drawn
            ]
        axes.set_xscale("log", base=2)
        axes.set_xticks(cutoffs, [f"{w:,}" for w in cutoffs], fontsize=8)
        axes.set_xlabel("cutoff $W_{max}$ in tokens")
        axes.set_title(
            "prose: KL to dense, nats/token" if metric == "kl" else f"{kind}: exact answers",
            fontsize=9,
        )
        axes.set_ylim(*((-0.05, 1.05) if metric == "accuracy" else (0.0, None)))
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{model}: after restoring a cached prefix", fontsize=10, x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=4)
    header = ("kind", "metric", "policy", "w_max", "value", "sd_over_masks")
    save_figure(figure, folder / "restore", header, rows)


def precision_figure(result: Mapping[str, Any], model: str, folder: Path) -> None:
    """KL of each storage format, and how its state error grows with the updates.

    Args:
        result: the document of `calibrate`.
        model: its name, for the title.
        folder: existing; gets precision.png and precision.csv.
    """
    formats = [row for row in result["validation"] if row["kl"] > 0]
    steps = result["validation_steps"]
    figure = new_figure(9.2, 3.0)
    points, curves = figure.subplots(1, 2)
    places = np.arange(len(formats))[::-1]
    for place, row, colour in zip(places, formats, COLOURS, strict=False):
        points.errorbar(
            row["kl"], place, xerr=row["kl_error"] or 0.0, fmt="o", capsize=3, color=colour
        )
        curves.plot(
            steps, row["state_error_steps"], "o-", markersize=3, color=colour, label=row["format"]
        )
    points.set_yticks(
        places, [f"{row['format']} ({row['bits_per_value']:g} bits)" for row in formats], fontsize=8
    )
    points.set_xscale("log")
    points.set_xlabel("KL to FP32 in nats per token, with standard error")
    curves.set_xscale("log", base=2)
    curves.set_yscale("log")
    curves.set_xlabel("updates since the prompt")
    curves.set_ylabel("relative error of the state")
    curves.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    points.grid(axis="x", linewidth=0.4, alpha=0.6)
    for axes in (points, curves):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{model}: live state stored in each format, requantised at every update",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    rows = [
        (row["format"], _g(row["bits_per_value"]), _g(row["kl"]), step, _g(error))
        for row in formats
        for step, error in zip(steps, row["state_error_steps"], strict=True)
    ]
    header = ("format", "bits_per_value", "kl_nats_per_token", "updates", "state_error")
    save_figure(figure, folder / "precision", header, rows)


def _title(axes: "Axes", analysis: Analysis, text: str) -> None:
    axes.set_title(f"{analysis.source.name}: {text}", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _g(value: Any) -> str:
    """A number with the digits that matter, the same on every platform."""
    return f"{float(value):.9g}"
