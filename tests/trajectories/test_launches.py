"""A module is replaced only by a kernel that gives its numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridstate.trajectories.launches import agree, fewer_launches, replacement
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


class _Norm(torch.nn.Module):
    """RMS norm of what `change` makes of the input."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], weight: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((64,), weight))
        self.eps = 1e-6
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.change(x)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class OddRMSNorm(_Norm):
    """Found by its name."""


class OddTopKRouter(torch.nn.Module):
    """A softmax or sigmoid router with every odd thing that routers do."""

    def __init__(self, kind: str, size: float = 0.1, *, hidden: bool = False) -> None:
        super().__init__()
        draw = torch.randn((32, 24), generator=torch.Generator().manual_seed(1))
        self.weight = torch.nn.Parameter(size * draw)
        self.top_k = 4
        self.kind = kind
        if not hidden:  # what attributes tell is not left to the trial
            self.norm_topk_prob = kind != "plain"
            self.n_group, self.topk_group = (8, 4) if kind == "groups" else (1, 1)
        if kind in ("groups", "sigmoid"):
            self.e_score_correction_bias = torch.zeros(32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x @ self.weight.T
        if self.kind == "capped":
            logits = 5 * (logits / 5).tanh()
        if self.kind in ("groups", "sigmoid"):
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(-1)
        rank = scores.clone()
        if self.kind == "groups":
            strength = scores.view(-1, 8, 4).topk(2).values.sum(-1)
            worst = strength.topk(4, largest=False).indices
            rank.view(-1, 8, 4)[torch.arange(len(x))[:, None], worst] = -1.0
        chosen = rank.topk(self.top_k).indices
        weights = scores.gather(-1, chosen)
        if self.kind != "plain":
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen


class OddExperts(torch.nn.Module):
    """Experts with an activation of their own between projections of any size."""

    def __init__(
        self, activation: Callable[[torch.Tensor], torch.Tensor], size: float, *, named: bool
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.gate_up_proj = torch.nn.Parameter(size * torch.randn((4, 32, 16), generator=generator))
        self.down_proj = torch.nn.Parameter(torch.randn((4, 16, 16), generator=generator))
        self.activation = activation
        if named:
            self.act_fn = activation

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = (self.gate_up_proj[chosen] @ x[:, None, :, None]).squeeze(-1).chunk(2, -1)
        y = self.down_proj[chosen] @ (self.activation(gate) * up)[..., None]
        return (y.squeeze(-1) * weights[..., None]).sum(1)


silu = torch.nn.functional.silu


@pytest.mark.parametrize(
    ("module", "replaced"),
    [
        (OddRMSNorm(lambda x: x), True),
        (OddRMSNorm(lambda x: x / (1 + x.abs())), False),
        (OddRMSNorm(lambda x: x.clamp(-20, 20)), False),
        (OddRMSNorm(lambda x: x - x.mean(-1, keepdim=True)), False),
        (OddRMSNorm(lambda x: x.abs(), weight=0.0), False),  # zero weights hide any formula
        (OddRMSNorm(lambda x: 1e-2 * x), False),  # another epsilon
        (OddRMSNorm(lambda x: x[:, 0, 0]), False),  # takes something else
        (OddTopKRouter("softmax"), True),
        (OddTopKRouter("sigmoid"), True),
        (OddTopKRouter("plain", 8.0), False),
        (OddTopKRouter("plain", 8.0, hidden=True), False),  # one expert has all weight
        (OddTopKRouter("groups"), False),
        (OddTopKRouter("groups", hidden=True), False),  # four groups of eight
        (OddTopKRouter("capped", 0.01, hidden=True), False),
        (OddTopKRouter("softmax", 0.0), False),  # every choice is a tie
        (OddExperts(silu, 0.3, named=True), True),
        (OddExperts(silu, 0.3, named=False), True),
        (OddExperts(torch.nn.functional.gelu, 0.3, named=False), False),
        (OddExperts(torch.nn.functional.gelu, 1e-3, named=True), False),  # half of the input, both
        (OddExperts(lambda x: silu(x.clamp(max=7)), 0.3, named=False), False),
    ],
)
def test_modules_that_agree_on_ordinary_inputs_alone_stay_as_they_are(
    module: torch.nn.Module, replaced: bool
) -> None:
    held = {name: x.clone() for name, x in module.named_parameters()}
    assert (replacement(module)[1] is not None) == replaced
    assert all(torch.equal(held[name], x) for name, x in module.named_parameters())


def test_rows_that_overflow_do_not_count_but_some_have_to() -> None:
    x = torch.ones(4, 3)
    x[:3] = float("inf")
    assert agree(x, x.clone())
    assert not agree(x[:3], x[:3].clone())
    assert not agree(torch.ones(3, 3), x[:3])
    assert not agree(x[:, :2], x)
    assert not agree(x, x.clone(), decided=torch.tensor([True, True, True, False]))
    close = torch.ones(4, 3) + 1e-2
    assert not agree(close, torch.ones(4, 3))
    assert agree(close, torch.ones(4, 3), dtype=torch.bfloat16)


def test_nothing_is_replaced_without_a_gpu(tmp_path: Any) -> None:
    write_checkpoint(tmp_path, "qwen3_5_moe")
    model = load_model(tmp_path).model
    with fewer_launches(model) as replaced:
        assert replaced.norms == replaced.routers == replaced.experts == 0
    assert not any("forward" in module.__dict__ for module in model.modules())
