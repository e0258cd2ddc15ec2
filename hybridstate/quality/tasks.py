"""Tasks whose answer lies far back in the prompt, so that only the recurrent state can carry it.

Every fact is an *address* of at most four bytes followed at once by its value, and the question repeats the
address, so a short convolution of width 4 sees the whole address where the value is written and where it is
read. Facts are spread over neutral prose (a small grammar over lower-case words) until the prompt has the
requested number of bytes; one byte is one token of the embedded models.

    recall     32 pairs ``QZK:vbt;``, three capitals and three small letters, every pair written once
    registers  150 updates ``@3>k;`` of 8 registers with 16 values, the deciding one at least 256 bytes back
    latest     48 writes ``QZK=vbt;`` to 16 keys, the last value counts, at least 256 bytes back
    counts     events ``+A;`` of 8 symbols, the answer is how often the symbol occurred (1 to 8)
    tracking   24 assignments ``&A~k;`` or copies ``&B~A;`` over 8 variables, the asked one was copied

Chance is 26**-3 for recall and latest, 1/16 for registers and tracking, 1/8 for counts. Synthetic by
construction: nothing here is natural data except the prose a caller may pass to `document`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TASKS: tuple[str, ...] = ("recall", "registers", "latest", "counts", "tracking")
BACK = 256  # bytes between the deciding overwrite and the question
PAIRS = 32
KEYS, WRITES = 16, 48
REGISTERS, UPDATES = 8, 150
SYMBOLS, MOST = 8, 8
VARIABLES, STATEMENTS = 8, 24
CHANCE: dict[str, float] = {
    "recall": 26.0**-3,
    "registers": 1 / 16,
    "latest": 26.0**-3,
    "counts": 1 / MOST,
    "tracking": 1 / 16,
}

_UPPER = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LOWER = b"abcdefghijklmnopqrstuvwxyz"
# fmt: off
_ADJECTIVES = (
    "old", "quiet", "small", "broad", "pale", "cold", "green", "narrow", "distant", "plain",
    "heavy", "early", "grey", "low", "wide", "still",
)
_NOUNS = (
    "river", "garden", "window", "station", "harbour", "meadow", "kitchen", "ladder", "market",
    "bridge", "orchard", "valley", "lantern", "village", "carpet", "stable", "corner", "chapel",
    "fence", "island", "barrel", "cellar", "path", "tower",
)
_VERBS = (
    "stood", "lay", "waited", "turned", "ended", "began", "rested", "opened", "leaned", "faded",
    "passed", "grew",
)
_PREPOSITIONS = (
    "near", "behind", "beyond", "under", "above", "beside", "along", "before",
)
# fmt: on

Fill = Callable[[np.random.Generator, int], bytes]


@dataclass(frozen=True, slots=True)
class Question:
    """One exact-match question: the prompt is ``context + filler + question``, the answer follows it."""

    context: bytes
    filler: bytes
    question: bytes
    answer: bytes

    @property
    def prompt(self) -> bytes:
        """The bytes the model reads before it answers."""
        return self.context + self.filler + self.question


def prose(rng: np.random.Generator, length: int) -> bytes:
    """Return exactly ``length`` bytes of neutral lower-case sentences that hold no fact of any task."""
    if length <= 0:
        return b""
    count = length // 24 + 1
    draw = rng.integers(0, 1 << 20, (count, 6)).tolist()
    sentences = [
        f"the {_ADJECTIVES[a % 16]} {_NOUNS[b % 24]} {_VERBS[c % 12]} {_PREPOSITIONS[d % 8]} "
        f"the {_ADJECTIVES[e % 16]} {_NOUNS[f % 24]}. "
        for a, b, c, d, e, f in draw
    ]
    text = "".join(sentences).encode()
    return text[: length - 1] + (b"\n" if length > 8 else b" ")


@dataclass(slots=True)
class _World:
    """The facts of one prompt as they accumulate: ``values`` maps an address to its present answer."""

    task: str
    rng: np.random.Generator
    addresses: list[bytes]
    values: dict[bytes, bytes]

    def value(self, address: bytes) -> bytes:
        """Draw a value that differs from the present one of ``address``."""
        while True:
            if self.task in ("recall", "latest"):
                new = bytes(_LOWER[i] for i in self.rng.integers(0, 26, 3))
                if self.task == "recall" and self._ambiguous(address, new):
                    continue
            else:
                new = _LOWER[self.rng.integers(0, 16) :][:1]
            if new != self.values.get(address):
                return new

    def _ambiguous(self, address: bytes, new: bytes) -> bool:
        """Whether a pair already written shares the bytes that lead into a byte of ``new``."""
        return any(
            (a[2] == address[2] and v[0] == new[0]) or v[:2] == new[:2]
            for a, v in self.values.items()
        )

    def write(self, address: bytes, *, copy: bool | None = None) -> bytes:
        """Return the bytes of one fact about ``address`` and remember it. ``copy`` forces or bars a copy."""
        if self.task == "counts":
            self.values[address] = b"%d" % (int(self.values.get(address, b"0")) + 1)
            return b"+" + address[1:2] + b";"
        if self.task == "tracking":
            sources = [a for a in self.values if a != address]
            if copy is None:
                copy = bool(self.rng.random() < 0.5)
            if copy and sources:
                source = sources[int(self.rng.integers(len(sources)))]
                self.values[address] = self.values[source]
                return address + source[1:2] + b";"
        self.values[address] = self.value(address)
        return address + self.values[address] + b";"


def _keys(rng: np.random.Generator, count: int) -> list[bytes]:
    """Draw ``count`` keys of three capitals, distinct already in their last two letters."""
    tails = rng.choice(26 * 26, count, replace=False).tolist()
    heads = rng.integers(0, 26, count).tolist()
    return [
        bytes((_UPPER[h], _UPPER[t // 26], _UPPER[t % 26]))
        for h, t in zip(heads, tails, strict=True)
    ]


def _world(task: str, rng: np.random.Generator, size: int | None = None) -> _World:
    """Return an empty world of ``task`` with ``size`` addresses (its own number by default)."""
    if task == "recall":
        addresses = [k + b":" for k in _keys(rng, size or PAIRS)]
    elif task == "latest":
        addresses = [k + b"=" for k in _keys(rng, size or KEYS)]
    elif task == "registers":
        addresses = [b"@%d>" % i for i in range(size or REGISTERS)]
    elif task == "counts":
        addresses = [b"#%c:" % _UPPER[i] for i in range(size or SYMBOLS)]
    elif task == "tracking":
        addresses = [b"&%c~" % _UPPER[i] for i in range(size or VARIABLES)]
    else:
        raise ValueError(f"unknown task {task!r}, expected one of {', '.join(TASKS)}")
    return _World(task, rng, addresses, {})


def _fact_bytes(task: str) -> int:
    return {"recall": 8, "latest": 8, "registers": 5, "counts": 3, "tracking": 5}[task]


def _gaps(rng: np.random.Generator, slack: int, slots: int) -> list[int]:
    """Split ``slack`` bytes of prose over ``slots`` places, mostly in pieces of 24 bytes or more."""
    pieces = max(1, min(slots, slack // 40))
    gaps = [0] * slots
    places = rng.choice(slots, pieces, replace=False).tolist()
    for place, part in zip(
        places, rng.multinomial(slack, np.full(pieces, 1 / pieces)).tolist(), strict=True
    ):
        gaps[place] = part
    return gaps


def _plan(task: str, world: _World, room: int, back: int) -> tuple[list[bytes], int, bytes]:
    """Choose which address every fact of a context of ``room`` bytes writes.

    Returns the address of each fact, the distance the deciding one must keep (0 where nothing is overwritten),
    and the asked address.
    """
    rng, addresses = world.rng, world.addresses
    target = addresses[int(rng.integers(len(addresses)))]
    length = _fact_bytes(task)
    if task == "recall":
        return [addresses[i] for i in rng.permutation(len(addresses))], 0, target
    if task == "counts":
        times = rng.integers(1, MOST + 1, len(addresses))
        events = rng.permutation(np.repeat(np.arange(len(addresses)), times)).tolist()
        return [addresses[i] for i in events], 0, target
    total = {"registers": UPDATES, "latest": WRITES, "tracking": STATEMENTS}[task]
    total = max(len(addresses) + 1, min(total, int(room * 0.9) // length))
    order = [addresses[i] for i in rng.permutation(len(addresses))]
    order += [addresses[i] for i in rng.integers(0, len(addresses), total - len(addresses))]
    return order, back, target


def make(
    task: str,
    *,
    tokens: int,
    rng: np.random.Generator,
    filler_tokens: int = 64,
    fill: Fill | None = None,
) -> Question:
    """Return one question whose prompt has exactly ``tokens`` bytes, the filler and the question included.

    ``fill`` may supply other prose for the context; the filler before the question is always neutral.
    Below about 900 bytes there are fewer facts, and the deciding overwrite lies at least ``tokens // 4`` back.
    Raises `ValueError` when ``tokens`` leaves no room for a context of 64 bytes.
    """
    world = _world(task, rng)
    room = tokens - filler_tokens - len(world.addresses[0]) - 1
    if room < 64:
        raise ValueError(
            f"{task}: {tokens} tokens leave {room} bytes of context, at least 64 are needed"
        )
    length = _fact_bytes(task)
    if task != "counts" and room < 512:
        world.addresses = world.addresses[: max(2, int(room * 0.8) // length // 2)]
    back = min(BACK, tokens // 4)
    order, back, target = _plan(task, world, room, back)
    while task == "counts" and len(order) * length > room:
        order = [a for a in order if a == target or rng.random() < 0.8][: max(MOST, room // length)]
    gaps = _gaps(rng, room - len(order) * length, len(order) + 1)
    if back:
        order = _hold_back(world, order, gaps, target, room + filler_tokens - back, length)
    parts: list[bytes] = []
    decide = max((i for i, a in enumerate(order) if a == target), default=-1)
    filling = fill or prose
    for i, address in enumerate(order):
        if gaps[i]:
            parts.append(filling(rng, gaps[i]))
        copy = True if task == "tracking" and i == decide else None
        parts.append(world.write(address, copy=copy))
    parts.append(filling(rng, gaps[-1]) if gaps[-1] else b"")
    return Question(b"".join(parts), prose(rng, filler_tokens), b"?" + target, world.values[target])


def _hold_back(
    world: _World, order: list[bytes], gaps: list[int], target: bytes, limit: int, length: int
) -> list[bytes]:
    """Move every write of ``target`` that ends after byte ``limit`` of the context to another address.

    Two writes of the target are kept before the limit, so that the asked value did overwrite another one.
    """
    others = [a for a in world.addresses if a != target]
    ends, end = [], 0
    for gap in gaps[: len(order)]:
        end += gap + length
        ends.append(end)
    out = [
        others[int(world.rng.integers(len(others)))] if a == target and e > limit else a
        for a, e in zip(order, ends, strict=True)
    ]
    early = [i for i, e in enumerate(ends) if e <= limit] or [0]
    last = (
        early[int(world.rng.integers(max(1, len(early) // 2), len(early)))]
        if len(early) > 1
        else early[0]
    )
    if out.count(target) < 2:
        out[last] = target
    if out.count(target) < 2 and last > 0:
        out[int(world.rng.integers(0, last))] = target
    return out


def examination(
    task: str, *, tokens: int, rng: np.random.Generator, filler_tokens: int = 64
) -> tuple[bytes, tuple[tuple[int, int], ...]]:
    """Return a text of ``tokens`` bytes: facts as in `make`, a filler, then a question about every address.

    Also returned is where every answer lies, ``(start, stop)``, in the order asked. Raises `ValueError` when
    ``tokens`` leaves no room for a context of 64 bytes.
    """
    world = _world(task, rng)
    length = _fact_bytes(task)
    asked = [world.addresses[i] for i in rng.permutation(len(world.addresses))]
    answer = 1 if task == "counts" else length - len(asked[0]) - 1
    questions = len(asked) * (len(asked[0]) + answer + 2)
    room = tokens - filler_tokens - questions
    if room < 64:
        raise ValueError(
            f"{task}: {tokens} tokens leave {room} bytes of context, at least 64 are needed"
        )
    order, _, _ = _plan(task, world, room, 0)
    order = order[: room // length]
    gaps = _gaps(rng, room - len(order) * length, len(order) + 1)
    text = bytearray()
    for address, gap in zip(order, gaps, strict=False):
        text += prose(rng, gap) + world.write(address)
    text += prose(rng, gaps[-1]) + prose(rng, filler_tokens)
    spans: list[tuple[int, int]] = []
    for address in asked:
        if address in world.values:
            _ask(world, address, text, spans)
    text += prose(rng, tokens - len(text))
    return bytes(text), tuple(spans)


def document(
    task: str, *, tokens: int, rng: np.random.Generator, fill: Fill | None = None
) -> tuple[bytes, NDArray[np.uint8]]:
    """Return a training text of exactly ``tokens`` bytes with many questions, and 1 where an answer byte stands.

    Half of the passages ask inline while facts go on, half write all facts as `make` does and then ask every
    address. Passages follow one another, of lengths log-uniform between 160 bytes and ``tokens``.
    """
    text = bytearray()
    spans: list[tuple[int, int]] = []
    while len(text) < tokens:
        size = int(np.exp(rng.uniform(np.log(160), np.log(max(tokens, 161)))))
        passage = _inline if rng.random() < 0.5 else _examined
        passage(task, min(size, tokens - len(text) + 64), rng, fill, text, spans)
        text += b"\n"
    mask = np.zeros(tokens, np.uint8)
    for start, stop in spans:
        mask[start:stop] = 1
    return bytes(text[:tokens]), mask


def _ask(world: _World, address: bytes, text: bytearray, spans: list[tuple[int, int]]) -> None:
    text += b"?" + address
    answer = world.values[address]
    spans.append((len(text), len(text) + len(answer)))
    text += answer + b";"


def _gap(rng: np.random.Generator, size: int, fill: Fill | None) -> bytes:
    length = int(np.exp(rng.uniform(np.log(12), np.log(max(40, size // 6)))))
    return (fill if fill is not None and rng.random() < 0.5 else prose)(rng, length)


def _inline(
    task: str,
    size: int,
    rng: np.random.Generator,
    fill: Fill | None,
    text: bytearray,
    spans: list[tuple[int, int]],
) -> None:
    """Append a passage that mixes facts, prose and questions; uneven address odds leave some facts untouched."""
    largest = len(_world(task, rng).addresses)
    count = int(rng.integers(2, max(3, min(largest, size // 24) + 1)))
    world = _world(task, rng, count)
    odds = rng.dirichlet(np.full(count, 0.5)) + 0.2 / count
    odds /= odds.sum()
    draws = rng.choice(count, size, p=odds).tolist()
    prose_odds, ask_odds = 0.12 * rng.random() ** 2, rng.uniform(0.25, 0.6)
    order = rng.permutation(count).tolist()
    stop = len(text) + size
    while len(text) < stop:
        chance = rng.random()
        known = len(world.values)
        if chance < prose_odds:
            text += _gap(rng, size, fill)
        elif known and (rng.random() < ask_odds or (task == "recall" and known == count)):
            addresses = list(world.values)
            _ask(world, addresses[int(rng.integers(known))], text, spans)
        elif task == "recall":
            text += world.write(world.addresses[order[known]])
        else:
            address = world.addresses[draws.pop() if draws else 0]
            if task == "counts" and int(world.values.get(address, b"0")) >= 9:
                address = world.addresses[int(rng.integers(count))]
                if int(world.values.get(address, b"0")) >= 9:
                    break
            text += world.write(address)


def _examined(
    task: str,
    size: int,
    rng: np.random.Generator,
    fill: Fill | None,
    text: bytearray,
    spans: list[tuple[int, int]],
) -> None:
    """Append a context as `make` builds it, a filler, and a question about every address it knows."""
    addresses = len(_world(task, rng).addresses)
    tail = 64 + min(size // 3, addresses * (_fact_bytes(task) + 2))
    room = max(48, size - tail)
    length = _fact_bytes(task)
    world = _world(task, rng, max(2, min(addresses, int(room * 0.8) // length // 2)))
    order, _, _ = _plan(task, world, room, 0)
    cut = int(rng.integers(room // 2, room + 1)) // length
    order = order[
        : max(
            2, min(cut, int(rng.uniform(0.5, 1.0) * len(order)) if task != "recall" else len(order))
        )
    ]
    gaps = _gaps(rng, max(0, room - len(order) * length), len(order) + 1)
    mixed = fill if fill is not None and rng.random() < 0.5 else prose
    for i, address in enumerate(order):
        if gaps[i]:
            text += mixed(rng, gaps[i])
        text += world.write(address)
    if gaps[-1]:
        text += mixed(rng, gaps[-1])
    if rng.random() < 0.8:
        text += prose(rng, 64)
    stop = len(text) + max(tail - 64, 16)
    known = list(world.values)
    for i in rng.permutation(len(known)).tolist():
        if len(text) > stop:
            break
        _ask(world, known[i], text, spans)
        if rng.random() < 0.1:
            text += prose(rng, int(rng.integers(16, 80)))
