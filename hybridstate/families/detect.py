"""From tensor names, shapes and config to a `ModelSpec`: names decide the family, never the config.

Module names are not enough either: full-attention layers share `self_attn` with Kimi's linear ones,
so a linear layer is a prefix that holds `A_log`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from hybridstate.errors import NumericError, SourceError, UnsupportedModel, UsageError
from hybridstate.families.spec import Family, Gate, LayerRule, LinearLayer, ModelSpec
from hybridstate.families.table import FAMILIES, FIXED_SLOPE_MODEL_TYPES, IGNORED_COMPONENTS

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_BLOCK = re.compile(r"^(?P<root>(?:.*\.)?layers\.)(?P<index>\d+)\.(?P<module>[^.]+)\.(?P<rest>.+)$")


_LARGEST_SIZE = 1_000_000


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
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise SourceError("config.json: text_config is not an object", found=type(text).__name__)
    if _lookup(text, ("num_hidden_layers",)) is None and not _linear_blocks(shapes):
        raise _unsupported(shapes, text, _model_types(config, text), [], False)
    num_layers = _integer(text, ("num_hidden_layers",), "number of blocks")
    family, prefixes = _match(shapes, config, text, num_layers)
    gate, bound = _gate(family, text, lower_bound)
    layers = tuple(
        _layer(family, text, index, ordinal, prefixes[index])
        for ordinal, index in enumerate(sorted(prefixes))
    )
    _check_layer_list(family, text, num_layers, prefixes)
    for layer in layers:
        _check_shapes(family, layer, shapes)
    return ModelSpec(family, gate, bound, layers, num_layers)


def _match(
    shapes: Shapes, config: Mapping[str, Any], text: Mapping[str, Any], num_layers: int
) -> tuple[Family, dict[int, str]]:
    """The family whose signature fits every layer that holds A_log, and those layers' prefixes."""
    model_types = _model_types(config, text)
    blocks = _linear_blocks(shapes)
    roots = sorted({root for root, _ in blocks.values()})
    if len(roots) > 1:
        raise UnsupportedModel(
            f"linear-attention layers in {len(roots)} stacks ({', '.join(roots)}), not in one",
            found=roots,
        )
    prefixes = {index: prefix for prefix, (_, index) in blocks.items() if index < num_layers}
    look_alikes: list[str] = []
    for family in FAMILIES:
        if not prefixes or not _fits(family, prefixes.values(), shapes):
            continue
        if set(family.model_types) & set(model_types):
            return family, prefixes
        look_alikes.append(family.name)
    raise _unsupported(shapes, text, model_types, look_alikes, bool(prefixes))


def _model_types(config: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    return [str(c["model_type"]) for c in (config, text) if "model_type" in c]


def _linear_blocks(shapes: Shapes) -> dict[str, tuple[str, int]]:
    """Prefix -> (stack root, block index) of every layer that holds a family's A_log."""
    wanted = {(family.module, family.a_log) for family in FAMILIES}
    blocks: dict[str, tuple[str, int]] = {}
    for name in shapes:
        match = _BLOCK.match(name)
        if match is None or (match["module"], match["rest"]) not in wanted:
            continue
        if not set(match["root"].split(".")) & set(IGNORED_COMPONENTS):
            prefix = name[: -len(match["rest"])]
            blocks[prefix] = (match["root"], int(match["index"]))
    return blocks


def _fits(family: Family, prefixes: Iterable[str], shapes: Shapes) -> bool:
    return all(
        prefix.endswith(f".{family.module}.")
        and all(_has(shapes, prefix + suffix) for suffix in family.present)
        and not any(_has(shapes, prefix + suffix) for suffix in family.absent)
        for prefix in prefixes
    )


def _has(shapes: Shapes, name: str) -> bool:
    """Whether a weight exists, plain or in a quantised form (`weight_packed`, `qweight`)."""
    stem = name.removesuffix("weight")
    return name in shapes or f"{name}_packed" in shapes or f"{stem}qweight" in shapes


def _unsupported(
    shapes: Shapes,
    text: Mapping[str, Any],
    model_types: list[str],
    look_alikes: list[str],
    has_decay: bool,
) -> UnsupportedModel:
    label = " / ".join(dict.fromkeys(model_types)) or "(no model_type)"
    known = sorted(family.name for family in FAMILIES)
    types = _layer_types(shapes, text)
    found = ", ".join(f"{name} x{count}" for name, count in types.items()) or "none"
    hint = f"known families: {', '.join(known)}; layer types found: {found}"
    facts: dict[str, Any] = {
        "model_type": model_types,
        "known_families": known,
        "layer_types": types,
    }
    if not has_decay and set(model_types) & set(FIXED_SLOPE_MODEL_TYPES):
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


def _layer_types(shapes: Shapes, text: Mapping[str, Any]) -> dict[str, int]:
    """Layer types of the config with their counts; without such a list, module names per block."""
    listed = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(listed, list):
        return dict(sorted(Counter(str(item) for item in listed).items()))
    blocks = {
        (match["index"], match["module"])
        for match in map(_BLOCK.match, shapes)
        if match is not None
    }
    mixers = Counter(module for _, module in blocks if "norm" not in module and "mlp" not in module)
    return dict(sorted(mixers.items()))


def _gate(
    family: Family, text: Mapping[str, Any], given: float | None
) -> tuple[Gate, float | None]:
    stated = _lookup(text, family.lower_bound)
    if given is not None and family.kind == "gdn":
        raise UsageError(f"{family.name} has the softplus gate: a lower bound does not apply")
    if stated is not None and given is not None and stated != given:
        raise UsageError(
            f"lower bound {given} contradicts the config, which says {stated}",
            expected=stated,
            found=given,
        )
    bound = given if stated is None else stated
    if bound is None:
        if family.gate == "safe":
            raise UnsupportedModel(
                f"{family.name} has the safe gate, but its config gives no lower bound "
                f"({' or '.join(family.lower_bound)})",
                hint="frameworks disagree on the default; give it with --lower-bound (often -5)",
                expected=list(family.lower_bound),
            )
        return "softplus", None
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise SourceError(f"config.json: lower bound {bound!r} is not a number", found=str(bound))
    if not math.isfinite(bound) or bound >= 0:
        raise NumericError(f"lower bound must be finite and below zero, found {bound}", found=bound)
    return "safe", float(bound)


def _lookup(text: Mapping[str, Any], paths: Iterable[str]) -> Any:
    """The first path that is present and not null."""
    for path in paths:
        value: Any = text
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def _integer(text: Mapping[str, Any], paths: tuple[str, ...], what: str) -> int:
    value = _lookup(text, paths)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
        raise SourceError(
            f"config.json: {' or '.join(paths)} ({what}) should be an integer from 1 to a million, "
            f"found {'nothing' if value is None else f'{value!r:.60}'}",
            expected=list(paths),
            found=None if value is None else str(value),
        )
    return value


def _layer(
    family: Family, text: Mapping[str, Any], index: int, ordinal: int, prefix: str
) -> LinearLayer:
    where = family.geometry
    layer = LinearLayer(
        index=index,
        ordinal=ordinal,
        key_heads=_integer(text, where.key_heads, "key heads"),
        value_heads=_integer(text, where.value_heads, "value heads"),
        key_dim=_integer(text, where.key_dim, "key dimension"),
        value_dim=_integer(text, where.value_dim, "value dimension"),
        conv_width=_integer(text, where.conv_width, "convolution width"),
        prefix=prefix,
    )
    if layer.value_heads % layer.key_heads:
        raise NumericError(
            f"config.json: {layer.value_heads} value heads are not a multiple of "
            f"{layer.key_heads} key heads",
            found=layer.value_heads,
        )
    return layer


def _check_layer_list(
    family: Family, text: Mapping[str, Any], num_layers: int, prefixes: Mapping[int, str]
) -> None:
    """Compare the layers that hold A_log with the config's own list, where it has one."""
    for rule in family.layer_rules:
        listed = _listed(rule, _lookup(text, (rule.path,)), num_layers)
        if listed is None:
            continue
        missing, extra = sorted(listed - set(prefixes)), sorted(set(prefixes) - listed)
        if missing:
            raise SourceError(
                f"block {missing[0]} is linear by {rule.path}, but the checkpoint has no "
                f"{family.module}.{family.a_log} there",
                hint="the checkpoint is incomplete, or its config belongs to another one",
                layers=missing,
            )
        if extra:
            raise SourceError(
                f"block {extra[0]} holds {family.module}.{family.a_log}, but {rule.path} does not "
                "list it as linear",
                hint="the config belongs to another checkpoint",
                layers=extra,
            )
        return


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


def _listed(rule: LayerRule, value: Any, num_layers: int) -> set[int] | None:
    """0-based linear blocks by one rule, None where the config does not use it."""
    if value is None:
        return None
    if rule.how == "interval":
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SourceError(
                f"config.json: {rule.path} should be a positive integer, found {value!r:.60}",
                expected=rule.path,
            )
        return {i for i in range(num_layers) if (i + 1) % value}
    if not isinstance(value, list):
        raise SourceError(
            f"config.json: {rule.path} should be a list, found {value!r:.60}", expected=rule.path
        )
    if rule.how == "names":
        if len(value) < num_layers:
            raise SourceError(
                f"config.json: {rule.path} lists {len(value)} blocks, num_hidden_layers says {num_layers}",
                expected=num_layers,
                found=len(value),
            )
        return {i for i, name in enumerate(value[:num_layers]) if name in rule.values}
    if any(isinstance(number, bool) or not isinstance(number, int) for number in value):
        raise SourceError(
            f"config.json: {rule.path} should list block numbers, found {value!r:.60}",
            expected=rule.path,
        )
    base = 1 if rule.how == "one_based" else 0
    outside = [number for number in value if not base <= number < num_layers + base]
    if outside:
        raise SourceError(
            f"config.json: {rule.path} lists block {outside[0]}, but counts from {base} to "
            f"{num_layers + base - 1}",
            expected=rule.path,
            found=outside[0] if abs(outside[0]) < _LARGEST_SIZE else str(outside[0]),
        )
    return {number - base for number in value}


def _check_shapes(family: Family, layer: LinearLayer, shapes: Shapes) -> None:
    """Compare decay tensors and projection rows with the config's sizes.

    The short convolutions are left out: transformers re-saves OLMo's with a wrong split.
    """
    heads, rows = layer.value_heads, layer.key_rows
    decay: dict[str, list[tuple[int, ...]]] = {
        family.a_log: [(heads,), (1, 1, heads, 1)],
        family.dt_bias: [(heads,)] if family.kind == "gdn" else [(rows,), (heads, layer.key_dim)],
    }
    for suffix, allowed in decay.items():
        name = layer.prefix + suffix
        if name not in shapes:
            raise SourceError(
                f"decay tensor {name} is missing from the checkpoint",
                tensor=name,
                layer=layer.index,
            )
        shape = shapes[name]
        padded = suffix == family.a_log and family.a_log_padded
        if shape in allowed or (padded and len(shape) == 1 and shape[0] >= heads):
            continue
        raise _wrong_shape(name, layer, shape, allowed[0])
    for suffix in (s for s in family.axes if "conv1d" in s and s.endswith("weight")):
        shape = shapes.get(layer.prefix + suffix, (layer.conv_width,))
        if shape[-1:] != (layer.conv_width,):
            raise _wrong_shape(layer.prefix + suffix, layer, shape, (*shape[:-1], layer.conv_width))
    for suffix, rules in family.axes.items():
        if suffix in decay or "conv1d" in suffix or layer.prefix + suffix not in shapes:
            continue
        shape = shapes[layer.prefix + suffix]
        for rule in rules:
            length = sum(layer.segment_length(segment) for segment in rule.segments)
            if rule.axis == 0 and shape[:1] != (length,):
                raise _wrong_shape(layer.prefix + suffix, layer, shape, (length, *shape[1:]))


def _wrong_shape(
    name: str, layer: LinearLayer, found: tuple[int, ...], expected: tuple[int, ...]
) -> NumericError:
    return NumericError(
        f"{name} has shape {list(found)}, expected {list(expected)} for {layer.value_heads} value "
        f"heads and key dimension {layer.key_dim}",
        hint="config.json and tensors disagree; the checkpoint may be a mixture of two models",
        tensor=name,
        layer=layer.index,
        found=list(found),
        expected=list(expected),
    )
