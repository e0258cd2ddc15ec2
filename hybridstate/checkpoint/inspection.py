"""What names, shapes and config say about a model: the result of `hybridstate inspect`. No tensor is read."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hybridstate.checkpoint.header import TensorEntry
from hybridstate.checkpoint.source import Checkpoint
from hybridstate.families import ModelSpec

SCHEMA: Final = "hybridstate.inspection/1"
"""Version of the JSON form."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """One tensor name of the linear layers, over all of them.

    Attributes:
        suffix: what follows the layer's prefix.
        dtypes, shapes: those that occur, most layers have one of each.
        layers: how many layers have it.
        nbytes: stored bytes in all of them.
        moves: whether a permutation of heads or channels moves it; None where the family's table leaves it out.
    """

    suffix: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layers: int
    nbytes: int
    moves: bool | None


@dataclass(frozen=True, slots=True)
class Shard:
    """One file whose header was read: all tensors in it, and those of linear layers."""

    file: Path
    tensors: int
    linear_tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """One checkpoint seen from its headers.

    Attributes:
        name, path: the model.
        spec: family, gate and geometry.
        kinds: tensors of the linear layers by name.
        tensors: every tensor of a linear layer with its place.
        shards: files in name order.
        header_bytes: of all headers.
        tensor_bytes_read: 0, or the claim above is wrong.
        notes, warnings: as in `analyze`.
    """

    name: str
    path: Path
    spec: ModelSpec
    kinds: tuple[TensorKind, ...]
    tensors: tuple[tuple[str, TensorEntry], ...]
    shards: tuple[Shard, ...]
    header_bytes: int
    tensor_bytes_read: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self, *, headers: bool = False) -> dict[str, Any]:
        """The JSON form; `headers` adds every tensor of the linear layers with its byte range."""
        spec = self.spec
        first = spec.layers[0]
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "name": self.name,
            "path": str(self.path),
            "family": spec.name,
            "kind": spec.family.kind,
            "analysis_only": spec.family.analysis_only,
            "runs_in_transformers": spec.family.runtime is not None,
            "gate": spec.gate,
            "lower_bound": spec.lower_bound,
            "a_s": spec.default_gate_input,
            "a_s_source": spec.default_gate_input_source,
            "unit": spec.unit,
            "units": sum(spec.units(layer) for layer in spec.layers),
            "num_layers": spec.num_layers,
            "linear_layers": [layer.index for layer in spec.layers],
            "key_heads": first.key_heads,
            "value_heads": first.value_heads,
            "key_dim": first.key_dim,
            "value_dim": first.value_dim,
            "conv_width": first.conv_width,
            "conv_channels": first.conv_channels,
            "prefix": first.prefix,
            "linear_tensors": [
                {
                    "name": kind.suffix,
                    "dtypes": list(kind.dtypes),
                    "shapes": [list(shape) for shape in kind.shapes],
                    "layers": kind.layers,
                    "bytes": kind.nbytes,
                    "follows_heads_or_channels": kind.moves,
                }
                for kind in self.kinds
            ],
            "shards": [
                {
                    "file": shard.file.name,
                    "tensors": shard.tensors,
                    "linear_tensors": shard.linear_tensors,
                    "bytes": shard.nbytes,
                }
                for shard in self.shards
            ],
            "read": {"header_bytes": self.header_bytes, "tensor_bytes": self.tensor_bytes_read},
        }
        if headers:
            found["headers"] = [
                {
                    "tensor": name,
                    "dtype": entry.dtype,
                    "shape": list(entry.shape),
                    "start": entry.start,
                    "end": entry.end,
                    "file": entry.file.name,
                }
                for name, entry in self.tensors
            ]
        return found


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Put the headers of a checkpoint together; reads nothing more.

    Raises:
        SourceError, UnsupportedModel, NumericError: what `Checkpoint.spec` raises.
    """
    spec = checkpoint.spec
    tensors = _linear_tensors(checkpoint)
    return Inspection(
        name=checkpoint.name,
        path=checkpoint.path,
        spec=spec,
        kinds=_kinds(spec, tensors),
        tensors=tuple((name, entry) for _, name, entry in tensors),
        shards=_shards(checkpoint, {name for _, name, _ in tensors}),
        header_bytes=checkpoint.header_bytes,
        tensor_bytes_read=checkpoint.bytes_read,
        notes=checkpoint.notes,
        warnings=(*checkpoint.warnings, *spec.warnings),
    )


def _linear_tensors(checkpoint: Checkpoint) -> list[tuple[str, str, TensorEntry]]:
    """(suffix, name, entry) of every tensor below a linear layer's prefix, layer by layer."""
    order = {layer.prefix: layer.ordinal for layer in checkpoint.spec.layers}
    depths = {prefix.count(".") for prefix in order}
    found = []
    for name, entry in checkpoint.entries.items():
        parts = name.split(".")
        for depth in depths:
            prefix = ".".join(parts[:depth]) + "."
            if prefix in order and len(parts) > depth:
                found.append((order[prefix], ".".join(parts[depth:]), name, entry))
    found.sort(key=lambda item: item[:2])
    return [(suffix, name, entry) for _, suffix, name, entry in found]


def _kinds(spec: ModelSpec, tensors: list[tuple[str, str, TensorEntry]]) -> tuple[TensorKind, ...]:
    grouped: dict[str, list[TensorEntry]] = defaultdict(list)
    for suffix, _, entry in tensors:
        grouped[suffix].append(entry)
    axes = spec.family.axes
    return tuple(
        TensorKind(
            suffix=suffix,
            dtypes=tuple(sorted({entry.dtype for entry in entries})),
            shapes=tuple(sorted({entry.shape for entry in entries})),
            layers=len(entries),
            nbytes=sum(entry.nbytes for entry in entries),
            moves=bool(axes[suffix]) if suffix in axes else None,
        )
        for suffix, entries in sorted(grouped.items())
    )


def _shards(checkpoint: Checkpoint, linear: set[str]) -> tuple[Shard, ...]:
    ends: dict[Path, int] = defaultdict(int)
    counts: dict[Path, list[int]] = defaultdict(lambda: [0, 0])
    for name, entry in checkpoint.entries.items():
        ends[entry.file] = max(ends[entry.file], entry.end)
        counts[entry.file][0] += 1
        counts[entry.file][1] += name in linear
    return tuple(
        Shard(file, tensors=counts[file][0], linear_tensors=counts[file][1], nbytes=ends[file])
        for file in checkpoint.files
    )
