"""The table against transformers' sources, and against itself."""

import ast
import importlib.util
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from hybridstate.families import FAMILIES, Family, LinearLayer

WITH_RUNTIME = [family for family in FAMILIES if family.runtime is not None]


@cache
def module_names(module: str) -> frozenset[str] | None:
    """Top-level names of a modeling file, parsed and not imported; None where it does not exist."""
    root = importlib.util.find_spec("transformers")
    assert root is not None
    assert root.origin is not None
    file = Path(root.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if not file.exists():
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


@pytest.mark.parametrize("family", WITH_RUNTIME, ids=lambda f: f.name)
def test_runtime_hooks_exist_in_transformers(family: Family) -> None:
    assert family.runtime is not None
    names = module_names(family.runtime.module)
    if names is None:
        pytest.skip(f"this transformers has no {family.name}")
    runtime = family.runtime
    wanted = {runtime.prefill, runtime.decode, runtime.linear_class, runtime.causal_lm}
    assert wanted <= names


def test_names_are_unique_and_signatures_tell_layouts_apart() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for a in FAMILIES:
        for b in FAMILIES:
            if a is b or not set(a.model_types) & set(b.model_types):
                continue
            told_apart = set(a.present) & set(b.absent) or set(b.present) & set(a.absent)
            assert told_apart, f"{a.name} and {b.name} share a model type and a signature"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_axes_cover_q_k_v_once_and_the_decay_tensors(family: Family) -> None:
    axes = family.axes
    assert {family.a_log, family.dt_bias} <= set(axes)
    assert set(family.present) <= set(axes)
    inputs = ("in_proj", "q_proj", "k_proj", "v_proj")
    segments = Counter(
        segment
        for suffix, rules in axes.items()
        if suffix.startswith(inputs) and "conv" not in suffix
        for rule in rules
        for segment in rule.segments
    )
    if segments["qkvz_groups"]:
        assert segments == {"qkvz_groups": 1, "ba_groups": 1}
        return
    assert segments["key_rows"] == 2
    gate_inside = any(
        suffix.startswith("in_proj") for suffix in axes
    )  # z beside v, in whichever tensor
    assert segments["value_rows"] == 1 + gate_inside


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_convolution_axes_are_what_the_convolution_cache_holds(family: Family) -> None:
    stored = [
        segment
        for suffix, rules in family.axes.items()
        if suffix.endswith("conv1d.weight")
        for rule in rules
        for segment in rule.segments
    ]
    assert not stored or tuple(stored) == family.conv


def test_only_delta_rule_families_may_be_planned() -> None:
    for family in FAMILIES:
        assert family.analysis_only == (family.kind == "mamba2"), family.name
        assert not (family.analysis_only and family.runtime), family.name


def test_conv_channels_follow_the_segments_of_the_family() -> None:
    by_name = {family.name: family for family in FAMILIES}
    jet = LinearLayer(0, 0, 12, 12, 96, 256, 4, "l.", by_name["jet_nemotron"].conv)
    assert jet.conv_channels == 12 * 256
    mamba = LinearLayer(0, 0, 8, 128, 128, 64, 4, "l.", by_name["nemotron_h"].conv)
    assert mamba.conv_channels == 128 * 64 + 2 * 8 * 128
    qwen = LinearLayer(0, 0, 16, 32, 128, 128, 4, "l.")
    assert qwen.conv_channels == 8192
