"""Physical orders: sizes, exactness, agreement, and the address rule written out by hand."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hybridstate.errors import NumericError
from hybridstate.kernels.codec import quantise_rows
from hybridstate.kernels.layout import DenseLayout, PackedLayout, all_finite


def state(layout: PackedLayout | DenseLayout, *lead: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*lead, layout.key_dim, layout.value_dim, generator=generator)


def test_the_published_head_takes_9_875_bits_a_value() -> None:
    layout = PackedLayout(128, 128, 16)
    assert layout.order == "fragment"
    assert layout.bits_per_value == 9.875
    assert layout.head_bytes == layout.payload_bytes == 20_224
    assert PackedLayout(128, 128, 0).bits_per_value == 9.0
    assert PackedLayout(128, 128, 128).bits_per_value == 16.0


@given(
    key_dim=st.integers(1, 40),
    value_dim=st.integers(1, 70),
    share=st.floats(0, 1),
    group=st.sampled_from([1, 8, 16, 32]),
)
def test_packing_loses_only_what_the_format_loses(
    key_dim: int, value_dim: int, share: float, group: int
) -> None:
    layout = PackedLayout(key_dim, value_dim, round(share * key_dim), group)
    x = state(layout, 2, 3)
    packed = layout.pack(x)
    assert packed.shape == (2, 3, layout.head_bytes)
    assert layout.head_bytes % 16 == 0
    restored = layout.unpack(packed)
    hi, lo = restored.split([layout.k_hi, layout.rows_lo], -2)
    assert torch.equal(hi, x[..., : layout.k_hi, :].half().float())
    scales = layout.split(packed)[2].repeat_interleave(group, -1)[..., :value_dim]
    assert ((lo - x[..., layout.k_hi :, :]).abs() <= scales * 0.5001).all()
    assert torch.equal(layout.pack(restored), packed), "packing twice must change nothing"


@pytest.mark.parametrize("k_hi", [0, 16, 48, 128])
def test_both_orders_hold_the_same_bits(k_hi: int) -> None:
    fragment = PackedLayout(128, 128, k_hi)
    natural = PackedLayout(128, 128, k_hi, order="natural")
    x = state(fragment, 2, 2)
    assert torch.equal(fragment.unpack(fragment.pack(x)), natural.unpack(natural.pack(x)))
    pieces = natural.split(natural.pack(x))
    assert torch.equal(fragment.join(*pieces), fragment.pack(x))
    for mine, theirs in zip(fragment.split(fragment.pack(x)), pieces, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "k_hi"), [(64, 64, 16), (96, 192, 0), (192, 96, 32), (256, 256, 16)]
)
def test_fragment_order_at_other_dimensions(key_dim: int, value_dim: int, k_hi: int) -> None:
    layout = PackedLayout(key_dim, value_dim, k_hi)
    assert layout.order == "fragment"
    natural = PackedLayout(key_dim, value_dim, k_hi, order="natural")
    x = state(layout, 2)
    packed = layout.pack(x)
    assert torch.equal(layout.unpack(packed), natural.unpack(natural.pack(x)))
    block, rows = layout.block, layout.rows_lo
    u, v = key_dim - 3, value_dim - 7
    (b, column), low = divmod(v, block), u - k_hi
    (r, i), (j, e) = divmod(column, block // 8), divmod(low % 16, 4)
    start = b * (layout.head_bytes // (value_dim // block)) + 2 * k_hi * block
    at = start + low // 16 * 16 * block + i // 4 * 512 + (4 * r + j) * 16 + i % 4 * 4 + e
    code = int(packed[1, at]) - 128
    at = start + rows * block + (low // 16 * (block // 32) + column // 32) * 64 + low % 16 * 4
    scale = packed[1, at : at + 4].view(torch.float32)
    assert code == torch.round(x[1, u, v] / scale)


def test_obstacles_to_fragment_order_are_named() -> None:
    for layout, reason in (
        (PackedLayout(128, 128, 16, 16), "groups of 16 value columns"),
        (PackedLayout(128, 128, 8), "8 FP16 rows are no multiple of 16"),
        (PackedLayout(120, 128, 16), "no multiple of 16 x 32"),
        (PackedLayout(32, 32, 16), "outside 64 to 256"),
    ):
        assert layout.order == "natural"
        assert reason in str(layout.fragment_obstacle)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dense_fragment_order_only_moves_values(dtype: torch.dtype) -> None:
    layout = DenseLayout(96, 192, dtype, "fragment")
    x = state(layout, 2)
    packed = layout.pack(x)
    assert (packed.shape, packed.dtype) == (x.shape, dtype)
    assert torch.equal(layout.unpack(packed), x.to(dtype).float())


@pytest.mark.parametrize(("u", "v"), [(0, 0), (15, 127), (16, 0), (77, 85), (127, 127)])
def test_fragment_addresses_follow_the_stated_rule(u: int, v: int) -> None:
    layout = PackedLayout(128, 128, 16)
    x = state(layout)
    packed = layout.pack(x)
    r, i = divmod(v, 16)
    chunk, (j, e) = u // 16, divmod(u % 16, 4)
    lane = 4 * r + j
    if u < 16:
        at = 2 * ((i // 2) * 256 + lane * 8 + (i % 2) * 4 + e)
        assert packed[at : at + 2].view(torch.float16) == x[u, v].half()
        return
    low = chunk - 1
    code = int(packed[4096 + low * 2048 + (i // 4) * 512 + lane * 16 + (i % 4) * 4 + e]) - 128
    at = 4096 + 7 * 2048 + low * 256 + (v // 32) * 64 + (u % 16) * 4
    scale = packed[at : at + 4].view(torch.float32)
    assert scale == x[u, v // 32 * 32 : v // 32 * 32 + 32].abs().max() / 127
    assert code == torch.round(x[u, v] / scale)


def test_natural_addresses_follow_the_stated_rule() -> None:
    layout = PackedLayout(5, 40, 2)
    x = state(layout)
    packed = layout.pack(x)
    scales = packed[: 2 * 3 * 4].view(torch.float32).reshape(2, 3)
    assert torch.equal(scales[1], x[2:, 32:].abs().amax(1) / 127)
    half = packed[24 : 24 + 160].view(torch.float16).reshape(40, 2)
    assert torch.equal(half, x[:2].T.half())
    codes = packed[184 : 184 + 120].view(torch.int8).reshape(40, 3)
    assert codes[35, 1] == torch.round(x[3, 35] / scales[1, 1])
    assert not packed[304:].any()


def test_fp16_rows_saturate_and_are_counted() -> None:
    layout = PackedLayout(20, 8, 16)
    x = state(layout, 1)
    x[0, 3, 2], x[0, 15, 7], x[0, 16, 0] = 1e6, -7e4, 1e6
    restored = layout.unpack(layout.pack(x))
    assert (restored[0, 3, 2], restored[0, 15, 7]) == (65504.0, -65504.0)
    assert restored[0, 16, 0] == pytest.approx(1e6)
    assert layout.count_saturated(x) == 2


@pytest.mark.parametrize("row", [0, 19])
def test_non_finite_states_are_refused(row: int) -> None:
    layout = PackedLayout(20, 8, 16)
    x = state(layout, 1)
    x[0, row, 1] = float("nan")
    with pytest.raises(NumericError, match="not finite"):
        layout.pack(x)


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(NumericError, match="17 FP16 rows"):
        PackedLayout(16, 8, 17)
    with pytest.raises(NumericError, match="fragment order does not exist"):
        PackedLayout(120, 64, 16, order="fragment")
    with pytest.raises(NumericError, match="float32 values, not 16-bit ones"):
        DenseLayout(128, 128, order="fragment")
    with pytest.raises(NumericError, match=r"the layout holds 16 x 8"):
        PackedLayout(16, 8, 0).pack(torch.zeros(8, 16))
    with pytest.raises(NumericError, match="do not divide"):
        DenseLayout(8, 12, order="tiles")


def test_layout_ids_tell_layouts_apart() -> None:
    layouts = [
        PackedLayout(128, 128, 16),
        PackedLayout(128, 128, 16, order="natural"),
        PackedLayout(128, 128, 32),
        PackedLayout(128, 128, 16, 16),
        DenseLayout(128, 128),
        DenseLayout(128, 128, order="columns"),
        DenseLayout(128, 128, torch.float16),
        DenseLayout(128, 128, order="tiles", tile=16),
    ]
    assert len({x.layout_id for x in layouts}) == len(layouts)
    assert PackedLayout(128, 128, 16) == PackedLayout(128, 128, 16, order="fragment")


@pytest.mark.parametrize("order", ["rows", "columns", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_orders_only_move_values(order: str, dtype: torch.dtype) -> None:
    layout = DenseLayout(5, 24, dtype, order, 8)  # type: ignore[arg-type]
    x = state(layout, 2, 3)
    packed = layout.pack(x)
    assert (packed.shape, packed.dtype) == (x.shape, dtype)
    assert torch.equal(layout.unpack(packed), x.to(dtype).float())
    tile, row, column = layout.strides
    at = 17 // layout.tile * tile + 3 * row + 17 % layout.tile * column
    assert packed[1, 2].flatten()[at] == x[1, 2, 3, 17].to(dtype)


class Divisors(TorchDispatchMode):
    """Collects what torch divides by."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "div" in func.name():
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


def test_no_scale_is_divided_by_a_plain_number() -> None:
    """On a GPU torch multiplies by the number's reciprocal then, and bytes packed there and here differ."""
    for pack in (
        PackedLayout(64, 64, 8, group=16).pack,
        PackedLayout(64, 64, 0).pack,
        quantise_rows,
    ):
        with Divisors() as divisors:
            pack(torch.randn(64, 64))
        assert divisors.found
        assert all(isinstance(x, torch.Tensor) for x in divisors.found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_seen(dtype: torch.dtype, bad: float) -> None:
    """In any tensor of several types; also beside one that cancels it in a plain sum."""
    tensors = [torch.randn(5, 7), torch.randn(3), torch.randn(2, 300).to(dtype)]
    assert bool(all_finite(tensors))
    tensors[2][1, 4] = bad
    assert not bool(all_finite(tensors))
    tensors[0][0, 0] = -bad
    assert not bool(all_finite(tensors))


def test_magnitudes_of_sixteen_bits_do_not_overflow_but_those_of_float32_may() -> None:
    assert bool(all_finite([torch.full((4096,), 65504.0, dtype=torch.float16)]))
    assert not bool(all_finite([torch.full((2,), 3e38)])), "a no means: look closer"
