"""Every malformed folder that is tried: what was done to it, and the exit code it must end with.

`test_malformed.py` runs them, `scripts/malformed.py` writes docs/malformed.md from them.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hybridstate.checkpoint.header import MAX_HEADER_BYTES
from hybridstate.checkpoint.index import MAX_CONFIG_BYTES
from tests.tiny import write_checkpoint, write_safetensors

Damage = Callable[[Path], None]

SHARDS: Final = tuple(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))
INDEX: Final = "model.safetensors.index.json"
PREFIX: Final = "model.layers.1.self_attn."


@dataclass(frozen=True)
class Case:
    """One way to be wrong.

    Attributes:
        part: heading of the table.
        what: what is wrong, as a reader would say it.
        damage: changes a good folder (Kimi-Linear layout in three shards).
        code: exit code.
        says: part of the message.
    """

    part: str
    what: str
    damage: Damage
    code: int
    says: str


def good(folder: Path) -> Path:
    """The folder that is damaged."""
    return write_checkpoint(folder, "kimi_linear", shards=3)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a shard."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put(path: Path, header: Any, data: bytes) -> None:
    """Write a shard, valid or not; `header` may be bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def on_header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Change the header of the second shard, in place or by what `change` returns."""

    def damage(folder: Path) -> None:
        header, data = header_of(folder / SHARDS[1])
        changed = change(header)
        put(folder / SHARDS[1], header if changed is None else changed, data)

    return damage


def on_file(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """Change the bytes of a file."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def on_json(name: str, change: Callable[[dict[str, Any]], None]) -> Damage:
    """Change a JSON file."""

    def damage(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return damage


def on_map(change: Callable[[dict[str, Any]], None]) -> Damage:
    """Change the weight_map of the index."""
    return on_json(INDEX, lambda index: change(index["weight_map"]))


def first(header: dict[str, Any]) -> dict[str, Any]:
    """The entry of the first tensor in the data."""
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    found: dict[str, Any] = min(entries, key=lambda entry: entry["data_offsets"])
    return found


def last(header: dict[str, Any]) -> dict[str, Any]:
    """The entry of the last tensor in the data."""
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    found: dict[str, Any] = max(entries, key=lambda entry: entry["data_offsets"])
    return found


def _twice(header: dict[str, Any]) -> bytes:
    name = next(name for name in header if name != "__metadata__")
    text = json.dumps(header)
    return (text[:-1] + f', "{name}": {json.dumps(header[name])}}}').encode()


def _shift(header: dict[str, Any], by: int) -> None:
    entry = last(header)
    entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


def _replace(header: dict[str, Any], **fields: Any) -> None:
    first(header).update(fields)


def _grow(folder: Path, size: int, name: str = SHARDS[1]) -> None:
    with (folder / name).open("r+b") as stream:
        stream.truncate(size)


def _empty(folder: Path) -> None:
    (folder / SHARDS[1]).write_bytes(b"")


def _folder_instead(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    (folder / SHARDS[1]).mkdir()


def _pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def _link_to_nothing(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    (folder / SHARDS[1]).symlink_to(folder / "gone.safetensors")


def _html(folder: Path) -> None:
    (folder / SHARDS[1]).write_bytes(b"<!DOCTYPE html><html>404 not found</html>" * 4)


def _pointer(folder: Path) -> None:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4\n"
    (folder / SHARDS[1]).write_text(text)


def _huge_config(folder: Path) -> None:
    _grow(folder, MAX_CONFIG_BYTES + 1, "config.json")


def _swap(folder: Path) -> None:
    a, b = (folder / SHARDS[0]).read_bytes(), (folder / SHARDS[1]).read_bytes()
    (folder / SHARDS[0]).write_bytes(b)
    (folder / SHARDS[1]).write_bytes(a)


def _duplicate(folder: Path) -> None:
    header, _ = header_of(folder / SHARDS[0])
    name = next(n for n in header if n != "__metadata__")
    other, _ = header_of(folder / SHARDS[1])
    kept = {n: ("F32", np.zeros((1,), np.float32)) for n in other if n != "__metadata__"}
    write_safetensors(folder / SHARDS[1], kept | {name: ("F32", np.zeros((1,), np.float32))})


def _unlisted_decay(weights: dict[str, Any]) -> None:
    del weights[PREFIX + "dt_bias"]


def _move(weights: dict[str, Any]) -> None:
    name = next(n for n, shard in weights.items() if shard == SHARDS[0])
    weights[name] = SHARDS[1]


def _value(name: str, position: int, value: float) -> Damage:
    """Overwrite one stored F32 value."""

    def damage(folder: Path) -> None:
        for shard in SHARDS:
            header, data = header_of(folder / shard)
            if name in header:
                start = header[name]["data_offsets"][0] + 4 * position
                new = data[:start] + np.float32(value).tobytes() + data[start + 4 :]
                put(folder / shard, header, new)

    return damage


def _retype(name: str, dtype: str, shape: list[int] | None = None) -> Damage:
    """Describe a tensor's bytes as another dtype or shape of the same size."""

    def damage(folder: Path) -> None:
        for shard in SHARDS:
            header, data = header_of(folder / shard)
            if name in header:
                header[name]["dtype"] = dtype
                header[name]["shape"] = header[name]["shape"] if shape is None else shape
                put(folder / shard, header, data)

    return damage


def _drop(name: str) -> Damage:
    """Take a tensor out of shard and index, the others stay."""

    def damage(folder: Path) -> None:
        for shard in SHARDS:
            header, data = header_of(folder / shard)
            if name in header:
                start, end = header.pop(name)["data_offsets"]
                for entry in (e for n, e in header.items() if n != "__metadata__"):
                    if entry["data_offsets"][0] >= end:
                        entry["data_offsets"] = [o - (end - start) for o in entry["data_offsets"]]
                put(folder / shard, header, data[:start] + data[end:])
        on_map(lambda weights: weights.pop(name))(folder)

    return damage


def _config(path: str, value: Any) -> Damage:
    """Set a value of config.json."""

    def change(config: dict[str, Any]) -> None:
        *parents, key = path.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        place[key] = value

    return on_json("config.json", change)


def _unlink(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


FOLDER: Final = "The folder"
CONFIG: Final = "config.json"
TABLE: Final = "The index"
FILE: Final = "A shard as a file"
HEADER: Final = "The header of a shard"
DATA: Final = "Tensors against each other, the config and arithmetic"

CASES: Final = (
    Case(FOLDER, "no config.json", _unlink("config.json"), 3, "has no config.json"),
    Case(FOLDER, "no weights at all", lambda f: [p.unlink() for p in f.glob("*.safetensors*")] and None, 3,
         "has neither"),
    Case(FOLDER, "a shard missing", _unlink(SHARDS[1]), 3, "is missing from"),
    Case(FOLDER, "a link to nothing in place of a shard", _link_to_nothing, 3, "No such file"),
    Case(FOLDER, "a folder in place of a shard", _folder_instead, 3, "is a folder"),
    Case(FOLDER, "a pipe in place of config.json", _pipe, 3, "not a regular file"),
    Case(CONFIG, "empty", on_file("config.json", lambda _: b""), 3, "is not JSON"),
    Case(CONFIG, "cut in the middle", on_file("config.json", lambda d: d[: len(d) // 2]), 3, "is not JSON"),
    Case(CONFIG, "a list", on_file("config.json", lambda _: b"[]"), 3, "is not a JSON object"),
    Case(CONFIG, "not UTF-8", on_file("config.json", lambda d: b"\xff\xfe" + d), 3, "is not JSON"),
    Case(CONFIG, "100,000 brackets deep", on_file("config.json", lambda _: b"[" * 100_000), 3, "is not JSON"),
    Case(CONFIG, "larger than 16 MiB", _huge_config, 3, "at most 16777216 are accepted"),
    Case(CONFIG, "no number of blocks", _config("num_hidden_layers", None), 3, "num_hidden_layers"),
    Case(CONFIG, "more blocks than tensors", _config("num_hidden_layers", 9), 3, "has no tensor of"),
    Case(CONFIG, "sizes that are text", _config("linear_attn_config.head_dim", "8"), 3, "head_dim"),
    Case(CONFIG, "sizes that the tensors contradict", _config("linear_attn_config.num_heads", 3), 5, "has shape"),
    Case(CONFIG, "a layer list that the tensors contradict", _config("linear_attn_config.kda_layers", [1, 2]), 3,
         "does not list it as linear"),
    Case(TABLE, "not JSON", on_file(INDEX, lambda d: d[:-9]), 3, "is not JSON"),
    Case(TABLE, "no weight_map", on_file(INDEX, lambda _: b"{}"), 3, "has no weight_map"),
    Case(TABLE, "weight_map is a list", on_file(INDEX, lambda _: b'{"weight_map": ["a"]}'), 3, "has no weight_map"),
    Case(TABLE, "a tensor twice",
         on_file(INDEX, lambda d: d.replace(b'"weight_map": {', b'"weight_map": {"lm_head.weight": "x",', 1)), 3,
         "appears twice"),
    Case(TABLE, "a shard that is a number", on_map(lambda w: w.update({"lm_head.weight": 7})), 3, "in 7, a file name"),
    Case(TABLE, "a shard outside the folder", on_map(lambda w: w.update({"lm_head.weight": "../x.safetensors"})), 3,
         "'../x.safetensors' is not the name"),
    Case(TABLE, "a shard by absolute path", on_map(lambda w: w.update({"lm_head.weight": "/etc/passwd"})), 3,
         "'/etc/passwd' is not the name"),
    Case(TABLE, "a shard of another format", on_map(lambda w: w.update({"lm_head.weight": "pytorch_model.bin"})), 3,
         "'pytorch_model.bin' is not the name"),
    Case(TABLE, "a shard name with a zero byte", on_map(lambda w: w.update({"lm_head.weight": "a\0.safetensors"})), 3,
         "is not the name"),
    Case(TABLE, "a tensor that no shard holds", on_map(lambda w: w.update({"model.extra": SHARDS[0]})), 3,
         "which does not hold it"),
    Case(TABLE, "a tensor placed in the wrong shard", on_map(_move), 3, "which does not hold it; model-00001"),
    Case(TABLE, "a stored decay tensor left out", on_map(_unlisted_decay), 3, "does not list it"),
    Case(TABLE, "two shards with each other's contents", _swap, 3, "which does not hold it; model-00002"),
    Case(FILE, "empty", _empty, 3, "0 bytes is too short"),
    Case(FILE, "five bytes", lambda f: _grow(f, 5), 3, "5 bytes is too short"),
    Case(FILE, "cut inside the header", lambda f: _grow(f, 90), 3, "truncated inside its header"),
    Case(FILE, "cut inside the data", on_file(SHARDS[1], lambda d: d[:-100]), 3, "is truncated"),
    Case(FILE, "one byte short", on_file(SHARDS[1], lambda d: d[:-1]), 3, "is truncated"),
    Case(FILE, "one byte too many", on_file(SHARDS[1], lambda d: d + b"\0"), 3, "1 bytes behind"),
    Case(FILE, "a web page", _html, 3, "is a web page"),
    Case(FILE, "a Git LFS pointer", _pointer, 3, "is a Git LFS pointer"),
    Case(FILE, "a PyTorch archive", on_file(SHARDS[1], lambda d: b"PK\x03\x04\x00\x00\x08\x08" + d), 3,
         "is a zip archive"),
    Case(FILE, "a GGUF file", on_file(SHARDS[1], lambda d: b"GGUF\x03\x00\x00\x00" + d), 3, "is a GGUF file"),
    Case(FILE, "zeros", on_file(SHARDS[1], lambda d: bytes(len(d))), 3, "the header is not JSON"),
    Case(FILE, "a header length beyond 25 MB",
         on_file(SHARDS[1], lambda d: (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + d[8:]), 3,
         "at most 25000000 are accepted"),
    Case(FILE, "a header length of 2^64 - 1", on_file(SHARDS[1], lambda d: b"\xff" * 8 + d[8:]), 3,
         "header of 18446744073709551615 bytes"),
    Case(FILE, "a header length one too small",
         on_file(SHARDS[1], lambda d: (int.from_bytes(d[:8], "little") - 8).to_bytes(8, "little") + d[8:]), 3, ""),
    Case(HEADER, "a list", on_header(lambda _: b"[1, 2]"), 3, "is not a JSON object"),
    Case(HEADER, "no JSON", on_header(lambda _: b"{not json}"), 3, "the header is not JSON"),
    Case(HEADER, "not UTF-8", on_header(lambda h: json.dumps(h).encode().replace(b"F32", b"\xff32")), 3, "not UTF-8"),
    Case(HEADER, "UTF-16", on_header(lambda h: json.dumps(h).encode("utf-16")), 3, "not UTF-8"),
    Case(HEADER, "100,000 brackets deep", on_header(lambda _: b'{"a":' + b"[" * 100_000), 3, "not JSON"),
    Case(HEADER, "a tensor twice", on_header(_twice), 3, "appears twice"),
    Case(HEADER, "metadata that is no text", on_header(lambda h: h.update(__metadata__={"a": 1})), 3, "__metadata__"),
    Case(HEADER, "an entry that is a number", on_header(lambda h: h.update(extra=3)), 3, "lacks dtype, shape"),
    Case(HEADER, "an entry without offsets", on_header(lambda h: h.update(extra={"dtype": "F32", "shape": []})), 3,
         "entry of extra lacks"),
    Case(HEADER, "three offsets", on_header(lambda h: _replace(h, data_offsets=[0, 1, 2])), 3, "lacks dtype, shape"),
    Case(HEADER, "an unknown dtype", on_header(lambda h: _replace(h, dtype="F33")), 3, "unknown dtype 'F33'"),
    Case(HEADER, "a dtype that is a list", on_header(lambda h: _replace(h, dtype=["F32"])), 3, "unknown dtype"),
    Case(HEADER, "a shape that is text", on_header(lambda h: _replace(h, shape="2")), 3, "is no list"),
    Case(HEADER, "a negative dimension", on_header(lambda h: _replace(h, shape=[-2])), 3, "no natural number"),
    Case(HEADER, "a fractional dimension", on_header(lambda h: _replace(h, shape=[2.0])), 3, "no natural number"),
    Case(HEADER, "a dimension that is `true`", on_header(lambda h: _replace(h, shape=[True])), 3, "no natural number"),
    Case(HEADER, "a dimension of 2^63", on_header(lambda h: _replace(h, shape=[2**63, 0])), 3, "beyond 63 bits"),
    Case(HEADER, "a dimension of 5,000 digits",
         on_header(lambda h: json.dumps(h).encode().replace(b'"shape": [', b'"shape": [' + b"9" * 5000 + b",", 1)), 3,
         "not JSON"),
    Case(HEADER, "65 dimensions", on_header(lambda h: _replace(h, shape=[1] * 65)), 3, "65 dimensions"),
    Case(HEADER, "a shape too small for its bytes", on_header(lambda h: _replace(h, shape=[1])), 3, "spans"),
    Case(HEADER, "4-bit values in half a byte",
         on_header(lambda h: _replace(h, dtype="F4", shape=[3])), 3, "no whole bytes"),
    Case(HEADER, "offsets the wrong way round",
         on_header(lambda h: _replace(h, data_offsets=first(h)["data_offsets"][::-1])), 3, "spans -"),
    Case(HEADER, "a negative offset", on_header(lambda h: _shift(h, -(1 << 40))), 3, "no natural number"),
    Case(HEADER, "two tensors that overlap", on_header(lambda h: _shift(h, -4)), 3, "overlaps"),
    Case(HEADER, "a gap between two tensors", on_header(lambda h: _shift(h, 4)), 3, "belong to no tensor"),
    Case(HEADER, "a tensor far behind the end", on_header(lambda h: _shift(h, 1 << 40)), 3, "belong to no tensor"),
    Case(HEADER, "a name of half a character",
         on_header(lambda h: json.dumps(h).encode().replace(b"{", b'{"\\ud800": {"dtype": "I8", "shape": [0], '
                   b'"data_offsets": [0, 0]}, ', 1)), 3, "no Unicode text"),
    Case(DATA, "a tensor in two shards", _duplicate, 3, "is stored twice"),
    Case(DATA, "A_log of one layer missing", _drop(PREFIX + "A_log"), 3, "block 1 is linear by"),
    Case(DATA, "dt_bias of one layer missing", _drop(PREFIX + "dt_bias"), 3, "dt_bias"),
    Case(DATA, "A_log stored as integers", _retype(PREFIX + "A_log", "I32"), 3, "is stored as I32"),
    Case(DATA, "dt_bias stored as FP8", _retype(PREFIX + "dt_bias", "F8_E4M3", [128]), 5, "has shape [128]"),
    Case(DATA, "A_log of another shape", _retype(PREFIX + "A_log", "F32", [2, 2]), 5, "has shape [2, 2]"),
    Case(DATA, "NaN in dt_bias", _value(PREFIX + "dt_bias", 13, float("nan")), 5, "dt_bias[13] is NaN"),
    Case(DATA, "infinity in A_log", _value(PREFIX + "A_log", 2, float("inf")), 5, "A_log[0, 0, 2, 0] is +inf"),
    Case(DATA, "minus infinity in dt_bias", _value(PREFIX + "dt_bias", 0, float("-inf")), 5, "dt_bias[0] is -inf"),
)  # fmt: skip
