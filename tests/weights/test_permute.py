"""Permutations follow the axis table: labels move where the definition says, and come back."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridstate.errors import UnsupportedModel
from hybridstate.families import FAMILIES, AxisRule, LinearLayer
from hybridstate.families.spec import Gate, ModelSpec
from hybridstate.weights.permute import LayerOrder, axis_index, layer_moves, permute

FAMILY = {family.name: family for family in FAMILIES}


def make_layer(key_heads: int, bundle: int, key_dim: int, value_dim: int) -> LinearLayer:
    return LinearLayer(
        0, 0, key_heads, key_heads * bundle, key_dim, value_dim, 4, "model.layers.0.linear_attn."
    )


def random_order(layer: LinearLayer, seed: int, *, common_values: bool = False) -> LayerOrder:
    """Everything moves: bundles, heads inside them, key channels, value dims."""
    rng = np.random.Generator(np.random.PCG64(seed))
    bundles = rng.permutation(layer.key_heads)
    heads = np.concatenate([b * layer.bundle + rng.permutation(layer.bundle) for b in bundles])
    keys = np.array([rng.permutation(layer.key_dim) for _ in range(layer.key_heads)])
    values = np.array([rng.permutation(layer.value_dim) for _ in range(layer.value_heads)])
    if common_values:
        values[:] = values[0]
    return LayerOrder(bundles, heads, keys, values)


layers = st.builds(
    make_layer, st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 7)
)


def apply(layer: LinearLayer, segments: tuple[Any, ...], order: LayerOrder, labels: Any) -> Any:
    return labels[axis_index(layer, AxisRule(0, segments), order, len(labels))]


@given(layer=layers, seed=st.integers(0, 2**32))
def test_inverse_brings_every_segment_back(layer: LinearLayer, seed: int) -> None:
    order = random_order(layer, seed, common_values=True)
    for family in FAMILIES:
        for rules in family.axes.values():
            for rule in rules:
                length = sum(layer.segment_length(s) for s in rule.segments)
                length += 3 * ("padding" in rule.segments)
                there = axis_index(layer, rule, order, length)
                back = axis_index(layer, rule, order.inverse(), length)
                assert (there[back] == np.arange(length)).all(), rule
                assert sorted(there) == list(range(length))


@given(layer=layers, seed=st.integers(0, 2**32))
def test_rows_carry_their_head_and_channel(layer: LinearLayer, seed: int) -> None:
    order = random_order(layer, seed)
    K, V, B = layer.key_dim, layer.value_dim, layer.bundle
    q = np.array([(h, c) for h in range(layer.key_heads) for c in range(K)])
    v = np.array([(h, c) for h in range(layer.value_heads) for c in range(V)])
    moved_q = apply(layer, ("key_rows",), order, q).reshape(layer.key_heads, K, 2)
    moved_v = apply(layer, ("value_rows",), order, v).reshape(layer.value_heads, V, 2)
    for new, old in enumerate(order.bundles):
        assert (moved_q[new, :, 0] == old).all()
        assert (moved_q[new, :, 1] == order.keys[old]).all()
    for new, old in enumerate(order.heads):
        assert (moved_v[new, :, 0] == old).all()
        assert (moved_v[new, :, 1] == order.values[old]).all()
        assert order.bundles[new // B] == old // B  # a value head still reads its key head


@given(layer=layers, seed=st.integers(0, 2**32))
def test_packed_groups_hold_what_the_flat_layout_holds(layer: LinearLayer, seed: int) -> None:
    """Qwen3-Next's groups, unpacked after the move, equal the flat projections after it."""
    order = random_order(layer, seed)
    Hk, B, K, V = layer.key_heads, layer.bundle, layer.key_dim, layer.value_dim
    q = np.arange(Hk * K)
    k, v, z = q + 1000, np.arange(Hk * B * V) + 2000, np.arange(Hk * B * V) + 5000

    def pack(q: Any, k: Any, v: Any, z: Any) -> Any:
        parts = [a.reshape(Hk, -1) for a in (q, k, v, z)]
        return np.concatenate(parts, axis=1).reshape(-1)

    rows = {"q": ("key_rows", q), "k": ("key_rows", k), "v": ("value_rows", v)}
    rows["z"] = ("value_rows", z)
    flat = [apply(layer, (segment,), order, labels) for segment, labels in rows.values()]
    packed = apply(layer, ("qkvz_groups",), order, pack(q, k, v, z))
    assert (packed == pack(*flat)).all()

    b, a = np.arange(Hk * B), np.arange(Hk * B) + 100
    groups = np.concatenate([b.reshape(Hk, B), a.reshape(Hk, B)], axis=1).reshape(-1)
    moved = apply(layer, ("ba_groups",), order, groups).reshape(Hk, 2, B)
    assert (moved[:, 0].reshape(-1) == apply(layer, ("value_heads",), order, b)).all()
    assert (moved[:, 1].reshape(-1) == apply(layer, ("value_heads",), order, a)).all()


@pytest.mark.parametrize(("dtype", "size"), [("F8_E4M3", 1), ("BF16", 2), ("F32", 4), ("F64", 8)])
@given(layer=layers, seed=st.integers(0, 2**32))
def test_bytes_of_any_dtype_move_whole(
    dtype: str, size: int, layer: LinearLayer, seed: int
) -> None:
    rng = np.random.Generator(np.random.PCG64(seed))
    order = random_order(layer, seed, common_values=True)
    shape = (3, layer.value_rows)
    raw = rng.integers(0, 256, 3 * layer.value_rows * size, np.uint8).tobytes()
    name = "model.layers.0.linear_attn.out_proj.weight"
    spec = ModelSpec(FAMILY["qwen3_5"], "softplus", None, (layer,), 1)
    (there,) = layer_moves(spec, layer, order, {name: shape})
    (back,) = layer_moves(spec, layer, order.inverse(), {name: shape})
    moved = permute(raw, dtype, there)
    assert permute(moved, dtype, back) == raw
    rows = np.frombuffer(raw, f"V{size}").reshape(shape)
    index = axis_index(layer, AxisRule(1, ("value_rows",)), order, layer.value_rows)
    assert rows[:, index].tobytes() == moved


def moves_of(family: str, shapes: dict[str, tuple[int, ...]], layer: LinearLayer) -> Any:
    gate: Gate = "safe" if FAMILY[family].gate == "safe" else "softplus"
    spec = ModelSpec(FAMILY[family], gate, None, (layer,), 1)
    rng = np.random.Generator(np.random.PCG64(0))
    keys = np.array([rng.permutation(layer.key_dim) for _ in range(layer.key_heads)])
    named = {layer.prefix + suffix: shape for suffix, shape in shapes.items()}
    moves = layer_moves(spec, layer, LayerOrder.of_keys(layer, keys), named)
    return {move.name.removeprefix(layer.prefix): move for move in moves}


def test_key_order_moves_only_what_has_key_channels() -> None:
    layer = make_layer(2, 1, 8, 8)
    rows, hidden = layer.key_rows, 32
    kda = moves_of(
        "kimi_linear",
        {
            "q_proj.weight": (rows, hidden),
            "k_conv1d.weight": (rows, 1, 4),
            "v_proj.weight": (rows, hidden),
            "A_log": (1, 1, 2, 1),
            "dt_bias": (rows,),
            "f_a_proj.weight": (8, hidden),
            "f_b_proj.weight": (rows, 8),
            "g_b_proj.weight": (rows, 8),
            "o_norm.weight": (8,),
            "o_proj.weight": (hidden, rows),
        },
        layer,
    )
    moving = {name for name, move in kda.items() if not move.still}
    assert moving == {"q_proj.weight", "k_conv1d.weight", "dt_bias", "f_b_proj.weight"}
    gdn = moves_of(
        "qwen3_5",
        {
            "in_proj_qkv.weight": (2 * rows + layer.value_rows, hidden),
            "conv1d.weight": (2 * rows + layer.value_rows, 1, 4),
            "A_log": (2,),
            "dt_bias": (2,),
            "out_proj.weight": (hidden, layer.value_rows),
        },
        layer,
    )
    assert {n for n, m in gdn.items() if not m.still} == {"in_proj_qkv.weight", "conv1d.weight"}


@pytest.mark.parametrize("shape", [(16,), (2, 8)], ids=str)
def test_flat_and_square_decay_bias_move_alike(shape: tuple[int, ...]) -> None:
    layer = make_layer(2, 1, 8, 8)
    move = moves_of("kimi_linear", {"dt_bias": shape}, layer)["dt_bias"]
    raw = np.arange(16, dtype="<f4")
    moved = np.frombuffer(permute(raw.tobytes(), "F32", move), "<f4").reshape(2, 8)
    assert (moved[0] < 8).all()
    assert sorted(moved[1]) == list(range(8, 16))


def test_padding_of_a_log_stays() -> None:
    layer = make_layer(3, 1, 4, 4)
    order = random_order(layer, 1)
    index = axis_index(layer, AxisRule(0, ("value_heads", "padding")), order, 8)
    assert (index[:3] == order.heads).all()
    assert (index[3:] == np.arange(3, 8)).all()


def test_unknown_tensor_of_a_layer_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"q_proj\.weight_scale_inv.*axis table"):
        moves_of("kimi_linear", {"q_proj.weight_scale_inv": (1, 1)}, make_layer(2, 1, 8, 8))


def test_resaved_convolution_split_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"q_conv1d\.weight: an axis of 22 .* expected 16"):
        moves_of("olmo_hybrid", {"q_conv1d.weight": (22, 1, 4)}, make_layer(2, 1, 8, 16))


def test_one_key_head_cannot_hold_two_orders() -> None:
    layer = make_layer(1, 2, 4, 4)
    keys = np.array([[0, 1, 2, 3], [3, 2, 1, 0]])
    with pytest.raises(UnsupportedModel, match="share one key head"):
        LayerOrder.of_value_heads(layer, keys)


def test_shared_norm_cannot_follow_orders_per_head() -> None:
    layer = make_layer(2, 1, 4, 4)
    with pytest.raises(UnsupportedModel, match="norm"):
        axis_index(layer, AxisRule(0, ("value_shared",)), random_order(layer, 0), 4)


def test_packed_dtypes_are_refused() -> None:
    layer = make_layer(2, 1, 8, 8)
    move = moves_of("kimi_linear", {"q_proj.weight": (16, 4)}, layer)["q_proj.weight"]
    with pytest.raises(UnsupportedModel, match="share bytes"):
        permute(bytes(32), "F4", move)
