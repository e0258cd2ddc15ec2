"""The rules of the two-tier cache one by one, on a store without memory or with remembered contents."""

import gc
import weakref
from collections.abc import Iterable

import numpy as np
import pytest

from hybridstate.errors import UsageError
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.eviction import eviction_order
from hybridstate.runtime.prefix_cache import Lease, PrefixCache
from hybridstate.runtime.radix import RadixTree, Tokens
from hybridstate.runtime.tiers import CachedState, CountingStore, Tier
from tests.runtime.cache_stress import FakeStore, Stress

END_ONLY = Admission(prompt=(), junctions=False, shortest=1)


def tokens(*values: int) -> Tokens:
    return np.array(values, np.int32)


def prompt(number: int, length: int = 4) -> Tokens:
    """A prompt that shares nothing with another number's."""
    return np.arange(length, dtype=np.int32) + 100 * number


def run(cache: PrefixCache, sequence: Tokens) -> Lease:
    """A request from start to end; its state is the one behind the whole sequence."""
    lease = cache.acquire(sequence)
    assert lease is not None
    if isinstance(cache.store, FakeStore):
        cache.store.native[lease.slot] = sequence.tobytes()
    cache.load(lease)
    for position in lease.boundaries:
        cache.checkpoint(lease, position)
    cache.finish(lease)
    return lease


def tiers_of(cache: PrefixCache, sequences: Iterable[Tokens]) -> list[str | None]:
    """Tier of the state behind each sequence, None where there is none."""
    found: list[str | None] = []
    for sequence in sequences:
        hit = cache.tree.match(sequence, len(sequence)).hit
        whole = hit is not None and hit.depth == len(sequence)
        found.append(hit.state.tier.value if hit is not None and whole else None)
    return found


def test_tree_splits_edges_and_states_stay_with_their_prefix() -> None:
    tree = RadixTree()
    long = tree.insert(tokens(1, 2, 3, 4))
    long.state = "state"
    other = tree.insert(tokens(1, 2, 9))
    assert [list(n.tokens) for n in long.path()] == [[1, 2], [3, 4]]
    assert long.parent is other.parent
    assert long.parent is not None
    assert long.parent.state is None
    match = tree.match(tokens(1, 2, 3, 4, 5), 5)
    assert (match.tokens, match.hit) == (4, long)
    assert tree.match(tokens(1, 2, 3, 4, 5), 3).hit is None
    assert tree.match(tokens(1, 2, 3, 7), 4).tokens == 3
    long.state = None
    assert tree.prune(long) == 1
    assert tree.prune(other) == 2
    assert tree.size == 0


def test_an_identical_prompt_hits_at_length_minus_one() -> None:
    cache = PrefixCache(Pools(native=4), CountingStore(), Admission(finished=False, shortest=1))
    assert run(cache, prompt(1)).boundaries == (3,)
    again = run(cache, prompt(1))
    assert (again.tier, again.hit_tokens, again.boundaries) == ("dense", 3, ())


def test_a_shared_prefix_is_kept_at_its_junction_even_among_running_requests() -> None:
    cache = PrefixCache(Pools(native=8, packed=8), CountingStore(), Admission(shortest=1))
    shared = prompt(1, 20)
    leases = []
    for tail in range(3):
        lease = cache.acquire(np.concatenate([shared, prompt(5 + tail, 3)]).astype(np.int32))
        assert lease is not None
        leases.append(lease)
    assert [lease.boundaries for lease in leases] == [(22,), (20, 22), (20, 22)]
    assert cache.checkpoint(leases[1], 20) == "packed"
    assert cache.checkpoint(leases[2], 20) == "known"
    later = cache.acquire(np.concatenate([shared, prompt(9, 3)]).astype(np.int32))
    assert later is not None
    assert (later.tier, later.hit_tokens) == ("compressed", 20)


def test_insertion_is_compressed_first_then_spills_without_a_copy() -> None:
    store = CountingStore()
    cache = PrefixCache(Pools(native=3, packed=1), store, END_ONLY)
    run(cache, prompt(1))
    run(cache, prompt(2))
    assert tiers_of(cache, [prompt(1), prompt(2)]) == ["compressed", "dense"]
    assert store.calls["copy"] == 0
    assert store.calls["pack"] == 1
    assert (cache.counters.packed, cache.counters.spilled) == (1, 1)


def test_demotion_keeps_the_place_in_the_order() -> None:
    cache = PrefixCache(Pools(native=4, packed=1), CountingStore(), END_ONLY)
    run(cache, prompt(1))  # takes the compressed slot
    run(cache, prompt(2))
    run(cache, prompt(3))
    cache.tiers.evict(cache.tree.match(prompt(1), 4).hit.state)  # type: ignore[union-attr]
    cache.tiers.reclaim(cache.tiers.native.free + 1)
    assert tiers_of(cache, [prompt(2), prompt(3)]) == ["compressed", "dense"]
    oldest = cache.tiers.order.victim(lambda state: state.eligible)
    assert oldest is not None
    assert oldest.node.depth == 4
    assert list(oldest.node.tokens) == list(prompt(2)), "still the oldest after its demotion"


def test_both_pools_full_oldest_dense_is_evicted_directly() -> None:
    cache = PrefixCache(Pools(native=2, packed=1), CountingStore(), END_ONLY)
    for number in (1, 2, 3):
        run(cache, prompt(number))
    cache.tiers.order.touch(cache.tree.match(prompt(1), 4).hit.state)  # type: ignore[union-attr]
    cache.tiers.reclaim(1)
    assert tiers_of(cache, map(prompt, (1, 2, 3))) == ["compressed", None, "dense"]
    assert cache.counters.demotions == 0


def test_both_pools_full_oldest_compressed_makes_room_for_the_oldest_dense() -> None:
    cache = PrefixCache(Pools(native=2, packed=1), CountingStore(), END_ONLY)
    for number in (1, 2, 3):
        run(cache, prompt(number))
    cache.tiers.reclaim(1)
    assert tiers_of(cache, map(prompt, (1, 2, 3))) == [None, "compressed", "dense"]
    assert (cache.counters.demotions, cache.counters.evictions_compressed) == (1, 1)


def test_evicting_a_compressed_state_alone_is_never_tried() -> None:
    cache = PrefixCache(Pools(native=1, packed=1), CountingStore(), END_ONLY)
    run(cache, prompt(1))
    lease = cache.acquire(prompt(2))
    assert lease is not None
    assert cache.acquire(prompt(3)) is None, "no native slot: the request waits"
    assert tiers_of(cache, [prompt(1)]) == ["compressed"]
    assert cache.counters.waits == 1
    cache.finish(lease)
    assert cache.acquire(prompt(3)) is not None


def test_states_of_running_requests_are_not_reclaimed() -> None:
    cache = PrefixCache(Pools(native=3), CountingStore(), END_ONLY)
    run(cache, prompt(1))
    user = cache.acquire(np.append(prompt(1), 7).astype(np.int32))
    assert user is not None
    cache.load(user)
    cache.tiers.reclaim(3)
    assert tiers_of(cache, [prompt(1)]) == ["dense"]
    cache.abort(user)
    cache.tiers.reclaim(3)
    assert tiers_of(cache, [prompt(1)]) == [None]


def test_a_hit_on_a_demoting_state_reads_the_source_and_delays_the_commit() -> None:
    store = FakeStore()
    cache = PrefixCache(Pools(native=3, packed=1), store, END_ONLY)
    run(cache, prompt(1))
    assert tiers_of(cache, [prompt(1)]) == ["demoting"]
    lease = cache.acquire(np.append(prompt(1), 7).astype(np.int32))
    assert lease is not None
    assert (lease.tier, lease.hit_tokens) == ("dense", 4)
    cache.settle()
    assert tiers_of(cache, [prompt(1)]) == ["demoting"], "done, but somebody reads the source"
    cache.load(lease)
    assert store.native[lease.slot] == prompt(1).tobytes()
    cache.poll()
    assert tiers_of(cache, [prompt(1)]) == ["compressed"]
    cache.audit()


def test_a_state_that_is_not_finite_is_not_kept() -> None:
    store = FakeStore()
    cache = PrefixCache(Pools(native=2, packed=2), store, Admission(shortest=1))
    lease = cache.acquire(prompt(1))
    assert lease is not None
    store.native[lease.slot] = b"nan"
    store.bad.add(lease.slot)
    assert cache.checkpoint(lease, 3) == "non-finite"
    assert cache.finish(lease) == "non-finite"
    assert cache.counters.skipped_nonfinite == 2
    assert cache.tree.size == 0


def test_a_full_pool_skips_caching() -> None:
    cache = PrefixCache(Pools(native=1), CountingStore(), Admission(finished=False, shortest=1))
    lease = cache.acquire(prompt(1))
    assert lease is not None
    assert cache.checkpoint(lease, 3) == "full"
    assert cache.finish(lease) is None
    assert cache.tree.size == 0


def test_watermark_demotes_before_anybody_waits() -> None:
    cache = PrefixCache(Pools(native=3, packed=2, watermark=2), CountingStore(), END_ONLY)
    for number in range(1, 6):
        run(cache, prompt(number))
        cache.poll()
        assert cache.tiers.native.free >= 2
    assert cache.counters.waits == 0


def test_batched_reclamation_chooses_the_same_victims_as_one_by_one() -> None:
    def filled(policy: str) -> Stress:
        stress = Stress(3, Pools(native=12, packed=5, policy=policy, native_bytes=3), limit=3)
        for _ in range(400):
            stress.operate()
        stress.cache.settle()
        return stress

    for policy in ("lru", "leaf-lru", "cost"):
        one, many = filled(policy).cache, filled(policy).cache
        assert one.digest == many.digest
        target = many.tiers.native.free + 4
        many.tiers.reclaim(target)
        for slots in range(one.tiers.native.free + 1, target + 1):
            one.tiers.reclaim(slots)
        one.settle()
        many.settle()
        kept = [
            sorted(
                (n.id, n.state.tier.value, n.state.native or 0, n.state.packed or 0)
                for n in c.tree
                if n.state is not None
            )
            for c in (one, many)
        ]
        assert kept[0] == kept[1]


def test_ranks_agree_when_transfers_end_at_different_times() -> None:
    ranks = [Stress(17, Pools(native=8, packed=6, watermark=2)) for _ in range(3)]
    done = [0] * len(ranks)

    def agreed(_: int) -> int:
        return 0  # a rank may always be behind; settle is what commits

    for stress in ranks:
        stress.cache.tiers._agree = agreed
    for number in range(3000):
        for index, stress in enumerate(ranks):
            stress.operate()
            if number % 5 == index and stress.store.pending:
                stress.store.end(stress.store.pending[0])  # this rank's stream is ahead
                done[index] += 1
            if number % 40 == 39:
                stress.cache.tiers._agree = lambda n: n
                stress.cache.settle()
                stress.cache.tiers._agree = agreed
        assert len({stress.cache.digest for stress in ranks}) == 1
    assert min(done) > 20


def test_cost_aware_order_keeps_what_is_long_to_recompute() -> None:
    cache = PrefixCache(Pools(native=4, policy="cost"), CountingStore(), END_ONLY)
    run(cache, prompt(1, 90))
    for number in range(2, 12):
        run(cache, prompt(number, 5))
    assert tiers_of(cache, [prompt(1, 90)]) == ["dense"]
    lru = PrefixCache(Pools(native=4), CountingStore(), END_ONLY)
    run(lru, prompt(1, 90))
    for number in range(2, 12):
        run(lru, prompt(number, 5))
    assert tiers_of(lru, [prompt(1, 90)]) == [None]


def test_cost_aware_order_lets_go_of_what_nobody_uses() -> None:
    cache = PrefixCache(Pools(native=3, policy="cost"), CountingStore(), END_ONLY)
    run(cache, prompt(1, 90))
    for number in range(2, 200):
        run(cache, prompt(number, 5))
    assert tiers_of(cache, [prompt(1, 90)]) == [None]


def test_cost_aware_order_counts_from_the_nearest_cached_ancestor() -> None:
    cache = PrefixCache(Pools(native=3, policy="cost"), CountingStore(), END_ONLY)
    whole = prompt(1, 90)
    run(cache, whole)
    run(cache, whole[:85])  # from here on the longer one saves 5 tokens, not 90
    for number in (2, 3):
        run(cache, prompt(number, 20))
    assert tiers_of(cache, [whole, whole[:85], prompt(2, 20)]) == [None, "dense", "dense"]


def test_cost_aware_order_prices_a_demoted_state_by_its_new_slot() -> None:
    tree, order = RadixTree(), eviction_order("cost", native_bytes=4, packed_bytes=1)
    short, long = (
        CachedState(tree.insert(prompt(number, length)), Tier.DENSE)
        for number, length in ((1, 20), (2, 40))
    )
    for state in (short, long):
        state.node.state = state
        order.add(state)
    assert order.victim(lambda _: True) is short, "5 tokens per byte, not 10"
    short.tier = Tier.DEMOTING
    order.demoted(short)
    assert order.victim(lambda _: True) is long, "10 tokens per byte, not 20"


def test_leaf_order_keeps_the_stem() -> None:
    def after(policy: str) -> list[str | None]:
        cache = PrefixCache(Pools(native=4, policy=policy), CountingStore(), END_ONLY)
        stem = prompt(1, 8)
        branch = np.append(stem, 77).astype(np.int32)
        run(cache, stem)
        run(cache, branch)
        for number in (2, 3, 4):
            run(cache, prompt(number))
        return tiers_of(cache, [stem, branch])

    assert after("leaf-lru") == ["dense", None]
    assert after("lru")[0] is None


def test_kv_tokens_are_charged_and_leaves_give_them_back() -> None:
    cache = PrefixCache(Pools(native=9, kv_tokens=20), CountingStore(), END_ONLY)
    for number in (1, 2, 3, 4):
        run(cache, prompt(number, 5))
    assert (cache.kv.cached, cache.kv.free) == (20, 0)
    run(cache, prompt(5, 5))
    assert tiers_of(cache, (prompt(n, 5) for n in (1, 2, 5))) == [None, "dense", "dense"]
    with pytest.raises(UsageError, match=r"15 \+ 6"):
        cache.acquire(prompt(6, 15), reply=6)
    cache.audit()


def test_wrong_use_is_refused() -> None:
    with pytest.raises(UsageError, match="policy"):
        Pools(native=1, policy="random")
    with pytest.raises(UsageError, match="slot"):
        Pools(native=0)
    cache = PrefixCache(Pools(native=2), CountingStore())
    lease = cache.acquire(prompt(1))
    assert lease is not None
    with pytest.raises(UsageError, match="checkpoint"):
        cache.checkpoint(lease, 5)
    cache.abort(lease)
    with pytest.raises(UsageError, match="ended"):
        cache.finish(lease)
    assert cache.tiers.native.free == 2


def test_a_cache_lets_its_store_go_at_once() -> None:
    """Slots of gigabytes must not wait for a collection of cycles."""
    cache = PrefixCache(Pools(native=3, packed=2), FakeStore(delayed=False), END_ONLY)
    for number in range(4):
        run(cache, prompt(number))
    gone = weakref.ref(cache.store)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()
