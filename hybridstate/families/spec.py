"""What the rest of the package may know about a model: plain frozen records, no reading, no torch.

A `Family` describes an architecture and is pure data (`table.py`). A `ModelSpec` describes one
checkpoint: its family, its gate and the geometry of each linear-attention layer. The logical state
of a layer is `S[H, K, V]`: value heads, key channels, value columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from hybridstate.defaults import GATE_INPUT, PAPER_GATE_INPUT
from hybridstate.errors import UnsupportedModel

Gate: TypeAlias = Literal["softplus", "safe"]
Kind: TypeAlias = Literal["gdn", "kda", "mamba2"]
Segment: TypeAlias = Literal[
    "key_rows",  # key head major, K rows each
    "value_rows",  # value head major, V rows each
    "gate_rows",  # value head major, K rows each: one decay per key channel of a value head
    "key_heads",
    "value_heads",
    "qkvz_groups",  # per key head: q (K), k (K), v of its bundle (B*V), z of its bundle (B*V)
    "ba_groups",  # per key head: b of its bundle (B), a of its bundle (B)
    "value_shared",  # one vector of V shared by all heads
    "padding",  # whatever is left over: stored, never read
]


QKV: Final[tuple[Segment, ...]] = ("key_rows", "key_rows", "value_rows")
"""Channels of the usual short convolution: q, k and v."""


@dataclass(frozen=True, slots=True)
class AxisRule:
    """One axis of a tensor that follows heads or channels, as consecutive segments along it."""

    axis: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the config holds the sizes of a linear layer; the first expression that can be read wins.

    An expression is a dotted path, or paths joined by ` * ` and ` / ` from left to right (`head_dim * expand_v`).
    `conv_switch` names a flag that is false where the layer has no short convolution.
    """

    key_heads: tuple[str, ...]
    value_heads: tuple[str, ...]
    key_dim: tuple[str, ...]
    value_dim: tuple[str, ...]
    conv_width: tuple[str, ...]
    conv_switch: str | None = None


@dataclass(frozen=True, slots=True)
class LayerRule:
    """One way a config states which blocks are linear.

    `names`: list (or one character each) of block types, linear where in `values` · `one_based`/`zero_based`: list
    of linear blocks · `except_zero_based`: list of the others · `interval`: block i is full attention iff
    (i + 1) % interval == 0 · `whole_groups`: the same, and full attention behind the last whole group; a list marks
    linear blocks with 1 · `every`: all of them.
    """

    how: Literal[
        "names",
        "one_based",
        "zero_based",
        "except_zero_based",
        "interval",
        "whole_groups",
        "every",
    ]
    path: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Runtime:
    """Where transformers keeps the recurrence of this family.

    Attributes:
        module: import path of the modeling file, whose globals `prefill` and `decode` are replaced.
        prefill: name of the function called for more than one token.
        decode: name of the function called for one token with a previous state.
        attribute: attribute of the decoder layer that holds the linear module.
        linear_class: class name of that module.
        causal_lm: class name of the text model.
    """

    module: str
    prefill: str
    decode: str
    attribute: str
    linear_class: str
    causal_lm: str


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        name: short name used in plans and messages.
        kind: `gdn` (delta rule, one decay per value head), `kda` (one per key channel), or `mamba2` (no delta rule,
            one decay per head; groups, state size N and head size P stand for key heads, K and V).
        model_types: values of `model_type`, root or text config, that belong here.
        architectures: class names of the config that belong here, whatever `model_type` says.
        modules: components of the tensor name that hold the linear layer (`linear_attn`).
        a_log, dt_bias: suffixes of the decay tensors after the layer prefix.
        present, absent: suffixes that tell this layout from its relatives.
        geometry, layer_rules: where the config says what.
        gate: the gate when the config has no lower bound; `safe` means that one is required.
        lower_bound: dotted config paths of the safe gate's lower bound.
        a_log_padded: `A_log` may hold more entries than heads (the rest is padding).
        conv: what passes the short convolution, and so lies in its cache.
        analysis_only: horizons, counts and bytes are known; plans and weights are refused.
        axes: tensor suffix -> axes that follow heads or channels; every tensor of a linear layer is
            listed, with no axes where nothing moves.
        runtime: hooks in transformers, None where transformers has no class.
    """

    name: str
    kind: Kind
    model_types: tuple[str, ...]
    modules: tuple[str, ...]
    present: tuple[str, ...]
    absent: tuple[str, ...]
    geometry: Geometry
    layer_rules: tuple[LayerRule, ...]
    axes: Mapping[str, tuple[AxisRule, ...]]
    runtime: Runtime | None
    gate: Gate = "softplus"
    lower_bound: tuple[str, ...] = ()
    a_log_padded: bool = False
    a_log: str = "A_log"
    dt_bias: str = "dt_bias"
    architectures: tuple[str, ...] = ()
    conv: tuple[Segment, ...] = QKV
    analysis_only: bool = False


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """Geometry of one linear-attention layer.

    Attributes:
        index: 0-based block index in the model.
        ordinal: 0-based position among the linear layers.
        key_heads, value_heads: Hk and H; value head h reads key head `h // (H // Hk)`.
        key_dim, value_dim: K and V.
        conv_width: taps of the short convolution (its cache holds `conv_width - 1` columns).
        prefix: start of its tensor names, with the final dot.
        conv: segments that pass the short convolution.
    """

    index: int
    ordinal: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    prefix: str
    conv: tuple[Segment, ...] = QKV

    @property
    def bundle(self) -> int:
        """Value heads per key head, B = H / Hk."""
        return self.value_heads // self.key_heads

    @property
    def key_rows(self) -> int:
        """Rows of the q (or k) projection."""
        return self.key_heads * self.key_dim

    @property
    def value_rows(self) -> int:
        """Rows of the v projection."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution."""
        return sum(self.segment_length(segment) for segment in self.conv)

    def segment_length(self, segment: Segment) -> int:
        """Entries of one segment along its axis; padding counts zero."""
        lengths: dict[Segment, int] = {
            "key_rows": self.key_rows,
            "value_rows": self.value_rows,
            "gate_rows": self.value_heads * self.key_dim,
            "key_heads": self.key_heads,
            "value_heads": self.value_heads,
            "qkvz_groups": 2 * self.key_rows + 2 * self.value_rows,
            "ba_groups": 2 * self.value_heads,
            "value_shared": self.value_dim,
            "padding": 0,
        }
        return lengths[segment]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One checkpoint: family, gate and linear layers.

    Attributes:
        family: the table entry.
        gate: `softplus` or `safe`.
        lower_bound: l of the safe gate (a multiplier, below zero), None for softplus.
        layers: the linear layers in order.
        num_layers: all blocks of the text model.
        warnings: oddities of names and shapes that do not stop the work, one line each.
    """

    family: Family
    gate: Gate
    lower_bound: float | None
    layers: tuple[LinearLayer, ...]
    num_layers: int
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the family."""
        return self.family.name

    @property
    def unit(self) -> Literal["head", "channel"]:
        """What a retained unit is: a value head, or one (head, key channel) where each has its own decay (KDA)."""
        return "channel" if self.family.kind == "kda" else "head"

    @property
    def default_gate_input(self) -> float:
        """Representative gate input a_s of DASC 3.3 for this family, else for its gate."""
        if self.default_gate_input_source == "paper":
            return PAPER_GATE_INPUT[self.family.name]
        return GATE_INPUT[self.gate]

    @property
    def default_gate_input_source(self) -> Literal["paper", "default"]:
        """The paper gives a_s for three models; elsewhere the value of a relative with the same gate is a default."""
        native = self.gate == self.family.gate
        return "paper" if native and self.family.name in PAPER_GATE_INPUT else "default"

    @property
    def default_gate_input_warning(self) -> str | None:
        """What to say where a_s is a default: whose value it is, and which way it errs."""
        if self.default_gate_input_source == "paper":
            return None
        given = (
            "this for Qwen3-Next and Kimi-Linear" if self.gate == "softplus" else "0.8 for Kimi-K3"
        )
        return (
            f"gate input {self.default_gate_input:g} is a default for {self.name} (of the {self.gate} gate the paper "
            f"gives {given}, nothing else): a larger one shortens every horizon and drops more units"
        )

    def check_plannable(self) -> None:
        """Refuse a family that is known for analysis only.

        Raises:
            UnsupportedModel: it is.
        """
        if self.family.analysis_only:
            raise UnsupportedModel(
                f"{self.name} models are for analysis only: their layers follow no delta rule, which plans, "
                "kernels and the runtime assume",
                hint="hybridstate analyze MODEL gives horizons, retained units and bytes",
            )

    def decay_shape(self, layer: LinearLayer) -> tuple[int, ...]:
        """Shape of dt_bias, and of everything that has one entry per unit: `[H]` or `[H, K]`."""
        heads = layer.value_heads
        return (heads, layer.key_dim) if self.unit == "channel" else (heads,)

    def units(self, layer: LinearLayer) -> int:
        """Units of one layer."""
        return layer.value_heads * (layer.key_dim if self.unit == "channel" else 1)

    def unit_values(self, layer: LinearLayer) -> int:
        """State values of one unit: K*V for a head, V for a channel."""
        return layer.value_dim * (1 if self.unit == "channel" else layer.key_dim)
