"""A module is replaced only by a kernel that gives its numbers."""

from typing import Any

import pytest
import torch

from hybridstate.trajectories.launches import fewer_launches, replacement
from hybridstate.trajectories.model import load_model
from tests.tiny import write_checkpoint
from tests.tolerances import assert_within

FAMILIES = ("qwen3_5_moe", "kimi_linear", "qwen3_next")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_router_and_expert_passes_its_trial_and_keeps_its_numbers(
    family: str, tmp_path: Any
) -> None:
    write_checkpoint(tmp_path, family)
    model = load_model(tmp_path).model
    seen = {"norms": 0, "routers": 0, "experts": 0}
    for module in model.modules():
        kind, forward = replacement(module)
        name = type(module).__name__
        if not kind or ("L2" in name):
            continue
        assert forward is not None, f"{name} was not replaced"
        seen[kind] += 1
        if kind == "norms":
            x = torch.randn(3, 5, len(module.weight))
            more = (torch.randn_like(x),) if name.endswith("Gated") else ()
            assert_within(forward(x, *more), module(x, *more), "kernel-f32")
    assert seen["norms"] > 4
    assert seen["routers"] == seen["experts"]
    assert (seen["experts"] > 0) == any("Experts" in type(m).__name__ for m in model.modules())


def test_another_formula_stays_as_it_is() -> None:
    class OddRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(16))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (1 + x.abs().mean(-1, keepdim=True)) * self.weight

    assert replacement(OddRMSNorm()) == ("norms", None)


def test_nothing_is_replaced_without_a_gpu(tmp_path: Any) -> None:
    write_checkpoint(tmp_path, "qwen3_5_moe")
    model = load_model(tmp_path).model
    with fewer_launches(model) as replaced:
        assert replaced.norms == replaced.routers == replaced.experts == 0
    assert not any("forward" in module.__dict__ for module in model.modules())
