"""Retained units and convolution windows to one flat buffer and back.

Layout of the bytes, without padding anywhere:

    for every linear layer: its retained units, FP32, heads ascending, then key channels ascending
    for every linear layer: its convolution window [C, W - 1], BF16

A unit is one value head (mask [H], K * V values) or one key channel of one head (mask [H, K], V values). The
length therefore equals the ragged bytes of `plan.accounting` exactly. Gathers and scatters are one indexed copy
per layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridstate.errors import NumericError, PlanMismatch

FLOAT_BYTES = 4
CONV_BYTES = 2


@dataclass(frozen=True, slots=True)
class UnitIndex:
    """Retained units of every linear layer as row numbers; build it once where masks are reused.

    Attributes:
        rows: int64 per layer, ascending.
        masks: shape of each layer's mask, `(H,)` or `(H, K)`.
    """

    rows: tuple[Tensor, ...]
    masks: tuple[tuple[int, ...], ...]

    @classmethod
    def from_masks(cls, masks: Sequence[Tensor], device: torch.device | str) -> "UnitIndex":
        """Masks are bool [H] or [H, K], True where retained."""
        rows = tuple(mask.flatten().nonzero().squeeze(-1).to(device) for mask in masks)
        return cls(rows, tuple(tuple(mask.shape) for mask in masks))


def pack_units(
    states: Sequence[Tensor], conv: Sequence[Tensor], masks: Sequence[Tensor] | UnitIndex
) -> Tensor:
    """One checkpoint as bytes.

    Args:
        states: float32 [H, K, V] per linear layer.
        conv: bfloat16 [C, W - 1] per linear layer; stored exactly.
        masks: bool [H] or [H, K] per linear layer, or their index.

    Returns:
        uint8 [bytes] on the device of the states.

    Raises:
        PlanMismatch: masks do not fit the states.
        NumericError: another dtype.
    """
    index = _indexed(masks, states)
    rows = [_unit_rows(*pair) for pair in zip(states, index.masks, strict=True)]
    _expect_dtypes(states, conv)
    sizes = _sizes(rows, index, conv)
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=states[0].device)
    parts = buffer.split(sizes)
    for source, chosen, part in zip(rows, index.rows, parts, strict=False):
        target = part.view(torch.float32).view(-1, source.shape[1])
        torch.index_select(source, 0, chosen, out=target)
    for window, part in zip(conv, parts[len(rows) :], strict=True):
        part.view(torch.bfloat16).view(window.shape).copy_(window)
    return buffer


def unpack_units(
    buffer: Tensor,
    masks: Sequence[Tensor] | UnitIndex,
    states: Sequence[Tensor],
    conv: Sequence[Tensor],
) -> None:
    """Write a checkpoint's retained units and windows into existing tensors; the rest keeps its values.

    Args:
        buffer: uint8 [bytes] from `pack_units`, any device.
        masks: those it was packed with.
        states: contiguous float32 [H, K, V] per linear layer.
        conv: [C, W - 1] per linear layer; wider dtypes hold the BF16 values exactly.

    Raises:
        PlanMismatch: the length of the buffer or the masks do not fit.
        NumericError: the states are not contiguous float32.
    """
    index = _indexed(masks, states)
    for state in states:
        if state.dtype != torch.float32 or not state.is_contiguous():
            raise NumericError("checkpoints load into contiguous float32 states")
    rows = [_unit_rows(*pair) for pair in zip(states, index.masks, strict=True)]
    sizes = _sizes(rows, index, conv)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or len(buffer) != sum(sizes):
        raise PlanMismatch(
            f"checkpoint is {buffer.dtype} {list(buffer.shape)}, these masks need {sum(sizes)} bytes",
            found=list(buffer.shape),
            expected=sum(sizes),
        )
    # A slice of a larger buffer may start at any byte; a fresh one is aligned.
    aligned = buffer if buffer.data_ptr() % FLOAT_BYTES == 0 else buffer.clone()
    parts = aligned.to(states[0].device).split(sizes)
    for target, chosen, part in zip(rows, index.rows, parts, strict=False):
        target.index_copy_(0, chosen, part.view(torch.float32).view(-1, target.shape[1]))
    for window, part in zip(conv, parts[len(rows) :], strict=True):
        window.copy_(part.view(torch.bfloat16).view(window.shape))


def _indexed(masks: Sequence[Tensor] | UnitIndex, states: Sequence[Tensor]) -> UnitIndex:
    """The masks' index, after checking them against the states."""
    if isinstance(masks, UnitIndex):
        index = masks
    else:
        index = UnitIndex.from_masks(masks, states[0].device)
    if len(index.masks) != len(states):
        raise PlanMismatch(
            f"{len(index.masks)} masks for {len(states)} linear layers",
            found=len(index.masks),
            expected=len(states),
        )
    for layer, (shape, state) in enumerate(zip(index.masks, states, strict=True)):
        if shape not in (tuple(state.shape[:1]), tuple(state.shape[:2])):
            raise PlanMismatch(
                f"linear layer {layer}: mask {list(shape)} does not fit a state {list(state.shape)}",
                index=layer,
                found=list(shape),
                expected=list(state.shape[:2]),
            )
    return index


def _unit_rows(state: Tensor, mask: tuple[int, ...]) -> Tensor:
    """[H, K, V] as one row per unit."""
    return state.reshape(state.shape[0], -1) if len(mask) == 1 else state.flatten(0, 1)


def _sizes(rows: Sequence[Tensor], index: UnitIndex, conv: Sequence[Tensor]) -> list[int]:
    """Bytes of every part, in order."""
    temporal = [
        len(chosen) * unit.shape[1] * FLOAT_BYTES
        for unit, chosen in zip(rows, index.rows, strict=True)
    ]
    return [*temporal, *(window.numel() * CONV_BYTES for window in conv)]


def _expect_dtypes(states: Sequence[Tensor], conv: Sequence[Tensor]) -> None:
    for name, tensors, dtype in (("state", states, torch.float32), ("conv", conv, torch.bfloat16)):
        for layer, tensor in enumerate(tensors):
            if tensor.dtype != dtype:
                raise NumericError(
                    f"linear layer {layer}: {name} is {tensor.dtype}, checkpoints store {dtype}",
                    index=layer,
                    found=str(tensor.dtype),
                    expected=str(dtype),
                )
