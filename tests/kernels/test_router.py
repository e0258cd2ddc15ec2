"""Routing in one launch against softmax or sigmoid, topk and a division."""

import pytest
import torch

from hybridstate.kernels.router import route, route_reference
from tests.tolerances import assert_within


@pytest.mark.parametrize(("experts", "top"), [(4, 2), (60, 8), (256, 8), (5, 5)])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_route_equals_the_twin(experts: int, top: int, sigmoid: bool) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn((9, experts), generator=generator)
    bias = torch.randn(experts, generator=generator) if sigmoid else None
    expected, places = route_reference(logits, top, bias=bias, factor=2.5)
    weights, chosen = route(logits, top, bias=bias, factor=2.5)
    assert torch.equal(chosen, places)
    assert_within(weights, expected, "kernel-f32")


def test_of_equals_the_lowest_expert_goes_first() -> None:
    _, chosen = route(torch.zeros(1, 6), 3)
    assert chosen.tolist() == [[0, 1, 2]]
