"""Where each value of a stored state lies in memory; the only module that knows.

A packed head holds K_hi key rows in FP16 and the others as INT8 codes with one FP32 scale per group of value
columns (DAMP 5.2). Two physical orders hold the same three pieces, so they agree bit for bit once unpacked:

natural    any dimensions. [scales: group, row] [FP16: column, row] [codes: column, row], key rows contiguous,
           zero-padded to 16 bytes: sums over key channels then stay inside a thread.
fragment   K a multiple of 16, V of 32, both from 64 to 256, groups of 32, K_hi a multiple of 16: the operand order
           of Hopper's 16 x 8 x 16 matrix instruction, so that every access of the fused kernel is a full 16-byte
           vector. Blocks of 128 value columns (64 or 32 where V does not divide) one after another, each in chunks
           of 16 key rows; with I = block / 8, lane 4 r + j of a warp owns value columns I r + i of the block and,
           in chunk c, key rows 16 c + 4 j + e:
           [FP16 chunks: i / 2, lane, i % 2, e] [codes + 128: i / 4, lane, i % 4, e] [scales: group, row].
           Narrower tiles of a block stay runs of at least 128 bytes, so kernels that split a head read it too.

`layout_id` names the order and everything that a kernel or a plan has to agree on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridstate.defaults import FP16_MAX, GROUP
from hybridstate.errors import NumericError
from hybridstate.kernels.reference import dequantise_groups, quantise_groups

Order = Literal["auto", "natural", "fragment"]
DenseOrder = Literal["rows", "columns", "tiles", "fragment"]

FRAGMENT_BLOCKS = (128, 64, 32)
"""Value columns of a block in fragment order: the first that divides V."""

FRAGMENT_DIMS = (64, 256)
"""Least and most key rows, and value columns, in fragment order."""

CHUNK_ROWS = 16
ALIGNMENT = 16
"""Bytes: the widest access of one thread."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Storage of one value head's mixed-precision state.

    Args:
        key_dim, value_dim: K and V.
        k_hi: leading key rows kept in FP16, 0 to K.
        group: value columns that share an INT8 scale; the last group may be short.
        order: physical order; auto becomes fragment where that exists, natural elsewhere.
    """

    key_dim: int
    value_dim: int
    k_hi: int
    group: int = GROUP
    order: Order = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.k_hi <= self.key_dim or self.value_dim < 1 or self.group < 1:
            raise NumericError(
                f"no packed layout of {self.key_dim} x {self.value_dim} "
                f"with {self.k_hi} FP16 rows and groups of {self.group}",
                expected="0 <= k_hi <= key_dim, positive value_dim and group",
            )
        if self.order == "auto":
            object.__setattr__(self, "order", "fragment" if self.has_fragment_order else "natural")
        elif self.order == "fragment" and not self.has_fragment_order:
            raise NumericError(
                f"fragment order does not exist for {self.layout_id}", hint="Use order='natural'."
            )

    @property
    def has_fragment_order(self) -> bool:
        """Whether the matrix-fragment order exists for these dimensions."""
        return self.fragment_obstacle is None

    @property
    def fragment_obstacle(self) -> str | None:
        """Why the matrix-fragment order does not exist, or None where it does."""
        if self.group != 32:
            return f"groups of {self.group} value columns, not 32"
        if self.k_hi % CHUNK_ROWS:
            return f"{self.k_hi} FP16 rows are no multiple of {CHUNK_ROWS}"
        return _dims_obstacle(self.key_dim, self.value_dim)

    @property
    def block(self) -> int:
        """Value columns stored together in fragment order."""
        return fragment_block(self.value_dim)

    @property
    def rows_lo(self) -> int:
        """Key rows stored as INT8."""
        return self.key_dim - self.k_hi

    @property
    def groups(self) -> int:
        """Scales per INT8 row."""
        return -(-self.value_dim // self.group)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one head without alignment."""
        return 2 * self.k_hi * self.value_dim + self.rows_lo * (self.value_dim + 4 * self.groups)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a pool."""
        return -(-self.payload_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def bits_per_value(self) -> float:
        """Stored bits per state value; 9.875 at 16 of 128 rows and groups of 32."""
        return 8 * self.payload_bytes / (self.key_dim * self.value_dim)

    @property
    def layout_id(self) -> str:
        """Name of the physical order with all its parameters."""
        order = f"mma16816-columns{self.block}" if self.order == "fragment" else "natural"
        return f"{order}-k{self.key_dim}-v{self.value_dim}-f16x{self.k_hi}-i8g{self.group}-f32scale"

    def pack(self, state: Tensor, *, check: bool = True) -> Tensor:
        """Quantise and lay out states whose key rows are already in stored order.

        FP16 rows saturate at 65,504 (`count_saturated` tells how many values); INT8 rows follow
        `reference.quantise_groups`.

        Args:
            state: [..., K, V], float32 or float64.
            check: refuse non-finite input (synchronises a GPU).

        Returns:
            uint8 [..., head_bytes]; alignment bytes are zero.

        Raises:
            NumericError: wrong shape, or non-finite values with `check`.
        """
        if tuple(state.shape[-2:]) != (self.key_dim, self.value_dim):
            raise NumericError(
                f"state ends in {tuple(state.shape[-2:])}, the layout holds {self.key_dim} x {self.value_dim}",
                found=list(state.shape),
            )
        hi, lo = state[..., : self.k_hi, :], state[..., self.k_hi :, :]
        if check and not bool(torch.isfinite(hi).all()):
            first = torch.nonzero(~torch.isfinite(hi))[0].tolist()
            raise NumericError(f"state to pack is not finite at index {first}", index=first)
        codes, scales = quantise_groups(lo, self.group, check=check)
        return self.join(hi.clamp(-FP16_MAX, FP16_MAX).to(torch.float16), codes, scales)

    def unpack(self, packed: Tensor) -> Tensor:
        """uint8 [..., head_bytes] to the float32 state [..., K, V] it stands for."""
        hi, codes, scales = self.split(packed)
        return torch.cat([hi.to(torch.float32), dequantise_groups(codes, scales, self.group)], -2)

    def count_saturated(self, state: Tensor) -> Tensor:
        """How many values of the FP16 rows exceed FP16; 0-dimensional, stays on the device."""
        return (state[..., : self.k_hi, :].abs() > FP16_MAX).sum()

    def join(self, hi: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Lay out the three pieces of a head.

        Args:
            hi: float16 [..., k_hi, V].
            codes: int8 [..., K - k_hi, V].
            scales: float32 [..., K - k_hi, groups].

        Returns:
            uint8 [..., head_bytes].
        """
        if self.order == "fragment":
            unsigned = (codes.to(torch.int16) + 128).to(torch.uint8)
            block = self.block
            pieces = [
                _to_fragment(hi, 2, block),
                _to_fragment(unsigned, 4, block),
                _chunk_scales(scales, block),
            ]
            lead = (*hi.shape[:-2], self.value_dim // block)
            flat = [_typed(x, torch.uint8).reshape(*lead, -1) for x in pieces if x.numel()]
            return torch.cat(flat, -1).flatten(-2)
        pieces = [scales.mT, hi.mT, codes.mT]
        lead = hi.shape[:-2]
        flat = [_typed(x, torch.uint8).reshape(*lead, -1) for x in pieces if x.numel()]
        flat.append(flat[0].new_zeros(*lead, self.head_bytes - self.payload_bytes))
        return torch.cat(flat, -1)

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inverse of `join`."""
        lead, rows, width = packed.shape[:-1], self.rows_lo, self.value_dim
        hi_bytes, scale_bytes = 2 * self.k_hi * width, 4 * rows * self.groups
        sizes = [hi_bytes, rows * width, scale_bytes]
        if self.order == "fragment":
            blocks = width // self.block
            parts = packed.unflatten(-1, (blocks, -1)).split([x // blocks for x in sizes], -1)
            hi, codes, scales = parts
            return (
                _from_fragment(_typed(hi, torch.float16), self.k_hi, 2, self.block),
                (_from_fragment(codes, rows, 4, self.block).to(torch.int16) - 128).to(torch.int8),
                _unchunk_scales(_typed(scales, torch.float32), rows, self.block),
            )
        scales, hi, codes = packed[..., : self.payload_bytes].split(
            [sizes[2], sizes[0], sizes[1]], -1
        )
        return (
            _typed(hi, torch.float16).reshape(*lead, width, self.k_hi).mT,
            _typed(codes, torch.int8).reshape(*lead, width, rows).mT,
            _typed(scales, torch.float32).reshape(*lead, self.groups, rows).mT,
        )


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """Storage of an unquantised state of one head: K * V values of one dtype.

    Args:
        key_dim, value_dim: K and V.
        dtype: float32, float16 or bfloat16.
        order: rows [K, V], the logical order; columns [V, K], as serving engines store it; tiles
            [V / tile, K, tile], which gives every access of a warp one contiguous block; fragment, the matrix
            operand order of packed FP16 rows (16-bit dtypes only).
        tile: value columns per tile, a divisor of V; only `tiles` uses it.
    """

    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32
    order: DenseOrder = "rows"
    tile: int = 8

    def __post_init__(self) -> None:
        if self.order == "tiles" and self.value_dim % self.tile:
            raise NumericError(
                f"tiles of {self.tile} columns do not divide {self.value_dim} value columns"
            )
        if self.order == "fragment":
            obstacle = _dims_obstacle(self.key_dim, self.value_dim)
            if self.dtype.itemsize != 2:
                obstacle = f"{self.dtype} values, not 16-bit ones"
            if obstacle:
                raise NumericError(f"fragment order does not exist: {obstacle}")

    @property
    def block(self) -> int:
        """Value columns stored together in fragment order."""
        return fragment_block(self.value_dim)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Distance in values between tiles, key rows and value columns inside a tile; not for fragment."""
        if self.order == "tiles":
            return self.key_dim * self.tile, self.tile, 1
        if self.order == "columns":
            return self.tile * self.key_dim, 1, self.key_dim
        return self.tile, self.value_dim, 1

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a pool."""
        return self.key_dim * self.value_dim * self.dtype.itemsize

    @property
    def layout_id(self) -> str:
        """Name of the physical order with all its parameters."""
        names = {"tiles": f"tiles{self.tile}", "fragment": f"mma16816-columns{self.block}"}
        name = names.get(self.order, self.order)
        return f"{name}-k{self.key_dim}-v{self.value_dim}-{str(self.dtype).removeprefix('torch.')}"

    def count_saturated(self, state: Tensor) -> Tensor:
        """How many values exceed FP16 where that is the dtype; 0-dimensional, stays on the device."""
        bound = FP16_MAX if self.dtype == torch.float16 else float("inf")
        return (state.abs() > bound).sum()

    def pack(self, state: Tensor) -> Tensor:
        """[..., K, V] to a tensor of the same shape and the pool's dtype, in physical order."""
        if self.dtype == torch.float16:
            state = state.clamp(-FP16_MAX, FP16_MAX)
        stored = state.to(self.dtype)
        if self.order == "columns":
            stored = stored.mT
        elif self.order == "tiles":
            stored = stored.unflatten(-1, (-1, self.tile)).transpose(-3, -2)
        elif self.order == "fragment":
            stored = _to_fragment(stored, 2, self.block)
        return stored.reshape(state.shape).contiguous()

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse of `pack`, in float32."""
        lead = packed.shape[:-2]
        if self.order == "columns":
            packed = packed.reshape(*lead, self.value_dim, self.key_dim).mT
        elif self.order == "tiles":
            packed = (
                packed.reshape(*lead, -1, self.key_dim, self.tile).transpose(-3, -2).flatten(-2)
            )
        elif self.order == "fragment":
            flat = packed.reshape(*lead, self.value_dim // self.block, -1)
            packed = _from_fragment(flat, self.key_dim, 2, self.block)
        return packed.to(torch.float32)


Layout = PackedLayout | DenseLayout
"""Any storage of a state in a pool."""


def fragment_block(value_dim: int) -> int:
    """Value columns of a block in fragment order: the largest of `FRAGMENT_BLOCKS` that divides V."""
    return next((b for b in FRAGMENT_BLOCKS if value_dim % b == 0), FRAGMENT_BLOCKS[-1])


def _dims_obstacle(key_dim: int, value_dim: int) -> str | None:
    """Why K x V has no fragment order, or None."""
    least, most = FRAGMENT_DIMS
    if not (least <= key_dim <= most and least <= value_dim <= most):
        return f"{key_dim} x {value_dim} is outside {least} to {most}"
    if key_dim % CHUNK_ROWS or value_dim % FRAGMENT_BLOCKS[-1]:
        return f"{key_dim} x {value_dim} is no multiple of {CHUNK_ROWS} x {FRAGMENT_BLOCKS[-1]}"
    return None


def _typed(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes read as another dtype; a copy, since axes of length 1 may carry any stride."""
    if not piece.numel():
        width = piece.shape[-1] * piece.element_size() // dtype.itemsize
        return torch.empty(*piece.shape[:-1], width, dtype=dtype, device=piece.device)
    return piece.clone(memory_format=torch.contiguous_format).view(dtype)


def _to_fragment(rows: Tensor, vector: int, block: int) -> Tensor:
    """[..., 16 n, V] to (block, chunk, i / vector, r, j, i % vector, e)."""
    lanes = block // 8 // vector
    split = rows.reshape(*rows.shape[:-2], -1, 4, 4, rows.shape[-1] // block, 8, lanes, vector)
    return _reorder(split, (3, 0, 5, 4, 1, 6, 2))  # from c j e b r i/v i%v


def _from_fragment(flat: Tensor, count: int, vector: int, block: int) -> Tensor:
    """The inverse of `_to_fragment` for `count` rows; `flat` is [..., blocks, values of a block]."""
    lanes = block // 8 // vector
    split = flat.reshape(*flat.shape[:-1], count // CHUNK_ROWS, lanes, 8, 4, vector, 4)
    width = flat.shape[-2] * block
    return _reorder(split, (1, 4, 6, 0, 3, 2, 5)).reshape(*flat.shape[:-2], count, width)


def _chunk_scales(scales: Tensor, block: int) -> Tensor:
    """[..., 16 n, V / 32] to (block, chunk, group, row)."""
    groups = block // 32
    split = scales.reshape(*scales.shape[:-2], -1, CHUNK_ROWS, scales.shape[-1] // groups, groups)
    return _reorder(split, (2, 0, 3, 1))


def _unchunk_scales(flat: Tensor, count: int, block: int) -> Tensor:
    """The inverse of `_chunk_scales` for `count` rows; `flat` is [..., blocks, scales of a block]."""
    groups = block // 32
    split = flat.reshape(*flat.shape[:-1], count // CHUNK_ROWS, groups, CHUNK_ROWS)
    width = flat.shape[-2] * groups
    return _reorder(split, (1, 3, 0, 2)).reshape(*flat.shape[:-2], count, width)


def _reorder(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Permute the last axes, leaving the leading ones alone."""
    lead = x.dim() - len(axes)
    return x.permute(*range(lead), *(lead + axis for axis in axes))


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Bool `[]` on the device of the tensors (at least one, none of integers): whether all numbers are finite.

    A finite sum of magnitudes proves finite terms, so the answer is no as well where that sum overflows float32.
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    sums = [x for held in kinds.values() for x in torch._foreach_norm(held, 1, torch.float32)]
    return torch.isfinite(torch.stack(sums)).all()
