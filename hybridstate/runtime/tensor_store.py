"""The tensors behind a prefix cache: a `StatePool` as native slots, and a pool of compressed checkpoints.

    rows     retained key rows as FP32 or INT8 (DASC Eq. 8), gathered from an FP32 pool by `kernels.transfer`
    packed   retained key rows of a DAMP pool in the bits they have there: FP16, or INT8 codes with their scales

Convolution windows are kept whole beside either. Omitted rows are zero after a load (NR), or come from a replay (WR)
that the engine runs. On a GPU a demotion packs on a side stream that first waits for the computation, and its event is
what the cache asks; everything else is ordered on the engine's stream.

Slots are numbers from the cache, 0 is nobody's. Freed slots are poisoned, so a slot that is read too late shows as NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, Protocol

import torch

from hybridstate.errors import NumericError, PlanMismatch, UsageError
from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.packed_rows import KeptRows, gather_packed, scatter_packed
from hybridstate.kernels.transfer import gather_rows, refresh_rows, scatter_rows
from hybridstate.kernels.transfer_tables import CheckpointForm, LayerSet, RowTable
from hybridstate.runtime.pool import POISON_BYTE, StatePool
from hybridstate.runtime.slots import RESERVED
from hybridstate.runtime.tiers import Finished, Prefix, Transfer

Kind = Literal["fp32", "int8", "packed"]
KINDS: Final = ("fp32", "int8", "packed")

Replay = Callable[[Prefix, int], Sequence[torch.Tensor]]
"""States after a replay of the last tokens of a prefix, FP32 `[1, H, K, V]` per layer, rows in the pool's order."""


class CheckpointPool(Protocol):
    """Compressed slots of one format."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, without convolution windows."""
        ...

    def pack(self, source: int, target: int) -> None:
        """Retained rows of a native slot."""
        ...

    def unpack(self, source: int, target: int, omitted: Sequence[torch.Tensor] | None) -> None:
        """Into a native slot; omitted rows from `omitted` `[1, H, K, V]` per layer, zero without."""
        ...

    def poison(self, slot: int) -> None:
        """Nobody's from here on."""
        ...


class TensorStore:
    """`tiers.Store` on tensors.

    Args:
        pool: all of its slots become the cache's, number 0 unused: the cache gets `pool.slots - 1` native slots. Must
            be wholly free.
        packed: usable compressed slots, 0 for the dense baseline.
        retained: bool `[H]` (heads) or `[H, K]` (key channels in the pool's row order) per layer; None keeps every row.
        kind: format of the compressed slots.
        window, replay: tokens to replay at a load of a compressed slot, and who does; 0 fills with zeros.
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
        masks = _row_masks(pool, retained)
        self.checkpoints: CheckpointPool = NoRows()
        if packed:
            self.checkpoints = (
                PackedRows(pool, masks, packed)
                if kind == "packed"
                else FloatRows(pool, masks, packed, kind)
            )
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
        if isinstance(self.checkpoints, NoRows):
            return 0
        conv = sum(w[0].numel() * w.element_size() for w in self._conv)
        return self.checkpoints.slot_bytes + conv

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside both pools: a slot in rows order where the pool has a kernel's order."""
        staging = self.checkpoints._staging if isinstance(self.checkpoints, FloatRows) else None
        return 0 if staging is None else staging.nbytes

    def clear(self, slot: int) -> None:
        """The zero state, in which a request without a hit begins."""
        for state, zero in zip(self.pool.states, self._zeros, strict=True):
            state[slot] = zero
        for window in self.pool.conv:
            window[slot] = 0.0

    def copy(self, source: int, target: int) -> None:
        """See `tiers.Store`."""
        slots = torch.tensor([[source], [target]], device=self.pool.device)
        self.pool.copy(slots[0], slots[1])

    def pack(self, source: int, target: int, *, aside: bool) -> Transfer:
        """See `tiers.Store`."""
        if self._side is None or not aside:
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
        self.checkpoints.unpack(source, target, states)
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

    def _pack(self, source: int, target: int) -> None:
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


class NoRows:
    """No compressed slots: every format of the pool will do."""

    slot_bytes = 0

    def pack(self, source: int, target: int) -> None:
        """There is nowhere to."""
        raise NumericError(f"slot {source} cannot be packed: there are no compressed slots")

    def unpack(self, source: int, target: int, omitted: Sequence[torch.Tensor] | None) -> None:
        """There is nothing."""
        raise NumericError(f"slot {target} cannot be loaded: there are no compressed slots")

    def poison(self, slot: int) -> None:
        """Nothing to overwrite."""


class FloatRows:
    """Retained rows of an FP32 pool as FP32 or INT8.

    A pool in the physical order of a decode kernel is read and written through one slot of staging in rows order.
    """

    def __init__(
        self, pool: StatePool, masks: Sequence[torch.Tensor], slots: int, kind: Kind
    ) -> None:
        if pool.state != "fp32":
            raise PlanMismatch(
                f"{kind} checkpoints are cut from an fp32 pool, not {pool.state}",
                hint="a packed pool keeps its rows as they are: kind='packed'",
            )
        self._pool = pool
        self._form = CheckpointForm(
            "int8" if kind == "int8" else "fp32", pool.spec.layers[0].value_dim
        )
        self._table = RowTable.from_masks(torch.stack(list(masks)), pool.spec.layers[0].key_dim)
        self._buffer = self._form.buffer(slots + RESERVED, self._table)
        direct = all(isinstance(n, DenseLayout) and n.order == "rows" for n in pool.layouts)
        self._staging = None if direct else StatePool(pool.spec, 1, device=pool.device)
        self._rows = LayerSet.of(pool.states if self._staging is None else self._staging.states)

    @property
    def slot_bytes(self) -> int:
        """See `CheckpointPool`."""
        return self._form.temporal_bytes(self._table)

    def pack(self, source: int, target: int) -> None:
        """See `CheckpointPool`."""
        slot = source
        if self._staging is not None:
            states, _ = self._pool.read(self._index(source))
            for kept, state in zip(self._staging.states, states, strict=True):
                kept.copy_(state)
            slot = 0
        gather_rows(
            self._rows,
            self._index(slot),
            self._buffer,
            self._index(target),
            self._table,
            self._form,
        )

    def unpack(self, source: int, target: int, omitted: Sequence[torch.Tensor] | None) -> None:
        """See `CheckpointPool`."""
        slot = self._index(target if self._staging is None else 0)
        scatter_rows(
            self._buffer,
            self._index(source),
            self._rows,
            slot,
            self._table,
            self._form,
            omitted="zero",
        )
        if omitted is not None and len(self._table.omitted):
            fresh = LayerSet.of([state.float().contiguous() for state in omitted])
            refresh_rows(fresh, self._index(0), self._rows, slot, self._table.omitted)
        if self._staging is not None:
            layers = zip(self._pool.layouts, self._pool.states, self._staging.states, strict=True)
            for layout, state, staged in layers:
                state[target] = layout.pack(staged[0])

    def poison(self, slot: int) -> None:
        """See `CheckpointPool`."""
        self._buffer[slot] = POISON_BYTE

    def _index(self, slot: int) -> torch.Tensor:
        return torch.tensor([slot], device=self._pool.device)


class PackedRows:
    """Retained rows of a DAMP pool, bit for bit: no second quantisation, and none of its error."""

    def __init__(self, pool: StatePool, masks: Sequence[torch.Tensor], slots: int) -> None:
        if pool.state != "damp":
            raise PlanMismatch(f"packed rows are cut from a damp pool, not {pool.state}")
        self._pool = pool
        self._layouts = tuple(n for n in pool.layouts if isinstance(n, PackedLayout))
        layers = list(zip(self._layouts, masks, strict=True))
        self._kept = tuple(KeptRows.from_mask(mask, layout) for layout, mask in layers)
        self._parts = tuple(
            kept.buffers(slots + RESERVED, layout)
            for kept, layout in zip(self._kept, self._layouts, strict=True)
        )
        self._zeros = tuple(
            n.pack(torch.zeros(n.key_dim, n.value_dim, device=pool.device)) for n in self._layouts
        )

    @property
    def slot_bytes(self) -> int:
        """See `CheckpointPool`."""
        return sum(x[0].numel() * x.element_size() for parts in self._parts for x in parts)

    def pack(self, source: int, target: int) -> None:
        """See `CheckpointPool`."""
        layers = zip(self._layouts, self._pool.states, self._kept, self._parts, strict=True)
        for layout, state, kept, (high, codes, scales) in layers:
            gather_packed(
                state[source], kept, (high[target], codes[target], scales[target]), layout
            )

    def unpack(self, source: int, target: int, omitted: Sequence[torch.Tensor] | None) -> None:
        """See `CheckpointPool`."""
        if omitted is None:
            for state, zero in zip(self._pool.states, self._zeros, strict=True):
                state[target] = zero
        else:
            slot = torch.tensor([target], device=self._pool.device)
            self._pool.write_states(slot, omitted)
        layers = zip(self._layouts, self._pool.states, self._kept, self._parts, strict=True)
        for layout, state, kept, (high, codes, scales) in layers:
            rows = (high[source], codes[source], scales[source])
            scatter_packed(rows, kept, state[target], layout)

    def poison(self, slot: int) -> None:
        """See `CheckpointPool`."""
        for high, codes, scales in self._parts:
            high[slot], scales[slot] = float("nan"), float("nan")
            codes[slot] = -1


def _row_masks(
    pool: StatePool, retained: Sequence[torch.Tensor] | None
) -> tuple[torch.Tensor, ...]:
    """Bool `[H, K]` per layer: the key rows that a checkpoint keeps."""
    layers = pool.spec.layers
    if retained is None:
        return tuple(
            torch.ones(n.value_heads, n.key_dim, dtype=torch.bool, device=pool.device)
            for n in layers
        )
    if len(retained) != len(layers):
        raise PlanMismatch(
            f"{len(retained)} masks for {len(layers)} linear layers",
            found=len(retained),
            expected=len(layers),
        )
    masks = []
    for layer, mask in zip(layers, retained, strict=True):
        whole = (layer.value_heads, layer.key_dim)
        if tuple(mask.shape) not in (whole[:1], whole):
            raise PlanMismatch(
                f"block {layer.index}: mask {list(mask.shape)} fits neither heads nor channels {list(whole)}",
                found=list(mask.shape),
                expected=list(whole),
            )
        rows = mask.unsqueeze(-1) if mask.dim() == 1 else mask
        masks.append(rows.to(pool.device, torch.bool).expand(whole).contiguous())
    return tuple(masks)
