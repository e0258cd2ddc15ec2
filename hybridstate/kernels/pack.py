"""Dense states to packed slots and back for all layers at once; also the end of a prefill, and packed checkpoints.

`pack_states` turns chunk-end states [B, H, K, V] of every layer into packed slots in one launch: key channels in
stored order, value columns divided by their scale (DAMP Eq. 17-18), quantised and laid out. `store_packed` and
`load_packed` go between packed slots and FP32 checkpoint rows (`transfer`) without a dense state in between.
Results equal `PackedLayout.pack` and `unpack` bit for bit.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridstate.errors import NumericError, PlanMismatch
from hybridstate.kernels.layout import CHUNK_ROWS, DenseLayout, PackedLayout
from hybridstate.kernels.transfer import Backend, check_slots, use_triton
from hybridstate.kernels.transfer_tables import ALIGNMENT, LayerSet, RowTable

WARPS = 4
PACK_WARPS = 2
"""Of the fragment packer, whose 16 x 128 tile two warps share best (108 us against 115 with four on an H200)."""
RAGGED_OPTIONS: dict[str, int] = {"num_warps": 2}
"""Launch options of the fragment packer from checkpoint rows; each warp reads whole rows and skips omitted ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Maps:
    """How stored channels relate to logical ones; None means as they are.

    Attributes:
        order: uint8 [layers, H, K]; stored key row r holds logical channel order[r].
        value_scale: c, float32 [layers, H, V]; the pool holds T = S (1 / c), the reciprocal rounded to float32.
        inverse: 1 / c.
    """

    order: Tensor | None = None
    value_scale: Tensor | None = None
    inverse: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        c = self.value_scale
        object.__setattr__(self, "inverse", None if c is None else torch.ones_like(c) / c)

    def stored(self, layer: int, state: Tensor) -> Tensor:
        """Logical [B, H, K, V] to stored."""
        if self.order is not None:
            index = self.order[layer].long()[None, :, :, None].expand_as(state)
            state = state.gather(2, index)
        return state if self.inverse is None else state * self.inverse[layer][:, None]

    def logical(self, layer: int, state: Tensor) -> Tensor:
        """Stored [B, H, K, V] to logical."""
        if self.value_scale is not None:
            state = state * self.value_scale[layer][:, None]
        if self.order is None:
            return state
        index = self.order[layer].long()[None, :, :, None].expand_as(state)
        return torch.empty_like(state).scatter_(2, index, state)


PLAIN = Maps()


def pack_states(
    dense: LayerSet, dense_slots: Tensor, pool: LayerSet, pool_slots: Tensor, layout: PackedLayout,
    *, maps: Maps = PLAIN, dense_layout: DenseLayout | None = None, backend: Backend = "auto",
) -> None:  # fmt: skip
    """Quantise dense states into packed slots.

    Args:
        dense: [P, H, K, V] per layer (P may be the batch of a prefill), float32, float16 or bfloat16.
        dense_slots, pool_slots: int64 [B]; a pair with either below zero is skipped.
        pool: uint8 [P, H, layout.head_bytes] per layer.
        layout: of the pool.
        maps: key order and value scale.
        dense_layout: of the dense side; None means rows in logical order.
        backend: triton, reference (synchronises), or triton on a GPU and reference elsewhere.

    Raises:
        NumericError: shapes or dtypes do not fit.
    """
    dense_layout = _checked(dense, dense_slots, pool, pool_slots, layout, maps, dense_layout)
    if use_triton(pool.first, backend):
        _launch("pack", dense, dense_slots, pool, pool_slots, layout, maps, dense_layout, None)
        return
    live = (dense_slots >= 0) & (pool_slots >= 0)
    for layer, (source, target) in enumerate(zip(dense.tensors, pool.tensors, strict=True)):
        state = maps.stored(layer, dense_layout.unpack(source[dense_slots[live]]))
        target[pool_slots[live]] = layout.pack(state, check=False)


def unpack_states(
    pool: LayerSet, pool_slots: Tensor, dense: LayerSet, dense_slots: Tensor, layout: PackedLayout,
    *, maps: Maps = PLAIN, dense_layout: DenseLayout | None = None, backend: Backend = "auto",
) -> None:  # fmt: skip
    """The inverse of `pack_states`: what packed slots stand for, in logical order."""
    dense_layout = _checked(dense, dense_slots, pool, pool_slots, layout, maps, dense_layout)
    if use_triton(pool.first, backend):
        _launch("unpack", dense, dense_slots, pool, pool_slots, layout, maps, dense_layout, None)
        return
    live = (dense_slots >= 0) & (pool_slots >= 0)
    for layer, (source, target) in enumerate(zip(pool.tensors, dense.tensors, strict=True)):
        state = maps.logical(layer, layout.unpack(source[pool_slots[live]]))
        target[dense_slots[live]] = dense_layout.pack(state)


def store_packed(
    pool: LayerSet, pool_slots: Tensor, buffer: Tensor, into: Tensor, table: RowTable,
    layout: PackedLayout, *, maps: Maps = PLAIN, backend: Backend = "auto",
) -> None:  # fmt: skip
    """Kept rows of packed slots as FP32 checkpoints `into`, logical channels in the table's order."""
    _check_buffer(buffer, table, layout, pool)
    check_slots(pool_slots, into)
    if use_triton(buffer, backend):
        _launch("unpack", buffer, into, pool, pool_slots, layout, maps, None, table)
        return
    live = (pool_slots >= 0) & (into >= 0)
    states = [
        maps.logical(layer, layout.unpack(x[pool_slots[live]])).flatten(1, 2)
        for layer, x in enumerate(pool.tensors)
    ]
    rows = torch.cat(states, 1)[:, table.rows.long()]
    for target, chosen in zip(into[live].tolist(), rows, strict=True):
        _rows_of(buffer[target], table, layout)[table.to.long()] = chosen


def load_packed(
    buffer: Tensor, source: Tensor, pool: LayerSet, pool_slots: Tensor, table: RowTable,
    layout: PackedLayout, *, maps: Maps = PLAIN, backend: Backend = "auto",
) -> None:  # fmt: skip
    """FP32 checkpoints into packed slots; omitted rows are zero (NR)."""
    _check_buffer(buffer, table, layout, pool)
    check_slots(pool_slots, source)
    if use_triton(buffer, backend):
        _launch("pack", buffer, source, pool, pool_slots, layout, maps, None, table)
        return
    live = (pool_slots >= 0) & (source >= 0)
    for slot, origin in zip(pool_slots[live].tolist(), source[live].tolist(), strict=True):
        whole = torch.zeros(len(table.every), layout.value_dim, device=buffer.device)
        whole[table.rows.long()] = _rows_of(buffer[origin], table, layout)[table.to.long()]
        shape = (table.layers, 1, table.heads, table.key_dim, layout.value_dim)
        for layer, state in enumerate(whole.view(shape)):
            pool.tensors[layer][slot] = layout.pack(maps.stored(layer, state), check=False)[0]


def _rows_of(checkpoint: Tensor, table: RowTable, layout: PackedLayout) -> Tensor:
    """FP32 rows [length, V] of a checkpoint."""
    size = 4 * table.length * layout.value_dim
    return checkpoint[:size].view(torch.float32).view(-1, layout.value_dim)


def _launch(
    direction: str, dense: LayerSet | Tensor, dense_slots: Tensor, pool: LayerSet,
    pool_slots: Tensor, layout: PackedLayout, maps: Maps, dense_layout: DenseLayout | None,
    table: RowTable | None,
) -> None:  # fmt: skip
    """One program per head and 16 key rows (fragment) or value group (natural)."""
    from hybridstate.kernels import pack_triton as kernels

    heads, batch = pool.first.shape[1], len(pool_slots)
    if not batch:
        return
    fragment = layout.order == "fragment"
    if isinstance(dense, LayerSet):
        base, offsets, step = dense.first, dense.table, dense.first.stride(0)
    else:
        base = dense.view(torch.float32)
        offsets, step = pool.table, base.stride(0)
    tile, row, column = (0, layout.value_dim, 1) if dense_layout is None else dense_layout.strides
    width = layout.value_dim
    if dense_layout is not None and dense_layout.order == "tiles":
        width = dense_layout.tile
    elif dense_layout is not None and dense_layout.order == "columns":
        tile = column * width
    constants = {
        "H": heads, "KHI": layout.k_hi, "HEAD_BYTES": layout.head_bytes,
        "TILE": width, "S_TILE": tile, "S_ROW": row, "S_COL": column,
        "ORDERED": maps.order is not None, "SCALED": maps.value_scale is not None,
        "RAGGED": table is not None,
    }  # fmt: skip
    constants |= {"K": layout.key_dim, "V": layout.value_dim}
    if fragment:
        parts = layout.key_dim // CHUNK_ROWS * (layout.value_dim // layout.block)
        constants["BLOCK"] = layout.block
    else:
        parts = layout.groups
        power = [1 << (max(n, 1) - 1).bit_length() for n in (layout.k_hi, layout.rows_lo)]
        group = 1 << (min(layout.group, layout.value_dim) - 1).bit_length()
        constants |= {"GROUP": layout.group, "GP": group, "HP": power[0], "LP": power[1]}
    options = {"num_warps": WARPS}
    if fragment and direction == "pack":
        options = {"num_warps": PACK_WARPS} if table is None else RAGGED_OPTIONS
    unused = pool_slots
    scale = maps.inverse if direction == "pack" else maps.value_scale
    getattr(kernels, f"{direction}_{layout.order}_kernel")[(pool.layers * batch * heads * parts,)](
        base, offsets, dense_slots, step,
        pool.first, pool.table, pool_slots, pool.first.stride(0),
        unused if maps.order is None else maps.order,
        unused if scale is None else scale,
        unused if table is None else table.place,
        batch, **constants, **options,
    )  # fmt: skip


def _checked(
    dense: LayerSet, dense_slots: Tensor, pool: LayerSet, pool_slots: Tensor, layout: PackedLayout,
    maps: Maps, dense_layout: DenseLayout | None,
) -> DenseLayout:  # fmt: skip
    """The dense side's layout, after refusing what a kernel would read out of bounds."""
    _check_pool(pool, layout, maps)
    heads, (key_dim, value_dim) = pool.first.shape[1], (layout.key_dim, layout.value_dim)
    dense_layout = dense_layout or DenseLayout(key_dim, value_dim, dense.first.dtype)
    expected = (heads, key_dim, value_dim)
    alike = (dense_layout.key_dim, dense_layout.value_dim) == (key_dim, value_dim)
    fits = tuple(dense.first.shape[1:]) == expected and dense.first.dtype == dense_layout.dtype
    if not (alike and fits) or dense.layers != pool.layers:
        raise NumericError(
            f"dense side is {dense.layers} layers of {dense.first.dtype} {tuple(dense.first.shape)}, expected "
            f"{pool.layers} of {dense_layout.dtype} [slots, {heads}, {key_dim}, {value_dim}]",
            found=list(dense.first.shape),
            expected=["slots", *expected],
        )
    if dense_layout.order == "fragment":
        raise NumericError(
            "dense states in fragment order are not packed from",
            hint="Keep them in rows, columns or tiles.",
        )
    check_slots(dense_slots, pool_slots)
    return dense_layout


def _check_pool(pool: LayerSet, layout: PackedLayout, maps: Maps) -> None:
    first = pool.first
    if first.dtype != torch.uint8 or first.dim() != 3 or first.shape[2] != layout.head_bytes:
        raise NumericError(
            f"packed pool is {first.dtype} {tuple(first.shape)}, expected uint8 [slots, H, {layout.head_bytes}]",
            found=list(first.shape),
            expected=["slots", "H", layout.head_bytes],
        )
    heads = first.shape[1]
    for name, x, shape, dtype in (
        ("order", maps.order, (pool.layers, heads, layout.key_dim), torch.uint8),
        ("value_scale", maps.value_scale, (pool.layers, heads, layout.value_dim), torch.float32),
    ):
        wrong = x is not None and (
            tuple(x.shape) != shape or x.dtype != dtype or not x.is_contiguous()
        )
        if x is not None and wrong:
            raise NumericError(
                f"{name} is {x.dtype} {tuple(x.shape)}, expected contiguous {dtype} {shape}",
                found=list(x.shape),
                expected=list(shape),
            )


def _check_buffer(buffer: Tensor, table: RowTable, layout: PackedLayout, pool: LayerSet) -> None:
    _check_pool(pool, layout, PLAIN)
    need = 4 * table.length * layout.value_dim
    found = (table.layers, table.heads, table.key_dim)
    if found != (pool.layers, pool.first.shape[1], layout.key_dim):
        raise PlanMismatch(f"masks for {found} do not fit the packed pool", found=list(found))
    shaped = buffer.dtype == torch.uint8 and buffer.dim() == 2 and buffer.shape[1] >= need
    if not shaped or buffer.stride(1) != 1 or buffer.stride(0) % ALIGNMENT:
        raise PlanMismatch(
            f"buffer is {buffer.dtype} {list(buffer.shape)}, expected uint8 with at least {need} bytes a checkpoint",
            found=list(buffer.shape),
            expected=need,
        )
