"""Pictures of a calibration: size of the state, where the error of INT8 sits, divergence against bits and steps."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hybridstate.figures.style import COLOURS, digits, map_colours, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]

OVER_STEPS = (
    *("bf16", "fp16", "int8-step", "int8-step+reorder", "damp+reorder"),
    *("int8-every-16", "damp-every-16", "int8-step-stochastic", "int8-feedback-fp16", "nvfp4"),
)
"""Formats whose growth is drawn, where they were run; those beyond the colours are dashed."""
DIVERGED = 2.0
"""Relative errors of a state above this are cut off in the picture and said in words: nothing of the state is left."""
LABELLED = (
    *("fp16", "bf16", "fp8", "int8-step", "int8-step+reorder", "int4", "int4+reorder", "nvfp4"),
    *("damp", "damp+reorder", "damp-int4+reorder", "int8-every-16", "damp-every-16"),
    *("int8-step-stochastic", "int8-feedback-int4", "int8-feedback-fp16"),
)
"""Formats that the picture of bits names."""
KINDS = ("one format", "FP16 key channels", "deferred, with ring", "feedback, stochastic")
"""What formats are drawn as, each in its own colour."""


def calibration_figures(result: Result, model: str, folder: Path) -> tuple[str, ...]:
    """Draw what a recorded `calibrate` has numbers for into an existing folder; returns the names.

    Args:
        result: the document of `calibrate`.
        model: its name, for the titles.
        folder: existing; gets NAME.png and NAME.csv.
    """
    drawn = [name for name, draw in _DRAWN.items() if draw(result, model, folder)]
    return tuple(drawn)


def magnitude_figure(result: Result, model: str, folder: Path) -> bool:
    """Root mean square of one head's state over key channel and value dimension."""
    if "pictures" not in result:
        return False
    head = result["pictures"]["head"]
    values = np.array(head["magnitude"])
    width = head["value_dims_per_column"]
    figure = new_figure(5.6, 5.4)
    axes = figure.subplots()
    floor = max(values.max(), 1e-30) * 1e-4
    shown = np.log10(np.maximum(values, floor))
    image = axes.imshow(
        shown,
        aspect="auto",
        cmap=map_colours(),
        interpolation="nearest",
        extent=(0, width * values.shape[1], values.shape[0], 0),
    )
    axes.set_xlabel("value dimension" + (f" (rms of {width} neighbours)" if width > 1 else ""))
    axes.set_ylabel("key channel")
    _title(axes, f"{model}: size of the state, layer {head['layer']}, head {head['head']}")
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("log$_{10}$ of the root mean square over anchors")
    rows = [
        (channel, width * column, digits(value))
        for channel, line in enumerate(values)
        for column, value in enumerate(line)
    ]
    header = ("key_channel", "first_value_dim", "rms")
    save_figure(figure, folder / "state_magnitude", header, rows)
    return True


def channel_error_figure(result: Result, model: str, folder: Path) -> bool:
    """Squared INT8 error per key channel, before and after values are scaled and reordered."""
    if "pictures" not in result:
        return False
    head, curve = result["pictures"]["head"], result["pictures"]["curve"]
    series = [("as they are", head["int8_error"], curve["plain"], COLOURS[1])]
    if "int8_error_reordered" in head:
        after = (head["int8_error_reordered"], curve["reordered"], COLOURS[0])
        series.append(("scaled and reordered", *after))
    figure = new_figure(9.6, 3.4)
    channels, sums = figure.subplots(1, 2)
    rows: list[tuple[object, ...]] = []
    for label, error, share, colour in series:
        at = np.arange(len(error))
        channels.plot(at, error, ".", markersize=4, color=colour, label=f"values {label}")
        summed = np.concatenate([[0.0], np.cumsum(share)])
        part = np.arange(len(summed)) / (len(summed) - 1)
        sums.plot(100 * part, 100 * summed, color=colour, label=f"values {label}")
        rows += [
            (label, channel, digits(value), digits(s))
            for channel, (value, s) in enumerate(zip(error, share, strict=False))
        ]
    if any(value > 0 for _, error, _, _ in series for value in error):
        channels.set_yscale("log")
    channels.set_xlabel(f"key channel of layer {head['layer']}, head {head['head']}")
    channels.set_ylabel("mean squared INT8 error")
    sums.axvline(12.5, color=COLOURS[6], linewidth=0.8, linestyle=":")
    sums.text(13.5, 3, "12.5 %", fontsize=8)
    sums.set_xlabel("% of a head's key channels, worst first (mean over heads)")
    sums.set_ylabel("% of its squared error")
    sums.set_xlim(0, 100)
    sums.set_ylim(0, 102)
    for axes in (channels, sums):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{model}: error of INT8 by key channel", fontsize=10, x=0.01, ha="left")
    handles, labels = sums.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=2)
    header = ("values", "key_channel", "squared_error", "share_of_head_sorted")
    save_figure(figure, folder / "channel_error", header, rows)
    return True


def bits_figure(result: Result, model: str, folder: Path) -> bool:
    """KL against bits per state value, ring included, and against the number of FP16 channels."""
    twice = {"damp-k0", f"damp-k{result.get('k_hi')}"}  # int8-step and damp under another name
    rows = [r for r in result["validation"] if r["kl"] > 0 and r["format"] not in twice]
    if len(rows) < 3:
        return False
    figure = new_figure(11.4, 4.4)
    plane, budget = figure.subplots(1, 2, width_ratios=(3, 2))
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(_kind(row["format"]), []).append(row)
    for kind, colour in zip(KINDS, COLOURS, strict=False):
        members = groups.get(kind, [])
        if not members:
            continue
        x = [row["bits_per_value_with_ring"] for row in members]
        plane.errorbar(
            x,
            [row["kl"] for row in members],
            yerr=_errors(members),
            fmt="o",
            markersize=4,
            capsize=2,
            linewidth=0.8,
            color=colour,
            label=kind,
        )
    plane.set_yscale("log")
    _labels(plane, [row for row in rows if row["format"] in LABELLED])
    plane.set_xlabel(
        "bits per state value, ring of inputs included (dots without a name: see the CSV)"
    )
    plane.set_ylabel("KL to FP32, nats per token")
    table = [
        (
            *(row["format"], digits(row["bits_per_value"])),
            *(digits(row["bits_per_value_with_ring"]), digits(row["kl"])),
            "" if row["kl_error"] is None else digits(row["kl_error"]),
        )
        for row in rows
    ]
    drawn = _budgets(budget, result)
    if drawn:
        budget.set_yscale("log")
        budget.set_xlabel("FP16 key channels per head")
        budget.set_ylabel("KL to FP32, nats per token")
        budget.legend(fontsize=8, frameon=False)
    else:
        budget.set_axis_off()
    for axes in (plane, budget):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{model}: divergence against bits of the stored state (standard error over sequences)",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    handles, labels = plane.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=6)
    header = ("format", "bits_per_value", "bits_with_ring", "kl_nats_per_token", "standard_error")
    save_figure(figure, folder / "divergence_bits", header, table)
    return True


def steps_figure(result: Result, model: str, folder: Path) -> bool:
    """KL and state error over decode steps by format."""
    rows = {row["format"]: row for row in result["validation"] if row["kl"] > 0}
    bins = result.get("step_bins")
    if bins is None or not rows:
        return False
    names = [name for name in OVER_STEPS if name in rows] or list(rows)[: len(COLOURS)]
    middle = [np.sqrt(first * last) for first, last in bins]
    ends = [last for _, last in bins]
    figure = new_figure(9.6, 4.0)
    left, right = figure.subplots(1, 2)
    table: list[tuple[object, ...]] = []
    cut: list[str] = []
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        dashed = "o-" if number < len(COLOURS) else "o--"
        found = rows[name]["steps"]
        mean, error = np.array(found["kl"]), np.array(found["kl_error"], dtype=float)
        label = name if found["slope"] is None else f"{name} (slope {found['slope']:.2f})"
        left.plot(middle, mean, dashed, markersize=3, linewidth=1, color=colour, label=label)
        low = np.maximum(mean - error, mean * 0.1)
        left.fill_between(middle, low, mean + error, color=colour, alpha=0.15, linewidth=0)
        state = np.array(found["state_error"])
        inside = np.where(state > DIVERGED, np.nan, state)
        right.plot(ends, inside, dashed, markersize=3, linewidth=1, color=colour)
        cut += [f"{name} goes on to {state[-1]:.1g}"] if np.isnan(inside).any() else []
        table += [
            (name, first, last, digits(k), "" if e is None else digits(e), digits(s))
            for (first, last), k, e, s in zip(
                bins, found["kl"], found["kl_error"], found["state_error"], strict=True
            )
        ]
    left.set_ylabel("KL to FP32, nats per token")
    right.set_ylabel("relative error of the state")
    left.set_xlabel("decode step (bins of powers of two)")
    right.set_xlabel("decode steps done")
    if cut:
        right.text(0.02, 0.97, "\n".join(cut), transform=right.transAxes, fontsize=7, va="top")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{model}: error over steps by format ({result['validation_sequences']} sequences, "
        "band: standard error)",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=4)
    header = ("format", "first_step", "last_step", "kl_nats_per_token", "standard_error")
    save_figure(figure, folder / "error_steps", (*header, "state_error"), table)
    return True


def _kind(name: str) -> str:
    """Which of `KINDS` a format is."""
    if "-every-" in name:
        return "deferred, with ring"
    if "-feedback-" in name or name.endswith("stochastic"):
        return "feedback, stochastic"
    if name.startswith("damp"):
        return "FP16 key channels"
    return "one format"


def _errors(rows: Sequence[Any]) -> list[float]:
    """Standard errors, none below zero on a log axis."""
    return [min(row["kl_error"] or 0.0, 0.9 * row["kl"]) for row in rows]


def _labels(axes: "Axes", rows: Sequence[Any]) -> None:
    """Names in a column on the right, in the order of their points and led to them, so that none overlap."""
    ordered = sorted(rows, key=lambda row: row["kl"])
    low, high = np.log(axes.get_ylim())
    wanted = np.array([(np.log(row["kl"]) - low) / (high - low) for row in ordered])
    for row, at in zip(ordered, _apart(wanted), strict=True):
        axes.annotate(
            row["format"],
            (row["bits_per_value_with_ring"], row["kl"]),
            xytext=(1.02, at),
            textcoords="axes fraction",
            fontsize=7,
            ha="left",
            va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "#888888"},
        )


def _apart(wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ascending heights moved as little as a sweep up and one down need to keep them apart."""
    gap = min(0.055, 1.0 / max(len(wanted), 1))
    moved = wanted.copy()
    for place in range(1, len(moved)):
        moved[place] = max(moved[place], moved[place - 1] + gap)
    moved[-1:] = np.minimum(moved[-1:], 1.0)
    for place in range(len(moved) - 2, -1, -1):
        moved[place] = min(moved[place], moved[place + 1] - gap)
    return moved


def _budgets(axes: "Axes", result: Result) -> bool:
    """KL against K_hi, plain and reordered; whether there was anything to draw."""
    found = {row["format"]: row for row in result["validation"]}
    drawn = False
    for end, label, colour in (
        ("", "INT8 rest", 0),
        ("+reorder", "INT8 rest, values reordered", 2),
    ):
        points = []
        for k_hi in (0, 4, 8, 16, 32, 64):
            names = [f"damp-k{k_hi}{end}"]
            names += [f"damp{end}"] if k_hi == result["k_hi"] else []
            names += [f"int8-step{end}"] if k_hi == 0 else []
            points += [(k_hi, found[name]) for name in names if name in found][:1]
        if len(points) < 3:
            continue
        drawn = True
        axes.errorbar(
            [k for k, _ in points],
            [row["kl"] for _, row in points],
            yerr=_errors([row for _, row in points]),
            fmt="o-",
            markersize=4,
            capsize=2,
            color=COLOURS[colour],
            label=label,
        )
    return drawn


def _title(axes: "Axes", text: str) -> None:
    axes.set_title(text, fontsize=10, loc="left")


_DRAWN: dict[str, Callable[[Result, str, Path], bool]] = {
    "state_magnitude": magnitude_figure,
    "channel_error": channel_error_figure,
    "divergence_bits": bits_figure,
    "error_steps": steps_figure,
}
