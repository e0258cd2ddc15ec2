"""What happens to one tensor, and how the scales of a quantised weight follow it."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.errors import UnsupportedModel

Index = NDArray[np.int64]

SCALES: Final = (".weight_scale_inv", ".weight_scale")
"""Endings of the scales of a quantised weight: block FP8, and one per row or per tensor."""

SCALE_BLOCK: Final = 128
"""Entries along each axis that share a scale in block FP8."""

_UNQUANTISED: Final = "use the unquantised checkpoint, or --no-weights and let the kernel gather"


@dataclass(frozen=True, slots=True)
class Move:
    """What happens to one tensor.

    Attributes:
        name: tensor name.
        shape: the stored shape, or an equivalent one (same bytes) in which the axes exist.
        axes: for each axis in which something moves, old position of every new entry.
        ones: all entries become one (an output norm that was folded).
        norm: tensor whose weight multiplies the columns before they move.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[tuple[int, Index], ...]
    ones: bool = False
    norm: str | None = None

    @property
    def still(self) -> bool:
        """Nothing changes."""
        return not (self.axes or self.ones or self.norm)

    @property
    def grown(self) -> bool:
        """Whether entries are repeated, so that the tensor has another shape afterwards."""
        return any(len(index) != self.shape[axis] for axis, index in self.axes)

    def shape_after(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the moved tensor, which was stored as `stored`.

        Raises:
            UnsupportedModel: it grows along an axis that the stored shape does not have.
        """
        if not self.grown:
            return stored
        if stored != self.shape:
            raise UnsupportedModel(
                f"{self.name}: cannot replicate key heads of a tensor stored as {list(stored)}",
                hint="--key-order shared, or --no-weights and let the kernel gather",
                tensor=self.name,
                found=list(stored),
            )
        lengths = {axis: len(index) for axis, index in self.axes}
        return tuple(lengths.get(axis, size) for axis, size in enumerate(stored))


def scaled_weight(suffix: str) -> str | None:
    """The weight whose scales a tensor holds, None if it holds none."""
    for ending in SCALES:
        if suffix.endswith(ending):
            return suffix.removesuffix(ending) + ".weight"
    return None


def scale_move(name: str, shape: tuple[int, ...], weight: Move) -> Move:
    """How the scales of a weight follow it, whole blocks at a time.

    A scale stands for one entry of an axis, for `SCALE_BLOCK` of them, or for all; it can move only
    where everything it stands for moves together. Heads of 128 with orders inside them always do.

    Args:
        shape: of the scales.
        weight: the move of the weight they belong to.

    Raises:
        UnsupportedModel: entries of one block would come from several.
    """
    axes = []
    for axis, index in weight.axes:
        length, scales = weight.shape[axis], shape[axis] if axis < len(shape) else 1
        if scales == 1:
            continue  # one scale for the whole axis
        size = 1 if scales == length else SCALE_BLOCK
        if scales != -(-length // size):
            raise UnsupportedModel(
                f"{scales} scales on an axis of {length}, expected one for each entry or for each "
                f"{SCALE_BLOCK}",
                hint=_UNQUANTISED,
                found=scales,
                expected=-(-length // size),
            )
        source = index // size
        first = source[::size]
        mixed = np.flatnonzero(source != np.repeat(first, size)[: len(source)])
        whole = len(source) % size == length % size  # a short last block stays the last
        if len(mixed) or len(set(first.tolist())) != scales or not whole:
            block = int(mixed[0]) // size if len(mixed) else 0
            raise UnsupportedModel(
                f"the order mixes scale blocks: block {block} of {size} entries would hold entries of "
                "several",
                hint=_UNQUANTISED,
                block=block,
            )
        if len(first) != scales or (first != np.arange(scales)).any():
            axes.append((axis, first))
    return Move(name, shape, tuple(axes))
