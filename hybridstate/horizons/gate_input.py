"""Choosing the representative gate input a_s from observed decay (DASC 3.3, A.2).

One half of the prefixes (even places in the released order) chooses, the other half is reported. Two objectives:

- `rank`: the median over prefixes and layers of Spearman's rho between static and observed horizons, to be maximised.
  Where all units of a layer share one `A_log`, a_s cannot change an order: the objective is flat and decides nothing.
- `median`: the median over prefixes and layers of |ln(median H_s / median H_e)|, to be minimised. It matches the
  horizons' size, which is what a cutoff in tokens compares.

A grid from -2 to 2 in steps of 0.1; ties go to the smaller |a_s|.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint import Checkpoint
from hybridstate.checkpoint.documents import an_object, read_object, result_of
from hybridstate.errors import UNREADABLE, SourceError, UsageError
from hybridstate.provenance import check_digests

F64 = NDArray[np.float64]
Objective = Literal["rank", "median"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)

GRID: Final = tuple(round(-2.0 + 0.1 * step, 1) for step in range(41))
FLAT: Final[dict[Objective, float]] = {"rank": 1e-3, "median": 1e-3}
"""Spread over the grid under which an objective decides nothing: less than a printed digit."""

_TIE: Final = 1e-9
"""Values of the objective closer than this are equal; rounding of sums in float64 is far below it."""


@dataclass(frozen=True, slots=True)
class GateInputChoice:
    """What one objective chose.

    Attributes:
        objective: which.
        gate_input: the best a_s of the grid.
        value: objective there.
        values: objective at every point of `GRID`, None where no prefix-layer pair has an order.
        flat: the objective is the same over the grid, so the choice says nothing.
        pairs: prefix-layer pairs it was chosen on, and how many were left out as constant there.
        at_border: the best value lies at an end of the grid.
    """

    objective: Objective
    gate_input: float
    value: float | None
    values: tuple[float | None, ...]
    flat: bool
    pairs: int
    constant_pairs: int
    at_border: bool

    @property
    def worst(self) -> float | None:
        """The objective where it is worst on the grid: how much the choice decides at all."""
        known = [value for value in self.values if value is not None]
        pick = min if self.objective == "rank" else max
        return pick(known) if known else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, the grid beside the objective."""
        return {
            "objective": self.objective,
            "gate_input": self.gate_input,
            "value": self.value,
            "worst": self.worst,
            "flat": self.flat,
            "at_border": self.at_border,
            "pairs": self.pairs,
            "constant_pairs": self.constant_pairs,
            "grid": list(GRID),
            "values": list(self.values),
        }


def choose_gate_input(
    static: Callable[[float], Sequence[F64]], observed: Sequence[F64], objective: Objective
) -> GateInputChoice:
    """The a_s of the grid under which static horizons agree best with observed ones.

    Args:
        static: horizons per linear layer, `[H]` or `[H, K]`, at a gate input.
        observed: H_e per linear layer, `[P, H]` or `[P, H, K]`, of the prefixes that may choose.
        objective: see the module.
    """
    if objective not in OBJECTIVES:
        raise UsageError(f"objective takes {' or '.join(OBJECTIVES)}, found {objective!r}")
    score = _ranks(observed) if objective == "rank" else _medians(observed)
    results = [score(static(a_s)) for a_s in GRID]
    values = tuple(value for value, _ in results)
    known = [value for value in values if value is not None]
    sign = 1.0 if objective == "rank" else -1.0
    best = max((sign * value for value in known), default=None)
    at_best = [
        a_s
        for a_s, value in zip(GRID, values, strict=True)
        if best is None or (value is not None and sign * value >= best - _TIE)
    ]
    chosen = min(at_best, key=lambda a_s: (abs(a_s), a_s))
    place = GRID.index(chosen)
    return GateInputChoice(
        objective=objective,
        gate_input=chosen,
        value=values[place],
        values=values,
        flat=not known or max(known) - min(known) < FLAT[objective],
        pairs=sum(len(layer) for layer in observed),
        constant_pairs=results[place][1],
        at_border=place in (0, len(GRID) - 1),
    )


def _ranks(observed: Sequence[F64]) -> Callable[[Sequence[F64]], tuple[float | None, int]]:
    """Median Spearman and number of constant pairs, with the observed side ranked once."""
    from scipy.stats import rankdata

    def centred(units: F64) -> F64:
        ranks = rankdata(units.ravel())
        return np.asarray(ranks - ranks.mean(), np.float64)

    def unit(ranks: F64) -> F64 | None:
        length = float(np.sqrt(ranks @ ranks))
        return ranks / length if length > 0 else None

    sides = [[unit(centred(prefix)) for prefix in layer] for layer in observed]

    def score(static: Sequence[F64]) -> tuple[float | None, int]:
        found, constant = [], 0
        for horizons, layer in zip(static, sides, strict=True):
            ours = unit(centred(horizons))
            for theirs in layer:
                if ours is None or theirs is None:
                    constant += 1
                else:
                    found.append(float(ours @ theirs))
        return (float(np.median(found)) if found else None), constant

    return score


def _medians(observed: Sequence[F64]) -> Callable[[Sequence[F64]], tuple[float | None, int]]:
    """Median of |ln(median H_s / median H_e)|; pairs whose medians are 0 or infinite are left out and counted."""
    middles = [np.median(layer.reshape(len(layer), -1), axis=1) for layer in observed]

    def score(static: Sequence[F64]) -> tuple[float | None, int]:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.concatenate(
                [
                    np.abs(np.log(np.median(horizons) / middle))
                    for horizons, middle in zip(static, middles, strict=True)
                ]
            )
        known = ratios[np.isfinite(ratios)]
        return (float(np.median(known)) if known.size else None), int(ratios.size - known.size)

    return score


# -- which a_s an analysis takes -----------------------------------------------------------------


def resolve_gate_input(
    checkpoint: Checkpoint, *, given: float | None = None, measured: str | Path | None = None
) -> tuple[float, Literal["paper", "default", "given", "measured"]]:
    """The gate input and where it comes from: a number, a recorded validation, or the family's own.

    Raises:
        UsageError: both were given.
        SourceError, PlanMismatch, UsageError: see `read_gate_input`.
    """
    if measured is not None:
        if given is not None:
            raise UsageError("give the gate input as a number or as a recording, not both")
        return read_gate_input(measured, checkpoint.digests()), "measured"
    if given is not None:
        return given, "given"
    return checkpoint.spec.default_gate_input, checkpoint.spec.default_gate_input_source


def read_gate_input(
    path: str | Path, digests: Mapping[str, str], *, objective: Objective | None = None
) -> float:
    """The a_s that a recorded `analyze --validate` chose for this model.

    Args:
        path: its JSON document, or the folder that `analyze -o` wrote.
        digests: of the model at hand: `config`, `index` and `decay`.
        objective: which choice to take; by default the one the recording used.

    Raises:
        SourceError: no such recording.
        PlanMismatch: it is about another checkpoint.
        UsageError: its objective was flat.
    """
    file = Path(path)
    file = file / "analysis.json" if file.is_dir() else file
    again = "record one with `hybridstate analyze MODEL --validate --json`"
    try:
        found = an_object(result_of(read_object(file))["validation"], "its validation")
        recorded: dict[str, str] = an_object(found["model_digests"], "model_digests")
        chosen: Objective = objective or found["gate_input_objective"]
        choices = an_object(found["gate_input_choices"], "gate_input_choices")
        choice = an_object(choices[chosen], f"the choice by {chosen}")
        value, flat = choice["gate_input"], bool(choice["flat"])
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not np.isfinite(float(value)):
            raise ValueError(f"gate_input is {value!r:.40}, a number is expected")
    except (OSError, *UNREADABLE) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise SourceError(
            f"{file}: no validation with a measured gate input: {reason}",
            hint=again,
            file=str(file),
            expected="result.validation.gate_input_choices",
        ) from error
    check_digests(file, recorded, digests, hint=again)
    if flat:
        raise UsageError(
            f"{file}: the objective {chosen} was flat over the grid, so it chose no gate input",
            hint="validate again with --gate-objective median, or give --gate-input FLOAT",
            file=str(file),
        )
    return float(value)
