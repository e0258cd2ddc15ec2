"""Serving with the real cache and the real engine: one arm on one device, warmed, seed by seed.

Bytes are those of the tensors that run: native slots of the engine's pool, compressed slots of the cache's store, and
the staging that either needs. An engine is kept for later points of its live format that its pool is large enough for;
they use a part of it.

The clock is the scheduler's: seconds of prefills, steps, copies, packs, loads and replays, each after the device has
settled. Packs beside the computation count where they slow it down. What the host does between those is not counted.

With several ranks each process serves the same requests on its heads of the same model, and the clock is one for all.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final

import numpy as np
import torch

from hybridstate.bench.engine_executor import EngineExecutor, device_clock
from hybridstate.bench.recording import (
    Operations,
    RecordingExecutor,
    RecordingReplay,
    RecordingStore,
)
from hybridstate.bench.room import memory
from hybridstate.bench.scheduler import Executor, Limits, Request, Run, Scheduler, Seconds
from hybridstate.bench.serving_arms import Arm
from hybridstate.bench.traces import Trace
from hybridstate.errors import UsageError
from hybridstate.plan.placement import place
from hybridstate.plan.select import Selection
from hybridstate.plan.store import Plan
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.compressed import Kind
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.runtime.exchange import Exchange, routes
from hybridstate.runtime.parallel import Ranks
from hybridstate.runtime.prefix_cache import PrefixCache
from hybridstate.runtime.radix import Tokens
from hybridstate.runtime.serving import ServingEngine
from hybridstate.runtime.slots import RESERVED
from hybridstate.runtime.step import StepModules
from hybridstate.runtime.tensor_store import TensorStore
from hybridstate.runtime.tiers import Prefix
from hybridstate.trajectories.model import LoadedModel

ROWS_KEPT: Final = 40
"""Recorded rows of one kind and seed that a result keeps, evenly spaced."""

WARM_TOKENS: Final = (2, 17, 70, 130)
"""Prompts that run before the clock starts."""

WARM_STEPS: Final = 4
"""Steps of every batch size before it on a GPU: two, the one that is captured, and one more."""

_KINDS: Final[dict[str, Kind]] = {
    "fp32": "fp32",
    "int8-checkpoint": "int8",
    "packed": "packed",
}


@dataclass(frozen=True)
class Subject:
    """The model that is served.

    Attributes:
        loaded: the model, or a rank's heads of it.
        plan: orders of the packed state, None keeps the first channels in FP16.
        selections: retained units of all heads by cutoff.
        ranks: this process among those that serve together.
    """

    loaded: LoadedModel
    plan: Plan | None
    selections: dict[int, Selection]
    ranks: Ranks = field(default_factory=Ranks)

    def engine(self, arm: Arm, slots: int, modules: StepModules | None = None) -> DecodeEngine:
        """An engine of the arm's live format."""
        packed = arm.live_format == "damp"
        return DecodeEngine(
            self.loaded,
            state=arm.live_format,
            slots=slots,
            plan=self.plan if packed else None,
            modules=modules,
        )

    def store(
        self,
        arm: Arm,
        engine: DecodeEngine,
        packed: int,
        replay: Callable[[Prefix, int], Sequence[torch.Tensor]] | None = None,
    ) -> TensorStore:
        """The memory behind the arm's cache; freed slots keep their contents, as in a server."""
        if arm.cached is None:
            return TensorStore(engine.pool, 0, poison=False)
        w_max = arm.cached.w_max
        return TensorStore(
            engine.pool,
            packed,
            None if w_max is None else self.masks(engine, w_max),
            kind=_KINDS[arm.cached.stored],
            window=0 if replay is None else arm.replay,
            replay=replay,
            exchange=self._exchange(arm),
            poison=False,
        )

    def _exchange(self, arm: Arm) -> Exchange | None:
        """What moves the arm's units to the ranks that store them; None where each stores its own."""
        if arm.balance == "off" or arm.cached is None or arm.cached.w_max is None:
            return None
        whole, selection = self.loaded.checkpoint.spec, self.selections[arm.cached.w_max]
        placement = place(whole, selection, tp=self.ranks.size, mode=arm.balance)
        route = routes(whole, selection, placement)[self.ranks.rank]
        return Exchange(route, group=self.ranks.moves, device=self.loaded.device)

    def masks(self, engine: DecodeEngine, w_max: int) -> list[torch.Tensor]:
        """Retained units of this rank's heads at a cutoff, rows in the order in which the engine's pool stores them."""
        found = []
        for order, retained in zip(engine.orders, self.selections[w_max].retained, strict=True):
            mask = torch.from_numpy(np.ascontiguousarray(self.ranks.own(retained))).to(
                self.loaded.device
            )
            if mask.dim() == 2 and order.key is not None:
                mask = mask.gather(1, order.key)
            found.append(mask)
        return found

    def measured(self, arm: Arm) -> Arm:
        """The arm with the bytes that its tensors take here: those of the rank where a compressed slot takes most."""
        engine = self.engine(arm, RESERVED + 1)
        pool = engine.pool
        live = replace(arm.live, temporal_bytes=pool.temporal_bytes, conv_bytes=pool.conv_bytes)
        stores = []
        for rank in range(self.ranks.size):
            stores.append(replace(self, ranks=Ranks(rank, self.ranks.size)).store(arm, engine, 1))
            pool.free(torch.arange(pool.slots))
        cached = arm.cached
        if cached is not None:
            temporal = max(store.checkpoints.slot_bytes for store in stores)
            conv = stores[0].packed_bytes - stores[0].checkpoints.slot_bytes
            cached = replace(cached, temporal_bytes=temporal, conv_bytes=conv)
        scratch = max(store.scratch_bytes for store in stores)
        return replace(arm, live=live, cached=cached, scratch_bytes=scratch)

    def kv_bytes(self, dense: Arm) -> int:
        """Bytes of attention keys and values per token, as lines hold them."""
        engine = self.engine(dense, RESERVED + 1)
        with self.ranks.alone():
            return ServingEngine(engine, running=1, length=2).lines.token_bytes


class AgreedStore(RecordingStore):
    """A timed store whose answer about a slot is that of all ranks: each sees its own heads."""

    def __init__(self, ranks: Ranks, *given: Any) -> None:
        super().__init__(*given)
        self.ranks = ranks

    def finite(self, slot: int) -> bool:
        """Timed; asking the others is not."""
        return bool(self.ranks.fewest(int(super().finite(slot))))


class SharedExecutor(EngineExecutor):
    """An engine of one rank: steps are timed on each device, and the slowest rank's seconds count."""

    def __init__(self, ranks: Ranks, *given: Any) -> None:
        super().__init__(*given)
        self.ranks = ranks

    def decode(self, batch: Sequence[Request], steps: int) -> Seconds:
        """See `Executor`."""
        return self.ranks.slowest(super().decode(batch, steps))


class ToldExecutor(RecordingExecutor):
    """A recorded executor that keeps what it generated."""

    def __init__(self, executor: Executor, state_bytes: int) -> None:
        super().__init__(executor, state_bytes)
        self._outputs: dict[tuple[int, int], bytes] = {}

    def output(self, request: Request) -> Tokens:
        """Kept by conversation and turn."""
        tokens = super().output(request)
        self._outputs[request.conversation.number, request.turn] = tokens.tobytes()
        return tokens

    @property
    def digest(self) -> str:
        """Hash over all replies in the order of conversations and turns."""
        return sha256(b"".join(self._outputs[key] for key in sorted(self._outputs))).hexdigest()


@dataclass(frozen=True)
class Served:
    """One seed of one point.

    Attributes:
        run: what happened.
        cache: afterwards.
        outputs: digest of all replies.
        operations: recorded.
        engine: how it ran.
    """

    run: Run
    cache: PrefixCache
    outputs: str
    operations: Operations
    engine: dict[str, Any]


class Bench:
    """Serves arms on one device, one after the other.

    Args:
        subject: the model.
        running: the largest limit.
        length: tokens of the longest conversation.
        chunk: prompt tokens of one prefill call.
    """

    def __init__(self, subject: Subject, *, running: int, length: int, chunk: int) -> None:
        self.subject = subject
        self._clock = subject.ranks.together(device_clock(subject.loaded.device))
        self._gpu = subject.loaded.device.type == "cuda"
        self._running, self._chunk = running, chunk
        steps = (WARM_STEPS + 1) * (running.bit_length() + 1)
        self._length = max(length, WARM_TOKENS[-1] + steps)
        self._modules: StepModules | None = None
        self._engines: dict[str, ServingEngine] = {}
        self._warmed: set[tuple[int, str]] = set()

    def serve(
        self,
        arm: Arm,
        pools: Pools,
        trace: Trace,
        limits: Limits,
        admission: Admission,
        seed: int,
    ) -> Served:
        """One seed of one point.

        Raises:
            UsageError: slots of more bytes than the device has.
            NumericError: another rank decided or generated otherwise; all ranks raise it.
        """
        gc.collect()  # keys that the run before cached: nodes of a tree hold each other
        slots = max(pools.native, self._running), pools.packed
        check_fits(arm, *slots, self.subject.loaded.device)
        ranks = self.subject.ranks
        serving = self._serving(arm, pools.native)
        pool = serving.engine.pool
        if pool.available < pool.slots:
            pool.free(torch.arange(pool.slots))
        replay = RecordingReplay(serving.replay, self._clock)
        window = replay if arm.replay else None
        tensors = self.subject.store(arm, serving.engine, pools.packed, window)
        packed_bytes = 1 if arm.cached is None else arm.cached.full_bytes
        store = AgreedStore(ranks, tensors, arm.live.full_bytes, packed_bytes, self._clock)
        tensors.capture()
        if (id(serving), arm.name) not in self._warmed:
            self._warm(serving, tensors, pools.packed)
            self._warmed.add((id(serving), arm.name))
        replay.operations["replay"].clear()
        cache = PrefixCache(pools, store, admission, ranks.fewest)
        inner = SharedExecutor(ranks, serving, cache, store, self._clock)
        executor = ToldExecutor(inner, arm.live.full_bytes)
        run = Scheduler(trace, cache, executor, limits, seed).serve()
        cache.audit()
        ranks.agree(cache.digest, "the prefix cache")
        ranks.agree(executor.digest, "replies")
        ranks.agree(sha256(str(run.seconds).encode()).hexdigest(), "seconds")
        operations = {
            **executor.operations,
            **store.operations,
            **replay.operations,
            **inner.operations,
        }
        found = {kind: thinned(rows) for kind, rows in operations.items() if rows}
        engine = {**serving.to_json(), "slots": tensors.to_json()}
        return Served(run, cache, executor.digest, found, engine)

    def close(self) -> None:
        """Free every engine with its graphs."""
        self._engines.clear()
        self._modules = None
        gc.collect()  # a step and its engine hold each other

    def _serving(self, arm: Arm, native: int) -> ServingEngine:
        """An engine of the arm's live format with at least so many slots."""
        kept = self._engines.get(arm.live_format)
        if kept is not None and kept.engine.pool.slots >= native + RESERVED:
            return kept
        if self._engines.pop(arm.live_format, None) is not None:  # another may get its number
            self._warmed = {warm for warm in self._warmed if warm[0] != id(kept)}
        del kept
        gc.collect()  # its memory goes before the next one comes
        engine = self.subject.engine(
            arm, max(native, self._running) + RESERVED, modules=self._modules
        )
        ranks = self.subject.ranks
        with ranks.alone():  # trials compare a layer's part with its part
            modules = engine.modules
            # prompts run the replaced code of whole modules too, which has to round alike everywhere
            modules.prompts = bool(ranks.fewest(int(modules.prompts)))
            made = ServingEngine(
                engine, running=self._running, length=self._length, chunk=self._chunk
            )
        self._engines[arm.live_format] = made
        self._modules = modules if self._gpu else None
        return made

    def _warm(self, serving: ServingEngine, store: TensorStore, packed: int) -> None:
        """Run everything once: kernels are compiled and steps captured before the clock starts."""
        wanted = self._running if self._gpu else 1
        serving.capture_prompts(RESERVED, store.window, self.subject.ranks.fewest)
        live = []
        for number in range(wanted):
            tokens = np.arange(1, 1 + WARM_TOKENS[number % len(WARM_TOKENS)], dtype=np.int32)
            row = serving.admit(tokens, slot=RESERVED + number)
            if row is not None:
                live.append(row)
                serving.prefill(row)
        for size in serving.sizes if self._gpu else serving.sizes[:1]:
            for _ in range(WARM_STEPS if self._gpu else 1):
                serving.decode_step(live[:size])
        last = live[-1]
        store.copy(last.slot, RESERVED)
        store.finite(last.slot)
        if packed:
            store.pack(last.slot, RESERVED, aside=True).wait()
            store.pack(last.slot, RESERVED, aside=False)
            tokens = np.concatenate([last.prompt.numpy(), last.output])[: last.done]
            kv = serving.keys(last, last.done).cut(0, last.done)
            store.load(RESERVED, last.slot, Prefix(tokens.astype(np.int32), [kv]))
        for row in live:
            serving.finish(row)


def check_fits(arm: Arm, native: int, packed: int, device: torch.device) -> None:
    """Refuse so many slots where the device cannot hold them, before anything is allocated.

    Raises:
        UsageError: they take more bytes than it has.
    """
    needed = (native + RESERVED) * arm.live.full_bytes + arm.staging_bytes
    if arm.cached is not None:
        needed += (packed + RESERVED) * arm.cached.full_bytes
    held = memory(device)
    if needed > held:
        raise UsageError(
            f"{arm.name}: slots of {needed / 2**30:,.1f} GiB, the {device.type} has {held / 2**30:,.1f}",
            hint="take a larger --ratio, or a smaller --limit or --clients",
            found=needed,
            expected=held,
        )


def thinned(rows: Sequence[list[float]], kept: int = ROWS_KEPT) -> list[list[float]]:
    """At most `kept` rows, evenly spaced; seconds to a tenth of a microsecond."""
    chosen = np.linspace(0, len(rows) - 1, min(kept, len(rows))).round().astype(int).tolist()
    return [[*rows[i][:-1], max(1e-7, round(rows[i][-1], 7))] for i in chosen]
