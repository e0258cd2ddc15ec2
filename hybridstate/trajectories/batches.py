"""One recorded batch on its way to disk: a safetensors file whose states are written while the model generates.

All sizes are known before the first update, so the header comes first and each anchor's states go to their final
place as soon as they exist. On a GPU they are set aside on the device, and a thread copies them through one pinned
layer into the file while generation goes on: host memory is one layer, device memory one set of states. The file
appears under its name once it is whole.
"""

import json
import math
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import torch

from hybridstate.errors import UsageError
from hybridstate.trajectories.stages import overlapped, stage

CODES: Final = {torch.float64: "F64", torch.float32: "F32", torch.int32: "I32"}
"""Dtypes of a batch, widest first, so that every array is aligned."""


class BatchWriter:
    """A file of named arrays, filled in any order; use as a context.

    Args:
        path: the file; written beside it and renamed by `finish`.
        arrays: name -> (dtype, shape) of everything the file holds.

    Raises:
        UsageError: the folder cannot be written, or has too little space.
    """

    def __init__(
        self, path: Path, arrays: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
        self._arrays = arrays
        self._places: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._failed: list[BaseException] = []
        self._busy = 0.0
        header, self.nbytes = self._header()
        free = shutil.disk_usage(path.parent).free
        if free < self.nbytes:
            raise UsageError(
                f"{path.parent} has {free:,} bytes left, the recorded batch takes {self.nbytes:,}",
                hint="choose an output folder on another disk, or free some space",
                found=free,
                expected=self.nbytes,
            )
        try:
            self._file = self._partial.open("wb", buffering=0)
            self._file.write(header)
            self._file.truncate(self.nbytes)
        except OSError as error:
            raise self._unwritable(error) from error

    def __enter__(self) -> "BatchWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave nothing behind unless `finish` was reached."""
        if self._thread is not None:
            self._thread.join()
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def anchor(self, place: int, states: list[torch.Tensor]) -> None:
        """Keep the states `[B, H, K, V]` of all layers as entry `place` of `anchors.{ordinal}`.

        They may change as soon as this returns.
        """
        with stage("write"):
            self._wait()
            on_gpu = states[0].is_cuda
            kept = [s.detach().to(torch.float32, copy=on_gpu).contiguous() for s in states]
            if not on_gpu:
                self._put_all(place, kept)
                return
            ready = torch.cuda.Event()
            ready.record()
        self._thread = threading.Thread(
            target=self._copy, args=(place, kept, ready), name="trajectories", daemon=True
        )
        self._thread.start()

    def put(self, name: str, tensor: torch.Tensor, part: int | None = None) -> None:
        """Write an array, or its entry `part` along the first axis."""
        dtype, shape = self._arrays[name]
        values = tensor.detach().to("cpu", dtype).contiguous()
        expected = shape if part is None else shape[1:]
        assert tuple(values.shape) == expected, (name, tuple(values.shape), expected)
        at = self._places[name] + (0 if part is None else part * values.nbytes)
        view = values.numpy().reshape(-1).view(np.uint8).data
        try:
            self._file.seek(at)
            while view.nbytes:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise self._unwritable(error) from error

    def finish(self, arrays: Mapping[str, torch.Tensor]) -> None:
        """Write the remaining arrays and give the file its name.

        Raises:
            UsageError: a write failed, now or in the thread.
        """
        with stage("write"):
            self._wait()
            for name, tensor in arrays.items():
                self.put(name, tensor)
            self._file.close()
            try:
                self._partial.replace(self.path)
            except OSError as error:
                raise self._unwritable(error) from error
        overlapped("write", self._busy)

    def _wait(self) -> None:
        """Until the thread is done; what it could not write is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed.pop()

    def _put_all(self, place: int, states: list[torch.Tensor]) -> None:
        for ordinal, state in enumerate(states):
            self.put(f"anchors.{ordinal}", state, place)

    def _copy(self, place: int, states: list[torch.Tensor], ready: Any) -> None:
        """In the thread: from the device through one pinned layer into the file."""
        started = time.perf_counter()
        try:
            device = states[0].device
            stream = torch.cuda.Stream(device)
            stream.wait_event(ready)
            pinned: dict[torch.Size, torch.Tensor] = {}
            for ordinal, state in enumerate(states):
                if state.shape not in pinned:
                    pinned[state.shape] = torch.empty(state.shape, pin_memory=True)
                with torch.cuda.stream(stream):
                    pinned[state.shape].copy_(state, non_blocking=True)
                stream.synchronize()
                self.put(f"anchors.{ordinal}", pinned[state.shape], place)
        except BaseException as error:  # raised again by whoever waits
            self._failed.append(error)
        self._busy += time.perf_counter() - started

    def _header(self) -> tuple[bytes, int]:
        """The file's first bytes and its whole size; fills `_places`."""
        order = list(CODES)
        names = sorted(self._arrays, key=lambda n: (order.index(self._arrays[n][0]), n))
        entries: dict[str, Any] = {}
        end = 0
        for name in names:
            dtype, shape = self._arrays[name]
            start, end = end, end + math.prod(shape) * dtype.itemsize
            entries[name] = {
                "dtype": CODES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        for name, entry in entries.items():
            self._places[name] = len(header) + entry["data_offsets"][0]
        return header, len(header) + end

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(f"cannot write {self.path}: {error}", file=str(self.path))
