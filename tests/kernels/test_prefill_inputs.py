"""Convolution and gates of a prompt against their twins and against the kernels of one token."""

import pytest
import torch

from hybridstate.errors import NumericError
from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from tests.tolerances import assert_within

pytest.importorskip("triton")
from hybridstate.kernels import norms
from hybridstate.kernels.prefill_inputs import (
    convolve,
    convolve_reference,
    gates,
    gates_reference,
)

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 37])
@pytest.mark.parametrize(("taps", "biased"), [(4, False), (2, True)])
def test_a_convolution_of_many_tokens(device: str, tokens: int, taps: int, biased: bool) -> None:
    channels = 150
    joined = normal(tokens, channels + 7).to(device)
    x, window = joined[:, :channels], normal(channels, taps - 1).to(device)
    weight, bias = normal(channels, taps).to(device), normal(channels).to(device)
    given = bias if biased else None
    found, after = convolve(x, window, weight, given)
    expected, kept = convolve_reference(x, window, weight, given)
    assert_within(found, expected, "reference-f32")
    assert torch.equal(after, kept)
    rolling = window[None].clone()
    one = torch.cat([norms.conv_reference(row[None], rolling, weight, given) for row in x])
    assert_within(found, one, "reference-f32")
    assert torch.equal(after, rolling[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("lower", [None, -5.0])
def test_gates_of_many_tokens(device: str, per_channel: bool, lower: float | None) -> None:
    tokens, heads, keys = 19, 3, 20
    shape = (heads, keys) if per_channel else (heads,)
    bias = 4 * normal(*shape).to(device)
    fusion = StepFusion(normal(heads).to(device), bias, lower, beta_scale=1.0)
    joined = 9 * normal(tokens, bias.numel() + heads + 5).to(device)
    raw, logit = joined[:, : bias.numel()], joined[:, bias.numel() + 2 :][:, :heads]
    found, expected = (f(raw, logit, fusion) for f in (gates, gates_reference))
    assert found[0].shape == (tokens, *shape)
    for ours, twin in zip(found, expected, strict=True):
        assert_within(ours, twin, "gate-f32")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 2, 5, 19])
@pytest.mark.parametrize("per_channel", [False, True])
def test_only_the_first_tokens_count(device: str, count: int, per_channel: bool) -> None:
    """The window is the one behind them; the others keep the state: log decay and strength are zero, also of NaN."""
    tokens, heads, keys = 19, 3, 20
    end = torch.tensor([count], device=device)
    x, window = normal(tokens, 50).to(device), normal(50, 3).to(device)
    weight = normal(50, 4).to(device)
    short = convolve_reference(x[:count], window, weight, None)
    for convolved in (convolve, convolve_reference):
        y, after = convolved(x, window, weight, None, end)
        assert_within(y[:count], short[0], "reference-f32")
        assert torch.equal(after, short[1])
    shape = (heads, keys) if per_channel else (heads,)
    bias = 4 * normal(*shape).to(device)
    fusion = StepFusion(normal(heads).to(device), bias, None, beta_scale=1.0)
    raw, logit = normal(tokens, bias.numel()).to(device), normal(tokens, heads).to(device)
    raw[count:], logit[count:] = float("nan"), float("nan")
    expected = gates_reference(raw[:count], logit[:count], fusion)
    for derived in (gates, gates_reference):
        for ours, twin in zip(derived(raw, logit, fusion, end), expected, strict=True):
            assert_within(ours[:count], twin, "gate-f32")
            assert torch.equal(ours[count:], torch.zeros_like(ours[count:]))


def test_inputs_that_do_not_fit_are_refused() -> None:
    x = normal(4, 8)
    with pytest.raises(NumericError, match="with window"):
        convolve(x, normal(8, 2), normal(8, 4), None)
    with pytest.raises(NumericError, match="contiguous columns"):
        convolve(x.T, normal(4, 3), normal(4, 4), None)
    with pytest.raises(NumericError, match="derived from raw"):
        gates(x, x, NO_FUSION)
    fusion = StepFusion(normal(8), normal(8, 3), beta_scale=1.0)
    with pytest.raises(NumericError, match="gates of"):
        gates(x, x, fusion)
