"""Tensor names, dtypes and shapes of released checkpoints, one generator per architecture; no values.

What is known of a release comes from its published config and from headers that others have pinned in public tests;
what had to be inferred is said beside the fixture in `tests/released.py`. Weights of attention, experts and vision
towers are here for their number and size: a reader has to skip them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Tensor: TypeAlias = tuple[str, str, tuple[int, ...]]
Config: TypeAlias = Mapping[str, Any]


def linear(name: str, rows: int, columns: int, *, dtype: str = "BF16") -> Iterator[Tensor]:
    """A weight matrix; F8_E4M3 comes with a scale for each block of 128 x 128."""
    yield f"{name}.weight", dtype, (rows, columns)
    if dtype == "F8_E4M3":
        yield f"{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))


def vector(name: str, size: int, dtype: str = "BF16") -> Tensor:
    return name, dtype, (size,)


def gated_mlp(
    prefix: str, hidden: int, inner: int, *, dtype: str = "BF16", names: str = "gate up down"
) -> Iterator[Tensor]:
    gate, up, down = (f"{n}_proj" if n in ("gate", "up", "down") else n for n in names.split())
    yield from linear(prefix + gate, inner, hidden, dtype=dtype)
    yield from linear(prefix + up, inner, hidden, dtype=dtype)
    yield from linear(prefix + down, hidden, inner, dtype=dtype)


# --- Qwen ------------------------------------------------------------------------------------------------------------


def _qwen_attention(prefix: str, c: Config, *, gated: bool = True) -> Iterator[Tensor]:
    hidden, size = c["hidden_size"], c["head_dim"]
    heads, keys = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    yield from linear(prefix + "q_proj", (2 if gated else 1) * heads, hidden)
    yield from linear(prefix + "k_proj", keys, hidden)
    yield from linear(prefix + "v_proj", keys, hidden)
    yield from linear(prefix + "o_proj", hidden, heads)
    yield vector(prefix + "q_norm.weight", size)
    yield vector(prefix + "k_norm.weight", size)


def _qwen_experts(prefix: str, c: Config, *, fused: bool) -> Iterator[Tensor]:
    hidden, experts, inner = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    yield from linear(prefix + "gate", experts, hidden)
    if fused:
        yield prefix + "experts.gate_up_proj", "BF16", (experts, 2 * inner, hidden)
        yield prefix + "experts.down_proj", "BF16", (experts, hidden, inner)
    else:
        for e in range(experts):
            yield from gated_mlp(f"{prefix}experts.{e}.", hidden, inner)
    yield from gated_mlp(prefix + "shared_expert.", hidden, c["shared_expert_intermediate_size"])
    yield from linear(prefix + "shared_expert_gate", 1, hidden)


def _gdn(prefix: str, c: Config, *, decay: str, packed: bool) -> Iterator[Tensor]:
    hidden, heads, value = (
        c["hidden_size"],
        c["linear_num_value_heads"],
        c["linear_value_head_dim"],
    )
    key_rows, value_rows = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * value
    if packed:
        yield from linear(prefix + "in_proj_qkvz", 2 * (key_rows + value_rows), hidden)
        yield from linear(prefix + "in_proj_ba", 2 * heads, hidden)
    else:
        yield from linear(prefix + "in_proj_qkv", 2 * key_rows + value_rows, hidden)
        yield from linear(prefix + "in_proj_z", value_rows, hidden)
        yield from linear(prefix + "in_proj_b", heads, hidden)
        yield from linear(prefix + "in_proj_a", heads, hidden)
    width = c["linear_conv_kernel_dim"]
    yield prefix + "conv1d.weight", "BF16", (2 * key_rows + value_rows, 1, width)
    yield vector(prefix + "A_log", heads, decay)
    yield vector(prefix + "dt_bias", heads)
    yield vector(prefix + "norm.weight", value, decay)
    yield from linear(prefix + "out_proj", hidden, value_rows)


def _qwen_block(
    layer: str, c: Config, *, full: bool, decay: str, packed: bool, fused: bool
) -> Iterator[Tensor]:
    hidden = c["hidden_size"]
    yield vector(layer + "input_layernorm.weight", hidden)
    yield vector(layer + "post_attention_layernorm.weight", hidden)
    if full:
        yield from _qwen_attention(layer + "self_attn.", c)
    else:
        yield from _gdn(layer + "linear_attn.", c, decay=decay, packed=packed)
    if "num_experts" in c:
        yield from _qwen_experts(layer + "mlp.", c, fused=fused)
    else:
        yield from gated_mlp(layer + "mlp.", hidden, c["intermediate_size"])


def qwen(
    config: Config,
    *,
    root: str,
    decay: str = "BF16",
    packed: bool = False,
    fused: bool = True,
) -> Iterator[Tensor]:
    """Qwen3-Next (`packed`, single experts) and Qwen3.5 to 3.8, with the multi-token-prediction block."""
    c = config.get("text_config", config)
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    yield from linear(root + "embed_tokens", c["vocab_size"], hidden)
    for i in range(layers):
        full = (i + 1) % c["full_attention_interval"] == 0
        block = f"{root}layers.{i}."
        yield from _qwen_block(block, c, full=full, decay=decay, packed=packed, fused=fused)
    yield vector(root + "norm.weight", hidden)
    if not c.get("tie_word_embeddings"):
        yield from linear("lm_head", c["vocab_size"], hidden)
    yield from linear("mtp.fc", hidden, 2 * hidden)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield vector(f"mtp.{norm}.weight", hidden)
    yield from _qwen_block("mtp.layers.0.", c, full=True, decay=decay, packed=packed, fused=fused)
    if "vision_config" in config:
        yield from _vision(config["vision_config"], hidden)


def _vision(c: Config, out: int) -> Iterator[Tensor]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    yield "model.visual.patch_embed.proj.weight", "BF16", (hidden, 3, 2, 16, 16)
    yield vector("model.visual.patch_embed.proj.bias", hidden)
    yield from linear("model.visual.pos_embed", 2304, hidden)
    for i in range(c["depth"]):
        block = f"model.visual.blocks.{i}."
        for name, rows, columns in (
            ("attn.qkv", 3 * hidden, hidden),
            ("attn.proj", hidden, hidden),
            ("mlp.linear_fc1", inner, hidden),
            ("mlp.linear_fc2", hidden, inner),
        ):
            yield from linear(block + name, rows, columns)
            yield vector(f"{block}{name}.bias", rows)
        for norm in ("norm1", "norm2"):
            yield vector(f"{block}{norm}.weight", hidden)
            yield vector(f"{block}{norm}.bias", hidden)
    for name, rows, columns in (
        ("linear_fc1", 4 * hidden, 4 * hidden),
        ("linear_fc2", out, 4 * hidden),
    ):
        yield from linear(f"model.visual.merger.{name}", rows, columns)
        yield vector(f"model.visual.merger.{name}.bias", rows)
    yield vector("model.visual.merger.norm.weight", hidden)
    yield vector("model.visual.merger.norm.bias", hidden)


def qwen4_exp(config: Config) -> Iterator[Tensor]:
    """Hyper-connections instead of norms, an indexer on full layers, one layer with an n-gram embedding."""
    c, root = config["text_config"], "model.language_model."
    hidden, streams, rank = c["hidden_size"], c["hc_count"], c["hc_lowrank"]
    yield from linear(root + "embed_tokens", c["vocab_size"], hidden)
    yield from _hyper_connection(
        root + "hyper_connection_mixer.", hidden, streams, rank, inject=False
    )
    for i, kind in enumerate(c["layer_types"]):
        layer = f"{root}layers.{i}."
        for part in ("attn", "mlp"):
            name = f"{layer}{part}_hyper_connection."
            yield from _hyper_connection(name, hidden, streams, rank, inject=True)
        if kind == "linear_attention":
            yield from _gdn(layer + "linear_attn.", c, decay="BF16", packed=False)
        else:
            yield from _qwen_attention(layer + "self_attn.", c)
            size = c["indexer_head_dim"]
            rows = (c["indexer_n_heads"] + c["indexer_kv_heads"]) * size
            yield from linear(layer + "self_attn.indexer.index_qk_proj", rows, hidden)
            yield vector(layer + "self_attn.indexer.q_layernorm.weight", size)
            yield vector(layer + "self_attn.indexer.k_layernorm.weight", size)
        if i + 1 in c["ple_layer_ids"]:  # counts from one
            for part in range(c["split_ngram_parts"]):
                name = f"{layer}ple.ple_embedding.ngram_embedding.{part}"
                yield from linear(name, 16 * 160_000, hidden // 16)
        yield from _qwen_experts(layer + "mlp.", c, fused=False)
    yield from linear("lm_head", c["vocab_size"], hidden)
    yield from _vision(config["vision_config"], hidden)


def _hyper_connection(
    prefix: str, hidden: int, streams: int, rank: int, *, inject: bool
) -> Iterator[Tensor]:
    yield vector(prefix + "hc_norm.weight", streams * hidden)
    yield from linear(prefix + "input_mix_weight_down", rank, streams * hidden)
    yield from linear(prefix + "input_mix_weight_up", streams * hidden, rank)
    if inject:
        yield from linear(prefix + "block_inject_weight", streams, streams * hidden)


# --- KDA -------------------------------------------------------------------------------------------------------------


def _kda(
    prefix: str,
    hidden: int,
    heads: int,
    dim: int,
    *,
    a_log: tuple[int, ...],
    f: str,
    g: str,
    decay: str = "F32",
    conv: str = "BF16",
    norm: str = "BF16",
) -> Iterator[Tensor]:
    """`f` and `g`: `low` rank (two factors) or `full` rank."""
    rows = heads * dim
    for x in "qkv":
        yield from linear(f"{prefix}{x}_proj", rows, hidden)
        yield f"{prefix}{x}_conv1d.weight", conv, (rows, 1, 4)
    yield prefix + "A_log", decay, a_log
    yield vector(prefix + "dt_bias", rows, decay)
    for name, rank in (("f", f), ("g", g)):
        if rank == "low":
            yield from linear(f"{prefix}{name}_a_proj", dim, hidden)
            yield from linear(f"{prefix}{name}_b_proj", rows, dim)
        else:
            yield from linear(f"{prefix}{name}_proj", rows, hidden)
    yield from linear(prefix + "b_proj", heads, hidden)
    yield vector(prefix + "o_norm.weight", dim, norm)
    yield from linear(prefix + "o_proj", hidden, rows)


def _mla(
    prefix: str,
    c: Config,
    *,
    output: str = "o_proj",
    gate_rows: int = 0,
    dtype: str = "BF16",
    kv_b: str | None = None,
) -> Iterator[Tensor]:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    rope, nope, value = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
    if c.get("q_lora_rank"):
        yield from linear(prefix + "q_a_proj", c["q_lora_rank"], hidden, dtype=dtype)
        yield vector(prefix + "q_a_layernorm.weight", c["q_lora_rank"])
        yield from linear(prefix + "q_b_proj", heads * (nope + rope), c["q_lora_rank"], dtype=dtype)
    else:
        yield from linear(prefix + "q_proj", heads * (nope + rope), hidden, dtype=dtype)
    yield from linear(prefix + "kv_a_proj_with_mqa", rank + rope, hidden, dtype=dtype)
    yield vector(prefix + "kv_a_layernorm.weight", rank)
    yield from linear(prefix + "kv_b_proj", heads * (nope + value), rank, dtype=kv_b or dtype)
    if gate_rows:
        yield from linear(prefix + "g_proj", gate_rows, hidden)
    yield from linear(prefix + output, hidden, heads * value, dtype=dtype)


def kimi_linear(c: Config) -> Iterator[Tensor]:
    hidden, attn = c["hidden_size"], c["linear_attn_config"]
    heads, dim = attn["num_heads"], attn["head_dim"]
    yield from linear("model.embed_tokens", c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield vector(layer + "input_layernorm.weight", hidden)
        yield vector(layer + "post_attention_layernorm.weight", hidden)
        if i + 1 in attn["kda_layers"]:
            shape = (1, 1, heads, 1)
            yield from _kda(layer + "self_attn.", hidden, heads, dim, a_log=shape, f="low", g="low")
        else:
            yield from _mla(layer + "self_attn.", c)
        if i < c["first_k_dense_replace"]:
            yield from gated_mlp(layer + "mlp.", hidden, c["intermediate_size"])
            continue
        moe = layer + "block_sparse_moe."
        yield from linear(moe + "gate", c["num_experts"], hidden)
        yield vector(moe + "gate.e_score_correction_bias", c["num_experts"], "F32")
        for e in range(c["num_experts"]):
            inner = c["moe_intermediate_size"]
            yield from gated_mlp(f"{moe}experts.{e}.", hidden, inner, names="w1 w3 w2")
        yield from gated_mlp(moe + "shared_experts.", hidden, c["moe_intermediate_size"])
    yield vector("model.norm.weight", hidden)
    yield from linear("lm_head", c["vocab_size"], hidden)


def kimi_k3(config: Config) -> Iterator[Tensor]:
    """MXFP4 experts (two values a byte, one scale per 32), everything else as it was trained."""
    c, root = config["text_config"], "language_model.model."
    hidden, attn = c["hidden_size"], c["linear_attn_config"]
    heads, dim = attn["num_heads"], attn["head_dim"]
    latent, inner = c["routed_expert_hidden_size"], c["moe_intermediate_size"]
    yield from linear(root + "embed_tokens", c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        layer = f"{root}layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield vector(f"{layer}{norm}.weight", hidden)
        for part in ("self_attention", "mlp"):
            yield vector(f"{layer}{part}_res_norm.weight", hidden)
            yield from linear(f"{layer}{part}_res_proj", 1, hidden)
        name = layer + "self_attn."
        if i + 1 in attn["kda_layers"]:
            yield from _kda(
                name, hidden, heads, dim, a_log=(128,), f="low", g="full", conv="F32", norm="F32"
            )
        else:
            yield from _mla(name, c, gate_rows=heads * dim)
        if i < c["first_k_dense_replace"]:
            yield from gated_mlp(layer + "mlp.", hidden, c["intermediate_size"])
            continue
        moe = layer + "block_sparse_moe."
        yield from linear(moe + "gate", c["num_experts"], hidden)
        yield vector(moe + "gate.e_score_correction_bias", c["num_experts"], "F32")
        yield from linear(moe + "routed_expert_down_proj", latent, hidden)
        yield vector(moe + "routed_expert_norm.weight", latent)
        yield from linear(moe + "routed_expert_up_proj", hidden, latent)
        for e in range(c["num_experts"]):
            for w, rows, columns in (
                ("w1", inner, latent),
                ("w2", latent, inner),
                ("w3", inner, latent),
            ):
                yield f"{moe}experts.{e}.{w}.weight_packed", "U8", (rows, columns // 2)
                yield f"{moe}experts.{e}.{w}.weight_scale", "U8", (rows, columns // 32)
        shared = inner * c["num_shared_experts"]
        yield from gated_mlp(moe + "shared_experts.", hidden, shared)
    yield vector(root + "norm.weight", hidden)
    yield vector(root + "output_attn_res_norm.weight", hidden)
    yield from linear(root + "output_attn_res_proj", 1, hidden)
    yield from linear("language_model.lm_head", c["vocab_size"], hidden)
    yield from linear("mm_projector.linear_1", hidden, 4608)
    yield from linear("vision_tower.patch_embed.proj", 1152, 588)


def glm5_next(config: Config) -> Iterator[Tensor]:
    """Block FP8 in MLA, MLP and experts; KDA, indexer and hyper-connections as they were trained."""
    c, root = config["text_config"], "model.language_model."
    hidden, attn, layers = c["hidden_size"], c["linear_attn_config"], c["num_hidden_layers"]
    heads, dim, streams = attn["num_heads"], attn["head_dim"], c["hc_mult"]
    yield from linear(root + "embed_tokens", c["vocab_size"], hidden)
    for i in range(layers + 1):  # the last one predicts several tokens
        layer = f"{root}layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield vector(f"{layer}{norm}.weight", hidden)
        if i in attn["kda_layers"]:
            name, shape = layer + "self_attn.", (heads,)
            yield from _kda(name, hidden, heads, dim, a_log=shape, f="low", g="low")
        else:
            yield from _mla(layer + "self_attn.", c, dtype="F8_E4M3", kv_b="BF16")
            yield from _indexer(layer + "self_attn.indexer.", c)
        if i < layers:
            for part in ("attn", "ffn"):
                size = streams * (streams + 2)
                yield vector(f"{layer}hc_{part}_base", size, "F32")
                yield f"{layer}hc_{part}_fn", "BF16", (size, streams * hidden)
                yield vector(f"{layer}hc_{part}_scale", 3, "F32")
        else:
            yield from linear(layer + "eh_proj", hidden, 2 * hidden)
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield vector(f"{layer}{norm}.weight", hidden)
        if i < c["first_k_dense_replace"]:
            yield from gated_mlp(layer + "mlp.", hidden, c["intermediate_size"], dtype="F8_E4M3")
            continue
        yield from linear(layer + "mlp.gate", c["n_routed_experts"], hidden)
        yield vector(layer + "mlp.gate.e_score_correction_bias", c["n_routed_experts"], "F32")
        inner = c["moe_intermediate_size"]
        for e in range(c["n_routed_experts"]):
            yield from gated_mlp(f"{layer}mlp.experts.{e}.", hidden, inner, dtype="F8_E4M3")
        yield from gated_mlp(layer + "mlp.shared_experts.", hidden, inner, dtype="F8_E4M3")
    yield vector(root + "norm.weight", hidden)
    yield from linear("lm_head", c["vocab_size"], hidden)
    yield from _glm_vision(config["vision_config"], hidden)


def _indexer(prefix: str, c: Config) -> Iterator[Tensor]:
    hidden, heads, dim = c["hidden_size"], c["index_n_heads"], c["index_head_dim"]
    yield from linear(prefix + "wq_b", heads * dim, c["q_lora_rank"])
    yield from linear(prefix + "wk", dim, hidden)
    yield vector(prefix + "k_norm.weight", dim)
    yield vector(prefix + "k_norm.bias", dim)
    yield from linear(prefix + "weights_proj", heads, hidden)
    yield prefix + "index_kpool_compress_ape", "BF16", (c["index_kpool"], dim)
    yield prefix + "index_kpool_compress_gate", "BF16", (dim, hidden)


def _glm_vision(c: Config, out: int) -> Iterator[Tensor]:
    hidden, inner, projected = (
        c["hidden_size"],
        c["intermediate_size"],
        c["projection_intermediate_size"],
    )
    root = "model.visual."
    yield root + "patch_embed.proj.weight", "BF16", (hidden, 3, 2, 14, 14)
    yield vector(root + "patch_embed.proj.bias", hidden)
    for i in range(c["depth"]):
        block = f"{root}blocks.{i}."
        for name, rows, columns in (
            ("attn.qkv", 3 * hidden, hidden),
            ("attn.proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield from linear(block + name, rows, columns)
            yield vector(f"{block}{name}.bias", rows)
        for norm, size in (
            ("norm1", hidden),
            ("norm2", hidden),
            ("attn.q_norm", hidden // c["num_heads"]),
            ("attn.k_norm", hidden // c["num_heads"]),
        ):
            yield vector(f"{block}{norm}.weight", size)
    yield vector(root + "post_layernorm.weight", hidden)
    yield root + "downsample.weight", "BF16", (out, hidden, 2, 2)
    yield vector(root + "downsample.bias", out)
    yield from linear(root + "merger.proj", out, out)
    yield vector(root + "merger.post_projection_norm.weight", out)
    yield vector(root + "merger.post_projection_norm.bias", out)
    yield from gated_mlp(root + "merger.", out, projected)


def ling3(c: Config) -> Iterator[Tensor]:
    hidden, heads, dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    layers = c["num_hidden_layers"]
    yield from linear("model.word_embeddings", c["vocab_size"], hidden)
    for i in range(layers):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield vector(f"{layer}{norm}.weight", hidden)
        if (i + 1) % c["layer_group_size"]:
            yield from _kda(
                layer + "attention.", hidden, heads, dim, a_log=(heads,), f="full", g="full"
            )
        else:
            yield from _mla(layer + "attention.", c, output="dense", gate_rows=heads)
        if i < c["first_k_dense_replace"]:
            yield from gated_mlp(layer + "mlp.", hidden, c["intermediate_size"])
            continue
        yield from linear(layer + "mlp.gate", c["num_experts"], hidden)
        yield vector(layer + "mlp.gate.expert_bias", c["num_experts"], "F32")
        inner = c["moe_intermediate_size"]
        for e in range(c["num_experts"]):
            yield from gated_mlp(f"{layer}mlp.experts.{e}.", hidden, inner)
        yield from gated_mlp(layer + "mlp.shared_experts.", hidden, inner)
    yield vector("model.norm.weight", hidden)
    yield from linear("lm_head", c["vocab_size"], hidden)


# --- the others ------------------------------------------------------------------------------------------------------


def olmo_hybrid(c: Config) -> Iterator[Tensor]:
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    key, value = c["linear_key_head_dim"] * heads, c["linear_value_head_dim"] * heads
    yield from linear("model.embed_tokens", c["vocab_size"], hidden)
    for i, kind in enumerate(c["layer_types"]):
        layer = f"model.layers.{i}."
        if kind == "linear_attention":
            p = layer + "linear_attn."
            for x, rows in (("q", key), ("k", key), ("v", value)):
                yield from linear(f"{p}{x}_proj", rows, hidden)
                yield f"{p}{x}_conv1d.weight", "BF16", (rows, 1, c["linear_conv_kernel_dim"])
            for x, rows in (("a", heads), ("b", heads), ("g", value)):
                yield from linear(f"{p}{x}_proj", rows, hidden)
            yield vector(p + "A_log", heads, "F32")
            yield vector(p + "dt_bias", heads, "F32")
            yield vector(p + "o_norm.weight", c["linear_value_head_dim"])
            yield from linear(p + "o_proj", hidden, value)
            norms = ("attention_layer_norm", "feedforward_layer_norm")
        else:
            for x in ("q", "k", "v", "o"):
                yield from linear(f"{layer}self_attn.{x}_proj", hidden, hidden)
            yield vector(layer + "self_attn.q_norm.weight", hidden)
            yield vector(layer + "self_attn.k_norm.weight", hidden)
            norms = ("post_attention_layernorm", "post_feedforward_layernorm")
        for norm in norms:
            yield vector(f"{layer}{norm}.weight", hidden)
        yield from gated_mlp(layer + "mlp.", hidden, c["intermediate_size"])
    yield vector("model.norm.weight", hidden)
    yield from linear("lm_head", c["vocab_size"], hidden)


def lara_mini(c: Config) -> Iterator[Tensor]:
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    key = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    value = heads * c["linear_value_head_dim"]
    yield from linear("model.embed_tokens", c["vocab_size"], hidden)
    for i, kind in enumerate(c["layer_types"]):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield vector(f"{layer}{norm}.weight", hidden)
        if kind == "linear_attention":
            p = layer + "linear_attn."
            yield from linear(p + "in_proj", 2 * key + 2 * value + 2 * heads, hidden)
            yield p + "conv1d.weight", "BF16", (2 * key + value, 1, c["linear_conv_kernel_dim"])
            yield vector(p + "A_log", heads)
            yield vector(p + "dt_bias", heads)
            yield vector(p + "out_norm.weight", c["linear_value_head_dim"])
            yield from linear(p + "out_proj", hidden, value)
        else:
            yield from _qwen_attention(layer + "self_attn.", c, gated=False)
        experts, inner = c["num_experts"], c["moe_intermediate_size"]
        yield from linear(layer + "mlp.gate", experts, hidden)
        yield layer + "mlp.experts.gate_up_proj", "BF16", (experts, hidden, 2 * inner)
        yield layer + "mlp.experts.down_proj", "BF16", (experts, hidden, inner)
        shared = c["shared_expert_intermediate_size"]
        yield from gated_mlp(layer + "mlp.shared_expert.", hidden, shared)
    yield vector("model.norm.weight", hidden)


def jet_nemotron(c: Config) -> Iterator[Tensor]:
    hidden, jet = c["hidden_size"], c["efficient_attention_config"]["jet"]
    heads, key = jet["num_heads"], jet["num_heads"] * jet["head_dim"]
    size = int(jet["head_dim"] * jet["expand_v"])
    value = heads * size
    yield from linear("model.embed_tokens", c["vocab_size"], hidden)
    for i, kind in enumerate(c["layer_types"]):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield vector(f"{layer}{norm}.weight", hidden)
        p = layer + "self_attn."
        if kind == "jet":
            for x, rows in (
                ("q", key),
                ("k", key),
                ("v", value),
                ("g", value),
                ("a", heads),
                ("b", heads),
            ):
                yield from linear(f"{p}{x}_proj", rows, hidden)
            yield from linear(p + "o_proj", hidden, value)
            yield vector(p + "A_log", heads)
            yield vector(p + "dt_bias", heads)
            yield vector(p + "o_norm.weight", size)
            inner = hidden // jet["dconv_generator_reduction"]
            kernel = p + "dynamic_conv1d.kernel_generator."
            yield from linear(kernel + "w1", inner, hidden)
            yield from linear(kernel + "w2", value * jet["conv_size"], inner)
            yield vector(kernel + "w2.bias", value * jet["conv_size"])
        else:
            keys = c["num_key_value_heads"] * 128
            for x, rows in (("q", hidden), ("k", keys), ("v", keys)):
                yield from linear(f"{p}{x}_proj", rows, hidden)
                yield vector(f"{p}{x}_proj.bias", rows)
            yield from linear(p + "o_proj", hidden, hidden)
        yield from gated_mlp(layer + "mlp.", hidden, c["intermediate_size"])
    yield vector("model.norm.weight", hidden)


def nemotron_h(c: Config) -> Iterator[Tensor]:
    hidden = c["hidden_size"]
    heads, groups, state = c["mamba_num_heads"], c["n_groups"], c["ssm_state_size"]
    inner = heads * c["mamba_head_dim"]
    conv = inner + 2 * groups * state
    yield from linear("backbone.embeddings", c["vocab_size"], hidden)
    for i, kind in enumerate(c["hybrid_override_pattern"]):
        layer = f"backbone.layers.{i}."
        p = layer + "mixer."
        yield vector(layer + "norm.weight", hidden)
        if kind == "M":
            yield from linear(p + "in_proj", inner + conv + heads, hidden)
            yield p + "conv1d.weight", "BF16", (conv, 1, c["conv_kernel"])
            yield vector(p + "conv1d.bias", conv)
            for name in ("A_log", "dt_bias", "D"):
                yield vector(p + name, heads)
            yield vector(p + "norm.weight", inner)
            yield from linear(p + "out_proj", hidden, inner)
        elif kind == "*":
            size = c.get("head_dim", 128)
            rows, keys = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
            for x, n in (("q", rows), ("k", keys), ("v", keys)):
                yield from linear(f"{p}{x}_proj", n, hidden)
            yield from linear(p + "o_proj", hidden, rows)
        elif kind == "-":
            yield from linear(p + "up_proj", c["intermediate_size"], hidden)
            yield from linear(p + "down_proj", hidden, c["intermediate_size"])
        else:
            yield from _nemotron_experts(p, c)
    yield vector("backbone.norm_f.weight", hidden)
    yield from linear("lm_head", c["vocab_size"], hidden)


def _nemotron_experts(p: str, c: Config) -> Iterator[Tensor]:
    hidden, latent, inner = c["hidden_size"], c["moe_latent_size"], c["moe_intermediate_size"]
    yield from linear(p + "gate", c["n_routed_experts"], hidden)
    yield vector(p + "gate.e_score_correction_bias", c["n_routed_experts"], "F32")
    yield from linear(p + "fc1_latent_proj", latent, hidden)
    yield from linear(p + "fc2_latent_proj", hidden, latent)
    for e in range(c["n_routed_experts"]):
        yield from linear(f"{p}experts.{e}.up_proj", inner, latent)
        yield from linear(f"{p}experts.{e}.down_proj", latent, inner)
    shared = c["moe_shared_expert_intermediate_size"]
    yield from linear(p + "shared_experts.up_proj", shared, hidden)
    yield from linear(p + "shared_experts.down_proj", hidden, shared)
