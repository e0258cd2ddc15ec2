"""The header of a safetensors file, checked, and the bytes of single tensors.

A file is: 8 bytes little-endian header length, the header as JSON (tensor name -> dtype, shape,
data_offsets), then the data. Offsets count from the end of the header.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.errors import SourceError
from hybridstate.provenance import sha256_bytes

MAX_HEADER_BYTES: Final = 25_000_000
"""Longest header accepted, the limit of huggingface_hub."""

MAX_DIMENSIONS: Final = 64
"""Most dimensions of a tensor, NumPy's limit."""

LENGTH_BYTES: Final = 8
"""Bytes in front of the header that give its length."""

_TOO_LARGE: Final = 1 << 63
_FETCH_AGAIN: Final = "the download is incomplete; fetch this file again"
_DAMAGED: Final = "the file is damaged; fetch it again"

_OTHER_FILES: Final = {
    b"version ": ("a Git LFS pointer", "fetch the file it stands for: git lfs pull"),
    b"<": ("a web page", "the download went wrong; fetch this file again"),
    b"PK\x03\x04": (
        "a zip archive, as PyTorch writes them",
        "convert the checkpoint to safetensors",
    ),
    b"GGUF": ("a GGUF file", "give the original checkpoint in safetensors"),
}
"""First bytes of what is found under the name of a shard -> what it is, what to do."""

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


def header_length(file: Path, first: bytes, size: int) -> int:
    """Length of the header from the first 8 bytes of a file of `size` bytes.

    Raises:
        SourceError: too few bytes, or a length that is too large, zero or beyond the file.
    """
    if len(first) < LENGTH_BYTES:
        raise SourceError(
            f"{file}: {size} bytes is too short for a safetensors file",
            hint=_FETCH_AGAIN,
            file=str(file),
            found=size,
        )
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        other = next(
            (text for start, text in _OTHER_FILES.items() if first.startswith(start)), None
        )
        if other is not None:
            raise SourceError(
                f"{file} is {other[0]}, not a safetensors file", hint=other[1], file=str(file)
            )
        raise SourceError(
            f"{file}: header of {length} bytes, at most {MAX_HEADER_BYTES} are accepted; "
            "this is not a safetensors file or it is corrupt",
            hint=_FETCH_AGAIN,
            file=str(file),
            found=length,
            expected=MAX_HEADER_BYTES,
        )
    if LENGTH_BYTES + length > size:
        raise SourceError(
            f"{file} is truncated inside its header: {size} bytes, {LENGTH_BYTES + length} needed",
            hint=_FETCH_AGAIN,
            file=str(file),
            found=size,
            expected=LENGTH_BYTES + length,
        )
    return length


def parse_header(file: Path, raw: bytes, size: int) -> Header:
    """Parse and check the header bytes `raw` of a file of `size` bytes; the only parser there is.

    Raises:
        SourceError: not a JSON object in UTF-8, a name twice or unusable, metadata that is no text,
            a dtype, shape or offset that cannot be, a tensor that overlaps another or lies outside
            the file, bytes that belong to no tensor.
    """
    table = _parse(file, raw)
    metadata = table.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(map(_is_text, (*metadata, *metadata.values()))):
        raise SourceError(
            f"{file}: __metadata__ is not a table of text", hint=_DAMAGED, file=str(file)
        )
    data_start = LENGTH_BYTES + len(raw)
    entries = {name: _entry(file, name, item, data_start) for name, item in table.items()}
    _check_ranges(file, entries, data_start, size)
    return Header(entries, metadata, sha256_bytes(raw), data_start)


def read_header(path: Path) -> Header:
    """The header of a local file, without touching the data.

    Raises:
        SourceError: missing, unreadable, or what `header_length` and `parse_header` refuse.
    """
    try:
        if not path.is_file() and path.exists():
            what = "a folder" if path.is_dir() else "not a regular file"
            raise SourceError(f"{path} is {what}, a safetensors file is expected", file=str(path))
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = header_length(path, stream.read(LENGTH_BYTES), size)
            raw = stream.read(length)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}", file=str(path)) from error
    if len(raw) < length:
        raise SourceError(
            f"{path} became shorter while it was read: {len(raw)} of {length} header bytes",
            hint="wait until the download is finished",
            file=str(path),
        )
    return parse_header(path, raw, size)


def why_no_json(error: Exception) -> str:
    """What is wrong, without advice that is meant for programmers."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8 text"
    return str(error).partition("; use sys.")[0]


def strict_pairs(file: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """A hook for `json.loads` that refuses a key that appears twice in one object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            raise SourceError(
                f"{file}: {twice!r:.200} appears twice in it", hint=_DAMAGED, file=str(file)
            )
        return table

    return unique


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    def no_number(word: str) -> float:
        raise ValueError(f"{word} is no JSON number")

    try:
        table = json.loads(
            raw.decode("utf-8"), object_pairs_hook=strict_pairs(file), parse_constant=no_number
        )
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{file}: the header is not UTF-8 text (byte {error.start}); this is not a safetensors "
            "file or it is corrupt",
            hint=_FETCH_AGAIN,
            file=str(file),
        ) from error
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{file}: the header is not JSON ({why_no_json(error)}); this is not a safetensors file "
            "or it is corrupt",
            hint=_FETCH_AGAIN,
            file=str(file),
        ) from error
    if not isinstance(table, dict):
        raise SourceError(f"{file}: the header is not a JSON object", hint=_DAMAGED, file=str(file))
    return table


def _entry(file: Path, name: str, item: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
        start, end = offsets
    except (TypeError, KeyError, ValueError) as error:
        raise _bad_entry(file, name, "lacks dtype, shape or data_offsets") from error
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise _bad_entry(file, name, "has a shape or data_offsets that is no list")
    if len(shape) > MAX_DIMENSIONS:
        raise _bad_entry(
            file, name, f"has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are accepted"
        )
    for number in (*shape, start, end):
        if type(number) is not int or number < 0:
            raise _bad_entry(file, name, "has a shape or offset that is no natural number")
        if number >= _TOO_LARGE:
            raise _bad_entry(file, name, "has a shape or offset beyond 63 bits")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise SourceError(
            f"{file}: {name:.200} has the unknown dtype {dtype!r:.60}",
            hint="the file is damaged, or written by a newer safetensors than this version knows",
            file=str(file),
            tensor=name,
            found=str(dtype)[:60],
        )
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise _bad_entry(file, name, f"needs {bits} bits as {dtype} {shape}, no whole bytes")
    if end - start != bits // 8:
        raise SourceError(
            f"{file}: {name:.200} spans {end - start} bytes, {dtype} {shape} needs {bits // 8}",
            hint=_DAMAGED,
            file=str(file),
            tensor=name,
            found=end - start,
            expected=min(bits // 8, _TOO_LARGE),
        )
    if not _is_text(name):
        raise _bad_entry(file, ascii(name), "has a name that is no Unicode text")
    return TensorEntry(file, dtype, tuple(shape), data_start + start, data_start + end)


def _is_text(value: Any) -> bool:
    """Whether a value is a string that can be written; JSON can escape half a character."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bad_entry(file: Path, name: str, what: str) -> SourceError:
    return SourceError(
        f"{file}: header entry of {name:.200} {what}", hint=_DAMAGED, file=str(file), tensor=name
    )


def _check_ranges(
    file: Path, entries: Mapping[str, TensorEntry], data_start: int, size: int
) -> None:
    """Tensors lie one behind the other, without gap or overlap, from the header to the end."""
    ordered = sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].end))
    previous_end, previous_name = data_start, "the header"
    for name, entry in ordered:
        if entry.start < previous_end:
            raise SourceError(
                f"{file}: {name:.200} overlaps {previous_name:.200}",
                hint=_DAMAGED,
                file=str(file),
                tensor=name,
            )
        if entry.start > previous_end:
            raise SourceError(
                f"{file}: {entry.start - previous_end} bytes between {previous_name:.200} and "
                f"{name:.200} belong to no tensor",
                hint=_DAMAGED,
                file=str(file),
                tensor=name,
            )
        previous_end, previous_name = entry.end, name
    if previous_end > size:
        raise SourceError(
            f"{file} is truncated: {size} bytes, {previous_end} needed up to the end of "
            f"{previous_name:.200}",
            hint=_FETCH_AGAIN,
            file=str(file),
            tensor=previous_name,
            found=size,
            expected=previous_end,
        )
    if previous_end < size:
        raise SourceError(
            f"{file}: {size - previous_end} bytes behind {previous_name:.200} belong to no tensor",
            hint="header and data belong to different files; fetch this file again",
            file=str(file),
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
