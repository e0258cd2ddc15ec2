"""The bytes a tensor has in the exported checkpoint: moved, and where asked for with the output norm folded.

The output norm's weight `[V]` is shared by all heads of a layer. Between norm and output projection there are only
factors per channel, so `out[:, h V + j] *= w[j]` with the norm set to ones computes the same, and then every head may
order its value dims as it likes.
"""

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint import Checkpoint
from hybridstate.errors import UnsupportedModel
from hybridstate.weights.moves import Move
from hybridstate.weights.permute import permute


def fold_norm(raw: bytes, dtype: str, move: Move, norm: NDArray[np.floating]) -> bytes:
    """The output projection `[hidden, H V]` with its columns times the norm's weight `[V]`, not yet moved.

    The product is formed in float32 and rounded to nearest even in the stored dtype, so a BF16
    projection changes by at most half a unit in its last place.

    Raises:
        UnsupportedModel: the projection is stored in a dtype that cannot hold the product.
    """
    if dtype == "BF16":
        bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        weight = bits.view(np.float32).reshape(move.shape)
    elif dtype in ("F16", "F32"):
        weight = np.frombuffer(raw, dtype.replace("F", "f").replace("16", "2").replace("32", "4"))
        weight = weight.astype(np.float32).reshape(move.shape)
    else:
        raise UnsupportedModel(
            f"{move.name}: cannot fold the output norm into {dtype}",
            hint="use one common value order per layer, or the unquantised checkpoint",
            tensor=move.name,
            found=dtype,
        )
    product = weight * np.tile(norm.astype(np.float32), move.shape[1] // len(norm))
    if dtype == "F32":
        return product.astype("<f4").tobytes()
    if dtype == "F16":
        return product.astype("<f2").tobytes()
    bits = product.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").tobytes()


def ones_like(raw: bytes, dtype: str, name: str) -> bytes:
    """As many ones in the same dtype.

    Raises:
        UnsupportedModel: nobody stores a norm in this dtype.
    """
    one = {"BF16": b"\x80\x3f", "F16": b"\x00\x3c", "F32": b"\x00\x00\x80\x3f"}.get(dtype)
    if one is None:
        raise UnsupportedModel(f"{name}: no ones of dtype {dtype}", tensor=name, found=dtype)
    return one * (len(raw) // len(one))


def changed(checkpoint: Checkpoint, move: Move) -> bytes:
    """The bytes that a tensor of the original checkpoint has in the exported one."""
    raw, dtype = checkpoint.read_raw(move.name), checkpoint.entries[move.name].dtype
    if move.ones:
        return ones_like(raw, dtype, move.name)
    if move.norm is not None:
        raw = fold_norm(raw, dtype, move, checkpoint.read(move.norm))
    return permute(raw, dtype, move)
