"""Figures and tables of a validation: every number drawn or tabled comes from the recorded JSON."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import validation_tables
from typer.testing import CliRunner

from hybridstate.cli.main import app
from hybridstate.figures import VALIDATION_FIGURES, validation_figures
from hybridstate.horizons.gate_input import read_gate_input


@pytest.fixture(scope="module", params=["tiny_gdn", "tiny_kda"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `analyze --validate -o` writes for a small run, the planned names checked against it."""
    model: Path = request.getfixturevalue(request.param)
    out = tmp_path_factory.mktemp("validated") / "out"
    options = ("--validate", "--tiers", "40,24", "--per-tier", "3", "--intervention", "2")
    command = ["analyze", str(model), *options, "-o", str(out), "--json", "--quiet"]
    planned = CliRunner().invoke(app, [*command, "--dry-run"])
    assert planned.exit_code == 0, planned.output
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    names = {Path(name).name for name in json.loads(planned.stdout)["result"]["writes"]}
    assert names == {path.name for path in out.iterdir()}
    return out


def recorded(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "validation.json").read_text())
    assert isinstance(found, dict)
    return found


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_recording_says_where_it_comes_from(folder: Path) -> None:
    document = recorded(folder)
    assert document["command"] == "analyze"
    assert document["provenance"]["torch"]
    assert document["model"] == document["result"]["model"]
    validation = document["result"]["validation"]
    assert validation["seconds"] > 0
    choice = validation["gate_input_choices"]["median"]["gate_input"]
    digests = validation["model_digests"]
    assert read_gate_input(folder, digests, objective="median") == choice
    assert read_gate_input(folder / "validation.json", digests, objective="median") == choice


def test_every_picture_has_its_numbers_beside_it(folder: Path) -> None:
    for name in VALIDATION_FIGURES:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    found = recorded(folder)["result"]["validation"]
    units = found["units"]
    count = len(units["static_horizon"])

    drawn = rows(folder / "static_observed.csv")
    assert len(drawn) == count
    horizons = [np.inf if h is None else h for h in units["static_horizon"]]
    assert [float(row["static_horizon_tokens"]) for row in drawn] == pytest.approx(horizons)

    sorted_rows = rows(folder / "effective_decay.csv")
    factors = [float(row["effective_decay"]) for row in sorted_rows]
    assert factors == sorted(factors)
    assert len(factors) == count
    assert len({row["unit"] for row in sorted_rows}) == count

    domains = rows(folder / "decay_domains.csv")
    for name, values in units["effective_decay"].items():
        assert [float(row[name]) for row in domains] == pytest.approx(values, rel=1e-6)

    traces = rows(folder / "decay_traces.csv")
    assert {row["percentile"] for row in traces} == {"10", "50", "90"}
    assert all(0 <= float(row["decay"]) <= 1 for row in traces)


def test_units_are_named_by_block_head_and_channel(folder: Path) -> None:
    found = recorded(folder)["result"]["validation"]
    names = [row["unit"] for row in rows(folder / "static_observed.csv")]
    last = found["units"]["layers"][-1]
    expected = f"block {last['index']} head {last['shape'][0] - 1}"
    if found["unit"] == "channel":
        expected += f" channel {last['shape'][1] - 1}"
    assert names[0].startswith("block 0 head 0")
    assert names[-1] == expected


def test_a_recording_draws_the_same_pictures_again(folder: Path, tmp_path: Path) -> None:
    document = recorded(folder)
    drawn = validation_figures(document["result"]["validation"], document["model"], tmp_path)
    assert drawn == VALIDATION_FIGURES
    for name in drawn:
        for kind in ("png", "csv"):
            file = f"{name}.{kind}"
            assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()
    document["result"]["validation"]["units"] = None
    assert validation_figures(document["result"]["validation"], "x", tmp_path) == ()


def test_tables_hold_what_was_recorded(folder: Path) -> None:
    result = recorded(folder)["result"]
    found = result["validation"]
    text = validation_tables.validation(result)
    assert "6 prefixes (3 of 40 tokens, 3 of 24 tokens), Bleak House, held out" in text
    for cutoff in found["cutoffs"]:
        assert f"| {100 * cutoff['same_side']:.1f} % |" in text
    gate = validation_tables.gate_input(result)
    assert "Chosen on 3 prefixes (even places), reported on 3 (odd)." in gate
    assert len([line for line in gate.splitlines() if line.startswith("|")]) == 2 + len(
        found["held_out"]
    )
    decay = validation_tables.decay(result)
    assert f"{found['decay']['domains'][1]['p50']:.4f}" in decay
    zeroed = validation_tables.intervention(result)
    assert "recurrent states and convolution windows" in zeroed
    assert "2 synthetic questions at each depth" in zeroed


def test_older_recordings_give_the_two_tables_they_hold() -> None:
    ranks = {"median": 0.9, "lower_quartile": 0.8, "upper_quartile": 1.0}
    ranks |= {"pairs": 4, "constant_pairs": 0}
    cutoff = {"w_max": 16, "same_side": 0.75, "omitted": 48, "omitted_but_longer": 0}
    found = {"prefixes": 8, "tokens": 1024, "source": "a book", "horizons": ranks}
    result = {"validation": found | {"magnitudes": ranks, "cutoffs": [cutoff]}}
    assert "8 prefixes of 1,024 tokens, a book" in validation_tables.validation(result)
    for table in ("gate_input", "decay", "intervention"):
        assert getattr(validation_tables, table)(result) == ""
