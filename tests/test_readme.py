"""The README and the generated pages hold: marked commands run, links lead somewhere, nothing is stale."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
RECIPES = (ROOT / "docs" / "recipes.md").read_text()
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.S | re.M)


def blocks(info: str, page: str = README) -> list[str]:
    return [match["body"] for match in FENCE.finditer(page) if match["info"] == info]


def commands(block: str) -> list[str]:
    return [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]


def environment() -> dict[str, str]:
    """The interpreter's own scripts come first, so that `hybridstate` is the one under test."""
    scripts = str(Path(sys.executable).parent)
    return os.environ | {"PATH": scripts + os.pathsep + os.environ["PATH"], "NO_COLOR": "1"}


def test_the_first_thing_is_how_to_run_it() -> None:
    first = FENCE.search(README)
    assert first is not None
    assert README[: first.start()].splitlines() == ["# hybridstate", ""]
    assert [line.split("#")[0].strip() for line in commands(first["body"])] == [
        "make demo",
        "make test",
    ]


@pytest.mark.parametrize("block", blocks("console run"), ids=lambda b: b.splitlines()[0])
def test_marked_commands_run(block: str, tmp_path: Path) -> None:
    assert commands(block)
    for line in commands(block):
        done = subprocess.run(
            shlex.split(line), cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, f"$ {line}\n{done.stderr}"
        assert done.stdout.strip(), f"$ {line} printed nothing"


@pytest.mark.parametrize("block", blocks("python run"), ids=lambda b: b.splitlines()[0])
def test_marked_python_runs(block: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", [README, RECIPES], ids=["README", "recipes"])
def test_every_command_names_existing_verbs_and_options(page: str) -> None:
    """Also those that are too long to run here."""
    lines = [
        line
        for info in ("console", "console run")
        for block in blocks(info, page)
        for line in commands(block)
        if line.startswith("hybridstate ")
    ]
    assert lines
    help_texts: dict[tuple[str, ...], str] = {}
    for line in lines:
        words = shlex.split(line)[1:]
        verb = tuple(words[: 2 if words[0] in ("bench", "plan") else 1])
        if verb not in help_texts:
            done = subprocess.run(
                ["hybridstate", *verb, "--help"], env=environment(), capture_output=True, text=True
            )
            assert done.returncode == 0, line
            help_texts[verb] = done.stdout
        for option in (word for word in words if word.startswith("-")):
            assert re.search(rf"(^|[\s,]){option}\b", help_texts[verb]), f"{line}: no {option}"


def test_links_and_pictures_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name}: {target} does not exist"


def test_the_summary_has_the_changes_that_were_recorded() -> None:
    """Mean TTFT against dense at the operating point, `tiny-gdn` and `tiny-kda`, of NR, WR, INT8 and DAMP."""
    found: dict[str, list[str]] = {}
    for model in ("tiny-gdn", "tiny-kda"):
        text = (ROOT / "benchmarks" / f"serve-{model}-think.json").read_text()
        result = json.loads(text)["result"]
        for point in result["points"]:
            if point["ratio"] == result["operating_point"]["ratio"] and point["limit"] == 32:
                change = 100 * point.get("against_dense", {}).get("ttft", 0.0)
                found.setdefault(point["arm"], []).append(f"{change:+.1f}")
    row = next(line for line in README.splitlines() if line.startswith("| Faster by |"))
    for arm, before in (
        ("nr-64", "mean TTFT ["),
        ("wr-64", "WR "),
        ("int8", "alone "),
        ("damp", "alike, mean TTFT ["),
    ):
        assert f"{before}{' and '.join(found[arm])} %" in row, (arm, found[arm])


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_verification_page_is_in_its_script_s_order() -> None:
    import verification

    page = verification.PAGE.read_text(encoding="utf-8")
    parts = {found["name"]: found["body"] for found in verification.PART.finditer(page)}
    assert set(parts) == set(verification.ORDER)
    assert verification.whole(parts) == page
