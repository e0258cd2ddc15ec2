"""Experts of a decode batch against one expert after the other."""

import pytest
import torch

from hybridstate.errors import NumericError
from hybridstate.kernels.experts import MAX_PAIRS, block_count, experts_reference, experts_step
from tests.tolerances import assert_within

CASES = [  # tokens, experts, k, D, I
    (5, 4, 2, 24, 12),
    (33, 3, 1, 40, 20),
    (40, 2, 2, 32, 16),  # over 16 tokens an expert
    (7, 300, 3, 16, 16),  # most experts idle
]


def inputs(
    tokens: int, experts: int, k: int, width: int, inner: int, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens * experts)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    chosen = torch.stack(
        [torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]
    ).to(device)
    weights = torch.rand((tokens, k), generator=generator).to(device, dtype)
    return (
        normal(tokens, width),
        normal(experts, 2 * inner, width) / width**0.5,
        normal(experts, width, inner) / inner**0.5,
        chosen,
        weights,
    )


@pytest.mark.parametrize("case", CASES)
def test_step_equals_the_twin(case: tuple[int, ...]) -> None:
    tokens, experts, k, width, inner = case
    given = inputs(tokens, experts, k, width, inner, "cpu", torch.float32)
    found = experts_step(*given, tiles=(16, 16, 16, 16))
    assert_within(found, experts_reference(*given), "kernel-f32")


@pytest.mark.parametrize("gated", [False, True])
def test_shared_expert_is_added(gated: bool) -> None:
    given = inputs(5, 4, 2, 24, 12, "cpu", torch.float32)
    joined = torch.randn((5, 30), generator=torch.Generator().manual_seed(3))
    more = joined[:, 1:25], joined[:, 0] if gated else None
    found = experts_step(*given, *more, tiles=(16, 16, 16, 16))
    assert_within(found, experts_reference(*given, *more), "kernel-f32")


@pytest.mark.parametrize("sentinel", [0, 1, 700])
def test_experts_of_other_ranks_add_nothing(sentinel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert parallelism marks them by an index from the number of experts on; transformers by just that one."""
    x, gate_up, down, chosen, weights = inputs(21, 4, 2, 24, 12, "cpu", torch.float32)
    chosen[::3, 1] = 4 + sentinel
    chosen[1::5] = 4 + sentinel
    given = (x, gate_up, down, chosen, weights)
    found = experts_step(*given, tiles=(16, 16, 16, 16))
    assert_within(found, experts_reference(*given), "kernel-f32")
    assert not found[1].any()
    nobody = experts_step(x, gate_up, down, torch.full_like(chosen, 4), weights)
    assert not nobody.any()


def test_every_routing_finds_its_blocks() -> None:
    x, gate_up, down, _, weights = inputs(40, 3, 2, 16, 16, "cpu", torch.float32)
    for chosen in (torch.zeros(40, 2), torch.full((40, 2), 2), torch.arange(80).view(40, 2) % 3):
        given = (x, gate_up, down, chosen.long(), weights)
        assert_within(experts_step(*given), experts_reference(*given), "kernel-f32")
    assert block_count(80, 3) == 3 + 77 // 16
    assert block_count(2, 300) == 2


def test_too_many_pairs_are_refused() -> None:
    given = inputs(2, 4, 2, 16, 16, "cpu", torch.float32)
    chosen = torch.zeros((MAX_PAIRS, 2), dtype=torch.int64)
    with pytest.raises(NumericError, match="token-expert pairs at once"):
        experts_step(*given[:3], chosen, chosen.float())


def test_expert_shapes_are_checked() -> None:
    x, gate_up, down, chosen, weights = inputs(2, 4, 2, 16, 16, "cpu", torch.float32)
    with pytest.raises(NumericError, match="do not fit 16 inputs"):
        experts_step(x, gate_up[:, :-1], down, chosen, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (256, 256, 8, 2048, 512), (64, 256, 8, 2304, 1024)])
def test_step_equals_the_twin_on_a_gpu(case: tuple[int, ...]) -> None:
    tokens, experts, k, width, inner = case
    given = inputs(tokens, experts, k, width, inner, "cuda", torch.bfloat16)
    found = experts_step(*given)
    assert_within(found, experts_reference(*given), "kernel-bf16")
    assert torch.equal(found, experts_step(*given))
    chosen = given[3].clone()
    chosen[::3, 0] = experts
    given = (*given[:3], chosen, given[4])
    assert_within(experts_step(*given), experts_reference(*given), "kernel-bf16")
