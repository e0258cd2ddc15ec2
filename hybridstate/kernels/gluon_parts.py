"""Layouts, conversions and addresses shared by the matrix-instruction kernels (Gluon, NVIDIA).

A kernel's warp owns W value columns of a head in fragment order (layout.py), W = 128, 64 or 32, of a stored block
of BLOCK >= W columns. With I = W / 8 columns a lane and G = W / 32 groups, lane 4 r + j holds value columns I r + i
and, in each chunk of 16 key channels, channels 4 j + e; the group of a lane is r G / 8, so a lane works with one
scale per channel. A narrower warp reads runs of W bytes out of the same block.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from hybridstate.kernels.fusion import StepFusion
from hybridstate.kernels.layout import Layout, PackedLayout

# Names that moved between Triton 3.6 and 3.9.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def _view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return memory.reinterpret(dtype, shape, layout)
else:

    @gluon.jit
    def _view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return memory._reinterpret(dtype, shape, layout)


UP = gl.constexpr(2.0**100)  # lifts a_u s_ug k_u far above the subnormal codes it meets
UNIT = gl.constexpr(2.0**33)  # 1 / (2^-133 * 2^100): a code in a lifted product counts 2^-33
TINY_SCALE = gl.constexpr(1e-30)  # a zero group, or decay that underflowed: kappa stays finite
TINY_GROUP = gl.constexpr(1e-35)  # the same for the new reciprocal
ROUND = gl.constexpr(12583040.0)  # 1.5 * 2^23 + 128: nearest even, offset included
NORM_EPSILON = gl.constexpr(1e-6)
HALF_LIMIT = gl.constexpr(65504.0)

# Matrix instruction 16 x 8 x 16 and its operands.
MMA = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
)
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
SHARED3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
SHARED2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SHARED1 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def tile_layout(W):
    """A chunk in pass 2: [i, group, r % (8 / G), channel]."""
    return gl.BlockedLayout(
        [W // 8, 1, 1, 4], [1, W // 32, 256 // W, 4], [1, 1, 1, 1], [3, 2, 1, 0]
    )


@gluon.constexpr_function
def column_layout(W):
    """[i, group, r % (8 / G)]: one value a column, equal in the four lanes that share it."""
    return gl.SliceLayout(3, tile_layout(W))


@gluon.constexpr_function
def scale_layout(W):
    """[group, channel] where the tile needs it."""
    return gl.SliceLayout(1, gl.SliceLayout(0, tile_layout(W)))


@gluon.constexpr_function
def channel_layout(W):
    """[channel] where the tile needs it."""
    return gl.SliceLayout(0, scale_layout(W))


@gluon.constexpr_function
def operand_layout(W):
    """[group, copy, {k, q}, channel]: the right operand before its axes are merged into eight columns."""
    return gl.BlockedLayout([1, 1, 1, 4], [W // 32, 128 // W, 2, 4], [1, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def sums_layout(W, rows):
    """The sums of pass 1: [i, group, r % (8 / G), column pair, {k, q}], `rows` values of i a lane."""
    return gl.BlockedLayout(
        [rows, 1, 1, 1, 2], [1, W // 32, 256 // W, 4, 1], [1, 1, 1, 1, 1], [4, 3, 2, 1, 0]
    )


@gluon.constexpr_function
def vector_layout(vectors, width):
    """Memory: `vectors` accesses of 16 bytes, `width` elements, a lane."""
    return gl.BlockedLayout([vectors, 1, width], [1, 32, 1], [1, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def row_layout(columns):
    """Value columns of a lane, [r, i]."""
    return gl.BlockedLayout([1, columns], [8, 4], [1, 1], [1, 0])


@gluon.constexpr_function
def flat_layout(count):
    """Key channels spread over the warp."""
    return gl.BlockedLayout([count // 32], [32], [1], [0])


@gluon.jit
def _exp(x):
    """exp(x) to 2 ulp; underflows to zero."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }",
        "=r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _reciprocal(x):
    """1 / x to 1 ulp."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _truncated(x):
    """The bfloat16 at or below x in magnitude, as float32."""
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _bfloat16(x):
    """float32 to the nearest bfloat16, two in one instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _float16(x):
    """float32 to the nearest float16, two in one instruction, saturating at 65,504."""
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [x],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _codes_to_bfloat16(x):
    """Byte b to the bfloat16 b * 2^-133."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;",
        "=r,=r,r",
        [x],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _low_bytes(x):
    """Low byte of each float32 word, four packed into one."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x0040; prmt.b32 b, $3, $4, 0x0040; "
        "prmt.b32 $0, a, b, 0x5410; }",
        "=r,r,r,r,r",
        [x],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _wait_for_previous_grid():
    """Programmatic dependent launch: results of the kernel before this one are visible after it."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _release_next_grid():
    """Programmatic dependent launch: the next kernel may start once every program has said this."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _write_strength(x, LOGIT: gl.constexpr):
    """LOGIT * sigmoid(x), or x itself where LOGIT is 0."""
    if LOGIT > 0:
        x = LOGIT * _reciprocal(1.0 + _exp(-x))
    return x


@gluon.jit
def _decay_of(x, a_log, bias, GATE: gl.constexpr, LOWER: gl.constexpr):
    """exp(g) from log decay (GATE 0), softplus gate (1) or safe gate (2).

    log(1 + t) = 2 atanh(s), s = t / (2 + t) <= 1 / 3, by seven terms: to 1e-7 of itself where decays are closest to
    1, and without the branches of the library's logarithm.
    """
    if GATE == 1:
        x = x + bias
        t = _exp(-gl.abs(x))
        s = t * _reciprocal(2.0 + t)
        s2 = s * s
        series = (((1.0 / 13.0 * s2 + 1.0 / 11.0) * s2 + 1.0 / 9.0) * s2 + 1.0 / 7.0) * s2
        series = ((series + 1.0 / 5.0) * s2 + 1.0 / 3.0) * s2 + 1.0
        x = -_exp(a_log) * (gl.maximum(x, 0.0) + 2.0 * s * series)
    elif GATE == 2:
        x = LOWER * _reciprocal(1.0 + _exp(-_exp(a_log) * (x + bias)))
    return _exp(x)


@gluon.jit
def _left_codes(x, W: gl.constexpr):
    """A chunk of code bytes [vector, lane, byte] to the left operand [value column, channel]."""
    split = gl.reshape(x, [W // 32, 8, 4, 4, 2, 2])
    split = gl.permute(_codes_to_bfloat16(split), [0, 3, 1, 4, 2, 5])
    return gl.convert_layout(gl.reshape(split, [W, 16]), LEFT, assert_trivial=True)


@gluon.jit
def _left_halves(x, W: gl.constexpr):
    """A chunk of 16-bit rows [vector, lane, half] to the left operand [value column, channel]."""
    split = gl.permute(gl.reshape(x, [W // 16, 8, 4, 2, 2, 2]), [0, 3, 1, 4, 2, 5])
    return gl.convert_layout(gl.reshape(split, [W, 16]), LEFT, assert_trivial=True)


@gluon.jit
def _paired(scale, vectors, W: gl.constexpr):
    """scale [group, channel] times {k, q} [2, channel] as [group, copy, {k, q}, channel]."""
    both = gl.expand_dims(scale, 1) * gl.expand_dims(vectors, 0)
    copies = gl.full([1, 128 // W, 1, 1], 1.0, gl.float32, layout=operand_layout(W))
    return gl.expand_dims(both, 1) * copies


@gluon.jit
def _right_operand(x, W: gl.constexpr):
    """[group, copy, {k, q}, channel 4 j + 2 hh + e] to the right operand [8 hh + 2 j + e, column]."""
    split = gl.reshape(x, [W // 32, 128 // W, 2, 4, 2, 2])
    split = gl.permute(split, [4, 3, 5, 0, 1, 2])
    return gl.convert_layout(gl.reshape(split, [16, 8]), RIGHT, assert_trivial=True)


@gluon.jit
def _grid(A: gl.constexpr, B: gl.constexpr, step: gl.constexpr, layout: gl.constexpr):
    """Offsets a * step + b of an [A, B] tile."""
    a = gl.arange(0, A, layout=gl.SliceLayout(1, layout)) * step
    return gl.expand_dims(a, 1) + gl.expand_dims(
        gl.arange(0, B, layout=gl.SliceLayout(0, layout)), 0
    )


@gluon.jit
def _vector_offsets(tile, W: gl.constexpr, BLOCK: gl.constexpr, WIDTH: gl.constexpr):
    """Element offsets of [vector, lane, element] in a chunk of a stored block.

    WIDTH elements are 16 bytes: 16 codes or 8 halves. `tile` counts W-column parts of the block; where W is
    narrower than the block, BLOCK / W neighbouring r of this warp share one stored lane.
    """
    N: gl.constexpr = W // (2 * WIDTH)
    SHARE: gl.constexpr = BLOCK // W
    layout: gl.constexpr = vector_layout(N, WIDTH)
    n = gl.arange(0, N, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    e = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    if SHARE == 1:
        place = lane * WIDTH
    else:
        r = lane // 4
        stored = 4 * (tile * (8 // SHARE) + r // SHARE) + lane % 4
        place = (r % SHARE) * (N * 32 * WIDTH) + stored * WIDTH
    return (
        gl.expand_dims(gl.expand_dims(n * (32 * WIDTH), 1), 2)
        + gl.expand_dims(gl.expand_dims(place, 0), 2)
        + gl.expand_dims(gl.expand_dims(e, 0), 0)
    )


@gluon.jit
def _to_tile(x):
    """[channel] to [1, 1, 1, channel]."""
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 0)


@gluon.jit
def _to_column(x, W: gl.constexpr):
    """[r, i] of `row_layout` to [i, group, r % (8 / G)]."""
    turned = gl.reshape(gl.permute(x, [1, 0]), [W // 8, W // 32, 256 // W])
    return gl.convert_layout(turned, column_layout(W), assert_trivial=True)


@gluon.jit
def _to_row(x, W: gl.constexpr):
    """The inverse of `_to_column`."""
    turned = gl.permute(gl.reshape(x, [W // 8, 8]), [1, 0])
    return gl.convert_layout(turned, row_layout(W // 8), assert_trivial=True)


@gluon.jit
def _own_group(x, W: gl.constexpr):
    """From the sums of every column pair, [i, group, r % (8 / G), pair], the one of the row's own group."""
    layout: gl.constexpr = gl.SliceLayout(4, sums_layout(W, W // 8))
    g = gl.arange(
        0, W // 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    )
    index = gl.expand_dims(gl.expand_dims(gl.expand_dims(g * (128 // W), 0), 2), 3)
    index = index + gl.full([W // 8, W // 32, 256 // W, 1], 0, gl.int32, layout=layout)
    own = gl.gather(gl.convert_layout(x, layout, assert_trivial=True), index, 3)
    own = gl.reshape(own, [W // 8, W // 32, 256 // W])
    return gl.convert_layout(own, column_layout(W), assert_trivial=True)


@gluon.jit
def _own_sums(total, W: gl.constexpr):
    """[value column, column of the right operand] to S^T k and S^T q of each row, [i, group, r % (8 / G)]."""
    split = gl.reshape(total, [W // 8, W // 32, 256 // W, 4, 2])
    split = gl.convert_layout(split, sums_layout(W, W // 8), assert_trivial=True)
    k_sums, q_sums = gl.split(split)
    return _own_group(k_sums, W), _own_group(q_sums, W)


def launch_arguments(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor,
    out: Tensor, value_scale: Tensor | None, layout: Layout, fusion: StepFusion,
    columns: int, overlap: int,
) -> tuple[tuple[int], list[Any], dict[str, Any]]:  # fmt: skip
    """Grid, run-time arguments and constants that the matrix kernels share."""
    batch, heads, value_dim = v.shape
    if isinstance(layout, PackedLayout):
        high, bf16 = layout.k_hi, False
    else:
        high, bf16 = layout.key_dim, layout.dtype == torch.bfloat16
    optional = (value_scale, fusion.a_log, fusion.dt_bias, fusion.key_index, fusion.saturated)
    scale, *parameters = (out if x is None else x for x in optional)  # `out`: never read
    arguments: list[Any] = [q, k, v, g, beta, pool, scale, slots, out, *parameters]
    arguments += [x.stride(0) for x in (q, k, v, g, beta, out)]
    arguments.append(pool.stride(0) * pool.element_size())
    constants = {
        "H": heads,
        "HK": q.shape[1],
        "K": layout.key_dim,
        "V": value_dim,
        "HIGH": high // 16,
        "BF16": bf16,
        "W": columns,
        "BLOCK": layout.block,
        "KDA": g.dim() == 3,
        "SCALED": value_scale is not None,
        "GATE": fusion.gate,
        "LOWER": fusion.lower_bound or 0.0,
        "LOGIT": fusion.beta_scale or 0.0,
        "INDEXED": fusion.key_index is not None,
        "COUNTED": fusion.saturated is not None and high > 0 and not bf16,
        "OVERLAP": overlap,
    }
    return (batch * heads * (value_dim // columns),), arguments, constants
