"""Texts to validate horizons on: ShareGPT JSON, OpenAI `messages` JSONL, or plain text, told apart by content.

A JSON array or one JSON object per line; each object holds `conversations` (`from`, `value`), `messages` (`role`,
`content`) or `text`. Turns become alternating `User:` and `Assistant:` blocks (DASC A.2). Everything else is plain
text, one document.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from hybridstate.errors import SourceError
from hybridstate.provenance import sha256_bytes

Format = Literal["json", "jsonl", "text"]

EXPECTED: Final = (
    '{"conversations": [{"from": "human", "value": "..."}, ...]}, '
    '{"messages": [{"role": "user", "content": "..."}, ...]} or {"text": "..."}'
)
_SPEAKERS: Final = {
    "human": "User",
    "user": "User",
    "gpt": "Assistant",
    "chatgpt": "Assistant",
    "bing": "Assistant",
    "bard": "Assistant",
    "assistant": "Assistant",
}
_SPACE: Final = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Document:
    """One conversation or text; `index` counts from 0 in the file, empty ones included."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Documents:
    """What a file holds.

    Attributes:
        name: of the file, or what the text is.
        format: `json` (array), `jsonl` or `text`.
        digest: sha256 of the file's bytes.
        items: in the order of the file.
    """

    name: str
    format: Format
    digest: str
    items: tuple[Document, ...]


def plain_text(name: str, text: str) -> Documents:
    """One text as a single document."""
    return Documents(name, "text", sha256_bytes(text.encode()), (Document(0, text),))


def read_documents(path: str | Path) -> Documents:
    """Read a file of texts.

    Raises:
        SourceError: missing, not UTF-8, empty, or an entry of another form; names file, line and what is expected.
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
        content = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no UTF-8 ({error})"
        raise SourceError(f"cannot read {file}: {reason}", file=str(file)) from error
    found = _format(file, content)
    if found == "text":
        items: tuple[Document, ...] = (Document(0, content),)
    else:
        entries = _array(content, file) if found == "json" else _lines(content, file)
        items = tuple(
            Document(index, _text(entry, file, line)) for index, (line, entry) in enumerate(entries)
        )
    if not any(item.text.strip() for item in items):
        raise SourceError(f"{file}: no text", file=str(file), expected=EXPECTED)
    return Documents(file.name, found, sha256_bytes(raw), items)


def _format(file: Path, content: str) -> Format:
    """By suffix where it says so, else by the first characters."""
    suffix = file.suffix.lower()
    if suffix in (".txt", ".md"):
        return "text"
    if re.match(r"\s*\[\s*[{\]]", content) or (suffix == ".json" and content.lstrip()[:1] == "["):
        return "json"
    if suffix in (".json", ".jsonl") or re.match(r'\s*\{\s*"', content):
        return "jsonl"
    return "text"


def _bad(file: Path, line: int, what: str, error: Exception | None = None) -> SourceError:
    found = SourceError(
        f"{file} line {line}: {what}",
        hint=f"each entry is {EXPECTED}",
        file=str(file),
        line=line,
        expected=EXPECTED,
    )
    found.__cause__ = error
    return found


def _array(content: str, file: Path) -> Iterator[tuple[int, Any]]:
    """(line, entry) of a JSON array, entry by entry, so that a wrong one has a line."""
    decoder = json.JSONDecoder()
    place, line, counted = _skip(content, content.index("[") + 1), 1, 0
    while content[place : place + 1] != "]":
        line += content.count("\n", counted, place)
        counted = place
        try:
            entry, end = decoder.raw_decode(content, place)
        except (ValueError, RecursionError) as error:
            at = getattr(error, "lineno", line)
            reason = _reason(error)
            raise _bad(file, at, f"no JSON: {reason}", error) from error
        yield line, entry
        place = _skip(content, end)
        mark = content[place : place + 1]
        if mark == ",":
            place = _skip(content, place + 1)
        elif mark != "]":
            at = line + content.count("\n", counted, place)
            raise _bad(file, at, "the array of entries does not end or a comma is missing")
    rest = _skip(content, place + 1)
    if content[rest:]:
        at = line + content.count("\n", counted, rest)
        raise _bad(file, at, "something follows the array of entries")


def _reason(error: Exception) -> str:
    """Why there is no JSON; a number of more digits than Python reads has neither place nor name."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(getattr(error, "msg", "a number has too many digits"))


def _skip(content: str, place: int) -> int:
    match = _SPACE.match(content, place)
    return place if match is None else match.end()


def _lines(content: str, file: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = _reason(error)
            raise _bad(file, number, f"no JSON: {reason}", error) from error


def _text(entry: Any, file: Path, line: int) -> str:
    """The serialised turns of one entry."""
    if not isinstance(entry, dict):
        raise _bad(file, line, f"an object is expected, found {_shown(entry)}")
    for key, speaker, said in (("conversations", "from", "value"), ("messages", "role", "content")):
        if key in entry:
            return _turns(entry[key], key, speaker, said, file, line)
    text = entry.get("text")
    if not isinstance(text, str):
        raise _bad(
            file, line, f"no conversations, messages or text, found keys {_shown(list(entry))}"
        )
    return _valid(text)


def _turns(turns: Any, key: str, speaker: str, said: str, file: Path, line: int) -> str:
    if not isinstance(turns, list):
        raise _bad(file, line, f"{key} is no list, found {_shown(turns)}")
    blocks = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or not isinstance(turn.get(speaker), str):
            raise _bad(file, line, f"{key}[{number}] has no {speaker} that is text: {_shown(turn)}")
        text = _content(turn.get(said))
        if text is None:
            raise _bad(file, line, f"{key}[{number}] has no {said} that is text: {_shown(turn)}")
        name = turn[speaker].strip()
        if text:
            blocks.append(f"{_SPEAKERS.get(name.lower(), name.capitalize())}: {text}")
    return _valid("\n\n".join(blocks))


def _content(value: Any) -> str | None:
    """Text of a turn: a string, null (a tool call: empty) or a list of parts; None for anything else."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        texts = [part.get("text", "") for part in value]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else None
    return None


def _valid(text: str) -> str:
    """Text that a tokenizer takes: half of a surrogate pair becomes the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _shown(value: Any) -> str:
    return f"{json.dumps(value, ensure_ascii=True, default=str):.60}"
