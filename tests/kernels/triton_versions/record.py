"""Compile the kernels with several Triton versions from PyPI and compare with, or write, the record.

    python tests/kernels/triton_versions/record.py [--update] [--folder DIR] [VERSION ...]

Versions are installed without dependencies, each into a folder of its own, and only when they are not there yet. This
is what `make test-triton` runs; it needs the network, so the test suite compares the installed version alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "tests" / "data" / "triton-versions.json"
VERSIONS = ("3.4.0", "3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
SLACK = 1.08
"""Registers and instructions may exceed their record by this much; spilled bytes may not exceed it."""


def compiled(path: str | None, *arguments: str) -> dict[str, dict[str, Any]]:
    """Results of `compile_kernels.py` by kernel, with the Triton in `path` or the installed one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    parts = [x for x in (path, str(ROOT), environment.get("PYTHONPATH")) if x]
    environment["PYTHONPATH"] = os.pathsep.join(parts)
    with (
        tempfile.TemporaryDirectory() as cache
    ):  # another version's cache would not be compiled again
        environment["TRITON_CACHE_DIR"] = cache
        script = str(Path(__file__).with_name("compile_kernels.py"))
        done = subprocess.run(
            [sys.executable, script, *arguments],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if not lines or "Traceback" in done.stderr:
        raise SystemExit(done.stderr)
    return {x.pop("kernel"): x for x in lines}


def problems(found: dict[str, dict[str, Any]], known: dict[str, dict[str, Any]]) -> list[str]:
    """What failed, spills, or is worse than the record allows."""
    wrong = []
    for name, kernel in found.items():
        if "failed" in kernel:
            wrong.append(f"{name}: {kernel['failed']}")
        record = known.get(name, {})
        spilled, allowed = (x.get("stack", 0) + x.get("local", 0) for x in (kernel, record))
        if spilled > allowed:
            wrong.append(f"{name}: spills {spilled} bytes to memory, recorded {allowed}")
        for key in ("registers", "instructions"):
            if key in record and kernel.get(key, 0) > SLACK * record[key]:
                wrong.append(f"{name}: {key} {kernel.get(key)}, recorded {record[key]}")
        for key in ("loads_128", "stores_128"):
            if kernel.get(key, 0) < record.get(key, 0):
                wrong.append(f"{name}: {key} {kernel.get(key)}, recorded {record[key]}")
        for key in ("gluon", "plain", "absent"):
            if key in record and kernel.get(key) != record[key]:
                wrong.append(f"{name}: {key} {kernel.get(key)}, recorded {record[key]}")
    return wrong


def install(version: str, folder: Path) -> str:
    """The folder that holds this version, installed from PyPI if it is not there."""
    target = folder / f"triton-{version}"
    if not (target / "triton").is_dir():
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target),
             f"triton=={version}"],
            check=True,
        )  # fmt: skip
    return str(target)


def main() -> int:
    """Exit code 1 if a version fails, spills, or is worse than its record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "triton")
    parser.add_argument("--update", action="store_true", help="write the record")
    given = parser.parse_args()
    records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    failed = False
    for version in given.versions:
        found = compiled(install(version, given.folder))
        for kernel in found.values():
            assert kernel.pop("triton") == version
        wrong = problems(found, {} if given.update else records.get(version, {}))
        failed |= bool(wrong)
        absent = sum("absent" in x for x in found.values())
        built = sum("registers" in x for x in found.values())
        sys.stdout.write(
            f"Triton {version}: {built} kernels compile, {absent} absent, "
            f"{len(wrong)} problems\n" + "".join(f"  {x}\n" for x in wrong)
        )
        sys.stdout.flush()
        if given.update:
            records[version] = found
            text = json.dumps(dict(sorted(records.items())), indent=1, sort_keys=True)
            RECORD.write_text(text + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
