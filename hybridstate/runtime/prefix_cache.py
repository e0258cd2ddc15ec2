"""The two-tier prefix cache (DASC B.2): which prefix owns which slot of which pool, and what goes when one is full.

A native pool is shared by running requests and dense cached states; a compressed pool holds packed ones. A request
lives through `acquire` (match, lock, slot), `load` (copy on write, or unpack), `checkpoint` at each of its boundaries,
then `finish` or `abort`. The engine calls `poll` between steps.

Insertion is compressed-first: a free compressed slot if there is one; a finished request otherwise leaves its slot to
the tree without a copy. A hit never hands out the cached slot itself: a dense state is copied, a compressed one
unpacked, into a slot of the request's own.

The cache holds numbers, never tensors: those belong to the `Store`. Every decision follows from the calls and from how
many transfers `agree` says are done, so the ranks of a tensor-parallel engine decide alike; `digest` proves it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np

from hybridstate.errors import NumericError, UsageError
from hybridstate.runtime.admission import Admission, Counters, Pools
from hybridstate.runtime.radix import Keys, Node, RadixTree, Tokens
from hybridstate.runtime.reclaim import TwoTier
from hybridstate.runtime.slots import TokenPool
from hybridstate.runtime.tiers import CachedState, Prefix, Store, Tier

Outcome = Literal["packed", "spilled", "copied", "known", "full", "non-finite", "short"]
"""What became of a state: compressed, kept in the request's slot, copied to a native slot, already there, or not kept:
no room, not finite, too short."""

NOTHING: Final = np.empty(0, np.int32)


@dataclass(eq=False, slots=True)
class Lease:
    """A running request's hold on the cache.

    Attributes:
        tokens: its prompt.
        slot: its native slot; contents are undefined before `load`, and after it without a hit.
        hit: the state it starts from, None for a miss.
        hit_tokens: tokens that state covers.
        tier: `dense`, `compressed` or `miss`.
        boundaries: where prefill has to stop for `checkpoint`, ascending, at most the prompt's length.
        leaf: end of the prompt in the tree.
        reserved: attention tokens held beyond cached ones.
    """

    tokens: Tokens
    slot: int
    hit: CachedState | None
    hit_tokens: int
    tier: Literal["dense", "compressed", "miss"]
    boundaries: tuple[int, ...]
    leaf: Node
    reserved: int
    loaded: bool = False
    closed: bool = False


class PrefixCache:
    """Cached prefixes of one model.

    Args:
        pools: sizes and rules.
        store: the memory behind the slot numbers.
        admission: which prefixes are kept.
        agree: the number of finished transfers that all ranks have reached, from this rank's; the minimum over ranks.
    """

    def __init__(
        self,
        pools: Pools,
        store: Store,
        admission: Admission | None = None,
        agree: Callable[[int], int] = lambda done: done,
    ) -> None:
        self.pools = pools
        self.store = store
        self.admission = admission or Admission()
        self.counters = Counters()
        self.kv = TokenPool(pools.kv_tokens)
        # a method of this cache would hold it, and the slots of its store, in a cycle
        self.tree = RadixTree(partial(_left, self.kv))
        self.tiers = TwoTier(pools, store, self.counters, self.tree.prune, agree)

    # -- a request -----------------------------------------------------------------------------

    def acquire(self, tokens: Tokens, reply: int = 0) -> Lease | None:
        """Find the longest cached prefix and take a slot for a request of `tokens` and at most `reply` more.

        Returns None when the request has to wait: nothing that could be reclaimed now would give it a slot.

        Raises:
            UsageError: an empty prompt, or a request that could never fit.
        """
        if len(tokens) < 1:
            raise UsageError("a prompt has at least one token")
        if self.kv.size is not None and len(tokens) + reply > self.kv.size:
            raise UsageError(
                f"a request of {len(tokens)} + {reply} tokens does not fit into {self.kv.size} KV tokens",
                found=len(tokens) + reply,
                expected=self.kv.size,
            )
        match = self.tree.match(tokens, len(tokens) - 1)
        hit: CachedState | None = None if match.hit is None else match.hit.state
        slot = self._slot_beside(hit, len(tokens) + reply)
        if slot is None and not self.tiers.native.active and not self.tiers.moving:
            hit, slot = None, self._slot_beside(None, len(tokens) + reply)  # the hit is in the way
        if slot is None:
            self.counters.waits += 1
            return None
        covered = 0 if hit is None else hit.node.depth
        reserved = len(tokens) + reply - covered
        self.kv.reserve(reserved)
        leaf = self.tree.insert(tokens)
        leaf.pins += 1
        boundaries = self.admission.boundaries(len(tokens), covered, match.tokens)
        lease = Lease(tokens, slot, hit, covered, self._tier(hit), boundaries, leaf, reserved)
        self._count(lease)
        return lease

    def prefix(self, lease: Lease) -> Prefix:
        """Tokens and attention keys of the state that the request starts from."""
        nodes = [] if lease.hit is None else lease.hit.node.path()
        return Prefix(lease.tokens[: lease.hit_tokens], [node.kv for node in nodes])

    def load(self, lease: Lease) -> int:
        """Fill the request's slot from its hit: a dense state is copied, a compressed one unpacked.

        Returns:
            Tokens that were replayed.
        """
        _require_open(lease)
        state = lease.hit
        if state is None or lease.loaded:
            return 0
        replayed = 0
        if state.native is not None:
            self.store.copy(state.native, lease.slot)
        else:
            assert state.packed is not None, "a cached state holds a slot"
            replayed = self.store.load(state.packed, lease.slot, self.prefix(lease))
        self._read(lease)
        self.counters.replayed_tokens += replayed
        return replayed

    def checkpoint(self, lease: Lease, position: int, kv: Keys | None = None) -> Outcome:
        """Keep the state that the request's slot holds now, behind the first `position` tokens of its prompt.

        The request goes on, so this is a copy; a pool that has no room for it is no error.

        Args:
            kv: attention keys of the first `position` tokens.

        Raises:
            UsageError: the position is outside of what the request computes, or its hit was not loaded.
        """
        _require_open(lease)
        if not lease.hit_tokens < position <= len(lease.tokens):
            raise UsageError(f"no checkpoint after {position} of {len(lease.tokens)} tokens")
        if lease.hit is not None and not lease.loaded:
            raise UsageError("a checkpoint before the hit was loaded")
        node = self.tree.at(lease.leaf, position)
        if node.state is not None:
            return self._known(node.state)
        if not self.store.finite(lease.slot):
            return self._skipped("non-finite")
        state = self.tiers.copy_of(node, lease.slot)
        if state is None:
            return self._skipped("full")
        self._admit(lease, state, kv)
        if state.tier is Tier.COMPRESSED:
            self.counters.packed += 1
            return "packed"
        self.counters.copied += 1
        return "copied"

    def finish(
        self, lease: Lease, continuation: Tokens = NOTHING, kv: Keys | None = None
    ) -> Outcome | None:
        """End a request whose slot holds the state behind its prompt and `continuation`.

        Args:
            continuation: tokens that ran after the prompt: the reply without its last token.
            kv: attention keys of prompt and continuation.

        Returns:
            What became of the state; None where finished requests are not kept.
        """
        _require_open(lease)
        outcome: Outcome | None = None
        if self.admission.finished:
            node = self.tree.insert(continuation, lease.leaf)
            node.pins += 1  # reclaiming may walk past it
            outcome = self._finished(lease, node, kv)
            node.pins -= 1
            self.tree.prune(node)
        if lease.slot in self.tiers.native.active:
            self.tiers.release(lease.slot)
        self._close(lease)
        self.tiers.commit()
        return outcome

    def abort(self, lease: Lease) -> None:
        """End a request at any point; nothing more is kept."""
        _require_open(lease)
        self.counters.aborts += 1
        self.tiers.release(lease.slot)
        self._close(lease)

    # -- between steps -------------------------------------------------------------------------

    def poll(self) -> None:
        """Commit what is done, and reclaim below the watermark."""
        self.tiers.commit()
        if self.tiers.native.free < self.pools.watermark:
            self.tiers.reclaim(self.pools.watermark)

    def settle(self) -> None:
        """Wait for every transfer and commit it."""
        self.tiers.settle()

    def clear(self) -> None:
        """Drop every cached state that no request uses."""
        self.tiers.settle()
        while (state := self.tiers.order.victim(lambda s: s.eligible)) is not None:
            self.tiers.evict(state)
        self.tiers.sign()

    @property
    def digest(self) -> str:
        """Hash over the victims and slots of every reclamation so far; equal on all ranks."""
        return self.tiers.digest

    # -- invariants ----------------------------------------------------------------------------

    def check(self) -> None:
        """`free + cached + active == size` for each pool; cheap enough for every step.

        Raises:
            NumericError: a slot or a token is lost or counted twice.
        """
        self.tiers.native.check()
        self.tiers.packed.check()
        self.kv.check()

    def audit(self) -> None:
        """`check`, and that the tree owns exactly the cached slots and tokens.

        Raises:
            NumericError: it does not.
        """
        self.check()
        states = [node.state for node in self.tree if node.state is not None]
        native = [s.native for s in states if s.native is not None]
        packed = [s.packed for s in states if s.packed is not None]
        tokens = sum(len(node.tokens) for node in self.tree if node.filled)
        idle = [n.id for n in self.tree if n.state is None and not n.children and not n.pins]
        for name, found, expected in (
            ("native slots", sorted(native), sorted(self.tiers.native.cached)),
            (
                "compressed slots",
                sorted([*packed, *self.tiers.moving]),
                sorted(self.tiers.packed.cached),
            ),
            ("tokens", [tokens], [self.kv.cached]),
            ("useless nodes", idle, []),
        ):
            if found != expected:
                raise NumericError(f"the tree owns {name} {found}, the pools say {expected}")

    # -- inside --------------------------------------------------------------------------------

    def _slot_beside(self, hit: CachedState | None, tokens: int) -> int | None:
        """A native slot, and room for `tokens` beyond the hit, which stays locked if there is one."""
        if hit is not None:
            hit.readers += 1
            hit.users += 1
            tokens -= hit.node.depth
        slot = self.tiers.native_slot() if self._room_for(tokens) else None
        if slot is None and hit is not None:
            hit.readers -= 1
            hit.users -= 1
        return slot

    def _room_for(self, tokens: int) -> bool:
        """Evict leaves until `tokens` of attention keys fit; False if that cannot be."""
        fits = True
        while fits and self.kv.short(tokens):
            leaf = self.tiers.order.victim(_removable)
            if leaf is None:
                fits = False
            else:
                self.tiers.evict(leaf)
        self.tiers.sign()
        return fits

    def _tier(self, hit: CachedState | None) -> Literal["dense", "compressed", "miss"]:
        if hit is None:
            return "miss"
        return "compressed" if hit.tier is Tier.COMPRESSED else "dense"

    def _count(self, lease: Lease) -> None:
        counters = self.counters
        counters.requests += 1
        counters.prompt_tokens += len(lease.tokens)
        if lease.hit is None:
            return
        self.tiers.order.touch(lease.hit)
        if lease.tier == "compressed":
            counters.hits_compressed += 1
            counters.tokens_compressed += lease.hit_tokens
        else:
            counters.hits_dense += 1
            counters.tokens_dense += lease.hit_tokens

    def _finished(self, lease: Lease, node: Node, kv: Keys | None) -> Outcome:
        if node.depth < self.admission.shortest:
            return "short"
        if node.state is not None:
            return self._known(node.state)
        if not self.store.finite(lease.slot):
            return self._skipped("non-finite")
        state = self.tiers.owned(node, lease.slot)
        if state is None:
            return self._skipped("full")
        self._admit(lease, state, kv)
        if not self.tiers.packed.free:
            self.counters.spilled += 1
            return "spilled"
        self.counters.packed += 1
        self.tiers.demote(state)
        self.tiers.sign()
        return "packed"

    def _admit(self, lease: Lease, state: CachedState, kv: Keys | None) -> None:
        state.node.state = state
        self.tiers.order.add(state)
        for node in state.node.path():
            if not node.filled:
                node.filled = True
                node.kv = None if kv is None else kv.cut(node.start, node.depth)
                lease.reserved -= len(node.tokens)
                self.kv.keep(len(node.tokens))

    def _known(self, state: CachedState) -> Outcome:
        self.tiers.order.touch(state)
        self.counters.known += 1
        return "known"

    def _skipped(self, why: Literal["full", "non-finite"]) -> Outcome:
        if why == "full":
            self.counters.skipped_full += 1
        else:
            self.counters.skipped_nonfinite += 1
        return why

    def _read(self, lease: Lease) -> None:
        lease.loaded = True
        if lease.hit is not None:
            lease.hit.readers -= 1
            if not self.pools.hold:
                lease.hit.users -= 1

    def _close(self, lease: Lease) -> None:
        if not lease.loaded:
            self._read(lease)
        if lease.hit is not None and self.pools.hold:
            lease.hit.users -= 1
        lease.leaf.pins -= 1
        self.tree.prune(lease.leaf)
        self.kv.free_active(lease.reserved)
        lease.closed = True


def _left(kv: TokenPool, node: Node) -> None:
    """Give back the tokens of a node that left the tree."""
    if node.filled:
        kv.free_cached(len(node.tokens))


def _require_open(lease: Lease) -> None:
    if lease.closed:
        raise UsageError("the request has already ended")


def _removable(state: CachedState) -> bool:
    """Its tokens go with it."""
    return state.eligible and not state.node.children and not state.node.pins
