"""A real engine behind the scheduler: what `Executor` asks for, done by `runtime.serving` and timed by a clock.

States lie in the slots that the cache hands out: the engine's pool is the one of the cache's `TensorStore`. A request
enters the engine with its first prefill or, when all but its last token was cached, with its first decode step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hybridstate.bench.recording import Operations, RecordingStore
from hybridstate.bench.scheduler import Request, Seconds
from hybridstate.errors import NumericError
from hybridstate.runtime.prefix_cache import PrefixCache
from hybridstate.runtime.radix import Keys, Tokens
from hybridstate.runtime.serving import Live, ServingEngine

Clock = Callable[[], float]


def device_clock(device: torch.device) -> Clock:
    """Seconds after everything that was launched has run."""
    if device.type != "cuda":
        return time.perf_counter

    def settled() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return settled


@dataclass(frozen=True, slots=True)
class _TimedKeys:
    """Keys and values of a running request, of which the cache copies what it keeps."""

    executor: "EngineExecutor"
    keys: Keys

    def cut(self, start: int, end: int) -> Keys:
        """See `radix.Keys`."""
        return self.executor.copy_keys(self.keys, start, end)


class _Marks:
    """The seconds between marks, from now on: of CUDA events on a GPU, so that no step waits for the host.

    What the host does behind the last one until the device has settled counts to the last.
    """

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock, self._gpu = clock, device.type == "cuda"
        self._started = clock()
        self._marks: list[Any] = []
        if self._gpu:
            self.add()

    def add(self) -> None:
        """Another mark behind what was launched."""
        if not self._gpu:
            self._marks.append(self._clock())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> Seconds:
        """One number for each mark."""
        if not self._gpu:
            return np.diff([self._started, *self._marks])
        whole = self._clock() - self._started
        pairs = pairwise(self._marks)
        found = np.array([1e-3 * a.elapsed_time(b) for a, b in pairs])
        found[-1] += max(0.0, whole - float(found.sum()))
        return found


class EngineExecutor:
    """`scheduler.Executor` on a `ServingEngine`.

    Copies of attention keys count like the store's transfers; `operations` has their tokens and seconds.

    Args:
        serving: runs requests; its pool is the store's.
        cache: whose leases requests hold.
        store: the cache's store where its times count (`drain`); None counts none.
        clock: seconds, after the device has settled.
    """

    def __init__(
        self,
        serving: ServingEngine,
        cache: PrefixCache,
        store: RecordingStore | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.serving = serving
        self.cache = cache
        self._store = store
        self._clock = clock or device_clock(serving.engine.loaded.device)
        self._live: dict[int, Live] = {}
        self._seconds = 0.0
        self.operations: Operations = {"keys": []}

    def prefill(self, request: Request, start: int, end: int) -> float:
        """See `Executor`."""
        started = self._clock()
        live = self._of(request)
        if live.done != start:
            raise NumericError(
                f"{live.done} prompt tokens have run, a prefill from {start} was asked for"
            )
        self.serving.prefill(live, end)
        return self._clock() - started

    def decode(self, batch: Sequence[Request], steps: int) -> Seconds:
        """See `Executor`."""
        marks = _Marks(self._clock, self.serving.engine.loaded.device)
        requests = [self._of(request) for request in batch]  # the first step admits cached prompts
        self.serving.decode_steps(requests, steps, marks.add)
        return marks.seconds()

    def drain(self) -> float:
        """See `Executor`."""
        seconds, self._seconds = self._seconds, 0.0
        return 0.0 if self._store is None else seconds + self._store.take()

    def advance(self, now: float) -> None:
        """Transfers of a device end by themselves."""

    def output(self, request: Request) -> Tokens:
        """See `Executor`."""
        return np.array(self._of(request).output, np.int32)

    def keys(self, request: Request, end: int) -> Keys | None:
        """See `Executor`."""
        return _TimedKeys(self, self.serving.keys(self._of(request), end))

    def copy_keys(self, keys: Keys, start: int, end: int) -> Keys:
        """Timed, as the store's copies are."""
        started = self._clock()
        held = keys.cut(start, end)
        seconds = self._clock() - started
        self._seconds += seconds
        self.operations["keys"].append([end - start, seconds])
        return held

    def close(self, request: Request) -> None:
        """See `Executor`."""
        live = self._live.pop(id(request), None)
        if live is not None:
            self.serving.finish(live)

    def _of(self, request: Request) -> Live:
        live = self._live.get(id(request))
        if live is not None:
            return live
        lease = request.lease
        if lease is None:
            raise NumericError("a request runs without a hold on the cache")
        live = self.serving.admit(
            request.prompt,
            slot=lease.slot,
            hit_tokens=lease.hit_tokens,
            kv=self.cache.prefix(lease).kv,
        )
        if live is None:
            raise NumericError("more requests run than the engine has lines for")
        self._live[id(request)] = live
        return live
