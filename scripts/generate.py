"""Write what is generated: README tables, docs/results.md, docs/cli.md, the plan schema; `--figures` for the pictures.

Numbers come from `benchmarks/*.json` and from the commands themselves; a table whose source does not exist is left out.
`--check` writes nothing and fails when a page differs from its sources.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calibration_tables
import family_tables
import findings
import kernel_tables
import quality_tables
import reading_table
import scale_tables
import tables
import validation_findings
import validation_tables

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
MODELS = ("tiny-gdn", "tiny-kda")
FIGURE_W_MAX = (16, 64, 128, 512)
README_CUTOFFS = (64, 512)
"""Those of the README's restore table; docs/results.md has all."""

BLOCK = re.compile(
    r"(?P<head><!-- generated: (?P<name>[a-z-]+)[^>]*-->\n)(?P<body>.*?)(?P<tail><!-- end -->)",
    re.S,
)
NOTICE = "<!-- written by scripts/generate.py from {sources}; do not edit -->\n"


def recorded(pattern: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Result files, by name; a document with an envelope gives what is inside it as `result`."""
    for path in sorted(BENCHMARKS.glob(pattern)):
        document: dict[str, Any] = json.loads(path.read_text())
        yield path, document if "result" in document else {"result": document}


def model_name(path: Path, document: dict[str, Any]) -> str:
    """The embedded name or the folder's name, never a path of the recording machine."""
    named = document.get("model") or document["result"].get("model") or path.stem
    return Path(named["name"] if isinstance(named, dict) else named).name


def _program(document: dict[str, Any]) -> str:
    """What ran: the command line, or a script by its name."""
    command = str(document.get("command", ""))
    return f"python {command}" if command.startswith("scripts/") else "hybridstate"


def source_line(path: Path, document: dict[str, Any]) -> str:
    """Where a table comes from: file, device, versions, commit."""
    result = document["result"]
    env: dict[str, Any] = (
        document.get("provenance") or result.get("provenance") or result.get("versions") or {}
    )
    parts = [f"[{path.name}](../{path.relative_to(ROOT)})"]
    parts += [str(env["device"])] if env.get("device") else []
    parts += [
        f"{name} {env[name]}" for name in ("torch", "transformers", "triton") if env.get(name)
    ]
    if env.get("commit"):
        parts.append(f"commit {env['commit'][:12]}")
    command = (
        f" Command: `{_program(document)} {' '.join(document['arguments'])}`."
        if "arguments" in document
        else ""
    )
    warned = document.get("warnings") or []
    said = f" The run warned: {'; '.join(warned)}." if warned else ""
    return "Source: " + ", ".join(parts) + "." + command + said


# --- blocks of the README and of docs/results.md ----------------------------------------------------


def embedded(name: str) -> bool:
    return (ROOT / "hybridstate" / "models" / name / "config.json").exists()


def retained_block() -> str:
    from hybridstate import analyze

    analyses = [analyze(name).to_json() for name in MODELS if embedded(name)]
    return tables.retained(analyses) if analyses else ""


def analyze_block() -> str:
    """What `hybridstate analyze tiny-kda` prints."""
    name = "tiny-kda"
    if not embedded(name):
        return ""
    command = ["hybridstate", "analyze", name, "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    text = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    return f"```console\n$ {' '.join(command)}\n{text}\n```"


def trained(result: dict[str, Any]) -> bool:
    """Whether a recorded calibration is of a trained model."""
    return not result.get("synthetic", False)


def synthetic(result: dict[str, Any]) -> bool:
    return not trained(result)


def anything(_: dict[str, Any]) -> bool:
    return True


def per_model(
    pattern: str,
    table: Callable[[dict[str, Any]], str],
    wanted: Callable[[dict[str, Any]], bool] = anything,
) -> str:
    """One table per recorded file, each under the model's name where it is about one model."""
    parts = []
    for path, document in recorded(pattern):
        text = table(document["result"]) if wanted(document["result"]) else ""
        if text:
            name = model_name(path, document)
            parts.append(text if name == path.stem else f"`{name}`\n\n{text}")
    return "\n\n".join(parts)


BLOCKS: dict[str, Callable[[], str]] = {
    "analyze": analyze_block,
    "models": lambda: per_model("training.json", tables.training),
    "retained": retained_block,
    "restore": lambda: per_model(
        "restore-*.json", lambda result: tables.restore(result, README_CUTOFFS)
    ),
    "precision": lambda: per_model("calibrate-*.json", tables.precision, trained),
    "update": lambda: per_model(
        "update*.json",
        lambda result: tables.update_by_state(result, lambda name: name not in MODELS),
    ),
    "decode": lambda: per_model("decode-*.json", tables.decode_by_state),
    "families": family_tables.families,
    "releases": family_tables.releases,
    "reading": reading_table.reading,
    **kernel_tables.blocks(recorded, source_line),
}


def filled(page: str) -> str:
    """A page with every generated block written anew."""

    def fill(match: re.Match[str]) -> str:
        body = BLOCKS[match["name"]]()
        return match["head"] + (f"\n{body}\n\n" if body else "") + match["tail"]

    return BLOCK.sub(fill, (ROOT / page).read_text())


def readme() -> str:
    return filled("README.md")


def families() -> str:
    return filled("docs/families.md")


def reading() -> str:
    return filled("docs/reading.md")


def kernels() -> str:
    return filled("docs/kernels.md")


Table = Callable[[dict[str, Any]], str]
Comment = Callable[[Mapping[str, dict[str, Any]]], str]


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
    """

    title: str
    pattern: str
    table: Table | None = None
    comment: Comment | None = None
    wanted: Callable[[dict[str, Any]], bool] = anything
    pictures: tuple[str, ...] = ()
    level: int = 2
    joint: Comment | None = None


CALIBRATED = "calibrate-*.json"
VALIDATED = "validate-*.json"
COMMENTS: dict[Table, Comment] = {
    calibration_tables.selectors: findings.selectors,
    calibration_tables.steps: findings.steps,
    calibration_tables.answers: findings.answers,
    calibration_tables.concentration: findings.concentration,
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
    Section("DASC against random masks of the same size", "restore-*.json", tables.advantage),
    Section("What the models need their state for", "restore-*.json", tables.interventions),
    Section("The prefix cache under random operations", "cache-stress.json", tables.stress),
    Section(
        "Answers after compressed hits",
        "quality-*.json",
        quality_tables.quality,
        lambda results: " ".join(filter(None, map(quality_tables.untrained, results.values()))),
    ),
    Section("Answers by task", "quality-*.json", quality_tables.by_task, level=3),
    Section("Answers by format of the state", "quality-*.json", quality_tables.formats, level=3),
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
    Section("Time per output token", "decode-*.json", tables.decode),
)


def results() -> str:
    """docs/results.md: every table, with its source."""
    parts = ["# Results\n", NOTICE.format(sources="benchmarks/*.json")]
    parts.append(
        "Each table names the recorded file it was made from, which holds every sample and the "
        "command. Task questions are synthetic; prose is held-out text. What the columns mean: "
        "[README](../README.md#what-it-costs-restoring-a-cached-prefix) and [glossary](glossary.md). "
        "FP32 over this: above 1 is faster than FP32. DASC against random masks: above 0 is better for "
        "answers, below 0 for KL and bits/byte. Sentences with numbers are written from the same files.\n"
    )
    named: set[Path] = set()
    written = [(section, section_text(section, named)) for section in RESULTS]
    links = [
        f"[{section.title}](#{re.sub('[^a-z0-9 -]', '', section.title.lower()).replace(' ', '-')})"
        for section, text in written
        if text and section.level == 2
    ]
    parts.append(" · ".join(links) + "\n")
    for _, text in written:
        parts += text
    return "\n".join(parts)


def section_text(section: Section, named: set[Path]) -> list[str]:
    """One section; `named` holds the files whose full source line stands above already and is added to."""
    found = [
        (path, document, text)
        for path, document in recorded(section.pattern)
        if section.wanted(document["result"])
        and (
            (text := section.table(document["result"]) if section.table else "")
            or not section.table
        )
    ]
    if not found:
        return []
    by_model = {model_name(path, doc): doc["result"] for path, doc, _ in found}
    comment = section.comment(by_model) if section.comment else ""
    parts = [f"{'#' * section.level} {section.title}\n"] + ([f"{comment}\n"] if comment else [])
    if section.joint:
        parts.append(f"{section.joint(by_model)}\n")
    for path, document, text in found:
        name = model_name(path, document)
        if text and name != path.stem:
            parts.append(f"{'#' * (section.level + 1)} {name}\n")
        if text:
            parts.append(f"{text}\n")
        pictures = [p for p in section.pictures if (ROOT / "figures" / name / f"{p}.png").exists()]
        parts += [
            f"![{section.title}, {name}: {picture.replace('_', ' ')}](../figures/{name}/{picture}.png)\n"
            for picture in pictures
        ]
        if section.table or section.joint:
            short = f"Source: [{path.name}](../{path.relative_to(ROOT)})."
            parts.append(f"{short if path in named else source_line(path, document)}\n")
            named.add(path)
    return parts


# --- docs/cli.md --------------------------------------------------------------------------------------


def command_line() -> str:
    """docs/cli.md: the help text of every command."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from hybridstate.cli.main import app

    os.environ["COLUMNS"] = "100"
    runner = CliRunner()

    def paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        yield path
        for name, child in getattr(command, "commands", {}).items():
            yield from paths(child, (*path, name))

    parts = ["# Command line\n", NOTICE.format(sources="--help")]
    parts.append("Exit codes and the JSON document: [errors.md](errors.md).\n")
    for path in paths(get_command(app)):
        result = runner.invoke(app, [*path, "--help"], prog_name="hybridstate")
        text = "\n".join(line.rstrip() for line in result.output.strip().splitlines())
        parts.append(f"## {' '.join(('hybridstate', *path))}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def plan_schema() -> str:
    from hybridstate.plan.schema import json_schema

    return json_schema()


PAGES: dict[str, Callable[[], str]] = {
    "README.md": readme,
    "docs/families.md": families,
    "docs/reading.md": reading,
    "docs/kernels.md": kernels,
    "docs/results.md": results,
    "docs/cli.md": command_line,
    "plans/plan.schema.json": plan_schema,
}


# --- figures -----------------------------------------------------------------------------------------


def draw_figures() -> None:
    """figures/MODEL/: what `analyze -o` draws, and the recorded results of trained models."""
    from hybridstate import analyze
    from hybridstate.figures import (
        analysis_figures,
        calibration_figures,
        precision_figure,
        restore_figure,
        validation_figures,
    )
    from hybridstate.figures.update import update_figure

    for path, document in recorded("update.json"):
        (ROOT / "figures" / "update").mkdir(parents=True, exist_ok=True)
        update_figure(document["result"], ROOT / "figures" / "update")
        print(f"figures/update/ from {path.name}")

    for name in filter(embedded, MODELS):
        folder = ROOT / "figures" / name
        folder.mkdir(parents=True, exist_ok=True)
        analysis_figures(analyze(name, w_max=FIGURE_W_MAX), folder)
        print(f"figures/{name}/")

    def validated(result: dict[str, Any], name: str, folder: Path) -> object:
        return validation_figures(result["validation"], name, folder)

    drawn: tuple[tuple[str, Callable[[dict[str, Any], str, Path], object]], ...] = (
        ("restore-*.json", restore_figure),
        (VALIDATED, validated),
        (CALIBRATED, precision_figure),
        (CALIBRATED, calibration_figures),
    )
    for pattern, draw in drawn:
        for path, document in recorded(pattern):
            name = model_name(path, document)
            if embedded(name) and trained(document["result"]):
                draw(document["result"], name, ROOT / "figures" / name)
                print(f"figures/{name}/ from {path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a page is stale")
    parser.add_argument("--figures", action="store_true", help="draw figures/ instead")
    options = parser.parse_args()
    if options.figures:
        draw_figures()
        return 0
    stale = []
    for name, page in PAGES.items():
        path, text = ROOT / name, page()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"wrote {name}")
    if options.check and stale:
        print(f"stale: {', '.join(stale)}; run `make generate` and commit the result")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
