"""docs/results.md: its sections in order, each with tables, findings, pictures and the source of its numbers."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calibration_tables
import claims
import findings
import pictures
import quality_findings
import quality_tables
import scale_tables
import tables
import validation_findings
import validation_tables
from recordings import (
    CALIBRATED,
    DECODED,
    QUALITY,
    ROOT,
    VALIDATED,
    Merge,
    anything,
    runs,
    source_line,
    synthetic,
    trained,
)

Table = Callable[[dict[str, Any]], str]
Comment = Callable[[Mapping[str, dict[str, Any]]], str]

NOTICE = "<!-- written by scripts/generate.py from {sources}; do not edit -->\n"


@dataclass(frozen=True, slots=True)
class Section:
    """One heading of docs/results.md.

    Attributes:
        title: the heading.
        pattern: recorded files.
        table: Markdown of one file's result, "" where it has nothing to say; None: the comment alone.
        comment: prose from the results of all files by model, above the tables.
        wanted: which of the files.
        pictures: names in figures/MODEL/, below each model's table.
        level: 2, or 3 below the section before.
        joint: one table of all files' results by model instead of `table`.
        merge: joins recordings of one model, see `recordings.runs`.
    """

    title: str
    pattern: str
    table: Table | None = None
    comment: Comment | None = None
    wanted: Callable[[dict[str, Any]], bool] = anything
    pictures: tuple[str, ...] = ()
    level: int = 2
    joint: Comment | None = None
    merge: Merge | None = None


COMMENTS: dict[Table, Comment] = {
    calibration_tables.selectors: findings.selectors,
    calibration_tables.steps: findings.steps,
    calibration_tables.answers: findings.answers,
    calibration_tables.concentration: findings.concentration,
    calibration_tables.greedy: findings.greedy,
}
PICTURES: dict[Table, tuple[str, ...]] = {
    calibration_tables.formats: ("divergence_bits",),
    calibration_tables.steps: ("error_steps",),
    calibration_tables.concentration: ("channel_error", "state_magnitude"),
}
RESULTS: tuple[Section, ...] = (
    Section("The embedded models", "training.json", tables.training),
    Section(
        "Static horizons against observed ones",
        VALIDATED,
        validation_tables.validation,
        validation_findings.validation,
        pictures=("static_observed",),
    ),
    Section(
        "A measured gate input",
        VALIDATED,
        validation_tables.gate_input,
        validation_findings.gate_input,
        level=3,
    ),
    Section(
        "Decay of three kinds of text",
        VALIDATED,
        validation_tables.decay,
        validation_findings.decay,
        pictures=("effective_decay", "decay_domains", "decay_traces"),
        level=3,
    ),
    Section(
        "A needle with parts of the cache zeroed",
        VALIDATED,
        validation_tables.intervention,
        validation_findings.intervention,
        level=3,
    ),
    Section("Restoring a cached prefix", "restore-*.json", tables.restore, pictures=("restore",)),
    Section(
        "DASC against random masks of the same size",
        "restore-*.json",
        tables.advantage,
        findings.masks,
    ),
    Section(
        "What the models need their state for",
        "restore-*.json",
        tables.interventions,
        findings.needs,
    ),
    Section(
        "Answers after compressed hits",
        QUALITY,
        quality_tables.quality,
        quality_findings.hits,
        pictures=("quality_cutoffs", "quality_ttft"),
        merge=quality_tables.merged,
    ),
    Section(
        "Hits against random masks of the same bytes",
        QUALITY,
        quality_tables.against_masks,
        level=3,
        merge=quality_tables.merged,
    ),
    Section(
        "Answers by task", QUALITY, quality_tables.by_task, level=3, merge=quality_tables.merged
    ),
    Section(
        "Answers by format of the state",
        QUALITY,
        quality_tables.formats,
        quality_findings.formats,
        pictures=("quality_formats",),
        level=3,
        merge=quality_tables.merged,
    ),
    Section("Precision of the live state", CALIBRATED, comment=findings.precision, wanted=trained),
    *(
        Section(
            title,
            CALIBRATED,
            table,
            COMMENTS.get(table),
            wanted=trained,
            pictures=PICTURES.get(table, ()),
            level=3,
        )
        for title, table in calibration_tables.TABLES
    ),
    Section("Calibration at full size", CALIBRATED, joint=scale_tables.at_scale, wanted=synthetic),
    Section("Emitted modules", "emitted.json", scale_tables.emitted),
    Section("One update of the recurrent state", "update*.json", tables.update),
    Section("Time per output token", DECODED, tables.decode, wanted=trained),
    Section(
        "Time per output token at full size",
        DECODED,
        scale_tables.decode,
        wanted=synthetic,
        pictures=("tpot", "components"),
    ),
)


def results() -> str:
    """docs/results.md: every table, with its source."""
    parts = ["# Results\n", NOTICE.format(sources="benchmarks/*.json")]
    parts.append(
        "Each table names the recorded file it was made from, which holds every sample and the "
        "command. Task questions are synthetic; prose is held-out text. What the columns mean: "
        "[README](../README.md#what-it-costs-restoring-a-cached-prefix) and [glossary](glossary.md). "
        "FP32 over this: above 1 is faster than FP32, which is this package's own kernel in place; the "
        "fastest of all is in [kernels.md](kernels.md#forms). DASC against random masks: above 0 is better for "
        "answers, below 0 for KL and bits/byte. Sentences with numbers are written from the same files.\n"
    )
    named: set[Path] = set()
    written = [(section, section_text(section, named)) for section in RESULTS]
    links = [
        f"[{section.title}](#{re.sub('[^a-z0-9 -]', '', section.title.lower()).replace(' ', '-')})"
        for section, text in written
        if text and section.level == 2
    ]
    beside = claims.claims()
    if beside:
        links.insert(0, "[Beside the papers](#beside-the-papers)")
    parts.append(" · ".join(links) + "\n")
    if beside:
        parts += ["## Beside the papers\n", f"{beside}\n"]
    for _, text in written:
        parts += text
    return "\n".join(parts)


def section_text(section: Section, named: set[Path]) -> list[str]:
    """One section; `named` holds the files whose full source line stands above already and is added to."""
    found = [
        (run, text)
        for run in runs(section.pattern, section.wanted, section.merge)
        if (text := section.table(run.result) if section.table else "") or not section.table
    ]
    if not found:
        return []
    by_model = {run.name: run.result for run, _ in found}
    comment = section.comment(by_model) if section.comment else ""
    parts = [f"{'#' * section.level} {section.title}\n"] + ([f"{comment}\n"] if comment else [])
    if section.joint:
        parts.append(f"{section.joint(by_model)}\n")
    for run, text in found:
        if text and run.titled:
            parts.append(f"{'#' * (section.level + 1)} {run.name}\n")
        if text:
            parts.append(f"{text}\n")
        for picture in section.pictures:
            if (pictures.FIGURES / run.name / f"{picture}.png").exists():
                parts.append(f"{pictures.link(run.name, picture, run.name)}\n")
        for path, document in run.files if section.table or section.joint else ():
            short = f"Source: [{path.name}](../{path.relative_to(ROOT)})."
            parts.append(f"{short if path in named else source_line(path, document)}\n")
            named.add(path)
    return parts
