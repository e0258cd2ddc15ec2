"""Pictures of `bench serve` and `bench simulate`: latencies and hit rates against the cutoff and the working set."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hybridstate.figures.style import COLOURS, digits, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]
Point = Mapping[str, Any]

METRICS: Final = (
    ("ttft_s", "mean TTFT, s"),
    ("e2e_s", "mean E2E, s"),
    ("hit", "token hit rate"),
)
KINDS: Final = (
    ("dense", "dense", 6, "-"),
    ("int8", "INT8 checkpoints", 5, "--"),
    ("bf16", "BF16", 4, "--"),
    ("damp", "DAMP", 3, "--"),
    ("nr", "zeros (NR)", 0, "o-"),
    ("wr", "replay (WR)", 2, "^-"),
    ("nr+int8", "NR, INT8", 0, "o:"),
    ("wr+int8", "WR, INT8", 2, "^:"),
    ("damp+nr", "DAMP, NR", 3, "o-"),
    ("damp+wr", "DAMP, WR", 3, "^-"),
)
"""Kinds of arms, their labels, colours and lines; those without a marker have no cutoff."""

EQUAL: Final = 1.005
"""Times that are within half a percent are a tie: the larger cutoff is drawn, which keeps less."""

LEGEND: Final = 6
"""Entries of a legend's row, at most."""

PLACED: Final = {"off": ("full", 5), "storage": ("none", 9), "hybrid": ("none", 13)}
"""Fill and size of markers by placement: where placements agree, a ring around a dot shows both."""

HEADER: Final = (
    "arm", "kind", "w_max", "balance", "ratio", "limit", "seeds", "ttft_s", "ttft_p95_s", "tpot_ms", "e2e_s", "hit",
)  # fmt: skip


def serving_figures(result: Result, model: str, folder: Path) -> None:
    """Draw what the result holds.

    Args:
        result: the `result` of either verb.
        model: its name, for the titles.
        folder: existing; gets serving_cutoffs where arms have two cutoffs or more, and serving_ratios where there are
            two working sets or more, as .png and .csv.
    """
    points = [point for point in result["points"] if "mean" in point]
    if not points:
        return
    title = f"{model}, {_how(result)}"
    first = points[0]["limit"]
    operating = result["operating_point"]["ratio"]
    at = [p for p in points if p["limit"] == first and p["ratio"] == operating]
    if len({p["w_max"] for p in at if p["w_max"] is not None}) > 1:
        _cutoffs(at, f"{title}, ratio {operating:g}, {first} running", folder)
    swept = [p for p in points if p["limit"] == first]
    if len({p["ratio"] for p in swept}) > 1:
        title += f", {first} running\n(grey: the operating point; each kind's fastest cutoff there{_notes(swept)})"
        _ratios(swept, operating, title, folder)


def _notes(points: Sequence[Point]) -> str:
    """What else a picture of working sets leaves out or marks."""
    seeds = {len(p["seeds"]) for p in points}
    parts = [", placement off"] if {p["balance"] for p in points} != {"off"} else []
    parts += [f"; hollow: fewer than {max(seeds)} seeds"] if len(seeds) > 1 else []
    return "".join(parts)


def _how(result: Result) -> str:
    trace = result["trace"]
    made = "synthetic trace" if trace["synthetic"] else "trace"
    how = "simulated" if result["simulated"] else f"measured on {result['device']['name']}"
    ranks = result["profile"]["tp"]
    think = result["think_s"]
    parts = [
        f"{made} {trace['name']}",
        f"think time {think:g} s" if think else "no think time",
        how,
    ]
    parts += [f"TP {ranks}"] if ranks > 1 else []
    parts += ["budget of states and KV"] if result.get("budget_scope") == "state+kv" else []
    return ", ".join(parts)


def _value(point: Point, metric: str) -> float:
    mean = point["mean"]
    if metric == "hit":
        return float(mean["hybridstate"]["token_hit_rate"])
    return float(mean["mean_ttft_ms" if metric == "ttft_s" else "mean_e2e_latency_ms"]) / 1e3


def _row(point: Point) -> tuple[object, ...]:
    mean = point["mean"]
    return (
        point["arm"],
        point["kind"],
        "" if point["w_max"] is None else point["w_max"],
        point["balance"],
        digits(point["ratio"]),
        point["limit"],
        len(point["seeds"]),
        digits(_value(point, "ttft_s")),
        digits(mean["p95_ttft_ms"] / 1e3),
        digits(mean["mean_tpot_ms"]),
        digits(_value(point, "e2e_s")),
        digits(_value(point, "hit")),
    )


def _panels(title: str) -> tuple[Any, Sequence["Axes"]]:
    figure = new_figure(10.6, 3.9)
    panels = figure.subplots(1, len(METRICS))
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    for axes, (_, label) in zip(panels, METRICS, strict=True):
        axes.set_ylabel(label, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure, panels


def _finish(
    figure: Any,
    panels: Sequence["Axes"],
    path: Path,
    rows: Sequence[tuple[object, ...]],
    header: Sequence[str] = HEADER,
) -> None:
    for axes in panels:
        axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
    panels[-1].set_ylim(0, max(1.04, panels[-1].get_ylim()[1]))
    handles, labels = panels[0].get_legend_handles_labels()
    columns = ceil(len(labels) / ceil(len(labels) / LEGEND))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=7, frameon=False
    )
    save_figure(figure, path, header, rows)


def _cutoffs(points: Sequence[Point], title: str, folder: Path) -> None:
    """TTFT, E2E and hit rate against W_max: a line per policy and placement, levels for arms without a cutoff."""
    figure, panels = _panels(title)
    every = sorted({p["w_max"] for p in points if p["w_max"] is not None})
    for kind, label, colour, style in KINDS:
        for balance, (filled, size) in PLACED.items():
            found = sorted(
                (p for p in points if (p["kind"], p["balance"]) == (kind, balance)),
                key=lambda p: p["w_max"] or 0,
            )
            if not found:
                continue
            name = label if balance == "off" else f"{label}, {balance}"
            for axes, (metric, _) in zip(panels, METRICS, strict=True):
                values = [_value(p, metric) for p in found]
                if found[0]["w_max"] is None:
                    axes.axhline(
                        values[0], color=COLOURS[colour], linestyle=style, linewidth=1, label=name
                    )
                else:
                    axes.plot(
                        [p["w_max"] for p in found],
                        values,
                        style if balance == "off" else style.replace("-", "--"),
                        color=COLOURS[colour],
                        fillstyle=filled,
                        markersize=size,
                        linewidth=1,
                        label=name,
                    )
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, [str(w) for w in every])
        axes.minorticks_off()
        axes.set_xlabel("W_max, tokens", fontsize=8)
    _finish(figure, panels, folder / "serving_cutoffs", [_row(p) for p in points])


def _ratios(points: Sequence[Point], operating: float, title: str, folder: Path) -> None:
    """The same against working set over dense slots, without placement, at the cutoff of each kind that is fastest at
    the operating point; hollow where fewer seeds ran than elsewhere."""
    most = max(len(p["seeds"]) for p in points)
    figure, panels = _panels(title)
    for kind, label, colour, style in KINDS:
        same = [p for p in points if p["kind"] == kind and p["balance"] == "off"]
        if not same:
            continue
        there = [p for p in same if p["ratio"] == operating] or same
        fastest = min(_value(p, "ttft_s") for p in there)
        close = [p for p in there if _value(p, "ttft_s") <= EQUAL * fastest]
        cutoff = max((p["w_max"] for p in close if p["w_max"] is not None), default=None)
        found = sorted((p for p in same if p["w_max"] == cutoff), key=lambda p: p["ratio"])
        name = label if cutoff is None else f"{label} {cutoff}"
        for axes, (metric, _) in zip(panels, METRICS, strict=True):
            axes.plot(
                [p["ratio"] for p in found],
                [_value(p, metric) for p in found],
                style if style[0] != "-" else f"s{style}",
                color=COLOURS[colour],
                markersize=4,
                linewidth=1,
                label=name,
            )
            few = [p for p in found if len(p["seeds"]) < most]
            axes.plot(
                [p["ratio"] for p in few],
                [_value(p, metric) for p in few],
                style[0] if style[0] != "-" else "s",
                color=COLOURS[colour],
                markerfacecolor="white",
                markersize=4,
            )
    for axes in panels:
        axes.axvline(operating, color="#BDBDBD", linewidth=0.8, zorder=0)
        axes.set_xlabel("working set / dense slots", fontsize=8)
    _finish(figure, panels, folder / "serving_ratios", [_row(p) for p in points])


POLICY_STYLES: Final = {"lru": ("o", 0), "leaf-lru": ("s", 1), "cost": ("^", 2)}
"""Marker and colour of an eviction policy."""


def policy_figure(results: Sequence[Result], arm: str, model: str, folder: Path) -> None:
    """Mean TTFT, E2E and hit rate of dense and of one arm against the working set, a colour for each eviction policy.

    Args:
        results: `result` of runs that differ in `policy` alone.
        arm: beside dense, dashed.
        model: its name, for the title.
        folder: existing; gets serving_policies as .png and .csv.
    """
    first = results[0]["points"][0]["limit"]
    figure, panels = _panels(f"{model}, {_how(results[0])}, {first} running, by eviction policy")
    rows = []
    for result in results:
        marker, colour = POLICY_STYLES[result["policy"]]
        points = [p for p in result["points"] if "mean" in p and p["limit"] == first]
        for name, line in (("dense", "-"), (arm, "--")):
            found = sorted((p for p in points if p["arm"] == name), key=lambda p: p["ratio"])
            for axes, (metric, _) in zip(panels, METRICS, strict=True):
                axes.plot(
                    [p["ratio"] for p in found],
                    [_value(p, metric) for p in found],
                    f"{marker}{line}",
                    color=COLOURS[colour],
                    markersize=4,
                    linewidth=1,
                    label=f"{name}, {result['policy']}",
                )
            rows += [(result["policy"], *_row(p)) for p in found]
    for axes in panels:
        axes.set_xlabel("working set / dense slots", fontsize=8)
    _finish(figure, panels, folder / "serving_policies", rows, ("policy", *HEADER))
