"""Which ring kernel a layout gets, and what is said about the one that it does not."""

import pytest

from hybridstate.kernels import ring_update
from hybridstate.kernels.layout import PackedLayout


@pytest.mark.parametrize(
    ("layout", "order", "obstacle"),
    [
        (PackedLayout(128, 128, 16), "fragment", None),
        (PackedLayout(128, 128, 4), "natural", "4 FP16 rows are no multiple of 16"),
        (PackedLayout(128, 128, 16, order="natural"), "natural", "the pool is in natural order"),
        (PackedLayout(128, 96, 16), "natural", "heads of 128 x 96, not 128 x 128"),
    ],
)
def test_the_reason_says_why_it_is_not_gluon(
    layout: PackedLayout, order: str, obstacle: str | None
) -> None:
    layout = ring_update.ring_layout(layout)
    assert layout.order == order
    told = ring_update.backend("cuda:0", layout).reason
    if obstacle is None:
        assert told.startswith("gluon: ")
        assert "triton" not in told
    else:
        assert told.startswith(f"gluon: {obstacle}; triton: ")
