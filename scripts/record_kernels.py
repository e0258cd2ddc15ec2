"""Keep what the kernel scripts wrote on a GPU in benchmarks/, each file with its provenance.

    scripts/record_kernels.py FOLDER --commit COMMIT [--set torch=2.11.0 ...]

FOLDER is the output of scripts/kernels_gpu.sh: codecs.json, ring/ring.json, tune/kernel_tune.json, bytes.json as far
as they exist, and update.json with update-overlap.json, here overlapped.json. The machine of a run has no git, so the
commit is given.
"""

import argparse
import json
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SOURCES = {
    "codecs": ("codecs.json", "scripts/measure_codecs.py"),
    "ring": ("ring/ring.json", "scripts/ring_tune.py"),
    "kernels": ("tune/kernel_tune.json", "scripts/kernel_tune.py"),
    "kernel-bytes": ("bytes.json", "scripts/kernel_bytes.py"),
}
WHOLE = {"update": "update.json", "overlapped": "update-overlap.json"}
"""Files that are recorded verbs already."""
DROPPED = ("tests", "seconds", "ragged", "shapes")
"""Parts that are about the run or about choosing a launch shape."""


def recorded(found: dict[str, Any], command: str, provenance: dict[str, Any]) -> dict[str, Any]:
    """The document with its provenance in front."""
    return {
        "schema": "hybridstate.output/1",
        "command": command,
        "provenance": provenance,
        "result": {key: value for key, value in found.items() if key not in DROPPED},
    }


def main() -> int:
    """Read, convert, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
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
    for name, (source, command) in SOURCES.items():
        if (options.folder / source).exists():
            found = json.loads((options.folder / source).read_text())
            text = json.dumps(recorded(found, command, provenance), indent=1, allow_nan=False)
            (BENCHMARKS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
            print(f"benchmarks/{name}.json")
    for name, source in WHOLE.items():
        path = options.folder / source
        if path.exists():
            document = json.loads(path.read_text())
            document["provenance"] |= {"commit": options.commit, "modified": None}
            text = json.dumps(document, indent=1, allow_nan=False) + "\n"
            (BENCHMARKS / f"{name}.json").write_text(text, encoding="utf-8")
            print(f"benchmarks/{name}.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
