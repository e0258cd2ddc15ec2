"""What a `config.json` says, read by the rules of a family: sizes, the list of linear blocks, the gate."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from hybridstate.errors import NumericError, SourceError, UnsupportedModel, UsageError
from hybridstate.families.spec import Family, Gate, LayerRule, LinearLayer
from hybridstate.families.table import TEXT_CONFIGS

LARGEST_SIZE: Final = 1_000_000

_AUTO: Final = "auto"
"""Written instead of a size that follows from others."""

_WRITTEN_DIGITS: Final = 1e-5
"""Relative error of a factor that the config writes with ten digits or fewer; as flash-linear-attention allows."""

_BLOCK_LISTS: Final = ("layers_block_type", "layer_types", "hybrid_override_pattern")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text stack: nested in composite models, else the config itself.

    Raises:
        SourceError: the nested one is not an object.
    """
    for key in TEXT_CONFIGS:
        nested = config.get(key)
        if nested is not None:
            if not isinstance(nested, Mapping):
                raise SourceError(
                    f"config.json: {key} is not an object", found=type(nested).__name__
                )
            return nested
    return config


def names_of(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Values of `model_type` and class names in `architectures`, root first."""
    found = (config,) if text is config else (config, text)
    types = [str(c["model_type"]) for c in found if "model_type" in c]
    lists = [c.get("architectures") for c in found]
    return types, [str(name) for names in lists if isinstance(names, list) for name in names]


def block_count(text: Mapping[str, Any]) -> int | None:
    """Blocks of the text stack: the number itself, else the length of the list of blocks."""
    if lookup(text, "num_hidden_layers") is not None:
        return _integer(text, ("num_hidden_layers",), "number of blocks")
    lengths = (len(text[key]) for key in _BLOCK_LISTS if isinstance(text.get(key), list | str))
    return next(lengths, 0) or None


def block_types(text: Mapping[str, Any]) -> dict[str, int]:
    """Block types of the config with their counts, empty where it has no such list."""
    lists = (text[key] for key in _BLOCK_LISTS if isinstance(text.get(key), list))
    return dict(sorted(Counter(str(item) for item in next(lists, [])).items()))


def lookup(text: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where it is absent or null."""
    value: Any = text
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def linear_layer(
    family: Family, text: Mapping[str, Any], index: int, ordinal: int, prefix: str
) -> LinearLayer:
    """Geometry of one linear layer.

    Raises:
        SourceError: a size is missing or no positive integer.
        NumericError: value heads that do not divide among the key heads.
    """
    where = family.geometry
    no_conv = where.conv_switch is not None and lookup(text, where.conv_switch) is False
    layer = LinearLayer(
        index=index,
        ordinal=ordinal,
        key_heads=_integer(text, where.key_heads, "key heads"),
        value_heads=_integer(text, where.value_heads, "value heads"),
        key_dim=_integer(text, where.key_dim, "key dimension"),
        value_dim=_integer(text, where.value_dim, "value dimension"),
        conv_width=1 if no_conv else _integer(text, where.conv_width, "convolution width"),
        prefix=prefix,
        conv=family.conv,
    )
    if layer.value_heads % layer.key_heads:
        raise NumericError(
            f"config.json: {layer.value_heads} value heads are not a multiple of "
            f"{layer.key_heads} key heads",
            found=layer.value_heads,
        )
    return layer


def _integer(text: Mapping[str, Any], expressions: tuple[str, ...], what: str) -> int:
    values = (_evaluate(text, expression) for expression in expressions)
    value = next((v for v in values if v is not None), None)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
        raise SourceError(
            f"config.json: {' or '.join(expressions)} ({what}) should be an integer from 1 to a million, "
            f"found {'nothing' if value is None else f'{value!r:.60}'}",
            expected=list(expressions),
            found=None if value is None else str(value),
        )
    return value


def _evaluate(text: Mapping[str, Any], expression: str) -> Any:
    """A path, or a product and quotient of paths, there within rounding of an integer (96 * 2.6666666667)."""
    first, *rest = expression.split(" ")
    value = lookup(text, first)
    if not rest:
        return None if value == _AUTO else value
    for operator, path in zip(rest[::2], rest[1::2], strict=True):
        factor = lookup(text, path)
        if not _is_factor(value) or not _is_factor(factor):
            return None
        value = value * factor if operator == "*" else value / factor
    nearest = round(value)
    return nearest if math.isclose(value, nearest, rel_tol=_WRITTEN_DIGITS) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_factor(value: Any) -> bool:
    return _is_number(value) and 0 < value <= LARGEST_SIZE**2


def listed_blocks(
    family: Family, text: Mapping[str, Any], num_layers: int
) -> tuple[str, set[int]] | None:
    """The first rule that the config follows: its path, and the 0-based linear blocks by it.

    Raises:
        SourceError: the list has the wrong form.
    """
    for rule in family.layer_rules:
        value = lookup(text, rule.path)
        if value is not None:
            return rule.path, _listed(rule, value, num_layers)
    return None


def _listed(rule: LayerRule, value: Any, num_layers: int) -> set[int]:
    every = set(range(num_layers))
    if rule.how == "every":
        return every
    if rule.how == "interval" or (rule.how == "whole_groups" and not isinstance(value, list)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SourceError(
                f"config.json: {rule.path} should be a positive integer, found {value!r:.60}",
                expected=rule.path,
            )
        behind = num_layers // value * value if rule.how == "whole_groups" else num_layers
        return {i for i in range(min(behind, num_layers)) if (i + 1) % value}
    if not isinstance(value, list | str if rule.how == "names" else list):
        raise SourceError(
            f"config.json: {rule.path} should be a list, found {value!r:.60}", expected=rule.path
        )
    if rule.how in ("names", "whole_groups"):
        if len(value) < num_layers:
            raise SourceError(
                f"config.json: {rule.path} lists {len(value)} blocks, num_hidden_layers says {num_layers}",
                expected=num_layers,
                found=len(value),
            )
        wanted: tuple[Any, ...] = (1,) if rule.how == "whole_groups" else rule.values
        return {i for i, name in enumerate(value[:num_layers]) if name in wanted}
    numbers = _block_numbers(rule, value, num_layers)
    return every - numbers if rule.how == "except_zero_based" else numbers


def _block_numbers(rule: LayerRule, value: list[Any], num_layers: int) -> set[int]:
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
            found=outside[0] if abs(outside[0]) < LARGEST_SIZE else str(outside[0]),
        )
    return {number - base for number in value}


def gate_of(
    family: Family, text: Mapping[str, Any], given: float | None
) -> tuple[Gate, float | None]:
    """The gate and its lower bound; never guessed.

    Raises:
        UnsupportedModel: the family has the safe gate and nobody states its bound.
        UsageError: a given bound contradicts the config, or the gate has none.
        SourceError, NumericError: the bound is no finite number below zero.
    """
    stated = first(text, family.lower_bound)
    if given is not None and family.kind != "kda":
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
    if not _is_number(bound):
        raise SourceError(f"config.json: lower bound {bound!r} is not a number", found=str(bound))
    if not -LARGEST_SIZE <= bound < 0:
        raise NumericError(
            f"lower bound must be finite and below zero, found {bound!s:.60}", found=str(bound)
        )
    return "safe", float(bound)


def first(text: Mapping[str, Any], paths: Iterable[str]) -> Any:
    """The first path that is present and not null."""
    return next((v for v in (lookup(text, path) for path in paths) if v is not None), None)
