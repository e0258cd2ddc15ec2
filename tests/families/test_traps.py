"""Eighteen ways to misread a hybrid checkpoint, one test or more for each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridstate import api
from hybridstate.checkpoint import DecayParameters, open_checkpoint
from hybridstate.errors import NumericError, UnsupportedModel
from hybridstate.families import (
    FAMILIES,
    AxisRule,
    Family,
    LinearLayer,
    ModelSpec,
    detect,
    sign_warning,
)
from hybridstate.horizons.static import static_horizons, static_log_decay
from hybridstate.trajectories.model import load_model, prefill, states, swap
from hybridstate.weights.permute import LayerOrder, axis_index, layer_moves
from tests.families.saved import available, save
from tests.released import BY_NAME, Released, write
from tests.tiny import bf16, write_checkpoint

Shapes = dict[str, tuple[int, ...]]

TABLE: dict[str, Family] = {family.name: family for family in FAMILIES}


def of(release: str, *blocks: int) -> Shapes:
    """Names and shapes of a release, all of it or a few blocks."""
    wanted = tuple(f".layers.{i}." for i in blocks)
    return {
        name: shape
        for name, _, shape in BY_NAME[release].tensors()
        if not blocks or any(part in name for part in wanted)
    }


def spec_of(release: str, **changes: Any) -> ModelSpec:
    """What is detected at a release whose text config is changed."""
    config = dict(BY_NAME[release].config)
    if "text_config" in config:
        config["text_config"] = config["text_config"] | changes
    else:
        config |= changes
    return detect(of(release), config)


# --- 1: the same key counts from one in Kimi and from zero in GLM ---------------------------------


def test_01_kda_layers_count_from_one_in_kimi_and_from_zero_in_glm() -> None:
    kimi, glm = spec_of("Kimi-Linear-48B-A3B-Instruct"), spec_of("GLM-5.3-Flash")
    assert [layer.index for layer in kimi.layers][:4] == [0, 1, 2, 4]
    assert kimi.layers[-1].index == 25  # the last two blocks: linear, full
    assert [layer.index for layer in glm.layers][:4] == [0, 1, 2, 4]
    without_types = dict(BY_NAME["GLM-5.3-Flash"].config["text_config"])
    del without_types["layer_types"]
    config = BY_NAME["GLM-5.3-Flash"].config | {"text_config": without_types}
    assert detect(of("GLM-5.3-Flash"), config).layers == glm.layers


# --- 2 and 3: Kimi-K3 -----------------------------------------------------------------------------


def k3(**text: Any) -> tuple[Shapes, dict[str, Any]]:
    """Four blocks of Kimi-K3: three linear ones and full attention."""
    config = BY_NAME["Kimi-K3"].config["text_config"]
    attention = config["linear_attn_config"] | {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    text = config | {"num_hidden_layers": 4, "linear_attn_config": attention} | text
    shapes = {n: s for n, s in of("Kimi-K3", 0, 1, 2, 3).items() if ".experts." not in n}
    return shapes, {"model_type": "kimi_k3", "text_config": text}


def test_02_k3_whose_text_config_says_kimi_linear_gets_the_safe_gate() -> None:
    shapes, config = k3()
    assert config["text_config"]["model_type"] == "kimi_linear"
    for given in (config, config["text_config"]):
        spec = detect(shapes, given)
        assert (spec.name, spec.gate, spec.lower_bound) == ("kimi_k3", "safe", -5.0)
        assert (spec.default_gate_input, spec.default_gate_input_source) == (0.8, "paper")
    attention = {
        key: value
        for key, value in config["text_config"]["linear_attn_config"].items()
        if key != "gate_lower_bound"
    }
    with pytest.raises(UnsupportedModel, match="safe gate"):
        detect(shapes, k3(linear_attn_config=attention)[1])


def test_03_k3_stores_128_entries_of_a_log_for_96_heads(tmp_path: Path) -> None:
    shapes, config = k3()
    assert shapes["language_model.model.layers.0.self_attn.A_log"] == (128,)
    spec = detect(shapes, config)
    assert spec.units(spec.layers[0]) == 96 * 128
    tensors = [(n, "F32" if "_log" in n or "dt_" in n else "BF16", s) for n, s in shapes.items()]
    release = Released(
        "k3", "x/k3", "kimi_k3", config, lambda: iter(tensors), (0, 1, 2), (96, 96, 128, 128, 4)
    )
    checkpoint = open_checkpoint(write(release, tmp_path / "k3"))
    layer = checkpoint.spec.layers[1]
    stored = checkpoint.read(layer.prefix + "A_log")
    assert np.array_equal(checkpoint.decay(layer).a_log, stored[:96])


# --- 4 and 5: Qwen3-Next packs its projections ----------------------------------------------------


def index_of(family: str, suffix: str, layer: LinearLayer, order: LayerOrder) -> Any:
    (rule,) = TABLE[family].axes[suffix]
    return axis_index(layer, rule, order, sum(map(layer.segment_length, rule.segments)))


def swapped_bundles(layer: LinearLayer) -> LayerOrder:
    plain = LayerOrder.identity(layer)
    bundles = plain.bundles[::-1].copy()
    heads = (bundles[:, None] * layer.bundle + np.arange(layer.bundle)).reshape(-1)
    return LayerOrder(bundles, heads, plain.keys, plain.values)


def test_04_qwen3_next_has_no_layer_types_and_packs_b_before_a() -> None:
    release = BY_NAME["Qwen3-Next-80B-A3B-Instruct"]
    assert "layer_types" not in release.config
    assert [layer.index for layer in spec_of(release.name).layers] == list(release.linear)
    layer = LinearLayer(0, 0, 2, 6, 8, 12, 4, "l.")
    rows = index_of("qwen3_next", "in_proj_ba.weight", layer, swapped_bundles(layer))
    # per key head [b b b | a a a]: the second group comes first, each inside its own order
    assert rows.tolist() == [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]
    inside = LayerOrder.identity(layer)
    swapped = LayerOrder(inside.bundles, np.array([1, 0, 2, 3, 4, 5]), inside.keys, inside.values)
    rows = index_of("qwen3_next", "in_proj_ba.weight", layer, swapped)
    assert rows.tolist()[:6] == [1, 0, 2, 4, 3, 5]  # b and a of the same two heads change places


def test_05_qwen3_next_convolution_is_flat_while_its_projection_is_grouped() -> None:
    layer = LinearLayer(0, 0, 2, 4, 3, 5, 4, "l.")
    order = swapped_bundles(layer)
    conv = index_of("qwen3_next", "conv1d.weight", layer, order)
    assert conv[:6].tolist() == [3, 4, 5, 0, 1, 2]  # q of both key heads, then k, then v
    assert conv[12:].min() == 12
    packed = index_of("qwen3_next", "in_proj_qkvz.weight", layer, order)
    group = 2 * 3 + 2 * 2 * 5
    assert packed[:group].tolist() == list(range(group, 2 * group))  # whole groups


# --- 6 and 7: dtypes ------------------------------------------------------------------------------


def test_06_a_log_is_f32_in_qwen3_5_and_bf16_in_3_6(tmp_path: Path) -> None:
    found = {}
    for name in ("Qwen3.5-27B", "Qwen3.6-27B"):
        checkpoint = open_checkpoint(write(BY_NAME[name], tmp_path / name))
        decay = checkpoint.decay(checkpoint.spec.layers[0])
        found[name] = decay.a_log_dtype, checkpoint.spec.name
        rounded = bf16(decay.a_log.astype(np.float32))
        assert np.array_equal(rounded, decay.a_log) == (decay.a_log_dtype == "BF16")
    assert found == {"Qwen3.5-27B": ("F32", "qwen3_5"), "Qwen3.6-27B": ("BF16", "qwen3_5")}


def test_07_a_model_loaded_in_bf16_keeps_the_stored_decay_and_its_horizons(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen3_5")
    checkpoint = open_checkpoint(folder)
    layer = checkpoint.spec.layers[0]
    decay = checkpoint.decay(layer)
    rounded = DecayParameters(
        bf16(decay.a_log.astype(np.float32)).astype(np.float64), decay.dt_bias, "BF16", "BF16"
    )
    gate: dict[str, Any] = {"gate": "softplus", "lower_bound": None, "gate_input": -0.3}
    moved = static_horizons(rounded, **gate) / static_horizons(decay, **gate) - 1
    assert 1e-4 < abs(moved).max() < 0.02  # what a bf16 copy would have cost
    loaded = load_model(folder, dtype=torch.bfloat16)
    kept = dict(loaded.model.named_parameters())[_parameter(loaded.model, 0, "A_log")]
    assert np.array_equal(kept.detach().double().numpy().reshape(-1), decay.a_log)


def _parameter(model: Any, block: int, leaf: str) -> str:
    names = [n for n, _ in model.named_parameters() if f"layers.{block}." in n]
    return next(name for name in names if name.endswith(leaf))


# --- 8: OLMo --------------------------------------------------------------------------------------


@pytest.mark.skipif(not available("olmo_hybrid"), reason="this transformers has no OLMo-Hybrid")
def test_08_olmo_convolutions_that_transformers_re_split_are_read_and_not_exported(
    tmp_path: Path,
) -> None:
    checkpoint = open_checkpoint(save("olmo_hybrid", tmp_path / "olmo"))
    spec = checkpoint.spec
    layer = spec.layers[0]
    stored = [checkpoint.shapes[f"{layer.prefix}{x}_conv1d.weight"][0] for x in "qkv"]
    assert stored != [layer.key_rows, layer.key_rows, layer.value_rows]
    assert sum(stored) == layer.conv_channels
    assert len(spec.warnings) == 1
    assert "split 22/22/20 instead of 16/16/32" in spec.warnings[0]
    assert spec.warnings[0] in api.analyze(checkpoint.path).warnings
    order = LayerOrder.of_keys(layer, np.tile(np.arange(layer.key_dim)[::-1], (2, 1)))
    with pytest.raises(UnsupportedModel, match="conv1d"):
        list(layer_moves(spec, layer, order, checkpoint.shapes))


def test_08_convolutions_with_other_rows_in_sum_are_refused() -> None:
    shapes = of("Olmo-Hybrid-7B")
    shapes["model.layers.0.linear_attn.v_conv1d.weight"] = (5761, 1, 4)
    with pytest.raises(NumericError, match="have 11521 channels, expected 11520"):
        detect(shapes, BY_NAME["Olmo-Hybrid-7B"].config)


def test_08_olmo_beta_and_epsilon_do_not_reach_the_horizons() -> None:
    plain = spec_of("Olmo-Hybrid-7B")
    assert spec_of("Olmo-Hybrid-7B", linear_allow_neg_eigval=False, rms_norm_eps=1e-2) == plain


# --- 9: one norm weight for all heads -------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "suffix"),
    [
        ("qwen3_5", "norm.weight"),
        ("kimi_linear", "o_norm.weight"),
        ("lara_mini", "out_norm.weight"),
    ],
)
def test_09_a_value_order_per_head_is_refused_because_heads_share_a_norm(
    family: str, suffix: str
) -> None:
    layer = LinearLayer(0, 0, 2, 2, 4, 3, 4, "l.")
    plain = LayerOrder.identity(layer)
    common = np.tile([2, 0, 1], (2, 1))
    order = LayerOrder(plain.bundles, plain.heads, plain.keys, common)
    assert index_of(family, suffix, layer, order).tolist() == [2, 0, 1]
    order = LayerOrder(plain.bundles, plain.heads, plain.keys, np.array([[2, 0, 1], [0, 1, 2]]))
    with pytest.raises(UnsupportedModel, match="share one output norm"):
        index_of(family, suffix, layer, order)
    rule: AxisRule = TABLE["nemotron_h"].axes["norm.weight"][0]
    assert rule.segments == ("value_rows",)  # Mamba2: one weight per channel


# --- 10: bundles and dimensions -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "bundle"),
    [
        ("Qwen3.5-0.8B", 1),
        ("Qwen3.5-4B", 2),
        ("Qwen3.6-27B", 3),
        ("Qwen3.5-397B-A17B", 4),
        ("Qwen3.8-2.4T-A95B", 8),
    ],
)
def test_10_one_to_eight_value_heads_share_a_key_head(release: str, bundle: int) -> None:
    assert {layer.bundle for layer in spec_of(release).layers} == {bundle}


@pytest.mark.parametrize(
    ("release", "key_dim", "value_dim"), [("Olmo-Hybrid-7B", 96, 192), ("Jet-Nemotron-2B", 96, 256)]
)
def test_10_key_and_value_dimensions_differ(release: str, key_dim: int, value_dim: int) -> None:
    layer = spec_of(release).layers[0]
    assert (layer.key_dim, layer.value_dim) == (key_dim, value_dim)


# --- 11: full attention under the same name -------------------------------------------------------


def test_11_full_attention_under_the_same_module_name_is_not_linear() -> None:
    shapes, config = k3()
    full = "language_model.model.layers.3.self_attn."
    linear = "language_model.model.layers.0.self_attn."
    assert shapes[full + "g_proj.weight"] == shapes[linear + "g_proj.weight"]
    assert [layer.index for layer in detect(shapes, config).layers] == [0, 1, 2]
    for release in ("Kimi-Linear-48B-A3B-Instruct", "Ling-3.0-tiny"):
        spec = spec_of(release)
        module = spec.layers[0].prefix.split(".")[-2]
        last = spec.num_layers - 1
        assert any(name.startswith(f"model.layers.{last}.{module}.") for name in of(release))
        assert last not in {layer.index for layer in spec.layers}


# --- 12: two architectures of one name ------------------------------------------------------------


def test_12_bailing_hybrid_is_ling_3_with_a_log_and_ling_2_without() -> None:
    assert spec_of("Ling-3.0-flash").name == "bailing_hybrid"
    shapes = {"model.layers.0.attention.query_key_value.weight": (8, 8)}
    config = {"model_type": "bailing_hybrid", "num_hidden_layers": 1}
    with pytest.raises(UnsupportedModel, match="fixed decay slope") as caught:
        detect(shapes, config)
    assert caught.value.exit_code == 4
    assert "known families: alice_ai" in str(caught.value.hint)
    assert "attention x1" in str(caught.value.hint)


def test_12_the_output_projection_of_ling_has_two_names() -> None:
    axes = TABLE["bailing_hybrid"].axes
    assert axes["o_proj.weight"] == axes["dense.weight"] == (AxisRule(1, ("value_rows",)),)
    assert "model.layers.0.attention.o_proj.weight" in of("Ling-3.0-tiny", 0)


def test_12_blocks_behind_the_last_whole_group_are_full_attention() -> None:
    linear = [i for i in range(20) if (i + 1) % 5]  # groups of five: blocks 20 to 23 are left over
    shapes = {n: s for n, s in of("Ling-3.0-tiny").items() if ".attention." not in n}
    for name, shape in of("Ling-3.0-tiny", 0).items():
        if ".attention." in name:
            shapes |= {name.replace("layers.0.", f"layers.{i}."): shape for i in linear}
    config = BY_NAME["Ling-3.0-tiny"].config | {"layer_group_size": 5}
    assert [layer.index for layer in detect(shapes, config).layers] == linear


# --- 13: head_dim ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "junk"),
    [
        ("Kimi-Linear-48B-A3B-Instruct", 72),
        ("GLM-5.3-Flash", 0),
        ("GLM-5.3-Flash", 192),
        ("Qwen3.6-27B", 256),
        ("Qwen3-Next-80B-A3B-Instruct", 256),
    ],
)
def test_13_top_level_head_dim_belongs_to_the_other_layers(release: str, junk: int) -> None:
    assert spec_of(release, head_dim=junk) == spec_of(release)
    assert spec_of(release).layers[0].key_dim == 128


def test_13_ling_saved_by_transformers_has_its_rope_dimension_in_head_dim() -> None:
    assert spec_of("Ling-3.0-tiny", head_dim=64, linear_head_dim=128).layers[0].key_dim == 128


# --- 14: shapes of A_log --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "tensor", "shape"),
    [
        ("Qwen3.6-27B", "model.language_model.layers.0.linear_attn.A_log", (48,)),
        ("Kimi-Linear-48B-A3B-Instruct", "model.layers.0.self_attn.A_log", (1, 1, 32, 1)),
        ("Kimi-K3", "language_model.model.layers.0.self_attn.A_log", (128,)),
    ],
)
def test_14_a_log_has_three_shapes(release: str, tensor: str, shape: tuple[int, ...]) -> None:
    if release == "Kimi-K3":
        shapes, config = k3()
    else:
        shapes, config = of(release), BY_NAME[release].config
    assert shapes[tensor] == shape
    detect(shapes, config)
    shapes[tensor] = (7,)
    with pytest.raises(NumericError, match=r"A_log has shape \[7\]"):
        detect(shapes, config)


# --- 15: orientation of the state -----------------------------------------------------------------


def test_15_the_state_has_keys_first_in_transformers_and_here(tmp_path: Path) -> None:
    loaded = load_model(write_checkpoint(tmp_path / "model", "qwen3_5"))
    layer = loaded.spec.layers[0]
    assert layer.key_dim != layer.value_dim
    _, cache = prefill(loaded, torch.arange(3, 19)[None])
    assert states(cache).recurrent[0].shape == (
        1,
        layer.value_heads,
        layer.key_dim,
        layer.value_dim,
    )
    channels = spec_of("Kimi-Linear-48B-A3B-Instruct")
    assert channels.unit_values(channels.layers[0]) == 128  # one key row of V columns
    assert loaded.spec.unit_values(layer) == layer.key_dim * layer.value_dim


# --- 16: GLM's other numbers ----------------------------------------------------------------------


def test_16_only_the_linear_numbers_of_glm_are_used() -> None:
    plain = spec_of("GLM-5.3-Flash")
    other = spec_of(
        "GLM-5.3-Flash", index_topk=1, index_kpool=16, index_head_dim=3, num_attention_heads=8
    )
    assert other == plain


# --- 17: the bound is a multiplier ----------------------------------------------------------------


def test_17_the_lower_bound_multiplies_and_does_not_clamp() -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    decay = DecayParameters(rng.normal(0, 1, 4), rng.normal(-1, 3, (4, 8)), "F32", "F32")
    one = static_log_decay(decay, gate="safe", lower_bound=-5.0, gate_input=0.0)
    two = static_log_decay(decay, gate="safe", lower_bound=-10.0, gate_input=0.0)
    assert np.allclose(two, 2 * one, rtol=1e-15)
    assert (one > -5.0).all()
    assert len(np.unique(one)) == one.size  # a clamp would have made the fast ones equal


# --- 18: expanded heads ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_18_queries_and_keys_arrive_unexpanded_whatever_the_version_passes(
    family: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    loaded = load_model(tiny_checkpoint(family))
    layer = loaded.spec.layers[0]
    assert layer.bundle == 2
    seen: list[tuple[int, int]] = []
    ours = loaded.recurrence.prefill

    def watch(ordinal, q, k, v, g, beta, state):  # type: ignore[no-untyped-def]
        seen.append((q.shape[2], v.shape[2]))
        return ours(ordinal, q, k, v, g, beta, state)

    with swap(loaded, prefill=watch), torch.no_grad():
        loaded.model(input_ids=torch.arange(3, 12)[None], use_cache=False)
    assert set(seen) == {(layer.key_heads, layer.value_heads)}


# --- what GGUF files hold -------------------------------------------------------------------------


def test_gguf_names_are_refused_with_the_reason() -> None:
    shapes = {"blk.0.ssm_a": (32,), "blk.0.ssm_dt.bias": (32,), "blk.0.attn_qkv.weight": (8, 8)}
    with pytest.raises(UnsupportedModel, match=r"GGUF, where ssm_a holds -exp\(A_log\)") as caught:
        detect(shapes, {"model_type": "qwen3_5", "num_hidden_layers": 1})
    assert caught.value.exit_code == 4


def test_rates_stored_as_a_log_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_checkpoint(tmp_path / "model", "kimi_linear")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.A_log"
    tensors[name][0, 0, 2, 0] = 14.5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(NumericError, match=r"A_log\[2\] is 14.5: the logarithm") as caught:
        api.analyze(folder)
    assert caught.value.exit_code == 5
    assert caught.value.context["tensor"] == name


def test_a_log_of_zero_is_what_the_safe_gate_starts_from() -> None:
    assert sign_warning([np.array([-1.0, 0.0]), np.array([-2.0])]) is None
    assert sign_warning([np.array([-1.0]), np.array([-2.0])]) is not None


def test_a_model_without_a_positive_a_log_gets_a_warning(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_checkpoint(tmp_path / "model", "kimi_linear")
    tensors = load_file(folder / "model.safetensors")
    converted = {n: -t.exp() if n.endswith("A_log") else t for n, t in tensors.items()}
    save_file(converted, folder / "model.safetensors")
    assert any("every A_log of this model is negative" in w for w in api.analyze(folder).warnings)
