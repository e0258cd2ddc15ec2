"""Several seeds of one calibration: which there are, where finished ones wait, how they become one result.

A seed is a prompt draw, the trajectories generated from it, the choices made on them, a validation of its own
and its own random masks and rounding. `greedy` is one more draw, with the first seed's prompts and greedy
trajectories. Finished draws and recorded batches lie in a work folder, one subfolder per draw, so that a run
killed at any time continues, and partial runs merge.
"""

import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from hybridstate.errors import UsageError
from hybridstate.provenance import sha256_json
from hybridstate.quality.calibration import Calibration
from hybridstate.quality.decoded import task_accuracy
from hybridstate.quality.divergence import Measured, divergences, finite, pooled
from hybridstate.quality.draw import ARRAYS_FILE, RESULT_FILE, Draw, copy_draw, read_draw
from hybridstate.trajectories.store import claimed, differences

Progress = Callable[[str, int, int], None]

SPREAD_OF: Final = (
    *("split_agreement", "split_rank_correlation", "selector_agreement", "objective"),
    *("key_order_gap", "error_concentration", "risk_prediction", "repeated_32gram_share"),
    "effective_decay_median",
)
"""Parts of the document whose mean and spread over seeds are given."""
PER_SEED: Final = (*SPREAD_OF, "fingerprint", "seed", "skipped")


MOST_SEEDS: Final = 1000
"""Whole calibrations of one run: a typing error of more would only fill the memory."""


class OutOfTime(UsageError):
    """The deadline came before the run, or its first seed, was finished."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One draw.

    Attributes:
        label: its subfolder.
        seed: of every random choice.
        temperature: of its trajectories; None is the protocol's.
    """

    label: str
    seed: int
    temperature: float | None = None


def units(seed: int, seeds: int, *, greedy: bool) -> tuple[Unit, ...]:
    """Seeds `seed`, `seed + 1`, ..., then greedy trajectories if asked for.

    Raises:
        UsageError: not a number of seeds that a run can have.
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise UsageError(f"seeds must be 1 to {MOST_SEEDS:,}, found {seeds}", found=seeds)
    found = [Unit(f"seed-{n}", n) for n in range(seed, seed + seeds)]
    return tuple(found + ([Unit("greedy", seed, 0.0)] if greedy else []))


@dataclass(frozen=True, slots=True)
class Part:
    """The `number`-th of `count` parts of a run, from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """`1/2`.

        Raises:
            UsageError: not two such numbers.
        """
        pieces = text.split("/")
        if len(pieces) == 2 and all(p.isascii() and p.isdigit() and len(p) < 7 for p in pieces):
            number, count = map(int, pieces)
            if 1 <= number <= count:
                return cls(number, count)
        raise UsageError(
            f"{text!r:.40} is no part of a run", hint="1/2 is the first of two parts", found=text
        )

    def whole(self, of: tuple[Unit, ...]) -> tuple[Unit, ...]:
        """Draws that this part finishes: every `count`-th, or none where there are fewer than parts."""
        return () if len(of) < self.count else of[self.number - 1 :: self.count]

    def batches(self, of: tuple[Unit, ...], batches: int) -> tuple[int, ...] | None:
        """Batches that this part records of every draw; None where it finishes whole draws."""
        return None if len(of) >= self.count else tuple(range(self.number - 1, batches, self.count))


@dataclass(slots=True)
class Clock:
    """Stops a run between two updates once its seconds are over; finished batches and seeds stay."""

    seconds: float | None = None
    _start: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raise `OutOfTime` when the time is over."""
        if self.seconds is not None and time.monotonic() - self._start > self.seconds:
            raise OutOfTime(
                f"stopped after {self.seconds:g} s with seeds left to do",
                hint="finished batches and seeds are kept: the same command continues",
            )

    def watched(self, progress: Progress | None, prefix: str) -> Progress:
        """A progress function that also looks at the clock."""

        def advance(stage: str, done: int, total: int) -> None:
            self.check()
            if progress is not None:
                progress(prefix + stage, done, total)

        return advance


@dataclass(frozen=True, slots=True)
class Work:
    """A folder of draws."""

    folder: Path
    force: bool = False

    def place(self, unit: Unit) -> Path:
        """Subfolder of a draw."""
        return self.folder / unit.label

    def finished(
        self, unit: Unit, depends_on: dict[str, Any], *, others: Sequence[Path] = ()
    ) -> Draw | None:
        """A finished draw of the same options, taken from a partial run where only that has it; None if there is none.

        Raises:
            UsageError: it was made with other options, and not `force`; one of a partial run is not even copied.
        """
        for other in others:
            self._take(other / unit.label, unit, depends_on)
        found = read_draw(self.place(unit))
        if found is None:
            return None
        draw, present = found
        changed = differences(present, depends_on)
        if not changed:
            return draw
        if self.force:
            for name in (RESULT_FILE, ARRAYS_FILE):
                (self.place(unit) / name).unlink(missing_ok=True)
            return None
        raise UsageError(
            f"{self.place(unit)} was finished with other options ({'; '.join(changed[:4])})",
            hint="repeat that run's options to continue it, or discard it with --force",
            file=str(self.place(unit)),
            differences=changed,
        )

    def finish(self, unit: Unit, draw: Draw, depends_on: dict[str, Any]) -> Draw:
        """Write a draw, give back its recorded batches, and return it as it will be read again."""
        draw.write(self.place(unit), depends_on)
        for file in self.place(unit).glob("batch-*.safetensors"):
            file.unlink()
        found = self.finished(unit, depends_on)
        assert found is not None
        return found

    def _take(self, source: Path, unit: Unit, depends_on: dict[str, Any]) -> None:
        """Copy a partial run's finished draw where this one has none; batches are merged by their store."""
        found = None if (self.place(unit) / RESULT_FILE).exists() else read_draw(source)
        if found is None:
            return
        if changed := differences(found[1], depends_on):
            raise UsageError(
                f"{source} was finished with other options ({'; '.join(changed[:4])})",
                hint="merge parts of this very run: the same model and options",
                file=str(source),
                differences=changed,
            )
        copy_draw(source, self.place(unit))

    def remove(self) -> None:
        """Delete the folder, except for draws that another process is recording there."""
        if not any(claimed(place) for place in self.folder.glob("*")):
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for place in self.folder.glob("*"):
            if not claimed(place):
                shutil.rmtree(place, ignore_errors=True)

    def anything(self) -> bool:
        """Whether a batch or a draw is finished."""
        return any(self.folder.glob("*/batch-*.safetensors")) or any(
            self.folder.glob(f"*/{RESULT_FILE}")
        )


def check_part_of(folder: Path, of: tuple[Unit, ...]) -> None:
    """Refuse to merge a folder without a draw of this run.

    Raises:
        UsageError: `folder` holds nothing of it.
    """
    if not any((folder / unit.label).is_dir() for unit in of):
        raise UsageError(
            f"{folder} holds no part of this run",
            hint="give the folder that calibrate --part wrote, and the same options",
            file=str(folder),
        )


@contextmanager
def work_folder(output: Path | None, *, force: bool = False) -> Iterator[Work]:
    """Where draws wait: a hidden sibling of the output folder, or a temporary folder.

    The hidden sibling goes when the result is written, and after an error before anything was finished.

    Raises:
        UsageError: see `part_folder`; the hint explains the hidden sibling.
    """
    if output is None:
        with TemporaryDirectory(prefix="hybridstate-") as folder:
            yield Work(Path(folder), force)
        return
    output = output.absolute()  # "." has no name to put a sibling beside
    hidden = output.with_name(f".{output.name}.trajectories")
    try:
        with part_folder(hidden, force=force) as work:
            yield work
    except UsageError as error:
        if error.hint and str(hidden) in error.message:  # nobody gave that name
            error.hint = f"{output.name} has an unfinished run in {hidden}: {error.hint}"
        raise


@contextmanager
def part_folder(folder: Path, *, force: bool = False) -> Iterator[Work]:
    """A folder for draws that goes after an error before anything was finished.

    Raises:
        UsageError: it holds other files.
    """
    known = re.compile(r"seed-[0-9]+|greedy")
    strange = sorted(p.name for p in folder.glob("*") if not known.fullmatch(p.name))
    if strange or folder.is_file():
        raise UsageError(
            f"{folder} is not empty and holds no part of a run",
            hint="choose another folder",
            file=str(folder),
            found=strange[:4],
        )
    work = Work(folder, force)
    try:
        yield work
    except BaseException:
        if not work.anything():
            work.remove()
        raise


def combine(found: dict[Unit, Draw], wanted: tuple[Unit, ...]) -> Calibration:
    """One result of the finished draws: choices of the first seed, validation over all of them."""
    seeds = [unit for unit in wanted if unit.temperature is None and unit in found]
    draws = [found[unit] for unit in seeds]
    first = draws[0]
    measured = _common([draw.measured for draw in draws])
    rows = divergences(measured)
    tasks = [draw.tasks for draw in draws if draw.tasks is not None]
    document = first.document | {
        "validation": [row.to_json() for row in rows],
        "validation_sequences": measured.kl.shape[1],
        "validation_seeds": [unit.seed for unit in seeds],
        "task_accuracy": task_accuracy(tasks) if len(tasks) == len(draws) else None,
        "per_seed": [
            {name: draw.document[name] for name in PER_SEED}
            | {"prompts": sha256_json(draw.document["prompt_digests"])}
            for draw in draws
        ],
        "over_seeds": over_draws([{name: d.document[name] for name in SPREAD_OF} for d in draws]),
        "unfinished": [unit.label for unit in wanted if unit not in found],
    }
    greedy = [found[unit] for unit in wanted if unit.temperature is not None and unit in found]
    if greedy:
        document["greedy"] = _second_row(greedy[0])
    warnings = dict.fromkeys(line for draw in draws for line in draw.warnings)
    if document["unfinished"]:
        warnings[f"not finished: {', '.join(document['unfinished'])}"] = None
    return Calibration(document, rows, first.arrays, tuple(warnings))


def _common(draws: list[Measured]) -> Measured:
    """All draws pooled; every seed of one run measures the same formats."""
    assert all(draw.formats == draws[0].formats for draw in draws)
    return pooled(draws)


def _second_row(draw: Draw) -> dict[str, Any]:
    """What greedy trajectories say, in short."""
    rows = divergences(draw.measured)
    kept = ("format", "kl", "kl_error", "top1", "state_error", "perplexity_ratio")
    names = (*SPREAD_OF, "fingerprint", "seed")
    return {
        "temperature": 0.0,
        **{name: draw.document[name] for name in names},
        "sequences": draw.measured.kl.shape[1],
        "validation": finite([{name: getattr(row, name) for name in kept} for row in rows]),
        "warnings": list(draw.warnings),
    }


def over_draws(values: list[Any]) -> Any:
    """Mean and spread (sample standard deviation) of every number in nested dictionaries of equal keys.

    A number that is missing in one of them is None; one draw has no spread.
    """
    if isinstance(values[0], dict):
        return {name: over_draws([v.get(name) for v in values]) for name in values[0]}
    if any(not isinstance(v, int | float) for v in values):
        return None
    numbers = np.array(values, dtype=np.float64)
    spread = float(numbers.std(ddof=1)) if len(numbers) > 1 else None
    assert spread is None or math.isfinite(spread)
    return {"mean": float(numbers.mean()), "spread": spread}
