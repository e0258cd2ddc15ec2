"""A plan put together from its parts: checkpoint, horizons, selection, calibration, accounting."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint import Checkpoint
from hybridstate.defaults import REPEATED_LIMIT
from hybridstate.errors import NumericError, PlanMismatch, UsageError
from hybridstate.families import LinearLayer
from hybridstate.plan.accounting import account, temporal_bytes
from hybridstate.plan.calibration import Calibration
from hybridstate.plan.compare import checkpoint_digests
from hybridstate.plan.orders import KeyOrder, StoredOrders, ValueOrder, stored_orders
from hybridstate.plan.placement import Placement
from hybridstate.plan.schema import SCHEMA_NAME, SCHEMA_VERSION
from hybridstate.plan.select import Selection
from hybridstate.plan.store import Plan, seal
from hybridstate.provenance import environment
from hybridstate.quant.ring import ring_bits

Array = NDArray[Any]


def build_plan(
    checkpoint: Checkpoint,
    *,
    horizons: Sequence[NDArray[np.float64]] = (),
    gate_input: float | None = None,
    gate_input_source: str = "default",
    epsilon: float | None = None,
    selection: Selection | None = None,
    calibration: Calibration | None = None,
    placement: Placement | None = None,
    measured: dict[str, Any] | None = None,
    key_order: KeyOrder = "shared",
    value_order: ValueOrder = "none",
    requantise_every: int = 1,
    notes: Sequence[str] = (),
) -> Plan:
    """Assemble and check a plan: DASC with `selection`, DAMP with `calibration`, or both.

    Args:
        horizons: per linear layer `[H]` or `[H, K]`, in tokens; needed with `selection`.
        gate_input, gate_input_source, epsilon: how the horizons were computed.
        selection: retained units at one cutoff.
        calibration: risk and protected channels of a calibration run on this checkpoint.
        measured: block of measurements that the cutoff was taken from.
        placement: of this selection's units on tensor-parallel ranks.
        key_order, value_order: how the packed state is ordered, see `plan.orders`.
        requantise_every: updates between two writes of the packed state.
        notes: facts the plan should carry, such as that its input is synthetic.

    Raises:
        UsageError: neither selection nor calibration, or an order without a calibration for it.
        PlanMismatch: selection or calibration belongs to another model.
        UnsupportedModel: the family is for analysis only.
    """
    checkpoint.spec.check_plannable()
    if selection is None and calibration is None:
        raise UsageError(
            "a plan needs a cutoff, a calibration or both",
            hint="add --w-max N, or --calibration DIR",
        )
    orders = None
    if calibration is not None:
        _check_origin(checkpoint, calibration)
        orders = stored_orders(
            calibration, checkpoint.spec.layers, key_order=key_order, value_order=value_order
        )
        notes = (*notes, *orders.notes)
    elif (key_order, value_order, requantise_every) != ("shared", "none", 1):
        raise UsageError(
            "orders and the interval of requantisation belong to a packed state, and there is none",
            hint="add --calibration DIR, or leave --key-order, --value-order and --requantise-every out",
        )
    arrays: dict[str, Array] = {}
    content: dict[str, Any] = {
        "schema": SCHEMA_NAME,
        "schema_version": 1,
        "model": _model(checkpoint),
        "provenance": _provenance(notes),
    }
    if selection is not None:
        if gate_input is None or epsilon is None:
            raise UsageError("a selection comes with the gate input and epsilon of its horizons")
        content["horizons"] = {
            "epsilon": epsilon,
            "gate_input": gate_input,
            "chosen_by": gate_input_source,
        }
        content |= _selection(checkpoint, selection)
        content["selection"]["measured"] = measured
        arrays |= _unit_arrays(checkpoint, horizons, selection)
    if placement is not None:
        content["placement"] = {
            "mode": placement.mode,
            "tp": placement.tp,
            "rank_units": list(placement.compute_units),
            "stored_units": list(placement.stored_units),
            "slot_units": placement.slot_units,
            "remote_units": placement.remote_units,
        }
        arrays["placement.head_owner"] = placement.head_owner
        if placement.mode != "off":
            arrays["placement.storage_owner"] = placement.storage_owner
            arrays["placement.storage_slot"] = placement.storage_slot
    repeated = None if calibration is None else calibration.block["repeated_32gram_share"]
    if measured is not None or key_order == "expand" or (repeated or 0.0) > REPEATED_LIMIT:
        content["schema_version"] = SCHEMA_VERSION  # what version 1 cannot say
    if calibration is not None and orders is not None:
        content |= _precision(checkpoint, calibration, orders, requantise_every)
        arrays |= _order_arrays(checkpoint, calibration, orders)
    return seal(content, arrays)


def _order_arrays(
    checkpoint: Checkpoint, calibration: Calibration, orders: StoredOrders
) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for layer in checkpoint.spec.layers:
        start, ordinal = f"layers.{layer.index}.", layer.ordinal
        arrays[start + "risk"] = calibration.risk[ordinal].astype(np.float32)
        arrays[start + "key_order"] = stored_key_order(orders.protected[ordinal], layer.key_dim)
        if orders.value_order == "none":
            continue
        shape = (layer.value_heads, layer.value_dim)
        if orders.values[ordinal].shape != shape:
            raise PlanMismatch(
                f"{calibration.path} orders {list(orders.values[ordinal].shape)} value dims in layer "
                f"{layer.index}, {checkpoint.name} has {list(shape)}",
                layer=layer.index,
            )
        arrays[start + "value_order"] = orders.values[ordinal]
        arrays[start + "value_scale"] = orders.scales[ordinal].astype(np.float32)
    return arrays


def stored_key_order(protected: Array, key_dim: int) -> NDArray[np.int16]:
    """Stored row -> key channel `[H, K]`: protected channels first, ascending in each region.

    Args:
        protected: `[H, K_hi]` key channels of each value head, in any order.

    Raises:
        NumericError: a channel is out of range or named twice.
    """
    heads = protected.shape[0]
    mask = np.zeros((heads, key_dim), np.bool_)
    if protected.size and not 0 <= protected.min() <= protected.max() < key_dim:
        raise NumericError(f"a protected channel lies outside 0..{key_dim - 1}")
    np.put_along_axis(mask, protected.astype(np.int64), True, axis=1)
    if (mask.sum(axis=1) != protected.shape[1]).any():
        head = int(np.flatnonzero(mask.sum(axis=1) != protected.shape[1])[0])
        raise NumericError(f"head {head} protects a channel twice", head=head)
    # a stable sort by region keeps channels ascending inside each
    return np.argsort(~mask, axis=1, kind="stable").astype(np.int16)


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    spec = checkpoint.spec
    return {
        "name": checkpoint.name,
        "revision": None if checkpoint.origin is None else checkpoint.origin.commit,
        "family": spec.name,
        "kind": spec.family.kind,
        "gate": spec.gate,
        "lower_bound": spec.lower_bound,
        "num_layers": spec.num_layers,
        "layers": [_layer(checkpoint, layer) for layer in spec.layers],
        "original": checkpoint_digests(checkpoint).model_dump(),
        "exported": None,
    }


def _layer(checkpoint: Checkpoint, layer: LinearLayer) -> dict[str, Any]:
    decay = checkpoint.decay(layer)
    return {
        "index": layer.index,
        "ordinal": layer.ordinal,
        "prefix": layer.prefix,
        "key_heads": layer.key_heads,
        "value_heads": layer.value_heads,
        "key_dim": layer.key_dim,
        "value_dim": layer.value_dim,
        "conv_width": layer.conv_width,
        "a_log_dtype": decay.a_log_dtype,
        "dt_bias_dtype": decay.dt_bias_dtype,
    }


def _provenance(notes: Sequence[str]) -> dict[str, Any]:
    """Versions without the commit: it changes with every edit, the plan only with its content."""
    found = environment()
    versions = {name: found[name] for name in found if name not in ("commit", "modified")}
    return {"versions": versions, "notes": list(notes)}


def _selection(checkpoint: Checkpoint, selection: Selection) -> dict[str, Any]:
    spec = checkpoint.spec
    accounting = account(spec, selection)  # refuses a selection over other units
    counted = zip(
        spec.layers, selection.units, selection.counts, selection.offsets[:-1], strict=True
    )
    return {
        "selection": {
            "w_max": selection.w_max,
            "unit": spec.unit,
            "selector": "horizon" if selection.seed is None else "random",
            "seed": selection.seed,
            "layers": [
                {"index": layer.index, "units": units, "retained": kept, "offset": offset}
                for layer, units, kept, offset in counted
            ],
            "w_replay": selection.w_replay,
            "near_cutoff": selection.near_cutoff,
        },
        "accounting": {
            "temporal_dense_bytes": accounting.temporal_dense_bytes,
            "temporal_ragged_bytes": accounting.temporal_ragged_bytes,
            "temporal_padded_bytes": accounting.temporal_padded_bytes,
            "conv_bytes": accounting.conv_bytes,
        },
    }


def _unit_arrays(
    checkpoint: Checkpoint, horizons: Sequence[NDArray[np.float64]], selection: Selection
) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    layers = checkpoint.spec.layers
    if len(horizons) != len(layers):
        raise PlanMismatch(
            f"horizons of {len(horizons)} layers, the model has {len(layers)} linear layers",
            found=len(horizons),
            expected=len(layers),
        )
    for layer, horizon, retained, window in zip(
        layers, horizons, selection.retained, selection.replay_window, strict=True
    ):
        start = f"layers.{layer.index}."
        with np.errstate(over="ignore"):  # beyond float32 is as good as infinite on display
            arrays[start + "horizon"] = horizon.astype(np.float32)
        arrays[start + "retained"] = retained.astype(np.uint8)
        arrays[start + "replay_window"] = window.astype(np.int32)
    return arrays


def _check_origin(checkpoint: Checkpoint, calibration: Calibration) -> None:
    """The calibration ran on this checkpoint: same digests, same shapes."""
    found = checkpoint.digests()
    for part, expected in calibration.digests.items():
        if found.get(part) != expected:
            raise PlanMismatch(
                f"{calibration.path} was calibrated on {calibration.model} with {part} digest "
                f"{expected[:12]}, {checkpoint.name} has {found.get(part, '-')[:12]}",
                hint=f"run `hybridstate calibrate {checkpoint.name}` and give its folder",
                file=str(calibration.path),
                digest=part,
                found=found.get(part),
                expected=expected,
            )
    layers = checkpoint.spec.layers
    wanted = [(layer.value_heads, layer.key_dim) for layer in layers]
    shapes = [tuple(risk.shape) for risk in calibration.risk]
    if shapes != wanted:
        raise PlanMismatch(
            f"{calibration.path} holds risks of shapes {shapes}, {checkpoint.name} has {wanted}",
            file=str(calibration.path),
        )


def _precision(
    checkpoint: Checkpoint, calibration: Calibration, orders: StoredOrders, every: int
) -> dict[str, Any]:
    from hybridstate.kernels.layout import PackedLayout
    from hybridstate.kernels.ring_reference import LONGEST

    if not 1 <= every <= LONGEST:
        raise UsageError(
            f"--requantise-every {every}: engines keep the inputs between two writes of a state, and write it once in "
            f"1 to {LONGEST} updates",
            hint=f"take {LONGEST} or less" if every > LONGEST else "1 is a write at every update",
            found=every,
            expected=f"1 to {LONGEST}",
        )
    layers = checkpoint.spec.layers
    layouts = [
        PackedLayout(layer.key_dim, layer.value_dim, calibration.k_hi, calibration.group)
        for layer in layers
    ]
    if len({layout.layout_id for layout in layouts}) > 1:
        raise PlanMismatch("linear layers of different dimensions cannot share one packed layout")
    bits = layouts[0].bits_per_value
    ring = ring_bits(layers[0], every, per_channel=checkpoint.spec.unit == "channel")
    packed = sum(
        layer.value_heads * layout.head_bytes for layer, layout in zip(layers, layouts, strict=True)
    )
    return {
        "layout_id": layouts[0].layout_id,
        "precision": {
            "k_hi": calibration.k_hi,
            "group": calibration.group,
            "key_order": orders.key_order,
            "value_order": orders.value_order,
            "value_scale": bool(orders.scales),
            "selector": calibration.selector,
            "requantise_every": every,
            "bits_per_value": bits,
            "bits_per_value_with_ring": bits + ring,
            "state_dense_bytes": temporal_bytes(checkpoint.spec),
            "state_packed_bytes": packed,
        },
        "calibration": calibration.block,
    }
