"""The decode step through the real compilers on a GPU; every case is its own test.

Small cases first (any dimensions, plain Triton), then 128 x 128 with 32 heads through both kernels, then what only
hardware shows: offsets beyond 2^31, CUDA graphs, repeatability, drift.
"""

import pytest
import torch

from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.reference import chunk_prefill, recurrent_loop
from hybridstate.kernels.update import (
    backend,
    backend_reason,
    dense_step,
    packed_step,
    preferred_layout,
)
from tests.kernels.cases import DENSE, DENSE_BF16, LARGE, PUBLISHED, SMALL, Case, check, draw
from tests.tolerances import assert_within, relative_rms

pytestmark = pytest.mark.gpu

DENSE_128 = [
    Case("plain", DenseLayout(128, 128, dtype, order), kind, key_heads=16, heads=32, batch=13)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for order in ("rows", "columns", "tiles")
    for kind in ("gdn", "kda")
]
FRAGMENT = [c for c in (*PUBLISHED, *LARGE) if c.layout.order == "fragment"]


def run(case: Case, name: str, tolerance: str, dtype: torch.dtype = torch.float32) -> None:
    inputs = draw(case)
    inputs.q, inputs.k, inputs.v = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v))
    arguments = inputs.on("cuda")
    out = torch.full(inputs.v.shape, float("nan"), dtype=dtype, device="cuda")
    step = packed_step if isinstance(case.layout, PackedLayout) else dense_step
    step(**arguments, layout=case.layout, out=out, backend=name)
    torch.cuda.synchronize()
    check(case, inputs, out, arguments["pool"], tolerance)


@pytest.mark.parametrize("case", [*SMALL, *PUBLISHED, *DENSE, *DENSE_BF16, *DENSE_128], ids=str)
def test_triton(case: Case) -> None:
    run(case, "triton", "kernel-f32")


@pytest.mark.parametrize("case", [c for c in LARGE if c.layout.order == "natural"], ids=str)
def test_triton_on_hard_states(case: Case) -> None:
    run(case, "triton", "kernel-bf16", torch.bfloat16)


@pytest.mark.parametrize("case", FRAGMENT, ids=str)
def test_gluon(case: Case) -> None:
    run(case, "gluon", "kernel-bf16", torch.bfloat16)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_gluon_with_float32_inputs_and_output(kind: str) -> None:
    case = Case("float32", PackedLayout(128, 128, 16), kind, key_heads=2, heads=4)
    run(case, "gluon", "kernel-f16")  # sums carry 17-bit operands


def test_gluon_saturates_fp16_rows() -> None:
    case = Case("huge", PackedLayout(128, 128, 16), "gdn", key_heads=1, heads=2)
    inputs = draw(case)
    inputs.v *= 1e7
    for name in ("gluon", "triton"):
        arguments = inputs.on("cuda")
        packed_step(**arguments, layout=case.layout, backend=name)
        found = case.layout.unpack(arguments["pool"].cpu()[inputs.slots])
        assert torch.isfinite(found).all()
        assert found[..., :16, :].abs().max() == 65504.0


@pytest.mark.parametrize("name", ["gluon", "triton"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_offsets_beyond_two_to_the_31(name: str, kind: str) -> None:
    layout = PackedLayout(128, 128, 16)
    heads = 32
    case = Case("far", layout, kind, key_heads=16, heads=heads, batch=4)
    inputs = draw(case)
    near = inputs.on("cuda")
    far = inputs.on("cuda")
    places = torch.tensor([3999, 0, 3500, 17], device="cuda")
    far["pool"] = torch.zeros(4000, heads, layout.head_bytes, dtype=torch.uint8, device="cuda")
    far["pool"][places] = near["pool"][near["slots"]]
    slots, far["slots"] = near["slots"], places
    o_near = packed_step(**near, layout=layout, backend=name)
    o_far = packed_step(**far, layout=layout, backend=name)
    assert torch.equal(o_near, o_far)
    assert torch.equal(far["pool"][places], near["pool"][slots])
    assert int(far["pool"].count_nonzero()) == int(far["pool"][places].count_nonzero())


@pytest.mark.parametrize("name", ["gluon", "triton"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_graph_replay_equals_eager_steps_bit_for_bit(name: str, kind: str) -> None:
    layout = PackedLayout(128, 128, 16)
    case = Case("graph", layout, kind, key_heads=16, heads=32, batch=8, padding=True)
    inputs = draw(case)
    eager, replayed = inputs.on("cuda"), inputs.on("cuda")
    out = torch.empty(inputs.v.shape, device="cuda")
    start = replayed["pool"].clone()
    packed_step(**replayed, layout=layout, out=out, backend=name)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed_step(**replayed, layout=layout, out=out, backend=name)
    replayed["pool"].copy_(start)
    for _ in range(5):
        graph.replay()
        o = packed_step(**eager, layout=layout, backend=name)
    torch.cuda.synchronize()
    assert torch.equal(replayed["pool"], eager["pool"])
    assert torch.equal(out, o)


@pytest.mark.parametrize("name", ["gluon", "triton"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_drift_over_300_steps(name: str, kind: str) -> None:
    """From an empty state, beside exact float64 updates stored by the reference packer."""
    layout = PackedLayout(128, 128, 16)
    heads, key_heads = 8, 4
    generator = torch.Generator("cuda").manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device="cuda")

    from hybridstate.kernels.reference import recurrent_step

    scale = uniform(heads, 128) + 0.5
    wide = scale.double()[:, None]
    truth = torch.zeros(1, heads, 128, 128, dtype=torch.float64, device="cuda")
    pool = layout.pack(truth)
    stored, slots = pool.clone(), torch.zeros(1, dtype=torch.int64, device="cuda")
    for _ in range(300):
        q, k = normal(1, key_heads, 128).bfloat16(), normal(1, key_heads, 128).bfloat16()
        v = normal(1, heads, 128).bfloat16()
        g = -0.05 * uniform(*((1, heads, 128) if kind == "kda" else (1, heads)))
        beta = uniform(1, heads)
        packed_step(q, k, v, g, beta, pool, slots, layout=layout, value_scale=scale, backend=name)
        exact = [x.double() for x in (q, k, v, g, beta)]
        _, truth = recurrent_step(*exact, truth)
        _, state = recurrent_step(*exact, layout.unpack(stored).double() * wide)
        stored = layout.pack(state / wide)
    error = relative_rms(layout.unpack(pool) * wide, truth)
    least = relative_rms(layout.unpack(stored) * wide, truth)
    assert error < 1.05 * least, f"{error:.5f} against {least:.5f}"


def test_the_choice_on_this_gpu_and_its_reason() -> None:
    layout = PackedLayout(128, 128, 16)
    assert backend("cuda", layout) == "gluon", backend_reason("cuda", layout)
    assert preferred_layout("cuda", 128, 128, 16) == layout
    other = PackedLayout(96, 192, 16)
    assert backend("cuda", other) == "triton", backend_reason("cuda", other)
    assert backend("cuda", DenseLayout(96, 192)) == "triton"


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_prefill_on_the_gpu(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 100, 2, 24), (2, 100, 2, 24), (2, 100, 4, 40)]
    q, k, v = (torch.randn(x, generator=generator) for x in shapes)
    g = -torch.rand((2, 100, 4, 24) if kind == "kda" else (2, 100, 4), generator=generator)
    beta = torch.rand(2, 100, 4, generator=generator)
    o, state = recurrent_loop(*[x.double() for x in (q, k, v, g, beta)])
    found = chunk_prefill(*[x.cuda() for x in (q, k, v, g, beta)])
    assert_within(found[0], o, "reference-f32")
    assert_within(found[1], state, "reference-f32")
