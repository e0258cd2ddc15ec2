"""Folders that transformers has written are recognised, whatever it renamed, merged or dropped."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridstate import api
from hybridstate.checkpoint import Checkpoint, open_checkpoint
from hybridstate.errors import UnsupportedModel
from hybridstate.families import FAMILIES
from hybridstate.trajectories.model import decode, load_model, prefill
from tests.families.saved import MODELS, available, save
from tests.tolerances import assert_within

RUNS = [
    name
    for name, model in MODELS.items()
    if any(family.name == model.family and family.runtime for family in FAMILIES)
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """`saved(name)` opens a model written once."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Checkpoint:
        if not available(name):
            pytest.skip(f"this transformers has no {MODELS[name].model}")
        if name not in folders:
            folders[name] = save(name, tmp_path_factory.mktemp(name) / name)
        return open_checkpoint(folders[name])

    return get


@pytest.mark.parametrize("name", MODELS)
def test_saved_model_is_recognised(name: str, saved: Callable[[str], Checkpoint]) -> None:
    checkpoint, expected = saved(name), MODELS[name]
    spec = checkpoint.spec
    assert spec.name == expected.family
    assert tuple(layer.index for layer in spec.layers) == expected.linear
    for layer in spec.layers:
        sizes = (layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim)
        assert sizes == expected.sizes
        assert layer.conv_width == 4
    safe = expected.family in ("glm5_next", "bailing_hybrid")
    assert (spec.gate, spec.lower_bound) == (("safe", -5.0) if safe else ("softplus", None))


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_a_saved_layer_is_in_the_axis_table(
    name: str, saved: Callable[[str], Checkpoint]
) -> None:
    checkpoint = saved(name)
    spec = checkpoint.spec
    for layer in spec.layers:
        stored = {
            tensor.removeprefix(layer.prefix)
            for tensor in checkpoint.shapes
            if tensor.startswith(layer.prefix)
        }
        assert stored <= set(spec.family.axes)
        for suffix in stored:
            for rule in spec.family.axes[suffix]:
                length = sum(layer.segment_length(segment) for segment in rule.segments)
                resplit = name == "olmo_hybrid" and "conv1d" in suffix
                if not resplit:
                    assert checkpoint.shapes[layer.prefix + suffix][rule.axis] == length, suffix


@pytest.mark.parametrize("name", MODELS)
def test_saved_model_is_analysed_and_inspected(
    name: str, saved: Callable[[str], Checkpoint]
) -> None:
    checkpoint = saved(name)
    analysis = api.analyze(checkpoint.path, w_max=(16,))
    spec = analysis.spec
    assert analysis.quantiles["units"] == sum(spec.units(layer) for layer in spec.layers)
    dense = analysis.cutoffs[0].accounting
    heads, key, value = MODELS[name].sizes[1:]
    assert dense.temporal_dense_bytes == len(spec.layers) * heads * key * value * 4
    inspection = api.inspect(checkpoint.path)
    assert inspection.tensor_bytes_read == 0
    assert {kind.layers for kind in inspection.kinds} == {len(spec.layers)}
    json.dumps(inspection.to_json(headers=True), allow_nan=False)


def test_every_family_of_transformers_is_covered() -> None:
    with_class = {family.name for family in FAMILIES if family.runtime or family.analysis_only}
    assert with_class == {saved.family for saved in MODELS.values()}


def test_mamba2_convolution_covers_x_b_and_c(saved: Callable[[str], Checkpoint]) -> None:
    checkpoint = saved("nemotron_h")
    layer = checkpoint.spec.layers[0]
    stored = checkpoint.shapes[layer.prefix + "conv1d.weight"]
    assert stored[0] == layer.conv_channels == 4 * 16 + 2 * 2 * 8


@pytest.mark.parametrize("name", RUNS)
def test_recurrence_of_a_saved_model_can_be_taken_over(
    name: str, saved: Callable[[str], Checkpoint]
) -> None:
    """Logits of the whole text against prefill and decoding through our functions and cache."""
    loaded = load_model(saved(name).path)
    tokens = torch.randint(3, 80, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = loaded.model(input_ids=tokens, use_cache=False).logits
    found, cache = prefill(loaded, tokens[:, :20], chunk=10, keep_logits=True)
    steps = [found, *(decode(loaded, tokens[:, t], cache)[:, None] for t in range(20, 24))]
    assert_within(torch.cat(steps, 1), expected, "replay-logits-f32")


def test_mamba2_models_are_analysed_and_refused_elsewhere(
    saved: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    folder = saved("nemotron_h").path
    with pytest.raises(UnsupportedModel, match="analysis only") as caught:
        api.export_plan(folder, w_max=64, out=tmp_path / "plan")
    assert caught.value.exit_code == 4
    assert not (tmp_path / "plan").exists()
    with pytest.raises(UnsupportedModel, match="analysis only"):
        load_model(folder)
    with pytest.raises(UnsupportedModel, match="analysis only"):
        api.bench_update(folder, device="cpu")
