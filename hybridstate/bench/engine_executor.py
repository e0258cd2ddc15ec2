"""A real engine behind the scheduler: what `Executor` asks for, done by `runtime.serving` and timed by a clock.

States lie in the slots that the cache hands out: the engine's pool is the one of the cache's `TensorStore`. A request
enters the engine with its first prefill or, when all but its last token was cached, with its first decode step.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hybridstate.bench.recording import RecordingStore
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


class EngineExecutor:
    """`scheduler.Executor` on a `ServingEngine`.

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
        requests = [self._of(request) for request in batch]
        seconds = np.empty(steps)
        for number in range(steps):
            started = self._clock()
            self.serving.decode_step(requests)
            seconds[number] = self._clock() - started
        return seconds

    def drain(self) -> float:
        """See `Executor`."""
        return 0.0 if self._store is None else self._store.take()

    def advance(self, now: float) -> None:
        """Transfers of a device end by themselves."""

    def output(self, request: Request) -> Tokens:
        """See `Executor`."""
        return np.array(self._of(request).output, np.int32)

    def keys(self, request: Request, end: int) -> Keys | None:
        """See `Executor`."""
        return self.serving.keys(self._of(request), end)

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
