"""Keep what the kernel scripts wrote on a GPU in benchmarks/, each file with its provenance.

    scripts/record_kernels.py FOLDER --commit COMMIT [--set torch=2.11.0 ...] [--replace]

FOLDER is the output of scripts/kernels_gpu.sh: codecs.json, ring/ring.json, tune/kernel_tune.json, bytes.json as far
as they exist, and update.json with update-overlap.json, here overlapped.json; also emitted.json of
scripts/emitted_check.py and decode/*.json of scripts/decode_at_scale.py. The machine of a run has no git, so the commit
is given.

What a run left out keeps the rows that were recorded before, each with the `commit` of its run. A file that would lose
rows nevertheless stays as it was, the others are written, and the exit code is 1. `--replace` keeps nothing.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridstate.provenance import readable_json

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SOURCES = {
    "codecs": ("codecs.json", "scripts/measure_codecs.py"),
    "ring": ("ring/ring.json", "scripts/ring_tune.py"),
    "kernels": ("tune/kernel_tune.json", "scripts/kernel_tune.py"),
    "kernel-bytes": ("bytes.json", "scripts/kernel_bytes.py"),
    "emitted": ("emitted.json", "scripts/emitted_check.py"),
}
WHOLE = {"update": "update.json", "overlapped": "update-overlap.json"}
"""Files that are recorded verbs already."""
STEPS = "decode/decode-*.json"
"""Also recorded already; such a run ends at its deadline without saying which batches it did not reach."""
DROPPED = ("tests", "seconds", "ragged", "shapes")
"""Parts that are about the run or about choosing a launch shape."""
ALIKE = ("device", "torch", "triton")
"""Of the provenance: rows of two runs stand in one file only where these agree."""


def recorded(found: dict[str, Any], command: str, provenance: dict[str, Any]) -> dict[str, Any]:
    """The document with its provenance in front."""
    return {
        "schema": "hybridstate.output/1",
        "command": command,
        "provenance": provenance,
        "result": {key: value for key, value in found.items() if key not in DROPPED},
    }


def completed(found: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The document with earlier rows in place of each row that is left out, marked with the commit of their run.

    Raises:
        ValueError: those rows are of another device or of other versions.
    """
    rows, commit = [], before["provenance"]["commit"]
    was, now = ({key: d["provenance"].get(key) for key in ALIKE} for d in (before, found))
    for row in found["result"].get("rows", ()):
        named = {key: value for key, value in row.items() if key != "left_out"}.items()
        earlier = [
            old | {"commit": old.get("commit", commit)}
            for old in before["result"].get("rows", ())
            if row.get("left_out") and named <= old.items() and not old.get("left_out")
        ]
        if earlier and was != now:
            raise ValueError(f"rows that this run left out are of {was}, it is of {now}")
        rows += earlier or [row]
    return found | {"result": found["result"] | {"rows": rows}} if rows else found


def extended(found: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Decode steps, with the earlier rows of batches that this run did not reach, marked with the commit of their run.

    Raises:
        ValueError: those rows are of another device or of other versions.
    """
    was, now = ({key: d["provenance"].get(key) for key in ALIKE} for d in (before, found))
    reached = {row["batch"] for row in found["result"]["rows"]}
    result = dict(found["result"])
    for part in ("rows", "savings", "speedups"):
        earlier = [
            old | {"commit": old.get("commit", before["provenance"]["commit"])}
            for old in before["result"][part]
            if old["batch"] not in reached
        ]
        if earlier and was != now:
            raise ValueError(f"batches that this run did not reach are of {was}, it is of {now}")
        result[part] = [*result[part], *earlier]
    return found | {"result": result}


def entries(found: object) -> int:
    """Dictionaries at any depth, such as rows and rows of parts."""
    inside = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return isinstance(found, dict) + sum(entries(each) for each in inside)


def documents(folder: Path, provenance: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and contents of every file that the folder has the source of."""
    for name, (source, command) in SOURCES.items():
        if (folder / source).exists():
            yield name, recorded(json.loads((folder / source).read_text()), command, provenance)
    for name, source in WHOLE.items():
        if (folder / source).exists():
            document = json.loads((folder / source).read_text())
            commit = {key: provenance[key] for key in ("commit", "modified")}
            yield name, document | {"provenance": document["provenance"] | commit}
    for path in sorted(folder.glob(STEPS)):
        yield path.stem, json.loads(path.read_text())


def keep(path: Path, document: dict[str, Any], replace: bool = False) -> str:
    """Write one file, and say what of it is of earlier runs or missing.

    Args:
        replace: whatever the file held.

    Raises:
        ValueError: the file would lose rows.
    """
    if path.exists() and not replace:
        before = json.loads(path.read_text())
        steps = "speedups" in document["result"]
        document = (extended if steps else completed)(document, before)
        old, new = entries(before["result"]), entries(document["result"])
        if new < old:
            raise ValueError(f"{new} entries instead of the {old} recorded before")
    path.write_bytes(readable_json(document))
    rows = document["result"].get("rows", ())
    earlier, missing = (sum(key in row for row in rows) for key in ("commit", "left_out"))
    kept = f", {earlier} rows of earlier runs" if earlier else ""
    return f"written{kept}" + (f", {missing} left out" if missing else "")


def main() -> int:
    """Read, convert, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--replace", action="store_true", help="keep nothing of earlier runs")
    options = parser.parse_args()
    versions = dict(entry.split("=", 1) for entry in options.set)
    hardware: dict[str, Any] = {}
    for name in ("tune/kernel_tune.json", "codecs.json"):
        path = options.folder / name
        if path.exists():
            document = json.loads(path.read_text())
            hardware = document.get("device") or document["codecs"][0]["device"]
            break
    provenance = {"commit": options.commit, "modified": None, **versions}
    provenance |= {"device": hardware.get("name"), "hardware": hardware}
    refused = False
    for name, document in documents(options.folder, provenance):
        try:
            said = keep(BENCHMARKS / f"{name}.json", document, options.replace)
        except ValueError as error:
            refused, said = True, f"NOT written: {error}"
        print(f"benchmarks/{name}.json: {said}")
    return int(refused)


if __name__ == "__main__":
    raise SystemExit(main())
