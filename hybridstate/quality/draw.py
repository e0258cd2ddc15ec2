"""One seed's finished part of a calibration, in memory and as two files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hybridstate.checkpoint.documents import an_object, parse_json, read_bytes
from hybridstate.errors import UNREADABLE, SourceError
from hybridstate.provenance import canonical_json, write_file
from hybridstate.quality.decoded import TaskScores
from hybridstate.quality.divergence import Measured

RESULT_FILE: Final = "result.json"
ARRAYS_FILE: Final = "result.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """What one prompt draw, evaluation draw, mask and rounding seed gave.

    Attributes:
        document: its part of `calibration.json`.
        arrays: of `calibration.safetensors`.
        measured: the validation by step.
        tasks: accuracy after thousands of updates; None where no task was run.
        warnings: for the user, one line each.
    """

    document: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    measured: Measured
    tasks: TaskScores | None
    warnings: tuple[str, ...]

    def write(self, folder: Path, depends_on: dict[str, Any]) -> None:
        """Write both files, the one that makes the draw count as finished last."""
        arrays = {f"calibration.{name}": array for name, array in self.arrays.items()}
        arrays |= {f"measured.{name}": array for name, array in self.measured.arrays().items()}
        content = {
            "depends_on": depends_on,
            "document": self.document,
            "measured": self.measured.describe(),
            "tasks": None,
            "warnings": list(self.warnings),
        }
        if self.tasks is not None:
            arrays |= {
                "tasks.correct": self.tasks.correct,
                "tasks.questions": self.tasks.questions,
            }
            content["tasks"] = {
                "formats": list(self.tasks.formats),
                "tasks": list(self.tasks.tasks),
                "filler": self.tasks.filler,
            }
        write_file(folder / ARRAYS_FILE, save(arrays))
        write_file(folder / RESULT_FILE, canonical_json(content) + b"\n")


def read_draw(folder: Path) -> tuple[Draw, dict[str, Any]] | None:
    """A finished draw and what it depends on; None if there is none.

    Raises:
        SourceError: its files are damaged.
    """
    file = folder / RESULT_FILE
    if not file.is_file():
        return None
    try:
        content = an_object(parse_json(read_bytes(file)), file.name)
        arrays = load((folder / ARRAYS_FILE).read_bytes())

        def part(name: str) -> dict[str, NDArray[Any]]:
            start = f"{name}."
            return {
                k.removeprefix(start): np.array(v) for k, v in arrays.items() if k.startswith(start)
            }

        tasks = None
        if content["tasks"] is not None:
            found, kept = part("tasks"), content["tasks"]
            tasks = TaskScores(
                tuple(kept["formats"]),
                tuple(kept["tasks"]),
                found["correct"],
                found["questions"],
                int(kept["filler"]),
            )
        draw = Draw(
            content["document"],
            part("calibration"),
            Measured.from_arrays(content["measured"], part("measured")),
            tasks,
            tuple(content["warnings"]),
        )
        return draw, content["depends_on"]
    except (OSError, *UNREADABLE, SafetensorError) as error:
        raise SourceError(
            f"{folder}: cannot read a finished seed: {error}",
            hint=f"delete {RESULT_FILE} there and run the same command again",
            file=str(file),
        ) from error


def copy_draw(source: Path, target: Path) -> None:
    """Both files, byte for byte."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (ARRAYS_FILE, RESULT_FILE):
        write_file(target / name, (source / name).read_bytes())
