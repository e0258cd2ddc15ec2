"""Several requests of a real model at once on pools that are too small, with transfers that end late and broken states.

Each finished reply is compared with a run without a cache. Freed slots are NaN, and a transfer reads its source when it
ends, so a source that is reused too early, a slot that is read too late or a broken state that somebody starts from
shows as a state that is not finite or as another reply.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hybridstate.errors import NumericError
from hybridstate.runtime.radix import Tokens
from hybridstate.runtime.tensor_store import TensorStore
from hybridstate.runtime.tiers import Tier, Transfer
from tests.runtime.cache_stress import Pending
from tests.runtime.cached_model import CachedModel, Request, differing, prompt

LONGEST = 24
"""Tokens of a prompt."""

BROKEN = (float("nan"), float("inf"), float("-inf"))


class LateStore(TensorStore):
    """Packs beside the computation read their source when they end: in order, when told."""

    pending: list[Pending]

    def pack(self, source: int, target: int, *, aside: bool) -> Transfer:
        if not aside:
            return super().pack(source, target, aside=False)
        self.pending = [*getattr(self, "pending", []), Pending(self, source, target)]
        return self.pending[-1]

    def end(self, transfer: Pending) -> None:
        """End all transfers up to this one."""
        while not transfer.ended:
            first = self.pending.pop(0)
            assert self.finite(first.source), "the source went before the transfer"
            super().pack(first.source, first.target, aside=False)
            first.ended = True


@dataclass
class Seen:
    """What a run met.

    Attributes:
        replies: compared with a run without a cache.
        while_moving: requests that started from a state whose demotion was under way.
        overtaken: of these, those whose transfer ended before they loaded.
        broken: states of running requests that were made not finite before they were offered to the cache.
        broken_known: of these, those whose prefix was cached already.
        stopped: requests that could not go on with a broken state.
    """

    replies: int = 0
    while_moving: int = 0
    overtaken: int = 0
    broken: int = 0
    broken_known: int = 0
    stopped: int = 0
    operations: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("submit", "wait", "step", "finish", "abort", "poll", "evict", "clear", "transfer"), 0
        )
    )


class ModelStress:
    """Random submit, step, abort, finish and evict operations.

    Args:
        engine: on a `LateStore`.
        seed: of all choices.
        limit: requests at once.
        breaking: share of the states offered to the cache that are broken before.
    """

    def __init__(
        self, engine: CachedModel, seed: int, *, limit: int = 4, breaking: float = 0.1
    ) -> None:
        assert isinstance(engine.store, LateStore)
        engine.store.pending = []
        self.engine, self.store, self.cache = engine, engine.store, engine.cache
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.limit = limit
        self.breaking = breaking
        self.seen = Seen()
        self.running: list[Request] = []
        self._broken: set[Request] = set()
        self._known: list[Tokens] = []

    def run(self, operations: int, progress: Callable[[int], None] = lambda _: None) -> Seen:
        """So many operations, each followed by an audit; then every request ends, and nothing may be left."""
        for number in range(operations):
            self._operate()
            self._audit()
            progress(number)
        while self.running:
            self._step(self.running[0])
            self._audit()
        self.cache.clear()
        self._audit()
        tiers = self.cache.tiers
        assert (tiers.native.free, tiers.packed.free) == (tiers.native.size, tiers.packed.size)
        assert self.cache.tree.size == 0
        refused = self.cache.counters.skipped_nonfinite
        assert refused == self.seen.broken - self.seen.broken_known, "other states were refused"
        return self.seen

    def _operate(self) -> None:
        draw, done = self.rng.random(), self.seen.operations
        if draw < 0.25:
            self._submit()
        elif draw < 0.83 and self.running:
            self._step(self._any())
        elif draw < 0.86 and self.running:
            request = self._any()
            self.cache.abort(request.lease)
            self._ended(request)
            done["abort"] += 1
        elif draw < 0.9:
            self.cache.poll()
            done["poll"] += 1
        elif draw < 0.94:
            self.cache.tiers.reclaim(int(self.rng.integers(1, 4)))
            done["evict"] += 1
        elif draw < 0.942:
            self.cache.clear()
            done["clear"] += 1
        elif self.store.pending:
            self.store.end(self.store.pending[int(self.rng.integers(len(self.store.pending)))])
            done["transfer"] += 1

    def _audit(self) -> None:
        self.cache.audit()
        for node in self.cache.tree:
            if node.state is not None and node.state.native is not None:
                assert self.store.finite(node.state.native), "a broken state is cached"

    def _any(self) -> Request:
        return self.running[int(self.rng.integers(len(self.running)))]

    def _submit(self) -> None:
        if len(self.running) >= self.limit:
            return
        request = self.engine.start(self._prompt(), int(self.rng.integers(1, 4)))
        if request is None:
            self.seen.operations["wait"] += 1
            return
        self.seen.operations["submit"] += 1
        self.running.append(request)
        self.seen.while_moving += self._moving(request)

    def _prompt(self) -> Tokens:
        """New, of a known sequence, or one that starts with a state being demoted."""
        tokens = prompt(self.rng, self._known)
        moving = [n for n in self.cache.tree if n.state and n.state.tier is Tier.DEMOTING]
        if not moving or self.rng.random() < 0.5:
            return tokens
        node = moving[int(self.rng.integers(len(moving)))]
        return np.concatenate([*(part.tokens for part in node.path()), tokens])[:LONGEST]

    def _moving(self, request: Request) -> bool:
        """Whether the state it starts from is being demoted; its dense slot stays valid until it has loaded."""
        hit = request.lease.hit
        return hit is not None and hit.tier is Tier.DEMOTING

    def _step(self, request: Request) -> None:
        self.seen.operations["step"] += 1
        if request.kv is None and self._moving(request):
            native = request.lease.hit.native  # type: ignore[union-attr]
            self.seen.overtaken += native not in {late.source for late in self.store.pending}
        breaks = request.offers and bool(self.rng.random() < self.breaking)
        if breaks and request not in self._broken:
            self._break(request.lease.slot)
            self._broken.add(request)
        broken = request.offers and request in self._broken
        self.seen.broken += broken
        try:
            reply, outcome = self.engine.step(request)
        except NumericError:
            assert request in self._broken, "a state of another request is not finite"
            self.cache.abort(request.lease)
            self._ended(request)
            self.seen.stopped += 1
            return
        if broken:
            assert outcome in ("non-finite", "known"), f"a broken state was {outcome}"
            self.seen.broken_known += outcome == "known"
        if reply is not None:
            self._compare(request, reply)
            self._ended(request)

    def _break(self, slot: int) -> None:
        """One number of the slot, in a random layer's state or window."""
        pool = self.store.pool
        tensors = (*pool.states, *pool.conv)
        tensor = tensors[int(self.rng.integers(len(tensors)))]
        place = tuple(int(self.rng.integers(size)) for size in tensor.shape[1:])
        tensor[(slot, *place)] = BROKEN[int(self.rng.integers(len(BROKEN)))]

    def _compare(self, request: Request, reply: list[int]) -> None:
        tokens = request.lease.tokens
        place = differing(reply, self.engine.alone(tokens, request.reply))
        assert place is None, f"the reply to {tokens.tolist()} differs at token {place}"
        whole = np.concatenate([tokens, np.array(reply[:-1], np.int32)])
        self._known = [*self._known, whole][-12:]
        self.seen.replies += 1
        self.seen.operations["finish"] += 1

    def _ended(self, request: Request) -> None:
        self.running.remove(request)
        self._broken.discard(request)
