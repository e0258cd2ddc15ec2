"""The decode step through the real compilers on a GPU; every case is its own test.

Small cases first (any dimensions, plain Triton), then 128 x 128 with 32 heads through both kernels, then what only
hardware shows: offsets beyond 2^31, CUDA graphs, repeatability, drift.
"""

from itertools import product

import pytest
import torch

from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.reference import chunk_prefill, recurrent_loop
from hybridstate.kernels.update import (
    backend,
    backend_reason,
    dense_step,
    packed_step,
    preferred_layout,
)
from tests.kernels.cases import (
    DENSE,
    DENSE_BF16,
    LARGE,
    OTHER_DIMS,
    PUBLISHED,
    SIXTEEN_BIT,
    SMALL,
    Case,
    check,
    draw,
    exact_step,
    fused,
)
from tests.tolerances import assert_within, relative_rms

pytestmark = pytest.mark.gpu

gluon_update = pytest.importorskip("hybridstate.kernels.gluon_update")

DENSE_128 = [
    Case("plain", DenseLayout(128, 128, dtype, order), kind, key_heads=16, heads=32, batch=13)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for order in ("rows", "columns", "tiles")
    for kind in ("gdn", "kda")
]
HARD = [c for c in LARGE if c.name in ("zero state", "rows 1e-12 to 1e3", "zero groups")]
FRAGMENT = [c for c in (*PUBLISHED, *LARGE, *OTHER_DIMS) if c.layout.order == "fragment"]
FORMS = sorted({(columns, warps) for _, columns, warps in gluon_update.FORMS})
"""Columns and warps of a program that the launcher chooses from."""
OTHER_FORMS = [(32, 8), (64, 8), (128, 8)]
"""What it can be asked for: on the published heads alone."""


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


@pytest.mark.parametrize(
    ("case", "form"),
    [
        *product([*PUBLISHED, *OTHER_DIMS, *SIXTEEN_BIT, *HARD], FORMS),
        *product(PUBLISHED, OTHER_FORMS),
    ],
    ids=str,
)
def test_every_form_of_the_matrix_kernel(case: Case, form: tuple[int, int]) -> None:
    columns, warps = form
    if case.layout.order != "fragment" or columns > case.layout.block:
        pytest.skip("this form does not exist for these dimensions")
    if warps == 8 and case.layout.key_dim <= 64:
        pytest.skip("more warps than chunks")
    inputs, fusion = draw(case), fused(case)
    inputs.q, inputs.k, inputs.v = (x.bfloat16() for x in (inputs.q, inputs.k, inputs.v))
    given = not case.name.startswith("plain")
    if not given:
        inputs.g, inputs.beta = torch.randn(inputs.g.shape), torch.randn(inputs.beta.shape)
    arguments = inputs.on("cuda")
    out = torch.full(inputs.v.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    gluon_update.packed_step(
        *(arguments[n] for n in ("q", "k", "v", "g", "beta", "pool", "slots")), out,
        arguments["value_scale"], case.layout,
        NO_FUSION if given else fusion.to(torch.device("cuda")), columns=columns, warps=warps,
    )  # fmt: skip
    torch.cuda.synchronize()
    if not given:
        inputs.q, inputs.k, inputs.g, inputs.beta = fusion.derive(
            inputs.q.double(), inputs.k.double(), inputs.g.double(), inputs.beta.double()
        )
    check(case, inputs, out, arguments["pool"], "kernel-bf16")


@pytest.mark.parametrize("form", [(128, 1), (32, 1), (32, 8)], ids=str)
@pytest.mark.parametrize("k_hi", [0, 16, 128])
def test_a_nan_stays_one_and_in_its_slot(k_hi: int, form: tuple[int, int]) -> None:
    case = Case("nan", PackedLayout(128, 128, k_hi), "kda", batch=3)
    inputs = draw(case)
    sick, well = inputs.on("cuda"), inputs.on("cuda")
    sick["v"][1, 0, 3] = float("nan")
    outs = []
    for arguments in (sick, well):
        out = torch.empty(inputs.v.shape, device="cuda")
        gluon_update.packed_step(
            *(arguments[n] for n in ("q", "k", "v", "g", "beta", "pool", "slots")), out,
            arguments["value_scale"], case.layout, columns=form[0], warps=form[1],
        )  # fmt: skip
        outs.append(out.cpu())
    assert outs[0][1, 0, 3].isnan()
    same = torch.ones(3, 2, dtype=torch.bool)
    same[1, 0] = False
    assert torch.equal(outs[0][same], outs[1][same])
    slot = int(inputs.slots[1])
    others = [i for i in range(sick["pool"].shape[0]) if i != slot]
    assert torch.equal(sick["pool"][others], well["pool"][others])
    assert torch.equal(sick["pool"][slot, 1], well["pool"][slot, 1])
    state = case.layout.unpack(sick["pool"][slot, 0].cpu())
    assert state[:, 3].isnan().all(), "the next token must not see a number"
    assert not state[:, 32:].isnan().any(), "another group of the head"


def chained(case: Case, form: tuple[int, int], overlap: int) -> list[torch.Tensor]:
    """Pool and outputs after three replays of six launches that alternate between two halves of the pool."""
    inputs = draw(case)
    arguments = inputs.on("cuda")
    pool = arguments["pool"].repeat(2, 1, 1)
    slots = [arguments["slots"] + n * arguments["pool"].shape[0] for n in range(2)]
    outs = [torch.empty(inputs.v.shape, device="cuda") for _ in range(2)]

    def chain() -> None:
        for n in range(6):
            gluon_update.packed_step(
                *(arguments[x] for x in ("q", "k", "v", "g", "beta")), pool, slots[n % 2],
                outs[n % 2], arguments["value_scale"], case.layout,
                columns=form[0], warps=form[1], overlap=overlap,
            )  # fmt: skip

    start = pool.clone()
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    pool.copy_(start)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return [pool, *outs]


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("form", [(128, 1), (32, 8)], ids=str)
def test_overlapped_launches_give_the_same_bits(form: tuple[int, int], overlap: int) -> None:
    case = Case("chain", PackedLayout(128, 128, 16), "kda", key_heads=32, heads=32, batch=8)
    pairs = zip(chained(case, form, overlap), chained(case, form, 0), strict=True)
    for mine, theirs in pairs:
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("form", [(128, 1), (32, 8)], ids=str)
def test_clipped_values_are_counted(form: tuple[int, int]) -> None:
    case = Case("huge", PackedLayout(128, 128, 32), "gdn", key_heads=1, heads=2)
    inputs = draw(case)
    inputs.v *= 1e7
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    arguments = inputs.on("cuda")
    gluon_update.packed_step(
        *(arguments[n] for n in ("q", "k", "v", "g", "beta", "pool", "slots")),
        torch.empty(inputs.v.shape, device="cuda"), arguments["value_scale"], case.layout,
        StepFusion(saturated=counter), columns=form[0], warps=form[1],
    )  # fmt: skip
    _, exact = exact_step(case, inputs)
    clipped = int((exact[..., :32, :].abs() > 65504.0).sum())
    assert clipped > 100
    assert abs(int(counter) - clipped) <= clipped * 1e-3  # sums carry 17-bit operands


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
    for other in (PackedLayout(96, 192, 16), DenseLayout(96, 192, torch.bfloat16, "fragment")):
        assert backend("cuda", other) == "gluon", backend_reason("cuda", other)
    odd = PackedLayout(120, 192, 16)
    assert backend("cuda", odd) == "triton", backend_reason("cuda", odd)
    assert "120 x 192 is no multiple" in backend_reason("cuda", odd)
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
