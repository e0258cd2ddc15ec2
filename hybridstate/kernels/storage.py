"""What storage returns of a dense state under many arms at once, in place: the kernel's tables and launch.

`quant.arms.Arm.reconstruct` is the twin, one arm at a time in some twenty passes over the state; here every value is
read and written once, whatever the arm does.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

KINDS: Final = ("int8-step", "fp8", "int4", "fp16", "bf16", "nvfp4", "int8-step-stochastic")
"""Low formats the kernel knows, by their number in it."""
ROWS: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class StorageTables:
    """How A arms store one layer of H heads.

    Attributes:
        kinds: int32 `[A]`, places in `KINDS`.
        protected: uint8 `[A, H, K]`, 1 where a key channel is stored as FP16.
        order: int32 `[A, H, V]`; stored column j holds value dimension `order[a, h, j]`.
        scale: float32 `[A, H, V]`, divided out before storing, by value dimension.
    """

    kinds: Tensor
    protected: Tensor
    order: Tensor
    scale: Tensor


def store_in_place(
    state: Tensor,
    tables: StorageTables,
    arms: Tensor,
    sequences: int,
    hashes: Tensor,
    whole: Tensor | None = None,
) -> None:
    """Replace the rows of `arms` (int32, on the device) of `state [A * S, H, K, V]` by what storage returns.

    float32 and contiguous, `sequences` is S. Captured in a graph, it writes the same arms at every replay.

    Args:
        hashes: int32 `[A * S]`, `quant.rounding.row_hashes` of the rows that round stochastically.
        whole: those of `arms` whose scale spans the state (NVFP4); None if there are none.
    """
    import triton

    from hybridstate.kernels.storage_triton import peak_kernel, store_kernel

    _, heads, key_dim, value_dim = state.shape
    assert state.is_contiguous()
    assert state.dtype == torch.float32
    groups = triton.next_power_of_2(-(-value_dim // 32))
    grid = (len(arms) * sequences, heads, -(-key_dim // ROWS))
    peaks = state.new_empty(len(state) * heads)
    if whole is not None:
        peak_kernel[(len(whole) * sequences, heads)](
            *(state, whole, tables.protected, tables.scale, peaks),
            *(sequences, heads, key_dim, value_dim, 32 * groups, ROWS),
            num_warps=4,
        )
    store_kernel[grid](
        *(state, arms, tables.kinds, tables.protected, tables.order, tables.scale, peaks, hashes),
        *(sequences, heads, key_dim, value_dim, groups, ROWS),
        num_warps=4,
        enable_fp_fusion=False,
    )
