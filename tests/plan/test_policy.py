"""Model-Optimizer's DASC policy: round trip, what it refuses, and measurements from our bench."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridstate import api
from hybridstate.checkpoint import Checkpoint, open_checkpoint
from hybridstate.errors import (
    NumericError,
    PlanMismatch,
    SourceError,
    UnsupportedModel,
    UsageError,
)
from hybridstate.plan.policy import GATES, Measurement, Policy, policy_bytes, read_policy
from hybridstate.plan.policy_model import build_policy, measurements_of, policy_selection


@pytest.fixture
def gdn(tiny_gdn: Path) -> Checkpoint:
    return open_checkpoint(tiny_gdn)


def quality(**changed: Any) -> dict[str, Any]:
    return {
        "slice_id": "validation-0",
        "perplexity_retention": 0.999,
        "top1_agreement": 0.99,
        "finite_continuation_logits": True,
        "retained_state_exact": True,
        "omitted_state_matches_recovery": True,
        "convolution_state_exact": True,
    } | changed


def measured(model: Path, w_max: int, savings: float = 0.3, **changed: Any) -> Measurement:
    selection = api.analyze(model, w_max=(w_max,)).cutoffs[0].selection
    return Measurement.model_validate(
        {
            "variant": "dasc_wr",
            "wmax": w_max,
            "retained_heads": sum(selection.counts),
            "total_heads": sum(selection.units),
            "checkpoint_savings": savings,
            "quality": [quality(**changed)],
        }
    )


def policy(model: Path, **options: Any) -> Policy:
    rows = [measured(model, 16), measured(model, 64), measured(model, 512, top1_agreement=0.9)]
    settings: dict[str, Any] = {"epsilon": 1e-3, "gate_input": -0.3, "revision": "abc"}
    return build_policy(open_checkpoint(model), rows, data_id="sha256:0", **(settings | options))


def test_largest_cutoff_that_passes_every_gate_is_selected(tiny_gdn: Path) -> None:
    found = policy(tiny_gdn)
    assert (found.selected_wmax, found.wmax_candidates) == (64, (16, 64, 512))
    assert (found.variant, found.recovery) == ("dasc_wr", "suffix_replay")
    expected = api.analyze(tiny_gdn, w_max=(64,))
    for layer, horizon, mask in zip(
        expected.spec.layers, expected.horizons, expected.cutoffs[0].selection.retained, strict=True
    ):
        stored = found.layers[layer.prefix.removesuffix(".")]
        assert list(stored.static_horizons) == horizon.tolist()
        assert list(stored.retained_heads) == np.flatnonzero(mask).tolist()
    assert policy(tiny_gdn, w_max=512).selected_wmax == 512


def test_file_round_trips_and_keeps_what_it_does_not_know(tmp_path: Path, tiny_gdn: Path) -> None:
    content = json.loads(policy_bytes(policy(tiny_gdn)))
    content["written_by"] = {"tool": "another"}
    content["measurements"][0]["quality"][0]["note"] = "kept"
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(content))
    again = read_policy(file)
    assert json.loads(policy_bytes(again)) == content
    del content["decay_parameter_storage_dtype"]  # earlier drafts of version 1 lack it
    file.write_text(json.dumps(content))
    assert read_policy(file).decay_parameter_storage_dtype == "float32"


def test_document_has_the_fields_of_format_version_1(tiny_gdn: Path) -> None:
    content = json.loads(policy_bytes(policy(tiny_gdn)))
    assert set(content) == {
        "format_version", "variant", "recovery", "epsilon", "static_gate_input",
        "decay_parameter_storage_dtype", "selected_wmax", "wmax_candidates", "quality_gates",
        "model_id", "model_revision", "model_config_id", "calibration_data_id", "granularity",
        "preserve_convolution_state", "active_runtime_state", "model_structure_sha256",
        "decay_parameters_sha256", "layers", "measurements",
    }  # fmt: skip
    assert content["format_version"] == 1
    assert content["granularity"] == "gdn_head"
    assert content["quality_gates"] == GATES
    layer = next(iter(content["layers"].values()))
    assert set(layer) == {"num_heads", "static_horizons", "retained_heads", "omitted_heads"}


def test_digests_are_those_of_canonical_json(tiny_gdn: Path) -> None:
    """Written out: sorted layer names, no spaces, float32 values as doubles."""
    import hashlib

    checkpoint, found = open_checkpoint(tiny_gdn), policy(tiny_gdn)
    structure, decay = [], []
    for name in sorted(found.layers):
        structure.append({"name": name, "num_heads": found.layers[name].num_heads})
        a_log, dt_bias = (checkpoint.read(f"{name}.{t}").reshape(-1) for t in ("A_log", "dt_bias"))
        decay.append({"A_log": a_log.tolist(), "dt_bias": dt_bias.tolist(), "name": name})
    for value, digest in (
        (structure, found.model_structure_sha256),
        (decay, found.decay_parameters_sha256),
    ):
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_policy_applies_to_its_model_under_any_prefix(tiny_gdn: Path, gdn: Checkpoint) -> None:
    found = policy(tiny_gdn)
    expected = api.analyze(tiny_gdn, w_max=(64,)).cutoffs[0].selection
    assert policy_selection(found, gdn).mask_digest == expected.mask_digest
    renamed = {f"module.{name}": layer for name, layer in found.layers.items()}
    other = found.model_copy(update={"layers": renamed})
    assert policy_selection(other, gdn).mask_digest == expected.mask_digest


def test_horizons_rounded_to_the_storage_dtype_are_accepted(
    tiny_gdn: Path, gdn: Checkpoint
) -> None:
    """A policy of BF16 parameters differs by up to a percent; of other weights, by more."""
    content = json.loads(policy_bytes(policy(tiny_gdn)))
    content["decay_parameter_storage_dtype"] = "bfloat16"
    for layer in content["layers"].values():
        layer["static_horizons"] = [t * 1.002 for t in layer["static_horizons"]]
        kept = [h for h, t in enumerate(layer["static_horizons"]) if t > 64]
        layer["retained_heads"] = kept
        layer["omitted_heads"] = [h for h in range(layer["num_heads"]) if h not in kept]
    rounded = Policy.model_validate(content)
    policy_selection(rounded, gdn)
    exact = rounded.model_copy(update={"decay_parameter_storage_dtype": "float32"})
    with pytest.raises(PlanMismatch, match=r"gives head 0 of .* a horizon"):
        policy_selection(exact, gdn)


def test_policy_of_other_weights_or_another_model_is_refused(
    tmp_path: Path, tiny_gdn: Path, tiny_kda: Path
) -> None:
    found = policy(tiny_gdn)
    folder = tmp_path / "other"
    shutil.copytree(tiny_gdn, folder)
    checkpoint = open_checkpoint(folder)
    entry = checkpoint.entries[checkpoint.decay_tensors(checkpoint.spec.layers[0])[0]]
    with Path(entry.file).open("r+b") as stream:
        stream.seek(entry.start)
        stream.write(np.full(entry.shape, 0.5, "<f4").tobytes())
    with pytest.raises(PlanMismatch, match=r"gives head 0 of .* a horizon") as caught:
        policy_selection(found, open_checkpoint(folder))
    assert caught.value.exit_code == 6
    assert "other weights" in str(caught.value.hint)
    with pytest.raises(UnsupportedModel, match="GDN layers only"):
        policy_selection(found, open_checkpoint(tiny_kda))
    names = dict(found.layers)
    first = next(iter(names))
    fewer = found.model_copy(update={"layers": {k: v for k, v in names.items() if k != first}})
    with pytest.raises(PlanMismatch, match="differ in the heads of block 0"):
        policy_selection(fewer, open_checkpoint(tiny_gdn))
    nameless = found.model_copy(update={"layers": {"linear_attn": names[first]}})
    with pytest.raises(PlanMismatch, match="says no block"):
        policy_selection(nameless, open_checkpoint(tiny_gdn))


def _change(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def damage(content: dict[str, Any]) -> None:
        place: Any = content
        for key in path[:-1]:
            place = (
                list(place.values())[key]
                if isinstance(key, int) and isinstance(place, dict)
                else place[key]
            )
        place[path[-1]] = to

    return damage


@pytest.mark.parametrize(
    ("damage", "mentions"),
    [
        (_change("format_version", to=2), "format_version"),
        (_change("recovery", to="zero"), "dasc_wr recovers by suffix_replay"),
        (_change("selected_wmax", to=128), "not a candidate"),
        (_change("selected_wmax", to=512), "retained heads are not those"),
        (_change("selected_wmax", to=True), "selected_wmax"),
        (_change("wmax_candidates", to=[]), "wmax_candidates"),
        (_change("wmax_candidates", to=[16, 64]), "one measurement is needed"),
        (_change("epsilon", to=1.0), "epsilon"),
        (_change("epsilon", to="0.001"), "epsilon"),
        (_change("static_gate_input", to=True), "static_gate_input"),
        (_change("layers", 0, "static_horizons", 0, to="9"), "static_horizons"),
        (_change("model_revision", to=""), "model_revision"),
        (_change("granularity", to="kda_channel"), "granularity"),
        (_change("decay_parameter_storage_dtype", to="float8"), "decay_parameter_storage_dtype"),
        (_change("model_structure_sha256", to="short"), "model_structure_sha256"),
        (_change("layers", 0, "omitted_heads", to=[0, 0]), "every head once"),
        (_change("layers", 0, "static_horizons", to=[1.0]), "1 horizons for"),
        (_change("layers", 0, "num_heads", to=0), "num_heads"),
        (_change("measurements", 0, "variant", to="dasc_nr"), "other variant"),
        (_change("measurements", 0, "quality", to=[]), "quality"),
        (_change("measurements", 0, "quality", 0, "top1_agreement", to=1.5), "top1_agreement"),
        (_change("measurements", 0, "quality", 0, "retained_state_exact", to=1), "retained_state"),
        (_change("measurements", 0, "quality", to=[quality(), quality()]), "must be unique"),
    ],
)
def test_policy_that_contradicts_itself_is_refused_by_name(
    tmp_path: Path, tiny_gdn: Path, damage: Callable[[dict[str, Any]], None], mentions: str
) -> None:
    content = json.loads(policy_bytes(policy(tiny_gdn)))
    damage(content)
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(content))
    with pytest.raises(SourceError, match=mentions) as caught:
        read_policy(file)
    assert "\n" not in caught.value.message


def test_key_that_appears_twice_is_refused(tmp_path: Path, tiny_gdn: Path) -> None:
    file = tmp_path / "policy.json"
    text = policy_bytes(policy(tiny_gdn)).decode()
    file.write_text(text.replace('"epsilon"', '"epsilon": 0.5, "epsilon"', 1))
    with pytest.raises(SourceError, match="epsilon appears twice"):
        read_policy(file)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"epsilon": NaN}', "[" * 5000])
def test_text_that_is_no_policy_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "policy.json"
    file.write_text(text)
    with pytest.raises(SourceError):
        read_policy(file)
    with pytest.raises(SourceError):
        read_policy(tmp_path / "absent.json")


def test_impossible_policies_are_not_written(tiny_gdn: Path, tiny_kda: Path) -> None:
    rows = [measured(tiny_gdn, 64, savings=0.1)]
    options: dict[str, Any] = {
        "epsilon": 1e-3, "gate_input": -0.3, "revision": "r", "data_id": "d"
    }  # fmt: skip
    with pytest.raises(NumericError, match="no cutoff of 64 passes"):
        build_policy(open_checkpoint(tiny_gdn), rows, **options)
    with pytest.raises(UsageError, match="no measurement at W_max 32"):
        build_policy(open_checkpoint(tiny_gdn), rows, w_max=32, **options)
    with pytest.raises(UsageError, match="at least one"):
        build_policy(open_checkpoint(tiny_gdn), [], **options)
    with pytest.raises(UnsupportedModel, match="GDN layers only"):
        build_policy(open_checkpoint(tiny_kda), rows, **options)


def bench_result(model: Path) -> dict[str, Any]:
    """A result of `bench restore` with the fields that count here."""
    arms: list[dict[str, Any]] = [
        {"arm": "dense", "policy": "dense", "w_max": None,
         "prose": {"bits_per_byte": 2.0, "kl": 0.0, "top1_agreement": 1.0}}
    ]  # fmt: skip
    for cutoff in api.analyze(model, w_max=(16, 64)).cutoffs:
        w_max = cutoff.selection.w_max
        for name, worse in (("nr", 0.02), ("wr", 0.005)):
            prose = {"bits_per_byte": 2.0 + worse, "kl": worse, "top1_agreement": 0.99}
            arms.append(
                {"arm": f"{name}-{w_max}", "policy": name, "w_max": w_max, "seed": None,
                 "mask_digest": cutoff.selection.mask_digest, "prose": prose}
            )  # fmt: skip
        random = {"arm": f"random-{w_max}-1", "policy": "nr", "seed": 1, "mask_digest": "another"}
        arms.append({**arms[-1], **random})
    return {"arms": arms, "check": {"dense_restore_bit_equal": {"states": True, "conv": True}}}


def test_measurements_come_from_bench_restore(tiny_gdn: Path, gdn: Checkpoint) -> None:
    horizons = api.analyze(tiny_gdn).horizons
    result = bench_result(tiny_gdn)
    rows = measurements_of(result, gdn, horizons, "dasc_nr")
    assert [row.wmax for row in rows] == [16, 64]
    accounting = api.analyze(tiny_gdn, w_max=(64,)).cutoffs[0].accounting
    assert rows[1].checkpoint_savings == 1 - accounting.ragged_bytes / accounting.dense_bytes
    assert rows[1].quality[0].perplexity_retention == pytest.approx(2**-0.02)
    assert rows[1].quality[0].top1_agreement == 0.99
    assert rows[1].quality[0].convolution_state_exact


def test_results_that_do_not_fit_are_refused(tiny_gdn: Path, gdn: Checkpoint) -> None:
    horizons, result = api.analyze(tiny_gdn).horizons, bench_result(tiny_gdn)
    changed = copy.deepcopy(result)
    changed["arms"][1]["mask_digest"] = "0"
    with pytest.raises(PlanMismatch, match="arm nr-16 of the result retained other heads"):
        measurements_of(changed, gdn, horizons, "dasc_nr")
    only = {**result, "arms": result["arms"][:2]}
    with pytest.raises(UsageError, match="no WR arm"):
        measurements_of(only, gdn, horizons, "dasc_wr")
    older = copy.deepcopy(result)
    del older["arms"][1]["prose"]["top1_agreement"]
    for broken in (older, {}, {"arms": 3}, {**result, "check": {}}):
        with pytest.raises(SourceError, match="not a result of `bench restore`"):
            measurements_of(broken, gdn, horizons, "dasc_nr")
