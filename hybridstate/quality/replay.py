"""The warm and replay protocol (DASC 5.1, appendix C) on the real prefix cache, one block of questions at a time.

A block starts with an empty cache. One warm request per question prefills its prefix and keeps the state where the
prefix ends; its reply is discarded and so not generated. Then come the measured rounds: in each, every question is
asked once, in an order that is the same for all arms, and starts from what the cache returns. Compressed arms have no
dense spill, so that every hit is a compressed hit; dense arms keep as many states in native slots. A request without a
hit goes on from the state that its own prefill leaves, and keeps that state as a server would.

Every request of every round is decided and loaded by the cache; copies of one kind run together (`batched_store`).
Where all rounds of an arm return the same bits, `Served.once` keeps them once: greedy replies to equal states are one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.errors import NumericError
from hybridstate.quality.arms import cached_prefix
from hybridstate.quality.batched_store import BatchedStore
from hybridstate.quality.questions import Block
from hybridstate.quant.arms import Arm as StorageArm
from hybridstate.quant.arms import plain_arm
from hybridstate.quant.simulate import Storage
from hybridstate.runtime import restore
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.prefix_cache import Lease, PrefixCache
from hybridstate.runtime.radix import Keys
from hybridstate.runtime.restore import Prefix, Units, capture
from hybridstate.runtime.slots import RESERVED
from hybridstate.runtime.tensor_store import TensorStore
from hybridstate.runtime.tiers import Prefix as CachedTokens
from hybridstate.trajectories.cache import prefill, recurrent_states, select_sequences
from hybridstate.trajectories.model import LoadedModel

Policy = Literal["dense", "nr", "wr", "recompute"]
TOKEN_HIT: Final = 0.70
LOADED: Final = 0.95
"""Under residency a block needs more tokens from the cache, and at least this share of loaded requests (DASC C)."""

EXACT: Final = plain_arm("fp32")


@dataclass(frozen=True, slots=True)
class ReuseArm:
    """One way to keep a prefix and to go on from it.

    Attributes:
        name: unique, e.g. `nr-64`, `wr-64+int8`, `random-64-1234`, `bf16`.
        policy: what happens to omitted units; `recompute` has no cache.
        kind: stored numbers of a checkpoint.
        units: retained ones; None keeps all.
        w_max, w_replay, seed: as in `quality.arms.Arm`.
        storage: format of the live state, written at every chunk's end in prefill and at every decoded token.
    """

    name: str
    policy: Policy
    kind: Literal["fp32", "int8"] = "fp32"
    units: Units | None = None
    w_max: int | None = None
    w_replay: int = 0
    seed: int | None = None
    storage: StorageArm = EXACT

    @property
    def native(self) -> bool:
        """Cached states lie in native slots, as they are."""
        return self.policy == "dense" and self.kind == "fp32"


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Stands for the attention keys of one question's prefix, which the block keeps."""

    row: int

    def cut(self, start: int, end: int) -> Keys:
        """The same question's."""
        return self


@dataclass(frozen=True, slots=True)
class Served:
    """What an arm's cache returned for R = rounds x questions requests, round by round, questions in order.

    Attributes:
        states, conv: per layer `[R, ...]`, at the end of the prefix; `[questions, ...]` after `once`.
        prefix: whose attention keys the requests use.
        cached: tokens from the cache, int64 `[R]`.
        slot_bytes: of one cached state, windows included.
        evictions: during the measured rounds.
        replayed: tokens replayed in all loads.
        compressed: hits that came from the compressed pool.
        hits: requests that started from a cached state.
        order: of the questions in each round.
    """

    states: tuple[torch.Tensor, ...]
    conv: tuple[torch.Tensor, ...]
    prefix: Prefix
    cached: NDArray[np.int64]
    slot_bytes: int
    evictions: int
    replayed: int
    compressed: int
    hits: int
    order: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        """Requests whose states are held: R, or one per question after `once`."""
        return len(self.states[0])

    def once(self, questions: int) -> "Served":
        """One round for all where all returned the same bits, else as it is."""
        held = (*self.states, *self.conv)
        if self.rows == questions:
            return self
        rounds = [tensor.unflatten(0, (-1, questions)) for tensor in held]
        equal = torch.stack([(n[1:] == n[:1]).all() for n in rounds])
        if not bool(equal.all()):
            return self
        return replace(
            self,
            states=tuple(state[:questions].clone() for state in self.states),
            conv=tuple(window[:questions].clone() for window in self.conv),
        )

    def residency(self, tokens: int) -> dict[str, Any]:
        """Hit rates, and why residency is not given (empty where it is).

        Args:
            tokens: of one whole prompt.
        """
        requests = len(self.cached)
        hit = float(self.cached.sum() / (requests * tokens))
        loaded = self.hits / requests
        why = []
        if self.evictions:
            why.append(f"{self.evictions} evictions during the replays")
        if not hit > TOKEN_HIT:
            why.append(f"token hit {hit:.3f}, more than {TOKEN_HIT:g} is needed")
        if loaded < LOADED:
            why.append(f"{loaded:.1%} of the requests loaded a state, {LOADED:.0%} are needed")
        return {
            "token_hit": hit,
            "loaded": loaded,
            "compressed_hits": self.compressed,
            "hits": self.hits,
            "requests": requests,
            "evictions": self.evictions,
            "replayed_tokens": self.replayed,
            "not_resident": why,
        }


@dataclass(slots=True)
class Replayed:
    """States after a replay of the last tokens of each prefix, all questions at once, kept per window."""

    loaded: LoadedModel
    prefix: Prefix
    rows: int
    keep: bool = True
    _known: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def __call__(
        self, prefix: CachedTokens | Sequence[CachedTokens], window: int
    ) -> Sequence[torch.Tensor]:
        """`tensor_store.Replay` and, for B prefixes, `batched_store.ReplayAll`: states `[B, H, K, V]` per layer."""
        rows = _rows([prefix] if isinstance(prefix, CachedTokens) else prefix)
        if not self.keep:
            return restore.replay(self.loaded, self.prefix.rows(rows), window)
        if window not in self._known:
            parts = [
                restore.replay(
                    self.loaded,
                    self.prefix.rows(range(start, min(start + self.rows, self.prefix.batch))),
                    window,
                )
                for start in range(0, self.prefix.batch, self.rows)
            ]
            self._known[window] = tuple(torch.cat(layer) for layer in zip(*parts, strict=True))
        index = torch.tensor(rows, device=self.prefix.tokens.device)
        return [state[index] for state in self._known[window]]


def _rows(prefixes: Sequence[CachedTokens]) -> list[int]:
    """The questions that prefixes belong to."""
    keys = [prefix.kv[-1] for prefix in prefixes]
    assert all(isinstance(k, RowKeys) for k in keys), "a prefix has no keys"
    return [k.row for k in keys if isinstance(k, RowKeys)]


class ArmCache:
    """A prefix cache on tensors for one arm.

    Args:
        questions: requests that run at once.
        slots: cached states.
        prefix: what the requests' prefills leave, one row per question.
        replayed: who replays.
        timed: every copy by itself and no poison in freed slots, as where time is measured.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        arm: ReuseArm,
        block: Block,
        prefix: Prefix,
        replayed: Replayed,
        *,
        slots: int,
        timed: bool = False,
    ) -> None:
        self.block, self.prefix = block, prefix
        questions = block.questions
        native = questions + (slots if arm.native else 0)
        self.pool = StatePool(loaded.spec, native + RESERVED, device=loaded.device)
        window = arm.w_replay if arm.policy == "wr" else 0
        packed = 0 if arm.native else slots
        masks = None if arm.units is None else arm.units.masks
        place = (self.pool, packed, masks)
        self.store = (
            TensorStore(*place, kind=arm.kind, window=window, replay=replayed, poison=False)
            if timed
            else BatchedStore(*place, kind=arm.kind, window=window, replay=replayed)
        )
        pools = Pools(native=native, packed=packed, spill=False)
        admission = Admission(
            prompt=(int(block.suffix.shape[1]),), junctions=False, finished=False, shortest=1
        )
        self.cache = PrefixCache(pools, self.store, admission)
        self.slot_bytes = self.pool.slot_bytes if arm.native else self.store.packed_bytes
        whole = torch.cat([block.context, block.suffix], 1).numpy().astype(np.int32)
        self.prompts = [whole[row] for row in range(questions)]

    def warm(self) -> None:
        """One request per question, in order; what it leaves is kept at the end of its prefix."""
        leases = [self._lease(row) for row in range(self.block.questions)]
        for lease in leases:
            self.cache.load(lease)  # only where two questions share their prompt
        self._computed(list(enumerate(leases)))
        for lease in leases:
            self.cache.finish(lease)
        self.cache.settle()
        self._flush()

    def round(
        self, order: Sequence[int], *, last: bool = False
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], NDArray[np.int64]]:
        """Every question once, asked in `order`; states, windows and cached tokens in question order.

        The requests of the `last` round stay open: their slots go with the cache.
        """
        leases: dict[int, Lease] = {row: self._lease(row) for row in order}
        for row in order:
            self.cache.load(leases[row])
        self._computed([(row, leases[row]) for row in order if leases[row].hit is None])
        self._flush()
        rows = range(self.block.questions)
        slots = torch.tensor([leases[row].slot for row in rows], device=self.pool.device)
        self.pool.require_finite(slots)
        states, conv = self.pool.read(slots)
        cached = np.array([leases[row].hit_tokens for row in rows], np.int64)
        for row in order[: 0 if last else None]:
            self.cache.finish(leases[row])
        self.cache.settle()
        self._flush()
        self.cache.audit()
        return tuple(states), tuple(conv), cached

    def _flush(self) -> None:
        """Run what the store still holds back."""
        if isinstance(self.store, BatchedStore):
            self.store.flush()

    def _lease(self, row: int) -> Lease:
        lease = self.cache.acquire(self.prompts[row], self.block.budget)
        if lease is None:
            raise NumericError(f"{self.block.task}: no native slot for question {row}")
        return lease

    def _computed(self, requests: Sequence[tuple[int, Lease]]) -> None:
        """Write what these requests' own prefills leave, and keep it at their boundaries."""
        requests = [(row, lease) for row, lease in requests if lease.hit is None]
        if not requests:
            return
        rows = [row for row, _ in requests]
        slots = torch.tensor([lease.slot for _, lease in requests], device=self.pool.device)
        part = self.prefix.rows(rows)
        self._flush()
        self.pool.write(slots, part.states, part.conv)
        if isinstance(self.store, BatchedStore):
            self.store.written([lease.slot for _, lease in requests])
        for row, lease in requests:
            for position in lease.boundaries:
                if position == self.block.prefix:
                    self.cache.checkpoint(lease, position, RowKeys(row))


def serve(
    loaded: LoadedModel,
    arm: ReuseArm,
    block: Block,
    prefix: Prefix,
    replayed: Replayed,
    *,
    slots: int,
    rounds: int,
    seed: int,
) -> Served:
    """Warm the cache of an arm, then ask every question `rounds` times.

    Args:
        prefix: the states that the arm's own prefill leaves.
        slots: cached states there is room for.
        seed: of the order of the questions, the same for all arms.
    """
    cache = ArmCache(loaded, arm, block, prefix, replayed, slots=slots)
    cache.warm()
    counters = cache.cache.counters
    before = counters.to_json()
    rng = np.random.Generator(np.random.PCG64(seed))
    orders = [tuple(rng.permutation(block.questions).tolist()) for _ in range(rounds)]
    found = [cache.round(order, last=n == rounds) for n, order in enumerate(orders, 1)]
    after = {name: value - before[name] for name, value in counters.to_json().items()}
    return Served(
        states=tuple(torch.cat(layer) for layer in zip(*(f[0] for f in found), strict=True)),
        conv=tuple(torch.cat(layer) for layer in zip(*(f[1] for f in found), strict=True)),
        prefix=prefix,
        cached=np.concatenate([f[2] for f in found]),
        slot_bytes=cache.slot_bytes,
        evictions=after["evictions_dense"] + after["evictions_compressed"],
        replayed=after["replayed_tokens"],
        compressed=after["hits_compressed"],
        hits=after["hits_compressed"] + after["hits_dense"],
        order=tuple(orders),
    )


def without_cache(loaded: LoadedModel, block: Block, prefix: Prefix, *, rounds: int) -> Served:
    """The same requests where nothing is cached; their states are replaced by a whole prefill later."""
    rows = list(range(block.questions)) * rounds
    part = prefix.rows(rows)
    nothing = np.zeros(len(rows), np.int64)
    return Served(part.states, part.conv, prefix, nothing, 0, 0, 0, 0, 0, ())


@torch.no_grad()
def stored_prefixes(
    loaded: LoadedModel, block: Block, storages: Sequence[StorageArm], *, chunk: int, rows: int
) -> list[Prefix]:
    """What prefill leaves at the end of the prefix under each storage, written at every chunk's end (DAMP A.4).

    Args:
        chunk: tokens between two writes.
        rows: sequences that run at once.
    """
    found: list[list[Prefix]] = [[] for _ in storages]
    exact = all(storage.exact for storage in storages)
    together = max(1, rows // len(storages))
    for start in range(0, block.questions, together):
        tokens = block.context[start : start + together]
        if exact:
            shared = cached_prefix(loaded, tokens, rows=rows)
            for parts in found:
                parts.append(shared)
            continue
        count = len(tokens)
        everyone = list(range(count)) * len(storages)
        numbers = torch.arange(start, start + count, device=loaded.device)
        storage = Storage(tuple(a.to(loaded.device) for a in storages), numbers)

        def write(cache: Any, done: int, storage: Storage = storage) -> None:
            for ordinal, state in enumerate(recurrent_states(cache)):
                storage.write(state, ordinal, -done)

        _, cache = prefill(loaded, tokens[:, :chunk])
        select_sequences(cache, everyone)
        write(cache, min(chunk, tokens.shape[1]))
        if tokens.shape[1] > chunk:
            rest = tokens[everyone, chunk:]
            _, cache = prefill(loaded, rest, chunk=chunk, cache=cache, after_chunk=write)
        whole = capture(loaded, tokens[everyone], cache)
        for place, parts in enumerate(found):
            parts.append(whole.rows(range(place * count, (place + 1) * count)))
    return [parts[0] if len(parts) == 1 else restore.join(parts) for parts in found]
