"""Every error a user can meet, and the exit code each one ends with.

HybridStateError
├── UsageError          2   the command cannot be carried out as given (folder not empty, clashing options)
├── SourceError         3   the model or plan cannot be read (missing, truncated, corrupt, offline)
├── UnsupportedModel    4   readable, but no family describes it
├── NumericError        5   NaN, infinity, wrong shapes, a failed acceptance check
├── PlanMismatch        6   the plan does not fit this model, rank count or layout
└── MissingRequirement  7   a GPU, a package or an extra is needed and absent

Anything else that escapes is a bug and ends with exit code 1.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What JSON of another form raises while it is taken apart: `1e999` where an integer stands overflows."""


@contextmanager
def reading(path: Path, failed: str, *, hint: str | None = None) -> Iterator[None]:
    """Turn what a file of another form raises while it is read and taken apart into one line.

    Args:
        path: the file.
        failed: what could not be done with it, such as `cannot read x.json`.

    Raises:
        SourceError: it cannot be read, or holds something else.
    """
    try:
        yield
    except (OSError, IndexError, ZeroDivisionError, *UNREADABLE) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise SourceError(f"{failed}: {reason}", hint=hint, file=str(path)) from error


def check_seconds(option: str, seconds: float) -> None:
    """Refuse a time that is negative or no number.

    Raises:
        UsageError: naming the option.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        raise UsageError(f"{option} must be 0 or a positive number, found {seconds}")


def one_line(text: str) -> str:
    """Text whose control characters, possibly from a file name or a config, are shown escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(value: Any) -> Any:
    """A value as strict JSON can hold it: NaN and infinity as text, what JSON lacks as text."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


class HybridStateError(Exception):
    """One clear line, plus what to do next and machine-readable facts.

    Args:
        message: what failed and where, in one line.
        hint: the next step, as a sentence or a command.
        **context: JSON-able facts (file, tensor, layer, index, found, expected).
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "bug"

    def __init__(self, message: str, *, hint: str | None = None, **context: Any) -> None:
        self.message = one_line(message)
        super().__init__(self.message)
        self.hint = None if hint is None else one_line(hint)
        self.context = context

    def to_json(self) -> dict[str, Any]:
        """The `error` object of the JSON envelope."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "context": plain(self.context),
        }


class UsageError(HybridStateError):
    """The command cannot be carried out as given."""

    exit_code = 2
    code = "usage"


class SourceError(HybridStateError):
    """A model, plan or data file is missing, truncated or corrupt."""

    exit_code = 3
    code = "cannot-read-model"


class UnsupportedModel(HybridStateError):
    """The model can be read, but no family describes its linear-attention layers."""

    exit_code = 4
    code = "unsupported-model"


class NumericError(HybridStateError):
    """A number is NaN, infinite or of the wrong shape, or an acceptance check failed."""

    exit_code = 5
    code = "invalid-numbers"


class PlanMismatch(HybridStateError):
    """The plan does not fit this model, layout or rank count."""

    exit_code = 6
    code = "plan-mismatch"


class MissingRequirement(HybridStateError):
    """A GPU, a package or an optional extra is needed and absent."""

    exit_code = 7
    code = "missing-requirement"
