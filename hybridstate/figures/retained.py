"""Retained shares by block and head (DASC figures 6 and 8)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.figures.style import (
    FULL_ATTENTION,
    digits,
    grey_label,
    map_colours,
    new_figure,
    save_figure,
)
from hybridstate.plan.analysis import Analysis
from hybridstate.plan.select import Selection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVERY_BLOCK: Final = 16
EVERY_HEAD: Final = 8
"""Models of at most as many blocks, or heads, have each one numbered."""


def retained_figure(analysis: Analysis, folder: Path) -> None:
    """Retained share by block and head, one panel per cutoff, blocks without a state in grey."""
    spec = analysis.spec
    heads = max(layer.value_heads for layer in spec.layers)
    panels, rows = [], []
    for cutoff in analysis.cutoffs:
        grid = np.full((spec.num_layers, heads), np.nan)
        for layer, mask in zip(spec.layers, cutoff.selection.retained, strict=True):
            share = mask.reshape(layer.value_heads, -1).mean(axis=1)
            grid[layer.index, : layer.value_heads] = share
            rows += [
                (cutoff.selection.w_max, layer.index, head, digits(value))
                for head, value in enumerate(share)
            ]
        panels.append((cutoff.selection, grid))

    figure = _panels(analysis, panels)
    save_figure(figure, folder / "retained", ("w_max", "block", "value_head", "share"), rows)


def _panels(
    analysis: Analysis, panels: Sequence[tuple[Selection, NDArray[np.float64]]]
) -> "Figure":
    """One map per selection, at most four in a row; NaN has no recurrent state."""
    from matplotlib.patches import Patch

    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    height = min(9.0, max(2.4, 1.0 + 0.16 * analysis.spec.num_layers)) * lines + 0.6
    figure = new_figure(max(5.6, 1.4 + 2.2 * columns), height)
    colours = map_colours()
    heads = max(layer.value_heads for layer in analysis.spec.layers)
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
        if heads <= EVERY_HEAD:
            axes.set_xticks(range(heads))
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
        if analysis.spec.num_layers <= EVERY_BLOCK:
            axes.set_yticks(range(analysis.spec.num_layers))
        else:
            axes.yaxis.get_major_locator().set_params(integer=True)
    for axes in grids[-1]:
        axes.set_xlabel("value head")
    for axes in grids[:, 0]:
        axes.set_ylabel("model block")
    grey = analysis.spec.num_layers > len(analysis.spec.layers)
    legend = [Patch(color=FULL_ATTENTION, label=grey_label(analysis))] if grey else []
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
