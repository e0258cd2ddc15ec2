"""The `placement` block and arrays of a plan: written by `export-plan --tp`, checked on reading."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import PlanMismatch, SourceError, UsageError
from hybridstate.plan.build import build_plan
from hybridstate.plan.check import check_meaning
from hybridstate.plan.compare import verify_against
from hybridstate.plan.placement import BALANCES, Balance, packed_order
from hybridstate.plan.schema import to_content
from hybridstate.plan.store import Plan, read_plan, seal
from tests.plan.calibrated import write_calibration


def placed(model: Path, mode: Balance, tp: int = 2) -> Plan:
    checkpoint = open_checkpoint(model)
    found = api.analyze(model, w_max=(64,), tp=tp, balance=mode)
    return build_plan(
        checkpoint,
        horizons=found.horizons,
        gate_input=found.gate_input,
        gate_input_source=found.gate_input_source,
        epsilon=found.epsilon,
        selection=found.cutoffs[0].selection,
        placement=found.capacity.placements[0],
    )


@pytest.mark.parametrize("model", ["tiny_gdn", "tiny_kda"])
@pytest.mark.parametrize("mode", BALANCES)
def test_exported_placement_reads_back_and_covers_every_unit_once(
    tmp_path: Path, model: str, mode: Balance, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    api.export_plan(folder, out=tmp_path / "plan", w_max=64, tp=2, balance=mode)
    plan = read_plan(tmp_path / "plan")
    block, selection = plan.document.placement, plan.document.selection
    assert block is not None
    assert selection is not None
    assert plan.digest == placed(folder, mode).digest
    owner = plan.arrays["placement.head_owner"]
    assert owner.shape == (len(plan.layers), plan.layers[0].key_heads)
    units = [0, 0]
    for layer, row in zip(plan.layers, owner, strict=True):
        kept = plan.arrays[f"layers.{layer.index}.retained"].reshape(layer.value_heads, -1)
        bundle = layer.value_heads // layer.key_heads
        for head in packed_order(layer.key_heads, layer.value_heads, row.tolist()):
            units[row[head // bundle]] += int(kept[head].sum())
    assert tuple(units) == block.rank_units
    if mode == "off":
        assert block.stored_units == block.rank_units
        assert "placement.storage_owner" not in plan.arrays
        return
    ranks, slots = (plan.arrays[f"placement.storage_{name}"] for name in ("owner", "slot"))
    assert np.bincount(ranks, minlength=2).tolist() == list(block.stored_units)
    assert len(set(zip(ranks.tolist(), slots.tolist(), strict=True))) == sum(units)
    assert int(slots.max()) < block.slot_units == -(-sum(units) // 2)


def test_plan_without_ranks_has_no_placement(tmp_path: Path, tiny_kda: Path) -> None:
    plan = api.export_plan(tiny_kda, out=tmp_path / "plan", w_max=64).plan
    assert plan.document.placement is None
    assert not any(name.startswith("placement.") for name in plan.arrays)


def _swap_ranks(content: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays["placement.head_owner"] = 1 - arrays["placement.head_owner"]


def _crowd(content: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays["placement.head_owner"] = arrays["placement.head_owner"] * 0


def _misplace(content: dict[str, Any], arrays: dict[str, Any]) -> None:
    slots = arrays["placement.storage_slot"].copy()
    slots[[0, 1]] = slots[[1, 0]]
    arrays["placement.storage_slot"] = slots


def _miscount(content: dict[str, Any], arrays: dict[str, Any]) -> None:
    content["placement"]["remote_units"] += 1


def _overfill(content: dict[str, Any], arrays: dict[str, Any]) -> None:
    units = content["placement"]["stored_units"]
    units[0], units[1] = units[0] + 3, units[1] - 3
    content["placement"]["slot_units"] = max(units)


def _short(content: dict[str, Any], arrays: dict[str, Any]) -> None:
    content["placement"]["rank_units"] = content["placement"]["rank_units"][:1]


@pytest.mark.parametrize(
    ("damage", "mentions"),
    [
        (_swap_ranks, "head_owner: storage keeps heads in contiguous blocks"),
        (_crowd, "head_owner: not 4/2 bundles"),
        (_misplace, "storage_slot: packed unit 0 is misplaced"),
        (_miscount, "remote_units"),
        (_overfill, "stored_units"),
        (_short, "one entry for each of 2 ranks"),
    ],
)
def test_placement_that_does_not_follow_from_the_masks_is_refused(
    tiny_kda: Path, damage: Any, mentions: str
) -> None:
    plan = placed(tiny_kda, "storage")
    content = to_content(plan.document)
    del content["arrays"], content["content_digest"]
    arrays = dict(plan.arrays)
    seal(content, arrays)
    damage(content, arrays)
    with pytest.raises(SourceError, match=mentions):
        seal(content, arrays)


def test_hybrid_accepts_any_map_with_as_many_bundles_on_every_rank(tiny_kda: Path) -> None:
    plan = placed(tiny_kda, "storage")
    content = to_content(plan.document)
    del content["arrays"], content["content_digest"]
    content["placement"]["mode"] = "hybrid"
    seal(content, dict(plan.arrays))


def test_layers_with_different_key_heads_have_no_placement(tiny_kda: Path) -> None:
    plan = placed(tiny_kda, "off")
    layers = list(plan.document.model.layers)
    layers[1] = layers[1].model_copy(update={"key_heads": 2})
    model = plan.document.model.model_copy(update={"layers": tuple(layers)})
    document = plan.document.model_copy(update={"model": model})
    with pytest.raises(SourceError, match="differ in their number of key heads"):
        check_meaning(document, plan.arrays, "here")
    assert replace(plan, document=plan.document).digest == plan.digest


@pytest.mark.parametrize(
    ("options", "error", "mentions"),
    [
        ({"tp": 3, "w_max": 64}, PlanMismatch, "does not divide"),
        ({"tp": 0, "w_max": 64}, UsageError, "at least 1"),
        ({"tp": 2}, UsageError, "both the ranks and a selection"),
        ({"balance": "storage", "w_max": 64}, UsageError, "both the ranks and a selection"),
    ],
)
def test_impossible_placement_is_refused_and_nothing_is_written(
    tmp_path: Path, tiny_kda: Path, options: dict[str, Any], error: type[Exception], mentions: str
) -> None:
    with pytest.raises(error, match=mentions):
        api.export_plan(tiny_kda, out=tmp_path / "plan", **options)
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_exported_weights_carry_the_head_order_of_hybrid(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    """Contiguous sharding of the exported checkpoint is the placement of the plan."""
    model, out = tiny_checkpoint(family), tmp_path / "out"
    tp = open_checkpoint(model).spec.layers[0].key_heads // 2 or 1
    plan = api.export_plan(model, out=out, w_max=64, tp=tp, balance="hybrid", weights=True).plan
    block = plan.document.placement
    assert block is not None
    assert plan.absorbs_heads
    assert verify_against(plan, open_checkpoint(out)) in ("original", "exported")
    found = api.analyze(out, w_max=(64,), tp=tp, balance="off")
    assert found.capacity.placements[0].compute_units == block.rank_units
    for layer, horizon, mask in zip(
        plan.layers, found.horizons, found.cutoffs[0].selection.retained, strict=True
    ):
        moved = plan.unit_array(layer.index, "retained", "exported")
        stored = plan.unit_array(layer.index, "horizon", "exported")
        assert moved is not None
        assert stored is not None
        assert (moved == mask).all()
        assert (stored == horizon.astype(np.float32)).all()


def test_head_and_key_order_are_absorbed_together(tmp_path: Path, tiny_kda: Path) -> None:
    calibration = write_calibration(tmp_path / "cal", tiny_kda)
    plan = api.export_plan(
        tiny_kda,
        out=tmp_path / "out",
        w_max=64,
        calibration=calibration,
        tp=2,
        balance="hybrid",
        check=True,
    ).plan
    found = api.analyze(tmp_path / "out", w_max=(64,))
    moved = 0
    for layer, mask in zip(plan.layers, found.cutoffs[0].selection.retained, strict=True):
        units = plan.unit_array(layer.index, "retained", "exported")
        heads = plan.head_order(layer.index, "exported")
        assert units is not None
        assert heads is not None
        assert (units == mask).all()
        assert plan.head_order(layer.index) is None
        moved += int((heads != np.arange(len(heads))).sum())
    assert moved


def test_weights_without_anything_to_move_are_refused(tmp_path: Path, tiny_kda: Path) -> None:
    with pytest.raises(UsageError, match="no weight moves"):
        api.export_plan(
            tiny_kda, out=tmp_path / "p", w_max=64, tp=2, balance="storage", weights=True
        )
