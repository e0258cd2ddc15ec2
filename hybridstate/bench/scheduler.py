"""Continuous batching over a prefix cache: clients, a queue, a limit of running requests, and a clock.

The loop owns the order of things and adds up seconds; an `Executor` does the work and says how long it took. With
`CostedExecutor` (`bench.simulate`) nothing runs and seconds are predicted; a real engine measures them. The clock is
the sum of those seconds, so the work of the clients and of the loop itself never counts.

As in serving engines: waiting requests are admitted first, as many as there are slots and as the prefill budget
allows, then all running ones decode. The last token of a prompt that is alone (a checkpoint lies before it, or all else
was cached) runs in the next decode step instead of a prefill of its own.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridstate.bench.traces import Conversation, Trace
from hybridstate.errors import NumericError
from hybridstate.runtime.prefix_cache import Lease, PrefixCache
from hybridstate.runtime.radix import Keys, Tokens

Seconds = NDArray[np.float64]


@dataclass(eq=False, slots=True)
class Request:
    """One turn on its way through the engine.

    Attributes:
        prompt: all tokens.
        reply: tokens to generate.
        recorded: the recorded reply.
        lease: its hold on the cache, from admission on.
        produced: generated tokens so far; with 0 a decode step feeds the prompt's last token.
        sent, first, last: seconds of sending, first and latest token; `first` is negative before it.
        replayed: tokens replayed at its load.
    """

    conversation: Conversation
    turn: int
    prompt: Tokens
    reply: int
    recorded: Tokens
    sent: float
    lease: Lease | None = None
    produced: int = 0
    first: float = -1.0
    last: float = 0.0
    replayed: int = 0

    @property
    def context(self) -> int:
        """Tokens that the next step attends to."""
        return len(self.prompt) + self.produced


class Executor(Protocol):
    """An engine, real or predicted. Slots are those of `request.lease`; states live in the cache's store."""

    def prefill(self, request: Request, start: int, end: int) -> float:
        """Run prompt tokens `start` to `end` on the request's slot, from zero state at 0; seconds.

        At the end of the prompt it also generates the first token.
        """
        ...

    def decode(self, batch: Sequence[Request], steps: int) -> Seconds:
        """Generate `steps` tokens for each request; seconds of each step, `[steps]`."""
        ...

    def drain(self) -> float:
        """Seconds that the store's copies, packs and loads took since the last call."""
        ...

    def advance(self, now: float) -> None:
        """The clock, for transfers that end by themselves in a simulation."""
        ...

    def output(self, request: Request) -> Tokens:
        """The generated tokens, `[produced]`."""
        ...

    def keys(self, request: Request, end: int) -> Keys | None:
        """Attention keys of the first `end` tokens, None where the engine keeps them by itself."""
        ...

    def close(self, request: Request) -> None:
        """The request has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Load of a run.

    Attributes:
        clients: conversations at once.
        running: requests that decode at once, the server's limit.
        prefill_tokens: prompt tokens between two decode steps, at least one request's.
        think: mean seconds between a reply and the client's next turn, exponential; 0 sends it at once.
    """

    clients: int = 256
    running: int = 32
    prefill_tokens: int = 16_384
    think: float = 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """One finished request; times in seconds."""

    conversation: int
    turn: int
    prompt_tokens: int
    hit_tokens: int
    tier: str
    replayed: int
    output_tokens: int
    sent: float
    first: float
    last: float


@dataclass
class Run:
    """Everything one run measured.

    Attributes:
        served: finished requests in the order of their ends.
        gaps: (seconds between tokens, how many requests had them), for the inter-token latency.
        seconds: on the clock, from the first to the last token.
        peak: most requests that ran at once.
    """

    served: list[Served] = field(default_factory=list)
    gaps: list[tuple[Seconds, int]] = field(default_factory=list)
    seconds: float = 0.0
    peak: int = 0


class Scheduler:
    """One run of a trace.

    Args:
        trace: what is served.
        cache: decides; its store belongs to the executor.
        executor: works.
        limits: load.
        seed: of the order in which clients take conversations.
    """

    def __init__(
        self,
        trace: Trace,
        cache: PrefixCache,
        executor: Executor,
        limits: Limits,
        seed: int = 0,
    ) -> None:
        self.cache = cache
        self.executor = executor
        self.limits = limits
        self.now = 0.0
        self.run = Run()
        self._trace = trace
        self._order = iter(trace.order(seed).tolist())
        self._rng = np.random.Generator(np.random.PCG64([seed, 5]))
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._later: list[tuple[float, int, Request]] = []
        self._open = 0
        self._stalled = 0

    def serve(self) -> Run:
        """Until every request has ended."""
        while self._take_conversations() or self._waiting or self._running or self._later:
            self._arrive()
            self.cache.poll()
            blocked = self._admit()
            if self._running:
                self._decode(self._steps(blocked))
            elif self._waiting:
                self._wait()
            elif self._later:
                self._spend(max(0.0, self._later[0][0] - self.now))
        self.cache.settle()
        self.run.seconds = self.now
        return self.run

    # -- clients -------------------------------------------------------------------------------

    def _take_conversations(self) -> bool:
        """Free clients begin new conversations; whether any did."""
        began = False
        while self._open < self.limits.clients:
            number = next(self._order, None)
            if number is None:
                break
            self._open += 1
            began = True
            self._send(self._trace.make(number), 0, np.empty(0, np.int32), self.now)
        return began

    def _send(self, conversation: Conversation, turn: int, before: Tokens, at: float) -> None:
        """A turn, sent `at` or when its conversation starts; later turns after a pause."""
        entry = conversation.turns[turn]
        prompt = np.concatenate([before, entry.tokens]) if len(before) else entry.tokens
        sent = max(at, conversation.start or 0.0) if turn == 0 else at + self._pause()
        request = Request(conversation, turn, prompt, entry.reply, entry.recorded, sent)
        if sent > self.now:
            heappush(self._later, (sent, conversation.number, request))
        else:
            self._waiting.append(request)

    def _pause(self) -> float:
        return self._rng.exponential(self.limits.think) if self.limits.think else 0.0

    def _arrive(self) -> None:
        while self._later and self._later[0][0] <= self.now:
            self._waiting.append(heappop(self._later)[2])

    # -- the server ----------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Start waiting requests; whether one could have been started but got no slot."""
        budget = self.limits.prefill_tokens
        while self._waiting and len(self._running) < self.limits.running and budget > 0:
            request = self._waiting[0]
            lease = self.cache.acquire(request.prompt, request.reply)
            if lease is None:
                return True
            self._waiting.popleft()
            request.lease = lease
            self._stalled = 0
            budget -= len(request.prompt) - lease.hit_tokens
            self._prefill(request, lease)
        return False

    def _prefill(self, request: Request, lease: Lease) -> None:
        request.replayed = self.cache.load(lease)
        self._spend(self.executor.drain())
        at, length = lease.hit_tokens, len(request.prompt)
        for end in sorted({*lease.boundaries, length}):
            if end == length and end - at == 1 and at > 0 and end not in lease.boundaries:
                break  # the last token runs with the next decode step
            self._spend(self.executor.prefill(request, at, end))
            at = end
            if end in lease.boundaries:
                self.cache.checkpoint(lease, end, self.executor.keys(request, end))
                self._spend(self.executor.drain())
        else:
            request.produced, request.first = 1, self.now
        request.last = self.now
        self._running.append(request)
        self.run.peak = max(self.run.peak, len(self._running))
        self._end_requests()

    def _steps(self, blocked: bool) -> int:
        """Decode steps until something else can happen."""
        steps = min(request.reply - request.produced for request in self._running)
        free = len(self._running) < self.limits.running
        if self._later and free:
            return min(steps, 8)
        if self._waiting and free and (not blocked or self.cache.tiers.moving):
            return 1
        return steps

    def _decode(self, steps: int) -> None:
        start = self.now
        seconds = self.executor.decode(self._running, steps)
        ends = start + np.cumsum(seconds)
        firsts = []
        for request in self._running:
            if request.produced:
                firsts.append(start - request.last + seconds[0])
            else:
                request.first = float(ends[0])
            request.produced += steps
            request.last = float(ends[-1])
        if firsts:
            self.run.gaps.append((np.array(firsts), 1))
        if steps > 1:
            self.run.gaps.append((seconds[1:], len(self._running)))
        self.now = float(ends[-1])
        self.executor.advance(self.now)
        self._end_requests()

    def _end_requests(self) -> None:
        ended = [request for request in self._running if request.produced >= request.reply]
        if not ended:
            return
        self._running = [request for request in self._running if request.produced < request.reply]
        for request in ended:
            self._end(request)

    def _end(self, request: Request) -> None:
        lease = request.lease
        assert lease is not None, "a running request holds a lease"
        output = self.executor.output(request)
        kept = len(request.prompt) + request.produced - 1
        self.cache.finish(lease, output[:-1], self.executor.keys(request, kept))
        self._spend(self.executor.drain())
        self.executor.close(request)
        self.run.served.append(
            Served(
                request.conversation.number,
                request.turn,
                len(request.prompt),
                lease.hit_tokens,
                lease.tier,
                request.replayed,
                request.produced,
                request.sent,
                request.first,
                request.last,
            )
        )
        if request.turn + 1 < len(request.conversation.turns):
            history = np.concatenate([request.prompt, output])
            self._send(request.conversation, request.turn + 1, history, request.last)
        else:
            self._open -= 1

    def _wait(self) -> None:
        """Nothing runs and nothing can start: transfers have to end first."""
        before = self.cache.tiers.native.free
        self.cache.settle()
        self._spend(self.executor.drain())
        self._stalled += 1
        if self.cache.tiers.native.free == before and self._stalled > 2:
            raise NumericError(
                "nothing runs, yet no native slot can be freed for a waiting request",
                free=self.cache.tiers.native.free,
                cached=len(self.cache.tiers.native.cached),
            )

    def _spend(self, seconds: float) -> None:
        self.now += seconds
        self.executor.advance(self.now)
