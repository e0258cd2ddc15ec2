"""Which ring kernel a layout gets, what is said about the one that it does not, and how one is launched."""

from typing import Any

import pytest
import torch

from hybridstate.kernels import ring_update
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.ring_reference import Ring


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


@pytest.mark.parametrize("registers", [None, 168])
def test_a_launch_limits_registers_only_where_told(
    registers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gluon_ring = pytest.importorskip("hybridstate.kernels.gluon_ring")
    launched: list[dict[str, Any]] = []
    kernel = {(8,): lambda *_arguments, **options: launched.append(options)}
    monkeypatch.setattr(gluon_ring, "ring_kernel", kernel)
    layout = PackedLayout(128, 128, 16)
    ring = Ring.empty(2, 2, 4, layout, 8, per_channel=False)
    q, v = torch.empty(2, 2, 128), torch.empty(2, 4, 128)
    gate, pool = torch.empty(2, 4), torch.empty(2, 4, layout.head_bytes).byte()
    told = {} if registers is None else {"registers": registers}
    gluon_ring.ring_step(
        q, q, v, gate, gate, pool, ring, torch.arange(2), v, torch.ones(4, 128), layout, **told
    )
    assert [x.get("maxnreg") for x in launched] == [registers]
