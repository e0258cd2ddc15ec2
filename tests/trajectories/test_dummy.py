"""Synthetic models: geometry from the config alone, published decays, and a label on everything made from them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridstate.errors import SourceError, UnsupportedModel
from hybridstate.families import LinearLayer, ModelSpec
from hybridstate.families.published import CONFIGS, published_config
from hybridstate.trajectories.dummy import (
    KDA_DECAYS,
    SAFE_DECAYS,
    draw_decays,
    dummy_model,
    dummy_spec,
)
from hybridstate.trajectories.model import decode, prefill, recurrent_states
from tests.released import RELEASES
from tests.trajectories.test_graphs import build, small


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_published_config_has_the_geometry_of_the_release(name: str) -> None:
    spec = dummy_spec(CONFIGS[name])
    released = next(r for r in RELEASES if r.name.removesuffix("-Instruct") == name)
    assert tuple(layer.index for layer in spec.layers) == tuple(released.linear)
    layer = spec.layers[0]
    sizes = (
        layer.key_heads,
        layer.value_heads,
        layer.key_dim,
        layer.value_dim,
        layer.conv_width,
    )
    assert sizes == released.sizes
    assert spec.family.name == released.family
    text = released.config.get("text_config", released.config)
    for key in ("hidden_size", "num_hidden_layers", "num_experts", "vocab_size"):
        assert CONFIGS[name][key] == text[key]


def test_names_are_known_with_and_without_their_organisation() -> None:
    found = published_config("moonshotai/kimi-linear-48b-a3b-Instruct")
    assert found is not None
    assert found[0] == "Kimi-Linear-48B-A3B"
    assert published_config("tiny-gdn") is None


@pytest.mark.parametrize("name", list(CONFIGS))
def test_decays_at_the_gate_input_follow_the_published_spread(name: str) -> None:
    spec = dummy_spec(CONFIGS[name])
    rates = []
    for layer in spec.layers:
        a_log, bias = (x.astype(np.float64) for x in draw_decays(spec, layer, 0))
        assert (a_log == 0).all()
        rates.append(np.log10(np.logaddexp(0.0, spec.default_gate_input + bias)))
    log_rate = np.stack(rates)
    mean, spread = (-1.605, 0.938) if spec.unit == "head" else (-0.153, 0.585)
    assert abs(log_rate.mean() - mean) < 0.1
    assert abs(log_rate.std() - spread) < 0.1
    if spec.unit == "channel":
        within = log_rate.std(-1).mean()
        assert abs(within - KDA_DECAYS.channels) < 0.02


def test_the_safe_gate_is_inverted_too() -> None:
    layer = LinearLayer(0, 0, 64, 64, 128, 128, 4, "model.layers.0.self_attn.")
    family = next(r for r in RELEASES if r.name == "Kimi-K3")
    spec = ModelSpec(dummy_spec(CONFIGS["Kimi-Linear-48B-A3B"]).family, "safe", -5.0, (layer,), 1)
    assert family.config["text_config"]["linear_attn_config"]["gate_lower_bound"] == -5.0
    _, bias = draw_decays(spec, layer, 0)
    rate = 5.0 / (1 + np.exp(-(spec.default_gate_input + bias.astype(np.float64))))
    assert rate.max() <= 5.0 * 0.9991
    assert abs(np.log10(rate).std(-1).mean() - SAFE_DECAYS.channels) < 0.1


@pytest.mark.parametrize("case", ["gdn-2", "kda"])
def test_activations_stay_finite_and_states_keep_their_size(case: str, tmp_path: Path) -> None:
    loaded = build(case, tmp_path)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (2, 1200), generator=generator)
    sizes = []
    logits, cache = prefill(
        loaded, tokens, chunk=400, after_chunk=lambda c, _: sizes.append(rms(c))
    )
    logits = decode(loaded, logits.argmax(-1), cache)
    assert torch.isfinite(logits).all()
    assert 0.3 < sizes[-1] / sizes[0] < 3.0
    assert 1e-3 < sizes[-1] < 10.0


def rms(cache: object) -> float:
    return float(torch.stack([s.square().mean() for s in recurrent_states(cache)]).mean().sqrt())


def test_a_seed_makes_the_same_model_and_everything_is_labelled(tmp_path: Path) -> None:
    path = small(tmp_path / "made", "Kimi-Linear-48B-A3B")
    first, second, other = (dummy_model(path, seed=seed) for seed in (0, 0, 1))
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert first.checkpoint.digests() == second.checkpoint.digests()
    assert first.checkpoint.digests() != other.checkpoint.digests()
    assert first.checkpoint.name == "made (synthetic weights)"
    assert "nothing about the trained model" in first.checkpoint.warnings[0]
    decays = [p for n, p in first.model.named_parameters() if n.endswith(("A_log", "dt_bias"))]
    assert decays
    assert all(p.dtype == torch.float32 for p in decays)


def test_what_is_no_config_or_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no config for synthetic weights") as refused:
        dummy_model("tiny-gdn")
    assert "leave --dummy out" in (refused.value.hint or "")
    with pytest.raises(SourceError) as unknown:
        dummy_model("absent-model")
    assert "Qwen3.6-35B-A3B" in (unknown.value.hint or "")
    k3 = next(r for r in RELEASES if r.name == "Kimi-K3")
    (tmp_path / "config.json").write_text(json.dumps(k3.config))
    with pytest.raises(UnsupportedModel, match="no class to run"):
        dummy_model(tmp_path)
