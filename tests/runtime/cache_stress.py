"""Random submit, step, abort, finish and evict operations against a prefix cache, with every content checked.

`FakeStore` keeps, in place of numbers, the prefix that each slot stands for. Its transfers read their source when they
end, not when they begin, so a source that is reused too early shows as a wrong prefix.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.prefix_cache import Lease, PrefixCache
from hybridstate.runtime.radix import Keys, Tokens
from hybridstate.runtime.tiers import Finished, Prefix, Tier, Transfer


@dataclass(frozen=True)
class TokenKeys:
    """Attention keys that are the tokens themselves."""

    tokens: Tokens

    def cut(self, start: int, end: int) -> "TokenKeys":
        return TokenKeys(self.tokens[start:end])


class Ends(Protocol):
    """A store whose transfers end when told."""

    def end(self, transfer: "Pending") -> None: ...


@dataclass(eq=False)
class Pending:
    """A transfer that ends when told."""

    store: Ends
    source: int
    target: int
    ended: bool = False

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.store.end(self)


@dataclass
class FakeStore:
    """Slots hold the bytes of a prefix; freed ones hold None."""

    delayed: bool = True
    native: dict[int, bytes | None] = field(default_factory=dict)
    packed: dict[int, bytes | None] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)
    loads: int = 0
    bad: set[int] = field(default_factory=set)
    """Native slots that are not finite."""

    def copy(self, source: int, target: int) -> None:
        assert self.native[source] is not None, f"copied from free slot {source}"
        self.native[target] = self.native[source]

    def pack(self, source: int, target: int, *, aside: bool) -> Transfer:
        assert self.native[source] is not None, f"packed free slot {source}"
        if aside and self.delayed:
            self.pending.append(Pending(self, source, target))
            return self.pending[-1]
        self.packed[target] = self.native[source]
        return Finished()

    def load(self, source: int, target: int, prefix: Prefix) -> int:
        self.loads += 1
        assert self.packed[source] is not None, f"loaded free slot {source}"
        self.native[target] = self.packed[source]
        return min(4, len(prefix.tokens))

    def finite(self, slot: int) -> bool:
        return slot not in self.bad

    def freed(self, slot: int, *, packed: bool) -> None:
        (self.packed if packed else self.native)[slot] = None
        if not packed:
            self.bad.discard(slot)

    def end(self, transfer: Pending) -> None:
        """End all transfers up to this one, in order."""
        while not transfer.ended:
            first = self.pending.pop(0)
            assert self.native[first.source] is not None, "the source went before the transfer"
            self.packed[first.target] = self.native[first.source]
            first.ended = True


@dataclass(eq=False)
class Running:
    """One request of the stress run."""

    lease: Lease
    reply: Tokens
    position: int = 0
    todo: list[int] = field(default_factory=list)


class Stress:
    """A cache and the requests that run on it.

    Args:
        seed: of all choices.
        pools, admission: of the cache.
        delayed: whether transfers end later, in random steps.
        limit: requests at once.
        vocabulary, longest: of the prompts.
    """

    def __init__(
        self,
        seed: int,
        pools: Pools,
        admission: Admission | None = None,
        *,
        delayed: bool = True,
        limit: int = 6,
        vocabulary: int = 5,
        longest: int = 40,
    ) -> None:
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.store = FakeStore(delayed=delayed)
        self.cache = PrefixCache(pools, self.store, admission or Admission(shortest=1))
        self.limit = limit
        self.vocabulary = vocabulary
        self.longest = longest
        self.running: list[Running] = []
        self.seen: list[Tokens] = []
        self.while_moving = 0
        """Requests that started from a state whose demotion was under way."""
        self.done = dict.fromkeys(
            ("submit", "wait", "step", "finish", "abort", "poll", "evict", "clear", "transfer"), 0
        )

    def operate(self) -> None:
        """One random operation, and the invariants after it."""
        draw = self.rng.random()
        if draw < 0.3:
            self._submit()
        elif draw < 0.75 and self.running:
            self._step(self._any())
        elif draw < 0.82 and self.running:
            self._abort(self._any())
        elif draw < 0.9:
            self._count("poll", self.cache.poll)
        elif draw < 0.93:
            slots = int(self.rng.integers(1, 4))
            self._count("evict", lambda: self.cache.tiers.reclaim(slots))
        elif draw < 0.931:
            self._count("clear", self.cache.clear)
        else:
            number = int(self.rng.integers(1 << 30))  # drawn on every rank, whatever is pending
            if self.store.pending:
                chosen = self.store.pending[number % len(self.store.pending)]
                self._count("transfer", lambda: self.store.end(chosen))
        self.cache.check()

    def drain(self) -> None:
        """Finish every request, drop every state: nothing may be left."""
        while self.running:
            self._step(self.running[-1])
        self.cache.clear()
        self.cache.audit()
        tiers = self.cache.tiers
        assert (tiers.native.free, tiers.packed.free) == (tiers.native.size, tiers.packed.size)
        assert self.cache.tree.size == 0
        assert self.cache.kv.cached == self.cache.kv.active == 0
        held = [s for s in (*self.store.native.values(), *self.store.packed.values()) if s]
        assert not held, f"{len(held)} slots were never freed"

    def _count(self, name: str, action: Callable[[], object]) -> None:
        action()
        self.done[name] += 1

    def _any(self) -> Running:
        return self.running[int(self.rng.integers(len(self.running)))]

    def _prompt(self) -> Tokens:
        """New, or a known sequence that is repeated, cut or extended."""
        fresh = self.rng.integers(0, self.vocabulary, int(self.rng.integers(1, 12)))
        if not self.seen or self.rng.random() < 0.2:
            return fresh.astype(np.int32)
        base = self.seen[int(self.rng.integers(len(self.seen)))]
        kind = self.rng.random()
        if kind < 0.2:
            return base
        if kind < 0.5:
            base = base[: int(self.rng.integers(1, len(base) + 1))]
        return np.concatenate([base, fresh]).astype(np.int32)[: self.longest]

    def _submit(self) -> None:
        if len(self.running) >= self.limit:
            return
        tokens = self._prompt()
        reply = self.rng.integers(0, self.vocabulary, int(self.rng.integers(0, 8)))
        lease = self.cache.acquire(tokens, len(reply))
        if lease is None:
            self.done["wait"] += 1
            return
        assert lease.hit_tokens < len(tokens), "one token has to run"
        self.done["submit"] += 1
        self.while_moving += lease.hit is not None and lease.hit.tier is Tier.DEMOTING
        self.running.append(Running(lease, reply.astype(np.int32), todo=[*lease.boundaries]))

    def _step(self, request: Running) -> None:
        """Load, or run to the next boundary, or finish."""
        lease, slot = request.lease, request.lease.slot
        self.done["step"] += 1
        if request.position == 0 and lease.hit_tokens and not lease.loaded:
            kv = self.cache.prefix(lease).kv
            loads = self.store.loads
            self.cache.load(lease)
            assert self.store.loads - loads == (lease.tier == "compressed"), (
                "another tier than said"
            )
            request.position = lease.hit_tokens
            expected = lease.tokens[: lease.hit_tokens]
            assert self.store.native[slot] == expected.tobytes(), "a hit gave another prefix"
            joined = np.concatenate([part.tokens for part in kv if isinstance(part, TokenKeys)])
            assert np.array_equal(joined, expected), "attention keys of another prefix"
            return
        if request.todo:
            request.position = request.todo.pop(0)
            self.store.native[slot] = lease.tokens[: request.position].tobytes()
            if self.rng.random() < 0.03:
                self.store.bad.add(slot)
            kept = self.cache.checkpoint(
                lease, request.position, self._keys(lease.tokens[: request.position])
            )
            assert kept != "packed" or slot not in self.store.bad
            self.store.bad.discard(slot)
            return
        whole = np.concatenate([lease.tokens, request.reply])
        self.store.native[slot] = whole.tobytes()
        finite = bool(self.rng.random() >= 0.03)
        if not finite:
            self.store.bad.add(slot)
        outcome = self.cache.finish(lease, request.reply, self._keys(whole))
        assert outcome not in ("packed", "spilled") or finite, "a state that is not finite was kept"
        self.running.remove(request)
        self.done["finish"] += 1
        self.seen.append(whole)
        del self.seen[:-30]

    def _abort(self, request: Running) -> None:
        self.store.native[request.lease.slot] = b"aborted"
        self.cache.abort(request.lease)
        self.running.remove(request)
        self.done["abort"] += 1

    def _keys(self, tokens: Tokens) -> Keys:
        return TokenKeys(tokens)
