"""Whether arrays match their document, and whether both mean something. No torch.

`check_arrays` compares bytes with the digests; `check_meaning` holds for a plan however it was
made: permutations permute, counts equal masks, windows lie in their range.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hybridstate.defaults import MIN_REPLAY_TOKENS
from hybridstate.errors import SourceError
from hybridstate.plan.placement import (
    balance_storage,
    contiguous_owner,
    packed_sources,
    rank_loads,
    storage_targets,
)
from hybridstate.plan.schema import LayerBlock, PlanDocument, SelectedLayer
from hybridstate.provenance import sha256_bytes

Array = NDArray[Any]
_AGAIN = "copy the bundle again, or export it again"
_NUMPY = {"F32": "float32", "I32": "int32", "I16": "int16", "U8": "uint8"}


def _refuse(where: str, name: str, problem: str, **facts: Any) -> NoReturn:
    raise SourceError(f"{where}: {name}: {problem}", hint=_AGAIN, file=where, array=name, **facts)


def check_arrays(document: PlanDocument, arrays: Mapping[str, Array], where: str) -> None:
    """Every listed array is there with its dtype, shape and sha256, and no other.

    Raises:
        SourceError: naming the array.
    """
    listed = {block.name: block for block in document.arrays}
    for name in sorted(arrays.keys() - listed.keys()):
        _refuse(where, name, "the plan does not list this array")
    for name, block in listed.items():
        if name not in arrays:
            _refuse(where, name, "array is missing")
        array = arrays[name]
        if array.dtype.name != _NUMPY[block.dtype] or array.shape != block.shape:
            _refuse(
                where,
                name,
                f"found {array.dtype.name} {list(array.shape)}, "
                f"expected {_NUMPY[block.dtype]} {list(block.shape)}",
            )
        found = sha256_bytes(array.tobytes())
        if found != block.sha256:
            _refuse(
                where,
                name,
                f"sha256 is {found[:12]}, expected {block.sha256[:12]}: the array was changed",
                found=found,
                expected=block.sha256,
            )


def expected_arrays(document: PlanDocument) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of every array this document calls for (design: the plan bundle)."""
    selection, precision = document.selection, document.precision
    for layer in document.model.layers:
        start = f"layers.{layer.index}."
        keys = (layer.value_heads, layer.key_dim)
        values = (layer.value_heads, layer.value_dim)
        if selection is not None:
            units = keys if selection.unit == "channel" else keys[:1]
            yield start + "horizon", "F32", units
            yield start + "retained", "U8", units
            yield start + "replay_window", "I32", units
        if precision is not None:
            yield start + "key_order", "I16", keys
            if document.calibration is not None:
                yield start + "risk", "F32", keys
            if precision.value_order != "none":
                yield start + "value_order", "I16", values
            if precision.value_scale:
                yield start + "value_scale", "F32", values
    if document.placement is not None:
        bundles = document.model.layers[0].key_heads
        yield "placement.head_owner", "I16", (len(document.model.layers), bundles)
        if document.placement.mode != "off" and selection is not None:
            packed = sum(layer.retained for layer in selection.layers)
            yield "placement.storage_owner", "I32", (packed,)
            yield "placement.storage_slot", "I32", (packed,)


def check_meaning(document: PlanDocument, arrays: Mapping[str, Array], where: str) -> None:
    """The arrays are those the blocks call for and agree with them.

    Raises:
        SourceError: naming the array or the block.
    """
    expected = {name: (dtype, shape) for name, dtype, shape in expected_arrays(document)}
    for name in sorted(expected.keys() - arrays.keys()):
        _refuse(where, name, "array is missing")
    for name in sorted(arrays.keys() - expected.keys()):
        _refuse(where, name, "no block of the plan calls for this array")
    for name, (dtype, shape) in expected.items():
        found = arrays[name]
        if found.dtype.name != _NUMPY[dtype] or found.shape != shape:
            _refuse(
                where,
                name,
                f"found {found.dtype.name} {list(found.shape)}, "
                f"expected {_NUMPY[dtype]} {list(shape)}",
            )
    if document.selection is not None:
        _check_selection(document, arrays, where)
    if document.placement is not None:
        _check_placement(document, arrays, where)
    if document.precision is not None:
        for layer in document.model.layers:
            _check_precision(document, layer, arrays, where)


def _check_selection(document: PlanDocument, arrays: Mapping[str, Array], where: str) -> None:
    selection = document.selection
    assert selection is not None
    layers = document.model.layers
    if [layer.index for layer in selection.layers] != [layer.index for layer in layers]:
        _refuse(where, "selection.layers", "not the linear layers of the model block")
    offset, longest, ragged = 0, 0, 0
    for layer, counted in zip(layers, selection.layers, strict=True):
        longest = max(longest, _check_mask(layer, counted, selection.w_max, arrays, where))
        if counted.offset != offset:
            _refuse(
                where,
                "selection.layers",
                f"layer {layer.index}: offset {counted.offset}, expected {offset}",
            )
        offset += counted.retained
        values = layer.value_dim * (1 if selection.unit == "channel" else layer.key_dim)
        ragged += 4 * values * counted.retained
    if selection.w_replay != longest:
        _refuse(
            where,
            "selection.w_replay",
            f"found {selection.w_replay}, the longest window of an omitted unit is {longest}",
        )
    if document.accounting is not None and document.accounting.temporal_ragged_bytes != ragged:
        _refuse(
            where,
            "accounting.temporal_ragged_bytes",
            f"found {document.accounting.temporal_ragged_bytes}, the masks give {ragged}",
        )


def _check_mask(
    layer: LayerBlock,
    counted: SelectedLayer,
    w_max: int,
    arrays: Mapping[str, Array],
    where: str,
) -> int:
    """Check one layer's three unit arrays; returns the longest window of an omitted unit."""
    start = f"layers.{layer.index}."
    horizon, retained, window = (
        arrays[start + name] for name in ("horizon", "retained", "replay_window")
    )
    if np.isnan(horizon).any() or (horizon < 0).any():
        _refuse(where, start + "horizon", "holds NaN or a negative horizon")
    if (retained > 1).any():
        _refuse(where, start + "retained", "expected 0 or 1 everywhere")
    kept = int(retained.sum())
    if (retained.size, kept) != (counted.units, counted.retained):
        _refuse(
            where,
            start + "retained",
            f"keeps {kept} of {retained.size} units, selection says {counted.retained} of "
            f"{counted.units}",
        )
    omitted = window[retained == 0]
    if (window[retained == 1] != 0).any():
        _refuse(where, start + "replay_window", "a retained unit has a window")
    if omitted.size and not MIN_REPLAY_TOKENS <= omitted.min() <= omitted.max() <= w_max:
        _refuse(
            where,
            start + "replay_window",
            f"windows of omitted units must lie in {MIN_REPLAY_TOKENS}..{w_max}",
        )
    return int(omitted.max(initial=0))


def _check_placement(document: PlanDocument, arrays: Mapping[str, Array], where: str) -> None:
    """Every rank computes as many bundles, and the rest follows from the masks (DASC B.1 b)."""
    found = document.placement
    assert found is not None
    layers, tp = document.model.layers, found.tp
    owner = arrays["placement.head_owner"].astype(np.int64)
    quota, left = divmod(owner.shape[1], tp)
    if len({layer.key_heads for layer in layers}) > 1:
        _refuse(where, "placement.head_owner", "layers differ in their number of key heads")
    if left or any(((owner == rank).sum(axis=1) != quota).any() for rank in range(tp)):
        _refuse(where, "placement.head_owner", f"not {owner.shape[1]}/{tp} bundles on every rank")
    if found.mode != "hybrid" and (owner != contiguous_owner(owner.shape, tp)).any():
        _refuse(where, "placement.head_owner", f"{found.mode} keeps heads in contiguous blocks")
    costs = np.stack(
        [
            arrays[f"layers.{layer.index}.retained"]
            .reshape(layer.key_heads, -1)
            .sum(axis=1, dtype=np.int64)
            for layer in layers
        ]
    )
    loads = rank_loads(costs, owner, tp)
    if found.rank_units != tuple(loads.tolist()):
        _refuse(where, "placement.rank_units", f"the masks give {loads.tolist()}")
    stored = loads if found.mode == "off" else storage_targets(loads)
    if found.stored_units != tuple(stored.tolist()):
        _refuse(where, "placement.stored_units", f"expected {stored.tolist()}")
    if found.remote_units != int(np.maximum(0, loads - stored).sum()):
        _refuse(where, "placement.remote_units", f"found {found.remote_units}")
    if found.mode != "off":
        ranks, slots, _ = balance_storage(packed_sources(costs, owner), loads, stored)
        for name, expected in (("storage_owner", ranks), ("storage_slot", slots)):
            wrong = np.flatnonzero(arrays[f"placement.{name}"] != expected)
            if wrong.size:
                _refuse(where, f"placement.{name}", f"packed unit {int(wrong[0])} is misplaced")


def _check_precision(
    document: PlanDocument, layer: LayerBlock, arrays: Mapping[str, Array], where: str
) -> None:
    precision = document.precision
    assert precision is not None
    start = f"layers.{layer.index}."
    if precision.k_hi > layer.key_dim:
        _refuse(where, "precision.k_hi", f"{precision.k_hi} of {layer.key_dim} key channels")
    order = arrays[start + "key_order"]
    _check_permutation(order, where, start + "key_order")
    for region in (order[:, : precision.k_hi], order[:, precision.k_hi :]):
        if (np.diff(region, axis=1) <= 0).any():
            _refuse(where, start + "key_order", "channels must ascend inside each region")
    bundle = layer.value_heads // layer.key_heads
    bundles = order.reshape(layer.key_heads, bundle, layer.key_dim)
    if precision.key_order == "shared" and (bundles != bundles[:, :1]).any():
        _refuse(where, start + "key_order", "value heads of one key head differ, expected shared")
    if start + "value_order" in arrays:
        value_order = arrays[start + "value_order"]
        _check_permutation(value_order, where, start + "value_order")
        if precision.value_order == "common" and (value_order != value_order[:1]).any():
            _refuse(where, start + "value_order", "heads differ, expected one common order")
    if start + "value_scale" in arrays:
        scale = arrays[start + "value_scale"]
        if not (np.isfinite(scale) & (scale > 0)).all():
            _refuse(where, start + "value_scale", "expected finite positive scales")
    if start + "risk" in arrays:
        risk = arrays[start + "risk"]
        if not (np.isfinite(risk) & (risk >= 0)).all():
            _refuse(where, start + "risk", "expected finite risks of at least zero")


def _check_permutation(order: Array, where: str, name: str) -> None:
    identity = np.arange(order.shape[1], dtype=order.dtype)
    wrong = (np.sort(order, axis=1) != identity).any(axis=1)
    if wrong.any():
        head = int(np.flatnonzero(wrong)[0])
        _refuse(where, name, f"head {head} is not a permutation of 0..{order.shape[1] - 1}")
