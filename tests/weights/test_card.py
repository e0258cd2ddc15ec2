"""The model card says what was measured, keeps the source's own, and depends on the plan alone."""

from pathlib import Path
from typing import Any

import pytest

from hybridstate import api
from hybridstate.weights.card import model_card
from tests.plan.calibrated import write_calibration
from tests.tiny import write_checkpoint

SOURCE = """---
license: apache-2.0
language:
- en
- de
model-index:
- name: secret
tags:
- theirs
---
# Their words
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "kimi_linear", tokenizer=True)


def export(tmp_path: Path, model: Path, name: str = "out", **options: Any) -> Any:
    calibration = tmp_path / "calibration"
    if not calibration.exists():
        write_calibration(calibration, model)
    return api.export_plan(model, out=tmp_path / name, w_max=64, calibration=calibration, **options)


def test_card_names_base_changes_savings_limits_and_the_command(
    tmp_path: Path, model: Path
) -> None:
    made = export(tmp_path, model)
    text = (tmp_path / "out" / "README.md").read_text()
    precision = made.plan.document.precision
    assert f"Base model: `{model.name}`" in text
    assert f"{len(made.layout.moves)} of {made.layout.tensors} tensors are permuted" in text
    assert f"{precision.state_packed_bytes:,} packed" in text
    assert f"{precision.bits_per_value:.3f} bits per value" in text
    assert made.digest in text
    assert "Not compared with the base model" in text
    assert "| fp32 | 32.000 |" in text
    assert (
        f"hybridstate export-plan {model.name} --w-max 64 --calibration calibration -o exported"
        in text
    )
    assert str(tmp_path) not in text
    assert not (tmp_path / "out" / "README.original.md").exists()


def test_checked_export_carries_its_measured_divergence(tmp_path: Path, model: Path) -> None:
    made = export(tmp_path, model, check=True)
    text = (tmp_path / "out" / "README.md").read_text()
    assert f"logits within {made.verification['logit_error']:.1e}" in text
    assert f"{made.verification['bf16']['ratio']:.3f} times the base model's own distance" in text


def test_the_source_s_card_is_kept_word_for_word_and_its_licence_carried(
    tmp_path: Path, model: Path
) -> None:
    (model / "README.md").write_text(SOURCE)
    export(tmp_path, model)
    assert (tmp_path / "out" / "README.original.md").read_text() == SOURCE
    text = (tmp_path / "out" / "README.md").read_text()
    front = text.split("---")[1]
    lines = ["license: apache-2.0", "language:", "- en", "- de", "tags:", "- hybridstate"]
    assert front.strip().splitlines() == lines
    assert "[README.original.md](README.original.md)" in text
    assert "Their words" not in text


def test_base_model_is_an_address_or_left_out(tmp_path: Path, model: Path) -> None:
    made = export(tmp_path, model)
    assert "base_model:" not in model_card(made.plan, made.layout, None)
    named = made.plan.document.model.model_copy(update={"name": "org/name@main"})
    document = made.plan.document.model_copy(update={"model": named})
    plan = type(made.plan)(document, made.plan.arrays)
    assert "base_model: org/name\nbase_model_relation: quantized" in model_card(
        plan, made.layout, None
    )


def test_two_exports_have_the_same_card(tmp_path: Path, model: Path) -> None:
    for name in ("one", "two"):
        export(tmp_path, model, name)
    assert (tmp_path / "one" / "README.md").read_bytes() == (
        tmp_path / "two" / "README.md"
    ).read_bytes()
