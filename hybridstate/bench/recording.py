"""What a real engine did and how long it took, for `cost_model.fit`: an executor and a store that write it down.

A serving benchmark wraps both, and keeps `operations` beside the mean TTFT and the token hit rate of each point.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hybridstate.bench.scheduler import Executor, Request, Seconds
from hybridstate.runtime.radix import Keys, Tokens
from hybridstate.runtime.tiers import Prefix, Store, Transfer

Operations = dict[str, list[list[float]]]
"""Kind -> rows of arguments of `cost_model.features`, seconds last."""


class RecordingStore:
    """A store that times another one.

    Args:
        store: does the work.
        native_bytes, packed_bytes: of one slot.
        clock: seconds; has to wait for the device first, or the times are those of launches.

    Attributes:
        operations: copies, packs, checks and loads without a replay. Packs beside the computation are not timed: that
            would make them wait.
        seconds: since the last `take`; what an executor's `drain` returns.
    """

    def __init__(
        self, store: Store, native_bytes: int, packed_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.store = store
        self.operations: Operations = {"copy": [], "pack": [], "load": [], "check": []}
        self.seconds = 0.0
        self._bytes = {
            "copy": native_bytes,
            "pack": packed_bytes,
            "load": packed_bytes,
            "check": native_bytes,
        }
        self._clock = clock

    def copy(self, source: int, target: int) -> None:
        """Timed."""
        started = self._clock()
        self.store.copy(source, target)
        self._add("copy", started)

    def pack(self, source: int, target: int, *, aside: bool) -> Transfer:
        """Timed unless it runs beside the computation."""
        if aside:
            return self.store.pack(source, target, aside=True)
        started = self._clock()
        transfer = self.store.pack(source, target, aside=False)
        self._add("pack", started)
        return transfer

    def load(self, source: int, target: int, prefix: Prefix) -> int:
        """Timed."""
        started = self._clock()
        replayed = self.store.load(source, target, prefix)
        self._add("load", started, keep=not replayed)
        return replayed

    def finite(self, slot: int) -> bool:
        """Timed."""
        started = self._clock()
        found = self.store.finite(slot)
        self._add("check", started)
        return found

    def freed(self, slot: int, *, packed: bool) -> None:
        """Passed on."""
        self.store.freed(slot, packed=packed)

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _add(self, kind: str, started: float, *, keep: bool = True) -> None:
        seconds = self._clock() - started
        self.seconds += seconds
        if keep:
            self.operations[kind].append([self._bytes[kind], seconds])


class RecordingReplay:
    """A replay that is timed by itself; the load around it is not kept as one.

    Args:
        replay: does the work.
        clock: seconds, after the device has settled.

    Attributes:
        operations: rows of start, end and seconds.
    """

    def __init__(
        self, replay: Callable[[Prefix, int], Sequence[Any]], clock: Callable[[], float]
    ) -> None:
        self.operations: Operations = {"replay": []}
        self._replay = replay
        self._clock = clock

    def __call__(self, prefix: Prefix, window: int) -> Sequence[Any]:
        """Timed."""
        started = self._clock()
        found = self._replay(prefix, window)
        seconds, length = self._clock() - started, len(prefix.tokens)
        self.operations["replay"].append([length - window, length, seconds])
        return found


class RecordingExecutor:
    """An executor that writes down what another one does.

    Args:
        executor: does the work.
        state_bytes: of one live state.

    Attributes:
        operations: prefills, and decode steps: those of one call are one row with their number, their mean at the mean
            context.
    """

    def __init__(self, executor: Executor, state_bytes: int) -> None:
        self.executor = executor
        self.operations: Operations = {"prefill": [], "decode": []}
        self._state_bytes = state_bytes

    def prefill(self, request: Request, start: int, end: int) -> float:
        """Recorded."""
        seconds = self.executor.prefill(request, start, end)
        self.operations["prefill"].append([start, end, seconds])
        return seconds

    def decode(self, batch: Sequence[Request], steps: int) -> Seconds:
        """Recorded."""
        context = sum(request.context for request in batch) + len(batch) * (steps - 1) / 2
        seconds = self.executor.decode(batch, steps)
        row = [len(batch), self._state_bytes, context, steps, float(seconds.mean())]
        self.operations["decode"].append(row)
        return seconds

    def drain(self) -> float:
        """Passed on."""
        return self.executor.drain()

    def advance(self, now: float) -> None:
        """Passed on."""
        self.executor.advance(now)

    def output(self, request: Request) -> Tokens:
        """Passed on."""
        return self.executor.output(request)

    def keys(self, request: Request, end: int) -> Keys | None:
        """Passed on."""
        return self.executor.keys(request, end)

    def close(self, request: Request) -> None:
        """Passed on."""
        self.executor.close(request)
