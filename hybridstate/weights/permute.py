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

import numpy as np

from hybridstate.checkpoint.header import DTYPE_BITS
from hybridstate.errors import UnsupportedModel
from hybridstate.families import AxisRule, LinearLayer, ModelSpec
from hybridstate.weights.moves import SCALES, Index, Move, scale_move, scaled_weight


@dataclass(frozen=True, slots=True)
class LayerOrder:
    """Where everything of a layer comes from; new position -> old position.

    Attributes:
        bundles: `[Hk]`, key heads (each with its bundle of value heads).
        heads: `[H]`, value heads, consistent with `bundles`.
        keys: `[Hk, K]`, key channels, by *old* key head; `[H, K]` by old value head with `expand`.
        values: `[H, V]`, value dims, by *old* value head.
        fold: the output norm's weight moves into the output projection and becomes ones, so that
            heads which share it may order their value dims differently.
        expand: every value head gets a key head of its own, a copy of the one it read.
    """

    bundles: Index
    heads: Index
    keys: Index
    values: Index
    fold: bool = False
    expand: bool = False

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
                hint="--key-order shared, --key-order expand, or --no-weights and let the kernel gather",
                layer=layer.index,
            )
        return cls.of_keys(layer, bundles[:, 0])

    def inverse(self) -> "LayerOrder":
        """The order that undoes this one, which must not expand."""
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
    if order.expand:  # a copy of the old key head for every new value head
        rows = order.heads[:, None] // layer.bundle * layer.key_dim + order.keys[order.heads]
        return rows.reshape(-1)
    return _rows(order.bundles, order.keys)


def _value_rows(layer: LinearLayer, order: LayerOrder) -> Index:
    return _rows(order.heads, order.values)


def _gate_rows(layer: LinearLayer, order: LayerOrder) -> Index:
    """One row per key channel of a value head: the channels follow the order of its key head."""
    keys = order.keys if order.expand else np.repeat(order.keys, layer.bundle, axis=0)
    return _rows(order.heads, keys)


def _key_heads(layer: LinearLayer, order: LayerOrder) -> Index:
    return order.heads // layer.bundle if order.expand else order.bundles


def _value_heads(layer: LinearLayer, order: LayerOrder) -> Index:
    return order.heads


def _groups(layer: LinearLayer, order: LayerOrder) -> Iterator[tuple[int, Index, Index]]:
    """For each new key head the old one it comes from, the old value heads that read it, its channels."""
    if order.expand:
        for head in order.heads:
            yield int(head) // layer.bundle, np.array([head]), order.keys[head]
        return
    for new, old in enumerate(order.bundles):
        heads = order.heads[new * layer.bundle : (new + 1) * layer.bundle]
        yield int(old), heads, order.keys[old]


def _qkvz_groups(layer: LinearLayer, order: LayerOrder) -> Index:
    """Per key head `[q K | k K | v B*V | z B*V]` (Qwen3-Next)."""
    K, V, B = layer.key_dim, layer.value_dim, layer.bundle
    size = 2 * K + 2 * B * V
    pieces = []
    for old, heads, keys in _groups(layer, order):
        start = old * size
        inside = heads % B  # position inside the old bundle
        values = (inside[:, None] * V + order.values[heads]).reshape(-1)
        pieces += [
            start + keys,
            start + K + keys,
            start + 2 * K + values,
            start + 2 * K + B * V + values,
        ]
    return np.concatenate(pieces)


def _ba_groups(layer: LinearLayer, order: LayerOrder) -> Index:
    """Per key head `[b B | a B]` (Qwen3-Next)."""
    B = layer.bundle
    pieces = []
    for old, heads, _ in _groups(layer, order):
        inside = heads % B
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
    """Old position of every new entry along one axis of `length` entries; more of them with `expand`.

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
        start += layer.segment_length(segment)
    if start > length or (start < length and "padding" not in rule.segments):
        raise UnsupportedModel(
            f"an axis of {length} entries, expected {start} ({' + '.join(rule.segments)})",
            hint="export from the checkpoint as released, not from a re-saved copy",
            layer=layer.index,
            found=length,
            expected=start,
        )
    return np.concatenate([*pieces, np.arange(start, length)])


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
    moving = tuple(
        (axis, i) for axis, i in axes if len(i) != shape[axis] or (i != np.arange(len(i))).any()
    )
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
