"""`plan.json`: strict, finite, closed, and its JSON Schema is committed."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from hybridstate.plan.schema import PlanDocument, canonical, json_schema, to_content
from tests.plan.sample import sample

COMMITTED = Path(__file__).parents[2] / "plans" / "plan.schema.json"


def test_committed_schema_is_what_the_models_generate() -> None:
    assert COMMITTED.read_text() == json_schema(), "stale: run `python scripts/generate.py`"


def test_canonical_document_parses_to_itself() -> None:
    document = sample().document
    assert PlanDocument.model_validate_json(canonical(document)) == document
    assert canonical(document).endswith(b"}\n")
    assert json.loads(canonical(document)) == to_content(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("unknown",), 1),
        (("model", "unknown"), 1),
        (("selection", "w_max"), "64"),
        (("selection", "w_max"), 64.0),
        (("selection", "w_max"), 2),
        (("horizons", "epsilon"), float("nan")),
        (("horizons", "epsilon"), float("inf")),
        (("schema_version",), 0),
        (("schema_version",), True),
        (("model", "original", "decay"), "short"),
        (("model", "kind"), "mamba2"),
        (("layout_id",), None),
        (("horizons",), None),
    ],
    ids=lambda v: ".".join(v) if isinstance(v, tuple) else str(v)[:12],
)
def test_document_refuses(path: tuple[str, ...], value: object) -> None:
    content = to_content(sample().document)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValidationError):
        PlanDocument.model_validate_json(json.dumps(content))


def test_document_needs_selection_or_precision() -> None:
    content = to_content(sample().document)
    content |= {"selection": None, "precision": None, "layout_id": None}
    with pytest.raises(ValidationError, match=r"DASC.*DAMP"):
        PlanDocument.model_validate_json(json.dumps(content))


def test_a_looping_calibration_is_kept_and_shown_by_the_plan() -> None:
    from hybridstate.cli.plan import _validation_note
    from hybridstate.plan.schema import CalibrationBlock

    block = {"protocol": {"profile": "paper"}, "fingerprint": "x", "prompt_digests": {}}
    looping = CalibrationBlock.model_validate(block | {"repeated_32gram_share": 0.62})
    assert "62% of its text repeats itself" in _validation_note(looping)
    fine = CalibrationBlock.model_validate(block | {"repeated_32gram_share": 0.03})
    assert "repeats" not in _validation_note(fine)
