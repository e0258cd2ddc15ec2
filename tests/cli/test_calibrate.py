"""`hybridstate calibrate`: one JSON document, table, dry run, errors with their exit codes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hybridstate.cli import calibrate
from hybridstate.trajectories.protocol import PROFILES
from tests.trajectories.test_graphs import small


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    short = replace(PROFILES["quick"], input_tokens=24, new_tokens=12, anchors=(2, 4), horizon=8)
    monkeypatch.setitem(PROFILES, "quick", short)
    app = typer.Typer()
    calibrate.register(app)
    app.callback()(lambda: None)
    return lambda *arguments: CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def document(result: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json_is_one_document_and_files_are_named(run: Any, tiny_kda: Path, tmp_path: Path) -> None:
    out = tmp_path / "cal"
    result = run(tiny_kda, "-o", out, "--k-hi", 2, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    found = document(result)["result"]
    assert [Path(name).name for name in found["written"]] == [
        "calibration.json",
        "calibration.safetensors",
    ]
    written = json.loads((out / "calibration.json").read_text())
    assert found["provenance"]["hardware"]["device"] == "cpu"
    assert written == {
        k: v for k, v in found.items() if k not in ("written", "provenance", "measured")
    }
    assert "wrote calibration.json" in result.stderr


def test_table_names_every_format_and_the_sample_size(run: Any, tiny_gdn: Path) -> None:
    result = run(tiny_gdn, "--k-hi", 2, "--device", "cpu", "--temperature", 1)
    assert result.exit_code == 0, result.stderr
    for text in ("fp32", "fp16", "bf16", "int8-step", "damp", "damp-random"):
        assert text in result.stdout
    assert "3 sequences of 11 updates" in result.stdout
    assert "the same by chance" in result.stdout


def test_dry_run_counts_and_writes_nothing(run: Any, tiny_gdn: Path, tmp_path: Path) -> None:
    result = run(tiny_gdn, "--dry-run", "--profile", "paper", "--json", "-o", tmp_path / "cal")
    found = document(result)["result"]
    assert found["prompts"] == 36
    assert found["generated_tokens"] == 36 * 4096
    state = 3 * 6 * 8 * 12 * 4
    assert found["trajectory_bytes"] == 36 * 6 * state
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--k-hi", "9"], 2, "k_hi is 9"),
        (["--profile", "slow"], 2, "no calibration profile"),
        (["--temperature", "nan"], 2, "--temperature must be"),
        (["--seed", "-1"], 2, "--seed must not be negative"),
        (["--device", "quantum"], 2, "--device takes auto"),
        (["--dtype", "int3"], 2, "is not a dtype"),
        (["--prompts", "absent.jsonl"], 3, "cannot read prompts"),
    ],
)
def test_errors_are_one_line_with_their_code(
    run: Any, tiny_gdn: Path, arguments: list[str], code: int, text: str
) -> None:
    result = run(tiny_gdn, "--json", *arguments)
    assert result.exit_code == code
    assert text in document(result)["error"]["message"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--k-hi", "-3"], 2),
        (["--k-hi", "999"], 2),
        (["--device", "tpu"], 2),
        (["--dtype", "int8"], 2),
        (["--prompts", "no-such-file"], 3),
        (["--seeds", "5000"], 2),
        (["--sequences", "100000"], 3),
        (["--merge", "no-such-part"], 2),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_nonsense_is_refused_also_by_a_dry_run(
    run: Any, tiny_kda: Path, options: list[str], code: int, dry: list[str]
) -> None:
    result = run(tiny_kda, *options, *dry, "--json")
    assert result.exit_code == code, result.output
    assert document(result)["error"]["message"]


def test_parts_of_seeds_are_written_merged_and_shown(
    run: Any, tiny_gdn: Path, tmp_path: Path
) -> None:
    common = (tiny_gdn, "--k-hi", 2, "--device", "cpu", "--temperature", 1, "--seeds", 2)
    for number in (1, 2):
        folder = tmp_path / f"part-{number}"
        result = run(*common, "--part", f"{number}/2", "-o", folder, "--json")
        assert result.exit_code == 0, result.stderr
        assert document(result)["result"]["part"] == f"{number}/2"
    merged = [x for n in (1, 2) for x in ("--merge", tmp_path / f"part-{n}")]
    result = run(*common, *merged, "-o", tmp_path / "whole", "--json")
    assert result.exit_code == 0, result.stderr
    found = document(result)["result"]
    assert found["validation_seeds"] == [0, 1]
    assert (tmp_path / "whole" / "calibration.json").is_file()
    result = run(*common, "--part", "1/2")
    assert result.exit_code == 2
    assert "needs an output folder" in result.stderr


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_tasks_that_ask_nothing_are_said(run: Any, tiny_kda: Path, dry: list[str]) -> None:
    result = run(tiny_kda, "--k-hi", 2, "--device", "cpu", "--tasks", 4, *dry)
    assert result.exit_code == 0, result.stderr
    assert "--tasks 4 asks nothing: only tiny-gdn and tiny-kda" in " ".join(result.stderr.split())


def test_tasks_need_the_long_profile(run: Any) -> None:
    short = run("tiny-kda", "--tasks", 4, "--dry-run")
    assert "--tasks 4 asks nothing: texts of the quick profile" in " ".join(short.stderr.split())
    long = run("tiny-kda", "--tasks", 4, "--profile", "paper", "--dry-run")
    assert long.exit_code == 0, long.stderr
    assert "asks nothing" not in long.stderr


def test_dry_run_tells_draws_and_sequences(run: Any, tiny_kda: Path) -> None:
    result = run(tiny_kda, "--dry-run", "--seeds", 3, "--sequences", 7, "--greedy", "--json")
    found = document(result)["result"]
    assert (found["draws"], found["validation_sequences"], found["prompts"]) == (4, 9, 15)
    for option, text in (("--seeds", "0"), ("--sequences", "0"), ("--deadline", "-1")):
        result = run(tiny_kda, "--json", option, text)
        assert (result.exit_code, option in document(result)["error"]["message"]) == (2, True)


def test_synthetic_weights_are_labelled_and_timed(run: Any, tmp_path: Path) -> None:
    model = small(tmp_path / "made", "Qwen3.6-35B-A3B", linear_num_value_heads=4)
    options = ["--dummy", "--measure-recording", "--device", "cpu", "--formats", "int8-step"]
    result = run(model, "-o", tmp_path / "out", *options, "--json")
    assert result.exit_code == 0, result.stderr
    found = document(result)["result"]
    assert found["synthetic"] is True
    assert found["model"]["name"] == "made (synthetic weights)"
    measured = found["measured"]
    assert {"load", "prefill", "generate", "write", "risk", "J", "validate", "other"} <= set(
        measured["stages_s"]
    )
    assert measured["wall_s"] == pytest.approx(sum(measured["stages_s"].values()))
    assert measured["plain_step_ms"] > 0
    assert measured["recorded_step_ms"] > 0
    written = (tmp_path / "out" / "calibration.json").read_text()
    assert "measured" not in json.loads(written)
    assert "synthetic weights" in written


def test_a_run_that_stops_says_where_its_time_went(run: Any, tmp_path: Path) -> None:
    model = small(tmp_path / "made", "Kimi-Linear-48B-A3B")
    options = ["--dummy", "--device", "cpu", "--formats", "int8-step", "--deadline", 0]
    result = run(model, "-o", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert "until then: other" in result.stderr
    assert "load" in result.stderr
