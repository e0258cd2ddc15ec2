"""The form of a recorded `bench serve`: what a run that continues from it, or a fit, takes from its points."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, PlainValidator, create_model, model_validator

from hybridstate.bench.cost_model import TERMS, check_rows
from hybridstate.bench.recorded_form import (
    ABSENT,
    Above,
    Count,
    Device,
    Number,
    Positive,
    Recorded,
    Share,
    Signed,
    refuse_twice,
)
from hybridstate.bench.scheduler import Run
from hybridstate.bench.serving_arms import kind_of
from hybridstate.bench.serving_stats import Goal, statistics
from hybridstate.bench.sweep import MOST_SLOTS
from hybridstate.errors import SourceError
from hybridstate.plan.placement import Balance
from hybridstate.runtime.admission import Counters

MOST_OF_AN_ARM: Final = 50 * MOST_SLOTS
"""Slots of an arm in the bytes of `sweep.MOST_SLOTS` dense ones, and more: a fit's prediction lists each."""


class _Closed(Recorded, extra="forbid"):
    """An object with these entries alone."""


def _alike(example: Mapping[str, Any], **others: Any) -> type[_Closed]:
    """The numbers, texts and lists of an example, and others."""
    types: dict[type, Any] = {str: str, list: list[Number]}
    entries = {name: (types.get(type(value), Number), ...) for name, value in example.items()}
    return create_model("Alike", __base__=_Closed, **{**entries, **others})


def _statistics() -> type[_Closed]:
    """Of one seed: the names that a run has now, goals of any kind, and the seconds that an engine's run adds."""
    example = statistics(Run(), Counters(), clients=1, limit=1, goal=Goal())
    inner = _alike(example["hybridstate"], wall_s=(Number, 0))
    return _alike(example, goodput_slos_ms=(dict[str, Number], ...), hybridstate=(inner, ...))


def _took_time(row: list[float]) -> list[float]:
    if row[-1:] == [0]:
        raise ValueError("took 0 seconds, a number above 0 is expected at its end")
    return row


def _of_known_kinds(rows: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    for kind in rows:
        if kind not in TERMS:
            raise ValueError(f"has the unknown {kind!r:.60}, there are {', '.join(TERMS)}")
        try:
            check_rows(kind, rows[kind])
        except SourceError as error:
            raise ValueError(f"cannot be fitted: {error.message}") from error
    return rows


_Statistics = Annotated[Any, PlainValidator(_statistics().model_validate)]
_Row = Annotated[list[Number], AfterValidator(_took_time)]


class _Mode(Recorded):
    mode: str = ABSENT


class _Engine(_Mode):
    sizes: list[Positive] = ABSENT
    chunk: Positive = ABSENT
    prompts: _Mode | None = ABSENT


class _Named(Recorded):
    arm: str
    ratio: Above
    limit: Positive

    @property
    def said(self) -> str:
        return f"{self.arm} at ratio {self.ratio} and limit {self.limit}"


class _Placed(_Named):
    """A point, perhaps one that was skipped."""

    kind: str
    w_max: Positive | None
    balance: Balance
    skipped: str = ABSENT
    not_continued: str = ABSENT
    failed: bool = ABSENT
    left_out: Count = ABSENT
    dense_slots: Positive = ABSENT
    earlier_engines: list[_Engine] = ABSENT
    against_dense: dict[str, Signed] = ABSENT

    @model_validator(mode="after")
    def _as_named(self) -> Self:
        plain, _, balance = self.arm.partition(" ")
        cutoff = re.search(r"-(\d{1,18})", plain)
        w_max = None if cutoff is None else int(cutoff[1])
        said = {"kind": kind_of(self.arm), "w_max": w_max, "balance": balance or "off"}
        for entry, wanted in said.items():
            if (found := getattr(self, entry)) != wanted:
                raise ValueError(
                    f"has the {entry} {found!r:.40}, {wanted!r} is expected of the arm {self.arm!r:.40}"
                )
        return self


class _Fitted(_Named):
    """What a fit takes from a point."""

    live_bytes: Positive
    cached_bytes: Positive
    replay_window: Count
    slots_native: Annotated[int, Field(ge=1, le=MOST_OF_AN_ARM)]
    slots_compressed: Annotated[int, Field(ge=0, le=MOST_OF_AN_ARM)]
    kv_tokens: Positive | None
    operations: Annotated[dict[str, list[_Row]], AfterValidator(_of_known_kinds)]
    mean_ttft_s: Above
    token_hit_rate: Share
    seeds: Annotated[list[dict[str, Any]], Field(min_length=1)]


class _Measured(_Placed, _Fitted):
    """A point that goes on."""

    seeds: Annotated[list[_Statistics], Field(min_length=1)]
    mean: _Statistics
    reclamation_digests: list[str]
    output_digests: list[str | None]
    engine: _Engine | None

    @model_validator(mode="after")
    def _of_one_run(self) -> Self:
        for name in ("reclamation_digests", "output_digests"):
            if (found := len(getattr(self, name))) != (seeds := len(self.seeds)):
                raise ValueError(f"has {seeds} seeds and {found} {name}, as many are expected")
        if len({frozenset(seed.hybridstate.model_fields_set) for seed in self.seeds}) > 1:
            raise ValueError(
                "has seeds with and without hybridstate.wall_s, all or none are expected"
            )
        return self


def _point(value: Any) -> _Placed:
    if not isinstance(value, dict) or "skipped" not in value:
        return _Measured.model_validate(value)
    if "seeds" in value:
        raise ValueError("has seeds and is skipped, one of them is expected")
    return _Placed.model_validate(value)


def _point_to_fit(value: Any) -> Any:
    skipped = isinstance(value, dict) and "skipped" in value
    return value if skipped else _Fitted.model_validate(value)


class _Profile(Recorded):
    note: str
    tp: Positive = ABSENT


class Result(Recorded):
    """What a run that continues takes: its points, and what is read of the rest before it is compared."""

    points: list[Annotated[_Placed, PlainValidator(_point)]]
    control: list[Annotated[_Placed, PlainValidator(_point)]]
    profile: _Profile
    device: Device
    budget_scope: str
    continued: list[str] = ABSENT

    @model_validator(mode="after")
    def _no_point_twice(self) -> Self:
        for part, points in (("points", self.points), ("control", self.control)):
            refuse_twice({f"{part}[{index}]": point.said for index, point in enumerate(points)})
        return self


class ResultToFit(Recorded):
    """What a fit takes; skipped points are not looked at."""

    points: list[Annotated[Any, PlainValidator(_point_to_fit)]]
