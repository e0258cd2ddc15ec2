"""docs/malformed.md: every malformed input that the tests try, and what it gets.

The cases are those of tests/checkpoint/malformed.py and tests/hub/cases.py; every one is run here.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTICE = "<!-- written by scripts/malformed.py from the cases of tests/checkpoint and tests/hub; do not edit -->"


def page() -> str:
    """The whole page."""
    sys.path.insert(0, str(ROOT))
    recorded = json.loads((ROOT / "benchmarks" / "header-fuzz.json").read_text())
    parts = [
        "# Malformed inputs",
        NOTICE,
        "Nothing in a file is trusted. Below is every malformed input that the tests try, with the exit "
        "code (3 cannot be read, 5 numbers that cannot be) and the message. Each ends before anything is "
        "written. MODEL is the folder, HUB the endpoint.",
        *folders(),
        "## The Hub and what lies in between",
        "From a stand-in at a loopback address that plays each failure; requests are those it counted, "
        "repetitions included. Whatever passes is repeated up to five times.",
        table(("What goes wrong", "Requests", "It gets", "Next step"), hub()),
        "## Random damage",
        f"`python -m tests.checkpoint.header_fuzz` tried {recorded['cases']:,} damaged files (seed "
        f"{recorded['seed']}) on the header parser, and the safetensors library "
        f"{recorded['safetensors']} on the same bytes: {recorded['accepted']:,} accepted, "
        f"{sum(recorded['refused'].values()):,} refused, {recorded['other_exceptions']} other exceptions, "
        f"{recorded['accepted_here_refused_by_safetensors']} accepted that the library refuses (but for "
        "minus zero, read as zero), "
        f"{sum(recorded['refused_here_accepted_by_safetensors'].values()):,} refused that it accepts, all "
        "for one of these reasons. The test suite repeats the first 200,000.",
        table(("Refused", "Cases"), ((k, f"{n:,}") for k, n in recorded["refused"].items())),
        table(
            ("Refused here, accepted by the library", "Cases"),
            ((k, f"{n:,}") for k, n in recorded["refused_here_accepted_by_safetensors"].items()),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def table(columns: tuple[str, ...], rows: Any) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def code(text: str) -> str:
    """Text as it stands, in a cell."""
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"


def folders() -> Iterator[str]:
    """One table per part of a model folder."""
    from hybridstate import analyze
    from hybridstate.errors import HybridStateError
    from tests.checkpoint.malformed import CASES, good

    with tempfile.TemporaryDirectory() as place:
        origin, victim = good(Path(place) / "good"), Path(place) / "model"
        rows: dict[str, list[tuple[str, ...]]] = {}
        for case in CASES:
            shutil.rmtree(victim, ignore_errors=True)
            shutil.copytree(origin, victim)
            case.damage(victim)
            try:
                analyze(victim)
            except HybridStateError as error:
                message = error.message.replace(str(victim), "MODEL")
                row = (case.what, str(error.exit_code), code(message[:240]), error.hint or "")
            else:
                raise AssertionError(f"{case.what} was accepted")
            rows.setdefault(case.part, []).append(row)
    for part, found in rows.items():
        yield f"## {part}"
        yield table(("What is wrong", "Exit", "Message", "Hint"), found)


def hub() -> Iterator[tuple[str, ...]]:
    """One row per failure of the Hub."""
    from tests.checkpoint.malformed import good
    from tests.hub.cases import HUB_CASES, prepare
    from tests.hub.conftest import hub_environment
    from tests.hub.standin import FIRST_COMMIT, Repo, running

    with tempfile.TemporaryDirectory() as place, running() as servers:
        model = good(Path(place) / "model")
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.hub.worker"],
            cwd=ROOT,
            env=hub_environment(servers, Path(place)) | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        for number, case in enumerate(HUB_CASES):
            servers.reset()
            servers.repos["org/model"] = Repo({FIRST_COMMIT: model})
            prepare(servers, case)
            job: dict[str, Any] = {"environment": {"HF_TOKEN": None}} | dict(case.job)
            job |= {"model": case.model, "cache": f"{place}/cache-{number}"}
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            found = json.loads(worker.stdout.readline())
            hosts = {
                servers.endpoint.removeprefix("http://"): "HUB",
                f"{place}/cache-{number}": "CACHE",
            }
            # how many requests a time limit allows depends on the machine
            count = "" if "time" in case.what or "every" in case.what else str(len(servers.log))
            if found["ok"]:
                yield case.what, count, "the right answer", ""
                continue
            shown = [found["message"][:240], found["hint"] or ""]
            for real, name in hosts.items():
                shown = [text.replace(real, name) for text in shown]
            shown = [
                re.sub(r"only \d+ bytes in \d+ s", "only N bytes in M s", text) for text in shown
            ]
            yield case.what, count, code(shown[0]), shown[1]
        worker.stdin.close()
        worker.wait(timeout=10)


if __name__ == "__main__":
    os.chdir(ROOT)
    target = ROOT / "docs" / "malformed.md"
    text = page()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if target.read_text() == text else f"stale: {target.name}; run this script")
    target.write_text(text)
