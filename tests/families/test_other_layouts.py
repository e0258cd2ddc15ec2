"""Layouts that neither transformers writes nor a released fixture covers, and the remaining ways to list blocks."""

from typing import Any

import pytest

from hybridstate.errors import NumericError, SourceError, UnsupportedModel
from hybridstate.families import FAMILIES, ModelSpec, detect

Shapes = dict[str, tuple[int, ...]]

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}


def blocks(layer: Shapes, linear: tuple[int, ...], root: str = "model.layers.") -> Shapes:
    return {f"{root}{i}.{name}": shape for i in linear for name, shape in layer.items()}


# --- flash-linear-attention's own models -----------------------------------------------------------


def fla_gdn(**changes: Any) -> tuple[Shapes, dict[str, Any]]:
    layer: Shapes = {
        "attn.q_proj.weight": (16, 32),
        "attn.k_proj.weight": (16, 32),
        "attn.v_proj.weight": (64, 32),
        "attn.a_proj.weight": (4, 32),
        "attn.b_proj.weight": (4, 32),
        "attn.g_proj.weight": (64, 32),
        "attn.A_log": (4,),
        "attn.dt_bias": (4,),
        "attn.q_conv1d.weight": (16, 1, 4),
        "attn.k_conv1d.weight": (16, 1, 4),
        "attn.v_conv1d.weight": (64, 1, 4),
        "attn.o_norm.weight": (16,),
        "attn.o_proj.weight": (32, 64),
    }
    config = {
        "model_type": "gated_deltanet",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "num_v_heads": 4,
        "head_dim": 8,
        "expand_v": 2.0,
        "conv_size": 4,
        "use_short_conv": True,
        "attn": {"layers": [1], "num_heads": 2},
    } | changes
    return blocks(layer, (0, 2)), config


def test_fla_gated_deltanet_with_softmax_blocks() -> None:
    spec = detect(*fla_gdn())
    layer = spec.layers[0]
    assert spec.name == "fla_gated_deltanet"
    assert [found.index for found in spec.layers] == [0, 2]
    assert (layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim) == (2, 4, 8, 16)
    assert layer.conv_channels == 96
    with pytest.raises(SourceError, match=r"block 1 is linear by attn\.layers"):
        detect(*fla_gdn(attn={"layers": [0, 2], "num_heads": 2}))


def test_fla_without_short_convolution_has_no_window_to_cache() -> None:
    shapes, config = fla_gdn(use_short_conv=False)
    shapes = {name: shape for name, shape in shapes.items() if "conv1d" not in name}
    layer = detect(shapes, config).layers[0]
    assert layer.conv_width == 1


def test_fla_value_heads_default_to_the_key_heads_and_expand_v_may_be_rounded() -> None:
    shapes, config = fla_gdn(num_v_heads=None, num_heads=4, head_dim=4, expand_v=4.00000001)
    layer = detect(shapes, config).layers[0]
    assert (layer.key_heads, layer.value_heads, layer.value_dim) == (4, 4, 16)
    with pytest.raises(SourceError, match=r"head_dim \* expand_v \(value dimension\)"):
        detect(*fla_gdn(expand_v=1.7))


def fla_kda(**changes: Any) -> tuple[Shapes, dict[str, Any]]:
    layer: Shapes = {
        "attn.q_proj.weight": (16, 32),
        "attn.k_proj.weight": (16, 32),
        "attn.v_proj.weight": (32, 32),
        "attn.f_proj.0.weight": (8, 32),
        "attn.f_proj.1.weight": (32, 8),
        "attn.g_proj.0.weight": (8, 32),
        "attn.g_proj.1.weight": (32, 8),
        "attn.g_proj.1.bias": (32,),
        "attn.b_proj.weight": (4, 32),
        "attn.A_log": (4,),
        "attn.dt_bias": (32,),
        "attn.o_norm.weight": (8,),
        "attn.o_proj.weight": (32, 32),
    }
    config = {
        "model_type": "kda",
        "num_hidden_layers": 2,
        "num_heads": 2,
        "num_v_heads": 4,
        "head_dim": 8,
        "expand_v": 1.0,
        "conv_size": 4,
        "safe_gate": False,
        "lower_bound": None,
    } | changes
    return blocks(layer, (0, 1)), config


def test_fla_kda_has_one_decay_per_key_channel_of_each_value_head() -> None:
    spec = detect(*fla_kda())
    assert (spec.name, spec.gate) == ("fla_kda", "softplus")
    assert spec.units(spec.layers[0]) == 4 * 8  # two value heads share a key head, not its decay
    safe = detect(*fla_kda(safe_gate=True, lower_bound=-5))
    assert (safe.gate, safe.lower_bound) == ("safe", -5.0)


# --- Kimi's layer in Qwen3-Next's model, and Qwen3-Next's layer elsewhere -----------------------------


def alice(**changes: Any) -> tuple[Shapes, dict[str, Any]]:
    layer: Shapes = {f"linear_attn.{x}_proj.weight": (32, 16) for x in "qkv"}
    layer |= {f"linear_attn.{x}_conv1d.weight": (32, 1, 4) for x in "qkv"}
    for x in "fg":
        layer[f"linear_attn.{x}_a_proj.weight"] = (8, 16)
        layer[f"linear_attn.{x}_b_proj.weight"] = (32, 8)
    layer |= {
        "linear_attn.b_proj.weight": (4, 16),
        "linear_attn.a_log_bias": (4,),
        "linear_attn.dt_bias": (32,),
        "linear_attn.o_norm.weight": (8,),
        "linear_attn.o_proj.weight": (16, 32),
    }
    sizes = LINEAR | {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
    }
    config = {
        "architectures": ["AliceAIForCausalLM"],
        "model_type": "something_new",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        **sizes,
    } | changes
    return blocks(layer, (0, 1, 2)), config


@pytest.mark.parametrize("a_log", [(4,), (1, 1, 4, 1)])
def test_alice_ai_keeps_a_log_under_another_name(a_log: tuple[int, ...]) -> None:
    shapes, config = alice()
    shapes = {n: a_log if n.endswith("a_log_bias") else s for n, s in shapes.items()}
    spec = detect(shapes, config)
    assert (spec.name, spec.family.a_log, spec.gate) == ("alice_ai", "a_log_bias", "softplus")
    assert spec.units(spec.layers[0]) == 32


def test_a_class_name_in_the_config_is_enough_where_the_model_type_is_new() -> None:
    shapes, config = alice()
    with pytest.raises(UnsupportedModel, match="something_new is not known, although"):
        detect(shapes, {key: value for key, value in config.items() if key != "architectures"})


def gigachat(**changes: Any) -> tuple[Shapes, dict[str, Any]]:
    layer: Shapes = {
        "self_attn.in_proj_qkvz.weight": (128, 32),
        "self_attn.in_proj_ba.weight": (8, 32),
        "self_attn.conv1d.weight": (80, 1, 4),
        "self_attn.A_log": (4,),
        "self_attn.dt_bias": (4,),
        "self_attn.norm.weight": (12,),
        "self_attn.out_proj.weight": (32, 48),
    }
    config = {
        "architectures": ["GigaChat35ForCausalLM"],
        "model_type": "gigachat3_5",
        "num_hidden_layers": 4,
        "full_attention_layers": [0, 3],
        **LINEAR,
    } | changes
    shapes = blocks(layer, (1, 2)) | {"model.layers.0.self_attn.q_a_proj.weight": (8, 32)}
    return shapes, config


def test_gigachat_lists_its_full_attention_blocks() -> None:
    spec = detect(*gigachat())
    assert spec.name == "gigachat3_5"
    assert [layer.index for layer in spec.layers] == [1, 2]
    with pytest.raises(SourceError, match="full_attention_layers lists block 4"):
        detect(*gigachat(full_attention_layers=[4]))


# --- Mamba2 hybrids as released ----------------------------------------------------------------------


def mamba(
    module: str = "mamba", linear: tuple[int, ...] = (0, 2), root: str = "model.layers."
) -> Shapes:
    layer: Shapes = {
        f"{module}.in_proj.weight": (64 + 64 + 2 * 16 + 4, 32),
        f"{module}.conv1d.weight": (64 + 2 * 16, 1, 4),
        f"{module}.conv1d.bias": (96,),
        f"{module}.A_log": (4,),
        f"{module}.dt_bias": (4,),
        f"{module}.D": (4,),
        f"{module}.norm.weight": (64,),
        f"{module}.out_proj.weight": (32, 64),
    }
    return blocks(layer, linear, root)


SIZES = {
    "hidden_size": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def same_layers(spec: ModelSpec, name: str, indices: list[int]) -> None:
    assert (spec.name, spec.gate, spec.unit) == (name, "softplus", "head")
    assert [layer.index for layer in spec.layers] == indices
    for layer in spec.layers:
        found = (layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim)
        assert found == (2, 4, 8, 16)
        assert spec.unit_values(layer) == 16 * 8
    assert spec.default_gate_input_source == "default"


def test_bamba_granite_and_falcon_as_released() -> None:
    bamba = SIZES | {"model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1]}
    same_layers(detect(mamba(), bamba), "bamba", [0, 2])
    granite = SIZES | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
    }
    same_layers(detect(mamba(), granite), "granitemoehybrid", [0, 2])
    falcon = SIZES | {"model_type": "falcon_h1", "num_hidden_layers": 3, "mamba_d_ssm": 64}
    same_layers(detect(mamba(linear=(0, 1, 2)), falcon), "falcon_h1", [0, 1, 2])
    with pytest.raises(SourceError, match="block 1 is linear by num_hidden_layers"):
        detect(mamba(), falcon)


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1"])
def test_a_head_size_that_says_auto_follows_from_the_others(model_type: str) -> None:
    config = SIZES | {"model_type": model_type, "num_hidden_layers": 2, "mamba_d_head": "auto"}
    same_layers(detect(mamba(linear=(0, 1)), config), model_type, [0, 1])


def test_nemotron_spells_its_blocks_in_letters() -> None:
    sizes = {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "conv_kernel": 4,
    }
    config = sizes | {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}
    shapes = mamba("mixer", root="backbone.layers.")
    same_layers(detect(shapes, config), "nemotron_h", [0, 2])
    nested = {"model_type": "NemotronH_Nano_VL_V2", "llm_config": config}
    same_layers(
        detect(mamba("mixer", root="language_model.backbone.layers."), nested), "nemotron_h", [0, 2]
    )
    with pytest.raises(SourceError, match="block 3 is linear by hybrid_override_pattern"):
        detect(shapes, config | {"hybrid_override_pattern": "M-MM"})


def test_zamba_keeps_some_of_its_layers_one_level_deeper() -> None:
    config = {
        "model_type": "zamba2",
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "mamba", "hybrid"],
        "hidden_size": 32,
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }
    shapes = mamba(linear=(0, 1)) | mamba("mamba_decoder.mamba", (2,))
    spec = detect(shapes, config)
    same_layers(spec, "zamba2", [0, 1, 2])
    assert spec.layers[2].prefix == "model.layers.2.mamba_decoder.mamba."


def test_mamba1_is_no_mamba2() -> None:
    shapes = mamba() | blocks({"mamba.x_proj.weight": (12, 64)}, (0, 2))
    config = SIZES | {"model_type": "jamba", "num_hidden_layers": 3}
    with pytest.raises(UnsupportedModel, match="layer layout is not known"):
        detect(shapes, config)


def test_wrong_convolution_of_a_mamba2_layer_is_refused() -> None:
    shapes = mamba() | {"model.layers.2.mamba.conv1d.weight": (97, 1, 4)}
    config = SIZES | {"model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1]}
    with pytest.raises(NumericError, match="have 97 channels, expected 96"):
        detect(shapes, config)


# --- hostile numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [10**400, 0, -1, float("nan"), float("inf"), "two", None, True])
def test_a_factor_that_is_no_sensible_number_is_named(value: Any) -> None:
    with pytest.raises(SourceError, match=r"head_dim \* expand_v"):
        detect(*fla_gdn(expand_v=value))


@pytest.mark.parametrize("value", [-(10**400), 0, 10**400, float("nan"), float("-inf")])
def test_a_bound_that_is_no_sensible_number_is_refused(value: Any) -> None:
    with pytest.raises(NumericError, match="finite and below zero"):
        detect(*fla_kda(lower_bound=value))


def test_a_block_number_of_five_thousand_digits_is_no_block() -> None:
    shapes, config = fla_gdn()
    shapes[f"model.layers.{'9' * 5000}.attn.A_log"] = (4,)
    assert len(detect(shapes, config).layers) == 2


def test_a_null_text_config_is_none() -> None:
    shapes, config = fla_gdn()
    assert detect(shapes, config | {"text_config": None}).name == "fla_gated_deltanet"


# --- lists ---------------------------------------------------------------------------------------------


def test_ling_may_list_its_linear_blocks_with_ones() -> None:
    layer: Shapes = {f"attention.{x}_proj.weight": (16, 8) for x in ("q", "k", "v", "f", "g")} | {
        "attention.A_log": (2,),
        "attention.dt_bias": (16,),
    }
    config = {
        "model_type": "bailing_hybrid",
        "num_hidden_layers": 3,
        "layer_group_size": [1, 0, 1],
        "num_attention_heads": 2,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "kda_lower_bound": -5,
    }
    spec = detect(blocks(layer, (0, 2)), config)
    assert [found.index for found in spec.layers] == [0, 2]


def test_every_family_is_reached_by_a_test() -> None:
    from tests.families.saved import MODELS
    from tests.released import RELEASES

    here = {"fla_gated_deltanet", "fla_kda", "alice_ai", "gigachat3_5"}
    reached = here | {m.family for m in MODELS.values()} | {r.family for r in RELEASES}
    assert reached == {family.name for family in FAMILIES}
