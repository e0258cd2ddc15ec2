"""One self-contained HTML page of an analysis: the terminal's tables, every figure, no requests."""

import base64
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from hybridstate.plan.analysis import Analysis
from hybridstate.plan.retention import retention_map

REPORT_FILE: Final = "index.html"


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table as text: title, columns, cells, a note below, and which columns are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str | None
    numeric: tuple[bool, ...]


def analysis_page(
    analysis: Analysis,
    parts: Sequence[PageTable | str],
    *,
    warnings: Sequence[str] = (),
    environment: Mapping[str, Any] | None = None,
) -> str:
    """The page: what the terminal shows (`parts`), the figures with captions, where it came from.

    Args:
        analysis: drawn into the figures.
        parts: lines and tables of the human result, in order.
        warnings: shown at the top.
        environment: versions, at the foot.
    """
    figures = _figures(analysis)
    title = f"{analysis.source.name}: recurrent state"
    lines = [part for part in parts if isinstance(part, str)]
    tables = [part for part in parts if isinstance(part, PageTable)]
    tables += [_heads(analysis)] if analysis.spec.unit == "channel" else []
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in lines),
        *(f'<p class="warning">Warning: {escape(line)}</p>' for line in warnings),
        _contents(tables, figures),
        *(_table(number, table) for number, table in enumerate(tables)),
        *(_figure(name, image, analysis) for name, image in figures.items()),
        _foot(analysis, environment or {}),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _figures(analysis: Analysis) -> dict[str, bytes]:
    """Name -> PNG, drawn into a folder that is gone afterwards."""
    from hybridstate.figures import analysis_figures

    with tempfile.TemporaryDirectory(prefix="hybridstate-") as folder:
        names = analysis_figures(analysis, Path(folder))
        return {name: (Path(folder) / f"{name}.png").read_bytes() for name in names}


def _heads(analysis: Analysis) -> PageTable:
    """Layer-head pairs by what they keep, and the layer means (DASC figures 6 to 8)."""
    rows = []
    for cutoff in analysis.cutoffs:
        found = retention_map(analysis.spec, cutoff.selection)
        pairs, means = found.pairs, found.layer_means
        block = found.blocks[found.nearest_median]
        rows.append(
            (
                str(cutoff.selection.w_max),
                *(f"{pairs[kind]:,}" for kind in ("none", "mixed", "all")),
                f"{means.min():.3f} to {means.max():.3f}",
                f"{np.median(means):.3f}",
                f"{block} ({means[found.nearest_median]:.3f})",
            )
        )
    return PageTable(
        title="heads by how many of their channels a checkpoint keeps",
        columns=("W_max", "none", "some", "all", "layer means", "median", "nearest block (mean)"),
        rows=tuple(rows),
        note="one head of one layer each; blocks are counted from 0",
        numeric=(True, True, True, True, False, True, False),
    )


def _contents(tables: Sequence[PageTable], figures: Mapping[str, bytes]) -> str:
    links = [f'<a href="#table-{n}">{escape(table.title)}</a>' for n, table in enumerate(tables)]
    links += [f'<a href="#{name}">{escape(_HEADINGS[name])}</a>' for name in figures]
    return "<nav><ul>" + "".join(f"<li>{link}</li>" for link in links) + "</ul></nav>"


def _table(number: int, table: PageTable) -> str:
    kinds = ["number" if numeric else "text" for numeric in table.numeric]
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(name)}</th>'
        for name, kind in zip(table.columns, kinds, strict=True)
    )
    rows = "\n".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<section id="table-{number}"><h2>{escape(table.title)}</h2>\n<div class="wide"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>{note}</section>"
    )


def _figure(name: str, image: bytes, analysis: Analysis) -> str:
    data = base64.b64encode(image).decode("ascii")
    heading, caption = _HEADINGS[name], _CAPTIONS[name]
    alt = f"{heading} of {analysis.source.name}"
    return (
        f'<section id="{name}"><h2>{escape(heading)}</h2>\n<figure>'
        f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure></section>"
    )


def _foot(analysis: Analysis, environment: Mapping[str, Any]) -> str:
    source = analysis.source
    facts = {
        "gate input": f"{analysis.gate_input:g} ({analysis.gate_input_source})",
        "share left at the horizon": f"{analysis.epsilon:g}",
        "read": f"{source.tensor_bytes:,} bytes of decay tensors, {source.header_bytes:,} bytes of "
        f"headers, of {source.checkpoint_bytes:,} in {source.files} files",
        **{f"sha256 of {name}": digest for name, digest in source.digests.items()},
        **{
            name: str(environment[name])
            for name in ("hybridstate", "python", "numpy", "matplotlib", "commit")
            if environment.get(name)
        },
    }
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    return f"<footer><h2>Where this comes from</h2><dl>{items}</dl></footer>"


_HEADINGS: Final = {
    "decay": "Decay of one step",
    "horizons": "Retention horizons",
    "horizon_map": "Horizons by block and head",
    "retained": "Units kept by block and head",
    "channels": "Channel horizons of one layer",
    "bytes": "Bytes of a cached state",
    "capacity": "Capacity against the cutoff",
    "load": "Load of each rank",
}

_CAPTIONS: Final = {
    "decay": "How much of a unit one token leaves at the representative gate input. Units right of a "
    "dashed line are kept at that cutoff.",
    "horizons": "Tokens until the stated share of a unit's content is left.",
    "horizon_map": "Each cell is a value head; for key channels, the median over its channels. Grey "
    "blocks have no recurrent state.",
    "retained": "Share of each head that a checkpoint keeps at each cutoff.",
    "channels": "The layer whose kept share is nearest the median over layers. Its number is given "
    "counted from 0 and from 1.",
    "bytes": "Temporal state alone and with the convolution state, ragged and padded, all ranks.",
    "capacity": "States that fit into the bytes of one dense state, with the convolution state. "
    "Balanced: every rank stores the same number of units.",
    "load": "Retained units that each rank computes with contiguous heads, with permuted heads, and "
    "stores after balancing.",
}

_STYLE: Final = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #1a1a1a; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
nav ul { columns: 2; padding-left: 1.2rem; font-size: .9rem; }
a { color: #0060a0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #888; } .number { text-align: right; } .text { text-align: left; }
.note, figcaption { color: #555; font-size: .88rem; max-width: 48rem; }
.warning { border-left: 4px solid #D55E00; padding-left: .8rem; }
figure { margin: 0; } img { max-width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .88rem; }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { nav ul { columns: 1; } dl { grid-template-columns: 1fr; } }
"""
