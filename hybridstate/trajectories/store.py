"""Recorded batches on disk: one file per batch, written whole or not at all, under one fingerprint.

A folder holds `run.json` (what the recording depends on, field by field) and `batch-NNN.safetensors` with the
arrays of `Recording`: `generated`, and per linear layer `anchors.{ordinal}`, `weights.{ordinal}`,
`mean_log_decay.{ordinal}`. Scores read one layer at a time, so memory is bounded by one layer of one batch.
"""

import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hybridstate.errors import SourceError, UsageError
from hybridstate.provenance import canonical_json, sha256_bytes, write_file
from hybridstate.trajectories.batches import BatchWriter
from hybridstate.trajectories.protocol import ALGORITHM_VERSION
from hybridstate.trajectories.record import Arrays, Recording

RUN_FILE = "run.json"
LOCK_FILE = ".lock"
NAMED = 4
"""Differing fields that a message spells out; all of them are in its context."""


class TrajectoryStore:
    """The batches of one calibration run."""

    def __init__(self, folder: Path, fields: Mapping[str, Any], layers: int) -> None:
        self.folder = folder
        self.fields = fields
        self.layers = layers
        self._lock: Any = None

    @classmethod
    def open(
        cls, folder: Path, fields: Mapping[str, Any], layers: int, *, force: bool = False
    ) -> "TrajectoryStore":
        """The store of a folder, with the batches that an earlier run of the same fields finished.

        Args:
            fields: everything that recorded numbers depend on.
            force: discard the batches of another run instead of refusing them.

        Raises:
            UsageError: the folder cannot be written, another process records in it, or it holds batches
                of a run with other fields, which are named.
        """
        store = cls(folder, fields, layers)
        try:
            store._claim()
        except OSError as error:
            raise UsageError(
                f"cannot write {folder}: {error.strerror}", file=str(folder)
            ) from error
        run = folder / RUN_FILE
        expected = {"algorithm_version": ALGORITHM_VERSION, "fields": fields}
        present = _read_run(folder)
        if present != json.loads(canonical_json(expected)):
            batches = list(folder.glob("batch-*.safetensors")) if run.exists() else []
            if batches and not force:
                store.close()
                raise _other_run(folder, present, expected, len(batches))
            for file in batches:  # ours, of another run: nothing else is ever deleted
                file.unlink()
            write_file(run, canonical_json(expected) + b"\n")
        return store

    def merge(self, folder: Path) -> tuple[int, ...]:
        """Copy the batches that another store of the same run has and this one lacks.

        Returns:
            the numbers of the copied batches.

        Raises:
            UsageError: that run's fields differ, named one by one.
            SourceError: both have a batch, with other contents.
        """
        expected = {"algorithm_version": ALGORITHM_VERSION, "fields": self.fields}
        present = _read_run(folder)
        files = sorted(folder.glob("batch-*.safetensors"))
        if present != json.loads(canonical_json(expected)):
            raise _other_run(folder, present, expected, len(files))
        copied = []
        for file in files:
            target = self.folder / file.name
            if not target.exists():
                _check_whole(file)
                write_file(target, file.read_bytes())
                copied.append(int(file.stem.removeprefix("batch-")))
            elif sha256_bytes(file.read_bytes()) != sha256_bytes(target.read_bytes()):
                raise SourceError(
                    f"{file} differs from the batch of that number in {self.folder}",
                    hint="record it again on one device, or delete one of the two",
                    file=str(file),
                )
        return tuple(copied)

    def _claim(self) -> None:
        """Keep other processes out until this one ends, however it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            fcntl: Any = importlib.import_module("fcntl")
        except ImportError:  # Windows
            return
        self._lock = (self.folder / LOCK_FILE).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise UsageError(
                f"another process is calibrating into the same output folder ({self.folder})",
                hint="wait for it, or choose another folder",
                file=str(self.folder),
            ) from error
        for left in self.folder.glob(
            ".batch-*.partial-*"
        ):  # of a killed process: nobody else writes here
            left.unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes in."""
        if self._lock is not None:
            self._lock.close()

    def _path(self, batch: int) -> Path:
        return self.folder / f"batch-{batch:03d}.safetensors"

    def has(self, batch: int) -> bool:
        """Whether that batch was recorded to the end."""
        return self._path(batch).is_file()

    def writer(self, batch: int, arrays: Arrays) -> BatchWriter:
        """The file of one batch, to be filled while it is recorded (`batch_arrays` says with what).

        Raises:
            UsageError: the folder cannot be written, or has too little space.
        """
        return BatchWriter(self._path(batch), arrays)

    def write(self, batch: int, recording: Recording) -> None:
        """Write one batch that is in memory, through a temporary sibling.

        Raises:
            UsageError: the folder cannot be written, e.g. for lack of space.
        """
        whole = recording.arrays() | {
            f"anchors.{ordinal}": recording.anchors[ordinal] for ordinal in range(self.layers)
        }
        arrays = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()}
        with self.writer(batch, arrays) as writer:
            writer.finish(whole)

    @property
    def nbytes(self) -> int:
        """Bytes of all recorded batches."""
        return sum(file.stat().st_size for file in self.folder.glob("batch-*.safetensors"))

    def read(self, batch: int, name: str) -> torch.Tensor:
        """One array of one batch.

        Raises:
            SourceError: the batch is missing or damaged.
        """
        path = self._path(batch)
        try:
            with safe_open(path, "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
        except (OSError, SafetensorError) as error:
            raise SourceError(
                f"{path}: cannot read {name}: {error}",
                hint="delete that file and run the same command again",
                file=str(path),
                tensor=name,
            ) from error

    def read_all(self, batches: int, name: str, dim: int) -> torch.Tensor:
        """One array of all batches, joined along the axis that counts sequences."""
        return torch.cat([self.read(batch, name) for batch in range(batches)], dim)

    def remove(self) -> None:
        """Delete the folder, once the calibration that used it is written."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def claimed(folder: Path) -> bool:
    """Whether a process, this one or another, records in that folder now."""
    lock = folder / LOCK_FILE
    try:
        fcntl: Any = importlib.import_module("fcntl")
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # Windows, or nothing was ever recorded there
        return False
    return False


def _check_whole(file: Path) -> None:
    """Refuse a batch that is no whole safetensors file.

    Raises:
        SourceError: naming it.
    """
    try:
        with safe_open(file, "pt"):
            return
    except (OSError, SafetensorError) as error:
        raise SourceError(
            f"{file}: not a whole batch: {error}",
            hint="delete that file and run that part again",
            file=str(file),
        ) from error


def _read_run(folder: Path) -> Any:
    """Contents of `run.json`, None if there are none."""
    try:
        return json.loads((folder / RUN_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _other_run(folder: Path, present: Any, expected: Any, batches: int) -> UsageError:
    changed = differences(present, json.loads(canonical_json(expected)))
    named = "; ".join(changed[:NAMED]) + ("; ..." if len(changed) > NAMED else "")
    return UsageError(
        f"{folder} holds {batches} recorded batches of another run ({named})",
        hint="repeat that run's options to resume it, or discard its batches with --force",
        file=str(folder),
        differences=changed,
    )


def differences(present: Any, expected: Any, where: str = "") -> list[str]:
    """`field: there, here` for every field that differs, nested names with dots and indices."""
    if isinstance(present, dict) and isinstance(expected, dict):
        names = sorted(present.keys() | expected.keys())
        inside = "" if where in ("", "fields") else f"{where}."
        return [
            line
            for name in names
            for line in differences(present.get(name), expected.get(name), inside + name)
        ]
    same_length = isinstance(present, list) and isinstance(expected, list)
    if same_length and len(present) == len(expected):
        return [
            line
            for place, (a, b) in enumerate(zip(present, expected, strict=True))
            for line in differences(a, b, f"{where}[{place}]")
        ]
    if present == expected:
        return []
    return [f"{where or 'run.json'}: {present!s:.40} there, {expected!s:.40} here"]
