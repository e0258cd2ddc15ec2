"""Damaged safetensors files by the hundred thousand: our parser refuses or understands, and never stumbles.

Every case is also given to the safetensors library. Where the two disagree, ours must be the stricter
one, for a reason in `STRICTER`. Run as a module for more cases than the test suite has time for:

    python -m tests.checkpoint.header_fuzz --cases 1000000 -o benchmarks/header-fuzz.json
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import safetensors

from hybridstate.checkpoint.header import (
    DTYPE_BITS,
    LENGTH_BYTES,
    Header,
    header_length,
    parse_header,
)
from hybridstate.errors import SourceError

SEED: Final = 20261130
FILE: Final = Path("model.safetensors")

STRICTER: Final = {
    "appears twice in it": "a name twice; the library keeps one of them",
    "beyond 63 bits": "an empty tensor with a dimension that NumPy cannot hold",
    "dimensions, at most": "more dimensions than NumPy has",
}
"""Part of our message -> what the library accepts."""

LAXER: Final = (b"-0",)
"""Accepted here and not by the library: minus zero, read as zero."""

NUMBERS: Final = (
    b"-1", b"-0", b"0", b"1", b"2", b"3", b"4", b"7", b"8", b"16", b"255", b"65536", b"4294967295", b"4294967296",
    b"9223372036854775807", b"9223372036854775808", b"18446744073709551615", b"18446744073709551616", b"1e3", b"1.0",
    b"0.5", b"NaN", b"Infinity", b"-Infinity", b"null", b"true", b"false", b"[]", b"{}", b'""', b'"8"', b"08", b"+1",
    b"1" * 400,
)  # fmt: skip
WORDS: Final = (
    b"F32", b"BF16", b"F16", b"F64", b"F8_E4M3", b"F4", b"F6_E2M3", b"I8", b"BOOL", b"C64", b"f32", b"Q7", b"",
    b"dtype", b"shape", b"data_offsets", b"__metadata__", b"a", b"b", b"\\u0000", b"\\ud800", b"\xff\xfe", b"\xc3\xa9",
    b"\\n", b"\\\"", b"a" * 300,
)  # fmt: skip
PUNCTUATION: Final = b'{}[],:"0123456789 \\\n\t-.eE'


def build(entries: dict[str, Any], data: int, pad: int = 0) -> bytes:
    """A file with this header and `data` bytes behind it."""
    text = json.dumps(entries, separators=(",", ":")).encode() + b" " * pad
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + bytes(data)


def tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


VALID: Final = (
    build({"a": tensor("F32", [2], 0, 8)}, 8),
    build({}, 0),
    build({"__metadata__": {"format": "pt"}, "a": tensor("BF16", [2, 3], 0, 12)}, 12, pad=3),
    build({"b": tensor("F32", [], 4, 8), "a": tensor("F16", [2], 0, 4)}, 8),
    build({f"t{i}": tensor("I8", [i], i * (i - 1) // 2, i * (i + 1) // 2) for i in range(6)}, 15),
    build({"x": tensor("F4", [4], 0, 2), "y": tensor("U8", [0, 5], 2, 2)}, 2),
    build({"layers.0.self_attn.A_log": tensor("F32", [1, 1, 2, 1], 0, 8),
           "layers.0.self_attn.dt_bias": tensor("F64", [2], 8, 24)}, 24),
)  # fmt: skip


def mutate(rng: random.Random, data: bytes) -> bytes:
    """One to four changes: of bytes, tokens, slices, the length field or the file's end."""
    work = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        choice = rng.random()
        size = len(work)
        if size < LENGTH_BYTES + 2:
            return bytes(work)
        header_end = min(size, LENGTH_BYTES + int.from_bytes(work[:2], "little"))
        at = rng.randrange(LENGTH_BYTES, max(header_end, LENGTH_BYTES + 1))
        if choice < 0.12:
            work[at] ^= 1 << rng.randrange(8)
        elif choice < 0.24:
            work[at] = rng.choice(PUNCTUATION)
        elif choice < 0.48:
            _replace_token(rng, work)
        elif choice < 0.58:
            work[at:at] = rng.choice(
                (rng.choice(NUMBERS), rng.choice(WORDS), bytes([rng.randrange(256)]))
            )
        elif choice < 0.68:
            del work[at : at + rng.choice((1, 1, 2, 5, 20))]
        elif choice < 0.76:
            start = rng.randrange(LENGTH_BYTES, size)
            work[at:at] = work[start : start + rng.randrange(1, 60)]
        elif choice < 0.82:
            _spoil_length(rng, work)
            continue
        elif choice < 0.88:
            del work[size - rng.choice((1, 1, 2, 8, size)) :]
            continue
        elif choice < 0.94:
            work += bytes(rng.choice((1, 1, 2, 4, 8)))
            continue
        else:
            work[at : at + 4] = rng.randbytes(rng.randrange(6))
        if rng.random() < 0.8:  # keep the length field right, so that the header itself is tried
            grown = len(work) - size
            length = int.from_bytes(work[:LENGTH_BYTES], "little") + grown
            work[:LENGTH_BYTES] = (length % 2**64).to_bytes(LENGTH_BYTES, "little")
    return bytes(work)


def structured(rng: random.Random) -> bytes:
    """A well-formed header whose tensors are placed or described wrongly, sometimes not at all wrongly."""
    entries: dict[str, Any] = {}
    at = 0
    for number in range(rng.randrange(1, 6)):
        dtype = rng.choice(tuple(DTYPE_BITS))
        shape = [rng.choice((0, 1, 2, 3, 4, 8)) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        count = 1
        for dimension in shape:
            count *= dimension
        end = at + count * DTYPE_BITS[dtype] // 8
        entries[f"t{number}"] = tensor(dtype, shape, at, end)
        at = end
    victim = entries[rng.choice(tuple(entries))]
    wrong = rng.choice(
        ("none", "shift", "grow", "shape", "rank", "key", "dtype", "order", "metadata")
    )
    by = rng.choice((-8, -4, -1, 1, 4, 8, 1 << 40))
    if wrong == "shift":
        victim["data_offsets"] = [offset + by for offset in victim["data_offsets"]]
    elif wrong == "grow":
        victim["data_offsets"][rng.randrange(2)] += by
    elif wrong == "shape":
        victim["shape"] = rng.choice(
            ({}, "", "2", None, 2, [[2]], [2.0], [True], victim["shape"] + [1])
        )
    elif wrong == "rank":
        victim["shape"] = victim["shape"] + [1] * rng.choice((62, 63, 64, 65, 1000))
    elif wrong == "key":
        victim.pop(rng.choice(tuple(victim)))
    elif wrong == "dtype":
        victim["dtype"] = rng.choice((*DTYPE_BITS, "", None, 4, ["F32"], "F3"))
    elif wrong == "order":
        keys = list(entries)
        rng.shuffle(keys)
        entries = {key: entries[key] for key in keys}
    elif wrong == "metadata":
        entries["__metadata__"] = rng.choice(({}, {"a": "b"}, {"a": 1}, [], None, "x", {"a": None}))
    return build(entries, max(0, min(at, 4096) + rng.choice((0, 0, 0, 0, 1, -1))), rng.randrange(8))


def _replace_token(rng: random.Random, work: bytearray) -> None:
    """Replace a number or a quoted word by another one."""
    digits = rng.random() < 0.6
    starts = [
        i
        for i in range(LENGTH_BYTES, len(work))
        if (48 <= work[i] <= 57 if digits else work[i] == 34)
    ]
    if not starts:
        return
    at = rng.choice(starts)
    if digits:
        end = at
        while end < len(work) and 48 <= work[end] <= 57:
            end += 1
        work[at:end] = rng.choice(NUMBERS)
    else:
        end = work.find(b'"', at + 1)
        work[at + 1 : end if end > 0 else at + 1] = rng.choice(WORDS)


def _spoil_length(rng: random.Random, work: bytearray) -> None:
    length = int.from_bytes(work[:LENGTH_BYTES], "little")
    other = rng.choice(
        (0, 1, length - 1, length + 1, length + 8, 25_000_001, 2**32, 2**63, 2**64 - 1)
    )
    work[:LENGTH_BYTES] = (other % 2**64).to_bytes(LENGTH_BYTES, "little")


@dataclass
class Tally:
    """What happened to the cases of one run."""

    seed: int
    cases: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    stricter: Counter[str] = field(default_factory=Counter)
    laxer: list[bytes] = field(default_factory=list)
    unexplained: list[tuple[bytes, str]] = field(default_factory=list)
    crashed: list[tuple[bytes, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Counts only."""
        return {
            "seed": self.seed,
            "cases": self.cases,
            "accepted": self.accepted,
            "refused": dict(self.refused.most_common()),
            "refused_here_accepted_by_safetensors": dict(self.stricter.most_common()),
            "accepted_here_refused_by_safetensors": len(self.laxer),
            "other_exceptions": len(self.crashed),
        }


def parse(data: bytes) -> Header:
    """What both readers do with the first bytes of a file."""
    length = header_length(FILE, data[:LENGTH_BYTES], len(data))
    return parse_header(FILE, data[LENGTH_BYTES : LENGTH_BYTES + length], len(data))


def check(header: Header, size: int) -> None:
    """What an accepted header promises: tensors one behind the other, each as large as its dtype says."""
    at = header.nbytes
    for entry in sorted(header.entries.values(), key=lambda e: (e.start, e.end)):
        assert entry.start == at
        at = entry.end
        count = 1
        for dimension in entry.shape:
            count *= dimension
        assert entry.nbytes * 8 == count * DTYPE_BITS[entry.dtype]
    assert at == size


KINDS: Final = (
    "too short", "at most 25000000", "truncated inside its header", "not UTF-8", "not JSON", "not a JSON object",
    "appears twice", "__metadata__", "lacks dtype", "is no list", "dimensions", "no natural number", "beyond 63 bits",
    "unknown dtype", "no whole bytes", "spans", "no Unicode text", "overlaps", "between", "is truncated", "behind",
)  # fmt: skip


def kind_of(message: str) -> str:
    """The sort of refusal; an unknown one is a bug of this list."""
    return next(kind for kind in KINDS if kind in message)


def run(cases: int, seed: int = SEED, progress: bool = False) -> Tally:
    """Try `cases` damaged files.

    Raises:
        AssertionError: the parser accepted what contradicts itself.
    """
    rng, tally = random.Random(seed), Tally(seed)
    for number in range(cases):
        pick = number % (len(VALID) + 3)
        data = mutate(rng, VALID[pick]) if pick < len(VALID) else structured(rng)
        message = None
        try:
            header = parse(data)
        except SourceError as error:
            message = error.message
        except Exception as error:
            tally.crashed.append((data, repr(error)))
            continue
        finally:
            tally.cases += 1
        try:
            safetensors.deserialize(data)
            theirs = True
        except safetensors.SafetensorError:
            theirs = False
        if message is None:
            check(header, len(data))
            tally.accepted += 1
            if not theirs and not any(part in data for part in LAXER):
                tally.laxer.append(data)
        else:
            tally.refused[kind_of(message)] += 1
            if theirs:
                reason = next((part for part in STRICTER if part in message), None)
                if reason is None:
                    tally.unexplained.append((data, message))
                else:
                    tally.stricter[reason] += 1
        if progress and number % 50_000 == 0:
            sys.stderr.write(f"{number} of {cases}\n")
    return tally


def main() -> None:
    """Run many cases and record the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    started = time.monotonic()
    tally = run(arguments.cases, arguments.seed, progress=True)
    document = tally.to_json() | {
        "seconds": round(time.monotonic() - started),
        "safetensors": safetensors.__version__,
        "python": sys.version.split()[0],
        "unexplained": len(tally.unexplained),
    }
    arguments.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
