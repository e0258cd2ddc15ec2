"""The table against transformers' sources, and against itself."""

import ast
import importlib.util
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
    layer = LinearLayer(0, 0, 2, 6 if family.kind == "gdn" else 2, 8, 12, 4, "l.")
    axes = family.axes
    assert {family.a_log, family.dt_bias} <= set(axes)
    assert set(family.present) <= set(axes)
    projections = [
        rule
        for suffix, rules in axes.items()
        if suffix.startswith(("in_proj", "q_proj", "k_proj", "v_proj")) and "conv" not in suffix
        for rule in rules
        if not suffix.startswith(("in_proj_z", "in_proj_b", "in_proj_a"))
    ]
    rows = sum(layer.segment_length(s) for rule in projections for s in rule.segments)
    packed_z = layer.value_rows if "in_proj_qkvz.weight" in axes else 0
    assert rows == layer.conv_channels + packed_z
