"""Moving retained rows between FP32 pools and checkpoint buffers, and whole slots between pools; all layers at once.

DASC keeps whole heads (GDN) or key channels (KDA). Both are runs of key rows of V values, so one table of rows
serves both, and a head's K rows lie in a checkpoint as the head itself would. A checkpoint is one row of a uint8
buffer, without padding inside:

    fp32   the retained rows, FP32, ascending by layer, head, key channel
    int8   all codes in that order, then all scales (DASC Eq. 8): V + 4 bytes a row

In the ragged form the rows follow each other; in the padded form every head has room for as many rows as the fullest.
Everything a launch needs lies in device tables that are built once from the plan's masks, so launches neither
synchronise nor allocate and can be captured in a CUDA graph. Slots are int64; a slot below zero is skipped.
"""

from math import gcd
from typing import Literal

import torch
from torch import Tensor

from hybridstate.errors import MissingRequirement, NumericError, PlanMismatch
from hybridstate.kernels.codec import dequantise_rows, quantise_rows
from hybridstate.kernels.transfer_tables import ALIGNMENT, CheckpointForm, LayerSet, RowTable

Backend = Literal["auto", "triton", "reference"]

# -- rows ---------------------------------------------------------------------------------------


def gather_rows(
    pools: LayerSet, slots: Tensor, buffer: Tensor, into: Tensor, table: RowTable,
    form: CheckpointForm, *, backend: Backend = "auto",
) -> None:  # fmt: skip
    """Store the kept rows of `slots` as the checkpoints `into` of a buffer.

    Args:
        pools: float32 [P, H, K, V] per layer, in rows order.
        slots, into: int64 [B]; a pair with either below zero is skipped.
        buffer: uint8 [C, bytes], a multiple of 16 bytes each.
        table, form: which rows, and how they are stored.
        backend: triton, reference (synchronises), or triton on a GPU and reference elsewhere.

    Raises:
        NumericError, PlanMismatch: shapes or dtypes do not fit.
    """
    _check_rows(pools, (slots, into), buffer, table, form)
    if use_triton(buffer, backend):
        _launch_rows("gather_kernel", pools, slots, buffer, into, table.rows, table, form)
        return
    live = (slots >= 0) & (into >= 0)
    rows = _flat_rows(pools, slots[live])[:, table.rows.long()]
    for target, chosen in zip(into[live].tolist(), rows, strict=True):
        values, scales = _parts(buffer[target], table, form)
        if scales is None:
            values[table.to.long()] = chosen
        else:
            at = table.to.long()
            values[at], scales[at] = quantise_rows(chosen, form.scale_dtype)


def scatter_rows(
    buffer: Tensor, source: Tensor, pools: LayerSet, slots: Tensor, table: RowTable,
    form: CheckpointForm, *, omitted: Literal["keep", "zero"] = "keep",
    backend: Backend = "auto",
) -> None:  # fmt: skip
    """Load the checkpoints `source` into `slots`; omitted rows stay or become zero (NR).

    The inverse of `gather_rows`.
    """
    _check_rows(pools, (slots, source), buffer, table, form)
    if use_triton(buffer, backend):
        rows = table.rows if omitted == "keep" else table.every
        _launch_rows("scatter_kernel", pools, slots, buffer, source, rows, table, form)
        return
    for slot, origin in _pairs(slots, source):
        values, scales = _parts(buffer[origin], table, form)
        at = table.to.long()
        found = values[at] if scales is None else dequantise_rows(values[at], scales[at])
        whole = torch.zeros(len(table.every), form.value_dim, device=buffer.device)
        whole[table.rows.long()] = found
        per_layer = whole.view(table.layers, table.heads * table.key_dim, form.value_dim)
        kept = (table.place >= 0).view(table.layers, -1)
        for tensor, rows, mask in zip(pools.tensors, per_layer, kept, strict=True):
            target = tensor[slot].view(rows.shape)
            target.copy_(rows if omitted == "zero" else torch.where(mask[:, None], rows, target))


def refresh_rows(
    source: LayerSet, source_slots: Tensor, pools: LayerSet, slots: Tensor, rows: Tensor,
    *, backend: Backend = "auto",
) -> None:  # fmt: skip
    """Copy only `rows` (flat, int32; `table.omitted` after a replay) of slots from another set of pools."""
    for pool in (source, pools):
        if pool.first.dtype != torch.float32 or pool.first.dim() != 4:
            raise NumericError("rows are copied between float32 pools [P, H, K, V]")
    if source.first.shape[1:] != pools.first.shape[1:] or source.layers != pools.layers:
        raise NumericError("both sets of pools need the same layers, heads and dimensions")
    heads, key_dim, value_dim = pools.first.shape[1:]
    if use_triton(pools.first, backend):
        if not len(rows):
            return
        from hybridstate.kernels import transfer_triton as kernels

        shape = _row_shape(value_dim)
        kernels.refresh_kernel[(len(slots) * -(-len(rows) // shape["BR"]),)](
            source.first, source.table, source_slots, source.first.stride(0),
            pools.first, pools.table, slots, pools.first.stride(0),
            rows, len(rows), len(slots), HK=heads * key_dim, V=value_dim, **shape, num_warps=WARPS,
        )  # fmt: skip
        return
    layer, within = rows.long() // (heads * key_dim), rows.long() % (heads * key_dim)
    for slot, origin in _pairs(slots, source_slots):
        for number, (target, other) in enumerate(zip(pools.tensors, source.tensors, strict=True)):
            mine = within[layer == number]
            target[slot].view(-1, value_dim)[mine] = other[origin].view(-1, value_dim)[mine]


# -- whole slots --------------------------------------------------------------------------------


def copy_slots(
    source: LayerSet, source_slots: Tensor, target: LayerSet, target_slots: Tensor,
    *, backend: Backend = "auto",
) -> None:  # fmt: skip
    """Copy whole slots bit for bit; pools of any format and layout, packed to packed among them.

    A slot must not be both read and written by one call.
    """
    nbytes = source.first[0].numel() * source.first.element_size()
    alike = source.layers == target.layers and source.first.dtype == target.first.dtype
    if not alike or source.first.shape[1:] != target.first.shape[1:]:
        raise NumericError("slots are copied between pools of equal layers, shapes and dtypes")
    if use_triton(target.first, backend):
        steps = [x.first.stride(0) * x.first.element_size() for x in (source, target)]
        unit = gcd(ALIGNMENT, nbytes, *steps)
        tables = [
            x.table if unit == ALIGNMENT else x.table * (ALIGNMENT // unit)
            for x in (source, target)
        ]
        launch_copy(
            (source.first, tables[0], source_slots, steps[0] // unit),
            (target.first, tables[1], target_slots, steps[1] // unit),
            nbytes, source.layers, unit,
        )  # fmt: skip
        return
    live = (source_slots >= 0) & (target_slots >= 0)
    for one, other in zip(source.tensors, target.tensors, strict=True):
        other[target_slots[live]] = one[source_slots[live]]


Side = tuple[Tensor, Tensor, Tensor, int]
"""Base tensor, int64 table of layer offsets, int64 slots, distance of slots; offsets and distance in units."""


def launch_copy(source: Side, target: Side, nbytes: int, layers: int, unit: int) -> None:
    """Copy `nbytes` per layer and slot; offsets count `unit` bytes, a divisor of 16 that divides `nbytes`."""
    from hybridstate.kernels import transfer_triton as kernels

    words = nbytes // min(unit, 4)
    bases = [
        x[0].view(torch.uint8) if x[0].dtype != torch.uint8 else x[0] for x in (source, target)
    ]
    grid = (layers * len(source[2]) * -(-words // COPY_WORDS),)
    kernels.copy_kernel[grid](
        bases[0], *source[1:], bases[1], *target[1:], words, len(source[2]),
        UNIT=unit, BLOCK=COPY_WORDS, num_warps=WARPS,
    )  # fmt: skip


# -- shared -------------------------------------------------------------------------------------

WARPS = 4
BLOCK_ROWS = 16
"""Key rows per program: 8 KiB of FP32 in flight."""
COPY_WORDS = 2048


def use_triton(tensor: Tensor, backend: Backend) -> bool:
    """Whether the Triton kernels run.

    Raises:
        MissingRequirement: they were asked for and Triton is not installed.
    """
    if backend == "reference" or (backend == "auto" and not tensor.is_cuda):
        return False
    try:
        import triton  # noqa: F401
    except ImportError as error:
        if backend == "auto":
            return False
        raise MissingRequirement(
            "these kernels need Triton", hint="Install triton, or use backend='reference'."
        ) from error
    return True


def _row_shape(value_dim: int) -> dict[str, int]:
    """Columns as a power of two, and rows per program."""
    return {"VP": 1 << (value_dim - 1).bit_length(), "BR": BLOCK_ROWS}


def _launch_rows(
    name: str, pools: LayerSet, slots: Tensor, buffer: Tensor, into: Tensor, rows: Tensor,
    table: RowTable, form: CheckpointForm,
) -> None:  # fmt: skip
    """Both directions take the same arguments."""
    if not len(rows):
        return
    import triton.language as tl

    from hybridstate.kernels import transfer_triton as kernels

    shape = _row_shape(form.value_dim)
    scale = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    getattr(kernels, name)[(len(slots) * -(-len(rows) // shape["BR"]),)](
        pools.first, pools.table, slots, pools.first.stride(0),
        buffer, into, buffer.stride(0) // ALIGNMENT, table.length * form.value_dim,
        rows, table.to if rows is table.rows else table.place, len(rows), len(slots),
        HK=table.heads * table.key_dim, V=form.value_dim, **shape,
        INT8=form.codec == "int8", SCALE=scale[form.scale_dtype], num_warps=WARPS,
    )  # fmt: skip


def _check_rows(
    pools: LayerSet, slots: tuple[Tensor, Tensor], buffer: Tensor, table: RowTable,
    form: CheckpointForm,
) -> None:  # fmt: skip
    """Refuse what a kernel would read out of bounds."""
    expected = (table.heads, table.key_dim, form.value_dim)
    if pools.layers != table.layers or tuple(pools.first.shape[1:]) != expected:
        raise PlanMismatch(
            f"{pools.layers} pools of {tuple(pools.first.shape[1:])}, the masks are for {table.layers} of {expected}",
            found=list(pools.first.shape),
            expected=["slots", *expected],
        )
    if pools.first.dtype != torch.float32:
        raise NumericError(f"rows are gathered from float32 pools, not {pools.first.dtype}")
    need = form.temporal_bytes(table)
    fits = buffer.dtype == torch.uint8 and buffer.dim() == 2 and buffer.shape[1] >= need
    if not fits or buffer.stride(1) != 1 or buffer.stride(0) % ALIGNMENT:
        raise PlanMismatch(
            f"buffer is {buffer.dtype} {list(buffer.shape)}, expected uint8 with at least {need} bytes a "
            "checkpoint and rows at multiples of 16",
            found=list(buffer.shape),
            expected=need,
        )
    check_slots(*slots)


def check_slots(one: Tensor, other: Tensor) -> None:
    """Both int64 [B].

    Raises:
        NumericError: they are not.
    """
    if one.dtype != torch.int64 or other.dtype != torch.int64 or one.shape != other.shape:
        raise NumericError(
            f"slots are {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}, expected int64 [B]"
        )


def _pairs(slots: Tensor, others: Tensor) -> list[tuple[int, int]]:
    """Live pairs as numbers (synchronises)."""
    pairs = zip(slots.tolist(), others.tolist(), strict=True)
    return [(a, b) for a, b in pairs if a >= 0 and b >= 0]


def _flat_rows(pools: LayerSet, slots: Tensor) -> Tensor:
    """[B, layers * H * K, V] of the slots."""
    value_dim = pools.first.shape[-1]
    parts = [x[slots].reshape(len(slots), -1, value_dim) for x in pools.tensors]
    return torch.cat(parts, 1)


def _parts(
    checkpoint: Tensor, table: RowTable, form: CheckpointForm
) -> tuple[Tensor, Tensor | None]:
    """Views of a checkpoint's rows [length, V] and, for INT8, its scales [length]."""
    size = table.length * form.value_dim
    if form.codec == "fp32":
        return checkpoint[: 4 * size].view(torch.float32).view(-1, form.value_dim), None
    scales = checkpoint[size : size + table.length * form.scale_dtype.itemsize]
    return checkpoint[:size].view(torch.int8).view(-1, form.value_dim), scales.view(
        form.scale_dtype
    )
