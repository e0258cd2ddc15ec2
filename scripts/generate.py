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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import family_tables
import reading_table
import tables

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
MODELS = ("tiny-gdn", "tiny-kda")
FIGURE_W_MAX = (16, 64, 128, 512)

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


def source_line(path: Path, document: dict[str, Any]) -> str:
    """Where a table comes from: file, device, versions, commit."""
    result = document["result"]
    env: dict[str, Any] = document.get("provenance") or result.get("versions") or {}
    parts = [f"[{path.name}](../{path.relative_to(ROOT)})"]
    parts += [str(env["device"])] if env.get("device") else []
    parts += [
        f"{name} {env[name]}" for name in ("torch", "transformers", "triton") if env.get(name)
    ]
    if env.get("commit"):
        parts.append(f"commit {env['commit'][:12]}")
    command = (
        f" Command: `hybridstate {' '.join(document['arguments'])}`."
        if "arguments" in document
        else ""
    )
    return "Source: " + ", ".join(parts) + "." + command


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


def per_model(pattern: str, table: Callable[[dict[str, Any]], str]) -> str:
    """One table per recorded file, each under the model's name where it is about one model."""
    parts = []
    for path, document in recorded(pattern):
        text = table(document["result"])
        if text:
            name = model_name(path, document)
            parts.append(text if name == path.stem else f"`{name}`\n\n{text}")
    return "\n\n".join(parts)


BLOCKS: dict[str, Callable[[], str]] = {
    "analyze": analyze_block,
    "models": lambda: per_model("training.json", tables.training),
    "retained": retained_block,
    "restore": lambda: per_model("restore-*.json", tables.restore),
    "precision": lambda: per_model("calibrate-*.json", tables.precision),
    "update": lambda: per_model("update*.json", tables.update_by_state),
    "decode": lambda: per_model("decode-*.json", tables.decode_by_state),
    "families": family_tables.families,
    "releases": family_tables.releases,
    "reading": reading_table.reading,
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


RESULTS: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("The embedded models", "training.json", tables.training),
    ("Static horizons against observed ones", "validate-*.json", tables.validation),
    ("Restoring a cached prefix", "restore-*.json", tables.restore),
    ("DASC against random masks of the same size", "restore-*.json", tables.advantage),
    ("What the models need their state for", "restore-*.json", tables.interventions),
    ("Precision of the live state", "calibrate-*.json", tables.precision),
    ("One update of the recurrent state", "update*.json", tables.update),
    ("Time per output token", "decode-*.json", tables.decode),
)


def results() -> str:
    """docs/results.md: every table, with its source."""
    parts = ["# Results\n", NOTICE.format(sources="benchmarks/*.json")]
    parts.append(
        "Each table names the recorded file it was made from, which holds every sample and the "
        "command. Task questions are synthetic; prose is held-out text. What the columns mean: "
        "[README](../README.md#what-it-costs-restoring-a-cached-prefix) and [glossary](glossary.md). "
        "FP32 over this: above 1 is faster than FP32. DASC against random masks: above 0 is better for "
        "answers, below 0 for KL and bits/byte.\n"
    )
    for title, pattern, table in RESULTS:
        found = [
            (path, document, text)
            for path, document in recorded(pattern)
            if (text := table(document["result"]))
        ]
        if found:
            parts.append(f"## {title}\n")
        for path, document, text in found:
            name = model_name(path, document)
            if name != path.stem:
                parts.append(f"### {name}\n")
            parts.append(f"{text}\n")
            parts.append(f"{source_line(path, document)}\n")
    return "\n".join(parts)


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
    "docs/results.md": results,
    "docs/cli.md": command_line,
    "plans/plan.schema.json": plan_schema,
}


# --- figures -----------------------------------------------------------------------------------------


def draw_figures() -> None:
    """figures/MODEL/: what `analyze -o` draws, and the recorded results of the benches."""
    from hybridstate import analyze
    from hybridstate.figures import analysis_figures, precision_figure, restore_figure

    for name in filter(embedded, MODELS):
        folder = ROOT / "figures" / name
        folder.mkdir(parents=True, exist_ok=True)
        analysis_figures(analyze(name, w_max=FIGURE_W_MAX), folder)
        print(f"figures/{name}/")
    for pattern, draw in (
        ("restore-*.json", restore_figure),
        ("calibrate-*.json", precision_figure),
    ):
        for path, document in recorded(pattern):
            name = model_name(path, document)
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
