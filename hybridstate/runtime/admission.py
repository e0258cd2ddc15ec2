"""What a prefix cache is told beforehand: its pools, and which prefixes it keeps; and what it counts."""

from dataclasses import dataclass, fields

from hybridstate.errors import UsageError
from hybridstate.runtime.eviction import POLICIES


@dataclass(frozen=True, slots=True)
class Admission:
    """Which prefixes of a request are kept.

    Attributes:
        prompt: tokens before the end of the prompt, one state each. A match covers at most length - 1 tokens, since one
            must run; the state one token before the end therefore serves whatever the state at the end does, and an
            identical prompt too. `(0, 1)` keeps both.
        junctions: where a prompt leaves what is known.
        every: tokens between periodic states, 0 for none.
        finished: the state behind the last token of a finished request.
        shortest: shorter prefixes are not kept.
    """

    prompt: tuple[int, ...] = (1,)
    junctions: bool = True
    every: int = 0
    finished: bool = True
    shortest: int = 16

    def boundaries(self, length: int, covered: int, known: int) -> tuple[int, ...]:
        """Positions in a prompt at which a state is kept, ascending.

        Args:
            length: tokens of the prompt.
            covered: those of the state it starts from.
            known: those that another request had before.
        """
        found = {length - back for back in self.prompt}
        if self.junctions and known < length:
            found.add(known)
        if self.every:
            found.update(range(self.every, length, self.every))
        first = max(covered + 1, self.shortest)
        return tuple(sorted(position for position in found if first <= position <= length))


@dataclass(frozen=True, slots=True)
class Pools:
    """Sizes of the pools and the rules that depend on them.

    Attributes:
        native, packed: usable slots; no packed ones is the dense baseline.
        kv_tokens: attention tokens that fit, None where they are outside of the budget.
        native_bytes, packed_bytes: of one slot; only the cost-aware order uses them.
        watermark: free native slots below which `poll` reclaims.
        spill: whether native slots may keep cached states when the compressed pool is full. Without a compressed pool
            they always do.
        hold: whether a state stays locked while the request that started from it runs.
        policy: order of eviction.
    """

    native: int
    packed: int = 0
    kv_tokens: int | None = None
    native_bytes: int = 1
    packed_bytes: int = 1
    watermark: int = 0
    spill: bool = True
    hold: bool = True
    policy: str = "lru"

    def __post_init__(self) -> None:
        if self.native < 1:
            raise UsageError("a prefix cache needs at least one native slot", found=self.native)
        if self.policy not in POLICIES:
            raise UsageError(
                f"unknown eviction policy {self.policy!r}",
                hint=f"choose from {', '.join(POLICIES)}",
                found=self.policy,
            )

    @property
    def must_pack(self) -> bool:
        """A cached state may lie in the compressed pool only."""
        return self.packed > 0 and not self.spill


@dataclass(slots=True)
class Counters:
    """What happened so far; tokens and events.

    `packed`, `spilled`, `copied` are new states by where they went: the compressed pool, the native pool without a
    copy, the native pool by a copy. `known` existed already. `waits` counts refused `acquire` calls.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hits_dense: int = 0
    hits_compressed: int = 0
    tokens_dense: int = 0
    tokens_compressed: int = 0
    replayed_tokens: int = 0
    packed: int = 0
    spilled: int = 0
    copied: int = 0
    known: int = 0
    skipped_full: int = 0
    skipped_nonfinite: int = 0
    demotions: int = 0
    evictions_dense: int = 0
    evictions_compressed: int = 0
    waits: int = 0
    aborts: int = 0

    def to_json(self) -> dict[str, int]:
        """Every counter by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}
