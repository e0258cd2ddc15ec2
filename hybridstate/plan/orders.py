"""The orders and factors in which a plan stores a state, chosen from a calibration. No torch.

Key order: `shared` by the value heads of a key head (weights can hold it), `per-head` (a kernel gathers), or `expand`:
each value head's own, in weights whose q and k are replicated, one key head for each value head. Value order: `none`,
`fold` (each head's own, the output norm folded into the output projection) or `common` (one order per layer). Value
scales come with either of the last two; they stay outside the weights (DAMP Eq. 17, 18).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from hybridstate.errors import UsageError
from hybridstate.families import LinearLayer
from hybridstate.plan.calibration import Calibration, ValueMaps

KeyOrder = Literal["shared", "per-head", "expand"]
ValueOrder = Literal["none", "fold", "common"]
StoredValueOrder = Literal["none", "per-head", "common"]

KEY_ORDERS: Final[tuple[KeyOrder, ...]] = ("shared", "per-head", "expand")
VALUE_ORDERS: Final[tuple[ValueOrder, ...]] = ("none", "fold", "common")


@dataclass(frozen=True, slots=True, eq=False)
class StoredOrders:
    """What the packed state of every linear layer looks like, lists over the layers.

    Attributes:
        key_order: as a plan names it.
        value_order: as a plan names it: `fold` is `per-head` there.
        protected: `[H, k_hi]` key channels in FP16.
        values: `[H, V]` int16, stored column -> value dim; empty where nothing is reordered.
        scales: `[H, V]` float32 c by value dim of the model; empty likewise.
        notes: facts the plan should carry.
    """

    key_order: KeyOrder
    value_order: StoredValueOrder
    protected: tuple[NDArray[np.int16], ...]
    values: tuple[NDArray[np.int16], ...] = ()
    scales: tuple[NDArray[np.float32], ...] = ()
    notes: tuple[str, ...] = ()


def stored_orders(
    calibration: Calibration,
    layers: Sequence[LinearLayer],
    *,
    key_order: KeyOrder = "shared",
    value_order: ValueOrder = "none",
) -> StoredOrders:
    """The orders that were asked for, from what a calibration measured.

    Where every key head has one value head the three key orders are one, and the plan says `shared`.

    Raises:
        UsageError: an unknown order, or value maps that the calibration does not hold.
    """
    for option, given, known in (
        ("--key-order", key_order, KEY_ORDERS),
        ("--value-order", value_order, VALUE_ORDERS),
    ):
        if given not in known:
            raise UsageError(
                f"{option} {given} is not an order", hint=f"choose from {', '.join(known)}"
            )
    notes: list[str] = []
    maps = _value_maps(calibration) if value_order != "none" else ()
    if all(layer.bundle == 1 for layer in layers):
        if key_order != "shared":
            notes.append(
                f"key order {key_order} was asked for; every key head has one value head, so the "
                "shared order is the same and the weights hold it"
            )
        key_order = "shared"
    if key_order == "shared":
        protected = tuple(m.protected for m in maps) or calibration.protected
    else:
        protected = tuple(protect_alone(risk, calibration.k_hi) for risk in calibration.risk)
        if maps:
            notes.append(
                "key channels were chosen by the risk without value scales: the calibration holds the "
                "risk with them only summed over a key head"
            )
    if not maps:
        return StoredOrders(key_order, "none", protected, notes=tuple(notes))
    values = tuple(m.order for m in maps)
    if value_order == "common":
        values = tuple(common_order(order) for order in values)
    if all(layer.value_dim <= calibration.group for layer in layers):
        notes.append(
            f"the {layers[0].value_dim} value dims of a head share one INT8 scale, so their order "
            "rounds nothing differently; their scales do"
        )
    stored: StoredValueOrder = "common" if value_order == "common" else "per-head"
    return StoredOrders(
        key_order, stored, protected, values, tuple(m.scale for m in maps), tuple(notes)
    )


def _value_maps(calibration: Calibration) -> tuple[ValueMaps, ...]:
    if not calibration.values:
        raise UsageError(
            f"{calibration.path} holds no value order and scales: its formats lack damp+reorder",
            hint=f"hybridstate calibrate {calibration.model} --formats default,damp+reorder -o DIR, "
            "or --value-order none",
            file=str(calibration.path),
        )
    return calibration.values


def protect_alone(risk: NDArray[Any], k_hi: int) -> NDArray[np.int16]:
    """The `k_hi` channels of highest risk `[H, K]` in each value head, ascending: `[H, k_hi]`.

    Equal risks prefer the lower channel, as `quant.risk.protect` does.
    """
    order = np.argsort(-risk.astype(np.float64), axis=1, kind="stable")[:, :k_hi]
    return np.sort(order, axis=1).astype(np.int16)


def common_order(orders: NDArray[np.int16]) -> NDArray[np.int16]:
    """One order `[H, V]`, the same in every row: value dims by their mean place in the heads' own orders.

    Heads in the model's order have no preference and are left out; equal places prefer the lower dim.
    """
    identity = np.arange(orders.shape[1])
    moving = orders[(orders != identity).any(axis=1)]
    if not len(moving):
        return np.tile(identity, (len(orders), 1)).astype(np.int16)
    places = np.argsort(moving, axis=1).mean(axis=0)
    common = np.argsort(places, kind="stable")
    return np.tile(common, (len(orders), 1)).astype(np.int16)
