"""`bench restore`: the gate, the report's numbers, its refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hybridstate.bench.restore as module
from hybridstate.bench.cases import PROSE_TARGET_TOKENS, Options, make_cases, prose_texts
from hybridstate.bench.cutoffs import make_arms, selections_at
from hybridstate.bench.restore import recompute_agrees, run_restore
from hybridstate.errors import NumericError, UsageError
from hybridstate.plan.accounting import account
from hybridstate.plan.select import random_selection
from hybridstate.quality.arms import Outcomes
from hybridstate.runtime.restore import load
from hybridstate.trajectories.model import LoadedModel, load_model
from hybridstate.trajectories.prompts import heldout_text

OPTIONS = Options(("recall", "counts"), questions=3, tokens=256, seeds=2, repeats=2, rows=16)


@pytest.fixture(scope="module", params=["tiny_gdn", "tiny_kda"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    folder: Path = request.getfixturevalue(request.param)
    return load_model(str(folder))


@pytest.fixture(scope="module")
def result(loaded: LoadedModel) -> dict[str, Any]:
    options = Options(**{name: getattr(OPTIONS, name) for name in OPTIONS.__slots__})
    selections = selections_at(loaded, (16, 64))
    found = run_restore(loaded, selections, options, heldout_text()).to_json()
    found["selections"] = selections
    return found


def test_report_is_json_with_every_arm(loaded: LoadedModel, result: dict[str, Any]) -> None:
    assert json.loads(json.dumps({**result, "selections": None}, allow_nan=False))
    names = [arm["arm"] for arm in result["arms"]]
    assert names[:2] == ["dense", "recompute"]
    assert names[2:6] == ["nr-16", "wr-16", "random-16-1234", "random-16-2027"]
    assert all(len(arm["tasks"]["recall"]["exact_samples"]) == 3 for arm in result["arms"])


def test_bytes_and_ratios_are_those_of_the_accounting(
    loaded: LoadedModel, result: dict[str, Any]
) -> None:
    arms = {arm["arm"]: arm for arm in result["arms"]}
    for selection in result["selections"]:
        accounting = account(loaded.spec, selection)
        for policy in ("nr", "wr"):
            arm = arms[f"{policy}-{selection.w_max}"]
            assert arm["checkpoint_bytes"] == accounting.ragged_bytes
            assert arm["ratio_full"] == accounting.ratio_full_ragged
            assert arm["ratio_temporal"] == accounting.ratio_temporal_ragged
            assert arm["retained_units"] == sum(selection.counts)


@pytest.mark.parametrize("w_max", [16, 64])
def test_replayed_tokens_are_those_of_the_timed_request(result: dict[str, Any], w_max: int) -> None:
    arms = {arm["arm"]: arm for arm in result["arms"]}
    selection = next(s for s in result["selections"] if s.w_max == w_max)
    protocol, wr = result["protocol"], arms[f"wr-{w_max}"]
    assert wr["replayed_tokens"] == min(selection.w_replay, protocol["ttft_tokens"]["prefix"])
    assert wr["replayed_tokens_by_kind"] == {
        kind: min(selection.w_replay, max(lengths["prefix"]))
        for kind, lengths in protocol["lengths_tokens"].items()
    }
    assert arms[f"nr-{w_max}"]["replayed_tokens"] == 0
    assert set(arms["dense"]["replayed_tokens_by_kind"].values()) == {0}


def test_window_longer_than_a_prefix_is_capped_per_kind(loaded: LoadedModel) -> None:
    """A question's prefix is shorter than a prose prefix: time and replay must mean the same one."""
    arms, cutoffs = make_arms(loaded, selections_at(loaded, (16,)), 0)
    groups = make_cases(loaded, OPTIONS, heldout_text())
    long = replace(arms[3], w_replay=10_000)
    outcomes, ones = Outcomes(), np.ones(3)
    for group in groups:
        outcomes.add(long.name, group, ones, ones, ones, ones)
    found = module._arm_json(long, 1, outcomes, {}, groups, cutoffs)
    lengths = {group.kind: int(group.context.shape[1]) for group in groups}
    assert lengths["recall"] < lengths["prose"]
    assert found["replayed_tokens"] == lengths["recall"]
    assert found["replayed_tokens_by_kind"] == lengths


def test_heads_that_keep_nothing_are_counted_per_arm(
    loaded: LoadedModel, result: dict[str, Any]
) -> None:
    arms = {arm["arm"]: arm for arm in result["arms"]}
    heads = sum(layer.value_heads for layer in loaded.spec.layers)
    assert {a["heads"] for a in result["arms"] if a["policy"] != "recompute"} == {heads}
    assert arms["dense"]["heads_without_retained_units"] == 0
    for selection in result["selections"]:
        empty = sum(int((~m.reshape(len(m), -1).any(1)).sum()) for m in selection.retained)
        assert arms[f"nr-{selection.w_max}"]["heads_without_retained_units"] == empty
        if loaded.spec.unit == "head":  # a head is a unit: NR silences each omitted one
            assert empty == heads - sum(selection.counts)


def test_every_mask_is_identified(result: dict[str, Any]) -> None:
    arms = {arm["arm"]: arm for arm in result["arms"]}
    assert arms["recompute"]["mask_digest"] is None
    for selection in result["selections"]:
        w_max = selection.w_max
        for policy in ("nr", "wr"):
            assert arms[f"{policy}-{w_max}"]["mask_digest"] == selection.mask_digest
        for seed in (1234, 2027):
            drawn = random_selection(selection, seed)
            assert arms[f"random-{w_max}-{seed}"]["mask_digest"] == drawn.mask_digest


def test_recompute_agrees_with_dense_and_times_are_kept(result: dict[str, Any]) -> None:
    check = result["check"]
    assert check["dense_restore_bit_equal"] == {"states": True, "conv": True, "logits": True}
    assert 0 <= check["recompute_kl"] < 1e-4
    for arm in result["arms"]:
        timed = arm["ttft_s"]
        assert (timed is None) == (arm["seed"] is not None)
        assert timed is None or len(timed["samples"]) == 2


def test_timed_arms_take_turns(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One arm after the other, a machine that slows down would make the last arm the slowest."""
    order: list[str] = []
    monkeypatch.setattr(module, "_request", lambda _loaded, arm, *_rest: order.append(arm.name))
    arms, _ = make_arms(loaded, selections_at(loaded, (16, 64)), 1)
    case = make_cases(loaded, OPTIONS, heldout_text())[0]
    found = module.first_token_samples(loaded, arms, case, OPTIONS, lambda *_step: None)
    names = ["dense", "recompute", "nr-16", "wr-16", "nr-64", "wr-64"]
    assert order == names * (OPTIONS.warmup + OPTIONS.repeats)
    assert {name: len(samples.seconds) for name, samples in found.items()} == dict.fromkeys(
        names, 2
    )


def test_comparison_is_the_paired_mean_over_the_same_questions(result: dict[str, Any]) -> None:
    arms = {arm["arm"]: arm for arm in result["arms"]}
    entry = next(c for c in result["comparisons"] if (c["w_max"], c["metric"]) == (64, "kl"))
    random = [arms[f"random-64-{seed}"]["prose"]["kl_samples"] for seed in (1234, 2027)]
    ours = np.array(arms["nr-64"]["prose"]["kl_samples"])
    means = np.mean(random, axis=1)
    assert entry["random_mean"] == pytest.approx(means.mean())
    assert entry["random_sd"] == pytest.approx(means.std(ddof=1))
    assert entry["difference"] == pytest.approx((ours - np.mean(random, axis=0)).mean())
    assert entry["interval_95"][0] <= entry["difference"] <= entry["interval_95"][1]
    assert len(entry["overlap"]) == 2


def test_prompts_have_equal_lengths_and_are_labelled_synthetic(
    loaded: LoadedModel, result: dict[str, Any]
) -> None:
    protocol = result["protocol"]
    assert protocol["task_data"] == "synthetic"
    for kind, lengths in protocol["lengths_tokens"].items():
        assert all(len(found) == 1 for found in lengths.values()), kind
    total = {
        k: sum(v[p][0] for p in ("prefix", "suffix")) for k, v in protocol["lengths_tokens"].items()
    }
    assert total == {"recall": 256, "counts": 256, "prose": 256 + 64}
    timed = protocol["lengths_tokens"]["recall"]
    assert protocol["ttft_tokens"] == {k: timed[k][0] for k in ("prefix", "suffix")}


def test_same_options_give_the_same_cases(loaded: LoadedModel) -> None:
    first, second = (make_cases(loaded, OPTIONS, heldout_text()) for _ in range(2))
    assert all(
        torch.equal(a.context, b.context) and torch.equal(a.target, b.target)
        for a, b in zip(first, second, strict=True)
    )


def test_broken_unpack_refuses_to_report(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(buffer: torch.Tensor, *rest: Any) -> None:
        changed = buffer.clone()
        changed[5] ^= 1
        load(changed, *rest)

    monkeypatch.setattr(module, "load", damaged)
    with pytest.raises(NumericError, match="does not come back bit for bit"):
        run_restore(loaded, selections_at(loaded, (16,)), OPTIONS, heldout_text())


def test_dense_far_from_recompute_refuses_to_report(loaded: LoadedModel) -> None:
    outcomes, zero, far = Outcomes(), np.zeros(3), np.full(3, 0.1)
    case = make_cases(loaded, OPTIONS, heldout_text())[0]
    outcomes.add("dense", case, zero, zero, zero, zero + 1)
    outcomes.add("recompute", case, zero, zero, far, zero + 1)
    with pytest.raises(NumericError, match="nothing is reported"):
        recompute_agrees(outcomes, torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("recal",)}, "unknown task 'recal'"),
        ({"tasks": ()}, "no task given"),
        ({"seeds": 6}, "--seeds takes 0 to 5"),
        ({"questions": 0}, "--questions must be at least 1"),
        ({"tokens": 100}, "--tokens must be at least 256"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Options(**options).check()


def test_prose_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match="320 are needed"):
        list(prose_texts("short", OPTIONS))


def test_prose_windows_never_overlap() -> None:
    """Standard errors and intervals take cases as independent."""
    text = "".join(f"{number:05d}" for number in range(400))  # no stretch occurs twice
    span = 256 + PROSE_TARGET_TOKENS
    for asked, expected in ((2, 2), (50, len(text) // span)):
        windows = list(prose_texts(text, Options(questions=asked, tokens=256)))
        starts = [text.index(window.context) for window in windows]
        assert len(windows) == expected
        assert (np.diff(starts) >= span).all()
