"""From tensor names, shapes and config to a `ModelSpec`: names decide the family, never the config alone.

Module names are not enough either: full-attention layers share `self_attn` with Kimi's linear ones,
so a linear layer is a prefix that holds `A_log`.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from hybridstate.errors import SourceError, UnsupportedModel
from hybridstate.families.config import (
    block_count,
    block_types,
    gate_of,
    linear_layer,
    listed_blocks,
    names_of,
    text_config,
)
from hybridstate.families.shapes import check_shapes
from hybridstate.families.spec import Family, ModelSpec
from hybridstate.families.table import (
    FAMILIES,
    FIXED_SLOPE_MODEL_TYPES,
    GGUF_NAMES,
    IGNORED_COMPONENTS,
)

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_BLOCK: Final = re.compile(
    r"^(?P<root>(?:.*\.)?layers\.)(?P<index>[0-9]{1,6})\.(?P<module>[^.]+)\.(?P<rest>.+)$"
)
_DECAY_ENDS: Final = tuple({f".{family.a_log}" for family in FAMILIES})
_HOMES: Final = {
    f"{module}.{family.a_log}": (module, family.a_log)
    for family in FAMILIES
    for module in family.modules
}
"""What follows the block number of a decay tensor -> module and name of A_log."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One tensor that is A_log of some family: where its layer's names start."""

    prefix: str
    root: str
    index: int
    module: str
    a_log: str


def detect(
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    *,
    lower_bound: float | None = None,
) -> ModelSpec:
    """Describe the linear-attention layers of a checkpoint.

    Args:
        shapes: tensor name -> shape, as stored.
        config: the parsed `config.json`.
        lower_bound: l of the safe gate, for checkpoints whose config does not state it.

    Raises:
        UnsupportedModel: no family fits, the decay is fixed, or the gate cannot be known.
        SourceError: the config lacks a size, or a linear layer it lists has no tensors.
        NumericError: a tensor does not have the shape that the config implies.
        UsageError: a lower bound was given that contradicts the config or the gate.
    """
    text = text_config(config)
    places = _decay_places(shapes)
    num_layers = block_count(text)
    if num_layers is None:
        if not places:
            raise _unsupported(shapes, config, text, [], has_decay=False)
        raise SourceError(
            "config.json: num_hidden_layers (number of blocks) should be an integer from 1 to a "
            "million, found nothing",
            expected=["num_hidden_layers"],
        )
    linear = {place.index: place for place in places if place.index < num_layers}
    family = _match(shapes, config, text, places, linear)
    gate, bound = gate_of(family, text, lower_bound)
    layers = tuple(
        linear_layer(family, text, index, ordinal, linear[index].prefix)
        for ordinal, index in enumerate(sorted(linear))
    )
    _check_layer_list(family, text, num_layers, linear)
    warnings = dict.fromkeys(w for layer in layers for w in check_shapes(family, layer, shapes))
    return ModelSpec(family, gate, bound, layers, num_layers, tuple(warnings))


def _decay_places(shapes: Shapes) -> list[_Place]:
    """Every A_log of a family inside the text stack."""
    places = []
    for name in shapes:
        match = _BLOCK.match(name) if name.endswith(_DECAY_ENDS) else None
        if match is None or set(match["root"].split(".")) & set(IGNORED_COMPONENTS):
            continue
        home = _HOMES.get(f"{match['module']}.{match['rest']}")
        if home is not None:
            module, a_log = home
            prefix = name[: -len(a_log)]
            places.append(_Place(prefix, match["root"], int(match["index"]), module, a_log))
    return places


def _match(
    shapes: Shapes,
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    places: list[_Place],
    linear: Mapping[int, _Place],
) -> Family:
    """The family whose signature fits every layer that holds A_log, and whose name the config gives."""
    roots = sorted({place.root for place in places})
    if len(roots) > 1:
        raise UnsupportedModel(
            f"linear-attention layers in {len(roots)} stacks ({', '.join(roots)}), not in one",
            found=roots,
        )
    model_types, architectures = names_of(config, text)
    look_alikes: list[str] = []
    for family in FAMILIES:
        if not linear or not all(_fits(family, place, shapes) for place in linear.values()):
            continue
        if set(family.model_types) & set(model_types):
            return family
        if set(family.architectures) & set(architectures):
            return family
        look_alikes.append(family.name)
    raise _unsupported(shapes, config, text, look_alikes, has_decay=bool(linear))


def _fits(family: Family, place: _Place, shapes: Shapes) -> bool:
    return (
        place.module in family.modules
        and place.a_log == family.a_log
        and all(_has(shapes, place.prefix + suffix) for suffix in family.present)
        and not any(_has(shapes, place.prefix + suffix) for suffix in family.absent)
    )


def _has(shapes: Shapes, name: str) -> bool:
    """Whether a weight exists, plain or in a quantised form (`weight_packed`, `qweight`)."""
    stem = name.removesuffix("weight")
    return name in shapes or f"{name}_packed" in shapes or f"{stem}qweight" in shapes


def _unsupported(
    shapes: Shapes,
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    look_alikes: list[str],
    *,
    has_decay: bool,
) -> UnsupportedModel:
    model_types, _ = names_of(config, text)
    label = " / ".join(dict.fromkeys(model_types)) or "(no model_type)"
    known = sorted(family.name for family in FAMILIES)
    types = block_types(text) or _modules(shapes)
    found = ", ".join(f"{name} x{count}" for name, count in types.items()) or "none"
    hint = f"known families: {', '.join(known)}; layer types found: {found}"
    facts: dict[str, Any] = {
        "model_type": model_types,
        "known_families": known,
        "layer_types": types,
    }
    converted = next((n for n in shapes if n.rsplit(".", 1)[-1] in GGUF_NAMES), None)
    if converted is not None and not has_decay:
        message = (
            f"{converted}: tensors are named as in GGUF, where ssm_a holds -exp(A_log) and value heads "
            "are stored in another order"
        )
        hint = f"give the original safetensors checkpoint; {hint}"
    elif not has_decay and set(model_types) & set(FIXED_SLOPE_MODEL_TYPES):
        message = (
            f"model type {label} has a fixed decay slope per head: no learned horizon to analyse"
        )
    elif look_alikes:
        message = (
            f"model type {label} is not known, although its tensors look like "
            f"{' or '.join(look_alikes)}; its gate would be a guess"
        )
    elif has_decay:
        message = f"model type {label}: decay tensors found, but their layer layout is not known"
    else:
        message = f"model type {label}: no gated linear-attention layer (A_log) found"
    return UnsupportedModel(message, hint=hint, **facts)


def _modules(shapes: Shapes) -> dict[str, int]:
    """Module names per block, for configs without a list of block types."""
    blocks = {
        (match["index"], match["module"])
        for match in map(_BLOCK.match, shapes)
        if match is not None
    }
    mixers = Counter(module for _, module in blocks if "norm" not in module and "mlp" not in module)
    return dict(sorted(mixers.items()))


def _check_layer_list(
    family: Family, text: Mapping[str, Any], num_layers: int, linear: Mapping[int, _Place]
) -> None:
    """Compare the layers that hold A_log with the config's own list, where it has one."""
    found = listed_blocks(family, text, num_layers)
    if found is None:
        return
    path, listed = found
    missing, extra = sorted(listed - set(linear)), sorted(set(linear) - listed)
    if missing:
        home = " or ".join(f"{module}.{family.a_log}" for module in family.modules)
        raise SourceError(
            f"block {missing[0]} is linear by {path}, but the checkpoint has no {home} there",
            hint="the checkpoint is incomplete, or its config belongs to another one",
            layers=missing,
        )
    if extra:
        home = f"{linear[extra[0]].module}.{family.a_log}"
        raise SourceError(
            f"block {extra[0]} holds {home}, but {path} does not list it as linear",
            hint="the config belongs to another checkpoint",
            layers=extra,
        )


def check_blocks(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Every block that the config counts has a tensor.

    Raises:
        SourceError: one has none.
    """
    num_layers = spec.num_layers
    match = _BLOCK.match(spec.layers[0].prefix + "x")
    root = match["root"] if match is not None else ""
    present = {name[len(root) :].split(".", 1)[0] for name in shapes if name.startswith(root)}
    missing = [index for index in range(num_layers) if str(index) not in present]
    if missing:
        raise SourceError(
            f"config.json counts {num_layers} blocks, but the checkpoint has no tensor of {root}"
            f"{missing[0]} ({len(missing)} missing)",
            hint="the checkpoint is incomplete, or its config belongs to another one",
            layers=missing[:100],
        )
