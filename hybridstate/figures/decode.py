"""Decode steps: the cut in time per token against the batch, and where a step's time goes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

import numpy as np

from hybridstate.figures.style import COLOURS, digits, new_figure, save_figure

UNIFORM_ROUTING: Final = "experts under uniform routing; these synthetic routers may use fewer"
"""What bytes are bytes of where the experts that a run used were not counted."""


def earlier_runs(rows: Sequence[Mapping[str, Any]]) -> str:
    """Batches that a recording took from earlier runs, as "batch 1 and 4: run of 41bc226"; "" where all are of one."""
    commits = dict.fromkeys(row["commit"] for row in rows if row.get("commit"))
    named = []
    for commit in commits:
        batches = sorted({row["batch"] for row in rows if row.get("commit") == commit})
        named.append(f"batch {' and '.join(map(str, batches))}: run of {commit[:7]}")
    return ", ".join(named)


def uniform_routing(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the bytes of some rows of `bench decode --dummy` assume uniform routing: no bound of their time.

    Of a recording that has rows of earlier runs, the others count.
    """
    return any(
        row.get("experts_used") is None and row.get("bytes", {}).get("experts", 0)
        for row in rows
        if not row.get("commit")
    )


def older_kernels(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """16-bit formats whose states lay in tiles beside packed ones in matrix order, which since then both have.

    Where no row ran on matrix instructions, tiles are what the engine still takes. Of a recording that has rows of
    earlier runs, the others count.
    """
    if all(row.get("backend") != "gluon" for row in rows):
        return ()
    found = (
        row["state"]
        for row in rows
        if row["state"] in ("bf16", "fp16")
        and row.get("layout_id", "").startswith("tiles")
        and not row.get("commit")
    )
    return tuple(dict.fromkeys(found))


def decode_figures(result: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """Draw what the document of `bench decode` holds into an existing folder; returns the names of the figures."""
    names = []
    if result["speedups"]:
        tpot_figure(result, folder)
        names.append("tpot")
    if any(row.get("components") for row in result["rows"]):
        components_figure(result, folder)
        names.append("components")
    return tuple(names)


def tpot_figure(result: Mapping[str, Any], folder: Path) -> None:
    """Cut of the median time per token against FP32, by batch size; with synthetic weights that of the bytes too.

    Args:
        result: the document of `bench decode`.
        folder: existing; gets tpot.png and tpot.csv.
    """
    figure = new_figure(5.6, 3.2)
    axes = figure.subplots()
    rows: list[tuple[object, ...]] = []
    states = list(dict.fromkeys(entry["state"] for entry in result["speedups"]))
    older = older_kernels(result["rows"])
    for state, colour in zip(states, COLOURS, strict=False):
        points = sorted(
            (entry["batch"], 100 * (1 - 1 / entry["fp32_over_this"]))
            for entry in result["speedups"]
            if entry["state"] == state
        )
        kernels = "older kernels" if state in older else ""
        label = f"{state}, {kernels}" if kernels else state
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
        rows += [(state, batch, digits(cut), kernels) for batch, cut in points]
    allowed = sorted((s["batch"], 100 * s["cut_by_bytes"]) for s in result.get("savings", ()))
    if allowed:
        note = UNIFORM_ROUTING if uniform_routing(result["rows"]) else ""
        label = "damp, by bytes alone" + ":\n" * bool(note) + note.replace("; ", ";\n")
        axes.plot(*zip(*allowed, strict=True), "k--", linewidth=1, label=label)
        rows += [("damp by bytes", batch, digits(cut), note) for batch, cut in allowed]
    published = [
        (s["batch"], 100 * s["paper_tpot_cut"])
        for s in result.get("savings", ())
        if s["paper_tpot_cut"]
    ]
    if published:
        axes.plot(*zip(*published, strict=True), "k*", markersize=9, label="damp, paper")
        rows += [("damp in the paper", b, digits(cut), "another server") for b, cut in published]
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({entry["batch"] for entry in result["speedups"]}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("batch")
    axes.set_ylabel("cut of TPOT against FP32 in %")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"cut of the time per output token against FP32,\n{_title(result)}", fontsize=9, loc="left"
    )
    save_figure(figure, folder / "tpot", ("state", "batch", "tpot_cut_percent", "note"), rows)


def components_figure(result: Mapping[str, Any], folder: Path) -> None:
    """Milliseconds of each component as stacked bars, one bar per batch and format.

    Args:
        result: the document of `bench decode --dummy`.
        folder: existing; gets components.png and components.csv.
    """
    timed = sorted(
        (row for row in result["rows"] if row["components"]),
        key=lambda row: (row["batch"], row["state"] != "fp32"),
    )
    bar = 0.42 if any("-every-" in row["state"] for row in timed) else 0.34
    figure = new_figure(max(6.0, 2.6 + bar * len(timed)), 3.6)
    axes = figure.subplots()
    places = np.arange(len(timed))
    below = np.zeros(len(timed))
    rows: list[tuple[object, ...]] = []
    hues = (*COLOURS[:6], "#999999", "#F0E442", "#DDDDDD")
    for name, colour in zip(timed[0]["components"], hues, strict=True):
        height = np.array([1e3 * max(0.0, row["components"][name]["s"]) for row in timed])
        axes.bar(places, height, 0.8, bottom=below, color=colour, label=name)
        below = below + height
        rows += [
            (row["batch"], row["state"], name, digits(1e3 * row["components"][name]["s"]))
            for row in timed
        ]
    moved = [np.nan if row["bytes_s"] is None else 1e3 * row["bytes_s"] for row in timed]
    label = "bytes alone"
    if uniform_routing(timed):
        label = "\n".join(wrap(f"{label}: {UNIFORM_ROUTING}", 31))
    axes.plot(places, moved, "k_", markersize=14, label=label)
    names = [row["state"].replace("-every-", "\nevery ") for row in timed]
    ticks = [f"{row['batch']}\n{name}" for row, name in zip(timed, names, strict=True)]
    axes.set_xticks(places, ticks, fontsize=7)
    axes.set_xlabel("batch, format")
    axes.set_ylabel("ms a step")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    older = " and ".join(older_kernels(timed))
    subject = "a decode step by component" + f" ({older}: older kernels)" * bool(older)
    axes.set_title(f"{subject},\n{_title(result)}", fontsize=9, loc="left")
    save_figure(figure, folder / "components", ("batch", "state", "component", "ms"), rows)


def _title(result: Mapping[str, Any]) -> str:
    protocol = result["protocol"]
    earlier = earlier_runs(result["rows"])
    return (
        f"{result['model']}, {result['device']['name']}: {protocol['input_tokens']} tokens in, "
        f"{protocol['output_tokens']} out" + f"\n({earlier})" * bool(earlier)
    )
