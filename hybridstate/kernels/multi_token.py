"""T tokens of a batch on pooled states in one launch: what T calls of `update` would do, requantised once.

For suffixes of a few tokens to a few dozen (replay of a window, several tokens per step). Longer ones belong to
`reference.chunk_prefill`, whose matrix products pay from about a hundred tokens on.
"""

import torch
from torch import Tensor

from hybridstate.errors import NumericError
from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.reference import recurrent_loop
from hybridstate.kernels.transfer import Backend, use_triton

WARPS = 4


def run_tokens(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor,
    *, layout: PackedLayout | DenseLayout, lengths: Tensor | None = None,
    value_scale: Tensor | None = None, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Update the slots by up to T tokens each and read the state out after every one.

    Args:
        q, k: [B, T, Hk, K], before normalisation, any float dtype, key rows in stored order.
        v: [B, T, H, V].
        g: log decay [B, T, H] or [B, T, H, K].
        beta: [B, T, H].
        pool: uint8 [P, H, head_bytes] or [P, H, K, V], updated in place.
        slots: int64 [B]; below zero: output zero, no state touched.
        layout: of the pool.
        lengths: int32 [B], tokens of each row; None means T. Outputs beyond are zero.
        value_scale: c, float32 [H, V]; the pool holds S / c.
        backend: triton, reference (synchronises), or triton on a GPU and reference elsewhere.

    Returns:
        o [B, T, H, V] in the dtype of `v`.

    Raises:
        NumericError: shapes or dtypes do not fit.
    """
    batch, tokens = v.shape[:2]
    if lengths is None:
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device=v.device)
    _check(q, k, v, g, beta, pool, slots, layout, lengths, value_scale)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if use_triton(pool, backend):
        _launch(q, k, v, g, beta, pool, slots, layout, lengths, value_scale, out)
        return out
    out.zero_()
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if slot < 0 or length <= 0:
            continue
        scale = 1.0 if value_scale is None else value_scale.unsqueeze(-2)
        qs, ks, vs, gs, bs = (x[row : row + 1, :length] for x in (q, k, v, g, beta))
        state = layout.unpack(pool[slot : slot + 1]) * scale
        out[row : row + 1, :length], state = recurrent_loop(qs, ks, vs, gs, bs, state)
        pool[slot] = layout.pack(state / scale)[0]
    return out


def _launch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor,
    layout: PackedLayout | DenseLayout, lengths: Tensor, value_scale: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    from hybridstate.kernels.multi_token_triton import tokens_kernel

    batch, tokens, heads, value_dim = v.shape
    constants = {"KHI": 0, "GROUP": 32, "HEAD_BYTES": 0, "PACKED": False, "BLOCK": 0}
    tile = {"TILE": 1, "S_TILE": 0, "S_ROW": 0, "S_COL": 0}
    if isinstance(layout, PackedLayout):
        constants = {
            "KHI": layout.k_hi, "GROUP": layout.group, "HEAD_BYTES": layout.head_bytes,
            "PACKED": True, "BLOCK": layout.block if layout.order == "fragment" else 0,
        }  # fmt: skip
    elif layout.order == "fragment":
        raise NumericError("dense states in fragment order are not updated by several tokens")
    else:
        strides = layout.strides
        tile = {"TILE": layout.tile, "S_TILE": strides[0], "S_ROW": strides[1], "S_COL": strides[2]}
    group = min(constants["GROUP"], value_dim)
    groups = -(-value_dim // constants["GROUP"])
    tokens_kernel[(batch * heads * groups,)](
        *(x.contiguous() for x in (q, k, v, g, beta)), pool,
        slots if value_scale is None else value_scale, slots, lengths, out, pool.stride(0), tokens,
        H=heads, HK=q.shape[2], K=layout.key_dim, V=value_dim, KDA=g.dim() == 4,
        SCALED=value_scale is not None, GP=1 << (group - 1).bit_length(),
        KP=1 << (layout.key_dim - 1).bit_length(), **constants, **tile, num_warps=WARPS,
    )  # fmt: skip


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor,
    layout: PackedLayout | DenseLayout, lengths: Tensor, value_scale: Tensor | None,
) -> None:  # fmt: skip
    """Refuse what a kernel would read out of bounds or broadcast."""
    batch, tokens, heads, value_dim = v.shape
    key = (batch, tokens, q.shape[2], layout.key_dim)
    packed = isinstance(layout, PackedLayout)
    stored = (heads, layout.head_bytes) if packed else (heads, layout.key_dim, layout.value_dim)
    kind = torch.uint8 if isinstance(layout, PackedLayout) else layout.dtype
    expected: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype | None]] = {
        "q": (q, key, None),
        "k": (k, key, None),
        "v": (v, (batch, tokens, heads, layout.value_dim), None),
        "g": (g, (batch, tokens, heads) + ((layout.key_dim,) if g.dim() == 4 else ()), None),
        "beta": (beta, (batch, tokens, heads), None),
        "slots": (slots, (batch,), torch.int64),
        "lengths": (lengths, (batch,), torch.int32),
        "pool": (pool[0], stored, kind),
    }
    if value_scale is not None:
        expected["value_scale"] = (value_scale, (heads, value_dim), torch.float32)
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
            raise NumericError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype or 'floats'} {shape}",
                tensor=name,
                found=list(tensor.shape),
                expected=list(shape),
            )
    if heads % q.shape[2] or not pool[0].is_contiguous():
        raise NumericError("value heads must divide by key heads, and a pool slot be contiguous")
    if value_scale is not None and not value_scale.is_contiguous():
        raise NumericError("value_scale must be contiguous")
