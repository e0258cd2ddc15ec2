"""One key head for each value head: shards, index and config of a checkpoint whose q and k were replicated.

Rows of q and k and their convolution channels are repeated, so these tensors, their shards and the index total grow,
and one number of `config.json` changes: the key heads. Everything else stays as in any other export.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

from hybridstate.checkpoint import Checkpoint
from hybridstate.checkpoint.header import DTYPE_BITS
from hybridstate.errors import SourceError, UnsupportedModel
from hybridstate.families.config import lookup, text_config
from hybridstate.weights.moves import Move

INDEX_FILE: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Growth:
    """What replicated key heads change.

    Attributes:
        field: dotted path of the config's number of key heads, in its text config.
        before, after: that number.
        shapes: new shape of every tensor that grows.
        added_bytes: of all tensors together.
        conv_before, conv_after: BF16 bytes of one sequence's convolution windows.
    """

    field: str
    before: int
    after: int
    shapes: Mapping[str, tuple[int, ...]]
    added_bytes: int
    conv_before: int
    conv_after: int

    def to_json(self) -> dict[str, Any]:
        """All fields, shapes as lists."""
        return {
            "config_field": self.field,
            "key_heads_before": self.before,
            "key_heads_after": self.after,
            "shapes": {name: list(shape) for name, shape in sorted(self.shapes.items())},
            "added_bytes": self.added_bytes,
            "conv_bytes_before": self.conv_before,
            "conv_bytes_after": self.conv_after,
        }


def growth(checkpoint: Checkpoint, moves: Mapping[str, Move]) -> Growth | None:
    """What the moves of a checkpoint make larger; None where nothing grows.

    Raises:
        UnsupportedModel: layers differ in their key heads, or the config does not name them.
    """
    shapes = {
        name: move.shape_after(checkpoint.entries[name].shape)
        for name, move in moves.items()
        if move.grown
    }
    if not shapes:
        return None
    spec = checkpoint.spec
    counts = {(layer.key_heads, layer.value_heads) for layer in spec.layers}
    text = text_config(checkpoint.config)
    paths = spec.family.geometry.key_heads
    field = next((p for p in paths if isinstance(lookup(text, p), int)), None)
    if field is None or len(counts) > 1 or lookup(text, field) != spec.layers[0].key_heads:
        raise UnsupportedModel(
            f"the config of {checkpoint.name} does not state one number of key heads, so it cannot say that "
            "they were replicated",
            hint="--key-order shared, or --key-order per-head and let the kernel gather",
            found=sorted(counts),
        )
    ((before, after),) = counts
    added = 0
    for name, shape in shapes.items():
        entry = checkpoint.entries[name]
        added += _nbytes(entry.dtype, shape) - (entry.end - entry.start)
    windows = [2 * (layer.conv_width - 1) for layer in spec.layers]
    conv = [n * layer.conv_channels for n, layer in zip(windows, spec.layers, strict=True)]
    more = [
        n * (after - before) * layer.key_dim * layer.conv.count("key_rows")
        for n, layer in zip(windows, spec.layers, strict=True)
    ]
    return Growth(field, before, after, shapes, added, sum(conv), sum(conv) + sum(more))


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * DTYPE_BITS[dtype] // 8


def changed_config(config: Mapping[str, Any], found: Growth) -> dict[str, Any]:
    """The config with its new number of key heads."""
    changed: dict[str, Any] = json.loads(json.dumps(dict(config)))
    place = text_config(changed)
    *parents, last = found.field.split(".")
    for key in parents:
        place = place[key]
    assert isinstance(place, dict)
    place[last] = found.after
    return changed


def rewrite_config(file: Path, found: Growth) -> None:
    """Change the number of key heads in a `config.json`, leaving its other bytes alone where possible."""
    text = file.read_text(encoding="utf-8-sig")
    expected = changed_config(json.loads(text), found)
    last = found.field.rpartition(".")[2]
    pattern = rf'("{re.escape(last)}"\s*:\s*){found.before}(?!\d)'
    for place in re.finditer(pattern, text):
        attempt = f"{text[: place.start()]}{place[1]}{found.after}{text[place.end() :]}"
        if json.loads(attempt) == expected:
            break
    else:
        attempt = json.dumps(expected, indent=2, ensure_ascii=False) + "\n"
    file.write_text(attempt, encoding="utf-8")


def rewrite_index(file: Path, found: Growth, checkpoint: Checkpoint) -> None:
    """Correct the totals of an index: bytes, and parameters where it counts them."""
    text = file.read_text(encoding="utf-8-sig")
    parameters = sum(
        (_nbytes("U8", shape) - _nbytes("U8", checkpoint.entries[name].shape))
        for name, shape in found.shapes.items()
    )
    for key, more in (("total_size", found.added_bytes), ("total_parameters", parameters)):
        if place := re.search(rf'("{key}"\s*:\s*)(\d+)(?![\d.eE])', text):
            total = int(place[2]) + more
            text = f"{text[: place.start()]}{place[1]}{total}{text[place.end() :]}"
    file.write_text(text, encoding="utf-8")


def grown_header(
    reader: FileIO, checkpoint: Checkpoint, source: Path, found: Growth
) -> tuple[bytes, dict[str, int]]:
    """Header of a shard with its grown tensors, and where every tensor starts in the new file.

    Tensors keep the order of their data and follow each other without gaps; metadata and the order of names stay.

    Raises:
        SourceError: the header cannot be read.
    """
    reader.seek(0)
    length = int.from_bytes(reader.read(8), "little")
    header = json.loads(reader.read(length))
    inside = {n: e for n, e in checkpoint.entries.items() if e.file == source}
    if set(header) - {"__metadata__"} != set(inside):
        raise SourceError(f"{source} changed while it was read", file=str(source))
    starts: dict[str, int] = {}
    offset = 0
    for name, entry in sorted(inside.items(), key=lambda item: (item[1].start, item[1].end)):
        shape = found.shapes.get(name, entry.shape)
        size = _nbytes(entry.dtype, shape) if name in found.shapes else entry.end - entry.start
        starts[name] = offset
        header[name] |= {"shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    base = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, {n: base + at for n, at in starts.items()}
