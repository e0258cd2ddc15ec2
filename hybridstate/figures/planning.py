"""Bytes and capacity against the cutoff, and the load of each rank."""

from pathlib import Path
from typing import Final

import numpy as np

from hybridstate.figures.style import COLOURS, MIB, digits, new_figure, save_figure, set_title
from hybridstate.plan.analysis import Analysis, cutoffs_at
from hybridstate.plan.capacity import Capacity, unit_bytes
from hybridstate.plan.widths import padded_width, slot_width

_W_GRID: Final = tuple(2**k for k in range(2, 15))
_MOST_PANELS: Final = 4


def bytes_figure(analysis: Analysis, folder: Path) -> None:
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
    figure = new_figure(7.0, 4.2)
    axes = figure.add_subplot()
    for label, (values, colour, style) in series.items():
        axes.plot(w_max, [v / MIB for v in values], color=colour, linestyle=style, label=label)
        marked = [v / MIB for w, v in zip(w_max, values, strict=True) if w in given]
        axes.plot(sorted(set(given)), marked, "o", color=colour, markersize=4)
    axes.axhline(dense.dense_bytes / MIB, color=COLOURS[6], linewidth=0.8, label="dense, full")
    axes.axhline(
        dense.conv_bytes / MIB,
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
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=3)
    set_title(axes, analysis, "bytes of a cached state")
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


def capacity_figure(analysis: Analysis, folder: Path) -> None:
    """How many more states fit into the same bytes of one rank, by layout and placement.

    Dense over compressed bytes of a slot with the convolution state; slot 0 and staging not counted.
    A slot without bytes, where nothing is retained and there is no convolution, has no point.
    """
    spec, found = analysis.spec, analysis.capacity
    tp, dense = found.tp, found.dense
    fp32, int8 = unit_bytes(spec, "fp32"), unit_bytes(spec, "int8-checkpoint")
    balanced, off = (slot_width(spec, analysis.horizons, tp, mode) for mode in ("storage", "off"))
    padded = padded_width(spec, analysis.horizons, tp)
    ranks = tp > 1
    series = {
        "ragged, balanced, INT8": (balanced, int8, COLOURS[2], "-"),
        "ragged, balanced": (balanced, fp32, COLOURS[0], "-"),
        **({"ragged, off": (off, fp32, COLOURS[1], "--")} if ranks else {}),
        "padded, off": (padded, fp32, COLOURS[3], ":"),
    }
    given = sorted({cutoff.selection.w_max for cutoff in analysis.cutoffs})
    grid = sorted({*_W_GRID, *given})
    figure = new_figure(7.0, 4.2)
    axes = figure.add_subplot()
    rows: list[tuple[object, ...]] = []
    highest = 1.0
    for name, (width, unit, colour, style) in series.items():
        label = name if ranks else name.replace(", balanced", "").replace(", off", "")
        units = [width(w) for w in grid]
        slots = [n * unit + dense.conv_bytes for n in units]
        ratios = [dense.full_bytes / size if size else np.nan for size in slots]
        highest = np.nanmax([highest, *ratios])
        axes.plot(grid, ratios, color=colour, linestyle=style, label=label)
        at = [ratio for w, ratio in zip(grid, ratios, strict=True) if w in given]
        axes.plot(given, at, "o", color=colour, markersize=4)
        rows += [
            (label, w, n, size, digits(ratio) if size else "")
            for w, n, size, ratio in zip(grid, units, slots, ratios, strict=True)
        ]
    limit = highest
    if dense.conv_bytes:
        limit = dense.full_bytes / dense.conv_bytes
        axes.axhline(
            limit, color=COLOURS[6], linewidth=0.8, linestyle=":", label="convolution state alone"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(_W_GRID, [f"{w:,}" for w in _W_GRID], fontsize=8)
    ticks = [2**k for k in range(int(np.ceil(np.log2(limit))) + 1)]
    axes.set_yticks(ticks, [f"{t}x" for t in ticks])
    axes.set_ylim(0.9, 2.0 ** np.ceil(np.log2(limit * 1.05)))
    axes.minorticks_off()
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_xlabel("cutoff $W_{max}$ in tokens")
    axes.set_ylabel("states in the same bytes")
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=3)
    where = f"capacity per rank, {tp} ranks" if ranks else "capacity"
    set_title(axes, analysis, f"{where}, dense = 1")
    header = ("series", "w_max", "slot_units", "slot_bytes", "ratio_full")
    save_figure(figure, folder / "capacity", header, rows)


def load_figure(analysis: Analysis, folder: Path) -> None:
    """Retained units of every rank: contiguous heads, permuted heads, and what is stored."""
    found = analysis.capacity
    panels = found.placements[:_MOST_PANELS]
    kinds = _load_kinds(found)
    figure = new_figure(max(6.6, 1.4 + 2.6 * len(panels)), 3.4)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    rows: list[tuple[object, ...]] = []
    for cutoff, placement in zip(analysis.cutoffs, found.placements, strict=True):
        for name, attribute, _ in kinds:
            units = getattr(placement, attribute)
            rows += [(cutoff.selection.w_max, name, rank, n) for rank, n in enumerate(units)]
    ranks = np.arange(found.tp)
    wide = 0.84 / len(kinds)
    for axes, cutoff, placement in zip(grid, analysis.cutoffs, panels, strict=False):
        for number, (name, attribute, colour) in enumerate(kinds):
            units = getattr(placement, attribute)
            axes.bar(
                ranks - 0.42 + wide * (number + 0.5), units, width=wide, color=colour, label=name
            )
        mean = sum(placement.contiguous_units) / found.tp
        axes.axhline(mean, color=COLOURS[6], linewidth=0.8, linestyle="--", label="mean")
        axes.set_title(f"$W_{{max}}$ {cutoff.selection.w_max}", fontsize=9)
        axes.set_xlabel("rank")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelsize=7.5)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("retained " + ("key channels" if found.unit == "channel" else "value heads"))
    figure.suptitle(
        f"{analysis.source.name}: load per rank, placement {found.balance}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=4)
    save_figure(figure, folder / "load", ("w_max", "load", "rank", "units"), rows)


def _load_kinds(found: Capacity) -> tuple[tuple[str, str, str], ...]:
    """Name, attribute and colour of the bars that the placement mode has."""
    before = ("computed, contiguous heads", "contiguous_units", COLOURS[1])
    permuted = ("computed, permuted heads", "compute_units", COLOURS[4])
    after = ("stored", "stored_units", COLOURS[0])
    return {"off": (before,), "storage": (before, after), "hybrid": (before, permuted, after)}[
        found.balance
    ]
