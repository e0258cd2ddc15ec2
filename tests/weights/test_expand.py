"""Key orders of each value head's own: replicated in the weights, or left to the kernel."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import UnsupportedModel
from hybridstate.plan.store import read_plan
from tests.families.saved import available, save
from tests.plan.calibrated import write_calibration
from tests.tiny import write_checkpoint

MODELS = {
    "qwen3_5": {"value_heads": 6, "shards": 2},
    "qwen3_5_moe": {},
    "qwen3_next": {"value_heads": 6},
}


def exported(family: str, folder: Path, **options: Any) -> tuple[Path, Path, Any]:
    if family in MODELS:
        model = write_checkpoint(folder / "model", family, **MODELS[family])
    elif available(family):
        model = save(family, folder / "model")
    else:
        pytest.skip(f"this transformers has no {family}")
    calibration = write_calibration(folder / "calibration", model)
    out = folder / "out"
    made = api.export_plan(model, out=out, w_max=64, calibration=calibration, **options)
    return model, out, made


@pytest.mark.parametrize("family", [*MODELS, "lara_mini", "qwen4_exp"])
def test_replicated_key_heads_compute_the_same(family: str, tmp_path: Path) -> None:
    model, out, made = exported(family, tmp_path, key_order="expand")
    before, after = open_checkpoint(model), open_checkpoint(out)
    layer = before.spec.layers[0]
    assert layer.bundle > 1
    assert {(n.key_heads, n.value_heads) for n in after.spec.layers} == {(layer.value_heads,) * 2}
    grown = made.layout.growth
    assert (grown.before, grown.after) == (layer.key_heads, layer.value_heads)
    assert grown.conv_after > grown.conv_before
    sizes = [sum(e.end - e.start for e in c.entries.values()) for c in (before, after)]
    assert sizes[1] - sizes[0] == grown.added_bytes > 0
    changed = {n for n in before.shapes if before.shapes[n] != after.shapes[n]}
    assert changed == set(grown.shapes)
    assert set(grown.shapes) <= set(made.layout.moves)
    found = api.verify(model, out, prompts=2, prompt_tokens=24, new_tokens=4, bf16=False)
    assert found.logit_error <= 1e-5
    assert found.state_error <= 1e-5


def test_config_and_index_say_what_grew(tmp_path: Path) -> None:
    model, out, made = exported("qwen3_5", tmp_path, key_order="expand")
    before, after = (json.loads((d / "config.json").read_text()) for d in (model, out))
    del after["state_plan"]
    text = after.get("text_config", after)
    assert text.pop("linear_num_key_heads") == 6
    assert before.get("text_config", before).pop("linear_num_key_heads") == 2
    assert before == after
    totals = [
        json.loads((d / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
        for d in (model, out)
    ]
    assert totals[1] - totals[0] == made.to_json()["checkpoint"]["expanded"]["added_bytes"]
    again = tmp_path / "again"
    api.export_plan(
        model, out=again, w_max=64, calibration=tmp_path / "calibration", key_order="expand"
    )
    for file in sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file()):
        assert (out / file).read_bytes() == (again / file).read_bytes(), file


def test_heads_and_replicas_move_together(tmp_path: Path) -> None:
    model, out, _ = exported("qwen3_next", tmp_path, key_order="expand", tp=2, balance="hybrid")
    found = api.verify(model, out, prompts=1, prompt_tokens=24, new_tokens=3, bf16=False)
    assert found.logit_error <= 1e-5


def test_orders_per_head_are_left_to_the_kernel(tmp_path: Path) -> None:
    model, out, made = exported("qwen3_5", tmp_path, key_order="per-head")
    assert made.layout is None
    plan = read_plan(out)
    assert plan.document.precision is not None
    assert plan.document.precision.key_order == "per-head"
    layer = plan.layers[0]
    order = plan.arrays[f"layers.{layer.index}.key_order"]
    risk = plan.arrays[f"layers.{layer.index}.risk"]
    assert (order[:, :2] == np.sort(np.argsort(-risk, axis=1)[:, :2], axis=1)).all()
    with pytest.raises(UnsupportedModel, match="which weights cannot hold") as caught:
        api.export_plan(
            model, out=tmp_path / "w", calibration=tmp_path / "calibration", key_order="per-head",
            weights=True,
        )  # fmt: skip
    assert "--key-order expand" in str(caught.value.hint)


def test_one_value_head_per_key_head_has_one_order(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "kimi_linear")
    calibration = write_calibration(tmp_path / "calibration", model)
    made = api.export_plan(model, out=tmp_path / "out", calibration=calibration, key_order="expand")
    assert made.layout is not None
    assert made.layout.growth is None
    assert made.plan.document.precision.key_order == "shared"
    assert "every key head has one value head" in made.plan.document.provenance.notes[0]
