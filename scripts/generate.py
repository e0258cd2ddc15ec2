"""Write what is generated: tables of the README and of docs/, docs/results.md, docs/cli.md, the plan schema.

Numbers come from `benchmarks/*.json` and from the commands themselves; a table whose source does not exist is left out.
`--check` writes nothing and fails when a page differs from its sources; `--figures` draws the pictures instead.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import family_tables
import kernel_tables
import pictures
import quality_tables
import reading_table
import results_page
import serving_tables
import stress_tables
import tables
from recordings import CALIBRATED, DECODED, MODELS, ROOT, anything, embedded, filled, runs, trained

README_CUTOFFS = (64, 512)
"""Those of the README's restore table; docs/results.md has all."""
README_LAYERS, README_BATCHES = ("qwen3-next", "kimi-linear"), (1, 4, 16, 64, 256)
"""Those of its table of updates."""


# --- blocks of the README and of docs/results.md ----------------------------------------------------


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


def per_model(
    pattern: str,
    table: Callable[[dict[str, Any]], str],
    wanted: Callable[[dict[str, Any]], bool] = anything,
) -> str:
    """One table per recorded file, each under the model's name where it is about one model."""
    found = [(run, text) for run in runs(pattern, wanted) if (text := table(run.result))]
    return "\n\n".join(f"`{run.name}`\n\n{text}" if run.titled else text for run, text in found)


BLOCKS: dict[str, Callable[[], str]] = {
    "analyze": analyze_block,
    "retained": retained_block,
    "restore": lambda: per_model(
        "restore-*.json", lambda result: tables.restore(result, README_CUTOFFS)
    ),
    "precision": lambda: per_model(CALIBRATED, tables.precision, trained),
    "update": lambda: per_model(
        "update*.json",
        lambda result: tables.update_by_state(result, README_LAYERS, README_BATCHES),
    ),
    "decode": lambda: per_model(DECODED, tables.decode_by_state, trained),
    "families": family_tables.families,
    "releases": family_tables.releases,
    "reading": reading_table.reading,
    **kernel_tables.blocks(),
    **serving_tables.BLOCKS,
    **stress_tables.BLOCKS,
    **quality_tables.BLOCKS,
}


def with_blocks(name: str) -> Callable[[], str]:
    """A page of the repository with its generated blocks written anew."""
    return lambda: filled((ROOT / name).read_text(), BLOCKS)


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

    parts = ["# Command line\n", results_page.NOTICE.format(sources="--help")]
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
    **{
        name: with_blocks(name)
        for name in (
            "README.md",
            "docs/families.md",
            "docs/reading.md",
            "docs/kernels.md",
            "docs/quality.md",
            "docs/serving.md",
        )
    },
    "docs/results.md": results_page.results,
    "docs/cli.md": command_line,
    "plans/plan.schema.json": plan_schema,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a page is stale")
    parser.add_argument("--figures", action="store_true", help="draw figures/ instead")
    options = parser.parse_args()
    if options.figures:
        pictures.draw()
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
