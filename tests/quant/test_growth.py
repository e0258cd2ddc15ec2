"""NVFP4 written at every update: the state grows without bound where decay is weak, and settles elsewhere."""

import torch

from hybridstate.quant.formats import format_named

UPDATES = 2048
SIZE = 64


def test_nvfp4_grows_only_where_decay_is_weak() -> None:
    """A synthetic gated delta rule: one head, correlated keys of norm 1, strengths uniform in [0, 1)."""
    low = format_named("nvfp4").reconstruct
    growth = {}
    for decay in (0.9999, 0.99):
        generator = torch.Generator().manual_seed(1)
        mean = torch.randn(SIZE, generator=generator)
        exact, stored = torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE)
        sizes = []
        for _ in range(UPDATES):
            key = torch.nn.functional.normalize(
                torch.randn(SIZE, generator=generator) + mean, dim=0
            )
            value = torch.randn(SIZE, generator=generator)
            strength = torch.rand((), generator=generator)

            def step(
                state: torch.Tensor,
                a: float = decay,
                k: torch.Tensor = key,
                v: torch.Tensor = value,
                b: torch.Tensor = strength,
            ) -> torch.Tensor:
                return a * state + b * torch.outer(k, v - k @ (a * state))

            exact, stored = step(exact), low(step(stored))
            sizes.append(float(stored.norm() / exact.norm()))
        growth[decay] = (sizes[UPDATES // 2], sizes[-1])
    half, last = growth[0.9999]
    assert half > 4, growth
    assert last > 5 * half, growth
    assert all(0.8 < size < 1.6 for size in growth[0.99]), growth
