"""Every picture, each with the CSV it was drawn from; matplotlib is loaded when one is drawn."""

from pathlib import Path

from hybridstate.figures.calibration import calibration_figures as calibration_figures
from hybridstate.figures.decode import decode_figures as decode_figures
from hybridstate.figures.horizons import (
    channels_figure,
    decay_figure,
    horizon_map_figure,
    horizons_figure,
)
from hybridstate.figures.planning import bytes_figure, capacity_figure, load_figure
from hybridstate.figures.results import precision_figure as precision_figure
from hybridstate.figures.results import restore_figure as restore_figure
from hybridstate.figures.retained import retained_figure
from hybridstate.figures.serving import serving_figures as serving_figures
from hybridstate.figures.validation import VALIDATION_FIGURES as VALIDATION_FIGURES
from hybridstate.figures.validation import validation_figures as validation_figures
from hybridstate.plan.analysis import Analysis


def analysis_figures(analysis: Analysis, folder: Path) -> tuple[str, ...]:
    """Draw the figures of `analyze` into an existing folder; returns their names."""
    names = figure_names(analysis.spec.unit, analysis.capacity.tp)
    for name in names:
        _DRAWN[name](analysis, folder)
    return names


def figure_names(unit: str, tp: int) -> tuple[str, ...]:
    """Files that `analysis_figures` writes, as .png and .csv, for this unit and number of ranks."""
    skipped = {
        name for name, wanted in (("channels", unit == "channel"), ("load", tp > 1)) if not wanted
    }
    return tuple(name for name in _DRAWN if name not in skipped)


_DRAWN = {
    "decay": decay_figure,
    "horizons": horizons_figure,
    "horizon_map": horizon_map_figure,
    "retained": retained_figure,
    "channels": channels_figure,
    "bytes": bytes_figure,
    "capacity": capacity_figure,
    "load": load_figure,
}
