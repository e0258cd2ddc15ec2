"""JSON that a user hands in: decoded and parsed alike everywhere, with reasons in plain words.

A byte order mark, which editors on Windows put before UTF-8, is accepted. Lines end at a line feed alone: JSON text may
hold the other characters that Python counts as line ends.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hybridstate.checkpoint.header import why_no_json

_NAMES: Final = {
    dict: "an object",
    list: "a list",
    str: "text",
    type(None): "null",
    bool: "a truth value",
}


def read_bytes(path: Path) -> bytes:
    """Bytes of a file.

    Raises:
        OSError: of the kind that the system raised, with its reason alone as text.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise type(error)(error.strerror or str(error)) from error


def parse_json(
    raw: bytes | str,
    *,
    parse_constant: Callable[[str], Any] | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """A JSON value in UTF-8, with or without a byte order mark; every number in it is finite.

    Args:
        parse_constant: what to do with NaN and infinities, which are refused without it.
        object_pairs_hook: as of `json.loads`.

    Raises:
        ValueError: it is none, with the reason.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")
        return json.loads(
            text,
            parse_float=_finite,
            parse_constant=parse_constant or _finite,
            object_pairs_hook=object_pairs_hook,
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(why_no_json(error)) from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.20} is no finite number")
    return number


def an_object(value: Any, what: str) -> dict[str, Any]:
    """The value, if it is a JSON object.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{what} is {_NAMES.get(type(value), 'a number')}, an object is expected")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        OSError, ValueError, TypeError: it cannot be read, is not JSON, or no object.
    """
    return an_object(_value(read_bytes(path)), "the document")


def result_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The `result` of a document that a verb wrote, or the document itself where it is bare.

    Raises:
        TypeError: the result is missing or no object.
    """
    result = document.get("result", document)
    if result is None:  # of a run that failed
        raise TypeError("it holds no result")
    return an_object(result, "its result")


def read_lines(path: Path) -> list[tuple[int, Any]]:
    """The JSON values of a file with one a line, each with the number of its line; empty lines are skipped.

    Raises:
        OSError, ValueError: it cannot be read, or a line is not JSON; names the line.
    """
    try:
        lines = read_bytes(path).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(why_no_json(error)) from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append((number, _value(line)))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    return found


def _value(raw: bytes | str) -> Any:
    try:
        return parse_json(raw)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
