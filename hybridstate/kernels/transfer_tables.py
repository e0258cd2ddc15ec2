"""What a launch over all layers needs on the device: where pools lie, which rows are kept, how they are stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from hybridstate.errors import NumericError, PlanMismatch
from hybridstate.kernels.codec import SCALE_DTYPES

Codec = Literal["fp32", "int8"]

ALIGNMENT = 16


@dataclass(frozen=True, slots=True, eq=False)
class LayerSet:
    """Pools of all layers, one tensor each, addressed from the first one.

    Attributes:
        tensors: [slots, ...] per layer; equal shapes, strides, dtypes and devices, contiguous slots.
        table: int64 [layers], distance from the first tensor in units of 16 bytes.
    """

    tensors: tuple[Tensor, ...]
    table: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "LayerSet":
        """Build the table (copies it to the device: before a capture, not inside).

        Raises:
            NumericError: tensors differ, or do not lie multiples of 16 bytes apart.
        """
        first = tensors[0]
        starts = []
        for layer, x in enumerate(tensors):
            alike = (x.shape, x.stride(), x.dtype, x.device) == (
                first.shape,
                first.stride(),
                first.dtype,
                first.device,
            )
            distance = x.data_ptr() - first.data_ptr()
            if not alike or distance % ALIGNMENT or not x[0].is_contiguous():
                raise NumericError(
                    f"linear layer {layer}: a pool {x.dtype} {tuple(x.shape)} on {x.device} does not join "
                    f"{first.dtype} {tuple(first.shape)} on {first.device} in one launch",
                    hint="Pools of one launch have equal shapes and contiguous slots, multiples of 16 bytes apart.",
                    layer=layer,
                )
            starts.append(distance // ALIGNMENT)
        return cls(tuple(tensors), torch.tensor(starts, dtype=torch.int64, device=first.device))

    @classmethod
    def fresh(cls, layers: int, shape: Sequence[int], device: torch.device | str) -> "LayerSet":
        """New float32 tensors in one block; nothing comes from the host, so this may lie inside a capture."""
        size = prod(shape)
        step = max(-(-4 * size // ALIGNMENT), 1)
        block = torch.empty((layers, step * ALIGNMENT // 4), device=device)
        table = torch.arange(layers, dtype=torch.int64, device=device) * step
        return cls(tuple(row[:size].view(*shape) for row in block), table)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.tensors)

    @property
    def first(self) -> Tensor:
        """The tensor that addresses are relative to."""
        return self.tensors[0]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        return self.layers * self.first[0].numel() * self.first.element_size()


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Which key rows checkpoints keep and where; flat rows count over layers, heads, key channels.

    Attributes:
        layers, heads, key_dim: geometry.
        count: rows kept.
        length: rows a checkpoint has room for; more than `count` in the padded form.
        rows: int32 [count], the kept rows, ascending.
        to: int32 [count], their positions in a checkpoint.
        place: int32 [layers * heads * key_dim], position of every row, -1 where it is omitted.
        every: int32, all rows.
        omitted: int32, the rows that are not kept, ascending.
    """

    layers: int
    heads: int
    key_dim: int
    count: int
    length: int
    rows: Tensor
    to: Tensor
    place: Tensor
    every: Tensor
    omitted: Tensor

    @classmethod
    def from_masks(
        cls,
        masks: Tensor,
        key_dim: int,
        *,
        padded: bool = False,
        count: int | None = None,
        fullest: int | None = None,
    ) -> "RowTable":
        """Tables from a plan's retained units, on the device of the masks.

        Args:
            masks: bool or uint8 [layers, H] (heads) or [layers, H, K] (key channels), nonzero where retained.
            key_dim: K.
            padded: give every head room for as many rows as the fullest.
            count: rows kept, and `fullest` rows kept of any head, where the plan's accounting knows them; either
                is read back from the device otherwise, which synchronises.

        Raises:
            PlanMismatch: the masks do not fit.
        """
        if masks.dim() not in (2, 3) or (masks.dim() == 3 and masks.shape[2] != key_dim):
            raise PlanMismatch(
                f"masks {list(masks.shape)} are neither [layers, heads] nor [layers, heads, {key_dim}]",
                found=list(masks.shape),
                expected=["layers", "heads", key_dim],
            )
        layers, heads = masks.shape[:2]
        kept = masks.ne(0)
        kept = kept.unsqueeze(-1).expand(-1, -1, key_dim) if masks.dim() == 2 else kept
        flat, total = kept.reshape(-1), layers * heads * key_dim
        count = int(flat.sum()) if count is None else count
        rank = flat.to(torch.int32).cumsum(0, dtype=torch.int32) - 1
        position, length = rank, count
        if padded:
            fullest = int(kept.sum(-1).max()) if fullest is None else fullest
            inside = kept.to(torch.int32).cumsum(-1, dtype=torch.int32) - 1
            start = torch.arange(layers * heads, dtype=torch.int32, device=masks.device) * fullest
            position, length = (
                (inside + start.view(layers, heads, 1)).reshape(-1),
                layers * heads * fullest,
            )
        every = torch.arange(total, dtype=torch.int32, device=masks.device)
        place = torch.where(flat, position, torch.full_like(position, -1))
        rows = _chosen(every, flat, rank, count)
        gaps = (~flat).to(torch.int32).cumsum(0, dtype=torch.int32) - 1
        return cls(
            layers=layers,
            heads=heads,
            key_dim=key_dim,
            count=count,
            length=length,
            rows=rows,
            to=place[rows.long()],
            place=place,
            every=every,
            omitted=_chosen(every, ~flat, gaps, total - count),
        )


def _chosen(values: Tensor, mask: Tensor, rank: Tensor, count: int) -> Tensor:
    """values[mask] for a known count, without reading anything back."""
    found = values.new_zeros(count + 1)
    spots = torch.where(mask, rank, torch.full_like(rank, count)).clamp_max(count)
    return found.scatter_(0, spots.long(), values)[:count].clone()


@dataclass(frozen=True, slots=True)
class CheckpointForm:
    """How rows are stored.

    Attributes:
        codec: fp32, or int8 with a scale of `scale_dtype` per row.
        value_dim: V.
    """

    codec: Codec
    value_dim: int
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.codec not in ("fp32", "int8") or self.scale_dtype not in SCALE_DTYPES:
            raise NumericError(f"no checkpoint codec {self.codec!r} with {self.scale_dtype} scales")
        if self.codec == "int8" and self.value_dim % 4:
            raise NumericError("int8 checkpoints need a multiple of 4 value columns")

    @property
    def row_bytes(self) -> int:
        """Bytes of one kept row: 132 for INT8 with 128 columns and FP32 scales."""
        if self.codec == "fp32":
            return 4 * self.value_dim
        return self.value_dim + self.scale_dtype.itemsize

    def temporal_bytes(self, table: RowTable) -> int:
        """Bytes of one checkpoint without its convolution windows."""
        return table.length * self.row_bytes

    def buffer(self, checkpoints: int, table: RowTable, *, extra: int = 0) -> Tensor:
        """uint8 [checkpoints, bytes], zero, each row rounded up to 16 bytes; `extra` bytes more per checkpoint."""
        size = max(-(-(self.temporal_bytes(table) + extra) // ALIGNMENT), 1) * ALIGNMENT
        return torch.zeros(checkpoints, size, dtype=torch.uint8, device=table.rows.device)
