"""The tensors behind a prefix cache: a `StatePool` as native slots, and compressed slots beside it.

`runtime.compressed` has the formats of the latter. Convolution windows are kept whole beside either. Omitted rows are
zero after a load (NR), or come from a replay (WR) that the engine runs. On a GPU a demotion packs on a side stream that
first waits for the computation, and its event is what the cache asks; the rest is ordered on the engine's stream.

Most calls move a few megabytes, so what they cost is launches. On a GPU each kind of call is a graph that reads its
slot numbers from the device: one launch writes those, one runs the graph, and only `finite` waits for its answer.
Copies between ranks, replayed states on their way in, and pools with rings run eagerly.

Slots are numbers from the cache, 0 is nobody's. Freed slots are poisoned, so a slot that is read too late shows as NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from hybridstate.errors import NumericError, UsageError
from hybridstate.kernels.transfer import copy_slots
from hybridstate.runtime.compressed import CheckpointPool, Kind, checkpoint_pool, row_masks
from hybridstate.runtime.exchange import Exchange
from hybridstate.runtime.pool import StatePool, runs_of_alike
from hybridstate.runtime.slots import RESERVED
from hybridstate.runtime.tiers import Finished, Prefix, Transfer
from hybridstate.trajectories import graphs

Replay = Callable[[Prefix, int], Sequence[torch.Tensor]]
"""States after a replay of the last tokens of a prefix, FP32 `[1, H, K, V]` per layer, rows in the pool's order."""

CAPTURED: Final = ("copy", "finite", "pack", "pack aside", "load")
"""Calls that are graphs on a GPU; packs on the side stream are one of their own, with slot numbers of their own."""


class TensorStore:
    """`tiers.Store` on tensors.

    Args:
        pool: all of its slots become the cache's, number 0 unused: the cache gets `pool.slots - 1` native slots. Must
            be wholly free.
        packed: usable compressed slots, 0 for the dense baseline.
        retained: bool `[H]` (heads) or `[H, K]` (key channels in the pool's row order) per layer; None keeps every row.
        kind: format of the compressed slots.
        window, replay: tokens to replay at a load of a compressed slot, and who does; 0 fills with zeros.
        exchange: where this rank's units are stored, with FP32 and INT8; None: here.
        poison: overwrite freed slots.

    Raises:
        UsageError: the pool is in use, or a window without a replay.
        PlanMismatch: the format does not fit the pool, or the masks not the model.
    """

    def __init__(
        self,
        pool: StatePool,
        packed: int,
        retained: Sequence[torch.Tensor] | None = None,
        *,
        kind: Kind = "fp32",
        window: int = 0,
        replay: Replay | None = None,
        exchange: Exchange | None = None,
        poison: bool = True,
    ) -> None:
        if pool.alloc(pool.slots) is None:
            raise UsageError("the pool of a prefix cache is wholly its own")
        if window and replay is None:
            raise UsageError("a replay window needs somebody who replays")
        self.pool = pool
        self.window = window
        self._replay = replay
        self._poison = poison
        self._conv = tuple(
            torch.full(
                (packed + RESERVED, *w.shape[1:]), float("nan"), dtype=w.dtype, device=w.device
            )
            for w in pool.conv
        )
        self.checkpoints = checkpoint_pool(pool, row_masks(pool, retained), packed, kind, exchange)
        moves = _Moves(pool, self.checkpoints, self._conv)
        self._answer = moves.answer
        steps = (moves.copy, moves.finite, moves.pack, moves.pack, moves.load)
        self._calls = {
            name: SlotCall(step, pool.device, eager="rings" if pool.rings else None)
            for name, step in zip(CAPTURED, steps, strict=True)
        }
        self._zeros = tuple(
            n.pack(torch.zeros(n.key_dim, n.value_dim, device=pool.device)) for n in pool.layouts
        )
        """A head of the zero state per layer, in the pool's order."""
        self._side = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        if poison:
            for slot in range(packed + RESERVED):
                self.checkpoints.poison(slot)

    @property
    def packed_bytes(self) -> int:
        """Bytes of one compressed slot with its convolution windows; 0 where there are none."""
        if len(self._conv[0]) == RESERVED:
            return 0
        conv = sum(w[0].numel() * w.element_size() for w in self._conv)
        return self.checkpoints.slot_bytes + conv

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside both pools: a slot in rows order where the pool has a kernel's order, units to be sent."""
        return self.checkpoints.scratch_bytes

    def clear(self, slot: int) -> None:
        """The zero state, in which a request without a hit begins."""
        for state, zero in zip(self.pool.states, self._zeros, strict=True):
            state[slot] = zero
        for window in self.pool.conv:
            window[slot] = 0.0
        self.pool.empty_rings(torch.tensor([slot], device=self.pool.device))

    def copy(self, source: int, target: int) -> None:
        """See `tiers.Store`."""
        self._calls["copy"](source, target)

    def pack(self, source: int, target: int, *, aside: bool) -> Transfer:
        """See `tiers.Store`."""
        if self._side is None or not aside:
            self._join_side()
            self._calls["pack"](source, target)
            self.checkpoints.send(target)
            return Finished()
        self._side.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(self._side):
            self._calls["pack aside"](source, target)
            self.checkpoints.send(target)
            event = torch.cuda.Event()
            event.record(self._side)
        return EventTransfer(event)

    def load(self, source: int, target: int, prefix: Prefix) -> int:
        """See `tiers.Store`."""
        replayed = min(self.window, len(prefix.tokens))
        states = None
        if replayed and self._replay is not None:
            states = self._replay(prefix, replayed)
        self._load(source, target, states)
        return replayed

    def _load(self, source: int, target: int, states: Sequence[torch.Tensor] | None) -> None:
        """With omitted rows from `states`, zero without."""
        self._join_side()
        self.checkpoints.fetch(source)
        call = self._calls["load"]
        _, slot = call.name(source, target)
        if states is not None:
            self.checkpoints.refill(slot, states)
        call.run(refilled=states is not None)

    def finite(self, slot: int) -> bool:
        """See `tiers.Store`."""
        self._calls["finite"](slot, slot)
        if bool(self._answer):
            return True
        try:  # sums of finite numbers may overflow
            self.pool.require_finite(torch.tensor([slot], device=self.pool.device))
        except NumericError:
            return False
        return True

    def capture(self) -> None:
        """Run every call until it is a graph; only on a GPU. Overwrites what slot 0 of both pools holds."""
        if self._side is None:
            return
        layers, device = self.pool.spec.layers, self.pool.device
        states = None
        if self.window:
            states = [
                torch.zeros(1, n.value_heads, n.key_dim, n.value_dim, device=device) for n in layers
            ]
        for _ in range(graphs.WARM_UP + 1):
            self.clear(0)
            self.finite(0)
            if len(self._conv[0]) > RESERVED:
                self.pack(0, 0, aside=True).wait()
                self.pack(0, 0, aside=False)
                self._load(0, 0, states)
            self.copy(self.pool.slots - 1, 0)
        torch.cuda.synchronize(device)

    def to_json(self) -> dict[str, Any]:
        """How each call ran: mode, why not as a graph, and graphs."""
        return {name: call.to_json() for name, call in self._calls.items()}

    def freed(self, slot: int, *, packed: bool) -> None:
        """See `tiers.Store`."""
        if not self._poison:
            return
        if packed:
            self.checkpoints.poison(slot)
            for window in self._conv:
                window[slot] = float("nan")
        else:
            self.pool.poison([slot])

    def _join_side(self) -> None:
        """Let the computation wait for packs beside it: they use the same staging."""
        if self._side is not None:
            torch.cuda.current_stream(self.pool.device).wait_stream(self._side)


class SlotCall:
    """A step on two slots whose numbers it reads from the device, captured on a GPU (`graphs.Replay`).

    Args:
        step: takes both numbers, int64 `[1]` each, and `refilled`.
        device: of the slots.
        eager: why it is never captured; None where it is on a GPU.
    """

    def __init__(
        self,
        step: Callable[[torch.Tensor, torch.Tensor, bool], None],
        device: torch.device,
        *,
        eager: str | None = None,
    ) -> None:
        self._slots = torch.zeros(2, dtype=torch.int64, device=device)
        self._pair = source, target = self._slots[:1], self._slots[1:]
        self._replay = graphs.Replay(lambda refilled: step(source, target, bool(refilled)), device)
        if eager is not None:
            self._replay.refuse(eager)

    def name(self, source: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both numbers on the device, one launch: they ride as its arguments, so there is nothing to wait for."""
        torch.linspace(source, target, 2, out=self._slots)
        return self._pair

    def run(self, *, refilled: bool = False) -> None:
        """One step on the slots that were named last."""
        self._replay(refilled)

    def __call__(self, source: int, target: int) -> None:
        """One step on two slots."""
        self.name(source, target)
        self.run()

    def to_json(self) -> dict[str, Any]:
        """How it ran."""
        return self._replay.to_json()


class _Moves:
    """The steps, on slots numbered on the device; apart from the store, which no graph then keeps alive."""

    def __init__(
        self, pool: StatePool, checkpoints: CheckpointPool, conv: Sequence[torch.Tensor]
    ) -> None:
        self._pool = pool
        self._checkpoints = checkpoints
        self._windows = tuple(
            (ours, kept)
            for (_, ours), (_, kept) in zip(pool.conv_runs, runs_of_alike(conv), strict=True)
        )
        """Runs of layers in the pool and beside the compressed slots."""
        self._nobody = torch.zeros(1, dtype=torch.int64, device=pool.device)
        self.answer = torch.zeros((), dtype=torch.bool, device=pool.device)
        """Of `finite`."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, _refilled: bool) -> None:
        """Native to native."""
        self._pool.copy(source, target)

    def finite(self, slot: torch.Tensor, _slot: torch.Tensor, _refilled: bool) -> None:
        """Into `answer`."""
        self.answer.copy_(self._pool.finite(slot))

    def pack(self, source: torch.Tensor, target: torch.Tensor, _refilled: bool) -> None:
        """Native to compressed."""
        # folded into the slot that nobody has; a running request's own goes on
        if self._pool.rings:
            self._pool.copy(source, self._nobody)
            source = self._nobody
        self._checkpoints.pack(source, target)
        for ours, kept in self._windows:
            copy_slots(ours, source, kept, target)

    def load(self, source: torch.Tensor, target: torch.Tensor, refilled: bool) -> None:
        """Compressed to native."""
        self._checkpoints.unpack(source, target, refilled=refilled)
        self._pool.empty_rings(target)
        for ours, kept in self._windows:
            copy_slots(kept, source, ours, target)


class EventTransfer:
    """A copy on another stream; done when its event is."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        """Asks the device, without waiting."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Blocks the host."""
        self._event.synchronize()
