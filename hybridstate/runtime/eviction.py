"""The order in which cached states go: least recently used, leaves first, or cheapest to recompute.

One order covers both tiers. Every order keeps a second index of the dense states only, with the same positions, so that
the oldest dense state is found without passing every compressed one (DASC B.2). Changing the representation is not an
access: `demoted` moves a state out of the dense index and nowhere else.

All decisions follow from the sequence of calls, so ranks that make the same calls choose the same victims.
"""

from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final, Protocol

from hybridstate.errors import UsageError
from hybridstate.runtime.tiers import CachedState, Tier

POLICIES: Final = ("lru", "leaf-lru", "cost")

Test = Callable[[CachedState], bool]


class EvictionOrder(Protocol):
    """Which of the cached states goes next."""

    def add(self, state: CachedState) -> None:
        """A new state, the most recent one."""
        ...

    def touch(self, state: CachedState) -> None:
        """The state was used; its ancestors were not."""
        ...

    def demoted(self, state: CachedState) -> None:
        """The state is no longer dense; its position stays."""
        ...

    def remove(self, state: CachedState) -> None:
        """The state is gone."""
        ...

    def victim(self, allowed: Test, *, dense: bool = False) -> CachedState | None:
        """The first state that `allowed` accepts, among all or only dense ones; None if there is none."""
        ...


def eviction_order(name: str, native_bytes: int = 1, packed_bytes: int = 1) -> EvictionOrder:
    """The order called `name`; bytes of one slot of each pool, which only `cost` uses.

    Raises:
        UsageError: no such order.
    """
    if name == "lru":
        return LeastRecent()
    if name == "leaf-lru":
        return LeavesFirst()
    if name == "cost":
        return CheapestFirst(native_bytes, packed_bytes)
    raise UsageError(
        f"unknown eviction policy {name!r}", hint=f"choose from {', '.join(POLICIES)}", found=name
    )


class LeastRecent:
    """Least recently used first; a hit refreshes the state it used and no ancestor."""

    def __init__(self) -> None:
        self._all: OrderedDict[CachedState, None] = OrderedDict()
        self._dense: OrderedDict[CachedState, None] = OrderedDict()

    def add(self, state: CachedState) -> None:
        """See `EvictionOrder`."""
        self._all[state] = None
        if state.tier is Tier.DENSE:
            self._dense[state] = None

    def touch(self, state: CachedState) -> None:
        """See `EvictionOrder`."""
        self._all.move_to_end(state)
        if state in self._dense:
            self._dense.move_to_end(state)

    def demoted(self, state: CachedState) -> None:
        """See `EvictionOrder`."""
        self._dense.pop(state, None)

    def remove(self, state: CachedState) -> None:
        """See `EvictionOrder`."""
        del self._all[state]
        self._dense.pop(state, None)

    def victim(self, allowed: Test, *, dense: bool = False) -> CachedState | None:
        """See `EvictionOrder`."""
        return next((s for s in (self._dense if dense else self._all) if allowed(s)), None)


class LeavesFirst(LeastRecent):
    """Least recently used among the prefixes that no other one extends; then among all."""

    def victim(self, allowed: Test, *, dense: bool = False) -> CachedState | None:
        """See `EvictionOrder`."""
        leaf = super().victim(lambda s: not s.node.children and allowed(s), dense=dense)
        return leaf if leaf is not None else super().victim(allowed, dense=dense)


class CheapestFirst:
    """Fewest tokens to recompute per byte first, aged by recency (GreedyDual-Size).

    A state's priority is the clock at its last use plus the tokens between it and the nearest cached ancestor, per
    byte of its slot; the clock is the priority of the last state that went. A state that is not used again is
    overtaken by every new one sooner or later, the sooner the less it saves.
    """

    def __init__(self, native_bytes: int, packed_bytes: int) -> None:
        self._bytes = {Tier.DENSE: native_bytes, Tier.COMPRESSED: packed_bytes}
        self._clock = 0.0
        self._calls = 0
        self._entry: dict[CachedState, tuple[float, int, float]] = {}
        """State -> (priority, order of the call, clock at its last use)."""
        self._all: list[tuple[float, int, CachedState]] = []
        self._dense: list[tuple[float, int, CachedState]] = []

    def add(self, state: CachedState) -> None:
        """See `EvictionOrder`; the nearest states below save only what lies behind this one from here on."""
        self._push(state, self._clock)
        below = list(state.node.children.values())
        while below:
            node = below.pop()
            entry = self._entry.get(node.state)
            if entry is None:
                below.extend(node.children.values())
            else:
                self._push(node.state, entry[2])

    def touch(self, state: CachedState) -> None:
        """See `EvictionOrder`."""
        self._push(state, self._clock)

    def demoted(self, state: CachedState) -> None:
        """See `EvictionOrder`; the clock at the last use stays, the bytes are those of the new slot."""
        self._push(state, self._entry[state][2])

    def remove(self, state: CachedState) -> None:
        """See `EvictionOrder`."""
        self._clock = max(self._clock, self._entry.pop(state)[0])

    def victim(self, allowed: Test, *, dense: bool = False) -> CachedState | None:
        """See `EvictionOrder`."""
        heap = self._dense if dense else self._all
        refused: list[tuple[float, int, CachedState]] = []
        found = None
        while heap and found is None:
            entry = heappop(heap)
            priority, order, state = entry
            current = self._entry.get(state)
            if current is None or current[:2] != (priority, order):
                continue  # a later push replaced it
            if dense and state.tier is not Tier.DENSE:
                continue
            if self._priority(state, current[2]) > priority:
                self._push(state, current[2])  # an ancestor went since: it saves more now
                continue
            refused.append(entry)
            if allowed(state):
                found = state
        for entry in refused:
            heappush(heap, entry)
        return found

    def _priority(self, state: CachedState, clock: float) -> float:
        ancestor = state.node.parent
        while ancestor is not None and ancestor.state is None:
            ancestor = ancestor.parent
        saved = state.node.depth - (0 if ancestor is None else ancestor.depth)
        size = self._bytes[Tier.DENSE if state.tier is Tier.DENSE else Tier.COMPRESSED]
        return clock + saved / size

    def _push(self, state: CachedState, clock: float) -> None:
        self._calls += 1
        priority = self._priority(state, clock)
        self._entry[state] = (priority, self._calls, clock)
        entry = (priority, self._calls, state)
        heappush(self._all, entry)
        if state.tier is Tier.DENSE:
            heappush(self._dense, entry)
        for heap in (self._all, self._dense):
            if len(heap) > 64 + 4 * len(self._entry):
                self._compact(heap)

    def _compact(self, heap: list[tuple[float, int, CachedState]]) -> None:
        """Drop replaced entries; a sorted list is a heap."""
        heap[:] = sorted(
            entry for entry in heap if self._entry.get(entry[2], (0.0, 0))[:2] == entry[:2]
        )
