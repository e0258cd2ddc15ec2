"""Formats read back what packing stores; arms mix them by channel; bits count scales."""

import numpy as np
import pytest
import torch

from hybridstate.errors import UsageError
from hybridstate.kernels.layout import PackedLayout
from hybridstate.quant.formats import FORMATS, Arm, format_named, plain_arm

SHAPES = [(5, 32), (5, 40), (3, 12), (4, 128)]


def random_state(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(2 * torch.randn(*shape[:-1], 1, generator=generator))
    return torch.randn(*shape, generator=generator) * scale


def int8_by_hand(x: np.ndarray, group: int = 32) -> np.ndarray:
    """DAMP Eq. 5-6 in float64 with the scale stored in float32."""
    out = np.empty_like(x, dtype=np.float64)
    for start in range(0, x.shape[-1], group):
        part = x[..., start : start + group].astype(np.float64)
        scale = (np.abs(part).max(-1, keepdims=True) / 127).astype(np.float32).astype(np.float64)
        safe = np.where(scale > 0, scale, 1)
        out[..., start : start + group] = np.clip(np.rint(part / safe), -127, 127) * scale
    return out


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_int8_matches_the_equation_and_zero_groups_stay_zero(rows: int, columns: int) -> None:
    x = random_state(2, 3, rows, columns)
    x[0, 0, 1] = 0
    found = FORMATS["int8-step"].reconstruct(x)
    np.testing.assert_allclose(found.numpy(), int8_by_hand(x.numpy()), rtol=1e-6, atol=0)
    assert not found[0, 0, 1].any()
    step = x.abs().amax() / 127
    assert (found - x).abs().max() <= step / 2 * 1.0001


@pytest.mark.parametrize("name", list(FORMATS))
def test_formats_keep_shape_dtype_and_input(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x = random_state(1, 2, 3, 40).to(dtype)
        before = x.clone()
        found = format_named(name).reconstruct(x)
        assert found.shape == x.shape
        assert found.dtype == dtype
        assert torch.equal(x, before)


def test_fp16_saturates_and_is_counted() -> None:
    x = torch.tensor([[[[1e6, -1e6, 65504.0, 1.0]]]])
    assert FORMATS["fp16"].reconstruct(x)[0, 0, 0].tolist() == [65504.0, -65504.0, 65504.0, 1.0]
    assert plain_arm("fp16").saturated(x, 0) == 2
    assert plain_arm("bf16").saturated(x, 0) == 0
    protected = (torch.tensor([[0]]),)
    assert Arm("damp", FORMATS["int8-step"], protected).saturated(x, 0) == 2


def test_a_mixed_arm_stores_protected_channels_high_and_the_rest_low() -> None:
    x = random_state(2, 3, 6, 40)
    protected = torch.tensor([[0, 5], [1, 2], [3, 4]])
    found = Arm("damp", FORMATS["int8-step"], (protected,)).reconstruct(x, 0)
    low, high = FORMATS["int8-step"].reconstruct(x), x.half().float()
    for head in range(3):
        for channel in range(6):
            expected = high if channel in protected[head].tolist() else low
            assert torch.equal(found[:, head, channel], expected[:, head, channel])


def test_a_mixed_arm_reads_back_exactly_what_the_packed_layout_stores() -> None:
    key_dim, value_dim, k_hi = 40, 72, 16
    x = random_state(2, 3, key_dim, value_dim)
    order = torch.stack(
        [torch.randperm(key_dim, generator=torch.Generator().manual_seed(h)) for h in range(3)]
    )
    layout = PackedLayout(key_dim=key_dim, value_dim=value_dim, k_hi=k_hi)
    index = order[None, :, :, None].expand_as(x)
    stored = layout.unpack(layout.pack(x.gather(2, index)))
    through_storage = torch.empty_like(x).scatter(2, index, stored)
    arm = Arm("damp", FORMATS["int8-step"], (order[:, :k_hi],))
    assert torch.equal(arm.reconstruct(x, 0), through_storage)
    assert arm.bits(key_dim, value_dim) == pytest.approx(layout.bits_per_value)


def test_bits_count_one_float32_scale_per_32_values() -> None:
    damp = Arm("damp", FORMATS["int8-step"], (torch.zeros(1, 16, dtype=torch.int64),))
    assert damp.bits(128, 128) == 9.875
    assert plain_arm("int8-step").bits(128, 128) == 9.0
    assert plain_arm("int8-step").bits(128, 40) == 8 + 2 * 32 / 40
    assert plain_arm("fp16").bits(8, 12) == 16.0
    none = Arm("damp", FORMATS["int8-step"], (torch.zeros(1, 0, dtype=torch.int64),))
    assert none.bits(128, 128) == 9.0
    x = random_state(1, 1, 4, 32)
    assert torch.equal(none.reconstruct(x, 0), FORMATS["int8-step"].reconstruct(x))


def test_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no storage format 'int3'"):
        format_named("int3")
