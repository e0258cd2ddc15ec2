"""Every family and every kind of order: carried by the weights, or refused with the reason and the way out."""

from dataclasses import replace

import numpy as np
import pytest

from hybridstate.errors import UnsupportedModel
from hybridstate.families import FAMILIES, Family, LinearLayer
from hybridstate.families.spec import ModelSpec
from hybridstate.weights.permute import LayerOrder, layer_moves

PLANNABLE = [family for family in FAMILIES if not family.analysis_only]
KINDS = ("keys", "values common", "values fold", "heads", "expand")
ONE_TO_ONE = ("kimi_linear", "kimi_k3", "glm5_next", "bailing_hybrid", "alice_ai", "jet_nemotron")
"""Their configs have one number of heads, so every value head has a key head of its own."""


def layer_of(family: Family, key_dim: int = 8, value_dim: int = 12) -> LinearLayer:
    key_heads = 4 if family.name in ONE_TO_ONE else 2
    prefix = f"model.layers.0.{family.modules[0]}."
    return LinearLayer(0, 0, key_heads, 4, key_dim, value_dim, 4, prefix, family.conv)


def shapes_of(family: Family, layer: LinearLayer) -> dict[str, tuple[int, ...]]:
    """Stored shapes of one layer from its axis table; padding as Kimi-K3 has it."""
    found: dict[str, tuple[int, ...]] = {}
    for suffix, rules in family.axes.items():
        if not rules:
            found[layer.prefix + suffix] = (5, 6)
            continue
        (rule,) = rules
        length = sum(layer.segment_length(segment) for segment in rule.segments)
        length += 3 if "padding" in rule.segments else 0
        if "conv1d" in suffix:
            shape: tuple[int, ...] = (length, 1, 4)
        elif rule.axis == 2:
            shape = (1, 1, length, 1)
        elif rule.axis == 1:
            shape = (7, length)
        else:
            shape = (length, 7) if "proj" in suffix and "bias" not in suffix else (length,)
        found[layer.prefix + suffix] = shape
    return found


def order_of(layer: LinearLayer, kind: str) -> LayerOrder:
    rng = np.random.default_rng(5)
    order = LayerOrder.identity(layer)
    if kind == "keys":
        keys = [rng.permutation(layer.key_dim) for _ in range(layer.key_heads)]
        return replace(order, keys=np.stack(keys))
    if kind == "expand":
        keys = [rng.permutation(layer.key_dim) for _ in range(layer.value_heads)]
        return replace(order, keys=np.stack(keys), expand=True)
    if kind == "heads":
        bundles = rng.permutation(layer.key_heads)
        heads = (bundles[:, None] * layer.bundle + np.arange(layer.bundle)).reshape(-1)
        return replace(order, bundles=bundles, heads=heads)
    values = np.stack([rng.permutation(layer.value_dim) for _ in range(layer.value_heads)])
    if kind == "values common":
        values[:] = values[0]
    return replace(order, values=values, fold=kind == "values fold")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", PLANNABLE, ids=lambda f: f.name)
def test_every_order_moves_whole_or_is_refused(family: Family, kind: str) -> None:
    """Where it moves, entries are a permutation (replicas apart) and the tensors that carry it are among the moved."""
    layer = layer_of(family)
    spec = ModelSpec(family, family.gate, -5.0 if family.gate == "safe" else None, (layer,), 1)
    shapes = shapes_of(family, layer)
    order = order_of(layer, kind)
    moves = {m.name.removeprefix(layer.prefix): m for m in layer_moves(spec, layer, order, shapes)}
    assert set(moves) == {name.removeprefix(layer.prefix) for name in shapes}
    carried = {
        "keys": {"key_rows", "gate_rows", "qkvz_groups"},
        "expand": {"key_rows", "qkvz_groups"},
        "values common": {"value_rows", "value_shared", "qkvz_groups"},
        "values fold": {"value_rows", "value_shared", "qkvz_groups"},
        "heads": {"key_rows", "value_rows", "value_heads", "gate_rows", "qkvz_groups", "ba_groups"},
    }[kind]
    for suffix, rules in family.axes.items():
        move = moves[suffix]
        segments = {segment for rule in rules for segment in rule.segments}
        assert move.still is not bool(segments & carried) or kind == "expand", suffix
        for axis, index in move.axes:
            if not move.grown:
                assert (np.sort(index) == np.arange(move.shape[axis])).all(), suffix
            else:
                assert set(index.tolist()) == set(range(move.shape[axis])), suffix
        if "padding" in segments:
            for _, index in move.axes:
                assert (index[-3:] == np.arange(move.shape[0])[-3:]).all()
    grown = any(move.grown for move in moves.values())
    assert grown is (kind == "expand" and layer.bundle > 1)


REFUSED = [
    ("qwen3_5", "values per head", "share one output norm weight", "fold the norm"),
    ("kimi_k3", "values per head", "share one output norm weight", "common value order"),
    ("qwen3_next", "unknown tensor", "does not know this tensor", "--no-weights"),
    ("jet_nemotron", "its kernel generator", "does not know this tensor", "--no-weights"),
    ("kimi_linear", "another split", "expected", "as released"),
    ("qwen3_5", "fp8 blocks of two heads", "mixes scale blocks", "--no-weights"),
    ("qwen3_5", "fold into fp8", "cannot take in the norm", "common value order"),
]


@pytest.mark.parametrize(("name", "what", "reason", "way_out"), REFUSED, ids=lambda x: str(x)[:24])
def test_what_cannot_be_absorbed_says_why_and_what_else(
    name: str, what: str, reason: str, way_out: str
) -> None:
    family = next(f for f in FAMILIES if f.name == name)
    layer = layer_of(family, *((96, 96) if "fp8" in what else ()))
    spec = ModelSpec(family, family.gate, -5.0 if family.gate == "safe" else None, (layer,), 1)
    shapes = shapes_of(family, layer)
    order = order_of(layer, "keys")
    if what == "values per head":
        order = replace(order_of(layer, "values fold"), fold=False)
    elif what == "unknown tensor":
        shapes[layer.prefix + "in_proj_qkvz.qweight"] = (4, 4)
    elif what == "its kernel generator":
        shapes[layer.prefix + "dynamic_conv1d.kernel_generator.w1.weight"] = (4, 4)
    elif what == "another split":
        shapes[layer.prefix + "q_proj.weight"] = (layer.key_rows + 1, 7)
    elif what == "fp8 blocks of two heads":
        shapes[layer.prefix + "in_proj_qkv.weight_scale_inv"] = (6, 1)
    elif what == "fold into fp8":
        shapes[layer.prefix + "out_proj.weight_scale_inv"] = (1, 3)
        order = order_of(layer, "values fold")
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        list(layer_moves(spec, layer, order, shapes))
    assert way_out in str(caught.value.hint)


@pytest.mark.parametrize("family", PLANNABLE, ids=lambda f: f.name)
def test_one_key_head_holds_one_order(family: Family) -> None:
    layer = layer_of(family)
    keys = order_of(layer, "expand").keys
    if layer.bundle == 1:
        assert (LayerOrder.of_value_heads(layer, keys).keys == keys).all()
        return
    with pytest.raises(UnsupportedModel, match="2 value heads share one key head") as caught:
        LayerOrder.of_value_heads(layer, keys)
    assert "--key-order expand" in str(caught.value.hint)
