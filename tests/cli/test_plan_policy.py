"""`plan policy` and `export-plan --policy`: to Model-Optimizer's file and back."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hybridstate.cli.main import app
from hybridstate.plan.policy import read_policy
from hybridstate.plan.store import read_plan
from tests.plan.test_policy import bench_result


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def result_file(tmp_path: Path, tiny_gdn: Path) -> Path:
    file = tmp_path / "restore.json"
    file.write_text(json.dumps({"result": bench_result(tiny_gdn) | {"protocol": {"tokens": 512}}}))
    return file


def test_policy_is_written_and_gives_the_same_plan_back(
    tmp_path: Path, tiny_gdn: Path, result_file: Path
) -> None:
    file = tmp_path / "policy.json"
    made = run("plan", "policy", tiny_gdn, result_file, "--w-max", "64", "-o", file)
    assert made.exit_code == 0, made.output
    assert "W_max 64, suffix_replay" in made.stdout
    found = read_policy(file)
    assert found.calibration_data_id.startswith("sha256:")
    assert found.model_revision.startswith("index sha256:")
    for out, options in (("a", ["--policy", file]), ("b", ["--w-max", "64"])):
        exported = run("export-plan", tiny_gdn, *options, "-o", tmp_path / out)
        assert exported.exit_code == 0, exported.output
    a, b = (read_plan(tmp_path / name) for name in ("a", "b"))
    assert a.document.selection == b.document.selection
    assert {n: v.tobytes() for n, v in a.arrays.items()} == {
        n: v.tobytes() for n, v in b.arrays.items()
    }


def test_policies_and_results_may_start_with_a_byte_order_mark(
    tmp_path: Path, tiny_gdn: Path, result_file: Path
) -> None:
    file = tmp_path / "policy.json"
    result_file.write_bytes(b"\xef\xbb\xbf" + result_file.read_bytes())
    made = run("plan", "policy", tiny_gdn, result_file, "--w-max", "64", "-o", file)
    assert made.exit_code == 0, made.output
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    exported = run("export-plan", tiny_gdn, "--policy", file, "-o", tmp_path / "out")
    assert exported.exit_code == 0, exported.output


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"result": null}', "{}"])
def test_what_is_no_result_of_bench_restore_is_named(
    text: str, tmp_path: Path, tiny_gdn: Path, result_file: Path
) -> None:
    result_file.write_text(text)
    failed = run("plan", "policy", tiny_gdn, result_file, "-o", tmp_path / "policy.json")
    assert failed.exit_code == 3
    assert failed.stderr.startswith(f"error: {result_file}: "), failed.stderr
    assert "Error at" not in failed.stderr
    assert "`hybridstate bench restore" in failed.stderr.partition("hint: ")[2]


def test_largest_passing_cutoff_is_chosen_or_none(
    tmp_path: Path, tiny_gdn: Path, result_file: Path
) -> None:
    """Savings of at least 20 %: the tiny model's largest cutoff, if any, has to reach that."""
    made = run("plan", "policy", tiny_gdn, result_file, "-o", tmp_path / "p.json", "--json")
    document: dict[str, Any] = json.loads(made.stdout)
    if document["ok"]:
        rows = document["result"]["policy"]["measurements"]
        assert max(row["checkpoint_savings"] for row in rows) >= 0.2
    else:
        assert document["error"]["code"] == "invalid-numbers"
        assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "mentions"),
    [
        (["--load", "zero"], 2, "takes nr or wr"),
        (["--w-max", "100"], 2, "no measurement at W_max 100"),
        (["--gate-input", "1.5"], 6, "retained other heads"),
    ],
)
def test_impossible_request_is_refused(
    tmp_path: Path,
    tiny_gdn: Path,
    result_file: Path,
    arguments: list[str],
    code: int,
    mentions: str,
) -> None:
    target = tmp_path / "policy.json"
    made = run("plan", "policy", tiny_gdn, result_file, "-o", target, *arguments)
    assert made.exit_code == code, made.output
    assert mentions in made.stderr
    assert not target.exists()


def test_places_and_files_are_checked(tmp_path: Path, tiny_gdn: Path, result_file: Path) -> None:
    taken = tmp_path / "taken.json"
    taken.write_text("mine")
    common = ("plan", "policy", tiny_gdn)
    assert run(*common, result_file, "--w-max", "64", "-o", taken).exit_code == 2
    assert taken.read_text() == "mine"
    assert run(*common, result_file, "--w-max", "64", "-o", taken, "--force").exit_code == 0
    assert run(*common, result_file, "-o", tmp_path / "folder").exit_code == 2
    assert run(*common, tmp_path / "absent.json", "-o", tmp_path / "x.json").exit_code == 3
    (tmp_path / "list.json").write_text("[1]")
    assert run(*common, tmp_path / "list.json", "-o", tmp_path / "x.json").exit_code == 3


def test_policy_and_own_cutoff_exclude_each_other(
    tmp_path: Path, tiny_gdn: Path, result_file: Path
) -> None:
    file = tmp_path / "policy.json"
    run("plan", "policy", tiny_gdn, result_file, "--w-max", "64", "-o", file)
    made = run("export-plan", tiny_gdn, "--policy", file, "--w-max", "16", "-o", tmp_path / "p")
    assert made.exit_code == 2
    assert "brings its cutoff" in made.stderr
