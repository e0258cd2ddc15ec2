"""The tensors behind a prefix cache: a `StatePool` as native slots, and compressed slots beside it.

`runtime.compressed` has the formats of the latter. Convolution windows are kept whole beside either. Omitted rows are
zero after a load (NR), or come from a replay (WR) that the engine runs. On a GPU a demotion packs on a side stream that
first waits for the computation, and its event is what the cache asks; the rest is ordered on the engine's stream.

Slots are numbers from the cache, 0 is nobody's. Freed slots are poisoned, so a slot that is read too late shows as NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridstate.errors import NumericError, UsageError
from hybridstate.runtime.compressed import Kind, checkpoint_pool, row_masks
from hybridstate.runtime.exchange import Exchange
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.slots import RESERVED
from hybridstate.runtime.tiers import Finished, Prefix, Transfer

Replay = Callable[[Prefix, int], Sequence[torch.Tensor]]
"""States after a replay of the last tokens of a prefix, FP32 `[1, H, K, V]` per layer, rows in the pool's order."""


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
        slots = torch.tensor([[source], [target]], device=self.pool.device)
        self.pool.copy(slots[0], slots[1])

    def pack(self, source: int, target: int, *, aside: bool) -> Transfer:
        """See `tiers.Store`."""
        if self._side is None or not aside:
            self._join_side()
            self._pack(source, target)
            return Finished()
        self._side.wait_stream(torch.cuda.current_stream(self.pool.device))
        with torch.cuda.stream(self._side):
            self._pack(source, target)
            event = torch.cuda.Event()
            event.record(self._side)
        return EventTransfer(event)

    def load(self, source: int, target: int, prefix: Prefix) -> int:
        """See `tiers.Store`."""
        replayed = min(self.window, len(prefix.tokens))
        states = None
        if replayed and self._replay is not None:
            states = self._replay(prefix, replayed)
        self._join_side()
        self.checkpoints.unpack(source, target, states)
        self.pool.empty_rings(torch.tensor([target], device=self.pool.device))
        for window, kept in zip(self.pool.conv, self._conv, strict=True):
            window[target].copy_(kept[source])
        return replayed

    def finite(self, slot: int) -> bool:
        """See `tiers.Store`."""
        try:
            self.pool.require_finite(torch.tensor([slot], device=self.pool.device))
        except NumericError:
            return False
        return True

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

    def _pack(self, source: int, target: int) -> None:
        if self.pool.rings:  # folded into the slot that nobody has; a running request's own goes on
            self.copy(source, 0)
            source = 0
        self.checkpoints.pack(source, target)
        for window, kept in zip(self.pool.conv, self._conv, strict=True):
            kept[target].copy_(window[source])


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
