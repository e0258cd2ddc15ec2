"""Model folders on disk: config, index, the headers of all shards, tensors by byte range."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridstate.checkpoint import index as tables
from hybridstate.checkpoint.header import TensorEntry, read_bytes, read_header
from hybridstate.checkpoint.parts import Parts
from hybridstate.errors import SourceError


@dataclass(frozen=True, slots=True)
class FolderReader:
    """Tensor bytes from local shards."""

    def fetch(self, wanted: Mapping[str, TensorEntry]) -> dict[str, bytes]:
        """Stored bytes of each tensor."""
        return {name: read_bytes(name, entry) for name, entry in wanted.items()}


def read_folder(path: Path, name: str, notes: tuple[str, ...] = ()) -> Parts:
    """Everything about a model folder but its tensors.

    `model.safetensors` wins over an index, as in transformers.

    Raises:
        SourceError: config, index or a shard is missing, corrupt or contradicts another.
    """
    config_file = path / tables.CONFIG
    config = tables.parse_object(config_file, read_small(config_file, tables.MAX_CONFIG_BYTES))
    single, index_file = path / tables.SINGLE, path / tables.INDEX
    warnings: tuple[str, ...] = ()
    if single.exists():
        headers = {single.name: read_header(single)}
        entries = tables.merge(headers, str(path))
        digest = headers[single.name].digest
    elif index_file.exists():
        index = tables.parse_index(index_file, read_small(index_file, tables.MAX_INDEX_BYTES))
        present = {file.name for file in path.iterdir()}
        tables.check_present(index, str(path), present)
        headers = {shard: read_header(path / shard) for shard in index.shards}
        entries = tables.merge(headers, str(path))
        warnings = tables.compare(index, headers, present)
        digest = index.digest
    else:
        raise SourceError(
            f"{path} has neither {tables.SINGLE} nor {tables.INDEX}",
            hint="only safetensors checkpoints are read",
            file=str(path),
        )
    files = tuple(path / shard for shard in headers)
    return Parts(
        path=path,
        name=name,
        config=config,
        entries=entries,
        names=frozenset(entries),
        files=files,
        size=sum(file.stat().st_size for file in files),
        header_bytes=sum(header.nbytes for header in headers.values()),
        index_digest=digest,
        reader=FolderReader(),
        notes=notes,
        warnings=warnings,
    )


def read_small(path: Path, limit: int) -> bytes:
    """A whole file of at most `limit` bytes.

    Raises:
        SourceError: it is missing, no regular file, unreadable or larger.
    """
    try:
        if path.exists() and not path.is_file():
            raise SourceError(f"{path} is not a regular file", file=str(path))
        size = path.stat().st_size
        if size > limit:
            raise SourceError(
                f"{path} has {size} bytes, at most {limit} are accepted",
                file=str(path),
                found=size,
                expected=limit,
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise SourceError(
            f"{path.parent} has no {path.name}",
            hint="a model folder holds config.json and safetensors files",
            file=str(path),
        ) from error
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}", file=str(path)) from error
