"""Which axes of a linear layer's tensors follow heads or channels, shared by the tables of the families."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from hybridstate.families.spec import AxisRule, Segment

Axes: TypeAlias = Mapping[str, tuple[AxisRule, ...]]


def rows(*segments: Segment) -> tuple[AxisRule, ...]:
    """Axis 0."""
    return (AxisRule(0, segments),)


def columns(*segments: Segment) -> tuple[AxisRule, ...]:
    """Axis 1."""
    return (AxisRule(1, segments),)


def table(*parts: Axes) -> Axes:
    """One read-only table of several parts; the last one wins."""
    return MappingProxyType({name: rules for part in parts for name, rules in part.items()})


HEAD_DECAY: Final[Axes] = {"A_log": rows("value_heads"), "dt_bias": rows("value_heads")}

FLAT_GDN: Final[Axes] = table(
    HEAD_DECAY,
    {
        "in_proj_qkv.weight": rows("key_rows", "key_rows", "value_rows"),
        "in_proj_z.weight": rows("value_rows"),
        "in_proj_b.weight": rows("value_heads"),
        "in_proj_a.weight": rows("value_heads"),
        "conv1d.weight": rows("key_rows", "key_rows", "value_rows"),
        "norm.weight": rows("value_shared"),
        "out_proj.weight": columns("value_rows"),
    },
)

PACKED_GDN: Final[Axes] = table(
    HEAD_DECAY,
    {
        "in_proj_qkvz.weight": rows("qkvz_groups"),
        "in_proj_ba.weight": rows("ba_groups"),
        # flat although the projection above is grouped
        "conv1d.weight": rows("key_rows", "key_rows", "value_rows"),
        "norm.weight": rows("value_shared"),
        "out_proj.weight": columns("value_rows"),
    },
)

ONE_PROJECTION_GDN: Final[Axes] = table(
    HEAD_DECAY,
    {
        "in_proj.weight": rows(
            "key_rows", "key_rows", "value_rows", "value_rows", "value_heads", "value_heads"
        ),
        "conv1d.weight": rows("key_rows", "key_rows", "value_rows"),
        "out_norm.weight": rows("value_shared"),
        "out_proj.weight": columns("value_rows"),
    },
)

SPLIT_CONV: Final[Axes] = {
    "q_conv1d.weight": rows("key_rows"),
    "k_conv1d.weight": rows("key_rows"),
    "v_conv1d.weight": rows("value_rows"),
}

SPLIT_QKV: Final[Axes] = {
    "q_proj.weight": rows("key_rows"),
    "k_proj.weight": rows("key_rows"),
    "v_proj.weight": rows("value_rows"),
}

SPLIT_GDN: Final[Axes] = table(
    HEAD_DECAY,
    SPLIT_QKV,
    SPLIT_CONV,
    {
        "g_proj.weight": rows("value_rows"),
        "a_proj.weight": rows("value_heads"),
        "b_proj.weight": rows("value_heads"),
        "o_norm.weight": rows("value_shared"),
        "o_proj.weight": columns("value_rows"),
    },
)

KDA_SHARED: Final[Axes] = table(
    SPLIT_QKV,
    SPLIT_CONV,
    {
        "b_proj.weight": rows("value_heads"),
        "dt_bias": rows("key_rows"),
        "o_norm.weight": rows("value_shared"),
    },
)
LOW_RANK_F: Final[Axes] = {"f_a_proj.weight": (), "f_b_proj.weight": rows("key_rows")}
LOW_RANK_G: Final[Axes] = {"g_a_proj.weight": (), "g_b_proj.weight": rows("value_rows")}
FULL_RANK_G: Final[Axes] = {"g_proj.weight": rows("value_rows")}
O_PROJ: Final[Axes] = {"o_proj.weight": columns("value_rows")}

FOUR_AXIS_A_LOG: Final[Axes] = {"A_log": (AxisRule(2, ("value_heads",)),)}  # stored as [1, 1, H, 1]
FLAT_A_LOG: Final[Axes] = {"A_log": rows("value_heads")}
PADDED_A_LOG: Final[Axes] = {"A_log": rows("value_heads", "padding")}

MAMBA2: Final[Axes] = table(
    HEAD_DECAY,
    {
        "D": rows("value_heads"),
        "in_proj.weight": rows("value_rows", "value_rows", "key_rows", "key_rows", "value_heads"),
        "conv1d.weight": rows("value_rows", "key_rows", "key_rows"),
        "conv1d.bias": rows("value_rows", "key_rows", "key_rows"),
        "norm.weight": rows("value_rows"),  # one weight per channel, not shared by the heads
        "out_proj.weight": columns("value_rows"),
    },
)
