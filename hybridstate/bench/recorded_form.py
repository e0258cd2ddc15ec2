"""The form of recorded results that a run continues from or is fitted to: every value by its place, before any work.

Forms are pydantic models; `check` says what is wrong in one line that `errors.reading` passes on.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

LARGEST: Final = 1e100
"""Of a recorded number: sums and products of such numbers are finite."""

Signed = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Number = Annotated[Signed, Field(ge=0)]
Above = Annotated[Signed, Field(gt=0)]
Share = Annotated[Signed, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=int(LARGEST))]
Positive = Annotated[int, Field(ge=1, le=int(LARGEST))]

_WANTED: Final = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "one of {expected}",
    "greater_than": "a number above {gt:.15g}",
    "greater_than_equal": "a number of at least {ge:.15g}",
    "less_than_equal": "a number of at most {le:.15g}",
}
"""What is expected, by pydantic's name of what is wrong."""

ABSENT: Final[Any] = None
"""Stands for an entry that may be missing; one that is there has its type."""


class Recorded(BaseModel, strict=True):
    """An object with these entries, and perhaps with others."""


class Device(Recorded):
    """What a result says of where it ran."""

    name: str


def check(form: Any, value: Any, place: str = "") -> None:
    """Refuse a value of another form.

    Args:
        form: a type, such as a `Recorded` one.
        place: of the value, such as `points[3]`; nothing for a whole result.

    Raises:
        ValueError: naming the first entry that is wrong, and what is expected there.
    """
    try:
        TypeAdapter(form).validate_python(value, strict=True)
    except ValidationError as error:
        raise ValueError(_first_problem(error, place)) from error


def refuse_twice(entries: Mapping[str, str]) -> None:
    """Refuse two entries for one thing.

    Args:
        entries: place -> what stands there.

    Raises:
        ValueError: naming the places of both.
    """
    seen: dict[str, str] = {}
    for place, what in entries.items():
        if (first := seen.setdefault(what, place)) != place:
            raise ValueError(f"{first} and {place} are both {what}")


def _first_problem(error: ValidationError, place: str) -> str:
    first = error.errors(include_url=False)[0]
    kind, given, more, keys = first["type"], first["input"], first.get("ctx", {}), first["loc"]
    missing, unknown = kind == "missing", kind == "extra_forbidden"
    for key in keys[:-1] if missing or unknown else keys:
        place += f"[{key}]" if isinstance(key, int) else f".{key}"
    at = place.removeprefix(".") or "the result"
    if missing or unknown:
        return f"{at} has {'no' if missing else 'the unknown'} {keys[-1]!r:.60}"
    if kind == "too_short":
        return f"{at} has {len(given)} entries, at least {more['min_length']} are expected"
    if kind == "value_error":
        return f"{at} {more['error']}" if place else str(more["error"])
    wanted = _WANTED.get(kind, "another value").format(**more)
    if isinstance(given, int) and given > LARGEST:
        wanted = f"a number of at most {LARGEST:g}"
    return f"{at} is {_shown(given)}, {wanted} is expected"


def _shown(value: Any) -> str:
    """A wrong value in a few words."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 30 else f"the text {value[:27]!r}..."
    if isinstance(value, int) and abs(value) >= 10**15:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    return f"{value!r}"
