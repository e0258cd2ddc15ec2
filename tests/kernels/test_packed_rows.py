"""Kept rows of packed heads: places by the layout, every bit, other rows untouched."""

import os

import pytest
import torch

from hybridstate.errors import PlanMismatch
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.packed_rows import KeptRows, gather_packed, scatter_packed

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
INTERPRETED = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="Triton's interpreter is off: a GPU is here",
    ),
)
LAYOUTS = [
    PackedLayout(64, 96, 16),
    PackedLayout(64, 128, 0),
    PackedLayout(64, 64, 64),
    PackedLayout(24, 40, 8),
    PackedLayout(13, 37, 5),
    PackedLayout(64, 256, 32),
]


@pytest.mark.parametrize("device", [INTERPRETED, GPU])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.layout_id)
def test_kernels_move_the_bits_that_torch_moves(layout: PackedLayout, device: str) -> None:
    generator = torch.Generator().manual_seed(7)
    shape = (2, layout.key_dim, layout.value_dim)
    one, other = (layout.pack(torch.randn(shape, generator=generator)) for _ in range(2))
    one[1, ::5] = 0xFF  # NaN of any kind
    one, other = one.to(device), other.to(device)
    mask = (torch.rand(shape[:2], generator=generator) > 0.5).to(device)
    kept, found = KeptRows.from_mask(mask, layout), []
    for backend in ("reference", "triton"):
        rows = tuple(x[0] for x in kept.buffers(1, layout))
        gather_packed(one, kept, rows, layout, backend=backend)  # type: ignore[arg-type]
        target = other.clone()
        scatter_packed(rows, kept, target, layout, backend=backend)  # type: ignore[arg-type]
        found.append((*rows, target))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_kept_rows_come_back_and_others_stay() -> None:
    layout = PackedLayout(64, 96, 16)
    one, other = (layout.pack(torch.randn(3, 64, 96)) for _ in range(2))
    mask = torch.rand(3, 64) > 0.4
    kept = KeptRows.from_mask(mask, layout)
    rows = tuple(x[0] for x in kept.buffers(1, layout))
    gather_packed(one, kept, rows, layout)  # type: ignore[arg-type]
    target = other.clone()
    scatter_packed(rows, kept, target, layout)  # type: ignore[arg-type]
    expected = torch.where(mask[..., None], layout.unpack(one), layout.unpack(other))
    assert torch.equal(layout.unpack(target), expected)
    with pytest.raises(PlanMismatch, match="64 key rows"):
        KeptRows.from_mask(mask[:, :10], layout)
