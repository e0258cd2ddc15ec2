"""What a validation observed: decay over time, its spread over units and texts, its order across domains, horizons.

Drawn from the JSON form of `analyze --validate`, so a recorded file gives the same pictures.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.figures.style import COLOURS, digits, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

F64 = NDArray[np.float64]
Found = Mapping[str, Any]

_LONGEST: Final = 1e7
"""Tokens; longer and infinite horizons are drawn there, at the edge."""
_SHORTEST: Final = 0.1
_EDGE: Final = 1e-4
"""Effective decay closer than this to 0 or 1 is drawn there: a logit axis shows both ends, where most units are."""
_TICKS: Final = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
_DASHED: Final = 8
"""Cutoffs that get a line; more would hide the points."""


def validation_figures(found: Found, model: str, folder: Path) -> tuple[str, ...]:
    """Draw all figures of a validation into an existing folder; nothing where it has no values per unit."""
    if found.get("units") is None:
        return ()
    for draw in _DRAWN.values():
        draw(found, model, folder)
    return tuple(_DRAWN)


def traces_figure(found: Found, model: str, folder: Path) -> None:
    """Decay factors over time of the units at p10, p50 and p90 of effective decay (DAMP figures 2d, 6a)."""
    traces = found["units"]["traces"]
    domain = found["decay"]["domains"][0]["domain"]
    figure = new_figure(7.0, 3.4)
    axes = figure.add_subplot()
    rows: list[tuple[object, ...]] = []
    for trace, colour in zip(traces, COLOURS, strict=False):
        values = [np.nan if value is None else value for value in trace["decay"]]
        where = _unit(found, trace["unit"])
        axes.plot(
            np.arange(1, len(values) + 1),
            values,
            color=colour,
            linewidth=1.0,
            label=f"p{trace['percentile']}: {where}",
        )
        rows += [
            (trace["percentile"], where, position, digits(value))
            for position, value in enumerate(values, start=1)
        ]
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(1, len(traces[0]["decay"]))
    axes.set_xlabel(f"position in a {domain} text")
    axes.set_ylabel("decay factor $a_t$ of one token")
    _finish(figure, axes, f"{model}: decay over time, units at three percentiles")
    save_figure(figure, folder / "decay_traces", ("percentile", "unit", "position", "decay"), rows)


def effective_figure(found: Found, model: str, folder: Path) -> None:
    """Effective decay of all units in ascending order, with the band over texts (DAMP figures 2e, 6b)."""
    units = found["units"]
    middle = np.mean([_array(values) for values in units["effective_decay"].values()], axis=0)
    low, high = _array(units["effective_decay_p10"]), _array(units["effective_decay_p90"])
    order = np.argsort(middle, kind="stable")
    places = np.arange(1, order.size + 1)
    figure = new_figure(7.0, 3.4)
    axes = figure.add_subplot()
    axes.fill_between(
        places,
        low[order],
        high[order],
        color=COLOURS[5],
        alpha=0.45,
        linewidth=0,
        step="mid" if order.size < 200 else None,
        label="p10 to p90 over texts",
    )
    axes.plot(places, middle[order], color=COLOURS[0], linewidth=1.4, label="mean over domains")
    for level in (10, 50, 90):
        value = float(np.percentile(middle, level))
        axes.annotate(
            f"p{level} {value:.3f}",
            (1 + level / 100 * (order.size - 1), value),
            xytext=(14, -20) if value > 0.3 else (-12, 32),
            textcoords="offset points",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "linewidth": 0.6},
        )
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlim(1, order.size)
    axes.set_xlabel(f"{_units(found)} of all layers, by effective decay")
    axes.set_ylabel("effective decay $\\exp(E[\\log a])$")
    _finish(figure, axes, f"{model}: effective decay of {order.size:,} {_units(found)}")
    rows = [
        (
            place,
            _unit(found, int(unit)),
            digits(middle[unit]),
            digits(low[unit]),
            digits(high[unit]),
        )
        for place, unit in zip(places.tolist(), order, strict=True)
    ]
    header = ("rank", "unit", "effective_decay", "p10_over_texts", "p90_over_texts")
    save_figure(figure, folder / "effective_decay", header, rows)


def domains_figure(found: Found, model: str, folder: Path) -> None:
    """Effective decay on the other domains against math, with Spearman (DAMP figures 2f, 6c)."""
    factors = {name: _array(v) for name, v in found["units"]["effective_decay"].items()}
    summaries = {domain["domain"]: domain for domain in found["decay"]["domains"]}
    reference, *others = factors
    figure = new_figure(3.6 * len(others), 3.7)
    panels = figure.subplots(1, len(others), squeeze=False, sharex=True, sharey=True)[0]
    for axes, other, colour in zip(panels, others, COLOURS, strict=False):
        ends = np.array([_EDGE, 0.01, 0.5, 0.99, 1 - _EDGE])
        axes.plot(ends, ends, color=COLOURS[6], linewidth=0.7, zorder=0)
        x, y = (np.clip(factors[name], _EDGE, 1 - _EDGE) for name in (reference, other))
        _points(axes, x, y, colour)
        rho = summaries[other]["with_reference"]
        text = "no order" if rho is None else f"Spearman {rho:.3f}"
        axes.set_title(f"{other}: {text}", fontsize=9)
        axes.set_xlabel(f"effective decay on {reference}")
        for axis, set_scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
            set_scale("logit")
            axis.set_ticks(_TICKS, labels=[f"{tick:g}" for tick in _TICKS], fontsize=8)
            axis.set_ticks([], minor=True)
        axes.set_xlim(_EDGE / 2, 1 - _EDGE / 2)
        axes.set_ylim(_EDGE / 2, 1 - _EDGE / 2)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("effective decay on the other domain (logit)")
    figure.suptitle(
        f"{model}: do the same {_units(found)} stay slow? "
        f"(within {_EDGE:g} of 0 or 1: at the edge)",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    rows = [
        (_unit(found, unit), *(digits(factors[name][unit]) for name in factors))
        for unit in range(factors[reference].size)
    ]
    save_figure(figure, folder / "decay_domains", ("unit", *factors), rows)


def horizons_scatter_figure(found: Found, model: str, folder: Path) -> None:
    """Observed horizons (median over prefixes) against static ones, with the cutoffs (DASC 3.4)."""
    units = found["units"]
    static = _array(units["static_horizon"], missing=np.inf)
    observed = _array(units["observed_horizon_median"], missing=np.inf)
    figure = new_figure(5.0, 4.7)
    axes = figure.add_subplot()
    x, y = (np.clip(side, _SHORTEST, _LONGEST) for side in (static, observed))
    axes.set_xscale("log")
    axes.set_yscale("log")
    cutoffs = [cutoff["w_max"] for cutoff in found["cutoffs"]][:_DASHED]
    for number, cutoff in enumerate(cutoffs):
        label = "cutoffs $W_{max}$ " + ", ".join(map(str, cutoffs)) if number == 0 else None
        axes.axvline(cutoff, label=label, color=COLOURS[1], linestyle="--", linewidth=0.8)
        axes.axhline(cutoff, color=COLOURS[1], linestyle="--", linewidth=0.8)
    bounds = [float(min(x.min(), y.min())) / 1.5, float(max(x.max(), y.max())) * 1.5]
    axes.plot(bounds, bounds, color=COLOURS[6], linewidth=0.7, label="equal")
    _points(axes, x, y, COLOURS[0])
    axes.set_xlim(*bounds)
    axes.set_ylim(*bounds)
    edge = int(((static > _LONGEST) | (observed > _LONGEST)).sum())
    axes.set_xlabel(f"static horizon $H_s$ in tokens, $a_s$ = {found['gate_input']:g}")
    axes.set_ylabel(f"observed horizon $H_e$, median of {found['prefixes']} prefixes")
    if edge:
        axes.annotate(
            f"at the edge: {edge} beyond $10^{{7}}$",
            (0.02, 0.975),
            xycoords="axes fraction",
            va="top",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
        )
    median = found["horizons"]["median"]
    rho = "" if median is None else f" (rank {median:.3f})"
    _finish(figure, axes, f"{model}: static and observed horizons{rho}")
    rows = [
        (_unit(found, unit), digits(static[unit]), digits(observed[unit]))
        for unit in range(static.size)
    ]
    header = ("unit", "static_horizon_tokens", "observed_horizon_tokens")
    save_figure(figure, folder / "static_observed", header, rows)


def _points(axes: "Axes", x: F64, y: F64, colour: str) -> None:
    """A scatter whose points shrink and fade as they become many."""
    many = x.size > 300
    axes.scatter(
        x,
        y,
        s=5 if many else 20,
        alpha=0.35 if many else 0.8,
        color=colour,
        linewidths=0,
        rasterized=many,
    )


def _finish(figure: Any, axes: "Axes", title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=3)


def _array(values: list[float | None], missing: float = np.nan) -> F64:
    return np.array([missing if value is None else value for value in values], dtype=np.float64)


def _units(found: Found) -> str:
    return "value heads" if found["unit"] == "head" else "key channels"


def _unit(found: Found, unit: int) -> str:
    """`block 3 head 1` or `block 3 head 1 channel 7` of a place in the pooled order."""
    for layer in found["units"]["layers"]:
        size = int(np.prod(layer["shape"]))
        if unit < size:
            head, *channel = np.unravel_index(unit, layer["shape"])
            tail = f" channel {int(channel[0])}" if channel else ""
            return f"block {layer['index']} head {int(head)}{tail}"
        unit -= size
    raise IndexError(unit)


_DRAWN: Final = {
    "decay_traces": traces_figure,
    "effective_decay": effective_figure,
    "decay_domains": domains_figure,
    "static_observed": horizons_scatter_figure,
}
VALIDATION_FIGURES: Final = tuple(_DRAWN)
"""Files that `validation_figures` writes, as .png and .csv."""
