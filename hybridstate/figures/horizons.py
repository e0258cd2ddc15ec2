"""Decay and horizons: the profile of one step, the histogram, the map, one layer channel by channel."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.figures.style import (
    COLOURS,
    FULL_ATTENTION,
    digits,
    grey_label,
    map_colours,
    new_figure,
    save_figure,
    set_title,
)
from hybridstate.plan.analysis import Analysis
from hybridstate.plan.retention import retention_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

_LONGEST_DECADE: Final = 7  # ten million tokens, beyond any context; what is longer is counted
_LABEL_ROWS: Final = 4
_DECAY_BINS: Final = 50
_CHANNEL_TICKS: Final = 16


def decay_figure(analysis: Analysis, folder: Path) -> None:
    """Share of units by the factor that one token leaves (DASC figure 1), with the cutoffs.

    A unit of horizon H decays by alpha = epsilon^(1/H) per token; it is kept iff alpha exceeds
    epsilon^(1/W_max).
    """
    values = np.concatenate([h.reshape(-1) for h in analysis.horizons])
    alpha = decay_factors(values, analysis.epsilon)
    edges = np.linspace(0, 1, _DECAY_BINS + 1)
    counts, _ = np.histogram(alpha, edges)
    share = 100 * counts / alpha.size
    figure = new_figure(7.0, 3.8)
    axes = figure.add_subplot()
    axes.bar(
        edges[:-1],
        share,
        width=np.diff(edges),
        align="edge",
        color=COLOURS[0],
        edgecolor="white",
        linewidth=0.4,
    )
    median = float(np.median(alpha))
    below = 1 - 0.06 * min(_LABEL_ROWS, len(analysis.cutoffs))
    axes.axvline(median, ymax=below, color=COLOURS[6], linewidth=1.2, label=f"median {median:.3f}")
    rows: list[tuple[object, ...]] = [
        (digits(a), digits(b), int(n))
        for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    for number, cutoff in enumerate(analysis.cutoffs):
        w_max = cutoff.selection.w_max
        bound = analysis.epsilon ** (1 / w_max)
        row = (len(analysis.cutoffs) - 1 - number) % _LABEL_ROWS  # no line crosses a label
        axes.axvline(
            bound,
            ymax=1 - 0.06 * row,
            color=COLOURS[1],
            linestyle="--",
            linewidth=1.0,
            label="cutoffs $W_{max}$ (kept: to the right)" if number == 0 else None,
        )
        axes.annotate(
            str(w_max),
            (bound, 0.985 - 0.06 * row),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-3, 0),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=7.5,
            color=COLOURS[1],
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, max(float(share.max()), 1e-9) * (1.05 + 0.07 * _LABEL_ROWS))
    axes.set_xlabel("share of a unit that one token leaves, at the representative gate input")
    axes.set_ylabel("key channels, %" if analysis.spec.unit == "channel" else "value heads, %")
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=2)
    set_title(axes, analysis, "static one-step decay")
    save_figure(figure, folder / "decay", ("from_alpha", "to_alpha", "units"), rows)


def decay_factors(horizons: NDArray[np.float64], epsilon: float) -> NDArray[np.float64]:
    """alpha = epsilon^(1/H): 0 for a horizon of 0 and 1 for an infinite one."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp(np.log(epsilon) / horizons))


def horizons_figure(analysis: Analysis, folder: Path) -> None:
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
        top = 1 - 0.055 * (number % _LABEL_ROWS)  # each line ends at its label and crosses none
        axes.axvline(selection.w_max, ymax=top, color=COLOURS[1], linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{selection.w_max}: {100 * selection.fraction:.0f} % kept",
            (selection.w_max, top),
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
    set_title(axes, analysis, "static retention horizons; dashed: cutoffs $W_{max}$")
    rows: list[tuple[object, ...]] = [
        (digits(a), digits(b), int(n))
        for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    rows += [("0", "0", zero), (digits(edges[-1]), "inf", longer), ("inf", "inf", infinite)]
    save_figure(figure, folder / "horizons", ("from_tokens", "to_tokens", "units"), rows)


def _decades(values: NDArray[np.float64]) -> tuple[int, int]:
    """Powers of ten around positive values, at least one apart."""
    low = int(np.floor(np.log10(values.min())))
    return low, max(low + 1, int(np.ceil(np.log10(values.max()))))


def horizon_map_figure(analysis: Analysis, folder: Path) -> None:
    """Horizons by block and head (DASC figure 5), full-attention blocks in grey.

    For key channels a cell is the median over the head's channels.
    """
    from matplotlib.patches import Patch

    spec = analysis.spec
    heads = max(layer.value_heads for layer in spec.layers)
    grid = np.full((spec.num_layers, heads), np.nan)
    rows = []
    for layer, found in zip(spec.layers, analysis.horizons, strict=True):
        middle = np.median(found.reshape(layer.value_heads, -1), axis=1)
        grid[layer.index, : layer.value_heads] = middle
        rows += [(layer.index, head, digits(value)) for head, value in enumerate(middle)]
    figure = new_figure(5.4, min(9.0, max(2.6, 1.2 + 0.16 * spec.num_layers)))
    axes = figure.add_subplot()
    _tokens_bar(axes, _tokens_image(axes, grid))
    axes.set_xlabel("value head")
    axes.set_ylabel("model block")
    what = "horizon of each head" if spec.unit == "head" else "median horizon of each head"
    set_title(axes, analysis, what)
    if spec.num_layers > len(spec.layers):
        grey = Patch(color=FULL_ATTENTION, label=grey_label(analysis))
        figure.legend(handles=[grey], loc="outside lower center", fontsize=8, frameon=False)
    save_figure(figure, folder / "horizon_map", ("block", "value_head", "horizon_tokens"), rows)


def channels_figure(analysis: Analysis, folder: Path) -> None:
    """Channel horizons of the layer nearest the median at the first cutoff (DASC figure 7)."""
    from matplotlib.ticker import MultipleLocator

    spec, selection = analysis.spec, analysis.cutoffs[0].selection
    found = retention_map(spec, selection)
    nearest = found.nearest_median
    block, mean = found.blocks[nearest], float(found.layer_means[nearest])
    horizons = analysis.horizons[nearest]
    figure = new_figure(7.0, min(7.5, max(2.6, 1.4 + 0.1 * horizons.shape[0])))
    axes = figure.add_subplot()
    _tokens_bar(axes, _tokens_image(axes, horizons))
    axes.xaxis.set_major_locator(MultipleLocator(_CHANNEL_TICKS))
    axes.set_xlabel("key channel")
    axes.set_ylabel("value head")
    set_title(
        axes,
        analysis,
        f"channel horizons of one layer\nblock {block} (0-based; {block + 1} in 1-based lists) keeps "
        f"{100 * mean:.1f} % at $W_{{max}}$ {selection.w_max}; median layer "
        f"{100 * float(np.median(found.layer_means)):.1f} %",
    )
    rows = [
        (block, block + 1, head, channel, digits(value))
        for (head, channel), value in np.ndenumerate(horizons)
    ]
    header = ("block_from_0", "block_from_1", "value_head", "key_channel", "horizon_tokens")
    save_figure(figure, folder / "channels", header, rows)


def _tokens_image(axes: "Axes", grid: NDArray[np.float64]) -> "AxesImage":
    """Horizons on a logarithmic colour scale of 1 to at most ten million tokens; NaN stays grey."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    known = grid[np.isfinite(grid) & (grid > 0)]
    top = float(known.max()) if known.size else 10.0
    bottom = float(known.min()) if known.size else 1.0
    high = 10.0 ** min(_LONGEST_DECADE, max(1.0, np.ceil(np.log10(top))))
    low = min(10.0 ** max(0.0, np.floor(np.log10(bottom))), high / 10)
    image = axes.imshow(
        np.ma.masked_invalid(np.where(np.isnan(grid), np.nan, np.clip(grid, low, high))),
        cmap=map_colours(),
        norm=LogNorm(low, high),
        aspect="auto",
        interpolation="nearest",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return image


def _tokens_bar(axes: "Axes", image: "AxesImage") -> None:
    figure = axes.get_figure()
    assert figure is not None
    figure.colorbar(image, ax=axes, label="horizon in tokens")
