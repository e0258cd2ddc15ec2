"""Exported models compute what the originals do, and a wrong export is caught with its place."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import NumericError, PlanMismatch, SourceError
from hybridstate.quality.verify import MAX_RELATIVE_ERROR, account_tensors, verify
from hybridstate.trajectories.cache import prefill
from hybridstate.trajectories.model import load_model
from hybridstate.weights.rewrite import lay_out, write_shard
from tests.plan.calibrated import write_calibration
from tests.tiny import write_checkpoint
from tests.tolerances import TOLERANCES, assert_within, relative_rms
from tests.weights.test_rewrite import permute_files, random_order

CASES = {
    "qwen3_5-gva1": ("qwen3_5", {"key_heads": 2, "value_heads": 2}),
    "qwen3_5-gva2": ("qwen3_5", {"value_heads": 4, "shards": 2}),
    "qwen3_5-gva3": ("qwen3_5", {"value_heads": 6, "tokenizer": True}),
    "qwen3_5_moe-composite": ("qwen3_5_moe", {}),
    "qwen3_next-gva1": ("qwen3_next", {"key_heads": 2, "value_heads": 2}),
    "qwen3_next-gva3": ("qwen3_next", {"value_heads": 6}),
    "kimi_linear": ("kimi_linear", {"tokenizer": True}),
    "olmo_hybrid": ("olmo_hybrid", {}),
}


def test_bound_is_the_one_of_the_tolerance_table() -> None:
    assert TOLERANCES["export-logits-f32"].relative_rms == MAX_RELATIVE_ERROR


@pytest.mark.parametrize("case", CASES)
def test_exported_model_equals_the_original(
    case: str, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    family, options = CASES[case]
    model = tiny_checkpoint(family, **options)
    calibration = write_calibration(tmp_path / "cal", model)
    out = tmp_path / "out"
    exported = api.export_plan(model, out=out, w_max=64, calibration=calibration)
    assert exported.layout is not None
    found = verify(model, out, prompts=2, prompt_tokens=48, new_tokens=8)
    assert found.logit_error <= 1e-5
    assert found.state_error <= 1e-5
    assert len(found.layers) == 3
    assert found.tensors.moved == tuple(sorted(exported.layout.moves))
    assert found.text.startswith("held-out" if "tokenizer" in options else "synthetic")
    assert found.to_json()["identical_tokens"] is True


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid"])
def test_heads_bundles_keys_and_values_move_together_without_a_trace(
    family: str, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    """The axis table beyond key order: everything the weights can absorb, at once."""
    model = tiny_checkpoint(family)
    layers = open_checkpoint(model).spec.layers
    permute_files(model, tmp_path / "moved", [random_order(layer, 5) for layer in layers])
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 97, (2, 40)))
    logits = [
        prefill(load_model(str(folder)), tokens, keep_logits=True)[0]
        for folder in (model, tmp_path / "moved")
    ]
    assert_within(logits[1], logits[0], "export-logits-f32")


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_every_move_is_needed(
    family: str, tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    """One tensor left in the old order and the model computes something else entirely."""
    model = tiny_checkpoint(family)
    checkpoint = open_checkpoint(model)
    orders = [random_order(layer, 5) for layer in checkpoint.spec.layers]
    moves = lay_out(checkpoint, orders).moves
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 97, (2, 40)))
    expected = prefill(load_model(str(model)), tokens, keep_logits=True)[0]
    target = tmp_path / "moved"
    shutil.copytree(model, target)
    prefix = checkpoint.spec.layers[0].prefix
    for left in sorted(name for name in moves if name.startswith(prefix)):
        suffix = left.removeprefix(prefix)
        done = [move for name, move in moves.items() if not name.endswith("." + suffix)]
        write_shard(checkpoint, checkpoint.files[0], target / checkpoint.files[0].name, done)
        logits = prefill(load_model(str(target)), tokens, keep_logits=True)[0]
        assert relative_rms(logits, expected) > 0.1, suffix


def test_wrong_order_is_caught_by_states(tmp_path: Path, tiny_gdn: Path) -> None:
    """A checkpoint permuted by another plan has equal logits; its states give it away."""
    from hybridstate.plan.store import read_plan
    from hybridstate.quality.verify import _compare_states

    out = tmp_path / "out"
    calibration = write_calibration(tmp_path / "cal", tiny_gdn)
    api.export_plan(tiny_gdn, out=out, calibration=calibration)
    layer = open_checkpoint(tiny_gdn).spec.layers[1]
    state = torch.randn(1, layer.value_heads, layer.key_dim, layer.value_dim)
    with pytest.raises(NumericError, match=rf"layer {layer.index}: .* relative") as caught:
        _compare_states(read_plan(out), layer, [state], [state])
    assert caught.value.context["layer"] == layer.index
    assert caught.value.context["found"] > 1e-5


def test_changed_tensor_is_named(tmp_path: Path, tiny_gdn: Path) -> None:
    out = tmp_path / "out"
    exported = api.export_plan(
        tiny_gdn, out=out, calibration=write_calibration(tmp_path / "cal", tiny_gdn)
    )
    target = open_checkpoint(out)
    for name in ("model.language_model.layers.2.linear_attn.in_proj_qkv.weight", "norm.weight"):
        name = next(n for n in target.entries if n.endswith(name))
        entry = target.entries[name]
        with entry.file.open("r+b") as stream:
            stream.seek(entry.start)
            old = stream.read(1)
            stream.seek(entry.start)
            stream.write(bytes([old[0] ^ 1]))
        with pytest.raises(PlanMismatch, match=name.replace(".", r"\.")):
            account_tensors(exported.plan, open_checkpoint(tiny_gdn), open_checkpoint(out))
        with entry.file.open("r+b") as stream:
            stream.seek(entry.start)
            stream.write(old)
    account_tensors(exported.plan, open_checkpoint(tiny_gdn), open_checkpoint(out))


def test_folders_in_the_wrong_roles_are_refused(tmp_path: Path, tiny_kda: Path) -> None:
    out, other = tmp_path / "out", write_checkpoint(tmp_path / "other", "kimi_linear", seed=9)
    api.export_plan(tiny_kda, out=out, calibration=write_calibration(tmp_path / "cal", tiny_kda))
    with pytest.raises(SourceError, match=r"no plan\.json"):
        verify(out, tiny_kda)
    with pytest.raises(PlanMismatch, match="exported checkpoint of this plan"):
        verify(out, out)
    with pytest.raises(PlanMismatch, match=r"with \w+ digest \w+, other has"):
        verify(other, out)


def test_failed_check_keeps_the_folder_from_appearing(
    tmp_path: Path, tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = write_calibration(tmp_path / "cal", tiny_kda)
    monkeypatch.setattr("hybridstate.quality.verify.MAX_RELATIVE_ERROR", 1e-12)
    with pytest.raises(NumericError):
        api.export_plan(tiny_kda, out=tmp_path / "out", calibration=calibration, check=True)
    assert [p.name for p in tmp_path.iterdir()] == ["cal"]
