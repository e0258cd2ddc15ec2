"""A cached prefix to checkpoint bytes and back: store, the load policies, continuing the request.

A checkpoint holds the retained units of every linear layer and the whole convolution window (BF16, as the dense
baseline keeps it); the attention KV of the prefix stays where it is. On a hit the retained units are loaded exactly and
the omitted ones either

- stay at zero (NR): `zero_fill`; or
- come from a replay of the last `W_replay` tokens (WR, DASC 4.2): `replay` then `refresh`. The scratch starts with all
  recurrent states and all convolution windows at zero; its queries attend to the *cached* KV at every position up to
  their own, inside the window too; the KV it computes is dropped; only omitted units are copied, and the stored
  convolution window is kept. With `W_replay = n_p` this is full recomputation.

States are `[B, H, K, V]` FP32, windows `[B, C, W - 1]`; a unit is a value head (GDN) or a key channel of a head (KDA).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.errors import NumericError, PlanMismatch, UsageError
from hybridstate.families import ModelSpec
from hybridstate.kernels.layout import DenseLayout
from hybridstate.kernels.transfer import gather_rows, refresh_rows, scatter_rows
from hybridstate.kernels.transfer_tables import ALIGNMENT, CheckpointForm, LayerSet, RowTable
from hybridstate.provenance import sha256_bytes
from hybridstate.runtime.pool import StatePool
from hybridstate.trajectories.cache import forward, linear_layers, new_cache
from hybridstate.trajectories.model import LoadedModel

if TYPE_CHECKING:
    from hybridstate.runtime.step import StepModules

KeyValue = Mapping[int, tuple[torch.Tensor, torch.Tensor]]

CONV_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Prefix:
    """Everything known after prefilling `tokens`, for `B` sequences of one length.

    Attributes:
        tokens: int64 `[B, n_p]`.
        states: FP32 `[B, H, K, V]` per linear layer.
        conv: BF16 `[B, C, W - 1]` per linear layer.
        kv: the two tensors each full-attention block caches, by block index, tokens on axis 2.
    """

    tokens: torch.Tensor
    states: tuple[torch.Tensor, ...]
    conv: tuple[torch.Tensor, ...]
    kv: KeyValue

    @property
    def batch(self) -> int:
        """Sequences."""
        return int(self.tokens.shape[0])

    @property
    def length(self) -> int:
        """Tokens in the prefix, `n_p`."""
        return int(self.tokens.shape[1])

    def rows(self, rows: Sequence[int]) -> "Prefix":
        """The sequences `rows`, which may repeat, as new tensors."""
        index = torch.tensor(list(rows), device=self.tokens.device)
        return Prefix(
            tokens=self.tokens[index],
            states=tuple(state[index] for state in self.states),
            conv=tuple(window[index] for window in self.conv),
            kv={block: (k[index], v[index]) for block, (k, v) in self.kv.items()},
        )


def join(prefixes: Sequence[Prefix]) -> Prefix:
    """One batch from several of the same length."""
    first = prefixes[0]
    return Prefix(
        tokens=torch.cat([p.tokens for p in prefixes]),
        states=tuple(torch.cat(parts) for parts in zip(*(p.states for p in prefixes), strict=True)),
        conv=tuple(torch.cat(parts) for parts in zip(*(p.conv for p in prefixes), strict=True)),
        kv={
            block: (
                torch.cat([p.kv[block][0] for p in prefixes]),
                torch.cat([p.kv[block][1] for p in prefixes]),
            )
            for block in first.kv
        },
    )


@dataclass(frozen=True, slots=True)
class Units:
    """Which units a checkpoint retains, as masks and as the row tables of `kernels.transfer`, built once.

    Attributes:
        masks: bool `[H]` or `[H, K]` per linear layer, True where retained.
        omitted: int64 numbers of the other units per layer.
    """

    masks: tuple[torch.Tensor, ...]
    omitted: tuple[torch.Tensor, ...]
    _tables: dict[int, RowTable]

    @classmethod
    def of(
        cls, retained: Sequence[NDArray[np.bool_]], device: torch.device | str = "cpu"
    ) -> "Units":
        """Units of a selection."""
        masks = tuple(
            torch.from_numpy(np.array(mask, dtype=np.bool_)).to(device) for mask in retained
        )
        omitted = tuple((~mask).flatten().nonzero().flatten() for mask in masks)
        return cls(masks, omitted, {})

    def table(self, key_dim: int) -> RowTable:
        """Kept rows of states with K key channels.

        Raises:
            PlanMismatch: the masks do not fit, or differ in shape between layers.
        """
        if key_dim not in self._tables:
            shapes = {tuple(mask.shape) for mask in self.masks}
            if len(shapes) > 1:
                raise PlanMismatch(
                    f"linear layers of different sizes, {sorted(shapes)}, share no checkpoint",
                    found=sorted(shapes),
                )
            self._tables[key_dim] = RowTable.from_masks(torch.stack(self.masks), key_dim)
        return self._tables[key_dim]

    @classmethod
    def every(cls, spec: ModelSpec, device: torch.device | str = "cpu") -> "Units":
        """All units: the dense checkpoint."""
        shapes = [
            (n.value_heads,) if spec.unit == "head" else (n.value_heads, n.key_dim)
            for n in spec.layers
        ]
        return cls.of([np.ones(shape, dtype=np.bool_) for shape in shapes], device)

    @property
    def complete(self) -> bool:
        """Nothing is omitted."""
        return not any(len(rows) for rows in self.omitted)

    @property
    def counts(self) -> tuple[int, int]:
        """Retained units, all units."""
        every = sum(mask.numel() for mask in self.masks)
        return every - sum(len(rows) for rows in self.omitted), every

    @property
    def heads(self) -> tuple[int, int]:
        """Value heads without a retained unit, all value heads: a head at zero has nothing to read at first."""
        kept = [mask.view(len(mask), -1).any(1) for mask in self.masks]
        return sum(int((~head).sum()) for head in kept), sum(map(len, kept))

    @property
    def digest(self) -> str:
        """sha256 over the masks, as `Selection.mask_digest` takes it."""
        masks = (mask.cpu().numpy().astype(np.uint8).tobytes() for mask in self.masks)
        return sha256_bytes(b"".join(masks))


# -- store --------------------------------------------------------------------------------------


@torch.no_grad()
def capture(loaded: LoadedModel, tokens: torch.Tensor, past: Any) -> Prefix:
    """The prefix held by a cache after `tokens [B, n_p]`; a later use of the cache cannot change it.

    Raises:
        NumericError: a state is not finite; such a prefix must not be cached.
    """
    layers = linear_layers(past)
    if len(layers) != len(loaded.spec.layers):
        raise NumericError(
            f"the cache has {len(layers)} linear layers, the model {len(loaded.spec.layers)}",
            found=len(layers),
            expected=len(loaded.spec.layers),
        )
    linear = {layer.index for layer in loaded.spec.layers}
    states = tuple(layer.recurrent_states[0].float().clone() for layer in layers)
    for layer, state in zip(loaded.spec.layers, states, strict=True):
        if not bool(torch.isfinite(state.sum())) and not bool(torch.isfinite(state).all()):
            raise NumericError(
                f"block {layer.index}: the recurrent state after {tokens.shape[1]} tokens is not "
                "finite, so the prefix is not cached",
                hint="run in float32, or check the weights",
                layer=layer.index,
            )
    return Prefix(
        tokens=tokens.to(loaded.device),
        states=states,
        conv=tuple(
            layer.conv_states[0][..., 1 - spec.conv_width :].to(CONV_DTYPE, copy=True)
            for layer, spec in zip(layers, loaded.spec.layers, strict=True)
        ),
        kv={
            block: (layer.keys.clone(), layer.values.clone())
            for block, layer in enumerate(past.layers)
            if block not in linear and getattr(layer, "keys", None) is not None
        },
    )


def store(prefix: Prefix, row: int, units: Units) -> torch.Tensor:
    """Checkpoint of one sequence as a flat uint8 tensor, without padding anywhere.

    The retained units in FP32, layer by layer, heads and then key channels ascending; then the layers' convolution
    windows in BF16. Its length is the ragged bytes of `plan.accounting`.

    Raises:
        PlanMismatch: the units do not fit the states.
    """
    states = LayerSet.of(prefix.states)
    _, _, key_dim, value_dim = states.first.shape
    table, form = units.table(key_dim), CheckpointForm("fp32", value_dim)
    windows = [window[row] for window in prefix.conv]
    exact = form.temporal_bytes(table) + sum(x.numel() * CONV_DTYPE.itemsize for x in windows)
    buffer = form.buffer(1, table, extra=exact - form.temporal_bytes(table))
    device = states.first.device
    gather_rows(states, torch.tensor([row], device=device), buffer, _first(device), table, form)
    checkpoint = buffer[0, :exact]
    for window, part in zip(windows, _window_parts(checkpoint, table, form, windows), strict=True):
        part.copy_(window)
    return checkpoint


def _first(device: torch.device) -> torch.Tensor:
    """Slot 0."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def _window_parts(
    checkpoint: torch.Tensor, table: RowTable, form: CheckpointForm, like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """BF16 views of a checkpoint's convolution windows, shaped as `like`."""
    sizes = [x.numel() * CONV_DTYPE.itemsize for x in like]
    parts = checkpoint[form.temporal_bytes(table) :].split(sizes)
    return [p.view(CONV_DTYPE).view(x.shape) for p, x in zip(parts, like, strict=True)]


# -- load ---------------------------------------------------------------------------------------


def load(buffer: torch.Tensor, units: Units, pool: StatePool, slot: int) -> None:
    """Unpack a checkpoint into one slot of an FP32 pool; omitted units keep what the slot held.

    Args:
        buffer: uint8 from `store`, on any device.

    Raises:
        PlanMismatch: the buffer's length does not fit the units.
        UsageError: the pool holds no FP32 states in rows order.
    """
    states = _rows_of(pool)
    layout = pool.layouts[0]
    table, form = units.table(layout.key_dim), CheckpointForm("fp32", layout.value_dim)
    windows = [tensor[slot] for tensor in pool.conv]
    exact = form.temporal_bytes(table) + sum(x.numel() * CONV_DTYPE.itemsize for x in windows)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or len(buffer) != exact:
        raise PlanMismatch(
            f"checkpoint is {buffer.dtype} {list(buffer.shape)}, these masks need {exact} bytes",
            found=list(buffer.shape),
            expected=exact,
        )
    here = buffer.to(pool.device)
    here = here if here.data_ptr() % ALIGNMENT == 0 else here.clone()
    # one row, whose distance to the next is only nominal
    rows = here.as_strided((1, exact), (-(-exact // ALIGNMENT) * ALIGNMENT, 1))
    target = torch.tensor([slot], device=pool.device)
    scatter_rows(rows, _first(pool.device), states, target, table, form)
    for window, part in zip(windows, _window_parts(here, table, form, windows), strict=True):
        window.copy_(part)


def zero_fill(pool: StatePool, slots: torch.Tensor, units: Units) -> None:
    """NR: omitted units of the slots become zero."""
    for tensor, mask, omitted in zip(pool.states, units.masks, units.omitted, strict=True):
        if len(omitted):
            _flat(tensor, mask)[slots[:, None], omitted] = 0.0


def refresh(
    pool: StatePool, slots: torch.Tensor, units: Units, replayed: Sequence[torch.Tensor]
) -> None:
    """WR: omitted units of the slots are copied from the replayed states `[B, H, K, V]`."""
    table = units.table(pool.layouts[0].key_dim)
    if not len(table.omitted):
        return
    fresh = LayerSet.of([state.contiguous() for state in replayed])
    rows = torch.arange(len(slots), device=pool.device)
    refresh_rows(fresh, rows, _rows_of(pool), slots, table.omitted)


def _rows_of(pool: StatePool) -> LayerSet:
    """An FP32 pool's states as one set of rows."""
    layout = pool.layouts[0]
    if not isinstance(layout, DenseLayout) or (layout.order, pool.state) != ("rows", "fp32"):
        raise UsageError(f"checkpoints load into an fp32 pool in rows order, not {pool.state}")
    return pool.layers


def _flat(state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """View `[P, H, K, V]` as `[P, units, ...]`."""
    return state.view(state.shape[0], mask.numel(), *state.shape[1 + mask.dim() :])


@torch.no_grad()
def replay(
    loaded: LoadedModel, prefix: Prefix, window: int, modules: "StepModules | None" = None
) -> tuple[torch.Tensor, ...]:
    """States after replaying the last `window` tokens from a zero scratch (see the module docstring).

    Args:
        window: `W_replay`; more than the prefix holds means all of it, and 0 is refused.
        modules: run one sequence as prompts run through them.

    Returns:
        FP32 `[B, H, K, V]` per linear layer. `prefix` is not touched.
    """
    if window < 1:
        raise UsageError("nothing to replay: the window has no tokens", window=window)
    start = prefix.length - min(window, prefix.length)
    scratch = new_cache(loaded)
    for block, (keys, values) in prefix.kv.items():
        scratch.layers[block] = _replay_layer_class()(keys, values, start)
    tokens = prefix.tokens[:, start:]
    if modules is not None and modules.prompts:
        blank = [
            torch.zeros(n.conv_channels, n.conv_width - 1, dtype=loaded.dtype, device=loaded.device)
            for n in loaded.spec.layers
        ]
        with modules.prompt(blank, [None] * len(blank)) as after:
            forward(loaded, tokens, scratch, logits_to_keep=1)
        return tuple(after[layer.ordinal][1] for layer in loaded.spec.layers)
    forward(loaded, tokens, scratch, logits_to_keep=1)
    return tuple(layer.recurrent_states[0].float() for layer in linear_layers(scratch))


@cache
def _replay_layer_class() -> Any:
    """A KV layer for replay: it answers with the cached keys and ignores the computed ones."""
    cache_utils: Any = import_module("transformers.cache_utils")

    class ReplayedKeys(cache_utils.DynamicLayer):  # type: ignore[misc]
        def __init__(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
            super().__init__()
            _fill(self, keys, values)
            self.position = start

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.position += key_states.shape[-2]
            return self.keys, self.values

        def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
            return self.position

        def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
            return self.keys.shape[-2], 0

    return ReplayedKeys


def _fill(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Give a dynamic KV layer its tensors without copying; its own updates concatenate anew."""
    cache_utils: Any = import_module("transformers.cache_utils")
    cache_utils.DynamicLayer.update(layer, keys[..., :0, :], values[..., :0, :])
    layer.keys, layer.values = keys, values


# -- continue -----------------------------------------------------------------------------------


@torch.no_grad()
def resume(
    loaded: LoadedModel,
    kv: KeyValue,
    states: Sequence[torch.Tensor],
    conv: Sequence[torch.Tensor],
) -> Any:
    """A transformers cache that continues from these states, windows and KV.

    States and windows are copied; KV tensors are shared until the first update replaces them.
    """
    past = new_cache(loaded)
    for layer, state, window in zip(linear_layers(past), states, conv, strict=bool(states)):
        # transformers keeps one column more than is ever read
        full = torch.nn.functional.pad(window.to(loaded.dtype), (1, 0))
        layer.update_conv_state(full, conv_kernel_size=full.shape[-1])
        layer.update_recurrent_state(state.float())
    for block, (keys, values) in kv.items():
        _fill(past.layers[block], keys, values)
    return past


def resume_slots(loaded: LoadedModel, kv: KeyValue, pool: StatePool, slots: torch.Tensor) -> Any:
    """`resume` from pool slots, refusing any that still hold poison."""
    pool.require_finite(slots)
    states, conv = pool.read(slots)
    return resume(loaded, kv, states, conv)
