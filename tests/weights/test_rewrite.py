"""Exports: same layout and bytes but for the planned moves, whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import UnsupportedModel, UsageError
from hybridstate.plan.build import build_plan
from hybridstate.plan.calibration import read_calibration
from hybridstate.plan.compare import verify_against
from hybridstate.plan.store import read_plan
from hybridstate.weights.orders import layer_orders
from hybridstate.weights.permute import LayerOrder
from hybridstate.weights.rewrite import check_disk, lay_out, write_checkpoint, write_shard
from tests.plan.calibrated import write_calibration
from tests.tiny import write_checkpoint as write_model

Tiny = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", "qwen3_5", value_heads=6, shards=3, tokenizer=True)


@pytest.fixture
def calibration(tmp_path: Path, model: Path) -> Path:
    return write_calibration(tmp_path / "cal", model)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_two_exports_are_byte_equal(tmp_path: Path, model: Path, calibration: Path) -> None:
    for name in ("one", "two"):
        api.export_plan(model, out=tmp_path / name, w_max=64, calibration=calibration)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_names_shards_headers_and_side_files_stay(
    tmp_path: Path, model: Path, calibration: Path
) -> None:
    exported = api.export_plan(model, out=tmp_path / "out", calibration=calibration)
    before, after = tree(model), tree(tmp_path / "out")
    added = {"README.md", "state_plan/plan.json", "state_plan/plan.safetensors"}
    assert after.keys() == before.keys() | added
    assert exported.layout is not None
    shards = [file.name for file in exported.layout.shards]
    for name in before.keys() - {"config.json"} - set(shards):
        assert after[name] == before[name], name
    for name in shards:
        header = 8 + int.from_bytes(before[name][:8], "little")
        assert after[name][:header] == before[name][:header]
        assert len(after[name]) == len(before[name])
    source, target = open_checkpoint(model), open_checkpoint(tmp_path / "out")
    changed = {n for n in source.entries if source.read_raw(n) != target.read_raw(n)}
    assert changed == set(exported.layout.moves)


def test_config_gains_one_key_and_keeps_its_other_bytes(
    tmp_path: Path, model: Path, calibration: Path
) -> None:
    exported = api.export_plan(model, out=tmp_path / "out", calibration=calibration)
    before = (model / "config.json").read_text()
    after = (tmp_path / "out" / "config.json").read_text()
    assert after.startswith(before.rstrip().removesuffix("}").rstrip())
    added = json.loads(after)
    reference = added.pop("state_plan")
    assert added == json.loads(before)
    assert reference == {
        "file": "state_plan/plan.json",
        "schema": 1,
        "digest": exported.plan.digest,
    }
    assert (tmp_path / "out" / reference["file"]).is_file()


def test_plan_recognises_both_its_checkpoints(
    tmp_path: Path, model: Path, calibration: Path
) -> None:
    """For GDN config, index and decay are the same in both; the convolution tells."""
    out = tmp_path / "out"
    api.export_plan(model, out=out, w_max=64, calibration=calibration)
    plan = read_plan(out)
    assert verify_against(plan, open_checkpoint(model)) == "original"
    assert verify_against(plan, open_checkpoint(out)) == "exported"


def test_key_order_of_another_plan_gives_another_checkpoint(
    tmp_path: Path, model: Path, calibration: Path
) -> None:
    other = write_calibration(tmp_path / "cal2", model, seed=1)
    for name, folder in (("one", calibration), ("two", other)):
        api.export_plan(model, out=tmp_path / name, calibration=folder)
    shard = "model-00001-of-00003.safetensors"
    assert (tmp_path / "one" / shard).read_bytes() != (tmp_path / "two" / shard).read_bytes()


def test_inverse_order_gives_the_original_back(tmp_path: Path, tiny_checkpoint: Tiny) -> None:
    """Heads, bundles, key channels and one common value order, there and back."""
    for family in ("qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid"):
        model = tiny_checkpoint(family)
        checkpoint = open_checkpoint(model)
        orders = [random_order(layer, 3) for layer in checkpoint.spec.layers]
        there, back = tmp_path / f"{family}-there", tmp_path / f"{family}-back"
        permute_files(model, there, orders)
        permute_files(there, back, [order.inverse() for order in orders])
        assert tree(back) == tree(model)
        assert tree(there) != tree(model)


def random_order(layer: object, seed: int) -> LayerOrder:
    from tests.weights.test_permute import random_order as draw

    return draw(layer, seed, common_values=True)  # type: ignore[arg-type]


def permute_files(model: Path, target: Path, orders: list[LayerOrder]) -> None:
    """The shards under any order, without a plan (which so far orders key channels alone)."""
    checkpoint = open_checkpoint(model)
    shutil.copytree(model, target)
    for shard in checkpoint.files:
        moves = lay_out(checkpoint, orders).moves
        here = [move for name, move in moves.items() if checkpoint.entries[name].file == shard]
        write_shard(checkpoint, shard, target / shard.name, here)


def test_failed_export_leaves_nothing(
    tmp_path: Path, model: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("hybridstate.weights.rewrite._name_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.export_plan(model, out=tmp_path / "out", calibration=calibration)
    assert sorted(tmp_path.rglob("*")) == before


def test_full_disk_is_noticed_before_the_first_byte(
    tmp_path: Path, model: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match="1,000 free"):
        api.export_plan(model, out=tmp_path / "out", calibration=calibration)
    assert not (tmp_path / "out").exists()
    api.export_plan(model, out=tmp_path / "plan", w_max=64)  # a bundle alone needs none


def test_sparse_shard_keeps_its_holes(tmp_path: Path, model: Path, calibration: Path) -> None:
    """A shard of which only the header and some tensors are stored stays small on disk."""
    name = "model-00001-of-00003.safetensors"
    raw = (model / name).read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8:header])
    hole = 8 << 20
    table["model.visual.hole"] = {
        "dtype": "U8",
        "shape": [hole],
        "data_offsets": [len(raw) - header, len(raw) - header + hole],
    }
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    with (model / name).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text + raw[header:])
        stream.truncate(8 + len(text) + len(raw) - header + hole)
    allocated = os.stat(model / name).st_blocks * 512
    if allocated >= hole:
        pytest.skip("this file system stores holes")
    checkpoint = open_checkpoint(model)
    plan = build_plan(checkpoint, calibration=read_calibration(calibration_for(tmp_path, model)))
    layout = lay_out(checkpoint, layer_orders(plan, checkpoint.spec))
    assert layout.nbytes < hole
    out = tmp_path / "out"
    out.mkdir()
    write_checkpoint(checkpoint, plan, layout, out)
    assert os.stat(out / name).st_size == os.stat(model / name).st_size
    assert os.stat(out / name).st_blocks * 512 < hole


def calibration_for(tmp_path: Path, model: Path) -> Path:
    return write_calibration(tmp_path / "cal-sparse", model)


def test_other_weight_files_are_left_out_and_named(
    tmp_path: Path, model: Path, calibration: Path
) -> None:
    (model / "pytorch_model.bin").write_bytes(b"old order")
    (model / "extra").mkdir()
    (model / "extra" / "notes.txt").write_text("kept")
    (model / ".cache").mkdir()
    (model / ".cache" / "lock").write_text("")
    exported = api.export_plan(model, out=tmp_path / "out", calibration=calibration)
    assert exported.to_json()["checkpoint"]["left_out"] == ["pytorch_model.bin"]
    assert (tmp_path / "out" / "extra" / "notes.txt").read_text() == "kept"
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    assert not (tmp_path / "out" / ".cache").exists()


def test_export_of_an_export_is_refused(tmp_path: Path, model: Path, calibration: Path) -> None:
    api.export_plan(model, out=tmp_path / "out", calibration=calibration)
    with pytest.raises(UsageError, match="itself written by export-plan"):
        lay_out(open_checkpoint(tmp_path / "out"), ())


def test_packed_quantisation_is_refused_before_writing(
    tmp_path: Path, model: Path, calibration: Path
) -> None:
    from tests.tiny import write_safetensors

    index = json.loads((model / "model.safetensors.index.json").read_text())
    packed = "model.language_model.layers.0.linear_attn.out_proj.weight_packed"
    write_safetensors(model / "more.safetensors", {packed: ("F32", np.ones((1, 1), np.float32))})
    index["weight_map"][packed] = "more.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    other = write_calibration(tmp_path / "cal2", model)
    with pytest.raises(UnsupportedModel, match="weight_packed"):
        api.export_plan(model, out=tmp_path / "out", calibration=other)
    assert not (tmp_path / "out").exists()
    bundle = api.export_plan(model, out=tmp_path / "out", calibration=other, weights=False)
    assert bundle.layout is None
    assert not bundle.plan.absorbs_keys


def test_dry_run_writes_nothing_and_says_what_it_would(
    tmp_path: Path, model: Path, calibration: Path
) -> None:
    found = api.export_plan(
        model, out=tmp_path / "out", w_max=64, calibration=calibration, dry_run=True
    )
    assert not found.written
    assert found.to_json()["checkpoint"]["tensors"] == len(open_checkpoint(model).entries)
    assert not (tmp_path / "out").exists()


def test_forced_export_replaces_the_whole_folder(
    tmp_path: Path, model: Path, calibration: Path
) -> None:
    out = tmp_path / "out"
    api.export_plan(model, out=out, calibration=calibration)
    with pytest.raises(UsageError, match="not empty"):
        api.export_plan(model, out=out, w_max=64)
    api.export_plan(model, out=out, w_max=64, force=True)
    assert sorted(p.name for p in out.iterdir()) == ["plan.json", "plan.safetensors"]


def test_disk_check_counts_what_is_stored(tmp_path: Path, model: Path) -> None:
    checkpoint = open_checkpoint(model)
    orders = [LayerOrder.identity(layer) for layer in checkpoint.spec.layers]
    layout = lay_out(checkpoint, orders)
    assert layout.moves == {}
    assert layout.nbytes <= sum(p.stat().st_size for p in model.iterdir())
    check_disk(layout, tmp_path / "not" / "yet" / "there")
