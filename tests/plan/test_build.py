"""Plans made from real checkpoints: DASC, DAMP, both, and what does not fit together."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import NumericError, PlanMismatch, SourceError, UsageError
from hybridstate.plan.build import build_plan, stored_key_order
from hybridstate.plan.calibration import read_calibration
from hybridstate.plan.compare import verify_against
from hybridstate.plan.select import random_selection
from hybridstate.plan.store import Plan, read_plan
from tests.plan.calibrated import write_calibration
from tests.tiny import write_checkpoint


def dasc_plan(model: Path, w_max: int = 64, seed: int | None = None) -> Plan:
    found = api.analyze(model, w_max=(w_max,))
    selection = found.cutoffs[0].selection
    return build_plan(
        open_checkpoint(model),
        horizons=found.horizons,
        gate_input=found.gate_input,
        epsilon=found.epsilon,
        selection=selection if seed is None else random_selection(selection, seed),
    )


def test_dasc_plan_holds_masks_windows_and_bytes(tiny_gdn: Path, tiny_kda: Path) -> None:
    for model, unit in ((tiny_gdn, "head"), (tiny_kda, "channel")):
        found = api.analyze(model, w_max=(64,))
        plan = dasc_plan(model)
        selection, accounting = plan.document.selection, plan.document.accounting
        assert selection is not None
        assert accounting is not None
        assert selection.unit == unit
        assert plan.document.precision is None
        assert not any("key_order" in name for name in plan.arrays)
        for ordinal, layer in enumerate(plan.layers):
            horizon = found.horizons[ordinal]
            retained = plan.array(layer.index, "retained")
            assert retained is not None
            assert (retained == (horizon > 64)).all()
            stored = plan.array(layer.index, "horizon")
            assert stored is not None
            assert (stored == horizon.astype(np.float32)).all()
        assert accounting.temporal_ragged_bytes == (
            found.cutoffs[0].accounting.temporal_ragged_bytes
        )


def test_random_mask_is_recorded_as_such(tiny_kda: Path) -> None:
    selection = dasc_plan(tiny_kda, seed=1234).document.selection
    assert selection is not None
    assert (selection.selector, selection.seed) == ("random", 1234)


def test_damp_plan_has_no_selection(tmp_path: Path, tiny_gdn: Path) -> None:
    calibration = read_calibration(write_calibration(tmp_path / "cal", tiny_gdn, k_hi=3))
    plan = build_plan(open_checkpoint(tiny_gdn), calibration=calibration)
    precision = plan.document.precision
    assert plan.document.selection is None
    assert precision is not None
    assert precision.k_hi == 3
    assert precision.bits_per_value == pytest.approx((3 * 16 + 5 * (8 + 32 / 12)) / 8)
    assert plan.document.layout_id is not None
    for layer, protected in zip(plan.layers, calibration.protected, strict=True):
        order = plan.array(layer.index, "key_order")
        assert order is not None
        assert (order[:, :3] == np.sort(protected, axis=1)).all()


def test_infinite_horizons_are_kept(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "kimi_linear")
    entry = open_checkpoint(model).entries["model.layers.0.self_attn.A_log"]
    with entry.file.open("r+b") as stream:
        stream.seek(entry.start)
        stream.write(np.full(entry.shape, -200.0, "<f4").tobytes())
    plan = dasc_plan(model)
    horizon, retained = plan.array(0, "horizon"), plan.array(0, "retained")
    assert horizon is not None
    assert retained is not None
    assert np.isinf(horizon).all()
    assert retained.all()


def test_plan_of_a_copy_is_the_same_and_of_another_model_is_not(
    tmp_path: Path, tiny_kda: Path
) -> None:
    copy = tmp_path / tiny_kda.name
    shutil.copytree(tiny_kda, copy)
    assert dasc_plan(copy).digest == dasc_plan(tiny_kda).digest
    other = write_checkpoint(tmp_path / "other", "kimi_linear", seed=5, tokenizer=True)
    with pytest.raises(PlanMismatch, match=r"with decay digest \w+, other has \w+"):
        verify_against(dasc_plan(tiny_kda), open_checkpoint(other))


def test_both_digests_are_shown_when_a_plan_does_not_fit(tiny_gdn: Path, tiny_kda: Path) -> None:
    with pytest.raises(PlanMismatch) as caught:
        verify_against(dasc_plan(tiny_kda), open_checkpoint(tiny_gdn))
    context = caught.value.context
    assert context["found"][:12] in caught.value.message
    assert context["expected"][:12] in caught.value.message
    assert caught.value.exit_code == 6


def test_nothing_to_plan_is_refused(tiny_kda: Path) -> None:
    with pytest.raises(UsageError, match="cutoff, a calibration or both"):
        build_plan(open_checkpoint(tiny_kda))


def test_calibration_of_another_model_is_refused(tmp_path: Path, tiny_kda: Path) -> None:
    other = write_checkpoint(tmp_path / "other", "kimi_linear", seed=5, tokenizer=True)
    calibration = read_calibration(write_calibration(tmp_path / "cal", other))
    with pytest.raises(PlanMismatch, match="was calibrated on other"):
        build_plan(open_checkpoint(tiny_kda), calibration=calibration)


@given(
    heads=st.integers(1, 4),
    key_dim=st.integers(1, 12),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_key_order_puts_protected_channels_first_and_ascends(
    heads: int, key_dim: int, share: float, seed: int
) -> None:
    k_hi = round(share * key_dim)
    rng = np.random.Generator(np.random.PCG64(seed))
    protected = np.array([rng.permutation(key_dim)[:k_hi] for _ in range(heads)]).reshape(heads, -1)
    order = stored_key_order(protected, key_dim)
    assert order.dtype == np.int16
    for head in range(heads):
        assert order[head, :k_hi].tolist() == sorted(protected[head])
        assert order[head, k_hi:].tolist() == sorted(set(range(key_dim)) - set(protected[head]))


def test_protected_channels_out_of_range_or_named_twice_are_refused() -> None:
    with pytest.raises(NumericError, match="outside"):
        stored_key_order(np.array([[0, 8]]), 8)
    with pytest.raises(NumericError, match="head 1 protects a channel twice"):
        stored_key_order(np.array([[0, 1], [3, 3]]), 8)


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _drop_key(folder: Path) -> None:
    content = json.loads((folder / "calibration.json").read_text())
    del content["k_hi"]
    (folder / "calibration.json").write_text(json.dumps(content))


def _newer(folder: Path) -> None:
    content = json.loads((folder / "calibration.json").read_text())
    content["schema"] = "hybridstate.calibration/2"
    (folder / "calibration.json").write_text(json.dumps(content))


def _tamper(folder: Path) -> None:
    file = folder / "calibration.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "mentions"),
    [
        (_tamper, r"layers\.\d\.\w+ was changed"),
        (_newer, r"calibration/2, this version reads"),
        (_remove("calibration.json"), r"calibration\.json"),
        (_remove("calibration.safetensors"), r"calibration\.safetensors"),
        (lambda f: (f / "calibration.json").write_text("{"), "not readable"),
        (lambda f: (f / "calibration.safetensors").write_bytes(b"1234"), "not readable"),
        (_drop_key, "k_hi"),
    ],
)
def test_damaged_calibration_gets_one_clear_line(
    tmp_path: Path, tiny_kda: Path, damage: Callable[[Path], None], mentions: str
) -> None:
    folder = write_calibration(tmp_path / "cal", tiny_kda)
    damage(folder)
    with pytest.raises((SourceError, PlanMismatch), match=mentions) as caught:
        read_calibration(folder)
    assert "\n" not in caught.value.message


def test_bundle_of_a_dasc_export_reads_back(tmp_path: Path, tiny_gdn: Path) -> None:
    exported = api.export_plan(tiny_gdn, out=tmp_path / "plan", w_max=64, check=True)
    assert read_plan(tmp_path / "plan").digest == exported.plan.digest == dasc_plan(tiny_gdn).digest
    assert exported.layout is None
    assert exported.verification is None


def test_exported_order_of_units_is_what_the_exported_weights_say(
    tmp_path: Path, tiny_kda: Path
) -> None:
    """Horizons of the permuted checkpoint are the plan's, in the exported order."""
    out = tmp_path / "out"
    calibration = write_calibration(tmp_path / "cal", tiny_kda)
    plan = api.export_plan(tiny_kda, out=out, w_max=64, calibration=calibration).plan
    found = api.analyze(out, w_max=(64,))
    for layer, horizon, retained in zip(
        plan.layers, found.horizons, found.cutoffs[0].selection.retained, strict=True
    ):
        moved = plan.unit_array(layer.index, "retained", "exported")
        stored = plan.unit_array(layer.index, "horizon", "exported")
        assert moved is not None
        assert stored is not None
        assert (moved == retained).all()
        assert (stored == horizon.astype(np.float32)).all()
        original = plan.array(layer.index, "horizon")
        assert original is not None
        assert (stored != original).any()


def test_calibration_of_another_format_is_refused(tmp_path: Path, tiny_kda: Path) -> None:
    folder = write_calibration(tmp_path / "cal", tiny_kda)
    file = folder / "calibration.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"low_format": "int4-step"}))
    with pytest.raises(PlanMismatch, match="low_format is 'int4-step', plans hold int8-step"):
        read_calibration(folder)
