"""Released checkpoints at full size, as sparse files: names, shapes, dtypes, shards and index of the release.

Only the decay tensors hold values, drawn from a seed and labelled synthetic in the metadata of every shard; all other
bytes are holes that no reader may touch. A folder of 163 GB takes 16 MB of disk and a second to write.

`python -m tests.released NAME FOLDER` writes one by hand, `python -m tests.released` lists them.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hybridstate.checkpoint.header import DTYPE_BITS
from tests import released_layouts as layouts
from tests.released_layouts import Tensor
from tests.tiny import encode

SHARD_BYTES = 5_000_000_000
SYNTHETIC = "hybridstate test fixture: decay values are synthetic, all other bytes are holes"
DECAY_NAMES = ("A_log", "a_log_bias", "dt_bias")


@dataclass(frozen=True)
class Released:
    """One checkpoint.

    Attributes:
        name, repo: of the release on the Hub.
        family: entry of the table that has to be found.
        config: the fields of its `config.json` that say something about shapes and layers.
        tensors: (name, dtype, shape) in the order of the file.
        linear: 0-based blocks with a recurrent state.
        sizes: key heads, value heads, K, V, taps of the convolution.
        inferred: what nobody has read from the release.
    """

    name: str
    repo: str
    family: str
    config: dict[str, Any]
    tensors: Callable[[], Iterator[Tensor]]
    linear: tuple[int, ...]
    sizes: tuple[int, int, int, int, int]
    inferred: str = ""
    shard_bytes: int = SHARD_BYTES
    expected: dict[str, Any] = field(default_factory=dict)


def write(release: Released, folder: Path, *, seed: int = 0) -> Path:
    """The folder of a release: config, index, sparse shards.

    Args:
        folder: created.
        seed: of the decay values, U(-4, 2) for A_log and N(-2, 1.5) for dt_bias.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(release.config, indent=1))
    rng = np.random.Generator(np.random.PCG64(seed))
    shards = list(_shards(release))
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += _write_shard(folder / name, tensors, rng)
        weight_map.update(dict.fromkeys((tensor for tensor, _, _ in tensors), name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * DTYPE_BITS[dtype] // 8


def _shards(release: Released) -> Iterator[list[Tensor]]:
    """Tensors in order, a new shard where the next one would pass the limit."""
    shard: list[Tensor] = []
    size = 0
    for tensor in release.tensors():
        more = nbytes(tensor[1], tensor[2])
        if shard and size + more > release.shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += more
    yield shard


def _write_shard(path: Path, tensors: list[Tensor], rng: np.random.Generator) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "note": SYNTHETIC}}
    values: list[tuple[int, bytes]] = []
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
        if name.endswith(DECAY_NAMES):
            values.append((start, encode(_decay(name, shape, rng), dtype)))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for start, data in values:
            stream.seek(8 + len(text) + start)
            stream.write(data)
    os.truncate(path, 8 + len(text) + end)
    return end


def _decay(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if name.endswith("dt_bias"):
        return rng.normal(-2.0, 1.5, shape).astype(np.float32)
    return rng.uniform(-4.0, 2.0, shape).astype(np.float32)


# --- the releases ----------------------------------------------------------------------------------------------------


def _every_fourth_full(layers: int) -> tuple[int, ...]:
    return tuple(i for i in range(layers) if (i + 1) % 4)


def _types(layers: int, linear: tuple[int, ...], other: str = "full_attention") -> list[str]:
    return ["linear_attention" if i in linear else other for i in range(layers)]


_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}


def _qwen(
    name: str,
    hidden: int,
    layers: int,
    value_heads: int,
    attention: tuple[int, int],
    *,
    inner: int | None = None,
    experts: tuple[int, int] | None = None,
    decay: str = "BF16",
    text_only: bool = False,
    inferred: str = "",
) -> Released:
    linear = _every_fourth_full(layers)
    moe = experts is not None
    family = "qwen3_5_moe" if moe else "qwen3_5"
    text: dict[str, Any] = {
        "model_type": f"{family}_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "layer_types": _types(layers, linear),
        "full_attention_interval": 4,
        "num_attention_heads": attention[0],
        "num_key_value_heads": attention[1],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "tie_word_embeddings": hidden < 3000 and not moe,
        "vocab_size": 248320,
    }
    if experts is not None:
        text |= {"num_experts": experts[0], "moe_intermediate_size": experts[1]}
        text |= {"shared_expert_intermediate_size": experts[1], "num_experts_per_tok": 8}
    else:
        text |= {"intermediate_size": inner}
    class_name = "Qwen3_5Moe" if moe else "Qwen3_5"
    config: dict[str, Any]
    if text_only:
        config = {"architectures": [f"{class_name}ForCausalLM"], **text}
    else:
        config = {
            "architectures": [f"{class_name}ForConditionalGeneration"],
            "model_type": family,
            "text_config": text,
            "vision_config": _VISION,
        }
    root = "model." if text_only else "model.language_model."
    return Released(
        name=name,
        repo=f"Qwen/{name}",
        family=family,
        config=config,
        tensors=lambda: layouts.qwen(config, root=root, decay=decay),
        linear=linear,
        sizes=(16, value_heads, 128, 128, 4),
        inferred=inferred or "names and sizes of attention, MLP and vision tensors; shard split",
    )


def _qwen3_next() -> Released:
    config: dict[str, Any] = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "full_attention_interval": 4,  # and no layer_types
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }
    return Released(
        name="Qwen3-Next-80B-A3B-Instruct",
        repo="Qwen/Qwen3-Next-80B-A3B-Instruct",
        family="qwen3_next",
        config=config,
        tensors=lambda: layouts.qwen(config, root="model.", packed=True, fused=False),
        linear=_every_fourth_full(48),
        sizes=(16, 32, 128, 128, 4),
        inferred="dtypes of A_log, dt_bias and norm (BF16 assumed); order of the tensors in the shards",
        shard_bytes=4_000_000_000,
        expected={"parameters": 79_674_391_296, "shards": 41},
    )


def _qwen4_exp() -> Released:
    linear = _every_fourth_full(48)
    text: dict[str, Any] = {
        "model_type": "qwen4_exp_text",
        "hidden_size": 2560,
        "num_hidden_layers": 48,
        "layer_types": _types(48, linear),
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_layer_ids": [2],
        "ple_embed_dim": 2560,
        "ple_conv_kernel_size": 4,
        "split_ngram_parts": 128,
        "output_gate_type": "sigmoid",
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "vocab_size": 248320,
    }
    config = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": text,
        "vision_config": _VISION,
    }
    return Released(
        name="Qwen3.8-Flash-Next",
        repo="Qwen/Qwen3.8-Flash-Next",
        family="qwen4_exp",
        config=config,
        tensors=lambda: layouts.qwen4_exp(config),
        linear=linear,
        sizes=(16, 48, 128, 128, 4),
        inferred="decay dtypes; names and sizes of the n-gram tables; shard split",
    )


def _kimi_linear() -> Released:
    full = (4, 8, 12, 16, 20, 24, 27)
    config: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 72,
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
            "full_attn_layers": list(full),
            "kda_layers": [i for i in range(1, 28) if i not in full],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "vocab_size": 163840,
    }
    return Released(
        name="Kimi-Linear-48B-A3B-Instruct",
        repo="moonshotai/Kimi-Linear-48B-A3B-Instruct",
        family="kimi_linear",
        config=config,
        tensors=lambda: layouts.kimi_linear(config),
        linear=tuple(i for i in range(27) if i + 1 not in full),
        sizes=(32, 32, 128, 128, 4),
        inferred="dtypes of A_log, dt_bias (F32) and o_norm (BF16); shard split",
    )


def _kimi_k3() -> Released:
    full = [*range(4, 93, 4), 93]
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "attn_res_block_size": 12,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [i for i in range(1, 94) if i not in full],
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "vocab_size": 163840,
    }
    config = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
    }
    return Released(
        name="Kimi-K3",
        repo="moonshotai/Kimi-K3",
        family="kimi_k3",
        config=config,
        tensors=lambda: layouts.kimi_k3(config),
        linear=tuple(i for i in range(93) if i + 1 not in full),
        sizes=(96, 96, 128, 128, 4),
        inferred="sizes of the MLA, dense MLP and vision tensors; shard split",
        shard_bytes=17_000_000_000,
        expected={"expert_pairs": 247_296, "gate": ("safe", -5.0)},
    )


def _glm5_next() -> Released:
    kda = [i for i in range(45) if i % 4 != 3]
    text: dict[str, Any] = {
        "model_type": "glm5_next_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 45,
        "layer_types": _types(45, tuple(kda), "deepseek_sparse_attention"),
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "n_routed_experts": 288,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "hc_mult": 4,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_kpool": 4,
        "num_nextn_predict_layers": 1,
        "linear_attn_config": {
            "kda_layers": kda,  # counts from zero
            "full_attn_layers": [i for i in range(45) if i % 4 == 3],
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "num_heads": 64,
            "short_conv_kernel_size": 4,
        },
        "vocab_size": 154880,
    }
    config = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": text,
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "projection_intermediate_size": 10240,
        },
    }
    return Released(
        name="GLM-5.3-Flash",
        repo="zai-org/GLM-5.3-Flash",
        family="glm5_next",
        config=config,
        tensors=lambda: layouts.glm5_next(config),
        linear=tuple(kda),
        sizes=(64, 64, 128, 128, 4),
        inferred="sizes of the vision tensors; order of the tensors in the shards",
        shard_bytes=5 * 2**30,
        expected={"gate": ("safe", -5.0), "tensors": 76_108, "shards": 62},
    )


def _ling(
    name: str, *, inferred: str, expected: dict[str, Any], linear: tuple[int, ...], **sizes: Any
) -> Released:
    config = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -5,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "vocab_size": 157184,
        **sizes,
    }
    heads = config["num_attention_heads"]
    return Released(
        name=name,
        repo=f"inclusionAI/{name}",
        family="bailing_hybrid",
        config=config,
        tensors=lambda: layouts.ling3(config),
        linear=linear,
        sizes=(heads, heads, 128, 128, 4),
        inferred=inferred,
        expected={"gate": ("safe", -5.0)} | expected,
    )


def _olmo_hybrid() -> Released:
    linear = _every_fourth_full(32)
    config: dict[str, Any] = {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "layer_types": _types(32, linear),
        "num_attention_heads": 30,
        "num_key_value_heads": 30,
        "linear_num_key_heads": 30,
        "linear_num_value_heads": 30,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 100352,
    }
    return Released(
        name="Olmo-Hybrid-7B",
        repo="allenai/Olmo-Hybrid-7B",
        family="olmo_hybrid",
        config=config,
        tensors=lambda: layouts.olmo_hybrid(config),
        linear=linear,
        sizes=(30, 30, 96, 192, 4),
        inferred="decay dtypes (F32); shard split",
        expected={"tensors": 523},
    )


def _lara_mini() -> Released:
    period = (
        "linear_attention",
        "sliding_attention",
        "linear_attention",
        "full_attention",
        "sliding_attention",
    )
    types = [period[i % 5] for i in range(34)]
    config: dict[str, Any] = {
        "architectures": ["LaraMiniForCausalLM"],
        "model_type": "lara_mini",
        "hidden_size": 1024,
        "num_hidden_layers": 34,
        "layer_types": types,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "sliding_window": 512,
        "vocab_size": 151936,
    }
    return Released(
        name="Lara-4-Mini",
        repo="lara/Lara-4-Mini",
        family="lara_mini",
        config=config,
        tensors=lambda: layouts.lara_mini(config),
        linear=tuple(i for i, kind in enumerate(types) if kind == "linear_attention"),
        sizes=(8, 16, 128, 128, 4),
        inferred="everything but the class defaults of transformers; the owner on the Hub; decay dtypes",
    )


def _jet_nemotron() -> Released:
    types = ["jet"] * 14 + ["attn"] + ["jet"] * 4 + ["attn", "swa", "swa"] + ["jet"] * 6
    config: dict[str, Any] = {
        "architectures": ["JetNemotronForCausalLM"],
        "model_type": "jet_nemotron",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "layer_types": types,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "efficient_attention_config": {
            "jet": {
                "conv_size": 4,
                "dconv_generator_reduction": 8,
                "expand_v": 2.6666666667,
                "head_dim": 96,
                "norm_eps": "1e-5",
                "num_heads": 12,
            },
            "swa": {"window_size": 1152},
        },
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    }
    return Released(
        name="Jet-Nemotron-2B",
        repo="jet-ai/Jet-Nemotron-2B",
        family="jet_nemotron",
        config=config,
        tensors=lambda: layouts.jet_nemotron(config),
        linear=tuple(i for i, kind in enumerate(types) if kind == "jet"),
        sizes=(12, 12, 96, 256, 4),
        inferred="dtypes (BF16); shapes of the kernel generator",
    )


def _nemotron_h(name: str, pattern: str, *, inferred: str, **sizes: Any) -> Released:
    config: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "num_attention_heads": 32,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "vocab_size": 131072,
        **sizes,
    }
    return Released(
        name=name,
        repo=f"nvidia/{name}",
        family="nemotron_h",
        config=config,
        tensors=lambda: layouts.nemotron_h(config),
        linear=tuple(i for i, kind in enumerate(pattern) if kind == "M"),
        sizes=(8, 128, 128, 64, 4),
        inferred=inferred,
    )


_SUPER_PATTERN = (
    "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
)

RELEASES: tuple[Released, ...] = (
    _qwen3_next(),
    _qwen("Qwen3.5-0.8B", 1024, 24, 16, (8, 2), inner=3584, decay="F32"),
    _qwen("Qwen3.5-2B", 2048, 24, 16, (8, 2), inner=6144, decay="F32"),
    _qwen("Qwen3.5-4B", 2560, 32, 32, (16, 4), inner=9216, decay="F32"),
    _qwen("Qwen3.5-9B", 4096, 32, 32, (16, 4), inner=12288, decay="F32"),
    _qwen("Qwen3.5-27B", 5120, 64, 48, (24, 4), inner=17408, decay="F32"),
    _qwen("Qwen3.5-35B-A3B", 2048, 40, 32, (16, 2), experts=(256, 512), decay="F32"),
    _qwen("Qwen3.5-122B-A10B", 3072, 48, 64, (32, 2), experts=(256, 1024), decay="F32"),
    _qwen("Qwen3.5-397B-A17B", 4096, 60, 64, (32, 2), experts=(512, 1024), decay="F32"),
    _qwen("Qwen3.6-27B", 5120, 64, 48, (24, 4), inner=17408),
    _qwen("Qwen3.6-35B-A3B", 2048, 40, 32, (16, 2), experts=(256, 512)),
    _qwen("Qwen3.8-27B", 5120, 64, 48, (24, 4), inner=17408),
    _qwen(
        "Qwen3.8-2.4T-A95B",
        8192,
        92,
        128,
        (64, 4),
        experts=(512, 2048),
        text_only=True,
        inferred="decay dtypes; attention heads and expert sizes; tensor prefix; shard split",
    ),
    _qwen4_exp(),
    _kimi_linear(),
    _kimi_k3(),
    _glm5_next(),
    _ling(
        "Ling-3.0-flash",
        inferred="q_lora_rank, expert sizes and counts from transformers' defaults; shard split",
        expected={},
        linear=tuple(i for i in range(42) if (i + 1) % 6),
        hidden_size=2560,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=42,
        num_attention_heads=32,
        num_key_value_heads=32,
        layer_group_size=6,
        num_experts=512,
        first_k_dense_replace=2,
    ),
    _ling(
        "Ling-3.0-tiny",
        inferred="shard split",
        expected={"tensors": 9283},
        linear=_every_fourth_full(24),
        hidden_size=1536,
        intermediate_size=4608,
        moe_intermediate_size=512,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        layer_group_size=4,
        num_experts=128,
        first_k_dense_replace=1,
        q_lora_rank=256,
    ),
    _olmo_hybrid(),
    _lara_mini(),
    _jet_nemotron(),
    _nemotron_h(
        "Nemotron-H-8B-Base-8K",
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        inferred="dtypes; shard split",
        num_key_value_heads=8,
        intermediate_size=21504,
    ),
    _nemotron_h(
        "NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
        _SUPER_PATTERN,
        inferred="dtypes; names of the latent projections; the MTP block left out; shard split",
        num_key_value_heads=2,
        head_dim=128,
        n_routed_experts=512,
        num_experts_per_tok=22,
        moe_latent_size=1024,
        moe_intermediate_size=2688,
        moe_shared_expert_intermediate_size=5376,
    ),
)

BY_NAME = {release.name: release for release in RELEASES}


def main() -> None:
    """`python -m tests.released [NAME FOLDER]`."""
    if len(sys.argv) == 3:
        write(BY_NAME[sys.argv[1]], Path(sys.argv[2]))
        return
    for release in RELEASES:
        total = sum(nbytes(dtype, shape) for _, dtype, shape in release.tensors())
        sys.stdout.write(f"{release.name}: {release.family}, {total:,} bytes\n")


if __name__ == "__main__":
    main()
