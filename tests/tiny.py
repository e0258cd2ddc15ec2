"""Random tiny checkpoints in the layout of the released models, written without torch.

`write_checkpoint` gives a folder that `hybridstate` and transformers both open: config, BF16 shards with the
released tensor names, decay parameters in the precision of the release, optionally several shards and a
byte tokenizer. Decay parameters, `dt_bias` and norm weights are spread out, since default
initialisation (equal norms, short horizons) hides permutation and horizon bugs.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear", "olmo_hybrid")
GDN_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid")

Array = NDArray[np.float32]
Tensors = dict[str, tuple[str, Array]]
"""Tensor name -> (stored dtype `BF16` or `F32`, values)."""


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of one tiny model; attention, MLP and experts stay fixed and small."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 8
    value_dim: int = 12
    hidden: int = 32
    layers: int = 4
    conv_width: int = 4
    vocab: int = 97

    @property
    def key_rows(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_rows(self) -> int:
        return self.value_heads * self.value_dim

    def is_linear(self, layer: int) -> bool:
        """Three linear layers, then one of full attention."""
        return (layer + 1) % 4 != 0


# --- raw safetensors -------------------------------------------------------------------------


def encode(values: Array, dtype: str) -> bytes:
    """Little-endian bytes of `values`; BF16 rounds to nearest even as torch does."""
    if dtype == "F32":
        return np.ascontiguousarray(values, "<f4").tobytes()
    if dtype == "F64":
        return np.ascontiguousarray(values, "<f8").tobytes()
    if dtype != "BF16":
        raise ValueError(f"no encoder for {dtype}")
    bits = np.ascontiguousarray(values, "<f4").view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype("<u2").tobytes()


def bf16(values: Array) -> Array:
    """`values` rounded to BF16 and back, for expectations."""
    raw = np.frombuffer(encode(values, "BF16"), "<u2").astype(np.uint32) << 16
    return raw.view(np.float32).reshape(values.shape)


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, Array]]) -> None:
    """One shard: 8 bytes of header length, JSON header padded to 8, data in name order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset = 0
    for name in sorted(tensors):
        dtype, values = tensors[name]
        blob = encode(values, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


# --- one writer per family --------------------------------------------------------------------


class _Writer:
    """Draws tensors of one model from one generator, in a fixed order."""

    def __init__(self, dims: Dims, seed: int) -> None:
        self.dims = dims
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.tensors: Tensors = {}

    def weight(self, name: str, *shape: int, fan_in: int | None = None) -> None:
        scale = (fan_in or shape[-1]) ** -0.5
        values = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        self.tensors[name] = ("BF16", values)

    def uniform(
        self, name: str, shape: tuple[int, ...], low: float, high: float, dtype: str
    ) -> None:
        self.tensors[name] = (dtype, self.rng.uniform(low, high, shape).astype(np.float32))

    def norm(self, name: str, size: int, *, centred: bool = False, dtype: str = "BF16") -> None:
        """RMSNorm weight; `centred` for the classes that multiply by 1 + w."""
        low, high = (-0.5, 0.5) if centred else (0.5, 1.5)
        self.uniform(name, (size,), low, high, dtype)

    def decay(self, prefix: str, a_shape: tuple[int, ...], dt_size: int, *, dtypes: str) -> None:
        a_dtype, dt_dtype = dtypes.split("/")
        self.uniform(prefix + "A_log", a_shape, -6.0, 1.0, a_dtype)
        values = (self.rng.standard_normal(dt_size) - 2.0).astype(np.float32)
        self.tensors[prefix + "dt_bias"] = (dt_dtype, values)

    def dense_mlp(self, prefix: str, intermediate: int = 48) -> None:
        self.weight(prefix + "gate_proj.weight", intermediate, self.dims.hidden)
        self.weight(prefix + "up_proj.weight", intermediate, self.dims.hidden)
        self.weight(prefix + "down_proj.weight", self.dims.hidden, intermediate)

    def softmax_attention(self, prefix: str, head_dim: int, *, gated: bool, norms: bool) -> None:
        """Two query heads and one key head (Qwen), or two of each (OLMo)."""
        hidden = self.dims.hidden
        key_heads = 1 if gated else 2
        self.weight(prefix + "q_proj.weight", (4 if gated else 2) * head_dim, hidden)
        self.weight(prefix + "k_proj.weight", key_heads * head_dim, hidden)
        self.weight(prefix + "v_proj.weight", key_heads * head_dim, hidden)
        self.weight(prefix + "o_proj.weight", hidden, 2 * head_dim)
        size = head_dim if norms else hidden
        self.norm(prefix + "q_norm.weight", size, centred=norms)
        self.norm(prefix + "k_norm.weight", size, centred=norms)

    def conv(self, name: str, rows: int) -> None:
        self.weight(name, rows, 1, self.dims.conv_width, fan_in=self.dims.conv_width)


def _qwen(dims: Dims, seed: int, family: str) -> tuple[Tensors, dict[str, Any]]:
    """Qwen3.5 (flat projections) and Qwen3-Next (packed projections)."""
    packed = family == "qwen3_next"
    experts = family == "qwen3_5_moe"
    root = "model." if packed else "model.language_model."
    head_dim = 16 if packed else 32
    w = _Writer(dims, seed)
    d = dims
    w.weight(root + "embed_tokens.weight", d.vocab, d.hidden)
    for i in range(d.layers):
        layer = f"{root}layers.{i}."
        w.norm(layer + "input_layernorm.weight", d.hidden, centred=True)
        w.norm(layer + "post_attention_layernorm.weight", d.hidden, centred=True)
        if d.is_linear(i):
            p = layer + "linear_attn."
            if packed:
                w.weight(p + "in_proj_qkvz.weight", 2 * (d.key_rows + d.value_rows), d.hidden)
                w.weight(p + "in_proj_ba.weight", 2 * d.value_heads, d.hidden)
            else:
                w.weight(p + "in_proj_qkv.weight", 2 * d.key_rows + d.value_rows, d.hidden)
                w.weight(p + "in_proj_z.weight", d.value_rows, d.hidden)
                w.weight(p + "in_proj_b.weight", d.value_heads, d.hidden)
                w.weight(p + "in_proj_a.weight", d.value_heads, d.hidden)
            w.conv(p + "conv1d.weight", 2 * d.key_rows + d.value_rows)
            heads = d.value_heads
            w.decay(p, (heads,), heads, dtypes="BF16/BF16" if packed else "F32/BF16")
            w.norm(p + "norm.weight", d.value_dim, dtype="BF16" if packed else "F32")
            w.weight(p + "out_proj.weight", d.hidden, d.value_rows)
        else:
            w.softmax_attention(layer + "self_attn.", head_dim, gated=True, norms=True)
        if experts:
            _qwen_experts(w, layer + "mlp.")
        else:
            w.dense_mlp(layer + "mlp.")
    w.norm(root + "norm.weight", d.hidden, centred=True)
    if packed or experts:
        w.weight("lm_head.weight", d.vocab, d.hidden)

    config: dict[str, Any] = {
        "vocab_size": d.vocab,
        "hidden_size": d.hidden,
        "intermediate_size": 48,
        "num_hidden_layers": d.layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "linear_num_key_heads": d.key_heads,
        "linear_num_value_heads": d.value_heads,
        "linear_key_head_dim": d.key_dim,
        "linear_value_head_dim": d.value_dim,
        "linear_conv_kernel_dim": d.conv_width,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "full_attention_interval": 4,
        "tie_word_embeddings": not (packed or experts),
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    moe = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    if packed:
        return w.tensors, config | moe | {
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            "mlp_only_layers": list(range(d.layers)),
            "rope_parameters": rope,
        }
    config["layer_types"] = _layer_types(d)
    config["rope_parameters"] = rope | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    if not experts:
        return w.tensors, config | {
            "model_type": "qwen3_5_text",
            "architectures": ["Qwen3_5ForCausalLM"],
        }
    text = config | moe | {"model_type": "qwen3_5_moe_text"}
    return w.tensors, {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": d.hidden,
            "num_position_embeddings": 16,
            "patch_size": 4,
        },
        "image_token_id": 90,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
    }


def _qwen_experts(w: _Writer, prefix: str) -> None:
    hidden = w.dims.hidden
    w.weight(prefix + "gate.weight", 4, hidden)
    w.weight(prefix + "experts.gate_up_proj", 4, 32, hidden)
    w.weight(prefix + "experts.down_proj", 4, hidden, 16)
    w.dense_mlp(prefix + "shared_expert.", 16)
    w.weight(prefix + "shared_expert_gate.weight", 1, hidden)


def _kimi_linear(dims: Dims, seed: int) -> tuple[Tensors, dict[str, Any]]:
    """Kimi-Linear: KDA with split convolutions, FP32 decay of shape [1,1,H,1], 1-based layer lists."""
    w = _Writer(dims, seed)
    d = dims
    w.weight("model.embed_tokens.weight", d.vocab, d.hidden)
    for i in range(d.layers):
        layer = f"model.layers.{i}."
        p = layer + "self_attn."
        w.norm(layer + "input_layernorm.weight", d.hidden)
        w.norm(layer + "post_attention_layernorm.weight", d.hidden)
        if d.is_linear(i):
            for x in "qkv":
                w.weight(f"{p}{x}_proj.weight", d.key_rows, d.hidden)
                w.conv(f"{p}{x}_conv1d.weight", d.key_rows)
            w.decay(p, (1, 1, d.value_heads, 1), d.key_rows, dtypes="F32/F32")
            for x in "fg":
                w.weight(f"{p}{x}_a_proj.weight", d.key_dim, d.hidden)
                w.weight(f"{p}{x}_b_proj.weight", d.key_rows, d.key_dim)
            w.weight(p + "b_proj.weight", d.value_heads, d.hidden)
            w.norm(p + "o_norm.weight", d.value_dim)
            w.weight(p + "o_proj.weight", d.hidden, d.value_rows)
        else:
            w.weight(p + "q_proj.weight", 2 * 12, d.hidden)
            w.weight(p + "kv_a_proj_with_mqa.weight", 16 + 4, d.hidden)
            w.norm(p + "kv_a_layernorm.weight", 16)
            w.weight(p + "kv_b_proj.weight", 2 * 16, 16)
            w.weight(p + "o_proj.weight", d.hidden, 2 * 8)
        w.dense_mlp(layer + "mlp.")
    w.norm("model.norm.weight", d.hidden)
    w.weight("lm_head.weight", d.vocab, d.hidden)
    linear = [i + 1 for i in range(d.layers) if d.is_linear(i)]
    return w.tensors, {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": d.vocab,
        "hidden_size": d.hidden,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": d.layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 72,  # as released: belongs to neither attention kind
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": d.layers,
        "linear_attn_config": {
            "kda_layers": linear,
            "full_attn_layers": [i + 1 for i in range(d.layers) if not d.is_linear(i)],
            "head_dim": d.key_dim,
            "num_heads": d.value_heads,
            "short_conv_kernel_size": d.conv_width,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "model_max_length": 8192,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _olmo_hybrid(dims: Dims, seed: int) -> tuple[Tensors, dict[str, Any]]:
    """OLMo-Hybrid: GDN with split projections and convolutions, and key_dim != value_dim."""
    w = _Writer(dims, seed)
    d = dims
    w.weight("model.embed_tokens.weight", d.vocab, d.hidden)
    for i in range(d.layers):
        layer = f"model.layers.{i}."
        if d.is_linear(i):
            p = layer + "linear_attn."
            w.norm(layer + "attention_layer_norm.weight", d.hidden)
            w.norm(layer + "feedforward_layer_norm.weight", d.hidden)
            for x, rows in (("q", d.key_rows), ("k", d.key_rows), ("v", d.value_rows)):
                w.weight(f"{p}{x}_proj.weight", rows, d.hidden)
                w.conv(f"{p}{x}_conv1d.weight", rows)
            w.weight(p + "a_proj.weight", d.value_heads, d.hidden)
            w.weight(p + "b_proj.weight", d.value_heads, d.hidden)
            w.weight(p + "g_proj.weight", d.value_rows, d.hidden)
            w.decay(p, (d.value_heads,), d.value_heads, dtypes="F32/BF16")
            w.norm(p + "o_norm.weight", d.value_dim)
            w.weight(p + "o_proj.weight", d.hidden, d.value_rows)
        else:
            w.softmax_attention(layer + "self_attn.", 16, gated=False, norms=False)
            w.norm(layer + "post_attention_layernorm.weight", d.hidden)
            w.norm(layer + "post_feedforward_layernorm.weight", d.hidden)
        w.dense_mlp(layer + "mlp.")
    w.norm("model.norm.weight", d.hidden)
    w.weight("lm_head.weight", d.vocab, d.hidden)
    return w.tensors, {
        "model_type": "olmo_hybrid",
        "architectures": ["OlmoHybridForCausalLM"],
        "vocab_size": d.vocab,
        "hidden_size": d.hidden,
        "intermediate_size": 48,
        "num_hidden_layers": d.layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "linear_num_key_heads": d.key_heads,
        "linear_num_value_heads": d.value_heads,
        "linear_key_head_dim": d.key_dim,
        "linear_value_head_dim": d.value_dim,
        "linear_conv_kernel_dim": d.conv_width,
        "linear_allow_neg_eigval": True,
        "layer_types": _layer_types(d),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def _layer_types(dims: Dims) -> list[str]:
    kinds = ("full_attention", "linear_attention")
    return [kinds[dims.is_linear(i)] for i in range(dims.layers)]


# --- entry points -------------------------------------------------------------------------------


def write_checkpoint(
    folder: Path,
    family: str = "qwen3_5",
    *,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int = 8,
    value_dim: int | None = None,
    hidden: int = 32,
    layers: int = 4,
    vocab: int | None = None,
    shards: int = 1,
    seed: int = 0,
    tokenizer: bool = False,
) -> Path:
    """Write one random checkpoint and return its folder.

    Defaults: 2 key heads and 4 value heads with dims 8 x 12 for Qwen; 4 heads of 8 x 8 for Kimi-Linear, whose
    config has a single head dim; 2 heads of 8 x 16 for OLMo, whose two head counts are equal.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; one of {', '.join(FAMILIES)}")
    shared_heads = family in ("kimi_linear", "olmo_hybrid")
    if value_heads is None:
        value_heads = 2 if family == "olmo_hybrid" else 4
    if key_heads is None:
        key_heads = value_heads if shared_heads else 2
    if value_dim is None:
        value_dim = {"kimi_linear": key_dim, "olmo_hybrid": 2 * key_dim}.get(family, key_dim + 4)
    if shared_heads and key_heads != value_heads:
        raise ValueError(f"{family} has as many key heads as value heads")
    if family == "kimi_linear" and key_dim != value_dim:
        raise ValueError("kimi_linear has one head dim for keys and values")
    dims = Dims(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        hidden=hidden,
        layers=layers,
        vocab=vocab or (259 if tokenizer else 97),
    )
    if family == "kimi_linear":
        tensors, config = _kimi_linear(dims, seed)
    elif family == "olmo_hybrid":
        tensors, config = _olmo_hybrid(dims, seed)
    else:
        tensors, config = _qwen(dims, seed, family)

    folder.mkdir(parents=True, exist_ok=True)
    config = config | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_shards(folder, tensors, shards)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_shards(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """`model.safetensors`, or numbered shards with their index as the Hub has them."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    weight_map: dict[str, str] = {}
    for n, names in enumerate(_split(list(tensors), shards), start=1):
        file = f"model-{n:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    total = sum(len(encode(v, t)) for t, v in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _split(names: list[str], parts: int) -> Iterator[list[str]]:
    """Nearly equal runs in order, so that the tensors of one layer may straddle two shards."""
    for part in range(parts):
        yield names[part * len(names) // parts : (part + 1) * len(names) // parts]


def write_tokenizer(folder: Path) -> None:
    """Byte-level tokenizer: ids 0-255 are the bytes, then <|pad|>, <|bos|>, <|eos|>."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    vocabulary: dict[str, int] = {}
    for byte in range(256):
        shift = 256 + byte - sum(p < byte for p in printable)
        vocabulary[chr(byte if byte in printable else shift)] = byte
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    specials = ("<|pad|>", "<|bos|>", "<|eos|>")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 256 + n, "content": text, "special": True} | flags
            for n, text in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": False},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
