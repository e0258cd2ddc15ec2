"""Tensor names decide the family; every size is checked against the config."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import NumericError, SourceError, UnsupportedModel, UsageError
from hybridstate.families import FAMILIES, detect

Shapes = dict[str, tuple[int, ...]]


def kda_model(
    *,
    model_type: str = "kimi_linear",
    root: str = "model.layers.",
    layers: int = 4,
    heads: int = 3,
    dim: int = 8,
    a_log: tuple[int, ...] | None = None,
    full_rank_gate: bool = False,
    base: int = 1,
    gate: dict[str, Any] | None = None,
) -> tuple[Shapes, dict[str, Any]]:
    """Names, shapes and config of a KDA model: block 3 is MLA under the same `self_attn` prefix."""
    linear = [i for i in range(layers) if (i + 1) % 4]
    text: dict[str, Any] = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "head_dim": 72,
        "hidden_size": 16,
        "linear_attn_config": {
            "kda_layers": [i + base for i in linear],
            "num_heads": heads,
            "head_dim": dim,
            "short_conv_kernel_size": 4,
        }
        | (gate or {}),
    }
    shapes: Shapes = {}
    for i in range(layers):
        prefix = f"{root}{i}.self_attn."
        if i not in linear:
            shapes[prefix + "q_proj.weight"] = (24, 16)
            shapes[prefix + "kv_a_proj_with_mqa.weight"] = (20, 16)
            shapes[prefix + "g_proj.weight"] = (heads * dim, 16)
            continue
        for name in ("q", "k", "v"):
            shapes[f"{prefix}{name}_proj.weight"] = (heads * dim, 16)
        shapes[prefix + "A_log"] = a_log or (1, 1, heads, 1)
        shapes[prefix + "dt_bias"] = (heads * dim,)
        for name in ("f",) if full_rank_gate else ("f", "g"):
            shapes[f"{prefix}{name}_a_proj.weight"] = (dim, 16)
            shapes[f"{prefix}{name}_b_proj.weight"] = (heads * dim, dim)
        if full_rank_gate:
            shapes[prefix + "g_proj.weight"] = (heads * dim, 16)
    return shapes, text


@pytest.mark.parametrize(
    ("family", "kind", "bundle"),
    [
        ("qwen3_5", "gdn", 2),
        ("qwen3_5_moe", "gdn", 2),
        ("qwen3_next", "gdn", 2),
        ("olmo_hybrid", "gdn", 1),
        ("kimi_linear", "kda", 1),
    ],
)
def test_every_tiny_family_is_recognised(
    tiny_checkpoint: Callable[..., Path], family: str, kind: str, bundle: int
) -> None:
    spec = open_checkpoint(tiny_checkpoint(family)).spec
    assert spec.name == family
    assert spec.family.kind == kind
    assert spec.gate == "softplus"
    assert [layer.index for layer in spec.layers] == [0, 1, 2]
    assert [layer.ordinal for layer in spec.layers] == [0, 1, 2]
    assert {layer.bundle for layer in spec.layers} == {bundle}
    assert spec.num_layers == 4


def test_every_axis_rule_agrees_with_the_stored_shapes(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    for family in ("qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear"):
        checkpoint = open_checkpoint(tiny_checkpoint(family))
        spec = checkpoint.spec
        for layer in spec.layers:
            for suffix, rules in spec.family.axes.items():
                for rule in rules:
                    length = sum(layer.segment_length(s) for s in rule.segments)
                    assert checkpoint.shapes[layer.prefix + suffix][rule.axis] == length, suffix


def test_kimi_layer_list_counts_from_one() -> None:
    spec = detect(*kda_model())
    assert [layer.index for layer in spec.layers] == [0, 1, 2]


def test_glm_layer_list_counts_from_zero() -> None:
    shapes, config = kda_model(
        model_type="glm5_next_text", a_log=(3,), base=0, gate={"gate_lower_bound": -5.0}
    )
    spec = detect(shapes, {"model_type": "glm5_next", "text_config": config})
    assert spec.name == "glm5_next"
    assert [layer.index for layer in spec.layers] == [0, 1, 2]


def test_top_level_head_dim_is_not_the_linear_one() -> None:
    layer = detect(*kda_model()).layers[0]
    assert (layer.key_dim, layer.value_dim) == (8, 8)


def test_mla_layers_with_the_same_prefix_are_not_linear() -> None:
    shapes, _ = kda_model()
    spec = detect(*kda_model())
    assert "model.layers.3.self_attn.q_proj.weight" in shapes
    assert all(layer.index != 3 for layer in spec.layers)


def test_k3_is_told_from_kimi_linear_by_its_tensors_not_by_model_type() -> None:
    shapes, text = kda_model(
        root="language_model.model.layers.",
        a_log=(4,),
        full_rank_gate=True,
        gate={"gate_lower_bound": -5.0},
    )
    for config in ({"model_type": "kimi_k3", "text_config": text}, text):
        spec = detect(shapes, config)
        assert (spec.name, spec.gate, spec.lower_bound) == ("kimi_k3", "safe", -5.0)
        assert (spec.default_gate_input, spec.default_gate_input_source) == (0.8, "paper")
        assert spec.layers[0].value_heads == 3


def test_padded_a_log_is_accepted_for_k3_alone() -> None:
    with pytest.raises(NumericError, match=r"A_log has shape \[4\], expected \[3\]"):
        detect(*kda_model(a_log=(4,)))


def test_qwen3_next_has_an_interval_instead_of_layer_types(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen3_next"))
    assert "layer_types" not in checkpoint.config
    assert [layer.index for layer in checkpoint.spec.layers] == [0, 1, 2]


def test_multi_token_prediction_layers_are_ignored(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen3_5"))
    prefix = checkpoint.spec.layers[0].prefix
    extra = {
        "mtp.layers.0.linear_attn." + name.removeprefix(prefix): shape
        for name, shape in checkpoint.shapes.items()
        if name.startswith(prefix)
    }
    assert extra
    spec = detect({**checkpoint.shapes, **extra}, checkpoint.config)
    assert spec.layers == checkpoint.spec.layers


def test_blocks_behind_the_last_hidden_layer_are_ignored() -> None:
    shapes, config = kda_model(layers=4)
    shapes |= {
        name.replace("layers.0.", "layers.4."): shape
        for name, shape in shapes.items()
        if "layers.0." in name
    }
    assert [layer.index for layer in detect(shapes, config).layers] == [0, 1, 2]


def test_unknown_model_names_families_and_layer_types() -> None:
    config = {
        "model_type": "rwkv9",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "mamba", "attention"],
    }
    with pytest.raises(UnsupportedModel, match="rwkv9: no gated linear-attention") as caught:
        detect({"model.layers.0.time_mix.decay": (4,)}, config)
    assert caught.value.exit_code == 4
    assert caught.value.hint is not None
    assert "attention x1, mamba x2" in caught.value.hint
    assert all(family.name in caught.value.hint for family in FAMILIES)


def test_known_tensors_under_an_unknown_model_type_are_refused() -> None:
    shapes, config = kda_model(model_type="someone_else")
    with pytest.raises(UnsupportedModel, match="look like kimi_linear or glm5_next; its gate"):
        detect(shapes, config)


@pytest.mark.parametrize("model_type", ["minimax", "bailing_hybrid", "bailing_moe_linear"])
def test_fixed_slope_models_are_refused(model_type: str) -> None:
    config = {"model_type": model_type, "num_hidden_layers": 1}
    with pytest.raises(UnsupportedModel, match="fixed decay slope"):
        detect({"model.layers.0.attention.query_key_value.weight": (8, 8)}, config)


def ling(bound: dict[str, Any]) -> tuple[Shapes, dict[str, Any]]:
    prefix = "model.layers.0.attention."
    rows = {"q_proj", "k_proj", "v_proj", "f_proj", "g_proj"}
    shapes: Shapes = {f"{prefix}{name}.weight": (16, 8) for name in rows}
    shapes |= {prefix + "A_log": (2,), prefix + "dt_bias": (16,)}
    return shapes, {
        "model_type": "bailing_hybrid",
        "num_hidden_layers": 2,
        "layer_group_size": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    } | bound


def test_safe_gate_without_a_bound_is_refused_and_the_option_named() -> None:
    shapes, config = ling({})
    with pytest.raises(UnsupportedModel, match="safe gate") as caught:
        detect(shapes, config)
    assert "--lower-bound" in str(caught.value.hint)
    spec = detect(shapes, config, lower_bound=-5.0)
    assert (spec.gate, spec.lower_bound) == ("safe", -5.0)
    assert (spec.default_gate_input, spec.default_gate_input_source) == (0.0, "default")


def test_safe_gate_bound_of_the_config_is_used_and_may_not_be_contradicted() -> None:
    shapes, config = ling({"kda_safe_gate": True, "kda_lower_bound": -5})
    assert detect(shapes, config).lower_bound == -5.0
    assert detect(shapes, config, lower_bound=-5.0).lower_bound == -5.0
    with pytest.raises(UsageError, match="contradicts the config"):
        detect(shapes, config, lower_bound=-4.0)


def test_a_bound_for_a_softplus_model_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="softplus gate"):
        _ = open_checkpoint(tiny_checkpoint("qwen3_5"), lower_bound=-5.0).spec


@pytest.mark.parametrize("bound", [0.0, 1.0, float("nan"), float("-inf")])
def test_a_bound_that_is_no_finite_negative_number_is_refused(bound: float) -> None:
    shapes, config = ling({})
    with pytest.raises(NumericError, match="below zero"):
        detect(shapes, config, lower_bound=bound)


def test_wrong_decay_shape_names_tensor_and_both_shapes() -> None:
    shapes, config = kda_model()
    shapes["model.layers.1.self_attn.dt_bias"] = (25,)
    with pytest.raises(NumericError, match=r"layers\.1\..*dt_bias has shape \[25\]") as caught:
        detect(shapes, config)
    assert caught.value.context["expected"] == [24]
    assert caught.value.context["layer"] == 1


def test_wrong_projection_rows_are_refused() -> None:
    shapes, config = kda_model()
    shapes["model.layers.2.self_attn.q_proj.weight"] = (32, 16)
    with pytest.raises(NumericError, match=r"q_proj\.weight has shape \[32, 16\], expected \[24"):
        detect(shapes, config)


def test_a_listed_linear_layer_without_tensors_is_incomplete() -> None:
    shapes, config = kda_model(layers=8)
    shapes = {name: shape for name, shape in shapes.items() if "layers.5." not in name}
    with pytest.raises(SourceError, match="block 5 is linear by linear_attn_config"):
        detect(shapes, config)


def test_decay_tensors_in_a_layer_not_listed_as_linear_are_refused() -> None:
    shapes, config = kda_model()
    config["linear_attn_config"]["kda_layers"] = [1, 2]
    with pytest.raises(SourceError, match="block 2 holds"):
        detect(shapes, config)


def test_a_size_missing_from_the_config_is_named() -> None:
    shapes, config = kda_model()
    del config["linear_attn_config"]["num_heads"]
    with pytest.raises(SourceError, match=r"linear_attn_config\.num_heads or linear_num_heads"):
        detect(shapes, config)


def test_heads_that_do_not_divide_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen3_5"))
    with pytest.raises(NumericError, match="not a multiple"):
        detect(checkpoint.shapes, {**checkpoint.config, "linear_num_key_heads": 3})
