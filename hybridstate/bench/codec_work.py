"""The transfers that `bench codecs` checks and times: what each reads and writes, and its exact bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.pack import (
    PLAIN,
    Maps,
    load_packed,
    pack_states,
    store_packed,
    unpack_states,
)
from hybridstate.kernels.transfer import (
    Backend,
    copy_slots,
    gather_rows,
    refresh_rows,
    scatter_rows,
)
from hybridstate.kernels.transfer_tables import CheckpointForm, LayerSet, RowTable

SLOT_BYTES: Final = 16
"""Two int64 slot numbers of one batch row."""
RAGGED_LOAD: Final = "fp32, ragged to packed slots"
INDEX_BYTES: Final = 8
"""Row and position of one kept row, read once."""


@dataclass(frozen=True, slots=True)
class StateDims:
    """Recurrent state of a model: linear layers and one layer's geometry; `share` of its units are kept.

    `per_channel`: units are key channels (KDA) rather than heads (GDN).
    """

    name: str
    layers: int
    heads: int
    key_dim: int
    value_dim: int
    per_channel: bool
    share: float

    @property
    def dense_bytes(self) -> int:
        """FP32 bytes of one slot."""
        return 4 * self.layers * self.heads * self.key_dim * self.value_dim


KIMI_LINEAR: Final = StateDims("kimi-linear", 20, 32, 128, 128, True, 0.3587)
"""42 MB of FP32 a slot; the share of channels that DASC keeps there, drawn at random here."""
QWEN3_NEXT: Final = StateDims("qwen3-next", 36, 32, 128, 128, False, 0.6078)
TINY: Final = StateDims("tiny", 2, 2, 32, 64, True, 0.4)
"""For a CPU."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One operation.

    Attributes:
        name: what moves where.
        run: starts it.
        nbytes: bytes read and written, each once: states, checkpoints, scales, tables.
        results: what it wrote, for the comparison.
    """

    name: str
    run: Callable[[], None]
    nbytes: int
    results: tuple[Tensor, ...]


class Workload:
    """Random states and everything they are moved into, on one device.

    Args:
        dims: sizes.
        slots: slots moved by one launch.
        device: where.
        seed: of states, masks and maps; equal on every device for `host_states`.
        backend: of every transfer.
        host_states: draw states on the CPU, so that two devices hold the same.
    """

    def __init__(
        self,
        dims: StateDims,
        slots: int,
        device: torch.device,
        seed: int,
        backend: Backend,
        *,
        host_states: bool = False,
    ) -> None:
        self.dims, self.count, self.backend, self.device = dims, slots, backend, device
        host = torch.Generator().manual_seed(seed)
        units = (dims.layers, dims.heads, dims.key_dim)[: 3 if dims.per_channel else 2]
        masks = (torch.rand(units, generator=host) < dims.share).to(device)
        order = torch.rand(dims.layers, dims.heads, dims.key_dim, generator=host).argsort(-1)
        scale = torch.rand(dims.layers, dims.heads, dims.value_dim, generator=host) + 0.5
        self.maps = Maps(order.to(torch.uint8).to(device), scale.to(device))
        self.order = torch.randperm(slots, generator=host).to(device)
        self.straight = torch.arange(slots, device=device)
        self.ragged = RowTable.from_masks(masks, dims.key_dim)
        self.padded = RowTable.from_masks(masks, dims.key_dim, padded=True)
        self.everything = RowTable.from_masks(torch.ones_like(masks), dims.key_dim)
        shape = (dims.layers, slots, dims.heads, dims.key_dim, dims.value_dim)
        where = torch.device("cpu") if host_states else device
        generator = torch.Generator(where).manual_seed(seed)
        states = torch.randn(shape, generator=generator, device=where).to(device)
        self.dense = LayerSet.of(list(states))
        self.back = LayerSet.of(list(torch.zeros_like(states)))

    def transfers(self) -> list[Transfer]:
        """All operations, each with buffers of its own so that one does not depend on another having run."""
        return [*self._packs("fragment"), *self._packs("natural"), *self._rows(), *self._others()]

    def ragged_load(self) -> Transfer:
        """The one from FP32 checkpoint rows to packed slots."""
        return next(x for x in self._others() if x.name == RAGGED_LOAD)

    # -- packed --------------------------------------------------------------------------------

    def _packed(self, layout: PackedLayout, *, filled: bool) -> LayerSet:
        dims = self.dims
        shape = (dims.layers, self.count, dims.heads, layout.head_bytes)
        pool = LayerSet.of(list(torch.zeros(shape, dtype=torch.uint8, device=self.device)))
        if filled:
            pack_states(
                self.dense, self.straight, pool, self.straight, layout, backend=self.backend
            )
        return pool

    def layout(self, order: str) -> PackedLayout | None:
        """The packed layout of this order, where it exists."""
        dims = self.dims
        protected = min(dims.key_dim, 16 * max(1, round(dims.key_dim / 128)))
        natural = PackedLayout(dims.key_dim, dims.value_dim, protected, order="natural")
        if order == "natural":
            return natural
        return (
            PackedLayout(dims.key_dim, dims.value_dim, protected)
            if natural.has_fragment_order
            else None
        )

    def _packs(self, order: str) -> list[Transfer]:
        layout, dims = self.layout(order), self.dims
        if layout is None:
            return []
        packed = dims.layers * dims.heads * layout.payload_bytes
        moved = self.count * (dims.dense_bytes + packed + SLOT_BYTES)
        tables = 2 * 8 * dims.layers
        maps = dims.layers * dims.heads * (dims.key_dim + 4 * dims.value_dim)
        full, backend = self._packed(layout, filled=True), self.backend
        found = []
        for label, mapping in (("", PLAIN), (", key order and value scale", self.maps)):
            extra = tables + (maps if label else 0)
            into = self._packed(layout, filled=False)

            def pack(into: LayerSet = into, mapping: Maps = mapping) -> None:
                pack_states(
                    self.dense,
                    self.straight,
                    into,
                    self.order,
                    layout,
                    maps=mapping,
                    backend=backend,
                )

            def unpack(mapping: Maps = mapping) -> None:
                unpack_states(
                    full,
                    self.order,
                    self.back,
                    self.straight,
                    layout,
                    maps=mapping,
                    backend=backend,
                )

            found.append(Transfer(f"pack {order}{label}", pack, moved + extra, into.tensors))
            found.append(
                Transfer(f"unpack {order}{label}", unpack, moved + extra, self.back.tensors)
            )
        return found

    # -- checkpoints ---------------------------------------------------------------------------

    def _rows(self) -> list[Transfer]:
        found = []
        for codec, dtype in (
            ("fp32", torch.float32),
            ("int8", torch.float32),
            ("int8", torch.bfloat16),
        ):
            form = CheckpointForm(codec, self.dims.value_dim, dtype)  # type: ignore[arg-type]
            name = codec + (" with bf16 scales" if dtype == torch.bfloat16 else "")
            for kept, table in (
                ("all units", self.everything),
                ("ragged", self.ragged),
                ("padded", self.padded),
            ):
                if dtype == torch.bfloat16 and kept != "ragged":
                    continue
                found += self._both_ways(f"{name}, {kept}", table, form, zero=kept == "ragged")
        return found

    def _both_ways(
        self, label: str, table: RowTable, form: CheckpointForm, *, zero: bool
    ) -> list[Transfer]:
        row, rows, backend = 4 * self.dims.value_dim, table.count, self.backend
        moved = self.count * (rows * (row + form.row_bytes) + SLOT_BYTES)
        fixed = rows * INDEX_BYTES + 8 * self.dims.layers
        empty, full = form.buffer(self.count, table), form.buffer(self.count, table)
        gather_rows(self.dense, self.straight, full, self.straight, table, form, backend=backend)

        def gather() -> None:
            gather_rows(self.dense, self.straight, empty, self.order, table, form, backend=backend)

        def scatter() -> None:
            scatter_rows(full, self.order, self.back, self.straight, table, form, backend=backend)

        def fill() -> None:
            scatter_rows(
                full, self.order, self.back, self.straight, table, form, omitted="zero", backend=backend
            )  # fmt: skip

        found = [
            Transfer(f"gather {label}", gather, moved + fixed, (empty,)),
            Transfer(f"scatter {label}", scatter, moved + fixed, self.back.tensors),
        ]
        if zero:
            total = len(table.every)
            nbytes = self.count * (rows * form.row_bytes + total * row + SLOT_BYTES)
            nbytes += total * INDEX_BYTES + 8 * self.dims.layers
            found.append(Transfer(f"scatter {label}, zero fill", fill, nbytes, self.back.tensors))
        return found

    # -- others --------------------------------------------------------------------------------

    def _others(self) -> list[Transfer]:
        dims, table, backend = self.dims, self.ragged, self.backend
        omitted = len(table.omitted)
        layout = self.layout("fragment") or self.layout("natural")
        assert layout is not None
        full, into = self._packed(layout, filled=True), self._packed(layout, filled=False)
        form = CheckpointForm("fp32", dims.value_dim)
        rows, target = form.buffer(self.count, table), self._packed(layout, filled=False)
        stored = form.buffer(self.count, table)
        gather_rows(self.dense, self.straight, stored, self.straight, table, form, backend=backend)
        packed = dims.layers * dims.heads * layout.payload_bytes
        checkpoint = form.temporal_bytes(table) + SLOT_BYTES
        fixed = 4 * len(table.every) + 16 * dims.layers

        def refresh() -> None:
            refresh_rows(
                self.dense, self.order, self.back, self.straight, table.omitted, backend=backend
            )

        def copy() -> None:
            copy_slots(full, self.straight, into, self.order, backend=backend)

        def store() -> None:
            store_packed(full, self.straight, rows, self.order, table, layout, backend=backend)

        def load() -> None:
            load_packed(stored, self.order, target, self.straight, table, layout, backend=backend)

        # a packed tile whose rows are all omitted is still read: its codes, halves and scales
        return [
            Transfer(
                "copy back omitted units",
                refresh,
                self.count * (omitted * 8 * dims.value_dim + SLOT_BYTES)
                + 4 * omitted
                + 16 * dims.layers,
                self.back.tensors,
            ),
            Transfer(
                "copy packed slots",
                copy,
                self.count * (2 * full.slot_bytes + SLOT_BYTES) + 16 * dims.layers,
                into.tensors,
            ),
            Transfer(
                "packed slots to fp32, ragged",
                store,
                self.count * (packed + checkpoint) + fixed,
                (rows,),
            ),
            Transfer(
                RAGGED_LOAD,
                load,
                self.count * (packed + checkpoint) + fixed,
                target.tensors,
            ),
        ]
