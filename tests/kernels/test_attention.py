"""Attention of one token over a masked cache against the float32 twin."""

import pytest
import torch

from hybridstate.errors import NumericError
from hybridstate.kernels import attention
from hybridstate.kernels.attention import attention_reference, attention_step
from tests.tolerances import assert_within

CASES = [  # batch, heads, groups, length, DK, DV; DV 0: the latent of 32 columns of the keys
    (2, 4, 2, 50, 16, 24),
    (1, 8, 1, 33, 48, 0),
    (3, 3, 3, 7, 20, 16),
]


def inputs(
    case: tuple[int, ...], device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, int]:
    batch, heads, groups, length, dk, dv = case
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    mask = torch.rand((batch, length), generator=generator) < 0.5
    mask[:, 3] = True
    mask[0, length // 2 :] = False
    values = normal(batch, groups, length, dv) if dv else None
    q, keys = normal(batch, heads, dk), normal(batch, groups, length, dk)
    hidden = ~mask.to(device)
    keys[hidden[:, None].expand(-1, groups, -1)] = float("nan")  # unused columns hold anything
    if values is not None:
        values[hidden[:, None].expand(-1, groups, -1)] = float("nan")
    return q, keys, values, mask.to(device), 2 * dk // 3


def twin(q, keys, values, mask, scale, width):  # type: ignore[no-untyped-def]
    """NaN in hidden columns would reach the twin's zero weights."""
    values = None if values is None else values.nan_to_num()
    return attention_reference(q, keys.nan_to_num(), values, mask, scale, width)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("part", [1024, 32])
def test_step_equals_the_twin(
    case: tuple[int, ...], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PART_TOKENS", part)
    q, keys, values, mask, width = inputs(case, "cpu", torch.float32)
    width = width if values is None else 0
    found = attention_step(q, keys, values, mask, 0.3, width)
    assert_within(found, twin(q, keys, values, mask, 0.3, width), "kernel-f32")


def test_shapes_are_checked() -> None:
    q, keys, values, mask, _ = inputs(CASES[0], "cpu", torch.float32)
    with pytest.raises(NumericError, match=r"with a mask \[2, 49\]"):
        attention_step(q, keys, values, mask[:, 1:], 1.0)
    with pytest.raises(NumericError, match="contiguous columns"):
        attention_step(q, keys.transpose(2, 3).contiguous().transpose(2, 3), values, mask, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [*CASES, (32, 16, 2, 384, 256, 256), (8, 32, 1, 400, 576, 0), (2, 16, 2, 5000, 256, 256)],
)
def test_step_equals_the_twin_on_a_gpu(case: tuple[int, ...]) -> None:
    q, keys, values, mask, width = inputs(case, "cuda", torch.bfloat16)
    width = (512 if case[4] == 576 else width) if values is None else 0
    found = attention_step(q, keys, values, mask, 0.06, width)
    assert_within(found, twin(q, keys, values, mask, 0.06, width), "kernel-bf16")
