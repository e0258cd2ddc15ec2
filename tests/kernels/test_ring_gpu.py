"""Deferred requantisation through the real compilers on a GPU."""

import pytest
import torch
from torch import Tensor

from hybridstate.kernels import ring_update
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.reference import recurrent_step
from hybridstate.kernels.ring_reference import Ring, ring_state
from tests.tolerances import relative_rms

pytestmark = pytest.mark.gpu

LAYOUT = PackedLayout(128, 128, 16)
KINDS = pytest.mark.parametrize("kind", ["gdn", "kda"])


def inputs_of(
    kind: str, batch: int, turn: int, *, heads: int = 8, slow: float = 1.0
) -> list[Tensor]:
    """q, k, v in BF16, log decay, beta; two value heads on each key head of GDN."""
    generator = torch.Generator("cuda").manual_seed(turn)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    key_heads = heads if kind == "kda" else heads // 2
    gate = (batch, heads, 128) if kind == "kda" else (batch, heads)
    g = -0.2 * slow * torch.rand(gate, generator=generator, device="cuda")
    vectors = [normal(batch, key_heads, 128).bfloat16() for _ in range(2)]
    return [*vectors, normal(batch, heads, 128).bfloat16(), g, normal(batch, heads).sigmoid()]


def ring_of(kind: str, slots: int, every: int, heads: int = 8) -> Ring:
    key_heads = heads if kind == "kda" else heads // 2
    return Ring.empty(
        slots, key_heads, heads, LAYOUT, every, per_channel=kind == "kda", device="cuda"
    )


PAIRS = [
    (kind, every, k_hi)
    for i, every in enumerate((2, 5, 8, 16))
    for j, k_hi in enumerate((0, 16, 32, 128))
    for kind in (("gdn", "kda") if k_hi == 16 else (("gdn", "kda")[(i + j) % 2],))
]
"""Every two of gate, length and FP16 rows, each once: a kernel is compiled for all three. At 16 rows both gates."""


@pytest.mark.parametrize(("kind", "every", "k_hi"), PAIRS)
def test_gluon_beside_the_reference(kind: str, every: int, k_hi: int) -> None:
    layout = PackedLayout(128, 128, k_hi)
    step, flush = ring_update.functions("gluon", layout)
    found = ring_update.check(
        step, flush, "cuda", layout, per_channel=kind == "kda", every=every, steps=every + 2,
        key_heads=2, heads=6, fused=every == 5, scaled=every != 2,
    )  # fmt: skip
    assert found["problem"] is None, found
    assert found["state"] <= found["storage"] * 1.003 + 3e-7


@pytest.mark.parametrize(
    "layout", [PackedLayout(96, 80, 16, order="natural"), PackedLayout(24, 40, 8)]
)
@KINDS
def test_triton_beside_the_reference(kind: str, layout: PackedLayout) -> None:
    step, flush = ring_update.functions("triton", layout)
    found = ring_update.check(
        step, flush, "cuda", layout, per_channel=kind == "kda", every=6, steps=8, heads=6
    )
    assert found["problem"] is None, found


@KINDS
def test_graph_replay_equals_eager_steps_bit_for_bit(kind: str) -> None:
    pools = [LAYOUT.pack(torch.randn(6, 8, 128, 128, device="cuda"))]
    pools.append(pools[0].clone())
    rings = [ring_of(kind, 6, 4) for _ in pools]
    for ring in rings:
        ring.start(torch.arange(6, device="cuda"))
    slots = torch.tensor([3, -1, 0, 5], device="cuda")
    inputs = inputs_of(kind, 4, 0)
    outs = [torch.empty_like(inputs[2]) for _ in pools]
    step, _ = ring_update.functions("gluon", LAYOUT)
    spare = ring_of(kind, 6, 4)
    step(*inputs, pools[0].clone(), spare, slots, outs[0], None, LAYOUT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*inputs, pools[0], rings[0], slots, outs[0], None, LAYOUT)
    for turn in range(9):
        for old, new in zip(inputs, inputs_of(kind, 4, turn), strict=True):
            old.copy_(new)
        graph.replay()
        step(*inputs, pools[1], rings[1], slots, outs[1], None, LAYOUT)
        assert torch.equal(*outs)
    assert torch.equal(*pools)
    for name in ("keys", "values", "gates", "phases"):
        assert torch.equal(getattr(rings[0], name), getattr(rings[1], name))


@KINDS
def test_offsets_beyond_two_to_the_31(kind: str) -> None:
    heads, places = 32, 4000
    state = LAYOUT.pack(torch.randn(2, heads, 128, 128, device="cuda"))
    far = torch.zeros(places, heads, LAYOUT.head_bytes, dtype=torch.uint8, device="cuda")
    near = state.clone()
    at = torch.tensor([places - 1, 7], device="cuda")
    far[at] = state
    rings = [ring_of(kind, 2, 16, heads), ring_of(kind, places, 16, heads)]
    step, _ = ring_update.functions("gluon", LAYOUT)
    for turn in range(17):
        inputs = inputs_of(kind, 2, turn, heads=heads)
        outs = [torch.empty_like(inputs[2]) for _ in rings]
        step(*inputs, near, rings[0], torch.arange(2, device="cuda"), outs[0], None, LAYOUT)
        step(*inputs, far, rings[1], at, outs[1], None, LAYOUT)
        assert torch.equal(*outs)
    assert torch.equal(far[at], near)
    assert int(far.count_nonzero()) == int(far[at].count_nonzero())


@KINDS
def test_drift_is_that_of_exact_updates_stored_as_often(kind: str) -> None:
    every, heads = 8, 4
    ring, slots = ring_of(kind, 1, every, heads), torch.zeros(1, dtype=torch.int64, device="cuda")
    truth = torch.zeros(1, heads, 128, 128, dtype=torch.float64, device="cuda")
    pool, deferred = LAYOUT.pack(truth), truth
    step, _ = ring_update.functions("gluon", LAYOUT)
    for turn in range(300):
        inputs = inputs_of(kind, 1, turn, heads=heads, slow=0.25)
        step(*inputs, pool, ring, slots, torch.empty_like(inputs[2]), None, LAYOUT)
        q, k, v, g, beta = (x.double() for x in inputs)
        _, truth = recurrent_step(q, k, v, g, beta, truth)
        _, deferred = recurrent_step(q, k, v, g, beta, deferred)
        if turn % every == every - 1:
            deferred = LAYOUT.unpack(LAYOUT.pack(deferred)).double()
    found = ring_state(LAYOUT.unpack(pool).double(), ring, slots)
    error, least = relative_rms(found, truth), relative_rms(deferred, truth)
    assert error < 1.05 * least, f"{error:.5f} against {least:.5f}"


def test_the_choice_on_this_gpu() -> None:
    assert ring_update.backend("cuda", LAYOUT).name == "gluon"
    assert ring_update.backend("cuda", PackedLayout(96, 80, 16, order="natural")).name == "triton"
