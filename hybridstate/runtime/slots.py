"""Numbers of the slots of one pool, and who holds each: `free + cached + active == size`, always.

Slot 0 is the allocator's own, as in serving engines (DASC C.1); usable slots are 1 to `size`. The lowest free number is
handed out first, so ranks that make the same calls hold the same slots.
"""

from heapq import heapify, heappop, heappush
from typing import Final

from hybridstate.errors import NumericError, UsageError

RESERVED: Final = 1
"""Slots that exist and are never handed out."""


class SlotPool:
    """Slots 1 to `size`.

    Attributes:
        name: how messages call the pool.
        active: slots of running requests.
        cached: slots of cached states, those being demoted included.
    """

    def __init__(self, name: str, size: int) -> None:
        if size < 0:
            raise UsageError(f"the {name} pool cannot have {size} slots")
        self.name = name
        self.size = size
        self.active: set[int] = set()
        self.cached: set[int] = set()
        self._free = list(range(RESERVED, size + RESERVED))
        heapify(self._free)

    @property
    def free(self) -> int:
        """Free slots."""
        return len(self._free)

    def take_active(self) -> int | None:
        """A slot for a running request, None if none is free."""
        return self._take(self.active)

    def take_cached(self) -> int | None:
        """A slot for a cached state, None if none is free."""
        return self._take(self.cached)

    def keep(self, slot: int) -> None:
        """A running request's slot becomes a cached one, nothing is copied."""
        self._drop(self.active, slot)
        self.cached.add(slot)

    def free_active(self, slot: int) -> None:
        """A running request gives its slot back."""
        self._drop(self.active, slot)
        heappush(self._free, slot)

    def free_cached(self, slot: int) -> None:
        """A cached state is gone."""
        self._drop(self.cached, slot)
        heappush(self._free, slot)

    def check(self) -> None:
        """Every slot has exactly one owner.

        Raises:
            NumericError: slots are lost, or counted twice.
        """
        held = self.free + len(self.cached) + len(self.active)
        if held != self.size:
            raise NumericError(
                f"{self.name} pool: {self.free} free + {len(self.cached)} cached + "
                f"{len(self.active)} active slots of {self.size}",
                free=self.free,
                cached=len(self.cached),
                active=len(self.active),
                expected=self.size,
            )

    def _take(self, owner: set[int]) -> int | None:
        if not self._free:
            return None
        slot = heappop(self._free)
        owner.add(slot)
        return slot

    def _drop(self, owner: set[int], slot: int) -> None:
        if slot not in owner:
            raise NumericError(f"{self.name} pool: slot {slot} is not held there", slot=slot)
        owner.remove(slot)


class TokenPool:
    """Tokens of attention keys: `free + cached + active == size`.

    Args:
        size: tokens that fit, None where they are outside of the budget.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.cached = 0
        self.active = 0
        self._used = 0
        self.peak = 0

    @property
    def free(self) -> int | None:
        """Free tokens, None without a limit."""
        return None if self.size is None else self.size - self._used

    def short(self, tokens: int) -> int:
        """Tokens that are missing for a request of `tokens`."""
        return 0 if self.size is None else max(0, tokens - (self.size - self._used))

    def reserve(self, tokens: int) -> None:
        """Take free tokens for a running request."""
        self.active += tokens
        self._used += tokens
        self.peak = max(self.peak, self._used)

    def keep(self, tokens: int) -> None:
        """A running request's tokens become cached ones."""
        self.active -= tokens
        self.cached += tokens

    def free_active(self, tokens: int) -> None:
        """A running request gives tokens back."""
        self.active -= tokens
        self._used -= tokens

    def free_cached(self, tokens: int) -> None:
        """Cached tokens are gone."""
        self.cached -= tokens
        self._used -= tokens

    def check(self) -> None:
        """Every token has exactly one owner.

        Raises:
            NumericError: a count is negative, or they do not add up.
        """
        fits = self.size is None or self._used <= self.size
        if min(self.cached, self.active) < 0 or self.cached + self.active != self._used or not fits:
            raise NumericError(
                f"KV tokens: {self.cached} cached + {self.active} active, {self._used} used of {self.size}",
                cached=self.cached,
                active=self.active,
                expected=self._used,
            )
