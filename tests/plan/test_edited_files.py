"""Calibrations, measurements and validations that were edited by hand end with one line in plain words."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import SourceError
from hybridstate.horizons.gate_input import read_gate_input
from hybridstate.plan.calibration import read_calibration
from hybridstate.plan.measured import read_measured
from hybridstate.plan.policy_model import measurements_of
from tests.plan.calibrated import write_calibration

RECORDED = Path(__file__).parents[2] / "benchmarks"
Keys = tuple[str | int, ...]


def put(document: Any, keys: Keys, value: Any) -> None:
    for key in keys[:-1]:
        document = document[key]
    document[keys[-1]] = value


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("arrays",), 2.5, "arrays is a number, an object is expected"),
        (("arrays", "layers.0.risk"), None, r"arrays\.layers\.0\.risk is null, an object is expected"),
        (("model", "digests"), [], r"model\.digests is a list, an object is expected"),
        (("validation",), "text", "validation is no list of formats"),
        (("validation",), [1e9], r"validation\[0\] is a number, an object is expected"),
    ],
)  # fmt: skip
def test_a_calibration(keys: Keys, value: Any, said: str, tmp_path: Path, tiny_gdn: Path) -> None:
    folder = write_calibration(tmp_path / "cal", tiny_gdn)
    document = json.loads((folder / "calibration.json").read_text())
    document.setdefault("arrays", {})
    put(document, keys, value)
    (folder / "calibration.json").write_text(json.dumps(document))
    with pytest.raises(SourceError, match=rf"calibration\.json: .*: {said}") as failed:
        read_calibration(folder)
    assert failed.value.hint is not None


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("model_digests",), [], "model_digests is a list, an object is expected"),
        (("model_digests",), 2.5, "model_digests is a number, an object is expected"),
        (("gate_input_choices",), None, "gate_input_choices is null, an object is expected"),
        (("gate_input_choices", "rank"), 7, "the choice by rank is a number, an object is expected"),
        (("gate_input_choices", "rank", "gate_input"), [None], r"gate_input is \[None\], a number is"),
        (("gate_input_choices", "rank", "gate_input"), "1", "gate_input is '1', a number is expected"),
    ],
)  # fmt: skip
def test_a_validation(keys: Keys, value: Any, said: str, tmp_path: Path) -> None:
    document = json.loads((RECORDED / "validate-tiny-kda.json").read_text())
    found = document["result"]["validation"]
    digests = dict(found["model_digests"])
    file = tmp_path / "validate.json"
    file.write_text(json.dumps(document))
    read_gate_input(file, digests, objective="rank")
    put(found, keys, value)
    file.write_text(json.dumps(document))
    with pytest.raises(SourceError, match=rf"validate\.json: .*: {said}"):
        read_gate_input(file, digests, objective="rank")


@pytest.mark.parametrize("part", ["model_digests", "protocol"])
def test_measurements_for_a_cutoff(part: str, tmp_path: Path) -> None:
    document = json.loads((RECORDED / "restore-tiny-gdn.json").read_text())
    digests = dict(document["result"]["model_digests"])
    document["result"][part] = [1]
    file = tmp_path / "restore.json"
    file.write_text(json.dumps(document))
    with pytest.raises(SourceError, match=f"{part} is a list, an object is expected"):
        read_measured(file, digests)


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("arms",), 3, "arms is no list"),
        (("arms", 2), 3, r"arms\[2\] is a number, an object is expected"),
        (("arms", 2, "w_max"), 0, "arm nr-16 has a w_max of 0"),
        (("arms", 2, "prose"), 3, "prose of nr-16 is a number, an object is expected"),
        (("arms", 2, "prose", "bits_per_byte"), "2", "bits_per_byte of arm nr-16 or dense is no number"),
    ],
)  # fmt: skip
def test_measurements_for_a_policy(keys: Keys, value: Any, said: str) -> None:
    result = json.loads((RECORDED / "restore-tiny-gdn.json").read_text())["result"]
    checkpoint, horizons = open_checkpoint("tiny-gdn"), api.analyze("tiny-gdn").horizons
    assert result["arms"][2]["arm"] == "nr-16"
    assert measurements_of(result, checkpoint, horizons, "dasc_nr")
    put(result, keys, value)
    with pytest.raises(SourceError, match=f"not a result of `bench restore` with prose: {said}"):
        measurements_of(result, checkpoint, horizons, "dasc_nr")
