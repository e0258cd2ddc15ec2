"""What the weights of each linear layer absorb of a plan."""

from dataclasses import replace

import numpy as np

from hybridstate.errors import PlanMismatch
from hybridstate.families import LinearLayer, ModelSpec
from hybridstate.plan.placement import packed_order
from hybridstate.plan.store import Plan
from hybridstate.weights.permute import LayerOrder


def absorbs_something(plan: Plan) -> bool:
    """Whether weights can carry any of a plan's orders."""
    precision, placement = plan.document.precision, plan.document.placement
    heads = placement is not None and placement.mode == "hybrid"
    packed = precision is not None and (
        precision.key_order != "per-head" or precision.value_order != "none"
    )
    return heads or packed


def layer_orders(plan: Plan, spec: ModelSpec) -> tuple[LayerOrder, ...]:
    """The order of each linear layer: key order unless it is left to the kernel (`per-head`), value order, and the
    heads of a `hybrid` placement, the ranks' bundles one after the other.

    Raises:
        PlanMismatch: the plan describes other layers.
    """
    return tuple(_layer_order(plan, layer) for layer in spec.layers)


def _layer_order(plan: Plan, layer: LinearLayer) -> LayerOrder:
    precision = plan.document.precision
    keys = plan.array(layer.index, "key_order")
    order = LayerOrder.identity(layer)
    if precision is None or keys is None:
        return _placed(plan, layer, order)
    if keys.shape != (layer.value_heads, layer.key_dim):
        raise PlanMismatch(
            f"layer {layer.index}: the plan orders {list(keys.shape)} key channels, the model "
            f"has {[layer.value_heads, layer.key_dim]}",
            layer=layer.index,
        )
    if precision.key_order == "shared":
        order = LayerOrder.of_value_heads(layer, keys)
    elif precision.key_order == "expand":
        order = replace(order, keys=keys.astype(np.int64), expand=True)
    values = plan.array(layer.index, "value_order")
    if values is not None:
        # heads of one order need no fold: the norm moves with them
        fold = precision.value_order == "per-head" and bool((values != values[:1]).any())
        order = replace(order, values=values.astype(np.int64), fold=fold)
    return _placed(plan, layer, order)


def _placed(plan: Plan, layer: LinearLayer, order: LayerOrder) -> LayerOrder:
    """The order with the heads of a `hybrid` placement."""
    placement = plan.document.placement
    if placement is None or placement.mode != "hybrid":
        return order
    owner = plan.arrays["placement.head_owner"][layer.ordinal].tolist()
    bundles = packed_order(layer.key_heads, layer.key_heads, owner)
    heads = packed_order(layer.key_heads, layer.value_heads, owner)
    return replace(order, bundles=np.array(bundles), heads=np.array(heads))
