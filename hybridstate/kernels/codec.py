"""The INT8 codec of checkpoints, DASC Eq. 8: one scale per (layer, head, key channel) over the value columns.

Quantised once, when a prefix is stored; not the live state's format (`reference.quantise_groups`), whose groups are
32 columns wide and which is requantised at every step. A kept channel of 128 columns takes 128 + 4 bytes.
"""

import torch
from torch import Tensor

from hybridstate.errors import NumericError

LEAST_AMPLITUDE = 1e-8
"""A row below this is stored as if it reached it (DASC Eq. 8)."""

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantise_rows(x: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """s = max(max|x|, 1e-8) / 127 rounded to its dtype, then code = round_half_even(x / s) in [-127, 127].

    Dividing by the scale as stored makes the error of a value at most half a stored step, whatever the dtype. A
    scale that underflows in `scale_dtype` is stored as 0 and stands for zeros.

    Args:
        x: float32 [..., V].
        scale_dtype: of `SCALE_DTYPES`.

    Returns:
        codes int8 [..., V] and scales [...] of `scale_dtype`. A NaN in a row makes its scale NaN.

    Raises:
        NumericError: another dtype.
    """
    if x.dtype != torch.float32 or scale_dtype not in SCALE_DTYPES:
        raise NumericError(
            f"the INT8 checkpoint codec takes float32 rows and a float scale, found {x.dtype} and {scale_dtype}"
        )
    top = x.abs().amax(-1).clamp_min(LEAST_AMPLITUDE)
    # a tensor of 127s: CUDA turns a division by a number into a multiplication by its reciprocal
    scales = (top / torch.full_like(top, 127.0)).to(scale_dtype)
    wide = scales.to(torch.float32)
    divisor = torch.where(wide > 0, wide, torch.ones_like(wide)).unsqueeze(-1)
    codes = (x / divisor).round().clamp(-127, 127)
    return codes.nan_to_num(0.0).to(torch.int8), scales


def dequantise_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """code * scale in float32: int8 [..., V] and [...] to [..., V]."""
    return codes.to(torch.float32) * scales.to(torch.float32).unsqueeze(-1)
