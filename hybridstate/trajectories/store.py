"""Recorded batches on disk: one file per batch, written whole or not at all, under one fingerprint.

A folder holds `run.json` (fingerprint, algorithm version) and `batch-NNN.safetensors` with the
arrays of `Recording`: `generated`, and per linear layer `anchors.{ordinal}`, `weights.{ordinal}`,
`mean_log_decay.{ordinal}`. Scores read one layer at a time, so memory is bounded by one layer of one batch.
"""

import importlib
import json
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hybridstate.errors import SourceError, UsageError
from hybridstate.provenance import canonical_json, write_file
from hybridstate.trajectories.protocol import ALGORITHM_VERSION
from hybridstate.trajectories.record import Recording

RUN_FILE = "run.json"


class TrajectoryStore:
    """The batches of one calibration run."""

    def __init__(self, folder: Path, fingerprint: str, layers: int) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.layers = layers
        self._lock: Any = None

    @classmethod
    def open(cls, folder: Path, fingerprint: str, layers: int) -> "TrajectoryStore":
        """The store of a folder; batches of another fingerprint or algorithm version are discarded.

        Raises:
            UsageError: the folder cannot be written, or another process records in it.
        """
        store = cls(folder, fingerprint, layers)
        try:
            store._claim()
        except OSError as error:
            raise UsageError(
                f"cannot write {folder}: {error.strerror}", file=str(folder)
            ) from error
        expected = {"algorithm_version": ALGORITHM_VERSION, "fingerprint": fingerprint}
        run = folder / RUN_FILE
        try:
            present = json.loads(run.read_text("utf-8"))
        except (OSError, ValueError):
            present = None
        if present != expected:
            if run.exists():  # ours, of another run: nothing else is ever deleted
                for file in folder.glob("batch-*.safetensors"):
                    file.unlink()
            write_file(run, canonical_json(expected) + b"\n")
        return store

    def _claim(self) -> None:
        """Keep other processes out until this one ends, however it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            fcntl: Any = importlib.import_module("fcntl")
        except ImportError:  # Windows
            return
        self._lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise UsageError(
                f"another process is calibrating into the same output folder ({self.folder})",
                hint="wait for it, or choose another folder",
                file=str(self.folder),
            ) from error

    def close(self) -> None:
        """Let other processes in."""
        if self._lock is not None:
            self._lock.close()

    def _path(self, batch: int) -> Path:
        return self.folder / f"batch-{batch:03d}.safetensors"

    def has(self, batch: int) -> bool:
        """Whether that batch was recorded to the end."""
        return self._path(batch).is_file()

    def write(self, batch: int, recording: Recording) -> None:
        """Write one batch through a temporary sibling.

        Raises:
            UsageError: the folder cannot be written, e.g. for lack of space.
        """
        tensors = {"generated": recording.generated.to(torch.int32).contiguous()}
        for ordinal in range(self.layers):
            tensors[f"anchors.{ordinal}"] = recording.anchors[ordinal].contiguous()
            tensors[f"weights.{ordinal}"] = recording.weights[ordinal].contiguous()
            mean = recording.mean_log_decay[ordinal]
            tensors[f"mean_log_decay.{ordinal}"] = mean.contiguous()
        path = self._path(batch)
        partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
        try:
            save_file(tensors, partial)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"cannot write {path}: {error}", file=str(path)) from error
        finally:
            partial.unlink(missing_ok=True)

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
