"""Two pools under one order: taking slots, demoting and evicting (DASC B.2, "pressure-driven reclamation").

    below the watermark, or for a request without a slot
        compressed slots are free       demote the oldest dense state
        both pools full, oldest dense   evict it
        both pools full, oldest packed  evict it and demote the oldest dense state into its slot
        no dense state is eligible      stop: a compressed slot alone frees no native one

A demotion is a transaction: the compressed slot is taken, the transfer runs beside the computation, and only `commit`
releases the native slot, in the order of the demotions, once the transfer is done and nobody reads the source.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from hybridstate.runtime.admission import Counters, Pools
from hybridstate.runtime.eviction import eviction_order
from hybridstate.runtime.radix import Node
from hybridstate.runtime.slots import SlotPool
from hybridstate.runtime.tiers import CachedState, Store, Tier, Transfer


@dataclass(frozen=True, slots=True)
class _Demotion:
    state: CachedState
    target: int
    transfer: Transfer


class TwoTier:
    """Slots of both pools and the cached states that hold them.

    Args:
        pools: sizes.
        store: the memory behind the slot numbers.
        counters: where events are counted.
        emptied: called with the node of an evicted state.
        agree: the number of finished transfers that all ranks have reached, from this rank's.
    """

    def __init__(
        self,
        pools: Pools,
        store: Store,
        counters: Counters,
        emptied: Callable[[Node], object],
        agree: Callable[[int], int],
    ) -> None:
        self.pools = pools
        self.store = store
        self.native = SlotPool("native", pools.native)
        self.packed = SlotPool("compressed", pools.packed)
        self.order = eviction_order(pools.policy, pools.native_bytes, pools.packed_bytes)
        self.reclamations = 0
        self._counters = counters
        self._emptied = emptied
        self._agree = agree
        self._moving: deque[_Demotion] = deque()
        self._trail: list[int] = []
        self._digest = bytes(32)

    @property
    def moving(self) -> tuple[int, ...]:
        """Compressed slots that demotions are filling."""
        return tuple(demotion.target for demotion in self._moving)

    @property
    def digest(self) -> str:
        """Hash over the victims and slots of every reclamation so far, in order; `exchange.agree` compares it."""
        return self._digest.hex()

    # -- slots ---------------------------------------------------------------------------------

    def native_slot(self) -> int | None:
        """A slot for a running request, None if none can be had now."""
        if not self.native.free:
            self.reclaim(max(1, self.pools.watermark))
        return self.native.take_active()

    def release(self, slot: int) -> None:
        """A running request gives its slot back."""
        self.native.free_active(slot)
        self.store.freed(slot, packed=False)

    def copy_of(self, node: Node, source: int) -> CachedState | None:
        """A copy of a running request's state: packed where a compressed slot is free, else dense above the watermark,
        else in the place of the oldest state; None where nothing may go."""
        full = not self.packed.free
        if self.pools.must_pack and full:
            self._evict_oldest(_compressed)
        elif (
            full and self.native.free <= self.pools.watermark and not self._evict_oldest(_eligible)
        ):
            return None
        packed = self.packed.take_cached()
        if packed is not None:
            self.store.pack(source, packed, aside=False)
            return CachedState(node, Tier.COMPRESSED, packed=packed)
        native = None if self.pools.must_pack else self.native.take_cached()
        if native is None:
            return None
        self.store.copy(source, native)
        return CachedState(node, Tier.DENSE, native=native)

    def owned(self, node: Node, slot: int) -> CachedState | None:
        """A finished request's slot as a cached state, without a copy; None where only packed states may stay and the
        compressed pool has no room."""
        if self.pools.must_pack and not self.packed.free and not self._evict_oldest(_compressed):
            return None
        self.native.keep(slot)
        return CachedState(node, Tier.DENSE, native=slot)

    # -- reclaiming ----------------------------------------------------------------------------

    def reclaim(self, slots: int) -> None:
        """Free native slots until `slots` are free or on their way."""
        self.commit()
        while self.native.free + len(self._moving) < slots:
            oldest = None if self.packed.free else self.order.victim(_eligible)
            if oldest is not None and oldest.tier is Tier.DENSE:
                self.evict(oldest)
                continue
            dense = self.order.victim(_eligible, dense=True)
            if dense is None or (oldest is None and not self.packed.free):
                break
            if oldest is not None:
                self.evict(oldest)
            self.demote(dense)
            self._counters.demotions += 1
        self.sign()
        self.commit()

    def demote(self, state: CachedState) -> None:
        """Begin to move a dense state into a free compressed slot; its place in the order stays."""
        target = self.packed.take_cached()
        assert target is not None, "demotion needs a free compressed slot"
        assert state.native is not None, "demotion needs a dense source"
        state.tier = Tier.DEMOTING
        self.order.demoted(state)
        transfer = self.store.pack(state.native, target, aside=True)
        self._moving.append(_Demotion(state, target, transfer))
        self._trail += [1, state.node.id, state.native, target]

    def evict(self, state: CachedState) -> None:
        """Drop a cached state and what only it kept in the tree."""
        self.order.remove(state)
        self._trail += [2, state.node.id, state.native or 0, state.packed or 0]
        if state.native is not None:
            self.native.free_cached(state.native)
            self.store.freed(state.native, packed=False)
            self._counters.evictions_dense += 1
        if state.packed is not None:
            self.packed.free_cached(state.packed)
            self.store.freed(state.packed, packed=True)
            self._counters.evictions_compressed += 1
        state.node.state = None
        self._emptied(state.node)

    def commit(self) -> int:
        """Release the sources of finished demotions, in order; how many."""
        if not self._moving:
            return 0
        done = 0
        for demotion in self._moving:
            if not demotion.transfer.done():
                break
            done += 1
        committed = 0
        for _ in range(self._agree(done)):
            state = self._moving[0].state
            if state.readers:
                break
            assert state.native is not None, "the source is valid until here"
            self.native.free_cached(state.native)
            self.store.freed(state.native, packed=False)
            state.native, state.packed = None, self._moving.popleft().target
            state.tier = Tier.COMPRESSED
            committed += 1
        return committed

    def settle(self) -> None:
        """Wait for every transfer and commit it."""
        for demotion in self._moving:
            demotion.transfer.wait()
        self.commit()

    def sign(self) -> None:
        """End a reclamation: add what it did, if anything, to the digest."""
        if self._trail:
            text = ",".join(map(str, self._trail)).encode()
            self._digest = sha256(self._digest + text).digest()
            self.reclamations += 1
            self._trail.clear()

    def _evict_oldest(self, allowed: Callable[[CachedState], bool]) -> bool:
        oldest = self.order.victim(allowed)
        if oldest is not None:
            self.evict(oldest)
            self.sign()
        return oldest is not None


def _eligible(state: CachedState) -> bool:
    return state.eligible


def _compressed(state: CachedState) -> bool:
    return state.eligible and state.tier is Tier.COMPRESSED
