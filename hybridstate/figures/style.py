"""How every picture looks and is written: size, colours, reproducible bytes, the CSV beside it.

The Agg renderer, fixed sizes, no date and no version in the metadata. Colours are those of Okabe and
Ito and the viridis map, which colour-blind readers can tell apart. No other module imports matplotlib's
figures.
"""

import csv
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hybridstate.plan.analysis import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito."""

FULL_ATTENTION: Final = "#BDBDBD"
"""Rows of blocks without a recurrent state."""

MIB: Final = 2**20
_DPI: Final = 150


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


def map_colours() -> "Colormap":
    """Viridis, grey where there is no value."""
    from matplotlib import colormaps

    return colormaps["viridis"].with_extremes(bad=FULL_ATTENTION)


def set_title(axes: "Axes", analysis: Analysis, text: str) -> None:
    """Model and subject above the left end, without a box around the plot."""
    axes.set_title(f"{analysis.source.name}: {text}", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def grey_label(analysis: Analysis) -> str:
    """What grey blocks are: full attention, in Mamba2 hybrids also blocks of an MLP or experts."""
    other = "full attention" if not analysis.spec.family.analysis_only else "other blocks"
    return f"{other} (no recurrent state)"


def digits(value: Any) -> str:
    """A number with the digits that matter, the same on every platform."""
    return f"{float(value):.9g}"
