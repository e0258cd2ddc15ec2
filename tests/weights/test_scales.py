"""Scales of quantised weights follow their blocks: dequantising commutes with the move."""

from typing import Any

import numpy as np
import pytest

from hybridstate.errors import UnsupportedModel
from hybridstate.families import FAMILIES, LinearLayer
from hybridstate.families.spec import ModelSpec
from hybridstate.weights.permute import LayerOrder, layer_moves
from tests.weights.test_permute import random_order

FAMILY = {family.name: family for family in FAMILIES}
COLUMNS = 256


def layer_of(family: str, key_dim: int = 128, value_dim: int = 128) -> LinearLayer:
    heads = 4 if family == "kimi_linear" else 6
    prefix = f"model.layers.0.{FAMILY[family].modules[0]}."
    return LinearLayer(
        0, 0, heads // (1 if heads == 4 else 3), heads, key_dim, value_dim, 4, prefix
    )


def projections(family: str, layer: LinearLayer) -> dict[str, tuple[int, int]]:
    """Two-dimensional weights of whole heads, by suffix."""
    found = {}
    for suffix, rules in FAMILY[family].axes.items():
        if len(rules) != 1 or "proj" not in suffix:
            continue
        length = sum(layer.segment_length(segment) for segment in rules[0].segments)
        if length >= 128:
            found[suffix] = (length, COLUMNS) if rules[0].axis == 0 else (COLUMNS, length)
    return found


def moved(array: Any, axes: Any) -> Any:
    for axis, index in axes:
        array = np.take(array, index, axis=axis)
    return array


def expand(scales: Any, shape: tuple[int, int]) -> Any:
    """Block scales as one factor for each entry."""
    for axis in (0, 1):
        scales = np.repeat(scales, -(-shape[axis] // scales.shape[axis]), axis=axis)
    return scales[: shape[0], : shape[1]]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("ending", ["weight_scale_inv", "weight_scale"])
def test_dequantised_weights_move_as_the_weights_do(family: str, ending: str) -> None:
    layer = layer_of(family)
    spec = ModelSpec(FAMILY[family], "softplus", None, (layer,), 1)
    order = random_order(layer, 7, common_values=True)
    rng = np.random.default_rng(2)
    weights = projections(family, layer)
    assert len(weights) >= 2
    shapes: dict[str, tuple[int, ...]] = {}
    scales = {}
    for suffix, shape in weights.items():
        size = tuple(-(-n // 128) for n in shape) if ending == "weight_scale_inv" else (shape[0], 1)
        shapes[layer.prefix + suffix] = shape
        scales[suffix] = rng.uniform(1, 2, size)
        shapes[layer.prefix + suffix.removesuffix("weight") + ending] = size
    moves = {m.name.removeprefix(layer.prefix): m for m in layer_moves(spec, layer, order, shapes)}
    some = 0
    for suffix, shape in weights.items():
        codes, axes = rng.normal(size=shape), moves[suffix].axes
        scale = scales[suffix]
        after = moved(scale, moves[suffix.removesuffix("weight") + ending].axes)
        expected = moved(codes * expand(scale, shape), axes)
        assert (moved(codes, axes) * expand(after, shape) == expected).all(), suffix
        some += int((after != scale).any())
    assert some >= (2 if ending == "weight_scale_inv" or family != "qwen3_next" else 1)


def test_orders_that_mix_blocks_are_refused_with_the_way_out() -> None:
    layer = layer_of("qwen3_5", key_dim=96)
    spec = ModelSpec(FAMILY["qwen3_5"], "softplus", None, (layer,), 1)
    shape = projections("qwen3_5", layer)["in_proj_qkv.weight"]
    name = layer.prefix + "in_proj_qkv.weight"
    shapes = {name: shape, name + "_scale_inv": tuple(-(-n // 128) for n in shape)}
    order = random_order(layer, 1, common_values=True)
    with pytest.raises(UnsupportedModel, match="mixes scale blocks: block 0 of 128") as caught:
        list(layer_moves(spec, layer, order, shapes))
    assert caught.value.context["tensor"] == name + "_scale_inv"
    assert "--no-weights" in str(caught.value.hint)
    still = list(layer_moves(spec, layer, LayerOrder.identity(layer), shapes))
    assert all(move.still for move in still)


def test_one_scale_for_the_whole_weight_stays() -> None:
    layer = layer_of("qwen3_5")
    spec = ModelSpec(FAMILY["qwen3_5"], "softplus", None, (layer,), 1)
    name = layer.prefix + "in_proj_z.weight"
    shapes: dict[str, tuple[int, ...]] = {name: (768, COLUMNS), name + "_scale": ()}
    order = random_order(layer, 1, common_values=True)
    moves = {m.name: m for m in layer_moves(spec, layer, order, shapes)}
    assert not moves[name].still
    assert moves[name + "_scale"].still


def test_a_grid_of_other_blocks_is_refused() -> None:
    layer = layer_of("qwen3_5")
    spec = ModelSpec(FAMILY["qwen3_5"], "softplus", None, (layer,), 1)
    name = layer.prefix + "in_proj_z.weight"
    order = random_order(layer, 1, common_values=True)
    with pytest.raises(UnsupportedModel, match="12 scales on an axis of 768"):
        list(layer_moves(spec, layer, order, {name: (768, COLUMNS), name + "_scale_inv": (12, 4)}))
