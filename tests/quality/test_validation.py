"""What a validation observes, against gates computed by hand from the projections and states decoded token by token."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hybridstate import api
from hybridstate.errors import NumericError, UsageError
from hybridstate.quality.observation import _groups, decay_structure, observe
from hybridstate.quality.validation import ValidationOptions, validate
from hybridstate.trajectories.documents import plain_text
from hybridstate.trajectories.model import (
    LoadedModel,
    decode,
    load_model,
    new_cache,
    recurrent_states,
    reference_prefill,
)
from hybridstate.trajectories.prefixes import Prefixes
from hybridstate.trajectories.prompts import heldout_text
from tests.families.saved import available, save
from tests.tolerances import assert_within

SEQUENCES = [np.random.default_rng(row).integers(3, 97, n) for row, n in enumerate((40, 23, 40, 1))]
F64 = NDArray[np.float64]


@pytest.fixture(scope="module", params=[2, 4, 6, "kda"])
def loaded(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    """GDN with 1, 2 and 3 value heads a key head and dims 8 x 12; KDA."""
    if request.param == "kda":
        return load_model(tiny_checkpoint("kimi_linear", tokenizer=True))
    return load_model(tiny_checkpoint("qwen3_5", value_heads=request.param, tokenizer=True))


@contextmanager
def gate_inputs(loaded: LoadedModel) -> Iterator[dict[int, F64]]:
    """What each layer's gate projection gave for the last call, `[B, T, units]` float64."""
    leaf = "in_proj_a" if loaded.spec.unit == "head" else "f_b_proj"
    found: dict[int, F64] = {}
    handles = []
    for name, module in loaded.model.named_modules():
        if name.endswith(leaf):
            layer = int(name.split("layers.")[1].split(".")[0])

            def keep(_m: Any, _i: Any, output: torch.Tensor, layer: int = layer) -> None:
                found[layer] = output.double().numpy()

            handles.append(module.register_forward_hook(keep))
    yield found
    for handle in handles:
        handle.remove()


def mean_log_decay(loaded: LoadedModel, tokens: NDArray[np.int64]) -> list[F64]:
    """By the gate's formula (DASC Eq. 2) on the projections of a plain forward pass, in float64."""
    with gate_inputs(loaded) as inputs, torch.no_grad():
        loaded.model(input_ids=torch.from_numpy(tokens)[None])
    found = []
    for layer in loaded.spec.layers:
        decay = loaded.checkpoint.decay(layer)
        a = inputs[layer.index][0].reshape(len(tokens), *decay.dt_bias.shape)
        rate = np.exp(decay.a_log if decay.dt_bias.ndim == 1 else decay.a_log[:, None])
        if loaded.spec.gate == "softplus":
            g = -rate * np.log1p(np.exp(a + decay.dt_bias))
        else:
            assert loaded.spec.lower_bound is not None
            g = loaded.spec.lower_bound / (1 + np.exp(-rate * (a + decay.dt_bias)))
        found.append(g.mean(axis=0))
    return found


def test_mean_log_decays_follow_the_gate_without_padding(loaded: LoadedModel) -> None:
    seen = observe(loaded, SEQUENCES)
    for row, tokens in enumerate(SEQUENCES):
        for expected, layer in zip(
            mean_log_decay(loaded, tokens), seen.mean_log_decay, strict=True
        ):
            assert layer[row] == pytest.approx(expected, rel=2e-5)


@pytest.mark.skipif(not available("glm5_next"), reason="this transformers has no glm5_next")
def test_the_safe_gate_is_observed_too(tmp_path: Path) -> None:
    """The stand-in for Kimi-K3."""
    loaded = load_model(save("glm5_next", tmp_path / "glm5_next"))
    assert loaded.spec.gate == "safe"
    seen = observe(loaded, SEQUENCES)
    for expected, layer in zip(
        mean_log_decay(loaded, SEQUENCES[1]), seen.mean_log_decay, strict=True
    ):
        assert layer[1] == pytest.approx(expected, rel=2e-5)


def test_magnitudes_are_those_of_states_decoded_token_by_token(loaded: LoadedModel) -> None:
    seen = observe(loaded, SEQUENCES)
    for row in (0, 1):
        cache = new_cache(loaded)
        for token in SEQUENCES[row]:
            decode(loaded, torch.tensor([token]), cache)
        for state, layer in zip(recurrent_states(cache), seen.magnitudes, strict=True):
            axes = (1, 2) if loaded.spec.unit == "head" else 2
            expected = np.sqrt((state[0].double().numpy() ** 2).sum(axis=axes))
            assert_within(
                torch.from_numpy(layer[row]), torch.from_numpy(expected), "replay-logits-f32"
            )


def test_chunks_give_the_same_observation_and_followed_units(loaded: LoadedModel) -> None:
    last = loaded.spec.layers[-1]
    follow = [(0, 1), (last.ordinal, loaded.spec.units(last) - 1)]
    whole = observe(loaded, SEQUENCES[:2], follow=follow)
    pieces = observe(loaded, SEQUENCES[:2], follow=follow, chunk=13)  # 40 = 13 * 3 + 1: one alone
    for a, b in zip(whole.mean_log_decay, pieces.mean_log_decay, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert whole.traces.shape == (2, 40)
    assert whole.traces == pytest.approx(pieces.traces, rel=1e-4)
    for trace, (ordinal, place) in zip(whole.traces, follow, strict=True):
        assert trace.mean() == pytest.approx(whole.mean_log_decay[ordinal][0].ravel()[place])


def test_equal_lengths_run_together() -> None:
    assert _groups(SEQUENCES, 80) == [[0, 2], [1], [3]]
    assert _groups(SEQUENCES, 60) == [[0], [2], [1], [3]]


def test_a_state_that_is_not_finite_is_named(loaded: LoadedModel) -> None:
    def broken(ordinal: int, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, state = reference_prefill(ordinal, *args)
        if ordinal == 1:
            state[0, 1, 2, 3] = math.nan
        return out, state

    import hybridstate.quality.observation as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "reference_prefill", broken)
        with pytest.raises(NumericError, match=r"prefix 0, layer 1, unit \[1.*after 40 tokens"):
            observe(loaded, SEQUENCES[:1])


def test_decay_of_domains_is_that_of_their_texts(loaded: LoadedModel) -> None:
    found = decay_structure(loaded, sequences=2, tokens=48)
    assert [domain.domain for domain in found.domains] == ["math", "code", "prose"]
    assert all(domain.tokens == 96 for domain in found.domains)
    units = sum(loaded.spec.units(layer) for layer in loaded.spec.layers)
    assert found.low.shape == found.high.shape == (units,)
    assert (found.low <= found.high).all()
    assert found.traces.shape == (3, 48)
    assert ((found.traces >= 0) & (found.traces <= 1)).all()
    middle = np.exp(np.log(np.stack(list(found.factors.values()))).mean(axis=0))
    at = middle[list(found.followed)]
    assert at.tolist() == sorted(at)
    p10, p50, p90 = (np.percentile(middle, p) for p in (10, 50, 90))
    assert at[0] <= p50 <= at[2]
    assert abs(at[1] - p50) <= p90 - p10


def test_a_validation_reports_on_prefixes_that_chose_nothing(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hybridstate.quality.validation as module

    chosen_on: list[F64] = []
    original = module.choose_gate_input

    def watched(static: Any, observed: Any, objective: Any) -> Any:
        chosen_on.append(observed[0])
        return original(static, observed, objective)

    monkeypatch.setattr(module, "choose_gate_input", watched)
    options = ValidationOptions(
        Prefixes((32, 16), 3, chars_per_token=1.0), domain_sequences=2, domain_tokens=32
    )
    found = validate(
        loaded,
        plain_text("a book", heldout_text()[:4000]),
        options,
        w_max=(16, 64),
        gate_input=-0.3,
        gate_input_source="default",
        epsilon=1e-3,
    )
    assert found.whole.prefixes == 6
    assert all(np.array_equal(rows, found.observed[0][[0, 2, 4]]) for rows in chosen_on)
    assert {agreed.prefixes for agreed in found.held_out} == {3}
    assert found.held_out[0].gate_input_source == "default"
    record = found.to_json()
    json.dumps(record, allow_nan=False)
    assert record["model_digests"] == loaded.checkpoint.digests()
    assert set(record["gate_input_choices"]) == {"rank", "median"}
    assert record["tokens"] == 3 * 48
    units = record["units"]
    count = sum(int(np.prod(layer["shape"])) for layer in units["layers"])
    assert len(units["static_horizon"]) == len(units["effective_decay"]["math"]) == count
    assert record["intervention"] is None
    assert found.with_intervention({"arms": []}).to_json()["intervention"] == {"arms": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "UNITS_IN_JSON", 1)
        assert found.to_json()["units"] is None
        assert found.to_json(all_units=True)["units"] == units


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(UsageError, match="rank or median"):
        ValidationOptions(Prefixes((8,)), "mean").check()  # type: ignore[arg-type]


def test_a_measured_gate_input_reaches_analysis_and_plan(tiny_kda: Path, tmp_path: Path) -> None:
    """The whole way: validate, record, and a plan whose a_s is called measured."""
    found = api.validate_horizons(
        tiny_kda, tiers=(48, 24), per_tier=2, objective="median", intervention=1
    )
    assert [arm["arm"] for arm in found.to_json()["intervention"]["arms"]][:2] == [
        "nothing",
        "zero-kv",
    ]
    file = tmp_path / "validate.json"
    file.write_text(json.dumps({"result": {"validation": found.to_json()}}))
    expected = next(c.gate_input for c in found.choices if c.objective == "median")
    analysis = api.analyze(tiny_kda, gate_input_from=file)
    assert (analysis.gate_input, analysis.gate_input_source) == (expected, "measured")
    exported = api.export_plan(
        tiny_kda, out=tmp_path / "plan", w_max=16, gate_input_from=file, dry_run=True
    )
    horizons = exported.plan.document.horizons
    assert horizons is not None
    assert (horizons.gate_input, horizons.chosen_by) == (expected, "measured")
