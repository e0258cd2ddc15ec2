"""Compressed slots of a prefix cache: which bytes of a native slot they keep, in which format, on which rank.

    rows       retained key rows as FP32 or INT8 (DASC Eq. 8), gathered from an FP32 pool by `kernels.transfer`
    exchanged  the same in units that any rank of an engine may have computed (`runtime.exchange`)
    packed     retained key rows of a DAMP pool in the bits they have there: FP16, or INT8 codes with their scales

Slot 0 is nobody's. Masks are bool `[H, K]` per layer: the key rows that a slot keeps, in the pool's order.

`pack` and `unpack` take slot numbers from the device and read nothing on the host there, so both can be captured. What
cannot, because it talks to other ranks or takes tensors from elsewhere, has calls of its own: `send` follows a `pack`,
`fetch` and `refill` come before an `unpack`.
"""

from collections.abc import Hashable, Sequence
from typing import Final, Literal, Protocol

import numpy as np
import torch

from hybridstate.errors import NumericError, PlanMismatch
from hybridstate.kernels.layout import DenseLayout, PackedLayout, all_finite
from hybridstate.kernels.packed_rows import KeptRows, gather_packed, scatter_packed
from hybridstate.kernels.transfer import gather_rows, scatter_rows
from hybridstate.kernels.transfer_tables import ALIGNMENT, CheckpointForm, LayerSet, RowTable
from hybridstate.runtime.exchange import Exchange
from hybridstate.runtime.pool import POISON_BYTE, StatePool
from hybridstate.runtime.slots import RESERVED
from hybridstate.trajectories.graphs import Replay

Kind = Literal["fp32", "int8", "packed"]
KINDS: Final = ("fp32", "int8", "packed")
Slots = int | torch.Tensor


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

    def pack(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Retained rows of a native slot; int64 `[1]` each."""
        ...

    def send(self, target: int) -> None:
        """To the ranks that store them, what was just packed into a slot."""
        return

    def fetch(self, source: int) -> None:
        """From the ranks that store them, what is unpacked from a slot next."""
        return

    def refill(self, target: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """States `[1, H, K, V]` per layer for the omitted rows of what is unpacked into a native slot next.

        Raises:
            NumericError: a state to pack is not finite.
        """
        ...

    def unpack(self, source: torch.Tensor, target: torch.Tensor, *, refilled: bool) -> None:
        """Into a native slot; int64 `[1]` each. Omitted rows become zero, or stay as `refill` left them."""
        ...

    def poison(self, slot: Slots) -> None:
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


class NoRows(CheckpointPool):
    """No compressed slots: every format of the pool will do."""

    slot_bytes = scratch_bytes = 0

    def pack(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """There is nowhere to."""
        raise NumericError("no slot can be packed: there are no compressed slots")

    def refill(self, target: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """There is nothing to complete."""
        raise NumericError("no slot can be loaded: there are no compressed slots")

    def unpack(self, source: torch.Tensor, target: torch.Tensor, *, refilled: bool) -> None:
        """There is nothing."""
        raise NumericError("no slot can be loaded: there are no compressed slots")

    def poison(self, slot: Slots) -> None:
        """Nothing to overwrite."""


class FloatRows(CheckpointPool):
    """Retained rows of an FP32 pool as FP32 or INT8.

    A pool in the physical order of a decode kernel is read and written through one slot of staging in rows order; from
    any other, several slots pack, load or are poisoned at once, given as int64 `[n]`.
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
        self._zero = torch.zeros(1, dtype=torch.int64, device=pool.device)

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

    def pack(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `CheckpointPool`."""
        slot = source
        if self._staging is not None:
            assert len(source) == 1, "the staging has one slot"
            layers = zip(self._pool.layouts, self._pool.states, self._staging.states, strict=True)
            for layout, state, staged in layers:
                staged.copy_(layout.unpack(state[source]))
            slot = self._zero
        gather_rows(self._rows, slot, self._buffer, target, self._table, self._form)

    def refill(self, target: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """See `CheckpointPool`."""
        if self._staging is not None:
            torch._foreach_copy_(list(self._staging.states), list(states))
            return
        for state, given in zip(self._pool.states, states, strict=True):
            state[target] = given.float()

    def unpack(self, source: torch.Tensor, target: torch.Tensor, *, refilled: bool) -> None:
        """See `CheckpointPool`."""
        slot = target if self._staging is None else self._zero
        given = (self._buffer, source, self._rows, slot, self._table, self._form)
        scatter_rows(*given, omitted="keep" if refilled else "zero")
        if self._staging is not None:
            layers = zip(self._pool.layouts, self._pool.states, self._staging.states, strict=True)
            for layout, state, staged in layers:
                state[target] = layout.pack(staged)

    def poison(self, slot: Slots) -> None:
        """See `CheckpointPool`."""
        self._buffer[slot] = POISON_BYTE


class ExchangedRows(CheckpointPool):
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
        self._zero = torch.zeros(1, dtype=torch.int64, device=pool.device)
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

    def pack(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `CheckpointPool`; into the reserved slot, from which units go to the slots of ranks."""
        self._own.pack(source, self._zero)

    def send(self, target: int) -> None:
        """See `CheckpointPool`."""
        for units, slots in zip(self._units, self._slots, strict=True):
            self._exchange.store(units, slots[target : target + 1])

    def fetch(self, source: int) -> None:
        """See `CheckpointPool`; into the reserved slot."""
        for units, slots in zip(self._units, self._slots, strict=True):
            self._exchange.load(slots[source : source + 1], units)

    def refill(self, target: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """See `CheckpointPool`."""
        self._own.refill(target, states)

    def unpack(self, source: torch.Tensor, target: torch.Tensor, *, refilled: bool) -> None:
        """See `CheckpointPool`; from the reserved slot."""
        self._own.unpack(self._zero, target, refilled=refilled)

    def poison(self, slot: Slots) -> None:
        """See `CheckpointPool`."""
        for slots in self._slots:
            slots[slot] = POISON_BYTE


class PackedRows(CheckpointPool):
    """Retained rows of a DAMP pool, bit for bit: no second quantisation, and none of its error."""

    def __init__(self, pool: StatePool, masks: Sequence[torch.Tensor], slots: int) -> None:
        if pool.state != "damp":
            raise PlanMismatch(f"packed rows are cut from a damp pool, not {pool.state}")
        self._pool = pool
        self._layouts = tuple(n for n in pool.layouts if isinstance(n, PackedLayout))
        layers = list(zip(self._layouts, masks, strict=True))
        self._kept = tuple(KeptRows.from_mask(mask, layout) for layout, mask in layers)
        self._sizes = tuple(
            size
            for kept, n in zip(self._kept, self._layouts, strict=True)
            for size in (
                2 * len(kept.high) * n.value_dim,
                len(kept.low) * n.value_dim,
                4 * len(kept.low) * n.groups,
            )
        )
        """Bytes of FP16 rows, codes and scales, layer by layer."""
        self._given: GivenStates | None = None
        row_bytes = -(-max(self.slot_bytes, 1) // ALIGNMENT) * ALIGNMENT
        self._buffer = torch.zeros(
            slots + RESERVED, row_bytes, dtype=torch.uint8, device=pool.device
        )
        """Slots as bytes: scales of every layer, then FP16 rows, then codes, so that all lie where their type must."""
        self._zeros = tuple(
            n.pack(torch.zeros(n.key_dim, n.value_dim, device=pool.device)) for n in self._layouts
        )

    @property
    def slot_bytes(self) -> int:
        """See `CheckpointPool`."""
        return sum(self._sizes)

    @property
    def scratch_bytes(self) -> int:
        """See `CheckpointPool`: none. The FP32 states of a replay are its own scratch."""
        return 0

    def pack(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `CheckpointPool`."""
        row = torch.empty_like(self._buffer[0])
        layers = zip(self._layouts, self._pool.states, self._kept, self._split(row), strict=True)
        for layout, state, kept, parts in layers:
            gather_packed(state[source][0], kept, parts, layout)
        self._buffer[target] = row

    def refill(self, target: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """See `CheckpointPool`."""
        if self._given is None:
            self._given = GivenStates(states)
        if not self._given.take(states):
            self._pool.write_states(target, states)  # says which number is not finite

    def unpack(self, source: torch.Tensor, target: torch.Tensor, *, refilled: bool) -> None:
        """See `CheckpointPool`."""
        row = self._buffer[source][0]
        layers = zip(
            *(self._layouts, self._pool.states, self._kept, self._split(row), self._zeros),
            strict=True,
        )
        if refilled:
            assert self._given is not None, "`refill` comes first"
            self._pool.put_states(target, self._given.states)
        for layout, state, kept, parts, zero in layers:
            heads = state[target][0] if refilled else zero.expand(state.shape[1:]).contiguous()
            scatter_packed(parts, kept, heads, layout)
            state[target] = heads

    def poison(self, slot: Slots) -> None:
        """See `CheckpointPool`."""
        self._buffer[slot] = POISON_BYTE  # a NaN in FP16 rows and scales

    def _split(self, row: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Views of a slot's bytes: FP16 rows `[n, V]`, codes `[m, V]` and scales `[m, groups]` per layer."""
        high, codes, scales = (self._sizes[part::3] for part in range(3))
        pieces = row[: self.slot_bytes].split([*scales, *high, *codes])
        count, found = len(self._layouts), []
        for n, layout in enumerate(self._layouts):
            found.append(
                (
                    pieces[count + n].view(torch.float16).view(-1, layout.value_dim),
                    pieces[2 * count + n].view(torch.int8).view(-1, layout.value_dim),
                    pieces[n].view(torch.float32).view(-1, layout.groups),
                )
            )
        return found


class GivenStates:
    """States from elsewhere at fixed addresses, where a captured step finds them.

    Args:
        like: states of the same shapes.
    """

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.states = [torch.empty(x.shape, device=x.device) for x in like]
        self._finite = torch.zeros((), dtype=torch.bool, device=like[0].device)
        given, answer = self.states, self._finite

        def check(_phase: Hashable) -> None:
            answer.copy_(all_finite(given))

        self._check = Replay(check, like[0].device)

    def take(self, states: Sequence[torch.Tensor]) -> bool:
        """Copy states here; whether all are finite, which on a GPU is one graph and a wait."""
        torch._foreach_copy_(self.states, list(states))
        self._check()
        return bool(self._finite)


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
