"""`config.json` and the index of a sharded checkpoint, checked, and the index against the shards."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from hybridstate.checkpoint.header import Header, TensorEntry, strict_pairs, why_no_json
from hybridstate.errors import SourceError
from hybridstate.families.table import FAMILIES, IGNORED_COMPONENTS
from hybridstate.provenance import sha256_bytes

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"

MAX_CONFIG_BYTES: Final = 16 << 20
MAX_INDEX_BYTES: Final = 256 << 20

_LONGEST_FILE_NAME: Final = 255
_OTHER_VERSIONS: Final = "index and shards belong to different versions; fetch them again"


@dataclass(frozen=True, slots=True)
class Index:
    """A parsed index.

    Attributes:
        file: where it is, for messages.
        shard_of: tensor name -> shard file name.
        shards: shard file names in order.
        total_size: bytes of all tensors as the index states them, None where it does not.
        digest: sha256 of the file.
    """

    file: Path
    shard_of: Mapping[str, str]
    shards: tuple[str, ...]
    total_size: int | None
    digest: str

    def tensors_of(self, shard: str) -> int:
        """How many tensors the index places in a shard."""
        return sum(1 for place in self.shard_of.values() if place == shard)


def parse_object(file: Path, data: bytes, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object in UTF-8.

    Args:
        unique: refuse a key that appears twice.

    Raises:
        SourceError: it is none.
    """
    try:
        value = json.loads(
            data.decode("utf-8-sig"), object_pairs_hook=strict_pairs(file) if unique else None
        )
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{file} is not JSON: {why_no_json(error)}",
            hint="the file is damaged; fetch it again",
            file=str(file),
        ) from error
    if not isinstance(value, dict):
        raise SourceError(f"{file} is not a JSON object", file=str(file))
    return value


def config_digest(config: Mapping[str, Any]) -> str:
    """sha256 of the sorted config without the key an exported checkpoint adds."""
    values = {key: value for key, value in config.items() if key != "state_plan"}
    return sha256_bytes(json.dumps(values, sort_keys=True).encode())


def parse_index(file: Path, data: bytes) -> Index:
    """Parse and check an index without looking at its shards.

    Raises:
        SourceError: no JSON object, no weight_map, a tensor twice, or a shard that is no
            safetensors file beside the index.
    """
    table = parse_object(file, data, unique=True)
    shard_of = table.get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise SourceError(f"{file} has no weight_map", file=str(file))
    for tensor, shard in shard_of.items():
        if not isinstance(shard, str):
            raise SourceError(
                f"{file} places {tensor:.200} in {shard!r:.60}, a file name is expected",
                file=str(file),
                tensor=tensor,
            )
    shards = tuple(sorted(set(shard_of.values())))
    for name in shards:
        proper = name.isprintable() and len(name) <= _LONGEST_FILE_NAME
        plain = PurePosixPath(name).name == name and "\\" not in name
        if not proper or not plain or not name.endswith(".safetensors"):
            raise SourceError(
                f"{file}: {name!r:.120} is not the name of a safetensors file in this folder",
                file=str(file),
            )
    metadata = table.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    stated = size if type(size) is int and 0 < size < 1 << 63 else None
    return Index(file, shard_of, shards, stated, sha256_bytes(data))


def check_present(index: Index, where: str, present: Collection[str]) -> None:
    """Every shard of the index is there.

    Raises:
        SourceError: one is not.
    """
    for name in index.shards:
        if name not in present:
            raise SourceError(
                f"shard {name} is missing from {where} (1 of {len(index.shards)}, "
                f"{index.tensors_of(name)} tensors)",
                hint="the download is incomplete; fetch this file again",
                file=name,
            )


def linear_prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """`model.layers.0.linear_attn.` and the like: what stands before the decay tensors of any family."""
    suffixes = tuple({family.a_log for family in FAMILIES})
    found = {
        name.removesuffix(suffix)
        for name in names
        for suffix in suffixes
        if name.endswith("." + suffix)
    }
    return tuple(sorted(p for p in found if not set(p.split(".")) & set(IGNORED_COMPONENTS)))


def merge(headers: Mapping[str, Header], where: str) -> dict[str, TensorEntry]:
    """The tensors of all shards in one table.

    Raises:
        SourceError: two shards hold a tensor of the same name.
    """
    entries: dict[str, TensorEntry] = {}
    for header in headers.values():
        for tensor, entry in header.entries.items():
            if tensor in entries:
                raise SourceError(
                    f"{tensor:.200} is stored twice: in {entries[tensor].file.name} and "
                    f"{entry.file.name} of {where}",
                    tensor=tensor,
                    file=str(entry.file),
                )
            entries[tensor] = entry
    return entries


def compare(index: Index, headers: Mapping[str, Header], present: Iterable[str]) -> tuple[str, ...]:
    """The index against the shards whose headers were read, both ways.

    Args:
        headers: shard file name -> header.
        present: names of all files beside the index.

    Returns:
        Warnings: tensors and safetensors files that the index does not list.

    Raises:
        SourceError: a listed tensor is not in its shard, or lies in another one; or a tensor of a
            linear-attention layer is not listed.
    """
    for tensor, shard in index.shard_of.items():
        if shard in headers and tensor not in headers[shard].entries:
            elsewhere = [name for name, header in headers.items() if tensor in header.entries]
            also = f"; {elsewhere[0]} does" if elsewhere else ""
            raise SourceError(
                f"{index.file.name} places {tensor:.200} in {shard}, which does not hold it{also}",
                hint=_OTHER_VERSIONS,
                file=str(index.file),
                tensor=tensor,
            )
    unlisted: list[str] = []
    for shard, header in headers.items():
        for tensor in header.entries:
            place = index.shard_of.get(tensor)
            if place is None:
                unlisted.append(tensor)
            elif place != shard:
                raise SourceError(
                    f"{tensor:.200} lies in {shard}, but {index.file.name} places it in {place}",
                    hint=_OTHER_VERSIONS,
                    file=str(index.file),
                    tensor=tensor,
                )
    return _unlisted(index, unlisted) + _stray(index, present)


def _unlisted(index: Index, unlisted: list[str]) -> tuple[str, ...]:
    if not unlisted:
        return ()
    linear = linear_prefixes((*index.shard_of, *unlisted))
    decisive = next((name for name in unlisted if name.startswith(linear)), None)
    if linear and decisive is not None:
        raise SourceError(
            f"{decisive:.200} of a linear-attention layer is stored, but {index.file.name} does not "
            "list it",
            hint=_OTHER_VERSIONS,
            file=str(index.file),
            tensor=decisive,
        )
    return (
        f"{len(unlisted)} stored tensors are not listed in {index.file.name}, such as "
        f"{unlisted[0]:.200}",
    )


def _stray(index: Index, present: Iterable[str]) -> tuple[str, ...]:
    stray = sorted({n for n in present if n.endswith(".safetensors")} - set(index.shards))
    if not stray:
        return ()
    return (
        f"{len(stray)} safetensors files are not listed in {index.file.name} and are ignored, "
        f"such as {stray[0]}",
    )
