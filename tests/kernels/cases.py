"""Cases of one decode step, shared by the interpreter on a CPU and the real kernels on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridstate.kernels.fusion import StepFusion, draw_fusion
from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.reference import recurrent_step
from tests.tolerances import assert_within, relative_rms

Layout = PackedLayout | DenseLayout
Scale = Callable[[torch.Generator, tuple[int, ...]], Tensor]


def per_row(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Key rows between 1e-12 and 1e3."""
    return 10.0 ** (torch.rand(*shape[:-1], 1, generator=generator) * 15 - 12)


def per_group(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Groups of 32 value columns between 1e-9 and 1e3."""
    groups = -(-shape[-1] // 32)
    scale = 10.0 ** (torch.rand(*shape[:-1], groups, generator=generator) * 12 - 9)
    return scale.repeat_interleave(32, -1)[..., : shape[-1]]


def half_zero(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Half of the groups of 32 value columns are zero."""
    groups = -(-shape[-1] // 32)
    keep = (torch.rand(*shape[:-1], groups, generator=generator) > 0.5).float()
    return keep.repeat_interleave(32, -1)[..., : shape[-1]]


def zero(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """An empty state."""
    return torch.zeros(1)


@dataclass(frozen=True)
class Case:
    """One step: what varies between the tests."""

    name: str
    layout: Layout
    kind: str
    key_heads: int = 2
    heads: int = 2
    batch: int = 3
    padding: bool = False
    scaled: bool = True
    decay: float | None = None
    scale: Scale | None = None
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}-{self.layout.layout_id}"


@dataclass
class Inputs:
    """Arguments of a step, on the CPU."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    pool: Tensor
    slots: Tensor
    value_scale: Tensor | None

    def on(self, device: torch.device | str) -> dict[str, Any]:
        """Fresh copies as keyword arguments; q, k and v are views of one fused row, as after a convolution."""
        batch = self.v.shape[0]
        parts = [x.reshape(batch, -1) for x in (self.q, self.k, self.v)]
        fused = torch.cat(parts, 1).to(device)
        q, k, v = fused.split([x.shape[1] for x in parts], 1)
        return {
            "q": q.view(self.q.shape),
            "k": k.view(self.k.shape),
            "v": v.view(self.v.shape),
            "g": self.g.to(device),
            "beta": self.beta.to(device),
            "pool": self.pool.clone().to(device),
            "slots": self.slots.to(device),
            "value_scale": None if self.value_scale is None else self.value_scale.to(device),
        }


def draw(case: Case, seed: int = 1) -> Inputs:
    """Random inputs of a case; pool slots beyond the batch stay unused."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    K, V, B, H = case.layout.key_dim, case.layout.value_dim, case.batch, case.heads
    gate_shape = (B, H, K) if case.kind == "kda" else (B, H)
    g = -torch.rand(gate_shape, generator=generator) * 0.2
    if case.decay is not None:
        g.fill_(case.decay)
    state = normal(B + 3, H, K, V)
    if case.scale is not None:
        state = state * case.scale(generator, (B + 3, H, K, V))
    slots = torch.randperm(B + 3, generator=generator)[:B]
    if case.padding:
        slots[1::3] = -1
    value_scale = torch.rand(H, V, generator=generator) + 0.5 if case.scaled else None
    stored = state if value_scale is None else state / value_scale[:, None]
    return Inputs(
        q=normal(B, case.key_heads, K).to(case.dtype),
        k=normal(B, case.key_heads, K).to(case.dtype),
        v=normal(B, H, V).to(case.dtype),
        g=g,
        beta=torch.rand(B, H, generator=generator),
        pool=case.layout.pack(stored),
        slots=slots,
        value_scale=value_scale,
    )


def fused(case: Case, device: torch.device | str = "cpu", seed: int = 2) -> StepFusion:
    """Raw projections: softplus for GDN; safe gate and a key order per value head for KDA; a counter."""
    generator = torch.Generator().manual_seed(seed)
    drawn = draw_fusion(case.heads, case.layout.key_dim, case.kind == "kda", generator)
    return replace(drawn, saturated=torch.zeros(1, dtype=torch.int32)).to(torch.device(device))


def exact_step(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Output and state T = S / c of the live rows in float64, from the stored state."""
    live = inputs.slots >= 0
    scale = torch.ones(1) if inputs.value_scale is None else inputs.value_scale[:, None]
    scale = scale.double()
    state = case.layout.unpack(inputs.pool[inputs.slots[live]]).double() * scale
    q, k, v, g, beta = (
        x[live].double() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    )
    o, state = recurrent_step(q, k, v, g, beta, state)
    return o, state / scale


def check(case: Case, inputs: Inputs, out: Tensor, pool: Tensor, output_tolerance: str) -> None:
    """Output, state, padding and unused slots of a step that has run.

    The state may be no worse than the exact float64 state stored by the reference packer, over the whole and, in
    INT8 rows, element by element (half a step of the exact scale and a little for float32 arithmetic).
    """
    out, pool = out.cpu(), pool.cpu()
    layout, live = case.layout, inputs.slots >= 0
    rows = inputs.slots[live]
    o, exact = exact_step(case, inputs)
    assert_within(out[live], o, output_tolerance)
    assert not out[~live].any(), "padding rows must be zero"
    unused = torch.ones(pool.shape[0], dtype=torch.bool)
    unused[rows] = False
    assert torch.equal(pool[unused], inputs.pool[unused]), "an unused slot was written"
    found = layout.unpack(pool[rows]).double()
    assert torch.isfinite(found).all(), "the state is not finite"
    best = layout.unpack(layout.pack(exact)).double()
    error, least = relative_rms(found, exact), relative_rms(best, exact)
    assert error <= least * 1.002 + 3e-7, (
        f"state error {error:.3e}, storage alone gives {least:.3e}"
    )
    if isinstance(layout, PackedLayout) and layout.rows_lo:
        scales = layout.split(layout.pack(exact))[2].double()
        step = scales.repeat_interleave(layout.group, -1)[..., : layout.value_dim]
        worst = (found - exact)[..., layout.k_hi :, :].abs() - 0.55 * step
        assert (worst <= 1e-30).all(), (
            f"an INT8 value is off by more than 0.55 steps ({worst.max():.2e})"
        )


def _variants(layout: Layout, prefix: str = "") -> list[Case]:
    """The hard cases for one layout, both gates."""
    cases = []
    for kind in ("gdn", "kda"):
        for name, options in (
            ("zero state", {"scale": zero}),
            ("decay underflows", {"decay": -200.0}),
            ("decay e^-5", {"decay": -5.0}),
            ("rows 1e-12 to 1e3", {"scale": per_row}),
            ("groups 1e-9 to 1e3", {"scale": per_group}),
            ("zero groups", {"scale": half_zero}),
        ):
            cases.append(Case(prefix + name, layout, kind, **options))
    return cases


SMALL = [
    Case("H/Hk=3, all INT8", PackedLayout(12, 20, 0), "gdn", key_heads=2, heads=6, padding=True),
    Case("H/Hk=2", PackedLayout(24, 64, 16), "gdn", key_heads=1, heads=2),
    Case("short last group", PackedLayout(24, 40, 16), "kda", padding=True),
    Case("group 16", PackedLayout(24, 40, 16, group=16), "kda"),
    Case("all FP16", PackedLayout(16, 20, 16), "kda", padding=True),
    Case("odd rows", PackedLayout(13, 37, 5), "gdn", key_heads=1, heads=3),
    Case("no value scale", PackedLayout(24, 40, 16), "gdn", scaled=False),
    Case("one row", PackedLayout(24, 40, 16), "kda", batch=1),
    *_variants(PackedLayout(24, 40, 16)),
]
"""Any dimensions, natural order."""

PUBLISHED = [
    Case("plain", PackedLayout(128, 128, 16), "gdn", key_heads=1, heads=2, padding=True),
    Case("plain", PackedLayout(128, 128, 16), "kda", padding=True),
    Case("natural", PackedLayout(128, 128, 16, order="natural"), "kda"),
    Case("all INT8", PackedLayout(128, 128, 0), "gdn", key_heads=1, heads=2),
    Case("two chunks", PackedLayout(128, 128, 32), "kda", scaled=False),
    Case("all FP16", PackedLayout(128, 128, 128), "gdn", key_heads=1, heads=2),
]
"""128 x 128, where the matrix kernel applies."""

OTHER_DIMS = [
    Case("64 x 64", PackedLayout(64, 64, 16), "kda", padding=True),
    Case("OLMo", PackedLayout(96, 192, 16), "gdn", key_heads=2, heads=2, padding=True),
    Case("H/Hk=8", PackedLayout(128, 64, 32), "gdn", key_heads=1, heads=8),
    Case("192 x 96", PackedLayout(192, 96, 32), "kda", scaled=False),
    Case("256 x 256", PackedLayout(256, 256, 32), "gdn", key_heads=1, heads=3, batch=2),
    Case("64 x 256", PackedLayout(64, 256, 0), "kda", batch=2),
]
"""The matrix kernel's other geometries: blocks of 128, 64 and 32 columns, 4 to 16 chunks of key channels."""

SIXTEEN_BIT = [
    Case(
        str(dtype).removeprefix("torch."), DenseLayout(*dims, dtype, "fragment"), kind, padding=True
    )
    for dtype in (torch.float16, torch.bfloat16)
    for dims, kind in (((128, 128), "gdn"), ((128, 128), "kda"), ((96, 192), "gdn"))
]
"""Dense states of 16 bits in fragment order."""

DENSE = [
    Case("H/Hk=3", DenseLayout(12, 20), "gdn", key_heads=2, heads=6, padding=True),
    Case("columns", DenseLayout(12, 20, order="columns"), "kda", padding=True),
    Case("tiles", DenseLayout(24, 40, order="tiles"), "kda"),
    Case("FP16", DenseLayout(24, 40, torch.float16), "kda", padding=True),
    Case("FP16 tiles", DenseLayout(24, 40, torch.float16, "tiles"), "gdn", scaled=False),
    Case("FP16 columns", DenseLayout(13, 37, torch.float16, "columns"), "gdn"),
    Case("zero state", DenseLayout(12, 20), "gdn", scale=zero),
    Case("decay underflows", DenseLayout(12, 20), "kda", decay=-200.0),
    Case("rows 1e-12 to 1e3", DenseLayout(12, 20), "kda", scale=per_row),
]

DENSE_BF16 = [
    Case("BF16", DenseLayout(24, 40, torch.bfloat16), "kda", padding=True),
    Case("BF16 columns", DenseLayout(13, 37, torch.bfloat16, "columns"), "gdn"),
    Case("BF16 tiles", DenseLayout(24, 40, torch.bfloat16, "tiles"), "kda"),
]
"""On a GPU only: Triton's interpreter truncates to bfloat16 where hardware rounds."""

LARGE = [
    *(
        Case(c.name, c.layout, c.kind, c.key_heads * 16, c.heads * 16, 13, c.padding, c.scaled)
        for c in PUBLISHED
    ),
    *_variants(PackedLayout(128, 128, 16)),
    *_variants(PackedLayout(128, 128, 16, order="natural"), "natural, "),
]
"""For a GPU: 32 heads and the hard cases at 128 x 128."""
