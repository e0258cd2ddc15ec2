"""Every malformed folder: its own message, exit code 3 or 5, and nothing written."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybridstate.cli.main import app
from tests.checkpoint.malformed import CASES, Case, good
from tests.hub.cases import HUB_CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good(tmp_path_factory.mktemp("good") / "model")


def analyse(folder: Path, out: Path) -> tuple[int, dict[str, str]]:
    """Exit code and error object of `analyze --json`."""
    ran = CliRunner().invoke(app, ["analyze", str(folder), "-o", str(out), "--json"])
    document = json.loads(ran.stdout)
    assert document["ok"] is (ran.exit_code == 0)
    return ran.exit_code, document.get("error", {})


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.lstat().st_size) for p in folder.rglob("*"))


def test_the_undamaged_folder_is_read(good_folder: Path, tmp_path: Path) -> None:
    assert analyse(good_folder, tmp_path / "out")[0] == 0


@pytest.mark.parametrize("case", CASES, ids=[f"{c.part}: {c.what}" for c in CASES])
def test_a_malformed_folder_is_refused(case: Case, good_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good_folder, folder)
    case.damage(folder)
    before = listing(tmp_path)
    code, error = analyse(folder, tmp_path / "out")
    assert (code, code in (3, 5)) == (case.code, True), error
    assert case.says in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 700
    assert listing(tmp_path) == before, "something was written"


def test_the_page_lists_every_case() -> None:
    page = (ROOT / "docs" / "malformed.md").read_text()
    for case in CASES:
        assert f"| {case.what} | {case.code} |" in page, "run scripts/malformed.py"
    for failure in HUB_CASES:
        assert f"| {failure.what} |" in page, "run scripts/malformed.py"


def test_no_two_cases_of_one_part_are_the_same() -> None:
    assert len({(case.part, case.what) for case in CASES}) == len(CASES)
