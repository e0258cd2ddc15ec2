"""Pack, codecs and copies: twins against their definitions, kernels in the interpreter against the twins."""

import os

import numpy as np
import pytest
import torch

from hybridstate.errors import NumericError, PlanMismatch
from hybridstate.kernels.codec import dequantise_rows, quantise_rows
from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.pack import Maps, pack_states
from hybridstate.kernels.transfer import copy_slots, gather_rows, scatter_rows
from hybridstate.kernels.transfer_tables import CheckpointForm, LayerSet, RowTable
from tests.kernels.transfer_cases import (
    FORMS,
    LAYOUTS,
    check_copy,
    check_pack,
    check_packed_checkpoint,
    check_rows,
    random_masks,
    random_states,
    slots_of,
)

interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off: a GPU is here"
)


@interpreter
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.layout_id)
def test_pack_and_unpack_equal_the_layout_bit_for_bit(layout: PackedLayout) -> None:
    pytest.importorskip("triton")
    check_pack(layout, "cpu", layers=1 if layout.key_dim == 128 else 2)


@interpreter
@pytest.mark.parametrize("order", ["columns", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dense_sides_of_other_orders_and_dtypes(order: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    layout = PackedLayout(24, 40, 16)
    check_pack(layout, "cpu", mapped=False, dense=DenseLayout(24, 40, dtype, order))  # type: ignore[arg-type]


@interpreter
@pytest.mark.parametrize(("codec", "scale_dtype"), FORMS, ids=str)
@pytest.mark.parametrize("per_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
def test_rows_equal_their_twins(
    codec: str, scale_dtype: torch.dtype, per_channel: bool, padded: bool
) -> None:
    pytest.importorskip("triton")
    if scale_dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates to bfloat16 where hardware rounds")
    check_rows(codec, scale_dtype, "cpu", per_channel=per_channel, padded=padded)


@interpreter
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_and_everything_kept(share: float) -> None:
    pytest.importorskip("triton")
    check_rows("int8", torch.float32, "cpu", per_channel=True, share=share)
    check_rows("fp32", torch.float32, "cpu", per_channel=False, share=share)


@interpreter
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4]], ids=lambda x: x.layout_id)
@pytest.mark.parametrize("per_channel", [False, True], ids=["heads", "channels"])
def test_packed_slots_to_rows_and_back(layout: PackedLayout, per_channel: bool) -> None:
    pytest.importorskip("triton")
    check_packed_checkpoint(layout, "cpu", per_channel=per_channel)


@interpreter
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 2, 48), torch.uint8), ((3, 5, 4, 20), torch.float32)]
)
def test_slots_are_copied_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    check_copy("cpu", shape, dtype)


@interpreter
def test_a_nan_shows_after_packing_and_only_in_its_slot() -> None:
    pytest.importorskip("triton")
    layout = PackedLayout(24, 40, 16)
    states = random_states(1, 3, 2, 24, 40)
    clean = layout.pack(states[0], check=False)
    states[0][1, 0, 20, 3] = float("nan")
    states[0][1, 1, 2, 3] = float("nan")
    pool = LayerSet.of([torch.zeros_like(clean)])
    slots = torch.arange(3)
    pack_states(LayerSet.of(states), slots, pool, slots, layout, backend="triton")
    found = layout.unpack(pool.first)
    assert found[1, 0, 20, :32].isnan().all()
    assert found[1, 1, 2, 3].isnan()
    assert int(found[1].isnan().sum()) == 33
    assert torch.equal(pool.first[[0, 2]], clean[[0, 2]])
    form = CheckpointForm("int8", 40)
    table = RowTable.from_masks(torch.ones(1, 2, dtype=torch.uint8), 24)
    loaded = [LayerSet.of([torch.zeros_like(states[0])]) for _ in range(2)]
    for backend, into in zip(("reference", "triton"), loaded, strict=True):
        buffer = form.buffer(3, table)
        gather_rows(LayerSet.of(states), slots, buffer, slots, table, form, backend=backend)
        scatter_rows(buffer, slots, into, slots, table, form, backend=backend)
        assert int(into.first.isnan().sum()) == 80
        assert into.first[1, 0, 20].isnan().all()


def test_int8_rows_follow_equation_8() -> None:
    x = torch.tensor([[127.0, 63.5, 62.5, -0.5, 1.5], [0.0, 0.0, 0.0, 0.0, 0.0]])
    codes, scales = quantise_rows(x)
    assert codes[0].tolist() == [127, 64, 62, 0, 2], "ties go to even"
    assert codes[1].tolist() == [0] * 5
    assert scales.tolist() == pytest.approx([1.0, 1e-8 / 127])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 128, generator=generator)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        codes, scales = quantise_rows(rows, dtype)
        wide = scales.float()[:, None]
        error = (dequantise_rows(codes, scales) - rows).abs()
        inside = rows.abs() <= 127 * wide
        assert (error <= wide * 0.5 * (1 + 1e-6))[inside].all(), "half a step of the stored scale"
        assert (codes.abs() <= 127).all()
    assert torch.equal(quantise_rows(rows * 1e-9, torch.float16)[0], torch.zeros_like(codes))


@pytest.mark.parametrize("per_channel", [False, True], ids=["heads", "channels"])
def test_fp32_rows_lie_in_the_stated_order_without_padding(per_channel: bool) -> None:
    masks = random_masks(2, 3, 8, per_channel, 0.5)
    states = random_states(2, 2, 3, 8, 12)
    table, form = RowTable.from_masks(masks, 8), CheckpointForm("fp32", 12)
    buffer = form.buffer(1, table)
    gather_rows(
        LayerSet.of(states), slots_of([1], "cpu"), buffer, slots_of([0], "cpu"), table, form
    )
    expected = b""
    for state, mask in zip(states, masks, strict=True):
        for place in mask.nonzero().tolist():
            expected += state[1][tuple(place)].numpy().tobytes()
    assert buffer[0, : len(expected)].numpy().tobytes() == expected
    assert form.temporal_bytes(table) == len(expected)


def test_padded_and_ragged_forms_hold_the_same_values() -> None:
    masks = random_masks(2, 4, 8, True, 0.4)
    pools, loaded = LayerSet.of(random_states(2, 2, 4, 8, 12)), []
    slots = torch.arange(2)
    sizes = []
    for padded in (False, True):
        for codec in ("fp32", "int8"):
            table = RowTable.from_masks(masks, 8, padded=padded)
            form = CheckpointForm(codec, 12)  # type: ignore[arg-type]
            buffer = form.buffer(2, table)
            gather_rows(pools, slots, buffer, slots, table, form)
            into = LayerSet.of([torch.zeros_like(x) for x in pools.tensors])
            scatter_rows(buffer, slots, into, slots, table, form, omitted="zero")
            loaded.append(into.tensors)
            sizes.append(form.temporal_bytes(table))
    for ragged, padded_ in ((0, 2), (1, 3)):
        assert all(map(torch.equal, loaded[ragged], loaded[padded_]))
        assert sizes[ragged] < sizes[padded_]
    assert sizes[1] == int(masks.sum()) * (12 + 4)
    assert CheckpointForm("int8", 128).row_bytes == 132


def test_tables_with_given_counts_equal_counted_ones() -> None:
    masks = random_masks(2, 4, 8, True, 0.4)
    counted = RowTable.from_masks(masks, 8, padded=True)
    given = RowTable.from_masks(
        masks, 8, padded=True, count=int(masks.sum()), fullest=int(masks.sum(-1).max())
    )
    for name in ("rows", "to", "place", "every", "omitted"):
        assert torch.equal(getattr(counted, name), getattr(given, name)), name
    assert sorted([*counted.rows.tolist(), *counted.omitted.tolist()]) == list(range(64))


def test_what_does_not_fit_is_refused() -> None:
    layout = PackedLayout(24, 40, 16)
    dense = LayerSet.of([torch.zeros(2, 2, 24, 40)])
    pool = LayerSet.of([torch.zeros(2, 2, layout.head_bytes, dtype=torch.uint8)])
    slots = torch.arange(2)
    with pytest.raises(NumericError, match="expected int64"):
        pack_states(dense, slots.int(), pool, slots, layout)
    with pytest.raises(NumericError, match="packed pool is"):
        pack_states(dense, slots, dense, slots, layout)
    with pytest.raises(NumericError, match="order is"):
        pack_states(dense, slots, pool, slots, layout, maps=Maps(order=torch.zeros(1, 2, 24)))
    with pytest.raises(NumericError, match="dense side is"):
        pack_states(LayerSet.of([torch.zeros(2, 2, 24, 32)]), slots, pool, slots, layout)
    with pytest.raises(NumericError, match="does not join"):
        LayerSet.of([torch.zeros(2, 4), torch.zeros(2, 8)])
    with pytest.raises(NumericError, match="equal layers"):
        copy_slots(dense, slots, pool, slots)
    table, form = RowTable.from_masks(torch.ones(1, 2), 24), CheckpointForm("fp32", 40)
    with pytest.raises(PlanMismatch, match="expected uint8 with at least"):
        gather_rows(dense, slots, form.buffer(2, table)[:, 16:], slots, table, form)
    other = RowTable.from_masks(torch.ones(2, 2), 24)
    with pytest.raises(PlanMismatch, match="the masks are for"):
        gather_rows(dense, slots, form.buffer(2, other), slots, other, form)
    with pytest.raises(PlanMismatch, match="neither"):
        RowTable.from_masks(torch.ones(1, 2, 23), 24)
    with pytest.raises(NumericError, match="no checkpoint codec"):
        CheckpointForm("int4", 128)  # type: ignore[arg-type]


def test_fused_remainders_round_as_ieee_division() -> None:
    """The compiled kernels' quotient, with the fused operation emulated in extended precision."""
    generator = np.random.default_rng(12)
    size = 200_000
    divisor = (10.0 ** generator.uniform(-44, 4, size)).astype(np.float32)
    divisor = np.maximum(divisor, np.float32(1e-45))
    x = (divisor.astype(np.float64) * generator.uniform(-127, 127, size)).astype(np.float32)
    half = generator.random(size) < 0.3  # quotients next to a tie
    near = divisor.astype(np.float64) * (generator.integers(-127, 127, size) + 0.5)
    x = np.where(half, near.astype(np.float32), x)

    def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        wide = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
        return wide.astype(np.float32)

    lift = np.where(divisor < np.float32(1e-18), np.float32(2.0**64), np.float32(1.0))
    d, lifted = divisor * lift, x * lift
    one = np.ones_like(d)
    for ulps in (-1, 0, 1):  # the hardware's approximate reciprocal is within one unit
        approximate = ((one / d).view(np.int32) + ulps).astype(np.int32).view(np.float32)
        reciprocal = fused(approximate, fused(-d, approximate, one), approximate)
        ratio = lifted * reciprocal
        for _ in range(2):
            ratio = fused(fused(ratio, -d, lifted), reciprocal, ratio)
        assert np.array_equal(ratio, x / divisor)
    top, inverse = np.abs(x), np.float32(1.0 / 127.0)
    top[: size // 4] = np.arange(size // 4, dtype=np.int32).view(np.float32)  # the smallest numbers
    scale = top * inverse
    for _ in range(2):
        scale = fused(
            fused(scale, np.full_like(top, -127.0), top), np.full_like(top, inverse), scale
        )
    assert np.array_equal(scale, top / np.float32(127.0))


@pytest.mark.parametrize("shape", [(2, 3, 8, 4), (1, 5, 7, 3), (1, 1, 1, 1)])
def test_fresh_layers_are_addressed_as_given_ones_are(shape: tuple[int, ...]) -> None:
    """Sizes that are no whole 16 bytes too; layers do not overlap."""
    found = LayerSet.fresh(3, shape, "cpu")
    assert torch.equal(found.table, LayerSet.of(found.tensors).table)
    for number, x in enumerate(found.tensors):
        assert (x.shape, x.dtype, x.is_contiguous()) == (shape, torch.float32, True)
        x.fill_(number)
    assert all(bool((x == n).all()) for n, x in enumerate(found.tensors))
