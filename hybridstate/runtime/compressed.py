"""Compressed slots of a prefix cache: which bytes of a native slot they keep, in which format, on which rank.

    rows       retained key rows as FP32 or INT8 (DASC Eq. 8), gathered from an FP32 pool by `kernels.transfer`
    exchanged  the same in units that any rank of an engine may have computed (`runtime.exchange`)
    packed     retained key rows of a DAMP pool in the bits they have there: FP16, or INT8 codes with their scales

Slot 0 is nobody's. Masks are bool `[H, K]` per layer: the key rows that a slot keeps, in the pool's order.
"""

from collections.abc import Sequence
from typing import Final, Literal, Protocol

import numpy as np
import torch

from hybridstate.errors import NumericError, PlanMismatch
from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.packed_rows import KeptRows, gather_packed, scatter_packed
from hybridstate.kernels.transfer import gather_rows, refresh_rows, scatter_rows
from hybridstate.kernels.transfer_tables import CheckpointForm, LayerSet, RowTable
from hybridstate.runtime.exchange import Exchange
from hybridstate.runtime.pool import POISON_BYTE, StatePool
from hybridstate.runtime.slots import RESERVED

Kind = Literal["fp32", "int8", "packed"]
KINDS: Final = ("fp32", "int8", "packed")
Slots = int | Sequence[int]


class CheckpointPool(Protocol):
    """Compressed slots of one format."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, without convolution windows."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside the slots."""
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


def checkpoint_pool(
    pool: StatePool,
    masks: Sequence[torch.Tensor],
    slots: int,
    kind: Kind,
    exchange: Exchange | None,
) -> CheckpointPool:
    """Compressed slots beside a pool.

    Raises:
        PlanMismatch: the format does not fit the pool, or the exchange not the masks.
    """
    if not slots:
        return NoRows()
    if exchange is not None:
        return ExchangedRows(pool, masks, slots, kind, exchange)
    if kind == "packed":
        return PackedRows(pool, masks, slots)
    return FloatRows(pool, masks, slots, kind)


class NoRows:
    """No compressed slots: every format of the pool will do."""

    slot_bytes = scratch_bytes = 0

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

    A pool in the physical order of a decode kernel is read and written through one slot of staging in rows order; from
    any other, several slots pack, load or are poisoned at once, given as sequences of equal length.
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

    @property
    def scratch_bytes(self) -> int:
        """See `CheckpointPool`."""
        return 0 if self._staging is None else self._staging.nbytes

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The slots as bytes `[slots, rows, bytes]`: values, and with INT8 the scales behind them."""
        rows, values, width = self._table.length, self._form.row_bytes, self._form.value_dim
        split = [values] if self._form.codec == "fp32" else [width, values - width]
        ends = np.cumsum([0, *split]) * rows
        return tuple(
            self._buffer[:, start:end].unflatten(1, (rows, size))
            for start, end, size in zip(ends, ends[1:], split, strict=False)
        )

    def pack(self, source: Slots, target: Slots) -> None:
        """See `CheckpointPool`."""
        slot: Slots = source
        if self._staging is not None:
            assert isinstance(source, int), "the staging has one slot"
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

    def unpack(self, source: Slots, target: Slots, omitted: Sequence[torch.Tensor] | None) -> None:
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
            rows = torch.arange(len(slot), device=self._pool.device)
            refresh_rows(fresh, rows, self._rows, slot, self._table.omitted)
        if self._staging is not None:
            layers = zip(self._pool.layouts, self._pool.states, self._staging.states, strict=True)
            for layout, state, staged in layers:
                state[target] = layout.pack(staged[0])

    def poison(self, slot: Slots) -> None:
        """See `CheckpointPool`."""
        self._buffer[slot if isinstance(slot, int) else self._index(slot)] = POISON_BYTE

    def _index(self, slots: Slots) -> torch.Tensor:
        numbers = [slots] if isinstance(slots, int) else list(slots)
        return torch.tensor(numbers, device=self._pool.device)


class ExchangedRows:
    """Retained rows of an FP32 pool as FP32 or INT8, in slots of units that any rank may have computed.

    Every rank packs and loads the same slots in the same order; only what belongs elsewhere travels.

    Raises:
        PlanMismatch: packed rows, or masks of other units than the exchange moves.
    """

    def __init__(
        self,
        pool: StatePool,
        masks: Sequence[torch.Tensor],
        slots: int,
        kind: Kind,
        exchange: Exchange,
    ) -> None:
        if kind == "packed":
            raise PlanMismatch("packed rows differ in size, so they stay on the rank they are of")
        route = exchange.route
        per_unit = 1 if pool.spec.unit == "channel" else pool.spec.layers[0].key_dim
        self._exchange = exchange
        self._own = FloatRows(pool, masks, 0, kind)
        kept = sum(int(mask.sum()) for mask in masks)
        if kept != route.local_units * per_unit:
            raise PlanMismatch(
                f"rank {route.rank} exchanges {route.local_units} units, the masks keep {kept} key rows",
                found=kept,
                expected=route.local_units * per_unit,
            )
        widths = [per_unit * part.shape[2] for part in self._own.parts]
        self._units = tuple(
            part.view(1, route.local_units, width)
            for part, width in zip(self._own.parts, widths, strict=True)
        )
        """This rank's units of one checkpoint as bytes `[1, n_r, bytes]`, views of the reserved slot."""
        self._slots = tuple(
            torch.zeros(
                slots + RESERVED, route.slot_units, width, dtype=torch.uint8, device=pool.device
            )
            for width in widths
        )

    @property
    def slot_bytes(self) -> int:
        """See `CheckpointPool`; the same on every rank."""
        return sum(slots[0].numel() for slots in self._slots)

    @property
    def scratch_bytes(self) -> int:
        """See `CheckpointPool`: units on their way, and what a checkpoint here takes beyond a slot to pack into."""
        route = self._exchange.route
        moving = len(route.sent) + len(route.received_slots)
        widths = sum(units.shape[2] for units in self._units)
        more = max(0, self._own.slot_bytes - self.slot_bytes)
        return self._own.scratch_bytes + more + moving * widths

    def pack(self, source: int, target: int) -> None:
        """See `CheckpointPool`."""
        self._own.pack(source, 0)
        for units, slots in zip(self._units, self._slots, strict=True):
            self._exchange.store(units, slots[target : target + 1])

    def unpack(self, source: int, target: int, omitted: Sequence[torch.Tensor] | None) -> None:
        """See `CheckpointPool`."""
        for units, slots in zip(self._units, self._slots, strict=True):
            self._exchange.load(slots[source : source + 1], units)
        self._own.unpack(0, target, omitted)

    def poison(self, slot: int) -> None:
        """See `CheckpointPool`."""
        for slots in self._slots:
            slots[slot] = POISON_BYTE


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

    @property
    def scratch_bytes(self) -> int:
        """See `CheckpointPool`: none."""
        return 0

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


def row_masks(pool: StatePool, retained: Sequence[torch.Tensor] | None) -> tuple[torch.Tensor, ...]:
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
