"""The form of recorded results that a run continues from or is fitted to: every value by its place, before any work.

A check takes a value and its place, such as `points[3].limit`, and raises what `errors.reading` puts in one line.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

Check = Callable[[Any, str], None]

LARGEST: Final = 1e100
"""Of a recorded number: sums and products of such numbers are finite."""


def number(least: float = 0.0, most: float = LARGEST, *, above: bool = False) -> Check:
    """A number in a range, not at its lower end where it has to be `above` that."""
    wanted = f"a number {'above' if above else 'of at least'} {least:g} and at most {most:g}"
    if most == LARGEST:
        wanted = wanted.split(" and ")[0] if least > -LARGEST else "a number"

    def check(value: Any, place: str) -> None:
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not least <= value <= most or (above and value == least):
            beyond = f"a number of at most {LARGEST:g}" if real and value > LARGEST else wanted
            raise ValueError(_wrong(value, place, beyond))

    return check


SIGNED: Final = number(-LARGEST)


def count(least: int = 0, most: float = LARGEST) -> Check:
    """A whole number in a range."""
    wanted = f"a whole number of at least {least}"
    wanted += f" and at most {most:,}" if most < LARGEST else ""

    def check(value: Any, place: str) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= most:
            raise ValueError(_wrong(value, place, wanted))

    return check


def text(value: Any, place: str) -> None:
    """Text."""
    if not isinstance(value, str):
        raise TypeError(_wrong(value, place, "text"))


def flag(value: Any, place: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError(_wrong(value, place, "true or false"))


def one_of(*allowed: str) -> Check:
    """One of some names."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(_wrong(value, place, f"one of {', '.join(allowed)}"))

    return check


def optional(check: Check) -> Check:
    """Null, or what the check takes."""

    def checked(value: Any, place: str) -> None:
        if value is not None:
            check(value, place)

    return checked


def listed(check: Check, least: int = 0) -> Check:
    """A list of at least so many values that the check takes."""

    def checked(value: Any, place: str) -> None:
        if not isinstance(value, list):
            raise TypeError(_wrong(value, place, "a list"))
        if len(value) < least:
            raise ValueError(f"{place} has {len(value)} entries, at least {least} are expected")
        for index, item in enumerate(value):
            check(item, f"{place}[{index}]")

    return checked


def named(check: Check) -> Check:
    """An object whose values the check takes."""

    def checked(value: Any, place: str) -> None:
        for name, item in an_object(value, place).items():
            check(item, _at(place, name))

    return checked


def entries(required: Mapping[str, Check], known: Mapping[str, Check] | None = None) -> Check:
    """An object with these entries, and perhaps with others; those that are known are checked too."""
    every = {**required, **(known or {})}

    def check(value: Any, place: str) -> None:
        given = an_object(value, place)
        for name in required:
            if name not in given:
                raise ValueError(f"{place or 'the result'} has no {name!r}")
        for name, inner in every.items():
            if name in given:
                inner(given[name], _at(place, name))

    return check


def alike(example: Mapping[str, Any], added: Sequence[str] = ()) -> Check:
    """An object with exactly the names of an example, whose numbers, lists and objects are those of the example.

    Args:
        added: names of further numbers that it may have.
    """
    checks = {name: _like(value, added) for name, value in example.items()}
    whole = entries(checks, {name: number() for name in added})

    def check(value: Any, place: str) -> None:
        whole(value, place)
        if unknown := sorted(set(value) - set(example) - set(added)):
            raise ValueError(f"{place} has the unknown {unknown[0]!r:.60}")

    return check


def _like(value: Any, added: Sequence[str]) -> Check:
    if isinstance(value, Mapping):
        return alike(value, added)
    if isinstance(value, list):
        return listed(number())
    return text if isinstance(value, str) else number()


def an_object(value: Any, place: str) -> Any:
    """The value, if it is an object.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, dict):
        raise TypeError(_wrong(value, place or "the result", "an object"))
    return value


def same_length(given: Mapping[str, Any], place: str, one: str, other: str) -> None:
    """Refuse two lists that belong together and differ in length.

    Raises:
        ValueError: naming both.
    """
    if len(given[one]) != len(given[other]):
        raise ValueError(
            f"{place} has {len(given[one])} {one} and {len(given[other])} {other}, as many are expected"
        )


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else str(name)


def _wrong(value: Any, place: str, wanted: str) -> str:
    return f"{place} is {_shown(value)}, {wanted} is expected"


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
