"""`export-plan`, `plan show|validate|diff|verify` and `verify`, as a user meets them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hybridstate.cli.main import app
from hybridstate.kernels.ring_reference import LONGEST
from hybridstate.plan.store import read_plan
from tests.plan.calibrated import write_calibration
from tests.tiny import write_checkpoint


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def result_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["result"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def exported(tmp_path: Path, tiny_kda: Path) -> Path:
    calibration = write_calibration(tmp_path / "cal", tiny_kda)
    out = tmp_path / "out"
    made = run("export-plan", tiny_kda, "--w-max", 64, "--calibration", calibration, "-o", out)
    assert made.exit_code == 0, made.output
    return out


def test_export_reports_what_it_wrote(tmp_path: Path, tiny_gdn: Path) -> None:
    found = result_of(
        run("export-plan", tiny_gdn, "--w-max", 64, "-o", tmp_path / "plan", "--json")
    )
    assert found["written"] is True
    assert found["digest"] == read_plan(tmp_path / "plan").digest
    assert (found["selection"], found["precision"], found["checkpoint"]) == (True, False, None)


def test_export_with_check_runs_both_models(tmp_path: Path, tiny_kda: Path) -> None:
    calibration = write_calibration(tmp_path / "cal", tiny_kda)
    options = ("--calibration", calibration, "--check", "-o", tmp_path / "out", "--json")
    found = result_of(run("export-plan", tiny_kda, *options))
    assert found["selection"] is False
    assert found["checkpoint"]["moved"]
    assert found["verification"]["logit_error"] <= 1e-5


def test_dry_run_leaves_the_digest_open_and_writes_nothing(tmp_path: Path, tiny_kda: Path) -> None:
    calibration = write_calibration(tmp_path / "cal", tiny_kda)
    options = ("--calibration", calibration, "--dry-run", "-o", tmp_path / "out")
    assert result_of(run("export-plan", tiny_kda, *options, "--json"))["digest"] is None
    human = run("export-plan", tiny_kda, *options)
    assert "would write" in human.stdout
    assert not any(line.startswith("digest") for line in human.stdout.splitlines())
    assert not (tmp_path / "out").exists()


def test_show_prints_selection_precision_and_validation(exported: Path) -> None:
    shown = run("plan", "show", exported)
    assert shown.exit_code == 0, shown.output
    for text in ("channels kept by horizon", "live state", "exported weights", "validation"):
        assert text in shown.stdout
    document = result_of(run("plan", "show", exported, "--json"))
    assert document["schema"] == "hybridstate.plan"
    assert document["content_digest"] in shown.stdout


def test_validate_counts_arrays(exported: Path) -> None:
    found = result_of(run("plan", "validate", exported, "--json"))
    assert found["valid"] is True
    assert found["arrays"] == 15


def test_diff_of_two_cutoffs_names_fields_and_arrays(tmp_path: Path, tiny_kda: Path) -> None:
    for w_max in (16, 64):
        made = run("export-plan", tiny_kda, "--w-max", w_max, "-o", tmp_path / f"w{w_max}")
        assert made.exit_code == 0, made.output
    found = result_of(run("plan", "diff", tmp_path / "w16", tmp_path / "w64", "--json"))
    assert found["same"] is False
    assert "selection.w_max" in {f["path"] for f in found["fields"]}
    assert any(a["name"].endswith(".retained") for a in found["arrays"])
    same = run("plan", "diff", tmp_path / "w16", tmp_path / "w16")
    assert "same content" in same.stdout


def test_verify_tells_the_two_checkpoints_apart(
    tmp_path: Path, exported: Path, tiny_kda: Path
) -> None:
    assert result_of(run("plan", "verify", exported, "--json"))["order"] == "exported"
    assert result_of(run("plan", "verify", exported, tiny_kda, "--json"))["order"] == "original"
    other = write_checkpoint(tmp_path / "other", "kimi_linear", seed=8)
    foreign = run("plan", "verify", exported, other)
    assert foreign.exit_code == 6
    assert "with decay digest" in foreign.stderr or "with config digest" in foreign.stderr


def test_bundle_alone_needs_a_model_to_verify(tmp_path: Path, tiny_kda: Path) -> None:
    run("export-plan", tiny_kda, "--w-max", 64, "-o", tmp_path / "plan")
    found = run("plan", "verify", tmp_path / "plan")
    assert found.exit_code == 2
    assert "MODEL is needed" in found.stderr


def test_a_default_gate_input_is_warned_of_and_shown(tmp_path: Path) -> None:
    found = run("export-plan", "tiny-gdn", "--w-max", 64, "-o", tmp_path / "plan")
    assert found.exit_code == 0
    assert "warning: " in found.stderr
    assert "gate input" in found.stderr
    assert "gate input -0.3 (default)" in run("plan", "show", tmp_path / "plan").stdout
    given = run(
        "export-plan", "tiny-gdn", "--w-max", 64, "--gate-input", 0.1, "-o", tmp_path / "given"
    )
    assert "gate input" not in given.stderr
    assert "gate input 0.1 (given)" in given.stdout


def test_tampered_array_is_named(exported: Path) -> None:
    file = exported / "state_plan" / "plan.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    found = run("plan", "validate", exported, "--json")
    assert found.exit_code == 3
    error = json.loads(found.stdout)["error"]
    assert error["context"]["array"] in error["message"]
    assert "was changed" in error["message"]


def test_newer_schema_is_refused_with_both_versions(exported: Path) -> None:
    file = exported / "state_plan" / "plan.json"
    written = file.read_text()
    newer = written.replace('"schema_version": 1', '"schema_version": 7')
    assert newer != written
    file.write_text(newer)
    found = run("plan", "show", exported)
    assert found.exit_code == 6
    assert "schema version 7" in found.stderr


def test_numeric_verify_prints_what_it_compared(exported: Path, tiny_kda: Path) -> None:
    sizes = ("--prompts", 2, "--tokens", 32, "--new-tokens", 4)
    found = run("verify", tiny_kda, exported, *sizes)
    assert found.exit_code == 0, found.output
    assert "0 of 8" in found.stdout
    assert "held-out prose" in found.stdout
    document = result_of(run("verify", tiny_kda, exported, *sizes, "--json"))
    assert document["dtype"] == "float32"
    assert len(document["layers"]) == 3


@pytest.mark.parametrize(
    ("arguments", "exit_code", "mentions"),
    [
        (("--w-max", 64, "--weights"), 2, "no weight moves"),
        ((), 2, "cutoff, a calibration or both"),
        (("--w-max", 3), 2, "at least 4"),
        (("--calibration", "nowhere"), 3, "calibration.json"),
    ],
)
def test_export_refuses(
    arguments: tuple[Any, ...], exit_code: int, mentions: str, tmp_path: Path, tiny_kda: Path
) -> None:
    found = run("export-plan", tiny_kda, *arguments, "-o", tmp_path / "out")
    assert found.exit_code == exit_code
    assert mentions in found.stderr
    assert not (tmp_path / "out").exists()


def test_plan_that_replaced_the_one_config_names_is_noticed(exported: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    config = json.loads((model / "config.json").read_text())
    config["state_plan"]["digest"] = "0" * 64
    (model / "config.json").write_text(json.dumps(config))
    result = run("plan", "verify", model)
    assert result.exit_code == 6
    assert "names the plan 000000000000" in result.stderr


def test_output_that_would_replace_its_own_model_is_refused(exported: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    result = run("export-plan", model, "--w-max", "16", "-o", model, "--force")
    assert result.exit_code == 2
    assert "would replace" in result.stderr
    assert (model / "model.safetensors").exists() or (model / "state_plan").is_dir()


def test_orders_are_options_of_export_and_shown(tmp_path: Path, tiny_gdn: Path) -> None:
    calibration = write_calibration(tmp_path / "cal", tiny_gdn, values=True)
    out = tmp_path / "out"
    options = ("--calibration", calibration, "--key-order", "expand", "--value-order", "fold")
    made = run("export-plan", tiny_gdn, *options, "-o", out)
    assert made.exit_code == 0, made.output
    for text in (
        "linear_num_key_heads",
        "bytes added",
        "per-head order, scaled",
        "16-bit projections",
    ):
        assert text in made.output, made.output
    shown = run("plan", "show", out)
    assert "expand, in the exported weights" in shown.stdout
    plain = write_calibration(tmp_path / "plain", tiny_gdn)
    for extra, code in (
        (("--value-order", "fold"), "--formats default,damp+reorder"),
        (("--key-order", "sideways"), "choose from shared, per-head, expand"),
    ):
        refused = run("export-plan", tiny_gdn, "--calibration", plain, *extra, "-o", tmp_path / "x")
        assert refused.exit_code == 2
        assert code in refused.output.replace("\n", " ")
    every = ("--requantise-every", 8, "--no-weights", "-o", tmp_path / "ring")
    ring = run("export-plan", tiny_gdn, "--calibration", plain, *every)
    assert "written at every 8th update" in ring.stdout


def test_an_interval_that_no_engine_keeps_is_refused_at_export(
    tmp_path: Path, tiny_gdn: Path
) -> None:
    calibration = write_calibration(tmp_path / "cal", tiny_gdn)
    given = ("export-plan", tiny_gdn, "--calibration", calibration, "--no-weights")
    too_long = run(*given, "--requantise-every", LONGEST + 1, "-o", tmp_path / "out")
    assert too_long.exit_code == 2
    assert f"--requantise-every {LONGEST + 1}: engines keep the inputs" in too_long.stderr
    assert f"take {LONGEST} or less" in too_long.stderr
    assert not (tmp_path / "out").exists()
    made = run(*given, "--requantise-every", LONGEST, "-o", tmp_path / "out")
    assert made.exit_code == 0, made.output
    for verb in (("export-plan",), ("bench", "decode"), ("bench", "update")):
        said = " ".join(run(*verb, "--help").stdout.split())
        assert f"to {LONGEST}" in said


def test_a_plan_of_a_longer_interval_is_refused_before_the_model_is_loaded(
    tmp_path: Path, tiny_gdn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an engine that keeps more; by hand it cannot be made, since a plan has its digest."""
    calibration = write_calibration(tmp_path / "cal", tiny_gdn)
    out = tmp_path / "out"
    every = ("--requantise-every", 8, "--no-weights", "-o", out)
    run("export-plan", tiny_gdn, "--calibration", calibration, *every)
    monkeypatch.setattr("hybridstate.runtime.orders.LONGEST", 4)
    monkeypatch.setattr("hybridstate.trajectories.model.load_model", None)
    given = ("bench", "decode", tiny_gdn, "--plan", out, "--device", "cpu")
    decoded = run(*given)
    assert decoded.exit_code == 6, decoded.output
    assert "once in 8 updates, this engine once in 4 at most" in decoded.stderr
    document = json.loads((out / "plan.json").read_text())
    document["precision"]["requantise_every"] = 32
    (out / "plan.json").write_text(json.dumps(document))
    for verb in (given, ("plan", "show", out), ("plan", "validate", out)):
        edited = run(*verb)
        assert edited.exit_code == 3, edited.output
        assert "it was edited" in edited.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--load", "zeros"], "--load takes nr or wr, found 'zeros'"),
        (["--load", "wr"], "--load says by which measurements a cutoff is chosen"),
    ],
)
def test_a_way_of_loading_that_chooses_nothing_is_refused(
    options: list[str], message: str, tiny_gdn: Path, tmp_path: Path
) -> None:
    target = tmp_path / "plan"
    made = run("export-plan", tiny_gdn, "--w-max", "64", *options, "-o", target)
    assert made.exit_code == 2
    assert message in made.stderr
    assert not target.exists()


@pytest.mark.parametrize("option", ["--measured", "--policy", "--gate-input-from"])
def test_an_export_does_not_replace_what_it_reads(
    option: str, tiny_gdn: Path, tmp_path: Path
) -> None:
    target = tmp_path / "plan"
    assert run("export-plan", tiny_gdn, "--w-max", "64", "-o", target).exit_code == 0
    kept = target / "mine.json"
    kept.write_text("{}")
    made = run("export-plan", tiny_gdn, option, kept, "-o", target, "--force")
    assert made.exit_code == 2
    assert f"would replace {kept}, which is read" in made.stderr
    assert kept.read_text() == "{}"


def test_a_check_without_weights_says_what_it_checked(tiny_gdn: Path, tmp_path: Path) -> None:
    made = run("export-plan", tiny_gdn, "--w-max", "64", "--check", "-o", tmp_path / "plan")
    assert made.exit_code == 0
    assert "checked: the bundle reads back and belongs to the model" in made.stdout
