"""Muon for matrices beside AdamW for the rest, capturable in a CUDA graph."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

DECAY = ("A_log", "dt_bias")


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Return hidden matrices, embeddings (and head), and the rest (vectors, convolutions, decay)."""
    matrices, tables, rest = [], [], []
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:
            tables.append(parameter)
        elif parameter.dim() == 2 and min(parameter.shape) > 8:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    return matrices, tables, rest


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """Approximate the orthogonal factor of each matrix of ``update`` [n,a,b] by Newton-Schulz iterations."""
    x: Tensor = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum with orthogonalised updates, batched over matrices of one shape; ``lr`` is a tensor.

    The update has the root mean square of an Adam update (0.2), so one learning rate serves both.
    """

    def __init__(
        self, parameters: list[nn.Parameter], lr: Tensor, *, momentum: float, weight_decay: float
    ) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape].append(parameter)
        self.groups = list(groups.values())
        self.buffers = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    @torch.no_grad()
    def step(self) -> None:
        """Apply one update from the gradients."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack([p.grad for p in group])  # type: ignore[misc]
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp(buffer, self.momentum))
            update = update * (0.2 * max(group[0].shape) ** 0.5)
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - self.lr * self.weight_decay)
                parameter.sub_(change * self.lr)


def build(
    model: nn.Module, name: str, lr: float, device: torch.device, decay_rate: float = 1.0
) -> tuple[list[Muon | torch.optim.Optimizer], list[tuple[Tensor, float]]]:
    """Return the optimisers of recipe ``name`` ("adamw" or "muon") and their learning rates.

    A learning rate is a tensor and its factor: ``decay_rate`` for ``A_log`` and ``dt_bias``, 1 for the rest.
    """
    matrices, tables, rest = split(model)
    rate, faster = torch.tensor(lr, device=device), torch.tensor(lr * decay_rate, device=device)
    cuda = device.type == "cuda"
    gates = [p for n, p in model.named_parameters() if n.endswith(DECAY)]
    others = [p for p in rest if all(p is not g for g in gates)]
    groups = [
        {"params": [*tables, *others], "weight_decay": 0.0, "lr": rate},
        {"params": gates, "weight_decay": 0.0, "lr": faster},
    ]
    if name != "muon":
        groups.append({"params": matrices, "weight_decay": 0.05, "lr": rate})
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=cuda, capturable=cuda)
    rates = [(rate, 1.0), (faster, decay_rate)]
    if name == "muon":
        return [Muon(matrices, rate, momentum=0.95, weight_decay=0.05), adam], rates
    return [adam], rates
