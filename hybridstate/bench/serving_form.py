"""The form of a recorded `bench serve`: what a run that continues from it, or a fit, takes from its points."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from hybridstate.bench.cost_model import TERMS, check_rows
from hybridstate.bench.recorded_form import (
    SIGNED,
    Check,
    alike,
    an_object,
    count,
    entries,
    flag,
    listed,
    named,
    number,
    one_of,
    optional,
    same_length,
    text,
)
from hybridstate.bench.scheduler import Run
from hybridstate.bench.serving_arms import kind_of
from hybridstate.bench.serving_stats import Goal, statistics
from hybridstate.bench.sweep import MOST_SLOTS
from hybridstate.errors import SourceError
from hybridstate.plan.placement import BALANCES
from hybridstate.runtime.admission import Counters

ADDED: Final = ("wall_s",)
"""Numbers that an engine's run adds to the statistics of a seed."""

MOST_OF_AN_ARM: Final = 50 * MOST_SLOTS
"""Slots of an arm in the bytes of `sweep.MOST_SLOTS` dense ones, and more: a fit's prediction lists each."""


def _operations(value: Any, place: str) -> None:
    """Measured rows by kind of operation."""
    named(listed(listed(number())))(value, place)
    for kind, rows in value.items():
        if kind not in TERMS:
            raise ValueError(f"{place} has the unknown {kind!r:.60}, there are {', '.join(TERMS)}")
        try:
            check_rows(kind, rows)
        except SourceError as error:
            raise ValueError(f"in {place}, {error.message}") from error
        for index, row in enumerate(rows):
            number(above=True)(row[-1], f"the seconds of {place}.{kind}[{index}]")


_ENGINE: Final = entries(
    {},
    {
        "sizes": listed(count(1)),
        "chunk": count(1),
        "mode": text,
        "prompts": optional(entries({}, {"mode": text})),
    },
)

_PLACE: Final[dict[str, Check]] = {
    "arm": text,
    "kind": text,
    "w_max": optional(count(1)),
    "balance": one_of(*BALANCES),
    "ratio": number(above=True),
    "limit": count(1),
}

_SIZES: Final[dict[str, Check]] = {
    "live_bytes": count(1),
    "cached_bytes": count(1),
    "replay_window": count(),
    "slots_native": count(1, MOST_OF_AN_ARM),
    "slots_compressed": count(0, MOST_OF_AN_ARM),
    "kv_tokens": optional(count(1)),
}

_MEASURED: Final[dict[str, Check]] = {
    "operations": _operations,
    "output_digests": listed(optional(text)),
    "mean_ttft_s": number(above=True),
    "token_hit_rate": number(0, 1),
    "engine": optional(_ENGINE),
}

_TOLD: Final[dict[str, Check]] = {
    "skipped": text,
    "not_continued": text,
    "failed": flag,
    "left_out": count(),
    "dense_slots": count(1),
    "earlier_engines": listed(_ENGINE),
    "against_dense": named(SIGNED),
}


def _statistics() -> Check:
    """Of one seed: the names that a run has now, and goals of any kind."""
    example = statistics(Run(), Counters(), clients=1, limit=1, goal=Goal())
    whole = alike({k: v for k, v in example.items() if k != "hybridstate"} | {"goodput_slos_ms": 0})
    inner = alike(example["hybridstate"], ADDED)

    def check(value: Any, place: str) -> None:
        entries({"goodput_slos_ms": named(number()), "hybridstate": inner})(value, place)
        rest = {name: item for name, item in value.items() if name != "hybridstate"}
        whole({**rest, "goodput_slos_ms": 0}, place)

    return check


def _point() -> Callable[[Any, str], None]:
    each = _statistics()
    seeds = {"seeds": listed(each, 1), "mean": each, "reclamation_digests": listed(text)}
    ran = entries({**_PLACE, **seeds, **_SIZES}, _TOLD)
    measured = entries(_MEASURED)

    def check(value: Any, place: str) -> None:
        entries(_PLACE, _TOLD)(value, place)
        _check_name(value, place)
        if "skipped" in value:
            if "seeds" in value:
                raise ValueError(f"{place} has seeds and is skipped, one of them is expected")
            return
        ran(value, place)
        same_length(value, place, "seeds", "reclamation_digests")
        measured(value, place)
        same_length(value, place, "seeds", "output_digests")

    return check


def _check_name(point: Mapping[str, Any], place: str) -> None:
    """Refuse a point whose kind, cutoff or placement is not that of its arm's name.

    Raises:
        ValueError: naming both.
    """
    name = point["arm"]
    plain, _, balance = name.partition(" ")
    cutoff = re.search(r"-(\d+)", plain)
    said = {
        "kind": kind_of(name),
        "w_max": None if cutoff is None else int(cutoff[1]),
        "balance": balance or "off",
    }
    for entry, wanted in said.items():
        if point[entry] != wanted:
            raise ValueError(
                f"{place}.{entry} is {point[entry]!r:.40}, of an arm that is called {name:.40} {wanted!r} is expected"
            )


def check_points(result: Mapping[str, Any]) -> None:
    """Refuse a result whose points could not be continued, put together or shown.

    Raises:
        ValueError, TypeError: naming the first entry that is wrong, and what is expected there.
    """
    entries({"points": listed(_point()), "control": listed(_point())})(result, "")
    for part in ("points", "control"):
        seen: dict[tuple[Any, ...], int] = {}
        for index, point in enumerate(result[part]):
            key = point["arm"], point["ratio"], point["limit"]
            first = seen.setdefault(key, index)
            if first != index:
                raise ValueError(
                    f"{part}[{first}] and {part}[{index}] are both {key[0]} at ratio {key[1]:g} and limit {key[2]}"
                )


def check_measured(result: Mapping[str, Any]) -> None:
    """Refuse a result whose measured points could not be fitted and predicted; skipped ones are not looked at.

    Raises:
        ValueError, TypeError: naming the first entry that is wrong, and what is expected there.
    """
    entries({"points": listed(an_object)})(result, "")
    fitted = ("operations", "mean_ttft_s", "token_hit_rate")
    check = entries(
        {
            **{name: _PLACE[name] for name in ("arm", "ratio", "limit")},
            **_SIZES,
            **{name: _MEASURED[name] for name in fitted},
            "seeds": listed(an_object, 1),
        }
    )
    for index, point in enumerate(result["points"]):
        if "skipped" not in point:
            check(point, f"points[{index}]")


HEADER: Final = entries(
    {
        "profile": entries({"note": text}, {"tp": count(1)}),
        "device": entries({"name": text}),
        "budget_scope": text,
    },
    {"continued": listed(text)},
)
"""What is read of the rest before it is compared."""
