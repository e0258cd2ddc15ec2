"""The tables of docs/families.md, from the table of families and from the full-size fixtures of the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is no installed package

from hybridstate.defaults import GATE_INPUT, PAPER_GATE_INPUT
from hybridstate.families import FAMILIES, Family
from tests.released import RELEASES, Released, nbytes

KINDS = {"gdn": "GDN", "kda": "KDA", "mamba2": "Mamba2"}
HOW = {
    "names": "{path} names it",
    "one_based": "{path}, from 1",
    "zero_based": "{path}, from 0",
    "except_zero_based": "all but {path}, from 0",
    "interval": "all but each {path}-th",
    "whole_groups": "all but each {path}-th, in whole groups",
    "every": "all",
}


def families() -> str:
    """One row per entry of the table."""
    rows = [
        "| family | kind | `model_type` | below | gate | `a_s` | linear blocks | runs in transformers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        cells = (
            f"`{family.name}`",
            KINDS[family.kind],
            ", ".join(f"`{name}`" for name in family.model_types),
            ", ".join(f"`{module}.`" for module in family.modules),
            _gate(family),
            _gate_input(family),
            "; ".join(HOW[rule.how].format(path=f"`{rule.path}`") for rule in family.layer_rules),
            _runs(family),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _gate(family: Family) -> str:
    if family.gate == "safe":
        return "safe, bound required"
    return "softplus, safe with a bound" if family.lower_bound else "softplus"


def _gate_input(family: Family) -> str:
    if family.name in PAPER_GATE_INPUT:
        return f"{PAPER_GATE_INPUT[family.name]:g} (paper)"
    return f"{GATE_INPUT[family.gate]:g} (default)"


def _runs(family: Family) -> str:
    if family.analysis_only:
        return "analysis only"
    return "yes" if family.runtime is not None else "no"


def releases() -> str:
    """One row per full-size fixture."""
    rows = [
        "| release | family | layers (linear) | heads: key, value | K x V | units | FP32 state | stored | "
        "inferred in the fixture |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    kinds = {family.name: family.kind for family in FAMILIES}
    for release in RELEASES:
        keys, values, key_dim, value_dim, _ = release.sizes
        linear = len(release.linear)
        per_layer = values * (key_dim if kinds[release.family] == "kda" else 1)
        state = linear * values * key_dim * value_dim * 4
        stored = sum(nbytes(dtype, shape) for _, dtype, shape in release.tensors())
        cells = (
            release.name,
            f"`{release.family}`",
            f"{_blocks(release)} ({linear})",
            f"{keys}, {values}",
            f"{key_dim} x {value_dim}",
            f"{linear * per_layer:,}",
            f"{state / 2**20:.1f} MiB",
            f"{stored / 1e9:,.1f} GB",
            release.inferred,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _blocks(release: Released) -> int:
    text = release.config.get("text_config", release.config)
    return int(text["num_hidden_layers"])
