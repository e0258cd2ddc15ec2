"""Units to bytes and back: exact values, exact order, exact length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridstate.errors import NumericError, PlanMismatch
from hybridstate.kernels.checkpoint import UnitIndex, pack_units, unpack_units

SIZES = [(4, 8, 12), (6, 3, 5)]
CONV = [(20, 3), (7, 3)]


def model(per_channel: bool, share: float = 0.5) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(9)
    states = [torch.randn(size, generator=generator) for size in SIZES]
    conv = [torch.randn(size, generator=generator).bfloat16() for size in CONV]
    units = [size[:2] if per_channel else size[:1] for size in SIZES]
    masks = [torch.rand(size, generator=generator) < share for size in units]
    return states, conv, masks


@pytest.mark.parametrize("per_channel", [False, True], ids=["heads", "channels"])
@given(share=st.floats(0, 1))
def test_retained_units_return_exactly_and_omitted_ones_stay(
    per_channel: bool, share: float
) -> None:
    states, conv, masks = model(per_channel, share)
    buffer = pack_units(states, conv, masks)
    into = [torch.full(size, float("nan")) for size in SIZES]
    windows = [torch.full(size, float("nan"), dtype=torch.bfloat16) for size in CONV]
    unpack_units(buffer, masks, into, windows)
    for state, loaded, mask in zip(states, into, masks, strict=True):
        assert torch.equal(loaded[mask], state[mask])
        assert loaded[~mask].isnan().all()
    for window, loaded in zip(conv, windows, strict=True):
        assert torch.equal(window, loaded)


@pytest.mark.parametrize("per_channel", [False, True], ids=["heads", "channels"])
def test_bytes_lie_in_the_stated_order_without_padding(per_channel: bool) -> None:
    states, conv, masks = model(per_channel)
    expected = b""
    for state, mask in zip(states, masks, strict=True):
        for place in mask.nonzero().tolist():
            expected += state[tuple(place)].numpy().tobytes()
    for window in conv:
        expected += window.view(torch.int16).numpy().tobytes()
    assert pack_units(states, conv, masks).numpy().tobytes() == expected


def test_the_length_is_the_accounting() -> None:
    states, conv, masks = model(per_channel=True)
    units = [int(mask.sum()) for mask in masks]
    values = sum(n * size[2] for n, size in zip(units, SIZES, strict=True))
    assert len(pack_units(states, conv, masks)) == 4 * values + 2 * (60 + 21)


def test_an_index_gives_the_same_bytes_as_its_masks() -> None:
    states, conv, masks = model(per_channel=True)
    index = UnitIndex.from_masks(masks, "cpu")
    buffer = pack_units(states, conv, index)
    assert torch.equal(buffer, pack_units(states, conv, masks))
    into = [torch.zeros(size) for size in SIZES]
    unpack_units(buffer, index, into, [torch.zeros(size) for size in CONV])
    assert torch.equal(into[1][masks[1]], states[1][masks[1]])


def test_loading_writes_through_a_view_of_a_pool_and_accepts_an_unaligned_buffer() -> None:
    states, conv, masks = model(per_channel=False)
    pool = [torch.zeros(3, *size) for size in SIZES]
    windows = [torch.zeros(3, *size) for size in CONV]
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), pack_units(states, conv, masks)])[1:]
    unpack_units(shifted, masks, [x[1] for x in pool], [x[1] for x in windows])
    assert torch.equal(pool[0][1][masks[0]], states[0][masks[0]])
    assert torch.equal(windows[1][1], conv[1].float())
    assert not pool[0][0].any()
    assert not pool[0][2].any()


def test_buffers_and_masks_that_do_not_fit_are_refused() -> None:
    states, conv, masks = model(per_channel=True)
    buffer = pack_units(states, conv, masks)
    with pytest.raises(PlanMismatch, match="these masks need"):
        unpack_units(buffer[:-1], masks, states, conv)
    with pytest.raises(PlanMismatch, match="1 masks for 2 linear layers"):
        pack_units(states, conv, masks[:1])
    with pytest.raises(PlanMismatch, match=r"linear layer 0: mask \[8, 4\]"):
        pack_units(states, conv, [masks[0].T, masks[1]])
    with pytest.raises(NumericError, match=r"conv is torch.float32"):
        pack_units(states, [x.float() for x in conv], masks)
    with pytest.raises(NumericError, match="contiguous float32"):
        unpack_units(buffer, masks, [x.double() for x in states], conv)
