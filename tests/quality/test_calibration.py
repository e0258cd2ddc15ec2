"""The whole verb on tiny models: files, determinism, resuming, refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from hybridstate import api
from hybridstate.errors import NumericError, UsageError
from hybridstate.plan.calibration import read_calibration
from hybridstate.quality.calibration import Calibration, assemble
from hybridstate.quality.divergence import divergences
from hybridstate.quant import calibration as stages
from hybridstate.quant.simulate import simulate
from hybridstate.trajectories import record as recording
from hybridstate.trajectories.model import load_model
from hybridstate.trajectories.prompts import make_prompts, shipped_texts
from hybridstate.trajectories.protocol import protocol
from hybridstate.trajectories.store import TrajectoryStore

SMALL: dict[str, Any] = {
    "input_tokens": 32,
    "new_tokens": 24,
    "windows": (0, 6),
    "anchors": (2, 5),
    "horizon": 12,
}


def calibrate(model: Path, out: Path | None, **changes: Any) -> Calibration:
    options = {"k_hi": 2, "temperature": 1.0, "seed": 3} | SMALL | changes
    return api.calibrate(model, out, **options)


@pytest.mark.parametrize("name", ["tiny_gdn", "tiny_kda"])
def test_same_seed_writes_byte_equal_files_that_a_plan_can_read(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(name)
    seen: list[str] = []
    first = calibrate(model, tmp_path / "a", progress=lambda stage, *_: seen.append(stage))
    calibrate(model, tmp_path / "b")
    for file in ("calibration.json", "calibration.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]  # no trajectories left
    assert list(dict.fromkeys(seen)) == ["record", "score", "validate"]

    plan_side = read_calibration(tmp_path / "a")
    loaded = load_model(model)
    assert plan_side.k_hi == 2
    for layer, risk, protected in zip(
        loaded.spec.layers, plan_side.risk, plan_side.protected, strict=True
    ):
        assert risk.shape == (layer.value_heads, layer.key_dim)
        assert protected.shape == (layer.value_heads, 2)
        bundle = layer.value_heads // layer.key_heads
        summed = risk.reshape(layer.key_heads, bundle, -1).sum(1)
        expected = np.sort(np.argsort(-summed, axis=1)[:, :2], axis=1).repeat(bundle, axis=0)
        assert np.array_equal(protected, expected)
    arrays = load_file(tmp_path / "a" / "calibration.safetensors")
    assert set(arrays) == {
        f"layers.{layer.index}.{kind}"
        for layer in loaded.spec.layers
        for kind in ("risk", "protected")
    }
    document = json.loads((tmp_path / "a" / "calibration.json").read_text())
    assert document["arrays"].keys() == arrays.keys()
    assert [row["format"] for row in document["validation"]] == [
        "fp32",
        "fp16",
        "bf16",
        "int8-step",
        "damp",
        "damp-random",
    ]
    assert document["objective"]["damp"] < document["objective"]["int8-step"]
    assert document["objective"]["fp32"] == 0
    assert first.to_json()["fingerprint"] == document["fingerprint"]
    assert len(document["prompts"]) == 9


def test_another_seed_draws_other_prompts(tiny_gdn: Path) -> None:
    first, second = (calibrate(tiny_gdn, None, seed=seed).document for seed in (0, 1))
    assert first["prompt_digests"].keys() == second["prompt_digests"].keys()
    assert first["prompt_digests"] != second["prompt_digests"]
    assert first["fingerprint"] != second["fingerprint"]


def test_batches_do_not_change_what_is_recorded(tiny_kda: Path, tmp_path: Path) -> None:
    whole, split = (calibrate(tiny_kda, None, batch=batch) for batch in (36, 4))
    for name in whole.arrays:
        if name.endswith(".risk"):
            np.testing.assert_allclose(whole.arrays[name], split.arrays[name], rtol=1e-2)
    assert whole.document["repeated_32gram_share"] == split.document["repeated_32gram_share"]


def test_a_killed_run_resumes_to_the_same_bytes(
    tiny_gdn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(tiny_gdn, tmp_path / "whole", batch=4)
    calls = 0
    original = recording.record

    def counted(*args: Any, **options: Any) -> recording.Recording:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(stages, "record", counted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny_gdn, tmp_path / "killed", batch=4)
    assert not (tmp_path / "killed").exists()
    assert (tmp_path / ".killed.trajectories").is_dir()
    calibrate(tiny_gdn, tmp_path / "killed", batch=4)
    assert calls == 4  # two batches, the interruption, the third batch
    for file in ("calibration.json", "calibration.safetensors"):
        whole = (tmp_path / "whole" / file).read_bytes()
        assert (tmp_path / "killed" / file).read_bytes() == whole
    assert not (tmp_path / ".killed.trajectories").exists()


def test_another_run_beside_the_output_is_named_and_only_force_discards_it(
    tiny_gdn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "score", interrupted)
    monkeypatch.setattr("hybridstate.quant.calibration.score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(tiny_gdn, tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"temperature: 1.0 there, 0.5 here"):
        calibrate(tiny_gdn, tmp_path / "out", temperature=0.5)
    assert (tmp_path / ".out.trajectories" / "seed-3" / "batch-000.safetensors").exists()
    calibrate(tiny_gdn, tmp_path / "out", temperature=0.5, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_partial_runs_merge_to_the_bytes_of_a_whole_one(
    tiny_kda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed in three batches: the parts record, the merging run scores and validates."""
    calibrate(tiny_kda, tmp_path / "whole", batch=4)
    options = {"k_hi": 2, "temperature": 1.0, "seed": 3, "batch": 4} | SMALL
    for number in (1, 2):
        folder = tmp_path / f"part-{number}"
        api.calibrate_part(tiny_kda, folder, f"{number}/2", **options)
    assert sorted(p.name for p in (tmp_path / "part-1" / "seed-3").glob("batch*")) == [
        "batch-000.safetensors",
        "batch-002.safetensors",
    ]
    monkeypatch.setattr(stages, "record", lambda *_, **__: pytest.fail("nothing is left to record"))
    parts = [tmp_path / "part-1", tmp_path / "part-2"]
    calibrate(tiny_kda, tmp_path / "merged", batch=4, merge=parts)
    for file in ("calibration.json", "calibration.safetensors"):
        assert (tmp_path / "merged" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    with pytest.raises(UsageError, match="another run"):
        calibrate(tiny_kda, None, batch=4, merge=parts, temperature=0.5)
    with pytest.raises(UsageError, match="holds no part of this run"):
        calibrate(tiny_kda, None, batch=4, merge=[tmp_path])


EVERY_KIND = (
    "fp8,int8-step,int8-step+reorder,int8-step-stochastic,int4+reorder,nvfp4,damp,damp+reorder,"
    "damp-per-head,damp-per-head+reorder,damp-int4-error-only,damp-nvfp4,damp-k4,damp-energy,damp-error-only,damp-retention-only,"
    "damp-random+reorder,int8-feedback-int4,int8-every-4,damp-every-4"
)


@pytest.mark.parametrize("name", ["tiny_gdn", "tiny_kda"])
def test_every_kind_of_arm_runs_and_its_numbers_are_written(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(name)
    calibrate(model, tmp_path / "a", formats=EVERY_KIND)
    calibrate(model, tmp_path / "b", formats=EVERY_KIND)
    for file in ("calibration.json", "calibration.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    document = json.loads((tmp_path / "a" / "calibration.json").read_text())
    rows = {row["format"]: row for row in document["validation"]}
    gdn = name == "tiny_gdn"
    bundled = (
        load_model(model).spec.layers[0].key_heads != load_model(model).spec.layers[0].value_heads
    )
    assert ("damp-retention-only" in document["skipped"]) == gdn
    assert ("damp-per-head" in document["skipped"]) != bundled
    assert ("damp-per-head+reorder" in document["skipped"]) != bundled
    assert set(rows) | set(document["skipped"]) == {"fp32", *EVERY_KIND.split(",")}
    objective = document["objective"]
    assert not {"int8-every-4", "int8-feedback-int4", "damp-every-4"} & set(objective)
    assert objective["int8-step+reorder"] <= objective["int8-step"]
    assert objective["damp-energy"] >= 0
    if bundled:
        assert document["key_order_gap"].keys() == {"damp", "damp+reorder"}
        # channels come from the fitting split and J from the tuning split, so either may be lower
        assert all(abs(gap) < 0.5 for gap in document["key_order_gap"].values())
    assert rows["int8-every-4"]["bits_per_value_with_ring"] > rows["int8-every-4"]["bits_per_value"]
    assert rows["damp-k4"]["bits_per_value"] > rows["damp"]["bits_per_value"]
    assert 0 < document["error_concentration"]["plain"]["mean_over_heads"] <= 1
    assert 0 < document["error_concentration"]["reordered"]["pooled"] <= 1
    assert -1 <= document["risk_prediction"]["damp"]["spearman"] <= 1
    heads = sum(layer.value_heads for layer in load_model(model).spec.layers)
    assert sum(c["heads"] for c in document["value_maps"]["damp+reorder"]) == heads
    assert set(document["selector_agreement"]) == {"damp", "error-only", "energy"} | (
        set() if gdn else {"retention-only"}
    )
    arrays = load_file(tmp_path / "a" / "calibration.safetensors")
    layer = load_model(model).spec.layers[0]
    start = f"layers.{layer.index}."
    assert arrays[start + "value_scale"].shape == (layer.value_heads, layer.value_dim)
    assert arrays[start + "value_order"].dtype == np.int16
    assert arrays[start + "protected_reorder"].shape == (layer.value_heads, 2)
    assert read_calibration(tmp_path / "a").k_hi == 2  # a plan reads it and leaves the maps alone


def test_an_early_failure_leaves_nothing(
    tiny_gdn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> recording.Recording:
        raise NumericError("recurrent state is nan")

    monkeypatch.setattr(stages, "record", broken)
    with pytest.raises(NumericError):
        calibrate(tiny_gdn, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_bad_options_are_refused_before_the_model_runs(tiny_gdn: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        calibrate(tiny_gdn, tmp_path / "full")
    with pytest.raises(UsageError, match="k_hi is 9"):
        calibrate(tiny_gdn, None, k_hi=9)
    with pytest.raises(UsageError, match="the last anchor needs"):
        calibrate(tiny_gdn, None, horizon=100)
    with pytest.raises(UsageError, match="no calibration profile"):
        calibrate(tiny_gdn, None, profile="slow")


def test_no_protected_channels_is_plain_int8(tiny_kda: Path) -> None:
    found = calibrate(tiny_kda, None, k_hi=0)
    rows = {row.format: row for row in found.divergences}
    assert rows["damp"].bits_per_value == rows["int8-step"].bits_per_value
    assert rows["damp"].kl == pytest.approx(rows["int8-step"].kl, rel=1e-3)
    assert found.arrays["layers.0.protected"].shape == (4, 0)


def test_loops_and_saturation_are_reported(tiny_gdn: Path, tmp_path: Path) -> None:
    loaded = load_model(tiny_gdn)
    settings = protocol("quick", **SMALL)
    prompts = make_prompts(loaded.encode, shipped_texts(), settings, seed=0)
    store = TrajectoryStore.open(tmp_path, {"run": 1}, len(loaded.spec.layers))
    generated = stages.record_batches(loaded, prompts, settings, store, seed=0)
    scores = stages.score(loaded, prompts, settings, store, k_hi=8, seed=0)
    store.close()
    found = simulate(loaded, prompts[:1], generated[:1], scores.arms, chunk=64, batch=6)
    looping = torch.zeros(9, 80, dtype=torch.int32)
    made = assemble(
        loaded, prompts, settings, scores, looping, found, k_hi=8, seed=0, source="shipped"
    )
    assert made.document["repeated_32gram_share"] > 0.9
    assert any("the model loops" in warning for warning in made.warnings)
    assert any("all 8 key channels" in warning for warning in made.warnings)
    assert divergences(made.measured)[1].kl_error is None


def test_static_horizons_are_compared_with_what_the_gates_did(
    tiny_gdn: Path, tiny_kda: Path
) -> None:
    for model in (tiny_gdn, tiny_kda):
        found = api.validate_horizons(model, tiers=(64,), per_tier=3).whole
        assert found.horizons.pairs == 9
        assert found.horizons.median is not None
        assert found.horizons.median > 0.5  # random projections hardly move a spread of A_log
        assert [cutoff.w_max for cutoff in found.cutoffs] == [16, 64, 128, 512]
        assert all(0 <= cutoff.same_side <= 1 for cutoff in found.cutoffs)
        json.dumps(found.to_json(), allow_nan=False)
