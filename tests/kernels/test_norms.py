"""Norms and the one-token convolution against their twins, and against transformers' own."""

from importlib import import_module
from typing import Any

import pytest
import torch

from hybridstate.errors import NumericError
from hybridstate.kernels import norms
from hybridstate.kernels.norms import (
    conv_reference,
    conv_step,
    gated,
    gated_reference,
    rms_norm,
    rms_norm_reference,
)
from tests.tolerances import assert_within


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [12, 64, 300])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("activation", ["", "silu", "sigmoid"])
def test_norm_equals_the_twin(width: int, centred: bool, activation: str) -> None:
    x, weight = 3 * normal(5, 3, width), normal(width, seed=1)
    gate = normal(5, 3, width, seed=2) if activation else None
    options: dict[str, Any] = {"zero_centred": centred, "gate": gate, "activation": activation}
    expected = rms_norm_reference(x, weight, 1e-6, **options)
    assert_within(rms_norm(x, weight, 1e-6, **options), expected, "kernel-f32")


def test_norm_takes_rows_of_a_wider_tensor() -> None:
    x, weight = normal(7, 40)[:, 8:24], normal(16, seed=1)
    assert_within(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), "kernel-f32")


@pytest.mark.parametrize("tokens", [1, 5, 7])
@pytest.mark.parametrize("layout", ["part of a projection", "heads", "halves of heads"])
def test_no_length_of_a_prompt_has_a_kernel_of_its_own(
    tokens: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = {
        "part of a projection": normal(1, tokens, 40)[..., 8:24],
        "heads": normal(1, tokens, 3, 16),
        "halves of heads": normal(1, tokens, 3, 32)[..., :16],
    }[layout]
    weight, inner, kernel = normal(16, seed=1), [], norms.rms_norm_kernel

    class Told:
        def __getitem__(self, grid: Any) -> Any:
            def run(*args: Any, **options: Any) -> None:
                inner.append(args[10])
                kernel[grid](*args, **options)

            return run

    monkeypatch.setattr(norms, "rms_norm_kernel", Told())
    assert_within(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), "kernel-f32")
    assert inner == [1]


def test_gate_and_activation_come_together() -> None:
    x = normal(2, 16)
    with pytest.raises(NumericError, match="silu or sigmoid"):
        rms_norm(x, x[0], 1e-6, gate=x)
    with pytest.raises(NumericError, match="silu or sigmoid"):
        rms_norm(x, x[0], 1e-6, gate=x, activation="relu")


@pytest.mark.parametrize("length", [3, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_convolution_equals_the_twin_and_shifts_the_window(length: int, biased: bool) -> None:
    x = normal(3, 300, seed=3)
    window = normal(3, 300, length, seed=4)
    weight, bias = normal(300, 4, seed=5), normal(300, seed=6) if biased else None
    theirs = window.clone()
    expected = conv_reference(x, theirs, weight, bias)
    found = conv_step(x, window, weight, bias)
    assert_within(found, expected, "kernel-f32")
    assert torch.equal(window, theirs)
    assert torch.equal(window[..., -1], x)


def test_twin_equals_transformers() -> None:
    model: Any = import_module("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    x, weight = normal(4, 24, seed=7), normal(24, 4, seed=8)
    ours, theirs = (normal(4, 24, 3, seed=9) for _ in range(2))
    # looked up in the module unless a loaded model has replaced it
    original = getattr(model.causal_conv1d_update, "__wrapped__", model.causal_conv1d_update)
    expected = original(x[..., None], theirs, weight, None, "silu")
    assert_within(conv_reference(x, ours, weight, None), expected[..., 0], "kernel-f32")
    assert torch.equal(ours, theirs)


def test_convolution_shapes_are_checked() -> None:
    with pytest.raises(NumericError, match="a convolution of"):
        conv_step(normal(2, 8), normal(2, 8, 2), normal(8, 4))
    with pytest.raises(NumericError, match="contiguous windows"):
        conv_step(normal(2, 8), normal(2, 3, 8).transpose(1, 2), normal(8, 4))


def test_convolution_in_slots_skips_padding() -> None:
    x, weight, bias = normal(3, 10), normal(10, 4, seed=1), normal(10, seed=2)
    ours, theirs = (normal(5, 10, 3, seed=3) for _ in range(2))
    slots = torch.tensor([4, -1, 0])
    expected = conv_reference(x, theirs, weight, bias, slots)
    assert_within(conv_step(x, ours, weight, bias, slots), expected, "kernel-f32")
    assert torch.equal(ours, theirs)
    assert not bool(expected[1].any())


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_norm_and_product_of_strided_gates(activation: str) -> None:
    joined = normal(3, 70)
    gate, x, weight = joined[:, 4:34].view(3, 3, 10), normal(3, 3, 10, seed=1), normal(10, seed=2)
    expected = rms_norm_reference(x, weight, 1e-6, gate=gate, activation=activation)
    found = rms_norm(x, weight, 1e-6, gate=gate, activation=activation)
    assert_within(found, expected, "kernel-f32")
    halves = joined[:, :35], joined[:, 35:]
    assert_within(gated(*halves, activation), gated_reference(*halves, activation), "kernel-f32")
    with pytest.raises(NumericError, match="silu or sigmoid"):
        gated(*halves, "relu")


@pytest.mark.gpu
def test_norm_and_convolution_on_a_gpu() -> None:
    x = normal(256, 2048).cuda().bfloat16()
    weight = normal(2048, seed=1).cuda().bfloat16()
    expected = rms_norm_reference(x, weight, 1e-6, gate=x, activation="silu")
    assert_within(rms_norm(x, weight, 1e-6, gate=x, activation="silu"), expected, "kernel-bf16")
    window, taps = normal(256, 2048, 3).cuda().bfloat16(), normal(2048, 4).cuda().bfloat16()
    theirs = window.clone()
    expected = conv_reference(x, theirs, taps, None)
    assert_within(conv_step(x, window, taps), expected, "kernel-bf16")
    assert torch.equal(window, theirs)
