"""Picture of `bench update`: one step against the batch by state format, with the floor of its bytes, and over FP32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hybridstate.figures.style import COLOURS, digits, new_figure, save_figure

_STATES: Final = {
    "fp32": ("FP32", COLOURS[6], "o"),
    "bf16": ("BF16", COLOURS[1], "s"),
    "fp16": ("FP16", COLOURS[4], "^"),
    "damp": ("DAMP, every step", COLOURS[0], "D"),
    "damp-scaled": ("DAMP with a value scale", COLOURS[0], "x"),
}
_ONE_LINE: Final = "damp-scaled"
"""In the CSV alone: the same line as DAMP's to the eye."""
_RING_COLOURS: Final = (COLOURS[2], COLOURS[3], COLOURS[5])
_PHASES: Final = "mixed"
_LAYERS: Final = ("qwen3-next", "kimi-linear")
"""Drawn side by side where they were measured; all layers otherwise."""


def update_figure(result: Mapping[str, Any], folder: Path) -> None:
    """Two panels per layer: measured medians with 10th to 90th percentile, and dotted the least time of their bytes;
    below, how many times faster than FP32 the medians are.

    The floor is a step's bytes over the fastest in-place pass of the same run.

    Args:
        result: the `result` of `bench update`.
        folder: existing; gets latency.png and latency.csv.
    """
    names = list(dict.fromkeys(row["dims"]["name"] for row in result["rows"]))
    names = [name for name in _LAYERS if name in names] or names
    fastest = 1e9 * max(row["pass_gb_per_s"] for row in result["rows"])
    rows: list[tuple[object, ...]] = []
    figure = new_figure(4.6 * len(names), 6.4)
    panels, ratios = figure.subplots(2, len(names), squeeze=False, sharey="row")
    for axes, below, name in zip(panels, ratios, names, strict=True):
        shown = sorted({row["batch"] for row in result["rows"] if row["dims"]["name"] == name})
        lines = _lines(result, name)
        slowest = {
            row["batch"]: row["step_s"]["median"]
            for *_, line in lines
            for row in line
            if row["state"] == "fp32"
        }
        below.set_visible(bool(slowest))
        for label, colour, marker, line in lines:
            batches = [row["batch"] for row in line]
            seconds = [row["step_s"] for row in line]
            floors = [_bytes(row) / fastest for row in line]
            middle = [1e6 * s["median"] for s in seconds]
            spread = [
                [m - 1e6 * s["p10"] for m, s in zip(middle, seconds, strict=True)],
                [1e6 * s["p90"] - m for m, s in zip(middle, seconds, strict=True)],
            ]
            if line[0]["state"] != _ONE_LINE:
                axes.errorbar(
                    batches, middle, yerr=spread, fmt=f"{marker}-", markersize=3.5, linewidth=1.1,
                    capsize=2, color=colour, label=label,
                )  # fmt: skip
                axes.plot(batches, [1e6 * f for f in floors], ":", linewidth=1.0, color=colour)
                both = [b for b in batches if b in slowest]
                faster = [
                    1e6 * slowest[b] / m
                    for b, m in zip(batches, middle, strict=True)
                    if b in slowest
                ]
                below.plot(both, faster, f"{marker}-", markersize=3.5, linewidth=1.1, color=colour)
            rows += [
                (
                    name,
                    label,
                    row["batch"],
                    *(digits(s[x]) for x in ("median", "p10", "p90")),
                    _bytes(row),
                    digits(floor),
                )
                for row, s, floor in zip(line, seconds, floors, strict=True)
            ]
        for part in (axes, below):
            part.set_xscale("log", base=2)
            part.set_xticks(shown, [str(b) for b in shown], fontsize=7)
            part.grid(axis="y", linewidth=0.4, alpha=0.6)
            part.spines[["top", "right"]].set_visible(False)
        axes.set_yscale("log")
        axes.set_title(f"layer of {name}", fontsize=9)
        below.set_ylim(bottom=0)
        below.set_xlabel("batch")
    panels[0].set_ylabel("µs a step (dotted: its bytes)", fontsize=8)
    ratios[0].set_ylabel("FP32 (ours, in place) over this", fontsize=8)
    figure.suptitle(
        f"one update of the recurrent state, {result['device']['name']}, synthetic inputs",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False, ncols=4)
    header = ("layer", "state", "batch", "median_s", "p10_s", "p90_s", "bytes", "floor_s")
    save_figure(figure, folder / "latency", header, rows)


def _lines(
    result: Mapping[str, Any], name: str
) -> list[tuple[str, str, str, list[Mapping[str, Any]]]]:
    """Label, colour, marker and rows by batch of every format of a layer."""
    found = []
    gate = result["rows"][0].get("gate")
    for state, style in _STATES.items():
        line = [
            row
            for row in result["rows"]
            if (row["dims"]["name"], row["state"], row.get("gate")) == (name, state, gate)
        ]
        if line:
            found.append((*style, sorted(line, key=lambda row: row["batch"])))
    rings = [
        row
        for row in result.get("rings", ())
        if (row["dims"]["name"], row["phases"], row["gate"]) == (name, _PHASES, gate)
    ]
    lengths = sorted({row["every"] for row in rings})
    for every, colour in zip(lengths, _RING_COLOURS, strict=False):
        line = sorted((r for r in rings if r["every"] == every), key=lambda row: row["batch"])
        found.append((f"DAMP, every {every} steps", colour, "v", line))
    return found


def _bytes(row: Mapping[str, Any]) -> int:
    return int(row["state_bytes"] + row["io_bytes"] + row.get("ring_bytes", 0))
