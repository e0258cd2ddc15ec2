"""Configurations of the two embedded models and the released checkpoint layout they are written in."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = (
    264  # 256 byte values, <|pad|>, <|bos|>, <|eos|>, and five unused rows up to a multiple of 8
)
PAD, BOS, EOS = 256, 257, 258
KINDS = ("gdn", "kda")
NAMES = {"gdn": "tiny-gdn", "kda": "tiny-kda"}


def gdn_config() -> dict[str, Any]:
    """Flat ``qwen3_5_text`` configuration: 6 GDN layers of 4 key and 8 value heads, 2 attention layers."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": 160,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def kda_config() -> dict[str, Any]:
    """``kimi_linear`` configuration: 6 KDA layers of 4 heads, 2 MLA layers, every MLP dense."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": 192,
        "intermediate_size": 384,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
        "hidden_act": "silu",
        "model_max_length": 8192,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "use_cache": True,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 8,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "linear_attn_config": {
            "full_attn_layers": [4, 8],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "head_dim": 128,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


CONFIGS = {"gdn": gdn_config, "kda": kda_config}


def build(kind: str, *, smoke: bool = False) -> nn.Module:
    """Return a float32 model of ``kind`` ("gdn" or "kda") with transformers' own modules.

    ``smoke`` shrinks it (heads of 16, hidden size 32) for tests of the training loop on a CPU.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = CONFIGS[kind]()
    values.pop("architectures")
    if smoke and kind == "gdn":
        values |= {"hidden_size": 32, "intermediate_size": 48}
        values |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        values |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    elif smoke:
        values |= {"hidden_size": 32, "intermediate_size": 48}
        values["linear_attn_config"] |= {"head_dim": 16, "num_heads": 2}
    values["dtype"] = "float32"
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.float()


def released(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Return the state of ``model`` under the names, shapes and dtypes of the released checkpoints.

    GDN: ``model.language_model.layers.*``, ``A_log`` and the gated norm F32, the rest BF16, tied head left out.
    KDA: ``forget_gate`` level removed, the convolution split into q, k and v, ``A_log`` [1,1,H,1] and flat
    ``dt_bias`` F32, the rest BF16.
    """
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        tensor = value.detach().cpu().clone().contiguous()
        if kind == "gdn":
            if name == "lm_head.weight":
                continue
            keep = name.endswith(("A_log", "linear_attn.norm.weight"))
            name = name.replace("model.", "model.language_model.", 1)
            out[name] = tensor.float() if keep else tensor.bfloat16()
            continue
        name = name.replace(".forget_gate.", ".")
        if name.endswith("self_attn.conv1d.weight"):
            for letter, part in zip("qkv", tensor.chunk(3, 0), strict=True):
                out[name.replace("conv1d", f"{letter}_conv1d")] = part.contiguous().bfloat16()
            continue
        out[name] = tensor.float() if name.endswith(("A_log", "dt_bias")) else tensor.bfloat16()
    return out


def round_to_release(model: nn.Module, kind: str) -> None:
    """Round every parameter of ``model`` in place to the value that the released file stores."""
    keep = ("A_log", "linear_attn.norm.weight") if kind == "gdn" else ("A_log", "dt_bias")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(keep):
                parameter.copy_(parameter.bfloat16().float())


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer: token ``i < 256`` is the byte ``i``, then pad, bos and eos."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    vocab: dict[str, int] = {}
    hidden = 0
    for byte in range(256):
        vocab[chr(byte) if byte in visible else chr(256 + hidden)] = byte
        hidden += byte not in visible
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|pad|>", "<|bos|>", "<|eos|>")
    tokenizer.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": names[0],
        "bos_token": names[1],
        "eos_token": names[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def write_release(model: nn.Module, kind: str, folder: Path, *, config: bool = True) -> None:
    """Write ``model`` to ``folder`` as a released checkpoint (configuration, weights, tokenizer)."""
    from safetensors.torch import save_file

    folder = Path(folder)
    target = folder.with_name(folder.name + ".partial")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    save_file(released(model, kind), target / "model.safetensors", metadata={"format": "pt"})
    if config:
        (target / "config.json").write_text(json.dumps(CONFIGS[kind](), indent=2) + "\n")
        write_tokenizer(target)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(target, folder)


def load_released(model: nn.Module, kind: str, file: Path) -> None:
    """Load a released weights file back into ``model`` built by `build`."""
    from safetensors.torch import load_file

    state: dict[str, Tensor] = {}
    for name, tensor in load_file(str(file)).items():
        name = name.replace("model.language_model.", "model.", 1)
        if kind == "kda":
            name = name.replace("self_attn.A_log", "self_attn.forget_gate.A_log")
            name = name.replace("self_attn.dt_bias", "self_attn.forget_gate.dt_bias")
            for part in ("f_a_proj", "f_b_proj"):
                name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        state[name] = tensor.float()
    for name in [n for n in state if n.endswith("q_conv1d.weight")]:
        stem = name.removesuffix("q_conv1d.weight")
        parts = [state.pop(f"{stem}{letter}_conv1d.weight") for letter in "qkv"]
        state[f"{stem}conv1d.weight"] = torch.cat(parts)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or [n for n in missing if n != "lm_head.weight"]:
        raise ValueError(f"{file}: missing {missing}, unexpected {unexpected}")
