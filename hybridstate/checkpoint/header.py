"""The header of a safetensors file, checked, and the bytes of single tensors.

A file is: 8 bytes little-endian header length, the header as JSON (tensor name -> dtype, shape,
data_offsets), then the data. Offsets count from the end of the header.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.errors import SourceError
from hybridstate.provenance import sha256_bytes

MAX_HEADER_BYTES: Final = 25_000_000
"""Longest header accepted, the limit of huggingface_hub."""

DTYPE_BITS: Final[dict[str, int]] = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6,
    "F4": 4,
}  # fmt: skip
"""Bits of every dtype name the format defines."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes [start, end) of `file`, counted from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """One parsed header: its tensors, metadata, the digest of its bytes, and its length."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    digest: str
    nbytes: int


def read_header(path: Path) -> Header:
    """Parse and check a header without touching the data.

    Raises:
        SourceError: missing, too short, header too large, not JSON, a tensor outside the file, of
            an unknown dtype, of the wrong size, named twice or overlapping another.
    """
    try:
        if not path.is_file() and path.exists():
            what = "a folder" if path.is_dir() else "not a regular file"
            raise SourceError(f"{path} is {what}, a safetensors file is expected", file=str(path))
        size = path.stat().st_size
        with path.open("rb") as stream:
            length_bytes = stream.read(8)
            length = int.from_bytes(length_bytes, "little")
            if len(length_bytes) < 8:
                raise SourceError(
                    f"{path}: {size} bytes is too short for a safetensors file",
                    hint="the download is incomplete; fetch this file again",
                    file=str(path),
                )
            if length > MAX_HEADER_BYTES:
                raise SourceError(
                    f"{path}: header of {length} bytes, at most {MAX_HEADER_BYTES} are accepted; "
                    "this is not a safetensors file or it is corrupt",
                    file=str(path),
                    found=length,
                    expected=MAX_HEADER_BYTES,
                )
            raw = stream.read(length)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}", file=str(path)) from error
    if len(raw) < length:
        raise SourceError(
            f"{path} is truncated inside its header: {size} bytes, {8 + length} needed",
            hint="the download is incomplete; fetch this file again",
            file=str(path),
            found=size,
            expected=8 + length,
        )
    table = _parse(path, raw)
    metadata = table.pop("__metadata__", {})
    entries = {name: _entry(path, name, item, 8 + length) for name, item in table.items()}
    _check_ranges(path, entries, size)
    strings = {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}
    return Header(entries, strings, sha256_bytes(raw), 8 + length)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise SourceError(f"{path}: {twice!r} appears twice in the header", file=str(path))
        return table

    try:
        table = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{path}: the header is not JSON ({error}); this is not a safetensors file or it is "
            "corrupt",
            file=str(path),
        ) from error
    if not isinstance(table, dict):
        raise SourceError(f"{path}: the header is not a JSON object", file=str(path))
    return table


def _entry(path: Path, name: str, item: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
        start, end = offsets
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError) as error:
        raise SourceError(
            f"{path}: header entry of {name} lacks dtype, shape or data_offsets",
            file=str(path),
            tensor=name,
        ) from error
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise SourceError(
            f"{path}: header entry of {name} has a shape or offset that is no natural number",
            file=str(path),
            tensor=name,
        )
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise SourceError(
            f"{path}: {name} has the unknown dtype {dtype!r}",
            file=str(path),
            tensor=name,
            found=str(dtype),
        )
    expected = (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8
    if end - start != expected:
        raise SourceError(
            f"{path}: {name} spans {end - start} bytes, {dtype} {list(shape)} needs {expected}",
            file=str(path),
            tensor=name,
            found=end - start,
            expected=expected,
        )
    return TensorEntry(path, dtype, tuple(shape), data_start + start, data_start + end)


def _check_ranges(path: Path, entries: Mapping[str, TensorEntry], size: int) -> None:
    ordered = sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].end))
    previous_end, previous_name = 0, ""
    for name, entry in ordered:
        if entry.start < previous_end and entry.nbytes:
            raise SourceError(
                f"{path}: {name} overlaps {previous_name}", file=str(path), tensor=name
            )
        if entry.end > previous_end:
            previous_end, previous_name = entry.end, name
    if previous_end > size:
        raise SourceError(
            f"{path} is truncated: {size} bytes, {previous_end} needed up to the end of "
            f"{previous_name}",
            hint="the download is incomplete; fetch this file again",
            file=str(path),
            tensor=previous_name,
            found=size,
            expected=previous_end,
        )


def read_bytes(name: str, entry: TensorEntry) -> bytes:
    """The raw stored bytes of one tensor, nothing else.

    Raises:
        SourceError: the file is gone, unreadable or shorter than its header says.
    """
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            data = stream.read(entry.nbytes)
    except OSError as error:
        raise SourceError(f"{entry.file}: {error.strerror}", file=str(entry.file)) from error
    if len(data) != entry.nbytes:
        raise SourceError(
            f"{entry.file} is truncated inside {name}: {len(data)} of {entry.nbytes} bytes",
            file=str(entry.file),
            tensor=name,
        )
    return data


def decode(name: str, entry: TensorEntry, data: bytes) -> NDArray[np.float32] | NDArray[np.float64]:
    """Stored bytes as float64 (F64) or float32 (F32, F16, BF16), every value exactly as stored.

    Raises:
        SourceError: the dtype is not one of those four.
    """
    if entry.dtype == "F64":
        return np.frombuffer(data, "<f8").reshape(entry.shape)
    if entry.dtype == "F32":
        return np.frombuffer(data, "<f4").reshape(entry.shape)
    if entry.dtype == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32).reshape(entry.shape)
    if entry.dtype == "BF16":
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).reshape(entry.shape)
    raise SourceError(
        f"{entry.file}: {name} is stored as {entry.dtype}; F64, F32, F16 or BF16 is expected",
        file=str(entry.file),
        tensor=name,
        found=entry.dtype,
        expected=["F64", "F32", "F16", "BF16"],
    )
