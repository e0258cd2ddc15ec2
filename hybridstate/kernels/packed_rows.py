"""Kept key rows of packed slots out of them and back, bit for bit: FP16 rows, INT8 codes and their scales as they are.

For caches that keep some key rows of a packed state without another quantisation. Rows are numbered among all heads:
FP16 row u of head h is h K_hi + u, INT8 row w is h (K - K_hi) + w.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridstate.errors import PlanMismatch
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.transfer import Backend, use_triton


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Which rows of one layer are kept: int32 numbers, ascending.

    Attributes:
        high: among the FP16 rows of all heads.
        low: among the INT8 rows of all heads.
    """

    high: Tensor
    low: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor, layout: PackedLayout) -> "KeptRows":
        """From bool [H, K], key rows in stored order.

        Raises:
            PlanMismatch: another number of key rows.
        """
        if mask.dim() != 2 or mask.shape[1] != layout.key_dim:
            raise PlanMismatch(
                f"mask {list(mask.shape)} does not fit heads of {layout.key_dim} key rows",
                found=list(mask.shape),
                expected=["heads", layout.key_dim],
            )
        parts = (mask[:, : layout.k_hi], mask[:, layout.k_hi :])
        return cls(*(x.flatten().nonzero().flatten().to(torch.int32) for x in parts))

    def buffers(self, slots: int, layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor]:
        """FP16 rows, codes and scales of so many checkpoints, zero: `[slots, n, V]` twice, `[slots, n, groups]`."""
        device, width = self.high.device, layout.value_dim
        return (
            torch.zeros(slots, len(self.high), width, dtype=torch.float16, device=device),
            torch.zeros(slots, len(self.low), width, dtype=torch.int8, device=device),
            torch.zeros(slots, len(self.low), layout.groups, device=device),
        )


def gather_packed(
    state: Tensor, kept: KeptRows, into: tuple[Tensor, Tensor, Tensor], layout: PackedLayout,
    *, backend: Backend = "auto",
) -> None:  # fmt: skip
    """Copy the kept rows of one slot.

    Args:
        state: uint8 [H, head_bytes], contiguous.
        kept: which rows.
        into: FP16 rows [n, V], codes [m, V] and scales [m, groups] to write.
        layout: of the state.
        backend: triton, reference, or triton on a GPU and reference elsewhere.
    """
    if use_triton(state, backend):
        _launch(state, kept, into, layout, gather=True)
        return
    for part, rows, target in zip(layout.split(state), _three(kept), into, strict=True):
        target.copy_(part.reshape(-1, part.shape[-1])[rows])


def scatter_packed(
    source: tuple[Tensor, Tensor, Tensor], kept: KeptRows, state: Tensor, layout: PackedLayout,
    *, backend: Backend = "auto",
) -> None:  # fmt: skip
    """The inverse of `gather_packed`; other rows of the slot stay as they are."""
    if use_triton(state, backend):
        _launch(state, kept, source, layout, gather=False)
        return
    parts = [part.clone().contiguous() for part in layout.split(state)]
    for part, rows, given in zip(parts, _three(kept), source, strict=True):
        part.view(-1, part.shape[-1])[rows] = given
    state.copy_(layout.join(*parts))


def _three(kept: KeptRows) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers of FP16 rows, codes and scales."""
    low = kept.low.long()
    return kept.high.long(), low, low


def _launch(
    state: Tensor, kept: KeptRows, parts: tuple[Tensor, Tensor, Tensor], layout: PackedLayout,
    *, gather: bool,
) -> None:  # fmt: skip
    """One program per kept row."""
    from hybridstate.kernels.packed_rows_triton import packed_rows_kernel

    count = len(kept.high) + len(kept.low)
    if not count:
        return
    power = 1 << (layout.value_dim - 1).bit_length()
    packed_rows_kernel[(count,)](
        state, kept.high, kept.low,
        parts[0].view(torch.int16), parts[1], parts[2].view(torch.int32), len(kept.high),
        K=layout.key_dim, V=layout.value_dim, KHI=layout.k_hi, G=layout.groups,
        BLOCK=layout.block if layout.order == "fragment" else 0,
        HEAD_BYTES=layout.head_bytes, VP=power, GP=1 << (layout.groups - 1).bit_length(),
        GATHER=gather, num_warps=1,
    )  # fmt: skip
