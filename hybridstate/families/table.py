"""The architectures, as data. A new model is a new entry here and nothing else."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from hybridstate.families.spec import AxisRule, Family, Geometry, LayerRule, Runtime, Segment


def _rows(*segments: Segment) -> tuple[AxisRule, ...]:
    return (AxisRule(0, segments),)


def _columns(*segments: Segment) -> tuple[AxisRule, ...]:
    return (AxisRule(1, segments),)


_Axes = Mapping[str, tuple[AxisRule, ...]]

_GDN_DECAY: Final[dict[str, tuple[AxisRule, ...]]] = {
    "A_log": _rows("value_heads"),
    "dt_bias": _rows("value_heads"),
}

_FLAT_GDN: Final[_Axes] = MappingProxyType(
    _GDN_DECAY
    | {
        "in_proj_qkv.weight": _rows("key_rows", "key_rows", "value_rows"),
        "in_proj_z.weight": _rows("value_rows"),
        "in_proj_b.weight": _rows("value_heads"),
        "in_proj_a.weight": _rows("value_heads"),
        "conv1d.weight": _rows("key_rows", "key_rows", "value_rows"),
        "norm.weight": _rows("value_shared"),
        "out_proj.weight": _columns("value_rows"),
    }
)

_PACKED_GDN: Final[_Axes] = MappingProxyType(
    _GDN_DECAY
    | {
        "in_proj_qkvz.weight": _rows("qkvz_groups"),
        "in_proj_ba.weight": _rows("ba_groups"),
        # flat although the projection above is grouped
        "conv1d.weight": _rows("key_rows", "key_rows", "value_rows"),
        "norm.weight": _rows("value_shared"),
        "out_proj.weight": _columns("value_rows"),
    }
)

_SPLIT_GDN: Final[_Axes] = MappingProxyType(
    _GDN_DECAY
    | {
        "q_proj.weight": _rows("key_rows"),
        "k_proj.weight": _rows("key_rows"),
        "v_proj.weight": _rows("value_rows"),
        "g_proj.weight": _rows("value_rows"),
        "a_proj.weight": _rows("value_heads"),
        "b_proj.weight": _rows("value_heads"),
        "q_conv1d.weight": _rows("key_rows"),
        "k_conv1d.weight": _rows("key_rows"),
        "v_conv1d.weight": _rows("value_rows"),
        "o_norm.weight": _rows("value_shared"),
        "o_proj.weight": _columns("value_rows"),
    }
)

_KDA_COMMON: Final[dict[str, tuple[AxisRule, ...]]] = {
    "q_proj.weight": _rows("key_rows"),
    "k_proj.weight": _rows("key_rows"),
    "v_proj.weight": _rows("value_rows"),
    "b_proj.weight": _rows("value_heads"),
    "q_conv1d.weight": _rows("key_rows"),
    "k_conv1d.weight": _rows("key_rows"),
    "v_conv1d.weight": _rows("value_rows"),
    "dt_bias": _rows("key_rows"),
    "o_norm.weight": _rows("value_shared"),
}
_LOW_RANK_F: Final = {"f_a_proj.weight": (), "f_b_proj.weight": _rows("key_rows")}
_LOW_RANK_G: Final = {"g_a_proj.weight": (), "g_b_proj.weight": _rows("value_rows")}
_FULL_RANK_G: Final = {"g_proj.weight": _rows("value_rows")}
_O_PROJ: Final = {"o_proj.weight": _columns("value_rows")}

_KIMI_A_LOG: Final = {"A_log": (AxisRule(2, ("value_heads",)),)}  # stored as [1, 1, H, 1]
_FLAT_A_LOG: Final = {"A_log": _rows("value_heads")}
_PADDED_A_LOG: Final = {"A_log": _rows("value_heads", "padding")}

_GDN_GEOMETRY: Final = Geometry(
    key_heads=("linear_num_key_heads",),
    value_heads=("linear_num_value_heads",),
    key_dim=("linear_key_head_dim",),
    value_dim=("linear_value_head_dim",),
    conv_width=("linear_conv_kernel_dim",),
)

# The top-level head_dim of these configs belongs to the full-attention layers.
_KDA_GEOMETRY: Final = Geometry(
    key_heads=("linear_attn_config.num_heads", "linear_num_heads"),
    value_heads=("linear_attn_config.num_heads", "linear_num_heads"),
    key_dim=("linear_attn_config.head_dim", "linear_head_dim"),
    value_dim=("linear_attn_config.head_dim", "linear_head_dim"),
    conv_width=("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"),
)

_LAYER_TYPES: Final = LayerRule("names", "layer_types", ("linear_attention",))
_INTERVAL: Final = LayerRule("interval", "full_attention_interval")


def _gdn_runtime(package: str, class_prefix: str) -> Runtime:
    return Runtime(
        module=f"transformers.models.{package}.modeling_{package}",
        prefill="torch_chunk_gated_delta_rule",
        decode="torch_recurrent_gated_delta_rule",
        attribute="linear_attn",
        linear_class=f"{class_prefix}GatedDeltaNet",
        causal_lm=f"{class_prefix}ForCausalLM",
    )


def _kda_runtime(package: str, linear_class: str, causal_lm: str) -> Runtime:
    return Runtime(
        module=f"transformers.models.{package}.modeling_{package}",
        prefill="chunk_kimi_delta_attention",
        decode="recurrent_kimi_delta_attention",
        attribute="self_attn",
        linear_class=linear_class,
        causal_lm=causal_lm,
    )


_QWEN3_5: Final = Family(
    name="qwen3_5",
    kind="gdn",
    model_types=("qwen3_5", "qwen3_5_text"),
    module="linear_attn",
    present=("in_proj_qkv.weight", "in_proj_a.weight"),
    absent=("in_proj_qkvz.weight",),
    geometry=_GDN_GEOMETRY,
    layer_rules=(_LAYER_TYPES, _INTERVAL),
    axes=_FLAT_GDN,
    runtime=_gdn_runtime("qwen3_5", "Qwen3_5"),
)

_KIMI_LINEAR: Final = Family(
    name="kimi_linear",
    kind="kda",
    model_types=("kimi_linear",),
    module="self_attn",
    present=("f_a_proj.weight", "f_b_proj.weight", "g_a_proj.weight"),
    absent=("g_proj.weight",),
    geometry=_KDA_GEOMETRY,
    layer_rules=(LayerRule("one_based", "linear_attn_config.kda_layers"), _LAYER_TYPES),
    axes=MappingProxyType(_KDA_COMMON | _KIMI_A_LOG | _LOW_RANK_F | _LOW_RANK_G | _O_PROJ),
    runtime=_kda_runtime("kimi_linear", "KimiLinearDeltaAttention", "KimiLinearForCausalLM"),
    lower_bound=("linear_attn_config.gate_lower_bound", "linear_lower_bound"),
)

FAMILIES: Final[tuple[Family, ...]] = (
    _QWEN3_5,
    replace(
        _QWEN3_5,
        name="qwen3_5_moe",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        runtime=_gdn_runtime("qwen3_5_moe", "Qwen3_5Moe"),
    ),
    replace(
        _QWEN3_5,
        name="qwen3_next",
        model_types=("qwen3_next",),
        present=("in_proj_qkvz.weight", "in_proj_ba.weight"),
        absent=("in_proj_qkv.weight",),
        axes=_PACKED_GDN,
        runtime=_gdn_runtime("qwen3_next", "Qwen3Next"),
    ),
    replace(
        _QWEN3_5,
        name="olmo_hybrid",
        model_types=("olmo_hybrid",),
        present=("q_proj.weight", "a_proj.weight"),
        absent=("in_proj_qkv.weight", "in_proj_qkvz.weight"),
        layer_rules=(_LAYER_TYPES,),
        axes=_SPLIT_GDN,
        runtime=_gdn_runtime("olmo_hybrid", "OlmoHybrid"),
    ),
    _KIMI_LINEAR,
    # Its text config calls itself kimi_linear: the full-rank output gate tells them apart.
    replace(
        _KIMI_LINEAR,
        name="kimi_k3",
        model_types=("kimi_k3", "kimi_linear"),
        present=("f_a_proj.weight", "f_b_proj.weight", "g_proj.weight"),
        absent=("g_a_proj.weight",),
        axes=MappingProxyType(_KDA_COMMON | _PADDED_A_LOG | _LOW_RANK_F | _FULL_RANK_G | _O_PROJ),
        runtime=None,
        gate="safe",
        a_log_padded=True,
    ),
    # Same key as Kimi's, but its kda_layers count from zero.
    replace(
        _KIMI_LINEAR,
        name="glm5_next",
        model_types=("glm5_next", "glm5_next_text"),
        layer_rules=(_LAYER_TYPES, LayerRule("zero_based", "linear_attn_config.kda_layers")),
        axes=MappingProxyType(_KDA_COMMON | _FLAT_A_LOG | _LOW_RANK_F | _LOW_RANK_G | _O_PROJ),
        runtime=_kda_runtime(
            "glm5_next", "Glm5NextTextLinearAttention", "Glm5NextForConditionalGeneration"
        ),
        gate="safe",
    ),
    replace(
        _KIMI_LINEAR,
        name="bailing_hybrid",
        model_types=("bailing_hybrid", "bailing_moe_v3_vl"),
        module="attention",
        present=("f_proj.weight", "g_proj.weight"),
        absent=("f_a_proj.weight",),
        geometry=Geometry(
            key_heads=("num_attention_heads",),
            value_heads=("num_attention_heads",),
            key_dim=("linear_head_dim", "head_dim"),
            value_dim=("linear_head_dim", "head_dim"),
            conv_width=("short_conv_kernel_size", "linear_conv_kernel_dim"),
        ),
        layer_rules=(_LAYER_TYPES, LayerRule("interval", "layer_group_size")),
        axes=MappingProxyType(
            _KDA_COMMON
            | _FLAT_A_LOG
            | {"f_proj.weight": _rows("key_rows")}
            | _FULL_RANK_G
            | {"dense.weight": _columns("value_rows")}
        ),
        runtime=_kda_runtime(
            "bailing_hybrid", "BailingHybridDeltaAttention", "BailingHybridForCausalLM"
        ),
        gate="safe",
        lower_bound=("kda_lower_bound", "linear_lower_bound"),
    ),
)

FIXED_SLOPE_MODEL_TYPES: Final = (
    "minimax",
    "minimax_text_01",
    "minimax_m1",
    "bailing_moe_linear",
    "bailing_hybrid",  # Ling-2.x; Ling-3 shares the name and has A_log
)
"""Where A_log is absent, the decay is a constant per head: there is no learned horizon to read."""

IGNORED_COMPONENTS: Final = ("mtp", "visual", "vision_tower", "vision_model", "mm_projector")
"""First or inner components of tensor names outside the text stack."""
