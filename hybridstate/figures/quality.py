"""Pictures of `bench quality`: answers against the cutoff and against time, and by format of the live state."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridstate.figures.paired import (
    Estimate,
    Group,
    Result,
    answers,
    cutoffs,
    difference,
    groups,
    over_masks,
    rows,
)
from hybridstate.figures.style import COLOURS, digits, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
LEAST_RANGE = (-5.0, 2.5)
"""Points that a panel shows at least, so that one question does not look like much."""
KL_LABEL = "KL to dense, first token, nats"
CSV = ("score", "score_se", "minus_dense", "minus_dense_se", "same_reply", "kl_first")
"""Columns of every CSV; of random masks the mean and, as `_se`, the sample SD over them."""


def quality_figures(result: Result, model: str, folder: Path) -> None:
    """Draw what the result holds.

    Args:
        result: the `result` of `bench quality`.
        model: its name, for the titles.
        folder: existing; gets quality_cutoffs, quality_formats and, where requests were timed, quality_ttft, each as
            .png and .csv.
    """
    found = groups(result)
    if cutoffs(result) and found:
        _cutoffs(result, model, folder, found)
        timed = [g for g in found if g in _timed(result)]
        if timed:
            _against_time(result, model, folder, timed)
    if found and any(arm["state"] != "fp32" for arm in result["arms"]):
        _formats(result, model, folder, found)


def _label(group: Group) -> str:
    suite, boundary, tokens = group
    named = "own tasks" if suite == "own" else "RULER's formats"
    end = "the prompt's last token" if boundary == "prompt" else "the question"
    return f"{named}, {tokens:,} tokens,\ncached up to {end}"


def _score_label(result: Result, group: Group) -> str:
    """What the upper panel of a group shows."""
    return "score minus dense, points" if answers(result, group) else "replies equal to dense's, %"


def _upper(result: Result, group: Group, name: str) -> Estimate:
    """Points from dense with their standard error; share of equal replies where dense itself cannot answer."""
    if answers(result, group):
        found = difference(result, group, [name])
        return Estimate(100 * found.mean, 100 * (found.spread or 0.0))
    return Estimate(100 * float(rows(result)[group, name]["same_reply"]), 0.0)


def _upper_masks(result: Result, group: Group, w_max: int) -> Estimate | None:
    """The same of the random masks, with the SD over them."""
    metric = "difference" if answers(result, group) else "same_reply"
    found = over_masks(result, group, w_max, metric)
    return None if found is None else Estimate(100 * found.mean, 100 * (found.spread or 0.0))


def _csv(result: Result, group: Group, name: str) -> tuple[str, ...]:
    row, apart = rows(result)[group, name], difference(result, group, [name])
    error = row["accuracy_se"]
    return (
        digits(row["accuracy"]),
        "" if error is None else digits(error),
        digits(apart.mean),
        "" if apart.spread is None else digits(apart.spread),
        digits(row["same_reply"]),
        digits(row["kl_first"]),
    )


def _csv_masks(result: Result, group: Group, w_max: int) -> tuple[str, ...]:
    found = [over_masks(result, group, w_max, m) for m in ("accuracy", "difference")]
    single = [over_masks(result, group, w_max, m) for m in ("same_reply", "kl_first")]
    cells = [x for e in found if e for x in (digits(e.mean), digits(e.spread or 0.0))]
    return (*cells, *(digits(e.mean) for e in single if e))


def _tidy(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _upper_panels(result: Result, panels: Sequence["Axes"], found: Sequence[Group]) -> None:
    """Titles, labels and limits: panels in points share theirs."""
    points = [p for p, g in zip(panels, found, strict=True) if answers(result, g)]
    limits = [LEAST_RANGE, *(p.get_ylim() for p in points)]
    before = ""
    for axes, group in zip(panels, found, strict=True):
        label = _score_label(result, group)
        axes.set_title(_label(group), fontsize=8)
        axes.set_ylabel(label if label != before else "", fontsize=8)
        before = label
        if axes in points:
            axes.axhline(0.0, color=COLOURS[6], linewidth=0.8, zorder=0)
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        else:
            axes.set_ylim(-3, 103)
        _tidy(axes)


def _legend(figure: "Figure", axes: "Axes", columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=columns
    )


def _cutoffs(result: Result, model: str, folder: Path, found: Sequence[Group]) -> None:
    """Answers and KL of the first token against W_max, a column per suite, boundary and length."""
    tested, known = cutoffs(result), rows(result)
    figure = new_figure(3.3 * len(found) + 0.4, 5.4)
    panels = figure.subplots(2, len(found), squeeze=False)
    table: list[tuple[object, ...]] = []
    for column, group in enumerate(found):
        upper, lower = panels[0][column], panels[1][column]
        table.append((*group, "dense", "", *_csv(result, group, "dense")))
        for place, (policy, kind, label, colour, style) in enumerate(POLICIES):
            names = [f"{policy}-{w}{kind}" for w in tested]
            if not all((group, name) in known for name in names):
                continue
            beside = [w * 2 ** (0.07 * (place - 2)) for w in tested]  # else equal arms hide
            values = [_upper(result, group, name) for name in names]
            look = {"fmt": style, "markersize": 4, "linewidth": 1.0, "color": colour}
            upper.errorbar(
                beside,
                [v.mean for v in values],
                yerr=[v.spread or 0.0 for v in values],
                capsize=2,
                label=label,
                **look,
            )
            kls = [max(float(known[group, name]["kl_first"]), KL_FLOOR) for name in names]
            lower.errorbar(beside, kls, **look)
            table += [
                (*group, f"{policy}{kind}", w, *_csv(result, group, name))
                for w, name in zip(tested, names, strict=True)
            ]
        drawn = {w: _upper_masks(result, group, w) for w in tested}
        random = [(w, estimate) for w, estimate in drawn.items() if estimate is not None]
        if random:
            beside = [w * 2**0.14 for w, _ in random]
            look = {"fmt": "s--", "markersize": 4, "linewidth": 1.0, "color": COLOURS[1]}
            upper.errorbar(
                beside,
                [e.mean for _, e in random],
                yerr=[e.spread or 0.0 for _, e in random],
                capsize=3,
                label="random masks, NR (mean, SD)",
                **look,
            )
            kl = [over_masks(result, group, w, "kl_first") for w, _ in random]
            lower.errorbar(beside, [max(e.mean, KL_FLOOR) for e in kl if e], **look)
            table += [(*group, "random", w, *_csv_masks(result, group, w)) for w, _ in random]
        for axes in (upper, lower):
            axes.set_xscale("log", base=2)
            axes.set_xticks(tested, [f"{w:,}" for w in tested])
            axes.minorticks_off()
        lower.set_yscale("log")
        lower.set_ylabel(KL_LABEL if column == 0 else "", fontsize=8)
        lower.set_xlabel("cutoff $W_{max}$ in tokens", fontsize=8)
        _tidy(lower)
    _upper_panels(result, panels[0], found)
    figure.suptitle(f"{model}: answers after compressed hits", fontsize=10, x=0.01, ha="left")
    _legend(figure, panels[0][0], 2 * len(found))
    header = ("suite", "boundary", "tokens", "arm", "w_max", *CSV)
    save_figure(figure, folder / "quality_cutoffs", header, table)


def _timed(result: Result) -> dict[Group, Result]:
    return {(t["suite"], t["boundary"], t["tokens"]): t for t in result["ttft"]}


def _against_time(result: Result, model: str, folder: Path, found: Sequence[Group]) -> None:
    """Answers and KL against the time to the first token of one request on an idle device."""
    from matplotlib.ticker import MaxNLocator

    tested, known = cutoffs(result), rows(result)
    figure = new_figure(3.3 * len(found) + 0.4, 5.4)
    panels = figure.subplots(2, len(found), squeeze=False, sharex="col")
    table: list[tuple[object, ...]] = []
    for column, group in enumerate(found):
        ttft = _timed(result)[group]
        upper, lower = panels[0][column], panels[1][column]
        arms = [(name, label, colour, marker) for name, label, colour, marker in SINGLE] + [
            (f"{policy}-{w}{kind}", label if w == tested[0] else "", colour, style[0])
            for policy, kind, label, colour, style in POLICIES
            for w in tested
        ]
        for name, label, colour, marker in arms:
            if name not in ttft["seconds"] or (group, name) not in known:
                continue
            times = {key: 1e3 * ttft["seconds"][name][key] for key in ("median", "p10", "p90")}
            value = _upper(result, group, name)
            look = {
                "fmt": marker,
                "color": colour,
                "markersize": 6 if name in [single for single, *_ in SINGLE] else 4,
                "elinewidth": 0.6,
                "xerr": [[times["median"] - times["p10"]], [times["p90"] - times["median"]]],
            }
            upper.errorbar(times["median"], value.mean, label=label or None, **look)
            kl = max(float(known[group, name]["kl_first"]), KL_FLOOR)
            if name != "dense":
                lower.errorbar(times["median"], kl, **look)
            if name[3:].isdigit():
                lower.annotate(
                    name[3:],
                    (times["median"], kl),
                    fontsize=6,
                    xytext=(5, 3),
                    textcoords="offset points",
                )
            timing = [digits(times[key]) for key in ("median", "p10", "p90")]
            table.append((*group, name, *timing, *_csv(result, group, name)))
        lower.set_yscale("log")
        lower.xaxis.set_major_locator(MaxNLocator(6))
        lower.set_ylabel(KL_LABEL if column == 0 else "", fontsize=8)
        lower.set_xlabel(
            f"time to the first token, ms ({ttft['prefix_tokens']:,} cached, {ttft['unseen_tokens']} unseen)",
            fontsize=7,
        )
        _tidy(lower)
    _upper_panels(result, panels[0], found)
    figure.suptitle(
        f"{model}: answers against time of one request (median, p10 to p90); numbers in the lower row are $W_{{max}}$",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    _legend(figure, panels[0][0], 2 * len(found) + 1)
    header = ("suite", "boundary", "tokens", "arm", "ttft_ms", "ttft_p10_ms", "ttft_p90_ms", *CSV)
    save_figure(figure, folder / "quality_ttft", header, table)


def _formats(result: Result, model: str, folder: Path, found: Sequence[Group]) -> None:
    """Answers and KL of each format of the live state."""
    names = [a["arm"] for a in result["arms"] if a["state"] != "fp32"]
    known = rows(result)
    figure = new_figure(3.0 * len(found) + 1.6, 0.5 + 2 * (0.26 * len(names) + 0.7))
    panels = figure.subplots(2, len(found), squeeze=False, sharey=True)
    places = list(range(len(names)))[::-1]
    table: list[tuple[object, ...]] = []
    for column, group in enumerate(found):
        score, kl = panels[0][column], panels[1][column]
        values = [_upper(result, group, name) for name in names]
        score.errorbar(
            [v.mean for v in values],
            places,
            xerr=[v.spread or 0.0 for v in values],
            fmt="o",
            markersize=4,
            capsize=2,
            color=COLOURS[0],
        )
        if answers(result, group):
            score.axvline(0.0, color=COLOURS[6], linewidth=0.9)
            low, high = score.get_xlim()
            score.set_xlim(min(low, LEAST_RANGE[0]), max(high, LEAST_RANGE[1]))
        else:
            score.set_xlim(-3, 103)
        score.set_xlabel(_score_label(result, group), fontsize=8)
        score.set_title(_label(group), fontsize=8)
        divergences = [max(float(known[group, name]["kl_first"]), KL_FLOOR) for name in names]
        kl.plot(divergences, places, "o", markersize=4, color=COLOURS[1])
        kl.set_xscale("log")
        kl.set_xlabel(KL_LABEL, fontsize=8)
        for axes in (score, kl):
            axes.set_yticks(places, names, fontsize=7)
            axes.grid(axis="x", linewidth=0.4, alpha=0.6)
            _tidy(axes)
        for name in ("dense", *names):
            table.append((*group, name, known[group, name]["bytes"], *_csv(result, group, name)))
    figure.suptitle(
        f"{model}: live state in each format, through prefill and every decoded token",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    header = ("suite", "boundary", "tokens", "format", "bytes", *CSV)
    save_figure(figure, folder / "quality_formats", header, table)
