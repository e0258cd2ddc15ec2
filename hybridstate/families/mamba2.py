"""Mamba2 hybrids: one decay per head and no delta rule, so horizons, counts and bytes only.

The state of a head is `[P, N]`. N (the state size) takes the place of K and P (the head size) that of V; B and C take
the places of k and q, shared by the heads of a group. The convolution runs over x, B and C.
"""

from dataclasses import replace
from typing import Final

from hybridstate.families.axes import MAMBA2
from hybridstate.families.spec import Family, Geometry, LayerRule

_MAMBA_NAMES: Final = ("linear_attention", "mamba", "mamba2")

BAMBA: Final = Family(
    name="bamba",
    kind="mamba2",
    model_types=("bamba",),
    modules=("mamba",),
    present=("in_proj.weight", "conv1d.weight", "D"),
    absent=("x_proj.weight",),  # Mamba1
    geometry=Geometry(
        key_heads=("mamba_n_groups",),
        value_heads=("mamba_n_heads",),
        key_dim=("mamba_d_state",),
        value_dim=("mamba_d_head", "mamba_expand * hidden_size / mamba_n_heads"),
        conv_width=("mamba_d_conv",),
    ),
    layer_rules=(
        LayerRule("except_zero_based", "attn_layer_indices"),
        LayerRule("names", "layers_block_type", _MAMBA_NAMES),
    ),
    axes=MAMBA2,
    runtime=None,
    conv=("value_rows", "key_rows", "key_rows"),
    analysis_only=True,
)

MAMBA2_FAMILIES: Final[tuple[Family, ...]] = (
    BAMBA,
    replace(
        BAMBA,
        name="granitemoehybrid",
        model_types=("granitemoehybrid",),
        layer_rules=(
            LayerRule("names", "layer_types", _MAMBA_NAMES),
            LayerRule("names", "layers_block_type", _MAMBA_NAMES),
        ),
    ),
    # Attention runs beside the Mamba2 layer in every block.
    replace(
        BAMBA,
        name="falcon_h1",
        model_types=("falcon_h1",),
        geometry=replace(
            BAMBA.geometry,
            value_dim=(
                "mamba_d_head",
                "mamba_d_ssm / mamba_n_heads",
                "mamba_expand * hidden_size / mamba_n_heads",
            ),
        ),
        layer_rules=(LayerRule("every", "num_hidden_layers"),),
    ),
    replace(
        BAMBA,
        name="nemotron_h",
        model_types=("nemotron_h",),
        modules=("mixer",),
        geometry=Geometry(
            key_heads=("n_groups", "mamba_n_groups"),
            value_heads=("mamba_num_heads",),
            key_dim=("ssm_state_size", "mamba_d_state"),
            value_dim=("mamba_head_dim",),
            conv_width=("conv_kernel", "mamba_d_conv"),
        ),
        layer_rules=(
            LayerRule("names", "layers_block_type", _MAMBA_NAMES),
            LayerRule("names", "hybrid_override_pattern", ("M",)),
        ),
    ),
    # A hybrid block is a shared transformer block followed by a Mamba2 layer.
    replace(
        BAMBA,
        name="zamba2",
        model_types=("zamba2",),
        modules=("mamba", "mamba_decoder.mamba"),
        geometry=Geometry(
            key_heads=("mamba_ngroups",),
            value_heads=("n_mamba_heads",),
            key_dim=("mamba_d_state",),
            value_dim=("mamba_headdim", "mamba_expand * hidden_size / n_mamba_heads"),
            conv_width=("mamba_d_conv",),
        ),
        layer_rules=(LayerRule("names", "layers_block_type", (*_MAMBA_NAMES, "hybrid")),),
    ),
)
