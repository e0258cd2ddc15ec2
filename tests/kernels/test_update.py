"""One decode step: every implementation against float64 on the same cases."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridstate.errors import MissingRequirement, NumericError
from hybridstate.kernels import update
from hybridstate.kernels.fusion import StepFusion
from hybridstate.kernels.layout import DenseLayout, Layout, PackedLayout
from hybridstate.kernels.update import (
    backend,
    backend_reason,
    dense_step,
    packed_step,
    preferred_layout,
    self_test,
)
from tests.kernels.cases import (
    DENSE,
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
from tests.tolerances import relative_rms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="Triton's interpreter is off: a GPU is here"
)


def run(case: Case, name: str) -> None:
    inputs = draw(case)
    arguments = inputs.on("cpu")
    out = torch.full_like(inputs.v, float("nan"))
    step = packed_step if isinstance(case.layout, PackedLayout) else dense_step
    returned = step(**arguments, layout=case.layout, out=out, backend=name)
    assert returned is out
    check(case, inputs, out, arguments["pool"], "kernel-f32")


@interpreter
@pytest.mark.parametrize("case", [*SMALL, *PUBLISHED, *OTHER_DIMS[1:4], *DENSE], ids=str)
def test_triton_kernels_in_the_interpreter(case: Case) -> None:
    pytest.importorskip("triton")
    run(case, "triton")


@pytest.mark.parametrize("case", [*SMALL, *PUBLISHED, *OTHER_DIMS, *DENSE, *SIXTEEN_BIT], ids=str)
def test_reference_step(case: Case) -> None:
    run(case, "reference")


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=interpreter)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_error_does_not_grow_beyond_exact_updates_with_the_same_storage(
    name: str, kind: str
) -> None:
    case = Case("drift", PackedLayout(16, 40, 8), kind, key_heads=1, heads=2, batch=1)
    layout, truth = case.layout, torch.zeros(1, 2, 16, 40, dtype=torch.float64)
    inputs = draw(case)
    scale = inputs.value_scale
    assert scale is not None
    pool = layout.pack(torch.zeros(1, 2, 16, 40))
    stored = pool.clone()
    for token in range(24):
        inputs = draw(case, seed=token)
        inputs.value_scale, inputs.slots, inputs.pool = scale, torch.zeros(1).long(), pool
        arguments = inputs.on("cpu")
        packed_step(**arguments, layout=layout, backend=name)
        pool = arguments["pool"]
        q, k, v, g, beta = (
            x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
        )
        _, truth = update.recurrent_step(q, k, v, g, beta, truth)
        inputs.pool = stored
        stored = layout.pack(exact_step(case, inputs)[1])
    error = relative_rms(layout.unpack(pool) * scale[:, None], truth)
    least = relative_rms(layout.unpack(stored) * scale[:, None], truth)
    assert error < 1.05 * least


def test_a_cpu_runs_the_reference_and_says_so() -> None:
    layout = PackedLayout(128, 128, 16)
    assert backend("cpu", layout) == "reference"
    assert backend_reason("cpu", layout) == "reference: no kernel runs on cpu"
    assert preferred_layout("cpu", 128, 128, 16) == layout


FUSED_LAYOUTS = [
    PackedLayout(24, 40, 16),
    PackedLayout(64, 96, 16),
    DenseLayout(12, 20),
    DenseLayout(24, 40, torch.float16, "tiles"),
]


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=interpreter)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("layout", FUSED_LAYOUTS, ids=lambda x: x.layout_id)
def test_gates_and_key_order_derived_in_the_step(layout: Layout, kind: str, name: str) -> None:
    """Softplus for GDN; safe gate and key index for KDA; strided raw projections; clipped values counted."""
    case = Case("fused", layout, kind, key_heads=1, heads=2, padding=True)
    inputs, fusion = draw(case), fused(case)
    raw = torch.randn(case.batch, 2 * inputs.g[0].numel() + 2)
    g = raw[:, : inputs.g[0].numel()].view(inputs.g.shape)
    beta = raw[:, -2:]
    arguments = inputs.on("cpu") | {"g": g, "beta": beta}
    out = torch.empty_like(inputs.v)
    step = packed_step if isinstance(layout, PackedLayout) else dense_step
    step(**arguments, layout=layout, fusion=fusion, out=out, backend=name)
    inputs.q, inputs.k, inputs.g, inputs.beta = fusion.derive(
        inputs.q.double(), inputs.k.double(), g.double(), beta.double()
    )
    check(case, inputs, out, arguments["pool"], "kernel-f32")
    assert fusion.saturated is not None
    assert int(fusion.saturated) == 0


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=interpreter)])
def test_clipped_values_of_fp16_rows_are_counted(name: str) -> None:
    case = Case("huge", PackedLayout(24, 40, 16), "gdn", key_heads=1, heads=2)
    inputs = draw(case)
    inputs.v *= 1e7
    counter = torch.tensor([5], dtype=torch.int32)
    arguments = inputs.on("cpu")
    packed_step(**arguments, layout=case.layout, fusion=StepFusion(saturated=counter), backend=name)  # type: ignore[arg-type]
    _, exact = exact_step(case, inputs)
    found = case.layout.unpack(arguments["pool"][inputs.slots])[..., :16, :]
    assert found.abs().max() == 65504.0
    assert int(counter) == 5 + int((exact[..., :16, :].abs() > 65504.0).sum())


@interpreter
@pytest.mark.parametrize("k_hi", [0, 16])
def test_a_nan_stays_one_and_in_its_slot(k_hi: int) -> None:
    case = Case("nan", PackedLayout(24, 40, k_hi), "kda", batch=3)
    inputs = draw(case)
    sick, well = inputs.on("cpu"), inputs.on("cpu")
    sick["v"][1, 0, 3] = float("nan")
    o = packed_step(**sick, layout=case.layout, backend="triton")  # type: ignore[arg-type]
    expected = packed_step(**well, layout=case.layout, backend="triton")  # type: ignore[arg-type]
    assert o[1, 0, 3].isnan()
    same = torch.ones(3, 2, dtype=torch.bool)
    same[1, 0] = False
    assert torch.equal(o[same], expected[same])
    slot = int(inputs.slots[1])
    others = [i for i in range(sick["pool"].shape[0]) if i != slot]
    assert torch.equal(sick["pool"][others], well["pool"][others])
    assert torch.equal(sick["pool"][slot, 1], well["pool"][slot, 1])
    state = case.layout.unpack(sick["pool"][slot, 0])
    assert state[:, 3].isnan().all(), "the next token must not see a number"
    assert not state[:, 32:].isnan().any(), "another group of the head"


def test_fusion_arguments_that_do_not_fit_are_refused() -> None:
    case = SMALL[2]
    arguments = draw(case).on("cpu") | {"layout": case.layout}
    one = torch.zeros(2)
    for fusion, words in (
        (StepFusion(a_log=one), "come together"),
        (StepFusion(lower_bound=-5.0), "needs a_log"),
        (StepFusion(a_log=one, dt_bias=one), "dt_bias is"),
        (StepFusion(a_log=one.double(), dt_bias=torch.zeros(2, 24)), "a_log is"),
        (StepFusion(key_index=torch.zeros(2, 24)), "key_index is"),
        (StepFusion(saturated=torch.zeros(1)), "saturated is"),
    ):
        with pytest.raises(NumericError, match=words):
            packed_step(**arguments, fusion=fusion)


@interpreter
def test_the_self_test_passes_right_kernels_and_catches_wrong_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = PackedLayout(16, 40, 8)
    assert self_test("triton", torch.device("cpu"), layout) is None
    right = update._reference_step

    def forgets_decay(q, k, v, g, *rest):  # type: ignore[no-untyped-def]
        right(q, k, v, torch.zeros_like(g), *rest)

    def writes_padding(q, k, v, g, beta, pool, slots, *rest):  # type: ignore[no-untyped-def]
        right(q, k, v, g, beta, pool, slots.clamp_min(1), *rest)

    for wrong in (forgets_decay, writes_padding):
        monkeypatch.setattr(update, "_reference_step", wrong)
        assert "step is wrong" in str(self_test("reference", torch.device("cpu"), layout))


def test_a_failing_candidate_is_passed_over_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tests(name: str, device: torch.device, layout: object) -> str | None:
        if name == "gluon":
            raise RuntimeError("no such instruction\nand a trace")
        return None

    monkeypatch.setattr(update, "self_test", tests)
    update._choose.cache_clear()
    choice = update._choose("cuda:7", PackedLayout(128, 128, 16))
    odd = update._choose("cuda:7", PackedLayout(120, 192, 16))
    natural = update._choose("cuda:7", PackedLayout(96, 192, 16, order="natural"))
    sixteen_bit = update._choose("cuda:7", DenseLayout(96, 192, torch.float16, "fragment"))
    update._choose.cache_clear()
    assert choice.name == odd.name == natural.name == "triton"
    assert sixteen_bit.name == "reference"
    assert choice.reason == (
        "gluon: RuntimeError: no such instruction; triton: passed its self-test on cuda:7"
    )
    passed = "triton: passed its self-test on cuda:7"
    assert odd.reason == f"gluon: 120 x 192 is no multiple of 16 x 32; {passed}"
    assert natural.reason == f"gluon: the pool is in natural order; {passed}"


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    case = SMALL[1]
    layout = case.layout
    assert isinstance(layout, PackedLayout)
    inputs = draw(case)

    def call(**changes: object) -> None:
        packed_step(**{**inputs.on("cpu"), "layout": layout, **changes})

    with pytest.raises(NumericError, match="packed pool is"):
        call(pool=inputs.pool[..., 16:])
    with pytest.raises(NumericError, match="beta has shape"):
        call(beta=inputs.beta[:, :1])
    with pytest.raises(NumericError, match="expected int64"):
        call(slots=inputs.slots.int())
    with pytest.raises(NumericError, match="value_scale"):
        call(value_scale=inputs.value_scale.double())  # type: ignore[union-attr]
    with pytest.raises(NumericError, match="out is"):
        call(out=torch.empty(1))
    with pytest.raises(MissingRequirement, match="no gluon kernel for layout natural"):
        call(backend="gluon")
    with pytest.raises(NumericError, match="dense pool is"):
        dense_step(**inputs.on("cpu"), layout=DenseLayout(24, 64))


def test_the_reference_refuses_a_state_that_is_not_finite() -> None:
    case = SMALL[2]
    inputs = draw(case)
    inputs.v[0, 0, 0] = float("inf")
    with pytest.raises(NumericError, match="not finite"):
        packed_step(**inputs.on("cpu"), layout=case.layout)  # type: ignore[arg-type]


def test_kernels_compile_for_hopper_without_spills(capsys: pytest.CaptureFixture[str]) -> None:
    """Offline, in a process whose Triton is not an interpreter; no GPU needed."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("compile_offline.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    with capsys.disabled():
        sys.stdout.write("\n" + done.stdout)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("layout", "forms"),
    [
        (PackedLayout(128, 128, 16), [(32, 4), (32, 1), (64, 1), (128, 1), (128, 1)]),
        (PackedLayout(96, 192, 16), [(32, 4), (32, 1), (64, 1), (64, 1), (64, 1)]),
        (PackedLayout(64, 96, 16), [(32, 4), *[(32, 1)] * 4]),
        (DenseLayout(128, 128, torch.float16, "fragment"), [(32, 4), (32, 1), *[(64, 1)] * 3]),
    ],
    ids=lambda x: getattr(x, "layout_id", ""),
)
def test_few_heads_take_narrow_programs(layout: Layout, forms: list[tuple[int, int]]) -> None:
    gluon_update = pytest.importorskip("hybridstate.kernels.gluon_update")
    assert [gluon_update.matrix_form(layout, 32 * b) for b in (1, 4, 8, 16, 256)] == forms
