"""`hybridstate analyze` and `doctor` through the application, as a user meets them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hybridstate import api
from hybridstate.cli.main import app
from tests.tiny import write_checkpoint


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def document(result: Result) -> dict[str, Any]:
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_table_names_model_gate_and_cutoffs(tiny_kda: Path) -> None:
    result = run("analyze", tiny_kda, "--w-max", "64", "--w-max", "16")
    assert result.exit_code == 0, result.output
    assert "kimi_linear, 3 of 4 layers linear" in result.stdout
    assert "softplus gate, gate input -0.3 (paper; " in result.stdout
    assert "dense:" in result.stdout
    first_cells = [line.split()[0] for line in result.stdout.splitlines() if line.split()]
    assert first_cells.count("16") == first_cells.count("64") == 2


def test_json_document_carries_the_analysis(tiny_gdn: Path) -> None:
    found = document(run("analyze", tiny_gdn, "--json"))
    assert found["command"] == "analyze"
    assert found["model"] == str(tiny_gdn)
    assert found["result"]["model"]["unit"] == "head"
    assert [c["w_max"] for c in found["result"]["cutoffs"]] == [16, 64, 128, 512]


def test_output_folder_holds_json_and_every_figure_with_its_csv(
    tiny_kda: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    result = run("analyze", tiny_kda, "-o", target, "--json")
    assert result.exit_code == 0, result.output
    names = sorted(path.name for path in target.iterdir())
    pictures = ("bytes", "capacity", "channels", "decay", "horizon_map", "horizons", "retained")
    assert names == sorted(
        ["analysis.json", *(f"{name}.{kind}" for name in pictures for kind in ("csv", "png"))]
    )
    assert [Path(p).name for p in document(result)["result"]["written"]] == names
    written = json.loads((target / "analysis.json").read_text())
    assert "environment" in written
    assert written["cutoffs"] == document(result)["result"]["cutoffs"]
    again = run("analyze", tiny_kda, "-o", target)
    assert again.exit_code == 2
    assert "is not empty" in again.stderr
    assert run("analyze", tiny_kda, "-o", target, "--force").exit_code == 0


def test_dry_run_lists_every_byte_range_and_writes_nothing(tiny_kda: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    result = run("analyze", tiny_kda, "--dry-run", "-o", target, "--json")
    found = document(result)["result"]
    assert not target.exists()
    assert [r["tensor"].rsplit(".", 1)[1] for r in found["reads"]] == ["A_log", "dt_bias"] * 3
    assert sum(r["bytes"] for r in found["reads"]) == found["tensor_bytes"] == 3 * (16 + 128)
    assert len(found["writes"]) == 15
    data = (tiny_kda / found["reads"][1]["file"]).read_bytes()
    assert len(data) == found["checkpoint_bytes"]
    table = run("analyze", tiny_kda, "--dry-run").stdout
    assert "model.layers.0.self_attn.A_log" in table
    assert "1x1x4x1" in table


def test_failing_run_leaves_no_output_folder(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "kimi_linear")
    (folder / "model.safetensors").write_bytes(b"\0" * 4)
    result = run("analyze", folder, "-o", tmp_path / "out")
    assert result.exit_code == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gate-input", "nan"], "takes auto or a finite number"),
        (["--gate-input", "high"], "takes auto or a finite number"),
        (["--epsilon", "1"], "between 0 and 1"),
        (["--epsilon", "inf"], "between 0 and 1"),
        (["--w-max", "3"], "at least 4 tokens"),
        (["--lower-bound", "-5", "--gate-input", "0"], "contradicts"),
    ],
)
def test_impossible_option_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "kimi_linear")
    config = json.loads((folder / "config.json").read_text())
    config["linear_attn_config"]["gate_lower_bound"] = -4.0
    (folder / "config.json").write_text(json.dumps(config))
    result = run("analyze", folder, *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_stated_lower_bound_switches_to_the_safe_gate(tiny_kda: Path) -> None:
    found = document(run("analyze", tiny_kda, "--lower-bound", "-5", "--json"))["result"]
    assert found["model"]["gate"] == "safe"
    assert found["model"]["lower_bound"] == -5.0
    assert found["horizons"]["gate_input"] == 0.0


class Observed:
    """A validation that was not run: what the tables and the JSON document are made from."""

    warnings = ("the rank objective is flat",)

    def to_json(self, *, all_units: bool = False) -> dict[str, Any]:
        ranks = {"median": 0.98765, "lower_quartile": 0.9, "upper_quartile": 1.0}
        ranks |= {"pairs": 24, "constant_pairs": 0}
        none = dict.fromkeys(("median", "lower_quartile", "upper_quartile"))
        agreed = {
            "gate_input": -0.3,
            "gate_input_source": "default",
            "prefixes": 8,
            "horizons": ranks,
            "magnitudes": none | {"pairs": 24, "constant_pairs": 24},
            "cutoffs": [
                {"w_max": 64, "same_side": 0.9083, "omitted": 4232, "omitted_but_longer": 2}
            ],
        }
        tier = {"tier": 1024, "eligible": 9, "tokenised": 9, "qualified": 7, "selected": 8}
        choice = {"objective": "rank", "gate_input": 0.7, "value": 0.9, "flat": False}
        choice |= {"worst": 0.85}
        domain = {"domain": "math", "sequences": 2, "tokens": 64, "with_reference": None}
        return agreed | {
            "source": "a book",
            "prefix_selection": {"tiers": [tier | {"fallbacks": 1}], "fallbacks": 1},
            "held_out": [agreed | {"prefixes": 4}],
            "gate_input_objective": "rank",
            "gate_input_choices": {"rank": choice},
            "decay": {"domains": [domain | {"p10": 0.1, "p50": 0.9, "p90": 0.99}]},
            "units": None,
            "intervention": None,
        }


def test_validation_is_tabled_and_carried_in_json(
    tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def observed(model: str, **options: Any) -> Observed:
        calls.append(options)
        return Observed()

    monkeypatch.setattr(api, "validate_horizons", observed)
    table = run(
        *("analyze", tiny_kda, "--validate", "--w-max", "64", "--tiers", "64,32", "--per-tier", 3),
        *("--gate-objective", "median", "--intervention", 5, "--chars-per-token", 1.5),
    )
    assert table.exit_code == 0, table.output
    assert "observed horizon H_e              0.988" in table.stdout
    assert "8 of 1,024 tokens, 1 shorter than asked for" in table.stdout
    assert "4,232" in table.stdout
    assert "rank: 0.7, objective 0.900 there and 0.850 at worst" in table.stdout
    assert "the rank objective is flat" in table.stderr
    assert calls[0]["w_max"] == [64]
    assert calls[0]["device"] == "cpu"
    given = {"tiers": (64, 32), "per_tier": 3, "objective": "median", "intervention": 5}
    assert given.items() <= calls[0].items()
    assert "text" not in calls[0]
    found = document(run("analyze", tiny_kda, "--validate", "--json"))["result"]["validation"]
    assert found["magnitudes"]["median"] is None
    assert found["cutoffs"][0]["omitted_but_longer"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--per-tier", "3"), "--per-tier needs --validate"),
        (("--gate-objective", "rank"), "--gate-objective needs --validate"),
        (("--validate", "--gate-objective", "mean"), "takes rank or median"),
        (("--validate", "--tiers", "64,x"), "whole numbers separated by commas"),
    ],
)
def test_validation_options_that_do_nothing_are_refused(
    tiny_kda: Path, options: tuple[str, ...], message: str
) -> None:
    found = run("analyze", tiny_kda, *options)
    assert found.exit_code == 2
    assert message in found.stderr


def test_doctor_reports_versions_and_models() -> None:
    found = document(run("doctor", "--json"))["result"]
    assert found["environment"]["python"]
    assert [m["name"] for m in found["embedded_models"]] == ["tiny-gdn", "tiny-kda"]
    assert found["device"]["kernels"] in ("reference", "triton", "gluon")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--w-max", "3"], 2),
        (["--w-max", "9999999999"], 2),
        (["--epsilon", "7"], 2),
        (["--epsilon", "nan"], 2),
        (["--lower-bound", "nan"], 5),
        (["--device", "tpu"], 2),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_nonsense_is_refused_also_by_a_dry_run(
    tiny_kda: Path, options: list[str], code: int, dry: list[str]
) -> None:
    result = run("analyze", tiny_kda, *options, *dry, "--json")
    assert result.exit_code == code, result.output
    assert document(result)["error"]["message"]
