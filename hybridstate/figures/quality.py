"""Pictures of `bench quality`: answers against the cutoff and against time, and by format of the live state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridstate.figures.style import COLOURS, digits, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Group = tuple[str, str, int]
Result = Mapping[str, Any]

POLICIES = (
    ("nr", "", "zeros (NR)", COLOURS[0], "o-"),
    ("wr", "", "replay (WR)", COLOURS[2], "^-"),
    ("nr", "+int8", "NR, INT8", COLOURS[5], "o:"),
    ("wr", "+int8", "WR, INT8", COLOURS[4], "^:"),
)
SINGLE = (
    ("dense", "dense", COLOURS[6], "D"),
    ("recompute", "recompute", COLOURS[3], "X"),
    ("int8-checkpoint", "INT8", COLOURS[1], "P"),
)
KL_FLOOR = 1e-9
"""Divergences below it are drawn there: rounding of the softmax."""


def quality_figures(result: Result, model: str, folder: Path) -> None:
    """Draw what the result holds.

    Args:
        result: the `result` of `bench quality`.
        model: its name, for the titles.
        folder: existing; gets quality_cutoffs, quality_formats and, where requests were timed, quality_ttft, each as
            .png and .csv.
    """
    summary = {
        ((row["suite"], row["boundary"], row["tokens"]), row["arm"]): row
        for row in result["summary"]
    }
    groups = list(dict.fromkeys(group for group, _ in summary))
    cutoffs = sorted({arm["w_max"] for arm in result["arms"] if arm["w_max"] is not None})
    if cutoffs and groups:
        _cutoffs(result, model, folder, summary, groups, cutoffs)
        timed = {(t["suite"], t["boundary"], t["tokens"]): t for t in result["ttft"]}
        if any(group in timed for group in groups):
            _against_time(model, folder, summary, timed, cutoffs)
    if groups and any(arm["state"] != "fp32" for arm in result["arms"]):
        _formats(result, model, folder, summary, groups)


def _label(group: Group) -> str:
    suite, boundary, tokens = group
    return f"{'own tasks' if suite == 'own' else 'RULER formats'}, {tokens:,} tokens, to the {boundary}"


def _masks(result: Result, w_max: int) -> list[str]:
    return [a["arm"] for a in result["arms"] if a["seed"] is not None and a["w_max"] == w_max]


def _tidy(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _cutoffs(
    result: Result,
    model: str,
    folder: Path,
    summary: Mapping[tuple[Group, str], Result],
    groups: Sequence[Group],
    cutoffs: Sequence[int],
) -> None:
    """Mean accuracy and KL of the first token against W_max, a column per suite, boundary and length."""
    figure = new_figure(3.3 * len(groups) + 0.4, 5.4)
    panels = figure.subplots(2, len(groups), squeeze=False)
    rows: list[tuple[object, ...]] = []
    for column, group in enumerate(groups):
        for line, metric in enumerate(("accuracy", "kl_first")):
            axes = panels[line][column]
            dense = summary[group, "dense"][metric]
            if metric == "accuracy":
                axes.axhline(dense, color=COLOURS[6], linewidth=0.9, label="dense")
                rows.append((*group, metric, "dense", "", digits(dense), ""))
            for policy, kind, label, colour, style in POLICIES:
                names = [f"{policy}-{w}{kind}" for w in cutoffs]
                if not all((group, name) in summary for name in names):
                    continue
                values = [float(summary[group, name][metric]) for name in names]
                errors = [
                    summary[group, name]["accuracy_se"] if metric == "accuracy" else None
                    for name in names
                ]
                if metric == "kl_first":
                    axes.plot(
                        cutoffs,
                        [max(v, KL_FLOOR) for v in values],
                        style,
                        color=colour,
                        markersize=4,
                    )
                else:
                    spread = [e or 0.0 for e in errors]
                    axes.errorbar(
                        cutoffs,
                        values,
                        yerr=spread,
                        fmt=style,
                        markersize=4,
                        capsize=2,
                        linewidth=1.0,
                        color=colour,
                        label=label,
                    )
                rows += [
                    (
                        *group,
                        metric,
                        f"{policy}{kind}",
                        w,
                        digits(v),
                        "" if e is None else digits(e),
                    )
                    for w, v, e in zip(cutoffs, values, errors, strict=True)
                ]
            means, spreads = _random(result, summary, group, cutoffs, metric)
            if means:
                axes.errorbar(
                    cutoffs,
                    [max(v, KL_FLOOR) for v in means] if metric == "kl_first" else means,
                    yerr=None if metric == "kl_first" else spreads,
                    fmt="s--",
                    markersize=4,
                    capsize=3,
                    color=COLOURS[1],
                    label="random masks, NR (mean, SD)",
                )
                rows += [
                    (*group, metric, "random", w, digits(v), digits(s))
                    for w, v, s in zip(cutoffs, means, spreads, strict=True)
                ]
            axes.set_xscale("log", base=2)
            axes.set_xticks(cutoffs, [f"{w:,}" for w in cutoffs])
            _tidy(axes)
            if metric == "accuracy":
                axes.set_title(_label(group), fontsize=8)
                axes.set_ylim(-0.03, 1.03)
                axes.set_ylabel("mean score of the tasks" if column == 0 else "", fontsize=8)
            else:
                axes.set_yscale("log")
                axes.set_ylabel("KL to dense, first token, nats" if column == 0 else "", fontsize=8)
                axes.set_xlabel("cutoff $W_{max}$ in tokens", fontsize=8)
    figure.suptitle(f"{model}: answers after compressed hits", fontsize=10, x=0.01, ha="left")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        fontsize=8,
        frameon=False,
        ncols=2 * len(groups),
    )
    header = ("suite", "boundary", "tokens", "metric", "arm", "w_max", "value", "spread")
    save_figure(figure, folder / "quality_cutoffs", header, rows)


def _random(
    result: Result,
    summary: Mapping[tuple[Group, str], Result],
    group: Group,
    cutoffs: Sequence[int],
    metric: str,
) -> tuple[list[float], list[float]]:
    """Mean and sample SD over the masks of each cutoff; empty where a mask is missing."""
    means, spreads = [], []
    for w_max in cutoffs:
        names = _masks(result, w_max)
        if not names or not all((group, name) in summary for name in names):
            return [], []
        values = [float(summary[group, name][metric]) for name in names]
        mean = sum(values) / len(values)
        means.append(mean)
        squares = sum((v - mean) ** 2 for v in values)
        spreads.append((squares / (len(values) - 1)) ** 0.5 if len(values) > 1 else 0.0)
    return means, spreads


def _against_time(
    model: str,
    folder: Path,
    summary: Mapping[tuple[Group, str], Result],
    timed: Mapping[Group, Result],
    cutoffs: Sequence[int],
) -> None:
    """Mean accuracy and KL against the median time to the first token of one request on an idle device."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    groups = [group for group in timed if (group, "dense") in summary]
    figure = new_figure(3.3 * len(groups) + 0.4, 5.4)
    panels = figure.subplots(2, len(groups), squeeze=False, sharex="col")
    rows: list[tuple[object, ...]] = []
    for column, group in enumerate(groups):
        ttft = timed[group]
        times = {name: 1e3 * found["median"] for name, found in ttft["seconds"].items()}
        known = [name for name in times if (group, name) in summary]
        for line, metric in enumerate(("accuracy", "kl_first")):
            axes = panels[line][column]
            values = {
                name: max(float(summary[group, name][metric]), KL_FLOOR if line else 0.0)
                for name in known
            }
            for name, label, colour, marker in SINGLE:
                if name in values and (line == 0 or name != "dense"):
                    axes.plot(times[name], values[name], marker, color=colour, label=label)
            for policy, kind, label, colour, style in POLICIES:
                names = [f"{policy}-{w}{kind}" for w in cutoffs]
                if not all(name in values for name in names):
                    continue
                axes.plot(
                    [times[name] for name in names],
                    [values[name] for name in names],
                    style,
                    color=colour,
                    markersize=4,
                    linewidth=0.8,
                    label=label,
                )
                if policy == "wr" and not kind:
                    for w, name in zip(cutoffs, names, strict=True):
                        place = (times[name], values[name])
                        axes.annotate(
                            str(w), place, fontsize=6, xytext=(0, 5), textcoords="offset points"
                        )
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            _tidy(axes)
        panels[0][column].set_title(_label(group), fontsize=8)
        panels[0][column].set_ylim(-0.03, 1.05)
        panels[1][column].set_yscale("log")
        panels[1][column].set_xlabel(
            f"time to the first token, ms ({ttft['prefix_tokens']:,} cached, {ttft['unseen_tokens']} unseen)",
            fontsize=7,
        )
        rows += [
            (
                *group,
                name,
                digits(times[name]),
                digits(summary[group, name]["accuracy"]),
                digits(summary[group, name]["kl_first"]),
            )
            for name in known
        ]
    panels[0][0].set_ylabel("mean score of the tasks", fontsize=8)
    panels[1][0].set_ylabel("KL to dense, first token, nats", fontsize=8)
    figure.suptitle(
        f"{model}: answers against time of one request; numbers beside WR are $W_{{max}}$",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        fontsize=8,
        frameon=False,
        ncols=2 * len(groups) + 1,
    )
    header = ("suite", "boundary", "tokens", "arm", "ttft_ms", "score", "kl_first")
    save_figure(figure, folder / "quality_ttft", header, rows)


def _formats(
    result: Result,
    model: str,
    folder: Path,
    summary: Mapping[tuple[Group, str], Result],
    groups: Sequence[Group],
) -> None:
    """Score and KL of each format of the live state."""
    names = [a["arm"] for a in result["arms"] if a["state"] != "fp32"]
    figure = new_figure(3.0 * len(groups) + 1.6, 0.5 + 2 * (0.26 * len(names) + 0.7))
    panels = figure.subplots(2, len(groups), squeeze=False, sharey=True)
    places = list(range(len(names)))[::-1]
    rows: list[tuple[object, ...]] = []
    for column, group in enumerate(groups):
        found = [summary[group, name] for name in names]
        score, kl = panels[0][column], panels[1][column]
        dense = summary[group, "dense"]["accuracy"]
        score.axvline(dense, color=COLOURS[6], linewidth=0.9)
        score.errorbar(
            [row["accuracy"] for row in found],
            places,
            xerr=[row["accuracy_se"] or 0.0 for row in found],
            fmt="o",
            markersize=4,
            capsize=2,
            color=COLOURS[0],
        )
        score.set_xlim(-0.03, 1.03)
        score.set_xlabel("mean score (line: dense FP32)", fontsize=8)
        score.set_title(_label(group), fontsize=8)
        kl.plot([max(row["kl_first"], KL_FLOOR) for row in found], places, "o", color=COLOURS[1])
        kl.set_xscale("log")
        kl.set_xlabel("KL to dense, first token, nats", fontsize=8)
        for axes in (score, kl):
            axes.set_yticks(places, names, fontsize=7)
            axes.grid(axis="x", linewidth=0.4, alpha=0.6)
            _tidy(axes)
        rows.append((*group, "dense", "", digits(dense), "", "0"))
        rows += [
            (
                *group,
                name,
                row["bytes"],
                digits(row["accuracy"]),
                "" if row["accuracy_se"] is None else digits(row["accuracy_se"]),
                digits(row["kl_first"]),
            )
            for name, row in zip(names, found, strict=True)
        ]
    figure.suptitle(
        f"{model}: live state in each format, through prefill and every decoded token",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    header = ("suite", "boundary", "tokens", "format", "bytes", "score", "score_se", "kl_first")
    save_figure(figure, folder / "quality_formats", header, rows)
