"""Wall time by stage: whatever runs inside `stage(...)` is counted once, for the innermost one.

Stages of all rooms report to the clock that `timed` has started; without one they cost nothing. Times go to
output only, never into files that two runs should write alike.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

OTHER: Final = "other"


class Stages:
    """Seconds by stage; the time outside every stage is `other`, so the sum is the wall time."""

    def __init__(
        self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.overlapped: dict[str, float] = {}
        """Seconds of work in other threads, beside the stages."""
        self.device = device
        self._clock = clock
        self._open = [OTHER]
        self._since = clock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what happens inside for `name`; the stage around it is paused."""
        self.settle()
        self._open.append(name)
        try:
            yield
        finally:
            self.settle()
            self._open.pop()

    def settle(self) -> None:
        """Give the time since the last change to the present stage, work on a GPU included."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = self._clock()
        name = self._open[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    def to_json(self) -> dict[str, Any]:
        """Seconds by stage, their sum, and what ran beside them."""
        self.settle()
        return {
            "stages_s": dict(self.seconds),
            "wall_s": sum(self.seconds.values()),
            "overlapped_s": dict(self.overlapped),
        }


_ACTIVE: list[Stages] = []


@contextmanager
def timed(device: torch.device | None = None) -> Iterator[Stages]:
    """Collect the stages of what runs inside; the device may be set later."""
    stages = Stages(device)
    _ACTIVE.append(stages)
    try:
        yield stages
    finally:
        _ACTIVE.remove(stages)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """A stage of the clock that is running, if one is."""
    if not _ACTIVE:
        yield
        return
    with _ACTIVE[-1].stage(name):
        yield


def overlapped(name: str, seconds: float) -> None:
    """Work of another thread, if a clock is running."""
    if _ACTIVE:
        present = _ACTIVE[-1].overlapped
        present[name] = present.get(name, 0.0) + seconds
