"""Value orders and scales: from a calibration through plan and weights to the engine, and back to the same logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import PlanMismatch, SourceError, UsageError
from hybridstate.plan.calibration import read_calibration
from hybridstate.plan.orders import common_order
from hybridstate.plan.store import read_plan
from hybridstate.quality.storage import RECURRENCE_ERROR
from hybridstate.quant.arms import plain_arm
from hybridstate.quant.ring import ring_bits
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.runtime.restore import capture
from hybridstate.trajectories.cache import prefill
from hybridstate.trajectories.model import load_model
from tests.plan.calibrated import write_calibration
from tests.tiny import write_checkpoint
from tests.tolerances import relative_rms
from tests.weights.test_fold import saved

CASES = [
    ("qwen3_5_text", {"value_order": "fold"}),
    ("qwen3_5_text", {"value_order": "common"}),
    ("qwen3_5_text", {"value_order": "fold", "key_order": "expand"}),
    ("qwen3_next", {"value_order": "fold", "key_order": "per-head"}),
    ("kimi_linear", {"value_order": "fold"}),
    ("glm5_next", {"value_order": "common"}),
]


@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=lambda x: "-".join(x.values()) if isinstance(x, dict) else x
)
def test_the_transformed_recurrence_is_the_original_s(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = saved(name, tmp_path / "model")
    calibration = write_calibration(tmp_path / "cal", model, values=True)
    made = api.export_plan(model, out=tmp_path / "out", calibration=calibration, **options)
    precision = made.plan.document.precision
    assert precision is not None
    assert precision.value_scale
    assert precision.value_order == {"fold": "per-head"}.get(options["value_order"], "common")
    found = api.verify(
        model, tmp_path / "out", prompts=2, prompt_tokens=24, new_tokens=5, bf16=False
    )
    assert found.logit_error <= 1e-5
    assert found.state_error <= 1e-5
    assert found.packed is not None
    assert found.packed.scaled
    assert found.packed.recurrence_error <= RECURRENCE_ERROR
    assert found.packed.differing == 0
    assert 0 < found.packed.storage_error < 1e-2


def test_original_with_its_plan_and_exported_model_store_the_same(tmp_path: Path) -> None:
    """INT8 error included: the same bytes are rounded, whether the order is gathered or in the weights."""
    model = write_checkpoint(tmp_path / "model", "qwen3_5", value_heads=4, key_dim=16, value_dim=40)
    calibration = write_calibration(tmp_path / "cal", model, k_hi=4, values=True)
    api.export_plan(model, out=tmp_path / "out", calibration=calibration, value_order="common")
    plan = read_plan(tmp_path / "out")
    tokens = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    logits = []
    for folder in (model, tmp_path / "out"):
        loaded = load_model(str(folder))
        _, cache = prefill(loaded, tokens)
        prefix = capture(loaded, tokens, cache)
        engine = DecodeEngine(loaded, state="damp", slots=2, plan=plan)
        assert all(order.scale is not None for order in engine.orders)
        assert all((order.value is None) == (folder != model) for order in engine.orders)
        run = engine.start(prefix, room=4)
        logits.append(torch.stack([run.step(column).clone() for column in tokens[:, :4].T]))
        run.close()
    assert relative_rms(*logits) < 1e-3


def test_a_fold_into_16_bits_is_compared_at_its_rounding(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "qwen3_5")
    calibration = write_calibration(tmp_path / "cal", model, values=True)
    made = api.export_plan(model, out=tmp_path / "out", calibration=calibration, value_order="fold")
    assert made.layout is not None
    assert made.layout.rounded == len(made.plan.layers)
    assert "2^-9 of an entry" in (tmp_path / "out" / "README.md").read_text()
    found = api.verify(model, tmp_path / "out", prompts=2, prompt_tokens=24, new_tokens=4)
    assert found.folded
    assert 1e-5 < found.logit_error <= found.bound < 2e-2
    assert found.packed is not None
    assert found.packed.recurrence_error <= RECURRENCE_ERROR  # on the same rounded weights
    assert found.bf16 is not None
    assert found.bf16.ratio <= 1.05
    assert found.to_json()["identical_tokens"] is (found.differing == 0)


def test_a_calibration_without_value_maps_names_the_command(tmp_path: Path, tiny_gdn: Path) -> None:
    calibration = write_calibration(tmp_path / "cal", tiny_gdn)
    with pytest.raises(UsageError, match="lack damp") as caught:
        api.export_plan(tiny_gdn, out=tmp_path / "out", calibration=calibration, value_order="fold")
    assert "--formats default,damp+reorder" in str(caught.value.hint)
    with pytest.raises(UsageError, match="--value-order sideways"):
        api.export_plan(
            tiny_gdn, out=tmp_path / "out", calibration=calibration, value_order="sideways"
        )  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="belong to a packed state"):
        api.export_plan(tiny_gdn, out=tmp_path / "out", w_max=64, value_order="fold")


def test_calibrate_leaves_what_export_reads(tmp_path: Path, tiny_gdn: Path) -> None:
    api.calibrate(
        tiny_gdn, tmp_path / "cal", k_hi=2, formats="damp+reorder", temperature=1.0, input_tokens=24,
        new_tokens=20, windows=(0,), anchors=(2, 5), horizon=8,
    )  # fmt: skip
    measured = read_calibration(tmp_path / "cal")
    made = api.export_plan(
        tiny_gdn, out=tmp_path / "out", calibration=tmp_path / "cal", value_order="common"
    )
    for layer, maps in zip(made.plan.layers, measured.values, strict=True):
        order = made.plan.arrays[f"layers.{layer.index}.key_order"]
        assert (order[:, :2] == maps.protected).all()
        scale = made.plan.arrays[f"layers.{layer.index}.value_scale"]
        assert (scale == maps.scale).all()
        stored = made.plan.value_scale(layer.index)
        values = made.plan.arrays[f"layers.{layer.index}.value_order"].astype(int)
        assert (stored == np.take_along_axis(scale, values, 1)).all()


def test_damaged_value_maps_are_refused(tmp_path: Path, tiny_gdn: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write_calibration(tmp_path / "cal", tiny_gdn, values=True)
    arrays = load_file(folder / "calibration.safetensors")
    name = next(n for n in arrays if n.endswith("value_order"))
    arrays[name][0, 0] = arrays[name][0, 1]
    save_file(arrays, folder / "calibration.safetensors")
    text = (folder / "calibration.json").read_text()
    (folder / "calibration.json").write_text(text.replace('"arrays"', '"old"'))
    with pytest.raises(SourceError, match="are not value maps"):
        read_calibration(folder)


def test_a_common_order_is_the_mean_place() -> None:
    orders = np.array([[2, 0, 1, 3], [2, 1, 0, 3], [0, 1, 2, 3]], np.int16)
    assert common_order(orders).tolist() == [[2, 0, 1, 3]] * 3
    assert common_order(orders[2:]).tolist() == [[0, 1, 2, 3]]


def test_an_interval_is_counted_and_kept_by_the_engine(tmp_path: Path, tiny_gdn: Path) -> None:
    calibration = write_calibration(tmp_path / "cal", tiny_gdn)
    made = api.export_plan(
        tiny_gdn, out=tmp_path / "out", calibration=calibration, requantise_every=8, weights=False
    )
    precision = made.plan.document.precision
    assert precision is not None
    assert precision.requantise_every == 8
    layer = open_checkpoint(tiny_gdn).spec.layers[0]
    extra = ring_bits(layer, 8, per_channel=False)
    assert precision.bits_per_value_with_ring == precision.bits_per_value + extra
    from dataclasses import replace

    assert replace(plain_arm("int8-step"), every=8).ring_bits(layer, per_channel=False) == extra
    engine = DecodeEngine(load_model(str(tiny_gdn)), state="damp", slots=1, plan=made.plan)
    assert engine.pool.every == 8
    values = sum(n.value_heads * n.key_dim * n.value_dim for n in engine.loaded.spec.layers)
    assert 8 * engine.pool.ring_bytes == round(extra * values)
    with pytest.raises(UsageError, match=r"--requantise-every 32: .* once in 1 to 16 updates"):
        api.export_plan(
            tiny_gdn,
            out=tmp_path / "32",
            calibration=calibration,
            requantise_every=32,
            weights=False,
        )
    assert not (tmp_path / "32").exists()
    by_hand = precision.model_copy(update={"requantise_every": 32})
    longer = replace(
        made.plan, document=made.plan.document.model_copy(update={"precision": by_hand})
    )
    with pytest.raises(PlanMismatch, match="once in 32 updates, this engine once in 16 at most"):
        DecodeEngine(engine.loaded, state="damp", slots=1, plan=longer)


@pytest.mark.parametrize(
    "options",
    [
        {"key_order": "expand", "value_order": "fold"},
        {"value_order": "common", "tp": 2, "balance": "hybrid"},
        {"key_order": "per-head", "value_order": "common"},
    ],
    ids=lambda o: "-".join(str(v) for v in o.values()),
)
def test_two_exports_are_byte_equal_kernels_included(
    options: dict[str, Any], tmp_path: Path, tiny_gdn: Path
) -> None:
    calibration = write_calibration(tmp_path / "cal", tiny_gdn, values=True)
    for name in ("a", "b"):
        out = tmp_path / name
        api.export_plan(
            tiny_gdn, out=out, w_max=64, calibration=calibration, kernels=out / "kernels", **options
        )
    files = sorted(
        p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()
    )
    assert Path("kernels/packed_update.py") in files
    assert Path("config.json") in files
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    found = api.verify(
        tiny_gdn, tmp_path / "a", prompts=1, prompt_tokens=24, new_tokens=3, bf16=False
    )
    assert found.packed is not None
    assert found.packed.recurrence_error <= RECURRENCE_ERROR
    text = (tmp_path / "a" / "kernels" / "packed_update.py").read_text()
    assert "VALUE_SCALE_TEXT" in text
    assert ("KEY_INDEX_TEXT" in text) is (options.get("key_order") == "per-head")
    assert "VALUE_INDEX_TEXT" not in text
