"""Attention of one token over a masked cache against the float32 twin."""

import pytest
import torch

from hybridstate.errors import NumericError
from hybridstate.kernels.attention import (
    append_reference,
    append_step,
    attention_reference,
    attention_step,
    part_columns,
)
from tests.tolerances import assert_within

CASES = [  # batch, heads, groups, length, DK, DV; DV 0: the latent of 32 columns of the keys
    (2, 4, 2, 50, 16, 24),
    (1, 8, 1, 33, 48, 0),
    (3, 3, 3, 7, 20, 16),
    (1, 4, 2, 70, 256, 256),  # in float32 narrower steps
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
def test_step_equals_the_twin(case: tuple[int, ...], part: int) -> None:
    q, keys, values, mask, width = inputs(case, "cpu", torch.float32)
    width = width if values is None else 0
    found = attention_step(q, keys, values, mask, 0.3, width, part=part)
    assert_within(found, twin(q, keys, values, mask, 0.3, width), "kernel-f32")


def in_lines(
    case: tuple[int, ...], device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """A cache of more lines than the batch, in another order; the last sequence is padding."""
    q, keys, values, _, _ = inputs(case, device, dtype)
    batch, length = case[0], case[3]
    lines = torch.arange(batch, device=device).flip(0)
    lengths = torch.arange(batch, device=device) * (length // batch) + 1
    keys = torch.cat([keys, keys[:1]]).nan_to_num(0.5)
    values = None if values is None else torch.cat([values, values[:1]]).nan_to_num(0.5)
    for row in range(batch):
        for held in (keys, values):
            if held is not None:
                held[lines[row], :, lengths[row] :] = float("nan")
    lines[-1] = -1
    return q, keys, values, lines, lengths


def by_lines(q, keys, values, lines, lengths, scale, width):  # type: ignore[no-untyped-def]
    """The masked twin on each sequence's line."""
    seen = torch.arange(keys.shape[2], device=q.device) < lengths[:, None]
    chosen = lines.clamp(min=0)
    held = None if values is None else values[chosen]
    out = twin(q, keys[chosen], held, seen, scale, width)
    out[lines < 0] = 0.0
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("part", [1024, 32])
def test_lines_of_different_lengths_equal_the_twin(case: tuple[int, ...], part: int) -> None:
    q, keys, values, lines, lengths = in_lines(case, "cpu", torch.float32)
    width = 2 * case[4] // 3 if values is None else 0
    more = {"lines": lines, "lengths": lengths, "part": part}
    found = attention_step(q, keys, values, None, 0.3, width, **more)
    assert_within(found, by_lines(q, keys, values, lines, lengths, 0.3, width), "kernel-f32")


@pytest.mark.parametrize("first", [0, 8])
def test_a_token_is_appended_to_its_line(first: int) -> None:
    generator = torch.Generator().manual_seed(first)
    held = torch.randn((4, 2, 9, 24), generator=generator)
    new = torch.randn((4, 2, 16), generator=generator)
    lines, positions = torch.tensor([2, -1, 0, 1]), torch.tensor([8, 3, 0, 9])
    expected = held.clone()
    append_reference(new, expected, lines, positions, first)
    append_step(new, held, lines, positions, first)
    assert torch.equal(held, expected)
    assert not torch.equal(held[2, :, 8, first : first + 16], held[3, :, 8, first : first + 16])
    with pytest.raises(NumericError, match="do not fit a cache"):
        append_step(new, held, lines, positions, 9)


def test_parts_fill_the_device_and_stay_short() -> None:
    assert part_columns(512, 320, 64) == 512
    assert part_columns(2, 320, 64) == 64
    assert part_columns(2, 100_000, 64) == 1024


def test_shapes_are_checked() -> None:
    q, keys, values, mask, _ = inputs(CASES[0], "cpu", torch.float32)
    with pytest.raises(NumericError, match=r"with a mask \[2, 49\]"):
        attention_step(q, keys, values, mask[:, 1:], 1.0)
    with pytest.raises(NumericError, match="contiguous columns"):
        attention_step(q, keys.transpose(2, 3).contiguous().transpose(2, 3), values, mask, 1.0)


WIDE = [(32, 16, 2, 384, 256, 256), (2, 16, 2, 5000, 256, 256)]
LATENT = (8, 32, 1, 400, 576, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    [
        *((case, torch.bfloat16, "kernel-bf16") for case in (*CASES, *WIDE, LATENT)),
        *((case, torch.float32, "kernel-f32") for case in (*CASES, *WIDE)),
    ],
)
def test_step_equals_the_twin_on_a_gpu(
    case: tuple[int, ...], dtype: torch.dtype, tolerance: str
) -> None:
    q, keys, values, mask, width = inputs(case, "cuda", dtype)
    width = (512 if case[4] == 576 else width) if values is None else 0
    found = attention_step(q, keys, values, mask, 0.06, width)
    assert_within(found, twin(q, keys, values, mask, 0.06, width), tolerance)
    q, keys, values, lines, lengths = in_lines(case, "cuda", dtype)
    found = attention_step(q, keys, values, None, 0.06, width, lines=lines, lengths=lengths)
    assert_within(found, by_lines(q, keys, values, lines, lengths, 0.06, width), tolerance)
