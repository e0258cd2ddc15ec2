"""Configs of two published models, for runs on synthetic weights of their dimensions; sizes as in their releases."""

from types import MappingProxyType
from typing import Any, Final

_KIMI_FULL: Final = (4, 8, 12, 16, 20, 24, 27)
"""Full-attention layers of Kimi-Linear, counted from one."""

CONFIGS: Final = MappingProxyType(
    {
        "Qwen3.6-35B-A3B": {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "layer_types": [
                "full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(40)
            ],
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "attn_output_gate": True,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
            "vocab_size": 248320,
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        },
        "Kimi-Linear-48B-A3B": {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "full_attn_layers": list(_KIMI_FULL),
                "kda_layers": [i for i in range(1, 28) if i not in _KIMI_FULL],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
            "vocab_size": 163840,
        },
    }
)
"""Name -> config. Multi-token-prediction blocks and vision towers, which decoding never runs, are left out."""


def published_config(name: str) -> tuple[str, dict[str, Any]] | None:
    """The name and config of a published model, given with or without its organisation and `-Instruct`."""
    wanted = name.rsplit("/", 1)[-1].removesuffix("-Instruct").lower()
    return next(
        ((known, dict(config)) for known, config in CONFIGS.items() if known.lower() == wanted),
        None,
    )
