"""Which entries of which tensor move when heads, key channels or value dims change places.

Everything follows from the family's axis table: a tensor axis is a row of segments, a segment is
laid out over key heads, value heads, key channels and value dims, and a `LayerOrder` says where
each of those comes from. Bytes go in and bytes come out, so any stored dtype is permuted exactly.

Moving key channels of one head together in q, k and their convolution (and, for KDA, in the decay
projection and `dt_bias`) changes no output: the L2 norm and the dot products do not see the order
(DAMP Eq. 17). Nothing else of a layer depends on it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint.header import DTYPE_BITS
from hybridstate.errors import PlanMismatch, UnsupportedModel
from hybridstate.families import AxisRule, LinearLayer, ModelSpec
from hybridstate.plan.placement import packed_order
from hybridstate.plan.store import Plan

Index = NDArray[np.int64]

SCALES: Final = (".weight_scale_inv", ".weight_scale")
"""Endings of the scales of a quantised weight: block FP8, and one per row or per tensor."""

SCALE_BLOCK: Final = 128
"""Entries along each axis that share a scale in block FP8."""

_UNQUANTISED: Final = "use the unquantised checkpoint, or --no-weights and let the kernel gather"


@dataclass(frozen=True, slots=True)
class LayerOrder:
    """Where everything of a layer comes from; new position -> old position.

    Attributes:
        bundles: `[Hk]`, key heads (each with its bundle of value heads).
        heads: `[H]`, value heads, consistent with `bundles`.
        keys: `[Hk, K]`, key channels, by *old* key head.
        values: `[H, V]`, value dims, by *old* value head.
        fold: the output norm's weight moves into the output projection and becomes ones, so that
            heads which share it may order their value dims differently.
    """

    bundles: Index
    heads: Index
    keys: Index
    values: Index
    fold: bool = False

    @classmethod
    def identity(cls, layer: LinearLayer) -> "LayerOrder":
        """The order in which nothing moves."""
        return cls(
            np.arange(layer.key_heads),
            np.arange(layer.value_heads),
            np.tile(np.arange(layer.key_dim), (layer.key_heads, 1)),
            np.tile(np.arange(layer.value_dim), (layer.value_heads, 1)),
        )

    @classmethod
    def of_keys(cls, layer: LinearLayer, keys: Index) -> "LayerOrder":
        """Heads stay; key channels of each key head follow `keys` `[Hk, K]`."""
        order = cls.identity(layer)
        return cls(order.bundles, order.heads, np.asarray(keys, np.int64), order.values)

    @classmethod
    def of_value_heads(cls, layer: LinearLayer, keys: Index) -> "LayerOrder":
        """Heads stay; `keys` is `[H, K]` and must be equal inside each bundle.

        Raises:
            UnsupportedModel: value heads that share a key head want different orders, which
                weights cannot express.
        """
        bundles = np.asarray(keys, np.int64).reshape(layer.key_heads, layer.bundle, layer.key_dim)
        if (bundles != bundles[:, :1]).any():
            raise UnsupportedModel(
                f"layer {layer.index}: {layer.bundle} value heads share one key head but ask for "
                "different key orders; weights can hold one order per key head",
                hint="calibrate with --key-order shared, or export with --no-weights and let the "
                "kernel gather",
                layer=layer.index,
            )
        return cls.of_keys(layer, bundles[:, 0])

    def inverse(self) -> "LayerOrder":
        """The order that undoes this one."""
        bundles, heads = np.argsort(self.bundles), np.argsort(self.heads)
        return LayerOrder(
            bundles,
            heads,
            np.argsort(self.keys, axis=1)[self.bundles],
            np.argsort(self.values, axis=1)[self.heads],
        )


def _rows(source: Index, inside: Index) -> Index:
    """Head-major rows: for each new head its old head's rows, in the order of `inside`."""
    width = inside.shape[1]
    rows: Index = (source[:, None] * width + inside[source]).reshape(-1)
    return rows


def _key_rows(layer: LinearLayer, order: LayerOrder) -> Index:
    return _rows(order.bundles, order.keys)


def _value_rows(layer: LinearLayer, order: LayerOrder) -> Index:
    return _rows(order.heads, order.values)


def _gate_rows(layer: LinearLayer, order: LayerOrder) -> Index:
    """One row per key channel of a value head: the channels follow the order of its key head."""
    return _rows(order.heads, np.repeat(order.keys, layer.bundle, axis=0))


def _key_heads(layer: LinearLayer, order: LayerOrder) -> Index:
    return order.bundles


def _value_heads(layer: LinearLayer, order: LayerOrder) -> Index:
    return order.heads


def _qkvz_groups(layer: LinearLayer, order: LayerOrder) -> Index:
    """Per key head `[q K | k K | v B*V | z B*V]` (Qwen3-Next)."""
    K, V, B = layer.key_dim, layer.value_dim, layer.bundle
    size = 2 * K + 2 * B * V
    pieces = []
    for new, old in enumerate(order.bundles):
        heads = order.heads[new * B : (new + 1) * B]
        start = old * size
        inside = heads % B  # position inside the old bundle
        values = (inside[:, None] * V + order.values[heads]).reshape(-1)
        pieces += [
            start + order.keys[old],
            start + K + order.keys[old],
            start + 2 * K + values,
            start + 2 * K + B * V + values,
        ]
    return np.concatenate(pieces)


def _ba_groups(layer: LinearLayer, order: LayerOrder) -> Index:
    """Per key head `[b B | a B]` (Qwen3-Next)."""
    B = layer.bundle
    pieces = []
    for new, old in enumerate(order.bundles):
        inside = order.heads[new * B : (new + 1) * B] % B
        pieces += [old * 2 * B + inside, old * 2 * B + B + inside]
    return np.concatenate(pieces)


def _value_shared(layer: LinearLayer, order: LayerOrder) -> Index:
    """One vector for all heads: it can follow only an order that all heads share."""
    if order.fold:
        return np.arange(layer.value_dim)  # ones in any order
    if (order.values != order.values[:1]).any():
        raise UnsupportedModel(
            f"layer {layer.index}: heads ask for different value orders, but they share one output "
            "norm weight",
            hint="fold the norm into the output projection, or use one common value order",
            layer=layer.index,
        )
    common: Index = order.values[0]
    return common


_SEGMENTS: Mapping[str, Callable[[LinearLayer, LayerOrder], Index]] = {
    "key_rows": _key_rows,
    "value_rows": _value_rows,
    "gate_rows": _gate_rows,
    "key_heads": _key_heads,
    "value_heads": _value_heads,
    "qkvz_groups": _qkvz_groups,
    "ba_groups": _ba_groups,
    "value_shared": _value_shared,
}


def axis_index(layer: LinearLayer, rule: AxisRule, order: LayerOrder, length: int) -> Index:
    """Old position of every new entry along one axis of `length` entries.

    Raises:
        UnsupportedModel: the segments do not add up to `length`, or the order cannot be expressed.
    """
    pieces: list[Index] = []
    start = 0
    for segment in rule.segments:
        if segment == "padding":
            continue
        index = _SEGMENTS[segment](layer, order)
        pieces.append(start + index)
        start += len(index)
    if start > length or (start < length and "padding" not in rule.segments):
        raise UnsupportedModel(
            f"an axis of {length} entries, expected {start} ({' + '.join(rule.segments)})",
            hint="export from the checkpoint as released, not from a re-saved copy",
            layer=layer.index,
            found=length,
            expected=start,
        )
    return np.concatenate([*pieces, np.arange(start, length)])


@dataclass(frozen=True, slots=True)
class Move:
    """What happens to one tensor.

    Attributes:
        name: tensor name.
        shape: the stored shape, or an equivalent one (same bytes) in which the axes exist.
        axes: for each axis in which something moves, old position of every new entry.
        ones: all entries become one (an output norm that was folded).
        norm: tensor whose weight multiplies the columns before they move.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[tuple[int, Index], ...]
    ones: bool = False
    norm: str | None = None

    @property
    def still(self) -> bool:
        """Nothing changes."""
        return not (self.axes or self.ones or self.norm)


def layer_moves(
    spec: ModelSpec, layer: LinearLayer, order: LayerOrder, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Move]:
    """The move of every tensor of a linear layer, also of those that stay as they are.

    Args:
        shapes: shape of every tensor of the checkpoint by its stored name.

    Raises:
        UnsupportedModel: a tensor of the layer is not in the family's axis table (codes of a
            packed quantisation, for example), so nobody knows whether it should move; or scales
            that cannot follow their weight.
    """
    for name in sorted(n for n in shapes if n.startswith(layer.prefix)):
        suffix = name.removeprefix(layer.prefix)
        scaled = scaled_weight(suffix)
        if scaled is not None and layer.prefix + scaled not in shapes:
            scaled = None  # scales of nothing: refused below
        rules = spec.family.axes.get(suffix if scaled is None else scaled)
        if rules is None:
            raise UnsupportedModel(
                f"{name}: the axis table of {spec.name} does not know this tensor, so the weights "
                "cannot be permuted safely",
                hint="use the unquantised checkpoint, or --no-weights and let the kernel gather",
                tensor=name,
                layer=layer.index,
            )
        try:
            if scaled is None:
                move = _move(layer, order, name, shapes[name], rules)
                yield _folded(spec, layer, move, rules, shapes) if order.fold else move
            else:
                weight = _move(layer, order, name, shapes[layer.prefix + scaled], rules)
                yield scale_move(name, shapes[name], weight)
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"{name}: {error.message}", hint=error.hint, tensor=name, **error.context
            ) from error


def _move(
    layer: LinearLayer,
    order: LayerOrder,
    name: str,
    shape: tuple[int, ...],
    rules: tuple[AxisRule, ...],
) -> Move:
    if len(rules) == 1:
        shape, axis = _axis_of(layer, rules[0], shape)
        rules = (AxisRule(axis, rules[0].segments),)
    axes = [(r.axis, axis_index(layer, r, order, shape[r.axis])) for r in rules]
    moving = tuple((axis, i) for axis, i in axes if (i != np.arange(len(i))).any())
    return Move(name, shape, moving)


def _axis_of(
    layer: LinearLayer, rule: AxisRule, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    """Shape and axis for a rule, also where a release stores `[H]` as `[1, 1, H, 1]`, or a bias
    `[H K]` as `[H, K]`.
    """
    expected = sum(layer.segment_length(segment) for segment in rule.segments)
    if rule.axis < len(shape) and shape[rule.axis] != expected:
        leading = shape[: rule.axis]
        if math.prod(shape[rule.axis :]) == expected:
            return (*leading, expected), rule.axis
    elif rule.axis >= len(shape):
        return (math.prod(shape),), 0
    return shape, rule.axis


def _folded(
    spec: ModelSpec,
    layer: LinearLayer,
    move: Move,
    rules: tuple[AxisRule, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> Move:
    """The move with the layer's output norm folded into its output projection.

    Raises:
        UnsupportedModel: the projection is quantised, or the norm has one weight per channel.
    """
    if [rule.segments for rule in rules] == [("value_shared",)]:
        return replace(move, ones=True)
    if [(rule.axis, rule.segments) for rule in rules] != [(1, ("value_rows",))]:
        return move
    if any(move.name.removesuffix(".weight") + ending in shapes for ending in SCALES):
        raise UnsupportedModel(
            "a quantised output projection cannot take in the norm without being quantised again",
            hint="use one common value order per layer, or the unquantised checkpoint",
        )
    norms = [
        n for n, r in spec.family.axes.items() if [x.segments for x in r] == [("value_shared",)]
    ]
    return replace(move, norm=layer.prefix + norms[0])


def scaled_weight(suffix: str) -> str | None:
    """The weight whose scales a tensor holds, None if it holds none."""
    for ending in SCALES:
        if suffix.endswith(ending):
            return suffix.removesuffix(ending) + ".weight"
    return None


def scale_move(name: str, shape: tuple[int, ...], weight: Move) -> Move:
    """How the scales of a weight follow it, whole blocks at a time.

    A scale stands for one entry of an axis, for `SCALE_BLOCK` of them, or for all; it can move only
    where everything it stands for moves together. Heads of 128 with orders inside them always do.

    Args:
        shape: of the scales.
        weight: the move of the weight they belong to.

    Raises:
        UnsupportedModel: entries of one block would come from several.
    """
    axes = []
    for axis, index in weight.axes:
        length, scales = len(index), shape[axis] if axis < len(shape) else 1
        if scales == 1:
            continue  # one scale for the whole axis
        size = 1 if scales == length else SCALE_BLOCK
        if scales != -(-length // size):
            raise UnsupportedModel(
                f"{scales} scales on an axis of {length}, expected one for each entry or for each "
                f"{SCALE_BLOCK}",
                hint=_UNQUANTISED,
                found=scales,
                expected=-(-length // size),
            )
        source = index // size
        first = source[::size]
        mixed = np.flatnonzero(source != np.repeat(first, size)[:length])
        if len(mixed) or len(set(first.tolist())) != scales:
            block = int(mixed[0]) // size if len(mixed) else 0
            raise UnsupportedModel(
                f"the order mixes scale blocks: block {block} of {size} entries would hold entries of "
                "several",
                hint=_UNQUANTISED,
                block=block,
            )
        if (first != np.arange(scales)).any():
            axes.append((axis, first))
    return Move(name, shape, tuple(axes))


def permute(raw: bytes, dtype: str, move: Move) -> bytes:
    """The bytes of a tensor after a move; `raw` holds it row-major in its safetensors dtype.

    Raises:
        UnsupportedModel: the dtype packs several entries into a byte.
    """
    bits = DTYPE_BITS[dtype]
    if bits % 8:
        raise UnsupportedModel(
            f"{move.name}: cannot permute {dtype}, its entries share bytes",
            hint="use the unquantised checkpoint, or --no-weights and let the kernel gather",
            tensor=move.name,
            found=dtype,
        )
    array = np.frombuffer(raw, f"u{bits // 8}").reshape(move.shape)
    for axis, index in move.axes:
        array = np.take(array, index, axis=axis)
    return array.tobytes()


def layer_orders(plan: Plan, spec: ModelSpec) -> tuple[LayerOrder, ...]:
    """What the weights of each linear layer absorb of a plan: its key order, if one is shared, its
    value order, and the heads of a `hybrid` placement, the ranks' bundles one after the other.

    Raises:
        PlanMismatch: the plan describes other layers.
        UnsupportedModel: the plan keeps one key order per value head, which weights cannot hold.
    """
    precision = plan.document.precision
    orders = []
    for layer in spec.layers:
        keys = plan.array(layer.index, "key_order")
        if precision is None or keys is None:
            orders.append(_placed(plan, layer, LayerOrder.identity(layer)))
            continue
        if keys.shape != (layer.value_heads, layer.key_dim):
            raise PlanMismatch(
                f"layer {layer.index}: the plan orders {list(keys.shape)} key channels, the model "
                f"has {[layer.value_heads, layer.key_dim]}",
                layer=layer.index,
            )
        order = LayerOrder.of_value_heads(layer, keys)
        values = plan.array(layer.index, "value_order")
        if values is not None:
            fold = precision.value_order == "per-head"
            order = replace(order, values=values.astype(np.int64), fold=fold)
        orders.append(_placed(plan, layer, order))
    return tuple(orders)


def _placed(plan: Plan, layer: LinearLayer, order: LayerOrder) -> LayerOrder:
    """The order with the heads of a `hybrid` placement."""
    placement = plan.document.placement
    if placement is None or placement.mode != "hybrid":
        return order
    owner = plan.arrays["placement.head_owner"][layer.ordinal].tolist()
    bundles = packed_order(layer.key_heads, layer.key_heads, owner)
    heads = packed_order(layer.key_heads, layer.value_heads, owner)
    return replace(order, bundles=np.array(bundles), heads=np.array(heads))
