"""Kimi Delta Attention: one decay per (head, key channel). One entry per architecture.

The gate is softplus unless the config states a lower bound; families marked `safe` require one.
"""

from dataclasses import replace
from typing import Final

from hybridstate.families.axes import (
    FLAT_A_LOG,
    FOUR_AXIS_A_LOG,
    FULL_RANK_G,
    KDA_SHARED,
    LOW_RANK_F,
    LOW_RANK_G,
    O_PROJ,
    PADDED_A_LOG,
    columns,
    rows,
    table,
)
from hybridstate.families.gdn import LAYER_TYPES, LINEAR_GEOMETRY
from hybridstate.families.spec import Family, Geometry, LayerRule, Runtime

# The top-level head_dim of these configs belongs to the full-attention layers.
_GEOMETRY: Final = Geometry(
    key_heads=("linear_attn_config.num_heads", "linear_num_heads"),
    value_heads=("linear_attn_config.num_heads", "linear_num_heads"),
    key_dim=("linear_attn_config.head_dim", "linear_head_dim"),
    value_dim=("linear_attn_config.head_dim", "linear_head_dim"),
    conv_width=("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"),
)


def _runtime(package: str, linear_class: str, causal_lm: str) -> Runtime:
    return Runtime(
        module=f"transformers.models.{package}.modeling_{package}",
        prefill="chunk_kimi_delta_attention",
        decode="recurrent_kimi_delta_attention",
        attribute="self_attn",
        linear_class=linear_class,
        causal_lm=causal_lm,
    )


KIMI_LINEAR: Final = Family(
    name="kimi_linear",
    kind="kda",
    model_types=("kimi_linear",),
    modules=("self_attn",),
    present=("f_a_proj.weight", "f_b_proj.weight", "g_a_proj.weight"),
    absent=("g_proj.weight",),
    geometry=_GEOMETRY,
    layer_rules=(LayerRule("one_based", "linear_attn_config.kda_layers"), LAYER_TYPES),
    axes=table(KDA_SHARED, FOUR_AXIS_A_LOG, LOW_RANK_F, LOW_RANK_G, O_PROJ),
    runtime=_runtime("kimi_linear", "KimiLinearDeltaAttention", "KimiLinearForCausalLM"),
    lower_bound=("linear_attn_config.gate_lower_bound", "linear_lower_bound"),
)

KDA_FAMILIES: Final[tuple[Family, ...]] = (
    KIMI_LINEAR,
    # Its text config calls itself kimi_linear: the full-rank output gate tells them apart.
    replace(
        KIMI_LINEAR,
        name="kimi_k3",
        model_types=("kimi_k3", "kimi_linear"),
        present=("f_a_proj.weight", "f_b_proj.weight", "g_proj.weight"),
        absent=("g_a_proj.weight",),
        axes=table(KDA_SHARED, PADDED_A_LOG, LOW_RANK_F, FULL_RANK_G, O_PROJ),
        runtime=None,
        gate="safe",
        a_log_padded=True,
    ),
    # Same key as Kimi's, but its kda_layers count from zero.
    replace(
        KIMI_LINEAR,
        name="glm5_next",
        model_types=("glm5_next", "glm5_next_text"),
        layer_rules=(LAYER_TYPES, LayerRule("zero_based", "linear_attn_config.kda_layers")),
        axes=table(KDA_SHARED, FLAT_A_LOG, LOW_RANK_F, LOW_RANK_G, O_PROJ),
        runtime=_runtime(
            "glm5_next", "Glm5NextTextLinearAttention", "Glm5NextForConditionalGeneration"
        ),
        gate="safe",
    ),
    # Ling-3; Ling-2 has the same model type and no A_log. The output projection of a linear layer is o_proj in the
    # release and dense after transformers has saved it.
    replace(
        KIMI_LINEAR,
        name="bailing_hybrid",
        model_types=("bailing_hybrid", "bailing_moe_v3_vl"),
        architectures=("BailingMoeV3ForCausalLM",),
        modules=("attention",),
        present=("f_proj.weight", "g_proj.weight"),
        absent=("f_a_proj.weight",),
        geometry=Geometry(
            key_heads=("num_attention_heads",),
            value_heads=("num_attention_heads",),
            key_dim=("linear_head_dim", "head_dim"),
            value_dim=("linear_head_dim", "head_dim"),
            conv_width=("short_conv_kernel_size", "linear_conv_kernel_dim"),
        ),
        layer_rules=(LAYER_TYPES, LayerRule("whole_groups", "layer_group_size")),
        axes=table(
            KDA_SHARED,
            FLAT_A_LOG,
            {"f_proj.weight": rows("key_rows")},
            FULL_RANK_G,
            O_PROJ,
            {"dense.weight": columns("value_rows")},
        ),
        runtime=_runtime(
            "bailing_hybrid", "BailingHybridDeltaAttention", "BailingHybridForCausalLM"
        ),
        gate="safe",
        lower_bound=("kda_lower_bound", "linear_lower_bound"),
    ),
    # Kimi's layer in a Qwen3-Next model, with A_log under another name.
    replace(
        KIMI_LINEAR,
        name="alice_ai",
        model_types=("alice_ai", "qwen3_next"),
        architectures=("AliceAIForCausalLM",),
        modules=("linear_attn",),
        absent=("in_proj_qkvz.weight",),
        geometry=LINEAR_GEOMETRY,
        layer_rules=(LAYER_TYPES, LayerRule("interval", "full_attention_interval")),
        axes=table(
            KDA_SHARED,
            {"a_log_bias": rows("value_heads")},
            LOW_RANK_F,
            LOW_RANK_G,
            O_PROJ,
        ),
        runtime=None,
        lower_bound=(),
        a_log="a_log_bias",
    ),
    # Checkpoints of flash-linear-attention's own models: value heads may share a key head.
    replace(
        KIMI_LINEAR,
        name="fla_kda",
        model_types=("kda",),
        modules=("attn",),
        present=("f_proj.0.weight", "f_proj.1.weight", "g_proj.0.weight"),
        absent=("a_proj.weight",),
        geometry=Geometry(
            key_heads=("num_heads",),
            value_heads=("num_v_heads", "num_heads"),
            key_dim=("head_dim",),
            value_dim=("head_dim * expand_v",),
            conv_width=("conv_size",),
            conv_switch="use_short_conv",
        ),
        layer_rules=(LayerRule("except_zero_based", "attn.layers"),),
        axes=table(
            KDA_SHARED,
            FLAT_A_LOG,
            {
                "dt_bias": rows("gate_rows"),
                "f_proj.0.weight": (),
                "f_proj.1.weight": rows("gate_rows"),
                "g_proj.0.weight": (),
                "g_proj.1.weight": rows("value_rows"),
                "g_proj.1.bias": rows("value_rows"),
            },
            O_PROJ,
        ),
        runtime=None,
        lower_bound=("lower_bound",),
    ),
)
