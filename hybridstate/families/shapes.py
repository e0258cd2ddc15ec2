"""The tensors of a linear layer against the sizes that the config states."""

from collections.abc import Mapping
from typing import Final, TypeAlias

from hybridstate.errors import NumericError, SourceError
from hybridstate.families.spec import Family, LinearLayer

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_CONV_WEIGHT: Final = "conv1d.weight"


def check_shapes(family: Family, layer: LinearLayer, shapes: Shapes) -> tuple[str, ...]:
    """Check decay tensors, projections and convolutions of one layer.

    Returns:
        Warnings: convolutions that are split in another way than the release.

    Raises:
        SourceError: a decay tensor is missing.
        NumericError: a tensor has another shape than the config implies.
    """
    decay = _decay_shapes(family, layer)
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
        if shape in allowed or (padded and len(shape) == 1 and shape[0] >= layer.value_heads):
            continue
        raise _wrong_shape(name, layer, shape, allowed[0])
    for suffix, rules in family.axes.items():
        name = layer.prefix + suffix
        if suffix in decay or "conv1d" in suffix or name not in shapes:
            continue
        for rule in rules:
            length = sum(layer.segment_length(segment) for segment in rule.segments)
            if rule.axis == 0 and shapes[name][:1] != (length,):
                raise _wrong_shape(name, layer, shapes[name], (length, *shapes[name][1:]))
    return _check_convolutions(family, layer, shapes)


def _decay_shapes(family: Family, layer: LinearLayer) -> dict[str, list[tuple[int, ...]]]:
    """Decay tensor -> shapes it may have."""
    heads = layer.value_heads
    per_channel = family.kind == "kda"
    return {
        family.a_log: [(heads,), (1, 1, heads, 1)],
        family.dt_bias: [(heads * layer.key_dim,), (heads, layer.key_dim)]
        if per_channel
        else [(heads,)],
    }


def _check_convolutions(family: Family, layer: LinearLayer, shapes: Shapes) -> tuple[str, ...]:
    """Widths, and rows in sum: transformers re-saves OLMo's three convolutions as equal thirds."""
    expected, found = [], []
    for suffix, rules in family.axes.items():
        name = layer.prefix + suffix
        if not suffix.endswith(_CONV_WEIGHT) or name not in shapes:
            continue
        shape = shapes[name]
        if shape[-1:] != (layer.conv_width,):
            raise _wrong_shape(name, layer, shape, (*shape[:-1], layer.conv_width))
        expected.append(sum(layer.segment_length(s) for rule in rules for s in rule.segments))
        found.append(shape[0])
    if expected == found:
        return ()
    if sum(expected) != sum(found):
        raise NumericError(
            f"the convolutions of {layer.prefix} have {sum(found)} channels, expected "
            f"{sum(expected)} for {layer.value_heads} value heads and key dimension {layer.key_dim}",
            hint="config.json and tensors disagree; the checkpoint may be a mixture of two models",
            layer=layer.index,
            found=found,
            expected=expected,
        )
    return (
        f"the convolutions are split {'/'.join(map(str, found))} instead of "
        f"{'/'.join(map(str, expected))} between q, k and v, as transformers saves them; other programs "
        "misread them",
    )


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
