"""What a cached prefix holds, and what the cache asks of the memory behind its slot numbers.

    dense        a native slot holds the whole state
    demoting     the same, and a transfer into a compressed slot is under way; the native slot stays valid
    compressed   only the compressed slot is left

`Store` is that memory: tensors (`tensor_store.TensorStore`), a clock (`bench.cost_model`), or nothing at all
(`CountingStore`). `Transfer` is a copy on its way there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from hybridstate.runtime.radix import Keys, Node, Tokens


class Tier(Enum):
    """Representation of a cached state."""

    DENSE = "dense"
    DEMOTING = "demoting"
    COMPRESSED = "compressed"


@dataclass(eq=False, slots=True)
class CachedState:
    """One cached prefix.

    Attributes:
        node: where it ends.
        tier: its representation.
        native, packed: slots it holds, None without one.
        readers: loads under way; a demotion is not committed before they are done.
        users: running requests that started from it; it is not reclaimed meanwhile.
    """

    node: Node
    tier: Tier
    native: int | None = None
    packed: int | None = None
    readers: int = 0
    users: int = 0

    @property
    def eligible(self) -> bool:
        """Whether reclamation may take it."""
        return self.readers == 0 and self.users == 0 and self.tier is not Tier.DEMOTING


class Transfer(Protocol):
    """A copy that may still be under way; its source may not change until it is done."""

    def done(self) -> bool:
        """Whether the target holds everything."""
        ...

    def wait(self) -> None:
        """Return once it does."""
        ...


class Finished:
    """A transfer that ended before it was returned: what a CPU does."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a load may need beside the stored bytes.

    Attributes:
        tokens: of the cached prefix.
        kv: attention keys of consecutive parts of it, in order; None entries where the engine keeps them.
    """

    tokens: Tokens
    kv: Sequence[Keys | None]


class Store(Protocol):
    """The memory of both pools. Calls on one thread, in the order of the cache's decisions."""

    def copy(self, source: int, target: int) -> None:
        """Native slot to native slot, bit for bit; the source may change after the return."""
        ...

    def pack(self, source: int, target: int, *, aside: bool) -> Transfer:
        """Native slot to compressed slot.

        `aside` runs beside the computation, and the source stays as it is until the transfer is done. Otherwise the
        copy is ordered before everything that the engine does later, and its transfer is done.
        """
        ...

    def load(self, source: int, target: int, prefix: Prefix) -> int:
        """Compressed slot to native slot, omitted units zero-filled or replayed; tokens that were replayed."""
        ...

    def finite(self, slot: int) -> bool:
        """Whether a native slot holds finite numbers only."""
        ...

    def freed(self, slot: int, *, packed: bool) -> None:
        """The slot belongs to nobody from here on."""
        ...


@dataclass
class CountingStore:
    """A store without memory; `pack` is done at once. Counts the calls.

    Attributes:
        replay_tokens: window of a replay at a load, 0 for none.
        calls: number of calls by name.
    """

    replay_tokens: int = 0
    calls: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("copy", "pack", "load", "freed"), 0)
    )

    def copy(self, source: int, target: int) -> None:
        """Counted."""
        self.calls["copy"] += 1

    def pack(self, source: int, target: int, *, aside: bool) -> Transfer:
        """Counted; done."""
        self.calls["pack"] += 1
        return Finished()

    def load(self, source: int, target: int, prefix: Prefix) -> int:
        """Counted; replays as many tokens as the window and the prefix hold."""
        self.calls["load"] += 1
        return min(self.replay_tokens, len(prefix.tokens))

    def finite(self, slot: int) -> bool:
        """There are no numbers."""
        return True

    def freed(self, slot: int, *, packed: bool) -> None:
        """Counted."""
        self.calls["freed"] += 1
