"""`hybridstate bench` through the application: documents, tables, files, exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from hybridstate import api, provenance
from hybridstate.cli.main import app
from hybridstate.plan.store import read_plan
from tests.plan.calibrated import write_calibration
from tests.tiny import write_checkpoint

SMALL = ("--questions", "2", "--tokens", "256", "--seeds", "1", "--repeats", "1", "--rows", "8")
SHORT = ("--input-tokens", "24", "--output-tokens", "2", "--batch", "1", "--k-hi", "4")
GPU = torch.cuda.is_available()


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *(str(a) for a in arguments)])


def document(result: Result) -> dict[str, Any]:
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_restore_prints_arms_and_comparison(tiny_kda: Path) -> None:
    result = run("restore", tiny_kda, "--w-max", "64", "--tasks", "recall", *SMALL)
    assert result.exit_code == 0, result.output
    first_cells = [line.split()[0] for line in result.stdout.splitlines() if line.split()]
    assert [c for c in first_cells if c in ("dense", "recompute", "nr-64", "wr-64")] == [
        "dense",
        "recompute",
        "nr-64",
        "wr-64",
    ]
    assert "2 synthetic questions per task" in result.stdout
    assert "check: dense checkpoint bit-equal" in result.stdout


def test_one_question_has_no_interval(tiny_gdn: Path, tmp_path: Path) -> None:
    target = tmp_path / "restore.json"
    one = ("--questions", "1", *SMALL[2:], "--tasks", "recall")
    result = run("restore", tiny_gdn, "--w-max", "64", *one, "-o", target)
    assert result.exit_code == 0, result.output
    stored = json.loads(target.read_text())["result"]
    assert stored["comparisons"]
    assert {entry["interval_95"] for entry in stored["comparisons"]} == {None}
    line = next(x for x in result.stdout.splitlines() if x.split()[:2] == ["64", "recall"])
    assert " to " not in line
    assert " - " in line


def test_restore_writes_a_folder_with_document_and_figure(tiny_gdn: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    result = run("restore", tiny_gdn, "--w-max", "64", *SMALL, "-o", target, "--json")
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in target.iterdir()) == [
        "restore.csv",
        "restore.json",
        "restore.png",
    ]
    stored = json.loads((target / "restore.json").read_text())
    shown = document(result)["result"]
    assert stored["result"] == {k: v for k, v in shown.items() if k != "provenance"}
    found_torch = stored["provenance"]["torch"].split("+")[0]
    assert found_torch == torch.__version__.split("+")[0]
    assert stored["command"] == "bench restore"
    assert str(tmp_path) not in (target / "restore.json").read_text()


def test_plan_gives_the_cutoff_of_the_loaded_checkpoint(tiny_kda: Path, tmp_path: Path) -> None:
    calibration = write_calibration(tmp_path / "calibration", tiny_kda)
    exported = tmp_path / "exported"
    api.export_plan(tiny_kda, out=exported, w_max=32, calibration=calibration)
    found = [
        document(run("restore", folder, "--plan", exported, *SMALL, "--json"))["result"]
        for folder in (tiny_kda, exported)
    ]
    for result in found:
        assert {a["w_max"] for a in result["arms"]} == {None, 32}
    for one, two in zip(found[0]["arms"], found[1]["arms"], strict=True):
        if one["seed"] is None:  # the same units, wherever the export put their channels
            assert one["checkpoint_bytes"] == two["checkpoint_bytes"]
            assert one["prose"]["kl"] == pytest.approx(two["prose"]["kl"], rel=1e-2, abs=1e-7)


def test_decode_writes_one_file_and_labels_the_reference(tiny_gdn: Path, tmp_path: Path) -> None:
    target = tmp_path / "decode.json"
    result = run("decode", tiny_gdn, *SHORT, "-o", target)
    assert result.exit_code == 0, result.output
    assert GPU or "the reference ran" in result.stdout
    stored = json.loads(target.read_text())
    assert [row["state"] for row in stored["result"]["rows"]] == ["fp32", "damp"]
    assert all(row["tpot_s"]["samples"] for row in stored["result"]["rows"])
    again = run("decode", tiny_gdn, *SHORT, "-o", target)
    assert (again.exit_code, "exists" in again.stderr) == (2, True)


@pytest.fixture(scope="module", params=["tiny_gdn", "tiny_kda"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    original: Path = request.getfixturevalue(request.param)
    folder = tmp_path_factory.mktemp("own-plan")
    calibration = write_calibration(folder / "calibration", original, k_hi=4)
    api.export_plan(original, out=folder / "model", w_max=32, calibration=calibration)
    return folder / "model"


def test_decode_finds_the_plan_of_an_exported_model(exported: Path) -> None:
    options = ("--input-tokens", "24", "--output-tokens", "2", "--batch", "1")
    result = run("decode", exported, *options)
    assert result.exit_code == 0, result.output
    assert "key order: exported weights" in " ".join(result.stdout.split())
    own, given = (
        document(run("decode", exported, *options, *extra, "--json"))["result"]
        for extra in ((), ("--plan", exported))
    )
    assert own["protocol"] == given["protocol"]
    assert own["protocol"]["plan_digest"] == read_plan(exported).digest
    for one, two in zip(own["rows"], given["rows"], strict=True):
        assert one["torch_gathers_per_layer_per_step"] == 0
        assert one["state_bytes_per_request"] == two["state_bytes_per_request"]
    both = run("decode", exported, "--k-hi", "2", *options)
    assert (both.exit_code, "leave --k-hi out" in both.stderr) == (2, True)


def test_restore_finds_the_plan_of_an_exported_model(exported: Path) -> None:
    options = (*SMALL, "--tasks", "recall", "--json")
    own = document(run("restore", exported, *options))["result"]
    assert {arm["w_max"] for arm in own["arms"]} == {None, 32}
    assert own["protocol"]["plan_digest"] == read_plan(exported).digest
    assert own["protocol"]["selection"] == "plan"
    other = document(run("restore", exported, "--w-max", "64", *options))["result"]
    assert {arm["w_max"] for arm in other["arms"]} == {None, 64}
    assert (other["protocol"]["selection"], other["protocol"]["plan_digest"]) == (
        "static horizons",
        None,
    )


def test_update_takes_the_channels_of_an_exported_model(exported: Path) -> None:
    options = ("--state", "damp", "--batch", "1", "--samples", "1", "--json")
    bits = [
        document(run("update", exported, *options, *extra))["result"]["rows"][0]["bits_per_value"]
        for extra in ((), ("--plan", exported))
    ]
    assert bits[0] == bits[1]


def test_decode_takes_the_plan_of_an_exported_checkpoint(tiny_kda: Path, tmp_path: Path) -> None:
    calibration = write_calibration(tmp_path / "calibration", tiny_kda)
    api.export_plan(tiny_kda, out=tmp_path / "exported", calibration=calibration)
    options = ("--input-tokens", "24", "--output-tokens", "2", "--batch", "1", "--json")
    found = document(run("decode", tiny_kda, "--plan", tmp_path / "exported", *options))
    assert found["result"]["protocol"]["key_order"] == "plan, gathered by the kernel"
    assert found["result"]["checkpoint"] == "original"
    row = found["result"]["rows"][1]
    assert (row["state"], row["torch_gathers_per_layer_per_step"]) == ("damp", 0)
    ran = document(run("decode", tmp_path / "exported", *options))["result"]
    assert ran["checkpoint"] == "exported, folder exported"
    both = run("decode", tiny_kda, "--plan", tmp_path / "exported", "--k-hi", "4", *options)
    assert both.exit_code == 2


def test_update_takes_its_sizes_from_the_model(tiny_gdn: Path) -> None:
    found = document(run("update", tiny_gdn, "--batch", "1", "--samples", "2", "--json"))
    dims = found["result"]["rows"][0]["dims"]
    assert (dims["key_heads"], dims["value_heads"]) == (2, 6)
    assert (dims["key_dim"], dims["value_dim"]) == (8, 12)
    assert found["result"]["provenance"]["hybridstate"]


@pytest.mark.skipif(GPU, reason="asks for a GPU that is not there")
@pytest.mark.parametrize("verb", ["restore", "decode", "update"])
def test_gpu_asked_for_and_absent_ends_with_seven(verb: str, tiny_kda: Path) -> None:
    result = run(verb, tiny_kda, "--device", "cuda", "--json")
    assert result.exit_code == 7
    assert document(result)["error"]["code"] == "missing-requirement"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("restore", "--w-max", "3"), "at least 4"),
        (("restore", "--tasks", "sums"), "unknown task 'sums'"),
        (("decode", "--state", "fp8"), "--state fp8"),
        (("update", "--state", "fp8"), "unknown state format"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_bad_options_end_with_two(arguments: tuple[str, ...], message: str, tiny_kda: Path) -> None:
    verb, *rest = arguments
    result = run(verb, tiny_kda, *rest, "--json")
    assert result.exit_code == 2
    assert message in document(result)["error"]["message"]


def test_plan_of_another_model_ends_with_six(tiny_kda: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", "kimi_linear", seed=4)
    api.export_plan(other, out=tmp_path / "plan", w_max=64)
    assert run("restore", tiny_kda, "--plan", tmp_path / "plan", *SMALL).exit_code == 6


def test_folder_in_use_is_refused_before_any_work(tiny_kda: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = run("restore", tiny_kda, "-o", tmp_path, "--json")
    assert result.exit_code == 2
    assert "not empty" in document(result)["error"]["message"]


def test_a_folder_in_place_of_a_file_is_told_as_one(tiny_kda: Path, tmp_path: Path) -> None:
    """Also of the file for the points so far; `--force` does not help against a folder."""
    for name, verb in (("out.json", "restore"), ("out.partial.json", "quality")):
        (tmp_path / name).mkdir()
        result = run(verb, tiny_kda, "-o", tmp_path / "out.json", "--force")
        assert result.exit_code == 2
        assert f"{tmp_path / name} is a folder, a file is expected" in result.stderr
        (tmp_path / name).rmdir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--cost", "--fit", "--exchange", "--trace-file"])
def test_a_file_that_is_read_is_not_replaced(option: str, tmp_path: Path) -> None:
    file, link = tmp_path / "given.json", tmp_path / "link.json"
    file.write_text("{}")
    link.symlink_to(file)
    result = run("simulate", option, file, "-o", link, "--force")
    assert result.exit_code == 2
    assert f"would replace {file}, which is read" in result.stderr
    assert file.read_text() == "{}"
    result = run("simulate", "--cost", "a" * 300, "-o", tmp_path / "new.json")
    assert result.exit_code == 3, "the file that is read is to blame, not the one to write"
    assert "cannot read the cost model aaa" in result.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--conversations", "--conversations must be at most 1,000,000, found"),
        ("--seeds", "--seeds must be at most 1,000, found"),
        ("--workers", "--workers must be at most 128, found"),
    ],
)
def test_numbers_beyond_all_use_are_refused(option: str, message: str, tiny_kda: Path) -> None:
    verb = "serve" if option == "--workers" else "simulate"
    result = run(verb, tiny_kda, option, "99999999999999999999")
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_plan_of_another_model_is_refused_where_no_format_needs_it(
    tiny_kda: Path, tmp_path: Path
) -> None:
    """The result would name the plan."""
    other = write_checkpoint(tmp_path / "other", "kimi_linear", seed=4)
    api.export_plan(other, out=tmp_path / "plan", w_max=64)
    for verb, options in (
        (
            "quality",
            ("--tasks", "recall", "--tokens", "256", "--questions", "2", "--format", "none"),
        ),
        ("serve", ("--scale", "0.004", "--arm", "int8", "--limit", "1", "--seeds", "1")),
    ):
        result = run(verb, tiny_kda, "--plan", tmp_path / "plan", *options)
        assert result.exit_code == 6, result.output
        assert "the plan was made for other" in result.stderr


def test_ranks_with_too_little_memory_say_so(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--w-max", "64", "--checkpoints", "99999999999")
    result = run("exchange", "tiny-kda", *options, "-o", tmp_path / "out.json")
    assert result.exit_code == 7, result.output
    assert "error: not enough memory: rank-" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out.json").exists()


def test_what_another_run_wrote_meanwhile_is_kept_and_the_later_result_stands_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found the place free; the first to end has it."""
    (tmp_path / "out-2.json").write_text("older")
    target = tmp_path / "out.json"
    monkeypatch.setattr(provenance, "environment", lambda **_: target.write_text("theirs") and {})
    options = ("--batch", "1", "--samples", "1", "--device", "cpu", "-o", target)
    result = run("update", "tiny-kda", *options)
    assert result.exit_code == 2
    beside = tmp_path / "out-3.json"
    told = f"{target} was written by another process meanwhile, this result is in {beside}"
    assert told in result.stderr
    assert target.read_text() == "theirs"
    assert json.loads(beside.read_text())["command"] == "bench update"
    folder = tmp_path / "folder"

    def filled(**_: object) -> dict[str, object]:
        folder.mkdir(exist_ok=True)
        (folder / "update.json").write_text("theirs")
        return {}

    monkeypatch.setattr(provenance, "environment", filled)
    result = run("update", "tiny-kda", *options[:-1], folder)
    assert result.exit_code == 2
    assert f"this result is in {tmp_path / 'folder-2'}" in result.stderr
    assert (folder / "update.json").read_text() == "theirs"
    assert (tmp_path / "folder-2" / "update.json").exists()


@pytest.mark.parametrize("verb", ["serve", "quality"])
def test_what_another_run_has_so_far_is_not_replaced(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was stopped, or that still goes on."""
    reached = []
    monkeypatch.setattr(api, f"bench_{verb}", lambda *_, **given: reached.append(given) or 1 / 0)
    target, partial = tmp_path / "out.json", tmp_path / "out.partial.json"
    partial.write_text("{}")
    refused = run(verb, "tiny-kda", "-o", target)
    assert refused.exit_code == 2
    assert f"{partial} holds what another run of this output has so far" in refused.stderr
    assert f"--resume {partial}" in refused.stderr
    assert partial.read_text() == "{}"
    assert not reached
    run(verb, "tiny-kda", "-o", target, "--resume", tmp_path / "other.json")
    assert not reached
    run(verb, "tiny-kda", "-o", target, "--resume", partial)
    run(verb, "tiny-kda", "-o", target, "--force")
    assert len(reached) == 2
