"""Slots of recurrent and convolution state, one tensor per linear layer.

A slot holds everything a request carries between two steps outside the attention KV: the temporal state of every
linear layer, dense (`fp32`, `bf16`, `fp16`: `[P, H, K, V]`) or packed (`damp`: uint8 `[P, H, head_bytes]`), each in the
physical order of `kernels.layout`, and the convolution window `[P, C, W - 1]`, oldest token first, channels
ordered `[q | k | v]`.

Free slots are poisoned: NaN in float tensors, bytes 0xFF (a NaN in FP16 rows and FP32 scales) in packed ones. A slot
that was not completely written therefore shows as NaN downstream instead of as somebody else's state.

Packed slots are written, read and copied by `kernels.pack` and `kernels.transfer`, all layers in one launch on a GPU.

Where a packed state is rewritten only at every L-th update, a slot also holds a ring of the inputs since
(`kernels.ring_reference`). A write empties it; a read gives the state that both stand for and changes neither; a copy
is folded, so that what leaves a slot is packed state alone. Rings begin at phase 0: when a request's state is rewritten
depends on the request, not on its slot.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Literal, get_args

import torch

from hybridstate.defaults import GROUP
from hybridstate.errors import NumericError, PlanMismatch, UsageError
from hybridstate.families import LinearLayer, ModelSpec
from hybridstate.kernels import ring_reference, ring_update
from hybridstate.kernels.layout import DenseLayout, DenseOrder, PackedLayout, all_finite
from hybridstate.kernels.pack import pack_states, unpack_states
from hybridstate.kernels.ring_reference import LONGEST, Ring
from hybridstate.kernels.transfer import Backend, copy_slots
from hybridstate.kernels.transfer_tables import LayerSet
from hybridstate.quant.ring import ring_bits

StateFormat = Literal["fp32", "bf16", "fp16", "damp"]
STATE_FORMATS: Final[tuple[str, ...]] = get_args(StateFormat)

POISON_BYTE: Final = 0xFF
DENSE: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def default_k_hi(layer: LinearLayer) -> int:
    """Protected key channels when nobody says otherwise: 16 for every 128, at most `K` (DAMP 6.1)."""
    return min(layer.key_dim, 16 * max(1, round(layer.key_dim / 128)))


class StatePool:
    """`slots` slots for the linear layers of `spec`, all free and poisoned at first.

    Args:
        spec: geometry of the model.
        slots: number of slots `P`, at least 1.
        state: storage of the temporal state.
        k_hi: protected channels per head under `damp`; the default follows `default_k_hi`.
        dense_order: physical order of a dense state.
        every: updates between two writes of a packed state; 1 keeps no ring.
        ring_key_heads: per layer the key heads that its ring tells apart; those of the model by default.
        conv_dtype: storage of the convolution window.
        device: where the tensors live.

    Raises:
        UsageError: unknown format, no slots, `k_hi` that does not fit the key dimension, or no such ring.
    """

    def __init__(
        self,
        spec: ModelSpec,
        slots: int,
        *,
        state: str = "fp32",
        k_hi: int | None = None,
        dense_order: DenseOrder = "rows",
        every: int = 1,
        ring_key_heads: Sequence[int] | None = None,
        conv_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        if state not in STATE_FORMATS:
            raise UsageError(
                f"unknown state format {state!r}", hint=f"choose from {', '.join(STATE_FORMATS)}"
            )
        if slots < 1:
            raise UsageError(f"a pool needs at least one slot, got {slots}")
        if not 1 <= every <= (LONGEST if state == "damp" else 1):
            raise UsageError(
                f"a {state} state cannot be written once in {every} updates",
                hint=f"damp once in 1 to {LONGEST}, the others at every one",
            )
        self.spec = spec
        self.slots = slots
        self.state = state
        self.every = every
        self.conv_dtype = conv_dtype
        self.device = torch.device(device)
        self.layouts: tuple[PackedLayout | DenseLayout, ...] = tuple(
            _packed_layout(layer, k_hi, every)
            if state == "damp"
            else DenseLayout(layer.key_dim, layer.value_dim, DENSE[state], dense_order)
            for layer in spec.layers
        )
        self.states = tuple(
            self._temporal(layer, layout)
            for layer, layout in zip(spec.layers, self.layouts, strict=True)
        )
        self.conv = tuple(
            torch.empty(
                (slots, layer.conv_channels, layer.conv_width - 1),
                dtype=conv_dtype,
                device=self.device,
            )
            for layer in spec.layers
        )
        keys = ring_key_heads or [layer.key_heads for layer in spec.layers]
        self._per_channel = spec.unit == "channel"
        self._ringed: tuple[tuple[LinearLayer, PackedLayout, int], ...] = ()
        """Layer, layout and key heads of every ring."""
        if every > 1:
            self._ringed = tuple(zip(spec.layers, self.packed_layouts, keys, strict=True))
        self.rings = tuple(
            Ring.empty(
                slots,
                n,
                layer.value_heads,
                layout,
                every,
                per_channel=self._per_channel,
                device=self.device,
            )
            for layer, layout, n in self._ringed
        )
        """Of each layer; none where every update writes."""
        self._free = list(range(slots))
        self._backend: Backend = "auto"
        self._runs = runs_of_alike(self.states)
        self.conv_runs = runs_of_alike(self.conv)
        self.poison(range(slots))
        assert self.held_bytes == self.nbytes, f"{self.held_bytes} bytes, accounted {self.nbytes}"

    def _temporal(self, layer: LinearLayer, layout: PackedLayout | DenseLayout) -> torch.Tensor:
        shape: tuple[int, ...] = (self.slots, layer.value_heads)
        if isinstance(layout, PackedLayout):
            shape, dtype = (*shape, layout.head_bytes), torch.uint8
        else:
            shape, dtype = (*shape, layer.key_dim, layer.value_dim), layout.dtype
        return torch.empty(shape, dtype=dtype, device=self.device)

    @property
    def packed_layouts(self) -> tuple[PackedLayout, ...]:
        """The layouts of a `damp` pool."""
        return tuple(n for n in self.layouts if isinstance(n, PackedLayout))

    # -- bytes ---------------------------------------------------------------------------------

    @property
    def ring_bytes(self) -> int:
        """Bytes of the rings of one slot, from the geometry alone."""
        total = 0.0
        for layer, layout, keys in self._ringed:
            bits = ring_bits(
                replace(layer, key_heads=keys), self.every, per_channel=self._per_channel
            )
            total += bits * layer.value_heads * layout.key_dim * layout.value_dim / 8
        return round(total)

    @property
    def temporal_bytes(self) -> int:
        """Bytes of temporal state in one slot with its rings, from the geometry alone."""
        stored = sum(
            layer.value_heads * layout.head_bytes
            for layer, layout in zip(self.spec.layers, self.layouts, strict=True)
        )
        return stored + self.ring_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of temporal state and rings that one update of one slot reads and writes, mean over the updates."""
        if not self.rings:
            return 2 * self.temporal_bytes
        total = 0.0
        for layer, layout, keys in self._ringed:
            heads, channel = layer.value_heads, self._per_channel
            total += sum(
                ring_reference.step_bytes(layout, keys, heads, self.every, per_channel=channel)
            )
        return round(total)

    @property
    def conv_bytes(self) -> int:
        """Bytes of convolution window in one slot."""
        itemsize = self.conv_dtype.itemsize
        return sum(n.conv_channels * (n.conv_width - 1) * itemsize for n in self.spec.layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.temporal_bytes + self.conv_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, from the geometry; equal to what its tensors hold."""
        return self.slots * self.slot_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool's tensors as they are now."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that a slot consists of, each `[P, ...]`."""
        rings = (part for ring in self.rings for part in ring.parts)
        return (*self.states, *self.conv, *rings)

    @property
    def layers(self) -> LayerSet:
        """The states of all layers for one launch.

        Raises:
            PlanMismatch: layers differ in shape.
        """
        if len(self._runs) > 1:
            raise PlanMismatch("linear layers of different shapes do not join in one launch")
        return self._runs[0][1]

    # -- slots ---------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Free slots."""
        return len(self._free)

    def alloc(self, count: int) -> torch.Tensor | None:
        """`count` free slots as int64 `[count]`, ascending and contiguous where such a run exists.

        Returns None when fewer are free: a full pool is an answer, not a failure.
        """
        if count > len(self._free):
            return None
        start = next(
            (
                i
                for i in range(len(self._free) - count + 1)
                if count == 0 or self._free[i + count - 1] - self._free[i] == count - 1
            ),
            0,
        )
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return torch.tensor(taken, dtype=torch.int64, device=self.device)

    def free(self, slots: torch.Tensor) -> None:
        """Poison the slots and take them back."""
        numbers = [int(s) for s in slots.tolist()]
        again = set(numbers) & set(self._free)
        if again or len(set(numbers)) != len(numbers):
            raise UsageError(f"slots freed twice: {sorted(again) or numbers}")
        self.poison(numbers)
        self._free = sorted([*self._free, *numbers])

    def poison(self, slots: Iterable[int]) -> None:
        """Overwrite slots with NaN, or with 0xFF bytes where the state is packed."""
        rows = torch.tensor(list(slots), dtype=torch.int64, device=self.device)
        for tensor in self.tensors:
            if tensor.is_floating_point():
                tensor[rows] = float("nan")
            elif tensor.dtype == torch.uint8:
                tensor[rows] = POISON_BYTE
            else:  # phases: all entries count
                tensor[rows] = self.every - 1

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole slots; int64 `[n]` each, no slot in both.

        Bit for bit, except that what a ring holds is folded into the copy: the bytes are those of `fold` at the source.
        """
        for _, layers in (*self._runs, *self.conv_runs):
            copy_slots(layers, source, layers, target, backend=self._backend)
        for ring in self.rings:
            ring.copy(source, target)
        self.fold(target)

    # -- rings ---------------------------------------------------------------------------------

    def fold(self, slots: torch.Tensor) -> None:
        """Write what the rings of slots hold into their packed states; one requantisation where one holds anything."""
        for state, layout, ring in zip(self.states, self.packed_layouts, self.rings, strict=False):
            ring_update.ring_flush(state, ring, slots, layout=layout)

    def empty_rings(self, slots: torch.Tensor) -> None:
        """Say that packed states of slots were just written, by somebody else than `write`; no synchronisation."""
        for ring in self.rings:
            ring.start(slots, stagger=False)

    def _folded(self, ordinal: int, state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The FP32 state `[B, H, K, V]` that a layer's unpacked state and its ring stand for."""
        if not self.rings:
            return state
        return ring_reference.ring_state(state.double(), self.rings[ordinal], slots).float()

    # -- contents ------------------------------------------------------------------------------

    def write(
        self, slots: torch.Tensor, states: Sequence[torch.Tensor], conv: Sequence[torch.Tensor]
    ) -> None:
        """Store states `[B, H, K, V]` (rows in stored order) and windows `[B, C, W - 1]` per layer.

        Raises:
            NumericError: a state to pack is not finite.
        """
        if self.state == "damp" and len(slots):
            self._require_packable(states)
        self.put(slots, states, conv)

    def put(
        self, slots: torch.Tensor, states: Sequence[torch.Tensor], conv: Sequence[torch.Tensor]
    ) -> None:
        """`write` of states that are known to be finite; nothing is read on the host, so it can be captured."""
        self.put_states(slots, states)
        for tensor, window in zip(self.conv, conv, strict=True):
            tensor[slots] = window.to(self.conv_dtype)

    def write_states(self, slots: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """`write` without the windows."""
        if self.state == "damp" and len(slots):
            self._require_packable(states)
        self.put_states(slots, states)

    def put_states(self, slots: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """`put` without the windows."""
        if self.state == "damp" and len(slots):
            self._pack(slots, states)
            self.empty_rings(slots)
            return
        for tensor, layout, state in zip(self.states, self.layouts, states, strict=True):
            tensor[slots] = layout.pack(state.float())

    def read(
        self, slots: torch.Tensor, *, ask: bool = True
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """States as FP32 `[B, H, K, V]` and windows `[B, C, W - 1]` of the slots, as new tensors.

        Rings are folded into what is returned, not into the slots; to `ask` first whether they hold anything is a wait.
        """
        if self.state == "damp" and len(slots):
            states = self._unpack(slots)
            # every layer has run as many updates
            if self.rings and (not ask or bool(self.rings[0].phases[slots].any())):
                states = [self._folded(n, state, slots) for n, state in enumerate(states)]
        else:
            states = [
                layout.unpack(tensor[slots])
                for layout, tensor in zip(self.layouts, self.states, strict=True)
            ]
        return states, [tensor[slots] for tensor in self.conv]

    def _require_packable(self, states: Sequence[torch.Tensor]) -> None:
        """Refuse states that are not finite; `PackedLayout.pack` names the first number that is not."""
        if not bool(all_finite(states)):
            for layout, state in zip(self.layouts, states, strict=True):
                layout.pack(state.float())

    def _pack(self, slots: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """`put` of packed states."""
        rows = torch.arange(len(slots), device=self.device)
        for first, pool in self._runs:
            layout = self.layouts[first]
            assert isinstance(layout, PackedLayout), "a damp pool has packed layouts"
            given = states[first : first + pool.layers]
            dense = LayerSet.fresh(pool.layers, given[0].shape, self.device)
            torch._foreach_copy_(list(dense.tensors), list(given))
            pack_states(dense, rows, pool, slots, layout, backend=self._backend)

    def _unpack(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """`read` of packed states."""
        rows = torch.arange(len(slots), device=self.device)
        found: list[torch.Tensor] = []
        for first, pool in self._runs:
            layout = self.layouts[first]
            assert isinstance(layout, PackedLayout), "a damp pool has packed layouts"
            shape = (len(slots), pool.first.shape[1], layout.key_dim, layout.value_dim)
            into = LayerSet.fresh(pool.layers, shape, self.device)
            unpack_states(pool, slots, into, rows, layout, backend=self._backend)
            found += into.tensors
        return found

    def finite(self, slots: torch.Tensor) -> torch.Tensor:
        """Bool `[]` on the device: whether all that these slots (at least one) hold is finite.

        All layers together in few launches; without rings nothing is read on the host, so it can be captured.
        """
        states = self.read(slots)[0] if self.state == "damp" else [t[slots] for t in self.states]
        return all_finite([*states, *(t[slots] for t in self.conv)])

    def require_finite(self, slots: torch.Tensor) -> None:
        """Refuse slots that hold NaN or infinity: a unit was missed, or the model produced it.

        Raises:
            NumericError: names the block, the slot and the head or convolution channel.
        """
        if len(slots) == 0 or bool(self.finite(slots)):
            return
        for ordinal, layer in enumerate(self.spec.layers):
            stored = self.layouts[ordinal].unpack(self.states[ordinal][slots])
            state = self._folded(ordinal, stored, slots)
            for what, value in (("state", state), ("conv", self.conv[ordinal][slots])):
                # a finite sum proves finite terms, and needs no mask of the size of the state
                if bool(torch.isfinite(value.sum(dtype=torch.float32))):
                    continue
                bad = (~torch.isfinite(value)).nonzero()
                if len(bad) == 0:
                    continue
                row, unit, *rest = bad[0].tolist()
                raise NumericError(
                    f"block {layer.index}: non-finite {what} in slot {int(slots[row])}, "
                    f"{'head' if what == 'state' else 'channel'} {unit}, position {rest}",
                    hint="the slot was not completely written, or the model itself overflowed",
                    layer=layer.index,
                    slot=int(slots[row]),
                    index=[unit, *rest],
                    count=len(bad),
                )


def runs_of_alike(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, LayerSet], ...]:
    """Consecutive layers whose tensors one launch can address, each run with its first layer."""
    runs: list[list[torch.Tensor]] = []
    for tensor in tensors:
        if runs and runs[-1][0].shape == tensor.shape:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    starts = [sum(map(len, runs[:n])) for n in range(len(runs))]
    return tuple((start, LayerSet.of(run)) for start, run in zip(starts, runs, strict=True))


def _packed_layout(layer: LinearLayer, k_hi: int | None, every: int) -> PackedLayout:
    protected = default_k_hi(layer) if k_hi is None else k_hi
    if not 0 <= protected <= layer.key_dim:
        raise UsageError(
            f"block {layer.index}: {protected} protected channels, but a head has {layer.key_dim}",
            k_hi=protected,
            key_dim=layer.key_dim,
        )
    layout = PackedLayout(layer.key_dim, layer.value_dim, protected, GROUP)
    return layout if every == 1 else ring_update.ring_layout(layout)
