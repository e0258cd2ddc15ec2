"""Formats read back what packing stores; arms mix them by channel; bits count scales."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridstate.errors import UsageError
from hybridstate.kernels.layout import PackedLayout
from hybridstate.quant.arms import Arm, plain_arm
from hybridstate.quant.formats import FORMATS, format_named
from hybridstate.quant.rounding import uniform

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


def by_groups(x: np.ndarray, group: int, store) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Apply `store` to every group of every row, in float64."""
    out = np.empty(x.shape)
    for place in np.ndindex(*x.shape[:-1]):
        for start in range(0, x.shape[-1], group):
            part = x[place][start : start + group].astype(np.float64)
            out[place][start : start + group] = store(part)
    return out


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The nearest entry of an ascending grid whose even indices end in a 0 bit; ties to those."""
    out = np.empty(len(values))
    for i, value in enumerate(values):
        distance = np.abs(grid - value)
        best = np.flatnonzero(distance == distance.min())
        out[i] = grid[best[best % 2 == 0][0] if len(best) > 1 else best[0]]
    return out


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
)[:127]  # the last pattern is NaN


def signed(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    return np.sign(values) * nearest(np.minimum(np.abs(values), grid[-1]), grid)


def fp8_by_hand(x: np.ndarray) -> np.ndarray:
    def store(part: np.ndarray) -> np.ndarray:
        scale = float(np.float32(np.abs(part).max() / 448))
        return part * 0 if scale == 0 else signed(part / scale, E4M3) * scale

    return by_groups(x, 32, store)


def int4_by_hand(x: np.ndarray) -> np.ndarray:
    def store(part: np.ndarray) -> np.ndarray:
        zero = part.min()
        scale = float(np.float32((part.max() - zero) / 15))
        codes = np.clip(np.rint((part - zero) / scale), 0, 15) if scale else 0 * part
        return codes * scale + zero

    return by_groups(x, 32, store)


def nvfp4_by_hand(x: np.ndarray) -> np.ndarray:
    out = np.empty(x.shape)
    for place in np.ndindex(*x.shape[:-2]):
        overall = float(np.float32(np.abs(x[place]).max() / (6 * 448)))

        def store(part: np.ndarray, overall: float = overall) -> np.ndarray:
            block = signed(np.array([np.abs(part).max() / 6 / overall]), E4M3)[0] if overall else 0
            scale = block * overall
            return part * 0 if scale == 0 else signed(part / scale, E2M1) * scale

        out[place] = by_groups(x[place], 16, store)
    return out


TWINS = {"fp8": fp8_by_hand, "int4": int4_by_hand, "nvfp4": nvfp4_by_hand}


@pytest.mark.parametrize("name", list(TWINS))
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_low_formats_equal_their_float64_twins(name: str, rows: int, columns: int) -> None:
    """Random rows, a row of zeros, constant rows; a tie or a step edge may fall to either side."""
    x = random_state(2, 3, rows, columns, seed=columns)
    x[0, 0, 1] = 0
    x[0, 1, 0] = 0.75
    x[1, 2, 2] = -3.0
    found = FORMATS[name].reconstruct(x).numpy().astype(np.float64)
    expected = TWINS[name](x.numpy().astype(np.float64))
    peak = np.abs(expected).max(-1, keepdims=True)  # q s + z cancels, so errors are the row's
    wrong = np.abs(found - expected) > 1e-6 * peak
    assert wrong.mean() <= 2e-3, f"{wrong.sum()} of {wrong.size} values differ"
    assert not found[0, 0, 1].any()
    if name == "int4":
        assert (found[0, 1, 0] == 0.75).all()
        assert (found[1, 2, 2] == -3.0).all()
    exact = FORMATS[name].reconstruct(x.double()).numpy()
    assert (np.abs(exact - expected) <= 1e-6 * peak)[~wrong].all()


def test_ties_go_to_the_even_code() -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)
    halves[8:] *= -1
    # the largest value makes global * block scale exactly 1
    block = FORMATS["nvfp4"].reconstruct(halves[None, None])[0, 0]
    kept = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert block.tolist() == [*kept, *(-x for x in kept)]
    steps = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.5, 15.0])
    assert FORMATS["int4"].reconstruct(steps).tolist() == [0, 0, 2, 2, 4, 15]
    steps = torch.tensor([0.5, 1.5, -2.5, 127.0])
    assert FORMATS["int8-step"].reconstruct(steps).tolist() == [0, 2, -2, 127]
    steps = torch.tensor([17.0, 19.0, -17.0, 448.0])  # spacing 2 above 16
    assert FORMATS["fp8"].reconstruct(steps).tolist() == [16, 20, -16, 448]


def test_a_shared_scale_spans_unprotected_rows_only() -> None:
    x = random_state(1, 1, 6, 32)
    x[0, 0, 4] = 1e4
    arm = Arm("damp-nvfp4", FORMATS["nvfp4"], (torch.tensor([[4]]),))
    others = [0, 1, 2, 3, 5]
    alone = FORMATS["nvfp4"].reconstruct(x[:, :, others])
    assert torch.equal(arm.reconstruct(x, 0)[:, :, others], alone)
    assert (arm.reconstruct(x, 0)[0, 0, 4] == 1e4).all()


def test_stochastic_rounding_is_unbiased_seeded_and_blind_to_grouping() -> None:
    x = random_state(2, 3, 4, 40)
    arm = Arm("s", FORMATS["int8-step-stochastic"], seed=7)
    first = arm.reconstruct(x, 1, update=3)
    assert torch.equal(first, arm.reconstruct(x, 1, update=3))
    for other in (arm.reconstruct(x, 1, update=4), arm.reconstruct(x, 2, update=3)):
        assert not torch.equal(first, other)
    alone = arm.reconstruct(x[1:], 1, update=3, sequences=torch.tensor([1]))
    assert torch.equal(first[1:], alone)
    step = torch.nn.functional.pad(x, (0, 24)).unflatten(-1, (-1, 32)).abs().amax(-1) / 127
    step = step.repeat_interleave(32, -1)[..., :40]
    draws = torch.stack([arm.reconstruct(x, 0, update=n) for n in range(400)])
    assert ((draws - x).abs() <= step * 1.0001).all()
    bias = (draws.mean(0) - x) / step
    assert bias.abs().max() < 0.13  # five standard errors of a mean of 400
    assert bias.mean().abs() < 0.01


def test_uniform_numbers_are_uniform() -> None:
    u = uniform(torch.Size((8, 2, 64, 64)), torch.arange(8), (0, 1, 2), torch.device("cpu"))
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    counts = torch.histc(u, 16, 0, 1)
    assert (counts / u.numel() - 1 / 16).abs().max() < 2e-3
    rows = u.flatten(1) - 0.5
    assert (rows @ rows.T / rows.shape[1] - torch.eye(8) / 12).abs().max() < 5e-3


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
    bits = {name: plain_arm(name).bits(128, 128) for name in ("fp8", "int4", "nvfp4")}
    assert bits == {"fp8": 9.0, "int4": 6.0, "nvfp4": 4.5}
    assert plain_arm("int4").bits(8, 40) == 4 + 2 * 64 / 40
    assert plain_arm("nvfp4").bits(8, 40) == 4 + 3 * 8 / 40
    protected = (torch.zeros(1, 16, dtype=torch.int64),)
    assert Arm("damp-int4", FORMATS["int4"], protected).bits(128, 128) == (16 * 16 + 112 * 6) / 128
    assert replace(plain_arm("int8-step"), feedback="fp16").bits(128, 128) == 25.0
    assert replace(plain_arm("int8-step"), feedback="int4").bits(128, 128) == 13.0
    none = Arm("damp", FORMATS["int8-step"], (torch.zeros(1, 0, dtype=torch.int64),))
    assert none.bits(128, 128) == 9.0
    x = random_state(1, 1, 4, 32)
    assert torch.equal(none.reconstruct(x, 0), FORMATS["int8-step"].reconstruct(x))


def test_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no storage format 'int3'"):
        format_named("int3")
