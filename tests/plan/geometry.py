"""The real models of the two papers, by the facts of their configs: geometry, no weights."""

from collections.abc import Mapping
from typing import Any

from hybridstate.families import ModelSpec, detect


def _gdn(model_type: str, layers: int, present: Mapping[str, int]) -> ModelSpec:
    config = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        if (i + 1) % 4:
            prefix = f"model.layers.{i}.linear_attn."
            shapes |= {prefix + "A_log": (32,), prefix + "dt_bias": (32,)}
            shapes |= {prefix + name: (rows, 2048) for name, rows in present.items()}
    return detect(shapes, config)


def _kda(
    model_type: str,
    layers: int,
    full: set[int],
    heads: int,
    a_log: tuple[int, ...],
    gate: dict[str, Any],
) -> ModelSpec:
    """`full` holds the 1-based full-attention blocks, as the released configs list them."""
    linear = [i + 1 for i in range(layers) if i + 1 not in full]
    text = {
        "model_type": "kimi_linear",
        "num_hidden_layers": layers,
        "linear_attn_config": {
            "kda_layers": linear,
            "full_attn_layers": sorted(full),
            "num_heads": heads,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        }
        | gate,
    }
    config = (
        text if model_type == "kimi_linear" else {"model_type": model_type, "text_config": text}
    )
    rows = heads * 128
    output_gate = {"g_proj.weight": rows} if gate else {"g_a_proj.weight": 128}
    present = {"f_a_proj.weight": 128, "f_b_proj.weight": rows} | output_gate
    shapes: dict[str, tuple[int, ...]] = {}
    for block in linear:
        prefix = f"model.layers.{block - 1}.self_attn."
        shapes |= {prefix + "A_log": a_log, prefix + "dt_bias": (rows,)}
        shapes |= {prefix + name: (size, 2304) for name, size in present.items()}
    return detect(shapes, config)


SPECS: dict[str, ModelSpec] = {
    "kimi_linear": _kda(
        "kimi_linear", 27, {4, 8, 12, 16, 20, 24, 27}, 32, a_log=(1, 1, 32, 1), gate={}
    ),
    "qwen3_next": _gdn("qwen3_next", 48, {"in_proj_qkvz.weight": 12288, "in_proj_ba.weight": 64}),
    "qwen36_35b": _gdn("qwen3_5_moe", 40, {"in_proj_qkv.weight": 8192, "in_proj_a.weight": 32}),
    # A_log holds 128 entries of which 96 are heads
    "kimi_k3": _kda(
        "kimi_k3",
        93,
        {*range(4, 93, 4), 93},
        96,
        a_log=(128,),
        gate={"gate_lower_bound": -5.0, "use_full_rank_gate": True},
    ),
}
