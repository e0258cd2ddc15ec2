"""Random tiny models of every family that transformers can build, saved by transformers.

`save(name, folder)` builds one from a config of a few numbers; decay parameters are spread out afterwards, so that a
horizon computed from the wrong tensor shows.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COMMON = {"vocab_size": 97, "hidden_size": 32}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
QWEN_IDS = {
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
SOME_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16}


@dataclass(frozen=True)
class Saved:
    """One model of transformers, and what must be found in the folder it saves.

    Attributes:
        family: entry of the table.
        package, config, model: names in transformers.
        values: of the config.
        linear: 0-based blocks.
        sizes: key heads (groups), value heads, K (state size), V (head size).
    """

    family: str
    package: str
    config: str
    model: str
    values: dict[str, Any]
    linear: tuple[int, ...]
    sizes: tuple[int, int, int, int]


def _qwen_text(**more: Any) -> dict[str, Any]:
    return COMMON | ATTENTION | LINEAR | ROPE | {"num_hidden_layers": 4, "head_dim": 32} | more


_KIMI = (
    COMMON
    | MLA
    | SOME_IDS
    | {
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
)

MODELS: dict[str, Saved] = {
    "qwen3_next": Saved(
        "qwen3_next",
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        COMMON
        | ATTENTION
        | LINEAR
        | EXPERTS
        | {"intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16, "pad_token_id": 0},
        (0, 1, 2),
        (2, 4, 8, 12),
    ),
    "qwen3_5_text": Saved(
        "qwen3_5",
        "qwen3_5",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        _qwen_text(intermediate_size=48, linear_num_value_heads=6),
        (0, 1, 2),
        (2, 6, 8, 12),
    ),
    "qwen3_5_composite": Saved(
        "qwen3_5",
        "qwen3_5",
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        QWEN_IDS | {"text_config": _qwen_text(intermediate_size=48), "vision_config": VISION},
        (0, 1, 2),
        (2, 4, 8, 12),
    ),
    "qwen3_5_moe_text": Saved(
        "qwen3_5_moe",
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        _qwen_text(**EXPERTS),
        (0, 1, 2),
        (2, 4, 8, 12),
    ),
    "qwen3_5_moe_composite": Saved(
        "qwen3_5_moe",
        "qwen3_5_moe",
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        QWEN_IDS | {"text_config": _qwen_text(**EXPERTS), "vision_config": VISION},
        (0, 1, 2),
        (2, 4, 8, 12),
    ),
    "qwen4_exp": Saved(
        "qwen4_exp",
        "qwen4_exp",
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        _qwen_text(**EXPERTS)
        | {"linear_num_value_heads": 6, "hc_count": 2, "hc_lowrank": 8, "eos_token_id": 1}
        | {"output_gate_type": "sigmoid", "indexer_n_heads": 2, "indexer_kv_heads": 1}
        | {"indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4},
        (0, 1, 2),
        (2, 6, 8, 12),
    ),
    "olmo_hybrid": Saved(
        "olmo_hybrid",
        "olmo_hybrid",
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        COMMON
        | {"intermediate_size": 48, "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": 1}
        | {"num_attention_heads": 2, "num_key_value_heads": 2, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
        (0, 1, 2),
        (2, 2, 8, 16),
    ),
    "lara_mini": Saved(
        "lara_mini",
        "lara_mini",
        "LaraMiniConfig",
        "LaraMiniForCausalLM",
        COMMON
        | ATTENTION
        | LINEAR
        | EXPERTS
        | {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 8}
        | {"pad_token_id": 0, "eos_token_id": 1},
        (0, 2),
        (2, 4, 8, 12),
    ),
    "kimi_linear": Saved(
        "kimi_linear",
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        _KIMI
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1}
        | {"topk_group": 1, "linear_head_dim": 8, "linear_num_heads": 4}
        | {"linear_conv_kernel_dim": 4}
        | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        (0, 1, 2),
        (4, 4, 8, 8),
    ),
    "kimi_linear_as_released": Saved(
        "kimi_linear",
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        _KIMI
        | {"num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1}
        | {"num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {
            "linear_attn_config": {
                "full_attn_layers": [2, 4],
                "kda_layers": [1, 3],
                "head_dim": 8,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            }
        },
        (0, 2),
        (4, 4, 8, 8),
    ),
    "glm5_next": Saved(
        "glm5_next",
        "glm5_next",
        "Glm5NextConfig",
        "Glm5NextForConditionalGeneration",
        {
            "text_config": COMMON
            | {"intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 4}
            | {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4}
            | {"num_experts_per_tok": 2, "n_shared_experts": 1, "kv_lora_rank": 16}
            | {"q_lora_rank": 16, "v_head_dim": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 0}
            | {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4}
            | {"linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2, "pad_token_id": 0}
            | {"eos_token_id": 1, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "intermediate_size": 16,
                "out_hidden_size": 32,
                "projection_intermediate_size": 16,
                "patch_size": 4,
                "image_size": 16,
            },
            "image_token_id": 90,
            "video_token_id": 91,
            "image_start_token_id": 92,
            "image_end_token_id": 93,
            "video_start_token_id": 94,
            "video_end_token_id": 95,
        },
        (0, 1, 2),
        (4, 4, 8, 8),
    ),
    "bailing_hybrid": Saved(
        "bailing_hybrid",
        "bailing_hybrid",
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        COMMON
        | MLA
        | {"intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 4}
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
        | {"head_dim": 8, "layer_group_size": 4, "first_k_dense_replace": 1}
        | {"pad_token_id": 0, "eos_token_id": 2},
        (0, 1, 2),
        (4, 4, 8, 8),
    ),
    "nemotron_h": Saved(
        "nemotron_h",
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        COMMON
        | ATTENTION
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}
        | {"head_dim": 16, "intermediate_size": 48, "ssm_state_size": 8, "mamba_num_heads": 4}
        | {"mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"moe_shared_expert_intermediate_size": 16},
        (0,),
        (2, 4, 8, 16),
    ),
    "granitemoehybrid": Saved(
        "granitemoehybrid",
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        COMMON
        | ATTENTION
        | MAMBA
        | {"intermediate_size": 48, "num_hidden_layers": 2, "mamba_chunk_size": 8}
        | {"layer_types": ["full_attention", "linear_attention"]}
        | {"num_local_experts": 0, "shared_intermediate_size": 48},
        (1,),
        (1, 4, 8, 16),
    ),
    "falcon_h1": Saved(
        "falcon_h1",
        "falcon_h1",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        COMMON
        | ATTENTION
        | MAMBA
        | {"intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16, "mamba_d_ssm": 64},
        (0, 1),
        (1, 4, 8, 16),
    ),
    "bamba": Saved(
        "bamba",
        "bamba",
        "BambaConfig",
        "BambaForCausalLM",
        COMMON
        | ATTENTION
        | MAMBA
        | {"intermediate_size": 48, "num_hidden_layers": 3, "attn_layer_indices": [1]},
        (0, 2),
        (1, 4, 8, 16),
    ),
    "zamba2": Saved(
        "zamba2",
        "zamba2",
        "Zamba2Config",
        "Zamba2ForCausalLM",
        COMMON
        | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]}
        | {"mamba_d_state": 8, "n_mamba_heads": 4, "num_attention_heads": 2}
        | {"intermediate_size": 48},
        (0, 1, 2),
        (1, 4, 8, 16),
    ),
}


def available(name: str) -> bool:
    """Whether this transformers has the model."""
    saved = MODELS[name]
    return (
        importlib.util.find_spec(f"transformers.models.{saved.package}") is not None
        and _member(saved.package, saved.model) is not None
    )


def _member(package: str, name: str) -> Callable[..., Any] | None:
    import transformers

    found = getattr(transformers, name, None)
    if found is None:
        found = getattr(importlib.import_module(f"transformers.models.{package}"), name, None)
    return found


def save(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Build the model with random weights and let transformers write it."""
    saved = MODELS[name]
    config, model = _member(saved.package, saved.config), _member(saved.package, saved.model)
    assert config is not None
    assert model is not None
    torch.manual_seed(seed)
    built = model(config(**saved.values))
    with torch.no_grad():
        for parameter_name, parameter in built.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.uniform_(-6.0, 1.0)
            elif parameter_name.endswith("dt_bias"):
                parameter.normal_(-2.0, 1.0)
    built.save_pretrained(folder)
    return folder
