"""Wall time by stage: whatever runs inside `stage(...)` is counted once, for the innermost one.

Stages of all rooms report to the clock that `timed` has started; without one they cost nothing. Times go to
output only, never into files that two runs should write alike.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

OTHER: Final = "other"


class Stages:
    """Seconds by stage; the time outside every stage is `other`, so the sum is the wall time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self.overlapped: dict[str, float] = {}
        """Seconds of work in other threads, beside the stages."""
        self.facts: dict[str, Any] = {}
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
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = self._clock()
        name = self._open[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    def to_json(self) -> dict[str, Any]:
        """Seconds by stage, their sum, what ran beside them, peaks of memory, and what stages had to say."""
        self.settle()
        return {
            "stages_s": dict(self.seconds),
            "wall_s": sum(self.seconds.values()),
            "overlapped_s": dict(self.overlapped),
            "peak_memory": peak_memory(),
            **self.facts,
        }


def peak_memory() -> dict[str, int]:
    """Bytes: resident memory of this process, and what torch has held of a GPU's, at their highest."""
    found: dict[str, int] = {}
    try:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["host_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    except ImportError:  # Windows
        pass
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["device_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["device_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


_ACTIVE: list[Stages] = []


@contextmanager
def timed() -> Iterator[Stages]:
    """Collect the stages of what runs inside."""
    stages = Stages()
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


def fact(name: str, value: Any) -> None:
    """Something measured beside time, the last value of each name, if a clock is running."""
    if _ACTIVE:
        _ACTIVE[-1].facts[name] = value
