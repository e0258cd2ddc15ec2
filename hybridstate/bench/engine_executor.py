"""A real engine behind the scheduler: what `Executor` asks for, done by `runtime.serving` and timed by a clock.

States lie in the slots that the cache hands out: the engine's pool is the one of the cache's `TensorStore`. A request
enters the engine with its first prefill or, when all but its last token was cached, with its first decode step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        seconds = np.empty(steps)
        started = self._clock()
        requests = [self._of(request) for request in batch]  # the first step admits cached prompts
        for number in range(steps):
            self.serving.decode_step(requests)
            ended = self._clock()
            seconds[number], started = ended - started, ended
        return seconds

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
