"""The safetensors header is checked before a byte of data is used."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridstate.checkpoint import TensorEntry
from hybridstate.checkpoint.header import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    decode,
    read_bytes,
    read_header,
)
from hybridstate.errors import SourceError


def write(path: Path, header: Any, data: bytes = b"", *, raw: bytes | None = None) -> Path:
    text = json.dumps(header).encode() if raw is None else raw
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def f32(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def test_entries_carry_absolute_offsets(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": f32([2], 0, 8), "b": f32([1, 3], 8, 20)}
    path = write(tmp_path / "x.safetensors", header, bytes(range(20)))
    parsed = read_header(path)
    assert parsed.metadata == {"format": "pt"}
    assert parsed.entries["b"] == TensorEntry(
        path, "F32", (1, 3), parsed.nbytes + 8, parsed.nbytes + 20
    )
    assert read_bytes("b", parsed.entries["b"]) == bytes(range(8, 20))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": f32([3], 0, 8)}, "spans 8 bytes, F32 [3] needs 12"),
        ({"a": f32([2], 0, 8), "b": f32([2], 4, 12)}, "b overlaps a"),
        ({"a": f32([8], 0, 32)}, "is truncated"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "lacks dtype, shape or data_offsets"),
        ({"a": 3}, "lacks dtype, shape or data_offsets"),
        ({"a": f32([2], 0, 8) | {"dtype": "Q7"}}, "unknown dtype 'Q7'"),
        ({"a": f32([-2], 0, 8)}, "no natural number"),
        ({"a": f32([2], -8, 0)}, "no natural number"),
        ([1, 2], "not a JSON object"),
    ],
)
def test_bad_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "x.safetensors", header, bytes(12))
    with pytest.raises(SourceError) as caught:
        read_header(path)
    assert message in caught.value.message
    assert caught.value.context["file"] == str(path)


def test_header_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", None, raw=b"{not json")
    with pytest.raises(SourceError, match="the header is not JSON"):
        read_header(path)


def test_header_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    entry = json.dumps(f32([1], 0, 4))
    raw = f'{{"a": {entry}, "a": {entry}}}'.encode()
    path = write(tmp_path / "x.safetensors", None, bytes(4), raw=raw)
    with pytest.raises(SourceError, match="'a' appears twice"):
        read_header(path)


def test_oversized_header_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(SourceError, match=f"at most {MAX_HEADER_BYTES} are accepted"):
        read_header(path)


@pytest.mark.parametrize("size", [0, 7])
def test_file_shorter_than_its_length_field_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(SourceError, match="too short"):
        read_header(path)


def test_file_truncated_inside_the_header_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": f32([1], 0, 4)})
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(SourceError, match="truncated inside its header"):
        read_header(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        read_header(tmp_path / "x.safetensors")


def test_file_that_shrank_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": f32([2], 0, 8)}, bytes(8))
    entry = read_header(path).entries["a"]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(SourceError, match="truncated inside a: 5 of 8 bytes"):
        read_bytes("a", entry)


def test_every_float_dtype_decodes_exactly(tmp_path: Path) -> None:
    values = np.array([0.0, -1.5, 2.75, np.inf, 2.0**-14], np.float64)
    bits = (values.astype("<f4").view(np.uint32) >> 16).astype("<u2")
    stored = {
        "F64": values.astype("<f8").tobytes(),
        "F32": values.astype("<f4").tobytes(),
        "F16": values.astype("<f2").tobytes(),
        "BF16": bits.tobytes(),
    }
    for dtype, data in stored.items():
        entry = TensorEntry(tmp_path / "x", dtype, (5,), 0, len(data))
        decoded = decode("a", entry, data)
        assert decoded.dtype == (np.float64 if dtype == "F64" else np.float32)
        np.testing.assert_array_equal(decoded, values)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_16_bit_pattern_decodes_as_torch_does(tmp_path: Path, dtype: str) -> None:
    """Zeros of both signs, subnormals, infinities and NaN included."""
    patterns = np.arange(1 << 16, dtype="<u2")
    entry = TensorEntry(tmp_path / "x", dtype, (256, 256), 0, 2 << 16)
    decoded = decode("a", entry, patterns.tobytes())
    kind = torch.float16 if dtype == "F16" else torch.bfloat16
    expected = torch.from_numpy(patterns.view(np.int16).copy()).view(kind).float().numpy()
    np.testing.assert_array_equal(decoded.reshape(-1), expected)
    np.testing.assert_array_equal(np.signbit(decoded.reshape(-1)), np.signbit(expected))


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_wide_floats_keep_every_bit(tmp_path: Path, dtype: str) -> None:
    raw = np.random.default_rng(5).bytes(8192)
    entry = TensorEntry(
        tmp_path / "x", dtype, (8192 * 8 // (32 if dtype == "F32" else 64),), 0, 8192
    )
    assert decode("a", entry, raw).tobytes() == raw


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BITS) - {"F64", "F32", "F16", "BF16"}))
def test_other_dtypes_are_sized_but_never_decoded(tmp_path: Path, dtype: str) -> None:
    """Weights in FP8, FP4 or integers may stand in the same file; decay parameters may not be."""
    nbytes = 8 * DTYPE_BITS[dtype] // 8
    item = {"dtype": dtype, "shape": [8], "data_offsets": [0, nbytes]}
    path = write(tmp_path / "x.safetensors", {"a": item}, bytes(nbytes))
    entry = read_header(path).entries["a"]
    with pytest.raises(SourceError, match=f"a is stored as {dtype}"):
        decode("a", entry, read_bytes("a", entry))


def test_dtype_that_is_no_float_is_refused(tmp_path: Path) -> None:
    entry = TensorEntry(tmp_path / "x", "F8_E4M3", (4,), 0, 4)
    with pytest.raises(SourceError, match="a is stored as F8_E4M3"):
        decode("a", entry, bytes(4))


def test_headers_agree_with_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    arrays = {
        f"t{i}": rng.standard_normal((i + 1, 3)).astype(np.float32 if i % 2 else np.float16)
        for i in range(5)
    }
    path = tmp_path / "x.safetensors"
    save_file(arrays, path)
    entries = read_header(path).entries
    assert set(entries) == set(arrays)
    for name, array in arrays.items():
        decoded = decode(name, entries[name], read_bytes(name, entries[name]))
        np.testing.assert_array_equal(decoded, array.astype(np.float32))
