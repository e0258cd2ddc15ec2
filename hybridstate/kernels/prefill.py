"""The recurrence over many tokens in two launches: `reference.chunk_prefill` on a GPU (`prefill_triton` has the maths).

`choose` tries the kernels once per device, data type and geometry on random inputs against the float64 twin, first
with TF32 products of three parts (as exact as float32), then with plain float32 ones, and says why where neither runs.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import torch
from torch import Tensor

from hybridstate.defaults import L2_EPSILON
from hybridstate.errors import NumericError
from hybridstate.kernels import reference
from hybridstate.kernels.dispatch import brief

Precision = Literal["tf32x3", "ieee"]

CHUNK = 32
"""Tokens of a chunk; a power of two."""
COLUMNS = 16
"""Value columns of one program of the walk; more of them spill registers."""
FEW = 128
"""Programs of the walk that a GPU runs beside each other with one on a multiprocessor."""
SEGMENT_BYTES = 1 << 29
"""Most bytes of intermediate results at once; longer prompts run in several segments."""
STATE_ERROR: Final = 5e-6
"""Relative RMS of the states in a trial, as of every float32 kernel."""
OUTPUT_ERROR: Final = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""The same of its outputs by data type: float16 and bfloat16 round once."""
_TOKENS: Final = 3 * CHUNK + 5


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a trial depends on: sizes of a layer and whether each key channel has its own decay."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    per_channel: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The precision of the kernels, None for the torch form, and what the trials said."""

    precision: Precision | None
    reason: str


def prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
    *, precision: Precision = "tf32x3",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments and results as `reference.chunk_prefill`, states in float32; inputs of any strides.

    Raises:
        NumericError: shapes do not fit together, or float64 inputs, which belong to the twin.
    """
    reference.check_shapes(q, k, v, g, beta, initial_state)
    if torch.float64 in (v.dtype, q.dtype, None if initial_state is None else initial_state.dtype):
        raise NumericError(
            "the prefill kernels compute in float32; float64 belongs to the reference"
        )
    from hybridstate.kernels.prefill_triton import prepare_kernel, scan_kernel

    batch, tokens, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[-2:]
    per_channel, owners = g.dim() == 4, batch * heads
    q, k, v, g, beta = (_rows(x) for x in (q, k, v, g, beta))
    wide, padded = _padded(key_dim), _padded(value_dim)
    chunk_values = CHUNK * (3 * wide + padded + CHUNK) + wide
    chunks = min(-(-tokens // CHUNK), max(1, SEGMENT_BYTES // (4 * owners * chunk_values)))
    scratch = torch.empty(owners * chunks * chunk_values, dtype=torch.float32, device=v.device)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shape = (batch, heads, key_dim, value_dim)
    state = torch.empty(shape, dtype=torch.float32, device=v.device)
    before = state if initial_state is None else initial_state.float().contiguous()
    common = {
        "H": heads, "K": key_dim, "V": value_dim, "KP": wide, "VP": padded, "C": CHUNK, "KDA": per_channel,
        "PRECISION": precision,
    }  # fmt: skip
    blocks = -(-value_dim // COLUMNS)
    # few programs leave multiprocessors idle: each gets twice the warps
    slices = _slices(wide, 8 if owners * blocks <= FEW else 4)
    warps = min(8, max(4, slices))
    # a decay per channel, or many channels, need the registers of eight warps
    most = 8 if per_channel or wide >= 256 else 4
    prepared = {"S": _slices(wide, most), "VS": _slices(padded, most), "num_warps": most}
    strides = [step for x in (q, k, v, g, beta) for step in x.stride()[:2]]
    for first in range(0, tokens, chunks * CHUNK):
        run = min(chunks, -(-(tokens - first) // CHUNK))
        prepare_kernel[(run, owners)](
            q, k, v, g, beta, scratch, *strides, tokens, first, SCALE=key_dim**-0.5, EPS=L2_EPSILON,
            HK=key_heads, LEVELS=CHUNK.bit_length() - 1, **common, **prepared,
        )  # fmt: skip
        scan_kernel[(blocks, owners)](
            scratch, before, out, state, tokens, first, run, BV=COLUMNS, S=slices,
            ZERO=initial_state is None and first == 0, STAGES=2, **common, num_warps=warps,
        )  # fmt: skip
        before = state
    return out, state


def choose(device: torch.device | str, dtype: torch.dtype, geometry: Geometry) -> Choice:
    """How this geometry runs here; the first call compiles and tries (seconds)."""
    text = str(device)
    if not text.startswith("cuda"):
        return Choice(None, f"torch on {text}")
    if dtype not in OUTPUT_ERROR:
        return Choice(None, f"torch for {dtype}")
    if text == "cuda":
        text = f"cuda:{torch.cuda.current_device()}"
    return _choose(text, dtype, geometry)


@lru_cache(maxsize=64)
def _choose(device: str, dtype: torch.dtype, geometry: Geometry) -> Choice:
    problems: list[str] = []
    names: tuple[Precision, ...] = ("tf32x3", "ieee")
    for precision in names:
        try:
            problem = trial(torch.device(device), dtype, geometry, precision)
        except Exception as error:  # a compiler or driver may raise anything; torch always runs
            problem = brief(error)
        if problem is None:
            return Choice(precision, "; ".join([*problems, f"triton, {precision} products"]))
        problems.append(f"{precision}: {problem:.160}")
    return Choice(None, "; ".join([*problems, "torch"]))


def trial(
    device: torch.device, dtype: torch.dtype, geometry: Geometry, precision: Precision
) -> str | None:
    """A prompt on a random state against float64, one token's decay vanishing; what is wrong, or None."""
    drawn, state = draw(geometry, 1, _TOKENS, dtype)
    q, k, v, g, beta = (x.double() for x in drawn)
    expected = reference.chunk_prefill(q, k, v, g, beta, state.double())
    q, k, v, g, beta = (x.to(device) for x in drawn)
    # scratch memory of the kernels comes from what this frees: anything not written would show
    poison = torch.full((1 << 22,), float("nan"), device=device)
    del poison
    found = prefill(q, k, v, g, beta, state.to(device), precision=precision)
    for name, ours, exact, limit in zip(
        ("output", "state"), found, expected, (OUTPUT_ERROR[dtype], STATE_ERROR), strict=True
    ):
        error = float((ours.cpu().double() - exact).norm() / exact.norm())
        if not error <= limit:
            return f"{name} error {error:.1e}, at most {limit:.0e}"
    return None


def draw(
    geometry: Geometry, batch: int, tokens: int, dtype: torch.dtype, seed: int = 3
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Random q, k, v, g, beta of a prompt and an initial state, on the CPU; some keys repeat, one decay is zero."""
    generator = torch.Generator().manual_seed(seed)
    n = geometry

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (normal(batch, tokens, n.key_heads, n.key_dim) for _ in range(2))
    k[:, 1::2] = k[:, :1]  # the same key again and again: the hardest system
    v = normal(batch, tokens, n.value_heads, n.value_dim)
    gate = (n.value_heads, n.key_dim) if n.per_channel else (n.value_heads,)
    g = -0.1 * normal(batch, tokens, *gate).abs()
    g[:, tokens // 2] = -1e4
    beta = normal(batch, tokens, n.value_heads).sigmoid()
    state = normal(batch, n.value_heads, n.key_dim, n.value_dim)
    return (q.to(dtype), k.to(dtype), v.to(dtype), g, beta), state


def _rows(x: Tensor) -> Tensor:
    """The tensor with the heads of a token contiguous; tokens may lie apart."""
    inner = x.stride()[2:] == ((x.shape[3], 1) if x.dim() == 4 else (1,))
    return x if inner else x.contiguous()


def _padded(width: int) -> int:
    """The next power of two from 16 on."""
    return max(16, 1 << (width - 1).bit_length())


def _slices(width: int, most: int) -> int:
    """Slices of a padded width: `most` of 16 to 32, or as many of 32 or 16 as there are."""
    return width // max(16, min(32, width // most))
