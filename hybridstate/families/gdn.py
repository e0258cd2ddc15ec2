"""Gated DeltaNet: one decay per value head, softplus gate. One entry per architecture."""

from dataclasses import replace
from typing import Final

from hybridstate.families.axes import (
    FLAT_GDN,
    HEAD_DECAY,
    ONE_PROJECTION_GDN,
    PACKED_GDN,
    SPLIT_GDN,
    SPLIT_QKV,
    columns,
    rows,
    table,
)
from hybridstate.families.spec import Family, Geometry, LayerRule, Runtime

LINEAR_GEOMETRY: Final = Geometry(
    key_heads=("linear_num_key_heads",),
    value_heads=("linear_num_value_heads",),
    key_dim=("linear_key_head_dim",),
    value_dim=("linear_value_head_dim",),
    conv_width=("linear_conv_kernel_dim",),
)

LAYER_TYPES: Final = LayerRule("names", "layer_types", ("linear_attention",))
_INTERVAL: Final = LayerRule("interval", "full_attention_interval")


def _runtime(package: str, class_prefix: str, linear_class: str | None = None) -> Runtime:
    return Runtime(
        module=f"transformers.models.{package}.modeling_{package}",
        prefill="torch_chunk_gated_delta_rule",
        decode="torch_recurrent_gated_delta_rule",
        attribute="linear_attn",
        linear_class=linear_class or f"{class_prefix}GatedDeltaNet",
        causal_lm=f"{class_prefix}ForCausalLM",
    )


# Qwen3.5, 3.6 and 3.8 share one class; A_log and the norm are F32 in 3.5 and BF16 in 3.6.
QWEN3_5: Final = Family(
    name="qwen3_5",
    kind="gdn",
    model_types=("qwen3_5", "qwen3_5_text"),
    modules=("linear_attn",),
    present=("in_proj_qkv.weight", "in_proj_a.weight"),
    absent=("in_proj_qkvz.weight",),
    geometry=LINEAR_GEOMETRY,
    layer_rules=(LAYER_TYPES, _INTERVAL),
    axes=FLAT_GDN,
    runtime=_runtime("qwen3_5", "Qwen3_5"),
)

QWEN3_NEXT: Final = replace(
    QWEN3_5,
    name="qwen3_next",
    model_types=("qwen3_next",),
    present=("in_proj_qkvz.weight", "in_proj_ba.weight"),
    absent=("in_proj_qkv.weight",),
    axes=PACKED_GDN,
    runtime=_runtime("qwen3_next", "Qwen3Next"),
)

GDN_FAMILIES: Final[tuple[Family, ...]] = (
    QWEN3_5,
    replace(
        QWEN3_5,
        name="qwen3_5_moe",
        model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
        runtime=_runtime("qwen3_5_moe", "Qwen3_5Moe"),
    ),
    # Sigmoid output gate; block types besides linear_attention differ between releases and transformers.
    replace(
        QWEN3_5,
        name="qwen4_exp",
        model_types=(
            "qwen4_exp",
            "qwen4_exp_text",
            "qwen3_8_flash_next",  # its later name
            "qwen3_8_flash_next_text",
        ),
        runtime=_runtime("qwen4_exp", "Qwen4Exp", "Qwen4ExpTextGatedDeltaNet"),
    ),
    QWEN3_NEXT,
    # Qwen3-Next's packed projections under the attention's own name; the config lists the other blocks.
    replace(
        QWEN3_NEXT,
        name="gigachat3_5",
        model_types=("gigachat3_5",),
        architectures=("GigaChat35ForCausalLM",),
        modules=("self_attn",),
        layer_rules=(LayerRule("except_zero_based", "full_attention_layers"), LAYER_TYPES),
        runtime=None,
    ),
    replace(
        QWEN3_5,
        name="olmo_hybrid",
        model_types=("olmo_hybrid",),
        present=("q_proj.weight", "a_proj.weight"),
        absent=("in_proj_qkv.weight", "in_proj_qkvz.weight"),
        layer_rules=(LAYER_TYPES,),
        axes=SPLIT_GDN,
        runtime=_runtime("olmo_hybrid", "OlmoHybrid"),
    ),
    replace(
        QWEN3_5,
        name="lara_mini",
        model_types=("lara_mini",),
        present=("in_proj.weight", "out_norm.weight"),
        absent=("in_proj_qkv.weight",),
        layer_rules=(LAYER_TYPES,),
        axes=ONE_PROJECTION_GDN,
        runtime=_runtime("lara_mini", "LaraMini"),
    ),
    # q and k pass no convolution; v passes one whose kernel is generated from the input. That generator is left out
    # of the axes, so nobody permutes its weights by mistake.
    replace(
        QWEN3_5,
        name="jet_nemotron",
        model_types=("jet_nemotron", "jet_vlm"),
        modules=("self_attn",),
        present=("q_proj.weight", "a_proj.weight", "g_proj.weight"),
        absent=("q_conv1d.weight", "f_a_proj.weight", "in_proj_qkvz.weight"),
        geometry=Geometry(
            key_heads=("efficient_attention_config.jet.num_heads",),
            value_heads=("efficient_attention_config.jet.num_heads",),
            key_dim=("efficient_attention_config.jet.head_dim",),
            value_dim=(
                "efficient_attention_config.jet.head_dim * efficient_attention_config.jet.expand_v",
            ),
            conv_width=("efficient_attention_config.jet.conv_size",),
        ),
        layer_rules=(LayerRule("names", "layer_types", ("jet",)),),
        axes=table(
            HEAD_DECAY,
            SPLIT_QKV,
            {
                "g_proj.weight": rows("value_rows"),
                "a_proj.weight": rows("value_heads"),
                "b_proj.weight": rows("value_heads"),
                "o_norm.weight": rows("value_shared"),
                "o_proj.weight": columns("value_rows"),
            },
        ),
        conv=("value_rows",),
        runtime=None,
    ),
    # Checkpoints of flash-linear-attention's own models.
    replace(
        QWEN3_5,
        name="fla_gated_deltanet",
        model_types=("gated_deltanet",),
        modules=("attn",),
        present=("q_proj.weight", "a_proj.weight"),
        absent=("f_proj.0.weight",),
        geometry=Geometry(
            key_heads=("num_heads",),
            value_heads=("num_v_heads", "num_heads"),
            key_dim=("head_dim",),
            value_dim=("head_dim * expand_v",),
            conv_width=("conv_size",),
            conv_switch="use_short_conv",
        ),
        layer_rules=(LayerRule("except_zero_based", "attn.layers"),),
        axes=SPLIT_GDN,
        runtime=None,
    ),
)
