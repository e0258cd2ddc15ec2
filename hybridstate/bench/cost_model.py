"""Seconds of an engine's operations as linear models, and their fit to measured ones.

    prefill    fixed + a n + b n c        n new tokens, c the mean of the positions they attend to
    replay     the same, for the last n tokens of a prefix from the zero state
    decode     fixed + a B + b B s + c K + d / m   a step: B requests, s bytes of one live state, K tokens of context in
               all, m steps that one call runs, of which the host waits for the last
    copy, pack, load, exchange, check     fixed + a bytes; check looks for numbers that are not finite
    keys       fixed + a n                a copy of the attention keys of n tokens

`CostModel.default` is an assumption from rooflines, and says so. `fit` replaces it by least squares on operations that
a real engine recorded (`recording`), with standard errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hybridstate.bench.recorded_form import Signed, check
from hybridstate.checkpoint.documents import read_object
from hybridstate.errors import UNREADABLE, NumericError, SourceError, reading

TERMS: Final[dict[str, tuple[str, ...]]] = {
    "prefill": ("fixed", "per_token", "per_token_context"),
    "decode": ("fixed", "per_request", "per_state_byte", "per_context_token", "per_call"),
    "copy": ("fixed", "per_byte"),
    "pack": ("fixed", "per_byte"),
    "load": ("fixed", "per_byte"),
    "exchange": ("fixed", "per_byte"),
    "check": ("fixed", "per_byte"),
    "keys": ("fixed", "per_token"),
    "replay": ("fixed", "per_token", "per_token_context"),
}
"""Operations and the names of their coefficients, in the order of `features`."""

_FORM: Final = (
    "an object of operations with their numbers, as `cost_model` of a recorded bench simulate"
)

OPTIONAL: Final = ("per_call",)
"""Terms that a file may leave out; they are zero then."""


def features(kind: str, *values: float) -> tuple[float, ...]:
    """What the coefficients of an operation are multiplied with.

    Args:
        kind: of `TERMS`.
        values: prefill, replay: start, end; decode: requests, bytes of a live state, context tokens and, where it is
            known, how many steps the call runs (what a call adds is zero without); keys: tokens; others: bytes.
    """
    if kind in ("prefill", "replay"):
        start, end = values
        return 1.0, end - start, (end * (end + 1) - start * (start + 1)) / 2
    if kind == "decode":
        requests, state_bytes, context, *steps = values
        per_call = 1 / steps[0] if steps else 0.0
        return 1.0, requests, requests * state_bytes, context, per_call
    return 1.0, values[0]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients per operation, in seconds.

    Attributes:
        source: where they come from, shown with every result.
        coefficients: kind -> numbers in the order of `TERMS`.
        errors: standard errors alike, empty where nothing was fitted.
    """

    source: str
    coefficients: Mapping[str, tuple[float, ...]]
    errors: Mapping[str, tuple[float, ...]]

    @classmethod
    def default(cls) -> "CostModel":
        """One H200, 3 B active parameters of BF16, from rooflines at half of the peak; nothing here was measured."""
        flops, bandwidth, link = 0.5e15, 4.0e12, 0.2e12
        active, attention_width, layers = 3.0e9, 4096, 7
        return cls(
            source="assumed: rooflines of one H200 with 3 B active BF16 parameters, not measured",
            coefficients={
                "prefill": (4e-3, 2 * active / flops, 4 * attention_width * layers / flops),
                "decode": (
                    2 * active / bandwidth + 3e-3,
                    2e-5,
                    2 / bandwidth,
                    8064 / bandwidth,
                    0.0,
                ),
                "copy": (3e-5, 2 / bandwidth),
                "pack": (1e-4, 2 / bandwidth),
                "load": (1e-4, 2 / bandwidth),
                "exchange": (5e-5, 1 / link),
                "check": (1e-4, 1 / bandwidth),
                "keys": (1e-4, 2 * 8064 / bandwidth),
                "replay": (4e-3, 2 * active / flops, 4 * attention_width * layers / flops),
            },
            errors={},
        )

    def seconds(self, kind: str, *values: float) -> float:
        """Predicted time of one operation; arguments of `features`."""
        pairs = zip(self.coefficients[kind], features(kind, *values), strict=True)
        return sum(a * x for a, x in pairs)

    def to_json(self) -> dict[str, Any]:
        """Coefficients by name."""
        document: dict[str, Any] = {"source": self.source}
        for kind, terms in TERMS.items():
            document[kind] = dict(zip(terms, self.coefficients[kind], strict=True))
            if kind in self.errors:
                document[kind]["standard_errors"] = dict(zip(terms, self.errors[kind], strict=True))
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any], source: str) -> "CostModel":
        """The inverse of `to_json`; operations that are missing keep their default, and the source says so.

        Raises:
            SourceError: another operation or term, a missing one, or a number that is none.
        """
        coefficients = dict(cls.default().coefficients)
        errors: dict[str, tuple[float, ...]] = {}
        unknown = set(document) - set(TERMS) - {"source"}
        if unknown:
            raise SourceError(
                f"{source}: unknown operations in the cost model: {', '.join(sorted(unknown))}",
                hint=f"it has {', '.join(TERMS)}",
            )
        for kind, terms in TERMS.items():
            if kind not in document:
                continue
            try:
                given = document[kind].get("standard_errors")
                _check_known(f"{source}: {kind}", document[kind], (*terms, "standard_errors"))
                found = _numbers(document[kind], terms)
                if given is not None:
                    _check_known(f"{source}: standard_errors of {kind}", given, terms)
                    errors[kind] = _numbers(given, terms)
            except UNREADABLE as error:
                said = f": {error}" if isinstance(error, ValueError) else ""
                raise SourceError(
                    f"{source}: {kind} needs the numbers {', '.join(terms)}{said}"
                ) from error
            if not all(np.isfinite(found)) or min(found) < 0:
                raise SourceError(f"{source}: {kind} has a negative or infinite coefficient")
            coefficients[kind] = found
        if "prefill" in document and "replay" not in document:
            coefficients["replay"] = coefficients["prefill"]
        kept = [kind for kind in TERMS if kind not in document]
        if "prefill" in document and "replay" in kept:
            kept.remove("replay")
        note = f"; assumed: {', '.join(kept)}" if kept else ""
        return cls(f"{document.get('source', source)}{note}", coefficients, errors)

    @classmethod
    def read(cls, path: Path) -> "CostModel":
        """From a JSON file.

        Raises:
            SourceError: it cannot be read.
        """
        with reading(path, f"cannot read the cost model {path.name}", hint=_FORM):
            document = read_object(path)
        return cls.from_json(document, path.name)


def _check_known(place: str, given: Mapping[str, Any], terms: Sequence[str]) -> None:
    """Refuse a name that is none of the terms: left out silently, it would count as zero.

    Raises:
        SourceError: naming it and the known ones.
    """
    unknown = sorted(set(given) - set(terms))
    if unknown:
        raise SourceError(
            f"{place} has the unknown {', '.join(map(repr, unknown))}; it has {', '.join(terms)}",
            found=unknown,
            expected=list(terms),
        )


def _numbers(given: Mapping[str, Any], terms: Sequence[str]) -> tuple[float, ...]:
    """The numbers of those terms in their order.

    Raises:
        KeyError, ValueError: one is missing, or no number.
    """
    found = {t: given.get(t, 0) if t in OPTIONAL else given[t] for t in terms}
    check(dict[str, Signed], found)
    return tuple(map(float, found.values()))


REWEIGHTINGS: Final = 5
"""Fits of one operation, each weighted by the one before."""

Operations = Mapping[str, Sequence[Sequence[float]]]
"""Kind -> rows of arguments of `features`, the measured seconds last."""


def fit(operations: Operations, source: str) -> CostModel:
    """Least squares per operation, weighted by the expected time so that short ones count as much as long ones.

    Weights of the measured times themselves would favour the fast ones of a noisy kind, and sums would come out short.

    A coefficient that comes out negative is set to zero and the others are fitted again. Decode rows without their
    number of steps count only where too few have it: the mean over calls says too much of a step, since most steps run
    in long calls and each call adds its own time. Operations of which fewer were measured than they have coefficients
    keep their default, a replay takes the prefill's.

    Raises:
        SourceError: a row has another form.
        NumericError: a measured time is not positive and finite, or arguments are beyond all range.
    """
    coefficients = dict(CostModel.default().coefficients)
    errors: dict[str, tuple[float, ...]] = {}
    fitted = []
    for kind, terms in TERMS.items():
        rows = operations.get(kind, ())
        check_rows(kind, rows)
        if kind == "decode":
            rows = _decode_rows(rows, len(terms))
        if len(rows) <= len(terms):
            continue
        seconds = np.array([row[-1] for row in rows], float)
        if not bool((seconds > 0).all()) or not bool(np.isfinite(seconds).all()):
            raise NumericError(f"a measured {kind} took no positive time")
        design = np.array([features(kind, *row[:-1]) for row in rows], float)
        if not bool(np.isfinite(design).all()):
            raise NumericError(f"a measured {kind} has arguments beyond the range of its features")
        expected = seconds
        for _ in range(REWEIGHTINGS):
            coefficients[kind], errors[kind] = _least_squares(design, seconds, expected)
            expected = np.maximum(design @ np.array(coefficients[kind]), 1e-3 * seconds)
        fitted.append(f"{kind} ({len(rows)})")
    if "prefill" in errors and "replay" not in errors:
        coefficients["replay"] = coefficients["prefill"]
    kept = [kind for kind in TERMS if kind not in errors]
    note = f"; assumed: {', '.join(kept)}" if kept else ""
    return CostModel(
        f"{source}: fitted {', '.join(fitted) or 'nothing'}{note}", coefficients, errors
    )


def check_rows(kind: str, rows: Sequence[Sequence[float]]) -> None:
    """Refuse rows that are not the arguments of `features` and a time.

    Raises:
        SourceError: one is not; names it by its place.
    """
    lengths = {"prefill": (3,), "replay": (3,), "decode": (4, 5)}.get(kind, (2,))
    for number, row in enumerate(rows):
        proper = isinstance(row, list | tuple) and len(row) in lengths
        if not proper or not all(_is_number(value) for value in row):
            raise SourceError(
                f"measured {kind} {number} is {row!r:.60}, {' or '.join(map(str, lengths))} numbers are expected"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _decode_rows(rows: Sequence[Sequence[float]], terms: int) -> list[Sequence[float]]:
    """Rows with their number of steps, as far as it tells what a call adds from its steps; else rows without."""
    told = [row for row in rows if len(row) == terms]
    if len(told) <= terms:
        return [row for row in rows if len(row) < terms]
    if len({row[-2] for row in told}) > 1:
        return told
    return [[*row[:-2], row[-1]] for row in told]


def _least_squares(
    design: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Non-negative coefficients and their standard errors (0 for those that were set to zero)."""
    with np.errstate(over="ignore"):
        weighted = design / expected[:, None]
        target = seconds / expected
    if not bool(np.isfinite(weighted).all() and np.isfinite(target).all()):
        raise NumericError("measured seconds and their arguments are too far apart to be fitted")
    scale = np.maximum(np.abs(weighted).max(0), 1e-300)
    used = np.flatnonzero(np.abs(weighted).max(0) > 0)
    while True:
        part = weighted[:, used] / scale[used]
        solution = np.linalg.lstsq(part, target, rcond=None)[0]
        negative = np.flatnonzero(solution < 0)
        if not len(negative) or len(used) == 1:
            break
        used = np.delete(used, int(np.argmin(solution)))
    solution = np.maximum(solution, 0.0)
    residual = target - part @ solution
    variance = float(residual @ residual) / max(1, len(target) - len(used))
    spread = np.sqrt(np.maximum(np.diag(np.linalg.pinv(part.T @ part)) * variance, 0.0))
    values, errors = np.zeros(design.shape[1]), np.zeros(design.shape[1])
    values[used], errors[used] = solution / scale[used], spread / scale[used]
    return tuple(values.tolist()), tuple(errors.tolist())
